"""The page in a real browser: what models wrote never runs, and the page's own script does."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import hostile
import pytest
from test_page import page_of

from grpo_ustat.pages.page import Figure, render, visible

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
import browser as browsers  # noqa: E402

pytestmark = pytest.mark.slow
ADDRESS = "http://127.0.0.1:9/picture"
PICTURE = f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9" onload="{hostile.HIT}">
<style>@import "{ADDRESS}"; * {{ fill: url({ADDRESS}) }}</style><script>{hostile.HIT}</script>
<script href="{ADDRESS}"/><image href="{ADDRESS}" width="9" height="9"/><use href="{ADDRESS}#x"/>
<a href="javascript:{hostile.HIT}"><rect width="9" height="9" onclick="{hostile.HIT}"/></a>
<foreignObject width="9" height="9"><iframe xmlns="http://www.w3.org/1999/xhtml" src="{ADDRESS}"/>
</foreignObject><animate attributeName="x" begin="0s" dur="1s" onbegin="{hostile.HIT}"/></svg>"""


@pytest.fixture(scope="module")
def browser():
    if why := browsers.missing():
        pytest.skip(why)
    with browsers.Browser() as one:
        yield one


def opened(browser, tmp_path, text, **options):
    file = tmp_path / "report.html"
    file.write_text(text, errors="replace")
    browser.open(file, **options)


def hits(browser) -> int:
    return browser.value("window.HIT || 0")


def test_nothing_that_the_data_says_is_run(browser, tmp_path):
    """In every place of the page; through searching, sorting, turning and clicking."""
    page = page_of(hostile.TEXTS)
    page = replace(page, figures=[*page.figures, Figure("a picture", PICTURE)])
    opened(browser, tmp_path, render(page))
    assert browser.value("document.title") == visible(page.title)
    images = "[...document.querySelectorAll('figure img')].map(img => img.naturalWidth)"
    assert all(browser.value(images)) and len(browser.value(images)) == len(page.figures)
    shown = []
    for _ in range(5):  # pages of completions
        shown += browser.value("[...document.querySelectorAll('article')].map(a => a.innerText)")
        more = browser.value("!document.getElementById('forth').disabled")
        browser.value("document.getElementById('forth').click()")
        if not more:
            break
    for text in hostile.MARKUP + hostile.UNSEEN:
        assert sum(visible(text) in one for one in shown) >= 1, text
    browser.value(
        "document.querySelectorAll('th button, summary').forEach(one => one.click());"
        "document.querySelectorAll('article, td, dd, p, a, img').forEach(one => one.dispatchEvent("
        "new Event('mouseover', {bubbles: true})));"
        "document.querySelectorAll('img').forEach(one => one.click())"
    )
    for text in hostile.MARKUP:
        browser.value(f"search.value = {text!r}; filters.dispatchEvent(new Event('input'))")
        assert browser.value("document.querySelectorAll('mark').length") > 0
    assert hits(browser) == 0
    for place in browser.value("[...document.links].map(a => a.href)"):
        assert place.startswith("file://")
    browser.settle()
    assert browser.value("document.title") == visible(page.title)
    assert browser.requests() == browser.dialogs() == []
    assert browser.value("document.querySelectorAll('script').length") == 2
    assert browser.value("document.querySelectorAll('iframe,object,base,link').length") == 0


def test_the_page_fits_and_its_controls_work(browser, tmp_path):
    texts = ["10 [9, 11]", "9.5", "", "-1e-3", "b", "a"]
    opened(browser, tmp_path, render(page_of(hostile.LONG + texts, rewards=[0, 1, 0.5])))
    rows = "[...document.querySelectorAll('#tables tbody tr')]"
    column = f"{rows}.map(row => row.cells[1].innerText)"
    first = browser.value(column)
    orders = []
    for _ in range(3):
        browser.value("document.querySelectorAll('#tables th button')[1].click()")
        orders.append([text for text in browser.value(column) if len(text) < 99])
    assert orders[0] == ["-1e-3", "9.5", "10 [9, 11]", "a", "b", "–"]
    assert orders[1] == ["b", "a", "10 [9, 11]", "9.5", "-1e-3", "–"]
    assert browser.value(column) == first
    assert browser.value("document.querySelector('#tables th').ariaSort") == "none"
    browser.value("filters.querySelectorAll('select')[0].value = '1'")  # the second of 0, 0.5, 1
    browser.value("filters.dispatchEvent(new Event('input'))")
    assert browser.value("document.getElementById('count').innerText").startswith("3 of 9 ")
    for width in (390, 1280):
        for dark in (False, True):
            browser.open(tmp_path / "report.html", width, dark)
            assert browser.value("document.scrollingElement.scrollWidth") <= width
            ground = browser.value("getComputedStyle(document.documentElement).backgroundColor")
            assert (ground == "rgb(255, 255, 255)") is not dark
