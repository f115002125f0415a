"""SIGTERM, SIGUSR1, SIGUSR2: a checkpoint between steps, code 75, and the same command goes on."""

from __future__ import annotations

import os
import shutil
import signal

import pytest
from forks import in_ranks
from launching import Command, finished, lines, until
from resuming import SHORT, differences, fit, rows

from grpo_ustat.distributed.ranks import RefusedByRank
from grpo_ustat.distributed.signals import STOPPING, Stopped
from grpo_ustat.train import trainer
from grpo_ustat.train.checkpoint import STATE_FILE
from grpo_ustat.train.snapshots import checkpoints

pytestmark = pytest.mark.slow


@pytest.fixture
def through(trained):
    return trained("save_steps=4")


def signalling(monkeypatch, name, number, at):
    """Send this process a signal inside the `at`-th call of a part of the trainer."""
    part, calls = getattr(trainer, name), []

    def called(*arguments, **options):
        calls.append(1)
        if len(calls) == at:
            os.kill(os.getpid(), number)
        return part(*arguments, **options)

    monkeypatch.setattr(trainer, name, called)


MOMENTS = [  # (part of the loop, its which call, steps done when the run stops)
    ("set_up", 1, 0), ("evaluate", 1, 0), ("sample_batch", 1, 1), ("penalised_rewards", 2, 2),
    ("update", 3, 3), ("train_step", 4, 4), ("evaluate", 2, 2),
    ("evaluate", 3, 4),
]  # fmt: skip


def stops():
    """Every moment with every signal; at push each moment with a signal in its turn."""
    for place, moment in enumerate(MOMENTS):
        for turn, number in enumerate(STOPPING):
            often = turn == place % len(STOPPING)
            yield pytest.param(*moment, number, marks=() if often else pytest.mark.nightly)


@pytest.mark.parametrize("part, at, done, number", list(stops()))
def test_a_signal_stops_between_steps(tmp_path, monkeypatch, through, part, at, done, number):
    before = [signal.getsignal(n) for n in STOPPING]
    signalling(monkeypatch, part, number, at)
    with pytest.raises(Stopped) as stopped:
        fit(tmp_path / "run", "save_steps=4")
    monkeypatch.undo()
    assert [signal.getsignal(n) for n in STOPPING] == before
    said = f"stopped by {signal.Signals(number).name} after step {done}; "
    assert str(stopped.value).startswith(said)
    found = next(iter(checkpoints(tmp_path / "run")), None)
    assert (found.name if found else None) == (f"checkpoint-{done}" if done else None)
    fit(tmp_path / "run", "save_steps=4")
    beyond = {f"checkpoint-{done}"}  # written because of the signal, at no multiple of save_steps
    changed = {name.partition("/")[0] for name in differences(tmp_path / "run", through)}
    assert changed <= beyond


def test_a_signal_in_the_last_save_is_too_late_to_stop_anything(tmp_path, monkeypatch, through):
    signalling(monkeypatch, "save_checkpoint", signal.SIGTERM, 1)
    assert differences(fit(tmp_path / "run", "save_steps=4"), through) == []


def test_handlers_are_as_before_after_a_run(tmp_path):
    before = [signal.getsignal(n) for n in (*STOPPING, signal.SIGINT)]
    fit(tmp_path / "run", "max_steps=1", "schedule=constant", "schedule.warmup_steps=0")
    now = [signal.getsignal(n) for n in (*STOPPING, signal.SIGINT)]
    assert now == before


COMMAND = (*SHORT, "save_steps=4")


@pytest.mark.parametrize("count, number", [(1, STOPPING[1]), (3, STOPPING[0])])
def test_the_command_ends_with_code_75_and_goes_on(tmp_path, through, number, count):
    """A process of its own, signalled once so many rows are written: before each step, signals in
    turn.

    Every signal at every moment, in this process: `test_a_signal_stops_between_steps`.
    """
    folder = tmp_path / "run"
    words = ("train", *COMMAND, f"hydra.run.dir={folder}")
    with Command(*words, cwd=tmp_path) as command:
        until(lambda: lines(folder / "metrics.jsonl") >= count)
        os.kill(command.pid, number)
        code, said = command.end()
    assert code == 75, said
    assert f"stopped by {signal.Signals(number).name} after step " in said
    assert "Traceback" not in said and not (folder / "result.json").exists()
    assert finished(*words, cwd=tmp_path)[0] == 0
    late = f"checkpoint-4/{STATE_FILE}"  # stopped before the last evaluation, which came afterwards
    changed = {n for n in differences(folder, through) if n != late}
    assert all(n.startswith("checkpoint-") and "checkpoint-4" not in n for n in changed)


def test_a_sweep_stops_as_a_whole(tmp_path):
    words = ("train", "-m", *SHORT, "seed=0,1", f"hydra.sweep.dir={tmp_path}/sweep")
    with Command(*words, cwd=tmp_path) as command:
        until(lambda: any(map(lines, tmp_path.glob("sweep/*/seed-0/metrics.jsonl"))))
        os.kill(command.pid, signal.SIGTERM)
        assert command.end()[0] == 75
    assert not list(tmp_path.glob("sweep/*/seed-1"))


def test_a_signal_to_one_rank_stops_both_and_one_process_goes_on(tmp_path):
    """Only rank 1 is told; both finish the step, rank 0 saves."""
    overrides = ("save_steps=4", "model.dtype=float64")

    def told(rank):
        if rank == 1:
            signalling(pytest.MonkeyPatch(), "sample_batch", signal.SIGUSR1, 2)
        with pytest.raises(Stopped):
            fit(tmp_path / "run", *overrides)
        return "stopped"

    assert in_ranks(2, told) == ["stopped"] * 2
    assert checkpoints(tmp_path / "run")[0].name == "checkpoint-2"
    fit(tmp_path / "run", *overrides)
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4]


def test_ranks_agree_if_no_checkpoint_can_be_used(tmp_path, through):
    """Both refuse, and one of them says so."""
    shutil.copytree(through, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    for path in tmp_path.glob("run/checkpoint-*"):
        (path / "memory.npz").unlink()

    def refused(_):
        with pytest.raises(RefusedByRank, match="checkpoint-4"):
            fit(tmp_path / "run", "save_steps=4")
        return True

    assert in_ranks(2, refused) == [True, True]
