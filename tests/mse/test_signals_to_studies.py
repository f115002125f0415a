"""A signal ends a study between two questions, with all its processes; the rest is made later."""

from __future__ import annotations

import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from launching import Command, alive, finished, until, without_figures  # noqa: E402
from slowed import slow_down  # noqa: E402

from grpo_ustat.mse import study  # noqa: E402
from grpo_ustat.runs import history  # noqa: E402

QUESTIONS = 8  # two in a chunk
STUDY = (
    "debug=mse", "model=tiny_direct", f"study.questions={QUESTIONS}", "rollout_batch_size=16",
    "study.methods=[closed_form]", "max_completion_length=6", "hydra.run.dir=run",
)  # fmt: skip
WAYS = {  # overrides, and how many processes beside the command itself
    "one": ((), 0),
    "workers": (("launch.workers=2",), 3),  # one of which forks the others
}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Neither a rank nor a task of anything."""
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE") or name.startswith(("SLURM_", "SUBMITIT_")):
            monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    place = tmp_path_factory.mktemp("undisturbed")
    code, said = finished("mse", *STUDY, cwd=place, before=plainly)
    assert code == 0, said
    return (place / "run/curves.csv").read_bytes()


def plainly():
    without_figures(study)


def slowly():
    plainly(), slow_down()


def parts(place):
    """Files of questions that are in the pool, and when they were written."""
    return {path: path.stat().st_mtime_ns for path in place.glob("run/pool/*.safetensors")}


def command_of(process):
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def check_stopped(place, way, number, everyone, undisturbed, begun=None):
    """Stop a study once it has begun, then end it."""
    overrides, others = WAYS[way]
    with Command("mse", *STUDY, *overrides, cwd=place, before=slowly) as run:
        until(lambda: begun(run, place) if begun else parts(place))
        family = [one for one in run.family() if "resource_tracker" not in command_of(one)]
        for pid in (run.pid, *(one.pid for one in family if everyone)):
            with suppress(ProcessLookupError):  # ended by the first, which was told before
                os.kill(pid, signal.Signals[f"SIG{number}"])
        code, said = run.end()
        assert code == 75, said
        assert len(family) == others
        until(lambda: not any(map(alive, family)))
    kept = parts(place)
    there = re.findall(rf"stopped by SIG{number}; (\d+) of {QUESTIONS} questions are in the", said)
    assert [int(count) for count in there] == [len(kept)] and len(kept) < QUESTIONS, said
    assert said.count("the same command continues from there") == 1 and "Traceback" not in said
    assert history.launches(place / "run")[-1]["outcome"] == "stopped"
    code, said = finished("mse", *STUDY, *overrides, cwd=place, before=plainly)
    assert code == 0, said
    assert (place / "run/curves.csv").read_bytes() == undisturbed
    assert kept.items() <= parts(place).items() and len(parts(place)) == QUESTIONS


SLOWLY = [pytest.param(name, marks=pytest.mark.slow) for name in ("USR1", "USR2")]


@pytest.mark.slow
@pytest.mark.parametrize("number", ["TERM", *SLOWLY])
def test_a_study_in_one_process_stops_at_a_question(tmp_path, undisturbed, number):
    check_stopped(tmp_path, "one", number, False, undisturbed)


@pytest.mark.slow
def test_so_does_one_with_workers(tmp_path, undisturbed):
    check_stopped(tmp_path, "workers", "USR1", False, undisturbed)


@pytest.mark.slow
def test_so_it_does_when_every_process_is_told_at_once(tmp_path, undisturbed):
    check_stopped(tmp_path, "workers", "TERM", True, undisturbed)


@pytest.mark.slow
def test_workers_that_still_import_are_not_ended_by_it(tmp_path, undisturbed):
    """They are told two seconds before they could ignore it themselves."""

    def started(run, place):
        return sum("forkserver" in command_of(one) for one in run.family()) == 3

    check_stopped(tmp_path, "workers", "TERM", True, undisturbed, begun=started)
