"""Settings of TRL's notebooks, launch lines and pages, and of open-r1's recipes, each trained with
a small model and the callback; as a script under torchrun too.

    torchrun --nproc_per_node 2 tests/helpers/trl_settings.py FOLDER grpo_vlm.py

writes `NAME-RANK.json`, what came of it.

What a setting keeps of its file: rows of a batch, the group size, how often a batch is reused, the
loss, sampling, adapters, precision, quantisation, sharding. What it does not: the model and its
data; vLLM, in whose place transformers generates; Liger and 8-bit optimizers, whose kernels need a
GPU; lengths of completions, which are cut; and the number of processes, of which there are two
with so many rows each that all together have those of the file. Models that read images have random
weights, and each picture is of a few pixels.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import trl_images
import trl_run
import trl_sharded

from grpo_ustat.integrations.trl import windows

LENGTH = 24  # of completions, in tokens
TOOL_LENGTH = 160  # with a call of a tool, which is text
WINDOW_GROUPS = 4  # instead of 16, of runs of few prompts a batch
RANKS = 2  # whatever the file says
EVERY_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
COMMAND_LINE = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05}  # of --use_peft alone
MODELS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Setting:
    """What matters of a file.

    Attributes:
        arguments: of GRPOConfig.
        lora: arguments of LoraConfig; None: all weights are trained.
        four_bit: whether the base model is quantised, by bitsandbytes.
        dtype: of the weights, before DeepSpeed.
        way: "single", "zero2" or "zero3".
        processes: of the file.
        tools: "": none; "tool"; "environment"; "boards": every reset hands out another task.
        refused: words of the line by which it is refused; "": it is measured.
        images: what kind of model the file's is, of those in `trl_images`; "": it reads no images.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] | None = None
    four_bit: bool = False
    dtype: str = "float32"
    way: str = "single"
    processes: int = 1
    tools: str = ""
    refused: str = ""
    images: str = ""


def batch(rows, accumulation=1, size=8, **others):
    """Arguments by their short names."""
    return dict(
        per_device_train_batch_size=rows, gradient_accumulation_steps=accumulation,
        num_generations=size, **others,
    )  # fmt: skip


VISION_LORA = {
    "r": 8,
    "lora_alpha": 32,
    "lora_dropout": 0.1,
    "target_modules": ["q_proj", "v_proj"],
}
VISION_LINE = COMMAND_LINE | {"target_modules": ["q_proj", "v_proj"]}  # of a command line
GSPO = batch(
    8, 2, steps_per_generation=8, importance_sampling_level="sequence", epsilon=3e-4,
    epsilon_high=4e-4, beta=0.0, loss_type="grpo", learning_rate=1e-5,
)  # fmt: skip
QLORA = {"r": 32, "lora_alpha": 32, "target_modules": EVERY_LINEAR}

