"""Assignment of training runs with different settings to axes, lines and cells of figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_ustat.runs.record import RunRecord, key_label

SIZE_KEY, ROLLOUTS_KEY = "group_size", "budget.rollouts"
# Runs that differ in these keys were evaluated on different questions or in different ways.
TEST_KEYS = ("dataset.", "eval.", "data")


@dataclass(frozen=True)
class Axis:
    """Configuration key along the horizontal axis of a figure."""

    # Configuration key in which the runs differ.
    key: str = SIZE_KEY
    # Values of the key. Numbers are sorted; other values are in the order of the runs.
    values: tuple[Any, ...] = ()

    @property
    def label(self) -> str:
        """Label of the axis."""
        names = {SIZE_KEY: "group size G", ROLLOUTS_KEY: "rollouts per step, n"}
        return names.get(self.key, self.key.removesuffix(".name").replace("_", " "))

    @property
    def symbol(self) -> str:
        """Name of the axis for use within a sentence."""
        return {SIZE_KEY: "G", ROLLOUTS_KEY: "n"}.get(self.key, "settings")

    @property
    def is_numeric(self) -> bool:
        """True if all values are numbers."""
        return all(_is_number(value) for value in self.values)

    @property
    def is_logarithmic(self) -> bool:
        """True for group sizes, rollouts, and positive values that span a factor of 4 or more."""
        if self.key in (SIZE_KEY, ROLLOUTS_KEY):
            return True
        positive = self.is_numeric and min(self.values, default=0) > 0
        return positive and max(self.values) >= 4 * min(self.values)

    def position(self, value: Any) -> float:
        """Return the coordinate of a value on the axis."""
        if self.key == SIZE_KEY or self.is_numeric:
            return float(value)
        return float(self.values.index(value))

    def text(self, value: Any) -> str:
        """Return the name of a value for use in column headings and answers.

        >>> Axis().text(8), Axis("baseline.name", ("none",)).text("none")
        ('G = 8', 'none')
        """
        name = {SIZE_KEY: "G = ", ROLLOUTS_KEY: "n = "}.get(self.key, "")
        if self.is_numeric and not name:
            name = f"{self.label} = "
        return f"{name}{value_text(value)}"


def swept_axis(runs: Sequence[RunRecord], series_keys: Sequence[str]) -> Axis:
    """Choose the configuration key for the horizontal axis of a figure.

    The key is the group size if the group size was swept or if nothing was swept. Otherwise it is
    the swept key with the most values, chosen among numeric keys if there are any.

    Args:
        runs: Training runs.
        series_keys: Keys other than group size, budget and seed in which the runs differ.
    """
    if len({run.config["group_size"] for run in runs}) > 1:
        return Axis(SIZE_KEY, _values(runs, SIZE_KEY))
    keys = [key for key in series_keys if not key.startswith(TEST_KEYS)]
    if len({run.config["budget"]["rollouts"] for run in runs}) > 1:
        keys.append(ROLLOUTS_KEY)
    axes = [Axis(key, _values(runs, key)) for key in keys]
    default = Axis(SIZE_KEY, _values(runs, SIZE_KEY))
    return max(axes, key=lambda axis: (axis.is_numeric, len(axis.values)), default=default)


def setting_labels(run: RunRecord, series_keys: Sequence[str], axis: Axis) -> dict[str, Any]:
    """Return the columns that identify a run's setting.

    Returns:
        Columns `series` (values of the series keys), `test` (values of the keys that determine the
        test questions), `setting` (values of the other series keys), `x` (value along the axis) and
        `line` (all other values, which are constant along a line of a figure).
    """
    config, keys = run.config, run.keys
    test_keys = [key for key in series_keys if key.startswith(TEST_KEYS)]
    setting_keys = [key for key in series_keys if key not in test_keys]
    rollouts, size = config["budget"]["rollouts"], config["group_size"]
    budget = "" if axis.key == ROLLOUTS_KEY else f"n={rollouts}"
    group = "" if axis.key == SIZE_KEY else f"G={size}"
    others = key_label(keys, [key for key in series_keys if key != axis.key])
    return {
        "series": key_label(keys, series_keys),
        "test": key_label(keys, test_keys),
        "setting": key_label(keys, setting_keys),
        "line": " ".join(filter(None, (budget, group, others))),
        "x": _value(run, axis.key),
    }


def value_text(value: Any) -> str:
    """Format a value as a user types it on the command line.

    >>> value_text(0.0001), value_text(None), value_text([4, 8])
    ('0.0001', 'null', '[4,8]')
    """
    return key_label({"": value}, [""]).removeprefix("=")


def _value(run: RunRecord, key: str) -> Any:
    """Return a run's value of a key as a number or text, so that values can be compared."""
    if key == SIZE_KEY:
        return run.config["group_size"]
    if key == ROLLOUTS_KEY:
        return run.config["budget"]["rollouts"]
    value = run.keys.get(key)
    return value if _is_number(value) else value_text(value)


def _values(runs: Sequence[RunRecord], key: str) -> tuple[Any, ...]:
    values = list(dict.fromkeys(_value(run, key) for run in runs))
    return tuple(sorted(values) if all(map(_is_number, values)) else values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
