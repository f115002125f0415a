"""The files of nine frameworks: a reader for each, from one file to rows of one kind.

Where a reader says "from", it is the code that writes the file, read in August 2026.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.logs.pairing import run_folder_of
from grpo_ustat.logs.rows import (
    DamagedFile,
    Options,
    Rollout,
    reward_columns,
    reward_of,
    usual_reward,
)
from grpo_ustat.logs.turns import is_id
from grpo_ustat.runs.files import parsed_row
from grpo_ustat.terminal.streams import single_line

EVALUATION = "of an evaluation"
NOT_AS_WRITTEN = "its row is not as the framework writes it"  # and the error, in parentheses
EVALUATION_FOLDER = re.compile(r"(^|[_.-])(val|valid|validation|eval|evaluation)([_.-]|$)")
TRAINING_FOLDER = re.compile(r"(^|[_.-])(train|training|rollouts?)([_.-]|$)")
SPECIAL_TOKEN = r"(?:<[|｜][^<>\s]+>|<\w+_\w+>|\[[|｜]\w+[|｜]\])"  # as <|end|>, <end_of_turn>
THOUGHTS = r"\s*(?:<think>\s*(?:</think>\s*)?)?$"  # that a template may open, or leave empty
OPENING_ROLE = r"^(?:system|developer|user)"
TEMPLATE_ENDS = [
    re.compile(end, re.DOTALL)
    for end in (
        # alone on its line, or after a special token: ChatML, Gemma, Granite
        rf"(?:^|\n|{SPECIAL_TOKEN})[ \t]*(?P<rest>assistant|model){THOUGHTS}",
        # before a special token, or as one: Llama, Phi-4; Phi-3, Zephyr
        rf"(?P<rest>(?:assistant|model){SPECIAL_TOKEN}){THOUGHTS}",
        rf"(?P<rest>(?i:[<\[][|｜]assistant[|｜][>\]])){THOUGHTS}",
        # joined to the question by the loss of a special token: Llama, with a blank line after it;
        # Phi-4 and gpt-oss, where another role begins the text
        rf"[^\s/'\"(-](?P<rest>assistant)\n\n{THOUGHTS}",
        rf"{OPENING_ROLE}.*[^\s/'\"(-](?P<rest>assistant){THOUGHTS}",
        rf"{OPENING_ROLE}\s*\n.*(?P<rest>assistant){THOUGHTS}",
        r"(?P<rest></?think>)\s*$",
    )
]
VERL_NAME = re.compile(r"(?P<rollout>(?P<sample>.*)_\d+)_\d+")  # {sample}_{rollout}_{output}
LONGEST_NAME = 200  # letters of an id; texts are longer
FIELD_TYPES = {
    "group": str, "step": str | None, "sample": str | None, "ended": bool | None,
    "policy_version": str | None, "reward": float, "prompt_ids": list | None,
    "completion_ids": list | None, "loss_mask": list | None, "logprobs": list | None,
    "policy_step": int | None, "prompt": str | list | None, "completion": str | list | None,
}  # fmt: skip


def absolute(path: Path) -> Path:
    """The whole path, so that names of folders above the working one count; links keep theirs."""
    return Path(os.path.abspath(path))


def rows_of(
    path: Path,
    rows: Iterable[tuple[str, Any]],
    build: Callable[[str, Any], Iterable[Rollout]],
) -> Iterator[Rollout]:
    """What `build` makes of each row, with its place; a row that is not as the framework writes it
    becomes a rollout with that fault, so that it is counted and the others are read.
    """
    for place, row in rows:
        try:
            if row is None:
                raise ValueError("no JSON object, cut off perhaps")
            made = list(build(place, row))
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            reason = f"{type(error).__name__}: {single_line(error, 80)}"
            made = [
                Rollout(path, place, run=str(path.parent), fault=f"{NOT_AS_WRITTEN} ({reason})")
            ]
        for one in made:
            one.names = one.names or (_names(row) if len(made) == 1 else {})
            if found := _unlike(one):
                one.fault = f"{NOT_AS_WRITTEN} ({found})"
            yield one


def _names(row: Any) -> dict[str, str | int]:
    """Short texts and whole numbers of a row, by field, also those in lists of one."""
    if not isinstance(row, dict):
        return {}
    single = {
        key: value[0] if isinstance(value, list) and len(value) == 1 else value
        for key, value in row.items()
    }
    return {
        key: value
        for key, value in single.items()
        if isinstance(value, str | int) and len(str(value)) <= LONGEST_NAME
    }


def _unlike(rollout: Rollout) -> str:
    """The first field that is of another type than it must be; empty: none is."""
    for name, kind in FIELD_TYPES.items():
        if not isinstance(value := getattr(rollout, name), kind):
            return f"{name} is {type(value).__name__} {single_line(value, 40)}"
    return ""


def whole(value: Any, name: str, largest: int) -> int:
    """A length as logged.

    Raises:
        ValueError: it is no whole number from 0 to `largest`.
    """
    if not isinstance(value, int | float) or value not in range(largest + 1):
        raise ValueError(f"{name} is no whole number from 0 to {largest}")
    return int(value)


def lines_of(path: Path) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Each line that is not blank; None for one that is no JSON object."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for place, line in enumerate(file):
            if line.strip():
                yield f"line {place}", parsed_row(line)


def read_trl(path: Path, options: Options) -> Iterator[Rollout]:
    """TRL's completions_{step:05d}.parquet, from GRPOTrainer's log: a row a completion, a column of
    each reward function; token ids and the policy's step only where
    `grpo_ustat.integrations.trl.record` was among the reward functions.
    """
    from pyarrow import parquet

    known = {
        "step", "prompt", "completion", "advantage", "prompt_ids", "completion_ids", "policy_step",
    }  # fmt: skip
    table = parquet.read_table(path)
    names, nulls = reward_columns(table.to_pydict(), known)
    usual = usual_reward(path, names, nulls, options) if len(table) else {}
    run = run_folder_of(path)

    def build(place: str, row: dict[str, Any]) -> list[Rollout]:
        """The rollout of a row."""
        written_by, step = row.get("policy_step"), row.get("step")
        return [Rollout(
            path, place, json.dumps(row["prompt"], sort_keys=True), run=str(run), step=str(step),
            prompt_ids=row.get("prompt_ids"), completion_ids=row.get("completion_ids"),
            policy_version=f"step {step}" if written_by is None else f"checkpoint-{written_by}",
            policy_step=int(step) - 1 if written_by is None and step else written_by,
            prompt=row["prompt"], completion=row["completion"],
            **reward_of(
                {name: row[name] for name in names + nulls}, options, usual, skips_null=True
            ),
        )]  # fmt: skip

    rows = ((f"row {place}", row) for place, row in enumerate(table.to_pylist()))
    return rows_of(path, rows, build)


def read_nemo_rl(path: Path, options: Options) -> Iterator[Rollout]:
    """NeMo-RL's train_data_step{N}.jsonl, from `log_batched_dict_as_jsonl`: a line a completion,
    values perhaps in a list of one; whole sequences, padded, with the mask of generated tokens. It
    has no group: completions of a prompt stand one after another, `idx` counts them in the file.
    Under dynamic sampling a row's own reward is in `filtered_rewards`.
    """

    def build(place: str, packed: dict[str, Any]) -> list[Rollout]:
        """The rollout of a line."""
        row: dict[str, Any] = {
            key: value[0] if isinstance(value, list) and len(value) == 1 else value
            for key, value in packed.items()
        }
        idx = int(row.get("idx", place.rpartition(" ")[2]))
        length = whole(row["input_lengths"], "input_lengths", len(row["token_ids"]))
        tokens, mask = row["token_ids"][:length], row["token_loss_mask"][:length]
        start = mask.index(1) if 1 in mask else length
        logprobs, size = row.get("generation_logprobs"), options.group_size
        out = row.get("sample_loss_mask", 1) == 0
        own = "filtered_rewards" if "filtered_rewards" in row else "rewards"
        return [Rollout(
            path, place, str(idx // size) if size else json.dumps(tokens[:start]),
            run=str(absolute(path).parent), step=path.stem.rpartition("step")[2], sample=str(idx),
            untrained="sample_loss_mask is 0: it was left out" if out else "",
            prompt_ids=tokens[:start], completion_ids=tokens[start:], loss_mask=mask[start:],
            logprobs=None if logprobs is None else logprobs[start:length],
            policy_version=path.stem, **reward_of(row, options, {own: 1.0}),
        )]  # fmt: skip

    return rows_of(path, lines_of(path), build)


def read_prime_rl(path: Path, options: Options) -> Iterator[Rollout]:
    """prime-rl's traces.jsonl: an episode a line, each of its traces a chain of nodes, of which the
    sampled ones are the policy's; rewards are added by their weights. `all` holds what arrived,
    `effective` what was trained on, from `FileMonitor.log_episodes`; a launch has a run id.
    """
    parts = absolute(path).parts
    rollouts = [k for k, part in enumerate(parts) if part == "rollouts"]
    folder = str(Path(*parts[: rollouts[-1] if rollouts else -1]))
    kind, subset = parts[-3:-1]
    step = next((part[5:] for part in reversed(parts) if part.startswith("step_")), None)

    def build(place: str, episode: dict[str, Any]) -> list[Rollout]:
        """The rollouts of an episode."""
        run = episode.get("run") or {}
        work = run.get("work") or {}
        launch = f", run {run['id']}" if run.get("id") else ""
        is_evaluation = "eval" in (kind, work.get("type"), run.get("type"))
        common = Rollout(
            path, place, run=f"{folder}{launch}", step=step, arrived=subset == "all",
            untrained=EVALUATION if is_evaluation else "",
        )  # fmt: skip
        if not episode["traces"]:
            return [replace(common, untrained=common.untrained or "it failed before any trace")]
        made = []
        for k, trace in enumerate(episode["traces"]):
            sample = f"{episode['id']} {k}" if episode.get("id") else None
            one = replace(common, place=f"{place} trace {k}", sample=sample)
            made.append(_prime_trace(one, trace, episode, options))
        return made

    return rows_of(path, lines_of(path), build)


def _prime_trace(
    common: Rollout, trace: dict[str, Any], episode: dict[str, Any], options: Options
) -> Rollout:
    """One agent's trace. The prompt ends where the policy's first token begins; log-probabilities
    are those of sampled tokens alone.
    """
    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    are_logged = True
    for node in trace["nodes"]:
        ids = node.get("token_ids") or []
        sampled = bool(node.get("sampled"))
        own = [int(sampled and bool(x)) for x in node.get("mask") or [sampled] * len(ids)]
        values = iter(node.get("logprobs") or ())
        if node.get("logprobs") and len(node["logprobs"]) == len(own) != sum(own):
            logprobs += [float(x) for x in values]  # of every token of the node
        else:
            logprobs += [float(next(values, math.nan)) if one else 0.0 for one in own]
        are_logged &= not any(own) or bool(node.get("logprobs"))
        tokens += ids
        mask += own
    start = mask.index(1) if 1 in mask else len(tokens)
    policy = ((episode.get("run") or {}).get("work") or {}).get("policy") or {}
    first, last = policy.get("start"), policy.get("end")
    parents = [node.get("parent") for node in trace["nodes"]]
    fault = ""
    if any(parent not in (None, i - 1) for i, parent in enumerate(parents) if i):
        fault = "its nodes branch: no single sequence"
    elif first != last:
        fault = f"written by policies {first} to {last}"
    untrained = common.untrained
    agent = trace.get("agent") or {}
    if not untrained and trace.get("ok", episode.get("ok")) is False:
        untrained = "it failed (ok is false)"
    elif not untrained and agent.get("trainable") is False:
        untrained = "of an agent that is not trained"
    rewards = {name: (one or {}).get("score") for name, one in trace["rewards"].items()}
    weights = {name: (one or {}).get("weight") for name, one in trace["rewards"].items()}
    usual = {name: 1.0 if weight is None else weight for name, weight in weights.items()}
    reasons = [call.get("finish_reason") for call in trace.get("calls") or ()]
    group = (episode.get("group") or {}).get("id")
    if group is None:
        group = json.dumps(tokens[:start])
    elif isinstance(group, list | dict):
        raise TypeError("group.id is no name")
    found = {"fault": fault} | reward_of(rewards, options, usual)
    return replace(
        common, group=f"{group}/{agent['name']}" if "name" in agent else str(group),
        sample=str(trace["id"]) if trace.get("id") else common.sample,
        untrained=untrained, prompt_ids=tokens[:start], completion_ids=tokens[start:],
        loss_mask=mask[start:], logprobs=logprobs[start:] if are_logged else None,
        ended=None if not reasons else reasons[-1] != "length",
        policy_version=None if last is None else str(last),
        **found | {"fault": fault or found["fault"]},
    )  # fmt: skip


def read_open_instruct(path: Path, options: Options) -> Iterator[Rollout]:
    """open-instruct's {run}_rollouts_{shard:06d}.jsonl of `save_traces`, appended to: a line a
    completion.
    """
    run = str(absolute(path).parent / path.stem.rpartition("_rollouts_")[0])

    def build(place: str, row: dict[str, Any]) -> list[Rollout]:
        """The rollout of a row."""
        step, sample, reason = row.get("step"), row.get("sample_idx"), row.get("finish_reason")
        return [Rollout(
            path, place, str(row["prompt_idx"]), run=run, step=str(step), batch=str(step),
            untrained="it was aborted" if str(reason).startswith("abort") else "",
            sample=None if sample is None else f"{row['prompt_idx']}/{sample}",
            prompt_ids=list(row["prompt_tokens"]), completion_ids=list(row["response_tokens"]),
            logprobs=row.get("logprobs"), ended=None if reason is None else reason != "length",
            policy_version=f"step {step}", **reward_of(row, options, {"reward": 1.0}),
        )]  # fmt: skip

    return rows_of(path, lines_of(path), build)


def read_slime(path: Path, options: Options) -> Iterator[Rollout]:
    """slime's `--save-debug-rollout-data` files, a pickle that is read with `weights_only=True`;
    those of evaluations have `eval_` before their number, from `save_debug_rollout_data`.
    """
    import torch

    try:
        content = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # of any kind: damaged, or not of plain data
        reason = single_line(error, 120)
        raise DamagedFile(
            f"{path} needs more than plain data to be read ({reason}): a pickle may run code, so "
            "it is refused; save dictionaries of lists"
        ) from error
    before = path.stem.rstrip("0123456789")
    untrained = {"failed": "it failed", "aborted": "it was aborted"}

    def build(place: str, sample: dict[str, Any]) -> list[Rollout]:
        """The rollout of a sample."""
        tokens, group = list(sample["tokens"]), sample["group_index"]
        length = whole(sample["response_length"], "response_length", len(tokens))
        prompt_ids = tokens[: len(tokens) - length]
        versions = sorted({str(one) for one in sample.get("weight_versions") or ()})
        logged = sample.get("status")
        status = None if logged is None else str(logged).lower().rpartition(".")[2]
        reason = EVALUATION if before.endswith("eval_") else untrained.get(status or "", "")
        if not reason and sample.get("remove_sample"):
            reason = "remove_sample is set: it was left out"
        found = reward_of({"reward": sample["reward"]}, options, {"reward": 1.0})
        if len(versions) > 1:
            found["fault"] = f"written by policies {' and '.join(versions)}"
        return [Rollout(
            path, place, json.dumps(prompt_ids) if group is None else str(group),
            run=str(absolute(path).parent / before), step=str(content.get("rollout_id")),
            untrained=reason, prompt_ids=prompt_ids, completion_ids=tokens[len(tokens) - length :],
            loss_mask=sample.get("loss_mask"), logprobs=sample.get("rollout_log_probs"),
            ended=None if status is None else status != "truncated",
            policy_version=versions[0] if versions else f"rollout {content.get('rollout_id')}",
            **found,
        )]  # fmt: skip

    rows = ((f"sample {place}", sample) for place, sample in enumerate(content["samples"]))
    return rows_of(path, rows, build)


def read_skyrl(path: Path, options: Options) -> Iterator[Rollout]:
    """SkyRL's dumped batches: without rewards and prompt ids, so of no use here."""
    raise ConfigError(
        f"{path}: SkyRL takes rewards and prompt ids out before it dumps a batch, and the file is "
        "a pickle: write token-exact rows in a TrainingCallback's on_step_end instead, see "
        "docs/measuring.md"
    )
    yield  # makes it a generator like the others


