"""Updates of TRL's own GRPOTrainer whose gradients are audited; as a script one case after another
on the ranks of a launcher.

    torchrun --nproc_per_node 2 tests/helpers/trl_audit.py FOLDER fsdp2 '{"CASE": {...}}'

writes `CASE-RANK.json` of every case: what was found, and the kinds of the model's modules.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import trl_run
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from grpo_ustat.estimators.row_weights import Loss
from grpo_ustat.integrations.trl.audit import UpdateAudit
from grpo_ustat.integrations.trl.generation import completions_of, logged_rewards, whole_groups
from grpo_ustat.policy.loading import Policy
from grpo_ustat.policy.scores.backward import parameter_sizes
from grpo_ustat.policy.scores.rollouts import score_rollouts
from grpo_ustat.policy.scores.sketch import Sketch

BASELINE_NAMES = {
    "group": ("group_std", {"epsilon": 1e-4}),
    "batch": ("batch_std", {"epsilon": 1e-4}),
    "none": ("group_mean", {}),
}


def declared(trainer):
    """The documented loss of a trainer."""
    baseline, options = BASELINE_NAMES[trainer.scale_rewards]
    return Loss(
        trainer.loss_type, baseline, options, trainer.loss_type, trainer.max_completion_length,
        mask_truncated_completions=trainer.mask_truncated_completions,
    )  # fmt: skip


class Expecting:
    """Audits every update of a trainer, with scores of another copy of the model.

    Every rank scores some of the groups. Its weights are the trainer's first ones, so the trainer's
    must not move. They are scored in the precision of the trainer's loss.
    """

    def __init__(self, trainer, model, sketch=16381, loss=None):
        self.trainer = trainer
        if trainer.accelerator.mixed_precision == "bf16":
            self.precision = torch.autocast("cpu", torch.bfloat16)
            if trainer.accelerator.distributed_type.value in ("DEEPSPEED", "FSDP"):
                model = copy.deepcopy(model).bfloat16()
        else:
            self.precision = nullcontext()
        self.policy = Policy(
            model, trainer.processing_class, frozenset(), trainer.processing_class.pad_token_id
        )
        self.sketch = Sketch(parameter_sizes(model.eval()), sketch)
        self.audit = UpdateAudit(trainer, self.sketch, loss or declared(trainer))
        self.generate = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = self.measured

    def measured(self, inputs):
        output, trainer = self.generate(inputs), self.trainer
        if not trainer.model.training:
            return output
        rows = gather_object(completions_of(output, trainer.processing_class.pad_token_id))
        logged = {name: trainer._logs["rewards"][name] for name in trainer.reward_func_names}
        rewards = logged_rewards(logged, trainer.reward_weights, len(rows))
        groups, _ = whole_groups(rows, *rewards, trainer.num_generations)
        accelerator, scores = trainer.accelerator, {}
        varied = [group for group in groups if group.varies]
        with torch.random.fork_rng([]), torch.enable_grad(), self.precision:
            for group in varied[accelerator.process_index :: accelerator.num_processes]:
                features_GR = score_rollouts(
                    self.policy, group.rollouts(), np.arange(len(group.completions)),
                    trainer.temperature, features=self.sketch,
                ).features_BR  # fmt: skip
                for one, sketch_R in zip(group.completions, features_GR.numpy(), strict=True):
                    key = (tuple(one.prompt_ids), tuple(one.completion_ids))
                    scores[key] = sketch_R.astype(np.float32)
        self.audit.expect(scores, groups)
        return output


def train(folder, model=None, scored=None, sketch=16381, loss=None, fault=None, **changes):
    """A trainer after two updates that move nothing, and its audit.

    Args:
        folder: for its checkpoints.
        model, scored: that is trained, and a copy that is scored.
        sketch: numbers.
        loss: the declared one; None: the trainer's own.
        fault: a factor by which the loss is too large.
        changes: arguments of GRPOConfig.
    """
    arguments = dict(
        output_dir=str(folder), use_cpu=True, bf16=False,
        per_device_train_batch_size=16, gradient_accumulation_steps=2, num_generations=8,
        max_completion_length=64, learning_rate=0.0, max_steps=2, logging_steps=1,
        save_strategy="no", report_to=[], disable_tqdm=True, seed=0, beta=0.0,
    )  # fmt: skip
    arguments |= changes
    peft = arguments.pop("peft_config", None)
    dropout = arguments.pop("dropout", 0.0)
    trainer = GRPOTrainer(
        model=model or AutoModelForCausalLM.from_pretrained(trl_run.MODEL),
        args=GRPOConfig(**arguments),
        processing_class=AutoTokenizer.from_pretrained(trl_run.MODEL),
        reward_funcs=[trl_run.right, trl_run.ones],
        train_dataset=Dataset.from_list(trl_run.questions()),
        peft_config=peft,
    )
    scored = scored or AutoModelForCausalLM.from_pretrained(trl_run.MODEL)
    for module in trainer.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = dropout
    if fault is not None:
        own = trainer._compute_loss
        trainer._compute_loss = lambda *args: fault * own(*args)
    audit = Expecting(trainer, scored, sketch, loss).audit
    trainer.train()
    return trainer, audit


def main():
    """All cases of a way."""
    from trl_sharded import prepared

    folder, way, cases = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    arguments = prepared(folder, way)
    scored = AutoModelForCausalLM.from_pretrained(trl_run.MODEL)
    for name, options in cases.items():
        trainer, audit = train(folder / name, scored=scored, **options | arguments)
        kinds = {kind.__name__ for m in trainer.model_wrapped.modules() for kind in type(m).__mro__}
        kinds |= {type(p).__name__ for p in trainer.model_wrapped.parameters()}
        found = {"results": audit.results, "kinds": sorted(kinds)}
        (folder / f"{name}-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
