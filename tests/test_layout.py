"""Where tests are: in the room of the module that they are named after, and every room has some.

Which room may import which is the contract in pyproject.toml, for `lint-imports`.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "grpo_ustat"
ROOMS = sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file())
BESIDE = {"commands", "scripts", "docs", "gpu"}  # whole commands, scripts/, pages, one device
FILES = sorted(TESTS.rglob("test_*.py"))
# First words of docstrings that are clauses.
CLAUSE_WORDS = {
    "Of",
    "As",
    "That",
    "None",
    "Where",
    "What",
    "Whether",
    "How",
    "Which",
    "When",
    "Why",
}


def modules(room: str) -> set[str]:
    """Names of a room's modules, those of rooms within it too; of the package itself for ""."""
    inside = (PACKAGE / room).rglob("*.py") if room else PACKAGE.glob("*.py")
    return {path.stem for path in inside if not path.stem.startswith("__")}


MODULES = {room: modules(room) for room in ("", *ROOMS)}


def imports(file: Path, room: str) -> bool:
    """If the file imports anything of the package's room."""
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return any(f"{name}.".startswith(f"grpo_ustat.{room}.") for name in names)


def misplaced(file: Path) -> str:
    """A line on a file of tests that is in another room than what it tests; "" of the others.

    Named after a module it stands in that module's room; else it imports from its room.
    """
    room = file.parent.name if file.parent != TESTS else ""
    subject = file.stem.removeprefix("test_")
    homes = [home for home in ("", *ROOMS) if subject in MODULES[home]]
    if file.parent not in (TESTS, TESTS / room):
        return f"{file}: rooms have no folders of tests within"
    if room not in {"", *BESIDE, *ROOMS}:
        return f"tests/{room}: no room of grpo_ustat/ has this name"
    if homes and room not in homes:
        return f"{file}: {subject} is a module of {homes}"
    if room in ROOMS and not homes and not imports(file, room):
        return f"{file} imports nothing of grpo_ustat.{room}: move it to the room that it tests"
    return ""


def test_every_file_of_tests_is_in_the_room_that_it_tests():
    assert [line for file in FILES if (line := misplaced(file))] == []


def test_every_room_has_tests():
    assert {room for room in ROOMS if not list((TESTS / room).glob("test_*.py"))} == set()


def test_helpers_hold_no_tests():
    assert not list((TESTS / "helpers").rglob("test_*.py"))


def test_docstrings_start_with_a_noun_or_a_verb():
    """What a thing is or does, and neither a relation nor a condition."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        f"{file.relative_to(PACKAGE)}: {text[:60]}"
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, kinds) and (text := ast.get_docstring(node))
        and text.split()[0].strip("`,.:") in CLAUSE_WORDS
    ]  # fmt: skip
    assert found == []


WHOLE = {"TrainConfig", "MseConfig", "GapConfig", "ReportConfig", "Common", "Shared"}


def test_parts_never_see_the_configuration_of_a_command():
    """They would have to ask which command it is of."""
    fix = (
        "hand it what it needs: a record of config/parts.py (`config.policy_options`), a group of "
        "the configuration (`config.model`), or plain arguments"
    )
    parts = ("policy", "rollout", "tasks", "costs")
    for file in sorted(file for room in parts for file in (PACKAGE / room).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            place = f"{file.relative_to(TESTS.parent)}:{getattr(node, 'lineno', '?')}"
            if isinstance(node, ast.Name | ast.Attribute | ast.alias):
                name = getattr(node, "id", None) or getattr(node, "attr", None)
                name = node.name if isinstance(node, ast.alias) else name
                assert name not in WHOLE, f"{place} names {name}, all that a command knows: {fix}"
            if isinstance(node, ast.arg) and node.arg in ("config", "configs"):
                text = "" if node.annotation is None else ast.unparse(node.annotation)
                assert text and not re.search(r"\b(Any|object)\b", text), (
                    f"{place} takes {node.arg} of no type, which may be all that a command knows: "
                    f"{fix}"
                )
