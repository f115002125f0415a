"""Immutable records that the subpackages exchange.

The name of an array ends in the letters of its axes, as in `rewards_PG` and `tokens_PGT`: P
prompts, G completions of a group, N stored completions of a prompt, T tokens of a completion, B
rows of a batch, F reward functions, R numbers of a sketch. The score of a completion is the
gradient of its log-probability, and a sketch is a vector to which a gradient is compressed.
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
# Largest absolute value of a reward; squares and products of larger rewards may overflow.
MAX_REWARD = 1e50
# Minimum number of questions that an interval for new questions requires.
MIN_QUESTIONS = 4
# Names of a mean reward; it is called accuracy if all rewards are 0 or 1.
ACCURACY, MEAN_REWARD = "accuracy", "mean reward"


def is_number(value: Any, largest: float = math.inf) -> TypeGuard[float]:
    """Return True for a finite real number that fits a float, up to `largest` in absolute value.

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
    """Return the common name of several mean rewards: `accuracy` only if all are accuracies.

    >>> joint_quantity(["accuracy"]), joint_quantity(["accuracy", "mean reward"])
    ('accuracy', 'mean reward')
    """
    return ACCURACY if set(quantities) <= {ACCURACY} else MEAN_REWARD


@dataclass(frozen=True)
class Question:
    """Question of a data set."""

    # Id that depends only on the question. The random draws for a question depend on its id.
    id: str
    # Question without the prompt template.
    text: str
    answer: str
    # Kind of question; questions are counted by kind.
    kind: str
    # Worked solution that ends in the answer, for examples in prompts.
    solution: str
    # Other columns of the question's row, by name.
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False)
    # File and row number, for error messages; empty if there is no file.
    where: str = field(default="", compare=False)


@dataclass(frozen=True)
class Prompt:
    """Question in the form that the policy reads."""

    # Id of the question; `answer`, `kind`, `columns` and `where` are also copied from the question.
    id: str
    # Rendered prompt.
    text: str
    # Question without the prompt template.
    question: str
    answer: str
    kind: str
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False)
    where: str = field(default="", compare=False)


@dataclass(frozen=True)
class Rollouts:
    """G completions of each of P prompts, right-padded to T tokens."""

    prompts: list[Prompt]
    # Token ids of the prompts, P lists of different lengths.
    prompt_tokens: list[list[int]]
    # Token ids of the completions, including the end token, padded with 0.
    tokens_PGT: Integers
    # True on tokens of the completion, which come first in every row, and False on padding.
    mask_PGT: Mask
    # True if the completion ends with the end token, False if it was truncated.
    ended_PG: Mask
    # Completions as text without special tokens, P lists of G strings.
    texts_PG: list[list[str]]
    # Log-probabilities of the tokens under the sampler, 0 on padding; used only for comparison with
    # the trainer's log-probabilities.
    logprobs_PGT: Array | None = None
    # Entropy, in nats, of the distribution from which each token was drawn; 0 on padding.
    entropy_PGT: Array | None = None
    # True on tokens that the policy wrote, False on tokens of an environment, such as tool outputs;
    # None if the policy wrote all tokens.
    scored_PGT: Mask | None = None
    # If the policy wrote a completion in several turns, the completions of the turns follow each
    # other in `tokens_PGT`. This array contains the number of each token's turn, from 0. None if
    # all completions were written in one turn, directly after the prompt.
    turn_PGT: Integers | None = None
    # Token ids that the policy read before each turn, P lists of G lists of turns. None if
    # `turn_PGT` is None.
    contexts_PG: list[list[list[list[int]]]] | None = None

    @property
    def lengths_PG(self) -> Integers:
        """Completion lengths in tokens, including the end token."""
        return self.mask_PGT.sum(axis=-1)

    def of_prompt(self, place: int) -> Rollouts:
        """Return the completions of one prompt."""
        rows = slice(place, place + 1)
        arrays = {name: value[rows] for name, value in vars(self).items() if value is not None}
        return replace(self, **arrays)


