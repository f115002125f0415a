"""Recorder that writes the tokens of verl's rollouts to Parquet files next to verl's dumps.

If `trainer.rollout_data_dir` is set, verl writes the completions of step K as texts to `K.jsonl`.
These texts have no special tokens, so the exact tokens cannot be recovered. This module writes the
tokens of the same rows to `K.parquet`, which `grpo-ustat convert` reads. To activate it, set the
environment variable `VERL_USE_EXTERNAL_MODULES=grpo_ustat.integrations.verl_record`, and verl
imports the module. See docs/verl.md.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from grpo_ustat.runs.files import atomic_write
from grpo_ustat.terminal.streams import single_line, visible

SCHEMA = pyarrow.schema([
    ("step", pyarrow.int64()), ("uid", pyarrow.string()), ("sample", pyarrow.string()),
    ("prompt_ids", pyarrow.list_(pyarrow.int64())),
    ("completion_ids", pyarrow.list_(pyarrow.int64())),
    ("response_mask", pyarrow.list_(pyarrow.int64())), ("score", pyarrow.float64()),
    ("rollout_log_probs", pyarrow.list_(pyarrow.float64())),
    ("old_log_probs", pyarrow.list_(pyarrow.float64())),
    ("min_global_steps", pyarrow.int64()), ("max_global_steps", pyarrow.int64()),
])  # fmt: skip
# verl fills up batches with padding rows; their `uid` matches this pattern.
PADDING = re.compile(r"pad(\d+|[0-9a-f]{32})")
# Log-probabilities from the sampler, and from the trainer before its update.
PER_TOKEN = ("rollout_log_probs", "old_log_probs")
# First and last version of the weights that wrote a row, because asynchronous training can update
# the weights during a row. A version is the N of the checkpoint folder global_step_N.
VERSIONS = ("min_global_steps", "max_global_steps")
FIELDS = ("uid", "prompts", "responses", "loss_mask", "response_mask", "rm_scores", *PER_TOKEN)


def rows_of_queue(batch: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a `KVBatchMeta` of verl's trainer, with tensors in a TransferQueue.

    `response_mask` in a yielded row is the mask of the agent loop, which is 1 for the tokens that
    the policy wrote. verl stores this mask as `loss_mask`. verl's own `response_mask` can also be 0
    for off-policy tokens.
    """
    queue = import_module("transfer_queue")
    data = queue.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=list(FIELDS)
    )
    columns = {name: data[name] for name in FIELDS if name in data.keys()}  # noqa: SIM118
    tensors = {name: column.unbind() for name, column in columns.items() if name != "uid"}
    uids = columns["uid"].tolist()
    for i, (sample, tag, uid) in enumerate(zip(batch.keys, batch.tags, uids, strict=True)):
        if tag.get("is_padding"):
            continue
        row = {name: column[i].tolist() for name, column in tensors.items()}
        yield {
            "uid": uid, "sample": sample, "prompt_ids": row["prompts"],
            "completion_ids": row["responses"], "score": sum(row["rm_scores"]),
            "response_mask": row.get("loss_mask", row["response_mask"]),
            **{name: row.get(name) for name in PER_TOKEN},
            **{name: tag.get(name) for name in VERSIONS},
        }  # fmt: skip


def rows_of_batch(batch: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a `DataProto`, the batch type of verl's older trainer.

    Prompts are padded on the left and responses on the right.
    """
    tensors, others = batch.batch, batch.non_tensor_batch
    width = tensors["prompts"].shape[1]
    for i, uid in enumerate(others["uid"]):
        is_prompt, is_response = tensors["attention_mask"][i].bool().tensor_split([width])
        yield {
            "uid": str(uid),
            "prompt_ids": tensors["prompts"][i][is_prompt].tolist(),
            "completion_ids": tensors["responses"][i][is_response].tolist(),
            "response_mask": tensors["response_mask"][i][is_response].tolist(),
            "score": float(tensors["token_level_scores"][i].sum()),
            **{
                name: tensors[name][i][is_response].tolist()
                for name in PER_TOKEN if name in tensors.keys()  # noqa: SIM118
            },
            **{name: others[name][i] for name in VERSIONS if name in others},
        }  # fmt: skip


def write_rows(rows: Sequence[Mapping[str, Any]], step: int, folder: str) -> Path:
    """Write the rows of a step to FOLDER/STEP.parquet, without verl's padding rows."""
    path = Path(folder) / f"{step}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    table_rows = [
        {"step": step, **row} for row in rows if PADDING.fullmatch(str(row["uid"])) is None
    ]
    with atomic_write(path) as staged:
        parquet.write_table(pyarrow.Table.from_pylist(table_rows, SCHEMA), staged)
    return path


def recorded(
    method: Callable[..., None], rows: Callable[[Any], Iterator[dict[str, Any]]]
) -> Callable[..., None]:
    """Wrap a trainer's `_log_rollout_data` so that it also writes tokens.

    If writing fails, the error is printed, training continues, and verl still writes its dump.
    """

    @functools.wraps(method)
    def log_rollout_data(self: Any, *arguments: Any, **named: Any) -> None:
        """Write the tokens, and then verl's dump."""
        values = inspect.signature(method).bind(self, *arguments, **named).arguments
        try:
            path = write_rows(
                list(rows(values["batch"])), self.global_steps, values["rollout_data_dir"]
            )
            print(visible(f"grpo_ustat: tokens of step {self.global_steps} are in {path}"))
        except Exception as error:
            reason = single_line(f"{type(error).__name__}: {error}", 200)
            line = f"grpo_ustat: tokens of step {self.global_steps} were not written: {reason}"
            print(visible(line))
        method(self, *arguments, **named)

    return log_rollout_data


_TRAINERS = (
    ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer", rows_of_queue),
    ("verl.trainer.ppo.ray_trainer", "RayPPOTrainer", rows_of_batch),
)
_patched = []
for _module, _name, _rows in _TRAINERS:
    try:
        _trainer = getattr(import_module(_module), _name)
    # The first module exists only in newer versions of verl and needs transfer_queue.
    except ImportError:
        continue
    _trainer._log_rollout_data = recorded(_trainer._log_rollout_data, _rows)
    _patched.append(_name)
if not _patched:
    raise ImportError("grpo_ustat.integrations.verl_record needs verl 0.9.1 or newer")
