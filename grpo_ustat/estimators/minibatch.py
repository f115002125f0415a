r"""Error of a minibatch gradient, by the way in which questions are drawn.

An estimate of one question x has, over its completions, the second moment `e_x = E||ghat_x||^2`
and the mean `mu_x = E ghat_x` with `p_x = ||mu_x||^2`; given the questions, different questions are
independent. With bars for means over the m questions, `mu = mean_x mu_x`, and the target tau:

    E||T - tau||^2 = bias^2 + variance        bias^2 = ||mu - tau||^2

for T the mean over the B questions of a batch, as every setting leaves E T = mu.
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
    """Error of an estimate T of the gradient, for a baseline at a group size."""

    # E||T - tau||^2 with its interval; `bias2` and `variance` are its parts.
    mse: Interval
    bias2: float
    variance: float
    # Of one draw T and tau, and the MSE of the best multiple of T, see `scale_free`.
    cosine: float | None
    best_scalar_mse: float | None
    # Groups drawn of each question, or pairs of batches; None of a closed form, and where all
    # groups of a pool count.
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
    r"""Return (mse, bias^2, variance) of a minibatch, elementwise on arrays of any common shape.

        all_questions_once       variance = ( ebar - pbar ) / B             B = m
        with_replacement         variance = ( ebar - ||mu||^2 ) / B
        bias^2 = ||mu||^2 - 2 <mu, tau> + ||tau||^2

    Each question once: the m estimates are independent with variances e_x - p_x, and T is their
    mean. With replacement: T averages B independent draws of a random question's estimate, whose
    second moment is ebar and whose mean is mu.

    All are linear in the means: unbiased estimates of these give unbiased results.

    Args:
        setting: one of the two names above.
        num_prompts: B.
        e: ebar, the mean over questions of E||ghat_x||^2.
        p: pbar, the mean over questions of ||E ghat_x||^2.
        mu_sq: ||mu||^2.
        cross: <mu, tau>.
        target_sq: ||tau||^2.

    Raises:
        ValueError: an unknown setting.

    >>> decompose("with_replacement", 2, 3.0, 2.0, 1.0, 1.0, 1.0)
    (1.0, 0.0, 1.0)
    """
    if setting not in ("all_questions_once", "with_replacement"):
        raise ValueError(f"unknown setting {setting}")
    bias2 = mu_sq - 2 * cross + target_sq
    variance = (e - (p if setting == "all_questions_once" else mu_sq)) / num_prompts
    return bias2 + variance, bias2, variance


def scale_free(energy: float, cross: float, target_sq: float) -> tuple[float | None, float | None]:
    """Return the cosine of one draw T and tau, and the MSE of the best multiple of T.

    They are `cross / sqrt(energy target_sq)` and `target_sq - cross^2 / energy`, the least of
    `E||c T - tau||^2` over numbers c. Both are None if an estimate of a squared norm is not
    positive.

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
