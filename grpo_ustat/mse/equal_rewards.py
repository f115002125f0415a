"""Result of a study in which all rewards are equal: counts of outcomes instead of errors."""

from __future__ import annotations

from collections import Counter

import numpy as np

from grpo_ustat.config.mse import MseConfig
from grpo_ustat.distributed.workers import WorkCost
from grpo_ustat.estimators.baselines import weighted_sum
from grpo_ustat.mse.pool import EqualRewards
from grpo_ustat.mse.pool_store import mean_sampler_gap, scored_with
from grpo_ustat.mse.result import policy_facts, precision, study_cost
from grpo_ustat.mse.sampler import sampler_text
from grpo_ustat.pages.caveats import unjudged_warning
from grpo_ustat.policy.configured import configured_task
from grpo_ustat.policy.tokenizer import configured_tokenizer
from grpo_ustat.runs.folder import versions
from grpo_ustat.runs.result import StudyResult
from grpo_ustat.runs.study_parts import CompletionCounts, Sampler
from grpo_ustat.tasks.base import extracted


def equal_rewards_result(
    config: MseConfig, equal: EqualRewards, left_out: dict[str, int]
) -> StudyResult:
    """Return the content of `result.json`, without measurements of the gradient.

    Args:
        left_out: Number of excluded questions by reason.
    """
    parts = [part for parts in equal.stored for part in parts]
    cost = sum((part.work_cost for part in parts), WorkCost())
    rewards_PN, lengths_PN = (
        np.array([np.concatenate([getattr(x, name) for x in parts]) for parts in equal.stored])
        for name in ("rewards_N", "lengths_N")
    )
    packages: Counter[str] = Counter()
    for part in parts:
        packages[part.packages or scored_with()] += len(part.rewards_N)
    counts = completion_counts(config, equal)
    cut_at = None if config.imports_pool else config.max_completion_length
    gap = mean_sampler_gap([part.sampler_gap for part in parts])
    return StudyResult(
        equal_rewards=counts,
        precision=precision(config),
        policy=policy_facts(config, rewards_PN, lengths_PN, cost),
        questions=len(rewards_PN),
        pool_completions=rewards_PN.shape[1],
        summary=equal_rewards_sentence(counts, cut_at)
        + unjudged_warning(cost.timeouts, cost.failures, cost.rollouts)
        + ("" if gap is None else sampler_text(config.rollout.name, gap)),
        cost=study_cost(cost),
        versions=versions(),
        pool_versions=dict(packages),
        sampler=None if gap is None else Sampler(name=config.rollout.name, gap=gap),
        left_out=left_out,
    )


def completion_counts(config: MseConfig, equal: EqualRewards) -> CompletionCounts:
    """Count the completions that were cut, contained no answer, were wrong or were right.

    If the data set's reward is 0 or 1, each completion is counted in exactly one category. In an
    imported pool, only the cut or the right completions are counted, because answers are not
    extracted.
    """
    first = equal.stored[0][0]
    reward = float(weighted_sum(first.rewards_NF[0], np.array(config.weights)))
    parts = [part for parts in equal.stored for part in parts]
    ended = np.concatenate([part.ended_N for part in parts])
    if first.rewards_N[0] == 1:
        return CompletionCounts(reward=reward, completions=ended.size, right=ended.size)
    cut = int((~ended).sum())
    if config.imports_pool:
        return CompletionCounts(reward=reward, completions=ended.size, cut=cut)
    tokenizer = configured_tokenizer(config.model)
    task, no_answer = configured_task(config.task_options, config.model, tokenizer), 0
    of_prompts = zip(equal.prompts, equal.stored, strict=True)
    for prompt, part in ((prompt, part) for prompt, stored in of_prompts for part in stored):
        pairs = zip(part.tokens_NT, part.lengths_N, strict=True)
        texts = tokenizer.batch_decode([row[:n] for row, n in pairs], skip_special_tokens=True)
        no_answer += sum(
            extracted(task, prompt, text) is None
            for text, is_whole in zip(texts, part.ended_N, strict=True)
            if is_whole
        )
    return CompletionCounts(
        reward=reward,
        completions=ended.size,
        cut=cut,
        no_answer=no_answer,
        wrong=ended.size - cut - no_answer if first.rewards_N[0] == 0 else None,
    )


def equal_rewards_sentence(counts: CompletionCounts, cut_at: int | None) -> str:
    r"""Return a sentence on the outcomes of the completions.

    Args:
        cut_at: Value of `max_completion_length`; None if another program generated the completions.

    >>> counts = CompletionCounts(reward=0.0, completions=64, cut=40, no_answer=20, wrong=4)
    >>> print(equal_rewards_sentence(counts, 160).replace(": ", ":\n"))
    All 64 completions got reward 0, so there is no gradient to measure:
    40 were cut at max_completion_length=160, 20 of the others contain no answer, 4 are wrong.
    """
    at = "" if cut_at is None else f" at max_completion_length={cut_at}"
    of = "of the others " * bool(counts.cut)
    # Phrases for one completion, and for several completions.
    phrases = {
        "cut": (f"was cut{at}", f"were cut{at}"),
        "no_answer": (f"{of}contains no answer", f"{of}contain no answer"),
        "wrong": ("is wrong", "are wrong"),
        "right": ("is right", "are right"),
    }
    total = counts.completions
    fates = [
        f"{'all' if count == total else count} {words[count > 1]}"
        for name, words in phrases.items()
        if (count := getattr(counts, name))
    ]
    text = (
        f"All {total} completions got reward {counts.reward:g}, so there is no gradient to measure"
    )
    return f"{text}: {', '.join(fates)}." if fates else f"{text}."
