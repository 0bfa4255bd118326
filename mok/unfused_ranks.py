"""The baseline on several ranks: unfused PyTorch at its best, rows by `all_to_all_single` and `torch._grouped_mm` between index operations.

As `mok.unfused` does on one rank: one sort of narrow ids, no padding, the routing weight multiplied into the hidden rows where the expert is (I < H), so
that combine is a plain sum; every intermediate kept for backward. The host waits once a pass, in forward, for the sizes that `all_to_all_single` must know;
backward uses them again. E must be a multiple of the number of ranks.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .unfused import sum_slots

# exchange(rows by destination rank, how many for each, how many from each) -> rows by source rank
Exchange = Callable[[Tensor, list[int], list[int]], Tensor]


def all_to_all(rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
    """`all_to_all_single` on the default group."""
    out = rows.new_empty((sum(receive), *rows.shape[1:]))
    dist.all_to_all_single(out, rows, receive, send)
    return out


def unfused_moe_on_ranks(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor, world_size: int,
                         exchange: Exchange = all_to_all) -> Tensor:
    """SwiGLU experts of `world_size` ranks, a contiguous block on each: x (T, H) BF16, topk_ids (T, K) in 0..E-1, topk_weights (T, K) fp32, and this rank's
    w_gate_up (E_local, 2I, H), w_down (E_local, H, I) -> (T, H). Differentiable in all but the ids; all ranks call forward and backward.

    An expert that gets no row has an unwritten weight gradient: `torch._grouped_mm` skips it.
    """
    return _UnfusedOnRanks.apply(x, topk_ids, topk_weights, w_gate_up, w_down, world_size, exchange)


@dataclass
class _Journey:
    """Rows sent, in the order of the experts, and rows received, by source rank: how many of each rank, and which received row is the r-th by expert."""

    send: list[int]
    receive: list[int]
    row_to_received: Tensor
    received_to_row: Tensor
    ends: Tensor
    exchange: Exchange

    def to_experts(self, rows: Tensor) -> Tensor:
        return self.exchange(rows, self.send, self.receive).index_select(0, self.row_to_received)

    def home(self, rows: Tensor) -> Tensor:
        return self.exchange(rows.index_select(0, self.received_to_row), self.receive, self.send)


def _journey(sorted_ids: Tensor, E_local: int, W: int, exchange: Exchange) -> _Journey:
    """sorted_ids (N,): expert ids of this rank's routes, ascending."""
    ends = torch.searchsorted(sorted_ids, torch.arange(E_local * W, dtype=sorted_ids.dtype, device=sorted_ids.device), right=True)
    counts = ends.diff(prepend=ends.new_zeros(1))
    received_counts = exchange(counts, [E_local] * W, [E_local] * W).view(W, E_local)
    send, receive = torch.stack([counts.view(W, E_local).sum(1), received_counts.sum(1)]).tolist()     # the one host sync
    experts = torch.arange(E_local, dtype=sorted_ids.dtype, device=sorted_ids.device).repeat(W)
    expert_of_received = experts.repeat_interleave(received_counts.flatten(), output_size=sum(receive))
    row_to_received = expert_of_received.sort(stable=True).indices
    received_to_row = torch.empty_like(row_to_received).scatter_(0, row_to_received, torch.arange(sum(receive), device=sorted_ids.device))
    return _Journey(send, receive, row_to_received, received_to_row, received_counts.sum(0).cumsum(0).to(torch.int32), exchange)


class _UnfusedOnRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, topk_ids, topk_weights, w_gate_up, w_down, world_size, exchange):
        (E_local, _, I), K = w_down.shape, topk_ids.shape[1]
        narrow = topk_ids.flatten().to(torch.int16 if E_local * world_size < 2**15 else torch.int32)
        sorted_ids, order = narrow.sort(stable=True)
        token = order // K
        slot_to_sent = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=x.device))
        journey = _journey(sorted_ids, E_local, world_size, exchange)
        x_rows = journey.to_experts(x.index_select(0, token))
        row_weights = journey.to_experts(topk_weights.flatten()[order]).unsqueeze(1).to(x.dtype)
        z = torch._grouped_mm(x_rows, w_gate_up.transpose(1, 2), offs=journey.ends)
        h = F.silu(z[:, :I]).mul_(z[:, I:])
        weighted_h = h * row_weights
        y = sum_slots(journey.home(torch._grouped_mm(weighted_h, w_down.transpose(1, 2), offs=journey.ends)), slot_to_sent, K)
        ctx.save_for_backward(w_gate_up, w_down, x_rows, z, h, weighted_h, row_weights, token, slot_to_sent)
        ctx.K, ctx.journey = K, journey
        return y

    @staticmethod
    def backward(ctx, dy):
        w_gate_up, w_down, x_rows, z, h, weighted_h, row_weights, token, slot_to_sent = ctx.saved_tensors
        journey, K, I = ctx.journey, ctx.K, w_down.shape[2]
        g, u = z[:, :I], z[:, I:]
        dy_rows = journey.to_experts(dy.index_select(0, token))
        dh = torch._grouped_mm(dy_rows, w_down, offs=journey.ends)                          # before the routing weight
        d_weight_rows = (dh * h).sum(1, dtype=torch.float32)
        dh.mul_(row_weights)
        dz = torch.empty_like(z)
        torch.mul(dh, F.silu(g), out=dz[:, I:])
        torch.ops.aten.silu_backward.grad_input(dh.mul_(u), g, grad_input=dz[:, :I])
        dx = sum_slots(journey.home(torch._grouped_mm(dz, w_gate_up, offs=journey.ends)), slot_to_sent, K)
        d_weights = journey.home(d_weight_rows)[slot_to_sent].view(-1, K)
        d_gate_up = torch._grouped_mm(dz.T, x_rows, offs=journey.ends)
        d_down = torch._grouped_mm(dy_rows.T, weighted_h, offs=journey.ends)
        return dx, None, d_weights, d_gate_up, d_down, None, None
