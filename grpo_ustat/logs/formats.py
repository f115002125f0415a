"""Rollout formats of eight frameworks: recognition by file names and fields, and parsing of rows.

The formats are those that the frameworks' code of August 2026 writes.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.logs.pairing import run_folder_of
from grpo_ustat.logs.rows import (
    DamagedFile,
    Options,
    Rollout,
    default_weights,
    reward_columns,
    reward_of,
)
from grpo_ustat.logs.traces import result_fields, trace_fields
from grpo_ustat.logs.turns import is_id
from grpo_ustat.runs.files import json_lines, natural_order, parsed_row
from grpo_ustat.terminal.streams import single_line

# Every file that `convert` writes has these columns.
OUTPUT_COLUMNS = {"prompt_id", "reward"}
PACKED_SUFFIXES = (".gz", ".zst", ".bz2", ".xz", ".zip")
EVALUATION = "of an evaluation"
# Beginning of a message; the error follows in parentheses.
NOT_AS_WRITTEN = "its row is not as the framework writes it"
EVALUATION_FOLDER = re.compile(r"(^|[_.-])(val|valid|validation|eval|evaluation)([_.-]|$)")
TRAINING_FOLDER = re.compile(r"(^|[_.-])(train|training|rollouts?)([_.-]|$)")
# The following expressions recognise the end of a chat template in a logged prompt. It shows that a
# template wrote the prompt. Special tokens are, for example, <|end|> and <end_of_turn>.
SPECIAL_TOKEN = r"(?:<[|｜][^<>\s]+>|<\w+_\w+>|\[[|｜]\w+[|｜]\])"
# Reasoning section that a template opens, or opens and closes, after the role.
THOUGHTS = r"\s*(?:<think>\s*(?:</think>\s*)?)?$"
OPENING_ROLE = r"^(?:system|developer|user)"
TEMPLATE_ENDS = [
    re.compile(end, re.DOTALL)
    for end in (
        # Role alone on its line or after a special token: ChatML, Gemma, Granite.
        rf"(?:^|\n|{SPECIAL_TOKEN})[ \t]*(?P<rest>assistant|model){THOUGHTS}",
        # Role before a special token (Llama, Phi-4), or inside a special token (Phi-3, Zephyr).
        rf"(?P<rest>(?:assistant|model){SPECIAL_TOKEN}){THOUGHTS}",
        rf"(?P<rest>(?i:[<\[][|｜]assistant[|｜][>\]])){THOUGHTS}",
        # Role directly after the question, because the special token between them was removed.
        # Llama's template has a blank line after the role. The templates of Phi-4 and gpt-oss are
        # recognised only if the text also begins with a role.
        rf"[^\s/'\"(-](?P<rest>assistant)\n\n{THOUGHTS}",
        rf"{OPENING_ROLE}.*[^\s/'\"(-](?P<rest>assistant){THOUGHTS}",
        rf"{OPENING_ROLE}\s*\n.*(?P<rest>assistant){THOUGHTS}",
        r"(?P<rest></?think>)\s*$",
    )
]
# Names that verl gives to rows, of the form {sample}_{rollout}_{output}.
VERL_NAME = re.compile(r"(?P<rollout>(?P<sample>.*)_\d+)_(?P<output>\d+)")
# Maximum number of characters in an id; longer values are treated as texts.
MAX_ID_LENGTH = 200
FIELD_TYPES = {
    "group": str, "step": str | None, "sample": str | None, "ended": bool | None,
    "policy_version": str | None, "reward": float, "prompt_ids": list | None,
    "completion_ids": list | None, "loss_mask": list | None, "logprobs": list | None,
    "policy_step": int | None, "prompt": str | list | None, "completion": str | list | None,
}  # fmt: skip


class File:
    """File that is being read: its rows, and the information in its path."""

    def __init__(self, path: Path, options: Options):
        self.path, self.options = path, options
        # Position of the row that is being parsed, for messages.
        self.place = ""
        # Values that a parser keeps from the previous line, if the meaning of a line depends on it.
        self.before = dict[str, Any]()
        self.absolute_path = absolute(path)
        # The path of the folder is the name of the run.
        self.run, self.stem = str(self.absolute_path.parent), path.stem

    @cached_property
    def content(self) -> Any:
        """Rows of a Parquet file, or the content of a pickle, loaded as plain data only."""
        if self.path.suffix == ".parquet":
            from pyarrow import parquet

            return parquet.read_table(self.path).to_pylist()
        import torch

        try:
            return torch.load(self.path, weights_only=True, map_location="cpu")
        # torch raises many types of errors for damaged files and for files with other data.
        except Exception as error:
            raise DamagedFile(
                f"{self.path} has other objects than plain data ({single_line(error, 120)}), so "
                "reading this pickle might run code: save dictionaries of lists"
            ) from error

    def rows(self) -> Iterator[tuple[str, Any]]:
        """Yield the position and content of each row; None if a line is not a JSON object."""
        if self.path.suffix == ".jsonl":
            with self.path.open(encoding="utf-8-sig", errors="replace") as file:
                lines = ((f"line {n}", line) for n, line in enumerate(file))
                yield from ((place, parsed_row(line)) for place, line in lines if line.strip())
            return
        samples, word = self.content, "row"
        if self.path.suffix == ".pt":
            samples, word = self.content["samples"], "sample"
        yield from ((f"{word} {n}", row) for n, row in enumerate(samples))

    @cached_property
    def rewards(self) -> tuple[list[str], dict[str, float]]:
        """Names of columns that may contain rewards, and the default weights of these columns."""
        rows = self.content
        columns = {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
        names, nulls = reward_columns(columns, TRL_COLUMNS)
        weights = default_weights(self.path, names, nulls, self.options) if rows else {}
        return names + nulls, weights

    @property
    def is_evaluation(self) -> bool:
        """True if the name of a parent folder says that the file is from an evaluation.

        The nearest parent folder whose name has a word such as `eval` or `train` decides. The
        search ends at the parent of the folder that the user named.
        """
        source, folder = self.options.source, self.absolute_path.parent
        top = folder if source is None or source.is_file() else absolute(source)
        above = len(folder.parts) - len(top.parts)
        for name in [parent.name.lower() for parent in (folder, *folder.parents)][: above + 2]:
            if EVALUATION_FOLDER.search(name) or TRAINING_FOLDER.search(name):
                return bool(EVALUATION_FOLDER.search(name))
        return False


# Fields of a Rollout, before it is made. The additional field `rewards` is a pair: reward values by
# name, and default weights by name.
Fields = dict[str, Any]


@dataclass(frozen=True)
class Format:
    """Format in which a framework writes rollouts."""

    name: str
    # Function that parses a row into the fields of a rollout, or into a list if a row of the format
    # can have several rollouts.
    parse: Callable[[Any, File], Fields | list[Fields]] = field(repr=False)
    # Glob pattern of the framework's files below a source folder.
    pattern: str
    # Regular expression that the end of a file's path must match. It excludes files that users
    # renamed, such as 5_old.jsonl. Empty if the pattern suffices.
    path_end: str = ""
    # A row with all of these fields is in this format; empty if the file name alone decides.
    fields: frozenset[str] = frozenset()
    # Remark on the format, shown to the user.
    note: str = ""
    # True if the framework leaves null rewards out of the sum of rewards.
    skips_null: bool = False

    def read(self, path: Path, options: Options) -> Iterator[Rollout]:
        """Yield the rollouts of a file.

        A row in another format becomes a rollout with a fault, so that it is counted and reading
        continues.
        """
        file = File(path, options)
        for place, row in file.rows():
            file.place = place
            try:
                if row is None:
                    raise ValueError("not a JSON object, perhaps truncated")
                parsed = self.parse(row, file)
                records = [parsed] if isinstance(parsed, dict) else parsed
                rollouts = [self._rollout(fields, place, file) for fields in records]
            except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
                if isinstance(error, ConfigError):
                    raise
                reason = f"{type(error).__name__}: {single_line(error, 80)}"
                fault = f"{NOT_AS_WRITTEN} ({reason})"
                rollouts = [Rollout(path, place, run=str(path.parent), fault=fault)]
            if len(rollouts) == 1:
                rollouts[0].possible_ids = rollouts[0].possible_ids or short_values(row)
                if isinstance(row, dict) and rollouts[0].advantage is None:
                    rollouts[0].advantage = row.get("advantage", row.get("advantages"))
            yield from rollouts

    def _rollout(self, fields: Fields, place: str, file: File) -> Rollout:
        values, weights = fields.pop("rewards", ({}, {}))
        fault, at = fields.pop("fault", ""), fields.pop("at", "")
        later = fields.pop("later", ())
        reward: Fields = {}
        if weights or values:
            reward = dict(reward_of(values, file.options, weights, self.skips_null))
        fault = fault or reward.get("fault", "")
        fields = {"run": file.run} | fields | reward | {"fault": fault}
        rollout = Rollout(file.path, f"{place}{at}", **fields)
        rollout.later = [replace(rollout, **turn) for turn in later]
        for turn, (name, kind) in product(rollout.turns, FIELD_TYPES.items()):
            if not isinstance(value := getattr(turn, name), kind):
                shown = f"{name} is {type(value).__name__} {single_line(value, 40)}"
                rollout.fault = f"{NOT_AS_WRITTEN} ({shown})"
                break
        return rollout


TRL_COLUMNS = {
    "step", "prompt", "completion", "advantage", "prompt_ids", "completion_ids", "policy_step",
}  # fmt: skip


def _trl(row: Mapping[str, Any], file: File) -> Fields:
    """Parse a row of the GRPOTrainer log: one completion, with one column per reward function.

    Token ids and `policy_step` are present only if `grpo_ustat.integrations.trl.record` was one of
    the reward functions.
    """
    (names, weights), written_by, step = file.rewards, row.get("policy_step"), row.get("step")
    return dict(
        group=json.dumps(row["prompt"], sort_keys=True), run=str(run_folder_of(file.path)),
        step=str(step), prompt_ids=row.get("prompt_ids"), completion_ids=row.get("completion_ids"),
        policy_version=f"step {step}" if written_by is None else f"checkpoint-{written_by}",
        policy_step=int(step) - 1 if written_by is None and step else written_by,
        prompt=row["prompt"], completion=row["completion"],
        rewards=({name: row[name] for name in names}, weights),
    )  # fmt: skip


def _nemo_rl(packed: Mapping[str, Any], file: File) -> Fields:
    """Parse a line of `log_batched_dict_as_jsonl`, which is one completion.

    A value may be wrapped in a list with one item. `token_ids` has prompt, completion and padding,
    and `token_loss_mask` is 1 for generated tokens. Groups are not logged, but completions of the
    same prompt are on consecutive lines, and `idx` numbers the lines. With dynamic sampling, the
    row's reward is in `filtered_rewards`.
    """
    row = {k: x[0] if isinstance(x, list) and len(x) == 1 else x for k, x in packed.items()}
    file.before["idx"] = idx = int(row.get("idx", file.before.get("idx", -1) + 1))
    length = parse_length(row["input_lengths"], "input_lengths", len(row["token_ids"]))
    tokens, mask = row["token_ids"][:length], row["token_loss_mask"][:length]
    start = mask.index(1) if 1 in mask else length
    logprobs, size = row.get("generation_logprobs"), file.options.group_size
    is_left_out = row.get("sample_loss_mask", 1) == 0
    reward_field = "filtered_rewards" if "filtered_rewards" in row else "rewards"
    return dict(
        group=str(idx // size) if size else json.dumps(tokens[:start]), sample=str(idx),
        step=file.stem.rpartition("step")[2], policy_version=file.stem,
        untrained="sample_loss_mask is 0: the row was left out of the loss" if is_left_out else "",
        prompt_ids=tokens[:start], completion_ids=tokens[start:], loss_mask=mask[start:],
        logprobs=None if logprobs is None else logprobs[start:length],
        rewards=(row, {reward_field: 1.0}),
    )  # fmt: skip


def _prime_rl(episode: Mapping[str, Any], file: File) -> list[Fields]:
    """Parse a line of `FileMonitor.log_episodes`, which is one episode.

    An episode has traces in the format of verifiers; see `traces`. The reward is a weighted sum of
    rewards. The folder `all` has all rollouts that the trainer received, and the folder `effective`
    has the rollouts on which it trained. A run that is launched several times has several run ids.
    """
    parts = file.absolute_path.parts
    rollouts = [k for k, part in enumerate(parts) if part == "rollouts"]
    folder = str(Path(*parts[: rollouts[-1] if rollouts else -1]))
    run = episode.get("run") or {}
    work = run.get("work") or {}
    is_evaluation = "eval" in (parts[-3], work.get("type"), run.get("type"))
    common: Fields = dict(
        run=f"{folder}, run {run['id']}" if run.get("id") else folder, arrived=parts[-2] == "all",
        step=next((part[5:] for part in reversed(parts) if part.startswith("step_")), None),
        untrained=EVALUATION if is_evaluation else "",
    )  # fmt: skip
    if not episode["traces"]:
        return [common | {"untrained": common["untrained"] or "it failed before it wrote a trace"}]
    return [
        common | trace_fields(trace, episode, common["untrained"], f" trace {k}")
        | ({"sample": str(trace["id"])} if trace.get("id") else
           {"sample": f"{episode['id']} {k}" if episode.get("id") else None})
        for k, trace in enumerate(episode["traces"])
    ]  # fmt: skip


def _verifiers(row: Mapping[str, Any], _: File) -> Fields:
    return result_fields(row)


def _open_instruct(row: Mapping[str, Any], file: File) -> Fields:
    """Parse a line that `save_traces` appended to a file: one completion."""
    step, sample, reason = row.get("step"), row.get("sample_idx"), row.get("finish_reason")
    return dict(
        group=str(row["prompt_idx"]),
        run=str(Path(file.run, file.stem.rpartition("_rollouts_")[0])),
        step=str(step), batch=str(step), policy_version=f"step {step}",
        untrained="it was aborted" if str(reason).startswith("abort") else "",
        sample=None if sample is None else f"{row['prompt_idx']}/{sample}",
        prompt_ids=list(row["prompt_tokens"]), completion_ids=list(row["response_tokens"]),
        logprobs=row.get("logprobs"), ended=None if reason is None else reason != "length",
        rewards=(row, {"reward": 1.0}),
    )  # fmt: skip


def _slime(sample: Mapping[str, Any], file: File) -> Fields:
    """Parse a sample from a pickle that slime writes with `--save-debug-rollout-data`.

    In the names of evaluation files, slime puts `eval_` before the number.
    """
    before, number = file.stem.rstrip("0123456789"), file.content.get("rollout_id")
    tokens, group = list(sample["tokens"]), sample["group_index"]
    length = parse_length(sample["response_length"], "response_length", len(tokens))
    prompt_ids = tokens[: len(tokens) - length]
    versions = sorted({str(version) for version in sample.get("weight_versions") or ()})
    logged = sample.get("status")
    status = None if logged is None else str(logged).lower().rpartition(".")[2]
    untrained = {"failed": "it failed", "aborted": "it was aborted"}.get(status or "", "")
    untrained = EVALUATION if before.endswith("eval_") else untrained
    if not untrained and sample.get("remove_sample"):
        untrained = "remove_sample is set: the sample was left out"
    return dict(
        group=json.dumps(prompt_ids) if group is None else str(group),
        run=str(Path(file.run, before)), step=str(number), untrained=untrained,
        prompt_ids=prompt_ids, completion_ids=tokens[len(tokens) - length :],
        loss_mask=sample.get("loss_mask"), logprobs=sample.get("rollout_log_probs"),
        ended=None if status is None else status != "truncated",
        policy_version=versions[0] if versions else f"rollout {number}",
        fault=f"written by policies {' and '.join(versions)}" if len(versions) > 1 else "",
        rewards=({"reward": sample["reward"]}, {"reward": 1.0}),
    )  # fmt: skip


def template_end(prompt: str) -> str:
    r"""Return the word with which a chat template ended a prompt; "" if no template wrote it.

    A chat template ends a prompt with a role such as `assistant`, alone on the last line or next to
    a special token.

    >>> template_end("user\nHow many?\nassistant\n"), template_end("Who is the assistant")
    ('assistant', '')
    """
    return next((m["rest"] for end in TEMPLATE_ENDS if (m := end.search(prompt))), "")


def _rollout_ids(name: str) -> dict[str, str | int]:
    """Split verl's name of a row into the name of its rollout and the number of the turn."""
    match = VERL_NAME.fullmatch(name)
    return {"rollout_id": match["rollout"], "turn": int(match["output"])} if match else {}


