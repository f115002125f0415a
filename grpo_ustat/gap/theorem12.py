r"""Theorem 12: errors of Algorithm 2's gradient estimate on minibatches of a batch.

`grpo_ustat.gap.algorithm2` defines the estimate and its target. Completions are sampled from
pi_old. Advantages use the leave-one-out baseline. They are tested with division by the group's
standard deviation, as in the paper, and without it.

A batch of B prompts, drawn independently, is split into m minibatches. One pass over the batch
makes one update on each minibatch. The test is about the last minibatch, which is used after
k = m - 1 updates, when the policy is farthest from pi_old. The updates follow the exact target, so
that the bias and variance of the last minibatch's estimate are computed exactly.

To first order in the learning rate eta, the change of the bias is linear in theta_k - theta_old, so
the squared change is of order eta^2. With normalisation there is a bias of order 1/G even at
theta_old. More prompts do not reduce this bias, because the estimate from every prompt is biased.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from grpo_ustat.config.gap import GapConfig, Theorem12Config
from grpo_ustat.estimators.moments import exact_moments
from grpo_ustat.estimators.scaling import ScalingLaw
from grpo_ustat.gap.algorithm2 import DIVISORS, PathErrors, Setting, on_policy, path_errors
from grpo_ustat.gap.claims import (
    at_infinity,
    enumerated_claim,
    limit_claim,
    nearing_claim,
)
from grpo_ustat.gap.evidence import Evidence, Panel, Series, Theorem
from grpo_ustat.gap.sequences import SequencePolicy, build_sequences
from grpo_ustat.records import Array
from grpo_ustat.runs.claims import Claim, comma_list
from grpo_ustat.terminal.streams import percentage

SLOPE_TOLERANCE, TOLERANCE = 0.05, 0.05
# A limit as G grows agrees with the prediction if their relative distance is at most this value.
LIMIT_TOLERANCE = 0.01
# A bias counts as rounding error if the ratio of its square to the variance is below this value.
ROUNDING = 1e-20
LABELS = {
    "none": "without normalisation",
    "sigma": "divided by sigma(x)",
    "group_std": "with normalisation",
    "group_std_floor": "divided by max(std, floor)",
    "group_std_redrawn": "divided by std, redrawn if std < floor",
}

STATEMENT = (
    "Theorem 12 is about Algorithm 2's gradient estimate, with advantages divided by the group's "
    "standard deviation. If the standard deviation of rewards is bounded away from 0, the mean "
    "squared error is the sum of a squared bias, the oracle's variance / (B G), and O(1/(B G^2)). "
    "The bias arises because the estimate uses the ratios of tokens instead of completions and "
    "because the KL term has no ratio. It vanishes as the learning rate tends to 0. In our reading "
    "the target is the expectation of g / sigma(x), since the paper calls the ground-truth "
    "gradient the derivative of E[2 arcsin sqrt V]. If the target contained the group's standard "
    "deviation, the bias at learning rate 0 would be 0 by definition. The assumption can be read "
    "as a bound on the standard deviation of every group or, as in the proof of Lemma 11, as a "
    "bound on sigma(x) only. Both readings are tested."
)


def theorem12(
    policy: SequencePolicy, reference: SequencePolicy, reward_PY: Array, design: Theorem12Config
) -> Evidence:
    """Compute squared bias and variance by learning rate and by group size.

    Args:
        policy: old policy pi_old, with at least 2 tokens per completion.
        reference: reference policy pi_ref, with the same prompts.
        reward_PY: rewards of all Y completions of each prompt, 0 or 1.
        design: settings of the test.
    """
    rates, updates = np.array(sorted(design.learning_rates)), design.minibatches - 1
    shape = design.num_prompts // design.minibatches, design.group_size
    setting = Setting(policy, reference, reward_PY, design.beta, *shape, floor=design.floor)
    with_epsilon = replace(setting, epsilon=design.epsilon)
    start = {x: on_policy(with_epsilon, x, design.group_sizes) for x in DIVISORS}
    plain, normalised = (
        path_errors(replace(with_epsilon, divisor=x), rates, updates) for x in ("none", "group_std")
    )
    series = [
        Series(LABELS[x], design.group_sizes, start[x]["bias2_share"])
        for x in ("group_std", "group_std_redrawn")
    ]
    return Evidence(
        claims=[
            *_start_claims(setting, start, design),
            *_drift_claims(normalised),
            *_plain_claims(plain),
        ],
        panel=Panel("group size G", "bias^2 / ||target||^2 at learning rate 0", series),
        rows=[
            *(
                row
                for kind, columns in start.items()
                for row in _rows("group_size", design.group_sizes, kind, columns)
            ),
            *_path_rows(plain),
            *_path_rows(normalised),
        ],
        problem={
            "prompts": len(reward_PY),
            "possible completions of a prompt": reward_PY.shape[1],
            "V of each prompt": ", ".join(f"{value:.3g}" for value in setting.value_P),
        },
    )


# At learning rate 0


def _start_claims(
    setting: Setting, start: Mapping[str, Mapping[str, Array]], design: Theorem12Config
) -> list[Claim]:
    """Make claims about the estimate at learning rate 0.

    The paper's divisor is tested at every G, other divisors that the theorem may cover at one G.

    Args:
        setting: setting without epsilon.
        start: result of `on_policy` for each divisor.
        design: settings of the test.
    """
    sizes = np.array(design.limit_sizes)
    far = {x: on_policy(setting, x, design.limit_sizes) for x in ("none", "sigma", "group_std")}

    def bias_claim(divisor: str, size: int) -> Claim:
        place = design.group_sizes.index(size)
        values = {name: float(x[place]) for name, x in start[divisor].items()}
        share, how = values["bias2_share"], "enumerated; the value is the same for every B; agrees "
        how += "if it is 0 up to rounding"
        if share > ROUNDING:
            prompts = np.ceil(values["variance"] / values["bias"] ** 2)
            how += f"; the squared bias exceeds the variance if B >= {prompts:.0f}"
        what = f"bias^2 / ||target||^2 at learning rate 0, {LABELS[divisor]}, G = {size}"
        return enumerated_claim(what, 0.0, share, share <= ROUNDING, how)

    def variance_claim(divisor: str) -> Claim:
        at = far[divisor]
        oracle = sizes * (at["oracle"] - at["between"])
        ratio = float(at_infinity(sizes * (at["variance"] - at["between"]) / oracle))
        return enumerated_claim(
            "as G grows: limit of (B variance - C1) / (the oracle's B variance - C1), "
            f"{LABELS[divisor]}",
            1.0, ratio, abs(ratio - 1) <= LIMIT_TOLERANCE,
            f"enumerated at G = {comma_list(sizes)}, epsilon = 0, extrapolated in 1/G; "
            f"agrees within {percentage(LIMIT_TOLERANCE)}; a ratio other than 1 means that the "
            "variance differs from the oracle's by order 1/(B G), not 1/(B G^2)",
        )  # fmt: skip

    # Lemma 11 gives the limit of G times each prompt's bias.
    v_P = setting.sigma_P**2
    scale_P = (1 - 4 * v_P) / (8 * v_P**1.5)
    limit_D = (scale_P[:, None] * setting.old.gradient_PD(setting.reward_PY)).mean(axis=0)
    limit, bias = float(np.linalg.norm(limit_D)), far["group_std"]["bias"]
    return [
        *(bias_claim("group_std", size) for size in design.group_sizes),
        nearing_claim(
            "as G grows: slope of log bias^2 on log G at learning rate 0, with normalisation",
            -2.0, 2 * np.diff(np.log(bias))[::-1] / np.log(2), SLOPE_TOLERANCE,
            f"enumerated, epsilon = 0, between G = {sizes[1]} and {sizes[2]}; agrees within "
            f"{SLOPE_TOLERANCE}, otherwise undecided if the slopes approach the prediction",
        ),
        limit_claim(
            "as G grows: limit of G ||bias|| at learning rate 0, with normalisation",
            limit, sizes * bias, LIMIT_TOLERANCE * limit,
            f"enumerated at G = {comma_list(sizes)}, epsilon = 0, extrapolated in 1/G; "
            f"agrees within {percentage(LIMIT_TOLERANCE)} of the delta-method value, otherwise "
            "undecided if the values approach it",
        ),
        *(variance_claim(divisor) for divisor in far),
        *(
            bias_claim(divisor, design.group_size)
            for divisor in ("group_std_floor", "group_std_redrawn", "sigma")
        ),
    ]  # fmt: skip


# After updates


def _drift_claims(paths: PathErrors) -> list[Claim]:
    """Make claims about how updates change the bias, with normalisation."""
    label = "||bias - bias at learning rate 0||^2"
    claims = [_slope_claim(paths, "token_drift2", label), _variance_claim(paths)]
    return [replace(claim, what=f"with normalisation: {claim.what}") for claim in claims]


def _plain_claims(paths: PathErrors) -> list[Claim]:
    """Make claims about the estimate without normalisation."""
    start, end, setting = paths.start, paths.end, paths.setting
    parts = {"": ""}
    if setting.beta > 0:
        parts |= {"_policy": ", without the KL term", "_kl": ", KL term only"}
    largest = max(start[f"{level}_bias2{x}"] for level in ("token", "sequence") for x in parts)
    law, variance = on_policy_law(setting), start["token_variance"]
    predicted = law.mse(setting.num_prompts, setting.group_size)
    measured = setting.moments(setting.old.scores_PYD).variance(setting.num_prompts)
    last = paths.by_place.shape[1] - 1
    by_place = paths.by_place[:2, last] / paths.by_place[:2, 1]
    leading = end["token_bias2"][:2] / paths.rates[:2] ** 2 / paths.leading
    rate = f"at learning rate {paths.rates[0]:g}"
    claims = [
        _zero_claim("bias^2 / variance at theta_old", largest / variance),
        *(_slope_claim(paths, f"token_bias2{x}", "bias^2", words) for x, words in parts.items()),
        # To first order in eta, j updates move theta by j eta times the target.
        nearing_claim(
            f"bias^2 of minibatch {last + 1} divided by bias^2 of minibatch 2, exact steps",
            float(last**2), by_place, TOLERANCE * last**2,
            f"exact, {rate}; agrees within {percentage(TOLERANCE)}, otherwise undecided if the "
            "ratio approaches the prediction as the rate falls; the first minibatch has no bias",
        ),
        nearing_claim(
            "bias^2 / its leading term of order eta^2", 1.0, leading, TOLERANCE,
            f"exact, {rate}; agrees within {percentage(TOLERANCE)} of the value "
            "computed from the derivative of the bias, otherwise undecided if the ratio approaches "
            "1 as the rate falls",
        ),
        enumerated_claim(
            "variance at theta_old without the KL term, (C1 + C2/G + C3/(G(G-1)))/B",
            predicted, measured, abs(measured / predicted - 1) <= 1e-10,
            "exact; B is the number of prompts in a minibatch; C1, C2, C3 are computed separately "
            "from Proposition 3; agrees within a relative distance of 1e-10",
        ),
        _variance_claim(paths),
        *(
            _zero_claim(
                f"largest bias^2 / variance with completion ratios over learning rates, {words}",
                float((end[f"sequence_bias2{part}"] / end["sequence_variance"]).max()),
            )
            for part, words in (("_policy", "without the KL term"), ("", "with the KL term"))
        ),
    ]  # fmt: skip
    return [replace(claim, what=f"without normalisation: {claim.what}") for claim in claims]


def on_policy_law(setting: Setting) -> ScalingLaw:
    """Return C1, C2, C3 of Proposition 3 at theta_old, without the KL term."""
    old, reward_PY = setting.old, setting.reward_PY
    g_PD, q_PY = old.gradient_PD(reward_PY), np.square(old.scores_PYD).sum(axis=2)
    g_sq_P = np.square(g_PD).sum(axis=1)
    moments = exact_moments(q_PY, reward_PY, old.probabilities_PY, g_sq_P)
    return ScalingLaw.of_moments(moments, float(np.square(g_PD.mean(axis=0)).sum()))


def _zero_claim(what: str, measured: float) -> Claim:
    """Make a claim that an enumerated quantity is 0."""
    how = f"exact; agrees if at most {ROUNDING:g}, the size of rounding errors"
    return enumerated_claim(what, 0.0, measured, measured <= ROUNDING, how)


def _slope_claim(paths: PathErrors, name: str, label: str, part: str = "") -> Claim:
    """Make a claim that an error is of order eta^2 along the exact path."""
    slopes = np.diff(np.log(paths.end[name])) / np.diff(np.log(paths.rates))
    how = (
        f"between learning rates {paths.rates[0]:g} and {paths.rates[1]:g}, exact; agrees within "
        f"{SLOPE_TOLERANCE}, otherwise undecided if the slope approaches the prediction as the "
        "rates fall"
    )
    what = f"slope of log({label}) on log(learning rate), exact steps{part}"
    return nearing_claim(what, 2.0, slopes[:2], SLOPE_TOLERANCE, how)


def _variance_claim(paths: PathErrors) -> Claim:
    """Make a claim that updates at a small learning rate do not change the variance."""
    ratios = paths.end["token_variance"][:2] / paths.start["token_variance"]
    how = f"exact, at learning rate {paths.rates[0]:g}; agrees within {percentage(TOLERANCE)}"
    return nearing_claim("variance / variance at theta_old", 1.0, ratios, TOLERANCE, how)


def _rows(
    axis: str, at: Sequence[float] | Array, normalisation: str, columns: Mapping[str, Array]
) -> list[dict[str, Any]]:
    """Return rows of curves.csv, one for each quantity in `columns` and place on the axis."""
    place = {"axis": axis, "normalisation": normalisation}
    return [
        place | {"at": float(x), "quantity": name, "value": float(value)}
        for name, values in columns.items()
        for x, value in zip(at, values, strict=True)
    ]


def _path_rows(paths: PathErrors) -> list[dict[str, Any]]:
    """Return the rows of a path by learning rate, and by minibatch at the smallest rate.

    Rows with learning rate 0 are for theta_old.
    """
    kind, minibatches = paths.setting.divisor, np.arange(1, paths.by_place.shape[1] + 1)
    by_rate = {name: np.array([paths.start[name], *end]) for name, end in paths.end.items()}
    return [
        *_rows("learning_rate", [0, *paths.rates], kind, by_rate),
        *_rows("minibatch", minibatches, kind, {"token_bias2": paths.by_place[0]}),
    ]


def run(config: GapConfig) -> Evidence:
    """Run `theorem12` on the policy of `build_sequences`."""
    return theorem12(*build_sequences(), config.theorem)


THEOREM = Theorem(STATEMENT, run)
