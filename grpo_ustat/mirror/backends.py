"""Trackers, behind one interface; each is a package that is imported when it is opened.

A tracker is opened once in a process, given items in order, each with its index among all that the
run ever gave it, and closed. It may raise, hang or end its process: see `runs.mirror`.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from grpo_ustat.runs.sources import Item, is_number

OUTCOMES = {"done": 0, "failed": 1, "interrupted": 1, "stopped": 75}  # exit codes to tell


@dataclass(frozen=True)
class About:
    """The run, as a tracker is told of it.

    Attributes:
        folder: for the tracker's own files.
        run_id: the same over resumes.
        name, group: of the run and of its seeds together.
        project: to which it belongs there.
        config: without secrets.
    """

    folder: Path
    run_id: str
    name: str
    group: str
    project: str | None
    config: dict[str, Any]


class Tracker(Protocol):
    """What `runs.mirror` asks of a tracker.

    Attributes:
        arrived: how many items of earlier processes it has, None if it does not know.
        lasting: whether what was sent has arrived once `flush` returns; else once `close` does.
    """

    arrived: int | None
    lasting: bool

    def send(self, index: int, items: list[Item]) -> None:
        """Items of one kind, the last of them with this index: completions of several steps, or one
        of any other kind.
        """

    def flush(self) -> None:
        """Nothing more for now."""

    def close(self, outcome: str) -> str:
        """The run ended; returns where to look at it."""


class Wandb:
    """Weights & Biases, on line and off line.

    Its own step only counts what it was given and so increases whatever a resumed run rewrites;
    charts are drawn over `step`, ours. An index that it has already is dropped by wandb itself.
    """

    lasting = False

    def __init__(self, about: About):
        import wandb

        self._wandb = wandb
        os.environ.setdefault("WANDB_DIR", str(about.folder))
        self._run = wandb.init(
            project=about.project, group=about.group, name=about.name, id=about.run_id,
            resume="allow", config=about.config, settings=wandb.Settings(**self._settings()),
        )  # fmt: skip
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.arrived = None if self._run.offline else self._run.starting_step

    def _settings(self) -> dict[str, Any]:
        """Nothing but what is sent: no source code, console, machine or environment."""
        asked = dict(
            console="off", disable_code=True, disable_git=True, disable_job_creation=True,
            save_code=False, silent=True, x_disable_machine_info=True, x_disable_meta=True,
            x_disable_stats=True, x_save_requirements=False, x_transaction_log_flush_interval=2.0,
        )  # fmt: skip
        return {key: x for key, x in asked.items() if key in self._wandb.Settings.model_fields}

    def send(self, index: int, items: list[Item]) -> None:
        """See `Tracker`."""
        item = items[-1]
        if item.kind == "result":
            self._run.summary.update(item.content)
            return
        step = {} if item.step is None else {"step": item.step}
        self._run.log(self._values(items) | step, step=index)

    def _values(self, items: list[Item]) -> dict[str, Any]:
        item = items[-1]
        if item.kind == "figure":
            return {item.name: self._wandb.Image(str(item.content))}
        if item.kind in ("completions", "table"):
            rows = [row for one in items for row in one.content]
            columns = list(dict.fromkeys(key for row in rows for key in row))
            cells = [[row.get(key) for key in columns] for row in rows]
            name = "completions" if item.kind == "completions" else item.name
            return {name: self._wandb.Table(columns=columns, data=cells, allow_mixed_types=True)}
        return flat_values(item)

    def flush(self) -> None:
        """It sends by itself."""

    def close(self, outcome: str) -> str:
        """See `Tracker`."""
        offline = self._run.offline
        where = f"wandb sync {self._run.settings.sync_dir}" if offline else self._run.url
        if outcome == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=OUTCOMES[outcome])
        self._wandb.teardown()  # finish returns before its service has written the run's file
        return where


class Tensorboard:
    """An event file, as TensorBoard itself writes it; numbers in float64, texts as texts."""

    lasting, arrived = True, None

    def __init__(self, about: About):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
        from tensorboard.util.tensor_util import make_tensor_proto

        self._event, self._summary, self._tensor = event_pb2, summary_pb2, make_tensor_proto
        self._writer = EventFileWriter(str(about.folder))
        self._say("config", _text(about.config), 0)

    def send(self, index: int, items: list[Item]) -> None:
        """See `Tracker`."""
        item = items[-1]
        step = item.step or 0
        if item.kind == "figure":
            self._draw(item.name, Path(item.content).read_bytes(), step)
        elif item.kind in ("completions", "table"):
            for one in items:
                name = "completions" if item.kind == "completions" else item.name
                self._say(name, _text(one.content), one.step or 0)
                self._curves(one)
        else:
            self._numbers(item, step)

    def _numbers(self, item: Item, step: int) -> None:
        for key, value in flat_values(item).items():
            if is_number(value):
                self._draw_number(key, value, step)
            elif value is not None:
                self._say(key, str(value), step)

    def _curves(self, item: Item) -> None:
        """A study's errors, drawn over the group size."""
        for row in item.content if item.kind == "table" else ():
            if {"mse", "group_size", "baseline"} <= row.keys() and is_number(row["mse"]):
                where = f"{row['method']}/{row['setting']}/{row['num_prompts']}"
                self._draw_number(f"mse/{where}/{row['baseline']}", row["mse"], row["group_size"])

    def _draw_number(self, tag: str, value: float, step: int) -> None:
        import numpy as np

        made = self._tensor(np.float64(value))
        self._put(tag, step, "scalars", self._summary.DATA_CLASS_SCALAR, tensor=made)

    def _say(self, tag: str, text: str, step: int) -> None:
        made = self._tensor([text.encode()])
        self._put(tag, step, "text", self._summary.DATA_CLASS_TENSOR, tensor=made)

    def _draw(self, tag: str, png: bytes, step: int) -> None:
        width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
        made = self._tensor([str(width).encode(), str(height).encode(), png])
        self._put(tag, step, "images", self._summary.DATA_CLASS_BLOB_SEQUENCE, tensor=made)

    def _put(self, tag: str, step: int, plugin: str, data_class: int, **content: Any) -> None:
        data = self._summary.SummaryMetadata.PluginData(plugin_name=plugin)
        about = self._summary.SummaryMetadata(plugin_data=data, data_class=data_class)
        value = self._summary.Summary.Value(tag=tag, metadata=about, **content)
        self._add(step, summary=self._summary.Summary(value=[value]))

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, **content))

    def flush(self) -> None:
        """See `Tracker`."""
        self._writer.flush()

    def close(self, outcome: str) -> str:
        """See `Tracker`."""
        self._writer.close()
        return f"tensorboard --logdir {self._writer.get_logdir()}"


