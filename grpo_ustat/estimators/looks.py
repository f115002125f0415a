r"""Schedule of a study that draws questions until the data decide on a group size.

A *look* is one analysis of the data drawn so far. The first look is at 20 questions with 16
completions each. The number of questions then grows by a factor of 1.25 from look to look, until
the data of a look decide.

The number N = 16 of completions per question was chosen by simulation
(`scripts/benchmarks/error_rates.py stopping`). With m questions and a fixed number of rollouts
n = m N, the variance of the estimate of C1 has the form `(N v0 + v1 + v2/N)/n`, so it is smallest
at `N = sqrt(v2/v0)`. In the simulated populations, this N was below 32, except in those with
G* = 48. Three other choices were worse than N = 16:

- N = 32 took more rollouts until a decision, in each population in which 80 % of the studies
  decided.
- An N computed from the variances in 20 questions also took more rollouts. This N is noisy, and a
  decision needs a minimum number of questions.
- With N = 8, decisions were wrong too often.
"""

from __future__ import annotations

import math

from grpo_ustat.estimators.closed_form import Request, closed_form
from grpo_ustat.estimators.group_size import WEAK_PRIOR, Prior
from grpo_ustat.estimators.scaling import ScalingLaw
from grpo_ustat.records import ScorePool

# Number of questions, and of completions per question, at the first look.
FIRST_QUESTIONS = 20
FIRST_COMPLETIONS = 16
# Factor by which the number of questions grows from look to look.
GROWTH = 1.25


def next_count(count: int, most: int) -> int:
    """Return the number of questions at the look that follows a look at `count` questions.

    Args:
        count: number of questions at the last look; 0 before the first look.
        most: largest number of questions.

    >>> next_count(0, 300), next_count(20, 300), next_count(250, 300)
    (20, 25, 300)
    """
    return min(most, max(FIRST_QUESTIONS, math.ceil(GROWTH * count)))


def next_look(count: int, size: int, questions: int, completions: int) -> tuple[int, int] | None:
    """Return the number of questions, and of completions per question, at the next look.

    The number of questions grows first. When all questions are drawn, the number of completions
    doubles, so that an undecided study spends its whole budget.

    Args:
        count, size: number of questions, and of completions per question, at the last look.
        questions, completions: largest number of questions, and of completions per question.

    Returns:
        The two numbers, or None if the budget is spent.

    >>> next_look(100, 16, 120, 48), next_look(120, 16, 120, 48), next_look(120, 48, 120, 48)
    ((120, 16), (120, 32), None)
    """
    if count < questions:
        return next_count(count, questions), size
    return (count, min(2 * size, completions)) if size < completions else None


def population_law(pool: ScorePool, prior: Prior = WEAK_PRIOR) -> ScalingLaw:
    """Estimate the scaling law for the population from which the pool's questions are drawn."""
    return closed_form(pool, Request([], {}, {}, prior)).law
