"""Wrong command lines: one line each (golden/refused_words.txt), and what it says to type is taken.

A case is a line `$ grpo-ustat VERB WORDS` of that file; `--rewrite` writes the answer below it.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import golden
import pytest
import yaml

from grpo_ustat.cli.choices import fits, is_overlay
from grpo_ustat.cli.compose import parse
from grpo_ustat.cli.errors import check_names
from grpo_ustat.cli.hydra_api import parse_arguments, parse_overrides
from grpo_ustat.cli.names import CHOICES, NAMES, OTHER_VALUES, has
from grpo_ustat.cli.show_config import show_config
from grpo_ustat.config.load import CONF, SCHEMAS
from grpo_ustat.config.schema import ConfigError


def refusal(verb, words):
    with pytest.raises(ConfigError) as caught:
        arguments = parse_arguments(words)
        show_config(verb, arguments) if arguments.cfg else parse(verb, words)
    return str(caught.value)


def typed(line):
    """The command lines that a message says to type, as a shell splits them."""
    opening = r"(?:write|quote it[:,]|such as|as in|is needed:|per value:) "
    _, *hint = re.split(opening, line.partition(", where ")[0], maxsplit=1)
    join = r"(, or )(?:add -m for one run per value, as in|if it is a single value, quote it:) "
    for words in re.split(",? or ", re.sub(join, r"\1", "".join(hint))):
        yield shlex.split(words)


@pytest.mark.slow(minutes=0.3)
def test_a_wrong_command_line_is_refused_and_what_it_says_can_be_typed(
    tmp_path, monkeypatch, request
):
    def answer(verb, words):
        line = refusal(verb, words)
        if re.search("write [a-z'\"-]+=|such as|as in|is needed: ", line) and not re.search(
            "NAME|KEY=|FOLDER", line
        ):
            for hint in typed(line):
                schema = SCHEMAS[next((word for word in hint if word in SCHEMAS), verb)]
                check_names(parse_overrides([x for x in hint if "=" in x]), schema)
        return f"error: {line}"

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GRPO_USTAT_COMMAND", raising=False)
    text = golden.transcript("refused_words", answer) + "\n"
    difference = golden.difference("refused_words", text, request.config.getoption("rewrite"))
    assert not difference, difference


def test_all_bad_points_of_a_sweep_are_named_once_and_of_many_five():
    lines = refusal("train", ["-m", "group_size=x,y,4", "seed=0,1"]).splitlines()
    assert lines[0] == "4 of the sweep's 6 runs cannot start:"
    assert [line.split(":")[0] for line in lines[1:]] == ["  group_size=x", "  group_size=y"]
    lines = refusal("gap", ["-m", f"theorem={','.join('tuvwxyz')}"]).splitlines()
    assert lines[0] == "7 of the sweep's 7 runs cannot start:" and lines[-1] == "  and 2 more"
    assert len(lines) == 7


@pytest.mark.parametrize("words", [
    ["seed=1", "group_sizes=[2, 4]"], ["pool=a=1"], ["seed=0,1"], ["hydra.verbose=true"],
    ["+baseline_options.median.x=1"], ["hydra.run.dir=a/${seed}"], ["experiment=null"],
    ["budget=glob(study*)", "seed=${study.questions}"], ["model=tiny,hub", "study.questions=null"],
])  # fmt: skip
def test_right_words_are_left_alone(words):
    check_names(parse_overrides(parse_arguments(words).overrides), SCHEMAS["mse"])


def test_every_name_that_is_suggested_is_a_field_or_a_choice():
    names = {name for names in NAMES.values() for name in names} | set(CHOICES)
    assert all(any(has(schema, name) for schema in SCHEMAS.values()) for name in names)
    assert not NAMES.keys() & OTHER_VALUES.keys()
    for schema in SCHEMAS.values():
        words = [f"{group}={name}" for group, of in CHOICES.items() for name in of.values()]
        words = [word for word in words if has(schema, word.partition("=")[0])]
        check_names(parse_overrides(words), schema)


@pytest.mark.parametrize("name, verbs", {
    "experiment/figure4": "mse", "debug/train": "train", "budget/study_smoke": "mse gap",
    "experiment/table2_math": "train",
}.items())  # fmt: skip
def test_a_file_is_for_the_entries_that_know_all_it_sets(name, verbs):
    runs = {verb: schema for verb, schema in SCHEMAS.items() if verb != "report"}
    fit = {verb for verb, schema in runs.items() if fits(CONF / f"{name}.yaml", schema)}
    assert fit == set(verbs.split())


@pytest.mark.parametrize("text", ["report: [", "- a\n", "", "hydra:\n", "hydra:\n  sweeper: 3\n"])
def test_a_readers_own_file_may_say_anything(text, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(f"# @package _global_\n{text}")
    assert is_overlay(file) and fits(file, SCHEMAS["gap"]) and fits(file, SCHEMAS["mse"])


def test_the_configuration_is_shown(capsys):
    words = ["--cfg", "job", "seed=3", "baseline_options.group_std.epsilon=0.5"]
    show_config("mse", parse_arguments(words))
    job = yaml.safe_load(capsys.readouterr().out)
    assert job["seed"] == 3 and "hydra" not in job
    assert job["baseline_options"]["group_std"] == {"epsilon": 0.5}


@pytest.mark.slow
def test_a_refusal_imports_nothing_slow(tmp_path):
    program = (
        "import sys; sys.argv = ['mse', 'policy=tiny']\n"
        "from grpo_ustat.mse.__main__ import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 2\n"
        "slow = {'torch', 'transformers', 'datasets', 'scipy', 'matplotlib', 'rich', 'jinja2'}\n"
        "assert not slow & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0 and b"write model=tiny" in done.stderr
