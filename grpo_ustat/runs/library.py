"""What a run folder holds, for notebooks and scripts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from grpo_ustat.runs.record import CONFIG, RunRecord

if TYPE_CHECKING:
    import pandas

CURVES = "curves.parquet"


def load_run(folder: str | Path) -> RunRecord:
    """A run folder of `train`, `mse` or `gap`: `config`, `result` (None while it is unfinished),
    `metrics`, `evals`, `state` and more; see `RunRecord`.

    Args:
        folder: with `.hydra/config.yaml`.

    Raises:
        FileNotFoundError: it is no run folder.
    """
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} is no run folder: it has no {CONFIG}")
    return RunRecord(folder)


def read_curves(folder: str | Path) -> pandas.DataFrame:
    """The curves of a finished study: a row per method, baseline, setting and group size.

    Args:
        folder: of a run of `mse`.

    Returns:
        The columns of `curves.csv`, typed: `mse`, `low`, `high`, `bias2`, `variance` ... as floats,
        NaN where unknown, in squared units of the gradient.

    Raises:
        FileNotFoundError: the study is unfinished, or the folder is no study's.
    """
    from pyarrow import parquet

    path = Path(folder) / CURVES
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {CURVES}: it is no finished study of mse")
    return parquet.read_table(path).to_pandas()
