"""Sampling with a vLLM server: `vllm serve` on GPUs of its own, which takes new weights over NCCL.

The server's control routes are those of vLLM's development mode, and nobody is asked for a
password there: keep it on this machine or behind a firewall.
"""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

import torch
from transformers import AutoConfig

from grpo_ustat.config.rollout import TrainRollout
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.distributed.ranks import RefusedByRank, world
from grpo_ustat.draws import request_seeds
from grpo_ustat.policy.loading import Policy
from grpo_ustat.records import Prompt, Rollouts
from grpo_ustat.rollout.local import Sampling
from grpo_ustat.rollout.vllm import check_requests, checkpoint_weights, import_vllm, rollouts_of
from grpo_ustat.terminal.progress import Progress
from grpo_ustat.terminal.streams import single_line

PLAIN_SAMPLING = {  # of every request: nothing reshapes its distribution
    "n": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "ignore_eos": True,  # the model's own, which `end_tokens` may not hold
    "logprobs": 0,  # of the drawn token
    "return_token_ids": True,
    "skip_special_tokens": False,
}
SHAPE_FIELDS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
)  # fmt: skip
REQUESTS_AT_ONCE = 256  # requests on their way; the server puts them into batches of its own


class VllmServerEngine:
    """`grpo_ustat.rollout.vllm.VllmEngine` with the engine on a server.

    The server must hold a model of this policy's shape. `refresh` sends all weights, adapters
    merged, and forgets what the server computed with the old ones.
    """

    def __init__(self, policy: Policy, options: TrainRollout, rows: int):
        """Ask the server what it is, join its group of NCCL, and send the policy's weights.

        Args:
            policy: kept; `refresh` reads its weights again. On a CUDA device.
            options: with `url` and `timeout`.
            rows: completions sampled side by side, at most.

        Raises:
            ConfigError: vLLM is missing here, no server answers, or it is not such a server.
        """
        assert options.url is not None and options.timeout is not None  # `TrainRollout.check`
        if world() > 1:
            raise RefusedByRank(
                f"rollout=vllm_server on {world()} ranks: one process trains with a server; use "
                "one rank, or rollout=vllm, which has an engine on every rank"
            )
        self._policy, self._rows = policy, min(rows, REQUESTS_AT_ONCE)
        self._server = Server(options.url, options.timeout)
        import_vllm("vllm_server")
        self._model, self._limit = check_server(self._server, policy)
        self._sender = join_server(self._server, policy)
        self.refresh()

    def refresh(self) -> None:
        """Send the policy's weights, LoRA merged; let the server forget what it computed with the
        old ones.

        Raises:
            ConfigError: the server did not take them.
        """
        try:
            self._sender.send_weights()  # start_weight_update, update_weights, finish_weight_update
        except Exception as error:  # of vLLM's own client and NCCL; the group is of no use now
            reason = single_line(error, 300)
            raise ConfigError(
                f"{self._server.url} did not take the weights ({reason}): start the server anew, "
                "and then this command"
            ) from error
        if not self._server.post("reset_prefix_cache").get("success"):
            raise ConfigError(
                f"{self._server.url} kept what it computed with the old weights, as it does while "
                "it answers others: let this command be alone with it"
            )

    def sample(
        self,
        prompts: list[Prompt],
        group_size: int,
        sampling: Sampling,
        *,
        step: int = 0,
        first: int = 0,
    ) -> Rollouts:
        """See `grpo_ustat.rollout.local.sample`.

        Raises:
            ConfigError: the server would cut completions early or change the temperature, or does
                not answer.
        """
        encoded = self._policy.encode([prompt.text for prompt in prompts])
        fix = "start the server with --max-model-len {} or more"
        check_requests(encoded, sampling, self._limit, fix)
        options = PLAIN_SAMPLING | {
            "model": self._model,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "max_tokens": sampling.max_completion_length,
            "stop_token_ids": sorted(self._policy.end_tokens),  # these alone stop a request
        }
        completions, requests = range(first, first + group_size), []
        for prompt, ids in zip(prompts, encoded, strict=True):
            for seed in request_seeds(sampling.seed, sampling.stream, step, prompt.id, completions):
                requests.append(options | {"prompt": ids, "seed": seed})
        progress = Progress("writing", len(requests))
        completions_R = []
        with ThreadPoolExecutor(self._rows) as pool:
            for answer in pool.map(lambda one: self._server.post("v1/completions", one), requests):
                choice = answer["choices"][0]
                logprobs = None if sampling.greedy else choice["logprobs"]["token_logprobs"]
                completions_R.append((choice["token_ids"], logprobs))
                progress.add(1, len(choice["token_ids"]))
        return rollouts_of(self._policy, prompts, encoded, completions_R, sampling)


