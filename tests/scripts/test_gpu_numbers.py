"""The table of docs/numbers.md: its rows have no fault, every fault is said, and it is measured."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts/benchmarks"
EXAMPLE = ROOT / "docs/examples/mse/tiny_base"


@pytest.fixture
def numbers_table(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    import numbers_table

    return numbers_table


@pytest.fixture
def gpu_numbers(numbers_table):
    import gpu_numbers

    return gpu_numbers


@pytest.fixture
def kept(tmp_path, numbers_table):
    """A folder with one row of the repository, and a page that shows it."""
    source = next(file for file in numbers_table.ROWS.glob("*.json") if "tiny_base" in file.name)
    row = json.loads(source.read_text())
    (tmp_path / "row.json").write_text(numbers_table.row_text(row))
    page = numbers_table.page_with(numbers_table.PAGE.read_text(), [row])
    (tmp_path / "numbers.md").write_text(page)
    return tmp_path, row


def test_the_rows_and_the_table_of_the_repository_have_no_fault(numbers_table):
    assert len(list(numbers_table.ROWS.glob("*.json"))) >= 4
    assert numbers_table.faults(numbers_table.ROWS, numbers_table.PAGE) == []


CHANGES = {
    "it has no questions": {"questions": None},
    "it has no efficiency_trl_default_low": {"efficiency_trl_default_low": None},
    "questions is 0.5, not a whole number from 1 on": {"questions": 0.5},
    "accuracy is 'high', not a finite number": {"accuracy": "high"},
    "space is 'half', not one of full, adapter": {"space": "half"},
    "mood is not a field of a row": {"mood": "good"},
    "accuracy 0.9 is not within [0.276268, 0.301176]": {"accuracy": 0.9},
    "gstar 5.0 is not within [8.16821, 9.8404]": {"gstar": 5.0},
    "accuracy has 1.2, not in 0 to 1": {"accuracy_high": 1.2},
    "prompt_share has -0.1, not in 0 to 1": {"prompt_share_low": -0.1},
    "n_c has -1, not in 0 to inf": {"n_c_low": -1},
    "gstar has 0.5, not in 1 to inf": {"gstar_low": 0.5},
    "stage is 'trained', not 'base' or a number such as '20 steps'": {"stage": "trained"},
    "commands lacks the training for stage 20 steps": {"stage": "20 steps"},
    "questions x completions is 500 x 4, but must be at least 8 x 8": {"completions": 4},
    "versions has no torch": {"versions": {"grpo-ustat": "0.2.0", "transformers": "5.23.0"}},
    "date is 'today', not in the form 2026-03-01": {"date": "today"},
    "date 2999-01-01 is in the future": {"date": "2999-01-01"},
    "commit is 'main', not 40 hexadecimal digits: measure committed code": {"commit": "main"},
    "commands must be lines that begin with grpo-ustat mse or grpo-ustat train": {"commands": []},
    "model is empty": {"model": " "},
    "model contains a local path: '/data/qwen'; write its id by --local ID=FOLDER": {
        "model": "/data/qwen"
    },
    "commands contains a local path: 'grpo-ustat mse model=~/qwen'; write its id by --local "
    "ID=FOLDER": {"commands": ["grpo-ustat mse model=~/qwen"]},
}


@pytest.mark.parametrize("fault, change", CHANGES.items(), ids=CHANGES)
def test_a_fault_is_said_in_a_line_with_file_and_field(fault, change, kept, numbers_table):
    folder, row = kept
    row = {k: v for k, v in (row | change).items() if v is not None or k not in change}
    (folder / "row.json").write_text(numbers_table.row_text(row))
    assert f"row.json: {fault}" in numbers_table.faults(folder, folder / "numbers.md")


def test_a_value_without_an_interval_is_a_fault(kept, numbers_table):
    folder, row = kept
    row |= {"gstar_low": None, "gstar_high": None}
    (folder / "row.json").write_text(numbers_table.row_text(row))
    (fault,) = numbers_table.faults(folder, folder / "numbers.md")
    assert fault == "row.json: gstar_low is missing although gstar is 8.99771"


def test_a_file_that_is_none_a_second_row_and_another_table_are_faults(kept, numbers_table):
    folder, row = kept
    page = folder / "numbers.md"
    assert numbers_table.faults(folder, page) == []
    text = page.read_text()
    page.write_text(text.replace("|CPU|", "|GPU|"))
    (fault,) = numbers_table.faults(folder, page)
    assert (
        fault == "numbers.md: its table does not match the row files: run this script with --table"
    )
    page.write_text(text.replace(numbers_table.END, ""))
    assert "lacks the markers" in numbers_table.faults(folder, page)[0]
    page.write_text(text)
    (folder / "twin.json").write_text(numbers_table.row_text(row))
    (fault,) = numbers_table.faults(folder, page)
    assert fault == "twin.json: model, data, stage and space are the same as in row.json"
    (folder / "twin.json").write_text("{")
    (fault,) = numbers_table.faults(folder, page)
    assert fault.startswith("twin.json: Expecting property name")


def test_a_cell_says_what_its_interval_does(numbers_table):
    def shown(name, *three):
        ends = ("", "_low", "_high")
        row = {f"{name}{end}": x for end, x in zip(ends, three, strict=True)}
        return numbers_table.cell_text(row, name)

    assert shown("gstar", 9.0, 8.5, 9.6) == "9.00 [8.50, 9.60]"
    assert shown("n_c", 3190.0, 1210.0, None) == "at least 1210"
    assert shown("gstar", 18.0, 1.5, None) == "not decided"
    assert shown("efficiency_trl_default", None, 0.0, None) == "not decided"
    assert shown("accuracy", 0.5, 0.25, 0.75) == "0.50 [0.25, 0.75]"


def study_in(folder, model, norm=None):
    """A finished study of the repository, as one of another model with TRL's loss."""
    shutil.copytree(EXAMPLE, folder)
    result = json.loads((folder / "result.json").read_text())
    efficiency = {
        "efficiency_best_g": 0.9,
        "efficiency_best_g_low": 0.8,
        "efficiency_best_g_high": 1.0,
    }
    sizes = {"group_size": 8, "rollouts": 256, "loss": "trl_dapo", "baseline": "group_std"}
    rest = {"loss_type": "dapo", "unbiased_direction": False, "best": True, "may_be_best": True}
    result["losses"] = [sizes | rest | efficiency]
    result["metric"]["norm"] = norm or result["metric"]["norm"]
    (folder / "result.json").write_text(json.dumps(result))
    config = yaml.safe_load((folder / ".hydra/config.yaml").read_text())
    config["model"]["model_name_or_path"] = str(model)
    (folder / ".hydra/config.yaml").write_text(yaml.safe_dump(config))
    line = {"event": "start", "time": "2026-03-01T10:00:00+00:00"}
    line["command"] = f"grpo-ustat mse model={model} output_root=/home/me objectives=[trl_dapo]"
    end = {"event": "end", "time": "2026-03-01T11:00:00+00:00", "outcome": "done"}
    lines = "".join(json.dumps(row) + "\n" for row in (line, end))
    (folder / "launches.jsonl").write_text(lines)
    return folder


