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
KINDS = {  # of keys that have a form of their own, by who gives them out
    "Hugging Face": r"\bhf_[A-Za-z0-9]{20,}|\bapi_org_[A-Za-z0-9]{20,}",
    "OpenAI, Anthropic, OpenRouter, Stripe": r"\b(?:sk|rk)[-_][\w-]{20,}",
    "GitHub": r"\bgh[oprsu]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}",
    "GitLab": r"\bgl(?:pat|dt|rt|ptt|cbt|oas)-[\w-]{20,}",
    "Weights & Biases": r"\bwandb_v1_\w{20,}|\blocal-[0-9a-f]{40}\b",
    "AWS": r"\b(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}\b",
    "Google": r"\bAIza[\w-]{35}|\bya29\.[\w-]{20,}|\bGOCSPX-[\w-]{20,}|\b1//0[\w-]{30,}",
    "Azure": r"(?<=AccountKey=)[\w+/=]{20,}|(?<=SharedAccessKey=)[\w+/=]{20,}"
    r"|(?<=[?&;]sig=)[\w%+/=-]{20,}|\b\w{3}8Q~[\w~.-]{30,}",
    "Slack": r"\bxox[a-z]-[\w-]{10,}|\bxapp-\d-[\w-]{10,}"
    r"|(?<=hooks\.slack\.com/services/)[\w/]{20,}",
    "Groq, xAI, Perplexity, Replicate, NVIDIA": r"\bgsk_\w{20,}|\bxai-\w{20,}|\bpplx-\w{20,}"
    r"|\br8_\w{20,}|\bnvapi-[\w-]{20,}",
    "npm, PyPI, Docker": r"\bnpm_\w{30,}|\bpypi-[\w-]{30,}|\bdckr_[op]at_[\w-]{20,}",
    "Databricks, SendGrid, Telegram": r"\bdapi[0-9a-f]{32}|\bSG\.[\w-]{16,}\.[\w-]{16,}"
    r"|\b\d{8,10}:AA[\w-]{30,}",
    "Vault, Grafana, DigitalOcean": r"\bhv[sb]\.[\w-]{20,}|\bgl(?:c|sa)_\w{20,}|\bdop_v1_\w{20,}",
    "web tokens": r"\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*",
    "private keys": r"-----BEGIN [A-Z ]*PRIVATE KEY[\s\S]*|\bAGE-SECRET-KEY-1\w{20,}",
    "headers": r"\bBearer\s+\S{8,}|(?<=Authorization: )(?:Basic|token)\s+\S{8,}",
    "addresses with a password": r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)|(?<=://)[\w-]{20,}(?=@)"
    r"|(?<=[?&])(?:[\w-]*token|api_?key|password|secret|X-Amz-Signature)=[^\s&]{8,}",
}
FORMS = re.compile("|".join(KINDS.values()))
WORDS = (
    r"(?:api|access|private|account|secret|subscription|auth|signing|encryption)_?key"
    r"|secret|token|password|passwd|passphrase|credentials?|authorization|connection_?string"
)
NAMES = re.compile(rf"(^|[_.-])({WORDS})$", re.I)
ASSIGNED = re.compile(rf"((?:key|{WORDS})=)[^\s,;&]+", re.I)
QUOTED = re.compile(rf"((?:{WORDS})[\"']?\s*[:=]\s*[\"'])[^\"'\s$<{{(]{{8,}}(?=[\"'])", re.I)
HEXADECIMAL = re.compile(r"\b[0-9a-f]{40,}\b")  # an old wandb key, or a commit
VARIABLES = re.compile(
    r"(^|_)(KEY|KEY_ID|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|PAT|DSN)$", re.I
)
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
        named = [str(name) for name in cast(Mapping[Any, Any], content)]
        if any(is_secret("", name, environ) for name in named):
            return f"{key}.{REDACTED}" if key else REDACTED
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
            REDACTED if is_secret("", name, environ) else name: redact(value, str(name), environ)
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


def redact_code(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """A program's text, its changes or an error of it, with every secret in it replaced.

    Fingerprints stay, and so does what is assigned by name alone: `token=tokenizer.eos` is no key.

    >>> redact_code("commit 8f1d: api_key = 'abcdefgh1', token=next(tokens)", {})
    "commit 8f1d: api_key = '***', token=next(tokens)"
    """
    for value in _secrets_in(environ):
        text = text.replace(value, "***")
    return FORMS.sub("***", QUOTED.sub(r"\1***", text))


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
