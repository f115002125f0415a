r"""Judging answers to MATH questions (Hendrycks et al. 2021): the last `\boxed{}` of a completion.

math-verify is lenient in ways that a policy learns to use: for a gold of 70 it accepts the question
copied into the box, `37 + 45 - 12`. It is therefore asked last. In this order, an answer is

1. nothing, if there is no closed box, or more than 300 characters in the last one;
2. right, if it is the gold but for spaces and harmless LaTeX (`\left`, `\!`, `\text{}`, `\dfrac`);
3. where the gold is a number, judged as one: right if it is one number of the same value, possibly
   with a dollar or degree sign, `{,}` between thousands, or a unit in `\text{}` that the question,
   the gold or the list here names. A decimal gold may also be met by a reduced fraction, a gold
   fraction by any fraction or decimal; never by a sum, a product, an equation or several numbers.
   A percent sign needs one in the gold or the question;
4. wrong, if it is copied out of the question;
5. otherwise what math-verify says of gold and answer, both in `\boxed{}`.

The price: right answers refused are numbers not worked out (`2^3` for 8, `6/2` or `x=3` for 3) or
rounded (`0.333333` for a third), with a unit outside `\text{}`, an unknown one or a scale
(`5\text{ million}`), and right forms that stand in the question as they are. What is left of the
leniency: for a gold that is no number, a form that is not worked out earns, unless it is a copy.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd

from grpo_ustat.records import Prompt
from grpo_ustat.tasks.answers import last_boxed, number
from grpo_ustat.tasks.verifier import Verdict, Verifier

LONGEST = 300  # characters of a box
UNITS = {
    "mm", "cm", "m", "km", "inch", "foot", "feet", "ft", "yard", "mile", "in", "degree",
    "radian", "square", "cubic", "sq", "cu", "unit", "second", "minute", "hour", "day",
    "week", "month", "year", "dollar", "cent", "gram", "g", "kg", "pound", "ounce", "liter",
    "ml", "mph", "per", "point",
}  # fmt: skip
NO_UNITS = {  # they change the value, or hedge
    "or", "and", "not", "times", "minus", "plus", "over", "squared", "cubed", "factorial",
    "half", "third", "fifth", "tenth", "hundredth", "thousandth", "dozen", "hundred", "thousand",
    "million", "billion", "trillion",
}  # fmt: skip
_REPLACED = (
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\frac ?(\d) ?(\d)", r"\\frac{\1}{\2}"),
    (r"\\sqrt ?(\d)", r"\\sqrt{\1}"),
    (r"\\(?:left|right|displaystyle)(?![a-zA-Z])|\\!", ""),
    (r"\{,\}", ","),
    (r"(?<=\d)\\[,;:](?=\d)", ","),  # a thin space between thousands
    (r"\\[,;: ]|~", " "),
    (r"\^ ?(?:\{ ?\\circ ?\}|\\circ(?![a-zA-Z]))|\\degree(?![a-zA-Z])", "°"),
)
_CLEANED = [(re.compile(pattern), by) for pattern, by in _REPLACED]
_TEXT = r"\\(?:text|textbf|textit|textrm|mbox|mathrm) ?"
_UNIT = rf"{_TEXT}\{{(?P<unit>[a-zA-Z.,/ -]*)(?:\^[23])?\}}(?:\^ ?\{{?[23]\}}?)?"
_NUMBER = re.compile(
    r"(?:\\?\$)?(?P<sign>[+-]?)(?:\\?\$)? ?"
    r"(?:(?P<whole>\d{1,30})? ?\\frac ?\{(?P<p>-?\d{1,30})\} ?\{(?P<q>\d{1,30})\}"
    r"|(?P<over>\d{1,30})/(?P<under>\d{1,30})|(?P<decimal>[\d,]*\.?\d+))"
    rf" ?°? ?(?P<percent>\\?%)? ?(?:{_UNIT})?\$?",
    re.ASCII,
)
_SPACES = re.compile(r"(?<!\d)\s+|\s+(?!\d)")  # not between two digits: 1 2 is not 12


@dataclass(frozen=True)
class Number:
    """A number as an answer writes it: its value, and how."""

    value: Fraction
    form: str  # "decimal", "mixed", "reduced" or "unreduced"
    percent: bool
    words: list[str]  # of its unit


class MathJudge:
    """1 for the right answer in the last box of a completion, else 0; a `tasks.base.Judge`.

    Args:
        verifier: judges what this module cannot.
        longest: characters of a box; longer ones earn nothing.
    """

    def __init__(self, verifier: Verifier, longest: int = LONGEST) -> None:
        self.counts: Counter[str] = Counter(timeouts=0, failures=0)
        self._verifier, self._longest = verifier, longest

    def extract(self, completion: str) -> str | None:
        """The content of the last box."""
        return last_boxed(completion, self._longest)

    def rewards(self, prompts: list[Prompt], completions: list[str]) -> list[float]:
        """1 or 0 for each completion of its prompt; what was not judged is 0 and counted.

        Raises:
            JudgeError: see `verdicts`.
        """
        pairs = zip(prompts, completions, strict=True)
        found = self.verdicts([(prompt.question, prompt.answer, text) for prompt, text in pairs])
        self.counts["timeouts"] += found.count(Verdict.TIMEOUT)
        self.counts["failures"] += found.count(Verdict.FAILURE)
        return [float(verdict is Verdict.RIGHT) for verdict in found]

    def verdicts(self, asked: Sequence[tuple[str, str, str]]) -> list[Verdict]:
        """The verdict on each (question, gold, completion), in one batch of the verifier.

        Raises:
            JudgeError: math-verify does not start, or judges what is known wrongly.
        """
        answers = [self.extract(completion) for *_, completion in asked]
        early = [
            without_sympy(question, gold, answer)
            for (question, gold, _), answer in zip(asked, answers, strict=True)
        ]
        undecided = [i for i, verdict in enumerate(early) if verdict is None]
        late = self._verifier.judge([(_boxed(asked[i][1]), _boxed(answers[i])) for i in undecided])
        found = dict(zip(undecided, late, strict=True))
        return [found.get(i, verdict) for i, verdict in enumerate(early)]


def without_sympy(question: str, gold: str, answer: str | None) -> Verdict | None:
    r"""The verdict where steps 1 to 4 find one, else None.

    >>> what = "Compute $37 + 45 - 12$."
    >>> answers = ("70", r"\$70.0", r"70\text{ cm}", r"70^\circ", "37+45-12", "140/2", "x=70")
    >>> [without_sympy(what, "70", answer).value for answer in answers]
    ['right', 'right', 'right', 'right', 'wrong', 'wrong', 'wrong']
    """
    if answer is None:
        return Verdict.WRONG
    if bare(gold) == bare(answer):
        return Verdict.RIGHT
    if (wanted := read_number(gold)) is not None:
        given = read_number(answer)
        right = given is not None and _meets(wanted, given, f"{question} {gold}")
        if right and (given.form == wanted.form or not _copied(answer, question)):
            return Verdict.RIGHT
        return Verdict.WRONG
    return Verdict.WRONG if _copied(answer, question) else None


def _meets(wanted: Number, given: Number, named: str) -> bool:
    """Whether a number answers for a gold number; units come from `named`, question and gold."""
    if given.value != wanted.value:
        return False
    fraction_too = given.form == "reduced" and wanted.value.denominator > 1
    if wanted.form == "decimal" and given.form != "decimal" and not fraction_too:
        return False
    known = UNITS.union(_words(named))
    if wanted.percent or "%" in named:
        known.add("percent")
    if given.percent and "percent" not in known:
        return False
    return all(known & _forms(word) for word in given.words)


def _words(text: str) -> list[str]:
    return re.findall("[a-z]+", text.lower())


def _forms(word: str) -> set[str]:
    """A word as it is and without a plural's ending."""
    return {word, word.removesuffix("s"), word.removesuffix("es")}


