"""Batch scripts and launchers for SLURM, without SLURM: fakes of its commands on PATH."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import hydra
import pytest

from grpo_ustat.cli.compose import composing

SCRIPTS = Path(__file__).parents[2] / "scripts" / "slurm"
SWEEP = {"SLURM_ARRAY_TASK_MAX": "29", "SLURM_ARRAY_JOB_ID": "10", "SLURM_JOB_ID": "11"}


def submitted(folder, script, *overrides, code=0, state="RUNNING", **environment):
    """Run a batch script; returns (exit code, what it asked of SLURM, standard error)."""
    activate = folder / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True, exist_ok=True)
    activate.write_text(f'PATH="{folder}:{Path(sys.executable).parent}:$PATH"\n')
    answer = f'[ "$1" = show ] && echo "JobId=11" && echo "   JobState={state} Reason=None" '
    answer += '&& echo "   Requeue=1 Restarts=0 BatchFlag=1"; exit 0'
    for name, then in {"srun": f"exit {code}", "scontrol": answer}.items():
        (folder / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {folder}/asked\n{then}\n')
        (folder / name).chmod(0o755)
    (folder / "asked").unlink(missing_ok=True)
    there = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    there |= {"SLURM_JOB_ID": "11", "SLURM_CPUS_PER_TASK": "4"} | environment
    there["PYTHONPATH"] = str(SCRIPTS.parents[1])
    command = ["bash", str(SCRIPTS / script), *overrides]
    done = subprocess.run(command, cwd=folder, env=there, capture_output=True, text=True)
    asked = folder / "asked"
    return done.returncode, asked.read_text().splitlines() if asked.exists() else [], done.stderr


@pytest.mark.parametrize(
    ("code", "state", "asks"),
    [
        (0, "RUNNING", []),
        (1, "RUNNING", []),  # a program that fails is not started again
        (2, "RUNNING", []),
        (75, "RUNNING", ["scontrol show job 11", "scontrol requeue 11"]),
        (75, "COMPLETING", ["scontrol show job 11"]),  # cancelled
    ],
)
def test_a_job_is_started_again_exactly_when_it_was_stopped(tmp_path, code, state, asks):
    ended, asked, errors = submitted(tmp_path, "run.sbatch", "a=b c", code=code, state=state)
    assert ended == code, errors
    assert asked == ["srun python -m grpo_ustat.train a=b c", *asks]


def test_the_jobs_of_an_array_are_all_pairs(tmp_path):
    pairs = []
    for index in range(30):
        code, asked, errors = submitted(
            tmp_path, "sweep.sbatch", "max_steps=5", SLURM_ARRAY_TASK_ID=str(index), **SWEEP
        )
        assert (code, errors) == (0, "")
        assert asked[0].startswith("srun python -m grpo_ustat.train ")
        group_size, seed, last = asked[0].split()[4:]
        assert last == "max_steps=5"
        pairs.append((group_size, seed))
    sizes = [f"group_size={size}" for size in (4, 8, 16, 32, 64, 128)]
    assert pairs == [(size, f"seed={seed}") for size in sizes for seed in range(5)]


def test_an_array_of_another_length_is_told(tmp_path):
    environment = SWEEP | {"SLURM_ARRAY_TASK_MAX": "40", "SLURM_ARRAY_TASK_ID": "30"}
    code, asked, errors = submitted(tmp_path, "sweep.sbatch", **environment)
    assert (code, asked, errors) == (2, [], "--array goes to 40, the pairs to 29\n")
    environment |= {"SLURM_ARRAY_TASK_MAX": "9", "SLURM_ARRAY_TASK_ID": "9"}
    code, asked, errors = submitted(tmp_path, "sweep.sbatch", **environment)
    assert code == 0 and errors == "--array goes to 9, the pairs to 29\n"


@pytest.mark.parametrize("script", ["run.sbatch", "sweep.sbatch"])
def test_slurm_reads_every_option(script):
    """It stops at the first line that is no comment."""
    lines = (SCRIPTS / script).read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not [line for line in lines[first:] if "#SBATCH" in line]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["slurm", "slurm_multinode"])
def test_a_job_has_time_to_save_before_its_limit(name):
    """submitit takes every preemption of a job of ten minutes or fewer for its time limit."""
    with composing("train"):
        words = [f"hydra/launcher={name}"]
        launcher = hydra.compose("train", words, return_hydra_config=True).hydra.launcher
    assert launcher.timeout_min * 60 > 2 * launcher.signal_delay_s and launcher.timeout_min > 10
    assert launcher.max_num_timeout > 0 and launcher.additional_parameters.requeue is True


@pytest.mark.slow
def test_without_the_plugin_only_its_launchers_are_refused(tmp_path):
    program = "import hydra_plugins; hydra_plugins.__path__ = []\n"
    program += "from grpo_ustat.train.__main__ import main; main()"

    def run(*arguments):
        command = [sys.executable, "-c", program, *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    refused = run("-m", "hydra/launcher=slurm", "seed=0,1")
    assert refused.returncode == 2
    assert refused.stderr == (
        "error: SLURM needs hydra-submitit-launcher: pip install -e '.[cli,slurm]'\n"
    )
    shown = " ".join(run("--help", "all").stdout.split())
    assert "(pip install 'grpo-ustat[cli,slurm]')" in shown
    assert (
        "budget.rollouts=16 is not a multiple" in run("group_size=5", "budget.rollouts=16").stderr
    )
