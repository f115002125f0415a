"""Sharing work out: by weight, among local workers, among ranks; and how it ends when it fails."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import errands
import psutil
import pytest
import torch

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.distributed.ranks import WORKER_VARIABLE, one_on_each_gpu, own_device
from grpo_ustat.distributed.workers import WorkCost, share, shares_of
from grpo_ustat.terminal.progress import Meter, Notice

SCRIPT = str(Path(errands.__file__))
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
ACCELERATE = [
    "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1",
    "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0",
]  # fmt: skip


def start(work, folder, launcher=(), workers=2):
    (folder / "pids").mkdir(parents=True)
    environment = os.environ | {"WORK": work, "PIDS": str(folder / "pids")}
    return subprocess.Popen(
        [sys.executable, *launcher, SCRIPT, f"launch.workers={workers}",
         f"hydra.run.dir={folder / 'run'}"],
        cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


def finish(process):
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def asleep(folder, count):
    """Process ids of the workers, once they work."""
    for _ in range(600):
        found = [int(path.name) for path in (folder / "pids").iterdir()]
        if len(found) >= count:
            return found
        time.sleep(0.1)
    raise AssertionError("the workers never began")


def gone(pids):
    _, alive = psutil.wait_procs([psutil.Process(p) for p in pids if psutil.pid_exists(p)], 60)
    return not alive


def test_shares_are_balanced_by_weight():
    assert shares_of([0, 1, 2, 3], [1, 2, 5, 1], 2) == [[2], [0, 1, 3]]
    assert shares_of(errands.ITEMS, errands.WEIGHTS, 2) == [[2, 3], [0, 1, 4, 5, 6]]
    for workers in (1, 2, 3, 7):
        shares = shares_of(errands.ITEMS, errands.WEIGHTS, workers)
        assert sorted(sum(shares, [])) == errands.ITEMS
        assert all(share == sorted(share) and share for share in shares)
        loads = [sum(errands.WEIGHTS[i] for i in share) for share in shares]
        assert max(loads) <= max(max(errands.WEIGHTS), 4 / 3 * sum(errands.WEIGHTS) / workers)


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_equal_weights_deal_items_out_in_turn(weight):
    assert shares_of(list("abcde"), [weight] * 5, 2) == [["a", "c", "e"], ["b", "d"]]
    assert shares_of(["a"], [weight], 2) == [["a"], []]


def test_a_weight_is_missing():
    with pytest.raises(ValueError, match="argument 2 is"):
        shares_of([1, 2], [1.0], 2)


@pytest.mark.slow
def test_results_come_by_worker_and_progress_is_summed():
    one, spent = share(errands.square, errands.ITEMS, 1, "errand", 7, weights=errands.WEIGHTS)
    two, again = share(errands.square, errands.ITEMS, 2, "errand", 7, weights=errands.WEIGHTS)
    assert [item for item, _ in one] == errands.ITEMS
    assert [item for item, _ in two] == [2, 3, 0, 1, 4, 5, 6]
    assert sorted(two) == one and spent == again == WorkCost(rollouts=7, tokens=21)
    assert share(errands.square, [], 2, "errand", 0) == ([], WorkCost())


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_what_workers_tell_of_their_pace_is_heard(workers, monkeypatch):
    heard = {}
    monkeypatch.setattr(Meter, "hear", lambda _, state, source=0: heard.update({source: state}))
    share(errands.square, errands.ITEMS, workers, "errand", 7, weights=errands.WEIGHTS)
    counts = {source: (s.name, s.completed, s.total, s.tokens) for source, s in heard.items()}
    whole, halves = {0: ("squaring", 7, 7, 21)}, {0: (2, 2, 5), 1: (5, 5, 16)}
    assert counts == whole if workers == 1 else {s: c[1:] for s, c in counts.items()} == halves


@pytest.mark.parametrize(
    "work, kind, match",
    [
        (errands.refuse, ConfigError, "^item=2 is above 1: use item=1$"),
        pytest.param(
            errands.fail,
            ZeroDivisionError,
            "item 2",
            marks=pytest.mark.slow,
        ),
        pytest.param(errands.die, RuntimeError, "a worker was killed", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_one_failing_worker_ends_the_others_at_once(work, kind, match, tmp_path, monkeypatch):
    monkeypatch.setenv("PIDS", str(tmp_path))
    began = time.monotonic()
    with pytest.raises(kind, match=match):
        share(work, errands.ITEMS, 2, "errand", 7, weights=errands.WEIGHTS)
    assert time.monotonic() - began < 20
    assert gone(int(path.name) for path in tmp_path.iterdir())


@pytest.mark.slow
def test_one_server_forks_the_workers_of_all_calls():
    """They have the parent's environment of now, and ignore what a scheduler sends to all."""
    code = """
import os, signal
import psutil
from errands import origin
from grpo_ustat.distributed.workers import preload, share

preload(["grpo_ustat.records"], "cpu")
parents = set()
for text in ("first", "second"):
    os.environ["OF_PARENT"] = text
    results, _ = share(origin, [0, 1], 2, "origin", 2)
    parents |= {parent for _, parent, *_ in results}
    assert [rest for _, _, *rest in results] == 2 * [[text, signal.SIG_IGN]]
(server,) = parents
assert psutil.Process(server).ppid() == os.getpid()
os.kill(server, signal.SIGTERM)  # which it does not see
assert psutil.Process(server).is_running()
"""
    run_code(code)


