"""Which checkpoint wrote a file of completions, and how many updates lie between the two.

TRL writes completions_K after K updates, of the batch that was drawn after K - 1: file 501 is of
checkpoint-500. verl's K.jsonl was written by global_step_(K-1) likewise.
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
POLICY_STEP = "grpo_ustat.policy_step"  # in the metadata that `convert` writes
TRAINER_STATE = "trainer_state.json"


@dataclass(frozen=True)
class Pairing:
    """A file's rows and the checkpoint beside the run that is nearest to their policy.

    Attributes:
        file: the file's name.
        policy_step: updates of the policy that wrote the rows.
        checkpoint: the folder.
        checkpoint_step: its updates.
    """

    file: str
    policy_step: int
    checkpoint: Path
    checkpoint_step: int

    @property
    def is_exact(self) -> bool:
        """Whether the checkpoint wrote the rows."""
        return self.policy_step == self.checkpoint_step

    @property
    def between(self) -> str:
        """How far the policy is from the checkpoint, see `updates_between`."""
        return updates_between(self.policy_step, self.checkpoint_step)

    def line(self) -> str:
        """What belongs to what; where updates lie between, with which settings of TRL none do."""
        name = self.checkpoint.name
        if self.is_exact:
            return f"{self.file} was written by {name}"
        line = f"{self.file} was written {self.between} {name}, the nearest"
        state = _trainer_state(self.checkpoint)
        every, saved = state.get("logging_steps"), state.get("save_steps")
        if not isinstance(every, int) or not isinstance(saved, int) or math.gcd(every, saved) == 1:
            return line
        file = -(-saved // every) * every
        return (
            f"{line}; they meet with logging_steps=1, or with save_steps={file - 1} (checkpoint-"
            f"{file - 1} writes completions_{file:05d})"
        )


def pairing_of(
    file: str, policy_step: int | None, checkpoints: Mapping[int, Path]
) -> Pairing | None:
    """A file and the checkpoint nearest to the policy that wrote it; of two, the earlier one.

    Args:
        file: its name.
        policy_step: updates of that policy; None: nothing says it.
        checkpoints: beside the run, by their updates.

    Returns:
        None where nothing says which policy it was, or there is no checkpoint.
    """
    if policy_step is None or not checkpoints:
        return None
    near = min(checkpoints, key=lambda one: (abs(one - policy_step), one))
    return Pairing(file, policy_step, checkpoints[near], near)


def updates_away(policy_step: int | None, checkpoints: Collection[int]) -> int:
    """Updates between a policy and the nearest of checkpoints; 0 where nothing says so.

    >>> updates_away(39, (20, 40)), updates_away(None, (20, 40)), updates_away(39, ())
    (1, 0, 0)
    """
    if policy_step is None:
        return 0
    return min((abs(policy_step - one) for one in checkpoints), default=0)


def run_folder_of(path: Path) -> Path:
    """The folder of the run that wrote a file of TRL, where its checkpoints are."""
    folder = Path(os.path.abspath(path)).parent  # links keep their names
    return folder.parent if folder.name == "completions" else folder


def updates_between(policy_step: int, checkpoint_step: int) -> str:
    """How far a policy is from a checkpoint, in words.

    >>> updates_between(509, 500), updates_between(499, 500)
    ('9 updates after', '1 update before')
    """
    count = abs(policy_step - checkpoint_step)
    side = "after" if policy_step > checkpoint_step else "before"
    return f"{count} update{'s' * (count != 1)} {side}"


def logged_policy_step(path: Path) -> int | None:
    """Updates of the policy that wrote a Parquet file: what `convert` noted, the `policy_step` of
    TRL's recorder, or one less than TRL's file says. None: nothing says it.
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
    """A Parquet file and the nearest checkpoint of the run that wrote it, see `pairing_of`."""
    return pairing_of(path.stem, logged_policy_step(path), checkpoints_of(run_folder_of(path)))


def last_paired(files: Sequence[Path], checkpoints: Collection[int]) -> Path:
    """The last of a run's Parquet files whose updates are nearest to a checkpoint; the last of all
    where there is none.

    Args:
        files: one at least, from the first to the last.
        checkpoints: their updates.
    """
    if not checkpoints:
        return files[-1]
    return min(
        reversed(files), key=lambda file: updates_away(logged_policy_step(file), checkpoints)
    )


def model_to_name(path: Path) -> str:
    """What to write for the model that wrote a Parquet file, as far as the file and the folders
    beside it tell.
    """
    pairing, step, version = pairing_of_file(path), logged_policy_step(path), _version(path)
    if pairing is not None and pairing.is_exact:
        return shlex.quote(f"model={pairing.checkpoint}")
    if step is not None:
        near = "" if pairing is None else f" (the nearest is {pairing.checkpoint})"
        return f"model=FOLDER, the checkpoint of {step} updates that wrote them{near}"
    named = "" if version is None else f", policy_version {version}"
    return f"model=FOLDER, the checkpoint that wrote them{named}"


def _version(path: Path) -> str | None:
    """The `policy_version` of all rows of a Parquet file; None where there is not just one."""
    from pyarrow import parquet

    try:
        column = parquet.read_table(path, columns=["policy_version"]).column(0)
    except (OSError, ValueError, IndexError):
        return None
    versions = set(column.to_pylist()) - {None}
    return str(versions.pop()) if len(versions) == 1 else None


def checkpoint_step(model: str) -> int | None:
    """Updates of a checkpoint by the name of its folder, or of one above it, as verl's merged
    models have. None: it has no such name.

    >>> checkpoint_step("out/checkpoint-500/"), checkpoint_step("global_step_8/actor/huggingface")
    (500, 8)
    """
    found = [number for part in Path(model).parts if (number := CHECKPOINT.fullmatch(part))]
    return int(found[-1][1]) if found else None


def other_policy_sentence(path: Path, model: str) -> str:
    """What is wrong where a checkpoint scores completions of another policy; "" where nothing says
    so.
    """
    written, scoring = logged_policy_step(path), checkpoint_step(model)
    if written is None or scoring is None or written == scoring:
        return ""
    return (
        f"WARNING: these completions were written {updates_between(written, scoring)} the policy "
        f"that scores them: {path.name} is of checkpoint-{written}, and the model is checkpoint-"
        f"{scoring}. All numbers here are of scores on completions of another policy, and such "
        "scores are not 0 on average."
    )


def _trainer_state(checkpoint: Path) -> dict[str, object]:
    """What Transformers' Trainer keeps with a checkpoint; nothing where it cannot be read."""
    try:
        state = json.loads((checkpoint / TRAINER_STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}