class Trackio:
    """Hugging Face's local-first tracker."""

    lasting, arrived = False, None

    def __init__(self, about: About):
        import trackio

        self._trackio, self._project = trackio, about.project
        self._run = trackio.init(
            project=about.project, name=f"{about.name} {about.run_id}", group=about.group,
            resume="allow", config=about.config, embed=False, auto_log_cpu=False,
            auto_log_gpu=False,
        )  # fmt: skip

    def send(self, index: int, items: list[Item]) -> None:
        """See `Tracker`."""
        item = items[-1]
        if item.kind == "figure":
            values = {item.name: self._trackio.Image(str(item.content))}
        elif item.kind in ("completions", "table"):
            import pandas

            rows = [row for one in items for row in one.content]
            name = "completions" if item.kind == "completions" else item.name
            values = {name: self._trackio.Table(dataframe=pandas.DataFrame(rows))}
        else:
            values = flat_values(item)
            values.pop("step", None)  # its own name for the step
        self._run.log(values, step=item.step)

    def flush(self) -> None:
        """It sends by itself."""

    def close(self, outcome: str) -> str:
        """See `Tracker`."""
        self._run.finish()
        return f"trackio show --project {self._project}"


OPENERS = {"wandb": Wandb, "tensorboard": Tensorboard, "trackio": Trackio}


def flat_values(item: Item) -> dict[str, Any]:
    """Under the names of metrics.jsonl; evaluations as `eval/<decoding>/<column>`."""
    if item.kind == "row":
        return dict(item.content)
    if item.kind == "eval":
        where = f"eval/{item.content['decoding']}"
        left_out = ("step", "split", "decoding")
        return {f"{where}/{k}": x for k, x in item.content.items() if k not in left_out}
    return {f"result/{key}": value for key, value in item.content.items()}


def _text(content: Any) -> str:
    """As TensorBoard shows it: Markdown, in which a code block is taken as it is."""
    import json

    lines = json.dumps(content, indent=1, ensure_ascii=False, default=str).splitlines()
    return "\n".join("    " + line for line in lines)
