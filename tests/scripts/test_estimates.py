"""The script that compares estimates with runs, without running any."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from commands import compose

SCRIPT = Path(__file__).parents[2] / "scripts/benchmarks/estimates.py"


@pytest.mark.nightly
def test_every_command_is_composed_and_compared(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("estimates", SCRIPT)
    estimates = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(estimates)
    for verb, words, before in estimates.COMMANDS.values():
        for one in (words, before or []):
            if "{model}" not in " ".join(one) and "-m" not in one:
                compose(verb, *one)
    monkeypatch.setattr(estimates, "measured", lambda *_: {"seconds": 10.0, "peak_mb": 600.0})
    monkeypatch.chdir(tmp_path)
    arguments = ["estimates.py", "--only", "train, seconds", "--json", "out.json"]
    monkeypatch.setattr("sys.argv", arguments)
    estimates.main()
    rows = json.loads((tmp_path / "out.json").read_text())
    assert rows["train, seconds"]["estimated"]["seconds"] is None
    assert "seconds unknown, peak_mb 630 / 600 = 1.05" in capsys.readouterr().out
