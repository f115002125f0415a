"""The layout of every framework, written as its code writes it, becomes the same rows."""

from __future__ import annotations

import json
import math
import sys

import pyarrow
import pytest
from golden import naming
from pyarrow import parquet

from grpo_ustat.cli.convert import main
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.logs.convert import convert
from grpo_ustat.logs.formats import FORMATS, Options, detect
from grpo_ustat.logs.rewards import read_rewards
from grpo_ustat.logs.rows import read_rollouts

GROUPS = {
    "a": ([1, 2, 3], [[7, 8, 9], [7, 9], [8, 9], [8, 8, 9], [7, 7, 9]]),
    "b": ([4, 5], [[6, 9], [6, 6, 9], [9], [7, 6, 9], [8, 6, 9]]),
}
REWARDS = {"a": [1.0, 0.0, 0.5, 0.0, 1.0], "b": [0.0, 0.0, 1.0, 0.0, 0.0]}


def rows():
    """(group, place in it, prompt ids, completion ids, reward), as every fixture holds them."""
    for name, (prompt, completions) in GROUPS.items():
        for i, ids in enumerate(completions):
            yield name, i, prompt, ids, REWARDS[name][i]


def lines(path, objects):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in objects))


def nemo_rl(folder):
    width = 8
    lines(folder / "train_data_step3.jsonl", [
        {
            "content": ["text"], "rewards": [reward], "input_lengths": [len(prompt) + len(ids)],
            "token_ids": [(prompt + ids + [0] * width)[:width]],
            "token_loss_mask": [([0] * len(prompt) + [1] * len(ids) + [0] * width)[:width]],
            "sample_loss_mask": [1.0], "advantages": [[0.0] * width],
            "generation_logprobs": [([0.0] * len(prompt) + [-0.5] * len(ids) + [0.0] * 8)[:width]],
            "prev_logprobs": [[0.0] * width], "idx": k,
        }
        for k, (_, _, prompt, ids, reward) in enumerate(rows())
    ])  # fmt: skip


def prime_rl(folder):
    lines(folder / "rollouts/step_3/train/all/traces.jsonl", [
        {
            "run": {"work": {"policy": {"start": 2, "end": 2}}}, "group": {"id": name},
            "traces": [{
                "nodes": [
                    {"parent": None, "sampled": False, "token_ids": prompt, "mask": None,
                     "logprobs": None, "advantages": None},
                    {"parent": 0, "sampled": True, "token_ids": ids, "mask": [True] * len(ids),
                     "logprobs": [-0.5] * len(ids), "advantages": [0.0] * len(ids)},
                ],
                "rewards": {"right": {"score": reward, "weight": 1.0},
                            "form": {"score": 3.0, "weight": 0.0}},
                "stop_condition": "stop", "calls": [{"finish_reason": "stop"}],
            }],
        }
        for name, _, prompt, ids, reward in rows()
    ])  # fmt: skip


def open_instruct(folder):
    lines(folder / "run_rollouts_000000.jsonl", [
        {
            "step": 3, "sample_idx": i, "prompt_idx": "ab".index(name), "prompt_tokens": prompt,
            "response_tokens": ids, "reward": reward, "advantage": 0.0, "finish_reason": "stop",
            "dataset": "x", "logprobs": [-0.5] * len(ids),
        }
        for name, i, prompt, ids, reward in rows()
    ])  # fmt: skip


def slime(folder):
    import torch

    samples = [
        {
            "group_index": "ab".index(name), "tokens": prompt + ids, "response_length": len(ids),
            "reward": reward, "loss_mask": [1] * len(ids), "status": "completed",
            "rollout_log_probs": [-0.5] * len(ids), "weight_versions": ["2"] * 2,
        }
        for name, _, prompt, ids, reward in rows()
    ]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"rollout_id": 3, "samples": samples}, folder / "p_3.pt")


def text(ids):
    return " ".join(map(str, ids))


