"""The tokens of verl's rollouts: stand-ins of its trainers; where verl is installed, verl itself.

`VERL_USE_EXTERNAL_MODULES=grpo_ustat.integrations.verl_record python -m verl.trainer.main_ppo`
begins as the nightly test does: verl imports the module while it is imported itself.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import verl_dump
from pyarrow import parquet

ROOT = Path(__file__).parents[2]


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
