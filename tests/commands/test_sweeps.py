"""The paper's experiments: every point composes, overrides win, costs agree with real runs."""

from __future__ import annotations

import csv
import json
import re
import sys
from functools import cache

import numpy as np
import pytest
from commands import cost_of, plan_of, run
from golden import naming
from safetensors.numpy import save_file

from grpo_ustat.cli import app
from grpo_ustat.cli.compose import parse
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.costs.cost import model_size, total
from grpo_ustat.costs.table import show_costs
from grpo_ustat.launch import run as job
from grpo_ustat.launch.command import load_command

SIZES = [4, 8, 16, 32, 64, 128]
SEEDS = [0, 1, 2, 3, 4]
OVERLAYS = {  # words, points, rollouts
    "figure4": ("mse", "experiment=figure4", 4, 4 * 500 * 32),
    "figure4_offline": ("mse", "experiment=figure4_offline", 3, 3 * 500 * 32),
    "figure4_smollm2": ("mse", "experiment=figure4_smollm2", 2, 2 * 40 * 32),
    "figure5_gsm8k": ("train", "experiment=figure5_gsm8k", 30, 30 * 1000 * 1024),
    "table2_math": ("train", "experiment=table2_math", 18, 6 * 100 * (1024 + 2048 + 4096)),
    "figure5_offline": ("train", "experiment=figure5_offline", 30, 30 * 150 * 256),
    "best_group_size": ("train", "experiment=best_group_size seed=0", 12, 6 * 16 * (128 + 256)),
    "normalised_group_size": (
        "train",
        "experiment=normalised_group_size seed=0 baseline=group_std",
        18,
        6 * 16 * (64 + 256 + 1024),
    ),
    "smollm2_group_size": ("train", "experiment=smollm2_group_size", 30, 30 * 16 * 64),
}


@pytest.fixture(autouse=True, scope="module")
def a_cached_smollm2(tmp_path_factory):
    """Its configuration and a file of weights, of which the head alone is read before a run."""
    home = tmp_path_factory.mktemp("cache")
    (home / "smollm2-135m").mkdir()
    (home / "smollm2-135m" / "config.json").write_text("{}")
    save_file({"weight": np.zeros(1)}, home / "smollm2-135m" / "model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_USTAT_CACHE", str(home))
        yield


@cache
def points(entry, *arguments):
    return parse(entry, list(arguments)).planned_runs


@pytest.mark.slow
def test_figure_5_on_gsm8k_has_the_papers_values():
    found = [point.config for point in points("train", "experiment=figure5_gsm8k")]
    assert [(c.group_size, c.seed) for c in found] == [(g, s) for g in SIZES for s in SEEDS]
    for c in found:
        assert c.model.model_name_or_path == "Qwen/Qwen2.5-1.5B-Instruct"
        assert (c.dataset.name, c.budget.rollouts) == ("gsm8k", 1024)
        assert (c.objective.name, c.baseline.name) == ("algorithm1", "leave_one_out")
        assert c.report.steps == [200, 300, 400, 600, 800, c.max_steps]
        assert all(step % c.eval_steps == 0 for step in c.report.steps)


@pytest.mark.slow
def test_table_2_has_the_papers_values():
    found = [point.config for point in points("train", "experiment=table2_math")]
    assert {(c.budget.rollouts, c.group_size) for c in found} == {
        (n, g) for n in (1024, 2048, 4096) for g in SIZES
    }
    assert len(found) == 18
    for c in found:
        assert c.model.model_name_or_path == "Qwen/Qwen2.5-Math-7B"
        assert (c.dataset.name, c.prompt.name) == ("math", "qwen_math_cot")
        assert c.report.steps == [c.max_steps]


@pytest.mark.nightly
def test_figure_5_offline_is_figure_5_on_arithmetic():
    found = [point.config for point in points("train", "experiment=figure5_offline")]
    assert [(c.group_size, c.seed) for c in found] == [(g, s) for g in SIZES for s in SEEDS]
    assert {(c.model.name, c.dataset.name) for c in found} == {("tiny_base", "arithmetic")}


@pytest.mark.slow
def test_figure_4_asks_its_policies_the_same_questions_with_the_same_plain_template():
    found = [point.config for point in points("mse", "experiment=figure4")]
    plain, icl = "plain", "plain_icl"
    assert [(c.model.model_name_or_path, c.prompt.name) for c in found] == [
        ("Qwen/Qwen2.5-0.5B", plain),
        ("Qwen/Qwen2.5-0.5B", icl),
        ("Qwen/Qwen2.5-0.5B-Instruct", plain),
        ("Qwen/Qwen2.5-0.5B-Instruct", icl),
    ]
    assert len({c.prompt.template for c in found}) == 1 and not any(c.prompt.chat for c in found)
    for c in found:
        assert c.baselines == ["none", "leave_one_out", "oracle"] and c.group_sizes == SIZES
        assert (c.dataset.name, c.study.questions or c.dataset.study_size) == ("arithmetic", 500)


