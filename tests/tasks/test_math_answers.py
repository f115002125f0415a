"""Judging MATH answers: what comes before math-verify, and that it is stricter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_ustat.records import Prompt
from grpo_ustat.tasks import math_answers
from grpo_ustat.tasks.math_answers import MathJudge, without_sympy
from grpo_ustat.tasks.math_latex import bare, boxes, read_number, spelled, without_unit
from grpo_ustat.tasks.math_sets import joined
from grpo_ustat.tasks.verifier import JudgeError, Verdict, Verifier

RIGHT, WRONG, _, _ = Verdict
GOLDS = Path(__file__).parents[1] / "data" / "math_golds.jsonl"
PAIRS = [  # kind, gold, answer, verdict
    line.split("\t") for line in GOLDS.with_name("math_pairs.tsv").read_text("utf-8").splitlines()
]
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
                r"70\text{ marbles}", r"70\,\text{cm}", r" 7\!0 ", "{70}", r"\mathbf{70}",
                r"\underline{70}", "\\ 70\\ ", r"70\\", r"\text{70 marbles}", r"7\times 10^1"]),
        ("150000", [r"1.5\times 10^5", r"1.5 \cdot 10^{5}", r"\text{150,000 marbles}"]),
        ("0.0025", [r"2.5 \times 10^{-3}"]), (r"1.5 \times 10^5", ["150000", r"15\times 10^4"]),
        ("3.5", [r"3\frac12", r"3\frac{1}{2}", r"\frac72"]), ("-7", ["-(7)"]),
        ("1000", ["1000", "1,000", "1{,}000", r"1,\!000", r"1\,000", r"\$1,000.00"]),
        (r"\$1{,}000", ["1000", r"\$1000"]), (r"60^\circ", ["60", "60.0", r"60\text{ degrees}"]),
        (r"12\text{ cm}", ["12", r"12\text{ inches}"]), ("-3", ["-3", "- 3", "-3.0"]),
        ("0.5", [".5", "0.50", r"\frac{1}{2}", r"\frac12", "1/2", r"\dfrac{1}{2}"]),
        (r"\frac{3}{4}", ["3/4", r"\tfrac34", "0.75", r"\frac{9}{12}"]),
        (r"\frac{7}{4}", [r"1\frac{3}{4}", "1.75"]),
        (r"-\frac{1}{2}", [r"\frac{-1}{2}", "-0.5", r"\frac{1}{-2}", "-(1/2)", r"-(\frac12)"]),
        (r"\frac{7}{10}", [r"\frac7{10}", r"\dfrac7{10}"]), (r"\frac{1}{13}", [r"\frac1{13}"]),
        (r"\frac{\pi}{2}", [r"\frac\pi2", r"\frac\pi{2}", r"\tfrac{\pi}2"]),
        (r"\frac\pi3", [r"\frac{\pi}{3}"]), (r"\frac{\sqrt3}2", [r"\frac{\sqrt{3}}{2}"]),
        ("204_5", ["204_5", "204_{5}", r"204_{\text{five}}", "0204_5", r"204_{\text{base }5}"]),
        ("1AE_{16}", [r"\text{1AE}_{16}"]), ("3:2", ["3 : 2"]), ("6:00", [r"\text{6:00}"]),
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
        ("70", [r"70\times 10^0", r"0.7\times 10^2", r"\text{70 or }", r"\text{70 quorks}",
                "-(-70)", r"\text{70 million}", "{7}{0}", "70_8", "70_{10}"]),
        ("3.5", [r"3\frac{2}{4}", r"2\frac{3}{2}", r"3\frac{-1}{-2}", r"35\times 10^{-1}"]),
        ("1101_2", ["1101_3", "1101_{10}", "1101_{three}", "1101", "1100_2", "13", "1101_{22}"]),
        ("204_5", ["204_6", "204", "54", "204_", "x_5"]), ("3_5", ["3"]), ("x+10", ["x+10_2"]),
        ("6:00", ["6", "5:60", "6.00"]), ("3:2", [r"\frac{3}{2}", "1.5", "2:3", "6:4"]),
        ("(1,2)", [r"\{1,2\}", "1,2", "2,1"]), ("1,2", ["(2,1)", "(1,2)", "[1,2]"]),
        (r"\{1,2\}", ["(1,2)"]), ("(3,4)", ["y=3, x=4", "x=3, x=4", "2<x<3"]),
        (r"\frac{\pi}{2}", [r"\frac{\pi}{3} = \frac{\pi}{2}", r"x=\pi/3=\frac{\pi}{2}", r"2x=\pi"]),
        (r"\{-2,2\}", ["x^2=4", r"x=\frac{4}{x}", "|x|=2"]), ("(-2,2)", ["x^2<4"]),
        ("[0,2)", [r"x^2 \le 2x", "0<x<x+2", "0<1<x<2"]),
    ],
)  # fmt: skip
def test_wrong_without_sympy(gold, answers):
    for answer in answers:
        assert without_sympy(QUESTION, gold, answer) is WRONG, answer


def test_a_base_may_be_left_to_the_question():
    for named in ("in base 5?", "in base $5$?", "in base five?", "Base-5?"):
        assert without_sympy(f"What is it {named}", "204_5", "204") is RIGHT, named
    for named in ("in base 50?", "in base 6?", "from 5 base 10", "in base $b$?", "5"):
        assert without_sympy(f"What is it {named}", "204_5", "204") is WRONG, named
    assert without_sympy("In base 5?", "204_5", "204_6") is WRONG


@pytest.mark.parametrize(
    "gold, answers",
    [
        ("1,2", ["2,1", r"\{2,1\}", r"1 \text{ and } 2", "x=1, x=2", "x=2, 1"]),
        (r"\{1,2\}", ["2, 1", r"\{2,1\}"]), ("(3,4)", ["(3,4.0)", "x=3, y=4", "(x,y)=(3,4)"]),
        (r"1+\sqrt{2}", [r"x=1+\sqrt{2}", r"f(x)=1+\sqrt{2}", r"x = \sqrt2+\max(1,0)"]),
        ("x=5y", ["5y=x", "x-5y=0"]),
        ("[0,2)", [r"0\le x<2", r"x \in [0,\frac42)", r"2 > t \geq 0"]),
        (r"(5,\infty)", ["x>5", "5<x"]), (r"(-\infty,3)\cup(3,\infty)", [r"x\neq 3"]),
        (r"\frac{n(n+1)}{2}", [r"\sum_{k=1}^n k"]),
        (r"\log_2 3+x", [r"x+\log_{2} 3"]), (r"\pm 3\pi", [r"3\pi,-3\pi"]),
    ],
)  # fmt: skip
def test_fitting_shapes_are_left_to_math_verify(gold, answers):
    for answer in answers:
        assert without_sympy("", gold, answer) is None, answer


def test_lg_is_the_logarithm_to_base_ten():
    assert without_sympy("", r"\lg 2", r"\log_{10} 2") is RIGHT
    assert without_sympy("", r"\lg 200", r"2+\lg 2") is None  # left to math-verify
    assert spelled(r"\lgroup") == r"\lgroup"


def test_a_range_answers_for_a_pair_only_where_that_is_an_interval():
    assert without_sympy("Which point?", "(2,3)", "2<x<3") is WRONG
    assert without_sympy("In interval notation?", "(2,3)", "2<x<3") is None


def test_canaries_go_through_the_own_steps_in_every_batch(monkeypatch):
    judge = MathJudge(Asked())
    assert judge.verdicts([("", "70", r"\boxed{70}")]) == [RIGHT]
    monkeypatch.setattr(math_answers, "read_based", lambda latex: None)
    with pytest.raises(JudgeError, match=r"gold 1101_2, answer .* is right, but the verdict was"):
        judge.verdicts([("", "70", r"\boxed{70}")])
    for opinion in (RIGHT, WRONG):
        monkeypatch.setattr(math_answers, "without_sympy", lambda *asked, said=opinion: said)
        with pytest.raises(JudgeError, match="broken"):
            judge.verdicts([("", "70", r"\boxed{70}")])


def test_a_percent_sign_needs_a_question_about_percent():
    for question in ("What percent is it?", r"Find $x\%$."):
        assert without_sympy(question, "3", r"3\%") is RIGHT
    assert without_sympy("How many?", "3", r"3\%") is WRONG


def test_a_name_that_the_question_does_not_mention_is_no_part_of_a_number():
    for question in ("Solve $2x=10$ for $x$.", "Find it."):
        assert without_sympy(question, "5", "x = 5") is RIGHT
        assert without_sympy(question, "5", "5=x") is RIGHT
        for wrong in ("2x=5", "x=6", "4=5", "5=5", "x=y=5", "x=5x", "x+5=5"):
            assert without_sympy(question, "5", wrong) is WRONG, wrong
    assert without_sympy("Solve $2y=10$.", "5", "x=5") is WRONG
    assert without_sympy("Solve $2y=10$.", "x=5", "x=5.0") is RIGHT


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


@pytest.mark.slow
def test_with_math_verify():
    judge = MathJudge(Verifier(1, 20.0, 2.0))
    cases = [
        (r"\frac{\sqrt{3}}{2}", r"\sqrt{3}/2", RIGHT), (r"2\sqrt{3}", r"\sqrt{12}", RIGHT),
        ("[0,1)", r"\left[0, 1\right)", RIGHT), (r"\frac{\pi}{2}", r"\frac{\pi}{3}", WRONG),
        ("x^2+2x+1", "(x+1)^2", RIGHT), ("x^2+2x+1", "(x+1)^3", WRONG), ("70", "71", WRONG),
        ("[0,1)", r"0\le x<1", RIGHT), (r"(5,\infty)", "x>5", RIGHT), ("[0,1)", "0<x<1", WRONG),
        (r"(-\infty,0]", r"x\le 0", RIGHT), (r"(-\infty,0]", "x<0", WRONG), ("1,2", "2,1", RIGHT),
        (r"\frac\pi3", r"\pi/3", RIGHT), ("(3,4)", "x=3, y=4", RIGHT), (r"\pi", r"x=\pi", RIGHT),
    ]  # fmt: skip
    asked = [("What?", gold, rf"It is \boxed{{{answer}}}.") for gold, answer, _ in cases]
    assert judge.verdicts(asked) == [verdict for *_, verdict in cases]


@pytest.mark.timeout(60)  # it takes 0.05 s, and ages where a pattern tries every way back
def test_reading_a_hostile_box_takes_no_time():
    pieces = (
        " ", "1", ",", "1,", "$", "\\", "{", r"\frac", r"\text{", "~", r"\,", "1 ", "^", "(", "1_",
        "x=", "{1", "-(", r"\frac{", r"\frac1", "{}", r"\le ", "A", r"\text{1 a", "{{", "x<", "(a,",
    )  # fmt: skip
    for piece in pieces:
        text = (piece * 300)[:300]
        read_number(text), bare(text), without_sympy(text * 10, "7", text)
        without_sympy(text * 10, "x", text), without_sympy(text * 10, "12_5", text)


@pytest.mark.parametrize("minus", ["\u2212", "\uff0d", "\ufe63", "\u2010", "\u2013"])
def test_every_minus_is_one(minus):
    pairs = [
        ("-9", "-9"), ("-9", "-9.0"), (r"-\frac{3}{7}", r"-\frac37"), ("-9", r"\text{-9}"),
        (r"-\frac{3}{7}", r"\frac{-3}{7}"), (r"2.5\times 10^{-4}", r"2.5\times 10^{-4}"),
        ("-212_3", "-212_3"), ("y-6", "y-6"), ("(-2,8)", "(-2,8)"), (r"-8^\circ", "-8"),
    ]  # fmt: skip
    for gold, answer in pairs:
        assert without_sympy("", gold, answer.replace("-", minus)) is RIGHT, answer
        assert without_sympy("", gold.replace("-", minus), answer) is RIGHT, gold
    assert without_sympy("", "9", f"{minus}9") is WRONG
    assert without_sympy("", "9", f"{minus}{minus}9") is WRONG
    assert boxes("z-1", f"1{minus}z") == (r"\boxed{z-1}", r"\boxed{1-z}")


@pytest.mark.parametrize(
    "latex, expected",
    [
        (r"x=4 \text{ or } x=7", "x=4,x=7"), ("4, 7, or 9", "4,7,9"), (r"4\lor 7", "4,7"),
        (r"4\mbox{ and }7", "4,7"), (r"4 \quad\text{or}\quad 7", "4,7"), (r"\text{4 or 7}", "4,7"),
        (r"\text{both } 4 \text{ and } 7", "4,7"), (r"(4,7)\text{ and }(7,4)", "(4,7),(7,4)"),
        (r"p<4 \text{ or } p\ge 7", r"(-\infty,4)\cup[7,\infty)"),
        (r"(-\infty,4) or (7,9]", r"(-\infty,4)\cup(7,9]"), (r"[4,5] U [7,9]", r"[4,5]\cup [7,9]"),
        (r"4\le p\le 5\text{ or }p=7", r"[4,5]\cup\{7\}"), (r"p>4\text{ and }p<7", "4<p<7"),
        (r"7 > p \text{ and } 4 \le p", r"4\le p<7"), ("p<4 or q>7", "p<4,q>7"),
        ("p or q", "p,q"), (r"\text{A and C}", "A,C"), (r"p\ne 4\text{ and }p\ne 7",
         r"((-\infty,4)\cup(4,\infty))\cap((-\infty,7)\cup(7,\infty))"),
        (r"\text{red or blue}", r"\text{red or blue}"), ("4,7", "4,7"), (r"\sqrt{5}", r"\sqrt{5}"),
        (r"\text{Kim and Lee}", r"\text{Kim and Lee}"), (r"\frac{4}{7}", r"\frac{4}{7}"),
    ],
)  # fmt: skip
def test_values_joined_by_words(latex, expected):
    assert joined(latex) == expected


def test_ranges_that_the_other_joins_by_commas_stay_a_list():
    words, commas = r"z<1\text{ or }z>2", "z<1, z>2"
    assert boxes(words, commas) == (r"\boxed{z<1,z>2}", r"\boxed{z<1, z>2}")


def test_only_what_stands_apart_is_a_unit():
    value = r"7\sqrt{3}"
    for unit in (r"\text{ mm}", r"\,\mathrm{~mm}", r"\mbox{ inches}^2", " mm", r"\ feet",
                 r"\text{ m/s}", r"\text{ apples}", " square yards",
                 r"\text{ (mm)}"):  # fmt: skip
        assert without_unit(value + unit) == value, unit
    for letter in ("t", "c", "m", "h", " d", "st", "ab", r"\mathrm{i}", r"\text{ million}",
                   r"\text{ or }", r"+\text{m}", "^m", r"\mathbf{j}"):  # fmt: skip
        assert without_unit(value + letter) == value + letter, letter
    for whole in (r"\text{m}", r"\text{odd}", "mm", r"\pi h", r"2\cos t"):
        assert without_unit(whole) == whole
    assert read_number(r"6\mathrm{e}") is None and read_number(r"6\text{ m}").value == 6


@pytest.mark.timeout(60)  # it takes 0.1 s, and ages where a pattern tries every way back
def test_reading_hostile_words_takes_no_time():
    pieces = (" or ", r"\text{ or }", "x<1 or ", r"\text{m}", " cm", r"\text{ cm}", "~", "( or ",
              "U(", ")U(", r"\quad", "x<", r"\lor", "or", "a.", r"\,", "both ")  # fmt: skip
    for piece in pieces:
        text = ("1" + piece * 300)[:300]
        boxes(text, text), without_sympy(text * 10, "x", text)


@pytest.mark.slow
def test_with_math_verify_what_it_alone_gets_wrong():
    judge = MathJudge(Verifier(1, 20.0, 2.0))
    cases = [
        ("7+4s", "4s+7", RIGHT), ("7+4s", "7+4", WRONG), ("7+4s", "11", WRONG), ("9d", "9", WRONG),
        (r"\sqrt{7}h", r"\sqrt{7}", WRONG), (r"7\sqrt{3}", r"7\sqrt3\text{ cm}", RIGHT),
        (r"9d\text{ m}", r"9\text{ m}", WRONG), ("6bc", "6cb", RIGHT), ("6bc", "6", WRONG),
        ("7^{-30}", "7^{-31}", WRONG), ("7^{-30}", r"\frac{1}{7^{30}}", RIGHT),
        (r"\sqrt{7}", r"\sqrt{7}+3^{-50}", WRONG), (r"\{7^{-30},1\}", r"\{1,7^{-31}\}", WRONG),
        (r"\{7^{-30},1\}", r"\{1,\frac{1}{7^{30}}\}", RIGHT), ("(7^{-30},1)", "(7^{-31},1)", WRONG),
        (r"\sqrt{7}\sqrt{11}", r"\sqrt{77}", RIGHT), (r"\frac{\pi}{10^8}", "0.0", WRONG),
        (r"\frac{\pi}{7}", "0.448799", RIGHT), (r"7^{-30}x+\pi", r"7^{-31}x+\pi", WRONG),
        (r"(-\infty,4)\cup(7,\infty)", r"p<4\text{ or }p>7", RIGHT),
        (r"(-\infty,4)\cup(7,\infty)", r"p<4\text{ and }p>7", WRONG), ("4,7", "p=7 or p=4", RIGHT),
        ("(4,7]", r"p>4\text{ and }p\le 7", RIGHT), ("4,7", r"4\text{ or }8", WRONG),
        (r"p<4\text{ or }p>7", r"(7,\infty)\cup(-\infty,4)", RIGHT), ("\u2212p", "0-p", RIGHT),
    ]  # fmt: skip
    asked = [("What?", gold, rf"It is \boxed{{{answer}}}.") for gold, answer, _ in cases]
    verdicts = judge.verdicts(asked)
    assert [
        case for case, judged in zip(cases, verdicts, strict=True) if judged is not case[2]
    ] == []


@pytest.mark.slow
def test_golds_of_every_kind_against_themselves_and_their_neighbours():
    rows = [json.loads(line) for line in GOLDS.read_text().splitlines()]
    cases = [
        (row["problem"], row["answer"], answer, expected)
        for row in rows
        for expected, answers in ((RIGHT, [row["answer"], *row["right"]]), (WRONG, row["wrong"]))
        for answer in answers
    ]
    assert len(rows) == 151 and len(cases) == 773 and len({row["type"] for row in rows}) == 40
    judged = MathJudge(Verifier(1, 20.0, 2.0)).verdicts(
        [(problem, gold, rf"\boxed{{{answer}}}") for problem, gold, answer, _ in cases]
    )
    assert [case for case, one in zip(cases, judged, strict=True) if one is not case[3]] == []


@pytest.mark.slow
def test_relations_that_differ_below_what_floats_tell_are_told_apart():
    """math-verify cuts off what is below 2^-54."""
    tiny = r"10^{-20}"
    wrong = [
        (f"x<{tiny}", "x<0"), (rf"x\le {tiny}", r"x\le 10^{-21}"), (f"{tiny}<x", "0<x"),
        (f"0<x<{tiny}", "0<x<10^{-21}"), (rf"x\neq {tiny}", r"x\neq 10^{-21}"),
        ("x<2", f"x<2+{tiny}"), (f"{tiny}=x", "0=x"), (f"(x-{tiny})^2+y^2=1", "x^2+y^2=1"),
        (f"|x|<{tiny}", "|x|<10^{-21}"), (r"3\text{t}", "3"), (r"4\pi", r"4\pi\text{ billionths}"),
    ]  # fmt: skip
    right = [("x<2", "2>x"), ("2x+3y=6", "6=2x+3y"), (r"x\neq 3", r"x \ne 3"),
             (r"3\text{ h}", "3"), ("x^2+y^2=1", "y^2+x^2=1")]  # fmt: skip
    judged = MathJudge(Verifier(1, 20.0, 2.0)).verdicts(
        [("Find it.", gold, rf"\boxed{{{answer}}}") for gold, answer in wrong + right]
    )
    assert judged == [WRONG] * len(wrong) + [RIGHT] * len(right)


def test_pairs_that_the_own_steps_decide():
    decided = [
        (judged.value, pair)
        for pair in PAIRS
        if (judged := without_sympy("Find it.", *pair[1:3])) is not None
    ]
    assert len(PAIRS) == 679 and len(decided) > 200
    assert [pair for judged, pair in decided if judged != pair[3]] == []


@pytest.mark.slow
def test_lists_two_signs_complex_numbers_and_spellings():
    judged = MathJudge(Verifier(1, 20.0, 2.0)).verdicts(
        [("Find it.", gold, rf"\boxed{{{answer}}}") for _, gold, answer, _ in PAIRS]
    )
    assert [pair for pair, one in zip(PAIRS, judged, strict=True) if one.value != pair[3]] == []


@pytest.mark.slow
def test_an_index_i_is_no_imaginary_unit():
    cases = [("n+i", "n-i^3", WRONG), ("i^2", "-1", WRONG), ("i^2+2i", "2i-1", WRONG),
             (r"\sum_{i=1}^{3} i+i", r"6+\sqrt{-1}", WRONG), ("x_i", "x", WRONG),
             (r"\sum_{i=1}^{n} i", "1+i", WRONG), ("1+i", r"\sum_{i=1}^{n} i", WRONG),
             ("i(i+1)", "i^2+i", RIGHT), ("i(i+1)", "i-1", WRONG),
             (r"\frac{1}{i}", "-i", WRONG)]  # fmt: skip
    judged = MathJudge(Verifier(1, 20.0, 2.0)).verdicts(
        [("Find it.", gold, rf"\boxed{{{answer}}}") for gold, answer, _ in cases]
    )
    assert judged == [verdict for *_, verdict in cases]


def test_a_draft_within_thoughts_is_no_answer():
    judge, prompt = MathJudge(Asked()), Prompt("1", "What? <think>\n", "What?", "8", "algebra")
    texts = [r"\boxed{7}</think> \boxed{8}", r"\boxed{8}</think> \boxed{7}", r"7? \boxed{8}",
             r"\boxed{8}</think> So it is 8.", r"<think>\boxed{8}"]  # fmt: skip
    assert judge.rewards([prompt] * 5, texts) == [1, 0, 0, 0, 0]
    assert [judge.extract(text) for text in texts] == ["8", "7", "8", None, None]
