"""How well replay judges a rule against its limit as G grows, by the completions behind a divisor.

Coin-like questions of known chances V (two right and two wrong answers each, shared parameters),
pools of N, one study after another; every study tells how few completions its worst question had
behind sigma or V (`fewest`), and whether the 95 % interval of the error against its limit held the
enumerated truth. `LEAST_SUPPORT` of grpo_ustat/mse/replay.py is the smallest `fewest` from
which coverage stays at .93 or more. The rows `own_mean` are the error against the rule's own mean
at that G, which needs no such limit.

    python scripts/benchmarks/limit_targets.py --studies 60
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from grpo_ustat.estimators.baselines import BASELINES, advantages
from grpo_ustat.estimators.minibatch import decompose
from grpo_ustat.estimators.moments import centred
from grpo_ustat.mse import replay as study_replay
from grpo_ustat.records import BaselineContext, ScorePool

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/helpers"))
from tabular import TabularPolicy  # noqa: E402

RULES = {
    "maxrl": {"epsilon": 1e-6},
    "group_std": {"epsilon": 1e-4},
    "quantile": {"level": 0.4, "epsilon": 1e-4},
    "pods": {"share": 0.5, "epsilon": 1e-4},
}
ONCE = [("all_questions_once", None)]
FEWEST = ((0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 7), (8, 11), (12, 10**6))


def coins(value_P: np.ndarray, parameters: int = 6, seed: int = 0) -> TabularPolicy:
    """Questions with these chances of a right answer."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(len(value_P), 4, parameters))
    theta = 0.5 * rng.normal(size=parameters)
    odds = np.exp(features @ theta).reshape(-1, 2, 2).sum(axis=2)
    shift = np.log(value_P / (1 - value_P)) - np.log(odds[:, 0] / odds[:, 1])
    right = np.zeros((len(value_P), 4, 1))
    right[:, :2, 0] = shift[:, None]
    rewards = np.tile([1.0, 1.0, 0.0, 0.0], (len(value_P), 1))
    return TabularPolicy(np.concatenate([features, right], axis=2), np.append(theta, 1.0), rewards)


def pool_of(policy: TabularPolicy, count: int, rng: np.random.Generator) -> ScorePool:
    """N completions of each question, their scores in full."""
    outcomes = policy.sample(count, rng)
    rows = np.arange(len(outcomes))[:, None]
    scores, z = policy.scores_PYD[rows, outcomes], policy.rewards_PY[rows, outcomes]
    return ScorePool(
        rewards_PN=z,
        gram_PNN=np.einsum("pid,pjd->pij", scores, scores),
        lengths_PN=np.ones_like(outcomes),
        features_PNR=scores,
        centred_sums_PR=np.einsum("pn,pnd->pd", centred(z), scores),
    )


def true_errors(policy: TabularPolicy, name: str, size: int) -> dict[str, float]:
    """Exact error of all questions once against the rule's own mean and its limit."""
    groups = np.array(list(itertools.product(range(4), repeat=size)))
    e, mu = [], []
    for x, chance_Y in enumerate(policy.probabilities_PY):
        chance = chance_Y[groups].prod(axis=1)
        weights = advantages(name, policy.rewards_PY[x][groups], BaselineContext(), RULES[name])
        estimate = np.einsum("rg,rgd->rd", weights / size, policy.scores_PYD[x][groups])
        e.append(chance @ np.square(estimate).sum(axis=1))
        mu.append(chance @ estimate)
    mu_PD, limit, result = np.array(mu), BASELINES[name].target, {}
    scale_P = study_replay.target_scale(limit, policy.moments(), RULES[name])
    limit_PD = scale_P[:, None] * policy.gradient_PD
    for target, tau_PD in (("own_mean", mu_PD), (limit, limit_PD)):
        mean, tau = mu_PD.mean(axis=0), tau_PD.mean(axis=0)
        p = np.square(mu_PD).sum(axis=1).mean()
        products = mean @ mean, mean @ tau, tau @ tau
        result[target] = decompose(*ONCE[0], len(mu_PD), np.mean(e), p, *products)[0]
    return result


def main() -> None:
    """Print coverage and mean error over truth by rule, target and the fewest completions."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--studies", type=int, default=60, help="of every cell")
    parser.add_argument("--draws", type=int, default=1000, help="groups a question")
    parser.add_argument("--group-size", type=int, default=4, help="G")
    parser.add_argument("--pools", type=int, nargs="+", default=[32, 64], help="N")
    parser.add_argument("--questions", type=int, nargs="+", default=[10, 40], help="m")
    parser.add_argument("--lowest", type=int, nargs="+", default=[1, 3, 6, 10, 15], help="N V")
    options = parser.parse_args()
    study_replay.LEAST_SUPPORT = 0  # measure what would be refused
    hits, ratios = defaultdict(list), defaultdict(list)
    for count, questions, lowest in itertools.product(
        options.pools, options.questions, options.lowest
    ):
        for spread in (True, False):  # up to 1 - V, or half of them there and half fair
            v = np.linspace(lowest / count, 1 - lowest / count, questions)
            if not spread:
                v = np.where(np.arange(questions) % 2, lowest / count, 0.5)
            policy, rng = coins(v), np.random.default_rng([count, questions, lowest, spread])
            truth = {name: true_errors(policy, name, options.group_size) for name in RULES}
            for study in range(options.studies):
                pool = pool_of(policy, count, rng)
                rows = study_replay.replay(
                    pool, list(RULES), RULES, [options.group_size], ONCE, options.draws, study,
                    "completions",
                )  # fmt: skip
                for row in rows:
                    if row.target == "expected_reward":
                        continue
                    exact = truth[row.baseline][row.target]
                    fewest = study_replay.support(pool.rewards_PN, BASELINES[row.baseline].target)
                    band = next(b for b in FEWEST if b[0] <= fewest.min() <= b[1])
                    for key in ((questions, band), ("all", band)):
                        hits[row.baseline, row.target, *key].append(
                            row.mse.low <= exact <= row.mse.high
                        )
                        ratios[row.baseline, row.target, *key].append(row.mse.estimate / exact)
    print("rule       target        m    fewest   studies  coverage  estimate/truth")
    for key in sorted(hits, key=str):
        name, target, questions, (low, high) = key
        band = f"{low}" if low == high else f"{low}-{high}" if high < 10**6 else f"{low}+"
        print(
            f"{name:10} {target:13} {questions!s:4} {band:8} {len(hits[key]):7} "
            f"{np.mean(hits[key]):9.3f} {np.mean(ratios[key]):12.3f}"
        )


if __name__ == "__main__":
    main()
