"""Which reward functions and weights are refused, and that one function leaves a run its name."""

from __future__ import annotations

import pytest
from commands import compose

from grpo_ustat.config.identity import drop_neutral_keys, reward_funcs_fingerprint
from grpo_ustat.config.reward_funcs import check_reward_funcs
from grpo_ustat.config.schema import ConfigError


@pytest.mark.parametrize(
    "names, weights, words",
    [
        (
            ["brevity"],
            None,
            "must begin with task, .*: use reward_funcs=\\[task,brevity\\] and reward_weights="
            "\\[0,1\\]",
        ),
        ([], None, "names no function: use reward_funcs=\\[task\\]"),
        (["task", "brevty"], None, "unknown reward_funcs 'brevty': did you mean brevity"),
        (["task", "task"], None, "contains task twice"),
        (["task", "none.py:f"], None, "there is no file none.py"),
        (["task", "brevity"], [1.0], "has 1 weight for 2 functions"),
        (["task"], [1.0, 2.0], "has 2 weights for 1 function, .*: add the other functions"),
        (["task", "brevity"], [0.0, 0.0], "at least one must not be 0"),
        (["task", "brevity"], [1.0, float("inf")], "must be finite"),
    ],
)
def test_what_is_no_sum_of_functions_is_refused(names, weights, words):
    with pytest.raises(ConfigError, match=words):
        check_reward_funcs(names, weights)


def test_functions_of_two_files_with_one_name_are_refused(tmp_path):
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("def score(prompt, completion):\n    return 1.0\n")
    names = ["task", f"{tmp_path}/a.py:score", f"{tmp_path}/b.py:score"]
    check_reward_funcs(names[:2], None)
    with pytest.raises(ConfigError, match="contains score twice"):
        check_reward_funcs(names, None)
    before = reward_funcs_fingerprint(names[:2])
    (tmp_path / "a.py").write_text("def score(prompt, completion):\n    return 0.5\n")
    assert reward_funcs_fingerprint(names[:2]) != before
    assert reward_funcs_fingerprint(["task", "brevity"]) is None


@pytest.mark.parametrize(
    "verb, overrides, words",
    [
        ("train", ["baseline=gdpo"], "baseline=gdpo needs .* reward_funcs=\\[task\\]: use"),
        ("mse", ["baselines=[gdpo]"], "baselines=gdpo"),
        (
            "train",
            ["baseline=gdpo", "reward_funcs=[task,brevity]", "objective=grpo", "objective.beta=0.1",
             "objective.kl_estimator=k1", "objective.kl_in=reward"],
            "objective.kl_in=reward with baseline=gdpo",
        ),
        (
            "mse",
            ["pool=x.parquet", "reward_funcs=[task,brevity]"],
            "pool=x.parquet: imported rollouts already have rewards",
        ),
    ],
)  # fmt: skip
def test_what_a_rule_or_a_pool_cannot_take_is_refused(
    verb, overrides, words, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match=words):
        compose(verb, *overrides)


def test_weights_that_are_all_one_are_no_part_of_what_a_run_is():
    two = {"seed": 0, "reward_funcs": ["task", "brevity"], "reward_weights": None}
    assert drop_neutral_keys(two)["reward_funcs"] == ["task", "brevity"]
    assert drop_neutral_keys(two) == drop_neutral_keys(two | {"reward_weights": [1.0, 1.0]})
    weighed = drop_neutral_keys({"reward_funcs": ["task"], "reward_weights": [2.0]})
    assert weighed["reward_weights"] == [2.0]
