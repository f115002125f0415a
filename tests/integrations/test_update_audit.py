"""What an update consumed, what its gradient is compared with, and that training does not notice.

Scores and gradients are made up here; tests/integrations/test_real_audit.py has those of a policy
in the real trainer, also in shards.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from trl_room import GRPOTrainer, output_of

from grpo_ustat.estimators.row_weights import Loss, row_weights
from grpo_ustat.integrations.trl import scoring
from grpo_ustat.integrations.trl.applied import plain_name, shards
from grpo_ustat.integrations.trl.audit import UpdateAudit
from grpo_ustat.integrations.trl.generation import Completion, Group
from grpo_ustat.policy.scores.sketch import Sketch
from grpo_ustat.records import BaselineContext

RNG = np.random.default_rng(0)
SIZE, LONGEST, END = 4, 6, 9
SIZES = {"weight": 300, "bias": 20}
GROUP_STD = ("group_std", {"epsilon": 1e-4})


class Trainer(GRPOTrainer):
    """Hands micro-batches to its loss, whose gradient is what `gradient` says."""

    def __init__(self, **changes):
        super().__init__(group_size=SIZE)
        self.model = torch.nn.Module()
        for name, size in SIZES.items():
            self.model.register_parameter(name, torch.nn.Parameter(torch.zeros(size)))
        self.model.register_parameter("frozen", torch.nn.Parameter(torch.zeros(3), False))
        self.beta, self.epsilon_high, self.losses, self.clipped = 0.0, 0.2, 0, []
        self.args = SimpleNamespace(
            gradient_accumulation_steps=2, steps_per_generation=2, epsilon_high=None
        )
        vars(self.args).update(changes)
        vars(self.accelerator).update(
            device=torch.device("cpu"), mixed_precision="no", clip_grad_norm_=self.clip
        )

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.losses += 1
        return "its loss"

    def clip(self, parameters, max_norm):
        self.clipped.append([p.grad.clone() for p in parameters if p.grad is not None])
        return "its norm"

    def update(self, micro_batches, gradient):
        """One update, as transformers' Trainer makes it."""
        for inputs in micro_batches:
            assert self.compute_loss(self.model, inputs, num_items_in_batch=None) == "its loss"
        start = 0
        for name, size in SIZES.items():
            part = torch.from_numpy(gradient[start : start + size]).float()
            self.model.get_parameter(name).grad, start = part, start + size
        assert self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0) == "its norm"
        self.state.global_step += 1


class Batch:
    """Groups of a generation batch, with made up scores of every completion."""

    def __init__(self, prompts=3, seed=0):
        rng = np.random.default_rng(seed)
        self.rewards = rng.random((prompts, SIZE))
        self.rewards[0] = 1.0  # a zero-variance group
        self.groups = [
            Group(
                [Completion([p + 1, p + 2], [seed + 3, 5 + i, END][: 2 + i % 2])
                 for i in range(SIZE)], rewards_G, np.stack([rewards_G, rewards_G], axis=1)
            )
            for p, rewards_G in enumerate(self.rewards)
        ]  # fmt: skip
        self.rows = [one for group in self.groups for one in group.completions]
        self.lengths = np.array(
            [[len(c.completion_ids) for c in g.completions] for g in self.groups]
        )
        self.scores = rng.normal(size=(len(self.rows), 320))

    def sketches(self, sketch, rows=None):
        """Sketches of the scores of rows that vary, by their tokens."""
        found = {}
        for i in range(SIZE, len(self.rows)) if rows is None else rows:
            named = {"weight": self.scores[i, :300], "bias": self.scores[i, 300:]}
            sketch_R = sketch.of({name: torch.from_numpy(v) for name, v in named.items()})
            key = (tuple(self.rows[i].prompt_ids), tuple(self.rows[i].completion_ids))
            found[key] = sketch_R.numpy().astype(np.float32)
        return found

    def inputs(self, rows, tokens=0):
        """A micro-batch as TRL hands it to its loss."""
        own = [self.rows[i] for i in rows]
        output = output_of([c.prompt_ids for c in own], [c.completion_ids for c in own])
        return output | {"num_items_in_batch": torch.tensor(tokens or int(self.lengths.sum()))}

    def gradient(self, loss, ended=None, micro_batch=None, order=None):
        """What TRL would hand to the optimizer: of the loss that is minimised."""
        context = BaselineContext(lengths_PG=self.lengths)
        weights = row_weights(loss, self.rewards, context, ended, order)
        return -weights.ravel() @ self.scores


