"""Output streams that tolerate write errors, and functions that make texts safe to print.

This module imports only the standard library.
"""

from __future__ import annotations

import errno
import io
import math
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO

# Control characters, characters that change the text direction, and surrogates.
INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
# Halves of a UTF-16 surrogate pair, which cannot be encoded in UTF-8.
SURROGATE = re.compile("[\ud800-\udfff]")


def visible(text: str) -> str:
    r"""Replace invisible characters, such as escapes and nulls, by escape sequences.

    >>> visible("a\x1b[31mb\x00\u202ec\n")
    'a\\x1b[31mb\\x00\\u202ec\n'
    """
    return INVISIBLE.sub(lambda match: ascii(match[0])[1:-1], text)


def single_line(text: object, most: int | None = None) -> str:
    r"""Return a text on a single line, with every run of white space replaced by a single space.

    Args:
        most: largest number of characters, to which the text is truncated; None for no limit.

    >>> single_line("no\n  such file ", 7)
    'no such'
    """
    return " ".join(str(text).split())[:most]


def wrapped(text: str, width: int = 80) -> str:
    """Wrap a sentence without breaks before `%` or around `=`.

    >>> print(wrapped("of them 12 % are equal, G = 2", 11))
    of them
    12 % are
    equal,
    G = 2
    """
    glued = re.sub(r"(?<=\d) %| = ", lambda match: match[0].replace(" ", "\0"), text)
    lines = textwrap.fill(glued, width, break_long_words=False, break_on_hyphens=False)
    return lines.replace("\0", " ")


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Return a line per row, with cells padded to the width of their column.

    >>> aligned([["run", "steps"], ["a", "8"]])
    ['run  steps', 'a    8']
    """
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]


def excerpt(text: str, most: int) -> str:
    """Shorten a text to at most `most` characters; a longer text keeps its beginning and end.

    >>> excerpt("a name", 9), excerpt("a very long name", 9)
    ('a name', 'a ve…name')
    """
    if len(text) <= most:
        return text
    half = (most - 1) // 2
    return f"{text[: most - 1 - half]}…{text[-half:]}"


def beside(left: str, text: str, column: int, width: int) -> list[str]:
    """Return the lines of a table row with two cells, wrapped to at most `width` columns.

    The text on the right starts at `column`. If the left part is too long, the text starts on the
    next line.

    >>> beside("  seed=0", "of all random choices", 10, 24)
    ['  seed=0  of all random', '          choices']
    """
    cells = textwrap.wrap(text, width - column, break_on_hyphens=False)
    lines = [" " * column + cell for cell in cells]
    if lines and len(left) < column - 1:
        lines[0] = left + lines[0][len(left) :]
        return lines
    broken = textwrap.wrap(left, width, subsequent_indent="      ", drop_whitespace=False)
    return [*map(str.rstrip, broken), *lines]


def tell(*lines: str, file: TextIO | None = None) -> None:
    """Print lines, by default on standard output."""
    for line in lines:
        print(visible(line), file=file or sys.stdout)


class LastingFile(io.FileIO):
    """File whose write errors are not raised.

    After the first error, all output, including output from child processes, goes to the null
    device.
    """

    # First write error; None if no write failed.
    refusal: OSError | None = None

    def write(self, data: Any) -> int | None:
        """Write to the file; after the first error, write to the null device."""
        try:
            return super().write(data)
        except BlockingIOError:
            raise
        except OSError as error:
            self.refusal = error
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return memoryview(data).nbytes


@contextmanager
def lasting_output() -> Iterator[None]:
    """Let the block continue after the reader of its output has closed, as with `| head -1`.

    The block can go on without a reader, because a run's results are in its files. Standard streams
    that are closed are connected to the null device, so that a file that is opened later does not
    get their descriptor.

    Raises:
        SystemExit: raised at the end if the block succeeded but a disk error truncated standard
            output.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The stream is closed, so the next opened file would get its descriptor.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    before = sys.stdout, sys.stderr
    output, errors = _lasting(sys.stdout, 1), _lasting(sys.stderr, 2)
    sys.stdout, sys.stderr = output, errors
    try:
        yield
    except SystemExit as error:
        if error.code:
            raise
    finally:
        for stream in (output, errors):
            # The block may have closed the stream.
            with suppress(ValueError):
                stream.flush()
        sys.stdout, sys.stderr = before
    refusal = getattr(_file_of(output), "refusal", None)
    if refusal is not None and refusal.errno != errno.EPIPE:
        line = f"error: standard output could not be written ({refusal.strerror})"
        print(line, file=errors, flush=True)
        raise SystemExit(1)


def _lasting(stream: TextIO | None, number: int) -> TextIO:
    """Return the stream wrapped around a `LastingFile`, or unchanged if its descriptor differs."""
    if stream is None:
        return open(number, "w", closefd=False)  # noqa: SIM115  # until this process ends
    file = _file_of(stream)
    if not isinstance(file, io.FileIO) or isinstance(file, LastingFile) or file.fileno() != number:
        return stream
    stream.flush()
    lasting = LastingFile(number, "w", closefd=False)
    unbuffered = isinstance(getattr(stream, "buffer", None), io.FileIO)
    return io.TextIOWrapper(
        lasting if unbuffered else io.BufferedWriter(lasting),  # pyright: ignore[reportArgumentType]
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=getattr(stream, "line_buffering", False),
        write_through=getattr(stream, "write_through", False),
    )


def _file_of(stream: Any) -> Any:
    """Return the raw file below a text stream, or None for a stream in memory."""
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)


def percentage(share: float, digits: int = 0) -> str:
    """Format a share as a percentage.

    >>> percentage(0.171), percentage(0.1714, 1)
    ('17 %', '17.1 %')
    """
    return f"{100 * share:.{digits}f} %"


def percent(share: float) -> str:
    """Format a signed share in percent without decimals.

    >>> percent(0.094), percent(-0.004), percent(12.3), percent(math.inf)
    ('+9 %', '0 %', '+1230 %', 'no upper end')
    """
    if share == math.inf:
        return "no upper end"
    value = round(100 * share)
    return f"{value:+d} %" if value else "0 %"


def best_size(best: float | None, low: float | None, high: float | None) -> str | None:
    """Format G* with its interval; return None if the interval gives no information.

    The interval gives no information in two cases: it has no lower end, or it has no upper end and
    its lower end is at most 2, the smallest group size.

    Args:
        best: estimate of G*; None or NaN if there is no estimate.
        low, high: ends of the interval; None or an infinite upper end means that the interval has
            no such end.

    >>> best_size(4.25, 3.0, 9.0), best_size(4.25, 3.0, None), best_size(4.25, 1.0, None)
    ('4.2 [3.0, 9.0]', 'at least 3.0', None)
    """
    bounded = high is not None and math.isfinite(high)
    if low is None or not math.isfinite(low) or (low <= 2 and not bounded):
        return None
    if not bounded:
        return f"at least {low:.1f}"
    estimate = f"{best:.1f}" if best is not None and math.isfinite(best) else "–"
    return f"{estimate} [{low:.1f}, {high:.1f}]"
