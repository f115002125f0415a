"""What a run folder holds that a tracker shows, as events in the order in which they came to be.

Files are only read, as they grow; a row that is not whole yet waits. A run that went on from a
checkpoint writes later rows again: as draws are keyed they are the same rows, but for the clock,
and have the same digest.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_ustat.config.schema import flatten
from grpo_ustat.config.secrets import redact
from grpo_ustat.runs import contents
from grpo_ustat.runs.files import csv_rows, parsed_row
from grpo_ustat.runs.record import CODE, COMPLETIONS, CONFIG, EVALS, METRICS, RESULT
from grpo_ustat.terminal.streams import single_line, visible


class Damaged(ValueError):
    """A file of a run folder is not what a run writes; names the file, the key and the value."""


@dataclass(frozen=True)
class Event:
    """One thing to send.

    Attributes:
        kind: row (of metrics.jsonl), eval, completions, table, figure or result.
        name: which of its kind; with `kind` it is unique in a folder.
        digest: of its content without the clock; another one is another content.
        step: of training; None for what a run ends with.
        content: values by key (row, eval, result), a list of rows (completions, table) or a path.
    """

    kind: str
    name: str
    digest: str
    step: int | None
    content: Any

    @property
    def key(self) -> str:
        """Its name in the journal."""
        return f"{self.kind} {self.name}"


class FolderReader:
    """A run folder, read again and again.

    Args:
        folder: with `.hydra/config.yaml`.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._rows = _GrowingFile(folder / METRICS)
        self._versions: dict[str, tuple[int, int]] = {}

    def config(self) -> dict[str, Any]:
        """What was run, without secrets: the configuration, its hash if known, the commit.

        Raises:
            Damaged: one of the two files.
        """
        config = self._content(CONFIG, contents.parsed_yaml, contents.CONFIGURATION)
        code = self._content(CODE, contents.parsed_code, contents.CODE)
        about = {name: code.get(name) for name in ("commit", "weights", "versions")}
        return visible_texts(redact({**config, "code": about}))

    def new_events(self) -> list[Event]:
        """What has come since the last call; at the first one, everything. Rows without a step, and
        values that are none of a row, are left out.

        Raises:
            Damaged: a file.
        """
        rows = [Event("row", str(x["step"]), _digest(x), x["step"], x) for x in self._rows.new()]
        events = [*rows, *self._evals(), *self._completions(), *self._result()]
        return [
            replace(x, name=visible_texts(x.name), content=visible_texts(x.content)) for x in events
        ]

    def _evals(self) -> Iterator[Event]:
        if not self._changed(EVALS):
            return
        for row in self._content(EVALS, csv_rows):
            if not {"step", "decoding", "split"} <= row.keys():
                raise Damaged(f"{EVALS} is damaged: a row has no step, decoding or split")
            if wrong := contents.misfit(row, contents.EVALUATION):
                raise Damaged(f"{EVALS} is damaged: {wrong}")
            name = f"{row['step']}/{row['decoding']}/{row['split']}"
            yield Event("eval", name, _digest(row), row["step"], row)

    def _completions(self) -> Iterator[Event]:
        if not self._changed(COMPLETIONS):
            return
        import pyarrow
        from pyarrow import parquet

        try:
            rows = parquet.read_table(self.folder / COMPLETIONS).to_pylist()
            steps = {row["step"] for row in rows}
        except (OSError, LookupError, pyarrow.ArrowException) as error:
            line = single_line(error, 200)
            raise Damaged(f"{COMPLETIONS} is damaged: {line}") from error
        for step in sorted(steps, key=lambda step: (step is not None, step)):  # a study's have none
            of_step = [row for row in rows if row["step"] == step]
            yield Event("completions", str(step), _digest(of_step), step, of_step)

    def _result(self) -> Iterator[Event]:
        """Written last of all, after the figures and tables that come first here."""
        if not self._changed(RESULT):
            return
        command = contents.command_of(
            self._content(CONFIG, contents.parsed_yaml, contents.CONFIGURATION)
        )
        result = self._content(RESULT, contents.parsed_json, contents.RESULTS[command])
        for file in sorted(self.folder.glob("*.png")):
            yield Event("figure", file.stem, _digest(file.read_bytes()), result.get("steps"), file)
        for name, value in result.items():
            if _is_table(value) and name != "evals":  # which are events already
                yield Event("table", name, _digest(value), result.get("steps"), value)
        values = {
            k: "\n".join(map(str, v)) if isinstance(v, list) else v  # of notes, a line each
            for k, v in flatten(result, "/").items()
            if v != [] and not _is_table(v)
        }
        yield Event("result", "result", _digest(values), result.get("steps"), values)

    def _content(self, name: str, parse: Callable[[str], Any], shape: contents.Shape = None) -> Any:
        """See `contents.checked`."""
        content, wrong = contents.checked(self.folder, name, parse, shape)
        if wrong:
            raise Damaged(f"{name} is damaged: {wrong}")
        return content

    def _changed(self, name: str) -> bool:
        """Whether a file that is always replaced as a whole exists and is another one than before.

        Files are replaced, so the inode changes; its number may be used again, the time then not.
        """
        try:
            stat = (self.folder / name).stat()
        except FileNotFoundError:
            return False
        now = (stat.st_ino, stat.st_mtime_ns)
        changed, self._versions[name] = self._versions.get(name) != now, now
        return changed


class _GrowingFile:
    """The whole lines of a file that grows, and that a resumed run replaces by a shorter one."""

    def __init__(self, file: Path):
        self._file, self._offset = file, 0
        self._inode: int | None = None

    def new(self) -> list[dict[str, Any]]:
        """Lines that have come since the last call."""
        try:
            with self._file.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._offset:
                    self._inode, self._offset = stat.st_ino, 0
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        rows = [parsed_row(line) for line in whole.decode(errors="replace").splitlines()]
        return contents.typed_rows([row for row in rows if row is not None])[0]


def _is_table(value: Any) -> bool:
    """Whether a value is a list of rows, such as curves or claims."""
    return isinstance(value, list) and value != [] and all(isinstance(x, dict) for x in value)


def _digest(content: Any) -> str:
    """A short hash of bytes, or of a row or rows; in a row times do not count."""
    if isinstance(content, dict):
        content = {k: v for k, v in content.items() if "seconds" not in k and k != "step_time"}
    if not isinstance(content, bytes):
        content = json.dumps(content, sort_keys=True, default=str).encode()
    return hashlib.sha256(content).hexdigest()[:12]


def visible_texts(content: Any) -> Any:
    """Texts, also within rows and as keys, with invisible characters spelt out: a tracker gets no
    escape, and takes no half letters; all else as it is.
    """
    if isinstance(content, str):
        return visible(content)
    if isinstance(content, dict):
        return {visible_texts(key): visible_texts(value) for key, value in content.items()}
    return [visible_texts(value) for value in content] if isinstance(content, list) else content


def is_number(value: Any) -> bool:
    """Whether a value is a number, which a tracker can draw."""
    return isinstance(value, int | float) and math.isfinite(value)
