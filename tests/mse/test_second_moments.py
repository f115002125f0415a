"""v against enumeration of every step and every study, and what half of the questions says of the
other half's metric.
"""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch

from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.mse.second_moments import (
    OTHER_PRIOR_QUESTIONS,
    PRIOR_QUESTIONS,
    GroupGradients,
    is_uncertain,
    shift,
    uncertain_text,
)

CHANCE_PY = np.array([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1]])
REWARD_PY = np.array([[0.0, 1.0, 0.4], [1.0, 0.0, 0.0]])
FEATURE_PYD = np.array([
    [[1.0, 0.0, 2.0], [0.5, -1.0, 0.0], [-2.0, 1.0, 0.0]],
    [[0.3, 0.2, 0.0], [-1.0, 2.0, 0.0], [0.7, 0.1, 5.0]],
])  # fmt: skip
SCORE_PYD = FEATURE_PYD - np.einsum("py,pyd->pd", CHANCE_PY, FEATURE_PYD)[:, None]
G = 2


def group_gradients():
    """(probability, prompt, u) of every group of two completions of one of two prompts."""
    for p, one, two in product(range(2), range(3), range(3)):
        z, s = REWARD_PY[p, [one, two]], SCORE_PYD[p, [one, two]]
        yield CHANCE_PY[p, one] * CHANCE_PY[p, two] / 2, p, (z - z.mean()) @ s / (G - 1)


def exact():
    """(grad J)_j^2, C1_j and C2_j/G + C3_j/(G (G-1)) by the definitions of the constants."""
    value_P = (CHANCE_PY * REWARD_PY).sum(axis=1)
    centred_PY = REWARD_PY - value_P[:, None]
    g_PD = np.einsum("py,py,pyd->pd", CHANCE_PY, REWARD_PY, SCORE_PYD)
    a_v = np.einsum("py,py,pyd->pd", CHANCE_PY, centred_PY**2, SCORE_PYD**2)
    d = np.einsum("py,py->p", CHANCE_PY, centred_PY**2)[:, None] * np.einsum(
        "py,pyd->pd", CHANCE_PY, SCORE_PYD**2
    )
    grad_sq = np.square(g_PD.mean(axis=0))
    c1 = np.square(g_PD).mean(axis=0) - grad_sq
    c2, c3 = (a_v - g_PD**2).mean(axis=0), (d + g_PD**2).mean(axis=0)
    return grad_sq, c1, c2 / G + c3 / (G * (G - 1))


def of_every_study():
    """Gradients of every study of two questions with two groups each, one row of entries a study,
    and the studies' probabilities.
    """
    groups = list(group_gradients())
    questions = [
        (2 * a * b, u, w) for a, p, u in groups for b, q, w in groups if p == q
    ]  # half of a prompt's chance is in both a and b
    chance = np.array([one[0] * two[0] for one, two in product(questions, repeat=2)])
    found = GroupGradients(groups=2)
    for x in range(2):
        rows = [pair[x] for pair in product(questions, repeat=2)]
        found.add({"w": torch.tensor(np.array([row[k] for row in rows]))} for k in (1, 2))
    return chance, found


