"""The run folder: whose it is, whether it is complete, and how files get into it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from grpo_ustat.config import OPERATIONAL, ConfigError, fingerprint, identity

PACKAGES = ("grpo-ustat", "torch", "transformers", "accelerate", "hydra-core", "numpy", "scipy")


class RunFolder:
    """One run's folder, `outputs/<entry>/<name>/seed=<n>/` by default.

    Args:
        path: the folder; need not exist.
        config: the run's typed configuration.
    """

    def __init__(self, path: Path, config: Any):
        self.path = path
        self.config = config
        keys = identity(config)
        self.weights, self.config_hash = keys["weights"], fingerprint(keys)

    def check(self) -> None:
        """Refuse a folder that cannot be written or that belongs to another configuration.

        Raises:
            ConfigError: naming the folder, the first difference and the fix.
        """
        anchor = next(
            p for p in (self.path.absolute(), *self.path.absolute().parents) if p.exists()
        )
        if not anchor.is_dir() or not os.access(anchor, os.W_OK):
            raise ConfigError(
                f"the output folder {self.path} cannot be written ({anchor} is not a writable "
                "folder): choose another with hydra.run.dir=DIR"
            )
        stored = self._stored_config()
        if stored is None:
            return
        if not (self.path / "code.json").is_file() or "launch" not in stored:
            raise ConfigError(
                f"{self.path} holds a .hydra/config.yaml of another program: "
                "choose another folder with hydra.run.dir=DIR"
            )
        if self.config.on_existing == "overwrite":
            return
        if self.config.on_existing == "error":
            raise ConfigError(
                f"{self.path} exists and on_existing=error: use on_existing=resume or overwrite"
            )
        difference = _first_difference(stored, asdict(self.config)) or self._other_weights()
        if difference:
            raise ConfigError(
                f"{self.path} holds a run with another configuration ({difference}): "
                "use another hydra.run.dir, or on_existing=overwrite to replace it"
            )

    def open(self) -> None:
        """Create the folder and write what identifies the run; with overwrite, empty it first."""
        self.check()
        if self.config.on_existing == "overwrite" and self._stored_config() is not None:
            shutil.rmtree(self.path)
        (self.path / ".hydra").mkdir(parents=True, exist_ok=True)
        self.write("code.json", json.dumps(code_state() | {"weights": self.weights}, indent=1))
        self.write(".hydra/config.yaml", yaml.safe_dump(asdict(self.config), sort_keys=False))

    def result(self) -> dict[str, Any] | None:
        """The finished run's result, None while it is unfinished or to be overwritten.

        Raises:
            ConfigError: see `check`.
        """
        self.check()
        file = self.path / "result.json"
        if self.config.on_existing == "overwrite" or not file.is_file():
            return None
        return json.loads(file.read_text())

    def write(self, name: str, text: str) -> Path:
        """Write a file so that it is either absent, as before, or whole."""
        target = self.path / name
        staged = target.with_name(f".{target.name}.tmp")
        staged.write_text(text)
        os.replace(staged, target)
        return target

    def finish(self, result: dict[str, Any]) -> None:
        """Write `result.json`, last of all: the run is complete."""
        text = json.dumps(result | {"config_hash": self.config_hash}, indent=1, allow_nan=False)
        self.write("result.json", text)

    def _other_weights(self) -> str | None:
        there = json.loads((self.path / "code.json").read_text()).get("weights")
        if there == self.weights:
            return None
        return f"the model's weights: {there} there, {self.weights} now"

    def _stored_config(self) -> dict[str, Any] | None:
        file = self.path / ".hydra" / "config.yaml"
        return yaml.safe_load(file.read_text()) if file.is_file() else None


def _first_difference(
    stored: dict[str, Any], asked: dict[str, Any], prefix: str = ""
) -> str | None:
    """The first identity key whose values differ, as `key: stored there, asked here`."""
    for key in dict.fromkeys([*stored, *asked]):
        if not prefix and key in OPERATIONAL:
            continue
        there, here = stored.get(key), asked.get(key)
        if isinstance(there, dict) and isinstance(here, dict):
            found = _first_difference(there, here, f"{prefix}{key}.")
            if found:
                return found
        elif there != here:
            return f"{prefix}{key}: {there} there, {here} asked"
    return None


def versions() -> dict[str, str]:
    """Versions of this package and of what its numbers depend on."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def code_state() -> dict[str, Any]:
    """Commit and uncommitted changes of the source tree, and versions; None where not in git."""
    source = Path(__file__).resolve().parent
    tracked = _git(source, "ls-files", "--error-unmatch", Path(__file__).name)
    commit = _git(source, "rev-parse", "HEAD") if tracked else None
    return {
        "commit": commit.strip() if commit else None,
        "diff": _git(source, "diff", "HEAD") if commit else None,
        "versions": versions(),
    }


def _git(source: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=source, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
