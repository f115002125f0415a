"""A row belongs to a run, a step, a subset and an attempt: files of each framework as its users
have them, with copies, resumed runs, failed and evaluation rows.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.convert.formats import FORMATS, detect
from grpo_ustat.convert.rows import Options, Rollout
from grpo_ustat.convert.sieve import COPY, once, rollouts_of_step
from grpo_ustat.convert.table import convert
from grpo_ustat.rollout.logged import read_rollouts, step_rollouts

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

PROMPTS, SIZE = 3, 5


def samples(seed, prompts=PROMPTS, size=SIZE, first=0):
    """(group, place in it, prompt, completion, reward, log-probabilities) of one step; no two rows
    of one seed or of two are alike.
    """
    for p in range(prompts):
        for i in range(size):
            ids = [20 + seed, 40 + i, 60 + p, 9]
            yield first + p, i, [1, 2 + p], ids, float((i + p) % 2), [-0.1 - 0.01 * i - seed] * 4


def append(path, objects):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in objects)


def converted(source, name=None, options=Options()):  # noqa: B008  # frozen
    """The conversion, and the rows that it wrote, or none where it is refused."""
    one = FORMATS[name] if name else detect(source)
    target = source.parent / f"{len(list(source.parent.iterdir()))}.parquet"
    conversion = convert(source, one, target, options)
    return conversion, parquet.read_table(target).to_pylist()


def left_out(conversion, *words):
    """How many rows were left out for a reason with one of the words."""
    assert conversion.rows == conversion.kept + sum(conversion.reasons.values())
    return sum(n for reason, n in conversion.reasons.items() if any(x in reason for x in words))


def texts(ids):
    return " ".join(map(str, ids))


# --------------------------------------------------------------------------------------- prime-rl


def episode(g, i, prompt, ids, reward, logprobs, version=4, named="traces", **changes):
    """With the generation prompt's token before the sampled ones, which have the log-probabilities,
    as `MessageNode` has them.
    """
    trace = {
        "nodes": [
            {"parent": None, "sampled": False, "token_ids": prompt[:1], "mask": [False]},
            {"parent": 0, "sampled": True, "token_ids": [*prompt[1:], *ids],
             "mask": [False, True, True, True, True], "logprobs": logprobs},
        ],
        "rewards": {"right": {"score": reward, "weight": 1.0}}, "ok": True,
        "agent": {"name": "solver", "trainable": True}, "calls": [{"finish_reason": "stop"}],
    }  # fmt: skip
    work = {"type": "train", "step": 5, "policy": {"start": version, "end": version}}
    work |= changes.pop("work", {})
    run = {"type": "train", "id": changes.pop("launch", "first"), "work": work}
    one = {"group": {"id": f"g{g}v{version}"}, "run": run, "ok": True, "traces": [trace | changes]}
    if named == "traces":
        one["traces"][0]["id"] = f"{ids}{logprobs}"
    return one | ({} if named == "nothing" else {"id": f"{ids}"})


def cohort(run, step, kind="train", subset="all"):
    return run / f"rollouts/step_{step}/{kind}/{subset}/traces.jsonl"


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


def test_a_reward_that_was_not_scored_drops_its_row(tmp_path):
    rows = [episode(*row) for row in samples(0)]
    rows[3]["traces"][0]["rewards"]["right"] = None
    append(cohort(tmp_path / "run", 5), rows)
    conversion, _ = converted(tmp_path / "run")
    assert (conversion.kept, left_out(conversion, "not a finite number")) == (14, 1)


# ---------------------------------------------------------------------------------------- NeMo-RL


def nemo(path, seed, **changes):
    append(path, [
        {
            "rewards": [reward], "input_lengths": [len(prompt) + len(ids)],
            "token_ids": [[*prompt, *ids, 0]],
            "token_loss_mask": [[0] * len(prompt) + [1] * len(ids) + [0]],
            "sample_loss_mask": [1.0], "generation_logprobs": [[0.0, 0.0, *logprobs, 0.0]],
            "idx": k,
        } | {name: [values[k]] for name, values in changes.items()}
        for k, (_, _, prompt, ids, reward, logprobs) in enumerate(samples(seed))
    ])  # fmt: skip


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


def test_rewards_of_filtered_rows_are_their_own(tmp_path):
    """Under dynamic sampling `rewards` are those of the batch before it was filtered."""
    own = [row[4] for row in samples(0)]
    nemo(tmp_path / "a/train_data_step1.jsonl", 0, rewards=[0.25] * 15, filtered_rewards=own)
    assert [row["reward"] for row in converted(tmp_path / "a")[1]] == own


def test_samples_that_were_masked_are_left_out_and_do_not_shift_groups(tmp_path):
    """Also a line that was cut off: rows are counted by `idx`."""
    path = tmp_path / "a/train_data_step1.jsonl"
    nemo(path, 0, sample_loss_mask=[0.0] + [1.0] * 14)
    broken = path.read_text().splitlines()
    path.write_text("\n".join([*broken[:5], broken[5][:40], *broken[6:]]) + "\n")
    conversion, _ = converted(tmp_path / "a", options=Options(group_size=SIZE))
    assert (conversion.kept, conversion.groups) == (13, 3)
    assert left_out(conversion, "sample_loss_mask") == left_out(conversion, "cut off") == 1
    assert conversion.step_rollouts == 15


# ---------------------------------------------------------------------------------- open-instruct


def open_instruct(path, seed, step, rows=PROMPTS * SIZE):
    append(path, [
        {"step": step, "sample_idx": k, "prompt_idx": g, "prompt_tokens": prompt,
         "response_tokens": ids, "reward": reward, "finish_reason": "stop", "logprobs": logprobs}
        for k, (g, _, prompt, ids, reward, logprobs) in enumerate(samples(seed))
        if k < rows
    ])  # fmt: skip


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
    with pytest.raises(ConfigError, match="--version step 7: no row .*; there are step 5 to step"):
        converted(tmp_path / "run", options=Options(version="step 7"))


# ------------------------------------------------------------------------------------------ slime


def slime(path, seed, rollout=3, **changes):
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"rollout_id": rollout, "samples": [
        {"group_index": g, "tokens": prompt + ids, "response_length": len(ids), "reward": reward,
         "loss_mask": [1] * len(ids), "status": "completed", "rollout_log_probs": logprobs}
        | {name: values[k] for name, values in changes.items()}
        for k, (g, _, prompt, ids, reward, logprobs) in enumerate(samples(seed))
    ]}, path)  # fmt: skip


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


def test_a_reward_of_several_is_taken_by_key_or_added_by_weight(tmp_path):
    reward = [{"right": float(k % 2), "form": 0.5, "note": "x"} for k in range(15)]
    slime(tmp_path / "run/3.pt", 0, reward=reward)
    with pytest.raises(ConfigError, match="15 its reward is of right, form, note: name one with"):
        converted(tmp_path / "run")
    for asked, value in (("right", 1.0), ("right=2,form=-1", 1.5)):
        _, table = converted(tmp_path / "run", options=Options(reward=asked))
        assert table[1]["reward"] == value
    with pytest.raises(ConfigError, match=r"^--reward rihgt: its row has no .*are right, form\)"):
        converted(tmp_path / "run", options=Options(reward="rihgt"))
    with pytest.raises(ConfigError, match="^--reward right=x: 'x' is no number"):
        converted(tmp_path / "run", options=Options(reward="right=x"))


# ------------------------------------------------------------------------------------------- verl


def verl(path, seed, step, **changes):
    append(path, [
        {"input": texts(prompt), "output": texts(ids), "score": reward, "step": step}
        | {name: values[k] for name, values in changes.items()}
        for k, (_, _, prompt, ids, reward, _) in enumerate(samples(seed))
    ])  # fmt: skip


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


@pytest.mark.parametrize("asked, value", [("acc", 1.0), ("acc=2,score=-1", 1.5)])
def test_columns_and_keys_of_verl_are_rewards_by_name(tmp_path, asked, value):
    verl(tmp_path / "a/7.jsonl", 0, 7, score=[0.5] * 15, acc=[True] * 15)
    verl(tmp_path / "b/7.jsonl", 0, 7, score=[{"score": 0.5, "acc": True}] * 15)
    for folder in "ab":
        _, table = converted(tmp_path / folder, options=Options(reward=asked))
        assert {row["reward"] for row in table} == {value}
    with pytest.raises(ConfigError, match="15 its reward is of score, acc: name one with --rew"):
        converted(tmp_path / "b")


def test_a_row_without_its_fields_is_counted_and_the_others_are_read(tmp_path):
    verl(tmp_path / "a/7.jsonl", 0, 7, score=[None, "nan"] + [1.0] * 13)
    append(tmp_path / "a/7.jsonl", [{"input": "1 2", "score": 1.0, "step": 7}])
    with (tmp_path / "a/7.jsonl").open("a") as file:
        file.write('{"input": "1 2", "outp')
    conversion, _ = converted(tmp_path / "a")
    assert (conversion.rows, conversion.kept) == (17, 10)  # the first prompt has three left
    assert left_out(conversion, "KeyError: 'output'") == left_out(conversion, "cut off") == 1
    assert left_out(conversion, "not a finite number") == 2


# ------------------------------------------------------------------------------------------ AReaL


def areal(folder, seed, version=2, **changes):
    for g, i, prompt, ids, reward, _ in samples(seed):
        append(folder / f"{version}/{g}.jsonl", [
            {"task_id": g, "sample_idx": i, "seqlen": 6, "prompt_len": 2, "head_version": version,
             "tail_version": version, "reward": reward, "prompt": texts(prompt),
             "completion": texts(ids)} | changes
        ])  # fmt: skip


def test_evaluations_and_tasks_that_were_numbered_anew_in_areal(tmp_path):
    """A resumed run numbers its tasks from 0 again, and appends to the files of the first."""
    areal(tmp_path / "log/rollout", 0)
    areal(tmp_path / "log/rollout", 1)
    areal(tmp_path / "log/eval-rollout", 2, version=3)
    conversion, table = converted(tmp_path / "log")
    assert (conversion.rows, conversion.kept) == (45, 15)
    assert left_out(conversion, "evaluation") == left_out(conversion, "written again") == 15
    assert {row["completion"].split()[0] for row in table} == {"21"}


# -------------------------------------------------------------------------------- TRL and ms-swift


def trl(path, seed, step, **changes):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = list(samples(seed))
    parquet.write_table(pyarrow.table({
        "step": [step] * 15, "prompt": [texts(row[2]) for row in rows],
        "completion": [texts(row[3]) for row in rows], "right": [row[4] for row in rows],
        "advantage": [0.0] * 15,
    } | changes), path)  # fmt: skip


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


def test_what_a_study_would_refuse_is_left_out_row_by_row(tmp_path):
    """A tool's answer, a call of one, a picture, and a prompt that ends with the assistant."""
    said = [[{"role": "assistant", "content": texts(row[3])}] for row in samples(0)]
    asked = [[{"role": "user", "content": texts(row[2])}] for row in samples(0)]
    said[0] = [*said[0], {"role": "tool", "content": "4"}]
    said[5] = [{"role": "assistant", "content": None}]
    asked[10] = [*asked[10], {"role": "assistant", "content": "So"}]
    trl(tmp_path / "run/completions_00003.parquet", 0, 3, prompt=asked, completion=said)
    conversion, table = converted(tmp_path / "run")
    assert left_out(conversion, "not one of the assistant", "content is not text") == 2
    assert left_out(conversion, "its group", "ends with an assistant message") == 1
    assert len(table) == conversion.kept == 12
    assert len(read_rollouts(max(tmp_path.glob("*.parquet")))) == 12


