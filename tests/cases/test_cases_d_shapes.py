"""Cases D: sizes beyond 32-bit offsets, strides, widths that are no multiple of any tile, empty contractions, devices."""
from __future__ import annotations

import pytest
import torch

import mok
from mok.reference import moe_reference
from tests.cases.case_support import WEIGHTS, assert_exactly_zero, assert_same_bits, collect, needs_compiler, problem, random_routes

# ---- D1 ----

@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("tkhi", [(37450, 8, 7168, 16), (135000, 8, 256, 1024)], ids=str)
def test_case_D1(tkhi):
    """sglang#4727, Liger-Kernel#1246/#1248, TransformerEngine#2908/#2196, vllm#53390, DLBlas#172: 32-bit offsets into activations.

    T*K*H, then T*K*2I, pass 2^31 elements: the last 64 tokens' y, dx and dw against the reference on those tokens alone.
    """
    T, K, H, I = tkhi
    E, last = 8, 64
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16) * scale).requires_grad_()

    x, w13, w2 = draw(T, H), draw(E, 2 * I, H, scale=H**-0.5), draw(E, H, I, scale=I**-0.5)
    ids = torch.rand(T, E, generator=generator, device="cuda").argsort(-1)[:, :K]
    weights = (torch.rand(T, K, generator=generator, device="cuda") + 0.1).requires_grad_()
    dy = torch.randn(T, H, generator=generator, device="cuda", dtype=torch.bfloat16)
    y = mok.moe(x, ids, weights, w13, w2)
    y.backward(dy)
    leaves = [t[-last:].detach().double().requires_grad_() for t in (x, weights)]
    truth = moe_reference(leaves[0], ids[-last:], leaves[1], w13.detach().double(), w2.detach().double())
    truth.backward(dy[-last:].double())
    for name, got, exact in (("y", y[-last:], truth), ("x", x.grad[-last:], leaves[0].grad), ("topk_weights", weights.grad[-last:], leaves[1].grad)):
        error = (got.detach().double() - exact.detach()).norm(dim=-1) / exact.detach().norm(dim=-1)
        assert error.max() < 2e-2, f"{name} of token {T - last + int(error.argmax())} is off by {error.max():.2e}"
    assert all(torch.isfinite(t.grad).all() for t in (x, weights, w13, w2))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("tehi", [(2048, 272, 4096, 1024)], ids=str)
def test_case_D1_weights(tehi):
    """The kind of D1 in the weights: E*2I*H passes 2^31 elements; gradients of the last two experts, and y and dx of the tokens that use them."""
    T, E, H, I = tehi
    K, last = 2, 2
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16).mul_(scale).requires_grad_()

    x, w13, w2 = draw(T, H), draw(E, 2 * I, H, scale=H**-0.5), draw(E, H, I, scale=I**-0.5)
    ids = torch.randint(0, E, (T, K), generator=generator, device="cuda")
    ids[:40], ids[40:70] = E - 1, E - 2                                                # both routes: their y and dx come from the last experts alone
    weights = torch.rand(T, K, generator=generator, device="cuda") + 0.1
    dy = torch.randn(T, H, generator=generator, device="cuda", dtype=torch.bfloat16)
    y = mok.moe(x, ids, weights, w13, w2)
    y.backward(dy)
    leaves = [t.detach().double().requires_grad_() for t in (x, w13[-last:], w2[-last:])]
    truth = moe_reference(leaves[0], torch.where(ids >= E - last, ids - (E - last), -1), weights.double(), *leaves[1:])
    truth.backward(dy.double())
    for name, got, exact in (("y", y[:70], truth[:70]), ("x", x.grad[:70], leaves[0].grad[:70]), ("w_gate_up", w13.grad[-last:], leaves[1].grad),
                             ("w_down", w2.grad[-last:], leaves[2].grad)):
        error = (got.detach().double() - exact.detach()).norm(dim=-1) / exact.detach().norm(dim=-1)
        assert error.max() < 2e-2, f"{name} is off by {error.max():.2e}"


# ---- D3 ----

def with_y(p, use):
    """Gradients of use(y), a scalar, and y."""
    arguments, leaves = p.leaves()
    arguments["shared"] = []
    y = mok.moe(**arguments)
    use(y).backward()
    return collect(y, leaves)