SETTINGS = {
    # trl/examples/notebooks
    "grpo_agent.ipynb": Setting(tools="tool"),
    "grpo_rnj_1_instruct.ipynb": Setting(batch(8, learning_rate=2e-5), QLORA, four_bit=True),
    "openenv_sudoku_grpo.ipynb": Setting(
        batch(1, 64, 2, learning_rate=5e-6, temperature=0.8, top_k=10), tools="boards",
        refused="are one group but have several prompts",
    ),
    "openenv_sudoku_grpo.ipynb, one board": Setting(
        batch(1, 64, 2, learning_rate=5e-6, temperature=0.8, top_k=10), tools="environment"
    ),
    "grpo_qwen3_vl.ipynb": Setting(
        batch(2, size=2, learning_rate=2e-5), VISION_LORA, four_bit=True, images="qwen3_vl"
    ),
    # trl/docs/source/lora_without_regret.md
    "lora_without_regret.md, Python": Setting(
        batch(1, 4, 8, generation_batch_size=8, learning_rate=5e-5),
        {"r": 1, "lora_alpha": 32, "target_modules": "all-linear"},
    ),
    # trl/docs/source/paper_index.md
    "paper_index.md, 2-GRPO": Setting({"num_generations": 2, "loss_type": "grpo"}),
    "paper_index.md, Lite PPO": Setting(
        batch(4, 32, 8, steps_per_generation=8, scale_rewards="batch", loss_type="dapo",
              beta=0.0, top_p=0.99, top_k=100, temperature=0.99)
    ),  # fmt: skip
    "paper_index.md, CISPO": Setting(
        batch(16, 2, 16, loss_type="cispo", epsilon_high=5.0, scale_rewards="batch",
              cast_lm_head_to_fp32=True)
    ),  # fmt: skip
    "paper_index.md, LUSPO": Setting(
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 2e-3,
         "epsilon_high": 2.5e-3}
    ),  # fmt: skip
    "paper_index.md, GDPO": Setting(
        {"multi_objective_aggregation": "normalize_then_sum"}
    ),
    # trl/examples/scripts and docs/source/grpo_trainer.md, launched with DeepSpeed
    "grpo_trainer.md, 70B": Setting(batch(4), way="zero3", processes=32),
    "gspo.py": Setting(
        GSPO, VISION_LINE, dtype="bfloat16", way="zero3", processes=8,
    ),
    "grpo_vlm.py, Qwen2.5-VL": Setting(
        {"learning_rate": 1e-5}, VISION_LINE, dtype="bfloat16", way="zero3", processes=8,
        images="qwen2_5_vl",
    ),
    "seta.py, colocate": Setting(batch(1, 1, 2, learning_rate=5e-7), way="zero2", processes=4),
    # open-r1/README.md with its recipes
    "open-r1, Qwen2.5-1.5B code": Setting(
        batch(16, 4, 14, beta=0.01, learning_rate=5e-6), way="zero2", processes=7
    ),
    "open-r1, Qwen2.5-Coder-7B codeforces": Setting(
        batch(4, 32, 16, loss_type="dr_grpo", scale_rewards=False, temperature=0.7,
              mask_truncated_completions=True, learning_rate=1e-6),
        way="zero3", processes=8,
    ),
}  # fmt: skip


def text_of(completion):
    """Of a completion or a conversation what the policy wrote."""
    if isinstance(completion, str):
        return completion
    return "".join(turn.get("content") or "" for turn in completion if turn["role"] != "tool")


def on_text(reward):
    """A reward function that reads conversations too."""

    @functools.wraps(reward)
    def rewarded(completions, **columns):
        return reward([text_of(one) for one in completions], **columns)

    return rewarded


def letters(completions, **_):
    """The share of letters, in which completions of random weights differ too."""
    return [sum(map(str.isalpha, text)) / max(1, len(text)) for text in completions]


def look_up(key: str) -> str:
    """Look something up.

    Args:
        key: what.
    """
    return f"nothing at {key}"


class Task:
    """An environment whose every reset hands out the same task."""

    def reset(self, **_) -> str:
        return "Solve it."

    def look_up(self, key: str) -> str:
        """Look something up.

        Args:
            key: what.
        """
        return look_up(key)


class Boards(Task):
    """An environment whose every reset hands out another task, as a Sudoku server does."""

    def reset(self, **_) -> str:
        return f"Solve {random.random()}."


def call_tools(trainer):
    """Let every other first turn be a call of the tool, which the embedded policy never writes."""
    tokenizer, generate = trainer.processing_class, trainer._generate_single_turn
    call = '<tool_call>\n{"name": "look_up", "arguments": {"key": "a"}}\n</tool_call>'
    ids = [*tokenizer(call).input_ids, tokenizer.eos_token_id]

    def turn(prompt_ids, *args, **kwargs):
        completions, logprobs = generate(prompt_ids, *args, **kwargs)
        if "num_generations" not in kwargs:  # the first
            completions = [list(ids) if i % 2 else one for i, one in enumerate(completions)]
        return completions, logprobs

    trainer._generate_single_turn = turn


