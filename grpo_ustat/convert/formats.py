"""How other frameworks write their rollouts: a reader for each, from its files to one kind of row.

Where a reader says "from", it is the code that writes the file, read in August 2026.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.runs.files import json_lines
from grpo_ustat.streams import single_line


@dataclass
class Rollout:
    """One completion as a framework logged it.

    Attributes:
        place: file and row, for messages.
        prompt_id: equal for completions of one prompt.
        reward: as logged; perhaps not finite.
        prompt_ids, completion_ids: token ids, end token included; None: only texts were logged.
        loss_mask: 1 on tokens of the completion that the policy wrote; None: all.
        logprobs: of the completion's tokens, by the sampler; None: not logged.
        ended: whether the policy wrote its end token; None: not logged.
        policy_version: of the weights that wrote it; None: not logged.
        prompt, completion: texts, or lists of messages; None: not logged.
        fault: why the row cannot be used; empty: it can.
    """

    place: str
    prompt_id: str
    reward: float
    prompt_ids: list[int] | None = None
    completion_ids: list[int] | None = None
    loss_mask: list[int] | None = None
    logprobs: list[float] | None = None
    ended: bool | None = None
    policy_version: str | None = None
    prompt: Any = None
    completion: Any = None
    fault: str = ""


@dataclass(frozen=True)
class Options:
    """What a framework's files do not say.

    Attributes:
        group_size: completions of a prompt, where rows have no group.
        reward: the column of rewards, where there are several.
        version: of the policy whose rollouts are kept; None: the last one.
    """

    group_size: int | None = None
    reward: str | None = None
    version: str | None = None


@dataclass(frozen=True)
class Format:
    """A framework's way to write rollouts.

    Attributes:
        name: of the framework.
        pattern: of its files below the source folder.
        exact: whether token ids are written.
        fields: some that every one of its rows has, by which `auto` knows it.
        read: the rows of one file.
        note: what the user must know of it.
    """

    name: str
    pattern: str
    exact: bool
    fields: frozenset[str]
    read: Callable[[Path, Options], Iterator[Rollout]] = field(repr=False)
    note: str = ""


def read_trl(path: Path, options: Options) -> Iterator[Rollout]:
    """TRL's completions_{step:05d}.parquet, from GRPOTrainer's log: a row a completion, a column of
    each reward function; token ids and the policy's step only where `grpo_ustat.trl.record` was
    among the reward functions.
    """
    from pyarrow import parquet

    rows = parquet.read_table(path).to_pylist()
    known = {
        "step", "prompt", "completion", "advantage", "prompt_ids", "completion_ids", "policy_step",
    }  # fmt: skip
    names = [name for name in rows[0] if name not in known] if rows else []
    numeric = [
        name for name in names
        if all(isinstance(row[name], int | float | None) for row in rows)
        and any(row[name] is not None for row in rows)
    ]  # fmt: skip
    rewards = [options.reward] if options.reward in names else numeric
    if len(rewards) != 1:
        raise ConfigError(
            f"{path} has columns of numbers {', '.join(numeric) or 'none'}: say which one holds "
            "the rewards with --reward COLUMN (TRL does not log the weights by which it adds them)"
        )
    for number, row in enumerate(rows):
        value, written_by = row[rewards[0]], row.get("policy_step")
        version = f"step {row.get('step')}" if written_by is None else f"checkpoint-{written_by}"
        yield Rollout(
            f"{path} row {number}", json.dumps([row.get("step"), row["prompt"]], sort_keys=True),
            math.nan if value is None else float(value), row.get("prompt_ids"),
            row.get("completion_ids"), policy_version=version,
            prompt=row["prompt"], completion=row["completion"],
        )  # fmt: skip


def read_nemo_rl(path: Path, options: Options) -> Iterator[Rollout]:
    """NeMo-RL's train_data_step{N}.jsonl, from `log_batched_dict_as_jsonl`: a line a completion,
    values perhaps in a list of one; whole sequences, padded, with the mask of generated tokens. It
    has no group: completions of a prompt stand one after another.
    """
    rows: list[tuple[int, dict[str, Any]]] = [
        (number, {
            key: value[0] if isinstance(value, list) and len(value) == 1 else value
            for key, value in row.items()
        })
        for number, row in json_lines(path)
    ]  # fmt: skip
    size = options.group_size
    for place, (number, row) in enumerate(rows):
        length = int(row["input_lengths"])
        tokens = [int(one) for one in row["token_ids"][:length]]
        mask = [int(one) for one in row["token_loss_mask"][:length]]
        start = mask.index(1) if 1 in mask else length
        prompt_ids = tokens[:start]
        logprobs = row.get("generation_logprobs")
        fault = "" if row.get("sample_loss_mask", 1) else "sample_loss_mask is 0: it was left out"
        yield Rollout(
            f"{path} line {number}", str(place // size) if size else json.dumps(prompt_ids),
            float(row["rewards"]), prompt_ids, tokens[start:], mask[start:],
            None if logprobs is None else [float(one) for one in logprobs[start:length]],
            policy_version=path.stem, fault=fault,
        )  # fmt: skip


def read_prime_rl(path: Path, options: Options) -> Iterator[Rollout]:
    """prime-rl's traces.jsonl: an episode a line, each of its traces a chain of nodes, of which the
    sampled ones are the policy's; rewards are added by their weights.
    """
    for number, episode in json_lines(path):
        work = (episode.get("run") or {}).get("work") or {}
        policy = work.get("policy") or {}
        start, end = policy.get("start"), policy.get("end")
        group = (episode.get("group") or {}).get("id")
        for k, trace in enumerate(episode["traces"]):
            nodes = trace["nodes"]
            first = next((i for i, node in enumerate(nodes) if node.get("sampled")), len(nodes))
            prompt_ids = [token for node in nodes[:first] for token in node["token_ids"]]
            own = nodes[first:]
            completion_ids = [token for node in own for token in node["token_ids"]]
            mask = [
                int(bool(node.get("sampled")) and bool(one))
                for node in own
                for one in (node.get("mask") or [node.get("sampled")] * len(node["token_ids"]))
            ]
            logprobs = [
                float(one)
                for node in own
                for one in (node.get("logprobs") or [0.0] * len(node["token_ids"]))
            ]
            reward = sum(one["score"] * one.get("weight", 1.0) for one in trace["rewards"].values())
            reasons = [call.get("finish_reason") for call in trace.get("calls") or ()]
            branches = any(
                node.get("parent") not in (None, i - 1) for i, node in enumerate(nodes) if i
            )
            fault = ""
            if branches:
                fault = "its nodes branch: no single sequence"
            elif start != end:
                fault = f"written by policies {start} to {end}"
            yield Rollout(
                f"{path} line {number} trace {k}", str(group), float(reward), prompt_ids,
                completion_ids, mask, logprobs if any(n.get("logprobs") for n in own) else None,
                None if not reasons else reasons[-1] != "length", None if end is None else str(end),
                fault=fault,
            )  # fmt: skip


def read_open_instruct(path: Path, options: Options) -> Iterator[Rollout]:
    """open-instruct's {run}_rollouts_{shard:06d}.jsonl of `save_traces`: a line a completion."""
    for number, row in json_lines(path):
        yield Rollout(
            f"{path} line {number}", f"{row.get('step')}/{row['prompt_idx']}",
            float(row["reward"]), list(row["prompt_tokens"]), list(row["response_tokens"]), None,
            row.get("logprobs"), row.get("finish_reason") != "length", f"step {row.get('step')}",
        )  # fmt: skip


