"""Populations of prompts for simulated studies, with exactly known constants.

A population is a table of prompts x outcomes, with the probability, reward, score and length of
each outcome. A study draws prompts independently, and then completions of each prompt. The
thresholds in `estimators.group_size` were chosen with the populations in `FITTED`. The populations
in `UNSEEN` were not used for any choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from grpo_ustat.estimators.groups import GroupTerms
from grpo_ustat.estimators.moments import (
    centred,
    exact_moments,
    norm_moments,
    pool_gradient_weights,
)
from grpo_ustat.estimators.scaling import ScalingLaw
from grpo_ustat.records import Array, Integers, ScorePool

# Numbers of prompts and outcomes in the populations that `light` makes.
PROMPTS, OUTCOMES = 8000, 6
# Largest number of score entries drawn in one block.
CHUNK = 3_000_000
# Largest number of tokens in a completion.
MAX_LENGTH = 60
Table = tuple[Array, Array, Array]


class ScoredPrompts(NamedTuple):
    """Contributions of prompts to the constants that a study estimates."""

    # ||g||^2, A_V - ||g||^2 and D + ||g||^2.
    terms_3P: Array
    # Gradient estimates.
    ghat_PD: Array
    # Mean squared score norms.
    norms_P: Array

    def law(self, count: int) -> ScalingLaw:
        """Return the scaling law that a study of the first `count` prompts estimates."""
        ghat_PD = self.ghat_PD[:count]
        others_P = ghat_PD @ ghat_PD.sum(axis=0) - np.square(ghat_PD).sum(axis=1)
        terms = GroupTerms(*self.terms_3P[:, :count], others_P, self.norms_P[:count])
        return ScalingLaw.jackknifed(terms.constants_4, terms.without_each_4P[:, None], count)


class Population:
    """Prompts with their outcomes' probabilities, rewards and scores, and the exact scaling law.

    Args:
        p_PY: probabilities of the outcomes, which are normalised for each prompt.
        rewards_PY: rewards of the outcomes.
        scores_PYD: scores of the outcomes, which are centred for each prompt.
        lengths_PY: lengths of the outcomes in tokens; None draws 1 to 60 tokens, fewer if the
            reward is 1.
    """

    def __init__(
        self, p_PY: Array, rewards_PY: Array, scores_PYD: Array, lengths_PY: Integers | None = None
    ):
        self.p_PY = p_PY / p_PY.sum(axis=1, keepdims=True)
        self.ends_PY = self.p_PY.cumsum(axis=1)
        self.rewards_PY = rewards_PY
        self.scores_PYD = scores_PYD - np.einsum("py,pyd->pd", self.p_PY, scores_PYD)[:, None]
        self.norms_PY = np.square(self.scores_PYD).sum(axis=2)
        self.given_lengths_PY = lengths_PY
        value_P = (self.p_PY * rewards_PY).sum(axis=1)
        self.centred_PY = rewards_PY - value_P[:, None]
        self.g_PD = np.einsum("py,py,pyd->pd", self.p_PY, self.centred_PY, self.scores_PYD)
        g_sq_P = np.square(self.g_PD).sum(axis=1)
        self.moments = exact_moments(self.norms_PY, rewards_PY, self.p_PY, g_sq_P)
        grad_sq = float(np.square(self.g_PD.mean(axis=0)).sum())
        self.law = ScalingLaw.of_moments(self.moments, grad_sq)

    @cached_property
    def lengths_PY(self) -> Integers:
        """Number of tokens of each outcome."""
        if self.given_lengths_PY is not None:
            return self.given_lengths_PY
        rng = np.random.default_rng(8)
        prompts, outcomes = self.rewards_PY.shape
        doubled = self.scores_PYD[:, : outcomes // 2] == self.scores_PYD[:, outcomes // 2 :]
        distinct = outcomes // 2 if outcomes % 2 == 0 and doubled.all() else outcomes
        spread = rng.normal(size=(prompts, 1)) * 0.4 + rng.normal(size=(prompts, distinct)) * 0.4
        spread = np.tile(spread, (1, outcomes // distinct)) - 0.3 * self.rewards_PY
        return np.clip(20 * np.exp(spread), 1, MAX_LENGTH).astype(np.int64)

    def draw(self, chosen: Integers, completions: int, rng: np.random.Generator) -> Integers:
        """Draw the outcomes of `completions` completions for each chosen prompt."""
        draws = rng.random((len(chosen), completions, 1))
        return (draws > self.ends_PY[chosen][:, None, :-1]).sum(axis=2)

    def pool(self, chosen: Integers, completions: int, rng: np.random.Generator) -> ScorePool:
        """Draw a pool of scored completions for the chosen prompts."""
        return self.pool_of_outcomes(chosen, self.draw(chosen, completions, rng))

    def pool_of_outcomes(self, chosen: Integers, outcomes: Integers) -> ScorePool:
        """Return the pool of the chosen prompts with the given outcomes, [P, N]."""
        rewards, lengths = (
            np.take_along_axis(values_PY[chosen], outcomes, axis=1)
            for values_PY in (self.rewards_PY, self.lengths_PY)
        )
        scores = np.take_along_axis(self.scores_PYD[chosen], outcomes[..., None], axis=1)
        return pool_of(rewards, scores, lengths)

    def studies(
        self, prompts: int, completions: int, count: int, rng: np.random.Generator
    ) -> Iterator[ScalingLaw]:
        """Yield the scaling laws that simulated studies estimate.

        Each study draws its prompts with replacement. Its intervals come from the delete-one-prompt
        jackknife.
        """
        for chosen, outcomes in self.draw_studies(prompts, completions, count, rng):
            for study in range(0, len(chosen), prompts):
                of_study = slice(study, study + prompts)
                yield self.scored(chosen[of_study], outcomes[of_study]).law(prompts)

    def draw_studies(
        self, prompts: int, completions: int, count: int, rng: np.random.Generator
    ) -> Iterator[tuple[Integers, Integers]]:
        """Yield prompts drawn with replacement, and their outcomes, of some studies at a time."""
        chunk = max(1, CHUNK // (prompts * completions * self.scores_PYD.shape[2]))
        for first in range(0, count, chunk):
            chosen = rng.integers(len(self.p_PY), size=min(chunk, count - first) * prompts)
            yield chosen, self.draw(chosen, completions, rng)

    def scored(self, chosen: Integers, outcomes_PN: Integers) -> ScoredPrompts:
        """Compute the contributions of each chosen prompt to the constants of a study."""
        rewards = np.take_along_axis(self.rewards_PY[chosen], outcomes_PN, axis=1)
        norms = np.take_along_axis(self.norms_PY[chosen], outcomes_PN, axis=1)
        scores = np.take_along_axis(self.scores_PYD[chosen], outcomes_PN[..., None], axis=1)
        ghat_PD = np.einsum("pn,pnd->pd", pool_gradient_weights(rewards), scores)
        moments = norm_moments(norms, rewards, np.square(ghat_PD).sum(axis=1))
        terms = moments.g_sq, moments.a_v - moments.g_sq, moments.d + moments.g_sq
        return ScoredPrompts(np.stack(terms), ghat_PD, norms.mean(axis=1))


def pool_of(rewards_PN: Array, scores_PND: Array, lengths_PN: Integers | None = None) -> ScorePool:
    """Make a pool of scored completions, which have one token each if no lengths are given."""
    return ScorePool(
        rewards_PN=rewards_PN,
        gram_PNN=scores_PND @ scores_PND.transpose(0, 2, 1),
        lengths_PN=np.ones(rewards_PN.shape, dtype=np.int64) if lengths_PN is None else lengths_PN,
        features_PNR=scores_PND,
        centred_sums_PR=np.einsum("pn,pnd->pd", centred(rewards_PN), scores_PND),
    )


def with_flips(p: Array, rewards: Array, scores: Array, share: float) -> Table:
    """Replace a share of a table's rewards r by 1 - r, which adds noise and raises C3."""
    return (
        np.concatenate([p * (1 - share), p * share], axis=1),
        np.concatenate([rewards, 1 - rewards], axis=1),
        np.concatenate([scores, scores], axis=1),
    )


