"""The class `Task`: questions, a prompt format, and a judge that rewards completions."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Protocol

import numpy as np

from grpo_ustat.config.parts import TaskOptions
from grpo_ustat.config.reward_funcs import TASK
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.distributed.ranks import is_main
from grpo_ustat.estimators.baselines import weighted_sum
from grpo_ustat.records import MAX_REWARD, Array, Prompt, Question, Rollouts
from grpo_ustat.tasks.answers import after_thoughts, final_number, stated
from grpo_ustat.tasks.prompts import Prompting
from grpo_ustat.terminal.console import warn
from grpo_ustat.terminal.streams import tell

# Two consecutive words.
WORDS = re.compile(r"[^\W\d_]{2,}\s+[^\W\d_]{2,}")
# Prompt formats that a warning suggests for questions in words, by kind of data set.
PROMPTS = {
    "gsm8k": "prompt=gsm8k, or prompt=gsm8k_chat for a chat model",
    "math": "prompt=qwen_math_cot, or prompt=chat_boxed for a chat model",
    "jsonl": "prompt=as_is, or prompt=chat for a chat model",
}


class Source(Protocol):
    """Data set with the questions of each split.

    A source can define two optional attributes, which are printed once per run. `counts` has the
    number of questions that were dropped, keyed by reason. `note` is a remark about the questions.
    """

    def questions(self, split: str) -> list[Question]:
        """Return the questions of `train`, `test`, `study` or `examples`, in a fixed order.

        The splits are disjoint. `study` is for measurements, and `examples` are shown with their
        solutions in prompts.
        """
        ...


class Judge(Protocol):
    """Judge that extracts the answers of completions and rewards them."""

    # Numbers of completions so far that were not judged, with the keys `timeouts` and `failures`.
    counts: Counter[str]

    def extract(self, completion: str) -> str | None:
        """Return the final answer stated in a completion, or None if there is none."""
        ...

    def rewards(self, prompts: list[Prompt], completions: list[str]) -> list[float]:
        """Return the reward of each completion; rewards are finite."""
        ...


def spoken(prompts: list[Prompt], completions: list[str]) -> list[str]:
    """Return the part of each completion after its thoughts (reasoning); see `after_thoughts`."""
    pairs = zip(prompts, completions, strict=True)
    return [after_thoughts(text, prompt.text) for prompt, text in pairs]


class NumberJudge:
    """Judge that rewards the correct final number with 1 and anything else with 0.

    `final_number` extracts the number.
    """

    def __init__(self):
        self.counts: Counter[str] = Counter()

    def extract(self, completion: str) -> str | None:
        """Return the final number formatted by `plain`, or None if there is none."""
        return stated(completion, any_unit=True)

    def rewards(self, prompts: list[Prompt], completions: list[str]) -> list[float]:
        """Return 1 for each correct completion and 0 for every other completion."""
        return [
            float(final_number(text, any_unit=True) == Decimal(prompt.answer))
            for prompt, text in zip(prompts, spoken(prompts, completions), strict=True)
        ]


class Task:
    """Questions, a prompt format, and a judge of completions.

    Args:
        reward_funcs: additional reward functions by name; each maps rollouts to an array [P, G].
        reward_weights: weights of the total reward, which is a weighted sum. The first weight is
            for the judge's reward, and the others are for the additional functions. If empty, every
            weight is 1.
    """

    def __init__(
        self,
        source: Source,
        prompting: Prompting,
        judge: Judge,
        reward_funcs: Mapping[str, Callable[[Rollouts], Array]] | None = None,
        reward_weights: Sequence[float] = (),
    ):
        self._source, self._prompting, self._judge = source, prompting, judge
        self.reward_funcs = dict(reward_funcs or {})
        self.reward_weights_F = np.array(reward_weights or [1.0] * (1 + len(self.reward_funcs)))

    def questions(self, split: str) -> list[Question]:
        """Return the questions of a split; see `Source.questions`."""
        return self._source.questions(split)

    def prompts(self, split: str) -> list[Prompt]:
        """Return the prompts of `train`, `test` or `study`, in a fixed order."""
        return [self._prompting.prompt(question) for question in self.questions(split)]

    def extract(self, completion: str) -> str | None:
        """Return the final answer stated in a completion, or None if there is none."""
        return self._judge.extract(completion)

    def rewards(self, prompts: list[Prompt], completions: list[str]) -> list[float]:
        """Return the judge's reward of each completion."""
        return self._judge.rewards(prompts, completions)

    def take_counts(self) -> dict[str, int]:
        """Return how many completions could not be judged since the last call of this method.

        The keys are `timeouts` and `failures`. The result is empty for a judge that cannot fail.
        """
        counts = dict(self._judge.counts)
        self._judge.counts.update({name: -count for name, count in counts.items()})
        return counts

    @property
    def dropped(self) -> dict[str, int]:
        """Number of questions that the source dropped, keyed by reason; zero counts are omitted."""
        counts = getattr(self._source, "counts", {})
        return {reason: count for reason, count in counts.items() if count}

    @property
    def note(self) -> str:
        """The source's remark about its questions; empty if there is none."""
        return getattr(self._source, "note", "")


