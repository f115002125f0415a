"""Correlate verl's logit-space weight of a completion with its exact squared score norm.

    python scripts/tools/logit_weight.py model=tiny_base study.questions=100 pool=pools/tiny_base

The arguments are overrides of `mse`; missing completions are added to the pool. A pool stores
tokens and scores but no probabilities, so the model reads each completion once more, in a forward
pass only. The weight is the sum over tokens of 1 - 2 pi(token) + sum_v pi(v)^2, which is the
squared norm of the gradient of log pi with respect to the token's logits (verl, `docs/algo/otb.md`
and its metrics `variance_proxy`), computed at the sampling temperature. The script prints Spearman
correlations with the squared score norm, over the completions of each prompt, for the weight and,
for comparison, for the completion length.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from grpo_ustat.cli.compose import compose_config
from grpo_ustat.estimators.proxies import within_correlation
from grpo_ustat.mse.pool import build_pool
from grpo_ustat.mse.pool_store import PoolStore, draws_of
from grpo_ustat.mse.study import _prompts
from grpo_ustat.policy.configured import configured_policy
from grpo_ustat.policy.logprobs import left_padded, positions, widen


def logit_weights(logits_BTV: torch.Tensor, tokens_BT: torch.Tensor) -> torch.Tensor:
    """Compute 1 - 2 pi(token) + sum_v pi(v)^2 of each token, [B, T]."""
    probabilities_BTV = logits_BTV.softmax(dim=-1)
    chosen_BT = probabilities_BTV.gather(2, tokens_BT[:, :, None])[:, :, 0]
    return 1 - 2 * chosen_BT + probabilities_BTV.square().sum(dim=-1)


def main() -> None:
    """Print the correlations."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "override", nargs="*", help="overrides as for `mse`, key=value, including pool=DIR"
    )
    config = compose_config("mse", parser.parse_args().override)
    if not config.pool:
        parser.error("pool=DIR is missing: give the folder in which the completions are kept")
    prompts, _ = _prompts(config)
    pool, _ = build_pool(config, prompts, Path(config.pool))
    policy, store = (
        configured_policy(config.policy_options),
        PoolStore(Path(config.pool), draws_of(config)),
    )
    size, rows = config.budget.pool_completions, []
    for prompt, ids in zip(
        prompts, policy.encode([prompt.text for prompt in prompts]), strict=True
    ):
        parts = [store.read(prompt, *part) for part in store.parts([prompt])[0]]
        weights_N: list[float] = []
        for part in parts:
            width = int(part.lengths_N.max())
            tokens_NT = torch.from_numpy(part.tokens_NT[:, :width].astype(np.int64))
            mask_NT = (
                torch.arange(width) < torch.from_numpy(part.lengths_N.astype(np.int64))[:, None]
            )
            heads, head_mask = left_padded(
                [ids] * len(tokens_NT), policy.pad_token, tokens_NT.device
            )
            attention = torch.cat([head_mask, mask_NT.to(head_mask.dtype)], dim=1)
            with torch.inference_mode():
                logits = policy.model(
                    input_ids=torch.cat([heads, tokens_NT], dim=1).to(policy.model.device),
                    attention_mask=attention.to(policy.model.device),
                    position_ids=positions(attention).to(policy.model.device),
                    logits_to_keep=width + 1, use_cache=False,
                ).logits[:, :-1]  # fmt: skip
            each_NT = logit_weights(widen(logits).cpu() / config.temperature, tokens_NT)
            weights_N += (each_NT * mask_NT).sum(dim=1).tolist()
        rows.append(weights_N[:size])
    proxies = {"logit weight": np.array(rows), "length": pool.lengths_PN.astype(float)}
    for name, values_PN in proxies.items():
        estimate, low, high = within_correlation(values_PN, pool.sq_norm_PN)
        print(f"{name:13} {estimate:6.3f} [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    main()
