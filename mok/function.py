"""mok.moe: the layer without a router, as custom ops with autograd; says what is saved and lets an engine do the work.

Mixed dtypes. The compute dtype is x's, or autocast's where autocast is on for x's device and x is not float64. x, weights and biases are
converted to it (differentiably, so each gradient comes back in its own tensor's dtype); topk_weights is converted to the accumulation dtype,
float32 (float64 for float64 x). y has x's dtype as it was handed in.
"""
from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .arguments import FLOATS, check_integer, check_tensor
from .checks import check_group, check_main_grad, check_moe_arguments, check_settings, passed_before, remember_passed
from .config import Overlap
from .engines import engine_name, get_engine, get_group_engine
from .engines.expert_parallel import agree_on_backward, build_group_plan
from .engines.protocol import Engine, Grads, MainGrad, MoETensors, Passes, PassOptions, Saved, SharedExpert, Wants, accumulation_dtype
from .group import ExpertGroup
from .plan import RoutingPlan, empty_plan, empty_plan_like
from .runtime import runtime


def moe(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor, b_gate_up: Tensor | None = None,
        b_down: Tensor | None = None, shared: Sequence[SharedExpert] = (), activation: str = "swiglu", swiglu_limit: float | None = None,
        precision: str = "bf16", group: ExpertGroup | None = None, overlap: Overlap | None = None, main_grad: tuple[Tensor, Tensor] | None = None,
        layer_key: int = 0, recompute: str | None = None) -> Tensor:
    """The mixture-of-experts layer given its routes: out[t] = sum_k topk_weights[t,k] * expert_{topk_ids[t,k]}(x[t]) + shared experts.

    x (..., H), any strides. topk_ids (..., K) or (T, K) int32/int64, global expert ids, -1 = no expert: contributes exactly nothing and its
    weight gets gradient 0; the same expert twice in one token counts twice. topk_weights like topk_ids, any floating dtype.
    w_gate_up (E_local, 2I, H), gate rows first; w_down (E_local, H, I); b_gate_up (E_local, 2I); b_down (E_local, H).
    shared: `mok.SharedExpert`s, applied to every token. activation: "swiglu", "swiglu_oai", "geglu" or "reglu"; swiglu_limit clamps the
    first two. precision "bf16" = unquantised, in x's dtype. group: the `mok.ExpertGroup` whose ranks share the experts, None = one rank;
    layer_key tells layers of one group apart in its handshake. overlap: granularity of a fused kernel, changes no bit. main_grad: fp32
    (E_local, 2I, H) and (E_local, H, I) that backward adds the weight gradients into; .grad of those weights then stays None. recompute: None =
    forward keeps z, the gate/up pre-activations, for backward; "z" = it keeps the routing plan alone and backward makes z again: one GEMM of three
    more, the same bits.

    Returns (..., H) in x's dtype. Differentiable once in x, topk_weights and all weights; whatever does not require grad costs nothing.
    A valid expert with weight 0 is computed and multiplied, so its NaN or Inf reaches y, as in the dense formula; only -1 is skipped.

    Raises ValueError naming a wrong argument (also an id outside -1..E-1: at once on a CPU, at the next call or `mok.check()` on a GPU),
    NotImplementedError for a valid but unsupported one.
    """
    y, _ = moe_with_counts(x, topk_ids, topk_weights, w_gate_up, w_down, b_gate_up, b_down, shared, activation, swiglu_limit, precision, group,
                           overlap, main_grad, layer_key, recompute)
    return y


