r"""Theorem 12: what Algorithm 2's gradient estimate is worth after some updates on the same batch.

Setting, estimate and target are those of `grpo_ustat.theorems.offpolicy`: leave-one-out advantages
without normalisation, completions of pi_old, parameters theta_k after k updates by gradient ascent
on minibatches of their own. Given theta_k, bias and variance of the estimate from a fresh minibatch
are enumerated; only theta_k is random. To first order in the learning rate the bias is linear in
theta_k - theta_old, hence its square of order eta^2.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grpo_ustat.checks import ConfigError
from grpo_ustat.estimators.intervals import t_interval
from grpo_ustat.policy.sequences import MOST, SequencePolicy
from grpo_ustat.theorems import theorem12_shown as shown
from grpo_ustat.theorems.finding import Claim, Finding, decided
from grpo_ustat.theorems.limits import settled
from grpo_ustat.theorems.offpolicy import ZERO, Setting
from grpo_ustat.theorems.offpolicy_paths import Paths, measure
from grpo_ustat.theorems.ratio_lengths import ByLength, by_length

SLOPE_TOLERANCE, TOLERANCE = 0.05, 0.05

STATEMENT = (
    "Theorem 12: the mean squared error of Algorithm 2's gradient estimate without normalisation "
    "is a squared bias, from ratios of tokens in place of completions and from a KL term without a "
    "ratio, which vanishes with the learning rate, plus the oracle's variance / (B G) and "
    "O(1/(B G^2))."
)


def theorem12(
    policy: SequencePolicy,
    reward_PY: np.ndarray,
    *,
    reference: SequencePolicy,
    learning_rates: Sequence[float],
    updates: int,
    group_size: int,
    num_prompts: int,
    beta: float,
    replicates: int,
    seed: int,
    lengths: Sequence[int],
    shift: float,
) -> Finding:
    """Squared bias and variance after k updates, by learning rate and by completion length.

    Args:
        policy: pi_old, of at least 2 tokens.
        reward_PY: rewards of all its completions, such that no token decides them alone.
        reference: pi_ref, with the same prompts.
        learning_rates: at least three above 0; limits are read at the smallest.
        updates: k.
        group_size: G.
        num_prompts: B, drawn evenly and independently, of every minibatch.
        beta: weight of the KL term.
        replicates: random paths.
        seed: of the paths; the same completions are drawn at every learning rate.
        lengths: of completions, for what ratios cost, see `ratio_lengths`.
        shift: of the logit of a token there.

    Raises:
        ConfigError: fewer rates, paths, lengths, tokens or completions than that needs, rewards
            that leave no bias, or a path that runs away.
    """
    check_asked(
        len(policy.theta_LVV), learning_rates, updates, group_size, beta, replicates, lengths
    )
    setting = Setting(policy, reference, reward_PY, beta, num_prompts, group_size)
    paths = measure(setting, np.array(sorted(set(learning_rates))), updates, replicates, seed)
    if not paths.exact_leading > ZERO * paths.start["token_variance"]:
        raise ConfigError(
            f"reward_PY leaves a squared bias of {paths.exact_leading:.3g} eta^2 along the exact "
            "path: use rewards that no token decides alone, away from a stationary policy"
        )
    longer = by_length(lengths, shift, num_prompts, group_size)
    count = replicates * updates * num_prompts * group_size
    return Finding(
        statement=STATEMENT,
        bed=_bed(setting) | {"updates": updates, "paths": replicates},
        claims=_claims(paths, longer),
        panels=shown.panels(paths, longer),
        rows=shown.rows(paths, longer),
        answer=shown.answer(paths),
        notes=shown.notes(paths, longer),
        rollouts=count,
    )


def check_asked(
    tokens: int, learning_rates, updates, group_size, beta, replicates, lengths
) -> None:
    """Refuse what the study cannot be read from; of the arguments as in `theorem12`.

    Raises:
        ConfigError: fewer rates, paths, lengths, tokens or completions than that needs.
    """
    if len(set(learning_rates)) < 3 or min(learning_rates) <= 0:
        raise ConfigError(f"learning_rates={learning_rates}: use at least three, all above 0")
    longest = MOST.bit_length() - 1
    if len(set(lengths)) < 2 or min(lengths) < 1 or max(lengths) > longest:
        raise ConfigError(f"lengths={lengths}: use at least two, all of 1 to {longest}")
    least = {
        "the policy's tokens": (tokens, 2),
        "updates": (updates, 1),
        "group_size": (group_size, 2),
        "replicates": (replicates, 3),
        "beta": (beta, 0),
    }
    for name, (value, at_least) in least.items():
        if value < at_least:
            raise ConfigError(f"{name}={value}: use at least {at_least}")


def _bed(setting: Setting) -> dict[str, float]:
    prompts, count, length = setting.old.logprob_PYL.shape
    return {
        "prompts": prompts,
        "completions": count,
        "tokens": length,
        "J": float(setting.old.value_P(setting.reward_PY).mean()),
        "num_prompts": setting.num_prompts,
        "group_size": setting.group_size,
        "beta": setting.beta,
    }


def _claims(paths: Paths, longer: ByLength) -> list[Claim]:
    start, parts = paths.start, ["", "_policy", "_kl"] if paths.setting.beta > 0 else [""]
    at_start = max(start[f"{level}_bias2{x}"] for level in ("token", "sequence") for x in parts)
    names = {"": "", "_policy": ", without the KL term", "_kl": ", of the KL term alone"}
    return [
        _zero("bias^2 / variance at theta_k = theta_old", at_start / start["token_variance"]),
        _exact_slope(paths),
        *(_slope(paths, f"token_bias2{x}", names[x]) for x in parts),
        _leading(paths),
        _law(paths),
        _variance(paths),
        *_unbiased(paths),
        *_lengths(longer),
    ]


def _zero(what: str, measured: float) -> Claim:
    how = f"exact to rounding: at most {ZERO:g}"
    return Claim(what, 0.0, float(measured), None, None, decided(bool(measured <= ZERO)), how)


def _exact_slope(paths: Paths) -> Claim:
    steps = np.diff(np.log(paths.exact["token_bias2"])) / np.diff(np.log(paths.rates))
    off = np.abs(steps[:2] - 2)
    agrees = settled(off[0], off[1], SLOPE_TOLERANCE)
    how = (
        f"between learning rates {paths.rates[0]:g} and {paths.rates[1]:g}, exact; within "
        f"{SLOPE_TOLERANCE}, not decided where further off and coming closer as they fall"
    )
    what = "slope of log bias^2 on log learning rate, exact steps"
    return Claim(what, 2.0, float(steps[0]), None, None, decided(agrees), how)


def _slope(paths: Paths, name: str, part: str) -> Claim:
    found, further = paths.slope(name), paths.slope(name, at=1).estimate
    off = max(found.low - 2, 2 - found.high, 0)
    wide = found.high - found.low > 0.5
    how = (
        f"the same of the mean over {paths.random[name].shape[1]} paths, 95% jackknife interval; "
        f"2 within {SLOPE_TOLERANCE} of it, not decided where wider than 0.5 or coming closer"
    )
    what = f"slope of log bias^2 on log learning rate, minibatch steps{part}"
    agrees = None if wide else settled(off, abs(further - 2), SLOPE_TOLERANCE)
    return Claim(what, 2.0, *found, decided(agrees), how)


def _leading(paths: Paths) -> Claim:
    scaled = paths.random["token_bias2"].mean(axis=1)[:2] / paths.rates[:2] ** 2
    ratio = scaled / paths.random_leading_R.mean()
    off = np.abs(ratio - 1)
    agrees = settled(off[0], off[1], TOLERANCE)
    how = (
        f"exact given the paths, at learning rate {paths.rates[0]:g}; within {TOLERANCE:.0%} of "
        "what the derivative of the bias says, not decided where coming closer"
    )
    what = "bias^2 / its leading term of order eta^2, mean over paths"
    return Claim(what, 1.0, float(ratio[0]), None, None, decided(agrees), how)


def _law(paths: Paths) -> Claim:
    shape = paths.setting.num_prompts, paths.setting.group_size
    predicted, found = paths.law.mse(*shape), paths.start["token_variance_policy"]
    agrees = abs(found / predicted - 1) <= 1e-10
    how = "exact; the law of Proposition 3 by another route, to 1e-10"
    what = "variance at theta_old without the KL term, (C1 + C2/G + C3/(G(G-1)))/B"
    return Claim(what, predicted, found, None, None, decided(bool(agrees)), how)


def _variance(paths: Paths) -> Claim:
    ratios_ER = paths.random["token_variance"] / paths.start["token_variance"]
    count = ratios_ER.shape[1]
    found = t_interval(ratios_ER[0].mean(), ratios_ER[0].var(ddof=1) / count, count - 1)
    off = np.abs(ratios_ER[:2].mean(axis=1) - 1)
    inside = found.low - TOLERANCE <= 1 <= found.high + TOLERANCE
    agrees = True if inside else settled(off[0], off[1], TOLERANCE)
    how = (
        f"exact given the path, at learning rate {paths.rates[0]:g}, 95% t interval over {count} "
        f"paths; 1 inside or within {TOLERANCE:.0%}"
    )
    return Claim("variance / variance at theta_old", 1.0, *found, decided(agrees), how)


def _unbiased(paths: Paths) -> list[Claim]:
    """Of all rates and paths the largest."""
    variance = paths.random["sequence_variance"]
    plain = (paths.random["sequence_bias2_policy"] / variance).max()
    both = (paths.random["sequence_bias2"] / variance).max()
    what = "bias^2 / variance with the completion's ratio"
    return [
        _zero(f"{what}, without the KL term, at every learning rate", plain),
        _zero(f"{what}, on the KL term too, at every learning rate", both),
    ]


def _lengths(longer: ByLength) -> list[Claim]:
    moment, length = longer.values["ratio_second_moment"], int(longer.lengths[-1])
    off = np.abs(moment / longer.growth**longer.lengths - 1).max()
    predicted = longer.growth**length
    how = "exact at every length, to 1e-10"
    what = f"E rho^2 of completions of {length} tokens, c^L with c = {longer.growth:.4g}"
    exact = decided(bool(off <= 1e-10))
    grown = longer.growth_of_ratio
    return [
        Claim(what, float(predicted), float(moment[-1]), None, None, exact, how),
        Claim(
            "growth by a token of variance with the completion's ratio / with tokens'",
            f">= {longer.growth:.4g}",
            grown,
            None,
            None,
            decided(grown >= longer.growth),
            f"exact, between the two largest lengths, up to {length}",
        ),
    ]
