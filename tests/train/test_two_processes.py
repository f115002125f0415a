"""Two processes do what one does: replicas (DDP) and shards (FSDP2), in float64.

Of each exchange between ranks one case runs at every push, with replicas or with shards; the others
run at night.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from forks import FSDP2, in_ranks
from live_bytes import LiveBytes
from pyarrow import parquet
from resuming import rows, weights
from safetensors.torch import load_file
from slow_cases import nightly_but
from training_runs import SMALL as BASE
from training_runs import config_of, first_batch, fit

from grpo_ustat.policy.loading import load_policy
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.train import fsdp2, setup, trainer
from grpo_ustat.train import update as updates
from grpo_ustat.train.update import UpdateStats, minibatches

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="processes that have seen a GPU cannot be forked"
    ),
]
SMALL = (  # 9 prompts per step: 5 and 4; 7 test questions: 4 and 3
    "model=tiny_direct", "model.dtype=float64", "budget.rollouts=36", "group_size=4",
    "dataset.test_size=7", "max_completion_length=8", "max_steps=3", "eval_steps=3",
    "save_steps=3", "learning_rate=1e-4", "temperature=2",
)  # fmt: skip
GRPO = (  # minibatches of 3 prompts: 2 and 1, or 3 and none
    "objective=grpo_original", "objective.num_iterations=2", "objective.num_minibatches=3",
    "objective.beta=0.1", "max_grad_norm=0.05", "baseline=group_std",
    "optimizer=sgd", "learning_rate=1e-2",
)  # fmt: skip
CASES = {
    "algorithm1": ("optimizer=adamw",),
    "grpo": GRPO,
    "reinforce_pp": ("objective=grpo_original", "objective.num_iterations=2",
                     "objective.num_minibatches=3", "baseline=reinforce_pp"),
    "gspo": ("objective=gspo", "objective.num_iterations=2", "objective.num_minibatches=3"),
    "micro-batches": ("objective=trl_bnpo", "objective.micro_batch_size=6",
                      "objective.num_minibatches=3", "max_completion_length=3",
                      "objective.mask_truncated_completions=true"),
    "entropy": ("objective=grpo", "objective.num_minibatches=3", "objective.entropy_coef=0.01"),
    "penalty in the reward": ("objective=grpo", "objective.num_minibatches=3", "objective.beta=0.1",
                              "objective.kl_estimator=k1", "objective.kl_in=reward"),
    "critic": ("baseline=critic",),
    "several rewards": ("baseline=gdpo", "reward_funcs=[task,brevity]", "reward_weights=[1,0.3]"),
    "optimal": ("baseline=optimal", "budget.value_completions=3"),
    "filters": ("objective=trl_dapo", "objective.num_minibatches=3", "objective.num_iterations=2",
                "objective.zero_variance_groups=drop", "objective.reward_variance_share=0.8"),
    "adapters": ("lora=r16", "objective=grpo", "objective.num_minibatches=3",
                 "objective.beta=0.1"),
    "checkpointing": ("gradient_checkpointing=true",),
    "monitor": ("monitor.gradient_mse_every=1", "eval.decoding=[sampled,greedy]",
                "eval.num_generations=3"),
    "one row at a time": ("micro_batch_tokens=1",),
}  # fmt: skip
LAUNCHES = {"replicas": {}, "shards": FSDP2}


def first_gradient(path, *overrides, silent=slice(0)):
    """The gradient of the first update, and the tokens that a pass may have after it."""
    run, batch = first_batch(path, *SMALL, *overrides)
    context, _ = trainer.baseline_context(run, batch, 0)
    constants = trainer.fixed_logprobs(run, batch.rollouts)
    judged_PG = trainer.penalised_rewards(run, batch, constants)
    options = run.config.baseline.options
    advantage_PG = trainer.advantages(run.config.baseline.name, judged_PG, context, options)
    advantage_PG[silent] = 0
    mine_PG, found = run.own_rows(advantage_PG), UpdateStats()
    minibatch = next(iter(minibatches(run, batch.lengths_PG, 0)))
    with fsdp2.release_full_copy(run):
        updates.accumulate_gradient(run, batch.rollouts, mine_PG, minibatch, constants, found)
        updates.sum_gradients(run)
    grads = [fsdp2.full_tensor(p.grad) for p in updates.trainable(run.trained_policy)]
    gradient = torch.cat([g.flatten() for g in grads]).numpy()
    return {"gradient": gradient, "tokens": run.token_budget.tokens}


def on_two(launch, work):
    found = in_ranks(2, work, LAUNCHES[launch])
    failed = [text for text in found if isinstance(text, str) and "Traceback" in text]
    assert not failed, "\n".join(failed)
    return found


def assert_same_gradient(found, one, rtol=1e-12):
    scale = np.abs(one["gradient"]).max()
    assert scale > 0
    np.testing.assert_allclose(found["gradient"], one["gradient"], rtol=0, atol=rtol * scale)


@pytest.mark.parametrize("launch", nightly_but(["replicas"], LAUNCHES))
def test_a_rank_with_nothing_to_add_takes_part(tmp_path, launch):
    """Rank 1's advantages are all zero; and then those of both."""
    one = first_gradient(tmp_path, silent=slice(1, None, 2))
    for found in on_two(launch, lambda _: first_gradient(tmp_path, silent=slice(1, None, 2))):
        assert_same_gradient(found, one)
    for found in on_two(launch, lambda _: first_gradient(tmp_path, silent=slice(None))):
        assert not found["gradient"].any()