def moe_with_counts(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor, b_gate_up: Tensor | None = None,
                    b_down: Tensor | None = None, shared: Sequence[SharedExpert] = (), activation: str = "swiglu",
                    swiglu_limit: float | None = None, precision: str = "bf16", group: ExpertGroup | None = None, overlap: Overlap | None = None,
                    main_grad: tuple[Tensor, Tensor] | None = None, layer_key: int = 0, recompute: str | None = None,
                    num_experts: int | None = None) -> tuple[Tensor, Tensor]:
    """`moe`, and the plan's tokens_per_expert (E_local,) int32: how many routes each local expert received.

    num_experts: E as a layer knows it, on which the ranks of a group must agree: the numbers of their experts can fit together by chance.
    """
    check_group(group)                                     # first: what else is wrong is told to its ranks
    key, passed = None, False
    if not torch.compiler.is_compiling():
        key, passed = passed_before((x, topk_ids, topk_weights, w_gate_up, w_down, b_gate_up, b_down), shared,
                                    (activation, swiglu_limit, precision, overlap, layer_key, recompute, group is None))
    try:
        if not passed:
            check_moe_arguments(x, topk_ids, topk_weights, w_gate_up, w_down, b_gate_up, b_down, shared)
        if main_grad is not None:
            parts = {f"shared[{i}].{name}": getattr(e, name) for i, e in enumerate(shared) for name in ("w_gate_up", "w_down", "gate_weight")}
            check_main_grad(main_grad, w_gate_up, w_down, {"x": x, "topk_weights": topk_weights, "b_gate_up": b_gate_up, "b_down": b_down, **parts})
        dtype = compute_dtype(x)
        if not passed:
            check_settings(activation, swiglu_limit, precision, dtype, overlap, layer_key, recompute)
            remember_passed(key)
        _refuse_forward_mode([x, topk_weights, w_gate_up, w_down, b_gate_up, b_down,
                              *[part for e in shared for part in (e.w_gate_up, e.w_down, e.gate_weight)]])
    except (ValueError, NotImplementedError) as error:
        if group is not None:
            group.report(str(error), {"pass": "forward", "layer_key": layer_key})
        raise
    main_grad = None if main_grad is None else (main_grad[0], main_grad[1])      # a list may change until backward reads it
    swiglu_limit = None if swiglu_limit is None else float(swiglu_limit)         # what ranks compare is 1.0 for 1
    H, K = x.shape[-1], topk_ids.shape[-1]
    tokens = _converted(x if x.dim() == 2 else x.reshape(-1, H), dtype)
    route_weights = _converted(topk_weights if topk_weights.dim() == 2 else topk_weights.reshape(-1, K), accumulation_dtype(dtype))
    differentiable = [tokens, route_weights, *[_converted(w, dtype) for w in (w_gate_up, w_down, b_gate_up, b_down)]]
    if shared:
        differentiable += [_converted(w, dtype) for parts in zip(*[(e.w_gate_up, e.w_down, e.gate_weight) for e in shared], strict=True) for w in parts]
    save = torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in differentiable])

    group_key, signature = 0, ""
    if group is not None:                                  # one rank has nobody to agree with, and a compiled call nothing to specialise on
        wanted = [t is not None and t.requires_grad for t in differentiable] if save else []
        group_key = group.key
        signature = f"{layer_key}|{H}|{w_down.shape[-1]}|{num_experts}|{K}|{dtype}|{precision}|{activation}|{swiglu_limit}|{recompute}|{wanted}"
    ids = topk_ids if topk_ids.dim() == 2 else topk_ids.reshape(-1, K)
    plan_arguments = (w_gate_up.shape[0], dtype, H, w_down.shape[-1], group_key, signature)
    if _nothing_watches(ids, differentiable):
        pass_settings = (activation, swiglu_limit, precision, recompute, overlap, save, group_key, signature)
        routing = _routing_plan(ids, *plan_arguments)
        if save:
            y = _moe_forward_directly.apply(routing, main_grad, pass_settings, *differentiable)
        else:
            y, _ = _forward_pass(routing, _moe_tensors(differentiable), *pass_settings)
        counts = routing.tokens_per_expert
    else:
        overlap_values = [-1 if v is None else v for v in (overlap.minibatch_rows, overlap.mover_warps, overlap.reserve_sms)] if overlap else [-1, -1, -1]
        n = len(shared)
        gates = [tokens.new_empty(0) if gate is None else gate for gate in differentiable[6 + 2 * n:]]
        plan = torch.ops.mok.plan(ids, *plan_arguments)
        y, _, _ = torch.ops.mok.moe_forward(*differentiable[:6], differentiable[6:6 + n], differentiable[6 + n:6 + 2 * n], gates, plan,
                                            *(main_grad or (None, None)), activation, swiglu_limit, precision, recompute, overlap_values, save, group_key,
                                            signature)
        counts = plan[_TOKENS_PER_EXPERT]
    return _converted(y if x.dim() == 2 else y.view(x.shape), x.dtype), counts


def _converted(tensor: Any, dtype: torch.dtype) -> Any:
    """`tensor.to(dtype)` of a tensor or None; PyTorch takes a microsecond to find nothing to do."""
    return tensor if tensor is None or tensor.dtype == dtype else tensor.to(dtype)


