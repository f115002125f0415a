"""Rewards in all forms, damaged in many ways, and runs beside each other."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import random
import re
import zipfile
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from grpo_ustat.advise.compare import short_names
from grpo_ustat.advise.kinds import Kind, kind_of
from grpo_ustat.advise.request import Request, parse_request
from grpo_ustat.advise.sources import advice_of
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.logs.rewards import read_rewards

P, N = 12, 8


def drawn(seed=0, prompts=P):
    draws = np.random.default_rng(seed)
    return (draws.random((prompts, N)) < draws.random((prompts, 1))).astype(int)


REWARDS = drawn()
TRUE = (P, P * N, round(float(REWARDS.mean()), 6))


def json_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def rows(rewards=REWARDS):
    return [{"prompt_id": f"q{x}", "reward": int(z)} for x, row in enumerate(rewards) for z in row]


def lists(rewards=REWARDS):
    return [{"prompt_id": f"q{x}", "rewards": row.tolist()} for x, row in enumerate(rewards)]


def csv_text(names, lines):
    return "\n".join([",".join(names), *(",".join(map(str, line)) for line in lines), ""])


WIDE = [[f"q{x}", *row] for x, row in enumerate(REWARDS.tolist())]
WIDE_NAMES = ["prompt_id", *(f"r{k}" for k in range(N))]
FORMS = {
    "rows": ("rows.jsonl", json_lines(rows())),
    "lists": ("lists.jsonl", json_lines(lists())),
    "table": ("rows.csv", csv_text(["prompt_id", "reward"], [row.values() for row in rows()])),
    "wide": ("wide.csv", csv_text(WIDE_NAMES, WIDE)),
}


def summary(path, **options):
    rewards = read_rewards(path, **options)
    means = rewards.by_prompt(np.mean)
    total = sum(group.sum() for group in rewards.groups)
    return len(means), rewards.completions, round(float(total / rewards.completions), 6)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_same_rewards(tmp_path, form):
    name, text = FORMS[form]
    path = tmp_path / name
    path.write_text(text)
    assert kind_of(path) is Kind.REWARDS and summary(path) == TRUE
    assert f"{P} prompts with {N} completions" in advice_of(Request(path)).details[0]


def replaced(text, old, new, count=1):
    assert old in text, old
    return text.replace(old, new, count)


def archive(text):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr("data", text)
    return packed.getvalue()


def shuffled(text):
    head, *lines = text.splitlines()
    start = [head] if head.startswith("prompt_id") else []
    lines = lines if start else [head, *lines]
    random.Random(0).shuffle(lines)
    return "\n".join([*start, *lines]) + "\n"


def first_number(text, new):
    """The first reward replaced."""
    for old in ('"reward": ', '"rewards": [', "\nq0,"):
        if old in text:
            start = text.index(old) + len(old)
            return text[:start] + new + text[start + 1 :]
    raise AssertionError


# Damage to any of the forms. What is left is either the same rewards or refused: None.
ANY = {
    "empty": (lambda t: "", None),
    "blank": (lambda t: " \n\n\t\n", None),
    "cut in a row": (lambda t: t[:-4] if t[0] == "{" else t + "q0" + 9 * ",1", None),
    "cut early": (lambda t: t[:5], None),
    "mark": (lambda t: t.encode("utf-8-sig"), TRUE),
    "line ends": (lambda t: t.replace("\n", "\r\n").encode(), TRUE),
    "UTF-16": (lambda t: t.encode("utf-16"), TRUE),
    "Latin-1": (lambda t: t.replace("q0", "qé").encode("latin-1"), None),
    "accents": (lambda t: t.replace("q0", "qé").encode(), TRUE),
    "nulls": (lambda t: t.replace("q0", "q\0").encode(), None),
    "gzip": (lambda t: gzip.compress(t.encode()), None),
    "zip": (archive, None),
    "pickle": (lambda t: pickle.dumps(t), None),
    "bytes": (lambda t: bytes(range(256)) * 8, None),
    "picture": (lambda t: b"\x89PNG\r\n\x1a\n" + bytes(range(200, 256)), None),
    "web page": (lambda t: "<!doctype html>\n<html>, not a log</html>\n", None),
    "prose": (lambda t: "Rewards went up, then down, said the log.\nThe end, they say.\n", None),
    "not a number": (lambda t: first_number(t, "NaN"), None),
    "infinite": (lambda t: first_number(t, "Infinity"), None),
    "too large": (lambda t: first_number(t, "1e300"), None),
    "digits": (lambda t: first_number(t, "9" * 400), None),
    "word": (lambda t: first_number(t, '"abc"'), None),
    "decimal comma": (lambda t: first_number(t, '"0,5"'), None),
    "underscore": (lambda t: first_number(t, '"1_0"'), None),
    "other digits": (lambda t: first_number(t, '"１"'), None),
    "date": (lambda t: first_number(t, '"2026-01-01"'), None),
    "shuffled": (shuffled, TRUE),
    "blank lines": (lambda t: t.replace("\n", "\n\n"), TRUE),
    "no id": (lambda t: t.replace("prompt_id", "x"), None),
    "id of text": (lambda t: t.replace("prompt_id", "question"), TRUE),
    "spaces": (lambda t: t.replace(",", " , ") if t[0] != "{" else t.replace(":", " : "), TRUE),
    "header only": (lambda t: t.splitlines()[0] + "\n" if t[0] != "{" else "{}\n", None),
    "no header": (lambda t: t.split("\n", 1)[1] if t[0] != "{" else "[1, 2]\n" + t, None),
    "comment": (lambda t: "# rewards, of a run\n" + t, None),
    "bar at the end": (lambda t: t.replace("\n", "|\n") if t[0] == "{" else "", None),
}  # fmt: skip
# Damage to one form.
OWN = {
    "rows": {
        "booleans": (lambda t: t.replace(": 1}", ": true}").replace(": 0}", ": false}"), TRUE),
        "renamed": (lambda t: t.replace('"reward"', '"score"'), TRUE),
        "advantage": (lambda t: t.replace('"reward"', '"advantage"'), None),
        "length": (lambda t: t.replace('"reward"', '"length": 7, "reward"'), TRUE),
        "two rewards": (lambda t: t.replace('"reward"', '"a": 1, "b"'), None),
        "null": (lambda t: first_number(t, "null"), None),
        "null id": (lambda t: replaced(t, '"q0"', "null"), None),
        "list document": (lambda t: json.dumps([json.loads(x) for x in t.splitlines()]), TRUE),
        "pretty": (lambda t: json.dumps([json.loads(x) for x in t.splitlines()], indent=2), TRUE),
        "open list": (lambda t: json.dumps([json.loads(x) for x in t.splitlines()])[:-1], None),
        "one each": (lambda t: json_lines({"prompt_id": k, "reward": 1} for k in range(9)), None),
        "turns": (
            lambda t: json_lines(x | {"turn": k % 3} for k, x in enumerate(rows())), None,
        ),
        "columns": (lambda t: json.dumps({"prompt_id": ["a", "a"], "reward": [0, 1]}), None),
        "nested": (lambda t: t.replace('"reward": ', '"reward": {"a": ').replace("}", "}}"), None),
    },
    "lists": {
        "empty list": (
            lambda t: json_lines([*lists(), {"prompt_id": "q99", "rewards": []}]), TRUE,
        ),
        "nested list": (lambda t: t.replace("[", "[[").replace("]", "]]"), None),
        "null in a list": (lambda t: first_number(t, "null"), None),
        "text for a list": (lambda t: replaced(t, '"rewards": [', '"rewards": "['), None),
        "functions": (
            lambda t: json_lines({"prompt_id": x, "rewards": {"a": [1]}} for x in range(9)), None,
        ),
        "other name": (lambda t: t.replace('"rewards"', '"scores"'), TRUE),
        "token ids": (lambda t: t.replace('"rewards"', '"completion_ids"'), None),
        "repeated": (lambda t: t + t, (P, 2 * P * N, TRUE[2])),
        "document": (lambda t: json.dumps([json.loads(x) for x in t.splitlines()]), TRUE),
    },
    "table": {
        "semicolons": (lambda t: t.replace(",", ";"), TRUE),
        "tabs": (lambda t: t.replace(",", "\t"), TRUE),
        "quotes": (lambda t: re.sub(r"(q\d+)", r'"\1"', t), TRUE),
        "two names": (lambda t: replaced(t, "prompt_id,reward", "prompt_id,prompt_id"), None),
        "missing": (lambda t: first_number(t, ""), None),
        "true": (lambda t: t.replace(",1\n", ",True\n").replace(",0\n", ",False\n"), TRUE),
        "one column": (lambda t: t.replace(",", " "), None),
        "open quote": (lambda t: replaced(t, "q3", '"q3'), None),
        "ids 1 and 01": (lambda t: t.replace("q1,", "1,").replace("q2,", "01,"), TRUE),
    },
    "wide": {
        "semicolons": (lambda t: t.replace(",", ";"), TRUE),
        "reward_0": (lambda t: t.replace("r0", "reward_0").replace("r1", "reward_1"), None),
        "numbers": (lambda t: replaced(t, ",".join(WIDE_NAMES), "prompt_id,0,1,2,3,4,5,6,7"), TRUE),
        "names": (lambda t: replaced(t, ",".join(WIDE_NAMES), "id,a,b,c,d,e,f,g,h"), None),
        "lengths": (lambda t: t.replace("r", "length").replace("plengthompt", "prompt"), None),
        "logprobs": (lambda t: t.replace("r", "logp_").replace("plogp_ompt", "prompt"), None),
        "repeated": (lambda t: t + t.split("\n", 1)[1], None),
        "empty cell": (
            lambda t: first_number(t, ""),
            (P, P * N - 1, round(float((REWARDS.sum() - REWARDS[0, 0]) / (P * N - 1)), 6)),
        ),
        "completion": (
            lambda t: t.replace("prompt_id,", "prompt_id,completion,").replace("q", "q,a"), None,
        ),
        "step": (lambda t: t.replace("prompt_id,", "step,").replace("q", ""), None),
        "two names": (lambda t: replaced(t, "r1", "r0"), None),
    },
}  # fmt: skip
CASES = [
    (form, name, *case) for form in FORMS for name, case in (ANY | OWN[form]).items()
]  # fmt: skip


def test_there_are_at_least_40_kinds_of_damage_to_every_form():
    assert all(sum(case[0] == form for case in CASES) >= 40 for form in FORMS)


@pytest.mark.parametrize("form, name, change, expected", CASES, ids=lambda x: str(x)[:20])
def test_damage_is_a_line_or_the_right_rewards(tmp_path, form, name, change, expected):
    file, text = FORMS[form]
    content, path = change(text), tmp_path / file
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if expected is not None:
        advice_of(Request(path, num_generations=8))
        assert summary(path) == expected
        return
    with pytest.raises(ConfigError) as refused:
        advice_of(Request(path, num_generations=8))
    line = str(refused.value)
    assert str(path) in line and "\n" not in line and len(line) < 700


@pytest.mark.parametrize("name", ["log", "log.txt", "log.json", "log.csv", "log.pt", "log.parquet"])
@pytest.mark.parametrize("form", FORMS)
def test_the_content_decides_and_not_the_name(tmp_path, form, name):
    path = tmp_path / name
    path.write_text(FORMS[form][1])
    if name == "log.parquet":
        with pytest.raises(ConfigError, match="does not begin like a Parquet file"):
            advice_of(Request(path))
        return
    assert f"{P} prompts" in advice_of(Request(path)).details[0]


def test_parquet_with_lists_and_with_another_name(tmp_path):
    path = tmp_path / "rewards.bin"
    parquet.write_table(pyarrow.Table.from_pylist(lists()), path)
    assert summary(path) == TRUE and kind_of(path) is Kind.REWARDS
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match="rewards.bin cannot be read"):
        advice_of(Request(path))


def test_columns_of_completions_may_be_named(tmp_path):
    path = tmp_path / "wide.csv"
    path.write_text(csv_text(["id", *"abcdefgh"], WIDE))
    assert summary(path, column="a,b,c,d,e,f,g,h") == TRUE
    with pytest.raises(ConfigError, match="if each is a completion, reward=a,b,c"):
        path.write_text(csv_text(["prompt_id", *"abcdefgh"], WIDE))
        read_rewards(path)
    path.write_text(csv_text(["id", *(f"logp_{k}" for k in range(N))], WIDE))
    assert summary(path, column="logp_*") == TRUE
    long = tmp_path / "long.jsonl"
    long.write_text(json_lines(x | {"form": 1} for x in rows()))
    total = read_rewards(long, "reward=1,form=0.5").groups[0]
    assert total.tolist() == (REWARDS[0] + 0.5).tolist()


def test_a_prompt_in_several_steps_is_one_cluster(tmp_path):
    """Three identical steps give the interval of one, and not that of three times the prompts."""
    path, single = tmp_path / "steps.jsonl", tmp_path / "single.jsonl"
    single.write_text(FORMS["lists"][1])
    path.write_text(json_lines(x | {"step": step} for step in (1, 2, 3) for x in lists()))
    steps, once = read_rewards(path), read_rewards(single)
    assert len(steps.groups) == 3 * P and len(steps.by_prompt(np.mean)) == P
    text = " ".join(advice_of(Request(path)).details)
    assert "36 groups of 8 completions from 12 different prompts" in text
    assert "from 3 policies (step 1 to 3). All numbers are averages over these policies" in text
    assert once.by_prompt(np.var) == steps.by_prompt(np.var)


def test_correlated_prompts_are_one_cluster(tmp_path):
    path = tmp_path / "lists.jsonl"
    path.write_text(json_lines(x | {"family": k // 4} for k, x in enumerate(lists())))
    advice = advice_of(parse_request([str(path), "cluster=family"]))
    assert "12 groups of 8 completions from 3 different prompts" in advice.details[0]
    with pytest.raises(ConfigError, match="has no column famly: choose from"):
        advice_of(parse_request([str(path), "cluster=famly"]))


def test_equal_texts_under_different_ids_are_one_prompt(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json_lines(x | {"prompt": f"text {k // 16}"} for k, x in enumerate(rows())))
    assert summary(path) == (P // 2, P * N, TRUE[2])


def wide_file(path, rewards, first=0):
    lines = [[f"q{first + x}", *row] for x, row in enumerate(rewards.tolist())]
    path.write_text(csv_text(["prompt_id", *(f"r{k}" for k in range(N))], lines))
    return path


def test_runs_are_paired_by_prompt(tmp_path):
    """The interval is Student's of the differences of the prompts' means."""
    draws = np.random.default_rng(1)
    p = draws.random((200, 1)) * 0.7
    base = (draws.random((200, N)) < p).astype(int)
    tuned = (draws.random((200, N)) < p + 0.2).astype(int)
    files = [wide_file(tmp_path / "base.csv", base), wide_file(tmp_path / "tuned.csv", tuned)]
    advice = advice_of(Request(files[0], others=files[1:]))
    change = (tuned - base).mean(axis=1)
    (numbers,) = advice.numbers["comparisons"]
    assert advice.verdict == "different" and numbers["paired_prompts"] == 200
    assert numbers["difference"] == pytest.approx(change.mean())
    half = 1.972 * change.std(ddof=1) / np.sqrt(200)
    assert numbers["difference_low"] == pytest.approx(change.mean() - half, abs=1e-4)
    assert advice.numbers["prompts_for_a_point"] == pytest.approx(
        (2.8016 * change.std(ddof=1) / 0.01) ** 2, rel=0.01
    )
    assert "higher than the mean reward of base" in advice.sentence
    assert "200 prompts" in advice.sentence
    assert [line.split()[0] for line in advice.details[:3]] == ["run", "base", "tuned"]
    assert max(map(len, advice.details[:3])) <= 80


def test_runs_on_other_prompts_are_not_paired(tmp_path):
    files = [
        wide_file(tmp_path / "a.csv", drawn(1, 40)),
        wide_file(tmp_path / "b.csv", drawn(2, 40), 99),
    ]
    advice = advice_of(Request(files[0], others=files[1:]))
    assert advice.verdict == "not enough data" and "not paired" in advice.sentence
    assert advice.next.startswith("log rewards ") and "the same in each run" in advice.next


def test_three_runs_are_compared_with_the_first_at_a_joint_level(tmp_path):
    files = [wide_file(tmp_path / f"{k}.csv", drawn(k, 40)) for k in range(3)]
    pair = advice_of(Request(files[0], others=files[2:])).numbers["comparisons"][0]
    three = advice_of(Request(files[0], others=files[1:])).numbers["comparisons"][1]
    assert three["difference"] == pair["difference"]
    assert three["difference_high"] > pair["difference_high"]


def test_runs_of_different_kinds_are_refused_by_name(tmp_path):
    rewards = wide_file(tmp_path / "a.csv", REWARDS)
    (tmp_path / "m.jsonl").write_text(json_lines({"step": k, "reward": 0.5} for k in range(9)))
    with pytest.raises(ConfigError, match=r"a.csv \(rewards by prompt\), .*m.jsonl \(log of scal"):
        advice_of(Request(rewards, others=[tmp_path / "m.jsonl"]))


def test_names_of_runs_are_short_and_different():
    paths = [Path(f"runs/{name}/rollouts/3.jsonl") for name in ("a", "b")]
    assert short_names(paths) == ["a", "b"]
    names = short_names([Path(f"{'long' * 9}{k}.csv") for k in range(2)])
    assert len(set(names)) == 2 and max(map(len, names)) <= 14


def test_scalars_are_read_by_the_same_command(tmp_path):
    path = tmp_path / "log"
    steps = [{"step": k, "reward": 0.5, "frac_reward_zero_std": 0.25} for k in range(1, 41)]
    path.write_text(json.dumps({"global_step": 40, "log_history": steps}))
    assert kind_of(path) is Kind.SCALARS
    sentence = advice_of(Request(path, num_generations=8)).sentence
    assert sentence.startswith("Scalars alone do not show")
    for word in ("reward=a", "model=checkpoint-1"):
        with pytest.raises(ConfigError, match=word):
            advice_of(parse_request([str(path), word]))
    assert kind_of(parse_request(["wandb://entity/project/run"]).source) is Kind.SCALARS