def trl(folder):
    folder.mkdir(parents=True, exist_ok=True)
    table = {
        "step": [3] * 10, "prompt": [text(one[2]) for one in rows()],
        "completion": [text(one[3]) for one in rows()], "reward_func": [one[4] for one in rows()],
        "advantage": [0.0] * 10,
    }  # fmt: skip
    parquet.write_table(pyarrow.table(table), folder / "completions_00003.parquet")


def recorded_trl(folder, reused=0):
    """With the recorder among the reward functions; written `reused` steps before."""
    (folder / "completions").mkdir(parents=True, exist_ok=True)
    table = {
        "step": [3] * 10, "prompt": [text(one[2]) for one in rows()],
        "completion": [text(one[3]) for one in rows()], "right": [one[4] for one in rows()],
        "record": pyarrow.array([None] * 10, pyarrow.float64()),
        "prompt_ids": [one[2] for one in rows()], "completion_ids": [one[3] for one in rows()],
        "policy_step": [2 - reused] * 10, "advantage": [0.0] * 10,
    }  # fmt: skip
    parquet.write_table(pyarrow.table(table), folder / "completions/completions_00003.parquet")


def test_what_record_logged_in_trl_is_token_exact(tmp_path):
    """By way of `convert`, with the policy's step, and as the pool of `mse` itself."""
    recorded_trl(tmp_path, reused=1)
    assert detect(tmp_path).name == "trl"
    target = tmp_path / "out.parquet"
    conversion = convert(tmp_path, FORMATS["trl"], target, Options())
    assert conversion.exact and (conversion.kept, conversion.groups) == (10, 2)
    for path in (target, tmp_path / "completions/completions_00003.parquet"):
        read = read_rollouts(path)
        assert [one.prompt_ids for one in read] == [one[2] for one in rows()]
        assert [one.completion_ids for one in read] == [one[3] for one in rows()]
        assert [one.reward for one in read] == [one[4] for one in rows()]
    assert {row["policy_version"] for row in parquet.read_table(target).to_pylist()} == {
        "checkpoint-1"
    }


def verl(folder):
    lines(folder / "3.jsonl", [
        {"input": text(prompt), "output": text(ids), "gts": "", "score": reward, "step": 3,
         "uid": f"{name}_{i}_0"}
        for name, i, prompt, ids, reward in rows()
    ])  # fmt: skip


def ms_swift(folder):
    one = list(rows())
    lines(folder / "completions.jsonl", [{
        "step": [3] * 10, "prompt": [text(x[2]) for x in one],
        "completion": [text(x[3]) for x in one], "accuracy": [x[4] for x in one],
        "advantages": [0.0] * 10,
    }])  # fmt: skip


TEXTS = {"trl", "verl", "ms_swift"}  # which write no token ids of their own
WRITERS = {
    one.__name__: one for one in (nemo_rl, prime_rl, open_instruct, slime, trl, verl, ms_swift)
}


def converted(name, tmp_path, options=Options()):  # noqa: B008  # frozen
    WRITERS[name](tmp_path / "source")
    target = tmp_path / "rollouts.parquet"
    return convert(tmp_path / "source", FORMATS[name], target, options), target


@pytest.mark.parametrize("name", WRITERS)
def test_every_row_is_taken_and_belongs_to_its_prompt(name, tmp_path):
    conversion, target = converted(name, tmp_path)
    assert (conversion.kept, conversion.rows, conversion.groups) == (10, 10, 2)
    assert not conversion.reasons and conversion.exact == (name not in TEXTS)
    table = parquet.read_table(target).to_pylist()
    assert [row["reward"] for row in table] == [one[4] for one in rows()]
    for row, (_, _, prompt, ids, _) in zip(table, rows(), strict=True):
        if conversion.exact:
            assert (row["prompt_ids"], row["completion_ids"]) == (prompt, ids)
            assert row["logprobs"] == [-0.5] * len(ids)
        else:
            assert (row["prompt"], row["completion"]) == (text(prompt), text(ids))
    assert [group.tolist() for group in read_rewards(target).groups] == list(REWARDS.values())
    if conversion.exact:
        read = read_rollouts(target)
        assert [one.completion_ids for one in read] == [one[3] for one in rows()]


