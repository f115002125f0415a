"""Where tests are: in the room of the module that they are named after, and every room has some."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "grpo_ustat"
ROOMS = sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file())
BESIDE = {"commands", "scripts", "docs", "gpu"}  # whole commands, scripts/, pages, one device
FILES = sorted(TESTS.rglob("test_*.py"))
GROUND = ("config", "estimators", "terminal")
MAY_IMPORT = {  # each room, from the top, and the rooms below it that it may import
    # commands
    "train": ("cli", "launch", "costs", "pages", "rollout", "policy", "tasks", "runs",
              "distributed", *GROUND),
    "mse": ("cli", "launch", "costs", "pages", "logs", "rollout", "policy", "tasks", "runs",
            "distributed", *GROUND),
    "gap": ("cli", "launch", "costs", "pages", "runs", "distributed", *GROUND),
    "report": ("cli", "launch", "pages", "runs", *GROUND),
    "advise": ("cli", "pages", "logs", "runs", *GROUND),
    "doctor": ("cli", "tasks", "runs", "distributed", "config", "terminal"),
    "integrations": ("pages", "policy", "runs", *GROUND),
    # machinery
    "cli": ("launch", "pages", "logs", "policy", "tasks", "runs", "distributed", *GROUND),
    "launch": ("runs", "distributed", *GROUND),
    "costs": ("policy", "runs", "config", "terminal"),
    "pages": ("runs", *GROUND),
    "logs": ("runs", *GROUND),
    # parts
    "rollout": ("policy", "distributed", "config", "terminal"),
    "policy": ("tasks", "distributed", *GROUND),
    "tasks": ("distributed", *GROUND),
    "runs": ("distributed", "config", "terminal"),
    "distributed": GROUND,
    # ground
    "config": ("estimators", "terminal"),
    "estimators": (),
    "terminal": (),
}  # fmt: skip


def modules(room: str) -> set[str]:
    """Names of a room's modules, those of rooms within it too; of the package itself for ""."""
    inside = (PACKAGE / room).rglob("*.py") if room else PACKAGE.glob("*.py")
    return {path.stem for path in inside if not path.stem.startswith("__")}


def imports_of(file: Path) -> set[str]:
    """Everything that a file imports from the package, dotted."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name for name in names if name.startswith("grpo_ustat.")}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(TESTS)))
def test_a_file_of_tests_is_in_the_room_that_it_tests(file):
    """Named after a module it stands in that module's room; else it imports from its room."""
    room = file.parent.name if file.parent != TESTS else ""
    assert file.parent in (TESTS, TESTS / room), f"{file}: rooms have no folders of tests within"
    assert room in {"", *BESIDE, *ROOMS}, f"tests/{room}: no room of grpo_ustat/ has this name"
    subject = file.stem.removeprefix("test_")
    homes = [home for home in ("", *ROOMS) if subject in modules(home)]
    assert not homes or room in homes, f"{file}: {subject} is a module of {homes}"
    if room in ROOMS and not homes:
        assert any(name.split(".")[1] == room for name in imports_of(file)), (
            f"{file} imports nothing of grpo_ustat.{room}: move it to the room that it tests"
        )


def test_every_room_has_tests():
    assert {room for room in ROOMS if not list((TESTS / room).glob("test_*.py"))} == set()


def test_helpers_hold_no_tests():
    assert not list((TESTS / "helpers").rglob("test_*.py"))


@pytest.mark.parametrize("room", ["", *ROOMS])
def test_docstrings_start_with_a_noun_or_a_verb(room):
    """What a thing is or does, and neither a relation nor a condition."""
    files = (PACKAGE / room).rglob("*.py") if room else PACKAGE.glob("*.py")
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        f"{file.name}: {text[:60]}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, kinds) and (text := ast.get_docstring(node))
        and text.split()[0].strip("`,.:") in ("Of", "As", "That", "None", "Where")
    ]  # fmt: skip
    assert found == []


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_from_the_rooms_of_the_table(room):
    """Imports within functions and those for types count; `records` and `draws` are everybody's."""
    files = (PACKAGE / room).rglob("*.py")
    found = {name.split(".")[1] for file in files for name in imports_of(file)} & set(ROOMS)
    found, allowed = found - {room}, set(MAY_IMPORT[room])
    assert found <= allowed, f"{room} imports {sorted(found - allowed)}: see MAY_IMPORT"
    assert allowed <= found, f"{room} no longer imports {sorted(allowed - found)}: take it out"


def test_no_room_imports_a_room_above_it():
    rooms = list(MAY_IMPORT)
    assert sorted(rooms) == ROOMS
    climbs = [
        (room, below)
        for place, room in enumerate(rooms)
        for below in MAY_IMPORT[room]
        if rooms.index(below) <= place
    ]
    assert not climbs, f"(a room, what it imports from above itself): {climbs}"


WHOLE = {"TrainConfig", "MseConfig", "GapConfig", "ReportConfig", "Common", "Shared"}


@pytest.mark.parametrize("room", ["policy", "rollout", "tasks", "costs"])
def test_parts_never_see_the_configuration_of_a_command(room):
    """They would have to ask which command it is of."""
    fix = (
        "hand it what it needs: a record of config/parts.py (`config.policy_options`), a group of "
        "the configuration (`config.model`), or plain arguments"
    )
    for file in sorted((PACKAGE / room).rglob("*.py")):
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
