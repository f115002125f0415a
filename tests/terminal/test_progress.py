"""Progress: lines where there is no terminal, bars where there is one, and what they leave."""

from __future__ import annotations

import io
import re
import sys

import pytest
from rich.console import Console

from grpo_ustat.terminal import progress
from grpo_ustat.terminal.console import warn
from grpo_ustat.terminal.progress import Activity, Meter, Progress, TrainingBar, listening


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def lines_of(seconds_each, capsys, units=100, fail=False):
    """What a run says of which every unit takes so long."""
    clock = Clock()
    try:
        with Meter("work", units, clock=clock) as shown:
            for done in range(1, units + 1):
                clock.now += seconds_each
                shown.update(done, tokens=20 * done)
                if fail and done == units // 2:
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def test_without_a_terminal_there_are_few_lines(capsys):
    """At 10 s a percent: after 30 s, then every 10 %; at 1 s a percent: every 30 s."""
    slow = lines_of(10, capsys)
    assert [int(re.search(r"(\d+)/100", line)[1]) for line in slow] == [*range(3, 100, 10), 100]
    assert slow[0] == "work: 3/100 completions, 16:10 left, 0.1/s, 2 tokens/s"
    assert slow[-1] == "work: 100/100 completions, in 16:40, 0.1/s, 2 tokens/s"
    quick = lines_of(1, capsys)
    assert [int(re.search(r"(\d+)/100", line)[1]) for line in quick] == [30, 60, 90, 100]
    assert lines_of(0.1, capsys) == ["work: 100/100 completions, in 0:10, 10/s, 200 tokens/s"]
    assert lines_of(0.1, capsys, fail=True) == []


def test_activities_have_lines_only_while_nothing_is_done(capsys):
    clock = Clock()
    with Meter("train", 2, "steps", clock=clock) as shown:
        for done in (0, 10, 20, 30):
            clock.now += 20
            shown.hear(Activity("writing", done, 40, 100 * done, 10.0))
        shown.update(1)
        for _ in range(5):
            clock.now += 40
            shown.hear(Activity("updating", 3, 40, 0, 10.0))
    first, second, last = capsys.readouterr().err.splitlines()
    assert first == "train: writing 10/40 completions, 1/s, 100 tokens/s"
    assert second == "train: writing 30/40 completions, 3/s, 300 tokens/s"
    assert last.startswith("train: 1/2 steps, in 4:40")


def test_the_monitor_of_a_step_stays_in_the_line_until_the_next(capsys):
    row = {"step_time": 2.0, "tokens": 100, "reward": 0.5}
    monitored = {"monitor/gstar": 8.94, "monitor/gstar_low": 7.1, "monitor/gstar_high": 12.0}
    with TrainingBar(3, 0, visible=True) as bar:
        bar.step(row, 16)
        assert bar.meter.note == "reward 0.500"
        bar.step(row | monitored | {"monitor/mse": 2.345}, 16)
        bar.step(row, 16)
    line = capsys.readouterr().err.splitlines()[-1]
    assert "reward 0.500, G* 8.9 [7.1, 12.0], gradient MSE 2.35, 2 s/step" in line


def test_other_ranks_are_quiet(capsys):
    bar = TrainingBar(3, 0, visible=False)
    with bar, listening(bar.meter.hear):
        Progress("writing", 4).add(4)
        bar.step(ROW, 8)
        bar.print_evaluation(EVALUATION)
        bar.print_alarm("it fell")
    assert capsys.readouterr() == ("", "")


ROW = {"step_time": 2.0, "tokens": 400, "reward": 0.25}
EVALUATION = {"step": 3, "quantity": "accuracy", "mean_reward": 0.5, "low": 0.4, "high": 0.6}
EVALUATION |= {"n": 100, "decoding": "greedy"}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def drawn(monkeypatch, width, work):
    """All that is sent to a terminal so many columns wide."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "Console", lambda **options: Console(**options, width=width))
    monkeypatch.setenv("TERM", "xterm-256color")
    bar = TrainingBar(8, 2, visible=True)
    try:
        with bar, listening(bar.meter.hear):
            work(bar)
            bar.meter._live.refresh()
    except KeyboardInterrupt:
        pass
    return terminal.getvalue()


def step_and_warn(bar):
    bar.step(ROW, 80)
    bar.meter.hear(Activity("writing", 5, 10, 50, 1.0))
    warn("the disk is full")
    print("a result")
    bar.print_evaluation(EVALUATION)


ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.mark.parametrize("width", [36, 80, 140])
def test_bars_fit_their_terminal(width, monkeypatch, capsys):
    text = ESCAPES.sub("", drawn(monkeypatch, width, step_and_warn)).replace("\r", "\n")
    bars = [line for line in text.splitlines() if line.startswith(("train", "  writing"))]
    assert bars and max(map(len, bars)) <= width
    assert any("3/8" in line for line in bars)
    assert any("reward 0.250" in line for line in bars) == (width > 40)
    assert any("40 completions/s, 200 tokens/s" in line for line in bars) == (width > 100)
    assert any("5/10 completions" in line for line in bars) == (width > 40)
    assert "warning: the disk is full\n" in text and "accuracy 0.500" in text
    assert capsys.readouterr().out == "a result\n"


def test_a_bar_that_is_interrupted_leaves_a_whole_line_and_the_cursor(monkeypatch):
    def interrupt(bar):
        bar.step(ROW, 80)
        raise KeyboardInterrupt

    text = drawn(monkeypatch, 80, interrupt)
    assert text.rstrip("\x1b[?25h\r").endswith("\n") and text.rindex("\x1b[?25h") > 0
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "3/8 steps" in ESCAPES.sub("", text).splitlines()[-1]


def test_no_colour_where_none_is_wanted(monkeypatch):
    coloured = re.compile(r"\x1b\[[0-9;]*3[0-9]")
    assert coloured.search(drawn(monkeypatch, 80, step_and_warn))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not coloured.search(drawn(monkeypatch, 80, step_and_warn))


def test_a_pace_is_told_now_and_then_and_at_its_end(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress.time, "monotonic", clock)
    told = []
    with listening(told.append):
        own = Progress("writing", 100)
        for _ in range(100):
            clock.now += 0.1
            own.add(1, tokens=3)
    assert [state.completed for state in told] == [0, *range(3, 100, 3), 100]
    assert told[-1] == Activity("writing", 100, 100, 300, pytest.approx(10.0))
    Progress("unheard", 1).add(1)
    assert len(told) == 35