@pytest.mark.parametrize("launch", nightly_but(["shards"], LAUNCHES))
def test_an_output_layer_of_its_own_is_summed_too(tmp_path, launch):
    """Untied, and rank 1 has nothing to add: its output layer has no gradient before the sum."""
    policy = load_policy("embedded:tiny_direct")
    policy.model.config.tie_word_embeddings = False
    policy.model.lm_head.weight = torch.nn.Parameter(policy.model.lm_head.weight + 0.01)
    policy.model.save_pretrained(tmp_path / "model")
    policy.tokenizer.save_pretrained(tmp_path / "model")
    untied = ("model=hub", f"model.model_name_or_path={tmp_path / 'model'}", "model.dtype=float64")
    one = first_gradient(tmp_path, *untied, silent=slice(1, None, 2))
    for found in on_two(
        launch, lambda _: first_gradient(tmp_path, *untied, silent=slice(1, None, 2))
    ):
        assert_same_gradient(found, one)


@pytest.mark.nightly
def test_a_rank_makes_its_shards_without_a_second_whole_copy():
    """Bytes held at once while the policy is sharded, of those of its parameters."""

    def work(_):
        setup.join_ranks(config_of(*SMALL))
        policy, cpu = load_policy("embedded:tiny_base"), torch.device("cpu")
        whole = sum(p.numel() * p.element_size() for p in policy.model.parameters())
        with LiveBytes() as live:
            fsdp2.shard(policy, cpu)
        return live.peak / whole

    for share in on_two("shards", work):
        assert 0.4 < share < 0.7


def test_shards_compute_in_bfloat16_what_replicas_do(tmp_path):
    """The same passes, so the same roundings; another width of a batch changes some percent."""
    rounded = ("model.dtype=float32", "bf16=true", "share_prompts=false")
    found = {x: on_two(x, lambda _: first_gradient(tmp_path, *rounded))[0] for x in LAUNCHES}
    assert_same_gradient(found["shards"], found["replicas"], rtol=1e-5)
    with pytest.raises(AssertionError):
        assert_same_gradient(found["shards"], first_gradient(tmp_path), rtol=1e-5)


@pytest.mark.nightly
def test_a_full_copy_in_bfloat16_changes_no_bit(tmp_path):
    """Linear layers as autocast rounds them, but in the checkpoint and in the monitor's scores."""
    rounded = (
        "model.dtype=float32", "bf16=true", "eval_steps=1", "save_steps=1",
        "monitor.gradient_mse_every=1",
    )  # fmt: skip
    paths, gather = {exact: tmp_path / str(exact) for exact in (False, True)}, fsdp2.gather_weights

    def work(exact):
        copies = []
        set_up = trainer.set_up
        trainer.set_up = lambda *given: copies.append(set_up(*given)) or copies[0]
        fsdp2.gather_weights = lambda run, exact=exact: gather(run, exact)
        fit(paths[exact], *SMALL, *rounded)
        return {str(p.dtype): p.numel() for p in copies[0].policy.model.parameters()}

    for exact, path in paths.items():
        kinds = on_two("shards", lambda _, exact=exact: work(exact))
        assert ("torch.bfloat16" in kinds[0]) != exact
        assert {str(value.dtype) for value in weights(path, 3).values()} == {"torch.float32"}
    assert_same_run(*paths.values(), rtol=0)
    for name, value in weights(paths[False], 3).items():
        assert torch.equal(weights(paths[True], 3)[name], value)


