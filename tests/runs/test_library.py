"""The names of the package: loaded late, the same objects as in their rooms; run folders read."""

from __future__ import annotations

import subprocess
import sys

import pytest
from folders import studied, trained

import grpo_ustat as gu
from grpo_ustat.estimators.baselines import Baseline
from grpo_ustat.estimators.gradient_norms import noise_scale_from_norms
from grpo_ustat.estimators.groups import scaling_from_arrays
from grpo_ustat.policy.scores import completion_scores
from grpo_ustat.runs.library import load_run, read_curves


def test_the_names_are_those_of_the_rooms():
    assert (gu.Baseline, gu.scaling_from_arrays) == (Baseline, scaling_from_arrays)
    assert gu.noise_scale_from_norms is noise_scale_from_norms
    assert (gu.completion_scores, gu.load_run) == (completion_scores, load_run)
    assert gu.read_curves is read_curves and set(gu.__all__) <= set(dir(gu))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        gu.nothing  # noqa: B018


@pytest.mark.slow(minutes=0.02)
def test_importing_the_package_loads_nothing_heavy():
    code = (
        "import sys, grpo_ustat as gu; gu.scaling_from_arrays; gu.Baseline; "
        "assert not {'torch', 'transformers', 'hydra', 'pandas', 'pyarrow'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_a_run_is_loaded_whole(tmp_path):
    trained(tmp_path / "run", 4, 0, {0: 0.2, 8: 0.4})
    run = gu.load_run(str(tmp_path / "run"))
    assert run.command == "train" and run.config["group_size"] == 4
    assert run.result is not None and run.evals[-1]["mean_reward"] == 0.4
    with pytest.raises(
        FileNotFoundError, match="is not a run folder: it has no .hydra/config.yaml"
    ):
        gu.load_run(tmp_path)


def test_curves_are_a_table(tmp_path):
    folder = studied(tmp_path / "study", "tiny", {("none", 2): 1.5, ("oracle", 4): 0.5})
    table = gu.read_curves(folder)
    assert table["mse"].tolist() == [1.5, 0.5] and table["group_size"].tolist() == [2, 4]
    assert table["replicates"].isna().all()
    with pytest.raises(FileNotFoundError, match="is not a finished study of mse"):
        gu.read_curves(tmp_path / "nothing")
