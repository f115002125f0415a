"""wandb, TensorBoard and trackio behind one interface: accelerate's trackers, and what they lack.

Each is a package that is imported when it is opened.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from grpo_ustat.runs.events import Event
from grpo_ustat.runs.files import write_whole
from grpo_ustat.runs.folder import TRACKER_FOLDER

UNSENT_FILE = "wandb-unsent.txt"  # in the tracker's folder: where wandb keeps runs, a line each
SWEEP_VARIABLE = "GRPO_USTAT_SWEEP"  # environment: the run is one of a sweep
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
    """Interface of a tracker that `Sender` uses; each of its methods may raise, or never return."""

    def send(self, index: int, events: list[Event]) -> None:
        """Send events of one kind: completions of several steps, or one of any other kind.

        Args:
            index: of the last of them, among all of the run.
            events: what to send.
        """

    def close(self, outcome: str) -> str | None:
        """End the run there; returns the address to look at it, None if there is none."""


class Wandb:
    """Weights & Biases, on line and off line.

    Its own step only counts what it was given, so that it grows whatever comes when; charts are
    drawn over `step`, ours.
    """

    def __init__(self, about: About):
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # waits at exit for its server
        import wandb

        # nothing but what is sent: no source code, console, machine or environment
        settings: dict[str, Any] = dict(
            console="off", disable_code=True, disable_git=True, disable_job_creation=True,
            save_code=False, silent=True, x_disable_machine_info=True, x_disable_meta=True,
            x_disable_stats=True, x_save_requirements=False, x_transaction_log_flush_interval=2.0,
        )  # fmt: skip
        known = {key: x for key, x in settings.items() if key in wandb.Settings.model_fields}
        self._wandb, self._folder = wandb, about.folder
        wandb.setup(wandb.Settings(silent=True))  # before it looks for a key, which it would ask
        self._tracker = _accelerates("WandBTracker")(
            about.project, dir=os.environ.get("WANDB_DIR", str(about.folder)), group=about.group,
            name=about.name, id=about.run_id, resume="allow", reinit="create_new",
            config=about.config, settings=wandb.Settings(**known),
        )  # fmt: skip
        exit_function, hook = sys.exit, sys.excepthook
        try:
            self._tracker.start()
        finally:
            sys.exit, sys.excepthook = exit_function, hook  # which it replaces
        self._run = self._tracker.tracker
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._offset: int | None = None
        self._place = Path(self._run.settings.sync_dir)
        with (about.folder / UNSENT_FILE).open("a") as file:
            file.write(f"{self._place}\n")

    def send(self, index: int, events: list[Event]) -> None:
        """See `Tracker`."""
        event = events[-1]
        if event.kind == "result":
            self._run.summary.update(event.content)
            return
        if self._offset is None:  # where it has more than we know of
            self._offset = max(0, self._run.starting_step - index)
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
        ours = {} if event.step is None else {"step": event.step}
        # else it would keep them until the next ones come, and lose them with a run that is killed
        self._tracker.log(values | ours, step=index + self._offset, commit=True)

    def close(self, outcome: str) -> str | None:
        """See `Tracker`."""
        if outcome == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=OUTCOMES[outcome])
        self._wandb.teardown()  # finish returns before its service has written the run's file
        url, offline = self._run.url, self._run.offline
        if not offline:  # all has arrived
            lines = (self._folder / UNSENT_FILE).read_text().splitlines()
            kept = [f"{line}\n" for line in lines if line != str(self._place)]
            write_whole(self._folder / UNSENT_FILE, "".join(kept))
        unsent = unsent_runs(self._folder.parent)  # also of earlier starts of this run
        command = sync_command(unsent) if unsent else None
        if offline:
            return (
                None if SWEEP_VARIABLE in os.environ else command
            )  # the sweep ends with one for all
        return f"{url}; {command}" if command else url


class Tensorboard:
    """TensorBoard's event files; numbers in float64, texts as texts, figures as pixels."""

    def __init__(self, about: About):
        self._folder = about.folder
        self._tracker = _accelerates("TensorBoardTracker")(about.folder.name, about.folder.parent)
        self._tracker.start()
        self._tracker.log({"config": _text(about.config)}, step=0)

    def send(self, index: int, events: list[Event]) -> None:
        """See `Tracker`."""
        event = events[-1]
        step = event.step or 0
        if event.kind == "figure":
            import numpy as np
            from PIL import Image

            with Image.open(event.content) as image:
                pixels = np.asarray(image.convert("RGB"))[None]
            self._tracker.log_images({event.name: pixels}, step, dataformats="NHWC")
        elif event.kind in ("completions", "table"):
            for one in events:
                name = "completions" if event.kind == "completions" else event.name
                self._tracker.log({name: _text(one.content)}, one.step or 0)
                for row in one.content if one.kind == "table" else ():
                    known = {"mse", "group_size", "baseline", "method", "setting"}
                    if known <= row.keys() and isinstance(row["mse"], int | float):
                        tag = f"mse/{row['method']}/{row['setting']}/{row['baseline']}"
                        self._send_numbers({tag: row["mse"]}, row["group_size"])
        else:
            values = flat_values(event)
            numbers = {key: x for key, x in values.items() if isinstance(x, int | float)}
            rest = {key: str(x) for key, x in values.items() if key not in numbers}
            self._send_numbers(numbers, step)
            self._tracker.log({key: x for key, x in rest.items() if values[key] is not None}, step)

    def _send_numbers(self, values: dict[str, Any], step: int) -> None:
        self._tracker.log(values, step, new_style=True, double_precision=True)

    def close(self, outcome: str) -> str:
        """See `Tracker`."""
        self._tracker.finish()
        return f"tensorboard --logdir {self._folder}"


