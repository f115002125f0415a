r"""Our gradient against TRL's, parameter by parameter, on the same rollouts.

    python scripts/compare_trl.py                      # float64 and float32
    python scripts/compare_trl.py --dtype float32 --environment DIR

Ours samples groups of several prompt and completion lengths from `embedded:tiny_base` and draws
rewards; both sides compute advantages, weights and the gradient with their own training code, TRL
in an environment of its own. Compared is what reaches the optimizer. With n = P G completions of
at most L tokens, leave-one-out advantage `A_i = r_i - zbar_{-i} = G/(G-1) (r_i - zbar)`:

    algorithm1, leave_one_out    1/n sum_i A_i sum_t log pi_it
    RLOOTrainer                  1/n sum_i A_i exp(log pi_i - log pi_old,i)       ours = TRL's
    GRPOTrainer dr_grpo, none    1/(n L) sum_i (r_i - zbar) sum_t ratio_it
                                                              ours = L G/(G-1) times TRL's

since at the sampling policy the gradient of a ratio is that of its log-probability. `group_mean`
leaves out G/(G-1): L times TRL's.

TRL has the ratios' gradient in every update, and clipping as an option that is never off; where
ours has none, epsilon is set out of reach. "trimmed" has one completion in a micro-batch without
columns of padding before it, everything else left-padded prompts, to which TRL gives an attention
mask and no positions. In float64 both sides also compute in float64 what transformers and TRL
compute in float32 whatever the model is.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from composed import composed
from in_double import InDouble
from safetensors.torch import load_file, save_file
from trl_environment import add_environment_argument, environment, run_worker

from grpo_ustat.config import TrainConfig
from grpo_ustat.estimators.baselines import advantages
from grpo_ustat.policy.loading import load_policy, resolve
from grpo_ustat.records import BaselineContext, Prompt, Rollouts
from grpo_ustat.rollout.draws import generator
from grpo_ustat.rollout.local import Sampling, sample
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.tasks.registry import make_task
from grpo_ustat.training import trainer

MODEL, GROUP, LENGTH = "embedded:tiny_base", 8, 80
TOLERANCE = {"float64": 1e-10, "float32": 1e-4}
MOVED = 0.02  # standard deviation of what the weights move by, relative to each parameter's own


@dataclass(frozen=True)
class Setting:
    """One objective, as each side spells it.

    Attributes:
        name: in the table and of the file.
        ours: configuration overrides.
        trainer, arguments: TRL's, `grpo` or `rloo`.
        factor: ours = factor(G, L) times TRL's.
        off_policy: whether the weights move between sampling and the update.
        micro_batch_size: completions in a backward pass of TRL, None for all.
        trim: whether TRL's micro-batches lose their common padding.
    """

    name: str
    ours: tuple[str, ...]
    trainer: str
    arguments: dict
    factor: Callable[[int, int], float] = lambda group, length: 1.0
    off_policy: bool = False
    micro_batch_size: int | None = None
    trim: bool = False


def per_token(group: int, length: int) -> float:
    """TRL's `dr_grpo` divides by n L, where ours divides by n."""
    return float(length)


def per_token_and_centred(group: int, length: int) -> float:
    """Besides, `r - zbar` is (G-1)/G of the leave-one-out advantage."""
    return length * group / (group - 1)


LEAVE_ONE_OUT = ("baseline=leave_one_out",)
DR_GRPO = {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.0}
SETTINGS = (
    Setting("algorithm1-rloo", LEAVE_ONE_OUT, "rloo", {"beta": 0.0}),
    Setting("algorithm1-rloo-trimmed", LEAVE_ONE_OUT, "rloo", {"beta": 0.0}, trim=True,
            micro_batch_size=1),
    Setting("algorithm1-dr_grpo", LEAVE_ONE_OUT, "grpo", DR_GRPO, per_token_and_centred),
    Setting("algorithm1-dr_grpo-micro", LEAVE_ONE_OUT, "grpo", DR_GRPO, per_token_and_centred,
            micro_batch_size=4),
    Setting("group_mean-dr_grpo", ("baseline=group_mean",), "grpo", DR_GRPO, per_token),
)  # fmt: skip


@dataclass(frozen=True)
class Given:
    """What both sides start from: rollouts, their rewards, and where the weights have moved."""

    rollouts: Rollouts
    rewards_PG: np.ndarray
    current: dict[str, torch.Tensor] = field(repr=False)
    reference: dict[str, torch.Tensor] = field(repr=False)


def given(prompts_wanted: int, dtype: str) -> Given:
    """Rollouts of prompts of as many lengths as there are, and rewards in eighths.

    Such rewards and their means are exact in float32 too.
    """
    policy = load_policy(MODEL, dtype=dtype)
    prompts = several_lengths(make_task(configured(dtype, ())).prompts("train"), prompts_wanted)
    rollouts = sample(policy, prompts, GROUP, Sampling(0, "compare", LENGTH))
    rewards_PG = generator(0, "reward").integers(0, 9, rollouts.lengths_PG.shape) / 8
    moved = [moved_weights(policy.model, stream) for stream in ("current", "reference")]
    return Given(rollouts, rewards_PG, *moved)


def several_lengths(prompts: list[Prompt], count: int) -> list[Prompt]:
    """`count` prompts spread over all lengths of text, shortest to longest."""
    ordered = sorted(prompts, key=lambda prompt: (len(prompt.text), prompt.id))
    return [ordered[i] for i in np.linspace(0, len(ordered) - 1, count).astype(int)]


