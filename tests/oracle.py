"""What every test of an engine compares with: problems, the float64 truth, the same-dtype baseline, and the tolerance between them."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mok.engines.protocol import Engine, Grads, MainGrad, MoETensors, PassOptions, SharedExpert, Wants, accumulation_dtype
from mok.reference import moe_reference

BLOCK = 128
ULPS = 2.0
ULPS_FP64 = 64.0        # float64 has no truth above it: the truth's own sums round too, in another order

SharedTriple = tuple[Tensor, Tensor, Tensor | None]


def baseline_same_dtype(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor, b_gate_up: Tensor | None = None,
                        b_down: Tensor | None = None, shared: Sequence[SharedTriple] = (), activation: str = "swiglu",
                        swiglu_limit: float | None = None) -> Tensor:
    """The layer as a plain loop over experts in x's dtype: library products, activation and sum over routes in the accumulation dtype.

    Arguments and result as `moe_reference`; differentiable by autograd.
    """
    wide = accumulation_dtype(x.dtype)

    def activate(g: Tensor, u: Tensor) -> Tensor:
        limit = 7.0 if activation == "swiglu_oai" and swiglu_limit is None else swiglu_limit
        if limit is not None:
            g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        if activation == "swiglu":
            return torch.nn.functional.silu(g) * u
        if activation == "swiglu_oai":
            return g * torch.sigmoid(1.702 * g) * (u + 1)
        return (torch.nn.functional.gelu(g) if activation == "geglu" else torch.nn.functional.relu(g)) * u

    def expert(rows: Tensor, gate_up: Tensor, down: Tensor, b1: Tensor | None, b2: Tensor | None) -> Tensor:
        g, u = torch.nn.functional.linear(rows, gate_up, b1).to(wide).chunk(2, dim=-1)
        return torch.nn.functional.linear(activate(g, u).to(x.dtype), down, b2).to(wide)

    out = torch.zeros(x.shape, dtype=wide, device=x.device)
    for e in range(w_gate_up.shape[0]):
        t, k = torch.nonzero(topk_ids == e, as_tuple=True)
        rows = expert(x[t], w_gate_up[e], w_down[e], None if b_gate_up is None else b_gate_up[e], None if b_down is None else b_down[e])
        out = out.index_add(0, t, topk_weights[t, k].unsqueeze(-1).to(wide) * rows)
    for gate_up, down, gate in shared:
        rows = expert(x, gate_up, down, None, None)
        out = out + (rows if gate is None else torch.sigmoid(x.to(wide) @ gate.to(wide)).unsqueeze(-1) * rows)
    return out.to(x.dtype)


def check_close(got: Tensor, truth: Tensor, baseline: Tensor, name: str, *, row_groups: Sequence[Tensor] = (), dtype: torch.dtype | None = None) -> None:
    """Assert that `got` is as good as a plain loop: in every block max |error| <= 2 max |baseline's error| + 2 ulp of the block's RMS.

    Errors are against `truth` (float64), ulps those of `dtype`, the compute dtype (None = got's; they differ for d_topk_weights). Blocks
    are 128 x 128 of the last two dimensions, every index of the leading ones (the expert) by itself; row_groups: index tensors of rows, one
    for each expert, judged in column blocks as well, so that an expert with few rows is not hidden among others. A block that is exactly
    zero in the truth must be exactly zero. In a block of few elements the baseline may be exact by luck: its error counts as at least its
    RMS error over the whole tensor, times 4 (what the largest of 128 x 128 normal deviates is), relative to the RMS.
    """
    assert got.shape == truth.shape == baseline.shape, f"{name}: shapes {tuple(got.shape)}, {tuple(truth.shape)}, {tuple(baseline.shape)}"
    ulp = torch.finfo(got.dtype if dtype is None else dtype).eps
    got64, truth64, baseline64 = (_matrices(tensor.detach().double()) for tensor in (got, truth, baseline))
    usual = ((baseline64 - truth64).square().mean() / truth64.square().mean().clamp(min=1e-300)).sqrt()
    for where, (g, t, b) in _blocks(got64, truth64, baseline64, row_groups):
        error, rms = (g - t).abs().max(), t.square().mean().sqrt()
        base = torch.maximum((b - t).abs().max(), 4 * usual * rms)
        if rms == 0:
            assert error == 0, f"{name} {where} must be exactly zero, its largest value is {g.abs().max():.3g}"
            continue
        ulps = ULPS_FP64 if got.dtype == torch.float64 else ULPS
        allowed = 2 * base + ulps * ulp * rms
        assert error <= allowed, f"{name} {where}: error {error:.3g} > {allowed:.3g} allowed (baseline's {base:.3g}, RMS {rms:.3g})"


def _matrices(tensor: Tensor) -> Tensor:
    return tensor.reshape(math.prod(tensor.shape[:-2]), *tensor.shape[-2:]) if tensor.dim() >= 2 else tensor.reshape(1, 1, -1)


def _blocks(got: Tensor, truth: Tensor, baseline: Tensor, row_groups: Sequence[Tensor]):
    """(text, (got, truth, baseline) of one block) for every non-empty block."""
    three = (got, truth, baseline)
    rows, columns = got.shape[1:]
    for column in range(0, columns, BLOCK):
        across = slice(column, column + BLOCK)
        for n in range(got.shape[0]):
            for row in range(0, rows, BLOCK):
                yield f"[{n}, {row}:, {column}:]", tuple(tensor[n, row:row + BLOCK, across] for tensor in three)
        for e, group in enumerate(row_groups):
            if group.numel():
                yield f"rows of expert {e}, columns {column}:", tuple(tensor[0, group, across] for tensor in three)


@dataclass(frozen=True)
class Case:
    """One problem: inputs in the compute dtype (topk_weights in the accumulation dtype), routes, and the gradient dy (T, H) of the output."""

    topk_ids: Tensor
    tensors: MoETensors
    dy: Tensor
    options: PassOptions

    @property
    def num_experts(self) -> int:
        return self.tensors.w_gate_up.shape[0]

    def keep(self, tokens: Tensor) -> Case:
        """The same problem with some of its tokens only, in the given order."""
        tensors = replace(self.tensors, x=self.tensors.x[tokens], topk_weights=self.tensors.topk_weights[tokens])
        return replace(self, topk_ids=self.topk_ids[tokens], tensors=tensors, dy=self.dy[tokens])


def make_case(T: int, H: int, I: int, E: int, K: int, dtype: torch.dtype, *, biases: bool = False, shared: Sequence[tuple[int, bool]] = (),
              activation: str = "swiglu", swiglu_limit: float | None = None, topk_ids: Tensor | None = None, seed: int = 0) -> Case:
    """Unit-scale random data: x, dy ~ N(0, 1), weights ~ N(0, 1 / fan_in). shared: (width, gated) each.

    topk_ids (T, K), or None: distinct random experts; expert E-1 gets no token when K < E, and one route in twenty is -1.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    if topk_ids is None:
        topk_ids = torch.rand(T, max(E - 1, K), generator=generator).argsort(-1)[:, :K]
        topk_ids = topk_ids.masked_fill(torch.rand(T, K, generator=generator) < 0.05, -1)
    weights = (torch.rand(T, K, generator=generator) + 0.1).to(accumulation_dtype(dtype))
    experts = tuple(SharedExpert(normal(2 * width, H, scale=H**-0.5), normal(H, width, scale=width**-0.5), normal(H, scale=H**-0.5) if gated else None)
                    for width, gated in shared)
    tensors = MoETensors(normal(T, H), weights, normal(E, 2 * I, H, scale=H**-0.5), normal(E, H, I, scale=I**-0.5),
                         normal(E, 2 * I, scale=0.5) if biases else None, normal(E, H, scale=0.5) if biases else None, experts)
    return Case(topk_ids, tensors, normal(T, H), PassOptions(activation, swiglu_limit, save_for_backward=True))


def want_all(case: Case) -> Wants:
    """Every gradient that the case has."""
    t = case.tensors
    return Wants(True, True, True, True, t.b_gate_up is not None, t.b_down is not None,
                 tuple((True, True, s.gate_weight is not None) for s in t.shared))


def named(tensors: MoETensors | Grads) -> dict[str, Tensor | None]:
    """Inputs, or their gradients, by name; what is not there is None."""
    result = {name: getattr(tensors, name) for name in ("x", "topk_weights", "w_gate_up", "w_down", "b_gate_up", "b_down")}
    for i, parts in enumerate(tensors.shared):
        triple = parts if isinstance(parts, tuple) else (parts.w_gate_up, parts.w_down, parts.gate_weight)
        result |= dict(zip((f"shared{i}.w_gate_up", f"shared{i}.w_down", f"shared{i}.gate_weight"), triple))
    return result


def run_engine(engine: Engine, case: Case, wants: Wants | None = None, main_grad: MainGrad | None = None) -> dict[str, Tensor | None]:
    """{"y": output, name: gradient or None} of one forward and backward."""
    plan = engine.build_plan(case.topk_ids, case.num_experts)
    y, saved = engine.forward(plan, case.tensors, case.options)
    grads = engine.backward(plan, case.tensors, case.options, saved, case.dy, want_all(case) if wants is None else wants, main_grad)
    return {"y": y, **named(grads)}


def plain(case: Case, layer=moe_reference, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """What run_engine returns, by a plain layer and autograd in `dtype`: the truth unless told otherwise."""
    def leaf(tensor: Tensor | None, to: torch.dtype = dtype) -> Tensor | None:
        return None if tensor is None else tensor.detach().to(to).requires_grad_()

    t = case.tensors
    leaves = MoETensors(leaf(t.x), leaf(t.topk_weights, accumulation_dtype(dtype)), leaf(t.w_gate_up), leaf(t.w_down), leaf(t.b_gate_up), leaf(t.b_down),
                        tuple(SharedExpert(leaf(s.w_gate_up), leaf(s.w_down), leaf(s.gate_weight)) for s in t.shared))
    y = layer(leaves.x, case.topk_ids, leaves.topk_weights, leaves.w_gate_up, leaves.w_down, leaves.b_gate_up, leaves.b_down,
              [(s.w_gate_up, s.w_down, s.gate_weight) for s in leaves.shared], case.options.activation, case.options.swiglu_limit)
    y.backward(case.dy.to(dtype))
    grads = {name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for name, tensor in named(leaves).items() if tensor is not None}
    return {"y": y.detach(), **grads}


def check_case(case: Case, got: dict[str, Tensor | None]) -> None:
    """Every result that is there against truth and baseline, per expert and block; everything finite."""
    truth, baseline = plain(case), plain(case, baseline_same_dtype, case.tensors.x.dtype)
    tokens_of_expert = [torch.nonzero((case.topk_ids == e).any(1)).flatten() for e in range(case.num_experts)]
    for name, tensor in got.items():
        if tensor is None:
            continue
        assert torch.isfinite(tensor).all(), f"{name} is not finite"
        groups = tokens_of_expert if name in ("y", "x", "topk_weights") else ()
        check_close(tensor, truth[name], baseline[name], name, row_groups=groups, dtype=case.tensors.x.dtype)


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal dtype, shape and bytes: -0 differs from +0, a NaN equals the same NaN."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def differing(a: dict[str, Tensor | None], b: dict[str, Tensor | None]) -> list[str]:
    """Names of the results whose bits differ."""
    assert a.keys() == b.keys()
    return [name for name in a if not same_bits(a[name], b[name])]