def _verl(row: Mapping[str, Any], file: File) -> Fields:
    """Parse a row from {global_steps}.jsonl in `trainer.rollout_data_dir`.

    verl logs texts without special tokens, so the exact tokens are unknown. If a chat template
    wrote the prompt, the logged prompt also differs from the prompt that the model read, and the
    file is refused. Files in `trainer.validation_data_dir` have the same format.
    """
    step, uid = str(row.get("step", file.stem)), str(row.get("uid") or "")
    if rest := template_end(row["input"]):
        raise ConfigError(
            f"{file.path} {file.place}: the prompt ends in {rest}, so a chat template wrote it. "
            "verl logs no special tokens, so the model read a different text: log tokens with "
            "VERL_USE_EXTERNAL_MODULES=grpo_ustat.integrations.verl_record and convert those files "
            "(docs/verl.md)"
        )
    match = VERL_NAME.fullmatch(uid)
    return dict(
        group=match["sample"] if match else uid or row["input"], step=step,
        possible_ids=short_values(row) | _rollout_ids(uid),
        sample=uid if match else None, policy_version=f"step {step}",
        untrained=f"{EVALUATION}, according to its folder's name" if file.is_evaluation else "",
        prompt=row["input"], completion=row["output"], rewards=(row, {"score": 1.0}),
    )  # fmt: skip


