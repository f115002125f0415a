"""The study end to end, small; what its folder holds; agreement of the two methods."""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.baselines import BASELINES
from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.estimators.scaling import ScalingLaw, divisors
from grpo_ustat.measurements.base import Study
from grpo_ustat.measurements.group_size import study_answer, summary_text
from grpo_ustat.measurements.next_step import next_step
from grpo_ustat.mse import study as study_run
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.runs.record import RunRecord

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from commands import compose, run  # noqa: E402
from launching import finished as typed  # noqa: E402
from prompt_pools import study_of_pool  # noqa: E402

SMALL = ("debug=mse", "model=tiny_base")
FINISHED = (
    "model=tiny_direct", "study.methods=[closed_form,monte_carlo]", "group_sizes=[2,4]",
    "budget=study_smoke",
)  # fmt: skip
CURVE_KEYS = {
    "method", "baseline", "target", "setting", "interval", "group_size", "num_prompts",
    "replicates", "mse", "low", "high", "bias2", "variance", "relative_mse", "best_scalar_mse",
    "cosine", "unbiased",
}  # fmt: skip


def study(path, *overrides):
    config = compose("mse", *SMALL, *overrides)
    study_run.run(config, RunFolder(path, config))
    return json.loads((path / "result.json").read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory, every_format):
    path = tmp_path_factory.mktemp("study")
    return path, study(path, *FINISHED)


@pytest.mark.slow
def test_a_study_of_too_few_questions_for_the_scaling_law_is_shown_again(tmp_path):
    """C1, C2, C3 and the curve are null; the reader had called this result damaged."""
    few = ("model=tiny_direct", "study.questions=3", "group_sizes=[2,4]")
    result = study(tmp_path / "run", *few)
    assert result["scaling"]["c1"] is result["scaling"]["curve"][0]["n_mse"] is None
    assert study(tmp_path / "run", *few) == result


@pytest.mark.slow(minutes=0.02)
def test_the_folder_holds_what_it_promises(finished):
    path, result = finished
    names = {p.name for p in path.iterdir()}
    pictures = {
        f"{name}.{kind}"
        for name in ("figure", "scaling", "recipes")
        for kind in ("pdf", "svg", "png")
    }
    always = {".hydra", "code.json", "launches.jsonl", "result.json"}
    views = {"curves.csv", "completions.parquet", "report.html"}
    assert names == {*always, *views, "pool", *pictures}
    assert all(set(row) == CURVE_KEYS for row in result["curves"])
    assert len(result["curves"]) == 2 * 4 * 2
    for name in ("c1", "c2", "c3", "gstar", "gstar_paper", "gstar_tokens"):
        assert {name, f"{name}_low", f"{name}_high"} <= set(result["scaling"])
    for name in ("corr", "share", "av_minus_abstar", "av_minus_a0"):
        assert {name, f"{name}_low", f"{name}_high"} <= set(result["assumption2"])
    assert {
        "a0",
        "a_v",
        "a_bstar",
        "crossover_group_size",
        "zero_variance_share_at_crossover",
    } <= set(result["assumption2"])
    names = {"quantity", "mean_reward", "mean_reward_low", "mean_reward_high", "mean_length"}
    assert names <= set(result["policy"])
    assert {"rollouts", "tokens", "seconds_generate", "seconds_score"} <= set(result["cost"])
    assert result["metric"]["parameters"] == 204032
    assert result["config_hash"] and result["versions"]["torch"]


@pytest.mark.slow
def test_the_best_size_at_a_prime_number_of_rollouts_is_that_of_the_answer(tmp_path):
    """The next multiple of 8: 97 has no divisor but itself."""
    wanted = ("model=tiny_direct", "study.rollouts=97", "study.questions=40", "group_sizes=[2]")
    result = study(tmp_path / "run", *wanted)
    scaling = result["scaling"]
    law = ScalingLaw.stored(*map(scaling.get, ("c1", "c2", "c3", "covariance", "dof")))
    assert scaling["best_divisor"]["97"] == law.least(divisors(104)) < 97