OUTPUT_USES = {
    "sum": (lambda y: y.sum(), lambda y: torch.ones_like(y)),                                                     # strides 0, 0
    "mean-over-tokens": (lambda y: y.mean(0).sum(), lambda y: torch.ones_like(y) / y.shape[0]),                   # stride 0 over tokens
    "transposed": (lambda y: (y.T.contiguous() * _coefficients(y).T).sum(), lambda y: _coefficients(y)),          # column-major
    "cat": (lambda y: (torch.cat([y, y.new_zeros(y.shape[0], 8)], 1) * torch.cat([_coefficients(y), y.new_ones(y.shape[0], 8)], 1)).sum(),
            lambda y: _coefficients(y)),                                                                          # rows wider than H
    "one-column": (lambda y: (y * _coefficients(y)[:, :1]).sum(), lambda y: _coefficients(y)[:, :1].expand_as(y)),
}


def _coefficients(y):
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(y)


@pytest.mark.parametrize("use", OUTPUT_USES)
def test_case_D3_output_gradient(device, dtype, use):
    """flash-attention#355, flash-linear-attention#871, pytorch#70992, pytorch#167263: dy expanded or not contiguous; the contiguous run's bits."""
    p = problem(random_routes(70, 2, 4, masked=0.1), 4, 64, 32, device, dtype, biases=True)
    scalar, gradient = OUTPUT_USES[use]
    got = with_y(p, scalar)
    assert_same_bits(got, p.changed(dy=gradient(got["y"]).contiguous()).run())


def _views(t: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same values under other strides."""
    two = t.reshape(-1, t.shape[-1])
    wide = torch.full((two.shape[0], 2 * two.shape[1]), float("nan") if t.is_floating_point() else 99, device=t.device, dtype=t.dtype)
    wide[:, ::2] = two
    offset = torch.full((two.numel() + 1,), float("nan") if t.is_floating_point() else 99, device=t.device, dtype=t.dtype)
    offset[1:] = two.flatten()
    return {"every-second-column": wide[:, ::2].view(t.shape) if t.dim() == 2 else wide[:, ::2].unflatten(0, t.shape[:-1]),
            "column-major": t.transpose(-1, -2).contiguous().transpose(-1, -2),
            "odd-start": offset[1:].view(t.shape),
            "transposed-twice": t.transpose(-1, -2).transpose(-1, -2)}


@pytest.mark.parametrize("view", ["every-second-column", "column-major", "odd-start", "transposed-twice"])
@pytest.mark.parametrize("name", ["x", "topk_ids", "topk_weights", "w_gate_up", "w_down", "b_gate_up", "b_down", "dy"])
def test_case_D3_inputs(device, dtype, name, view):
    """The kind of D3 for every argument: column slices, transposes, an odd start in memory; garbage between the elements is never read."""
    p = problem(random_routes(70, 2, 4, masked=0.1), 4, 64, 32, device, dtype, biases=True)
    original = p.dy if name == "dy" else p[name]
    other = _views(original)[view]
    assert torch.equal(other, original) and (view == "transposed-twice" or other.data_ptr() % 16 or not other.is_contiguous())
    assert_same_bits(p.changed(**{name: other}).run(), p.run())


def test_case_D3_expanded(device, dtype):
    """x, routes and weights expanded over the tokens (stride 0): the gradients of the expanded originals are sums over their uses."""
    p = problem(random_routes(1, 2, 4), 4, 64, 32, device, dtype)
    many = {name: p[name].expand(70, -1) for name in ("x", "topk_ids", "topk_weights")}
    dy = torch.randn(70, 64, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    assert_same_bits(p.changed(dy=dy, **many).run(), p.changed(dy=dy, **{name: value.contiguous() for name, value in many.items()}).run())


# ---- D5, D6 ----

# 2880 x 2880 on GPUs alone: its float64 reference would take two cores longer than all other widths together, and each 2880 is here
WIDTHS = [pytest.param((H, I), marks=pytest.mark.gpu if H == I else ()) for H in (16, 72, 200, 264, 2880) for I in (8, 96, 704, 2880)]


@pytest.mark.parametrize("width", WIDTHS, ids=lambda w: f"H{w[0]}-I{w[1]}")
def test_case_D5(device, dtype, width):
    """vllm#49087, megablocks#114, DeepGEMM#371: H or I not a multiple of the tile: the last columns were dropped or everything was zero."""
    H, I = width
    experts = 3 if H * I < 2**20 else 2
    got = problem(random_routes(33, 1, experts - 1), experts, H, I, device, dtype).check()          # the last expert is empty
    assert got["y"][:, -1].abs().min() > 0 and got["x"][:, -1].abs().min() > 0
    for name in ("w_gate_up", "w_down"):
        assert got[name][:-1, -1, -1].abs().min() > 0
        assert_exactly_zero(got[name][-1], f"d{name} of the empty expert")


@pytest.mark.parametrize("width", [(1025, 513), (1, 1), (3, 1), (17, 5)], ids=lambda w: f"H{w[0]}-I{w[1]}")
def test_case_D6(device, dtype, width):
    """transformers#48644, pytorch#172440, transformers#44827: rows that are not 16-byte aligned refused where nothing needs the alignment."""
    problem(random_routes(9, 2, 4, masked=0.1), 4, *width, device, dtype, biases=True, shared=(3,)).check()


# ---- D9, D10 ----

@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=needs_compiler)])
def test_case_D9(device, dtype, backend):
    """pytorch#192497: a contraction of length zero was rejected, but only under compile: every group empty, with tokens and without."""
    torch._dynamo.reset()
    layer = torch.compile(mok.moe, backend=backend, fullgraph=True)
    for T in (5, 0):
        p = problem(torch.full((T, 2), -1), 4, 64, 32, device, dtype, biases=True)
        got = p.run(layer)
        for name, value in got.items():
            assert_exactly_zero(value, name)
        assert all(got[name].shape == p[name].shape for name in WEIGHTS)
    p = problem(random_routes(6, 2, 4), 4, 64, 32, device, dtype, biases=True)
    assert_same_bits(p.run(layer), p.run())


