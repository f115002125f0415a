"""Configurations: every shipped file composes, every wrong input gets one clear line."""

from __future__ import annotations

import json
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
from commands import CONF, compose, run
from folders import completed
from launching import finished
from shipped_files import SCHEMAS, group_files

from grpo_ustat.cli.compose import compose_config, parse
from grpo_ustat.cli.hydra_api import parse_arguments
from grpo_ustat.cli.options import command_options
from grpo_ustat.config.identity import fingerprint, folder_name, identity
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.baselines import BASELINES
from grpo_ustat.policy.loading import load_policy
from grpo_ustat.runs.result import TrainResult

FEW_SHOT = ("plus_one", "plus_digit")


@pytest.mark.parametrize("entry, group, name", list(group_files()))
def test_every_shipped_file_composes(entry, group, name):
    config = compose(entry, f"{group}={name}", *extra(entry, group, name))
    assert isinstance(config, SCHEMAS[entry])


def extra(entry, group, name):
    """What a file needs beside it to make a whole configuration."""
    if name == "hub" or "smollm2" in name:
        return ["model.model_name_or_path=org/name"]
    needs = {
        "few_shot": "dataset=plus_one",
        "math": "prompt=chat_boxed",
        "math500": "prompt=chat_boxed",
    } | dict.fromkeys(FEW_SHOT, "prompt=few_shot")
    needs["gdpo"] = "reward_funcs=[task,brevity]"
    needs["trackio"] = "dry_run=true"  # the package need not be installed
    if name not in needs:
        return []
    return [needs[name], "group_size=16"] if entry == "train" else [needs[name]]


CARLO = "study.methods=[monte_carlo]"
COMMANDS = {
    "misspelt": (["grop_size=4"], "error: unknown key grop_size: did you mean group_size=4?"),
    "unwritable": (["hydra.run.dir=/dev/null/x"], "/dev/null is not a writable folder"),
}


@pytest.mark.slow
@pytest.mark.parametrize("arguments, message", COMMANDS.values(), ids=COMMANDS)
def test_wrong_commands_get_one_line_and_leave_nothing(arguments, message, tmp_path):
    code, out, err = run("train", *arguments, cwd=tmp_path)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not out.strip()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["mse", "train"])
def test_a_device_that_is_not_there_is_one_line(entry, tmp_path):
    device = "launch.device=" + {"mse": "cuda:7", "train": "cuda"}[entry]
    code, said = finished(entry, f"debug={entry}", device, cwd=tmp_path)
    assert code == 2
    assert "error: launch.device=cuda" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_model_refused_by_a_worker_is_one_line(tmp_path):
    arguments = ("model=hub", "model.model_name_or_path=no-org/no-model", "launch.workers=2")
    code, _, err = run("mse", *arguments, cwd=tmp_path)
    assert code == 2
    assert "error: " in err and "no-org/no-model" in err and "Traceback" not in err


@pytest.mark.slow
def test_configurations_and_costs_are_shown_from_anywhere_without_torch_or_pyarrow(tmp_path):
    """Importing torch and transformers takes six times as long as all of it, pyarrow a quarter."""
    check = """
import sys
from grpo_ustat.__main__ import main
for words in ("mse dry_run=true", "train dry_run=true", "mse --cfg job"):
    sys.argv = ["grpo-ustat", *words.split()]
    main()
    assert not {"torch", "transformers", "pyarrow"} & set(sys.modules), words
"""
    command = [sys.executable, "-c", check]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Memory") >= 2 and "group_sizes:" in done.stdout


def test_a_folder_is_a_function_of_the_identity_keys():
    base = compose("train")
    same = compose("train", "max_steps=7", "micro_batch_tokens=3", "on_existing=overwrite")
    other = compose("train", "learning_rate=0.5")
    assert folder_name(base) == folder_name(same) != folder_name(other)
    seeded = compose("train", "seed=1")
    assert folder_name(base) == folder_name(seeded)
    assert fingerprint(identity(base)) != fingerprint(identity(seeded))


