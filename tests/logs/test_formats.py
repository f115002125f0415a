"""One folder of each framework with all that users have in it: two runs, two policies or epochs,
copies, rows that were written again, failed ones and evaluations. Each has 15 rows worth taking.
And what a row is by where its file lies, whatever the path is that was typed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from frameworks import (
    append,
    cohort,
    converted,
    episode,
    left_out,
    ms_swift,
    nemo,
    open_instruct,
    samples,
    slime,
    trl,
    verl,
)

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.logs.convert import convert
from grpo_ustat.logs.formats import FORMATS
from grpo_ustat.logs.rows import Options


def prime_rl(folder):
    for k, step in enumerate((5, 6)):
        good = [episode(*row, version=step - 1) for row in samples(k)]
        bad = episode(*next(samples(9)), version=step - 1, ok=False)
        append(cohort(folder / "run_1", step), [*good, bad])
        append(cohort(folder / "run_1", step, subset="effective"), good)
        append(cohort(folder / "run_1", step, "eval"), good[:5])
    good = [episode(*row, launch="b") for row in samples(5)]
    append(cohort(folder / "run_2", 5), good)
    append(cohort(folder / "run_2", 5, subset="effective"), good)


def nemo_rl(folder):
    for run in (1, 2):
        for step in (3, 13):
            nemo(folder / f"exp_00{run}/train_data_step{step}.jsonl", step + run)
    last = folder / "exp_002/train_data_step13.jsonl"
    last.write_text(2 * last.read_text())
    append(folder / "exp_002/val_data_step13.jsonl", [{"content": "x", "rewards": 1.0}])


def open_instruct_(folder):
    open_instruct(folder / "a_rollouts_000000.jsonl", 0, 5)
    for seed, step in ((1, 5), (2, 6), (3, 6), (3, 6)):
        open_instruct(folder / "b_rollouts_000000.jsonl", seed, step)


def slime_(folder):
    slime(folder / "x/3.pt", 0, 3)
    slime(folder / "y/3.pt", 1, 3)
    slime(folder / "y/4.pt", 2, 4)
    slime(folder / "y/eval_4.pt", 3, 4)


def verl_(folder):
    names = [f"{g}_{i}_0" for g, i, *_ in samples(0)]
    for seed, name in enumerate(("r1/rollout_data/7", "r2/rollout_data/7", "r2/rollout_data/17",
                                 "r2/validation/17")):  # fmt: skip
        verl(folder / f"{name}.jsonl", seed, int(name.rpartition("/")[2]), uid=names)
    last = folder / "r2/rollout_data/17.jsonl"
    last.write_text(2 * last.read_text())


def trl_(folder):
    for run, seed, step, policy in (("a", 0, 3, 2), ("b", 1, 1, 0), ("b", 2, 3, 2), ("b", 2, 4, 2)):
        ids = {"prompt_ids": [row[2] for row in samples(seed)],
               "completion_ids": [row[3] for row in samples(seed)]}  # fmt: skip
        path = folder / f"{run}/completions/completions_0000{step}.parquet"
        trl(path, seed, step, policy_step=[policy] * 15, **ids)


def ms_swift_(folder):
    ms_swift(folder / "v0/completions.jsonl", 0, 9)
    for seed, step in ((1, 9), (2, 10), (3, 10), (4, 9), (5, 10), (5, 10)):
        ms_swift(folder / "v1/completions.jsonl", seed, step)


COPY, RUN, POLICY = "a copy", "of another run", "of another policy"
AGAIN, EVALUATION = "written again", "of an evaluation"
TABLE = {
    "prime_rl": (prime_rl, 102, {COPY: 45, RUN: 30, EVALUATION: 10, "it failed": 2}),
    "nemo_rl": (nemo_rl, 75, {COPY: 15, RUN: 30, POLICY: 15}),
    "open_instruct": (open_instruct_, 75, {COPY: 15, RUN: 15, POLICY: 15, AGAIN: 15}),
    "slime": (slime_, 60, {RUN: 15, POLICY: 15, EVALUATION: 15}),
    "verl": (verl_, 75, {COPY: 15, RUN: 15, POLICY: 15, EVALUATION: 15}),
    "trl": (trl_, 60, {COPY: 15, RUN: 15, POLICY: 15}),
    "ms_swift": (ms_swift_, 105, {COPY: 15, RUN: 15, POLICY: 15, AGAIN: 30, EVALUATION: 15}),
}


@pytest.mark.parametrize("name", TABLE)
def test_of_a_folder_with_everything_one_step_is_taken(tmp_path, name):
    write, rows, reasons = TABLE[name]
    write(tmp_path / "all")
    conversion, table = converted(tmp_path / "all")
    assert (conversion.name, conversion.rows, conversion.kept) == (name, rows, 15)
    assert {reason: left_out(conversion, reason) for reason in reasons} == reasons
    assert conversion.step_rollouts == len(table) == 15


def prime_evaluation(folder):
    rows = [episode(*row) for row in samples(0)]
    for row in rows:
        del row["run"]
    append(cohort(folder, 7, "eval"), rows)


EVALUATIONS = {
    "verl": (lambda folder: verl(folder / "f/val_data/7.jsonl", 0, 7), ["f/val_data", "f"]),
    "prime_rl": (prime_evaluation, ["rollouts/step_7/eval/all", "rollouts/step_7", "."]),
}


@pytest.mark.parametrize("name, place", [(x, y) for x in EVALUATIONS for y in EVALUATIONS[x][1]])
def test_evaluations_are_known_from_within_their_folder(tmp_path, monkeypatch, name, place):
    EVALUATIONS[name][0](tmp_path)
    monkeypatch.chdir(tmp_path / place)
    with pytest.raises(ConfigError, match="15 rows .* 15 of an evaluation"):
        convert(Path("."), FORMATS[name], tmp_path / "o.parquet", Options())


@pytest.mark.parametrize(
    "evaluation, source",
    [("val/exp1", "."), ("val/a/b", "."), ("eval/x", "eval/x"), ("val/x", "val/x/1.jsonl")],
)
def test_validation_of_verl_may_lie_deeper(tmp_path, evaluation, source):
    verl(tmp_path / "e" / evaluation / "1.jsonl", 1, 1)
    if source == ".":
        verl(tmp_path / "e/train/exp1/1.jsonl", 0, 1)
        conversion, table = converted(tmp_path / "e")
        assert conversion.kept == left_out(conversion, "of an evaluation") == 15
        assert {row["completion"].split()[0] for row in table} == {"20"}
    else:
        with pytest.raises(ConfigError, match="15 of an evaluation"):
            converted(tmp_path / "e" / source, "verl")


def test_a_folder_of_training_below_an_experiment_with_such_a_name_counts(tmp_path):
    verl(tmp_path / "no_val_set/rollout_data/1.jsonl", 0, 1)
    assert converted(tmp_path / "no_val_set")[0].kept == 15


@pytest.mark.parametrize("place", ["", "step_5", "step_5/train", "step_5/train/effective"])
def test_prime_rl_is_read_from_within_its_folders(tmp_path, monkeypatch, place):
    one = [episode(*row) for row in samples(0)]
    for subset in ("all", "effective"):
        append(cohort(tmp_path / "run", 5, subset=subset), one)
    monkeypatch.chdir(tmp_path / "run/rollouts" / place)
    conversion = convert(Path("."), FORMATS["prime_rl"], tmp_path / "o.parquet", Options())
    assert (conversion.kept, conversion.step_rollouts) == (15, 15)
    assert not left_out(conversion, "of another run")


def put_aside(folder, name):
    """Two attempts of one step, the first of which was renamed."""
    if name == "trl":
        trl(folder / "completions_00005_old.parquet", 0, 5)
        trl(folder / "completions_00005.parquet", 1, 5)
    elif name == "verl":
        verl(folder / "5_old.jsonl", 0, 5)
        verl(folder / "5.jsonl", 1, 5)
    elif name == "slime":
        slime(folder / "5_old.pt", 0, 5)
        slime(folder / "5.pt", 1, 5)
    else:
        for seed, step in enumerate(("5_old", "5")):
            append(cohort(folder, step, subset="effective"), [episode(*x) for x in samples(seed)])


@pytest.mark.parametrize("name, aside", [("trl", 1), ("verl", 1), ("prime_rl", 1), ("slime", 1)])
def test_an_attempt_that_was_put_aside_is_not_merged(tmp_path, name, aside):
    put_aside(tmp_path / "run", name)
    conversion, table = converted(tmp_path / "run")
    first = {(row.get("completion_ids") or row["completion"].split())[0] for row in table}
    assert conversion.kept == 15 and {int(one) for one in first} == {21}
    named = [line for line in conversion.lines() if "not read: " in line and "_old" in line]
    assert len(named) == aside and "does not write files with such names" in named[0]


def test_renamed_files_are_read_one_by_one(tmp_path):
    verl(tmp_path / "a/5_old.jsonl", 0, 5)
    assert converted(tmp_path / "a")[0].kept == 15
    verl(tmp_path / "a/5_older.jsonl", 1, 5)
    with pytest.raises(ConfigError, match="2 files, such as 5_old.jsonl"):
        converted(tmp_path / "a")
    assert converted(tmp_path / "a/5_older.jsonl")[0].kept == 15


@pytest.mark.parametrize("name", ["trl", "slime", "verl"])
@pytest.mark.parametrize("size", [0, 60])
@pytest.mark.parametrize("damaged", [0, 1])
def test_a_damaged_file_is_named_and_the_others_are_read(tmp_path, name, size, damaged):
    names, write = {
        "trl": (["completions_00003.parquet", "completions_00004.parquet"], trl),
        "slime": (["3.pt", "4.pt"], slime),
        "verl": (["3.jsonl", "4.jsonl"], verl),
    }[name]
    paths = [tmp_path / "run" / one for one in names]
    for step, path in enumerate(paths, start=3):
        write(path, step, step)
    paths[damaged].write_bytes(paths[damaged].read_bytes()[:size])
    conversion, _ = converted(tmp_path / "run", name)
    assert conversion.kept == 15
    if name != "verl":  # whose lines are counted one by one
        (line,) = [line for line in conversion.lines() if "not read: " in line]
        assert str(paths[damaged]) in line and "--from" not in line and conversion.files == 1
    paths[1 - damaged].write_bytes(b"")
    if name != "verl":
        with pytest.raises(
            ConfigError, match=f"{paths[0]} (is not as|has other objects than plain)"
        ):
            converted(tmp_path / "run", name)
