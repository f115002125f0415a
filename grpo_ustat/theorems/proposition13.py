"""Proposition 13: with normalised advantages the arcsin objective is what training maximises."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats
from scipy.optimize import brentq

from grpo_ustat.policy.beds import Bed
from grpo_ustat.theorems.algorithm1 import Estimator, Paths
from grpo_ustat.theorems.finding import Claim, Curve, Finding, Panel, decided
from grpo_ustat.theorems.jobs import LEVEL, Job, Rate, mean_interval, simulated
from grpo_ustat.theorems.limits import settled
from grpo_ustat.theorems.truth import bed_facts

STATEMENT = (
    "With 0/1 rewards, advantages divided by the group's standard deviation follow, for large G, "
    "the gradient of E[2 arcsin sqrt(V(X))] instead of that of E[V(X)]: where the two have "
    "different maximisers, normalised GRPO goes to the first, GRPO without it to the second."
)


def proposition13(
    bed: Bed,
    group_sizes: Sequence[int],
    num_prompts: int,
    epsilon: float,
    rate: Rate,
    steps: int,
    replicates: int,
    seed: int,
    workers: int,
) -> Finding:
    """Run GRPO with and without normalisation and see where replicates end.

    Args:
        bed: of one coordinate, rewards 0/1.
        group_sizes: G; at each the mean field of the normalised estimator is enumerated.
        num_prompts: B.
        epsilon: added to the standard deviation.
        rate: of learning, falling.
        steps: T.
        replicates, seed, workers: see `simulated`.
    """
    plain = Estimator("leave_one_out", num_prompts, max(group_sizes))
    normalised = [Estimator("group_std", num_prompts, g, epsilon) for g in group_sizes]
    jobs = [Job(one, rate, (steps // 4, steps)) for one in (plain, *normalised)]
    paths, drawn = simulated(jobs, bed, replicates, seed, workers)
    arcsin = root(bed, lambda p: 1 / np.sqrt(p * (1 - p)))
    there = {one: root(bed, _pull(one)) for one in (plain, *normalised)}
    ends = {"arcsin_maximiser": arcsin, "j_maximiser": float(bed.best_K[0])}
    rows = [
        _row(one, path, rate, {"predicted": there[one]} | ends, len(jobs))
        for one, path in zip(there, paths, strict=True)
    ]
    claims = [_claim(row, path, len(jobs)) for row, path in zip(rows, paths, strict=True)]
    claims += _limits(normalised, there, arcsin, float(bed.best_K[0]))
    return Finding(
        statement=STATEMENT,
        bed=bed_facts(bed) | {"u that maximises J": float(bed.best_K[0])}
        | {"u that maximises the arcsin objective": arcsin},
        claims=claims,
        panels=[_panel(rows, arcsin, float(bed.best_K[0])), _objectives(bed)],
        rows=rows,
        answer=_answer(claims, rows, arcsin),
        notes=[
            "at a finite G the normalised estimator follows a field of its own, sum over prompts "
            "of w_G(V) grad V with w_G enumerated over the binomial law of successes; its root is "
            "what is predicted at that G, and tends to the arcsin maximiser",
        ],
        rollouts=drawn,
    )  # fmt: skip


def weight(group_size: int, epsilon: float, value: float) -> float:
    r"""w_G(V): the expected normalised gradient of a prompt is `w_G(V) grad V`, for 0/1 rewards.

    With k successes of G the advantages are `(z - k/G) / (std + epsilon)` and
    `E[s | z] = grad V / V` or `-grad V / (1 - V)`, so
    `w_G = E[ k/G (1 - k/G) / (std_k + epsilon) ] / (V (1 - V))`.

    >>> round(weight(4096, 0.0, 0.5), 2)  # 1 / sqrt(V (1 - V))
    2.0
    """
    k = np.arange(1, group_size)
    share = k / group_size
    std = np.sqrt(share * (1 - share) * group_size / (group_size - 1))
    gained = share * (1 - share) / (std + epsilon)
    return float((stats.binom.pmf(k, group_size, value) * gained).sum() / (value * (1 - value)))


def _pull(one: Estimator) -> Callable[[np.ndarray], np.ndarray]:
    if one.baseline == "leave_one_out":
        return np.ones_like
    return np.vectorize(lambda p: weight(one.group_size, one.epsilon, p))


def field(bed: Bed, pull: Callable, u: float) -> float:
    """Mean over prompts of pull(V) dV/du."""
    probability_PYR, score_PYKR = bed.law(np.array([[u]]))
    weighted = probability_PYR * bed.rewards_PY[..., None]
    slope_P = np.einsum("pyr,pykr->p", weighted, score_PYKR)
    return float((pull(weighted.sum(axis=1)[:, 0]) * slope_P).mean())


def root(bed: Bed, pull: Callable) -> float:
    """Where the field vanishes, within the bed's box about the maximiser of J."""
    centre, half = float(bed.best_K[0]), min(float(bed.box_K[0]), 10.0)
    found = brentq(lambda u: field(bed, pull, u), centre - half, centre + half, xtol=1e-13)
    return round(float(found), 12)


