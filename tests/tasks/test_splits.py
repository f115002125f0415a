"""No question is in two splits, and what is dropped is counted exactly."""

from __future__ import annotations

import itertools

import pytest

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.records import Question
from grpo_ustat.tasks.splits import Splits, question_id

NAMES = ("train", "test", "study", "examples")


def questions(*texts):
    return [Question(question_id("q", text), text, "1", "q", "") for text in texts]


TRAIN, TEST = (
    questions(*(f"train {n}" for n in range(40))),
    questions(*(f"test {n}" for n in range(9))),
)


def splits(train=TRAIN, test=TEST, sizes=(None, None, 5, 2), seed=0, examples_seed=0, **options):
    return Splits(train, test, dict(zip(NAMES, sizes, strict=True)), seed, examples_seed, **options)


def ids(found, name):
    return [question.id for question in found.questions(name)]


SIZES = [(None, None, 1, 0), (10, 4, 5, 2), (None, 9, 20, 10), (3, 2, 36, 1), (None, 1, 1, 8)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("seed, examples_seed", [(0, 0), (1, 0), (2, 7)])
def test_splits_are_disjoint_and_whole(sizes, seed, examples_seed):
    found = splits(sizes=sizes, seed=seed, examples_seed=examples_seed)
    sets = {name: set(ids(found, name)) for name in NAMES}
    assert not any(a & b for a, b in itertools.combinations(sets.values(), 2))
    left = 40 - sizes[2] - sizes[3]
    expected = (sizes[0] or left, sizes[1] or 9, sizes[2], sizes[3])
    assert tuple(len(ids(found, name)) for name in NAMES) == expected
    assert sets["train"] | sets["study"] | sets["examples"] <= {q.id for q in TRAIN}
    assert sets["test"] <= {q.id for q in TEST}
    assert found.counts.total() == 0


def test_another_seed_draws_others_and_the_same_one_the_same():
    first, again, other = splits(), splits(), splits(seed=1)
    assert all(ids(first, name) == ids(again, name) for name in NAMES)
    assert set(ids(first, "study")) != set(ids(other, "study"))
    assert set(ids(first, "examples")) != set(ids(splits(examples_seed=1), "examples"))
    assert ids(first, "study") == ids(splits(examples_seed=1), "study")


def test_neither_more_studies_nor_order_nor_rows_beside_change_what_is_drawn():
    small, large = splits(), splits(sizes=(None, None, 12, 2))
    assert ids(large, "study")[:5] == ids(small, "study")
    assert ids(splits(train=TRAIN[::-1]), "study") == ids(small, "study")
    fewer = [q for q in TRAIN if q.id not in ids(small, "train")[:10]]
    assert ids(splits(train=fewer), "study") == ids(small, "study")


def test_planted_duplicates_are_dropped_and_counted():
    leaked = questions("Test 0", "test  3", "TEST 3 ")
    repeated = questions("TRAIN 7", "train 7\n", "Train  8")
    found = splits(train=[*TRAIN, *leaked, *repeated], test=[*TEST, *questions("Test 5")])
    assert +found.counts == {
        "train questions that are also test questions": 3,
        "repeated train questions": 3,
        "repeated test questions": 1,
    }
    plain = splits()
    assert all(set(ids(found, name)) == set(ids(plain, name)) for name in NAMES)


def test_a_test_question_that_is_not_asked_is_not_trained_on_either():
    leaked = [*TRAIN, *TEST]
    found = splits(train=leaked, test=TEST[:3], sizes=(None, 1, 5, 2), barred=[q.id for q in TEST])
    trained = {name for split in ("train", "study", "examples") for name in ids(found, split)}
    assert not trained & {q.id for q in TEST}
    assert found.counts["train questions that are also test questions"] == 9


@pytest.mark.parametrize("sizes, match", [
    ((None, None, 41, 0), "dataset.study_size=41, but only 40 different questions"),
    ((None, None, 38, 3), "prompt.shots=3, but only 2 different questions"),
    ((34, None, 5, 2), "dataset.train_size=34, but only 33 different questions"),
    ((None, 10, 5, 2), "dataset.test_size=10, but only 9 different questions"),
])  # fmt: skip
def test_too_few_are_refused_by_number(sizes, match):
    with pytest.raises(ConfigError, match=match):
        splits(sizes=sizes)
