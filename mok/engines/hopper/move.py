"""Mover side of the forward kernel: dispatch of rows of x into the routed ring, and the combine, which sums a token's results in order.

Dispatch: a row tile is filled in COPY_PARTS pieces of 16 rows. Piece p belongs to CTA p mod grid. The ring is shorter than the plan, so
that rows stay in L2 between their copy and their GEMM: a tile's place is free when the tile that held it before has all its gate/up results.

Combine: a ticket is TICKET_ROWS consecutive rows; whoever takes it sums the tokens whose LAST row (the largest of their K rows) is among them,
because tiles finish nearly in row order: no list of finished tokens is needed and each token has exactly one owner. Movers take tickets whenever
they have nothing to copy, consumers when their GEMM tasks are done. Which of them sums a token changes no bit: each output element is one chain
of fma in k order, and the gate's dot product has one layout whatever the number of warps.
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .compat import aggregate, thread_barrier
from .gemm import COPY_PARTS, LOG2_E, hidden_ready, results_ready, rows_ready
from .sync import CONTROL_ABORT, CONTROL_LIMIT, WAIT_COMBINE, WAIT_ROW_SLOT, add_release, clock, fence_acquire, fence_proxy, fresh, load_acquire, nap, report_timeout
from .tasks import BLOCK_M, down_columns, token_tiles, up_columns_of

COPY_ROWS = gl.constexpr(16)       # BLOCK_M / COPY_PARTS
TICKET_ROWS = gl.constexpr(8)
TICKET_ROUTES = gl.constexpr(16)   # routes of a token looked at together
UNROLL_K = gl.constexpr(4)         # result rows of a token loaded together
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
    x: gl.tensor
    x_stride: gl.tensor
    gate_0: gl.tensor
    gate_1: gl.tensor
    gated: gl.tensor             # bit i: shared expert i has a gate
    shared_results_row: gl.tensor
    K: gl.tensor
    loose_tickets: gl.tensor     # tickets over tokens without any route; 0 where every route is valid

    @gluon.constexpr_function
    def __init__(self, out, results, row_to_slot, slot_to_row, topk_weights, x, x_stride, gate_0, gate_1, gated, shared_results_row,
                 K, loose_tickets):
        self.out = out
        self.results = results
        self.row_to_slot = row_to_slot
        self.slot_to_row = slot_to_row
        self.topk_weights = topk_weights
        self.x = x
        self.x_stride = x_stride
        self.gate_0 = gate_0
        self.gate_1 = gate_1
        self.gated = gated
        self.shared_results_row = shared_results_row
        self.K = K
        self.loose_tickets = loose_tickets


@gluon.jit
def _late(flags, since, lanes):
    """Per thread: whether more than the spin limit has passed since `since`. Data only until it is reduced."""
    return clock(lanes) - since > gl.load(flags.control + CONTROL_LIMIT)


@gluon.jit
def _room(flags, counter, target, since, NW: gl.constexpr):
    """1 if the counter has reached its target or the launch is aborted, 0 if not, LATE after the spin limit; the same in every thread."""
    lanes = gl.arange(0, 32 * NW, layout=gl.BlockedLayout([1], [32], [NW], [0]))
    seen = load_acquire(counter)         # every thread acquires; the reduction's barrier passes that on
    aborted = gl.load(flags.control + CONTROL_ABORT + lanes * 0, volatile=True)
    done = (aborted != 0) | (seen >= target)
    state = gl.where(done, 1, gl.where(_late(flags, since, lanes), LATE, 0))
    return gl.max(state, 0)


@gluon.jit
def _row_source(s, t, row):
    """(whether there is one, address of x) of the token in a plan row; one row a warp."""
    slot = gl.load(t.row_to_slot + row)
    return slot >= 0, t.x + (gl.where(slot >= 0, slot, 0) // t.K).to(gl.int64) * t.x_stride


@gluon.jit
def _copy_piece(s, t, ring, piece, place, VECTORS: gl.constexpr, NW: gl.constexpr):
    """16 rows of x into the ring from row `place` on, padding rows as zeros (rule 9).

    Each warp copies a row of its own, VECTORS loads of 16 bytes in flight in each thread; the next row's address is fetched meanwhile.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [NW, 1], [1, 0])
    COLUMNS: gl.constexpr = 256 * VECTORS
    rows = gl.arange(0, NW, layout=gl.SliceLayout(1, L))
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))
    valid, source = _row_source(s, t, piece * COPY_ROWS + rows)
    for j in range(0, COPY_ROWS, NW):
        next_valid, next_source = _row_source(s, t, piece * COPY_ROWS + gl.minimum(j + NW, COPY_ROWS - NW) + rows)
        target = ring + (place + j + rows).to(gl.int64) * s.H
        for c in range(0, s.H, COLUMNS):
            inside = ((c + columns) < s.H)[None, :]
            value = gl.load(source[:, None] + (c + columns)[None, :], mask=valid[:, None] & inside, other=0.0)
            gl.store(target[:, None] + (c + columns)[None, :], value, mask=inside)
        valid, source = next_valid, next_source


