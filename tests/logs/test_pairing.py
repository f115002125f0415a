"""Files of a TRL run and its checkpoints, laid out as real runs leave them: which wrote which."""

from __future__ import annotations

import json
import sys

import pyarrow
import pytest
from pyarrow import parquet
from test_convert import recorded_trl

from grpo_ustat.cli.convert import main
from grpo_ustat.logs.convert import convert
from grpo_ustat.logs.formats import FORMATS
from grpo_ustat.logs.pairing import logged_policy_step, other_policy_sentence
from grpo_ustat.logs.rows import Options


def run_of_trl(folder, files, checkpoints, logging_steps, save_steps, prompts=4):
    """Files of texts, 4 completions per prompt, and checkpoints with the trainer's state."""
    (folder / "completions").mkdir(parents=True)
    for file in files:
        rows = range(4 * prompts)
        table = {
            "step": [file] * len(rows), "prompt": [f"p{k // 4}" for k in rows],
            "completion": [f"c{k}" for k in rows], "right": [float(k % 2) for k in rows],
            "advantage": [0.0] * len(rows),
        }  # fmt: skip
        parquet.write_table(
            pyarrow.table(table), folder / f"completions/completions_{file:05d}.parquet"
        )
    for step in checkpoints:
        checkpoint = folder / f"checkpoint-{step}"
        checkpoint.mkdir()
        (checkpoint / "config.json").write_text("{}")
        state = {"logging_steps": logging_steps, "save_steps": save_steps, "global_step": step}
        (checkpoint / "trainer_state.json").write_text(json.dumps(state))


@pytest.mark.parametrize(
    "files, checkpoints, steps, line, model",
    [  # TRL's defaults first: no file has its checkpoint, and that of 499 updates is nearest
        (range(10, 1001, 10), (500,), (10, 500), "completions_00500 was written 1 update before "
         "checkpoint-500, the nearest checkpoint; to log the completions of a checkpoint, use "
         "logging_steps=1, or save_steps=499 (checkpoint-499 writes completions_00500)", 500),
        ((510, 520), (500,), (10, 500), "completions_00510 was written 9 updates after "
         "checkpoint-500, the nearest checkpoint; to log the completions of a checkpoint, use "
         "logging_steps=1, or save_steps=499 (checkpoint-499 writes completions_00500)", 500),
        (range(495, 520), (500, 505), (1, 5), "completions_00506 was written by checkpoint-505",
         505),
        ((2, 4, 6, 8, 10, 11), (5, 10, 11), (2, 5), "completions_00011 was written by "
         "checkpoint-10", 10),
        ((2, 4, 6, 8, 10, 11), (5, 11), (2, 5), "completions_00006 was written by checkpoint-5", 5),
        ((8,), (5,), (2, 5), "completions_00008 was written 2 updates after checkpoint-5, the "
         "nearest checkpoint", 5),
    ],
)  # fmt: skip
def test_the_file_nearest_to_a_checkpoint_is_kept_and_its_checkpoint_named(
    tmp_path, monkeypatch, capsys, files, checkpoints, steps, line, model
):
    run_of_trl(tmp_path / "run", files, checkpoints, *steps)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["convert", "run", "out.parquet"])
    main()
    out = capsys.readouterr().out.splitlines()
    assert f"  {line}" in out
    assert out[-1] == (
        f"next: grpo-ustat mse pool=out.parquet model=run/checkpoint-{model} study.cut_at=LENGTH"
    )
    written = int(line.split()[0].rpartition("_")[2]) - 1
    assert logged_policy_step(tmp_path / "out.parquet") == written


def test_a_version_is_taken_as_typed_and_its_nearest_checkpoint_named(tmp_path):
    run_of_trl(tmp_path, (10, 20), (9, 15), 10, 5)
    target = tmp_path / "out.parquet"
    conversion = convert(tmp_path, FORMATS["trl"], target, Options(version="step 20"))
    assert conversion.pairing is not None
    assert (conversion.pairing.policy_step, conversion.pairing.checkpoint_step) == (19, 15)


def test_the_folder_of_completions_and_one_file_have_the_checkpoints_of_their_run(tmp_path):
    run_of_trl(tmp_path / "run", (6,), (5,), 1, 5)
    for name in ("completions", "completions/completions_00006.parquet"):
        target = tmp_path / f"{name.count('/')}.parquet"
        conversion = convert(tmp_path / "run" / name, FORMATS["trl"], target, Options())
        assert "  completions_00006 was written by checkpoint-5" in conversion.lines()


def test_a_checkpoint_without_weights_that_can_be_loaded_is_none(tmp_path):
    """DeepSpeed's ZeRO-3 leaves such folders, of parts of its own."""
    run_of_trl(tmp_path, (6,), (5,), 1, 5)
    (tmp_path / "checkpoint-5/config.json").unlink()
    conversion = convert(tmp_path, FORMATS["trl"], tmp_path / "out.parquet", Options())
    assert conversion.pairing is None


def test_the_recorder_says_which_policy_wrote_a_file_of_several_updates_a_batch(tmp_path):
    """File 3 is of policy 1 there, not of 2."""
    recorded_trl(tmp_path, reused=1)
    assert logged_policy_step(tmp_path / "completions/completions_00003.parquet") == 1
    convert(tmp_path, FORMATS["trl"], tmp_path / "out.parquet", Options())
    assert logged_policy_step(tmp_path / "out.parquet") == 1


def test_next_command_after_a_log_of_one_prompt(tmp_path, monkeypatch, capsys):
    """TRL's default on one GPU: a batch is one prompt."""
    run_of_trl(tmp_path / "run", (6,), (5,), 1, 5, prompts=1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["convert", "run", "out.parquet"])
    main()
    out = capsys.readouterr().out.splitlines()
    assert out[-3].startswith("  there is only one prompt")
    command, _, comment = out[-1].partition("  # ")
    assert command.startswith("next: grpo-ustat mse model=run/checkpoint-5 dataset=jsonl ")
    assert "DATA.jsonl" in comment


@pytest.mark.parametrize(
    "model, said",
    [
        ("run/checkpoint-500", "written 9 updates after the model whose gradients are computed: "
         "checkpoint-509 wrote completions_00510.parquet, and the model is checkpoint-500"),
        ("run/checkpoint-510/", "written 1 update before the model whose gradients"),
        ("checkpoints/global_step_500/actor/huggingface", "written 9 updates after"),
        ("run/checkpoint-509", ""),
        ("org/model", ""),
    ],
)  # fmt: skip
def test_a_checkpoint_that_did_not_write_the_completions_is_told(tmp_path, model, said):
    run_of_trl(tmp_path, (510,), (), 10, 500)
    sentence = other_policy_sentence(tmp_path / "completions/completions_00510.parquet", model)
    assert said in sentence and bool(sentence) == bool(said)
