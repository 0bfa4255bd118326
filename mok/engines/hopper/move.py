"""Mover side of the forward kernel: dispatch of rows of x into the routed ring, and the combine, which sums a token's results in order.

Dispatch: a row tile is filled in COPY_PARTS pieces of 16 rows. Piece p belongs to CTA p mod grid. The ring is shorter than the plan, so
that rows stay in L2 between their copy and their GEMM: a tile's place is free when the tile that held it before has all its gate/up results.

Combine: tokens are summed in the order in which they become complete. While the first rows are on their way, consumer 1 of every CTA sorts its
share of the tokens by the tile that holds their last row (the largest of their K rows): count, scan, place. A ticket is TICKET_TOKENS of that list.
Movers take tickets whenever they have nothing to copy, consumers when their GEMM tasks are done. Neither who sums a token nor its place among
those of one tile changes a bit: each output element is one chain of fma in k order, and a gate's dot product has one layout for any number of warps.
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .compat import aggregate, thread_barrier
from .gemm import COPY_PARTS, LOG2_E, SET_COUNTED, SET_LISTED, SET_SCANNED, hidden_ready, results_ready, rows_ready, token_buckets
from .peers import OWN_SLOTS, PEER_X, TOKEN_ARRIVED, own_page, peers_of, rows_at, watch_peers
from .sync import (
    CONTROL_ABORT,
    CONTROL_LIMIT,
    WAIT_COMBINE,
    WAIT_RESULTS,
    WAIT_ROW_SLOT,
    add_release,
    clock,
    fence_acquire,
    fence_acquire_system,
    fence_proxy,
    fresh,
    keep_loads_above,
    load_acquire,
    nap,
    pause,
    report_timeout,
    wait_at_least,
)
from .tasks import BLOCK_M, down_columns, token_tiles, up_columns_of

COPY_ROWS = gl.constexpr(16)       # BLOCK_M / COPY_PARTS
TICKET_TOKENS = gl.constexpr(8)
TICKET_ROUTES = gl.constexpr(16)   # routes of a token looked at together
MISSING = gl.constexpr(1 << 30)    # more than any counter: a route that does not exist is never waited for
LATE = gl.constexpr(1 << 29)       # more than any count of tasks: the spin limit has passed


@aggregate
class Tokens:
    """What combine needs: maps, weights, results and where the sums go; with the scalars that only it uses."""
    out: gl.tensor
    results: gl.tensor
    row_to_slot: gl.tensor
    slot_to_row: gl.tensor
    topk_weights: gl.tensor
    order: gl.tensor             # (T,) int32 scratch: tokens by the tile of their last row
    x: gl.tensor
    x_stride: gl.tensor          # of a row of x, in units of 8 elements
    gate_0: gl.tensor
    gate_1: gl.tensor
    gated: gl.tensor             # bit i: shared expert i has a gate
    shared_results_row: gl.tensor
    K: gl.tensor
    row_to_rank: gl.tensor       # with EP alone: the rest
    epoch: gl.tensor

    @gluon.constexpr_function
    def __init__(self, out, results, row_to_slot, slot_to_row, topk_weights, order, x, x_stride, gate_0, gate_1, gated, shared_results_row, K,
                 row_to_rank, epoch):
        self.out = out
        self.results = results
        self.row_to_slot = row_to_slot
        self.slot_to_row = slot_to_row
        self.topk_weights = topk_weights
        self.order = order
        self.x = x
        self.x_stride = x_stride
        self.gate_0 = gate_0
        self.gate_1 = gate_1
        self.gated = gated
        self.shared_results_row = shared_results_row
        self.K = K
        self.row_to_rank = row_to_rank
        self.epoch = epoch


@gluon.jit
def _late(flags, since, lanes):
    """Per thread: whether more than the spin limit has passed since `since`. Data only until it is reduced."""
    return clock(lanes) - since > gl.load(flags.control + fresh(CONTROL_LIMIT))


@gluon.jit
def room_for(flags, counter, target, since, NW: gl.constexpr):
    """1 if the counter has reached its target or the launch is aborted, 0 if not, LATE after the spin limit; the same in every thread."""
    lanes = gl.arange(0, 32 * NW, layout=gl.BlockedLayout([1], [32], [NW], [0]))
    seen = load_acquire(counter)         # every thread acquires; the reduction's barrier passes that on
    aborted = gl.load(flags.control + fresh(CONTROL_ABORT) + lanes * 0, volatile=True)
    done = (aborted != 0) | (seen >= target)
    state = gl.where(done, 1, gl.where(_late(flags, since, lanes), LATE, 0))
    return gl.max(state, 0)


@gluon.jit
def _row_source(s, t, control, row, EP: gl.constexpr):
    """(whether there is one, address of x) of the token in a plan row; one row a warp. With EP: in its home rank's buffer of rows."""
    slot = gl.load(t.row_to_slot + row)
    token = (gl.where(slot >= 0, slot, 0) // fresh(t.K)).to(gl.int64)
    if EP:
        home = gl.maximum(gl.load(t.row_to_rank + row), 0)
        source = rows_at(t.out, gl.load(peers_of(control) + PEER_X + home)) + token * s.H
    else:
        source = t.x + token * (fresh(t.x_stride) * 8)
    return slot >= 0, source


@gluon.jit
def copy_piece(s, t, control, ring, piece, place, VECTORS: gl.constexpr, NW: gl.constexpr, EP: gl.constexpr):
    """16 rows of x into the ring from row `place` on, padding rows as zeros (rule 9).

    Each warp copies a row of its own, VECTORS loads of 16 bytes in flight in each thread; the next row's address is fetched meanwhile.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [NW, 1], [1, 0])
    COLUMNS: gl.constexpr = 256 * VECTORS
    rows = gl.arange(0, NW, layout=gl.SliceLayout(1, L))
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))
    valid, source = _row_source(s, t, control, piece * COPY_ROWS + rows, EP)
    for j in range(0, COPY_ROWS, NW):
        next_valid, next_source = _row_source(s, t, control, piece * COPY_ROWS + gl.minimum(j + NW, COPY_ROWS - NW) + rows, EP)
        target = ring + (place + j + rows).to(gl.int64) * s.H
        for c in range(0, fresh(s.H), COLUMNS):
            inside = ((c + columns) < s.H)[None, :]
            value = gl.load(source[:, None] + (c + columns)[None, :], mask=valid[:, None] & inside, other=0.0)
            gl.store(target[:, None] + (c + columns)[None, :], value, mask=inside)
        valid, source = next_valid, next_source


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _last_tile(s, t, token, inside, routes, EP: gl.constexpr):
    """Tile of each token's last row; num_tiles where it has no row, so that such tokens come last.

    With EP the tile is the row's on its own rank: ranks go through their tiles side by side, so it still says about when the token is complete.
    """
    last = token * 0 - 1
    for k0 in range(0, fresh(t.K), TICKET_ROUTES):
        there = inside[:, None] & ((k0 + routes) < fresh(t.K))[None, :]
        last = gl.maximum(last, gl.max(gl.load(t.slot_to_row + token[:, None] * t.K + (k0 + routes)[None, :], mask=there, other=-1), 1))
    tile = last // BLOCK_M
    if EP:
        tile = gl.minimum(tile, s.num_tiles)     # another rank may have more tiles than this one
    return gl.where(last >= 0, tile, s.num_tiles)


@gluon.jit
def list_tokens(s, t, flags, NW: gl.constexpr, EP: gl.constexpr):
    """Fill t.order: a counting sort by last tile over all CTAs, in three steps that each wait for the one before (rule 8's bounded spins).

    Every CTA counts its tokens in a bucket for each tile; CTA 0 turns counts into first places; every CTA places its tokens. All CTAs are resident.
    """
    TOKENS: gl.constexpr = 16 * NW
    L: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [NW, 1], [1, 0])
    lanes = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, L))
    routes = gl.arange(0, TICKET_ROUTES, layout=gl.SliceLayout(0, L))
    flat = gl.arange(0, 32 * NW, layout=gl.BlockedLayout([1], [32], [NW], [0]))
    buckets = token_buckets(s, flags)
    grid = gl.num_programs(0)
    for first in range(gl.program_id(0) * TOKENS, s.T, grid * TOKENS):
        inside = first + lanes < s.T
        gl.atomic_add(buckets + _last_tile(s, t, first + lanes, inside, routes, EP), lanes * 0 + 1, mask=inside, sem="relaxed", scope="gpu")
    thread_barrier()
    add_release(flags.counters + SET_COUNTED, 1)
    if gl.program_id(0) == 0:
        wait_at_least(flags.counters + SET_COUNTED, grid, flags.control, WAIT_COMBINE, grid)
        thread_barrier()
        before = grid * 0
        for b in range(0, s.num_tiles + 1, 32 * NW):
            there = b + flat <= s.num_tiles
            counts = gl.load(buckets + b + flat, mask=there, other=0, volatile=True)
            gl.store(buckets + b + flat, before + gl.associative_scan(counts, 0, _add) - counts, mask=there)
            before += gl.sum(counts, 0)
        thread_barrier()
        add_release(flags.counters + SET_SCANNED, 1)
    wait_at_least(flags.counters + SET_SCANNED, 1, flags.control, WAIT_COMBINE, grid)
    thread_barrier()
    for first in range(gl.program_id(0) * TOKENS, s.T, grid * TOKENS):
        inside = first + lanes < s.T
        place = gl.atomic_add(buckets + _last_tile(s, t, first + lanes, inside, routes, EP), lanes * 0 + 1, mask=inside, sem="relaxed", scope="gpu")
        # after a time-out the buckets are unfinished: stay inside the list
        gl.store(t.order + gl.minimum(place, s.T - 1), first + lanes, mask=inside)
    thread_barrier()
    add_release(flags.counters + SET_LISTED, 1)


@gluon.jit
def behind(s, t, flags, ticket, since, NW: gl.constexpr, EP: gl.constexpr):
    """Down tasks that the least finished tile of a ticket's tokens still lacks; 0 = sum now, or aborted; LATE after the limit.

    With EP: results that the token with the most outstanding ones still lacks. The same in every thread.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [NW, 1], [1, 0])
    lanes = gl.arange(0, TICKET_TOKENS, layout=gl.SliceLayout(1, L))
    routes = gl.arange(0, TICKET_ROUTES, layout=gl.SliceLayout(0, L))
    mine = ticket * TICKET_TOKENS + lanes < s.T
    token = gl.load(t.order + ticket * TICKET_TOKENS + lanes, mask=mine, other=0)
    lack = lanes * 0
    for k0 in range(0, fresh(t.K), TICKET_ROUTES):
        inside = mine[:, None] & ((k0 + routes) < fresh(t.K))[None, :]
        rows = gl.load(t.slot_to_row + token[:, None] * t.K + (k0 + routes)[None, :], mask=inside, other=-1)
        if EP:
            lack += gl.sum((rows >= 0).to(gl.int32), 1)
        else:
            seen = gl.load(results_ready(flags) + gl.maximum(rows, 0) // BLOCK_M, mask=rows >= 0, other=MISSING, volatile=True)
            lack = gl.maximum(lack, gl.max(down_columns(s) - seen, 1))
    if EP:
        lack = gl.maximum(lack - gl.load(own_page(flags.control) + TOKEN_ARRIVED + token, mask=mine, other=0, volatile=True), 0)
    for e in range(fresh(s.num_shared)):
        seen = gl.load(results_ready(flags) + flags.capacity + e * token_tiles(s) + token // BLOCK_M, mask=mine, other=MISSING, volatile=True)
        lack = gl.maximum(lack, down_columns(s) - seen)
    lack = gl.where((lack > 0) & _late(flags, since, lanes), LATE, lack)
    return gl.max(gl.where(gl.load(flags.control + fresh(CONTROL_ABORT) + lanes * 0, volatile=True) != 0, 0, lack), 0)


@gluon.jit
def _gate(s, t, token, weight, NW: gl.constexpr):
    """sigmoid(x[token] . weight) in fp32, one token a warp: the same sums in the same order whatever NW is."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [NW, 1], [1, 0])
    columns = gl.arange(0, 256, layout=gl.SliceLayout(0, L))
    total = gl.zeros([NW, 256], gl.float32, L)
    for c in range(0, fresh(s.H), 256):
        inside = (c + columns < s.H)[None, :]
        xs = gl.load(t.x + (token.to(gl.int64) * (fresh(t.x_stride) * 8))[:, None] + (c + columns)[None, :], mask=inside, other=0.0).to(gl.float32)
        total = gl.fma(xs, gl.load(weight + c + columns, mask=c + columns < s.H, other=0.0).to(gl.float32)[None, :], total)
    return 1.0 / (1.0 + gl.exp2(gl.sum(total, 1) * -LOG2_E))


@gluon.jit
def _result_row(s, t, results, token, k, at, inside, EP: gl.constexpr):
    """(row or -1, result) of route k of each warp's token, which with EP lies in its slot; where there is no such route, row 0 is read and not used.

    No predicate but the columns': with one for each route the compiler runs out of predicates and issues the loads one after the other.
    """
    row = gl.load(t.slot_to_row + token * t.K + gl.minimum(k, fresh(t.K) - 1))
    if EP:
        slot = (token * t.K + gl.minimum(k, fresh(t.K) - 1)).to(gl.int64)
        pointer = results + (slot * s.H)[:, None] + at[None, :]
    else:
        pointer = results + (gl.maximum(row, 0).to(gl.int64) * s.H)[:, None] + at[None, :]
    return gl.where(k < fresh(t.K), row, -1), gl.load(pointer, mask=inside, other=0.0)


@gluon.jit
def _add_route(t, token, k, row, value, acc):
    """A -1 route is skipped, not multiplied by 0: fma(0, y, -0) would be +0."""
    weight = gl.load(t.topk_weights + token * t.K + gl.minimum(k, fresh(t.K) - 1))
    return gl.where((row >= 0)[:, None], gl.fma(value.to(gl.float32), weight[:, None], acc), acc)


@gluon.jit
def _sum_tokens(s, t, control, token, valid, start, VECTORS: gl.constexpr, ROUTES: gl.constexpr, NW: gl.constexpr, EP: gl.constexpr):
    """out[token], one token a warp: from `start` (+0, or NaN after an abort), fma over routes in k order, then shared experts in order, one rounding.

    ROUTES (4 or 8) results of VECTORS 16-byte loads a thread are in flight together.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [NW, 1], [1, 0])
    COLUMNS: gl.constexpr = 256 * VECTORS
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))
    gate_0 = token.to(gl.float32) * 0.0 + 1.0
    gate_1 = gate_0
    if (fresh(t.gated) & 1) != 0:
        gate_0 = gl.convert_layout(_gate(s, t, token, t.gate_0, NW), gate_0.type.layout)
    if (fresh(t.gated) & 2) != 0:
        gate_1 = gl.convert_layout(_gate(s, t, token, t.gate_1, NW), gate_1.type.layout)
    target = t.out + (token.to(gl.int64) * s.H)[:, None]
    results = t.results
    if EP:
        results = rows_at(t.out, gl.load(peers_of(control) + OWN_SLOTS))
    for c in range(0, fresh(s.H), COLUMNS):
        at = c + columns
        inside = (at < s.H)[None, :]
        acc = gl.zeros([NW, COLUMNS], gl.float32, L) + start
        for k in range(0, fresh(t.K), ROUTES):
            r0, v0 = _result_row(s, t, results, token, k, at, inside, EP)
            r1, v1 = _result_row(s, t, results, token, k + 1, at, inside, EP)
            r2, v2 = _result_row(s, t, results, token, k + 2, at, inside, EP)
            r3, v3 = _result_row(s, t, results, token, k + 3, at, inside, EP)
            if ROUTES == 8:
                r4, v4 = _result_row(s, t, results, token, k + 4, at, inside, EP)
                r5, v5 = _result_row(s, t, results, token, k + 5, at, inside, EP)
                r6, v6 = _result_row(s, t, results, token, k + 6, at, inside, EP)
                r7, v7 = _result_row(s, t, results, token, k + 7, at, inside, EP)
            keep_loads_above(k)
            acc = _add_route(t, token, k, r0, v0, acc)
            acc = _add_route(t, token, k + 1, r1, v1, acc)
            acc = _add_route(t, token, k + 2, r2, v2, acc)
            acc = _add_route(t, token, k + 3, r3, v3, acc)
            if ROUTES == 8:
                acc = _add_route(t, token, k + 4, r4, v4, acc)
                acc = _add_route(t, token, k + 5, r5, v5, acc)
                acc = _add_route(t, token, k + 6, r6, v6, acc)
                acc = _add_route(t, token, k + 7, r7, v7, acc)
        for e in range(fresh(s.num_shared)):
            row = t.shared_results_row + e * token_tiles(s) * BLOCK_M + token
            v = gl.load(t.results + (row.to(gl.int64) * s.H)[:, None] + at[None, :], mask=inside, other=0.0)
            acc = gl.fma(v.to(gl.float32), gl.where(e == 0, gate_0, gate_1)[:, None], acc)
        gl.store(target + at[None, :], acc.to(gl.bfloat16), mask=valid[:, None] & inside)


