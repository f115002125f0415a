"""One process at a time on a folder: who is refused, and when the folder is free again."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import socket
import time
from contextlib import contextmanager, suppress

import pytest
from commands import compose
from forks import in_ranks
from resuming import config_of, fit

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.distributed import lock
from grpo_ustat.distributed.lock import Lock
from grpo_ustat.distributed.ranks import RefusedByRank
from grpo_ustat.distributed.signals import Stopped
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.train import trainer

FORK = multiprocessing.get_context("fork")


@contextmanager
def process(work, *arguments):
    """`work(pipe, ...)` in a forked process; the other end of the pipe and the process."""
    here, there = FORK.Pipe()
    child = FORK.Process(target=work, args=(there, *arguments), daemon=True)
    child.start()
    there.close()
    try:
        yield here, child
    finally:
        child.kill()
        child.join()


def told(pipe):
    assert pipe.poll(60), "the other process said nothing"
    return pipe.recv()


def own(pipe, folder):
    """Take the lock, say so with the id of a fork that lives on, and release it when told to."""
    mine = Lock(folder)
    mine.take()
    fork = os.fork()
    if not fork:
        mine.release()
        time.sleep(60)
        os._exit(0)
    pipe.send(fork)
    pipe.recv()
    mine.release()
    pipe.send("released")


@pytest.mark.slow
@pytest.mark.parametrize("end", ["released", "killed"])
def test_a_second_process_is_refused_until_the_owner_ends(tmp_path, monkeypatch, end):
    """A fork of the owner that lives longer keeps no lock, and takes none away."""
    monkeypatch.setattr(lock, "FLOCK_SECONDS", 0.1)
    mine = Lock(tmp_path)
    with process(own, tmp_path) as (pipe, child):
        fork = told(pipe)
        named = f"process {child.pid} on {socket.gethostname()}, started "
        with pytest.raises(ConfigError, match=f"is in use by {named}.*hydra.run.dir=DIR"):
            mine.take()
        assert lock.owner(tmp_path).startswith(named)
        pipe.send("end") if end == "released" else child.kill()
        child.join()
        assert lock.owner(tmp_path) is None
        mine.take()
        os.kill(fork, signal.SIGKILL)
    mine.release()
    assert list(tmp_path.iterdir()) == []


def come_and_go(pipe, folder, times):
    """Take and release; how often somebody else was inside."""
    met = 0
    for _ in range(times):
        mine = Lock(folder)
        while True:
            with suppress(ConfigError):
                mine.take()
                break
        try:
            os.close(os.open(folder.parent / "inside", os.O_CREAT | os.O_EXCL))
            time.sleep(0.001)
            (folder.parent / "inside").unlink()
        except OSError:
            met += 1
        mine.release()
    pipe.send(met)


@pytest.mark.slow
def test_processes_that_come_and_go_never_meet(tmp_path):
    """The file goes with each of them."""
    folder = tmp_path / "run"
    with (
        process(come_and_go, folder, 20) as (one, _),
        process(come_and_go, folder, 20) as (two, _),
        process(come_and_go, folder, 20) as (three, _),
    ):
        assert sum(map(told, (one, two, three))) == 0


def test_a_file_system_without_flock_is_told_in_one_line(tmp_path, monkeypatch, capsys):
    def unsupported(*_):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    first, second = Lock(tmp_path), Lock(tmp_path)
    first.take()
    second.take()
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and all("has no file locks (flock)" in line for line in errors)
    assert lock.owner(tmp_path) is None
    second.release()
    first.release()


class Reached(Exception):
    """A run came as far as loading its policy."""


@pytest.mark.slow
def test_a_second_run_is_refused_before_it_loads_anything(tmp_path, monkeypatch):
    def reach(*_):
        raise Reached

    def refused(_):
        with pytest.raises(RefusedByRank, match="is in use by process"):
            fit(path)
        return True

    path = tmp_path / "run"
    monkeypatch.setattr(trainer, "set_up", reach)
    with process(own, path) as (pipe, child):
        os.kill(told(pipe), signal.SIGKILL)
        for overrides in ((), ("on_existing=overwrite",)):
            with pytest.raises(ConfigError, match=f"is in use by process {child.pid} on"):
                fit(path, *overrides)
        with pytest.raises(ConfigError, match=f"is in use by process {child.pid} on"):
            RunFolder(path, config_of()).check_free()
        assert in_ranks(2, refused) == [True, True]
        assert [file.name for file in path.iterdir()] == [lock.NAME]
    with pytest.raises(Reached):
        fit(path)
    RunFolder(path, config_of()).leave()
    assert not path.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "end, raised",
    [
        (lambda: os.kill(os.getpid(), signal.SIGTERM), Stopped),
        (lambda: os.kill(os.getpid(), signal.SIGINT), KeyboardInterrupt),
        (lambda: 1 / 0, ZeroDivisionError),
    ],
)
def test_however_a_run_ends_its_folder_is_free(tmp_path, monkeypatch, end, raised):
    draw = trainer.sample_batch

    def ending(*arguments):
        assert (tmp_path / lock.NAME).exists()
        end()
        return draw(*arguments)

    monkeypatch.setattr(trainer, "sample_batch", ending)
    with pytest.raises(raised):
        fit(tmp_path)
    assert (tmp_path / "code.json").exists() and not (tmp_path / lock.NAME).exists()


def test_overwriting_keeps_the_lock_that_is_held(tmp_path):
    folder = RunFolder(tmp_path, compose("train", "seed=1"))
    with folder.lock():
        folder.open()
        folder.write("metrics.jsonl", "old")
    again = RunFolder(tmp_path, compose("train", "on_existing=overwrite"))
    with again.lock():
        again.open()
        assert lock.owner(tmp_path) and not (tmp_path / "metrics.jsonl").exists()
    assert not (tmp_path / lock.NAME).exists()


def test_a_folder_that_cannot_be_locked_is_one_line(tmp_path, monkeypatch):
    def denied(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path / lock.NAME))

    monkeypatch.setattr(fcntl, "flock", denied)
    folder = RunFolder(tmp_path, config_of())
    with pytest.raises(ConfigError, match="cannot be locked .*Permission denied"), folder.lock():
        pass
