"""All rewards equal: nothing is scored, the study says what became of the completions."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from grpo_ustat.advise.request import Request
from grpo_ustat.advise.sources import advice_of
from grpo_ustat.config.mse import check_pool_folder
from grpo_ustat.measurements.group_size import decision_sentence
from grpo_ustat.measurements.next_step import next_step
from grpo_ustat.mse import import_rollouts
from grpo_ustat.mse import pool as pool_module
from grpo_ustat.mse import study as study_run
from grpo_ustat.mse.equal_rewards import equal_rewards_sentence
from grpo_ustat.mse.pool import EqualRewards, build_part, build_pool
from grpo_ustat.mse.pool_store import PoolStore, draws_of
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.runs.study_parts import CompletionCounts

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from commands import compose  # noqa: E402
from folders import unsaved_study  # noqa: E402
from test_import_rollouts import logged  # noqa: E402
from test_pool_parts import SMALL as LOOSE  # noqa: E402
from test_pool_parts import asked as asked_of  # noqa: E402
from test_pool_parts import contents  # noqa: E402

WORKERS = [1, pytest.param(2, marks=pytest.mark.slow)]  # two are processes of their own
LAST_ALONE = """
def score(prompt, text):
    return float(prompt.question == {question!r} and {condition})
"""
SMALL = (*LOOSE, "max_completion_length=6")  # completions of every kind
SIX = ("debug=mse", "model=tiny_base", "study.questions=6")
asked = partial(asked_of, small=SMALL)


@pytest.fixture(params=["len(text) % 2", "True"], ids=["some", "all"])
def last_alone(tmp_path, request):
    """The override of a reward that is 0 but for some or all completions of the question which is
    sampled last.
    """
    _, prompts = asked()
    last = max(prompts, key=lambda prompt: (len(prompt.text), prompts.index(prompt)))
    source = LAST_ALONE.format(question=last.question, condition=request.param)
    (tmp_path / "last.py").write_text(source)
    return f"dataset.reward={tmp_path / 'last.py'}:score"


@pytest.fixture
def never(tmp_path):
    (tmp_path / "never.py").write_text("def score(prompt, text):\n    return 0.0\n")
    return f"dataset.reward={tmp_path / 'never.py'}:score"


@pytest.fixture
def scored(monkeypatch):
    """What `score_part` was called with in this process."""
    calls, score = [], pool_module.score_part
    monkeypatch.setattr(
        pool_module, "score_part", lambda *a, **k: (calls.append(a), score(*a, **k))[1]
    )
    return calls


def scored_at_once(folder, monkeypatch, *overrides):
    """The pool where every chunk is scored as it is sampled."""
    with monkeypatch.context() as patch:
        patch.setattr(pool_module, "_rewards_so_far", lambda _: None)
        build_pool(*asked(*overrides), folder)
    return contents(folder)


def unscored(folder):
    return sorted(file.name for file in folder.glob("*.unscored"))


@pytest.mark.parametrize("workers", WORKERS)
def test_nothing_is_scored_where_all_rewards_are_equal(
    tmp_path, never, scored, monkeypatch, workers
):
    config, prompts = asked(never, f"launch.workers={workers}")
    with pytest.raises(EqualRewards) as equal:
        build_pool(config, prompts, tmp_path / "pool")
    parts = [part for parts in equal.value.stored for part in parts]
    assert [len(part.rewards_N) for part in parts] == 5 * [4]
    assert all(part.work_cost.seconds_score == 0 < part.work_cost.tokens for part in parts)
    assert scored == [] and not list((tmp_path / "pool").glob("*.safetensors"))
    assert len(unscored(tmp_path / "pool")) == 5
    monkeypatch.setattr(pool_module, "start_sampler", None)  # sampling now would fail
    with pytest.raises(EqualRewards):
        build_pool(config, prompts, tmp_path / "pool")


@pytest.mark.slow
@pytest.mark.parametrize("workers", WORKERS)
def test_one_other_reward_and_the_pool_is_as_if_scored_at_once(
    tmp_path, last_alone, monkeypatch, workers
):
    """One worker of two sees equal rewards alone."""
    wanted = scored_at_once(tmp_path / "at_once", monkeypatch, last_alone)
    build_pool(*asked(last_alone, f"launch.workers={workers}"), tmp_path / "pool")
    assert contents(tmp_path / "pool") == wanted and unscored(tmp_path / "pool") == []
    rewards = {
        reward for name, arrays in wanted.items() if name != "pool.json"
        for reward in np.frombuffer(arrays["rewards_N"])
    }  # fmt: skip
    assert rewards == {0.0, 1.0}


@pytest.mark.slow
def test_a_worker_that_does_not_see_the_other_is_made_good_in_another_round(
    tmp_path, last_alone, monkeypatch, scored, request
):
    """Each chunk has one of its own: where the last sees several rewards it scores its question;
    where each sees one, they meet in the folder.
    """
    wanted = scored_at_once(tmp_path / "at_once", monkeypatch, last_alone)
    score_chunks, rounds = pool_module._score_chunks, []

    def one_chunk_each(items, *arguments):
        rounds.append(len(items))
        for item in items:
            yield from score_chunks([item], *arguments)

    monkeypatch.setattr(pool_module, "_score_chunks", one_chunk_each)
    del scored[:]
    build_pool(*asked(last_alone), tmp_path / "pool")
    assert rounds == [3, 2 if "some" in request.node.name else 3] and len(scored) == 5
    assert contents(tmp_path / "pool") == wanted and unscored(tmp_path / "pool") == []


@pytest.mark.slow
@pytest.mark.parametrize("writes", [1, 4, 5, 6, 8])
def test_a_stop_in_between_loses_nothing_that_matters(tmp_path, last_alone, monkeypatch, writes):
    """Of 5 unscored and 5 scored parts so many are written before it."""
    wanted = scored_at_once(tmp_path / "at_once", monkeypatch, last_alone)
    write, written = PoolStore.write, []

    def stopped(*arguments):
        if len(written) == writes:
            raise KeyboardInterrupt
        written.append(write(*arguments))

    with monkeypatch.context() as patch:
        patch.setattr(PoolStore, "write", stopped)
        with pytest.raises(KeyboardInterrupt):
            build_pool(*asked(last_alone), tmp_path / "pool")
    assert unscored(tmp_path / "pool")
    (tmp_path / "pool" / "pool.json").unlink()
    check_pool_folder(str(tmp_path / "pool"))  # unscored parts are of a pool that lost its note
    build_pool(*asked(last_alone), tmp_path / "pool")
    assert contents(tmp_path / "pool") == wanted and unscored(tmp_path / "pool") == []


def test_what_is_unscored_is_not_drawn_again(tmp_path, never, monkeypatch):
    config, prompts = asked(never)
    with pytest.raises(EqualRewards):
        build_pool(config, prompts[:3], tmp_path)
    sampled, sample = [], pool_module.sample_with_cost
    monkeypatch.setattr(
        pool_module, "sample_with_cost",
        lambda engine, chunk, *a, **k: (sampled.extend(chunk), sample(engine, chunk, *a, **k))[1],
    )  # fmt: skip
    with pytest.raises(EqualRewards) as equal:
        build_pool(config, prompts, tmp_path)
    assert len(equal.value.stored) == 5 and len(unscored(tmp_path)) == 5
    assert set(prompts[3:]) <= set(sampled) and len(sampled) < 5


@pytest.mark.slow
@pytest.mark.parametrize("reward", ["0.0", "float(len(text) % 2)"])
def test_more_completions_of_equal_ones(tmp_path, reward):
    """They follow the unscored ones; where they differ, all are scored in one part."""
    file = tmp_path / "r.py"
    file.write_text(f"from pathlib import Path\ndef score(prompt, text):\n    return {reward} "
                    f"if Path({str(tmp_path / 'now')!r}).exists() else 0.0\n")  # fmt: skip
    config, prompts = asked(f"dataset.reward={file}:score")
    with pytest.raises(EqualRewards):
        build_pool(config, prompts, tmp_path / "pool", 4)
    (tmp_path / "now").touch()
    if reward == "0.0":
        with pytest.raises(EqualRewards) as equal:
            build_pool(config, prompts, tmp_path / "pool", 8)
        assert [len(parts) for parts in equal.value.stored] == 5 * [2]
    else:
        grown, cost = build_pool(config, prompts, tmp_path / "pool", 8)
        whole, _ = build_pool(config, prompts, tmp_path / "whole", 8)
        assert contents(tmp_path / "pool") == contents(tmp_path / "whole")
        assert cost.rollouts == 40 and set(grown.rewards_PN.ravel()) == {0.0, 1.0}


@pytest.mark.slow
def test_jobs_that_share_a_pool_count_unscored_questions_until_one_is_scored(tmp_path, last_alone):
    config, prompts = asked(last_alone, f"pool={tmp_path / 'pool'}", "study.part=1/3")
    done = []
    for k in (1, 2, 3):
        study = replace(config.study, part=f"{k}/3")
        done.append(build_part(replace(config, study=study), prompts, tmp_path / "pool"))
    assert done == [2, 4, 1]  # of 2, 2 and 1 questions
    pool, _ = build_pool(*asked(last_alone), tmp_path / "pool")
    assert pool.rewards_PN.any() and unscored(tmp_path / "pool") == []


@pytest.mark.slow(minutes=0.02)
def test_every_reward_function_has_to_be_equal(tmp_path, never):
    """The data set's own are all 0, brevity is not."""
    functions = "reward_funcs=[task,brevity]"
    pool, _ = build_pool(*asked(never, functions), tmp_path)
    assert not pool.rewards_PNF[..., 0].any() and pool.rewards_PNF[..., 1].std() > 0


