"""Argument checks of `mok.moe`: one ValueError for each misuse, naming the argument and both quantities."""
from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .arguments import FLOATS, check_choice, check_integer, check_tensor, check_type, kind_of
from .config import PRECISIONS, Overlap, check_activation, check_recompute
from .engines.protocol import SharedExpert
from .group import ExpertGroup
from .runtime import runtime

MAX_PASSED = 4096           # calls that are remembered; all are forgotten when there are more, which shapes that never repeat would cause
_PASSED = "calls that passed the checks"
_NO_TENSORS: Mapping[str, Tensor | None] = MappingProxyType({})
_NONE: frozenset[Hashable] = frozenset()       # unlike (), it hashes what it is asked for


def passed_before(tensors: Sequence[Tensor | None], shared: Sequence[SharedExpert], settings: Sequence[Hashable]) -> tuple[Hashable, bool]:
    """(a key of everything that `check_moe_arguments` and `check_settings` look at, whether a call with this key has passed them).

    settings: values of any kind. The key is None where an argument has none, which a wrong one may not have: then the checks say what is wrong.
    """
    key: tuple[Any, ...]
    try:
        key = (*[None if tensor is None else (type(tensor), tensor.shape, tensor.dtype, tensor.layout, tensor.device) for tensor in tensors],
               type(shared), *[(type(setting), setting) for setting in settings])
        for expert in shared:
            key += (type(expert), *[None if part is None else (type(part), part.shape, part.dtype, part.layout, part.device)
                                    for part in (expert.w_gate_up, expert.w_down, expert.gate_weight)])
        return key, key in runtime.scratch.get(_PASSED, _NONE)
    except (AttributeError, TypeError, RuntimeError):      # no tensor; not hashable; a tensor without these properties
        return None, False


def remember_passed(key: Hashable) -> None:
    """From now on calls with this key have passed; None: no key."""
    if key is not None:
        with runtime.lock:
            passed = runtime.scratch.setdefault(_PASSED, set())
            if len(passed) >= MAX_PASSED:
                passed.clear()
            passed.add(key)


def check_moe_arguments(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor, b_gate_up: Tensor | None,
                        b_down: Tensor | None, shared: Sequence[SharedExpert]) -> None:
    """Raise ValueError naming the first tensor argument of `mok.moe` whose type, rank, shape, dtype or device is wrong."""
    named: list[tuple[str, Any]] = [("topk_weights", topk_weights), ("w_gate_up", w_gate_up), ("w_down", w_down)]
    named += [(name, bias) for name, bias in (("b_gate_up", b_gate_up), ("b_down", b_down)) if bias is not None]
    for name, tensor in (("x", x), ("topk_ids", topk_ids), *named):
        check_tensor(name, tensor)
    if x.dim() < 1:
        raise ValueError(f"x.shape={tuple(x.shape)} must be (..., H)")
    H = x.shape[-1]
    _check_routes(x, topk_ids, topk_weights, H)
    if w_gate_up.dim() != 3 or w_gate_up.shape[1] % 2 or w_gate_up.shape[2] != H:
        raise ValueError(f"w_gate_up.shape={tuple(w_gate_up.shape)} must be (E_local, 2I, H) with x's {H=}")
    E, I = w_gate_up.shape[0], w_gate_up.shape[1] // 2
    if E < 1 or I < 1 or H < 1:
        raise ValueError(f"w_gate_up.shape={tuple(w_gate_up.shape)} must hold at least one expert, one intermediate unit and one hidden unit")
    expected: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {"w_down": (w_down, (E, H, I)), "b_gate_up": (b_gate_up, (E, 2 * I)),
                                                                 "b_down": (b_down, (E, H))}
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name}.shape={tuple(tensor.shape)} must be {shape}, as w_gate_up.shape={tuple(w_gate_up.shape)} says")
    check_type("shared", shared, (tuple, list), "a tuple or list of mok.SharedExpert")        # a generator would be read once and then be empty
    for i, expert in enumerate(shared):
        named += _check_shared(expert, i, H)
    for name, tensor in (("x", x), *named):
        if tensor.dtype not in FLOATS:
            raise ValueError(f"{name}.dtype={tensor.dtype} must be one of {', '.join(map(str, FLOATS))}")
    device = x.device
    for name, tensor in (("topk_ids", topk_ids), *named):
        if tensor.device != device:
            raise ValueError(f"{name}.device={tensor.device} must be x.device={device}")


def check_settings(activation: str, swiglu_limit: float | None, precision: str, dtype: torch.dtype, overlap: Overlap | None, layer_key: int,
                   recompute: str | None) -> None:
    """Raise ValueError naming a wrong setting, NotImplementedError for a known one that no engine serves yet."""
    check_activation(activation, swiglu_limit)
    check_choice("precision", precision, PRECISIONS)
    if overlap is not None:
        check_type("overlap", overlap, Overlap, "a mok.Overlap or None")
    if not torch.compiler.is_compiling():        # a look at it would compile every layer of a model anew
        check_integer("layer_key", layer_key, -2**256, 2**256)
    check_recompute(recompute)
    if precision != "bf16":
        raise NotImplementedError(f"{precision=} is not implemented yet; use 'bf16' (unquantised: computation in x's dtype, {dtype})")


