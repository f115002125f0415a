"""What files of a run folder may hold: their size, depth and count, and the type of what is read.

Anybody can have edited a run folder, or sent one. What does not fit is refused by the name of the
file and the key, with the value.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from grpo_ustat.config.run import LARGEST_COUNT
from grpo_ustat.records import ACCURACY, MEAN_REWARD
from grpo_ustat.terminal.streams import single_line

MOST_BYTES = {".hydra/config.yaml": 400_000, "launches.jsonl": 64_000_000}
USUAL_BYTES = 256_000_000  # of all other files
MOST_DEPTH, MOST_VALUES, MOST_LETTERS = 40, 2_000_000, 1_000_000
MOST_SETTINGS = 50_000  # values of a configuration, aliases as often as they stand
MOST_ROWS = 20_000  # of a table within a result
LARGEST = 1e100  # of a number; what is squared, or drawn, stays finite

Fits = Callable[[Any], bool]
Shape = Any  # a Fits, or a dictionary of them by key; within a list: of each of its entries


def text_of(folder: Path, name: str) -> str:
    """A file's text.

    Raises:
        OSError: it cannot be read.
        ValueError: it is larger than any that a run writes.
    """
    size, most = (folder / name).stat().st_size, MOST_BYTES.get(name, USUAL_BYTES)
    if size > most:
        raise ValueError(f"it has {size:,} bytes, at most {most:,} are read")
    return (folder / name).read_text(errors="replace")


def checked(
    folder: Path, name: str, parse: Callable[[str], Any], shape: Shape = None
) -> tuple[Any, str]:
    """A file's parsed content, and an empty text; or None, and what is wrong with it, in a line.

    Args:
        folder: of the run.
        name: of the file in it.
        parse: makes its content of its text, by a ValueError where it cannot.
        shape: of a mapping, see `misfit`; None: anything.
    """
    try:
        content = parse(text_of(folder, name))
        wrong = misfit(content, shape) if shape else None
    except (OSError, ValueError, yaml.YAMLError) as error:
        wrong = single_line(error, 200)
    return (None, wrong) if wrong else (content, "")


def parsed_json(text: str) -> Any:
    """The content of a JSON file, all of its numbers finite.

    Raises:
        ValueError: it is none, or beyond the limits.
    """
    try:
        content = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError(f"it is nested more than {MOST_DEPTH} deep") from None
    check_limits(content)
    return content


def parsed_code(text: str) -> Any:
    """The content of `code.json`, as it was written: a changed letter in a version or in the
    fingerprint of the weights would be believed.

    Raises:
        ValueError: it is no JSON file, or its digest is of other values.
    """
    content = parsed_json(text)
    if not isinstance(content, Mapping):
        return content
    if "digest" in content and content["digest"] != content_digest(content):
        raise ValueError("its values were changed: they do not have its digest")
    return content


def content_digest(content: Mapping[str, Any]) -> str:
    """Digest of a mapping's values, whatever the spaces and the order of its keys in a file."""
    values = {name: value for name, value in content.items() if name != "digest"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def parsed_yaml(text: str) -> Any:
    """The content of a YAML file; its tags make nothing but texts, numbers, lists and mappings.

    Raises:
        ValueError, yaml.YAMLError: it is none, or beyond the limits.
    """
    try:
        content = yaml.safe_load(text)
    except RecursionError:
        raise ValueError(f"it is nested more than {MOST_DEPTH} deep") from None
    check_limits(content, MOST_SETTINGS)
    return content


def check_limits(content: Any, most: int = MOST_VALUES) -> None:
    """Refuse what is nested too deep, has too many values, or numbers that no run writes.

    Raises:
        ValueError: naming the limit.
    """
    count, level = 0, [content]
    for _ in range(MOST_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, Mapping):
                below += [*value, *value.values()]
            elif isinstance(value, list):
                below += value
            elif isinstance(value, str) and len(value) > MOST_LETTERS:
                raise ValueError(f"it holds a text of {len(value):,} letters")
            elif isinstance(value, int | float) and not is_number(value) and value not in (0, 1):
                raise ValueError(f"it holds the number {str(value)[:20]}, which no run writes")
        count += len(below)
        if count > most:
            raise ValueError(f"it holds more than {most:,} values")
        level = below
        if not level:
            return
    raise ValueError(f"it is nested more than {MOST_DEPTH} deep")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"it holds {name}, which no run writes")


