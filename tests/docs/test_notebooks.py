"""The notebooks of docs/examples: their stored outputs, and that their cells still print them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from readme import ROOT

EXAMPLES = ROOT / "docs/examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
EVERY_NOTEBOOK = pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
NEXT = "<<next cell>>"
NUMBER = r"\d+(?:\.\d+)?"


def code_cells(file):
    """The code of each cell that has some, and the text that it printed."""
    cells = [cell for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == "code"]
    for cell in cells:
        streams = [one for one in cell["outputs"] if one["output_type"] == "stream"]
        assert all(one["name"] == "stdout" for one in streams), "a warning is stored"
        yield "".join(cell["source"]), "".join("".join(one["text"]) for one in streams)


@EVERY_NOTEBOOK
def test_outputs_are_stored_and_name_no_machine(file):
    text = file.read_text()
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not any(output["output_type"] == "error" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not re.search(r"/(home|root|tmp|work|Users)/", text)


@pytest.mark.nightly(minutes=1.5)
@EVERY_NOTEBOOK
def test_the_cells_print_what_is_stored(file, tmp_path):
    """In their order, in one namespace; numbers may move a little with the machine's arithmetic."""
    for folder in ("mse", "trl"):
        shutil.copytree(EXAMPLES / folder, tmp_path / folder)
    cells = list(code_cells(file))
    code = f"\nprint({NEXT!r})\n".join(code for code, _ in cells)
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | paths | {"MPLBACKEND": "Agg"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    printed = run.stdout.split(NEXT + "\n")
    for new, (_, stored) in zip(printed, cells, strict=True):
        assert re.sub(NUMBER, "N", new).split() == re.sub(NUMBER, "N", stored).split()
        for a, b in zip(re.findall(NUMBER, new), re.findall(NUMBER, stored), strict=True):
            assert float(a) == pytest.approx(float(b), rel=0.05, abs=2), (new, stored)
