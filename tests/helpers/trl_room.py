"""The TRL hooks also where TRL is not installed, and a trainer with what they use of TRL's."""

from __future__ import annotations

from collections import defaultdict, deque
from importlib import metadata
from types import SimpleNamespace
from unittest import mock

import torch

ask = metadata.version
with mock.patch.object(metadata, "version", lambda name: "1.16.0" if name == "trl" else ask(name)):
    import grpo_ustat.integrations.trl  # noqa: F401  # it asks for the version alone

PAD = 0


def padded(rows, side):
    """Ids and mask of lists of tokens."""
    width = max(map(len, rows))
    ids, mask = torch.full((len(rows), width), PAD), torch.zeros((len(rows), width), dtype=int)
    for i, row in enumerate(rows):
        place = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[i, place], mask[i, place] = torch.tensor(row), 1
    return ids, mask


def output_of(prompts, completions):
    """What TRL returns of such rows."""
    prompt_ids, prompt_mask = padded(prompts, "left")
    completion_ids, completion_mask = padded(completions, "right")
    return {
        "prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "completion_ids": completion_ids,
        "completion_mask": completion_mask, "advantages": torch.zeros(len(prompts)),
    }  # fmt: skip


class GRPOTrainer:
    """A trainer whose `_generate_and_score_completions` hands out rows that were set.

    Attributes:
        rows: (prompt, completions) of this rank's share of the batch.
        rewards: of all ranks' rows, by reward function.
    """

    def __init__(self, group_size=4, rank=0, world=1, **changes):
        self.num_generations, self.temperature = group_size, 1.0
        self.reward_func_names, self.reward_weights = ["right"], torch.tensor([1.0])
        self.model = torch.nn.Dropout(0.0)
        self.processing_class = SimpleNamespace(pad_token_id=PAD)
        self.state = SimpleNamespace(global_step=0)
        self.accelerator = SimpleNamespace(
            process_index=rank, num_processes=world, is_main_process=rank == 0,
            state=SimpleNamespace(deepspeed_plugin=None), unwrap_model=lambda model: model,
        )  # fmt: skip
        self.args = SimpleNamespace(
            per_device_train_batch_size=8, gradient_accumulation_steps=2, generation_batch_size=16,
            generation_kwargs=None, loss_type="dapo", scale_rewards="group", beta=0.0, delta=None,
            top_entropy_quantile=1.0, entropy_coef=0.0, use_adaptive_entropy=False,
            mask_truncated_completions=False, max_completion_length=64,
            multi_objective_aggregation="sum_then_normalize",
        )  # fmt: skip
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._logs = {"rewards": defaultdict(lambda: deque(maxlen=64))}
        self.tools = self.environments = None
        self.multi_objective_aggregation, self.mask_truncated_completions = (
            "sum_then_normalize",
            False,
        )
        self.top_p, self.top_k, self.min_p, self.repetition_penalty = 1.0, 0, None, 1.0
        for name, value in changes.items():
            setattr(self, name, value)

    def _generate_and_score_completions(self, inputs):
        prompts, completions = self.rows
        for name, values in self.rewards.items():
            self._logs["rewards"][name].extend(values)
        return output_of(prompts, completions)


def changed(**changes):
    """A trainer with other arguments, `args_NAME`, or attributes."""
    trainer = GRPOTrainer()
    for name, value in changes.items():
        place = trainer.args if name.startswith("args_") else trainer
        setattr(place, name.removeprefix("args_"), value)
    return trainer
