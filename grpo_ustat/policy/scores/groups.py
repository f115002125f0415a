"""Inner products of scores within a group, and of gradient estimates of different groups.

The score of a completion is the gradient of its log-probability. Gradients are too large to be
kept, so each is projected to a short vector, its sketch; see `scores.sketch`.
"""

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

    # Squared norm of each completion's score.
    sq_norm_G: Array
    # Squared norm of the gradient estimate, ||ghat||^2.
    ghat_sq: float
    # Sketch of ghat, with R entries.
    ghat_R: Array


@dataclass(frozen=True)
class GroupScores:
    """Inner products and sketches of the scores of one prompt's group."""

    # Inner products <s_i, s_j> of scores, float64. They are exact if completions i and j were
    # scored in the same call of `score_rollouts`; otherwise they are unbiased estimates from
    # sketches.
    gram_GG: Array
    # Sketch of each score, with R entries. If the model has at most R parameters, the sketch is the
    # score itself.
    features_GR: npt.NDArray[np.float32]

    def gradient(self, weights_G: Array) -> GroupGradient:
        """Return the gradient estimate `ghat = sum_i w_i s_i`.

        Args:
            weights_G: weights w_i, such as the leave-one-out weights of `pool_gradient_weights`.
        """
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
    """Compute inner products and sketches of the scores of one prompt's completions.

    Args:
        policy: policy whose log-probabilities are differentiated.
        rollouts: prompts and their completions.
        p: index of the prompt in the rollouts.
        temperature: temperature that divides the logits.
        sketch: projection of scores to R entries.
        at_once: number of completions per call of `score_rollouts`.
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
    """Compute the inner products <ghat_x, ghat_y> of the prompts' gradient estimates, [P, P].

    The diagonal comes from the inner products of each group's scores. The other entries are
    unbiased estimates from sketches.
    """
    ghat_PR = np.stack([group.ghat_R for group in groups_P])
    gram_PP = ghat_PR @ ghat_PR.T
    np.fill_diagonal(gram_PP, [group.ghat_sq for group in groups_P])
    return gram_PP
