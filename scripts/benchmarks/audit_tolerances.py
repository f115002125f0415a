"""Measure rounding differences between applied and declared gradients, and audit alarms.

    python scripts/benchmarks/audit_tolerances.py [--batches 600] [--policies tiny_base tiny]

Each batch has 1 to 4 prompts with 8 completions each from an embedded policy, random 0/1 rewards,
and one of TRL's losses and scalings. A plain PyTorch loop accumulates the gradient over 1 to 8
micro-batches in random order. The precisions are float32, autocast to bfloat16, and bfloat16
weights with and without autocast. Scores are computed in the same precision.

For each precision the script prints quantiles of |ratio - 1|, of 1 - cosine and of x = ||p - d|| /
sqrt(||d||^2 + sum_i W_i^2 ||s_i||^2). Here p is the applied gradient and d the declared gradient.
An audit gives an alarm if x exceeds the epsilon of `estimators.applied_gradient`. The script also
prints the number of alarms, and how often an audit detects planted errors: an applied gradient that
is multiplied by a factor, or rotated so that its cosine is lower.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo_ustat
from grpo_ustat import Loss, UpdateRows, completion_scores
from grpo_ustat.estimators.applied_gradient import FULL, REDUCED, VANISHES, compared, rounding
from grpo_ustat.policy.scores.backward import parameter_sizes
from grpo_ustat.policy.scores.sketch import Sketch

ASSETS = Path(grpo_ustat.__file__).parent / "assets"
PRECISIONS = ("float32", "autocast", "bfloat16", "bfloat16 autocast")
BASELINE_NAMES = {"group_std": {"epsilon": 1e-4}, "batch_std": {"epsilon": 1e-4}, "group_mean": {}}
KINDS = ("dapo", "grpo", "dr_grpo", "luspo")
MAX_LENGTH, GROUP, PROMPTS = 40, 8, 24
FACTORS = {FULL: (1.001, 1.002, 1.005), REDUCED: (0.5, 0.75, 1.2, 1.5, 2)}
COSINES = {FULL: (1 - 1e-6, 1 - 1e-5, 1 - 1e-4), REDUCED: (0.98, 0.95, 0.9, 0.8)}


class Pool(NamedTuple):
    """Completions of a policy, and their scores with all entries."""

    # Model in the pool's precision.
    model: torch.nn.Module
    # Token ids and masks of all PROMPTS x GROUP rows.
    ids: torch.Tensor
    attention: torch.Tensor
    completion: torch.Tensor
    # [rows, parameters]
    scores: np.ndarray
    # Sketch that is large enough to keep all entries of a gradient.
    sketch: Sketch


def pool(policy, precision, rng):
    """Sample completions in float32, and score them in the loss's precision."""
    model = AutoModelForCausalLM.from_pretrained(ASSETS / policy, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / policy)
    texts = [f"{rng.integers(1, 99)}+{rng.integers(1, 99)}=" for _ in range(PROMPTS)]
    tokens = [tokenizer(text).input_ids for text in texts]
    width = max(map(len, tokens))
    head_PL = torch.tensor([[0] * (width - len(t)) + t for t in tokens])
    mask_PL = torch.tensor([[0] * (width - len(t)) + [1] * len(t) for t in tokens])
    head_BL, mask_BL = (x.repeat_interleave(GROUP, dim=0) for x in (head_PL, mask_PL))
    with torch.no_grad():
        ids_BT = model.generate(
            input_ids=head_BL, attention_mask=mask_BL, do_sample=True, top_k=0,
            max_new_tokens=MAX_LENGTH, pad_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
    ended_BT = ids_BT[:, width:] == tokenizer.eos_token_id
    written_BT = ((ended_BT.cumsum(dim=1) - ended_BT.long()) == 0).long()
    completion_BT = torch.cat([torch.zeros_like(mask_BL), written_BT], dim=1)
    rows = ids_BT, torch.cat([mask_BL, written_BT], dim=1), completion_BT
    if precision.startswith("bfloat16"):
        model = model.bfloat16()
    sketch = Sketch(parameter_sizes(model), 10**7)
    with autocast_of(precision):
        scores = [
            completion_scores(model, *(x[i : i + GROUP] for x in rows), features=sketch).features_BR
            for i in range(0, PROMPTS * GROUP, GROUP)
        ]
    return Pool(model, *rows, torch.cat(scores).float().numpy(), sketch)


def autocast_of(precision):
    """Return a context of autocast to bfloat16, enabled if the precision includes autocast."""
    return torch.autocast("cpu", torch.bfloat16, enabled=precision.endswith("autocast"))


def applied(model, rows, parts, precision):
    """Accumulate the gradient of sum_i W_i log pi(y_i) in a plain loop over micro-batches."""
    model.zero_grad()
    for part in parts:
        ids, attention, completion = rows.part(part)
        positions = (attention.cumsum(dim=1) - 1).clamp(min=0)
        with autocast_of(precision):
            logits = model(input_ids=ids, attention_mask=attention, position_ids=positions).logits
        logprobs = logits[:, :-1].float().log_softmax(dim=-1)
        chosen = logprobs.gather(2, ids[:, 1:, None])[..., 0] * completion[:, 1:]
        weights = torch.from_numpy(rows.weights_B[part]).float()
        (-(chosen.sum(dim=1) * weights).sum()).backward()
    return {name: -p.grad for name, p in model.named_parameters()}


def measured(policy, precision, batches, seed):
    """Compute ratio, cosine and sqrt(1 + sum_i W_i^2 ||s_i||^2 / ||d||^2) by batch, [N, 3]."""
    rng = np.random.default_rng([seed, PRECISIONS.index(precision)])
    torch.manual_seed(seed)
    drawn, results = pool(policy, precision, rng), []
    while len(results) < batches:
        prompts = rng.choice(PROMPTS, size=int(rng.integers(1, 5)), replace=False)
        rewards = rng.random((len(prompts), GROUP)) < rng.choice([0.1, 0.5, 0.9])
        if not (rewards != rewards[:, :1]).any():
            continue
        index = (prompts[:, None] * GROUP + np.arange(GROUP)).ravel()
        baseline = str(rng.choice(list(BASELINE_NAMES)))
        loss = Loss("drawn", baseline, BASELINE_NAMES[baseline], str(rng.choice(KINDS)), MAX_LENGTH)
        rows = UpdateRows.of_loss(
            loss, rewards.astype(float), drawn.ids[index], drawn.attention[index],
            drawn.completion[index],
        )  # fmt: skip
        parts = np.array_split(rng.permutation(len(index)), int(rng.choice([1, 2, 4, 8])))
        gradient = applied(drawn.model, rows, parts, precision)
        applied_R = drawn.sketch.of(gradient).double().numpy()
        scores_BR = drawn.scores[index].astype(np.float64)
        declared_R = rows.weights_B @ scores_BR
        rows_sq = rows.weights_B**2 @ np.square(scores_BR).sum(axis=1)
        pair = compared(applied_R, declared_R)
        results.append((*pair, rounding(1, float(declared_R @ declared_R), float(rows_sq))))
    return np.array(results)


def difference(ratio, cosine):
    """Compute ||p - d|| / ||d|| from ratio and cosine."""
    return np.hypot(ratio - 1, ratio * np.sqrt(np.maximum(0, 1 - cosine**2)) / np.abs(cosine))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--batches", type=int, default=600, help="number of batches per policy and precision"
    )
    parser.add_argument("--policies", nargs="+", default=["tiny_base", "tiny", "tiny_direct"])
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS, choices=PRECISIONS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for precision in args.precisions:
        parts = [measured(policy, precision, args.batches, args.seed) for policy in args.policies]
        epsilon = FULL if precision == "float32" else REDUCED
        # Gradients that are 0 up to rounding are skipped, as in an audit.
        parts = [part[epsilon * part[:, 2] < VANISHES] for part in parts]
        together = np.concatenate(parts)
        names = [*args.policies, "together"]
        for policy, part in zip(names, [*parts, together], strict=True):
            ratio, cosine, size = part.T
            x = difference(ratio, cosine) / size
            ends = [
                "/".join(f"{np.quantile(values, q):.1e}" for q in (0.5, 0.99, 1))
                for values in (np.abs(ratio - 1), 1 - cosine, x)
            ]
            print(
                f"{precision} {policy}, median/99 %/most: |ratio - 1| {ends[0]}, 1 - cosine "
                f"{ends[1]}, x {ends[2]}; {(x > epsilon).sum()} alarms of {len(x)} compared",
                flush=True,
            )
        ratio, cosine, size = together.T
        tolerance = epsilon * size
        for factor in FACTORS[epsilon]:
            is_detected = difference(factor * ratio, cosine) > tolerance
            print(f"  a factor of {factor:g} is detected in {is_detected.mean():.1%}", flush=True)
        for low in COSINES[epsilon]:
            is_detected = difference(ratio, cosine * low) > tolerance
            print(
                f"  a cosine lowered to {low:g} is detected in {is_detected.mean():.1%}", flush=True
            )


if __name__ == "__main__":
    main()
