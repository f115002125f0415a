"""Shell completion: what bash's own function offers, and what the program answers it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from test_help import page

from grpo_ustat.cli import completion
from grpo_ustat.cli.completion import candidates, complete
from grpo_ustat.config.load import SCHEMAS
from grpo_ustat.config.schema import ConfigError

CASES = {
    "model=ti": ["model=tiny", "model=tiny_base", "model=tiny_direct"],
    "mo": ["model.", "model=", "monitor."],
    "on_existing=": ["on_existing=resume", "on_existing=error", "on_existing=overwrite"],
    "bf16=": ["bf16=true", "bf16=false"],
    "+bf16=t": ["+bf16=true"],
    "eval.decoding=[sampled,g": ["eval.decoding=[sampled,greedy"],
    "model=tiny,smo": ["model=tiny,smollm2_135m"],
    "-m seed=0,1 group_s": ["group_size="],
    "model=tiny_direct model.name=": ["model.name=tiny_direct"],
    "dataset=math dataset.le": ["dataset.levels="],
    "dataset=nope dataset.min_t": ["dataset.min_term="],
    "hydra/launcher=sl": ["hydra/launcher=slurm", "hydra/launcher=slurm_multinode"],
    "study.": [],
    "model.model_name_or_path=./": [],
    "--mul": ["--multirun"],
}


@pytest.fixture(autouse=True)
def composed_pages(monkeypatch):
    monkeypatch.setattr(completion, "command_options", lambda entry, w: page(entry, *w.overrides))


@pytest.mark.parametrize("line", CASES)
def test_candidates(line):
    for command in ("grpo-ustat-train", "grpo-ustat train", "./scripts/run train"):
        assert [text for text, _ in candidates("train", f"{command} {line}")] == CASES[line]


def test_every_group_and_node_is_offered_with_what_it_means():
    offered = dict(candidates("mse", "grpo-ustat mse "))
    assert {"model=", "model.", "baselines=", "study=", "study.", "rules."} <= set(offered)
    assert all(offered.values())


def test_studies_beds_and_their_fields_are_offered_as_the_entry_has_them():
    def offered(line):
        return [text for text, _ in candidates("gap", f"grpo-ustat gap {line}")]

    names = {"theorem12", "theorem12_graded", "theorem7", "theorem7_total", "theorem7_uneven"}
    names |= {"theorem8", "theorem8_mixture"}
    assert offered("study=th") == sorted(f"study={name}" for name in names)
    assert offered("study=fig") == [] and offered("model") == []
    assert offered("study=theorem12 bed.voc") == ["bed.vocabulary="]
    assert offered("study.baselines=[none,or") == ["study.baselines=[none,oracle"]


def test_what_cannot_be_asked_is_refused():
    for asked, text in (
        ("install=csh", "choose from bash, zsh, fish"),
        ("now", "choose from inst"),
    ):
        with pytest.raises(ConfigError, match=text):
            complete("train", SimpleNamespace(overrides=[asked]))


def test_the_line_itself_names_the_verb(capsys):
    def offered(line):
        complete(None, SimpleNamespace(overrides=["query=bash"]), {"COMP_LINE": line})
        return capsys.readouterr().out.split()

    for start in ("grpo-ustat", "./scripts/run", "python -m grpo_ustat"):
        assert offered(f"{start} tra") == ["train"]
        assert offered(f"{start} train model=hu") == ["model=hub"]
        assert offered(f"{start} gap study=theorem12_") == ["study=theorem12_graded"]
        assert offered(f"{start} doctor --o") == ["--output", "--only"]
        assert offered(f"{start} sweep status ") == []
    assert offered("python -m grpo_ustat.train model=hu") == ["model=hub"]


PROGRAM = """
eval "$(grpo-ustat -sc install=bash)"
ask() {  # what bash takes for the word, then the line; the cursor is at its end
    COMP_LINE=$2 COMP_POINT=${#2} COMPREPLY=()
    _grpo_ustat "${2%% *}" "$1"
    printf '%s;' "${COMPREPLY[@]}"; echo
}
ask mod 'python -m grpo_ustat.train mod'
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
ask model=hu 'grpo-ustat-mse model=hu'
ask tr 'grpo-ustat tr'
ask model=hu './scripts/run mse model=hu'
ask grpo 'python -m grpo'
complete -p grpo-ustat-mse python ./scripts/run
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_function_of_bash_offers_them(tmp_path):
    whole = "-m grpo_ustat"
    for name, words in {
        "python": "",
        "grpo-ustat-mse": f"{whole}.mse",
        "grpo-ustat": whole,
        "scripts/run": whole,
    }.items():
        command = tmp_path / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        command.chmod(0o755)
    program = f"PATH={tmp_path}:$PATH\n{PROGRAM}"
    done = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == ""
    first, second, verb, third, none, *registered = done.stdout.splitlines()
    assert (first, second, none) == ("model.;model=;", "model=hub;", ";")
    assert (verb, third) == ("train;", "model=hub;")
    assert registered == [
        f"complete -o default -o nospace -F _grpo_ustat {name}" for name in
        ("grpo-ustat-mse", "python", "./scripts/run")
    ]  # fmt: skip


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_can_be_read_by_their_shells_and_know_every_entry(shell, capsys):
    complete("mse", SimpleNamespace(overrides=[f"install={shell}"]))
    text = capsys.readouterr().out
    assert all(f"grpo-ustat-{entry}" in text and entry in text for entry in SCHEMAS)
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=text, text=True).returncode == 0
