"""Reading final answers: what counts, what does not, and how long a text may take."""

from __future__ import annotations

from decimal import Decimal

import pytest

from grpo_ustat.records import Prompt
from grpo_ustat.tasks.answers import (
    THOUGHTS,
    after_thoughts,
    final_number,
    last_boxed,
    plain,
    stated,
)
from grpo_ustat.tasks.base import NumberJudge, extracted
from grpo_ustat.tasks.jsonl import ExactJudge
from grpo_ustat.tasks.plugins import OwnJudge

SAME = {
    "70": ["70", " 70\n", "+70", "70.", "070", "$70", "$70$", "70.0", "70.00.", r"\$70",
           "so it is 70 #### 70", "####70", "#### $70.", "#### 70\n", r"\boxed{70}", r"\fbox{70}",
           r"It is $\boxed{70}$.", r"\boxed{ 70. } as asked", r"#### \boxed{70}",
           "#### 70\n\nWhat is 3+4? 7", "####\n70\nand so on", r"#### \boxed{70}.",
           r"thus \boxed{70.0}. #### 70", r"\boxed{\$70}", "#### **70**", "**#### 70**",
           "**Answer: #### 70.**", "#### **$70.00**.", r"#### $\boxed{70}$", r"#### \(70\)",
           r"#### \[70\]", r"#### **\boxed{70}**", "#### 70\n```", "**70**", r"\(70\).", "$70$",
           "#### 70\n#### 71", "#### 70\n\nQuestion: 3+4?\nAnswer: 3+4=7\n#### 7",
           "#### Step 1\n35+35=70\n#### Answer\n#### 70", "##### 71\n#### 70", "# 71\n####70",
           "Write #### and the answer. #### So\n#### 70", "#### 3 or 4\n#### 70",
           "#### 70\nso \\boxed{71} or \\boxed{72}", "#### Step 1\nso \\boxed{70}",
           r"70 or #### \boxed{70}", "so #### 70 #\n#### 70"],
    "-1234.5": ["-1,234.5", "-1234.50", "-$1,234.5", "$-1,234.5", r"\boxed{-1,234.5}",
                "\u22121,234.5", "#### \u22121234.5"],
    "0": ["0", "-0", "0.0", "+0.00"],
    "0.5": [".5", "0.50", "#### .5"],
    "1000000": ["1,000,000", "1000000.000"],
    "123456789012345678901234567890": ["123456789012345678901234567890"],
}  # fmt: skip
NONE = [
    "", " ", ".", "####", "$", "-", "three", "the answer is 70", "37+45-12", "37+45-12=70", "3=3",
    "1 2 3", "x=3", "6/2", "3%", r"3\%", "3 or 4", "1,23", "1,2345", ",123", "12,34,567", "--7",
    "+-7", "-$-7", "$$7", "- 7", "1e3", "0x1", "1_000", "٣", "７０", "7\x00", "7" * 31, "1.5.2",
    "1..", "inf", "NaN", "½", "#### 3 #### 3", "#### 70 #", "#### 70 or\n71",
    "#### 3 #### 4", "#### 37+33", "#### 12 apples", "#### 12%", "#### x=3", "##### 70", "### 70",
    "#### 1/2", "####70##", "#### **70", "#### *70*", "####### 70", "#### Step 1\n70",
    "Write #### and the answer", "\u2212-7", "** 3 ** 4 **", "$3$ or $4$", "#### $3$ $4$",
    "70\n\nWhat is 3+4? 7", "70 #### 37+33", "#### 3 or 4",
    r"\boxed{3} or \boxed{4}", r"\boxed{3}\boxed{3}", r"\boxed{3}\fbox{3}", r"\boxed{\boxed{3}}",
    r"\boxed{3", r"\boxed{}", r"\boxed{x=3}", r"\boxed{4=3}", r"\boxed{6/2}", r"\boxed{37+45-12}",
    r"\boxed{1 2 3}", r"\boxed{3\%}", r"\boxed{\frac{6}{2}}", r"\boxed{70} #### 71", r"\boxed 70",
    r"\boxed{x} #### 70", r"#### \fbox{70", "\\boxed{71}\n#### 70", "#### \\boxed{70}\\fbox{70}",
    "\\boxed{70} \\boxed{70}\n#### 70", "#### Step\n\\boxed{70} or \\boxed{71}", "70 #### #### 70",
]  # fmt: skip


@pytest.mark.parametrize("number", SAME)
def test_one_number_in_many_writings(number):
    for text in SAME[number]:
        assert final_number(text) == Decimal(number), text
        assert stated(text) == number, text


@pytest.mark.parametrize("text", NONE)
def test_what_states_no_number(text):
    assert final_number(text) is None and stated(text) is None


def test_writing_a_number_loses_no_digit():
    digits = "123456789.123456789012345678901"  # 30 digits: more than a Decimal context keeps
    assert plain(final_number(digits)) == digits
    for value in range(-120, 121):
        assert final_number(plain(Decimal(value) / 8)) == Decimal(value) / 8


@pytest.mark.parametrize(
    "text, content",
    [
        (r"\boxed{1} and \boxed{2}", "2"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\left\{1,2\right\}}", r"\left\{1,2\right\}"), (r"\boxed{a\}b}", r"a\}b"),
        (r"\boxed{\boxed{3}}", "3"), (r"\fbox{x} then", "x"), (r"\boxed{}", ""),
        (r"\boxed{1} then \boxed{2", None), (r"\boxed{{1}", None), ("1", None), ("", None),
        (r"\boxed{" + "7" * 300 + "}", "7" * 300), (r"\boxed{" + "7" * 301 + "}", None),
        (r"\boxed{\\}", r"\\"), ("\\boxed{\\", None),
    ],
)  # fmt: skip
def test_the_last_box(text, content):
    assert last_boxed(text, 300) == content


