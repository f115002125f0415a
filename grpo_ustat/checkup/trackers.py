"""Which trackers are installed, and whether the one that needs a server reaches it."""

from __future__ import annotations

import netrc
import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import urlsplit

from grpo_ustat.checkup.findings import Finding, ok, warning
from grpo_ustat.checkup.reaching import reach

TRACKERS = ("wandb", "tensorboard", "trackio")
SERVER = "https://api.wandb.ai"


def trackers(_: Path) -> Finding:
    """None of them is needed: a run's own files are the truth."""
    there = {name: found for name in TRACKERS if (found := _version(name))}
    said = ", ".join(f"{name} {found}" for name, found in there.items()) or "none installed"
    if "wandb" not in there:
        return ok(f"{said}; metrics.jsonl has everything")
    mode, server = os.environ.get("WANDB_MODE", "online"), os.environ.get("WANDB_BASE_URL", SERVER)
    if mode != "online":
        return ok(f"{said}; WANDB_MODE={mode}")
    why = reach(server)
    if why is not None:
        return warning(f"{said}; {why}", "export WANDB_MODE=offline, later `wandb sync`")
    if not _has_key(server):
        return warning(
            f"{said}; {urlsplit(server).hostname} answers, but there is no key",
            "wandb login, or export WANDB_MODE=offline",
        )
    return ok(f"{said}; {urlsplit(server).hostname} answers, there is a key")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _has_key(server: str) -> bool:
    """Whether there is one, which is not looked at."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc().authenticators(urlsplit(server).hostname or "") is not None
    return False
