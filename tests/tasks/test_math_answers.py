"""Judging MATH answers: what comes before math-verify, and that it is stricter."""

from __future__ import annotations


import pytest

from grpo_ustat.records import Prompt
from grpo_ustat.tasks.math_answers import MathJudge, bare, read_number, without_sympy
from grpo_ustat.tasks.verifier import Verdict, Verifier

RIGHT, WRONG, _, _ = Verdict
QUESTION = r"Simplify $\frac{6}{8} + \frac15$ of 12 marbles, or what $37 + 45 - 12$ is."


class Asked:
    """A verifier that notes what it is asked."""

    def __init__(self):
        self.pairs = []

    def judge(self, pairs):
        self.pairs += pairs
        return [RIGHT] * len(pairs)


@pytest.mark.parametrize(
    "gold, answers",
    [
        ("70", ["70", "70.0", "70.", r"70^\circ", r"70^{\circ}", r"\$70", "$70$", r"70\text{ cm}",
                r"70 \text{ cm}^2", r"70\mbox{ inches}", r"70\text{ square units}", "+70",
                r"70\text{ marbles}", r"70\,\text{cm}", r" 7\!0 "]),
        ("1000", ["1000", "1,000", "1{,}000", r"1,\!000", r"1\,000", r"\$1,000.00"]),
        (r"\$1{,}000", ["1000", r"\$1000"]), (r"60^\circ", ["60", "60.0", r"60\text{ degrees}"]),
        (r"12\text{ cm}", ["12", r"12\text{ inches}"]), ("-3", ["-3", "- 3", "-3.0"]),
        ("0.5", [".5", "0.50", r"\frac{1}{2}", r"\frac12", "1/2", r"\dfrac{1}{2}"]),
        (r"\frac{3}{4}", ["3/4", r"\tfrac34", "0.75", r"\frac{9}{12}"]),
        (r"\frac{7}{4}", [r"1\frac{3}{4}", "1.75"]), (r"-\frac{1}{2}", [r"\frac{-1}{2}", "-0.5"]),
        (r"25\%", ["25", r"25\%", "25%", r"25\text{ percent}"]),
        (r"\text{Evelyn}", ["Evelyn", r"\textbf{Evelyn}"]), (r"\text{(C)}", ["C", "(C)"]),
        (r"\left(3, \frac{\pi}{2}\right)", [r"(3,\dfrac{\pi}{2})", r"( 3,\ \frac {\pi}{2} )"]),
    ],
)  # fmt: skip
def test_right_without_sympy(gold, answers):
    for answer in answers:
        assert without_sympy(QUESTION, gold, answer) is RIGHT, answer


@pytest.mark.parametrize(
    "gold, answers",
    [
        ("70", ["37 + 45 - 12", "37+45-12", "140/2", r"\frac{140}{2}", "x=70", "4=70", "70=70",
                r"70\%", "7 0", "70^2", r"70\text{ or }71", r"70\text{, 71}", "70, 71", "-70", "",
                r"70\text{ millions}", r"70\text{ tenths}", r"7 \cdot 10", "7e1", "71", "70!",
                r"\sqrt{4900}", "70x", r"70\pi", r"\{70\}", r"\frac{70}{1}"]),
        ("3", [r"3\text{ quorks}", "1 2 3", "6/2", r"\frac{6}{2}", r"3\%", "4=3", "x=3", "3,4"]),
        ("123", ["1 2 3", "1,2,3", "1,23", r"1\,2\,3"]), ("0.5", [r"\frac{2}{4}", "2/4", "0.51"]),
        (r"\frac{3}{4}", [r"\frac{6}{8}", r"\frac{1}{2} + \frac{1}{4}", r"\frac{3}{0}", "3", "34"]),
        (r"\frac{19}{20}", [r"\frac{6}{8} + \frac{1}{5}"]), (r"\frac{1}{3}", ["0.333333"]),
        (r"5\sqrt{2}", [r"\frac{6}{8} + \frac{1}{5}", None]),
    ],
)  # fmt: skip
def test_wrong_without_sympy(gold, answers):
    for answer in answers:
        assert without_sympy(QUESTION, gold, answer) is WRONG, answer


