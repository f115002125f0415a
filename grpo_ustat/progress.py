"""Progress on standard error: bars on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.spinner import Spinner
from rich.text import Text

from grpo_ustat.pace import State

LINE_SECONDS, LINE_SHARE = 30.0, 0.1  # at least, between two lines without a terminal
NARROW = 60  # columns below which bars and rates are left out
REFRESH = 2  # times a second
TITLE = 9  # characters of an activity, about
STALE = 5.0  # seconds after which what was told of an activity is not shown any more


class Meter:
    """How far a piece of work is, with rates and the time left.

    On a terminal a bar, and below it one of the activity at hand. Elsewhere a line once 30 s have
    passed, then every 10 % but not more often than every 30 s, and one at the end; of activities
    only before the first unit is done, that is where nothing else says that work goes on.

    Args:
        title: of the work.
        total, done: of units, at the end and at the start.
        unit: what is counted.
        shown: False on ranks other than 0.
        clock: seconds.
    """

    def __init__(
        self,
        title: str,
        total: int,
        unit: str = "completions",
        *,
        done: int = 0,
        shown: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.title, self.total, self.unit = title, total, unit
        self.first = self.done = done
        self.tokens, self.rates, self.note = 0, "", ""
        self._shown, self._clock, self._begun = shown, clock, clock()
        self._line, self._share, self._ended = self._begun, None, False
        self._heard: dict[int, tuple[float, State]] = {}
        self._console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        live = shown and self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = self._bars() if live else None

    def __enter__(self) -> Meter:
        self._begun = self._line = self._clock()
        if self._live:
            self._live.start()
        return self

    def __exit__(self, failure: type | None, *_: object) -> None:
        self._ended = failure is None
        if self._live:
            self._live.update(self._activity, visible=False)
            self._live.stop()
        elif self._shown and self._ended and self.done > self.first:
            self.print(f"{self.title}: {self.figures()}")

    def update(self, done: int, tokens: int = 0, note: str = "", rates: str = "") -> None:
        """So many units are done; tokens of all of them, a note, and rates where they are known
        better than from the time since the start.
        """
        self.done, self.tokens, self.note, self.rates = done, tokens, note, rates
        if self._live:
            self._live.update(self._task, completed=done)
        else:
            self._say(done / max(self.total, 1), f"{self.title}: {self.figures()}")

    def hear(self, state: State, source: int = 0) -> None:
        """What an activity tells, one of several processes."""
        self._heard[source] = (self._clock(), state)
        doing, done, total, text = self.activity()
        if self._live:
            options = dict(description=f"  {doing:<{TITLE}}", completed=done, total=total or None)
            self._live.update(self._activity, visible=bool(doing), **options)
        elif self.done == self.first and total:
            self._say(done / total, f"{self.title}: {doing} {text}")

    def activity(self) -> tuple[str, int, int, str]:
        """The latest one of all processes: its name, how much of it is done, in words too."""
        now = self._clock()
        known = [state for told, state in self._heard.values() if now - told < STALE]
        if not known:
            return "", 0, 0, ""
        doing = max(self._heard.values(), key=lambda pair: pair[0])[1].doing
        states = [state for state in known if state.doing == doing]
        done, total = sum(s.done for s in states), sum(s.total for s in states)
        if done == total > 0:  # something else goes on that does not tell
            return "", 0, 0, ""
        if not total:
            return doing, 0, 0, ""
        rates = [
            rate(sum(getattr(s, name) / max(s.seconds, 1e-9) for s in states), unit)
            for name, unit in (("done", ""), ("tokens", " tokens"))
        ]
        return doing, done, total, joined(f"{done:,}/{total:,} completions", *rates)

    def figures(self) -> str:
        """Counts, the time left or taken, the note, and rates."""
        seconds, made = self._clock() - self._begun, self.done - self.first
        count = f"{self.done:,}/{self.total:,} {self.unit}"
        rates = [self.rates]
        if not self.rates and made and seconds > 0:
            rates = [rate(made / seconds, ""), rate(self.tokens / seconds, " tokens")]
        return joined(count, self._time(), self.note, *rates)

    def short(self) -> str:
        """Counts and the time left, for narrow terminals."""
        return joined(f"{self.done:,}/{self.total:,}", self._time())

    def _time(self) -> str:
        seconds, made = self._clock() - self._begun, self.done - self.first
        if self._ended:
            return f"in {clock_text(seconds)}"
        if not made:
            return f"{clock_text(seconds)} so far"
        return f"{clock_text(seconds / made * (self.total - self.done))} left"

    def print(self, line: str, **options: Any) -> None:
        """A line of its own, above the bars."""
        if self._shown:
            self._console.print(line, **options)

    def _say(self, share: float, line: str) -> None:
        now = self._clock()
        due = self._share is None or share - self._share > LINE_SHARE - 1e-9
        if self._shown and due and now - self._line >= LINE_SECONDS and share < 1:
            self._line, self._share = now, share
            self.print(line)

    def _bars(self) -> Progress:
        wide = self._console.width >= NARROW
        columns = [TextColumn("{task.description}", markup=False), _Figures(self, wide)]
        if wide:
            columns.insert(1, BarColumn(bar_width=min(30, self._console.width // 5)))
        bars = Progress(
            *columns,
            console=self._console,
            refresh_per_second=REFRESH,
            redirect_stdout=sys.stdout.isatty(),  # else results would go to standard error
        )
        self._task = bars.add_task(
            f"{self.title:<{TITLE + 2}}", total=self.total, completed=self.done
        )
        self._activity = bars.add_task("", total=None, visible=False)
        return bars


@contextmanager
def waiting(text: str, shown: bool = True) -> Iterator[None]:
    """While something loads: a line that moves on a terminal and goes away; elsewhere a line
    afterwards if it took long.
    """
    console, begun = Console(stderr=True, highlight=False, markup=False), time.monotonic()
    if shown and console.is_terminal and not console.is_dumb_terminal:
        line = Spinner("line", Text(text, no_wrap=True, overflow="ellipsis"))
        apart = dict(transient=True, redirect_stdout=sys.stdout.isatty())
        with Live(line, console=console, refresh_per_second=2 * REFRESH, **apart):
            yield
        return
    yield
    if shown and time.monotonic() - begun >= LINE_SECONDS:
        console.print(f"{text}: {clock_text(time.monotonic() - begun)}", soft_wrap=True)


class _Figures(ProgressColumn):
    """What the meter says, at the time of each refresh."""

    def __init__(self, meter: Meter, wide: bool):
        super().__init__()
        self._meter, self._wide = meter, wide

    def render(self, task: Task) -> Text:
        meter = self._meter
        if task.id:
            return Text(meter.activity()[3] if self._wide else "", no_wrap=True, style="dim")
        text = meter.figures() if self._wide else meter.short()
        return Text(text, no_wrap=True, overflow="ellipsis")


def joined(*texts: str) -> str:
    """Those that say something, between commas."""
    return ", ".join(text for text in texts if text)


def rate(number: float, unit: str) -> str:
    """Units a second; nothing where there are none.

    >>> rate(1234.5, " tokens"), rate(2.25, ""), rate(0.004, ""), rate(0, "")
    ('1,234 tokens/s', '2.2/s', '0.004/s', '')
    """
    if not number:
        return ""
    text = f"{number:,.0f}" if number >= 10 else f"{number:.2g}"
    return f"{text}{unit}/s"


def clock_text(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> clock_text(3723.4), clock_text(59.6)
    ('1:02:03', '1:00')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class TrainingBar:
    """Steps done, rates and mean reward of the last one, time left; a line for each evaluation.

    Args:
        max_steps: where training ends.
        done: steps done before.
        shown: False on ranks other than 0.
    """

    def __init__(self, max_steps: int, done: int, shown: bool):
        self.meter = Meter("train", max_steps, "steps", done=done, shown=shown)

    def __enter__(self) -> TrainingBar:
        self.meter.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self.meter.__exit__(*failure)

    def step(self, row: dict[str, Any], completions: int) -> None:
        """One step more, from its metrics row and its number of completions."""
        seconds = row["step_time"]
        rates = joined(
            f"{seconds:.3g} s/step",
            rate(completions / seconds, " completions"),
            rate(row["tokens"] / seconds, " tokens"),
        )
        self.meter.update(self.meter.done + 1, note=f"reward {row['reward']:.3f}", rates=rates)

    def evaluated(self, row: dict[str, Any]) -> None:
        """Show an evaluation."""
        self.meter.print(
            f"step {row['step']}: held-out accuracy {row['accuracy']:.3f} "
            f"[{row['low']:.3f}, {row['high']:.3f}], n = {row['n']}, {row['decoding']}"
        )

    def alarm(self, line: str) -> None:
        """Show what goes wrong, in red."""
        self.meter.print(f"ALARM {line}", style="bold red")
