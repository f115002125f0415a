"""In TRL's own GRPOTrainer: the numbers are those of our pool and of plain differentiation, and the
weights those of a run without the callback, bit for bit.
"""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("trl", reason='TRL is not installed: pip install -e ".[trl]"')

import trl_run  # noqa: E402
from pyarrow import parquet  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
)

from grpo_ustat.estimators.baselines import advantages  # noqa: E402
from grpo_ustat.estimators.groups import group_terms, noise_estimate  # noqa: E402
from grpo_ustat.estimators.moments import pool_gradient_weights  # noqa: E402
from grpo_ustat.estimators.row_weights import Loss  # noqa: E402
from grpo_ustat.integrations.trl import GradientNoiseCallback, objective  # noqa: E402
from grpo_ustat.logs.convert import convert  # noqa: E402
from grpo_ustat.logs.formats import FORMATS, Options  # noqa: E402
from grpo_ustat.records import BaselineContext  # noqa: E402

pytestmark = pytest.mark.nightly(minutes=0.5)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three steps, measured at 0 and 2."""
    folder = tmp_path_factory.mktemp("run")
    trainer, callback = trl_run.train(folder, every=2)
    assert isinstance(callback, GradientNoiseCallback)
    return folder, trainer, callback


def lora(rate=0.1):
    """Adapters of every linear layer, with dropout."""
    from peft import LoraConfig

    return LoraConfig(r=8, lora_dropout=rate, target_modules="all-linear", task_type="CAUSAL_LM")


def logged_rows(folder, step):
    """Rows of the completions that the policy after `step` updates wrote."""
    rows = parquet.read_table(
        folder / f"completions/completions_{step + 1:05d}.parquet"
    ).to_pylist()
    assert {row["policy_step"] for row in rows} == {step}
    return rows


def reference_terms(model, rows, size, weights):
    """Of a step's groups, each completion differentiated by itself."""
    model.eval()
    trained = [p for p in model.parameters() if p.requires_grad]
    scores = []
    for row in rows:
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(dim=-1)
        chosen = logprobs.gather(1, ids[0, 1:, None])[len(row["prompt_ids"]) - 1 :]
        gradient = torch.autograd.grad(chosen.sum(), trained)
        scores.append(torch.cat([g.flatten() for g in gradient]).double().numpy())
    rewards = sum(
        weight * np.array([row[name] or 0.0 for row in rows]) for name, weight in weights.items()
    )
    rewards_PG = rewards.reshape(-1, size)
    scores_PGD = np.stack(scores).reshape(*rewards_PG.shape, -1)
    ghat_PD = np.einsum("pg,pgd->pd", pool_gradient_weights(rewards_PG), scores_PGD)
    return group_terms(rewards_PG, np.square(scores_PGD).sum(axis=2), ghat_PD @ ghat_PD.T)


def assert_same(terms, expected, rtol=2e-4):
    """To the rounding of float32."""
    for one, other in zip(terms, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol * np.nanmax(np.abs(other)))
    assert np.isfinite(expected[4]).sum() >= 2, "nothing varies: the test shows nothing"


@pytest.mark.parametrize("adapters", [False, True])
def test_training_ends_in_the_same_weights(adapters, tmp_path):
    """Dropout is on, and every update is audited. Optimizer and random states too."""
    options = {"dropout": 0.1, "peft_config": lora() if adapters else None}
    folder, tmp_path = tmp_path / "measured", tmp_path / "plain"
    _, callback = trl_run.train(folder, every=2, measuring={"audit_every": 1}, **options)
    trl_run.train(tmp_path, measure=False, **options)
    assert [one.first for one in callback.windows] == [0, 2]
    assert [one.step for one in callback.audit.results if one.agrees] == [0, 2]
    measured, plain = folder / "checkpoint-3", tmp_path / "checkpoint-3"
    file = "adapter_model.safetensors" if adapters else "model.safetensors"
    weights, expected = (load_file(one / file) for one in (measured, plain))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    start = load_file(folder / "checkpoint-1" / file)
    assert any(not torch.equal(weights[name], start[name]) for name in start)
    assert (measured / "optimizer.pt").read_bytes() == (plain / "optimizer.pt").read_bytes()
    states = [torch.load(one / "rng_state.pth", weights_only=False) for one in (measured, plain)]
    assert states[0]["python"] == states[1]["python"]
    assert torch.equal(states[0]["cpu"], states[1]["cpu"])
    np.testing.assert_array_equal(states[0]["numpy"][1], states[1]["numpy"][1])


