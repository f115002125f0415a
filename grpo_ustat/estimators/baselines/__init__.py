r"""Baselines: functions that turn a group's rewards into advantages.

All baselines have the same signature, so a new baseline requires no change of the callers:

    baseline(rewards_PG, context, **options) -> advantage_PG

The gradient estimate of a batch of P prompts with G completions each is always
`1/(P G) sum_i s_i advantage_i`, where the score s_i is the gradient of the log-probability of
completion i. A baseline needs no access to the model, because advantages depend only on rewards
and on the context. A baseline does all centring and scaling; advantages are not normalised again
later. Baselines are pure functions and compute in float64. Their options are keyword arguments
with defaults. The decorator of a built-in baseline declares everything else that the command line
and the studies need, for example the smallest group size; see `registry.baseline`.

The modules use the following symbols. For completion i: advantage A_i, reward r_i (z in moments),
length L_i in tokens, score s_i and squared score norm q_i. For a group: mean reward rbar. For a
prompt x: expected reward V(x), std of the rewards sigma(x), and g(x), the gradient of V(x).
"""

from grpo_ustat.estimators.baselines.base import OF_THE_BATCH, Baseline, UnfitRewards
from grpo_ustat.estimators.baselines.batch import (
    batch_std,
    beta,
    james_stein,
    length_weighted,
    reinforce_pp,
    reinforce_pp_baseline,
)
from grpo_ustat.estimators.baselines.group import (
    group_mean,
    group_std,
    group_std_jackknife,
    leave_one_out,
    leave_one_out_std,
    maxrl,
    opo,
    pods,
    quantile,
)
from grpo_ustat.estimators.baselines.prompt_only import (
    best_constant,
    constant,
    none,
    optimal,
    oracle,
    remax,
)
from grpo_ustat.estimators.baselines.registry import (
    BASELINES,
    PLUGIN_GROUP,
    advantages,
    baseline,
    check_options,
    check_shape,
    plugin_baselines,
)
from grpo_ustat.estimators.baselines.several import gdpo, weighted_sum
from grpo_ustat.estimators.baselines.stateful import (
    add_to_history,
    critic,
    ebpo,
    running_mean,
    running_update,
)

__all__ = [
    "BASELINES",
    "OF_THE_BATCH",
    "PLUGIN_GROUP",
    "Baseline",
    "UnfitRewards",
    "add_to_history",
    "advantages",
    "batch_std",
    "best_constant",
    "beta",
    "check_options",
    "check_shape",
    "constant",
    "critic",
    "ebpo",
    "gdpo",
    "group_mean",
    "group_std",
    "group_std_jackknife",
    "james_stein",
    "leave_one_out",
    "leave_one_out_std",
    "length_weighted",
    "maxrl",
    "none",
    "opo",
    "optimal",
    "oracle",
    "plugin_baselines",
    "pods",
    "quantile",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "baseline",
    "running_mean",
    "running_update",
    "weighted_sum",
]
