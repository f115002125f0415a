"""Two prompts, two tokens of two: small enough to walk over all groups."""

from __future__ import annotations

import numpy as np

from grpo_ustat.gap.offpolicy import Setting
from grpo_ustat.gap.sequences import SequencePolicy

LENGTH, SIZE, GROUP, BETA = 2, 2, 3, 0.3


def small_setting(rng: np.random.Generator) -> Setting:
    old = SequencePolicy(rng.normal(size=(LENGTH, SIZE, SIZE)), rng.normal(size=(2, SIZE)) / 2)
    reference = old.at(old.theta_D + rng.normal(size=8) / 2)
    return Setting(old, reference, rng.random((2, 4)), BETA, 1, GROUP)
