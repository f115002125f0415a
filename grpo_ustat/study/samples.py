"""Which completions of a pool a study shows, and as what; the pool itself keeps tokens alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_ustat.config import MseConfig
from grpo_ustat.policy.loading import configured_task, configured_tokenizer
from grpo_ustat.records import Prompt
from grpo_ustat.runs.completions import write_rows
from grpo_ustat.runs.log import attempt
from grpo_ustat.study.store import Part, PoolStore

MOST = 2000


def leave_sample(config: MseConfig, prompts: list[Prompt], pool: Path, folder: Path) -> None:
    """Write completions.parquet: the first few completions of every question, or of evenly spaced
    ones; the study goes on without it where the disk refuses.
    """
    rows = list(_rows(config, prompts[:: -(-len(prompts) // MOST)], PoolStore(pool, {})))
    attempt(f"completions.parquet of {folder}", lambda: write_rows(folder, rows))


def _rows(config: MseConfig, prompts: list[Prompt], store: PoolStore) -> Iterator[dict[str, Any]]:
    tokenizer, count = configured_tokenizer(config), MOST // len(prompts)
    extract = None if config.imports_pool else configured_task(config, tokenizer).extract
    for prompt in prompts:
        part = store.read(prompt, *store.parts(prompt)[0])
        for i, text in enumerate(_texts(part, tokenizer, count)):
            yield {
                "prompt": prompt.text,
                "completion": text,
                "reward": float(part.rewards_N[i]),
                "prompt_id": prompt.id,
                "completion_index": i,
                "length": int(part.lengths_N[i]),
                "ended": bool(part.ended_N[i]),
                "answer": prompt.answer if extract else None,
                "extracted": extract(text) if extract else None,
            }


def _texts(part: Part, tokenizer, count: int) -> list[str]:
    pairs = zip(part.tokens_NT[:count], part.lengths_N, strict=False)
    return tokenizer.batch_decode([row[:n] for row, n in pairs], skip_special_tokens=True)
