"""Pools from rollouts saved elsewhere: a Parquet file with prompts, completions and rewards.

The columns are those of TRL's logged completions: `prompt`, `completion`, one column of rewards and
perhaps `step` and `advantage`; of a training run's own completions.parquet one step. The texts are
tokenised again, an end token is added to every completion (but where `ended` says that it was cut),
and the model must be the policy that wrote them: their scores are the model's.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet

from grpo_ustat.checks import ConfigError
from grpo_ustat.config import MseConfig
from grpo_ustat.identity import file_digest
from grpo_ustat.policy.loading import Policy, configured_policy
from grpo_ustat.policy.scores import parameter_sizes
from grpo_ustat.policy.sketch import Sketch
from grpo_ustat.records import Prompt, Rollouts, ScorePool
from grpo_ustat.study.pool import check_batch, read_pool, score_part
from grpo_ustat.study.store import PoolStore, draws_of
from grpo_ustat.study.workers import Done

KNOWN = (  # TRL's, then ours
    "step", "prompt", "completion", "advantage",
    "prompt_id", "completion_index", "length", "ended", "answer", "extracted",
)  # fmt: skip


def import_pool(config: MseConfig, folder: Path) -> tuple[ScorePool, Done, list[Prompt]]:
    """Score the rollouts of `config.pool`, a Parquet file.

    Every prompt keeps as many completions as the prompt with the fewest; the rest is dropped and
    counted on the terminal. What was scored stays in `folder` and is not scored again.

    Raises:
        ConfigError: the file cannot be read or lacks columns, or too few completions of a prompt.
    """
    path = Path(config.pool)
    texts, rewards, ended = _groups(_table(path), path)
    size = min(map(len, rewards))
    if size < 4:
        raise ConfigError(f"{path} has a prompt with {size} completions: at least 4 are needed")
    dropped = sum(map(len, rewards)) - size * len(rewards)
    if dropped:
        print(f"{path}: {dropped} completions dropped, {size} kept of each prompt")
    prompts = [Prompt(_name(text), text, text, "", "imported") for text in texts]
    store = PoolStore(folder, draws_of(config) | {"file": file_digest(path)})
    store.open()
    policy = configured_policy(config)
    cut = [[row[:size] for row in rows] for rows in (texts.values(), ended)]
    rollouts = _rollouts(policy, prompts, *cut)
    _score(config, policy, store, rollouts, np.array([r[:size] for r in rewards]))
    pool, spent = read_pool(store, prompts, size)
    return pool, spent, prompts


def _table(path: Path) -> dict[str, list]:
    try:
        return parquet.read_table(path).to_pydict()
    except (OSError, ValueError) as error:
        raise ConfigError(f"pool={path} cannot be read: {error}") from error


def _groups(
    table: dict[str, list], path: Path
) -> tuple[dict[str, list[str]], list[list[float]], list[list[bool]]]:
    """Completions by prompt, and in the same order their rewards and whether they ended."""
    missing = {"prompt", "completion"} - set(table)
    numeric = [
        name
        for name, values in table.items()
        if name not in KNOWN and values and all(isinstance(v, int | float) for v in values)
    ]
    if missing or len(numeric) != 1:
        raise ConfigError(
            f"{path} has columns {', '.join(table)}: prompt, completion and exactly one column of "
            f"rewards are needed, found {', '.join(numeric) or 'none'}"
        )
    steps = set(table.get("step", [0]))
    if len(steps) > 1:
        raise ConfigError(
            f"{path} holds steps {min(steps)} to {max(steps)}, each of another policy: keep one"
        )
    texts: dict[str, list[str]] = {}
    rewards: dict[str, list[float]] = {}
    ended: dict[str, list[bool]] = {}
    every = table.get("ended", [True] * len(table["prompt"]))
    columns = (table["prompt"], table["completion"], table[numeric[0]], every)
    for prompt, completion, reward, whole in zip(*columns, strict=True):
        texts.setdefault(prompt, []).append(completion)
        rewards.setdefault(prompt, []).append(float(reward))
        ended.setdefault(prompt, []).append(whole)
    return texts, list(rewards.values()), list(ended.values())


def _name(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _rollouts(
    policy: Policy,
    prompts: list[Prompt],
    texts_PN: list[list[str]],
    ended_PN: list[list[bool]],
) -> Rollouts:
    encode, end = policy.tokenizer, policy.tokenizer.eos_token_id
    ids = [
        [
            encode(text, add_special_tokens=False)["input_ids"] + [end] * whole
            for text, whole in zip(*row, strict=True)
        ]
        for row in zip(texts_PN, ended_PN, strict=True)
    ]
    longest = max(len(row) for group in ids for row in group)
    tokens = np.zeros((len(ids), len(ids[0]), longest), dtype=np.int64)
    mask = np.zeros(tokens.shape, dtype=bool)
    for p, group in enumerate(ids):
        for i, row in enumerate(group):
            tokens[p, i, : len(row)], mask[p, i, : len(row)] = row, True
    return Rollouts(
        prompts=prompts,
        prompt_tokens=[encode(p.text, add_special_tokens=False)["input_ids"] for p in prompts],
        tokens_PGT=tokens,
        mask_PGT=mask,
        ended_PG=np.array(ended_PN),
        texts_PG=texts_PN,
    )


def _score(config: MseConfig, policy: Policy, store: PoolStore, rollouts, rewards_PN) -> None:
    sizes = parameter_sizes(policy.model)
    sketches = [
        Sketch(sizes, dimension)
        for dimension in (config.budget.feature_sketch, config.budget.gradient_sketch)
    ]
    check_batch(policy, rollouts, rewards_PN.shape[1])
    for row, prompt in enumerate(rollouts.prompts):
        if not store.parts(prompt):
            cost = Done(rewards_PN.shape[1], int(rollouts.lengths_PG[row].sum()))
            part = score_part(policy, rollouts, row, rewards_PN[row], config, sketches, cost)
            store.write(prompt, 0, part)
