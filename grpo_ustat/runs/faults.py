"""Errors of the operating system, each in one line that says what to do.

A disk that is full, a folder that was moved, a limit of files, sizes or memory: none is a mistake
in the code, so none needs a traceback, and what is on the disk stays. All other errors stay what
they are.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_ustat.config.schema import ConfigError

# Remedies if a file could not be written or read, by the system's number.
FILE_FIXES = {
    errno.ENOSPC: "make room on the disk",
    errno.EDQUOT: "make room in your share of the disk (quota)",
    errno.EROFS: "make the file system writable",
    errno.EACCES: "make it yours to read and write",
    errno.EPERM: "make it yours to read and write",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.EIO: "look at the disk, which answers with errors",
    errno.ESTALE: "see to it that the file system is mounted",
    errno.EISDIR: "remove the folder of that name",
    errno.ELOOP: "mend the symbolic link",
    errno.ENAMETOOLONG: "choose a shorter name",
}
NAMED_FILE_ERRORS = (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)
LIMIT_FIXES = {
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "close files of other programs: the whole machine has too many open",
    errno.ENOMEM: "free memory, or raise its limit (ulimit -v)",
    errno.EAGAIN: "raise the limit of processes and threads (ulimit -u)",
}
# In a folder that is there they are a bug of ours.
MISSING_FILE_ERRORS = (errno.ENOENT, errno.ENOTDIR)
# Recognised by their words, since a library wraps them and leaves the number out.
ERRORS_IN_TEXTS = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE,
    errno.ENOMEM,
)  # fmt: skip
ERROR_NUMBER = re.compile(r"(?:\[Errno |os error |Os \{ code: )(\d+)")
ERROR_FILE = re.compile(r"\[Errno \d+\] [^:\n]+: '([^'\n]+)'")
NO_MEMORY = re.compile(r"\bMemoryError\b|can't allocate memory|std::bad_alloc")
NO_THREAD = re.compile(r"can't start new thread")
LOST_WORKER = re.compile(r"worker \d+ ended with exit code -\d+")
WORKING_FOLDER = "the working folder"
NO_TEMPORARY_FOLDER = "No usable temporary directory"


class NotSaved(OSError):
    """A run stopped by an error of the operating system; one line that says what to do."""


def refusal(error: BaseException) -> tuple[str, str, bool] | None:
    """Return an operating system's error as reason, remedy, and True if it concerns files.

    None for other errors. An error of a worker or of another rank is recognised by its text, and so
    is an error of safetensors, which names no file.

    >>> refusal(OSError(28, "No space left on device", "pool/a.safetensors"))
    ('No space left on device: pool/a.safetensors', 'make room on the disk', True)
    >>> refusal(RuntimeError("IoError(Os { code: 28, kind: StorageFull })"))
    ('No space left on device', 'make room on the disk', True)
    >>> refusal(OSError(24, "Too many open files"))
    ('Too many open files', 'raise the limit of open files (ulimit -n)', False)
    >>> refusal(OSError(2, "No such file or directory", "/nowhere/x"))[1]
    'put the folder /nowhere back'
    >>> refusal(OSError(2, "No such file or directory", "x")), refusal(ValueError("28"))
    (None, None)
    """
    text = str(error)
    if isinstance(error, ConfigError):
        return None
    if NO_TEMPORARY_FOLDER in text:
        return "no folder for temporary files can be written", "set TMPDIR=DIR", False
    if isinstance(error, MemoryError) or NO_MEMORY.search(text):
        return "no memory is left", LIMIT_FIXES[errno.ENOMEM], False
    if NO_THREAD.search(text):
        return "no thread can be started", LIMIT_FIXES[errno.EAGAIN], False
    if lost := LOST_WORKER.search(text):
        return lost[0], "free memory (launch.workers=1 needs the least)", False

    number = getattr(error, "errno", None)
    if number is None and (match := ERROR_NUMBER.search(text)):
        number = int(match[1])
    if number is None and not isinstance(error, ValueError | LookupError | TypeError):
        number = next((one for one in ERRORS_IN_TEXTS if os.strerror(one) in text), None)
    match = ERROR_FILE.search(text)
    file = getattr(error, "filename2", None) or getattr(error, "filename", None)
    file = os.fsdecode(file) if isinstance(file, str | bytes | os.PathLike) else match and match[1]
    if number in MISSING_FILE_ERRORS:
        try:
            here = os.getcwd()
        except FileNotFoundError:
            return f"{WORKING_FOLDER} was moved or removed", f"put {WORKING_FOLDER} back", True
        folder = Path(here, file).parent if file else Path(here)
        if folder.is_dir():
            return None
        return f"{folder} was moved or removed", f"put the folder {folder} back", True
    remedy = FILE_FIXES.get(number or 0) or LIMIT_FIXES.get(number or 0)
    if number is None or remedy is None or (number in NAMED_FILE_ERRORS and not file):
        return None
    reason = f"{os.strerror(number)}: {file}" if file else os.strerror(number)
    return reason, remedy, number in FILE_FIXES


def fault_line(error: BaseException) -> str | None:
    """Return the line that a command ends with after a system error; None for other errors."""
    refused = refusal(error)
    if refused is None:
        return None
    reason, remedy, _ = refused
    return f"{reason}: {remedy}, then type the same command again"


@contextmanager
def faults_of(folder: Path) -> Iterator[None]:
    """Turn an operating system's error within the block into one line that names the folder.

    Raises:
        NotSaved: the same command goes on from what is on the disk.
    """
    try:
        yield
    except NotSaved:
        raise
    except Exception as error:
        refused = refusal(error) or _emptied(folder, error)
        if refused is None:
            raise
        reason, remedy, of_files = refused
        what = "could not be written" if of_files else "is not finished"
        raise NotSaved(
            f"{folder} {what} ({reason}): {remedy}, then the same command goes on from what is "
            "there"
        ) from error


def _emptied(folder: Path, error: Exception) -> tuple[str, str, bool] | None:
    """Return reason and remedy, as `refusal` does, if the run folder was moved or removed.

    A missing file shows it. None for other errors.
    """
    file = getattr(error, "filename", None)
    if not isinstance(error, FileNotFoundError) or not isinstance(file, str):
        return None
    inside = os.path.realpath(file).startswith(os.path.join(os.path.realpath(folder), ""))
    if not inside or (folder / ".hydra/config.yaml").is_file():
        return None
    return f"{folder} was moved or removed", f"put the folder {folder} back", True
