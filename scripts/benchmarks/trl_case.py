"""Compare our gradient with TRL's, parameter by parameter, on the same rollouts.

    python scripts/benchmarks/trl_case.py                      # float64 and float32
    python scripts/benchmarks/trl_case.py --record tests/data/trl_gradients.json

The script needs an environment with TRL (`pip install -c constraints.txt -e '.[trl]'`). Our side
samples groups of several prompt and completion lengths from `embedded:tiny_base` and draws rewards.
Each side then runs its own training code for advantages, old and reference log-probabilities,
micro-batches and gradient. The gradients that reach the optimizer are compared. The exit code is 1
if a difference exceeds the tolerance (1e-10 in float64, 1e-4 in float32).

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
reference model, so that ratios, clipping and penalties have an effect. In rows without clipping on
our side, TRL's epsilon is too large to clip. TRL multiplies the K3 penalty by the ratio unless
use_bias_correction_kl is off. This option is off here, except in the control, which must differ.
Rows named "micro" accumulate over TRL's micro-batches. There, TRL's rows are put in our order,
because TRL shuffles rows and `bnpo` depends on their order. With top_entropy_quantile, TRL uses the
quantile of each micro-batch, while we use the quantile of the whole update. The control of this
option therefore accumulates, and must differ. TRL's `cispo` without epsilon_high truncates every
ratio at its epsilon, 0.2. Our side truncates at 5, as documented, so our gradient is 5 times TRL's.
Rows named "trimmed" have one completion per micro-batch and no padding before the prompt.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_ustat.cli.compose import compose_config
from grpo_ustat.config.train import TrainConfig
from grpo_ustat.draws import generator
from grpo_ustat.estimators.baselines import advantages
from grpo_ustat.policy.configured import configured_task
from grpo_ustat.policy.loading import load_policy
from grpo_ustat.policy.source import resolve
from grpo_ustat.records import BaselineContext, Rollouts
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
Gradient = dict[str, torch.Tensor]


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
    # Our gradient is this factor times TRL's.
    factor: float = 1.0
    # True if the weights move between sampling and the update.
    off_policy: bool = False
    # Number of completions in each of TRL's backward passes; None means all.
    micro_batch_size: int | None = None
    # True if padding that all rows share is removed from TRL's micro-batches.
    trim: bool = False
    # False for a control, which must differ.
    equal: bool = True


def preset(name: str, arguments: dict, *ours: str, what: str = "", **options: Any) -> Setting:
    """Make a setting from a preset for one of TRL's losses, which also sets the advantage."""
    return Setting(f"{name}{what}", (f"objective={name}", *ours), "grpo", arguments, **options)


def moved(
    name: str, ours: tuple[str, ...], trainer: str, arguments: dict, **options: Any
) -> Setting:
    """Make a setting for the second update on a batch, at a policy that did not sample it."""
    arguments = {"num_iterations": 2, "beta": 0.0} | arguments
    ours = (*ours, "objective.num_iterations=2", "objective.num_minibatches=1")
    return Setting(f"{name}, moved", ours, trainer, arguments, off_policy=True, **options)


# TRL's `dr_grpo` divides by n L while ours divides by n. Its `r - zbar` is (G-1)/G times the
# leave-one-out advantage. Token weights of TRL's `cispo` are min(1, epsilon); 1 is documented.
PER_TOKEN, CENTRED, CUT = float(LENGTH), LENGTH * GROUP / (GROUP - 1), 1 / 0.2
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
    preset("trl_cispo", {"loss_type": "cispo"}, what=", as it comes", factor=CUT),
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
    Setting("algorithm1 = dr_grpo", LEAVE_ONE_OUT, "grpo", DR_GRPO, CENTRED),
    Setting("algorithm1 = dr_grpo, micro", LEAVE_ONE_OUT, "grpo", DR_GRPO, CENTRED,
            micro_batch_size=4),
    Setting("group_mean = dr_grpo", GROUP_MEAN, "grpo", DR_GRPO, PER_TOKEN),
    moved("grpo (Algorithm 2)", ("objective=grpo", *GROUP_STD), "grpo",
          {"loss_type": "dr_grpo", "epsilon": 1e9} | K3, factor=PER_TOKEN),
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
    current: Gradient = field(repr=False)
    reference: Gradient = field(repr=False)


def common_start(count: int, dtype: str) -> Start:
    """Draw rollouts of `count` prompts, from the shortest text to the longest, and rewards.

    Rewards are eighths, which are exact also in float32, like their means.
    """
    policy, config = load_policy(MODEL, dtype=dtype), configured(dtype, ())
    prompts = configured_task(config.task_options, config.model).prompts("train")
    ordered = sorted(prompts, key=lambda prompt: (len(prompt.text), prompt.id))
    prompts = [ordered[i] for i in np.linspace(0, len(ordered) - 1, count).astype(int)]
    rollouts = sample(policy, prompts, GROUP, Sampling(0, "compare", LENGTH))
    rewards_PG = generator(0, "reward").integers(0, 9, rollouts.lengths_PG.shape) / 8
    moved = [moved_weights(policy.model, stream) for stream in ("current", "reference")]
    return Start(rollouts, rewards_PG, *moved)


