"""Rows that are turns of one rollout are refused wherever a log is read; ids of rollouts that have
one row each are not."""

from __future__ import annotations

import json
from itertools import count

import pyarrow
import pytest
from pyarrow import parquet

from grpo_ustat.advise.request import Request
from grpo_ustat.advise.sources import advice_of
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.logs.convert import convert
from grpo_ustat.logs.formats import FORMATS, Options
from grpo_ustat.logs.rewards import read_rewards
from grpo_ustat.logs.rows import check_columns, read_rollouts

REFUSED = r"the rows are turns of one rollout \(.*one row per rollout"


def rollouts(turns, samples=4, own=True, rebuilt=False):
    """(question, sample, turn, prompt, completion) of four questions. Answers differ between
    samples where `own`; `rebuilt` prompts are a summary and not the conversation.
    """
    number = count()
    for q in range(4):
        for g in range(samples):
            talk = f"q{q} + {q}"
            for t in range(turns):
                answer = f"a{next(number) if own else t}"
                yield q, g, t, f"{answer} of {q}: now?" if rebuilt and t else talk, answer
                talk += f" {answer} seen{t}"


COLUMNS = {
    "trajectory_id": lambda q, g, t: f"{q}-{g}",
    "rollout_id": lambda q, g, t: 10 * q + g,
    "traj_idx": lambda q, g, t: g,
    "group_idx": lambda q, g, t: q,
    "turn": lambda q, g, t: t,
    "step_in_episode": lambda q, g, t: t,
    "own_key": lambda q, g, t: f"{q}/{g}",
    "num_turns": lambda q, g, t: q + 1,
}


def table(path, columns, kind="texts", turns=3, **options):
    rows = []
    for q, g, t, prompt, completion in rollouts(turns, **options):
        row = {name: COLUMNS[name](q, g, t) for name in columns} | {"right": float(g % 2)}
        if kind == "tokens":
            ids = {"prompt_ids": prompt, "completion_ids": completion}
            row |= {"prompt_id": str(q)} | {key: list(x.encode()) for key, x in ids.items()}
        elif kind == "messages":
            asked = [{"role": "user", "content": word} for word in prompt.split()]
            row |= {"prompt": asked, "completion": [{"role": "assistant", "content": completion}]}
        else:
            row |= {"prompt": prompt, "completion": completion}
        rows.append(row)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("kind", ["texts", "messages", "tokens"])
@pytest.mark.parametrize("own", [True, False], ids=["own answers", "equal answers"])
@pytest.mark.parametrize(
    "columns",
    [["trajectory_id"], ["rollout_id"], ["turn"], ["step_in_episode"], ["rollout_id", "turn"],
     ["group_idx", "traj_idx", "turn"], ["own_key"]],
    ids=" ".join,
)  # fmt: skip
def test_turns_are_refused_by_their_column(tmp_path, columns, own, kind):
    path = table(tmp_path / "p.parquet", columns, kind, own=own)
    for read in (read_rollouts, check_columns, read_rewards):
        with pytest.raises(ConfigError, match=REFUSED) as refused:
            read(path)
        assert any(name in str(refused.value) for name in columns)
    with pytest.raises(ConfigError, match=REFUSED):
        advice_of(Request(path))


@pytest.mark.parametrize("columns", [["trajectory_id"], ["trajectory_id", "turn"]], ids=" ".join)
def test_turns_that_read_a_summary_are_turns(tmp_path, columns):
    path = table(tmp_path / "p.parquet", columns, rebuilt=True)
    with pytest.raises(ConfigError, match=REFUSED):
        read_rollouts(path)


def test_rewards_of_numbered_turns_are_refused_without_prompts(tmp_path):
    path = tmp_path / "rewards.csv"
    rows = [f"{q},{q}-{g},{t},{g % 2}" for q, g, t, *_ in rollouts(3)]
    path.write_text("\n".join(["group_id,trajectory_id,turn,reward", *rows]))
    with pytest.raises(ConfigError, match=REFUSED):
        read_rewards(path)
    path.write_text("\n".join(["group_id,trajectory_id,turn,reward", *rows[::3]]))
    assert [len(group) for group in read_rewards(path).groups] == [4] * 4


@pytest.mark.parametrize("group", ["prompt_id", "group_id", "question"])
@pytest.mark.parametrize("column", ["turn", "Turn_idx", "step_in_episode", "is_last_turn"])
def test_rewards_of_turns_without_an_id_are_refused_by_their_column(tmp_path, group, column):
    """One rollout of three turns would be three completions of its prompt."""
    path = tmp_path / "rewards.csv"
    rows = [f"{q},{t == 2 if 'last' in column else t},{g % 2}" for q, g, t, *_ in rollouts(3)]
    path.write_text("\n".join([f"{group},{column},reward", *rows]))
    with pytest.raises(
        ConfigError, match=rf"rows of one {group} have {column} .* without {column}"
    ):
        read_rewards(path)
    path.write_text("\n".join([f"{group},{column},reward", *rows[2::3]]))  # the last turns
    assert [len(group) for group in read_rewards(path).groups] == [4] * 4


def test_turns_that_repeat_the_question_are_refused_by_their_column(tmp_path):
    """Their prompts do not extend each other, so that every turn looks like a completion."""
    rows = [{"prompt": f"q{q}", "completion": text, "turn": t, "reward": float(g % 2)}
            for q, g, t, _, text in rollouts(3)]  # fmt: skip
    path = tmp_path / "turns.parquet"
    for check in (check_columns, read_rollouts):
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        with pytest.raises(ConfigError, match="turn 0 and 1"):
            check(path)
        parquet.write_table(pyarrow.Table.from_pylist(rows[2::3]), path)
        check(path)


