"""Splits train, test, study and examples, made from the training and test rows of a data set."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.records import Prompt, Question

Item = TypeVar("Item", Question, Prompt)


def question_id(prefix: str, text: str, *, verbatim: bool = False) -> str:
    """Return a stable id for a question.

    By default, questions that differ only in white space, or in letter case outside formulas, have
    the same id. If `verbatim` is True, questions that differ in white space have different ids, but
    these ids have the same prefix; see `family`.

    >>> question_id("x", "How  many?") == question_id("x", "how many? ") != question_id("x", "?")
    True
    >>> question_id("x", "Solve $X=1$") == question_id("x", "solve $x=1$")
    False
    >>> name = question_id("x", "A: ", verbatim=True)
    >>> name != question_id("x", "A:", verbatim=True) == question_id("x", "A:") == family(name)
    True
    """
    plain = " ".join(text.split())
    parts = plain.split("$")
    parts[::2] = [part.casefold() for part in parts[::2]]
    name = f"{prefix}-{_digest('$'.join(parts), 6)}"
    return f"{name}-{_digest(text, 6)}" if verbatim and text != plain else name


def family(name: str) -> str:
    """Return the prefix of an id, which is the same for questions that differ in white space."""
    return "-".join(name.split("-")[:2])


class Splits:
    """Source with disjoint splits; questions that differ only in white space count as the same.

    The test split comes from the test rows. The training rows are shuffled with `seed`, and the
    first of them form the study split. The examples are drawn from the remaining training rows with
    `examples_seed`, and the rest is the train split. A shuffle sorts questions by a hash of the
    question and the seed, so the order of two questions does not depend on the other questions.

    Args:
        train, test: questions from the training rows and from the test rows.
        sizes: number of questions in `train`, `test`, `study` and `examples`; None for all
            remaining questions.
        seed: seed of the shuffles; it is separate from the seed of the run.
        examples_seed: seed with which the examples are drawn.
        barred: ids that must not be in the train, study and examples splits. Test questions are
            excluded in any case.
        counts: number of rows that the caller has already dropped, by reason.
    """

    def __init__(
        self,
        train: list[Question],
        test: list[Question],
        sizes: Mapping[str, int | None],
        seed: int,
        examples_seed: int = 0,
        barred: Iterable[str] = (),
        counts: Mapping[str, int] = {},
    ):
        # Number of dropped rows by reason, including rows that the caller dropped.
        self.counts = Counter(counts)
        clean = self._without(train, [*barred, *(q.id for q in test)], "test questions")
        tests = in_random_order(self._once(test, "test"), f"test/{seed}")
        rest = in_random_order(self._once(clean, "train"), f"train/{seed}")
        study = _first(rest, sizes["study"], "dataset.study_size")
        rest = self._without(rest[len(study) :], [q.id for q in study], "study questions")
        shuffled = in_random_order(rest, f"examples/{examples_seed}")
        examples = _first(shuffled, sizes["examples"], "prompt.shots")
        solved = {question.id for question in examples}
        remaining = [question for question in rest if question.id not in solved]
        remaining = self._without(remaining, solved, "examples")
        self._splits = {
            "train": _first(remaining, sizes["train"], "dataset.train_size"),
            "test": _first(tests, sizes["test"], "dataset.test_size"),
            "study": study,
            "examples": examples,
        }

    def questions(self, split: str) -> list[Question]:
        """Return the split's questions in a fixed order."""
        return list(self._splits[split])

    def _without(
        self, questions: list[Question], others: Iterable[str], reason: str
    ) -> list[Question]:
        """Return the questions whose id prefix (`family`) differs from the prefixes of `others`.

        The removed questions are counted with the reason.
        """
        barred = set(map(family, others))
        left = [question for question in questions if family(question.id) not in barred]
        self.counts[f"train questions that are also {reason}"] += len(questions) - len(left)
        return left

    def _once(self, questions: list[Question], rows: str) -> list[Question]:
        """Return the first question with each id, and count the repetitions."""
        first_by_id: dict[str, Question] = {}
        for question in questions:
            first_by_id.setdefault(question.id, question)
        self.counts[f"repeated {rows} questions"] += len(questions) - len(first_by_id)
        return list(first_by_id.values())


def hold_out(
    questions: list[Question], count: int, seed: int
) -> tuple[list[Question], list[Question]]:
    """Draw `count` distinct questions; return the questions that remain, and the drawn ones."""
    shuffled = in_random_order(
        list({q.id: q for q in questions[::-1]}.values()), f"held out/{seed}"
    )
    held = {question.id for question in shuffled[:count]}
    return [q for q in questions if q.id not in held], shuffled[:count]


def in_random_order(questions: Sequence[Item], seed: str) -> list[Item]:
    """Sort questions by a hash of their families, so that questions of a family are adjacent."""
    return sorted(questions, key=lambda q: (_digest(f"{seed}/{family(q.id)}", 8), q.id))


def _first(questions: list[Question], count: int | None, key: str) -> list[Question]:
    if count is not None and count > len(questions):
        raise ConfigError(
            f"{key}={count}, but only {len(questions)} different questions are left: "
            + ("use fewer" if questions else "add questions, or lower test_size")
        )
    return questions[:count]


def _digest(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()
