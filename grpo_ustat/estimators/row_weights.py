r"""Row weights W_i of a loss; the gradient of an update is `sum_i W_i s_i` with row scores s_i.

A row is a completion of L_i tokens with the score `s_i = sum_t grad log pi(token t | before)`. At
the first update of a batch, every importance ratio is 1, and all tokens of a row have the same
weight w_i. Then

    W_i = A_i w_i        A_i: advantage, from a baseline of `estimators.baselines`
                         w_i: weight of every token of the row, from `token_weights`

The weights w_i depend on the type of the loss. In the table, n is the number of rows that count,
and sums run over these rows. A truncated completion can be masked; it still counts in n, but it has
L_i = 0 and W_i = 0.

    loss_type        w_i                          source
    sum              1/n                          the paper, Algorithm 1; verl seq-mean-token-sum
    luspo            1/n                          TRL 1.16
    dr_grpo          1/(n L_max)                  Liu et al. 2025; verl seq-mean-token-sum-norm
    grpo, sapo       1/(n L_i)                    Shao et al. 2024; verl seq-mean-token-mean
    dapo, cispo,     1/sum_j L_j                  Yu et al. 2025; verl token-mean
      vespo
    bnpo             1/(M sum_{j in m(i)} L_j)    TRL 1.16; M micro-batches, row i is in m(i)

The weights in the first four lines depend only on the row itself. The weights in the last two lines
depend on other rows (`COUPLED`), so the gradient is not a mean over prompts. Only `sum`, `luspo`
and `dr_grpo` give a gradient that is a multiple of `sum_i A_i s_i`.

A filter removes rows from n and from every sum: groups with equal rewards, or groups with a small
reward variance (`rows_that_count`). With a filter, every weight depends on all rows, because n
does. This is not the case if groups with equal rewards are replaced by new draws: groups then
remain independent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from grpo_ustat.estimators.baselines import BASELINES, advantages
from grpo_ustat.estimators.token_weights import ALL, PENALTY, TokenWeights, by_kind
from grpo_ustat.records import Array, BaselineContext, Integers, Mask

# Loss types; the table above gives their weights.
LOSS_TYPES = ("sum", "dr_grpo", "dapo", "grpo", "bnpo", "luspo", "sapo", "cispo", "vespo")
BY_TOKENS_OF_ALL = ("dapo", "cispo", "vespo")
# Loss types whose w_i depends on other rows.
COUPLED = (*BY_TOKENS_OF_ALL, "bnpo")
KEEP, DROP, REPLACE = ZERO_VARIANCE = ("keep", "drop", "replace")
# Baselines whose advantages are 0 if all rewards of a group are equal.
ZERO_IF_EQUAL = ("leave_one_out", "group_mean")


@dataclass(frozen=True)
class RowFilter:
    """Filter that selects which rows of an update count; by default all rows count.

    See `rows_that_count`.
    """

    # Treatment of groups with equal rewards: keep, drop or replace. With replace, groups are drawn
    # until their rewards differ (dynamic sampling in DAPO, Yu et al. 2025).
    zero_variance_groups: str = KEEP
    # Share p of the total reward variance: only the groups with the largest reward variances count,
    # as many as needed to reach this share.
    reward_variance_share: float = 1.0

    @property
    def couples(self) -> bool:
        """True if a filter is used, so that the number of rows that count depends on all rows."""
        return self.zero_variance_groups == DROP or self.reward_variance_share < 1

    @property
    def replaces(self) -> bool:
        """True if the update's groups are drawn until their rewards differ."""
        return self.zero_variance_groups == REPLACE


def rows_that_count(rows: RowFilter, rewards_PG: Array) -> Mask:
    """Return the rows of an update that count, [P, G]; other rows are excluded from n and all sums.

    Row i of group x, with reward Z_xi, counts if its group satisfies the condition of each filter
    in use:

        drop                      Rewards Z_xi and Z_xj differ for some i and j.
        reward_variance_share p   x is in S, the smallest set of groups with the largest reward
                                  variances V_x for which sum_{x in S} V_x >= p sum_x V_x.

    The second filter is the top-p filter of RAGEN-2 (arXiv 2604.06268). Among groups with equal
    variances, those that come first in the update are preferred; this order is random. If no group
    has any variance, this filter excludes all rows. With `replace`, groups with equal rewards have
    already been replaced, so no group is excluded here.

    >>> rewards = np.array([[1.0, 1.0], [0.0, 1.0], [0.0, 4.0]])
    >>> rows_that_count(RowFilter("drop"), rewards)[:, 0].tolist()
    [False, True, True]
    >>> rows_that_count(RowFilter(reward_variance_share=0.9), rewards)[:, 0].tolist()
    [False, False, True]
    """
    counts_PG = np.ones(rewards_PG.shape, dtype=bool)
    mixed_P = mixed_groups(rewards_PG)
    if rows.zero_variance_groups == DROP:
        counts_PG &= mixed_P[:, None]
    if rows.reward_variance_share < 1:
        # Groups with the same rewards in a different order must have the same variance. Rewards are
        # therefore sorted, and shares are rounded.
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
    """Return True for each group whose rewards, along the last axis, are not all equal."""
    return (rewards != rewards[..., :1]).any(axis=-1)