class Server:
    """The routes of one server, JSON in and out.

    Args:
        url: such as http://127.0.0.1:8000.
        timeout: seconds until an answer must be there.
    """

    def __init__(self, url: str, timeout: float):
        self.url, self.timeout = url.rstrip("/"), timeout
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def get(self, path: str) -> Any:
        """The answer to a question.

        Raises:
            ConfigError: there is none, or a refusal.
        """
        return self._answer(urllib.request.Request(f"{self.url}/{path}"))

    def post(self, path: str, content: Any = None) -> Any:
        """The answer to a request; see `get`."""
        data = json.dumps({} if content is None else content).encode()
        headers = {"Content-Type": "application/json"}
        return self._answer(urllib.request.Request(f"{self.url}/{path}", data, headers))

    def _answer(self, request: urllib.request.Request) -> Any:
        try:
            with self._open(request, timeout=self.timeout) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            reason = " ".join(error.read().decode(errors="replace").split())[:200]
            raise ConfigError(
                f"{request.full_url} answers {error.code} ({reason}): is this a vLLM server? Start "
                f"it with: {start_line()}"
            ) from error
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"rollout=vllm_server: no answer from {request.full_url} within {self.timeout:g} s "
                f"({error}): start the server with: {start_line()}; or choose rollout.url"
            ) from error


def start_line(model: str = "MODEL", length: int | None = None) -> str:
    """The command that starts a server for training."""
    room = f" --max-model-len {length}" if length else ""
    return (
        f"VLLM_SERVER_DEV_MODE=1 vllm serve {model} --host 127.0.0.1 --port 8000{room} "
        "--logprobs-mode processed_logprobs --generation-config vllm "
        '--weight-transfer-config \'{"backend": "nccl"}\''
    )


def check_server(server: Server, policy: Policy) -> tuple[str, int]:
    """Refuse a server that cannot take this policy's weights, or would sample otherwise.

    Returns:
        Its name of the model, and the tokens of prompt and completion that it has room for.

    Raises:
        ConfigError: naming what differs, and the command that starts the right one.
    """
    known = server.get("v1/models")["data"][0]
    config = server.get("server_info?config_format=json")["vllm_config"]
    model = config["model_config"]
    served = served_shape(model["model"], model["revision"])
    dtype = "bfloat16" if policy.bf16 else str(policy.model.dtype).removeprefix("torch.")
    own = policy.model.config
    differences = [
        ("--weight-transfer-config", (config.get("weight_transfer_config") or {}).get("backend"),
         "nccl"),
        ("--logprobs-mode", model["logprobs_mode"], "processed_logprobs"),
        ("--generation-config", model["generation_config"], "vllm"),
        ("--dtype", str(model["dtype"]).removeprefix("torch."), dtype),
        ("--quantization", model["quantization"], None),
        *(
            (f"the model's {name}", getattr(served, name, None), getattr(own, name, None))
            for name in SHAPE_FIELDS
        ),
    ]  # fmt: skip
    for name, there, wanted in differences:
        if there != wanted:
            raise ConfigError(
                f"the vLLM server at {server.url} has {name} {there}, training needs {wanted}: "
                f"start it with: {start_line(own.name_or_path or 'MODEL')} --dtype {dtype}"
            )
    return known["id"], known["max_model_len"]


def served_shape(model: str, revision: str | None) -> Any:
    """The configuration of the model that a server was started with, by its folder or hub id: the
    server itself does not tell it.

    Raises:
        ConfigError: it cannot be read on this machine.
    """
    try:
        return AutoConfig.from_pretrained(model, revision=revision)
    except (OSError, ValueError) as error:
        reason = single_line(error, 200)
        raise ConfigError(
            f"the vLLM server holds {model}, whose config.json cannot be read here ({reason}): "
            "start it with a model that this machine has"
        ) from error


def join_server(server: Server, policy: Policy) -> Any:
    """vLLM's own sender of weights, in one NCCL group with the server's workers.

    The sender is rank 0; it waits for the workers at a free port of this machine.

    Raises:
        ConfigError: the group does not come about.
    """
    transfer = "vllm.distributed.weight_transfer"
    nccl, base = import_module(f"{transfer}.nccl_engine"), import_module(f"{transfer}.base")
    clients = import_module(f"{transfer}.clients")

    class Checkpoint(base.WeightSource):
        """The weights under the names of a saved checkpoint, anew at each pass."""

        def metadata(self) -> list[Any]:
            """Name, type and shape of each weight, in the order of iteration."""
            return [
                base.ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self
            ]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(checkpoint_weights(policy.model).items())

    workers = server.get("get_world_size")["world_size"]
    host = own_address(server.url)
    with socket.socket() as free:
        free.bind((host, 0))
        port = free.getsockname()[1]
    info = nccl.NCCLTrainerInitInfo(
        master_address=host, master_port=port, world_size=1 + workers, rank=0
    )
    client = clients.HTTPVLLMWeightSyncClient(server.url, server.timeout)
    try:
        return nccl.NCCLTrainerWeightTransferEngine.trainer_init(
            info, client=client, source=Checkpoint()
        )
    except Exception as error:  # of vLLM's own client and NCCL
        reason = single_line(error, 300)
        raise ConfigError(
            f"the vLLM server at {server.url} and this process do not meet over NCCL at {host}:"
            f"{port} ({reason}): start the server anew, on other GPUs than this command's"
        ) from error


def own_address(url: str) -> str:
    """The address under which a server's machine reaches this one; nothing is sent."""
    place = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((place.hostname, place.port or 80))
        return probe.getsockname()[0]
