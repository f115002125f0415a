"""The README's blocks and commands, and the small packages that it shows, laid out as installed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


def blocks(heading):
    """The fenced blocks of a section, by language."""
    section = re.split(r"\n##+ ", TEXT.split(f"# {heading}\n")[1])[0]
    return dict(re.findall(r"```(\w+)\n(.*?)```", section, re.DOTALL))


def commands(text=TEXT):
    """Every command of the bash blocks of a text, as words."""
    found = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = "\n".join(found).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def installed(heading, site):
    """As pip leaves a section's package: its module, and its entry points in a dist-info folder."""
    found = blocks(heading)
    project = tomllib.loads(found["toml"])["project"]
    info = site / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    (site / f"{project['name']}.py").write_text(found["python"])
    return site


def run(words, cwd, site=None):
    """`./scripts/run ENTRY ...` with this Python; (exit code, standard error)."""
    _, entry, *arguments = words
    paths = [str(path) for path in (site, ROOT, os.environ.get("PYTHONPATH")) if path]
    done = subprocess.run(
        [sys.executable, "-m", f"grpo_ustat.{entry}", *arguments],
        cwd=cwd, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, capture_output=True,
        text=True,
    )  # fmt: skip
    return done.returncode, done.stderr
