"""Which framework wrote a file or folder of rollouts: by its file names, and by the fields of the
first row of a file. `convert` reads them; `advise` and `mse` name it where they meet one.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.logs import readers
from grpo_ustat.logs.readers import absolute
from grpo_ustat.logs.rows import Options, Rollout
from grpo_ustat.runs.files import json_lines, natural_order

OUTPUT_COLUMNS = {"prompt_id", "reward"}  # columns of every file that `convert` writes
PACKED_SUFFIXES = (".gz", ".zst", ".bz2", ".xz", ".zip")


@dataclass(frozen=True)
class Format:
    """A framework's way to write rollouts.

    Attributes:
        name: of the framework.
        read: the rows of one file.
        pattern: of its files below a source folder.
        fields: some that every one of its rows has; none: the file name alone says it.
        named: how the path of such a file ends; empty: as the pattern says. Copies and attempts
            that were put aside, such as 5_old.jsonl, have other names.
        note: what the user must know of it.
    """

    name: str
    read: Callable[[Path, Options], Iterator[Rollout]] = field(repr=False)
    pattern: str
    fields: frozenset[str] = frozenset()
    named: str = ""
    note: str = ""


FORMATS = {
    one.name: one
    for one in (
        Format(
            "trl", readers.read_trl, "**/completions*.parquet",
            frozenset({"prompt", "completion", "step"}), r"/completions_\d{5,}\.parquet",
            note="file K is of checkpoint K - 1 where a batch has one update; record logs which",
        ),
        Format(
            "nemo_rl", readers.read_nemo_rl, "**/train_data_step*.jsonl",
            frozenset({"token_ids", "token_loss_mask", "input_lengths", "rewards"}),
            r"/train_data_step\d+\.jsonl",
            note="no end reason is logged: what ended follows from the end token",
        ),
        Format(
            "prime_rl", readers.read_prime_rl, "**/traces.jsonl", frozenset({"traces"}),
            r"(/rollouts/step_\d+/|^(?!.*/rollouts/step_)).*",
        ),
        Format(
            "open_instruct", readers.read_open_instruct, "**/*_rollouts_*.jsonl",
            frozenset({"prompt_tokens", "response_tokens", "prompt_idx"}),
            r"_rollouts_\d{6,}\.jsonl",
        ),
        Format(
            "verl_record", readers.read_verl_record, "**/*.parquet",
            frozenset({"uid", "prompt_ids", "completion_ids", "response_mask", "score"}),
            r"/\d+\.parquet",
            note="21.parquet is of global_step_20; verl.model_merger makes it a model",
        ),
        Format(
            "verl", readers.read_verl, "**/*.jsonl", frozenset({"input", "output", "score"}),
            r"/\d+\.jsonl", note="texts without special tokens",
        ),
        Format(
            "areal", readers.read_areal, "**/*.jsonl",
            frozenset({"task_id", "seqlen", "completion"}),
            r"/\d+/(\d+|[0-9a-f-]{32,36})\.jsonl",
        ),
        Format(
            "ms_swift", readers.read_ms_swift, "**/completions.jsonl",
            frozenset({"prompt", "completion", "advantages"}),
        ),
        Format(
            "slime", readers.read_slime, "**/*.pt",
            frozenset({"rollout_id", "samples", "response_length"}), r"\d\.pt",
        ),
        Format("skyrl", readers.read_skyrl, "**/*_training_input.pkl"),
    )
}  # fmt: skip


def packed_files(source: Path, formats: Iterable[Format]) -> list[Path]:
    """Files that would have a framework's name if they were unpacked: the source, or below it."""
    paths = [source] if source.is_file() else sorted(source.rglob("*"), key=natural_order)
    names = [one.pattern.rpartition("/")[2] for one in formats]
    return [
        path for path in paths
        if path.suffix in PACKED_SUFFIXES and any(Path(path.stem).match(name) for name in names)
    ]  # fmt: skip


def files_of(source: Path, one: Format) -> Sequence[Path]:
    """The source itself where it has a framework's name or fields; or a folder's files of its name,
    in natural order: those whose first row has the fields or cannot be read, and all of them where
    no first row has.
    """
    if source.is_file():
        is_named = source.match(one.pattern.rpartition("/")[2])
        is_renamed = source.suffix == Path(one.pattern).suffix and bool(one.fields)
        fits = is_renamed and one.fields <= (first_fields(source) or set())
        return [source] if is_named or fits else []
    named = sorted((path for path in source.glob(one.pattern) if path.is_file()), key=natural_order)
    fields = {path: first_fields(path) for path in named}
    if not any(own is not None and one.fields <= own for own in fields.values()):
        return named
    return [path for path, own in fields.items() if own is None or one.fields <= own]


def split_by_name(
    source: Path, one: Format, paths: Sequence[Path]
) -> tuple[Sequence[Path], Sequence[Path]]:
    """Files of a folder whose names are exactly what the framework writes, and the others. A file
    that stands alone may have any name.

    Raises:
        ConfigError: there are several files, and none has such a name.
    """
    if not one.named or len(paths) < 2:
        return paths, []
    is_exact = re.compile(f"{one.named}$")
    exact = [path for path in paths if is_exact.search(absolute(path).as_posix())]
    if not exact:
        raise ConfigError(
            f"{source} holds {len(paths)} files, such as {paths[0].name}, whose names are not as "
            f"{one.name} writes them, so they may be attempts of one step: name one file"
        )
    return exact, [path for path in paths if path not in exact]


def format_of(source: Path) -> Format | None:
    """The framework whose names and fields a file, or a file below a folder, has; None: of none."""
    for one in FORMATS.values():
        for path in files_of(source, one):
            fields = first_fields(path)
            if fields is not None and one.fields <= fields:
                return one
    return None


def first_fields(path: Path) -> set[str] | None:
    """Names of the fields of a file's first row; of a pickle, searched and not loaded, those
    of slime that stand in it. None: it cannot be read.
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
            fields = [one for one in FORMATS["slime"].fields if one.encode() in content]
    except (ConfigError, OSError, ValueError, zipfile.BadZipFile):
        return None
    return set(fields)


def detect(source: Path) -> Format:
    """The framework that wrote a file or folder, by file names and the fields of its first row.

    Raises:
        ConfigError: none fits.
    """
    if source.is_file() and not source.stat().st_size:
        raise ConfigError(f"{source} is empty: name a file with rollouts")
    if source.is_dir() and not any(path.is_file() for path in source.rglob("*")):
        raise ConfigError(f"{source} holds no file: name a folder with rollouts")
    if source.is_file() and (first_fields(source) or set()) >= OUTPUT_COLUMNS:
        raise ConfigError(
            f"{source} is converted already (it has prompt_id): name it in grpo-ustat mse "
            f"pool={source} model=CHECKPOINT, or in grpo-ustat advise {source}"
        )
    if found := format_of(source):
        return found
    if packed := packed_files(source, FORMATS.values()):
        raise ConfigError(f"{packed[0]} is packed: unpack it first, as with gunzip")
    raise ConfigError(
        f"{source} is in no format that is known by its names and fields: say --from "
        f"{'|'.join(FORMATS)}"
    )
