r"""Judging of answers to MATH questions (Hendrycks et al. 2021).

The answer of a completion is the content of its last `\boxed{}`. The library math-verify compares
it with the correct answer (the gold answer), but it is lenient in ways that a policy learns to
exploit. For example, if the gold answer is 70, it accepts the question copied into the box, such as
`37 + 45 - 12`. Math-verify is therefore used only as the last of these steps:

1. A completion without a closed box, or with more than 300 characters in the last box, has no
   answer.
2. An answer is right if it equals the gold answer up to spaces, harmless LaTeX (`\left`, `\!`,
   `\text{}`, `\dfrac`) and spelling; see `spelled`. Answers with dots or a modulus can be right
   only in this way.
3. If the gold answer is a number, the answer must be a single number with the same value. Sums,
   products, other equations and several numbers are wrong. These rules apply to the number:

   - It can follow a name from the question (`x=3`). It can have round brackets, a dollar or degree
     sign, `{,}` between thousands, or a unit in `\text{}` that occurs in the question, the gold
     answer or `UNITS`.
   - A percent sign is allowed only if the gold answer or the question has one.
   - If the gold answer is a decimal, the answer can also be in scientific notation or a reduced
     fraction. If the gold answer is a fraction, the answer can be any fraction or decimal.
   - If the gold answer states its base (`204_5`), the answer must have the same digits. It must
     also state the base, unless the question names it.
4. An answer is wrong if its form cannot equal the form of the gold answer (see `misshapen`), or if
   it is copied from the question.
5. Math-verify judges all other answers. It receives the gold answer and the answer, each in
   `\boxed{}`. Forms that it misreads are rewritten first: values that are joined by words or have
   two signs (`\pm`) become a list or a union of intervals. A unit is removed if it is separate from
   the expression (the c in `3+2c` is not a unit). The letter i is the imaginary unit if the gold
   answer is complex. Math-verify ignores differences below 2^-54; here, such values are different.

U+2212 and similar signs are always read as a minus. `120,240` can be read as a list or as a number
(see `readings`). An answer is right if any of its readings is right.

These rules reject some right answers:

- numbers that are not evaluated (`2^3` for 8, `6/2` for 3) or that are rounded (`0.333333` for a
  third);
- numbers with a unit outside `\text{}`, with an unknown unit or with a scale (`5\text{ million}`);
- a tuple without parentheses, or a list with parentheses;
- a time or a ratio in another notation;
- right forms that occur literally in the question.

One leniency remains: if the gold answer is not a number, an answer that is not evaluated is right
unless it is copied from the question.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import cast

from grpo_ustat.records import Prompt
from grpo_ustat.tasks.answers import UNITS, after_thoughts, forms, last_boxed, words
from grpo_ustat.tasks.base import spoken
from grpo_ustat.tasks.math_latex import (
    BASES,
    Number,
    bare,
    boxes,
    misshapen,
    named,
    plain,
    read_based,
    read_number,
    spelled,
    unnamed,
)
from grpo_ustat.tasks.math_sets import readings
from grpo_ustat.tasks.verifier import JudgeError, Verdict, Verifier

# Maximum number of characters in a box.
LONGEST_BOX = 300
# If several readings have different verdicts, the verdict that comes last in this order is used.
_PREFERRED = (Verdict.WRONG, Verdict.FAILURE, Verdict.TIMEOUT, Verdict.RIGHT)
# Math-verify cannot read these commands, so such answers are compared as texts.
_BY_TEXT = re.compile(r"\\(?:ldots|pmod)(?![a-zA-Z])")
_DOTS = re.compile(r",?\\ldots,?")
_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
# Examples with which the steps before math-verify are tested in every batch: question, gold answer,
# completion and correct verdict.
CANARIES = (
    ("", "1101_2", r"\boxed{1101_{2}}", Verdict.RIGHT),
    ("", "1101_2", r"\boxed{1101_3}", Verdict.WRONG),
    ("", r"\frac{3}{4}", r"so $\boxed{0.75}$", Verdict.RIGHT),
    ("", r"\frac{3}{4}", r"so $\boxed{\frac12+\frac14}$", Verdict.WRONG),
)


class MathJudge:
    """Judge that gives reward 1 for a right answer in the last box, and 0 otherwise.

    The class implements `tasks.base.Judge`.

    Args:
        verifier: verifier for the answers that this module does not decide.
        longest: maximum number of characters in a box; longer answers get reward 0.
    """

    def __init__(self, verifier: Verifier, longest: int = LONGEST_BOX) -> None:
        self.counts: Counter[str] = Counter(timeouts=0, failures=0)
        self._verifier, self._longest = verifier, longest

    def extract(self, completion: str) -> str | None:
        """Return the content of the completion's last box.

        The result is None if there is no closed box or its content is too long.
        """
        return last_boxed(after_thoughts(completion), self._longest)

    def rewards(self, prompts: list[Prompt], completions: list[str]) -> list[float]:
        """Return 1 or 0 for each completion; a completion that cannot be judged gets 0.

        Completions that cannot be judged are counted in `counts`.

        Raises:
            JudgeError: see `verdicts`.
        """
        pairs = zip(prompts, spoken(prompts, completions), strict=True)
        verdicts = self.verdicts([(prompt.question, prompt.answer, text) for prompt, text in pairs])
        self.counts["timeouts"] += verdicts.count(Verdict.TIMEOUT)
        self.counts["failures"] += verdicts.count(Verdict.FAILURE)
        return [float(verdict is Verdict.RIGHT) for verdict in verdicts]

    def verdicts(self, triples: Sequence[tuple[str, str, str]]) -> list[Verdict]:
        """Return the verdict on each (question, gold answer, completion).

        Math-verify receives all answers that the other steps do not decide in one batch.

        Raises:
            JudgeError: math-verify does not start, or the verdict on a canary (an example with a
                known verdict) is wrong.
        """
        for question, gold, text, expected in CANARIES:
            judged = without_sympy(question, gold, last_boxed(text, LONGEST_BOX))
            if judged is not expected:
                result = "undecided" if judged is None else judged.value
                raise JudgeError(
                    f"the judge of answers is broken: with gold {gold}, answer {text} is "
                    f"{expected.value}, but the verdict was {result}: reinstall grpo_ustat"
                )
        answers = [self.extract(completion) for *_, completion in triples]
        early = [
            without_sympy(question, gold, answer)
            for (question, gold, _), answer in zip(triples, answers, strict=True)
        ]
        # Pairs of gold answer and answer for the verifier, keyed by the index of the answer. There
        # is one pair for each reading that the steps before did not decide.
        late = {
            i: [
                boxes(*read)
                for read in _readings(triples[i][1], cast(str, answers[i]))
                if _judged(triples[i][0], *read) is None
            ]
            for i, verdict in enumerate(early)
            if verdict is None
        }
        pairs = [pair for asked in late.values() for pair in asked]
        verdict_by_pair = dict(zip(pairs, self._verifier.judge(pairs), strict=True))
        for i, asked in late.items():
            early[i] = max((verdict_by_pair[pair] for pair in asked), key=_PREFERRED.index)
        return cast(list[Verdict], early)


def without_sympy(question: str, gold: str, answer: str | None) -> Verdict | None:
    r"""Return the verdict of steps 1 to 4, or None if they do not decide.

    >>> what = "Compute $37 + 45 - 12$."
    >>> answers = ("70", r"\$70.0", r"70\text{ cm}", r"70^\circ", "37+45-12", "140/2", "x=70")
    >>> [without_sympy(what, "70", answer).value for answer in answers]
    ['right', 'right', 'right', 'right', 'wrong', 'wrong', 'wrong']
    """
    if answer is None:
        return Verdict.WRONG
    verdicts = [_judged(question, *read) for read in _readings(gold, answer)]
    return (
        Verdict.RIGHT if Verdict.RIGHT in verdicts else None if None in verdicts else Verdict.WRONG
    )


def _readings(gold: str, answer: str) -> list[tuple[str, str]]:
    """Return all pairs of a reading of the gold answer and a reading of the answer.

    Both texts are first normalised by `spelled`.
    """
    return list(product(readings(spelled(gold)), readings(spelled(answer))))


def _judged(question: str, gold: str, answer: str) -> Verdict | None:
    """Return the verdict of steps 2 to 4 on one reading, or None if they do not decide."""
    if bare(gold) == bare(answer):
        return Verdict.RIGHT
    if _BY_TEXT.search(gold + answer):
        first, second = (_DOTS.sub(r"\\ldots", bare(latex)) for latex in unnamed(gold, answer))
        return Verdict.RIGHT if first.strip("\\{}") == second.strip("\\{}") else Verdict.WRONG
    if (based := read_based(gold)) is not None:
        return Verdict.RIGHT if _states(answer, *based, question) else Verdict.WRONG
    gold_number, answer_number = map(read_number, unnamed(gold, answer))
    if gold_number is not None:
        name = named(answer)[0]
        strange = name and not named(gold)[0] and not _mentions(question, name)
        if (
            answer_number is None
            or strange
            or not _meets(gold_number, answer_number, f"{question} {gold}")
        ):
            return Verdict.WRONG
        worked_out = answer_number.form == gold_number.form or not _copied(answer, question)
        return Verdict.RIGHT if worked_out else Verdict.WRONG
    unfit = misshapen(question, gold, answer) or _copied(answer, question)
    return Verdict.WRONG if unfit else None


def _mentions(question: str, name: str) -> bool:
    """Return True if a question contains the letter of a name, or has no formulas and no digits."""
    letters = re.match(r"\\?[a-zA-Z]+", name)
    mentioned = letters and re.search(
        rf"(?<![a-zA-Z\\]){re.escape(letters[0])}(?![a-zA-Z])", question
    )
    return bool(mentioned) or not re.search(r"[\d$]", question)


def _meets(gold: Number, answer: Number, named: str) -> bool:
    """Return True if an answer equals the gold answer and has an allowed form and unit.

    Args:
        gold, answer: numbers in the gold answer and in the answer.
        named: text of the question and the gold answer. Units that occur in it are allowed.
    """
    if answer.value != gold.value:
        return False
    fractions = {"reduced", "mixed"} if gold.value.denominator > 1 else set()
    if gold.form == "decimal" and answer.form not in {"decimal", "scientific"} | fractions:
        return False
    units = UNITS.union(words(named))
    if gold.percent or "%" in named:
        units.add("percent")
    if answer.percent and "percent" not in units:
        return False
    return all(units & forms(word) for word in answer.words)


def _states(answer: str, digits: str, base: int, question: str) -> bool:
    """Return True if an answer has the given digits and base.

    The answer can omit the base if the question names it.
    """
    if (based := read_based(answer)) is not None:
        return based[1] == base and int(based[0], base) == int(digits, base)
    names = "|".join([str(base), *BASES[base - 2 : base - 1]])
    named = re.search(rf"\bbase[^a-z0-9]{{0,4}}(?:{names})(?![a-z0-9])", question.lower())
    return named is not None and bare(answer).lstrip("0") == digits.lstrip("0")


def _copied(answer: str, question: str) -> bool:
    """Return True if the question contains the answer, but not within a longer number."""
    text, copy = (_COMMA.sub("", bare(latex)) for latex in (plain(question), answer))
    return re.search(rf"(?<![\d.]){re.escape(copy)}(?!\d)", text) is not None
