r"""Compare our gradient with TRL's, parameter by parameter, on the same rollouts.

    python scripts/benchmarks/compare_trl.py                      # float64 and float32
    python scripts/benchmarks/compare_trl.py --dtype float32 --environment DIR
    python scripts/benchmarks/compare_trl.py --record tests/data/trl_gradients.json

Our side samples groups of several prompt and completion lengths from `embedded:tiny_base` and draws
rewards. Each side then runs its own training code for advantages, old and reference
log-probabilities, micro-batches and gradient. TRL runs in a separate environment. The script
compares the gradients that reach the optimizer. The exit code is 1 if a difference exceeds the
tolerance (1e-10 in float64, 1e-4 in float32).

Let there be n = P G completions of at most L tokens, and `A_i = r_i - zbar_{-i} = G/(G-1) (r_i -
zbar)`. Before the first update the losses are:

    ours, leave_one_out, algorithm1    1/n sum_i A_i sum_t log pi_it
    RLOOTrainer                        1/n sum_i A_i exp(log pi_i - log pi_old,i)
    GRPOTrainer, dr_grpo, unscaled     1/(n L) sum_i (r_i - zbar) sum_t pi_it / pi_old,it

At the sampling policy, the gradient of a ratio equals the gradient of the log-probability. Our
gradient is therefore equal to RLOO's, and L G/(G-1) times GRPO's. The baseline group_mean omits
the factor G/(G-1). The loss_type `sum` divides by n, while dr_grpo divides by n L. All other rows
have the factor 1.

Rows named "moved" update a policy that differs from the sampling policy, with a third policy as
reference model, so that ratios, clipping and penalties have an effect. The column `clipped` is the
share of our ratios that were clipped. In rows without clipping on our side, TRL's epsilon is too
large to clip. TRL multiplies the K3 penalty by the ratio unless use_bias_correction_kl is off. This
option is off here, except in the control, which must differ. Rows named "micro" accumulate over
TRL's micro-batches. There, TRL's rows are put in our order, because TRL shuffles rows and `bnpo`
depends on their order. With top_entropy_quantile, TRL uses the quantile of each micro-batch, while
we use the quantile of the whole update. The control of this option therefore accumulates, and must
differ. TRL's `cispo` without epsilon_high truncates every ratio at its epsilon, 0.2. Our side
truncates at 5, as documented, so our gradient is 5 times TRL's. Rows named "trimmed" have one
completion per micro-batch and no padding before the prompt. In all other rows TRL's prompts are
left-padded, with an attention mask and without positions. In the float64 comparison, both sides
also use float64 for the parts that transformers and TRL normally compute in float32.
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
from both_sides import InDouble, put
from safetensors.torch import load_file, save_file
from trl_environment import PINNED, add_environment_argument, environment, run_worker

from grpo_ustat.cli.compose import compose_config
from grpo_ustat.config.train import TrainConfig
from grpo_ustat.draws import generator
from grpo_ustat.estimators.baselines import advantages
from grpo_ustat.policy.configured import configured_task
from grpo_ustat.policy.loading import load_policy
from grpo_ustat.policy.source import resolve
from grpo_ustat.records import BaselineContext, Prompt, Rollouts
from grpo_ustat.rollout.local import Sampling, sample
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.train.context import Batch
from grpo_ustat.train.setup import set_up
from grpo_ustat.train.update import (
    UpdateStats,
    accumulate_gradient,
    counted_lengths,
    fixed_logprobs,
    minibatches,
    penalised_rewards,
)

# With this maximum length some completions are truncated.
MODEL, GROUP, LENGTH = "embedded:tiny_base", 8, 44
TOLERANCE = {"float64": 1e-10, "float32": 1e-4}
# Standard deviation of the changes of a parameter's weights, relative to their root mean square.
MOVED = 0.02


@dataclass(frozen=True)
class Setting:
    """An objective as each side configures it."""

    # Name in the table and in the recorded file.
    name: str
    # Overrides for our configuration.
    ours: tuple[str, ...]
    # TRL's trainer, `grpo` or `rloo`, and its arguments.
    trainer: str
    arguments: dict
    # Our gradient is factor(G, L) times TRL's.
    factor: Callable[[int, int], float] = lambda group, length: 1.0
    # True if the weights move between sampling and the update.
    off_policy: bool = False
    # Number of completions in each of TRL's backward passes; None means all.
    micro_batch_size: int | None = None
    # True if padding that all rows share is removed from TRL's micro-batches.
    trim: bool = False
    # False for a control, which must differ.
    equal: bool = True

    def fits(self, difference: float, dtype: str) -> bool:
        """Return True if a difference is as expected: small, or large for a control."""
        return (difference <= TOLERANCE[dtype]) == self.equal


def per_token(group: int, length: int) -> float:
    """Factor of TRL's `dr_grpo`, which divides by n L while ours divides by n."""
    return float(length)


