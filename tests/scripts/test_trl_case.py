"""Our gradients and TRL's, as recorded, and where it is installed by TRL itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from grpo_ustat.config.objective import OBJECTIVES
from grpo_ustat.estimators.row_weights import row_weights
from grpo_ustat.records import BaselineContext

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts/benchmarks"))
import trl_case  # noqa: E402
from trl_case import PRESETS, SETTINGS  # noqa: E402

RECORD = json.loads((ROOT / "tests/data/trl_gradients.json").read_text())


def recorded(setting):
    """TRL's gradient in short: parameters x (norm, two products)."""
    return np.array(RECORD["projections"][setting.name])


def in_short(gradient):
    short = trl_case.projections(gradient)
    assert list(short) == RECORD["parameters"]
    return np.array(list(short.values()))


def first_of_each_objective(settings):
    """And the first control of each."""
    return {(setting.ours[0], setting.equal): setting for setting in reversed(settings)}.values()


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(first_of_each_objective, marks=pytest.mark.slow(minutes=0.4), id="first"),
        pytest.param(list, marks=pytest.mark.nightly(minutes=1), id="every"),
    ],
)
def test_our_gradients_are_those_recorded_of_trl(chosen):
    """Of the objectives on and off the sampling policy, and of the presets; controls differ."""
    start = trl_case.common_start(2, "float64")
    told = json.loads(json.dumps(trl_case.job(SETTINGS, start, "float64")))
    assert told == RECORD["job"], "record anew: " + RECORD["source"]
    for setting in chosen(SETTINGS):
        ours = in_short(trl_case.our_gradient(setting, start, "float64"))
        largest = (np.abs(ours - setting.factor * recorded(setting)) / ours[:, :1]).max()
        assert (largest < 1e-9) == setting.equal, (setting.name, largest)
    assert {f"objective={word}" for word in OBJECTIVES if word.startswith("trl_")} == {
        setting.ours[0] for setting in PRESETS
    }


@pytest.mark.slow(minutes=0.3)
def test_row_weights_times_scores_are_the_recorded_gradients_of_trl():
    """`sum_i W_i s_i` of every preset whose tokens all count, with scores by autograd; some
    completions are cut and have no weight where they are masked.
    """
    start = trl_case.common_start(2, "float64")
    rollouts, count = start.rollouts, start.rewards_PG.size
    assert 0 < rollouts.ended_PG.sum() < count
    products_NK2 = np.array([in_short(s)[:, 1:] for s in scores(rollouts)])
    for setting in PRESETS:
        config = trl_case.configured("float64", (*setting.ours, f"budget.rollouts={count}"))
        if config.objective.top_entropy_quantile < 1:
            continue
        (weight_PG,) = row_weights(
            config.objective.loss(config.baseline, trl_case.LENGTH),
            start.rewards_PG,
            BaselineContext(lengths_PG=rollouts.lengths_PG),
            rollouts.ended_PG,
            trl_case.micro_batch_rows(count),
        )
        theirs = setting.factor * recorded(setting)
        ours = -np.tensordot(weight_PG.ravel(), products_NK2, axes=1)  # the gradient of a loss
        assert (np.abs(ours - theirs[:, 1:]) / theirs[:, :1]).max() < 1e-9, setting.name


def scores(rollouts):
    """The gradient of each completion's summed log-probabilities, one at a time."""
    model = trl_case.load_policy(trl_case.MODEL, dtype="float64").model
    groups = zip(rollouts.prompt_tokens, rollouts.tokens_PGT, rollouts.lengths_PG, strict=True)
    with trl_case.InDouble():
        for prompt, tokens_GT, lengths_G in groups:
            for tokens, length in zip(tokens_GT, lengths_G, strict=True):
                answer = torch.tensor(tokens[:length], dtype=torch.int64)
                ids = torch.cat([torch.tensor(prompt, dtype=torch.int64), answer])[None]
                logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
                model.zero_grad()
                logits.log_softmax(-1).gather(1, answer[:, None]).sum().backward()
                yield {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.nightly(minutes=1)
def test_the_living_trl_makes_the_recorded_gradients():
    pytest.importorskip("trl", reason='TRL is not installed: pip install -e ".[trl]"')
    start = trl_case.common_start(2, "float64")
    living = trl_case.trl_gradients(SETTINGS, start, "float64")
    for setting, gradient in zip(SETTINGS, living, strict=True):
        theirs = in_short(gradient)
        assert (np.abs(theirs - recorded(setting)) < 1e-9 * theirs[:, :1]).all(), setting.name
