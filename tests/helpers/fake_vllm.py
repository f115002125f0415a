"""A stand-in for the package vllm."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch


class FakeLLM:
    """Draws from a model of the same shape, a request at a time; its weights start at zero."""

    model: torch.nn.Module  # set by the fixture
    made: list[FakeLLM]

    def __init__(self, folder, **options):
        self.config = json.loads((Path(folder) / "config.json").read_text())
        self.options, self.calls = options, []
        self.model = copy.deepcopy(self.model)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        self.model_config = SimpleNamespace(max_model_len=options.get("max_model_len") or 64)
        torch.set_num_threads = lambda count: None  # as vLLM does on a CPU
        torch.manual_seed(0)
        self.made.append(self)

    def collective_rpc(self, method, kwargs):
        self.calls.append(method)
        self.weights = dict(kwargs["weights_iterator"])
        self.model.load_state_dict(self.weights, strict=True)

    def reset_prefix_cache(self):
        self.calls.append("reset_prefix_cache")

    def generate(self, requests, options, use_tqdm):
        torch.rand(1)  # vLLM draws from the process's generator beside the requests' own
        return [
            SimpleNamespace(outputs=[self._write(request["prompt_token_ids"], option)])
            for request, option in zip(requests, options, strict=True)
        ]

    @torch.no_grad()
    def _write(self, prompt, option):
        own, tokens, logprobs = torch.Generator().manual_seed(option.seed), [], []
        greedy = option.temperature == 0
        while len(tokens) < option.max_tokens:
            logits = self.model(input_ids=torch.tensor([prompt + tokens])).logits[0, -1]
            logp = torch.log_softmax(logits / (1.0 if greedy else option.temperature), -1)
            noise = torch.empty_like(logp).exponential_(generator=own)
            token = int(logp.argmax() if greedy else (logp.exp() / noise).argmax())
            tokens.append(token)
            logprobs.append({token: SimpleNamespace(logprob=float(logp[token]))})
            if token in option.stop_token_ids:
                break
        return SimpleNamespace(
            token_ids=tuple(tokens), logprobs=None if option.logprobs is None else logprobs
        )


def install(monkeypatch, model):
    """`import vllm` gives engines that draw from models of this one's shape."""
    FakeLLM.model, FakeLLM.made = model, []
    module = SimpleNamespace(LLM=FakeLLM, SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", module)
