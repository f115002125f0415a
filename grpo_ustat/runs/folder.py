"""Run folder: configuration, lock, state and writing of files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from grpo_ustat.config.identity import (
    drop_neutral_keys,
    drop_unused_baselines,
    fingerprint,
    identity,
    operational_keys,
)
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.config.secrets import redact_code
from grpo_ustat.distributed import lock, slurm
from grpo_ustat.distributed.ranks import is_main, main_only
from grpo_ustat.runs import history
from grpo_ustat.runs.contents import DAMAGE, command_of, content_of, read_mapping
from grpo_ustat.runs.files import PROMPT_DATE, TRACKER_FOLDER, kept_moment, write_whole
from grpo_ustat.runs.result import RESULT_TYPES, RunResult
from grpo_ustat.terminal.streams import single_line, tell

ARTEFACTS = (
    ".hydra",
    "code.json",
    "launches.jsonl",
    PROMPT_DATE,
    "result.json",
    "metrics.jsonl",
    "eval.csv",
    "completions.parquet",
    "curves.csv",
    "figure.*",
    "scaling.*",
    "learning.*",
    "losses.*",
    "off_policy.*",
    "recipes.*",
    "report.html",
    "pool",
    "pool_scored_by",
    "pool_weighted",
    TRACKER_FOLDER,
    "checkpoint-*",
    ".checkpoint-*.tmp",
)
RESULT = "result.json"
PACKAGES = ("grpo-ustat", "torch", "transformers", "accelerate", "hydra-core", "numpy", "scipy")


class RunFolder:
    """Folder of a run, by default `outputs/<entry>/<name>/seed-<n>/`; only rank 0 writes to it.

    Args:
        path: path of the folder, which does not have to exist.
    """

    def __init__(self, path: Path, config: Any):
        self.path = path
        self.config = config
        keys = identity(config)
        self.weights, self.config_hash = keys["weights"], fingerprint(keys)
        self.data = keys.get("pool") or keys.get("data")
        # Function that opens a tracker, or None for no tracker. Its arguments are the folder's
        # path, the tracker's name, the project, and the configuration and code state to show.
        self.start_tracking: Callable[[Path, str, str | None, dict[str, Any]], Any] | None = None
        self._open = False
        self._earlier: list[dict[str, str]] = []
        self._lock: lock.Lock | None = None
        self._tracking: Any = None
        self._prompt_date: datetime | None = None

    @property
    def mode(self) -> str:
        """Value of `on_existing`; always `resume` in a job that SLURM has restarted."""
        begun = slurm.was_restarted() and any(
            row.get("slurm_job_id") == slurm.job_id() for row in history.launches(self.path)
        )
        return "resume" if begun else self.config.on_existing

    def check(self) -> None:
        """Refuse a folder that is not writable or contains the run of another configuration."""
        anchor = next(
            p for p in (self.path.absolute(), *self.path.absolute().parents) if p.exists()
        )
        if not anchor.is_dir() or not os.access(anchor, os.W_OK):
            raise ConfigError(
                f"the output folder {self.path} cannot be written ({anchor} is not a writable "
                "folder): choose another with output_root=DIR, or hydra.run.dir=DIR"
            )
        names, ours = {path.name for path in self._artefacts()}, {"code.json", history.NAME}
        configured = (self.path / ".hydra" / "config.yaml").is_file()
        began = bool(names & ours) and names <= ours | {".hydra"}
        if not names or (began and not configured):
            # No run has begun here, or a run was killed before it wrote both of its first files.
            return
        if not any((self.path / name).is_file() for name in ours):
            raise ConfigError(
                f"{self.path} contains files of another program ({self._artefacts()[0].name} "
                "without code.json): choose another folder with hydra.run.dir=DIR"
            )
        if self.mode == "overwrite":
            return
        stored = self._read(".hydra/config.yaml")
        if self.mode == "error":
            raise ConfigError(
                f"{self.path} exists and on_existing=error: use on_existing=resume or overwrite"
            )
        current = asdict(self.config)
        difference = _first_difference(
            drop_unused_baselines(drop_neutral_keys(stored)),
            drop_unused_baselines(drop_neutral_keys(current)),
        )
        if difference is None:
            weights = self._read("code.json").get("weights")
            if weights != self.weights:
                difference = f"the model's weights: {weights} in the folder, {self.weights} now"
        if difference:
            raise ConfigError(
                f"{self.path} contains a run with another configuration ({difference}): "
                "use another hydra.run.dir, or on_existing=overwrite to replace it"
            )

    def check_free(self) -> None:
        """Refuse a folder in which another process is running; the message names it."""
        owner = lock.owner(self.path) if is_main() else None
        if owner:
            raise ConfigError(lock.in_use(self.path, owner))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder against all other processes; rank 0 takes the lock for all ranks.

        Raises:
            ConfigError: another process is running in the folder; all ranks raise this error.
        """
        main_only(self._take_lock)
        try:
            yield
        except BaseException as error:
            self._release(history.end_row(error))
            raise
        self._release(history.end_row(None))

    def open(self) -> None:
        """Create the folder, or empty it if overwriting, and write the files that identify the run.

        This method also prints the plan of the run, because the work of the run begins now.
        """
        if not is_main():
            return
        self.check()
        tell(self.config.plan, file=sys.stderr)
        if self.mode == "overwrite":
            # Delete the result first, so that a half-emptied folder does not count as a finished
            # run. Delete `code.json` last, because it identifies the folder as ours.
            last = {RESULT: -1, "code.json": 1}
            for old in sorted(self._artefacts(), key=lambda path: last.get(path.name, 0)):
                # Remove only the link, not its target.
                is_folder = old.is_dir() and not old.is_symlink()
                shutil.rmtree(old) if is_folder else old.unlink()
        self.path.mkdir(parents=True, exist_ok=True)
        code = code_state()
        self._earlier = self._earlier_versions(code["versions"])
        code |= {"weights": self.weights, "data": self.data, "earlier_versions": self._earlier}
        self.write("code.json", json.dumps(code, indent=1))
        (self.path / ".hydra").mkdir(exist_ok=True)
        self.write(".hydra/config.yaml", yaml.safe_dump(asdict(self.config), sort_keys=False))
        if self._prompt_date is not None:
            kept_moment(self.path / PROMPT_DATE, self._prompt_date)
        self.note(**history.start_row())
        self._open = True
        if self.start_tracking and self.config.logger != "none":
            about = {name: code[name] for name in ("commit", "weights", "versions")}
            shown = {**asdict(self.config), "code": about}
            config = self.config
            self._tracking = self.start_tracking(self.path, config.logger, config.project, shown)

    def prompt_date(self) -> datetime:
        """Return the time from which chat templates take the date in this run's prompts.

        It is the time of the run's first start. `open` stores the time, so that the prompts stay
        the same if the run is resumed on another day.
        """
        file = self.path / PROMPT_DATE
        if file.is_file() and self.mode != "overwrite":
            return kept_moment(file)
        self._prompt_date = datetime.now()
        return self._prompt_date

    def track(self, row: dict[str, Any], completions: Sequence[dict[str, Any]] = ()) -> None:
        """Send a row of numbers and its step's completions to the tracker if there is one."""
        if self._tracking:
            self._tracking.put(row, completions)

    def note(self, **row: Any) -> None:
        """Append a row to the folder's history on rank 0; do nothing on other ranks."""
        if is_main():
            history.append(self.path, row)

    def leave(self) -> None:
        """Remove the folder if it is empty, for example if the run was refused before it began."""
        remove_empty(self.path)

    def result(self) -> dict[str, Any] | None:
        """Return the result; None if the run is unfinished or will be overwritten."""
        self.check()
        return None if self.mode == "overwrite" else self.read_result()

    def read_result(self) -> dict[str, Any] | None:
        """Return the content of `result.json`; None while the run is unfinished."""
        if not (self.path / "result.json").is_file():
            return None
        result = self._read(
            RESULT,
            RESULT_TYPES[command_of(asdict(self.config))],
            "delete it, and run the same command to write it again",
        )
        if result.get("config_hash") != self.config_hash:
            raise ConfigError(
                f"{self.path}/result.json belongs to configuration {result.get('config_hash')}, "
                f"not to {self.config_hash}: use another hydra.run.dir, or on_existing=overwrite"
            )
        return result

    def write(self, name: str, text: str) -> Path:
        """Write a file atomically on rank 0; after an error, the file is absent or unchanged."""
        target = self.path / name
        if not is_main():
            return target
        write_whole(target, text)
        return target

    def finish(self, result: RunResult) -> None:
        """Write `result.json` as the last file; it marks the run as complete."""
        content = content_of(result) | {"config_hash": self.config_hash}
        if self._earlier:
            content["earlier_versions"] = self._earlier
        text = json.dumps(content, indent=1, allow_nan=False)
        self.write("result.json", text)

    def _earlier_versions(self, now: dict[str, str]) -> list[dict[str, str]]:
        """Return package versions that the run used earlier and that differ from the current ones.

        Print a warning if the last launch used other versions.
        """
        if not (self.path / "code.json").is_file():
            return []
        stored = self._read("code.json")
        earlier, before = stored.get("earlier_versions") or [], stored.get("versions") or {}
        changed = [name for name in before if before[name] != now.get(name)]
        if not changed:
            return earlier
        changes = ", ".join(f"{name} {before[name]}, now {now.get(name)}" for name in changed)
        tell(
            f"warning: the run in {self.path} was started with {changes}: its result will come "
            "from both versions",
            file=sys.stderr,
        )
        return [*earlier, before]

    def _release(self, end: dict[str, Any]) -> None:
        """Record the end of the work if it had begun, end the tracker, and release the lock."""
        held_lock, self._lock = self._lock, None
        if held_lock and self._open:
            self.note(**end)
        self._open = False
        if self._tracking:
            done = end["outcome"] == "done"
            self._tracking.finish(end["outcome"], self.read_result() if done else None)
        if held_lock:
            held_lock.release()

    def _take_lock(self) -> None:
        """Lock the folder for this process; see `lock.Lock`."""
        new_lock = lock.Lock(self.path)
        try:
            new_lock.take()
        except OSError as error:
            raise ConfigError(
                f"the output folder {self.path} cannot be locked ({error}): choose another with "
                "hydra.run.dir=DIR"
            ) from error
        self._lock = new_lock

    def _artefacts(self) -> list[Path]:
        """Return the files of earlier runs, which are the only files that overwriting removes."""
        return sorted(path for name in ARTEFACTS for path in self.path.glob(name))

    def _read(
        self,
        name: str,
        kind: Any = None,
        remedy: str = "use on_existing=overwrite to start the run again",
    ) -> dict[str, Any]:
        """Read a mapping from a file in the run folder; see `contents.read_mapping`."""
        try:
            return read_mapping(self.path / name, kind)
        except DAMAGE as error:
            raise ConfigError(
                f"{self.path / name} is missing, damaged or of an older version: {remedy} "
                f"({single_line(error, 200)})"
            ) from error


