"""Scalars of a run from the logs of trainers and trackers, and damaged logs.

`data/` has logs of one run of TRL 1.16 with 20 steps, 4 generations and 16 rollouts, as written by
transformers, TensorBoard and W&B.
"""

import csv
import io
import json
import struct
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.logs.scalar_names import NAMES, NEMO_RL, OURS, PRIME_RL, TRL, VERL, match
from grpo_ustat.logs.scalars import is_scalar_log, read_all_scalars, read_scalars

DATA = Path(__file__).parent / "data"
STATE, EVENTS, WANDB = (
    DATA / name for name in ("trainer_state.json", "events.out.tfevents.1", "run-tiny.wandb")
)
STEPS = 12


def only(path):
    (run,) = read_scalars(path)
    return run


def series(name, places=4):
    """Numbers that differ between names and steps."""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    return [round(float(x), places) for x in generator.uniform(0.1, 0.45, STEPS)]


TRUTH = {name: series(name) for name in ("reward", "grad_norm", "entropy", "all_zero", "all_one")}


def verl_lines():
    names = {"critic/score/mean": "reward", "actor/grad_norm": "grad_norm",
             "actor/entropy": "entropy"}  # fmt: skip
    return [
        {"step": step + 1, "data": {name: TRUTH[key][step] for name, key in names.items()}}
        for step in range(STEPS)
    ]


def prime_lines():
    """The orchestrator and the trainer write lines of one step, the trainer three later."""
    agent = "train/agg/all/solver"
    lines = []
    for step in range(STEPS + 3):
        if step < STEPS:
            lines.append({
                "step": step, "time": 1.0, f"{agent}/reward/mean": TRUTH["reward"][step],
                f"{agent}/solved_none": TRUTH["all_zero"][step],
                f"{agent}/solved_all": TRUTH["all_one"][step],
                "progress/rollouts": 64, "progress/tasks": 8,
            })  # fmt: skip
        if step >= 3:
            lines.append({"step": step - 3, "time": 2.0,
                          "optim/grad_norm": TRUTH["grad_norm"][step - 3]})  # fmt: skip
            lines.append({"step": step - 3, "entropy/all/mean": TRUTH["entropy"][step - 3]})
    return lines


def nemo_lines():
    return [
        {
            "step": step + 1, "train/reward": TRUTH["reward"][step],
            "train/grad_norm": TRUTH["grad_norm"][step],
            "train/approx_entropy": TRUTH["entropy"][step],
            "train/baseline_reward/pct_0": 100 * TRUTH["all_zero"][step],
            "train/baseline_reward/pct_1": 100 * TRUTH["all_one"][step],
        }
        for step in range(STEPS)
    ]  # fmt: skip


def our_lines():
    return [
        {
            "step": step + 1, "reward": TRUTH["reward"][step], "entropy": TRUTH["entropy"][step],
            "grad_norm": TRUTH["grad_norm"][step], "frac_completions_skipped": 0.0,
            "rollouts": 128 * (step + 1),
        }
        for step in range(STEPS)
    ]  # fmt: skip


def state_text():
    history = [
        {
            "step": step + 1, "reward": TRUTH["reward"][step], "entropy": TRUTH["entropy"][step],
            "grad_norm": TRUTH["grad_norm"][step], "frac_reward_zero_std": TRUTH["all_one"][step],
        }
        for step in range(STEPS)
    ]  # fmt: skip
    history.append({"step": STEPS, "train_runtime": 1.0, "reward": 0.99})
    return json.dumps({"global_step": STEPS, "logging_steps": 1, "log_history": history})


def json_text(lines):
    return "".join(json.dumps(line) + "\n" for line in lines)


def csv_text(runs=("n8-seed1",)):
    """The form in which W&B exports the chart of a metric."""
    file = io.StringIO()
    columns = [f"{run} - train/reward" for run in runs]
    names = ["Step", *(name + end for name in columns for end in ("", "__MIN", "__MAX"))]
    rows = [
        {"Step": step + 1}
        | {name + end: TRUTH["reward"][step] for name in columns for end in ("", "__MIN", "__MAX")}
        for step in range(STEPS)
    ]
    writer = csv.DictWriter(file, names, quoting=csv.QUOTE_ALL)
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


TEXTS = {
    "trainer_state.json": state_text(),
    "verl.jsonl": json_text(verl_lines()),
    "prime.jsonl": json_text(prime_lines()),
    "nemo.jsonl": json_text(nemo_lines()),
    "metrics.jsonl": json_text(our_lines()),
    "chart.csv": csv_text(),
}


