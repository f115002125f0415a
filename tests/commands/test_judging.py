"""Answers that could not be judged are counted wherever completions are judged."""

from __future__ import annotations

import csv
import json
from collections import Counter

import pyarrow.parquet as parquet
import pytest
from commands import compose
from training_runs import fit

from grpo_ustat.mse import study as study_run
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.tasks import registry
from grpo_ustat.tasks.base import NumberJudge


class Fragile(NumberJudge):
    """Times out on every text with "so", fails on others with "then"."""

    def __init__(self):
        super().__init__()
        self.counts.update(timeouts=0, failures=0)

    def rewards(self, prompts, completions):
        self.counts.update(filter(None, map(trouble, completions)))
        right = super().rewards(prompts, completions)
        return [0.0 if trouble(t) else r for t, r in zip(completions, right, strict=True)]


def trouble(text):
    return "timeouts" if "so" in text else "failures" if "then" in text else None


@pytest.fixture(autouse=True)
def fragile(monkeypatch):
    monkeypatch.setattr(registry, "NumberJudge", Fragile)


@pytest.mark.slow
def test_training_counts_them_by_step_and_evaluation(tmp_path):
    path = fit(tmp_path / "run", "log_completions=16")
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    kept = parquet.read_table(path / "completions.parquet").to_pylist()
    for row in rows:
        texts = [c["completion"] for c in kept if c["step"] == row["step"]]
        found = Counter(map(trouble, texts))
        assert len(texts) == 16
        assert row["judge/timeouts"] == found["timeouts"]
        assert row["judge/failures"] == found["failures"]
    assert sum(row["judge/timeouts"] for row in rows) > 0
    assert json.loads((path / "result.json").read_text())["alarms"]["unjudged"] >= 1
    with (path / "eval.csv").open() as file:
        evaluated = list(csv.DictReader(file))
    assert len({row["judge/timeouts"] for row in evaluated} - {"0"}) >= 1


@pytest.mark.slow
def test_study_counts_answers_not_judged_also_on_a_stored_pool(tmp_path):
    found = []
    for name in ("one", "two"):
        config = compose("mse", "debug=mse", "model=tiny_base", f"pool={tmp_path / 'pool'}")
        path = tmp_path / name
        study_run.run(config, RunFolder(path, config))
        found.append(json.loads((path / "result.json").read_text()))
    one, two = (result["cost"] for result in found)
    assert one["judge_timeouts"] == two["judge_timeouts"] > 0
    assert one["judge_failures"] == two["judge_failures"] > 0
    total = one["judge_timeouts"] + one["judge_failures"]
    assert f"{total} of {one['rollouts']} " in found[0]["summary"]
