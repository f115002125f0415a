"""Each command of the README and of docs/ is taken by the command line; those of the tour run."""

from __future__ import annotations

import csv
import os
import re
import shlex
import shutil
from collections import Counter
from pathlib import Path

import matplotlib.pyplot as plt
import pyarrow
import pytest
from pyarrow import parquet
from readme import PAGES, ROOT, commands, run, section
from warm import run_python

from grpo_ustat.cli import compose
from grpo_ustat.cli.compose import parse

READERS = {  # what is a reader's own, and what stands for it here
    "org/name": "Qwen/Qwen2.5-0.5B",
    "outputs/train/NAME/seed-0/checkpoint-20": "grpo_ustat/assets/tiny",
    "outputs/train/NAME/seed-0/checkpoint-40": "grpo_ustat/assets/tiny",
    "outputs/trl/checkpoint-9": "grpo_ustat/assets/tiny",
    "FOLDER": "tests/data/math/train.jsonl",
    "my.jsonl": "tests/data/jsonl/my.jsonl",
    "my.py": "tests/data/jsonl/my.py",
    "math500.jsonl": "tests/data/math/test.jsonl",
    "completions.parquet": "README.md.parquet",
    "rollouts.parquet": "README.md.parquet",
    "model=global_step_20": "model=grpo_ustat/assets/tiny",
    "$SLURM_ARRAY_TASK_ID": "1",
}
OWN = ("sorting", "lenient", "median")  # of docs/extending.md: test_own_packages.py
RUN_BY = {  # commands of other kinds, and the file that runs them
    "./scripts/test": ".ci/run",
    "advise": "tests/advise/test_sources.py",
    "convert": "tests/logs/test_convert.py",
    "doctor": "tests/doctor/test_main.py",
    "report": "tests/report/test_aggregate.py",
    "sweep": "tests/runs/test_status.py",
    "sbatch scripts/slurm": "tests/commands/test_slurm_cluster.py",
    "GRPO_USTAT_TEST_MODEL=FOLDER python -m pytest": "tests/gpu/test_vllm.py",
    ".venv/bin/python scripts/tools/fetch_smollm2.py": "tests/policy/test_loading.py",
    "VERL_USE_EXTERNAL_MODULES=my_advantages python": "tests/docs/test_my_advantages.py",
    "VERL_USE_EXTERNAL_MODULES=grpo_ustat.integrations.verl_record python": (
        "tests/integrations/test_verl_record.py"
    ),
    "python -m verl.model_merger": "tests/helpers/verl_dump.py",
}
# The picture of a page.
LINKED = re.compile(r"!\[[^]]*\]\(([^)]+)\)")
PROGRAMS = ("./scripts/run", "grpo-ustat", "grpo_ustat")  # in a checkout, installed, by torchrun
INSTALLS = ("python3 -m venv", "uv venv", "pip install", ".venv/bin/pip install")  # by setup.sh
SMALL = {
    "mse": ["study.questions=8", "budget.pool_completions=8", "launch.workers=1"],
    "train": ["debug=train", "max_steps=2", "model=tiny_direct"],
}


def of_entry(words):
    """The entry that a command runs and its arguments; None where it is of another kind."""
    if words[0] == "sbatch" and "--wrap" in words:
        return of_entry(shlex.split(words[words.index("--wrap") + 1]))
    if words[0] == "sbatch":
        return "train", words[2:]
    for at, word in enumerate(words):
        if word.endswith(PROGRAMS) and words[at + 1] in ("train", "mse", "gap"):
            return words[at + 1], words[at + 2 :]
    return None


COMMANDS = [(page, words) for page, text in PAGES.items() for words in commands(text)]
COMPOSED = {  # each once; tests/commands/test_sweeps.py shows the costs of every overlay alone
    (entry[0], *(word for word in entry[1] if word != "dry_run=true")): page
    for page, words in COMMANDS
    if (entry := of_entry(words)) and not any(name in " ".join(words) for name in OWN)
}


def two_seeds(split_sweep):
    """A sweep without what its third and further seeds repeat."""

    def runs(words):
        kept = Counter()
        for overrides in split_sweep(words):
            others = tuple(word for word in overrides if not word.startswith("seed="))
            kept[others] += 1
            if kept[others] <= 2:
                yield overrides

    return lambda words: list(runs(words))


