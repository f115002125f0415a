"""Scores of sampled completions, with one computation for equal completions.

The score of a completion is the gradient of its log-probability. For a completion with several
turns, it is the sum of the scores of the turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from grpo_ustat.policy.loading import Policy
from grpo_ustat.policy.logprobs import Rows, pack
from grpo_ustat.policy.memory import GRAPH_MEMORY_SHARE, free_bytes, score_bytes
from grpo_ustat.policy.output_layer import body, causal
from grpo_ustat.policy.prompt_sharing import can_read_contiguous
from grpo_ustat.policy.scores.backward import CompletionScores, completion_scores
from grpo_ustat.policy.scores.by_layer import LayerWeights
from grpo_ustat.policy.scores.sketch import Sketch
from grpo_ustat.policy.scores.turns import split_turns
from grpo_ustat.records import Rollouts

# Overhead of one call of a layer, expressed as the number of multiplications in the same time.
PRODUCTS_OF_A_LAYER = {"cpu": 3e7, "cuda": 1e11}


def score_rollouts(
    policy: Policy,
    rollouts: Rollouts,
    index: np.ndarray,
    temperature: float,
    *,
    token_weights_BT: np.ndarray | None = None,
    weights_KB: np.ndarray | None = None,
    gram: bool = False,
    features: Sketch | None = None,
    pooled: Sketch | None = None,
    images: Mapping[str, torch.Tensor] | None = None,
    layer_weights: LayerWeights | None = None,
    drops: bool = False,
) -> CompletionScores:
    """Compute scores of the completions with the given indices, in the order of the indices.

    If autograd's graph of the whole model would need more than half of the free memory, scores are
    computed layer by layer. Without dropout, equal completions of a prompt have equal scores, so
    their score is computed once and weighted by the sum of their weights. Completions of similar
    length are read in the same forward pass; see `pass_sizes`. If completions have several turns,
    each turn is a row of its own, and the scores of a completion's rows are summed.

    Args:
        policy: policy whose log-probabilities are differentiated.
        rollouts: prompts and their completions.
        index: flat indices p*G + i of completion i of prompt p, [B].
        temperature: temperature that divides the logits.
        token_weights_BT: weights of the tokens' log-probabilities in a score; None for weights 1.
        weights_KB, gram, features, pooled, drops: see `completion_scores`.
        images: model inputs from the prompt's images; see `completion_scores`. They are allowed
            only if all completions belong to one prompt.
        layer_weights: see `completion_scores`. If given, all completions are read in one pass.
    """
    if rollouts.turn_PGT is not None:
        # Only completions that were read from files have turns. They have no images, and callers
        # pass no layer weights for them.
        assert not images and layer_weights is None
        rows = split_turns(rollouts, index)
        scores = score_rollouts(
            policy, rows.rollouts, np.arange(rows.count), temperature,
            token_weights_BT=None if token_weights_BT is None else rows.by_row(token_weights_BT),
            weights_KB=None if weights_KB is None else weights_KB[:, rows.completion_R],
            gram=True, features=features, pooled=pooled, drops=drops,
        )  # fmt: skip
        return rows.summed(scores, len(index))
    size = rollouts.mask_PGT.shape[1]
    assert not images or len(set(index // size)) == 1, "images belong to one prompt"
    first = place_B = np.arange(len(index))
    if not drops:
        first, place_B = distinct(rollouts, index, token_weights_BT)
    prompt_U = np.array([len(rollouts.prompt_tokens[i // size]) for i in index[first]])
    length_U = rollouts.lengths_PG.ravel()[index[first]]
    passes = [len(first)]
    if layer_weights is None:
        order = np.argsort(prompt_U + length_U, kind="stable")
        passes = pass_sizes((prompt_U + length_U)[order], tokens_of_overhead(policy.model))
        if len(passes) > 1:
            first, place_B = first[order], np.argsort(order)[place_B]
            prompt_U, length_U = prompt_U[order], length_U[order]
    rows = pack(rollouts, index[first], policy.pad_token, policy.model.device)
    if token_weights_BT is not None:
        rows = _weighed(rows, token_weights_BT[first], policy.model.dtype)
    scores = completion_scores(
        policy.model, rows.input_ids_BT, rows.attention_mask_BT, rows.completion_mask_BT,
        weights_KB=None if weights_KB is None else _merged(weights_KB, place_B, len(first)),
        gram=gram, temperature=temperature, features=features, pooled=pooled,
        by_layer=layer_weights is not None
        or _graph_is_large(policy.model, passes, prompt_U, length_U),
        layer_weights=layer_weights, passes=passes, contiguous=can_read_contiguous(policy),
        images=images, drops=drops,
    )  # fmt: skip
    gram_BB, features_BR = scores.gram_BB, scores.features_BR
    place = torch.from_numpy(place_B).to(policy.model.device)
    return replace(
        scores,
        sq_norm_B=scores.sq_norm_B[place],
        gram_BB=None if gram_BB is None else gram_BB[place][:, place],
        features_BR=None if features_BR is None else features_BR[place],
    )


def _weighed(rows: Rows, weights_UT: np.ndarray, dtype: torch.dtype) -> Rows:
    """Return the rows with their completion masks multiplied by token weights.

    The masks become numbers of the type of the log-probabilities, float32 or wider.
    """
    mask_UT = rows.completion_mask_BT.to(torch.promote_types(dtype, torch.float32))
    mask_UT[:, -rows.width :] *= torch.from_numpy(weights_UT[:, : rows.width]).to(mask_UT)
    return replace(rows, completion_mask_BT=mask_UT)


def _merged(weights_KB: np.ndarray, place_B: np.ndarray, count: int) -> torch.Tensor:
    """Sum the weights of equal completions.

    Args:
        weights_KB: K sets of weights of the B completions.
        place_B: index of each completion among the distinct completions.
        count: number of distinct completions.

    Returns:
        K sets of weights of the distinct completions, [K, count].
    """
    merged = np.zeros((len(weights_KB), count))
    # NumPy's type stub of `at` does not allow tuples of indices.
    np.add.at(merged, (slice(None), place_B), weights_KB)  # pyright: ignore[reportArgumentType]
    return torch.from_numpy(merged)


def _graph_is_large(
    model: PreTrainedModel, passes: list[int], prompt_U: np.ndarray, length_U: np.ndarray
) -> bool:
    """Return True if the graphs of all passes would need more than half of the free memory.

    Args:
        model: model that reads the rows.
        passes: number of rows in each pass.
        prompt_U, length_U: number of prompt and completion tokens of each of the U rows.
    """
    parts = np.split(np.arange(len(prompt_U)), np.cumsum(passes)[:-1])
    read = sum(len(part) * int(prompt_U[part].max() + length_U[part].max()) for part in parts)
    needed = score_bytes(model, read, by_layer=False)
    return needed > GRAPH_MEMORY_SHARE * free_bytes(model.device)


def pass_sizes(tokens_U: np.ndarray, overhead: float) -> list[int]:
    """Divide rows into forward passes so that the total cost is minimal.

    A pass with rows of similar length needs less padding, but each pass has a fixed cost. The cost
    of a pass, in tokens, is this fixed cost plus its number of rows times its longest row's length.

    Args:
        tokens_U: number of tokens in each of U rows, including the prompt, in ascending order.
        overhead: fixed cost of a pass, in tokens.

    Returns:
        Number of rows in each pass.
    """
    count = len(tokens_U)
    cost, before = np.zeros(count + 1), np.zeros(count + 1, dtype=int)
    for stop in range(1, count + 1):
        starts = np.arange(stop)
        costs = cost[:stop] + (stop - starts) * tokens_U[stop - 1] + overhead
        before[stop], cost[stop] = costs.argmin(), costs.min()
    sizes = []
    while count > 0:
        sizes.append(int(count - before[count]))
        count = before[count]
    return sizes[::-1]


def tokens_of_overhead(model: PreTrainedModel) -> float:
    """Return the fixed cost of a pass, expressed as a number of tokens."""
    below = body(causal(model))
    embeddings = {
        id(p) for m in below.modules() if isinstance(m, nn.Embedding) for p in m.parameters()
    }
    weights = sum(p.numel() for p in below.parameters() if id(p) not in embeddings)
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    return PRODUCTS_OF_A_LAYER[model.device.type] * layers / weights


def distinct(
    rollouts: Rollouts, index: np.ndarray, token_weights_BT: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Find the distinct ones among the completions with the given flat indices.

    Completions are distinct if their prompts, tokens, scored tokens or token weights differ.

    Returns:
        Position in `index` of each of the U distinct completions, [U], and, for each of the B
        completions, the number (0 to U - 1) of the distinct completion that it equals, [B].
    """
    size, width = rollouts.mask_PGT.shape[1:]
    tokens_NT = np.where(rollouts.mask_PGT, rollouts.tokens_PGT, -1).reshape(-1, width)[index]
    keyed = np.column_stack([index // size, tokens_NT])
    if rollouts.scored_PGT is not None:
        keyed = np.column_stack([keyed, rollouts.scored_PGT.reshape(-1, width)[index]])
    if token_weights_BT is not None:
        keyed = np.column_stack([keyed, token_weights_BT.view(np.int64)])
    _, first, place_B = np.unique(keyed, axis=0, return_index=True, return_inverse=True)
    return first, place_B.ravel()