def moved_weights(model: torch.nn.Module, stream: str) -> Gradient:
    """Add to each parameter normal noise of `MOVED` times its root mean square."""
    weights = {}
    for name, parameter in model.named_parameters():
        noise = generator(0, stream, name=name).normal(size=tuple(parameter.shape))
        size = MOVED * parameter.detach().square().mean().sqrt()
        weights[name] = parameter.detach() + size * torch.from_numpy(noise).to(parameter)
    return weights


def put(weights: Gradient, model: torch.nn.Module) -> None:
    """Set every parameter to its new value."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


class InDouble(TorchDispatchMode):
    """Mode in which computations requested in float32 or in the default type use float64.

    Even for a float64 model, transformers computes norms and softmaxes in float32, and TRL computes
    rewards and log-probabilities in float32. Values that were rounded to float32 before this mode
    begins stay rounded.
    """

    def __enter__(self):
        """Make float64 the default type."""
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error: Any):
        """Restore the default type."""
        torch.set_default_dtype(self.before)
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operator with every float32 among its arguments replaced by float64."""
        wide = [
            torch.float64 if x is torch.float32 else x for x in (*args, *(kwargs or {}).values())
        ]
        return func(*wide[: len(args)], **dict(zip(kwargs or {}, wide[len(args) :], strict=True)))


def exactly(dtype: str):
    """Return the context in which a side computes."""
    return InDouble() if dtype == "float64" else nullcontext()


def configured(dtype: str, overrides: tuple[str, ...]) -> TrainConfig:
    """Compose this project's configuration for a setting."""
    fixed = ("model=tiny_base", f"model.dtype={dtype}", f"group_size={GROUP}")
    rest = (f"max_completion_length={LENGTH}", "budget.rollouts=64", "micro_batch_tokens=1024")
    return compose_config("train", [*fixed, *rest, *overrides])


def our_gradient(setting: Setting, start: Start, dtype: str) -> Gradient:
    """Compute the gradient that our training code applies."""
    config = configured(dtype, (*setting.ours, f"budget.rollouts={start.rewards_PG.size}"))
    with tempfile.TemporaryDirectory() as folder:
        run = set_up(config, RunFolder(Path(folder), config))
    if run.reference:
        put(start.reference, run.reference.model)
    rollouts = start.rollouts
    batch = Batch(
        prompts=rollouts.prompts, rollouts=rollouts, rewards_PGF=start.rewards_PG[..., None],
        reward_weights_F=np.ones(1), lengths_PG=rollouts.lengths_PG,
        ended_PG=rollouts.ended_PG, answered_PG=rollouts.ended_PG,
        prompt_lengths_P=np.array([len(tokens) for tokens in rollouts.prompt_tokens]),
    )  # fmt: skip
    with exactly(dtype):
        constants = fixed_logprobs(run, rollouts)
        judged_PG, baseline = penalised_rewards(run, batch, constants), config.baseline
        advantage_PG = advantages(baseline.name, judged_PG, BaselineContext(), baseline.options)
        if setting.off_policy:
            put(start.current, run.policy.model)
        minibatch = next(minibatches(run, counted_lengths(run, batch), step=0))
        accumulate_gradient(run, rollouts, advantage_PG, minibatch, constants, UpdateStats())
    return {name: p.grad.clone() for name, p in run.policy.model.named_parameters()}


