"""The schedule of a study that draws questions until the data decide."""

from __future__ import annotations

import numpy as np
from prompt_pools import whole_pool

from grpo_ustat.estimators.looks import FIRST_QUESTIONS, GROWTH, next_count, next_look


def noisy_pool(rng, questions, completions, signal):
    """Scores whose mean gradients differ between questions, by `signal`; the rest is noise."""
    z = rng.integers(0, 2, (questions, completions)).astype(float)
    direction_PD = signal * rng.normal(size=(questions, 12)) / np.sqrt(12)
    noise = rng.normal(size=(questions, completions, 12)) / np.sqrt(12)
    return whole_pool(
        (2 * z - 1)[..., None] * direction_PD[:, None] + noise, z, np.ones_like(z, dtype=int)
    )


def test_looks_grow_by_a_quarter_up_to_the_last():
    counts = [next_count(0, 200)]
    while counts[-1] < 200:
        counts.append(next_count(counts[-1], 200))
    assert counts[0] == FIRST_QUESTIONS and counts[-1] == 200
    growths = np.diff(counts[:-1]) / counts[:-2]
    assert (growths >= GROWTH - 1).all() and (growths < GROWTH - 1 + 1 / FIRST_QUESTIONS).all()
    assert next_count(0, 7) == 7 and next_count(200, 200) == 200


def test_an_undecided_study_spends_its_whole_budget():
    """First all questions, then all completions of each; no look is repeated."""
    look, looks = (0, 16), []
    while look := next_look(*look, questions=130, completions=48):
        looks.append(look)
    assert looks[0] == (FIRST_QUESTIONS, 16) and looks[-3:] == [(130, 16), (130, 32), (130, 48)]
    assert len(set(looks)) == len(looks)
