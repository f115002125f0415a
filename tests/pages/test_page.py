"""The page by itself: no tag and no attribute comes from the data; equal pages are equal text."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from io import StringIO

import hostile
import matplotlib.pyplot as plt
import pytest
import yaml
from folders import pictures

from grpo_ustat.pages.figures import FONTS
from grpo_ustat.pages.page import (
    Completions,
    Figure,
    Page,
    Table,
    cell_text,
    completions_json,
    difference_table,
    differences,
    render,
    sort_value,
    visible,
)
from grpo_ustat.pages.symbols import SYMBOLS, legend


def drawn(title: str = "a title", colour: str = "#332288") -> str:
    with plt.rc_context(FONTS):
        figure, axes = plt.subplots(figsize=(3, 2))
        axes.plot([1, 2, 3], [3, 1, 2], "o-", color=colour, markerfacecolor="white")
        axes.fill_between([1, 2, 3], [2, 0, 1], [4, 2, 3], alpha=0.2)
        axes.set_title(title)
        text = StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
        plt.close(figure)
    return text.getvalue()


SVG = drawn()


def page_of(texts, rewards=(0.0, 1.0)) -> Page:
    """A page that has every text at every place."""
    rows = [[text, text, i] for i, text in enumerate(texts)]
    completions = [
        {
            "run": text, "step": i, "prompt": text, "completion": text,
            "reward": rewards[i % len(rewards)], "prompt_id": text, "answer": text,
            "extracted": text, "ended": True, "length": i,
        }
        for i, text in enumerate(texts)
    ]  # fmt: skip
    return Page(
        title=texts[0],
        answer=texts[0],
        notes=texts,
        facts=[(text, text) for text in texts],
        overview=Table(texts[0], texts[:1] + ["cell", "place"], rows, notes=[texts[0]]),
        figures=[Figure(text, SVG, caption=text, data=text) for text in texts[:4]],
        tables=[Table(texts[0], texts[:1] + ["cell", "place"], rows, notes=[texts[0]])],
        completions=Completions(completions, note=texts[0]),
        configurations={
            run: {key: run if key in texts[:3] else key for key in texts} for run in texts
        },
    )


class Skeleton(HTMLParser):
    """Tags with the names of their attributes, texts, and the attributes' values."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.texts, self.values = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, *sorted(name for name, _ in attrs)))
        self.values += attrs

    def handle_data(self, data):
        self.texts.append(data)

    def handle_comment(self, data):
        raise AssertionError(f"a comment: {data}")

    handle_decl = unknown_decl = handle_pi = lambda self, text: self.tags.append((text,))


@pytest.mark.slow
def test_no_tag_and_no_attribute_comes_from_the_data():
    """The same tags and attribute names as of a page with harmless texts, place by place."""
    texts = hostile.TEXTS
    harmless = [f"w{i}" + "w" * 50 * (len(visible(x)) > 40) for i, x in enumerate(texts)]
    said, plain = Skeleton(render(page_of(texts))), Skeleton(render(page_of(harmless)))
    assert said.tags == plain.tags
    known = {"policy", "content", "data-value", "href", "alt", "id"}
    new = {(name, value) for name, value in said.values} - set(plain.values)
    assert {name for name, _ in new} <= known, new
    for name, value in new:
        assert name != "href" or value.startswith("./"), value


@pytest.mark.slow
def test_every_text_is_there_to_be_read():
    found = Skeleton(render(page_of(hostile.TEXTS)))
    texts = set(found.texts)
    for text in hostile.TEXTS:
        assert visible(text) in texts, text
    held = json.loads(next(text for text in found.texts if text.startswith('{"keys"')))
    assert held["prompts"] == [visible(text) for text in dict.fromkeys(hostile.TEXTS)]


@pytest.mark.parametrize("text", hostile.TEXTS)
def test_completions_cannot_leave_their_block(text):
    rows = [{"prompt": text, "completion": text, "reward": float("nan")}]
    block = completions_json(Completions(rows))
    assert block.isascii() and not set("<>&\n\x00") & set(block)
    held = json.loads(block)
    assert held["prompts"] == [visible(text)]
    assert held["rows"] == [[0, visible(text), "nan"]]


def test_a_shared_prompt_is_held_once():
    rows = [{"prompt": "p" * 1000, "completion": str(i), "reward": 1.0} for i in range(50)]
    assert completions_json(Completions(rows)).count("p" * 1000) == 1


def test_completions_of_other_keys_are_refused():
    rows = [{"prompt": "", "completion": "", "reward": 0}, {"prompt": "", "completion": ""}]
    with pytest.raises(ValueError, match="have different keys"):
        completions_json(Completions(rows))


def test_rows_must_fit_their_columns():
    with pytest.raises(ValueError, match="'t' has 2 columns and a row of 1"):
        render(Page("a", "b", tables=[Table("t", ["x", "y"], [[1]])]))


def test_the_policy_lets_the_own_style_and_script_run_and_nothing_else():
    text = render(page_of(["x"]))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1].replace("&#39;", "'")
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'" and "unsafe" not in policy
    import base64
    import hashlib

    for kind, tag in (("style-src", "style"), ("script-src", "script")):
        inside = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert rules[kind] == f"'sha256-{digest}'"
    assert " style=" not in text and not re.search(r"\son\w+=", text)


def test_nothing_is_asked_from_a_network():
    found = Skeleton(render(page_of(["x"])))
    named = [v for name, v in found.values if name in ("src", "href", "action", "srcset")]
    assert all(value.startswith(("#", "./", "data:image/svg+xml;base64,")) for value in named)
    assert not re.search(r"https?:|url\(|@import|fetch|XMLHttp|Worker", "".join(found.texts))


