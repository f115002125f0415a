"""Which checkpoint wrote a file of completions, and how many updates lie between the two.

TRL writes completions_K after K updates, of the batch that was drawn after K - 1: file 501 is of
checkpoint-500. verl's K.jsonl was written by global_step_(K-1) likewise.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from grpo_ustat.runs.files import natural_order

CHECKPOINT = re.compile(r"(?:checkpoint-|global_step_)(\d+)$")  # TRL's folders, verl's
TRL_FILE = re.compile(r"^completions_(\d{5,})$")
POLICY_STEP = "grpo_ustat.policy_step"  # in the metadata that `convert` writes
WEIGHTS = ("config.json", "adapter_config.json")  # a checkpoint that can be loaded has one of them
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

    def line(self) -> str:
        """What belongs to what; where updates lie between, with which settings of TRL none do."""
        name = self.checkpoint.name
        if self.policy_step == self.checkpoint_step:
            return f"{self.file} was written by {name}"
        between = updates_between(self.policy_step, self.checkpoint_step)
        line = f"{self.file} was written {between} {name}, the nearest"
        state = _trainer_state(self.checkpoint)
        every, saved = state.get("logging_steps"), state.get("save_steps")
        if not isinstance(every, int) or not isinstance(saved, int) or math.gcd(every, saved) == 1:
            return line
        file = -(-saved // every) * every
        return (
            f"{line}; they meet with logging_steps=1, or with save_steps={file - 1} (checkpoint-"
            f"{file - 1} writes completions_{file:05d})"
        )


def updates_between(policy_step: int, checkpoint_step: int) -> str:
    """How far a policy is from a checkpoint, in words.

    >>> updates_between(509, 500), updates_between(499, 500)
    ('9 updates after', '1 update before')
    """
    count = abs(policy_step - checkpoint_step)
    side = "after" if policy_step > checkpoint_step else "before"
    return f"{count} update{'s' * (count != 1)} {side}"


def checkpoints_of(run: Path) -> dict[int, Path]:
    """The checkpoints in a run's folder that can be loaded, by their updates; below the working
    folder as one types them there.
    """
    here = Path.cwd()
    run = run.relative_to(here) if run.is_relative_to(here) else run
    return {
        int(number[1]): path
        for path in sorted(run.glob("checkpoint-*"), key=natural_order)
        if (number := CHECKPOINT.search(path.name))
        and any((path / name).is_file() for name in WEIGHTS)
    }


def nearest_checkpoint(policy_step: int, steps: Mapping[int, Path]) -> int:
    """The updates of the checkpoint nearest to a policy; of two, the earlier one's."""
    return min(steps, key=lambda one: (abs(one - policy_step), one))


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
