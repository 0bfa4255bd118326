"""Rotary position embedding on a GPU in one kernel a pass, where PyTorch operations would move the tensor ten times.

    y[i] = x[i] * cos - x[i + D/2] * sin        y[i + D/2] = x[i + D/2] * cos + x[i] * sin        in fp32, rounded once to x's dtype

Legend: B sequences, S positions, D width of a head. One program a position; any strides but the last, which must be 1. The backward pass is
the rotation by the opposite angle. Compiled once for each width D and number of heads (rounded up to a power of two).
"""
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["S", "heads"])
def _rotate_kernel(x, cos, sin, y, S, heads, x_sequence, x_head, x_position, y_sequence, y_head, y_position, sign: tl.constexpr,
                   HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, HEADS_BLOCK: tl.constexpr):
    program = tl.program_id(0)
    sequence = (program // S).to(tl.int64)
    position = program % S
    head = tl.arange(0, HEADS_BLOCK)[:, None]
    i = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (head < heads) & (i < HALF)
    c = tl.load(cos + position * HALF + i, mask=i < HALF, other=0.0)
    s = tl.load(sin + position * HALF + i, mask=i < HALF, other=0.0) * sign
    source = x + sequence * x_sequence + position.to(tl.int64) * x_position + head * x_head + i
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    target = y + sequence * y_sequence + position.to(tl.int64) * y_position + head * y_head + i
    tl.store(target, (a * c - b * s).to(y.dtype.element_ty), mask=inside)
    tl.store(target + HALF, (b * c + a * s).to(y.dtype.element_ty), mask=inside)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, heads, S, D), D even, last stride 1; cos, sin (S, D/2) fp32 -> (B, heads, S, D) in x's dtype, positions before heads in memory.

    Differentiable in x.
    """
    return _Rotate.apply(x, cos, sin)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _launch(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _launch(grads[0], cos, sin, -1), None, None


def _launch(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    B, heads, S, D = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    y = torch.empty(B, S, heads, D, dtype=x.dtype, device=x.device).transpose(1, 2)
    blocks = {"HALF": D // 2, "HALF_BLOCK": triton.next_power_of_2(D // 2), "HEADS_BLOCK": triton.next_power_of_2(heads)}
    _rotate_kernel[(B * S,)](x, cos.contiguous(), sin.contiguous(), y, S, heads, *x.stride()[:3], *y.stride()[:3], sign, **blocks)
    return y
