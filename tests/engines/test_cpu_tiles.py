"""The CPU engine's tiles: how segments are cut, what is measured before a shape is trusted, and the self-check's verdicts."""
from __future__ import annotations

import pytest
import torch
from oracle import same_bits

from mok.config import ACTIVATIONS
from mok.engines import cpu_check, cpu_tiles
from mok.engines.cpu import self_check
from mok.engines.cpu_activation import Activation
from mok.engines.cpu_tiles import TAIL_ROWS, TILE_ROWS, Matrix, Probe, Rows, TileMath, TileSizes, measure_row_stability, row_dot
from mok.reference import act_reference
from mok.runtime import Scratch, runtime

FLOATS = [pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)]


def test_pieces():
    assert TileSizes(256, (32, 64)).pieces(300) == [(0, 256, 256), (256, 44, 64)]
    assert TileSizes(256, (32, 64)).pieces(0) == [] and TileSizes(256, ()).pieces(1) == [(0, 1, 256)]
    assert TileSizes(256, (32,)).pieces(512) == [(0, 256, 256), (256, 256, 256)] and TileSizes(256, (32,)).pieces(33) == [(0, 33, 256)]
    assert TileSizes(1, ()).pieces(3) == [(0, 1, 1), (1, 1, 1), (2, 1, 1)]
    for count in range(1, 700):
        pieces = TileSizes(TILE_ROWS, TAIL_ROWS).pieces(count)
        assert [row for first, valid, _ in pieces for row in range(first, first + valid)] == list(range(count))
        assert all(valid <= rows and rows in (TILE_ROWS, *TAIL_ROWS) for _, valid, rows in pieces)


def on_pool(function):
    """function(scratch) on a pool thread, single-threaded as in a pass."""
    results = []
    runtime.tiles.run([lambda scratch: results.append(function(scratch))], threads=1)
    return results[0]


def test_measurement_sees_what_it_is_for():
    """A sound operation passes; one that depends on the place in the tile, on the tile's size, or on both ends of it is found."""
    math = TileMath(torch.float32)

    def measured(run):
        return on_pool(lambda scratch: measure_row_stability(math, scratch, Probe(object(), 8, torch.float32, run)))

    assert measured(lambda scratch, rows: rows * 3) == (True, TAIL_ROWS)
    assert not measured(lambda scratch, rows: torch.nextafter(rows, rows + torch.arange(rows.shape[0]).eq(200).unsqueeze(1)))[0]
    assert not measured(lambda scratch, rows: torch.nextafter(rows, rows + torch.arange(rows.shape[0]).eq(255).unsqueeze(1)))[0]
    stable, tails = measured(lambda scratch, rows: rows * (1 if rows.shape[0] >= 128 else 1 + 2**-23))
    assert stable and tails == (128, 192)
    stable, tails = measured(lambda scratch, rows: rows * (1 if rows.shape[0] == TILE_ROWS else 1 + 2**-23))
    assert stable and tails == ()


def test_tile_sizes_are_measured_once_a_shape(monkeypatch):
    monkeypatch.setattr(runtime, "scratch", {})
    calls = []
    original = measure_row_stability
    monkeypatch.setattr(cpu_tiles, "measure_row_stability", lambda math, scratch, probe: calls.append(probe.key) or original(math, scratch, probe))
    math = TileMath(torch.bfloat16)
    probes = [cpu_tiles.product_probe(math, 40, 24), cpu_tiles.product_probe(math, 24, 40, exact=True, flip=True)]
    with math.precision():
        for _ in range(3):
            math.tile_sizes(probes)
    assert calls == [probe.key for probe in probes]


def test_self_check_is_ok_here():
    """On the machines that this project is tested on; README and `mok info` say so."""
    before = torch.get_num_threads()
    assert self_check().startswith("ok: ")
    assert torch.get_num_threads() == before


def test_self_check_tells_failures(monkeypatch, capsys):
    monkeypatch.setattr(runtime, "scratch", {})
    with monkeypatch.context() as patched:
        patched.setattr(cpu_tiles, "measure_row_stability", lambda math, scratch, probe: (math.dtype != torch.float64, ()))
        assert "fp64" in (line := self_check()) and line.startswith("failed: ") and "row by row" in line and "fp32" not in line
    monkeypatch.setattr(runtime, "scratch", {})
    rounded = TileMath.rounded
    monkeypatch.setattr(TileMath, "rounded", lambda self, scratch, name, a, weight, **rest: rounded(self, scratch, name, a, weight, **rest)
                        + (weight.data.data_ptr() % 64 if name == "check.out" else 0))
    assert (line := self_check()).startswith("failed: ") and "threads at once" in line
    assert "row by row" in capsys.readouterr().err and cpu_check._NEIGHBOURS >= 4


