"""Registry of all rules by name: their declaration, and the function that calls them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib.metadata import entry_points
from typing import TypeVar

import numpy as np

from grpo_ustat.estimators.baselines.base import Baseline
from grpo_ustat.records import Array, BaselineContext

Rule = TypeVar("Rule", bound=Callable[..., Array])

# Group of entry points, each a `Baseline` of the same name.
PLUGIN_GROUP = "grpo_ustat.baselines"


class _Rules(dict[str, Baseline]):
    """Our rules by name.

    A lookup also gives a rule of an installed package, which is none of the keys.

    Raises:
        KeyError: no rule has this name.
        TypeError: the entry point is no `Baseline` of this name, or cannot be called as rules are.
    """

    def __init__(self) -> None:
        super().__init__()
        self._loaded: dict[str, Baseline] = {}

    def __missing__(self, name: str) -> Baseline:
        if name not in self._loaded:
            self._loaded[name] = _load(name)
        return self._loaded[name]


def _load(name: str) -> Baseline:
    """Load the rule that an installed package offers by this name, see `_Rules`."""
    rule = entry_points(group=PLUGIN_GROUP)[name].load()
    if not isinstance(rule, Baseline) or rule.name != name:
        raise TypeError(
            f"entry point {name} of {PLUGIN_GROUP} is {rule!r:.80}: it must be a Baseline of "
            f"name {name!r}"
        )
    takes = inspect.signature(rule.advantage)
    try:
        takes.bind("rewards_PG", "context")
    except TypeError as error:
        raise TypeError(
            f"{name} takes {takes!s:.120}: write it as (rewards_PG, context), options behind these "
            "as option=default"
        ) from error
    defaults: dict[str, object] = {**rule.options}
    for option, default in defaults.items():
        if not isinstance(default, (int, float)):
            raise TypeError(
                f"option {option} of {name} is {default!r:.80}: its default is a number"
            )
    return rule


BASELINES = _Rules()


def rule(
    words: str,
    *,
    unbiased: bool,
    min_group_size: int,
    min_prompts: int = 1,
    prompt_only: bool = False,
    couples_prompts: bool = False,
    needs: Collection[str] = (),
    memory: Mapping[str, float] | None = None,
    target: str = "expected_reward",
) -> Callable[[Rule], Rule]:
    """Return a decorator that puts a function, unchanged, among `BASELINES` by its own name.

    A rule of ours needs nothing else: command line, `--help` and studies read it there. Another
    package offers a `Baseline`.

    Args:
        words: description in `--help`, which shows only its first sentence if it is long.
        unbiased, min_group_size, min_prompts, prompt_only, couples_prompts, needs, memory, target:
            see `Baseline`.
    """

    def declare(advantage: Rule) -> Rule:
        """Enter a rule in `BASELINES`, and return it."""
        name = advantage.__name__
        BASELINES[name] = Baseline(
            name,
            advantage,
            unbiased=unbiased,
            min_group_size=min_group_size,
            min_prompts=min_prompts,
            prompt_only=prompt_only,
            couples_prompts=couples_prompts,
            needs=frozenset(needs),
            memory=memory or {},
            target=target,
            words=words,
        )
        return advantage

    return declare


def own_rules(names: Iterable[str] | None = None) -> set[str]:
    """Return the rules of installed packages, of these names or all; ours cannot be replaced."""
    if names is not None and BASELINES.keys() >= set(names):
        return set()
    offered = entry_points(group=PLUGIN_GROUP).names.difference(BASELINES)
    return offered if names is None else offered.intersection(names)


def advantages(
    name: str,
    rewards_PG: Array,
    context: BaselineContext,
    options: Mapping[str, float] | None = None,
) -> Array:
    """Compute the advantages of a baseline by name, shape [P, G], float64.

    Args:
        name: a key of `BASELINES`, or a rule of an installed package.
        rewards_PG: rewards of all prompts of the batch, float64.
        context: the other numbers that the rule reads.
        options: the rule's options, exactly those of `Baseline.options`.

    Raises:
        ValueError: too few completions or prompts, or other options than the rule's.
    """
    rule, options = BASELINES[name], dict(options or {})
    assert rewards_PG.ndim == 2 and rewards_PG.dtype == np.float64
    check_options(name, options)
    check_shape(name, *rewards_PG.shape)
    rule_options = {key: value for key, value in options.items() if key not in rule.memory}
    return rule.advantage(rewards_PG, context, **rule_options)


def check_options(name: str, options: Mapping[str, float]) -> None:
    """Refuse options that are not exactly the rule's.

    Raises:
        ValueError: it names the unknown or missing options.
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
        ValueError: it names both numbers.
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
