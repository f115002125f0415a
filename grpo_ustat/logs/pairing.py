"""Pairing of a file of completions with the checkpoint that wrote it or is nearest to it.

TRL writes the file completions_K after K updates, but the completions in it were sampled after
K - 1 updates. For example, the policy in checkpoint-500 wrote the completions in completions_00501.
In verl, the policy in global_step_(K-1) wrote the completions in K.jsonl.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_ustat.config.model import CHECKPOINT, checkpoints_of

TRL_FILE = re.compile(r"^completions_(\d{5,})$")
# Key in the Parquet metadata that `convert` writes.
POLICY_STEP = "grpo_ustat.policy_step"
TRAINER_STATE = "trainer_state.json"


@dataclass(frozen=True)
class Pairing:
    """Completions file, with the checkpoint nearest to the policy that wrote it."""

    # Name of the file.
    file: str
    # Number of updates that the policy had received when it wrote the rows.
    policy_step: int
    checkpoint: Path
    checkpoint_step: int

    @property
    def is_exact(self) -> bool:
        """True if the policy in the checkpoint wrote the rows."""
        return self.policy_step == self.checkpoint_step

    @property
    def between(self) -> str:
        """Distance from the checkpoint to the policy, in words; see `updates_between`."""
        return updates_between(self.policy_step, self.checkpoint_step)

    def line(self) -> str:
        """Return a line that names the file and the checkpoint.

        If another policy than the checkpoint wrote the file, the line also gives the number of
        updates between the two policies. If TRL's settings cause the mismatch, it names settings
        that avoid it.
        """
        name = self.checkpoint.name
        if self.is_exact:
            return f"{self.file} was written by {name}"
        line = f"{self.file} was written {self.between} {name}, the nearest checkpoint"
        state = _trainer_state(self.checkpoint)
        logging_steps, save_steps = state.get("logging_steps"), state.get("save_steps")
        if not isinstance(logging_steps, int) or not isinstance(save_steps, int):
            return line
        if math.gcd(logging_steps, save_steps) == 1:
            return line
        file = -(-save_steps // logging_steps) * logging_steps
        return (
            f"{line}; to log the completions of a checkpoint, use logging_steps=1, or save_steps="
            f"{file - 1} (checkpoint-{file - 1} writes completions_{file:05d})"
        )


def pairing_of(
    file: str, policy_step: int | None, checkpoints: Mapping[int, Path]
) -> Pairing | None:
    """Pair a file with the checkpoint nearest to the policy that wrote it.

    If two checkpoints are equally near, the earlier checkpoint is used.

    Args:
        file: name of the file.
        policy_step: number of updates that the policy had received when it wrote the file; None if
            unknown.
        checkpoints: the run's checkpoints, keyed by number of updates.

    Returns:
        The pair, or None if the policy is unknown or there is no checkpoint.
    """
    if policy_step is None or not checkpoints:
        return None
    near = min(checkpoints, key=lambda step: (abs(step - policy_step), step))
    return Pairing(file, policy_step, checkpoints[near], near)


def updates_away(policy_step: int | None, checkpoints: Collection[int]) -> int:
    """Return the distance in updates from a policy to the nearest checkpoint; 0 if unknown.

    >>> updates_away(39, (20, 40)), updates_away(None, (20, 40)), updates_away(39, ())
    (1, 0, 0)
    """
    if policy_step is None:
        return 0
    return min((abs(policy_step - step) for step in checkpoints), default=0)


def run_folder_of(path: Path) -> Path:
    """Return the folder of the TRL run that wrote a file; the run's checkpoints are in it."""
    # The path is not resolved, because the target of a symbolic link may be in another folder.
    folder = Path(os.path.abspath(path)).parent
    return folder.parent if folder.name == "completions" else folder


def updates_between(policy_step: int, checkpoint_step: int) -> str:
    """Return the number of updates between a policy and a checkpoint, in words.

    >>> updates_between(509, 500), updates_between(499, 500)
    ('9 updates after', '1 update before')
    """
    count = abs(policy_step - checkpoint_step)
    side = "after" if policy_step > checkpoint_step else "before"
    return f"{count} update{'s' * (count != 1)} {side}"


