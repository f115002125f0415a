"""What the study of Theorem 12 shows: panels, rows, the answer and its notes."""

from __future__ import annotations

import numpy as np

from grpo_ustat.estimators.intervals import t_interval
from grpo_ustat.gap.evidence import Panel, PlotLine
from grpo_ustat.gap.offpolicy import ByLength, Setting
from grpo_ustat.gap.offpolicy_paths import LeadingTerms, PathErrors
from grpo_ustat.gap.theorem12_on_policy import OnPolicy, on_policy_answer
from grpo_ustat.runs.record import AGREES, DISAGREES, OPEN
from grpo_ustat.terminal.streams import percentage

OF_VERDICT = {AGREES: "holds", DISAGREES: "fails in some claim", OPEN: "is not decided"}


def panels(paths: dict[str, PathErrors], costs: ByLength) -> list[Panel]:
    """Bias, variance and error by learning rate; what ratios cost by length."""
    rate, biases, errors = "learning rate", [], []
    if "none" in paths:
        plain, labels = paths["none"], {"token_bias2": "minibatch steps"}
        rates, leading = plain.rates, plain.leading
        assert leading is not None
        if plain.setting.beta > 0:
            labels["token_bias2_policy"] = "without the KL term"
            labels["token_bias2_kl"] = "KL term alone"
            labels["token_bias2_kl_old_prefixes"] = "KL term, prefixes of pi_old in the target"
        random, exact = leading.random_R.mean() * rates**2, leading.exact * rates**2
        biases += [
            *(_band(label, plain, name) for name, label in labels.items()),
            PlotLine("minibatch steps", rates, random, predicted=True),
            PlotLine("exact steps", rates, plain.exact["token_bias2"]),
            PlotLine("exact steps", rates, exact, predicted=True),
        ]
        lines = _error_lines(plain)
        errors.append(Panel("MSE without normalisation", rate, "MSE", lines, "xy"))
    if "group_std" in paths:
        normalised = paths["group_std"]
        label, start = "with normalisation, minibatch steps", normalised.start["token_bias2"]
        flat = np.full(len(normalised.rates), start)
        biases += [
            _band(label, normalised, "token_bias2"),
            PlotLine(label, normalised.rates, flat, predicted=True),
            _band("its change since theta_old", normalised, "token_drift2"),
        ]
        lines = _error_lines(normalised)
        errors.append(Panel("MSE with normalisation", rate, "MSE", lines, "xy"))
    lengths, moment = costs.lengths.astype(float), "E rho^2 of the completion"
    growth = [
        PlotLine(moment, lengths, costs.values["ratio_second_moment"]),
        PlotLine(moment, lengths, costs.growth**lengths, predicted=True),
        PlotLine("variance ratio, completion : token", lengths, costs.variance_ratio),
    ]
    length = "completion length in tokens"
    return [
        Panel("Squared bias, token ratios", rate, "bias^2", biases, "xy"),
        *errors,
        Panel("What the completion's ratio costs", length, "factor", growth, "y"),
    ]


def _error_lines(paths: PathErrors) -> list[PlotLine]:
    """Mean squared errors of both levels."""
    labels = {"token": "token ratios", "sequence": "completion's ratio"}
    lines = [_band(label, paths, f"{level}_mse") for level, label in labels.items()]
    flat = np.full(len(paths.rates), paths.start["token_variance"])
    return [*lines, PlotLine("variance at theta_old", paths.rates, flat, predicted=True)]


def _band(label: str, paths: PathErrors, name: str) -> PlotLine:
    """The mean over random paths by learning rate, with its intervals."""
    estimate, low, high = (list(ends) for ends in zip(*paths.mean(name), strict=True))
    return PlotLine(label, paths.rates, estimate, low, high)