def _copied(answer: str, question: str) -> bool:
    """Whether the question contains the answer, not as a part of longer numbers."""
    copy = rf"(?<![\d.]){re.escape(bare(answer))}(?!\d)"
    return re.search(copy, bare(question)) is not None


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
    found = _NUMBER.fullmatch(_cleaned(latex).removesuffix("."))
    value = None if found is None else _value(found)
    if value is None:
        return None
    words = _words(found["unit"] or "")
    if any(NO_UNITS & _forms(word) for word in words):
        return None
    sign = -1 if found["sign"] == "-" else 1
    return Number(sign * value, _form(found), bool(found["percent"]) or "percent" in words, words)


def _value(found: re.Match[str]) -> Fraction | None:
    if found["decimal"]:
        value = number(found["decimal"])
        return None if value is None else Fraction(value)
    above, below = _fraction(found)
    return Fraction(int(found["whole"] or 0) * below + above, below) if below else None


def _form(found: re.Match[str]) -> str:
    if found["decimal"]:
        return "decimal"
    if found["whole"]:
        return "mixed"
    return "reduced" if gcd(*_fraction(found)) == 1 else "unreduced"


def _fraction(found: re.Match[str]) -> tuple[int, int]:
    return int(found["p"] or found["over"]), int(found["q"] or found["under"])


def _cleaned(latex: str) -> str:
    """In one writing of spaces, fractions and degrees, one space at most between two signs."""
    latex = " ".join(latex.split())
    for pattern, by in _CLEANED:
        latex = pattern.sub(by, latex)
    return " ".join(latex.split())


def _boxed(latex: str) -> str:
    return rf"\boxed{{{latex}}}"