def test_reward_functions_are_added_by_weight_and_a_null_counts_nothing(tmp_path):
    """As TRL adds them; where all are null there is no reward."""
    form = pyarrow.array([None, None] + [0.5] * 13, pyarrow.float64())
    right = pyarrow.array([None] + [1.0] * 14, pyarrow.float64())
    trl(tmp_path / "run/completions_00003.parquet", 0, 3, right=right, form=form)
    with pytest.raises(ConfigError, match="numbers right, form: say which .*right=1,form=1"):
        converted(tmp_path / "run")
    with pytest.raises(ConfigError, match="^--reward fom: .* has columns of numbers right, form"):
        converted(tmp_path / "run", options=Options(reward="right,fom=2"))
    conversion, table = converted(tmp_path / "run", options=Options(reward="right,form=2"))
    assert [row["reward"] for row in table][:2] == [1.0, 2.0]
    assert left_out(conversion, "not a finite number") == 1
    assert any("1 taken: reward form is null" in line for line in conversion.lines())


def ms_swift(path, seed, step):
    rows = list(samples(seed))
    append(path, [{
        "step": [str(step)] * 15, "prompt": [texts(row[2]) for row in rows],
        "completion": [texts(row[3]) for row in rows], "right": [row[4] for row in rows],
        "solution": ["x"] * 15, "advantages": [0.0] * 15,
    }])  # fmt: skip


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


# ----------------------------------------------------------------------------------- the rules


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
    reasons = []
    assert len(once(rows, lambda row, reason: reasons.append(reason))) == kept
    assert reasons == [COPY] * (len(rows) - kept)


def test_a_step_has_whole_groups_though_some_rows_are_missing(rng):
    """64 groups of 8, of which some rows at random are missing, at three steps, one cut short."""
    rows = [
        Rollout(Path("f"), "f", f"g{g}", 1.0, "run", str(step))
        for step, groups in ((1, 64), (2, 64), (3, 5)) for g in range(groups) for _ in range(8)
        if rng.random() > 0.005
    ]  # fmt: skip
    assert rollouts_of_step(rows) == 512
    assert rollouts_of_step([]) is None


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
