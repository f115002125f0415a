"""What a check finds, in words that can be shown to anybody."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Status = Literal["ok", "warning", "failed"]
SECRET = re.compile(  # tokens of hubs and trackers, keys in URLs and in assignments
    r"\b(?:hf|sk|ghp|api_org|wandb_v1)[_-][\w-]{8,}|\b[0-9a-f]{40,}\b|(?<=://)[^/@\s]+(?=@)"
    r"|(?i:(?<=key=)|(?<=token=)|(?<=password=)|(?<=secret=))[^\s,;&]+"
)


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        status: `warning` where runs work but something is likely not meant so.
        said: what was looked at and what it is like, one line.
        fix: what to do; empty only where it is ok.
    """

    status: Status
    said: str
    fix: str = ""


def ok(said: str) -> Finding:
    """All is well."""
    return Finding("ok", said)


def warning(said: str, fix: str) -> Finding:
    """Runs work, but something is likely not meant so."""
    return Finding("warning", said, fix)


def failed(said: str, fix: str) -> Finding:
    """Runs will not work, or not rightly."""
    return Finding("failed", said, fix)


def shareable(text: str) -> str:
    """One line without secrets, and with `~` for the home folder.

    >>> shareable("key=abcdef at https://me:pass@host and hf_abcdefghij")
    'key=*** at https://***@host and ***'
    """
    line = SECRET.sub("***", " ".join(text.split()))
    home = os.path.expanduser("~")
    return re.sub(rf"(?<![\w/]){re.escape(home)}(?=/|\b)", "~", line) if len(home) > 1 else line


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