@pytest.mark.slow
def test_figure_4_offline_has_its_five_policies():
    parts = ("experiment=figure4_offline", "experiment=figure4_smollm2")
    found = [point.config for part in parts for point in points("mse", part)]
    asked = [(c.model.name, c.prompt.name, c.dataset.name, c.dataset.study_size) for c in found]
    assert asked == [
        *((name, "bare", "arithmetic", 500) for name in ("tiny_base", "tiny", "tiny_direct")),
        ("smollm2_135m", "one_line", "arithmetic_easy", 40),
        ("smollm2_135m", "one_line", "arithmetic_easy", 40),
    ]
    assert [c.prompt.shots for c in found] == [0, 0, 0, 0, 4]
    assert len({c.baselines[0] for c in found}) == 1 and found[0].group_sizes == SIZES


WINS = {
    "one policy": ("mse", ["experiment=figure4_offline", "model=tiny"], 1),
    "fields of the node": ("mse", ["experiment=figure4", "study.questions=8"], 4),
    "one size, one seed": ("train", ["experiment=figure5_offline", "group_size=8", "seed=0"], 1),
    "other seeds": ("train", ["experiment=figure5_offline", "group_size=8", "seed=5,6"], 2),
    "more keys": (
        "train",
        ["experiment=figure5_offline", "seed=0", "group_size=8", "learning_rate=1,2"],
        2,
    ),
    "no sweep": ("train", ["experiment=table2_math", "hydra.mode=RUN", "group_size=16"], 1),
    "-m as well": ("train", ["-m", "experiment=figure5_offline", "group_size=4"], 5),
}


@pytest.mark.slow
@pytest.mark.parametrize("entry, arguments, count", WINS.values(), ids=WINS)
def test_the_command_line_wins_over_the_sweep(entry, arguments, count):
    found = points(entry, *arguments)
    assert len(found) == count
    for argument in arguments[1:]:
        key, _, value = argument.partition("=")
        if key in ("group_size", "seed") and "," not in value:
            assert all(getattr(point.config, key) == int(value) for point in found)
    if "study.questions=8" in arguments:
        assert {point.config.study.questions for point in found} == {8}
    if "model=tiny" in arguments:
        assert found[0].config.model.name == "tiny"


@pytest.mark.slow
def test_a_sweep_under_ranks_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    fresh = points.__wrapped__
    with pytest.raises(ConfigError, match="hydra.mode=RUN"):
        fresh("train", "experiment=figure5_offline")
    assert len(fresh("train", "experiment=figure5_offline", "hydra.mode=RUN")) == 1


@pytest.mark.slow
def test_wrong_value_of_any_run_refuses_the_sweep():
    with pytest.raises(ConfigError, match="group_size=7"):
        points("train", "experiment=figure5_offline", "group_size=4,7", "seed=0")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["../up", "a/b", ""])
def test_a_report_has_a_plain_name(name):
    with pytest.raises(ConfigError, match="report.name"):
        points("train", f"report.name='{name}'")


def test_report_steps_must_be_evaluated():
    with pytest.raises(ConfigError, match=naming("report.steps", 30, "eval_steps=20")):
        points("train", "report.steps=[20,30]")