@pytest.mark.parametrize("name", WRITERS)
def test_each_layout_is_recognised(name, tmp_path):
    WRITERS[name](tmp_path)
    assert detect(tmp_path).name == name


@pytest.mark.parametrize("name", ["open_instruct", "verl"])
def test_converted_file_is_not_converted_again(name, tmp_path):
    _, target = converted(name, tmp_path)
    with pytest.raises(ConfigError, match=naming("pool=", "grpo-ustat advise ")):
        detect(target)


def test_packed_files_are_to_be_unpacked(tmp_path):
    (tmp_path / "a").mkdir()
    path = tmp_path / "a/3.jsonl.gz"
    path.write_bytes(b"packed")
    for source in (path, tmp_path):
        with pytest.raises(ConfigError, match="3.jsonl.gz"):
            detect(source)
    with pytest.raises(ConfigError, match="3.jsonl.gz"):
        convert(tmp_path, FORMATS["verl"], tmp_path / "o.parquet", Options())
    verl(tmp_path)
    conversion = convert(tmp_path, FORMATS["verl"], tmp_path / "o.parquet", Options())
    assert any(str(path) in line for line in conversion.lines())


def test_what_is_no_format_is_refused(tmp_path):
    lines(tmp_path / "x.jsonl", [{"a": 1}])
    with pytest.raises(ConfigError, match=str(tmp_path)):
        detect(tmp_path)


def open_instruct_rows(changes):
    """Rows of open-instruct, some changed, by their place."""
    all_rows = []
    for k, (name, i, prompt, ids, reward) in enumerate(rows()):
        row = {"step": 3, "sample_idx": i, "prompt_idx": "ab".index(name), "prompt_tokens": prompt,
               "response_tokens": ids, "reward": reward, "finish_reason": "stop",
               "logprobs": [-0.5] * len(ids)}  # fmt: skip
        all_rows.append(row | changes.get(k, {}))
    return all_rows


@pytest.mark.parametrize(
    "changes, kept, reason",
    [
        ({1: {"reward": math.nan}}, 9, "its reward is not a finite number"),
        ({1: {"response_tokens": []}}, 9, "it has no prompt or no completion tokens"),
        ({1: {"logprobs": [-0.5]}}, 9, "logprobs is not as long as the completion"),
        ({k: {"reward": math.inf} for k in (5, 6, 7, 8)}, 5, "a group of one completion"),
        ({k: {"reward": math.inf} for k in (5, 6)}, 5, "its prompt has fewer than 4 completions"),
        ({k: {"step": 2} for k in range(5)}, 5, "of another policy than step 3, which is kept"),
        ({1: {"prompt_tokens": [1]}}, 5, "its group has several prompts"),
        ({1: {"reward": None}}, 9, "its reward is not a finite number"),
        ({1: {"reward": "failed"}}, 9, "its reward is not a finite number"),
        ({1: {"response_tokens": [7, -1]}}, 9, "it holds -1, which is not a token id"),
        ({1: {"response_tokens": None}}, 9, "its row is not as the framework writes it (TypeError"),
        ({1: {"logprobs": None}}, 9, "it has no logprobs, but other rows have"),
        (
            {1: {"logprobs": [-0.5, math.nan]}},
            9,
            "logprobs contains a value that is not a finite number",
        ),
        (
            {1: {"logprobs": ["x", None]}},
            9,
            "logprobs contains a value that is not a finite number",
        ),
        (
            {1: {"logprobs": [[-0.5], {}]}},
            9,
            "logprobs contains a value that is not a finite number",
        ),
        (
            {1: {"logprobs": [-0.5, -(10**400)]}},
            9,
            "logprobs contains a value that is not a finite number",
        ),
        ({1: {"logprobs": -0.5}}, 9, "its row is not as the framework writes it (logprobs is floa"),
        ({1: {"logprobs": "ab"}}, 9, "its row is not as the framework writes it (logprobs is str"),
        ({1: {"reward": 1e300}}, 9, "its reward is larger than 1e+50, so its square over"),
        ({1: {"reward": -(10**60)}}, 9, "its reward is larger than 1e+50, so its square ov"),
        ({1: {"reward": 10**400}}, 9, "its reward is not a finite number"),
        (
            {1: {"response_tokens": [7, 2**63]}},
            9,
            "it holds 9223372036854775808, which is not a tok",
        ),
        ({1: {"response_tokens": [7, True]}}, 9, "it holds True, which is not a token id"),
        ({1: {"response_tokens": [7, 9.5]}}, 9, "it holds 9.5, which is not a token id"),
        ({1: {"response_tokens": "ab"}}, 9, "it holds 'a', which is not a token id"),
        ({1: {"response_tokens": 7}}, 9, "its row is not as the framework writes it (TypeError"),
    ],
)
def test_what_is_left_out_is_counted_with_its_reason(changes, kept, reason, tmp_path):
    lines(tmp_path / "run_rollouts_000000.jsonl", open_instruct_rows(changes))
    target = tmp_path / "out.parquet"
    conversion = convert(tmp_path, FORMATS["open_instruct"], target, Options())
    assert conversion.kept == kept and sum(conversion.reasons.values()) == 10 - kept
    assert any(line.split("left out: ")[-1].startswith(reason) for line in conversion.lines())