def template_end(prompt: str) -> str:
    r"""The word by which a prompt ends as chat templates do, which leave it alone on its line or
    beside a special token; "" where it is a prompt without a template.

    >>> template_end("user\nHow many?\nassistant\n"), template_end("Who is the assistant")
    ('assistant', '')
    """
    return next((m["rest"] for end in TEMPLATE_ENDS if (m := end.search(prompt))), "")


def read_verl(path: Path, options: Options) -> Iterator[Rollout]:
    """verl's {global_steps}.jsonl of `trainer.rollout_data_dir`: texts without special tokens, so
    never token-exact, and no longer the prompt where a chat template wrote it. Files of
    `trainer.validation_data_dir` are the same, but for their folder.

    Raises:
        ConfigError: a prompt ends as a chat template does.
    """
    is_evaluation = _is_below_evaluations(path, options.source)

    def build(place: str, row: dict[str, Any]) -> list[Rollout]:
        """The rollout of a row."""
        step, uid = str(row.get("step", path.stem)), str(row.get("uid") or "")
        if rest := template_end(row["input"]):
            raise ConfigError(
                f"{path} {place}: its prompt ends in {rest}, as chat templates do, and "
                "verl left their special tokens out, so it is not what the model read: let verl "
                "log tokens too, with VERL_USE_EXTERNAL_MODULES=grpo_ustat.integrations."
                "verl_record, and convert these (docs/verl.md)"
            )
        one_of_many = VERL_NAME.fullmatch(uid)
        return [Rollout(
            path, place, one_of_many["sample"] if one_of_many else uid or row["input"],
            run=str(absolute(path).parent), step=step, sample=uid if one_of_many else None,
            untrained=f"{EVALUATION}, by the name of its folder" if is_evaluation else "",
            policy_version=f"step {step}", prompt=row["input"], completion=row["output"],
            names=_names(row) | {"uid": _rollout_name(uid)},
            **reward_of(row, options, {"score": 1.0}),
        )]  # fmt: skip

    return rows_of(path, lines_of(path), build)