def _verl_record(row: Mapping[str, Any], file: File) -> Fields:
    """Parse a row from {global_steps}.parquet, which `integrations.verl_record` writes.

    The row is one completion. It has the first and the last `global_step` of the weights that wrote
    it, and the sampler's log-probabilities if verl keeps them.
    """
    first, last = row["min_global_steps"], row["max_global_steps"]
    return dict(
        group=row["uid"], step=str(row["step"]), sample=row["sample"],
        prompt_ids=row["prompt_ids"], completion_ids=row["completion_ids"],
        loss_mask=row["response_mask"], logprobs=row["rollout_log_probs"], policy_step=last,
        policy_version=f"step {row['step']}" if last is None else f"global_step_{last}",
        fault=f"written by policies {first} to {last}" if first != last else "",
        possible_ids=_rollout_ids(row["sample"] or row["uid"]),
        rewards=(row, {"score": 1.0}),
    )  # fmt: skip


def _ms_swift(columns: Mapping[str, Any], file: File) -> list[Fields]:
    """Parse a line that ms-swift appended to its log; each column is a list with a value per row.

    A line with the same step as the previous line is from an evaluation. A line with an earlier
    step is from a resumed run.
    """
    other_columns = {"step", "prompt", "completion", "advantages", "entropy"}
    lists = {name: x for name, x in columns.items() if isinstance(x, list)}
    names, nulls = reward_columns(lists, other_columns)
    weights = default_weights(file.path, names, nulls, file.options)
    names += nulls
    before, steps = file.before, columns.get("step")
    last = before.get("columns", {})
    is_evaluation = last.get("step", ()) == steps and (before["eval"] or last != columns)
    before |= {"columns": columns, "eval": is_evaluation}
    steps = steps if isinstance(steps, list) else [steps] * len(columns["prompt"])
    rows = zip(steps, columns["prompt"], columns["completion"], *map(lists.get, names), strict=True)
    untrained = f"{EVALUATION}: logged at the step of the previous line" if is_evaluation else ""
    return [
        dict(
            at=f" entry {i}", group=json.dumps(prompt, sort_keys=True), step=str(step),
            batch=str(step), sample=str(i), untrained=untrained, policy_version=f"step {step}",
            prompt=prompt, completion=completion,
            possible_ids=short_values({name: x[i] for name, x in lists.items() if is_id(name)}),
            rewards=(dict(zip(names, values, strict=True)), weights),
        )
        for i, (step, prompt, completion, *values) in enumerate(rows)
    ]  # fmt: skip


