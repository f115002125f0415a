"""Distance of the current policy from the sampling policy, by KL and effective sample size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from grpo_ustat.estimators.efficiency import without
from grpo_ustat.estimators.intervals import CONFIDENCE, Interval, jackknife_interval
from grpo_ustat.records import Array

# If an effective share is at most this value, it depends on a few large weights, and even larger
# weights may be missing from the sample. The lower end of its interval is then set to 0.
MIN_BOUNDED = 0.6


def effective_share(sums_P: Array, squares_P: Array, counts_P: Array) -> Array:
    """Compute the effective share of importance weights w, [1 + P].

    The effective share is the effective sample size `(sum w)^2 / sum w^2` divided by the number of
    weights. The first value is for all prompts, and each other value leaves out one prompt.

    Args:
        sums_P, squares_P: sums of each prompt's weights and of their squares.
        counts_P: number of weights of each prompt.

    >>> effective_share(np.array([2.0, 4.0]), np.array([2.0, 16.0]), np.array([2, 2])).round(3)
    array([0.5, 0.5, 1. ])
    """
    total, square, count = (
        np.concatenate([[x.sum()], x.sum() - x]) for x in (sums_P, squares_P, counts_P)
    )
    return total**2 / (square * count)


@dataclass(frozen=True)
class Drift:
    """Distance of the current policy from the policy that sampled the completions."""

    # KL(sampling policy || current policy), in nats per token.
    kl: Interval
    # Effective share of the tokens; see `effective_share`. The weight of a token is its importance
    # ratio.
    tokens: Interval
    # Effective share of the completions. The weight of a completion is the product of its tokens'
    # importance ratios. The first value is for all questions, and each other value leaves out one
    # question.
    completions_D: Array

    @property
    def completions(self) -> Interval:
        """Effective share of the completions."""
        return self.completions_at(CONFIDENCE)

    def completions_at(self, level: float) -> Interval:
        """Compute the effective share of the completions with an interval at a given level."""
        return _share_interval(self.completions_D, level)


def drift_of(sums_PS: Array, count: int) -> Drift:
    """Compute the distance between the two policies, with intervals for new questions.

    Args:
        sums_PS: sums for each question; see `mse.pool_parts.WeightedPart.drift`.
        count: number of completions per question, N.
    """
    tokens_D = np.concatenate([[sums_PS[:, 2].sum()], sums_PS[:, 2].sum() - sums_PS[:, 2]])
    kl_D = np.concatenate([[sums_PS[:, 6].sum()], sums_PS[:, 6].sum() - sums_PS[:, 6]]) / tokens_D
    # The effective shares do not depend on this scale.
    scale_P = np.exp(sums_PS[:, 3] - sums_PS[:, 3].max())
    counts_P = np.full(len(sums_PS), float(count))
    tokens = effective_share(*sums_PS[:, :3].T)
    completions = effective_share(scale_P * sums_PS[:, 4], scale_P**2 * sums_PS[:, 5], counts_P)
    kl = jackknife_interval(kl_D[0], without(kl_D))
    return Drift(kl, _share_interval(tokens), completions)


def _share_interval(values_D: Array, level: float = CONFIDENCE) -> Interval:
    """Compute the interval of an effective share; see `MIN_BOUNDED` for its lower end."""
    interval = jackknife_interval(values_D[0], without(values_D), level, positive=True)
    return interval if interval.estimate > MIN_BOUNDED else interval._replace(low=0.0)
