"""All rules by name, and the one way to call them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points

import numpy as np

from grpo_ustat.estimators.baselines import batch, group, memory, prompt_only
from grpo_ustat.estimators.baselines.base import Baseline
from grpo_ustat.records import BaselineContext

_PROMPT_ONLY = {"unbiased": True, "min_group_size": 1, "prompt_only": True}
_WHOLE_BATCH = {"unbiased": False, "couples_prompts": True}
_LENGTHS = frozenset({"lengths_PG"})
_EPSILON = ("epsilon",)

OWN = "grpo_ustat.baselines"  # the group of entry points, each a `Baseline` of the same name


class _Rules(dict[str, Baseline]):
    """Rules by name; one of an installed package joins when it is first asked for."""

    def __missing__(self, name: str) -> Baseline:
        self[name] = _own(name)
        return self[name]


BASELINES = _Rules(
    (rule.name, rule)
    for rule in (
        Baseline("none", prompt_only.none, **_PROMPT_ONLY),
        Baseline("leave_one_out", group.leave_one_out, unbiased=True, min_group_size=2),
        Baseline("group_mean", group.group_mean, unbiased=False, min_group_size=2),
        Baseline("oracle", prompt_only.oracle, **_PROMPT_ONLY, needs=frozenset({"value_P"})),
        Baseline("constant", prompt_only.constant, **_PROMPT_ONLY, options=("value",)),
        Baseline(
            "running_mean", memory.running_mean, **_PROMPT_ONLY,
            needs=frozenset({"running"}), options=("decay",), of_memory=("decay",),
        ),
        Baseline("optimal", prompt_only.optimal, **_PROMPT_ONLY, needs=frozenset({"optimal_P"})),
        Baseline("remax", prompt_only.remax, **_PROMPT_ONLY, needs=frozenset({"greedy_P"})),
        Baseline(
            "critic", memory.critic, **_PROMPT_ONLY, needs=frozenset({"critic_P"}),
            options=("decay", "ridge"), of_memory=("decay", "ridge"),
        ),
        Baseline(
            "group_std", group.group_std, unbiased=False, min_group_size=2, target="arcsin",
            options=_EPSILON,
        ),
        Baseline(
            "maxrl", group.maxrl, unbiased=False, min_group_size=2, target="log_value",
            options=_EPSILON,
        ),
        Baseline("opo", group.opo, unbiased=True, min_group_size=2, needs=_LENGTHS),
        Baseline("opo_self", group.opo_self, unbiased=False, min_group_size=2, needs=_LENGTHS),
        Baseline("batch_std", batch.batch_std, **_WHOLE_BATCH, min_group_size=2, options=_EPSILON),
        Baseline(
            "reinforce_pp", batch.reinforce_pp, **_WHOLE_BATCH, min_group_size=1, needs=_LENGTHS,
            options=_EPSILON,
        ),
        Baseline(
            "reinforce_pp_baseline", batch.reinforce_pp_baseline, **_WHOLE_BATCH, min_group_size=2,
            needs=_LENGTHS, options=_EPSILON,
        ),
        Baseline(
            "james_stein", batch.james_stein, unbiased=True, couples_prompts=True,
            min_group_size=2, min_prompts=3, options=_EPSILON,
        ),
        Baseline(
            "beta", batch.beta, **_WHOLE_BATCH, min_group_size=2,
            options=("minimum", "maximum", "ceiling"),
        ),
        Baseline(
            "spo", memory.spo, **_WHOLE_BATCH, min_group_size=1, needs=frozenset({"tracker_P"}),
            options=("epsilon", "rho_min", "rho_max", "half_distance"),
            of_memory=("rho_min", "rho_max", "half_distance"),
        ),
    )
)  # fmt: skip


_OURS = frozenset(BASELINES)


def own_rules(names: Iterable[str] | None = None) -> set[str]:
    """Rules that installed packages offer, of these names or all; ours cannot be replaced."""
    if names is not None and _OURS.issuperset(names):
        return set()
    found = entry_points(group=OWN).names - _OURS
    return found if names is None else found.intersection(names)


def _own(name: str) -> Baseline:
    """A rule of an installed package.

    Raises:
        KeyError: none is called so.
        TypeError: it is no `Baseline` of that name.
    """
    rule = entry_points(group=OWN)[name].load()
    if not isinstance(rule, Baseline) or rule.name != name:
        raise TypeError(
            f"entry point {name} of {OWN} is {rule!r:.80}: it must be a Baseline of name {name!r}"
        )
    return rule


def advantages(
    name: str,
    rewards_PG: np.ndarray,
    context: BaselineContext,
    options: Mapping[str, float] | None = None,
) -> np.ndarray:
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
    mine = {key: value for key, value in options.items() if key not in rule.of_memory}
    return rule.advantage(rewards_PG, context, **mine)


def check_options(name: str, options: Mapping[str, float]) -> None:
    """Refuse options that are not exactly the rule's.

    Raises:
        ValueError: naming those unknown or missing.
    """
    known = BASELINES[name].options
    unknown, missing = sorted(set(options) - set(known)), sorted(set(known) - set(options))
    if unknown or missing:
        wrong = [f"{word} {', '.join(x)}" for word, x in
                 (("unknown", unknown), ("missing", missing)) if x]  # fmt: skip
        raise ValueError(
            f"options of baseline {name}: {'; '.join(wrong)}; "
            f"it takes {', '.join(known) if known else 'none'}"
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
