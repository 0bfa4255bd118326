"""The engine for every other GPU and dtype: plain PyTorch in steps (dispatch, experts, combine), deterministic, without a host sync.

Promise P1 only. No atomics: a token's results are gathered through slot_to_row and summed over k in order. `experts_forward` and
`experts_backward` see rows alone, so that rows of other ranks can be brought in before them and sent home after them. Runs on CPU tensors too,
where the tests are. Legend: T tokens, K routes a token, R rows of the plan, H hidden, I intermediate; `wide` is the accumulation dtype.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..config import SWIGLU_OAI_ALPHA, SWIGLU_OAI_LIMIT
from ..plan import RoutingPlan
from ..runtime import EXPERT_RADIX, runtime
from .expert_parallel import Travel
from .protocol import Grads, MainGrad, MoETensors, PassOptions, Saved, SharedExpert, Wants, accumulation_dtype
from .torch_grouped import rows_of_experts, rows_times_weight, segment_sums, weight_gradient, wide_mm

ROUTER_ROWS = 1024   # rows of every score GEMM: one shape for the library, whatever T is


def activate(z: Tensor, activation: str, swiglu_limit: float | None) -> Tensor:
    """h (n, I) from z (n, 2I) = gate | up, computed in the accumulation dtype and rounded to z's."""
    wide = accumulation_dtype(z.dtype)
    g, u = _clamped(z.to(wide), activation, swiglu_limit)
    if activation == "swiglu_oai":
        u = u + 1
    return (_gate(g, activation) * u).to(z.dtype)


def activate_backward(z: Tensor, dh: Tensor, activation: str, swiglu_limit: float | None) -> Tensor:
    """dz (n, 2I), rounded to z's dtype, from z and dh (n, I) in the accumulation dtype."""
    wide = accumulation_dtype(z.dtype)
    raw = z.to(wide)
    g, u = _clamped(raw, activation, swiglu_limit)
    factor = u + 1 if activation == "swiglu_oai" else u
    dz = torch.cat([dh * factor * _gate_slope(g, activation), dh * _gate(g, activation)], dim=-1)
    limit = _limit(activation, swiglu_limit)
    if limit is not None:
        raw_g, raw_u = raw.chunk(2, dim=-1)
        dz = torch.where(torch.cat([raw_g <= limit, raw_u.abs() <= limit], dim=-1), dz, 0)
    return dz.to(z.dtype)


def _limit(activation: str, swiglu_limit: float | None) -> float | None:
    return SWIGLU_OAI_LIMIT if activation == "swiglu_oai" and swiglu_limit is None else swiglu_limit


def _clamped(z: Tensor, activation: str, swiglu_limit: float | None) -> tuple[Tensor, Tensor]:
    g, u = z.chunk(2, dim=-1)
    limit = _limit(activation, swiglu_limit)
    return (g, u) if limit is None else (g.clamp(max=limit), u.clamp(-limit, limit))


def _gate(g: Tensor, activation: str) -> Tensor:
    """What multiplies the up half."""
    if activation == "swiglu":
        return g * torch.sigmoid(g)
    if activation == "swiglu_oai":
        return g * torch.sigmoid(SWIGLU_OAI_ALPHA * g)
    if activation == "geglu":
        return 0.5 * g * (1 + torch.erf(g * math.sqrt(0.5)))
    return torch.relu(g)


def _gate_slope(g: Tensor, activation: str) -> Tensor:
    """The derivative of `_gate`."""
    if activation in ("swiglu", "swiglu_oai"):
        alpha = 1.0 if activation == "swiglu" else SWIGLU_OAI_ALPHA
        s = torch.sigmoid(alpha * g)
        return s * (1 + alpha * g * (1 - s))
    if activation == "geglu":
        return 0.5 * (1 + torch.erf(g * math.sqrt(0.5))) + g * torch.exp(-0.5 * g * g) * (1 / math.sqrt(2 * math.pi))
    return (g > 0).to(g.dtype)


