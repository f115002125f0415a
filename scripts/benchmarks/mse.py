"""Time until every curve of a study is known to +-5 %: closed forms against brute force.

    python scripts/benchmarks/mse.py --state mse.state
    python scripts/benchmarks/mse.py dataset=plus_one prompt=few_shot max_completion_length=4 \\
        --state smol.state --model FOLDER --questions 24 \\
        --extrapolate --replicates 4 --timed-questions 2

The curves of none, leave_one_out and oracle at every group size, of the same questions, by

    closed_form  a pool of scored completions, extended until its widths are the target's
    ordinary     fresh rollouts and a backward for every (baseline, group), see `brute_force`
    weighted     the same with all gradients of a replicate from one backward (monte_carlo)

take turns in slices of some seconds, so that a busy machine hits them alike, each in this process
on one thread, until the 95 % interval of every curve is within the target; in the two of brute
force a curve that is there is no longer computed. Loading the model is not counted. The state file
and the pool beside it are kept up to date: the same command goes on from there. The oracle's V
costs `ordinary` an error of about 1/K of its curve, K = budget.value_completions; in `weighted` it
is subtracted.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
from brute_force import BruteForce, Spent, halfwidth, packed, unpacked
from safetensors import safe_open
from safetensors.numpy import save_file
from scipy import stats

from grpo_ustat.cli.compose import compose_config
from grpo_ustat.estimators.closed_form import closed_form
from grpo_ustat.mse import pool, sampler
from grpo_ustat.mse.result import closed_form_request
from grpo_ustat.policy.configured import configured_policy, configured_task

MAX_POOL_COMPLETIONS = 8192
BASELINES = ("none", "leave_one_out", "oracle")


class ClosedForms:
    """The pool and its closed forms, one extension a step; the pool on disk is its state."""

    way = "closed_form"

    def __init__(self, config, prompts, folder: Path, state):
        self.config, self.prompts, self.folder = config, prompts, folder
        self.spent, self.size, self.found = Spent(), config.budget.pool_completions, None
        self.facts = pool.model_facts(config.policy_options, prompts)
        self.keys = [(name, size) for name in config.baselines for size in config.group_sizes]
        if state is not None:
            self.spent, self.size = Spent(**state["spent"]), state["size"]
            if self.spent.rollouts:
                self._measure()

    @property
    def ready(self):
        """Whether there is a first pool."""
        return self.found is not None

    def step(self, target):
        """The first pool, or the next larger one."""
        if self.ready:
            self.size = min(next_pool_size(self.found, target, self.size), MAX_POOL_COMPLETIONS)
        with self.spent.on("pool"):
            scored = self._measure()
        self.spent.rollouts = scored.rewards_PN.size

    def _measure(self):
        scored, took = pool.build_pool(self.config, self.prompts, self.folder, self.size)
        asked = closed_form_request(self.config, scored, self.facts)
        self.found = closed_form(scored, asked, self.config.study.interval)
        return scored

    def left(self, target):
        """The pairs whose relative half-width is above the target."""
        if not self.ready:
            return self.keys
        if self.size >= MAX_POOL_COMPLETIONS:
            return []
        return [key for key, x in self.curves().items() if halfwidth(x) > target]

    def curves(self):
        """Mean squared errors by baseline and group size."""
        points = [x for name, x in self.found.statistics.items() if name.startswith("mse/")]
        return dict(zip(self.keys, points, strict=True))


def next_pool_size(statistics, target, size):
    """Completions a question that should bring every curve's relative half-width to the target.

    A half-width falls like 1/sqrt(N); a tenth more makes up for the pilot's own error.
    """
    points = [x for name, x in statistics.statistics.items() if name.startswith("mse/")]
    worst = max(map(halfwidth, points), default=0.0)
    if worst <= target:
        return size
    factor = min(4.0, 1.1 * (worst / target) ** 2) if math.isfinite(worst) else 4.0
    return int(np.ceil(size * max(factor, 1.2)))


def configured(asked):
    """The project's own configuration of the study."""
    model = [f"model={asked.model}"]
    if Path(asked.model).is_dir():
        model = ["model=hub", f"model.model_name_or_path={asked.model}"]
    overrides = [
        *model, f"study.questions={asked.questions}", f"baselines=[{','.join(BASELINES)}]",
        f"group_sizes={asked.group_sizes}", "launch.workers=1", "launch.num_threads=1",
        "study.methods=[closed_form,monte_carlo]",
    ]  # fmt: skip
    return compose_config("mse", [*overrides, *asked.overrides])


