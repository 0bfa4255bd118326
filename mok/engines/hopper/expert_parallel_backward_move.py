"""Movers of the backward kernel on several ranks: rows of dy and x and routing weights are pulled, gradients sent home (docs/expert-parallel-kernel.md).

Before the roles start, all four warps of every CTA copy their share of this rank's dy, x and routing weights to where peers read them; the last CTA
to finish publishes `grads_ready`, with the number of the pass, which every rank compares with its own. Movers then pull all rows, which needs no room that
anybody has to make: the buffers hold every row. When the GEMMs are done they push each row's gradient of its routing weight and its row of dx into
its slot at home, and the last CTA publishes `grads_sent`. A rank sums, and its launch ends, when all ranks have sent: so whatever gradients are
wanted, nobody stages over rows that a peer still pulls. The sums themselves are those of one rank (backward_move.py).

Nothing waits for what waits for it: pulls wait for staging alone, pushes for this rank's GEMMs and those for its pulls, sums for everybody's pushes.
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .backward_move import (
    PIECE_ROWS,
    SLOT_PIECE,
    SUM_ROWS,
    Source,
    Sums,
    _bias_sums,
    _bias_sums_of_wave,
    _copy_piece,
    _dots,
    _expert_pieces,
    _gate_slopes,
    _gate_weight_sums,
    _gates,
    _sum_partials,
    finish_dx,
)
from .backward_pipe import (
    COPY_PARTS,
    DH_DONE,
    DX_DONE,
    WAIT_ALL_DH,
    WAIT_ALL_DX,
    Rows,
    gated,
)
from .backward_tasks import (
    TILE_M,
    WANT_BIAS_DOWN,
    WANT_BIAS_UP,
    WANT_TOPK,
    WANT_UP,
    WANT_X,
    WANT_Z,
    Z_AGAIN,
    all_dh_tasks,
    all_dx_tasks,
    dh_columns,
    own,
)
from .backward_waves import backward_schedule_of_wave
from .compat import thread_barrier
from .expert_parallel_move import stage_rows
from .expert_parallel_send import home_of
from .peers import (
    GRADS_PASS,
    GRADS_READY,
    GRADS_SENT,
    OWN_DY,
    OWN_WEIGHT_SLOTS,
    OWN_WEIGHTS,
    OWN_X,
    PEER_DY,
    PEER_PAGE,
    PEER_RANK,
    PEER_WEIGHT_SLOTS,
    PEER_WEIGHTS,
    PEER_X,
    float_of,
    own_page,
    peer_count,
    peers_of,
    rows_at,
    signal_all,
    wait_for_all,
    word_of,
)
from .sync import (
    CONTROL_ABORT,
    CONTROL_EPOCH,
    WAIT_PEER_GRADS,
    WAIT_PEER_SENT,
    WAIT_SIGNATURE,
    WAIT_WAVE,
    add_release,
    fence_proxy,
    fresh,
    grid_size,
    load_acquire,
    nap,
    report_timeout,
    this_cta,
    wait_at_least,
)
from .wave_loop import count_waves, first_tile, is_last, wave_index

EXTRA_COUNTERS = 3                 # words of a set behind those of one rank: CTAs that have staged, CTAs that have sent, arrivals between waves


@gluon.jit
def _pulls_dy(s):
    """Whether rows of dy and their weights are needed: by DH tasks, or by the down bias's gradient alone."""
    return (dh_columns(s, s.T * 0 - 1) > 0) | ((s.wants & WANT_BIAS_DOWN) != 0)


@gluon.jit
def _pulls_x(s, RECOMPUTE: gl.constexpr):
    """Whether rows of x are needed: by dw_gate_up, or by z where it is made again."""
    if RECOMPUTE == Z_AGAIN:
        return (dh_columns(s, s.T * 0 - 1) > 0) & ((s.wants & (WANT_UP | WANT_Z)) != 0)
    elif RECOMPUTE:
        return dh_columns(s, s.T * 0 - 1) > 0
    else:
        return (s.wants & WANT_UP) != 0


@gluon.jit
def _epoch(control):
    """Number of this launch: every CTA has passed `_begin_launch`, so the control block holds it until the launch ends."""
    return load_acquire(control + fresh(CONTROL_EPOCH))