def audit_of(trainer, loss_type="dapo", **options):
    loss = Loss("own", *GROUP_STD, loss_type, LONGEST, **options)
    sketch = Sketch(SIZES, 97)
    return UpdateAudit(trainer, sketch, loss), sketch, loss


SHUFFLED = RNG.permutation(12)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "luspo", "vespo", "bnpo"])
def test_shuffled_rows_find_their_weights(loss_type):
    trainer, batch = Trainer(), Batch()
    audit, sketch, loss = audit_of(trainer, loss_type)
    audit.expect(batch.sketches(sketch), batch.groups)
    if loss_type == "bnpo":
        loss = Loss("own", *GROUP_STD, loss_type, LONGEST, 6)
    gradient = batch.gradient(loss, order=SHUFFLED)
    trainer.update([batch.inputs(part) for part in np.split(SHUFFLED, 2)], gradient)
    (result,) = audit.results
    assert result.agrees and result.ratio == pytest.approx(1, abs=1e-5)
    assert (result.step, trainer.losses) == (0, 2)
    (clipped,) = trainer.clipped
    np.testing.assert_array_equal(torch.cat(clipped), gradient.astype(np.float32))


def test_an_update_that_nobody_expects_is_left_alone(monkeypatch):
    """Ranks do not meet, nothing is kept."""
    monkeypatch.setattr(scoring, "gather_object", None)
    trainer, batch = Trainer(), Batch()
    audit, sketch, loss = audit_of(trainer)
    for _ in range(3):
        trainer.update([batch.inputs(range(12))], batch.gradient(loss))
    assert audit.results == [] and len(trainer.clipped) == 3 and audit._inputs == []


def test_only_the_next_update_of_training_is_compared():
    trainer, batch = Trainer(), Batch()
    audit, sketch, loss = audit_of(trainer)
    for step in range(4):
        if step % 2 == 0:
            audit.expect(batch.sketches(sketch), batch.groups)
        trainer.model.eval()
        trainer.compute_loss(trainer.model, batch.inputs(range(4)))
        trainer.model.train()
        trainer.update([batch.inputs(range(12))], batch.gradient(loss))
    assert [(one.step, one.agrees) for one in audit.results] == [(0, True), (2, True)]


@pytest.mark.parametrize("what", ["masked completion", "tokens of tools", "no gradient"])
def test_what_does_not_count(what):
    """Row 5 was truncated and its mask is 0; the first tokens are a tool's; the bias has no part in
    any score.
    """
    trainer, batch = Trainer(), Batch()
    masked = what == "masked completion"
    loss_type = "grpo" if masked else "dapo"
    audit, sketch, loss = audit_of(trainer, loss_type, mask_truncated_completions=masked)
    if what == "no gradient":
        batch.scores[:, 300:] = 0
    audit.expect(batch.sketches(sketch), batch.groups)
    inputs, ended = batch.inputs(range(12)), None
    if masked:
        inputs["completion_mask"][5] = 0
        ended = np.arange(12).reshape(3, 4) != 5
    if what == "tokens of tools":
        inputs["tool_mask"] = torch.ones_like(inputs["completion_mask"])
        inputs["tool_mask"][:, 0] = 0
        batch.lengths -= 1
    trainer.update([inputs], batch.gradient(loss, ended))
    assert audit.results[0].agrees
    trainer.model.bias.grad = None
    assert [name for name, *_ in shards(trainer)] == ["weight"]


def test_names_are_those_of_the_model_without_wrappers():
    assert plain_name("_orig_mod.h.0._checkpoint_wrapped_module.c.weight") == "h.0.c.weight"