def create_folder(path: Path, key: str) -> None:
    """Create an output folder; an error names `key`, the setting that selects another folder."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the output folder {path} cannot be created ({error.strerror}): choose another with "
            f"{key}=DIR"
        ) from error


def remove_empty(path: Path) -> None:
    """Remove an empty folder, and then its empty parents below the working directory."""
    with suppress(OSError):
        path, here = path.absolute(), Path.cwd()
        for folder in (path, *path.parents):
            if folder != here and (here in folder.parents or folder in (path, path.parent)):
                folder.rmdir()


def _first_difference(
    stored: dict[str, Any], current: dict[str, Any], prefix: str = ""
) -> str | None:
    """Return the first identity key that differs, with its stored and its current value."""
    for key in dict.fromkeys([*stored, *current]):
        if not prefix and key in operational_keys(current):
            continue
        stored_value, current_value = stored.get(key), current.get(key)
        if isinstance(stored_value, dict) and isinstance(current_value, dict):
            difference = _first_difference(stored_value, current_value, f"{prefix}{key}.")
            if difference:
                return difference
        elif stored_value != current_value:
            return f"{prefix}{key}: {stored_value} in the folder, {current_value} now"
    return None


def versions() -> dict[str, str]:
    """Return the versions of this package and of the packages that affect its results."""
    by_name = {}
    for name in PACKAGES:
        try:
            by_name[name] = version(name)
        except PackageNotFoundError:
            by_name[name] = "not installed as a package"
    return by_name


def code_state() -> dict[str, Any]:
    """Return the commit and its uncommitted changes (None outside git), and package versions."""
    source = Path(__file__).resolve().parent
    tracked = _git(source, "ls-files", "--error-unmatch", Path(__file__).name)
    commit = _git(source, "rev-parse", "HEAD") if tracked else None
    return {
        "commit": commit.strip() if commit else None,
        "diff": redact_code(_git(source, "diff", "HEAD") or "") if commit else None,
        "versions": versions(),
    }


def _git(source: Path, *arguments: str) -> str | None:
    """Run git in the source folder and return its output; None if git fails or is missing."""
    try:
        process = subprocess.run(
            ["git", *arguments], cwd=source, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout if process.returncode == 0 else None
