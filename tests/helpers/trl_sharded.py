"""Runs of TRL's own GRPOTrainer whose parameters are sharded, one after another on the same ranks.

    torchrun --nproc_per_node 2 tests/helpers/trl_sharded.py FOLDER fsdp2 '{"CASE": {...}}'

writes for every case `CASE-RANK.npz`, what was measured, `CASE-RANK.json`, what its model was made
of, and `CASE.pt`, the weights at the end; of stdout what follows a line `== CASE` is its own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
import trl_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_ustat.integrations.trl import sharding
from grpo_ustat.policy.output_layer import replaced_forward

SHARDED = {
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_USE_ORIG_PARAMS": "true",
    "ACCELERATE_USE_FSDP": "true",
}
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true", "DS_ACCELERATOR": "cpu"}
WAYS = {  # what `accelerate launch` makes of the usual files
    "single": {},
    "ddp": {},
    "zero2": DEEPSPEED,
    "zero3": DEEPSPEED,
    "fsdp2": SHARDED | {"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"},
}


def let_deepspeed_shard(folder, stage):
    """Its configuration, into the environment. Small parameters, which all of the embedded
    policy's are, are partitioned too.
    """
    zero = {"stage": stage}
    if stage == 3:
        zero |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    names = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"
    config = {"zero_optimization": zero, "bf16": {"enabled": "auto"}} | dict.fromkeys(names, "auto")
    path = folder / f"deepspeed-{os.environ['RANK']}.json"
    path.write_text(json.dumps(config))
    os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(path)


def let_fsdp_shard_on_a_cpu():
    """Where there is no GPU accelerate runs DDP instead, without a word."""
    from accelerate import state
    from accelerate.utils import DistributedType

    set_up = state.AcceleratorState.__init__

    def patched(self, *args, **kwargs):
        first = "fsdp_plugin" not in state.AcceleratorState._shared_state
        set_up(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        if first and plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            shared = state.PartialState._shared_state
            self.distributed_type = shared["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = plugin
            if self._mixed_precision != "no":
                plugin.set_mixed_precision(self._mixed_precision)

    state.AcceleratorState.__init__ = patched


def prepared(folder, way):
    """Make this process shard in a way; return the arguments of GRPOConfig that the way needs."""
    os.environ |= WAYS[way]
    if way.startswith("fsdp"):
        let_fsdp_shard_on_a_cpu()
    if not way.startswith("zero"):
        return {}
    from transformers import training_args

    training_args.is_torch_bf16_gpu_available = lambda *_, **__: True
    let_deepspeed_shard(folder, int(way[-1]))
    return {"use_cpu": False, "ddp_backend": "gloo"}  # `use_cpu` would switch DeepSpeed off


class Table:
    """Completions of the first policy, a function of the prompt alone."""

    def __init__(self):
        self.model = AutoModelForCausalLM.from_pretrained(trl_run.MODEL)
        self.end = AutoTokenizer.from_pretrained(trl_run.MODEL).eos_token_id
        self.rows = {}

    def __call__(self, prompt_ids, *_):
        """Stands in for `_generate_single_turn`: groups of eight are whole on every rank."""
        return [self.of(tuple(row))[i % 8] for i, row in enumerate(prompt_ids)], None

    def of(self, prompt):
        if prompt not in self.rows:
            with torch.random.fork_rng([]), torch.no_grad():
                torch.manual_seed(sum(prompt))
                rows = self.model.generate(
                    torch.tensor([prompt] * 8), do_sample=True, max_new_tokens=64, top_k=0
                )[:, len(prompt) :].tolist()
            self.rows[prompt] = [
                row[: row.index(self.end) + 1] if self.end in row else row for row in rows
            ]
        return self.rows[prompt]


def made_of(trainer):
    """Kinds of modules and parameters, and how many parameters DeepSpeed keeps in parts."""
    model = trainer.model_wrapped
    parameters = list(model.parameters())
    return {
        "modules": sorted({kind.__name__ for m in model.modules() for kind in type(m).__mro__}),
        "parameters": sorted({type(p).__name__ for p in parameters}),
        "partitioned": sum(hasattr(p, "ds_id") and p.numel() == 0 for p in parameters),
        "of": len(parameters),
    }


def needs_more(act, by_layer):
    """A way to gather weights that are larger than any memory, of a layer too or whole alone."""

    def larger(trainer):
        model, gather = act(trainer)

        def gather_more(module, without):
            sizes, gathered = gather(module, without)
            fits = by_layer and (module is not model or without)
            return sizes if fits else [*sizes, 10**15], gathered

        return model, gather_more

    return larger


def breaks_once(scorer, error):
    """A layer raises in the middle of a round, for the first group."""
    scores = scorer._scores

    def fails(*_, **__):
        raise error

    def attempt(model, group, place, layers):
        scorer._scores = scores
        with replaced_forward(layers.layers[1], fails):
            return scores(model, group, place, layers)

    scorer._scores = attempt


def run(
    folder, name, rank, *, table=None, fails_on=None, fails_in_round_on=None, runs_out_on=None,
    no_memory_on=None, by_layer_fits=False, lora=0, **options,
):  # fmt: skip
    """One case.

    Args:
        folder, name: where to, and under which name.
        rank: this one.
        table: instead of what the policy samples.
        fails_on: rank whose scoring raises.
        fails_in_round_on: rank of which a layer raises, of those in step.
        runs_out_on: rank of which a layer runs out of memory, once.
        no_memory_on: rank whose memory does not hold the whole weights.
        by_layer_fits: whether it holds those of one layer at a time.
        lora: rank of adapters; 0: all parameters are trained.
        options: of `trl_run.train`.
    """

    def prepare(trainer, callback):
        if table is not None:
            trainer._generate_single_turn = table
        if rank == fails_on:
            callback.scorer.scores = fails
        if rank == fails_in_round_on:
            breaks_once(callback.scorer, RuntimeError("no rule\nfor this layer"))
        if rank == runs_out_on:
            breaks_once(callback.scorer, torch.OutOfMemoryError("CUDA out of memory"))

    if lora:
        from peft import LoraConfig

        options["peft_config"] = LoraConfig(r=lora, target_modules=["q_proj", "down_proj"])

    def fails(*_):
        raise RuntimeError("no rule\nfor this layer")

    sharded = dict(sharding.SHARDED)
    if rank == no_memory_on:
        more = {way: needs_more(act, by_layer_fits) for way, act in sharded.items()}
        sharding.SHARDED |= more
    try:
        trainer, callback = trl_run.train(
            folder / name, rewards=(trl_run.right, trl_run.ones), prepare=prepare,
            **{"save_strategy": "no", "log_completions": False} | options,
        )  # fmt: skip
    finally:
        sharding.SHARDED |= sharded
    made = made_of(trainer)
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if rank == 0:
        torch.save(weights, folder / f"{name}.pt")
    if callback is not None:
        made |= {"precision": callback.precision, "seconds": callback.seconds}
        made |= {"way": callback.way, "at_once": callback.scorer.at_once}
        terms = [one.terms for one in callback.windows]
        np.savez(folder / f"{name}-{rank}.npz", terms=np.array(terms))
    (folder / f"{name}-{rank}.json").write_text(json.dumps(made))


def main():
    """All cases of a way."""
    folder, way, cases = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    arguments = prepared(folder, way)
    rank, table = int(os.environ.get("RANK", 0)), Table()
    for name, options in cases.items():
        if rank == 0:
            print(f"== {name}", flush=True)
        if options.pop("table", False):
            options["table"] = table
        run(folder, name, rank, **options | arguments)


if __name__ == "__main__":
    main()