def test_the_log_has_its_numbers(run):
    _, trainer, callback = run
    rows = [row for row in trainer.state.log_history if "grpo_ustat/c1" in row]
    assert [row["step"] for row in rows] == [1, 3]
    intervals = callback.estimate().intervals
    for name in ("c1", "c2", "c3", "grad_sq", "zero_variance"):
        assert rows[-1][f"grpo_ustat/{name}"] == pytest.approx(intervals[name].estimate)
    assert rows[-1]["grpo_ustat/zero_variance"] == pytest.approx(
        np.mean([row["frac_reward_zero_std"] for row in trainer.state.log_history[:3:2]])
    )


def test_numbers_are_those_of_our_pool(run, tmp_path):
    """The same completions through `convert`, and `mse pool=FILE` with the checkpoint of theirs."""
    folder, _, callback = run
    conversion = convert(folder, FORMATS["trl"], tmp_path / "rows.parquet", Options())
    assert conversion.exact and conversion.kept == 64
    study = [
        f"pool={tmp_path}/rows.parquet", f"model={folder}/checkpoint-2", "study.questions=500",
        "budget.gradient_sketch=1000000",
        f"hydra.run.dir={tmp_path}/study",
    ]  # fmt: skip
    subprocess.run([sys.executable, "-m", "grpo_ustat", "mse", *study], check=True, cwd=tmp_path)
    scaling = json.loads((tmp_path / "study/result.json").read_text())["scaling"]
    intervals = noise_estimate([callback.windows[-1].terms], 8).intervals
    for name in ("c1", "c2", "c3", "gstar"):
        for end, value in zip(("", "_low", "_high"), intervals[name], strict=True):
            expected = scaling[f"{name}{end}"]
            if expected is None:
                assert not np.isfinite(value), (name, end)
            else:
                assert value == pytest.approx(expected, rel=1e-4), (name, end)


def test_numbers_are_those_of_plain_differentiation(run):
    folder, _, callback = run
    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoint-2")
    expected = reference_terms(model, logged_rows(folder, 2), 8, {"right": 1.0})
    assert_same(callback.windows[-1].terms, expected)


def test_weighted_rewards_and_masked_truncated_completions(tmp_path):
    """Of 32 tokens most completions are truncated; they are scored as they were written, and in
    float32 where training computes in bfloat16.
    """
    trainer, callback = trl_run.train(
        tmp_path, rewards=(trl_run.right, trl_run.ones), reward_weights=[1.0, -3.0, 1.0],
        mask_truncated_completions=True, max_completion_length=32, max_steps=1, bf16=True,
    )  # fmt: skip
    rows = logged_rows(tmp_path, 0)
    assert 0 < trainer.state.log_history[0]["completions/clipped_ratio"] <= 1
    model = AutoModelForCausalLM.from_pretrained(trl_run.MODEL)
    expected = reference_terms(model, rows, 8, {"right": 1.0, "ones": -3.0})
    assert_same(callback.windows[0].terms, expected)


def test_adapters_alone_are_scored(tmp_path):
    from peft import AutoPeftModelForCausalLM, LoraConfig

    _, callback = trl_run.train(
        tmp_path, rewards=(trl_run.right, trl_run.ones), max_steps=2,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "down_proj"]),
    )  # fmt: skip
    path = tmp_path / "checkpoint-1"
    model = AutoPeftModelForCausalLM.from_pretrained(path, is_trainable=True)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) < 20_000
    expected = reference_terms(model, logged_rows(tmp_path, 1), 8, {"right": 1.0, "ones": 1.0})
    assert_same(callback.windows[-1].terms, expected)


EIGHT = {"steps_per_generation": 8, "per_device_train_batch_size": 8}  # of 4 accumulated
DROPPING = {
    "adapters": {"lora": 0.1, "learning_rate": 1e-2},
    "attention": {"dropout": 0.1},
    "both": {"lora": 0.05, "dropout": 0.05, "gradient_checkpointing": False},
    "bf16": {"lora": 0.1, "bf16": True},
    "iterations": {"lora": 0.1, "learning_rate": 1e-2, "num_iterations": 2},
    "ratios": {"dropout": 0.1, "learning_rate": 1e-4, "loss_type": "sapo"} | EIGHT,
    "sequence ratios": {"dropout": 0.1, "loss_type": "grpo",
                        "importance_sampling_level": "sequence"} | EIGHT,
    "clipped ratios": {"dropout": 0.1, "loss_type": "dr_grpo"} | EIGHT,
}  # fmt: skip