def per_token_and_centred(group: int, length: int) -> float:
    """Factor for `dr_grpo` with `r - zbar`, which is (G-1)/G times the leave-one-out advantage."""
    return length * group / (group - 1)


def cut_at_epsilon(group: int, length: int) -> float:
    """Factor of TRL's `cispo`: its token weights are min(1, epsilon), while 1 is documented."""
    return 1 / 0.2


def preset(name: str, arguments: dict, *ours: str, what: str = "", **options) -> Setting:
    """Make a setting from a preset for one of TRL's losses, which also sets the advantage."""
    return Setting(f"{name}{what}", (f"objective={name}", *ours), "grpo", arguments, **options)


def moved(name: str, ours: tuple[str, ...], trainer: str, arguments: dict, **options) -> Setting:
    """Make a setting for the second update on a batch, at a policy that did not sample it."""
    arguments = {"num_iterations": 2, "beta": 0.0} | arguments
    ours = (*ours, "objective.num_iterations=2", "objective.num_minibatches=1")
    return Setting(f"{name}, moved", ours, trainer, arguments, off_policy=True, **options)


LEAVE_ONE_OUT, GROUP_STD = ("baseline=leave_one_out",), ("baseline=group_std",)
GROUP_MEAN = ("baseline=group_mean",)
WHOLE_SEQUENCE = ("objective=grpo", "objective.importance_sampling_level=whole_sequence")
DR_GRPO = {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.0}
K3 = {"beta": 0.04, "use_bias_correction_kl": False}
CLIPPED = ("objective.epsilon=0.2", "objective.epsilon_high=0.28")
CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}
SEQUENCE = {"importance_sampling_level": "sequence"}
MASKED, MASK = "objective.mask_truncated_completions=true", {"mask_truncated_completions": True}
SHARE, TOP = "objective.top_entropy_quantile=0.2", {"top_entropy_quantile": 0.2}
MICRO = "objective.micro_batch_size=4"
PRESETS = (
    preset("trl_dapo", {}),
    preset("trl_dapo", MASK, MASKED, what=", truncated masked"),
    preset("trl_dapo", MASK, MASKED, what=", truncated masked, micro", micro_batch_size=4),
    preset("trl_dapo", {"scale_rewards": "batch"}, "baseline=batch_std", what=", batch"),
    preset("trl_dapo", {"scale_rewards": "none"}, "baseline=group_mean", what=", unscaled"),
    preset("trl_dapo", TOP, SHARE, what=", top entropy"),
    preset("trl_dapo", TOP | MASK, SHARE, MASKED, what=", top entropy, masked"),
    preset("trl_grpo", {"loss_type": "grpo"}),
    preset("trl_grpo", {"loss_type": "grpo"} | MASK, MASKED, what=", truncated masked"),
    preset("trl_grpo", {"loss_type": "grpo"} | TOP, SHARE, what=", top entropy"),
    preset("trl_dr_grpo", DR_GRPO),
    preset("trl_dr_grpo", DR_GRPO | MASK, MASKED, what=", truncated masked"),
    preset("trl_dr_grpo", {"loss_type": "dr_grpo"}, "baseline=group_std", what=", group"),
    preset("trl_bnpo", {"loss_type": "bnpo"}, MICRO, micro_batch_size=4),
    preset("trl_bnpo", {"loss_type": "bnpo"} | MASK, MICRO, MASKED, what=", truncated masked",
           micro_batch_size=4),
    preset("trl_bnpo", {"loss_type": "bnpo"}, what=", as it comes", micro_batch_size=8),
    preset("trl_gspo", {"loss_type": "grpo"} | SEQUENCE),
    preset("trl_gspo", {"loss_type": "grpo"} | SEQUENCE | MASK, MASKED, what=", truncated masked"),
    preset("trl_cispo", {"loss_type": "cispo", "epsilon_high": 5.0}),
    preset("trl_cispo", {"loss_type": "cispo"}, what=", as it comes", factor=cut_at_epsilon),
    preset("trl_luspo", {"loss_type": "luspo"} | SEQUENCE),
    preset("trl_luspo", {"loss_type": "luspo"} | SEQUENCE | MASK, MASKED,
           what=", truncated masked"),
    preset("trl_sapo", {"loss_type": "sapo"}),
    preset("trl_vespo", {"loss_type": "vespo"}),
    preset("trl_vespo", {"loss_type": "vespo"} | TOP, SHARE, what=", top entropy"),
    preset("trl_dapo", TOP, SHARE, what=", control: quantile", micro_batch_size=4, equal=False),
)  # fmt: skip
SETTINGS = (
    Setting("algorithm1 = RLOO", LEAVE_ONE_OUT, "rloo", {"beta": 0.0}),
    Setting("algorithm1 = RLOO, trimmed", LEAVE_ONE_OUT, "rloo", {"beta": 0.0}, trim=True,
            micro_batch_size=1),
    Setting("algorithm1 = dr_grpo", LEAVE_ONE_OUT, "grpo", DR_GRPO, per_token_and_centred),
    Setting("algorithm1 = dr_grpo, micro", LEAVE_ONE_OUT, "grpo", DR_GRPO, per_token_and_centred,
            micro_batch_size=4),
    Setting("group_mean = dr_grpo", GROUP_MEAN, "grpo", DR_GRPO, per_token),
    moved("grpo (Algorithm 2)", ("objective=grpo", *GROUP_STD), "grpo",
          {"loss_type": "dr_grpo", "epsilon": 1e9} | K3, factor=per_token),
    moved("grpo_original", ("objective=grpo_original", *GROUP_STD), "grpo",
          {"loss_type": "grpo", "epsilon": 0.2} | K3),
    moved("dr_grpo", ("objective=dr_grpo", *GROUP_MEAN, *CLIPPED), "grpo", DR_GRPO | CLIP),
    moved("dapo", ("objective=dapo", *GROUP_STD), "grpo", {"loss_type": "dapo"} | CLIP),
    moved("dapo with entropy", ("objective=dapo", *GROUP_STD, "objective.entropy_coef=0.01"),
          "grpo", {"loss_type": "dapo", "entropy_coef": 0.01} | CLIP),
    moved("gspo", ("objective=gspo", *GROUP_STD, "objective.epsilon=0.003",
                   "objective.epsilon_high=0.004"),
          "grpo", {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.003,
                   "epsilon_high": 0.004}),
    moved("whole_sequence = RLOO",
          (*WHOLE_SEQUENCE, "objective.beta=0", *LEAVE_ONE_OUT, *CLIPPED), "rloo", CLIP),
    moved("k1 in the reward = RLOO", (*WHOLE_SEQUENCE, *LEAVE_ONE_OUT, *CLIPPED,
                            "objective.beta=0.04", "objective.kl_estimator=k1",
                            "objective.kl_in=reward"), "rloo", CLIP | {"beta": 0.04}),
    moved("trl_bnpo", ("objective=trl_bnpo", MICRO), "grpo", {"loss_type": "bnpo"},
          micro_batch_size=4),
    moved("trl_cispo", ("objective=trl_cispo", "objective.epsilon_high=1.2"), "grpo",
          {"loss_type": "cispo", "epsilon_high": 1.2}),
    moved("trl_luspo", ("objective=trl_luspo", "objective.epsilon=0.003",
                        "objective.epsilon_high=0.004"),
          "grpo", {"loss_type": "luspo", "epsilon": 0.003, "epsilon_high": 0.004} | SEQUENCE),
    moved("trl_sapo", ("objective=trl_sapo",), "grpo", {"loss_type": "sapo"}),
    moved("trl_vespo", ("objective=trl_vespo",), "grpo", {"loss_type": "vespo"}),
    moved("top entropy with K3", ("objective=trl_dapo", SHARE, "objective.beta=0.04"), "grpo",
          TOP | K3),
    moved("control: K3 times ratio", ("objective=grpo_original", *GROUP_STD), "grpo",
          {"loss_type": "grpo", "epsilon": 0.2, "beta": 0.04}, equal=False),
    *PRESETS,
)  # fmt: skip


