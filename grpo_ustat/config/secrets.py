"""What is secret: refused in a configuration, hidden in what is shown or sent elsewhere.

A value counts as secret if it has the form of a known kind of key, if it is an address with a
password, if its option's name says so, or if it is what a variable such as HF_TOKEN holds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

REDACTED = "(redacted)"
FORMS = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bsk-[\w-]{20,}|\bgh[opsu]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"
    r"|\bwandb_v1_\w{20,}|\bglpat-[\w-]{20,}|\bAKIA[A-Z0-9]{16}\b|\bxox[abprs]-[\w-]{10,}"
    r"|\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*|-----BEGIN [A-Z ]*PRIVATE KEY[\s\S]*|\bBearer\s+\S{8,}"
    r"|(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"
)
WORDS = r"api_?key|secret|token|password|passwd|credentials?"
NAMES = re.compile(rf"(^|[_.-])({WORDS})$", re.I)
ASSIGNED = re.compile(rf"((?:key|{WORDS})=)[^\s,;&]+", re.I)
HEXADECIMAL = re.compile(r"\b[0-9a-f]{40,}\b")  # an old wandb key, or a commit
VARIABLES = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.I)
SHORTEST = 12  # characters of a variable's value; shorter ones may stand in any text


def find_secret(content: Any, environ: Mapping[str, str] = os.environ, key: str = "") -> str | None:
    """The dotted key of the first secret in a nested value; None where there is none.

    >>> find_secret({"seed": 0, "options": [{"password": "x"}]})
    'options.password'
    """
    if isinstance(content, Mapping):
        inner: Iterator[tuple[str, Any]] = (
            (f"{key}.{name}" if key else str(name), value)
            for name, value in cast(Mapping[Any, Any], content).items()
        )
    elif isinstance(content, list | tuple):
        inner = ((key, value) for value in cast(Sequence[Any], content))
    else:
        return key if is_secret(key, content, environ) else None
    keys = (find_secret(value, environ, path) for path, value in inner)
    return next((path for path in keys if path is not None), None)


def redact(content: Any, key: str = "", environ: Mapping[str, str] = os.environ) -> Any:
    """A nested value with every secret in it replaced.

    >>> redact({"seed": 0, "options": {"password": "x", "url": "https://me:me@host/"}})
    {'seed': 0, 'options': {'password': '(redacted)', 'url': '(redacted)'}}
    """
    if isinstance(content, Mapping):
        return {
            name: redact(value, str(name), environ)
            for name, value in cast(Mapping[Any, Any], content).items()
        }
    if isinstance(content, list | tuple):
        return [redact(value, key, environ) for value in cast(Sequence[Any], content)]
    return REDACTED if is_secret(key, content, environ) else content


def redact_text(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """A text with every secret in it replaced.

    Nothing says what a long hexadecimal number in a text is, so it counts as a key.

    >>> redact_text("token=abc at https://me:pass@host", {})
    'token=*** at https://***@host'
    """
    for value in _secrets_in(environ):
        text = text.replace(value, "***")
    return HEXADECIMAL.sub("***", FORMS.sub("***", ASSIGNED.sub(r"\1***", text)))


def is_secret(key: str, value: Any, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether an option's value must not be shown.

    >>> is_secret("model.revision", "8f1d" * 10, {}), is_secret("api_key", "x", {})
    (False, True)
    """
    if not isinstance(value, str) or not value:
        return False
    in_environment = any(text in value for text in _secrets_in(environ))
    return in_environment or bool(NAMES.search(key) or FORMS.search(value))


def _secrets_in(environ: Mapping[str, str]) -> list[str]:
    """Values of variables that are named like keys and long enough to be one."""
    named = (text for name, text in environ.items() if VARIABLES.search(name))
    return [text for text in named if len(text) >= SHORTEST]
