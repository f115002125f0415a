"""No key in a configuration: it is written into run folders and sent to trackers.

A value counts as secret if it has the form of a known kind of key, if it is an address with a
password, if the option's name says so, or if it is what a variable such as HF_TOKEN holds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_ustat.checks import ConfigError

REDACTED = "(redacted)"
FORMS = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bsk-[\w-]{20,}|\bgh[opsu]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"
    r"|\bwandb_v1_\w{20,}|\bglpat-[\w-]{20,}|\bAKIA[A-Z0-9]{16}\b|\bxox[abprs]-[\w-]{10,}"
    r"|\beyJ[\w-]{10,}\.[\w-]{10,}\.|-----BEGIN [A-Z ]*PRIVATE KEY|\bBearer\s+\S{8,}"
    r"|://[^/\s:@]*:[^/\s@]+@"
)
NAMES = re.compile(r"(^|[_.-])(api_?key|secret|token|password|passwd|credentials?)$", re.I)
VARIABLES = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.I)
SHORTEST = 12  # characters of a variable's value; shorter ones may stand in any text


def check_no_secrets(config: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> None:
    """Refuse a configuration that holds a key; the message does not show it.

    Raises:
        ConfigError: naming the option.
    """
    for key, value in _leaves(config):
        if is_secret(key, value, environ):
            raise ConfigError(
                f"{key} looks like a key or password, and a configuration is written to disk: "
                "leave it out and set it in the environment, such as HF_TOKEN or WANDB_API_KEY"
            )


def redacted(content: Any, key: str = "", environ: Mapping[str, str] = os.environ) -> Any:
    """A nested value with every secret in it replaced.

    >>> redacted({"seed": 0, "options": {"password": "x", "url": "https://me:me@host/"}})
    {'seed': 0, 'options': {'password': '(redacted)', 'url': '(redacted)'}}
    """
    if isinstance(content, Mapping):
        return {name: redacted(value, str(name), environ) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [redacted(value, key, environ) for value in content]
    return REDACTED if is_secret(key, content, environ) else content


def is_secret(key: str, value: Any, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether an option's value must not be shown.

    >>> is_secret("model.revision", "8f1d" * 10, {}), is_secret("api_key", "x", {})
    (False, True)
    """
    if not isinstance(value, str) or not value:
        return False
    held = (text for name, text in environ.items() if VARIABLES.search(name))
    in_environment = any(len(text) >= SHORTEST and text in value for text in held)
    return in_environment or bool(NAMES.search(key) or FORMS.search(value))


def _leaves(content: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(content, Mapping):
        for name, value in content.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    elif isinstance(content, list | tuple):
        for value in content:
            yield from _leaves(value, key)
    else:
        yield key, content
