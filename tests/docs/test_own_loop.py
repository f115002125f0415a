"""The loop that docs/library.md audits."""

from __future__ import annotations

import runpy

import numpy as np
import pytest
import torch
from fakes import random_policy, random_rollouts
from readme import PAGES, blocks

from grpo_ustat.policy.logprobs import pack

SECTION = "Is the applied gradient the declared one?"
REWARDS = np.random.default_rng(0).integers(0, 2, size=(4, 8)).astype(float)


@pytest.mark.parametrize(
    "divisor, line", [(4, None), (1, "The applied gradient equals the declared ")]
)
def test_the_loop_of_the_page(tmp_path, capsys, divisor, line):
    """Divided once more by the number of micro-batches, as on the page, and right."""
    page = blocks(PAGES["docs/library.md"], SECTION)
    policy = random_policy(dtype=torch.float32)
    rows = pack(random_rollouts([3, 5, 2, 4], 8, 9), np.arange(32), 0, policy.model.device)
    advantage = REWARDS - REWARDS.mean(axis=1, keepdims=True)
    advantage /= REWARDS.std(axis=1, ddof=1, keepdims=True) + 1e-4
    advantage_B = torch.from_numpy(advantage.ravel()).float()

    def loss_of(model, part):
        ids, attention = rows.input_ids_BT[part], rows.attention_mask_BT[part]
        positions = (attention.cumsum(dim=1) - 1).clamp(min=0)
        logits = model(input_ids=ids, attention_mask=attention, position_ids=positions).logits
        logprobs = logits[:, :-1].log_softmax(dim=-1).gather(2, ids[:, 1:, None])[..., 0]
        own = logprobs * rows.completion_mask_BT[part, 1:] * advantage_B[part, None]
        return -own.sum() / rows.completion_mask_BT.sum() / divisor

    names = {
        "model": policy.model, "loss_of": loss_of, "rewards_PG": REWARDS,
        "micro_batches": torch.arange(32).chunk(4), "input_ids": rows.input_ids_BT,
        "attention_mask": rows.attention_mask_BT, "completion_mask": rows.completion_mask_BT,
    }  # fmt: skip
    (tmp_path / "loop.py").write_text(page["python"])
    runpy.run_path(str(tmp_path / "loop.py"), names)
    assert capsys.readouterr().out.startswith(line or page["text"].strip())
