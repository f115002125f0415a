r"""Compare training under plans with training at a fixed group size, at equal generated tokens.

    python scripts/benchmarks/plans_and_training.py --results runs.jsonl
    python scripts/benchmarks/plans_and_training.py --only-analysis \
        docs/examples/plans_and_training.csv
    python scripts/benchmarks/plans_and_training.py --only-analysis \
        docs/examples/plans_and_training.csv --plans "fixed, 8" "refill, 8" \
        --seeds 0 1 2 3 4 5 6 7 8 9

A plan (`grpo_ustat.estimators.plans`) decides how many completions each prompt gets. Every run
takes plain gradient steps, `1 / (P G) sum over prompts of h`, with the terms h of an estimate
(`estimators.plan_terms`), one update per batch, and no ratio, std, penalty or clipping. For each
policy, optimizer, learning rate and seed, only the plan differs. `fixed` with `per_rollout` is the
trainer's `algorithm1` with `leave_one_out`, to the last bit.

Policies, optimizers, learning rates, seeds, evaluation and tests are those of
`efficiency_and_training.py`, except that:

    budget      All runs of a policy generate the same number of tokens: that of the steps of
                `efficiency_and_training.py` at the mean length of the pool. All completions that a
                plan draws count, also those of prompts that it replaces. When a whole step no
                longer fits, the last step has as many prompts as fit (by the mean tokens per
                prompt of the run), and its learning rate is reduced in the same proportion.
    prompts     The number of prompts per step is such that, at the initial policy, the expected
                number of generated rollouts per step is n. For a plan that replaces prompts, it
                is the number of prompts that are kept.
    histories   A plan with a history gets 8 completions of every prompt by the initial policy.
                They are not counted, as if they came from an earlier epoch, and they do not change
                during training.
    prices      The price and the prior of a plan that values completions are those of the pool,
                and do not change during training.

The efficiency is relative to the unbiased gradient at its best fixed G, at equal numbers of
generated rollouts. The plans of each policy were chosen by this efficiency from the same pool.

The record has 270 runs, which took 68 minutes on a core of a busy x86 CPU. SGD on `tiny_base` was
left out for lack of time. The other three sides have all plans with five seeds. With AdamW on
`tiny_base`, `refill` gained more than `fixed` in these seeds (p = .03, uncorrected), so both were
repeated with seeds 5 to 9, where the difference was -.002 [-.006, .003].
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from efficiency_and_training import (
    FACTORS,
    POLICIES,
    UNIT,
    Cell,
    detectable,
    number,
    print_gains,
    print_rates,
    read,
    record,
    recorded,
    run_missing,
    sides,
    train,
)

from grpo_ustat.cli.compose import compose_config
from grpo_ustat.draws import generator
from grpo_ustat.estimators.efficiency import mean_over_prompts, update_moments
from grpo_ustat.estimators.group_terms import LevelSums
from grpo_ustat.estimators.moments import pool_gradient_weights
from grpo_ustat.estimators.plan_efficiencies import (
    MOST_TIMES_MEAN,
    fitted_setting,
    plan_efficiencies,
)
from grpo_ustat.estimators.plan_terms import (
    ALL_ORDERS,
    ESTIMATES,
    paths_of,
    plan_terms,
    weights_of,
)
from grpo_ustat.estimators.plans import PLANS, Plan, Rewards, Setting, trained_stages
from grpo_ustat.mse.pool import build_pool
from grpo_ustat.policy.configured import configured_task
from grpo_ustat.policy.tokenizer import configured_tokenizer
from grpo_ustat.records import Prompt, Rollouts, ScorePool
from grpo_ustat.rollout.local import Sampling
from grpo_ustat.tasks.base import summed_rewards
from grpo_ustat.train.checkpoint import check_finite
from grpo_ustat.train.context import TrainContext
from grpo_ustat.train.trainer import choose_prompts
from grpo_ustat.train.update import (
    FixedLogprobs,
    Minibatch,
    UpdateStats,
    accumulate_gradient,
    sum_gradients,
)

# Group sizes of the unbiased gradient among which the best is selected.
GROUP_SIZES = (2, 4, 8, 16, 32)
# Columns of the record in addition to those of `efficiency_and_training.record`.
COUNTS = ("steps", "rollouts", "tokens")
# Estimates that average over the completions of a prompt; their terms are multiplied by the size.
AVERAGES = ("per_prompt", ALL_ORDERS)


@dataclass(frozen=True)
class Arm:
    """Plan with an estimate, and the setting that was fitted to a pool."""

    plan: Plan
    estimate: str
    setting: Setting
    # Number of prompts per step.
    prompts: int = 1

    @cached_property
    def by_counts(self) -> dict[tuple[int, ...], np.ndarray]:
        """Weights of `ALL_ORDERS` for completions with rewards 0 and 1, by their numbers."""
        paths = paths_of(self.plan, self.setting, [0.0, 1.0])
        rows = zip(paths.counts_CL, weights_of(paths, ALL_ORDERS).sum_CL, strict=True)
        return {
            tuple(count_L): sum_L / np.maximum(count_L, 1)
            for count_L, sum_L in ((counts.tolist(), sums) for counts, sums in rows)
        }

    @property
    def scale(self) -> int:
        """Factor of the terms: the size if the estimate averages over a prompt's completions."""
        return self.setting.size if self.estimate in AVERAGES else 1

    def weights(self, group: Group) -> np.ndarray:
        """Return the weight of every generated completion, 0 for those that are not trained."""
        if self.estimate == ALL_ORDERS:
            rewards = np.concatenate(group.rewards).astype(int)
            right = int(rewards.sum())
            return self.scale * self.by_counts[len(rewards) - right, right][rewards]
        trained = trained_stages(self.plan, group.by_stage)
        drawn = np.concatenate(group.rewards)
        baseline = float(drawn.mean()) if self.plan.baseline_of_generated else None
        by_stage = ESTIMATES[self.estimate](trained, baseline)
        weights = [weights_in_order(*x) for x in zip(group.rewards, trained, by_stage, strict=True)]
        return self.scale * np.concatenate(weights)

    def trains(self, group: Group) -> bool:
        """Return False if another prompt replaces the group's prompt."""
        return not self.plan.replaces or any(trained_stages(self.plan, group.by_stage))


