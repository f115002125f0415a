"""Small training runs of an embedded policy, whole or up to their first batch."""

from __future__ import annotations

from commands import compose

from grpo_ustat.rollout.local import Sampling
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.train import trainer
from grpo_ustat.train.setup import set_up

SMALL = (
    "max_steps=4", "eval_steps=2", "save_steps=2", "budget.rollouts=16", "group_size=4",
    "dataset.test_size=10", "dataset.train_size=40", "max_completion_length=70",
    "rollout_batch_size=64", "model=tiny_base", "learning_rate=1e-3",
)  # fmt: skip


def config_of(*overrides):
    return compose("train", *SMALL, *overrides)


def fit(path, *overrides):
    config = config_of(*overrides)
    trainer.fit(config, RunFolder(path, config))
    return path


def first_batch(tmp_path, *overrides):
    config = config_of(*overrides)
    run = set_up(config, RunFolder(tmp_path, config))
    prompts = trainer.choose_prompts(config, run.train_prompts, 0)
    sampling = Sampling.of(config.sampler_options, "rollout")
    return run, trainer.sample_batch(run, prompts, config.group_size, sampling, 0)
