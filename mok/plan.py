"""RoutingPlan: which row goes where, as data. Pure torch arithmetic on any device: fixed capacity, no device-to-host copy.

Canonical row order: expert ascending; inside an expert by source rank, then token, then k. It is the global token order, so the same for
every number of ranks W. Each expert's segment starts at a multiple of BLOCK_M rows; the rows between segments are padding.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .config import BLOCK_M


def experts_of_rank(num_experts: int, world_size: int, rank: int) -> tuple[int, int]:
    """(first global expert id, count) of `rank`: contiguous blocks, the first E mod W ranks own one more.

    experts_of_rank(5, 2, 0) == (0, 3); experts_of_rank(5, 2, 1) == (3, 2)
    """
    base, extra = divmod(num_experts, world_size)
    return rank * base + min(rank, extra), base + (rank < extra)


def plan_capacity(max_valid_rows: int, num_local_experts: int, block_m: int = BLOCK_M) -> int:
    """Rows R that hold any routing of `max_valid_rows` = N valid rows: N + min(E_local, N) * (block_m - 1), rounded up to block_m.

    plan_capacity(3, 4, 4) == 12
    """
    busy = torch.sym_min(num_local_experts, max_valid_rows)
    return (max_valid_rows + busy * (block_m - 1) + block_m - 1) // block_m * block_m


@dataclass(frozen=True)
class RoutingPlan:
    """Maps between slots (token*K + k on a source rank) and rows of an expert rank's buffer. All int32 on topk_ids' device.

    Worked example (rank 0 of W = 1, block_m = 4, E = 3): topk_ids = [[2, 0], [0, -1]] (T = 2, K = 2), expert 1 empty. Slots 0..3.
    R = plan_capacity(4, 3, 4) = 16 rows in 4 tiles, of which num_tiles = 2 are used.

    row_to_slot        (R,)        slot on the source rank; -1 = padding           [1, 2, -1, -1, 0, -1] then -1
    row_to_rank        (R,)        source rank; -1 = padding                       [0, 0, -1, -1, 0, -1] then -1
    slot_to_row        (T*K,)      row on the rank that owns the slot's expert; -1 = no expert          [4, 0, 1, -1]
    tile_to_expert     (R/block_m,) local expert of each row tile; -1 = unused     [0, 2, -1, -1]
    expert_offsets     (E_local+1,) first row of each segment, then the end; int64  [0, 4, 4, 8]
    tokens_per_expert  (E_local,)  valid rows of each local expert                 [2, 0, 1]
    num_tiles          (1,)        used row tiles                                  [2]

    slot_to_rank       (T*K,)      rank that owns the slot's expert; -1 = no expert; None at W = 1, where it is this rank
    wave_tiles         (W, 2)      row tiles that each rank uses, row tiles of its buffers (`mok.waves`); None = buffers of R rows

    At W > 1 a rank knows the counts of all ranks and its own routes only: row_to_slot holds -1 for rows that other ranks send, until the
    slot ids that travel with those rows are written there; row_to_rank tells such rows (>= 0) from padding (-1).
    """

    row_to_slot: Tensor
    row_to_rank: Tensor
    slot_to_row: Tensor
    tile_to_expert: Tensor
    expert_offsets: Tensor
    tokens_per_expert: Tensor
    num_tiles: Tensor
    slot_to_rank: Tensor | None = None
    wave_tiles: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """R, the capacity in rows."""
        return self.row_to_slot.shape[0]

    def tensors(self) -> list[Tensor]:
        """The maps in field order, as custom ops pass them; `RoutingPlan(*plan.tensors())` is the same plan."""
        assert self.wave_tiles is None or self.slot_to_rank is not None
        maps = [self.row_to_slot, self.row_to_rank, self.slot_to_row, self.tile_to_expert, self.expert_offsets, self.tokens_per_expert, self.num_tiles]
        return maps if self.slot_to_rank is None else [*maps, *[value for value in (self.slot_to_rank, self.wave_tiles) if value is not None]]

    @staticmethod
    def build(topk_ids: Tensor, num_experts: int, *, rank: int = 0, counts: Tensor | None = None, total_tokens: int | None = None,
              block_m: int = BLOCK_M) -> RoutingPlan:
        """The plan of one rank.

        topk_ids: (T, K) int32 or int64 global expert ids of this rank's tokens, -1 = no expert; any id outside 0..E-1 counts as -1 here.
        num_experts: E over all ranks. rank: this rank. counts: (W, E) routes of every rank to every expert; None at W = 1.
        total_tokens: sum of T over ranks (bounds the rows that can arrive); None at W = 1, where it is T.
        """
        T, K = topk_ids.shape
        check_row_limit(topk_ids, num_experts, T if total_tokens is None else total_tokens, block_m)
        device = topk_ids.device
        ids = topk_ids.reshape(-1).to(torch.int64)
        valid = (ids >= 0) & (ids < num_experts)
        bucket = torch.where(valid, ids, num_experts)                          # -1 routes sort behind every expert
        own_counts = count_ids(bucket, num_experts)
        several_ranks = counts is not None
        if counts is None:
            counts, total_tokens = own_counts.unsqueeze(0), T
        if total_tokens is None:
            raise ValueError("total_tokens=None must be the sum of T over ranks when counts are given")
        counts = counts.to(torch.int64)
        world_size = counts.shape[0]
        if num_experts < world_size:
            raise ValueError(f"{num_experts=} must be at least the number of ranks, {world_size}")
        first, num_local = experts_of_rank(num_experts, world_size, rank)

        per_expert = counts.sum(0)
        padded = (per_expert + block_m - 1) // block_m * block_m
        owner = expert_owners(num_experts, world_size, device)
        running = padded.cumsum(0) - padded                                     # over all experts; minus the owner's first = in its buffer
        segment = running - running[_first_experts(num_experts, world_size, device)[owner]]

        # a slot's row: its expert's segment + what lower ranks send there + its position among this rank's routes to the expert
        order = torch.argsort(bucket, stable=True)
        own_first = own_counts.cumsum(0) - own_counts
        sorted_bucket = bucket[order]
        clipped = sorted_bucket.clamp(max=num_experts - 1)
        lower_ranks = counts[:rank].sum(0)
        sorted_row = segment[clipped] + lower_ranks[clipped] + torch.arange(T * K, device=device) - own_first[clipped]
        sorted_row = torch.where(sorted_bucket < num_experts, sorted_row, -1)
        slot_to_row = torch.empty(T * K, dtype=torch.int32, device=device).scatter_(0, order, sorted_row.to(torch.int32))

        slot_to_rank = None
        if several_ranks:
            slot_to_rank = torch.where(valid, owner[ids.clamp(0, num_experts - 1)], -1).to(torch.int32)

        R = plan_capacity(total_tokens * K, num_local, block_m)
        local = slice(first, first + num_local)
        offsets = torch.cat([segment[local], (padded[local].sum()).view(1)])
        row = torch.arange(R, device=device)
        row_expert = torch.searchsorted(offsets[1:].contiguous(), row, right=True)             # == num_local behind the last segment
        row_expert_clipped = row_expert.clamp(max=num_local - 1)
        within = row - offsets[row_expert_clipped]
        local_counts = counts[:, local]
        filled = (row_expert < num_local) & (within < local_counts.sum(0)[row_expert_clipped])
        source = (within.unsqueeze(0) >= local_counts.cumsum(0)[:, row_expert_clipped]).sum(0)  # ranks whose rows end before this one
        row_to_rank = torch.where(filled, source, -1).to(torch.int32)

        here = (sorted_bucket >= first) & (sorted_bucket < first + num_local)
        target = torch.where(here, sorted_row, R)                               # one spare row swallows what goes elsewhere
        row_to_slot = torch.full((R + 1,), -1, dtype=torch.int32, device=device)
        row_to_slot = row_to_slot.scatter_(0, target, torch.where(here, order, -1).to(torch.int32))[:R]

        tile_expert = row_expert.view(-1, block_m)[:, 0]
        return RoutingPlan(row_to_slot=row_to_slot.contiguous(), row_to_rank=row_to_rank, slot_to_row=slot_to_row,
                           tile_to_expert=torch.where(tile_expert < num_local, tile_expert, -1).to(torch.int32),
                           expert_offsets=offsets, tokens_per_expert=per_expert[local].to(torch.int32),
                           num_tiles=(offsets[-1:] // block_m).to(torch.int32), slot_to_rank=slot_to_rank)


def check_row_limit(topk_ids: Tensor, num_experts: int, total_tokens: int, block_m: int = BLOCK_M) -> None:
    """Raise ValueError where a plan could hold more rows than int32 can name."""
    if total_tokens * topk_ids.shape[1] + num_experts * block_m >= 2**31:
        raise ValueError(f"topk_ids.shape={tuple(topk_ids.shape)} must have fewer than 2^31 routes over all ranks, padding included ({num_experts=})")


def count_ids(ids: Tensor, num_experts: int) -> Tensor:
    """How often each of 0..E-1 occurs: ids (N,) int64, any other value ignored -> (E,) int64, without a device-to-host copy.

    count_ids([2, 0, 0, 3], 3) == [2, 0, 1]
    """
    inside = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    return torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device).scatter_add_(0, inside, torch.ones_like(inside))[:num_experts]


def expert_owners(num_experts: int, world_size: int, device: torch.device) -> Tensor:
    """(E,) int64: the rank that owns each expert. expert_owners(5, 2, ...) == [0, 0, 0, 1, 1]"""
    experts = torch.arange(num_experts, device=device)
    return torch.searchsorted(_first_experts(num_experts, world_size, device), experts, right=True) - 1


def _first_experts(num_experts: int, world_size: int, device: torch.device) -> Tensor:
    """(W,) int64: `experts_of_rank`'s first expert of each rank, computed on the device."""
    base, extra = divmod(num_experts, world_size)
    ranks = torch.arange(world_size, device=device)
    return ranks * base + ranks.clamp(max=extra)


def empty_plan_like(topk_ids: Tensor, num_local_experts: int, total_tokens: int, block_m: int = BLOCK_M) -> RoutingPlan:
    """A plan of the right shapes with unwritten contents: what a fake implementation returns and a GPU builder fills."""
    return empty_plan(topk_ids, num_local_experts, plan_capacity(total_tokens * topk_ids.shape[1], num_local_experts, block_m), block_m)


def empty_plan(topk_ids: Tensor, num_local_experts: int, num_rows: int, block_m: int = BLOCK_M) -> RoutingPlan:
    """`empty_plan_like` with R given instead of the tokens that it follows from."""
    def int32(*shape: int) -> Tensor:
        return topk_ids.new_empty(shape, dtype=torch.int32)

    return RoutingPlan(row_to_slot=int32(num_rows), row_to_rank=int32(num_rows), slot_to_row=int32(topk_ids.shape[0] * topk_ids.shape[1]),
                       tile_to_expert=int32(num_rows // block_m), expert_offsets=topk_ids.new_empty(num_local_experts + 1, dtype=torch.int64),
                       tokens_per_expert=int32(num_local_experts), num_tiles=int32(1))