def weights_in_order(rewards_T: np.ndarray, kept: Sequence[float], weights: np.ndarray):
    """Return the weights of a stage in the order of drawing, [T].

    Of completions with equal rewards, those that were drawn first are kept.

    Args:
        rewards_T: rewards of the stage in the order of drawing.
        kept: rewards of the trained completions.
        weights: weights of the trained completions.

    >>> weights_in_order(np.array([0.0, 1.0, 0.0]), (0.0, 1.0), np.array([-0.5, 0.5])).tolist()
    [-0.5, 0.5, 0.0]
    """
    left = defaultdict(list)
    for reward, weight in zip(kept, weights, strict=True):
        left[reward].append(weight)
    return np.array([left[reward].pop() if left[reward] else 0.0 for reward in rewards_T])


@dataclass
class Group:
    """Completions of a prompt under a plan. The lists have an entry per finished stage."""

    prompt: Prompt
    # Rewards of the history; empty without one.
    history: Rewards = ()
    rollouts: list[Rollouts] = field(default_factory=list)
    # Rewards in the order of drawing.
    rewards: list[np.ndarray] = field(default_factory=list)

    @property
    def by_stage(self) -> Rewards:
        """Rewards as a plan sees them."""
        return (*self.history, *(tuple(sorted(map(float, stage))) for stage in self.rewards))

    @property
    def size(self) -> int:
        """Number of generated completions."""
        return sum(map(len, self.rewards))

    @property
    def tokens(self) -> int:
        """Number of generated tokens."""
        return sum(int(part.lengths_PG.sum()) for part in self.rollouts)


def draw_groups(
    run: TrainContext,
    arm: Arm,
    prompts: Sequence[Prompt],
    step: int,
    histories: dict[str, Rewards],
) -> list[Group]:
    """Draw the completions of prompts stage by stage, until the plan stops for all of them."""
    sampling = Sampling.of(run.config.sampler_options, "rollout")
    groups = [Group(prompt, histories.get(prompt.id, ())) for prompt in prompts]
    while True:
        waiting = defaultdict(list)
        for group in groups:
            if size := arm.plan.more(group.by_stage, arm.setting):
                waiting[group.size, size].append(group)
        if not waiting:
            return groups
        for (first, size), members in waiting.items():
            asked = [group.prompt for group in members]
            rollouts = run.engine.sample(asked, size, sampling, step=step, first=first)
            rewards_PG = summed_rewards(run.task, rollouts)
            for place, group in enumerate(members):
                group.rollouts.append(rollouts.of_prompt(place))
                group.rewards.append(rewards_PG[place])


