"""What a run folder holds that a tracker shows, as events in the order in which they came to be."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_ustat.config.schema import flatten
from grpo_ustat.config.secrets import redact
from grpo_ustat.runs import contents
from grpo_ustat.runs.files import csv_rows, read_rows
from grpo_ustat.runs.record import CODE, COMPLETIONS, CONFIG, EVALS, METRICS, RESULT
from grpo_ustat.runs.result import RESULT_TYPES, Evaluation
from grpo_ustat.terminal.streams import single_line, visible


class Damaged(ValueError):
    """A file of a run folder is not what a run writes; names the file, the key and the value."""


@dataclass(frozen=True)
class Event:
    """One thing to send.

    Attributes:
        kind: row (of metrics.jsonl), eval, completions, table, figure or result.
        name: which one of several that exist side by side, such as a figure's; else empty.
        step: of training; None for what a run ends with.
        content: values by key (row, eval, result), a list of rows (completions, table) or a path.
        mark: the step where events follow each other, else a digest of the content.
    """

    kind: str
    name: str
    step: int | None
    content: Any
    mark: int | str

    @property
    def key(self) -> str:
        """Kind and name, under which the latest mark that was sent is stored."""
        return f"{self.kind} {self.name}".strip()

    def is_new(self, sent: dict[str, int | str]) -> bool:
        """Whether it comes after the latest event of its key that was sent, or differs from it."""
        before = sent.get(self.key)
        if isinstance(before, int) and isinstance(self.mark, int):
            return self.mark > before
        return self.mark != before


def row_event(row: dict[str, Any]) -> Event:
    """A row of metrics.jsonl."""
    return Event("row", "", row["step"], visible_texts(row), row["step"])


class FolderReader:
    """A run folder, read again and again; files are only read.

    Args:
        folder: with `.hydra/config.yaml`.
    """

    def __init__(self, folder: Path):
        self.folder = folder
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

    def rows(self) -> list[Event]:
        """All complete rows of metrics.jsonl, without rows that lack a step and without values that
        a row cannot have.
        """
        return [
            row_event(row) for row in contents.typed_rows(read_rows(self.folder / METRICS)[0])[0]
        ]

    def logs(self) -> Iterator[Event]:
        """Evaluations and completions, all of a file that has changed since the last call.

        Raises:
            Damaged: a file.
        """
        if self._changed(EVALS):
            for row in self._content(EVALS, csv_rows):
                if not {"step", "decoding", "split"} <= row.keys():
                    raise Damaged(f"{EVALS} is damaged: a row has no step, decoding or split")
                if wrong := contents.misfit(row, Evaluation, whole=False):
                    raise Damaged(f"{EVALS} is damaged: {wrong}")
                name = visible(f"{row['decoding']}/{row['split']}")
                yield Event("eval", name, row["step"], visible_texts(row), row["step"])
        yield from self._completions()

    def _completions(self) -> Iterator[Event]:
        if not self._changed(COMPLETIONS):
            return
        import pyarrow
        from pyarrow import parquet

        try:
            with (self.folder / COMPLETIONS).open(
                "rb"
            ) as file:  # once: it may be replaced meanwhile
                rows = parquet.read_table(file).to_pylist()
            steps = {row["step"] for row in rows}
        except (OSError, LookupError, pyarrow.ArrowException) as error:
            line = single_line(error, 200)
            raise Damaged(f"{COMPLETIONS} is damaged: {line}") from error
        for step in sorted(steps, key=lambda step: (step is not None, step)):  # a study's have none
            of_step = visible_texts([row for row in rows if row["step"] == step])
            mark = _digest(of_step) if step is None else step
            yield Event("completions", "", step, of_step, mark)

    def result(self) -> Iterator[Event]:
        """Figures, tables and values of a finished run; nothing while `result.json`, which is
        written last, is absent or unchanged.

        Raises:
            Damaged: a file.
        """
        if not self._changed(RESULT):
            return
        command = contents.command_of(
            self._content(CONFIG, contents.parsed_yaml, contents.CONFIGURATION)
        )
        result = self._content(RESULT, contents.parsed_json, RESULT_TYPES[command], whole=False)
        step = result.get("steps")
        for file in sorted(self.folder.glob("*.png")):
            yield Event("figure", visible(file.stem), step, file, _digest(file.read_bytes()))
        checks = ("digest", "files")  # of the file itself
        found = {key: x for key, x in visible_texts(result).items() if key not in checks}
        for name, value in found.items():
            if _is_table(value) and name != "evals":  # which are events already
                yield Event("table", name, step, value, _digest(value))
        values = {
            k: "\n".join(map(str, v)) if isinstance(v, list) else v  # of notes, a line each
            for k, v in flatten(found, "/").items()
            if v != [] and not _is_table(v)
        }
        yield Event("result", "", step, values, _digest(values))

    def _content(
        self,
        name: str,
        parse: Callable[[str], Any],
        shape: contents.Shape = None,
        whole: bool = True,
    ) -> Any:
        """See `contents.checked`."""
        content, wrong = contents.checked(self.folder, name, parse, shape, whole)
        if wrong:
            raise Damaged(f"{name} is damaged: {wrong}")
        return content

    def _changed(self, name: str) -> bool:
        """Whether a file that is always replaced as a whole exists and differs from the one seen
        before. A replacement has another inode, or, if that number is used again, another time.

        Files are replaced, so the inode changes; its number may be used again, the time then not.
        """
        try:
            stat = (self.folder / name).stat()
        except FileNotFoundError:
            return False
        now = (stat.st_ino, stat.st_mtime_ns)
        changed, self._versions[name] = self._versions.get(name) != now, now
        return changed


def visible_texts(content: Any) -> Any:
    """The value with the invisible characters of its texts spelt out, also within rows and keys, so
    that a tracker receives no control sequences and no lone surrogates; all else unchanged.
    """
    if isinstance(content, str):
        return visible(content)
    if isinstance(content, dict):
        return {visible_texts(key): visible_texts(value) for key, value in content.items()}
    return [visible_texts(value) for value in content] if isinstance(content, list) else content


def _is_table(value: Any) -> bool:
    """Whether a value is a list of rows, such as curves or claims."""
    return isinstance(value, list) and value != [] and all(isinstance(x, dict) for x in value)


def _digest(content: Any) -> str:
    """A short hash of bytes, or of rows."""
    if not isinstance(content, bytes):
        content = json.dumps(content, sort_keys=True, default=str).encode()
    return hashlib.sha256(content).hexdigest()[:12]
