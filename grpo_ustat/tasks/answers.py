r"""Reading the final answer out of a completion, strictly.

A completion counts only if it states one final answer, in the first of these places that it has:

- on a line marked by `####` (the mark of GSM8K, Cobbe et al. 2021). The first marked line that
  states a number counts, as in lm-evaluation-harness (Gao et al.), whose filter takes the first
  match, and what comes after that line is not read: models write on below, base models with
  further questions and answers of their own. Headings (`#### Step 1`) and echoed instructions
  (`write #### and the answer`) state none and are passed over; five `#` are no mark;
- in a single `\boxed{}`;
- as the whole completion.

An echoed question, an equation, several numbers, several boxes or two marks in a line state none.
"""

from __future__ import annotations

import re
from decimal import Decimal

MARK = "####"
BOXES = ("\\boxed{", "\\fbox{")
MAX_DIGITS = 30
MAX_NUMBER = 60  # characters of a number with its sign, commas and spaces
MAX_MARKED = 120  # of a marked line behind the mark
WRAPS = (("**", "**"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), *((box, "}") for box in BOXES))
_MARK = re.compile(rf"(?<!#){MARK}(?!#)")
_MARKED = re.compile(rf"{_MARK.pattern}\s*+(?P<line>[^\n#]*+)(?:\n|\Z)")  # possessive: linear
_DOLLAR = r"(?:\\?\$)?"
_NUMBER = re.compile(
    rf"(?P<before>[+-]?){_DOLLAR}(?P<after>[+-]?)"
    rf"(?P<digits>(?:[0-9]{{1,3}}(?:,[0-9]{{3}})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+){_DOLLAR}"
)


def final_number(text: str) -> Decimal | None:
    r"""The number that `text` states as its final answer, or None; linear in the text's length.

    On a marked line `**`, `$...$`, `\(...\)`, `\[...\]`, a box around the number and spaces are
    read over. A box on that line or before it must state the same number.

    >>> [str(final_number(t)) for t in ("37+45=82, 82-12=70 #### 70", r"so \boxed{-1,070.50}.")]
    ['70', '-1070.50']
    >>> final_number(" $18.00. ") == final_number(r"**#### $\boxed{18}$**") == 18
    True
    >>> final_number("#### Step 1\n9+9\n#### 18\n\nQuestion: 3+4?\n#### 7") == 18
    True
    >>> echoes = ("37+45-12", "1 2 3", "x=3", "6/2", r"3\%", r"\boxed{4=3}", "#### 12 apples")
    >>> [final_number(t) for t in (*echoes, "#### 3 #### 3", r"\boxed{3} or \boxed{3}", "####")]
    [None, None, None, None, None, None, None, None, None, None]
    """
    marked, end = _marked(text)
    read = text[:end]
    boxes = sum(map(read.count, BOXES))
    if boxes > 1:
        return None
    boxed = number(last_boxed(read, MAX_NUMBER) or "") if boxes else None
    if marked is not None:
        return marked if not boxes or marked == boxed else None
    return boxed if boxes else _wrapped_number(text)


def _marked(text: str) -> tuple[Decimal | None, int]:
    """The number on the first line marked by #### that states one, else None; and the position in
    the text where that line ends.
    """
    for match in _MARKED.finditer(text):  # one in a line, by its last mark
        before = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
        line = ("**" if before.count("**") % 2 else "") + match["line"]  # **#### 12** is one bold
        value = None if _MARK.search(before) else _wrapped_number(line)
        if value is not None:
            return value, match.end()
    return None, len(text)


def _wrapped_number(text: str) -> Decimal | None:
    """The number that a short text consists of, apart from formatting around all of it, or None."""
    text = text.strip()
    if len(text) > MAX_MARKED:
        return None
    inner = text.removesuffix(".").rstrip()
    for left, right in WRAPS:
        if inner.startswith(left) and inner.endswith(right) and len(inner) > len(left):
            return _wrapped_number(inner[len(left) : -len(right)])
    return number(text)


def number(text: str) -> Decimal | None:
    """The number that a text consists of and nothing else, or None.

    A sign (also the minus U+2212), a dollar sign, commas between thousands, spaces around and one
    full stop behind are read over; at most 30 ASCII digits.
    """
    text = text.strip().replace("\u2212", "-")
    match = _NUMBER.fullmatch(text.removesuffix(".")) if len(text) <= MAX_NUMBER else None
    if match is None or (match["before"] and match["after"]):
        return None
    digits = match["digits"].replace(",", "")
    if len(digits) - digits.count(".") > MAX_DIGITS:
        return None
    return Decimal(match["before"] + match["after"] + digits)


def plain(value: Decimal) -> str:
    """A number as logs and gold answers write it.

    >>> [plain(Decimal(text)) for text in ("18.00", "-0.50", "+1000", "-0")]
    ['18', '-0.5', '1000', '0']
    """
    text = f"{value:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def stated(text: str) -> str | None:
    """The number that a text states as its final answer, written as `plain` does, for logs; or
    None.
    """
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
