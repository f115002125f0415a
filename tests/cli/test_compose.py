"""What is refused before torch is imported."""

from __future__ import annotations

import pytest

from grpo_ustat.cli import compose
from grpo_ustat.cli.compose import parse
from grpo_ustat.config.schema import ConfigError


@pytest.mark.slow
@pytest.mark.parametrize("words, line", [
    (["lora=r16"], "lora.r=16 needs the package peft: pip install -e '.[cli,lora]'"),
    (["rollout=vllm"], "rollout=vllm needs the package vllm: pip install -e '.[cli,vllm]', or use "
     "rollout=local"),
])  # fmt: skip
def test_a_package_that_a_run_needs_is_missed_before_anything_is_imported(monkeypatch, words, line):
    monkeypatch.setattr(compose, "_is_installed", lambda _: False)
    with pytest.raises(ConfigError) as caught:
        parse("train", words)
    assert str(caught.value) == line
    parse("train", [*words, "dry_run=true"])
    monkeypatch.setattr(compose, "_is_installed", lambda _: True)
    parse("train", words)
