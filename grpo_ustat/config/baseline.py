"""Schema of a baseline and the checks of its name, options and group size.

Every error message is one line that gives the values and the fix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_ustat.config.own_functions import load_registered
from grpo_ustat.config.schema import ConfigError, field
from grpo_ustat.estimators.baselines import BASELINES, plugin_baselines
from grpo_ustat.estimators.baselines import check_options as check_option_names
from grpo_ustat.estimators.baselines import check_shape as check_rewards_shape


@dataclass(frozen=True)
class Option:
    """Meaning and range of an option, which are the same for every baseline with this option."""

    meaning: str
    low: float = -math.inf
    high: float = math.inf


OPTIONS = {
    "value": Option("number that is subtracted from rewards"),
    "epsilon": Option("number added to the divisor, so that the divisor is never 0", 0.0),
    "level": Option(
        "level, from 0 to 1, of the quantile of the group's rewards that is used as baseline",
        0.0,
        1.0,
    ),
    "share": Option("share of the group's completions that is kept", 1e-12, 1.0),
    "power": Option(
        "exponent p, if a completion's weight is divided by its length to the power p", 0.0, 10.0
    ),
    "decay": Option(
        "factor by which each step multiplies the weight of the past, in a running mean or in a "
        "critic's fit",
        0.0,
        1.0,
    ),
    "ridge": Option("penalty on the weights of the critic's head", 1e-12),
    "minimum": Option("smallest possible reward"),
    "maximum": Option("largest possible reward"),
    "ceiling": Option("upper limit of the advantage's factor 1/density", 1e-12),
}


def check_group_size(baseline: str, group_size: int, key: str = "group_size") -> None:
    """Refuse a group that is too small for the baseline; `key` is the setting to increase."""
    smallest = BASELINES[baseline].min_group_size
    if group_size < smallest:
        raise ConfigError(
            f"{key}={group_size} with baseline {baseline}, which needs at least {smallest} "
            f"completions per group: use {smallest} or more"
            + (", or baseline none" if BASELINES["none"].min_group_size < smallest else "")
        )


def check_shape(baseline: str, num_prompts: int, group_size: int, key: str) -> None:
    """Refuse too few prompts or completions for the baseline; `key` is the setting to increase."""
    try:
        check_rewards_shape(baseline, num_prompts, group_size)
    except ValueError as error:
        raise ConfigError(f"{error}: raise {key}") from error


def check_options(baseline: BaselineConfig, key: str) -> None:
    """Refuse options that the baseline does not have or that are out of range."""
    try:
        check_option_names(baseline.name, baseline.options)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error
    for name, value in baseline.options.items():
        allowed = OPTIONS.get(name, Option(""))
        if not (math.isfinite(value) and allowed.low <= value <= allowed.high):
            raise ConfigError(
                f"{key}.{name}={value} must be finite and in [{allowed.low}, {allowed.high}]"
            )
    low, high = (baseline.options.get(name) for name in ("minimum", "maximum"))
    if low is not None and high is not None and low >= high:
        raise ConfigError(f"{key}: minimum={low} maximum={high}: use minimum < maximum")


@dataclass
class BaselineConfig:
    """Baseline that turns rewards into advantages, and the values of its options."""

    name: str = field(
        "name of the baseline; set by baseline=NAME",
        choices=tuple(BASELINES),
        plugins=plugin_baselines,
    )
    options: dict[str, float] = field(
        "options of the baseline; every option of the chosen baseline needs a value",
        entries={name: option.meaning for name, option in OPTIONS.items()},
    )


def baseline_choice(name: str) -> BaselineConfig:
    """Return the baseline that `baseline=NAME` selects, with default options."""
    return BaselineConfig(name, dict(BASELINES[name].options))


def complete_plugin_options(baseline: BaselineConfig, key: str) -> None:
    """Fill in defaults for unset options of a baseline from an installed package, in place.

    Args:
        baseline: baseline to complete; a built-in baseline is not changed.
        key: configuration key with the name, for errors.
    """
    if plugin_baselines([baseline.name]):
        baseline.options = load_registered(BASELINES, key, baseline.name).options | baseline.options
