"""Our baselines as advantage estimators of verl, `grpo_ustat_NAME`: see docs/verl.md.

Imported by verl itself, under `VERL_USE_EXTERNAL_MODULES=grpo_ustat.integrations.verl`. Rules that
read more than rewards have a name as well, which says so: verl's own message names no other
estimator.
"""

from __future__ import annotations

from typing import NoReturn

from verl.trainer.ppo.core_algos import (  # pyright: ignore[reportMissingImports]
    register_adv_est,
)

from grpo_ustat.estimators.baselines import OURS
from grpo_ustat.integrations.rows import PREFIX, REWARD_ONLY, estimator, refusal


def _refuse(rule: str):
    def refuse(**_: object) -> NoReturn:
        raise ValueError(refusal(rule, PREFIX))

    return refuse


for _rule in OURS:
    _function = estimator(_rule) if _rule in REWARD_ONLY else _refuse(_rule)
    register_adv_est(PREFIX + _rule)(_function)