FORMATS = {
    framework.name: framework
    for framework in (
        Format(
            "trl", _trl, "**/completions*.parquet", r"/completions_\d{5,}\.parquet",
            frozenset({"prompt", "completion", "step"}), skips_null=True,
            note="if each batch is used for one update, checkpoint K - 1 wrote file K; the reward "
            "function record logs the exact step",
        ),
        Format(
            "nemo_rl", _nemo_rl, "**/train_data_step*.jsonl", r"/train_data_step\d+\.jsonl",
            frozenset({"token_ids", "token_loss_mask", "input_lengths", "rewards"}),
            note="finish reasons are not logged: a completion counts as ended if it has the end "
            "token",
        ),
        Format(
            "prime_rl", _prime_rl, "**/traces.jsonl",
            r"(/rollouts/step_\d+/|^(?!.*/rollouts/step_)).*", frozenset({"traces"}),
        ),
        Format(
            "verifiers", _verifiers, "**/results.jsonl",
            fields=frozenset({"example_id", "prompt", "completion", "reward", "is_truncated"}),
            note="run vf-eval with --state-columns trajectory and a client that returns tokens",
        ),
        Format(
            "open_instruct", _open_instruct, "**/*_rollouts_*.jsonl", r"_rollouts_\d{6,}\.jsonl",
            frozenset({"prompt_tokens", "response_tokens", "prompt_idx"}),
        ),
        Format(
            "verl_record", _verl_record, "**/*.parquet", r"/\d+\.parquet",
            frozenset({"uid", "prompt_ids", "completion_ids", "response_mask", "score"}),
            note="checkpoint global_step_20 wrote 21.parquet; verl.model_merger turns the "
            "checkpoint into a model",
        ),
        Format(
            "verl", _verl, "**/*.jsonl", r"/\d+\.jsonl", frozenset({"input", "output", "score"}),
            note="verl logs texts without special tokens",
        ),
        Format(
            "ms_swift", _ms_swift, "**/completions.jsonl",
            fields=frozenset({"prompt", "completion", "advantages"}), skips_null=True,
        ),
        Format(
            "slime", _slime, "**/*.pt", r"\d\.pt",
            frozenset({"rollout_id", "samples", "response_length"}),
        ),
    )
}  # fmt: skip


