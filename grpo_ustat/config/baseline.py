"""The schema of a baseline, and the checks of its name, options and group size.

A check refuses in one line that names values and fix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_ustat.config.schema import ConfigError, field
from grpo_ustat.estimators.baselines import BASELINES, Baseline, own_rules
from grpo_ustat.estimators.baselines import check_options as check_option_names
from grpo_ustat.estimators.baselines import check_shape as check_rewards_shape

OPTIONS = {  # of baselines, and what they mean
    "value": "the number that is subtracted",
    "process_variance": "Q of the Kalman filter, added to its variance with each completion",
    "measurement_variance": "R of the Kalman filter, of a reward around its latent mean",
    "epsilon": "added to what divides, so that it is never 0",
    "level": "share of the group at or below the quantile that is the baseline",
    "share": "of the group that is kept",
    "power": "of the length by which a completion counts less",
    "decay": "how much of the past stays with each step, of a running mean or a critic's fit",
    "ridge": "penalty on the weights of the critic's head",
    "minimum": "smallest reward there is",
    "maximum": "largest reward there is",
    "ceiling": "largest 1/density",
    "rho_min": "smallest discount of the past; 1/(1 - rho_min) draws are worth the start",
    "rho_max": "largest discount of the past",
    "half_distance": "mean |change of a token's log-probability| that halves the past",
}
RANGES = {  # of those that have one
    "epsilon": (0.0, math.inf),
    "level": (0.0, 1.0),
    "share": (1e-12, 1.0),
    "power": (0.0, 10.0),
    "decay": (0.0, 1.0),
    "ridge": (1e-12, math.inf),
    "process_variance": (0.0, math.inf),
    "measurement_variance": (1e-12, math.inf),
    "ceiling": (1e-12, math.inf),
    "rho_min": (0.0, 0.999),
    "rho_max": (0.0, 1.0),
    "half_distance": (1e-12, math.inf),
}


def load_rule(key: str, name: str) -> Baseline:
    """Return a baseline of ours, or one that an installed package offers.

    Args:
        key: configuration key that names it, for errors.
        name: one of the field's choices.
    """
    try:
        return BASELINES[name]
    except Exception as error:  # the package's own
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{key}={name} cannot be loaded: {reason}") from error


def check_group_size(baseline: str, group_size: int, key: str = "group_size") -> None:
    """Refuse a group that is too small for the baseline; `key` is the setting to raise."""
    smallest = BASELINES[baseline].min_group_size
    if group_size < smallest:
        raise ConfigError(
            f"{key}={group_size} with baseline {baseline}, which needs at least {smallest} "
            f"completions a group: use {smallest} or more"
            + (", or baseline none" if BASELINES["none"].min_group_size < smallest else "")
        )


def check_shape(baseline: str, num_prompts: int, group_size: int, key: str) -> None:
    """Refuse fewer prompts or completions than the baseline needs; `key` is what to raise."""
    try:
        check_rewards_shape(baseline, num_prompts, group_size)
    except ValueError as error:
        raise ConfigError(f"{error}: raise {key}") from error


def check_options(rule: BaselineConfig, key: str) -> None:
    """Refuse options that a rule does not take, or that are out of range."""
    try:
        check_option_names(rule.name, rule.options)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error
    for name, value in rule.options.items():
        low, high = RANGES.get(name, (-math.inf, math.inf))
        if not (math.isfinite(value) and low <= value <= high):
            raise ConfigError(f"{key}.{name}={value} must be finite and in [{low}, {high}]")
    for low, high in (("minimum", "maximum"), ("rho_min", "rho_max")):
        if low in rule.options and rule.options[low] >= rule.options[high]:
            raise ConfigError(
                f"{key}: {low}={rule.options[low]} {high}={rule.options[high]}: use {low} < {high}"
            )


@dataclass
class BaselineConfig:
    """The rule that turns rewards into advantages, and the values of exactly its options."""

    name: str = field(
        "of the rule; choose by baseline=NAME", choices=tuple(BASELINES), plugins=own_rules
    )
    options: dict[str, float] = field("of the rule, exactly those that it takes", entries=OPTIONS)
