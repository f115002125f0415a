r"""Limit v of AdamW's second moments in a run of n rollouts in groups of G, from a pool.

A step's gradient ghat is the mean of B = n/G leave-one-out gradients u, each of a group of G
completions of a prompt of its own. Entry by entry

    v_j = E ghat_j^2 = (grad J)_j^2 + Var ghat_j = E u_j^2 / B + (1 - 1/B) (grad J)_j^2
    n Var ghat_j = G Var u_j = G C1_j + C2_j + C3_j/(G-1)

What prompts add, G C1_j, grows with G and is not in proportion to the noise of one rollout: v is of
one n and one G.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from grpo_ustat.estimators.intervals import Interval

Entries = dict[str, torch.Tensor]
# See `GroupGradients.second_moments`.
PRIOR_QUESTIONS = 1.0
# See `shift`.
OTHER_PRIOR_QUESTIONS = 1 / 3
# See `is_uncertain`.
MAX_SHIFT, MAX_INTERVAL_SHARE = 0.2, 0.3


@dataclass
class GroupGradients:
    """Sums over questions of the gradients u_xk of their disjoint groups, by parameter name.

    No question's own gradients are kept.
    """

    # K >= 2, of each question.
    groups: int
    # m, so far.
    questions: int = 0
    # Sums over questions of mean_k u_xk^2, of mean_k u_xk and of (mean_k u_xk)^2.
    squares: Entries = field(default_factory=dict)
    means: Entries = field(default_factory=dict)
    squared_means: Entries = field(default_factory=dict)

    def add(self, gradients: Iterable[Mapping[str, torch.Tensor]]) -> None:
        """Add a question by the gradients of its groups with rewards that differ.

        The gradients of the others are 0.
        """
        self.questions += 1
        mean: Entries = {}
        for gradient in gradients:
            for name, u in gradient.items():
                _add(self.squares, name, u.square() / self.groups)
                _add(mean, name, u / self.groups)
        for name, u in mean.items():
            _add(self.means, name, u)
            _add(self.squared_means, name, u.square())

    def parts(self, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Estimate (grad J)_j^2, C1_j and the variance of u_j given the prompt, without bias.

        Estimates are of a parameter's entries; the variance is C2_j/G + C3_j/(G (G-1)).

        The groups of a question share its gradient g and no completion, those of different
        questions neither: products of different questions' means have the mean (grad J)_j^2, those
        of two groups of a question g_j^2.
        """
        m, k = self.questions, self.groups
        squares, squared_means = self.squares[name], self.squared_means[name]
        grad_sq = (self.means[name].square() - squared_means) / (m * (m - 1))
        given_prompt = (squares - squared_means) * k / (k - 1) / m
        return grad_sq, squares / m - given_prompt - grad_sq, given_prompt

    def second_moments(
        self, name: str, prompts: int, prior: float = PRIOR_QUESTIONS
    ) -> torch.Tensor:
        """Estimate v of a parameter's entries, for steps of B = `prompts` groups.

        Unbiased except for two things: an estimate of (grad J)_j^2 below 0 counts as 0, and v_j is
        moved towards the parameter's mean with the weight of `prior` questions. Without that, an
        entry that these questions hardly moved, as of a token that they did not sample, would count
        as one that AdamW knows to be still, and a few completions of other questions would be all
        of the error. AdamW itself takes the present gradient into v first.
        """
        grad_sq = self.parts(name)[0].clamp(min=0)
        v = self.squares[name] / self.questions / prompts + (1 - 1 / prompts) * grad_sq
        return (self.questions * v + prior * v.mean()) / (self.questions + prior)


def _add(sums: Entries, name: str, value: torch.Tensor) -> None:
    sums[name] = sums[name] + value if name in sums else value


def shift(halves: Sequence[GroupGradients], prompts: int) -> float:
    """Compute the growth of log(G* - 1) if a parameter's mean has a third of its weight in v.

    That weight is a convention: v is known well enough where nothing depends on it. G* - 1 =
    sqrt(C3/C1) is taken in proportion to the root of the variance of u given the prompt over C1;
    both are of one half in the metric of the other. NaN where C1 has no estimate above 0.

    Args:
        halves: gradients of two halves of the questions.
        prompts: B, of the steps.
    """
    logs: list[float] = []
    for prior in (PRIOR_QUESTIONS, OTHER_PRIOR_QUESTIONS):
        c1 = given_prompt = 0.0
        for half, other in (halves, halves[::-1]):
            for name in half.squares:
                v = other.second_moments(name, prompts, prior)
                weight = torch.where(v > 0, 1 / v, 0)
                _, between, within = half.parts(name)
                c1 += (between * weight).sum(dtype=torch.float64).item()
                given_prompt += (within * weight).sum(dtype=torch.float64).item()
        logs.append(math.log(given_prompt / c1) / 2 if c1 > 0 and given_prompt > 0 else math.nan)
    return logs[1] - logs[0]


def is_uncertain(moved: float, best: Interval) -> bool:
    """Return True if G*'s interval is likely to cover the G* of AdamW's step in less than 90 %.

    It is where `moved`, the `shift`, is above 0.2 or not a number, or above 0.3 of the distance of
    the estimate of log(G* - 1) from its lower end. The limits were chosen by simulation; in
    `scripts/benchmarks/error_rates.py adam` (10 policies, four sizes, 200 studies a case) it is
    True in 84 % of the studies of cases where coverage is below 87 %, at least 65 % in each, and in
    33 % where it is 90 % or more: v may be known badly and G* well, where all entries have the
    same.
    """
    if not best.low > 1:
        return False
    share = MAX_INTERVAL_SHARE * math.log((best.estimate - 1) / (best.low - 1))
    return not abs(moved) <= (min(MAX_SHIFT, share) if math.isfinite(share) else MAX_SHIFT)


def uncertain_text(moved: float, best: Interval) -> str:
    """Return a warning where `is_uncertain`, with a space before it, else ""."""
    if not is_uncertain(moved, best):
        return ""
    by = f" by {math.expm1(moved):+.0%}" if math.isfinite(moved) else ""
    return (
        " WARNING: AdamW's second moments are not known well enough from these questions: a choice "
        f"that should not matter changes G* - 1{by}, which its interval does not include; raise "
        "study.questions."
    )
