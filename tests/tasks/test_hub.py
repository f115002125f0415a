"""A hub that does not answer: asked once, told in one line, and then only its cache is read."""

from __future__ import annotations

import time
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.policy.tokenizer import load_tokenizer
from grpo_ustat.tasks import hub
from grpo_ustat.tasks.rows import Origin


@pytest.fixture
def online(monkeypatch):
    """As where HF_HUB_OFFLINE is not set; undone after the test, whatever it sets."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    hub.go_offline_if_unreachable.cache_clear()
    yield
    hub.go_offline_if_unreachable.cache_clear()


def session(monkeypatch, head):
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: SimpleNamespace(head=head))


def refuse(*_, **__):
    raise ConnectionError("Name or service not known")


def test_a_hub_that_answers_is_used(monkeypatch, capsys, online):
    asked = []
    session(monkeypatch, lambda url, timeout: asked.append((url, timeout)))
    assert not hub.go_offline_if_unreachable() and not hub.go_offline_if_unreachable()
    assert asked == [(constants.ENDPOINT, hub.ANSWER_SECONDS)]
    assert not constants.HF_HUB_OFFLINE and capsys.readouterr().err == ""


@pytest.mark.parametrize("load, message", [
    (lambda: load_tokenizer("no-org/no-model"), "model_name_or_path=no-org/no-model: it is not "
     "in the hub's local cache, and the hub does not answer: .* set HF_HUB_OFFLINE=1"),
    (lambda: Origin("dataset.path", "no-org/no-data").rows("train"), "set HF_HUB_OFFLINE=1$"),
])  # fmt: skip
def test_one_that_does_not_is_told_in_the_first_line(monkeypatch, capsys, online, load, message):
    session(monkeypatch, refuse)
    with pytest.raises(ConfigError, match=message):
        load()
    assert constants.HF_HUB_OFFLINE
    assert capsys.readouterr().err == (
        "warning: the hub does not answer (Name or service not known): only its local cache is "
        "read, as with HF_HUB_OFFLINE=1\n"
    )


def test_one_that_is_silent_is_not_waited_for(monkeypatch, capsys, online):
    session(monkeypatch, lambda *_, **__: time.sleep(5))
    monkeypatch.setattr(hub, "ANSWER_SECONDS", 0.05)
    assert hub.go_offline_if_unreachable()
    assert "(no answer in 0.05 s)" in capsys.readouterr().err


def test_nobody_asks_offline(monkeypatch, online):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    session(monkeypatch, refuse)
    assert not hub.go_offline_if_unreachable()
