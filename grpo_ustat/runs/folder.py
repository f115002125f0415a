"""The run folder: whose it is, whether it is complete, and how files get into it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from grpo_ustat import slurm
from grpo_ustat.checks import ConfigError
from grpo_ustat.identity import choices, fingerprint, identity, named, operational
from grpo_ustat.ranks import is_main, on_main
from grpo_ustat.runs import history, lock
from grpo_ustat.runs.journal import FOLDER as TRACKER
from grpo_ustat.runs.mirroring import Mirroring

ARTEFACTS = (
    ".hydra",
    "code.json",
    "launches.jsonl",
    "result.json",
    "metrics.jsonl",
    "eval.csv",
    "completions.parquet",
    "curves.csv",
    "curves.parquet",
    "figure.*",
    "scaling.*",
    "learning.*",
    "report.html",
    "pool",
    TRACKER,
    "checkpoint-*",
    ".checkpoint-*.tmp",
)
PACKAGES = ("grpo-ustat", "torch", "transformers", "accelerate", "hydra-core", "numpy", "scipy")


class NotSaved(OSError):
    """A run whose last files the disk refused; the message is one line that says what to do."""


class RunFolder:
    """One run's folder, `outputs/<entry>/<name>/seed=<n>/` by default; only rank 0 writes to it.

    Args:
        path: the folder; need not exist.
        config: the run's typed configuration.
    """

    def __init__(self, path: Path, config: Any):
        self.path = path
        self.config = config
        keys = identity(config)
        self.weights, self.config_hash = keys["weights"], fingerprint(keys)
        self.data = keys.get("data")
        self._open, self._lock, self._mirroring = False, None, None

    @property
    def mode(self) -> str:
        """`on_existing`; but a job that SLURM has started again goes on with what it had begun."""
        begun = any(
            row.get("slurm_job_id") == slurm.address()
            and row["slurm_restart_count"] < slurm.restart_count()
            for row in (history.launches(self.path) if slurm.restart_count() else ())
        )
        return "resume" if begun else self.config.on_existing

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
        if self._untouched():
            return
        if not (self.path / "code.json").is_file():
            raise ConfigError(
                f"{self.path} holds files of another program ({self._artefacts()[0].name} without "
                "code.json): choose another folder with hydra.run.dir=DIR"
            )
        if self.mode == "overwrite":
            return
        stored = self._read(".hydra/config.yaml", yaml.safe_load)
        if self.mode == "error":
            raise ConfigError(
                f"{self.path} exists and on_existing=error: use on_existing=resume or overwrite"
            )
        asked = asdict(self.config)
        difference = _first_difference(*(named(choices(keys)) for keys in (stored, asked)))
        difference = difference or self._other_weights()
        if difference:
            raise ConfigError(
                f"{self.path} holds a run with another configuration ({difference}): "
                "use another hydra.run.dir, or on_existing=overwrite to replace it"
            )

    def check_free(self) -> None:
        """Refuse a folder in which another process is certainly at work.

        Raises:
            Held: a ConfigError that names the process.
        """
        holder = lock.peek(self.path) if is_main() else None
        if holder and holder.certain:
            raise lock.Held(lock.in_use(self.path, str(holder)))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep all other processes out of the folder; rank 0 does, for all of them.

        Raises:
            Held: another process is at work there; on all ranks.
            ConfigError: the folder cannot be locked.
        """
        on_main(self._take)
        try:
            yield
        except BaseException as error:
            self._leave_held(history.ending(error))
            raise
        self._leave_held(history.ending(None))

    def check_held(self) -> None:
        """Before anything is written: what `held` gave is still ours.

        Raises:
            Held: another process took the folder over.
        """
        if self._lock:
            self._lock.check()

    def open(self) -> None:
        """Create the folder and write what identifies the run; with overwrite, empty it first."""
        if not is_main():
            return
        self.check_held()
        self.check()
        if self.mode == "overwrite":
            self._empty()
        self.path.mkdir(parents=True, exist_ok=True)
        used = {"weights": self.weights, "data": self.data}
        self.write("code.json", json.dumps(code_state() | used, indent=1))
        (self.path / ".hydra").mkdir(exist_ok=True)
        self.write(".hydra/config.yaml", yaml.safe_dump(asdict(self.config), sort_keys=False))
        self.note(**history.started())
        self._open = True
        if self.config.logger.name != "none":
            self._mirroring = Mirroring(self.path, self.config.logger)

    def note(self, **row: Any) -> None:
        """Add a row to the folder's history; on rank 0."""
        if is_main():
            history.append(self.path, row)

    def leave(self) -> None:
        """Remove the folder if nothing is in it, as when a run was refused before it began."""
        with suppress(OSError):
            for folder in (self.path, self.path.parent):
                folder.rmdir()

    def result(self) -> dict[str, Any] | None:
        """The finished run's result, None while it is unfinished or to be overwritten.

        Raises:
            ConfigError: see `check`.
        """
        self.check()
        return None if self.mode == "overwrite" else self.kept()

    def kept(self) -> dict[str, Any] | None:
        """What the folder's run found, None where it has not finished.

        Raises:
            ConfigError: the file is damaged, or another configuration's.
        """
        if not (self.path / "result.json").is_file():
            return None
        result = self._read("result.json", json.loads)
        if result.get("config_hash") != self.config_hash:
            raise ConfigError(
                f"{self.path}/result.json is of configuration {result.get('config_hash')}, this is "
                f"{self.config_hash}: use another hydra.run.dir, or on_existing=overwrite"
            )
        return result

    def write(self, name: str, text: str) -> Path:
        """Write a file so that it is either absent, as before, or whole."""
        target = self.path / name
        if not is_main():
            return target
        self.check_held()
        write_whole(target, text)
        return target

    def finish(self, result: dict[str, Any]) -> None:
        """Write `result.json`, last of all: the run is complete."""
        text = json.dumps(result | {"config_hash": self.config_hash}, indent=1, allow_nan=False)
        self.write("result.json", text)

    def _leave_held(self, end: dict[str, Any]) -> None:
        """Say in the history how work ended here, where it had begun, and let others in."""
        own, self._lock = self._lock, None
        if own and self._open and own.is_own():
            self.note(**end)
        self._open = False
        if self._mirroring:
            self._mirroring.finish(end["outcome"], self.config.launch.grace_seconds)
        if own:
            own.release()

    def _take(self) -> None:
        taken = lock.Lock(self.path)
        try:
            taken.take()
        except OSError as error:
            raise ConfigError(
                f"the output folder {self.path} cannot be locked ({error}): choose another with "
                "hydra.run.dir=DIR"
            ) from error
        self._lock = taken

    def _other_weights(self) -> str | None:
        there = self._read("code.json", json.loads).get("weights")
        if there == self.weights:
            return None
        return f"the model's weights: {there} there, {self.weights} now"

    def _untouched(self) -> bool:
        """Whether no run has begun here; one killed before it had written both files has not."""
        names = {path.name for path in self._artefacts()}
        configured = (self.path / ".hydra" / "config.yaml").is_file()
        ours = names & {"code.json", history.NAME}
        began = ours and names <= {"code.json", history.NAME, ".hydra"}
        return not names or (began and not configured)

    def _empty(self) -> None:
        """Remove earlier runs; what shows that the folder is ours goes last."""
        for old in sorted(self._artefacts(), key=lambda path: path.name == "code.json"):
            shutil.rmtree(old) if old.is_dir() else old.unlink()

    def _artefacts(self) -> list[Path]:
        """What earlier runs left here; the only things that overwriting removes."""
        return sorted(found for name in ARTEFACTS for found in self.path.glob(name))

    def _read(self, name: str, parse: Callable[[str], Any]) -> dict[str, Any]:
        """A dictionary from one of our own files.

        Raises:
            ConfigError: it is missing or damaged.
        """
        try:
            content = parse((self.path / name).read_text())
        except (OSError, ValueError, yaml.YAMLError):
            content = None
        if not isinstance(content, dict):
            raise ConfigError(
                f"{self.path / name} is missing or damaged: on_existing=overwrite runs it again"
            )
        return content


def write_whole(file: Path, text: str) -> None:
    """Write a file so that it is either absent, as before, or whole."""
    staged = file.with_name(f".{file.name}.tmp")
    staged.write_text(text)
    os.replace(staged, file)


def _first_difference(
    stored: dict[str, Any], asked: dict[str, Any], prefix: str = ""
) -> str | None:
    """The first identity key whose values differ, as `key: stored there, asked here`."""
    for key in dict.fromkeys([*stored, *asked]):
        if not prefix and key in operational(asked):
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
