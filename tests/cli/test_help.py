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
from grpo_ustat.cli.help import OF_ROWS, SECTIONS, show_default_help, show_help
from grpo_ustat.cli.options import command_options, default_options
from grpo_ustat.config.baseline import OPTIONS
from grpo_ustat.config.load import SCHEMAS, all_fields, kinds_of
from grpo_ustat.config.run import Shared
from grpo_ustat.config.schema import ConfigError, fields_of
from grpo_ustat.estimators.baselines import BASELINES

RUNS = [entry for entry, schema in SCHEMAS.items() if issubclass(schema, Shared)]


def words(*overrides):
    return SimpleNamespace(overrides=list(overrides), multirun=False, config_dir=None)


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


@pytest.mark.parametrize("entry", RUNS)
def test_the_full_help_has_every_field_and_choice(entry, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    show_help(entry, words("all"))
    text = capsys.readouterr().out
    for field in page(entry).fields:
        assert f"\n  {field.key.path}=" in text, field.key.path
    for group in page(entry).groups:
        assert all(f" {choice.name}" in text for choice in group.choices), group.name
    assert "\x1b" not in text and not re.search(r" +$", text, re.MULTILINE)


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
    fewest = 20 if entry == "gap" else 29
    assert fewest <= len(said) == len(dict(said)) <= 45
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