def draw_batch(
    run: TrainContext,
    arm: Arm,
    count: int,
    step: int,
    histories: dict[str, Rewards],
    per_kept: float = 1.0,
) -> list[Group]:
    """Draw groups, in the order of the step's prompts, until `count` of them are trained.

    The result has fewer groups if no prompts are left.

    Args:
        run: training run.
        arm: plan.
        count: number of trained groups.
        step: number of the step, which keys all draws.
        histories: histories by prompt.
        per_kept: expected number of groups for each trained group. Groups are drawn together in
            this number, because this is faster. Groups after the last one that is needed are
            discarded, so the result does not depend on this number.
    """
    prompts = choose_prompts(run.config, run.train_prompts, step)
    chosen = {prompt.id for prompt in prompts}
    others = [prompt for prompt in run.train_prompts if prompt.id not in chosen]
    order = generator(run.config.seed, "prompts", step, "replacements").permutation(len(others))
    queue = prompts[:count] + [others[i] for i in order]
    groups: list[Group] = []
    missing = count
    while queue and missing:
        asked = math.ceil(missing * per_kept)
        for group in draw_groups(run, arm, queue[:asked], step, histories):
            if missing:
                groups.append(group)
                missing -= arm.trains(group)
        queue = queue[asked:]
    return groups


def merged(groups: Sequence[Group]) -> Rollouts:
    """Return the completions of all groups, padded with empty completions to the largest size."""
    size = max(group.size for group in groups)
    width = max(part.mask_PGT.shape[2] for group in groups for part in group.rollouts)
    tokens_PGT = np.zeros((len(groups), size, width), dtype=np.int64)
    mask_PGT = np.zeros((len(groups), size, width), dtype=bool)
    ended_PG = np.zeros((len(groups), size), dtype=bool)
    texts_PG: list[list[str]] = []
    for place, group in enumerate(groups):
        first = 0
        for part in group.rollouts:
            last = first + part.mask_PGT.shape[1]
            tokens_PGT[place, first:last, : part.mask_PGT.shape[2]] = part.tokens_PGT[0]
            mask_PGT[place, first:last, : part.mask_PGT.shape[2]] = part.mask_PGT[0]
            ended_PG[place, first:last] = part.ended_PG[0]
            first = last
        texts = [text for part in group.rollouts for text in part.texts_PG[0]]
        texts_PG.append(texts + [""] * (size - len(texts)))
    return Rollouts(
        [group.prompt for group in groups],
        [group.rollouts[0].prompt_tokens[0] for group in groups],
        tokens_PGT,
        mask_PGT,
        ended_PG,
        texts_PG,
    )


def plan_gradient(run: TrainContext, arm: Arm, groups: Sequence[Group]) -> None:
    """Set `grad` to the negated mean term of the groups, divided by the plan's size."""
    rollouts = merged(groups)
    weight_PG = np.zeros(rollouts.ended_PG.shape)
    for place, group in enumerate(groups):
        weight_PG[place, : group.size] = arm.weights(group)
    index = np.flatnonzero(rollouts.lengths_PG)
    divisor = len(groups) * arm.setting.size
    minibatch = Minibatch(index, np.full(weight_PG.size, 1 / divisor), divisor)
    accumulate_gradient(run, rollouts, weight_PG, minibatch, FixedLogprobs(), UpdateStats())


def take_step(run: TrainContext, arm: Arm, groups: Sequence[Group]) -> None:
    """Take a step with the trained groups.

    The learning rate is multiplied by their number divided by the arm's number of prompts.

    Raises:
        FloatingPointError: the gradient or a weight is not finite.
    """
    trained = [group for group in groups if arm.trains(group)]
    if not trained:
        return
    plan_gradient(run, arm, trained)
    grads = sum_gradients(run)
    if not all(bool(grad.isfinite().all()) for grad in grads):
        raise FloatingPointError("the gradient is not finite: lower learning_rate")
    for parameters in run.optimizer.param_groups:
        parameters["lr"] = run.config.learning_rate * (len(trained) / arm.prompts)
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.engine.refresh()
    check_finite(run.policy)


