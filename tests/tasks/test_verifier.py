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
from training_runs import fit

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.tasks.answers import final_number
from grpo_ustat.tasks.math_answers import MathJudge
from grpo_ustat.tasks.verifier import CANARIES, JudgeError, Verdict, Verifier

HERE = Path(__file__).parents[1] / "helpers"
RIGHT, WRONG, TIMEOUT, FAILURE = Verdict
BOX = r"\boxed{%s}"


@pytest.fixture(scope="module")
def math_verify():
    """The real one."""
    verifier = Verifier(2, 20.0, 2.0)
    yield verifier
    verifier.close()


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
def test_math_verify_judges(math_verify):
    pairs = [
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", RIGHT), ("x^2-1", "(x+1)(x-1)", RIGHT),
        ("(2,3)", "(2, 3)", RIGHT), ("1,2,3", r"\{3,1,2\}", RIGHT), ("x^2-1", "x^2+1", WRONG),
        (r"\frac{\pi}{2}", r"\frac{\pi}{3}", WRONG), ("(2,3)", "(3,2)", WRONG), ("x", "", WRONG),
        (r"\sqrt{2}", r"\frac{1}{0}", WRONG), (r"\sqrt{2}", "}{\ud800\x00", WRONG),
    ]  # fmt: skip
    asked = [(BOX % gold, BOX % answer) for gold, answer, _ in pairs]
    assert math_verify.judge(asked) == [verdict for *_, verdict in pairs]
    assert math_verify.judge([]) == []


@pytest.mark.slow
def test_several_threads_judge_at_once(math_verify):
    found = {}

    def ask(n):
        pairs = [(BOX % rf"{n}\pi", BOX % rf"\pi \cdot {m}") for m in range(4)]
        found[n] = math_verify.judge(pairs)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: [RIGHT if m == n else WRONG for m in range(4)] for n in range(4)}


@pytest.mark.slow
def test_workers_import_neither_torch_nor_this_package(math_verify):
    assert "torch" in sys.modules
    math_verify.judge([(BOX % "a", BOX % "b")])
    maps = []
    for process in descendants():
        # workers of earlier tests may be ending
        with suppress(FileNotFoundError, ProcessLookupError):
            maps.append(Path(f"/proc/{process.pid}/maps").read_text())
    assert any("python" in files for files in maps)
    assert not any("torch" in files or "numpy" in files for files in maps)


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
def test_a_stopped_worker_is_replaced(stub):
    verifier = stub(deadline=0.3)
    assert verifier.judge([("3", "3")]) == [RIGHT]
    before = stub.processes()
    for process in before:
        process.send_signal(signal.SIGSTOP)
    assert verifier.judge([("4", "4")]) == [TIMEOUT]
    assert verifier.judge([("4", "4")]) == [RIGHT]
    assert gone(before)


@pytest.mark.slow
def test_a_worker_killed_between_batches_is_replaced(stub):
    verifier = stub(canaries={("7", "7"): RIGHT})
    assert verifier.judge([("3", "3")]) == [RIGHT]
    for process in stub.processes():
        process.kill()
    assert verifier.judge([("4", "4"), ("4", "5")]) == [RIGHT, WRONG]


@pytest.mark.slow
def test_equal_pairs_are_judged_once_and_remembered(stub, calls):
    verifier = stub(deadline=0.3)
    verdicts = [RIGHT, WRONG, RIGHT, TIMEOUT]
    pairs = [("3", "3"), ("3", "4"), ("3", "3"), ("3", "sleep 60")]
    assert verifier.judge(pairs) == verdicts == verifier.judge(pairs)
    assert [answer for _, answer in calls()] == ["3", "4", "sleep 60", "sleep 60"]


@pytest.mark.slow(minutes=0.02)
def test_only_so_many_verdicts_are_remembered(stub, calls, monkeypatch):
    monkeypatch.setattr("grpo_ustat.tasks.verifier.MAX_REMEMBERED_PAIRS", 2)
    verifier = stub()
    for answer in ("1", "2", "1", "3", "1", "2"):  # 2 is the oldest when 3 comes
        verifier.judge([("3", answer)])
    assert [answer for _, answer in calls()] == ["1", "2", "3", "2"]


@pytest.mark.slow
def test_workers_share_a_batch_and_begin_afresh(stub, calls):
    verifier = stub(workers=2, max_tasks=2)
    assert verifier.judge([("3", f"sleep 0.1{i}") for i in range(8)]) == [RIGHT] * 8
    by_process = [pid for pid, answer in calls() if answer.startswith("sleep")]
    assert len(by_process) == 8 and len(set(by_process)) >= 4
    assert max(map(by_process.count, by_process)) == 2


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
    "pair, expected, judged",
    [(("3", "never"), RIGHT, "wrong"), (("3", "always"), WRONG, "right"),
     (("3", "raise"), WRONG, "failure")],
)  # fmt: skip
@pytest.mark.slow
def test_a_broken_judge_stops_the_run(pair, expected, judged, stub, calls):
    verifier = stub(deadline=0.5, canaries={("7", "7"): RIGHT, pair: expected})
    with pytest.raises(JudgeError, match=f"{pair[1]} is {expected.value}, .* was {judged}"):
        verifier.judge([("3", "3")])
    assert asked_of(calls, pair[1]) == 2 and asked_of(calls, "3") == 0