@pytest.mark.slow(minutes=0.02)
def test_the_table_and_the_json_agree(finished):
    path, result = finished
    rows = list(csv.DictReader((path / "curves.csv").open()))
    assert [float(row["mse"]) for row in rows] == [row["mse"] for row in result["curves"]]


@pytest.mark.slow(minutes=0.02)
def test_the_pdf_embeds_its_fonts(finished):
    path, _ = finished
    pdf = (path / "figure.pdf").read_bytes()
    assert b"/FontFile2" in pdf and b"/Type3" not in pdf


@pytest.mark.slow(minutes=0.02)
def test_rows_obey_their_identities(finished):
    _, result = finished
    rows = {(r["method"], r["baseline"], r["group_size"]): r for r in result["curves"]}
    for row in rows.values():
        assert row["mse"] == pytest.approx(row["bias2"] + row["variance"])
        assert row["low"] < row["mse"] < row["high"]
    for size in (2, 4):
        shrunk, whole = (rows["closed_form", n, size] for n in ("group_mean", "leave_one_out"))
        assert shrunk["variance"] == pytest.approx(((size - 1) / size) ** 2 * whole["mse"])
        gap = whole["mse"] - rows["closed_form", "oracle", size]["mse"]
        questions = result["questions"]
        expected = result["scaling"]["c3"] / (size * (size - 1)) / questions
        assert gap == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow(minutes=0.5)
