"""Which G a study recommends: sentences and commands from numbers worked by hand."""

from __future__ import annotations

import copy
import json
import math
import re
import shlex
import textwrap
from dataclasses import asdict, replace

import numpy as np
import pytest
from commands import compose
from folders import unsaved_study
from slow_cases import slow_after

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.group_size import NO_PRIOR
from grpo_ustat.estimators.scaling import ScalingLaw
from grpo_ustat.measurements.assumption2 import ASSUMPTION2
from grpo_ustat.measurements.group_size import (
    SCALING,
    Scaling,
    decision_sentence,
    extra_error_table,
    interval_note,
    law_tables,
    noise_sentence,
    study_answer,
)
from grpo_ustat.measurements.next_step import next_step
from grpo_ustat.mse.pool_store import draws_of
from grpo_ustat.pages.advice import noise_text
from grpo_ustat.pages.learning import training_noise_sentence
from grpo_ustat.runs.contents import content_of, record_of

# n MSE = G + 2 + 9/(G-1): G* = 4, and 13, 9, 11.286, 18.6 at G = 2, 4, 8, 16
RESULT = {
    "scaling": {"c1": 1.0, "c2": 2.0, "c3": 9.0, "gstar": 4.0, "gstar_low": 3.5,
                "gstar_high": 4.6, "covariance": (1e-4 * np.eye(3)).tolist(), "dof": 99.0},
    "assumption2": {"corr": -0.5, "corr_low": -0.6, "corr_high": -0.4, "av_minus_a0": -2.0,
                    "av_minus_a0_low": -3.0, "av_minus_a0_high": -1.0, "refuted": True,
                    "crossover_group_size": 3.0, "crossover_group_size_low": 2.5,
                    "crossover_group_size_high": 5.5},
    "policy": {"quantity": "accuracy"},
    "questions": 100, "pool_completions": 8, "summary": "No reward. WARNING: cut.",
}  # fmt: skip


LAW = ScalingLaw.stored(1.0, 2.0, 9.0, 1e-4 * np.eye(3), 99.0)


def changed(**scaling):
    result = copy.deepcopy(RESULT)
    result["scaling"] |= scaling
    if result["scaling"]["covariance"] is None:
        del result["scaling"]["covariance"], result["scaling"]["dof"]
    return result