def _rollout_name(name: str) -> str:
    """The part of verl's name of a row that all outputs of its rollout have."""
    one_of_many = VERL_NAME.fullmatch(name)
    return one_of_many["rollout"] if one_of_many else name


def read_verl_record(path: Path, options: Options) -> Iterator[Rollout]:
    """{global_steps}.parquet that `grpo_ustat.integrations.verl_record` writes beside verl's dumps:
    a row a completion, with the sampler's log-probabilities where verl has them, and the first and
    the last `global_step` of the weights that wrote it.
    """
    from pyarrow import parquet

    def build(place: str, row: dict[str, Any]) -> list[Rollout]:
        """The rollout of a row."""
        first, last = row["min_global_steps"], row["max_global_steps"]
        found = reward_of(row, options, {"score": 1.0})
        if first != last:
            found["fault"] = f"written by policies {first} to {last}"
        return [Rollout(
            path, place, row["uid"], run=str(absolute(path).parent), step=str(row["step"]),
            sample=row["sample"], prompt_ids=row["prompt_ids"],
            completion_ids=row["completion_ids"], loss_mask=row["response_mask"],
            logprobs=row["rollout_log_probs"], policy_step=last,
            policy_version=f"step {row['step']}" if last is None else f"global_step_{last}",
            names={"uid": _rollout_name(row["sample"] or row["uid"])}, **found,
        )]  # fmt: skip

    rows = parquet.read_table(path).to_pylist()
    return rows_of(path, ((f"row {place}", row) for place, row in enumerate(rows)), build)


