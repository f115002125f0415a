"""SIGKILL at seeded moments: the same command goes on and ends as if nothing had happened.

Every run is a fork of this process, which has imported everything by a run of its own: more than
half of what a run that mostly saves costs otherwise. Half of the kills come
after a seeded time, half just before a seeded one of the calls that change the folder (each file
synced, renamed or removed), so saving and pruning get their share.

Ten kills at every push, 40 others every night; `KILLS=200 python -m pytest --nightly
tests/train/test_kill.py` kills that often instead of 40 times.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter

import numpy as np
import pytest
from kills import at_each_call, end_of, forked, kill_before_call
from resuming import config_of, differences

from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.train import trainer

MODEST = ("max_steps=3", "save_total_limit=1")
REASONING = ("model=tiny_base", "max_completion_length=60", "budget.rollouts=8")
KILLS = int(os.environ.get("KILLS", "40"))


def train(path, config, before=lambda: None):
    """Start training in a fork; returns its id."""

    def work():
        trainer.fit(config, RunFolder(path, config))

    return forked(work, path.with_name(f"{path.name}.log"), before)


class Reference:
    """A run that nobody stops, its time, and how many calls it makes."""

    def __init__(self, path, overrides):
        self.path, self.config = path / "through", config_of(*overrides)
        trainer.fit(self.config, RunFolder(path / "imports", self.config))
        start = time.perf_counter()
        assert end_of(train(self.path, self.config)) == 0
        self.seconds = time.perf_counter() - start
        counts = path / "calls"

        def count(n):
            counts.write_text(str(n + 1))

        assert end_of(train(path / "counted", self.config, lambda: at_each_call(count))) == 0
        assert differences(path / "counted", self.path) == []
        self.calls = int(counts.read_text())

    def kill(self, path, rng, by_time):
        """Run until a SIGKILL really hits; returns where it did."""
        if not by_time:
            number = int(rng.integers(self.calls))
            before = kill_before_call(number)
            assert end_of(train(path, self.config, before)) == -signal.SIGKILL
        while by_time:
            pid = train(path, self.config)
            time.sleep(rng.uniform(0, self.seconds))
            os.kill(pid, signal.SIGKILL)
            if end_of(pid) == -signal.SIGKILL:
                break
            self.clear(path)
        return where(path)

    def recover(self, path):
        """The same command again: it ends by itself, with the same files."""
        ended = end_of(train(path, self.config))
        assert ended == 0, path.with_name(f"{path.name}.log").read_text()[-3000:]
        assert differences(path, self.path) == []

    @staticmethod
    def clear(path):
        for file in sorted(path.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()


def where(path):
    """What the kill left: staged or half removed folders, and the newest checkpoint's step."""
    staged = [p.name for p in path.glob(".checkpoint*")]
    steps = [int(p.name.rpartition("-")[2]) for p in path.glob("checkpoint-*")]
    newest = max(steps, default=0)
    if not staged:
        return f"between saves, after {newest}"
    removing = any(int(name.split("-")[1].split(".")[0]) < newest for name in staged)
    return "during a prune" if removing else "during a save"


def sweep(path, overrides, trials, enough, least):
    """Kills and recoveries with these seeds; ends after `enough` where `least` hit each place.

    Returns how many hit where.
    """
    reference, hit = Reference(path, overrides), Counter()
    for trial in trials:
        if hit["recoveries"] >= enough and hit >= least:
            break
        rng = np.random.default_rng([20261121, trial])
        run = path / f"trial-{trial}"
        hit[reference.kill(run, rng, by_time=trial % 2 == 0)] += 1
        reference.recover(run)
        hit["recoveries"] += 1
        reference.clear(run)
    return hit


BUSY = {  # what runs mostly do while they are killed, and the share of the kills
    "writing": ((*MODEST, *REASONING), 0.3),
    "saving": (MODEST, 0.7),
}


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "kills, first, busy",
    [
        pytest.param(10, 0, "saving", marks=pytest.mark.slow(minutes=0.3)),
        pytest.param(10, 0, "writing", marks=pytest.mark.nightly(minutes=0.3)),
        *(pytest.param(KILLS, 100, busy, marks=pytest.mark.nightly(minutes=KILLS / 40))
          for busy in BUSY),
    ],
)  # fmt: skip
def test_kills_and_recoveries(tmp_path, capsys, kills, first, busy):
    """Of those in runs that mostly save, as many as a fifth are to hit a save and a twentieth a
    prune, or more follow.
    """
    overrides, share = BUSY[busy]
    kills = round(kills * share)
    shares = {"during a save": kills / 5, "during a prune": kills / 20}
    least = Counter(shares if busy == "saving" else {})
    start = time.perf_counter()
    hit = sweep(tmp_path, overrides, range(first, first + 2 * kills), kills, least)
    with capsys.disabled():
        print(f"\n{busy}: {dict(hit)} in {time.perf_counter() - start:.0f} s")
    assert hit["recoveries"] >= kills and hit >= least
