"""Small problems for tests."""

from __future__ import annotations

import numpy as np

from grpo_ustat.gap.problems import CoinProblem, RidgeCoinProblem, SoftmaxProblem

SLOPES = np.array([[0.25, 0.125], [-0.25, 0.125], [0.125, -0.25], [-0.125, 0.0]])
STYLES = np.array([[0.63, 0.09], [-0.63, 0.09], [0.63, -0.09], [-0.63, -0.09]])


def coins(prompts: int = 4, **changes) -> CoinProblem:
    """As conf/problem/coins.yaml, unless changed."""
    given = dict(
        rewards_PY=np.tile([1.0, 1.0, 0.0, 0.0], (prompts, 1)),
        parameters=8,
        start_K=np.array([0.2, 0.2]),
        reach=0.1,
        value_P=np.full(prompts, 0.5),
        slope_PK=SLOPES,
        style_PK=STYLES,
        lambda_K=np.array([1.0, 0.6]),
    )
    return CoinProblem(**given | changes)


def unequal(**changes) -> CoinProblem:
    """Two prompts of which one is easier, one coordinate, no style."""
    given = dict(
        prompts=2, parameters=4, start_K=np.array([0.1]),
        value_P=np.array([0.5, 0.88]), slope_PK=np.array([[0.15], [-0.15]]),
        style_PK=np.zeros((2, 1)), lambda_K=np.array([1.0]),
    )  # fmt: skip
    return coins(**given | changes)


def ridge(**changes) -> RidgeCoinProblem:
    """As conf/problem/ridge_coins.yaml, unless changed."""
    given = dict(
        rewards_PY=np.tile([1.0, 1.0, 0.0, 0.0], (4, 1)),
        parameters=8,
        start_K=np.array([0.1, 0.0]),
        reach=0.012,
        value_P=np.full(4, 0.5),
        slope_P=np.array([0.1, -0.1, 0.1, -0.1]),
        style_P=np.array([0.4, 0.4, -0.4, -0.4]),
        along_P=np.array([0.6, -0.6, -0.6, 0.6]),
        curvature=1.0, bend=0.8, spread=1.8, width=0.5,
    )  # fmt: skip
    return RidgeCoinProblem(**given | changes)


def softmax(**changes) -> SoftmaxProblem:
    """As conf/problem/softmax.yaml, unless changed."""
    features = np.array([[2.0, 0.0], [-2.0, 0.0], [0.0, 2.0], [0.0, -2.0], [0.0, 0.0]])
    centres = np.array([[0.4, 0.0], [-0.4, 0.0], [0.0, 0.3], [0.0, -0.3]])
    given = dict(
        rewards_PY=np.tile([0.0, 0.0, 0.0, 0.0, 1.0], (4, 1)),
        parameters=8,
        start_K=np.array([0.25, 0.2]),
        reach=0.05,
        feature_YK=features,
        offset_PY=-centres @ features.T,
    )
    return SoftmaxProblem(**given | changes)