def spend(
    run: TrainContext, arm: Arm, budget: float, histories: dict[str, Rewards]
) -> dict[str, float]:
    """Take steps until `budget` tokens are generated; return what was generated."""
    steps = rollouts = tokens = prompts = 0
    count, per_kept = arm.prompts, 1.0
    while True:
        if prompts:
            count = min(arm.prompts, round((budget - tokens) * prompts / tokens))
        if count < 1:
            return {"steps": steps, "rollouts": rollouts, "tokens": tokens}
        groups = draw_batch(run, arm, count, steps, histories, per_kept)
        take_step(run, arm, groups)
        steps, prompts, per_kept = steps + 1, prompts + count, len(groups) / count
        rollouts += sum(group.size for group in groups)
        tokens += sum(group.tokens for group in groups)


def draw_histories(
    run: TrainContext, arm: Arm, steps: int, histories: dict[str, Rewards]
) -> dict[str, Rewards]:
    """Return the histories of the prompts of the first steps, drawn by the run's initial policy.

    Args:
        run: run that has taken no step.
        arm: plan; without a history, the result is empty.
        steps: number of steps.
        histories: histories that were drawn before by prompt; missing ones are added.
    """
    if not arm.plan.has_history:
        return {}
    needed = {
        prompt.id: prompt
        for step in range(steps)
        for prompt in choose_prompts(run.config, run.train_prompts, step)
        if prompt.id not in histories
    }
    if needed:
        sampling = Sampling.of(run.config.sampler_options, "history")
        size = arm.setting.history
        rollouts = run.engine.sample(list(needed.values()), size, sampling)
        rewards_PG = summed_rewards(run.task, rollouts)
        for name, rewards in zip(needed, rewards_PG, strict=True):
            histories[name] = (tuple(sorted(map(float, rewards))),)
    return histories


# Number of prompts per step of an arm that tests the effect of the number of steps alone: with it,
# `fixed` takes about as many steps as `refill`.
SMALL_STEPS = {"fixed, 8, small steps": 6}
# Plan, size and estimate of each arm, by policy and name; the first arm is the reference.
PILOT_COMMIT = ("pilot_commit", 8, "per_rollout")
ARMS = {
    "tiny": {
        "fixed, 8": ("fixed", 8, "per_rollout"),
        "fixed, 4": ("fixed", 4, "per_rollout"),
        "fixed, 8, small steps": ("fixed", 8, "per_rollout"),
        "refill, 8": ("refill", 8, "per_rollout"),
        "pilot_commit, 8": PILOT_COMMIT,
        "p_one_minus_p, 4": ("p_one_minus_p", 4, "per_rollout"),
    },
    "tiny_base": {
        "fixed, 8": ("fixed", 8, "per_rollout"),
        "refill, 8": ("refill", 8, "per_rollout"),
        "pilot_commit, 8": PILOT_COMMIT,
        "dynamo, 8": ("dynamo", 8, "per_rollout"),
    },
}


def fitted_arm(pool: ScorePool, plan: str, size: int, estimate: str) -> Arm:
    """Return an arm with the price and the prior of a pool, but without the number of prompts."""
    most = min(MOST_TIMES_MEAN * size, pool.rewards_PN.shape[1])
    all_P = np.ones(len(pool.rewards_PN), dtype=bool)
    setting = fitted_setting(pool, PLANS[plan], Setting(size, most=most), all_P, seed=0)
    return Arm(PLANS[plan], estimate, setting)