def rows(paths: dict[str, PathErrors], costs: ByLength) -> list[dict[str, float | str | None]]:
    """A quantity a row: at a learning rate, 0 for theta_old, at a place in the batch or a length.

    Places are those of minibatches along the exact path at the smallest learning rate.
    """

    def row(
        axis: str, at: float, path: str, kind: str, name: str, value: float,
        low: float | None = None, high: float | None = None,
    ) -> dict[str, float | str | None]:  # fmt: skip
        end = {"quantity": name, "value": float(value), "low": low, "high": high}
        return {"axis": axis, "at": float(at), "path": path, "normalisation": kind} | end

    table = []
    for kind, errors in paths.items():
        table += [row("learning_rate", 0, "none", kind, *pair) for pair in errors.start.items()]
        for name in errors.random:
            for at, mean in zip(errors.rates, errors.mean(name), strict=True):
                table.append(row("learning_rate", at, "minibatch", kind, name, *mean))
            for at, value in zip(errors.rates, errors.exact[name], strict=True):
                table.append(row("learning_rate", at, "exact", kind, name, value))
        for at, value in zip(errors.rates, errors.tie(), strict=True):
            name = "tie_num_prompts"
            table.append(row("learning_rate", at, "minibatch", kind, name, value))
        for place, value in enumerate(errors.exact_by_place[0], 1):
            table.append(row("minibatch", place, "exact", kind, "token_bias2", value))
    for name, values in costs.values.items():
        for at, value in zip(costs.lengths, values, strict=True):
            table.append(row("length", at, "none", "none", name, value))
    return table


def answer(paths: dict[str, PathErrors], start: OnPolicy, plain_verdict: str) -> str:
    """What was measured, a sentence for each normalisation.

    Args:
        paths: by normalisation.
        start: what is there at learning rate 0.
        plain_verdict: of all claims without normalisation.
    """
    answers = []
    if "none" in paths:
        plain = paths["none"]
        slope, ratio = plain.slope("token_bias2").estimate, plain.random["token_variance"][0]
        change = abs(ratio.mean() / plain.start["token_variance"] - 1)
        answers.append(
            f"Without normalisation the theorem {OF_VERDICT[plain_verdict]}: squared bias is "
            f"{plain.start['token_bias2']:.1g} at learning rate 0 and falls with it like its power "
            f"{slope:.3f}; at {plain.rates[0]:g} the variance is {percentage(change, 2)} off the "
            "on-policy one, the oracle's and a term of order 1/(B G^2)."
        )
    if "group_std" in paths:
        answers.append(on_policy_answer(start))
    return " ".join(answers)


def notes(paths: dict[str, PathErrors], costs: ByLength) -> list[str]:
    """Limits, surprises and reasons."""
    lines = []
    if "group_std" in paths:
        normalised, rate = paths["group_std"], paths["group_std"].rates[-1]
        of_old, of_current = (
            normalised.mean(f"token_bias2{suffix}")[-1].estimate for suffix in ("", "_own_sigma")
        )
        lines.append(
            "With normalisation the target has sigma(x) of pi_old, whose groups advantages are of: "
            f"squared bias is {normalised.start['token_bias2']:.3g} at theta_old and {of_old:.3g} "
            f"at learning rate {rate:g}, {of_current:.3g} against a target with sigma(x) of "
            "pi_theta; the difference of the two targets is of order eta."
        )
    if "none" not in paths:
        return lines
    plain = paths["none"]
    setting, start, leading = plain.setting, plain.start, plain.leading
    assert leading is not None
    share = leading.law.c1 / setting.num_prompts / start["token_variance"]
    noise, several = leading.random_R.mean() / leading.exact, costs.lengths > 1
    lines += [
        "Without normalisation. " + _crossing(plain, leading),
        f"The smaller error is {_smaller_error(plain)} (learning rates).",
        "Both levels have the same error at the same theta_k in minibatches of as many prompts as "
        "follow; with more, the completion's ratio is better, where 0 with any number: "
        f"{_prompt_list(plain.rates, plain.tie())} (learning rates).",
        "The same by completion length, each token shifted alike: "
        f"{_prompt_list(costs.lengths[several], costs.tie[several])} (tokens).",
        "As the learning rate falls the levels differ by their variances, at order eta, and the "
        "sign of that difference depends on policy and rewards; squared bias is of order eta^2.",
        f"As the learning rate falls, squared bias of minibatch steps is {noise:.3g} times that of "
        "exact steps: the rest is noise in theta_k.",
        f"{percentage(share, 1)} of the on-policy variance is C1/B, from which prompts were "
        "drawn: no group size reduces it, so `oracle variance / (B G)` holds with G C1 inside the "
        "oracle's.",
        "Given theta_k the minibatch is fresh, as within one pass over a batch of prompts drawn "
        "independently; a second pass over the same completions may bias any ratio, and is not "
        "measured here.",
    ]
    if setting.beta > 0:
        lines.append(
            "The KL term's target has prefixes of pi_theta, held fixed; with prefixes of pi_old "
            "its bias is that of the missing token ratio alone (rows token_bias2_kl_old_prefixes)."
        )
        lines.append(_divergence_cosines(setting))
    return lines