def completions(path):
    return parquet.read_table(path / "completions.parquet").to_pylist()


def assert_same_run(one, two, rtol=1e-9, but=()):
    for row, other in zip(rows(one), rows(two), strict=True):
        assert row.keys() == other.keys()
        for name in row.keys() - set(but) - {"monitor/seconds"}:
            expected = row[name]
            if isinstance(expected, float):
                expected = pytest.approx(expected, rel=rtol, abs=1e-12)
            assert other[name] == expected, name
    assert (one / "eval.csv").read_text() == (two / "eval.csv").read_text()
    for row, other in zip(completions(one), completions(two), strict=True):
        assert other["advantage"] == pytest.approx(row["advantage"], rel=rtol, abs=1e-12)
        assert other | {"advantage": 0} == row | {"advantage": 0}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one process with these overrides, trained once for both launches."""
    paths = {}

    def trained_alone(*overrides):
        if overrides not in paths:
            paths[overrides] = fit(tmp_path_factory.mktemp("alone") / "one", *SMALL, *overrides)
        return paths[overrides]

    return trained_alone


def assert_same_training(one, tmp_path, launch, overrides, but=()):
    two = tmp_path / "two"
    checksums = on_two(launch, lambda _: trained(two, *SMALL, *overrides))
    assert checksums[0] == checksums[1]  # replicas stay equal bit by bit
    assert_same_run(one, two, but=but)
    files = [next((path / "checkpoint-3").glob("*model.safetensors")) for path in (one, two)]
    assert files[0].name == files[1].name
    expected, found = map(load_file, files)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9)


def trained(path, *overrides):
    """Train, and return the checksum of the rank's parameters."""
    seen = []
    set_up = trainer.set_up
    trainer.set_up = lambda *given: seen.append(set_up(*given)) or seen[0]
    fit(path, *overrides)
    return setup.checksum(seen[0].policy.model)


AT_EVERY_PUSH = ["grpo-replicas", "algorithm1-shards", "critic-shards", "filters-replicas",
                 "monitor-shards", "reinforce_pp-replicas"]  # fmt: skip


@pytest.mark.parametrize("case, launch", nightly_but(AT_EVERY_PUSH, CASES, LAUNCHES))
def test_two_ranks_train_as_one(tmp_path, alone, case, launch):
    # A penalised reward is the others' up to rounding only, and so is an advantage of zero: what
    # is counted over completions with another advantage differs.
    counted = ("frac_completions_skipped", "ratio/mean", "clip_ratio/region_mean")
    but = counted if case == "penalty in the reward" else ()
    overrides = ("optimizer=sgd", *CASES[case])
    assert_same_training(alone(*overrides), tmp_path, launch, overrides, but)


def test_tokens_of_highest_entropy_are_those_of_all_ranks(tmp_path, alone):
    """Shards have no whole policy to read entropies from, and refuse."""
    some = ("objective=trl_dapo", "objective.num_minibatches=3", "optimizer=sgd",
            "objective.top_entropy_quantile=0.3")  # fmt: skip
    assert_same_training(alone(*some), tmp_path, "replicas", some)
    refused = in_ranks(2, lambda _: str(fit(tmp_path / "shards", *SMALL, *some)), FSDP2)
    assert all("top_entropy_quantile=0.3" in text and "FSDP2" in text for text in refused)


@pytest.mark.parametrize("order", ["two then one", "one then two"])
def test_a_checkpoint_of_shards_resumes_anywhere(tmp_path, alone, order):
    """One step in one world and two in the other; weights are a plain folder in both."""
    one = alone()
    path, first = tmp_path / "parts", ("max_steps=1",)
    if order == "two then one":
        on_two("shards", lambda _: str(fit(path, *SMALL, *first)))
        fit(path, *SMALL)
    else:
        fit(path, *SMALL, *first)
        on_two("shards", lambda _: str(fit(path, *SMALL)))
    assert_same_run_but_evaluations(one, path)
    assert {p.name for p in (path / "checkpoint-1").iterdir()} == {
        p.name for p in (one / "checkpoint-3").iterdir()
    }


def assert_same_run_but_evaluations(one, path):
    (path / "eval.csv").write_text((one / "eval.csv").read_text())  # one more, after step 1
    assert_same_run(one, path)


