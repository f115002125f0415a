"""Whole weights of models that FSDP shards: those of one process, and afterwards all is as before.

Two forked ranks that gloo joins; tests/integrations/test_sharded_trl.py has them in TRL's trainer,
and DeepSpeed.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import trl_room  # noqa: F401  # TRL need not be installed
from accelerate import PartialState
from forks import in_ranks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from trl_run import MODEL

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.integrations.trl import sharding
from grpo_ustat.integrations.trl.in_step import LayersInStep, separate_layers
from grpo_ustat.integrations.trl.scoring import unchanged
from grpo_ustat.integrations.trl.sharding import (
    check_sharding,
    precision_of,
    scored_weights,
    sharding_of,
)
from grpo_ustat.policy.loading import load_policy
from grpo_ustat.policy.scores.backward import completion_scores
from grpo_ustat.policy.scores.check import check_scores

NO_MEMORY = f"{sharding.NO_MEMORY}, even layer by layer: {sharding.INSTEAD}"
IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [5, 6, 9, 8, 7, 3]])
ROWS = IDS, torch.ones_like(IDS), torch.tensor([[0, 0, 1, 1, 1, 1]] * 2)
NARROW = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def trainer_of(model=None, fsdp=None, **plugin):
    """A trainer with what is asked of TRL's."""
    state = SimpleNamespace(deepspeed_plugin=None)
    if fsdp:
        plugin = {"cpu_offload": False, "mixed_precision_policy": None} | plugin
        state.fsdp_plugin = SimpleNamespace(fsdp_version=fsdp, **plugin)
    accelerator = SimpleNamespace(state=state, unwrap_model=lambda model: model)
    return SimpleNamespace(accelerator=accelerator, model=model, model_wrapped=model)


def scores_of(model, layer_weights=None):
    """Squared norms and the pooled gradient by name."""
    scores = completion_scores(
        model, *ROWS, weights_KB=torch.tensor([[1.0, -0.5]]), by_layer=layer_weights is not None,
        layer_weights=layer_weights,
    )  # fmt: skip
    gradients = {name: value.numpy() for name, value in scores.gradients_K[0].items()}
    return scores.sq_norm_B.numpy(), gradients


