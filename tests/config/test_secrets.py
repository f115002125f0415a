"""Keys are refused in configurations and never shown."""

from __future__ import annotations

import pytest

from grpo_ustat.config.run import check_no_secrets
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.config.secrets import is_secret, redact, redact_text

KEYS = {
    "hugging face": "hf_" + "aB3" * 10,
    "wandb": "wandb_v1_" + "a1" * 20,
    "openai": "sk-proj-" + "a1" * 20,
    "github": "ghp_" + "a1" * 18,
    "aws": "AKIA" + "A1" * 8,
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.x",
    "private": "-----BEGIN RSA PRIVATE KEY----- MIIEpAIBAAKCAQEA7 -----END RSA PRIVATE KEY-----",
    "bearer": "Authorization: Bearer abcdefgh12",
    "password in an address": "https://me:secret@host.example/path",
    "token in an address": "https://:secret@host.example/path",
}
HARMLESS = {
    "revision": "8f1d3c5a" * 5, "path": "/data/hf_models/tiny", "address": "https://host:8080/a@b",
    "model": "sk-learn/model", "template": "{question} = ", "none": None, "number": 7,
}  # fmt: skip


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_a_key_is_refused_and_not_shown(key):
    with pytest.raises(ConfigError) as caught:
        check_no_secrets({"dataset": {"options": [{"x": f"a {key} b"}]}}, {})
    assert "dataset.options.x looks like a key" in str(caught.value)
    assert key not in str(caught.value)


def test_what_an_environment_variable_keeps_secret_is_refused():
    known = {"WANDB_API_KEY": "0123456789" * 4, "HOME": "/home/me/abcdefgh", "ANY_KEY": "short"}
    assert is_secret("x", f"a{known['WANDB_API_KEY']}", known)
    assert not is_secret("x", "/home/me/abcdefgh", known) and not is_secret("x", "short", known)


def test_options_that_are_named_like_keys_are_refused():
    for name in ("api_key", "apikey", "dataset.options.hub_token", "PASSWORD", "secret"):
        assert is_secret(name, "x", {})
    for name in ("micro_batch_tokens", "num_tokens", "keyed", "tokenizer"):
        assert not is_secret(name, "x", {})


def test_all_else_is_kept():
    check_no_secrets(HARMLESS, {})
    assert redact(HARMLESS, environ={}) == HARMLESS


SHOWN = {  # what may be read beside a key; of the others nothing
    "bearer": "Authorization: ***",
    "password in an address": "https://***@host.example/path",
    "token in an address": "https://***@host.example/path",
}


@pytest.mark.parametrize("kind", KEYS)
def test_what_a_configuration_may_not_hold_is_hidden_in_texts_too(kind):
    assert redact_text(f"before {KEYS[kind]}", {}) == f"before {SHOWN.get(kind, '***')}"


def test_a_text_shows_no_value_of_an_environment_variable_that_is_a_key():
    assert redact_text("x=correct-horse-battery", {"MY_TOKEN": "correct-horse-battery"}) == "x=***"
    assert redact_text("/home/me/abcdefgh", {"HOME": "/home/me/abcdefgh"}) == "/home/me/abcdefgh"