def dispatch(plan: RoutingPlan, tokens: Tensor, top_k: int) -> Tensor:
    """Rows of this rank's tokens (T, C) in plan order: (R, C), padding rows zero."""
    token = torch.div(plan.row_to_slot.clamp(min=0), top_k, rounding_mode="floor").long()
    return tokens.index_select(0, token).masked_fill_((plan.row_to_slot < 0).unsqueeze(1), 0)


def dispatch_weights(plan: RoutingPlan, topk_weights: Tensor) -> Tensor:
    """(R,) routing weight of each row, padding 0: topk_weights (T, K)."""
    return topk_weights.reshape(-1).index_select(0, plan.row_to_slot.clamp(min=0).long()).masked_fill_(plan.row_to_slot < 0, 0)


def pre_activations(plan: RoutingPlan, x_rows: Tensor, tensors: MoETensors) -> Tensor:
    """z (R, 2I), rounded, of x_rows (R, H); padding rows unspecified. The same operations wherever it is made, so the same bits."""
    return rows_times_weight(plan, x_rows, tensors.w_gate_up, transpose=True, bias=tensors.b_gate_up)


def experts_forward(plan: RoutingPlan, x_rows: Tensor, tensors: MoETensors, options: PassOptions) -> tuple[Tensor, Tensor]:
    """(y_rows (R, H) before the routing weight, z (R, 2I)), both rounded: this rank's experts on x_rows (R, H); padding rows unspecified."""
    z = pre_activations(plan, x_rows, tensors)
    h = activate(z, options.activation, options.swiglu_limit)
    return rows_times_weight(plan, h, tensors.w_down, transpose=True, bias=tensors.b_down), z


def combine(plan: RoutingPlan, y_rows: Tensor, topk_weights: Tensor) -> Tensor:
    """(T, H) in the accumulation dtype: sum over k, in order from +0, of topk_weights[t, k] * y_rows[slot_to_row[t, k]]; -1 routes are skipped."""
    T, K = topk_weights.shape
    row = plan.slot_to_row.view(T, K)
    total = y_rows.new_zeros((T, y_rows.shape[1]), dtype=topk_weights.dtype)
    for k in range(K):
        y = _slot_rows(y_rows, row[:, k]).to(total.dtype)
        total = torch.where((row[:, k] >= 0).unsqueeze(1), torch.addcmul(total, topk_weights[:, k:k + 1], y), total)
    return total


def combine_dx(plan: RoutingPlan, dx_rows: Tensor, T: int, K: int) -> Tensor:
    """(T, H) in the accumulation dtype: dx_rows (R, H) of each token summed over k in order; -1 routes are skipped."""
    row = plan.slot_to_row.view(T, K)
    total = dx_rows.new_zeros((T, dx_rows.shape[1]), dtype=accumulation_dtype(dx_rows.dtype))
    for k in range(K):
        total = torch.where((row[:, k] >= 0).unsqueeze(1), total + _slot_rows(dx_rows, row[:, k]).to(total.dtype), total)
    return total


def combine_dweights(plan: RoutingPlan, dweight_rows: Tensor, T: int, K: int) -> Tensor:
    """(T, K): dweight_rows (R,) sent home to their slots, 0 for -1 routes."""
    if dweight_rows.shape[0] == 0:
        return dweight_rows.new_zeros(T, K)
    values = dweight_rows.index_select(0, plan.slot_to_row.clamp(min=0).long())
    return torch.where(plan.slot_to_row >= 0, values, 0).view(T, K)


def _slot_rows(rows: Tensor, row: Tensor) -> Tensor:
    """rows[row] for row (T,), any row where it is -1; the caller masks those."""
    if rows.shape[0] == 0:
        return rows.new_zeros((row.shape[0], rows.shape[1]))
    return rows.index_select(0, row.clamp(min=0).long())


