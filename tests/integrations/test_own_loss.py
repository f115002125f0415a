"""The loss of TRL's arguments, and what is said of its efficiency."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from prompt_pools import whole_pool
from trl_room import GRPOTrainer

from grpo_ustat.config.baseline import baseline_choice
from grpo_ustat.config.presets import PRESETS
from grpo_ustat.estimators.efficiency import RelativeEfficiency
from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.estimators.losses import loss_efficiencies
from grpo_ustat.estimators.row_weights import Loss
from grpo_ustat.integrations.trl.objective import (
    OwnLoss,
    described,
    loss_of,
    own_loss,
    rollouts_of,
    unmeasured,
    with_functions,
)

LONGEST = 44
MASK, SEQUENCE = {"mask_truncated_completions": True}, {"importance_sampling_level": "sequence"}
LOSSES = (  # TRL's arguments, the preset, and what differs from it
    ({}, "trl_dapo", {}, {}),
    (MASK, "trl_dapo", MASK, {}),
    ({"scale_rewards": "batch"}, "trl_dapo", {}, {"baseline": "batch_std"}),
    ({"scale_rewards": "none"}, "trl_dapo", {}, {"baseline": "group_mean"}),
    ({"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "none"}, "trl_dapo", {},
     {"baseline": "gdpo"}),
    ({"loss_type": "grpo"}, "trl_grpo", {}, {}),
    ({"loss_type": "grpo"} | SEQUENCE, "trl_gspo", {}, {}),
    ({"loss_type": "dr_grpo", "scale_rewards": "none"}, "trl_dr_grpo", {}, {}),
    ({"loss_type": "bnpo"} | MASK, "trl_bnpo", MASK, {}),
    ({"loss_type": "bnpo", "per_device_train_batch_size": 4}, "trl_bnpo", {"micro_batch_size": 4},
     {}),
    ({"loss_type": "cispo"}, "trl_cispo", {}, {}),
    ({"loss_type": "luspo"} | SEQUENCE, "trl_luspo", {}, {}),
    ({"loss_type": "sapo"}, "trl_sapo", {}, {}),
    ({"loss_type": "vespo"}, "trl_vespo", {}, {}),
)  # fmt: skip


def trains_with(**arguments):
    """A trainer with these arguments, others as TRL has them."""
    trainer = GRPOTrainer()
    for name, value in arguments.items():
        setattr(trainer.args, name, value)
    return trainer


@pytest.mark.parametrize("arguments, name, changes, baseline", LOSSES)
def test_arguments_of_trl_are_the_loss_of_the_preset(arguments, name, changes, baseline):
    """Whose row weights have TRL's recorded gradients, see tests/scripts/test_trl_case.py."""
    trainer = trains_with(max_completion_length=LONGEST, **arguments)
    objective, own_baseline = PRESETS[name].objective, PRESETS[name].baseline
    own_baseline = baseline_choice(baseline["baseline"]) if baseline else own_baseline
    wanted = replace(objective, **changes).loss(own_baseline, LONGEST)
    found = loss_of(trainer)
    assert unmeasured(trainer) is None
    assert replace(found, name=name) == wanted and found.options == wanted.options


class OwnLossTrainer(GRPOTrainer):
    """A trainer whose loss is not TRL's."""

    def _compute_loss(self, model, inputs):
        return 0.0


UNMEASURED = {
    "top_entropy_quantile=0.2 excludes tokens": {"top_entropy_quantile": 0.2},
    "entropy bonus": {"entropy_coef": 0.01},
    "adaptive": {"use_adaptive_entropy": True},
    "delta=0.9 clips every ratio": {"delta": 0.9},
    "loss_type=next is not a loss of TRL 1.16": {"loss_type": "next"},
    "scale_rewards=rank is not one of none, group, batch": {"scale_rewards": "rank"},
}


@pytest.mark.parametrize("words", UNMEASURED)
def test_what_a_pool_of_scores_does_not_tell_is_a_reason(words):
    reason = unmeasured(trains_with(**UNMEASURED[words]))
    assert reason is not None and words.replace("adaptive", "entropy bonus") in reason
    assert unmeasured(trains_with(delta=1.0, beta=0.04)) is None
    assert unmeasured(OwnLossTrainer()) == "OwnLossTrainer overrides _compute_loss"


def test_a_loss_is_described_with_what_is_left_out():
    assert described(trains_with()) == "dapo, std of the group"
    assert described(trains_with(loss_type="dr_grpo", scale_rewards="none")) == "dr_grpo, no std"
    trainer = trains_with(beta=0.04, **MASK)
    trainer.aux_loss_enabled = True
    assert described(trainer) == (
        "dapo, std of the group, truncated completions masked, without its penalty of beta = 0.04, "
        "without its load-balancing loss"
    )


def test_an_update_has_the_rows_of_all_ranks():
    """8 rows a pass, 2 passes an update, 3 ranks."""
    assert rollouts_of(GRPOTrainer(world=3)) == 48


