"""Rows that are turns of one rollout count as one rollout wherever a log is read; rows with ids of
rollouts that have one row each are rollouts themselves."""

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
from grpo_ustat.logs.formats import FORMATS, Options, detect
from grpo_ustat.logs.rewards import read_rewards
from grpo_ustat.logs.rows import check_columns, read_rollouts

# Rewards that all readers of `table` find: those of sixteen rollouts.
REWARDS = [0.0, 1.0] * 8


def rollouts(turns, samples=4, own=True):
    """(question, sample, turn, prompt, completion) of four questions. Answers differ between
    samples where `own`.
    """
    number = count()
    for q in range(4):
        for g in range(samples):
            talk = f"q{q} + {q}"
            for t in range(turns):
                answer = f"a{next(number) if own else t}"
                yield q, g, t, talk, answer
                talk += f" {answer} seen{t}"


COLUMNS = {
    "trajectory_id": lambda q, g, t: f"{q}-{g}",
    "rollout_id": lambda q, g, t: 10 * q + g,
    "traj_idx": lambda q, g, t: g,
    "turn": lambda q, g, t: t,
    "step_in_episode": lambda q, g, t: t,
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
    "columns", [["rollout_id", "turn"], ["trajectory_id", "step_in_episode"]], ids=" ".join
)
def test_turns_with_an_id_are_one_rollout(tmp_path, columns, own, kind):
    path = table(tmp_path / "p.parquet", columns, kind, own=own)
    check_columns(path)
    rollouts_read = read_rollouts(path)
    assert [x.reward for x in rollouts_read] == REWARDS
    assert {len(x.turns) for x in rollouts_read} == {3}
    for x in rollouts_read:
        lengths = [len(turn.prompt_ids or turn.prompt) for turn in x.turns]
        assert lengths == sorted(lengths)
    # A trajectory is counted once.
    assert [list(group) for group in read_rewards(path).groups] == [[0.0, 1.0] * 2] * 4
    assert "4 prompts with 4 completions each" in advice_of(Request(path)).details[0]


@pytest.mark.parametrize("kind", ["texts", "messages", "tokens"])
@pytest.mark.parametrize(
    "columns, message",
    [(["turn"], "add a column rollout_id"), (["step_in_episode"], "add a column rollout_id"),
     (["trajectory_id"], "add a column turn"), (["rollout_id", "num_turns"], "add a column turn")],
    ids=str,
)  # fmt: skip
def test_turns_without_an_id_or_a_number_are_refused(tmp_path, columns, message, kind):
    path = table(tmp_path / "p.parquet", columns, kind)
    for read in (read_rollouts, check_columns, read_rewards):
        with pytest.raises(ConfigError, match=message):
            read(path)


def test_rewards_of_turns_are_counted_once_without_prompts(tmp_path):
    path = tmp_path / "rewards.csv"
    rows = [f"{q},{q}-{g},{t},{g % 2}" for q, g, t, *_ in rollouts(3)]
    for kept in (rows, rows[::3]):
        path.write_text("\n".join(["group_id,trajectory_id,turn,reward", *kept]))
        assert [len(group) for group in read_rewards(path).groups] == [4] * 4


def test_different_rewards_of_a_trajectory_are_refused_by_name(tmp_path):
    path = tmp_path / "rewards.csv"
    rows = [f"{q},{q}-{g},{t},{t / 2}" for q, g, t, *_ in rollouts(3)]
    path.write_text("\n".join(["group_id,trajectory_id,turn,reward", *rows]))
    message = r"rollout trajectory_id=0-0 has the rewards 0\.0 and 0\.5 in row 0 .* row 1"
    with pytest.raises(ConfigError, match=message):
        read_rewards(path)


def test_turns_that_repeat_the_question_cannot_be_scored(tmp_path):
    """Their prompt is not what the model read; their rewards are those of trajectories."""
    rows = [
        {"prompt": f"q{q}", "completion": text, "trajectory_id": f"{q}-{g}", "turn": t,
         "right": float(g % 2)}
        for q, g, t, _, text in rollouts(3)
    ]  # fmt: skip
    path = tmp_path / "turns.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    with pytest.raises(ConfigError, match="all 3 turns of rollout 0-0 have the same prompt"):
        read_rollouts(path)
    assert [len(group) for group in read_rewards(path).groups] == [4] * 4


@pytest.mark.parametrize("column", ["turn", "Turn_idx", "step_in_episode", "is_last_turn"])
def test_rewards_of_turns_without_an_id_are_refused_by_their_column(tmp_path, column):
    """One rollout of three turns would be three completions of its prompt."""
    path = tmp_path / "rewards.csv"
    rows = [f"{q},{t == 2 if 'last' in column else t},{g % 2}" for q, g, t, *_ in rollouts(3)]
    path.write_text("\n".join([f"prompt_id,{column},reward", *rows]))
    with pytest.raises(ConfigError, match=rf"rows have {column} .* drop the column {column}"):
        read_rewards(path)
    path.write_text("\n".join([f"prompt_id,{column},reward", *rows[2::3]]))  # the last turns
    assert [len(group) for group in read_rewards(path).groups] == [4] * 4


@pytest.mark.parametrize("column", ["turns", "num_turns", "step_id", "n_rounds"])
def test_a_number_of_turns_is_no_turn(tmp_path, column):
    path = tmp_path / "rewards.csv"
    rows = [f"{q},{g + 1},{g % 2}" for q, g, *_ in rollouts(1)]
    path.write_text("\n".join([f"prompt_id,{column},reward", *rows]))
    assert [len(group) for group in read_rewards(path, "reward").groups] == [4] * 4


