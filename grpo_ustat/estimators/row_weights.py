r"""The weights of the rows of a loss: an update's gradient is `sum_i W_i s_i`, s_i row i's score.

A row is a completion of L_i tokens, its score `s_i = sum_t grad log pi(token t | before)`. At the
first update of a batch every importance ratio is 1, and a loss whose tokens all weigh the same has

    W_i = A_i w_i        A_i  advantage, a rule of `estimators.baselines`
                         w_i  weight of every token of the row, `token_weights`

n rows, the sums over those that count (a row that is left out has L_i = 0 and W_i = 0):

    loss_type        w_i                          source
    sum              1/n                          the paper, Algorithm 1; verl seq-mean-token-sum
    luspo            1/n                          TRL 1.16
    dr_grpo          1/(n L_max)                  Liu et al. 2025; verl seq-mean-token-sum-norm
    grpo, sapo       1/(n L_i)                    Shao et al. 2024; verl seq-mean-token-mean
    dapo, cispo,     1/sum_j L_j                  Yu et al. 2025; verl token-mean
      vespo
    bnpo             1/(M sum_{j in m(i)} L_j)    TRL 1.16: M micro-batches, m(i) that of row i

The weights of the first four depend on the row alone, those of the last two lines on all rows: with
`coupled` ones the gradient is no mean over prompts, and with `sum`, `luspo` and `dr_grpo` alone it
has the direction of the advantage's own estimate.
"""

from __future__ import annotations

import numpy as np

from grpo_ustat.records import Array, Integers

LOSS_TYPES = ("sum", "dr_grpo", "dapo", "grpo", "bnpo", "luspo", "sapo", "cispo", "vespo")
BY_TOKENS_OF_ALL = ("dapo", "cispo", "vespo")
COUPLED = (*BY_TOKENS_OF_ALL, "bnpo")  # loss types whose w_i depends on other rows


def token_weights(
    loss_type: str,
    lengths_N: Integers,
    num_rollouts: int,
    num_tokens: int,
    max_completion_length: int,
    micro_batch_size: int | None = None,
) -> Array:
    """w_i of the rows of these lengths, [N].

    Args:
        loss_type: one of `LOSS_TYPES`.
        lengths_N: L_i in tokens, 0 of a row that is left out.
        num_rollouts, num_tokens: n and the sum of L over the whole update.
        max_completion_length: L_max, tokens after which a completion is cut.
        micro_batch_size: rows of a micro-batch of `bnpo`, which divides n; the rows are consecutive
            and begin a micro-batch.

    >>> token_weights("grpo", np.array([2, 4]), 2, 6, 8).tolist()
    [0.25, 0.125]
    >>> token_weights("dapo", np.array([2, 4]), 2, 6, 8).tolist() == [1 / 6, 1 / 6]
    True
    >>> token_weights("bnpo", np.array([2, 4]), 2, 6, 8, micro_batch_size=1).tolist()
    [0.25, 0.125]
    """
    length_N = np.asarray(lengths_N, dtype=np.float64)
    ones_N = np.ones(len(length_N))
    if loss_type in ("sum", "luspo"):
        return ones_N / num_rollouts
    if loss_type == "dr_grpo":
        return ones_N / (num_rollouts * max_completion_length)
    if loss_type in ("grpo", "sapo"):
        return 1 / (num_rollouts * np.maximum(length_N, 1))
    if loss_type in BY_TOKENS_OF_ALL:
        return ones_N / max(num_tokens, 1)
    assert loss_type == "bnpo" and micro_batch_size is not None
    tokens_M1 = length_N.reshape(-1, micro_batch_size).sum(axis=1, keepdims=True)
    weight_M1 = micro_batch_size / num_rollouts / np.maximum(tokens_M1, 1)
    return np.repeat(weight_M1, micro_batch_size)
