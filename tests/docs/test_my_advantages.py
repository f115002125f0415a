"""Advantage functions that docs/verl.md shows for verl and slime, under stand-ins for these,
and gradients that verl once made with its settings.

`VERL_USE_EXTERNAL_MODULES=my_advantages python -m verl.trainer.main_ppo` imports the first.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from readme import PAGES, section
from verl_run import ORDER, REWARDS_PG, THEIRS, UIDS, batch

from grpo_ustat.estimators.baselines import advantages
from grpo_ustat.records import BaselineContext

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests/data/verl_gradients.json"
RECORD = json.loads(FILE.read_text())


def expected(baseline, options):
    rows = advantages(baseline, REWARDS_PG, BaselineContext(), options).ravel()[ORDER]
    return torch.tensor(rows[:, None], dtype=torch.float32)


def shown(folder, number, **modules):
    """A block of the page's section as a module, under stand-ins of what it imports."""
    text = section(PAGES["docs/verl.md"], "An advantage of yours")
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (folder / "my_advantages.py").write_text(code[number])
    spec = importlib.util.spec_from_file_location("my_advantages", folder / "my_advantages.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in modules.items():
            place = name.replace("__", ".")
            for upper in [place[:at] for at, sign in enumerate(place) if sign == "."]:
                patch.setitem(sys.modules, upper, ModuleType(upper))
            patch.setitem(sys.modules, place, stand_in)
        spec.loader.exec_module(module)
    return module


def test_the_function_of_the_page_is_an_estimator_of_verl(tmp_path):
    """Groups are the rows of a uid; those that fill up the batch have no part."""
    registry = {}
    core_algos = SimpleNamespace(
        register_adv_est=lambda name: lambda function: registry.setdefault(name, function)
    )
    shown(tmp_path, 0, verl__trainer__ppo__core_algos=core_algos)
    rewards, mask = batch()
    result = registry["my_leave_one_out"](
        token_level_rewards=torch.cat([rewards, rewards[:2]]),
        response_mask=torch.cat([mask, mask[:2]]), config=None, index=[*UIDS, "pad0", "pad1"],
    )  # fmt: skip
    right = torch.cat([expected("leave_one_out", {}) * mask, torch.zeros(2, 4)])
    for tokens in result:
        assert tokens.dtype == torch.float32 and torch.allclose(tokens, right, rtol=0, atol=1e-7)


def test_the_function_of_the_page_is_an_advantage_function_of_slime(tmp_path, monkeypatch):
    """As slime's `rollout.py` deals samples out: those of a prompt to several ranks."""
    dealt, prompts = [[3, 8, 0, 1], [7, 2, 5, 4, 6]], [4, 9, 2]

    def rank_data(rows):
        return {
            "rewards": [float(REWARDS_PG.ravel()[row]) for row in rows],
            "sample_indices": [3 * prompts[row // 3] + row % 3 for row in rows],
            "kl": [torch.zeros(1 + row) for row in rows],
        }

    def gather(parts, mine, group):
        both = [rank_data(rows) for rows in dealt]
        parts[:] = [dict(zip(d["sample_indices"], d["rewards"], strict=True)) for d in both]
        assert mine in parts and group == "ranks"

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    core = SimpleNamespace(mpu=SimpleNamespace(get_data_parallel_group=lambda: "ranks"))
    function = shown(tmp_path, 1, megatron__core=core).my_leave_one_out
    flat = advantages("leave_one_out", REWARDS_PG, BaselineContext()).ravel()
    for rows in dealt:
        data = rank_data(rows)
        function(SimpleNamespace(n_samples_per_prompt=3), data)
        for tokens, row in zip(data["advantages"], rows, strict=True):
            assert torch.allclose(tokens, torch.full((1 + row,), flat[row]).float())
        assert data["returns"] is data["advantages"]


def test_recorded_gradients_of_verl_are_our_advantages():
    """By verl 0.9.1's `compute_advantage` and `agg_loss`, with the settings of docs/verl.md: of
    verl's own estimators that are baselines of ours.
    """
    _, mask = batch()
    assert RECORD["gradients"].keys() == THEIRS.keys()
    for name, baseline in THEIRS.items():
        recorded = torch.tensor(RECORD["gradients"][name])
        torch.testing.assert_close(recorded, expected(*baseline) * mask / 9, rtol=1e-5, atol=1e-7)


@pytest.mark.nightly(minutes=0.3)
def test_the_living_verl_makes_the_recorded_gradients(monkeypatch):
    pytest.importorskip("verl", reason="verl is not installed")
    monkeypatch.setenv("PYTHONPATH", ":".join([str(ROOT), *sys.path]))
    command = [sys.executable, ROOT / "tests/helpers/verl_run.py", FILE]
    run = subprocess.run(command, capture_output=True, text=True)
    assert "recorded gradients" in run.stdout, run.stderr[-2000:]
