"""`grpo-ustat VERB ...`: its help, misspelt verbs, and `./scripts/run`, which passes on to it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from grpo_ustat import __main__ as program
from grpo_ustat.cli.verbs import VERBS, help_text, unknown_verb
from grpo_ustat.config import command_line
from grpo_ustat.config.command_line import PROGRAM

ROOT = Path(__file__).parents[2]


def main(monkeypatch, capsys, *words):
    """`grpo-ustat WORDS` in this process; (exit code, standard output, standard error)."""
    monkeypatch.setattr(sys, "argv", ["grpo-ustat", *words])
    code = 0
    try:
        program.main()
    except SystemExit as ended:
        code = ended.code
    return code, *capsys.readouterr()


def test_every_room_with_a_command_is_a_verb():
    rooms = {path.parent.name for path in (ROOT / "grpo_ustat").glob("*/__main__.py")}
    assert {name for name, verb in VERBS.items() if not verb.module} == rooms
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"grpo-ustat": "grpo_ustat.__main__:main"}


def test_help_has_a_line_and_an_example_of_each(monkeypatch, capsys):
    code, out, err = main(monkeypatch, capsys, "--help")
    assert (code, err) == (0, "") and out == help_text() + "\n"
    lines = out.splitlines()
    for name, verb in VERBS.items():
        at = next(i for i, line in enumerate(lines) if line.split()[:1] == [name])
        assert lines[at].endswith(verb.purpose)
        assert lines[at + 1].strip() == " ".join(["grpo-ustat", name, *verb.example])
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize("words", [(), ("help",), ("-h",)])
def test_help_is_what_it_says_of_nothing(monkeypatch, capsys, words):
    code, out, err = main(monkeypatch, capsys, *words)
    assert code == (0 if words else 2) and (out if words else err) == help_text() + "\n"


MISSPELT = {
    "trian": "unknown command 'trian': did you mean train?",
    "doctr": "unknown command 'doctr': did you mean doctor?",
    "MSE": "unknown command 'MSE': did you mean mse?",
    "seed=1": "seed=1 comes after a verb, as in grpo-ustat train seed=1",
    "-m": "-m comes after a verb, as in grpo-ustat train -m",
    "x": "unknown command 'x': choose from train, mse, gap, advise, convert, report, sweep, doctor",
}


@pytest.mark.parametrize("word", MISSPELT)
def test_what_is_no_verb_is_refused_in_a_line(monkeypatch, capsys, word):
    assert unknown_verb(word) == MISSPELT[word]
    assert main(monkeypatch, capsys, word) == (2, "", f"error: {MISSPELT[word]}\n")


@pytest.mark.parametrize("verb", VERBS)
def test_the_verbs_own_words_reach_it(monkeypatch, capsys, verb):
    seen = []
    name = VERBS[verb].module or f"grpo_ustat.{verb}.__main__"
    monkeypatch.setitem(sys.modules, name, type(sys)(name))
    sys.modules[name].main = lambda: seen.append(sys.argv[1:])
    assert main(monkeypatch, capsys, verb, "-m", "a=b c") == (0, "", "")
    assert seen == [["-m", "a=b c"]]


WRONG = {
    "convert": "the following arguments are required: SRC, DST, as in grpo-ustat convert rollouts/ "
    "rollouts.parquet",
    "convert a b c": "unrecognized arguments: c, as in grpo-ustat convert rollouts/ "
    "rollouts.parquet",
    "convert --form trl": "unknown --form: did you mean --from? choose from --help, --from, "
    "--group-size, --reward, --version",
    "sweep status": "the following arguments are required: DIR, as in grpo-ustat sweep status "
    "outputs/train",
    "advise --jsno": "unknown --jsno: did you mean --json? choose from --help, --json",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_command_line_is_refused_in_a_line(monkeypatch, capsys, line):
    code, out, err = main(monkeypatch, capsys, *line.split())
    assert (code, out, err) == (2, "", f"error: {line.split()[0]}: {WRONG[line]}\n")


def lacks(monkeypatch, module):
    """Let `mse` miss a module."""

    def missing():
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setitem(sys.modules, "grpo_ustat.mse.__main__", type(sys)("mse"))
    sys.modules["grpo_ustat.mse.__main__"].main = missing


@pytest.mark.parametrize("module, package", [("hydra", "hydra-core"), ("torch.nn", "torch")])
def test_a_verb_whose_package_is_missing_says_how_to_install_it(
    monkeypatch, capsys, module, package
):
    lacks(monkeypatch, module)
    monkeypatch.setattr(command_line, "IN_CHECKOUT", False)
    monkeypatch.setattr(command_line, "_source_folder", str)
    line = f"grpo-ustat mse needs {package}: pip install 'grpo-ustat[cli]'\n"
    assert main(monkeypatch, capsys, "mse", "seed=1") == (2, "", line)


def test_a_module_of_no_package_of_ours_is_no_matter_of_extras(monkeypatch, capsys):
    lacks(monkeypatch, "mine")
    with pytest.raises(ModuleNotFoundError, match="mine"):
        main(monkeypatch, capsys, "mse")


def test_every_package_of_the_commands_has_its_line():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    names = {
        re.match(r"[\w-]+", one)[0] for one in sum(map(extras.get, ("logs", "torch", "cli")), [])
    }
    assert names == {"grpo-ustat", "omegaconf", *program.EXTRA_PACKAGES.values()}


def test_help_and_a_misspelt_verb_import_neither_torch_nor_hydra():
    code = (
        "import sys; sys.argv = ['grpo-ustat', sys.argv[1]]\n"
        "from grpo_ustat.__main__ import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'hydra', 'omegaconf', 'numpy', 'rich'} & set(sys.modules)"
    )
    for word in ("--help", "trian"):
        subprocess.run([sys.executable, "-c", code, word], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path):
    """./scripts/run beside a Python that prints what it is called with; it is installed."""
    (tmp_path / "scripts").mkdir()
    for name in ("run", "setup.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "${PROGRAM}|$*"\n')
    python.chmod(0o755)
    total = subprocess.run(["cksum"], input=b"", capture_output=True).stdout.decode().strip()
    (tmp_path / ".venv/.installed").write_text(f"{total} {tmp_path}\n")
    return tmp_path


def typed(command, cwd):
    environment = {name: value for name, value in os.environ.items() if name != PROGRAM}
    shell = ["bash", "-c", command]
    return subprocess.run(shell, cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_script_passes_on_and_says_how_it_was_typed(checkout):
    done = typed("./scripts/run train 'a=b c'", checkout)
    assert (done.stdout, done.stderr) == ("./scripts/run|-m grpo_ustat train a=b c\n", "")
    (checkout / "sub dir").mkdir()
    done = typed("../scripts/run mse", checkout / "sub dir")
    assert done.stdout == "../scripts/run|-m grpo_ustat mse\n"


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_first_use_installs_what_the_commands_need(checkout):
    (checkout / ".venv/.installed").unlink()
    done = typed("./scripts/run mse", checkout)
    assert f"-c {checkout}/constraints.txt -e {checkout}[cli]\n" in done.stderr
    done = typed(
        f". scripts/setup.sh; printf x >> pyproject.toml; set_up {checkout} test", checkout
    )
    assert done.stderr.endswith(f"-e {checkout}[cli,test]\n")
