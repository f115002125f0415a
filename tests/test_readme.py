"""The README's commands: the command line takes each of them, and those of the tour run."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


ROOT = Path(__file__).parents[1]
ENTRIES = ("train", "mse", "report")
NOT_HERE = {  # a reader's own, or what a machine has
    "FOLDER": "tests/data/math/train.jsonl",
    "math500.jsonl": "tests/data/math/test.jsonl",
}


def commands():
    """Every command of the README's bash blocks, as words."""
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]
