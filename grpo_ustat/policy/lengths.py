"""Whether prompts and completions fit, told by tokenizer and config.json before weights load."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from grpo_ustat.config import Common, TrainConfig
from grpo_ustat.policy.loading import context_length, encode
from grpo_ustat.ranks import RefusedByRank
from grpo_ustat.records import Prompt


def check_lengths(
    config: Common, tokenizer: PreTrainedTokenizerBase, prompts: list[Prompt]
) -> None:
    """Prompts and completions fit into the positions that the model, and vLLM, know.

    Raises:
        ConfigError: naming the longest prompt and the limit; on all ranks.
    """
    texts = [prompt.text for prompt in prompts]
    lengths = list(map(len, encode(tokenizer, texts, special_tokens=not config.prompt.chat)))
    if not min(lengths):
        raise RefusedByRank(
            f"the tokenizer of {config.model.model_name_or_path} makes no token of "
            f"{texts[lengths.index(0)]!r}: does it have its tokenizer files?"
        )
    limits = [(context_length(config), "the model's")]
    if isinstance(config, TrainConfig):
        limits.append((config.rollout.max_model_len, "rollout.max_model_len, vLLM's"))
    longest, asked = max(lengths), config.max_completion_length
    for limit, name in limits:
        if limit is not None and longest + asked > limit:
            raise RefusedByRank(
                f"a prompt of {longest} tokens and max_completion_length={asked} exceed {name} "
                f"{limit} tokens: use {_fixes(longest, asked, limit)}"
            )


def _fixes(longest: int, asked: int, limit: int) -> str:
    """What makes them fit: shorter completions, or leaving longer prompts out."""
    found = []
    if limit > longest:
        found.append(f"max_completion_length={limit - longest} or less")
    if limit > asked:
        found.append(f"prompt.max_length={limit - asked} to leave longer prompts out")
    return ", or ".join(found) or f"max_completion_length below {limit} and a prompt.max_length"