def test_ids_are_unique_and_references_lead_somewhere():
    found = Skeleton(render(page_of(["x", "y", "z"])))
    ids = [value for name, value in found.values if name == "id"]
    assert len(ids) == len(set(ids)) > 10
    referred = [v[1:] for name, v in found.values if name == "href" and v.startswith("#")]
    referred += [v for name, v in found.values if name == "aria-labelledby"]
    assert set(referred) <= set(ids)


@pytest.mark.slow
def test_equal_pages_are_equal_text():
    """And the pictures in them, drawn anew."""
    pages = [Page("a", "b", figures=[Figure("f", drawn(), "c", "d.csv")]) for _ in range(2)]
    assert drawn() == drawn()
    assert render(pages[0]) == render(pages[1])


def test_a_picture_is_an_image_with_its_name_and_its_width():
    """As it was drawn, whatever it holds; the page's policy lets images be, scripts not."""
    hit = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 9"><script>HIT</script></svg>'
    text = render(Page("a", "b", figures=[Figure("x < y", drawn("p & q")), Figure("own", hit)]))
    assert pictures(text) == [drawn("p & q"), hit] and "HIT" not in text
    found = Skeleton(text)
    assert [value for name, value in found.values if name == "alt"] == ["x < y", "own"]
    assert ("width", "288") in found.values and ("width", "1200") in found.values
    assert found.tags.count(("figure", "class")) == 1  # the wide one


NAMED = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="{}"/>'


@pytest.mark.parametrize(
    "text",
    ["", "<svg", "<html/>", '<svg viewBox="0 0 1 1"/>', "&x;"]
    + [NAMED.format(box) for box in ("", "0 0 1", "0 0 0 0", "0 0 1e308 1", "0 0 nan 1")],
)
def test_what_is_no_picture_is_refused(text):
    with pytest.raises(ValueError, match="not an SVG with a viewBox"):
        render(Page("a", "b", figures=[Figure("f", text)]))


def test_cells_sort_by_their_numbers():
    cells = ["10 [9, 11]", "-2e-3", 3, 0.5, "12 %", ".5", "+4"]
    assert [sort_value(cell) for cell in cells] == [10, -0.002, 3, 0.5, 12, 0.5, 4]
    for cell in ("2026-11-22", "1.2.3", "7b", "tiny", "", None, True, float("nan"), "- 3"):
        assert sort_value(cell) is None, cell


def test_columns_of_numbers_stand_right():
    """Also with missing cells; a column with one text does not."""
    table = Table("t", ["a", "b", "c"], [[1, "x", None], [None, 2, True], ["3 [1, 4]", 3, False]])
    found = Skeleton(render(Page("a", "b", tables=[table])))
    assert [tag for tag in found.tags if tag[0] == "th"] == [
        ("th", "aria-sort", "class", "scope"), ("th", "aria-sort", "scope"),
        ("th", "aria-sort", "scope"),
    ]  # fmt: skip
    assert [value for name, value in found.values if name == "data-value"] == [
        "1.0", "2.0", "3.0", "3.0",
    ]  # fmt: skip


def test_a_table_of_many_rows_is_below_a_fold():
    short, long = (Table("t", ["a"], [[x] for x in range(count)]) for count in (15, 16))
    assert "<details><summary>16 rows</summary>" in render(Page("a", "b", tables=[long]))
    assert "rows</summary>" not in render(Page("a", "b", tables=[short]))


def test_missing_is_said_and_numbers_are_short():
    assert [cell_text(x) for x in (None, "", "-", 1 / 3, 10**6, False)] == [
        "–", "–", "–", "0.3333", "1000000", "no",
    ]  # fmt: skip


def test_the_legend_has_every_symbol_that_a_page_prints():
    """Also of a picture alone; a symbol is no part of a word, a number or a name."""
    svg = SVG.replace("a title", "share of V")
    notes = ["MSE = C1/B, J* - J", "2 GB, 1B, v=V_0, n_mse, C20, org/T, x^S, -Z"]
    found = Skeleton(render(Page("a", "For n: G = 4", notes=notes, figures=[Figure("f", svg)])))
    shown = [text for text in found.texts if text in SYMBOLS]
    assert shown == ["G", "n", "B", "MSE", "C1", "V", "J*", "J"]
    assert list(legend(["corr(q, Z) < 0"])) == ["corr(q, Z)", "q", "Z"]


def test_only_what_differs_is_shown_and_every_run_is():
    runs = {
        "a": {"seed": 0, "model": {"name": "x", "size": None}, "list": [1, 2]},
        "b": {"seed": 0, "model": {"name": "y", "size": None}, "list": [1]},
        "c": {"seed": 0, "model": {"name": "y"}, "list": [1, 2], "new": "n"},
    }
    found = differences(runs)
    assert list(found) == ["model.name", "list", "new"]  # no value is as one that is not there
    table = difference_table(found)
    assert list(table.columns) == ["run", "model.name", "list", "new"]
    assert table.rows == [
        ["a", "x", "[1, 2]", None], ["b", "y", "[1]", None], ["c", "y", "[1, 2]", "n"],
    ]  # fmt: skip
    few = difference_table({key: {"a": 1, "b": key} for key in "xyz"})
    assert list(few.columns) == ["key", "a", "b"]
    assert few.rows == [["x", 1, "x"], ["y", 1, "y"], ["z", 1, "z"]]


def test_the_configuration_can_be_read_back():
    config = {"a": {"b": [1, None, "x: y"]}, "c": "<b>\u00e9"}
    found = Skeleton(render(Page("a", "b", configurations={"x": config})))
    assert config in [yaml.safe_load(text) for text in found.texts if text.startswith("a:")]


@pytest.mark.slow
def test_a_page_is_made_without_torch():
    words = "import sys, grpo_ustat.pages.run_page; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
