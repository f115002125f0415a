"""`curves.parquet`: the rows of a study's `curves.csv` with their types, for other programs."""

from __future__ import annotations

import os
from typing import Any

import pyarrow
from pyarrow import parquet

from grpo_ustat.ranks import is_main
from grpo_ustat.runs.folder import RunFolder

NAME = "curves.parquet"
COLUMNS = {
    "method": pyarrow.string(),
    "baseline": pyarrow.string(),
    "target": pyarrow.string(),
    "setting": pyarrow.string(),
    "interval": pyarrow.string(),
    "group_size": pyarrow.int64(),
    "num_prompts": pyarrow.int64(),
    "unbiased": pyarrow.bool_(),
    "mse": pyarrow.float64(),
    "low": pyarrow.float64(),
    "high": pyarrow.float64(),
    "replicates": pyarrow.int64(),
    "bias2": pyarrow.float64(),
    "variance": pyarrow.float64(),
    "relative_mse": pyarrow.float64(),
    "best_scalar_mse": pyarrow.float64(),
    "cosine": pyarrow.float64(),
}


def write_curves(folder: RunFolder, rows: list[dict[str, Any]]) -> None:
    """Write the rows, columns in the order of `curves.csv`; what is not known is null.

    Raises:
        ValueError: a row has another column, or a value of another type.
    """
    if not is_main():
        return
    folder.check_held()
    for name in {key for row in rows for key in row} ^ COLUMNS.keys():
        raise ValueError(f"{name} is a column of the rows or of {NAME}, not of both")
    schema = pyarrow.schema([(name, COLUMNS[name]) for name in rows[0]])
    staged = folder.path / f".{NAME}.tmp"
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), staged)
    os.replace(staged, folder.path / NAME)
