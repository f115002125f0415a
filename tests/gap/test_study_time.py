"""What `dry_run=true` says of a study's time."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict

import pytest
import yaml
from commands import compose
from folders import completed

from grpo_ustat.gap.study import RATE, assumed_seconds, earlier_seconds, show_plan
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.runs.result import TheoremResult
from grpo_ustat.runs.status import PlannedRun


def planned(root, *words):
    config = compose("gap", "study=lemma6", "launch.workers=2", f"output_root={root}", *words)
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


def test_nothing_earlier_is_a_wide_assumption(tmp_path, capsys):
    """30 M completions of two workers: 0.75 to 10 s."""
    assert assumed_seconds(30_000_000, 2) == pytest.approx((0.75, 10))
    assert RATE.high / RATE.low == pytest.approx(40 / 3)
    assert earlier_seconds(planned(tmp_path), 1000) is None
    show_plan([planned(tmp_path)])
    text = " ".join(capsys.readouterr().out.split())
    assert "Time: a guess, 1.5 to 20 million completions a second for each of 2 workers" in text


def test_an_earlier_study_of_the_same_size_tells_to_1_3_times(tmp_path):
    """8 s, and 13 s of another; 1030 completions in place of 1000 are the same size."""
    left(tmp_path, "a", 8.0, 1030)
    assert earlier_seconds(planned(tmp_path), 1000) == pytest.approx(
        (8 / 1.03 / 1.3, 8 / 1.03 * 1.3)
    )
    left(tmp_path, "b", 13.0, 1000)
    left(tmp_path, "c", 90.0, 9000)  # of another size: says less than those
    assert earlier_seconds(planned(tmp_path), 1000) == pytest.approx((8 / 1.03 / 1.3, 13 * 1.3))


def test_of_another_size_it_tells_to_twice(tmp_path, capsys):
    left(tmp_path, "a", 8.0, 1000)
    assert earlier_seconds(planned(tmp_path), 3000) == pytest.approx((12, 48))
    other = compose("gap", "study=theorem8", f"output_root={tmp_path}")
    show_plan([planned(tmp_path), PlannedRun("", other, None, None)])
    text = " ".join(capsys.readouterr().out.split())
    assert "Time: measured, earlier studies of this kind and bed here" in text
    assert "Time of others: a guess" in text


def test_a_study_without_draws_takes_what_it_took(tmp_path):
    left(tmp_path, "a", 8.0, 0)
    assert earlier_seconds(planned(tmp_path), 0) == pytest.approx((8 / 1.3, 8 * 1.3))


@pytest.mark.parametrize("words, changes", [
    (("bed=softmax",), {}), (("launch.workers=1",), {}), ((), {"host": "elsewhere"}),
    ((), {"study": 3}),
])  # fmt: skip
def test_others_tell_nothing(tmp_path, words, changes):
    left(tmp_path, "a", 8.0, 1000, *words, **changes)
    assert earlier_seconds(planned(tmp_path), 1000) is None


@pytest.mark.parametrize("result", ["{", "[]", '{"cost": {"seconds": "8", "rollouts": 1}}'])
def test_damaged_results_tell_nothing(tmp_path, result):
    (left(tmp_path, "a", 8.0, 1000) / "result.json").write_text(result)
    assert earlier_seconds(planned(tmp_path), 1000) is None
