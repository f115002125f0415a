r"""Plan of a study that draws questions until the data decide on a group size.

The pilot draws a few questions. Its data determine the number of completions per question, N. Then
the number of questions grows by a factor of 1.25 from look to look, until a look decides.

The decision depends on the statistic `C1 - C3/k`, with the variance that the posterior of k uses
(see `group_size`). An unbiased estimate of ||g||^2 from N completions has a variance with terms of
order 1/N and 1/N^2, in addition to the variance of ||g||^2 between questions. With m questions, the
variance of the statistic is therefore

    1/m ( v0 + v1/N + v2/N^2 )

At a fixed number of rollouts n = m N, this variance is `( N v0 + v1 + v2/N ) / n`. It is smallest
at `N = sqrt(v2/v0)`. Small N waste rollouts if completions are noisy compared with the differences
between questions, which is so if G* is large.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from scipy.optimize import nnls

from grpo_ustat.estimators.closed_form import Request, closed_form
from grpo_ustat.estimators.group_size import UNDRAWN_VARIANCE, WEAK_PRIOR, Estimates, Prior
from grpo_ustat.estimators.intervals import CONFIDENCE
from grpo_ustat.estimators.moments import centred
from grpo_ustat.estimators.scaling import ScalingLaw
from grpo_ustat.records import Array, ScorePool

# Numbers of questions and of completions per question in the pilot.
PILOT_QUESTIONS = 20
PILOT_COMPLETIONS = 16
# Factor by which the number of questions grows from look to look.
GROWTH = 1.25
# Numbers of completions per question among which the pilot chooses.
COMPLETIONS = (16, 32, 64)
# The variance is measured in the whole pilot, in 2 halves and in 4 quarters of its completions.
DIVISIONS = (1, 2, 4)


def next_count(count: int, most: int) -> int:
    """Return the number of questions at the look that follows a look at `count` questions.

    Args:
        count: Number of questions at the last look; 0 before the first look.
        most: Largest number of questions.

    >>> next_count(0, 300), next_count(20, 300), next_count(250, 300)
    (20, 25, 300)
    """
    return min(most, max(PILOT_QUESTIONS, math.ceil(GROWTH * count)))


def next_look(count: int, size: int, questions: int, completions: int) -> tuple[int, int] | None:
    """Return the numbers of questions and of completions per question at the next look.

    The number of questions grows first. When all questions are drawn, the number of completions
    doubles, so that an undecided study spends its whole budget.

    Args:
        count, size: Numbers of questions and of completions per question at the last look.
        questions, completions: Largest numbers of both.

    Returns:
        The two numbers, or None if the budget is spent.

    >>> next_look(100, 16, 120, 48), next_look(120, 16, 120, 48), next_look(120, 48, 120, 48)
    ((120, 16), (120, 32), None)
    """
    if count < questions:
        return next_count(count, questions), size
    return (count, min(2 * size, completions)) if size < completions else None


def completions_per_question(pilot: ScorePool, most: int) -> int:
    """Choose N from `COMPLETIONS`, so that a given number of rollouts has the smallest variance.

    The variance of `C1 - C3/k` is measured at the posterior median of k, with all N0 completions of
    the pilot, with disjoint halves and with disjoint quarters of them. The coefficients v0, v1 and
    v2 >= 0 (see the module) are fitted to the three variances by least squares of relative errors.

    Args:
        pilot: Pool of at least 4 questions with N0 >= 16 completions each.
        most: Largest N.

    Returns:
        A size from N0 to `most`, or N0 if there is no other choice.
    """
    least = pilot.rewards_PN.shape[1]
    sizes = [least, *(size for size in COMPLETIONS if least < size <= most)]
    if len(sizes) < 2:
        return least
    coefficients_3 = variance_coefficients(pilot)
    if coefficients_3 is None:
        return sizes[0]
    v0, v1, v2 = coefficients_3
    return min(sizes, key=lambda size: size * v0 + v1 + v2 / size)


def variance_coefficients(pilot: ScorePool) -> Array | None:
    """Estimate v0, v1 and v2 (see the module); None if too few rewards differ within questions."""
    law, completions = population_law(pilot), pilot.rewards_PN.shape[1]
    if not (law.has_errors and law.c3 > 0):
        return None
    estimates = Estimates(law.constants_4[None, :3], law.covariance_33[None], law.dof, law.prompts)
    _, ratio, _ = estimates.ratio_quantiles(CONFIDENCE)
    sizes_3 = completions // np.array(DIVISIONS)
    variances_3 = np.array([
        _mean_variance(pilot, size, ratio) for size in sizes_3.tolist()
    ])  # fmt: skip
    if not (variances_3 > 0).all():
        return None
    terms_33 = np.stack([np.ones(3), 1 / sizes_3, 1 / sizes_3**2], axis=1)
    coefficients_3, _ = nnls(terms_33 / variances_3[:, None], np.ones(3))
    return coefficients_3


def _mean_variance(pilot: ScorePool, size: int, ratio: float) -> float:
    """Average `_question_variance` over the disjoint parts of the pilot with N = `size`."""
    firsts = range(0, pilot.rewards_PN.shape[1] - size + 1, size)
    parts = (_of_completions(pilot, slice(first, first + size)) for first in firsts)
    return float(np.mean([_question_variance(population_law(part), ratio) for part in parts]))


def population_law(pool: ScorePool, prior: Prior = WEAK_PRIOR) -> ScalingLaw:
    """Estimate the scaling law for the population from which the pool's questions are drawn."""
    request = Request([], {}, len(pool.rewards_PN), sample=True, costs={}, prior=prior)
    return closed_form(pool, request, "questions").law


def _of_completions(pool: ScorePool, columns: slice) -> ScorePool:
    """Return the pool with some of its completions; its gradients come from the score sketches."""
    rewards_PN, features_PNR = pool.rewards_PN[:, columns], pool.features_PNR[:, columns]
    return replace(
        pool,
        rewards_PN=rewards_PN,
        gram_PNN=pool.gram_PNN[:, columns, columns],
        features_PNR=features_PNR,
        centred_sums_PR=np.einsum("pn,pnr->pr", centred(rewards_PN), features_PNR),
        rewards_PNF=None,
        centred_sums_PFR=None,
        reward_weights_F=None,
    )


def _question_variance(law: ScalingLaw, ratio: float) -> float:
    """Return m times the variance of C1 - C3/k at k = `ratio`, as the posterior of k uses it."""
    weights_3 = np.array([1.0, 0.0, -1 / ratio])
    undrawn = UNDRAWN_VARIANCE * (law.c3**2 / law.prompts + float(law.covariance_33[2, 2]))
    variance = float(weights_3 @ law.covariance_33 @ weights_3) + undrawn / ratio**2
    return law.prompts * variance
