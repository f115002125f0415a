"""Sampling with the policy's own model, in the same process.

Tokens are drawn from softmax(logits / temperature) over the full vocabulary, which is exactly the
distribution whose log-probabilities are trained. The random number of a token depends only on the
seed, the step, the prompt, the completion and the token's position, not on how completions are
batched.

Sampling is fast because a group's prompt is read once, and because finished completions leave the
batch or are replaced.
"""

from __future__ import annotations

import warnings
from itertools import groupby

import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache

from grpo_ustat.draws import uniforms
from grpo_ustat.policy.loading import Policy
from grpo_ustat.policy.memory import out_of_memory
from grpo_ustat.records import Prompt, Rollouts
from grpo_ustat.rollout.batch import Completions, DecodingBatch, Work
from grpo_ustat.rollout.linears import cast_linears
from grpo_ustat.rollout.sampling import Sampling
from grpo_ustat.terminal.progress import Progress

# Finished rows are replaced when the share of unfinished rows falls below this value.
REFILL_BELOW = 0.9
# Rows are replaced only if completions have unequal lengths. The sampler decides this when the
# share of unfinished rows falls below this value.
DECIDE_BELOW = 0.7
# Lengths count as unequal if the batch draws more than this factor times as many tokens until the
# share falls below `DECIDE_BELOW` as until it falls below `REFILL_BELOW`.
UNEQUAL_TOKEN_RATIO = 1.25
# Number of tokens between two checks for finished rows, by device type; 16 on other devices.
TOKENS_BETWEEN_LOOKS = {"cpu": 1}