def test_the_policy_is_chosen_before_groups_are_formed(tmp_path):
    """Of group a one row spans two policies and one is of the policy before: three are left."""
    prime_rl(tmp_path)
    path = tmp_path / "rollouts/step_3/train/all/traces.jsonl"
    episodes = [json.loads(line) for line in path.read_text().splitlines()]
    episodes[0]["run"]["work"]["policy"] = {"start": 1, "end": 2}
    episodes[1]["run"]["work"]["policy"] = {"start": 1, "end": 1}
    lines(path, episodes)
    conversion = convert(tmp_path, FORMATS["prime_rl"], tmp_path / "o.parquet", Options())
    assert conversion.kept == 5 and dict(conversion.reasons) == {
        "written by policies 1 to 2": 1,
        "of another policy than 2, which is kept (--version to change it)": 1,
        "its prompt has fewer than 4 completions": 3,
    }  # fmt: skip


def test_tokens_of_tools_are_masked(tmp_path):
    """An environment's turn between two of the policy's."""
    prime_rl(tmp_path)
    path = tmp_path / "rollouts/step_3/train/all/traces.jsonl"
    episodes = [json.loads(line) for line in path.read_text().splitlines()]
    for episode in episodes:
        episode["traces"][0]["nodes"] += [
            {"parent": 1, "sampled": False, "token_ids": [5, 5], "mask": None, "logprobs": None},
            {"parent": 2, "sampled": True, "token_ids": [9], "mask": [True], "logprobs": [-1.0]},
        ]
    lines(path, episodes)
    convert(tmp_path, FORMATS["prime_rl"], tmp_path / "o.parquet", Options())
    first = read_rollouts(tmp_path / "o.parquet")[0]
    assert first.completion_ids == [7, 8, 9, 5, 5, 9]
    assert first.loss_mask == [True, True, True, False, False, True]
    assert first.logprobs == [-0.5, -0.5, -0.5, 0.0, 0.0, -1.0]


def test_a_pickle_that_needs_code_is_refused(tmp_path):
    import torch

    torch.save({"rollout_id": 3, "samples": [Options()]}, tmp_path / "p_3.pt")
    with pytest.raises(ConfigError, match="pickle"):
        convert(tmp_path, FORMATS["slime"], tmp_path / "o.parquet", Options())


def test_several_reward_columns_are_asked_for(tmp_path):
    trl(tmp_path)
    path = tmp_path / "completions_00003.parquet"
    table = parquet.read_table(path)
    parquet.write_table(table.append_column("form", pyarrow.array([1.0] * 10)), path)
    with pytest.raises(ConfigError, match=naming("reward_func, form", "--reward")):
        convert(tmp_path, FORMATS["trl"], tmp_path / "o.parquet", Options())
    conversion = convert(tmp_path, FORMATS["trl"], tmp_path / "o.parquet", Options(reward="form"))
    assert conversion.kept == 10


