r"""Several values in one LaTeX answer: lists, and ranges or intervals that are joined by words.

Math-verify misreads such answers, so they are rewritten. For example:

- `x=1 \text{ or } x=2` is the list `x=1,x=2`.
- `x<1 \text{ or } x>2` and `(-\infty,1) \text{ or } (2,\infty)` are unions of intervals.
- `x>1 \text{ and } x<2` is the range `1<x<2`.
- `1\pm 2` is the list `1+2,1-2`.
- `100,200` is either a list or a number with a thousands separator.
"""

from __future__ import annotations

import re
from itertools import product

# Maximum number of signs `\pm` and `\mp` in one part of an answer.
MAX_SIGNS = 3
# The quantifier is possessive, so it never backtracks.
_SPACE = r"(?:\s|~|\\[,;: ]|\\q?quad(?![a-zA-Z]))*+"
_COMMANDS = r"\\(?:text|textnormal|textit|textrm|textbf|mbox|mathrm|operatorname)"
_LINK = r"(and|or|union)"
# The pattern has three groups, so every fourth piece of a split is a value.
_JOINT = re.compile(
    rf"{_SPACE},?{_SPACE}(?:{_COMMANDS} ?\{{{_SPACE},?{_SPACE}{_LINK}{_SPACE}\}}"
    rf"|(?<![a-zA-Z\\]){_LINK}(?![a-zA-Z])|\\(lor|vee|land|wedge)(?![a-zA-Z])){_SPACE}"
)
_BOTH = re.compile(rf"(?:{_COMMANDS} ?\{{{_SPACE}(?:both|either){_SPACE}\}}|(?:both|either)(?= ))")
_WHOLE = re.compile(rf"{_COMMANDS} ?\{{([^{{}}]*)\}}")
_LETTER_U = re.compile(
    rf"([)\]]){_SPACE}(?:U|{_COMMANDS}\{{ ?U ?\}}){_SPACE}(?=(?:\\left ?)?[(\[])"
)
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_BRACKETS = re.compile(r"\\(?:left|right)(?![a-zA-Z])|\\!")
_SIGNS = (
    (r"\\geq?(?![a-zA-Z])|\\geqslant(?![a-zA-Z])|>=|≥", "≥"), (r"\\gt(?![a-zA-Z])", ">"),
    (r"\\leq?(?![a-zA-Z])|\\leqslant(?![a-zA-Z])|<=|≤", "≤"), (r"\\lt(?![a-zA-Z])", "<"),
    (r"\\neq?(?![a-zA-Z])|≠", "≠"),
)  # fmt: skip
_SIGN = re.compile("([<>≤≥≠=])")
_IN = re.compile(r"([a-zA-Z]) ?\\in(?![a-zA-Z])(.*)")
_LETTER = re.compile(r"[a-zA-Z]|\\(?:theta|alpha|beta|lambda|mu|phi)")
_TURNED = {"≥": "≤", ">": "<", "=": "=", "≠": "≠"}

_TWO_SIGNS = re.compile(r"\\(?:pm|mp)(?![a-zA-Z])")
# Digits that can contain thousands separators.
_RUN = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d|,\d)")
_BRACKET = re.compile(rf"{_COMMANDS} ?\{{|\\?[{{}}]|[()\[\]]")


def readings(latex: str) -> list[str]:
    r"""Return the possible readings of LaTeX that has commas between digits.

    A comma between digits separates thousands or the values of a list. Thousands separators are
    removed, and a space is inserted after each comma of a list. If the text does not show which of
    the two is meant, the result has two readings: first the list, then the number.

    >>> readings("120,240"), readings("0,100"), readings("-100,100"), readings(r"(100,200)")
    (['120, 240', '120240'], ['0, 100'], ['-100, 100'], ['(100, 200)'])
    >>> readings("1,000"), readings(r"\$1,234"), readings(r"\sqrt{1,234}"), readings("10,100,200")
    (['1000'], ['\\$1234'], ['\\sqrt{1234}'], ['10, 100, 200'])
    """
    runs = list(_RUN.finditer(latex))
    kinds = [_kind(latex[: run.start()], run[0], latex[run.end() :]) for run in runs]
    texts = []
    for undecided in ("list", "number") if "either" in kinds else ("list",):
        text, end = "", 0
        for run, kind in zip(runs, kinds, strict=True):
            is_list = (undecided if kind == "either" else kind) == "list"
            text += latex[end : run.start()] + run[0].replace(",", ", " if is_list else "")
            end = run.end()
        texts.append(text + latex[end:])
    return texts