def measured_arm(
    pool: ScorePool, arm: Arm, rollouts: int, prompts: int | None
) -> tuple[int, float]:
    """Return the number of prompts per step and sqrt(E||ghat||^2).

    Args:
        pool: pool of the initial policy.
        arm: plan.
        rollouts: expected number of generated rollouts per step, n.
        prompts: number of prompts per step, if it does not depend on `rollouts`.
    """
    sums = LevelSums(pool, np.ones(pool.rewards_PN.shape))
    paths = paths_of(arm.plan, arm.setting, [float(level) for level in sums.level_L])
    of_plan = plan_terms(sums, paths, weights_of(paths, arm.estimate))
    kept_P = of_plan.terms.kept_P
    kept = 1.0 if kept_P is None else float(mean_over_prompts(kept_P)[0])
    generated = float(mean_over_prompts(of_plan.generated_P)[0]) / kept
    prompts = prompts or max(1, round(rollouts / generated))
    gradient_PR = np.einsum(
        "pn,pnr->pr", pool_gradient_weights(pool.rewards_PN), pool.features_PNR, optimize=True
    )
    energy_D = update_moments(of_plan.terms, gradient_PR, prompts, None).energy_D
    return prompts, math.sqrt(energy_D[0]) * arm.scale / arm.setting.size


def measured_arms(name: str, folder: Path) -> dict[str, dict]:
    """Measure the efficiency and the step length of a policy's arms, and fit their settings."""
    policy = POLICIES[name]
    study = compose_config("mse", [*policy.data, "launch.workers=1"])
    task = configured_task(study.task_options, study.model, configured_tokenizer(study.model))
    pool, _ = build_pool(study, task.prompts("study"), folder / name)
    budget = policy.steps * policy.rollouts * float(pool.lengths_PN.mean())
    results = {}
    for arm_name, (plan, size, estimate) in ARMS[name].items():
        arm = fitted_arm(pool, plan, size, estimate)
        prompts, length = measured_arm(pool, arm, policy.rollouts, SMALL_STEPS.get(arm_name))
        (row,) = (
            row
            for row in plan_efficiencies(pool, [plan], [size], GROUP_SIZES, policy.rollouts, seed=0)
            if row.estimate == estimate
        )
        assert row.at_generated is not None
        results[arm_name] = {
            "efficiency": row.at_generated.estimate, "interval": list(row.at_generated),
            "length": length, "prompts": prompts, "budget": budget, "plan": plan,
            "estimate": estimate, "setting": vars(arm.setting),
            "max_completion_length": study.max_completion_length,
        }  # fmt: skip
    return results


def arm_of(measured: dict) -> Arm:
    """Return the arm that `measured_arms` stored."""
    setting = Setting(**measured["setting"] | {"prior": tuple(measured["setting"]["prior"])})
    return Arm(PLANS[measured["plan"]], measured["estimate"], setting, measured["prompts"])


def overrides(cell: Cell, arms: dict[str, dict]) -> list[str]:
    """Return the overrides for `train` of a run.

    Args:
        arms: results of `measured_arms`.
    """
    policy, arm = POLICIES[cell.policy], arms[cell.loss]
    rate = cell.factor * policy.rates[cell.optimizer]
    if cell.optimizer == "sgd":
        # The gradient of `trl_dr_grpo`, for which the rate was chosen, divided by that of `fixed`.
        rate *= (1 - 1 / UNIT) / arm["max_completion_length"]
        rate *= next(iter(arms.values()))["length"] / arm["length"]
    size = arm["setting"]["size"]
    return [
        *policy.data, "objective=algorithm1", f"optimizer={cell.optimizer}",
        f"learning_rate={rate:g}", f"seed={cell.seed}", f"group_size={size}",
        f"budget.rollouts={size * arm['prompts']}", f"max_steps={policy.steps}",
        f"eval.num_generations={policy.evaluations}", "rollout_batch_size=1024",
    ]  # fmt: skip


def selected(
    rows: list[tuple[Cell, dict[str, float]]],
    arms: dict[str, dict[str, dict]],
    plans: Sequence[str] | None,
    seeds: Sequence[int],
) -> tuple[list[tuple[Cell, dict[str, float]]], dict[str, dict[str, dict]]]:
    """Return the runs and arms with these seeds and plans (None: all plans)."""
    kept = {
        policy: {name: arm for name, arm in of_policy.items() if plans is None or name in plans}
        for policy, of_policy in arms.items()
    }
    return [(cell, row) for cell, row in rows if cell.seed in seeds], kept


