"""Trackers (wandb, TensorBoard and trackio), which show copies of the run folder's content.

A tracker receives the rows of metrics.jsonl, the completions logged with them, and evaluations. At
the end it also receives the figures, tables and values of the result. If a tracker raises an error
or takes longer than `finish_seconds` to respond, a warning is printed and the tracker is switched
off; the run continues. `tracker/NAME.json` records what was sent, so that a resumed run sends only
the rest. If the run is killed after it has sent a step and before it has recorded this, the step is
sent twice, with the same number.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from grpo_ustat.config.schema import flatten
from grpo_ustat.config.secrets import redact
from grpo_ustat.distributed.signals import seconds_since_request
from grpo_ustat.runs import contents
from grpo_ustat.runs.files import csv_rows, read_rows, write_whole
from grpo_ustat.runs.folder import TRACKER_FOLDER
from grpo_ustat.runs.record import COMPLETIONS, EVALS, METRICS, RESULT
from grpo_ustat.terminal.console import warn
from grpo_ustat.terminal.streams import excerpt, single_line, tell, visible

# Maximum length of a run's name in characters; wandb accepts up to 128.
LONGEST_NAME = 120
# Minimum time in seconds between the end of a tracker's work and the kill of a stopped run.
STOP_MARGIN_SECONDS = 10.0
# Exit code reported to wandb for each outcome of a run.
OUTCOMES = {"done": 0, "failed": 1, "interrupted": 1, "stopped": 75}
# Record of what was sent: id of the run, number of messages, latest step of the metrics, and latest
# step of each kind of evaluation.
STATE_SHAPE = {"run_id": str, "count": contents.Count, "step": contents.Count, "evals": {}}
# Columns of an error curve, which TensorBoard draws against the group size.
CURVE_COLUMNS = {"mse", "group_size", "baseline", "method", "setting"}

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class About:
    """Description of a run for a tracker."""

    # Folder for the tracker's files.
    folder: Path
    # Id of the run, which a resumed run keeps.
    run_id: str
    # Name of the run, and name of the group of runs that differ from it only in the seed.
    name: str
    group: str
    project: str | None
    # The run's configuration, without secrets.
    config: dict[str, Any]
    # Time limit in seconds for opening and for ending the tracker.
    seconds: float


class Tracker(Protocol):
    """Interface of a tracker that is opened for a run; every method can raise an error.

    `index` counts the run's messages over all of its starts. `step` is the training step; it is
    None for a study.
    """

    def log(self, index: int, values: dict[str, Any], step: int | None) -> None:
        """Send numbers and texts of a step."""

    def summary(self, index: int, values: dict[str, Any], step: int | None) -> None:
        """Send numbers and texts of the result."""

    def table(self, index: int, name: str, rows: Rows, step: int | None) -> None:
        """Send rows, such as completions."""

    def figure(self, index: int, name: str, file: Path, step: int | None) -> None:
        """Send a picture."""

    def finish(self, outcome: str) -> str:
        """End the tracker's run, and return the command or address to view it."""
        ...