def test_rules_without_a_closed_form_stand_beside_those_that_have_one(tmp_path):
    """Of new questions, n = 8; of unbiased baselines best = mse t / (mse + t), relative = mse / t,
    t = ||grad J||^2.
    """
    result = study(
        tmp_path, "group_sizes=[2,3,4]", "study.rollouts=8", "budget.feature_sketch=300000",
        "budget.gradient_sketch=300000", "baselines=[oracle,leave_one_out,group_std,batch_std,opo]",
        "budget.pool_completions=24", "study.questions=12",
    )  # fmt: skip
    rows = {(r["setting"], r["baseline"], r["group_size"]): r for r in result["curves"]}
    once, new = "all_questions_once", "with_replacement"
    names = ["oracle", "leave_one_out"]
    assert [key[1:] for key in rows if key[0] == once] == [(x, g) for x in names for g in (2, 3, 4)]
    names += ["group_std", "batch_std", "opo"]
    assert [key[1:] for key in rows if key[0] == new] == [(x, g) for x in names for g in (2, 4)]
    assert {(row["baseline"], row["group_size"]) for row in result["not_measured"]} == {
        (name, 3) for name in names[2:]
    }
    for (setting, _, size), row in rows.items():
        assert row["interval"] == "questions"
        assert row["num_prompts"] == (12 if setting == once else 8 // size)
        if row["relative_mse"] is None or not row["unbiased"]:
            continue
        target_sq = row["mse"] / row["relative_mse"]
        best = row["mse"] * target_sq / (row["mse"] + target_sq)
        assert row["best_scalar_mse"] == pytest.approx(best, rel=1e-3)
    law = {row["group_size"]: row["n_mse"] for row in result["scaling"]["curve"]}
    for size in (2, 4):
        assert rows[new, "leave_one_out", size]["mse"] == pytest.approx(law[size] / 8, rel=1e-5)
        assert rows[new, "group_std", size]["low"] < rows[new, "group_std", size]["high"]


@pytest.mark.slow(minutes=0.02)
def test_a_finished_study_is_shown_again(finished, capsys):
    path, result = finished
    config = compose("mse", *SMALL, *FINISHED)
    value = study_run.run(config, RunFolder(path, config))
    assert "is complete" in capsys.readouterr().out
    assert value == result["curves"][0]["mse"]


@pytest.mark.slow(minutes=0.5)
def test_a_study_of_the_whole_zoo(tmp_path):
    """Every baseline that needs no training run, against fresh rollouts of a few questions."""
    names = [name for name, baseline in BASELINES.items() if not baseline.only_trains]
    result = study(
        tmp_path / "zoo", "study.methods=[monte_carlo]", f"baselines=[{','.join(names)}]",
        "group_sizes=[4,8]", "budget=study_smoke", "reward_funcs=[task,brevity]",
        "reward_weights=[0.5,0.5]",
    )  # fmt: skip
    rows = {(row["baseline"], row["group_size"]): row for row in result["curves"]}
    assert set(rows) == {(name, size) for name in names for size in (4, 8)}
    assert all(math.isfinite(row["mse"]) for row in rows.values())
    assert rows["optimal", 4]["mse"] != rows["oracle", 4]["mse"] != rows["remax", 4]["mse"]


@pytest.mark.slow
def test_the_command_runs_from_anywhere(tmp_path):
    code, out, err = run("mse", *SMALL, "study.questions=3", cwd=tmp_path)
    assert code == 0, err
    assert "Not enough data for a best G" in out and "page: " in out
    assert len(list(tmp_path.glob("outputs/mse/tiny_base-*/seed-0/result.json"))) == 1


@pytest.mark.slow(minutes=0.3)
def test_two_processes_give_the_figures_of_one(tmp_path):
    """Both methods and all groups; draws are equal, figures to 1e-6."""
    wanted = [*SMALL, "study.methods=[closed_form,monte_carlo]", "group_sizes=[2,4]",
              "baselines=[none,leave_one_out,oracle,batch_std]", "budget=study_smoke",
              "study.rollouts=8",
              "budget.pool_completions=16", "launch.workers=1"]  # fmt: skip
    for count, name in enumerate(("one", "two"), start=1):
        ranks = (f"launch.num_processes={count}", f"hydra.run.dir={tmp_path / name}")
        code, said = typed("mse", *wanted, *ranks, cwd=tmp_path / f"at-{name}", seconds=300)
        assert code == 0, said
        assert said.count("page: ") == 1
    one, two = (json.loads((tmp_path / n / "result.json").read_text()) for n in ("one", "two"))
    assert len(one["curves"]) == len(two["curves"]) > 0
    for a, b in zip(one["curves"], two["curves"], strict=True):
        for key, value in a.items():
            if isinstance(value, float):
                assert b[key] == pytest.approx(value, rel=1e-6, abs=1e-6), (a, key)
            else:
                assert b[key] == value
    parts = [sorted(p.name for p in (tmp_path / n / "pool").iterdir()) for n in ("one", "two")]
    assert parts[0] == parts[1]
    assert one["cost"]["rollouts"] == two["cost"]["rollouts"]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "questions, largest, completions, replicates",
    [
        pytest.param(2, 4, 128, 64, marks=pytest.mark.slow(minutes=0.8)),
        pytest.param(4, 8, 256, 48, marks=pytest.mark.nightly(minutes=2)),
    ],
)
def test_closed_forms_and_fresh_rollouts_agree_on_tiny(
    tmp_path, questions, largest, completions, replicates
):
    """Simultaneous 99 %."""
    names = ["none", "leave_one_out", "oracle", "group_mean"]
    result = study(
        tmp_path, "experiment=monte_carlo_check", "model=tiny_base", "launch.workers=1",
        f"study.questions={questions}",
        f"baselines=[{','.join(names)}]", f"group_sizes=[2,{largest}]",
        *(f"budget.{key}_completions={completions}" for key in ("pool", "reference", "value")),
        f"budget.replicates={replicates}",
    )  # fmt: skip
    rows = {(r["method"], r["baseline"], r["group_size"]): r for r in result["curves"]}
    pairs = [
        (rows["closed_form", *key], row)
        for (method, *key), row in rows.items()
        if method == "monte_carlo"
    ]
    limit, scores = stats.norm.ppf(1 - 0.01 / len(pairs) / 2), {}
    for ours, carlo in pairs:
        # The interval of the closed form covers other questions. For the 2 questions, a jackknife
        # over completions gave its error as 0.8 to 1.7 times that of the replicates. Both errors
        # count as equal here, which is too strict for the oracle.
        error = math.sqrt(2) * (carlo["high"] - carlo["low"]) / 2 / 1.96
        assert error < 0.2 * carlo["mse"], (ours, carlo)  # sharp enough to be worth comparing
        score = (ours["mse"] - carlo["mse"]) / error
        scores[ours["baseline"], ours["group_size"]] = round(score, 2)
    print(scores)
    assert len(pairs) == 8
    assert max(map(abs, scores.values())) < limit, scores


