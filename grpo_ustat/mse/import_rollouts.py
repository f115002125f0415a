"""Build pools from saved rollouts: a Parquet file with prompts, completions and rewards.

`logs.rows` reads the rows. If the rows have texts instead of token ids, the texts are tokenised
again, and conversations are formatted with the model's chat template, as in TRL. A text has lost
the end token, so it is added to each completion that ended (see `EndTokens`). The configured model
must be the policy that wrote the completions, because it computes their scores (gradients of the
log-probability).

A row may be one turn of a rollout. The score of the rollout is then the sum of the scores of its
turns. If the token ids of one turn continue those of an earlier turn, both are read as one sequence
(`merged_turns`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import cast

import numpy as np

from grpo_ustat.config.identity import file_digest
from grpo_ustat.config.mse import MseConfig
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.distributed.ranks import is_main
from grpo_ustat.distributed.workers import WorkCost
from grpo_ustat.logs.rows import MIN_COMPLETIONS, Rollout, read_rollouts
from grpo_ustat.mse.pool import EqualRewards, read_pool
from grpo_ustat.mse.pool_store import PoolStore, draws_of
from grpo_ustat.mse.sampler import MAX_LOGPROB_GAP, sampler_gap
from grpo_ustat.mse.scoring import (
    check_batch,
    completions_of,
    question_cost,
    score_part,
    score_sketches,
)
from grpo_ustat.policy.chat import around_answers, in_chat_format, warn_of_options
from grpo_ustat.policy.configured import configured_policy
from grpo_ustat.policy.loading import Policy
from grpo_ustat.policy.prompt_sharing import check_rows
from grpo_ustat.policy.source import context_length, crossed_switch
from grpo_ustat.policy.tokenizer import encode
from grpo_ustat.records import Prompt, Rollouts, ScorePool
from grpo_ustat.terminal.streams import single_line, tell

# Maximum number of completions for which logged and computed log-probabilities are compared.
MAX_CHECKED_COMPLETIONS = 64


def import_pool(
    config: MseConfig, folder: Path
) -> tuple[ScorePool, WorkCost, list[Prompt], Rollouts]:
    """Score the rollouts in the Parquet file `config.pool`.

    The first `study.questions` prompts are kept, all with the same number of completions (see
    `_trim_groups`). The number of rows left out is printed. Scores are stored in `folder`, so that
    a second run does not compute them again.

    Raises:
        EqualRewards: If all rewards are equal. Nothing is scored then.
    """
    logged = logged_rollouts(config)
    # `config.imports_pool` guarantees this.
    assert config.pool is not None
    policy = configured_policy(config.policy_options)
    if not logged[0].is_exact and not isinstance(logged[0].prompt, str):
        _check_template(policy, config)
        # The chat template has already written the special tokens.
        policy = replace(policy, special_tokens=False)
    elif config.prompt.template_options:
        raise ConfigError(
            f"prompt.template_options={config.prompt.template_options} are for chat templates, "
            f"but the prompts of {config.pool} are texts: leave the options out"
        )
    groups: dict[str, list[Rollout]] = {}
    for rollout in logged:
        ids = rollout.prompt_ids
        key = _prompt_text(rollout, policy, config) if ids is None else str(ids)
        groups.setdefault(key, []).append(rollout)
    groups = _trim_groups(groups, config)
    names = [hashlib.blake2b(key.encode(), digest_size=8).hexdigest() for key in groups]
    texts = [
        key if group[0].prompt_ids is None else str(policy.tokenizer.decode(group[0].prompt_ids))
        for key, group in groups.items()
    ]
    prompts = [
        Prompt(name, text, text, "", "imported") for name, text in zip(names, texts, strict=True)
    ]
    rollouts = _tokenise(prompts, list(groups.values()), policy, config)
    file = {"file": file_digest(Path(config.pool)), "cut_at": config.study.cut_at}
    store = PoolStore(folder, draws_of(config) | file)
    store.open()
    rewards_PN = np.array([[x.reward for x in group] for group in groups.values()])
    check_rows(policy)
    if rollouts.logprobs_PGT is not None:
        check_sampler(policy, rollouts, config)
    sketches, sampler = score_sketches(config.budget, policy), config.sampler_options
    if (rewards_PN == rewards_PN[0, 0]).all():
        for row, prompt in enumerate(prompts):
            cost = question_cost(rollouts, row)
            rewards_N1 = rewards_PN[row, :, None]
            store.write(prompt, 0, completions_of(policy, rollouts, row, rewards_N1, sampler, cost))
        raise EqualRewards(prompts, list(store.completions(prompts)))
    check_batch(policy, rollouts, rewards_PN.shape[1])
    for row, (prompt, spans) in enumerate(zip(prompts, store.parts(prompts), strict=True)):
        if not spans:
            cost = question_cost(rollouts, row)
            part = score_part(
                policy, rollouts, row, rewards_PN[row, :, None], sampler, sketches, cost
            )
            store.write(prompt, 0, part)
    pool, cost = read_pool(store, prompts, rewards_PN.shape[1])
    return pool, cost, prompts, rollouts


def logged_rollouts(config: MseConfig) -> list[Rollout]:
    """Read the rows of `config.pool`, and check that they tell which completions ended."""
    # `config.imports_pool` guarantees this.
    assert config.pool is not None
    path, cut_at = Path(config.pool), config.study.cut_at
    rollouts = read_rollouts(path)
    if config.study.corrections and rollouts[0].logprobs is None:
        raise ConfigError(
            f"study.corrections={config.study.corrections} need the log-probabilities of the "
            f"sampler, but {path} has no column logprobs; log them, or use study.corrections=[]"
        )
    has_ended = rollouts[0].ended is not None
    if rollouts[0].is_exact and cut_at is not None:
        raise ConfigError(
            f"study.cut_at={cut_at}, but {path} has token ids, whose ends show which completions "
            "were cut: use study.cut_at=null"
        )
    if has_ended and cut_at is not None:
        raise ConfigError(
            f"study.cut_at={cut_at}, but {path} has a column ended, which shows which completions "
            "were cut: use study.cut_at=null"
        )
    if not has_ended and cut_at is None and not rollouts[0].is_exact:
        raise ConfigError(
            f"{path} has no column ended, and study.cut_at=null: the score of a completion depends "
            "on whether it wrote its end token. Set study.cut_at to the length in tokens at which "
            "completions were cut (TRL's max_completion_length, e.g. study.cut_at=256), or add the "
            "column"
        )
    return rollouts


def _check_template(policy: Policy, config: MseConfig) -> None:
    """Raise an error if the model has no chat template to format conversations."""
    if policy.tokenizer.chat_template is None:
        raise ConfigError(
            f"{config.pool}: prompts are conversations, but {config.model.name} has no chat "
            "template: score them with the model that read them, or log the prompts as the texts "
            "that it read"
        )
    warn_of_options(config.prompt, policy.tokenizer)


def _prompt_text(rollout: Rollout, policy: Policy, config: MseConfig) -> str:
    """Return the text that the model read before it wrote its answer.

    This is the prompt or, for a conversation, the messages formatted with the chat template.
    """
    if isinstance(rollout.prompt, str):
        return rollout.prompt
    place = f"{config.pool} {rollout.place}: prompt"
    template = f"the chat template of {config.model.name}"
    fix = "log the prompt as the text that the model read"
    try:
        text = in_chat_format(
            policy.tokenizer, rollout.prompt, config.prompt.template_options or {}, None
        )
    except ValueError as error:
        reason = single_line(error, 200)
        raise ConfigError(f"{place} is refused by {template} ({reason}): {fix}") from error
    for message in rollout.prompt:
        if message["content"].strip() not in text:
            raise ConfigError(
                f"{place} has a {message['role']} message that {template} omits: {fix}"
            )
    return text


def _trim_groups(groups: dict[str, list[Rollout]], config: MseConfig) -> dict[str, list[Rollout]]:
    """Return the first `study.questions` prompts, each with the same number of completions.

    The number of completions per prompt is the one that keeps the most completions in total, chosen
    among the numbers that at least half of the prompts reach. Prompts with fewer completions are
    dropped, so that a few small groups do not shorten all other groups. The numbers of dropped
    prompts and completions are printed.
    """
    questions, needed = config.study.questions, MIN_COMPLETIONS
    if config.compares_by_groups:
        needed = max(needed, min(config.dividing_sizes))
    enough = [group for group in groups.values() if len(group) >= needed]
    if not enough:
        shortest = min(groups.values(), key=len)
        smaller = ", or use smaller group_sizes" if needed > MIN_COMPLETIONS else ""
        raise ConfigError(
            f"{config.pool}: {needed} completions per prompt are needed, but none of "
            f"{len(groups)} prompts has that many (the prompt of {shortest[0].place} has "
            f"{len(shortest)}): log more completions per prompt{smaller}"
        )

    def completions(size: int) -> int:
        """Return the number of completions that are kept with `size` completions per prompt."""
        return size * len([group for group in enough if len(group) >= size][:questions])

    median = sorted(map(len, enough), reverse=True)[(len(enough) - 1) // 2]
    size = max(sorted({len(group) for group in enough if len(group) <= median}), key=completions)
    large = {text: group for text, group in groups.items() if len(group) >= size}
    chosen = dict(list(large.items())[:questions])
    if small := [group for group in groups.values() if len(group) < size]:
        _print_on_main(
            f"{config.pool}: {len(small)} prompts with {sum(map(len, small))} completions were "
            f"dropped, because they have fewer than {size} each (e.g. {small[0][0].place})"
        )
    if len(chosen) < len(large):
        _print_on_main(
            f"{config.pool}: {len(chosen)} of {len(large)} prompts are used; see study.questions"
        )
    config.check_questions(len(chosen), size)
    surplus = sum(map(len, chosen.values())) - size * len(chosen)
    if surplus:
        _print_on_main(
            f"{config.pool}: {surplus} completions were dropped to keep {size} per prompt, a "
            "number that at least half of the prompts reach"
        )
    return {text: group[:size] for text, group in chosen.items()}


@dataclass
class Turn:
    """Tokens that the policy read, and tokens that followed in the same sequence."""

    context: list[int]
    completion: list[int]
    # 1 on tokens of the completion that the policy wrote.
    scored: list[int]
    # The sampler's log-probabilities of the completion's tokens; None: not logged.
    logprobs: list[float] | None


def merged_turns(turns: Sequence[Turn]) -> list[Turn]:
    """Merge each turn that continues an earlier turn into one sequence with it.

    A turn continues an earlier turn if its context begins with all tokens of that turn. A causal
    model then computes the same log-probabilities from the joint sequence. The tokens that the
    policy read between the two turns are not scored.
    """
    merged: list[Turn] = []
    for turn in turns:
        for earlier in merged:
            read = earlier.context + earlier.completion
            if turn.context[: len(read)] == read:
                between = turn.context[len(read) :]
                earlier.completion = earlier.completion + between + turn.completion
                earlier.scored = earlier.scored + [0] * len(between) + turn.scored
                if earlier.logprobs is not None and turn.logprobs is not None:
                    earlier.logprobs = earlier.logprobs + [0.0] * len(between) + turn.logprobs
                break
        else:
            merged.append(replace(turn))
    return merged


def _tokenise(
    prompts: list[Prompt], groups: list[list[Rollout]], policy: Policy, config: MseConfig
) -> Rollouts:
    """Tokenise prompts and completions, and add end tokens to completions that ended.

    If the rows have no column `ended`, completions with at least `study.cut_at` tokens count as
    cut. For logged texts, this count can be slightly off, because the policy may have split the
    text into other tokens than the tokeniser does.
    """
    if groups[0][0].is_exact:
        prompt_ids = [group[0].prompt_ids or [] for group in groups]
        _check_vocabulary(groups, policy, config)
    else:
        prompt_ids = policy.encode([prompt.text for prompt in prompts])
    ends = EndTokens(policy, config)
    ended = np.array([[_has_ended(x.turns[-1], ends, config) for x in group] for group in groups])
    turns_PG = [
        [_turns(x, prompt.text, ids, ends, config) for x in group]
        for prompt, ids, group in zip(prompts, prompt_ids, groups, strict=True)
    ]
    lengths = [
        (row.length, len(turn.completion))
        for group, turns_G in zip(groups, turns_PG, strict=True)
        for rollout, turns in zip(group, turns_G, strict=True)
        for row, turn in zip(rollout.turns, turns, strict=True)
    ]
    other_length = sum(logged not in (None, length) for logged, length in lengths)
    if groups[0][0].is_exact:
        turns_PG = [[merged_turns(turns) for turns in group] for group in turns_PG]
    rows = [turn for group in turns_PG for turns in group for turn in turns]
    shortest = min(len(turn.context) for turn in rows)
    longest = max(len(turn.context) + len(turn.completion) for turn in rows)
    if switch := crossed_switch(config.model, shortest, longest):
        raise ConfigError(
            f"{config.pool}: a prompt has {shortest} tokens and a row has {longest}, but at "
            f"original_max_position_embeddings={switch} LongRoPE changes all rows of a batch, so "
            "log-probabilities would depend on the other rows: use rows of at most "
            f"{switch} tokens, or prompts of more than {switch + 1}"
        )
    cut_at = config.study.cut_at
    if cut_at is not None:
        _print_on_main(
            f"{config.pool}: {(~ended).sum()} of {ended.size} completions have at least "
            f"study.cut_at={cut_at} tokens and count as cut; the others count as ended"
        )
    if other_length:
        _print_on_main(
            f"{config.pool}: for {other_length} of {ended.size} completions the number of tokens "
            "differs from the column length, because the text is now tokenised differently"
        )
    if len(lengths) > ended.size:
        _print_on_main(
            f"{config.pool}: {len(lengths)} rows are turns of {ended.size} rollouts; the score of "
            f"a rollout is the sum of the scores of its turns, which are read in {len(rows)} "
            "sequences"
        )
    texts_PG = [
        [x.completion or str(policy.tokenizer.decode(x.completion_ids or [])) for x in group]
        for group in groups
    ]
    return _padded(prompts, prompt_ids, turns_PG, ended, texts_PG)


def _turns(
    rollout: Rollout, prompt: str, prompt_ids: list[int], ends: EndTokens, config: MseConfig
) -> list[Turn]:
    """Tokenise the turns of a rollout.

    Args:
        prompt: Text of the prompt that the rollout's group has in common.
        prompt_ids: Tokens of this prompt, which the policy read before the first turn.
    """
    turns, policy, limit = [], ends.policy, context_length(config.model)
    for row in rollout.turns:
        text, context = prompt, prompt_ids
        if row is not rollout:
            text = "" if row.is_exact else _prompt_text(row, policy, config)
            context = (row.prompt_ids or []) if row.is_exact else policy.encode([text])[0]
        ids, place = _completion(row, text, ends, config), f"{config.pool} {row.place}"
        if not ids or not context:
            empty = "completion" if context else "prompt"
            raise ConfigError(
                f"{place}: the {empty} has no tokens, so it cannot be scored: drop the row"
            )
        if limit is not None and len(context) + len(ids) > limit:
            raise ConfigError(
                f"{place}: a prompt of {len(context)} tokens and a completion of {len(ids)} tokens "
                f"exceed the model's {limit} tokens: use the model that wrote it"
            )
        scored = [1] * len(ids) if row.loss_mask is None else row.loss_mask
        turns.append(Turn(context, ids, scored, row.logprobs))
    if not any(any(turn.scored) for turn in turns):
        raise ConfigError(
            f"{config.pool} {rollout.place}: loss_mask is 0 on every token, so the policy wrote "
            f"none of them: drop the {'rollout' if rollout.later else 'row'}"
        )
    return turns


def _has_ended(row: Rollout, ends: EndTokens, config: MseConfig) -> bool:
    """Return True if the policy ended a completion, False if it was cut."""
    if row.completion_ids is not None:
        by_token = row.completion_ids[-1] in ends.policy.end_tokens
        return by_token if row.ended is None else row.ended
    if config.study.cut_at is None:
        return bool(row.ended)
    (ids,) = encode(ends.policy.tokenizer, [row.completion], special_tokens=False)
    return len(ids) < config.study.cut_at


def _completion(row: Rollout, prompt: str, ends: EndTokens, config: MseConfig) -> list[int]:
    """Return the tokens of a completion, with the end token if it ended."""
    if row.completion_ids is not None:
        return row.completion_ids
    (ids,) = encode(ends.policy.tokenizer, [row.completion], special_tokens=False)
    if _has_ended(row, ends, config):
        place = f"{config.pool} {row.place}"
        ids = ends.closed(ids, prompt, isinstance(row.prompt, list), place)
    return ids


def _padded(
    prompts: list[Prompt],
    prompt_ids: list[list[int]],
    turns_PG: list[list[list[Turn]]],
    ended_PN: np.ndarray,
    texts_PG: list[list[str]],
) -> Rollouts:
    """Collect all completions' tokens in one array, and mark the tokens that the policy wrote.

    The turns of a completion follow each other; see `Rollouts.turn_PGT`. The sampler's
    log-probabilities are added if the log contains them.
    """
    flat = [turns for group in turns_PG for turns in group]
    width = max(sum(len(turn.completion) for turn in turns) for turns in flat)
    tokens, numbers = (np.zeros((len(flat), width), dtype=np.int64) for _ in range(2))
    mask, scored = (np.zeros(tokens.shape, dtype=bool) for _ in range(2))
    logprobs = np.zeros(tokens.shape)
    for i, turns in enumerate(flat):
        start = 0
        for number, turn in enumerate(turns):
            columns = slice(start, start + len(turn.completion))
            tokens[i, columns], mask[i, columns] = turn.completion, True
            numbers[i, columns], scored[i, columns] = number, turn.scored
            logprobs[i, columns] = 0.0 if turn.logprobs is None else turn.logprobs
            start = columns.stop
    shape = (*ended_PN.shape, width)
    has_turns = any(len(turns) > 1 for turns in flat)
    return Rollouts(
        prompts=prompts,
        prompt_tokens=prompt_ids,
        tokens_PGT=tokens.reshape(shape),
        mask_PGT=mask.reshape(shape),
        ended_PG=ended_PN,
        texts_PG=texts_PG,
        logprobs_PGT=None if flat[0][0].logprobs is None else logprobs.reshape(shape),
        scored_PGT=None if (scored == mask).all() else scored.reshape(shape),
        turn_PGT=numbers.reshape(shape) if has_turns else None,
        contexts_PG=[[[turn.context for turn in turns] for turns in group] for group in turns_PG]
        if has_turns
        else None,
    )


def _check_vocabulary(groups: list[list[Rollout]], policy: Policy, config: MseConfig) -> None:
    """Raise an error if a token id is not in the model's vocabulary."""
    size = len(policy.model.get_input_embeddings().weight)  # pyright: ignore[reportArgumentType]
    for rollout in (turn for x in chain.from_iterable(groups) for turn in x.turns):
        largest = max(*(rollout.prompt_ids or [0]), *(rollout.completion_ids or [0]))
        if largest >= size:
            raise ConfigError(
                f"{config.pool} {rollout.place} contains token {largest}, but "
                f"{config.model.name} has only {size} tokens: use the model that wrote the rows"
            )


