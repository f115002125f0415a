"""The gradients of TRL's own GRPOTrainer are those that its documented losses declare, in every way
in which it runs, or differ by what is known of it.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("trl", reason='TRL is not installed: pip install -e ".[trl]"')

from trl_audit import declared, train  # noqa: E402
from trl_run import launched  # noqa: E402

from grpo_ustat.estimators.applied_gradient import NOT_OF_ROWS  # noqa: E402
from grpo_ustat.estimators.row_weights import Loss  # noqa: E402
from grpo_ustat.integrations.trl.audit import OWN_NORMALISER, UpdateResult  # noqa: E402

pytestmark = pytest.mark.nightly(minutes=1)
LOSS_TYPES = ("dapo", "grpo", "dr_grpo", "bnpo", "luspo", "cispo", "sapo", "vespo")
CISPO = "loss_type='cispo' without epsilon_high caps every weight at 0.2"


def windows(steps, **changes):
    """32 rows an update, in so many micro-batches."""
    size = 32 // steps
    return {"gradient_accumulation_steps": steps, "per_device_train_batch_size": size} | changes


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_is_the_declared_one(tmp_path, loss_type, steps):
    """But for `cispo`, which documents importance weights and has a constant."""
    _, audit = train(tmp_path, loss_type=loss_type, **windows(steps))
    assert [one.step for one in audit.results] == [0, 1]
    for one in audit.results:
        if loss_type == "cispo":
            assert one.sentence == f"applied = 0.200 x declared, cosine 1.000: {CISPO}"
        else:
            assert one.agrees and abs(one.ratio - 1) < 1e-5 and one.cosine > 1 - 1e-9


@pytest.mark.parametrize(
    "changes",
    [
        {"scale_rewards": "batch"}, {"scale_rewards": "none"}, {"temperature": 0.7},
        {"beta": 0.04}, {"max_grad_norm": 0.0}, {"loss_type": "cispo", "epsilon_high": 5.0},
        {"importance_sampling_level": "sequence"}, {"sketch": 10**6},
        {"mask_truncated_completions": True, "max_completion_length": 32},
        {"mask_truncated_completions": True, "max_completion_length": 32, "loss_type": "grpo"},
        {"mask_truncated_completions": True, "max_completion_length": 32, "loss_type": "bnpo"},
        windows(4, steps_per_generation=2, loss_type="grpo"),
    ],
    ids=str,
)  # fmt: skip
def test_every_setting_is_the_declared_one(tmp_path, changes):
    _, audit = train(tmp_path, **changes)
    assert len(audit.results) == 2
    assert all(one.agrees and abs(one.ratio - 1) < 1e-5 for one in audit.results)


def test_bfloat16_is_rounding(tmp_path):
    _, audit = train(tmp_path, bf16=True)
    assert all(one.agrees and one.cosine < 1 - 1e-6 for one in audit.results)


@pytest.mark.parametrize("steps, steps_per_generation", [(1, 4), (4, 2)])
def test_tokens_of_another_number_of_micro_batches(tmp_path, steps, steps_per_generation):
    size = 32 // max(steps, steps_per_generation)
    _, audit = train(
        tmp_path, gradient_accumulation_steps=steps, steps_per_generation=steps_per_generation,
        per_device_train_batch_size=size, max_steps=1,
    )  # fmt: skip
    (one,) = audit.results
    assert not one.agrees and OWN_NORMALISER in one.sentence and 0.9 < one.ratio < 1.1


@pytest.mark.parametrize(
    "planted, says",
    [
        ({"fault": 0.5}, "divided once more by gradient_accumulation_steps = 2"),
        ({"fault": -1.0}, "the sign is reversed"),
        ({"dropout": 0.01}, NOT_OF_ROWS),
        ({"entropy_coef": 0.1}, NOT_OF_ROWS),
        ({"top_entropy_quantile": 0.2}, NOT_OF_ROWS),
    ],
)
def test_planted_faults_are_named(tmp_path, planted, says):
    _, audit = train(tmp_path, max_steps=1, **planted)
    (one,) = audit.results
    assert not one.agrees and f": {says}" in one.sentence


def test_a_loss_that_is_declared_otherwise(tmp_path):
    loss = Loss("own", "group_mean", {}, "grpo", 64)
    _, audit = train(tmp_path, loss=loss, max_steps=1)
    assert audit.results[0].sentence.endswith(
        ": it is the gradient of loss_type=dapo with advantages group_std"
    )
    assert declared(audit.trainer).loss_type == "dapo"


def of_two_ranks(folder, way, cases):
    """Results of every case, which are the same on both ranks, and the kinds of its modules."""
    done = launched("trl_audit.py", folder, way, json.dumps(cases))
    found = {}
    for name in cases:
        files = [folder / f"{name}-{rank}.json" for rank in range(2)]
        assert all(file.exists() for file in files), done.stderr[-3000:]
        one, other = (json.loads(file.read_text()) for file in files)
        assert one["results"] == other["results"]
        found[name] = one["results"], one["kinds"]
    return found


@pytest.mark.parametrize(
    "way, kind",
    [
        ("ddp", "DistributedDataParallel"), ("zero2", "DeepSpeedEngine"),
        ("zero3", "DeepSpeedEngine"), ("fsdp2", "DTensor"),
    ],
)  # fmt: skip
def test_every_way_of_two_ranks(tmp_path, way, kind):
    if way.startswith("zero"):
        pytest.importorskip("deepspeed")
    cases = {
        "dapo": {}, "bnpo": {"loss_type": "bnpo"}, "cispo": {"loss_type": "cispo"},
        "bf16": {"bf16": True},  # the last: DeepSpeed's plugin keeps it
    }  # fmt: skip
    cases = {name: changes | {"per_device_train_batch_size": 8} for name, changes in cases.items()}
    for name, (results, kinds) in of_two_ranks(tmp_path, way, cases).items():
        assert kind in kinds and len(results) == 2
        for _, ratio, cosine, agrees, sentence in map(UpdateResult._make, results):
            if name == "cispo":
                assert sentence == f"applied = 0.200 x declared, cosine 1.000: {CISPO}"
                continue
            assert agrees, sentence
            if name != "bf16":
                assert abs(ratio - 1) < 1e-5 and cosine > 1 - 1e-9