def methods(asked, config):
    """All three with one loaded model, from the state file where there is one."""
    kept = read(asked.state) if asked.state.is_file() else {}
    policy, task = (
        configured_policy(config.policy_options),
        configured_task(config.task_options, config.model),
    )
    pool.configured_policy = sampler.configured_policy = lambda *_: policy
    prompts = task.prompts("study")[: config.study.questions]
    folder = asked.state.with_suffix(".pool")
    found = [ClosedForms(config, prompts, folder, kept.get("closed_form"))]
    few = prompts[: asked.timed_questions]
    for way, asked_of_it in (("ordinary", few), ("weighted", prompts)):
        brute = BruteForce(way, config, asked_of_it, policy, task, None)
        if way in kept:
            brute.state = unpacked(*kept[way], brute.keys)
        found.append(brute)
    return found


def save(asked, found):
    """One file: arrays under the method's name, plain values in its metadata."""
    arrays, plain = {}, {}
    for method in found:
        if isinstance(method, ClosedForms):
            plain[method.way] = {"spent": asdict(method.spent), "size": method.size}
            continue
        mine, plain[method.way] = packed(method.state)
        arrays |= {f"{method.way}:{name}": np.ascontiguousarray(x) for name, x in mine.items()}
    staged = asked.state.with_suffix(".tmp")
    save_file(arrays, staged, {"plain": json.dumps(plain)})
    staged.replace(asked.state)


def read(file: Path) -> dict:
    """What `save` wrote, by method."""
    with safe_open(file, "numpy") as kept:
        plain = json.loads(kept.metadata()["plain"])
        arrays = {name: kept.get_tensor(name) for name in kept.keys()}  # noqa: SIM118
    found = {"closed_form": plain.pop("closed_form")}
    for way, values in plain.items():
        mine = {n.removeprefix(f"{way}:"): x for n, x in arrays.items() if n.startswith(f"{way}:")}
        found[way] = mine, values
    return found


def spent_of(method) -> Spent:
    return method.spent if isinstance(method, ClosedForms) else method.state.spent


def run(asked, found):
    """Turns of one slice each until all curves are there, or enough replicates to extrapolate."""
    while working := [method for method in found if not finished(asked, method)]:
        for method in working:
            start = time.perf_counter()
            while not finished(asked, method):
                method.step(asked.target)
                if time.perf_counter() - start > asked.slice:
                    break
            save(asked, found)
            left, spent = method.left(asked.target), spent_of(method)
            print(f"{method.way:12}{spent.seconds:9.0f} s  {len(left):3} curves to go", flush=True)


def whole(asked, method) -> bool:
    """Whether a method works on all questions, not just for its seconds on a few."""
    return len(method.prompts) == asked.questions


def finished(asked, method) -> bool:
    if not method.ready:
        return False
    enough = asked.extrapolate
    if enough and isinstance(method, BruteForce):
        enough = method.state.replicates >= (asked.replicates if whole(asked, method) else 1)
    return enough or not method.left(asked.target)


def report(asked, found):
    title = f"{asked.model}, {asked.questions} questions, G in {asked.group_sizes}"
    print(f"\n{title}: +-{asked.target:.0%} on {len(found[0].keys)} curves")
    print(f"{'':13}{'rollouts':>9}{'gradients':>10}{'CPU s':>9}{'wall s':>9}{'ratio':>8}", end="")
    print(f"{'worst half-width':>18}")
    base = spent_of(found[0]).seconds
    for method in [method for method in found if whole(asked, method)]:
        spent, worst = spent_of(method), max(map(halfwidth, method.curves().values()))
        print(f"{method.way:13}{spent.rollouts:9}{spent.gradients:10}{spent.seconds:9.1f}", end="")
        print(f"{spent.wall:9.1f}{spent.seconds / base:8.1f}{worst:18.2%}")


