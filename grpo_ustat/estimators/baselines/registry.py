"""All rules by name, and the one way to call them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from functools import partial
from importlib.metadata import entry_points

import numpy as np

from grpo_ustat.estimators.baselines import batch, group, prompt_only, several, stateful
from grpo_ustat.estimators.baselines.base import Baseline
from grpo_ustat.records import Array, BaselineContext

_prompt_only_rule = partial(Baseline, unbiased=True, min_group_size=1, prompt_only=True)
_batch_rule = partial(Baseline, unbiased=False, couples_prompts=True)
_LENGTHS = frozenset({"lengths_PG"})
_EPSILON = ("epsilon",)

PLUGIN_GROUP = "grpo_ustat.baselines"  # entry points, each a `Baseline` of the same name


class _Rules(dict[str, Baseline]):
    """Rules by name; one of an installed package is loaded when it is first looked up.

    Raises:
        KeyError: no rule has this name.
        TypeError: the entry point is no `Baseline` of this name, or cannot be called as rules are.
    """

    def __missing__(self, name: str) -> Baseline:
        rule = entry_points(group=PLUGIN_GROUP)[name].load()
        if not isinstance(rule, Baseline) or rule.name != name:
            raise TypeError(
                f"entry point {name} of {PLUGIN_GROUP} is {rule!r:.80}: it must be a Baseline of "
                f"name {name!r}"
            )
        takes = inspect.signature(rule.advantage)
        options = [option for option in rule.options if option not in rule.of_memory]
        try:
            takes.bind("rewards_PG", "context", **dict.fromkeys(options))
        except TypeError as error:
            called = ", ".join(("rewards_PG", "context", *options))
            raise TypeError(f"{name} takes {takes!s:.120}: write it as ({called})") from error
        self[name] = rule
        return rule


BASELINES = _Rules(
    (rule.name, rule)
    for rule in (
        _prompt_only_rule("none", prompt_only.none),
        Baseline("leave_one_out", group.leave_one_out, unbiased=True, min_group_size=2),
        Baseline("group_mean", group.group_mean, unbiased=False, min_group_size=2),
        _prompt_only_rule("oracle", prompt_only.oracle, needs=frozenset({"value_P"})),
        _prompt_only_rule("constant", prompt_only.constant, options=("value",)),
        _prompt_only_rule(
            "running_mean", stateful.running_mean,
            needs=frozenset({"running"}), options=("decay",), of_memory=("decay",),
        ),
        _prompt_only_rule("optimal", prompt_only.optimal, needs=frozenset({"optimal_P"})),
        _prompt_only_rule("remax", prompt_only.remax, needs=frozenset({"greedy_P"})),
        _prompt_only_rule(
            "critic", stateful.critic, needs=frozenset({"critic_P"}),
            options=("decay", "ridge"), of_memory=("decay", "ridge"),
        ),
        Baseline(
            "group_std", group.group_std, unbiased=False, min_group_size=2, target="g_over_sigma",
            options=_EPSILON,
        ),
        Baseline(
            "maxrl", group.maxrl, unbiased=False, min_group_size=2, target="g_over_v",
            options=_EPSILON,
        ),
        Baseline("opo", group.opo, unbiased=True, min_group_size=2, needs=_LENGTHS),
        Baseline("opo_self", group.opo_self, unbiased=False, min_group_size=2, needs=_LENGTHS),
        _batch_rule(
            "batch_std", batch.batch_std, min_group_size=2, target="multiple_of_g",
            options=_EPSILON,
        ),
        _batch_rule(
            "reinforce_pp", batch.reinforce_pp, min_group_size=1, target="multiple_of_g",
            needs=_LENGTHS, options=_EPSILON,
        ),
        _batch_rule(
            "reinforce_pp_baseline", batch.reinforce_pp_baseline, min_group_size=2,
            target="multiple_of_g", needs=_LENGTHS, options=_EPSILON,
        ),
        Baseline(
            "james_stein", batch.james_stein, unbiased=True, couples_prompts=True,
            min_group_size=2, min_prompts=3, options=_EPSILON,
        ),
        Baseline(
            "jspo", batch.jspo, unbiased=True, couples_prompts=True,
            min_group_size=2, min_prompts=3, options=_EPSILON,
        ),
        _batch_rule(
            "beta", batch.beta, min_group_size=2, target="g_over_density",
            options=("minimum", "maximum", "ceiling"),
        ),
        _batch_rule(
            "spo", stateful.spo, min_group_size=1, target="multiple_of_g",
            needs=frozenset({"tracker_P"}),
            options=("epsilon", "rho_min", "rho_max", "half_distance"),
            of_memory=("rho_min", "rho_max", "half_distance"),
        ),
        Baseline(
            "group_std_jackknife", group.group_std_jackknife, unbiased=False, min_group_size=3,
            target="g_over_sigma", options=_EPSILON,
        ),
        Baseline(
            "leave_one_out_std", group.leave_one_out_std, unbiased=False, min_group_size=3,
            target="g_over_sigma", options=_EPSILON,
        ),
        Baseline(
            "quantile", group.quantile, unbiased=False, min_group_size=2, target="g_over_sigma",
            options=("level", "epsilon"),
        ),
        Baseline(
            "pods", group.pods, unbiased=False, min_group_size=2, target="kept_part",
            options=("share", "epsilon"),
        ),
        _batch_rule(
            "length_weighted", batch.length_weighted, min_group_size=2,
            target="weighted_by_length", needs=_LENGTHS, options=("power", "epsilon"),
        ),
        _batch_rule(
            "ebpo", stateful.ebpo, min_group_size=2, target="multiple_of_g",
            needs=frozenset({"history"}), options=_EPSILON,
        ),
        Baseline(
            "krpo", group.krpo, unbiased=False, min_group_size=2, target="multiple_of_g",
            options=("process_variance", "measurement_variance", "epsilon"),
        ),
        _batch_rule(
            "gdpo", several.gdpo, min_group_size=2, target="sum_g_over_sigma",
            needs=frozenset({"rewards_PGF", "reward_weights_F"}), options=_EPSILON,
        ),
    )
)  # fmt: skip


OURS = tuple(BASELINES)


def own_rules(names: Iterable[str] | None = None) -> set[str]:
    """Rules that installed packages offer, of these names or all; ours cannot be replaced."""
    if names is not None and set(OURS).issuperset(names):
        return set()
    offered = entry_points(group=PLUGIN_GROUP).names.difference(OURS)
    return offered if names is None else offered.intersection(names)


def advantages(
    name: str,
    rewards_PG: Array,
    context: BaselineContext,
    options: Mapping[str, float] | None = None,
) -> Array:
    """Advantages of a baseline by name, shape [P, G], float64.

    Args:
        name: a key of `BASELINES`.
        rewards_PG: rewards of all prompts of the batch, float64.
        context: what else the rule reads.
        options: the rule's options, exactly those of `Baseline.options`.

    Raises:
        ValueError: too few completions or prompts, or other options than the rule's.
    """
    rule, options = BASELINES[name], dict(options or {})
    assert rewards_PG.ndim == 2 and rewards_PG.dtype == np.float64
    check_options(name, options)
    check_shape(name, *rewards_PG.shape)
    rule_options = {key: value for key, value in options.items() if key not in rule.of_memory}
    return rule.advantage(rewards_PG, context, **rule_options)


def check_options(name: str, options: Mapping[str, float]) -> None:
    """Refuse options that are not exactly the rule's.

    Raises:
        ValueError: naming those unknown or missing.
    """
    names = BASELINES[name].options
    faults = {
        "unknown": sorted(set(options) - set(names)),
        "missing": sorted(set(names) - set(options)),
    }
    if any(faults.values()):
        wrong = [f"{word} {', '.join(names)}" for word, names in faults.items() if names]
        raise ValueError(
            f"options of baseline {name}: {'; '.join(wrong)}; "
            f"it takes {', '.join(names) if names else 'none'}"
        )


def check_shape(name: str, num_prompts: int, group_size: int) -> None:
    """Refuse fewer completions or prompts than the rule is defined for.

    Raises:
        ValueError: naming both numbers.
    """
    rule = BASELINES[name]
    if group_size < rule.min_group_size:
        raise ValueError(
            f"baseline {name} needs groups of at least {rule.min_group_size} completions, "
            f"got group_size={group_size}"
        )
    if num_prompts < rule.min_prompts:
        raise ValueError(
            f"baseline {name} needs at least {rule.min_prompts} prompts, got {num_prompts}"
        )
    if rule.couples_prompts and num_prompts * group_size < 2:
        raise ValueError(
            f"baseline {name} scales by the batch's spread and needs 2 completions, got 1"
        )