@pytest.mark.parametrize("path", [STATE, EVENTS, WANDB])
def test_logs_of_one_run_agree(path):
    run, state = only(path), only(STATE)
    assert run.trainer == TRL
    assert run.steps.tolist() == list(range(1, 21))
    assert not run.notes
    assert set(state.fields) == set(run.fields)
    for name, values in state.fields.items():
        assert run.fields[name] == pytest.approx(values, rel=1e-6)


def test_settings_come_from_the_tracker():
    run = only(WANDB)
    assert (run.name, run.num_generations, run.share_size) == ("tiny-seed1", 4, 4)


@pytest.mark.parametrize(
    "name, trainer",
    [("trainer_state.json", TRL), ("verl.jsonl", VERL), ("prime.jsonl", PRIME_RL),
     ("nemo.jsonl", NEMO_RL), ("metrics.jsonl", OURS)],
)  # fmt: skip
def test_format_is_found_by_content(tmp_path, name, trainer):
    # A name that says nothing.
    path = tmp_path / "log"
    path.write_text(TEXTS[name])
    run = only(path)
    assert run.trainer == trainer
    for field in ("reward", "grad_norm", "entropy"):
        assert run.fields[field].tolist() == TRUTH[field]
    if trainer in (PRIME_RL, NEMO_RL):
        both = np.add(TRUTH["all_zero"], TRUTH["all_one"])
        assert run.fields["zero_variance"] == pytest.approx(both)


def test_sizes_come_from_the_log(tmp_path):
    (tmp_path / "p").write_text(TEXTS["prime.jsonl"])
    assert only(tmp_path / "p").num_generations == 8
    (tmp_path / "o").write_text(TEXTS["metrics.jsonl"])
    assert only(tmp_path / "o").rollouts == 128


def test_sizes_come_from_the_hydra_folder_of_verl(tmp_path):
    (tmp_path / ".hydra").mkdir()
    overrides = "- actor_rollout_ref.rollout.n=8\n- data.train_batch_size=32\n- trainer.x=[a]\n"
    (tmp_path / ".hydra/overrides.yaml").write_text(overrides)
    (tmp_path / "log").write_text(TEXTS["verl.jsonl"])
    run = only(tmp_path / "log")
    assert (run.num_generations, run.rollouts) == (8, 256)


def test_a_checkpoint_and_its_output_folder_are_the_same_log(tmp_path):
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        text = TEXTS["trainer_state.json"] if step == 10 else "{}"
        (tmp_path / f"checkpoint-{step}/trainer_state.json").write_text(text)
    run, other = only(tmp_path), only(tmp_path / "checkpoint-10")
    assert run.fields["reward"].tolist() == other.fields["reward"].tolist()
    assert run.name == tmp_path.name


def test_a_chart_of_wandb_has_a_run_for_each_column(tmp_path):
    (tmp_path / "chart").write_text(csv_text(("a - b", "c")))
    runs = read_scalars(tmp_path / "chart")
    assert [run.name for run in runs] == ["a - b", "c"]
    assert all(run.fields["reward"].tolist() == TRUTH["reward"] for run in runs)


def test_charts_of_one_run_are_merged(tmp_path):
    (tmp_path / "a.csv").write_text(csv_text())
    (tmp_path / "b.csv").write_text(csv_text().replace("train/reward", "train/grad_norm"))
    (run,) = read_all_scalars([tmp_path / "a.csv", tmp_path / "b.csv"])
    assert {"reward", "grad_norm"} <= set(run.fields)


def test_averages_of_an_exported_chart_are_noted(tmp_path):
    text = csv_text()
    first = f'"{TRUTH["reward"][0]}"'
    line = text.splitlines()[1]
    (tmp_path / "chart").write_text(text.replace(line, f'"1",{first},{first},"0.9"'))
    assert any("__MIN" in note for note in only(tmp_path / "chart").notes)


def test_a_resumed_run_replaces_later_steps(tmp_path):
    lines = our_lines()
    again = [line | {"reward": 0.9} for line in lines[5:7]]
    (tmp_path / "log").write_text(json_text([*lines, *again]))
    run = only(tmp_path / "log")
    assert run.fields["reward"].tolist() == [*TRUTH["reward"][:5], 0.9, 0.9]
    assert len(run.notes) == 1


def test_several_agents_are_not_mixed(tmp_path):
    lines = [line | {key.replace("solver", "judge"): 0.5 for key in line if "solver" in key}
             for line in prime_lines()]  # fmt: skip
    (tmp_path / "log").write_text(json_text(lines))
    run = only(tmp_path / "log")
    assert "reward" not in run.fields
    assert "zero_variance" not in run.fields
    assert run.fields["grad_norm"].tolist() == TRUTH["grad_norm"]


