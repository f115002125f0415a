"""TRL's side of `compare_trl.py` and `speed.py train`; it runs in TRL's environment.

    python trl_worker.py gradients FOLDER     the gradient of each setting, before the optimizer
    python trl_worker.py steps FOLDER         seconds and memory of training steps

FOLDER must contain the file `job.json`, which `compare_trl.py` and `speed.py` write. Results are
written to FOLDER.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
from both_sides import DrawnRewards, InDouble, now, peak_memory, put
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer


class OnGivenRollouts:
    """Trainer that uses the job's completions instead of sampling, and then changes the weights.

    All other parts are TRL's: masks, rewards, advantages, old and reference log-probabilities, the
    loss, and accumulation.
    """

    # Completions not yet returned, by the prompt's token ids.
    given: dict
    # Weights that replace the policy's once the old log-probabilities are computed; None if the
    # update is on-policy.
    current: dict | None = None
    # True if columns that are padding in every row of a micro-batch are removed.
    trim = False

    def _generate_single_turn(self, prompt_ids, *rest):
        completions = [self.given[tuple(ids)].pop(0) for ids in prompt_ids]
        return (completions, None) if isinstance(self, GRPOTrainer) else completions

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        if self.current is not None:
            put(self.current, self.model)
        return output

    def compute_loss(self, model, inputs, *rest, **options):
        """Compute TRL's loss, after `trim`."""
        if self.trim:
            used = inputs["prompt_mask"].any(dim=0)
            cut = {name: inputs[name][:, used] for name in ("prompt_ids", "prompt_mask")}
            inputs = inputs | cut
        return super().compute_loss(model, inputs, *rest, **options)


class GivenGRPO(OnGivenRollouts, GRPOTrainer):
    """GRPOTrainer that uses given rollouts."""


class GivenRLOO(OnGivenRollouts, RLOOTrainer):
    """RLOOTrainer that uses given rollouts."""


TRAINERS = {"grpo": (GivenGRPO, GRPOConfig), "rloo": (GivenRLOO, RLOOConfig)}


class KeepGradient(TrainerCallback):
    """Callback that copies all gradients immediately before the optimizer uses them."""

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        """Copy the gradients."""
        self.gradients = {name: p.grad.clone() for name, p in model.named_parameters()}


def gradients(job: dict, folder: Path) -> None:
    """Write `gradient-<k>.safetensors` for the k-th setting in the job."""
    order = torch.tensor(job["order"])
    for number, setting in enumerate(job["settings"]):
        keep = KeepGradient()
        trainer = comparing(job, setting, folder, keep)
        exact = InDouble() if job["dtype"] == "float64" else nullcontext()
        with exact, patch("trl.trainer.utils.torch.randperm", return_value=order):
            trainer.train()
        save_file(keep.gradients, folder / f"gradient-{number}.safetensors")


def comparing(job: dict, setting: dict, folder: Path, keep: KeepGradient):
    """Make a trainer that takes one optimizer step on the job's rollouts."""
    kind, configuration = TRAINERS[setting["trainer"]]
    prompts = job["prompts"]
    count = len(prompts) * job["group_size"]
    micro = setting["micro_batch_size"] or count
    arguments = configuration(
        **plain(job), **setting["arguments"], max_steps=1, learning_rate=0.0, max_grad_norm=0.0,
        per_device_train_batch_size=micro, gradient_accumulation_steps=count // micro,
        gradient_checkpointing=False,
    )  # fmt: skip
    rewards = {p["text"]: list(p["rewards"]) for p in prompts}
    trainer = kind(
        model=policy(job), args=arguments, callbacks=[keep], processing_class=tokenizer(job),
        reward_funcs=lambda prompts, **_: [rewards[text].pop(0) for text in prompts],
        train_dataset=Dataset.from_list([{"prompt": p["text"]} for p in prompts]),
    )  # fmt: skip
    trainer.given = {tuple(p["tokens"]): list(p["completions"]) for p in prompts}
    trainer.trim = setting["trim"]
    if setting["off_policy"]:
        trainer.current = load_file(folder / "current.safetensors")
    if trainer.ref_model is not None:
        put(load_file(folder / "reference.safetensors"), trainer.ref_model)
    return trainer