class Wandb:
    """Weights & Biases, online and offline.

    The index is used as wandb's own step, which must increase with each message. Charts use the
    metric `step` as the x-axis.
    """

    def __init__(self, about: About):
        # With error reporting, wandb would wait for its server when the process ends.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        # Do not send source code, console output, or data about the machine and the environment.
        settings: dict[str, Any] = dict(
            console="off", disable_code=True, disable_git=True, disable_job_creation=True,
            save_code=False, silent=True, x_disable_machine_info=True, x_disable_meta=True,
            x_disable_stats=True, x_save_requirements=False, x_transaction_log_flush_interval=0.1,
            init_timeout=about.seconds, finish_timeout=about.seconds, finish_timeout_raises=True,
        )  # fmt: skip
        supported = {key: x for key, x in settings.items() if key in wandb.Settings.model_fields}
        # Set this before wandb looks for an API key, because wandb would otherwise prompt for one.
        wandb.setup(wandb.Settings(silent=True))
        self._wandb = wandb
        self._run: Any = wandb.init(
            project=about.project, dir=os.environ.get("WANDB_DIR", str(about.folder)),
            group=about.group, name=about.name, id=about.run_id, resume="allow",
            reinit="create_new", config=about.config, settings=wandb.Settings(**supported),
        )  # fmt: skip
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, index: int, values: dict[str, Any], step: int | None) -> None:
        # Commit now. Otherwise wandb holds the values until the next index, and a killed run would
        # lose them.
        self._run.log(values | ({} if step is None else {"step": step}), step=index, commit=True)

    def summary(self, index: int, values: dict[str, Any], step: int | None) -> None:
        self._run.summary.update(values)

    def table(self, index: int, name: str, rows: Rows, step: int | None) -> None:
        columns: list[Any] = list(dict.fromkeys(key for row in rows for key in row))
        cells: list[Any] = [[row.get(key) for key in columns] for row in rows]
        table = self._wandb.Table(columns=columns, data=cells, allow_mixed_types=True)
        self.log(index, {name: table}, step)

    def figure(self, index: int, name: str, file: Path, step: int | None) -> None:
        self.log(index, {name: self._wandb.Image(str(file))}, step)

    def finish(self, outcome: str) -> str:
        if outcome == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=OUTCOMES[outcome])
        # Wait for wandb's service, because `finish` returns before the service has written the
        # file.
        self._wandb.teardown()
        if self._run.offline:
            return f"wandb sync {Path(self._run.settings.sync_dir).parent}/offline-run-*"
        return self._run.url


class Tensorboard:
    """Writer of TensorBoard event files; numbers are stored in float64 and figures as pixels."""

    def __init__(self, about: About):
        from torch.utils.tensorboard.writer import SummaryWriter

        self._folder = about.folder
        self._writer = SummaryWriter(str(about.folder))
        self._text("config", about.config, 0)

    def log(self, index: int, values: dict[str, Any], step: int | None) -> None:
        for name, value in values.items():
            if isinstance(value, int | float):
                self._number(name, value, step or 0)
            elif value is not None:
                self._writer.add_text(name, str(value), step or 0)
        self._writer.flush()

    summary = log

    def table(self, index: int, name: str, rows: Rows, step: int | None) -> None:
        self._text(name, rows, step or 0)
        for row in rows:
            if row.keys() >= CURVE_COLUMNS and isinstance(row["mse"], int | float):
                keys = ("method", "setting", "baseline")
                curve = "/".join(str(row[key]) for key in keys)
                self._number(f"mse/{curve}", row["mse"], row["group_size"])

    def figure(self, index: int, name: str, file: Path, step: int | None) -> None:
        import numpy as np
        from PIL import Image

        with Image.open(file) as image:
            pixels = np.asarray(image.convert("RGB"))
        self._writer.add_image(name, pixels, step or 0, dataformats="HWC")

    def finish(self, outcome: str) -> str:
        self._writer.close()
        return f"tensorboard --logdir {self._folder}"

    def _number(self, name: str, value: float, step: int) -> None:
        self._writer.add_scalar(name, value, step, new_style=True, double_precision=True)

    def _text(self, name: str, content: Any, step: int) -> None:
        """Write the content as a Markdown code block, in which markup is not interpreted."""
        lines = json.dumps(content, indent=1, ensure_ascii=False, default=str).splitlines()
        self._writer.add_text(name, "\n".join(f"    {line}" for line in lines), step)


class Trackio:
    """Hugging Face's local-first tracker."""

    def __init__(self, about: About):
        import trackio  # pyright: ignore[reportMissingImports]  # optional

        self._trackio, self._project = trackio, about.project
        self._run = trackio.init(
            project=about.project, name=f"{about.name} {about.run_id}", group=about.group,
            resume="allow", config=about.config, embed=False, auto_log_cpu=False,
            auto_log_gpu=False,
        )  # fmt: skip

    def log(self, index: int, values: dict[str, Any], step: int | None) -> None:
        # Trackio has a separate argument for the step, so the step is not one of the values.
        self._run.log({key: x for key, x in values.items() if key != "step"}, step=step)

    summary = log

    def table(self, index: int, name: str, rows: Rows, step: int | None) -> None:
        import pandas

        self._run.log({name: self._trackio.Table(dataframe=pandas.DataFrame(rows))}, step=step)

    def figure(self, index: int, name: str, file: Path, step: int | None) -> None:
        self._run.log({name: self._trackio.Image(str(file))}, step=step)

    def finish(self, outcome: str) -> str:
        self._run.finish()
        return f"trackio show --project {self._project}"