def absolute(path: Path) -> Path:
    """Return the absolute path without resolving symbolic links.

    The folder names as the user typed them may say that a file is from an evaluation.
    """
    return Path(os.path.abspath(path))


def parse_length(value: Any, name: str, largest: int) -> int:
    """Return a logged length; raise an error unless it is a whole number from 0 to `largest`."""
    if not isinstance(value, int | float) or value not in range(largest + 1):
        raise ValueError(f"{name} is not a whole number from 0 to {largest}")
    return int(value)


def short_values(row: Any) -> dict[str, str | int]:
    """Return the short texts and whole numbers in a row, keyed by field; unpack one-item lists."""
    if not isinstance(row, dict):
        return {}
    single = {
        key: value[0] if isinstance(value, list) and len(value) == 1 else value
        for key, value in row.items()
    }
    return {
        key: value
        for key, value in single.items()
        if isinstance(value, str | int) and len(str(value)) <= MAX_ID_LENGTH
    }


def packed_files(source: Path, formats: Iterable[Format]) -> list[Path]:
    """Find compressed files at or below the source that would match a format if unpacked."""
    paths = [source] if source.is_file() else sorted(source.rglob("*"), key=natural_order)
    names = [framework.pattern.rpartition("/")[2] for framework in formats]
    return [
        path for path in paths
        if path.suffix in PACKED_SUFFIXES and any(Path(path.stem).match(name) for name in names)
    ]  # fmt: skip