def job(settings: Sequence[Setting], start: Start, dtype: str) -> dict:
    """Return what TRL's side is told, as the recorded file has it."""
    names = ("name", "trainer", "arguments", "off_policy", "micro_batch_size", "trim")
    rollouts = start.rollouts
    groups = zip(rollouts.tokens_PGT, rollouts.lengths_PG, strict=True)
    completions = [
        [row[:length].tolist() for row, length in zip(*group, strict=True)] for group in groups
    ]
    rows = zip(rollouts.prompts, rollouts.prompt_tokens, completions, start.rewards_PG, strict=True)
    return {
        "dtype": dtype, "device": "cpu", "group_size": GROUP, "max_completion_length": LENGTH,
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


def trl_gradients(settings: Sequence[Setting], start: Start, dtype: str) -> Iterator[Gradient]:
    """Yield the gradient of TRL's trainer for each setting.

    The trainer uses the given completions instead of sampling, and the weights can change between
    sampling and the update. All other parts are TRL's: masks, rewards, advantages, old and
    reference log-probabilities, the loss, and accumulation.
    """
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

    told = job(settings, start, dtype)
    prompts, order = told["prompts"], torch.tensor(told["order"])
    kinds = {
        "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
        "rloo": (trl.RLOOTrainer, trl.RLOOConfig),
    }

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **_):
            self.gradient = {name: p.grad.clone() for name, p in model.named_parameters()}

    for setting in settings:
        base, configuration = kinds[setting.trainer]

        class Given(base):
            def _generate_single_turn(self, prompt_ids, *rest):
                completions = [self.given[tuple(ids)].pop(0) for ids in prompt_ids]
                return (completions, None) if self.setting.trainer == "grpo" else completions

            def _generate_and_score_completions(self, inputs):
                output = super()._generate_and_score_completions(inputs)
                if self.setting.off_policy:
                    put(start.current, self.model)
                return output

            def compute_loss(self, model, inputs, *rest, **options):
                if self.setting.trim:
                    used = inputs["prompt_mask"].any(dim=0)
                    cut = {name: inputs[name][:, used] for name in ("prompt_ids", "prompt_mask")}
                    inputs = inputs | cut
                return super().compute_loss(model, inputs, *rest, **options)

        micro, keep = setting.micro_batch_size or len(order), Keep()
        rewards = {p["text"]: list(p["rewards"]) for p in prompts}
        with tempfile.TemporaryDirectory() as folder:
            arguments = configuration(
                **trl_arguments(folder, GROUP, LENGTH), **setting.arguments, max_steps=1,
                learning_rate=0.0, max_grad_norm=0.0, per_device_train_batch_size=micro,
                gradient_accumulation_steps=len(order) // micro, gradient_checkpointing=False,
            )  # fmt: skip
            model = AutoModelForCausalLM.from_pretrained(resolve(MODEL), dtype=dtype)
            tokenizer = PreTrainedTokenizerFast.from_pretrained(resolve(MODEL), padding_side="left")
            trainer = Given(
                model=model, args=arguments, callbacks=[keep], processing_class=tokenizer,
                reward_funcs=lambda prompts, rewards=rewards, **_: [
                    rewards[text].pop(0) for text in prompts
                ],
                train_dataset=Dataset.from_list([{"prompt": p["text"]} for p in prompts]),
            )  # fmt: skip
            trainer.setting = setting
            trainer.given = {tuple(p["tokens"]): list(p["completions"]) for p in prompts}
            if trainer.ref_model is not None:
                put(start.reference, trainer.ref_model)
            with exactly(dtype), patch("trl.trainer.utils.torch.randperm", return_value=order):
                trainer.train()
        yield keep.gradient


def trl_arguments(folder: str, group: int, length: int, device: str = "cpu") -> dict[str, Any]:
    """Return the arguments that all of TRL's configurations share here."""
    return dict(
        output_dir=folder, num_generations=group, temperature=1.0, max_completion_length=length,
        use_cpu=device == "cpu", bf16=False, shuffle_dataset=False, lr_scheduler_type="constant",
        report_to="none", disable_tqdm=True, logging_strategy="no", save_strategy="no",
        dataloader_pin_memory=False,
    )  # fmt: skip


def largest_difference(ours: Gradient, theirs: Gradient, factor: float) -> tuple[float, str]:
    """Return the largest `||ours - factor theirs|| / ||ours||`, and the parameter's name."""
    return max(
        (float((ours[name] - factor * theirs[name]).norm() / ours[name].norm()), name)
        for name in ours.keys() | theirs.keys()
    )


def projections(gradient: Gradient) -> dict[str, list[float]]:
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


def record(file: Path) -> None:
    """Record TRL's gradients for two prompts in float64, with which the tests compare ours."""
    import trl

    start = common_start(2, "float64")
    short = [projections(gradient) for gradient in trl_gradients(SETTINGS, start, "float64")]
    made = "python scripts/benchmarks/trl_case.py --record tests/data/trl_gradients.json"
    recording = {
        "source": f"{made}, with trl=={trl.__version__}, torch {torch.__version__}",
        "job": job(SETTINGS, start, "float64"),
        "parameters": list(short[0]),
        "projections": {s.name: list(x.values()) for s, x in zip(SETTINGS, short, strict=True)},
    }
    file.write_text(json.dumps(recording) + "\n")


def main() -> None:
    """Compare in each precision, or record TRL's gradients."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", nargs="+", default=list(TOLERANCE), choices=list(TOLERANCE))
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="record TRL's gradients, and compare nothing"
    )
    options = parser.parse_args()
    if options.record:
        return record(options.record)
    good = True
    for dtype in options.dtype:
        start = common_start(options.prompts, dtype)
        print(f"{MODEL}, {dtype}: largest difference of a parameter, in units of its norm")
        both = zip(SETTINGS, trl_gradients(SETTINGS, start, dtype), strict=True)
        for setting, theirs in both:
            ours = our_gradient(setting, start, dtype)
            worst, name = largest_difference(ours, theirs, setting.factor)
            good &= (worst <= TOLERANCE[dtype]) == setting.equal
            print(f"{setting.name:36}{worst:20.1e}  {name}")
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