def run_code(code, *arguments, **environment):
    """In a process of its own, since a server of workers stays with a process."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(Path(errands.__file__).parent), **environment},
    )  # fmt: skip
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr


@pytest.mark.slow
def test_workers_start_where_the_servers_socket_cannot_be(tmp_path):
    """In a temporary folder with a path of 108 bytes."""
    long = tmp_path / (108 * "x")
    long.mkdir()
    code = "from errands import square\nfrom grpo_ustat.distributed.workers import preload, share\n"
    code += "if __name__ == '__main__':\n    preload(['grpo_ustat.records'], 'cpu')\n"
    code += "    assert len(share(square, [1, 2], 2, 'errand', 2)[0]) == 2"
    run_code(code, TMPDIR=str(long))


@pytest.mark.slow
def test_a_killed_parent_leaves_no_worker(tmp_path):
    process = start("sleep", tmp_path)
    workers = asleep(tmp_path, 2)
    children = psutil.Process(process.pid).children(recursive=True)
    assert set(workers) <= {child.pid for child in children}
    process.kill()
    finish(process)
    assert gone(child.pid for child in children)


@pytest.mark.slow
def test_an_interrupt_ends_everything_in_one_line(tmp_path):
    process = start("sleep", tmp_path)
    workers = asleep(tmp_path, 2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert_interrupted(*finish(process))
    assert gone(workers)


def assert_interrupted(code, out, err):
    assert (code, out) == (130, "")
    *plan, last = err.splitlines()  # a run begins with a line of what it does
    assert last.startswith("interrupted")
    assert not plan or (len(plan) == 1 and plan[0].startswith("mse: tiny_base on arithmetic: "))


@pytest.mark.slow
def test_an_interrupt_while_workers_start(tmp_path):
    process = start("sleep", tmp_path)
    while len(psutil.Process(process.pid).children()) < 2:
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGINT)
    assert_interrupted(*finish(process))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE])
def test_ranks_do_what_local_workers_do(launcher, tmp_path):
    """Both ranks hold the same results (the script checks), one prints and writes them."""
    code, out, err = finish(start("square", tmp_path, launcher, workers=5))
    assert code == 0, err
    two, _ = share(errands.square, errands.ITEMS, 2, "errand", 7, weights=errands.WEIGHTS)
    assert [tuple(pair) for pair in json.loads(out)] == two
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["spent"]["rollouts"], result["spent"]["tokens"]) == (7, 21)
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left == {".hydra", "code.json", "launches.jsonl", "result.json"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher, work, lines",
    [
        (TORCHRUN, "refuse", ["error: item=2 is above 1: use item=1"]),
        (TORCHRUN, "fail", ["ZeroDivisionError: item 2"]),
        (TORCHRUN, "die", []),
        (ACCELERATE, "refuse", ["error: item=2 is above 1: use item=1"]),
    ],
)
def test_one_failing_rank_ends_the_others(launcher, work, lines, tmp_path):
    """Each way to fail under torchrun, which accelerate starts in its turn; one under that."""
    code, out, err = finish(start(work, tmp_path, launcher))
    assert code == 1 and out == ""  # the launcher's own code
    for line in lines:
        assert err.count(line) >= 1, err
    if work == "refuse":
        assert err.count("error: item") == 1 and "rank      : 0" in err
    assert gone(int(path.name) for path in (tmp_path / "pids").iterdir())
    assert not (tmp_path / "run/result.json").exists()


@pytest.mark.slow
def test_a_rank_that_loses_another_ends_without_a_launcher(tmp_path, monkeypatch):
    """Started one by one, as a cluster may: only the connection tells."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    ranks = []
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    for number in ("0", "1"):
        monkeypatch.setenv("RANK", number)
        ranks.append(start("die", tmp_path / number))
    (first, *_), (second, _, err) = map(finish, ranks)
    assert (first, second) == (-signal.SIGKILL, 1)
    assert (
        "error: rank 1 of 2 lost the connection to another rank" in err and "Traceback" not in err
    )


def test_cuda_is_the_ranks_own(monkeypatch):
    assert own_device("cuda") == "cuda"
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert [own_device(name) for name in ("cuda", "cuda:3", "cpu")] == ["cuda:1", "cuda:3", "cpu"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # a task of SLURM with its own GPU
    assert own_device("cuda") == "cuda:0"


def test_local_workers_have_a_gpu_each(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    counts = [one_on_each_gpu(8, device) for device in ("cuda", "cuda:3", "cpu")]
    assert counts == [4, 1, 8] and one_on_each_gpu(2, "cuda") == 2
    monkeypatch.setenv(WORKER_VARIABLE, "3")
    assert [own_device(name) for name in ("cuda", "cuda:1", "cpu")] == ["cuda:3", "cuda:1", "cpu"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)  # refused later, by name
    assert one_on_each_gpu(8, "cuda") == 1 and own_device("cuda") == "cuda:0"


def device_of_worker(items):
    yield from ((item, os.environ[WORKER_VARIABLE]) for item in items)


@pytest.mark.slow
def test_workers_know_their_number():
    found, _ = share(device_of_worker, [0, 1, 2, 3], 2, "numbers", 4)
    assert sorted(found) == [(0, "0"), (1, "1"), (2, "0"), (3, "1")]


def noticing(items):
    for item in items:
        yield Notice(f"item {item} is odd")
        yield WorkCost(rollouts=1)


def test_the_first_notice_alone_is_shown_and_none_is_a_result(capsys):
    results, cost = share(noticing, [1, 3, 5], 1, "count", 3)
    assert (results, cost.rollouts) == ([], 3)
    assert "item 1 is odd" in (err := capsys.readouterr().err) and "item 3" not in err
