"""A row's reward, by column, key and weight, and rows that are not as they should be."""

from __future__ import annotations

import json
import math

import pyarrow
import pytest
from frameworks import (
    append,
    cohort,
    converted,
    episode,
    left_out,
    nemo,
    samples,
    slime,
    texts,
    trl,
    verl,
)
from pyarrow import parquet

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.logs.rows import Options, read_rollouts, reward_columns


def test_a_column_may_hold_rewards_where_most_of_its_values_are_numbers():
    columns = {
        "right": [1.0, 0.0, "failed", None], "note": [1, 2, "x", "y", "z"], "half": [1, "x"],
        "form": [None, None], "step": [3, 3],
    }  # fmt: skip
    assert reward_columns(columns, {"step"}) == (["right"], ["form"])


def test_a_reward_that_was_not_scored_drops_its_row(tmp_path):
    rows = [episode(*row) for row in samples(0)]
    rows[3]["traces"][0]["rewards"]["right"] = None
    append(cohort(tmp_path / "run", 5), rows)
    conversion, _ = converted(tmp_path / "run")
    assert (conversion.kept, left_out(conversion, "not a finite number")) == (14, 1)


def test_rewards_of_filtered_rows_are_their_own(tmp_path):
    """Under dynamic sampling `rewards` are those of the batch before it was filtered."""
    own = [row[4] for row in samples(0)]
    nemo(tmp_path / "a/train_data_step1.jsonl", 0, rewards=[0.25] * 15, filtered_rewards=own)
    assert [row["reward"] for row in converted(tmp_path / "a")[1]] == own


def test_a_reward_of_several_is_taken_by_key_or_added_by_weight(tmp_path):
    reward = [{"right": float(k % 2), "form": 0.5, "note": "x"} for k in range(15)]
    slime(tmp_path / "run/3.pt", 0, reward=reward)
    with pytest.raises(ConfigError, match="15 .* right, form, note"):
        converted(tmp_path / "run")
    for asked, value in (("right", 1.0), ("right=2,form=-1", 1.5)):
        _, table = converted(tmp_path / "run", options=Options(reward=asked))
        assert table[1]["reward"] == value
    with pytest.raises(ConfigError, match=r"^--reward rihgt: .* right, form\)"):
        converted(tmp_path / "run", options=Options(reward="rihgt"))
    with pytest.raises(ConfigError, match="^--reward right=x: "):
        converted(tmp_path / "run", options=Options(reward="right=x"))


@pytest.mark.parametrize("asked, value", [("acc", 1.0), ("acc=2,score=-1", 1.5)])
def test_columns_and_keys_of_verl_are_rewards_by_name(tmp_path, asked, value):
    verl(tmp_path / "a/7.jsonl", 0, 7, score=[0.5] * 15, acc=[True] * 15)
    verl(tmp_path / "b/7.jsonl", 0, 7, score=[{"score": 0.5, "acc": True}] * 15)
    for folder in "ab":
        _, table = converted(tmp_path / folder, options=Options(reward=asked))
        assert {row["reward"] for row in table} == {value}
    with pytest.raises(ConfigError, match="15 .* score, acc: .*--reward"):
        converted(tmp_path / "b")


def test_a_row_without_its_fields_is_counted_and_the_others_are_read(tmp_path):
    verl(tmp_path / "a/7.jsonl", 0, 7, score=[None, "nan"] + [1.0] * 13)
    append(tmp_path / "a/7.jsonl", [{"input": "1 2", "score": 1.0, "step": 7}])
    with (tmp_path / "a/7.jsonl").open("a") as file:
        file.write('{"input": "1 2", "outp')
    conversion, _ = converted(tmp_path / "a")
    assert (conversion.rows, conversion.kept) == (17, 10)  # the first prompt has three left
    assert left_out(conversion, "KeyError: 'output'") == left_out(conversion, "truncated") == 1
    assert left_out(conversion, "not a finite number") == 2


