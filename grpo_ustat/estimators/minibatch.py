r"""Error of a minibatch gradient, for two ways of drawing the questions.

Let ghat_x be the gradient estimate from random completions of question x. It has the second moment
`e_x = E||ghat_x||^2` and the mean `mu_x = E ghat_x`; let `p_x = ||mu_x||^2`. Given the questions,
the estimates of different questions are independent. Let ebar, pbar and mu be the means of e_x, p_x
and mu_x over the m questions. Let T be the mean of ghat_x over the B questions of a batch, and tau
the gradient that T should estimate. For both ways of drawing the questions, E T = mu and

    E||T - tau||^2 = bias^2 + variance        bias^2 = ||mu - tau||^2
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.records import Array

Number = TypeVar("Number", float, Array)


@dataclass(frozen=True)
class GradientError:
    """Error of a gradient estimate T, for one baseline and one group size."""

    # E||T - tau||^2 with its interval; the estimate is the sum of `bias2` and `variance`.
    mse: Interval
    # Squared bias of T.
    bias2: float
    # Variance of T.
    variance: float
    # Cosine of the angle between T and tau; see `scale_free`.
    cosine: float | None
    # Mean squared error of the best multiple of T; see `scale_free`.
    best_scalar_mse: float | None
    # Number of random groups per question, or number of random pairs of batches, behind the
    # estimates. None for a closed form, or if all groups of a pool are used.
    draws: int | None = None


def decompose(
    setting: str,
    num_prompts: int,
    e: Number,
    p: Number,
    mu_sq: Number,
    cross: Number,
    target_sq: Number,
) -> tuple[Number, Number, Number]:
    r"""Return (mse, bias^2, variance) of a minibatch, elementwise for arrays of the same shape.

    The variance depends on how the B questions of the batch are drawn; the bias does not:

        all_questions_once       variance = ( ebar - pbar ) / B             B = m
        with_replacement         variance = ( ebar - ||mu||^2 ) / B
        bias^2 = ||mu||^2 - 2 <mu, tau> + ||tau||^2

    With `all_questions_once`, T is the mean of m independent estimates with variances e_x - p_x.
    With `with_replacement`, T averages the estimates of B independently drawn questions. Each
    estimate has the second moment ebar and the mean mu.

    All three results are linear in the arguments from `e` to `target_sq`, so unbiased estimates of
    these arguments give unbiased results.

    Args:
        setting: one of the two names above.
        num_prompts: number of questions per batch, B.
        e: ebar, the mean over questions of E||ghat_x||^2.
        p: pbar, the mean over questions of ||E ghat_x||^2.
        mu_sq: ||mu||^2.
        cross: <mu, tau>.
        target_sq: ||tau||^2.

    Raises:
        ValueError: `setting` is unknown.

    >>> decompose("with_replacement", 2, 3.0, 2.0, 1.0, 1.0, 1.0)
    (1.0, 0.0, 1.0)
    """
    if setting not in ("all_questions_once", "with_replacement"):
        raise ValueError(f"unknown setting {setting}")
    bias2 = mu_sq - 2 * cross + target_sq
    variance = (e - (p if setting == "all_questions_once" else mu_sq)) / num_prompts
    return bias2 + variance, bias2, variance


def scale_free(energy: float, cross: float, target_sq: float) -> tuple[float | None, float | None]:
    """Return two measures of the error of T that do not depend on its length.

    The first is the cosine `cross / sqrt(energy target_sq)` between T and tau. The second is the
    mean squared error of the best multiple of T, `target_sq - cross^2 / energy`, which is the
    minimum of `E||c T - tau||^2` over factors c. Both results are None unless `energy` and
    `target_sq` are positive; estimates of these arguments can be negative.

    Args:
        energy: E||T||^2.
        cross: <E T, tau>.
        target_sq: ||tau||^2.

    >>> scale_free(4.0, 1.0, 1.0)
    (0.5, 0.75)
    """
    if not (target_sq > 0 and energy > 0):
        return None, None
    return cross / math.sqrt(energy * target_sq), target_sq - cross**2 / energy
