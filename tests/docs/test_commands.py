"""Each command of the README is taken by the command line, and those of its tour run."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from readme import ROOT, TEXT, commands, run  # noqa: E402

from grpo_ustat.composing import asked_for  # noqa: E402

READERS = {  # what is a reader's own, and what stands for it here
    "org/name": "Qwen/Qwen2.5-0.5B",
    "FOLDER": "tests/data/math/train.jsonl",
    "math500.jsonl": "tests/data/math/test.jsonl",
    "completions.parquet": "README.md.parquet",
    "$SLURM_ARRAY_TASK_ID": "1",
}
OWN = ("sorting", "lenient", "median")  # packages of the README: test_own_readme, test_own_baseline
RUN_BY = {  # commands of other kinds, and the file that runs them
    "./scripts/test": ".ci/run",
    "./scripts/run doctor": "tests/checkup/test_doctor.py",
    "./scripts/run report": "tests/reports/test_report.py",
    "./scripts/run sweep": "tests/test_status.py",
    "./scripts/run mirror": "tests/test_mirror.py",
    "sbatch scripts/slurm": "tests/test_slurm_cluster.py",
    "python scripts/along_training.py": "tests/test_scripts.py",
    "python scripts/try_vllm.py": "tests/rollout/test_vllm.py",
    ".venv/bin/python scripts/fetch_smollm2.py": "tests/test_models.py",
    "eval": "tests/test_completion.py",
}
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
        if word in ("grpo_ustat.train", "grpo_ustat.mse", "grpo_ustat.gap"):
            return word.partition(".")[2], words[at + 1 :]
    if words[0] == "./scripts/run" and words[1] in ("train", "mse", "gap"):
        return words[1], words[2:]
    return None


COMPOSED = [
    pytest.param(*found, id=" ".join(found[1])[:60] or found[0])
    for words in commands()
    if (found := of_entry(words)) and not any(name in " ".join(words) for name in OWN)
]


@pytest.mark.slow(minutes=0.01)
@pytest.mark.parametrize("entry, arguments", COMPOSED)
def test_the_command_line_takes_it(entry, arguments, tmp_path, monkeypatch):
    for name in ("tests", "grpo_ustat"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "README.md.parquet").touch()
    monkeypatch.chdir(tmp_path)
    for theirs, ours in READERS.items():
        arguments = [word.replace(theirs, ours) for word in arguments]
    asked = asked_for(entry, [*arguments, "dry_run=true"])
    assert len(asked.points) >= (2 if "-m" in arguments else 1)


def test_every_other_command_is_run_by_a_test():
    for words in commands():
        line = " ".join(words)
        known = [file for start, file in RUN_BY.items() if line.startswith(start)]
        ours = line.startswith(INSTALLS) or any(name in line for name in OWN)
        assert of_entry(words) or ours or known, line
        for file in known:
            named = Path(next((w for w in words if w.startswith("scripts/")), " ".join(words[1:2])))
            assert (ROOT / file).is_file(), file
            assert named.stem in (ROOT / file).read_text(), (line, file)


@pytest.mark.slow(minutes=2)
def test_the_tour_runs_as_it_stands(tmp_path):
    """On fewer questions and steps, in its order; and the script that redraws a figure."""
    tour = re.split(r"\n## ", TEXT.split("## Ten minutes\n")[1])[0]
    ran = []
    for words in commands(tour):
        if words[0] == "./scripts/run" and words[1] != "doctor":
            code, told = run([*words, *SMALL.get(words[1], [])], tmp_path)
            assert code == 0, (words, told)
            ran.append(words[1])
    assert ran == ["mse", "report", "train", "report"]
    for name, figures in {"figure4": ("mse", "fixed_n"), "sweep": ("accuracy", "learning")}.items():
        left = {file.name for file in (tmp_path / "outputs/report" / name).iterdir()}
        assert {"report.html", "runs.csv"} <= left
        assert all(any(f.startswith(fig) and f.endswith(".pdf") for f in left) for fig in figures)
    assert len([*tmp_path.glob("outputs/train/*/seed=*/result.json")]) == 6
    shutil.rmtree(tmp_path / "outputs")
