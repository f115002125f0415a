"""Tokens as CUDA graphs, on an emulation of them: the draws are those of the loop without."""

from __future__ import annotations

import copy
import dataclasses
import warnings

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, VOCAB, build
from commands import compose
from emulated_device import Tagged, on_device
from emulated_graphs import emulated_graphs
from fakes import LetterTokenizer, letter_prompts, random_model
from peft import LoraConfig, get_peft_model

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.policy.loading import Policy
from grpo_ustat.rollout import graphs, local
from grpo_ustat.rollout.batch import DecodingBatch
from grpo_ustat.rollout.engine import LocalEngine
from grpo_ustat.rollout.local import Sampling, sample

UNEQUAL = letter_prompts("ab", "c", "abcde", "jjj", "bcdefgh")
EQUAL = letter_prompts("abc", "def")
SAMPLING = Sampling(seed=0, stream="graphs", max_completion_length=20, rows=7, cuda_graphs=True)
ENDS = frozenset(range(1, VOCAB, 9))
NEVER = frozenset({VOCAB})
BEYOND = {"falcon", "falcon-grouped"}  # index by lists, which the emulated device cannot


class Letters(LetterTokenizer):
    """Prompts of letters; completions may hold any token."""

    def batch_decode(self, rows, skip_special_tokens):
        return [" ".join(map(str, row)) for row in rows]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Several buckets of columns, and rows that are replaced wherever some are finished."""
    monkeypatch.setattr(graphs, "LEAST_COLUMNS", 4)
    monkeypatch.setattr(graphs, "SPARE_COLUMNS", 16)
    monkeypatch.setattr(graphs, "_one_by_one", set())
    monkeypatch.setattr(local, "UNEQUAL_TOKEN_RATIO", 0)


def policy_of(model, ends=ENDS):
    return Policy(model, Letters(), ends, 0)


def by_graphs(policy, prompts, sampling=SAMPLING):
    """Completions by an emulated device, what it was asked, and its graphs' rows and columns."""
    sizes, recorded = [], graphs.TokenGraphs._recorded

    def noted(self, work):
        sizes.append((len(work.args[0].rows), self.columns))
        return recorded(self, work)

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode(), emulated_graphs() as device:
        patch.setattr(graphs.TokenGraphs, "_recorded", noted)
        policy = dataclasses.replace(policy, model=on_device(copy.deepcopy(policy.model)))
        device.launches.clear()
        return sample(policy, prompts, 4, sampling), device, sizes


def same(rollouts, expected):
    np.testing.assert_array_equal(rollouts.lengths_PG, expected.lengths_PG)
    np.testing.assert_array_equal(rollouts.tokens_PGT, expected.tokens_PGT)
    for name in ("logprobs_PGT", "entropy_PGT"):
        found, own = getattr(rollouts, name), getattr(expected, name)
        np.testing.assert_allclose(found, own, rtol=0, atol=1e-12)


def lora(model):
    torch.manual_seed(0)
    options = LoraConfig(target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, options).double().eval()


slow = pytest.mark.slow(minutes=0.05)


@pytest.mark.parametrize(
    "prompts, model, ends, changes",
    [
        (UNEQUAL, "llama", ENDS, dict(rows=5)),
        pytest.param(EQUAL, "llama", ENDS, dict(max_completion_length=40), marks=slow),
        pytest.param(UNEQUAL, "llama", ENDS, dict(rows=5, max_completion_length=50), marks=slow),
        pytest.param(UNEQUAL, "llama", NEVER, dict(max_completion_length=50), marks=slow),
        pytest.param(UNEQUAL, "llama", ENDS, dict(rows=512, max_completion_length=40), marks=slow),
        pytest.param(UNEQUAL, "llama", ENDS, dict(greedy=True), marks=slow),
        pytest.param(UNEQUAL, "llama", ENDS, dict(temperature=0.7), marks=slow),
        pytest.param(UNEQUAL, "qwen2", ENDS, dict(rows=1, max_completion_length=40), marks=slow),
        pytest.param(UNEQUAL, "gpt2", ENDS, dict(rows=6), marks=slow),
        pytest.param(UNEQUAL, "llama-eager", ENDS, dict(rows=5), marks=slow),
        pytest.param(UNEQUAL, "lora", ENDS, dict(rows=5), marks=slow),
    ],
)
@pytest.mark.slow
def test_graphs_draw_the_same_tokens(prompts, model, ends, changes):
    """Prompts of one length or several, with grouped queries or without, adapters; rows that leave
    and are replaced, texts that fill several buckets."""
    model = lora(random_model(vocab=VOCAB)) if model == "lora" else build(model, tied=False)
    policy, sampling = policy_of(model, ends), dataclasses.replace(SAMPLING, **changes)
    with warnings.catch_warnings(action="error"):
        rollouts, device, sizes = by_graphs(policy, prompts, sampling)
    same(rollouts, sample(policy, prompts, 4, sampling))
    assert len(sizes) == len(set(sizes)) and device.launches["replay"] > len(sizes)
    assert len({columns for _, columns in sizes}) > 1