def test_a_decided_study_names_the_best_size_and_what_its_neighbours_cost():
    """At the ends r of G = 2, 13 - 9 r is 2.485 x .01 sqrt((2 - 4 r)^2 + (1 - r)^2 + (1 - r/3)^2)
    from 0: 1.4340 and 1.4552.
    """
    assert decision_sentence(unsaved_study(RESULT), 256) == (
        "The best G is about 4.0 [3.5, 4.6]. At 256 rollouts per step, use G = 4: its error is "
        "within 5 % of the minimum. The error is 44 % [26 %, 54 %] larger at G = 2 and 25 % "
        "[18 %, 40 %] larger at G = 8."
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
    costs = LAW.costs(rollouts)
    assert (costs.best, list(costs.extra)) == (best, sizes)
    assert all(extra.estimate >= 0 for extra in costs.extra.values())


def test_one_rollout_has_no_group():
    with pytest.raises(ValueError, match="rollouts=1: a group needs at least 2"):
        LAW.costs(1)


@pytest.mark.parametrize(
    "rollouts, answer",
    [
        (64,
         "At 64 rollouts per step, use G = 4: its error is within 5 % of the minimum. The "
         "error is 44 % [26 %, 54 %] larger at G = 2 and 25 % [18 %, 40 %] larger at G = 8. "
         "The leave-one-out gradient of 64 rollouts is 92 % noise [89 %, 94 %]; at n = 770 "
         "it is half noise. Doubling the rollouts gives up to 1.9 times the progress per step."),
        (10,
         "At 10 rollouts per step, use G = 5: its error is within 5 % of the minimum. The "
         "error is 41 % [18 %, 54 %] larger at G = 2 and 41 % [33 %, 54 %] larger at G = 10. "
         "The leave-one-out gradient of 10 rollouts is 99 % noise [98 %, 99 %]; at n = 770 "
         "it is half noise. Doubling the rollouts gives up to 2.0 times the progress per step."),
        (97,
         "With 97 rollouts per step, only G = 97 is possible. At 104 rollouts per step, use "
         "G = 4: its error is within 5 % of the minimum. The error is 44 % [26 %, "
         "54 %] larger at G = 2 and 25 % [18 %, 40 %] larger at G = 8. The leave-one-out "
         "gradient of 97 rollouts is 89 % noise [84 "
         "%, 91 %]; at n = 770 it is half noise. Doubling the rollouts gives up to 1.8 times the "
         "progress per step."),
    ],
)  # fmt: skip
def test_the_answer_is_at_the_rollouts_that_the_study_is_asked_about(rollouts, answer):
    """The size divides them; of a prime number the next multiple of 8 has one."""
    result = RESULT | {"noise": NOISE}
    text = study_answer(unsaved_study(result), rollouts)
    assert text == f"The best G is about 4.0 [3.5, 4.6]. {answer}"
    step = next_step(unsaved_study(result, asdict(compose("mse", f"study.rollouts={rollouts}"))))
    n, size = (int(word.rpartition("=")[2]) for word in step.split()[-2:])
    assert f"At {n} rollouts per step, use G = {size}:" in answer


def test_what_the_data_cannot_tell_apart_is_not_called_a_cost():
    wide = changed(c1=0.5, covariance=np.diag([1e-4, 0.01, 0.01]).tolist())
    sentence = decision_sentence(unsaved_study(wide), 256)
    assert "use G = 4: its error is within 5 % of the minimum. The error is 71 %" in sentence
    assert sentence.endswith("G = 8 may be as good.")
    unknown = changed(covariance=np.diag([0.5, 0.01, 0.01]).tolist())
    assert decision_sentence(unsaved_study(unknown), 256).endswith(
        "At 256 rollouts per step, no G is known to have an error within 10 % of the minimum."
    )


# C1 = 4 with a standard error of .8: G* is 2.5, and 2.4 to 3.0 by the data alone
CLOSE = {
    "c1": 4.0, "gstar": 2.5, "gstar_low": 2.4, "gstar_high": 3.1,
    "covariance": np.diag([0.64, 0.01, 0.01]).tolist(),
}  # fmt: skip


def test_the_prior_is_named_if_the_upper_end_comes_from_it():
    """C1 = .06 with a standard error of .05 may be 0 by the data alone."""
    wide = {"c1": 0.06, "c2": 9.0, "gstar": 13.2, "gstar_low": 6.7, "gstar_high": 117.0}
    study = unsaved_study(changed(**wide, covariance=np.diag([0.0025, 0.8, 0.8]).tolist()))
    assert decision_sentence(study, 256).startswith(
        "The best G is about 13.2 [6.7, 117.0]. The upper end comes from the prior "
        "(study.prior=weak): the data alone show only that G* is at least 7.8. At 256 rollouts "
        "per step, use G = 16:"
    )
    for bounded in (RESULT, changed(**CLOSE)):
        assert "prior" not in decision_sentence(unsaved_study(bounded), 256)


def test_a_record_keeps_the_prior_of_its_decision():
    """Without a prior the same numbers do not decide, and no size is recommended."""
    no_end = CLOSE | {"gstar_high": None, "prior": "none"}
    study = unsaved_study(changed(**no_end, gstar_data=2.5, gstar_data_low=2.4))
    scaling = study.need(SCALING)
    assert scaling.law.prior is NO_PRIOR and scaling.law.costs(256).tolerance is None
    assert not scaling.needs_prior and extra_error_table(study) is None
    assert scaling.gstar_data == (2.5, 2.4, math.inf)
    assert record_of(Scaling, content_of(scaling)) == scaling


@pytest.mark.parametrize("prior, sources", [
    ("weak", ["data alone", "prior alone", "data and prior"]), ("none", ["data alone"]),
])  # fmt: skip
def test_the_page_compares_the_data_with_the_prior(prior, sources):
    study = unsaved_study(changed(**CLOSE, prior=prior))
    table = law_tables({study: study.need(SCALING)})[0]
    assert [row[0] for row in table.rows] == sources
    assert table.rows[0][1:] == [2.5, pytest.approx(2.41, abs=0.01), pytest.approx(2.99, abs=0.01)]
    if prior == "weak":
        _, middle, low, high = table.rows[1]
        assert (low, middle) == (pytest.approx(2.43, abs=0.02), pytest.approx(4.2, abs=0.1))
        assert 48 < high < 142
        assert table.rows[2][1:] == [2.5, 2.4, 3.1]


def test_a_study_asks_for_a_prior_that_exists():
    assert compose("mse").study.prior == "weak"
    assert compose("mse", "study.prior=none").study.prior == "none"
    with pytest.raises(ConfigError, match=r"unknown study\.prior 'flat': choose from weak, none"):
        compose("mse", "study.prior=flat")


@pytest.mark.parametrize(
    "scaling, sentence",
    [
        ({"gstar_high": None, "covariance": np.diag([0.25, 1.0, 0.81]).tolist()},
         "The best G is at least 3.5; half of all similar studies find it with 450 questions. "
         "This study has 100 questions."),
        ({"gstar_high": None, "gstar_low": 1.0, "covariance": None},
         "Not enough data for a best G: the number of questions needed is not known yet. "
         "This study has 100 questions."),
        ({"gstar_high": None, "gstar_low": None, "covariance": np.diag([9.0, 1, 1]).tolist()},
         "Not enough data for a best G: half of all similar studies find it with 19000 "
         "questions. This study has 100 questions."),
    ],
)  # fmt: skip
def test_where_the_data_do_not_say_it_is_said_how_much_is_missing(scaling, sentence):
    assert decision_sentence(unsaved_study(changed(**scaling)), 256) == sentence


def test_without_any_signal_the_studys_own_words_are_the_answer():
    result = RESULT | {"assumption2": {"corr": None}}
    assert decision_sentence(unsaved_study(result), 256) == "No reward."


def test_intervals_say_what_they_speak_of():
    assert "for new questions like these 100" in interval_note(unsaved_study(RESULT))


UNDECIDED = changed(gstar_high=None, covariance=np.diag([0.25, 1.0, 0.81]).tolist())


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
        (UNDECIDED, (), "mse model=tiny_base dataset=arithmetic prompt=bare study.questions=450 "
         "budget.pool_completions=8 pool=runs/a/pool"),
        (UNDECIDED, ("model=tiny", "dataset.study_size=100", "pool=pools/b"),
         "mse model=tiny dataset=arithmetic prompt=bare dataset.study_size=450 "
         "study.questions=450 budget.pool_completions=8 pool=pools/b"),
        (RESULT, ("model=tiny_direct", "dataset=math500", "prompt=chat_boxed", "prompt.seed=2"),
         "train model=tiny_direct dataset=math500 prompt=chat_boxed prompt.seed=2 "
         "budget.rollouts=256 group_size=4"),
        (RESULT, ("model=hub", "model.model_name_or_path=org/a"),
         "train model=org/a dataset=arithmetic prompt=bare "
         "budget.rollouts=256 group_size=4"),
    ],
)  # fmt: skip
def test_the_next_command_is_of_the_same_policy_and_can_be_typed(result, overrides, command):
    config = asdict(compose("mse", *overrides))
    step = next_step(unsaved_study(result, config))
    assert step == f"grpo-ustat {command}"
    _, verb, *words = step.split()
    composed = compose(verb, *words)
    assert composed.model.model_name_or_path == config["model"]["model_name_or_path"]
    assert composed.temperature == config["temperature"]
    assert composed.max_completion_length == config["max_completion_length"]
    assert asdict(composed.prompt) == config["prompt"]