def test_what_a_study_would_refuse_is_left_out_row_by_row(tmp_path):
    """A tool's answer, a call of one, a picture, and a prompt that ends with the assistant."""
    said = [[{"role": "assistant", "content": texts(row[3])}] for row in samples(0)]
    asked = [[{"role": "user", "content": texts(row[2])}] for row in samples(0)]
    said[0] = [*said[0], {"role": "tool", "content": "4"}]
    said[5] = [{"role": "assistant", "content": None}]
    asked[10] = [*asked[10], {"role": "assistant", "content": "So"}]
    trl(tmp_path / "run/completions_00003.parquet", 0, 3, prompt=asked, completion=said)
    conversion, table = converted(tmp_path / "run")
    assert left_out(conversion, "not a single assistant message", "content is not text") == 2
    assert left_out(conversion, "its group", "ends with an assistant message") == 1
    assert len(table) == conversion.kept == 12
    assert len(read_rollouts(max(tmp_path.glob("*.parquet")))) == 12


def test_reward_functions_are_added_by_weight_and_a_null_counts_nothing(tmp_path):
    """As TRL adds them; where all are null there is no reward."""
    form = pyarrow.array([None, None] + [0.5] * 13, pyarrow.float64())
    right = pyarrow.array([None] + [1.0] * 14, pyarrow.float64())
    trl(tmp_path / "run/completions_00003.parquet", 0, 3, right=right, form=form)
    with pytest.raises(ConfigError, match="right, form: .*right=1,form=1"):
        converted(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"^--reward fom: .* right, form\)"):
        converted(tmp_path / "run", options=Options(reward="right,fom=2"))
    conversion, table = converted(tmp_path / "run", options=Options(reward="right,form=2"))
    assert [row["reward"] for row in table][:2] == [1.0, 2.0]
    assert left_out(conversion, "not a finite number") == 1
    assert any("1 rows kept: reward form is null" in line for line in conversion.lines())


@pytest.mark.parametrize("weight", [None, "absent"])
def test_a_reward_of_prime_rl_without_a_weight_counts_once(tmp_path, weight):
    rows = [episode(*row) for row in samples(0)]
    for row in rows:
        rewards = row["traces"][0]["rewards"]["right"]
        rewards["weight"] = weight
        if weight == "absent":
            del rewards["weight"]
    append(cohort(tmp_path / "run", 5), rows)
    assert [row["reward"] for row in converted(tmp_path / "run")[1]] == [x[4] for x in samples(0)]


@pytest.mark.parametrize(
    "asked, message",
    [
        ("acc=1,acc=2", "acc is named 2 times"),
        ("score, score", "score is named 2 times"),
        ("", "^--reward '': '' has no reward name"),
        ("acc,", "^--reward acc,: '' has no reward name"),
        ("=1", "'=1' has no reward name"),
        ("acc=nan", "'nan' is not a finite weight of acc"),
        ("acc=inf", "'inf' is not a finite weight of acc"),
    ],
)
@pytest.mark.parametrize("write", [verl, trl])
def test_rewards_that_are_named_wrongly_are_refused(tmp_path, asked, message, write):
    name = "7.jsonl" if write is verl else "completions_00007.parquet"
    write(tmp_path / "a" / name, 0, 7, acc=[1.0] * 15)
    with pytest.raises(ConfigError, match=message):
        converted(tmp_path / "a", options=Options(reward=asked))


def bad_rows(folder, name):
    """A step, and rows of two prompts of whose fields one has another type than the framework's."""
    wrong = [{"a": 1}, [1], "x", None, 10**400, -1, 2.5, [10**400], [math.inf]]
    if name == "verl":
        verl(folder / "7.jsonl", 0, 7)
        talk = [{"role": "user", "content": "1 2"}]
        fields = [{"input": talk}, {"input": 7}, {"output": {"a": 1}}, {"output": 1.5}]
        bad = [{"input": "1 2", "output": "3", "score": 1.0, "step": 7} | one for one in fields]
        append(folder / "7.jsonl", bad)
    elif name == "slime":
        fields = ["tokens", "response_length", "loss_mask", "rollout_log_probs"]
        import torch

        slime(folder / "3.pt", 0)
        content = torch.load(folder / "3.pt", weights_only=True)
        bad = [
            content["samples"][0] | {field: x} for field in fields for x in wrong
            if not (x is None and field in fields[2:])
        ]  # fmt: skip
        torch.save(content | {"samples": content["samples"] + bad}, folder / "3.pt")
    elif name == "nemo_rl":
        nemo(folder / "train_data_step3.jsonl", 0)
        lines = (folder / "train_data_step3.jsonl").read_text().splitlines()
        first = json.loads(lines[0]) | {"idx": 20}
        fields = ["token_ids", "input_lengths", "token_loss_mask", "generation_logprobs"]
        bad = [
            first | {field: x} for field in fields for x in wrong
            if not (x is None and field == "generation_logprobs")
        ]  # fmt: skip
        append(folder / "train_data_step3.jsonl", bad)
    else:
        append(cohort(folder, 5), [episode(*row) for row in samples(0)])
        bad = []
        for field in ("id", "nodes", "rewards", "calls"):
            for x in wrong[:1] + wrong[4:] if field != "id" else ():
                bad.append(episode(*next(samples(1))) | {"id": f"{field}{x}"[:40]})
                bad[-1]["traces"][0][field] = x if field != "calls" else 1.5
        for x in ([1], {"a": 1}):
            bad.append(episode(*next(samples(1))) | {"group": {"id": x}})
        append(cohort(folder, 5), bad)
    return len(bad)


