"""TRL's own GRPOTrainer on two processes that share the parameters among them: the constants of a
single process, and training that does not notice.
"""

from __future__ import annotations

import json
from importlib.util import find_spec

import numpy as np
import pytest
import torch

pytest.importorskip("trl", reason='TRL is not installed: pip install -e ".[trl]"')

from trl_run import launched  # noqa: E402

from grpo_ustat.estimators.groups import GroupTerms, noise_estimate  # noqa: E402
from grpo_ustat.estimators.scaling import CONSTANTS_AND_GRADIENT  # noqa: E402
from grpo_ustat.integrations.trl.sharding import INSTEAD, NO_MEMORY  # noqa: E402

STEPS = {"max_steps": 2, "gradient_accumulation_steps": 2}
SMALL = {"max_steps": 4, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 8}
TABLE = {"table": True, "max_steps": 3, "gradient_accumulation_steps": 2}
LAYERS = {"measuring": {"by_layer": True}}
CONSTANTS = {
    "sketched": TABLE | {"measuring": {"sketch": 1009}},  # signs are a function of the names
    "norms": TABLE | {"max_steps": 1, "measuring": {"parameters": "norm"}},
    "adapters": TABLE | {"max_steps": 1, "lora": 4},
    "layers": TABLE | LAYERS,
    "layers run out": TABLE | LAYERS | {"max_steps": 1, "runs_out_on": 1},
    "layers of adapters": TABLE | LAYERS | {"max_steps": 1, "lora": 4},
}
PLAIN = "plain", "plain small"
CASES = {
    "plain": STEPS | {"measure": False},
    "plain small": SMALL | {"measure": False},
    "measured": STEPS,
    "fails": STEPS | {"fails_on": 1},
    "no memory": STEPS | {"no_memory_on": 1},
    "by layer": STEPS | {"no_memory_on": 1, "by_layer_fits": True},
    "fails by layer": STEPS | LAYERS | {"fails_in_round_on": 1},
    "small batches": SMALL | LAYERS,
} | CONSTANTS
no_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed: pip install deepspeed"
)
SHARDED = [
    pytest.param("zero2", marks=no_deepspeed),
    pytest.param("zero3", marks=no_deepspeed),
    "fsdp2",
]


def trained(folder, way, cases, ranks=2):
    """What was printed in each case; by file, since FSDP2 on gloo may abort when all is done."""
    done = launched("trl_sharded.py", folder, way, json.dumps(cases), ranks=ranks)
    for name in cases:
        assert (folder / f"{name}-{ranks - 1}.json").exists(), f"{name}: {done.stderr[-3000:]}"
    return dict(part.split("\n", 1) for part in done.stdout.split("== ")[1:])


def constants(folder, case, rank):
    """C1, C2, C3 and ||grad J||^2 of each step."""
    steps = np.load(folder / f"{case}-{rank}.npz")["terms"]
    found = [noise_estimate([GroupTerms(*step)], 8).intervals for step in steps]
    return np.array([[one[name].estimate for name in CONSTANTS_AND_GRADIENT] for one in found])


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The constants of one process by case."""
    folder = tmp_path_factory.mktemp("single")
    more, whole = {"gradient_accumulation_steps": 4}, {"measuring": {}}
    trained(
        folder, "single",
        {
            case: one | more | (whole if case.startswith("layers") else {})
            for case, one in CONSTANTS.items()
        },
        ranks=1,
    )  # fmt: skip
    return {case: constants(folder, case, 0) for case in CONSTANTS}


@pytest.fixture(scope="module", params=SHARDED)
def run(request, tmp_path_factory):
    """All cases of a way: its name, where they are, and what was printed."""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, trained(folder, request.param, CASES)


@pytest.mark.nightly(minutes=2.0)
def test_parameters_are_sharded(run):
    """Where there is no GPU accelerate makes DDP of FSDP without a word."""
    way, folder, said = run
    for name in CASES:
        made = json.loads((folder / f"{name}-1.json").read_text())
        modules = set(made["modules"])
        assert "DistributedDataParallel" not in modules
        assert made["partitioned"] == (made["of"] if way == "zero3" else 0)
        assert made["parameters"] == ["DTensor" if way == "fsdp2" else "Parameter"]
        assert ("DeepSpeedEngine" in modules) == way.startswith("zero")
        if name in (*PLAIN, "no memory"):
            continue
        in_step = "layer" in name or name == "small batches"
        by_layer = in_step and not (way == "zero2" and name == "by layer")  # which holds them all
        whole = "with full weights" if way != "zero2" else ""
        assert made["way"] == ("layer by layer" if by_layer else whole)
        assert made["at_once"] == (4 if name == "layers run out" else 8)
    under = {"zero3": " under ZeRO-3", "fsdp2": " under FSDP2"}
    for name in ("measured", "layers"):
        way_of = json.loads((folder / f"{name}-0.json").read_text())["way"]
        words = f"{under.get(way, '')}{way_of and ' '}{way_of}"
        assert f"; scores in float32{words};" in said[name]
        assert not way_of or f"; scored {way_of}; " in said[name]


@pytest.mark.nightly(minutes=0.1)
@pytest.mark.parametrize("case", CONSTANTS)
def test_constants_are_those_of_one_process(run, single, case):
    """At the first step; later the weights differ by rounding."""
    _, folder, _ = run
    found, expected = constants(folder, case, 0), single[case]
    np.testing.assert_array_equal(found, constants(folder, case, 1))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert np.isfinite(expected).all() and len(expected) == CONSTANTS[case]["max_steps"]


@pytest.mark.nightly(minutes=0.1)
@pytest.mark.parametrize("case", [case for case in CASES if case not in {*CONSTANTS, *PLAIN}])
def test_training_ends_in_the_same_weights(run, case):
    way, folder, said = run
    unmeasured = PLAIN[case == "small batches"]
    weights, expected = (torch.load(folder / f"{name}.pt") for name in (case, unmeasured))
    assert weights.keys() == expected.keys() and len(weights) >= 50
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    fault = {
        "fails": "RuntimeError: no rule for this layer",
        "fails by layer": "RuntimeError: no rule for this layer",
        "no memory": f"{NO_MEMORY}, even layer by layer: {INSTEAD}",
    }.get(case)
    lines = [line for line in said[case].splitlines() if line.startswith("grpo_ustat")]
    if fault is None or (case == "no memory" and way == "zero2"):  # which holds them all
        assert "grpo_ustat: G*" in said[case] or "grpo_ustat: Your loss" in said[case]
        assert "stopped" not in said[case]
    else:
        assert lines == [f"grpo_ustat: stopped measuring at step 0: {fault}"]
