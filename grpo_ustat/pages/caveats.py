"""Caveats on a run's numbers, a sentence each, for its summary and for its terminal."""

from __future__ import annotations

import math

from grpo_ustat.estimators.intervals import Tails, heavy_text
from grpo_ustat.records import ScorePool
from grpo_ustat.terminal.streams import percentage

# The beginning of each warning within a summary.
WARNING = " WARNING: "
# Share of completions from which on a run says at once that they were cut.
OFTEN_CUT_SHARE = 0.1


def summary_and_warnings(summary: str) -> tuple[str, list[str]]:
    """Split a run's summary into the text before its warnings, and each of these.

    >>> summary_and_warnings("Best G is 8. WARNING: few questions. WARNING: heavy tails.")
    ('Best G is 8.', ['WARNING: few questions.', 'WARNING: heavy tails.'])
    """
    first, *warnings = summary.split(WARNING)
    return first, [f"{WARNING.strip()} {warning}" for warning in warnings]


def is_warning(note: str) -> bool:
    """Return True if a note is a warning of `summary_and_warnings`."""
    return note.startswith(WARNING.strip())


def often_cut(clipped_ratio: float) -> bool:
    """Return True if so many completions were cut that a run should say so at once."""
    return clipped_ratio >= OFTEN_CUT_SHARE


def cut_text(clipped_ratio: float, of: str, max_completion_length: int) -> str:
    """Return a sentence on a share of cut completions, with the setting that helps.

    >>> cut_text(0.31, "the first 256", 96).partition(": ")[0][:70]
    '31 % of the first 256 completions were cut at max_completion_length=96'
    """
    return (
        f"{percentage(clipped_ratio)} of {of} completions were cut at max_completion_length="
        f"{max_completion_length} and rarely hold an answer: try max_completion_length="
        f"{2 * max_completion_length}, or set prompt.stop to what ends an answer"
    )


def clipped_warning(of: str, clipped_ratio: float, max_completion_length: int | None) -> str:
    """Return a warning if many completions `of` something were cut: they rarely hold an answer.

    Without a length, they were cut elsewhere.
    """
    if clipped_ratio <= 0.05:
        return ""
    where = f" at max_completion_length={max_completion_length}: raise it"
    if max_completion_length is None:
        where = " where they were made: let them be longer there"
    return (
        f" WARNING: {percentage(clipped_ratio)} of the {of} completions were cut{where}, unless "
        "that is the point."
    )


def unjudged_warning(timeouts: int, failures: int, rollouts: int) -> str:
    """Return a warning if answers could not be judged: they earned nothing, right or wrong."""
    if not timeouts + failures:
        return ""
    return (
        f" WARNING: {timeouts + failures} of {rollouts} answers could not be judged ({timeouts} "
        f"timed out, {failures} failed) and count as wrong."
    )


def heavy_warning(completions: Tails, questions: Tails) -> str:
    """Return a warning if intervals are likely to cover less than 90 %, see `Tails.heavy`.

    Intervals for new questions come first. There is none where no value carries a variance, as
    where all rewards are equal.

    Args:
        completions, questions: the tails over which intervals are, of each kind.
    """
    for tails, units, more in (
        (questions, "questions", "study.questions"),
        (completions, "completions", "budget.pool_completions"),
    ):
        if tails.heavy and math.isfinite(tails.carriers):
            return f" WARNING: {heavy_text(tails, units)}. Raise {more}."
    return ""


def zero_scores_sentence(pool: ScorePool) -> str:
    """Return a sentence on the number of scores that are exactly 0, with a leading space, or ""."""
    zero, count = int((pool.sq_norm_PN == 0).sum()), pool.sq_norm_PN.size
    if not zero:
        return ""
    return (
        f" {zero} of {count} scores are exactly 0: there the model is so certain of every token "
        "that the others' probabilities are lost in rounding; such completions move no weight."
    )


def packages_sentence(packages: dict[str, int], installed: str) -> str:
    """Return a sentence on completions that other versions of the packages scored, or "".

    It says how to have only one version.

    >>> packages_sentence({"torch 2.13.0": 32}, "torch 2.13.0")
    ''

    Args:
        packages: numbers of completions by the versions that scored them.
    """
    other = {name: count for name, count in packages.items() if name != installed}
    if not other:
        return ""
    counts = " and ".join(f"{count} of them with {name}" for name, count in sorted(other.items()))
    return (
        f" The pool's {sum(packages.values())} completions were not all scored with {installed}, "
        f"which is installed, but {counts}: another pool=DIR has one version alone."
    )