def train(setting: Setting, folder: Path) -> dict[str, Any]:
    """What came of as many updates as the first window needs: `accepted`, `line` and more."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoTokenizer,
        BitsAndBytesConfig,
    )
    from trl import GRPOConfig, GRPOTrainer, chat_template_utils

    from grpo_ustat.integrations.trl import GradientNoiseCallback

    auto, model = AutoModelForCausalLM, str(trl_run.MODEL)  # TRL loads it, under ZeRO-3 in parts
    if setting.images:  # before GRPOConfig, from which on DeepSpeed partitions what is made
        auto, reader = AutoModelForImageTextToText, trl_images.processor(setting.images)
        model = str(folder / f"model-{os.environ.get('RANK', 0)}")
        trl_images.model_of(setting.images, reader.tokenizer).save_pretrained(model)
        data = trl_images.questions(200)
    else:
        reader = AutoTokenizer.from_pretrained(trl_run.MODEL)
        data = trl_run.questions(2000)
    arguments = dict(setting.arguments)
    rows = arguments.get("per_device_train_batch_size", 8) * setting.processes
    if setting.way != "single":
        rows //= RANKS
        arguments |= {"use_cpu": False, "ddp_backend": "gloo"}  # use_cpu switches DeepSpeed off
    arguments["per_device_train_batch_size"] = rows
    args = GRPOConfig(
        **{"output_dir": str(folder), "use_cpu": True, "report_to": [], "disable_tqdm": True,
           "save_strategy": "no", "seed": 0, "logging_steps": 1,
           "max_completion_length": TOOL_LENGTH if setting.tools else LENGTH} | arguments
    )  # fmt: skip
    ranks = 1 if setting.way == "single" else RANKS
    groups = max(1, rows * ranks * args.steps_per_generation // args.num_generations)
    reused = args.steps_per_generation / args.gradient_accumulation_steps
    args.max_steps = int((windows.window_batches(groups) - 1) * reused) + 1
    if setting.tools:
        reader.chat_template = chat_template_utils.qwen3_chat_template
        data = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in data]
    args.model_init_kwargs = {"dtype": MODELS[setting.dtype]}
    if setting.four_bit:
        args.model_init_kwargs = None
        model = auto.from_pretrained(
            model, dtype=MODELS[setting.dtype], device_map="cpu",
            quantization_config=BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_quant_type="nf4",
                bnb_4bit_compute_dtype=torch.float16,
            ),
        )  # fmt: skip
    trainer = GRPOTrainer(
        model=model, args=args, processing_class=reader,
        reward_funcs=[on_text(trl_run.right), on_text(letters if setting.images else trl_run.ones)],
        train_dataset=Dataset.from_list(data),
        peft_config=None if setting.lora is None else LoraConfig(**setting.lora),
        tools=[look_up] if setting.tools == "tool" else None,
        environment_factory={"environment": Task, "boards": Boards}.get(setting.tools),
    )  # fmt: skip
    if setting.tools:
        trainer.model.config.max_position_embeddings = 4096  # TRL ends tools' turns there
        call_tools(trainer)
    lines: list[str] = []
    show = GradientNoiseCallback._print

    def printed(self, *some):
        lines.extend(some)
        show(self, *some)

    with mock.patch.object(GradientNoiseCallback, "_print", printed):
        callback = GradientNoiseCallback(trainer, every=1)
        trainer.add_callback(callback)
        trainer.train()
    measured = [line for line in lines if line.endswith("of the time so far")]
    history = trainer.state.log_history
    return {
        "accepted": bool(callback.windows) and not callback.fault,
        "line": measured[0] if measured else callback.fault,
        "lines": lines,
        "steps": trainer.state.global_step,
        "expected_steps": args.max_steps,
        "loss_is_finite": all(
            torch.tensor(row["loss"]).isfinite() for row in history if "loss" in row
        ),
        "tool_calls": max((row.get("tools/call_frequency", 0) for row in history), default=0),
        "groups": len(callback.windows[0].terms.g_sq_P) if callback.windows else 0,
        "sharded": trl_sharded.made_of(trainer)["partitioned"],
        "setting": asdict(setting),
    }


def run(name: str, folder: Path) -> dict[str, Any]:
    """What came of a setting, with windows that are as short as tests need.

    In evaluation on a CPU with AVX512-BF16 bitsandbytes repacks weights of 4 bits in place, and
    does not train with them from then on; on a GPU, where such runs are, it does not.
    """
    repacked = mock.patch("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
    with (
        mock.patch.object(windows, "WINDOW_GROUPS", WINDOW_GROUPS),
        repacked if SETTINGS[name].four_bit else nullcontext(),
    ):
        return train(SETTINGS[name], folder)


def main():
    """One setting, on this rank."""
    folder, name = Path(sys.argv[1]), sys.argv[2]
    trl_sharded.prepared(folder, SETTINGS[name].way)
    done = run(name, folder)
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(done, default=str))


if __name__ == "__main__":
    main()