@pytest.mark.parametrize(
    "words, message",
    [
        (["missing", "o.parquet"], "missing does not exist"),
        (["empty.jsonl", "o.parquet"], "empty.jsonl is empty"),
        (["empty", "o.parquet"], "empty contains no files"),
        (["source", "o.csv"], "o.csv does not end in .parquet"),
        (["source", "there.parquet"], "there.parquet exists already"),
        (["source", "o.parquet", "--from", "verl"], "is not as verl writes it (KeyError: 'input')"),
        (
            ["source", "o.parquet", "--from", "slime"],
            "source contains no *.pt files, which slime writes",
        ),
        (["source", "empty.jsonl/o.parquet"], "o.parquet: its folder cannot be created ("),
        (
            ["source", "there.parquet/a/o.parquet"],
            "there.parquet/a/o.parquet: its folder cannot be created",
        ),
        (["source", "o.parquet", "--group-size", "0"], "--group-size 0 is below 1"),
        (["source", "o.parquet", "--group-size", "-4"], "--group-size -4 is below 1"),
    ],
)
def test_wrong_command_lines_end_in_one_line(words, message, tmp_path, monkeypatch, capsys):
    open_instruct(tmp_path / "source")
    for name in ("there.parquet", "empty.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["convert", *words])
    with pytest.raises(SystemExit, match="2"):
        main()
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


def test_terminal_of_a_conversion(tmp_path, monkeypatch, capsys):
    open_instruct(tmp_path / "source")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["convert", "source", "o.parquet"])
    main()
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("open_instruct: 10 of 10 rows in 1 files") and "2 prompts" in out[0]
    assert out[-1] == "next: grpo-ustat mse pool=o.parquet model=CHECKPOINT"


def test_groups_that_are_too_small_for_a_study_are_for_advise(tmp_path, monkeypatch, capsys):
    """Where no prompt has the four completions that `mse` needs, as with `num_generations=2`."""
    lines(tmp_path / "a_rollouts_000000.jsonl", [
        row for k, row in enumerate(open_instruct_rows({})) if k % 5 < 2
    ])  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["convert", ".", "o.parquet", "--from", "open_instruct"])
    main()
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("open_instruct: 4 of 4 rows")
    assert out[-1] == "next: grpo-ustat advise o.parquet"
    assert [group.tolist() for group in read_rewards(tmp_path / "o.parquet").groups] == [
        [1.0, 0.0], [0.0, 0.0],
    ]  # fmt: skip


def test_half_a_character_leaves_a_row_out(tmp_path):
    """As json may spell it; no Parquet file holds one."""
    rows = [
        {"input": "How many?", "output": text, "score": float(n), "step": 1}
        for n, text in enumerate(("one", "tw\\ud83d", "three", "\\udc00"))
    ]
    file = tmp_path / "1.jsonl"
    file.write_text("".join(json.dumps(row).replace("\\\\u", "\\u") + "\n" for row in rows))
    conversion = convert(tmp_path, FORMATS["verl"], tmp_path / "out.parquet", Options())
    assert conversion.kept == 2
    assert list(conversion.reasons.values()) == [2]


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_a_completion_that_ended_at_once_is_kept(name, tmp_path, monkeypatch):
    """Its text is empty: the end token alone."""
    without_end = lambda ids: " ".join(str(token) for token in ids if token != 9)  # noqa: E731
    monkeypatch.setattr(sys.modules[__name__], "text", without_end)
    conversion, target = converted(name, tmp_path)
    assert (conversion.kept, conversion.reasons) == (10, {})
    assert [one.completion for one in read_rollouts(target)].count("") == 1
    assert not any("biased" in line for line in conversion.lines())