@pytest.mark.parametrize(
    "overrides",
    slow_after(
        1,
        [
            ["seed=3", "budget.feature_sketch=61", "study.parameters=mlp"],
            ["baselines=[leave_one_out,group_std]", "group_sizes=[2,4]"],
            ["reward_funcs=[task,brevity]", "temperature=0.7"],
        ],
    ),
)
def test_more_questions_are_of_the_same_study_and_go_on_with_its_pool(overrides):
    """Another seed or sketch would be refused by the pool, other baselines change the question."""
    config = compose("mse", *overrides)
    _, verb, *words = shlex.split(next_step(unsaved_study(UNDECIDED, asdict(config))))
    following = compose(verb, *words)
    assert draws_of(following) == draws_of(config)
    budget = replace(config.budget, pool_completions=8)
    study = replace(config.study, questions=following.study.questions)
    assert (following.study, following.budget) == (study, budget)
    assert following.baselines == config.baselines and following.group_sizes == config.group_sizes


@pytest.mark.slow(minutes=0.02)
def test_the_next_command_has_the_same_reward_functions():
    """Otherwise it would be about another reward: the task's alone."""
    rewards = ("reward_funcs=[task,brevity]", "reward_weights=[1,0.5]")
    step = next_step(unsaved_study(RESULT, asdict(compose("mse", *rewards))))
    _, verb, *words = shlex.split(step)
    composed = compose(verb, *words)
    assert (composed.reward_funcs, composed.reward_weights) == (["task", "brevity"], [1.0, 0.5])
    assert "'reward_funcs=[task,brevity]'" in step  # as one types it


