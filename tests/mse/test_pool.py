"""Pools: independent of processes and chunks, kept, resumed, extended, reused, refused."""

from __future__ import annotations

import json
import math
import multiprocessing
import shutil
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.config.train import LoraConfig
from grpo_ustat.distributed.workers import WorkCost
from grpo_ustat.estimators import closed_form as closed_form_module
from grpo_ustat.estimators.losses import loss_efficiencies
from grpo_ustat.estimators.moments import centred
from grpo_ustat.estimators.row_weights import Loss
from grpo_ustat.mse import pool as pool_module
from grpo_ustat.mse import scoring
from grpo_ustat.mse import study as study_run
from grpo_ustat.mse.pool import EqualRewards, build_pool, read_pool
from grpo_ustat.mse.pool_parts import Part
from grpo_ustat.mse.pool_store import PoolStore, draws_of
from grpo_ustat.mse.scoring import stored_rollouts
from grpo_ustat.pages.caveats import zero_scores_sentence
from grpo_ustat.policy.adapters import with_adapters
from grpo_ustat.policy.configured import configured_policy, configured_task
from grpo_ustat.policy.loading import load_policy
from grpo_ustat.policy.scores.backward import trainable
from grpo_ustat.runs.folder import RunFolder

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from commands import compose  # noqa: E402
from fakes import letter_prompts  # noqa: E402
from prompt_pools import pool_of  # noqa: E402
from reference import one_flat_score  # noqa: E402
from tabular import known_policy  # noqa: E402

SMALL = ("debug=mse", "model=tiny_base", "study.questions=6")


def build(folder, *overrides, size=None):
    config = compose("mse", *SMALL, *overrides)
    prompts = configured_task(config.task_options, config.model).prompts("study")[
        : config.study.questions
    ]
    return build_pool(config, prompts, Path(folder), size)


def study(path, *overrides):
    config = compose("mse", *SMALL, *overrides)
    study_run.run(config, RunFolder(path, config))
    return (path / "curves.csv").read_bytes()


def assert_close(one, two):
    np.testing.assert_array_equal(one.rewards_PN, two.rewards_PN)
    for name in ("gram_PNN", "features_PNR", "centred_sums_PR"):
        a, b = getattr(one, name), getattr(two, name)
        np.testing.assert_allclose(a, b, atol=1e-3 * np.abs(a).max(), err_msg=name)


@pytest.mark.slow(minutes=0.6)
def test_pools_do_not_depend_on_workers_or_batch_size(tmp_path):
    """One worker or two, and other sampling batches: the same pool to float32 rounding."""
    one, spent = build(tmp_path / "one")
    two, again = build(tmp_path / "two", "launch.workers=2", "rollout_batch_size=16")
    assert (spent.rollouts, spent.tokens) == (again.rollouts, again.tokens)
    assert_close(one, two)


@pytest.mark.slow
def test_sketched_sums_are_those_of_the_gram_matrices(tmp_path):
    """In full, ||sum_i (z_i - zbar) s_i||^2 follows from the Gram matrix alone."""
    pool, _ = build(tmp_path, "budget.gradient_sketch=300000", "budget.feature_sketch=300000")
    z, gram = centred(pool.rewards_PN), pool.gram_PNN
    exact = np.einsum("pi,pij,pj->p", z, gram, z)
    np.testing.assert_allclose(np.square(pool.centred_sums_PR).sum(axis=1), exact, rtol=1e-4)
    features = pool.features_PNR
    np.testing.assert_allclose(
        np.einsum("pir,pjr->pij", features, features), gram, atol=1e-4 * np.abs(gram).max()
    )