@pytest.mark.parametrize(
    "name, completion", [("trl", []), ("trl", None), ("nemo_rl", []), ("open_instruct", [])]
)
def test_what_cannot_be_read_is_counted_and_said_to_bias(name, completion, tmp_path, monkeypatch):
    """No message at all, or no token: nothing says how it ended."""
    if name == "trl":
        folder = tmp_path / "source"
        folder.mkdir()
        asked = [{"role": "user", "content": "How many?"}]
        said = [[{"role": "assistant", "content": text}] for text in ("", "1", "2", "3")]
        parquet.write_table(
            pyarrow.table({"step": [1] * 5, "prompt": [asked] * 5, "right": [0.0, 1, 0, 1, 0],
                           "completion": [*said, completion]}),
            folder / "completions_00001.parquet",
        )  # fmt: skip
        conversion = convert(folder, FORMATS[name], tmp_path / "o.parquet", Options())
        assert (conversion.kept, conversion.rows) == (4, 5)
    else:
        monkeypatch.setitem(GROUPS, "b", ([4, 5], [[6, 9], [6, 6, 9], [], [7, 6, 9], [8, 6, 9]]))
        conversion, _ = converted(name, tmp_path)
        assert conversion.kept == 9 and sum(conversion.reasons.values()) == 1
    assert any("biased" in line for line in conversion.lines())


@pytest.mark.parametrize(
    "prompt, rest",
    [  # Qwen's, Llama's, Gemma's and DeepSeek's templates as verl decodes them
        ("system\nYou are helpful.\nuser\nHow many?\nassistant\n", "assistant"),
        ("user\n\nHow many?assistant\n\n", "assistant"),
        ("user\nHow many?\nmodel\n", "model"),
        ("How many?<think>\n", "<think>"),
        ("user\nHow many?\nassistant\n<think>\n\n</think>\n\n", "assistant"),  # Qwen3
        ("userHow many?assistant", "assistant"),  # Phi-4
        ("systemYou answer.userWho is the assistantassistant", "assistant"),  # gpt-oss
        ("userHow many?\nassistant", "assistant"),  # Granite
        ("<|user|>\nHow many?\n<|assistant|>\n", "<|assistant|>"),  # Zephyr, where it is a text
        # with special tokens
        ("<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n", "assistant"),
        (
            "<|start_header_id|>user<|end_header_id|>\n\nHow many?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "assistant<|end_header_id|>",
        ),
        ("<start_of_turn>user\nHow many?<end_of_turn>\n<start_of_turn>model\n", "model"),
        ("<|user|>\nHow many?<|end|>\n<|assistant|>\n", "<|assistant|>"),
        ("<|im_start|>assistant<|im_sep|>", "assistant<|im_sep|>"),
    ],
)
def test_a_dump_of_verl_whose_chat_template_is_lost_is_refused(tmp_path, prompt, rest):
    lines(tmp_path / "3.jsonl", [
        {"input": prompt, "output": str(k), "score": float(k), "step": 3} for k in range(4)
    ])  # fmt: skip
    with pytest.raises(ConfigError) as refused:
        convert(tmp_path, FORMATS["verl"], tmp_path / "out.parquet", Options())
    assert str(refused.value) == (
        f"{tmp_path}/3.jsonl line 0: the prompt ends in {rest}, so a chat template wrote it. verl "
        "logs no special tokens, so the model read a different text: log tokens with "
        "VERL_USE_EXTERNAL_MODULES=grpo_ustat.integrations.verl_record and convert those files "
        "(docs/verl.md)"
    )


@pytest.mark.parametrize(
    "prompt",
    ["Who is the shop assistant", "List a duty of a teaching assistant", "Name an AI assistant\n",
     "Define: research-assistant", 'Spell "assistant', "physician/assistant\n\n", "assistants",
     "A text.\n\nWho is your assistant\n\n", "User: hi\nAssistant:", "Which language model",
     "user-facing tools: name an assistant", "systems need an assistant", "Say <b>assistant"],
)  # fmt: skip
def test_a_plain_prompt_that_ends_in_such_a_word_is_read(tmp_path, prompt):
    lines(tmp_path / "3.jsonl", [
        {"input": prompt, "output": str(k), "score": float(k % 2), "step": 3} for k in range(4)
    ])  # fmt: skip
    conversion = convert(tmp_path, FORMATS["verl"], tmp_path / "out.parquet", Options())
    assert (conversion.kept, conversion.rows) == (4, 4)
