"""What sampling asks of an accelerator, counted on CPU tensors that say they are on one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from architectures import VOCAB, build
from emulated_device import DEVICE, emulated_device, on_device
from fakes import LetterTokenizer, letter_prompts, random_policy

from grpo_ustat.policy.loading import Policy
from grpo_ustat.rollout import local
from grpo_ustat.rollout.local import Sampling, sample

PROMPTS = letter_prompts("ab", "c", "abcde", "jjj", "bcdefgh")
SAMPLING = Sampling(seed=0, stream="device", max_completion_length=8, rows=20, cuda_graphs=False)


class Letters(LetterTokenizer):
    """Prompts of letters; completions may hold any token."""

    def batch_decode(self, rows, skip_special_tokens):
        return [" ".join(map(str, row)) for row in rows]


def counts(policy, longest, **options):
    """Completions by an emulated device, and what it was asked."""
    sampling = dataclasses.replace(SAMPLING, max_completion_length=longest, **options)
    with torch.inference_mode(), emulated_device() as device:
        policy = dataclasses.replace(policy, model=on_device(policy.model))
        device.launches.clear()
        return sample(policy, PROMPTS, 4, sampling), device


@pytest.mark.slow
@pytest.mark.parametrize("padded", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_waits_and_launches_a_token(padded, monkeypatch):
    """16 more tokens of rows that end nowhere: one more look, of one copy, and no other wait."""
    if not padded:
        monkeypatch.setattr(f"{__name__}.PROMPTS", letter_prompts("abc", "def"))
    found = []
    for longest in (4, 20):
        policy = Policy(random_policy().model, Letters(), frozenset({99}), 0)
        expected = sample(
            policy, PROMPTS, 4, dataclasses.replace(SAMPLING, max_completion_length=longest)
        )
        rollouts, device = counts(policy, longest)
        np.testing.assert_array_equal(rollouts.tokens_PGT, expected.tokens_PGT)
        found.append((sum(device.waits.values()), sum(device.launches.values())))
    (waits, launches), (more_waits, more_launches) = found
    assert more_waits - waits == 1
    assert (more_launches - launches) / 16 <= 170  # of 2 layers in float64


@pytest.mark.slow
def test_replaced_rows_draw_the_same_tokens(monkeypatch):
    """Rows that leave, and rows that take their places, are looked for every 16 tokens."""
    monkeypatch.setattr(local, "UNEQUAL_TOKEN_RATIO", 0)
    policy = Policy(build("gemma3", tied=False), Letters(), frozenset(range(1, VOCAB, 9)), 0)
    sampling = dataclasses.replace(SAMPLING, max_completion_length=20)
    expected = sample(policy, PROMPTS, 4, sampling)
    rollouts, device = counts(policy, 20, rows=6)
    np.testing.assert_array_equal(rollouts.lengths_PG, expected.lengths_PG)
    np.testing.assert_array_equal(rollouts.tokens_PGT, expected.tokens_PGT)
    assert device.waits.keys() == {"aten._to_copy.default"}


def test_a_mix_of_devices_and_a_wait_are_noticed():
    with torch.inference_mode(), emulated_device() as device:
        there = torch.ones(3).to(DEVICE)
        with pytest.raises(RuntimeError, match="on two devices"):
            there + torch.ones(3)
        assert not device.waits
        assert there.sum().item() == 3 and there.cpu().tolist() == [1, 1, 1]
        assert sum(device.waits.values()) == 2
