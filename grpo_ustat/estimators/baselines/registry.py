"""Registry of all baselines by name: their declaration, and the function that calls them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib.metadata import entry_points
from typing import TypeVar

import numpy as np

from grpo_ustat.estimators.baselines.base import Baseline
from grpo_ustat.records import Array, BaselineContext

Function = TypeVar("Function", bound=Callable[..., Array])

# Group of entry points, each a `Baseline` of the same name.
PLUGIN_GROUP = "grpo_ustat.baselines"


class _Baselines(dict[str, Baseline]):
    """Built-in baselines by name.

    A lookup also gives a baseline of an installed package, which is not among the keys.

    Raises:
        KeyError: no baseline has this name.
        TypeError: the entry point is not a `Baseline` of this name, or cannot be called like
            one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._loaded: dict[str, Baseline] = {}

    def __missing__(self, name: str) -> Baseline:
        if name not in self._loaded:
            self._loaded[name] = _load(name)
        return self._loaded[name]


def _load(name: str) -> Baseline:
    """Load the baseline that an installed package offers by this name, see `_Baselines`."""
    baseline = entry_points(group=PLUGIN_GROUP)[name].load()
    if not isinstance(baseline, Baseline) or baseline.name != name:
        raise TypeError(
            f"entry point {name} of {PLUGIN_GROUP} is {baseline!r:.80}: it must be a Baseline of "
            f"name {name!r}"
        )
    takes = inspect.signature(baseline.advantage)
    try:
        takes.bind("rewards_PG", "context")
    except TypeError as error:
        raise TypeError(
            f"{name} takes {takes!s:.120}: write it as (rewards_PG, context), options behind these "
            "as option=default"
        ) from error
    defaults: dict[str, object] = {**baseline.options}
    for option, default in defaults.items():
        if not isinstance(default, (int, float)):
            raise TypeError(
                f"option {option} of {name} is {default!r:.80}: its default is a number"
            )
    return baseline


BASELINES = _Baselines()


def baseline(
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
) -> Callable[[Function], Function]:
    """Return a decorator that enters a function, unchanged, in `BASELINES` by its name.

    A built-in baseline needs nothing else: command line, `--help` and studies read it there. Other
    packages offer a `Baseline`.

    Args:
        words: description in `--help`, which shows only its first sentence if it is long.
        unbiased, min_group_size, min_prompts, prompt_only, couples_prompts, needs, memory, target:
            see `Baseline`.
    """

    def declare(advantage: Function) -> Function:
        """Enter a baseline in `BASELINES`, and return it."""
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


def plugin_baselines(names: Iterable[str] | None = None) -> set[str]:
    """Return baselines of installed packages, by names or all; built-in ones are never replaced."""
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
        name: a key of `BASELINES`, or a baseline of an installed package.
        rewards_PG: rewards of all prompts of the batch, float64.
        context: other inputs of the baseline.
        options: the baseline's options, exactly those of `Baseline.options`.

    Raises:
        ValueError: too few completions or prompts, or other options than the baseline's.
    """
    baseline, options = BASELINES[name], dict(options or {})
    assert rewards_PG.ndim == 2 and rewards_PG.dtype == np.float64
    check_options(name, options)
    check_shape(name, *rewards_PG.shape)
    function_options = {key: value for key, value in options.items() if key not in baseline.memory}
    return baseline.advantage(rewards_PG, context, **function_options)


def check_options(name: str, options: Mapping[str, float]) -> None:
    """Refuse options that are not exactly the baseline's.

    Raises:
        ValueError: the message names the unknown or missing options.
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
    """Refuse fewer completions or prompts than the baseline is defined for.

    Raises:
        ValueError: the message has both numbers.
    """
    baseline = BASELINES[name]
    if group_size < baseline.min_group_size:
        raise ValueError(
            f"baseline {name} needs groups of at least {baseline.min_group_size} completions, "
            f"got group_size={group_size}"
        )
    if num_prompts < baseline.min_prompts:
        raise ValueError(
            f"baseline {name} needs at least {baseline.min_prompts} prompts, got {num_prompts}"
        )
    if baseline.couples_prompts and num_prompts * group_size < 2:
        raise ValueError(
            f"baseline {name} scales by the batch's spread and needs 2 completions, got 1"
        )
