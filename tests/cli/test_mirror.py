"""`grpo-ustat mirror` sends what a tracker was not given, once, and ends."""

from __future__ import annotations

import json
import sys

import pytest
from tracked import Folder

from grpo_ustat.cli import mirror as command
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.distributed.lock import Lock
from grpo_ustat.runs import trackers


class Kept:
    """A tracker that keeps the keys of what it is given."""

    given, fails = [], False

    def __init__(self, about):
        Kept.about = about

    def send(self, index, events):
        if Kept.fails:
            raise ConnectionError("gone")
        Kept.given += [event.key for event in events]

    def close(self, outcome):
        Kept.given.append(outcome)
        return "here"


@pytest.fixture
def kept(monkeypatch):
    monkeypatch.setitem(trackers.OPENERS, "tensorboard", Kept)
    monkeypatch.setattr(Kept, "given", [])
    return Kept


def mirror(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["mirror", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        command.main()
    return ended.value.code


def test_a_finished_folder_is_sent_once(tmp_path, kept, monkeypatch, capsys):
    folder = Folder(tmp_path / "run")
    folder.rows(1, 2)
    folder.finish(steps=2)
    assert mirror(monkeypatch, folder.path, "logger=tensorboard") == 0
    assert kept.given == ["row", "row", "figure figure", "result", "done"]
    said = f"logger=tensorboard: here\n{folder.path}: 4 items were sent\n"
    assert capsys.readouterr().out == said
    assert mirror(monkeypatch, folder.path, "logger=tensorboard") == 0
    assert kept.given[5:] == ["done"] and "0 items" in capsys.readouterr().out


def test_a_folder_that_grows_is_sent_as_far_as_it_is(tmp_path, kept, monkeypatch):
    folder = Folder(tmp_path / "run", logger={"name": "wandb"})
    lock = Lock(folder.path)
    lock.take()
    folder.rows(1, 2)
    assert mirror(monkeypatch, folder.path, "logger=tensorboard") == 0
    folder.rows(3)
    assert mirror(monkeypatch, folder.path, "logger=tensorboard") == 0
    lock.release()
    assert kept.given == ["row", "row", "interrupted", "row", "interrupted"]


def test_a_run_at_work_that_sends_itself_is_left_to_it(tmp_path, kept, monkeypatch, capsys):
    folder = Folder(tmp_path / "run", logger={"name": "tensorboard"})
    lock = Lock(folder.path)
    lock.take()
    assert mirror(monkeypatch, folder.path, "logger=tensorboard") == 1
    lock.release()
    assert "the run at work there sends to tensorboard itself: wait for it" in (
        capsys.readouterr().err
    )
    assert kept.given == []


def test_a_tracker_that_fails_is_one_line_and_the_other_folders_are_sent(
    tmp_path, kept, monkeypatch, capsys
):
    first, second = Folder(tmp_path / "first"), Folder(tmp_path / "second")
    first.rows(1)
    monkeypatch.setattr(kept, "fails", True)
    words = (first.path, second.path, "logger=tensorboard")
    assert mirror(monkeypatch, *words) == 1
    assert capsys.readouterr().err == f"error: {first.path}: ConnectionError: gone\n"
    monkeypatch.setattr(kept, "fails", False)
    assert mirror(monkeypatch, *words) == 0
    assert kept.given == ["interrupted", "row", "interrupted", "interrupted"]


def test_a_damaged_folder_is_one_line(tmp_path, kept, monkeypatch, capsys):
    folder = Folder(tmp_path / "run")
    (folder.path / "code.json").write_text(json.dumps([]))
    assert mirror(monkeypatch, folder.path, "logger=tensorboard") == 1
    line = f"error: {folder.path}: code.json is damaged: it is a list, not a mapping\n"
    assert capsys.readouterr().err == line


def test_the_command_reads_a_trackers_configuration():
    found = command.parse_logger(["logger=tensorboard", "logger.finish_seconds=3"])
    assert (found.name, found.finish_seconds) == ("tensorboard", 3.0)
    with pytest.raises(ConfigError, match="name one tracker: logger=wandb"):
        command.parse_logger(["logger=none"])
    with pytest.raises(ConfigError, match="logger 'tensorbord': did you mean tensorboard"):
        command.parse_logger(["logger=tensorbord"])


def test_what_is_no_run_folder_is_refused(tmp_path, monkeypatch, capsys):
    assert mirror(monkeypatch, tmp_path, "logger=tensorboard") == 2
    assert "is no run folder: it has no .hydra/config.yaml" in capsys.readouterr().err
    folder = Folder(tmp_path / "run").path
    (folder / "checkpoint-20").mkdir()
    assert mirror(monkeypatch, folder / "checkpoint-20", "logger=tensorboard") == 2
    assert f"name the run that it is in, {folder}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "run folder and logger=NAME are missing, as in grpo-ustat mirror outputs/train/NAME"),
        (["logger=tensorboard"], "name a run folder, such as outputs/train/NAME/seed-0"),
        (
            ["run", "loger=tensorboard"],
            "unknown loger=tensorboard: did you mean logger? choose from logger, ",
        ),
        (
            ["run", "logger=tensorboard", "--all"],
            "unknown --all: choose from logger, logger.name, ",
        ),
        (["run", "logger=tensorboard", "logger.projct=a"], "did you mean logger.project?"),
    ],
)
def test_wrong_command_lines_are_refused_in_a_line(words, message, monkeypatch, capsys):
    assert mirror(monkeypatch, *words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and err.startswith("error: ") and message in err