def report(rows: list[tuple[Cell, dict[str, float]]], arms: dict[str, dict[str, dict]]) -> None:
    """Print the tables as Markdown."""
    groups = sides(rows, arms)
    seconds = sum(row["seconds"] for _, row in rows)
    print(f"{len(rows)} runs, {seconds / 60:.0f} minutes\n")
    print_gains(groups, arms, "plan")
    family = sum(len(side.losses) - 1 for side in groups)
    print("\n| policy, optimizer | gain | detectable difference | after Holm | at an end |")
    print("|---|---|---|---|---|")
    for side in groups:
        seen = [number(detectable(side, alpha)) for alpha in (0.05, 0.05 / family)]
        low, high = ((side.chosen_LS == end).mean() for end in (0, len(FACTORS) - 1))
        print(
            f"| {side.policy}, {side.optimizer} | {number(float(side.gain_LS[0].mean()))} | "
            f"{' | '.join(seen)} | lowest {low:.0%}, highest {high:.0%} |"
        )
    print("\n| policy | plan | steps | rollouts | tokens: mean, standard deviation |")
    print("|---|---|---|---|---|")
    for policy, of_policy in arms.items():
        for name in of_policy:
            ended = [x for cell, x in rows if (cell.policy, cell.loss) == (policy, name)]
            # A run whose numbers became infinite or NaN has no counts.
            counts = [x for x in ended if x.get("tokens")]
            if counts:
                steps, rollouts, tokens = (np.array([x[key] for x in counts]) for key in COUNTS)
                print(
                    f"| {policy} | `{name}` | {steps.mean():.1f} | {rollouts.mean():.0f} | "
                    f"{tokens.mean():.0f}, {tokens.std():.0f} |"
                )
    print_rates(groups, rows, "plan")


def main() -> None:
    """Entry."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--results",
        type=Path,
        help="file of JSON lines, one per run; only missing runs are trained",
    )
    parser.add_argument(
        "--only-analysis", type=Path, metavar="FILE", help="file of finished runs to analyse"
    )
    parser.add_argument(
        "--record", type=Path, metavar="FILE.csv", help="write a record with one line per run"
    )
    parser.add_argument(
        "--pools", type=Path, help="folder of scored pools (default: a temporary folder)"
    )
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument(
        "--optimizers", nargs="+", default=["sgd", "adamw"], choices=["sgd", "adamw"]
    )
    parser.add_argument("--plans", nargs="+", help="names of `ARMS` (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)))
    asked = parser.parse_args()
    file = asked.only_analysis or asked.results
    if file is None:
        parser.error("give --results FILE or --only-analysis FILE")
    torch.set_num_threads(1)
    if file.suffix == ".csv":
        report(*selected(*recorded(file, "plan", COUNTS), asked.plans, asked.seeds))
        return
    measured = file.with_suffix(".plans.json")
    if not measured.exists():
        with tempfile.TemporaryDirectory() as folder:
            pools = asked.pools or Path(folder)
            results = {policy: measured_arms(policy, pools) for policy in POLICIES}
        measured.write_text(json.dumps(results, indent=1))
    arms = json.loads(measured.read_text())
    if not asked.only_analysis:
        starts: dict[tuple[str, int], float] = {}
        histories: dict[tuple[str, int], dict[str, Rewards]] = defaultdict(dict)

        def train_cell(cell: Cell) -> dict[str, float]:
            """Train under the cell's plan."""
            of_cell = arms[cell.policy][cell.loss]
            arm = arm_of(of_cell)

            def take_steps(run: TrainContext) -> dict[str, float]:
                """Spend the budget."""
                known_histories = draw_histories(
                    run, arm, 2 * run.config.max_steps, histories[cell.policy, cell.seed]
                )
                return spend(run, arm, of_cell["budget"], known_histories)

            return train(cell, overrides(cell, arms[cell.policy]), starts, take_steps)

        cells = [
            Cell(policy, optimizer, name, factor, seed)
            for seed in asked.seeds
            for policy in asked.policies
            for optimizer in asked.optimizers
            for name in arms[policy]
            if asked.plans is None or name in asked.plans
            for factor in FACTORS
        ]
        run_missing(file, cells, train_cell)
    runs = list(read(file))
    if asked.record:
        record(asked.record, runs, arms, "plan", COUNTS)
    report(*selected(runs, arms, asked.plans, asked.seeds))


if __name__ == "__main__":
    main()
