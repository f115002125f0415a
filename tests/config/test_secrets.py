"""Keys are refused in configurations and never shown."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from grpo_ustat.config.run import check_no_secrets
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.config.secrets import (
    KEY_FORM,
    find_secret,
    is_secret,
    redact,
    redact_code,
    redact_text,
)
from grpo_ustat.runs import history

KEYS = {  # put together here, so that no scanner takes them for keys
    "hugging face": "hf_" + "aB3" * 10,
    "wandb": "wandb_v1_" + "a1" * 20,
    "wandb, of before": "WANDB_API_KEY=" + "0f" * 20,
    "openai": "sk-proj-" + "a1" * 20,
    "anthropic": "sk-ant-" + "api03-" + "a1" * 20,
    "github": "ghp_" + "a1" * 18,
    "github, of few rights": "github" + "_pat_" + "a1" * 20,
    "aws": "AKIA" + "A1" * 8,
    "aws, for a session": "ASIA" + "A1" * 8,
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
    assert "dataset.options.x" in str(caught.value)
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
    "wandb, of before": "WANDB_API_KEY=***",
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


@pytest.mark.parametrize("kind", KEYS)
def test_a_key_in_place_of_an_options_name_is_not_shown_either(kind):
    with pytest.raises(ConfigError) as caught:
        check_no_secrets({"dataset": {"options": {KEYS[kind]: 1}}}, {})
    assert KEYS[kind] not in str(caught.value) and "dataset.options" in str(caught.value)
    assert KEYS[kind] not in str(redact({"x": [{KEYS[kind]: 1}]}, environ={}))


@pytest.mark.parametrize("kind", KEYS)
def test_an_error_and_the_changes_of_a_program_show_no_key(kind):
    line = history.last_line(OSError(f"401 for {KEYS[kind]} of host"))
    changes = redact_code(f"+    client({KEYS[kind]!r})\n", {})
    for text in (line, changes):
        assert KEYS[kind] not in text and "***" in text
        assert KEYS[kind].rpartition("=")[2][-12:] not in text or "@host" in KEYS[kind]


def test_a_program_keeps_what_is_no_key():
    code = "token=tokenizer.eos, key=lambda row: row, secret = read(), commit " + "8f1d3c5a" * 5
    assert redact_code(code, {}) == code
    assert redact_code('password: "correct-horse"', {}) == 'password: "***"'


@pytest.mark.slow
def test_the_repositorys_own_texts_hold_no_key():
    """So that the forms are narrow: all of conf/, of the documentation, and of the package."""
    root = Path(__file__).parents[2]
    files = [*root.glob("conf/**/*.yaml"), *root.glob("docs/*.md"), *root.glob("*.md")]
    files += [file for file in root.glob("grpo_ustat/**/*.py") if file.name != "secrets.py"]
    assert len(files) > 300
    for file in files:
        lines = [line for line in file.read_text().splitlines() if ">>>" not in line]  # examples
        assert not KEY_FORM.findall("\n".join(lines)), file
    for file in root.glob("conf/**/*.yaml"):
        assert find_secret(yaml.safe_load(file.read_text()), {}) is None, file
