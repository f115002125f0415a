"""Presets of objectives and folders of training runs; refusals are in golden/refused_train.txt."""

from __future__ import annotations

import pytest
from commands import compose, run

from grpo_ustat.config.identity import folder_name
from grpo_ustat.config.objective import OBJECTIVES
from grpo_ustat.config.presets import PRESETS as SHIPPED
from grpo_ustat.estimators.row_weights import RowFilter


@pytest.mark.parametrize(
    "overrides",
    [
        ["objective=grpo", "objective.beta=0", "objective.num_iterations=1"],
        ["objective=whole_sequence", "objective.beta=0.1", "objective.kl_estimator=k1",
         "objective.kl_in=reward"],
        ["objective=dapo", "objective.num_minibatches=4", "baseline=leave_one_out"],
        ["experiment=algorithm2"],
    ],
)  # fmt: skip
def test_what_means_something_is_not(overrides):
    compose("train", *overrides)


PRESETS = {  # passes, minibatches, level, divisor, clipping below and above, penalty and its place
    "algorithm1": (1, 1, "none", "sum", None, None, 0.0, None, None),
    "grpo": (1, 4, "token", "sum", None, None, 0.04, "k3", "loss"),
    "grpo_original": (1, 1, "token", "grpo", 0.2, 0.2, 0.04, "k3", "loss"),
    "dr_grpo": (1, 8, "token", "dr_grpo", 0.2, 0.2, 0.0, "k3", "loss"),
    "dapo": (1, 16, "token", "dapo", 0.2, 0.28, 0.0, "k3", "loss"),
    "gspo": (1, 4, "sequence", "grpo", 3e-4, 4e-4, 0.0, "k3", "loss"),
    "whole_sequence": (1, 4, "whole_sequence", "sum", None, None, 0.0, "k3", "loss"),
    "trl_dapo": (1, 1, "token", "dapo", 0.2, 0.2, 0.0, "k3", "loss"),
    "trl_grpo": (1, 1, "token", "grpo", 0.2, 0.2, 0.0, "k3", "loss"),
    "trl_dr_grpo": (1, 1, "token", "dr_grpo", 0.2, 0.2, 0.0, "k3", "loss"),
    "trl_bnpo": (1, 1, "token", "bnpo", 0.2, 0.2, 0.0, "k3", "loss"),
    "trl_gspo": (1, 1, "sequence", "grpo", 0.2, 0.2, 0.0, "k3", "loss"),
    "trl_cispo": (1, 1, "token", "cispo", None, 5.0, 0.0, "k3", "loss"),
    "trl_luspo": (1, 1, "sequence", "luspo", 0.2, 0.2, 0.0, "k3", "loss"),
    "trl_sapo": (1, 1, "token", "sapo", None, None, 0.0, "k3", "loss"),
    "trl_vespo": (1, 1, "whole_sequence", "vespo", None, None, 0.0, "k3", "loss"),
    "verl_token_mean": (1, 1, "token", "dapo", 0.2, 0.2, 0.0, "k3", "loss"),
    "verl_seq_mean_token_sum": (1, 1, "token", "sum", 0.2, 0.2, 0.0, "k3", "loss"),
    "verl_seq_mean_token_mean": (1, 1, "token", "grpo", 0.2, 0.2, 0.0, "k3", "loss"),
    "verl_seq_mean_token_sum_norm": (1, 1, "token", "dr_grpo", 0.2, 0.2, 0.0, "k3", "loss"),
}
FIELDS = ("num_iterations", "num_minibatches", "importance_sampling_level", "loss_type", "epsilon",
          "epsilon_high", "beta", "kl_estimator", "kl_in")  # fmt: skip


@pytest.mark.slow
def test_every_preset_has_the_values_of_its_source():
    """The sources stand beside the values in config/presets.py; no preset is left out here."""
    assert tuple(SHIPPED) == OBJECTIVES and set(OBJECTIVES) == set(PRESETS)
    for name, values in PRESETS.items():
        objective = compose("train", f"objective={name}").objective
        assert dict(zip(FIELDS, values, strict=True)) == {f: getattr(objective, f) for f in FIELDS}
        assert objective.entropy_coef == 0
        assert objective.micro_batch_size == (8 if name == "trl_bnpo" else None)
        assert objective.top_entropy_quantile == 1 and not objective.mask_truncated_completions
        assert objective.rows == RowFilter()


@pytest.mark.slow
def test_a_framework_s_preset_sets_the_advantage_and_a_typed_one_counts():
    """By the frameworks' own epsilon; without a std where their pages on Dr. GRPO have none."""
    papers = [name for name in PRESETS if name.split("_")[0] not in ("trl", "verl")]
    for name in PRESETS:
        epsilon = 1e-6 if name.startswith("verl") else 1e-4
        wanted = ("group_std", {"epsilon": epsilon})
        if name in ("trl_dr_grpo", "verl_seq_mean_token_sum_norm"):
            wanted = ("group_mean", {})
        if name in papers:
            wanted = ("leave_one_out", {})  # the default of train
        baseline = compose("train", f"objective={name}").baseline
        assert (baseline.name, baseline.options) == wanted
        for words in ([f"objective={name}", "baseline=opo"], ["baseline=opo", f"objective={name}"]):
            baseline = compose("train", *words).baseline
            assert (baseline.name, baseline.options) == ("opo", {})
    assert len(papers) == 7


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_preset_is_read_as_hydra_composes_it(name):
    """The same fields and the same rule; where it sets none, that of the command."""
    objective, baseline = SHIPPED[name].objective, SHIPPED[name].baseline
    for command in ("train", "mse"):
        config = compose(command, f"objective={name}")
        assert objective == config.objective
        assert (baseline or compose(command).baseline) == config.baseline


def test_algorithm_2_in_full():
    """Normalised advantages, ratios of tokens, K3, one pass in minibatches."""
    config = compose("train", "experiment=algorithm2")
    assert (config.baseline.name, config.objective.name) == ("group_std", "grpo")
    assert config.objective.num_iterations == 1 and config.objective.num_minibatches > 1


@pytest.mark.slow(minutes=0.02)
def test_an_end_of_the_learning_rate_belongs_to_the_run():
    linear = ["schedule=linear", "max_steps=10"]
    assert folder_name(compose("train", *linear)) != folder_name(
        compose("train", *linear, "max_steps=20")
    )
    assert folder_name(compose("train", "max_steps=10")) == folder_name(
        compose("train", "max_steps=20")
    )


@pytest.mark.slow(minutes=0.02)
def test_names_of_other_trainers_are_translated(tmp_path):
    code, _, err = run("train", "num_generations=8", cwd=tmp_path)
    assert code == 2 and "num_generations" in err and "group_size" in err
