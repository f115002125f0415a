"""Intervals for G* in AdamW's metric, and the warning that v has not converged.

The synthetic prompts have finitely many outcomes, so that moments are exact sums. An outcome is a
pair of a reward (0 or 1) and one of four styles. Reward and style are independent given the prompt,
so an entry of the score that depends only on the style has no gradient. Common entries of the score
are nonzero for every completion. Rare entries are numerous, and each prompt has nonzero values in
only a few of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from counting import Asked, Cell, Kind
from populations import Population, pool_of

from grpo_ustat.estimators.closed_form import ClosedForm, Request, closed_form
from grpo_ustat.estimators.scaling import CONSTANTS_AND_GRADIENT, ScalingLaw
from grpo_ustat.mse.second_moments import GroupGradients, is_uncertain, shift
from grpo_ustat.policy.scores.metric import adam_metric

# Rollouts and group size of the steps from which AdamW's v is computed.
ROLLOUTS, GROUP_SIZE = 256, 8
STYLES, PROMPTS = 4, 3000


@dataclass(frozen=True)
class Entries:
    """Numbers of score entries of each kind."""

    # Common entries, first those that depend on reward and style, then those on the style only.
    reward: int = 20
    style: int = 0
    # Rare entries of the same two kinds.
    rare_reward: int = 0
    rare_style: int = 0
    # Number of nonzero rare entries for each outcome of a prompt, and the scale of their values.
    moved: int = 4
    loud: float = 1.0


POLICIES = {
    "common": Entries(),
    "mostly style": Entries(reward=4, style=40),
    "few rare": Entries(rare_reward=20, moved=2),
    "few rare of style": Entries(rare_style=20, moved=2),
    "rare": Entries(rare_reward=200),
    "rare and loud": Entries(rare_reward=200, loud=5.0),
    "rare of style": Entries(rare_style=200),
    "rare of style, loud": Entries(rare_style=200, loud=5.0),
    "rarest": Entries(rare_reward=1500, moved=6),
    "rarest of style": Entries(rare_style=1500, moved=6),
}


def population_of(kinds: Entries, count: int, rng: np.random.Generator) -> Population:
    """Draw prompts with 2 x 4 outcomes: probabilities, features and the scales of entries."""
    value_P = rng.beta(1.5, 1.0, count)
    styles_PY = rng.dirichlet(np.full(STYLES, 2.0), count)
    right_P2 = np.stack([1 - value_P, value_P], axis=1)
    chance_PY = (right_P2[:, :, None] * styles_PY[:, None]).reshape(count, -1)
    rewards_PY = np.tile(np.repeat([0.0, 1.0], STYLES), (count, 1))
    shape = (count, 2, STYLES)
    common = rng.normal(size=(*shape, kinds.reward))
    # Right answers share a component, which gives the gradient a common direction.
    common[:, 1, :, 0] += 0.5
    of_style = np.broadcast_to(
        rng.normal(size=(count, 1, STYLES, kinds.style)), (*shape, kinds.style)
    )
    parts = [common, of_style]
    for entries, answers in ((kinds.rare_reward, 2), (kinds.rare_style, 1)):
        rare = np.zeros((count, answers, STYLES, entries))
        if entries:
            moved = rng.integers(entries, size=(count, answers, STYLES, kinds.moved))
            sizes = kinds.loud * rng.normal(size=moved.shape)
            np.put_along_axis(rare, moved, sizes, axis=3)
        parts.append(np.broadcast_to(rare, (*shape, entries)))
    features_PYD = np.concatenate(parts, axis=3).reshape(count, 2 * STYLES, -1)
    features_PYD *= np.exp(0.5 * rng.normal(size=features_PYD.shape[2]))
    return Population(chance_PY, rewards_PY, features_PYD)


def draw(
    population: Population, questions: int, completions: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draw rewards [P, N] and scores [P, N, D] for completions of newly drawn questions."""
    chosen = rng.choice(len(population.p_PY), questions, replace=False)
    outcome_PN = population.draw(chosen, completions, rng)
    scores_PND = np.take_along_axis(population.scores_PYD[chosen], outcome_PN[..., None], axis=1)
    return np.take_along_axis(population.rewards_PY[chosen], outcome_PN, axis=1), scores_PND


