"""Screens and pages as text of 80 columns, without what differs between machines and days."""

from __future__ import annotations

import difflib
import re
import shlex
import textwrap
from html.parser import HTMLParser
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden"
REWRITE = "python -m pytest tests/test_wording.py --rewrite"
WIDTH = 80
# Elements of a page that hold data or code, not text to read.
UNREAD = {"head", "script", "style", "pre"}
# Elements that begin and end a line.
LINES = {"h1", "h2", "h3", "p", "tr", "figcaption", "summary", "div", "nav", "form"}
HEADINGS = {"h1": "# ", "h2": "## ", "h3": "### "}
# Rows that are shown of a table that is folded.
FOLDED_ROWS = 3
# Texts that a machine or a day decides, by what is shown instead.
MASKS = {
    "DATE on HOST": r"\d{4}-\d\d-\d\d \d\d:\d\d UTC on \S+",
    "SECONDS s": r"\b\d+\.\d+ s\b",
    "N cores": r"\b\d+ cores\b",
    "N rows": r"(?<=^)\d+ rows(?=$)",
    "THIS RUN": r"(?<=^Wall time: ).*|(?<=^Fingerprint: ).*|(?<=^Folder: ).*"
    r"|(?<=^Commit: ).*(\n    .*)*|(?<=^Versions: ).*(\n    .*)*",
}


def masked(text, **places):
    """The text with names for folders, dates, hosts, seconds and sizes.

    Args:
        places: a path by the name that is shown for it.
    """
    for name, path in places.items():
        text = text.replace(str(path), name)
    for name, pattern in MASKS.items():
        text = re.sub(pattern, name, text, flags=re.MULTILINE)
    return "".join(line.rstrip() + "\n" for line in text.strip("\n").splitlines())


def naming(*words):
    """A pattern for `match=` of a text that holds all words, in any order."""
    return "(?s)" + "".join(f"(?=.*{re.escape(str(word))})" for word in words)


def commands(name):
    """The command lines of a golden file, the lines that begin with `$`, as verb and words."""
    lines = (GOLDEN / f"{name}.txt").read_text().splitlines()
    return [tuple(shlex.split(line)[2:]) for line in lines if line.startswith("$ ")]


def transcript(name, answer):
    """Every command line of a golden file with the answer to its verb and words."""
    blocks = []
    for verb, *words in commands(name):
        line = shlex.join(["grpo-ustat", verb, *words])
        blocks.append(f"$ {line}\n{answer(verb, words)}")
    return "\n".join(blocks)


def difference(name, text, rewrite=False):
    """What differs between a golden file and the text, "" without; `rewrite` writes the file."""
    file = GOLDEN / f"{name}.txt"
    before = file.read_text() if file.is_file() else ""
    if rewrite and text != before:
        GOLDEN.mkdir(exist_ok=True)
        file.write_text(text)
    if rewrite or text == before:
        return ""
    lines = difflib.unified_diff(
        before.splitlines(), text.splitlines(), f"tests/golden/{file.name}", "now", lineterm=""
    )
    return "\n".join([*lines, f"If the new text is meant: {REWRITE}"])


def page_text(html):
    """The text of an HTML page: a line for each paragraph, fact and row of a table.

    Of folded tables it has the head and the first rows.
    """
    reader = _Reader()
    reader.feed(html)
    return "\n".join(reader.lines)


class _Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.lines, self.text, self.unread = [], "", 0
        self.folded, self.rows = False, 0

    def handle_starttag(self, tag, attrs):
        self.unread += tag in UNREAD
        if tag in LINES:
            self._end_line()
        if tag == "details":
            self.folded, self.rows = True, 0
        self.rows += tag == "tr"
        self.text += HEADINGS.get(tag, "")

    def handle_endtag(self, tag):
        self.unread -= tag in UNREAD
        if tag == "tr" and self.folded and self.rows > FOLDED_ROWS + 1:
            self.text = ""
        if tag in LINES:
            self._end_line()
        if tag == "details":
            self.folded = False
        self.text += {"th": " | ", "td": " | ", "dt": ": ", "a": " "}.get(tag, "")

    def handle_data(self, data):
        if not self.unread:
            self.text += data

    def _end_line(self):
        line = " ".join(self.text.split()).removesuffix(" |")
        if line.startswith("##"):
            self.lines.append("")
        self.lines += textwrap.wrap(line, WIDTH, subsequent_indent="    ", break_long_words=False)
        self.text = ""
