"""Rollouts saved elsewhere, as TRL logs them, become a pool."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from slow_cases import slow_after

import grpo_ustat
from grpo_ustat.cli.compose import parse
from grpo_ustat.config.identity import folder_name
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.logs.rows import read_rollouts
from grpo_ustat.mse import study as study_run
from grpo_ustat.mse.import_rollouts import EndTokens, import_pool
from grpo_ustat.policy.configured import configured_policy, configured_task
from grpo_ustat.policy.loading import Policy
from grpo_ustat.policy.tokenizer import load_tokenizer
from grpo_ustat.rollout.local import Sampling, sample
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.tasks.base import summed_rewards

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from commands import compose, run  # noqa: E402
from test_pool import build  # noqa: E402

SMALL = ("debug=mse", "model=tiny_base", "study.questions=6")
CUT = "study.cut_at=96"  # TRL's log does not say which completions ended


def logged(path, **changes):
    """Completions of the first six study questions, in the columns that TRL logs."""
    config = compose("mse", *SMALL)
    policy, task = (
        configured_policy(config.policy_options),
        configured_task(config.task_options, config.model),
    )
    prompts = task.prompts("study")[:6]
    rollouts = sample(policy, prompts, 8, Sampling.of(config.sampler_options, "pool"))
    z = summed_rewards(task, rollouts)
    rows = [
        {"step": 1, "prompt": p.text, "completion": text, "accuracy_reward": reward}
        for p, texts, row in zip(prompts, rollouts.texts_PG, z, strict=True)
        for text, reward in zip(texts, row.tolist(), strict=True)
    ]
    table = {key: [row[key] for row in rows] for key in rows[0]} | {"advantage": [0.0] * len(rows)}
    table = {key: changes.get(key, value) for key, value in table.items()} | changes
    pyarrow.parquet.write_table(pyarrow.table(table), path)
    return rollouts


@pytest.mark.slow
def test_an_imported_pool_is_the_one_that_was_logged(tmp_path):
    rollouts = logged(tmp_path / "completions.parquet")
    assert rollouts.ended_PG.all()
    ours, _ = build(tmp_path / "ours")
    config = compose("mse", *SMALL, CUT, f"pool={tmp_path / 'completions.parquet'}")
    theirs, spent, prompts, _ = import_pool(config, tmp_path / "pool")
    assert [p.text for p in prompts] == [p.text for p in rollouts.prompts]
    assert spent.rollouts == 48 and spent.tokens == int(rollouts.lengths_PG.sum())
    np.testing.assert_array_equal(theirs.rewards_PN, ours.rewards_PN)
    np.testing.assert_allclose(theirs.gram_PNN, ours.gram_PNN, atol=1e-3 * ours.gram_PNN.max())


@pytest.mark.slow
def test_rewards_of_minus_one_and_one_are_imported_and_named(tmp_path):
    """A study of them tells a mean reward, twice the accuracy less 1, with the interval of means;
    its G* is that of 0 and 1.
    """
    results = []
    for name in ("right", "signed"):
        path = tmp_path / f"{name}.parquet"
        logged(path)
        table = pyarrow.parquet.read_table(path).to_pylist()
        for row in table if name == "signed" else ():
            row["accuracy_reward"] = 2 * row["accuracy_reward"] - 1
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), path)
        code, out, err = run(
            "mse", *SMALL, CUT, f"pool={path}", f"output_root={name}", cwd=tmp_path
        )
        assert code == 0, err
        (found,) = (tmp_path / name).glob("mse/*/seed-0/result.json")
        results.append(json.loads(found.read_text()))
        word = "accuracy" if name == "right" else "mean reward"
        page = (found.parent / "report.html").read_text()
        assert f"tiny_base, whose {word} is {results[-1]['policy']['mean_reward']:.3f} [" in page
        assert f"{word.capitalize()} of the policy" in page
    right, signed = results
    assert (right["policy"]["quantity"], signed["policy"]["quantity"]) == (
        "accuracy",
        "mean reward",
    )
    mean = right["policy"]["mean_reward"]
    assert signed["policy"]["mean_reward"] == pytest.approx(2 * mean - 1)
    for key in ("c1", "c3"):
        assert signed["scaling"][key] == pytest.approx(4 * right["scaling"][key], rel=1e-6)
    for key in ("gstar", "gstar_low"):
        assert signed["scaling"][key] == pytest.approx(right["scaling"][key], rel=1e-6)


@pytest.mark.slow
def test_a_study_of_it_has_a_folder_of_its_own(tmp_path):
    path = tmp_path / "completions.parquet"
    logged(path)
    code, out, err = run("mse", *SMALL, CUT, f"pool={path}", cwd=tmp_path)
    assert code == 0, err
    (found,) = tmp_path.glob("outputs/mse/tiny_base-imported-*/seed-0/result.json")
    assert json.loads(found.read_text())["questions"] == 6


@pytest.mark.slow
def test_a_study_by_another_checkpoint_than_wrote_the_rows_keeps_the_warning(tmp_path):
    """File 510 is of 509 updates; the policy here is one and the same but for its name."""
    path, checkpoint = tmp_path / "completions_00510.parquet", tmp_path / "checkpoint-500"
    logged(path)
    checkpoint.symlink_to(Path(grpo_ustat.__file__).parent / "assets/tiny_base")
    words = [word for word in SMALL if not word.startswith("model=")]
    code, out, err = run("mse", *words, CUT, f"model={checkpoint}", f"pool={path}", cwd=tmp_path)
    assert code == 0, err
    said = "these completions were written 9 updates after the model whose gradients are computed"
    (folder,) = tmp_path.glob("outputs/mse/*/seed-0")
    for text in (out, (folder / "report.html").read_text(), (folder / "result.json").read_text()):
        assert said in " ".join(text.split())


@pytest.mark.slow
def test_another_file_of_the_same_name_is_another_run(tmp_path):
    path = tmp_path / "completions.parquet"
    logged(path)
    before = folder_name(compose("mse", *SMALL, f"pool={path}"))
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(path).slice(0, 40), path)
    assert folder_name(compose("mse", *SMALL, f"pool={path}")) != before


@pytest.mark.slow
def test_unequal_groups_are_cut_and_counted(tmp_path, capsys):
    path = tmp_path / "c.parquet"
    logged(path)
    table = pyarrow.parquet.read_table(path).slice(0, 45)
    pyarrow.parquet.write_table(table, path)
    config = compose("mse", *SMALL, CUT, f"pool={path}")
    pool, *_ = import_pool(config, tmp_path / "pool")
    assert pool.rewards_PN.shape == (5, 8)
    out = capsys.readouterr().out
    assert (
        "1 prompts with 5 completions were dropped, because they have fewer than 8 each "
        "(e.g. row 40" in out
    )
    assert "0 of 40 completions have at least study.cut_at=96 tokens" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes, message",
    [
        ({"step": [1, 2] * 24}, "has rows of steps 1 to 2, and another policy wrote each"),
        (
            {"second_reward": [1.0] * 48},
            "several columns of rewards, accuracy_reward, second_reward",
        ),
    ],
)
def test_what_cannot_be_one_pool_is_refused(tmp_path, changes, message):
    path = tmp_path / "c.parquet"
    logged(path, **changes)
    config = compose("mse", *SMALL, CUT, f"pool={path}")
    with pytest.raises(ValueError, match=message):
        import_pool(config, tmp_path / "pool")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, message",
    [
        # 3 divides no 256 rollouts, and there are no groups of 16
        (
            ["baselines=[group_std]", "group_sizes=[3,16]"],
            "16 completions per prompt are needed",
        ),
        # groups of 16 would need 48 questions, those of 8 that are there 96
        (["baselines=[batch_std]", "group_sizes=[8,16]"], "needs 96 questions, but has 6"),
    ],
)
def test_a_rule_that_the_file_cannot_measure_is_refused_before_it_is_scored(
    tmp_path, words, message
):
    path = tmp_path / "c.parquet"
    logged(path)
    config = compose("mse", *SMALL, CUT, f"pool={path}", *words)
    with pytest.raises(ConfigError, match=message):
        import_pool(config, tmp_path / "pool")
    assert not (tmp_path / "pool").exists()


def rows(count=32, prompts=4, **changes):
    """A small log of texts; `changes` replace columns, or a single row's value by {row: value}."""
    table = {
        "prompt": [f"{i % prompts} + 1 = " for i in range(count)],
        "completion": [str(i % 7) for i in range(count)],
        "reward": [float(i % 2) for i in range(count)],
        "ended": [True] * count,
    }
    for name, change in changes.items():
        if isinstance(change, dict):
            column = list(table[name])
            for row, value in change.items():
                column[row] = value
            change = column
        table[name] = change
    return {name: column for name, column in table.items() if column is not None}


