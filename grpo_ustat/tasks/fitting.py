"""The questions of a source whose prompts are not too long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from grpo_ustat.checks import ConfigError
from grpo_ustat.records import Question
from grpo_ustat.tasks.base import Source
from grpo_ustat.tasks.prompts import Prompting


class Fitting:
    """The questions of a source whose prompts have at most `max_length` tokens.

    Args:
        source: of the questions.
        prompting: how they are put.
        lengths: tokens of each text.
        max_length: of a prompt, `prompt.max_length`.
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
        self._kept: dict[str, list[Question]] = {}
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> Counter[str]:
        """What the source dropped, and what was too long of the splits asked for so far."""
        return Counter(getattr(self._source, "counts", {})) + self._counts

    def questions(self, split: str) -> list[Question]:
        """See `Source.questions`.

        Raises:
            ConfigError: none is left.
        """
        if split not in self._kept:
            self._kept[split] = self._fitting(split)
        return list(self._kept[split])

    def _fitting(self, split: str) -> list[Question]:
        every = self._source.questions(split)
        lengths = self._lengths([self._prompting.prompt(question).text for question in every])
        kept = [q for q, length in zip(every, lengths, strict=True) if length <= self._most]
        if every and not kept:
            raise ConfigError(
                f"prompt.max_length={self._most} leaves out all {len(every)} {split} questions, "
                f"whose prompts have {min(lengths)} to {max(lengths)} tokens: raise it, or use null"
            )
        told = f"{split} questions whose prompts exceed prompt.max_length={self._most} tokens"
        self._counts[told] = len(every) - len(kept)
        return kept