def study(path, *overrides):
    config = compose("mse", *SMALL, *overrides)
    value = study_run.run(config, RunFolder(path, config))
    return value, json.loads((path / "result.json").read_text()), config


@pytest.mark.slow
def test_a_study_of_equal_rewards_says_what_became_of_them(tmp_path, never, capsys):
    """No table, no curve, no figure; it is shown again as it was."""
    value, result, config = study(tmp_path / "run", never)
    said = capsys.readouterr().out
    counts = result["equal_rewards"]
    assert value is None and not {"curves", "scaling", "assumption2"} & set(result)
    assert counts["cut"] + counts["no_answer"] + counts["wrong"] == counts["completions"] == 20
    assert all(counts[name] for name in ("cut", "no_answer", "wrong"))
    sentence = equal_rewards_sentence(CompletionCounts(**counts), 6)
    assert result["summary"] == sentence == decision_sentence(unsaved_study(result), 256)
    following = next_step(unsaved_study(result, asdict(config)))
    assert " ".join(said.split("\nnext: ")[0].split()) == sentence
    assert f"next: {following}\n" in said and "┃" not in said and "[0.00" not in said
    names = {file.name for file in (tmp_path / "run").iterdir()}
    assert names == {".hydra", "code.json", "launches.jsonl", "result.json", "report.html",
                     "completions.parquet", "pool"}  # fmt: skip
    assert (
        f"{counts['cut']} were cut at max_completion_length=6"
        in (tmp_path / "run/report.html").read_text()
    )
    assert study(tmp_path / "run", never)[:2] == (None, result)
    assert "is complete" in capsys.readouterr().out
    advice = advice_of(Request(tmp_path / "run", num_generations=8))
    assert (advice.verdict, advice.sentence) == ("not enough data", sentence)
    assert advice.next == following


