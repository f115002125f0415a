r"""Strict extraction of the final answer from a completion.

A completion has an answer only if it states exactly one final number. The number is read from the
first of the following places that the completion contains:

- a line with the mark `####` (from GSM8K, Cobbe et al. 2021). The first marked line that states a
  number is used; lm-evaluation-harness (Gao et al.) also takes the first match. Text after that
  line is ignored, because models often continue; base models even append new questions and answer
  them. Headings (`#### Step 1`) and echoed instructions (`write #### and the answer`) state no
  final number and are skipped. Five `#` are not a mark;
- a single `\boxed{}`;
- the whole completion.

An echoed question, an equation, several numbers, several boxes, or two marks on one line do not
count as an answer. On a marked line or in a box, a unit from `UNITS` can follow the number (`####
18 dollars`). For a reasoning model, only the text after its thoughts (reasoning) is read; see
`after_thoughts`.
"""

from __future__ import annotations

import re
from decimal import Decimal

from grpo_ustat.config.data import MARK

BOXES = ("\\boxed{", "\\fbox{")
# Pairs of marks that begin and end thoughts in chat templates.
THOUGHTS = (
    ("<think>", "</think>"), ("<thinking>", "</thinking>"), ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"), ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"), ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
)  # fmt: skip
# Maximum number of digits of a number.
MAX_DIGITS = 30
# Maximum length of a number in characters, including its sign, commas and spaces.
MAX_NUMBER = 60
# Maximum number of words after a number.
MAX_WORDS = 5
# Maximum length in characters of a text that is read as one number, such as the text after a mark.
MAX_MARKED = 120
TEXTS = ("text", "textbf", "textit", "textrm", "mbox", "mathrm", "mathbf", "mathit")
LATEX_WRAPPERS = (
    ("**", "**"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), *((box, "}") for box in BOXES),
    *((rf"\{name}{{", "}") for name in TEXTS),
)  # fmt: skip
UNITS = {
    "mm", "cm", "m", "km", "inch", "foot", "feet", "ft", "yard", "mile", "in", "degree",
    "radian", "square", "cubic", "sq", "cu", "unit", "second", "minute", "hour", "day",
    "week", "month", "year", "dollar", "cent", "gram", "g", "kg", "pound", "ounce", "liter",
    "ml", "mph", "per", "point",
}  # fmt: skip
# Words that are not units, because they change the value of the number before them. Their plurals
# also count.
NO_UNITS = {
    "half", "halve", "quarter", "third", "dozen", "doz", "hundred", "thousand", "million",
    "billion", "trillion", "quadrillion", "quintillion", "zillion", "lakh", "crore", "ten",
    "twentie", "factorial",
}  # fmt: skip
# More such words, and words that express doubt. Only these forms count, because a plural, such as
# logs, can have another meaning.
NO_UNIT = {
    "or", "and", "not", "no", "but", "out", "times", "minus", "plus", "over", "squared", "cubed",
    "added", "subtracted", "multiplied", "divided", "power", "raised", "mod", "modulo", "choose",
    "log", "ln", "sqrt", "root", "pi", "doubled", "halved", "tripled", "twice", "thrice", "double",
    "triple", "dz", "gross", "score", "mil", "bn", "grand", "kilo", "below", "negative", "wrong",
    "incorrect", "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety",
}  # fmt: skip
MINUS = str.maketrans(dict.fromkeys("\u2212\ufe63\uff0d\u2010\u2011\u2012\u2013", "-"))
_MARK = re.compile(rf"(?<!#){MARK}(?!#)")
# The quantifiers are possessive, so that matching takes linear time.
_MARKED = re.compile(rf"{_MARK.pattern}\s*+(?P<line>[^\n#]*+)(?:\n|\Z)")
# Thousands separators in LaTeX and in typeset text.
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\[,;:!]|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
_DOLLAR = r"(?:\\?[$€£¥])?"
_NUMBER = re.compile(
    rf"(?P<before>[+-]?){_DOLLAR}(?P<after>[+-]?)"
    rf"(?P<digits>(?:[0-9]{{1,3}}(?:,[0-9]{{3}})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+){_DOLLAR}"
)
_WORDS = r"[a-zA-Z][a-zA-Z ./-]*"
# A number followed by a separate unit.
_MEASURED = re.compile(
    rf"(?P<number>[^a-zA-Z]*[\d$])(?: |\\[,;: ]|~)*"
    rf"(?:(?<=[ ,;:~])(?P<word>{_WORDS})|\\(?:{'|'.join(TEXTS)})\{{[ ~]*(?P<unit>{_WORDS})\}})\.?"
)


