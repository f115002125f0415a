"""Damaged checkpoints: each is named, an older one is used, and never a fresh start in silence."""

from __future__ import annotations

import shutil

import pytest
from resuming import differences, fit, rewind

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.train import model_card
from grpo_ustat.train.checkpoint import BASELINE_FILE, OPTIMIZER_FILE, STATE_FILE
from grpo_ustat.train.snapshots import MANIFEST, newest_whole


def truncate(file):
    file.write_bytes(file.read_bytes()[:-1])


def halve(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def flip_last(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def empty(file):
    file.write_bytes(b"")


def delete(file):
    file.unlink()


DAMAGES = {f.__name__: f for f in (truncate, halve, flip, flip_last, empty, delete)}
FILES = (
    "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    "tokenizer_config.json", OPTIMIZER_FILE, BASELINE_FILE, STATE_FILE, MANIFEST,
)  # and in the last one a card with what it shows  # fmt: skip


@pytest.fixture
def stopped(through, tmp_path):
    """The same run without its last step: checkpoint-3 is the newest."""
    shutil.copytree(through, tmp_path / "run")
    return rewind(tmp_path / "run", 4)


def contents(path):
    own = ("code.json", "config.yaml", "launches.jsonl")  # of every start
    return {f: f.read_bytes() for f in path.rglob("*") if f.is_file() and f.name not in own}


def unwrapped(capsys):
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_these_are_all_files_of_a_checkpoint(through):
    assert {path.name for path in (through / "checkpoint-3").iterdir()} == set(FILES)
    last = {path.name for path in (through / "checkpoint-4").iterdir()}
    assert last == {*FILES, model_card.NAME, model_card.CONFIG}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(stopped, capsys, name, damage):
    assert newest_whole(stopped).name == "checkpoint-3"
    DAMAGES[damage](stopped / "checkpoint-3" / name)
    assert newest_whole(stopped).name == "checkpoint-2"
    said = unwrapped(capsys)
    assert f"warning: checkpoint-3 is not used: {name} " in said
    assert said.count("warning") == 1


@pytest.mark.parametrize("name", FILES)
def test_where_all_are_damaged_nothing_starts_anew(stopped, capsys, name):
    for path in stopped.glob("checkpoint-*"):
        flip(path / name)
    before = contents(stopped)
    with pytest.raises(ConfigError, match="no checkpoint in .* can be used .checkpoint-3, "):
        newest_whole(stopped)
    assert unwrapped(capsys).count(f"{name} does not match") == 3
    assert contents(stopped) == before


def two_damages_of_each_file():
    """Damages in turn, and at night the one three further, which hits three of the nine files."""
    names = list(DAMAGES)
    assert len(names) == 6
    for i, file in enumerate(FILES):
        yield pytest.param(file, names[i % 6], marks=pytest.mark.slow(minutes=0.03))
        yield pytest.param(file, names[(i + 3) % 6], marks=pytest.mark.nightly(minutes=0.03))


@pytest.mark.parametrize("name, damage", list(two_damages_of_each_file()))
def test_whatever_is_damaged_the_run_ends_as_if_nothing_had_happened(
    stopped, through, capsys, name, damage
):
    """That each of the 54 pairs sends a run to the checkpoint before is tested above."""
    DAMAGES[damage](stopped / "checkpoint-3" / name)
    assert differences(fit(stopped), through) == []
    assert f"checkpoint-3 is not used: {name} " in unwrapped(capsys)


def test_a_refusal_leaves_the_folder_as_it_is(stopped):
    for path in stopped.glob("checkpoint-*"):
        flip(path / STATE_FILE)
    before = contents(stopped)
    with pytest.raises(ConfigError, match="on_existing=overwrite"):
        fit(stopped)
    assert contents(stopped) == before


@pytest.mark.slow
def test_a_damaged_checkpoint_never_displaces_a_whole_one(through, tmp_path):
    """With one checkpoint to keep, a damaged later one takes no place."""
    shutil.copytree(through, tmp_path / "run")
    stopped = rewind(tmp_path / "run")
    flip(stopped / "checkpoint-4" / STATE_FILE)
    fit(stopped, "save_total_limit=1")
    assert [p.name for p in stopped.glob("checkpoint-*")] == ["checkpoint-4"]
    assert newest_whole(stopped).name == "checkpoint-4"
