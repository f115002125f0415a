"""Where the score norm of a policy lies: `python scripts/tools/describe_tiny.py tiny_base tiny`.

For completions of study questions, the share of E q = E||score||^2 on tokens that decide the answer
(digits of results and of the final answer, with the token that ends each) and on the others
(wording, spaces, order of steps, operands). Which part a token belongs to depends only on what
precedes it, so the two scores are uncorrelated and the shares add up to one but for sampling
noise.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from worked_solutions import decides_answer

from grpo_ustat.estimators.intervals import clustered_mean
from grpo_ustat.policy.loading import Policy, load_policy
from grpo_ustat.policy.logprobs import pack
from grpo_ustat.policy.scores.backward import completion_scores
from grpo_ustat.records import Rollouts
from grpo_ustat.rollout.local import Sampling, sample
from grpo_ustat.tasks.arithmetic import Arithmetic, Ranges
from grpo_ustat.tasks.base import NumberJudge, Task, summed_rewards
from grpo_ustat.tasks.prompts import Prompting


def deciding_mask(rollouts: Rollouts, prompt: int, reasons: bool) -> torch.Tensor:
    """1 on the tokens that decide the answer, [G, T]; one token is one character."""
    width = rollouts.mask_PGT.shape[2]
    mask = torch.zeros(rollouts.mask_PGT.shape[1], width, dtype=torch.int64)
    for row, text in enumerate(rollouts.texts_PG[prompt]):
        marks = torch.tensor(decides_answer(text, reasons)[:width], dtype=torch.int64)
        mask[row, : len(marks)] = marks
    return mask


def parts(policy: Policy, rollouts: Rollouts, prompt: int, reasons: bool) -> np.ndarray:
    """Squared norms of (whole score, deciding part, rest), shape [3, G]."""
    count = rollouts.mask_PGT.shape[1]
    rows = pack(rollouts, np.arange(prompt * count, (prompt + 1) * count), policy.pad_token, "cpu")
    whole = rows.completion_mask_BT
    deciding = torch.zeros_like(whole)
    deciding[:, -rows.width :] = deciding_mask(rollouts, prompt, reasons)[:, : rows.width]
    deciding *= whole
    masks = (whole, deciding, whole - deciding)
    return np.array(
        [
            completion_scores(
                policy.model, rows.input_ids_BT, rows.attention_mask_BT, mask
            ).sq_norm_B.numpy()
            if mask.any()
            else np.zeros(count)
            for mask in masks
        ]
    )


def describe(name: str, questions: int, completions: int) -> None:
    """Print one policy's shares, with an interval over questions."""
    policy = load_policy(f"embedded:{name}")
    source = Arithmetic(Ranges(), {"study": questions}, seed=0)
    task = Task(source, Prompting("{question}="), NumberJudge())
    prompts = task.prompts("study")
    rollouts = sample(policy, prompts, completions, Sampling(0, "describe", 96))
    found = np.array([parts(policy, rollouts, p, name != "tiny_direct") for p in range(questions)])
    whole, deciding, free = found.transpose(1, 0, 2)
    z = summed_rewards(task, rollouts)
    ratio = deciding.mean() / whole.mean()
    share = clustered_mean(ratio + (deciding - ratio * whole) / whole.mean())  # linearised ratio
    right, wrong = whole[z == 1].mean(), whole[z == 0].mean()
    tokens = rollouts.lengths_PG.mean()
    accuracy = clustered_mean(z)
    print(
        f"{name}: accuracy {accuracy.estimate:.3f} [{accuracy.low:.3f}, {accuracy.high:.3f}], "
        f"{tokens:.1f} tokens; E q = {whole.mean():.0f}, on answer-deciding tokens "
        f"{share.estimate:.3f} [{share.low:.3f}, {share.high:.3f}], on the others "
        f"{free.mean() / whole.mean():.3f}; E[q|right] = {right:.0f}, E[q|wrong] = {wrong:.0f} "
        f"({questions} questions x {completions} completions)"
    )


def main() -> None:
    """Parse the command line and describe the named policies."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=["tiny_base", "tiny", "tiny_direct"])
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--completions", type=int, default=16)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.names:
        describe(name, arguments.questions, arguments.completions)


if __name__ == "__main__":
    main()
