"""The records that travel between rooms: frozen, every axis named.

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
LARGEST_REWARD = 1e50  # in absolute value: squares of larger ones, and their products, overflow
LEAST_QUESTIONS = 4  # of which an interval for new ones is made
ACCURACY, MEAN_REWARD = "accuracy", "mean reward"  # what a mean of rewards is called


def is_number(value: Any, largest: float = math.inf) -> TypeGuard[float]:
    """Whether a value is a finite real number of at most `largest` in absolute value, and a float
    can hold it.

    >>> is_number(1), is_number(10**400), is_number("1"), is_number(1e60, LARGEST_REWARD)
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
    """The name that several means of rewards have in common: an accuracy is a mean reward too.

    >>> joint_quantity(["accuracy"]), joint_quantity(["accuracy", "mean reward"])
    ('accuracy', 'mean reward')
    """
    return ACCURACY if set(quantities) <= {ACCURACY} else MEAN_REWARD


@dataclass(frozen=True)
class Question:
    """One question of a data set.

    Attributes:
        id: stable name, a function of the question alone; keys every random draw.
        text: the bare question.
        answer: the expected final answer.
        kind: the sort of question, for counts per kind.
        solution: a worked solution that ends in the answer, as examples in prompts show it.
        columns: further columns of its row, by name.
        where: file and number of its row, for errors; empty where there is none.
    """

    id: str
    text: str
    answer: str
    kind: str
    solution: str
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False)
    where: str = field(default="", compare=False)


@dataclass(frozen=True)
class Prompt:
    """One question as the policy reads it.

    Attributes:
        id: of the question.
        text: the rendered prompt.
        question: the bare question.
        answer: the expected final answer.
        kind: the sort of question.
        columns, where: of the question.
    """

    id: str
    text: str
    question: str
    answer: str
    kind: str
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False)
    where: str = field(default="", compare=False)


@dataclass(frozen=True)
class Rollouts:
    """G completions of each of P prompts, right-padded to T tokens.

    Attributes:
        prompts: the P prompts.
        prompt_tokens: token ids of each prompt, P lists of their own lengths.
        tokens_PGT: completion token ids, end token included, padded with 0 (int64).
        scored_PGT: True on the tokens that the policy wrote, where an environment wrote others,
            such as the answers of tools; None: it wrote all.
        mask_PGT: True on the completion's tokens; a prefix of every row.
        ended_PG: True where the policy wrote its end token, False where it was cut.
        texts_PG: the decoded completions, P lists of G strings, without special tokens.
        logprobs_PGT: the sampler's log-probabilities of the tokens, 0 on padding; only ever
            compared with the trainer's.
        entropy_PGT: entropy in nats of the distributions the tokens were drawn from, 0 on padding.
    """

    prompts: list[Prompt]
    prompt_tokens: list[list[int]]
    tokens_PGT: Integers
    mask_PGT: Mask
    ended_PG: Mask
    texts_PG: list[list[str]]
    logprobs_PGT: Array | None = None
    entropy_PGT: Array | None = None
    scored_PGT: Mask | None = None

    @property
    def lengths_PG(self) -> Integers:
        """Completion lengths in tokens, end token included."""
        return self.mask_PGT.sum(axis=-1)

    def of_prompt(self, place: int) -> Rollouts:
        """The completions of one prompt."""
        one = slice(place, place + 1)
        known = {name: value[one] for name, value in vars(self).items() if value is not None}
        return replace(self, **known)


@dataclass(frozen=True)
class BaselineContext:
    """What a baseline may look at besides the group's rewards. Fields it does not need stay None.

    Attributes:
        value_P: the oracle's V(x) of each prompt, from completions outside the group.
        lengths_PG: completion lengths in tokens, end token included, at least 1.
        greedy_P: reward of each prompt's greedy completion.
        optimal_P: b* = E[q Z | x] / E[q | x] of each prompt, from completions outside the group.
        running: the mean reward of past batches, one number for all prompts.
        tracker_P: what the tracker expects of each prompt after its past visits.
        critic_P: what the critic, fitted on past batches, expects of each prompt.
        rewards_PGF: rewards of every reward function, of which `rewards_PG` is the weighted sum.
        reward_weights_F: of the functions in that sum.
        history: of past rewards and of past groups' mean rewards, the number, the mean and the sum
            of squared deviations: [2, 3], zeros where there is no past.
    """

    value_P: Array | None = None
    lengths_PG: Integers | None = None
    greedy_P: Array | None = None
    optimal_P: Array | None = None
    running: float | None = None
    tracker_P: Array | None = None
    critic_P: Array | None = None
    history: Array | None = None
    rewards_PGF: Array | None = None
    reward_weights_F: Array | None = None


@dataclass(frozen=True)
class ScorePool:
    """N scored completions of each of P prompts: all that closed forms and losses need.

    Attributes:
        rewards_PN: rewards, float64; of several reward functions their weighted sum.
        gram_PNN: inner products <s_i, s_j> of the scores of a prompt's completions; the diagonal
            holds the squared score norms q_i.
        lengths_PN: completion lengths in tokens.
        features_PNR: sketches of the scores: inner products across prompts, unbiased; exact where
            the model has no more parameters than R.
        centred_sums_PR: wider sketches of `sum_i (z_i - zbar) s_i`, zbar a prompt's mean reward,
            float32 as they were stored or float64; None where `centred_sums_PFR` is there.
        greedy_P: reward of the greedy completion, None where no baseline asks for it.
        sampler_gap: mean absolute difference of the sampler's log-probabilities and the model's, in
            some of the completions, nats a token; None where the model itself sampled.
        packages: completions by the versions of the packages that scored them, where known.
        ended_PN: whether each completion ended with the policy's end token; None: all did.
        rewards_PNF, centred_sums_PFR: rewards and `centred_sums_PR` of every reward function; None
            where there is one, of weight 1.
        reward_weights_F: of the functions in the weighted sum; None likewise.
        metrics: K, in how many metrics the scores are: question x in metric x mod K, and inner
            products of different questions have a meaning within a metric alone.
        kinds: of vectors that a completion has, see `estimators.token_weights.KINDS`. With several,
            axes N of `gram_PNN` and `features_PNR` have those of the first kind, then the others'.
    """

    rewards_PN: Array
    gram_PNN: Array
    lengths_PN: Integers
    features_PNR: npt.NDArray[np.float32]
    centred_sums_PR: Array | None
    greedy_P: Array | None = None
    sampler_gap: float | None = None
    packages: dict[str, int] = field(default_factory=dict[str, int])
    ended_PN: Mask | None = None
    rewards_PNF: Array | None = None
    centred_sums_PFR: Array | None = None
    reward_weights_F: Array | None = None
    metrics: int = 1
    kinds: tuple[str, ...] = ("all",)

    @property
    def sq_norm_PN(self) -> Array:
        """Squared score norms q."""
        return np.diagonal(self.gram_PNN, axis1=1, axis2=2)

    def gradients_of(self, rows: slice) -> Array:
        """Sketches of some pools' leave-one-out gradients,
        `ghat_N = sum_i (z_i - zbar) s_i / (N-1)`, in float64.
        """
        if self.centred_sums_PR is not None:
            sums_PR = self.centred_sums_PR[rows].astype(np.float64)
        else:
            assert self.centred_sums_PFR is not None and self.reward_weights_F is not None
            sums_PR = np.zeros(())
            for f, weight in enumerate(self.reward_weights_F):
                sums_PR = sums_PR + weight * self.centred_sums_PFR[rows, f].astype(np.float64)
        return sums_PR / (self.rewards_PN.shape[1] - 1)