def softmax_table(
    rng: np.random.Generator,
    prompts: int = 6000,
    outcomes: int = 6,
    width: int = 24,
    temperature: float = 1.0,
) -> tuple[Array, Array]:
    """Draw probabilities from normal logits, and normal scores."""
    scores = rng.normal(size=(prompts, outcomes, width))
    logits = temperature * rng.normal(size=(prompts, outcomes))
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True), scores


def light(flips: float, tail: float = 0.0) -> Population:
    """Make prompts with a common gradient direction; `tail` is the sigma of lognormal scales."""
    rng = np.random.default_rng(5)
    scores = rng.normal(size=(PROMPTS, OUTCOMES, 20))
    if tail:
        scores *= np.exp(tail * rng.normal(size=(PROMPTS, 1, 1)))
    logits = rng.normal(size=(PROMPTS, OUTCOMES))
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    common = 0.5 * scores[..., 0] / np.abs(scores[..., 0]).mean()
    rewards = (common + rng.normal(size=(PROMPTS, OUTCOMES)) > 0).astype(float)
    return Population(*with_flips(p, rewards, scores, flips))


def mixed(signal: float, flips: float, bias: float = 1.4) -> Population:
    """Make easy and hard prompts; scores of wrong answers have larger norms."""
    rng = np.random.default_rng(1)
    p, scores = softmax_table(rng)
    hard = rng.random(len(p)) < 0.5
    shift = np.where(hard, -bias, bias)[:, None]
    rewards = (signal * scores[..., 0] + shift + 1.2 * rng.normal(size=p.shape) > 0).astype(float)
    length = np.where(rewards > 0, 0.6, 1.8) * np.where(hard, 1.5, 0.7)[:, None]
    return Population(*with_flips(p, rewards, scores * length[..., None], flips))