def files_of(source: Path, framework: Format) -> Sequence[Path]:
    """Find the files of a framework: the source itself, or files below it if it is a folder.

    If the source is a file, it is returned if its name or its fields match the format. If it is a
    folder, only files with matching names are considered, in natural order. A file is returned if
    its first row has the fields of the format, or if it cannot be read. If no file has these
    fields, all files with matching names are returned.
    """
    if source.is_file():
        is_named = source.match(framework.pattern.rpartition("/")[2])
        is_renamed = source.suffix == Path(framework.pattern).suffix and bool(framework.fields)
        fits = is_renamed and framework.fields <= (first_fields(source) or set())
        return [source] if is_named or fits else []
    named = sorted(
        (path for path in source.glob(framework.pattern) if path.is_file()), key=natural_order
    )
    fields = {path: first_fields(path) for path in named}
    if not any(names is not None and framework.fields <= names for names in fields.values()):
        return named
    return [path for path, names in fields.items() if names is None or framework.fields <= names]


def split_by_name(
    source: Path, framework: Format, paths: Sequence[Path]
) -> tuple[Sequence[Path], Sequence[Path]]:
    """Separate the files whose names the framework uses from all other files.

    If there is only one file, its name is not checked.
    """
    if not framework.path_end or len(paths) < 2:
        return paths, []
    path_end = re.compile(f"{framework.path_end}$")
    exact = [path for path in paths if path_end.search(absolute(path).as_posix())]
    if not exact:
        raise ConfigError(
            f"{source} contains {len(paths)} files, such as {paths[0].name}, with names that "
            f"{framework.name} does not use, so some may repeat the same step: name a single "
            "file"
        )
    return exact, [path for path in paths if path not in exact]