@pytest.mark.slow(minutes=0.02)
def test_counts_are_those_of_the_completions(tmp_path, never):
    """Read from completions.parquet, which has all of so few."""
    from pyarrow import parquet

    _, result, _ = study(tmp_path / "run", never)
    rows = parquet.read_table(tmp_path / "run/completions.parquet").to_pylist()
    ended = [row for row in rows if row["ended"]]
    silent = sum(row["extracted"] is None for row in ended)
    assert result["equal_rewards"] == {
        "reward": 0.0, "completions": len(rows), "cut": len(rows) - len(ended),
        "no_answer": silent, "wrong": len(ended) - silent,
    }  # fmt: skip


@pytest.mark.slow
def test_rewards_equal_within_every_question_alone_are_measured(tmp_path):
    """Vanilla has an error there."""
    _, prompts = asked()
    (tmp_path / "r.py").write_text(
        f"def score(prompt, text):\n    return float(prompt.question == {prompts[0].question!r})\n"
    )
    _, result, _ = study(tmp_path / "run", f"dataset.reward={tmp_path / 'r.py'}:score",
                         "baselines=[none,oracle]", "group_sizes=[2]")  # fmt: skip
    errors = {row["baseline"]: row["mse"] for row in result["curves"]}
    assert errors["oracle"] == pytest.approx(0, abs=1e-6) and errors["none"] > 0
    assert "All completions of each question got the same reward" in result["summary"]


