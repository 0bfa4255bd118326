"""The baseline: the layer in unfused PyTorch at its best, `torch._grouped_mm` between index operations, with its own backward.

What it does to be fast: one sort of narrow ids, group ends by one search, no padding, the routing weight multiplied into the hidden rows
(I < H) so that combine is a plain sum, every intermediate kept for backward, halves of dz written in place. It may use more memory than mok.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def unfused_moe(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """SwiGLU experts: x (T, H) BF16, topk_ids (T, K) in 0..E-1, topk_weights (T, K) fp32, w_gate_up (E, 2I, H), w_down (E, H, I) -> (T, H).

    Differentiable in all but the ids. H and I must be multiples of 8, what `torch._grouped_mm` takes. No -1 routes.
    """
    return _UnfusedMoE.apply(x, topk_ids, topk_weights, w_gate_up, w_down, False)[0]


def unfused_moe_with_counts(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> tuple[Tensor, Tensor]:
    """`unfused_moe` for training, and (E,) int32: how many routes each expert has.

    `torch._grouped_mm` leaves the weight gradient of an expert without rows unwritten. Here every expert gets one more row, of weight 0, so
    that none is without: E rows cost less than clearing, or even looking at, all weight gradients.
    """
    y, ends = _UnfusedMoE.apply(x, topk_ids, topk_weights, w_gate_up, w_down, True)
    return y, ends.diff(prepend=ends.new_zeros(1)) - 1


class _UnfusedMoE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, topk_ids, topk_weights, w_gate_up, w_down, extra_rows):
        (E, _, I), K = w_down.shape, topk_ids.shape[1]
        narrow = topk_ids.flatten().to(torch.int16 if E < 2**15 else torch.int32)          # a radix sort's passes go with the key's bits
        weights = topk_weights.flatten()
        if extra_rows:
            narrow = torch.cat([narrow, torch.arange(E, dtype=narrow.dtype, device=x.device)])
            weights = torch.cat([weights, weights.new_zeros(E)])
        sorted_ids, order = narrow.sort(stable=True)
        ends = torch.searchsorted(sorted_ids, torch.arange(E, dtype=narrow.dtype, device=x.device), right=True, out_int32=True)
        slot_to_row = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=x.device))
        token = order // K
        if extra_rows:
            token.clamp_(max=x.shape[0] - 1)                                               # an extra row is one of the last token
            slot_to_row = slot_to_row[:topk_ids.numel()]
        row_weights = weights[order].unsqueeze(1).to(x.dtype)
        x_rows = x.index_select(0, token)
        z = torch._grouped_mm(x_rows, w_gate_up.transpose(1, 2), offs=ends)
        h = F.silu(z[:, :I]).mul_(z[:, I:])
        weighted_h = h * row_weights
        y = sum_slots(torch._grouped_mm(weighted_h, w_down.transpose(1, 2), offs=ends), slot_to_row, K)
        ctx.save_for_backward(w_gate_up, w_down, x_rows, z, h, weighted_h, row_weights, ends, token, slot_to_row)
        ctx.K, ctx.weights_dtype = K, topk_weights.dtype
        ctx.mark_non_differentiable(ends)
        return y, ends

    @staticmethod
    def backward(ctx, dy, _):
        w_gate_up, w_down, x_rows, z, h, weighted_h, row_weights, ends, token, slot_to_row = ctx.saved_tensors
        I, K = w_down.shape[2], ctx.K
        g, u = z[:, :I], z[:, I:]
        dy_rows = dy.index_select(0, token)
        dh = torch._grouped_mm(dy_rows, w_down, offs=ends)                                  # before the routing weight
        d_weights = (dh * h).sum(1, dtype=torch.float32)[slot_to_row].view(-1, K).to(ctx.weights_dtype)
        dh.mul_(row_weights)
        dz = torch.empty_like(z)
        torch.mul(dh, F.silu(g), out=dz[:, I:])
        torch.ops.aten.silu_backward.grad_input(dh.mul_(u), g, grad_input=dz[:, :I])
        dx = sum_slots(torch._grouped_mm(dz, w_gate_up, offs=ends), slot_to_row, K)
        d_gate_up = torch._grouped_mm(dz.T, x_rows, offs=ends)
        d_down = torch._grouped_mm(dy_rows.T, weighted_h, offs=ends)
        return dx, None, d_weights, d_gate_up, d_down, None


def sum_slots(rows: Tensor, slot_to_row: Tensor, K: int) -> Tensor:
    """(T, H): each token's K rows summed; rows (T*K, H) in expert order."""
    return rows.index_select(0, slot_to_row).view(-1, K, rows.shape[1]).sum(1)
