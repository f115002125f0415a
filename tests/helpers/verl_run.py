"""Gradients that the living verl makes of its baselines and losses, at the log-probabilities.

    python tests/helpers/verl_run.py > tests/data/verl_gradients.json
    python tests/helpers/verl_run.py tests/data/verl_gradients.json

records them and compares those of a record with the installed verl's, as every night does. At every
push tests/docs/test_my_advantages.py compares the record with our advantages, and
tests/train/test_objective.py those of its losses with the presets of the same names.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
ORDER = [4, 0, 8, 3, 1, 7, 6, 2, 5]
UIDS = np.array([f"uid {row // 3}" for row in ORDER], dtype=object)
LENGTHS = np.array([1, 4, 2, 3, 4, 1, 2, 4, 3])
REWARDS_PG = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [1.0, 0.0, 1.0]])
THEIRS = {  # estimators of verl that are baselines of ours, with these options
    "grpo": ("group_std", {"epsilon": 1e-6}),
    "rloo": ("leave_one_out", {}),
}
LOSSES = {  # presets of ours, by verl's settings where they are not its defaults
    "verl_token_mean": {},
    "verl_seq_mean_token_sum": {"loss_agg_mode": "seq-mean-token-sum"},
    "verl_seq_mean_token_mean": {"loss_agg_mode": "seq-mean-token-mean"},
    "verl_seq_mean_token_sum_norm": {
        "loss_agg_mode": "seq-mean-token-sum-norm", "norm_adv_by_std_in_grpo": False,
    },
}  # fmt: skip
CHANGES = np.linspace(-0.5, 0.5, 36).reshape(9, 4)  # of log-probabilities, in some ratios clipped


def batch():
    """Token rewards with the reward on the last token, and the mask, as verl pads them."""
    mask = torch.tensor((np.arange(4) < LENGTHS[:, None]).astype(np.int64))
    rewards = torch.zeros(9, 4)
    rewards[np.arange(9), LENGTHS - 1] = torch.tensor(REWARDS_PG.ravel()[ORDER], dtype=torch.float)
    return rewards, mask


def actor_of_the_page():
    """verl's configuration after the command of docs/verl.md."""
    from hydra import compose, initialize_config_module
    from readme import PAGES, commands

    words = next(w for w in commands(PAGES["docs/verl.md"]) if "verl.trainer.main_ppo" in w)
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", words[words.index("verl.trainer.main_ppo") + 1 :])
    actor = config.actor_rollout_ref.actor
    assert not (actor.use_kl_loss or actor.entropy_coeff or config.algorithm.use_kl_in_reward)
    assert actor.ppo_mini_batch_size == config.data.train_batch_size and actor.ppo_epochs == 1
    return actor, config.algorithm


def gradient_of(estimator, actor, config):
    """-dL/d(log-probabilities) of the batch, by verl's advantages and verl's loss."""
    from verl import DataProto
    from verl.trainer.ppo.core_algos import agg_loss
    from verl.trainer.ppo.ray_trainer import compute_advantage

    rewards, mask = batch()
    tensors = {"token_level_rewards": rewards, "response_mask": mask}
    data = DataProto.from_dict(tensors=tensors, non_tensors={"uid": UIDS})
    data = compute_advantage(data, adv_estimator=estimator, num_repeat=3, config=config)
    assert torch.equal(data.batch["returns"], data.batch["advantages"])
    logprobs = torch.zeros(9, 4, requires_grad=True)
    loss = -data.batch["advantages"] * logprobs
    agg_loss(loss, mask, actor.loss_agg_mode, global_batch_size=9).backward()
    return [[round(x, 8) for x in row] for row in (-logprobs.grad).tolist()]


def gradients_of_loss(settings):
    """The same with verl's `grpo` advantages and its clipped loss, at its defaults but for these
    settings: before the policy has moved by `CHANGES`, and after.
    """
    from hydra import compose, initialize_config_module
    from verl import DataProto
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
    from verl.trainer.ppo.ray_trainer import compute_advantage
    from verl.utils.config import omega_conf_to_dataclass

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", ["actor_rollout_ref.actor.use_dynamic_bsz=true"])
    default, algorithm = config.actor_rollout_ref.actor, config.algorithm
    assert not (default.use_kl_loss or default.entropy_coeff or algorithm.use_kl_in_reward)
    assert default.ppo_epochs == 1 and default.policy_loss.loss_mode == "vanilla"
    actor = omega_conf_to_dataclass(default)
    rewards, mask = batch()
    tensors = {"token_level_rewards": rewards, "response_mask": mask}
    data = compute_advantage(
        DataProto.from_dict(tensors=tensors, non_tensors={"uid": UIDS}), adv_estimator="grpo",
        norm_adv_by_std_in_grpo=settings.get(
            "norm_adv_by_std_in_grpo", algorithm.norm_adv_by_std_in_grpo
        ),
        config=algorithm,
    )  # fmt: skip
    actor.global_batch_info.update(
        dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=9,
        loss_scale_factor=actor.loss_scale_factor,
    )  # fmt: skip
    gradients = []
    for change in (0 * CHANGES, CHANGES):
        logprobs = torch.tensor(change, dtype=torch.float).requires_grad_()
        loss, _ = compute_policy_loss_vanilla(
            torch.zeros(9, 4), logprobs, data.batch["advantages"], mask,
            settings.get("loss_agg_mode", actor.loss_agg_mode), actor,
        )  # fmt: skip
        loss.backward()
        gradients += [[round(x, 8) for x in row] for row in (-logprobs.grad).tolist()]
    return gradients


def main():
    actor, algorithm = actor_of_the_page()
    gradients = {name: gradient_of(name, actor, algorithm) for name in THEIRS}
    losses = {name: gradients_of_loss(settings) for name, settings in LOSSES.items()}
    told = {
        "source": "python tests/helpers/verl_run.py",
        "verl": version("verl"),
        "torch": version("torch"),
    }
    if len(sys.argv) == 1:
        print(json.dumps(told | {"gradients": gradients, "losses": losses}))
        return
    record = json.loads(Path(sys.argv[1]).read_text())
    recorded, living = record["gradients"] | record["losses"], gradients | losses
    assert recorded.keys() == living.keys(), recorded.keys() ^ living.keys()
    for name, gradient in living.items():
        np.testing.assert_allclose(gradient, recorded[name], rtol=1e-5, atol=1e-7, err_msg=name)
    print(f"verl {version('verl')} makes the {len(recorded)} recorded gradients")


if __name__ == "__main__":
    main()
