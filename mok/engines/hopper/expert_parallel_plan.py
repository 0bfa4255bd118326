"""RoutingPlan of one rank of a group, built on the GPU without a host in the loop: ids exchanged through peers' memory, then planned and cut.

  1. `_exchange_ids_kernel`  writes this rank's ids where peers can read them, tells them, waits for theirs and lists everybody's: (W, max_tokens, K)
  2. plan_kernel's three     the plan of that list as one rank's with all E experts: its row order (expert, rank, token, k) is canonical for any W
  3. `_cut_plan_kernel`      this rank's part: its experts' rows, and where its own slots' rows lie on the ranks that own them

Equal bit for bit to `RoutingPlan.build(topk_ids, E, rank=, counts=, total_tokens=W * max_tokens)` with the slots of received rows filled in; the row
capacity is the worst case. Legend: T tokens of this rank, at most max_tokens on any; K routes a token; E experts over all W ranks.

The buffer of ids has two halves that alternate, each a header of IDS_HEADER words (word 0: what pass this is) and max_tokens * K ids. A half is
written again two exchanges later: by then every peer has signalled the exchange between, so it had finished reading.
"""
from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from ...config import BLOCK_M
from ...plan import RoutingPlan, empty_plan, experts_of_rank, plan_capacity
from ...runtime import EXPERT_RADIX, runtime
from . import plan_kernel
from .compat import COMPILE_OPTIONS, new_empties, thread_barrier
from .peers import IDS_READY, PEER_IDS, PEER_RANK, peer_count, peers_of, signal_all, tell_abort, wait_for_all
from .sync import CONTROL_ABORT, CONTROL_EXCHANGE_ARRIVED, CONTROL_EXCHANGES, WAIT_IDS, WAIT_SIGNATURE, load_acquire, nap, report_timeout

IDS_HEADER = gl.constexpr(16)
BLOCK_IDS = gl.constexpr(512)           # ids that a program moves at a time
BLOCK_CUT = 1024
EXCHANGE_PROGRAMS = 16                  # they wait for one another, so they all have to be resident: few and small
EXCHANGE_LAUNCH = {"num_warps": 4, **COMPILE_OPTIONS}
CUT_LAUNCH = {"num_warps": 4, "enable_fp_fusion": True}
_IDS = ["num_slots", "top_k", "num_experts", "stride_token", "stride_k", "capacity", "signature"]
_CUT = ["num_rows", "num_slots", "slots_per_rank", "rank", "world_size", "num_experts", "wave_tiles_more", "wave_tiles_fewer"]


def ids_words(max_tokens: int, top_k: int) -> int:
    """int32 words of a rank's buffer of ids: two halves."""
    return 2 * (IDS_HEADER.value + max_tokens * top_k)