def out_of_memory_once(rank):
    """Rank 1's memory runs out in the middle of its first gradient."""
    backward, failed = updates.Head.backward, []

    def fail(*arguments):
        result = backward(*arguments)
        if rank == 1 and not failed:
            failed.append(True)
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return result

    updates.Head.backward = fail


def test_memory_that_runs_out_on_one_replica_changes_no_gradient(tmp_path):
    one = first_gradient(tmp_path)

    def work(rank):
        out_of_memory_once(rank)
        return first_gradient(tmp_path)

    two = on_two("replicas", work)
    assert [found["tokens"] for found in two] == [16384, 8192]
    for found in two:
        assert_same_gradient(found, one)


def failing(path, prepare, *overrides):
    def work(rank):
        prepare(rank)
        return str(fit(path, *SMALL, *overrides))

    return work


def test_memory_that_runs_out_on_one_shard_ends_both(tmp_path):
    zero, one = in_ranks(2, failing(tmp_path / "run", out_of_memory_once), FSDP2)
    assert one.startswith("ConfigError: ") and "micro_batch_tokens=16384" in one
    assert zero.startswith("SystemExit: error: rank 0 of 2 ")


def raise_in_the_update(rank):
    def fail(*_):
        raise ValueError("a fault of rank 1")

    if rank == 1:
        updates.Head.backward = fail


def die_in_the_update(rank):
    if rank == 1:
        updates.Head.backward = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


FAULTS = {
    "raises": (raise_in_the_update, "ValueError: a fault of rank 1"),
    "dies": (die_in_the_update, "gone"),
}


@pytest.mark.parametrize(
    "fault, launch", nightly_but(["raises-shards", "dies-replicas"], FAULTS, LAUNCHES)
)
def test_a_rank_that_fails_ends_the_other_in_one_line(tmp_path, fault, launch):
    prepare, told = FAULTS[fault]
    zero, one = in_ranks(2, failing(tmp_path / "run", prepare), LAUNCHES[launch])
    assert one.startswith(told)
    assert zero.startswith("SystemExit: error: rank 0 of 2 ")
    assert not (tmp_path / "run" / "result.json").exists()


def test_ranks_that_start_from_different_weights_are_refused(tmp_path):
    def differ(rank):
        set_up = trainer.set_up

        def moved(*given):
            run = set_up(*given)
            run.policy.model.lm_head.weight.data[0, 0] += 1e-9 * rank
            return run

        trainer.set_up = moved

    for text in in_ranks(2, failing(tmp_path / "run", differ)):
        assert text.startswith("RefusedByRank: ") and "weights" in text


@pytest.mark.parametrize(
    "environment, overrides, match",
    [
        (FSDP2 | {"FSDP_VERSION": "1"}, (), "fsdp_version=1 is not supported: use 2"),
        (FSDP2 | {"FSDP_OFFLOAD_PARAMS": "true"}, (), "fsdp_offload_params=True is not supported"),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, (), "mixed_precision=bf16 "),
        ({}, ("budget.rollouts=4",), "1 prompts per step for 2 processes"),
    ],
)
def test_what_ranks_cannot_do_is_refused(tmp_path, environment, overrides, match):
    def work(_):
        config = config_of(*SMALL, *overrides)
        return str(trainer.fit(config, RunFolder(tmp_path / "run", config)))

    for text in in_ranks(2, work, environment):
        assert text.startswith("RefusedByRank: ") and match in text


def launched(name, folder, *overrides):
    """On CPUs, only `--multi_gpu` makes accelerate start several processes."""
    root = Path(__file__).parents[2]
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2",
        "--main_process_port=0", "-m", "grpo_ustat", "train", *BASE, *SMALL, *overrides,
        f"launch.fsdp2={str(name == 'fsdp2').lower()}", f"hydra.run.dir={folder / name}",
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )


@pytest.mark.parametrize("name", nightly_but(["fsdp2"], ["ddp", "fsdp2"]))
def test_accelerate_launch_starts_ranks(tmp_path, alone, name):
    """The float64 models of a fresh process have float32 norms, so only rewards are compared."""
    done = launched(name, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("page: ") == 1
    one = alone()
    assert [row["reward"] for row in rows(tmp_path / name)] == [row["reward"] for row in rows(one)]
    assert json.loads((tmp_path / name / "result.json").read_text())["steps"] == 3


@pytest.mark.nightly
def test_a_launched_refusal_is_one_line(tmp_path):
    done = launched("ddp", tmp_path, "budget.rollouts=4")
    assert done.returncode != 0
    assert done.stderr.count("error: 1 prompts per step ") == 1