@pytest.mark.slow
def test_a_prompt_of_ones_own_is_quoted_for_hydra_and_for_the_shell():
    own = compose("mse", "prompt=plain", "prompt.template='Q: {question}, it is '")
    step = next_step(unsaved_study(RESULT, asdict(own)))
    _, verb, *words = shlex.split(step)
    assert compose(verb, *words).prompt.template == "Q: {question}, it is "


def rows_of_ones_own(path, count, *words):
    rows = (json.dumps({"question": f"{n}+1", "answer": n + 1}) for n in range(count))
    path.write_text("\n".join(rows))
    return ("dataset=jsonl", f"dataset.path={path}", *words)


@pytest.mark.slow
def test_no_more_rows_are_asked_for_than_there_are(tmp_path):
    words = rows_of_ones_own(tmp_path / "my.jsonl", 200, "dataset.study_size=100")
    _, verb, *typed = shlex.split(
        next_step(unsaved_study(UNDECIDED, asdict(compose("mse", *words))))
    )
    following = compose(verb, *typed)
    assert following.study.questions == following.dataset.study_size == 150
    config = asdict(compose("mse", *rows_of_ones_own(tmp_path / "few.jsonl", 2)))
    few = {**UNDECIDED, "questions": 2}
    assert next_step(unsaved_study(few, config)).startswith(
        f"add study questions: {tmp_path / 'few.jsonl'} has 2, but about "
    )
    assert next_step(unsaved_study(RESULT, config)) == (
        f"add training questions: {tmp_path / 'few.jsonl'} has 0, but a step with the best G "
        "needs 1 or more"
    )
    (tmp_path / "few.jsonl").unlink()
    assert next_step(unsaved_study(RESULT, config)).startswith("grpo-ustat train ")


@pytest.mark.slow
def test_a_study_of_another_version_is_continued_in_the_fields_of_today():
    """Of a stored configuration, fields and methods that are gone are not typed again."""
    config = asdict(compose("mse", "study.rollouts=128"))
    config["study"] |= {"settings": ["with_replacement"], "methods": ["replay"]}
    config["budget"] |= {"replay_draws": 50}
    _, verb, *typed = shlex.split(next_step(unsaved_study(UNDECIDED, config)))
    assert compose(verb, *typed).study.rollouts == 128
    assert not any("replay" in word or "settings" in word for word in typed)


def test_no_more_questions_are_asked_for_than_a_table_has():
    few = changed(gstar_high=None, covariance=np.diag([1.0, 4.0, 3.24]).tolist(), dof=1e9)
    few["questions"] = 10
    config = asdict(compose("mse", "dataset=plus_one"))
    _, verb, *typed = shlex.split(next_step(unsaved_study(few, config)))
    assert compose(verb, *typed).dataset.study_size == 31
    whole = {**UNDECIDED, "questions": 31}
    step = next_step(
        unsaved_study(whole, asdict(compose("mse", "dataset=plus_one", "dataset.study_size=31")))
    )
    assert step.startswith("add study questions: dataset=plus_one has 31, but about ")