@gluon.jit
def _ticket_tokens(s, t, num_rows, ticket, lanes):
    """(token, whether there is one, the row that must be its last) of each of a ticket's TICKET_ROWS places; loose tickets list tokens, last row -1."""
    loose = ticket < t.loose_tickets
    index = (ticket - gl.where(loose, 0, t.loose_tickets)) * TICKET_ROWS + lanes
    slot = gl.load(t.row_to_slot + index, mask=(index < num_rows) & (ticket >= t.loose_tickets), other=-1)
    token = gl.where(loose, index, gl.where(slot >= 0, slot, 0) // t.K)
    return token, gl.where(loose, index < s.T, slot >= 0), gl.where(loose, -1, index)


@gluon.jit
def _owned(s, t, num_rows, ticket, NW: gl.constexpr):
    """Bit j: the token at place j of this ticket has its last row here, so this ticket sums it."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [NW, 1], [1, 0])
    lanes = gl.arange(0, TICKET_ROWS, layout=gl.SliceLayout(1, L))
    routes = gl.arange(0, TICKET_ROUTES, layout=gl.SliceLayout(0, L))
    token, valid, row = _ticket_tokens(s, t, num_rows, ticket, lanes)
    last = lanes * 0 - 1
    for k0 in range(0, t.K, TICKET_ROUTES):
        inside = valid[:, None] & ((k0 + routes) < t.K)[None, :]
        rows = gl.load(t.slot_to_row + token[:, None] * t.K + (k0 + routes)[None, :], mask=inside, other=-1)
        last = gl.maximum(last, gl.max(rows, 1))
    return gl.sum(gl.where(valid & (last == row), (lanes * 0 + 1) << lanes, 0), 0)


@gluon.jit
def _behind(s, t, flags, num_rows, ticket, owned, since, NW: gl.constexpr):
    """Down tasks that the ticket's least finished tile still lacks; 0 = sum now, or aborted; LATE after the limit. The same in every thread."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [NW, 1], [1, 0])
    lanes = gl.arange(0, TICKET_ROWS, layout=gl.SliceLayout(1, L))
    routes = gl.arange(0, TICKET_ROUTES, layout=gl.SliceLayout(0, L))
    token, _, _ = _ticket_tokens(s, t, num_rows, ticket, lanes)
    mine = ((owned >> lanes) & 1) != 0
    lack = lanes * 0
    for k0 in range(0, t.K, TICKET_ROUTES):
        inside = mine[:, None] & ((k0 + routes) < t.K)[None, :]
        rows = gl.load(t.slot_to_row + token[:, None] * t.K + (k0 + routes)[None, :], mask=inside, other=-1)
        seen = gl.load(results_ready(flags) + gl.maximum(rows, 0) // BLOCK_M, mask=rows >= 0, other=MISSING, volatile=True)
        lack = gl.maximum(lack, gl.max(down_columns(s) - seen, 1))
    for e in range(fresh(s.num_shared)):
        seen = gl.load(results_ready(flags) + flags.capacity + e * token_tiles(s) + token // BLOCK_M, mask=mine, other=MISSING, volatile=True)
        lack = gl.maximum(lack, down_columns(s) - seen)
    lack = gl.where((lack > 0) & _late(flags, since, lanes), LATE, lack)
    return gl.max(gl.where(gl.load(flags.control + CONTROL_ABORT + lanes * 0, volatile=True) != 0, 0, lack), 0)


@gluon.jit
def _gate(s, t, token, weight, NW: gl.constexpr):
    """sigmoid(x[token] . weight) in fp32. Every warp computes all of it in one layout, so the bits do not depend on how many warps there are."""
    L: gl.constexpr = gl.BlockedLayout([8], [32], [NW], [0])
    columns = gl.arange(0, 256, layout=L)
    total = gl.zeros([256], gl.float32, L)
    for c in range(0, s.H, 256):
        inside = c + columns < s.H
        xs = gl.load(t.x + token.to(gl.int64) * t.x_stride + c + columns, mask=inside, other=0.0).to(gl.float32)
        total = gl.fma(xs, gl.load(weight + c + columns, mask=inside, other=0.0).to(gl.float32), total)
    return 1.0 / (1.0 + gl.exp2(gl.sum(total, 0) * -LOG2_E))


@gluon.jit
def _result_row(s, t, token, k, columns, inside):
    """(row or -1, result) of route k of a token; nothing is loaded where there is no such route."""
    row = gl.load(t.slot_to_row + token * t.K + k, mask=k < t.K, other=-1)
    return row, gl.load(t.results + gl.maximum(row, 0).to(gl.int64) * s.H + columns, mask=inside & (row >= 0), other=0.0)


@gluon.jit
def _add_route(t, token, k, row, value, acc):
    weight = gl.load(t.topk_weights + token * t.K + k, mask=row >= 0, other=0.0)
    return gl.where(row >= 0, gl.fma(value.to(gl.float32), weight, acc), acc)


@gluon.jit
def _sum_token(s, t, token, start, VECTORS: gl.constexpr, NW: gl.constexpr):
    """out[token]: from `start` (+0, or NaN after an abort), fma over routes in k order, then shared experts in order, one rounding."""
    L: gl.constexpr = gl.BlockedLayout([8], [32], [NW], [0])
    COLUMNS: gl.constexpr = 256 * NW * VECTORS
    columns = gl.arange(0, COLUMNS, layout=L)
    gate_0 = start * 0.0 + 1.0
    gate_1 = gate_0
    if (fresh(t.gated) & 1) != 0:
        gate_0 = _gate(s, t, token, t.gate_0, NW)
    if (fresh(t.gated) & 2) != 0:
        gate_1 = _gate(s, t, token, t.gate_1, NW)
    for c in range(0, s.H, COLUMNS):
        inside = c + columns < s.H
        acc = gl.zeros([COLUMNS], gl.float32, L) + start
        for k0 in range(0, t.K, 2 * UNROLL_K):
            # all loads first, then the chain; a -1 route is skipped, not multiplied by 0: fma(0, y, -0) would be +0
            more = k0 + UNROLL_K < t.K
            at = c + columns
            r0, v0 = _result_row(s, t, token, k0, at, inside)
            r1, v1 = _result_row(s, t, token, k0 + 1, at, inside)
            r2, v2 = _result_row(s, t, token, k0 + 2, at, inside)
            r3, v3 = _result_row(s, t, token, k0 + 3, at, inside)
            r4, v4, r5, v5, r6, v6, r7, v7 = r0, v0, r1, v1, r2, v2, r3, v3
            if more:
                r4, v4 = _result_row(s, t, token, k0 + 4, at, inside)
                r5, v5 = _result_row(s, t, token, k0 + 5, at, inside)
                r6, v6 = _result_row(s, t, token, k0 + 6, at, inside)
                r7, v7 = _result_row(s, t, token, k0 + 7, at, inside)
            acc = _add_route(t, token, k0, r0, v0, acc)
            acc = _add_route(t, token, k0 + 1, r1, v1, acc)
            acc = _add_route(t, token, k0 + 2, r2, v2, acc)
            acc = _add_route(t, token, k0 + 3, r3, v3, acc)
            if more:
                acc = _add_route(t, token, k0 + 4, r4, v4, acc)
                acc = _add_route(t, token, k0 + 5, r5, v5, acc)
                acc = _add_route(t, token, k0 + 6, r6, v6, acc)
                acc = _add_route(t, token, k0 + 7, r7, v7, acc)
        for e in range(fresh(s.num_shared)):
            row = t.shared_results_row + e * token_tiles(s) * BLOCK_M + token
            v = gl.load(t.results + row.to(gl.int64) * s.H + c + columns, mask=inside, other=0.0)
            acc = gl.fma(v.to(gl.float32), gl.where(e == 0, gate_0, gate_1), acc)
        gl.store(t.out + token.to(gl.int64) * s.H + c + columns, acc.to(gl.bfloat16), mask=inside)


@gluon.jit
def _sum_ticket(s, t, flags, num_rows, ticket, owned, VECTORS: gl.constexpr, NW: gl.constexpr):
    """Sum all tokens that this ticket owns; their results are ready."""
    fence_acquire(owned)                 # rule 2, reader: the polls of every thread ...
    thread_barrier()                     # ... before the loads of any
    start = gl.where(gl.load(flags.control + CONTROL_ABORT, volatile=True) != 0, float("nan"), 0.0)
    first = (ticket - gl.where(ticket < t.loose_tickets, 0, t.loose_tickets)) * TICKET_ROWS
    for j in range(TICKET_ROWS):
        if ((owned >> j) & 1) != 0:
            token = first + j
            if ticket >= t.loose_tickets:
                token = gl.load(t.row_to_slot + first + j) // t.K
            _sum_token(s, t, token, start, VECTORS, NW)


@gluon.jit
def _take(flags):
    return gl.atomic_add(flags.counters, 1, sem="relaxed", scope="gpu")


@gluon.jit
def finish_combine(s, t, flags, VECTORS: gl.constexpr, NW: gl.constexpr, DEBUG: gl.constexpr):
    """Take combine tickets until none is left, waiting for each; what consumers do after their last GEMM task."""
    num_rows = s.num_tiles * BLOCK_M
    tickets = t.loose_tickets + num_rows // TICKET_ROWS
    ticket = _take(flags)
    while ticket < tickets:
        nap(ticket, DEBUG)
        owned = _owned(s, t, num_rows, ticket, NW)
        if owned != 0:
            since = clock(ticket)
            lack = owned
            while lack != 0:
                lack = _behind(s, t, flags, num_rows, ticket, owned, since, NW)
                if lack == LATE:
                    report_timeout(flags.control, WAIT_COMBINE, ticket, down_columns(s), lack)
            _sum_ticket(s, t, flags, num_rows, ticket, owned, VECTORS, NW)
        ticket = _take(flags)


@gluon.jit
def mover(s, flags, t, ring, COPY_VECTORS: gl.constexpr, VECTORS: gl.constexpr, NW: gl.constexpr, OMIT: gl.constexpr,
          DEBUG: gl.constexpr):
    """Copies pieces while the ring has room, else sums what is complete; never blocks on one while it could do the other."""
    num_rows = s.num_tiles * BLOCK_M
    pieces = s.num_tiles * COPY_PARTS
    tickets = t.loose_tickets + num_rows // TICKET_ROWS
    if OMIT == 2:
        tickets = tickets * 0
    grid = gl.num_programs(0)
    piece = gl.program_id(0)
    ticket = _take(flags)
    owned = _owned(s, t, num_rows, gl.minimum(ticket, tickets), NW)
    since = clock(ticket)
    while (piece < pieces) | (ticket < tickets):
        tile = piece // COPY_PARTS
        room = (piece < pieces).to(gl.int32)
        if (piece < pieces) & (tile >= s.row_ring):
            # Rule 6: hidden_ready of the tile that held this place says that its rows have been read by all their GEMM tasks.
            room = _room(flags, hidden_ready(flags) + tile - s.row_ring, up_columns_of(s, tile * 0 - 1), since, NW)
        if room == LATE:
            report_timeout(flags.control, WAIT_ROW_SLOT, tile, tile * 0, piece)
            room = room * 0
        if room != 0:
            nap(piece + 11, DEBUG)
            if OMIT != 1:
                _copy_piece(s, t, ring, piece, tile % s.row_ring * BLOCK_M + piece % COPY_PARTS * COPY_ROWS, COPY_VECTORS, NW)
            fence_proxy(piece)           # rule 1, writer: each thread's stores before the TMA loads of whoever acquires the counter
            thread_barrier()
            add_release(rows_ready(flags) + tile, 1)
            piece += grid
            since = clock(piece)
        elif ticket < tickets:
            lack = owned * 0
            if owned != 0:
                lack = _behind(s, t, flags, num_rows, ticket, owned, since, NW)
            if lack == LATE:
                report_timeout(flags.control, WAIT_COMBINE, ticket, down_columns(s), piece)
            if lack == 0:
                nap(ticket + 13, DEBUG)
                if owned != 0:
                    _sum_ticket(s, t, flags, num_rows, ticket, owned, VECTORS, NW)
                ticket = _take(flags)
                owned = _owned(s, t, num_rows, gl.minimum(ticket, tickets), NW)
                since = clock(ticket)
