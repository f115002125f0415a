"""Answers that are printed only sometimes hold where they are printed: the benchmark, shorter."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts/benchmarks"))
from decisions import SENTENCES, judged, rows_of  # noqa: E402
from populations import FITTED, TURNED, UNSEEN  # noqa: E402
from verdicts import rows_of as verdict_rows  # noqa: E402
from worth import (  # noqa: E402
    BY_TOKENS,
    ROLLOUTS,
    TURNED_SIZE,
    loss_worths,
    study,
    truth_by_tokens,
    turned,
)


def counts(name, prompts, completions, studies):
    """How often each sentence is printed, and how often it is wrong."""
    population = {**FITTED, **UNSEEN}[name]()
    found = {sentence: [0, 0] for sentence in SENTENCES}
    for one in population.studies(prompts, completions, studies, np.random.default_rng(3)):
        for sentence, wrong in judged(population.law, one):
            found[sentence][0] += 1
            found[sentence][1] += wrong
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, prompts, completions, least",
    [("light, G* 3.1", 40, 16, 0.6), ("light, G* 8.8", 60, 32, 0.9),
     ("sparse, high", 100, 32, 0.3), ("sparse, high", 60, 32, 0.02),
     ("nearly unrelated", 100, 32, 0.8), ("Pareto, high", 80, 16, 0.5),
     ("mixed, nearly sure", 60, 32, 0.0), ("opposed", 100, 16, 0.1), ("few loud", 200, 16, 0.01)],
)  # fmt: skip
def test_what_is_printed_is_rarely_wrong(name, prompts, completions, least):
    """At most 5 % of what 300 studies print, and three standard errors; and it is printed."""
    found = counts(name, prompts, completions, 300)
    assert found["G"][0] >= 300 * least
    for sentence, (printed, wrong) in found.items():
        assert wrong <= 0.05 * printed + 3 * (0.05 * 0.95 * printed) ** 0.5, (sentence, found)


def test_a_population_is_enumerated():
    """Constants of `few loud` against those of a large study."""
    population = UNSEEN["few loud"]()
    (study,) = population.studies(6000, 8, 1, np.random.default_rng(0))
    error_4 = np.sqrt(np.diagonal(study.covariance_K44.sum(axis=0)))
    assert (abs(study.constants_4 - population.law.constants_4) < 4 * error_4).all()


@pytest.mark.nightly
def test_the_table_has_a_row_for_every_sentence_and_size():
    rows = rows_of("opposed", 20)
    assert {row["sentence"] for row in rows} == set(SENTENCES)
    assert all(row["wrong"] <= row["printed"] <= 20 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, prompts",
    [("two prompts", 100), ("camps", 100), ("far, a quarter", 200), ("opposite camps", 200),
     ("partly turned", 200)],
)  # fmt: skip
def test_worth_and_direction_of_a_turned_mean_are_rarely_wrong_where_they_are_printed(
    name, prompts
):
    """Of a mean over tokens, 200 studies of 16 completions each."""
    for row in turned(name, [(prompts, 16)], 200, seed=3):
        said, wrong = row["said"], row["wrong"]
        assert said >= 80, row
        assert wrong <= 0.05 * said + 3 * (0.05 * 0.95 * said) ** 0.5, row


def test_the_truth_of_a_turned_mean_is_that_of_a_large_study():
    """Worth and direction, enumerated, of two kinds of prompts."""
    population, lengths_PY = TURNED["camps"]()
    pool = study(population, lengths_PY, np.arange(2000), 16, np.random.default_rng(1))
    (row,) = loss_worths(pool, [BY_TOKENS], [TURNED_SIZE], ROLLOUTS, 2, 1)
    for what, truth in truth_by_tokens(population, lengths_PY, TURNED_SIZE, ROLLOUTS).items():
        found = getattr(row.worth, what)
        assert found.low < truth < found.high and found.high - found.low < 0.3


@pytest.mark.nightly
def test_verdicts_on_claims_are_rarely_wrong_where_they_are_said():
    """40 studies of 100 x 16 of "opposed", where right answers' gradients are as long as others."""
    left_out = "any", "right answers have the longer gradients"
    every = verdict_rows("opposed", [(100, 16)], 40, 20)
    rows = [row for row in every if row["claim"] not in left_out]
    assert sum(row["said"] for row in rows) >= 100
    for row in rows:
        said, wrong = row["said"], row["wrong"]
        assert wrong <= 0.05 * said + 3 * (0.05 * 0.95 * said) ** 0.5, row
