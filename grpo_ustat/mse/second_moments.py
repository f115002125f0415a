r"""Estimate AdamW's second moments v from a pool, for steps of n rollouts in groups of G.

AdamW averages the squared gradient over steps; v is the limit of this average at a fixed policy. A
step's gradient estimate ghat is the mean of B = n/G leave-one-out gradients u. Each u is computed
from a group of G completions for a different prompt. For each entry j,

    v_j = E ghat_j^2 = (grad J)_j^2 + Var ghat_j = E u_j^2 / B + (1 - 1/B) (grad J)_j^2
    n Var ghat_j = G Var u_j = G C1_j + C2_j + C3_j/(G-1)

The variance between prompts, G C1_j, grows with G, while C2_j does not depend on G. Therefore v
depends on both n and G.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from grpo_ustat.estimators.intervals import Interval

Entries = dict[str, torch.Tensor]
# Second moments are shrunk towards their mean; this weight of the mean is in questions. See
# `GroupGradients.second_moments`.
PRIOR_QUESTIONS = 1.0
# Another weight, to see how much the result depends on this choice; see `shift`.
OTHER_PRIOR_QUESTIONS = 1 / 3
# Largest tolerated dependence on this choice; see `is_uncertain`.
MAX_SHIFT, MAX_INTERVAL_SHARE = 0.2, 0.3


@dataclass
class GroupGradients:
    """Sums over questions x of the gradients u_xk of disjoint groups k, by parameter name.

    To save memory, the gradients of individual questions are not stored.
    """

    # Number of groups per question, K >= 2.
    groups: int
    # Number of questions added so far, m.
    questions: int = 0
    # Sums over questions of mean_k u_xk^2, mean_k u_xk and (mean_k u_xk)^2.
    squares: Entries = field(default_factory=dict)
    means: Entries = field(default_factory=dict)
    squared_means: Entries = field(default_factory=dict)

    def add(self, gradients: Iterable[Mapping[str, torch.Tensor]]) -> None:
        """Add a question, given the gradients of those groups in which rewards differ.

        In all other groups the gradient is 0.
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
        """Return unbiased estimates of (grad J)_j^2, C1_j and the variance of u_j given the prompt.

        Each estimate is a tensor over all entries j of the parameter. The variance given the prompt
        is C2_j/G + C3_j/(G (G-1)).

        Groups share no completions, and groups of the same question have the same expected gradient
        g. So the product of the mean gradients of two questions has the expectation (grad J)_j^2.
        The product of the gradients of two groups of the same question has the conditional
        expectation g_j^2.
        """
        m, k = self.questions, self.groups
        squares, squared_means = self.squares[name], self.squared_means[name]
        grad_sq = (self.means[name].square() - squared_means) / (m * (m - 1))
        given_prompt = (squares - squared_means) * k / (k - 1) / m
        return grad_sq, squares / m - given_prompt - grad_sq, given_prompt

    def second_moments(
        self, name: str, prompts: int, prior: float = PRIOR_QUESTIONS
    ) -> torch.Tensor:
        """Estimate v for all entries of a parameter, for steps with B = `prompts` groups.

        Two modifications make the estimate slightly biased. A negative estimate of (grad J)_j^2 is
        replaced by 0, and v_j is shrunk towards the mean over the parameter's entries, which counts
        as much as `prior` questions. The shrinkage is needed because an entry may have almost no
        gradient in these questions (for example the entry of a token that was never sampled) and
        therefore almost no second moment. A few completions of other questions would then dominate
        the error. AdamW does not have this problem, because it adds the current gradient to v
        before the step.
        """
        grad_sq = self.parts(name)[0].clamp(min=0)
        v = self.squares[name] / self.questions / prompts + (1 - 1 / prompts) * grad_sq
        return (self.questions * v + prior * v.mean()) / (self.questions + prior)


def _add(sums: Entries, name: str, value: torch.Tensor) -> None:
    sums[name] = sums[name] + value if name in sums else value


def shift(halves: Sequence[GroupGradients], prompts: int) -> float:
    """Return the change in log(G* - 1) when the weight of the shrinkage of v is reduced to a third.

    The weight of the shrinkage is an arbitrary choice, so v is known well enough only if the result
    hardly depends on it. G* - 1 = sqrt(C3/C1) is approximated, up to a constant factor, by the
    square root of W/C1, where W is the variance of u given the prompt. On each half of the
    questions, W and C1 are computed with the v of the other half. The result is NaN if an estimate
    of W or C1 is not positive.

    Args:
        halves: Group gradients of the two halves of the questions.
        prompts: Number of prompts per step, B.
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
    """Return True if the interval of G* for AdamW's step is likely to cover less than 90 %.

    If the lower end of the interval of G* is not above 1, the result is False. Otherwise it is True
    if `moved`, the result of `shift`, is NaN, if its absolute value exceeds 0.2, or if it exceeds
    0.3 times the distance between the estimate of log(G* - 1) and the lower end of its interval.

    The limits 0.2 and 0.3 were chosen by simulation with `scripts/benchmarks/error_rates.py adam`
    (10 policies, four sizes, 200 studies per case). In cases in which the interval covers less than
    87 %, the result is True in 84 % of studies (at least 65 % in each case). In cases in which it
    covers at least 90 %, the result is True in 33 % of studies. A false alarm is possible because v
    may be uncertain but nearly the same for all entries, and then G* is known well.
    """
    if not best.low > 1:
        return False
    share = MAX_INTERVAL_SHARE * math.log((best.estimate - 1) / (best.low - 1))
    return not abs(moved) <= (min(MAX_SHIFT, share) if math.isfinite(share) else MAX_SHIFT)


def uncertain_text(moved: float, best: Interval) -> str:
    """Return a space and a warning if `is_uncertain`; otherwise return ""."""
    if not is_uncertain(moved, best):
        return ""
    by = f" by {math.expm1(moved):+.0%}" if math.isfinite(moved) else ""
    return (
        " WARNING: these questions do not determine AdamW's second moments well enough: an "
        f"arbitrary choice (the weight of a shrinkage) changes G* - 1{by}. The interval of G* does "
        "not include this uncertainty; raise study.questions."
    )