def second_moments(entries: dict[str, np.ndarray]) -> np.ndarray:
    """Compute E ghat_j^2 for a step of n rollouts in groups of G, [D]."""
    noise = GROUP_SIZE * entries["c1"] + entries["c2"] + entries["c3"] / (GROUP_SIZE - 1)
    return entries["grad_sq"] + noise / ROLLOUTS


def halves(rewards_PN: np.ndarray, scores_PND: np.ndarray) -> list[GroupGradients]:
    """Collect the groups' gradients for each half of the questions."""
    groups, gradients = rewards_PN.shape[1] // GROUP_SIZE, []
    for half in range(2):
        gradients.append(GroupGradients(groups))
        for z_N, s_ND in zip(rewards_PN[half::2], scores_PND[half::2], strict=True):
            z_KG = z_N[: groups * GROUP_SIZE].reshape(groups, GROUP_SIZE)
            weights_KG = (z_KG - z_KG.mean(axis=1, keepdims=True)) / (GROUP_SIZE - 1)
            u_KD = np.einsum("kg,kgd->kd", weights_KG, s_ND[: z_KG.size].reshape(*z_KG.shape, -1))
            gradients[-1].add({"w": torch.from_numpy(u_D)} for u_D in u_KD)
    return gradients


def study(rewards_PN: np.ndarray, scores_PND: np.ndarray) -> tuple[ClosedForm, float]:
    """Compute closed forms, with each half in the metric from the other half, and the shift."""
    gradients, prompts = halves(rewards_PN, scores_PND), ROLLOUTS // GROUP_SIZE
    scores_PND = scores_PND.copy()
    for half in range(2):
        metric = adam_metric({"w": gradients[1 - half].second_moments("w", prompts)})
        scores_PND[half::2] *= metric.of("w", 0, scores_PND.shape[2]).numpy()
    pool = replace(pool_of(rewards_PN, scores_PND), metrics=2)
    request = Request([], {}, {})
    return closed_form(pool, request), shift(gradients, prompts)


def adam(name: str, asked: Asked) -> Iterator[Cell]:
    """Judge intervals for G* and n_c(8) in AdamW's metric, and the warning about v."""
    population = population_of(POLICIES[name], PROMPTS, np.random.default_rng(7))
    entries = population.by_entry()
    v = second_moments(entries)
    weight = np.divide(1, v, out=np.zeros_like(v), where=v > 0)
    truth = ScalingLaw.exact(*(float((entries[x] * weight).sum()) for x in CONSTANTS_AND_GRADIENT))
    best, scale = truth.best_size(), truth.noise_scale(GROUP_SIZE).estimate

    def studies(questions: int, completions: int) -> Iterator[dict[str, bool | float]]:
        """Yield the statements of each study."""
        rng = np.random.default_rng(1)
        for _ in range(asked.studies):
            result, moved = study(*draw(population, questions, completions, rng))
            gstar, noise = result["gstar"], result[f"noise/{GROUP_SIZE}"]
            uncertain, heavy = is_uncertain(moved, gstar), result.tails.heavy
            yield {
                "G*": not gstar.low <= best <= gstar.high,
                "n_c(8)": not noise.low <= scale <= noise.high,
                "estimate of G*": gstar.estimate,
                "G* has an upper end": float(math.isfinite(gstar.high)),
                "warning: v is uncertain": float(uncertain),
                "warning: heavy tails": float(heavy),
                "warning: either": float(uncertain or heavy),
            }

    for questions, completions in asked.cells:
        facts = {"Euclidean G*": population.law.best_size(), "prompts": questions}
        yield Cell(
            facts | {"completions": completions},
            studies(questions, completions),
            {"G*": best, "estimate of G*": best, "n_c(8)": scale},
        )


KINDS = {"adam": Kind(adam, list(POLICIES), ((20, 16), (60, 16), (60, 32), (120, 32)))}
