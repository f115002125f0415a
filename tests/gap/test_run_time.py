"""What `dry_run=true` says of a study's time."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict

import pytest
import yaml
from commands import compose
from folders import completed

from grpo_ustat.gap.evidence import theorem
from grpo_ustat.gap.run import earlier_seconds, show_plan
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.runs.result import TheoremResult
from grpo_ustat.runs.status import PlannedRun


def planned(root, *words):
    config = compose("gap", "theorem=lemma6", "launch.workers=2", f"output_root={root}", *words)
    return PlannedRun("", config, RunFolder(root / "gap/x/seed-9", config), None)


def left(root, name, seconds, rollouts, *words, host=None, **changes):
    """What a finished study leaves of itself."""
    path = root / "gap" / name / "seed-0"
    (path / ".hydra").mkdir(parents=True)
    config = asdict(planned(root, *words).config) | changes
    (path / ".hydra/config.yaml").write_text(yaml.safe_dump(config))
    (path / "code.json").write_text("{}")
    row = {"event": "start", "host": host or socket.gethostname()}
    (path / "launches.jsonl").write_text(json.dumps(row) + "\n")
    cost = {"seconds": seconds, "rollouts": rollouts}
    (path / "result.json").write_text(json.dumps(completed(TheoremResult, {"cost": cost})))
    return path


def test_nothing_earlier_leaves_the_time_out(tmp_path, capsys):
    assert earlier_seconds(planned(tmp_path), 1000) is None
    show_plan([planned(tmp_path)])
    text = " ".join(capsys.readouterr().out.split())
    assert text.count(" unknown ") == 2  # in the table and in the note


@pytest.mark.parametrize("words", [
    "lemma6 theorem.steps=3", "theorem7 theorem.steps=[2,3]", "theorem8 theorem.steps=[2,3]",
    "theorem7_total theorem.totals=[128] theorem.steps=[2,4] theorem.constant_rates=[]",
    "corollaries9_10 theorem.steps=4", "proposition13 theorem.steps=4", "lemma11",
])  # fmt: skip
def test_a_study_draws_as_many_completions_as_a_dry_run_says(words):
    few = () if words == "lemma11" else ("theorem.replicates=10", "launch.workers=1")
    experiment = compose("gap", *f"theorem={words}".split(), *few).experiment
    record = theorem(experiment.theorem.kind)
    assert record.run(experiment).rollouts == record.completions(experiment)


@pytest.mark.slow(minutes=0.02)
def test_the_newest_study_tells_the_rate(tmp_path, capsys):
    """1000 completions in 8 s: 3000 take 24 s. A sum needs all of them."""
    old = left(tmp_path, "a", 90.0, 1000) / "result.json"
    os.utime(old, (old.stat().st_mtime - 60,) * 2)
    left(tmp_path, "b", 8.0, 1000)
    assert earlier_seconds(planned(tmp_path), 3000) == pytest.approx(24)
    other = compose("gap", "theorem=theorem8", f"output_root={tmp_path}")
    show_plan([planned(tmp_path), PlannedRun("", other, None, None)])
    text = " ".join(capsys.readouterr().out.split())
    assert text.count(" unknown ") == 3  # of the other study, of the sum, and in the note


def test_a_study_without_draws_takes_what_it_took(tmp_path):
    left(tmp_path, "a", 8.0, 0)
    assert earlier_seconds(planned(tmp_path), 0) == 8


@pytest.mark.parametrize("words, changes", [
    (("problem=softmax",), {}), (("launch.workers=1",), {}), ((), {"host": "elsewhere"}),
    ((), {"theorem": 3}),
])  # fmt: skip
def test_others_tell_nothing(tmp_path, words, changes):
    left(tmp_path, "a", 8.0, 1000, *words, **changes)
    assert earlier_seconds(planned(tmp_path), 1000) is None


@pytest.mark.parametrize("result", ["{", "[]", '{"cost": {"seconds": "8", "rollouts": 1}}'])
def test_damaged_results_tell_nothing(tmp_path, result):
    (left(tmp_path, "a", 8.0, 1000) / "result.json").write_text(result)
    assert earlier_seconds(planned(tmp_path), 1000) is None