_TOKENS_PER_EXPERT = 5   # index of tokens_per_expert in RoutingPlan.tensors()
# Where engines run; asking torch which devices have autocast is a call that Dynamo cannot trace in every torch that is supported.
_AUTOCAST_DEVICES = ("cpu", "cuda")


def _refuse_forward_mode(tensors: Sequence[Tensor | None]) -> None:
    """Raise where an input carries a forward-mode tangent: a custom op would drop it, and a silent zero is a wrong derivative."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise NotImplementedError("mok.moe has no forward-mode derivative (jvp); use reverse mode, or moe_reference of the module mok.reference")


_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))


def _nothing_watches(ids: Tensor, tensors: Sequence[Tensor | None]) -> bool:
    """Whether custom ops would do no more than call their functions, at three times the host's time: no tracing, no mode, no transform, no subclass."""
    return (not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() == 0 and torch._C._functorch.peek_interpreter_stack() is None
            and _PLAIN.issuperset(map(type, tensors)) and type(ids) in _PLAIN)


def compute_dtype(x: Tensor) -> torch.dtype:
    """x's dtype, or autocast's where autocast is on for its device; float64 is never lowered (torch's own autocast rule)."""
    device = "cuda" if x.is_cuda else x.device.type        # the name of a device type is made anew each time
    if x.dtype != torch.float64 and device in _AUTOCAST_DEVICES and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def engine_for(x: Tensor, intermediate_size: int | None = None) -> str:
    """Name of the engine that `mok.moe` would run for x (..., H): "cpu", "hopper" or "torch_gpu". intermediate_size: I, None = a multiple of 16.

    Raises ValueError naming a wrong argument, NotImplementedError for a device or dtype that no engine serves.
    """
    check_tensor("x", x)
    if x.dim() < 1 or x.dtype not in FLOATS:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)} and must be a floating-point tensor (..., H)")
    if intermediate_size is not None:
        check_integer("intermediate_size", intermediate_size, 1)
    return engine_name(x.device, compute_dtype(x), x.shape[-1], intermediate_size)


def check() -> None:
    """Raise what a GPU kernel reported since the last call (a bad expert id, a time-out); nothing to report is silent. Does not synchronise."""
    runtime.raise_pending_errors()


def _engine(x: Tensor, w_down: Tensor, group_key: int) -> Passes:
    if group_key:
        return get_group_engine(x.device, runtime.groups[group_key])
    return _engine_of(x.device, x.dtype, x.shape[-1], w_down.shape[-1])


@lru_cache(maxsize=1024)
def _engine_of(device: torch.device, dtype: torch.dtype, H: int, I: int) -> Engine:
    """The engine of one rank's passes, looked for once: neither the device nor what is installed changes."""
    return get_engine(engine_name(device, dtype, H, I))


_SIGNATURE_FIELDS = ("layer_key", "H", "I", "num_experts", "K", "dtype", "precision", "activation", "swiglu_limit", "recompute",
                     "wanted gradients")


@lru_cache(maxsize=4096)
def _signature(text: str) -> dict[str, str]:
    """What the ranks of a group compare: one named field for each part of the text that `moe` passes to its ops. Not to be changed."""
    return dict(zip(_SIGNATURE_FIELDS, text.split("|"), strict=True))


def _plan(topk_ids: Tensor, num_local_experts: int, dtype: torch.dtype, H: int, I: int, group_key: int, signature: str) -> list[Tensor]:
    """RoutingPlan.tensors() of topk_ids (T, K). An op of its own: selective checkpointing can keep its result, and backward uses it.

    group_key: 0, or the key of the ExpertGroup whose ranks agree here on `signature` and tell each other their counts.
    """
    return _routing_plan(topk_ids, num_local_experts, dtype, H, I, group_key, signature).tensors()


def _routing_plan(topk_ids: Tensor, num_local_experts: int, dtype: torch.dtype, H: int, I: int, group_key: int, signature: str) -> RoutingPlan:
    if group_key:
        group = runtime.groups[group_key]
        try:
            runtime.raise_pending_errors()
        except Exception as error:                         # an earlier call's: the peers are about to wait for this one
            group.report(str(error), {"pass": "forward"})
            raise
        return build_group_plan(group, topk_ids, num_local_experts, _signature(signature))
    runtime.raise_pending_errors()
    if topk_ids.is_cpu and topk_ids.numel():
        low, high = (int(v) for v in torch.aminmax(topk_ids))
        if low < -1 or high >= num_local_experts:
            raise ValueError(f"topk_ids holds {low if low < -1 else high} and must hold -1 or expert ids 0..{num_local_experts - 1}")
    return _engine_of(topk_ids.device, dtype, H, I).build_plan(topk_ids, num_local_experts)


