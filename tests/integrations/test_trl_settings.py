"""Settings of TRL's own notebooks and launch lines with the callback: those that are measured are,
the others say why not, and both train on.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("trl", reason='TRL is not installed: pip install -e ".[trl]"')

import trl_settings  # noqa: E402
from trl_run import launched  # noqa: E402
from trl_settings import SETTINGS  # noqa: E402

import grpo_ustat.integrations.trl  # noqa: E402, F401


def named(*ways):
    """Settings that run in these ways."""
    return [name for name, setting in SETTINGS.items() if setting.way in ways]


def check(name, done):
    """Measured or refused as expected, and trained to the end."""
    setting = SETTINGS[name]
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
def test_on_one_process(name, tmp_path):
    if SETTINGS[name].four_bit:
        pytest.importorskip("bitsandbytes")
    check(name, trl_settings.run(name, tmp_path))


@pytest.mark.nightly(minutes=0.7)
@pytest.mark.parametrize("name", named("zero2", "zero3"))
def test_launched_with_deepspeed(name, tmp_path):
    pytest.importorskip("deepspeed")
    done = launched("trl_settings.py", tmp_path, name, ranks=trl_settings.RANKS)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [
        json.loads((tmp_path / f"rank-{rank}.json").read_text())
        for rank in range(trl_settings.RANKS)
    ]
    assert ranks[0]["accepted"] == ranks[1]["accepted"]
    assert bool(ranks[0]["sharded"]) == (SETTINGS[name].way == "zero3")
    check(name, ranks[0])
