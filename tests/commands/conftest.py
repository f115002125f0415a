"""A command typed in this process: nothing is imported again."""

from __future__ import annotations

import sys
from subprocess import CompletedProcess

import pytest

from grpo_ustat.cli import app
from grpo_ustat.launch.command import load_command


@pytest.fixture
def typed(tmp_path, monkeypatch, capsys):
    """Type a command in `tmp_path`: its exit code and what it printed, as a finished process."""
    monkeypatch.chdir(tmp_path)

    def command(entry, *words):
        monkeypatch.setattr(sys, "argv", [entry, *words])
        code = 0
        try:
            app.main(load_command(entry))
        except SystemExit as end:
            code = end.code
        return CompletedProcess(words, code, *capsys.readouterr())

    return command
