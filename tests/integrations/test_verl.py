"""verl's registry and dumps: a stand-in of its decorator, call and trainers, and gradients that
verl once made; where verl is installed, verl itself.

`VERL_USE_EXTERNAL_MODULES=grpo_ustat.integrations.verl python -m verl.trainer.main_ppo` begins as
the nightly test does: verl imports the module while it is imported itself.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import verl_dump
from pyarrow import parquet
from verl_run import ORDER, REWARDS_PG, THEIRS, UIDS, batch

from grpo_ustat.estimators.baselines import OURS, advantages
from grpo_ustat.integrations.rows import REWARD_ONLY, rule_options
from grpo_ustat.records import BaselineContext

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests/data/verl_gradients.json"
RECORD = json.loads(FILE.read_text())


def expected(rule, changed=None):
    options = rule_options(rule, changed or {})
    rows = advantages(rule, REWARDS_PG, BaselineContext(), options).ravel()[ORDER]
    return torch.tensor(rows[:, None], dtype=torch.float32)


@pytest.fixture
def registry(monkeypatch):
    """What verl 0.9.1 has: a dictionary, and a decorator that refuses a name a second time."""
    estimators = {}

    def register_adv_est(name):
        def decorator(function):
            assert estimators.get(name, function) == function
            estimators[name] = function
            return function

        return decorator

    core_algos = ModuleType("verl.trainer.ppo.core_algos")
    core_algos.register_adv_est = register_adv_est
    for name in ("verl", "verl.trainer", "verl.trainer.ppo"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, core_algos.__name__, core_algos)
    monkeypatch.delitem(sys.modules, "grpo_ustat.integrations.verl", raising=False)
    importlib.import_module("grpo_ustat.integrations.verl")
    yield estimators
    del sys.modules["grpo_ustat.integrations.verl"]


def test_every_rule_that_reads_rewards_alone_is_an_estimator_of_verl(registry):
    rewards, mask = batch()
    for rule in REWARD_ONLY:
        result = registry[f"grpo_ustat_{rule}"](
            token_level_rewards=rewards, response_mask=mask, config=None, index=UIDS
        )
        for tokens in result:
            assert torch.allclose(tokens, expected(rule) * mask, rtol=0, atol=1e-7)


def test_verl_names_the_estimators_where_a_rule_reads_more(registry):
    """A name of verl's registry, since verl's own message names none."""
    assert set(registry) == {f"grpo_ustat_{rule}" for rule in OURS}
    rewards, mask = batch()
    with pytest.raises(ValueError) as refused:
        registry["grpo_ustat_critic"](
            token_level_rewards=rewards, response_mask=mask, config=None, index=UIDS
        )
    names = ", ".join(f"grpo_ustat_{rule}" for rule in REWARD_ONLY)
    message = f"baseline critic reads critic_P besides rewards; the names are {names}"
    assert str(refused.value) == message


def test_recorded_gradients_of_verl_are_our_advantages():
    """By verl 0.9.1's `compute_advantage` and `agg_loss`, with the settings of docs/verl.md: of
    every rule that reads rewards alone, and of verl's own estimators that are rules of ours.
    """
    _, mask = batch()
    rules = {f"grpo_ustat_{rule}": (rule, {}) for rule in REWARD_ONLY} | THEIRS
    assert RECORD["gradients"].keys() == rules.keys()
    for name, rule in rules.items():
        recorded = torch.tensor(RECORD["gradients"][name])
        torch.testing.assert_close(recorded, expected(*rule) * mask / 9, rtol=1e-5, atol=1e-7)
    assert len({str(gradient) for gradient in RECORD["gradients"].values()}) > 10


@pytest.mark.nightly(minutes=0.3)
def test_the_living_verl_makes_the_recorded_gradients(monkeypatch):
    pytest.importorskip("verl", reason="verl is not installed")
    monkeypatch.setenv("PYTHONPATH", ":".join([str(ROOT), *sys.path]))
    command = [sys.executable, ROOT / "tests/helpers/verl_run.py", FILE]
    run = subprocess.run(command, capture_output=True, text=True)
    assert "recorded gradients" in run.stdout, run.stderr[-2000:]


class Tensors(list):
    """Rows of several lengths, as a nested tensor holds them."""

    def unbind(self):
        return [torch.tensor(row) for row in self]

    def tolist(self):
        return list(self)


@pytest.fixture
def trainers(monkeypatch):
    """verl's two trainers with their `_log_rollout_data`, and a queue of `verl_dump.expected`."""
    rows = [*verl_dump.expected(), ("pad" + 32 * "0", [0], [0], [0], 0.0, [0.0], 2)]
    columns = {
        "uid": Tensors(row[0] for row in rows), "prompts": Tensors(row[1] for row in rows),
        "responses": Tensors(row[2] for row in rows), "loss_mask": Tensors(row[3] for row in rows),
        "response_mask": Tensors([0] * len(row[3]) for row in rows),
        "rm_scores": Tensors([row[4], *[0.0] * (len(row[2]) - 1)] for row in rows),
        "rollout_log_probs": Tensors(row[5] for row in rows),
        "old_log_probs": Tensors([x - 0.125 for x in row[5]] for row in rows),
    }  # fmt: skip
    queue = ModuleType("transfer_queue")
    queue.kv_batch_get = lambda keys, partition_id, select_fields: {
        name: columns[name] for name in select_fields if name in columns
    }
    tags = [{"min_global_steps": row[6], "max_global_steps": 2} for row in rows]
    keys = [f"{row[0]}_{k}_0" for k, row in enumerate(rows)]

    class PPOTrainer:
        global_steps = 3
        batch = SimpleNamespace(
            keys=keys, partition_id="train", tags=[*tags[:-1], {"is_padding": True}]
        )

        def _log_rollout_data(self, batch, timing_raw, rollout_data_dir):
            """As verl writes it, afterwards."""
            Path(rollout_data_dir, "3.jsonl").write_text('{"input": "a"}\n' * 9)

    class RayPPOTrainer(PPOTrainer):
        batch = "none"

        def _log_rollout_data(self, batch, reward_extra_infos_dict, timing_raw, rollout_data_dir):
            PPOTrainer._log_rollout_data(self, batch, timing_raw, rollout_data_dir)

    for name, trainer in (("v1.trainer_base", PPOTrainer), ("ray_trainer", RayPPOTrainer)):
        module = ModuleType(f"verl.trainer.ppo.{name}")
        setattr(module, trainer.__name__, trainer)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("verl", "verl.trainer", "verl.trainer.ppo", "verl.trainer.ppo.v1"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "transfer_queue", queue)
    monkeypatch.delitem(sys.modules, "grpo_ustat.integrations.verl_record", raising=False)
    importlib.import_module("grpo_ustat.integrations.verl_record")
    yield PPOTrainer, RayPPOTrainer
    del sys.modules["grpo_ustat.integrations.verl_record"]


