"""Inner products and sketches of a group's scores, and inner products between groups' gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from grpo_ustat.policy.loading import Policy
from grpo_ustat.policy.scores.by_layer import LayerWeights
from grpo_ustat.policy.scores.rollouts import score_rollouts
from grpo_ustat.policy.scores.sketch import Sketch
from grpo_ustat.records import Array, Rollouts


@dataclass(frozen=True)
class GroupGradient:
    """Score norms of one prompt's group, and a sketch of its gradient estimate ghat."""

    # Squared score norms.
    sq_norm_G: Array
    # ||ghat||^2.
    ghat_sq: float
    # Sketch of ghat.
    ghat_R: Array


@dataclass(frozen=True)
class GroupScores:
    """Inner products and sketches of the scores of one prompt's group.

    Full gradients, with an entry for every parameter, are not kept.
    """

    # <s_i, s_j>, float64; exact if completions i and j were scored in the same pass, otherwise
    # estimated without bias from sketches.
    gram_GG: Array
    # Sketches of the scores; a sketch is the full score if the model has at most R parameters.
    features_GR: npt.NDArray[np.float32]

    def gradient(self, weights_G: Array) -> GroupGradient:
        """Return `ghat = sum_i w_i s_i`; `pool_gradient_weights` returns leave-one-out weights."""
        ghat_sq = float(weights_G @ self.gram_GG @ weights_G)
        return GroupGradient(np.diagonal(self.gram_GG), ghat_sq, weights_G @ self.features_GR)


def group_scores(
    policy: Policy,
    rollouts: Rollouts,
    p: int,
    temperature: float,
    sketch: Sketch,
    at_once: int,
    images: Mapping[str, torch.Tensor] | None = None,
    layer_weights: LayerWeights | None = None,
    drops: bool = False,
) -> GroupScores:
    """Score the completions of prompt `p`.

    Args:
        p: index of the prompt in the rollouts.
        temperature: temperature that divides the logits.
        at_once: number of completions per pass through the model.
        images, layer_weights, drops: see `completion_scores`.
    """
    size = rollouts.mask_PGT.shape[1]
    features, grams = [], []
    for part in np.split(np.arange(size), range(at_once, size, at_once)):
        scores = score_rollouts(
            policy,
            rollouts,
            p * size + part,
            temperature,
            gram=True,
            features=sketch,
            images=images,
            layer_weights=layer_weights,
            drops=drops,
        )
        assert scores.features_BR is not None and scores.gram_BB is not None
        features.append(scores.features_BR.cpu().numpy())
        grams.append((part, scores.gram_BB.cpu().numpy()))
    features_GR = np.concatenate(features)
    gram_GG = features_GR @ features_GR.T
    for part, gram in grams:
        gram_GG[np.ix_(part, part)] = gram
    return GroupScores(gram_GG, features_GR.astype(np.float32))


def gradient_gram(groups_P: Sequence[GroupGradient]) -> Array:
    """Compute <ghat_x, ghat_y>, [P, P].

    The diagonal is exact; the other entries are unbiased estimates from sketches.
    """
    ghat_PR = np.stack([group.ghat_R for group in groups_P])
    gram_PP = ghat_PR @ ghat_PR.T
    np.fill_diagonal(gram_PP, [group.ghat_sq for group in groups_P])
    return gram_PP
