"""Trackers, behind one interface; each is a package that is imported when it is opened.

A tracker is opened once in a process, takes events in order, each with its index among all of the
run, and is closed. It may raise, hang or end its process: see `mirror.follow`.
"""

from __future__ import annotations

import glob
import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from grpo_ustat.mirror.source import Event, is_number
from grpo_ustat.runs.folder import TRACKER

OFFLINE = "wandb-offline.txt"  # in the tracker's folder: where its offline runs are, a line each
IN_SWEEP = "GRPO_USTAT_SWEEP"  # environment: the run is one of a sweep
OUTCOMES = {"done": 0, "failed": 1, "interrupted": 1, "stopped": 75}  # exit codes for the tracker


@dataclass(frozen=True)
class About:
    """The run, for a tracker.

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
    """What `mirror.follow` needs of a tracker.

    Attributes:
        arrived: how many events of earlier processes it has, None if it does not know.
        lasting: whether what was sent has arrived once `flush` returns; else once `close` does.
    """

    arrived: int | None
    lasting: bool

    def send(self, index: int, events: list[Event]) -> None:
        """Send events of one kind, the last of them with this index: completions of several steps,
        or one of any other kind.
        """

    def flush(self) -> None:
        """Send what waits; nothing more comes for now."""

    def close(self, outcome: str) -> str | None:
        """End the run there; returns where to look at it, None if that is nowhere."""


def offline_runs(folder: Path) -> list[Path]:
    """Folders of the offline runs of a run folder that wandb has not sent yet: one for each time
    that the run was started, also where the folder was moved since.
    """
    file = folder / TRACKER / OFFLINE
    lines = file.read_text().splitlines() if file.is_file() else []
    inside = sorted((folder / TRACKER / "wandb").glob("offline-run-*"))
    places = {place.resolve(): place for place in [*map(Path, lines), *inside][::-1]}
    unsent = [place for place in places.values() if not [*place.glob("*.synced")]]
    return [place for place in unsent[::-1] if place.is_dir()]


def sync_command(places: Sequence[Path], sweep: Path | None = None) -> str:
    """The command that sends offline runs: a pattern where it leads to just these, else all names.

    Args:
        places: of the offline runs.
        sweep: folder of the sweep that they are of.
    """
    names = [shlex.quote(str(place)) for place in places]
    if sweep is not None and len(places) > 1:
        pattern = sweep.absolute() / "*" / "seed-*" / TRACKER / "wandb" / "offline-run-*"
        every = {Path(name).resolve() for name in glob.glob(str(pattern))}
        if every == {place.resolve() for place in places} and shlex.quote(str(sweep)) == str(sweep):
            names = [str(sweep / pattern.relative_to(sweep.absolute()))]
    return " ".join(["wandb sync", *names])


class Wandb:
    """Weights & Biases, on line and off line.

    Its own step only counts what it was given and so increases whatever a resumed run rewrites;
    charts are drawn over `step`, ours. An index that it has already is dropped by wandb itself.
    """

    lasting = False

    def __init__(self, about: About):
        import wandb

        self._wandb, self._folder = wandb, about.folder
        os.environ.setdefault("WANDB_DIR", str(about.folder))
        # nothing but what is sent: no source code, console, machine or environment
        settings: dict[str, Any] = dict(
            console="off", disable_code=True, disable_git=True, disable_job_creation=True,
            save_code=False, silent=True, x_disable_machine_info=True, x_disable_meta=True,
            x_disable_stats=True, x_save_requirements=False, x_transaction_log_flush_interval=2.0,
        )  # fmt: skip
        known = {key: x for key, x in settings.items() if key in wandb.Settings.model_fields}
        self._run = wandb.init(
            project=about.project, group=about.group, name=about.name, id=about.run_id,
            resume="allow", config=about.config, settings=wandb.Settings(**known),
        )  # fmt: skip
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.arrived = None if self._run.offline else self._run.starting_step
        if self._run.offline:
            with (about.folder / OFFLINE).open("a") as file:
                file.write(f"{self._run.settings.sync_dir}\n")

    def send(self, index: int, events: list[Event]) -> None:
        """See `Tracker`."""
        event = events[-1]
        if event.kind == "result":
            self._run.summary.update(event.content)
            return
        values: dict[str, Any]
        if event.kind == "figure":
            values = {event.name: self._wandb.Image(str(event.content))}
        elif event.kind in ("completions", "table"):
            rows = [row for one in events for row in one.content]
            columns = list(dict.fromkeys(key for row in rows for key in row))
            cells: list[Any] = [[row.get(key) for key in columns] for row in rows]
            name = "completions" if event.kind == "completions" else event.name
            values = {name: self._wandb.Table(columns=columns, data=cells, allow_mixed_types=True)}
        else:
            values = flat_values(event)
        step = {} if event.step is None else {"step": event.step}
        self._run.log(values | step, step=index)

    def flush(self) -> None:
        """It sends by itself."""

    def close(self, outcome: str) -> str | None:
        """See `Tracker`."""
        where = self._run.url
        own = [Path(self._run.settings.sync_dir)] if self._run.offline else []
        unsent = offline_runs(self._folder.parent)  # also of earlier starts of this run
        command = sync_command([*[x for x in unsent if x not in own], *own])
        if own:
            where = None if IN_SWEEP in os.environ else command  # the sweep ends with one for all
        elif unsent:
            where = f"{where}; {command}"
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
        self._add_text("config", _text(about.config), 0)

    def send(self, index: int, events: list[Event]) -> None:
        """See `Tracker`."""
        event = events[-1]
        step = event.step or 0
        if event.kind == "figure":
            png = Path(event.content).read_bytes()
            width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
            tensor = self._tensor([str(width).encode(), str(height).encode(), png])
            blob = self._summary.DATA_CLASS_BLOB_SEQUENCE
            self._put(event.name, step, "images", blob, tensor=tensor)
        elif event.kind in ("completions", "table"):
            for one in events:
                name = "completions" if event.kind == "completions" else event.name
                self._add_text(name, _text(one.content), one.step or 0)
                self._curves(one)
        else:
            for key, value in flat_values(event).items():
                if is_number(value):
                    self._add_number(key, value, step)
                elif value is not None:
                    self._add_text(key, str(value), step)

    def _curves(self, event: Event) -> None:
        """A study's errors, drawn over the group size."""
        for row in event.content if event.kind == "table" else ():
            if {"mse", "group_size", "baseline"} <= row.keys() and is_number(row["mse"]):
                where = f"{row['method']}/{row['setting']}/{row['num_prompts']}"
                self._add_number(f"mse/{where}/{row['baseline']}", row["mse"], row["group_size"])

    def _add_number(self, tag: str, value: float, step: int) -> None:
        import numpy as np

        tensor = self._tensor(np.float64(value))
        self._put(tag, step, "scalars", self._summary.DATA_CLASS_SCALAR, tensor=tensor)

    def _add_text(self, tag: str, text: str, step: int) -> None:
        tensor = self._tensor([text.encode()])
        self._put(tag, step, "text", self._summary.DATA_CLASS_TENSOR, tensor=tensor)

    def _put(self, tag: str, step: int, plugin: str, data_class: int, **content: Any) -> None:
        data = self._summary.SummaryMetadata.PluginData(plugin_name=plugin)
        metadata = self._summary.SummaryMetadata(plugin_data=data, data_class=data_class)
        value = self._summary.Summary.Value(tag=tag, metadata=metadata, **content)
        summary = self._summary.Summary(value=[value])
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, summary=summary))

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
        import trackio  # pyright: ignore[reportMissingImports]  # optional

        self._trackio, self._project = trackio, about.project
        self._run = trackio.init(
            project=about.project, name=f"{about.name} {about.run_id}", group=about.group,
            resume="allow", config=about.config, embed=False, auto_log_cpu=False,
            auto_log_gpu=False,
        )  # fmt: skip

    def send(self, index: int, events: list[Event]) -> None:
        """See `Tracker`."""
        event = events[-1]
        if event.kind == "figure":
            values = {event.name: self._trackio.Image(str(event.content))}
        elif event.kind in ("completions", "table"):
            import pandas

            rows = [row for one in events for row in one.content]
            name = "completions" if event.kind == "completions" else event.name
            values = {name: self._trackio.Table(dataframe=pandas.DataFrame(rows))}
        else:
            values = flat_values(event)
            values.pop("step", None)  # its own name for the step
        self._run.log(values, step=event.step)

    def flush(self) -> None:
        """It sends by itself."""

    def close(self, outcome: str) -> str:
        """See `Tracker`."""
        self._run.finish()
        return f"trackio show --project {self._project}"


OPENERS = {"wandb": Wandb, "tensorboard": Tensorboard, "trackio": Trackio}


def flat_values(event: Event) -> dict[str, Any]:
    """Under the names of metrics.jsonl; evaluations as `eval/<decoding>/<column>`."""
    if event.kind == "row":
        return dict(event.content)
    if event.kind == "eval":
        where = f"eval/{event.content['decoding']}"
        left_out = ("step", "split", "decoding")
        return {f"{where}/{k}": x for k, x in event.content.items() if k not in left_out}
    return {f"result/{key}": value for key, value in event.content.items()}


def _text(content: Any) -> str:
    """Text as TensorBoard shows it: Markdown, in which a code block is taken as it is."""
    import json

    lines = json.dumps(content, indent=1, ensure_ascii=False, default=str).splitlines()
    return "\n".join("    " + line for line in lines)