@dataclass(frozen=True)
class Start:
    """Inputs for both sides: rollouts, rewards, and the changed weights."""

    rollouts: Rollouts
    rewards_PG: np.ndarray
    current: dict[str, torch.Tensor] = field(repr=False)
    reference: dict[str, torch.Tensor] = field(repr=False)


def common_start(count: int, dtype: str) -> Start:
    """Draw rollouts of `count` prompts of different lengths, and rewards in eighths.

    Rewards in eighths and their means are exact also in float32.
    """
    policy, config = load_policy(MODEL, dtype=dtype), configured(dtype, ())
    task = configured_task(config.task_options, config.model)
    prompts = several_lengths(task.prompts("train"), count)
    rollouts = sample(policy, prompts, GROUP, Sampling(0, "compare", LENGTH))
    rewards_PG = generator(0, "reward").integers(0, 9, rollouts.lengths_PG.shape) / 8
    moved = [moved_weights(policy.model, stream) for stream in ("current", "reference")]
    return Start(rollouts, rewards_PG, *moved)


def several_lengths(prompts: list[Prompt], count: int) -> list[Prompt]:
    """Choose `count` prompts, spread evenly from the shortest text to the longest."""
    ordered = sorted(prompts, key=lambda prompt: (len(prompt.text), prompt.id))
    return [ordered[i] for i in np.linspace(0, len(ordered) - 1, count).astype(int)]