plan_op = torch.library.custom_op("mok::plan", _plan, mutates_args=())


@plan_op.register_fake
def _(topk_ids, num_local_experts, dtype, H, I, group_key, signature):
    if group_key:                                          # how many rows arrive is known when the ranks have spoken
        num_rows = cast(int, torch.library.get_ctx().new_dynamic_size())     # torch wants the unknown itself as a size, not a formula of it
        plan, group = empty_plan(topk_ids, num_local_experts, num_rows), runtime.groups[group_key]
        wave_tiles = [] if group.capacity_factor is None else [plan.slot_to_row.new_empty(group.size, 2)]
        return [*plan.tensors(), torch.empty_like(plan.slot_to_row), *wave_tiles]
    return empty_plan_like(topk_ids, num_local_experts, topk_ids.shape[0]).tensors()


def _moe_forward(x: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor, b_gate_up: Tensor | None, b_down: Tensor | None,
                 shared_gate_up: list[Tensor], shared_down: list[Tensor], shared_gate: list[Tensor], plan: list[Tensor],
                 main_grad_gate_up: Tensor | None, main_grad_down: Tensor | None, activation: str, swiglu_limit: float | None,
                 precision: str, recompute: str | None, overlap: list[int], save: bool, group_key: int,
                 signature: str) -> tuple[Tensor, Tensor, Tensor]:
    """(y, z, shared_z): one forward pass on (T, H) tokens of one dtype. An ungated shared expert has an empty gate tensor."""
    tensors = _tensors(x, topk_weights, w_gate_up, w_down, b_gate_up, b_down, shared_gate_up, shared_down, shared_gate)
    y, saved = _forward_pass(RoutingPlan(*plan), tensors, activation, swiglu_limit, precision, recompute, _overlap(overlap), save, group_key,
                             signature)
    return y, saved.z, saved.shared_z


def _forward_pass(plan: RoutingPlan, tensors: MoETensors, activation: str, swiglu_limit: float | None, precision: str, recompute: str | None,
                  overlap: Overlap | None, save: bool, group_key: int, signature: str) -> tuple[Tensor, Saved]:
    options = _options(activation, swiglu_limit, precision, recompute, overlap, save and recompute is None)
    with _without_autocast(tensors.x):
        return _engine(tensors.x, tensors.w_down, group_key).forward(plan, tensors, options)


_NOTHING = nullcontext()


def _without_autocast(x: Tensor) -> AbstractContextManager:
    """Dtypes are settled; an engine's own products must not be lowered again."""
    device = "cuda" if x.is_cuda else x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _NOTHING


@lru_cache(maxsize=1024)
def _options(activation: str, swiglu_limit: float | None, precision: str, recompute: str | None, overlap: Overlap | None, save: bool) -> PassOptions:
    return PassOptions(activation, swiglu_limit, precision, overlap, save, recompute)


moe_forward_op = torch.library.custom_op("mok::moe_forward", _moe_forward, mutates_args=())


@moe_forward_op.register_fake
def _(x, topk_weights, w_gate_up, w_down, b_gate_up, b_down, shared_gate_up, shared_down, shared_gate, plan, main_grad_gate_up, main_grad_down,
      activation, swiglu_limit, precision, recompute, overlap, save, group_key, signature):
    save = save and recompute is None
    rows, tokens = (plan[0].shape[0], x.shape[0]) if save else (0, 0)
    if save and group_key and runtime.groups[group_key].capacity_factor is not None:
        rows = cast(int, torch.library.get_ctx().new_dynamic_size())     # of the first wave
    return x.new_empty(x.shape), x.new_empty(rows, w_gate_up.shape[1]), x.new_empty(tokens, sum(w.shape[0] for w in shared_gate_up))


