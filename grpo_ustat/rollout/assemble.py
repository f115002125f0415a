"""From rows of tokens to the record of a step's completions."""

from __future__ import annotations

import numpy as np

from grpo_ustat.policy.loading import Policy
from grpo_ustat.records import Prompt, Rollouts


def assemble(
    policy: Policy,
    prompts: list[Prompt],
    prompt_tokens: list[list[int]],
    tokens_RT: np.ndarray,
    lengths_R: np.ndarray,
    logprobs_RT: np.ndarray | None = None,
    entropy_RT: np.ndarray | None = None,
) -> Rollouts:
    """Rollouts of R = P x G rows, prompt after prompt; columns beyond the longest are left out.

    Args:
        policy: decodes the texts and says what ends a completion.
        prompts, prompt_tokens: the P prompts.
        tokens_RT: completion tokens, 0 beyond a row's length.
        lengths_R: tokens of each row, at least 1.
        logprobs_RT, entropy_RT: the sampler's log-probabilities and entropies, 0 beyond a row's
            length; None where it has none.
    """
    width, size = int(lengths_R.max()), len(lengths_R) // len(prompts)
    shape = (len(prompts), size, width)
    last_R = tokens_RT[np.arange(len(tokens_RT)), lengths_R - 1]
    texts = policy.tokenizer.batch_decode(
        [row[:length] for row, length in zip(tokens_RT, lengths_R, strict=True)],
        skip_special_tokens=True,
    )

    def columns(values_RT: np.ndarray | None) -> np.ndarray | None:
        return None if values_RT is None else values_RT[:, :width].reshape(shape)

    return Rollouts(
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        tokens_PGT=columns(tokens_RT),
        mask_PGT=(np.arange(width) < lengths_R[:, None]).reshape(shape),
        ended_PG=np.isin(last_R, list(policy.end_tokens)).reshape(shape[:2]),
        texts_PG=[texts[i : i + size] for i in range(0, len(texts), size)],
        logprobs_PGT=columns(logprobs_RT),
        entropy_PGT=columns(entropy_RT),
    )