@pytest.mark.parametrize("column", ["turns", "num_turns", "step_id", "n_rounds"])
def test_a_number_of_turns_is_no_turn(tmp_path, column):
    path = tmp_path / "rewards.csv"
    rows = [f"{q},{g + 1},{g % 2}" for q, g, *_ in rollouts(1)]
    path.write_text("\n".join([f"prompt_id,{column},reward", *rows]))
    assert [len(group) for group in read_rewards(path, "reward").groups] == [4] * 4


@pytest.mark.parametrize("kind", ["texts", "messages", "tokens"])
@pytest.mark.parametrize(
    "columns",
    [["trajectory_id"], ["rollout_id"], ["rollout_id", "turn"], ["trajectory_id", "num_turns"],
     ["traj_idx"], ["group_idx", "traj_idx"], ["own_key"]],
    ids=" ".join,
)  # fmt: skip
def test_ids_of_rollouts_of_one_row_are_read(tmp_path, columns, kind):
    """Unique ids, places in a group, and numbers, none of which is taken for a reward."""
    path = table(tmp_path / "p.parquet", columns, kind, turns=1)
    check_columns(path)
    assert [one.reward for one in read_rollouts(path)] == [0.0, 1.0] * 8
    assert len(read_rewards(path).groups) == 4


def test_beginnings_of_conversations_with_samples_of_each_are_questions(tmp_path):
    """A conversation's id has several prompts, and each prompt several completions."""
    rows = [
        {"conversation_id": q, "prompt": f"q{q}" + " and" * t, "completion": "5", "right": g % 2}
        for q in range(3) for t in range(3) for g in range(4)
    ]  # fmt: skip
    path = tmp_path / "p.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert len(read_rollouts(path)) == 36


def test_two_questions_of_which_one_begins_the_other_are_questions(tmp_path):
    rows = [
        {"rollout_idx": g, "prompt": prompt, "completion": "2", "right": g % 2}
        for prompt in ("1+1", "1+12") for g in range(4)
    ]  # fmt: skip
    path = tmp_path / "p.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert len(read_rollouts(path)) == 8


def ids(text):
    return list(text.encode())


def trl(folder, rows):
    table = [
        {"step": 3, "prompt": prompt, "completion": text, "right": g % 2, "advantage": 0.0,
         "trajectory_id": 10 * q + g, "turn": t}
        for q, g, t, prompt, text in rows
    ]  # fmt: skip
    parquet.write_table(pyarrow.Table.from_pylist(table), folder / "completions_00003.parquet")


def verl(folder, rows):
    """With the names of its V1 trainer, {sample}_{rollout}_{output}."""
    lines(folder / "3.jsonl", [
        {"input": prompt, "output": text, "score": float(g % 2), "step": 3, "uid": f"q{q}_{g}_{t}"}
        for q, g, t, prompt, text in rows
    ])  # fmt: skip


def verl_record(folder, rows):
    table = [
        {"step": 3, "uid": f"q{q}", "sample": f"q{q}_{g}_{t}", "prompt_ids": ids(prompt),
         "completion_ids": ids(text), "response_mask": [1] * len(text), "score": float(g % 2),
         "rollout_log_probs": None, "min_global_steps": 2, "max_global_steps": 2}
        for q, g, t, prompt, text in rows
    ]  # fmt: skip
    parquet.write_table(pyarrow.Table.from_pylist(table), folder / "3.parquet")


def open_instruct(folder, rows):
    """Its rows name a sample of a step, so that turns would look like a resumed run's."""
    lines(folder / "run_rollouts_000000.jsonl", [
        {"step": 3, "sample_idx": g, "prompt_idx": q, "prompt_tokens": ids(prompt),
         "response_tokens": ids(text), "reward": g % 2, "finish_reason": "stop", "turn": t}
        for q, g, t, prompt, text in rows
    ])  # fmt: skip


def nemo_rl(folder, rows):
    lines(folder / "train_data_step3.jsonl", [
        {"rewards": [g % 2], "input_lengths": [len(prompt + text)], "idx": k, "turn": [t],
         "token_ids": [ids(prompt + text)], "trajectory_id": [f"{q}-{g}"],
         "token_loss_mask": [[0] * len(prompt) + [1] * len(text)]}
        for k, (q, g, t, prompt, text) in enumerate(rows)
    ])  # fmt: skip


def ms_swift(folder, rows):
    q, g, turn, prompt, text = zip(*rows, strict=True)
    names = [f"{a}-{b}" for a, b in zip(q, g, strict=True)]
    lines(folder / "completions.jsonl", [
        {"step": 3, "prompt": prompt, "completion": text, "right": [x % 2 for x in g],
         "advantages": [0.0] * len(g), "trajectory_id": names, "turn": turn}
    ])  # fmt: skip


def lines(path, objects):
    path.write_text("".join(json.dumps(one) + "\n" for one in objects))


@pytest.mark.parametrize("own", [True, False], ids=["own answers", "equal answers"])
@pytest.mark.parametrize("write", [trl, verl, verl_record, open_instruct, nemo_rl, ms_swift])
def test_dumps_of_turns_are_refused_and_of_single_ones_are_read(tmp_path, write, own):
    one = FORMATS[write.__name__]
    for turns in (1, 3):
        folder = tmp_path / str(turns)
        folder.mkdir()
        write(folder, list(rollouts(turns, own=own)))
        if turns == 1:
            conversion = convert(folder, one, folder / "o.parquet", Options())
            assert (conversion.kept, conversion.groups) == (16, 4)
        else:
            with pytest.raises(ConfigError, match=REFUSED):
                convert(folder, one, folder / "o.parquet", Options())
