"""Registry of all baselines with their declarations, and the function that calls them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib.metadata import entry_points
from typing import TypeVar

import numpy as np

from grpo_ustat.estimators.baselines.base import Baseline
from grpo_ustat.records import Array, BaselineContext

Function = TypeVar("Function", bound=Callable[..., Array])

# Entry-point group in which installed packages register baselines. Each entry point loads a
# `Baseline` whose name is the name of the entry point.
PLUGIN_GROUP = "grpo_ustat.baselines"


class _Baselines(dict[str, Baseline]):
    """Built-in baselines by name.

    The keys are only the built-in baselines. A lookup by name also finds the baselines of installed
    packages.

    Raises:
        KeyError: no baseline has this name.
        TypeError: the entry point of an installed package is not a `Baseline` with this name, its
            function does not have the signature of a baseline, or an option's default is not a
            number.
    """

    def __init__(self) -> None:
        super().__init__()
        self._loaded: dict[str, Baseline] = {}

    def __missing__(self, name: str) -> Baseline:
        if name not in self._loaded:
            self._loaded[name] = _load(name)
        return self._loaded[name]


def _load(name: str) -> Baseline:
    """Load the baseline that an installed package registers under this name; see `_Baselines`."""
    baseline = entry_points(group=PLUGIN_GROUP)[name].load()
    if not isinstance(baseline, Baseline) or baseline.name != name:
        raise TypeError(
            f"entry point {name} of {PLUGIN_GROUP} is {baseline!r:.80}: it must be a Baseline "
            f"with name {name!r}"
        )
    takes = inspect.signature(baseline.advantage)
    try:
        takes.bind("rewards_PG", "context")
    except TypeError as error:
        raise TypeError(
            f"baseline {name} has the signature {takes!s:.120}: its parameters must be rewards_PG, "
            "context and options with defaults"
        ) from error
    defaults: dict[str, object] = {**baseline.options}
    for option, default in defaults.items():
        if not isinstance(default, (int, float)):
            raise TypeError(
                f"option {option} of baseline {name} has the default {default!r:.80}: it must be "
                "a number"
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
    """Return a decorator that registers a function in `BASELINES` and leaves it unchanged.

    The function's name is the key. A built-in baseline needs no other registration, because the
    command line, `--help` and studies read `BASELINES`. A package of your own registers a
    `Baseline` as an entry point instead; see `PLUGIN_GROUP`.

    Args:
        words: description in `--help`. If it is long, `--help` shows only the first sentence.
        unbiased, min_group_size, min_prompts, prompt_only, couples_prompts, needs, memory, target:
            see `Baseline`.
    """

    def declare(advantage: Function) -> Function:
        """Register a baseline in `BASELINES` and return it."""
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
    """Return the names of baselines from installed packages, restricted to `names` if given.

    An installed package cannot replace a built-in baseline. Names of built-in baselines are
    therefore not returned.
    """
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
    """Compute the advantages of the baseline with this name, [P, G], float64.

    Args:
        name: key of `BASELINES`, or name of a baseline of an installed package.
        rewards_PG: rewards of all prompts of the batch, float64.
        context: other inputs of the baseline.
        options: values of the baseline's options; the keys must be those of `Baseline.options`.

    Raises:
        ValueError: there are too few completions or prompts, or the options are not those of the
            baseline.
    """
    baseline, options = BASELINES[name], dict(options or {})
    assert rewards_PG.ndim == 2 and rewards_PG.dtype == np.float64
    check_options(name, options)
    check_shape(name, *rewards_PG.shape)
    function_options = {key: value for key, value in options.items() if key not in baseline.memory}
    return baseline.advantage(rewards_PG, context, **function_options)


def check_options(name: str, options: Mapping[str, float]) -> None:
    """Raise an error unless the options are exactly those of the baseline.

    Raises:
        ValueError: options are unknown or missing; the message names them.
    """
    names = BASELINES[name].options
    faults = {
        "unknown": sorted(set(options) - set(names)),
        "missing": sorted(set(names) - set(options)),
    }
    if any(faults.values()):
        wrong = [f"{word} {', '.join(names)}" for word, names in faults.items() if names]
        allowed = f"the options are {', '.join(names)}" if names else "it has no options"
        raise ValueError(f"options of baseline {name}: {'; '.join(wrong)}; {allowed}")


def check_shape(name: str, num_prompts: int, group_size: int) -> None:
    """Raise an error if the baseline is not defined for so few completions or prompts.

    Raises:
        ValueError: the numbers are too small; the message gives the required and the actual number.
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
            f"baseline {name} divides by the batch's standard deviation and needs at least 2 "
            "completions, got 1"
        )