def saved(path, table):
    pyarrow.parquet.write_table(pyarrow.table(table), path)
    return path


def talk(*messages):
    return [{"role": role, "content": content} for role, content in messages]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"reward": {5: float("nan"), 9: float("nan")}},
         r"row 5 \(from 0\): reward is nan: not a finite reward, and 1 more rows are faulty"),
        ({"reward": {4: -1e300}}, r"row 4 \(from 0\): reward is -1e\+300: larger than 1e\+50"),
        ({"reward": {31: float("inf")}}, r"row 31 \(from 0\): reward is inf"),
        ({"reward": {0: None}}, r"row 0 \(from 0\): reward is null: no reward: correct or drop"),
        ({"reward": ["1"] * 32}, "missing: a numeric column of rewards; found prompt"),
        ({"prompt": None, "completion": None},
         r"missing: prompt and completion \(or prompt_ids and completion_ids\); found reward, e"),
        ({"completion": None}, "missing: completion; found prompt, reward, ended: add the missing"),
        ({"completion": None, "prompt_ids": [[1]] * 32},
         r"missing: completion \(or completion_ids\)"),
        ({"prompt": None, "reward": None}, "missing: prompt, and a numeric column of rewards"),
        ({"form": [1.0] * 32}, "of rewards, reward, form, .* convert --reward reward=1,form=1"),
        ({"ended": {7: None}}, r"row 7 \(from 0\): ended is null, not true or false"),
        ({"ended": [1] * 32}, "column ended has a value of type int: write true"),
        ({"prompt": {3: None}}, r"row 3 \(from 0\): prompt is null"),
        ({"prompt": {3: ""}}, r"row 3 \(from 0\): prompt is empty"),
        ({"completion": {2: None}}, r"row 2 \(from 0\): completion is null"),
        ({"completion": [3] * 32}, r"row 0 \(from 0\): completion is 3, neither text nor messages"),
        ({"completion": [[]] * 31 + [talk(("assistant", "1"))]},
         r"row 0 \(from 0\): completion has no messages, and 30 more"),
        ({"completion": [talk(("assistant", "1"), ("tool", "2"))] * 32},
         "completion contains messages with the roles assistant, tool, not a single assistant"),
        ({"completion": [talk(("assistant", None))] * 32},
         "completion has a message with role assistant whose content is not text"),
        ({"completion": [[{"role": "assistant", "content": "1", "tool_calls": "f()"}]] * 32},
         "has a message with tool_calls besides role and content"),
        ({"prompt": [talk(("user", "1"), ("assistant", "2"))] * 32},
         "prompt ends with an assistant message"),
        ({"step": [1] * 31 + [None]}, r"row 31 \(from 0\): step is null"),
    ],
)  # fmt: skip
def test_rows_are_refused_by_number_and_field(tmp_path, changes, message):
    path = saved(tmp_path / "c.parquet", rows(**changes))
    with pytest.raises(ConfigError, match=message) as refused:
        read_rollouts(path)
    assert "\n" not in str(refused.value)


