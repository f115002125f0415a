"""One process at a time on a folder: who is refused, whose lock is taken over, who notices."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace

import pytest
from commands import compose
from forks import in_ranks
from resuming import config_of, fit

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.distributed import lock
from grpo_ustat.distributed.lock import Held, Lock, peek
from grpo_ustat.distributed.ranks import RefusedByRank
from grpo_ustat.distributed.signals import Stopped, StopRequest
from grpo_ustat.launch.command import load_command
from grpo_ustat.launch.run import run_here
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.train import trainer

FORK = multiprocessing.get_context("fork")
RACERS = 8


@pytest.fixture
def hasty(monkeypatch):
    """The times of the lock, shortened together."""
    times = dict(
        BEAT_SECONDS=0.05, DEAD_AFTER_SECONDS=1.0, LOOK_SECONDS=0.05, SETTLE_SECONDS=0.5,
        FLOCK_SECONDS=0.1,
    )  # fmt: skip
    for name, seconds in times.items():
        monkeypatch.setattr(lock, name, seconds)


@pytest.fixture
def no_flock(monkeypatch):
    """A file system without flock."""

    def unsupported(*_):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "flock", unsupported)


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


def own(pipe, folder, before_waiting=lambda: None):
    """Take the lock, say so, and release it when told to; say what `check` said then."""
    taken = Lock(folder)
    taken.take()
    before_waiting()
    pipe.send(taken.owner)
    pipe.recv()
    try:
        taken.check()
        pipe.send("still ours")
    except Held as error:
        pipe.send(str(error))
    taken.release()


def foreign(folder, drift=0.0, **changes):
    """A lock that a process of another machine left, by a clock that is so many seconds ahead."""
    theirs = dict(host="elsewhere", pid=42, boot_id="another") | changes
    owner = replace(Lock(folder).owner, **theirs)
    (folder / lock.NAME).write_text(json.dumps(asdict(owner)) + "\n")
    touch(folder, drift)
    return owner


def touch(folder, drift):
    now = time.time() + drift
    os.utime(folder / lock.NAME, (now, now))


@contextmanager
def beating(folder, drift):
    """Signs of life as the other machine's owner gives them."""
    over = threading.Event()

    def beat():
        while not over.wait(lock.BEAT_SECONDS):
            touch(folder, drift)

    thread = threading.Thread(target=beat)
    thread.start()
    yield
    over.set()
    thread.join()


@pytest.mark.slow
def test_a_second_process_is_refused_and_told_whose_it_is(tmp_path):
    with process(own, tmp_path) as (pipe, child):
        owner = told(pipe)
        before = (tmp_path / lock.NAME).read_bytes()
        with pytest.raises(Held) as refused:
            Lock(tmp_path).take()
        named = f"process {child.pid} on {socket.gethostname()}, started {owner.started}"
        assert named in str(refused.value) and "hydra.run.dir" in str(refused.value)
        holder = peek(tmp_path)
        assert (holder.pid, holder.token, holder.certain) == (child.pid, owner.token, True)
        assert (tmp_path / lock.NAME).read_bytes() == before
        pipe.send("end")
        assert told(pipe) == "still ours"
        child.join()
    assert list(tmp_path.iterdir()) == [] and peek(tmp_path) is None


def test_a_killed_owner_is_followed_at_once(tmp_path, capsys):
    with process(own, tmp_path) as (pipe, child):
        told(pipe)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert peek(tmp_path) is None
        start, mine = time.monotonic(), Lock(tmp_path)
        mine.take()
        assert time.monotonic() - start < lock.DEAD_AFTER_SECONDS / 2
    said = capsys.readouterr().err
    assert f"process {child.pid} on" in said and "has ended" in said and said.count("\n") == 1
    mine.check()
    mine.release()


@pytest.mark.slow
@pytest.mark.parametrize("forgets", [True, False])
def test_a_fork_of_the_owner_keeps_no_lock(tmp_path, forgets):
    """And, where it would, a dead owner's folder stayed closed: the negative control."""
    forks = FORK.SimpleQueue()

    def fork():
        if not forgets:
            lock._HELD_LOCKS.clear()
        forked = os.fork()
        if not forked:
            time.sleep(60)
            os._exit(0)
        forks.put(forked)

    with process(own, tmp_path, fork) as (pipe, child):
        told(pipe)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        mine = Lock(tmp_path)
        try:
            with nullcontext() if forgets else pytest.raises(Held):
                mine.take()
        finally:
            os.kill(forks.get(), signal.SIGKILL)
        mine.release()