def extrapolated(path: Paths, rate: Rate) -> np.ndarray:
    """Where each replicate would end but for the part of order 1/T, from T and a quarter of it.

    Richardson's: with `e(T) = e + b/T`, `e = e(T) + (e(T) - e(T')) / (T/T' - 1)`, T with offset.
    """
    early, late = path.steps_S + rate.offset
    return path.u_SKR[1, 0] + (path.u_SKR[1, 0] - path.u_SKR[0, 0]) / (late / early - 1)


def _row(one: Estimator, path: Paths, rate: Rate, ends: dict[str, float], among: int) -> dict:
    end = mean_interval(extrapolated(path, rate), among)
    return {
        "estimator": "GRPO" if one.baseline == "leave_one_out" else "normalised",
        "group_size": one.group_size, "num_prompts": one.num_prompts, **ends,
        "measured": end.estimate, "low": end.low, "high": end.high,
        "at_last_step": float(path.u_SKR[1, 0].mean()), "replicates": path.u_SKR.shape[2],
    }  # fmt: skip


def _claim(row: dict, path: Paths, among: int) -> Claim:
    """The mean end beside the field's root."""
    off, before = (abs(row[key] - row["predicted"]) for key in ("measured", "at_last_step"))
    verdict = settled(off, before, (row["high"] - row["low"]) / 2)
    where = "the maximiser of J" if row["estimator"] == "GRPO" else "the root of its field"
    return Claim(
        f"{row['estimator']}, G = {row['group_size']}: mean end of u, beside {where}",
        row["predicted"], row["measured"], row["low"], row["high"], decided(verdict),
        f"{LEVEL:.0%} interval, one of {among} at once, {row['replicates']} replicates, "
        f"T = {path.steps_S[-1]}, extrapolated to its limit; outside it but nearer than the last "
        "step is not decided",
    )  # fmt: skip


def _limits(normalised: list[Estimator], there: dict, arcsin: float, plain: float) -> list[Claim]:
    """The roots at growing G approach the arcsin maximiser, far from J's."""
    off = [abs(there[one] - arcsin) for one in normalised]
    how = "enumerated; G = " + ", ".join(str(one.group_size) for one in normalised)
    falls = all(b < a for a, b in zip(off, off[1:], strict=False))
    share = off[-1] / abs(arcsin - plain)
    return [
        Claim(
            "distance of the normalised root from the arcsin maximiser, falling in G", "falls",
            off[-1], None, None, decided(falls), how,
        ),
        Claim(
            "that distance at the largest G, over the distance of the two maximisers", "< 0.1",
            share, None, None, decided(share < 0.1), how,
        ),
    ]  # fmt: skip


def _answer(claims: list[Claim], rows: list[dict], arcsin: float) -> str:
    plain, last = rows[0], rows[-1]
    return (
        f"GRPO ends at {plain['measured']:.4f} (J is largest at {plain['j_maximiser']:.4f}), "
        f"normalised GRPO with G = {last['group_size']} at {last['measured']:.4f} (the arcsin "
        f"objective is largest at {arcsin:.4f})."
    )


def _panel(rows: list[dict], arcsin: float, plain: float) -> Panel:
    mine = [row for row in rows if row["estimator"] == "normalised"]
    x = [row["group_size"] for row in mine]
    y, low, high, line = (
        [row[k] for row in mine] for k in ("measured", "low", "high", "predicted")
    )
    curves = [
        Curve("normalised", x, y, low, high),
        Curve("normalised", x, line, predicted=True),
        Curve("arcsin maximiser", x, [arcsin] * len(x), predicted=True),
        Curve("maximiser of J", x, [plain] * len(x), predicted=True),
    ]
    return Panel("where training ends", "group size G", "mean end of u", curves, "x")


def _objectives(bed: Bed) -> Panel:
    """Both objectives below their maxima, each over its range."""
    half = float(min(bed.box_K[0], 10.0))
    u = bed.best_K[0] + np.linspace(-half, half, 81)
    value_PR = bed.value(bed.law(u[None])[0])
    both = {"J": value_PR.mean(axis=0)}
    both["arcsin"] = 2 * np.arcsin(np.sqrt(value_PR)).mean(axis=0)
    curves = [
        Curve(name, list(u), list((y - y.min()) / (y.max() - y.min())), predicted=True)
        for name, y in both.items()
    ]
    return Panel("the two objectives", "u", "share of its range", curves)