def test_columns_are_refused_before_anything_is_loaded(tmp_path):
    path = saved(tmp_path / "c.parquet", {"prompt_id": ["a"], "reward": [1.0]})
    with pytest.raises(ConfigError, match=r"missing: prompt and completion .* found prompt_id, re"):
        parse("mse", ["model=tiny", f"pool={path}"])
    saved(path, rows(count=0))
    with pytest.raises(ConfigError, match="c.parquet has no rows"):
        parse("mse", ["model=tiny", f"pool={path}"])
    path.write_bytes(b"no Parquet")
    with pytest.raises(ConfigError, match="c.parquet cannot be read"):
        parse("mse", ["model=tiny", f"pool={path}"])


@pytest.mark.parametrize(
    "words", slow_after(1, [["model=tiny"], ["-m", "model=tiny,tiny_base"],
                            ["model.model_name_or_path=embedded:tiny"]]),
)  # fmt: skip
def test_a_file_is_scored_by_the_model_that_is_named(tmp_path, words):
    path = saved(tmp_path / "c.parquet", rows())
    runs = parse("mse", [*words, f"pool={path}", "dry_run=true"]).planned_runs
    assert runs[0].config.model.model_name_or_path == "embedded:tiny"


@pytest.mark.parametrize(
    "name, changes, checkpoints, written",
    slow_after(1, [
        ("rows", {}, (), "model=FOLDER, the checkpoint that wrote them"),
        ("rows", {"policy_version": ["7"] * 32}, (),
         "model=FOLDER, the checkpoint that wrote them, policy_version 7"),
        ("rows", {"policy_step": [39] * 32}, (),
         "model=FOLDER, the checkpoint after 39 updates, which wrote them"),
        ("rows", {"policy_step": [39] * 32}, (20, 39), "model=checkpoint-39"),
        ("completions_00041", {}, (20, 40), "model=checkpoint-40"),
        ("completions_00040", {}, (20, 40), "model=FOLDER, the checkpoint after 39 updates, "
         "which wrote them (the nearest checkpoint is checkpoint-40)"),
    ]),
)  # fmt: skip
def test_a_file_without_a_named_model_is_refused_with_the_one_that_wrote_it(
    tmp_path, monkeypatch, name, changes, checkpoints, written
):
    """And not scored by the default model without a word."""
    monkeypatch.chdir(tmp_path)
    for step in checkpoints:
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}/config.json").write_text("{}")
    saved(tmp_path / f"{name}.parquet", rows(**changes))
    with pytest.raises(ConfigError) as refused:
        parse("mse", [f"pool={name}.parquet"])
    assert str(refused.value) == (
        f"pool={name}.parquet: gradients need the model that wrote the rollouts, but no model is "
        f"set (the default is tiny_base): add {written}"
    )


