"""Which G a study recommends: sentences and commands from numbers worked by hand."""

from __future__ import annotations

import copy
import shlex
from dataclasses import asdict

import numpy as np
import pytest
from commands import compose

from grpo_ustat.report.decision import (
    allocation_sentence,
    decision_sentence,
    dynamic_sampling_sentence,
    group_size_costs,
    interval_note,
    next_step,
    noise_sentence,
    proxies_sentence,
    rule_sizes_sentence,
    training_noise_sentence,
)

# n MSE = G + 2 + 9/(G-1): G* = 4, and 13, 9, 11.286, 18.6 at G = 2, 4, 8, 16
RESULT = {
    "scaling": {"c1": 1.0, "c2": 2.0, "c3": 9.0, "gstar": 4.0, "gstar_low": 3.5,
                "gstar_high": 4.6, "covariance": (1e-4 * np.eye(3)).tolist(), "dof": 99.0},
    "assumption2": {"corr": -0.5},
    "curves": [{"interval": "completions"}],
    "questions": 100, "pool_completions": 8, "summary": "No reward. WARNING: cut.",
}  # fmt: skip


def changed(**scaling):
    result = copy.deepcopy(RESULT)
    result["scaling"] |= scaling
    return result


def test_a_decided_study_names_the_best_size_and_what_its_neighbours_cost():
    """At G = 2 the contrast has the length .2953, so the half-width is 2.485 * .01 * .2953."""
    assert decision_sentence(RESULT) == (
        "Best G is about 4.0 [3.5, 4.6] for any number of rollouts. At n = 256: G = 4, 64 prompts. "
        "G = 2 costs +44 % error [+43 %, +46 %], G = 8 costs +25 % [+25 %, +26 %], "
        "G = 16 costs +107 % [+105 %, +109 %]."
    )


@pytest.mark.parametrize(
    "rollouts, best, sizes",
    [
        (256, 4, [2, 4, 8, 16, 32, 64, 128, 256]),
        (6, 3, [2, 3, 6]),
        (7, 7, [7]),
        (10, 5, [2, 5, 10]),
    ],
)
def test_only_sizes_that_divide_the_rollouts_are_admissible(rollouts, best, sizes):
    """At n = 10 the errors of G = 2 and 5 are 13 and 9.25."""
    costs = group_size_costs(RESULT["scaling"], rollouts)
    assert (costs.best, list(costs.extra)) == (best, sizes)
    assert all(extra.estimate >= 0 for extra in costs.extra.values())


def test_one_rollout_has_no_group():
    with pytest.raises(ValueError, match="rollouts=1: a group needs at least 2"):
        group_size_costs(RESULT["scaling"], 1)


def test_what_the_data_cannot_tell_apart_is_not_called_a_cost():
    wide = changed(covariance=np.diag([0.5, 0.01, 0.01]).tolist())
    assert "G = 8 is not significantly different (+25 % [-" in decision_sentence(wide)


def test_a_result_of_an_earlier_version_has_costs_without_intervals():
    result = changed()
    del result["scaling"]["covariance"], result["scaling"]["dof"]
    assert "G = 2 costs +44 % error, G = 8 costs +25 %, G = 16" in decision_sentence(result)


@pytest.mark.parametrize(
    "scaling, sentence",
    [
        ({"gstar_high": None, "covariance": np.diag([0.25, 1.0, 0.81]).tolist(), "dof": 1e9},
         "Best G is at least 3.5 for any number of rollouts; for an upper end about 97 more "
         "prompts are needed (now 100)."),
        ({"gstar_high": None, "gstar_low": 1.0, "c1": -1.0},
         "Not enough data for a best G: more prompts are needed (now 100), how many cannot be said "
         "yet."),
        ({"gstar_high": None, "gstar_low": None, "covariance": np.diag([9.0, 1, 1]).tolist()},
         "Not enough data for a best G: about 7100 more prompts are needed (now 100)."),
    ],
)  # fmt: skip
def test_where_the_data_do_not_say_it_is_said_how_much_is_missing(scaling, sentence):
    assert decision_sentence(changed(**scaling)) == sentence