def a_pool(groups, size=8, signal=2.0):
    """Scores along a common gradient, of which right answers have more."""
    rng = np.random.default_rng(8)
    rewards = (rng.random((groups, size)) < rng.beta(2, 2, (groups, 1))).astype(float)
    scores = rng.normal(size=(groups, size, 4))
    scores += signal * (rewards[..., None] - 0.5) * np.eye(4)[0]
    scores[rewards.min(axis=1) == rewards.max(axis=1)] = 0  # which a callback does not score
    return whole_pool(scores, rewards, rng.integers(1, 9, size=rewards.shape))


STD = {"epsilon": 1e-4}
DAPO = Loss("dapo", "group_std", STD, "dapo", 9)
GRPO = Loss("grpo", "group_std", STD, "grpo", 9)
PLAIN = Loss("dr_grpo", "group_mean", {}, "dr_grpo", 9)


def test_the_worth_is_that_of_a_study_of_the_same_groups():
    pool = a_pool(60)
    found = own_loss(pool, DAPO, 64, "dapo")
    (whole,) = (row.efficiency for row in loss_efficiencies(pool, [DAPO], [8], 64, 100, 0))
    assert found.decided and found.efficiency is not None
    assert found.efficiency.efficiency_same_g == pytest.approx(whole.efficiency_same_g, rel=1e-6)
    assert found.efficiency.direction == pytest.approx(whole.direction, rel=1e-6)
    assert found.cosine == pytest.approx([math.sqrt(x) for x in whole.direction], rel=1e-6)
    numbers = found.numbers()
    assert numbers["loss/relative_efficiency"] == pytest.approx(whole.efficiency_same_g.estimate)
    assert numbers.keys() == {"loss/relative_efficiency", "loss/cosine", "loss/noise"}


def test_a_loss_that_is_unbiased_up_to_a_constant():
    found = own_loss(a_pool(60), PLAIN, 64, "dr_grpo")
    assert found.unbiased
    assert found.efficiency.efficiency_same_g == pytest.approx((1, 1, 1))
    assert (
        "has relative efficiency 1.00 [1.00, 1.00] against the unbiased gradient. "
        "Its direction is unbiased." in found.line()
    )


def test_what_is_not_decided_is_said():
    few = own_loss(a_pool(40), DAPO, 128, "dapo, std of the group")
    assert few.line() == (
        "Your loss (dapo, std of the group): not decided yet; 48 groups are needed, but only "
        "40 were measured."
    )
    assert (few.numbers(), few.decided) == ({}, False)
    assert (
        "4 groups are needed, but only 3 were measured" in own_loss(a_pool(3), GRPO, 64, "").line()
    )
    assert own_loss(a_pool(8), GRPO, 4, "").reason == (
        "an update of 4 rollouts is not a multiple of num_generations=8"
    )
    weak = own_loss(a_pool(30, signal=0.0), GRPO, 64, "grpo")
    assert "30 groups do not determine the relative efficiency" in weak.line()
    assert "loss/relative_efficiency" not in weak.numbers() and math.isnan(weak.cosine.estimate)


def test_the_line_in_words():
    worth, square = Interval(0.981, 0.941, 1.019), Interval(0.98, 0.941, 1.0)
    efficiency = RelativeEfficiency(worth, worth, square, Interval(0.9, 0.8, 1.0))
    assert OwnLoss("dapo, std of the group", 64, 96, efficiency=efficiency).line() == (
        "Your loss (dapo, std of the group) has relative efficiency 0.98 [0.94, 1.02] against the "
        "unbiased gradient. The cosine between its expected update and this gradient is 0.99 "
        "[0.97, 1.00]."
    )


def test_several_rewards_are_compared_with_their_weighted_sum():
    """Groups whose sums are equal and whose functions differ have advantages as well."""
    pool = a_pool(122)
    second, third = (pool.lengths_PN < 5).astype(float), np.full(pool.rewards_PN.shape, np.nan)
    second[:2, 3:] = np.nan  # as TRL logs what a function returned None for
    pool = replace(pool, rewards_PNF=np.stack([pool.rewards_PN - second, second, third], axis=-1))
    assert own_loss(pool, Loss("grpo", "gdpo", STD, "grpo", 9), 64, "").efficiency is None
    pool = with_functions(pool, np.ones(3))
    assert pool.rewards_PNF.shape == (120, 8, 3)
    assert len(pool.gram_PNN) == len(pool.lengths_PN) == 120
    each = Loss("grpo", "gdpo", STD, "grpo", 9)
    words = described(trains_with(multi_objective_aggregation="normalize_then_sum"))
    found = own_loss(pool, each, 64, words)
    assert "(dapo, std of each reward) has relative efficiency" in found.line()
    assert "against the unbiased gradient of the rewards' weighted sum. The cos" in found.line()
