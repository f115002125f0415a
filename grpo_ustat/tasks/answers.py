"""Reading the final answer out of a completion, strictly.

A completion counts only if it states one final answer: after a single `####` mark (the format of
GSM8K, Cobbe et al. 2021), or as the whole completion. An echoed question, an equation, several
numbers or several marks state none.
"""

from __future__ import annotations

import re
from decimal import Decimal

MARK = "####"
_INTEGER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d{1,30})")


def final_integer(text: str) -> int | None:
    """The integer that `text` states as its final answer, or None.

    >>> final_integer("37+45=82, 82-12=70 #### 70"), final_integer(" 1,070.")
    (70, 1070)
    >>> [final_integer(t) for t in ("37+45-12", "1 2 3", "x=3", "#### 3 #### 4", "####", "3.5")]
    [None, None, None, None, None, None]
    """
    if text.count(MARK) > 1:
        return None
    answer = text.rpartition(MARK)[2].strip().removesuffix(".").strip("$ ")
    if not answer.isascii() or not _INTEGER.fullmatch(answer):
        return None
    return int(answer.replace(",", ""))


def final_number(text: str) -> Decimal | None:
    """The number that `text` states as its final answer, or None."""
    found = final_integer(text)
    return None if found is None else Decimal(found)


def stated(text: str) -> str | None:
    """`final_number` in its plainest writing."""
    found = final_number(text)
    return None if found is None else str(found)


def last_boxed(text: str, longest: int) -> str | None:
    r"""What the last `\boxed{...}` of a text holds, if it is closed and not longer."""
    head, mark, rest = text.rpartition("\\boxed{")
    depth = 1
    for end, letter in enumerate(rest[: longest + 1] if mark else ""):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return rest[:end]
    return None
