"""Identify the kind of a source by its content: a run folder, rollouts, rewards or scalars."""

from __future__ import annotations

import csv
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

from grpo_ustat.advise.request import address_of
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.logs.formats import Format, format_of
from grpo_ustat.logs.reward_forms import GROUP_COLUMNS, ROW_COLUMNS
from grpo_ustat.logs.reward_forms import READABLE as REWARD_FORMS
from grpo_ustat.logs.scalars import is_scalar_log, read_scalars
from grpo_ustat.logs.tables import DELIMITERS, is_parquet, text_of_file
from grpo_ustat.runs.files import CODE, CONFIG, RESULT, natural_order
from grpo_ustat.terminal.streams import single_line

POOL = "pool.json"
# Key that identifies a configuration of this package; other programs' configurations lack it.
OUR_CONFIG = re.compile(r"^launch:", re.MULTILINE)
ZIP = b"PK\x03\x04"
# Maximum number of column names that an error message lists.
MAX_NAMES = 8
READABLE = (
    "a run folder, a pool, a log of rollouts or of scalars (docs/measuring.md), or rewards: "
    f"{REWARD_FORMS}"
)


class Kind(Enum):
    """Kind of content that a path can have."""

    RUN = "run folder"
    POOL = "pool"
    # Rollouts that `convert` reads.
    ROLLOUTS = "log of rollouts"
    # Folder with completions that TRL or `train` logged.
    COMPLETIONS = "folder of completions"
    # Table with rewards. If it also has prompts and completions, `mse` can read it.
    REWARDS = "rewards by prompt"
    SCALARS = "log of scalars"


def kind_of(source: Path) -> Kind:
    """Return the kind of a file, a folder or an address of W&B; raise an error if none fits."""
    address = address_of(source)
    if is_scalar_address(address):
        return Kind.SCALARS
    if not source.exists():
        raise ConfigError(f"{source} does not exist: name {READABLE}")
    try:
        return _kind_of_folder(source) if source.is_dir() else _kind_of_file(source)
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {single_line(error, 100)}") from error


def is_scalar_address(address: str) -> bool:
    """Return True for an address of a run of W&B."""
    return address.startswith("wandb://")


def completions_in(folder: Path) -> list[Path]:
    """Return the TRL logs in a run folder or in its subfolder `completions`, ordered by step."""
    logs = list(folder.glob("completions*.parquet"))
    logs = logs or list(folder.glob("completions/completions*.parquet"))
    return sorted(logs, key=natural_order)


@contextmanager
def as_rollouts(source: Path) -> Iterator[tuple[Path, Format] | None]:
    """Yield a path of rollouts and their format, or None if `convert` cannot read the source.

    The readers need the usual file suffix of the format. If the name of the source has another
    suffix, the path is a temporary link to the source with the right suffix. Otherwise the path is
    the source itself.
    """
    framework = format_of(source)
    suffix = "" if framework or source.is_dir() else _suffix_by_content(source)
    if framework is not None:
        yield source, framework
    elif suffix in ("", source.suffix):
        yield None
    else:
        with tempfile.TemporaryDirectory() as folder:
            link = Path(folder, source.name + suffix)
            link.symlink_to(source.resolve())
            framework = format_of(link)
            yield None if framework is None else (link, framework)


def _kind_of_folder(source: Path) -> Kind:
    if (source / POOL).is_file():
        return Kind.POOL
    if (source / CONFIG).is_file():
        # Run folders of other programs that use Hydra, such as verl, lack the key.
        ours = OUR_CONFIG.search((source / CONFIG).read_text(errors="replace"))
        if not ours and format_of(source):
            return Kind.ROLLOUTS
        return Kind.SCALARS if not ours and is_scalar_log(source) else Kind.RUN
    if (source / CODE).is_file():
        raise ConfigError(f"{source} is a run folder without {CONFIG}: copy it with cp -r")
    inside = sorted(str(path.parent.parent) for path in source.glob(f"*/**/{CONFIG}"))
    if inside:
        raise ConfigError(f"{source} contains {len(inside)} runs: name one, e.g. {inside[0]}")
    if completions_in(source):
        return Kind.COMPLETIONS
    if format_of(source):
        return Kind.ROLLOUTS
    run = _run_around(source)
    if run is not None or completions_in(run := source.parent):
        raise ConfigError(f"{source} is part of a run: name the run folder, {run}")
    if is_scalar_log(source):
        return Kind.SCALARS
    # The reader's own error can be more helpful, for example if the folder has several runs.
    try:
        read_scalars(source)
    except ConfigError as error:
        if "contains no log of scalars" not in str(error):
            raise
    raise ConfigError(f"{source} has no files that can be read: name {READABLE}")


def _run_around(place: Path) -> Path | None:
    """Return the run folder of this package that contains a path; None if there is none."""
    from grpo_ustat.runs.record import run_around

    return run_around(place)


def _kind_of_file(source: Path) -> Kind:
    if source.name == RESULT and (source.parent / CONFIG).is_file():
        return Kind.RUN
    with as_rollouts(source) as rollouts:
        if rollouts is not None:
            # `mse` can read a TRL log without a conversion.
            is_table = rollouts[1].name == "trl" and rollouts[0] == source
            return Kind.REWARDS if is_table else Kind.ROLLOUTS
    names = _column_names(source)
    if names & set(GROUP_COLUMNS):
        return Kind.REWARDS
    try:
        read_scalars(source)
        return Kind.SCALARS
    except ConfigError as error:
        if names & set(ROW_COLUMNS):
            return Kind.REWARDS
        if names and "log_history" not in str(error) and not _is_damaged(str(error)):
            shown = ", ".join(sorted(names)[:MAX_NAMES]) + ", ..." * (len(names) > MAX_NAMES)
            raise ConfigError(
                f"{source} has columns {shown}, which are not a known format. Readable are "
                f"{READABLE}"
            ) from error
        if not names and not is_parquet(source):
            # This raises a clearer error for an empty, compressed or binary file.
            text_of_file(source)
            if "is not a log of scalars" in str(error):
                raise ConfigError(f"{source} is not a log: name {READABLE}") from error
        raise


def _is_damaged(message: str) -> bool:
    """Return True if an error message of the reader means a damaged log of scalars."""
    return "complete JSON" in message or "damaged" in message


def _suffix_by_content(source: Path) -> str:
    """Guess the file suffix from the first bytes of a file; empty if they are not known."""
    with source.open("rb") as file:
        head = file.read(64)
    if is_parquet(source):
        return ".parquet"
    if head.startswith(ZIP):
        return ".pt"
    return ".jsonl" if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{" else ""


def _column_names(source: Path) -> set[str]:
    """Return the names of a table's columns; empty if the beginning of the file is no table."""
    if is_parquet(source):
        from pyarrow import parquet

        try:
            return set(parquet.read_schema(source).names)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{source} cannot be read: {single_line(error, 200)}") from error
    try:
        text = text_of_file(source).lstrip()
    except ConfigError:
        return set()
    if text[0] in "{[":
        try:
            row, _ = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            return set()
        row = row[0] if isinstance(row, list) and row else row
        return set(row) if isinstance(row, dict) else set()
    head = text.partition("\n")[0].rstrip("\r")
    delimiter = max(DELIMITERS, key=head.count)
    if not head.count(delimiter):
        return set()
    return {name.strip() for name in next(csv.reader([head], delimiter=delimiter))}