def of_half_batches(batch, loss):
    """Two generation batches in one update, each divided by its own tokens."""
    half = len(batch.rows) // 2
    tokens = [int(batch.lengths.ravel()[part].sum()) for part in (slice(half), slice(half, None))]
    weights = row_weights(loss, batch.rewards, BaselineContext(lengths_PG=batch.lengths)).ravel()
    weights *= batch.lengths.sum() / 2 / np.repeat(tokens, half)
    micro_batches = [
        batch.inputs(range(half), tokens[0]),
        batch.inputs(range(half, 2 * half), tokens[1]),
    ]
    return micro_batches, -weights @ batch.scores


def test_tokens_of_generation_batches_are_told_from_those_of_the_update():
    trainer, batch = Trainer(steps_per_generation=1), Batch(prompts=4)
    batch.lengths = np.array([[len(c.completion_ids) for c in g.completions] for g in batch.groups])
    for group in batch.groups[2:]:
        for one in group.completions:
            one.completion_ids.extend([4, 4, END])
    batch.lengths[2:] += 3
    audit, sketch, loss = audit_of(trainer)
    audit.expect(batch.sketches(sketch), batch.groups)
    micro_batches, gradient = of_half_batches(batch, loss)
    trainer.update(micro_batches, gradient)
    assert not audit.results[0].agrees and audit.results[0].cosine > 0.9
    assert audit.results[0].sentence.endswith(
        "it is the gradient of a loss that divides by the tokens of each generation batch (1 "
        "micro-batches, as set by steps_per_generation), not by the tokens of the update (2 "
        "micro-batches)"
    )


@pytest.mark.parametrize(
    "loss_type, factor, changes, says",
    [
        ("cispo", 0.2, {}, "loss_type='cispo' without epsilon_high caps every weight at 0.2"),
        ("grpo", 0.5, {}, "divided once more by gradient_accumulation_steps = 2"),
        ("grpo", 0.4, {"gradient_accumulation_steps": 5},
         "a window of 2 micro-batches is divided by 5, as if it were full"),
        ("grpo", -1.0, {}, "the sign is reversed"),
    ],
)  # fmt: skip
def test_known_faults_are_named(loss_type, factor, changes, says):
    trainer, batch = Trainer(**changes), Batch()
    audit, sketch, loss = audit_of(trainer, loss_type)
    audit.expect(batch.sketches(sketch), batch.groups)
    trainer.update(
        [batch.inputs(range(6)), batch.inputs(range(6, 12))], factor * batch.gradient(loss)
    )
    assert audit.results[0].sentence == (
        f"applied = {factor:.3f} x declared, cosine {np.sign(factor):.3f}: {says}"
    )


def test_what_cannot_be_compared_is_said_and_training_goes_on():
    trainer, batch = Trainer(), Batch()
    audit, sketch, loss = audit_of(trainer)
    audit.expect(batch.sketches(sketch, rows=range(4, 11)), batch.groups)
    trainer.update([batch.inputs(range(12))], batch.gradient(loss))
    audit.expect(batch.sketches(sketch), batch.groups[:2])
    trainer.update([batch.inputs(range(12))], batch.gradient(loss))
    audit.expect(batch.sketches(sketch), batch.groups)
    trainer.update([{"completion_mask": None}], batch.gradient(loss))
    trainer.reward_weights = None
    audit.expect(batch.sketches(sketch), batch.groups)
    trainer.update([batch.inputs(range(12))], batch.gradient(loss))
    trainer.reward_weights = torch.ones(1)
    trainer.model.bias.requires_grad_(False)
    audit.expect(batch.sketches(sketch), batch.groups)
    trainer.update([batch.inputs(range(12))], batch.gradient(loss))
    says = [one.sentence.removeprefix("The gradient was not compared: ") for one in audit.results]
    assert says[:2] == [
        "1 of the update's 12 completions have no scores",
        "4 of the update's 12 completions are not in a measured group",
    ]
    assert says[2].startswith("KeyError") and says[3].startswith("AttributeError")
    assert "bias was scored but is not trained" in says[4]
    assert len(trainer.clipped) == 5 and not any(one.agrees for one in audit.results)
