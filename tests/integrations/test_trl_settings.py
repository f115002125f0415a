"""Settings of TRL's own notebooks and launch lines with the callback: those that are measured are,
the others say why not, and both train on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason='TRL is not installed: pip install -e ".[trl]"')

import trl_settings  # noqa: E402
from forks import free_port  # noqa: E402
from trl_settings import SETTINGS  # noqa: E402

import grpo_ustat.integrations.trl  # noqa: E402, F401

ROOT = Path(__file__).parents[2]


def named(*ways):
    """Settings that run in these ways."""
    return [name for name, setting in SETTINGS.items() if setting.way in ways]


@pytest.fixture(scope="module")
def table(request):
    """Rows of what happened, printed when all have run."""
    rows = ["| setting | in short | | line |", "| --- | --- | --- | --- |"]
    yield rows
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("", *rows, sep="\n")


def check(name, done, table):
    """Measured or refused as expected, and trained to the end."""
    setting = SETTINGS[name]
    table.append(
        f"| {name} | {setting.words()} | {'accepted' if done['accepted'] else 'refused'} "
        f"| {done['line']} |"
    )
    assert done["steps"] == done["expected_steps"] and done["loss_is_finite"]
    assert bool(done["tool_calls"]) == bool(setting.tools)
    if setting.refused:
        assert not done["accepted"]
        assert setting.refused in done["line"]
    else:
        assert done["accepted"], done["line"]
        assert "grpo_ustat step" in done["line"]
        assert done["groups"] >= trl_settings.WINDOW_GROUPS


@pytest.mark.nightly(minutes=0.3)
@pytest.mark.parametrize("name", named("single"))
def test_on_one_process(name, table, tmp_path):
    if SETTINGS[name].four_bit:
        pytest.importorskip("bitsandbytes")
    check(name, trl_settings.run(name, tmp_path), table)


@pytest.mark.nightly(minutes=0.7)
@pytest.mark.parametrize("name", named("zero2", "zero3"))
def test_launched_with_deepspeed(name, table, tmp_path):
    pytest.importorskip("deepspeed")
    command = [sys.executable, "-m", "torch.distributed.run",
               f"--nproc_per_node={trl_settings.RANKS}", f"--master_port={free_port()}",
               str(ROOT / "tests/helpers/trl_settings.py"), str(tmp_path), name]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launched = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert launched.returncode == 0, launched.stderr[-3000:]
    ranks = [
        json.loads((tmp_path / f"rank-{rank}.json").read_text())
        for rank in range(trl_settings.RANKS)
    ]
    assert ranks[0]["accepted"] == ranks[1]["accepted"]
    assert bool(ranks[0]["sharded"]) == (SETTINGS[name].way == "zero3")
    check(name, ranks[0], table)