def token_weights(
    loss_type: str,
    lengths_N: Integers,
    max_completion_length: int,
    micro_batch_size: int | None = None,
    order_N: Integers | None = None,
    counts_N: Mask | None = None,
) -> Array:
    """Compute w_i for all N rows of an update; 0 for a row that is masked or does not count.

    Args:
        loss_type: one of `LOSS_TYPES`.
        lengths_N: completion lengths L_i in tokens, 0 for a masked row.
        max_completion_length: maximum completion length in tokens, L_max.
        micro_batch_size: number of rows per micro-batch, a divisor of n; only for `bnpo`.
        order_N: row indices, in the order in which rows are split into micro-batches; None for the
            order of `lengths_N`.
        counts_N: True for rows that count; None if all rows count. Must be None for `bnpo`.

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
    """Settings of a loss that determine the row weights of an update."""

    # Name of the objective.
    name: str
    # Baseline of the advantages, a key of `BASELINES`, with its options.
    baseline: str
    options: Mapping[str, float] = field(hash=False)
    # One of `LOSS_TYPES`.
    loss_type: str
    # Maximum completion length in tokens, L_max.
    max_completion_length: int
    # Number of rows per micro-batch; only for `bnpo`.
    micro_batch_size: int | None = None
    # True if truncated completions have weight 0; they still count in n and in the advantages.
    mask_truncated_completions: bool = False
    # Filter that selects which rows count.
    rows: RowFilter = RowFilter()
    # Definition of the token weights for completions that were not sampled from the current policy
    # or have a KL penalty; see `estimators.token_weights`. None if all token weights are 1, as at
    # the first update of a batch without a KL penalty.
    tokens: TokenWeights | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of vectors that each row adds to the gradient; see `estimators.token_weights`."""
        return (ALL,) if self.tokens is None else self.tokens.kinds

    @property
    def beta(self) -> float:
        """Coefficient of the KL penalty in the loss; 0 if the loss has none."""
        return self.tokens.beta if PENALTY in self.kinds and self.tokens is not None else 0.0

    @property
    def couples_prompts(self) -> bool:
        """True if the weight of a row depends on other groups."""
        baseline = BASELINES[self.baseline]
        return self.rows.couples or self.loss_type in COUPLED or baseline.couples_prompts

    def scale(self, group_size: int) -> float | None:
        """Return the factor c of a loss whose mean update is c grad J for any policy and rewards.

        The result is None if there is no such factor. If groups with equal rewards are replaced,
        the mean update is c grad J / K, where K is the share of groups that are kept; the result is
        still c. This requires a baseline whose advantages are 0 in groups with equal rewards;
        `estimators.dynamic_sampling` gives the reason.
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
        """Return the length L of each row; 0 for rows that are masked because of truncation."""
        return lengths * ended if self.mask_truncated_completions and ended is not None else lengths

    def length_factors(self, lengths: Integers, ended: Mask | None = None) -> Array:
        """Return the length factor of each row, with the shape of `lengths`.

        It is n w_i without the parts of w_i that depend on other rows.
        """
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
    """Compute the row weights W of an update, [K, P, G].

    Each row has K kinds of vectors (`Loss.kinds`). The gradient of the update is the sum of W times
    the vectors. If all tokens of a row have weight 1, the row has a single vector, its score.

    Args:
        loss: loss that defines the weights.
        rewards_PG: rewards of all rows of the update.
        context: row lengths and other inputs of the loss's baseline.
        ended_PG: True for each completion that ended; None if all ended.
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
        counts_N = rows_that_count(loss.rows, rewards_PG).ravel()
    weight_N = token_weights(
        loss.loss_type, loss.counted_lengths(context.lengths_PG, ended_PG).ravel(),
        loss.max_completion_length, loss.micro_batch_size, order_N, counts_N,
    )  # fmt: skip
    return by_kind(advantage_PG, loss.kinds, loss.beta) * weight_N.reshape(rewards_PG.shape)