def is_number(value: Any) -> bool:
    """Whether it is a finite number of a usual size, and no boolean."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= LARGEST and math.isfinite(value)


def number(value: Any) -> bool:
    """A finite number."""
    return is_number(value)


def number_or_null(value: Any) -> bool:
    """A finite number, or null where there is none."""
    return value is None or is_number(value)


def count(value: Any) -> bool:
    """A whole number from 0 on."""
    return isinstance(value, int) and is_number(value) and 0 <= value <= LARGEST_COUNT


def count_or_null(value: Any) -> bool:
    """A whole number from 0 on, or null."""
    return value is None or count(value)


def size(value: Any) -> bool:
    """A whole number from 1 on."""
    return count(value) and value > 0


def text(value: Any) -> bool:
    """A text."""
    return isinstance(value, str)


def text_or_null(value: Any) -> bool:
    """A text, or null."""
    return value is None or isinstance(value, str)


def texts(value: Any) -> bool:
    """A list of texts."""
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def boolean(value: Any) -> bool:
    """True or false."""
    return isinstance(value, bool)


def number_or_text(value: Any) -> bool:
    """A finite number, or a text."""
    return isinstance(value, str) or is_number(value)


def scalar(value: Any) -> bool:
    """A text, a finite number, a boolean, or null."""
    return value is None or isinstance(value, bool | str) or is_number(value)


def matrix(value: Any) -> bool:
    """Three rows of three finite numbers."""
    return (
        isinstance(value, list)
        and len(value) == 3
        and all(
            isinstance(row, list) and len(row) == 3 and all(map(is_number, row)) for row in value
        )
    )


def one_of(*choices: str) -> Fits:
    """One of a few texts."""

    def fits(value: Any) -> bool:
        return value in choices

    fits.__doc__ = f"One of {', '.join(choices)}."
    return fits


def misfit(content: Any, shape: Shape, key: str = "") -> str | None:
    """What the first key holds that does not fit, and what it should; None where all fit.

    Keys that are not there fit, for another version may not have them; so do unknown keys.

    >>> misfit({"a": {"b": "x"}}, {"a": {"b": number}, "c": number})
    "a.b is 'x', not a finite number"
    >>> misfit({"rows": [{"n": 1}, {"n": -1}]}, {"rows": [{"n": count}]})
    'rows[1].n is -1, not a whole number from 0 on'
    """
    if isinstance(shape, dict):
        if not isinstance(content, dict):
            return f"{key or 'it'} is {_short(content)}, not a mapping"
        inner = ((f"{key}.{name}" if key else name, content[name], below)
                 for name, below in shape.items() if name in content)  # fmt: skip
    elif isinstance(shape, list):
        if not isinstance(content, list):
            return f"{key} is {_short(content)}, not a list"
        if len(content) > MOST_ROWS:
            return f"{key} has {len(content):,} entries, at most {MOST_ROWS:,} are read"
        inner = ((f"{key}[{i}]", entry, shape[0]) for i, entry in enumerate(content))
    else:
        meaning = " ".join(shape.__doc__.split()).rstrip(".")
        meaning = meaning[0].lower() + meaning[1:]
        return None if shape(content) else f"{key} is {_short(content)}, not {meaning}"
    return next((line for entry in inner if (line := misfit(entry[1], entry[2], entry[0]))), None)


def is_absent(content: Any, key: str) -> bool:
    """Whether a dotted key is not there; `rows[].name`: in any of the rows, or there are none.

    >>> rows = {"rows": [{"a": 1}, {}], "b": {"c": None}}
    >>> [is_absent(rows, key) for key in ("rows[].a", "rows[]", "b.c", "b.d", "c.d")]
    [True, False, False, True, True]
    """
    name, _, rest = key.partition(".")
    several = name.endswith("[]")
    name = name.removesuffix("[]")
    if not isinstance(content, dict) or name not in content:
        return True
    value = content[name]
    if several:
        return not value or any(rest and is_absent(entry, rest) for entry in value)
    return bool(rest) and is_absent(value, rest)


def typed_rows(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Rows of training steps without what is no number, and a line on what that was.

    Texts are of keys that say why a number is missing.

    >>> typed_rows([{"step": 1, "reward": "x", "gstar_reason": "few groups"}, {"step": -1}])[0]
    [{'step': 1, 'gstar_reason': 'few groups'}]
    >>> typed_rows([{"step": 1, "reward": "x"}, {"step": -1}])[1]
    "2 values do not fit and are left out, the first reward='x'"
    """
    typed, wrong = [], []
    for row in rows:
        if "step" not in row:  # of no step, such as of the end of a run
            continue
        if not count(row["step"]):
            wrong.append(("step", row["step"]))
            continue
        bad = {
            key: x
            for key, x in row.items()
            if not (
                (number_or_null(x) or isinstance(x, bool))
                or (key.endswith("_reason") and isinstance(x, str))
            )
        }
        wrong += bad.items()
        typed.append({k: x for k, x in row.items() if k not in bad})
    if not wrong:
        return typed, ""
    name, value = wrong[0]
    return (
        typed,
        f"{len(wrong)} values do not fit and are left out, the first {name}={_short(value)}",
    )