@pytest.mark.slow
def test_a_fork_that_ends_takes_no_lock_away(tmp_path):
    mine = Lock(tmp_path)
    mine.take()
    with process(lambda pipe: (mine.release(), pipe.send("released"))) as (pipe, child):
        told(pipe)
        child.join()
        with process(own, tmp_path) as (pipe, other), pytest.raises(EOFError):
            told(pipe)
    mine.check()
    mine.release()
    assert not (tmp_path / lock.NAME).exists()


@pytest.mark.slow
@pytest.mark.parametrize("drift", [-60, 60])
@pytest.mark.parametrize("kind", ["flock", "no flock"])
def test_another_machines_owner_is_known_by_its_signs_of_life(
    tmp_path, hasty, capsys, request, drift, kind
):
    if kind == "no flock":
        request.getfixturevalue("no_flock")
    owner, mine = foreign(tmp_path, drift), Lock(tmp_path)
    with beating(tmp_path, drift), pytest.raises(Held, match="process 42 on elsewhere, started"):
        mine.take()
    assert json.loads((tmp_path / lock.NAME).read_text())["token"] == owner.token
    capsys.readouterr()
    start = time.monotonic()
    mine.take()  # it died
    assert time.monotonic() - start > lock.DEAD_AFTER_SECONDS
    watched, taken = capsys.readouterr().err.splitlines()
    assert "waits up to 1 s to see if it is alive" in watched and "has ended" in taken
    mine.check()
    mine.release()


def test_who_is_asked_to_stop_watches_no_longer(tmp_path, hasty):
    owner = foreign(tmp_path)
    with StopRequest(), pytest.raises(Stopped):
        os.kill(os.getpid(), signal.SIGTERM)
        Lock(tmp_path).take()
    assert json.loads((tmp_path / lock.NAME).read_text())["token"] == owner.token


@pytest.mark.slow
def test_who_only_looks_denies_nobody_the_lock(tmp_path):
    """For as long as it looks the lock is not free; the one that takes it waits."""
    (tmp_path / lock.NAME).touch()
    mine = Lock(tmp_path)
    with (tmp_path / lock.NAME).open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        threading.Timer(0.1, fcntl.flock, (looking, fcntl.LOCK_UN)).start()
        mine.take()
    mine.release()


def test_peek_tells_what_is_known_from_what_is_likely(tmp_path, hasty):
    foreign(tmp_path)
    seen = peek(tmp_path)
    assert (
        seen.host == "elsewhere" and not seen.certain and 0 <= seen.silent < lock.DEAD_AFTER_SECONDS
    )
    touch(tmp_path, -2 * lock.DEAD_AFTER_SECONDS)
    assert peek(tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == [lock.NAME]


def test_without_flock_an_owner_of_this_machine_is_watched_too(tmp_path, hasty, no_flock):
    with process(own, tmp_path) as (pipe, child):
        told(pipe)
        with pytest.raises(Held, match=f"process {child.pid} on"):
            Lock(tmp_path).take()
        pipe.send("end")
        assert told(pipe) == "still ours"


@pytest.mark.slow
@pytest.mark.parametrize(
    "job, restart, at_once", [("7", 1, True), ("7", 2, False), ("8", 1, False)]
)
def test_slurms_word_that_a_job_started_again_is_taken(
    tmp_path, monkeypatch, hasty, capsys, job, restart, at_once
):
    foreign(tmp_path, slurm_job="7", slurm_restart=1)
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restart + 1 if at_once else restart - 1))
    mine = Lock(tmp_path)
    mine.take()
    assert ("SLURM: " in capsys.readouterr().err) == at_once
    mine.release()


@pytest.mark.slow
@pytest.mark.parametrize("content", ["", "{", '{"pid": 1}\n'])
def test_a_damaged_lock_of_the_dead_is_taken_over(tmp_path, hasty, content):
    (tmp_path / lock.NAME).write_text(content)
    assert peek(tmp_path) is None
    mine = Lock(tmp_path)
    mine.take()
    mine.check()
    mine.release()