def test_rows_are_read_as_they_are(tmp_path):
    """Whole numbers and booleans are rewards; both kinds of log come out as the same records."""
    path = saved(tmp_path / "c.parquet", rows(reward=[i % 2 == 0 for i in range(32)]))
    found = read_rollouts(path)
    assert [x.place for x in found] == [f"row {k} (from 0)" for k in range(32)]
    assert (found[1].prompt, found[1].completion, found[0].reward) == ("1 + 1 = ", "1", 1.0)
    assert found[0].ended is True and found[0].length is None
    asked, said = talk(("system", "Add."), ("user", "1 + 1")), talk(("assistant", ""))
    (found,) = read_rollouts(
        saved(path, rows(count=1, prompt=[asked], completion=[said], ended=None))
    )
    assert (found.prompt, found.completion, found.ended) == (asked, "", None)


@pytest.mark.parametrize(
    "table, overrides, message",
    slow_after(3, [
        (rows(ended=None), (), "no column ended, and study.cut_at=null"),
        (rows(), (CUT,), "study.cut_at=96, but .* has a column ended"),
        (rows(completion={4: ""}, ended={4: False}), (), r"row 4 .*: the completion has no tokens"),
        (rows(count=10), (), r"4 completions per prompt are needed, but none of 4 "
         r"prompts has that many \(the prompt of row 2 \(from 0\) has 2\)"),
        (rows(prompts=32), (), "4 completions per prompt are needed, but none of 32"),
        (rows(), ("baselines=[opo]", "group_sizes=[16,32]"),
         "16 completions per prompt are needed.* or use smaller group_sizes"),
        (rows(completion={6: "1" * 5000}), (), r"row 6 .*: a prompt of \d+ tokens and a"),
        (rows(prompt=[talk(("user", "1 + 1"))] * 32), (), "tiny_base has no chat template"),
    ]),
)  # fmt: skip
def test_what_cannot_be_scored_is_refused(tmp_path, table, overrides, message):
    path = saved(tmp_path / "c.parquet", table)
    config = compose("mse", "debug=mse", "model=tiny_base", "study.questions=null",
                     f"pool={path}", *overrides)  # fmt: skip
    with pytest.raises(ConfigError, match=message):
        import_pool(config, tmp_path / "pool")
    assert not (tmp_path / "pool").exists()


