"""The pages as a site: every page is in its navigation, and shows there what GitHub shows."""

from __future__ import annotations

import runpy

import pytest
import yaml
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
