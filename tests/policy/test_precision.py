"""What is TF32 and what never is, on an emulated GPU; sums that a GPU makes in another way."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from emulated_tf32 import EmulatedTF32
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_ustat.policy import precision
from grpo_ustat.policy.precision import set_tf32, wide_bmm
from grpo_ustat.policy.scores.accumulate import Accumulator, inner_products, sliced_products
from grpo_ustat.policy.scores.layers import (
    Lookup,
    dense_rows,
    row_sums,
    row_sums_of_products,
)
from grpo_ustat.policy.scores.sketch import MAX_UNPACKED, Signs, Sketch

CPU = torch.device("cpu")


@pytest.fixture
def tf32():
    set_tf32(True)
    yield
    set_tf32(False)


def norms(left, right, gram):
    totals = Accumulator(len(left), CPU, gram=gram)
    with EmulatedTF32() as mode:
        totals.add_outer("w", torch.Size([left.shape[2], right.shape[2]]), [(left, right)])
    return totals.sq_norm_B, mode.products


def test_gradients_of_weights_may_be_tf32_and_their_inner_products_not(tf32):
    left, right = torch.randn(3, 5, 8), torch.randn(3, 5, 7)
    found, products = norms(left, right, gram=True)
    exact = torch.bmm(left.double().mT, right.double()).square().sum(dim=(1, 2))
    assert products == 1  # one slice
    torch.testing.assert_close(found, exact, rtol=2e-3, atol=0)
    assert (found / exact - 1).abs().max() > 1e-6


def test_on_a_cpu_nothing_is_tf32():
    assert norms(torch.randn(2, 3, 4), torch.randn(2, 3, 5), False)[1] == 0


class Calls(TorchDispatchMode):
    """The operations, in order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_bfloat16_factors_are_not_widened_on_a_gpu():
    with FakeTensorMode():
        left, right = (torch.empty(2, 3, 3, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        with Calls() as calls:
            result = wide_bmm(left, right)
    assert result.dtype == torch.float32
    assert calls.names == ["aten.bmm.dtype"]


def test_without_such_a_product_they_are(monkeypatch):
    torch.manual_seed(0)
    left, right = torch.randn(2, 4, 3), torch.randn(2, 3, 5)
    exact = torch.bmm(left.bfloat16().double(), right.double())
    torch.testing.assert_close(wide_bmm(left.bfloat16(), right).double(), exact)
    monkeypatch.setattr(precision, "HAS_WIDENING_BMM", False)
    with FakeTensorMode():
        narrow = torch.empty(2, 3, 3, dtype=torch.bfloat16, device="cuda")
        assert wide_bmm(narrow, narrow).dtype == torch.float32


@pytest.mark.parametrize("length", [5, 1000])
def test_inner_products_in_slices_are_the_same(length):
    flat = torch.randn(3, length, dtype=torch.float64)
    torch.testing.assert_close(sliced_products(flat, slices=7), inner_products(flat))


def test_a_gpu_takes_slices():
    with Calls() as calls:
        inner_products(torch.empty(4, 2**21, device="meta"))
    assert "aten.bmm.default" in calls.names


def test_sums_of_rows_are_the_same_either_way():
    place, grads = torch.randint(-2, 9, (3, 20)), torch.randn(3, 20, 5, dtype=torch.float64)
    one, other = (sums(place, grads, 6) for sums in (row_sums, row_sums_of_products))
    torch.testing.assert_close(one, other)
    assert one.shape == (3, 6, 5) and one.any()


def test_no_float_sum_of_a_gpu_is_in_any_order():
    """scatter_add_ is atomic there; an embedding's gradient is a product instead."""
    lookup = Lookup(torch.randint(9, (3, 20)), torch.empty(3, 20, 5, device="meta"))
    with Calls() as calls:
        [(ids_U, dense_BUD)] = dense_rows(lookup)
    assert dense_BUD.shape == (3, len(ids_U), 5)
    assert not any("scatter" in name or "index_add" in name for name in calls.names)


@pytest.mark.parametrize("count", [1001, MAX_UNPACKED + 13])
def test_signs_are_those_of_earlier_pools(count):
    """As they were made and kept, a byte each."""
    digest = hashlib.blake2b(b"3\x1fname", digest_size=16).digest()
    bits = np.random.Philox(key=np.frombuffer(digest, dtype=np.uint64))
    words = bits.random_raw((count + 63) // 64)
    expected = 1 - 2 * np.unpackbits(words.view(np.uint8), count=count).astype(np.int8)
    signs = Signs({"name": count}, seed=3)
    for start, stop in ((0, count), (5, 78), (8, 16), (count - 9, count), (0, count)):
        found = signs.of("name", start, stop, CPU)
        assert found.dtype == torch.int8
        np.testing.assert_array_equal(found.numpy(), expected[start:stop])


def test_the_signs_of_a_large_model_are_a_bit_each_and_there_once():
    sizes = {"a": 2**20, "b": 2**20}
    first = Sketch(sizes, 509)
    second = Sketch(sizes, 16381, signs=first.signs)
    for sketch in (first, second):
        sketch.of({name: torch.ones(size) for name, size in sizes.items()})
    held = [*vars(first.signs)["_bits"].values(), *vars(first.signs)["_kept"].values()]
    assert sum(x.untyped_storage().nbytes() for x in held) == 2**21 / 8
    assert second.signs is first.signs
