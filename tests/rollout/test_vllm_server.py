"""The engine on a vLLM server, against a stand-in for `vllm serve` on this machine.

What only GPUs show, the way of the weights over NCCL, is in docs/distributed.md.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import compose
from fakes import letter_prompts, random_policy

from grpo_ustat.config.identity import folder_name
from grpo_ustat.config.rollout import TrainRollout
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.distributed.ranks import RefusedByRank
from grpo_ustat.rollout import vllm_server
from grpo_ustat.rollout.local import Sampling
from grpo_ustat.rollout.vllm_server import Server, VllmServerEngine, own_address

PROMPTS = letter_prompts("ab", "c", "abcde")
SAMPLING = Sampling(seed=0, stream="test", max_completion_length=9, temperature=0.8)


def server_config(model, **changes):
    """As /server_info of vllm 0.32 writes it; `model` is the folder of the served one."""
    served = {
        "model": str(model), "revision": None, "max_model_len": 64, "dtype": "torch.float32",
        "logprobs_mode": "processed_logprobs", "generation_config": "vllm", "quantization": None,
    }  # fmt: skip
    transfer = changes.pop("transfer", {"backend": "nccl"})
    return {"model_config": served | changes, "weight_transfer_config": transfer}


class FakeServer(ThreadingHTTPServer):
    """Answers as `vllm serve`: each token is a function of the request's seed and its place."""

    daemon_threads = True

    def __init__(self, model):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.config, self.calls, self.requests = server_config(model), [], []
        self.resets = True  # whether the cache can be forgotten
        self.url = f"http://127.0.0.1:{self.server_port}"

    def answer(self, path, content):
        """The answer's content; KeyError where there is no such route."""
        if path == "/v1/completions":
            self.requests.append(content)
            return {"choices": [self._write(content)]}
        self.calls.append(path.lstrip("/"))
        return {
            "/v1/models": {"data": [{"id": "served", "max_model_len": 64}]},
            "/server_info?config_format=json": {"vllm_config": self.config},
            "/get_world_size": {"world_size": 2},
            "/reset_prefix_cache": {"success": self.resets},
            "/start_weight_update": {},
            "/update_weights": {},
            "/finish_weight_update": {},
        }[path]

    def _write(self, content):
        own, tokens = np.random.default_rng(content["seed"]), []
        while len(tokens) < content["max_tokens"]:
            tokens.append(int(own.integers(1, 12)))
            if tokens[-1] in content["stop_token_ids"]:
                break
        logprobs = {"token_logprobs": [-0.5 * token for token in tokens]}
        return {"token_ids": tokens, "logprobs": logprobs}


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):  # noqa: N802
        self._reply(None)

    def do_POST(self):  # noqa: N802
        length = int(self.headers["Content-Length"])
        self._reply(json.loads(self.rfile.read(length) or "null"))

    def _reply(self, content):
        try:
            code, answer = 200, self.server.answer(self.path, content)
        except KeyError:
            code, answer = 404, {"detail": "Not Found"}
        body = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def policy():
    return random_policy(dtype=torch.float32)


@pytest.fixture
def server(policy, monkeypatch, tmp_path):
    """A server of the policy's shape, and a sender that goes through its routes as vLLM's does."""
    policy.model.config.save_pretrained(tmp_path)
    server = FakeServer(tmp_path)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()

    def join(connection, policy):
        def send_weights():
            for route in ("start_weight_update", "update_weights", "finish_weight_update"):
                connection.post(route)

        return SimpleNamespace(send_weights=send_weights)

    monkeypatch.setattr(vllm_server, "import_vllm", lambda _: None)
    monkeypatch.setattr(vllm_server, "join_server", join)
    yield server
    server.shutdown()
    server.server_close()


def engine_of(policy, server):
    options = TrainRollout("vllm_server", None, None, None, None, server.url, 5.0)
    return VllmServerEngine(policy, options, rows=3)


def test_rollouts_are_those_of_the_server(policy, server):
    rollouts = engine_of(policy, server).sample(PROMPTS, 4, SAMPLING)
    assert rollouts.tokens_PGT.shape[:2] == (3, 4) and rollouts.ended_PG.any()
    np.testing.assert_array_equal(
        rollouts.logprobs_PGT, np.where(rollouts.mask_PGT, -0.5 * rollouts.tokens_PGT, 0.0)
    )
    last = np.take_along_axis(rollouts.tokens_PGT, rollouts.lengths_PG[..., None] - 1, axis=2)
    np.testing.assert_array_equal(rollouts.ended_PG, last[..., 0] == 1)
    sent = server.requests[0]
    assert sent["model"] == "served" and sent["temperature"] == 0.8 and sent["max_tokens"] == 9
    assert sent["top_p"] == 1.0 and sent["top_k"] == 0 and sent["repetition_penalty"] == 1.0
    assert sent["stop_token_ids"] == [1] and sent["ignore_eos"] and sent["return_token_ids"]
    prompts = [policy.tokenizer(p.text)["input_ids"] for p in PROMPTS]
    assert {str(one["prompt"]) for one in server.requests} == {str(ids) for ids in prompts}


def test_draws_are_keyed(policy, server):
    """The same call again, in parts and in another order; answers come in the requests' order."""
    engine = engine_of(policy, server)
    whole = engine.sample(PROMPTS, 6, SAMPLING, step=3)
    assert engine.sample(PROMPTS, 6, SAMPLING, step=3).texts_PG == whole.texts_PG
    assert engine.sample(PROMPTS[::-1], 6, SAMPLING, step=3).texts_PG == whole.texts_PG[::-1]
    later = engine.sample(PROMPTS, 2, SAMPLING, step=3, first=4)
    assert later.texts_PG == [texts[4:] for texts in whole.texts_PG]
    others = [
        engine.sample(PROMPTS, 6, SAMPLING, step=4),
        engine.sample(PROMPTS, 6, dataclasses.replace(SAMPLING, seed=1), step=3),
        engine.sample(PROMPTS, 6, dataclasses.replace(SAMPLING, stream="value"), step=3),
    ]
    assert all(other.texts_PG != whole.texts_PG for other in others)


