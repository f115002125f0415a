"""From a configuration to the bed and the study that it names."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from grpo_ustat.checks import ConfigError
from grpo_ustat.gap_config import GapConfig
from grpo_ustat.policy.beds import Bed, Coins, Softmax, projection
from grpo_ustat.policy.sequences import SequencePolicy
from grpo_ustat.rollout.draws import generator
from grpo_ustat.theorems.algorithm1 import Estimator
from grpo_ustat.theorems.finding import Finding
from grpo_ustat.theorems.jobs import Rate


def study(config: GapConfig) -> Finding:
    """Run the study that the configuration names.

    Raises:
        ConfigError: it cannot be run on this bed.
    """
    return RUN[config.study.kind](config)


def check_asked(config: GapConfig) -> None:
    """Refuse before any work what a theorem says nothing about: a bed, learning rates, runs.

    Raises:
        ConfigError: naming the values and the fix.
    """
    if config.study.kind == "theorem12":
        from grpo_ustat.theorems import theorem12

        names = ("learning_rates", "updates", "group_size", "beta", "replicates", "lengths")
        theorem12.check_asked(config.bed.length, *(getattr(config.study, name) for name in names))
    elif config.study.kind == "best_group_size":
        from grpo_ustat.theorems import trained_runs as runs

        study = runs.measured_policy(config.study.measured)
        runs.check_same_start(runs.trained_runs(config.study.trained), study)
    else:
        _check_plane(config, bed_of(config))


def _check_plane(config: GapConfig, bed: Bed) -> None:
    if config.study.kind == "proposition13" and len(bed.start_K) != 1:
        raise ConfigError(
            f"study=proposition13 with {len(bed.start_K)} coordinates in bed.start: it needs one"
        )
    if hasattr(config.study, "decaying_rate"):
        _check_rates(config, bed)


def bed_of(config: GapConfig) -> Bed:
    """The bed, whose truth is enumerated.

    Raises:
        ConfigError: its numbers make no policy with a finite maximum.
    """
    asked = config.bed
    shared = {
        "projection_KD": projection(len(asked.start), asked.parameters, asked.seed),
        "start_K": np.array(asked.start, dtype=float),
        "reach": asked.reach,
    }
    try:
        bed = _coins(asked, shared) if asked.kind == "coins" else _softmax(asked, shared)
        first = float(bed.gap(bed.start_K[:, None])[0])
        lowest = float(np.linalg.eigvalsh(bed.curvature_KK)[0])
    except (ValueError, np.linalg.LinAlgError) as error:
        raise ConfigError(f"bed={asked.name}: {error}") from error
    if not np.isfinite(first) or lowest <= 0:
        raise ConfigError(
            f"bed={asked.name} has no finite maximum (curvature {lowest:.3g} where the gradient "
            "vanishes): pull its prompts apart less, or change its rewards"
        )
    if first > asked.reach:
        raise ConfigError(
            f"bed.start={asked.start} is {first:.4g} below the maximum, bed.reach={asked.reach}: "
            "start nearer, or raise bed.reach"
        )
    return bed


def _coins(asked, shared: dict) -> Coins:
    return Coins(
        rewards_PY=np.tile([1.0, 1.0, 0.0, 0.0], (len(asked.values), 1)),
        value_P=np.array(asked.values),
        slope_PK=np.array(asked.slopes),
        style_PK=np.array(asked.styles),
        lambda_K=np.array(asked.curvature),
        **shared,
    )


def _softmax(asked, shared: dict) -> Softmax:
    features = np.array(asked.features)
    offset_PY = -np.array(asked.centres) @ features.T
    rewards = np.array(asked.rewards)
    return Softmax(rewards_PY=rewards, feature_YK=features, offset_PY=offset_PY, **shared)


def sequences_of(config: GapConfig) -> tuple[SequencePolicy, SequencePolicy, np.ndarray]:
    """Policy, reference policy and rewards [P, Y], drawn by the bed's seed."""
    asked, draw = config.bed, generator(config.bed.seed, "sequences")
    shape = (asked.length, asked.vocabulary, asked.vocabulary)
    theta, offsets = draw.normal(size=shape), draw.normal(size=(asked.prompts, asked.vocabulary))
    policy = SequencePolicy(asked.spread * theta, asked.spread * offsets / 2)
    moved = policy.theta_D + asked.apart * draw.normal(size=policy.theta_D.shape)
    rewards = draw.random((asked.prompts, asked.vocabulary**asked.length))
    return policy, policy.at(moved), rewards


