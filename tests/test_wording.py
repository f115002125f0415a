"""What users read, word by word: each screen and page is a file in tests/golden/.

Other tests assert numbers, keys and names. `python -m pytest tests/test_wording.py --rewrite`
writes the files anew. Most screens show stored results, so that they are the same on all machines.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import beside
import golden
import pytest
from commands import compose
from folders import KILLED, begin, claim, configured, loss_row, proved, studied, trained
from page_views import page_of

from grpo_ustat import __main__ as program
from grpo_ustat.cli.compose import compose_config
from grpo_ustat.cli.verbs import VERBS
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.doctor import __main__ as doctor
from grpo_ustat.doctor.checks import Finding
from grpo_ustat.gap.evidence import theorem
from grpo_ustat.measurements.base import Study
from grpo_ustat.mse import study
from grpo_ustat.mse.until_decided import look_sentence
from grpo_ustat.pages.page import render
from grpo_ustat.runs.record import RunRecord
from grpo_ustat.terminal.streams import wrapped
from grpo_ustat.train import trainer

ROOT = Path(__file__).parents[1]
EXAMPLES = Path("docs/examples")
STUDY = EXAMPLES / "mse/tiny_base"
TRAINING = EXAMPLES / "sweep/group_size-8/seed-0"
TRL_LOG = EXAMPLES / "trl/completions"


@pytest.fixture
def typed(monkeypatch, capsys):
    """Type a command: what it prints, first on standard output, then on standard error."""

    def command(verb, *words):
        monkeypatch.setattr(sys, "argv", [verb, *map(str, words)])
        with suppress(SystemExit):
            importlib.import_module(VERBS[verb].module or f"grpo_ustat.{verb}.__main__").main()
        return "".join(capsys.readouterr())

    return command


@pytest.fixture
def check(request, monkeypatch, tmp_path):
    """Compare a text with a golden file, or write the file under `--rewrite`."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", str(golden.WIDTH))
    monkeypatch.delenv("GRPO_USTAT_COMMAND", raising=False)

    def compare(name, text="", page=""):
        places = {"FOLDER": tmp_path, "HERE": ROOT}
        # Lines of a page are broken after the masks.
        text += golden.page_text(golden.masked(page, **places))
        text = golden.masked(text, **places)
        difference = golden.difference(name, text, request.config.getoption("rewrite"))
        if difference:
            pytest.fail(difference, pytrace=False)

    return compare


def finished(folder):
    """A run folder whose run is complete."""
    return SimpleNamespace(path=folder, result=lambda: RunRecord(folder).result)


@pytest.mark.parametrize("name", ["tiny_base", "tiny", "tiny_direct"])
def test_study_terminal(check, capsys, name):
    study.run(compose("mse"), finished(EXAMPLES / "mse" / name))
    check(f"mse_{name}", capsys.readouterr().out)


def test_terminal_of_a_study_that_draws_until_it_decides(check, capsys, request):
    """The recording in docs/examples: the sentences of the stored looks, and the answer."""
    folder = EXAMPLES / "decided"
    config = compose("mse", "study.until=decided")
    study.run(config, finished(folder))
    answer = capsys.readouterr().out.partition("repeats the study.\n")[2]
    looks = Study(RunRecord(folder)).result.looks
    lines = [wrapped(look_sentence(look)) for look in looks]
    command = "$ grpo-ustat mse model=tiny_base study.until=decided"
    text = golden.masked("\n".join([command, *lines, answer]))
    recording = folder / "terminal.txt"
    if request.config.getoption("rewrite"):
        recording.write_text(text)
    assert recording.read_text() == text


def test_training_terminal(check, capsys):
    trainer.fit(compose("train", "max_steps=16"), finished(TRAINING))
    check("train", capsys.readouterr().out)


@pytest.mark.parametrize(("name", "folder"), [("mse", STUDY), ("train", TRAINING)])
def test_run_page(check, name, folder):
    check(f"{name}_page", page=render(page_of(folder)))


@pytest.mark.parametrize("name", ["mse", "sweep"])
def test_report(check, typed, tmp_path, name):
    check(f"report_{name}", typed("report", f"runs={EXAMPLES / name}", f"output_root={tmp_path}"))
    (page,) = tmp_path.rglob("report.html")
    check(f"report_{name}_page", page=page.read_text())