@pytest.mark.parametrize("name", DROPPING)
def test_with_dropout_the_applied_gradient_is_the_declared_one(name, tmp_path, capsys):
    """With the masks that the update drew; and its ratios pi/pi_old, where TRL has two draws."""
    changes = dict(DROPPING[name])
    rate = changes.pop("lora", None)
    _, callback = trl_run.train(
        tmp_path, peft_config=None if rate is None else lora(rate), save_steps=100,
        measuring={"audit_every": 1}, **changes,
    )  # fmt: skip
    exact = name != "bf16"
    assert len(callback.windows) == (2 if "ratios" in name or name == "iterations" else 3)
    assert len(callback.audit.results) == len(callback.windows) and not callback.fault
    for one in callback.audit.results:
        assert one.agrees, one.sentence
        assert abs(one.ratio - 1) < (1e-5 if exact else 0.05)
        assert one.cosine > 1 - (1e-9 if exact else 1e-2)
    said = capsys.readouterr().out
    assert ("TRL draws dropout masks for pi_old too" in said) is (
        "ratios" in name or name == "iterations"
    )


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_positions_that_left_padding_shifts_are_named(rate, tmp_path, monkeypatch):
    """GPT-2 has absolute positions, which TRL's loss does not hand over."""
    tokenizer = AutoTokenizer.from_pretrained(trl_run.MODEL)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer), n_positions=256, n_embd=64, n_layer=2, n_head=4,
            resid_pdrop=rate, embd_pdrop=rate, attn_pdrop=rate, initializer_range=0.2,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: model)
    monkeypatch.setattr(
        trl_run, "questions", lambda: [{"prompt": "1" * (1 + i % 7)} for i in range(64)]
    )
    _, callback = trl_run.train(
        tmp_path, rewards=(length,), max_steps=1, save_steps=100, max_completion_length=16
    )
    (one,) = callback.audit.results
    assert not one.agrees and one.cosine < 0.99
    assert "it is the gradient of positions that count the padding before a prompt" in one.sentence


def length(completions, **_):
    """Characters, in whole numbers."""
    return [float(len(text)) for text in completions]


def train_on_two_processes(folder, **changes):
    """Two steps of ten rows a rank and micro-batch in groups of four; see `trl_run`."""
    changes |= {"num_generations": 4, "per_device_train_batch_size": 10, "max_steps": 2}
    done = trl_run.launched("trl_run.py", folder, json.dumps(changes))
    assert done.returncode == 0, done.stderr[-3000:]


def test_dropout_on_two_processes(tmp_path):
    """Scores of a rank's rows have the masks of that rank."""
    train_on_two_processes(
        tmp_path, gradient_accumulation_steps=2, dropout=0.1, measuring={"audit_every": 1}
    )
    found = [json.loads((tmp_path / f"audit-{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1] and len(found[0]) == 2
    assert all(abs(ratio - 1) < 1e-5 and cosine > 1 - 1e-9 for _, ratio, cosine, *_ in found[0])


def test_groups_straddle_two_processes(tmp_path):
    """Ten rows a rank, five groups of four: the third is half on each."""
    train_on_two_processes(tmp_path, gradient_accumulation_steps=1)
    rows = logged_rows(tmp_path, 1)
    assert len(rows) == 20
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1")
    expected = reference_terms(model, rows, 4, {"right": 1.0, "ones": 1.0})
    for rank in range(2):
        terms = np.load(tmp_path / f"terms-{rank}.npz")
        assert_same([terms[name] for name in terms.files], expected)


def test_its_loss_is_read_from_its_arguments_and_its_advantages_are_ours(tmp_path):
    """Each reward normalised apart; the recorder is a function without rewards."""
    trainer, _ = trl_run.train(
        tmp_path, rewards=(trl_run.right, trl_run.ones), measure=False, max_steps=1,
        multi_objective_aggregation="normalize_then_sum", reward_weights=[1.0, 0.3, 1.0], beta=0.04,
    )  # fmt: skip
    assert objective.unmeasured(trainer) is None and objective.rollouts_of(trainer) == 64
    loss = objective.loss_of(trainer)
    assert loss == Loss("dapo", "gdpo", {"epsilon": 1e-4}, "dapo", 64)
    assert "std of each reward, without its penalty" in objective.described(trainer)
    logged = [list(trainer._logs["rewards"][name]) for name in trainer.reward_func_names]
    rewards = np.array(logged, dtype=float).T.reshape(-1, 8, 3)
    assert np.isnan(rewards[..., 2]).all() and not np.isnan(rewards[..., :2]).any()
    weights = trainer.reward_weights.double().numpy()
    context = BaselineContext(rewards_PGF=np.nan_to_num(rewards), reward_weights_F=weights)
    ours = advantages(loss.baseline, rewards[..., 0], context, loss.options)
    theirs = np.array(trainer._logs["advantages"]).reshape(ours.shape)
    np.testing.assert_allclose(ours, theirs, atol=2e-6)  # TRL's are of float32
