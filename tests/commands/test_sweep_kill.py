"""SIGKILL of a whole local sweep at seeded moments: typed again, it ends as if nobody had.

Every sweep is a fork of this process, see `launching`.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from contextlib import suppress

import numpy as np
import pytest
from launching import Command, finished
from resuming import differences

from grpo_ustat.pages import learning
from grpo_ustat.report import aggregate
from grpo_ustat.runs import history

pytestmark = pytest.mark.nightly(minutes=0.8)
SAVE_STEPS = 2
SWEEP = (
    "-m", "seed=0,1,2", "group_size=4", "model=tiny_direct", "max_steps=10", "eval_steps=5",
    f"save_steps={SAVE_STEPS}", "save_total_limit=1", "budget.rollouts=16", "dataset.test_size=10",
    "dataset.train_size=8", "max_completion_length=6", "learning_rate=1e-3", "report.name=joint",
    "baseline=running_mean", "hydra.sweep.dir=sweep",
)  # fmt: skip
REPORT = ("accuracy.csv", "learning.csv", "runs.csv")


def runs(place):
    return {path.relative_to(place): path for path in place.glob("sweep/*/seed-*")}


def launched(path):
    """How often a run was started, and the step that it last went on from; 0 from the beginning."""
    starts, step = 0, 0
    for row in history.launches(path):
        starts += row["event"] == "start"
        step = {"start": 0, "resumed": row.get("step")}.get(row["event"], step)
    return starts, step


def steps_done(path):
    file = path / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.is_file() else 0


@pytest.fixture(scope="module")
def through(tmp_path_factory):
    """A sweep that nobody kills: its folder and the seconds that it takes."""
    for name in ("warm", "through"):  # at first imports are paid that come late
        place, start = tmp_path_factory.mktemp(name), time.perf_counter()
        typed(place)
    return place, time.perf_counter() - start


def killed(place, seconds):
    """Type the sweep and kill all of it at that moment, unless it has ended; its exit code."""
    with Command("train", *SWEEP, cwd=place, before=undrawn) as sweep:
        with suppress(AssertionError):
            return sweep.end(seconds)[0]
        os.killpg(sweep.pid, signal.SIGKILL)
        return sweep.end()[0]


def undrawn():
    """Runs and the joint report without their figures, which take longer than all the rest."""
    learning.draw_learning = lambda _: None
    aggregate.accuracy_figure = lambda *_: None
    aggregate.learning_figure = lambda folder, name, runs: learning.learning_rows(runs)
    aggregate.page = aggregate.render = lambda _: ""


def typed(place, before=undrawn):
    """Type the sweep and let it end."""
    code, said = finished("train", *SWEEP, cwd=place, before=before)
    assert code == 0, said
    return code


def watched(place, command, *arguments):
    """A command's exit code, and what it did with the runs that were begun before.

    Raises:
        AssertionError: it started a finished run, or repeated more steps than a save is late.
    """
    found = runs(place)
    done = {name for name, path in found.items() if (path / "result.json").is_file()}
    before = {name: (launched(path)[0], steps_done(path)) for name, path in found.items()}
    code, hit = command(place, *arguments), Counter()
    for name, (starts, steps) in before.items():
        now, step = launched(found[name])
        assert name not in done or now == starts, f"{name} was done and started again"
        if now == starts or (code and not step):
            continue  # not its turn yet, or killed before it had found its checkpoint
        assert steps - step <= SAVE_STEPS, f"{name} had done {steps} steps and repeats from {step}"
        hit["went on from a checkpoint" if step else "began again"] += 1
        hit["steps repeated"] += steps - step
    return code, hit


def kill_until_it_ends(place, moments):
    """Kill at each moment until none is left or the sweep has ended; how often what happened."""
    hit = Counter()
    for seconds in moments:
        code, found = watched(place, killed, seconds)
        hit += found
        if code != -signal.SIGKILL:
            assert code == 0
            return hit
        hit["kills"] += 1
    return hit + watched(place, typed)[1]


def assert_as_undisturbed(place, through):
    mine, theirs = runs(place), runs(through)
    assert mine.keys() == theirs.keys() and len(mine) == 3
    for name, path in mine.items():
        assert differences(path, theirs[name]) == [], name
    for name in REPORT:
        there = through / "sweep/joint" / name
        assert (place / "sweep/joint" / name).read_text() == there.read_text()


def test_kills_of_a_sweep(tmp_path, through, capsys):
    """Six, at moments that are uniform over the time of a whole sweep, in sweeps that go on."""
    place, seconds = through
    rng, start, hit, number = np.random.default_rng(20261122), time.perf_counter(), Counter(), 0
    while hit["kills"] < 6:
        here = tmp_path / f"sweep-{number}"
        here.mkdir()
        hit += kill_until_it_ends(here, rng.uniform(0, seconds, size=6 - hit["kills"]))
        assert_as_undisturbed(here, place)
        number += 1
    with capsys.disabled():
        print(f"\n{dict(hit)} in {number} sweeps, {time.perf_counter() - start:.0f} s")
    assert hit["went on from a checkpoint"] + hit["began again"] >= 1
