"""Two prompts, two tokens of two: small enough to walk over all groups."""

from __future__ import annotations

import numpy as np

from grpo_ustat.gap.algorithm2 import Setting
from grpo_ustat.gap.sequences import SequencePolicy

LENGTH, SIZE, GROUP, BETA = 2, 2, 3, 0.3


def small_setting(rng: np.random.Generator) -> Setting:
    old = SequencePolicy(rng.normal(size=(LENGTH, SIZE, SIZE)), rng.normal(size=(2, SIZE)) / 2)
    reference = old.at(old.theta_D + rng.normal(size=8) / 2)
    return Setting(old, reference, np.array([[0.0, 1, 1, 0], [1, 0, 0, 0]]), BETA, 1, GROUP)


def token_kl_P(policy, reference, prefix_PY):
    """`sum_t E KL(reference(. | x, y_<t) || policy(. | x, y_<t))`, prefixes of a given law."""
    log_PYLV = np.log(reference.next_PYLV) - np.log(policy.next_PYLV)
    return (prefix_PY * (reference.next_PYLV * log_PYLV).sum(axis=(2, 3))).sum(axis=1)
