"""Sampling: the right distribution, keyed draws, padding and batching without influence."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from commands import compose
from fakes import LetterTokenizer, letter_prompts, random_policy
from golden import naming

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.draws import generator, uniforms
from grpo_ustat.policy.configured import configured_policy
from grpo_ustat.policy.loading import load_policy
from grpo_ustat.policy.logprobs import completion_logprobs, pack, token_logprobs
from grpo_ustat.policy.tokenizer import stop_tokens
from grpo_ustat.records import Prompt
from grpo_ustat.rollout import local
from grpo_ustat.rollout.local import Sampling, sample
from grpo_ustat.terminal.progress import listening

PROMPTS = letter_prompts("ab", "c", "abcde", "jjj", "bcdefgh")
SAMPLING = Sampling(seed=0, stream="test", max_completion_length=9)


def same(a, b):
    width = max(a.tokens_PGT.shape[2], b.tokens_PGT.shape[2])

    def padded(r):
        return np.pad(r.tokens_PGT, ((0, 0), (0, 0), (0, width - r.tokens_PGT.shape[2])))

    return np.array_equal(padded(a), padded(b)) and np.array_equal(a.lengths_PG, b.lengths_PG)


@pytest.mark.slow
def test_draws_do_not_depend_on_the_batch_size_in_float64():
    policy = random_policy()
    whole = sample(policy, PROMPTS, 6, SAMPLING)
    for rows in (1, 4, 6, 13):  # also fewer rows than a group has completions
        assert same(whole, sample(policy, PROMPTS, 6, dataclasses.replace(SAMPLING, rows=rows)))


def test_draws_do_not_depend_on_order_or_company():
    policy = random_policy()
    whole = sample(policy, PROMPTS, 4, SAMPLING)
    backwards = sample(policy, PROMPTS[::-1], 4, SAMPLING)
    np.testing.assert_array_equal(whole.tokens_PGT, backwards.tokens_PGT[::-1])
    alone = sample(policy, PROMPTS[3:4], 4, SAMPLING)
    width = alone.tokens_PGT.shape[2]
    np.testing.assert_array_equal(whole.tokens_PGT[3:4, :, :width], alone.tokens_PGT)


def test_completions_continue_where_the_last_call_stopped():
    policy = random_policy()
    eight = sample(policy, PROMPTS[:2], 8, SAMPLING)
    later = sample(policy, PROMPTS[:2], 5, SAMPLING, first=3)
    np.testing.assert_array_equal(eight.lengths_PG[:, 3:], later.lengths_PG)
    assert [t[3:] for t in eight.texts_PG] == later.texts_PG


def test_seed_stream_step_and_prompt_change_the_draws():
    base = uniforms(0, "a", 0, "x", range(1), 5)
    for other in ((1, "a", 0, "x"), (0, "b", 0, "x"), (0, "a", 1, "x"), (0, "a", 0, "y")):
        assert not np.array_equal(base, uniforms(*other, range(1), 5))
    assert generator(0, "a", 1).random() != generator(0, "a", 2).random()


def test_uniforms_are_uniform():
    values = uniforms(0, "u", 0, "x", range(2000), 8)
    assert abs(values.mean() - 0.5) < 5 * np.sqrt(1 / 12 / values.size)
    assert abs(np.corrcoef(values[:-1, 0], values[1:, 0])[0, 1]) < 0.1


def test_frequencies_are_the_probabilities_that_are_scored():
    """First tokens of 4000 completions against softmax(logits / T), a chi-square within reason."""
    policy = random_policy()
    sampling = dataclasses.replace(SAMPLING, max_completion_length=1, temperature=0.8)
    drawn = sample(policy, PROMPTS[:1], 4000, sampling).tokens_PGT[0, :, 0]
    ids = torch.tensor([policy.tokenizer("ab")["input_ids"]])
    p = torch.softmax(policy.model(input_ids=ids).logits[0, -1] / 0.8, -1).detach().numpy()
    counts = np.bincount(drawn, minlength=len(p))
    chi2 = ((counts - 4000 * p) ** 2 / (4000 * p)).sum()
    assert chi2 < len(p) + 5 * np.sqrt(2 * len(p))


def test_a_completion_ends_with_its_end_token_and_nothing_after_it():
    policy = random_policy()
    rollouts = sample(policy, PROMPTS, 20, SAMPLING)
    tokens, lengths = rollouts.tokens_PGT, rollouts.lengths_PG
    last = np.take_along_axis(tokens, lengths[..., None] - 1, axis=2)[..., 0]
    np.testing.assert_array_equal(last == 1, rollouts.ended_PG)
    assert (lengths[~rollouts.ended_PG] == 9).all()
    assert rollouts.ended_PG.any() and (~rollouts.ended_PG).any()
    inside = np.arange(tokens.shape[2]) < lengths[..., None] - 1
    assert not (tokens[inside] == 1).any()
    assert (tokens[~rollouts.mask_PGT] == 0).all()


class PairTokenizer(LetterTokenizer):
    """Letters, then the pairs `xa` and `xx`."""

    def __len__(self):
        return 30

    def batch_decode(self, rows, skip_special_tokens):
        letters = LetterTokenizer().batch_decode([[t] for t in range(28)], skip_special_tokens)
        return ["".join(([*letters, "xa", "xx"])[t] for t in row) for row in rows]


def test_every_token_that_contains_the_stop_string_stops():
    assert stop_tokens(PairTokenizer(), "x") == {25, 28, 29}
    assert stop_tokens(PairTokenizer(), "xa") == {28}
    with pytest.raises(ConfigError, match=naming("prompt.stop='ab'", 30)):
        stop_tokens(PairTokenizer(), "ab")


def test_a_completion_ends_with_its_first_stop_token():
    """The stop is part of the completion; what precedes it is drawn as without a stop."""
    policy = random_policy()
    (stop_token,) = stop_tokens(policy.tokenizer, "d")
    stopped = dataclasses.replace(policy, end_tokens=policy.end_tokens | {stop_token})
    free, cut = sample(policy, PROMPTS, 20, SAMPLING), sample(stopped, PROMPTS, 20, SAMPLING)
    for whole, part in zip(sum(free.texts_PG, []), sum(cut.texts_PG, []), strict=True):
        head, stop, _ = whole.partition("d")
        assert part == head + stop
    last = np.take_along_axis(cut.tokens_PGT, cut.lengths_PG[..., None] - 1, axis=2)[..., 0]
    np.testing.assert_array_equal(cut.ended_PG, np.isin(last, [1, stop_token]))
    assert (last == stop_token).any() and (last == 1).any()
    assert ((cut.tokens_PGT == stop_token).sum(axis=2) == (last == stop_token)).all()


def test_the_configured_stop_ends_completions_beside_the_end_token():
    plain = configured_policy(compose("mse").policy_options)
    stopped = configured_policy(compose("mse", "prompt.stop='#'").policy_options)
    added = stopped.end_tokens - plain.end_tokens
    assert plain.end_tokens < stopped.end_tokens
    assert stopped.tokenizer.batch_decode([[t] for t in added]) == ["#"]


def test_float32_flips_are_rare():
    """Another batch size may flip a token in float32; on the embedded policy hardly ever does."""
    policy = load_policy("embedded:tiny_direct")
    prompts = [Prompt(f"{a}+{b}", f"{a}+{b}=", "", "", "") for a in range(10, 30) for b in (3, 11)]
    sampling = Sampling(seed=0, stream="flip", max_completion_length=12)
    one = sample(policy, prompts, 8, sampling)
    other = sample(policy, prompts, 8, dataclasses.replace(sampling, rows=24))
    differing = sum(
        a != b
        for left, right in zip(one.texts_PG, other.texts_PG, strict=True)
        for a, b in zip(left, right, strict=True)
    )
    assert differing <= 1


def test_sampled_tokens_are_scored_with_their_own_probabilities():
    """exp of the scored log-probability of a one-token completion is its softmax probability."""
    policy = random_policy()
    rollouts = sample(
        policy, PROMPTS[:1], 3, dataclasses.replace(SAMPLING, max_completion_length=1)
    )
    logprob = completion_logprobs(policy.model, pack(rollouts, np.arange(3), 0, "cpu"))
    ids = torch.tensor([policy.tokenizer("ab")["input_ids"]])
    p = torch.log_softmax(policy.model(input_ids=ids).logits[0, -1], -1)
    expected = p[torch.from_numpy(rollouts.tokens_PGT[0, :, 0])]
    torch.testing.assert_close(logprob, expected, rtol=1e-12, atol=1e-12)


def test_greedy_is_the_likeliest_token_each_time():
    """Against argmax over full forward passes; the uniforms and the temperature do not matter."""
    policy = random_policy()
    greedy = dataclasses.replace(SAMPLING, greedy=True)
    rollouts = sample(policy, PROMPTS, 1, greedy)
    other = sample(policy, PROMPTS, 1, dataclasses.replace(greedy, seed=9, temperature=0.5))
    np.testing.assert_array_equal(rollouts.tokens_PGT, other.tokens_PGT)
    for p, prompt in enumerate(rollouts.prompt_tokens):
        ids = list(prompt)
        for token in rollouts.tokens_PGT[p, 0, : rollouts.lengths_PG[p, 0]]:
            logits = policy.model(input_ids=torch.tensor([ids])).logits[0, -1]
            assert int(logits.argmax()) == token
            ids.append(int(token))


@pytest.mark.slow
def test_where_memory_runs_out_fewer_rows_are_written_with_the_same_draws(monkeypatch):
    policy, decode, tried = random_policy(), local.decode, []
    whole = sample(policy, PROMPTS, 6, SAMPLING)

    def small(policy, work, order, at_once, sampling, written, progress):
        tried.append(at_once)
        if at_once > 4:
            progress.add(at_once, tokens=7)
            raise RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory: you tried")
        return decode(policy, work, order, at_once, sampling, written, progress)

    monkeypatch.setattr(local, "decode", small)
    told = []
    with pytest.warns(UserWarning, match="completions at a time"), listening(told.append):
        assert same(whole, sample(policy, PROMPTS, 6, SAMPLING))
    assert tried == [30, 15, 7, 3]
    assert (told[-1].completed, told[-1].total) == (30, 30)
    assert told[-1].tokens == whole.lengths_PG.sum()


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried"), RuntimeError("shapes differ")]
)
def test_no_memory_for_one_completion_and_other_errors_are_raised(error, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(local, "decode", fail)
    rows = 1 if isinstance(error, torch.OutOfMemoryError) else 8
    with pytest.raises(type(error), match=str(error)):
        sample(random_policy(), PROMPTS, 6, dataclasses.replace(SAMPLING, rows=rows))


def test_logits_that_are_not_finite_are_refused(monkeypatch):
    policy, original = random_policy(), local.DecodingBatch.read

    def diverged(self):
        return torch.full_like(original(self), torch.nan)

    monkeypatch.setattr(local.DecodingBatch, "read", diverged)
    with pytest.raises(FloatingPointError, match=naming("logits", "learning_rate")):
        sample(policy, PROMPTS, 2, SAMPLING)


def test_logprobs_are_those_that_are_scored():
    policy = random_policy()
    sampling = dataclasses.replace(SAMPLING, temperature=0.7)
    rollouts = sample(policy, PROMPTS, 6, sampling)
    rows = pack(rollouts, np.arange(30), 0, "cpu")
    scored = token_logprobs(policy.model, rows, 0.7).detach().numpy()
    np.testing.assert_allclose(rollouts.logprobs_PGT.reshape(30, -1), scored, rtol=0, atol=1e-10)
