r"""The objective of Algorithm 1 (paper, section 1): sum over tokens, constant divisor, no ratio.

    surrogate(theta) = 1/n sum_i A_i log pi_theta(y_i | x_i),    n = P G of the whole step

Its gradient at the sampling policy is `1/(P G) sum s_i A_i`, the estimator that `mse` studies.
The divisor is an argument: a micro-batch or a rank holds only part of the sum.
"""

from __future__ import annotations

import torch


def surrogate(
    logprob_B: torch.Tensor, advantage_B: torch.Tensor, num_rollouts: int
) -> torch.Tensor:
    """The part of the surrogate that these B completions make up; a scalar to maximise.

    Args:
        logprob_B: log-probabilities of whole completions, sums over tokens.
        advantage_B: their advantages, constants.
        num_rollouts: n of the whole step.
    """
    assert logprob_B.shape == advantage_B.shape
    return (advantage_B.detach() * logprob_B).sum() / num_rollouts
