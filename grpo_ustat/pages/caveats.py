"""Caveats on a run's numbers for its summary and the terminal, each in one sentence."""

from __future__ import annotations

import math

from grpo_ustat.estimators.intervals import Tails, heavy_text
from grpo_ustat.records import ScorePool
from grpo_ustat.terminal.streams import percentage

# Text with which each warning in a summary begins.
WARNING = " WARNING: "
# If at least this share of completions was cut at the length limit, a run reports it at once.
OFTEN_CUT_SHARE = 0.1


def summary_and_warnings(summary: str) -> tuple[str, list[str]]:
    """Split a run's summary into the text before the warnings and a list of the warnings.

    >>> summary_and_warnings("Best G is 8. WARNING: few questions. WARNING: heavy tails.")
    ('Best G is 8.', ['WARNING: few questions.', 'WARNING: heavy tails.'])
    """
    first, *warnings = summary.split(WARNING)
    return first, [f"{WARNING.strip()} {warning}" for warning in warnings]


def is_warning(note: str) -> bool:
    """Return True if a note is one of the warnings that `summary_and_warnings` returns."""
    return note.startswith(WARNING.strip())


def often_cut(clipped_ratio: float) -> bool:
    """Return True if so many completions were cut that a run should report it at once."""
    return clipped_ratio >= OFTEN_CUT_SHARE


def cut_text(clipped_ratio: float, of: str, max_completion_length: int) -> str:
    """Return text with the share of cut completions and the settings to change.

    >>> cut_text(0.31, "the first 256", 96).partition(": ")[0][:70]
    '31 % of the first 256 completions were cut at max_completion_length=96'
    """
    return (
        f"{percentage(clipped_ratio)} of {of} completions were cut at max_completion_length="
        f"{max_completion_length} and rarely contain an answer: try max_completion_length="
        f"{2 * max_completion_length}, or set prompt.stop to the text that ends an answer"
    )


def clipped_warning(of: str, clipped_ratio: float, max_completion_length: int | None) -> str:
    """Return a warning if many completions were cut, because they rarely contain an answer.

    Args:
        of: Words that say which completions were counted, placed before the word "completions".
        max_completion_length: Number of tokens at which completions were cut; None if another
            program cut them.
    """
    if clipped_ratio <= 0.05:
        return ""
    where = f" at max_completion_length={max_completion_length}: raise this limit"
    if max_completion_length is None:
        where = " by the program that generated them: raise its length limit"
    return (
        f" WARNING: {percentage(clipped_ratio)} of the {of} completions were cut{where}, unless "
        "this is intended."
    )


def unjudged_warning(timeouts: int, failures: int, rollouts: int) -> str:
    """Return a warning if answers could not be judged; such answers have reward 0."""
    if not timeouts + failures:
        return ""
    return (
        f" WARNING: {timeouts + failures} of {rollouts} answers could not be judged ({timeouts} "
        f"timed out, {failures} failed) and count as wrong."
    )


def heavy_warning(tails: Tails, stops: bool = False) -> str:
    """Return a warning if 95 % intervals probably cover less than 90 %; see `Tails.heavy`.

    If the variance is 0, for example because all rewards are equal, there is no warning.

    Args:
        tails: Tails of the distribution of values over questions.
        stops: True if the study stopped when the data decided.
    """
    if not (tails.heavy and math.isfinite(tails.carriers)):
        return ""
    fix = "Raise study.questions"
    if stops:
        # Simulated studies that stop include heavy tails; see docs/benchmarks.md.
        fix = (
            "The recommended G is not affected; if you need the other intervals, use "
            "study.until=null"
        )
    return f" WARNING: {heavy_text(tails, 'questions')}. {fix}."


def zero_scores_sentence(pool: ScorePool) -> str:
    """Return a space and a sentence with the number of scores that are exactly 0; "" if it is 0."""
    zero, count = int((pool.sq_norm_PN == 0).sum()), pool.sq_norm_PN.size
    if not zero:
        return ""
    return (
        f" {zero} of {count} scores are exactly 0: for these completions the probability of every "
        "token rounds to 1, so they do not change the weights."
    )


def packages_sentence(packages: dict[str, int], installed: str) -> str:
    """Return a sentence on completions that other package versions scored; "" if there are none.

    The sentence also says how to get a pool that was scored with one set of versions.

    >>> packages_sentence({"torch 2.13.0": 32}, "torch 2.13.0")
    ''

    Args:
        packages: Number of completions scored with each set of package versions.
    """
    other = {name: count for name, count in packages.items() if name != installed}
    if not other:
        return ""
    counts = " and ".join(f"{count} with {name}" for name, count in sorted(other.items()))
    return (
        f" The pool's {sum(packages.values())} completions were not all scored with the installed "
        f"{installed}, but {counts}: use a new pool=DIR for a single version."
    )