def _is_below_evaluations(path: Path, source: Path | None) -> bool:
    """Whether a file holds evaluations, by the nearest folder above it whose name says evaluation
    or training, up to the parent of the source.
    """
    folder = absolute(path).parent
    given = folder if source is None or source.is_file() else absolute(source)
    above = len(folder.parts) - len(given.parts)
    names = [one.name.lower() for one in (folder, *folder.parents)][: above + 2]
    for name in names:
        if EVALUATION_FOLDER.search(name) or TRAINING_FOLDER.search(name):
            return bool(EVALUATION_FOLDER.search(name))
    return False


def read_areal(path: Path, options: Options) -> Iterator[Rollout]:
    """AReaL's rollout/{version}/{task_id}.jsonl, appended to: texts with special tokens, and their
    lengths; evaluations are in eval-rollout/. Tasks are numbered anew by a resumed run.
    """
    run = absolute(path).parent.parent
    is_evaluation = run.name.startswith("eval")

    def build(place: str, row: dict[str, Any]) -> list[Rollout]:
        """The rollout of a row."""
        head, tail = row.get("head_version"), row.get("tail_version")
        found = reward_of(row, options, {"reward": 1.0})
        if head != tail:
            found["fault"] = f"written by policies {head} to {tail}"
        version, sample = None if tail is None else str(tail), row.get("sample_idx")
        return [Rollout(
            path, place, str(row["task_id"]), run=str(run), step=version, batch=str(path),
            sample=None if sample is None else str(sample), policy_version=version,
            untrained=EVALUATION if is_evaluation else "",
            prompt=row["prompt"], completion=row["completion"], **found,
        )]  # fmt: skip

    return rows_of(path, lines_of(path), build)