def heavy_tailed(signal: float, flips: float, index: float = 3.0) -> Population:
    """Make Pareto-tailed squared score norms, with `index` for prompts and 4 for completions."""
    rng = np.random.default_rng(2)
    p, scores = softmax_table(rng)
    of_prompt = np.sqrt(rng.pareto(index, size=len(p)) + 1)
    of_completion = np.sqrt(rng.pareto(4.0, size=p.shape) + 1)
    shift = rng.normal(size=len(p))[:, None] * 0.7
    rewards = (signal * scores[..., 0] + shift + rng.normal(size=p.shape) > 0).astype(float)
    scores = scores * (of_prompt[:, None] * of_completion)[..., None]
    return Population(*with_flips(p, rewards, scores, flips))


def sparse(live: float, signal: float, flips: float) -> Population:
    """Make prompts with a signal in a share `live`; others are nearly always right or wrong."""
    rng = np.random.default_rng(3)
    p, scores = softmax_table(rng, width=16)
    carries = rng.random(len(p)) < live
    of_live = (signal * scores[..., 0] + 0.8 * rng.normal(size=p.shape) > 0).astype(float)
    right = rng.random(len(p)) < 0.6
    rare = rng.random(p.shape) < 0.03
    of_others = np.where(rare, 1 - right[:, None], right[:, None]).astype(float)
    rewards = np.where(carries[:, None], of_live, of_others)
    scores = scores * np.where(carries, 1.3, 0.6)[:, None, None]
    return Population(*with_flips(p, rewards, scores, flips))


def one_direction() -> Population:
    """Make graded rewards along a separate direction for each prompt; G* is near its minimum."""
    rng = np.random.default_rng(4)
    p, scores = softmax_table(rng, outcomes=3, width=3, temperature=0.3)
    direction = rng.normal(size=(len(p), 1, 3))
    rewards = np.clip(np.einsum("pyd,pkd->py", scores, direction) / 3 + 0.5, 0, 1)
    return Population(p, rewards, scores)