def race(pipe, folder, gun):
    gun.wait(60)
    try:
        own(pipe, folder)
    except Held:
        pipe.send(None)


@pytest.mark.slow
@pytest.mark.parametrize("left_by, rounds", [("this machine", 30), ("another", 6), ("no flock", 6)])
def test_of_many_that_take_over_at_once_one_wins(tmp_path, hasty, request, left_by, rounds):
    """Eight at once, again and again: two winners in one of ten rounds show with 95 % in 30."""
    if left_by == "no flock":
        request.getfixturevalue("no_flock")
    for number in range(rounds):
        folder, gun = tmp_path / str(number), FORK.Barrier(RACERS)
        folder.mkdir()
        here = {"boot_id": Lock(folder).owner.boot_id} if left_by == "this machine" else {}
        foreign(folder, **here)
        assert winners(folder, gun) == ["still ours"]


def winners(folder, gun):
    pipes = []
    for _ in range(RACERS):
        here, there = FORK.Pipe()
        FORK.Process(target=race, args=(there, folder, gun), daemon=True).start()
        there.close()
        pipes.append(here)
    owners = [pipe for pipe in pipes if told(pipe)]
    for pipe in owners:
        pipe.send("end")
    return [told(pipe) for pipe in owners]


@pytest.mark.slow
def test_who_wrote_last_of_those_that_took_over_has_the_lock(
    tmp_path, monkeypatch, hasty, no_flock
):
    foreign(tmp_path)
    other, sleep = [], time.sleep

    def settling(seconds):
        if seconds == lock.SETTLE_SECONDS:
            other.append(foreign(tmp_path, host="yet-another"))
        sleep(seconds)

    monkeypatch.setattr(lock.time, "sleep", settling)
    with pytest.raises(Held, match="process 42 on yet-another"):
        Lock(tmp_path).take()
    assert json.loads((tmp_path / lock.NAME).read_text())["token"] == other[0].token


@pytest.mark.slow
def test_a_lock_that_was_removed_while_it_was_opened_is_no_lock(tmp_path, monkeypatch):
    """Its owner ends and another begins between the opening of the file and its flock."""
    old, flock = Lock(tmp_path), lock._flock
    old.take()
    with ExitStack() as stack:
        others = []

        def late(descriptor):
            if old.is_own():
                old.release()
                pipe, _ = stack.enter_context(process(own, tmp_path))
                others.append(told(pipe))
            return flock(descriptor)

        monkeypatch.setattr(lock, "_flock", late)
        with pytest.raises(Held) as refused:
            Lock(tmp_path).take()
        assert str(others[0]) in str(refused.value)


def come_and_go(pipe, folder, times):
    """Take and release; how often somebody else was inside."""
    met = 0
    for _ in range(times):
        mine = Lock(folder)
        while True:
            with suppress(Held):
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
@pytest.mark.parametrize("locks", [True, False])
def test_processes_that_come_and_go_never_meet(tmp_path, monkeypatch, locks):
    """The file goes with each of them; without flock they do meet, the negative control."""
    if not locks:
        monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    folder = tmp_path / "run"
    with (
        process(come_and_go, folder, 20) as (one, _),
        process(come_and_go, folder, 20) as (two, _),
        process(come_and_go, folder, 20) as (three, _),
    ):
        met = sum(map(told, (one, two, three)))
    assert (met == 0) == locks


