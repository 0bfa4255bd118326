"""The CPU engine's sums at a token's home, to the bit: the order, the fused multiply-adds and the single rounding that the contract names."""
from __future__ import annotations

import pytest
import torch
from oracle import same_bits

from mok.engines.cpu_combine import SharedRows, combine_backward_tasks, combine_tasks, gate_tasks
from mok.engines.cpu_tiles import TileMath
from mok.runtime import runtime

DTYPES = [pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)]
T, K, H, R = 150, 3, 37, 600


def data(dtype):
    """y rows over eight powers of two, so that the order of additions shows; a third of the routes missing, token 7 without any."""
    generator = torch.Generator().manual_seed(0)
    acc = TileMath(dtype).acc
    rows = (torch.randn(R, H, generator=generator) * 2.0 ** torch.randint(-4, 5, (R, 1), generator=generator)).to(dtype)
    slots = torch.randperm(R, generator=generator)[:T * K].view(T, K)
    slots = slots.masked_fill(torch.rand(T, K, generator=generator) < 0.33, -1)
    slots[7] = -1
    weights = torch.randn(T, K, generator=generator).to(acc)
    weights[slots < 0] = float("nan")                                             # a missing route is skipped, not multiplied by anything
    shared = [torch.randn(T, H, generator=generator).to(dtype) for _ in range(2)]
    return rows, slots, weights, shared, torch.rand(T, 1, generator=generator).to(acc), torch.randn(1, H, generator=generator).to(dtype), acc


def fma(scale, row, acc):
    """One fused multiply-add of the contract: float64 sums of exact products, rounded once; in float64 itself a product and a sum."""
    return (row.double() * scale.double() + acc.double()).to(acc.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_combine(dtype):
    rows, slots, weights, (first, second), gate, _, acc_dtype = data(dtype)
    out = torch.empty(T, H, dtype=dtype)
    runtime.tiles.run(combine_tasks(TileMath(dtype), out, rows, slots, weights, [SharedRows(first, gate), SharedRows(second)]))
    expected = torch.zeros(T, H, dtype=acc_dtype)
    for t in range(T):
        for k in range(K):
            if slots[t, k] >= 0:
                expected[t] = fma(weights[t, k], rows[slots[t, k]], expected[t])
    expected = fma(gate, first, expected)
    expected = fma(torch.ones(()), second, expected)
    assert same_bits(out, expected.to(dtype))
    assert same_bits(out[7], fma(torch.ones(()), second[7], fma(gate[7], first[7], torch.zeros(H, dtype=acc_dtype))).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_combine_backward(dtype):
    rows, slots, _, (first, second), d_score, gate_weight, acc_dtype = data(dtype)
    out = torch.empty(T, H, dtype=dtype)
    runtime.tiles.run(combine_backward_tasks(TileMath(dtype), out, rows, slots, [SharedRows(first, d_score, gate_weight), SharedRows(second)]))
    expected = torch.zeros(T, H, dtype=acc_dtype)
    for t in range(T):
        for k in range(K):
            if slots[t, k] >= 0:
                expected[t] += rows[slots[t, k]].to(acc_dtype)
    expected = fma(d_score, gate_weight, expected + first.to(acc_dtype)) + second.to(acc_dtype)
    assert same_bits(out, expected.to(dtype))


def test_a_missing_route_keeps_the_sums_sign():
    """-0 from a product that rounds to it survives a skipped route, which adding 0 would turn into +0."""
    rows = torch.tensor([[-1e-30]])
    out = torch.empty(1, 1)
    weights = torch.tensor([[1e-30, 1.0]])
    runtime.tiles.run(combine_tasks(TileMath(torch.float32), out, rows, torch.tensor([[0, -1]]), weights, []))
    assert out.item() == 0 and torch.signbit(out).item()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates(dtype):
    """sigmoid(<x, gate weight>) in the accumulation dtype, the same for a token alone."""
    generator = torch.Generator().manual_seed(0)
    x, gate_weight = torch.randn(T, 203, generator=generator).to(dtype), (torch.randn(203, generator=generator) / 14).to(dtype)
    math = TileMath(dtype)
    gates = torch.empty(T, 1, dtype=math.acc)
    runtime.tiles.run(gate_tasks(math, x, gate_weight, gates))
    truth = torch.sigmoid(x.double() @ gate_weight.double())
    assert (gates[:, 0].double() - truth).abs().max() < 4 * torch.finfo(math.acc).eps
    for token in range(0, T, 7):
        alone = torch.empty(1, 1, dtype=math.acc)
        runtime.tiles.run(gate_tasks(math, x[token:token + 1], gate_weight, alone))
        assert same_bits(alone, gates[token:token + 1])