@gluon.jit
def stage_gradients(s, flags, dy, dy_stride_8, x, x_stride_8, topk_weights, K, num_experts, number, base, VECTORS: gl.constexpr,
                    RECOMPUTE: gl.constexpr, DEBUG: gl.constexpr):
    """Copy what peers will pull and publish `grads_ready`. By the four warps that start a CTA, before its roles: every rank waits for this first.

    number: of this pass's signature. base: a bf16 argument as aligned as the buffers. Nobody reads the last pass's rows any more: a launch ends when
    all ranks have pulled theirs (rule 5).
    """
    peers = peers_of(flags.control)
    lanes = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    if _pulls_dy(s):
        stage_rows(s, dy, dy_stride_8, rows_at(base, gl.load(peers + OWN_DY)), VECTORS)
        for first in range(gl.program_id(0) * 128, s.T * K, gl.num_programs(0) * 128):
            slot = first + lanes
            value = gl.load(topk_weights + slot, mask=slot < s.T * K, other=0.0)
            gl.store(float_of(gl.load(peers + OWN_WEIGHTS), slot), value, mask=slot < s.T * K)
    if _pulls_x(s, RECOMPUTE):
        stage_rows(s, x, x_stride_8, rows_at(base, gl.load(peers + OWN_X)), VECTORS)
    nap(gl.program_id(0) * 37 + number, DEBUG)
    thread_barrier()                          # the CTA's stores before its arrival ...
    staged = gl.atomic_add(flags.x_ready + num_experts, 1, sem="acq_rel", scope="gpu")
    if staged == gl.num_programs(0) - 1:      # ... and every CTA's arrival before the signals (rule 3)
        rank = gl.load(peers + PEER_RANK).to(gl.int32)
        for r in range(peer_count(peers)):
            gl.atomic_xchg(word_of(gl.load(peers + PEER_PAGE + r), rank + GRADS_PASS), number, sem="relaxed", scope="sys")
        signal_all(flags.control, GRADS_READY, _epoch(flags.control))
    thread_barrier()                          # `staged` reached all threads through memory that the roles' arguments are about to fill


@gluon.jit
def _compare_passes(control, number):
    """Report a rank that has come with another pass. Its word stays until this rank has sent, so nobody's next pass is taken for this one."""
    if load_acquire(control + fresh(CONTROL_ABORT)) == 0:
        for r in range(peer_count(peers_of(control))):
            other = gl.load(own_page(control) + GRADS_PASS + r, volatile=True)
            if other != number:
                report_timeout(control, WAIT_SIGNATURE, r, number, other)