class LocalJourney:
    """W = 1: rows come from this rank's tokens and results are read where they lie."""

    def __init__(self, plan: RoutingPlan, K: int) -> None:
        self._plan, self._K = plan, K
        self.home_plan = plan                # its slot_to_row says where a slot's result is in what `home` returns

    def dispatch(self, what: str, by_token: Sequence[Tensor], topk_weights: Tensor | None = None) -> tuple[list[Tensor], Tensor | None]:
        """Rows (R, C) of values by token (T, C) each, and (R,) of topk_weights (T, K); padding rows zero."""
        weights = None if topk_weights is None else dispatch_weights(self._plan, topk_weights)
        return [dispatch(self._plan, tokens, self._K) for tokens in by_token], weights

    def home(self, what: str, *by_row: Tensor | None) -> list[Tensor | None]:
        """Results by row, to be read through home_plan; None stays None."""
        return list(by_row)


class GroupJourney:
    """W > 1: as LocalJourney, over the process group of an ExpertGroup; one host sync to learn how many rows travel."""

    def __init__(self, plan: RoutingPlan, K: int, group: Any) -> None:
        self._travel, self._K = Travel(plan, group), K
        self.home_plan = self._travel.home_plan()

    def dispatch(self, what: str, by_token: Sequence[Tensor], topk_weights: Tensor | None = None) -> tuple[list[Tensor], Tensor | None]:
        slots = self._travel.sent_slots
        sent = [tokens.index_select(0, torch.div(slots, self._K, rounding_mode="floor")) for tokens in by_token]
        if topk_weights is not None:
            sent.append(topk_weights.reshape(-1).index_select(0, slots))
        rows = [self._travel.rows_of(received) for received in self._travel.to_experts(what, *sent)]
        return rows, None if topk_weights is None else rows.pop()

    def home(self, what: str, *by_row: Tensor | None) -> list[Tensor | None]:
        return self._travel.home(what, *by_row)


@dataclass
class RowGrads:
    """What `experts_backward` gives: dx_rows (R, H) and dweight_rows (R,) to be sent home, and this rank's weight gradients; None = not wanted."""

    dx_rows: Tensor | None = None
    dweight_rows: Tensor | None = None
    w_gate_up: Tensor | None = None
    w_down: Tensor | None = None
    b_gate_up: Tensor | None = None
    b_down: Tensor | None = None


def experts_backward(plan: RoutingPlan, x_rows: Tensor | None, dy_rows: Tensor, row_weights: Tensor, z: Tensor, tensors: MoETensors,
                     options: PassOptions, wants: Wants, *, accumulating: bool = False) -> RowGrads:
    """Gradients of this rank's experts. dy_rows (R, H), row_weights (R,) and x_rows (R, H) hold zeros in padding rows; z (R, 2I) from forward.

    x_rows may be None unless wants.w_gate_up. Weight gradients may come rounded to the compute dtype, unless they are to be added to
    accumulators (`accumulating`), where a rounding would be one too many; the caller converts.
    """
    grads = RowGrads()
    padding = (plan.row_to_rank < 0).unsqueeze(1)
    weight = row_weights.unsqueeze(1)
    if wants.w_down or wants.topk_weights:
        h = activate(z, options.activation, options.swiglu_limit)
        if wants.w_down:
            weighted_h = (weight * h.to(weight.dtype)).to(h.dtype).masked_fill_(padding, 0)
            grads.w_down = weight_gradient(plan, dy_rows, weighted_h, rounded=not accumulating)
    if wants.b_down:
        grads.b_down = segment_sums(plan, weight * dy_rows.to(weight.dtype))
    needs_dz = wants.x or wants.w_gate_up or wants.b_gate_up
    if not (needs_dz or wants.topk_weights):
        return grads
    dh = rows_times_weight(plan, dy_rows, tensors.w_down, transpose=False, rounded=False)
    if wants.topk_weights:
        grads.dweight_rows = (dh * h.to(dh.dtype)).sum(1)
        if tensors.b_down is not None:
            grads.dweight_rows += (dy_rows.to(dh.dtype) * rows_of_experts(plan, tensors.b_down).to(dh.dtype)).sum(1)
    if needs_dz:
        dz = activate_backward(z, weight * dh, options.activation, options.swiglu_limit).masked_fill_(padding, 0)
        if wants.x:
            grads.dx_rows = rows_times_weight(plan, dz, tensors.w_gate_up, transpose=False)
        if wants.w_gate_up:
            assert x_rows is not None
            grads.w_gate_up = weight_gradient(plan, dz, x_rows, rounded=not accumulating)
        if wants.b_gate_up:
            grads.b_gate_up = segment_sums(plan, dz)
    return grads


