"""What the study of Theorem 12 shows: panels, rows, the answer and its notes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grpo_ustat.estimators.intervals import Interval, t_interval
from grpo_ustat.theorems.finding import Curve, Panel
from grpo_ustat.theorems.offpolicy import Setting
from grpo_ustat.theorems.offpolicy_paths import Paths
from grpo_ustat.theorems.ratio_lengths import ByLength


def panels(paths: Paths, longer: ByLength) -> list[Panel]:
    """Bias, variance and error by learning rate; what ratios cost by length."""
    rate, length = "learning rate", "completion length in tokens"
    lengths = longer.lengths.astype(float)
    moment = "E rho^2 of the completion"
    ratio = Curve("variance ratio, completion : token", lengths, longer.variance_ratio)
    growth = [
        Curve(moment, lengths, longer.values["ratio_second_moment"]),
        Curve(moment, lengths, longer.growth**lengths, predicted=True),
        ratio,
    ]
    return [
        Panel("Squared bias, token ratios", rate, "bias^2", _bias_curves(paths), "xy"),
        Panel("Variance", rate, "variance", _error_curves(paths, "variance"), "xy"),
        Panel("Mean squared error", rate, "MSE", _error_curves(paths, "mse"), "xy"),
        Panel("What the completion's ratio costs", length, "factor", growth, "y"),
    ]


def _bias_curves(paths: Paths) -> list[Curve]:
    rates = paths.rates
    labels = {"token_bias2": "minibatch steps"}
    if paths.setting.beta > 0:
        labels["token_bias2_policy"] = "without the KL term"
        labels["token_bias2_kl"] = "KL term alone"
        labels["token_bias2_kl_old_prefixes"] = "KL term, prefixes of pi_old in the target"
    exact = "exact steps"
    return [
        *(_banded(label, rates, paths.mean(name)) for name, label in labels.items()),
        Curve("minibatch steps", rates, paths.random_leading_R.mean() * rates**2, predicted=True),
        Curve(exact, rates, paths.exact["token_bias2"]),
        Curve(exact, rates, paths.exact_leading * rates**2, predicted=True),
    ]


def _error_curves(paths: Paths, name: str) -> list[Curve]:
    labels = {"token": "token ratios", "sequence": "completion's ratio"}
    curves = [_banded(v, paths.rates, paths.mean(f"{k}_{name}")) for k, v in labels.items()]
    flat = np.full(len(paths.rates), paths.start["token_variance"])
    return [*curves, Curve("token ratios", paths.rates, flat, predicted=True)]


def _banded(label: str, x: np.ndarray, found: Sequence[Interval]) -> Curve:
    estimate, low, high = (list(each) for each in zip(*found, strict=True))
    return Curve(label, x, estimate, low, high)


def rows(paths: Paths, longer: ByLength) -> list[dict[str, float | str | None]]:
    """A quantity a row: at a learning rate, 0 for theta_old, or at a length."""

    def row(axis, at, path, name, found, low=None, high=None):
        end = {"quantity": name, "value": float(found), "low": low, "high": high}
        return {"axis": axis, "at": float(at), "path": path} | end

    found_rows = [row("learning_rate", 0, "none", name, x) for name, x in paths.start.items()]
    for name in paths.random:
        for at, found in zip(paths.rates, paths.mean(name), strict=True):
            found_rows.append(row("learning_rate", at, "minibatch", name, *found))
        for at, found in zip(paths.rates, paths.exact[name], strict=True):
            found_rows.append(row("learning_rate", at, "exact", name, found))
    for at, found in zip(paths.rates, paths.tie(), strict=True):
        found_rows.append(row("learning_rate", at, "minibatch", "tie_num_prompts", found))
    for name, values in longer.values.items():
        for at, found in zip(longer.lengths, values, strict=True):
            found_rows.append(row("length", at, "none", name, found))
    return found_rows


def answer(paths: Paths) -> str:
    """What was found, one sentence."""
    slope, ratio = paths.slope("token_bias2").estimate, paths.random["token_variance"][0].mean()
    change = abs(ratio / paths.start["token_variance"] - 1)
    return (
        f"Squared bias is exactly 0 at theta_old and falls with the learning rate like its power "
        f"{slope:.3f}; at {paths.rates[0]:g} the variance is {change:.2%} off the on-policy one; "
        f"the smaller error is {_smaller(paths)}."
    )


def _smaller(paths: Paths) -> str:
    """Which level has the smaller error where, by 95% t intervals of the paths' differences."""
    more_ER = paths.random["sequence_mse"] - paths.random["token_mse"]
    count = more_ER.shape[1]
    found = [t_interval(x.mean(), x.var(ddof=1) / count, count - 1) for x in more_ER]
    pairs = list(zip(paths.rates, found, strict=True))
    where = {
        "that of token ratios": [rate for rate, x in pairs if x.low > 0],
        "that of the completion's ratio": [rate for rate, x in pairs if x.high < 0],
        "not decided": [rate for rate, x in pairs if x.low <= 0 <= x.high],
    }
    said = [f"{k} at {', '.join(f'{r:g}' for r in v)}" for k, v in where.items() if v]
    return ", ".join(said)