@gluon.jit
def _pull_weights(rows, m, control, piece, NW: gl.constexpr):
    """Routing weights of 16 rows, 0 for padding, to where the epilogue looks them up by row."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    row = piece * PIECE_ROWS + gl.arange(0, PIECE_ROWS, layout=L)
    there, home, slot = home_of(rows.row_to_slot, m.row_to_rank, row)
    source = float_of(gl.load(peers_of(control) + PEER_WEIGHTS + home), slot)
    gl.store(rows.topk_weights + row, gl.load(source, mask=there, other=0.0))


@gluon.jit
def _push_weight_gradients(s, rows, flags, m, dy_rows, NW: gl.constexpr):
    """d_topk_weights of every row into its slot at home: the sums of `_slot_pieces`, by row. After an abort nothing is written to peers."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    D: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [1, 32], [NW, 1], [1, 0]))
    num_rows = s.num_tiles * TILE_M
    routed = num_rows * 0 - 1
    columns = dh_columns(s, routed)
    for first in range(this_cta(s.T) * SLOT_PIECE, num_rows, grid_size(s.T) * SLOT_PIECE):
        alive = gl.load(flags.control + fresh(CONTROL_ABORT), volatile=True) == 0
        if m.has_b_down == 0:
            row = first + gl.arange(0, SLOT_PIECE, layout=L)
            there, home, slot = home_of(rows.row_to_slot, m.row_to_rank, row)
            total = _sum_partials(s, rows, flags, routed, columns, row, there)
            gl.store(float_of(gl.load(peers_of(flags.control) + PEER_WEIGHT_SLOTS + home), slot), total, mask=there & alive)
        else:
            for j in range(SLOT_PIECE // SUM_ROWS):
                row = first + j * SUM_ROWS + gl.arange(0, SUM_ROWS, layout=D)
                there, home, slot = home_of(rows.row_to_slot, m.row_to_rank, row)
                total = _sum_partials(s, rows, flags, routed, columns, row, there)
                expert = gl.load(rows.tile_to_expert + row // TILE_M, mask=there, other=0)
                total += _dots(dy_rows + row.to(gl.int64) * s.H, m.b_down + expert.to(gl.int64) * s.H, there, s.H, SUM_ROWS, NW)
                gl.store(float_of(gl.load(peers_of(flags.control) + PEER_WEIGHT_SLOTS + home), slot), total, mask=there & alive)


@gluon.jit
def _take_weight_gradients(s, flags, m, NW: gl.constexpr):
    """d_topk_weights[t, k] from its slot, where its expert's rank has put it; 0 for a route without expert."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    num_slots = s.T * m.K
    for first in range(this_cta(s.T) * SLOT_PIECE, num_slots, grid_size(s.T) * SLOT_PIECE):
        slot = first + gl.arange(0, SLOT_PIECE, layout=L)
        row = gl.load(m.slot_to_row + slot, mask=slot < num_slots, other=-1)
        total = gl.load(float_of(gl.load(peers_of(flags.control) + OWN_WEIGHT_SLOTS), slot), mask=row >= 0, other=0.0)
        gl.store(m.d_topk_weights + slot, total, mask=slot < num_slots)


@gluon.jit
def _of_wave(launch, waves, NW: gl.constexpr, RECOMPUTE: gl.constexpr):
    """A mover's own (schedule, Rows, Sums), with waves those of this one; launch: the same, of the whole launch.

    Made anew for each thing that a mover does. A wave's are no kernel arguments: kept through the role, they lie on the stack (48 bytes, Triton 3.9).
    """
    s, rows, m = launch
    if RECOMPUTE == Z_AGAIN:
        w = waves[0].wave
        widths, T, num_shared, group_tiles, wants = waves[2]
        s = backward_schedule_of_wave(widths, fresh(T), fresh(num_shared), fresh(group_tiles), fresh(wants), rows.tile_to_expert, rows.expert_offsets,
                                      fresh(m.num_experts), w, NW)
        begin = first_tile(w, NW)
        rows = Rows(rows.tile_to_expert + begin, rows.expert_offsets, rows.tokens_per_expert, rows.row_to_slot + begin * TILE_M, rows.topk_weights, rows.gates,
                    rows.features, rows.partials, rows.main_up, rows.main_down, rows.activation, rows.limit)
        m = Sums(m.dx, m.results, m.shared_results_row, m.slot_to_row, m.d_topk_weights, m.b_down, m.has_b_down, m.dz, m.db_up, m.db_down, m.gate_0, m.gate_1,
                 m.d_gate_0, m.d_gate_1, m.gate_slopes, m.K, m.num_experts, m.row_to_rank + begin * TILE_M)
    return own(s), rows, m


@gluon.jit
def _send_home(s, rows, flags, m, dy_rows, NW: gl.constexpr, DEBUG: gl.constexpr):
    """Push this rank's gradients of routing weights to their homes, tell all ranks once rows of dx are there too, and wait until all have told."""
    epoch = _epoch(flags.control)
    nap(s.num_tiles + 17, DEBUG)
    if (s.wants & WANT_TOPK) != 0:
        _push_weight_gradients(s, rows, flags, m, dy_rows, NW)
    if (s.wants & WANT_X) != 0:
        # A DX task is counted behind its rows, which the storer has sent home.
        wait_at_least(flags.totals + DX_DONE, all_dx_tasks(s), flags.control, WAIT_ALL_DX, s.T)
    thread_barrier()                          # the role's pulls and pushes before its arrival, whomever that tells
    sent = gl.atomic_add(flags.x_ready + m.num_experts + 1, 1, sem="acq_rel", scope="gpu")
    # ... and every CTA's arrival before the signal (rule 3). A CTA that skipped a push has seen the abort flag; peers then wait for this rank's word.
    if (sent == grid_size(s.T) - 1) & (load_acquire(flags.control + fresh(CONTROL_ABORT)) == 0):
        signal_all(flags.control, GRADS_SENT, epoch)
    wait_for_all(flags.control, GRADS_SENT, epoch, WAIT_PEER_SENT, True)
    thread_barrier()


@gluon.jit
def group_mover(s, rows, flags, m, x, dy_rows, x_rows, number, waves, COPY_ROWS_AT_ONCE: gl.constexpr, VECTORS: gl.constexpr, NW: gl.constexpr,
                RECOMPUTE: gl.constexpr, OMIT: gl.constexpr, DEBUG: gl.constexpr):
    """What `mover` does on one rank. x: this rank's tokens, for the gates; number: of this pass's signature.

    waves, with waves: (Carry, a descriptor, what `backward_schedule_of_wave` makes a wave's schedule of: widths, T, num_shared, group_tiles, wants); rows and
    m are those of the whole plan then, and s is not used.
    """
    launch = (s, rows, m)
    s, rows, m = _of_wave(launch, waves, NW, RECOMPUTE)
    if RECOMPUTE == Z_AGAIN and wave_index(waves[0].wave, NW) == 0:
        count_waves(flags.control, waves[0].wave)
    if gated(rows) != 0:
        _gates(s, rows, flags, x, m, NW, DEBUG)
    wait_for_all(flags.control, GRADS_READY, _epoch(flags.control), WAIT_PEER_GRADS)
    if this_cta(s.T) == 0:
        _compare_passes(flags.control, number)
    thread_barrier()
    s, rows, m = _of_wave(launch, waves, NW, RECOMPUTE)
    pieces = s.num_tiles * COPY_PARTS
    if _pulls_dy(s):
        for piece in range(this_cta(s.T), pieces, grid_size(s.T)):
            nap(piece + 11, DEBUG)
            if RECOMPUTE and OMIT & 2 == 0 and _pulls_x(s, RECOMPUTE):
                # fresh: the places of this copy are not kept for the next one (120 bytes of stack)
                _copy_piece(s, rows, x, x_rows, fresh(piece), m, flags.control, PEER_X, COPY_ROWS_AT_ONCE, NW)
            if OMIT & 1 == 0:
                _copy_piece(s, rows, x, dy_rows, piece, m, flags.control, PEER_DY, COPY_ROWS_AT_ONCE, NW)
            _pull_weights(rows, m, flags.control, piece, NW)
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
                _copy_piece(s, rows, x, x_rows, piece, m, flags.control, PEER_X, COPY_ROWS_AT_ONCE, NW)
            fence_proxy(piece)               # rule 1, writer
            thread_barrier()
            add_release(counter, 1)
    s, rows, m = _of_wave(launch, waves, NW, RECOMPUTE)
    wait_at_least(flags.totals + DH_DONE, all_dh_tasks(s), flags.control, WAIT_ALL_DH, s.T)
    thread_barrier()
    if RECOMPUTE == Z_AGAIN and is_last(waves[0].wave, NW) == 0:
        _end_wave(launch, flags, dy_rows, waves, NW)
    else:
        _end_pass(launch, flags, x, dy_rows, waves, VECTORS, NW, RECOMPUTE, DEBUG)


@gluon.jit
def _end_wave(launch, flags, dy_rows, waves, NW: gl.constexpr):
    """The end of a wave that others follow: pushes, and the sums over rows that the next one goes on with. Nobody is told, nothing is summed at home."""
    s, rows, m = _of_wave(launch, waves, NW, Z_AGAIN)
    if (s.wants & WANT_TOPK) != 0:
        _push_weight_gradients(s, rows, flags, m, dy_rows, NW)
    thread_barrier()                          # the role's pulls before its arrival
    s, rows, m = _of_wave(launch, waves, NW, Z_AGAIN)
    if (s.wants & (WANT_BIAS_UP | WANT_BIAS_DOWN)) != 0:
        add_release(flags.x_ready + m.num_experts + 1, 1)
        wait_at_least(flags.x_ready + m.num_experts + 1, grid_size(s.T), flags.control, WAIT_WAVE, s.num_tiles)     # all rows of dy have been pulled
        thread_barrier()
        _bias_sums_of_wave(s, rows, m, Source(dy_rows, s.H), waves[0], NW)


@gluon.jit
def _end_pass(launch, flags, x, dy_rows, waves, VECTORS: gl.constexpr, NW: gl.constexpr, RECOMPUTE: gl.constexpr, DEBUG: gl.constexpr):
    """The end of a pass: pushes, and once all ranks have sent theirs the sums."""
    s, rows, m = _of_wave(launch, waves, NW, RECOMPUTE)
    if gated(rows) != 0:
        _gate_slopes(s, rows, flags, m, NW)
    s, rows, m = _of_wave(launch, waves, NW, RECOMPUTE)
    _send_home(s, rows, flags, m, dy_rows, NW, DEBUG)
    s, rows, m = _of_wave(launch, waves, NW, RECOMPUTE)
    if (s.wants & WANT_TOPK) != 0:
        _take_weight_gradients(s, flags, m, NW)
    s, rows, m = _of_wave(launch, waves, NW, RECOMPUTE)
    finish_dx(s, rows, flags, m, VECTORS, NW, 1, DEBUG)
    s, rows, m = _of_wave(launch, waves, NW, RECOMPUTE)
    if (s.wants & (WANT_BIAS_UP | WANT_BIAS_DOWN)) != 0:
        # every row of dy has been pulled: this rank has sent, too
        if RECOMPUTE == Z_AGAIN:
            _bias_sums_of_wave(s, rows, m, Source(dy_rows, s.H), waves[0], NW)
        else:
            _bias_sums(s, rows, m, Source(dy_rows, s.H), NW, 1)
    s, rows, m = _of_wave(launch, waves, NW, RECOMPUTE)
    if gated(rows) != 0:
        _gate_weight_sums(s, rows, m, x, NW)