def _short(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    words = "null" if value is None else repr(value)
    return words if len(words) <= 40 else f"{words[:36]}..."


def _with_ends(*names: str, of: Fits = number_or_null) -> dict[str, Fits]:
    return {f"{name}{end}": of for name in names for end in ("", "_low", "_high")}


def command_of(config: dict[str, Any]) -> str:
    """The command whose configuration it is: `train`, `mse` or `gap`.

    >>> [command_of(x) for x in ({"max_steps": 80}, {"bed": {}, "study": {}}, {"study": {}})]
    ['train', 'gap', 'mse']
    """
    return "train" if "max_steps" in config else "gap" if "bed" in config else "mse"


VERDICTS = one_of("agrees", "disagrees", "not decided")
SETTINGS = one_of("all_questions_once", "with_replacement", "without_replacement", "one_question")
QUANTITIES = one_of(ACCURACY, MEAN_REWARD)
EVALUATION = {
    "step": count, "split": text, "decoding": text, "quantity": QUANTITIES,
    "mean_reward": number, "low": number, "high": number, "n": size,
}  # fmt: skip
VERSIONS = {
    "versions": {"grpo-ustat": text}, "config_hash": text_or_null, "digest": text, "files": {},
}  # fmt: skip
RESULTS: Mapping[str, Shape] = {
    "train": {
        "quantity": QUANTITIES, "final_mean_reward": number, "mean_reward_low": number,
        "mean_reward_high": number,
        "gain": number, "gain_low": number, "gain_high": number, "steps": count,
        "rollouts": count, "tokens": count, "seconds": number, "summary": text, "run": text,
        "evals": [EVALUATION], "failed_saves": count,
    } | VERSIONS,
    "mse": {
        "curves": [{
            "method": one_of("closed_form", "replay", "monte_carlo"), "baseline": text,
            "target": text, "setting": SETTINGS, "interval": one_of("completions", "questions"),
            "group_size": size, "num_prompts": size, "unbiased": boolean, "mse": number_or_null,
            "low": number_or_null, "high": number_or_null, "replicates": count_or_null,
        }],
        "equal_rewards": {"reward": number, "completions": size}
        | dict.fromkeys(("cut", "no_answer", "wrong", "right"), count),
        "ratio_to_oracle": [
            {"baseline": text, "setting": SETTINGS, "group_size": size, "num_prompts": size}
            | _with_ends("ratio")
        ],
        "scaling": _with_ends("gstar", "c1", "c2", "c3")
        | dict.fromkeys(("c1", "c2", "c3"), number) | {
            "covariance": matrix, "dof": number, "reason": text_or_null,
            "curve": [{"group_size": size, "n_mse": number, "low": number_or_null,
                       "high": number_or_null}],
        },
        "assumption2": _with_ends("corr", "av_minus_a0", "crossover_group_size")
        | {"reason": text_or_null},
        "grad_sq": {"reason": text_or_null},
        "metric": {"parameters": count_or_null, "norm": text_or_null},
        "policy": {"name": text, "mean_length": number, "quantity": QUANTITIES}
        | _with_ends("mean_reward", of=number),
        "questions": size, "pool_completions": size, "summary": text,
        "cost": {name: number for name in (
            "rollouts", "tokens", "judge_timeouts", "judge_failures", "seconds_generate",
            "seconds_score",
        )},
        "reward_functions": [
            {"name": text, "weight": number_or_null}
            | _with_ends("mean", "c1", "c2", "c3", "gstar", "a_v", "grad_sq")
        ],
        "reward_correlations": [{"first": text, "second": text} | _with_ends("correlation")],
        "not_measured": [{"method": text, "setting": text, "reason": text}],
        "left_out": {},
    } | VERSIONS,
    "gap": {
        "study": text, "statement": text, "answer": text, "verdict": VERDICTS, "notes": texts,
        "claims": [{
            "what": text, "predicted": number_or_text, "measured": number, "low": number_or_null,
            "high": number_or_null, "verdict": VERDICTS, "how": text, "severity": text,
            "p_value": number_or_null, "holm_p": number_or_null,
        }],
        "bed": {}, "cost": {"rollouts": count, "seconds": number}, "summary": text,
    } | VERSIONS,
}  # fmt: skip
NODE_NAMES = {"name": text}
CONFIGURATION: Shape = {
    "model": NODE_NAMES | {"model_name_or_path": text}, "dataset": NODE_NAMES, "bed": NODE_NAMES,
    "prompt": NODE_NAMES | {"shots": count_or_null}, "baseline": NODE_NAMES,
    "objective": NODE_NAMES, "study": {"kind": text, "methods": texts},
    "seed": count, "group_size": size, "max_steps": count, "group_sizes": [size],
    "budget": {"rollouts": size}, "baselines": texts, "temperature": number,
    "reward_funcs": texts, "pool": text_or_null, "eval": {"decoding": texts}, "launch": {},
}  # fmt: skip
CODE: Shape = {
    "digest": text, "commit": text_or_null, "diff": text_or_null, "weights": text_or_null,
    "data": text_or_null, "versions": {"grpo-ustat": text},
}  # fmt: skip