@pytest.mark.slow
def test_a_policy_that_is_never_right_is_reported_not_divided_by(tmp_path):
    result = study(tmp_path, "prompt.template='zz{question}'", "max_completion_length=3")
    assert result["policy"]["mean_reward"] == 0
    assert "assumption2" not in result and "scaling" not in result
    assert result["summary"] == (
        "All 64 completions got reward 0, so there is no gradient to measure: all were cut at "
        "max_completion_length=3."
    )


@pytest.mark.slow
def test_one_question_is_enough(tmp_path):
    result = study(tmp_path, "study.questions=1", "dataset.seed=2")
    assert 0 <= result["policy"]["mean_reward_low"] <= result["policy"]["mean_reward_high"] <= 1
    assert result["questions"] == 1 and result["policy"]["mean_reward_low"] is not None


@pytest.mark.slow
def test_nothing_is_drawn_anew_for_monte_carlo_where_all_rewards_are_equal(tmp_path):
    result = study(tmp_path, "study.methods=[monte_carlo]", "prompt.template='zz{question}'",
                   "max_completion_length=3", "budget=study_smoke", "group_sizes=[2]")  # fmt: skip
    assert "curves" not in result and result["cost"]["rollouts"] == 8 * 8


@pytest.mark.slow(minutes=0.02)
def test_cost_counts_every_rollout(finished):
    _, result = finished
    budget = {"pool": 8, "value": 16, "reference": 16, "replicates": 4 * 4}
    assert result["cost"]["rollouts"] == 8 * sum(budget.values())


class Found(dict):
    """A stand-in for ClosedForm."""

    @property
    def statistics(self):
        return self


def verdict_of(low, high, corr=(-0.1, 0.1), share=(-0.1, 0.3), gstar=(4.0, 3.0, math.inf)):
    middle = (low + high) / 2
    found = Found(
        {
            "corr": Interval(sum(corr) / 2, *corr),
            "av_minus_a0": Interval(middle, low, high),
            "share": Interval(sum(share) / 2, *share),
            "a0": Interval(0.0123, 0.01, 0.02),
            "a_v": Interval(2647.0, 2600.0, 2700.0),
            "crossover": Interval(3.0, 2.0, math.inf),
            "gstar": Interval(*gstar),
            "mse/none/2/all_questions_once/1": Interval(1.0, 0.5, 1.5),
            "mse/oracle/2/all_questions_once/1": Interval(2.0, 1.5, 2.5),
        }
    )
    pool = SimpleNamespace(rewards_PN=np.array([[0.0, 1.0]]))
    return summary_text(study_of_pool(pool, population=found, request=None))


def test_the_verdict_follows_the_intervals():
    assert "the oracle beats vanilla (no baseline) at every G" in verdict_of(-3, -1)
    assert "vanilla (no baseline) beats the oracle" in verdict_of(1, 3)
    assert (
        "not enough data to say whether vanilla (no baseline) or the oracle is better (A_V - "
        "A_0 in [-1.00, 3.00] for new questions)" in verdict_of(-1, 3)
    )
    assert "for G > 3.0 [2.0, infinity] (for new questions)" in verdict_of(-3, -1)
    assert "is not refuted" in verdict_of(-1, 3)
    assert "A_0 = 0.0123, A_V = 2650" in verdict_of(1, 3)


def test_the_share_decides_on_assumption_2_and_the_correlation_stands_beside_it():
    """A correlation of 0 hides covariances of both signs."""
    both = verdict_of(1, 3, share=(0.2, 0.4))
    assert (
        "fails; the correlation has different signs" in both
        and "lowers A_V by 30.0 % [20.0 %, 40.0 %]" in both
    )
    assert "corr(q, Z) = 0.000 [-0.100, 0.100], averaged over prompts" in both
    assert both.count("intervals for new questions") == 1
    assert "wrong answers have larger" in verdict_of(1, 3, (-0.4, -0.2), (0.2, 0.4))
    assert "wrong answers have larger" in verdict_of(1, 3, (-0.4, -0.2), (-0.1, 0.1))
    near = verdict_of(1, 3, (-0.41, -0.01), (-0.1, 0.1))  # misses 0, by less than the margin
    assert "is not refuted" in near
    assert "not tested" in verdict_of(1, 3, share=(math.nan, math.nan))


