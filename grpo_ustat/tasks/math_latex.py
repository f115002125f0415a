r"""Parsing of LaTeX answers: unification of spellings, removal of units, extraction of numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import gcd

from grpo_ustat.tasks.answers import MINUS, UNITS, changes_value, forms, number, words
from grpo_ustat.tasks.math_sets import both_joined, both_signs, parts, turned

# Names of number bases, starting with base 2.
BASES = (
    "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen",
)  # fmt: skip
# Text in braces; it can itself contain braces, but only one level deep.
_BRACED = r"\{((?:[^{}]|\{[^{}]*\})*)\}"
_UNICODE = MINUS | str.maketrans({
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≡": r"\equiv ", "∈": r"\in ", "∞": r"\infty ",
    "±": r"\pm ", "∓": r"\mp ", "×": r"\times ", "·": r"\cdot ", "√": r"\sqrt ", "°": r"^\circ ",
    "∪": r"\cup ", "∩": r"\cap ", "∖": r"\setminus ", "∅": r"\emptyset ", "…": "...", "⋯": "...",
    "π": r"\pi ", "θ": r"\theta ", "²": "^2 ", "³": "^3 ", "ℂ": r"\mathbb{C}", "ℕ": r"\mathbb{N}",
    "ℚ": r"\mathbb{Q}", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}",
})  # fmt: skip
_MOD = r"(?:\\(?:text|mathrm|operatorname) ?\{ ?mod ?\}|(?:\\[bp]?|(?<![a-zA-Z\\]))mod(?![a-zA-Z]))"
_MODULUS = r"(?:\s|~|\\[,;: ])*(?:\{\s*(\w+)\s*\}|(\w+))"
_CIS = r"\\(?:cis(?![a-zA-Z])|(?:text|mathrm|operatorname) ?\{ ?cis ?\})\s*"
_SPELLINGS = [(re.compile(pattern), by) for pattern, by in (
    (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\s*(?=[()\[\]|\\])", ""),
    # Thousands separators.
    (r"(?<=\d)(?:\{,\}|,\\!|\\[,;:!]|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))", ""),
    (r"(?:^|(?<=[,=/(+*-])|(?<=, ))\{([-+]?[\d.]+)\}(?![{^_\d])", r"\1"),
    (r"(?:^|(?<=/)|(?<=/ ))\(([-+]?\d+)\)(?=$| ?/)", r"\1"),
    (r"\\(?:[lc]?dots|dots[cbmio])(?![a-zA-Z])|\.\.\.", r"\\ldots "),
    (r"\\(?:mathbb|Bbb) ?\{? ?([CNQRZ])(?: ?\}|(?![a-zA-Z]))", r"\\mathbb{\1}"),
    (r"\\geqslant(?![a-zA-Z])|>=", r"\\ge "), (r"\\leqslant(?![a-zA-Z])|<=", r"\\le "),
    (r"\\(?:smallsetminus|backslash)(?![a-zA-Z])", r"\\setminus "),
    (r"\\varnothing(?![a-zA-Z])|\\\{ ?\\\}", r"\\emptyset "),
    (r"^(.+?)\\neq?(?![a-zA-Z])\s*([a-zA-Z])$", r"\2\\ne \1"),
    (r"\\log ?_ ?(?:e(?![a-zA-Z])|\{ ?e ?\})", r"\\ln "),
    (r"\\lg(?![a-zA-Z])", r"\\log_{10} "),
    (rf"\(\s*{_MOD}{_MODULUS}\s*\)|\s*{_MOD}{_MODULUS}", r"\\pmod{\1\2\3\4}"),
    (rf"{_CIS}(\([^()]*\)|\{{[^{{}}]*\}}|[^-+,;()]+)", r"(\\cos(\1)+i\\sin(\1))"),
)]  # fmt: skip
_WORDS_OF_SETS = re.compile(
    r"(?:(?:the )?set of )?(?:(?:all|any) )?(?:(?P<kind>real|complex|rational|natural) numbers?"
    r"|(?P<plural>reals|integers)|(?<=all )real(?: values?)?)(?: (?:of )?\$?[a-z]\$?)?"
)
_EVERY_NUMBER = re.compile(
    r"\( ?- ?\\infty ?, ?\+? ?\\infty ?\)|- ?\\infty ?< ?[a-zA-Z] ?< ?\+? ?\\infty"
)
_CASES = re.compile(r"\\begin\{cases\}(.*)\\end\{cases\}", re.DOTALL)
_IF = re.compile(
    r"[.,;](?=\}\s*$)|\\text ?\{ ?(?:if|for|when) ?\}|[\s,.;]+$|\\q?quad(?![a-zA-Z])|\\ "
)
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))")
_ANGULAR = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
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
    # A thin space between thousands.
    (r"(?<=\d)\\[,;:](?=\d)", ","),
    (r"\\[,;: ]|~", " "),
    (r"\^ ?(?:\{ ?\\circ ?\}|\\circ(?![a-zA-Z]))|\\degree(?![a-zA-Z])", "°"),
)
_CLEANED = [(re.compile(pattern), by) for pattern, by in _REPLACED]
_TEXT = r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf|underline) ?"
# Wrappers around a whole answer, which are removed.
_PEELED = (
    (rf"{_TEXT}\{{ ?([\d.,]+) ([a-zA-Z][a-zA-Z ./-]*)\}}", r"\1 \\text{\2}"),
    (rf"(?:{_TEXT})?{_BRACED}", r"\1"),
    (r"([+-]?) ?\(([^()]*)\)( ?(?:/|°|\\?%|\\text).*)?", r"\1\2\3"),
)
_UNIT = rf"{_TEXT}\{{(?P<unit>[a-zA-Z.,/ -]*)(?:\^[23])?\}}(?:\^ ?\{{?[23]\}}?)?"
_SPACED = r"(?:\s|~|\\[,;: ]|\\q?quad(?![a-zA-Z]))"
# Math-verify drops text commands, so a single letter is moved out of its command.
_TEXT_LETTER = (rf"{_TEXT}\{{ ?([a-zA-Z]) ?\}}", r" \1")
# A unit after a complete value, outside braces.
_APART = re.compile(
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
    r"|(?P<over>\d{1,30}) ?/ ?(?P<under>\d{1,30})|(?P<decimal>[\d,]*\.?\d+)"
    r"(?: ?\\(?:times|cdot) ?10 ?\^ ?(?:(?P<power>\d)|\{ ?(?P<powers>-?\d{1,2}) ?\}))?)"
    rf" ?°? ?(?P<percent>\\?%)? ?(?:{_UNIT})?\$?",
    re.ASCII,
)
_DIGITS = "-?[0-9A-Z]+"
# Spaces between two digits are kept, because 1 2 is not 12.
_SPACES = re.compile(r"(?<!\d)\s+|\s+(?!\d)")

# For each shape of a gold (correct) answer, the shapes of answers that can equal it.
FITTING = {
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
# A name before an equals sign.
_LONG_NAME = re.compile(
    r"(?P<letter>[a-zA-Z]|\\(?:alpha|beta|gamma|theta|lambda|mu|phi|omega))"
    r"(?:_(?:\w|\{\w+\}))?(?:'|\^\{-1\})?(?:\(\w\))?"
    r"|[A-Z]{2,3}|m?\\angle[A-Z]{1,3}|\([a-z](?:,[a-z])+\)"
)
# An equals sign outside brackets.
_EQUALS = re.compile(r"(?:=|\\equiv(?![a-zA-Z]))(?![^()]*\))")
_CLOSED = re.compile(r"\([^()]*\)")
_RELATED = re.compile(r"[<>=]|\\(?:[lg]eq?|[lg]t|neq?|in|equiv)(?![a-zA-Z])")


@dataclass(frozen=True)
class Number:
    """Number stated by an answer, with its value and the form in which it is written."""

    value: Fraction
    # One of "decimal", "scientific", "mixed" (number and fraction), "reduced" and "unreduced"
    # (fractions).
    form: str
    percent: bool
    # Words of the number's unit.
    words: list[str]


def spelled(latex: str) -> str:
    r"""Normalise the spelling of an answer.

    The text is first rewritten by `plain`. Then braces or brackets around the whole answer are
    removed, cases become pairs, angles are converted to radians, and names of number sets become
    letters.

    >>> spelled("x ≥ 3"), spelled(r"\text{all reals}"), spelled("((5))")
    ('x \\ge  3', '\\mathbb{R}', '5')
    >>> spelled(r"\cos 60^\circ"), spelled(r"\begin{cases} 1 & \text{if } x<0 \\ 2 \end{cases}")
    ('\\cos \\frac{60\\pi}{180}', '(1,x<0),2')
    """
    text = _unwrapped(_CASES.sub(_pairs_of_cases, plain(latex)).strip())
    if _ANGULAR.search(text):
        text = _DEGREES.sub(r"\\frac{\1\\pi}{180}", text)
    unformatted = re.sub(rf"{_TEXT}\{{([^{{}}]*)\}}", r"\1", text).removesuffix(".").lower()
    name_of_set = _WORDS_OF_SETS.fullmatch(" ".join(unformatted.split()))
    if name_of_set:
        letter = {"complex": "C", "rational": "Q", "natural": "N", "integers": "Z"}
        return rf"\mathbb{{{letter.get(name_of_set['kind'] or name_of_set['plural'], 'R')}}}"
    inner = _IN.sub("", text).strip()
    return r"\mathbb{R}" if _EVERY_NUMBER.fullmatch(inner) or inner == r"\mathbb{R}" else text


def plain(latex: str) -> str:
    """Rewrite LaTeX so that each symbol has one spelling; the text can also be a question."""
    text = latex.translate(_UNICODE).strip()
    for pattern, by in _SPELLINGS:
        text = pattern.sub(by, text)
    return text


def _unwrapped(text: str) -> str:
    """Strip braces around LaTeX, and round brackets unless they enclose a list."""
    depths = list(accumulate((sign in "([{") - (sign in ")]}") for sign in text))
    inner = text[1:-1].strip()
    enclosed = text[:1] in ("{", "(") and inner and 0 not in depths[:-1] and not depths[-1]
    if not enclosed or (text[0] == "(" and len(parts(inner)) > 1):
        return text
    return _unwrapped(inner)


def _pairs_of_cases(match: re.Match[str]) -> str:
    """Rewrite each case as a pair (value, condition), or as its value if it has no condition."""
    rows = [
        [_IF.sub("", cell).strip() for cell in row.split("&")]
        for row in re.split(r"\\\\(?:\[[^\]]*\])?", match[1])
        if row.strip()
    ]
    return ",".join(f"({','.join(row)})" if len(row) > 1 else row[0] for row in rows)


def unnamed(gold: str, answer: str) -> tuple[str, str]:
    r"""Return gold answer and answer without the names of their values, such as the x in `x=5`.

    Names are removed if both use the same name, or if one of them uses no name. If the gold answer
    has several names and the answer has none, both become tuples, so that the order of the values
    matters.

    >>> unnamed("5", "x=5"), unnamed("f(x)=2x", "2x"), unnamed("1,2", "x=1,x=2")
    (('5', '5'), ('2x', '2x'), ('1,2', '1, 2'))
    >>> unnamed("x=5", "y=5"), unnamed("5", "2x=5"), unnamed("a=1,b=2", "2,1")
    (('x=5', 'y=5'), ('5', '2x=5'), ('(1,2)', '(2,1)'))
    """
    names, values = zip(*map(named, (gold, answer)), strict=True)
    if _shape(bare(gold)) == "named" and not _RELATED.search(answer):
        values = ",".join(named(part)[1] for part in parts(gold))
        return f"({values})", answer if answer.startswith("(") else f"({answer})"
    nameless = [_RELATED.search(_CLOSED.sub("", latex)) is None for latex in (gold, answer)]
    return values if names[0] == names[1] or any(nameless) else (gold, answer)


def named(latex: str) -> tuple[str, str]:
    """Return the name in a text and its value; "" and the text if it has no name or several."""
    names, values = set(), []
    for part in parts(latex):
        terms = _EQUALS.split(part, maxsplit=1)
        if not _LONG_NAME.fullmatch(bare(terms[0])):
            terms.reverse()
        name = _LONG_NAME.fullmatch(bare(terms[0])) if len(terms) == 2 else None
        value = terms[-1].strip()
        letters = re.sub(r"\\[a-zA-Z]+", "", value)
        circular = name and name["letter"] and name["letter"] in letters
        if circular or len(terms) == 2 and not name or _RELATED.search(_CLOSED.sub("", value)):
            return "", latex
        names |= {name[0]} if name else set()
        values.append(value)
    return (names.pop(), ", ".join(values)) if len(names) == 1 else ("", latex)


def read_based(latex: str) -> tuple[str, int] | None:
    r"""Return the digits and base of a number with an explicit base; None for any other text.

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
    r"""Remove spaces and decoration from LaTeX, so that equal answers become equal texts.

    >>> bare(r"\left( \dfrac12,\, 1{,}000 \right)."), bare(r"\text{ 1 2 }")
    ('(\\frac{1}{2},1,000)', '1 2')
    """
    text = re.sub(_TEXT + r"\{([^{}]*)\}", r" \1 ", _cleaned(latex))
    text = re.sub(r"\\?\$", "", text)
    text = _SPACES.sub("", text).removesuffix(".")
    return text[1] if re.fullmatch(r"\([A-Z]\)", text) else text


