"""Progress of long tasks: `Progress` reports it, and displays such as `Meter` show it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import rich.progress
from rich.live import Live
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
from rich.spinner import Spinner
from rich.text import Text

from grpo_ustat.terminal.console import Console

# Minimum time in seconds between two reports of an activity.
REPORT_SECONDS = 0.25

# Minimum time in seconds, and minimum share of the work, between two lines. Lines are printed if
# output is not a terminal.
LINE_SECONDS, LINE_SHARE = 30.0, 0.1
# Bars and rates are not drawn in terminals narrower than this number of columns.
NARROW_COLUMNS = 60
# Number of redraws of the bars per second.
REFRESHES_PER_SECOND = 2
# Approximate length of an activity's name in characters.
TITLE_CHARACTERS = 9
# Number of seconds after which an activity's report is no longer shown.
STALE_SECONDS = 5.0


@dataclass(frozen=True)
class Activity:
    """Progress of one activity, such as the sampling of a batch."""

    # Name of the activity, such as `writing`.
    name: str
    # Number of completions done.
    completed: int
    # Total number of completions; 0 if unknown.
    total: int
    # Number of tokens written so far; 0 if they are not counted.
    tokens: int
    # Number of seconds since the activity began.
    seconds: float


@dataclass(frozen=True)
class Notice:
    """Message to the user that several processes may send; only the first is shown."""

    text: str


Listener = Callable[[Activity], object]
_listener: Listener | None = None


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Call `listener` with each report of this process in the block; None ignores all reports."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


class Progress:
    """Reporter of an activity's progress; it sends at most one report every `REPORT_SECONDS`.

    Args:
        name, total: see `Activity`.
    """

    def __init__(self, name: str, total: int = 0):
        self.name, self.total, self.completed, self.tokens = name, total, 0, 0
        self._start = time.monotonic()
        self._last_report = self._start - REPORT_SECONDS
        self.add()

    def add(self, completed: int = 0, tokens: int = 0) -> None:
        """Add completions and tokens to the counts."""
        self.completed += completed
        self.tokens += tokens
        if _listener is None:
            return
        now = time.monotonic()
        if now - self._last_report >= REPORT_SECONDS or self.completed == self.total > 0:
            self._last_report = now
            seconds = now - self._start
            _listener(Activity(self.name, self.completed, self.total, self.tokens, seconds))


class Meter:
    """Progress display with rates and the time left.

    On a terminal the display is a bar with a second line for the current activity.

    If output is not a terminal, the display prints lines: the first after 30 s, then one for every
    10 % of the work but at most one every 30 s, and the last at the end. Lines about activities are
    printed only until the first unit of work is done, because no other line shows progress before
    that.

    Args:
        total: total number of units of work.
        unit: plural noun for the units, such as `steps`.
        completed: number of units that were done before the start.
        visible: True if the display is shown; False on ranks other than 0.
        clock: function that returns the time in seconds.
    """

    def __init__(
        self,
        title: str,
        total: int,
        unit: str = "completions",
        *,
        completed: int = 0,
        visible: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.title, self.total, self.unit = title, total, unit
        self.first = self.completed = completed
        self.tokens, self.rates, self.note = 0, "", ""
        self._visible, self._clock, self._start = visible, clock, clock()
        self._line, self._share, self._ended = self._start, None, False
        self._reports: dict[int, tuple[float, Activity]] = {}
        self._console = Console(stderr=True, soft_wrap=True)
        live = visible and self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = self._bars() if live else None

    def __enter__(self) -> Meter:
        self._start = self._line = self._clock()
        if self._live:
            self._live.start()
        return self

    def __exit__(self, failure: type | None, *_: object) -> None:
        self._ended = failure is None
        if self._live:
            self._live.update(self._activity, visible=False)
            self._live.stop()
        elif self._visible and self._ended and self.completed > self.first:
            self.print(f"{self.title}: {self.figures()}")

    def update(self, completed: int, tokens: int = 0, note: str = "", rates: str = "") -> None:
        """Set the number of units done, the number of tokens in them, a note, and rates.

        If `rates` is empty, the rates are computed from the time since the start.
        """
        self.completed, self.tokens, self.note, self.rates = completed, tokens, note, rates
        if self._live:
            self._live.update(self._task, completed=completed)
        else:
            self._print_when_due(completed / max(self.total, 1), f"{self.title}: {self.figures()}")

    def hear(self, activity: Activity, source: int = 0) -> None:
        """Show an activity's report; `source` identifies the process that sent it."""
        self._reports[source] = (self._clock(), activity)
        name, completed, total, text = self.activity()
        if self._live:
            self._live.update(
                self._activity,
                visible=bool(name),
                description=f"  {name:<{TITLE_CHARACTERS}}",
                completed=completed,
                total=total or None,
            )
        elif self.completed == self.first and total:
            self._print_when_due(completed / total, f"{self.title}: {name} {text}")

    def activity(self) -> tuple[str, int, int, str]:
        """Return the latest activity's name, completions done, total, and a text with rates."""
        now = self._clock()
        recent = [activity for at, activity in self._reports.values() if now - at < STALE_SECONDS]
        if not recent:
            return "", 0, 0, ""
        name = max(self._reports.values(), key=lambda report: report[0])[1].name
        same = [activity for activity in recent if activity.name == name]
        completed, total = (
            sum(activity.completed for activity in same),
            sum(activity.total for activity in same),
        )
        if completed == total > 0:
            # The reported activity is done, and an activity that sends no reports is running.
            return "", 0, 0, ""
        if not total:
            return name, 0, 0, ""
        rates = [
            rate(
                sum(getattr(activity, field) / max(activity.seconds, 1e-9) for activity in same),
                unit,
            )
            for field, unit in (("completed", ""), ("tokens", " tokens"))
        ]
        return name, completed, total, join_texts(f"{completed:,}/{total:,} completions", *rates)

    def figures(self) -> str:
        """Return a text with the counts, the time left or taken, the note, and the rates."""
        seconds, units = self._clock() - self._start, self.completed - self.first
        count = f"{self.completed:,}/{self.total:,} {self.unit}"
        rates = [self.rates]
        if not self.rates and units and seconds > 0:
            rates = [rate(units / seconds, ""), rate(self.tokens / seconds, " tokens")]
        return join_texts(count, self._time(), self.note, *rates)

    def short(self) -> str:
        """Return a short text with the counts and the time left, for narrow terminals."""
        return join_texts(f"{self.completed:,}/{self.total:,}", self._time())

    def _time(self) -> str:
        """Return the time taken if the work is done, or else the time left at the present rate."""
        seconds, units = self._clock() - self._start, self.completed - self.first
        if self._ended:
            return f"in {clock_text(seconds)}"
        if not units:
            return f"{clock_text(seconds)} so far"
        return f"{clock_text(seconds / units * (self.total - self.completed))} left"

    def print(self, line: str, **options: Any) -> None:
        """Print a separate line above the bars."""
        if self._visible:
            self._console.print(line, **options)

    def _print_when_due(self, share: float, line: str) -> None:
        now = self._clock()
        due = self._share is None or share - self._share > LINE_SHARE - 1e-9
        if self._visible and due and now - self._line >= LINE_SECONDS and share < 1:
            self._line, self._share = now, share
            self.print(line)

    def _bars(self) -> rich.progress.Progress:
        """Return rich's progress bars: a bar for the work and a line for the current activity."""
        wide = self._console.width >= NARROW_COLUMNS
        columns = [TextColumn("{task.description}", markup=False), _Figures(self, wide)]
        if wide:
            columns.insert(1, BarColumn(bar_width=min(30, self._console.width // 5)))
        bars = rich.progress.Progress(
            *columns,
            console=self._console,
            refresh_per_second=REFRESHES_PER_SECOND,
            # If standard output is a file or a pipe, redirecting it would print results on stderr.
            redirect_stdout=sys.stdout.isatty(),
        )
        self._task = bars.add_task(
            f"{self.title:<{TITLE_CHARACTERS + 2}}", total=self.total, completed=self.completed
        )
        self._activity = bars.add_task("", total=None, visible=False)
        return bars


@contextmanager
def waiting(text: str, visible: bool = True) -> Iterator[None]:
    """Show a line while the block runs, for example while a model is loaded.

    On a terminal, a spinner is shown until the block ends. If output is not a terminal, a line is
    printed afterwards if the block took `LINE_SECONDS` or more.
    """
    console, start = Console(stderr=True), time.monotonic()
    if visible and console.is_terminal and not console.is_dumb_terminal:
        line = Spinner("line", Text(text, no_wrap=True, overflow="ellipsis"))
        with Live(
            line,
            console=console,
            refresh_per_second=2 * REFRESHES_PER_SECOND,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
        ):
            yield
        return
    yield
    if visible and time.monotonic() - start >= LINE_SECONDS:
        console.print(f"{text}: {clock_text(time.monotonic() - start)}", soft_wrap=True)


class _Figures(ProgressColumn):
    """Text next to a meter's bar; it is computed at each refresh."""

    def __init__(self, meter: Meter, wide: bool):
        super().__init__()
        self._meter, self._wide = meter, wide

    def render(self, task: Task) -> Text:
        meter = self._meter
        if task.id:
            return Text(meter.activity()[3] if self._wide else "", no_wrap=True, style="dim")
        text = meter.figures() if self._wide else meter.short()
        return Text(text, no_wrap=True, overflow="ellipsis")


def join_texts(*texts: str) -> str:
    """Join the texts that are not empty with commas."""
    return ", ".join(text for text in texts if text)


def rate(number: float, unit: str) -> str:
    """Format a rate in units per second; return an empty text if the rate is 0.

    >>> rate(1234.5, " tokens"), rate(2.25, ""), rate(0.004, ""), rate(0, "")
    ('1,234 tokens/s', '2.2/s', '0.004/s', '')
    """
    if not number:
        return ""
    text = f"{number:,.0f}" if number >= 10 else f"{number:.2g}"
    return f"{text}{unit}/s"


def clock_text(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds.

    >>> clock_text(3723.4), clock_text(59.6)
    ('1:02:03', '1:00')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def monitor_text(row: dict[str, Any]) -> str:
    """Format the best group size with its interval, and the gradient error, if the row has them.

    >>> row = {"monitor/gstar": 8.94, "monitor/gstar_low": 7.1, "monitor/gstar_high": None}
    >>> monitor_text(row | {"monitor/mse": 2.345})
    'G* 8.9 [7.1, infinity), gradient MSE 2.35'
    >>> monitor_text(row | {"monitor/gstar": None, "monitor/mse": None}), monitor_text({})
    ('not enough data for G*', '')
    """
    if "monitor/gstar" not in row:
        return ""
    best, low, high, error = (
        row.get(f"monitor/{name}") for name in ("gstar", "gstar_low", "gstar_high", "mse")
    )
    text = "not enough data for G*"
    if best is not None and low is not None:
        text = f"G* {best:.1f} [{low:.1f}, {'infinity)' if high is None else f'{high:.1f}]'}"
    return join_texts(text, "" if error is None else f"gradient MSE {error:.3g}")


class TrainingBar:
    """Display of a training run: steps, rates, last mean reward, time left, and evaluations.

    Args:
        max_steps: last step of training.
        completed: number of steps done before this launch.
        visible: True if the display is shown; False on ranks other than 0.
    """

    def __init__(self, max_steps: int, completed: int, visible: bool):
        self.meter = Meter("train", max_steps, "steps", completed=completed, visible=visible)
        # Text with the monitor's latest values.
        self._monitor = ""

    def __enter__(self) -> TrainingBar:
        self.meter.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self.meter.__exit__(*failure)

    def step(self, row: dict[str, Any], completions: int) -> None:
        """Show a finished step, given its metrics row and its number of completions."""
        seconds = row["step_time"]
        rates = join_texts(
            f"{seconds:.3g} s/step",
            rate(completions / seconds, " completions"),
            rate(row["tokens"] / seconds, " tokens"),
        )
        self._monitor = monitor_text(row) or self._monitor
        note = join_texts(f"reward {row['reward']:.3f}", self._monitor)
        self.meter.update(self.meter.completed + 1, note=note, rates=rates)

    def print_evaluation(self, row: dict[str, Any]) -> None:
        """Print a line with an evaluation's result."""
        self.meter.print(
            f"step {row['step']}: held-out {row['quantity']} {row['mean_reward']:.3f} "
            f"[{row['low']:.3f}, {row['high']:.3f}], n = {row['n']}, {row['decoding']}"
        )

    def print_alarm(self, line: str) -> None:
        """Print an alarm in red."""
        self.meter.print(f"ALARM {line}", style="bold red")