def trained_in(folder):
    """What a row reads of a training run."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / "checkpoint-20").mkdir()
    model = {"name": "org/name", "model_name_or_path": "org/name"}
    config = {"max_steps": 20, "model": model, "output_root": "outputs"}
    (folder / ".hydra/config.yaml").write_text(yaml.safe_dump(config))
    command = f"grpo-ustat train model=org/name lora=r16 hydra.run.dir={folder}"
    line = {"event": "start", "time": "2026-03-01T09:00:00+00:00", "command": command}
    (folder / "launches.jsonl").write_text(json.dumps(line) + "\n")
    return folder / "checkpoint-20"


@pytest.mark.parametrize(
    "norm, space",
    [
        ("Euclidean over the adapters' parameters", "adapter"),
        ("Euclidean over all trainable parameters", "full"),
    ],
)
def test_a_row_of_a_checkpoint_names_its_training(norm, space, tmp_path, numbers_table):
    checkpoint = trained_in(tmp_path / "runs/mine")
    row = numbers_table.row_of(study_in(tmp_path / "mse", checkpoint, norm), {})
    assert (row["model"], row["data"]) == ("org/name", "arithmetic, bare")
    assert (row["stage"], row["space"], row["device"]) == ("20 steps", space, "CPU")
    assert (row["efficiency_trl_default"], row["date"]) == (0.9, "2026-03-01")
    assert row["commands"] == [
        "grpo-ustat train model=org/name lora=r16 hydra.run.dir=outputs/train/mine",
        "grpo-ustat mse model=outputs/train/mine/checkpoint-20 'objectives=[trl_dapo]'",
    ]
    assert [*numbers_table.row_faults(row)] == []


def test_a_row_has_the_id_of_a_model_on_disk(tmp_path, numbers_table):
    study = study_in(tmp_path / "mse", tmp_path / "qwen")
    local = numbers_table.folders_by_id([f"org/name={tmp_path / 'qwen'}"])
    row = numbers_table.row_of(study, local)
    assert (row["model"], row["stage"], row["space"]) == ("org/name", "base", "full")
    assert row["commands"] == ["grpo-ustat mse model=org/name 'objectives=[trl_dapo]'"]
    assert any(
        "path" in fault for fault in numbers_table.row_faults(numbers_table.row_of(study, {}))
    )


def test_a_run_that_is_no_row_is_refused(tmp_path, numbers_table):
    with pytest.raises(ValueError, match=r"no trl_dapo at G = 8 and 256 rollouts: .*objectives=\["):
        numbers_table.row_of(EXAMPLE, {})
    with pytest.raises(ValueError, match="not a finished study with mse"):
        numbers_table.row_of(ROOT / "docs/examples/sweep/group_size-2/seed-0", {})
    study = study_in(tmp_path / "mse", "org/name")
    config = (study / ".hydra/config.yaml").read_text().replace("device: cpu", "device: cuda")
    (study / ".hydra/config.yaml").write_text(config)
    assert numbers_table.row_of(study, {}, "NVIDIA H100")["device"] == "NVIDIA H100"


@pytest.mark.nightly(minutes=0.2)
def test_every_command_is_composed_and_priced(gpu_numbers, monkeypatch, tmp_path, capsys):
    words = ["gpu_numbers.py", "--dry-run", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(
        "sys.argv", [*words, "--local", f"openai/gsm8k={ROOT / 'tests/data/gsm8k'}"]
    )
    with pytest.raises(SystemExit) as ended:
        gpu_numbers.main()
    text = capsys.readouterr().out
    assert ended.value.code == 0 and not (tmp_path / "out").exists()
    assert text.count("grpo-ustat mse") == len(gpu_numbers.CELLS)
    assert text.count("grpo-ustat train") == sum(cell.steps > 0 for cell in gpu_numbers.CELLS)


def measured(gpu_numbers, monkeypatch, out, minutes):
    """The exit code of the smallest plan."""
    words = ["gpu_numbers.py", "--smoke", "--device", "cpu", "--out", str(out)]
    monkeypatch.setattr("sys.argv", [*words, "--minutes", str(minutes)])
    with pytest.raises(SystemExit) as ended:
        gpu_numbers.main()
    return ended.value.code


@pytest.mark.nightly(minutes=0.1)
def test_a_row_that_no_longer_fits_is_left_out(gpu_numbers, monkeypatch, tmp_path, capsys):
    duration = gpu_numbers.duration
    three_minutes = dict(seconds=180.0, start=0.0, basis="", gpus=0)
    monkeypatch.setattr(
        gpu_numbers, "duration", lambda plan: replace(duration(plan), **three_minutes)
    )
    monkeypatch.setattr(gpu_numbers, "finish", lambda command, *_: f"{command} failed")
    assert measured(gpu_numbers, monkeypatch, tmp_path, 5) == 1
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("tiny_base_bare_base_full: measuring, 5 min left")
    assert second == "tiny_base_bare_base_full: failed, mse failed (tiny_base_bare_base_full.log)"
    assert third == "tiny_base_bare_2-steps_adapter: skipped; needs 6 min, left: 5 min"


@pytest.mark.nightly(minutes=0.1)
def test_a_row_under_way_when_the_minutes_end_is_stopped(
    gpu_numbers, monkeypatch, tmp_path, capsys
):
    clock = [0.0]

    def cut(command, words, out, name, until):
        clock[0] = until
        return "stopped by SIGTERM"

    monkeypatch.setattr(gpu_numbers, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(gpu_numbers, "finish", cut)
    assert measured(gpu_numbers, monkeypatch, tmp_path, 40) == 0
    _, second, third = capsys.readouterr().out.splitlines()
    assert (
        second
        == "tiny_base_bare_base_full: stopped after 40 minutes; repeat the command to continue"
    )
    assert third == "tiny_base_bare_2-steps_adapter: skipped; needs unknown, left: 0 s"


def smoke(out):
    command = [sys.executable, SCRIPTS / "gpu_numbers.py", "--smoke", "--device", "cpu"]
    return subprocess.Popen([*command, "--out", out], stdout=subprocess.PIPE, text=True)


def rows_in(folder):
    """Rows by file, without what may differ between two days."""
    rows = {file.name: json.loads(file.read_text()) for file in folder.glob("*.json")}
    return {name: row | {"date": ""} for name, row in rows.items()}


@pytest.mark.nightly(minutes=1.2)
def test_a_measurement_that_was_stopped_gives_the_same_rows(tmp_path, numbers_table):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert smoke(whole).wait(400) == 0
    process, until = smoke(stopped), time.monotonic() + 200
    while not list(stopped.glob("mse/*/pool/*.safetensors")):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(200) == 130 and len(rows_in(stopped)) < 2
    assert smoke(stopped).wait(400) == 0
    rows = rows_in(whole)
    assert len(rows) == 2 and rows_in(stopped) == rows
    for row in rows.values():
        faults = numbers_table.row_faults(row | {"date": "2026-03-01", "commit": None})
        assert [*faults] == []
    again = smoke(stopped)
    assert again.communicate()[0].count(": already in ") == 2 and again.returncode == 0