def tell_dropped(task: Task) -> None:
    """On rank 0, print the data set's note and the number of dropped questions by reason."""
    if task.note and is_main():
        tell(f"note: {task.note}", file=sys.stderr)
    reasons = ", ".join(f"{count} {reason}" for reason, count in task.dropped.items())
    if reasons and is_main():
        tell(f"note: questions left out: {reasons}", file=sys.stderr)


def warn_of_prompt(options: TaskOptions, prompts: Sequence[Prompt]) -> None:
    """Warn on rank 0 if most prompts append "=" to a question that is written in words."""
    ended = [
        prompt
        for prompt in prompts
        if prompt.text.rstrip().endswith("=")
        and not prompt.question.rstrip().endswith("=")
        and WORDS.search(prompt.question)
    ]
    if 2 * len(ended) <= len(prompts) or not is_main():
        return
    dataset = options.dataset
    warn(
        f"prompt={options.prompt.name} ends questions with '=', which suits only arithmetic; for "
        f"{dataset.name} use {PROMPTS.get(dataset.kind, PROMPTS['jsonl'])}"
    )


def rewards(task: Task, rollouts: Rollouts) -> Array:
    """Compute each completion's reward under each reward function, [P, G, F], float64.

    Index 0 of the last axis contains the rewards of the task's judge.

    Raises:
        FloatingPointError: a reward is not finite, or its absolute value exceeds `MAX_REWARD`. The
            message names the prompt and the function.
    """
    texts = [text for texts in rollouts.texts_PG for text in texts]
    prompts = [p for p, of_p in zip(rollouts.prompts, rollouts.texts_PG, strict=True) for _ in of_p]
    own_PG = np.array(task.rewards(prompts, texts)).reshape(len(rollouts.prompts), -1)
    further = [function(rollouts) for function in task.reward_funcs.values()]
    rewards_PGF = np.stack([own_PG, *further], axis=-1).astype(np.float64)
    for p, i, f in np.argwhere(~(np.abs(rewards_PGF) <= MAX_REWARD)):
        by = f" by {[TASK, *task.reward_funcs][f]}" if further else ""
        raise FloatingPointError(
            f"the reward of completion {i} of prompt {rollouts.prompts[p].id}{by} is "
            f"{rewards_PGF[p, i, f]}: a reward must be finite, with an absolute "
            f"value of at most {MAX_REWARD:g}"
        )
    return rewards_PGF


def summed_rewards(task: Task, rollouts: Rollouts) -> Array:
    """Return the weighted sum of `rewards`, [P, G]; baselines and errors are computed from it."""
    return weighted_sum(rewards(task, rollouts), task.reward_weights_F)


def answered(reader: Judge | Task, rollouts: Rollouts) -> np.ndarray:
    """Return a bool array [P, G]: True for completions that state an answer, right or wrong."""
    pairs = zip(rollouts.prompts, rollouts.texts_PG, strict=True)
    return np.array(
        [[extracted(reader, prompt, text) is not None for text in texts] for prompt, texts in pairs]
    )


def extracted(reader: Judge | Task, prompt: Prompt, completion: str) -> str | None:
    """Return the final answer stated in a prompt's completion, or None if there is none.

    Unfinished thoughts do not count as an answer, even if they began in the prompt.
    """
    unanswered = completion and not after_thoughts(completion, prompt.text)
    return None if unanswered else reader.extract(completion)


class Fitting:
    """Source restricted to questions whose prompts have at most `max_length` tokens.

    Args:
        source: data set whose questions are restricted.
        prompting: format of the prompts whose lengths are counted.
        lengths: function that returns the number of tokens of each text.
        max_length: maximum length of a prompt in tokens, `prompt.max_length`.
    """

    def __init__(
        self,
        source: Source,
        prompting: Prompting,
        lengths: Callable[[list[str]], list[int]],
        max_length: int,
    ):
        self._source, self._prompting = source, prompting
        self._lengths, self._most = lengths, max_length
        self._fitting_by_split: dict[str, list[Question]] = {}
        self._counts: Counter[str] = Counter()
        self.note = getattr(source, "note", "")

    @property
    def counts(self) -> Counter[str]:
        """Number of dropped questions by reason; long prompts count once their split was read."""
        return Counter(getattr(self._source, "counts", {})) + self._counts

    def questions(self, split: str) -> list[Question]:
        """Return the questions of a split whose prompts fit; see `Source.questions`."""
        if split not in self._fitting_by_split:
            questions, most = self._source.questions(split), self._most
            lengths = self._lengths(
                [self._prompting.prompt(question).text for question in questions]
            )
            fitting = [q for q, length in zip(questions, lengths, strict=True) if length <= most]
            if questions and not fitting:
                raise ConfigError(
                    f"prompt.max_length={most} excludes all {len(questions)} {split} questions, "
                    f"whose prompts have {min(lengths)} to {max(lengths)} tokens: raise the limit, "
                    "or set it to null"
                )
            reason = f"{split} questions whose prompts exceed prompt.max_length={most} tokens"
            self._counts[reason] = len(questions) - len(fitting)
            self._fitting_by_split[split] = fitting
        return list(self._fitting_by_split[split])
