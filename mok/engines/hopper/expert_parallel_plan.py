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

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .compat import thread_barrier
from .peers import IDS_READY, PEER_IDS, PEER_RANK, peer_count, peers_of, signal_all, tell_abort, wait_for_all
from .sync import CONTROL_ABORT, CONTROL_EXCHANGE_ARRIVED, CONTROL_EXCHANGES, WAIT_IDS, WAIT_SIGNATURE, load_acquire, nap, report_timeout

IDS_HEADER = gl.constexpr(16)
BLOCK_IDS = gl.constexpr(512)           # ids that a program moves at a time
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
