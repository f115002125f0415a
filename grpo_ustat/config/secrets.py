"""Detection of secrets, which are refused in configurations and hidden in output.

A value counts as a secret if its option is named like a secret, if it contains the value of an
environment variable such as HF_TOKEN, or if it has a common form of secrets, such as an address
with a password.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

REDACTED = "(redacted)"
# Regular expressions for common forms of secrets, by service.
KEY_FORMS = {
    "Hugging Face": r"\bhf_[A-Za-z0-9]{20,}",
    "Weights & Biases": r"\bwandb_v1_\w{20,}|(?i:(?<=key=))[0-9a-f]{40}\b",
    "OpenAI, Anthropic, OpenRouter": r"\bsk-[\w-]{20,}",
    "GitHub": r"\bgh[oprsu]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}",
    "AWS": r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    "headers and addresses": r"\bBearer\s+\S{8,}|(?<=://)[^/\s:@]*:[^/\s@]+(?=@)",
}
KEY_FORM = re.compile("|".join(KEY_FORMS.values()))
SECRET_WORDS = (
    r"(?:api|access|private|secret|auth)_?key"
    r"|secret|token|password|passwd|credentials?|authorization"
)
SECRET_NAME = re.compile(rf"(^|[_.-])({SECRET_WORDS})$", re.I)
SECRET_VARIABLE = re.compile(rf"(^|_)(KEY|{SECRET_WORDS})$", re.I)
ASSIGNED_SECRET = re.compile(rf"((?:key|{SECRET_WORDS})=)[^\s,;&]+", re.I)
QUOTED_SECRET = re.compile(
    rf"((?:{SECRET_WORDS})[\"']?\s*[:=]\s*[\"'])[^\"'\s$<{{(]{{8,}}(?=[\"'])", re.I
)
# An old wandb key or a commit hash.
HEXADECIMAL = re.compile(r"\b[0-9a-f]{40,}\b")
# Minimum length in characters of a secret in an environment variable. Shorter values could occur in
# ordinary text by chance.
MIN_SECRET_CHARACTERS = 12


def find_secret(content: Any, environ: Mapping[str, str] = os.environ, key: str = "") -> str | None:
    """Return the dotted key of the first secret in a nested value, or None.

    >>> find_secret({"seed": 0, "options": [{"password": "x"}]})
    'options.password'
    """
    if isinstance(content, Mapping):
        for name, value in cast(Mapping[Any, Any], content).items():
            if is_secret("", str(name), environ):
                return f"{key}.{REDACTED}".lstrip(".")
            secret_key = find_secret(value, environ, f"{key}.{name}".lstrip("."))
            if secret_key is not None:
                return secret_key
        return None
    if isinstance(content, list | tuple):
        keys = (find_secret(value, environ, key) for value in cast(Sequence[Any], content))
        return next((inner for inner in keys if inner is not None), None)
    return key if is_secret(key, content, environ) else None


def redact(content: Any, key: str = "", environ: Mapping[str, str] = os.environ) -> Any:
    """Replace every secret in a nested value.

    >>> redact({"seed": 0, "options": {"password": "x", "url": "https://me:me@host/"}})
    {'seed': 0, 'options': {'password': '(redacted)', 'url': '(redacted)'}}
    """
    if isinstance(content, Mapping):
        return {
            REDACTED if is_secret("", name, environ) else name: redact(value, str(name), environ)
            for name, value in cast(Mapping[Any, Any], content).items()
        }
    if isinstance(content, list | tuple):
        return [redact(value, key, environ) for value in cast(Sequence[Any], content)]
    return REDACTED if is_secret(key, content, environ) else content


def redact_text(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Replace every secret in a text.

    A long hexadecimal number is treated as a secret, because the text does not show whether it is
    one.

    >>> redact_text("token=abc at https://me:pass@host", {})
    'token=*** at https://***@host'
    """
    return HEXADECIMAL.sub("***", ASSIGNED_SECRET.sub(r"\1***", redact_code(text, environ)))


def redact_code(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Replace every secret in source code, a diff or an error message.

    Hexadecimal fingerprints are kept. An unquoted value that is assigned to a name such as `token`
    is also kept, because `token=tokenizer.eos` contains no secret.

    >>> redact_code("commit 8f1d: api_key = 'abcdefgh1', token=next(tokens)", {})
    "commit 8f1d: api_key = '***', token=next(tokens)"
    """
    for value in _secrets_in(environ):
        text = text.replace(value, "***")
    return KEY_FORM.sub("***", QUOTED_SECRET.sub(r"\1***", text))


def is_secret(key: str, value: Any, environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if an option's value must not be shown.

    >>> is_secret("model.revision", "8f1d" * 10, {}), is_secret("api_key", "x", {})
    (False, True)
    """
    if not isinstance(value, str) or not value:
        return False
    in_environment = any(text in value for text in _secrets_in(environ))
    return in_environment or bool(SECRET_NAME.search(key) or KEY_FORM.search(value))


def _secrets_in(environ: Mapping[str, str]) -> list[str]:
    """Return the values of variables that are named like secrets and long enough to be secrets."""
    named = (text for name, text in environ.items() if SECRET_VARIABLE.search(name))
    return [text for text in named if len(text) >= MIN_SECRET_CHARACTERS]