def _kind(before: str, run: str, behind: str) -> str:
    """Classify digits with commas between groups of three as a "list", a "number" or "either".

    They are a list in these cases: they begin with 0; they are inside the brackets of a set, a
    point or an interval; they are two opposite numbers; or at least two groups follow the first
    group, and all of these are multiples of 100.

    They are a number in these cases: a group after the first begins with 0; a dollar sign precedes
    them; decimals follow them; or they are inside braces, as in a fraction.

    Args:
        before: text before the digits.
        run: digits with commas.
        behind: text after the digits.
    """
    first, *groups = run.split(",")
    opened = [""]
    for bracket in _BRACKET.findall(before):
        if bracket in ("}", "\\}", ")", "]"):
            opened.pop() if len(opened) > 1 else None
        else:
            opened.append("" if len(bracket) > 2 else bracket)
    if first[0] == "0":
        return "list"
    if any(group[0] == "0" for group in groups):
        return "number"
    if opened[-1] in ("(", "[", "\\{"):
        return "list"
    if opened[-1] or before.rstrip().endswith("$") or re.match(r"\.\d", behind):
        return "number"
    hundreds = len(groups) > 1 and all(group.endswith("00") for group in groups)
    opposite = before.rstrip().endswith("-") and groups == [first]
    return "list" if hundreds or opposite else "either"


def both_signs(latex: str) -> str:
    r"""Expand each part that contains `\pm` or `\mp` into the list of its values.

    A part with one sign or with `\mp` has two values, one for the upper signs and one for the lower
    signs. Any other part has one value for each combination of signs.

    >>> both_signs(r"\frac{1\pm 2}{3},4"), both_signs(r"(1\pm 2,\mp 3)"), both_signs(r"\{\pm 1\}")
    ('\\frac{1+ 2}{3},\\frac{1- 2}{3},4', '(1+ 2,- 3),(1- 2,+ 3)', '\\{+ 1,- 1\\}')
    """
    if latex.startswith("\\{") and latex.endswith("\\}") and "\\}" not in latex[2:-2]:
        return rf"\{{{both_signs(latex[2:-2])}\}}"
    return ",".join(form for part in parts(latex) for form in _signed(part))


def turned(latex: str) -> str:
    r"""Rewrite ranges with two ends so that the lower end comes first.

    >>> turned(r"4\ge x>1"), turned("1<x<4"), turned("x>1")
    ('1<x\\le 4', '1<x<4', 'x>1')
    """
    return ",".join(map(_turned, parts(latex)))


def _turned(part: str) -> str:
    text = part
    for pattern, sign in _SIGNS:
        text = re.sub(pattern, sign, text)
    pieces = _SIGN.split(text)
    if len(pieces) < 4 or not {*pieces[1::2]} <= {"≥", ">"}:
        return part
    less = {"≥": r"\le ", ">": "<"}
    return "".join(less.get(piece, piece.strip()) for piece in reversed(pieces))


def _signed(part: str) -> list[str]:
    """Return the values of a part; see `both_signs`.

    A part with more than `MAX_SIGNS` signs is returned unchanged.
    """
    signs = _TWO_SIGNS.findall(part)
    if not signs or len(signs) > MAX_SIGNS:
        return [part]
    upper = ["+" if sign == "\\pm" else "-" for sign in signs]
    lower = ["-" if sign == "+" else "+" for sign in upper]
    together = [upper, lower] if "\\mp" in signs else product("+-", repeat=len(signs))
    forms = []
    for chosen in together:
        rest = iter(chosen)
        forms.append(_TWO_SIGNS.sub(lambda _, rest=rest: next(rest), part))
    return forms


def parts(text: str) -> list[str]:
    """Split the text at commas outside brackets; do not split it if brackets do not match."""
    depth, cuts = 0, [-1]
    for i, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if depth < 0:
            return [text]
        if sign == "," and not depth:
            cuts.append(i)
    return [text[a + 1 : b] for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]


def both_joined(gold: str, answer: str) -> tuple[str, str]:
    """Apply `joined` to both texts in the same way.

    If one of the texts separates ranges by commas, the ranges of both texts become lists.
    """
    intervals = any(re.search(r"\\cup(?![a-zA-Z])", latex) for latex in (gold, answer))
    listed = any(
        _JOINT.search(latex) is None and len(parts(latex)) > 1 and _compares(latex)
        for latex in (gold, answer)
    )
    return joined(gold, intervals, not listed), joined(answer, intervals, not listed)