def test_tokens_are_written_beside_the_dump_of_verl_and_converted(trainers, tmp_path, capsys):
    trainer = trainers[0]()
    (tmp_path / "dump").mkdir()
    trainer._log_rollout_data(trainer.batch, {}, str(tmp_path / "dump"))
    verl_dump.check(tmp_path / "dump")
    assert f"tokens of step 3 are in {tmp_path}/dump/3.parquet" in capsys.readouterr().out
    row = parquet.read_table(tmp_path / "dump/3.parquet").to_pylist()[5]
    assert (row["sample"], row["max_global_steps"]) == ("g1_5_0", 2)


def test_an_error_while_tokens_are_written_ends_no_training(trainers, tmp_path, capsys):
    """The older trainer is handed a batch that is none; verl's own dump is written all the same."""
    trainers[1]()._log_rollout_data("none", {}, {}, rollout_data_dir=str(tmp_path))
    assert "tokens of step 3 were not written: AttributeError" in capsys.readouterr().out
    assert (tmp_path / "3.jsonl").is_file() and not (tmp_path / "3.parquet").exists()


@pytest.mark.nightly(minutes=0.6)
def test_the_living_verl_dumps_tokens(monkeypatch, tmp_path):
    pytest.importorskip("verl", reason="verl is not installed")
    pytest.importorskip("transfer_queue", reason="TransferQueue is not installed")
    monkeypatch.setenv("PYTHONPATH", ":".join([str(ROOT), *sys.path]))
    command = [sys.executable, ROOT / "tests/helpers/verl_dump.py", tmp_path]
    run = subprocess.run(command, capture_output=True, text=True)
    assert "verl writes" in run.stdout, run.stderr[-2000:]