def _rates(config: GapConfig) -> list[Rate]:
    asked = config.study
    constant = [Rate("constant", rate) for rate in getattr(asked, "constant_rates", [])]
    return [*constant, Rate("decaying", asked.decaying_rate, asked.offset)]


def _check_rates(config: GapConfig, bed: Bed) -> None:
    """Those that the theorems ask for: eta < 2/L, 2 mu c > 1 with the bed's own mu and L.

    Raises:
        ConfigError: naming both.
    """
    mu, smoothness = bed.constants
    for rate in getattr(config.study, "constant_rates", []):
        if rate >= 2 / smoothness:
            raise ConfigError(
                f"study.constant_rates has {rate}, L of bed={config.bed.name} is {smoothness:.4g}: "
                f"use rates below {2 / smoothness:.4g}"
            )
    least = 0.5 / (mu if config.study.kind == "lemma6" else np.linalg.eigvalsh(bed.curvature_KK)[0])
    if config.study.decaying_rate <= least:
        raise ConfigError(
            f"study.decaying_rate={config.study.decaying_rate} on bed={config.bed.name}: use more "
            f"than {least:.4g}, so that 2 mu c > 1"
        )


def _simulated(config: GapConfig) -> tuple[Bed, dict]:
    return bed_of(config), {
        "replicates": config.study.replicates,
        "seed": config.seed,
        "workers": config.launch.workers,
    }


def _estimator(name: str, rollouts: int, size: int) -> Estimator:
    return Estimator(name, rollouts // size, size)


def _lemma6(config: GapConfig) -> Finding:
    from grpo_ustat.theorems.lemma6 import lemma6

    (bed, how), asked = _simulated(config), config.study
    ones = [_estimator(name, asked.rollouts, asked.group_size) for name in asked.baselines]
    return lemma6(bed, ones, _rates(config), asked.steps, **how)


def _theorem7(config: GapConfig) -> Finding:
    from grpo_ustat.theorems.theorem7 import theorem7

    (bed, how), asked = _simulated(config), config.study
    shape = asked.rollouts, asked.group_sizes
    return theorem7(bed, *shape, _rates(config), asked.steps, **how)


def _theorem8(config: GapConfig) -> Finding:
    from grpo_ustat.theorems.theorem8 import theorem8

    (bed, how), asked = _simulated(config), config.study
    first = asked.group_sizes[0]
    pairs = [("none", first), *(("leave_one_out", g) for g in asked.group_sizes), ("oracle", first)]
    ones = [_estimator(name, asked.rollouts, size) for name, size in pairs]
    return theorem8(bed, ones, *_rates(config), asked.steps, **how)


def _corollaries(config: GapConfig) -> Finding:
    from grpo_ustat.theorems.corollaries import corollaries

    (bed, how), asked = _simulated(config), config.study
    sizes = asked.group_sizes, *_rates(config), asked.steps
    return corollaries(bed, asked.rollouts, *sizes, **how)


def _proposition13(config: GapConfig) -> Finding:
    from grpo_ustat.theorems.proposition13 import proposition13

    (bed, how), asked = _simulated(config), config.study
    shape = asked.group_sizes, asked.num_prompts, asked.epsilon
    return proposition13(bed, *shape, *_rates(config), asked.steps, **how)


def _lemma11(config: GapConfig) -> Finding:
    from grpo_ustat.theorems.lemma11 import lemma11

    bed, asked = bed_of(config), config.study
    probability_PYR, score_PYKR = bed.law(bed.start_K[:, None])
    law = probability_PYR[..., 0], score_PYKR[..., 0], bed.rewards_PY
    return lemma11(*law, asked.group_sizes, asked.epsilon)


def _theorem12(config: GapConfig) -> Finding:
    from grpo_ustat.theorems.theorem12 import theorem12

    (policy, reference, rewards), asked = sequences_of(config), config.study
    names = ("learning_rates", "updates", "group_size", "num_prompts", "beta", "replicates")
    given = {name: getattr(asked, name) for name in (*names, "lengths", "shift")}
    return theorem12(policy, rewards, reference=reference, seed=config.seed, **given)


def _best_group_size(config: GapConfig) -> Finding:
    from grpo_ustat.theorems.best_group_size import best_group_size

    return best_group_size(config.study.trained, config.study.measured)


RUN: dict[str, Callable[[GapConfig], Finding]] = {
    "lemma6": _lemma6,
    "theorem7": _theorem7,
    "theorem8": _theorem8,
    "corollaries9_10": _corollaries,
    "lemma11": _lemma11,
    "theorem12": _theorem12,
    "proposition13": _proposition13,
    "best_group_size": _best_group_size,
}
