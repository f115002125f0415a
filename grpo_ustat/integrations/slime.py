"""Our baselines as advantage functions of slime: see docs/slime.md.

`--custom-advantage-function-path grpo_ustat.integrations.slime.NAME`, NAME one of
`REWARD_ONLY`, and
`--custom-pg-loss-reducer-function-path grpo_ustat.integrations.slime.token_sum`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from grpo_ustat.integrations.rows import REWARD_ONLY, refusal, row_advantages, rule_options

AdvantageFunction = Callable[[Namespace, dict[str, Any]], None]


def __getattr__(name: str) -> AdvantageFunction:
    if name not in REWARD_ONLY:
        raise AttributeError(f"grpo_ustat.integrations.slime has no {name}: {refusal(name)}")
    return advantage_function(name)


def advantage_function(rule: str, **changed: float) -> AdvantageFunction:
    """A rule as slime calls an advantage function: see `set_advantages`.

    Args:
        rule: a name of `REWARD_ONLY`.
        changed: options that differ from those of `conf/baseline/`.

    Raises:
        ValueError: the rule reads more than rewards, or has no such option.
    """
    return partial(set_advantages, rule, rule_options(rule, changed))


def set_advantages(
    rule: str, options: Mapping[str, float], args: Namespace, rollout_data: dict[str, Any]
) -> None:
    """Set `advantages` and `returns` of this rank's samples: a tensor of the shape of `kl` each.

    slime deals a prompt's samples out to several data-parallel ranks. So all ranks bring their
    rewards together first, and every rank applies the rule to the whole batch.

    Args:
        rule: a name of `REWARD_ONLY`.
        options: exactly those of the rule.
        args: slime's; read are `rewards_normalization` and `n_samples_per_prompt`.
        rollout_data: this rank's; read are the lists `rewards`, `sample_indices` and `kl`.

    Raises:
        ValueError: rewards that slime has normalised, several samples of one rollout, or what
            `row_advantages` refuses.
    """
    if args.rewards_normalization:
        raise ValueError(
            f"baseline {rule} needs rewards as they are, got those that slime has centred by their "
            "group (rewards_normalization=True): add --disable-rewards-normalization"
        )
    sample_of_row = [int(sample) for sample in rollout_data["sample_indices"]]
    rows = list(zip(sample_of_row, map(float, rollout_data["rewards"]), strict=True))
    rows = [row for part in _of_all_ranks(rows) for row in part]
    samples = [sample for sample, _ in rows]
    if len(set(samples)) < len(samples):
        raise ValueError(
            f"baseline {rule} takes one sample of each rollout, got {len(samples)} of "
            f"{len(set(samples))}: their rewards are not independent draws"
        )
    # slime's data source numbers samples through, so many for each prompt
    groups = [sample // args.n_samples_per_prompt for sample in samples]
    advantage_B = row_advantages(rule, np.array([reward for _, reward in rows]), groups, options)
    advantage_of = dict(zip(samples, advantage_B.tolist(), strict=True))
    rollout_data["advantages"] = [
        torch.full_like(kl, advantage_of[sample])
        for sample, kl in zip(sample_of_row, rollout_data["kl"], strict=True)
    ]
    rollout_data["returns"] = rollout_data["advantages"]


def _of_all_ranks(rows: list[tuple[int, float]]) -> list[list[tuple[int, float]]]:
    """The rows of every data-parallel rank, in the order of ranks."""
    from megatron.core import mpu  # pyright: ignore[reportMissingImports]

    group = mpu.get_data_parallel_group()
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, rows, group=group)
    return parts


def token_sum(
    total_lengths: list[int],
    response_lengths: list[int],
    loss_masks: list[torch.Tensor],
    calculate_per_token_loss: bool = False,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A reducer of the policy loss: its sum over all tokens, which slime divides by the samples.

    slime's own takes each completion's mean over its tokens, and so weighs it by 1 / length.

    Args:
        total_lengths: tokens of prompt and completion of each sample of the micro-batch.
        response_lengths: tokens of each completion.
        loss_masks: [tokens of the completion] of each sample.
        calculate_per_token_loss: slime's option; it divides by tokens.

    Raises:
        ValueError: slime divides by tokens.
    """
    if calculate_per_token_loss:
        raise ValueError(
            "token_sum is divided by samples, got calculate_per_token_loss=True: leave out "
            "--calculate-per-token-loss"
        )
    from slime.backends.megatron_utils.cp_utils import (  # pyright: ignore[reportMissingImports]
        slice_log_prob_with_cp,  # this context-parallel rank's tokens
    )

    lengths = zip(loss_masks, total_lengths, response_lengths, strict=True)
    mask = torch.cat([slice_log_prob_with_cp(*sample) for sample in lengths])
    return lambda loss: (loss * mask).sum()
