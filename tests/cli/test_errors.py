"""Which entry a configuration file is for, and what is said of a word that is another entry's."""

from __future__ import annotations

import re

import pytest

from grpo_ustat.cli.choices import fits, is_overlay
from grpo_ustat.cli.compose import parse
from grpo_ustat.cli.errors import one_line
from grpo_ustat.config.load import CONF, SCHEMAS
from grpo_ustat.config.schema import ConfigError

FILES = {  # file: the entries that know all it sets
    "experiment/figure4": {"mse"},
    "debug/train": {"train"}, "budget/study_smoke": {"mse", "gap"},
    "experiment/theorems": {"gap"}, "experiment/smollm2": {"mse"},
    "experiment/table2_math": {"train"}, "logger/wandb": {"mse", "train", "gap"},
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_for_the_entries_that_know_all_it_sets(name):
    """Also all that a sweep of it runs; a group of which an entry has none says nothing."""
    runs = {entry: schema for entry, schema in SCHEMAS.items() if entry != "report"}
    file = CONF / f"{name}.yaml"
    assert {entry for entry, schema in runs.items() if fits(file, schema)} == FILES[name]


@pytest.mark.parametrize("text", ["report: [", "- a\n", "", "hydra:\n", "hydra:\n  sweeper: 3\n"])
def test_a_readers_own_file_may_say_anything(text, tmp_path):
    (tmp_path / "own").mkdir()
    file = tmp_path / "own" / "mine.yaml"
    file.write_text(f"# @package _global_\n{text}")
    assert is_overlay(file) and fits(file, SCHEMAS["gap"]) and fits(file, SCHEMAS["mse"])


MESSAGES = {  # what Hydra says, the entry that was asked, and what is said of it
    "In 'mine/own': Could not override 'problem'. No match in the defaults list.": (
        "mse", "In 'mine/own': Could not override 'problem'. No match in the defaults list."
    ),
    "Could not override 'model'. No match in the defaults list.": (
        "gap", "grpo-ustat gap has no model; it is a field of grpo-ustat mse or grpo-ustat train"
    ),
    "Could not override 'group_size'. Key 'group_size' is not in struct": (
        "report", "grpo-ustat report has no group_size; it is a field of grpo-ustat train"
    ),
    "Could not override 'group_size'. Key 'group_size' is not in": (
        "mse", "unknown key group_size: did you mean group_sizes?"
    ),
    "Could not override 'group_sizes'. Key 'group_sizes' is not in": (
        "train", "unknown key group_sizes: did you mean group_size?"
    ),
    "Could not override 'theorem.group_size'. Key 'group_size' is not in": (
        "train", "grpo-ustat train has no theorem.group_size; it is a field of grpo-ustat gap"
    ),
    "Could not override 'nme'. Key 'nme' is not in struct": (
        "report", "unknown key nme: did you mean name?"
    ),
    "Could not find 'theorem/x' Available options in 'theorem': lemma6 none theorem7 Config s": (
        "gap", "unknown theorem 'x': choose from lemma6, none, theorem7"
    ),
    "Could not find 'experiment/x' Available options in 'experiment': figure4 theorems Config s": (
        "gap", "unknown experiment 'x': choose from theorems"
    ),
    "Could not find 'theorem/corollary5' Available options in 'theorem': lemma6 Config s": (
        "gap", "theorem=corollary5 is shown by grpo-ustat mse"
    ),
    "Could not find 'theorem/best_group_size' Available options in 'theorem': lemma6 Config s": (
        "gap",
        "theorem=best_group_size is shown by grpo-ustat report "
        "runs=[outputs/best_group_size,outputs/best_group_size_start]",
    ),
    "Could not find 'theorem/Theorem2' Available options in 'theorem': lemma6 Config search path": (
        "gap", "theorem=Theorem2 is shown by grpo-ustat mse experiment=monte_carlo_check"
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", MESSAGES)
def test_messages_name_the_entry_that_knows(text):
    entry, said = MESSAGES[text]
    assert one_line(ValueError(text), SCHEMAS[entry]).startswith(said)


@pytest.mark.parametrize(
    "word, line",
    [
        ("hydra.launcher=submitit_slurm", "write hydra/launcher=submitit_slurm"),
        ("hydra.sweeper=basic", "write hydra/sweeper=basic"),
        ("hydra.run=x", "full_key: hydra.run"),
        ("objective=3", "objective=3: a name is needed, see --help objective"),
        ("model=true", "model=true: a name is needed"),
    ],
)
def test_a_part_is_no_value_and_a_choice_no_number(word, line):
    with pytest.raises(ConfigError, match=line):
        parse("train", [word])


@pytest.mark.parametrize("words, line", [
    (["-m", "objective=3,4"], "objective=3: a name is needed"),
    (["hydra=3"], "hydra=3: a name is needed"),
    (["hydra/launcher=3"], "hydra/launcher=3: a name is needed"),
    (["hydra.verbose=3"], "hydra.verbose=3: use true or false"),
    (["hydra.run.dir=${nothing}"], "hydra.run.dir has a value only in a running job"),
    (["hydra.run.dir=x/${hydra.job.num}"], "hydra.run.dir has a value only in a running job"),
    (["-m", "seed=0,1", "hydra.sweep.dir=${nope}"], "hydra.sweep.dir has a value only"),
])  # fmt: skip
def test_what_hydra_would_end_in_a_traceback_is_one_line(words, line):
    with pytest.raises(ConfigError, match=re.escape(line)):
        parse("train", words)
