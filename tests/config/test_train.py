"""What a training run refuses before it starts, in one line that names values and fix."""

from __future__ import annotations

import pytest
from commands import compose, run
from slow_cases import slow_after

from grpo_ustat.config.identity import drop_neutral_keys, folder_name
from grpo_ustat.config.objective import OBJECTIVES
from grpo_ustat.config.schema import ConfigError

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
    "an unknown loss": (["objective=grpo", "objective.loss_type=bnpo"], "unknown objective.loss_"),
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
}
FIELDS = ("num_iterations", "num_minibatches", "importance_sampling_level", "loss_type", "epsilon",
          "epsilon_high", "beta", "kl_estimator", "kl_in")  # fmt: skip


@pytest.mark.slow
def test_every_preset_has_the_values_of_its_source():
    """The sources stand beside the values in conf/objective/; no preset is left out here."""
    assert set(OBJECTIVES) == set(PRESETS)
    for name, values in PRESETS.items():
        objective = compose("train", f"objective={name}").objective
        assert dict(zip(FIELDS, values, strict=True)) == {f: getattr(objective, f) for f in FIELDS}
        assert objective.minibatch_size is None and objective.entropy_coef == 0


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
    assert code == 2 and "unknown key num_generations: here it is group_size" in err
