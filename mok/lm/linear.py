"""The model's dense layer: on a CPU one sequence a call, one thread a call, so that a sequence's bits do not depend on its batch or on threads.

A library product over the whole batch changes bits with the number of rows and of threads; a call of fixed shape on one thread does not. With
it the loss of a sequence is the same for every batch size, number of threads and number of ranks. Weight gradients are sums over the
batch and make no such promise.
"""
from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..runtime import Scratch, Task, runtime


class Linear(nn.Module):
    """y = x @ weight.T, no bias: x (B, S, in) -> (B, S, out), in autocast's dtype where it is on. weight (out, in) ~ std * N(0, 1)."""

    def __init__(self, in_features: int, out_features: int, std: float, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features, generator=generator) * std)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (B, S, in) @ weight (out, in) transposed -> (B, S, out), differentiable; both are converted to autocast's dtype where it is on."""
    if x.device.type != "cpu":
        return F.linear(x, weight)
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        x, weight = x.to(dtype), weight.to(dtype)
    return _SequenceLinear.apply(x, weight)


class _SequenceLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        ctx.save_for_backward(x, weight)
        return _by_sequence(x, weight.T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (x, weight), dy = ctx.saved_tensors, grads[0].contiguous()
        dx = _by_sequence(dy, weight) if ctx.needs_input_grad[0] else None
        dweight = dy.flatten(0, 1).T @ x.flatten(0, 1) if ctx.needs_input_grad[1] else None
        return dx, dweight


def _by_sequence(a: Tensor, b: Tensor) -> Tensor:
    """a (B, S, n) @ b (n, m) -> (B, S, m): B calls of one shape, each on one thread of the tile pool."""
    out = a.new_empty(*a.shape[:2], b.shape[1])
    tasks: list[Task] = [partial(_product, a[i], b, out[i]) for i in range(a.shape[0])]
    runtime.tiles.run(tasks)
    return out


def _product(a: Tensor, b: Tensor, out: Tensor, scratch: Scratch) -> None:
    torch.mm(a, b, out=out)
