"""Exact values on a test problem: covariances of estimators, C1, C2, C3 and limit weights.

In the names of arrays, K is the number of coordinates of the policy, Y the number of outcomes of a
prompt, and R the number of replicates of a simulation.
"""

from __future__ import annotations

import numpy as np

from grpo_ustat.estimators.scaling import ScalingLaw
from grpo_ustat.gap.covariance import covariance_parts
from grpo_ustat.gap.problems import Problem
from grpo_ustat.gap.simulate import Estimator


def noise_everywhere(problem: Problem, u_KR: np.ndarray, estimator: Estimator) -> np.ndarray:
    """Return the covariance of the estimator at each replicate's coordinates u, [K, K, R]."""
    split = covariance_parts(*problem.law(u_KR), problem.rewards_PY, estimator.baseline)
    return split.covariance(estimator.num_prompts, estimator.group_size)


def noise(problem: Problem, u_K: np.ndarray, estimator: Estimator) -> np.ndarray:
    """Return the covariance of the estimator at one vector of coordinates u, [K, K]."""
    return noise_everywhere(problem, u_K[:, None], estimator)[..., 0]


def largest_error(problem: Problem, estimator: Estimator) -> float:
    """Return s2, the estimator's largest mean squared error on the sublevel set J* - J <= reach.

    The maximum is over the grid `Problem.sublevel_grid`.
    """
    return float(
        np.einsum("kkr->r", noise_everywhere(problem, problem.sublevel_grid(), estimator)).max()
    )


def scaling_at(
    problem: Problem, u_K: np.ndarray, weight_KK: np.ndarray | None = None
) -> ScalingLaw:
    """Return the scaling law of GRPO's error at the coordinates u.

    The law contains C1, C2 and C3, the traces of the three covariance parts. With a matrix W in
    `weight_KK` the traces are `C_i = tr(W part_i)`, so that some directions count more than others.
    """
    grpo = covariance_parts(*problem.law(u_K[:, None]), problem.rewards_PY, "leave_one_out")
    weight_KK = np.eye(len(u_K)) if weight_KK is None else weight_KK
    parts_KK1 = grpo.prompts, grpo.completions, grpo.pairs
    traces = [np.trace(weight_KK @ part[..., 0]) for part in parts_KK1]
    return ScalingLaw.exact(*map(float, traces))


def limit_weighting(curvature_KK: np.ndarray, c: float) -> np.ndarray:
    """Return the matrix W for which the limit weights w_j satisfy `sum_j w_j = tr(W Sigma)`.

    W weights the noise Sigma in each direction by its contribution to the limit of the gap.
    """
    lambda_K, basis = np.linalg.eigh(curvature_KK)
    return basis @ np.diag(c**2 * lambda_K / (2 * (2 * c * lambda_K - 1))) @ basis.T


def assumption2(problem: Problem, u_K: np.ndarray) -> float:
    """Return the relative violation of Assumption 2 at u; 0 if it holds for every prompt.

    Assumption 2 is E[S S' (Z - V) | x] = 0, with score S, reward Z and expected reward V. The
    violation is the root mean square over prompts of ||E[S S' (Z - V) | x]||, divided by
    ||E[S S']||, with Frobenius norms. It is computed by prompt, because violations in opposite
    directions would cancel in a mean over prompts, although some baseline is then better than V.
    """
    probability_PYR, score_PYKR = problem.law(u_K[:, None])
    probability_PY, score = probability_PYR[..., 0], score_PYKR[..., 0]
    centred_PY = problem.rewards_PY - problem.value(probability_PYR)
    third_PKK = np.einsum("py,py,pyk,pyl->pkl", probability_PY, centred_PY, score, score)
    fisher_KK = np.einsum("py,pyk,pyl->kl", probability_PY, score, score) / len(third_PKK)
    size = np.sqrt(np.square(third_PKK).sum(axis=(1, 2)).mean())
    return float(size / np.linalg.norm(fisher_KK))


def problem_facts(problem: Problem) -> dict[str, float | str]:
    """Return the facts about a test problem that its report shows, keyed by their names."""
    (mu, smoothness), law = problem.constants, scaling_at(problem, problem.best_K)
    prompts, outcomes = problem.rewards_PY.shape
    eigenvalues = ", ".join(f"{x:.4g}" for x in np.linalg.eigvalsh(problem.curvature_KK))
    return {
        "prompts": prompts,
        "outcomes of each prompt": outcomes,
        "parameters": problem.parameters,
        "dimension of the set of maximisers": problem.parameters - problem.curved,
        "J at the maximum": problem.highest,
        "gap at the start": float(problem.gap(problem.start_K[:, None])[0]),
        "curvature at the maximum": eigenvalues,
        "largest gap in the sublevel set": problem.reach,
        "mu in the sublevel set": mu,
        "L in the sublevel set": smoothness,
        "C1, C2, C3 at the maximum": f"{law.c1:.4g}, {law.c2:.4g}, {law.c3:.4g}",
        "G* computed from C1 and C3": law.best_size(),
        "relative violation of Assumption 2 (0: it holds)": assumption2(problem, problem.best_K),
    }
