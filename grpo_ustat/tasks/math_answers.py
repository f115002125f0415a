r"""Judging answers to MATH questions (Hendrycks et al. 2021): the last `\boxed{}` of a completion.

math-verify is lenient in ways that a policy learns to use: for a gold of 70 it accepts the question
copied into the box, `37 + 45 - 12`. It is therefore asked last. In this order, an answer is

1. nothing, if there is no closed box, or more than 300 characters in the last one;
2. right, if it is the gold but for spaces and harmless LaTeX (`\left`, `\!`, `\text{}`, `\dfrac`);
3. where the gold is a number, judged as one: right if it is one number of the same value, possibly
   with a dollar or degree sign, `{,}` between thousands, or a unit in `\text{}` that the question,
   the gold or the list here names. A decimal gold may also be met in scientific notation or by a
   reduced fraction, a gold fraction by any fraction or decimal; never by a sum, a product, an
   equation or several numbers. A percent sign needs one in the gold or the question. A gold that
   names its base (`204_5`) needs its digits, and its base unless the question names that;
4. wrong, if its form cannot answer for the gold's, see `misshapen`, or if it is copied out of the
   question;
5. otherwise what math-verify says of gold and answer, both in `\boxed{}`.

The price: right answers refused are numbers not worked out (`2^3` for 8, `6/2` or `x=3` for 3) or
rounded (`0.333333` for a third), with a unit outside `\text{}`, an unknown one or a scale
(`5\text{ million}`), a tuple without its parentheses or a list with them, a time or a ratio in
another writing, and right forms that stand in the question as they are. What is left of the
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
from grpo_ustat.tasks.verifier import JudgeError, Verdict, Verifier

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
BASES = (  # from 2 on
    "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen",
)  # fmt: skip
FITTING = {  # shapes of answers to each shape of a gold
    "one": {"one", "list", "set", "tuple", "named", "range"},
    "range": {"one", "list", "set", "tuple", "named", "range"},
    "list": {"one", "list", "set", "named"},
    "set": {"one", "list", "set"},
    "named": {"list", "tuple", "named"},
    "tuple": {"tuple", "named"},
}
CANARIES = (  # question, gold, completion, for the steps before math-verify
    ("", "1101_2", r"\boxed{1101_{2}}", Verdict.RIGHT),
    ("", "1101_2", r"\boxed{1101_3}", Verdict.WRONG),
    ("", r"\frac{3}{4}", r"so $\boxed{0.75}$", Verdict.RIGHT),
    ("", r"\frac{3}{4}", r"so $\boxed{\frac12+\frac14}$", Verdict.WRONG),
)
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
_UNEQUAL = re.compile(r"\\(?:[lg]eq?|[lg]eqslant|[lg]t|neq?)(?![a-zA-Z])|>")
_IN = re.compile(r"^\s*[a-zA-Z] ?\\in(?![a-zA-Z])")
_RELATION = re.compile("[<=]")
_NAME = re.compile(r"[a-zA-Z]|[a-zA-Z]\([a-z]\)|\([a-z](?:,[a-z])+\)")
_SPACES = re.compile(r"(?<!\d)\s+|\s+(?!\d)")  # not between two digits: 1 2 is not 12


@dataclass(frozen=True)
class Number:
    """A number as an answer writes it: its value, and how."""

    value: Fraction
    form: str  # "decimal", "scientific", "mixed", "reduced" or "unreduced"
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
            JudgeError: math-verify does not start, or what is known is judged wrongly, by it or by
                the steps before it, which judge the canaries in every batch.
        """
        _prove()
        answers = [self.extract(completion) for *_, completion in asked]
        early = [
            without_sympy(question, gold, answer)
            for (question, gold, _), answer in zip(asked, answers, strict=True)
        ]
        undecided = [i for i, verdict in enumerate(early) if verdict is None]
        late = self._verifier.judge([(_sent(asked[i][1]), _sent(answers[i])) for i in undecided])
        found = dict(zip(undecided, late, strict=True))
        return [found.get(i, verdict) for i, verdict in enumerate(early)]


def _prove() -> None:
    for question, gold, text, expected in CANARIES:
        judged = without_sympy(question, gold, last_boxed(text, LONGEST))
        if judged is not expected:
            found = "undecided" if judged is None else judged.value
            raise JudgeError(
                f"the judge of answers is broken: gold {gold} and answer {text} are "
                f"{expected.value}, judged {found}: install grpo_ustat afresh"
            )


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
    if (based := read_based(gold)) is not None:
        return Verdict.RIGHT if _states(answer, *based, question) else Verdict.WRONG
    if (wanted := read_number(gold)) is not None:
        given = read_number(answer)
        right = given is not None and _meets(wanted, given, f"{question} {gold}")
        if right and (given.form == wanted.form or not _copied(answer, question)):
            return Verdict.RIGHT
        return Verdict.WRONG
    unfit = misshapen(question, gold, answer) or _copied(answer, question)
    return Verdict.WRONG if unfit else None


