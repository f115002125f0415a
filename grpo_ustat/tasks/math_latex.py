r"""Reading LaTeX answers: their text without decoration, and the numbers that they are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from math import gcd

from grpo_ustat.tasks.answers import MINUS, UNITS, changes_value, forms, number, words
from grpo_ustat.tasks.math_sets import both_joined, parts

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
    (r"\\q?quad(?![a-zA-Z])", " "),
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
_SPACED = r"(?:\s|~|\\[,;: ]|\\q?quad(?![a-zA-Z]))"
_TEXT_LETTER = (rf"{_TEXT}\{{ ?([a-zA-Z]) ?\}}", r" \1")  # math-verify drops texts
_APART = re.compile(  # a unit behind a value that ends, outside of braces
    rf"(?P<value>.*?[^\s~\\=+*/^_<>(,;:&|-]){_SPACED}*"
    r"(?:\\(?P<kind>math(?:rm|bf|it)|text(?:normal|bf|it|rm)?|mbox) ?"
    r"\{(?P<text>[^{}\\]*)(?:\^[23])?\}"
    r"|(?<=[\s~,;: ])(?P<plain>[a-zA-Z][a-zA-Z./ ]+))"
    r"(?: ?\^ ?(?:\d|\{ ?\d ?\}))?[\s.]*",
    re.DOTALL,
)
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

FITTING = {  # shapes of answers to each shape of a gold
    "one": {"one", "list", "set", "tuple", "named", "range"},
    "range": {"one", "list", "set", "tuple", "named", "range"},
    "list": {"one", "list", "set", "named"},
    "set": {"one", "list", "set"},
    "named": {"list", "tuple", "named"},
    "tuple": {"tuple", "named"},
}
_UNEQUAL = re.compile(r"\\(?:[lg]eq?|[lg]eqslant|[lg]t|neq?)(?![a-zA-Z])|>")
_IN = re.compile(r"^\s*[a-zA-Z] ?\\in(?![a-zA-Z])")
_RELATION = re.compile("[<=]")
_NAME = re.compile(r"[a-zA-Z]|[a-zA-Z]\([a-z]\)|\([a-z](?:,[a-z])+\)")


@dataclass(frozen=True)
class Number:
    """A number as an answer writes it: its value, and how."""

    value: Fraction
    form: str  # "decimal", "scientific", "mixed", "reduced" or "unreduced"
    percent: bool
    words: list[str]  # of its unit


def read_based(latex: str) -> tuple[str, int] | None:
    r"""The digits and the base of a number that states its base, or None.

    >>> [read_based(t) for t in ("204_5", r"204_{\text{five}}", "1A_{16}", "204_3", "x_1", "204")]
    [('204', 5), ('204', 5), ('1A', 16), None, None, None]
    """
    match = re.fullmatch(rf"({_DIGITS})_(?:(\d)|\{{(?:base)?(\d\d?|[a-z]+)\}})", bare(latex))
    if match is None:
        return None
    digits, name = match[1], match[2] or match[3]
    base = int(name) if name.isdigit() else BASES.index(name) + 2 if name in BASES else 0
    valid = 2 <= base <= 36 and all(int(d, 36) < base for d in digits.lstrip("-"))
    return (digits, base) if valid else None


def bare(latex: str) -> str:
    r"""LaTeX without spaces and decoration, so that equal answers are equal texts.

    >>> bare(r"\left( \dfrac12,\, 1{,}000 \right)."), bare(r"\text{ 1 2 }")
    ('(\\frac{1}{2},1,000)', '1 2')
    """
    text = re.sub(_TEXT + r"\{([^{}]*)\}", r" \1 ", _cleaned(latex))
    text = re.sub(r"\\?\$", "", text)
    text = _SPACES.sub("", text).removesuffix(".")
    return text[1] if re.fullmatch(r"\([A-Z]\)", text) else text


def read_number(latex: str) -> Number | None:
    r"""The number that a LaTeX text consists of and nothing else, or None.

    >>> [str(read_number(t).value) for t in (r"-\frac{2}{4}", r"1\tfrac34", r"\$1{,}000.50", "7/2")]
    ['-1/2', '7/4', '2001/2', '7/2']
    >>> [read_number(t) for t in ("1 2", "6+1", "x=7", r"5\text{ million}", "1,00", r"\frac{1}{0}")]
    [None, None, None, None, None, None]
    """
    text = _cleaned(latex).removesuffix(".")
    for pattern, by in _PEELED:
        wrapped = re.fullmatch(pattern, text)
        text = wrapped.expand(by).strip() if wrapped else text
    match = _NUMBER.fullmatch(text)
    if match is None or (value := _value(match)) is None:
        return None
    unit = words(match["unit"] or "")
    if any(map(changes_value, unit)) or _letter(match[0], unit):
        return None
    sign = -1 if match["sign"] == "-" else 1
    return Number(sign * value, _form(match), bool(match["percent"]) or "percent" in unit, unit)


def _value(match: re.Match[str]) -> Fraction | None:
    if match["decimal"]:
        value = number(match["decimal"])
        power = int(match["power"] or match["powers"] or 0)
        return None if value is None else Fraction(value) * Fraction(10) ** power
    above, below = _fraction(match)
    if not below or (match["whole"] and min(above, below) < 0):
        return None
    return Fraction(int(match["whole"] or 0) * below + above, below)


def _form(match: re.Match[str]) -> str:
    if match["power"] or match["powers"]:
        return "scientific" if 1 <= float(match["decimal"].replace(",", "")) < 10 else "unreduced"
    if match["decimal"]:
        return "decimal"
    above, below = _fraction(match)
    if gcd(above, below) > 1 or (match["whole"] and above > below):
        return "unreduced"
    return "mixed" if match["whole"] else "reduced"


def _fraction(match: re.Match[str]) -> tuple[int, int]:
    return int(match["p"] or match["over"]), int(match["q"] or match["under"])


def _cleaned(latex: str) -> str:
    """LaTeX with one spelling of spaces, fractions and degrees; at most one space in a row."""
    latex = " ".join(latex.translate(MINUS).split())
    for pattern, by in _CLEANED:
        latex = pattern.sub(by, latex)
    return " ".join(latex.split()).rstrip("\\ ")


def boxes(gold: str, answer: str) -> tuple[str, str]:
    r"""Gold and answer in boxes, as math-verify needs them: fractions with braces, a minus as `-`,
    values and intervals joined by words as a list and a union, no unit that stands apart.
    """
    gold, answer = without_words(gold, answer)
    for pattern, by in (*_FRACTIONS, _TEXT_LETTER):
        gold, answer = re.sub(pattern, by, gold), re.sub(pattern, by, answer)
    return rf"\boxed{{{gold}}}", rf"\boxed{{{answer}}}"


def without_words(gold: str, answer: str) -> tuple[str, str]:
    """Gold and answer without units and without words between several values."""
    first, second = (without_unit(latex.translate(MINUS)) for latex in (gold, answer))
    return both_joined(first, second)


def without_unit(latex: str) -> str:
    r"""LaTeX without the unit behind it: a text that changes no value, or several letters that are
    one of `UNITS`, apart from the expression. A last letter of the expression is none.

    >>> [without_unit(x) for x in (r"2\pi\text{ cm}^2", r"\sqrt{2}\,cm", "3t", r"\pi h")]
    ['2\\pi', '\\sqrt{2}', '3t', '\\pi h']
    """
    match = _APART.fullmatch(latex)
    unit = words(match["text"] or match["plain"]) if match else []
    if match is None or not unit or any(map(changes_value, unit)):
        return latex
    known = all(UNITS & forms(word) for word in unit)
    if (match["plain"] and not known) or _letter(latex, unit):
        return latex
    return without_unit(match["value"])


def _letter(latex: str, unit: list[str]) -> bool:
    r"""Whether what looks like a unit is a letter of mathematics, as the e of `2\mathrm{e}` is, and
    the t of `3\text{t}`, which stands at its number.
    """
    if len(unit) != 1 or len(unit[0]) > 1 or unit[0] in UNITS:
        return False
    apart = re.search(rf"{_SPACED}\\[a-z]+ ?\{{|\{{{_SPACED}", latex)
    return unit[0] in "ei" or "\\math" in latex or not apart


def misshapen(question: str, gold: str, answer: str) -> bool:
    r"""Whether an answer that is not the gold's text has a form that cannot answer for it.

    A time, a ratio or a subscript of digits is met by its text alone; a tuple by a tuple; a list by
    a list or a set. An answer to a gold without a relation has none but of one name and what it
    is (`x=5`, `0<x<2`), and a range answers only for an interval.

    >>> pairs = ("6:00", "6"), ("(1,2)", r"\{1,2\}"), (r"\pi", r"\pi=\pi"), ("[0,1)", r"x^2<x")
    >>> [misshapen("", *pair) for pair in pairs], misshapen("", "[0,1)", r"0\le x<1")
    ([True, True, True, True], False)
    """
    gold, answer = without_words(gold, answer)
    gold, answer = (bare(_UNEQUAL.sub("<", _IN.sub("", latex))) for latex in (gold, answer))
    if re.search(r"\d:\d|\d_", gold) or (re.search(r"[\d})]_", answer) and "_" not in gold):
        return True
    gold, answer = (re.sub(r"_\{[^{}]*\}", "", text) for text in (gold, answer))  # of sums: k=1
    gold_shape, answer_shape = _shape(gold), _shape(answer)
    if _RELATION.search(answer) and not _RELATION.search(gold):
        if not all(map(_says_of_one_name, parts(answer))):
            return True
        if answer_shape == "range" and gold_shape == "tuple":
            certain = "\\infty" in gold or gold[0] + gold[-1] != "()"
            return not (certain or "interval" in question.lower())
    return answer_shape not in FITTING[gold_shape]


def _shape(text: str) -> str:
    """One of `FITTING`: "named" is a list such as x=1,y=2, "range" what an inequality says."""
    listed = parts(text)
    if len(listed) > 1:
        names = [part[0] for part in listed if re.match("[a-zA-Z]=", part)]
        return "named" if len(set(names)) == len(listed) and names == sorted(names) else "list"
    if "=" not in text and _RELATION.search(text):
        return "range"
    text = text.rpartition("=")[2]
    if len(parts(text[1:-1])) > 1 and text[0] in "([" and text[-1] in ")]":
        return "tuple"
    return "set" if text.startswith("\\{") and text.endswith("\\}") else "one"


def _says_of_one_name(part: str) -> bool:
    """Whether a part has no relation, or one between a single name and terms without it."""
    terms = _RELATION.split(part)
    names = [term for term in terms if _NAME.fullmatch(term)]
    if len(terms) == 1:
        return True
    if len(names) != 1 or len(terms) > 3 or ("=" in part and terms != [*names, terms[1]]):
        return False
    letters = set(re.findall("[a-zA-Z]", names[0].partition("(")[0] or names[0]))
    others = [re.sub(r"\\[a-zA-Z]+", "", term) for term in terms if term != names[0]]
    return not letters.intersection("".join(others))
