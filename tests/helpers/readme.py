"""The README, pages and skills of docs/: blocks, commands, links, and the packages they show."""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from pathlib import Path

from warm import run_python

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "docs/skills").glob("*/SKILL.md")),
    ]
}
EXTENDING = PAGES["docs/extending.md"]


def section(text, heading):
    """What stands below a heading, up to the next one."""
    return re.split(r"\n##+ ", text.split(f"# {heading}\n")[1])[0]


def blocks(text, heading):
    """The fenced blocks of a section, by language."""
    return dict(re.findall(r"```(\w+)\n(.*?)```", section(text, heading), re.DOTALL))


def commands(text):
    """Every command of the bash blocks of a text, as words."""
    scripts = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = "\n".join(scripts).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def own_commands(heading):
    """The `grpo-ustat` commands of a section of docs/extending.md."""
    return [words for words in commands(section(EXTENDING, heading)) if words[0] == "grpo-ustat"]


def prose(text):
    """A page without its fenced blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)


def links(text):
    """The targets of a page's links and images."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(text))


def headings(text, level="#{1,6}"):
    """The headings of a page, as they are written."""
    return re.findall(rf"^{level} (.+)$", prose(text), re.MULTILINE)


def anchor(heading):
    """The anchor that GitHub gives a heading: lower case, no punctuation, `-` for a space."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def installed(heading, site):
    """As pip leaves a section's package: its module, and its entry points in a dist-info folder."""
    files = blocks(EXTENDING, heading)
    project = tomllib.loads(files["toml"])["project"]
    info = site / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    (site / f"{project['name']}.py").write_text(files["python"])
    return site


def run(words, cwd, site=None, **environment):
    """`./scripts/run VERB ...` or `grpo-ustat VERB ...` with this Python; (exit code, standard
    error). `environment` comes to that of this process.
    """
    assert words[0] in ("./scripts/run", "grpo-ustat"), words
    paths = [str(path) for path in (site, ROOT, os.environ.get("PYTHONPATH")) if path]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment
    done = run_python("-m", "grpo_ustat", *words[1:], cwd=cwd, env=env)
    return done.returncode, done.stderr


def only(folder, pattern):
    """The one file of this name in the one run folder below."""
    (file,) = folder.glob(f"outputs/*/*/seed-0/{pattern}")
    return file
