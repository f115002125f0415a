"""Corollaries 9 and 10: GRPO's limit beside the oracle's, that beside other baselines'."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grpo_ustat.estimators.covariance import parts
from grpo_ustat.estimators.gap import limit_weights
from grpo_ustat.policy.beds import Bed
from grpo_ustat.theorems.algorithm1 import Estimator, Paths
from grpo_ustat.theorems.finding import Claim, Curve, Finding, Panel, decided
from grpo_ustat.theorems.jobs import LEVEL, Job, Rate, mean_interval, simulated
from grpo_ustat.theorems.theorem8 import nearing, scaled
from grpo_ustat.theorems.truth import assumption2, bed_facts, limit_weighting, noise

STATEMENT = (
    "As G grows GRPO's limit law becomes the oracle's: at fixed n = B G the difference of their "
    "weights, times n, falls like 1/(G-1). And if E[S S' (Z - V)] = 0 no baseline that depends on "
    "the prompt alone has smaller weights than V."
)
LARGE = tuple(2**k for k in range(1, 12))  # group sizes of enumerated weights
SHIFTS = tuple(np.linspace(-0.5, 0.5, 21))  # of a baseline from V
ROUNDING = 1e-9


def corollaries(
    bed: Bed,
    rollouts: int,
    group_sizes: Sequence[int],
    rate: Rate,
    steps: int,
    replicates: int,
    seed: int,
    workers: int,
) -> Finding:
    """Enumerate the weights, and run GRPO and the oracle on the same draws.

    Args:
        bed: the policy.
        rollouts: n.
        group_sizes: G that divide n, each run with both estimators.
        rate: c / (t + offset).
        steps: T at which the gaps are compared; 4 or more, a quarter of it tells where they go.
        replicates, seed, workers: see `simulated`.
    """
    pairs = [
        tuple(Estimator(name, rollouts // g, g) for name in ("leave_one_out", "oracle"))
        for g in group_sizes
    ]
    both = steps // 4, steps
    jobs = [Job(one, rate, both) for pair in pairs for one in pair]
    paths, drawn = simulated(jobs, bed, replicates, seed, workers)
    rows, claims = [], _exact(bed, rate.value)
    for place, (grpo, oracle) in enumerate(pairs):
        mine = paths[2 * place : 2 * place + 2]
        found = [_row(bed, rate, (grpo, oracle), mine, x, len(pairs)) for x in range(len(both))]
        claims.append(_paired(*found, len(pairs)))
        rows += found
    claims += _baselines(bed, rate.value)
    fails = assumption2(bed, bed.best_K)
    return Finding(
        statement=STATEMENT,
        bed=bed_facts(bed),
        claims=claims,
        panels=[_falling(rows[1::2], bed, rate.value), _shifted(bed, rate.value)],
        rows=rows,
        answer=_answer(claims, fails),
        notes=[
            "at fixed B the relative distance falls like 1/G^2, as Cov g(X) is there at every G",
            f"Assumption 2 as a matrix {'holds' if fails < ROUNDING else 'fails'} on this bed "
            f"({fails:.2g} of E[S S'])",
        ],
        rollouts=drawn,
    )


def _sum(bed: Bed, c: float, one: Estimator) -> float:
    return float(limit_weights(bed.curvature_KK, noise(bed, bed.best_K, one), c).sum())


def _apart(bed: Bed, c: float, num_prompts: float, size: int) -> float:
    """Sum of GRPO's weights minus the oracle's."""
    both = [_sum(bed, c, Estimator(x, num_prompts, size)) for x in ("leave_one_out", "oracle")]
    return both[0] - both[1]


def _exact(bed: Bed, c: float) -> list[Claim]:
    """Slopes in G of what is enumerated; n or B is 1, since both only divide."""
    sizes = np.array(LARGE, dtype=float)
    fixed_n = np.array([g * _apart(bed, c, 1, int(g)) for g in sizes])
    flat = fixed_n * (sizes - 1)
    spread = float(flat.max() / flat.min() - 1)
    share = [
        _apart(bed, c, 1, int(g)) / _sum(bed, c, Estimator("oracle", 1, int(g))) for g in sizes
    ]
    slope = float(np.log(share[-1] / share[-2]) / np.log(sizes[-1] / sizes[-2]))
    how = f"enumerated, G = {LARGE[0]} ... {LARGE[-1]}"
    return [
        Claim(
            "n (sum w_grpo - sum w_oracle) (G - 1) at fixed n, largest over smallest - 1", 0.0,
            spread, None, None, decided(spread < 1e-6), f"{how}; agrees below 1e-6",
        ),
        Claim(
            "slope in log G of the relative distance of the weights at fixed B", -2.0, slope,
            None, None, decided(abs(slope + 2) < 0.01), f"{how}, the last two; within 0.01",
        ),
    ]  # fmt: skip


def _row(bed: Bed, rate: Rate, pair: tuple, paths: list[Paths], place: int, among: int) -> dict:
    """Both estimators on the same draws, at one recorded step."""
    grpo, (ours, theirs) = pair[0], (scaled(path, rate, place) for path in paths)
    mean, low, high = mean_interval(grpo.rollouts * (ours - theirs), among)
    sums = [_sum(bed, rate.value, one) for one in pair]
    return {
        "group_size": grpo.group_size, "num_prompts": grpo.num_prompts,
        "step": int(paths[0].steps_S[place]), "grpo_weights": sums[0], "oracle_weights": sums[1],
        "predicted_difference": grpo.rollouts * (sums[0] - sums[1]), "difference": mean,
        "low": low, "high": high, "replicates": len(ours),
    }  # fmt: skip


def _paired(before: dict, last: dict, among: int) -> Claim:
    half = (last["high"] - last["low"]) / 2
    agrees = nearing(last, before, lambda x: abs(x["difference"] - x["predicted_difference"]), half)
    return Claim(
        f"G = {last['group_size']}: n T (gap of GRPO - gap of the oracle)",
        last["predicted_difference"], last["difference"], last["low"], last["high"],
        decided(agrees), f"{LEVEL:.0%} interval, one of {among} at once, {last['replicates']} "
        f"replicates on the same draws, T = {last['step']}; outside it but nearing: not decided",
    )  # fmt: skip


def shifted_sum(bed: Bed, c: float, shift: float) -> float:
    """Sum of the weights, B = G = 1, of the baseline V + shift."""
    probability_PYR, score_PYKR = bed.law(bed.best_K[:, None])
    probability, score = probability_PYR[..., 0], score_PYKR[..., 0]
    centred_PY = bed.rewards_PY - bed.value(probability_PYR) - shift
    second = np.einsum("py,pyk,pyl->kl", probability * np.square(centred_PY), score, score)
    g_PK = np.einsum("py,pyk->pk", probability * bed.rewards_PY, score)
    mean = g_PK.mean(axis=0)
    sigma = second / len(g_PK) - np.outer(mean, mean)
    return float(np.trace(limit_weighting(bed.curvature_KK, c) @ sigma))


def _baselines(bed: Bed, c: float) -> list[Claim]:
    """V beside other numbers for each prompt; in the order of matrices too where it can be."""
    sums = {shift: shifted_sum(bed, c, shift) for shift in SHIFTS}
    best = min(sums, key=sums.get)
    holds = assumption2(bed, bed.best_K) < ROUNDING
    excess = {name: _excess(bed, name) for name in ("none", "optimal")}
    how = "enumerated; asked only where Assumption 2 holds"
    return [
        Claim(
            "shift from V of the baseline with the smallest weights", 0.0, float(best), None, None,
            decided(abs(best) < ROUNDING if holds else None), f"{how}, {len(SHIFTS)} shifts",
        ),
        *(
            Claim(
                f"smallest eigenvalue of Sigma({name}) - Sigma(V), B = G = 1", ">= 0", value,
                None, None, decided(value >= -ROUNDING if holds else None), how,
            )
            for name, value in excess.items()
        ),
    ]  # fmt: skip


def _excess(bed: Bed, baseline: str) -> float:
    law = bed.law(bed.best_K[:, None])
    sigma = [parts(*law, bed.rewards_PY, x).covariance(1, 1)[..., 0] for x in (baseline, "oracle")]
    return float(np.linalg.eigvalsh(sigma[0] - sigma[1])[0])


def _answer(claims: list[Claim], fails: float) -> str:
    held = sum(claim.verdict == "agrees" for claim in claims)
    optimal = "" if fails < ROUNDING else "; Assumption 2 fails here, so V need not be best"
    return f"{held} of {len(claims)} predictions agree{optimal}."


def _falling(rows: list[dict], bed: Bed, c: float) -> Panel:
    x = [row["group_size"] for row in rows]
    y, low, high = ([row[key] for row in rows] for key in ("difference", "low", "high"))
    line = [g * _apart(bed, c, 1, g) for g in x]
    name = "GRPO - oracle"
    curves = [Curve(name, x, y, low, high), Curve(name, x, line, predicted=True)]
    return Panel("fixed n = B G", "group size G", "n T x difference of the mean gaps", curves, "xy")


def _shifted(bed: Bed, c: float) -> Panel:
    y = [shifted_sum(bed, c, shift) for shift in SHIFTS]
    curves = [Curve("V + shift", list(SHIFTS), y, predicted=True)]
    return Panel("any baseline of the prompt", "shift from V", "sum of weights, B = G = 1", curves)