TRACKERS = {"wandb": Wandb, "tensorboard": Tensorboard, "trackio": Trackio}


class Tracking:
    """Tracker of a run; an error of the tracker switches it off and does not stop the run.

    Args:
        logger: `LoggerConfig` other than `none`.
        config: nested configuration of the run, including the commit, weights and versions.
    """

    def __init__(self, folder: Path, logger: Any, config: dict[str, Any]):
        self._folder, self._logger, self._owner = folder, logger, os.getpid()
        self._file = folder / TRACKER_FOLDER / f"{logger.name}.json"
        self._state = {"run_id": uuid4().hex[:8], "count": 0, "step": 0, "evals": {}}
        self._tracker: Tracker | None = None
        self._is_off = False
        self._within(logger.finish_seconds, lambda: self._open(config), "open")

    def _open(self, config: dict[str, Any]) -> None:
        """Open the tracker and send the rows that a killed launch wrote but did not send."""
        self._file.parent.mkdir(exist_ok=True)
        if self._file.is_file():
            self._state = self._stored()
        # Store the id before anything is sent under it.
        self._save()
        place = self._folder.absolute()
        about = About(
            folder=place / TRACKER_FOLDER,
            run_id=self._state["run_id"],
            name=excerpt(visible(f"{place.parent.name}/{place.name}"), LONGEST_NAME),
            group=excerpt(visible(place.parent.name), LONGEST_NAME),
            project=self._logger.project,
            config=visible_texts(redact(config)),
            seconds=self._logger.finish_seconds,
        )
        opened = TRACKERS[self._logger.name](about)
        # A tracker that was switched off while it opened is not used.
        self._tracker = None if self._is_off else opened
        for row in read_rows(self._folder / METRICS)[0]:
            self._send_row(row, [])

    def _stored(self) -> dict[str, Any]:
        """Return the record of sent messages from an earlier launch; refuse a damaged file."""
        stored, wrong = contents.checked(
            self._folder, f"{TRACKER_FOLDER}/{self._file.name}", contents.parsed_json, STATE_SHAPE
        )
        if wrong or not stored.keys() >= STATE_SHAPE.keys():
            raise ValueError(
                f"{self._file} is damaged: delete it to begin a new run in the tracker"
            )
        return stored

    def put(self, row: dict[str, Any], completions: Rows) -> None:
        """Send a row of metrics.jsonl and its completions unless they were sent before."""
        if self._tracker:
            patience = self._logger.finish_seconds
            self._within(patience, lambda: self._send_row(row, completions), "accept a row")

    def finish(self, outcome: str, grace_seconds: float) -> None:
        """Send the results of the run and end the tracker, within `finish_seconds`.

        Args:
            outcome: done, stopped, failed or interrupted.
            grace_seconds: time in seconds between a stop signal and the kill of the run.
        """
        if self._tracker is None or os.getpid() != self._owner:
            return
        patience = self._logger.finish_seconds
        if outcome == "stopped":
            remaining = grace_seconds - seconds_since_request() - STOP_MARGIN_SECONDS
            patience = max(0.0, min(patience, remaining))
        self._within(patience, lambda: self._end(outcome), "end")

    def _end(self, outcome: str) -> None:
        """Send evaluations, send the result if the run is finished, and end the tracker."""
        self._send_evals()
        if outcome == "done" and (self._folder / RESULT).is_file():
            self._send_result(json.loads((self._folder / RESULT).read_text()))
        where = self._tracker and self._tracker.finish(outcome)
        if self._tracker:
            tell(f"logger={self._logger.name}: {where}", file=sys.stderr)

    def _send_row(self, row: dict[str, Any], completions: Rows) -> None:
        """Send the evaluations so far, and then the row, unless its step was sent before."""
        self._send_evals()
        step = row["step"]
        if step > self._state["step"]:
            self._state["step"] = step
            self._send("log", visible_texts(row), step)
            if completions:
                self._send("table", "completions", visible_texts(completions), step)

    def _send_evals(self) -> None:
        """Send the evaluations that have not been sent, for each decoding method and split."""
        file, sent = self._folder / EVALS, self._state["evals"]
        for row in csv_rows(file.read_text()) if file.is_file() else ():
            kind = f"{row['decoding']}/{row['split']}"
            if row["step"] > sent.get(kind, -1):
                sent[kind] = row["step"]
                left_out = ("step", "split", "decoding")
                names = {key: f"eval/{row['decoding']}/{key}" for key in row if key not in left_out}
                values = {name: row[key] for key, name in names.items()}
                self._send("log", visible_texts(values), row["step"])

    def _send_result(self, result: dict[str, Any]) -> None:
        """Send a study's completions, and the figures, tables and values of the result."""
        step = result.get("steps")
        if step is None and (self._folder / COMPLETIONS).is_file():
            from pyarrow import parquet

            rows = parquet.read_table(self._folder / COMPLETIONS).to_pylist()
            self._send("table", "completions", visible_texts(rows), step)
        for file in sorted(self._folder.glob("*.png")):
            self._send("figure", visible(file.stem), file, step)
        checks = ("digest", "files")
        content = {key: x for key, x in visible_texts(result).items() if key not in checks}
        for name, value in content.items():
            # Evaluations have already been sent.
            if _is_table(value) and name != "evals":
                self._send("table", name, value, step)
        values = {
            # A list of notes becomes a text with one line per note.
            f"result/{key}": "\n".join(map(str, x)) if isinstance(x, list) else x
            for key, x in flatten(content, "/").items()
            if x != [] and not _is_table(x)
        }
        self._send("summary", values, step)

    def _send(self, kind: str, *arguments: Any) -> None:
        if self._tracker:
            getattr(self._tracker, kind)(self._state["count"], *arguments)
            self._state["count"] += 1
            self._save()

    def _save(self) -> None:
        write_whole(self._file, json.dumps(self._state))

    def _within(self, seconds: float, work: Callable[[], None], doing: str) -> None:
        """Call the tracker in a thread, and switch the tracker off if the call exceeds `seconds`.

        The thread ends with the process, so a tracker that never answers does not block the run.
        """

        def guarded() -> None:
            with self._off_at_an_error():
                work()

        worker = threading.Thread(target=guarded, daemon=True)
        worker.start()
        worker.join(seconds)
        if worker.is_alive():
            self._switch_off(f"did not {doing} in {seconds:.0f} s")

    @contextmanager
    def _off_at_an_error(self) -> Iterator[None]:
        """Switch the tracker off if the block raises an error."""
        try:
            yield
        # A tracker can raise SystemExit.
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {single_line(error, 300)}"
            self._switch_off(reason.removesuffix(": "))

    def _switch_off(self, reason: str) -> None:
        """Switch the tracker off and print one warning."""
        if self._is_off:
            return
        self._is_off, self._tracker = True, None
        warn(
            f"logger={self._logger.name}: {reason}; the tracker is switched off, and the complete "
            f"run is in {self._folder}"
        )


def visible_texts(content: Any) -> Any:
    """Return the value with invisible characters in its texts written as escapes.

    Nested texts and keys are included, so that a tracker receives no control sequences and no lone
    surrogates.
    """
    if isinstance(content, str):
        return visible(content)
    if isinstance(content, dict):
        return {visible_texts(key): visible_texts(value) for key, value in content.items()}
    return [visible_texts(value) for value in content] if isinstance(content, list) else content


def _is_table(value: Any) -> bool:
    """Return True for a list of rows, such as curves or claims."""
    return isinstance(value, list) and value != [] and all(isinstance(x, dict) for x in value)
