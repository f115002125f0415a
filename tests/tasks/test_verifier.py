"""Judging in processes that can be killed: what they survive, and that they end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hostile_answers import HOSTILE, LENIENT

from grpo_ustat.tasks.answers import final_number
from grpo_ustat.tasks.math_answers import MathJudge
from grpo_ustat.tasks.verifier import JudgeError, Verdict, Verifier

HERE = Path(__file__).parents[1] / "helpers"
RIGHT, WRONG, TIMEOUT, FAILURE = Verdict
BOX = r"\boxed{%s}"


@pytest.fixture(scope="module")
def limited():
    """The real one with the limits of a run."""
    verifier = Verifier(2, 2.0, 2.0)
    yield verifier
    verifier.close()


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """What the stub was asked, as (process, answer), once it stands in for math-verify."""
    monkeypatch.setenv("PYTHONPATH", str(HERE / "stub_math_verify"), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONCALLS", str(tmp_path / "calls"))

    def read():
        lines = (tmp_path / "calls").read_text().splitlines()
        return [(pid, answer) for pid, _, answer in (line.partition(" ") for line in lines)][8:]

    return read


@pytest.fixture
def stub(calls):
    """Verifiers of the stub, whose warm-up is the first eight calls of a worker."""
    made, before = [], set(descendants())

    def of_stub(process):
        # a worker of another fixture may fork after `before` was taken
        with suppress(psutil.Error):
            return process not in before and not before.intersection(process.parents())

    def make(workers=1, deadline=20.0, memory_gb=1.0, canaries=None, **settings):
        made.append(Verifier(workers, deadline, memory_gb, canaries or {}, **settings))
        return made[-1]

    make.processes = lambda: [process for process in descendants() if of_stub(process)]
    yield make
    for verifier in made:
        verifier.close()


def descendants():
    return psutil.Process().children(recursive=True)


def gone(processes, seconds=60):
    return not psutil.wait_procs(processes, seconds)[1]


@pytest.mark.slow
def test_hostile_answers_end_at_the_deadline(stub, calls):
    """Each costs its deadline and nothing else: the next pair meets a worker that works."""
    verifier = stub(deadline=0.5)
    acts = ["sleep 60", "3", "compute", "4", "die", "3", "raise", "3"]
    expected = [TIMEOUT, RIGHT, TIMEOUT, WRONG, FAILURE, RIGHT, FAILURE, RIGHT]
    assert [verifier.judge([("3", act)])[0] for act in acts] == expected
    assert verifier.judge([("5", "5")]) == [RIGHT]
    assert len(stub.processes()) == 2  # the clean one and the fork that has just judged
    assert verifier.judge([("3", "unreadable"), ("unreadable", "3")]) == [WRONG, WRONG]
    assert verifier.judge([("3", "raises while read"), ("3", "3")]) == [FAILURE, RIGHT]


@pytest.mark.slow
def test_memory_is_limited_even_where_the_library_hides_it(stub):
    verifier = stub(memory_gb=0.5)
    assert verifier.judge([("3", "eat"), ("3", "3")]) == [FAILURE, RIGHT]


@pytest.mark.slow
def test_a_judge_opens_no_file_no_network_and_no_process(stub, tmp_path):
    (tmp_path / "kept").write_text("a key")
    acts = [
        f"read {tmp_path}/kept", f"write {tmp_path}/new", f"write {tmp_path}/new.py",
        f"remove {tmp_path}/kept", "read /etc/passwd", "connect", "start true", "fork",
    ]  # fmt: skip
    assert stub().judge([("7", act) for act in acts]) == [FAILURE] * len(acts)
    assert [path.name for path in tmp_path.iterdir() if path.name != "calls"] == ["kept"]
    allowed = ["import fractions", "import xml.dom.minidom", f"read {os.__file__}"]
    assert stub().judge([("7", act) for act in allowed]) == [RIGHT] * len(allowed)


@pytest.mark.slow
@pytest.mark.parametrize("number, canaries, verdict", [
    (signal.SIGSTOP, {}, TIMEOUT), (signal.SIGKILL, {("7", "7"): RIGHT}, WRONG),
])  # fmt: skip
def test_a_worker_that_was_stopped_or_killed_is_replaced(number, canaries, verdict, stub):
    verifier = stub(deadline=0.3, canaries=canaries)
    assert verifier.judge([("3", "3")]) == [RIGHT]
    before = stub.processes()
    for process in before:
        process.send_signal(number)
    assert verifier.judge([("4", "5")]) == [verdict]
    assert verifier.judge([("4", "4")]) == [RIGHT]
    assert gone(before)


@pytest.mark.slow
def test_equal_pairs_are_judged_once_and_remembered(stub, calls):
    verifier = stub(deadline=0.3)
    verdicts = [RIGHT, WRONG, RIGHT, TIMEOUT]
    pairs = [("3", "3"), ("3", "4"), ("3", "3"), ("3", "sleep 60")]
    assert verifier.judge(pairs) == verdicts == verifier.judge(pairs)
    assert [answer for _, answer in calls()] == ["3", "4", "sleep 60", "sleep 60"]


@pytest.mark.slow
def test_canaries_are_judged_in_every_batch_by_every_worker(stub, calls):
    verifier = stub(workers=2, canaries={("7", "7"): RIGHT, ("7", "8"): WRONG})
    for batch in range(3):
        verifier.judge([("3", f"sleep 0.{batch}{i}") for i in range(1, 4)])
    of_fork = defaultdict(str)  # 7 and 8 as such, another answer by the number of its batch
    for pid, answer in calls():
        if answer in ("7", "8") or answer.startswith("sleep"):
            of_fork[pid] += answer.removeprefix("sleep 0.")[0]
    assert all(re.fullmatch("(78(0*|1*|2*))+", judged) for judged in of_fork.values()), of_fork
    assert sorted(re.sub("[78]", "", "".join(of_fork.values()))) == list("000111222")


@pytest.mark.parametrize(
    "answer, expected, message",
    [("never", RIGHT, "never is right, .* was wrong: install"),
     ("always", WRONG, "always is wrong, .* was right: install"),
     ("raise", WRONG, "raise is wrong, .* was failure: install"),
     ("sleep 60", RIGHT, "too slow: .* sleep 60, .* deadline of 0.5 s: raise")],
)  # fmt: skip
@pytest.mark.slow
def test_a_broken_or_slow_judge_stops_the_run(answer, expected, message, stub, calls):
    verifier = stub(deadline=0.5, canaries={("7", "7"): RIGHT, ("7", answer): expected})
    with pytest.raises(JudgeError, match=message):
        verifier.judge([("3", "3")])
    asked = {pair for pair in calls() if pair[1] in (answer, "3")}
    assert [found for _, found in asked] == [answer] * 2  # a fresh one takes a broken one's place


@pytest.mark.slow
@pytest.mark.parametrize("fault, told", [
    ("ImportError('no module sympy')", "does not start: ImportError: no module sympy$"),
    ("MemoryError('no\\nmore')", "does not start: MemoryError: no more$"),
    ("SystemExit(3)", "ended with exit code 3"),
])  # fmt: skip
def test_a_judge_that_does_not_start(fault, told, tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text(f"raise {fault}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(JudgeError, match=told):
        Verifier(2, 1.0, 1.0).judge([("3", "3")])


@pytest.mark.slow
def test_ctrl_c_ends_a_batch_and_leaves_no_verdict_behind(stub):
    verifier = stub(deadline=60.0)
    verifier.judge([("3", "3")])
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        verifier.judge([("3", "sleep 30"), ("3", "sleep 31")])
    assert verifier.judge([("3", "4"), ("4", "4")]) == [WRONG, RIGHT]


def start(how):
    return subprocess.Popen(
        [sys.executable, str(HERE / "judging.py"), how],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def arguments(process):
    """Of a worker, the process that started it among them."""
    with suppress(psutil.Error):
        command = process.cmdline()
        return command if "verify_worker.py" in " ".join(command) else []
    return []


def workers_of(process):
    found = psutil.Process(process.pid).children(recursive=True)
    return [p for p in found if arguments(p)]


@pytest.mark.slow
def test_nothing_outlives_the_run(calls):
    """Killed, terminated, interrupted or its daemon ended, each with a worker busy in C."""
    runs = [(start("hang"), number) for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)]
    runs.append((start("in_daemon"), signal.SIGKILL))
    for process, _ in runs:
        assert process.stdout.readline() == "busy\n", process.stderr.read()
    workers = [workers_of(process) for process, _ in runs]
    assert [len(found) for found in workers] == [2] * 4
    for process, number in runs:
        os.killpg(process.pid, number)  # a terminal and some schedulers signal the whole group
    for (process, _), found in zip(runs, workers, strict=True):
        _, err = process.communicate(timeout=30)
        assert err.count("Traceback") <= 1, err  # the run's own, for Ctrl-C
        assert gone(found)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["end", "fork", "limited"])
def test_a_run_that_ends_one_that_forks_and_one_with_a_low_limit_of_memory(how, calls):
    process = start(how)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "", "")
    assert gone([p for p in psutil.process_iter() if str(process.pid) in arguments(p)])


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_no_hostile_text_is_accepted(name, limited):
    """Neither by the judge, whatever the gold, nor past its limits; the next one is judged."""
    text, judge = HOSTILE[name], MathJudge(limited)
    asked = [("", gold, text) for gold in ("42", r"\sqrt{2}")]
    assert RIGHT not in judge.verdicts(asked) + limited.judge([(BOX % "42", text)])
    assert judge.verdicts([("", "x+42", r"\boxed{42+x}")]) == [RIGHT]


@pytest.mark.slow
def test_leniency_is_not_ours():
    math_verify = Verifier(2, 20.0, 2.0)
    judged = MathJudge(math_verify).verdicts(LENIENT)
    alone = math_verify.judge([(BOX % gold, text) for _, gold, text in LENIENT])
    assert set(judged) == {WRONG} and alone.count(RIGHT) >= 8
    assert not any(final_number(text) == 3 for *_, text in LENIENT)