@pytest.mark.slow
def test_imported_rollouts_of_equal_rewards_are_not_scored(tmp_path, monkeypatch):
    path = tmp_path / "completions.parquet"
    logged(path, accuracy_reward=48 * [1.0])
    monkeypatch.setattr(import_rollouts, "score_part", None)  # scoring now would fail
    config = compose("mse", *SIX, "study.cut_at=96", f"pool={path}")
    study_run.run(config, RunFolder(tmp_path / "run", config))
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["equal_rewards"] == {"reward": 1.0, "completions": 48, "right": 48}
    assert next_step(unsaved_study(result, asdict(config))) == (
        "log other questions, with some right and some wrong answers, and import them"
    )


@pytest.mark.slow(minutes=0.02)
def test_a_subset_of_a_scored_pool_has_no_table_of_zeros_either(tmp_path, last_alone):
    config, prompts = asked(last_alone)
    build_pool(config, prompts, tmp_path)
    others = sorted(prompts, key=lambda prompt: len(prompt.text))[:4]
    with pytest.raises(EqualRewards):
        build_pool(config, others, tmp_path)


@pytest.mark.parametrize(
    "counts, cut_at, fates",
    [
        ({"cut": 40, "no_answer": 20, "wrong": 4}, 160,
         "40 were cut at max_completion_length=160, 20 of the others contain no answer, "
         "4 are wrong."),
        ({"cut": 1, "no_answer": 1, "wrong": 62}, 160,
         "1 was cut at max_completion_length=160, 1 of the others contains no answer, "
         "62 are wrong."),
        ({"cut": 64, "no_answer": 0, "wrong": 0}, 8, "all were cut at max_completion_length=8."),
        ({"cut": 0, "no_answer": 63, "wrong": 1}, 8, "63 contain no answer, 1 is wrong."),
        ({"cut": 0, "no_answer": 0, "wrong": 64}, 8, "all are wrong."),
        ({"cut": 3}, None, "3 were cut."),
    ],
)  # fmt: skip
def test_sentences_say_what_became_of_the_completions(counts, cut_at, fates):
    text = equal_rewards_sentence(CompletionCounts(reward=0.0, completions=64, **counts), cut_at)
    assert text == (f"All 64 completions got reward 0, so there is no gradient to measure: {fates}")


def test_rewards_that_are_no_verdict_are_named_alone():
    counts = CompletionCounts(reward=0.25, completions=64, cut=0, no_answer=0)
    assert equal_rewards_sentence(counts, 8) == (
        "All 64 completions got reward 0.25, so there is no gradient to measure."
    )


