"""Files of the repository that no command reads, and where tests and names of fields may be.

Which room may import which is the contract in pyproject.toml, for `lint-imports`. Calls that run a
text are rules of ruff: S102, S301, S307.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import yaml

import grpo_ustat

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PACKAGE = ROOT / "grpo_ustat"
ROOMS = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
BESIDE = {"commands", "scripts", "docs", "gpu"}  # whole commands, scripts/, pages, one device
# Calls that run a text, and imports and settings by which a file could.
UNSAFE = re.compile(
    r"\b(sympify|parse_expr|lambdify|__import__|read_pickle|literal_eval)\("
    r"|\b(pickle|cloudpickle|dill|joblib|marshal|shelve)\b.*import|import (pickle|marshal|shelve)"
    r"|allow_pickle=True|trust_remote_code=True|weights_only=False|yaml\.(unsafe_|full_)?load\("
)


def test_every_room_has_tests_and_every_folder_of_tests_is_a_room():
    assert {path.parent.name for path in TESTS.glob("*/test_*.py")} == ROOMS | BESIDE


WHOLE = {"TrainConfig", "MseConfig", "GapConfig", "ReportConfig", "Common", "Shared"}


def test_parts_never_see_the_configuration_of_a_command():
    """They would have to ask which command it is of; config/parts.py has what they get instead."""
    for file in (file for x in ("policy", "rollout", "tasks") for file in (PACKAGE / x).rglob("*")):
        if file.suffix == ".py":
            nodes = ast.walk(ast.parse(file.read_text()))
            names = {node.id for node in nodes if isinstance(node, ast.Name)}
            assert not names & WHOLE, file


def test_no_source_runs_a_text():
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]
    found = [
        f"{file}: {line.strip()}"
        for file in files
        for line in file.read_text().splitlines()
        if UNSAFE.search(line) and "SafeLoader" not in line and not line.lstrip().startswith("#")
    ]
    assert len(files) > 60 and found == []


def test_versions_and_citations_agree():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    readme, changes = ((ROOT / name).read_text() for name in ("README.md", "CHANGELOG.md"))
    assert citation["version"] == grpo_ustat.__version__
    assert re.findall(r"version = \{(.*)\}", readme) == [grpo_ustat.__version__]
    assert re.findall(r"^## \[(\d[^\]]*)\]", changes, re.MULTILINE)[0] == grpo_ustat.__version__
    assert citation["preferred-citation"]["title"] in " ".join(readme.split())


def test_the_formatter_of_a_commit_is_that_of_the_checks():
    (hooks,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    pinned = re.search(r"^ruff==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    assert hooks["rev"] == f"v{pinned}"


def test_files_that_contributors_are_sent_to_are_there():
    for name in ("CONTRIBUTING.md", "SECURITY.md"):
        for path in re.findall(r"`([\w.]+/[\w./-]*|\.\w+/\w+)`", (ROOT / name).read_text()):
            left = "NAME" in path or path.endswith("mean_length")
            assert left or (ROOT / path).exists(), (name, path)