def _meets(wanted: Number, given: Number, named: str) -> bool:
    """Whether a number answers for a gold number; units come from `named`, question and gold."""
    if given.value != wanted.value:
        return False
    fractions = {"reduced", "mixed"} if wanted.value.denominator > 1 else set()
    if wanted.form == "decimal" and given.form not in {"decimal", "scientific"} | fractions:
        return False
    known = UNITS.union(_words(named))
    if wanted.percent or "%" in named:
        known.add("percent")
    if given.percent and "percent" not in known:
        return False
    return all(known & _forms(word) for word in given.words)


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


def _states(answer: str, digits: str, base: int, question: str) -> bool:
    """Whether an answer has these digits and this base, or none where the question names it."""
    if (given := read_based(answer)) is not None:
        return given[1] == base and int(given[0], base) == int(digits, base)
    names = "|".join([str(base), *BASES[base - 2 : base - 1]])
    named = re.search(rf"\bbase[^a-z0-9]{{0,4}}(?:{names})(?![a-z0-9])", question.lower())
    return named is not None and bare(answer).lstrip("0") == digits.lstrip("0")


def misshapen(question: str, gold: str, answer: str) -> bool:
    r"""Whether an answer that is not the gold's text has a form that cannot answer for it.

    A time, a ratio or a subscript of digits is met by its text alone; a tuple by a tuple; a list by
    a list or a set. An answer to a gold without a relation has none but of one name and what it
    is (`x=5`, `0<x<2`), and a range answers only for an interval.

    >>> pairs = ("6:00", "6"), ("(1,2)", r"\{1,2\}"), (r"\pi", r"\pi=\pi"), ("[0,1)", r"x^2<x")
    >>> [misshapen("", *pair) for pair in pairs], misshapen("", "[0,1)", r"0\le x<1")
    ([True, True, True, True], False)
    """
    gold, answer = (bare(_UNEQUAL.sub("<", _IN.sub("", latex))) for latex in (gold, answer))
    if re.search(r"\d:\d|\d_", gold) or (re.search(r"[\d})]_", answer) and "_" not in gold):
        return True
    gold, answer = (re.sub(r"_\{[^{}]*\}", "", text) for text in (gold, answer))  # of sums: k=1
    wanted, given = _shape(gold), _shape(answer)
    if _RELATION.search(answer) and not _RELATION.search(gold):
        if not all(map(_says_of_one_name, _parts(answer))):
            return True
        if given == "range" and wanted == "tuple":
            return not _is_interval(gold, question)
    return given not in FITTING[wanted]


def _shape(text: str) -> str:
    """One of `FITTING`: "named" is a list such as x=1,y=2, "range" what an inequality says."""
    parts = _parts(text)
    if len(parts) > 1:
        names = [part[0] for part in parts if re.match("[a-zA-Z]=", part)]
        return "named" if len(set(names)) == len(parts) and names == sorted(names) else "list"
    if "=" not in text and _RELATION.search(text):
        return "range"
    text = text.rpartition("=")[2]
    if len(_parts(text[1:-1])) > 1 and text[0] in "([" and text[-1] in ")]":
        return "tuple"
    return "set" if text.startswith("\\{") and text.endswith("\\}") else "one"


def _parts(text: str) -> list[str]:
    """Split at the commas outside brackets; at none where a bracket closes that was not open."""
    depth, cuts = 0, [-1]
    for i, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if depth < 0:
            return [text]
        if sign == "," and not depth:
            cuts.append(i)
    return [text[a + 1 : b] for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]


def _says_of_one_name(part: str) -> bool:
    """Whether a part has no relation, or one between a name and terms without it."""
    terms = _RELATION.split(part)
    names = [term for term in terms if _NAME.fullmatch(term)]
    if len(terms) == 1:
        return True
    if len(names) != 1 or len(terms) > 3 or ("=" in part and terms != [*names, terms[1]]):
        return False
    letters = set(re.findall("[a-zA-Z]", names[0].partition("(")[0] or names[0]))
    others = [re.sub(r"\\[a-zA-Z]+", "", term) for term in terms if term != names[0]]
    return not letters.intersection("".join(others))


def _is_interval(gold: str, question: str) -> bool:
    """Whether a pair in brackets is surely no point."""
    return "\\infty" in gold or gold[0] + gold[-1] != "()" or "interval" in question.lower()


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
    found = _NUMBER.fullmatch(_peeled(latex))
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


def _sent(latex: str) -> str:
    r"""As math-verify reads it, which knows no `\frac\pi2`."""
    for pattern, by in _FRACTIONS:
        latex = re.sub(pattern, by, latex)
    return rf"\boxed{{{latex}}}"
