"""Two network namespaces as two hosts: one torchrun job over both does what one process does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forks import FSDP2
from resuming import SHORT, rows, weights

pytestmark = pytest.mark.nightly(minutes=0.7)
ROOT = Path(__file__).parents[2]
IN_DOUBLE = str(ROOT / "tests/helpers/precision.py")
PATIENCE = 300  # seconds, on a busy machine
ADDRESSES = ("10.213.0.1", "10.213.0.2")
TRAIN = ("grpo_ustat.train", *SHORT, "model.dtype=float64", "optimizer=sgd")
STUDY = ("grpo_ustat.mse", "debug=mse", "model=tiny_direct", "study.questions=6")


def ip(*words):
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def hosts():
    """Names of two namespaces that one cable joins."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("unshare")):
        pytest.skip("two hosts are network namespaces: needs root, iproute2 and util-linux")
    names = [f"grpo-ustat-{os.getpid()}-{which}" for which in "ab"]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            end = ("type", "veth", "peer", "name", "eth0", "netns", names[1])
            ip("-n", names[0], "link", "add", "eth0", *end)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine gives root no network namespaces: {error.stderr.strip()}")
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def crossed(hosts):
    """Bytes that the second host has received over the cable."""
    told = ip("-n", hosts[1], "-json", "-statistics", "link", "show", "eth0").stdout
    return json.loads(told)[0]["stats64"]["rx"]["bytes"]


def environment(launch=()):
    """Gloo finds its interface by the host's name, which nothing here resolves: it is told."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests/helpers")])
    given = {"PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    return os.environ | given | dict(launch)


def start(hosts, number, folder, words, launch=()):
    """The part of a torchrun job on one host, with a host name of its own, one process."""
    named = 'hostname "$0"; exec "$@"'
    command = [
        "ip", "netns", "exec", hosts[number], "unshare", "--uts", "sh", "-c", named,
        f"host-{number}", sys.executable, "-m", "torch.distributed.run", "--nnodes=2",
        f"--node_rank={number}", "--nproc_per_node=1", f"--master_addr={ADDRESSES[0]}",
        "--master_port=29511", IN_DOUBLE, *words,
    ]  # fmt: skip
    return subprocess.Popen(
        command, cwd=folder, env=environment(launch), text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def on_both(hosts, folder, words, launch=()):
    """Run the job to its end; what each host printed."""
    folder.mkdir()
    parts = [start(hosts, number, folder, words, launch) for number in (0, 1)]
    try:
        said = [part.communicate(timeout=PATIENCE) for part in parts]
    finally:
        for part in parts:
            part.kill()
    for part, (_, errors) in zip(parts, said, strict=True):
        assert part.returncode == 0, errors
    return [output for output, _ in said]


def alone(folder, words):
    folder.mkdir()
    command = [sys.executable, IN_DOUBLE, *words]
    subprocess.run(command, cwd=folder, env=environment(), check=True, timeout=PATIENCE)
    return only_run(folder)


def only_run(folder):
    """The one run folder below, beside which nothing was written."""
    (found,) = folder.glob("outputs/*/*/seed-0")
    beside = [path for path in folder.rglob("*") if path.is_file() and found not in path.parents]
    assert not beside
    return found


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """What one process on one host leaves behind."""
    return alone(tmp_path_factory.mktemp("alone") / "one", TRAIN)


@pytest.mark.parametrize("launch", [{}, FSDP2], ids=["replicas", "shards"])
def test_training_over_two_hosts_is_that_of_one_process(hosts, one, tmp_path, launch):
    before = crossed(hosts)
    printed = on_both(hosts, tmp_path / "two", TRAIN, launch)
    two = only_run(tmp_path / "two")
    assert two.parts[-4:] == one.parts[-4:]  # outputs/train/NAME/seed-0
    assert [text.count("page: ") for text in printed] == [1, 0]
    for row, other in zip(rows(one), rows(two), strict=True):
        assert other == pytest.approx(row, rel=1e-9, abs=1e-12)
    assert (one / "eval.csv").read_text() == (two / "eval.csv").read_text()
    assert crossed(hosts) - before > 4 * sum(x.nbytes for x in weights(one, 4).values())
    for name, value in weights(one, 4).items():
        torch.testing.assert_close(weights(two, 4)[name], value, rtol=0, atol=1e-9)
    assert json.loads((two / "result.json").read_text())["steps"] == 4


def test_a_study_over_two_hosts_ends_with_the_same_table(hosts, tmp_path):
    one = alone(tmp_path / "one", STUDY)
    on_both(hosts, tmp_path / "two", STUDY)
    two = only_run(tmp_path / "two")
    assert (two / "curves.csv").read_bytes() == (one / "curves.csv").read_bytes()
    assert len(list((two / "pool").glob("*.safetensors"))) == 6
