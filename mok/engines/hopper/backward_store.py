"""The storer of the backward kernel: TMA stores of what consumers hand over, then the counters that tell it."""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .backward_pipe import (
    CHUNK,
    DH_DONE,
    DX_DONE,
    TASK_END,
    TASK_IDLE,
    Z_STEPS,
    has_store_step,
    pop_task,
    stage_of,
    unpack,
    z_done,
)
from .backward_tasks import (
    DH,
    DW_UP,
    DX,
    HALF_N,
    TILE_M,
    TILE_N,
    WANT_DOWN,
    WANT_X,
    Z_AGAIN,
    Z,
    counter_of,
    own,
    shared_wants,
    width_of,
)
from .compat import thread_barrier, tma_store, tma_store_wait
from .expert_parallel_send import find_homes, send_chunk
from .sync import add_release, apart, count_system, fence_proxy, nap, stores_complete


@gluon.jit
def _store_box(desc, part, half, row, column, chunk, RANK: gl.constexpr):
    if RANK == 2:
        tma_store(desc, [row, column], chunk)
    elif RANK == 3:
        tma_store(desc, [part, row, column], chunk.reshape([1, CHUNK, CHUNK]))
    else:
        tma_store(desc, [part, half, row, column], chunk.reshape([1, 1, CHUNK, CHUNK]))


@gluon.jit
def _store_result(desc, part, half, row, column, pipe, stage, out, handed, idle, RANK: gl.constexpr, WG: gl.constexpr,
                  HALVES: gl.constexpr):
    """The 64 x 256 result of one consumer, from where `_hand_over` put it; an idle consumer has put nothing there. HALVES: it is 128 columns of
    gate (part 0), then the same columns of up (part 1)."""
    mbarrier.wait(out.full, handed & 1)
    if idle == 0:
        _store_box(desc, part, half, row, column, out.chunks.index(0), RANK)
        _store_box(desc, part, half, row, column + CHUNK, out.chunks.index(1), RANK)
        if HALVES:
            _store_box(desc, 1, half, row, column, pipe.a.index(2 * stage + WG), RANK)
            _store_box(desc, 1, half, row, column + CHUNK, pipe.chunks.index(4 * stage + WG), RANK)
        else:
            _store_box(desc, part, half, row, column + 2 * CHUNK, pipe.a.index(2 * stage + WG), RANK)
            _store_box(desc, part, half, row, column + 3 * CHUNK, pipe.chunks.index(4 * stage + WG), RANK)


@gluon.jit
def _store_both(desc, part, half, row, column, pipe, it, out_0, out_1, handed, idle, RANK: gl.constexpr, HALVES: gl.constexpr = False):
    """Both consumers' results, of which consumer 1 may be idle. Then the buffers and the store step's stage are free again."""
    stage = stage_of(it)
    _store_result(desc, part, half, row, column, pipe, stage, out_0, handed, it < 0, RANK, 0, HALVES)
    _store_result(desc, part, half, row + CHUNK, column, pipe, stage, out_1, handed, idle, RANK, 1, HALVES)
    tma_store_wait(0)
    mbarrier.arrive(out_0.empty)
    mbarrier.arrive(out_1.empty)
    mbarrier.arrive(pipe.load_empty.index(stage), count=2)


@gluon.jit
def _send_result(homes, H, first, column, pipe, stage, out, handed, idle, WG: gl.constexpr):
    """`_store_result` of a routed row's dx on several ranks: into the rows' slots at home."""
    mbarrier.wait(out.full, handed & 1)
    if idle == 0:
        send_chunk(homes, out.chunks.index(0), first, column, H)
        send_chunk(homes, out.chunks.index(1), first, column + CHUNK, H)
        send_chunk(homes, pipe.a.index(2 * stage + WG), first, column + 2 * CHUNK, H)
        send_chunk(homes, pipe.chunks.index(4 * stage + WG), first, column + 3 * CHUNK, H)


