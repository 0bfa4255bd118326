"""Argument checks of `mok.moe`: one ValueError for each misuse, naming the argument and both quantities."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .config import PRECISIONS, check_activation
from .engines.protocol import MainGrad, SharedExpert

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_moe_arguments(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor, b_gate_up: Tensor | None,
                        b_down: Tensor | None, shared: Sequence[SharedExpert], main_grad: MainGrad | None) -> None:
    """Raise ValueError naming the first argument of `mok.moe` whose type, rank, shape, dtype or device is wrong."""
    _check_tensors(x, topk_ids, topk_weights, w_gate_up, w_down)
    H, K = x.shape[-1], topk_ids.shape[-1]
    _check_routes(x, topk_ids, topk_weights, H, K)
    if w_gate_up.dim() != 3 or w_gate_up.shape[1] % 2 or w_gate_up.shape[2] != H:
        raise ValueError(f"w_gate_up.shape={tuple(w_gate_up.shape)} must be (E_local, 2I, H) with x's {H=}")
    E, I = w_gate_up.shape[0], w_gate_up.shape[1] // 2
    if E < 1 or I < 1 or H < 1:
        raise ValueError(f"w_gate_up.shape={tuple(w_gate_up.shape)} must hold at least one expert, one intermediate unit and one hidden unit")
    expected = {"w_down": (w_down, (E, H, I)), "b_gate_up": (b_gate_up, (E, 2 * I)), "b_down": (b_down, (E, H))}
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name}.shape={tuple(tensor.shape)} must be {shape}, as w_gate_up.shape={tuple(w_gate_up.shape)} says")
    named: list[tuple[str, Tensor | None]] = [("topk_weights", topk_weights), ("w_gate_up", w_gate_up), ("w_down", w_down),
                                              ("b_gate_up", b_gate_up), ("b_down", b_down)]
    for i, expert in enumerate(shared):
        _check_shared(expert, i, H)
        named += [(f"shared[{i}].{part}", getattr(expert, part)) for part in ("w_gate_up", "w_down", "gate_weight")]
    for name, tensor in (("x", x), *named):
        if tensor is not None and tensor.dtype not in _FLOATS:
            raise ValueError(f"{name}.dtype={tensor.dtype} must be one of {', '.join(map(str, _FLOATS))}")
    for name, tensor in (("topk_ids", topk_ids), *named):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name}.device={tensor.device} must be x.device={x.device}")
    if main_grad is not None:
        _check_main_grad(main_grad, w_gate_up, w_down)


def check_settings(activation: str, swiglu_limit: float | None, precision: str, dtype: torch.dtype) -> None:
    """Raise ValueError for an unknown setting, NotImplementedError for a known one that no engine serves yet."""
    check_activation(activation, swiglu_limit)
    if precision not in PRECISIONS:
        raise ValueError(f"{precision=} must be one of {PRECISIONS}")
    if precision != "bf16":
        raise NotImplementedError(f"{precision=} is not implemented yet; use 'bf16' (unquantised: computation in x's dtype, {dtype})")


def _check_tensors(*tensors: Tensor) -> None:
    for name, tensor in zip(("x", "topk_ids", "topk_weights", "w_gate_up", "w_down"), tensors, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name}={type(tensor).__name__} must be a tensor")
    if tensors[0].dim() < 1:
        raise ValueError(f"x.shape={tuple(tensors[0].shape)} must be (..., H)")
    for name, tensor in (("topk_ids", tensors[1]), ("topk_weights", tensors[2])):
        if tensor.dim() < 1:
            raise ValueError(f"{name}.shape={tuple(tensor.shape)} must be (..., K)")


def _check_routes(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, H: int, K: int) -> None:
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"topk_ids.dtype={topk_ids.dtype} must be torch.int32 or torch.int64")
    if K < 1:
        raise ValueError(f"topk_ids.shape={tuple(topk_ids.shape)} must have at least one route a token, K >= 1")
    if tuple(topk_weights.shape) != tuple(topk_ids.shape):
        raise ValueError(f"topk_weights.shape={tuple(topk_weights.shape)} must be topk_ids.shape={tuple(topk_ids.shape)}")
    leading = tuple(x.shape[:-1])
    flat = topk_ids.dim() == 2 and topk_ids.shape[0] == x.numel() // max(H, 1)
    if tuple(topk_ids.shape[:-1]) != leading and not flat:
        raise ValueError(f"topk_ids.shape={tuple(topk_ids.shape)} must be {(*leading, K)} or (T, K) with x's tokens, x.shape={tuple(x.shape)}")


def _check_shared(expert: SharedExpert, i: int, H: int) -> None:
    name = f"shared[{i}]"
    if not isinstance(expert, SharedExpert):
        raise ValueError(f"{name}={type(expert).__name__} must be a mok.SharedExpert")
    gate_up, down, gate = expert.w_gate_up, expert.w_down, expert.gate_weight
    if gate_up.dim() != 2 or gate_up.shape[0] % 2 or gate_up.shape[0] == 0 or gate_up.shape[1] != H:
        raise ValueError(f"{name}.w_gate_up.shape={tuple(gate_up.shape)} must be (2I_s, H) with x's {H=}")
    if tuple(down.shape) != (H, gate_up.shape[0] // 2):
        raise ValueError(f"{name}.w_down.shape={tuple(down.shape)} must be {(H, gate_up.shape[0] // 2)}, as {name}.w_gate_up says")
    if gate is not None and tuple(gate.shape) != (H,):
        raise ValueError(f"{name}.gate_weight.shape={tuple(gate.shape)} must be {(H,)}")


def _check_main_grad(main_grad: MainGrad, w_gate_up: Tensor, w_down: Tensor) -> None:
    for name, accumulator, weight in (("main_grad[0]", main_grad.w_gate_up, w_gate_up), ("main_grad[1]", main_grad.w_down, w_down)):
        if tuple(accumulator.shape) != tuple(weight.shape) or accumulator.dtype != torch.float32:
            raise ValueError(f"{name} is {accumulator.dtype} {tuple(accumulator.shape)} and must be torch.float32 {tuple(weight.shape)}")
        if not accumulator.is_contiguous():
            raise ValueError(f"{name}.stride()={accumulator.stride()} must be contiguous")
        if accumulator.device != weight.device:
            raise ValueError(f"{name}.device={accumulator.device} must be its weight's device, {weight.device}")
        if accumulator.requires_grad:
            raise ValueError(f"{name}.requires_grad=True must be False: backward adds into it in place")