@pytest.mark.slow(minutes=0.1)
def test_report_of_unequal_runs(check, typed, tmp_path):
    """Theorems, a study and a sweep of which runs are missing, unfinished, damaged or equal."""
    runs = tmp_path / "runs"
    for kind, verdict in (
        ("lemma6", "disagrees"),
        ("theorem8", "agrees"),
        ("lemma11", "not decided"),
    ):
        proved(runs / kind, kind, claim(verdict))
    proved(runs / "theorem7", "theorem7", done=False)
    for size, seed in ((2, 0), (2, 1), (8, 0), (8, 1), (32, 0)):
        reached = {0: 0.2, 8: 0.3 + 0.02 * size % 0.3 + 0.01 * seed}
        trained(runs / f"G-{size}-seed-{seed}", size, seed, reached)
    trained(runs / "killed", 32, 2, {0: 0.2, 4: 0.3}, done=False)
    trained(runs / "rate", 2, 0, {0: 0.2, 8: 0.9}, changes={"learning_rate": 1.0}, commit="b" * 40)
    shutil.copytree(runs / "G-2-seed-0", runs / "G-2-seed-0-again")
    (trained(runs / "damaged", 8, 2, {0: 0.2, 8: 0.3}) / "result.json").write_text("{")
    errors = {(name, size): 8.0 / size for name in ("none", "oracle") for size in (2, 4)}
    studied(runs / "study", "tiny", errors | {("optimal", 2): 3.0}, losses=[loss_row("dapo", 8)])
    check("report_all", typed("report", f"runs={runs}", f"output_root={tmp_path}", "name=all"))
    check("report_all_page", page=(tmp_path / "report/all/report.html").read_text())


@pytest.mark.slow(minutes=0.1)
def test_report_of_sizes_that_train_best(check, typed, tmp_path):
    accuracies = {2: beside.WORSE, 8: beside.ALIKE, 32: beside.CLOSE}
    (runs,) = beside.sweep(tmp_path / "runs", accuracies)
    (study_folder,) = beside.study(tmp_path / "study")
    words = (f"runs=[{runs},{study_folder}]", f"output_root={tmp_path}")
    check("report_best_group_size", typed("report", *words))


def test_unfinished_runs(check, tmp_path):
    """First lines of the pages of killed runs; of a training run at three stages."""
    folders = [begun(tmp_path / kind, kind) for kind in ("train", "mse", "gap")]
    for reached in ({0: 0.2}, {0: 0.2, 4: 0.3}):
        folders.append(trained(tmp_path / f"train-{len(reached)}", 4, 0, reached, done=False))
    pages = [golden.page_text(render(page_of(folder))) for folder in folders]
    check("unfinished", "\n\n".join(re.split("What the symbols|What was run", x)[0] for x in pages))


def begun(folder, entry):
    """A run folder of which nothing but its configuration is there."""
    begin(folder, configured(entry, {}), KILLED)
    return folder


def test_theorem(check, typed, tmp_path):
    check("gap", typed("gap", "theorem=lemma11", f"hydra.run.dir={tmp_path}/run"))
    check("gap_page", page=(tmp_path / "run/report.html").read_text())


def test_advice(check, typed):
    check("advise", typed("advise", TRL_LOG, "num_generations=4"))


def test_conversion(check, typed, tmp_path):
    check("convert", typed("convert", TRL_LOG, tmp_path / "rollouts.parquet"))


def test_sweep_status(check, typed):
    check("sweep", typed("sweep", "status", EXAMPLES / "sweep"))


def well(folder):
    print("a library prints something")
    return Finding("ok", f"well in {folder}; WANDB_API_KEY={os.environ['WANDB_API_KEY']}")


def crash(_):
    raise RuntimeError("Bearer hf_abcdefghijklmnop was refused")


def missing(_):
    import no_such_package  # noqa: F401


def test_doctor(check, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    doctor.show(dict.fromkeys((well, crash, missing), 20.0), tmp_path)
    check("doctor", capsys.readouterr().out)


def test_help(check, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["grpo-ustat", "--help"])
    with pytest.raises(SystemExit):
        program.main()
    check("help", capsys.readouterr().out)


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_verb(check, typed, verb):
    check(f"help_{verb}", typed(verb, "--help"))


def refusal(verb, words, composing=compose):
    """The line that refuses a configuration; it names a key or a value that was typed."""
    with pytest.raises(ConfigError) as caught:
        config = composing(verb, *words)
        theorem(config.theorem.kind).check(config.theorem)
    line = str(caught.value)
    assert "\n" not in line, words
    assert any(name in line for word in words for name in re.findall(r"[\w/]+", word)), words
    return f"error: {line}"


@pytest.mark.slow(minutes=0.2)
@pytest.mark.parametrize("verb", ["train", "mse", "gap"])
def test_refusals(check, verb):
    """Add one as a line `$ grpo-ustat VERB WORDS` of the golden file, which --rewrite answers."""
    check(f"refused_{verb}", golden.transcript(f"refused_{verb}", refusal))


@pytest.mark.nightly(minutes=0.5)
@pytest.mark.parametrize("verb", ["train", "mse", "gap"])
def test_hydra_refuses_as_the_helper_of_tests(verb):
    """`commands.compose` composes files once and sets values afterwards."""
    for _, *words in golden.commands(f"refused_{verb}"):
        by_hydra = refusal(verb, words, lambda verb, *words: compose_config(verb, list(words)))
        assert by_hydra == refusal(verb, words)


def test_plans(check):
    check("plans", golden.transcript("plans", lambda verb, words: compose(verb, *words).plan))


@pytest.mark.parametrize("verb", ["train", "mse", "gap"])
def test_costs(check, typed, tmp_path, verb):
    words = ("dry_run=true", f"output_root={tmp_path}", "launch.workers=2")
    check(f"costs_{verb}", typed(verb, *words))
