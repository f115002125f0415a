"""What theory says of an estimator on a bed: its noise, C1, C2, C3, limits; all enumerated."""

from __future__ import annotations

import numpy as np

from grpo_ustat.estimators.covariance import Parts, parts
from grpo_ustat.estimators.scaling import ScalingLaw
from grpo_ustat.policy.beds import Bed
from grpo_ustat.theorems.algorithm1 import Estimator


def parts_at(bed: Bed, u_K: np.ndarray, baseline: str) -> Parts:
    """Of the covariance at one u, [K, K]."""
    found = parts(*bed.law(u_K[:, None]), bed.rewards_PY, baseline)
    return Parts(found.prompts[..., 0], found.completions[..., 0], found.pairs[..., 0])


def noise_everywhere(bed: Bed, u_KR: np.ndarray, one: Estimator) -> np.ndarray:
    """The estimator's covariance at every replicate's u, [K, K, R]."""
    found = parts(*bed.law(u_KR), bed.rewards_PY, one.baseline)
    return found.covariance(one.num_prompts, one.group_size)


def noise(bed: Bed, u_K: np.ndarray, one: Estimator) -> np.ndarray:
    """The estimator's covariance at one u, [K, K]."""
    return noise_everywhere(bed, u_K[:, None], one)[..., 0]


def largest_error(bed: Bed, one: Estimator) -> float:
    """s2: the estimator's largest mean squared error on a grid of the sublevel set."""
    return float(np.einsum("kkr->r", noise_everywhere(bed, bed.sublevel_grid(), one)).max())


def scaling_at(bed: Bed, u_K: np.ndarray, weight_KK: np.ndarray | None = None) -> ScalingLaw:
    """C1, C2, C3 of GRPO at u; with W, `C_i = tr(W part_i)`: not all directions count alike."""
    found = parts_at(bed, u_K, "leave_one_out")
    weight_KK = np.eye(len(u_K)) if weight_KK is None else weight_KK
    traces = [np.trace(weight_KK @ x) for x in (found.prompts, found.completions, found.pairs)]
    return ScalingLaw(*map(float, traces))


def limit_weighting(curvature_KK: np.ndarray, c: float) -> np.ndarray:
    """W with `sum_j w_j = tr(W Sigma)`: what noise in each direction adds to the limit."""
    lambda_K, basis = np.linalg.eigh(curvature_KK)
    return basis @ np.diag(c**2 * lambda_K / (2 * (2 * c * lambda_K - 1))) @ basis.T


def assumption2(bed: Bed, u_K: np.ndarray) -> float:
    """||E[S S' (Z - V)]|| / ||E[S S']||, 0 where Assumption 2 holds as a matrix (Frobenius)."""
    probability_PYR, score_PYKR = bed.law(u_K[:, None])
    probability_PY, score = probability_PYR[..., 0], score_PYKR[..., 0]
    centred_PY = bed.rewards_PY - bed.value(probability_PYR)
    mean = np.einsum("py,py,pyk,pyl->kl", probability_PY, centred_PY, score, score)
    fisher = np.einsum("py,pyk,pyl->kl", probability_PY, score, score)
    return float(np.linalg.norm(mean) / np.linalg.norm(fisher))


def bed_facts(bed: Bed) -> dict[str, float | str]:
    """What a reader wants to know of a bed."""
    (mu, smoothness), law = bed.constants, scaling_at(bed, bed.best_K)
    prompts, outcomes = bed.rewards_PY.shape
    coordinates, parameters = bed.projection_KD.shape
    eigenvalues = ", ".join(f"{x:.4g}" for x in np.linalg.eigvalsh(bed.curvature_KK))
    return {
        "kind": type(bed).__name__,
        "prompts": prompts,
        "outcomes of each": outcomes,
        "parameters": parameters,
        "dimension of the set of maximisers": parameters - coordinates,
        "J at the maximum": bed.highest,
        "gap at the start": float(bed.gap(bed.start_K[:, None])[0]),
        "curvature at the maximum": eigenvalues,
        "sublevel set: gap at most": bed.reach,
        "mu there": mu,
        "L there": smoothness,
        "C1, C2, C3 at the maximum": f"{law.c1:.4g}, {law.c2:.4g}, {law.c3:.4g}",
        "G* of them": law.best_group_size,
        "Assumption 2 fails by (0: holds)": assumption2(bed, bed.best_K),
    }