def read_slime(path: Path, options: Options) -> Iterator[Rollout]:
    """slime's `--save-debug-rollout-data` files, a pickle that is read with `weights_only=True`."""
    import torch

    try:
        content = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # of any kind: damaged, or not of plain data
        reason = single_line(error, 120)
        raise ConfigError(
            f"{path} needs more than plain data to be read ({reason}): a pickle may run code, so "
            "it is refused; save dictionaries of lists"
        ) from error
    for number, sample in enumerate(content["samples"]):
        length = int(sample["response_length"])
        tokens = [int(one) for one in sample["tokens"]]
        versions = sorted({str(one) for one in sample.get("weight_versions") or ()})
        status = str(sample.get("status", "completed")).lower()
        fault, reward = "", cast(Any, sample["reward"])
        if not isinstance(reward, int | float):
            fault = "its reward is no number"
        elif len(versions) > 1:
            fault = f"written by policies {' and '.join(versions)}"
        elif status.endswith("aborted"):
            fault = "aborted"
        yield Rollout(
            f"{path} sample {number}", str(sample["group_index"]),
            math.nan if fault else float(reward), tokens[: len(tokens) - length],
            tokens[len(tokens) - length :], sample.get("loss_mask"),
            sample.get("rollout_log_probs"), not status.endswith("truncated"),
            versions[0] if versions else f"rollout {content.get('rollout_id')}", fault=fault,
        )  # fmt: skip


def read_skyrl(path: Path, options: Options) -> Iterator[Rollout]:
    """SkyRL's dumped batches: without rewards and prompt ids, so of no use here."""
    raise ConfigError(
        f"{path}: SkyRL takes rewards and prompt ids out before it dumps a batch, and the file is "
        "a pickle: write token-exact rows in a TrainingCallback's on_step_end instead, see "
        "docs/measuring.md"
    )
    yield  # makes it a generator like the others


