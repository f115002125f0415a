"""A few steps of TRL's own GRPOTrainer on an embedded policy; as a script under torchrun too.

    torchrun --nproc_per_node 2 tests/helpers/trl_run.py FOLDER '{"num_generations": 4}'

writes `terms-<rank>.npz`, what the callback of each rank measured last, and `audit-<rank>.json`,
what its audits found.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np

import grpo_ustat

MODEL = Path(grpo_ustat.__file__).parent / "assets" / "tiny_base"


def questions(count=200, seed=0):
    """Sums of two numbers, of which the policy solves some."""
    numbers = random.Random(seed)
    rows = []
    for _ in range(count):
        a, b = numbers.randint(1, 9), numbers.randint(1, 30)
        rows.append({"prompt": f"{a}+{b}=", "answer": str(a + b)})
    return rows


def right(completions, answer, **_):
    """Whether what stands after #### is the answer."""
    pairs = zip(completions, answer, strict=True)
    return [float(text.split("####")[-1].strip() == truth) for text, truth in pairs]


def ones(completions, **_):
    """The share of the digit 1; None for a completion of nothing."""
    return [text.count("1") / len(text) if text else None for text in completions]


def train(
    folder, rewards=(right,), every=1, measure=True, peft_config=None, dropout=0.0,
    measuring=None, prepare=None, **changes,
):  # fmt: skip
    """Trainer and callback, after training; checkpoints and completions of every step.

    `measuring` are arguments of the callback. What `prepare` does with the two is done before
    training.

    `dropout` is of attention; a random state or mode that the callback had changed would show in
    the weights.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from grpo_ustat.integrations.trl import GradientNoiseCallback, record

    arguments = dict(
        output_dir=str(folder), use_cpu=True, bf16=False,
        per_device_train_batch_size=16, gradient_accumulation_steps=4, num_generations=8,
        max_completion_length=64, learning_rate=1e-3, max_steps=3, logging_steps=1, save_steps=1,
        report_to=[], disable_tqdm=True, log_completions=True, seed=0,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(MODEL),
        args=GRPOConfig(**arguments | changes),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        reward_funcs=[*rewards, record],
        train_dataset=Dataset.from_list(questions()),
        peft_config=peft_config,
    )
    for module in trainer.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = dropout
    callback = None
    if measure:
        options = {"every": every, "sketch": 1_000_000} | (measuring or {})
        callback = GradientNoiseCallback(trainer, **options)
        trainer.add_callback(callback)
    if prepare is not None:
        prepare(trainer, callback)
    trainer.train()
    return trainer, callback


def launched(script, *arguments, ranks=2):
    """A script of this folder on so many ranks, after its end."""
    from forks import free_port

    here = Path(__file__).parent
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}",
               f"--master_port={free_port()}", here / script, *map(str, arguments)]  # fmt: skip
    env = os.environ | {"PYTHONPATH": str(here.parents[1]), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=env, capture_output=True, text=True)


if __name__ == "__main__":
    changes = json.loads(sys.argv[2])
    trainer, callback = train(Path(sys.argv[1]), rewards=(right, ones), **changes)
    rank = trainer.accelerator.process_index
    np.savez(Path(sys.argv[1]) / f"terms-{rank}.npz", *callback.windows[-1].terms)
    audit = json.dumps(callback.audit.results)
    (Path(sys.argv[1]) / f"audit-{rank}.json").write_text(audit)