def moved_weights(model: torch.nn.Module, stream: str) -> dict[str, torch.Tensor]:
    """Each parameter plus normal noise of `MOVED` times its own root mean square."""
    found = {}
    for name, parameter in model.named_parameters():
        noise = generator(0, stream, name=name).normal(size=tuple(parameter.shape))
        size = MOVED * parameter.detach().square().mean().sqrt()
        found[name] = parameter.detach() + size * torch.from_numpy(noise).to(parameter)
    return found


def configured(dtype: str, overrides: tuple[str, ...]) -> TrainConfig:
    """The project's own configuration of one setting."""
    fixed = ("model=tiny_base", f"model.dtype={dtype}", f"group_size={GROUP}")
    rest = (f"max_completion_length={LENGTH}", "budget.rollouts=64", "micro_batch_size=16")
    return composed("train", TrainConfig, [*fixed, *rest, *overrides])


def our_gradient(setting: Setting, found: Given, dtype: str) -> dict[str, torch.Tensor]:
    """What our training code hands to the optimizer."""
    config = configured(dtype, (*setting.ours, f"budget.rollouts={found.rewards_PG.size}"))
    with tempfile.TemporaryDirectory() as folder:
        run = trainer._set_up(config, RunFolder(Path(folder), config))
    rule = config.baseline
    advantage_PG = advantages(rule.name, found.rewards_PG, BaselineContext(), rule.options)
    with InDouble() if dtype == "float64" else nullcontext():
        trainer.accumulate_gradient(run, found.rollouts, advantage_PG)
    return {name: p.grad.clone() for name, p in run.policy.model.named_parameters()}


def trl_gradients(settings, found: Given, dtype: str, python: Path) -> list[dict]:
    """TRL's, for every setting, through files."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        save_file(found.current, folder / "current.safetensors")
        save_file(found.reference, folder / "reference.safetensors")
        (folder / "job.json").write_text(json.dumps(job(settings, found, dtype)))
        run_worker(python, "gradients", folder)
        return [load_file(folder / f"gradient-{setting.name}.safetensors") for setting in settings]


def job(settings, found: Given, dtype: str) -> dict:
    """What the worker is told."""
    names = ("name", "trainer", "arguments", "off_policy", "micro_batch_size", "trim")
    rollouts = found.rollouts
    groups = zip(rollouts.tokens_PGT, rollouts.lengths_PG, strict=True)
    completions = [
        [row[:length].tolist() for row, length in zip(*group, strict=True)] for group in groups
    ]
    rows = zip(rollouts.prompts, rollouts.prompt_tokens, completions, found.rewards_PG, strict=True)
    return {
        "model": resolve(MODEL), "dtype": dtype, "device": "cpu", "group_size": GROUP,
        "max_completion_length": LENGTH,
        "prompts": [
            {"text": p.text, "tokens": tokens, "completions": texts, "rewards": rewards.tolist()}
            for p, tokens, texts, rewards in rows
        ],
        "settings": [{name: getattr(setting, name) for name in names} for setting in settings],
    }  # fmt: skip


def apart(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], factor: float):
    """Largest `||ours - factor theirs|| / ||ours||` of a parameter, and that parameter's name.

    Raises:
        ValueError: the two know different parameters.
    """
    if ours.keys() != theirs.keys():
        raise ValueError(f"only one side has {sorted(ours.keys() ^ theirs.keys())}")
    found = {
        name: float((ours[name] - factor * theirs[name]).norm() / ours[name].norm())
        for name in ours
    }
    worst = max(found, key=found.get)
    return found[worst], worst


def scale(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The factor that fits best: <ours, theirs> / ||theirs||^2."""
    pairs = [(ours[name].double(), theirs[name].double()) for name in ours]
    return float(sum((a * b).sum() for a, b in pairs) / sum((b * b).sum() for _, b in pairs))


def report(dtype: str, found: Given, rows: list) -> bool:
    """Print the table; whether all is within the tolerance."""
    prompts = [len(tokens) for tokens in found.rollouts.prompt_tokens]
    lengths = found.rollouts.lengths_PG
    print(
        f"\n{MODEL}, {dtype}: {len(prompts)} prompts of {min(prompts)} to {max(prompts)} tokens, "
    )
    print(f"{GROUP} completions each of {lengths.min()} to {lengths.max()} tokens, L = {LENGTH}")
    print(f"{'setting':30}{'factor':>10}{'fitted - factor':>17}{'largest difference':>20}  of")
    for setting, factor, fitted, (worst, name) in rows:
        print(f"{setting.name:30}{factor:10.4f}{fitted / factor - 1:17.1e}{worst:20.1e}  {name}")
    return all(worst <= TOLERANCE[dtype] for *_, (worst, _) in rows)


def main() -> None:
    """Entry."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_environment_argument(parser)
    parser.add_argument("--dtype", nargs="+", default=list(TOLERANCE), choices=list(TOLERANCE))
    parser.add_argument("--prompts", type=int, default=5)
    asked = parser.parse_args()
    python, good = environment(asked.environment), True
    for dtype in asked.dtype:
        found, rows = given(asked.prompts, dtype), []
        all_theirs = trl_gradients(SETTINGS, found, dtype, python)
        for setting, theirs in zip(SETTINGS, all_theirs, strict=True):
            ours, factor = our_gradient(setting, found, dtype), setting.factor(GROUP, LENGTH)
            rows.append((setting, factor, scale(ours, theirs), apart(ours, theirs, factor)))
        good &= report(dtype, found, rows)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
