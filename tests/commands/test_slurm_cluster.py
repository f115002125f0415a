"""On a real SLURM, jobs are requeued, preempted, warned and cancelled; nothing is lost or twice."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from resuming import timeless
from slurm_cluster import Cluster, missing, wait_for

from grpo_ustat.runs import history

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm" / "run.sbatch"
STEPS = 30
PATIENCE = 400  # seconds; a busy machine may need minutes for what takes seconds
TRAIN = (  # steps of a few tenths of a second, in which some group of a few earns unequal rewards
    "model=tiny_base", "model.dtype=float64", "dataset=arithmetic_easy", f"max_steps={STEPS}",
    "eval_steps=15", "save_steps=15", "save_total_limit=1", "budget.rollouts=16",
    "dataset.test_size=10", "max_completion_length=40",
)  # fmt: skip
STUDY = ("model=tiny_base", "study.questions=80", "launch.workers=1")
POINTS = ("group_size=2 seed=0", "group_size=4 seed=0")
SWEEP = ("-m", "group_size=2,4", "seed=0,1", *TRAIN)
SLURM = (
    "hydra/launcher=slurm", "hydra.launcher.partition=main", "hydra.launcher.tasks_per_node=2",
    "hydra.launcher.cpus_per_task=1", "hydra.launcher.array_parallelism=2",
)  # fmt: skip


class Run:
    """A run as its folder shows it, the first in `place` that fits `pattern`."""

    def __init__(self, name: str, place: Path, pattern: str):
        self.name, self.place, self.pattern = name, place, pattern

    @property
    def folder(self):
        return next(self.place.glob(self.pattern), self.place / "nowhere")

    @property
    def rows(self):
        file = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def launches(self):
        """Its history cut at every start."""
        cut = []
        for row in history.launches(self.folder):
            if row["event"] == "start":
                cut.append([])
            cut[-1].append(row)
        return cut

    @property
    def job(self):
        """What scontrol calls its latest job, None before it starts."""
        return self.launches[-1][0]["slurm_job_id"] if self.launches else None

    def steps(self):
        """The steps of each launch, (first, last)."""
        found = []
        for launch in self.launches:
            first = 1 + next((row["step"] for row in launch if row["event"] == "resumed"), 0)
            stopped = re.search(r"after step (\d+)", launch[-1].get("reason", ""))
            found.append((first, int(stopped.group(1)) if stopped else len(self.rows)))
        return found

    def under_way(self):
        """Whether some steps of the latest launch are done and many are left."""
        steps = self.steps()
        return bool(steps) and steps[-1][0] + 2 <= len(self.rows) <= STEPS - 10


class Scenario:
    """What is done to the jobs of some runs, and when.

    Attributes:
        events: (seconds since the start, what, the run that it hit, its job).
    """

    def __init__(self, cluster: Cluster):
        self.cluster, self.began, self.events = cluster, time.monotonic(), []
        self.runs: list[Run] = []

    def running(self):
        """The jobs at work in partition main."""
        return self.cluster.run("squeue", "-h", "-p", "main", "-t", "R", "-o", "%i").split()

    def spared(self):
        """Runs that nothing was done to."""
        return [run for run in self.runs if run not in [hit for _, _, hit, _ in self.events]]

    def victim(self, runs=None):
        """The first run that is well under way, of these or of those spared."""
        at_work = self.running()
        chosen = self.spared() if runs is None else runs
        return next((run for run in chosen if run.job in at_work and run.under_way()), None)

    def strike(self, *words: str, of=None):
        """One of SLURM's commands against a run."""
        run = wait_for(lambda: self.victim(of), "a run that is well under way", PATIENCE)
        self.cluster.run(*words, run.job)
        return self.hit(" ".join(words), run)

    def preempt(self):
        """A job of the higher partition that needs the CPUs of one of ours."""
        wait_for(self.victim, "a run that is well under way", PATIENCE)
        free = self.cluster.cpus - 2 * len(self.running())
        words = ("sbatch", "-p", "high", "-n", str(free + 1), "--wrap", "sleep 1")
        self.cluster.run(*words, "-o", str(self.cluster.folder / "high.out"))
        return self.hit("preemption", wait_for(self.stopped, "a preemption", PATIENCE))

    def stopped(self):
        """The first run that ended early with nothing done to it here."""
        ends = [(run, launch[-1]) for run in self.spared() for launch in run.launches]
        return next((run for run, end in ends if end.get("outcome") == "stopped"), None)

    def show(self, job: str):
        return self.cluster.run("scontrol", "show", "job", job)

    def hit(self, what: str, run: Run):
        self.events.append((time.monotonic() - self.began, what, run, run.job))
        return run

    def summary(self):
        """What happened, for whoever reads the test's output."""
        lines = [
            f"{t:5.0f} s  {what} of job {job}, {run.name}" for t, what, run, job in self.events
        ]
        for run in self.runs:
            lines.append(run.name)
            for launch, (first, last) in zip(run.launches, run.steps(), strict=True):
                start, end = launch[0], launch[-1]
                lines.append(
                    f"    job {start['slurm_job_id']}: "
                    f"steps {first} to {last}, {end.get('reason') or end['outcome']}"
                )
        return "\n".join(["", *lines])