@pytest.mark.slow
def test_an_interrupted_study_goes_on_and_ends_byte_identical(tmp_path, monkeypatch):
    whole = study(tmp_path / "whole")
    writes, original = [], PoolStore.write

    def interrupted(self, prompt, first, part):
        if len(writes) == 3:
            raise KeyboardInterrupt
        writes.extend([prompt.id] * isinstance(part, Part))
        original(self, prompt, first, part)

    monkeypatch.setattr(PoolStore, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        study(tmp_path / "cut")
    monkeypatch.setattr(PoolStore, "write", original)
    scored, count = [], pool_module.score_part
    monkeypatch.setattr(
        pool_module, "score_part", lambda *a, **k: (scored.append(1), count(*a, **k))[1]
    )
    assert study(tmp_path / "cut") == whole
    assert len(scored) == 6 - 3


@pytest.mark.slow
def test_another_study_reuses_the_pool_without_the_model(tmp_path, monkeypatch):
    first = study(tmp_path / "a", f"pool={tmp_path / 'pool'}")
    monkeypatch.setattr(pool_module, "start_sampler", None)  # sampling now would fail
    second = study(tmp_path / "b", f"pool={tmp_path / 'pool'}", "group_sizes=[2,4,8,16]")
    assert second.splitlines()[1] == first.splitlines()[1]


@pytest.mark.slow
def test_a_pool_is_extended_by_the_completions_that_are_missing(tmp_path):
    small, _ = build(tmp_path / "grown")
    grown, spent = build(tmp_path / "grown", size=12)
    whole, _ = build(tmp_path / "whole", size=12)
    assert spent.rollouts == 6 * 12
    np.testing.assert_array_equal(grown.rewards_PN, whole.rewards_PN)
    np.testing.assert_array_equal(grown.gram_PNN[:, :8, :8], small.gram_PNN)
    np.testing.assert_allclose(grown.gram_PNN[:, 8:, 8:], whole.gram_PNN[:, 8:, 8:], rtol=1e-3)
    np.testing.assert_allclose(
        grown.centred_sums_PR,
        whole.centred_sums_PR,
        atol=1e-3 * np.abs(whole.centred_sums_PR).max(),
    )
    norms = np.sqrt(whole.sq_norm_PN)
    error = (grown.gram_PNN - whole.gram_PNN)[:, :8, 8:]
    relative = error / (norms[:, :8, None] * norms[:, None, 8:])
    sketch = grown.features_PNR.shape[2] ** -0.5
    assert np.sqrt(np.square(relative).mean()) < 2.5 * sketch  # unbiased, off by the sketch alone


@pytest.mark.slow
def test_a_pool_of_other_draws_is_refused_by_name(tmp_path):
    build(tmp_path)
    with pytest.raises(
        ValueError, match="has completions for temperature=1.0, but this study has 0.7"
    ):
        build(tmp_path, "temperature=0.7")
    with pytest.raises(
        ValueError, match="for model.name=tiny_base, but this study has tiny: use another"
    ):
        build(tmp_path, "model=tiny")
    with pytest.raises(ValueError, match="has 8 completions per question in parts"):
        build(tmp_path, size=6)


@pytest.mark.slow
def test_studies_that_fill_one_pool_at_once_get_what_each_would_alone(tmp_path):
    """Two processes, each of which waits before its first question until both are there."""
    context, alone = multiprocessing.get_context("fork"), build(tmp_path / "alone")[0]
    gun, found = context.Barrier(2), context.SimpleQueue()

    def fill():
        gun.wait(60)
        found.put(build(tmp_path / "shared")[0])

    processes = [context.Process(target=fill, daemon=True) for _ in range(2)]
    for process in processes:
        process.start()
    for pool in (found.get(), found.get()):
        assert_close(pool, alone)
    assert len(list((tmp_path / "shared").iterdir())) == 1 + 6


@pytest.mark.slow
def test_a_smaller_study_in_the_same_pool_takes_nothing_from_a_larger_one(tmp_path, monkeypatch):
    """It runs as a whole while the larger one scores its first question."""
    score, other = pool_module.score_part, []

    def meanwhile(*arguments):
        if not other:
            other.append(1)
            build(tmp_path / "shared", size=4)
        return score(*arguments)

    alone, _ = build(tmp_path / "alone", size=6)
    monkeypatch.setattr(pool_module, "score_part", meanwhile)
    shared, _ = build(tmp_path / "shared", size=6)
    np.testing.assert_array_equal(shared.rewards_PN, alone.rewards_PN)


def test_of_two_that_begin_a_pool_at_once_one_says_what_it_holds(tmp_path, monkeypatch):
    """The second has looked before the first has written."""
    PoolStore(tmp_path, {"seed": 0}).open()
    monkeypatch.setattr(Path, "is_file", lambda _: False)
    with pytest.raises(ValueError, match="has completions for seed=0, but this study has 1"):
        PoolStore(tmp_path, {"seed": 1}).open()
    assert [path.name for path in tmp_path.iterdir()] == ["pool.json"]


@pytest.mark.slow
def test_a_damaged_part_is_named(tmp_path):
    build(tmp_path)
    part = sorted(tmp_path.glob("*.safetensors"))[2]
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(ValueError, match=f"{part.name} is damaged: delete it"):
        build(tmp_path)
    part.unlink()
    build(tmp_path)
    assert part.is_file() and load_file(part)["rewards_N"].shape == (8,)


@pytest.mark.slow
def test_half_written_parts_do_not_count(tmp_path):
    build(tmp_path)
    part = sorted(tmp_path.glob("*.safetensors"))[0]
    shutil.move(part, part.with_name(f".{part.name}.1.tmp"))
    config = compose("mse", *SMALL)
    store = PoolStore(tmp_path, draws_of(config))
    prompts = configured_task(config.task_options, config.model).prompts("study")[:6]
    assert sorted(map(len, store.parts(prompts))) == [0, 1, 1, 1, 1, 1]


def test_what_a_pool_is_of_leaves_out_what_does_not_matter(tmp_path):
    one = draws_of(compose("mse", *SMALL))
    two = draws_of(compose("mse", *SMALL, "group_sizes=[2]", "dataset.study_size=40"))
    assert one == two and json.dumps(one)


@pytest.mark.slow
def test_cut_completions_are_named_once_and_at_once(tmp_path, capsys, monkeypatch):
    """After the first chunk of four, before it is judged, and not where a pool is extended."""
    heard = []
    original = pool_module.reward_completions
    monkeypatch.setattr(
        pool_module,
        "reward_completions",
        lambda *a: (heard.append(capsys.readouterr().err), original(*a))[1],
    )
    few = ("max_completion_length=8", "rollout_batch_size=16")
    with pytest.raises(EqualRewards):
        build(tmp_path, *few)
    line = "of the first 16 completions were cut at max_completion_length=8 and rarely contain an"
    assert line in heard[0] and "try max_completion_length=16" in heard[0]
    with pytest.raises(EqualRewards):
        build(tmp_path, *few, size=12)
    assert "WARNING" not in "".join(heard[1:]) + capsys.readouterr().err
    build(tmp_path / "whole", "max_completion_length=200")
    assert "WARNING" not in capsys.readouterr().err


def test_a_score_beyond_its_numbers_names_the_prompt(monkeypatch):
    """Written down it would be a table without numbers."""
    gram = torch.eye(3)
    gram[1, 1] = torch.inf
    scores = SimpleNamespace(gram_BB=gram, features_BR=torch.ones(3, 2), pooled_KR=torch.ones(2, 2))
    monkeypatch.setattr(scoring, "score_rollouts", lambda *_, **__: scores)
    policy = SimpleNamespace(model=SimpleNamespace(dtype=torch.float32))
    sampler = compose("mse", *SMALL).sampler_options
    rollouts = SimpleNamespace(prompts=[SimpleNamespace(id="6*41")])
    message = "completion 1 of prompt 6.41 has squared norm inf in float32: use model.dtype=float64"
    with pytest.raises(ConfigError, match=message):
        pool_module.score_part(
            policy, rollouts, 0, np.ones((3, 1)), sampler, (None, None), WorkCost()
        )


def test_scores_of_exactly_zero_are_counted():
    pool = pool_of(known_policy(), 4, np.random.default_rng(0))
    assert zero_scores_sentence(pool) == ""
    pool.gram_PNN[0, :2, :] = pool.gram_PNN[0, :, :2] = 0
    assert zero_scores_sentence(pool).startswith(f" 2 of {pool.rewards_PN.size} scores are exactly")


def test_a_pool_that_is_moved_while_it_is_read_is_one_line(tmp_path):
    config = compose("mse", *SMALL)
    prompts = configured_task(config.task_options, config.model).prompts("study")[:2]
    with pytest.raises(ConfigError, match="parts of it were moved or removed during this study"):
        pool_module.read_pool(PoolStore(tmp_path, {}), prompts, 8)


@pytest.mark.parametrize("offset", [0.0, 1e8])
def test_parts_of_unequal_mean_rewards_are_one_pool(tmp_path, offset):
    """Each part's sums are about its own mean; of the whole pool the gradient counts."""
    rng, (prompt,) = np.random.default_rng(3), letter_prompts("a")
    store, z_N, scores_NR = PoolStore(tmp_path, {}), np.arange(6) + offset, rng.normal(size=(6, 5))
    store.open()
    for rows in (slice(0, 4), slice(4, 6)):
        z, scores = z_N[rows], scores_NR[rows].astype(np.float32)
        store.write(prompt, rows.start, Part(
            rewards_N=z, lengths_N=np.ones(len(z), int), ended_N=z < math.inf, cost=np.ones(7),
            tokens_NT=np.ones((len(z), 1), np.int32), gram_NN=scores @ scores.T,
            features_NR=scores, centred_sum_R=centred(z).astype(np.float32) @ scores,
            score_sum_R=scores.sum(axis=0),
        ))  # fmt: skip
    pool, _ = read_pool(store, [prompt], 6)
    expected = np.cov(np.arange(6.0), scores_NR.T)[0, 1:]
    np.testing.assert_allclose(pool.gradients_of(slice(None))[0], expected, rtol=1e-5)


def test_a_question_holds_no_more_than_a_fifth_of_a_megabyte(tmp_path, monkeypatch):
    """8 completions and the default sketches: 0.15 MB of float32 as they are stored, with which the
    closed forms and two kinds of losses make do; of 50 000 questions a workstation holds 10 GB.
    """
    count, rng = 160, np.random.default_rng(0)
    store, prompts = PoolStore(tmp_path, {}), letter_prompts(*map(str, range(count)))
    store.open()
    scores_NR = rng.normal(size=(8, 509)).astype(np.float32)
    wide_NR = rng.normal(size=(8, 16381)).astype(np.float32)
    for prompt in prompts:
        z_N = rng.permutation(np.arange(8) % 2).astype(float)
        store.write(prompt, 0, Part(
            rewards_N=z_N, lengths_N=np.arange(1, 9), ended_N=z_N < 2, cost=np.ones(7),
            tokens_NT=np.ones((8, 8), dtype=np.int32), gram_NN=(scores_NR @ scores_NR.T) * 1.0,
            features_NR=scores_NR, centred_sum_R=centred(z_N).astype(np.float32) @ wide_NR,
            score_sum_R=wide_NR.sum(axis=0),
        ))  # fmt: skip
    monkeypatch.setattr(closed_form_module, "BLOCK", 4)  # what blocks take does not count here
    asked = closed_form_module.Request([], {}, {})
    losses = [Loss(name, "group_mean", {}, name, 8) for name in ("grpo", "dr_grpo")]
    tracemalloc.start()
    try:
        pool, _ = read_pool(store, prompts, 8)
        closed_form_module.closed_form(pool, asked)
        loss_efficiencies(pool, losses, [2, 4], 8, 10, 0)
        held = tracemalloc.get_traced_memory()[1] / count
    finally:
        tracemalloc.stop()
    assert held < 200_000


def stored_adapters(folder, std):
    """A folder of adapters on `tiny_base`, as a run begins with them but for the spread of B."""
    lora = LoraConfig(r=2, lora_alpha=4, target_modules="all-linear")
    base = load_policy("embedded:tiny_base").model
    adapted = with_adapters(lora, base, seed=0, revision=None, rollout="local")
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter.data, std=std)
    adapted.save_pretrained(folder)
    return folder


