"""The paper's Table 2 as docs/paper.md reads it: sizes of the test set, equal accuracies."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import chdtrc

from grpo_ustat.cli.compose import compose_config

# Test accuracy of Qwen2.5-Math-7B on MATH by n and G, as published.
TABLE2 = {
    1024: {4: 0.7677, 8: 0.7491, 16: 0.7753, 32: 0.7627, 64: 0.7817, 128: 0.7743},
    2048: {4: 0.7703, 8: 0.7679, 16: 0.7697, 32: 0.7793, 64: 0.7819, 128: 0.7665},
    4096: {4: 0.7691, 8: 0.7713, 16: 0.7701, 32: 0.7673, 64: 0.7703, 128: 0.7757},
}
# MATH's test split.
QUESTIONS = 5000


def homogeneity(rollouts: int) -> float:
    """p-value of equal accuracy at all six G of a published row: Pearson's chi-square."""
    share_G = np.array(list(TABLE2[rollouts].values()))
    pooled = share_G.mean()
    statistic = QUESTIONS * np.square(share_G - pooled).sum() / (pooled * (1 - pooled))
    return float(chdtrc(len(share_G) - 1, statistic))


def fitting(count, cut):
    """How many of the 18 published accuracies are shares of so many questions, to four digits.

    Args:
        count: of questions.
        cut: `np.round` or `np.floor`, of shares in units of 1e-4.
    """
    units = [round(1e4 * share) for row in TABLE2.values() for share in row.values()]
    near = np.array([[unit * count // 10_000 + step for step in (0, 1)] for unit in units])
    return int((cut(1e4 * near / count + 1e-9) == np.array(units)[:, None]).any(axis=1).sum())


@pytest.mark.slow
def test_the_published_accuracies_are_of_sizes_next_to_maths_test_split():
    """All are of four sizes rounded and of four others truncated, none of 500 or 5000."""
    sizes = {
        cut: [count for count in range(1, 6000) if fitting(count, cut) == 18]
        for cut in (np.round, np.floor)
    }
    assert sizes[np.round] == [4994, 4998, 5002, 5006]
    assert sizes[np.floor] == [4995, 4999, 5003, 5007]
    assert not any(fitting(count, cut) for count in (500, 5000) for cut in sizes)
    assert abs(QUESTIONS / 5000 - 1) < 0.002
    config = compose_config("train", ["experiment=table2_math", "hydra.mode=RUN"])
    assert config.dataset.test_path is None and config.dataset.test_size is None
    half = compose_config("train", ["dataset=math500", "prompt=qwen_math_cot"]).dataset
    assert half.test_path == "HuggingFaceH4/MATH-500" and half.kind == "math"


def test_homogeneity_by_hand():
    """At n = 4096 the six are 3846, 3857, 3851, 3837, 3852, 3879 of 5000, a mean of 0.7706."""
    right = np.array([3845.5, 3856.5, 3850.5, 3836.5, 3851.5, 3878.5])
    expected = right.mean()
    statistic = (np.square(right - expected) / (expected * (1 - expected / 5000))).sum()
    assert statistic == pytest.approx(1.131, abs=1e-3)
    assert [round(homogeneity(n), 3) for n in TABLE2] == [0.002, 0.324, 0.951]
