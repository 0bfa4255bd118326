"""Matrix products of rows grouped by expert, in plain PyTorch: deterministic, and without reading a count on the host.

Rows come in the plan's order: each expert's segment starts at a multiple of BLOCK_M, unused rows at the end belong to nobody. Two routes:
`torch._grouped_mm` for results in BF16 (CUDA needs compute capability 9.0 or more and at most MAX_GROUPS experts; sizes off 16 bytes are
zero-padded), and for everything else tiles of BLOCK_M rows, each multiplied by its expert's gathered weight. `torch._grouped_mm` sums in fp32
and rounds to BF16, never anything else, so what must stay in fp32 takes the tiles too. Both leave rows behind the last segment unspecified.

Legend: R rows, M = R / BLOCK_M tiles, E local experts, `inner` the contracted dimension, `outer` the result's columns.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import BLOCK_M
from ..plan import RoutingPlan
from .protocol import accumulation_dtype

GATHERED_WEIGHT_BYTES = 2**28   # weights gathered at a time on the tile route: bounds its scratch, changes no result's order of sums
ALIGNMENT = 8                   # elements of BF16 in 16 bytes, what torch._grouped_mm asks of every stride
MAX_GROUPS = 1023               # what torch._grouped_mm takes on CUDA


def uses_grouped_mm(device: torch.device, dtype: torch.dtype, num_experts: int) -> bool:
    """Whether `torch._grouped_mm` serves this without a host sync: BF16 on Hopper and later (on a CPU there is nothing to sync with)."""
    if dtype != torch.bfloat16:
        return False
    return device.type == "cpu" or (num_experts <= MAX_GROUPS and torch.cuda.get_device_capability(device)[0] >= 9)


def wide_mm(a: Tensor, b: Tensor) -> Tensor:
    """a (n, inner) @ b (inner, outer), or batches of both, with an unrounded result in their accumulation dtype."""
    wide = accumulation_dtype(a.dtype)
    product = torch.bmm if a.dim() == 3 else torch.mm
    if a.dtype == wide:
        return product(a, b)
    if a.is_cuda:
        return product(a, b, out_dtype=wide)
    return product(a.to(wide), b.to(wide))


def rows_times_weight(plan: RoutingPlan, rows: Tensor, weight: Tensor, *, transpose: bool, bias: Tensor | None = None, rounded: bool = True) -> Tensor:
    """out[r] = rows[r] @ W + bias[e] for the expert e of row r: rows (R, inner), bias (E, outer) or None -> (R, outer).

    weight: (E, inner, outer), W = weight[e]; with transpose (E, outer, inner), W = weight[e].T. The result has rows' dtype, rounded once
    from sum and bias, or with rounded=False the accumulation dtype, not rounded at all.
    """
    wide = accumulation_dtype(rows.dtype)
    outer = weight.shape[1] if transpose else weight.shape[2]
    dtype = rows.dtype if rounded else wide
    if rows.shape[0] == 0:
        return rows.new_empty((0, outer), dtype=dtype)
    if rounded and uses_grouped_mm(rows.device, rows.dtype, weight.shape[0]):
        if bias is not None:                    # one more term of the sum, 1 * bias: added behind the product it would be rounded twice
            rows = torch.cat([rows, rows.new_ones((rows.shape[0], 1))], dim=1)
            weight = torch.cat([weight, bias.unsqueeze(2 if transpose else 1)], dim=2 if transpose else 1)
        padded = _aligned(weight)
        return torch._grouped_mm(_aligned(rows), padded.transpose(1, 2) if transpose else padded, offs=segment_ends(plan))[:, :outer].contiguous()

    tiles = rows.contiguous().view(-1, BLOCK_M, rows.shape[1])
    expert = plan.tile_to_expert.clamp(min=0).long()
    batch = max(1, GATHERED_WEIGHT_BYTES // max(1, weight[0].numel() * weight.element_size()))
    out = rows.new_empty((tiles.shape[0], BLOCK_M, outer), dtype=dtype)
    for first in range(0, tiles.shape[0], batch):
        part = slice(first, first + batch)
        gathered = weight.index_select(0, expert[part])
        product = wide_mm(tiles[part], gathered.transpose(1, 2) if transpose else gathered)
        out[part] = product if bias is None else product + bias.index_select(0, expert[part]).unsqueeze(1).to(wide)
    return out.view(-1, outer)


def weight_gradient(plan: RoutingPlan, left: Tensor, right: Tensor, *, rounded: bool = True) -> Tensor:
    """out[e] = sum over the rows r of expert e, ascending, of left[r]^T right[r]: (R, A), (R, B) -> (E, A, B).

    Padding rows, those of unused tiles too, must be zero in both. An expert without rows gets exact zeros. On the `_grouped_mm` route, taken
    only if rounded, the result is BF16; on the other it stays in the accumulation dtype, one tile added after the other.
    """
    E, A, B = plan.tokens_per_expert.shape[0], left.shape[1], right.shape[1]
    wide = accumulation_dtype(left.dtype)
    if left.shape[0] == 0:
        return left.new_zeros((E, A, B), dtype=wide)
    if rounded and uses_grouped_mm(left.device, left.dtype, E):
        out = torch._grouped_mm(_aligned(left).T, _aligned(right), offs=segment_ends(plan))[:, :A, :B]
        # empty groups are skipped there, and their part of the result stays as the allocator left it
        return out.masked_fill((plan.tokens_per_expert == 0).view(E, 1, 1), 0)

    left_tiles, right_tiles = left.contiguous().view(-1, BLOCK_M, A), right.contiguous().view(-1, BLOCK_M, B)
    owner = plan.tile_to_expert.clamp(min=0).long()                                        # unused tiles add their zeros to expert 0
    sums = left.new_zeros((E, A, B), dtype=wide)
    for tile in range(left_tiles.shape[0]):
        expert = owner[tile:tile + 1]
        total = sums.index_select(0, expert) + wide_mm(left_tiles[tile].T, right_tiles[tile])
        sums.index_copy_(0, expert, total)
    return sums


def segment_sums(plan: RoutingPlan, rows: Tensor) -> Tensor:
    """out[e] = sum over the rows of expert e of rows[r], in the accumulation dtype: (R, C) -> (E, C); padding rows must be zero.

    Within tiles first, then over the tiles of a segment in a tree whose shape depends on the segment's length alone.
    """
    wide, C = accumulation_dtype(rows.dtype), rows.shape[1]
    E = plan.tokens_per_expert.shape[0]
    if rows.shape[0] == 0:
        return rows.new_zeros((E, C), dtype=wide)
    sums = rows.reshape(-1, BLOCK_M, C).sum(1, dtype=wide)
    expert = plan.tile_to_expert
    distance = 1
    while distance < sums.shape[0]:                                                        # inclusive scan that stops at segment borders
        same = (expert[distance:] == expert[:-distance]).unsqueeze(1)
        sums = torch.cat([sums[:distance], torch.where(same, sums[distance:] + sums[:-distance], sums[distance:])])
        distance *= 2
    last_tile = (plan.expert_offsets[1:] // BLOCK_M - 1).clamp(min=0)
    return sums.index_select(0, last_tile).masked_fill((plan.tokens_per_expert == 0).unsqueeze(1), 0)


def rows_of_experts(plan: RoutingPlan, values: Tensor) -> Tensor:
    """values[e] for the expert e of each row: (E, C) -> (R, C); rows of unused tiles read expert 0."""
    tiles = values.index_select(0, plan.tile_to_expert.clamp(min=0).long())
    return tiles.unsqueeze(1).expand(-1, BLOCK_M, -1).reshape(-1, values.shape[1])


def segment_ends(plan: RoutingPlan) -> Tensor:
    """(E,) int32: one past the last row of each expert's segment, as `torch._grouped_mm` wants its offsets."""
    return plan.expert_offsets[1:].to(torch.int32)


def _aligned(matrix: Tensor) -> Tensor:
    """`matrix`, its last two dimensions padded with zeros to multiples of ALIGNMENT (rows of a 2D matrix are never padded), contiguous."""
    columns = -matrix.shape[-1] % ALIGNMENT
    rows = -matrix.shape[-2] % ALIGNMENT if matrix.dim() == 3 else 0
    padded = F.pad(matrix, (0, columns, 0, rows)) if columns or rows else matrix.contiguous()
    return padded if padded.data_ptr() % 16 == 0 else padded.clone()