def _setup_context(ctx, inputs, output) -> None:
    (x, topk_weights, w_gate_up, w_down, b_gate_up, b_down, shared_gate_up, shared_down, shared_gate, plan, main_grad_gate_up, main_grad_down,
     *settings) = inputs
    _, z, shared_z = output
    ctx.mark_non_differentiable(z, shared_z)
    ctx.set_materialize_grads(False)
    ctx.activation, ctx.swiglu_limit, ctx.precision, ctx.recompute, ctx.overlap, _, ctx.group_key, ctx.signature = settings
    # no saved tensor: several layers or micro-batches may add into one between this forward and its backward
    ctx.main_grad = (main_grad_gate_up, main_grad_down)
    ctx.num_shared, ctx.num_maps = len(shared_gate_up), len(plan)
    ctx.save_for_backward(x, topk_weights, w_gate_up, w_down, b_gate_up, b_down, z, shared_z, *plan, *shared_gate_up, *shared_down, *shared_gate)


def _backward(ctx, dy, dz, dshared_z):
    n, needs = ctx.num_shared, ctx.needs_input_grad
    shared_needs = [need for group in needs[6:9] for need in (group if isinstance(group, (list, tuple)) else [group])]
    flat = _gradients(ctx, dy, [bool(need) for need in (*needs[:6], *shared_needs)])
    return (*flat[:6], flat[6:6 + n], flat[6 + n:6 + 2 * n], flat[6 + 2 * n:], [None] * ctx.num_maps, *(None,) * 10)


class _moe_forward_directly(torch.autograd.Function):
    """The moe_forward op and its derivative without the dispatcher, for `_nothing_watches`. tensors: as `_moe_tensors` takes them."""

    @staticmethod
    def forward(ctx, plan, main_grad, settings, *tensors):
        y, saved = _forward_pass(plan, _moe_tensors(tensors), *settings)
        ctx.set_materialize_grads(False)
        ctx.main_grad, ctx.settings = main_grad, settings      # main_grad is no saved tensor: see `_setup_context`
        ctx.save_for_backward(saved.z, saved.shared_z, *tensors, *plan.tensors())
        return y

    @staticmethod
    def backward(ctx, dy):
        wants = ctx.needs_input_grad[3:]
        if dy is None:                                                         # whatever came after y had no gradient to give
            return (None,) * (3 + len(wants))
        z, shared_z, *saved = ctx.saved_tensors
        with torch.no_grad() if torch.is_grad_enabled() else _NOTHING:         # create_graph: the engines' own operations are no graph
            flat = _direct_gradients(ctx, dy, wants, Saved(z, shared_z), saved)
        if torch.is_grad_enabled():
            once = iter(_once_differentiable([grad for grad in flat if grad is not None], (dy, *saved[:len(wants)])))
            flat = [None if grad is None else next(once) for grad in flat]
        return (None, None, None, *flat)


def _direct_gradients(ctx, dy: Tensor, wants: tuple[bool, ...], z: Saved, saved: Sequence[Tensor]) -> list[Tensor | None]:
    """Gradients of `_moe_forward_directly`'s tensors; None where not wanted, or where main_grad takes it. saved: those tensors, then the plan's."""
    activation, swiglu_limit, precision, recompute, overlap, _, group_key, signature = ctx.settings
    count = len(wants)
    options = _options(activation, swiglu_limit, precision, recompute, overlap, True)
    return _run_backward(dy, _moe_tensors(saved[:count]), options, RoutingPlan(*saved[count:]), z, wants,
                         None if ctx.main_grad is None else MainGrad(*ctx.main_grad), group_key, signature)


