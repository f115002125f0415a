"""The core, without an extra: NumPy and SciPy are enough for estimators, and commands say what is
missing.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REFUSE = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        allowed = {"numpy", "scipy", "grpo_ustat", *sys.stdlib_module_names}
        if top not in allowed and not top.startswith("_"):
            raise ModuleNotFoundError(f"No module named {top!r}", name=top)

sys.meta_path.insert(0, Refused())
"""
CORE = """
import numpy as np

import grpo_ustat as gu
from grpo_ustat.estimators.baselines import Baseline, advantages
from grpo_ustat.estimators.intervals import clustered_wilson, wilson
from grpo_ustat.estimators.groups import scaling_from_arrays

assert gu.scaling_from_arrays is scaling_from_arrays and gu.Baseline is Baseline
assert constants["gstar"].low < constants["gstar"].estimate < constants["gstar"].high
assert abs(advantages("leave_one_out", rewards_PG, BaselineContext()).sum()) < 1e-12
assert Baseline("half", lambda r, _: r - 0.5, unbiased=True, min_group_size=1).name == "half"
assert wilson(5, 10).low < 0.5 < clustered_wilson(rewards_PN).high

from grpo_ustat.logs.formats import FORMATS, Options

row, _ = FORMATS["verl"].read(Path(sys.argv[1]), Options())
assert (row.prompt, row.reward) == ("1+1=", 1.0)
for name, extra in (("completion_scores", "torch"), ("load_run", "cli"), ("read_curves", "cli")):
    try:
        getattr(gu, name)
    except ImportError as error:
        assert str(error).startswith(f"grpo_ustat.{name} needs "), error
        assert str(error).endswith(f": pip install 'grpo-ustat[{extra}]'"), error
    else:
        raise AssertionError(name)
"""
COMMANDS = (
    "train",
    "mse",
    "gap",
    "convert {} out.parquet",
    "report runs=outputs",
    "sweep status outputs",
)


def examples():
    """The blocks of the page about the library that need no model."""
    page = (ROOT / "docs" / "library.md").read_text()
    return [
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        if "import numpy" in block
    ]  # fmt: skip


def core(tmp_path):
    """A script that uses all that the core has, and its argument."""
    file = tmp_path / "1.jsonl"
    row = {"input": "1+1=", "output": "2", "gts": "2", "score": 1.0, "step": 1}
    file.write_text(2 * (json.dumps(row) + "\n"))
    script = tmp_path / "core.py"
    script.write_text("\n".join(["import sys\nfrom pathlib import Path", *examples(), CORE]))
    return [str(script), str(file)]


@pytest.mark.slow
def test_the_core_needs_numpy_and_scipy_alone(tmp_path):
    assert len(examples()) == 2
    script, argument = core(tmp_path)
    command = [sys.executable, "-c", REFUSE + Path(script).read_text(), argument]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


OF_THE_COMMANDS = ("datasets", "gx2", "hydra", "math_verify", "matplotlib", "omegaconf", "pandas",
                   "pyarrow")  # fmt: skip
SCORES = f"""
import sys

sys.modules.update(dict.fromkeys({OF_THE_COMMANDS}))
import torch

import grpo_ustat as gu
import grpo_ustat.pages.advice, grpo_ustat.policy.scores.rollouts
from grpo_ustat.policy.loading import load_policy

policy = load_policy("embedded:tiny")
ids = torch.tensor(policy.encode(["1 + 2=3", "4 + 4=8"]))
ones, last = torch.ones_like(ids), torch.zeros_like(ids)
last[:, -1] = 1
assert (gu.completion_scores(policy.model, ids, ones, last).sq_norm_B > 0).all()
"""


@pytest.mark.slow
def test_scores_need_nothing_that_is_of_the_commands_alone():
    done = subprocess.run([sys.executable, "-c", SCORES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_without_its_packages_ends_in_a_line(words, tmp_path):
    verb, *arguments = words.format(core(tmp_path)[1]).split()
    program = REFUSE + "from grpo_ustat.__main__ import main; main()"
    command = [sys.executable, "-c", program, verb, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "", done.stderr
    extra = "logs" if verb == "convert" else "cli"
    assert re.fullmatch(
        rf"grpo-ustat {verb} needs [\w-]+: pip install -e '\.\[{extra}\]'\n", done.stderr
    )