@pytest.fixture
def chat_model(tmp_path):
    """The embedded model with a chat template of its own letters, in a folder."""
    folder = tmp_path / "chat"
    policy = configured_policy(compose("mse", "debug=mse", "model=tiny_base").policy_options)
    policy.tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}= {% endif %}"
    )
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_conversation_is_scored_as_the_text_that_it_became(tmp_path, chat_model):
    """Two logs of the same rollouts, as messages and as what the template makes of them."""
    table = rows()
    talks = [talk(("user", prompt)) for prompt in table["prompt"]]
    said = [talk(("assistant", text)) for text in table["completion"]]
    written = [f"{prompt}\n= " for prompt in table["prompt"]]
    pools = []
    for name, changes in (
        ("talks", {"prompt": talks, "completion": said}), ("texts", {"prompt": written})
    ):  # fmt: skip
        path = saved(tmp_path / f"{name}.parquet", table | changes)
        config = compose(
            "mse", "debug=mse", "model=hub", f"model.model_name_or_path={chat_model}",
            "study.questions=null", f"pool={path}",
        )  # fmt: skip
        pool, spent, prompts, _ = import_pool(config, tmp_path / name)
        assert [x.text for x in prompts] == list(dict.fromkeys(written))
        assert (pool.lengths_PN == 2).all()  # a digit and the end token
        pools.append(pool)
    np.testing.assert_array_equal(pools[0].gram_PNN, pools[1].gram_PNN)
    np.testing.assert_array_equal(pools[0].rewards_PN, pools[1].rewards_PN)


@pytest.mark.slow
def test_options_of_the_template_write_conversations(tmp_path, chat_model):
    """Also with the usual prompt, which no conversation is written by; a date that they give is not
    asked for. Texts take none.
    """
    (chat_model / "chat_template.jinja").write_text(
        "{{ day if day is defined else strftime_now('%d') }}{{ messages[-1]['content'] }}="
    )
    table, day = rows(), "prompt.template_options={day: 7}"
    talks = [talk(("user", prompt)) for prompt in table["prompt"]]
    path = saved(tmp_path / "talks.parquet", table | {"prompt": talks})
    words = ("debug=mse", "model=hub", f"model.model_name_or_path={chat_model}",
             "study.questions=null")  # fmt: skip
    config = compose("mse", *words, f"pool={path}", day)
    _, _, prompts, _ = import_pool(config, tmp_path / "pool")
    assert [x.text for x in prompts] == list(dict.fromkeys(f"7{x}=" for x in table["prompt"]))
    with pytest.raises(ConfigError, match="writes today's date, not the date of the log"):
        import_pool(compose("mse", *words, f"pool={path}"), tmp_path / "other")
    texts = saved(tmp_path / "texts.parquet", table)
    with pytest.raises(ConfigError, match="day.* are for chat templates, but .* are texts"):
        import_pool(compose("mse", *words, f"pool={texts}", day), tmp_path / "texts")


