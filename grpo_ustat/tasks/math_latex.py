r"""Reading LaTeX answers: their text without decoration, and the numbers that they are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from math import gcd

from grpo_ustat.tasks.answers import number

NO_UNITS = {  # they change the value, or hedge
    "or", "and", "not", "times", "minus", "plus", "over", "squared", "cubed", "factorial",
    "half", "third", "fifth", "tenth", "hundredth", "thousandth", "dozen", "hundred", "thousand",
    "million", "billion", "trillion",
}  # fmt: skip
BASES = (  # from 2 on
    "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen",
)  # fmt: skip
_BRACED = r"\{((?:[^{}]|\{[^{}]*\})*)\}"  # with braces in it, one deep
_TERM = rf"(?:(\d|\\pi(?![a-zA-Z]))|{_BRACED})"
_FRACTIONS = (
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (rf"\\frac ?{_TERM} ?{_TERM}", r"\\frac{\1\2}{\3\4}"),
)
_REPLACED = (
    *_FRACTIONS,
    (r"\\sqrt ?(\d)", r"\\sqrt{\1}"),
    (r"\\(?:left|right|displaystyle)(?![a-zA-Z])|\\!", ""),
    (r"\{,\}", ","),
    (r"(?<=\d)\\[,;:](?=\d)", ","),  # a thin space between thousands
    (r"\\[,;: ]|~", " "),
    (r"\^ ?(?:\{ ?\\circ ?\}|\\circ(?![a-zA-Z]))|\\degree(?![a-zA-Z])", "°"),
)
_CLEANED = [(re.compile(pattern), by) for pattern, by in _REPLACED]
_TEXT = r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf|underline) ?"
_PEELED = (  # of a whole answer
    (rf"{_TEXT}\{{ ?([\d.,]+) ([a-zA-Z][a-zA-Z ./-]*)\}}", r"\1 \\text{\2}"),
    (rf"(?:{_TEXT})?{_BRACED}", r"\1"),
    (r"([+-]) ?\(([^()]*)\)", r"\1\2"),
)
_UNIT = rf"{_TEXT}\{{(?P<unit>[a-zA-Z.,/ -]*)(?:\^[23])?\}}(?:\^ ?\{{?[23]\}}?)?"
_NUMBER = re.compile(
    r"(?:\\?\$)?(?P<sign>[+-]?)(?:\\?\$)? ?"
    r"(?:(?P<whole>\d{1,30})? ?\\frac ?\{(?P<p>-?\d{1,30})\} ?\{(?P<q>-?\d{1,30})\}"
    r"|(?P<over>\d{1,30})/(?P<under>\d{1,30})|(?P<decimal>[\d,]*\.?\d+)"
    r"(?: ?\\(?:times|cdot) ?10 ?\^ ?(?:(?P<power>\d)|\{ ?(?P<powers>-?\d{1,2}) ?\}))?)"
    rf" ?°? ?(?P<percent>\\?%)? ?(?:{_UNIT})?\$?",
    re.ASCII,
)
_DIGITS = "-?[0-9A-Z]+"
_SPACES = re.compile(r"(?<!\d)\s+|\s+(?!\d)")  # not between two digits: 1 2 is not 12


@dataclass(frozen=True)
class Number:
    """A number as an answer writes it: its value, and how."""

    value: Fraction
    form: str  # "decimal", "scientific", "mixed", "reduced" or "unreduced"
    percent: bool
    words: list[str]  # of its unit


def read_based(latex: str) -> tuple[str, int] | None:
    r"""The digits and the base of a number that names its base, else None.

    >>> [read_based(t) for t in ("204_5", r"204_{\text{five}}", "1A_{16}", "204_3", "x_1", "204")]
    [('204', 5), ('204', 5), ('1A', 16), None, None, None]
    """
    found = re.fullmatch(rf"({_DIGITS})_(?:(\d)|\{{(?:base)?(\d\d?|[a-z]+)\}})", bare(latex))
    if found is None:
        return None
    digits, name = found[1], found[2] or found[3]
    base = int(name) if name.isdigit() else BASES.index(name) + 2 if name in BASES else 0
    known = 2 <= base <= 36 and all(int(d, 36) < base for d in digits.lstrip("-"))
    return (digits, base) if known else None


def bare(latex: str) -> str:
    r"""LaTeX without spaces and decoration, for comparing.

    >>> bare(r"\left( \dfrac12,\, 1{,}000 \right)."), bare(r"\text{ 1 2 }")
    ('(\\frac{1}{2},1,000)', '1 2')
    """
    text = re.sub(_TEXT + r"\{([^{}]*)\}", r" \1 ", _cleaned(latex))
    text = re.sub(r"\\?\$", "", text)
    text = _SPACES.sub("", text).removesuffix(".")
    return text[1] if re.fullmatch(r"\([A-Z]\)", text) else text


def read_number(latex: str) -> Number | None:
    r"""The number that LaTeX is and nothing else, else None.

    >>> [str(read_number(t).value) for t in (r"-\frac{2}{4}", r"1\tfrac34", r"\$1{,}000.50", "7/2")]
    ['-1/2', '7/4', '2001/2', '7/2']
    >>> [read_number(t) for t in ("1 2", "6+1", "x=7", r"5\text{ million}", "1,00", r"\frac{1}{0}")]
    [None, None, None, None, None, None]
    """
    found = _NUMBER.fullmatch(_peeled(latex))
    value = None if found is None else _value(found)
    if value is None:
        return None
    unit = words(found["unit"] or "")
    if any(NO_UNITS & forms(word) for word in unit):
        return None
    sign = -1 if found["sign"] == "-" else 1
    return Number(sign * value, _form(found), bool(found["percent"]) or "percent" in unit, unit)


def _value(found: re.Match[str]) -> Fraction | None:
    if found["decimal"]:
        value = number(found["decimal"])
        power = int(found["power"] or found["powers"] or 0)
        return None if value is None else Fraction(value) * Fraction(10) ** power
    above, below = _fraction(found)
    if not below or (found["whole"] and min(above, below) < 0):
        return None
    return Fraction(int(found["whole"] or 0) * below + above, below)


def _form(found: re.Match[str]) -> str:
    if found["power"] or found["powers"]:
        return "scientific" if 1 <= float(found["decimal"].replace(",", "")) < 10 else "unreduced"
    if found["decimal"]:
        return "decimal"
    above, below = _fraction(found)
    if gcd(above, below) > 1 or (found["whole"] and above > below):
        return "unreduced"
    return "mixed" if found["whole"] else "reduced"


def _fraction(found: re.Match[str]) -> tuple[int, int]:
    return int(found["p"] or found["over"]), int(found["q"] or found["under"])


def _cleaned(latex: str) -> str:
    """In one writing of spaces, fractions and degrees, one space at most between two signs."""
    latex = " ".join(latex.split())
    for pattern, by in _CLEANED:
        latex = pattern.sub(by, latex)
    return " ".join(latex.split()).rstrip("\\ ")


def _peeled(latex: str) -> str:
    """Cleaned and without what stands around the whole."""
    text = _cleaned(latex).removesuffix(".")
    for pattern, by in _PEELED:
        found = re.fullmatch(pattern, text)
        text = found.expand(by).strip() if found else text
    return text


def words(text: str) -> list[str]:
    """The words of a text, in small letters."""
    return re.findall("[a-z]+", text.lower())


def forms(word: str) -> set[str]:
    """A word as it is and without a plural's ending."""
    return {word, word.removesuffix("s"), word.removesuffix("es")}


def as_box(latex: str) -> str:
    r"""As math-verify reads it, which knows no `\frac\pi2`."""
    for pattern, by in _FRACTIONS:
        latex = re.sub(pattern, by, latex)
    return rf"\boxed{{{latex}}}"
