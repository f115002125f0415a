"""Record of a run, read from its folder even if the run is unfinished or files are missing.

A missing or damaged file counts as empty, and `RunRecord.notes` names damaged files. A run is done
if `result.json` has the fingerprint and the number of steps of the run's configuration, whatever a
scheduler such as SLURM reports.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_ustat.config.identity import drop_neutral_keys, drop_unused_baselines, operational_keys
from grpo_ustat.config.schema import flatten
from grpo_ustat.distributed.lock import owner
from grpo_ustat.runs import history
from grpo_ustat.runs.contents import DAMAGE, command_of, read_mapping, record_of, row_interval
from grpo_ustat.runs.files import CODE, CONFIG, RESULT, csv_rows, read_rows
from grpo_ustat.runs.result import AGREES, DISAGREES, OPEN, RESULT_TYPES, Evaluation, result_type
from grpo_ustat.terminal.streams import best_size, single_line

if TYPE_CHECKING:
    import pyarrow

METRICS, EVALS, COMPLETIONS = "metrics.jsonl", "eval.csv", "completions.parquet"
# Order of notes by file; notes about other files come last.
NOTE_ORDER = (CONFIG, CODE, RESULT, METRICS, EVALS)
# Maximum number of completions on a page, and maximum total size of these completions in bytes.
MAX_COMPLETIONS, MAX_BYTES = 3000, 8_000_000
# Maximum uncompressed size, in bytes, of a log of completions that is read.
MAX_PARQUET_BYTES = 4_000_000_000
# Maximum number of evaluations shown for a run.
MAX_EVALS = 1000

# Keys that usually differ between the runs of a sweep.
SWEPT_KEYS = ("group_size", "seed", "budget.rollouts")

DONE, RUNNING, FAILED, STOPPED, MISSING = "done", "running", "failed", "stopped", "missing"
# Default number of rollouts of a training step, as in conf/budget/train.yaml.
DEFAULT_ROLLOUTS = 256
PAST_MAX_STEPS = "already past max_steps"

COUNT_WORDS = {AGREES: "agree", DISAGREES: "disagree", OPEN: "not decided"}


def study_rollouts(config: Mapping[str, Any]) -> int:
    """Return n, the number of rollouts per step in a study; 256 if its configuration is damaged.

    >>> study_rollouts({"study": {"rollouts": 64}}), study_rollouts({})
    (64, 256)
    """
    rollouts = config.get("study", {}).get("rollouts")
    return rollouts if isinstance(rollouts, int) and rollouts >= 2 else DEFAULT_ROLLOUTS


def run_around(folder: Path) -> Path | None:
    """Return the run folder that contains a folder, such as a checkpoint; None if there is none."""
    return next((parent for parent in folder.parents if (parent / CONFIG).is_file()), None)


@dataclass(frozen=True)
class RunState:
    """Progress of a run."""

    # One of these texts: `done`, `running`, `failed`, `stopped` (also if the run was killed),
    # `missing`, and `already past max_steps` (more steps are done than the configuration allows).
    name: str
    # Last line of a failed run's error, process of a running run, or reason why a run stopped.
    detail: str = ""
    # Number of starts.
    launches: int = 0
    # Number of completed training steps, and configured number of training steps; None for a study.
    step: int | None = None
    steps: int | None = None
    # Wall time of all launches in seconds; None if the run is not done or the time is unknown.
    seconds: float | None = None
    # Name shown for `mean_reward`, either accuracy or mean reward; None until the run is done.
    quantity: str | None = None
    # Held-out mean reward, or mean reward of a study's policy, with its interval from `low` to
    # `high`; None until the run is done.
    mean_reward: float | None = None
    low: float | None = None
    high: float | None = None
    # Number of questions in a finished study of the gradient error.
    questions: int | None = None
    # G* of a finished study with its interval, formatted as text; None if unknown.
    gstar: str | None = None
    # Best G at the study's n; see `measurements.group_size`. None if unknown.
    best_divisor: int | None = None
    # Number of claims by verdict in the test of a theorem; None until the test is done.
    verdicts: dict[str, int] | None = None


class RunRecord:
    """Content of a run folder; each file is read once, when it is first needed.

    Args:
        label: name that distinguishes the run from other runs.
        config_hash: fingerprint that the result must have; None accepts any fingerprint.
        max_steps: number of training steps that the run must have done; None for a study.
        result: content that the run will write to `result.json`; if None, the file is read.
    """

    def __init__(
        self,
        folder: Path,
        label: str = "",
        config_hash: str | None = None,
        max_steps: int | None = None,
        result: dict[str, Any] | None = None,
    ):
        self.folder, self.label = folder, label
        self.config_hash, self.max_steps = config_hash, max_steps
        self._notes: list[str] = []
        if result is not None:
            self.result = result

    @cached_property
    def config(self) -> dict[str, Any]:
        """Nested configuration."""
        return self._read(CONFIG, read_mapping) or {}

    @cached_property
    def code(self) -> dict[str, Any]:
        """Commit, uncommitted changes, versions, and fingerprints of weights and data."""
        return self._read(CODE, read_mapping) or {}

    @cached_property
    def result(self) -> dict[str, Any] | None:
        """Content of `result.json`; None while the run is unfinished."""

        def read(file: Path) -> dict[str, Any]:
            content = read_mapping(file)
            kind = RESULT_TYPES[self.command] if self.config else result_type(content)
            record_of(kind, content)
            return content

        return self._read(RESULT, read)

    @property
    def final_result(self) -> dict[str, Any]:
        """Result of a finished run.

        Raises:
            LookupError: the run is unfinished.
        """
        if self.result is None:
            raise LookupError(f"{self.folder} has no result: the run is unfinished")
        return self.result

    @cached_property
    def launches(self) -> list[dict[str, Any]]:
        """Rows of the run's history."""
        return history.launches(self.folder)

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """Rows of the training steps; rows without a step are dropped."""
        try:
            rows, damaged = read_rows(self.folder / METRICS)
        except (OSError, ValueError) as error:
            self.add_note(f"{METRICS} is damaged and not shown: {single_line(error, 200)}")
            return []
        if damaged:
            self.add_note(f"{METRICS} is damaged in {damaged} lines, which are not used")
        by_step = {row["step"]: row for row in rows if isinstance(row.get("step"), int)}
        return [by_step[step] for step in sorted(by_step)]

    @cached_property
    def eval_rows(self) -> list[dict[str, Any]]:
        """Rows of `eval.csv`, with numbers in place of numeric cells."""
        return self.csv_rows(EVALS)

    @cached_property
    def evals(self) -> list[dict[str, Any]]:
        """Evaluations with the first decoding method, including those of an unfinished run."""
        all_rows = (self.result or {}).get("evals", self.eval_rows)
        decodings = self.value("eval.decoding") or [row.get("decoding") for row in all_rows]
        rows = [row for row in all_rows if row.get("decoding") == decodings[0]]
        by_step = {(row["step"], str(row.get("split"))): row for row in rows if is_evaluation(row)}
        if len(by_step) < len(rows) or bool(all_rows) > bool(rows):
            self.add_note(f"{EVALS} is partly damaged")
        steps = sorted(by_step)
        if len(steps) > MAX_EVALS:
            self.add_note(f"{EVALS} has {len(steps):,} evaluations, of which {MAX_EVALS} are shown")
            last = len(steps) - 1
            steps = [steps[round(i * last / (MAX_EVALS - 1))] for i in range(MAX_EVALS)]
        return [by_step[step] for step in steps]

    @property
    def notes(self) -> list[str]:
        """One line for each damaged file."""
        for name in ("config", "code", "result", "metrics", "eval_rows"):
            getattr(self, name)
        ranks = {name: rank for rank, name in enumerate(NOTE_ORDER)}
        return sorted(self._notes, key=lambda line: ranks.get(line.split()[0], len(ranks)))

    def add_note(self, line: str) -> None:
        """Add a line about a damaged file, beginning with the file's name; drop duplicates."""
        if line not in self._notes:
            self._notes.append(line)

    def value(self, key: str) -> Any:
        """Return the configuration's value for a dotted key; None if the key does not exist."""
        value: Any = self.config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value

    @property
    def command(self) -> str:
        """Command of the run: `train`, `mse` or `gap`."""
        return command_of(self.config)

    @cached_property
    def keys(self) -> dict[str, Any]:
        """Values that identify the run, by dotted key.

        These are the fingerprints of the weights and the data, and all values of the configuration
        except operational keys (see `identity.OPERATIONAL_KEYS`).
        """
        return identity_keys(self.config) | {k: self.code.get(k) for k in ("weights", "data")}

    @property
    def commit(self) -> str | None:
        """Commit of the code that the run used; None if unknown."""
        return self.code.get("commit")

    @property
    def policy(self) -> str:
        """Model and prompt, which together determine the policy, or name of the test problem.

        For a study of a rollout file, only the model is named, because the file contains the
        prompts.
        """
        if self.command == "gap":
            return self.config["theorem"]["problem"]
        if self._pool_file:
            return self.config["model"]["name"]
        prompt = self.config["prompt"]
        shots = f" x {prompt['shots']}" if prompt.get("shots") else ""
        return f"{self.config['model']['name']}, {prompt['name']}{shots}"

    @property
    def dataset(self) -> str | None:
        """Name of the data set or of the rollout file; None for a test problem."""
        if self.command == "gap":
            return None
        return self._pool_file or self.config["dataset"]["name"]

    @property
    def _pool_file(self) -> str | None:
        """Rollout file that a study used; None if the study sampled its completions.

        The text includes the folder name, because many files have the same name.
        """
        pool = self.config.get("pool")
        return "/".join(Path(pool).parts[-2:]) if pool and pool.endswith(".parquet") else None

    @property
    def unfinished(self) -> str:
        """One line with the reason why there is no result; empty if there is a result."""
        if self.result is not None:
            return ""
        state = self.state
        steps = "" if state.steps is None else f", step {state.step} of {state.steps}"
        detail = f" ({state.detail})" if state.detail else ""
        return f"{self.label}: {state.name}{steps}{detail}"

    @cached_property
    def state(self) -> RunState:
        """Progress of the run.

        A launch can fail although a result exists, for example with `on_existing=overwrite`. The
        result is then kept, but the state is `failed`.
        """
        progress: dict[str, Any] = {
            "launches": sum(row.get("event") == "start" for row in self.launches),
            "step": self._last_step() if self.max_steps else None,
            "steps": self.max_steps,
        }
        summary, reason = self._result_summary()
        last = next((row for row in reversed(self.launches) if "event" in row), {})
        failed = last.get("outcome") == "failed"
        # Hashes of the expected configuration and of the last launch.
        hashes = {self.config_hash, last.get("config_hash")} - {None}
        if summary is not None and not (failed and len(hashes) < 2):
            progress |= summary
            completed_steps = progress["step"] or 0
            if self.max_steps is None or completed_steps == self.max_steps:
                return RunState(DONE, **progress)
            text = (
                f"{completed_steps} steps are done, max_steps={self.max_steps}: use "
                f"max_steps={completed_steps} or more"
            )
            return RunState(PAST_MAX_STEPS, text, **progress)
        running = owner(self.folder)
        if running is not None:
            return RunState(RUNNING, running.partition(", started")[0], **progress)
        if failed:
            return RunState(FAILED, str(last.get("error", "")), **progress)
        if not self.launches:
            return RunState(MISSING, **progress)
        reason = str(last.get("reason", reason)) if "outcome" in last else "killed"
        return RunState(STOPPED, reason, **progress)

    def _result_summary(self) -> tuple[dict[str, Any] | None, str]:
        """Return a finished run's wall time with its mean reward or verdicts, and an empty text.

        If there is no valid result, return None and the reason.
        """
        result = self.result
        if result is None:
            return None, "its result is missing or damaged"
        if "claims" in result:
            verdicts = verdict_counts([claim["verdict"] for claim in result["claims"]])
            summary = {"verdicts": verdicts, "seconds": float(result["cost"]["seconds"])}
        elif "final_mean_reward" in result:
            summary = {"quantity": result["quantity"], "step": result["steps"]}
            summary |= {"mean_reward": result["final_mean_reward"]}
            summary |= {"low": result["mean_reward_low"], "high": result["mean_reward_high"]}
            summary["seconds"] = result["seconds"]
        else:
            policy = result["policy"]
            summary = {name: policy[name] for name in ("quantity", "mean_reward")}
            summary |= {"low": policy["mean_reward_low"], "high": policy["mean_reward_high"]}
            summary["questions"] = result["questions"]
            scaling = result.get("scaling") or {}
            gstar = row_interval(scaling, "gstar")
            summary["gstar"] = best_size(*gstar)
            if all(map(math.isfinite, gstar)):
                divisors = scaling.get("best_divisor", {})
                summary["best_divisor"] = divisors.get(str(study_rollouts(self.config)))
        if self.config_hash not in (None, result.get("config_hash")):
            return None, "its result belongs to another configuration"
        if summary.get("step", 0) < (self.max_steps or 0):
            return None, f"max_steps is now {self.max_steps}"
        wall = history.wall_seconds(self.launches)
        return summary | ({} if wall is None else {"seconds": wall}), ""

    def _last_step(self) -> int:
        """Return the last step with a complete row; 0 if there is none."""
        try:
            lines = (self.folder / METRICS).read_bytes().splitlines()
        except OSError:
            return 0
        for line in reversed(lines):
            try:
                step = json.loads(line)["step"]
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            if isinstance(step, int):
                return step
        return 0

    def csv_rows(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of a CSV table; empty if the file does not exist."""
        return self._read(name, lambda file: csv_rows(file.read_text())) or []

    def completions(self) -> tuple[list[dict[str, Any]], str]:
        """Return rows from the log of completions, and a sentence on how they were selected.

        If there are too many rows for a page, return the rows of evenly spaced steps. Columns
        without any value are dropped.
        """
        file = self.folder / COMPLETIONS
        if not file.is_file():
            return [], ""
        # Imported here so that other commands start faster.
        import pyarrow
        from pyarrow import parquet

        try:
            # `read_table` would import pandas.
            with parquet.ParquetFile(file) as stored:
                groups = range(stored.metadata.num_row_groups)
                size = sum(stored.metadata.row_group(i).total_byte_size for i in groups)
                if size > MAX_PARQUET_BYTES:
                    raise ValueError(
                        f"it has {size:,} bytes, but at most {MAX_PARQUET_BYTES:,} are read"
                    )
                steps = stored.read(columns=["step"])["step"].to_pylist()
                table = _thin(stored.read(), steps)
        except (OSError, ValueError, LookupError, TypeError, pyarrow.ArrowException) as error:
            self.add_note(f"{COMPLETIONS} is damaged and not shown: {single_line(error, 200)}")
            return [], ""
        columns = [name for name in table.column_names if table[name].null_count < len(table)]
        columns += [name for name in ("prompt", "completion", "reward") if name not in columns]
        sentence = f"{COMPLETIONS} contains {len(steps)} completions"
        if len(table) == len(steps):
            sentence += "; all are shown here."
        else:
            which = "the first ones" if None in steps else "from evenly spaced steps"
            sentence += f"; {len(table)} are shown here, {which}."
        return table.select(columns).to_pylist(), sentence

    def _read(self, name: str, read: Callable[[Path], Any]) -> Any:
        """Return what `read` makes of a file, or None if it is missing or damaged; note damage."""
        if not (self.folder / name).is_file():
            return None
        try:
            return read(self.folder / name)
        except DAMAGE as error:
            self.add_note(f"{name} is damaged and not shown: {single_line(error, 200)}")
            return None


def is_evaluation(row: dict[str, Any]) -> bool:
    """Return True if a row of `eval.csv` has all values of an evaluation."""
    try:
        return record_of(Evaluation, row) is not None
    except DAMAGE:
        return False


def _thin(table: pyarrow.Table, steps: Sequence[int | None]) -> pyarrow.Table:
    """Return as many rows as a page can show, if possible from evenly spaced steps."""
    import pyarrow

    share = max(len(table) / MAX_COMPLETIONS, table.nbytes / MAX_BYTES, 1)
    all_steps = sorted({step for step in steps if step is not None})
    if share == 1 or len(all_steps) < 2:
        return table.slice(0, int(len(table) / share))
    count = max(2, int(len(all_steps) / share))
    spaced = {all_steps[round(i * (len(all_steps) - 1) / (count - 1))] for i in range(count)}
    return table.filter(pyarrow.array([step in spaced for step in steps]))


def identity_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a nested configuration that identify the run, by dotted key."""
    excluded = operational_keys(config)
    config_keys = drop_neutral_keys(drop_unused_baselines(config))
    return flatten({key: value for key, value in config_keys.items() if key not in excluded})


def verdict_counts(verdicts: Sequence[str]) -> dict[str, int]:
    """Count the claims with each verdict.

    >>> verdict_counts(["agrees", "not decided", "agrees"])
    {'agrees': 2, 'disagrees': 0, 'not decided': 1}
    """
    return {verdict: verdicts.count(verdict) for verdict in COUNT_WORDS}


def key_label(keys: dict[str, Any], names: Sequence[str]) -> str:
    """Format a run's values for some keys as on a command line.

    >>> keys = {"baseline.name": "opo", "learning_rate": 0.1}
    >>> key_label(keys, ["baseline.name", "learning_rate"])
    'baseline=opo learning_rate=0.1'
    """

    def text(value: Any) -> str:
        if isinstance(value, list):
            return f"[{','.join(map(text, value))}]"
        return "null" if value is None else str(value)

    return " ".join(f"{name.removesuffix('.name')}={text(keys.get(name))}" for name in names)


def distinguishing_keys(
    runs: Sequence[dict[str, Any]], ignored: Sequence[str] = SWEPT_KEYS
) -> list[str]:
    """Return a small set of keys whose values distinguish the runs.

    Keys are tried one by one, and a key is returned only if it distinguishes runs that the keys
    before it do not. Keys of names are tried first: if two models differ in name, path and weights,
    only the name is returned.

    Args:
        runs: keys of each run, see `RunRecord.keys`.
        ignored: keys that are never returned.

    >>> first, second = {"seed": 0, "model.name": "a", "path": 1}, {"seed": 1, "model.name": "b"}
    >>> distinguishing_keys([first, second]), distinguishing_keys([first, first | {"seed": 1}])
    (['model.name'], [])
    >>> distinguishing_keys([first, first | {"path": 2}])
    ['path']
    """
    candidates = {key for keys in runs for key in keys if key not in ignored}
    selection: list[str] = []
    groups = 1
    for key in sorted(candidates, key=lambda key: (not key.endswith("name"), key)):
        trial = [*selection, key]
        count = len({json.dumps([keys.get(k) for k in trial], default=str) for keys in runs})
        if count > groups:
            selection, groups = trial, count
    return selection