@pytest.mark.slow(minutes=0.01)
@pytest.mark.parametrize(
    "entry, arguments",
    [
        pytest.param(entry, arguments, id=f"{page}: {' '.join(arguments)[:60] or entry}")
        for (entry, *arguments), page in COMPOSED.items()
        if arguments != ["experiment=best_group_size"]
    ],
)
def test_the_command_line_takes_it(entry, arguments, tmp_path, monkeypatch):
    for name in ("tests", "grpo_ustat"):
        (tmp_path / name).symlink_to(ROOT / name)
    row = {"prompt": ["1 + 1 = "], "completion": ["2"], "reward": [1.0]}
    parquet.write_table(pyarrow.table(row), tmp_path / "README.md.parquet")
    monkeypatch.chdir(tmp_path)
    for theirs, ours in READERS.items():
        arguments = [word.replace(theirs, ours) for word in arguments]
    monkeypatch.setattr(compose, "split_sweep", two_seeds(compose.split_sweep))
    asked = parse(entry, [*arguments, "dry_run=true"])
    assert len(asked.planned_runs) >= (2 if "-m" in arguments else 1)


def script_of(words):
    """The script of scripts/benchmarks/ or scripts/tools/ that a command runs; None where none."""
    return next((ROOT / w for w in words if re.match(r"scripts/(benchmarks|tools)/", w)), None)


def test_every_other_command_is_run_by_a_test():
    for page, words in COMMANDS:
        entry, words = of_entry(words), words[1:] if words[0] in PROGRAMS else words
        line = " ".join(words)
        files = [file for start, file in RUN_BY.items() if line.startswith(start)]
        ours = line.startswith(INSTALLS) or any(name in line for name in OWN)
        assert entry or ours or files or script_of(words), (page, line)
        for file in files:
            named = Path(next((w for w in words if w.startswith("scripts/")), words[0]))
            assert named.stem in (ROOT / file).read_text(), (page, line, file)


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.nightly(minutes=2)
def test_first_figure_and_answer_are_of_the_first_commands(tmp_path):
    """The constants behind the figure, its pixels, and the answer that README quotes."""
    page = PAGES["README.md"]
    study, report, *_ = commands(section(page, "Ten minutes"))
    printed = ""
    env = os.environ | {"PYTHONPATH": str(ROOT), "EVERY_FORMAT": "1"}
    for words in (study, report):
        done = run_python("-m", "grpo_ustat", *words[1:], cwd=tmp_path, env=env)
        assert done.returncode == 0, (words, done.stderr)
        printed += done.stdout
    folder = tmp_path / "outputs/report/figure4"
    made = {row["policy"]: row for row in rows_of(folder / "fixed_n.csv")}
    kept = rows_of(ROOT / "docs/examples/best_group_size.csv")
    assert [row["policy"] for row in kept] == list(made)
    # On another processor, rounding can change a few sampled completions.
    for row in kept:
        again = made[row["policy"]]
        for name in row.keys() - {"policy"}:
            low, high = (float(again[f"{name.split('_')[0]}_{end}"]) for end in ("low", "high"))
            assert float(again[name]) == pytest.approx(float(row[name]), abs=0.05 * (high - low))
    drawn, shown = (
        plt.imread(path) for path in (folder / "fixed_n.png", ROOT / LINKED.search(page)[1])
    )
    assert drawn.shape == shown.shape and abs(drawn - shown).mean() < 0.01
    answer = re.search(r"```text\n(.*?) \.\.\.\n", page, re.DOTALL)[1]
    assert " ".join(answer.split()) in " ".join(printed.split())


@pytest.mark.slow(minutes=1.2)
def test_the_tour_runs_as_it_stands(tmp_path):
    """On fewer questions and steps, in its order; and the script that redraws a figure."""
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    tour = section(PAGES["README.md"], "Ten minutes")
    ran = []
    for words in commands(tour):
        if words[0] == "./scripts/run":
            code, told = run([*words, *SMALL.get(words[1], [])], tmp_path, EVERY_FORMAT="1")
            assert code == 0, (words, told)
            ran.append(words[1])
    assert ran == ["mse", "report", "train", "report"]
    for name, figures in {"figure4": ("mse", "fixed_n"), "sweep": ("accuracy", "learning")}.items():
        left = {file.name for file in (tmp_path / "outputs/report" / name).iterdir()}
        assert {"report.html", "runs.csv"} <= left
        assert all(any(f.startswith(fig) and f.endswith(".pdf") for f in left) for fig in figures)
    assert len([*tmp_path.glob("outputs/train/*/seed-*/result.json")]) == 1
    shutil.rmtree(tmp_path / "outputs")