def shared_gate(x: Tensor, expert: SharedExpert) -> Tensor | None:
    """(T, 1) sigmoid(x @ gate_weight) in the accumulation dtype, or None for an ungated expert."""
    if expert.gate_weight is None:
        return None
    wide = accumulation_dtype(x.dtype)
    return torch.sigmoid((x.to(wide) * expert.gate_weight.to(wide)).sum(1, keepdim=True))


def shared_pre_activations(x: Tensor, expert: SharedExpert) -> Tensor:
    """z (T, 2I_s), rounded, of one shared expert."""
    return wide_mm(x, expert.w_gate_up.T).to(x.dtype)


def add_shared_forward(total: Tensor, x: Tensor, expert: SharedExpert, options: PassOptions) -> tuple[Tensor, Tensor]:
    """(total + gate * y_shared, z (T, 2I_s)): one shared expert on every token; total (T, H) in the accumulation dtype."""
    z = shared_pre_activations(x, expert)
    y = wide_mm(activate(z, options.activation, options.swiglu_limit), expert.w_down.T).to(x.dtype).to(total.dtype)
    gate = shared_gate(x, expert)
    return (total + y if gate is None else torch.addcmul(total, gate, y)), z


def shared_backward(dx: Tensor | None, x: Tensor, dy: Tensor, z: Tensor, expert: SharedExpert, options: PassOptions,
                    want: tuple[bool, bool, bool]) -> tuple[Tensor | None, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """(dx + this expert's share, (d w_gate_up, d w_down, d gate_weight)): dx (T, H) in the accumulation dtype, or None = not wanted."""
    want_gate_up, want_down, want_gate = want
    dtype, wide = x.dtype, accumulation_dtype(x.dtype)
    gate = shared_gate(x, expert)
    h = activate(z, options.activation, options.swiglu_limit)
    d_gate_up = d_down = d_gate_weight = None
    if want_down:
        weighted_h = h if gate is None else (gate * h.to(wide)).to(dtype)
        d_down = wide_mm(dy.T, weighted_h).to(dtype)
    if dx is None and not want_gate_up and not want_gate:
        return dx, (None, d_down, None)
    dh = wide_mm(dy, expert.w_down)
    dz = activate_backward(z, dh if gate is None else gate * dh, options.activation, options.swiglu_limit)
    if want_gate_up:
        d_gate_up = wide_mm(dz.T, x).to(dtype)
    if dx is not None:
        dx = dx + wide_mm(dz, expert.w_gate_up).to(dtype).to(wide)
    if gate is not None and expert.gate_weight is not None and (dx is not None or want_gate):
        d_logit = (dh * h.to(wide)).sum(1, keepdim=True) * gate * (1 - gate)
        if want_gate:
            d_gate_weight = (d_logit * x.to(wide)).sum(0).to(dtype)
        if dx is not None:
            dx = torch.addcmul(dx, d_logit, expert.gate_weight.to(wide))
    return dx, (d_gate_up, d_down, d_gate_weight)


class TorchGpuEngine:
    """Implements `Engine` with the functions above."""

    name = "torch_gpu"

    def __init__(self, group: Any = None) -> None:
        """group: the ExpertGroup that a pass's rows travel in, None = this rank alone."""
        self._group = group

    def _journey(self, plan: RoutingPlan, K: int) -> LocalJourney | GroupJourney:
        return LocalJourney(plan, K) if self._group is None else GroupJourney(plan, K, self._group)

    def build_plan(self, topk_ids: Tensor, num_experts: int) -> RoutingPlan:
        """The plan, on a GPU by its own kernels where they apply, else by PyTorch operations, said once; a bad id goes to the error word by either."""
        if topk_ids.is_cuda:
            reason = _no_plan_kernel(topk_ids.numel(), num_experts)
            if reason is None:
                from .hopper import plan_kernel

                return plan_kernel.build_plan(topk_ids, num_experts)
            runtime.say_once(f"mok: the routing plan is built by PyTorch operations, not by its own kernels: {reason}")
            report_bad_ids(topk_ids, num_experts)
        return RoutingPlan.build(topk_ids, num_experts)

    def forward(self, plan: RoutingPlan, tensors: MoETensors, options: PassOptions) -> tuple[Tensor, Saved]:
        """y (T, H) in x's dtype and what backward needs."""
        _check_precision(options)
        x, K = tensors.x.contiguous(), tensors.topk_weights.shape[1]
        journey = self._journey(plan, K)
        (x_rows,), _ = journey.dispatch("dispatch", [x])
        y_rows, z = experts_forward(plan, x_rows, tensors, options)
        (y_home,) = journey.home("combine", y_rows)
        assert y_home is not None
        total = combine(journey.home_plan, y_home, tensors.topk_weights)
        shared_z = [x.new_empty(x.shape[0], 0)]
        for expert in _contiguous(tensors.shared):
            total, z_of_expert = add_shared_forward(total, x, expert, options)
            shared_z.append(z_of_expert)
        if options.save_for_backward:
            return total.to(x.dtype), Saved(z, torch.cat(shared_z, dim=1))
        return total.to(x.dtype), Saved(z.new_empty(0, z.shape[1]), x.new_empty(0, sum(part.shape[1] for part in shared_z)))

    def backward(self, plan: RoutingPlan, tensors: MoETensors, options: PassOptions, saved: Saved, dy: Tensor, wants: Wants,
                 main_grad: MainGrad | None) -> Grads:
        """Gradients for dy (T, H), those that `wants` names."""
        _check_precision(options)
        x, dy, (T, K) = tensors.x.contiguous(), dy.contiguous(), tensors.topk_weights.shape
        dtype = x.dtype
        grads = Grads(shared=[(None, None, None)] * len(tensors.shared))
        dx = None
        if wants.x or wants.topk_weights or wants.any_routed_weight:
            journey = self._journey(plan, K)
            recompute = options.recompute is not None and (wants.x or wants.topk_weights or wants.w_gate_up or wants.w_down or wants.b_gate_up)
            needs_x = wants.w_gate_up or recompute
            sources, row_weights = journey.dispatch("backward dispatch", [dy, x] if needs_x else [dy], tensors.topk_weights)
            assert row_weights is not None
            z = pre_activations(plan, sources[1], tensors) if recompute else saved.z
            rows = experts_backward(plan, sources[1] if wants.w_gate_up else None, sources[0], row_weights, z, tensors, options, wants,
                                    accumulating=main_grad is not None)
            dx_home, dweight_home = journey.home("backward combine", rows.dx_rows, rows.dweight_rows)
            if dx_home is not None:
                dx = combine_dx(journey.home_plan, dx_home, T, K)
            if dweight_home is not None:
                grads.topk_weights = combine_dweights(journey.home_plan, dweight_home, T, K)
            grads.w_gate_up = _deliver(rows.w_gate_up, dtype, None if main_grad is None else main_grad.w_gate_up)
            grads.w_down = _deliver(rows.w_down, dtype, None if main_grad is None else main_grad.w_down)
            grads.b_gate_up = _deliver(rows.b_gate_up, dtype, None)
            grads.b_down = _deliver(rows.b_down, dtype, None)
        shared_z = saved.shared_z.split([expert.w_gate_up.shape[0] for expert in tensors.shared], dim=1) if tensors.shared else ()
        for i, (expert, z_of_expert, want) in enumerate(zip(_contiguous(tensors.shared), shared_z, wants.shared, strict=True)):
            if wants.x or any(want):
                if options.recompute is not None:
                    z_of_expert = shared_pre_activations(x, expert)
                dx, grads.shared[i] = shared_backward(dx, x, dy, z_of_expert, expert, options, want)
        if dx is not None:
            grads.x = dx.to(dtype)
        return grads

    def router_scores(self, x: Tensor, weight: Tensor) -> Tensor:
        """Logits x (T, H) @ weight (E, H).T in fp32 (fp64 for fp64 x): equal shapes for the library, ROUTER_ROWS rows at a time, never TF32."""
        wide = accumulation_dtype(x.dtype)
        scores = x.new_empty((x.shape[0], weight.shape[0]), dtype=wide)
        factor = weight.to(wide).T
        with runtime.ieee_float32_on_gpu():
            for part, rows in _router_tiles(x, wide):
                scores[part] = (rows @ factor)[:part.stop - part.start]
        return scores

    def router_scores_backward(self, x: Tensor, weight: Tensor, dlogits: Tensor, want_x: bool, want_weight: bool) -> tuple[Tensor | None, Tensor | None]:
        """dx (T, H) in x's dtype and dweight (E, H) in weight's, tiles of ROUTER_ROWS rows added in order; None where not wanted."""
        wide = accumulation_dtype(x.dtype)
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if want_x else None
        dweight = torch.zeros_like(weight, dtype=wide, memory_format=torch.contiguous_format) if want_weight else None
        factor = weight.to(wide)
        with runtime.ieee_float32_on_gpu():
            for (part, dscores), (_, rows) in zip(_router_tiles(dlogits, wide), _router_tiles(x, wide)):
                if dx is not None:
                    dx[part] = (dscores @ factor)[:part.stop - part.start].to(x.dtype)
                if dweight is not None:
                    dweight += dscores.T @ rows
        return dx, None if dweight is None else dweight.to(weight.dtype)


def report_bad_ids(topk_ids: Tensor, num_experts: int) -> None:
    """Put the first id outside -1..E-1, if there is one, into the device's error word, as the plan kernels do, without waiting for the device.

    The word is read back first, so that a good call does not wipe a report that nobody has seen yet; one that is seen in just that moment is
    reported twice. E beyond what the word holds is reported as the largest that it does.
    """
    if topk_ids.numel() == 0:
        return
    ids = topk_ids.reshape(-1).to(torch.int64)
    bad = (ids < -1) | (ids >= num_experts)
    value = ids.index_select(0, bad.to(torch.int32).argmax(0, keepdim=True)).clamp(-2**51, 2**51 - 1)
    word = runtime.error_word(topk_ids.device)
    unseen = word.to(topk_ids.device, non_blocking=True)
    word.copy_(torch.where(bad.any(), value * EXPERT_RADIX + min(num_experts, EXPERT_RADIX - 1), unseen), non_blocking=True)


def _no_plan_kernel(num_slots: int, num_experts: int) -> str | None:
    """Why the plan kernels cannot run here, or None."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    from .hopper import plan_kernel

    return plan_kernel.unsupported_reason(num_slots, num_experts)


def _router_tiles(matrix: Tensor, wide: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """(slice of rows, those rows in `wide` padded with zeros to ROUTER_ROWS), in order."""
    T = matrix.shape[0]
    for first in range(0, T, ROUTER_ROWS):
        part = slice(first, min(first + ROUTER_ROWS, T))
        rows = matrix[part].to(wide)
        yield part, rows if rows.shape[0] == ROUTER_ROWS else torch.cat([rows, rows.new_zeros(ROUTER_ROWS - rows.shape[0], rows.shape[1])])


def _deliver(gradient: Tensor | None, dtype: torch.dtype, accumulator: Tensor | None) -> Tensor | None:
    """The gradient in `dtype`; or None after adding it into the fp32 accumulator."""
    if gradient is None:
        return None
    if accumulator is not None:
        accumulator.add_(gradient)
        return None
    return gradient.to(dtype).contiguous()


def _contiguous(shared: tuple[SharedExpert, ...]) -> list[SharedExpert]:
    """Shared experts in one layout: libraries choose another product, with other bits, for other strides."""
    return [SharedExpert(s.w_gate_up.contiguous(), s.w_down.contiguous(), None if s.gate_weight is None else s.gate_weight.contiguous()) for s in shared]


def _check_precision(options: PassOptions) -> None:
    if options.precision != "bf16":
        raise NotImplementedError(f"precision={options.precision!r} is not supported by the torch_gpu engine; use 'bf16'")