def test_a_percent_sign_needs_a_question_about_percent():
    for question in ("What percent is it?", r"Find $x\%$."):
        assert without_sympy(question, "3", r"3\%") is RIGHT
    assert without_sympy("How many?", "3", r"3\%") is WRONG


def test_copies_of_the_question_earn_nothing():
    question = r"Expand $(x-1)(x + 1)$, $\sqrt{50}$ and $12x+7$."
    for answer in ("(x-1)(x+1)", r"( x - 1 )\left(x+1\right)", r"\sqrt{50}", "(x-1)"):
        assert without_sympy(question, "x^2-1", answer) is WRONG
    assert without_sympy(question, r"\sqrt{50}", r"\sqrt {50}") is RIGHT  # the gold as written
    for answer in ("-1+x^2", "2x+7", "12x", r"5\sqrt{2}"):  # the second is part of longer numbers
        expected = WRONG if answer == "12x" else None
        assert without_sympy(question, "x^2-1", answer) is expected, answer


def test_only_the_last_closed_box_counts_and_the_rest_is_asked_in_one_batch():
    asked = Asked()
    completions = [r"\boxed{x+1}", "x+1", r"\boxed{x+1} or \boxed{1+x}", r"\boxed{x+1} \boxed{",
                   r"\boxed{" + "x+" * 150 + "1}", r"\boxed{2x}", ""]  # fmt: skip
    found = MathJudge(asked).verdicts([("", "x+1", text) for text in completions])
    assert found == [RIGHT, WRONG, RIGHT, WRONG, WRONG, RIGHT, WRONG]
    assert asked.pairs == [(r"\boxed{x+1}", r"\boxed{1+x}"), (r"\boxed{x+1}", r"\boxed{2x}")]


def test_what_was_not_judged_earns_nothing_and_is_counted():
    class Tired:
        def judge(self, pairs):
            return [RIGHT, Verdict.TIMEOUT, Verdict.FAILURE, Verdict.TIMEOUT, WRONG][: len(pairs)]

    judge = MathJudge(Tired())
    prompt = Prompt("1", "What is it? ", "What is it?", "x+1", "algebra")
    texts = [rf"It is \boxed{{{n}+x}}." for n in range(5)] + [r"\boxed{x+1}", "x+1"]
    assert judge.rewards([prompt] * 7, texts) == [1, 0, 0, 0, 0, 1, 0]
    assert judge.counts == {"timeouts": 2, "failures": 1}
    assert [judge.extract(text) for text in texts[4:]] == ["4+x", "x+1", None]


def test_with_math_verify():
    judge = MathJudge(Verifier(1, 20.0, 2.0))
    cases = [
        (r"\frac{\sqrt{3}}{2}", r"\sqrt{3}/2", RIGHT), (r"2\sqrt{3}", r"\sqrt{12}", RIGHT),
        ("[0,1)", r"\left[0, 1\right)", RIGHT), (r"\frac{\pi}{2}", r"\frac{\pi}{3}", WRONG),
        ("x^2+2x+1", "(x+1)^2", RIGHT), ("x^2+2x+1", "(x+1)^3", WRONG), ("70", "71", WRONG),
    ]  # fmt: skip
    asked = [("What?", gold, rf"It is \boxed{{{answer}}}.") for gold, answer, _ in cases]
    assert judge.verdicts(asked) == [verdict for *_, verdict in cases]


@pytest.mark.timeout(60)  # it takes 0.05 s, and ages where a pattern tries every way back
def test_reading_a_hostile_box_takes_no_time():
    for piece in (" ", "1", ",", "1,", "$", "\\", "{", r"\frac", r"\text{", "~", r"\,", "1 ", "^"):
        text = (piece * 300)[:300]
        read_number(text), bare(text), without_sympy(text * 10, "7", text)
        without_sympy(text * 10, "x", text)