def joined(latex: str, intervals: bool = False, unions: bool = True) -> str:
    r"""Rewrite values joined by words as a list.

    Intervals, and ranges of a single letter, become a union or an intersection. LaTeX with other
    words is returned unchanged.

    Args:
        intervals: True if a pair in round brackets is certainly an interval, not a point.
        unions: True if ranges can become a union; False if they become a list.

    >>> joined(r"x=1 \text{ or } x=2"), joined("1, 2, and 3"), joined(r"\text{Ann and Bo}")
    ('x=1,x=2', '1,2,3', '\\text{Ann and Bo}')
    >>> joined(r"x<1 \text{ or } 2\le x"), joined(r"x>1\text{ and }x\le 2")
    ('(-\\infty,1)\\cup[2,\\infty)', '1<x\\le 2')
    """
    text = _LETTER_U.sub(r"\1\\cup ", latex.strip())
    text_only = _WHOLE.fullmatch(text)
    pieces = _JOINT.split(text_only[1] if text_only else text)
    links = {piece for i, piece in enumerate(pieces) if i % 4 and piece}
    listed = [value.strip() for piece in pieces[::4] for value in parts(_BOTH.sub("", piece))]
    listed = [value for value in listed if value]
    if (
        not links
        or len(listed) < 2
        or re.search("[a-zA-Z]{2}", _COMMAND.sub(" ", " ".join(listed)))
    ):
        return text
    names, sets = zip(*map(_interval, listed), strict=True)
    compared = any(map(_compares, listed))
    certain = intervals or compared or any(re.search(r"\\infty|^\[|\]$", value) for value in listed)
    if not (certain and unions and all(sets)) or len({*names} - {""}) > 1:
        return ",".join(listed)
    if not links & {"and", "land", "wedge"} or not compared:
        return r"\cup".join(sets)
    return _common(max(names), list(sets)) if links <= {"and", "land", "wedge"} else text


def _compares(latex: str) -> bool:
    """Return True if the LaTeX contains an inequality sign."""
    for pattern, sign in _SIGNS:
        latex = re.sub(pattern, sign, latex)
    return bool(re.search("[<>≤≥≠]", latex))


def _interval(part: str) -> tuple[str, str]:
    r"""Return the letter of a range, and the range as an interval or a set.

    The first value is "" if there is no letter, and the second is "" if the part is not a range.

    >>> _interval("0<x<2"), _interval(r"x \ne 3"), _interval("[0,1)"), _interval("x<x+1")
    (('x', '(0,2)'), ('x', '((-\\infty,3)\\cup(3,\\infty))'), ('', '[0,1)'), ('', ''))
    """
    name, text = "", _BRACKETS.sub("", part).strip()
    if match := _IN.fullmatch(text):
        name, text = match[1], match[2].strip()
    for pattern, sign in _SIGNS:
        text = re.sub(pattern, sign, text)
    pieces = [piece.strip() for piece in _SIGN.split(text)]
    terms, signs = pieces[::2], pieces[1::2]
    if not signs:
        pair = len(parts(text[1:-1])) == 2 and text[0] in "([" and text[-1] in ")]"
        return name, text if pair or "\\cup" in text or text[:2] == "\\{" else rf"\{{{text}\}}"
    if all(sign in _TURNED for sign in signs):
        terms, signs = terms[::-1], [_TURNED[sign] for sign in signs[::-1]]
    names = [term for term in terms if _LETTER.fullmatch(term)]
    values = [term for term in terms if term not in names]
    if len(names) != 1 or not all(values) or any(names[0] in value for value in values):
        return "", ""
    at = terms.index(names[0])
    if len(terms) == 2 and signs[0] in "=≠":
        value = values[0]
        out = rf"((-\infty,{value})\cup({value},\infty))"
        return names[0], out if signs[0] == "≠" else rf"\{{{value}\}}"
    if any(sign not in "<≤" for sign in signs) or (at, len(terms)) not in ((0, 2), (1, 2), (1, 3)):
        return "", ""
    low = {"<": "(", "≤": "["}[signs[0]] + terms[0] if at else r"(-\infty"
    high = terms[-1] + {"<": ")", "≤": "]"}[signs[-1]] if at < len(terms) - 1 else r"\infty)"
    return names[0], f"{low},{high}"


def _common(name: str, sets: list[str]) -> str:
    """Intersect ranges of the same letter.

    Two ranges, one with only a lower end and one with only an upper end, become one range with both
    ends. Other ranges are joined by an intersection sign.
    """
    low = [interval for interval in sets if interval.endswith(r",\infty)")]
    high = [interval for interval in sets if interval.startswith(r"(-\infty,")]
    if len(sets) != 2 or len(low) != 1 or len(high) != 1 or low == high:
        return r"\cap".join(sets)
    less = {"(": "<", "[": r"\le ", ")": "<", "]": r"\le "}
    left, right = low[0].removesuffix(r",\infty)"), high[0].removeprefix(r"(-\infty,")
    return f"{left[1:]}{less[left[0]]}{name}{less[right[-1]]}{right[:-1]}"
