"""Waves: which rows of a rank's plan go through buffers of bounded capacity together. Integers only: one rule for every engine.

A rank whose rows exceed its capacity C takes them in waves: wave w is rows w*C .. (w+1)*C of the plan, laid from row 0 of the same buffers
(dispatch, compute, push home, next wave). C is a multiple of BLOCK_M, as is the first row of every segment, so a boundary cuts an expert's
rows only at a multiple of BLOCK_M from its first one, and in canonical order it cuts at most one expert. An engine whose sums over rows
advance by BLOCK_M, and which hands that expert's unfinished sums on to the next wave, has the bits of one big wave for every C.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import BLOCK_M
from .plan import expert_owners, experts_of_rank, plan_capacity


def wave_capacity(capacity_factor: float, total_routes: int, num_experts: int, num_local_experts: int, block_m: int = BLOCK_M) -> int:
    """Rows C of a rank's buffers: room for capacity_factor times its balanced load of routes, however they spread over its experts.

    total_routes: K * sum of T over ranks. The balanced load is the rank's share of them, total_routes * E_local / E. At least one tile, at most
    what any routing can need. A rank needs several waves only when its load exceeds capacity_factor times the balanced one.

    wave_capacity(1.0, 16, 4, 2, block_m=4) == 16: 8 routes, and up to 3 rows of padding for each of 2 experts, in whole tiles.
    """
    load = math.ceil(min(capacity_factor * total_routes * num_local_experts / num_experts, total_routes))
    return max(block_m, plan_capacity(load, num_local_experts, block_m))


def wave_tiles(counts: Tensor, capacity_factor: float, total_routes: int, block_m: int = BLOCK_M) -> Tensor:
    """(W, 2) int32 on counts' device: the row tiles that each rank's plan uses, and the row tiles of its buffers.

    counts (W, E): routes of every rank to every expert. No device-to-host copy. From it every rank knows how many waves all of them make.

    counts = [[5, 0, 1]], capacity_factor = 0.1, total_routes = 6, block_m = 4: 3 tiles used, capacity 1 -> [[3, 1]]
    """
    W, E = counts.shape
    tiles = (counts.sum(0) + block_m - 1) // block_m
    used = torch.zeros(W, dtype=torch.int64, device=counts.device).index_add_(0, expert_owners(E, W, counts.device), tiles.to(torch.int64))
    capacities = [wave_capacity(capacity_factor, total_routes, E, experts_of_rank(E, W, rank)[1], block_m) // block_m for rank in range(W)]
    return torch.stack([used, torch.tensor(capacities, device=counts.device)], dim=1).to(torch.int32)


def waves_needed(used_tiles: int, capacity_tiles: int) -> int:
    """Waves that a rank's rows take: at least one, so that a rank without rows takes part too. waves_needed(5, 2) == 3"""
    return max(1, -(-used_tiles // capacity_tiles))


@dataclass(frozen=True)
class Wave:
    """One wave of one rank's rows, as they lie in its buffers.

    index 0, 1, ...; capacity: rows C of the buffers. starts[e], counts[e]: local expert e's rows in the buffers, in this wave.
    experts: those whose weight gradients this wave adds to, in order; wave 0 has those without any row too, whose gradient is zero.
    begun: the expert that has rows in earlier waves as well; unfinished: the one that has rows in later waves (both may be the same one).
    """

    index: int
    capacity: int
    starts: list[int]
    counts: list[int]
    experts: list[int]
    begun: int | None = None
    unfinished: int | None = None


def split_into_waves(expert_offsets: Sequence[int], tokens_per_expert: Sequence[int], capacity: int, num_waves: int) -> list[Wave]:
    """The waves of a plan with these segments: expert_offsets (E_local + 1), tokens_per_expert (E_local).

    capacity: rows, a multiple of the segments' alignment. num_waves: agreed by all ranks; waves behind a rank's last row have no rows.

    Worked example (segments aligned to 4): tokens_per_expert = [6, 0, 3], expert_offsets = [0, 8, 8, 12], capacity = 4, num_waves = 3:
        index  counts     experts  begun  unfinished
        0      [4, 0, 0]  [0, 1]   None   0
        1      [2, 0, 0]  [0]      0      None
        2      [0, 0, 3]  [2]      None   None
    """
    assert num_waves * capacity >= expert_offsets[-1], "rows would be left out"
    waves = []
    for index in range(num_waves):
        first, last = index * capacity, (index + 1) * capacity
        ends = [start + tokens for start, tokens in zip(expert_offsets, tokens_per_expert)]
        inside = [(max(start, first), min(end, last)) for start, end in zip(expert_offsets, ends)]
        counts = [max(end - start, 0) for start, end in inside]
        here = [e for e, count in enumerate(counts) if count]
        waves.append(Wave(index, capacity, [start - first if count else 0 for (start, _), count in zip(inside, counts)], counts,
                          experts=[e for e, tokens in enumerate(tokens_per_expert) if counts[e] or (index == 0 and tokens == 0)],
                          begun=here[0] if here and expert_offsets[here[0]] < first else None,
                          unfinished=here[-1] if here and ends[here[-1]] > last else None))
    return waves


@dataclass
class WaveCounts:
    """How often a bounded capacity was exceeded on this rank, forward and backward passes alike, since its ExpertGroup was built.

    passes: all passes; several: those that took more than one wave because some rank's rows exceeded its capacity, the same on all ranks;
    exceeded: those in which this rank's own rows did; most: the largest number of waves of any pass.
    """

    passes: int = 0
    several: int = 0
    exceeded: int = 0
    most: int = 0

    def add(self, waves: int, own_waves: int) -> None:
        """Count one pass: how many waves all ranks make, and how many this rank's rows need."""
        self.passes += 1
        self.several += waves > 1
        self.exceeded += own_waves > 1
        self.most = max(self.most, waves)
