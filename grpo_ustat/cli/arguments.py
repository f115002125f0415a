"""What can be told of the words of a command line before Hydra reads them: dashes, blanks, a
missing `=`, brackets and quotes that do not close.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Sequence
from itertools import takewhile

from grpo_ustat.cli.errors import fits, unknown_key
from grpo_ustat.config.folders import CONF
from grpo_ustat.config.load import SCHEMAS, all_fields
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.config.values import example_value, field_at, quote_for_shell, to_type

CLOSING = {"(": ")", "[": "]", "{": "}"}


def check_flags(unknown: Sequence[str], arguments: Sequence[str], flags: Sequence[str]) -> None:
    """Refuse words with dashes that are no flags.

    Args:
        unknown: those that the parser of flags did not take.
        arguments: the whole command line.
        flags: all that there are.

    Raises:
        ConfigError: with the field as it is written.
    """
    dashed = [word for word in unknown if word.startswith("-")]
    if unknown and not dashed:
        raise ConfigError(f"{unknown[0]} comes too late: write flags first, then field=value")
    typed, fields = [], []
    for word in dashed:
        name, equals, value = word.partition("=")
        following = list(arguments)[list(arguments).index(word) + 1 :][:1]
        if not equals and following and "=" not in following[0] and following[0][:1] != "-":
            word, value = f"{word} {following[0]}", following[0]
        near = difflib.get_close_matches(name, flags, n=1, cutoff=0.8)
        if near and not value:
            raise ConfigError(f"unknown flag {name}: did you mean {near[0]}?")
        typed.append(word)
        key = name.lstrip("-").replace("-", "_")
        infos = [field_at(key, all_fields(schema)) for schema in SCHEMAS.values()]
        kinds = [info.kind for info in infos if info]
        example = "true" if "bool" in kinds else "VALUE"
        fields.append(to_type(key, value or example, next(iter(kinds), None)))
    if typed:
        raise ConfigError(f"{' '.join(typed)}: fields have no dashes, write {' '.join(fields)}")


def check_words(words: Sequence[str], schema: type, sweep: bool = False) -> None:
    """Refuse words that are no overrides.

    Args:
        words: of the command line, without flags.
        schema: of the command.
        sweep: whether commas are between the values of a sweep.

    Raises:
        ConfigError: with what to write instead.
    """
    for i, word in enumerate(words):
        rest = list(words[i + 1 :])
        key, equals, value = word.partition("=")
        if not equals and rest[:1] == ["="]:
            typed, value = " ".join(words[i : i + 3]), "".join(rest[1:2])
        elif not equals and rest and rest[0].startswith("="):
            typed, value = f"{word} {rest[0]}", rest[0][1:]
        elif equals and not value and rest and "=" not in rest[0] and not rest[0].startswith("~"):
            typed, value = f"{word} {rest[0]}", rest[0]
        elif equals and key != key.strip():
            typed, key, value = word, key.strip(), value.strip()
        else:
            _check_closed(word, rest, schema)
            if "\n" in word:
                raise ConfigError(
                    f"{' '.join(word.split())}: a value is one line, leave out its end"
                )
            if re.search(r"(^|,)glob\(", value) and not re.fullmatch(r"glob\([^()]+\)", value):
                names = re.sub(r"glob\(\[?|\]?\)", "", value).strip(",")
                if not names:
                    raise ConfigError(f"{word}: glob(...) needs a pattern of names")
                written = shlex.quote(f"{key}=glob([{names}])")
                raise ConfigError(f"{word}: glob(...) is the whole value, write {written}")
            if equals and not key:
                raise ConfigError(f"{word}: no field stands before the =, write FIELD{word}")
            if value.startswith("="):
                raise ConfigError(f"{word}: one = is enough, write {key}={value.lstrip('=')}")
            if not equals and not word.startswith("~"):
                raise ConfigError(_without_equals(word, words, schema))
            field = field_at(key, all_fields(schema)) if equals else None
            number = re.fullmatch(r"-?[\d.]+", value) and value not in ("0", "1")
            if number and field and field.kind == "bool":  # which OmegaConf would take as true
                example = f"{key}={example_value(key, 'bool', CONF)}"
                raise ConfigError(f"{word}: true or false is needed, such as {example}")
            continue
        written = to_type(key, value, _kind(key, schema), sweep)
        raise ConfigError(f"{' '.join(typed.split())}: leave out the blanks, write {written}")


def _kind(key: str, schema: type) -> str | None:
    """The kind of a field; None of what is none."""
    field = field_at(key.lstrip("+"), all_fields(schema))
    return field.kind if field and field.schema is None else None


def _check_closed(word: str, rest: Sequence[str], schema: type) -> None:
    """Refuse a word whose brackets or quotes do not close, with those behind it that close them."""
    fault = unclosed(word)
    if fault is None:
        return
    for count in range(1, len(rest) + 1):
        whole = " ".join([word, *rest[:count]])
        if fault[-1] in "([{" and unclosed(whole) is None:
            commas = re.sub(r"\s*,\s*|\s+", ",", whole)
            raise ConfigError(
                f"{whole}: the shell splits this at the blank, write {commas} or '{whole}'"
            )
        if "=" in rest[count - 1]:
            break
    key, _, value = word.partition("=")
    if fault in ("'", '"') and not value.startswith(fault) and _is_text(key, schema):
        fixed, reason = quote_for_shell(key, value), f"the quote {fault} is not closed"
    elif fault in ("'", '"'):
        fixed, reason = word.replace(fault, ""), f"the quote {fault} is not closed"
    elif fault in CLOSING.values():
        fixed, reason = word[: word.rindex(fault)], f"there is a {fault} too many"
    elif value.startswith(fault[0]) or re.match(r"(glob|range|choice)\(", value):
        fixed = word + "".join(CLOSING[letter] for letter in reversed(fault))
        reason = f"the bracket {fault[-1]} is not closed"
    else:
        fixed, reason = quote_for_shell(key, value), f"{fault[-1]} needs quotes"
    if re.fullmatch(r"[^'\"]*[()][^'\"]*", fixed):  # which a shell would take for its own
        fixed = shlex.quote(fixed)
    raise ConfigError(f"{word}: {reason}, write {fixed}")


def unclosed(word: str) -> str | None:
    """What of a word does not close: its quote, its opening brackets, or one that closes nothing.

    >>> unclosed("a=[b,(c)]"), unclosed("a=[{b"), unclosed("a=b]"), unclosed("a='[b")
    (None, '[{', ']', "'")
    """
    opened, quote, before = "", "", ""
    for letter in word.partition("=")[2]:
        if quote:
            quote = "" if letter == quote and before != "\\" else quote
        elif letter in "'\"":
            quote = letter
        elif letter in CLOSING:
            opened += letter
        elif letter in CLOSING.values():
            if not opened or CLOSING[opened[-1]] != letter:
                return letter
            opened = opened[:-1]
        before = letter
    return quote or opened or None


def _is_text(key: str, schema: type) -> bool:
    """Whether a field, or the model that a place names, is any text."""
    return key == "model" or (_kind(key, schema) or "").startswith("str")


def _without_equals(word: str, words: Sequence[str], schema: type) -> str:
    """The line that refuses a word without `=`."""
    folders = [folder for folder in sorted(CONF.iterdir()) if folder.is_dir()]
    files = [folder / f"{word}.yaml" for folder in folders if "/" not in word]
    entry = next(name for name, other in SCHEMAS.items() if other is schema)
    chosen = re.findall(r"(?m)^  - (\w+):", (CONF / f"{entry}.yaml").read_text())
    groups = [
        file.parent.name
        for file in files
        if file.is_file() and fits(file, schema) and file.parent.name in chosen
    ]
    field = field_at(word, all_fields(schema))
    before = words[words.index(word) - 1] if words.index(word) else ""
    key, equals, value = before.partition("=")
    if equals and not (groups or field) and _is_text(key, schema):
        rest = takewhile(lambda one: "=" not in one, words[words.index(word) :])
        whole = " ".join([value, *rest])
        written = to_type(key, whole, "str")
        return f"{key}={whole}: the shell splits this at the blank, write {written}"
    if groups:
        return f"{word}: write {' or '.join(f'{group}={word}' for group in groups)}"
    if schema is SCHEMAS["report"] and not field:
        paths = [one.removeprefix("runs=") for one in words]
        paths = [one for one in paths if not re.match(r"[\w.]+=", one)]
        runs = paths[0] if len(paths) == 1 else f"[{','.join(paths)}]"
        return f"{word}: write {shlex.quote(f'runs={runs}')}"
    if field and field.schema is None:
        return f"{word} has no value: write {word}={example_value(word, field.kind, CONF) or '...'}"
    if word in {folder.name for folder in folders}:
        return f"{word} has no value: write {word}=NAME, a name that --help {word} lists"
    return unknown_key(word, schema)
