"""How often `scaling.rules` is right: the best G of a rule at n rollouts, and whether it grows.

    python scripts/benchmarks/rule_sizes.py                   # 40 prompts x 64, 200 pools
    python scripts/benchmarks/rule_sizes.py --prompts 20 --completions 32 --pools 100

Prompts of six outcomes with 0/1 rewards, whose errors are known exactly by a sum over the number of
right answers. Pools are drawn again and again; of each, `group_std` against g / sigma and
`leave_one_out` are replayed at every G, given the prompts. Printed:

    alike    how often the sizes "not significantly worse than the best" hold the truly best one of
             those measured, over the six n (at least 95 % is promised of each)
    best     how often the point estimate is that size
    growth   how often the interval of 2 b^2 / C1 holds its true value at the largest G
    grows    how often a rule is said to grow with n: of leave_one_out, which does not, falsely
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from grpo_ustat.estimators.moments import centred
from grpo_ustat.gap.normalised import normalised_moments, right_and_wrong
from grpo_ustat.mse.replay import replay
from grpo_ustat.mse.rule_sizes import ROLLOUTS, RuleLaw, growth, rule_sizes
from grpo_ustat.records import ScorePool

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/helpers"))
from tabular import TabularPolicy  # noqa: E402

EPSILON = 1e-9  # what group_std adds to a standard deviation


def prompts_of(count: int) -> TabularPolicy:
    """Prompts with V from 0.25 to 0.75, so that nearly all pools can judge g / sigma."""
    rng = np.random.default_rng(3)
    rewards = (rng.random((9 * count, 6)) < 0.4).astype(float)
    rewards[:, 0], rewards[:, 1] = 1, 0
    features, parameters = rng.normal(size=(9 * count, 6, 5)), 0.3 * rng.normal(size=5)
    policy = TabularPolicy(features, parameters, rewards)
    value_P = (policy.probabilities_PY * rewards).sum(axis=1)
    kept = np.flatnonzero(abs(value_P - 0.5) <= 0.25)[:count]
    return TabularPolicy(features[kept], parameters, rewards[kept])


def pool_of(policy: TabularPolicy, count: int, rng: np.random.Generator) -> ScorePool:
    """So many completions of each prompt."""
    outcome_PN = policy.sample(count, rng)
    prompt_P1 = np.arange(len(outcome_PN))[:, None]
    z, scores = policy.rewards_PY[prompt_P1, outcome_PN], policy.scores_PYD[prompt_P1, outcome_PN]
    return ScorePool(
        rewards_PN=z,
        gram_PNN=np.einsum("pid,pjd->pij", scores, scores),
        lengths_PN=np.ones_like(z, dtype=int),
        features_PNR=scores,
        centred_sums_PR=np.einsum("pn,pnd->pd", centred(z), scores),
    )


def exact_law(policy: TabularPolicy, size: int, rule: str) -> RuleLaw:
    """Of `group_std` against g / sigma, or of `leave_one_out` against g, without an interval."""
    moments = right_and_wrong(policy.probabilities_PY, policy.scores_PYD, policy.rewards_PY)
    exact = normalised_moments(moments, size, EPSILON)
    g_PK = np.einsum("py,pyk->pk", policy.probabilities_PY * policy.rewards_PY, policy.scores_PYD)
    sigma_P, norm_P, shrink = np.sqrt(moments.var_z), np.sqrt(moments.g_sq), (size - 1) / size
    if rule == "group_std":  # which subtracts the group's own mean
        mean_PK = shrink * g_PK * (1 / sigma_P + exact.bias / norm_P)[:, None]
        tau_PK, variance_P = g_PK / sigma_P[:, None], shrink**2 * exact.variance
    else:
        mean_PK, tau_PK, variance_P = g_PK, g_PK, exact.plain_variance * moments.var_z
    tau_K, mu_K = tau_PK.mean(axis=0), mean_PK.mean(axis=0)
    spread = np.square(mean_PK).sum(axis=1).mean() - mu_K @ mu_K
    bias = mu_K - tau_K
    whole = np.array([bias @ bias, spread + variance_P.mean(), spread, mu_K @ tau_K, tau_K @ tau_K])
    target = "g_over_sigma" if rule == "group_std" else "expected_reward"
    return RuleLaw(rule, size, target, whole, np.tile(whole[:, None, None], (1, 1, 4)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--completions", type=int, default=64)
    parser.add_argument("--pools", type=int, default=200)
    parser.add_argument("--draws", type=int, default=400)
    parser.add_argument("--group-sizes", type=int, nargs="+", default=[2, 4, 8, 16])
    options = parser.parse_args()

    policy = prompts_of(options.prompts)
    rules = {"group_std": "g_over_sigma", "leave_one_out": "expected_reward"}
    laws = {r: [exact_law(policy, g, r) for g in options.group_sizes] for r in rules}
    best = {
        (rule, n): min(own, key=lambda law: float(law.error(law.whole_5, n, "mse"))).group_size
        for rule, own in laws.items()
        for n in ROLLOUTS
    }
    rate = growth(laws["group_std"][-1]).estimate
    print(f"growth 2 b^2 / C1 = {rate:.3g}; truly best G at n = {ROLLOUTS}:")
    for rule in rules:
        print(f"  {rule}: {[best[rule, n] for n in ROLLOUTS]}")

    rng = np.random.default_rng(1)
    held = {key: 0 for key in best}
    point, seen = dict(held), dict(held)
    covers, grows = 0, dict.fromkeys(rules, 0)
    for number in range(options.pools):
        points = replay(
            pool_of(policy, options.completions, rng), list(rules),
            {"group_std": {"epsilon": EPSILON}}, options.group_sizes,
            [("all_questions_once", options.prompts)], options.draws, number, "completions",
        )  # fmt: skip
        own = [one.law for one in points if one.law is not None]
        for row in rule_sizes(own):
            rule = row.baseline
            if row.measure != "mse" or row.target != rules[rule]:
                continue
            grows[rule] += row.grows
            if rule == "group_std" and row.growth is not None:
                covers += row.growth[1] <= rate and not rate > row.growth[2]
            for cell in row.sizes:
                key = rule, cell.n
                seen[key] += 1
                held[key] += best[key] in cell.alike
                point[key] += best[key] == cell.group_size
    print(f"\n{options.pools} pools of {options.prompts} x {options.completions}")
    for rule in rules:
        print(f"  {rule:14} judged in {seen[rule, ROLLOUTS[0]]} pools")
        for what, counts in (("alike", held), ("best", point)):
            shares = [f"{counts[rule, n] / max(seen[rule, n], 1):.2f}" for n in ROLLOUTS]
            print(f"  {rule:14} {what:6} {' '.join(shares)}")
        print(f"  {rule:14} grows  {grows[rule] / options.pools:.3f}")
    print(f"  group_std      growth {covers / options.pools:.3f}")


if __name__ == "__main__":
    main()
