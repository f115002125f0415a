"""How questions are drawn: both settings against enumeration of questions and completions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from reference import enumerate_prompt, true_gradient

from grpo_ustat.estimators.minibatch import decompose

PROMPTS = [
    ([0.3, -0.8, 0.5], [1.0, 0.0, 0.25]),
    ([-0.2, 1.1, 0.4], [0.0, 1.0, 0.75]),
    ([0.9, 0.1, -0.6], [0.5, 0.0, 1.0]),
]


def plan(setting, batch, count):
    """Equally likely batches of questions."""
    return {
        "all_questions_once": lambda: [tuple(range(count))],
        "with_replacement": lambda: list(itertools.product(range(count), repeat=batch)),
    }[setting]()


def enumerated(tables, targets, setting, batch):
    """(mse, bias2, variance) over all batches and all joint outcomes of their groups."""
    batches = plan(setting, batch, len(tables))
    return np.array(spread(tables, batches, np.mean(targets, axis=0)))


def spread(tables, batches, target):
    mse, mean = 0.0, 0.0
    for chosen in batches:
        for joint in itertools.product(*(tables[x] for x in chosen)):
            share = math.prod(p for p, _ in joint) / len(batches)
            estimate = sum(e for _, e in joint) / len(chosen)
            mse, mean = mse + share * ((estimate - target) ** 2).sum(), mean + share * estimate
    bias2 = ((mean - target) ** 2).sum()
    return mse, bias2, mse - bias2


@pytest.mark.parametrize("name", ["none", "leave_one_out", "group_mean"])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    "setting, batch",
    [("all_questions_once", None), ("with_replacement", 1), ("with_replacement", 2)],
)
def test_settings_are_what_enumeration_says(setting, batch, count, name):
    """Unbiased and biased estimates, the latter against a target of its own too."""
    prompts = PROMPTS[:count]
    tables = [enumerate_prompt(*prompt, name, 2) for prompt in prompts]
    for stretch in (1.0, 1.7):
        tau = stretch * np.array([true_gradient(*prompt) for prompt in prompts])
        mu = np.array([sum(p * e for p, e in table) for table in tables])
        e = np.mean([sum(p * (v @ v) for p, v in table) for table in tables])
        p = (mu**2).sum(axis=1).mean()
        a, b = mu.mean(axis=0), tau.mean(axis=0)
        found = decompose(setting, batch or count, e, p, a @ a, a @ b, b @ b)
        np.testing.assert_allclose(found, enumerated(tables, tau, setting, batch), atol=1e-14)


def test_arrays_are_taken_elementwise():
    e = np.array([3.0, 4.0])
    mse, _, variance = decompose("with_replacement", 2, e, 2.0, 1.0, 1.0, 1.0)
    assert mse.tolist() == variance.tolist() == [1.0, 1.5]


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="unknown setting"):
        decompose("sometimes", 3, 1.0, 1.0, 1.0, 1.0, 1.0)