def test_without_any_signal_the_studys_own_words_are_the_answer():
    result = RESULT | {"assumption2": {"corr": None}}
    assert decision_sentence(result) == "No reward."


def test_intervals_say_what_they_speak_of():
    assert "conditional on these 100 questions" in interval_note(RESULT)
    over = RESULT | {"curves": [{"interval": "questions"}]}
    assert "from these 100 to new questions" in interval_note(over)


UNDECIDED = changed(gstar_high=None, covariance=np.diag([0.25, 1.0, 0.81]).tolist(), dof=1e9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "result, overrides, command",
    [
        (RESULT, ("model=tiny",),
         "train model=tiny dataset=arithmetic prompt=bare budget.rollouts=256 group_size=4"),
        (RESULT, ("model=tiny_base", "dataset=plus_one", "prompt=few_shot", "temperature=0.7"),
         "train model=tiny_base dataset=plus_one prompt=few_shot temperature=0.7 "
         "budget.rollouts=64 group_size=4"),
        (RESULT, ("model=tiny_base", "dataset=plus_one", "prompt=few_shot",
                  "max_completion_length=4"),
         "train model=tiny_base dataset=plus_one prompt=few_shot max_completion_length=4 "
         "budget.rollouts=64 group_size=4"),
        (UNDECIDED, (), "mse model=tiny_base dataset=arithmetic prompt=bare study.questions=197"),
        (UNDECIDED, ("model=tiny", "dataset.study_size=100", "study.questions=100"),
         "mse model=tiny dataset=arithmetic dataset.study_size=100 prompt=bare "
         "budget.pool_completions=16"),
        (RESULT, ("model=hub", "model.model_name_or_path=org/a"),
         "train model=org/a dataset=arithmetic prompt=bare "
         "budget.rollouts=256 group_size=4"),
    ],
)  # fmt: skip
def test_the_next_command_is_of_the_same_policy_and_can_be_typed(result, overrides, command):
    config = asdict(compose("mse", *overrides))
    step = next_step(result, config)
    assert step == f"grpo-ustat {command}"
    _, verb, *words = step.split()
    composed = compose(verb, *words)
    assert composed.model.model_name_or_path == config["model"]["model_name_or_path"]
    assert composed.temperature == config["temperature"]
    assert composed.max_completion_length == config["max_completion_length"]
    assert asdict(composed.prompt) == config["prompt"]


def test_the_next_command_has_the_same_reward_functions():
    """Otherwise it would be about another reward: the task's alone."""
    rewards = ("reward_funcs=[task,brevity]", "reward_weights=[1,0.5]")
    step = next_step(RESULT, asdict(compose("mse", *rewards)))
    _, verb, *words = shlex.split(step)
    composed = compose(verb, *words)
    assert (composed.reward_funcs, composed.reward_weights) == (["task", "brevity"], [1.0, 0.5])
    assert "'reward_funcs=[task,brevity]'" in step  # as one types it
    before = {k: v for k, v in asdict(compose("mse")).items() if not k.startswith("reward_")}
    assert "reward" not in next_step(RESULT, before)


def test_a_prompt_of_ones_own_is_quoted_for_hydra_and_for_the_shell():
    own = compose("mse", "prompt=plain", "prompt.template='Q: {question}, it is '")
    step = next_step(RESULT, asdict(own))
    _, verb, *words = shlex.split(step)
    assert compose(verb, *words).prompt.template == "Q: {question}, it is "


def test_rollouts_of_another_framework_are_not_trained_on_here():
    config = asdict(compose("mse")) | {"pool": "logged/rows.parquet"}
    assert next_step(RESULT, config) == (
        "train with num_generations=4 where these rollouts were logged"
    )
    assert next_step(UNDECIDED, config) == "log more prompts, and import them in the same way"


