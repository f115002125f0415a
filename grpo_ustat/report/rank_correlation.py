"""Rank correlation between training results and predicted errors over group sizes."""

from __future__ import annotations

from itertools import product

import numpy as np
from scipy import stats

from grpo_ustat.draws import generator
from grpo_ustat.estimators.intervals import Interval

RESAMPLES = 4000


def rank_correlation(mean_SG: np.ndarray, error_G: np.ndarray, level: float = 0.95) -> Interval:
    """Compute Spearman's correlation over G between the mean evaluation and -1 times the error.

    The evaluation is averaged over seeds, and the error is the predicted one. The interval is a
    percentile bootstrap over seeds that keeps all G of a seed together. Noise in the means weakens
    a rank correlation, so the interval is biased towards 0.

    Args:
        mean_SG: Mean evaluation of each seed and group size.
        error_G: Predicted error of each group size.
        level: Confidence level.

    >>> mean_SG = np.array([[0.3, 0.5, 0.4]] * 3)
    >>> [round(float(x), 3) for x in rank_correlation(mean_SG, np.array([2.0, 1.0, 3.0]))]
    [0.5, 0.5, 0.5]
    """
    count = len(mean_SG)
    resample_RS = generator(0, "best_group_size", count).integers(count, size=(RESAMPLES, count))
    mean_RG = np.concatenate([mean_SG.mean(axis=0)[None], mean_SG[resample_RS].mean(axis=1)])
    rank_RG = _centred_ranks(mean_RG)
    expected_G = _centred_ranks(-np.asarray(error_G, dtype=float)[None])[0]
    norm_R = np.linalg.norm(rank_RG, axis=1) * np.linalg.norm(expected_G)
    zero_R = np.zeros(len(rank_RG))
    correlation_R = np.divide(rank_RG @ expected_G, norm_R, out=zero_R, where=norm_R > 0)
    low, high = np.quantile(correlation_R[1:], [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(correlation_R[0]), float(low), float(high))


def sign_flip_p_value(values_S: np.ndarray) -> float:
    """Return the p-value of the hypothesis that symmetrically distributed values have a mean >= 0.

    The p-value is the share of sign patterns that give a mean no larger than the observed mean. All
    sign patterns are used for S <= 12 values, otherwise RESAMPLES random patterns. The p-value is
    never below 2^-S. With a few similar correlations, a t test would be overconfident.

    >>> sign_flip_p_value(np.array([-1.0, -1.0, -1.0])), sign_flip_p_value(np.array([-1.0, 1.0]))
    (0.125, 0.75)
    """
    count = len(values_S)
    if count <= 12:
        signs_MS = np.array(list(product((1, -1), repeat=count)))
    else:
        flips_MS = generator(0, "sign flips", count).choice([-1, 1], size=(RESAMPLES, count))
        signs_MS = np.concatenate([np.ones((1, count)), flips_MS])
    return float((signs_MS @ values_S <= values_S.sum() + 1e-9).mean())


def _centred_ranks(values_RG: np.ndarray) -> np.ndarray:
    """Return ranks minus their mean; tied values share their average rank."""
    ranks_RG = stats.rankdata(values_RG.round(12), axis=1)
    return ranks_RG - ranks_RG.mean(axis=1, keepdims=True)