def test_parts_are_unbiased_over_every_study():
    chance, found = of_every_study()
    assert chance.sum() == pytest.approx(1)
    for estimate, truth in zip(found.parts("w"), exact(), strict=True):
        np.testing.assert_allclose(chance @ estimate.numpy(), truth, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("prompts", [1, 2, 3])
def test_v_is_the_mean_square_of_every_step(prompts):
    """E ghat_j^2 over every batch, and its formula; of a study's v the mean, but for the estimates
    of (grad J)_j^2 that count as 0.
    """
    slow = np.zeros(3)
    for batch in product(group_gradients(), repeat=prompts):
        chance = math.prod(p for p, _, _ in batch)
        slow += chance * np.mean([u for _, _, u in batch], axis=0) ** 2
    grad_sq, c1, given_prompt = exact()
    np.testing.assert_allclose(grad_sq + (c1 + given_prompt) / prompts, slow, rtol=1e-12)
    chance, found = of_every_study()
    clipped = chance @ found.parts("w")[0].clamp(max=0).numpy()
    v = chance @ found.second_moments("w", prompts, prior=0.0).numpy()
    np.testing.assert_allclose(v + (1 - 1 / prompts) * clipped, slow, rtol=1e-10)
    assert (clipped[:2] < 0).all()


def test_v_is_moved_towards_the_mean_of_its_parameter():
    """Two questions, one group gradient each but for the second groups of 0: by hand."""
    found = GroupGradients(groups=2)
    found.add([{"w": torch.tensor([2.0, 0.0]), "b": torch.tensor([1.0])}])
    found.add([{"w": torch.tensor([-2.0, 0.0]), "b": torch.tensor([1.0])}])
    # E u^2 = 2 and 0, (grad J)^2 = ((1 - 1)^2 - 2)/2 < 0; of b 1/2 and ((1/2 + 1/2)^2 - 1/2)/2
    assert found.second_moments("w", 4, prior=0.0).tolist() == [0.5, 0.0]
    assert found.second_moments("w", 4).tolist() == pytest.approx([(1 + 0.25) / 3, 0.25 / 3])
    assert found.second_moments("b", 4).tolist() == pytest.approx([0.5 / 4 + 0.75 * 0.25])


def random_half(rng, scales, questions=12):
    """Two entries: a signal that prompts do not share, and noise alone."""
    half = GroupGradients(groups=3)
    for _ in range(questions):
        signal = rng.normal() * np.array([1.0, 0.0])
        half.add(
            [{"w": torch.from_numpy(scales * (signal + rng.normal(size=2)))} for _ in range(3)]
        )
    return half


def test_the_shift_is_that_of_the_ratio_in_the_two_metrics(rng):
    halves = [random_half(rng, np.array([1.0, 0.05])) for _ in range(2)]
    logs = []
    for prior in (OTHER_PRIOR_QUESTIONS, PRIOR_QUESTIONS):
        c1 = given_prompt = 0.0
        for own, other in (halves, halves[::-1]):
            v = other.second_moments("w", 8, prior)
            _, between, within = own.parts("w")
            for j in range(2):
                c1 += float(between[j] / v[j])
                given_prompt += float(within[j] / v[j])
        logs.append(0.5 * math.log(given_prompt / c1))
    assert shift(halves, 8) == pytest.approx(logs[0] - logs[1])
    assert abs(logs[0] - logs[1]) > 0.01
    assert shift(halves[::-1], 8) == pytest.approx(shift(halves, 8), rel=1e-12)


def test_without_a_gradient_that_differs_between_prompts_there_is_no_shift(rng):
    halves = [random_half(rng, np.array([0.0, 1.0])) for _ in range(2)]
    for half in halves:  # products of two groups of a question far below those of two questions
        half.squared_means["w"] = torch.zeros(2)
    assert math.isnan(shift(halves, 8))


@pytest.mark.parametrize(
    "moved, best, expected",
    [
        (0.0, Interval(5.0, 3.0, 9.0), False),
        (0.2, Interval(5.0, 3.0, 9.0), False),  # 0.3 log(4/2) = 0.208
        (-0.21, Interval(5.0, 3.0, 9.0), True),
        (0.21, Interval(90.0, 3.0, math.inf), True),  # above 0.2
        (0.21, Interval(math.nan, 3.0, math.inf), True),
        (0.1, Interval(math.nan, 3.0, math.inf), False),
        (math.nan, Interval(90.0, 3.0, math.inf), True),
        (9.0, Interval(5.0, 1.0, math.inf), False),  # nothing is said of G*
        (9.0, Interval(math.nan, math.nan, math.nan), False),
    ],
)
def test_what_is_uncertain(moved, best, expected):
    assert is_uncertain(moved, best) is expected
    assert ("WARNING" in uncertain_text(moved, best)) is expected


def test_the_warning_says_how_far_the_best_size_moves():
    assert "changes G* - 1 by +35%" in uncertain_text(0.3, Interval(5.0, 4.5, 6.0))
