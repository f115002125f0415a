"""Kills, damage, growing pools and changed methods in seeded sequences: a study ends as if alone.

A sequence works on one pool that several studies share. At every step a study of it is chosen,
killed (after a seeded time, or before a seeded one of the calls that change a folder), suspended
for a moment or left to end, a third of them with a clock that is months early or late; between two
steps a file may be damaged. In the end every study
that was begun is typed again. Each must have the files of one that nobody disturbed, byte by byte,
or have refused in one line that says what to do, which is then done.

`FAULTS=300 pytest --nightly tests/mse/test_fault_sequences.py` draws that many sequences for 60.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from commands import compose
from kills import end_of, forked, kill_before_call
from launching import without_figures
from resuming import timeless
from safetensors import SafetensorError, safe_open

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.mse import study as study_run
from grpo_ustat.mse.pool_parts import Part
from grpo_ustat.mse.pool_store import PoolStore
from grpo_ustat.records import Prompt
from grpo_ustat.runs.folder import RunFolder

SEQUENCES = int(os.environ.get("FAULTS", "60"))
PARTS = 5  # of the sequences, each a test, so that workers share them
SMALL = (
    "debug=mse", "model=tiny_direct", "study.questions=4", "group_sizes=[2,4]",
    "max_completion_length=6", "launch.workers=1", "budget.feature_sketch=256",
    "budget.gradient_sketch=256",
)  # fmt: skip
STUDIES = {  # by name: what differs; the pool of the first is the beginning of the others'
    "four": ("budget.pool_completions=4",),
    "eight": ("budget.pool_completions=8",),
    "groups": ("budget.pool_completions=8", "baselines=[leave_one_out,group_std]"),
    "baselines": ("budget.pool_completions=8", "baselines=[none,oracle,constant]"),
    "processes": ("budget.pool_completions=8", "launch.workers=2"),
}
REFUSED = 3  # exit code of a study that refused in one line


def run_study(config, folder):
    """The study without its figures and page, which take longer than all the rest."""
    without_figures(study_run)
    study_run.leave_page = lambda *_: None
    study_run.run(config, RunFolder(folder, config))


def studied(config, folder, before=lambda: None):
    """Start a study in a fork; returns its id."""

    def work():
        try:
            run_study(config, folder)
        except ConfigError as error:
            os.write(2, f"error: {error}\n".encode())
            return REFUSED

    return forked(work, Path(f"{folder}.log"), before)


def jump_clock(seconds):
    real = time.time
    time.time = lambda: real() + seconds


def truncated(file, rng):
    file.write_bytes(file.read_bytes()[: int(rng.integers(file.stat().st_size))])


def removed(file, rng):
    file.unlink()


DAMAGES = (truncated, removed)


class Sequence:
    """Studies that share a pool in one folder, and what was done to them."""

    def __init__(self, place: Path, seed: int, seconds: float):
        self.place, self.seconds = place, seconds
        self.rng = np.random.default_rng([20261123, seed])
        self.begun: list[str] = []
        self.did: Counter[str] = Counter()
        self.story: list[str] = []

    def config(self, name):
        return compose("mse", *SMALL, *STUDIES[name], f"pool={self.place / 'pool'}")

    def choose(self):
        """The name of a study; of several processes rarely, for they import everything anew."""
        names = [name for name in STUDIES if name != "processes" or self.rng.random() < 0.02]
        return str(self.rng.choice(names))

    def disturb(self):
        """One study, of which something may become nothing, and perhaps a damaged file."""
        name, kind = self.choose(), self.rng.choice(["call", "time", "suspend", "end"])
        if name not in self.begun:
            self.begun.append(name)
        config, folder = self.config(name), self.place / name
        killed = kill_before_call(int(self.rng.integers(24))) if kind == "call" else lambda: None
        jump = float(self.rng.choice([-1e7, 0, 0, 0, 0, 1e7]))
        self.did["clocks"] += jump != 0
        pid = studied(config, folder, lambda: (jump_clock(jump), killed()))
        if kind in ("time", "suspend"):
            time.sleep(self.rng.uniform(0, self.seconds))
            os.kill(pid, signal.SIGKILL if kind == "time" else signal.SIGSTOP)
            time.sleep(0.05 if kind == "suspend" else 0)
            os.kill(pid, signal.SIGCONT)
        code = end_of(pid)
        self.note(f"{name}: {kind}, code {code}")
        self.did["killed" if code == -signal.SIGKILL else str(kind)] += 1
        if code == REFUSED:
            self.do_as_told(folder)
        else:
            assert code in (0, -signal.SIGKILL), self.text(folder)
        if self.rng.random() < 0.5:
            self.damage()

    def damage(self):
        files = sorted(x for x in self.place.rglob("*") if x.is_file() and x.suffix != ".log")
        if not files:
            return
        file, act = self.rng.choice(files), self.rng.choice(DAMAGES)
        if act is removed or file.stat().st_size:
            act(file, self.rng)
            self.note(f"{file.relative_to(self.place)} {act.__name__}")
            self.did[act.__name__] += 1

    def finish(self, name):
        """Type the study until it ends; at most one file a time is refused."""
        config, folder = self.config(name), self.place / name
        for _ in range(40):
            if name not in self.begun:
                return
            code = end_of(studied(config, folder))
            if code == 0:
                return
            assert code == REFUSED, self.text(folder)
            self.do_as_told(folder)
        raise AssertionError(self.text(folder))

    def do_as_told(self, folder):
        """What the one line of a refusal says."""
        (line,) = [
            x for x in Path(f"{folder}.log").read_text().splitlines() if x.startswith("error: ")
        ]
        self.note(line)
        self.did["refused"] += 1
        deletable = r"(\S+?)(?: is [^:]*damaged[^:]*)?: delete (?:it|this file)"
        if found := re.search(deletable, line):
            Path(found[1]).unlink()
        elif "on_existing=overwrite" in line or "files of another program" in line:
            shutil.rmtree(folder)
        elif "use 8 or another pool" in line:  # a study of 4 comes after one of 8: it is done
            self.begun.remove(folder.name)
        elif "use another pool=DIR" in line and not [*(self.place / "pool").glob("*.safetensors")]:
            shutil.rmtree(self.place / "pool")  # as good as another: it holds nothing yet
        else:
            raise AssertionError(self.text(folder))

    def note(self, text):
        self.story.append(text)

    def text(self, folder):
        """What was done, and what the last study said."""
        return "\n".join([*self.story, Path(f"{folder}.log").read_text()[-3000:]])


def left_by(folder):
    """What a study leaves and promises: its result without clocks, its curves."""
    result = timeless(json.loads((folder / "result.json").read_text()))
    table = folder / "curves.csv"  # which may be removed from a finished study
    return result | ({"curves.csv": table.read_text(errors="replace")} if table.is_file() else {})


def draws_in(pool):
    """Rewards and lengths of every question's completions, joined over its parts; what was damaged
    after the last study had read it is left out.
    """
    joined = {}
    for file in pool.glob("*.safetensors"):
        stem, first, _ = file.stem.split("-")
        try:
            with safe_open(file, framework="numpy") as part:
                arrays = {name: part.get_tensor(name) for name in part.keys()}  # noqa: SIM118
        except SafetensorError:
            continue
        for name in ("rewards_N", "lengths_N"):
            rows = joined.setdefault((stem, name), {})
            rows.update(enumerate(arrays[name].tolist(), int(first)))
    return joined


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """(result by study, by whether its pool grew; the pool of 8; seconds of a study)."""
    place, results = tmp_path_factory.mktemp("undisturbed"), {}
    for order in (["four", "eight", "groups", "baselines"], ["eight", "groups", "baselines"]):
        alone = Sequence(place / order[0], 0, 0.0)
        alone.begun = order
        for name in order:
            start = time.perf_counter()
            alone.finish(name)
            seconds = time.perf_counter() - start
            results[name, order[0] == "four"] = left_by(alone.place / name)
    results["four", False] = results["four", True]
    for grown in (True, False):  # their number changes no figure
        results["processes", grown] = results["eight", grown]
    return results, draws_in(place / "eight/pool"), seconds


@pytest.mark.nightly(minutes=2)
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_sequence_ends_as_if_nothing_had_happened(tmp_path, undisturbed, capsys, part):
    results, draws, seconds = undisturbed
    did, exact = Counter(), 0
    for seed in range(part, SEQUENCES, PARTS):
        sequence = Sequence(tmp_path / str(seed), seed, seconds)
        for _ in range(sequence.rng.integers(1, 4)):
            sequence.disturb()
        sequence.begun += ["eight"] if "eight" not in sequence.begun else []  # it reads every part
        for name in list(sequence.begun):
            sequence.finish(name)
        did += sequence.did
        pool = sequence.place / "pool"
        for key, rows in draws_in(pool).items():
            assert rows == {i: draws[key][i] for i in rows}, (seed, sequence.story)
        for name in sequence.begun:
            ours = left_by(sequence.place / name)
            same = [ours == of(results[name, grown], ours) for grown in (True, False)]
            exact += any(same)
            assert any(same) or mixed(pool), (seed, name, sequence.story)
        did["studies"] += len(sequence.begun)
        shutil.rmtree(sequence.place)
    with capsys.disabled():
        print(f"\n{dict(did)}, {exact} of {did['studies']} studies byte by byte")
    assert did["killed"] > SEQUENCES / PARTS / 4 and exact > 0.7 * did["studies"]
    assert all(did[act.__name__] for act in DAMAGES)


def of(result, like):
    """The parts of a result that another one has."""
    return {key: result.get(key) for key in like}


def mixed(pool):
    """Whether some questions' completions were scored in two parts and others' in one, which moves
    products between parts by the error of the sketch: where a part was lost after the pool grew.
    """
    stems = [file.stem.split("-")[0] for file in pool.glob("*.safetensors")]
    return len(set(Counter(stems).values())) > 1


def part_of(rng):
    """Two completions."""
    return Part(
        rewards_N=np.array([0.0, 1.0]), lengths_N=np.array([3, 2]),
        ended_N=np.array([True, True]), tokens_NT=np.ones((2, 3), np.int32),
        gram_NN=rng.normal(size=(2, 2)), features_NR=rng.normal(size=(2, 4)),
        centred_sum_R=rng.normal(size=4), score_sum_R=rng.normal(size=4), cost=np.zeros(7),
    )  # fmt: skip


def test_parts_without_their_pool_json_are_of_the_settings_they_were_made_with(tmp_path):
    prompt, own = Prompt("id", "1+1=", "1+1", "2", "sum"), {"temperature": 1.0}
    PoolStore(tmp_path, own).open()
    PoolStore(tmp_path, own).write(prompt, 0, part_of(np.random.default_rng(0)))
    (tmp_path / "pool.json").unlink()
    other = PoolStore(tmp_path, {"temperature": 0.7})
    other.open()
    with pytest.raises(ConfigError, match="but this study has .*: use another pool=DIR"):
        other.read(prompt, 0, 2)
    (tmp_path / "pool.json").write_text('{"temperature": ')
    with pytest.raises(ConfigError, match="pool.json is damaged: "):
        other.open()
    (tmp_path / "pool.json").write_text('{"temperatuse": 1.0}')  # an edited key
    with pytest.raises(ConfigError, match="pool.json is damaged: it has temperatuse=1"):
        PoolStore(tmp_path, own).open()
    with pytest.raises(
        ConfigError, match="has completions for temperatuse=1.0, but this study has None"
    ):
        other.open()
    (tmp_path / "pool.json").unlink()
    PoolStore(tmp_path, own).open()
    assert PoolStore(tmp_path, own).read(prompt, 0, 2).rewards_N.tolist() == [0, 1]