@dataclass(frozen=True)
class BaselineContext:
    """Inputs of a baseline in addition to rewards; inputs that it does not need are None."""

    # Expected reward V(x) of each prompt for the oracle baseline, estimated from completions
    # outside the group.
    value_P: Array | None = None
    # Completion lengths in tokens, including the end token; at least 1.
    lengths_PG: Integers | None = None
    # Reward of the greedy completion of each prompt.
    greedy_P: Array | None = None
    # b* = E[q Z | x] / E[q | x] of each prompt x, where Z is the reward and q the squared norm of
    # the score; estimated from completions outside the group.
    optimal_P: Array | None = None
    # Mean reward of past batches, one number for all prompts.
    running: float | None = None
    # Expected reward of each prompt, predicted by the critic, which is fitted to past batches.
    critic_P: Array | None = None
    # Array [2, 3] with the number, the mean and the sum of squared deviations of past rewards in
    # row 0, and of the mean rewards of past groups in row 1; zeros if there are no past rewards.
    history: Array | None = None
    # Rewards of every reward function; `rewards_PG` is their weighted sum.
    rewards_PGF: Array | None = None
    # Weights of the reward functions in this sum.
    reward_weights_F: Array | None = None


@dataclass(frozen=True)
class ScorePool:
    """Rewards and inner products of scores of N completions of each of P prompts.

    Closed forms and losses are computed from this record.
    """

    # Rewards; with several reward functions, their weighted sum.
    rewards_PN: Array
    # Inner products <s_i, s_j> of the scores s of a prompt's completions. The diagonal contains the
    # squared norms q_i of the scores.
    gram_PNN: Array
    # Completion lengths in tokens.
    lengths_PN: Integers
    # Sketches of the scores, for inner products across prompts. They give unbiased estimates, which
    # are exact if the model has at most R parameters.
    features_PNR: npt.NDArray[np.float32]
    # Sketches of `sum_i (z_i - zbar) s_i`, where zbar is a prompt's mean reward; they have more
    # numbers than `features_PNR`. The dtype is float32 (as stored) or float64. None if
    # `centred_sums_PFR` is set.
    centred_sums_PR: Array | None
    # Reward of the greedy completion; None if no baseline needs it.
    greedy_P: Array | None = None
    # Mean absolute difference between the sampler's and the model's log-probabilities, in nats per
    # token, measured on some of the completions; None if the model itself sampled.
    sampler_gap: float | None = None
    # Number of completions whose scores were computed with each set of package versions; empty if
    # unknown.
    packages: dict[str, int] = field(default_factory=dict[str, int])
    # True if the completion ended with the end token; None if all completions did.
    ended_PN: Mask | None = None
    # Rewards of every reward function. This field and the next two fields are None if there is a
    # single reward function with weight 1.
    rewards_PNF: Array | None = None
    # `centred_sums_PR` for every reward function.
    centred_sums_PFR: Array | None = None
    # Weights of the reward functions in the weighted sum.
    reward_weights_F: Array | None = None
    # Kinds of vectors of a completion; see `estimators.token_weights.KINDS`. With several kinds,
    # the axes N of `gram_PNN` and `features_PNR` contain the vectors of the first kind, then the
    # vectors of the other kinds.
    kinds: tuple[str, ...] = ("all",)

    @property
    def sq_norm_PN(self) -> Array:
        """Squared norms q of the scores."""
        return np.diagonal(self.gram_PNN, axis1=1, axis2=2)

    def gradients_of(self, rows: slice) -> Array:
        """Return sketches of the leave-one-out gradients of the questions in `rows`, in float64.

        The leave-one-out gradient of a question is `ghat_N = sum_i (z_i - zbar) s_i / (N-1)`.
        """
        if self.centred_sums_PR is not None:
            sums_PR = self.centred_sums_PR[rows].astype(np.float64)
        else:
            assert self.centred_sums_PFR is not None and self.reward_weights_F is not None
            sums_PR = np.zeros(())
            for f, weight in enumerate(self.reward_weights_F):
                sums_PR = sums_PR + weight * self.centred_sums_PFR[rows, f].astype(np.float64)
        return sums_PR / (self.rewards_PN.shape[1] - 1)
