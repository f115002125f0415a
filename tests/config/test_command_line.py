"""Commands that messages name can be copied into a shell."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_ustat.config import command_line as module
from grpo_ustat.config.command_line import (
    PROGRAM,
    command_line,
    install_line,
    note_typed,
    typed_command,
)

WORDS = ["model=tiny", "group_sizes=[4, 8]", "pool=a b/c=1", "name=it's", "x=$HOME", 'y="1"', "*"]


@pytest.mark.parametrize("typed, start", [(None, "grpo-ustat"), ("", "grpo-ustat"),
                                          ("./scripts/run", "./scripts/run")])  # fmt: skip
def test_a_shell_reads_the_words_that_were_given(monkeypatch, typed, start):
    if typed is None:
        monkeypatch.delenv(PROGRAM, raising=False)
    else:
        monkeypatch.setenv(PROGRAM, typed)
    assert shlex.split(command_line("mse", *WORDS)) == [start, "mse", *WORDS]
    assert command_line("train") == f"{start} train"
    assert command_line("train", "group_size=8") == f"{start} train group_size=8"


def test_an_extra_is_installed_as_this_package_was(monkeypatch):
    monkeypatch.setattr(module, "IN_CHECKOUT", True)
    assert install_line("wandb") == "pip install -e '.[cli,wandb]'"
    assert install_line("cli") == "pip install -e '.[cli]'"
    monkeypatch.setattr(module, "IN_CHECKOUT", False)
    for record, source in (
        (None, "grpo-ustat"),
        ({"url": "file:///a%20b/grpo", "dir_info": {}}, "/a b/grpo"),
        ({"url": "file:///wheels/g.whl", "archive_info": {}}, "grpo-ustat"),
    ):
        stored = SimpleNamespace(read_text=lambda _, record=record: record and json.dumps(record))
        monkeypatch.setattr(importlib.metadata, "distribution", lambda _, stored=stored: stored)
        assert install_line("wandb") == f"pip install '{source}[cli,wandb]'"


def test_every_extra_that_a_line_names_is_one():
    root = Path(module.__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    named = {
        name
        for file in (root / "grpo_ustat").rglob("*.py")
        for name in re.findall(r"install_line\(['\"](\w+)['\"]\)", file.read_text())
    }
    assert named and named <= set(extras["optional-dependencies"])


def test_the_command_that_was_typed_is_kept_without_secrets():
    """The fixture of tests/conftest.py puts the environment back."""
    note_typed("train", ["group_size=8", "baseline_options.mine.api_key=abc"])
    assert typed_command().endswith("train group_size=8 baseline_options.mine.api_key=***")
