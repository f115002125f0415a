r"""Mean and second moment of a loss's term of one prompt, over all groups of G of its pool.

Of a loss whose row weights depend on their own group alone, an update of B prompts is the mean of B
independent terms

    T = 1/G sum_{i in A} A_i phi_i s_i        A the group, A_i advantage, phi_i = n w_i

Its mean over all groups of G of a pool of N completions estimates `E T` without bias, and so does
the mean of `||T||^2`. An advantage that is a function of the group's rewards depends on the group
by the counts `k_l` of its levels alone, whose law is the multivariate hypergeometric, and with
`a_l(k)` the advantage of level l

    E[ A_i 1(i in A) ]           = sum_k P(k) a_l k_l / n_l
    E[ A_i A_j 1(i, j in A) ]    = sum_k P(k) a_l a_m k_l (k_m - 1(l=m)) / (n_l (n_m - 1(l=m)))

so that all groups count at the price of a table. Other advantages are averaged over groups that are
drawn.

Where groups are drawn until their rewards differ, with M the event that they do and K = E P(M | x)
over prompts, a term of the update has E[T | M] = E[T 1(M)] / K, and its square likewise: the sums
over k are of the mixed counts alone, and K is the mean of their chance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import comb

import numpy as np
from scipy.stats import multivariate_hypergeom  # pyright: ignore[reportUnknownVariableType]

from grpo_ustat.estimators.baselines import BASELINES, advantages
from grpo_ustat.estimators.row_weights import Loss, mixed_groups
from grpo_ustat.records import Array, BaselineContext, Integers, ScorePool

BY_LEVELS = (  # rules that give equal rewards of a group equal advantages, whatever their order
    "none", "leave_one_out", "group_mean", "constant", "group_std", "maxrl", "group_std_jackknife",
    "leave_one_out_std",
)  # fmt: skip
BLOCK = 64  # prompts whose sketches are taken to float64 at once
MOST_COMPOSITIONS = 5000  # of a group's levels; more are not listed, groups are drawn


@dataclass(frozen=True)
class GroupTerms:
    """Terms of a loss at one group size.

    Attributes:
        energy_P: E||T||^2 of every prompt; E||T||^2 1(M) where groups are replaced.
        mean_PR: E T, as a sketch; E T 1(M).
        kept_P: P(M); None where groups are not replaced.
    """

    energy_P: Array
    mean_PR: Array
    kept_P: Array | None = None


class LevelSums:
    """Sums of a pool's scores by the level of their rewards, each score times its length factor.

    Args:
        pool: scored completions.
        factors_PN: phi of each.

    Attributes:
        level_L: the levels.
        counts_PL: completions of each level.
        norms_PL: sums of phi^2 ||s||^2.
        pairs_PLL: sums of `phi_i phi_j <s_i, s_j>` over pairs i != j.
        features_PLR: sums of phi times the score's sketch.
    """

    def __init__(self, pool: ScorePool, factors_PN: Array):
        self.level_L, level_PN = np.unique(pool.rewards_PN, return_inverse=True)
        member_PNL = (level_PN[..., None] == np.arange(len(self.level_L))).astype(float)
        weighted_PNL = member_PNL * factors_PN[..., None]
        self.counts_PL = member_PNL.sum(axis=1)
        squares_PN = np.square(factors_PN) * pool.sq_norm_PN
        self.norms_PL = np.einsum("pnl,pn->pl", member_PNL, squares_PN)
        self.pairs_PLL = weighted_PNL.transpose(0, 2, 1) @ (pool.gram_PNN @ weighted_PNL)
        diagonal = np.arange(len(self.level_L))
        self.pairs_PLL[:, diagonal, diagonal] -= self.norms_PL
        prompts, _, levels = weighted_PNL.shape
        self.features_PLR = np.empty((prompts, levels, pool.features_PNR.shape[2]))
        for first in range(0, prompts, BLOCK):
            part = slice(first, first + BLOCK)
            weights_BLN = weighted_PNL[part].transpose(0, 2, 1)
            self.features_PLR[part] = weights_BLN @ pool.features_PNR[part]

    def terms(
        self, rule: str, options: Mapping[str, float], group_size: int, replaced: bool = False
    ) -> GroupTerms:
        """Terms of a rule of `BY_LEVELS`, over all groups of G.

        Args:
            rule, options: of advantages.
            group_size: G.
            replaced: whether groups of equal rewards are drawn anew.
        """
        composition_CL = compositions(len(self.level_L), group_size)
        reward_CG = np.array([np.repeat(self.level_L, counts) for counts in composition_CL])
        advantage_CG = advantages(rule, reward_CG, BaselineContext(), options)
        # the first row of each level; of a level without one any number does, its count is 0
        first_CL = np.cumsum(composition_CL, axis=1) - composition_CL
        advantage_CL = np.take_along_axis(
            advantage_CG, np.minimum(first_CL, group_size - 1), axis=1
        )
        counts_UL, which_P = np.unique(self.counts_PL, axis=0, return_inverse=True)
        # the chance of each composition of a group drawn from a pool with these counts
        counts_U1L = counts_UL[:, None].astype(np.int64)
        chance_UC = np.asarray(multivariate_hypergeom.pmf(composition_CL, counts_U1L, group_size))
        if replaced:
            chance_UC = chance_UC * ((composition_CL > 0).sum(axis=1) > 1)
        same_LL = np.eye(len(self.level_L))
        members_CL = advantage_CL * composition_CL
        pair_counts_CLL = composition_CL[:, :, None] * (composition_CL[:, None] - same_LL)
        products_CLL = advantage_CL[:, :, None] * advantage_CL[:, None] * pair_counts_CLL
        pool_pairs_ULL = counts_UL[:, :, None] * (counts_UL[:, None] - same_LL)
        first_UL = _over(chance_UC @ members_CL, counts_UL)
        second_UL = _over(chance_UC @ (advantage_CL * members_CL), counts_UL)
        cross_ULL = _over(np.tensordot(chance_UC, products_CLL, axes=1), pool_pairs_ULL)
        which_P = which_P.reshape(-1)
        energy_P = (second_UL[which_P] * self.norms_PL).sum(axis=1)
        energy_P += (cross_ULL[which_P] * self.pairs_PLL).sum(axis=(1, 2))
        mean_PR = np.einsum("pl,plr->pr", first_UL[which_P], self.features_PLR)
        kept_P = chance_UC.sum(axis=1)[which_P] if replaced else None
        return GroupTerms(energy_P / group_size**2, mean_PR / group_size, kept_P)


def compositions(levels: int, group_size: int) -> Integers:
    """All counts of the levels in a group of G, [C, L].

    >>> compositions(2, 2).tolist()
    [[2, 0], [1, 1], [0, 2]]
    """
    members = combinations_with_replacement(range(levels), group_size)
    return np.array([np.bincount(group, minlength=levels) for group in members])


def drawn_terms(pool: ScorePool, loss: Loss, order_PDG: Integers, rows: int = BLOCK) -> GroupTerms:
    """Terms of any rule that treats prompts apart, over groups that are drawn.

    Args:
        pool: scored completions.
        loss: which.
        order_PDG: places of the members of D groups in each prompt's pool.
        rows: prompts that are treated at once.
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
        rewards, lengths = (
            pool.rewards_PN[row_P11, places_PDG],
            pool.lengths_PN[row_P11, places_PDG],
        )
        factors = factors_PN[row_P11, places_PDG]
        context = BaselineContext(lengths_PG=lengths.reshape(-1, size))
        advantage = advantages(loss.rule, rewards.reshape(-1, size), context, loss.options)
        weight = advantage.reshape(count, draws, size) * factors / size
        if loss.rows.replaces:
            mixed_PD = mixed_groups(rewards)
            weight = weight * mixed_PD[..., None]
            kept.append(mixed_PD.mean(axis=1))
        weight_PDN = np.zeros((count, draws, pool.rewards_PN.shape[1]))
        np.put_along_axis(weight_PDN, places_PDG, weight, axis=2)
        energies.append(((weight_PDN @ pool.gram_PNN[part]) * weight_PDN).sum(axis=2).mean(axis=1))
        means.append(np.einsum("pn,pnr->pr", weight_PDN.mean(axis=1), pool.features_PNR[part]))
    kept_P = np.concatenate(kept) if kept else None
    return GroupTerms(np.concatenate(energies), np.concatenate(means), kept_P)


def has_levels(pool: ScorePool, rule: str, group_size: int) -> bool:
    """Whether all groups of G can be counted by the levels of their rewards."""
    levels = len(np.unique(pool.rewards_PN))
    listed = comb(group_size + levels - 1, levels - 1) <= MOST_COMPOSITIONS
    return rule in BY_LEVELS and listed and not BASELINES[rule].needs


def _over(above: Array, below: Array) -> Array:
    """The quotient, 0 where the denominator is."""
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)