@pytest.mark.timeout(60)  # they take 0.1 s together, and minutes where time is quadratic
@pytest.mark.parametrize(
    "text",
    [
        "7" * 100_000, "1,000" * 20_000, "$" * 100_000, " " * 100_000, "\\" * 100_000,
        r"\boxed{" * 14_000, r"\boxed{" + "{" * 100_000, "#### " * 20_000,
        "9" * 50_000 + "." * 50_000,
        "####\n" * 20_000, "#### x\n" * 15_000, "#" * 100_000, "#### " + "**" * 50_000,
        "x" * 50_000 + "\n#### x" * 7_000, "####" + "\n" * 50_000 + "#" + " " * 50_000,
        r"\boxed{" + " " * 100_000 + "7}", "####" + " " * 100_000 + "x", "1 " * 50_000,
    ],
)  # fmt: skip
def test_long_texts_are_read_at_once(text):
    assert final_number(text) is None and last_boxed(text, 300) is None


UNITS = {  # texts with a number of thousands or with a unit, as people write them
    "8250": [r"\boxed{8{,}250}", r"#### 8\,250", r"\boxed{8,\!250}", "#### 8\u202f250"],
    "8250000": ["#### 8{,}250{,}000"], "8250.50": [r"\boxed{\$8{,}250.50}"],
    "45": ["#### 45 dollars", "#### $45 dollars.", "#### 45 miles per hour", "#### **45 hours**",
           r"\boxed{45\text{ dollars}}", r"\boxed{\text{45 cents}}", "#### €45", r"#### $45$ days",
           r"#### \boxed{45} weeks", "#### 45 hours\n\nQuestion: 3+4?\n#### 7",
           "#### 1 First add\n#### 45", "#### 45 square feet"],
    "-3": ["#### \u22123 degrees"],
}  # fmt: skip
CHANGED = (  # words that change the number before them
    "M", "mil", "MM", "m dollars", "doz", "gross", "fifteenths", "quarters", "billionths", "lakh",
    "point five", "divided by two", "to the power of two", "choose two", "below", "doubled",
    "degrees below zero", "percent", "per cent", "out of six", "is wrong", "but no", "thousand",
    "or", "hundred dollars", "and a half", "dollars or 46", "x", "dozen eggs",
    "dollars and 50 cents",
)  # fmt: skip
THINGS = ("pies", "logs", "months", "miles", "people in the room", "days a week", "m", "ones")


@pytest.mark.parametrize("number", UNITS)
def test_thousands_and_units_as_people_write_them(number):
    for text in UNITS[number]:
        assert final_number(text) == Decimal(number), text


def test_which_words_behind_a_number_are_units():
    for words in CHANGED:
        assert final_number(f"#### 18 {words}", any_unit=True) is None, words
    for words in THINGS:
        assert final_number(f"#### 18 {words}", any_unit=True) == 18, words
    for text in ("#### 45dollars", "#### 45x", "8{,}25", r"\boxed{8{,}25}", "#### 8{,}2500",
                 "45 dollars", r"\boxed{3\,4}", *(f"#### 45 {words}" for words in CHANGED)
                 ):  # fmt: skip
        assert final_number(text) is None and final_number(text, any_unit=True) is None, text
    for text in ("#### 45 eggs", r"\boxed{45 \text{ eggs}}", "#### 45 red books.",
                 "so #### $45 left"):  # fmt: skip
        assert final_number(text) is None and final_number(text, any_unit=True) == 45, text
        assert stated(text, any_unit=True) == "45"
    assert final_number("#### 1 First add\n#### 45", any_unit=True) == 45
    assert final_number("#### 45 eggs as far as one can see now", any_unit=True) is None


@pytest.mark.parametrize("begin, end", THOUGHTS)
def test_only_what_stands_behind_the_last_end_of_thoughts_is_read(begin, end):
    for text in (f"{begin}7 #### 7{end}#### 8", f"#### 7\n{end}\n{begin} 9? {end} #### 8"):
        assert final_number(text) == 8
    for text in (f"{begin} #### 8", f"#### 8 {end} 9? {begin} #### 8", f"#### 8{end}", f"8{end}"):
        assert final_number(text) is None, text


def test_thoughts_that_the_prompt_begins_must_end():
    thinking = Prompt("1", "How many?<think>\n", "How many?", "8", "gsm8k")
    told = Prompt("2", "Think in <think> </think>. How many?", "How many?", "8", "gsm8k")
    texts = ["#### 8", "#### 8</think>", "#### 7</think>#### 8", "<think>#### 7</think>\n#### 8"]
    for judge in (NumberJudge(), ExactJudge()):
        assert judge.rewards([thinking] * 4, texts) == [0, 0, 1, 1]
        assert judge.rewards([told] * 4, texts) == [1, 0, 1, 1]
        assert [extracted(judge, thinking, text) for text in texts] == [None, None, "8", "8"]
        assert [extracted(judge, told, text) for text in texts] == ["8", None, "8", "8"]
    whole = OwnJudge(lambda prompt, text: len(text))
    assert whole.rewards([thinking] * 4, texts) == list(map(len, texts))
    assert after_thoughts("no thoughts < think >") == "no thoughts < think >"
