r"""Weights of a loss's rows: an update's gradient is `sum_i W_i s_i`, s_i the score of row i.

A row is a completion of L_i tokens, its score `s_i = sum_t grad log pi(token t | before)`. At the
first update of a batch every importance ratio is 1, and a loss whose tokens all weigh the same has

    W_i = A_i w_i        A_i  advantage, a baseline of `estimators.baselines`
                         w_i  weight of every token of the row, `token_weights`

With n rows, and sums over those that count (an excluded row has L_i = 0 and W_i = 0):

    loss_type        w_i                          source
    sum              1/n                          the paper, Algorithm 1; verl seq-mean-token-sum
    luspo            1/n                          TRL 1.16
    dr_grpo          1/(n L_max)                  Liu et al. 2025; verl seq-mean-token-sum-norm
    grpo, sapo       1/(n L_i)                    Shao et al. 2024; verl seq-mean-token-mean
    dapo, cispo,     1/sum_j L_j                  Yu et al. 2025; verl token-mean
      vespo
    bnpo             1/(M sum_{j in m(i)} L_j)    TRL 1.16: M micro-batches, m(i) that of row i

The weights of the first four lines depend only on the row, those of the last two on all rows: with
these `COUPLED` weights the gradient is not a mean over prompts. Only with `sum`, `luspo` and
`dr_grpo` it has the direction of the plain estimate with the same advantages.

A filter removes rows from n and from every sum: rows of groups whose rewards are all equal, of
groups of small reward variance, or of small advantage (`rows_that_count`). It also couples rows,
because n depends on all of them; but groups drawn again until their rewards differ are independent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from grpo_ustat.estimators.baselines import BASELINES, advantages
from grpo_ustat.estimators.token_weights import ALL, PENALTY, TokenWeights, by_kind
from grpo_ustat.records import Array, BaselineContext, Integers, Mask

LOSS_TYPES = ("sum", "dr_grpo", "dapo", "grpo", "bnpo", "luspo", "sapo", "cispo", "vespo")
BY_TOKENS_OF_ALL = ("dapo", "cispo", "vespo")
# Loss types whose w_i depends on other rows.
COUPLED = (*BY_TOKENS_OF_ALL, "bnpo")
KEEP, DROP, REPLACE = ZERO_VARIANCE = ("keep", "drop", "replace")
# Baselines whose advantages are 0 if all rewards of a group are equal.
ZERO_IF_EQUAL = ("leave_one_out", "group_mean")


@dataclass(frozen=True)
class RowFilter:
    """Filter of the rows of an update that count, see `rows_that_count`; by default all count."""

    # Treatment of groups of equal rewards: keep, drop, or replace, which draws groups until their
    # rewards differ (dynamic sampling of DAPO, Yu et al. 2025).
    zero_variance_groups: str = KEEP
    # p, the share of the summed reward variance that the counted groups have.
    reward_variance_share: float = 1.0
    # Least |A|.
    advantage_threshold: float = 0.0

    @property
    def couples(self) -> bool:
        """True if the number of rows that count depends on the rewards of all."""
        dropped = self.zero_variance_groups == DROP or self.reward_variance_share < 1
        return dropped or self.advantage_threshold > 0

    @property
    def replaces(self) -> bool:
        """True if the update's groups are drawn until their rewards differ."""
        return self.zero_variance_groups == REPLACE


