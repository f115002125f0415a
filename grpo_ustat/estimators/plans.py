"""Plans: rules that decide how many completions each prompt gets.

A plan is a pure function from the rewards drawn so far to the number of completions to draw next:

    more(rewards, setting) -> number of completions of the next stage, 0 to stop

A prompt's completions are drawn in stages. `rewards` contains the rewards of every finished stage,
in increasing order within a stage, because the completions of a stage are interchangeable. A plan
sees neither texts nor scores. `estimators.plan_terms` can therefore list all ways in which its
draws can end. `Plan.more` never draws more than `Setting.most` completions of a prompt.

Some plans do not have a stopping rule but a value for every further completion (`Plan.saving`), for
example the reduction of the variance. Such a *valued* plan first draws a few completions of the
prompt. They are a pilot, if they are used for training, or a history, if they come from an earlier
epoch and are not. The plan then adds completions as long as one more completion saves more than a
price. All prompts have the same price, which is fitted to a given mean number of completions
(`price_of`). If the savings of a prompt decrease with its number of completions, no other sizes
with the same mean save more.

To add a plan, decorate a function here, or install a package with an entry point in the group
`grpo_ustat.plans` that is a `Plan`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import entry_points

import numpy as np

from grpo_ustat.records import Array

PLUGIN_GROUP = "grpo_ustat.plans"
# Smallest group size for which leave_one_out is defined.
MIN_GROUP_SIZE = 2
# Rewards of every stage of a prompt, in increasing order within a stage.
Rewards = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Setting:
    """Options of a plan."""

    # Number of completions per prompt from which a plan derives its stages. For a valued plan, the
    # mean number of completions to which `price` is fitted.
    size: int
    # Largest number of completions of a prompt; a history does not count.
    most: int = 1 << 30
    # Number of completions in the history of a prompt.
    history: int = 8
    # A valued plan adds a completion only if it saves more than this price.
    price: float = 0.0
    # Parameters (a, b) of a Beta distribution of the prompts' success rates.
    prior: tuple[float, float] = (1.0, 1.0)


Rule = Callable[[Rewards, Setting], int]
Trains = Callable[[Rewards], Rewards]
Saving = Callable[[tuple[float, ...], Array, Setting], Array]


def all_of(rewards: Rewards) -> Rewards:
    """Return all completions; the default of `Plan.trains`."""
    return rewards


@dataclass(frozen=True)
class Plan:
    """Declaration of a plan. Either `rule` or `saving` is set."""

    # Name in configurations and tables.
    name: str
    # Description in `--help` and on the page.
    words: str
    # Paper, repository or issue that the rule comes from.
    source: str
    # Function (rewards, setting) -> number of completions of the next stage.
    rule: Rule | None = None
    # Function (rewards of the history or pilot, K sizes n, setting) -> K values: the saving if a
    # prompt with n completions gets one more. The saving must decrease with n.
    saving: Saving | None = None
    # True if the first stage comes from an earlier epoch. Its completions are then neither used for
    # training nor counted as generated.
    has_history: bool = False
    # Function from the rewards of all generated completions to the rewards of those that are used
    # for training, both by stage.
    trains: Trains = all_of
    # True if a prompt without any completion for training is replaced by another prompt.
    replaces: bool = False
    # True if the baseline is the mean reward of all generated completions. False if it is the mean
    # reward of the other completions that are used for training.
    baseline_of_generated: bool = False
    # Smallest and largest number of completions of a prompt under a valued plan, in multiples of
    # the mean number. The smallest number is at least 2.
    bounds: tuple[float, float] = (0.0, 4.0)

    def more(self, rewards: Rewards, setting: Setting) -> int:
        """Return the number of completions of the next stage; 0 to stop.

        Args:
            rewards: rewards of all stages so far, including a history.
            setting: options of the plan.
        """
        drawn = sum(map(len, rewards[self.has_history :]))
        if self.rule is not None:
            if self.has_history and not rewards:
                return setting.history
            return max(0, min(self.rule(rewards, setting), setting.most - drawn))
        assert self.saving is not None
        if not rewards:
            return self.first_size(setting)
        first, *later = rewards
        if later:
            return 0
        least, most = self.least_size(setting), self.most_size(setting)
        sizes_K = np.arange(least, most, dtype=float)
        worth = self.saving(first, sizes_K, setting) > setting.price
        return least + int(worth.sum()) - drawn

    def first_size(self, setting: Setting) -> int:
        """Return the number of completions in the history or pilot of a valued plan."""
        return setting.history if self.has_history else half(setting.size)

    def least_size(self, setting: Setting) -> int:
        """Return the smallest number of completions of a prompt under a valued plan.

        It is the size of the pilot if there is one.
        """
        if not self.has_history:
            return self.first_size(setting)
        return max(MIN_GROUP_SIZE, round(self.bounds[0] * setting.size))

    def most_size(self, setting: Setting) -> int:
        """Return the largest number of completions of a prompt under a valued plan."""
        return min(setting.most, round(self.bounds[1] * setting.size))


def trained_stages(plan: Plan, rewards: Rewards) -> Rewards:
    """Return the rewards of the completions that are used for training, by stage.

    A history is not included.
    """
    return plan.trains(rewards[plan.has_history :])


class _Plans(dict[str, Plan]):
    """Built-in plans by name; a lookup also finds the plans of installed packages.

    Raises:
        KeyError: no plan has this name.
        TypeError: the entry point is not a `Plan` with this name.
    """

    def __missing__(self, name: str) -> Plan:
        offered = entry_points(group=PLUGIN_GROUP)[name].load()
        if not isinstance(offered, Plan) or offered.name != name:
            raise TypeError(
                f"entry point {name} of {PLUGIN_GROUP} is {offered!r:.80}: it must be a Plan "
                f"with name {name!r}"
            )
        return offered


PLANS = _Plans()


def plan(
    words: str,
    source: str,
    *,
    trains: Trains = all_of,
    replaces: bool = False,
    baseline_of_generated: bool = False,
) -> Callable[[Rule], Rule]:
    """Return a decorator that registers a function as the `rule` of a plan in `PLANS`.

    The name of the function is the name of the plan. The arguments are fields of `Plan`.
    """

    def declare(rule: Rule) -> Rule:
        """Register a rule in `PLANS` and return it."""
        name = rule.__name__
        PLANS[name] = Plan(
            name, words, source, rule, trains=trains, replaces=replaces,
            baseline_of_generated=baseline_of_generated,
        )  # fmt: skip
        return rule

    return declare


def valued(
    words: str, source: str, *, has_history: bool, bounds: tuple[float, float]
) -> Callable[[Saving], Saving]:
    """Return a decorator that registers a function as the `saving` of a valued plan in `PLANS`.

    The name of the function is the name of the plan. The arguments are fields of `Plan`.
    """

    def declare(saving: Saving) -> Saving:
        """Register a saving in `PLANS` and return it."""
        name = saving.__name__
        PLANS[name] = Plan(
            name, words, source, saving=saving, has_history=has_history, bounds=bounds
        )
        return saving

    return declare


def plugin_plans(names: Iterable[str] | None = None) -> set[str]:
    """Return the names of plans from installed packages, restricted to `names` if given."""
    offered = entry_points(group=PLUGIN_GROUP).names.difference(PLANS)
    return offered if names is None else offered.intersection(names)


def are_mixed(rewards: Rewards) -> bool:
    """Return True if the rewards differ.

    >>> are_mixed(((0.0,), (0.0, 1.0))), are_mixed(((0.0,), (0.0,)))
    (True, False)
    """
    return len({reward for stage in rewards for reward in stage}) > 1


def successes(rewards: Rewards) -> int:
    """Return the number of completions with a positive reward."""
    return sum(reward > 0 for stage in rewards for reward in stage)


def half(size: int) -> int:
    """Return half of a size, at least 2: the size of a pilot or of a round.

    >>> half(8), half(3)
    (4, 2)
    """
    return max(MIN_GROUP_SIZE, size // 2)


def split(rewards: Rewards, right: int, wrong: int) -> Rewards:
    """Return the rewards of the first `right` right and the first `wrong` wrong completions.

    A completion is right if its reward is positive.

    Args:
        rewards: rewards by stage, in the order of the stages.
        right, wrong: largest number of right and of wrong completions.

    >>> split(((0.0, 0.0, 1.0), (0.0, 1.0)), right=2, wrong=1)
    ((0.0, 1.0), (1.0,))
    """
    left = {True: right, False: wrong}
    stages: list[tuple[float, ...]] = []
    for stage in rewards:
        kept: list[float] = []
        for reward in stage:
            if left[reward > 0]:
                left[reward > 0] -= 1
                kept.append(reward)
        stages.append(tuple(kept))
    return tuple(stages)


def mixed_only(rewards: Rewards) -> Rewards:
    """Return all completions if their rewards differ, otherwise none.

    >>> mixed_only(((0.0, 1.0),)), mixed_only(((0.0, 0.0),))
    (((0.0, 1.0),), ((),))
    """
    return rewards if are_mixed(rewards) else tuple(() for _ in rewards)


@plan("The same number of completions for every prompt.", "GRPO, arXiv 2402.03300")
def fixed(rewards: Rewards, setting: Setting) -> int:
    """Draw a group of `size` completions.

    >>> fixed((), Setting(size=8)), fixed(((0.0,) * 8,), Setting(size=8))
    (8, 0)
    """
    return 0 if rewards else setting.size


@plan(
    "Groups with equal rewards are replaced by groups of other prompts.",
    "DAPO's dynamic sampling, arXiv 2503.14476; prime-rl, verl, OpenRLHF, NeMo-RL",
    trains=mixed_only,
    replaces=True,
)
def refill(rewards: Rewards, setting: Setting) -> int:
    """Draw a group of `size` completions.

    `mixed_only` uses no completion of a group with equal rewards for training, and
    `Plan.replaces` then replaces the prompt.

    >>> refill((), Setting(size=8))
    8
    """
    return fixed(rewards, setting)


@plan(
    "Rounds of half the size, until the rewards of the prompt differ.",
    "trl#3758, trl#7402 with pass_rate; open-instruct#1861 at a fixed policy",
)
def until_mixed(rewards: Rewards, setting: Setting) -> int:
    """Stop after the first round in which the rewards differ.

    >>> [until_mixed(x, Setting(size=8)) for x in [(), ((0.0,) * 4,), ((0.0,) * 3 + (1.0,),)]]
    [4, 4, 0]
    """
    return 0 if are_mixed(rewards) else half(setting.size)


@plan(
    "Rounds of half the size, until at least one completion is right.",
    "AR3PO, arXiv 2509.25808; Reinforce-Ada, positive-focused, before down-sampling",
)
def until_success(rewards: Rewards, setting: Setting) -> int:
    """Stop after the first round with a success.

    >>> [until_success(x, Setting(size=8)) for x in [(), ((0.0,) * 4,), ((0.0,) * 3 + (1.0,),)]]
    [4, 4, 0]
    """
    return 0 if successes(rewards) else half(setting.size)


@plan(
    "Two completions, then one at a time until two completions are right.",
    "inverse sampling, Haldane 1945",
)
def second_success(rewards: Rewards, setting: Setting) -> int:
    """Stop at the second success.

    >>> [second_success(x, Setting(size=8)) for x in [(), ((0.0, 1.0),), ((1.0, 1.0),)]]
    [2, 1, 0]
    """
    if not rewards:
        return MIN_GROUP_SIZE
    return int(successes(rewards) < 2)


def balanced(rewards: Rewards) -> Rewards:
    """Return the completions that Reinforce-Ada uses for training: half as many as in a round.

    If possible, half of them are right and half are wrong. If there are too few right completions,
    wrong ones take their places, and vice versa.

    >>> balanced(((0.0,) * 7 + (1.0,),))
    ((0.0, 0.0, 0.0, 1.0),)
    """
    kept, right = half(len(rewards[0])), successes(rewards)
    wrong = sum(map(len, rewards)) - right
    of_right = min(right, max(kept // 2, kept - wrong))
    return split(rewards, of_right, kept - of_right)


@plan(
    "Rounds of the size, until a quarter of a round can be filled with right completions and "
    "another quarter with wrong ones; this half of a round is trained.",
    "Reinforce-Ada, balanced, arXiv 2510.04996v2 and its code",
    trains=balanced,
    baseline_of_generated=True,
)
def reinforce_ada(rewards: Rewards, setting: Setting) -> int:
    """Stop when there are enough right and wrong completions for training; see `balanced`.

    >>> [reinforce_ada(x, Setting(size=8)) for x in [(), ((0.0,) * 8,), ((0.0,) * 6 + (1.0,) * 2,)]]
    [8, 8, 0]
    """
    if not rewards:
        return setting.size
    needed, right = half(len(rewards[0])) // 2, successes(rewards)
    wrong = sum(map(len, rewards)) - right
    return 0 if min(right, wrong) >= needed else setting.size


def rejected(rewards: Rewards) -> Rewards:
    """Return the completions that AERO uses for training: all right ones and as many wrong ones.

    If half or more of the completions are right, all completions are used. If all or none are
    right, none is used.

    >>> rejected(((0.0,) * 7 + (1.0,),)), rejected(((0.0, 1.0, 1.0),))
    (((0.0, 1.0),), ((0.0, 1.0, 1.0),))
    """
    right, total = successes(rewards), sum(map(len, rewards))
    return mixed_only(split(rewards, right, right if 2 * right < total else total))


@plan(
    "A group of the size, then two completions at a time until one is right, up to twice the size; "
    "all right and as many wrong completions are trained.",
    "AERO, arXiv 2602.14338, by AryaFayyazi/CGRPO's baselines/aero.py, without its posterior step",
    trains=rejected,
)
def aero(rewards: Rewards, setting: Setting) -> int:
    """Stop at the first success, or after twice the size.

    >>> [aero(x, Setting(size=4)) for x in [(), ((0.0,) * 4,), ((0.0,) * 4, (0.0, 1.0))]]
    [4, 2, 0]
    """
    if not rewards:
        return setting.size
    drawn = sum(map(len, rewards))
    return 0 if successes(rewards) else min(2, 2 * setting.size - drawn)


# Pilot-Commit draws more completions of a prompt only if the share of right completions in its
# pilot lies within these bounds.
COMMITTED = (0.125, 0.75)


def is_committed(pilot: tuple[float, ...]) -> bool:
    """Return True if the success rate of a pilot is in `COMMITTED`.

    >>> is_committed((0.0, 0.0, 1.0, 1.0)), is_committed((0.0,) * 4)
    (True, False)
    """
    return COMMITTED[0] <= successes((pilot,)) / len(pilot) <= COMMITTED[1]


def committed(rewards: Rewards) -> Rewards:
    """Return all completions if the success rate of the pilot is in `COMMITTED`, otherwise none.

    >>> committed(((0.0, 0.0),))
    ((),)
    """
    return rewards if is_committed(rewards[0]) else tuple(() for _ in rewards)


@plan(
    "A pilot of half the size; if 12.5 to 75 % of it are right, three times as many further "
    "completions; if not, another prompt replaces the prompt.",
    "Pilot-Commit, arXiv 2605.26606, databricks/pilot-commit, without its stale pilots",
    trains=committed,
    replaces=True,
)
def pilot_commit(rewards: Rewards, setting: Setting) -> int:
    """Commit to prompts whose pilot is neither too hard nor too easy.

    >>> [pilot_commit(x, Setting(size=8)) for x in [(), ((0.0,) * 4,), ((0.0,) * 3 + (1.0,),)]]
    [4, 0, 12]
    """
    if not rewards:
        return half(setting.size)
    return 3 * len(rewards[0]) if len(rewards) == 1 and is_committed(rewards[0]) else 0


def posterior(history: tuple[float, ...], setting: Setting) -> tuple[float, float]:
    """Return the parameters of the Beta distribution of the success rate given the history."""
    a, b = setting.prior
    right = sum(reward > 0 for reward in history)
    return a + right, b + len(history) - right


@valued(
    "Sizes G that minimise the sum of p (1-p) / (G-1) over prompts; the success rate p of a prompt "
    "is estimated from 8 earlier completions and the other prompts.",
    "VIP, arXiv 2602.01601, with a Beta distribution in place of its Gaussian process and without "
    "the term log p of its code",
    has_history=True,
    bounds=(0.0, 4.0),
)
def vip(history: tuple[float, ...], sizes_K: Array, setting: Setting) -> Array:
    """Return how much completion n+1 reduces VIP's variance, `E[p (1-p) | history] / (n-1)`.

    >>> vip((0.0,) * 4 + (1.0,) * 4, np.array([2.0, 3.0]), Setting(size=4)).round(4).tolist()
    [0.1136, 0.0379]
    """
    a, b = posterior(history, setting)
    variance = a * b / ((a + b) * (a + b + 1))
    return variance / ((sizes_K - 1) * sizes_K)


@valued(
    "Sizes G that minimise the sum of p (1-p) / (G-1) over prompts; p (1-p) is estimated only from "
    "8 earlier completions of the prompt.",
    "VIP, arXiv 2602.01601, without its prediction from other prompts",
    has_history=True,
    bounds=(0.0, 4.0),
)
def p_one_minus_p(history: tuple[float, ...], sizes_K: Array, setting: Setting) -> Array:
    """Return how much completion n+1 reduces `p (1-p) / (n-1)`.

    The estimate of p (1-p) is unbiased.

    >>> p_one_minus_p((0.0, 1.0), np.array([2.0]), Setting(size=4)).tolist()
    [0.25]
    """
    return float(np.var(history, ddof=1)) / ((sizes_K - 1) * sizes_K)


@valued(
    "Sizes proportional to p (1-p), between 0.5 and 1.5 times the mean size; p (1-p) is estimated "
    "from 8 earlier completions.",
    "DynaMO, arXiv 2602.19208",
    has_history=True,
    bounds=(0.5, 1.5),
)
def dynamo(history: tuple[float, ...], sizes_K: Array, setting: Setting) -> Array:
    """Return `p (1-p) / (n+1)`, a saving that leads to DynaMO's sizes.

    It exceeds the price up to a size proportional to p (1-p).

    >>> dynamo((0.0, 1.0), np.array([4.0]), Setting(size=8)).tolist()
    [0.1]
    """
    return float(np.var(history, ddof=1)) / (sizes_K + 1)


@valued(
    "Sizes G that maximise the sum of p (1-p)^2 (1 - p^G - (1-p)^G) over prompts; p is estimated "
    "from 8 earlier completions.",
    "Knapsack RL, arXiv 2509.25849, without its fallback",
    has_history=True,
    bounds=(0.0, 16.0),
)
def knapsack(history: tuple[float, ...], sizes_K: Array, setting: Setting) -> Array:
    """Return how much completion n+1 increases Knapsack RL's value of the prompt.

    With n completions, the value is `p (1-p)^2 (1 - p^n - (1-p)^n)`.

    >>> knapsack((0.0, 1.0), np.array([2.0, 3.0]), Setting(size=4)).tolist()
    [0.03125, 0.015625]
    """
    p = successes((history,)) / len(history)
    return p * (1 - p) ** 2 * (p**sizes_K * (1 - p) + (1 - p) ** sizes_K * p)


@valued(
    "A pilot of half the size, then sizes G that minimise the sum of p (1-p) / G over prompts.",
    "two-stage allocation, Neyman 1934",
    has_history=False,
    bounds=(0.0, 4.0),
)
def pilot_then_size(pilot: tuple[float, ...], sizes_K: Array, setting: Setting) -> Array:
    """Return how much completion n+1 reduces `E[p (1-p) | pilot] / n`.

    >>> pilot_then_size((0.0, 1.0), np.array([2.0]), Setting(size=4)).round(4).tolist()
    [0.0333]
    """
    a, b = posterior(pilot, setting)
    variance = a * b / ((a + b) * (a + b + 1))
    return variance / (sizes_K * (sizes_K + 1))


def price_of(saving_SK: Array, chance_S: Array, more: float) -> float:
    """Return the price at which a plan adds at most `more` completions on average.

    Args:
        saving_SK: saving by each of K further completions, in decreasing order, for each of S
            possible histories or pilots.
        chance_S: probability of each history or pilot.
        more: largest mean number of further completions per prompt.

    >>> price_of(np.array([[4.0, 2.0, 1.0], [3.0, 1.0, 0.5]]), np.array([0.5, 0.5]), 1.5)
    1.0
    """
    order = np.argsort(-saving_SK, axis=None, kind="stable")
    saved = saving_SK.ravel()[order]
    number = np.cumsum(np.repeat(chance_S, saving_SK.shape[1])[order])
    above = np.flatnonzero(number > more + 1e-12)
    return float(saved[above[0]]) if len(above) else -math.inf


def fitted_prior(rewards_PN: Array) -> tuple[float, float]:
    """Fit a Beta distribution to the prompts' success rates by the method of moments.

    >>> rewards_PN = np.repeat([[0.0], [0.5], [0.5], [1.0]], 8, axis=1)
    >>> rewards_PN[1:3, ::2], rewards_PN[1:3, 1::2] = 0.0, 1.0
    >>> [round(x, 3) for x in fitted_prior(rewards_PN)]
    [0.34, 0.34]
    """
    size = rewards_PN.shape[1]
    share_P = (rewards_PN > 0).mean(axis=1)
    mean = float(np.clip(share_P.mean(), 1e-3, 1 - 1e-3))
    within = float((share_P * (1 - share_P)).mean()) / (size - 1)
    between = max(float(share_P.var(ddof=1)) - within, 1e-6)
    # Sum of the Beta parameters, a + b.
    weight = max(mean * (1 - mean) / between - 1, 1e-3)
    return mean * weight, (1 - mean) * weight
