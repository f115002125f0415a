"""Ways in which a file of a run folder is edited or damaged, drawn from a seed."""

from __future__ import annotations

import json
import random

WRONG = [
    "a text", "", None, True, -1, 0, -(10**12), 10**30, 1e308, -1e308, float("nan"), float("inf"),
    float("-inf"), [], {}, [[[[]]]], {"a": {"b": {}}}, "9" * 5000, "\x1b[31m", "[/b]", 1.5,
    ["a", 1, None], [None], {"": None},
]  # fmt: skip


def places(content, path=()):
    """The path of every value that is nested in a content, lists by their first and last entry."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield (*path, key)
            yield from places(value, (*path, key))
    elif isinstance(content, list) and content:
        for i in {0, len(content) - 1}:
            yield (*path, i)
            yield from places(content[i], (*path, i))


def deep(depth):
    return "[" * depth + "]" * depth


def edited(text, draw: random.Random):
    """A JSON text with one to three values wrong, missing, or many times there."""
    content = json.loads(text)
    for _ in range(draw.randint(1, 3)):
        every = sorted(places(content), key=str)
        if not every:
            break
        *path, last = draw.choice(every)
        node = content
        for key in path:
            node = node[key]
        way = draw.choice(("value", "value", "value", "gone", "many"))
        if way == "gone":
            del node[last]
        elif way == "many" and isinstance(node, list):
            node *= draw.choice((2, 500))
        else:
            node[last] = draw.choice(WRONG)
    return json.dumps(content)


def torn(data: bytes, draw: random.Random) -> bytes:
    """A file that is cut, has bytes of another, is empty, or is nested deep."""
    at = draw.randrange(len(data) + 1)
    return draw.choice((
        data[:at], data[:at] + draw.randbytes(9) + data[at + 9 :], b"", b"\x00" * 50,
        deep(100_000).encode(), b'{"a": ' + deep(60).encode() + b"}", data + data,
    ))  # fmt: skip


BOMB = "\na: &a [x, x]\n" + "".join(
    f"{after}: &{after} [{', '.join([f'*{before}'] * 8)}]\n"
    for before, after in zip("abcdefghi", "bcdefghij", strict=True)
)
NAMED = {  # of the issue: what result.json, curves and evaluations held when a report fell
    "deep nesting": ("result.json", lambda x: '{"evals": ' + deep(100_000) + "}"),
    "a text for a number": ("result.json", lambda x: x.replace("0.4", '"0.4"')),
    "NaN": ("result.json", lambda x: x.replace("0.4", "NaN")),
    "1e308": ("result.json", lambda x: x.replace("0.4", "1e308")),
    "a list": ("result.json", lambda x: "[1]"),
    "no curves": ("result.json", lambda x: x.replace('"curves"', '"curve"')),
    "no scaling": ("result.json", lambda x: x.replace('"scaling"', '"scalin"')),
    "an unknown baseline": ("result.json", lambda x: x.replace('"leave_one_out"', '"[/b]$x_{$"')),
    "an evaluation at -10^12": (
        "result.json",
        lambda x: x.replace('"step": 8', f'"step": {-(10**12)}'),
    ),
    "rows of text": ("metrics.jsonl", lambda x: x.replace('"reward": 0', '"reward": "x", "r": 0')),
    "NaN in a row": ("metrics.jsonl", lambda x: x.replace('"reward": 0', '"reward": NaN, "r": 0')),
    "a deep row": ("metrics.jsonl", lambda x: x + deep(100_000) + "\n"),
    "a huge cell": ("eval.csv", lambda x: x + "9" * 200_000 + "\n"),
    "tags": (".hydra/config.yaml", lambda x: x + "\nx: !!python/object/apply:os.system [true]"),
    "an anchor in itself": (".hydra/config.yaml", lambda x: x + "\nx: &a [*a, *a]"),
    "a list for a group": (
        ".hydra/config.yaml",
        lambda x: x + "\nrollout: []" * ("\nrollout:" in x),
    ),
    "a bomb": (".hydra/config.yaml", lambda x: x + BOMB),
    "a time that is none": ("launches.jsonl", lambda x: x.replace('"host"', '"time": 7, "h"')),
    "versions that are none": ("code.json", lambda x: json.dumps({"versions": 7, "commit": 8})),
}  # fmt: skip
