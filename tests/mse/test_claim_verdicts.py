"""Whole studies that judge published claims, of their own rollouts and of a file's."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from commands import compose
from pyarrow import parquet
from test_exact_rollouts import rows_of, sampled, write

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.measurements.base import Study
from grpo_ustat.measurements.registry import tables
from grpo_ustat.measurements.verdicts import VERDICTS
from grpo_ustat.mse import study as study_run
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.runs.record import RunRecord

BOTH = "study.corrections=[token_truncate,sequence_truncate]"
GAP_CLAIMS = (
    "a mismatch between sampler and model must be corrected",
    "ratios of the sequence (truncated) beat ratios of tokens",
)


@pytest.mark.slow(minutes=0.5)
def test_a_study_leaves_them_in_its_result_and_on_its_page(tmp_path, capsys):
    words = ("experiment=verdicts", "debug=mse", "model=tiny_base", "study.questions=12")
    config = compose(
        "mse", *words, "launch.workers=1", "group_sizes=[4]", "study.scored_by=embedded:tiny",
        "study.rollouts=16", "budget.loss_draws=4",
    )  # fmt: skip
    study_run.run(config, RunFolder(tmp_path / "run", config))
    result = json.loads((tmp_path / "run/result.json").read_text())
    claims = [row["claim"] for row in result["verdicts"]]
    assert len(claims) == len(set(claims)) == 12
    assert any("ratios of the sequence (product)" in claim for claim in claims)
    printed = capsys.readouterr().out
    (table,) = tables(Study(RunRecord(tmp_path / "run")), [VERDICTS])
    assert "Published claims on this policy" in printed and "arXiv" not in printed
    page = (tmp_path / "run/report.html").read_text()
    assert "Published claims on this policy" in page and "arXiv 2605.17570" in page
    assert len(table.rows) == len(claims)
    assert all(math.isfinite(row["holm_p"]) for row in result["verdicts"] if "number" in row)


@pytest.mark.nightly(minutes=1)
def test_a_study_judges_a_samplers_gap(tmp_path, capsys):
    """Log-probabilities 0.04 nats a token off on average, the same verdicts whatever the other
    losses. Right are the shorter ones of a question, whose gradient a few questions show.
    """
    rollouts, _, _ = sampled(questions=40, completions=12)
    noise = np.random.default_rng(0).normal(scale=0.05, size=rollouts.logprobs_PGT.shape)
    off = replace(rollouts, logprobs_PGT=rollouts.logprobs_PGT + noise * rollouts.mask_PGT)
    lengths_PG = rollouts.mask_PGT.sum(axis=-1)
    rewards_PG = (lengths_PG < np.median(lengths_PG, axis=1, keepdims=True)).astype(float)
    path = write(tmp_path / "r.parquet", rows_of(off, rewards_PG))
    words = ("experiment=verdicts", "model=tiny_base", "launch.workers=1", "group_sizes=[4]",
             "study.rollouts=16", "budget.loss_draws=4")  # fmt: skip
    found = {}
    for objectives in ("[]", "[trl_grpo]"):
        config = compose("mse", *words, f"pool={path}", BOTH, f"objectives={objectives}")
        folder = tmp_path / objectives.strip("[]") / "run"
        study_run.run(config, RunFolder(folder, config))
        result = json.loads((folder / "result.json").read_text())
        rows = {row["claim"]: row for row in result["verdicts"]}
        found[objectives] = [rows[claim] for claim in GAP_CLAIMS]
        page, printed = (folder / "report.html").read_text(), capsys.readouterr().out
        assert "within 0.0" in printed and "a mismatch" in printed
        assert "vllm_importance_sampling_correction" in page and "trl#4493" in page
    corrected, by_sequence = found["[]"]
    assert corrected["number"] == pytest.approx(1, abs=0.1)  # such a gap changes little
    assert by_sequence["number"] > 0 and "nats per token" in by_sequence["beside"]
    numbers = [[row["number"] for row in rows] for rows in found.values()]
    assert numbers[0] == pytest.approx(numbers[1])
    bare = tmp_path / "bare.parquet"
    parquet.write_table(parquet.read_table(path).drop_columns(["logprobs"]), bare)
    config = compose("mse", *words, f"pool={bare}", BOTH)
    with pytest.raises(ConfigError, match="log-probabilities .*column logprobs.* log them"):
        study_run.run(config, RunFolder(tmp_path / "bare", config))
    assert not list((tmp_path / "bare").rglob("*.json"))
