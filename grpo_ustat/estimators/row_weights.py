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

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from grpo_ustat.estimators.baselines import BASELINES, advantages
from grpo_ustat.records import Array, BaselineContext, Integers, Mask

LOSS_TYPES = ("sum", "dr_grpo", "dapo", "grpo", "bnpo", "luspo", "sapo", "cispo", "vespo")
BY_TOKENS_OF_ALL = ("dapo", "cispo", "vespo")
COUPLED = (*BY_TOKENS_OF_ALL, "bnpo")  # loss types whose w_i depends on other rows


def token_weights(
    loss_type: str,
    lengths_N: Integers,
    max_completion_length: int,
    micro_batch_size: int | None = None,
    order_N: Integers | None = None,
) -> Array:
    """w_i of all n rows of an update, [N]; 0 of a row that is left out.

    Args:
        loss_type: one of `LOSS_TYPES`.
        lengths_N: L_i in tokens, 0 of a row that is left out.
        max_completion_length: L_max, tokens after which a completion is cut.
        micro_batch_size: rows of a micro-batch of `bnpo`; it divides n.
        order_N: rows in the order in which micro-batches are cut from them; None: as they are.

    >>> token_weights("grpo", np.array([2, 4]), 8).tolist()
    [0.25, 0.125]
    >>> token_weights("dapo", np.array([2, 4]), 8).tolist() == [1 / 6, 1 / 6]
    True
    >>> token_weights("bnpo", np.array([2, 4]), 8, micro_batch_size=1).tolist()
    [0.25, 0.125]
    """
    length_N, count = np.asarray(lengths_N, dtype=np.float64), len(lengths_N)
    if loss_type in ("sum", "luspo"):
        weight_N = np.full(count, 1 / count)
    elif loss_type == "dr_grpo":
        weight_N = np.full(count, 1 / (count * max_completion_length))
    elif loss_type in ("grpo", "sapo"):
        weight_N = 1 / (count * np.maximum(length_N, 1))
    elif loss_type in BY_TOKENS_OF_ALL:
        weight_N = np.full(count, 1 / max(length_N.sum(), 1.0))
    else:
        assert loss_type == "bnpo" and micro_batch_size is not None
        rows_MB = (np.arange(count) if order_N is None else order_N).reshape(-1, micro_batch_size)
        tokens_M1 = np.maximum(length_N[rows_MB].sum(axis=1, keepdims=True), 1)
        weight_N = np.zeros(count)
        weight_N[rows_MB] = micro_batch_size / count / tokens_M1
    return weight_N * (length_N > 0)


@dataclass(frozen=True)
class Loss:
    """A loss at the first update of a batch, all importance ratios being 1 and no penalty counting.

    Attributes:
        name: the preset's, or `own`.
        rule, options: of its advantages, a key of `BASELINES` with its options.
        loss_type: one of `LOSS_TYPES`.
        max_completion_length: L_max.
        micro_batch_size: rows of a micro-batch of `bnpo`.
        mask_truncated_completions: whether those that did not end are left out; they count in n and
            in the advantages.
    """

    name: str
    rule: str
    options: Mapping[str, float] = field(hash=False)
    loss_type: str
    max_completion_length: int
    micro_batch_size: int | None = None
    mask_truncated_completions: bool = False

    @property
    def couples_prompts(self) -> bool:
        """Whether a row's weight depends on other groups: the gradient is no mean over prompts."""
        return self.loss_type in COUPLED or BASELINES[self.rule].couples_prompts

    def scale(self, group_size: int) -> float | None:
        """c with E ghat = c grad J for any policy and rewards; None of other losses."""
        divisor = {"sum": 1, "luspo": 1, "dr_grpo": self.max_completion_length}.get(self.loss_type)
        if divisor is None or self.couples_prompts or self.mask_truncated_completions:
            return None
        if self.rule == "group_mean":
            return (group_size - 1) / group_size / divisor
        return 1 / divisor if BASELINES[self.rule].unbiased else None

    def counted_lengths(self, lengths: Integers, ended: Mask | None = None) -> Integers:
        """L of each row, 0 of those that are left out."""
        return lengths * ended if self.mask_truncated_completions and ended is not None else lengths

    def length_factors(self, lengths: Integers, ended: Mask | None = None) -> Array:
        """The part of n w_i that depends on the row alone, of the lengths' shape."""
        counted = self.counted_lengths(lengths, ended)
        if self.loss_type in ("grpo", "sapo"):
            return (counted > 0) / np.maximum(counted, 1)
        constant = self.max_completion_length if self.loss_type == "dr_grpo" else 1
        return (counted > 0) / constant


def row_weights(
    loss: Loss,
    rewards_PG: Array,
    context: BaselineContext,
    ended_PG: Mask | None = None,
    order_N: Integers | None = None,
) -> Array:
    """W of every row of an update, [P, G]: its gradient is the sum of W s over the rows.

    Args:
        loss: which.
        rewards_PG: rewards of all prompts of the update.
        context: what the rule of advantages reads, and the rows' lengths.
        ended_PG: whether each completion ended; None: all did.
        order_N: see `token_weights`.

    >>> loss = Loss("dapo", "group_mean", {}, "dapo", 8)
    >>> context = BaselineContext(lengths_PG=np.array([[1, 3], [2, 2]]))
    >>> row_weights(loss, np.array([[0.0, 1.0], [1.0, 1.0]]), context).tolist()
    [[-0.0625, 0.0625], [0.0, 0.0]]
    """
    assert context.lengths_PG is not None
    weight_N = token_weights(
        loss.loss_type, loss.counted_lengths(context.lengths_PG, ended_PG).ravel(),
        loss.max_completion_length, loss.micro_batch_size, order_N,
    )  # fmt: skip
    advantage_PG = advantages(loss.rule, rewards_PG, context, loss.options)
    return advantage_PG * weight_N.reshape(rewards_PG.shape)