def moved_weights(model: torch.nn.Module, stream: str) -> dict[str, torch.Tensor]:
    """Add to each parameter normal noise of `MOVED` times its root mean square."""
    weights = {}
    for name, parameter in model.named_parameters():
        noise = generator(0, stream, name=name).normal(size=tuple(parameter.shape))
        size = MOVED * parameter.detach().square().mean().sqrt()
        weights[name] = parameter.detach() + size * torch.from_numpy(noise).to(parameter)
    return weights


def configured(dtype: str, overrides: tuple[str, ...]) -> TrainConfig:
    """Compose this project's configuration for a setting."""
    fixed = ("model=tiny_base", f"model.dtype={dtype}", f"group_size={GROUP}")
    rest = (f"max_completion_length={LENGTH}", "budget.rollouts=64", "micro_batch_tokens=1024")
    return compose_config("train", [*fixed, *rest, *overrides])


def our_gradient(setting: Setting, start: Start, dtype: str):
    """Compute the gradient that our training code applies, and the share of clipped ratios."""
    config = configured(dtype, (*setting.ours, f"budget.rollouts={start.rewards_PG.size}"))
    with tempfile.TemporaryDirectory() as folder:
        run = set_up(config, RunFolder(Path(folder), config))
    if run.reference:
        put(start.reference, run.reference.model)
    rollouts, noted = start.rollouts, UpdateStats()
    batch = Batch(
        prompts=rollouts.prompts, rollouts=rollouts, rewards_PGF=start.rewards_PG[..., None],
        reward_weights_F=np.ones(1), lengths_PG=rollouts.lengths_PG,
        ended_PG=rollouts.ended_PG, answered_PG=rollouts.ended_PG,
        prompt_lengths_P=np.array([len(tokens) for tokens in rollouts.prompt_tokens]),
    )  # fmt: skip
    with InDouble() if dtype == "float64" else nullcontext():
        constants = fixed_logprobs(run, rollouts)
        judged_PG, baseline = penalised_rewards(run, batch, constants), config.baseline
        advantage_PG = advantages(baseline.name, judged_PG, BaselineContext(), baseline.options)
        if setting.off_policy:
            put(start.current, run.policy.model)
        minibatch = next(minibatches(run, counted_lengths(run, batch), step=0))
        accumulate_gradient(run, rollouts, advantage_PG, minibatch, constants, noted)
    sums = noted.sums
    clipped = (sums["clip_low"] + sums["clip_high"]) / max(1, sums["ratio_count"])
    return {name: p.grad.clone() for name, p in run.policy.model.named_parameters()}, clipped


def trl_gradients(settings, start: Start, dtype: str, python: Path) -> list[dict]:
    """Compute TRL's gradient for each setting; data are exchanged in files."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        save_file(start.current, folder / "current.safetensors")
        save_file(start.reference, folder / "reference.safetensors")
        (folder / "job.json").write_text(json.dumps(job(settings, start, dtype)))
        run_worker(python, "gradients", folder)
        return [load_file(folder / f"gradient-{k}.safetensors") for k in range(len(settings))]


def job(settings, start: Start, dtype: str) -> dict:
    """Return the content of the worker's job file."""
    names = ("name", "trainer", "arguments", "off_policy", "micro_batch_size", "trim")
    rollouts = start.rollouts
    groups = zip(rollouts.tokens_PGT, rollouts.lengths_PG, strict=True)
    completions = [
        [row[:length].tolist() for row, length in zip(*group, strict=True)] for group in groups
    ]
    rows = zip(rollouts.prompts, rollouts.prompt_tokens, completions, start.rewards_PG, strict=True)
    return {
        "model": resolve(MODEL), "dtype": dtype, "device": "cpu", "group_size": GROUP,
        "max_completion_length": LENGTH,
        "order": micro_batch_rows(start.rewards_PG.size).tolist(),
        "prompts": [
            {"text": p.text, "tokens": tokens, "completions": texts, "rewards": rewards.tolist()}
            for p, tokens, texts, rewards in rows
        ],
        "settings": [{name: getattr(setting, name) for name in names} for setting in settings],
    }  # fmt: skip