def nearly_unrelated() -> Population:
    """Make graded rewards that hardly depend on the score, so that G* is 48."""
    rng = np.random.default_rng(4)
    p, scores = softmax_table(rng, outcomes=5, width=40)
    rng.normal(size=(len(p), 1))
    rng.normal(size=p.shape)
    noise = rng.normal(size=(len(p), 1, 8)) * 0.3
    rewards = np.clip(0.5 + 0.012 * scores[..., :1] + np.zeros((len(p), 5, 8)) + noise, -1, 2)
    return Population(
        np.repeat(p, 8, axis=1) / 8, rewards.reshape(len(p), -1), np.repeat(scores, 8, axis=1)
    )


def opposed() -> Population:
    """Make two kinds of prompts with opposite gradients, one kind twice as frequent."""
    rng = np.random.default_rng(11)
    p, scores = softmax_table(rng, outcomes=8, width=12)
    camp = np.where(rng.random(len(p)) < 2 / 3, 1.0, -1.0)[:, None]
    noise = 1.5 * rng.normal(size=p.shape)
    rewards = (0.6 * camp * scores[..., 0] + noise > 0.4).astype(float)
    scores = scores * np.exp(0.5 * rng.normal(size=(len(p), 1, 1)))
    return Population(*with_flips(p, rewards, scores, 0.2))


def few_loud() -> Population:
    """Make rewards in fifths; 4 % of the prompts have five-fold scores and cause most of C1."""
    rng = np.random.default_rng(12)
    p, scores = softmax_table(rng, outcomes=10, width=20)
    loud = rng.random(len(p)) < 0.04
    signal = np.where(loud, 0.5, 0.15)[:, None] * scores[..., 0]
    rewards = np.clip(np.round(2.5 + signal + rng.normal(size=p.shape)) / 5, 0, 1)
    return Population(p, rewards, scores * np.where(loud, 5.0, 1.0)[:, None, None])


def clustered() -> Population:
    """Make prompts of 40 topics with separate gradient directions; topic sizes follow Zipf's law.

    Rewards follow a direction that all topics share and the direction of the topic.
    """
    rng = np.random.default_rng(21)
    p, scores = softmax_table(rng, outcomes=8, width=32, temperature=1.5)
    sizes = 1 / np.arange(1, 41)
    topic = rng.choice(40, size=len(p), p=sizes / sizes.sum())
    directions = rng.normal(size=(40, 32)) / math.sqrt(32)
    follows = np.einsum("pyd,pd->py", scores, directions[topic])
    easy = 1.0 * rng.normal(size=(40,))[topic][:, None]
    rewards = (0.4 * scores[..., 0] + follows + easy + 1.5 * rng.normal(size=p.shape) > 0.5) * 1.0
    return Population(*with_flips(p, rewards, scores, 0.15))


def rare_success() -> Population:
    """Make hard prompts: right answers have probabilities between 0.1 % and 50 %.

    A prompt's probability of a right answer is lognormal. Scores of unlikely outcomes are large, as
    for a softmax over tokens.
    """
    rng = np.random.default_rng(22)
    p, scores = softmax_table(rng, outcomes=8, width=16)
    right = np.zeros(p.shape)
    right[:, :2] = 1.0
    chance = np.clip(0.06 * np.exp(1.5 * rng.normal(size=(len(p), 1))), 1e-3, 0.5)
    of_right, of_wrong = (
        p * mask / (p * mask).sum(1, keepdims=True) for mask in (right, 1 - right)
    )
    p = chance * of_right + (1 - chance) * of_wrong
    scores = scores * (-np.log(p))[..., None] ** 0.5
    scores[..., 0] += 0.4 * right
    return Population(*with_flips(p, right, scores, 0.01))


