"""Access to run folders, for notebooks and scripts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from grpo_ustat.runs.record import CONFIG, RunRecord

if TYPE_CHECKING:
    import pandas


def load_run(folder: str | Path) -> RunRecord:
    """Load a run folder of `train`, `mse` or `gap`.

    The record has `config`, `result` (None while the run is unfinished), `metrics`, `evals`,
    `state` and other attributes; see `RunRecord`.

    Args:
        folder: run folder, which must contain `.hydra/config.yaml`.

    Raises:
        FileNotFoundError: the folder is not a run folder.
    """
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} is not a run folder: it has no {CONFIG}")
    return RunRecord(folder)


def read_curves(folder: str | Path) -> pandas.DataFrame:
    """Read a finished study's error curves: one row per method, baseline, setting and group size.

    Args:
        folder: run folder of `mse`.

    Returns:
        The columns of `curves.csv`: `mse`, `low`, `high`, `bias2`, `variance` ... in squared units
        of the gradient; unknown values are NaN.

    Raises:
        FileNotFoundError: the study is unfinished, or the folder does not contain a study.
    """
    import pandas

    result = RunRecord(Path(folder)).result
    if result is None or not result.get("curves"):
        raise FileNotFoundError(f"{folder} is not a finished study of mse: it has no curves")
    return pandas.DataFrame(result["curves"])
