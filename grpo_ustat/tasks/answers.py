r"""Reading the final answer out of a completion, strictly.

A completion counts only if it states one final answer: on the line after a single `####` (the mark
of GSM8K, Cobbe et al. 2021; base models often write on below), in a single `\boxed{}`, or as the
whole completion. An echoed question, an equation, several numbers, several marks or several boxes
state none.
"""

from __future__ import annotations

import re
from decimal import Decimal

MARK = "####"
BOXES = ("\\boxed{", "\\fbox{")
MAX_DIGITS = 30
MAX_NUMBER = 60  # characters of a number with its sign, commas and spaces
_DOLLAR = r"(?:\\?\$)?"
_NUMBER = re.compile(
    rf"(?P<before>[+-]?){_DOLLAR}(?P<after>[+-]?)"
    rf"(?P<digits>(?:[0-9]{{1,3}}(?:,[0-9]{{3}})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+){_DOLLAR}"
)


def final_number(text: str) -> Decimal | None:
    r"""The number that `text` states as its final answer, or None; linear in the text's length.

    Where both a mark and a box stand, they must state the same number.

    >>> [str(final_number(t)) for t in ("37+45=82, 82-12=70 #### 70", r"so \boxed{-1,070.50}.")]
    ['70', '-1070.50']
    >>> final_number(" $18.00. ") == final_number(r"#### \boxed{18}") == 18
    True
    >>> echoes = ("37+45-12", "1 2 3", "x=3", "6/2", r"3\%", r"\boxed{4=3}")
    >>> [final_number(t) for t in (*echoes, "#### 3 #### 3", r"\boxed{3} or \boxed{3}", "####")]
    [None, None, None, None, None, None, None, None, None]
    """
    marks, boxes = text.count(MARK), sum(map(text.count, BOXES))
    if max(marks, boxes) > 1:
        return None
    boxed = number(last_boxed(text, MAX_NUMBER) or "") if boxes else None
    if not marks:
        return boxed if boxes else number(text)
    line = text.rpartition(MARK)[2].strip().partition("\n")[0]
    marked = number(_unboxed(line.strip()))
    return marked if not boxes or marked == boxed else None


def _unboxed(text: str) -> str:
    """The content of a text that is one box, or a box and a full stop; else the text."""
    content = last_boxed(text, MAX_NUMBER)
    boxes = {start + f"{content}}}" + stop for start in BOXES for stop in ("", ".")}
    return content if content is not None and text in boxes else text


def number(text: str) -> Decimal | None:
    """The number that `text` is and nothing else, or None.

    A sign, a dollar sign, commas between thousands, spaces around and one full stop behind are
    read over; at most 30 ASCII digits.
    """
    text = text.strip()
    found = _NUMBER.fullmatch(text.removesuffix(".")) if len(text) <= MAX_NUMBER else None
    if found is None or (found["before"] and found["after"]):
        return None
    digits = found["digits"].replace(",", "")
    if len(digits) - digits.count(".") > MAX_DIGITS:
        return None
    return Decimal(found["before"] + found["after"] + digits)


def plain(value: Decimal) -> str:
    """A number as logs and gold answers write it.

    >>> [plain(Decimal(text)) for text in ("18.00", "-0.50", "+1000", "-0")]
    ['18', '-0.5', '1000', '0']
    """
    text = f"{value:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def stated(text: str) -> str | None:
    """The number that `text` states as its final answer, in one writing, for logs."""
    value = final_number(text)
    return None if value is None else plain(value)


def last_boxed(text: str, longest: int) -> str | None:
    r"""What the last `\boxed{...}` or `\fbox{...}` of a text holds; linear in the text's length.

    Args:
        text: a completion; braces behind a backslash do not count.
        longest: characters; None is returned for a longer content, as for an unclosed box.

    >>> last_boxed(r"\boxed{1}, so \boxed{\frac{1}{2}} it is", 300), last_boxed(r"\boxed{3", 300)
    ('\\frac{1}{2}', None)
    """
    start, box = max((text.rfind(box), box) for box in BOXES)
    if start < 0:
        return None
    start, depth = start + len(box), 1
    for brace in re.finditer(r"\\.|[{}]", text[start : start + longest + 1], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start : start + brace.start()]
    return None