def after_thoughts(completion: str, prompt: str = "") -> str:
    """Return the text of a completion after the end of its last thoughts.

    Thoughts are the reasoning that a model writes before its answer. The result is the whole
    completion if it has no thoughts, and empty if the thoughts do not end.

    Args:
        prompt: text before the completion; it can end with the mark that begins thoughts.

    >>> after_thoughts("<think>7</think> 8"), after_thoughts("8"), after_thoughts("7? 8", "<think>")
    (' 8', '8', '')
    """
    opened = any(prompt.rstrip().endswith(begin) for begin, _ in THOUGHTS)
    ended = [(completion.rfind(end), end) for _, end in THOUGHTS]
    at, end = max(ended)
    rest = completion[at + len(end) :] if at >= 0 else completion
    begun = (opened and at < 0) or any(begin in rest for begin, _ in THOUGHTS)
    return "" if begun else rest


def final_number(text: str, any_unit: bool = False) -> Decimal | None:
    r"""Return the number stated as the final answer in `text`, or None, in linear time.

    Args:
        text: completion.
        any_unit: True to accept a number that is followed by words that are not in `UNITS`, such as
            `#### 12 apples`. This is tried only if no final number is found otherwise. Words that
            change the value are never accepted.

    On a marked line, spaces, `**`, `$...$`, `\(...\)`, `\[...\]` and a box around the number are
    ignored. If there is a box on or before that line, it must contain the same number.

    >>> [str(final_number(t)) for t in ("37+45=82, 82-12=70 #### 70", r"so \boxed{-1,070.50}.")]
    ['70', '-1070.50']
    >>> final_number(" $18.00. ") == final_number(r"**#### $\boxed{18}$**") == 18
    True
    >>> final_number("#### Step 1\n9+9\n#### 18\n\nQuestion: 3+4?\n#### 7") == 18
    True
    >>> str(final_number(r"#### 18 dollars")), str(final_number(r"\boxed{9{,}500}"))
    ('18', '9500')
    >>> echoes = ("37+45-12", "1 2 3", "x=3", "6/2", r"3\%", r"\boxed{4=3}", "#### 12 apples")
    >>> [final_number(t) for t in (*echoes, "#### 3 #### 3", r"\boxed{3} or \boxed{3}", "####")]
    [None, None, None, None, None, None, None, None, None, None]
    """
    text = after_thoughts(text)
    value = _final_number(text, False)
    return _final_number(text, True) if value is None and any_unit else value


def _final_number(text: str, any_unit: bool) -> Decimal | None:
    marked, end = _marked(text, any_unit)
    read = text[:end]
    boxes = sum(map(read.count, BOXES))
    if boxes > 1:
        return None
    boxed = measured(last_boxed(read, MAX_MARKED) or "", any_unit) if boxes else None
    if marked is not None:
        return marked if not boxes or marked == boxed else None
    return boxed if boxes else number(_unwrapped(text))


def _marked(text: str, any_unit: bool) -> tuple[Decimal | None, int]:
    """Return the number on the first line with #### that states one, and the end of that line.

    If no marked line states a number, return None and the length of the text.
    """
    # The pattern matches at most once per line, at the last mark of the line.
    for match in _MARKED.finditer(text):
        before = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
        # In **#### 12**, the first asterisks are before the mark. They are added to the line, so
        # that both pairs of asterisks are removed together.
        line = ("**" if before.count("**") % 2 else "") + match["line"]
        value = None if _MARK.search(before) else measured(line, any_unit)
        if value is not None:
            return value, match.end()
    return None, len(text)