def test_case_D10(device, dtype):
    """pytorch#159620: the gradient of a weight that is used through chunk() had the wrong shape."""
    p = problem(random_routes(40, 2, 4), 4, 64, 32, device, dtype)
    plain = p.run()
    x, ids, weights = p["x"], p["topk_ids"], p["topk_weights"]

    both = torch.cat([p["w_gate_up"], torch.randn_like(p["w_gate_up"])], dim=-1).requires_grad_()               # w13 = half of a wider parameter
    down = torch.cat([torch.randn_like(p["w_down"]), p["w_down"]], dim=1).requires_grad_()
    mok.moe(x, ids, weights, both.chunk(2, -1)[0], down.chunk(2, 1)[1]).backward(p.dy)
    assert both.grad.shape == both.shape and down.grad.shape == down.shape
    assert_same_bits({"w": both.grad.chunk(2, -1)[0], "v": down.grad.chunk(2, 1)[1]}, {"w": plain["w_gate_up"], "v": plain["w_down"]})
    assert_exactly_zero(both.grad.chunk(2, -1)[1], "the unused half")

    gate, up = (half.contiguous().requires_grad_() for half in p["w_gate_up"].chunk(2, 1))                       # w13 = two parameters
    stacked = p["w_down"].transpose(1, 2).contiguous().requires_grad_()                                          # w2 kept as (E, I, H)
    mok.moe(x, ids, weights, torch.cat([gate, up], 1), stacked.transpose(1, 2)).backward(p.dy)
    assert_same_bits({"g": gate.grad, "u": up.grad, "d": stacked.grad.transpose(1, 2)},
                     {"g": plain["w_gate_up"].chunk(2, 1)[0], "u": plain["w_gate_up"].chunk(2, 1)[1], "d": plain["w_down"]})


# ---- D11 ----

@pytest.mark.parametrize("name", ["topk_ids", "topk_weights", "w_gate_up", "w_down", "b_gate_up", "b_down"])
def test_case_D11_mixed_devices(device, name):
    """triton#2441, triton#5205: tensors of another device read as if they were here; the error names the argument and both devices."""
    p = problem(random_routes(9, 2, 4), 4, 64, 32, device, torch.float32, biases=True)
    for other in ["meta"] + ["cpu"] * (device == "cuda"):
        with pytest.raises(ValueError, match=rf"{name}\.device={other}.*{device}"):
            p.changed(**{name: p[name].to(other)}).run()
    layer = mok.MoE(mok.MoEConfig(64, 32, 4, 2), device=device)
    with pytest.raises(ValueError, match=r"x\.device=meta"):
        layer(p["x"].to("meta"))


@pytest.mark.multigpu
def test_case_D11():
    """triton#2441, triton#5205: all tensors on a GPU that is not the current one."""
    p = problem(random_routes(40, 2, 4), 4, 64, 32, "cuda:1", torch.bfloat16, biases=True)
    with torch.cuda.device(0):
        got = p.check()
        assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        assert_same_bits(p.run(), got)