def test_rollouts_of_another_framework_are_not_trained_on_here():
    config = asdict(compose("mse")) | {"pool": "logged/rows.parquet"}
    step = next_step(unsaved_study(UNDECIDED, config))
    own = {"DATA.jsonl": "tests/data/jsonl/my.jsonl", "LENGTH": "64", "=450": "=20",
           "REWARD.py:FUNCTION": "tests/data/jsonl/my.py:score"}  # fmt: skip
    for theirs, ours in own.items():
        step = step.replace(theirs, ours)
    _, verb, *words = shlex.split(step, comments=True)
    assert compose(verb, *words).study.questions == 20
    assert next_step(unsaved_study(RESULT, config)) == (
        "train with num_generations=4 in the framework that logged these rollouts"
    )
    assert next_step(unsaved_study(UNDECIDED, config)) == (
        "grpo-ustat mse model=tiny_base dataset=jsonl dataset.path=DATA.jsonl "
        "dataset.reward=REWARD.py:FUNCTION prompt=as_is max_completion_length=LENGTH "
        "dataset.study_size=450 study.questions=450  # draws new rollouts; DATA.jsonl: the run's "
        "questions and answers; REWARD.py: the run's FUNCTION(prompt, completion); see "
        "docs/models-and-data.md"
    )


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
        (None, "75 % noise [67 %, 80 %]; at n = 770 it is half noise. Doubling the rollouts "
         "gives up to 1.6 times the progress per step."),
        (8, "80 % noise [28 %, 100 %]; at n = 1000 it is half noise. Doubling the rollouts "
         "gives up to 1.7 times the progress per step."),
        (50, "3 % noise [2 %, 7 %]; at n = 9 it is half noise. Halving the rollouts keeps 97 % "
         "of the progress per step."),
    ],
)  # fmt: skip
def test_the_noise_of_a_step_is_said_with_what_more_rollouts_gain(size, sentence):
    found = noise_sentence(unsaved_study(RESULT | {"noise": NOISE}), 256, size)
    assert found == f"The leave-one-out gradient of 256 rollouts is {sentence}"


def test_without_a_noise_scale_nothing_is_said():
    assert (
        noise_sentence(unsaved_study(RESULT | {"noise": NOISE, "assumption2": {"corr": None}}), 256)
        == ""
    )
    unknown = {"group_size": 4, "rollouts": None, "rollouts_low": 400, "rollouts_high": None}
    assert noise_sentence(unsaved_study(RESULT | {"noise": {"curve": [unknown]}}), 256) == (
        "The leave-one-out gradient of 256 rollouts is at least 61 % noise."
    )
    nothing = unknown | {"rollouts_low": 0.0}
    assert noise_sentence(unsaved_study(RESULT | {"noise": {"curve": [nothing]}}), 256) == ""


@pytest.mark.slow
@pytest.mark.parametrize("studies", [100, pytest.param(2000, marks=pytest.mark.nightly)])
def test_no_sentence_has_an_empty_or_reversed_interval(rng, studies):
    """Of random estimates with random errors: every pair in brackets is ordered and has two ends,
    no number is missing, and the answer has at most six lines of 80 characters.
    """
    seen = set()
    for _ in range(studies):
        count = int(4 * 50 ** rng.random())
        centre = rng.normal(size=4) * 10.0 ** rng.uniform(-3, 3, size=4)
        units = centre + rng.normal(size=(count, 4)) * 10.0 ** rng.uniform(-3, 3)
        law = ScalingLaw.of_steps(units.T, prompts=1)
        best = law.gstar()
        result = changed(
            c1=law.c1, c2=law.c2, c3=law.c3, **law.stored_errors(),
            **{f"gstar{end}": x if math.isfinite(x) else None
               for end, x in zip(("", "_low", "_high"), best, strict=True)},
        )  # fmt: skip
        scale, share = law.noise_scale(8), law.prompt_share(8)
        for ends in (scale, share):
            assert 0 <= ends.low <= ends.high
            assert math.isnan(ends.estimate) or ends.low <= ends.estimate <= ends.high
        rollouts = int(rng.choice([2, 64, 256, 4096]))
        decision = decision_sentence(unsaved_study(result), rollouts)
        text = f"{decision} {noise_text(scale, rollouts)}".strip()
        seen |= set(
            re.findall("nearly all|at least|Doubling|Halving|use G|nine in ten|not known", text)
        )
        assert "nan" not in text and "inf" not in text and "  " not in text
        for low, high in re.findall(r"\[(.*?), (.*?)\]", text):
            ends = [math.inf if x == "no upper end" else float(x.strip("% +")) for x in (low, high)]
            assert ends[0] <= ends[1], text
        assert len(textwrap.wrap(text, 80)) <= 6, text
    assert seen >= {"nearly all", "at least", "Doubling", "Halving", "use G", "nine in ten"}