def _smaller_error(paths: PathErrors) -> str:
    """Which level has the smaller error where, by 95 % t intervals of the paths' differences."""
    difference_ER = paths.random["sequence_mse"] - paths.random["token_mse"]
    count = difference_ER.shape[1]
    rates: dict[str, list[float]] = {
        "that of token ratios": [],
        "that of the completion's ratio": [],
        "not significantly different": [],
    }
    for rate, difference_R in zip(paths.rates, difference_ER, strict=True):
        interval = t_interval(difference_R.mean(), difference_R.var(ddof=1) / count, count - 1)
        if interval.low > 0:
            rates["that of token ratios"].append(rate)
        elif interval.high < 0:
            rates["that of the completion's ratio"].append(rate)
        else:
            rates["not significantly different"].append(rate)
    words = (f"{kind} at {', '.join(f'{x:g}' for x in at)}" for kind, at in rates.items() if at)
    return ", ".join(words)


def _prompt_list(at: np.ndarray, prompts: np.ndarray) -> str:
    return ", ".join(f"{max(b, 0):.3g} at {a:g}" for a, b in zip(at, prompts, strict=True))


def _crossing(paths: PathErrors, leading: LeadingTerms) -> str:
    """Sentence on the rate at which the mean squared bias meets the mean variance, interpolated on
    the log scale.
    """
    ratio_E = paths.random["token_bias2"].mean(axis=1) / paths.random["token_variance"].mean(axis=1)
    above = np.flatnonzero(ratio_E >= 1)
    if not len(above) or above[0] == 0:
        rate = np.sqrt(paths.start["token_variance"] / leading.random_R.mean())
        return (
            f"Squared bias is {ratio_E[0]:.3g} to {ratio_E[-1]:.3g} of the variance; its leading "
            f"term would equal the on-policy variance at learning rate {rate:.3g}."
        )
    i = above[0]
    logs, rates = np.log(ratio_E[i - 1 : i + 1]), np.log(paths.rates[i - 1 : i + 1])
    rate = float(np.exp(np.interp(0.0, logs, rates)))
    return f"Squared bias equals the variance at learning rate {rate:.3g}."


def _divergence_cosines(setting: Setting) -> str:
    """The KL term's direction beside those of both divergences of whole completions."""
    old, reference = setting.old, setting.reference
    penalty_D = old.token_kl_gradient_PD(reference, old.probabilities_PY).mean(axis=0)
    cosines = []
    for other_PD in (old.kl_from_gradient_PD(reference), old.kl_to_gradient_PD(reference)):
        other_D = other_PD.mean(axis=0)
        norms = np.linalg.norm(penalty_D) * np.linalg.norm(other_D)
        cosines.append(penalty_D @ other_D / norms if norms > 0 else 1.0)
    return (
        f"At theta_old what the KL term descends has cosine {cosines[0]:.4f} with the gradient of "
        f"KL(pi_ref||pi) of completions and {cosines[1]:.4f} with that of KL(pi||pi_ref)."
    )
