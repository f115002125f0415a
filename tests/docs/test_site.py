"""The pages as a site: every page is in its navigation, and shows there what GitHub shows."""

from __future__ import annotations

import runpy

import pytest
import yaml
from markdown_it import MarkdownIt
from readme import ROOT

HOOK = runpy.run_path(str(ROOT / "scripts/tools/mkdocs_hook.py"))
PAGES = sorted(path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md"))


class Loader(yaml.SafeLoader):
    """YAML whose Python objects, the anchors' function, are left out."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def test_every_page_is_in_the_navigation_once():
    site = yaml.load((ROOT / ".mkdocs.yml").read_text(), Loader)
    entries = [entry for group in site["nav"] for pages in group.values() for entry in pages]
    files = [entry if isinstance(entry, str) else "".join(entry.values()) for entry in entries]
    assert sorted(files) == sorted([*PAGES, "start.md"])  # the last is the README


BLOCKS = (
    "paragraph_open",
    "fence",
    "code_block",
    "table_open",
    "bullet_list_open",
    "ordered_list_open",
)


@pytest.mark.parametrize("page", ["../README.md", *PAGES])
def test_the_site_sees_the_blocks_that_github_sees(page):
    """It wants an empty line before a list or a table, an indent of four for what is of an item,
    and four more for what is code by its indentation. GitHub takes less.
    """
    lines = (ROOT / "docs" / page).read_text().splitlines()
    items, unseen, last = [], [], None
    for token in MarkdownIt().enable("table").parse("\n".join(lines)):
        if token.type == "list_item_open":
            start = token.map[0]
            if last is not None and "" in lines[last : start - 1] and lines[start - 1]:
                unseen.append(f"{page}:{start + 1}: needs an empty line before it")
            items.append(start)
        elif token.type == "list_item_close":
            last = items.pop()
        elif token.type in BLOCKS:
            start, last = token.map[0], None
            line, indent = lines[start], 4 * (len(items) + (token.type == "code_block"))
            if items and start != items[-1] and not line.startswith(" " * indent):
                unseen.append(f"{page}:{start + 1}: indent it by {indent}")
            if not items and token.type not in BLOCKS[:3] and start and lines[start - 1].strip():
                unseen.append(f"{page}:{start + 1}: needs an empty line before it")
    assert unseen == []


@pytest.mark.parametrize(
    "page, text, shown",
    [
        ("README.md", "[a](../README.md#ten-minutes)", "[a](start.md#ten-minutes)"),
        (
            "start.md",
            "[a](docs/faq.md), ![b](docs/images/b.png)",
            "[a](faq.md), ![b](images/b.png)",
        ),
        ("skills/grpo-ustat/SKILL.md", "[a](../../trl.md#b)", "[a](../../trl.md#b)"),
        ("faq.md", "[`a`](../conf/a.yaml), [b](#c)", "`a`, [b](#c)"),
        ("start.md", "[Apache-2.0](LICENSE)", "Apache-2.0"),
    ],
)
def test_links_lead_within_the_site_or_are_text(page, text, shown):
    assert HOOK["site_links"](text, page) == shown


def test_what_a_page_loads_from_another_host_is_seen():
    loaded = HOOK["LOADED"].findall(
        '<script src="https://a.b/c.js"></script><link rel="stylesheet" href=//a.b/c.css>'
        '<img alt="d" src="http://a.b/c.png"> @import "https://a.b/c.css"; url(https://a.b/c.woff)'
    )
    assert len(loaded) == 5
    assert not HOOK["LOADED"].findall('<a href="https://a.b"> <img src="../a.png"> url(data:a)')