def micro_batch_rows(count: int) -> np.ndarray:
    """Return the order in which our first update splits rows into micro-batches."""
    return generator(0, "micro_batches", 0, "0.0").permutation(count)


def largest_difference(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], factor: float
):
    """Return the largest `||ours - factor theirs|| / ||ours||`, and the parameter's name."""
    if ours.keys() != theirs.keys():
        raise ValueError(f"only one side has {sorted(ours.keys() ^ theirs.keys())}")
    differences = {
        name: float((ours[name] - factor * theirs[name]).norm() / ours[name].norm())
        for name in ours
    }
    worst = max(differences, key=differences.get)
    return differences[worst], worst


def projections(gradient: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    """Summarise each parameter's gradient by its norm and its products with two normal draws.

    The draws are keyed by the parameter's name. The products of a difference with the draws are
    about as large as its norm, so gradients with the same products are practically equal.
    """
    products = {}
    for name, value in sorted(gradient.items()):
        draws = generator(0, "projection", name=name).normal(size=(2, value.numel()))
        flat = value.double().flatten()
        products[name] = [float(flat.norm()), *(torch.from_numpy(draws) @ flat).tolist()]
    return products


def record(file: Path, python: Path) -> None:
    """Record TRL's gradients for two prompts in float64, together with the job.

    At every push, tests/scripts/test_compare_trl.py compares these gradients with ours.
    """
    start = common_start(2, "float64")
    theirs = trl_gradients(SETTINGS, start, "float64", python)
    short = {s.name: projections(gradient) for s, gradient in zip(SETTINGS, theirs, strict=True)}
    made = "python scripts/benchmarks/compare_trl.py --record tests/data/trl_gradients.json"
    recording = {
        "source": f"{made}, with {', '.join(PINNED)}, torch {torch.__version__}",
        "job": without_paths(job(SETTINGS, start, "float64")),
        "parameters": sorted(theirs[0]),
        "projections": {name: list(start.values()) for name, start in short.items()},
    }
    file.write_text(json.dumps(recording) + "\n")


def without_paths(job: dict) -> dict:
    """Return a job without the model's folder, which differs between machines."""
    return {name: value for name, value in job.items() if name != "model"}


def scale(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return the best-fitting factor, <ours, theirs> / ||theirs||^2."""
    pairs = [(ours[name].double(), theirs[name].double()) for name in ours]
    return float(sum((a * b).sum() for a, b in pairs) / sum((b * b).sum() for _, b in pairs))


def report(dtype: str, start: Start, rows: list) -> bool:
    """Print the table; return True if all differences are as expected."""
    prompts = [len(tokens) for tokens in start.rollouts.prompt_tokens]
    lengths = start.rollouts.lengths_PG
    print(f"\n{MODEL}, {dtype}: {len(prompts)} prompts of {min(prompts)} to {max(prompts)} tokens,")
    print(f"{GROUP} completions each of {lengths.min()} to {lengths.max()} tokens, L = {LENGTH}")
    print(f"{'':36}{'factor':>9}{'fitted/factor-1':>17}{'clipped':>9}{'largest difference':>20}")
    for setting, fitted, clipped, (worst, name) in rows:
        factor = setting.factor(GROUP, LENGTH)
        print(f"{setting.name:36}{factor:9.4f}{fitted / factor - 1:17.1e}", end="")
        print(f"{clipped:9.1%}{worst:20.1e}  {name}")
    return all(setting.fits(worst, dtype) for setting, *_, (worst, _) in rows)


def main() -> None:
    """Entry."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_environment_argument(parser)
    parser.add_argument("--dtype", nargs="+", default=list(TOLERANCE), choices=list(TOLERANCE))
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="record TRL's gradients in FILE, and compare nothing",
    )
    options = parser.parse_args()
    python, good = environment(options.environment), True
    if options.record:
        return record(options.record, python)
    for dtype in options.dtype:
        start, rows = common_start(options.prompts, dtype), []
        all_theirs = trl_gradients(SETTINGS, start, dtype, python)
        for setting, theirs in zip(SETTINGS, all_theirs, strict=True):
            ours, clipped = our_gradient(setting, start, dtype)
            worst = largest_difference(ours, theirs, setting.factor(GROUP, LENGTH))
            rows.append((setting, scale(ours, theirs), clipped, worst))
        good &= report(dtype, start, rows)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