def agreement(asked, found):
    """closed_form - brute force in units of their standard error, and the simultaneous limit."""
    mine = found[0].curves()
    limit = stats.norm.ppf(1 - 0.025 / len(mine))
    for other in [method for method in found[1:] if whole(asked, method)]:
        apart = {}
        for key, theirs in other.curves().items():
            errors = [(x.high - x.low) / 2 / 1.96 for x in (mine[key], theirs)]
            apart[key] = (mine[key].estimate - theirs.estimate) / np.hypot(*errors)
        worst = max(abs(z) for z in apart.values())
        print(f"\nclosed_form - {other.way}, in standard errors of the difference: ", end="")
        print(f"largest {worst:.2f}, simultaneous 95 % limit of {len(mine)}: {limit:.2f}")
        for name in BASELINES:
            row = [f"{z:7.2f}" for (baseline, _), z in apart.items() if baseline == name]
            print(f"  {name:14}" + "".join(row))


def extrapolation(asked, found):
    """Seconds to the target from seconds and variance so far; pairs that are there stop."""
    closed, measured = found[0], found[-1]
    worst = max(map(halfwidth, closed.curves().values()))
    factor = max(1.0, (worst / asked.target) ** 2)
    base = closed.spent.seconds * factor
    print(
        f"\nclosed_form: {base:.0f} CPU s, {closed.spent.rollouts * factor:.0f} rollouts, ", end=""
    )
    print(f"extrapolated from a pool of {closed.size} whose worst half-width is {worst:.1%}")
    for method in found[1:]:
        source = method if whole(asked, method) else measured
        if not max(map(halfwidth, source.curves().values())) < 1:
            print(f"{method.way}: {source.state.replicates} replicates are too few to extrapolate")
            continue
        needed = replicates_needed(asked, source)
        seconds, largest = seconds_needed(asked, method, needed), max(asked.group_sizes)
        rollouts = max(needed.values()) * largest * asked.questions
        print(
            f"\n{method.way}: {seconds:.0f} CPU s, {seconds / base:.0f} times closed_form, ", end=""
        )
        print(f"{max(needed.values()):.0f} replicates, {rollouts:.0f} rollouts,")
        print(f"extrapolated from {source.way}'s own measured variance of ", end="")
        print(f"{source.state.replicates} replicates and the seconds of ", end="")
        print(f"{method.state.replicates} with {len(method.prompts)} questions; replicates needed:")
        for name in BASELINES:
            print(
                f"  {name:14}" + "".join(f"{n:8.0f}" for (b, _), n in needed.items() if b == name)
            )


def replicates_needed(asked, method):
    """A replicate has several groups of the smaller sizes."""
    largest = max(asked.group_sizes)
    groups = method.groups_needed(asked.target)
    return {(name, size): n * size / largest for (name, size), n in groups.items()}


def seconds_needed(asked, method, needed):
    """`ordinary` pays for every pair until it is there, `weighted` once for all."""
    cpu, state, largest = method.state.spent.cpu, method.state, max(asked.group_sizes)
    most = max(needed.values())
    forming = most * cpu["gradients"] / state.replicates
    if method.way == "ordinary":
        done = sum(len(x.squared) * key[1] / largest for key, x in state.sums.items())
        forming = sum(needed.values()) * cpu["gradients"] / done
    drawing = most * cpu["draw"] / state.replicates
    return (cpu["reference"] + drawing + forming) * asked.questions / len(method.prompts)


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", help="of the configuration, key=value")
    parser.add_argument("--model", default="tiny", help="embedded, or a folder")
    parser.add_argument("--questions", type=int, default=25)
    parser.add_argument("--group-sizes", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--target", type=float, default=0.05, help="relative half-width")
    parser.add_argument("--state", type=Path, required=True, help="file to keep and go on from")
    parser.add_argument("--slice", type=float, default=60, help="seconds of a turn")
    parser.add_argument("--extrapolate", action="store_true")
    parser.add_argument("--replicates", type=int, default=4, help="to extrapolate from")
    parser.add_argument("--timed-questions", type=int, help="extrapolate: of `ordinary`, if fewer")
    return parser.parse_args()


def main():
    asked = arguments()
    found = methods(asked, configured(asked))
    run(asked, found)
    report(asked, found)
    agreement(asked, found)
    if asked.extrapolate:
        extrapolation(asked, found)


if __name__ == "__main__":
    main()
