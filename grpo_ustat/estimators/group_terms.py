r"""Moments of a prompt's contribution to an update, over all groups of G in the prompt's pool.

The contribution of a prompt is called its *term* T. The pool contains N scored completions of the
prompt. If the row weights of a loss depend only on their own group, an update of B prompts is the
mean of B independent terms

    T = 1/G sum_{i in S} A_i phi_i s_i

Here S is the group, A_i the advantage and s_i the score of completion i. The *length factor*
phi_i = n w_i is the token weight w_i of the row (`row_weights`) times the number n of rows; with
many loss types it depends on the length of the completion. The mean of T over all groups of G in
the pool is an unbiased estimate of `E T`, and the mean of `||T||^2` is an unbiased estimate of
`E||T||^2`. There are three ways to compute these means.

**Table of counts.** With many baselines, equal rewards in a group have equal advantages. The
advantages then depend only on the counts k_l: the number of completions of the group at each reward
level l. If n_l completions of the pool have level l, the counts of a random group have a
multivariate hypergeometric distribution P(k). Let `a_l(k)` be the advantage of level l. For
completion i of level l and completion j of level m,

    E[ A_i 1(i in S) ]           = sum_k P(k) a_l k_l / n_l
    E[ A_i A_j 1(i, j in S) ]    = sum_k P(k) a_l a_m k_l (k_m - 1(l=m)) / (n_l (n_m - 1(l=m)))

The means over all groups are computed from a table of all counts k (`LevelSums`).

**Linear advantages.** With many reward levels, this table would be too long. An advantage that is
linear in the rewards, `A_i = u_i - b sum_{j in S, j != i} u_j`, needs no table (`linear_terms`).

**Random groups.** Other advantages are averaged over randomly drawn groups (`drawn_terms`). A
linear advantage on the same groups serves as control variate (`with_control`).

If a row has vectors of several kinds (`estimators.token_weights`), level l has one advantage per
kind. The sums then run over all J pairs of a kind and a level.

Dynamic sampling draws groups until their rewards differ. Let M be the event that the rewards
differ, and K the mean of P(M | x) over prompts. The mean of a term is then
E[T | M] = E[T 1(M)] / K, and its second moment follows in the same way. The sums over k then
contain only counts with at least two levels, and K is the mean of their total probability.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement
from math import comb

import numpy as np

from grpo_ustat.estimators.baselines import BASELINES, advantages
from grpo_ustat.estimators.moments import centred
from grpo_ustat.estimators.row_weights import ZERO_IF_EQUAL, Loss, mixed_groups
from grpo_ustat.estimators.token_weights import ALL, by_kind
from grpo_ustat.estimators.ustatistic import zero_variance_share
from grpo_ustat.records import Array, BaselineContext, Integers, ScorePool

# Baselines that give equal advantages to completions with equal rewards in a group.
BY_LEVELS = (
    "none", "leave_one_out", "group_mean", "constant", "group_std", "maxrl", "group_std_jackknife",
    "leave_one_out_std", "quantile",
)  # fmt: skip
# Baselines whose advantages are linear in the rewards of the group.
LINEAR = ("none", "constant", "leave_one_out", "group_mean")
# Number of prompts whose sketches are converted to float64 at once.
BLOCK = 64
# Largest number of rows in a table of level counts. If the table would need more rows, groups are
# drawn at random instead.
MAX_COMPOSITIONS = 5000


@dataclass(frozen=True)
class GroupTerms:
    """Moments of each prompt's term T of a loss, at one group size.

    M is the event that the rewards of a group differ; see the module's docstring.
    """

    # E||T||^2 of every prompt; if zero-variance groups are replaced, E[||T||^2 1(M)].
    energy_P: Array
    # Sketch of E T; if zero-variance groups are replaced, of E[T 1(M)].
    mean_PR: Array
    # P(M); None if zero-variance groups are not replaced.
    kept_P: Array | None = None


class LevelSums:
    """Sums of a pool's scores by kind and reward level, each score multiplied by its length factor.

    In array shapes, K is the number of kinds of vectors, L the number of reward levels and J = K L.

    Args:
        pool: scored pool.
        factors_PN: length factor phi of each completion.
    """

    def __init__(self, pool: ScorePool, factors_PN: Array):
        # The kinds of vectors that each completion has; see `estimators.token_weights`.
        self.kinds = pool.kinds
        self.level_L, level_PN = np.unique(pool.rewards_PN, return_inverse=True)
        member_PNL = (level_PN[..., None] == np.arange(len(self.level_L))).astype(float)
        # Number of completions of each level.
        self.counts_PL = member_PNL.sum(axis=1)
        prompts, completions, levels = member_PNL.shape
        kinds, width = len(self.kinds), len(self.kinds) * levels
        weighted_PVJ = np.einsum(
            "kj,pnl->pknjl", np.eye(kinds), member_PNL * factors_PN[..., None]
        ).reshape(prompts, kinds * completions, width)
        gram_PKNKN = pool.gram_PNN.reshape(prompts, kinds, completions, kinds, completions)
        own_PKKN = np.diagonal(gram_PKNKN, axis1=2, axis2=4) * np.square(factors_PN)[:, None, None]
        # Sums of `phi_i^2 <s_i, s'_i>` over a level, for the vectors s and s' of two kinds.
        self.own_PLKK = np.einsum("pnl,pkjn->plkj", member_PNL, own_PKKN)
        # Sums of `phi_i phi_j <s_i, s'_j>` over pairs i != j. The product with the Gram matrix
        # includes the pairs i = j, which the loop below subtracts.
        self.pairs_PJJ = weighted_PVJ.transpose(0, 2, 1) @ (pool.gram_PNN @ weighted_PVJ)
        by_level = self.pairs_PJJ.reshape(prompts, kinds, levels, kinds, levels)
        for level in range(levels):
            by_level[:, :, level, :, level] -= self.own_PLKK[:, level]
        # Sums of the sketches of the scores, each multiplied by phi.
        self.features_PJR = np.empty((prompts, width, pool.features_PNR.shape[2]))
        for first in range(0, prompts, BLOCK):
            part = slice(first, first + BLOCK)
            weights_BJV = weighted_PVJ[part].transpose(0, 2, 1)
            self.features_PJR[part] = weights_BJV @ pool.features_PNR[part]

    def terms(
        self,
        baseline: str,
        options: Mapping[str, float],
        group_size: int,
        replaced: bool = False,
        beta: float = 0.0,
    ) -> GroupTerms:
        """Compute the terms of a baseline in `BY_LEVELS`, over all groups of G.

        Args:
            baseline, options: baseline of the advantages, and its options.
            group_size: group size, G.
            replaced: True if groups with equal rewards are replaced by new draws.
            beta: coefficient of the KL penalty; used only if completions have penalty vectors.
        """
        composition_CL = compositions(len(self.level_L), group_size)
        reward_CG = np.array([np.repeat(self.level_L, counts) for counts in composition_CL])
        advantage_CG = advantages(baseline, reward_CG, BaselineContext(), options)
        # Index of the first completion of each level in the group. For a level without completions
        # the index does not matter, because its count is 0.
        first_CL = np.cumsum(composition_CL, axis=1) - composition_CL
        advantage_CL = np.take_along_axis(
            advantage_CG, np.minimum(first_CL, group_size - 1), axis=1
        )
        # SciPy is imported here so that a rejected command line fails without loading it.
        from scipy.stats import multivariate_hypergeom

        counts_UL, which_P = self.distinct_counts
        # Probability that a group drawn from a prompt's pool has each of these compositions.
        counts_U1L = counts_UL[:, None].astype(np.int64)
        chance_UC = np.asarray(multivariate_hypergeom.pmf(composition_CL, counts_U1L, group_size))
        if replaced:
            chance_UC = chance_UC * ((composition_CL > 0).sum(axis=1) > 1)
        kinds, same_LL = len(self.kinds), np.eye(len(self.level_L))
        advantage_CJ = np.concatenate(list(by_kind(advantage_CL, self.kinds, beta)), axis=1)
        pair_counts_CLL = composition_CL[:, :, None] * (composition_CL[:, None] - same_LL)
        products_CJJ = advantage_CJ[:, :, None] * advantage_CJ[:, None]
        products_CJJ *= np.tile(pair_counts_CLL, (1, kinds, kinds))
        members_CJ = advantage_CJ * np.tile(composition_CL, (1, kinds)).astype(float)
        advantage_CKL = advantage_CJ.reshape(len(composition_CL), kinds, -1)
        squares_CLKK: Array = np.einsum(
            "ckl,cjl,cl->clkj", advantage_CKL, advantage_CKL, composition_CL
        )
        energy_P, mean_PR = self.moments(chance_UC, members_CJ, products_CJJ, squares_CLKK)
        kept_P = chance_UC.sum(axis=1)[which_P] if replaced else None
        return GroupTerms(energy_P / group_size**2, mean_PR / group_size, kept_P)

    @cached_property
    def distinct_counts(self) -> tuple[Array, Integers]:
        """Numbers of completions by level without duplicates, [U, L], and each prompt's row, [P].

        Prompts with the same numbers share one of the U rows, so that chances are computed once.
        """
        counts_UL, which_P = np.unique(self.counts_PL, axis=0, return_inverse=True)
        return counts_UL, which_P.reshape(-1)

    def moments(
        self,
        chance_UC: Array,
        members_CJ: Array,
        products_CJJ: Array,
        squares_CLKK: Array,
    ) -> tuple[Array, Array]:
        """Return E||T||^2, [P], and the sketches of E T, [P, R], of weighted sums of scores T.

        Args:
            chance_UC: probability of each of C outcomes of a draw of completions, for each row of
                `distinct_counts`.
            members_CJ: for each outcome, the sums of the weights w_i by kind and level.
            products_CJJ: the sums of `w_i w_j` over pairs i != j.
            squares_CLKK: the sums of `w_i w'_i` over a level, for the weights of two kinds.
        """
        kinds, levels = len(self.kinds), len(self.level_L)
        counts_UL, which_P = self.distinct_counts
        pool_pairs_ULL = counts_UL[:, :, None] * (counts_UL[:, None] - np.eye(levels))
        first_UJ = _over(chance_UC @ members_CJ, np.tile(counts_UL, (1, kinds)))
        cross_UJJ = _over(
            np.tensordot(chance_UC, products_CJJ, axes=1),
            np.tile(pool_pairs_ULL, (1, kinds, kinds)),
        )
        second_ULKK = _over(
            np.tensordot(chance_UC, squares_CLKK, axes=1), counts_UL[:, :, None, None]
        )
        energy_P = (second_ULKK[which_P] * self.own_PLKK).sum(axis=(1, 2, 3))
        energy_P += (cross_UJJ[which_P] * self.pairs_PJJ).sum(axis=(1, 2))
        mean_PR = np.einsum("pj,pjr->pr", first_UJ[which_P], self.features_PJR)
        return energy_P, mean_PR


def compositions(levels: int, group_size: int) -> Integers:
    """List all C possible counts of the L levels in a group of G, [C, L].

    >>> compositions(2, 2).tolist()
    [[2, 0], [1, 1], [0, 2]]
    """
    members = combinations_with_replacement(range(levels), group_size)
    return np.array([np.bincount(group, minlength=levels) for group in members])


def linear_terms(pool: ScorePool, loss: Loss, group_size: int) -> GroupTerms:
    """Compute the terms of a baseline in `LINEAR` over all groups of G; see `is_linear`.

    Let `A_i = c (u_i - b U_i)`, where U_i is the sum of u over the other completions of the group.
    Let R be the sum of u over k random completions out of n completions of the pool. The values of
    k and n are at the right of the formulas; completion i, or i and j, are not among the n. Then

        E[ A_i | i in A ]        = c ( u_i - b E R )                            k = G-1, n = N-1
        E[ A_i^2 | i in A ]      = c^2 ( u_i^2 - 2 b u_i E R + b^2 E R^2 )
        E[ A_i A_j | i, j in A ] = c^2 E[ (u_i - b u_j - b R) (u_j - b u_i - b R) ]
                                                                                k = G-2, n = N-2
    """
    prompts, completions = pool.rewards_PN.shape
    one_in, two_in = (
        group_size / completions,
        group_size * (group_size - 1) / (completions * max(completions - 1, 1)),
    )
    factors_PN = loss.length_factors(pool.lengths_PN, pool.ended_PN) / group_size
    energies: list[Array] = []
    means: list[Array] = []
    for first in range(0, prompts, BLOCK):
        part = slice(first, first + BLOCK)
        u_PN, b, c = _linear_baseline(loss, pool.rewards_PN[part], group_size)
        sum_P1, square_P1 = u_PN.sum(axis=1, keepdims=True), np.square(u_PN).sum(1, keepdims=True)
        mean, square = _sum_of_drawn(
            sum_P1 - u_PN, square_P1 - u_PN**2, completions - 1, group_size - 1
        )
        first_PN = c * (u_PN - b * mean)
        second_PN = c**2 * (u_PN**2 - 2 * b * u_PN * mean + b**2 * square)
        left, right = u_PN[:, :, None], u_PN[:, None]
        mean, square = _sum_of_drawn(
            sum_P1[..., None] - left - right, square_P1[..., None] - left**2 - right**2,
            completions - 2, group_size - 2,
        )  # fmt: skip
        left_part, right_part = left - b * right, right - b * left
        pair_PNN = c**2 * (
            left_part * right_part - b * (left_part + right_part) * mean + b**2 * square
        )
        weight_PNN = two_in * pair_PNN
        place_N = np.arange(completions, dtype=np.int64)
        weight_PNN[:, place_N, place_N] = one_in * second_PN
        weight_PNN *= factors_PN[part][:, :, None] * factors_PN[part][:, None]
        energies.append((weight_PNN * pool.gram_PNN[part]).sum(axis=(1, 2)))
        weight_PN = one_in * first_PN * factors_PN[part]
        means.append(np.einsum("pn,pnr->pr", weight_PN, pool.features_PNR[part]))
    kept_P = 1 - zero_variance_share(pool.rewards_PN, group_size) if loss.rows.replaces else None
    return GroupTerms(np.concatenate(energies), np.concatenate(means), kept_P)


def _linear_baseline(loss: Loss, rewards_PN: Array, group_size: int) -> tuple[Array, float, float]:
    """Return u, b and c of a baseline in `LINEAR`; see `linear_terms`."""
    if loss.baseline == "none":
        return rewards_PN, 0.0, 1.0
    if loss.baseline == "constant":
        return rewards_PN - loss.options["value"], 0.0, 1.0
    shrinks = loss.baseline == "group_mean"
    return centred(rewards_PN), 1 / (group_size - 1), 1 - 1 / group_size if shrinks else 1.0


def _sum_of_drawn(total: Array, squares: Array, count: int, drawn: int) -> tuple[Array, Array]:
    """Compute E R and E R^2 for the sum R of k out of n numbers, drawn without replacement.

    Args:
        total, squares: sum of the n numbers, and sum of their squares.
        count: population size, n.
        drawn: sample size, k.
    """
    share = drawn / max(count, 1)
    both = share * (drawn - 1) / max(count - 1, 1)
    return share * total, share * squares + both * (total**2 - squares)


def context_of(pool: ScorePool, prompt_P1: Integers, place_PG: Integers) -> BaselineContext:
    """Return the inputs of a baseline other than the rewards, for groups from a pool.

    The reward history is empty, as at the first step.

    Args:
        pool: scored pool.
        prompt_P1: index of each group's prompt.
        place_PG: indices of the group's completions in the pool of this prompt.
    """
    of_functions_PNF = pool.rewards_PNF
    return BaselineContext(
        lengths_PG=pool.lengths_PN[prompt_P1, place_PG],
        history=np.zeros((2, 3)),
        rewards_PGF=None if of_functions_PNF is None else of_functions_PNF[prompt_P1, place_PG],
        reward_weights_F=pool.reward_weights_F,
    )


def drawn_terms(pool: ScorePool, loss: Loss, order_PDG: Integers, rows: int = BLOCK) -> GroupTerms:
    """Compute the terms of a loss as averages over randomly drawn groups.

    The row weights of the loss must depend only on their own group.

    Args:
        pool: scored pool.
        loss: loss.
        order_PDG: indices of the completions of D groups in each prompt's pool.
        rows: number of prompts processed at once.
    """
    prompts, draws, size = order_PDG.shape
    factors_PN = loss.length_factors(pool.lengths_PN, pool.ended_PN)
    energies: list[Array] = []
    means: list[Array] = []
    kept: list[Array] = []
    for first in range(0, prompts, rows):
        part = slice(first, first + rows)
        places_PDG, count = order_PDG[part], len(order_PDG[part])
        row_P11 = np.arange(first, first + count)[:, None, None]
        rewards, factors = (x[row_P11, places_PDG] for x in (pool.rewards_PN, factors_PN))
        of_group = places_PDG.reshape(-1, size)
        of_prompt = np.repeat(np.arange(first, first + count), draws)[:, None]
        advantage = advantages(
            loss.baseline, rewards.reshape(-1, size), context_of(pool, of_prompt, of_group),
            loss.options,
        )  # fmt: skip
        factors = factors / size
        if loss.rows.replaces:
            mixed_PD = mixed_groups(rewards)
            factors = factors * mixed_PD[..., None]
            kept.append(mixed_PD.mean(axis=1))
        weights = by_kind(advantage.reshape(count, draws, size), loss.kinds, loss.beta) * factors
        weight_KPDN = np.zeros((len(weights), count, draws, pool.rewards_PN.shape[1]))
        np.put_along_axis(weight_KPDN, places_PDG[None], weights, axis=3)
        weight_PDV = np.concatenate(list(weight_KPDN), axis=2)
        energies.append(((weight_PDV @ pool.gram_PNN[part]) * weight_PDV).sum(axis=2).mean(axis=1))
        means.append(np.einsum("pv,pvr->pr", weight_PDV.mean(axis=1), pool.features_PNR[part]))
    kept_P = np.concatenate(kept) if kept else None
    return GroupTerms(np.concatenate(energies), np.concatenate(means), kept_P)


def with_control(drawn: GroupTerms, control: GroupTerms, exact: GroupTerms) -> GroupTerms:
    """Reduce the noise that the random choice of groups causes, with a control variate.

    The factor alpha of the control variate is fitted to all prompts together. A separate factor for
    each prompt would bias the result, because it would be fitted to the same groups to which it is
    applied.

    Args:
        drawn: terms of a loss over drawn groups.
        control: terms of the control variate, which is another loss, over the same groups.
        exact: terms of the control variate over all groups.
    """
    square = np.square(control.mean_PR).sum()
    alpha = (drawn.mean_PR * control.mean_PR).sum() / square if square > 0 else 0.0
    return GroupTerms(
        drawn.energy_P - alpha**2 * (control.energy_P - exact.energy_P),
        drawn.mean_PR - alpha * (control.mean_PR - exact.mean_PR),
        drawn.kept_P,
    )


def is_linear(loss: Loss) -> bool:
    """Return True if `linear_terms` can compute the terms of the loss.

    The loss must have one vector per row. If it replaces groups with equal rewards, the advantages
    in these groups must be 0.
    """
    counts = not loss.rows.replaces or loss.baseline in ZERO_IF_EQUAL
    return loss.baseline in LINEAR and loss.kinds == (ALL,) and counts


def has_levels(pool: ScorePool, baseline: str, group_size: int) -> bool:
    """Return True if `LevelSums` can compute the terms of the baseline.

    The advantages must depend only on the counts of the reward levels, and the table of all
    possible counts in groups of G must not be too long.
    """
    levels = len(np.unique(pool.rewards_PN))
    listed = comb(group_size + levels - 1, levels - 1) <= MAX_COMPOSITIONS
    return baseline in BY_LEVELS and listed and not BASELINES[baseline].needs


def _over(above: Array, below: Array) -> Array:
    """Divide elementwise; the result is 0 where the denominator is 0."""
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)