def autograd_gram(model, store, prompts, policy):
    """Products of the scores of each question's completions, one at a time by autograd."""
    gram = []
    for prompt in prompts:
        rollouts, _ = stored_rollouts(policy, prompt, next(store.completions([prompt], 4)))
        rows = zip(rollouts.tokens_PGT[0], rollouts.mask_PGT[0], strict=True)
        ids = rollouts.prompt_tokens[0]
        scores_ND = np.array([one_flat_score(model, ids, row[mask]) for row, mask in rows])
        gram.append(scores_ND @ scores_ND.T)
    return np.array(gram)


@pytest.mark.slow
@pytest.mark.parametrize("std", [0.0, 0.05], ids=["fresh", "trained"])
def test_adapters_are_measured_as_such_or_merged(tmp_path, std):
    """Against autograd of PEFT's own models; a fresh adapter's score is that of B alone."""
    peft = pytest.importorskip("peft")
    folder = stored_adapters(tmp_path / "adapters", std)
    own = ("model=hub", f"model.model_name_or_path={folder}", "model.dtype=float64",
           "study.questions=4", "budget.pool_completions=4", "launch.workers=1")  # fmt: skip
    config = compose("mse", *SMALL, *own)
    prompts = configured_task(config.task_options, config.model).prompts("study")[:4]
    for merge in (False, True):
        config = compose("mse", *SMALL, *own, f"study.merge_adapters={str(merge).lower()}")
        place = tmp_path / f"merge-{merge}"
        pool, _ = build_pool(config, prompts, place)
        policy = configured_policy(config.policy_options)
        base = load_policy("embedded:tiny_base", dtype="float64").model
        read = peft.PeftModel.from_pretrained(base, folder, is_trainable=True).eval()
        if merge:
            read = read.merge_and_unload().requires_grad_(True)
        slow = autograd_gram(read, PoolStore(place, draws_of(config)), prompts, policy)
        np.testing.assert_allclose(pool.gram_PNN, slow, rtol=1e-9, atol=1e-9 * slow.max())
        adapters = [name for name, _ in trainable(policy.model) if "lora_" in name]
        assert bool(adapters) is not merge and len(adapters) in (0, len(trainable(policy.model)))
    with pytest.raises(ConfigError, match="study.merge_adapters=false, but this study has true"):
        build_pool(config, prompts, tmp_path / "merge-False")
    part = compose("mse", *SMALL, *own, "study.parameters=lora_A")
    of_a, _ = build_pool(part, prompts, tmp_path / "of_a")
    assert bool(of_a.gram_PNN.any()) is (std > 0)


@pytest.mark.slow
def test_a_study_of_adapters_says_so(tmp_path):
    folder = stored_adapters(tmp_path / "adapters", 0.05)
    own = ("model=hub", f"model.model_name_or_path={folder}")
    (tmp_path / "run").mkdir()
    study(tmp_path / "run", *own)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["metric"]["norm"].endswith("over the adapters' parameters")
    assert "Errors are for the adapter parameters" in result["summary"]
    names = [name for name, _ in trainable(load_policy(str(folder), merge_adapters=False).model)]
    assert result["metric"]["parameters"] < 204032 and all("lora_" in name for name in names)
    config = compose("mse", *SMALL, *own)
    assert "(its adapters)" in config.plan
    assert "(its" not in compose("mse", *SMALL, *own, "study.merge_adapters=true").plan
