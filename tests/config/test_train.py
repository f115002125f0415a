"""What a training run refuses before it starts, in one line that names values and fix."""

from __future__ import annotations

import pytest
from commands import compose, run
from slow_cases import slow_after

from grpo_ustat.config.identity import drop_neutral_keys, folder_name
from grpo_ustat.config.objective import OBJECTIVES
from grpo_ustat.config.presets import PRESETS as SHIPPED
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.row_weights import RowFilter

REFUSED = {
    "algorithm1 has no ratio": (
        ["objective.importance_sampling_level=token"],
        r"no ratio and no penalty, but objective.importance_sampling_level=token: use objective=gr",
    ),
    "algorithm1 has one update": (
        ["objective.num_iterations=2"], "but objective.num_iterations=2: use objective=grpo",
    ),
    "several updates without a ratio": (
        ["objective=grpo", "objective.importance_sampling_level=none"],
        "updates of 64 of budget.rollouts=256 completions.*needs a ratio: use "
        "objective.importance_sampling_level=token",
    ),
    "k1 in the loss": (
        ["objective=grpo", "objective.kl_estimator=k1"],
        "k1 in the loss has a gradient of mean zero on-policy",
    ),
    "k3 in the reward": (
        ["objective=grpo", "objective.kl_in=reward"], "kl_estimator=k3 in the reward.*use k1",
    ),
    "a coefficient without a penalty": (
        ["objective=grpo", "objective.kl_estimator=null", "objective.kl_in=null"],
        "objective.beta=0.04 without a penalty",
    ),
    "clipping without a ratio": (
        ["objective=grpo", "objective.importance_sampling_level=none",
         "objective.num_minibatches=1", "objective.epsilon=0.2", "objective.epsilon_high=0.2"],
        "epsilon=0.2 clips a ratio, and importance_sampling_level=none has none",
    ),
    "one bound": (
        ["objective=grpo", "objective.epsilon=0.2"], "epsilon=0.2 epsilon_high=None: give both",
    ),
    "a sequence ratio counted per token": (
        ["objective=gspo", "objective.loss_type=dapo"], "once per token: use loss_type=grpo",
    ),
    "minibatches of broken groups": (
        ["objective=grpo", "objective.minibatch_size=12"],
        "minibatch_size=12 must be a multiple of group_size=8",
    ),
    "minibatches of broken groups by their number": (
        ["objective=dapo", "group_size=64"],
        r"num_minibatches=16 does not divide the 4 prompts of a step \(budget.rollouts=256 / "
        r"group_size=64\): use objective.num_minibatches=4",
    ),
    "no minibatch": (["objective.num_minibatches=0"], "objective.num_minibatches=0"),
    "a second pass where unbiasedness is claimed": (
        ["objective=whole_sequence", "objective.num_iterations=2"],
        "num_iterations=2: a second pass over the same completions is biased",
    ),
    "an unknown loss": (["objective=grpo", "objective.loss_type=bnp"], "unknown objective.loss_"),
    "micro-batches of no size": (
        ["objective=grpo", "objective.loss_type=bnpo"],
        "loss_type=bnpo with micro_batch_size=None: bnpo alone .* use objective.micro_batch_size=8",
    ),
    "micro-batches of another loss": (
        ["objective=trl_dapo", "objective.micro_batch_size=4"],
        "loss_type=dapo with micro_batch_size=4: bnpo alone .* use micro_batch_size=null",
    ),
    "broken micro-batches": (
        ["objective=trl_bnpo", "objective.micro_batch_size=12"],
        "micro_batch_size=12 does not divide the 256 completions of an update: use "
        "objective.micro_batch_size=8",
    ),
    "clipping of a smooth weight": (
        ["objective=trl_sapo", "objective.epsilon=0.2", "objective.epsilon_high=0.2"],
        "epsilon_high=0.2 with loss_type=sapo, which clips no ratio: use epsilon=null",
    ),
    "a cut below the ratio 1": (
        ["objective=trl_cispo", "objective.epsilon_high=0.2"],
        "epsilon=None epsilon_high=0.2 with loss_type=cispo, .* use epsilon=null epsilon_high=5",
    ),
    "cispo's lower bound": (
        ["objective=trl_cispo", "objective.epsilon=0.2"], "epsilon=0.2 epsilon_high=5.0 with loss_",
    ),
    "luspo of tokens": (
        ["objective=trl_luspo", "objective.importance_sampling_level=token"],
        "loss_type=luspo with importance_sampling_level=token: its ratio is that of level sequence",
    ),
    "cispo of a sequence": (
        ["objective=trl_cispo", "objective.importance_sampling_level=sequence"],
        "level token: use objective.importance_sampling_level=token",
    ),
    "more than all tokens": (
        ["objective=trl_dapo", "objective.top_entropy_quantile=1.5"],
        "top_entropy_quantile=1.5 is a share: use one between 0 and 1",
    ),
    "some tokens of a sequence's ratio": (
        ["objective=trl_gspo", "objective.top_entropy_quantile=0.2"],
        "top_entropy_quantile=0.2 with importance_sampling_level=sequence, whose ratio is of all",
    ),
    "a bonus for some tokens": (
        ["objective=trl_dapo", "objective.top_entropy_quantile=0.2", "objective.entropy_coef=0.1"],
        "top_entropy_quantile=0.2 with entropy_coef=0.1: a bonus for some tokens alone",
    ),
    "more than all reward variance": (
        ["objective=trl_dapo", "objective.reward_variance_share=1.5"],
        "reward_variance_share=1.5 is a share of the update's reward variance: use one above 0",
    ),
    "groups drawn anew": (
        ["objective=dapo", "objective.zero_variance_groups=replace"],
        "zero_variance_groups=replace: train samples a batch once .* use "
        "objective.zero_variance_groups=drop",
    ),
    "variance of groups of one": (
        ["objective=trl_dapo", "objective.zero_variance_groups=drop", "group_size=1",
         "baseline=none"],
        "zero_variance_groups=drop reward_variance_share=1.0 with group_size=1, whose groups",
    ),
    "micro-batches of rows that count": (
        ["objective=trl_bnpo", "objective.advantage_threshold=0.1"],
        "loss_type=bnpo with zero_variance_groups=keep .* advantage_threshold=0.1: .* use "
        "loss_type=dapo",
    ),
    "another word for dropping": (
        ["objective=dapo", "objective.zero_variance_groups=remove"],
        "unknown objective.zero_variance_groups",
    ),
    "algorithm1 of some rows": (
        ["objective.zero_variance_groups=drop"],
        "no penalty, but objective.zero_variance_groups=drop: use objective=grpo",
    ),
    "algorithm1 of some tokens": (
        ["objective.mask_truncated_completions=true"],
        "no penalty, but objective.mask_truncated_completions=True: use objective=grpo",
    ),
    "a negative coefficient": (["objective=grpo", "objective.beta=-1"], "beta=-1.0 must be 0 or"),
    "warm-up of nothing": (
        ["schedule.warmup_steps=5"], "warmup_steps=5 with lr_scheduler_type=constant has no effect",
    ),
    "half an adapter": (["lora.r=8"], "lora.r=8 needs lora_alpha and target_modules"),
    "options of no adapter": (["lora.lora_alpha=8"], "lora.lora_alpha without adapters"),
    "two precisions": (["bf16=true", "model.dtype=float64"], "bf16=true computes in bfloat16"),
    "vLLM's options": (["rollout.max_model_len=99"], "rollout.max_model_len is vLLM's"),
    "a monitor of pairs": (
        ["monitor.gradient_mse_every=1", "group_size=2"], "C3 needs at least 3 completions",
    ),
    "no evaluation": (["eval.decoding=[]"], "evaluates nothing"),
    "an unknown decoding": (["eval.decoding=[beam]"], "unknown eval.decoding 'beam'"),
    "half precision": (["model.dtype=float16"], "float16 in training: AdamW's steps underflow"),
    "samples that nobody draws": (
        ["eval.decoding=[greedy]", "eval.num_generations=4"], "num_generations=4 samples, but",
    ),
    "no norm": (["max_grad_norm=0"], "max_grad_norm=0.0 must be above 0"),
}  # fmt: skip


@pytest.mark.parametrize("overrides, message", slow_after(10, REFUSED.values()), ids=REFUSED)
def test_what_means_nothing_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        compose("train", *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["objective=grpo", "objective.beta=0", "objective.num_iterations=1"],
        ["objective=whole_sequence", "objective.beta=0.1", "objective.kl_estimator=k1",
         "objective.kl_in=reward"],
        ["objective=dapo", "objective.minibatch_size=64", "baseline=leave_one_out"],
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
        assert objective.minibatch_size is None and objective.entropy_coef == 0
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


def test_a_number_of_minibatches_counts_where_their_size_is_not_set():
    sized = {"minibatch_size": 8, "num_minibatches": 4}
    assert drop_neutral_keys({"objective": sized}) == {"objective": {"minibatch_size": 8}}
    assert folder_name(compose("train", "objective=grpo")) != folder_name(
        compose("train", "objective=grpo", "objective.num_minibatches=1")
    )


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
    assert code == 2 and "unknown key num_generations: write group_size=8" in err
