"""Damaged checkpoints: each is named, an older one is used, and never a fresh start in silence."""

from __future__ import annotations

import re
import shutil

import pytest
from resuming import differences, fit, rewind

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.train import model_card
from grpo_ustat.train.checkpoint import BASELINE_FILE, OPTIMIZER_FILE, STATE_FILE

# Files that a run reads when it goes on, and those that only others read.
READ = ("config.json", "model.safetensors", OPTIMIZER_FILE, BASELINE_FILE, STATE_FILE)
OTHERS = {"generation_config.json", "tokenizer.json", "tokenizer_config.json"}


def halve(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file):
    file.write_bytes(b"")


def delete(file):
    file.unlink()


DAMAGES = (halve, empty, delete)


@pytest.fixture
def stopped(through, tmp_path):
    """The same run without its last step: checkpoint-3 is the newest."""
    shutil.copytree(through, tmp_path / "run")
    return rewind(tmp_path / "run", 4)


def contents(path):
    of_every_start = ("code.json", "config.yaml", "launches.jsonl")
    files = [f for f in path.rglob("*") if f.is_file() and f.name not in of_every_start]
    return {file: file.read_bytes() for file in files}


def unwrapped(capsys):
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_these_are_all_files_of_a_checkpoint(through):
    assert {path.name for path in (through / "checkpoint-3").iterdir()} == {*READ, *OTHERS}
    last = {path.name for path in (through / "checkpoint-4").iterdir()}
    assert last == {*READ, *OTHERS, model_card.NAME, model_card.CONFIG}


@pytest.mark.slow(minutes=0.03)
@pytest.mark.parametrize("i", range(len(READ)))
def test_whatever_is_damaged_the_run_ends_as_if_nothing_had_happened(stopped, through, capsys, i):
    DAMAGES[i % 3](stopped / "checkpoint-3" / READ[i])
    assert differences(fit(stopped), through) == []
    said = unwrapped(capsys)
    assert said.count("warning: checkpoint-3 is not used") == said.count("warning") == 1


@pytest.mark.slow
def test_where_all_are_damaged_nothing_starts_anew(stopped, capsys):
    for path, name, damage in zip(stopped.glob("checkpoint-*"), READ[2:], DAMAGES, strict=True):
        damage(path / name)
    before = contents(stopped)
    with pytest.raises(ConfigError, match="checkpoint-3.*on_existing=overwrite") as refusal:
        fit(stopped)
    assert len(re.findall("checkpoint-[123]", str(refusal.value))) == 3
    assert unwrapped(capsys).count("is not used") == 3
    assert contents(stopped) == before


@pytest.mark.slow
def test_a_damaged_checkpoint_never_displaces_a_whole_one(through, tmp_path):
    """With one checkpoint to keep, a damaged later one takes no place."""
    shutil.copytree(through, tmp_path / "run")
    stopped = rewind(tmp_path / "run")
    halve(stopped / "checkpoint-4/model.safetensors")
    names = differences(fit(stopped, "save_total_limit=1"), through)
    assert [path.name for path in stopped.glob("checkpoint-*")] == ["checkpoint-4"]
    others = {name.partition("/")[0] for name in names}
    assert others == {".hydra", "checkpoint-1", "checkpoint-2", "checkpoint-3"}
