"""How often the interval of G* in AdamW's metric holds the truth, and how often the warning that v
has not converged fires.

Synthetic prompts whose moments are sums: an outcome is a pair of a reward, 0 or 1, and a style of
four, independent given the prompt, so that an entry of the score that the style alone moves has no
gradient. Entries are common, which every completion moves, or rare: a prompt moves a few of many.

    python scripts/benchmarks/adam_metric.py
    python scripts/benchmarks/adam_metric.py --policies rare --sizes 60x16 --studies 500
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import numpy as np
import torch

from grpo_ustat.estimators.closed_form import ClosedForm, Request, closed_form
from grpo_ustat.estimators.moments import centred
from grpo_ustat.estimators.scaling import CONSTANTS_AND_GRADIENT, ScalingLaw
from grpo_ustat.mse.second_moments import GroupGradients, is_uncertain, shift
from grpo_ustat.policy.scores.metric import adam_metric
from grpo_ustat.records import ScorePool

ROLLOUTS, GROUP_SIZE = 256, 8  # of the steps whose second moments v is
STYLES = 4


@dataclass(frozen=True)
class Kinds:
    """How many entries there are of each kind.

    Attributes:
        reward, style: common ones, moved by reward and style together or by the style alone.
        rare_reward, rare_style: rare ones, likewise.
        moved: how many of the rare ones each outcome of a prompt moves.
        loud: their size where they are moved.
    """

    reward: int = 20
    style: int = 0
    rare_reward: int = 0
    rare_style: int = 0
    moved: int = 4
    loud: float = 1.0


POLICIES = {
    "common": Kinds(),
    "mostly style": Kinds(reward=4, style=40),
    "few rare": Kinds(rare_reward=20, moved=2),
    "few rare of style": Kinds(rare_style=20, moved=2),
    "rare": Kinds(rare_reward=200),
    "rare and loud": Kinds(rare_reward=200, loud=5.0),
    "rare of style": Kinds(rare_style=200),
    "rare of style, loud": Kinds(rare_style=200, loud=5.0),
    "rarest": Kinds(rare_reward=1500, moved=6),
    "rarest of style": Kinds(rare_style=1500, moved=6),
}


class Population:
    """P prompts of Y = 2 x 4 outcomes, D entries.

    Args:
        kinds: of entries.
        count: P.
        rng: of chances, features and the scales of entries.
    """

    def __init__(self, kinds: Kinds, count: int, rng: np.random.Generator):
        value_P = rng.beta(1.5, 1.0, count)
        styles_PY = rng.dirichlet(np.full(STYLES, 2.0), count)
        right_P2 = np.stack([1 - value_P, value_P], axis=1)
        self.chance_PY = (right_P2[:, :, None] * styles_PY[:, None]).reshape(count, -1)
        self.reward_Y = np.repeat([0.0, 1.0], STYLES)
        shape = (count, 2, STYLES)
        common = rng.normal(size=(*shape, kinds.reward))
        common[:, 1, :, 0] += 0.5  # what right answers have in common
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
        mean_PD = np.einsum("py,pyd->pd", self.chance_PY, features_PYD)
        self.scores_PYD = features_PYD - mean_PD[:, None]

    def entries(self) -> dict[str, np.ndarray]:
        """C1, C2, C3 and (grad J)^2 of every entry, [D]."""
        value_P = self.chance_PY @ self.reward_Y
        centred_PY = self.reward_Y - value_P[:, None]
        g_PD = np.einsum("py,pyd->pd", self.chance_PY * self.reward_Y, self.scores_PYD)
        squares = np.square(self.scores_PYD)
        a_v = np.einsum("py,pyd->d", self.chance_PY * centred_PY**2, squares) / len(g_PD)
        variance_P = (self.chance_PY * centred_PY**2).sum(axis=1)
        d = np.einsum("p,py,pyd->d", variance_P, self.chance_PY, squares) / len(g_PD)
        g_sq, grad_sq = np.square(g_PD).mean(axis=0), np.square(g_PD.mean(axis=0))
        return {"c1": g_sq - grad_sq, "c2": a_v - g_sq, "c3": d + g_sq, "grad_sq": grad_sq}

    def draw(self, questions: int, completions: int, rng) -> tuple[np.ndarray, np.ndarray]:
        """Rewards [P, N] and scores [P, N, D] of the completions of new questions."""
        which = rng.choice(len(self.chance_PY), questions, replace=False)
        ends_PY = np.cumsum(self.chance_PY[which], axis=1)[:, None, :-1]
        outcome_PN = (rng.random((questions, completions, 1)) > ends_PY).sum(axis=2)
        scores_PND = np.take_along_axis(self.scores_PYD[which], outcome_PN[..., None], axis=1)
        return self.reward_Y[outcome_PN], scores_PND


def second_moments(entries: dict[str, np.ndarray]) -> np.ndarray:
    """E ghat_j^2 of a step of n rollouts in groups of G, [D]."""
    noise = GROUP_SIZE * entries["c1"] + entries["c2"] + entries["c3"] / (GROUP_SIZE - 1)
    return entries["grad_sq"] + noise / ROLLOUTS


def halves(rewards_PN: np.ndarray, scores_PND: np.ndarray) -> list[GroupGradients]:
    """The sums of the gradients of each half of the questions."""
    groups, found = rewards_PN.shape[1] // GROUP_SIZE, []
    for half in range(2):
        found.append(GroupGradients(groups))
        for z_N, s_ND in zip(rewards_PN[half::2], scores_PND[half::2], strict=True):
            z_KG = z_N[: groups * GROUP_SIZE].reshape(groups, GROUP_SIZE)
            weights_KG = (z_KG - z_KG.mean(axis=1, keepdims=True)) / (GROUP_SIZE - 1)
            u_KD = np.einsum("kg,kgd->kd", weights_KG, s_ND[: z_KG.size].reshape(*z_KG.shape, -1))
            found[-1].add({"w": torch.from_numpy(u_D)} for u_D in u_KD)
    return found


def study(rewards_PN: np.ndarray, scores_PND: np.ndarray) -> tuple[ClosedForm, float]:
    """The closed forms, each half of the questions in the metric of the other, and the shift."""
    gradients, prompts = halves(rewards_PN, scores_PND), ROLLOUTS // GROUP_SIZE
    scores_PND = scores_PND.copy()
    for half in range(2):
        metric = adam_metric({"w": gradients[1 - half].second_moments("w", prompts)})
        scores_PND[half::2] *= metric.of("w", 0, scores_PND.shape[2]).numpy()
    pool = ScorePool(
        rewards_PN=rewards_PN,
        gram_PNN=scores_PND @ scores_PND.transpose(0, 2, 1),
        lengths_PN=np.ones(rewards_PN.shape, dtype=np.int64),
        features_PNR=scores_PND.astype(np.float32),
        centred_sums_PR=np.einsum("pn,pnd->pd", centred(rewards_PN), scores_PND),
        metrics=2,
    )
    request = Request([], {}, len(rewards_PN), True, {})
    return closed_form(pool, request, "questions"), shift(gradients, prompts)


@dataclass(frozen=True)
class Coverage:
    """Shares of one case's studies: whose interval of G* holds that of AdamW; that warn of v; that
    warn of v or of heavy tails.
    """

    covered: float
    uncertain: float
    either: float


def coverage(name: str, questions: int, completions: int, count: int) -> Coverage:
    """Print a row of the table."""
    population = Population(POLICIES[name], 3000, np.random.default_rng(7))
    entries = population.entries()
    v = second_moments(entries)
    weight = np.divide(1, v, out=np.zeros_like(v), where=v > 0)

    def law(weight) -> ScalingLaw:
        return ScalingLaw.exact(
            *(float((entries[x] * weight).sum()) for x in CONSTANTS_AND_GRADIENT)
        )

    truth, rng = law(weight), np.random.default_rng(1)
    scale = truth.noise_scale(GROUP_SIZE).estimate
    rows = []
    for _ in range(count):
        found, moved = study(*population.draw(questions, completions, rng))
        best, held = found["gstar"], found[f"noise/{GROUP_SIZE}"]
        covers = [best.low <= truth.best_size() <= best.high, held.low <= scale <= held.high]
        warned = [is_uncertain(moved, best), found.tails.heavy]
        rows.append([*covers, math.isfinite(best.high), *warned, any(warned), best.estimate])
    covered, noise_covered, bounded, uncertain, heavy, either, _ = np.mean(rows, axis=0)
    print(
        f"| {name} | {questions} x {completions} | {law(np.ones_like(v)).best_size():.2f} "
        f"| {truth.best_size():.2f} | {np.nanmedian(rows, axis=0)[-1]:.2f} | {covered:.3f} "
        f"| {bounded:.2f} | {noise_covered:.3f} | {uncertain:.2f} | {heavy:.2f} |",
        flush=True,
    )
    return Coverage(float(covered), float(uncertain), float(either))


def main() -> None:
    """Print a table, and what the warning is worth."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    sizes = ["20x16", "60x16", "60x32", "120x32"]
    parser.add_argument("--sizes", nargs="+", default=sizes, help="questions x completions")
    parser.add_argument("--studies", type=int, default=200)
    options = parser.parse_args()
    columns = ["entries", "questions x completions", "G*, Euclidean", "G*", "median of G*"]
    columns += ["G* covers", "has an upper end", "n_c(8) covers", "v uncertain", "heavy tails"]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    cases = [
        coverage(name, *map(int, size.split("x")), options.studies)
        for name in options.policies
        for size in options.sizes
    ]
    for words, low, high in (("below .87", 0.0, 0.87), (".90 or more", 0.9, 1.1)):
        some = [case for case in cases if low <= case.covered < high]
        uncertain, either = (
            f"{np.mean(shares):.2f}" if some else "-"
            for shares in ([x.uncertain for x in some], [x.either for x in some])
        )
        print(f"covers {words}: {len(some)} cases; v uncertain {uncertain}, or heavy {either}")


if __name__ == "__main__":
    main()