def plain(job: dict) -> dict:
    """Return the arguments that all configurations in this module share."""
    return dict(
        output_dir=job["output_dir"], num_generations=job["group_size"], temperature=1.0,
        max_completion_length=job["max_completion_length"], use_cpu=job["device"] == "cpu",
        bf16=job.get("bf16", False), shuffle_dataset=False,
        lr_scheduler_type="constant", report_to="none",
        disable_tqdm=True, logging_strategy="no", save_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip


def policy(job: dict):
    """Load the job's model."""
    return AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"]))


def tokenizer(job: dict):
    """Load the job's tokenizer as its tokenizer.json defines it, with padding on the left."""
    return PreTrainedTokenizerFast.from_pretrained(job["model"], padding_side="left")


class Rows(TrainerCallback):
    """Callback that records seconds, seconds of generation and tokens of each optimizer step."""

    def __init__(self, device: str):
        self.device, self.rows = device, []

    def since(self, start: tuple[float, float]) -> list[float]:
        """Return wall and CPU seconds since the given start."""
        return [end - begun for end, begun in zip(now(self.device), start, strict=True)]

    def on_step_begin(self, args, state, control, **_):
        """Start timing a step."""
        self.begun, self.generating, self.tokens = now(self.device), [0.0, 0.0], 0

    def on_step_end(self, args, state, control, **_):
        """Record a step's row."""
        row = dict(zip(("wall", "cpu"), self.since(self.begun), strict=True))
        row |= dict(zip(("generate", "generate CPU"), self.generating, strict=True))
        self.rows.append(row | {"tokens": self.tokens})


class Timed(GRPOTrainer):
    """GRPOTrainer that measures the time of generation."""

    rows: Rows

    def _generate_single_turn(self, *arguments):
        start = now(self.rows.device)
        generated = super()._generate_single_turn(*arguments)
        took = self.rows.since(start)
        self.rows.generating = [x + y for x, y in zip(self.rows.generating, took, strict=True)]
        self.rows.tokens += sum(map(len, generated[0]))
        return generated


def steps(job: dict, folder: Path) -> None:
    """Write `result.json` with a row for each step, warm-up steps first, and the peak memory."""
    if job["device"] == "cpu":
        torch.set_num_threads(job["threads"])
    rows, drawn = Rows(job["device"]), DrawnRewards(job["seed"], job["zero_variance"])
    prompts = [{"prompt": p["text"], "id": p["id"]} for p in job["prompts"]]
    micro, count = job["micro_batch"], job["group_size"] * job["prompts_per_step"]
    arguments = GRPOConfig(
        **plain(job), max_steps=job["steps"], learning_rate=job["learning_rate"],
        per_device_train_batch_size=micro, gradient_accumulation_steps=count // micro,
        gradient_checkpointing=job["gradient_checkpointing"], max_grad_norm=0.0,
        loss_type="dr_grpo", scale_rewards="none", beta=0.0, seed=job["seed"],
    )  # fmt: skip
    trainer = Timed(
        model=policy(job), args=arguments, callbacks=[rows], processing_class=tokenizer(job),
        reward_funcs=lambda id, **_: [drawn.draw(name) for name in id],
        train_dataset=Dataset.from_list(prompts),
    )  # fmt: skip
    trainer.rows = rows
    before = peak_memory(job["device"])
    trainer.train()
    peak = peak_memory(job["device"])
    result = {"rows": rows.rows, "peak": peak, "above": peak - before}
    (folder / "result.json").write_text(json.dumps(result))


def main() -> None:
    """Entry."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=("gradients", "steps"))
    parser.add_argument("folder", type=Path, help="holds job.json")
    arguments = parser.parse_args()
    folder = arguments.folder
    job = json.loads((folder / "job.json").read_text()) | {"output_dir": str(folder / "trainer")}
    {"gradients": gradients, "steps": steps}[arguments.task](job, folder)


if __name__ == "__main__":
    main()
