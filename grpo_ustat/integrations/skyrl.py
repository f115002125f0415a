"""SkyRL with our baselines as advantage estimators `grpo_ustat_NAME`: see docs/skyrl.md.

`python -m grpo_ustat.integrations.skyrl` takes what
`python -m skyrl.train.entrypoints.main_base` takes. An entry point of one's own imports this module
first. Names that SkyRL has already, from another process of the same run, stay as they are.
"""

from __future__ import annotations

from skyrl.backends.skyrl_train.utils.ppo_utils import (  # pyright: ignore[reportMissingImports]
    AdvantageEstimatorRegistry,
    register_advantage_estimator,
)

from grpo_ustat.integrations.rows import PREFIX, REWARD_ONLY, estimator

for _rule in REWARD_ONLY:
    if PREFIX + _rule not in AdvantageEstimatorRegistry.list_available():
        register_advantage_estimator(PREFIX + _rule)(estimator(_rule))

if __name__ == "__main__":
    from skyrl.train.entrypoints.main_base import main  # pyright: ignore[reportMissingImports]

    main()