@gluon.jit
def _send_both(homes, H, column, pipe, it, out_0, out_1, handed, idle):
    """`_store_both` of a routed row's dx on several ranks."""
    stage = stage_of(it)
    _send_result(homes, H, 0, column, pipe, stage, out_0, handed, it < 0, 0)
    thread_barrier()                     # every lane has read the buffers before one gives them back
    mbarrier.arrive(out_0.empty)
    _send_result(homes, H, CHUNK, column, pipe, stage, out_1, handed, idle, 1)
    thread_barrier()
    mbarrier.arrive(out_1.empty)
    mbarrier.arrive(pipe.load_empty.index(stage), count=2)


@gluon.jit
def _store_z_step(dz_desc, wh_desc, want_dz, want_wh, row, column, stage, pipe, idle):
    """dz_gate, dz_up and w*h of one z-step, out of the stage where the consumers left them."""
    for w in gl.static_range(2):
        if (idle == 0) | (w == 0):
            if want_dz:
                _store_box(dz_desc, 0, 0, row + w * CHUNK, column, pipe.a.index(2 * stage + w), 3)
                _store_box(dz_desc, 1, 0, row + w * CHUNK, column, pipe.chunks.index(4 * stage + w), 3)
            if want_wh:
                _store_box(wh_desc, 0, 0, row + w * CHUNK, column, pipe.chunks.index(4 * stage + 2 + w), 2)