NOISE = {
    "curve": [
        {"group_size": size, "rollouts": scale, "rollouts_low": low, "rollouts_high": high,
         "prompt_share": 0.25, "prompt_share_low": 0.2, "prompt_share_high": 0.3}
        for size, scale, low, high in ((4, 768, 512, 1024), (8, 1000, 100, None), (64, 9, 5, 20))
    ]
}  # fmt: skip


@pytest.mark.parametrize(
    "size, sentence",
    [
        (None, "Noise: at G = 4 the noise scale n_c is 768 rollouts [512, 1024], 25 % of it "
         "[20 %, 30 %] from prompts. A step of 256 rollouts is 75 % noise [67 %, 80 %]: n is "
         "below n_c, twice as many make a step gain 60 % more [50 %, 67 %]."),
        (8, "Noise: at G = 8 the noise scale n_c is 1000 rollouts [100, infinity), 25 % of it "
         "[20 %, 30 %] from prompts. A step of 256 rollouts is 80 % noise [28 %, 100 %]; n is not "
         "significantly different from n_c."),
        (50, "Noise: at G = 64 the noise scale n_c is 9 rollouts [5, 20], 25 % of it [20 %, 30 %] "
         "from prompts. A step of 256 rollouts is 3 % noise [2 %, 7 %]: half as many rollouts "
         "would lose 3 % of what a step gains [2 %, 7 %]."),
    ],
)  # fmt: skip
def test_the_noise_of_a_step_is_said_with_its_verdict(size, sentence):
    assert noise_sentence(RESULT | {"noise": NOISE}, 256, size) == sentence


def test_without_a_noise_scale_nothing_is_said():
    assert noise_sentence(RESULT) == ""
    assert noise_sentence(RESULT | {"noise": NOISE, "assumption2": {"corr": None}}) == ""
    unknown = {"group_size": 4, "rollouts": None, "rollouts_low": 400, "rollouts_high": None}
    assert noise_sentence(RESULT | {"noise": {"curve": [unknown]}}) == (
        "Noise: at G = 4 the noise scale n_c is not known: [400, infinity) rollouts, since "
        "||grad J||^2 is not significantly above 0. Of a step of 256 rollouts [61 %, 100 %] is "
        "noise: n is below n_c."
    )


def test_the_noise_of_a_training_run_is_that_of_its_second_half():
    names = ("c1", "c2", "c3", "grad_sq")
    rows = [
        {"step": step} | {f"monitor/{x}": v for x, v in zip(names, values, strict=True)}
        for step, values in enumerate([(9, 9, 9, 9)] * 3 + [(1, 2, 9, 0.1)] * 4)
    ]
    text = training_noise_sentence(rows, 4, 90)
    assert "n_c is 90 rollouts [90, 90], 44 % of it" in text
    assert text.endswith("Steps 3 to 6 together.")
    assert training_noise_sentence(rows[:3], 4, 90) == ""


def dynamic(**changes):
    row = {"group_size": 8, "kept": 0.5, "kept_low": 0.4, "kept_high": 0.6}
    row |= {"generated": 2.0, "generated_low": 1.67, "generated_high": 2.5}
    row |= {"break_even": 0.01, "break_even_low": 0.005, "break_even_high": 0.02}
    return RESULT | {"dynamic_sampling": [row | {"group_size": 2}, row | changes]}


def test_dynamic_sampling_is_said_with_its_break_even():
    assert dynamic_sampling_sentence(dynamic()) == (
        "Dynamic sampling at G = 8 generates 2.00 groups [1.67, 2.50] for a kept one; its gradient "
        "has the right direction and 2.00 times the length. It beats leaving zero-variance "
        "groups out, without new ones, only while it throws away less than 2 % of its kept groups."
    )
    wide = dynamic(break_even_high=1.6)
    assert dynamic_sampling_sentence(wide).endswith("would be better is not known.")
    unknown = dynamic(break_even=None, break_even_low=None, break_even_high=None)
    assert dynamic_sampling_sentence(unknown).endswith("2.00 times the length.")
    assert dynamic_sampling_sentence(RESULT) == ""


