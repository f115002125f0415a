"""A row belongs to a run, a step, a subset and an attempt: files of each framework as its users
have them, with copies, resumed runs, failed and evaluation rows.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from frameworks import (
    PROMPTS,
    SIZE,
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
    texts,
    trl,
    verl,
)
from pyarrow import parquet

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.logs.convert import convert
from grpo_ustat.logs.formats import FORMATS
from grpo_ustat.logs.rows import Options, Rollout, step_rollouts
from grpo_ustat.logs.sieve import COPY, rollouts_of_step, without_copies


@pytest.mark.parametrize("named", ["traces", "episodes", "nothing"])
def test_all_and_effective_of_prime_rl_hold_one_step(tmp_path, named):
    """As many rows as were trained on, and that many rollouts in a step."""
    one = [episode(*row, named=named) for row in samples(0)]
    for subset in ("all", "effective"):
        append(cohort(tmp_path / "run", 5, subset=subset), one)
    conversion, table = converted(tmp_path / "run")
    assert (conversion.rows, conversion.kept, conversion.groups) == (30, 15, 3)
    assert left_out(conversion, COPY) == 15
    assert conversion.step_rollouts == 15
    assert [row["completion_ids"] for row in table] == [row[3] for row in samples(0)]
    assert [row["prompt_ids"] for row in table] == [row[2] for row in samples(0)]
    assert table[6]["logprobs"] == list(samples(0))[6][5]


@pytest.mark.parametrize("named", ["traces", "episodes", "nothing"])
def test_what_arrived_and_was_not_trained_on_is_left_out(tmp_path, named):
    """Of six groups that arrived three were shipped, one of them without a failed row; one episode
    has no trace; there was an evaluation.
    """
    shipped = [episode(*row, named=named) for row in samples(0)]
    failed = episode(*next(samples(1)), named=named, ok=False)
    late = [episode(*row, named=named) for row in samples(2, first=10)]
    nothing = {"id": "x", "ok": False, "traces": []}
    append(cohort(tmp_path / "run", 5), [*shipped, failed, nothing, *late])
    append(cohort(tmp_path / "run", 5, subset="effective"), shipped)
    for subset in ("all", "effective"):
        append(cohort(tmp_path / "run", 5, "eval", subset), late)
    conversion, _ = converted(tmp_path / "run")
    assert (conversion.rows, conversion.kept) == (15 + 1 + 1 + 15 + 15 + 30, 15)
    assert left_out(conversion, COPY) == 15
    assert left_out(conversion, "not in effective") == 15
    assert left_out(conversion, "failed") == 2
    assert left_out(conversion, "evaluation") == 30


def test_a_run_of_prime_rl_that_has_not_shipped_a_batch_is_read_from_what_arrived(tmp_path):
    append(cohort(tmp_path / "run", 5), [episode(*row) for row in samples(0)])
    assert converted(tmp_path / "run")[0].kept == 15


def test_a_launch_that_resumed_in_the_same_folder_is_another_run(tmp_path):
    """Both wrote step 5, by policies 4 of their own."""
    first, again = ([episode(*row, launch=x) for row in samples(k)] for k, x in enumerate("ab"))
    append(cohort(tmp_path / "run", 5, subset="effective"), [*first, *again])
    conversion, table = converted(tmp_path / "run")
    assert conversion.kept == left_out(conversion, "of another run") == 15
    assert conversion.step_rollouts == 15
    assert {tuple(row["completion_ids"])[0] for row in table} == {21}


def test_agents_that_are_not_trained_and_groups_without_a_name(tmp_path):
    rows = [episode(*row) for row in samples(0)]
    judged = [episode(*row, agent={"name": "judge", "trainable": False}) for row in samples(1)]
    for one in (*rows, *judged):
        del one["group"]
    append(cohort(tmp_path / "run", 5), rows + judged)
    conversion, _ = converted(tmp_path / "run")
    assert (conversion.kept, conversion.groups) == (15, 3)
    assert left_out(conversion, "not trained") == 15


@pytest.mark.parametrize("size", [None, SIZE])
def test_two_epochs_of_nemo_rl_are_read(tmp_path, size):
    """The same prompts at steps 3 and 13, whose rows are numbered from 0: the later is kept."""
    for step in (3, 13):
        nemo(tmp_path / f"exp_001/train_data_step{step}.jsonl", step)
    conversion, table = converted(tmp_path / "exp_001", options=Options(group_size=size))
    assert (conversion.rows, conversion.kept, conversion.groups) == (30, 15, 3)
    assert {row["policy_version"] for row in table} == {"train_data_step13"}
    assert left_out(conversion, "of another policy") == 15


def test_runs_below_one_folder_of_nemo_rl_are_kept_apart(tmp_path):
    """A run that began anew, and wrote the same step; exp_10 is after exp_9."""
    for run in ("exp_9", "exp_10"):
        nemo(tmp_path / f"logs/{run}/train_data_step3.jsonl", int(run[4:]))
    conversion, table = converted(tmp_path / "logs")
    assert (conversion.kept, left_out(conversion, "of another run than")) == (15, 15)
    assert {row["completion_ids"][0] for row in table} == {30}
    assert converted(tmp_path / "logs/exp_9")[1][0]["completion_ids"][0] == 29


def test_samples_that_were_masked_are_left_out_and_do_not_shift_groups(tmp_path):
    """Also a line that was cut off: rows are counted by `idx`."""
    path = tmp_path / "a/train_data_step1.jsonl"
    nemo(path, 0, sample_loss_mask=[0.0] + [1.0] * 14)
    broken = path.read_text().splitlines()
    path.write_text("\n".join([*broken[:5], broken[5][:40], *broken[6:]]) + "\n")
    conversion, _ = converted(tmp_path / "a", options=Options(group_size=SIZE))
    assert (conversion.kept, conversion.groups) == (13, 3)
    assert left_out(conversion, "sample_loss_mask") == left_out(conversion, "truncated") == 1
    assert conversion.step_rollouts == 15


def test_a_step_that_was_written_again_replaces_the_first_attempt(tmp_path):
    """A resumed run appends to the same shard. Of its step 5 it wrote two prompts before it ended:
    those are of one policy, the other prompt of the first attempt is of another.
    """
    shard = tmp_path / "run/one_rollouts_000000.jsonl"
    open_instruct(shard, 0, 5)
    open_instruct(shard, 1, 5, rows=10)
    conversion, table = converted(tmp_path / "run")
    assert (conversion.kept, left_out(conversion, "written again later")) == (10, 15)
    assert {row["completion_ids"][0] for row in table} == {21}


@pytest.mark.parametrize(
    "rows, kept, first",
    [([15, 1], 15, 20), ([15, 5, 15], 15, 22), ([15, 10], 10, 21), ([1, 15], 15, 21)],
)
def test_an_attempt_that_has_just_begun_replaces_none(tmp_path, rows, kept, first):
    """The last attempt that has at least half as many rows as the largest."""
    shard = tmp_path / "run/one_rollouts_000000.jsonl"
    for seed, count in enumerate(rows):
        open_instruct(shard, seed, 5, rows=count)
    conversion, table = converted(tmp_path / "run")
    assert {row["completion_ids"][0] for row in table} == {first}
    assert left_out(conversion, "written again") == sum(rows) - kept
    assert conversion.step_rollouts == conversion.kept == kept


def test_groups_that_are_numbered_anew_in_each_step_are_kept_apart(tmp_path):
    """Two steps of one policy in slime, whose prompts are others."""
    names = [["7"]] * 15
    slime(tmp_path / "run/3.pt", 0, 3, weight_versions=names)
    other = [[5, 2 + p, *ids] for p, _, _, ids, *_ in samples(1)]
    slime(tmp_path / "run/4.pt", 1, 4, weight_versions=names, tokens=other)
    conversion, _ = converted(tmp_path / "run")
    assert (conversion.kept, conversion.groups, conversion.step_rollouts) == (30, 6, 15)


@pytest.mark.parametrize("group", [{"id": None}, {}, None])
def test_a_group_of_prime_rl_without_a_name_is_that_of_its_prompt(tmp_path, group):
    rows = [episode(*row) | {"group": group} for row in samples(0)]
    append(cohort(tmp_path / "run", 5), rows)
    assert (converted(tmp_path / "run")[0].kept, converted(tmp_path / "run")[0].groups) == (15, 3)


def test_a_step_that_was_written_twice_alike_counts_once(tmp_path):
    shard = tmp_path / "run/one_rollouts_000000.jsonl"
    for _ in range(2):
        open_instruct(shard, 0, 5)
    conversion, _ = converted(tmp_path / "run")
    assert conversion.kept == left_out(conversion, COPY) == 15
    assert conversion.step_rollouts == 15


def test_what_was_aborted_is_left_out_and_stays_a_part_of_the_step(tmp_path):
    shard = tmp_path / "run/one_rollouts_000000.jsonl"
    open_instruct(shard, 0, 5)
    written = shard.read_text().splitlines()
    shard.write_text("\n".join([written[0].replace('"stop"', '"abort"'), *written[1:]]))
    conversion, _ = converted(tmp_path / "run")
    assert (conversion.kept, left_out(conversion, "it was aborted")) == (14, 1)
    assert conversion.step_rollouts == 15


def test_two_names_of_runs_in_one_folder_are_two_runs(tmp_path):
    for k, run in enumerate(("warm", "zero")):
        open_instruct(tmp_path / f"run/{run}_rollouts_000000.jsonl", k, 5)
    conversion, table = converted(tmp_path / "run")
    assert conversion.kept == left_out(conversion, "run/zero, which is kept") == 15
    assert {row["completion_ids"][0] for row in table} == {21}


def test_a_step_that_has_just_begun_is_not_chosen(tmp_path):
    shard = tmp_path / "run/one_rollouts_000000.jsonl"
    open_instruct(shard, 0, 5)
    open_instruct(shard, 1, 6, rows=SIZE)
    conversion, table = converted(tmp_path / "run")
    assert conversion.kept == 15 and {row["policy_version"] for row in table} == {"step 5"}
    conversion, _ = converted(tmp_path / "run", options=Options(version="step 6"))
    assert conversion.kept == SIZE
    with pytest.raises(ConfigError, match="step 5 to step 6: .*--version 'step 6'$"):
        converted(tmp_path / "run", options=Options(version="6"))
    with pytest.raises(ConfigError, match="--version step 7: .* step 5 to step 6"):
        converted(tmp_path / "run", options=Options(version="step 7"))


def test_evaluations_and_other_dumps_of_slime_are_left_out(tmp_path):
    """As `--dump-details` writes them, beside what the trainer and Megatron write."""
    import torch

    statuses = ["failed", "aborted", "truncated"] + ["completed"] * 12
    removed = [False] * 14 + [True]
    slime(tmp_path / "run/rollout_data/3.pt", 0, status=statuses, remove_sample=removed)
    slime(tmp_path / "run/rollout_data/eval_3.pt", 1)
    for other in ("train_data/3_0.pt", "iter_3/model_optim_rng.pt"):
        (tmp_path / "run" / other).parent.mkdir()
        torch.save({"tokens": [[1]]}, tmp_path / "run" / other)
    conversion, table = converted(tmp_path / "run")
    assert (conversion.files, conversion.kept) == (2, 9)  # the first prompt has too few left
    assert left_out(conversion, "failed", "aborted", "remove_sample") == 3
    assert left_out(conversion, "evaluation") == 15
    assert all(row["ended"] for row in table)


def test_validation_and_runs_of_verl_are_kept_apart(tmp_path):
    verl(tmp_path / "x/run_2/rollout_data/7.jsonl", 0, 7)
    verl(tmp_path / "x/run_2/validation/8.jsonl", 1, 8)
    verl(tmp_path / "x/run_10/rollout_data/5.jsonl", 2, 5)
    append(tmp_path / "x/run_10/metrics.jsonl", [{"loss": 0.1}])
    conversion, table = converted(tmp_path / "x")
    assert (conversion.files, conversion.kept) == (3, 15)
    assert left_out(conversion, "evaluation") == left_out(conversion, "of another run") == 15
    assert {row["policy_version"] for row in table} == {"step 5"}


def test_a_name_of_a_prompt_is_not_taken_apart(tmp_path):
    """Only `{sample}_{rollout}_{output}` ends with two numbers."""
    names = [f"aime_24_{p}_{i}_0" for p in range(PROMPTS) for i in range(SIZE)]
    verl(tmp_path / "a/7.jsonl", 0, 7, uid=names)
    assert converted(tmp_path / "a")[0].groups == PROMPTS
    verl(tmp_path / "b/7.jsonl", 0, 7, uid=[f"aime_{p}" for p in range(PROMPTS) for _ in range(5)])
    assert (converted(tmp_path / "b")[0].kept, converted(tmp_path / "b")[0].groups) == (15, 3)


def test_a_file_that_is_written_anew_has_no_attempts(tmp_path):
    """A prompt that stands twice in a batch: its names come twice, with other completions."""
    names = [f"{p}_{i}_0" for p in (0, 1, 0) for i in range(SIZE)]
    verl(tmp_path / "a/7.jsonl", 0, 7, uid=names, input=[texts([p]) for p in (0, 1, 0)
                                                        for _ in range(SIZE)])  # fmt: skip
    conversion, _ = converted(tmp_path / "a")
    assert (conversion.kept, conversion.groups, conversion.largest) == (15, 2, 10)


def test_a_batch_that_trl_logs_twice_counts_once(tmp_path):
    """With `logging_steps=1` and batches that are used for two steps: both files hold them, under
    the number of the policy that wrote them where `record` was there.
    """
    ids = {"prompt_ids": [row[2] for row in samples(0)],
           "completion_ids": [row[3] for row in samples(0)], "policy_step": [2] * 15}  # fmt: skip
    for step in (3, 4):
        trl(tmp_path / f"run/completions/completions_0000{step}.parquet", 0, step, **ids)
    conversion, table = converted(tmp_path / "run")
    assert conversion.kept == left_out(conversion, COPY) == 15
    assert {row["policy_version"] for row in table} == {"checkpoint-2"}
    assert conversion.step_rollouts == 15


def test_runs_of_trl_below_one_folder_are_kept_apart(tmp_path):
    for k, run in enumerate(("lr1", "lr2")):
        trl(tmp_path / f"runs/{run}/completions/completions_00003.parquet", k, 3)
    conversion, table = converted(tmp_path / "runs")
    assert conversion.kept == left_out(conversion, "of another run") == 15
    assert {row["completion"].split()[0] for row in table} == {"21"}


def test_evaluations_and_resumed_runs_of_ms_swift(tmp_path):
    """Logs at steps 9 and 10, an evaluation at 10, the end of training; resumed from 8 on."""
    path = tmp_path / "run/completions.jsonl"
    for seed, step in ((0, 9), (1, 10), (2, 10), (2, 10), (3, 9), (4, 10)):
        ms_swift(path, seed, step)
    conversion, table = converted(tmp_path / "run")
    assert {row["completion"].split()[0] for row in table} == {"24"}
    assert conversion.kept == 15 and left_out(conversion, "evaluation") == 30
    assert left_out(conversion, "written again later") == 30
    assert left_out(conversion, "of another policy than step 10") == 15


def test_equal_completions_of_a_group_are_samples(tmp_path):
    """A sure policy answers alike, with the same log-probabilities to the bit."""
    shard = tmp_path / "run/one_rollouts_000000.jsonl"
    append(shard, [
        {"step": 5, "sample_idx": k, "prompt_idx": 0, "prompt_tokens": [1], "response_tokens": [7],
         "reward": 1.0, "finish_reason": "stop", "logprobs": [-0.01]}
        for k in range(8)
    ])  # fmt: skip
    assert converted(tmp_path / "run")[0].kept == 8
    slime(tmp_path / "s/3.pt", 0, tokens=[[1, 7]] * 15, response_length=[1] * 15,
          loss_mask=[[1]] * 15, rollout_log_probs=[[-0.01]] * 15, group_index=[0] * 15)  # fmt: skip
    assert converted(tmp_path / "s")[0].kept == 15


def nameless(file, contents, group="g"):
    return [
        Rollout(Path(file), file, group, 1.0, "run", "1", prompt_ids=[1], completion_ids=[one])
        for one in contents
    ]


@pytest.mark.parametrize(
    "files, kept",
    [
        ([[7, 7, 8], [8, 7, 7]], 3),  # the whole group stands in another file
        ([[7, 7], [7, 7, 8]], 3),  # or is part of the one there
        ([[7, 7, 8], [7, 9]], 5),  # shares one answer: other samples
        ([[7, 7, 7]], 3),
        ([[7, 8], [7, 8], [7, 8]], 2),
    ],
)
def test_rows_without_names_are_copies_as_whole_groups_alone(files, kept):
    rows = [row for k, contents in enumerate(files) for row in nameless(f"f{k}", contents)]
    assert len(without_copies(rows)) == kept
    assert [row.left_out for row in rows if row.left_out] == [COPY] * (len(rows) - kept)


def test_a_step_has_whole_groups_though_some_rows_are_missing(rng):
    """64 groups of 8, of which some rows at random are missing, at three steps, one cut short."""
    rows = [
        Rollout(Path("f"), "f", f"g{g}", 1.0, "run", str(step))
        for step, groups in ((1, 64), (2, 64), (3, 5)) for g in range(groups) for _ in range(8)
        if rng.random() > 0.005
    ]  # fmt: skip
    assert rollouts_of_step(rows) == 512
    assert rollouts_of_step([]) is None


@pytest.mark.parametrize("sizes, n", [((6, 5, 4), 15), ((5, 5, 4), 15), ((4, 4, 8), 16)])
def test_a_step_of_uneven_groups_has_its_own_rows(sizes, n):
    """Whole groups of the commonest size where most have it: 14 rows of 5, 5 and 4 are 15."""
    rows = [
        Rollout(Path("f"), "f", f"g{g}", 1.0, "run", str(step))
        for step in range(3) for g, size in enumerate(sizes) for _ in range(size)
    ]  # fmt: skip
    assert rollouts_of_step(rows) == n


@pytest.mark.parametrize("name", ["open_instruct", "slime"])
def test_no_end_is_invented_where_none_is_logged(tmp_path, name):
    if name == "slime":
        slime(tmp_path / "run/3.pt", 0, status=[None] * 15)
    else:
        path = tmp_path / "run/one_rollouts_000000.jsonl"
        open_instruct(path, 0, 5)
        path.write_text(path.read_text().replace('"finish_reason": "stop", ', ""))
    assert "ended" not in converted(tmp_path / "run")[1][0]


def test_the_step_stands_in_the_file(tmp_path):
    nemo(tmp_path / "a/train_data_step1.jsonl", 0)
    target = tmp_path / "o.parquet"
    convert(tmp_path / "a", FORMATS["nemo_rl"], target, Options())
    assert step_rollouts(target) == 15
    trl(tmp_path / "b.parquet", 0, 3)
    assert step_rollouts(tmp_path / "b.parquet") == 15
    parquet.write_table(pyarrow.table({"prompt": ["a"], "reward": [1.0]}), tmp_path / "c.parquet")
    assert step_rollouts(tmp_path / "c.parquet") is None


@pytest.mark.parametrize("copies", [1, 2])
def test_what_is_read_twice_gives_the_same_rows(tmp_path, copies):
    """An invariant: the same folder again, below it, changes nothing but the count."""
    for subset in ("all", "effective")[:copies]:
        append(cohort(tmp_path / "run", 5, subset=subset), [episode(*row) for row in samples(0)])
    shutil.copytree(tmp_path / "run", tmp_path / "both/run", dirs_exist_ok=True)
    shutil.copytree(tmp_path / "run", tmp_path / "both/run_copy")
    _, once_read = converted(tmp_path / "run")
    _, twice = converted(tmp_path / "both")
    np.testing.assert_equal(twice, once_read)
