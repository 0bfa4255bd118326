"""What every test of an engine compares with: problems, the float64 truth with the scale of its errors, and a plain loop in a low dtype."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mok.engines.protocol import Engine, Grads, MainGrad, MoETensors, PassOptions, SharedExpert, Wants, accumulation_dtype
from mok.reference import moe_reference
from mok.tolerance import Change, Expected, expected, worst_block

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


def check_close(got: Tensor, truth: Tensor, scale: Tensor, name: str, *, dtype: torch.dtype, row_groups: Sequence[Tensor] = ()) -> None:
    """Assert mok.tolerance's rule on one result: every block as close to the float64 truth as its scale allows. dtype: the compute dtype."""
    assert got.shape == truth.shape, f"{name}: shapes {tuple(got.shape)}, {tuple(truth.shape)}"
    worst = worst_block(got, truth, scale, dtype, row_groups)
    assert worst.ratio <= 1, f"{name} {worst.detail}: error {worst.error:.3g} of it, allowed {worst.allowed:.3g}; {worst.ratio:.3g} times too far off"


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


def plain(case: Case, layer=moe_reference, dtype: torch.dtype = torch.float64, change: Change = lambda t: t, gradients: bool = True) -> dict[str, Tensor]:
    """What run_engine returns (or y alone), by a plain layer and autograd in `dtype`, `change` applied to its inputs: the truth unless told otherwise."""
    def leaf(tensor: Tensor | None, to: torch.dtype = dtype) -> Tensor | None:
        return None if tensor is None else change(tensor.detach().to(to)).requires_grad_(gradients)

    t = case.tensors
    leaves = MoETensors(leaf(t.x), leaf(t.topk_weights, accumulation_dtype(dtype)), leaf(t.w_gate_up), leaf(t.w_down), leaf(t.b_gate_up), leaf(t.b_down),
                        tuple(SharedExpert(leaf(s.w_gate_up), leaf(s.w_down), leaf(s.gate_weight)) for s in t.shared))
    y = layer(leaves.x, case.topk_ids, leaves.topk_weights, leaves.w_gate_up, leaves.w_down, leaves.b_gate_up, leaves.b_down,
              [(s.w_gate_up, s.w_down, s.gate_weight) for s in leaves.shared], case.options.activation, case.options.swiglu_limit)
    if not gradients:
        return {"y": y}
    y.backward(change(case.dy.to(dtype)))
    grads = {name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for name, tensor in named(leaves).items() if tensor is not None}
    return {"y": y.detach(), **grads}


def expected_of(case: Case, gradients: bool = True) -> Expected:
    """The float64 truth of every result (or of y alone) and the scale of its errors."""
    return expected(lambda change: plain(case, change=change, gradients=gradients), case.tensors.x.dtype)


def check_case(case: Case, got: dict[str, Tensor | None]) -> None:
    """Every result that is there against the truth, per expert and block; everything finite."""
    want = expected_of(case, gradients=set(got) != {"y"})
    tokens_of_expert = [torch.nonzero((case.topk_ids == e).any(1)).flatten() for e in range(case.num_experts)]
    for name, tensor in got.items():
        if tensor is None:
            continue
        assert torch.isfinite(tensor).all(), f"{name} is not finite"
        groups = tokens_of_expert if name in ("y", "x", "topk_weights") else ()
        check_close(tensor, want.truth[name], want.scale[name], name, row_groups=groups, dtype=want.dtype)


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal dtype, shape and bytes: -0 differs from +0, a NaN equals the same NaN."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def differing(a: dict[str, Tensor | None], b: dict[str, Tensor | None]) -> list[str]:
    """Names of the results whose bits differ."""
    assert a.keys() == b.keys()
    return [name for name in a if not same_bits(a[name], b[name])]