def test_greedy_asks_for_the_likeliest_token(policy, server):
    greedy = dataclasses.replace(SAMPLING, greedy=True)
    assert engine_of(policy, server).sample(PROMPTS, 1, greedy).logprobs_PGT is None
    assert {one["temperature"] for one in server.requests} == {0.0}


def test_a_refresh_sends_the_weights_and_then_resets_the_cache(policy, server):
    """The reset comes last: what is cached before is of the old weights."""
    order = ["start_weight_update", "update_weights", "finish_weight_update", "reset_prefix_cache"]
    engine = engine_of(policy, server)
    assert server.calls[-4:] == order
    engine.refresh()
    assert server.calls[-8:] == 2 * order
    server.resets = False
    with pytest.raises(ConfigError, match="kept what it computed with the old weights"):
        engine.refresh()


def test_weights_that_do_not_arrive_are_one_line(policy, server):
    engine = engine_of(policy, server)

    def fail():
        raise RuntimeError("NCCL error:\n unhandled system error")

    engine._sender.send_weights = fail
    with pytest.raises(ConfigError, match="did not take the weights .NCCL error: unhandled system"):
        engine.refresh()


@pytest.mark.parametrize("changes, message", [
    ({"transfer": None}, "has --weight-transfer-config None, training needs nccl: start it with"),
    ({"transfer": {"backend": "ipc"}}, "has --weight-transfer-config ipc, training needs nccl"),
    ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode raw_logprobs, training needs processed"),
    ({"generation_config": "auto"}, "has --generation-config auto, training needs vllm"),
    ({"dtype": "torch.bfloat16"}, "has --dtype bfloat16, training needs float32"),
    ({"quantization": "fp8"}, "has --quantization fp8, training needs None"),
])  # fmt: skip
def test_another_server_is_refused_with_the_command_that_starts_the_right_one(
    policy, server, tmp_path, changes, message
):
    server.config = server_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message) as refused:
        engine_of(policy, server)
    assert "VLLM_SERVER_DEV_MODE=1 vllm serve" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "update_weights" not in server.calls


def test_a_server_of_another_shape_or_an_unknown_model_is_refused(policy, server, tmp_path):
    for vocabulary, message in (
        (99, "has the model's vocab_size 99, training needs 12: start it with"),
        (None, "holds .*, whose config.json cannot be read here"),
    ):
        if vocabulary:
            random_policy(vocab=vocabulary).model.config.save_pretrained(tmp_path / "other")
        server.config = server_config(tmp_path / ("other" if vocabulary else "nowhere"))
        with pytest.raises(ConfigError, match=message):
            engine_of(policy, server)


def test_a_server_without_development_mode_and_no_server_are_one_line(policy, server):
    engine = Server(server.url, 5.0)
    with pytest.raises(ConfigError, match="/pause answers 404 .*VLLM_SERVER_DEV_MODE=1 vllm serve"):
        engine.post("pause")
    with pytest.raises(ConfigError, match="no answer from http://127.0.0.1:9/v1/models within 5 s"):
        Server("http://127.0.0.1:9", 5.0).get("v1/models")


def test_completions_that_do_not_fit_are_refused(policy, server):
    engine = engine_of(policy, server)
    with pytest.raises(ConfigError, match="start the server with --max-model-len 65 or more"):
        engine.sample(PROMPTS, 1, dataclasses.replace(SAMPLING, max_completion_length=60))
    assert not server.requests


def test_several_ranks_are_refused(policy, server, monkeypatch):
    monkeypatch.setattr(vllm_server, "world", lambda: 2)
    with pytest.raises(RefusedByRank, match="rollout=vllm_server on 2 ranks"):
        engine_of(policy, server)


def test_the_trainer_waits_where_the_server_can_reach_it():
    assert own_address("http://127.0.0.1:8000") == "127.0.0.1"


@pytest.mark.slow
def test_configurations():
    cuda = ("rollout=vllm_server", "launch.device=cuda", "dry_run=true")
    config = compose("train", *cuda)
    assert config.rollout.url == "http://127.0.0.1:8000" and config.rollout.timeout == 300
    other = compose("train", *cuda, "rollout.url=http://10.0.0.7:8001", "rollout.timeout=9")
    assert folder_name(other) == folder_name(config) != folder_name(compose("train"))
    for words, message in (
        (("rollout=vllm_server",), "launch.device=cpu with rollout=vllm_server: .* over NCCL"),
        ((*cuda, "launch.num_processes=2"), "one process trains with a server"),
        ((*cuda, "rollout.url=127.0.0.1"), "rollout.url=127.0.0.1 is no address of a server"),
        ((*cuda, "rollout.url=null"), "rollout.url is of a vLLM server"),
        (("rollout.url=http://127.0.0.1:8000",), "rollout.url is of a vLLM server: use rollout=vl"),
        ((*cuda, "rollout.max_model_len=9"), "rollout.max_model_len is vLLM's: use rollout=vllm"),
    ):
        with pytest.raises(ConfigError, match=message):
            compose("train", *words)
    with pytest.raises(ConfigError, match="rollout=vllm_server is one of train's"):
        compose("mse", "rollout=vllm_server")