def read_verl(path: Path, options: Options) -> Iterator[Rollout]:
    """verl's {global_steps}.jsonl of `trainer.rollout_data_dir`: texts without special tokens, so
    never token-exact.
    """
    for number, row in json_lines(path):
        group = str(row["uid"]).rsplit("_", 2)[0] if row.get("uid") else row["input"]
        yield Rollout(
            f"{path} line {number}", f"{row.get('step')}/{group}", float(row["score"]),
            policy_version=f"step {row.get('step')}", prompt=row["input"],
            completion=row["output"],
        )  # fmt: skip


def read_areal(path: Path, options: Options) -> Iterator[Rollout]:
    """AReaL's rollout/{version}/{task_id}.jsonl: texts with special tokens, and their lengths."""
    for number, row in json_lines(path):
        head, tail = row.get("head_version"), row.get("tail_version")
        fault = "" if head == tail else f"written by policies {head} to {tail}"
        yield Rollout(
            f"{path} line {number}", str(row["task_id"]), float(row["reward"]),
            policy_version=None if tail is None else str(tail), prompt=row["prompt"],
            completion=row["completion"], fault=fault,
        )  # fmt: skip


def read_ms_swift(path: Path, options: Options) -> Iterator[Rollout]:
    """ms-swift's completions.jsonl: a line a log, columns as lists."""
    known = {"step", "prompt", "completion", "advantages", "entropy"}
    for number, columns in json_lines(path):
        names = [name for name in columns if name not in known]
        rewards = [options.reward] if options.reward in names else names
        if len(rewards) != 1:
            raise ConfigError(
                f"{path} line {number} (from 0) has reward columns {', '.join(names) or 'none'}: "
                "say which with --reward COLUMN"
            )
        steps = columns.get("step")
        for i, (prompt, completion, reward) in enumerate(
            zip(columns["prompt"], columns["completion"], columns[rewards[0]], strict=True)
        ):
            step = steps[i] if isinstance(steps, list) else steps
            yield Rollout(
                f"{path} line {number} entry {i}", json.dumps([step, prompt], sort_keys=True),
                math.nan if reward is None else float(reward), policy_version=f"step {step}",
                prompt=prompt, completion=completion,
            )  # fmt: skip


FORMATS = {
    one.name: one
    for one in (
        Format("trl", "**/completions*.parquet", False, frozenset({"prompt", "completion", "step"}),
               read_trl, "file K was written by checkpoint K - 1, or that of its policy_step"),
        Format("nemo_rl", "train_data_step*.jsonl", True,
               frozenset({"token_ids", "token_loss_mask", "input_lengths", "rewards"}),
               read_nemo_rl, "no end reason is logged: what ended follows from the end token"),
        Format("prime_rl", "**/traces.jsonl", True, frozenset({"traces", "group"}), read_prime_rl),
        Format("open_instruct", "*_rollouts_*.jsonl", True,
               frozenset({"prompt_tokens", "response_tokens", "prompt_idx"}), read_open_instruct),
        Format("slime", "*.pt", True, frozenset({"rollout_id", "samples"}), read_slime),
        Format("skyrl", "*_training_input.pkl", True, frozenset(), read_skyrl),
        Format("verl", "*.jsonl", False, frozenset({"input", "output", "score"}), read_verl,
               "texts without special tokens"),
        Format("areal", "**/*.jsonl", False, frozenset({"task_id", "seqlen", "completion"}),
               read_areal),
        Format("ms_swift", "completions.jsonl", False, frozenset({"prompt", "completion"}),
               read_ms_swift),
    )
}  # fmt: skip


def detect(source: Path) -> Format:
    """The framework that wrote a file or folder, by file names and the fields of its first row.

    Raises:
        ConfigError: none fits.
    """
    if source.is_file() and not source.stat().st_size:
        raise ConfigError(f"{source} is empty: name a file with rollouts")
    if source.is_dir() and not any(path.is_file() for path in source.rglob("*")):
        raise ConfigError(f"{source} holds no file: name a folder with rollouts")
    for one in FORMATS.values():
        for path in files_of(source, one):
            if one.fields <= set(_first_fields(path)):
                return one
            break
    raise ConfigError(
        f"{source} is in no format that is known by its names and fields: say --from "
        f"{'|'.join(FORMATS)}"
    )


def files_of(source: Path, one: Format) -> Sequence[Path]:
    """The source itself, or all of a folder's files of a format, in order."""
    if source.is_file():
        return [source] if source.match(one.pattern.rpartition("/")[2]) else []
    return sorted(source.glob(one.pattern))


def _first_fields(path: Path) -> Iterable[str]:
    """Names of the fields of a file's first row."""
    if path.suffix == ".parquet":
        from pyarrow import parquet

        return parquet.read_schema(path).names
    if path.suffix == ".jsonl":
        return next((row for _, row in json_lines(path)), {})
    return FORMATS["slime"].fields if path.suffix == ".pt" else ()