@pytest.mark.parametrize(
    "columns",
    [["trajectory_id"], ["rollout_id"], ["rollout_id", "turn"], ["trajectory_id", "num_turns"],
     ["traj_idx"]],
    ids=" ".join,
)  # fmt: skip
def test_ids_of_rollouts_of_one_row_are_read(tmp_path, columns):
    """Unique ids and numbers, none of which is taken for a reward."""
    path = table(tmp_path / "p.parquet", columns, turns=1)
    check_columns(path)
    assert [one.reward for one in read_rollouts(path)] == [0.0, 1.0] * 8
    assert len(read_rewards(path).groups) == 4


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
def test_dumps_of_turns_are_rollouts(tmp_path, write, own):
    one = FORMATS[write.__name__]
    for turns in (1, 3):
        folder = tmp_path / str(turns)
        folder.mkdir()
        write(folder, list(rollouts(turns, own=own)))
        if (write, turns) == (open_instruct, 3):
            # Its rows name only the question and the turn.
            with pytest.raises(ConfigError, match="add a column rollout_id"):
                convert(folder, one, folder / "o.parquet", Options())
            continue
        conversion = convert(folder, one, folder / "o.parquet", Options())
        assert (conversion.kept, conversion.rollouts, conversion.groups) == (16 * turns, 16, 4)
        assert [x.reward for x in read_rollouts(folder / "o.parquet")] == REWARDS
        if turns == 3:
            assert any("turns of 16 rollouts" in line for line in conversion.lines())
            written = parquet.read_table(folder / "o.parquet")
            assert written["turn"].to_pylist() == [0, 1, 2] * 16
            assert len(set(written["rollout_id"].to_pylist())) == 16
            assert len(read_rewards(folder / "o.parquet").groups) == 4


def node(parent, ids, sampled):
    return {"parent": parent, "sampled": sampled, "token_ids": ids, "mask": [sampled] * len(ids),
            "logprobs": [-0.5] * len(ids) if sampled else None,
            "advantages": [0.3] * len(ids) if sampled else None}  # fmt: skip


def episode(q, g, nodes):
    trace = {"id": f"{q}-{g}", "nodes": nodes, "rewards": {"r": {"score": g % 2, "weight": 1.0}}}
    return {"id": f"e{q}-{g}", "group": {"id": f"q{q}"}, "traces": [trace]}


def branching(q, g):
    """A conversation of two turns, of which the first is the end of another path, and a summary."""
    return [node(None, [q], False), node(0, [5, g], True), node(1, [6], False),
            node(2, [7], True), node(1, [8], False), node(4, [9], True),
            node(None, [q, q], False), node(6, [3], True)]  # fmt: skip


def test_a_trace_that_branches_is_a_rollout_of_its_paths(tmp_path):
    """Each token that the policy wrote is scored once, as prime-rl trains it."""
    folder = tmp_path / "rollouts" / "step_3" / "train" / "effective"
    folder.mkdir(parents=True)
    lines(
        folder / "traces.jsonl",
        [episode(q, g, branching(q, g)) for q in range(4) for g in range(4)],
    )
    conversion = convert(tmp_path, FORMATS["prime_rl"], tmp_path / "o.parquet", Options())
    assert (conversion.kept, conversion.rollouts, conversion.groups) == (48, 16, 4)
    first = read_rollouts(tmp_path / "o.parquet")[0]
    assert [(x.prompt_ids, x.completion_ids, x.loss_mask) for x in first.turns] == [
        ([0], [5, 0, 6, 7], [1, 1, 0, 1]), ([0, 5, 0, 8], [9], [1]), ([0, 0], [3], [1]),
    ]  # fmt: skip
    assert [x.logprobs for x in first.turns] == [[-0.5, -0.5, 0.0, -0.5], [-0.5], [-0.5]]


def test_advantages_by_turn_of_a_trace_are_refused(tmp_path):
    nodes = branching(0, 1)
    nodes[3]["advantages"] = [0.7]
    folder = tmp_path / "rollouts" / "step_3" / "train" / "effective"
    folder.mkdir(parents=True)
    lines(folder / "traces.jsonl", [episode(0, g, nodes) for g in range(4)])
    with pytest.raises(ConfigError, match="its turns have advantage 0.3 and 0.7"):
        convert(tmp_path, FORMATS["prime_rl"], tmp_path / "o.parquet", Options())


def test_results_of_verifiers_are_rollouts_of_their_steps(tmp_path):
    """A row as `state_to_output` of verifiers writes it with the column `trajectory`."""

    def row(q, g):
        steps = [
            {"tokens": {"prompt_ids": ids(prompt), "prompt_mask": [0] * len(prompt),
                        "completion_ids": ids(text), "completion_mask": [1] * len(text),
                        "completion_logprobs": [-1.0] * len(text)},
             "reward": g % 2, "advantage": 0.2, "trajectory_id": "t", "is_truncated": False}
            for qq, gg, _, prompt, text in rollouts(3) if (qq, gg) == (q, g)
        ]  # fmt: skip
        return {"example_id": q, "prompt": [], "completion": [], "reward": g % 2, "error": None,
                "is_truncated": False, "is_completed": True, "trajectory": steps}  # fmt: skip

    lines(tmp_path / "results.jsonl", [row(q, g) for q in range(4) for g in range(4)])
    conversion = convert(tmp_path, detect(tmp_path), tmp_path / "o.parquet", Options())
    assert (conversion.name, conversion.kept, conversion.rollouts) == ("verifiers", 48, 16)
    assert [x.reward for x in read_rollouts(tmp_path / "o.parquet")] == REWARDS
