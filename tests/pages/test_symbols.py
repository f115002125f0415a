"""Every symbol that a page prints is explained on that page: below its answer, and pointed at."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from grpo_ustat.measurements.group_size import ASSUMPTION_ROWS, LAW_ROWS
from grpo_ustat.pages.page import Figure, Page, Table, render
from grpo_ustat.pages.symbols import PATTERN, SYMBOLS, legend, parts

SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="72pt" height="72pt" viewBox="0 0 72 72">'
    "<g><text>share of V</text></g></svg>"
)


class Text(HTMLParser):
    """The symbols that a page prints outside its legend, and what explains each."""

    def __init__(self, text):
        super().__init__()
        self.printed, self.explained, self.legend = set(), {}, {}
        self._place, self._title, self._symbol = [], None, None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag in ("dl", "style", "script", "abbr", "dt", "dd", "head"):
            self._place.append(dict(attrs).get("class") or tag)
            self._title = dict(attrs).get("title")

    def handle_endtag(self, tag):
        if tag in ("dl", "style", "script", "abbr", "dt", "dd", "head"):
            self._place.pop()

    def handle_data(self, data):
        if "symbols" in self._place:
            if self._place[-1] == "dt":
                self._symbol = data
            elif self._place[-1] == "dd":
                self.legend[self._symbol] = data
        elif self._place[-1:] == ["abbr"]:
            self.explained[data] = self._title
        elif not {"style", "script", "head"} & set(self._place):
            self.printed |= {match[0] for match in PATTERN.finditer(data)}


@pytest.fixture(scope="module")
def page():
    law = Table(
        "Scaling law",
        ["quantity", "estimate"],
        [[x, 1.0] for x in (LAW_ROWS | ASSUMPTION_ROWS).values()],
    )
    return Text(
        render(
            Page(
                "MSE study", "The best G is about 4.1 for any n. At n = 256: G = 4.",
                notes=["MSE = C1/B, J* - J at B prompts"], tables=[law],
                figures=[Figure("error", SVG)],
            )
        )
    )  # fmt: skip


def test_every_symbol_of_a_study_s_page_is_in_its_legend(page):
    printed = page.printed | page.explained.keys()
    assert {"G", "G*", "n", "B", "MSE", "C1", "C2", "C3", "A_0", "A_V", "A_b*"} <= printed
    assert page.legend == {symbol: SYMBOLS[symbol] for symbol in SYMBOLS if symbol in page.legend}
    assert printed <= page.legend.keys() and {"q", "Z"} <= page.legend.keys()
    assert "V" in page.legend  # of the picture alone


def test_every_symbol_outside_pictures_is_explained_where_it_is_pointed_at(page):
    assert page.printed == {"MSE"}  # of the heading, which is the window's title
    assert page.explained == {symbol: SYMBOLS[symbol] for symbol in page.explained}


def test_a_symbol_is_no_part_of_a_word_a_number_or_a_name():
    for text in ("2 GB, 1B, v=V_0", "Qwen2.5-0.5B", "n_mse, num_G", "C10", "org/G", "x^n", "-G"):
        assert not legend([text]), text
    assert list(legend(["(n=256, G=4)"])) == ["G", "n"]


def test_the_pieces_of_a_text_are_the_text():
    text = "corr(q, Z) < 0: A_0 < A_V, so G* = 1 + sqrt(C3/C1)"
    assert "".join(piece for piece, _ in parts(text)) == text
    assert list(legend([text])) == ["G*", "C1", "C3", "corr(q, Z)", "A_0", "A_V", "q", "Z"]


def test_meanings_are_one_line_each():
    for meaning in SYMBOLS.values():
        assert meaning == " ".join(meaning.split()) and not re.search(r"[.;]$", meaning)
