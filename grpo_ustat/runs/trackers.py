"""Trackers such as wandb, TensorBoard and trackio, which show a run's numbers.

Accelerate's tracker classes do the work. A tracker receives the rows of metrics.jsonl, evaluations,
the numbers of the result and, if it has tables, the completions. If a tracker raises an error, a
warning is printed, the tracker is switched off, and the run continues. The run folder has
everything that a tracker shows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from grpo_ustat.config.schema import flatten
from grpo_ustat.config.secrets import redact
from grpo_ustat.runs.files import TRACKER_FOLDER
from grpo_ustat.terminal.console import warn
from grpo_ustat.terminal.streams import single_line, visible

# Wandb must not store console output or the repository's uncommitted changes, which can contain
# secrets.
WANDB_SETTINGS = {"console": "off", "disable_git": True, "disable_code": True}


class Tracking:
    """Run in a tracker.

    Args:
        folder: run folder.
        name: name of the tracker, see `config.run.TRACKERS`.
        project: project in the tracker to which the run belongs; None for a default.
        config: nested configuration of the run, including the commit, weights and versions.
    """

    def __init__(self, folder: Path, name: str, project: str | None, config: Mapping[str, Any]):
        self.name, self._folder = name, folder.absolute()
        self._tracker: Any = None
        project = project or os.environ.get("WANDB_PROJECT", "grpo_ustat")
        self._try(lambda: self._open(project, flatten(redact(config))))

    def _open(self, project: str, config: dict[str, Any]) -> None:
        from accelerate import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS
        from accelerate.utils import clear_environment

        if not PartialState._shared_state:
            # Only rank 0 opens a tracker, so accelerate must not wait here for other ranks.
            with clear_environment():
                PartialState(cpu=True)
        kind: Any = LOGGER_TYPE_TO_CLASS[self.name]
        place = self._folder / TRACKER_FOLDER
        place.mkdir(exist_ok=True)
        options: dict[str, Any] = {}
        if kind.requires_logging_directory:
            project, options["logging_dir"] = TRACKER_FOLDER, self._folder
        if self.name in ("wandb", "trackio"):
            group = visible(self._folder.parent.name)[:100]
            options = {"group": group, "resume": "allow"}
            options["name"] = f"{group}-{visible(self._folder.name)}"[:120]
        if self.name == "wandb":
            options |= {"id": self._run_id(), "settings": WANDB_SETTINGS}
            options |= {"dir": os.environ.get("WANDB_DIR", str(place)), "reinit": "finish_previous"}
        tracker = kind(project, **options)
        tracker.start()
        # Trackers accept neither lists nor null as settings.
        for key, value in config.items():
            config[key] = value if isinstance(value, int | float) else visible(str(value))
        tracker.store_init_configuration(config)
        self._tracker = tracker

    def _run_id(self) -> str:
        """Return the run's id in wandb; it stays the same until the run is overwritten."""
        file = self._folder / TRACKER_FOLDER / "wandb_id.txt"
        if not file.is_file():
            file.write_text(uuid4().hex[:8])
        return file.read_text()

    def put(self, row: Mapping[str, Any], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        """Send the numbers of a row and, to a tracker with tables, the completions of its step."""
        numbers = {key: x for key, x in row.items() if isinstance(x, int | float)}
        self._try(lambda: self._tracker.log(numbers, step=row.get("step")))
        if completions and hasattr(self._tracker, "log_table"):
            columns = list(completions[0])
            cells = [[completion.get(key) for key in columns] for completion in completions]
            table = {"columns": columns, "data": cells, "step": row.get("step")}
            self._try(lambda: self._tracker.log_table("completions", **table))

    def finish(self, outcome: str, result: Mapping[str, Any] | None) -> None:
        """Send the numbers of the result, if there is one, and end the tracker.

        Args:
            outcome: done, stopped, failed or interrupted.
            result: content of `result.json`.
        """
        if result:
            numbers = {f"result/{key}": x for key, x in flatten(result, "/").items()}
            self.put(numbers | {"step": result.get("steps")})
        if self.name == "wandb":
            self._try(lambda: self._tracker.tracker.finish(exit_code=int(outcome != "done")))
        else:
            self._try(lambda: self._tracker.finish())

    def _try(self, work: Callable[[], object]) -> None:
        """Call the tracker if it is on, and switch it off after an error."""
        if self._tracker is False:
            return
        try:
            work()
        # A tracker can raise SystemExit.
        except (Exception, SystemExit) as error:
            self._tracker = False
            reason = f"{type(error).__name__}: {single_line(error, 300)}".removesuffix(": ")
            warn(
                f"logger={self.name}: {reason}; the tracker is switched off, and the complete run "
                f"is in {self._folder}"
            )