@pytest.mark.slow
@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ strftime_now('%d') }}", "writes today's date, not the date of the log"),
        (
            "{{ messages[-1]['content'] }}",
            "row 0 .* has a system message that .* omits",
        ),
        ("{{ raise_exception('no system') }}", r"row 0 .* is refused by .* \(no system\)"),
    ],
)
def test_a_template_that_cannot_write_the_conversation_is_refused(
    tmp_path, chat_model, template, message
):
    (chat_model / "chat_template.jinja").write_text(template)
    asked = [talk(("system", "Add."), ("user", "1 + 1"))] * 8
    path = saved(tmp_path / "c.parquet", rows(count=8, prompts=1, prompt=asked))
    config = compose("mse", "debug=mse", "model=hub", f"model.model_name_or_path={chat_model}",
                     "study.questions=null", f"pool={path}")  # fmt: skip
    with pytest.raises(ConfigError, match=message):
        import_pool(config, tmp_path / "pool")


TURNS = "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
OPEN = "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"


def ends(template, tokens=("<eos>", "<|end|>")):
    """Of a tokenizer with several end tokens, as Gemma's and Phi's have, by a chat template."""
    tokenizer = load_tokenizer("embedded:tiny")
    tokenizer.add_special_tokens({"eos_token": "<eos>", "additional_special_tokens": ["<|end|>"]})
    tokenizer.chat_template = template
    policy = Policy(None, tokenizer, frozenset(tokenizer.convert_tokens_to_ids(list(tokens))), 0)

    def closed(text, prompt="1 + 1 = ", is_turn=False):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokenizer.decode(
            EndTokens(policy, compose("mse", *SMALL)).closed(ids, prompt, is_turn, "row 0")
        )

    return closed


WRITTEN = "<|user|>\n1 + 1<|end|>\n<|assistant|>\n"  # as a text, by the same template


@pytest.mark.parametrize(
    "template, end",
    [
        (TURNS + OPEN, "<|end|>"),
        (TURNS + OPEN + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}", "<|end|>"),
        ("{% for m in messages %}{{ m['content'] }} <|end|>{% endfor %}", "<|end|>"),
        ("{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}", "<eos>"),
        ("{% for m in messages %}{{ m['content'] }}\n{% endfor %}", "<eos>"),
    ],
)
def test_a_turn_ends_as_the_chat_template_ends_it(template, end):
    closed = ends(template)
    assert [closed(text, is_turn=True) for text in ("5", "")] == [f"5{end}", end]
    assert [closed(text) for text in ("5", "")] == ["5<eos>", "<eos>"]  # a plain prompt


def test_a_text_that_the_template_wrote_ends_as_a_turn():
    closed = ends(TURNS + OPEN)
    assert closed("5", WRITTEN) == "5<|end|>"
    assert closed("5", WRITTEN + "1 + ") == "5<|end|>"  # an answer that was begun for the model


@pytest.mark.parametrize(
    "text, ended",
    [("5<|end|>", "5<|end|>"), ("5<|end|>\n", "5<|end|>"), ("5<eos>", "5<eos>"),
     ("5<|end|><eos>", "5<|end|>"), ("5<|end|>6<eos>", "5<|end|>6<eos>"), ("5\n", "5\n<|end|>")],
)  # fmt: skip
def test_an_end_token_in_the_text_is_the_end(text, ended):
    assert ends(TURNS + OPEN)(text, is_turn=True) == ended


def test_an_end_that_nothing_names_is_asked_for():
    other = TURNS.replace("<|end|>", "###")
    assert ends(other, ["<eos>"])("5", is_turn=True) == "5<eos>"  # there is no other
    with pytest.raises(
        ConfigError, match=r"end tokens <\|end\|>, <eos>, and its chat template does not"
    ):
        ends(other)("5", is_turn=True)
    assert ends(other)("5<|end|>", is_turn=True) == "5<|end|>"