def read_ms_swift(path: Path, options: Options) -> Iterator[Rollout]:
    """ms-swift's completions.jsonl, appended to: a line a log, columns as lists. A line at the step
    of the line before it is the log of an evaluation, one at an earlier step of a resumed run.
    """
    before: dict[str, Any] = {"columns": {}, "is evaluation": False}

    def build(place: str, columns: dict[str, Any]) -> list[Rollout]:
        """The rollouts of a log."""
        known = {"step", "prompt", "completion", "advantages", "entropy"}
        lists = {name: x for name, x in columns.items() if isinstance(x, list)}
        names, nulls = reward_columns(lists, known)
        usual = usual_reward(f"{path} {place}", names, nulls, options)
        names += nulls
        steps = columns.get("step")
        count = len(columns["prompt"])
        steps = steps if isinstance(steps, list) else [steps] * count
        is_evaluation = before["columns"].get("step", ()) == columns.get("step") and (
            before["is evaluation"] or before["columns"] != columns
        )
        before.update({"columns": columns, "is evaluation": is_evaluation})
        untrained = f"{EVALUATION}: logged at the step of the line before" if is_evaluation else ""
        return [
            Rollout(
                path, f"{place} entry {i}", json.dumps(prompt, sort_keys=True),
                run=str(absolute(path).parent), step=str(step), batch=str(step), sample=str(i),
                untrained=untrained,
                policy_version=f"step {step}", prompt=prompt, completion=completion,
                names=_names({name: values[i] for name, values in lists.items() if is_id(name)}),
                **reward_of(dict(zip(names, values, strict=True)), options, usual, skips_null=True),
            )
            for i, (step, prompt, completion, *values) in enumerate(
                zip(steps, columns["prompt"], columns["completion"], *(lists[x] for x in names),
                    strict=True)
            )
        ]  # fmt: skip

    return rows_of(path, lines_of(path), build)