def test_a_run_of_wandb_without_history_gives_its_last_values(tmp_path):
    head = WANDB.read_bytes()[:7]
    (tmp_path / "run-x.wandb").write_bytes(head)
    (tmp_path / "files").mkdir()
    summary = {"_step": 7, "train/reward": 0.25, "train/frac_reward_zero_std": 0.5}
    (tmp_path / "files/wandb-summary.json").write_text(json.dumps(summary))
    run = only(tmp_path)
    assert run.fields["reward"].tolist() == [0.25]
    assert any("history" in note for note in run.notes)


def test_a_run_on_the_server_is_read_with_the_installed_package(monkeypatch):
    rows = [
        {"_step": step, "train/global_step": step + 1, "train/reward": value,
         "train/frac_reward_zero_std": 0.5}
        for step, value in enumerate(TRUTH["reward"])
    ]  # fmt: skip
    config = {"num_generations": 8}
    run = SimpleNamespace(name="online", config=config, scan_history=lambda: iter(rows))
    asked = []

    class Api:
        def run(self, path):
            asked.append(path)
            return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Api=Api))
    read = only("wandb://entity/project/abc")
    assert asked == ["entity/project/abc"]
    assert (read.name, read.num_generations) == ("online", 8)
    assert read.fields["reward"].tolist() == TRUTH["reward"]
    with pytest.raises(ConfigError, match="entity/project/run"):
        read_scalars("wandb://entity/project")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        read_scalars("wandb://entity/project/abc")


@pytest.mark.parametrize(
    "text, word",
    [
        ('{"step": 1, "prompt": "a", "completion": "b", "reward": 1.0}\n', "rollouts"),
        ("prompt_id,reward\na,1\n", "no column of steps"),
        ("Wall time,Step,Value\n1,2,3\n", "TensorBoard"),
        ('{"a": 1}\n', "no step"),
        ('{"step": 1, "loss": 0.5}\n', "it has"),
        ("a text\n", "not a log"),
    ],
)
def test_other_files_are_refused(tmp_path, text, word):
    (tmp_path / "file").write_text(text)
    assert not is_scalar_log(tmp_path / "file")
    with pytest.raises(ConfigError, match=word):
        read_scalars(tmp_path / "file")


def test_folders_of_several_runs_are_refused_by_name(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / EVENTS.name).write_bytes(EVENTS.read_bytes())
    with pytest.raises(ConfigError, match="2 runs"):
        read_scalars(tmp_path)
    assert only(tmp_path / "a").steps.size == 20


def test_every_name_fits_its_own_entry():
    for entry in NAMES:
        logged = entry.name.replace("{agent}", "x").replace("{name}", "x")
        assert match(logged, entry) == entry.field.replace("{name}", "x")


def tensor_event(step, tag, value):
    """An event as TensorFlow 2 writes it: the scalar is a tensor with the shape []."""
    content = struct.pack("<f", value)
    tensor = b"\x08\x01" + b"\x22" + bytes([len(content)]) + content
    parts = b"\x0a" + bytes([len(tag)]) + tag.encode() + b"\x42" + bytes([len(tensor)]) + tensor
    summary = b"\x0a" + bytes([len(parts)]) + parts
    return b"\x10" + bytes([step]) + b"\x2a" + bytes([len(summary)]) + summary


def test_scalars_that_are_tensors_are_read():
    from grpo_ustat.logs.scalar_files import _event_rows

    assert _event_rows(tensor_event(3, "train/reward", 0.25)) == [(3, {"train/reward": 0.25})]


# Mutations: each ends in an error of one line, or every value that is read is a true value.


def byte_mutations(data):
    """Forty damages of a file: cuts, changed bytes, removed and repeated parts, encodings."""
    generator = np.random.default_rng(0)
    for place in generator.integers(0, len(data), 12):
        yield data[:place]
    for place in generator.integers(0, len(data), 12):
        yield data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]
    for begin in generator.integers(0, len(data) - 40, 8):
        yield data[:begin] + data[begin + 31 :]
    yield from (b"", b"\0" * 64, data[::-1], b"\xff\xfe" + data, data[7:], b"\x1f\x8b" + data,
                b"%PDF-1.7\n" + data, b"PK\x03\x04" + data)  # fmt: skip