def logged_policy_step(path: Path) -> int | None:
    """Return the number of updates of the policy that wrote a Parquet file, or None if unknown.

    The number is read from the first of these that is present: the metadata that `convert` writes,
    the column `policy_step` that `record` logs in TRL, or the number in TRL's file name minus one.
    """
    from pyarrow import parquet

    try:
        schema = parquet.read_schema(path)
        noted = (schema.metadata or {}).get(POLICY_STEP.encode())
        if noted is not None:
            return int(noted)
        if "policy_step" in schema.names:
            steps = set(parquet.read_table(path, columns=["policy_step"])[0].to_pylist())
            return steps.pop() if len(steps) == 1 else None
    except (OSError, ValueError):
        return None
    file = TRL_FILE.search(path.stem)
    return int(file[1]) - 1 if file else None


def pairing_of_file(path: Path) -> Pairing | None:
    """Pair a Parquet file with the nearest checkpoint of its run; see `pairing_of`."""
    return pairing_of(path.stem, logged_policy_step(path), checkpoints_of(run_folder_of(path)))


def last_paired(files: Sequence[Path], checkpoints: Collection[int]) -> Path:
    """Return the Parquet file that is the fewest updates away from a checkpoint.

    If several files are equally near, the last of these files is returned. If there are no
    checkpoints, the last file is returned.

    Args:
        files: one or more files, in training order.
        checkpoints: numbers of updates of the checkpoints.
    """
    if not checkpoints:
        return files[-1]
    return min(
        reversed(files), key=lambda file: updates_away(logged_policy_step(file), checkpoints)
    )


def model_to_name(path: Path) -> str:
    """Return the `model=` override for the policy that wrote a Parquet file.

    If no checkpoint of that policy is known, the result has the placeholder FOLDER and describes
    the checkpoint that is needed.
    """
    pairing, step, version = pairing_of_file(path), logged_policy_step(path), _version(path)
    if pairing is not None and pairing.is_exact:
        return shlex.quote(f"model={pairing.checkpoint}")
    if step is not None:
        near = "" if pairing is None else f" (the nearest checkpoint is {pairing.checkpoint})"
        return f"model=FOLDER, the checkpoint after {step} updates, which wrote them{near}"
    named = "" if version is None else f", policy_version {version}"
    return f"model=FOLDER, the checkpoint that wrote them{named}"


def _version(path: Path) -> str | None:
    """Return the `policy_version` of a Parquet file; None if rows have several versions or none."""
    from pyarrow import parquet

    try:
        column = parquet.read_table(path, columns=["policy_version"]).column(0)
    except (OSError, ValueError, IndexError):
        return None
    versions = set(column.to_pylist()) - {None}
    return str(versions.pop()) if len(versions) == 1 else None


def checkpoint_step(model: str) -> int | None:
    """Parse the number of updates from the path of a checkpoint; None if the path has none.

    For merged models of verl, the number is in the name of a parent folder.

    >>> checkpoint_step("out/checkpoint-500/"), checkpoint_step("global_step_8/actor/huggingface")
    (500, 8)
    """
    matches = [number for part in Path(model).parts if (number := CHECKPOINT.fullmatch(part))]
    return int(matches[-1][1]) if matches else None


def other_policy_sentence(path: Path, model: str) -> str:
    """Return a warning if `model` is another policy than the one that wrote a file, else ""."""
    written, scoring = logged_policy_step(path), checkpoint_step(model)
    if written is None or scoring is None or written == scoring:
        return ""
    return (
        f"WARNING: these completions were written {updates_between(written, scoring)} the model "
        f"whose gradients are computed: checkpoint-{written} wrote {path.name}, and the model is "
        f"checkpoint-{scoring}. The estimators assume that the mean gradient of a completion's "
        "log-probability is 0, but it is not 0 if another policy wrote the completions."
    )


def _trainer_state(checkpoint: Path) -> dict[str, object]:
    """Read the state that the Transformers Trainer saves with a checkpoint; empty if unreadable."""
    try:
        state = json.loads((checkpoint / TRAINER_STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}