@pytest.mark.parametrize("dtype", FLOATS)
def test_products(dtype):
    """Each kind of product against float64: one rounding to the dtype where it is rounded, fp32 quality where it is not."""
    math = TileMath(dtype)
    generator = torch.Generator().manual_seed(0)
    a, w, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((64, 300), (70, 300), (70,)))
    flipped, key = w.T.contiguous(), object()

    def run(scratch):
        tile = math.buffer(scratch, "a", 64, 300).copy_(a)
        wide = math.widen(scratch, "a.wide", tile)
        left = math.buffer(scratch, "left", 64, 70, math.acc).copy_(torch.arange(64 * 70).view(64, 70) % 13)
        results = {"rounded": math.rounded(scratch, "1", tile, Matrix(w, "w", key)), "bias": math.rounded(scratch, "2", tile, Matrix(w, "w", key), bias=bias),
                   "flip": math.rounded(scratch, "3", tile, Matrix(flipped, "f", key), flip=True),
                   "exact": math.exact(scratch, "4", wide, Matrix(w, "w", key)),
                   "exact flip": math.exact(scratch, "5", wide, Matrix(flipped, "f", key), flip=True),
                   "outer": math.outer(scratch, "6", left, wide)}
        return {name: tensor.clone() for name, tensor in results.items()}

    with math.precision():
        got = on_pool(run)
    truth = a.double() @ w.double().T
    left = (torch.arange(64 * 70).view(64, 70) % 13).double()
    expected = {"rounded": truth, "bias": truth + bias.double(), "flip": truth, "exact": truth, "exact flip": truth, "outer": left.T @ a.double()}
    for name, tensor in got.items():
        exact = name in ("exact", "exact flip", "outer")
        assert tensor.dtype == (math.acc if exact else dtype), name
        accumulated = 20 * torch.finfo(math.acc).eps * expected[name].abs().max()
        allowed = accumulated + (0 if exact else torch.finfo(dtype).eps / 2 * expected[name].abs())
        assert ((tensor.double() - expected[name]).abs() <= allowed).all(), name


def test_a_weight_of_another_pass_is_not_mistaken():
    """Wide copies are kept by key: the same storage with other contents under a new key is copied again."""
    math = TileMath(torch.bfloat16)
    w = torch.ones(8, 16, dtype=torch.bfloat16)

    def run(scratch):
        a = torch.ones(32, 16)
        first = math.exact(scratch, "o", a, Matrix(w, "w", ("pass 1", 0))).clone()
        w.fill_(2)
        return first, math.exact(scratch, "o", a, Matrix(w, "w", ("pass 2", 0))).clone()

    first, second = on_pool(run)
    assert first.eq(16).all() and second.eq(32).all()


@pytest.mark.parametrize("n", [1, 7, 64, 128, 129, 331])
def test_row_dot(n):
    generator = torch.Generator().manual_seed(n)
    a, b = torch.randn(37, n, generator=generator), torch.randn(37, n, generator=generator)
    dots = row_dot(Scratch(), a, b).clone()
    truth = (a.double() * b.double()).sum(1, keepdim=True)
    assert dots.shape == (37, 1) and (dots - truth).abs().max() < 1e-6 * (a.double() * b.double()).abs().sum(1).max()
    order = torch.randperm(37, generator=generator)
    assert same_bits(row_dot(Scratch(), a[order], b[order]).contiguous(), dots[order])
    assert same_bits(row_dot(Scratch(), a[5:6], b[5:6]).contiguous(), dots[5:6])
    scratch = Scratch()
    row_dot(scratch, torch.full((37, 400), float("nan")), torch.ones(37, 400))            # what an earlier, wider call left behind
    assert same_bits(row_dot(scratch, a, b).contiguous(), dots)


def test_rows_are_gathered_and_padded_with_zeros():
    math, scratch = TileMath(torch.float32), Scratch()
    data = torch.arange(12.0).view(6, 2)
    math.buffer(scratch, "x", 4, 2).fill_(float("nan"))
    assert Rows(data, torch.tensor([5, 0, 0, 3])).take(scratch, math, "x", 1, 3, 4).tolist() == [[0, 1], [0, 1], [6, 7], [0, 0]]
    assert Rows(data).take(scratch, math, "x", 4, 2, 3).tolist() == [[8, 9], [10, 11], [0, 0]]
    assert Rows(data, torch.tensor([2, 1])).columns(1, 2).take(scratch, math, "y", 0, 2, 2).tolist() == [[5], [3]]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_and_its_derivative(activation):
    """Against the specification's, differentiated by autograd in float64; values from -30 to 30, so that both tails of the gate are seen."""
    generator = torch.Generator().manual_seed(0)
    g, u, dh = ((torch.rand(64, 33, generator=generator, dtype=torch.float64) - 0.5) * scale for scale in (60, 4, 2))
    for limit in (None, 1.0) if activation.startswith("swiglu") else (None,):
        gd, ud = g.clone().requires_grad_(), u.clone().requires_grad_()
        h = act_reference(gd, ud, activation, limit)
        truth = (h.detach(), *torch.autograd.grad(h, (gd, ud), dh))
        act = Activation.of(activation, limit)
        g2, u2 = g.clone(), u.clone()
        h2 = act.backward(Scratch(), g2, u2, dh)
        assert same_bits(act.forward(Scratch(), g.clone(), u.clone()), h2)                   # recomputed in backward: the same bits
        for name, got, expected in zip(("h", "dg", "du"), (h2, g2, u2), truth):
            assert (got - expected).abs().max() < 1e-14 * (1 + expected.abs().max()), (name, limit)