def _gradients(ctx, dy, wants: list[bool]) -> list[Tensor | None]:
    """Gradients of x, topk_weights, w_gate_up, w_down, b_gate_up, b_down and all shared gate_ups, downs, gates; None where not wanted."""
    if dy is None:                                                             # whatever came after y had no gradient to give
        return [None] * len(wants)
    n, saved = ctx.num_shared, ctx.saved_tensors
    x, topk_weights, w_gate_up, w_down, b_gate_up, b_down, z, shared_z = saved[:8]
    plan, shared = list(saved[8:-3 * n or None]), list(saved[len(saved) - 3 * n:])
    arguments = (dy, x, topk_weights, w_gate_up, w_down, b_gate_up, b_down, shared[:n], shared[n:2 * n], shared[2 * n:], plan, z, shared_z,
                 ctx.activation, ctx.swiglu_limit, ctx.precision, ctx.recompute, ctx.overlap, wants, ctx.group_key, ctx.signature)
    returned = _returned(wants, ctx.main_grad[0] is not None)
    with torch.no_grad():                                                      # under create_graph too: the engines' own operations are no graph
        if ctx.main_grad[0] is None:
            grads = torch.ops.mok.moe_backward(*arguments)
        else:
            likes = (x, topk_weights, w_gate_up, w_down, b_gate_up, b_down, *shared)
            grads = [like.new_empty(like.shape) for like, give in zip(likes, returned, strict=True) if give]
            torch.ops.mok.moe_backward_into(*arguments, *ctx.main_grad, grads)
    if torch.is_grad_enabled() and grads:                                      # create_graph=True
        grads = _once_differentiable(grads, (dy, x, topk_weights, w_gate_up, w_down, b_gate_up, b_down, *shared))
    grads = iter(grads)
    return [next(grads) if give else None for give in returned]


moe_forward_op.register_autograd(_backward, setup_context=_setup_context)


def _moe_backward(dy: Tensor, x: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor, b_gate_up: Tensor | None,
                  b_down: Tensor | None, shared_gate_up: list[Tensor], shared_down: list[Tensor], shared_gate: list[Tensor],
                  plan: list[Tensor], z: Tensor, shared_z: Tensor, activation: str, swiglu_limit: float | None, precision: str, recompute: str | None,
                  overlap: list[int], wants: list[bool], group_key: int, signature: str) -> list[Tensor]:
    """Gradients for which `wants` is true, in the order x, topk_weights, w_gate_up, w_down, b_gate_up, b_down, then all shared gate_ups, downs,
    gates."""
    tensors = _tensors(x, topk_weights, w_gate_up, w_down, b_gate_up, b_down, shared_gate_up, shared_down, shared_gate)
    options = PassOptions(activation, swiglu_limit, precision, _overlap(overlap), True, recompute)
    computed = _run_backward(dy, tensors, options, RoutingPlan(*plan), Saved(z, shared_z), tuple(wants), None, group_key, signature)
    return [grad for grad in computed if grad is not None]


moe_backward_op = torch.library.custom_op("mok::moe_backward", _moe_backward, mutates_args=())


@moe_backward_op.register_fake
def _(dy, x, topk_weights, w_gate_up, w_down, b_gate_up, b_down, shared_gate_up, shared_down, shared_gate, plan, z, shared_z, activation,
      swiglu_limit, precision, recompute, overlap, wants, group_key, signature):
    inputs = [x, topk_weights, w_gate_up, w_down, b_gate_up, b_down, *shared_gate_up, *shared_down, *shared_gate]
    return [t.new_empty(t.shape) for t, give in zip(inputs, wants, strict=True) if give]


def _moe_backward_into(dy: Tensor, x: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor, b_gate_up: Tensor | None,
                       b_down: Tensor | None, shared_gate_up: list[Tensor], shared_down: list[Tensor], shared_gate: list[Tensor],
                       plan: list[Tensor], z: Tensor, shared_z: Tensor, activation: str, swiglu_limit: float | None, precision: str,
                       recompute: str | None, overlap: list[int], wants: list[bool], group_key: int, signature: str, main_grad_gate_up: Tensor,
                       main_grad_down: Tensor, grads: list[Tensor]) -> None:
    """`moe_backward` that adds d w_gate_up and d w_down into main_grad and writes every other wanted gradient into `grads`, in order.

    An op of its own: one that writes into its arguments cannot also return a list of tensors under torch.compile.
    """
    tensors = _tensors(x, topk_weights, w_gate_up, w_down, b_gate_up, b_down, shared_gate_up, shared_down, shared_gate)
    options = PassOptions(activation, swiglu_limit, precision, _overlap(overlap), True, recompute)
    main_grad = MainGrad(main_grad_gate_up, main_grad_down)
    computed = _run_backward(dy, tensors, options, RoutingPlan(*plan), Saved(z, shared_z), tuple(wants), main_grad, group_key, signature)
    for out, grad in zip(grads, [grad for grad in computed if grad is not None], strict=True):
        out.copy_(grad)


moe_backward_into_op = torch.library.custom_op("mok::moe_backward_into", _moe_backward_into, mutates_args=("main_grad_gate_up", "main_grad_down", "grads"))


@moe_backward_into_op.register_fake
def _(*arguments):
    return None


