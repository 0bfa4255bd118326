"""Mover side of the backward kernel: rows of dy and x into routed buffers, shared gates, and the sums that end the pass.

Order of a CTA's movers: gates of shared experts; rows of dy (the first GEMM waits for them), rows of x (only weight gradients do; with RECOMPUTE the
first GEMM too, so that each piece is copied from both at once), both in pieces of 16 rows that belong to CTA `piece mod grid`; d_topk_weights when all
DH tasks are stored; dx when all DX tasks are, by tickets of 8 tokens that consumers take too once their GEMMs are done; bias gradients and the gate
weight's gradient. None of them waits for anything that waits for it.

Which role sums a token changes no bit: each element of dx is one chain of additions in k order, and dot products have one layout whatever the
number of warps.
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .backward_pipe import (
    COPY_PARTS,
    DH_DONE,
    DX_DONE,
    SLOTS_DONE,
    TASK_BEGUN,
    TASK_UNFINISHED,
    TICKET,
    WAIT_ALL_DH,
    WAIT_ALL_DX,
    WAIT_SLOTS,
    gated,
    partials_of,
)
from .backward_tasks import (
    TILE_M,
    WANT_BIAS_DOWN,
    WANT_BIAS_UP,
    WANT_TOPK,
    WANT_UP,
    WANT_X,
    all_dh_tasks,
    all_dx_tasks,
    dh_columns,
    own,
    shared_wants,
)
from .backward_waves import bias_blocks, biases_of_carry, rows_in_wave
from .compat import aggregate, thread_barrier
from .gemm import LOG2_E
from .peers import OWN_SLOTS, peers_of, rows_at
from .sync import add_release, fence_proxy, fresh, grid_size, nap, this_cta, wait_at_least

PIECE_ROWS = gl.constexpr(16)      # TILE_M / COPY_PARTS
DOT_ROWS = gl.constexpr(8)         # rows whose dot products are formed together, for the gates
SUM_ROWS = gl.constexpr(4)         # likewise for the down bias's term: with 8 the movers keep more than their 104 registers hold
SLOT_PIECE = gl.constexpr(64)      # routes of a piece of d_topk_weights
TICKET_TOKENS = gl.constexpr(8)


@aggregate
class Sums:
    """Where the final sums come from and go to. gate_i, d_gate_i: weights of the shared experts' gates and their gradients, (H,) bf16.

    gate_slopes: (num_shared, token rows) fp32, d of the gate's logit. has_b_down: whether d_topk_weights has the down bias's term.
    row_to_rank: home of each row's token, on several ranks.
    """
    dx: gl.tensor
    results: gl.tensor
    shared_results_row: gl.tensor
    slot_to_row: gl.tensor
    d_topk_weights: gl.tensor
    b_down: gl.tensor
    has_b_down: gl.tensor
    dz: gl.tensor
    db_up: gl.tensor
    db_down: gl.tensor
    gate_0: gl.tensor
    gate_1: gl.tensor
    d_gate_0: gl.tensor
    d_gate_1: gl.tensor
    gate_slopes: gl.tensor
    K: gl.tensor
    num_experts: gl.tensor
    row_to_rank: gl.tensor

    @gluon.constexpr_function
    def __init__(self, dx, results, shared_results_row, slot_to_row, d_topk_weights, b_down, has_b_down, dz, db_up, db_down, gate_0, gate_1,
                 d_gate_0, d_gate_1, gate_slopes, K, num_experts, row_to_rank):
        self.dx = dx
        self.results = results
        self.shared_results_row = shared_results_row
        self.slot_to_row = slot_to_row
        self.d_topk_weights = d_topk_weights
        self.b_down = b_down
        self.has_b_down = has_b_down
        self.dz = dz
        self.db_up = db_up
        self.db_down = db_down
        self.gate_0 = gate_0
        self.gate_1 = gate_1
        self.d_gate_0 = d_gate_0
        self.d_gate_1 = d_gate_1
        self.gate_slopes = gate_slopes
        self.K = K
        self.num_experts = num_experts
        self.row_to_rank = row_to_rank


@aggregate
class Source:
    """Rows of tokens: first element and row stride in elements."""
    x: gl.tensor
    x_stride: gl.tensor

    @gluon.constexpr_function
    def __init__(self, x, x_stride):
        self.x = x
        self.x_stride = x_stride


@gluon.jit
def _copy_piece(s, rows, source, target, piece, m, control, PEERS: gl.constexpr, ROWS: gl.constexpr, NW: gl.constexpr):
    """16 rows of the plan from their tokens' rows, padding rows as zeros (rule 9), in vectors of 16 bytes.

    PEERS: 0, or the words of the table of peers that say where each home rank has staged its rows.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, NW], [1, 0])
    COLUMNS: gl.constexpr = 256 * NW
    lanes = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))
    for j in gl.static_range(PIECE_ROWS // ROWS):
        row = piece * PIECE_ROWS + j * ROWS + lanes
        slot = gl.load(rows.row_to_slot + row)
        valid = slot >= 0
        token = gl.where(valid, slot, 0) // m.K
        if PEERS:
            home = gl.maximum(gl.load(m.row_to_rank + row), 0)
            start = (rows_at(target, gl.load(peers_of(control) + PEERS + home)) + token.to(gl.int64) * s.H)[:, None] + columns[None, :]
        else:
            start = source.x + token.to(gl.int64)[:, None] * source.x_stride + columns[None, :]
        to = target + row.to(gl.int64)[:, None] * s.H + columns[None, :]
        for c in range(0, s.H, COLUMNS):
            inside = ((c + columns) < s.H)[None, :]
            value = gl.load(start + c, mask=valid[:, None] & inside, other=0.0)
            gl.store(to + c, value, mask=inside)


@gluon.jit
def _dots(left, right, there, H, ROWS: gl.constexpr, NW: gl.constexpr):
    """Dot products in fp32 of ROWS pairs of bf16 rows of length H: left, right (ROWS,) pointers, 0 where `there` is false.

    Lane j of the warp that owns a row sums columns 8j.. of every 256, then the lanes are added as a tree: the same for any number of warps.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [NW, 1], [1, 0])
    columns = gl.arange(0, 256, layout=gl.SliceLayout(0, L))
    total = gl.zeros([ROWS, 256], gl.float32, L)
    for c in range(0, H, 256):
        inside = there[:, None] & ((c + columns) < H)[None, :]
        a = gl.load(left[:, None] + (c + columns)[None, :], mask=inside, other=0.0).to(gl.float32)
        b = gl.load(right[:, None] + (c + columns)[None, :], mask=inside, other=0.0).to(gl.float32)
        total = gl.fma(a, b, total)
    return gl.sum(total, 1)


@gluon.jit
def _gates(s, rows, flags, x, m, NW: gl.constexpr, DEBUG: gl.constexpr):
    """gates[i][t] = sigmoid(x[t] . gate_i) for every gated shared expert; published a piece of 16 tokens at a time."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [NW, 1], [1, 0])
    lanes = gl.arange(0, DOT_ROWS, layout=gl.SliceLayout(1, L))
    for piece in range(this_cta(s.T), s.token_tiles * COPY_PARTS, grid_size(s.T)):
        nap(piece + 5, DEBUG)
        for j in range(PIECE_ROWS // DOT_ROWS):
            token = piece * PIECE_ROWS + j * DOT_ROWS + lanes
            there = token < s.T
            for i in range(s.num_shared):
                if ((gated(rows) >> i) & 1) != 0:
                    weight = gl.where(i == 0, m.gate_0, m.gate_1)
                    logit = _dots(x.x + token.to(gl.int64) * x.x_stride, weight + lanes * 0, there, s.H, DOT_ROWS, NW)
                    gl.store(rows.gates + i * s.token_tiles * TILE_M + token, 1.0 / (1.0 + gl.exp2(logit * -LOG2_E)))
        thread_barrier()                     # all gates of the piece before the one thread's release (rule 1; read with ordinary loads)
        add_release(flags.gates_ready + piece // COPY_PARTS, 1)


@gluon.jit
def _expert_pieces(s, rows, flags, piece):
    """Counter of the expert that owns a piece of rows."""
    return flags.x_ready + gl.load(rows.tile_to_expert + piece // COPY_PARTS)


@gluon.jit
def _slot_pieces(s, rows, flags, m, dy, NW: gl.constexpr):
    """d_topk_weights[t, k] = sum over DH's column tiles, in order, of <dh, h>, plus <dy[t], b_down[e]>; 0 for a route without expert."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    lanes = gl.arange(0, SLOT_PIECE, layout=L)
    D: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [1, 32], [NW, 1], [1, 0]))
    these = gl.arange(0, SUM_ROWS, layout=D)
    num_slots = s.T * m.K
    columns = dh_columns(s, num_slots * 0 - 1)
    for first in range(this_cta(s.T) * SLOT_PIECE, num_slots, grid_size(s.T) * SLOT_PIECE):
        if m.has_b_down == 0:
            slot = first + lanes
            row = gl.load(m.slot_to_row + slot, mask=slot < num_slots, other=-1)
            total = _sum_partials(s, rows, flags, num_slots * 0 - 1, columns, row, row >= 0)
            gl.store(m.d_topk_weights + slot, total, mask=slot < num_slots)
        else:
            for j in range(SLOT_PIECE // SUM_ROWS):
                slot = first + j * SUM_ROWS + these
                row = gl.load(m.slot_to_row + slot, mask=slot < num_slots, other=-1)
                there = row >= 0
                total = _sum_partials(s, rows, flags, num_slots * 0 - 1, columns, row, there)
                expert = gl.load(rows.tile_to_expert + row // TILE_M, mask=there, other=0)
                token = gl.where(there, slot, 0) // m.K
                total += _dots(dy.x + token.to(gl.int64) * dy.x_stride, m.b_down + expert.to(gl.int64) * s.H, there, s.H, SUM_ROWS, NW)
                gl.store(m.d_topk_weights + slot, total, mask=slot < num_slots)


@gluon.jit
def _sum_partials(s, rows, flags, slot, columns, row, there):
    total = row.to(gl.float32) * 0.0
    for column in range(columns):
        total += gl.load(partials_of(s, rows, flags, slot, column, row), mask=there, other=0.0)
    return total


@gluon.jit
def _gate_slopes(s, rows, flags, m, NW: gl.constexpr):
    """gate_slopes[i][t] = <dy[t], y_i[t]> * gate * (1 - gate): d of the logit of every gated shared expert."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    lanes = gl.arange(0, SLOT_PIECE, layout=L)
    for first in range(this_cta(s.T) * SLOT_PIECE, s.T, grid_size(s.T) * SLOT_PIECE):
        token = first + lanes
        for i in range(s.num_shared):
            if ((gated(rows) >> i) & 1) != 0:
                at = i * s.token_tiles * TILE_M + token
                gate = gl.load(rows.gates + at, mask=token < s.T, other=0.0)
                total = _sum_partials(s, rows, flags, i, dh_columns(s, i), token, token < s.T)
                gl.store(m.gate_slopes + at, total * gate * (1.0 - gate), mask=token < s.T)
        fence_proxy(first)
        thread_barrier()
        add_release(flags.totals + SLOTS_DONE, 1)


@gluon.jit
def _result_row(m, s, results, token, k, columns, inside, EP: gl.constexpr):
    """Row of route k of a token, which on several ranks lies in its slot; zeros, and nothing is loaded, where there is no such route."""
    row = gl.load(m.slot_to_row + token * m.K + k, mask=k < m.K, other=-1)
    if EP:
        return gl.load(results + (token * m.K + k).to(gl.int64) * s.H + columns, mask=inside & (row >= 0), other=0.0)
    else:
        return gl.load(results + gl.maximum(row, 0).to(gl.int64) * s.H + columns, mask=inside & (row >= 0), other=0.0)


@gluon.jit
def _sum_dx(s, rows, m, control, token, start, VECTORS: gl.constexpr, NW: gl.constexpr, EP: gl.constexpr):
    """dx[token]: from `start` (+0, or NaN after an abort) routes in k order, then shared experts in order, one rounding."""
    L: gl.constexpr = gl.BlockedLayout([8], [32], [NW], [0])
    COLUMNS: gl.constexpr = 256 * NW * VECTORS
    columns = gl.arange(0, COLUMNS, layout=L)
    results = m.results
    if EP:
        results = rows_at(m.dx, gl.load(peers_of(control) + OWN_SLOTS))
    for c in range(0, s.H, COLUMNS):
        inside = c + columns < s.H
        acc = gl.zeros([COLUMNS], gl.float32, L) + start
        for k in range(0, m.K, 8):
            v0 = _result_row(m, s, results, token, k, c + columns, inside, EP)
            v1 = _result_row(m, s, results, token, k + 1, c + columns, inside, EP)
            v2 = _result_row(m, s, results, token, k + 2, c + columns, inside, EP)
            v3 = _result_row(m, s, results, token, k + 3, c + columns, inside, EP)
            v4 = _result_row(m, s, results, token, k + 4, c + columns, inside, EP)
            v5 = _result_row(m, s, results, token, k + 5, c + columns, inside, EP)
            v6 = _result_row(m, s, results, token, k + 6, c + columns, inside, EP)
            v7 = _result_row(m, s, results, token, k + 7, c + columns, inside, EP)
            # adding +0 for a route that is not there changes nothing: the chain starts from +0, so it never holds -0
            acc += v0.to(gl.float32)
            acc += v1.to(gl.float32)
            acc += v2.to(gl.float32)
            acc += v3.to(gl.float32)
            acc += v4.to(gl.float32)
            acc += v5.to(gl.float32)
            acc += v6.to(gl.float32)
            acc += v7.to(gl.float32)
        for i in range(s.num_shared):
            row = m.shared_results_row + i * s.token_tiles * TILE_M + token
            acc += gl.load(m.results + row.to(gl.int64) * s.H + c + columns, mask=inside, other=0.0).to(gl.float32)
            if ((gated(rows) >> i) & 1) != 0:
                slope = gl.load(m.gate_slopes + i * s.token_tiles * TILE_M + token)
                weight = gl.load(gl.where(i == 0, m.gate_0, m.gate_1) + c + columns, mask=inside, other=0.0)
                acc = gl.fma(weight.to(gl.float32), gl.zeros([COLUMNS], gl.float32, L) + slope, acc)
        gl.store(m.dx + token.to(gl.int64) * s.H + c + columns, acc.to(gl.bfloat16), mask=inside)


@gluon.jit
def finish_dx(s, rows, flags, m, VECTORS: gl.constexpr, NW: gl.constexpr, EP: gl.constexpr, DEBUG: gl.constexpr):
    """Sum dx by tickets of tokens once every DX task is stored; movers and, after their last GEMM, consumers."""
    if (s.wants & WANT_X) != 0:
        wait_at_least(flags.totals + DX_DONE, all_dx_tasks(s), flags.control, WAIT_ALL_DX, s.T)
        if gated(rows) != 0:
            wait_at_least(flags.totals + SLOTS_DONE, gl.cdiv(s.T, SLOT_PIECE), flags.control, WAIT_SLOTS, s.T)
        thread_barrier()
        tickets = gl.cdiv(s.T, TICKET_TOKENS)
        ticket = gl.atomic_add(flags.totals + TICKET, 1, sem="relaxed", scope="gpu")
        while ticket < tickets:
            nap(ticket, DEBUG)
            for j in range(TICKET_TOKENS):
                token = ticket * TICKET_TOKENS + j
                if token < s.T:
                    _sum_dx(s, rows, m, flags.control, token, 0.0, VECTORS, NW, EP)
            ticket = gl.atomic_add(flags.totals + TICKET, 1, sem="relaxed", scope="gpu")


@gluon.jit
def _column_sums(source, stride, first, count, columns, inside, weights, route, K, start, WEIGHTED: gl.constexpr, STARTED: gl.constexpr, L: gl.constexpr):
    """Sum over rows first..first+count-1, in order, of source[row] (fp32), from +0 or, if STARTED, from `start`; WEIGHTED 1: of weights[slot] * source[token
    of slot], slot = route[row]; 2: of weights[row] * source[row]."""
    acc = columns.to(gl.float32) * 0.0
    if STARTED:
        acc = start
    for r in range(0, count, 4):
        v0, w0 = _weighted_row(source, stride, first + r, r < count, columns, inside, weights, route, K, WEIGHTED)
        v1, w1 = _weighted_row(source, stride, first + r + 1, r + 1 < count, columns, inside, weights, route, K, WEIGHTED)
        v2, w2 = _weighted_row(source, stride, first + r + 2, r + 2 < count, columns, inside, weights, route, K, WEIGHTED)
        v3, w3 = _weighted_row(source, stride, first + r + 3, r + 3 < count, columns, inside, weights, route, K, WEIGHTED)
        acc = gl.fma(v0.to(gl.float32), w0, acc)
        acc = gl.fma(v1.to(gl.float32), w1, acc)
        acc = gl.fma(v2.to(gl.float32), w2, acc)
        acc = gl.fma(v3.to(gl.float32), w3, acc)
    return acc


@gluon.jit
def _weighted_row(source, stride, row, there, columns, inside, weights, route, K, WEIGHTED: gl.constexpr):
    """(row of bf16, its weight in every lane) for _column_sums; weight 0 and no load behind the last row."""
    weight = gl.where(there, 1.0, 0.0)
    place = row
    if WEIGHTED == 2:
        weight = gl.load(weights + row, mask=there, other=0.0)
    elif WEIGHTED:
        slot = gl.load(route + row, mask=there, other=0)
        weight = gl.load(weights + slot, mask=there, other=0.0)
        place = slot // K
    value = gl.load(source + place.to(gl.int64) * stride + columns, mask=inside & there, other=0.0)
    return value, columns.to(gl.float32) * 0.0 + weight


@gluon.jit
def _bias_sums(s, rows, m, dy, NW: gl.constexpr, EP: gl.constexpr):
    """db_gate_up[e] = sum of dz rows, db_down[e] = sum of weight * dy rows, in canonical order; an expert without rows gets zeros.

    dy: rows of tokens; on several ranks rows of the plan, as the weights.
    """
    L: gl.constexpr = gl.BlockedLayout([8], [32], [NW], [0])
    COLUMNS: gl.constexpr = 256 * NW
    lanes = gl.arange(0, COLUMNS, layout=L)
    up_blocks = gl.where((s.wants & WANT_BIAS_UP) != 0, gl.cdiv(2 * s.I, COLUMNS), 0)
    down_blocks = gl.where((s.wants & WANT_BIAS_DOWN) != 0, gl.cdiv(s.H, COLUMNS), 0)
    blocks = up_blocks + down_blocks
    for task in range(this_cta(s.T), m.num_experts * blocks, grid_size(s.T)):
        e = task // blocks
        block = task - e * blocks
        first = gl.load(rows.expert_offsets + e).to(gl.int32)
        count = gl.load(rows.tokens_per_expert + e)
        if block < up_blocks:
            columns = block * COLUMNS + lanes
            inside = columns < 2 * s.I
            acc = _column_sums(m.dz, 2 * s.I, first, count, columns, inside, rows.topk_weights, rows.row_to_slot, m.K, (), 0, False, L)
            gl.store(m.db_up + e.to(gl.int64) * (2 * s.I) + columns, acc.to(gl.bfloat16), mask=inside)
        else:
            columns = (block - up_blocks) * COLUMNS + lanes
            inside = columns < s.H
            acc = _column_sums(dy.x, dy.x_stride, first, count, columns, inside, rows.topk_weights, rows.row_to_slot, m.K, (), 1 + EP, False, L)
            gl.store(m.db_down + e.to(gl.int64) * s.H + columns, acc.to(gl.bfloat16), mask=inside)


@gluon.jit
def _bias_sums_of_wave(s, rows, m, dy, carry, NW: gl.constexpr):
    """`_bias_sums` of one wave: an expert's chain begins with what the wave before left of it, and is left to the next one where that has more of its rows."""
    L: gl.constexpr = gl.BlockedLayout([8], [32], [NW], [0])
    COLUMNS: gl.constexpr = 256 * NW
    lanes = gl.arange(0, COLUMNS, layout=L)
    up_blocks, down_blocks = bias_blocks(s, COLUMNS)
    blocks = up_blocks + down_blocks
    for task in range(this_cta(s.T), m.num_experts * blocks, grid_size(s.T)):
        e = task // blocks
        block = task - e * blocks
        count, first, marks = rows_in_wave(rows.expert_offsets, rows.tokens_per_expert, e, carry.wave, e >= 0, NW)
        if (count > 0) | (gl.load(rows.tokens_per_expert + e) == 0):
            is_up = block < up_blocks
            columns = gl.where(is_up, block, block - up_blocks) * COLUMNS + lanes
            inside = columns < gl.where(is_up, 2 * s.I, s.H)
            place = gl.where(is_up, 0, 2 * s.I) + columns
            acc = gl.load(biases_of_carry(s, carry, 1, NW) + place, mask=inside & ((marks & TASK_BEGUN) != 0), other=0.0)
            if is_up:
                acc = _column_sums(m.dz, 2 * s.I, first, count, columns, inside, rows.topk_weights, rows.row_to_slot, m.K, acc, 0, True, L)
            else:
                acc = _column_sums(dy.x, dy.x_stride, first, count, columns, inside, rows.topk_weights, rows.row_to_slot, m.K, acc, 2, True, L)
            if (marks & TASK_UNFINISHED) != 0:
                gl.store(biases_of_carry(s, carry, 0, NW) + place, acc, mask=inside)
            elif is_up:
                gl.store(m.db_up + e.to(gl.int64) * (2 * s.I) + columns, acc.to(gl.bfloat16), mask=inside)
            else:
                gl.store(m.db_down + e.to(gl.int64) * s.H + columns, acc.to(gl.bfloat16), mask=inside)


@gluon.jit
def _gate_weight_sums(s, rows, m, x, NW: gl.constexpr):
    """d_gate_i = sum over tokens, in order, of gate_slopes[i][t] * x[t]."""
    L: gl.constexpr = gl.BlockedLayout([8], [32], [NW], [0])
    COLUMNS: gl.constexpr = 256 * NW
    lanes = gl.arange(0, COLUMNS, layout=L)
    blocks = gl.cdiv(s.H, COLUMNS)
    for task in range(this_cta(s.T), s.num_shared * blocks, grid_size(s.T)):
        i = task // blocks
        columns = (task - i * blocks) * COLUMNS + lanes
        inside = columns < s.H
        if (shared_wants(s, i) & 4) != 0:
            slopes = m.gate_slopes + i * s.token_tiles * TILE_M
            acc = columns.to(gl.float32) * 0.0
            for t in range(0, s.T, 4):
                v0, w0 = _sloped_row(x, slopes, t, t < s.T, columns, inside)
                v1, w1 = _sloped_row(x, slopes, t + 1, t + 1 < s.T, columns, inside)
                v2, w2 = _sloped_row(x, slopes, t + 2, t + 2 < s.T, columns, inside)
                v3, w3 = _sloped_row(x, slopes, t + 3, t + 3 < s.T, columns, inside)
                acc = gl.fma(v0.to(gl.float32), w0, acc)
                acc = gl.fma(v1.to(gl.float32), w1, acc)
                acc = gl.fma(v2.to(gl.float32), w2, acc)
                acc = gl.fma(v3.to(gl.float32), w3, acc)
            gl.store(gl.where(i == 0, m.d_gate_0, m.d_gate_1) + columns, acc.to(gl.bfloat16), mask=inside)


@gluon.jit
def _sloped_row(x, slopes, token, there, columns, inside):
    slope = gl.load(slopes + token, mask=there, other=0.0)
    value = gl.load(x.x + token.to(gl.int64) * x.x_stride + columns, mask=inside & there, other=0.0)
    return value, columns.to(gl.float32) * 0.0 + slope


@gluon.jit
def mover(s, rows, flags, m, dy, x, dy_rows, x_rows, COPY_ROWS_AT_ONCE: gl.constexpr, VECTORS: gl.constexpr, NW: gl.constexpr,
          RECOMPUTE: gl.constexpr, OMIT: gl.constexpr, DEBUG: gl.constexpr):
    """Everything that the tensor cores do not do; dy and x are where those tensors lie."""
    s = own(s)
    if gated(rows) != 0:
        _gates(s, rows, flags, x, m, NW, DEBUG)
    pieces = s.num_tiles * COPY_PARTS
    if dh_columns(s, s.T * 0 - 1) > 0:
        for piece in range(this_cta(s.T), pieces, grid_size(s.T)):
            nap(piece + 11, DEBUG)
            if RECOMPUTE and OMIT & 2 == 0:
                # fresh: the places of this copy are not kept for the next one (120 bytes of stack)
                _copy_piece(s, rows, x, x_rows, fresh(piece), m, flags.control, 0, COPY_ROWS_AT_ONCE, NW)
            if OMIT & 1 == 0:
                _copy_piece(s, rows, dy, dy_rows, piece, m, flags.control, 0, COPY_ROWS_AT_ONCE, NW)
            fence_proxy(piece)               # rule 1, writer: each thread's stores before the TMA loads of whoever acquires the counter
            thread_barrier()
            add_release(flags.dy_ready + piece // COPY_PARTS, 1)
            if RECOMPUTE:
                add_release(_expert_pieces(s, rows, flags, piece), 1)
    if not RECOMPUTE and (s.wants & WANT_UP) != 0:
        for piece in range(this_cta(s.T), pieces, grid_size(s.T)):
            nap(piece + 13, DEBUG)
            counter = _expert_pieces(s, rows, flags, piece)
            if OMIT & 2 == 0:
                _copy_piece(s, rows, x, x_rows, piece, m, flags.control, 0, COPY_ROWS_AT_ONCE, NW)
            fence_proxy(piece)               # rule 1, writer
            thread_barrier()
            add_release(counter, 1)
    if OMIT & 4 == 0:
        _final_sums(s, rows, flags, m, dy, x, VECTORS, NW, DEBUG)


@gluon.jit
def _final_sums(s, rows, flags, m, dy, x, VECTORS: gl.constexpr, NW: gl.constexpr, DEBUG: gl.constexpr):
    """What can be summed once the GEMMs that it hangs on are done, in the order of the file's docstring."""
    # Rule 2, reader without TMA: every thread acquires for itself, then the barrier lets the role go on together.
    wait_at_least(flags.totals + DH_DONE, all_dh_tasks(s), flags.control, WAIT_ALL_DH, s.T)
    thread_barrier()
    if (s.wants & WANT_TOPK) != 0:
        _slot_pieces(s, rows, flags, m, dy, NW)
    if gated(rows) != 0:
        _gate_slopes(s, rows, flags, m, NW)
    finish_dx(s, rows, flags, m, VECTORS, NW, 0, DEBUG)
    if (s.wants & (WANT_BIAS_UP | WANT_BIAS_DOWN)) != 0:
        _bias_sums(s, rows, m, dy, NW, 0)
    if gated(rows) != 0:
        wait_at_least(flags.totals + SLOTS_DONE, gl.cdiv(s.T, SLOT_PIECE), flags.control, WAIT_SLOTS, s.T)
        thread_barrier()
        _gate_weight_sums(s, rows, m, x, NW)
