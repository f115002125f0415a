"""Two processes under DeepSpeed do what replicas do; checkpoints resume with and without it."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from forks import in_ranks  # noqa: E402
from resuming import differences, rows  # noqa: E402
from test_two_processes import GRPO, SMALL, die_in_the_update, failing, launched  # noqa: E402
from training_runs import fit  # noqa: E402

from grpo_ustat.config.schema import ConfigError  # noqa: E402
from grpo_ustat.launch.sharding import export_sharing  # noqa: E402
from grpo_ustat.train import deepspeed, setup, trainer  # noqa: E402

ZERO = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1",
        "DS_ACCELERATOR": "cpu"}  # fmt: skip
FLOAT32 = (*SMALL, "model.dtype=float32")
CASES = {
    "adamw": (),
    "sgd, minibatches": GRPO,
    "adapters": ("lora=r16", "objective=grpo", "objective.num_minibatches=3", "objective.beta=0.1"),
    "decay": ("optimizer.weight_decay=0.1", "schedule=linear", "max_grad_norm=0.05"),
}
runs = pytest.mark.skipif(
    find_spec("deepspeed") is None or torch.cuda.is_available(),  # not imported: forks inherit it
    reason="needs DeepSpeed (pip install deepspeed), and no GPU: who has seen one cannot be forked",
)


def on(count, path, overrides, environment=()):
    """Train on so many ranks; each one's checksum, and how many numbers its optimizer keeps."""
    found = in_ranks(count, lambda _: trained(path, *FLOAT32, *overrides), environment)
    failed = [text for text in found if isinstance(text, str)]
    assert not failed, "\n".join(failed)
    return found


def trained(path, *overrides):
    seen, set_up = [], trainer.set_up
    trainer.set_up = lambda *given: seen.append(set_up(*given)) or seen[0]
    fit(path, *overrides)
    (run,) = seen
    optimizer = run.optimizer
    if isinstance(optimizer, deepspeed.ZeroOptimizer):
        optimizer = optimizer._optimizer
    state = [x for fields in optimizer.state.values() for x in fields.values()]
    return setup.checksum(run.policy.model), sum(x.numel() for x in state if x.ndim)


@runs
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_sharded_optimizer_trains_as_replicas_bit_by_bit(tmp_path, case):
    replicas = on(2, tmp_path / "replicas", CASES[case])
    zero = on(2, tmp_path / "zero", CASES[case], ZERO)
    assert differences(tmp_path / "zero", tmp_path / "replicas") == []
    assert [checksum for checksum, _ in zero] == [checksum for checksum, _ in replicas]
    assert [2 * kept for _, kept in zero] == [kept for _, kept in replicas]
    assert rows(tmp_path / "zero")[-1]["grad_norm"] > 0


@runs
@pytest.mark.slow
@pytest.mark.parametrize("order", ["with then without", "without then with"])
def test_checkpoints_resume_with_and_without_it(tmp_path, order):
    """One step on two ranks one way, two on three ranks the other; replicas do the same.

    Three parts of the state begin and end inside parameters, where fused AdamW rounds differently.
    """
    ways = (ZERO, ()) if order == "with then without" else ((), ZERO)
    for name, (first, second) in (("replicas", ((), ())), ("mixed", ways)):
        on(2, tmp_path / name, ("max_steps=1",), first)
        on(3, tmp_path / name, (), second)
    assert_close(tmp_path / "mixed", tmp_path / "replicas")


def assert_close(one, two):
    assert rows(one) == [pytest.approx(row, rel=1e-5) for row in rows(two)]
    for name in ("model.safetensors", "optimizer.safetensors"):
        here, there = (load_file(path / "checkpoint-3" / name) for path in (one, two))
        assert here.keys() == there.keys()
        for key, value in there.items():
            torch.testing.assert_close(here[key], value, rtol=1e-5, atol=1e-12, msg=key)


@runs
@pytest.mark.nightly
def test_state_that_is_not_put_back_would_be_noticed(tmp_path, monkeypatch):
    """Negative control."""
    monkeypatch.setattr(deepspeed.ZeroOptimizer, "load_moments", lambda *_: None)
    for name, way in (("replicas", ()), ("zero", ZERO)):
        on(2, tmp_path / name, ("max_steps=1",), way)
        on(2, tmp_path / name, (), way)
    with pytest.raises(AssertionError):
        assert_close(tmp_path / "zero", tmp_path / "replicas")


@runs
@pytest.mark.slow
def test_a_rank_that_dies_ends_the_other_in_one_line(tmp_path):
    zero, one = in_ranks(
        2, failing(tmp_path / "run", die_in_the_update, "model.dtype=float32"), ZERO
    )
    assert one == "gone"
    assert zero.startswith("SystemExit: error: rank 0 of 2 lost another rank, whose own message")


@runs
@pytest.mark.slow
def test_float64_is_refused(tmp_path):
    for text in in_ranks(2, failing(tmp_path / "run", lambda _: None), ZERO):
        assert text.startswith("RefusedByRank: DeepSpeed keeps weights in float32")


@runs
@pytest.mark.slow
def test_the_shipped_configuration_launches(tmp_path):
    done = launched("deepspeed", tmp_path, "model.dtype=float32")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Wrote ") == 1
    on(2, tmp_path / "two", ())
    assert rows(tmp_path / "deepspeed") == rows(tmp_path / "two")
    assert json.loads((tmp_path / "deepspeed" / "result.json").read_text())["steps"] == 3


@pytest.mark.parametrize(
    "name, value, told",
    [
        ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2", "zero_stage=2 is not supported"),
        ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3", "zero_stage=3 is not supported"),
        ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu", "offload_optimizer_device=cpu"),
        ("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "nvme", "offload_param_device=nvme"),
        ("ACCELERATE_GRADIENT_CLIPPING", "1.0", "gradient_clipping=1.0"),
        ("ACCELERATE_DEEPSPEED_CONFIG_FILE", "ds.json", "deepspeed_config_file=ds.json"),
    ],
)
def test_options_that_would_not_hold_are_refused(monkeypatch, name, value, told):
    monkeypatch.setattr(deepspeed, "is_deepspeed_available", lambda: True)
    for key, given in (ZERO | {name: value}).items():
        monkeypatch.setenv(key, given)
    with pytest.raises(ConfigError, match=told):
        deepspeed.check_options()


def test_where_it_is_missing_that_is_said(monkeypatch):
    monkeypatch.setattr(deepspeed, "is_deepspeed_available", lambda: False)
    deepspeed.check_options()
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ConfigError, match="not installed: pip install deepspeed, or use fsdp2"):
        deepspeed.check_options()


def test_it_is_also_chosen_by_name(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    export_sharing("deepspeed")
    told = {name: os.environ.get(name) for name in ZERO if name.startswith("ACCELERATE")}
    assert told == {name: value for name, value in ZERO.items() if name in told}
    monkeypatch.setattr(deepspeed, "is_deepspeed_available", lambda: True)
    deepspeed.check_options()
