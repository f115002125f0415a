"""Which framework wrote a file or folder of rollouts: by its file names, and by the fields of the
first row of a file. `convert` reads them; `advise` and `mse` name it where they meet one.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.runs.files import json_lines, natural_order


@dataclass(frozen=True)
class Dump:
    """How a framework's files of rollouts are known.

    Attributes:
        name: of the framework.
        pattern: of its files below a source folder.
        fields: some that every one of its rows has; none: the file name alone says it.
        exact: how the path of such a file ends; empty: as the pattern says. Copies and attempts
            that were put aside, such as 5_old.jsonl, have other names.
    """

    name: str
    pattern: str
    fields: frozenset[str]
    exact: str = ""


DUMPS = {
    name: Dump(name, pattern, frozenset(fields.split()), *exact)
    for name, pattern, fields, *exact in (
        (
            "trl",
            "**/completions*.parquet",
            "prompt completion step",
            r"/completions_\d{5,}\.parquet",
        ),
        (
            "nemo_rl",
            "**/train_data_step*.jsonl",
            "token_ids token_loss_mask input_lengths rewards",
            r"/train_data_step\d+\.jsonl",
        ),
        (
            "prime_rl",
            "**/traces.jsonl",
            "traces",
            r"(/rollouts/step_\d+/|^(?!.*/rollouts/step_)).*",
        ),
        (
            "open_instruct",
            "**/*_rollouts_*.jsonl",
            "prompt_tokens response_tokens prompt_idx",
            r"_rollouts_\d{6,}\.jsonl",
        ),
        ("verl", "**/*.jsonl", "input output score", r"/\d+\.jsonl"),
        ("areal", "**/*.jsonl", "task_id seqlen completion", r"/\d+/(\d+|[0-9a-f-]{32,36})\.jsonl"),
        ("ms_swift", "**/completions.jsonl", "prompt completion advantages"),
        ("slime", "**/*.pt", "rollout_id samples response_length", r"\d\.pt"),
        ("skyrl", "**/*_training_input.pkl", ""),
    )
}


PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip")


def packed_files(source: Path, patterns: Sequence[str]) -> list[Path]:
    """Files that would have a framework's name if they were unpacked: the source, or below it."""
    paths = [source] if source.is_file() else sorted(source.rglob("*"), key=natural_order)
    names = [pattern.rpartition("/")[2] for pattern in patterns]
    return [
        path for path in paths
        if path.suffix in PACKED and any(Path(path.stem).match(name) for name in names)
    ]  # fmt: skip


def absolute(path: Path) -> Path:
    """The whole path, so that names of folders above the working one count; links keep theirs."""
    return Path(os.path.abspath(path))


def files_of(source: Path, dump: Dump) -> Sequence[Path]:
    """The source itself where it has a framework's name or fields; or a folder's files of its name,
    in natural order: those whose first row has the fields or cannot be read, and all of them where
    no first row has.
    """
    if source.is_file():
        is_named = source.match(dump.pattern.rpartition("/")[2])
        is_renamed = source.suffix == Path(dump.pattern).suffix and bool(dump.fields)
        fits = is_renamed and dump.fields <= (first_fields(source) or set())
        return [source] if is_named or fits else []
    named = sorted(
        (path for path in source.glob(dump.pattern) if path.is_file()), key=natural_order
    )
    fields = {path: first_fields(path) for path in named}
    if not any(own is not None and dump.fields <= own for own in fields.values()):
        return named
    return [path for path, own in fields.items() if own is None or dump.fields <= own]


def split_by_name(
    source: Path, dump: Dump, paths: Sequence[Path]
) -> tuple[Sequence[Path], Sequence[Path]]:
    """Files of a folder whose names are exactly what the framework writes, and the others. A file
    that stands alone may have any name.

    Raises:
        ConfigError: there are several files, and none has such a name.
    """
    if not dump.exact or len(paths) < 2:
        return paths, []
    is_exact = re.compile(f"{dump.exact}$")
    exact = [path for path in paths if is_exact.search(absolute(path).as_posix())]
    if not exact:
        raise ConfigError(
            f"{source} holds {len(paths)} files, such as {paths[0].name}, whose names are not as "
            f"{dump.name} writes them, so they may be attempts of one step: name one file"
        )
    return exact, [path for path in paths if path not in exact]


def dump_of(source: Path) -> Dump | None:
    """The framework whose names and fields a file, or a file below a folder, has; None: of none."""
    for dump in DUMPS.values():
        for path in files_of(source, dump):
            fields = first_fields(path)
            if fields is not None and dump.fields <= fields:
                return dump
    return None


def first_fields(path: Path) -> set[str] | None:
    """Names of the fields of a file's first row; of a pickle, those of `Dump.fields` that stand in
    it, which is searched and not loaded. None: it cannot be read.
    """
    fields: Iterable[str] = ()
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet

            fields = parquet.read_schema(path).names
        elif path.suffix == ".jsonl":
            fields = next((row for _, row in json_lines(path)), {})
        elif path.suffix == ".pt":
            with zipfile.ZipFile(path) as archive:
                (inside,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
                content = archive.read(inside)
            fields = [one for one in DUMPS["slime"].fields if one.encode() in content]
    except (ConfigError, OSError, ValueError, zipfile.BadZipFile):
        return None
    return set(fields)