class Trackio:
    """Hugging Face's local-first tracker."""

    def __init__(self, about: About):
        self._project = about.project
        self._tracker = _accelerates("TrackioTracker")(
            about.project, name=f"{about.name} {about.run_id}", group=about.group, resume="allow",
            config=about.config, embed=False, auto_log_cpu=False, auto_log_gpu=False,
        )  # fmt: skip
        self._tracker.start()

    def send(self, index: int, events: list[Event]) -> None:
        """See `Tracker`."""
        import trackio  # pyright: ignore[reportMissingImports]  # optional

        event = events[-1]
        if event.kind == "figure":
            values = {event.name: trackio.Image(str(event.content))}
        elif event.kind in ("completions", "table"):
            import pandas

            rows = [row for one in events for row in one.content]
            name = "completions" if event.kind == "completions" else event.name
            values = {name: trackio.Table(dataframe=pandas.DataFrame(rows))}
        else:
            values = flat_values(event)
            values.pop("step", None)  # its own name for the step
        self._tracker.log(values, step=event.step)

    def close(self, outcome: str) -> str:
        """See `Tracker`."""
        self._tracker.finish()
        return f"trackio show --project {self._project}"


OPENERS: dict[str, Callable[[About], Tracker]] = {
    "wandb": Wandb, "tensorboard": Tensorboard, "trackio": Trackio,
}  # fmt: skip


def _accelerates(name: str) -> Any:
    """A tracker class of accelerate that works in any process; accelerate's own do nothing outside
    of the main one.
    """
    from accelerate import tracking

    # accelerate's loggers and its look for the main process need its state, which a study lacks
    # and which would join process groups
    tracking.logger = logging.getLogger(tracking.__name__)  # pyright: ignore[reportAttributeAccessIssue]
    found = getattr(tracking, name)
    return type(name, (found,), {"main_process_only": False})


def flat_values(event: Event) -> dict[str, Any]:
    """Values of an event, named as in metrics.jsonl; of evaluations `eval/<decoding>/<column>`."""
    if event.kind == "row":
        return dict(event.content)
    if event.kind == "eval":
        where = f"eval/{event.content['decoding']}"
        left_out = ("step", "split", "decoding")
        return {f"{where}/{k}": x for k, x in event.content.items() if k not in left_out}
    return {f"result/{key}": value for key, value in event.content.items()}


def _text(content: Any) -> str:
    """Text as TensorBoard shows it: Markdown, in which a code block is taken as it is."""
    lines = json.dumps(content, indent=1, ensure_ascii=False, default=str).splitlines()
    return "\n".join("    " + line for line in lines)


def unsent_runs(folder: Path) -> list[Path]:
    """Folders with data of a run that wandb has not sent: one for each offline start, and for each
    online start that was left before its end; found also after the run folder was moved.
    """
    file = folder / TRACKER_FOLDER / UNSENT_FILE
    lines = file.read_text().splitlines() if file.is_file() else []
    inside = sorted((folder / TRACKER_FOLDER / "wandb").glob("offline-run-*"))
    places = {place.resolve(): place for place in [*map(Path, lines), *inside][::-1]}
    unsent = [place for place in places.values() if not [*place.glob("*.synced")]]
    return [place for place in unsent[::-1] if place.is_dir()]


def sync_command(places: Sequence[Path], sweep: Path | None = None) -> str:
    """The command that makes wandb send these folders: a pattern if it matches exactly these, else
    all names.

    Args:
        places: see `unsent_runs`.
        sweep: folder of the sweep that they are of.
    """
    names = [shlex.quote(str(place)) for place in places]
    if sweep is not None and len(places) > 1:
        pattern = sweep.absolute() / "*" / "seed-*" / TRACKER_FOLDER / "wandb" / "offline-run-*"
        every = {Path(name).resolve() for name in glob.glob(str(pattern))}
        if every == {place.resolve() for place in places} and shlex.quote(str(sweep)) == str(sweep):
            names = [str(sweep / pattern.relative_to(sweep.absolute()))]
    online = [] if all(x.name.startswith("offline-run-") for x in places) else ["--include-online"]
    return " ".join(["wandb sync", *online, *names])