def rows_that_count(rows: RowFilter, rewards_PG: Array, advantage_PG: Array) -> Mask:
    """Return the rows of an update that count, [P, G]; the others are in no sum and not in n.

        drop                      Z_xi != Z_xj for some i, j
        reward_variance_share p   x is of the smallest set S, of the largest reward variances V_x,
                                  with sum_{x in S} V_x >= p sum_x V_x
        advantage_threshold a     |A_xi| >= a

    The second is the filter of RAGEN-2 (arXiv 2604.06268, top-p); among groups of equal variance
    the earlier ones of the update come first, whose order is random. If there is no variance, no
    row counts. With `replace` all rows count here, because its groups were drawn again.

    >>> rewards = np.array([[1.0, 1.0], [0.0, 1.0], [0.0, 4.0]])
    >>> rows_that_count(RowFilter("drop"), rewards, rewards)[:, 0].tolist()
    [False, True, True]
    >>> rows_that_count(RowFilter(reward_variance_share=0.9), rewards, rewards)[:, 0].tolist()
    [False, False, True]
    >>> rows_that_count(RowFilter(advantage_threshold=1.0), rewards, rewards).tolist()
    [[True, True], [False, True], [False, True]]
    """
    counts_PG = np.abs(advantage_PG) >= rows.advantage_threshold
    mixed_P = mixed_groups(rewards_PG)
    if rows.zero_variance_groups == DROP:
        counts_PG &= mixed_P[:, None]
    if rows.reward_variance_share < 1:
        # Sorting and rounding make groups of the same rewards equal in any order.
        variance_P = np.sort(rewards_PG, axis=1).var(axis=1) * mixed_P
        total = max(float(variance_P.sum()), np.finfo(np.float64).tiny)
        share_P = (variance_P / total).round(12)
        order_P = np.argsort(-share_P, kind="stable")
        before_P = np.empty(len(share_P))
        before_P[order_P] = np.cumsum(share_P[order_P]) - share_P[order_P]
        enough = rows.reward_variance_share - 1e-9
        counts_PG &= ((before_P < enough) & mixed_P)[:, None]
    return counts_PG


def mixed_groups(rewards: Array) -> Mask:
    """Return True for groups whose rewards are not all equal, over the last axis."""
    return (rewards != rewards[..., :1]).any(axis=-1)


def token_weights(
    loss_type: str,
    lengths_N: Integers,
    max_completion_length: int,
    micro_batch_size: int | None = None,
    order_N: Integers | None = None,
    counts_N: Mask | None = None,
) -> Array:
    """Compute w_i of all rows of an update, [N]; 0 for an excluded row or one that does not count.

    Args:
        loss_type: one of `LOSS_TYPES`.
        lengths_N: L_i in tokens, 0 for an excluded row.
        max_completion_length: L_max, tokens after which a completion is cut.
        micro_batch_size: rows of a micro-batch of `bnpo`; it divides n.
        order_N: rows in the order in which micro-batches are cut from them; None: unchanged.
        counts_N: rows that count; None: all. It must be None for `bnpo`.

    >>> token_weights("grpo", np.array([2, 4]), 8).tolist()
    [0.25, 0.125]
    >>> token_weights("dapo", np.array([2, 4]), 8).tolist() == [1 / 6, 1 / 6]
    True
    >>> token_weights("bnpo", np.array([2, 4]), 8, micro_batch_size=1).tolist()
    [0.25, 0.125]
    >>> token_weights("sum", np.array([2, 4]), 8, counts_N=np.array([False, True])).tolist()
    [0.0, 1.0]
    """
    length_N, count = np.asarray(lengths_N, dtype=np.float64), len(lengths_N)
    if counts_N is not None:
        length_N, count = length_N * counts_N, max(1, int(counts_N.sum()))
    if loss_type in ("sum", "luspo"):
        weight_N = np.full(len(length_N), 1 / count)
    elif loss_type == "dr_grpo":
        weight_N = np.full(len(length_N), 1 / (count * max_completion_length))
    elif loss_type in ("grpo", "sapo"):
        weight_N = 1 / (count * np.maximum(length_N, 1))
    elif loss_type in BY_TOKENS_OF_ALL:
        weight_N = np.full(len(length_N), 1 / max(length_N.sum(), 1.0))
    else:
        assert loss_type == "bnpo" and micro_batch_size is not None and counts_N is None
        rows_MB = (np.arange(count) if order_N is None else order_N).reshape(-1, micro_batch_size)
        tokens_M1 = np.maximum(length_N[rows_MB].sum(axis=1, keepdims=True), 1)
        weight_N = np.zeros(count)
        weight_N[rows_MB] = micro_batch_size / count / tokens_M1
    return weight_N * (length_N > 0)


