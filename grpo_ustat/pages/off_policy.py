"""Rollouts that another policy wrote, its distance and their worth: words and tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.pages.losses import loss_details, losses_sentences, losses_tables
from grpo_ustat.pages.tables import Table
from grpo_ustat.runs.contents import row_interval

DRIFT_NOTE = (
    "Effective share: (sum of weights)^2 over the sum of their squares, as a share of their number."
)


def off_policy_sentences(result: Mapping[str, Any]) -> list[str]:
    """Return sentences on the distance of the policy from the writer of the rollouts, and on worth.

    Worth is that of a rollout of each loss. There are none where nothing was asked.

    Args:
        result: content of the study's `result.json`.
    """
    found = result.get("off_policy")
    if found is None:
        return []
    drift = []
    if found["question"] != "penalty":
        kl, tokens, completions = (
            row_interval(found, key) for key in ("kl", "effective_tokens", "effective_completions")
        )
        drift = [
            f"{found['policy']} is {kl.estimate:.2g} [{kl.low:.2g}, {kl.high:.2g}] nats a token "
            f"from {found['written_by']}: weighted by their ratios tokens count as "
            f"{share_text(tokens)} of as many, completions by the products of theirs as "
            f"{share_text(completions)}."
        ]
    return drift + losses_sentences(found, _wrote(found), _compared(found))


def off_policy_tables(result: Mapping[str, Any]) -> list[Table]:
    """Return tables of the worth of rollouts that another policy wrote, in short and in full.

    There are none where nothing was asked.
    """
    found = result.get("off_policy")
    if found is None:
        return []
    arguments = found, _wrote(found), _notes(found)
    return [*losses_tables(*arguments), *loss_details(*arguments)]


def share_text(share: Interval) -> str:
    """Format a share with its interval in percent.

    >>> share_text(Interval(0.753, 0.721, 0.7963))
    '75 % [72 %, 80 %]'
    """
    percents = [f"{100 * min(1.0, x):.0f} %" for x in share]
    return f"{percents[0]} [{percents[1]}, {percents[2]}]"


def _wrote(found: Mapping[str, Any]) -> str:
    if found["question"] == "penalty":
        return " with its penalty"
    return f" that {found['written_by']} wrote"


def _compared(found: Mapping[str, Any]) -> str:
    return {
        "lag": f"an unbiased one that {found['policy']} wrote",
        "gap": "one that is weighted by its exact ratio",
        "penalty": "an unbiased one without",
    }[found["question"]]


def _notes(found: Mapping[str, Any]) -> list[str]:
    notes = [
        f"Worth: rollouts of {_compared(found)} that do as much as one of the loss; 95 % intervals "
        "for new questions, paired among losses and G."
    ]
    if found["penalised"]:
        notes.append(
            f"A penalty is from {found['reference']} and part of a loss; what is measured is the "
            "gradient of the reward alone."
        )
    return notes if found["question"] == "penalty" else [*notes, DRIFT_NOTE]