def _run_backward(dy: Tensor, tensors: MoETensors, options: PassOptions, plan: RoutingPlan, saved: Saved, wants: tuple[bool, ...],
                  main_grad: MainGrad | None, group_key: int, signature: str) -> list[Tensor | None]:
    """One gradient for each of `wants`; None where not wanted, or where main_grad takes it."""
    all_wants = _wants(wants)
    if group_key:
        options = agree_on_backward(runtime.groups[group_key], _signature(signature), all_wants, tensors, options, plan)
    with _without_autocast(dy):
        grads = _engine(tensors.x, tensors.w_down, group_key).backward(plan, tensors, options, saved, dy, all_wants, main_grad)
    given = [grad if give else None for grad, give in zip(_flatten(grads, len(tensors.shared)), _returned(wants, main_grad is not None), strict=True)]
    assert sum([grad is not None for grad in given]) == sum(_returned(wants, main_grad is not None)), "an engine left out a gradient that was wanted"
    return given


@lru_cache(maxsize=1024)
def _wants(flags: tuple[bool, ...]) -> Wants:
    """Six flags of tokens and routed weights, then those of all shared gate_ups, downs and gates."""
    n = (len(flags) - 6) // 3
    x, topk_weights, w_gate_up, w_down, b_gate_up, b_down = flags[:6]
    return Wants(x, topk_weights, w_gate_up, w_down, b_gate_up, b_down, tuple(zip(flags[6:6 + n], flags[6 + n:6 + 2 * n], flags[6 + 2 * n:], strict=True)))


def _once_differentiable(grads: Sequence[Tensor], sources: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """The gradients, made from `sources` by a node that raises: whoever differentiates them again, by whichever source, meets it."""
    made_from = [source for source in sources if source is not None and source.requires_grad]
    return _OnceDifferentiable.apply(len(made_from), *made_from, *(grad.detach() for grad in grads)) if grads else ()


class _OnceDifferentiable(torch.autograd.Function):
    """Hands gradients through; differentiating them again raises, instead of silently giving nothing. tensors: `count` sources, then the gradients."""

    @staticmethod
    def forward(ctx, count, *tensors):
        return tuple(grad.view_as(grad) for grad in tensors[count:])

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("mok.moe is not twice differentiable; use moe_reference of the module mok.reference where second derivatives are needed")


def _returned(wants: Sequence[bool], into_main_grad: bool) -> Sequence[bool]:
    """Which gradients an op returns: the wanted ones, but for w_gate_up and w_down where main_grad takes them."""
    return wants if not into_main_grad else [want and not (into_main_grad and i in (2, 3)) for i, want in enumerate(wants)]


def _flatten(grads: Grads, num_shared: int) -> list[Tensor | None]:
    if not num_shared:
        return [grads.x, grads.topk_weights, grads.w_gate_up, grads.w_down, grads.b_gate_up, grads.b_down]
    shared = grads.shared or [(None, None, None)] * num_shared
    return [grads.x, grads.topk_weights, grads.w_gate_up, grads.w_down, grads.b_gate_up, grads.b_down, *(s[i] for i in range(3) for s in shared)]


def _tensors(x, topk_weights, w_gate_up, w_down, b_gate_up, b_down, shared_gate_up, shared_down, shared_gate) -> MoETensors:
    shared = tuple(SharedExpert(a, b, g if g.numel() else None) for a, b, g in zip(shared_gate_up, shared_down, shared_gate, strict=True))
    return MoETensors(x, topk_weights, w_gate_up, w_down, b_gate_up, b_down, shared)


def _moe_tensors(tensors: Sequence[Any]) -> MoETensors:
    """MoETensors of six tensors of tokens and routed experts, then all shared gate_ups, downs and gates (None: no gate), in this order."""
    if len(tensors) == 6:
        return MoETensors(*tensors)
    n = (len(tensors) - 6) // 3
    x, topk_weights, w_gate_up, w_down, b_gate_up, b_down = tensors[:6]
    shared = tuple([SharedExpert(*tensors[6 + i::n]) for i in range(n)])
    return MoETensors(x, topk_weights, w_gate_up, w_down, b_gate_up, b_down, shared)


def _overlap(values: list[int]) -> Overlap | None:
    return None if all(v < 0 for v in values) else Overlap(*(None if v < 0 else v for v in values))