def format_of(source: Path) -> Format | None:
    """Return the format that fits the name and fields of a file at or below `source`, or None."""
    for framework in FORMATS.values():
        for path in files_of(source, framework):
            fields = first_fields(path)
            if fields is not None and framework.fields <= fields:
                return framework
    return None


def first_fields(path: Path) -> set[str] | None:
    """Return the names of the fields in the first row of a file; None if it cannot be read.

    A pickle is not loaded, because loading may run code. Its bytes are searched for the names of
    slime's fields.
    """
    fields: Iterable[str] = ()
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet

            fields = parquet.read_schema(path).names
        elif path.suffix == ".jsonl":
            fields = next((row for _, row in json_lines(path)), {})
        elif path.suffix == ".pt":
            with zipfile.ZipFile(path) as archive:
                (pickled,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
                content = archive.read(pickled)
            fields = [name for name in FORMATS["slime"].fields if name.encode() in content]
    except (ConfigError, OSError, ValueError, zipfile.BadZipFile):
        return None
    return set(fields)


def detect(source: Path) -> Format:
    """Identify the format of a file or folder from file names and the fields of first rows."""
    if source.is_file() and not source.stat().st_size:
        raise ConfigError(f"{source} is empty: name a file with rollouts")
    if source.is_dir() and not any(path.is_file() for path in source.rglob("*")):
        raise ConfigError(f"{source} contains no files: name a folder with rollouts")
    if source.is_file() and (first_fields(source) or set()) >= OUTPUT_COLUMNS:
        raise ConfigError(
            f"{source} is already converted (it has prompt_id): use it with grpo-ustat mse "
            f"pool={source} model=CHECKPOINT, or grpo-ustat advise {source}"
        )
    if framework := format_of(source):
        return framework
    if packed := packed_files(source, FORMATS.values()):
        raise ConfigError(f"{packed[0]} is packed: unpack it first, as with gunzip")
    raise ConfigError(
        f"{source} does not have the file names and fields of a known format: choose a format with "
        f"--from {'|'.join(FORMATS)}"
    )