def check_sampler(policy: Policy, rollouts: Rollouts, config: MseConfig) -> None:
    """Raise an error if the model's log-probabilities are not close to the logged ones.

    Another model or another temperature then wrote the rollouts. With corrections for this
    mismatch, there is no error. At most MAX_CHECKED_COMPLETIONS completions are checked.
    """
    count = rollouts.ended_PG.size
    index = np.unique(np.linspace(0, count - 1, min(MAX_CHECKED_COMPLETIONS, count)).astype(int))
    gap = sampler_gap(policy, rollouts, index, config.temperature)
    if gap <= MAX_LOGPROB_GAP or config.study.corrections:
        _print_on_main(
            f"{config.pool}: log-probabilities are within {gap:.4f} nats per token of the "
            f"sampler's, on average over {len(index)} completions"
        )
        return
    raise ConfigError(
        f"{config.pool}: the log-probabilities of {config.model.name} at "
        f"temperature={config.temperature} differ from the logged ones by {gap:.3f} nats per token "
        f"in {len(index)} completions, but rounding explains at most {MAX_LOGPROB_GAP}: check the "
        "checkpoint, the temperature and the format of the prompts"
    )


class EndTokens:
    """End tokens for completions that were logged as texts.

    If the prompt is plain text, the end token is the tokenizer's end-of-sequence token. If the
    prompt is a conversation, or a text formatted with the chat template, it is the token with which
    the template ends a turn. In some models these tokens differ (Gemma's `<end_of_turn>`, Phi's
    `<|end|>`).

    Args:
        policy: Model that wrote the completions.
    """

    def __init__(self, policy: Policy, config: MseConfig):
        self.policy, self.config = policy, config
        tokenizer, ends = policy.tokenizer, policy.end_tokens
        only = min(ends) if len(ends) == 1 else None
        eos = cast("int | None", tokenizer.eos_token_id)
        self.of_texts = only if eos is None else eos
        self.opening, self.of_turns = "", self.of_texts
        if tokenizer.chat_template is not None:
            self.opening, after = around_answers(tokenizer, config.prompt.template_options or {})
            (ids,) = encode(tokenizer, [after], special_tokens=False)
            written = [token for token in ids if str(tokenizer.decode([token])).strip()]
            if written:
                self.of_turns = written[0] if written[0] in ends else only

    def closed(self, ids: list[int], prompt: str, is_turn: bool, place: str) -> list[int]:
        """Return the tokens of a completion that ended, up to and including its end token.

        If the text contains no end token, one is appended.

        Args:
            ids: Tokens of the text.
            prompt: Text that the model read.
            is_turn: True if the prompt was logged as a conversation.
            place: File and row, for use in error messages.
        """
        for stop in (k + 1 for k, token in enumerate(ids) if token in self.policy.end_tokens):
            if not str(self.policy.tokenizer.decode(ids[stop:], skip_special_tokens=True)).strip():
                # The remaining tokens come from the template or are padding.
                return ids[:stop]
        is_turn = is_turn or bool(self.opening and self.opening in prompt)
        end = self.of_turns if is_turn else self.of_texts
        if end is None:
            names = ", ".join(
                self.policy.tokenizer.convert_ids_to_tokens(sorted(self.policy.end_tokens))
            )
            raise ConfigError(
                f"{place}: the completion ended, but its end token is unknown: "
                f"{self.config.model.name} has the end tokens {names}, and "
                f"{'its chat template' if is_turn else 'its tokenizer'} does not select one of "
                "them; append the end token to each text that ended, or log token ids"
            )
        return [*ids, end]


def _print_on_main(message: str) -> None:
    if is_main():
        tell(message)