@pytest.mark.slow(minutes=0.05)
def test_graphs_are_of_the_whole_batch_of_half_of_it_and_so_on(monkeypatch):
    """Rows that leave, and the whole batches after each other, meet the graphs that are there."""
    monkeypatch.setattr(local, "UNEQUAL_TOKEN_RATIO", 99)
    rollouts, device, sizes = by_graphs(
        policy_of(build("llama", tied=False)),
        UNEQUAL * 4,
        dataclasses.replace(SAMPLING, rows=40, max_completion_length=60),
    )
    assert rollouts.lengths_PG.size == 80
    assert {rows for rows, _ in sizes} <= {40, 20, 10, 5, 3, 2, 1}
    assert len(sizes) == len(set(sizes))


@pytest.mark.slow
def test_a_token_is_two_launches(monkeypatch):
    """16 more tokens of rows that end nowhere, in a bucket that is recorded already: 16 replays, a
    look, and what begins a stretch of tokens."""
    monkeypatch.setattr(graphs, "LEAST_COLUMNS", 64)
    policy, found = policy_of(build("llama", tied=False), NEVER), []
    for longest in (18, 34):
        sampling = dataclasses.replace(SAMPLING, rows=20, max_completion_length=longest)
        found.append(by_graphs(policy, UNEQUAL, sampling)[1])
    few, more = found
    assert more.launches["replay"] - few.launches["replay"] == 16
    assert sum(more.launches.values()) - sum(few.launches.values()) <= 16 * 2
    assert sum(more.waits.values()) - sum(few.waits.values()) == 1


@slow
def test_where_memory_runs_out_no_graph_is_left(monkeypatch):
    recorded, clear, left = graphs.TokenGraphs._recorded, local.clear_device_cache, []

    def small(self, work):
        graph = recorded(self, work)
        if len(work.args[0].rows) > 4 and len(self.graphs) > 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried")
        return graph

    def cleared(garbage_collection):
        clear(garbage_collection=garbage_collection)
        left.append(len(device.graphs))

    policy = policy_of(build("llama", tied=False))
    monkeypatch.setattr(graphs.TokenGraphs, "_recorded", small)
    monkeypatch.setattr(local, "clear_device_cache", cleared)
    with torch.inference_mode(), emulated_graphs() as device:
        own = dataclasses.replace(policy, model=on_device(copy.deepcopy(policy.model)))
        with pytest.warns(UserWarning, match="no memory to write 7 completions side by side"):
            rollouts = sample(own, UNEQUAL, 4, SAMPLING)
    assert left == [0]
    same(rollouts, sample(policy, UNEQUAL, 4, SAMPLING))


def of_the_host(self, keys, values, *args, **options):
    """The column as a number of the host, which a graph never changes."""
    column = int(LENGTH[0])
    self.keys[:, :, column : column + 1], self.values[:, :, column : column + 1] = keys, values
    return self.keys, self.values


LENGTH = [0]


@pytest.mark.slow
def test_a_column_of_the_host_is_noticed(monkeypatch):
    read = graphs.TokenGraphs._read

    def noted(self, batch):
        LENGTH[0] = batch.length
        return read(self, batch)

    policy = policy_of(build("llama", tied=False), NEVER)
    monkeypatch.setattr(graphs.StaticLayer, "update", of_the_host)
    monkeypatch.setattr(graphs.TokenGraphs, "_read", noted)
    rollouts, _, _ = by_graphs(policy, EQUAL)
    expected = sample(policy, EQUAL, 4, SAMPLING)
    assert (rollouts.tokens_PGT[..., :2] == expected.tokens_PGT[..., :2]).all()
    assert (rollouts.tokens_PGT != expected.tokens_PGT).any()