def assert_same(scores, expected, rounding=1e-5):
    """Scores and others but for rounding."""
    np.testing.assert_allclose(scores[0], expected[0], rtol=rounding)
    assert scores[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        least = rounding * abs(gradient).max()
        np.testing.assert_allclose(scores[1][name], gradient, 0, least, err_msg=name)


def assert_empty(layers):
    """No layer has weights, nor any memory for them."""
    for layer in layers.layers:
        for parameter in layer.parameters():
            assert parameter.isnan().all() and parameter.untyped_storage().nbytes() <= 8


def sharded(checkpointing, policy=None):
    """The embedded policy in FSDP's units, a layer each, as accelerate wraps them."""
    model = load_policy(str(MODEL)).model.train()
    if checkpointing:
        apply_activation_checkpointing(
            model, check_fn=lambda module: isinstance(module, Qwen2DecoderLayer)
        )
    units = [m for m in model.modules() if isinstance(m, Qwen2DecoderLayer)]
    for unit in [*units, model]:
        fully_shard(unit, mp_policy=policy or MixedPrecisionPolicy())
    return model


def state_of(model):
    """What scoring must leave as it was."""
    hooks = [
        (list(m._forward_pre_hooks.values()), list(m._forward_hooks.values()))
        for m in model.modules()
    ]
    parts = [
        (p.to_local() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()
    ]
    kinds = [(name, type(p), p.requires_grad, p.grad) for name, p in model.named_parameters()]
    return list(map(type, model.modules())), hooks, kinds, parts


def step(model):
    """The loss of a training step with its gradient, and the norm of the latter's parts."""
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    parts = [p.grad for p in model.parameters() if p.grad is not None]
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in parts]
    return loss.item(), float(torch.stack([p.norm() for p in parts]).norm())


@pytest.mark.slow(minutes=0.5)
@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_scores_are_those_of_one_process(checkpointing, by_layer):
    expected = scores_of(load_policy(str(MODEL)).model)

    def work(rank):
        PartialState(cpu=True)
        untouched = step(sharded(checkpointing))
        model = sharded(checkpointing)
        before = state_of(model)
        trainer, found = trainer_of(model, 2), None
        with scored_weights(trainer, by_layer) as (whole, layers), unchanged(whole):
            assert not any(isinstance(p, DTensor) for p in whole.parameters())
            precision = precision_of(whole)
            if layers is None:
                if rank == 0:  # no rank waits for another
                    check_scores(whole, *ROWS)
                found = scores_of(whole)
            else:
                assert_empty(layers)
                for done in range(2):
                    with layers.round(1):
                        if rank == done:  # the other has nothing to do
                            found = scores_of(whole, layers.weights)
                assert_empty(layers)
        after = state_of(model)
        assert before[:3] == after[:3]
        assert all(map(torch.equal, before[3], after[3]))
        assert step(model) == untouched
        return found, precision

    for found in in_ranks(2, work):
        assert not isinstance(found, str), found
        scores, precision = found
        assert precision == "float32"
        assert_same(scores, expected, 1e-5 if by_layer else 0)


@contextmanager
def broken():
    raise ValueError("no\nway")
    yield


@pytest.mark.slow(minutes=0.1)
def test_a_fault_of_one_rank_is_raised_on_all():
    """Of its memory, before any rank gathers; of the gathering; but not what it does within."""

    def work(rank):
        PartialState(cpu=True)
        trainer = trainer_of(sharded(False, NARROW), 2, mixed_precision_policy=NARROW)
        model, gather = sharding.SHARDED["FSDP2"](trainer)
        before, said = state_of(model), []
        for more, way in (([10**15] if rank == 1 else [], None), ([], broken), ([], None)):
            if rank == 0 and way:
                way = nullcontext

            def changed(*modules, more=more, way=way):
                sizes, whole = gather(*modules)
                return sizes + more, way() if way else whole

            try:
                with (
                    mock.patch.dict(sharding.SHARDED, FSDP2=lambda _, one=changed: (model, one)),
                    scored_weights(trainer) as (whole, _),
                ):
                    said.append(precision_of(whole))
                    if rank == 1:
                        raise RuntimeError("of this rank alone")
            except (ConfigError, RuntimeError) as error:
                said.append(str(error))
        assert all(map(torch.equal, before[3], state_of(model)[3]))
        return said

    expected = [NO_MEMORY, "ValueError: no way", "bfloat16"]
    assert in_ranks(2, work) == [expected, [*expected, "of this rank alone"]]


class Elsewhere:
    """Weights that a model's layers have only within blocks, as under ZeRO-3.

    Attributes:
        gathered: layers, as they were gathered.
    """

    def __init__(self, layers):
        self.weights = {p: p.data for layer in layers for p in layer.parameters()}
        self.gathered, self.whole = [], set()
        for parameter in self.weights:
            parameter.data = torch.empty(0)

    def gather(self, layer, _):
        return [p.nbytes for p in self.weights.values()], self.block(layer)

    @contextmanager
    def block(self, layer):
        assert not self.whole, "one layer's weights at a time"
        self.gathered.append(layer)
        self.whole = set(layer.parameters())
        for parameter in self.whole:
            parameter.data = self.weights[parameter]
        try:
            yield
        finally:
            for parameter in self.whole:
                parameter.data = torch.empty(0)
            self.whole = set()


def test_layers_have_their_weights_in_turn():
    """Whatever is done in a round, the same layers are gathered in the same order."""
    model = load_policy(str(MODEL)).model
    expected = scores_of(model)
    layers = separate_layers(model)
    kept, elsewhere = dict(model.named_parameters()), Elsewhere(layers)
    in_step = LayersInStep(layers, elsewhere.gather)

    def fail(*_, **__):
        raise ValueError("in a layer")

    with in_step.in_place():
        assert_empty(in_step)
        elsewhere.gathered.clear()
        with in_step.round(1):
            found = scores_of(model, in_step.weights)
        assert_same(found, expected)
        sweep = [*layers, *reversed(layers)]
        assert elsewhere.gathered == sweep
        with in_step.round(2):  # nothing to do
            pass
        broken_layer = mock.patch.object(layers[1], "forward", fail)
        with pytest.raises(ValueError), in_step.round(1), broken_layer:
            scores_of(model, in_step.weights)
        assert elsewhere.gathered == 4 * sweep
        with pytest.raises(ConfigError, match="computed out of order"), in_step.round(1):
            scores_of(model, in_step.weights)
            scores_of(model, in_step.weights)
        assert elsewhere.gathered == 5 * sweep
        assert_empty(in_step)
    assert dict(model.named_parameters()) == kept


def test_layers_that_share_weights_cannot_have_them_in_turn():
    model = load_policy(str(MODEL)).model
    first, second = separate_layers(model)[:2]
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    assert separate_layers(model) == []
    made_of = pytest.raises(
        ConfigError, match="by_layer=True, but Qwen2ForCausalLM does not consist of"
    )
    with made_of, scored_weights(trainer_of(model), by_layer=True):
        pass


def test_what_shards_by_name():
    assert sharding_of(trainer_of()) == ""
    assert sharding_of(trainer_of(fsdp=2)) == "FSDP2"
    assert [sharding_of(zero(stage)) for stage in (2, 3)] == ["", "ZeRO-3"]


def zero(stage, **fields):
    trainer = trainer_of()
    trainer.accelerator.state.deepspeed_plugin = SimpleNamespace(
        zero_stage=stage, deepspeed_config={"zero_optimization": {"stage": stage} | fields}
    )
    return trainer


def in_parts(**sizes):
    trainer = trainer_of(fsdp=2)
    trainer.accelerator.parallelism_config = SimpleNamespace(**sizes)
    return trainer


REFUSED = {
    "use fsdp_version=2": trainer_of(fsdp=1),
    "use fsdp_offload_params=False": trainer_of(fsdp=2, cpu_offload=True),
    "fsdp_offload_params=True": trainer_of(fsdp=2, cpu_offload=CPUOffloadPolicy()),
    "offload_param.device=nvme": zero(3, offload_param={"device": "nvme"}),
    "tp_size=2 splits": in_parts(tp_size=2),
    "use sp_size=1": in_parts(tp_size=1, sp_size=4),
}
TAKEN = {
    "fsdp2": trainer_of(fsdp=2, cpu_offload=OffloadPolicy()),
    "zero3": zero(3, offload_param={"device": "none"}),
    "optimizer": zero(3, offload_optimizer={"device": "cpu"}),
    "no offload": zero(3, offload_param=None),
    "not in parts": in_parts(tp_size=1, cp_size=None),
}


@pytest.mark.parametrize("message", REFUSED)
def test_weights_elsewhere_are_refused(message):
    with pytest.raises(ConfigError, match=message):
        check_sharding(REFUSED[message])


@pytest.mark.parametrize("trainer", TAKEN.values(), ids=TAKEN)
def test_weights_on_the_device_are_taken(trainer):
    check_sharding(trainer)