COMMAND = "grpo-ustat mse model=tiny_base dataset=arithmetic prompt=bare"


@pytest.mark.parametrize(
    "counts, overrides, step",
    [
        ({"cut": 40, "no_answer": 20, "wrong": 4}, ("max_completion_length=160",),
         f"{COMMAND} max_completion_length=320"),
        ({"cut": 40, "no_answer": 20, "wrong": 4},
         ("max_completion_length=160", "study.questions=8", "budget.pool_completions=16"),
         f"{COMMAND} budget.pool_completions=16 study.questions=8 max_completion_length=320"),
        ({"cut": 20, "no_answer": 40, "wrong": 4}, (), f"{COMMAND} debug=prompts"),
        ({"cut": 0, "no_answer": 0}, (), f"{COMMAND} debug=prompts"),
        ({"cut": 4, "no_answer": 20, "wrong": 40}, (),
         "easier questions (dataset=NAME), examples in the prompt (prompt.shots=4), or another "
         "model: grpo-ustat mse dataset=arithmetic prompt=bare model=MODEL"),
        ({"cut": 4, "no_answer": 20, "wrong": 40}, ("prompt=few_shot",),
         "easier questions (dataset=NAME), or another model: grpo-ustat mse dataset=arithmetic "
         "prompt=few_shot model=MODEL"),
        ({"right": 64}, (),
         "harder questions: grpo-ustat mse model=tiny_base prompt=bare dataset=NAME"),
    ],
)  # fmt: skip
def test_the_next_step_follows_what_became_of_most(counts, overrides, step):
    result = {"equal_rewards": {"reward": 0.0, "completions": 64} | counts}
    assert next_step(unsaved_study(result, asdict(compose("mse", *overrides)))) == step


@pytest.mark.slow
def test_a_pool_of_one_reward_is_reused_by_another_study(tmp_path, never, monkeypatch):
    """Of the same output root, and by advice, which types the study."""
    root = f"output_root={tmp_path / 'out'}"
    first, second = (tmp_path / f"out/mse/{name}/seed-0" for name in "ab")
    _, one, _ = study(first, never, root)
    monkeypatch.setattr(pool_module, "start_sampler", None)  # sampling now would fail
    _, two, _ = study(second, never, root, "group_sizes=[2]")
    assert two["equal_rewards"] == one["equal_rewards"]
    assert unscored(first / "pool") == unscored(second / "pool") != []


@pytest.mark.slow
def test_advice_of_an_unscored_pool_is_that_of_its_study(tmp_path, monkeypatch):
    """In a process of its own, without drawing anything again."""
    monkeypatch.chdir(tmp_path)
    pool, hard = tmp_path / "pool", ("prompt.template='zz{question}'", "max_completion_length=3")
    config = compose("mse", *SIX, *hard, f"pool={pool}")
    study_run.run(config, RunFolder(tmp_path / "run", config))
    result = json.loads((tmp_path / "run/result.json").read_text())
    before = {path: path.stat().st_mtime_ns for path in pool.iterdir()}
    advice = advice_of(Request(pool))
    assert advice.sentence == result["summary"] and "max_completion_length=6" in advice.next
    assert {path: path.stat().st_mtime_ns for path in pool.iterdir()} == before


def test_a_damaged_unscored_part_is_named(tmp_path, never):
    config, prompts = asked(never)
    with pytest.raises(EqualRewards):
        build_pool(config, prompts, tmp_path)
    file = sorted(tmp_path.glob("*.unscored"))[2]
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(ValueError, match=f"{file.name} is damaged: delete it"):
        build_pool(config, prompts, tmp_path)
    file.unlink()
    with pytest.raises(EqualRewards):
        build_pool(config, prompts, tmp_path)
    assert PoolStore(tmp_path, draws_of(config)).unscored_rewards() == {(0.0,)}
