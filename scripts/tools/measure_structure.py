"""Count the package's modules, rooms, lines by kind, functions, and whole configurations.

    python scripts/tools/measure_structure.py [FOLDER]

A *room* is a package or a module directly below `grpo_ustat`. The *floors* are the layers of the
import contract in pyproject.toml. Each line counts as docstring, as comment (if it contains nothing
else), as blank, or as code. A *private helper used once* is a function with a name that begins with
a single underscore and occurs only once outside the function's definition.

A *whole configuration* is an instance of a class in `config/` that has all fields of a command.
Whole configurations are recognised by the type annotations of parameters. A file is *visited* if a
function in it takes a whole configuration. A *climb* is a call that passes a whole configuration to
a function on a lower floor. A reader who follows the call has to return to the higher floor for the
configuration.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import statistics
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHOLE = ("MseConfig", "TrainConfig", "GapConfig", "ReportConfig", "Common", "Shared")


def room_of(module: str) -> str:
    """Return the room in a module's dotted name, such as `mse` in `grpo_ustat.mse.pool`."""
    return (module.split(".") + [""])[1]


def kinds_of_lines(source: str, tree: ast.Module) -> Counter[str]:
    """Count docstring lines, comment lines, blank lines and code lines."""
    lines = source.splitlines()
    docstring: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            if is_text and isinstance(first.value.value, str):
                docstring.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    comments = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    counts: Counter[str] = Counter()
    for number, line in enumerate(lines, start=1):
        if number in docstring:
            counts["docstring"] += 1
        elif not line.strip():
            counts["blank"] += 1
        elif number in comments and line.lstrip().startswith("#"):
            counts["comment"] += 1
        else:
            counts["code"] += 1
    return counts


def imported_modules(tree: ast.Module, modules: dict[str, ast.Module]) -> dict[str, str]:
    """Return the module of the package from which each imported name comes."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                home = inner if inner in modules else node.module
                if home in modules:
                    names[alias.asname or alias.name] = home
    return names


def takes_whole(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the names of parameters that are whole configurations."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    annotated = {
        argument.arg: ast.unparse(argument.annotation)
        for argument in arguments
        if argument.annotation
    }
    return {name for name, text in annotated.items() if set(re.findall(r"\w+", text)) & {*WHOLE}}


def main() -> None:
    """Print one line for each count."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT, help="of a checkout")
    root = parser.parse_args().folder.resolve()
    package = root / "grpo_ustat"
    modules: dict[str, ast.Module] = {}
    lines: Counter[str] = Counter()
    sources: dict[str, str] = {}
    for file in sorted(package.rglob("*.py")):
        name = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        sources[name] = file.read_text()
        modules[name] = ast.parse(sources[name])
        lines += kinds_of_lines(sources[name], modules[name])

    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(rule["layers"] for rule in contracts["contracts"] if "layers" in rule)
    floors = {
        room_of(module.strip("() ")): len(layers) - number
        for number, layer in enumerate(layers)
        for module in layer.split("|")
    }
    exempt = sum(len(rule.get("ignore_imports", [])) for rule in contracts["contracts"])

    rooms = {room_of(name) for name in modules} - {""}
    arrows, visited, climbs = set(), set(), 0
    lengths, private = [], Counter()
    words = Counter(word for source in sources.values() for word in re.findall(r"\w+", source))
    for name, tree in modules.items():
        homes = imported_modules(tree, modules)
        arrows |= {(room_of(name), room_of(home)) for home in homes.values()}
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            lengths.append((function.end_lineno or 0) - function.lineno + 1)
            if function.name.startswith("_") and not function.name.startswith("__"):
                private[function.name] += 1
            configurations = takes_whole(function)
            if configurations:
                visited.add(name)
            for call in ast.walk(function):
                if not (isinstance(call, ast.Call) and configurations):
                    continue
                called = ast.unparse(call.func).partition(".")[0]
                values = [*call.args, *(keyword.value for keyword in call.keywords)]
                is_passed = any(isinstance(x, ast.Name) and x.id in configurations for x in values)
                home = homes.get(called)
                if is_passed and home:
                    climbs += floors.get(room_of(home), 0) < floors.get(room_of(name), 0)
    once = sum(count == 1 and words[name] == 2 for name, count in private.items())

    files = [file.name for file in package.iterdir() if file.is_file()]
    tests = sum(len(file.read_text().splitlines()) for file in (root / "tests").rglob("*.py"))
    numbers = {
        "modules": len(modules), "rooms": len(rooms), "floors": len(layers),
        "files at the package's root": len(files), "arrows between rooms":
        len({arrow for arrow in arrows if arrow[0] != arrow[1]}),
        "exemptions of the import contracts": exempt, "lines": sum(lines.values()),
        **{f"lines of {kind}": lines[kind] for kind in ("code", "docstring", "comment", "blank")},
        "longest module": max(len(source.splitlines()) for source in sources.values()),
        "modules of over 500 lines":
        sum(len(source.splitlines()) > 500 for source in sources.values()),
        "functions": len(lengths), "median function": int(statistics.median(lengths)),
        "longest function": max(lengths), "private helpers used once": once,
        "files that a whole configuration visits": len(visited),
        "climbs of a whole configuration": climbs,
        "uses of Any": sum(len(re.findall(r"\bAny\b", x)) for x in sources.values()),
        "lines of tests": tests,
    }  # fmt: skip
    for name, number in numbers.items():
        print(f"{name:42} {number:7}")


if __name__ == "__main__":
    main()
