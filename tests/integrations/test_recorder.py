"""The reward function that logs tokens, and that the package needs TRL only where it says so."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import trl_room

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.integrations.trl.recorder import record


class Trainer(trl_room.GRPOTrainer):
    extra = None

    def _tokenize_prompts(self, prompts):
        return [[len(prompt), 9] for prompt in prompts], None, {}

    def log_extra(self, column, values):
        self.extra = (self.extra or {}) | {column: values}


def test_it_rewards_nothing_and_logs_tokens_and_the_step():
    trainer = Trainer()
    rewards = record(
        prompts=["ab", "abc"], completions=["x", "y"], completion_ids=[[5, 6], [7]],
        trainer_state=SimpleNamespace(global_step=3), log_extra=trainer.log_extra, answer=[1, 2],
    )  # fmt: skip
    assert rewards == [None, None]
    assert trainer.extra == {
        "prompt_ids": [[2, 9], [3, 9]], "completion_ids": [[5, 6], [7]], "policy_step": [3, 3],
    }  # fmt: skip


def test_runs_with_tools_are_refused():
    trainer = Trainer(tools=[print])
    with pytest.raises(ConfigError, match="a run with tools"):
        record(["a"], [[5]], SimpleNamespace(global_step=0), trainer.log_extra)


@pytest.mark.parametrize("version", [None, "1.15.2"])
def test_without_trl_the_import_ends_in_one_line(version, monkeypatch):
    def ask(name):
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", ask)
    module = importlib.import_module("grpo_ustat.integrations.trl")
    with pytest.raises(ImportError, match='pip install "trl>=1.16"') as caught:
        importlib.reload(module)
    assert "\n" not in str(caught.value) and caught.value.__suppress_context__ == (version is None)


WITHOUT_COMMANDS = """
import sys

absent = ("gx2", "hydra", "math_verify", "matplotlib", "omegaconf", "pyarrow")
sys.modules.update(dict.fromkeys(absent))
import trl_room
from grpo_ustat.integrations.trl import GradientNoiseCallback, record
"""


@pytest.mark.slow(minutes=1)
def test_it_needs_nothing_that_is_of_the_commands_alone():
    """A training environment may have the score engine and TRL alone."""
    helpers = Path(trl_room.__file__).parent
    paths = os.pathsep.join([str(helpers), str(helpers.parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMMANDS], env=os.environ | {"PYTHONPATH": paths},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
