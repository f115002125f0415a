"""File errors of the operating system, reported in one line with a remedy.

A full disk, or a folder that belongs to another user, is not a bug in this package, so the user
sees no traceback. Files on the disk are kept. Other errors are raised unchanged.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_ustat.config.schema import ConfigError

# Remedies, by error number of the operating system.
FIXES = {
    errno.ENOSPC: "free space on the disk",
    errno.EDQUOT: "free space in your disk quota",
    errno.EROFS: "make the file system writable",
    errno.EACCES: "give yourself permission to read and write it",
    errno.EPERM: "give yourself permission to read and write it",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
}
# Errors that are raised unchanged, because a bug in this package can also cause them.
MISSING_FILE_ERRORS = (errno.ENOENT, errno.ENOTDIR)
# Errors recognised by their messages, because some libraries wrap them without the error number.
ERRORS_IN_TEXTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE)
ERROR_NUMBER = re.compile(r"(?:\[Errno |os error |Os \{ code: )(\d+)")
ERROR_FILE = re.compile(r"\[Errno \d+\] [^:\n]+: '([^'\n]+)'")


class NotSaved(OSError):
    """Operating system error that stops a run; its message is one line with the remedy."""


def refusal(error: BaseException) -> tuple[str, str] | None:
    """Return the reason and the remedy for a file error from the system; None for other errors.

    Errors from a worker, from another rank or from safetensors are recognised by their messages.

    >>> refusal(OSError(28, "No space left on device", "pool/a.safetensors"))
    ('No space left on device: pool/a.safetensors', 'free space on the disk')
    >>> refusal(RuntimeError("IoError(Os { code: 28, kind: StorageFull })"))
    ('No space left on device', 'free space on the disk')
    >>> refusal(OSError(5, "Input/output error", "x"))
    ('Input/output error: x', 'remove the cause of this error')
    >>> refusal(OSError(2, "No such file or directory", "x")), refusal(ValueError("28"))
    (None, None)
    """
    if isinstance(error, ConfigError):
        return None
    text, number = str(error), getattr(error, "errno", None)
    if number is None and (match := ERROR_NUMBER.search(text)):
        number = int(match[1])
    if number is None and not isinstance(error, ValueError | LookupError | TypeError):
        number = next((code for code in ERRORS_IN_TEXTS if os.strerror(code) in text), None)
    if number is None or number in MISSING_FILE_ERRORS:
        return None
    match = ERROR_FILE.search(text)
    file = getattr(error, "filename2", None) or getattr(error, "filename", None)
    file = os.fsdecode(file) if isinstance(file, str | bytes | os.PathLike) else match and match[1]
    if not file and number not in ERRORS_IN_TEXTS:
        return None
    reason = f"{os.strerror(number)}: {file}" if file else os.strerror(number)
    return reason, FIXES.get(number, "remove the cause of this error")


def fault_line(error: BaseException) -> str | None:
    """Return the last line that a command prints after a system error; None for other errors."""
    refused = refusal(error)
    return refused and f"{': '.join(refused)}, then run the same command again"


@contextmanager
def faults_of(folder: Path) -> Iterator[None]:
    """Convert a system file error raised in the block into one line that names the folder.

    Raises:
        NotSaved: a file could not be written; the same command resumes from the files on the disk.
    """
    try:
        yield
    except NotSaved:
        raise
    except Exception as error:
        refused = refusal(error)
        if refused is None:
            raise
        reason, remedy = refused
        raise NotSaved(
            f"{folder} could not be written ({reason}): {remedy}, then run the same command again "
            "to continue from the files there"
        ) from error
