"""The answer of a study of the gradient's error: which G, at what cost, and what to type next.

It is made from `result.json` alone, for any number of rollouts: at a fixed number the error of
every G relative to another is the same, only the admissible sizes differ, those that divide it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from grpo_ustat.config.command_line import command_line
from grpo_ustat.config.folders import CONF
from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.estimators.noise import (
    CONSTANTS_AND_GRADIENT,
    LEAST_UNITS,
    noise_of_steps,
    noise_share,
)
from grpo_ustat.estimators.scaling import ScalingEstimate
from grpo_ustat.report.tables import three_digits

ROLLOUTS = 256  # of a training step where none are named, as in conf/budget/train.yaml
WHY_FIXED_ROLLOUTS = (
    "In the tables the error falls with G since a larger G draws more completions of the same "
    "questions; a training step has a fixed number of rollouts, where a larger G means fewer "
    "prompts, so one G is best."
)
INTERVALS = {  # what an interval speaks of
    "completions": "conditional on these {} questions",
    "questions": "generalising from these {} to new questions of the kind",
}
USUAL_SIZE = 8  # TRL's G where none is chosen
NEIGHBOURS = (-1, 1, 2)  # of the best admissible G, whose costs the sentence names


@dataclass(frozen=True)
class GroupSizeCosts:
    """The extra error of every admissible group size at a fixed number of rollouts.

    Attributes:
        rollouts: n of a step.
        best: the admissible G, one that divides n, of the smallest estimated error.
        extra: MSE at G over MSE at `best`, less 1, by G; intervals of 95 % that hold together, see
            `ScalingEstimate.extra_error`, NaN where a result of an earlier version has none.
    """

    rollouts: int
    best: int
    extra: Mapping[int, Interval]


def scaling_estimate_of(scaling: Mapping[str, Any]) -> ScalingEstimate:
    """C1, C2, C3 with their covariance, NaN in a result that has none.

    Args:
        scaling: of `result.json`.
    """
    constants = np.array([scaling[name] for name in ("c1", "c2", "c3")], float)
    covariance = np.array(scaling.get("covariance", np.full((3, 3), np.nan)), float)
    return ScalingEstimate(constants, covariance, float(scaling.get("dof", 1.0)))


def group_size_costs(scaling: Mapping[str, Any], rollouts: int = ROLLOUTS) -> GroupSizeCosts:
    """What each admissible group size costs.

    Args:
        scaling: of `result.json`.
        rollouts: n of a training step.

    Raises:
        ValueError: n < 2.
    """
    sizes = [size for size in range(2, rollouts + 1) if rollouts % size == 0]
    if not sizes:
        raise ValueError(f"rollouts={rollouts}: a group needs at least 2")
    estimate = scaling_estimate_of(scaling)
    best = estimate.best_of(sizes)
    return GroupSizeCosts(
        rollouts, best, {size: estimate.extra_error(size, best) for size in sizes}
    )


def is_decided(scaling: Mapping[str, Any]) -> bool:
    """Whether G* is known and its interval has both ends."""
    return all(scaling[f"gstar{end}"] is not None for end in ("", "_low", "_high"))


def decision_sentence(result: Mapping[str, Any], rollouts: int = ROLLOUTS) -> str:
    """Which G is best and what its neighbours cost, or how much is missing to say so.

    Args:
        result: content of the study's `result.json`.
        rollouts: n of a training step.
    """
    sentence = best_size_sentence(result)
    if result["assumption2"].get("corr") is None or not is_decided(result["scaling"]):
        return sentence
    return f"{sentence} {costs_sentence(group_size_costs(result['scaling'], rollouts))}"


def best_size_sentence(result: Mapping[str, Any]) -> str:
    """G* with its interval, or how much is missing to say it.

    Args:
        result: content of the study's `result.json`.
    """
    scaling, questions = result["scaling"], result["questions"]
    if result["assumption2"].get("corr") is None:
        return result["summary"].split(" WARNING: ")[0]
    if is_decided(scaling):
        best, low, high = (scaling[f"gstar{end}"] for end in ("", "_low", "_high"))
        return f"Best G is about {best:.1f} [{low:.1f}, {high:.1f}] for any number of rollouts."
    needed = _prompts_needed(result)
    if needed is None:
        more = f"more prompts are needed (now {questions}), how many cannot be said yet"
    else:
        more = f"about {needed - questions} more prompts are needed (now {questions})"
    low = scaling["gstar_low"]
    if low is not None and low > 2:
        return f"Best G is at least {low:.1f} for any number of rollouts; for an upper end {more}."
    return f"Not enough data for a best G: {more}."


def costs_sentence(costs: GroupSizeCosts) -> str:
    """The best admissible G and the extra error of its neighbours.

    >>> extra = {2: Interval(0.4, 0.3, 0.5), 4: Interval(0, 0, 0)}
    >>> costs_sentence(GroupSizeCosts(4, 4, extra))
    'At n = 4: G = 4, 1 prompt. G = 2 costs +40 % error [+30 %, +50 %].'
    """
    sizes = list(costs.extra)
    place = sizes.index(costs.best)
    parts = []
    for step in NEIGHBOURS:
        if not 0 <= place + step < len(sizes):
            continue
        size = sizes[place + step]
        extra, low, high = costs.extra[size]
        if not math.isfinite(extra):
            continue
        error = "" if any("costs" in part for part in parts) else " error"
        if not math.isfinite(low):
            parts.append(f"G = {size} costs {percent(extra)}{error}")
        elif low <= 0:
            parts.append(
                f"G = {size} is not significantly different ({percent(extra)} [{percent(low)}, "
                f"{percent(high)}])"
            )
        else:
            parts.append(
                f"G = {size} costs {percent(extra)}{error} [{percent(low)}, {percent(high)}]"
            )
    prompts = costs.rollouts // costs.best
    first = f"At n = {costs.rollouts}: G = {costs.best}, {prompts} prompt{'s' * (prompts > 1)}."
    return f"{first} {', '.join(parts)}." if parts else first


def noise_sentence(
    result: Mapping[str, Any], rollouts: int = ROLLOUTS, group_size: int | None = None
) -> str:
    """How much of a step is noise, and what more or fewer rollouts would do.

    Args:
        result: content of the study's `result.json`; "" where an earlier version wrote it.
        rollouts: n of a training step.
        group_size: G; None: the best one that divides n, or 8 where it is not decided. Of the
            sizes that the result has, the nearest.
    """
    if "noise" not in result or result["assumption2"].get("corr") is None:
        return ""
    if group_size is None:
        decided = is_decided(result["scaling"])
        group_size = group_size_costs(result["scaling"], rollouts).best if decided else USUAL_SIZE
    row = min(
        result["noise"]["curve"], key=lambda row: abs(math.log(row["group_size"] / group_size))
    )
    scale, share = row_interval(row, "rollouts"), row_interval(row, "prompt_share")
    return noise_text(scale, share, row["group_size"], rollouts)


def rule_sizes_sentence(result: Mapping[str, Any]) -> str:
    """Of which rules the best group size grows with the rollouts, and of which this is not shown;
    "" where no rule was replayed.
    """
    rules = [row for row in result["scaling"].get("rules", []) if row["measure"] == "mse"]
    if not rules:
        return ""
    parts = []
    for row in rules:
        first, last = row["sizes"][0], row["sizes"][-1]
        sizes = (
            f"{first['group_size']} at n = {first['n']}, {last['group_size']} at n = {last['n']}"
        )
        grows = "" if row["grows"] else " (growth not shown)"
        parts.append(f"{row['baseline']} against the {row['target']}: {sizes}{grows}")
    return f"Best of the measured G by rule: {'; '.join(parts)}."


def dynamic_sampling_sentence(result: Mapping[str, Any], group_size: int | None = None) -> str:
    """What a kept group costs under dynamic sampling, and when it is worth that.

    Args:
        result: content of the study's `result.json`; "" where an earlier version wrote it.
        group_size: G; None: 8, of the measured sizes the nearest.
    """
    rows = result.get("dynamic_sampling")
    if not rows or result["assumption2"].get("corr") is None:
        return ""
    row = min(rows, key=lambda row: abs(math.log(row["group_size"] / (group_size or USUAL_SIZE))))
    more, even = row_interval(row, "generated"), row_interval(row, "break_even")
    text = (
        f"Dynamic sampling at G = {row['group_size']} generates {more.estimate:.2f} groups "
        f"[{more.low:.2f}, {more.high:.2f}] for a kept one; its gradient has the right direction "
        f"and {more.estimate:.2f} times the length"
    )
    if not math.isfinite(even.high):
        return f"{text}."
    if even.high >= 1:
        return f"{text}. Whether leaving zero-variance groups out would be better is not known."
    return (
        f"{text}. It beats leaving zero-variance groups out, without new ones, only while it "
        f"throws away less than {100 * even.high:.2g} % of its kept groups."
    )


def proxies_sentence(result: Mapping[str, Any]) -> str:
    """How well p (1-p) and length go with the noise that they stand for.

    Args:
        result: content of the study's `result.json`; "" where an earlier version wrote it, or where
            the pool is too small.
    """
    rows = result.get("proxies")
    if not rows or result["assumption2"].get("corr") is None:
        return ""
    variance, *_, length, within = rows
    parts = [
        f"{variance['proxy']} and {variance['target']} over prompts, corrected for attenuation: "
        f"{_correlation_text(variance)}",
        f"length and {length['target']} over completions, by ranks: {_correlation_text(length)}",
        f"over those of one prompt: {_correlation_text(within)}",
    ]
    return f"Proxies: {'; '.join(parts)}."


def _correlation_text(row: Mapping[str, Any]) -> str:
    """A correlation with its interval, and whether it is significantly different from 0."""
    estimate, low, high = row_interval(row, "correlation")
    if math.isnan(estimate):
        return "not enough data for a correlation"
    text = f"correlation {estimate:.2f} [{low:.2f}, {high:.2f}]"
    return f"{text} (not significantly different from 0)" if low <= 0 <= high else text


def allocation_sentence(result: Mapping[str, Any], group_size: int = USUAL_SIZE) -> str:
    """Whether groups of unequal size would save error.

    Args:
        result: content of the study's `result.json`; "" where an earlier version wrote it, or where
            the pool is too small.
        group_size: mean G, of the measured ones.
    """
    rows = [row for row in result.get("allocation", []) if row["group_size"] == group_size]
    known = [row for row in rows if row["change"] is not None]
    if not known or result["assumption2"].get("corr") is None:
        return ""
    best = min(known, key=lambda row: row["change"])
    change, low, high = row_interval(best, "change")
    verdict = "not significantly different from equal groups"
    if high < 0:
        verdict = "better than equal groups"
    elif low > 0:
        verdict = "worse than equal groups"
    own = [row["in_sample"] for row in rows if row["in_sample"] is not None]
    in_sample = f"; in sample the best sizes would change it by {percent(own[0])}" if own else ""
    return (
        f"Unequal groups of {group_size} on average: of {len(known)} plans from one half of the "
        f"pool, judged on the other, the best ({best['plan']}) changes the error by "
        f"{percent(change)} [{percent(low)}, {percent(high)}], {verdict}{in_sample}."
    )


def training_noise_sentence(
    metrics: Sequence[Mapping[str, Any]], group_size: int, rollouts: int
) -> str:
    """`noise_text` of a training run, averaged over the second half of its monitored steps; "" of
    fewer than 4 such steps.

    Args:
        metrics: rows of `metrics.jsonl`.
        group_size: G of the run.
        rollouts: n of its steps.
    """
    keys = [f"monitor/{name}" for name in CONSTANTS_AND_GRADIENT]
    rows = [row for row in metrics if all(row.get(key) is not None for key in keys)]
    recent = [row for row in rows if 2 * row["step"] >= rows[-1]["step"]]
    if len(recent) < LEAST_UNITS:
        return ""
    values_4S = np.array([[row[key] for row in recent] for key in keys])
    text = noise_text(*noise_of_steps(values_4S, group_size), group_size, rollouts)
    return text and f"{text} Steps {recent[0]['step']} to {recent[-1]['step']} together."


def row_interval(row: Mapping[str, Any], name: str) -> Interval:
    """An estimate and its ends from a row of a result: no estimate is NaN; no upper end infinite,
    where there is a lower one.
    """
    estimate, low, high = (row.get(f"{name}{end}") for end in ("", "_low", "_high"))
    return Interval(
        math.nan if estimate is None else estimate,
        math.nan if low is None else low,
        (math.nan if low is None else math.inf) if high is None else high,
    )


def open_interval(row: dict[str, Any], name: str) -> str:
    """An estimate to three digits with its interval, which may have no upper end; `-` where it is
    not known.

    >>> open_interval({"x": 2.0, "x_low": 1.0, "x_high": None}, "x"), open_interval({}, "x")
    ('2.00 [1.00, infinity)', '-')
    """
    estimate, low, high = row_interval(row, name)
    if math.isnan(low):
        return "-"
    first = "unknown" if math.isnan(estimate) else three_digits(estimate)
    end = f"{three_digits(high)}]" if math.isfinite(high) else "infinity)"
    return f"{first} [{three_digits(low)}, {end}"


def noise_text(scale: Interval, prompts: Interval, group_size: int, rollouts: int) -> str:
    """The noise scale in words, with the verdict on n.

    Args:
        scale: n_c, in rollouts.
        prompts: the share of the noise from prompts.
        group_size: G.
        rollouts: n of a training step.

    >>> text = noise_text(Interval(768, 512, 1024), Interval(0.25, 0.2, 0.3), 4, 256)
    >>> text.split(". ")[0].removeprefix("Noise: ")
    'at G = 4 the noise scale n_c is 768 rollouts [512, 1024], 25 % of it [20 %, 30 %] from prompts'
    >>> noise_text(Interval(9, 5, 20), Interval(0.25, 0.2, 0.3), 4, 256).split(": ")[2]
    'half as many rollouts would lose 3 % of what a step gains [2 %, 7 %].'
    """
    if math.isnan(scale.low):
        return ""
    ends = f"[{scale.low:.0f}, {f'{scale.high:.0f}]' if math.isfinite(scale.high) else 'infinity)'}"
    if math.isnan(scale.estimate):
        about = f"is not known: {ends} rollouts, since ||grad J||^2 is not significantly above 0"
    else:
        about = f"is {scale.estimate:.0f} rollouts {ends}"
        if math.isfinite(prompts.low):
            about += f", {_shares(prompts)[0]} % of it {_shares(prompts)[1]} from prompts"
    first = f"Noise: at G = {group_size} the noise scale n_c {about}."
    step, ends = _shares(noise_share(scale, rollouts))
    second = f"A step of {rollouts} rollouts is {step} % noise {ends}"
    if math.isnan(scale.estimate):
        second = f"Of a step of {rollouts} rollouts {ends} is noise"
    if rollouts < scale.low:
        more, ends = _shares(noise_share(scale, 2 * rollouts))
        gain = f", twice as many make a step gain {more} % more {ends}" if more else ""
        return f"{first} {second}: n is below n_c{gain}."
    if rollouts > scale.high:
        share = Interval(*(x / (rollouts + 2 * x) for x in scale))
        less, ends = _shares(share)
        loss = f"half as many rollouts would lose {less} % of what a step gains {ends}"
        return f"{first} {second}: {loss}."
    return f"{first} {second}; n is not significantly different from n_c."


def _shares(share: Interval) -> tuple[str, str]:
    """A share in percent and its interval in brackets; "" for an unknown estimate."""
    estimate, low, high = (f"{100 * x:.0f}" if math.isfinite(x) else "" for x in share)
    return estimate, f"[{low} %, {high} %]"


def percent(share: float) -> str:
    """A signed share in percent, without decimals.

    >>> percent(0.094), percent(-0.004), percent(12.3), percent(math.inf)
    ('+9 %', '0 %', '+1230 %', 'no upper end')
    """
    if share == math.inf:
        return "no upper end"
    value = round(100 * share)
    return f"{value:+d} %" if value else "0 %"


def interval_note(result: Mapping[str, Any]) -> str:
    """What the intervals of the decision speak of."""
    interval = result["curves"][0]["interval"]
    return (
        f"Intervals of 95 %, {INTERVALS[interval].format(result['questions'])}; those of the extra "
        "errors are paired and hold together."
    )


def next_step(
    result: Mapping[str, Any], config: Mapping[str, Any], rollouts: int = ROLLOUTS
) -> str:
    """What to do next, a command where there is one: train with the best G, or study more.

    Args:
        result: content of the study's `result.json`.
        config: the study's configuration.
        rollouts: n of a training step, halved where there are too few training questions.
    """
    best = (
        group_size_costs(result["scaling"], rollouts).best
        if is_decided(result["scaling"])
        else None
    )
    if (config.get("pool") or "").endswith(".parquet"):  # of another framework, which trains
        if best is None:
            return "log more prompts, and import them in the same way"
        return f"train with num_generations={best} where these rollouts were logged"
    shared = policy_overrides(config)
    if result["assumption2"].get("corr") is None:
        return command_line("mse", *shared, "debug=prompts")
    if best is not None:
        most = config["dataset"].get("train_size") or math.inf
        while rollouts // best > most and rollouts // 2 % best == 0:  # too few training questions
            rollouts //= 2
        return command_line("train", *shared, f"budget.rollouts={rollouts}", f"group_size={best}")
    questions, most = result["questions"], config["dataset"].get("study_size")
    needed = min(_prompts_needed(result) or 2 * questions, most or math.inf)
    if needed > questions:
        return command_line("mse", *shared, f"study.questions={needed}")
    twice = 2 * result["pool_completions"]
    return command_line("mse", *shared, f"budget.pool_completions={twice}")


def _prompts_needed(result: Mapping[str, Any]) -> int | None:
    """See `ScalingEstimate.prompts_for_best_size`; more than there are, to two digits."""
    if "covariance" not in result["scaling"]:
        return None
    questions = result["questions"]
    needed = scaling_estimate_of(result["scaling"]).prompts_for_best_size(questions)
    return None if needed is None else questions + int(float(f"{max(needed - questions, 1):.2g}"))


def policy_overrides(config: Mapping[str, Any]) -> list[str]:
    """Overrides that choose the model, the questions, the sampling and the rewards of a
    configuration.
    """
    overrides = []
    for group, other in (("model", "hub"), ("dataset", "own"), ("prompt", "plain")):
        node = config[group]
        shipped = f"{node['name']}.yaml" in {file.name for file in (CONF / group).iterdir()}
        of_kind = "jsonl" if node.get("kind") == "jsonl" else other
        name = node["name"] if shipped else of_kind
        values = yaml.safe_load((CONF / group / f"{name}.yaml").read_text())
        changes = list(_changes(node, values, f"{group}."))
        if name == "hub" and "/" in node["model_name_or_path"]:
            place = next(x for x in changes if x.startswith("model.model_name_or_path="))
            changes.remove(place)
            overrides += [place.replace(".model_name_or_path", "", 1), *changes]
        else:
            overrides += [f"{group}={name}", *changes]
    values = yaml.safe_load((CONF / "common.yaml").read_text())
    values["max_completion_length"] = config["dataset"].get("max_completion_length")
    sampling = {key: config[key] for key in ("temperature", "max_completion_length")}
    # configurations of before had no reward functions
    rewards = {key: config[key] for key in ("reward_funcs", "reward_weights") if key in config}
    return [*overrides, *_changes(sampling | rewards, values)]


def _changes(node: Mapping[str, Any], values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Overrides of the fields of a node that are not as in its file."""
    for key, value in node.items():
        default = values.get(key)
        if value == default or isinstance(value, dict) or str(default).startswith("${"):
            continue
        text = yaml.safe_dump(value, default_flow_style=True, width=math.inf).split("\n")[0]
        if isinstance(value, str) and not re.fullmatch(r"[\w./:@+-]+", value):
            text = "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
            text = text.replace("${", "\\${")  # which OmegaConf would look up
        if isinstance(value, list) and not {"'", '"'} & set(text):
            text = text.replace(", ", ",")  # as one types it
        yield f"{prefix}{key}={text}"
