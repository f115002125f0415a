"""Records that travel between rooms: frozen, every axis named.

Axes: P prompts, G completions of one prompt (its group), N completions of one prompt's pool,
T completion tokens, B rows of a batch, F reward functions. Names carry their axes: `rewards_PG`,
`tokens_PGT`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from numbers import Real
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
# Largest absolute value of a reward: squares and products of larger ones overflow.
MAX_REWARD = 1e50
# Smallest number of questions that gives an interval for new questions.
MIN_QUESTIONS = 4
# Names of a mean of rewards.
ACCURACY, MEAN_REWARD = "accuracy", "mean reward"


def is_number(value: Any, largest: float = math.inf) -> TypeGuard[float]:
    """Return True for a finite real number, at most `largest` in absolute value, that fits a float.

    >>> is_number(1), is_number(10**400), is_number("1"), is_number(1e60, MAX_REWARD)
    (True, False, False, False)
    """
    if not isinstance(value, Real | Decimal):
        return False
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return False
    return math.isfinite(number) and abs(number) <= largest


def joint_quantity(quantities: Iterable[str]) -> str:
    """Return the name that several means of rewards share: an accuracy is a mean reward too.

    >>> joint_quantity(["accuracy"]), joint_quantity(["accuracy", "mean reward"])
    ('accuracy', 'mean reward')
    """
    return ACCURACY if set(quantities) <= {ACCURACY} else MEAN_REWARD


@dataclass(frozen=True)
class Question:
    """One question of a data set."""

    # Stable name that depends only on the question; keys every random draw.
    id: str
    # The question without the prompt around it.
    text: str
    answer: str
    # The sort of question, for counts per kind.
    kind: str
    # A worked solution that ends in the answer, as examples in prompts show it.
    solution: str
    # Further columns of its row, by name.
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False)
    # File and number of its row, for errors; empty if there is none.
    where: str = field(default="", compare=False)


@dataclass(frozen=True)
class Prompt:
    """One question as the policy reads it."""

    # The question's id; `answer`, `kind`, `columns` and `where` are the question's too.
    id: str
    # The rendered prompt.
    text: str
    # The question without the prompt around it.
    question: str
    answer: str
    kind: str
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False)
    where: str = field(default="", compare=False)


@dataclass(frozen=True)
class Rollouts:
    """G completions of each of P prompts, right-padded to T tokens."""

    prompts: list[Prompt]
    # Token ids of each prompt, P lists of different lengths.
    prompt_tokens: list[list[int]]
    # Completion token ids, end token included, padded with 0.
    tokens_PGT: Integers
    # True on the completion's tokens; a prefix of every row.
    mask_PGT: Mask
    # True if the policy wrote its end token, False if the completion was cut.
    ended_PG: Mask
    # The decoded completions, P lists of G strings, without special tokens.
    texts_PG: list[list[str]]
    # The sampler's log-probabilities of the tokens, 0 on padding; used only for comparison with
    # the trainer's.
    logprobs_PGT: Array | None = None
    # Entropy in nats of the distributions the tokens were drawn from, 0 on padding.
    entropy_PGT: Array | None = None
    # True on tokens that the policy wrote, False on those of an environment, such as answers of
    # tools; None: the policy wrote all.
    scored_PGT: Mask | None = None

    @property
    def lengths_PG(self) -> Integers:
        """Completion lengths in tokens, end token included."""
        return self.mask_PGT.sum(axis=-1)

    def of_prompt(self, place: int) -> Rollouts:
        """Return the completions of one prompt."""
        rows = slice(place, place + 1)
        arrays = {name: value[rows] for name, value in vars(self).items() if value is not None}
        return replace(self, **arrays)


@dataclass(frozen=True)
class BaselineContext:
    """Inputs of a baseline besides the group's rewards; fields that it does not need stay None."""

    # The oracle's V(x) of each prompt, from completions outside the group.
    value_P: Array | None = None
    # Completion lengths in tokens, end token included, at least 1.
    lengths_PG: Integers | None = None
    # Reward of each prompt's greedy completion.
    greedy_P: Array | None = None
    # b* = E[q Z | x] / E[q | x] of each prompt, from completions outside the group.
    optimal_P: Array | None = None
    # The mean reward of past batches, one number for all prompts.
    running: float | None = None
    # The tracker's expected reward of each prompt, from its past visits.
    tracker_P: Array | None = None
    # The expected reward of each prompt by the critic, which is fitted on past batches.
    critic_P: Array | None = None
    # Row 0 is of past rewards, row 1 of past groups' mean rewards: the number, the mean and the sum
    # of squared deviations of each, [2, 3]; zeros without a past.
    history: Array | None = None
    # Rewards of every reward function; `rewards_PG` is their weighted sum.
    rewards_PGF: Array | None = None
    # Weights of the functions in that sum.
    reward_weights_F: Array | None = None


@dataclass(frozen=True)
class ScorePool:
    """N scored completions of each of P prompts, the input of closed forms and losses."""

    # With several reward functions their weighted sum.
    rewards_PN: Array
    # Inner products <s_i, s_j> of the scores of a prompt's completions; the diagonal holds the
    # squared score norms q_i.
    gram_PNN: Array
    # In tokens.
    lengths_PN: Integers
    # Sketches of the scores: inner products across prompts, unbiased; exact if the model has no
    # more parameters than R.
    features_PNR: npt.NDArray[np.float32]
    # Wider sketches of `sum_i (z_i - zbar) s_i`, zbar a prompt's mean reward, float32 as they were
    # stored or float64; None if `centred_sums_PFR` is there.
    centred_sums_PR: Array | None
    # Reward of the greedy completion; None if no baseline asks for it.
    greedy_P: Array | None = None
    # Mean absolute difference of the sampler's log-probabilities and the model's, in some of the
    # completions, nats a token; None if the model itself sampled.
    sampler_gap: float | None = None
    # Numbers of completions by the versions of the packages that scored them; empty if unknown.
    packages: dict[str, int] = field(default_factory=dict[str, int])
    # True if the completion ended with the policy's end token; None: all did.
    ended_PN: Mask | None = None
    # Rewards of every reward function; None with a single one of weight 1, like the next two.
    rewards_PNF: Array | None = None
    # `centred_sums_PR` of every reward function.
    centred_sums_PFR: Array | None = None
    # Weights of the functions in the weighted sum.
    reward_weights_F: Array | None = None
    # K, the number of metrics of the scores: question x is in metric x mod K, and inner products of
    # different questions have a meaning only within a metric.
    metrics: int = 1
    # The kinds of vectors of a completion, see `estimators.token_weights.KINDS`. With several, the
    # axes N of `gram_PNN` and `features_PNR` hold the vectors of the first kind, then those of the
    # others.
    kinds: tuple[str, ...] = ("all",)

    @property
    def sq_norm_PN(self) -> Array:
        """Squared score norms q."""
        return np.diagonal(self.gram_PNN, axis1=1, axis2=2)

    def gradients_of(self, rows: slice) -> Array:
        """Return sketches of the leave-one-out gradients of some questions, in float64.

        They are `ghat_N = sum_i (z_i - zbar) s_i / (N-1)`.
        """
        if self.centred_sums_PR is not None:
            sums_PR = self.centred_sums_PR[rows].astype(np.float64)
        else:
            assert self.centred_sums_PFR is not None and self.reward_weights_F is not None
            sums_PR = np.zeros(())
            for f, weight in enumerate(self.reward_weights_F):
                sums_PR = sums_PR + weight * self.centred_sums_PFR[rows, f].astype(np.float64)
        return sums_PR / (self.rewards_PN.shape[1] - 1)