def camps(
    second: float, share: float = 0.5, angle: float = 90.0, tail: float = 0.0, within: float = 0.0
) -> Population:
    """Make two kinds of prompts whose gradients differ in direction.

    Lengths differ by prompt and outcome. A mean over tokens favours the kind with the shorter
    completions.

    Args:
        second: mean length of the second kind; the first kind has mean length 10.
        share: share of prompts of the first kind.
        angle: angle in degrees between the gradients of the two kinds.
        tail: sigma of the lognormal factor by which each prompt's scores are scaled.
        within: sigma of the lognormal factor by which each completion's length is scaled.
    """
    rng = np.random.default_rng(13)
    p, scores = softmax_table(rng, width=12)
    first = rng.random((len(p), 1)) < share
    radians = math.radians(angle)
    other = math.cos(radians) * scores[..., 0] + math.sin(radians) * scores[..., 1]
    signal = 1.2 * np.where(first, scores[..., 0], other)
    rewards = (signal + 0.7 * rng.normal(size=p.shape) > 0).astype(float)
    factor = np.exp(within * rng.normal(size=p.shape))
    lengths = np.maximum(1, np.round(np.where(first, 10.0, second) * factor)).astype(np.int64)
    scores = scores * np.exp(tail * rng.normal(size=(len(p), 1, 1)))
    return Population(p, rewards, scores, lengths)


def two_prompts() -> Population:
    """Make a prompt with 10 tokens and one with 100 tokens, with orthogonal gradients.

    The cos^2 between the gradient and the expectation of a mean over tokens is .599.
    """
    scores = np.zeros((2, 2, 2))
    scores[0, :, 0], scores[1, :, 1] = (-1.0, 1.0), (-1.0, 1.0)
    rewards = np.array([[0.0, 1.0], [0.0, 1.0]])
    lengths = np.array([[10, 10], [100, 100]])
    return Population(np.full((2, 2), 0.5), rewards, scores, lengths)


# `efficiency.UNDRAWN_VARIANCE` was chosen with the first four of these populations and with
# "right"; the others were not used.
TURNED: Mapping[str, Callable[[], Population]] = {
    "two prompts": two_prompts,
    "camps": partial(camps, 100.0),
    "camps, lognormal": partial(camps, 100.0, tail=0.7),
    "nearly right": partial(camps, 12.3, tail=0.7),
    "far, a quarter": partial(camps, 200.0, share=0.25, tail=0.5),
    "opposite camps": partial(camps, 40.0, share=0.4, angle=120.0),
    "partly turned": partial(camps, 30.0, share=0.7, angle=60.0, tail=0.9, within=0.4),
    "right": partial(camps, 10.0, tail=0.5, within=0.6),
}
LIGHT: Mapping[str, Callable[[], Population]] = {
    "light, G* 3.1": partial(light, 0.0),
    "light, G* 5.5": partial(light, 0.257),
    "light, lognormal": partial(light, 0.257, 0.7),
    "light, G* 8.8": partial(light, 0.36),
}
FITTED: Mapping[str, Callable[[], Population]] = {
    **LIGHT,
    "mixed, low": partial(mixed, 0.9, 0.0),
    "mixed, mid": partial(mixed, 0.35, 0.12),
    "mixed, high": partial(mixed, 0.12, 0.25),
    "mixed, nearly sure": partial(mixed, 0.5, 0.01, 3.2),
    "Pareto, low": partial(heavy_tailed, 0.8, 0.0),
    "Pareto, mid": partial(heavy_tailed, 0.3, 0.15),
    "Pareto, heavier": partial(heavy_tailed, 0.3, 0.1, 2.2),
    "Pareto, high": partial(heavy_tailed, 0.15, 0.3),
    "sparse, low": partial(sparse, 0.3, 2.0, 0.0),
    "sparse, mid": partial(sparse, 0.15, 1.0, 0.02),
    "sparse, rare": partial(sparse, 0.06, 2.0, 0.0),
    "sparse, high": partial(sparse, 0.1, 0.5, 0.15),
    "one direction": one_direction,
    "nearly unrelated": nearly_unrelated,
}
UNSEEN: Mapping[str, Callable[[], Population]] = {
    "opposed": opposed,
    "few loud": few_loud,
    "clustered": clustered,
    "rare success": rare_success,
}
POPULATIONS = {**FITTED, **UNSEEN, **TURNED}