@gluon.jit
def storer(s, rows, flags, pipe, tasks, out_0, out_1, hidden, results_desc, up_grads, down_grads, shared_results_row, homes, recomputed,
           EP: gl.constexpr, RECOMPUTE: gl.constexpr, DEBUG: gl.constexpr):
    """Stores what the consumers hand over and publishes each task when all of it is in global memory (rule 2, writer; rule 4).

    hidden = (dz, wh, shared dz, shared wh); up_grads, down_grads = descriptors of (routed, shared 0, shared 1) weight gradients; recomputed = those of
    z, with RECOMPUTE. With EP, dx of routed rows goes into their slots at home; homes says where those are.
    """
    s = own(s)
    dz_desc, wh_desc, shared_dz_desc, shared_wh_desc = hidden
    up_desc, shared_up_0, shared_up_1 = up_grads
    down_desc, shared_down_0, shared_down_1 = down_grads
    it = gl.program_id(0) * 0
    handed = it                          # results taken from each consumer
    z_phases = it                        # bit s: phase of z_done[s]
    count = it
    bits, tile, steps, expert = pop_task(tasks, count, 1)
    while (bits & TASK_END) == 0:
        kind, slot, column = unpack(bits, RECOMPUTE)
        idle = (bits & TASK_IDLE) != 0
        nap(tile + column + 3, DEBUG)
        it += steps
        row = tile * TILE_M + gl.where(slot < 0, 0, slot * s.token_tiles * TILE_M)
        if kind == DH:
            shared_bits = shared_wants(s, gl.maximum(slot, 0))
            dx_wanted = (s.wants & WANT_X) != 0
            want_dz = dx_wanted | gl.where(slot < 0, (s.wants & 20) != 0, (shared_bits & 1) != 0)
            want_wh = gl.where(slot < 0, (s.wants & WANT_DOWN) != 0, (shared_bits & 2) != 0)
            for c in range(Z_STEPS):
                stage = stage_of(it)
                mbarrier.wait(pipe.z_done.index(stage), (z_phases >> stage) & 1)
                z_phases = z_phases ^ ((stage * 0 + 1) << stage)
                if slot < 0:
                    _store_z_step(dz_desc, wh_desc, want_dz, want_wh, row, column * TILE_N + c * CHUNK, stage, pipe, idle)
                    it = apart(it, "dz_desc")
                else:
                    _store_z_step(shared_dz_desc, shared_wh_desc, want_dz, want_wh, row, column * TILE_N + c * CHUNK, stage, pipe, idle)
                    it = apart(it, "shared_dz_desc")
                tma_store_wait(0)
                mbarrier.arrive(pipe.load_empty.index(stage), count=2)
                it += 1
            stores_complete(tile)
            fence_proxy(tile)
            thread_barrier()
            add_release(flags.dh_ready + counter_of(s, slot, tile, flags.capacity), 1)
            add_release(flags.totals + DH_DONE, 1)
        elif RECOMPUTE and kind == Z:
            z_desc, shared_z_0, shared_z_1 = recomputed
            at = tile * TILE_M                           # of a shared expert too: each has a descriptor of its own
            if RECOMPUTE == Z_AGAIN:
                _store_both(z_desc, 0, 0, at, column * HALF_N, pipe, it, out_0, out_1, handed, idle, 3, True)
            elif slot < 0:
                _store_both(z_desc, 0, 0, at, column * HALF_N, pipe, it, out_0, out_1, handed, idle, 3, True)
                handed = apart(handed, "z_desc")
            elif slot == 0:
                _store_both(shared_z_0, 0, 0, at, column * HALF_N, pipe, it, out_0, out_1, handed, idle, 3, True)
                handed = apart(handed, "shared_z_0")
            else:
                _store_both(shared_z_1, 0, 0, at, column * HALF_N, pipe, it, out_0, out_1, handed, idle, 3, True)
                handed = apart(handed, "shared_z_1")
            stores_complete(tile)
            fence_proxy(tile)
            thread_barrier()
            add_release(z_done(s, flags) + 1 + counter_of(s, slot, tile, flags.capacity), 1)
            add_release(z_done(s, flags), 1)
            handed += 1
            it += 1
        elif kind == DX:
            if EP and slot < 0:
                find_homes(homes, flags.control, tile, s.H)
                _send_both(homes, s.H, column * TILE_N, pipe, it, out_0, out_1, handed, idle)
                count_system(flags.totals + DX_DONE)                 # rule 3: the barrier behind the stores stands in _send_both
            else:
                result_row = row + gl.where(slot < 0, 0, shared_results_row)
                _store_both(results_desc, 0, 0, result_row, column * TILE_N, pipe, it, out_0, out_1, handed, idle, 2)
                handed = apart(handed, "results_desc")
                stores_complete(tile)
                fence_proxy(tile)
                thread_barrier()
                add_release(flags.totals + DX_DONE, 1)
            handed += 1
            it += 1
        elif has_store_step(rows, kind, slot, bits, RECOMPUTE):
            half_tiles = gl.cdiv(width_of(s, slot), TILE_M)
            half = ((kind == DW_UP) & (tile >= half_tiles)).to(gl.int32)
            at = (tile - half * half_tiles) * TILE_M
            if kind == DW_UP:
                if slot < 0:
                    _store_both(up_desc, expert, half, at, column * TILE_N, pipe, it, out_0, out_1, handed, idle, 4)
                    handed = apart(handed, "up_desc")
                elif slot == 0:
                    _store_both(shared_up_0, half, 0, at, column * TILE_N, pipe, it, out_0, out_1, handed, idle, 3)
                    handed = apart(handed, "shared_up_0")
                else:
                    _store_both(shared_up_1, half, 0, at, column * TILE_N, pipe, it, out_0, out_1, handed, idle, 3)
                    handed = apart(handed, "shared_up_1")
            elif slot < 0:
                _store_both(down_desc, expert, 0, at, column * TILE_N, pipe, it, out_0, out_1, handed, idle, 3)
                handed = apart(handed, "down_desc")
            elif slot == 0:
                _store_both(shared_down_0, 0, 0, at, column * TILE_N, pipe, it, out_0, out_1, handed, idle, 2)
                handed = apart(handed, "shared_down_0")
            else:
                _store_both(shared_down_1, 0, 0, at, column * TILE_N, pipe, it, out_0, out_1, handed, idle, 2)
                handed = apart(handed, "shared_down_1")
            handed += 1
            it += 1
        count += 1
        bits, tile, steps, expert = pop_task(tasks, count, 1)
    stores_complete(it)                  # weight gradients are nobody's input in this launch; the kernel ends when they are written