@gluon.jit
def sum_round(s, t, flags, place, VECTORS: gl.constexpr, NW: gl.constexpr, EP: gl.constexpr):
    """Sum the NW tokens from `place` of the list on, one a warp; their results are ready and acquired."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [NW, 1], [1, 0])
    warps = gl.arange(0, NW, layout=gl.SliceLayout(1, L))
    start = gl.where(gl.load(flags.control + fresh(CONTROL_ABORT), volatile=True) != 0, float("nan"), 0.0)
    valid = place + warps < s.T
    token = gl.load(t.order + (place + warps), mask=valid, other=0)
    if fresh(t.K) <= 4:
        _sum_tokens(s, t, flags.control, token, valid, start, 2 * VECTORS, 4, NW, EP)
    else:
        _sum_tokens(s, t, flags.control, token, valid, start, VECTORS, 8, NW, EP)


@gluon.jit
def tickets_of(s):
    """Tickets of the combine; made anew where it is asked for, since a mover has no register to keep it in."""
    return gl.cdiv(fresh(s.T), TICKET_TOKENS)


@gluon.jit
def take(flags):
    return gl.atomic_add(flags.counters, 1, sem="relaxed", scope="gpu")


@gluon.jit
def finish_combine(s, t, flags, VECTORS: gl.constexpr, NW: gl.constexpr, EP: gl.constexpr, DEBUG: gl.constexpr):
    """Take combine tickets until none is left, waiting for each; what consumers do after their last GEMM task."""
    tickets = gl.cdiv(fresh(s.T), TICKET_TOKENS)
    wait_at_least(flags.counters + SET_LISTED, gl.num_programs(0), flags.control, WAIT_COMBINE, tickets)
    thread_barrier()
    ticket = take(flags)
    while ticket < tickets:
        nap(ticket, DEBUG)
        since = clock(ticket)
        lack = ticket * 0 + 1
        while lack != 0:
            lack = behind(s, t, flags, ticket, since, NW, EP)
            if EP and lack != 0:
                watch_peers(flags.control)
            if lack == LATE:
                report_timeout(flags.control, WAIT_RESULTS if EP else WAIT_COMBINE, ticket, down_columns(s), lack)
        if EP:
            fence_acquire_system(ticket)     # rule 3: results come from peers
        else:
            fence_acquire(ticket)        # rule 2, reader: the polls of every thread ...
        thread_barrier()                 # ... before the loads of any
        for j in range(0, TICKET_TOKENS, NW):
            sum_round(s, t, flags, ticket * TICKET_TOKENS + j, VECTORS, NW, EP)
        ticket = take(flags)


@gluon.jit
def mover(s, flags, t, ring, COPY_VECTORS: gl.constexpr, VECTORS: gl.constexpr, NW: gl.constexpr, OMIT: gl.constexpr, DEBUG: gl.constexpr):
    """Copies pieces while the ring has room, else sums what is complete; never blocks on one while it could do the other."""
    pieces = s.num_tiles * COPY_PARTS
    tickets = gl.cdiv(fresh(s.T), TICKET_TOKENS)
    grid = gl.num_programs(0)
    piece = gl.program_id(0)
    ticket = piece * 0 - 1                # none taken yet: the list of tokens is still being made
    if OMIT >= 2:
        ticket = tickets
    done = piece * 0                      # tokens of the ticket that are summed; few at a time, because the tensor cores wait for rows, not for sums
    since = clock(ticket)
    while (piece < pieces) | (ticket < tickets):
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
                copy_piece(s, t, flags.control, ring, piece, tile % s.row_ring * BLOCK_M + piece % COPY_PARTS * COPY_ROWS, COPY_VECTORS, NW, False)
            fence_proxy(piece)           # rule 1, writer: each thread's stores before the TMA loads of whoever acquires the counter
            thread_barrier()
            add_release(rows_ready(flags) + tile, 1)
            piece += grid
            since = clock(piece)
        elif (piece >= pieces) & (ticket < tickets):
            lack = ticket * 0
            if ticket < 0:
                lack = room_for(flags, flags.counters + SET_LISTED, grid, since, NW) ^ 1       # 0 when the list is there
            elif done == 0:
                lack = behind(s, t, flags, ticket, since, NW, False)
                fence_acquire(lack)      # rule 2, reader: the polls of every thread ...
                thread_barrier()         # ... before the loads of any
            if lack >= LATE:
                report_timeout(flags.control, WAIT_COMBINE, ticket, down_columns(s), piece)
            if lack == 0:
                nap(ticket + 13, DEBUG)
                if ticket >= 0:
                    sum_round(s, t, flags, ticket * TICKET_TOKENS + done, VECTORS, NW, False)
                    done += NW
                if (ticket < 0) | (done >= TICKET_TOKENS):
                    ticket = take(flags)
                    done = done * 0
                since = clock(ticket)
            else:
                pause(lack)
        else:
            pause(piece)