@pytest.fixture
def scenario():
    if why := missing():
        pytest.skip(why)
    with Cluster() as cluster:
        yield Scenario(cluster)
    assert left_over(cluster) == []


def left_over(cluster):
    """Processes that could speak to the cluster still."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SLURM_CONF") == cluster.environment["SLURM_CONF"]:
                found.append(process)
        except psutil.Error:
            continue
    return found


def sweep(folder, *overrides, environment=None):
    """Start the sweep as a user types it; its words go to `typed.log`."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "grpo_ustat.train", *SWEEP, *overrides]
    with (folder / "typed.log").open("a") as log:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)


def points(folder):
    pairs = [(size, seed) for size in (2, 4) for seed in (0, 1)]
    return [
        Run(f"group_size={size} seed={seed}", folder, f"outputs/train/*-G-{size}-*/seed-{seed}")
        for size, seed in pairs
    ]


def whole(run, last=STEPS):
    """Whether every step was done, once, and each launch went on from the last."""
    steps = run.steps()
    follows = [one[1] + 1 == two[0] for one, two in zip(steps, steps[1:], strict=False)]
    numbers = [row["step"] for row in run.rows]
    return steps[0][0] == 1 and all(follows) and numbers == list(range(1, last + 1))


def close(one, two):
    """Equal, numbers but for the order of sums over two processes."""
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(close(one[k], two[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(two) and all(map(close, one, two))
    return two == (pytest.approx(one, rel=1e-6, abs=1e-9) if isinstance(one, float) else one)


def result(run):
    return timeless(json.loads((run.folder / "result.json").read_text()))


@pytest.mark.nightly(minutes=4)
@pytest.mark.timeout(1800)
def test_a_sweep_survives_its_cluster(scenario, tmp_path):
    """Typed once it is struck three times; typed again it does what is left."""
    place, environment = tmp_path / "typed", scenario.cluster.environment
    scenario.runs = points(place)
    typed = sweep(place, *SLURM, environment=environment)
    try:
        preempted = scenario.preempt()
        requeued = scenario.strike("scontrol", "requeue")
        cancelled = scenario.strike("scancel")
        assert typed.wait(timeout=PATIENCE) == 1
    finally:
        typed.kill()
        print((place / "typed.log").read_text(), scenario.summary())
    assert [run for run in scenario.runs if len(run.rows) < STEPS] == [cancelled]

    local = sweep(tmp_path / "local")  # meanwhile, what the cluster's runs are to equal
    assert sweep(place, *SLURM, environment=environment).wait(timeout=PATIENCE) == 0
    print(scenario.summary())
    for run in scenario.runs:
        assert whole(run) and len(run.launches) == (
            2 if run in (requeued, preempted, cancelled) else 1
        ), run.name
    assert len(list(place.rglob("*_submitted.pkl"))) == len(scenario.runs) + 1  # jobs in all

    assert local.wait(timeout=PATIENCE) == 0
    for run, alone in zip(scenario.runs, points(tmp_path / "local"), strict=True):
        assert close(list(map(timeless, alone.rows)), list(map(timeless, run.rows))), run.name
        assert close(result(alone), result(run)), run.name
    assert any(row["grad_norm"] > 0 for run in scenario.runs for row in run.rows)


def edited(script, folder, name, **lines):
    """A batch script with the lines that its user would edit."""
    text, there = script.read_text(), Path(sys.executable).parent
    text = re.sub(r"(?m)^source .*", f"PATH={there}:$PATH", text)
    for variable, value in lines.items():
        text, count = re.subn(rf"(?m)^{variable}=\S.*?(?=  #|$)", f"{variable}={value}", text)
        assert count == 1
    (folder / f"{name}.sbatch").write_text(text)
    return str(folder / f"{name}.sbatch")


def submit(scenario, folder, name, *overrides, options=(), entry="train", words=TRAIN):
    """One run by the batch script."""
    script = edited(SCRIPT, folder, name, entry=entry)
    command = ("sbatch", "--parsable", "-c", "2", "-o", str(folder / f"{name}.out"), *options)
    job = scenario.cluster.run(
        *command, script, f"hydra.run.dir={folder / name}", *words, *overrides
    )
    scenario.runs.append(Run(name, folder, name))
    return job, scenario.runs[-1]


def ended(scenario, job):
    """Wait for it; see `state`."""
    over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    wait_for(lambda: state(scenario, job)[0] in over, "the end", PATIENCE)
    return state(scenario, job)


@pytest.mark.nightly(minutes=2)
@pytest.mark.timeout(1800)
def test_a_batch_script_goes_on_unless_it_is_cancelled(scenario, tmp_path):
    """With ranks that the run's own parent starts."""
    ranks = "launch.num_processes=2"
    refused, _ = submit(scenario, tmp_path, "refused", "group_size=5")
    cancelled, run = submit(scenario, tmp_path, "cancelled", ranks)
    try:
        scenario.strike("scancel")
        stopped, run = submit(scenario, tmp_path, "stopped", ranks)
        assert scenario.preempt() is run
        wait_for(lambda: len(run.launches) == 2, "the next launch", PATIENCE)
        scenario.strike("scancel", "--signal=USR1", of=[run])
        ended = ("COMPLETED", "FAILED")
        wait_for(lambda: state(scenario, stopped)[0] in ended, "the end", PATIENCE)
    finally:
        print(scenario.summary(), *(file.read_text() for file in tmp_path.glob("*.out")))
    assert state(scenario, refused) == ("FAILED", "0", "2:0")
    assert state(scenario, cancelled)[:2] == ("CANCELLED", "0")
    assert state(scenario, stopped) == ("COMPLETED", "2", "0:0")
    assert whole(run) and len(run.launches) == 3
    reasons = [launch[-1].get("reason", "").split(" after")[0] for launch in run.launches]
    assert reasons == ["stopped by SIGTERM", "stopped by SIGUSR1", ""]


def state(scenario, job):
    """(JobState, Restarts, ExitCode)."""
    shown = scenario.show(job)
    return tuple(
        re.search(rf" {name}=(\S+)", shown)[1] for name in ("JobState", "Restarts", "ExitCode")
    )


@pytest.mark.nightly(minutes=2)
@pytest.mark.timeout(900)
def test_an_array_runs_every_point_once(scenario, tmp_path):
    """Submitted again it does nothing."""
    script = SCRIPT.with_name("sweep.sbatch")
    script = edited(script, tmp_path, "sweep", group_sizes="(2 4)", seeds="(0)")
    scenario.runs = [run for run in points(tmp_path) if run.name in POINTS]
    for _ in range(2):
        command = ("sbatch", "--parsable", "-c", "2", "--array=0-1", f"--chdir={tmp_path}", script)
        job = scenario.cluster.run(*command, *TRAIN)
        for index in range(2):
            assert ended(scenario, f"{job}_{index}") == ("COMPLETED", "0", "0:0")
            said = (tmp_path / f"slurm-{job}_{index}.out").read_text()
            assert f"SLURM job {job}_{index} on " in said and "--array" not in said
    assert all(whole(run) and len(run.launches) == 1 for run in scenario.runs)


@pytest.mark.nightly(minutes=1)
@pytest.mark.timeout(900)
def test_ranks_of_a_sweep_by_torchrun_go_on(scenario, tmp_path):
    """One SLURM task for each point, which starts two ranks."""
    place, inside = (
        tmp_path / "typed",
        ("hydra.launcher.tasks_per_node=1", "launch.num_processes=2"),
    )
    scenario.runs = [run for run in points(place) if run.name in POINTS]
    few = ("group_size=2,4", "seed=0")
    typed = sweep(place, *few, *SLURM, *inside, environment=scenario.cluster.environment)
    try:
        warned = scenario.strike("scancel", "--signal=USR2")
        assert typed.wait(timeout=PATIENCE) == 0
    finally:
        typed.kill()
        print((place / "typed.log").read_text(), scenario.summary())
    for run in scenario.runs:
        assert whole(run) and len(run.launches) == (2 if run is warned else 1), run.name
        assert {launch[0]["processes"] for launch in run.launches} == {2}


@pytest.mark.nightly(minutes=2)
@pytest.mark.timeout(900)
def test_a_preempted_study_goes_on(scenario, tmp_path):
    """With the questions that are there: no draw twice, and the figures of a run left alone."""
    job, run = submit(scenario, tmp_path, "study", entry="mse", words=STUDY)
    drawn = lambda: len([*run.folder.glob("pool/*.safetensors")])  # noqa: E731
    try:
        wait_for(lambda: 10 <= drawn() < 50, "some questions", PATIENCE)
        scenario.cluster.run("sbatch", "-p", "high", "-n8", "-o", "/dev/null", "--wrap", "sleep 1")
        wait_for(lambda: len(run.launches) > 1, "the next launch", PATIENCE)
        assert ended(scenario, job) == ("COMPLETED", "1", "0:0")
    finally:
        print(scenario.summary(), (tmp_path / "study.out").read_text())
    alone = Run("alone", tmp_path, "alone")
    command = [sys.executable, "-m", "grpo_ustat.mse", f"hydra.run.dir={tmp_path / 'alone'}"]
    subprocess.run([*command, *STUDY], check=True, capture_output=True)
    assert result(alone) == result(run)
