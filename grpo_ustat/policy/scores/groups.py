"""Score norms and leave-one-out gradient of one prompt's group, and products between groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from grpo_ustat.policy.loading import Policy
from grpo_ustat.policy.scores.rollouts import score_rollouts
from grpo_ustat.policy.scores.sketch import Sketch
from grpo_ustat.records import Rollouts


@dataclass(frozen=True)
class GroupScores:
    """Score norms and gradient of one prompt's group.

    Attributes:
        sq_norm_G: squared score norms q, float64.
        ghat_sq: ||ghat||^2 of its leave-one-out gradient, exact.
        ghat_R: sketch of ghat, exact where the model has no more parameters than R.
    """

    sq_norm_G: np.ndarray
    ghat_sq: float
    ghat_R: np.ndarray


def group_scores(
    policy: Policy,
    rollouts: Rollouts,
    p: int,
    weights_G: np.ndarray,
    temperature: float,
    sketch: Sketch,
    at_once: int,
) -> GroupScores:
    """Scores of the completions of prompt `p`.

    Args:
        policy, rollouts: whose completions.
        p: the prompt's place in the rollouts.
        weights_G: w with `ghat = sum_i w_i s_i`, see `pool_gradient_weights`.
        temperature: divides the logits.
        sketch: of ghat.
        at_once: completions of a pass of the model.
    """
    size = len(weights_G)
    norms, ghat = [], {}
    for part in np.split(np.arange(size), range(at_once, size, at_once)):
        scores = score_rollouts(
            policy, rollouts, p * size + part, temperature, weights_KB=weights_G[None, part]
        )
        norms.append(scores.sq_norm_B.cpu().numpy())
        for name, value in scores.gradients_K[0].items():
            ghat[name] = ghat[name] + value if name in ghat else value
    ghat_sq = sum(  # no copy in float64
        float(torch.linalg.vector_norm(value, dtype=torch.float64)) ** 2 for value in ghat.values()
    )
    return GroupScores(np.concatenate(norms), ghat_sq, sketch.of(ghat).double().cpu().numpy())


def gradient_gram(groups_P: Sequence[GroupScores]) -> np.ndarray:
    """<ghat_x, ghat_y>, [P, P]: unbiased from sketches between prompts, exact on the diagonal."""
    ghat_PR = np.stack([group.ghat_R for group in groups_P])
    gram_PP = ghat_PR @ ghat_PR.T
    np.fill_diagonal(gram_PP, [group.ghat_sq for group in groups_P])
    return gram_PP