def asked_of(calls, answer):
    """How many workers were asked about an answer; a fresh one takes a broken one's place."""
    return len({pid for pid, found in calls() if found == answer})


@pytest.mark.slow
def test_a_judge_that_is_only_slow_is_told_apart(stub, calls):
    verifier = stub(deadline=0.5, canaries={("7", "sleep 60"): RIGHT})
    with pytest.raises(JudgeError, match=r"answer sleep 60, .* deadline of 0.5 s: raise") as told:
        verifier.judge([("3", "3")])
    assert "versions" not in str(told.value) and "\n" not in str(told.value)
    assert asked_of(calls, "sleep 60") == 2 and asked_of(calls, "3") == 0


def test_one_broken_place_stops_the_others_at_once(stub, calls, monkeypatch):
    proved = Verifier._proved

    def broken_at_1(self, place, waiting):
        if place == 1:
            raise JudgeError("broken")
        return proved(self, place, waiting)

    monkeypatch.setattr(Verifier, "_proved", broken_at_1)
    verifier = stub(workers=2)
    verifier.judge([])
    with pytest.raises(JudgeError, match="^broken$"):
        verifier.judge([("3", f"sleep 0.5{i}") for i in range(20)])
    assert len(calls_so_far(calls)) <= 2  # of 20


def calls_so_far(calls):
    """None where no worker had begun to judge."""
    try:
        return [answer for _, answer in calls() if answer.startswith("sleep")]
    except FileNotFoundError:
        return []


LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_AS, ({0}, {0}))
from grpo_ustat.tasks.verifier import Verifier
try:
    print(Verifier(1, 20.0, 2.0, {{}}).judge([("3", "eat"), ("3", "3")]))
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_a_lower_limit_of_the_machine_holds(calls):
    """With 2 GiB asked for, as a shell's `ulimit -v` or a scheduler may set it."""

    def told(limit):
        command = [sys.executable, "-c", LIMITED.format(limit)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout

    assert "FAILURE" in told(2**30) and "RIGHT" in told(2**30)


def test_the_canaries_catch_a_judge_of_one_opinion():
    assert {RIGHT, WRONG} == set(CANARIES.values())


@pytest.mark.slow
def test_a_judge_that_does_not_start(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("raise ImportError('no module sympy')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(JudgeError, match="does not start: ImportError: no module sympy$"):
        Verifier(1, 1.0, 1.0).judge([("3", "3")])
    (tmp_path / "math_verify.py").write_text("raise MemoryError('no\\nmore')")
    with pytest.raises(JudgeError, match="does not start: MemoryError: no more$"):
        Verifier(1, 1.0, 1.0).judge([("3", "3")])
    (tmp_path / "math_verify.py").write_text("raise SystemExit(3)")
    with pytest.raises(JudgeError, match="ended with exit code 3"):
        Verifier(2, 1.0, 1.0).judge([("3", "3")])


@pytest.mark.slow
def test_training_ends_in_one_line_where_the_judge_does_not_start(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("raise ImportError('no module sympy')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    judge = MathJudge.verdicts
    undecided = lambda self, asked: judge(self, [("", "x+1", BOX % "1+x")] * len(asked))  # noqa: E731
    monkeypatch.setattr(MathJudge, "verdicts", undecided)
    data = ("dataset=math", f"dataset.path={HERE.parent / 'data/math'}", "dataset.study_size=1",
            "dataset.test_path=null", "dataset.levels=null",
            r"prompt.template='{question}=\boxed'")  # fmt: skip
    with pytest.raises(ConfigError) as told:  # which the command line answers with exit code 2
        fit(tmp_path / "run", *data, "prompt=bare", "dataset.train_size=4", "dataset.test_size=2")
    assert "does not start: ImportError: no module sympy" in str(told.value)
    assert len(str(told.value).splitlines()) == 1


@pytest.mark.slow
def test_ctrl_c_ends_a_batch_and_leaves_no_verdict_behind(stub):
    verifier = stub(deadline=60.0)
    verifier.judge([("3", "3")])
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        verifier.judge([("3", "sleep 30"), ("3", "sleep 31")])
    assert verifier.judge([("3", "4"), ("4", "4")]) == [WRONG, RIGHT]


@pytest.mark.slow
def test_close_and_begin_again(stub):
    verifier = stub()
    verifier.judge([("3", "3")])
    before = stub.processes()
    verifier.close()
    assert before and gone(before)
    assert verifier.judge([("4", "4")]) == [RIGHT]


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


def test_workers_ignore_the_signals_of_a_run(stub):
    verifier = stub()
    verifier.judge([("3", "3")])
    before = {process.pid for process in stub.processes()}
    for pid in before:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(pid, number)
    assert verifier.judge([("3", "4")]) == [WRONG]
    assert {process.pid for process in stub.processes()} == before


@pytest.mark.slow
@pytest.mark.parametrize("how", ["end", "fork"])
def test_a_run_that_ends_and_one_that_forks(how, calls):
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
def test_leniency_is_not_ours(math_verify):
    judged = MathJudge(math_verify).verdicts(LENIENT)
    alone = math_verify.judge([(BOX % gold, text) for _, gold, text in LENIENT])
    assert set(judged) == {WRONG} and alone.count(RIGHT) >= 8
    assert not any(final_number(text) == 3 for *_, text in LENIENT)