@pytest.mark.parametrize(
    "gstar, sentence",
    [
        ((4.0, 3.0, math.inf), "The interval of G* has no upper end, so no group"),
        ((math.nan, 3.0, math.inf), "The interval of G* has no upper end, so no group"),
        (
            (4.0, 1.0, math.inf),
            "There is not enough data for G*, so no group",
        ),
        (
            (math.nan, math.inf, math.inf),
            "There is not enough data for G*, so no group",
        ),
        (
            (math.nan, math.nan, math.nan),
            "There is not enough data for G*, so no group",
        ),
    ],
)
def test_the_verdict_says_why_the_best_group_size_is_missing(gstar, sentence):
    assert sentence in verdict_of(1, 3, gstar=gstar)


def test_the_verdict_leaves_the_best_group_size_to_the_answer():
    """It is said once on a terminal and on a page."""
    assert "G*" not in verdict_of(1, 3, gstar=(4.0, 3.0, 6.0))


@pytest.mark.slow(minutes=0.02)
def test_the_console_answers_in_three_lines_and_ends_with_what_to_type(finished, capsys):
    """The answer, a table, the warnings, at most three verdicts, what to type next, the page."""
    path, result = finished
    config = compose("mse", *SMALL, *FINISHED)
    study_run.run(config, RunFolder(path, config))
    first, rest = capsys.readouterr().out.split("\n\n", 1)
    _, *answer = first.splitlines()  # after the line that the folder is complete
    assert len(answer) <= 3 and max(map(len, answer)) <= 80
    expected = study_answer(Study(RunRecord(path, result=result)), config.study.rollouts)
    assert " ".join(answer) == expected
    *_, following, page = rest.splitlines()
    assert following == f"next: {next_step(Study(RunRecord(path, result=result)))}"
    assert page == f"page: {path / 'report.html'}"
    words = " ".join(rest.split())
    places = [
        words.index(sentence)
        for sentence in (
            f"WARNING: {result['summary'].split(' WARNING: ')[1]}",
            "next: ",
        )
    ]
    assert places == sorted(places) and len(places) <= 5


@pytest.mark.nightly(minutes=0.7)
def test_a_part_of_the_model_is_studied_as_such(tmp_path):
    """Same completions; errors of the parts add up to those of the whole, by Monte Carlo too."""
    options = ("model.dtype=float64", "budget.gradient_sketch=250000", "study.questions=5")
    whole = study(tmp_path / "whole", *options)
    parts = [
        study(tmp_path / name, *options, f"study.parameters={name}")
        for name in ("embed", "self_attn", "mlp", "norm")
    ]
    assert sum(part["metric"]["parameters"] for part in parts) == whole["metric"]["parameters"]
    for key in ("c1", "c2", "c3"):
        total = sum(part["scaling"][key] for part in parts)
        assert total == pytest.approx(whole["scaling"][key], rel=1e-6)
    assert "study.parameters=mlp" in parts[2]["summary"]
    with pytest.raises(ConfigError, match="study.parameters=null, but this study has mlp"):
        there = f"pool={tmp_path / 'whole' / 'pool'}"
        study(tmp_path / "mlp_too", *options, "study.parameters=mlp", there)
    both = ("study.methods=[closed_form,monte_carlo]", "group_sizes=[2]", "budget=study_smoke")
    result = study(tmp_path / "both", *options, *both, "study.parameters=norm")
    rows = {row["method"]: row for row in result["curves"] if row["baseline"] == "leave_one_out"}
    closed, carlo = rows["closed_form"], rows["monte_carlo"]
    assert closed["low"] < carlo["high"] and carlo["low"] < closed["high"]