@dataclass(frozen=True)
class Loss:
    """Loss: it turns advantages and lengths into the weights of an update's rows."""

    # Name of the objective.
    name: str
    # Baseline of its advantages, a key of `BASELINES`, with the baseline's options.
    baseline: str
    options: Mapping[str, float] = field(hash=False)
    # One of `LOSS_TYPES`.
    loss_type: str
    # L_max, tokens.
    max_completion_length: int
    # Rows of a micro-batch of `bnpo`.
    micro_batch_size: int | None = None
    # True if completions that did not end are excluded; they count in n and in the advantages.
    mask_truncated_completions: bool = False
    rows: RowFilter = RowFilter()
    # Weights of the tokens of a row, see `estimators.token_weights`; None: all are 1, as at the
    # first update of a batch, where every importance ratio is 1 and no penalty counts.
    tokens: TokenWeights | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of vectors that a row has."""
        return (ALL,) if self.tokens is None else self.tokens.kinds

    @property
    def beta(self) -> float:
        """The coefficient of a penalty in the loss, 0 without one."""
        return self.tokens.beta if PENALTY in self.kinds and self.tokens is not None else 0.0

    @property
    def couples_prompts(self) -> bool:
        """True if a row's weight depends on other groups, so the gradient is no prompt mean."""
        baseline = BASELINES[self.baseline]
        return self.rows.couples or self.loss_type in COUPLED or baseline.couples_prompts

    def scale(self, group_size: int) -> float | None:
        """Return c with E ghat = c grad J for any policy and rewards; None for other losses.

        If groups are replaced and a share K is kept, E ghat = c grad J / K. If the baseline is 0 on
        the other groups, the mean of a kept group is g_x / (1 - q_x), and its prompt has the
        distribution rho(x) (1 - q_x) / K, see `estimators.dynamic_sampling`.
        """
        divisor = {"sum": 1, "luspo": 1, "dr_grpo": self.max_completion_length}.get(self.loss_type)
        if divisor is None or self.couples_prompts or self.mask_truncated_completions:
            return None
        if self.rows.replaces and self.baseline not in ZERO_IF_EQUAL:
            return None
        if self.tokens is not None and not self.tokens.unbiased:
            return None
        if self.baseline == "group_mean":
            return (group_size - 1) / group_size / divisor
        return 1 / divisor if BASELINES[self.baseline].unbiased else None

    def counted_lengths(self, lengths: Integers, ended: Mask | None = None) -> Integers:
        """Return L of each row, 0 for excluded rows."""
        return lengths * ended if self.mask_truncated_completions and ended is not None else lengths

    def length_factors(self, lengths: Integers, ended: Mask | None = None) -> Array:
        """Return the part of n w_i that depends only on the row, of the lengths' shape."""
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
    """Compute W of every kind of vector of every row of an update, [K, P, G].

    The update's gradient is the sum of W times the vectors. For a loss whose tokens all weigh 1 the
    only kind is the row's score.

    Args:
        rewards_PG: rewards of all prompts of the update.
        context: inputs of the baseline of advantages, and the rows' lengths.
        ended_PG: True for a completion that ended; None: all did.
        order_N: see `token_weights`.

    >>> loss = Loss("dapo", "group_mean", {}, "dapo", 8)
    >>> context = BaselineContext(lengths_PG=np.array([[1, 3], [2, 2]]))
    >>> row_weights(loss, np.array([[0.0, 1.0], [1.0, 1.0]]), context)[0].tolist()
    [[-0.0625, 0.0625], [0.0, 0.0]]
    """
    assert context.lengths_PG is not None
    advantage_PG = advantages(loss.baseline, rewards_PG, context, loss.options)
    counts_N = None
    if loss.rows.couples:
        counts_N = rows_that_count(loss.rows, rewards_PG, advantage_PG).ravel()
    weight_N = token_weights(
        loss.loss_type, loss.counted_lengths(context.lengths_PG, ended_PG).ravel(),
        loss.max_completion_length, loss.micro_batch_size, order_N, counts_N,
    )  # fmt: skip
    return by_kind(advantage_PG, loss.kinds, loss.beta) * weight_N.reshape(rewards_PG.shape)