@pytest.mark.slow(minutes=0.02)
def test_a_rule_is_part_of_a_study_only_where_it_is_named(tmp_path):
    """Options of other baselines, and baselines added later, change neither hash nor folder."""
    from grpo_ustat.runs.folder import RunFolder

    base = compose("mse")
    elsewhere = compose("mse", "baseline_options.group_std.epsilon=1e-6")
    assert identity(base) == identity(elsewhere)
    assert set(identity(base)["baseline_options"]) == {
        "none",
        "leave_one_out",
        "group_mean",
        "oracle",
    }
    RunFolder(tmp_path, base).open()
    RunFolder(tmp_path, elsewhere).check()
    named = [CARLO, "baselines=[group_std]"]
    changed = compose("mse", *named, "baseline_options.group_std.epsilon=1e-6")
    assert changed.baseline_options["group_std"] == {"epsilon": 1e-6}
    assert folder_name(changed) != folder_name(compose("mse", *named))


def test_every_rule_has_its_place_in_a_study_with_its_defaults_and_no_file():
    assert {p.stem for p in CONF.glob("baseline/*.yaml")} == {"own"}
    options = compose("mse").baseline_options
    assert options == {name: baseline.options for name, baseline in BASELINES.items()}


@pytest.mark.slow
def test_a_file_of_ones_own_replaces_a_rules_defaults_and_adds_choices(tmp_path):
    """Of baselines of ours under any names; an option that it leaves out is missing."""
    (tmp_path / "baseline").mkdir()
    for name, options in (("group_std", "epsilon: 0.5"), ("wide", "epsilon: 2.0"), ("bare", "")):
        text = f"# Mine.\nname: group_std\noptions: {{{options}}}\n"
        (tmp_path / "baseline" / f"{name}.yaml").write_text(text)
    own = f"hydra.searchpath=[file://{tmp_path}]"
    line = [f"--config-dir={tmp_path}", "dry_run=true"]
    for name, epsilon in (("group_std", 0.5), ("wide", 2.0)):
        (run_of,) = parse("train", [*line, f"baseline={name}"]).planned_runs
        assert run_of.config.baseline.options == {"epsilon": epsilon}
    assert compose_config("train", [own, "baseline=wide"]).baseline.options == {"epsilon": 2.0}
    with pytest.raises(ConfigError, match="group_std: .*epsilon"):
        parse("train", [*line, "baseline=bare"])
    runs = parse("train", ["-m", *line, "baseline=glob([wide,*_std])"]).planned_runs
    assert [one.config.baseline.options.get("epsilon") for one in runs] == [1e-4, 0.5, 0.1, 2.0]
    words = parse_arguments([line[0], "--help"])
    (group,) = [one for one in command_options("train", words).groups if one.name == "baseline"]
    shown = {one.name: one.words for one in group.choices}
    assert len(shown) == len(group.choices) and {*shown} == {*BASELINES, "own", "wide", "bare"}
    assert shown["group_std"] == shown["wide"] == "Mine."


DECLARED = """
import contextlib, io, json, sys

from grpo_ustat.estimators.baselines import baseline


@baseline("r less a part of the group's mean. Biased.", unbiased=False, min_group_size=2)
def part_of_mean(rewards_PG, context, *, share=0.5, epsilon=0.0):
    return rewards_PG - share * rewards_PG.mean(axis=1, keepdims=True) - epsilon


from grpo_ustat.__main__ import main

for line in sys.argv[1:]:
    sys.argv, said, code = ["grpo-ustat", *line.split()], io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, said.getvalue()]))
"""


@pytest.mark.slow
def test_a_declared_rule_needs_no_other_place(tmp_path):
    """As another function in a module of ours: in help, on the command line, in both commands."""
    lines = {
        "help": "train --help part_of_mean",
        "options": "mse --help part_of_mean",
        "misspelt": "train baseline=part_of_means",
        "no key": "train part_of_mean",
        "range": "train baseline=part_of_mean baseline.options.share=2",
        "train": "train baseline=part_of_mean baseline.options.share=0.25 debug=train",
        "study": "mse baselines=[part_of_mean] group_sizes=[2] debug=mse",
    }
    command = [sys.executable, "-c", DECLARED, *lines.values()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    codes, texts = (dict(zip(lines, x, strict=True)) for x in zip(*told, strict=True))
    assert codes == dict.fromkeys(lines, 0) | dict.fromkeys(("misspelt", "no key", "range"), 2)
    assert "part_of_mean" in texts["help"] and "r less a part of the group's mean." in texts["help"]
    assert "baseline_options.part_of_mean.share=0.5" in texts["options"]
    assert "part_of_mean?" in texts["misspelt"] and "batch_std" in texts["misspelt"]
    assert "baseline=part_of_mean" in texts["no key"]
    assert "baseline.options.share=2.0" in texts["range"] and "[1e-12, 1.0]" in texts["range"]
    (file,) = tmp_path.glob("outputs/train/*/seed-0/completions.parquet")
    rows = [row for row in pq.read_table(file).to_pylist() if row["step"] == 1]
    rewards = [row["reward"] for row in rows]
    expected = [reward - 0.25 * sum(rewards) / len(rewards) for reward in rewards]
    assert [row["advantage"] for row in rows] == pytest.approx(expected)
    (file,) = tmp_path.glob("outputs/mse/*/seed-0/result.json")
    assert {row["baseline"] for row in json.loads(file.read_text())["curves"]} == {"part_of_mean"}


def test_a_folder_without_a_model_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no model could be loaded"):
        load_policy(str(tmp_path))


def test_other_weights_are_another_run(tmp_path, monkeypatch):
    """Retrained embedded weights never show an old study as their own."""
    from grpo_ustat.config import model

    base = compose("train")
    before = folder_name(base)
    folder = tmp_path / "tiny_base"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"other")
    monkeypatch.setattr(model, "ASSETS", tmp_path)
    assert folder_name(base) != before