@pytest.mark.parametrize("name", ["verl", "slime", "nemo_rl", "prime_rl"])
def test_a_field_of_another_type_drops_its_row_by_count(tmp_path, name):
    bad = bad_rows(tmp_path / "run", name)
    conversion, _ = converted(tmp_path / "run", name)
    assert (conversion.rows, conversion.kept) == (15 + bad, 15)
    assert left_out(conversion, "") == bad


@pytest.mark.parametrize("texts_first", [True, False])
def test_texts_and_messages_in_one_dump_are_not_mixed(tmp_path, texts_first):
    """What most rows have is taken; the others are counted."""
    said = [[{"role": "assistant", "content": texts(row[3])}] for row in samples(0)]
    asked = [[{"role": "user", "content": texts(row[2])}] for row in samples(0)]
    name = "run/completions/completions_0000"
    trl(tmp_path / f"{name}3.parquet", 0, 3)
    few = {"prompt": asked[:5], "completion": said[:5], "right": [1.0] * 5, "step": [3] * 5,
           "advantage": [0.0] * 5}  # fmt: skip
    parquet.write_table(pyarrow.table(few), tmp_path / f"{name}{2 if texts_first else 4}.parquet")
    conversion, table = converted(tmp_path / "run")
    assert conversion.kept == len(table) == 15
    assert left_out(conversion, "its prompt is messages, but in most rows it is text") == 5


def swift_line(**changes):
    rows = list(samples(1))
    return {"step": ["3"] * 15, "prompt": [texts(row[2]) for row in rows],
            "completion": [texts(row[3]) for row in rows], "right": [1.0] * 15,
            "solution": ["x"] * 15, "advantages": [0.0] * 15} | changes  # fmt: skip


@pytest.mark.parametrize(
    "changes, kept, dropped",
    [
        ({"right": ["failed", None] + [1.0] * 13}, 15, 15),  # the line before is of another policy
        ({"right": [None] * 15}, 15, 15),
        ({"prompt": None}, 15, 1),
        ({"right": ["x"] * 15}, 15, 1),
        ({"right": [1.0] * 3}, 15, 1),
        ({"step": [], "prompt": [], "completion": [], "right": [], "advantages": []}, 15, 0),
    ],
)
@pytest.mark.parametrize("bad_first", [True, False])
def test_a_bad_line_of_ms_swift_costs_its_own_rows(tmp_path, changes, kept, dropped, bad_first):
    bad = swift_line(**changes)
    if changes.get("prompt", 0) is None:
        del bad["prompt"]
    good = swift_line(step=["4"] * 15)
    append(tmp_path / "run/completions.jsonl", [bad, good] if bad_first else [good, bad])
    conversion, _ = converted(tmp_path / "run", "ms_swift")
    assert (conversion.kept, left_out(conversion, "")) == (kept, dropped)


def test_a_word_among_rewards_costs_one_row(tmp_path):
    line = swift_line(right=["failed", None] + [1.0] * 13)
    append(tmp_path / "run/completions.jsonl", [line])
    conversion, _ = converted(tmp_path / "run")
    assert conversion.rows == 15 and left_out(conversion, "not a finite number") == 2


@pytest.mark.parametrize("asked", [None, "right"])
def test_a_file_of_trl_without_any_reward_costs_its_own_rows(tmp_path, asked):
    null = pyarrow.array([None] * 15, pyarrow.float64())
    trl(tmp_path / "run/completions_00002.parquet", 1, 2, right=null)
    trl(tmp_path / "run/completions_00003.parquet", 0, 3)
    conversion, _ = converted(tmp_path / "run", options=Options(reward=asked))
    assert (conversion.kept, left_out(conversion, "not a finite number")) == (15, 15)