def proxy(units="prompts", proxy="p(1-p)", target="the noise of a group of 8", **ends):
    ends = {"correlation": 0.5, "correlation_low": 0.25, "correlation_high": 0.75} | ends
    return {"units": units, "proxy": proxy, "target": target} | ends


def test_proxies_are_said_with_what_is_significant():
    q = "the squared score norm"
    rows = [
        proxy(),
        proxy(proxy="mean length"),
        proxy("completions", "length", q),
        proxy("those of one prompt", "length", q, correlation=-0.1, correlation_low=-0.3),
    ]
    assert proxies_sentence(RESULT | {"proxies": rows}) == (
        "Proxies: p(1-p) and the noise of a group of 8 over prompts, corrected for attenuation: "
        "correlation 0.50 [0.25, 0.75]; length and the squared score norm over completions, by "
        "ranks: correlation 0.50 [0.25, 0.75]; over those of one prompt: correlation -0.10 "
        "[-0.30, 0.75] (not significantly different from 0)."
    )
    unknown = dict.fromkeys(("correlation", "correlation_low", "correlation_high"))
    text = proxies_sentence(RESULT | {"proxies": [proxy(**unknown), *rows[1:]]})
    assert "corrected for attenuation: not enough data for a correlation; length" in text
    assert proxies_sentence(RESULT) == proxies_sentence(RESULT | {"proxies": []}) == ""
    assert proxies_sentence(RESULT | {"proxies": rows, "assumption2": {"corr": None}}) == ""


def plan(name, change, low, high, in_sample=None, group_size=8):
    return {"plan": name, "group_size": group_size, "change": change, "change_low": low,
            "change_high": high, "in_sample": in_sample}  # fmt: skip


@pytest.mark.parametrize(
    "change, words",
    [
        ((-0.1, -0.2, -0.05), "-10 % [-20 %, -5 %], better than equal groups"),
        ((0.02, -0.01, 0.05), "+2 % [-1 %, +5 %], not significantly different from equal groups"),
        ((0.04, 0.02, 0.06), "+4 % [+2 %, +6 %], worse than equal groups"),
    ],
)
def test_unequal_groups_are_said_with_a_verdict(change, words):
    other_size = plan("measured noise", -0.9, -0.95, -0.8, -0.9, group_size=4)
    rows = [other_size, plan("measured noise", 0.2, 0.1, 0.3, -0.06), plan("p(1-p)", *change)]
    rows.append(plan("unknown", None, None, None))
    assert allocation_sentence(RESULT | {"allocation": rows}) == (
        "Unequal groups of 8 on average: of 2 plans from one half of the pool, judged on the "
        f"other, the best (p(1-p)) changes the error by {words}; in sample the best sizes would "
        "change it by -6 %."
    )
    only = RESULT | {"allocation": [plan("p(1-p)", *change), plan("measured noise", *3 * [None])]}
    assert allocation_sentence(only).endswith(f"changes the error by {words}.")  # none in sample
    assert allocation_sentence(RESULT) == allocation_sentence(RESULT | {"allocation": []}) == ""


def test_the_best_sizes_of_rules_are_said_with_whether_they_grow():
    sizes = [{"n": n, "group_size": g, "alike": [g]} for n, g in ((64, 4), (65536, 32))]
    rules = [
        {"baseline": "group_std", "target": "limit g/sigma", "measure": m, "sizes": sizes,
         "grows": m == "mse"}
        for m in ("mse", "best_scalar")
    ]  # fmt: skip
    assert rule_sizes_sentence(changed(rules=rules)) == (
        "Best of the measured G by rule: group_std against the limit g/sigma: 4 at n = 64, 32 at "
        "n = 65536."
    )
    unsure = changed(rules=[rules[0] | {"grows": False}])
    assert rule_sizes_sentence(unsure).endswith("32 at n = 65536 (growth not shown).")
    assert rule_sizes_sentence(RESULT) == ""