def check_group(group: ExpertGroup | None) -> None:
    """Raise ValueError unless it is a `mok.ExpertGroup` or None."""
    if group is not None:
        check_type("group", group, ExpertGroup, "a mok.ExpertGroup or None")
        if group.closed:
            raise ValueError("group is closed: build another mok.ExpertGroup")


def _check_routes(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, H: int) -> None:
    for name, tensor in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        if tensor.dim() < 1:
            raise ValueError(f"{name}.shape={tuple(tensor.shape)} must be (..., K)")
    K = topk_ids.shape[-1]
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"topk_ids.dtype={topk_ids.dtype} must be torch.int32 or torch.int64")
    if K < 1:
        raise ValueError(f"topk_ids.shape={tuple(topk_ids.shape)} must have at least one route a token, K >= 1")
    flat = topk_ids.dim() == 2 and topk_ids.shape[0] == x.numel() // max(H, 1)
    if topk_ids.shape[:-1] != x.shape[:-1] and not flat:
        raise ValueError(f"topk_ids.shape={tuple(topk_ids.shape)} must be {(*x.shape[:-1], K)} or (T, K) with x's tokens, x.shape={tuple(x.shape)}")
    if topk_weights.shape != topk_ids.shape:
        raise ValueError(f"topk_weights.shape={tuple(topk_weights.shape)} must be topk_ids.shape={tuple(topk_ids.shape)}")


def _check_shared(expert: SharedExpert, i: int, H: int) -> list[tuple[str, Tensor]]:
    """The expert's tensors by name; ValueError naming one of a wrong type or shape."""
    name = f"shared[{i}]"
    check_type(name, expert, SharedExpert, "a mok.SharedExpert")
    gate_up, down, gate = expert.w_gate_up, expert.w_down, expert.gate_weight
    named = [(f"{name}.w_gate_up", gate_up), (f"{name}.w_down", down)]
    if gate is not None:
        named.append((f"{name}.gate_weight", gate))
    for part, tensor in named:
        check_tensor(part, tensor)
    if gate_up.dim() != 2 or gate_up.shape[0] % 2 or gate_up.shape[0] == 0 or gate_up.shape[1] != H:
        raise ValueError(f"{name}.w_gate_up.shape={tuple(gate_up.shape)} must be (2I_s, H) with x's {H=}")
    if down.shape != (H, gate_up.shape[0] // 2):
        raise ValueError(f"{name}.w_down.shape={tuple(down.shape)} must be {(H, gate_up.shape[0] // 2)}, as {name}.w_gate_up says")
    if gate is not None and gate.shape != (H,):
        raise ValueError(f"{name}.gate_weight.shape={tuple(gate.shape)} must be {(H,)}")
    return named


def check_main_grad(main_grad: tuple[Tensor, Tensor] | None, w_gate_up: Tensor, w_down: Tensor, others: Mapping[str, Tensor | None] = _NO_TENSORS) -> None:
    """Raise ValueError unless it is None or two contiguous fp32 accumulators of the (already checked) weights' shapes, on their device, in memory of their own.

    others: the layer's other inputs by name, which backward reads too.
    """
    if main_grad is None:
        return
    if not isinstance(main_grad, (tuple, list)) or len(main_grad) != 2:
        shown = f"{len(main_grad)} values" if isinstance(main_grad, (tuple, list)) else kind_of(main_grad)
        raise ValueError(f"main_grad={shown} must be two tensors, for w_gate_up and w_down")
    for name, accumulator, weight in (("main_grad[0]", main_grad[0], w_gate_up), ("main_grad[1]", main_grad[1], w_down)):
        check_tensor(name, accumulator)
        if accumulator.shape != weight.shape or accumulator.dtype != torch.float32:
            raise ValueError(f"{name} is {accumulator.dtype} {tuple(accumulator.shape)} and must be torch.float32 {tuple(weight.shape)}")
        if not accumulator.is_contiguous():
            raise ValueError(f"{name}.stride()={accumulator.stride()} must be contiguous")
        if accumulator.device != weight.device:
            raise ValueError(f"{name}.device={accumulator.device} must be its weight's device, {weight.device}")
        if accumulator.requires_grad:
            raise ValueError(f"{name}.requires_grad=True must be False: backward adds into it in place")
    if not torch.compiler.is_compiling():                  # a traced tensor has no address
        inputs = {"w_gate_up": w_gate_up, "w_down": w_down, **others}
        for name, accumulator, read in (("main_grad[0]", main_grad[0], {"main_grad[1]": main_grad[1], **inputs}), ("main_grad[1]", main_grad[1], inputs)):
            for other_name, other in read.items():
                if other is not None and _overlap(accumulator, other):
                    raise ValueError(f"{name} must have memory of its own and shares some with {other_name}")


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether a's memory, which is contiguous, and the span from b's first element to its last have bytes in common."""
    if not {type(a), type(b)} <= {Tensor, torch.nn.Parameter} or a.device.type == "meta" or b.device != a.device or b.numel() == 0:
        return False
    first, second = a.data_ptr(), b.data_ptr()
    span = b.numel() if b.is_contiguous() else 1 + sum((size - 1) * stride for size, stride in zip(b.shape, b.stride()))
    return first < second + span * b.element_size() and second < first + a.numel() * a.element_size()