@gluon.jit(do_not_specialize=_IDS, do_not_specialize_on_alignment=["topk_ids", "error_word", "everybody", "control"])
def _exchange_ids_kernel(topk_ids, num_slots, top_k, num_experts, stride_token, stride_k, capacity, signature, error_word, everybody, control,
                         RADIX: gl.constexpr, DEBUG: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    lanes = gl.arange(0, BLOCK_IDS, layout=L)
    first, step = gl.program_id(0) * BLOCK_IDS, gl.num_programs(0) * BLOCK_IDS
    peers = peers_of(control)
    epoch = gl.load(control + CONTROL_EXCHANGES, volatile=True) + 1
    half = gl.cast((epoch & 1) * (IDS_HEADER + capacity), gl.int64) * 4
    mine = (gl.load(peers + PEER_IDS + gl.load(peers + PEER_RANK)) + half).to(gl.pointer_type(gl.int32))
    for begin in range(first, capacity, step):
        slot = begin + lanes
        inside = slot < num_slots
        token = slot // top_k
        source = topk_ids + token.to(gl.int64) * stride_token + (slot - token * top_k).to(gl.int64) * stride_k
        ids = gl.load(source, mask=inside, other=-1).to(gl.int64)
        bad = (ids < -1) | (ids >= num_experts)
        bad_slot = gl.min(gl.where(bad, slot, capacity), 0)
        if bad_slot < capacity:
            # one 8-byte store carries id and E, as in plan_kernel
            value = gl.sum(gl.where(slot == bad_slot, ids, 0), 0)
            value = gl.minimum(gl.maximum(value, -(1 << 51)), (1 << 51) - 1)
            gl.store(error_word, value * RADIX + num_experts)
        gl.store(mine + IDS_HEADER + slot, gl.where(bad, -1, ids).to(gl.int32), mask=slot < capacity)
    if gl.program_id(0) == 0:
        gl.store(mine, signature)
    nap(epoch * 17 + gl.program_id(0), DEBUG)
    thread_barrier()                                   # this program's stores before its arrival ...
    arrived = gl.atomic_add(control + CONTROL_EXCHANGE_ARRIVED, 1, sem="acq_rel", scope="gpu")
    if arrived == gl.num_programs(0) - 1:              # ... and every program's arrival before the signal (rule 3)
        gl.store(control + CONTROL_EXCHANGE_ARRIVED, 0)
        gl.store(control + CONTROL_EXCHANGES, epoch)   # all have read it
        signal_all(control, IDS_READY, epoch)
    wait_for_all(control, IDS_READY, epoch, WAIT_IDS)
    thread_barrier()
    nap(epoch * 19 + gl.program_id(0), DEBUG)
    alive = load_acquire(control + CONTROL_ABORT) == 0
    for r in range(peer_count(peers)):
        theirs = (gl.load(peers + PEER_IDS + r) + half).to(gl.pointer_type(gl.int32))
        for begin in range(first, capacity, step):
            slot = begin + lanes
            ids = gl.load(theirs + IDS_HEADER + slot, mask=(slot < capacity) & alive, other=-1)
            gl.store(everybody + gl.cast(r, gl.int64) * capacity + slot, ids, mask=slot < capacity)
        if (gl.program_id(0) == 0) & alive:
            other = gl.load(theirs)
            if other != signature:
                report_timeout(control, WAIT_SIGNATURE, r, signature, other)
    if load_acquire(control + CONTROL_ABORT) != 0:
        tell_abort(control)


@triton.jit(do_not_specialize=_CUT, do_not_specialize_on_alignment=["row_to_slot", "row_to_rank", "slot_to_row", "tile_to_expert", "expert_offsets",
                                                                    "tokens_per_expert", "num_tiles", "slot_to_rank", "all_row_to_slot",
                                                                    "all_slot_to_row", "all_tile_to_expert", "all_offsets", "all_tokens", "wave_table"])
def _cut_plan_kernel(row_to_slot, row_to_rank, slot_to_row, tile_to_expert, expert_offsets, tokens_per_expert, num_tiles, slot_to_rank, all_row_to_slot,
                     all_slot_to_row, all_tile_to_expert, all_offsets, all_tokens, num_rows, num_slots, slots_per_rank, rank, world_size, num_experts,
                     wave_table, wave_tiles_more, wave_tiles_fewer, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr, WAVES: tl.constexpr):
    base, extra = num_experts // world_size, num_experts % world_size
    first = rank * base + tl.minimum(rank, extra)
    count = base + (rank < extra).to(tl.int32)
    begin = tl.load(all_offsets + first).to(tl.int32)
    end = tl.load(all_offsets + first + count).to(tl.int32)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)

    slot = tl.load(all_row_to_slot + begin + index, mask=(begin + index < end) & (index < num_rows), other=-1)
    home = slot // slots_per_rank
    tl.store(row_to_slot + index, tl.where(slot >= 0, slot - home * slots_per_rank, -1), mask=index < num_rows)
    tl.store(row_to_rank + index, tl.where(slot >= 0, home, -1), mask=index < num_rows)

    row = tl.load(all_slot_to_row + rank * slots_per_rank + index, mask=index < num_slots, other=-1)
    there = row >= 0
    expert = tl.load(all_tile_to_expert + row // BLOCK_M, mask=there, other=0)
    owner = tl.where(expert < extra * (base + 1), expert // (base + 1), (expert - extra) // tl.maximum(base, 1))
    start = tl.load(all_offsets + owner * base + tl.minimum(owner, extra), mask=there, other=0).to(tl.int32)
    tl.store(slot_to_row + index, tl.where(there, row - start, -1), mask=index < num_slots)
    tl.store(slot_to_rank + index, tl.where(there, owner, -1), mask=index < num_slots)

    used = index * BLOCK_M < end - begin
    tile = tl.load(all_tile_to_expert + begin // BLOCK_M + index, mask=used & (index < num_rows // BLOCK_M), other=-1)
    tl.store(tile_to_expert + index, tl.where(used, tile - first, -1), mask=index < num_rows // BLOCK_M)
    if tl.program_id(0) == 0:
        experts = tl.arange(0, EXPERTS)
        own = experts < count
        tl.store(expert_offsets + experts, tl.load(all_offsets + first + experts, mask=own, other=0) - begin, mask=own)
        tl.store(expert_offsets + count, (end - begin).to(tl.int64))
        tl.store(tokens_per_expert + experts, tl.load(all_tokens + first + experts, mask=own, other=0), mask=own)
        tl.store(num_tiles, (end - begin) // BLOCK_M)
        if WAVES:
            for r in range(world_size):
                first_there = r * base + tl.minimum(r, extra)
                count_there = base + (r < extra).to(tl.int32)
                rows_there = tl.load(all_offsets + first_there + count_there) - tl.load(all_offsets + first_there)
                tl.store(wave_table + 2 * r, (rows_there // BLOCK_M).to(tl.int32))
                tl.store(wave_table + 2 * r + 1, tl.where(r < extra, wave_tiles_more, wave_tiles_fewer))


def exchange_source(ids: str) -> GluonASTSource:
    """The exchange kernel for ids of type "i32" or "i64" as Triton's compiler takes it, for compiling without a GPU."""
    types = {"topk_ids": f"*{ids}", "error_word": "*i64", "everybody": "*i32", "control": "*i32", **dict.fromkeys(_IDS, "i32")}
    constexprs = {"RADIX": EXPERT_RADIX, "DEBUG": 0}
    return GluonASTSource(_exchange_ids_kernel, {name: types.get(name, "constexpr") for name in _exchange_ids_kernel.arg_names}, constexprs)


def cut_plan(whole: RoutingPlan, topk_ids: Tensor, num_experts: int, rank: int, world_size: int, max_tokens: int,
             wave_tiles: tuple[int, int] | None = None) -> RoutingPlan:
    """One rank's part of the plan of everybody's ids (W * max_tokens, K); topk_ids (T, K), T <= max_tokens: this rank's, for sizes only.

    wave_tiles: where buffers are bounded, their row tiles on the first E mod W ranks, which own an expert more, and on the others.
    """
    T, K = topk_ids.shape
    num_local = experts_of_rank(num_experts, world_size, rank)[1]
    shapes = _shapes(T * K, num_local, world_size * max_tokens * K)
    if wave_tiles is not None:
        shapes = [*shapes, ((world_size, 2), torch.int32)]
    plan = RoutingPlan(*new_empties(topk_ids, shapes))
    programs = triton.cdiv(max(plan.num_rows, T * K), BLOCK_CUT)
    experts = next(size for size in plan_kernel.EXPERT_CLASSES if size >= num_local)
    arguments = (*plan.tensors()[:8], whole.row_to_slot, whole.slot_to_row, whole.tile_to_expert, whole.expert_offsets,
                 whole.tokens_per_expert, plan.num_rows, T * K, max_tokens * K, rank, world_size, num_experts,
                 plan.num_tiles if plan.wave_tiles is None else plan.wave_tiles, *(wave_tiles or (1, 1)), BLOCK_CUT, BLOCK_M, experts,
                 wave_tiles is not None)
    variant = ("cut plan", topk_ids.device, experts, wave_tiles is not None)
    plan_kernel.run_launches(((_cut_plan_kernel, programs, CUT_LAUNCH, arguments),), variant, topk_ids.device.index)
    return plan


@lru_cache(maxsize=4096)
def _shapes(slots: int, num_local: int, most_rows: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """(shape, dtype) of each of the plan's tensors, as `empty_plan` has them, and of slot_to_rank."""
    plan = empty_plan(torch.empty((slots, 1), dtype=torch.int32, device="meta"), num_local, plan_capacity(most_rows, num_local))
    return [(tuple(part.shape), part.dtype) for part in (*plan.tensors(), plan.slot_to_row)]


def exchange_ids(topk_ids: Tensor, num_experts: int, max_tokens: int, signature: int, everybody: Tensor, control: Tensor, debug: bool) -> None:
    """Launch the exchange: everybody (W * max_tokens, K) int32 is then filled, on this stream; all ranks launch theirs."""
    arguments = exchange_arguments(topk_ids, num_experts, max_tokens, signature, everybody, control, debug)
    variant = ("exchange", topk_ids.device, topk_ids.dtype, debug) if max(map(abs, topk_ids.stride())) < 2**31 else None
    plan_kernel.run_launches(((_exchange_ids_kernel, EXCHANGE_PROGRAMS, EXCHANGE_LAUNCH, tuple(arguments)),), variant, topk_ids.device.index)


def exchange_arguments(topk_ids: Tensor, num_experts: int, max_tokens: int, signature: int, everybody: Tensor, control: Tensor, debug: bool) -> list:
    """Run-time arguments and constexprs of `_exchange_ids_kernel`, in its order."""
    T, K = topk_ids.shape
    return [topk_ids, T * K, K, num_experts, *topk_ids.stride(), max_tokens * K, signature, runtime.error_word(topk_ids.device), everybody, control,
            EXPERT_RADIX, int(debug)]