@slow
def test_state_that_moves_is_noticed(monkeypatch):
    """Lengths in a tensor of their own after each token, as without graphs they may be."""
    draw = DecodingBatch.draw

    def moving(self, logits_RV):
        draw(self, logits_RV)
        self.lengths_R = self.lengths_R.clone()

    policy = policy_of(build("llama", tied=False), NEVER)
    expected = sample(policy, EQUAL, 4, SAMPLING)
    monkeypatch.setattr(DecodingBatch, "draw", moving)
    same(sample(policy, EQUAL, 4, SAMPLING), expected)
    with pytest.raises(RuntimeError, match="memory that was freed"):
        by_graphs(policy, EQUAL)


@slow
def test_a_model_that_waits_goes_on_without_graphs(monkeypatch):
    """It is tried once: a warning says why, the draws are the same."""
    policy = policy_of(build("llama", tied=False))
    expected, read = sample(policy, UNEQUAL, 4, SAMPLING), graphs.TokenGraphs._read
    asked = []

    def waiting(self, batch):
        logits_RV = read(self, batch)
        asked.append(float(logits_RV.sum()))
        return logits_RV

    monkeypatch.setattr(graphs.TokenGraphs, "_read", waiting)
    with torch.inference_mode(), emulated_graphs() as device:
        own = dataclasses.replace(policy, model=on_device(copy.deepcopy(policy.model)))
        with pytest.warns(UserWarning, match=r"tokens of llama .* not permitted when stream is"):
            rollouts = sample(own, UNEQUAL, 4, SAMPLING)
        same(rollouts, expected)
        assert not device.graphs
        count = len(asked)
        same(sample(own, UNEQUAL, 4, SAMPLING), expected)
        assert len(asked) == count


@slow
def test_without_graphs_where_they_are_off_or_the_model_has_hooks():
    policy = policy_of(build("llama", tied=False))
    off = dataclasses.replace(SAMPLING, cuda_graphs=False)
    assert not by_graphs(policy, EQUAL, off)[1].launches["replay"]
    policy.model.register_forward_pre_hook(lambda *_: None)
    assert not by_graphs(policy, EQUAL)[1].launches["replay"]


AT_EVERY_PUSH = {  # one of each kind of attention and mask, of experts and of states
    "llama", "gpt2", "bloom", "gpt_neo", "gemma3", "gpt_oss", "llama4_text", "deepseek_v3",
    "mixtral", "qwen3_next", "zamba", "lfm2",
}  # fmt: skip


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow if kind in AT_EVERY_PUSH else pytest.mark.nightly)
        for kind in sorted(ARCHITECTURES.keys() - BEYOND)
    ],
)
def test_every_architecture_draws_the_same_with_graphs_as_without(kind):
    """Some as they did: those of sliding windows and states, some that make a mask of their own."""
    policy = policy_of(build(kind, tied=False))
    try:
        LocalEngine(policy)
    except ConfigError:
        return
    with warnings.catch_warnings(record=True) as said:
        rollouts, device, _ = by_graphs(policy, UNEQUAL)
    same(rollouts, sample(policy, UNEQUAL, 4, SAMPLING))
    refused = [w for w in said if "are written without CUDA graphs" in str(w.message)]
    assert bool(refused) + bool(device.launches["replay"]) <= 1


def test_the_emulation_computes_nothing_in_a_recording_and_refuses_the_host():
    with torch.inference_mode(), emulated_graphs() as device:
        x = Tagged(torch.ones(2))
        graph = device.graph()
        with device.record(graph):
            y = x.add_(1) * 2
        assert x.cpu().tolist() == [1, 1] and y.isnan().all()
        for times in (1, 2):
            graph.replay()
            assert x.cpu().tolist() == [1 + times] * 2 and y.cpu().tolist() == [2 + 2 * times] * 2
        for host in (lambda: x.sum().item(), lambda: x.nonzero(), lambda: x.copy_(torch.ones(2))):
            with pytest.raises(RuntimeError, match="not permitted"), device.record(device.graph()):
                host()


@pytest.mark.slow
def test_graphs_are_of_rollout_local():
    assert not (compose("mse").rollout.cuda_graphs or compose("train").rollout.cuda_graphs)
    config = compose("mse", "rollout.cuda_graphs=true")
    assert Sampling.of(config.sampler_options, "pool").cuda_graphs
    with pytest.raises(ConfigError, match=r"cuda_graphs=true is for rollout=local"):
        compose("mse", "rollout=vllm", "rollout.cuda_graphs=true")
