"""Movers of the forward kernel on several ranks: rows of x are pulled from their homes, what has come home is summed (docs/expert-parallel-kernel.md).

First consumer 1 of every CTA copies its share of this rank's tokens into the buffer that peers read and zeroes its share of the counters of
arrived results; the last to finish publishes `x_ready`. Movers then pull 16 rows into the ring where there is room, else sum a complete token. Nothing that
they wait for waits for them: a pull waits for GEMM tasks of earlier tiles, a sum for results that storers send (expert_parallel_send.py); slots hold
every row, so nobody waits for room in them.

Slots and rows are those of RoutingPlan on several ranks: row_to_rank is a row's home, row_to_slot its slot (token*K + k) there.
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .compat import thread_barrier
from .gemm import COPY_PARTS, SET_LISTED, SET_STAGED, hidden_ready, rows_ready
from .move import COPY_ROWS, LATE, TICKET_TOKENS, Tokens, behind, copy_piece, room_for, sum_round, take, tickets_of
from .peers import OWN_X, TOKEN_ARRIVED, X_READY, own_page, peers_of, rows_at, signal_all, wait_for_all, watch_peers
from .sync import (
    WAIT_PEER_ROWS,
    WAIT_RESULTS,
    WAIT_ROW_SLOT,
    add_release,
    clock,
    fence_acquire_system,
    fence_proxy,
    fresh,
    nap,
    pause,
    report_timeout,
)
from .tasks import BLOCK_M, down_columns, up_columns_of
from .wave_loop import first_tile


@gluon.jit
def stage_rows(s, source, stride_8, buffer, VECTORS: gl.constexpr):
    """This CTA's share of its rank's rows into a buffer without gaps between them, by four warps. stride_8: of the source's rows, in 8 elements."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    ROWS: gl.constexpr = 8
    COLUMNS: gl.constexpr = 256 * VECTORS
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))
    for first in range(gl.program_id(0) * ROWS, fresh(s.T), gl.num_programs(0) * ROWS):
        token = (first + rows).to(gl.int64)
        inside = first + rows < s.T
        begin = source + token * (fresh(stride_8) * 8)
        for c in range(0, fresh(s.H), COLUMNS):
            mask = inside[:, None] & (c + columns < s.H)[None, :]
            value = gl.load(begin[:, None] + (c + columns)[None, :], mask=mask, other=0.0)
            gl.store(buffer + (token * s.H)[:, None] + (c + columns)[None, :], value, mask=mask)


@gluon.jit
def stage_tokens(s, t, flags, VECTORS: gl.constexpr, DEBUG: gl.constexpr):
    """Copy this rank's tokens to where peers read them, zero the counters of arrived results, publish `x_ready` (rule 5).

    By consumer 1 of every CTA, which has nothing to multiply yet, before it takes part in the sort of tokens that every role waits for before it
    sums: so nobody takes the last launch's counts for this one's. (By both consumers, or before the roles start, a multiply loop spills: Triton 3.6.)
    """
    lanes = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    buffer = rows_at(t.out, gl.load(peers_of(flags.control) + OWN_X))
    arrived = own_page(flags.control) + TOKEN_ARRIVED
    stage_rows(s, t.x, t.x_stride, buffer, VECTORS)
    for first in range(gl.program_id(0) * 128, fresh(s.T), gl.num_programs(0) * 128):
        gl.store(arrived + first + lanes, lanes * 0, mask=first + lanes < s.T)
    nap(gl.program_id(0) * 31 + t.epoch, DEBUG)
    thread_barrier()                          # the whole role's stores before its arrival ...
    staged = gl.atomic_add(flags.counters + SET_STAGED, 1, sem="acq_rel", scope="gpu")
    if staged == gl.num_programs(0) - 1:      # ... and every CTA's arrival before the signal
        signal_all(flags.control, X_READY, t.epoch)


