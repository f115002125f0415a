"""Baselines for other trainers, whose batches are rows: a reward and the group of each completion.

Offered are the rules that read rewards alone (`REWARD_ONLY`), with the options of
`conf/baseline/`. `verl`, `skyrl` and `slime` beside this module give them to these trainers by
name. Nothing here needs transformers: other versions of it do no harm.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import yaml

from grpo_ustat.config.folders import CONF
from grpo_ustat.estimators.baselines import BASELINES, OURS, advantages, check_options
from grpo_ustat.records import Array, BaselineContext

ORDER_DEPENDENT = ("pods", "krpo")  # they read the order of completions, and rows have none
REWARD_ONLY = tuple(x for x in OURS if not BASELINES[x].needs and x not in ORDER_DEPENDENT)
PREFIX = "grpo_ustat_"  # of the names in registries, which have a `maxrl` and a `none` of their own
PADDING = re.compile(r"pad(\d+|[0-9a-f]{32})")  # groups of rows that fill a batch: SkyRL, verl


def row_advantages(
    rule: str, reward_B: Array, group_B: Sequence[Hashable], options: Mapping[str, float]
) -> Array:
    """Advantages of rows under a baseline by name, shape [B], float64.

    Each group is one prompt's completions. Its rows may stand anywhere, and the advantages are
    those of `advantages` for the same groups. Groups may be of several sizes, but not under a rule
    that scales or shrinks by the whole batch: such a rule is defined for one group size.

    Args:
        rule: a name of `REWARD_ONLY`.
        reward_B: the reward of each completion.
        group_B: what its group is called, equal within a group.
        options: exactly those of the rule.

    Raises:
        ValueError: a group too small for the rule, or groups of several sizes where it takes one.

    >>> row_advantages("group_mean", np.array([1.0, 5.0, 0.0, 3.0]), ["a", "b", "a", "b"], {})
    array([ 0.5,  1. , -0.5, -1. ])
    """
    rows: dict[Hashable, list[int]] = {}
    for row, group in enumerate(group_B):
        rows.setdefault(group, []).append(row)
    by_size: dict[int, list[list[int]]] = {}
    for group, members in rows.items():
        if len(members) < BASELINES[rule].min_group_size:
            raise ValueError(
                f"baseline {rule} needs groups of at least {BASELINES[rule].min_group_size} "
                f"completions, group {group} has {len(members)}: sample more for each prompt, or "
                "take the baseline none or constant"
            )
        by_size.setdefault(len(members), []).append(members)
    if BASELINES[rule].couples_prompts and len(by_size) > 1:
        raise ValueError(
            f"baseline {rule} reads the whole batch and needs groups of one size, got groups of "
            f"{min(by_size)} to {max(by_size)} completions: sample as many for each prompt, or "
            "take a rule of groups, such as leave_one_out"
        )
    advantage_B = np.zeros(len(reward_B))
    for members_PG in by_size.values():
        rewards_PG = np.asarray(reward_B, dtype=np.float64)[members_PG]
        advantage_B[members_PG] = advantages(rule, rewards_PG, BaselineContext(), options)
    return advantage_B


def rule_options(rule: str, changed: Mapping[str, float]) -> dict[str, float]:
    """Options of a rule: those of `conf/baseline/`, then the changed ones.

    Raises:
        ValueError: the rule reads more than rewards, or has no such option.
    """
    if rule not in REWARD_ONLY:
        raise ValueError(refusal(rule))
    shipped = yaml.safe_load((CONF / "baseline" / f"{rule}.yaml").read_text())
    options = {**shipped.get("options", {}), **changed}
    check_options(rule, options)
    return options


def refusal(rule: str, prefix: str = "") -> str:
    """Why other trainers cannot have this rule, and the names, with a prefix, that they can have.

    >>> refusal("critic")[:63]
    'baseline critic reads critic_P besides rewards; the names are n'
    """
    needs = sorted(BASELINES[rule].needs) if rule in OURS else []
    why = f"reads {', '.join(needs)} besides rewards" if needs else "is none of ours"
    if rule in ORDER_DEPENDENT:
        why = "reads the order of completions besides rewards"
    names = ", ".join(prefix + name for name in REWARD_ONLY)
    return f"baseline {rule} {why}; the names are {names}"


def estimator(rule: str, **changed: float) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """A rule as verl and SkyRL call an advantage estimator: see `token_advantages`.

    Args:
        rule: a name of `REWARD_ONLY`.
        changed: options that differ from those of `conf/baseline/`.

    Raises:
        ValueError: the rule reads more than rewards, or has no such option.
    """
    return partial(token_advantages, rule, rule_options(rule, changed))


def token_advantages(
    rule: str,
    options: Mapping[str, float],
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Sequence[Hashable] | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, equal, of every token: [rows, tokens], float32.

    A completion's reward is the sum of its token rewards. Its advantage stands on the tokens of
    `response_mask`, and 0 elsewhere. Rows that fill up the batch have advantage 0, and no part in
    the rule: verl and SkyRL call their groups `pad...`.

    Args:
        rule: a name of `REWARD_ONLY`.
        options: exactly those of the rule.
        token_level_rewards: [rows, tokens].
        response_mask: [rows, tokens], 1 on the tokens of the completion.
        index: the group of each row.

    Raises:
        ValueError: no groups, a group too small, or groups of several sizes, see `row_advantages`.
    """
    if index is None:
        raise ValueError(
            f"baseline {rule} needs the group of each row, got no index (verl: no uid)"
        )
    kept = np.array([PADDING.fullmatch(str(group)) is None for group in index])
    reward_B = token_level_rewards.double().sum(dim=-1).cpu().numpy()
    groups = [group for group, keep in zip(index, kept, strict=True) if keep]
    advantage_B = np.zeros(len(reward_B))
    advantage_B[kept] = row_advantages(rule, reward_B[kept], groups, options)
    advantage_B1 = torch.tensor(advantage_B[:, None], dtype=torch.float32)
    advantage_BT = advantage_B1.to(response_mask.device) * response_mask
    return advantage_BT, advantage_BT