def test_the_noise_of_a_training_run_is_that_of_its_second_half():
    names = ("c1", "c2", "c3", "grad_sq")
    rows = [
        {"step": step} | {f"monitor/{x}": v for x, v in zip(names, values, strict=True)}
        for step, values in enumerate([(9, 9, 9, 9)] * 3 + [(1, 2, 9, 0.1)] * 4)
    ]
    text = training_noise_sentence(rows, 4, 90)
    start = (
        "The leave-one-out gradient of 90 rollouts is 50 % noise [50 %, 50 %]; at n = 90 it is "
        "half noise. "
    )
    assert text.startswith(start)
    assert text.endswith("(Mean over steps 3 to 6.)")
    assert training_noise_sentence(rows[:3], 4, 90) == ""


NAMED = "Assumption 2 (size of gradient and reward are uncorrelated)"


def said(result):
    study = unsaved_study(result)
    return " ".join(ASSUMPTION2.sentences(study.need(ASSUMPTION2), study))


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({}, f"{NAMED} fails: wrong answers have larger gradients. GRPO beats vanilla here "
         "for G > 3.0 [2.5, 5.5]."),
        ({"av_minus_a0_low": 1.0, "av_minus_a0_high": 3.0},
         f"{NAMED} fails: wrong answers have larger gradients, so vanilla beats GRPO "
         "here."),
        ({"corr_high": 0.1, "av_minus_a0_high": 1.0},
         f"{NAMED} fails. For new questions, the sign of the correlation is unclear or differs "
         "between prompts. The data do not show whether vanilla or GRPO is better."),
        ({"refuted": False},
         f"{NAMED} is not refuted. GRPO beats vanilla here for G > 3.0 [2.5, 5.5]."),
        ({"corr": 0.5, "corr_low": 0.4, "corr_high": 0.6, "av_minus_a0_high": 1.0},
         f"{NAMED} fails: right answers have larger gradients. The data do not show "
         "whether vanilla or GRPO is better."),
        ({"corr": 0.5, "corr_low": 0.4, "corr_high": 0.6},
         f"{NAMED} fails: right answers have larger gradients, so GRPO beats vanilla here "
         "for G > 3.0 [2.5, 5.5]."),
    ],
)  # fmt: skip
def test_assumption_2_is_said_with_what_follows(changes, sentence):
    result = copy.deepcopy(RESULT)
    result["assumption2"] |= changes
    assert said(result) == sentence
    result["policy"]["quantity"] = "mean reward"
    graded = sentence.replace("wrong", "low-reward").replace("right", "high-reward")
    assert said(result) == graded
    result["assumption2"] |= {"refuted": False, "av_minus_a0_low": -1.0, "av_minus_a0_high": 1.0}
    assert said(result) == ""  # neither is known


def test_extra_errors_are_those_of_the_law():
    config = {"study": {"rollouts": 16}}
    table = extra_error_table(unsaved_study(RESULT, config))
    assert [row[:3] for row in table.rows] == [
        ["2", "8", "+44 %"], ["4", "4", "0 %"], ["8", "2", "+25 %"], ["16", "1", "+107 %"]
    ]  # fmt: skip
    assert [bool(row[3]) for row in table.rows] == [True, False, True, True]
    undecided = changed(covariance=(9.0 * np.eye(3)).tolist(), dof=4.0)
    assert extra_error_table(unsaved_study(undecided, config)) is None