@pytest.mark.slow
def test_an_owner_that_was_suspended_learns_that_it_lost(tmp_path, hasty, no_flock):
    with process(own, tmp_path) as (pipe, child):
        told(pipe)
        os.kill(child.pid, signal.SIGSTOP)
        mine = Lock(tmp_path)
        mine.take()
        os.kill(child.pid, signal.SIGCONT)
        pipe.send("end")
        assert f"was taken over by process {os.getpid()} on" in told(pipe)
        child.join()
    mine.check()
    mine.release()


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or os.getuid() != 0 or not shutil.which("unshare"),
    reason="only root can give itself another host name",
)
def test_a_host_of_another_name_is_named(tmp_path):
    code = (
        "import socket, sys, pathlib; socket.sethostname('node17')\n"
        "from grpo_ustat.distributed.lock import Lock\n"
        "Lock(pathlib.Path(sys.argv[1])).take(); print('taken', flush=True); sys.stdin.read()"
    )
    command = ["unshare", "--uts", sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        if other.stdout.readline() != "taken\n":
            pytest.skip("no namespaces here")
        with pytest.raises(Held, match=r"process \d+ on node17, started"):
            Lock(tmp_path).take()
        other.stdin.close()


# Runs


def every_file(path):
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


class Reached(Exception):
    """A run came as far as loading its policy."""


def reach(*_):
    raise Reached


def paused_fit(pipe, path):
    """Train, but wait in the second step until told to go on."""
    draw, calls = trainer.sample_batch, []

    def waiting(*arguments):
        calls.append(1)
        if len(calls) == 2:
            pipe.send("in step 2")
            pipe.recv()
        return draw(*arguments)

    trainer.sample_batch = waiting
    fit(path)
    pipe.send("done")


@pytest.mark.slow
def test_a_second_run_is_refused_before_it_loads_anything(tmp_path, monkeypatch, hasty):
    """Without the lock it gets in, the negative control; the first one is not disturbed."""
    path = tmp_path / "run"
    with process(paused_fit, path) as (pipe, child):
        told(pipe)
        monkeypatch.setattr(trainer, "set_up", reach)
        before = every_file(path)
        for overrides in ((), ("on_existing=overwrite",)):
            with pytest.raises(Held, match=f"is in use by process {child.pid} on"):
                fit(path, *overrides)
        folder = RunFolder(path, config_of())
        with pytest.raises(Held, match=f"is in use by process {child.pid} on"):
            folder.check_free()
        folder.leave()
        assert every_file(path) == before
        monkeypatch.setattr(RunFolder, "lock", lambda _: nullcontext())
        with pytest.raises(Reached):
            fit(path)
        pipe.send("go on")
        assert told(pipe) == "done"
    assert (path / "result.json").exists() and not (path / lock.NAME).exists()


@pytest.mark.slow
def test_ranks_are_refused_together(tmp_path):
    def refused(_):
        with pytest.raises(RefusedByRank, match="is in use by process"):
            fit(tmp_path / "run")
        return True

    with process(own, tmp_path / "run") as (pipe, _):
        told(pipe)
        assert in_ranks(2, refused) == [True, True]


@pytest.mark.slow
def test_a_run_that_lost_its_folder_writes_nothing_more(tmp_path, monkeypatch):
    path, step, seen = tmp_path / "run", trainer.train_step, {}

    def usurped(*arguments):
        done = step(*arguments)
        if arguments[1].step == 2:
            foreign(path)
            seen.update(every_file(path))
        return done

    monkeypatch.setattr(trainer, "train_step", usurped)
    with pytest.raises(Held, match="process 42 on elsewhere"):
        run_here(load_command("train"), config_of(), RunFolder(path, config_of()))
    assert every_file(path) == seen


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


@pytest.mark.slow
def test_a_run_refused_while_it_sets_up_leaves_no_folder(tmp_path, monkeypatch):
    def refuse(*_):
        raise ConfigError("no such model")

    monkeypatch.setattr(trainer, "set_up", refuse)
    with pytest.raises(ConfigError, match="no such model"):
        fit(tmp_path / "group" / "run")
    RunFolder(tmp_path / "group" / "run", config_of()).leave()
    assert list(tmp_path.iterdir()) == []


def test_overwriting_keeps_the_lock_that_is_held(tmp_path):
    foreign(tmp_path, boot_id=Lock(tmp_path).owner.boot_id)
    folder = RunFolder(tmp_path, compose("train", "seed=1"))
    folder.check()  # a dead lock is no run
    folder.check_free()
    with folder.lock():
        folder.open()
        folder.write("metrics.jsonl", "old")
    again = RunFolder(tmp_path, compose("train", "on_existing=overwrite"))
    with again.lock():
        again.open()
        again.check_lock()
        assert not (tmp_path / "metrics.jsonl").exists()
    assert not (tmp_path / lock.NAME).exists()


def test_a_folder_that_cannot_be_locked_is_one_line(tmp_path, monkeypatch):
    def denied(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path / lock.NAME))

    monkeypatch.setattr(lock, "_open_or_create", denied)
    folder = RunFolder(tmp_path, config_of())
    with pytest.raises(ConfigError, match="cannot be locked .*Permission denied"), folder.lock():
        pass