def text_mutations(text):
    """Forty damages of a text; none changes a digit of a value."""
    data, lines = text.encode(), text.splitlines(keepends=True)
    generator = np.random.default_rng(1)
    for place in generator.integers(0, len(data), 10):
        yield data[:place]
    for old, new in (
        ("reward", "rewrad"), ("grad_norm", "gradnorm"), ("step", "stop"), ("Step", "Stop"),
        ("0.2", "NaN"), ("0.2", '"NaN"'), ("0.2", "null"), ("0.2", '"0,2'), ("0.2", "true"),
        ("0.2", "[0.2]"), ("0.2", '"text"'), ("0.3", "-Infinity"), ("0.3", "1e999"), (":", ";"),
        (",", ";"), ("{", "["), ('"', "'"), ("data", "date"), ("log_history", "history"),
    ):  # fmt: skip
        yield text.replace(old, new).encode()
    yield "".join(lines + lines).encode()
    yield "".join(line for line in lines for _ in range(2)).encode()
    yield "".join(generator.permutation(np.array(lines, dtype=object))).encode()
    yield "".join(lines[:1]).encode()
    yield "".join(lines[1:]).encode()
    yield text.replace("\n", "\r\n").encode()
    yield text.encode("utf-16")
    yield text.encode("utf-8-sig")
    yield text.encode("cp1252") + b"\x81\x8d"
    yield text.encode("utf-16-be")
    yield b"\0" + data


def assert_error_or_truth(path, truth):
    try:
        runs = read_scalars(path)
    except ConfigError as error:
        assert "\n" not in str(error) and str(path) in str(error)
        return "error"
    for run in runs:
        for name, values in run.fields.items():
            for step, value in zip(run.steps, values, strict=True):
                if np.isfinite(value):
                    assert value == pytest.approx(truth[name][step]), (name, step)
    return "read"


def truth_of(path):
    (run,) = read_scalars(path)
    return {name: dict(zip(run.steps, values, strict=True)) for name, values in run.fields.items()}


@pytest.mark.parametrize("name", TEXTS)
def test_mutations_of_texts(tmp_path, name):
    path = tmp_path / "log"
    path.write_text(TEXTS[name])
    truth = truth_of(path)
    outcomes = []
    for mutation in text_mutations(TEXTS[name]):
        path.write_bytes(mutation)
        outcomes.append(assert_error_or_truth(path, truth))
    assert len(outcomes) == 40
    assert {"error", "read"} == set(outcomes)


@pytest.mark.parametrize("file", [EVENTS, WANDB])
def test_mutations_of_binary_logs(tmp_path, file):
    path = tmp_path / "log"
    path.write_bytes(file.read_bytes())
    truth = truth_of(path)
    outcomes = []
    for mutation in byte_mutations(file.read_bytes()):
        path.write_bytes(mutation)
        outcomes.append(assert_error_or_truth(path, truth))
    assert len(outcomes) == 40
    assert {"error", "read"} == set(outcomes)


@pytest.mark.parametrize("value", ["1.5", "-0.2", '"high"'])
def test_impossible_shares_are_refused_with_their_place(tmp_path, value):
    line = f'{{"step": 3, "reward": 0.5, "frac_reward_zero_std": {value}}}\n'
    (tmp_path / "log").write_text(line)
    with pytest.raises(ConfigError, match="step 3: frac_reward_zero_std"):
        read_scalars(tmp_path / "log")


@pytest.mark.parametrize("step", ["-1", "1.5", '"a"', "true", "1e400"])
def test_impossible_steps_are_refused(tmp_path, step):
    (tmp_path / "log").write_text(f'{{"step": {step}, "reward": 0.5}}\n')
    with pytest.raises(ConfigError, match="step"):
        read_scalars(tmp_path / "log")


@pytest.mark.slow(minutes=0.3)
def test_files_of_the_real_writers(tmp_path, monkeypatch):
    """More rows than fit into a block of W&B, and an event file with texts."""
    import wandb
    from torch.utils.tensorboard import SummaryWriter

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    values = np.random.default_rng(0).uniform(size=400).tolist()
    writer = SummaryWriter(str(tmp_path / "events"))
    writer.add_text("args", "text " * 2000)
    run = wandb.init(project="p", name="n", dir=str(tmp_path), config={"a": {"b": 1}})
    for step, value in enumerate(values):
        writer.add_scalar("train/reward", value, step)
        run.log({"train/reward": value, "train/frac_reward_zero_std": 0.5, "note": "x" * 100})
    writer.close()
    run.finish()
    for folder in (tmp_path / "events", next((tmp_path / "wandb").glob("offline-run-*"))):
        assert only(folder).fields["reward"] == pytest.approx(values, rel=1e-6)
        assert only(folder).steps.tolist() == list(range(400))