@gluon.jit
def tokens_of_wave(t, w, NW: gl.constexpr):
    """t of a launch with waves, from this wave's first row on."""
    first_row = first_tile(w, NW) * BLOCK_M
    return Tokens(t.out, t.results, t.row_to_slot + first_row, t.slot_to_row, t.topk_weights, t.order, t.x, t.x_stride, t.gate_0, t.gate_1, t.gated,
                  t.shared_results_row, t.K, t.row_to_rank + first_row, t.epoch)


@gluon.jit
def group_mover(s, flags, t, ring, w, COPY_VECTORS: gl.constexpr, VECTORS: gl.constexpr, NW: gl.constexpr, WAVES: gl.constexpr, OMIT: gl.constexpr,
                DEBUG: gl.constexpr):
    """What `mover` does on one rank: pulls while the ring has room, else sums what is complete; never blocks on one while it could do the other.

    Before the kernel ends, every signal that peers send has been waited for (rule 5): x_ready of all ranks, all results of all tokens. The latter also
    say that this rank's rows of x have been pulled, for each result needs its row: the next launch may stage over them without asking.
    """
    pieces = s.num_tiles * COPY_PARTS
    grid = gl.num_programs(0)
    wait_for_all(flags.control, X_READY, t.epoch, WAIT_PEER_ROWS)
    thread_barrier()
    if WAVES:
        t = tokens_of_wave(t, w, NW)      # made here: brought along, its two addresses lie on the stack while the role waits (Triton 3.9)
    piece = gl.program_id(0)
    ticket = piece * 0 - 1                # none taken yet
    if WAVES:
        ticket = gl.where(fresh(s.T) > 0, ticket, 0)      # no token is summed in this wave: there is no list to wait for
    done = piece * 0
    since = clock(ticket)
    while (piece < pieces) | (ticket < tickets_of(s)):
        tile = piece // COPY_PARTS
        room = (piece < pieces).to(gl.int32)
        if (piece < pieces) & (tile >= s.row_ring):
            # Rule 6: hidden_ready of the tile that held this place says that its rows have been read by all their GEMM tasks.
            room = room_for(flags, hidden_ready(flags) + (tile - s.row_ring), up_columns_of(s, tile * 0 - 1), since, NW)
        if room == LATE:
            report_timeout(flags.control, WAIT_ROW_SLOT, tile, tile * 0, piece)
            room = room * 0
        if room != 0:
            nap(piece + 11, DEBUG)
            if OMIT != 1:
                copy_piece(s, t, flags.control, ring, piece, tile % s.row_ring * BLOCK_M + piece % COPY_PARTS * COPY_ROWS, COPY_VECTORS, NW, True)
            fence_proxy(piece)           # rule 1, writer: each thread's stores before the TMA loads of whoever acquires the counter
            thread_barrier()
            add_release(rows_ready(flags) + tile, 1)
            piece += grid
            since = clock(piece)
        elif (piece >= pieces) & (ticket < tickets_of(s)):
            lack = ticket * 0
            if ticket < 0:
                lack = room_for(flags, flags.counters + SET_LISTED, grid, since, NW) ^ 1       # 0 when the list is there
            elif done == 0:
                lack = behind(s, t, flags, ticket, since, NW, True)
                fence_acquire_system(lack)   # rule 3, reader: the polls of every thread ...
                thread_barrier()             # ... before the loads of any
            if lack >= LATE:
                report_timeout(flags.control, WAIT_RESULTS, ticket, down_columns(s), piece)
            if lack == 0:
                nap(ticket + 13, DEBUG)
                if ticket >= 0:
                    sum_round(s, t, flags, ticket * TICKET_TOKENS + done, VECTORS, NW, True)
                    done += NW
                if (ticket < 0) | (done >= TICKET_TOKENS):
                    ticket = take(flags)
                    done = done * 0
                since = clock(ticket)
            else:
                watch_peers(flags.control)
                pause(lack)
        else:
            pause(piece)