def read_number(latex: str) -> Number | None:
    r"""Return the number if a LaTeX text consists of a single number, and None otherwise.

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
    """Normalise spaces, fractions and degrees in LaTeX."""
    latex = " ".join(latex.translate(MINUS).split())
    for pattern, by in _CLEANED:
        latex = pattern.sub(by, latex)
    return " ".join(latex.split()).rstrip("\\ ")


def boxes(gold: str, answer: str) -> tuple[str, str]:
    r"""Return gold answer and answer in boxes, in the form that math-verify needs.

    Fractions are written with braces, and minus signs as `-`. Values that are joined by words
    become a list, and intervals that are joined by words become a union. A unit that is separate
    from the expression is removed. Thousands separators were removed before, so every comma between
    digits separates values, and a space is inserted after it.
    """
    gold, answer = without_words(gold, answer)
    for pattern, by in (*_FRACTIONS, _TEXT_LETTER):
        gold, answer = re.sub(pattern, by, gold), re.sub(pattern, by, answer)
    gold, answer = (re.sub(r"(?<=\d),(?=\d)", ", ", latex) for latex in (gold, answer))
    return rf"\boxed{{{gold}}}", rf"\boxed{{{answer}}}"


def without_words(gold: str, answer: str) -> tuple[str, str]:
    """Return gold answer and answer without units, names of values, and words between values.

    A value with two signs is written out as two values, and ranges are written in ascending order.
    """
    first, second = (without_unit(latex.translate(MINUS)) for latex in (gold, answer))
    first, second = (
        ",".join(map(_unwrapped, parts(latex))) for latex in both_joined(first, second)
    )
    first, second = unnamed(first, second)
    return turned(both_signs(first)), turned(both_signs(second))


def without_unit(latex: str) -> str:
    r"""Remove the unit after a LaTeX expression.

    A unit must be separate from the expression. It is either a text command with words that do not
    change the value, or plain letters that form a unit from `UNITS`. The last letter of an
    expression such as `3t` is not a unit.

    >>> [without_unit(x) for x in (r"2\pi\text{ cm}^2", r"\sqrt{2}\,cm", "3t", r"\pi h")]
    ['2\\pi', '\\sqrt{2}', '3t', '\\pi h']
    """
    match = _APART.fullmatch(latex)
    unit = words(match["text"] or match["plain"]) if match else []
    if match is None or not unit or any(map(changes_value, unit)):
        return latex
    is_listed = all(UNITS & forms(word) for word in unit)
    if (match["plain"] and not is_listed) or _letter(latex, unit):
        return latex
    return without_unit(match["value"])


def _letter(latex: str, unit: list[str]) -> bool:
    r"""Return True if an apparent unit is a mathematical symbol.

    Examples are the e in `2\mathrm{e}`, and the t in `3\text{t}` because it directly follows a
    number.
    """
    if len(unit) != 1 or len(unit[0]) > 1 or unit[0] in UNITS:
        return False
    separated = re.search(rf"{_SPACED}\\[a-z]+ ?\{{|\{{{_SPACED}", latex)
    return unit[0] in "ei" or "\\math" in latex or not separated


def misshapen(question: str, gold: str, answer: str) -> bool:
    r"""Return True if an answer cannot equal the gold answer because of its form.

    The caller has already found that the two texts differ. These rules apply:

    - A gold answer that is a time or a ratio, or has a subscript of digits, can equal only the same
      text, so the result is True.
    - The shapes of the two answers must be compatible; see `FITTING`.
    - If the gold answer has no relation such as `=` or `<`, relations in the answer can only state
      the value or the range of a name (`x=5`, `0<x<2`). A range can equal only an interval.

    >>> pairs = ("6:00", "6"), ("(1,2)", r"\{1,2\}"), (r"\pi", r"\pi=\pi"), ("[0,1)", r"x^2<x")
    >>> [misshapen("", *pair) for pair in pairs], misshapen("", "[0,1)", r"0\le x<1")
    ([True, True, True, True], False)
    """
    gold, answer = without_words(gold, answer)
    gold, answer = (bare(_UNEQUAL.sub("<", _IN.sub("", latex))) for latex in (gold, answer))
    if re.search(r"\d:\d|\d_", gold) or (re.search(r"[\d})]_", answer) and "_" not in gold):
        return True
    # Subscripts of sums, such as k=1, are not relations of the answer and are ignored.
    gold, answer = (re.sub(r"_\{[^{}]*\}", "", text) for text in (gold, answer))
    gold_shape, answer_shape = _shape(gold), _shape(answer)
    if _RELATION.search(answer) and not _RELATION.search(gold):
        if not all(map(_says_of_one_name, parts(answer))):
            return True
        if answer_shape == "range" and gold_shape == "tuple":
            certain = "\\infty" in gold or gold[0] + gold[-1] != "()"
            return not (certain or "interval" in question.lower())
    return answer_shape not in FITTING[gold_shape]


def _shape(text: str) -> str:
    """Return the shape of an answer, which is a key of `FITTING`.

    For example, x=1,y=2 is "named", an inequality is a "range", and (1,2) is a "tuple".
    """
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
    """Return True if a part has no relation, or states the value or range of a single name."""
    terms = _RELATION.split(part)
    names = [term for term in terms if _NAME.fullmatch(term)]
    if len(terms) == 1:
        return True
    if len(names) != 1 or len(terms) > 3 or ("=" in part and terms != [*names, terms[1]]):
        return False
    letters = set(re.findall("[a-zA-Z]", names[0].partition("(")[0] or names[0]))
    others = [re.sub(r"\\[a-zA-Z]+", "", term) for term in terms if term != names[0]]
    return not letters.intersection("".join(others))
