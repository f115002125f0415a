"""Hooks for MkDocs that rewrite links to files outside docs/ and warn of external content.

On GitHub, pages link to the README, and the README links to pages. On the site, the README is the
page `start.md`. Other files of the repository have no public address as long as `project.urls` is
not set. A link to such a file is therefore replaced by the link's text, as on the PyPI page.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path

# With --strict a warning ends the build.
log = logging.getLogger("mkdocs.hooks")

LINK = re.compile(r"\[([^\]]+)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
# References that make a browser load content from another host.
LOADED = re.compile(
    r"""<(?:script|img|iframe|source|link)\b[^>]*?\s(?:src|href)=["']?(?:https?:)?//[^\s"'>]+"""
    r"""|(?:url\(|@import)\s*["']?(?:https?:)?//[^\s"')]+"""
)


def on_files(files, config):
    """Add the repository's README as a page, and make pages wide enough for lines of code."""
    from mkdocs.structure.files import File

    readme = Path(config.config_file_path).parent / "README.md"
    files.append(File.generated(config, "start.md", abs_src_path=str(readme)))
    wide = ".md-grid { max-width: 80rem; }"
    files.append(File.generated(config, "wide.css", content=wide))
    return files


def on_page_markdown(markdown, page, config, files):
    """Rewrite links for the site."""
    return site_links(markdown, page.file.src_uri)


def site_links(markdown, page):
    """Return a page's text with its links rewritten for the site.

    Args:
        markdown: text of the page in the repository.
        page: path of the page in docs/; `start.md` for the repository's README.
    """
    folder = posixpath.dirname("README.md" if page == "start.md" else f"docs/{page}")

    def link(match):
        text, target, anchor = match.groups(default="")
        path = posixpath.normpath(posixpath.join(folder, target))
        path = "docs/start.md" if path == "README.md" else path
        if not path.startswith("docs/"):
            return text
        return f"[{text}]({posixpath.relpath(path, posixpath.dirname(f'docs/{page}'))}{anchor})"

    return LINK.sub(link, markdown)


def on_post_build(config):
    """Warn of each page and style sheet that loads content from another host."""
    for file in sorted(Path(config.site_dir).rglob("*")):
        if file.suffix in (".html", ".css"):
            for loaded in LOADED.findall(file.read_text()):
                log.warning("%s loads content from another host: %s", file, loaded)