def shown(found, capsys):
    """The lines printed, the cells of a table's line apart."""
    show_costs([plan_of(one) for one in found])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    return [re.split(r" {2,}", line.strip()) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize(
    "entry, overlay, count, rollouts",
    [
        pytest.param(*of, id=name, marks=pytest.mark.nightly if of[2] > 20 else ())
        for name, of in OVERLAYS.items()
    ],
)
def test_costs_of_every_overlay_are_shown(entry, overlay, count, rollouts, capsys):
    found = points(entry, *overlay.split())
    assert len(found) == count
    lines = shown(found, capsys)
    assert [f"{count} runs"] in lines
    (last,) = (line for line in lines if line[0] == "all")
    assert last[1] == f"{rollouts:,}".replace(",", " ")


@pytest.mark.slow
def test_the_costs_shown_of_table_2_are_those_worked_by_hand(capsys):
    """P = 7.6156e9 parameters: 16 P = 121.85 GB, keys and values in bfloat16 11.01.

    A checkpoint 12 P = 91.39 GB, two while one is written; of 18 runs one stays of each, and
    one beside them. Six evaluations of 5000 questions; (102 400 + 30 000) x 3000 tokens.
    """
    lines = shown(points("train", "experiment=table2_math"), capsys)
    tables = {line[0]: line[1:] for line in lines if len(line) > 3}
    one = ["102 400", "30 000", "397.2 M", "132.9 GB", "182.8 GB"]
    assert tables["G 8, n 1024, P 128"] == one
    assert tables["G 128, n 4096, P 32"] == ["409 600", "30 000", "1 318.8 M", *one[3:]]
    assert tables["all"] == ["4 300 800", "540 000", "14 522.4 M", "132.9 GB", "1.7 TB"]
    text = " ".join(" ".join(line) for line in lines)
    for setting in (
        "objective algorithm1", "bf16 true", "temperature 1.0", "eval_steps 20", "decoding greedy",
        "rollout local", "save_steps 20", "device cuda", "prompt.max_length 1024",
    ):  # fmt: skip
        assert setting in text
    assert "lora" not in text


SIZES_OF_TESTS = {
    "gsm8k": (["dataset=gsm8k"], 1319),
    "math": (["dataset=math"], 5000),
    "math500": (["dataset=math500"], 500),
    "asked for": (["dataset=gsm8k", "dataset.test_size=7"], 7),
    "another copy": (["dataset=gsm8k", "dataset.path=org/name"], None),
    "filtered": (["dataset=math500", "dataset.filter_test=true"], None),
    "all test rows of another copy": (["dataset=math", "dataset.path=org/name"], None),
}


@pytest.mark.slow
@pytest.mark.parametrize("overrides, size", SIZES_OF_TESTS.values(), ids=SIZES_OF_TESTS)
def test_published_sizes_stand_in_for_unknown_ones(overrides, size):
    arguments = ("prompt=qwen_math_cot", "max_steps=2", "eval_steps=2", "eval.decoding=[greedy]")
    (point,) = points("train", *arguments, *overrides)
    assert cost_of(point.config).evaluation == (None if size is None else 2 * size)


@pytest.mark.slow
def test_a_sweep_goes_on_after_a_point_that_is_refused_while_it_runs(monkeypatch, tmp_path, capsys):
    done = []

    def work(_, config, folder):
        if config.seed == 1:
            raise ConfigError("a prompt of 500 tokens")
        done.append(config.seed)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job, "make_run", work)
    for arguments, code in ((["-m", "seed=0,1,2"], 1), (["seed=1"], 2)):
        monkeypatch.setattr(sys, "argv", ["train", *arguments])
        with pytest.raises(SystemExit) as ended:
            app.main(load_command("train"))
        assert ended.value.code == code
        assert "a prompt of 500 tokens" in capsys.readouterr().err
    assert done == [0, 2]


@pytest.mark.slow
def test_what_is_known_of_a_model_comes_from_its_folder():
    """Against the model itself; other sizes by hand."""
    from grpo_ustat.policy.loading import load_policy

    (point,) = points("train", "model=tiny")
    size, model = model_size(point.config.model), load_policy("embedded:tiny").model
    assert size.parameters == model.num_parameters() == 204_032
    assert (size.layers, size.kv_width) == (4, 32)
    (point,) = points("train", "model=hub", "model.model_name_or_path=org/name", "prompt=plain")
    assert cost_of(point.config).memory is None and cost_of(point.config).rollouts == 80 * 256


@pytest.mark.slow
def test_costs_by_hand():
    """Qwen2.5-Math-7B, n = 1024, 100 steps."""
    arguments = (
        "experiment=table2_math",
        "hydra.mode=RUN",
        "group_size=8",
        "dataset.test_size=500",
    )
    (point,) = points("train", *arguments)
    found, parameters = cost_of(point.config), 7_615_616_512
    assert (found.rollouts, found.values, found.evaluation) == (102_400, 0, 6 * 500)
    assert found.tokens == 105_400 * 3000
    assert found.weights + found.training == 16 * parameters
    assert found.cache == 64 * 3000 * 28 * 512 * 2 * 2
    assert (found.disk, found.disk_after) == (2 * 12 * parameters, 12 * parameters)
    assert total([found] * 3).disk == (3 + 1) * 12 * parameters
    (point,) = points("train", *arguments, "baseline=oracle", "lora=r16", "objective.beta=0")
    found = cost_of(point.config)
    assert found.values == 100 * 128 * 64 and found.training == 0