def notes(paths: Paths, longer: ByLength) -> list[str]:
    """Limits, surprises and reasons."""
    setting, start = paths.setting, paths.start
    share = paths.law.c1 / setting.num_prompts / start["token_variance"]
    noise, several = paths.random_leading_R.mean() / paths.exact_leading, longer.lengths > 1
    told = [
        _crossing(paths),
        "Both levels have the same error at the same theta_k in minibatches of as many prompts as "
        "follow; with more, the completion's ratio is better, where 0 with any number: "
        f"{_listed(paths.rates, paths.tie())} (learning rates).",
        "The same by completion length, each token shifted alike: "
        f"{_listed(longer.lengths[several], longer.tie[several])} (tokens).",
        "As the learning rate falls the levels differ by their variances, at order eta, and the "
        "sign of that difference depends on policy and rewards; squared bias is of order eta^2.",
        f"As the learning rate falls, squared bias of minibatch steps is {noise:.3g} times that of "
        "exact steps: the rest is noise in theta_k.",
        f"{share:.1%} of the on-policy variance is C1/B, from which prompts were drawn: no group "
        "size reduces it, so `oracle variance / (B G)` holds with G C1 inside the oracle's.",
        "Given theta_k the minibatch is fresh, as within one pass over a batch; a second pass "
        "over the same completions may bias any ratio, and is not measured here.",
    ]
    if setting.beta > 0:
        told.append(
            "The KL term's target has prefixes of pi_theta, held fixed; with prefixes of pi_old "
            "its bias is that of the missing token ratio alone (rows token_bias2_kl_old_prefixes)."
        )
        told.append(_divergences(setting))
    return told


def _listed(at: np.ndarray, values: np.ndarray) -> str:
    return ", ".join(f"{max(b, 0):.3g} at {a:g}" for a, b in zip(at, values, strict=True))


def _crossing(paths: Paths) -> str:
    """Where the mean squared bias meets the mean variance, interpolated on the log scale."""
    ratio_E = paths.random["token_bias2"].mean(axis=1) / paths.random["token_variance"].mean(axis=1)
    above = np.flatnonzero(ratio_E >= 1)
    if not len(above) or above[0] == 0:
        leading = np.sqrt(paths.start["token_variance"] / paths.random_leading_R.mean())
        return (
            f"Squared bias is {ratio_E[0]:.3g} to {ratio_E[-1]:.3g} of the variance; its leading "
            f"term would equal the on-policy variance at learning rate {leading:.3g}."
        )
    i = above[0]
    logs, rates = np.log(ratio_E[i - 1 : i + 1]), np.log(paths.rates[i - 1 : i + 1])
    meets = float(np.exp(np.interp(0.0, logs, rates)))
    return f"Squared bias equals the variance at learning rate {meets:.3g}."


def _divergences(setting: Setting) -> str:
    old, reference = setting.old, setting.reference
    penalty_D = old.token_kl_gradient_PD(reference, old.probabilities_PY).mean(axis=0)

    def cosine(other_PD):
        other_D = other_PD.mean(axis=0)
        norms = np.linalg.norm(penalty_D) * np.linalg.norm(other_D)
        return penalty_D @ other_D / norms if norms > 0 else 1.0

    ways = [old.kl_from_gradient_PD(reference), old.kl_to_gradient_PD(reference)]
    return (
        "At theta_old what the KL term descends has cosine {:.4f} with the gradient of "
        "KL(pi_ref||pi) of completions and {:.4f} with that of KL(pi||pi_ref).".format(
            *map(cosine, ways)
        )
    )
