"""The case of speed.py that compares estimates with runs, without running any."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import pytest
from commands import compose

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts/benchmarks"))
from timed import estimates  # noqa: E402


@pytest.mark.nightly
def test_every_command_is_composed_and_compared(tmp_path, monkeypatch):
    for verb, words, before in estimates.COMMANDS.values():
        for several in (words, before or []):
            if "{model}" not in " ".join(several) and "-m" not in several:
                compose(verb, *several)
    executed = []
    monkeypatch.setattr(estimates, "execute", lambda *words: executed.append(words))
    monkeypatch.chdir(tmp_path)
    asked = argparse.Namespace(model=None, only=list(estimates.COMMANDS))
    assert estimates.programs(asked) == ["train, seconds", "train", "mse", "sweep"]
    row = estimates.prepare(asked, "train, seconds")()
    assert math.isnan(row["estimated s"]) and 500 < row["estimated MB"] < 800
    assert [(verb, *words[:-1]) for verb, words in executed] == [("train", "debug=train")]
