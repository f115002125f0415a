"""No text of a model, a data set or a file is run: what the sources must not contain."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUNNERS = {"eval", "exec", "compile", "parse_expr", "sympify", "S", "lambdify", "literal_eval"}
SAFE_OWNERS = {"re", "torch"}  # re.compile, torch.compile
LOADERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def offences(source: str) -> list[str]:
    """What a module does that could run a text, as `line: what`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found += [(node, f"import of {name}") for name in _unsafe_imports(node)]
        elif isinstance(node, ast.Call):
            found += [(node, reason) for reason in _unsafe_call(node)]
        elif isinstance(node, ast.Name) and node.id in {"eval", "exec"} and _is_read(node):
            found.append((node, f"use of {node.id}"))
    return [f"{node.lineno}: {reason}" for node, reason in found]


def _unsafe_imports(node):
    names = [alias.name for alias in node.names]
    modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
    return [m for m in modules if m.split(".")[0] in LOADERS] + [n for n in names if n in RUNNERS]


def _unsafe_call(node):
    name, owner = _name(node.func)
    settings = {k.arg: getattr(k.value, "value", k.value) for k in node.keywords}
    mode = name == "eval" and isinstance(node.func, ast.Attribute) and not node.args
    if name in RUNNERS and owner not in SAFE_OWNERS and not mode:  # model.eval() is a mode
        yield f"call of {name}"
    if (name, owner) == ("load", "torch") and settings.get("weights_only") is not True:
        yield "torch.load without weights_only=True"
    if settings.get("trust_remote_code") is True:
        yield "trust_remote_code"
    if settings.get("allow_pickle") is True:
        yield "allow_pickle"
    if owner == "yaml" and name.startswith(("unsafe_load", "full_load")):
        yield f"yaml.{name}"
    if (name, owner) == ("load", "yaml") and "Safe" not in ast.unparse(node):
        yield "yaml.load without a safe loader"
    if name == "__import__" or (name == "read_pickle"):
        yield f"call of {name}"


def _is_read(node):
    return isinstance(node.ctx, ast.Load)


def _name(function):
    if isinstance(function, ast.Attribute):
        owner = function.value
        return function.attr, getattr(owner, "id", getattr(owner, "attr", ""))
    return getattr(function, "id", ""), ""


def sources():
    for folder in ("grpo_ustat", "scripts"):
        files = (path for path in (ROOT / folder).rglob("*") if path.is_file())
        yield from (f for f in files if f.suffix == ".py" or _is_python(f))


def _is_python(path):
    with path.open("rb") as file:
        return file.readline().startswith(b"#!") and b"python" in path.read_bytes()[:80]


@pytest.mark.slow
def test_no_source_runs_a_text():
    found = {str(path.relative_to(ROOT)): offences(path.read_text()) for path in sources()}
    assert len(found) > 60 and "grpo_ustat/tasks/verify_worker.py" in found
    assert {path: reasons for path, reasons in found.items() if reasons} == {}


@pytest.mark.parametrize(
    "source, reason",
    [
        ("eval(text)", "call of eval"), ("builtins.exec(text)", "call of exec"),
        ("run = eval", "use of eval"), ("map(exec, texts)", "use of exec"),
        ("compile(text, '', 'eval')", "call of compile"),
        ("from sympy.parsing import parse_expr", "import of parse_expr"),
        ("sympy.sympify(text)", "call of sympify"), ("sympy.S(text)", "call of S"),
        ("from sympy import sympify as s", "import of sympify"),
        ("import pickle", "import of pickle"), ("import pickle as p", "import of pickle"),
        ("from pickle import loads", "import of pickle"), ("import marshal", "import of marshal"),
        ("import shelve", "import of shelve"), ("import dill.session", "import of dill.session"),
        ("torch.load(path)", "torch.load"), ("torch.load(path, weights_only=False)", "torch.load"),
        ("torch.load(path, weights_only=flag)", "torch.load"),
        ("Model.from_pretrained(name, trust_remote_code=True)", "trust_remote_code"),
        ("np.load(path, allow_pickle=True)", "allow_pickle"),
        ("pandas.read_pickle(path)", "call of read_pickle"), ("__import__(text)", "__import__"),
        ("yaml.load(text)", "yaml.load"), ("yaml.load(text, Loader=yaml.Loader)", "yaml.load"),
        ("yaml.unsafe_load(text)", "yaml.unsafe_load"),
    ],
)  # fmt: skip
def test_the_check_sees(source, reason):
    assert any(reason in found for found in offences(source)), offences(source)


@pytest.mark.parametrize(
    "source",
    [
        "re.compile(text)", "torch.compile(model)", "model.eval()", "eval: str = x",
        "torch.load(path, weights_only=True)",
        "yaml.safe_load(text)", "yaml.load(text, Loader=yaml.SafeLoader)", "json.loads(text)",
        "f(trust_remote_code=False)", "f(trust_remote_code=config.model.trust_remote_code)",
        "np.load(path)", "subprocess.run(['python', '-c', text])",
    ],
)  # fmt: skip
def test_the_check_lets_pass(source):
    assert offences(source) == []