def measured(text: str, any_unit: bool = False) -> Decimal | None:
    r"""Return the number in a short text; None if it has more than a number, unit and formatting.

    Args:
        text: rest of a line after its mark, or content of a box.
        any_unit: see `final_number`.

    >>> [str(measured(t)) for t in ("18 dollars", r"$18\text{ miles per hour}$.", "18 thousand")]
    ['18', '18', 'None']
    """
    text = _unwrapped(text)
    match = _MEASURED.fullmatch(text)
    if match is None:
        return number(text)
    text = match["unit"] or match["word"]
    unit = words(text)
    # A single letter is a variable, not a unit.
    other = any_unit and len(unit) <= MAX_WORDS and len(unit[0]) > 1
    is_unit = other or all(UNITS & forms(word) for word in unit)
    millions = re.search(r"\b[KMBT]{1,2}\b", text) or (
        len(unit[0]) == 1 and unit[1:] and unit[1] != "per"
    )
    changed = "percent" in "".join(unit) or any(map(changes_value, unit))
    return number(match["number"]) if is_unit and not (changed or millions) else None


def _unwrapped(text: str) -> str:
    """Strip spaces and formatting around a short text; return "" for a long text."""
    text = text.strip() if len(text) <= MAX_MARKED else ""
    inner = text.removesuffix(".").rstrip()
    for left, right in LATEX_WRAPPERS:
        if inner.startswith(left) and inner.endswith(right) and len(inner) > len(left):
            return _unwrapped(inner[len(left) : -len(right)])
    return text


def words(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return re.findall("[a-z]+", text.lower())


def changes_value(word: str) -> bool:
    """Return True if a word after a number changes the number's value, such as dozens or tenths.

    >>> [changes_value(word) for word in ("dozens", "fifteenths", "months", "pies", "logs")]
    [True, True, False, False, False]
    """
    singular = word.removesuffix("s")
    part = singular.endswith("th") and singular not in UNITS
    return part or word in NO_UNIT or bool(NO_UNITS & {word, singular})


def forms(word: str) -> set[str]:
    """Return a word as it is, without a final s, and without a final es."""
    return {word, word.removesuffix("s"), word.removesuffix("es")}


def number(text: str) -> Decimal | None:
    """Return the number if the text consists of a single number, and None otherwise.

    The number can have a sign (including the minus U+2212), a currency sign, thousands separators
    (commas, `{,}` or thin spaces), surrounding spaces, one full stop, and at most 30 ASCII digits.
    """
    text = _THOUSANDS.sub(",", text.strip().translate(MINUS))
    match = _NUMBER.fullmatch(text.removesuffix(".")) if len(text) <= MAX_NUMBER else None
    if match is None or (match["before"] and match["after"]):
        return None
    digits = match["digits"].replace(",", "")
    if len(digits) - digits.count(".") > MAX_DIGITS:
        return None
    return Decimal(match["before"] + match["after"] + digits)


def plain(value: Decimal) -> str:
    """Format a number as it appears in logs and gold answers.

    >>> [plain(Decimal(text)) for text in ("18.00", "-0.50", "+1000", "-0")]
    ['18', '-0.5', '1000', '0']
    """
    text = f"{value:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def stated(text: str, any_unit: bool = False) -> str | None:
    """Return the final number of a text, formatted by `plain`; None if there is none."""
    value = final_number(text, any_unit)
    return None if value is None else plain(value)


def last_boxed(text: str, longest: int) -> str | None:
    r"""Return the content of the last `\boxed{...}` or `\fbox{...}` in a text, in linear time.

    The result is None if there is no box, the box is not closed, or its content is too long.

    Args:
        text: completion; escaped braces do not count as braces.
        longest: maximum length of the content in characters.

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
