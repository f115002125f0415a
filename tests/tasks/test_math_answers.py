"""Judging MATH answers: what comes before math-verify, and that it is stricter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_ustat.records import Prompt
from grpo_ustat.tasks import math_answers
from grpo_ustat.tasks.math_answers import MathJudge, without_sympy
from grpo_ustat.tasks.math_latex import bare, boxes, read_number
from grpo_ustat.tasks.verifier import JudgeError, Verdict, Verifier

RIGHT, WRONG, _, _ = Verdict
GOLDS = Path(__file__).parents[1] / "data" / "math_golds.jsonl"
PAIRS = [  # kind, gold, answer, verdict, question
    [*line.split("\t"), "Find it."][:5]
    for line in GOLDS.with_name("math_pairs.tsv").read_text("utf-8").splitlines()
]
LEFT = {"without math-verify": False, "left to math-verify": True}


class Asked:
    """A verifier that notes what it is asked."""

    def __init__(self):
        self.pairs = []

    def judge(self, pairs):
        self.pairs += pairs
        return [RIGHT] * len(pairs)


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


@pytest.mark.timeout(60)  # it takes 0.2 s, and ages where a pattern tries every way back
def test_reading_a_hostile_box_takes_no_time():
    pieces = (
        " ", "1", ",", "1,", "$", "\\", "{", r"\frac", r"\text{", "~", r"\,", "1 ", "^", "(", "1_",
        "x=", "{1", "-(", r"\frac{", r"\frac1", "{}", r"\le ", "A", r"\text{1 a", "{{", "x<", "(a,",
        " or ", r"\text{ or }", "x<1 or ", r"\text{m}", " cm", r"\text{ cm}", "( or ", "U(", ")U(",
        r"\quad", r"\lor", "or", "a.", "both ",
    )  # fmt: skip
    for piece in pieces:
        for text in ((piece * 300)[:300], ("1" + piece * 300)[:300]):
            read_number(text), bare(text), boxes(text, text)
            for gold in ("7", "x", "12_5"):
                without_sympy(text * 10, gold, text)


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


def test_what_the_own_steps_decide_and_what_they_leave():
    for kind, gold, answer, verdict, question in PAIRS:
        judged = without_sympy(question, gold, answer)
        assert judged is None or judged.value == verdict, (gold, answer)
        assert kind not in LEFT or (judged is None) is LEFT[kind], (gold, answer)


@pytest.mark.slow
def test_pairs_of_every_kind():
    judged = MathJudge(Verifier(1, 20.0, 2.0)).verdicts(
        [(question, gold, rf"\boxed{{{answer}}}") for _, gold, answer, _, question in PAIRS]
    )
    assert [pair for pair, one in zip(PAIRS, judged, strict=True) if one.value != pair[3]] == []


def test_a_draft_within_thoughts_is_no_answer():
    judge, prompt = MathJudge(Asked()), Prompt("1", "What? <think>\n", "What?", "8", "algebra")
    texts = [r"\boxed{7}</think> \boxed{8}", r"\boxed{8}</think> \boxed{7}", r"7? \boxed{8}",
             r"\boxed{8}</think> So it is 8.", r"<think>\boxed{8}"]  # fmt: skip
    assert judge.rewards([prompt] * 5, texts) == [1, 0, 0, 0, 0]
    assert [judge.extract(text) for text in texts] == ["8", "7", "8", None, None]