def test_a_foreign_folder_is_never_emptied(tmp_path):
    from grpo_ustat.runs.folder import RunFolder

    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text("lr: 1")
    config = compose("train", "on_existing=overwrite")
    with pytest.raises(ConfigError, match="of another program"):
        RunFolder(tmp_path, config).open()
    assert (tmp_path / ".hydra" / "config.yaml").read_text() == "lr: 1"


def test_overwriting_removes_our_own_files_only(tmp_path):
    from grpo_ustat.runs.folder import RunFolder

    RunFolder(tmp_path, compose("train")).open()
    (tmp_path / "thesis.txt").write_text("precious")
    (tmp_path / "metrics.jsonl").write_text("old")
    RunFolder(tmp_path, compose("train", "on_existing=overwrite")).open()
    assert (tmp_path / "thesis.txt").read_text() == "precious"
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("name", ["result.json", "code.json", ".hydra/config.yaml"])
def test_a_damaged_folder_is_one_line_and_can_be_overwritten(name, tmp_path):
    from grpo_ustat.runs.folder import RunFolder

    folder = RunFolder(tmp_path, compose("train"))
    folder.open()
    folder.finish(completed(TrainResult, {"steps": 1}))
    (tmp_path / name).write_text("{")
    wanted = "missing, damaged or of an older version: (use on_existing=overwrite|delete it)"
    with pytest.raises(ConfigError, match=wanted):
        folder.result()
    RunFolder(tmp_path, compose("train", "on_existing=overwrite")).open()


def test_a_result_of_another_configuration_is_never_shown(tmp_path):
    from grpo_ustat.runs.folder import RunFolder

    folder = RunFolder(tmp_path, compose("train"))
    folder.open()
    content = completed(TrainResult, {"steps": 80, "config_hash": "0"})
    folder.write("result.json", json.dumps(content))
    with pytest.raises(ConfigError, match="configuration 0"):
        folder.result()


@pytest.mark.slow
@pytest.mark.parametrize("entry, overrides", [
    ("train", ("max_steps=4", "model=tiny_base", "baseline=oracle", "learning_rate=1e-3")),
    ("mse", ("study.questions=5", "group_sizes=[2,4]", "debug=mse")),
    ("gap", ("theorem=lemma11", "theorem.problem=coins", "seed=3")),
])  # fmt: skip
def test_tests_compose_what_a_command_line_composes(entry, overrides):
    """`commands.compose` composes files once and sets values afterwards."""
    assert compose(entry, *overrides) == compose_config(entry, list(overrides))


@pytest.mark.parametrize(
    "entry, overrides, plan",
    [
        (
            "mse",
            ("model=tiny", "study.questions=60", "group_sizes=[4,8]", "baselines=[oracle]"),
            "mse: tiny on arithmetic: 60 questions with 32 completions each; gradient error at "
            "G = 4, 8 (baselines: oracle; methods: closed_form)",
        ),
        (
            "train",
            ("group_size=16", "seed=3"),
            "train: tiny_base on arithmetic; algorithm1 with leave_one_out, 80 steps of 16 prompts "
            "with 16 completions each, adamw with learning rate 0.0001, seed 3",
        ),
        ("gap", ("theorem=lemma6",), "gap: lemma6 on coins, 2000 replicates"),
    ],
)
def test_a_run_says_in_a_line_what_it_does(entry, overrides, plan):
    assert compose(entry, *overrides).plan == plan