def sample(
    policy: Policy,
    prompts: list[Prompt],
    group_size: int,
    sampling: Sampling,
    *,
    step: int = 0,
    first: int = 0,
) -> Rollouts:
    """Sample `group_size` completions of each prompt.

    If memory runs out, the number of completions sampled in parallel is halved, with a warning. The
    random numbers do not change.

    Args:
        policy: policy that writes the completions.
        prompts: P prompts.
        group_size: number of completions per prompt, G.
        sampling: options of sampling.
        step: training step or replicate. It is part of the key of the random numbers, so each step
            draws different completions.
        first: index of the first completion. Two calls for completions 0..3 and 4..7 give the same
            result as one call for 0..7.

    Raises:
        RuntimeError: there is not enough memory for a single completion.
        FloatingPointError: the model's logits are not finite.
    """
    encoded = policy.encode([prompt.text for prompt in prompts])

    def draws(rows: list[int]) -> np.ndarray:
        """Return the random numbers of completions, given by r = p G + i, [len(rows), T]."""
        parts = []
        for p, group in groupby(rows, key=lambda r: r // group_size):
            completions = [first + r % group_size for r in group]
            key = (sampling.seed, sampling.stream, step, prompts[p].id)
            parts.append(uniforms(*key, completions, sampling.max_completion_length))
        return np.concatenate(parts)

    work = Work(encoded, group_size, draws)
    written = write(policy, work, sampling, Progress("writing", len(prompts) * group_size))
    # Checked only at the end, because on a GPU each check waits for the device.
    if not written.logprobs_RT.isfinite().all():
        raise FloatingPointError(
            "the model's logits are not finite: lower learning_rate if this run has trained the "
            "model, otherwise check the model's weights and model.dtype"
        )
    columns = (column.numpy() for column in written.columns())
    return assemble(policy, prompts, encoded, *columns)


def write(policy: Policy, work: Work, sampling: Sampling, progress: Progress) -> Completions:
    """Sample all completions of `work`, up to `sampling.rows` in parallel.

    If memory runs out, fewer are sampled in parallel.
    """
    count = len(work.encoded) * work.group_size
    order = sorted(range(count), key=lambda r: len(work.prompt(r)))
    written = Completions(count, sampling.max_completion_length, policy.model.dtype)
    at_once = min(sampling.rows, count)
    with policy.computing(), cast_linears(policy.model):
        while order:
            no_memory = False
            try:
                decode(policy, work, order, at_once, sampling, written, progress)
            except RuntimeError as error:
                if at_once == 1 or not out_of_memory(error):
                    raise
                no_memory = True
            order = [r for r in order if not written.lengths_R[r]]
            if no_memory:
                # The memory is freed outside the except block, because inside it the error still
                # refers to all tensors.
                clear_device_cache(garbage_collection=True)
                progress.completed = len(written.lengths_R) - len(order)
                progress.tokens = int(written.lengths_R.sum())
                rows, at_once = at_once, at_once // 2
                warnings.warn(
                    f"not enough memory for {rows} completions at a time, trying {at_once}: set "
                    f"rollout_batch_size={at_once} to avoid this failed attempt",
                    stacklevel=3,
                )
    return written


@torch.inference_mode()
def decode(
    policy: Policy,
    work: Work,
    order: list[int],
    at_once: int,
    sampling: Sampling,
    written: Completions,
    progress: Progress,
) -> None:
    """Sample completions, up to `at_once` in parallel, one token of each at a time.

    If the model's cache allows it and the completions have unequal lengths, waiting completions
    replace finished ones. Prompts are then read from the longest to the shortest, so that later
    prompts always fit. Otherwise finished completions leave the batch, and the next batch starts
    when the batch is empty.

    Args:
        policy: policy that writes the completions.
        work: prompts and random numbers of all completions.
        order: indices of the completions to sample, sorted by ascending prompt length.
        at_once: number of completions sampled in parallel.
        sampling: options of sampling.
        written: storage to which this function copies the completions.
        progress: counter of finished completions and tokens.
    """
    interval = TOKENS_BETWEEN_LOOKS.get(policy.model.device.type, 16)
    waiting, refill = order, False
    if len(order) > at_once:
        waiting = sorted(order, key=lambda r: -len(work.prompt(r)))
    while waiting:
        batch = DecodingBatch(policy, work, waiting[:at_once], sampling)
        waiting, first_leave = waiting[at_once:], 0
        undecided = bool(waiting) and batch.replaceable and not refill
        while True:
            if batch.drawn % interval == 0 or batch.all_at_the_limit():
                count, rows = batch.look(progress), len(batch.rows)
                if count < REFILL_BELOW * rows and not first_leave:
                    first_leave = batch.drawn
                if undecided and count < DECIDE_BELOW * rows:
                    refill, undecided = batch.drawn > UNEQUAL_TOKEN_RATIO * first_leave, False
                if refill and waiting and 0 < count < REFILL_BELOW * rows:
                    batch.take(written)
                    batch.refill(waiting)
                elif batch.fewer_rows(count) < rows and not (undecided and count):
                    batch.take(written)
                    if not count:
                        break
                    batch.keep_rows(batch.fewer_rows(count))
            batch.write(batch.until_look(interval))


def assemble(
    policy: Policy,
    prompts: list[Prompt],
    prompt_tokens: list[list[int]],
    tokens_RT: np.ndarray,
    lengths_R: np.ndarray,
    logprobs_RT: np.ndarray | None = None,
    entropy_RT: np.ndarray | None = None,
) -> Rollouts:
    """Build rollouts from R = P x G completions, which are in the order of the prompts.

    Columns that no completion uses are removed.

    Args:
        policy: policy whose tokenizer decodes the texts. A completion that ends with one of its end
            tokens counts as finished.
        prompts, prompt_tokens: the P prompts and their tokens.
        tokens_RT: tokens of the completions, followed by zeros.
        lengths_R: number of tokens of each completion, at least 1.
        logprobs_RT, entropy_RT: log-probabilities and entropies of the tokens, followed by zeros.
            None if the sampler does not compute them.
    """
    width, size = int(lengths_R.max()), len(lengths_R) // len(prompts)
    shape = (len(prompts), size, width)
    last_R = tokens_RT[np.arange(len(tokens_RT)), lengths_R - 1]
    texts = policy.tokenizer.batch_decode(
        [row[:length] for row, length in zip(tokens_RT, lengths_R, strict=True)],
        skip_special_tokens=True,
    )

    def columns(values_RT: np.ndarray) -> np.ndarray:
        return values_RT[:, :width].reshape(shape)

    return Rollouts(
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        tokens_PGT=columns(tokens_RT),
        mask_PGT=(np.arange(width) < lengths_R[:, None]).reshape(shape),
        ended_PG=np.isin(last_R, list(policy.end_tokens)).reshape(shape[:2]),
        texts_PG=[texts[i : i + size] for i in range(0, len(texts), size)],
        logprobs_PGT=None if logprobs_RT is None else columns(logprobs_RT),
        entropy_PGT=None if entropy_RT is None else columns(entropy_RT),
    )
