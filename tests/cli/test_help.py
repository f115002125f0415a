"""`--help`: every field has a meaning, choices are those that checks accept, it reads well."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from functools import cache
from types import SimpleNamespace

import pytest
from commands import compose
from readme import PAGES, commands
from shipped_files import group_files

import grpo_ustat.cli.help
from grpo_ustat.cli.full_help import LONGEST_VALUE
from grpo_ustat.cli.help import BRIEF, LEFT, OF_ROWS, SECTIONS, show_default_help, show_help
from grpo_ustat.cli.options import command_options, default_options, first_comment, typed_value
from grpo_ustat.config.baseline import OPTIONS
from grpo_ustat.config.load import CONF, SCHEMAS, all_fields, kinds_of
from grpo_ustat.config.run import Shared
from grpo_ustat.config.schema import ConfigError, fields_of
from grpo_ustat.estimators.baselines import BASELINES

RUNS = [entry for entry, schema in SCHEMAS.items() if issubclass(schema, Shared)]


def words(*overrides):
    return SimpleNamespace(overrides=list(overrides), config_name=None, config_dir=None)


@cache
def page(entry, *overrides):
    return command_options(entry, words(*overrides))


@pytest.fixture(autouse=True)
def composed_pages(monkeypatch):
    monkeypatch.setattr(
        grpo_ustat.cli.help, "command_options", lambda entry, w: page(entry, *w.overrides)
    )


def test_every_field_of_every_schema_says_what_it_means():
    for schema in SCHEMAS.values():
        kinds = [(node, one) for node, all_ in kinds_of(schema).items() for one in all_.values()]
        for schemas in [{}, *({node: kind} for node, kind in kinds)]:
            for key in fields_of(schema, schemas=schemas):
                if key.path.startswith("theorem."):
                    continue  # the paper's symbols
                assert key.meaning, f"{key.path} of {schema.__name__} has no meaning"
                may_be_null = "null" in key.kind
                assert may_be_null <= ("null" in key.meaning), f"{key.path}: what does null mean?"


def test_options_of_baselines_are_those_that_rules_take():
    assert set(OPTIONS) == {name for baseline in BASELINES.values() for name in baseline.options}


ONLY_TRAINS = {name for name, baseline in BASELINES.items() if baseline.only_trains}
# Kinds have another class each, which `build_config` chooses before any check; choices of a
# theorem are checked by its own class.
CHOSEN_AS_A_WHOLE = {"dataset.kind", "theorem.kind", "theorem.problem", "theorem.baselines"}
GIVEN = {
    "train": ["dataset=plus_one", "prompt=few_shot", "objective=grpo", "group_size=16"],
    "mse": ["dataset=plus_one", "prompt=few_shot"],
    "gap": [],
}


def typed_nodes(entry, config):
    """The schemas of nodes that are typed by their kind."""
    return {node: type(getattr(config, node)) for node in kinds_of(SCHEMAS[entry])}


@pytest.mark.slow
@pytest.mark.parametrize("entry", RUNS)
def test_stated_choices_are_those_that_the_checks_accept(entry):
    """A value that cannot be is refused with exactly the choices stated, or by no list of any."""
    config = compose(entry, *GIVEN[entry])
    for key in fields_of(SCHEMAS[entry], schemas=typed_nodes(entry, config)):
        if "str" in key.kind and key.path not in CHOSEN_AS_A_WHOLE:
            stated = set(key.choices)
            if (entry, key.path) == ("mse", "launch.device"):  # or one with :NUMBER, so in words
                stated = set(re.findall(r"\w+", key.meaning.partition(";")[0])) - {"or"}
            assert _accepted(config, key) == stated, key.path


def _accepted(config, key):
    """What the checks list when the field holds a value that is in no list."""
    config = copy.deepcopy(config)
    *nodes, name = key.path.split(".")
    node = config
    for one in nodes:
        node = getattr(node, one)
    setattr(node, name, ["nonsense"] if "list" in key.kind else "nonsense")
    try:
        config.check()
    except ConfigError as error:
        listed = re.search(r"unknown \S+ 'nonsense': choose from (.*)", str(error))
        found = set(listed[1].split(", ")) if listed else set()
        return found - ONLY_TRAINS if key.path == "baselines" else found
    return set()


@pytest.mark.parametrize("entry", RUNS)
def test_groups_list_what_the_entry_can_take(entry):
    """The choices are those with which the tests of configurations compose, and every one."""
    expected = {case.values[1:] for case in group_files() if case.values[0] == entry}
    groups = {group.name: group for group in page(entry).groups}
    found = {(name, one.name) for name, group in groups.items() for one in group.choices}
    found -= {("hydra/launcher", one.name) for one in groups["hydra/launcher"].choices}
    own = {("dataset", "own"), ("dataset", "jsonl"), ("baseline", "own")}
    assert found - own == expected
    assert all(group.meaning for group in groups.values())
    assert all(one.words for group in groups.values() for one in group.choices)


@pytest.mark.slow
@pytest.mark.parametrize("entry", RUNS)
def test_help_says_every_field_and_its_value_in_80_columns(entry, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    given = "theorem.problem=softmax" if entry == "gap" else "model=tiny_direct"
    show_help(entry, words("all", given))
    text = capsys.readouterr().out
    config = compose(entry, given)
    said = dict(re.findall(r"^  ([\w.]+)=(.*)  [a-z ]+$", text, re.MULTILINE))
    for key in fields_of(SCHEMAS[entry], schemas=typed_nodes(entry, config)):
        if key.schema is None and key.path != "baseline_options":
            value = config
            for name in key.path.split("."):
                value = getattr(value, name)
            assert said[key.path] == cut(typed_value(value)), key.path
    assert "\x1b" not in text
    assert not any(line != line.rstrip() for line in text.splitlines())
    commands = re.findall(r"^  (grpo-ustat .*)", text, re.MULTILINE)
    assert len(commands) == 5
    assert all(len(line) <= 80 for line in text.splitlines() if line.strip() not in commands)


def cut(value):
    """As help shows it."""
    return value if len(value) <= LONGEST_VALUE else value[: LONGEST_VALUE - 3] + "..."


def test_meanings_stand_beside_their_fields_where_there_is_room(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    show_help("train", words("all"))
    found = re.search(r"^  eval_steps=20 +int +steps between evaluations$",
                      capsys.readouterr().out, re.MULTILINE)  # fmt: skip
    assert found


def test_help_can_be_searched(capsys):
    show_help("train", words("clipped", "ratios"))
    text = capsys.readouterr().out
    assert "objective.epsilon=null" in text and "objective.epsilon_high=null" in text
    assert "dr_grpo" in text and "temperature" not in text and "grpo-ustat" not in text
    with pytest.raises(ConfigError, match="--help has no match for 'qwertz'"):
        show_help("train", words("qwertz"))


def test_help_shows_the_fields_of_the_data_set_that_is_chosen(capsys):
    show_help("mse", words("dataset=math"))
    text = capsys.readouterr().out
    assert "dataset.levels=[3,4,5]" in text and "dataset.min_term" not in text
    with pytest.raises(ConfigError, match="unknown model 'nope': choose from hub"):
        show_help("mse", words("model=nope"))


@pytest.mark.parametrize("entry", RUNS)
def test_commands_to_copy_name_what_there_is(entry):
    for command, about in page(entry).commands:
        program, verb, *given = command.split()
        assert program == "grpo-ustat" and about and len(command) < 100
        found = page(verb)  # gap shows how to report, too
        groups = {group.name: {one.name for one in group.choices} for group in found.groups}
        fields = {field.key.path for field in found.fields}
        for name, value in (one.split("=", 1) for one in given if one != "-m"):
            known = (name, value) == ("model", "org/name") or value in groups.get(name, ())
            assert known if name in groups else name in fields


def test_help_shows_the_fields_of_the_theorem_that_is_chosen(capsys):
    show_help("gap", words("theorem=theorem12"))
    text = capsys.readouterr().out
    assert "theorem.learning_rates=" in text
    assert "theorem.steps" not in text and "figure4" not in text


def test_a_choice_is_told_by_the_first_comment_of_its_file():
    assert first_comment(CONF / "optimizer" / "adamw.yaml") == "AdamW (Loshchilov & Hutter 2019)."
    assert first_comment(CONF / "dataset" / "math.yaml").startswith("MATH, competition")
    assert "grpo-ustat train" not in first_comment(CONF / "hydra" / "launcher" / "slurm.yaml")


def test_a_rule_is_told_by_its_own_words_a_long_one_by_their_first_sentence():
    (group,) = [one for one in page("train").groups if one.name == "baseline"]
    told = {choice.name: choice.words for choice in group.choices}
    assert told["none"] == BASELINES["none"].words == "REINFORCE: no baseline. Unbiased."
    assert BASELINES["gdpo"].words.startswith(f"{told['gdpo']} Needs at least two")
    for name, baseline in BASELINES.items():
        assert ("Unbiased" in baseline.words) == baseline.unbiased, name


def test_help_is_in_colour_only_where_it_is_wanted(capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    show_help("train", words())
    assert "\x1b[36m" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    show_help("train", words())
    assert "\x1b[3" not in capsys.readouterr().out


def names_of(entry):
    return [name for names in SECTIONS[entry].values() for name in names.split()]


@pytest.mark.parametrize("entry", RUNS)
def test_the_page_of_60_lines_has_the_usual_fields_with_their_values(entry, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    show_default_help(entry)
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) <= 60 and all(len(line) <= 80 and line == line.rstrip() for line in lines)
    said = re.findall(r"^  ([a-z][\w.]*)=(\S+)", text, re.MULTILINE)
    assert [name for name, _ in said] == names_of(entry)
    assert 20 <= len(said) == len(dict(said)) <= 45
    composed = page(entry)
    values = {field.key.path: field.value for field in composed.fields}
    values |= {group.name: group.chosen or "NAME" for group in composed.groups}
    assert said == [(name, values.get(name, "...")) for name, _ in said]
    assert [name for name, _ in said if name not in values] == [OF_ROWS] * (entry != "gap")
    assert len(re.findall(r"^  grpo-ustat ", text, re.MULTILINE)) == 3


@pytest.mark.parametrize("entry", SCHEMAS)
def test_values_that_are_read_without_hydra_are_those_that_it_composes(entry):
    composed, read = page(entry), default_options(entry)
    nodes = (*kinds_of(SCHEMAS[entry]), "baseline_options", "baseline.options")
    of_read, of_composed = (
        {
            field.key.path: field.value
            for field in options.fields
            if field.key.path not in nodes
            and not field.key.path.startswith(("baseline_options.", "baseline.options."))
        }
        for options in (read, composed)
    )
    assert of_read == of_composed
    chosen = {x.name: (x.chosen, x.meaning) for x in composed.groups if "/" not in x.name}
    assert {x.name: (x.chosen, x.meaning) for x in read.groups} == chosen
    assert (read.purpose, read.commands) == (composed.purpose, composed.commands)


@pytest.mark.parametrize("entry", RUNS)
def test_a_usual_field_is_there_and_one_that_a_reader_is_told_to_type_is_usual(entry):
    groups = {group.name for group in page(entry).groups}
    assert {*names_of(entry)} <= {key.path for key in all_fields(SCHEMAS[entry])} | groups
    typed = {
        word.partition("=")[0]
        for name in ("README.md", "docs/faq.md")
        for line in commands(PAGES[name])
        if line[:2] == ["grpo-ustat", entry]
        for word in line[2:]
        if "=" in word
    }
    assert typed <= {*names_of(entry)} and bool(typed) == (entry != "gap")


def test_brief_words_are_of_usual_fields_and_fit_beside_them():
    assert {*BRIEF} <= {name for entry in RUNS for name in names_of(entry)}
    assert all(len(text) <= 80 - LEFT for text in BRIEF.values())


def test_help_of_a_choice_adds_the_fields_that_it_sets(capsys):
    show_help("train", words("model=tiny_direct"))
    text = capsys.readouterr().out
    assert "model.model_name_or_path=embedded:tiny_direct" in text and "model.dtype" not in text
    show_help("train", words("group_size=16"))
    assert capsys.readouterr().out.count("  group_size=16") == 2


@pytest.mark.slow
def test_help_imports_nothing_slow(tmp_path):
    """Started as a user starts it, from anywhere."""
    program = (
        "import sys; sys.argv = ['train', '--help']\n"
        "from grpo_ustat.train.__main__ import main; main()\n"
        "slow = ('torch', 'transformers', 'datasets', 'hydra', 'rich')\n"
        "sys.exit(any(name in sys.modules for name in slow))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path,
                          capture_output=True, text=True)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "") and "learning_rate=" in done.stdout


def test_help_of_an_entry_without_runs_speaks_of_its_fields_alone(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for page_of in (lambda: show_help("report", words("all")), lambda: show_default_help("report")):
        page_of()
        text = capsys.readouterr().out
        names = re.findall(r"^  (\w+)=", text, re.MULTILINE)
        assert names == ["runs", "name", "output_root", "steps"]
        assert "GROUPS" not in text and "-m field" not in text