def csv_rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.slow(minutes=0.3)
def test_a_training_sweep_leaves_its_table_and_its_costs_were_right(tmp_path):
    arguments = (
        "experiment=figure5_offline", "group_size=4,8", "seed=0,1", "max_steps=2", "eval_steps=2",
        "save_steps=1", "budget.rollouts=16", "dataset.test_size=20", "report.steps=null",
        "baseline=oracle", "budget.value_completions=3",
    )  # fmt: skip
    expected = [cost_of(point.config) for point in points("train", *arguments)]
    code, out, err = run("train", *arguments, cwd=tmp_path)
    assert code == 0, err
    home = tmp_path / "outputs/train/figure5_offline"
    names = {p.name for p in home.iterdir()}
    kinds = ("csv", "tex", "svg")
    assert names >= {f"{x}.{kind}" for x in ("accuracy", "learning") for kind in kinds}
    assert names >= {"budget.csv", "budget.tex", "runs.csv", "report.html"}
    results = {}
    for file, one in zip(
        sorted(tmp_path.glob("outputs/train/*/seed-*/result.json")), expected, strict=True
    ):
        found = json.loads(file.read_text())
        config = (file.parent / ".hydra/config.yaml").read_text()
        size = int(config.split("group_size: ")[1].split()[0])
        results[size, int(file.parent.name[-1])] = {
            e["step"]: e["mean_reward"] for e in found["evals"]
        }
        assert found["rollouts"] == one.rollouts == 32
        assert found["tokens"] <= one.tokens
        kept = sum(f.stat().st_size for f in file.parent.glob("checkpoint-2/*.safetensors"))
        assert kept * 2 == pytest.approx(one.disk, rel=0.1)
    for cell in csv_rows(home / "accuracy.csv"):
        runs = [results[int(cell["group_size"]), seed][int(cell["step"])] for seed in (0, 1)]
        assert float(cell["mean_reward"]) == pytest.approx(np.mean(runs))
    (home / "accuracy.csv").unlink()
    code, out, _ = run("train", *arguments, cwd=tmp_path)
    assert code == 0 and out.count("done already") == 4
    assert (home / "accuracy.csv").is_file()


@pytest.mark.nightly(minutes=0.3)
def test_a_sweep_of_studies_leaves_its_table_and_its_costs_were_right(tmp_path):
    arguments = (
        "experiment=figure4_offline", "model=tiny,tiny_direct", "study.questions=6",
        "budget.pool_completions=8", "launch.workers=1", "study.methods=[closed_form,monte_carlo]",
        "group_sizes=[4,8]", "budget.replicates=3", "budget.reference_completions=16",
        "budget.reference_blocks=4", "budget.value_completions=4",
    )  # fmt: skip
    one = cost_of(points("mse", *arguments)[0].config)
    code, out, err = run("mse", *arguments, cwd=tmp_path)
    assert code == 0, err
    home = tmp_path / "outputs/mse/figure4_offline"
    assert (home / "mse.svg").is_file() and (home / "fixed_n.svg").is_file()
    table = csv_rows(home / "mse.csv")
    for file in tmp_path.glob("outputs/mse/tiny*/seed-0/result.json"):
        found = json.loads(file.read_text())
        mine = [x for x in table if x["policy"].split(",")[0] == found["policy"]["name"]]
        assert [float(x["mse"]) for x in mine] == [x["mse"] for x in found["curves"]]
        assert {float(x["mean_reward"]) for x in mine} == {found["policy"]["mean_reward"]}
        assert found["cost"]["rollouts"] == one.rollouts + one.values
        assert found["cost"]["tokens"] <= one.tokens
        files = sum(f.stat().st_size for f in file.parent.glob("pool/*.safetensors"))
        assert files <= one.disk < 1.3 * files
    code, out, _ = run("mse", *arguments, cwd=tmp_path)
    assert code == 0 and out.count("done already") == 2


@pytest.mark.slow
def test_a_point_that_diverges_is_named_and_the_others_are_reported(tmp_path):
    arguments = (
        "experiment=figure5_offline", "group_size=4", "seed=0", "learning_rate=1e-4,1e30",
        "max_steps=2", "eval_steps=2", "budget.rollouts=16", "dataset.test_size=20",
        "report.steps=null", "optimizer=sgd",
    )  # fmt: skip
    code, out, err = run("train", *arguments, cwd=tmp_path)
    assert code == 1 and "Traceback" not in err
    assert "learning_rate=1e30" in err.replace("1e+30", "1e30")
    assert "learning_rate=1e30: failed" in out.replace("1e+30", "1e30")
    assert (tmp_path / "outputs/train/figure5_offline/accuracy.svg").is_file()
