"""Studies that stop when the data decide: the looks, the budget, resumption, ranks, refusals."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.group_size import PROBABILITY
from grpo_ustat.estimators.looks import FIRST_COMPLETIONS, FIRST_QUESTIONS, population_law
from grpo_ustat.measurements.next_step import next_step
from grpo_ustat.measurements.study_page import looks_table
from grpo_ustat.mse import pool as pool_module
from grpo_ustat.mse import study as study_run
from grpo_ustat.mse import until_decided
from grpo_ustat.mse.plan import study_cost
from grpo_ustat.mse.pool import EqualRewards
from grpo_ustat.mse.pool_parts import Part
from grpo_ustat.mse.pool_store import PoolStore
from grpo_ustat.mse.until_decided import look_sentence, pool_until_decided, study_order
from grpo_ustat.records import Prompt
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.runs.study_parts import Look

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).parents[1] / "estimators"))
from commands import compose  # noqa: E402
from folders import unsaved_study  # noqa: E402
from launching import finished as typed  # noqa: E402
from test_looks import noisy_pool  # noqa: E402

UNTIL = ("model=tiny_direct", "study.until=decided", "launch.workers=1")
# Three looks with 8 completions each, which do not decide.
SHORT = (*UNTIL, "study.questions=30", "budget.pool_completions=8", "group_sizes=[2,4]")
LOOKS = [(20, 8), (25, 8), (30, 8)]


def prompts(count):
    return [Prompt(f"q{i}", "1+1=", "1+1", "2", "sum") for i in range(count)]


def drawn(monkeypatch, signal, most=64, equal=0):
    """Replace sampling by simulated pools; the first `equal` questions have equal rewards."""
    whole = noisy_pool(np.random.default_rng(0), 400, most, signal)
    sizes = []

    def pool(config, prompts, ends, store, size):
        sizes.append((ends[-1], size))
        if ends[-1] <= equal:
            raise EqualRewards(prompts[: ends[-1]], [])
        part = until_decided_part(whole, ends[-1], size)
        return part, SimpleNamespace(rollouts=ends[-1] * size)

    monkeypatch.setattr(until_decided, "_drawn_pool", pool)
    return sizes


def until_decided_part(whole, count, size):
    """The first `size` completions of the first `count` questions."""
    from prompt_pools import whole_pool

    rows = (slice(count), slice(size))
    return whole_pool(whole.features_PNR[rows], whole.rewards_PN[rows], whole.lengths_PN[rows])


def test_the_loop_ends_with_the_decision_of_its_pool(monkeypatch, tmp_path, capsys):
    sizes = drawn(monkeypatch, signal=0.3)
    config = compose("mse", *UNTIL)
    pool, cost, looks = pool_until_decided(config, prompts(400), tmp_path)
    assert sizes[0] == (FIRST_QUESTIONS, FIRST_COMPLETIONS)
    assert [(look.questions, look.completions) for look in looks] == sizes
    assert all(a.questions < b.questions for a, b in pairwise(looks))
    assert [look.tolerance for look in looks[:-1]] == [None] * (len(looks) - 1)
    decision = population_law(pool).costs(config.study.rollouts)
    assert (looks[-1].group_size, looks[-1].tolerance) == (decision.best, decision.tolerance)
    assert looks[-1].tolerance is not None and looks[-1].questions < 400
    assert cost.rollouts == pool.rewards_PN.size == math.prod(sizes[-1])
    # A sentence per look on the terminal.
    assert capsys.readouterr().out.count(" completions each:") == len(looks)


def test_an_undecided_study_spends_its_budget_exactly(monkeypatch, tmp_path):
    sizes = drawn(monkeypatch, signal=0.02)
    config = compose("mse", *UNTIL, "budget.pool_completions=48")
    pool, _, looks = pool_until_decided(config, prompts(33), tmp_path)
    assert looks[-1].tolerance is None and sizes[-1] == pool.rewards_PN.shape == (33, 48)
    assert len(set(sizes)) == len(sizes)


@pytest.mark.parametrize("completions", [5, 16])
def test_the_budget_limits_the_completions_of_the_first_look(monkeypatch, tmp_path, completions):
    sizes = drawn(monkeypatch, signal=0.02)
    config = compose("mse", *UNTIL, f"budget.pool_completions={completions}")
    pool_until_decided(config, prompts(30), tmp_path)
    assert sizes == [(20, completions), (25, completions), (30, completions)]


def test_equal_rewards_do_not_stop_it_before_the_budget_is_spent(monkeypatch, tmp_path, capsys):
    sizes = drawn(monkeypatch, signal=0.3, equal=30)
    config = compose("mse", *UNTIL)
    _, _, looks = pool_until_decided(config, prompts(400), tmp_path)
    assert sizes[:3] == [(20, 16), (25, 16), (32, 16)] and looks[0].questions == 32
    assert capsys.readouterr().out.count("all rewards are equal") == 2
    sizes = drawn(monkeypatch, signal=0.3, equal=400)
    with pytest.raises(EqualRewards) as equal:
        pool_until_decided(config, prompts(30), tmp_path)
    assert sizes == [(20, 16), (25, 16), (30, 16), (30, 32)] and len(equal.value.prompts) == 30


def test_a_sentence_says_what_is_known_and_what_is_missing():
    look = dict(questions=25, completions=16, group_size=8, more_questions=40)
    texts = [
        look_sentence(Look(**look, probability=p, tolerance=t))
        for p, t in ((0.812, None), (0.999, None), (0.96, 0.05), (0.91, 0.1))
    ]
    assert ".81" in texts[0] and "About 40 more questions" in texts[0]
    assert "too few questions" in texts[1]
    assert "within 5 %" in texts[2] and "within 10 %" in texts[3]
    assert "more questions" not in texts[2] + texts[3]
    unknown = Look(**look, probability=None, tolerance=None)
    unknown = replace(unknown, more_questions=None, group_size=None)
    assert "25 questions with 16 completions each" in look_sentence(unknown)


def test_the_page_has_a_row_for_each_look():
    looks = [
        Look(questions=20, completions=16, group_size=None, probability=None, tolerance=None,
             more_questions=None),
        Look(questions=25, completions=16, group_size=8, probability=0.97, tolerance=0.05,
             more_questions=None),
    ]  # fmt: skip
    rows = looks_table(looks).rows
    assert [row[1] for row in rows] == [None, 8] and len(rows[0]) == len(looks_table(looks).columns)
    assert "5 %" in rows[1][3]


def test_questions_in_an_order_of_their_authors_are_drawn_by_the_seed():
    """Other data sets are in random order."""
    ordered, config = prompts(50), compose("mse", *UNTIL)
    assert study_order(config, ordered) == ordered
    orders = [
        study_order(SimpleNamespace(dataset=SimpleNamespace(kind="own"), seed=seed), ordered)
        for seed in (0, 0, 1)
    ]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(p.id for p in orders[2]) == sorted(p.id for p in ordered)


def test_a_plan_counts_the_most_that_it_can_cost():
    assert study_cost(compose("mse", *UNTIL)) == study_cost(compose("mse", *UNTIL[::2]))


def test_the_next_step_of_an_undecided_study_goes_on_until_it_decides():
    content = json.loads(Path("docs/examples/mse/tiny_base/result.json").read_text())
    content["scaling"] |= {"dof": 3.0, "gstar_high": None}
    config = vars(compose("mse", *UNTIL, "study.questions=30"))
    step = next_step(unsaved_study(content, _plain(config)))
    assert "study.until=decided" in step and step.startswith("grpo-ustat mse")


def _plain(config):
    from dataclasses import asdict, is_dataclass

    return {key: asdict(x) if is_dataclass(x) else x for key, x in config.items()}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["study.part=1/2", "pool=outputs/pool"], "study.part=1/2"),
        (["baselines=[batch_std]"], "batch_std"),
        (["study.until=now"], "now"),
    ],
)
def test_refusals(words, named):
    with pytest.raises(ConfigError, match="study.until") as refused:
        compose("mse", "study.until=decided", *words)
    assert named in str(refused.value) and "\n" not in str(refused.value)


def study(path, *overrides):
    config = compose("mse", *overrides)
    study_run.run(config, RunFolder(path, config))
    return json.loads((path / "result.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "run"
    return path, study(path, *SHORT)


def looks_of(result):
    return [(look["questions"], look["completions"]) for look in result["looks"]]


@pytest.mark.slow
def test_the_result_is_that_of_the_fixed_study_if_nothing_is_decided(whole, tmp_path):
    _, result = whole
    assert looks_of(result) == LOOKS
    assert (result["questions"], result["pool_completions"]) == (30, 8)
    assert result["cost"]["rollouts"] == 240
    fixed = study(tmp_path / "run", *(word for word in SHORT if "until" not in word))
    assert "looks" not in fixed
    for name in ("c1", "c2", "c3"):
        assert fixed["scaling"][name] == pytest.approx(result["scaling"][name], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [3, 22])
def test_after_an_interruption_the_looks_and_the_result_are_the_same(
    whole, tmp_path, monkeypatch, stop
):
    """In the first batch, and in the second."""
    writes, original = [], PoolStore.write

    def interrupted(self, prompt, first, part):
        if len(writes) == stop:
            raise KeyboardInterrupt
        writes.extend([prompt.id] * isinstance(part, Part))
        original(self, prompt, first, part)

    monkeypatch.setattr(PoolStore, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        study(tmp_path / "cut", *SHORT)
    monkeypatch.setattr(PoolStore, "write", original)
    scored, score = [], pool_module.score_part
    monkeypatch.setattr(
        pool_module, "score_part", lambda *a, **k: (scored.append(1), score(*a, **k))[1]
    )
    again = study(tmp_path / "cut", *SHORT)
    assert len(scored) == 30 - stop
    assert again["looks"] == whole[1]["looks"] and again["curves"] == whole[1]["curves"]


@pytest.mark.slow
def test_questions_that_get_more_completions_are_read_alike_after_an_interruption(
    tmp_path, monkeypatch
):
    """All 22 questions are drawn before the decision, so each gets 8 more completions."""
    words = (*SHORT, "budget.pool_completions=24", "study.questions=22")
    expected = study(tmp_path / "whole", *words)
    assert looks_of(expected) == [(20, 16), (22, 16), (22, 24)]
    names = sorted(p.name.split("-", 1)[1] for p in (tmp_path / "whole/pool").glob("*-*.safe*"))
    assert names == 22 * ["0-16.safetensors"] + 22 * ["16-8.safetensors"]
    reads, read = [], until_decided.read_pool

    def interrupted(*arguments):
        reads.append(1)
        if len(reads) == 3:
            raise KeyboardInterrupt
        return read(*arguments)

    monkeypatch.setattr(until_decided, "read_pool", interrupted)
    with pytest.raises(KeyboardInterrupt):
        study(tmp_path / "cut", *words)
    assert study(tmp_path / "cut", *words)["looks"] == expected["looks"]


@pytest.mark.slow
def test_a_later_checkpoint_is_measured_on_the_questions_drawn(tmp_path):
    result = study(tmp_path / "run", *SHORT, "study.questions=22", "study.scored_by=embedded:tiny")
    assert looks_of(result) == [(20, 8), (22, 8)] and result["off_policy"]
    assert result["questions"] == 22


@pytest.mark.slow
def test_a_pool_of_the_same_questions_is_read_and_nothing_is_sampled(whole, tmp_path, monkeypatch):
    """Of the study itself, and of a fixed study whose parts are longer than 16."""
    path, result = whole
    monkeypatch.setattr(pool_module, "start_sampler", None)  # sampling now would fail
    again = study(tmp_path / "again", *SHORT, f"pool={path / 'pool'}", "group_sizes=[2,4,8]")
    assert again["looks"] == result["looks"]


@pytest.mark.slow
def test_parts_of_a_fixed_study_are_not_split(tmp_path, monkeypatch):
    words = ("study.questions=22", "group_sizes=[2]", f"pool={tmp_path / 'pool'}")
    study(tmp_path / "fixed", *UNTIL[::2], *words, "budget.pool_completions=20")
    monkeypatch.setattr(pool_module, "start_sampler", None)  # sampling now would fail
    result = study(tmp_path / "run", *UNTIL, *words, "budget.pool_completions=20")
    assert looks_of(result) == [(20, 20), (22, 20)]


@pytest.mark.slow
def test_the_policy_is_loaded_once_for_all_batches(tmp_path, monkeypatch):
    from grpo_ustat.mse import sampler

    loads, load = [], sampler.configured_policy
    monkeypatch.setattr(sampler, "configured_policy", lambda *a: (loads.append(1), load(*a))[1])
    study(tmp_path / "run", *SHORT)
    assert len(loads) == 1 and sampler._KEPT_POLICIES is None


@pytest.mark.slow(minutes=0.3)
def test_ranks_and_workers_take_the_same_decisions(whole, tmp_path):
    for name, words in (("ranks", "launch.num_processes=2"), ("workers", "launch.workers=2")):
        code, said = typed(
            "mse", *SHORT, words, f"hydra.run.dir={tmp_path / name}",
            cwd=tmp_path / f"at-{name}", seconds=300,
        )  # fmt: skip
        assert code == 0, said
        assert said.count(" questions with 8 completions each: ") == 3
        result = json.loads((tmp_path / name / "result.json").read_text())
        assert looks_of(result) == LOOKS
        for one, other in zip(whole[1]["looks"], result["looks"], strict=True):
            assert one["group_size"] == other["group_size"]
            assert one["probability"] == pytest.approx(other["probability"], abs=1e-3)


@pytest.mark.slow(minutes=0.2)
def test_a_study_that_decides_answers_as_its_last_look(tmp_path):
    result = study(tmp_path / "run", *UNTIL, "study.rollouts=64", "group_sizes=[2,4]")
    last = result["looks"][-1]
    assert last["tolerance"] is not None
    assert result["scaling"]["best_divisor"]["64"] >= 2
    assert result["questions"] == last["questions"] < 500
    assert last["probability"] >= (PROBABILITY if last["tolerance"] == 0.05 else 0.8)
    page = (tmp_path / "run/report.html").read_text()
    assert "look by look" in page


@pytest.mark.slow
def test_the_warning_of_an_undecided_study_asks_for_questions(whole):
    """An undecided study recommends no G, so its warning must not excuse the recommendation."""
    _, result = whole
    assert result["looks"][-1].get("tolerance") is None
    assert "Raise study.questions" in result["summary"]
    assert "study.until=null" not in result["summary"]