@pytest.mark.slow
def test_cut_completions_have_no_end_token_and_are_counted(tmp_path, capsys):
    """`ended` false, or `study.cut_at` tokens and more without such a column: no end token."""
    long = {i: "1234" for i in range(0, 32, 4)}  # of prompt 0 alone
    counts = []
    for name, ended, overrides in (
        ("told", {i: False for i in long}, ()), ("inferred", None, ("study.cut_at=4",))
    ):  # fmt: skip
        path = saved(tmp_path / f"{name}.parquet", rows(completion=long, ended=ended))
        config = compose("mse", "debug=mse", "model=tiny_base", "study.questions=null",
                         f"pool={path}", *overrides)  # fmt: skip
        pool, spent, *_ = import_pool(config, tmp_path / name)
        assert spent.clipped == 8
        counts.append(pool.lengths_PN.tolist())
    assert counts[0] == counts[1] == [[4] * 8] + [[2] * 8] * 3
    assert "8 of 32 completions have at least study.cut_at=4 tokens" in capsys.readouterr().out


def test_questions_of_a_file_are_counted_where_some_are_left_out(tmp_path, capsys):
    path = saved(tmp_path / "c.parquet", rows(length=[9] * 32))
    config = compose("mse", "debug=mse", "model=tiny_base", "study.questions=3", f"pool={path}")
    pool, _, prompts, _ = import_pool(config, tmp_path / "pool")
    assert pool.rewards_PN.shape == (3, 8) and len(prompts) == 3
    out = capsys.readouterr().out
    assert "3 of 4 prompts are used; see study.questions" in out
    assert "24 of 24 completions the number of tokens differs from the column length" in out


@pytest.mark.parametrize(
    "sizes, questions, kept",
    slow_after(
        1,
        [
            ([8, 8, 8, 4], "null", (3, 8)),  # a small group trims no other
            ([8, 8, 8, 1], "null", (3, 8)),  # nor has the file refused
            ([8, 8, 6, 6], "null", (4, 6)),  # 24 completions rather than 16
            ([40, 8, 8, 8], "null", (4, 8)),  # of half of the prompts at least
            ([4, 8, 8, 8], "3", (3, 8)),
            ([5, 5, 5, 5], "null", (4, 5)),
        ],
    ),
)
def test_groups_have_the_size_that_keeps_most_completions(tmp_path, capsys, sizes, questions, kept):
    prompts = [f"{k} + 1 = " for k, size in enumerate(sizes) for _ in range(size)]
    count = len(prompts)
    table = rows(count=count, prompt=prompts, reward=[float(i % 2) for i in range(count)])
    path = saved(tmp_path / "c.parquet", table)
    config = compose("mse", "debug=mse", "model=tiny_base", f"study.questions={questions}",
                     f"pool={path}")  # fmt: skip
    pool, *_ = import_pool(config, tmp_path / "pool")
    assert pool.rewards_PN.shape == kept
    printed = " ".join(capsys.readouterr().out.split())
    dropped = map(int, re.findall(r"\d+(?= completions were dropped)", printed))
    assert sum(dropped) == count - kept[0] * kept[1]


def test_a_length_to_cut_at_is_of_a_file():
    with pytest.raises(ValueError, match="study.cut_at=5 "):
        compose("mse", "study.cut_at=5")
    with pytest.raises(ValueError, match="study.cut_at=0 must be above 0"):
        compose("mse", "study.cut_at=0", "pool=x.parquet")


@pytest.mark.slow
def test_sampling_methods_and_missing_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"pool=nowhere.parquet is not a file"):
        compose("mse", *SMALL, "pool=nowhere.parquet")
    path = tmp_path / "c.parquet"
    logged(path)
    with pytest.raises(ValueError, match="must sample completions"):
        compose("mse", *SMALL, f"pool={path}", "study.methods=[closed_form,monte_carlo]")


def test_a_damaged_file_is_one_line(tmp_path):
    path = tmp_path / "c.parquet"
    path.write_bytes(b"PAR1 nothing")
    config = compose("mse", *SMALL, f"pool={path}")
    with pytest.raises(ValueError, match="cannot be read"):
        study_run.run(config, RunFolder(tmp_path / "run", config))
    assert not list((tmp_path / "run").rglob("*.json"))


def test_a_studys_own_completions_have_no_step(tmp_path):
    none = pyarrow.array([None] * 32, pyarrow.int64())
    assert len(read_rollouts(saved(tmp_path / "own.parquet", rows() | {"step": none}))) == 32
