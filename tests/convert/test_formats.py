"""One folder of each framework with all that users have in it: two runs, two policies or epochs,
copies, rows that were written again, failed ones and evaluations. Each has 15 rows worth taking.
"""

from __future__ import annotations

import pytest
from frameworks import (
    append,
    areal,
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


def areal_(folder):
    areal(folder / "t1/rollout", 0)
    areal(folder / "t2/rollout", 1, version=1)
    for seed in (2, 3, 3):
        areal(folder / "t2/rollout", seed)
    areal(folder / "t2/eval-rollout", 4)


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
    "areal": (areal_, 90, {COPY: 15, RUN: 15, POLICY: 15, AGAIN: 15, EVALUATION: 15}),
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
