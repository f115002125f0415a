"""Warnings if the policy in TRL's loss is not the policy that wrote the completions.

TRL's loss, and therefore the scores, use the softmax of all logits at `temperature`. Arguments such
as `top_p` and active dropout change the distribution from which TRL samples. The policy in the loss
then differs from the policy that wrote the completions. The measured noise is still the noise of
the gradient that TRL applies, but this gradient is not the gradient of the expected reward of the
sampled completions.

Such a difference is found in two ways: from the trainer's arguments, and from the mean score. The
expected score is 0 if the scored policy wrote the completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_ustat.estimators.intervals import Interval, jackknife_interval
from grpo_ustat.policy.dropout import active_dropout
from grpo_ustat.records import Array

# Minimum number of groups for an interval of the mean score. With fewer groups, too many intervals
# were above 0 in simulations in which the scored policy had written the completions.
MIN_GROUPS = 8
CUT = "excludes tokens when TRL samples"
MOVED = "changes probabilities when TRL samples"
# For each sampling argument: its effect on the distribution, and the values without an effect.
NEUTRAL: dict[str, tuple[str, tuple[Any, ...]]] = {
    "top_k": (CUT, (None, -1, 0)),
    "top_p": (CUT, (None, 1)),
    "min_p": (CUT, (None, 0)),
    "typical_p": (CUT, (None, 1)),
    "epsilon_cutoff": (CUT, (None, 0)),
    "eta_cutoff": (CUT, (None, 0)),
    "top_h": (CUT, (None,)),
    "no_repeat_ngram_size": (CUT, (None, 0)),
    "bad_words_ids": (CUT, (None,)),
    "bad_words": (CUT, (None, [])),
    "suppress_tokens": (CUT, (None, [])),
    "begin_suppress_tokens": (CUT, (None, [])),
    "allowed_token_ids": (CUT, (None,)),
    "structured_outputs": (CUT, (None,)),
    "min_length": (CUT, (None, 0)),
    "min_new_tokens": (CUT, (None, 0)),
    "min_tokens": (CUT, (None, 0)),
    "repetition_penalty": (MOVED, (None, 1)),
    "encoder_repetition_penalty": (MOVED, (None, 1)),
    "presence_penalty": (MOVED, (None, 0)),
    "frequency_penalty": (MOVED, (None, 0)),
    "exponential_decay_length_penalty": (MOVED, (None,)),
    "sequence_bias": (MOVED, (None,)),
    "logit_bias": (MOVED, (None, {})),
    "guidance_scale": (MOVED, (None, 1)),
    "do_sample": (CUT, (None, True)),
    "num_beams": (CUT, (None, 1)),
}  # fmt: skip


def sampling_warnings(trainer: Any) -> list[str]:
    """Return a warning for each argument that changes a `GRPOTrainer`'s sampling distribution.

    Active dropout adds one more warning.
    """
    arguments = {name: getattr(trainer, name, None) for name in NEUTRAL}
    arguments["structured_outputs"] = getattr(trainer.args, "vllm_structured_outputs_regex", None)
    kwargs = arguments | (getattr(trainer.args, "generation_kwargs", None) or {})
    neutral = NEUTRAL | {"temperature": (MOVED, (None, trainer.temperature))}
    sentences = []
    for name, (effect, values) in neutral.items():
        if kwargs.get(name) not in values:
            sentences.append(
                f"{name}={kwargs[name]} {effect}, but not in its loss. C1, C2 and C3 describe the "
                "gradient that TRL applies, which is not the gradient of the sampled reward. Use "
                f"{name}={values[-1]}, or remove the argument."
            )
    if dropout := active_dropout(trainer.model):
        name, rate = dropout
        masks = "without dropout" if getattr(trainer, "use_vllm", False) else "with other masks"
        sentences.append(
            f"{name} is {rate}. TRL computes its loss with dropout. The scores therefore use "
            "dropout too, with separate masks for each completion, and C1, C2 and C3 include the "
            f"noise of the masks. TRL samples {masks}, so the applied gradient is not exactly the "
            "gradient of the sampled reward."
        )
    return sentences


def mean_score_share(grams_PGG: Sequence[Array]) -> Interval:
    """Estimate E||E[s | x]||^2, the squared mean score of a prompt, as a share of E||s||^2.

        T / q,   T = mean over groups of sum_{i != j} <s_i, s_j> / (G (G-1)),   q = mean ||s_i||^2

    Here s_i is the score of completion i of a group, and x is the prompt. T is an unbiased estimate
    of E||E[s | x]||^2, which is 0 if the scored policy wrote the completions. An interval above 0
    therefore shows that another policy wrote them. An interval that covers 0 proves nothing: if the
    policy is peaked, a change in the probabilities of the unlikely tokens hardly changes the mean
    score.

    The rate of false alarms was simulated with scored policies that had written the completions:
    softmax policies over 12 tokens, from flat to peaked, with 4000 batches per case. With 8 to 64
    groups of 2 to 16 completions, at most 1.5 % of the intervals were above 0; the one exception
    was 8 groups of 2 completions, with 4.3 %. With 4 groups, up to 31 % of the intervals were above
    0.

    Args:
        grams_PGG: inner products <s_i, s_j> within each group, for all groups of one or more
            batches. Groups with equal rewards must be included, because without them the
            completions are not a random sample of the policy.

    Returns:
        The share with a jackknife interval over groups. The upper end is at least 0, because the
        share cannot be negative. The ends are infinite if there are fewer than 8 groups, or if only
        one group has nonzero scores. The estimate is NaN if all scores are 0.
    """
    diagonals_P = np.array([gram.trace() for gram in grams_PGG])
    sums_P = np.array([gram.sum() for gram in grams_PGG])
    sizes_P = np.array([len(gram) for gram in grams_PGG])
    above_P = (sums_P - diagonals_P) / (sizes_P * (sizes_P - 1))
    below_P = diagonals_P / sizes_P
    if not below_P.sum() > 0:
        return Interval(np.nan, -np.inf, np.inf)
    share = float(above_P.sum() / below_P.sum())
    rest_P = below_P.sum() - below_P
    if len(sizes_P) < MIN_GROUPS or not (rest_P > 0).all():
        return Interval(share, -np.inf, np.inf)
    interval = jackknife_interval(share, ((above_P.sum() - above_P) / rest_P)[None])
    return interval._replace(high=max(0.0, interval.high))


def mean_score_warning(share: Interval) -> list[str]:
    """Warn if `mean_score_share` shows that the scored policy did not write the completions."""
    if not share.low > 0:
        return []
    value, low, high = (100 * x for x in share)
    return [
        "The mean gradient of a completion's log-probability is not 0: its squared norm is "
        f"{value:.1f} % [{low:.1f}, {high:.1f}] of the mean squared norm. Another policy therefore "
        "wrote these completions, and the applied gradient is not the gradient of the sampled "
        "reward. Check dropout, the sampling arguments, and the weights in the sampler. In groups "
        "of 2 or 3, the relative error of C2 and C3 is about this share."
    ]
