"""The producer of the backward kernel: walks the task sequence, waits for inputs, loads both operands by TMA, and tells the other roles."""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .backward_pipe import (
    CHUNK,
    COPY_PARTS,
    DH_DONE,
    NUM_STAGES,
    STEP_BYTES,
    TASK_BEGUN,
    TASK_COLUMN,
    TASK_END,
    TASK_IDLE,
    TASK_MARKS,
    TASK_Z,
    WAIT_ALL_DH,
    WAIT_DY,
    WAIT_DZ,
    WAIT_X,
    WAIT_Z,
    Z_BYTES,
    Z_STEPS,
    gated,
    has_store_step,
    k_steps,
    phase_of,
    push_task,
    stage_of,
    z_done,
)
from .backward_tasks import (
    BLOCK_K,
    DH,
    DW_UP,
    DX,
    HALF_N,
    TILE_M,
    TILE_N,
    WANT_Z,
    Z_AGAIN,
    Z,
    all_dh_tasks,
    counter_of,
    dh_columns,
    locate,
    own,
    seek,
    width_of,
    z_columns,
)
from .backward_waves import rows_in_wave
from .compat import tma_load
from .gemm import second_half_is_padding, take_task
from .sync import apart, fence_proxy, load_acquire, nap, wait_at_least


@gluon.jit
def _stage(pipe, it, BYTES: gl.constexpr):
    """Wait for a stage to be free and announce its bytes: (stage, its barrier)."""
    stage = stage_of(it)
    mbarrier.wait(pipe.load_empty.index(stage), phase_of(it) ^ 1)
    ready = pipe.load_ready.index(stage)
    mbarrier.expect(ready, BYTES)
    return stage, ready


@gluon.jit
def _box(desc, part, row, column, ready, chunk, RANK: gl.constexpr):
    """One 64 x 64 box; `part` is the leading coordinate (half or expert) of descriptors of rank 3."""
    if RANK == 2:
        tma_load(desc, [row, column], ready, chunk)
    else:
        tma_load(desc, [part, row, column], ready, chunk.reshape([1, CHUNK, CHUNK]))


@gluon.jit
def _load_up(x_desc, w_desc, expert, row, column, begin, end, pipe, it, RANK_W: gl.constexpr):
    """k-steps begin..end-1 of Z: A = 128 rows of x, B = 128 rows of w_gate_up's gate half, then the same of its up half, x 64 columns (of H)."""
    for k in range(begin, end):
        stage, ready = _stage(pipe, it, STEP_BYTES)
        for w in gl.static_range(2):
            _box(x_desc, 0, row + w * CHUNK, k * BLOCK_K, ready, pipe.a.index(2 * stage + w), 2)
        for j in gl.static_range(4):
            chunk = pipe.chunks.index(4 * stage + j)
            at = column * HALF_N + j % 2 * CHUNK
            if RANK_W == 4:
                tma_load(w_desc, [expert, j // 2, at, k * BLOCK_K], ready, chunk.reshape([1, 1, CHUNK, CHUNK]))
            else:
                tma_load(w_desc, [j // 2, at, k * BLOCK_K], ready, chunk.reshape([1, CHUNK, CHUNK]))
        it += 1
    return it


@gluon.jit
def _load_dh(dy_desc, w_desc, expert, row, column, begin, end, pipe, it, RANK_W: gl.constexpr):
    """k-steps begin..end-1 of DH: A = 128 rows of dy, B = 64 rows (of H) x 256 columns of w_down[expert]."""
    for k in range(begin, end):
        stage, ready = _stage(pipe, it, STEP_BYTES)
        for w in gl.static_range(2):
            _box(dy_desc, 0, row + w * CHUNK, k * BLOCK_K, ready, pipe.a.index(2 * stage + w), 2)
        for j in gl.static_range(4):
            _box(w_desc, expert, k * BLOCK_K, column * TILE_N + j * CHUNK, ready, pipe.chunks.index(4 * stage + j), RANK_W)
        it += 1
    return it


@gluon.jit
def _load_z(z_desc, row, column, pipe, it):
    """The z-steps that end a DH task."""
    for c in range(Z_STEPS):
        stage, ready = _stage(pipe, it, Z_BYTES)
        at = column * TILE_N + c * CHUNK
        for w in gl.static_range(2):
            _box(z_desc, 0, row + w * CHUNK, at, ready, pipe.a.index(2 * stage + w), 3)
            _box(z_desc, 1, row + w * CHUNK, at, ready, pipe.chunks.index(4 * stage + w), 3)
        it += 1
    return it


@gluon.jit
def _load_dx(dz_desc, w_desc, expert, row, column, steps, begin, end, pipe, it, RANK_W: gl.constexpr):
    """k-steps begin..end-1 of DX's `steps`: A = 128 rows of dz, B = 64 rows (of 2I, first all of gate, then all of up) x 256 columns of w_gate_up."""
    for k in range(begin, end):
        stage, ready = _stage(pipe, it, STEP_BYTES)
        half = (2 * k >= steps).to(gl.int32)
        at = (k - half * (steps // 2)) * BLOCK_K
        for w in gl.static_range(2):
            _box(dz_desc, half, row + w * CHUNK, at, ready, pipe.a.index(2 * stage + w), 3)
        for j in gl.static_range(4):
            chunk = pipe.chunks.index(4 * stage + j)
            if RANK_W == 4:
                tma_load(w_desc, [expert, half, at, column * TILE_N + j * CHUNK], ready, chunk.reshape([1, 1, CHUNK, CHUNK]))
            else:
                tma_load(w_desc, [half, at, column * TILE_N + j * CHUNK], ready, chunk.reshape([1, CHUNK, CHUNK]))
        it += 1
    return it


@gluon.jit
def _load_weight(a_desc, b_desc, part, a_row, a_column, b_row, b_column, begin, end, pipe, it, RANK_A: gl.constexpr):
    """k-steps begin..end-1 of a weight gradient: A = 64 rows of (dz or dy) x 128 columns, B = the same rows of (x or w*h) x 256 columns."""
    for k in range(begin, end):
        stage, ready = _stage(pipe, it, STEP_BYTES)
        for w in gl.static_range(2):
            _box(a_desc, part, a_row + k * BLOCK_K, a_column + w * CHUNK, ready, pipe.a.index(2 * stage + w), RANK_A)
        for j in gl.static_range(4):
            _box(b_desc, 0, b_row + k * BLOCK_K, b_column + j * CHUNK, ready, pipe.chunks.index(4 * stage + j), 2)
        it += 1
    return it


@gluon.jit
def _load_steps(s, pipe, it, place, steps, begin, end, routed, shared_0, shared_1, tokens_desc, RECOMPUTE: gl.constexpr):
    """k-steps begin..end-1 of the task at `place` = (kind, slot, tile, column, expert, first row of the expert)."""
    kind, slot, tile, column, expert, first = place
    dy_rows_desc, x_rows_desc, _, dz_desc, wh_desc, up_desc, down_desc = routed
    _, shared_up_0, shared_down_0 = shared_0
    _, shared_up_1, shared_down_1 = shared_1
    dy_desc, x_desc, shared_dz_desc, shared_wh_desc = tokens_desc
    shared_row = slot * s.token_tiles * TILE_M
    if RECOMPUTE and kind == Z:
        if slot < 0:
            it = _load_up(x_rows_desc, up_desc, expert, tile * TILE_M, column, begin, end, pipe, it, 4)
        elif slot == 0:
            it = _load_up(x_desc, shared_up_0, expert, tile * TILE_M, column, begin, end, pipe, it, 3)
        else:
            it = _load_up(x_desc, shared_up_1, expert, tile * TILE_M, column, begin, end, pipe, it, 3)
    elif kind == DH:
        if slot < 0:
            it = _load_dh(dy_rows_desc, down_desc, expert, tile * TILE_M, column, begin, end, pipe, it, 3)
        elif slot == 0:
            it = _load_dh(dy_desc, shared_down_0, expert, tile * TILE_M, column, begin, end, pipe, it, 2)
        else:
            it = _load_dh(dy_desc, shared_down_1, expert, tile * TILE_M, column, begin, end, pipe, it, 2)
    elif kind == DX:
        if slot < 0:
            it = _load_dx(dz_desc, up_desc, expert, tile * TILE_M, column, steps, begin, end, pipe, it, 4)
        elif slot == 0:
            it = _load_dx(shared_dz_desc, shared_up_0, expert, tile * TILE_M + shared_row, column, steps, begin, end, pipe, it, 3)
        else:
            it = _load_dx(shared_dz_desc, shared_up_1, expert, tile * TILE_M + shared_row, column, steps, begin, end, pipe, it, 3)
    elif kind == DW_UP:
        half_tiles = gl.cdiv(width_of(s, slot), TILE_M)
        half = (tile >= half_tiles).to(gl.int32)
        at = (tile - half * half_tiles) * TILE_M
        if slot < 0:
            it = _load_weight(dz_desc, x_rows_desc, half, first, at, first, column * TILE_N, begin, end, pipe, it, 3)
        else:
            it = _load_weight(shared_dz_desc, x_desc, half, shared_row, at, 0, column * TILE_N, begin, end, pipe, it, 3)
    else:
        if slot < 0:
            it = _load_weight(dy_rows_desc, wh_desc, 0, first, tile * TILE_M, first, column * TILE_N, begin, end, pipe, it, 2)
        else:
            it = _load_weight(dy_desc, shared_wh_desc, 0, 0, tile * TILE_M, shared_row, column * TILE_N, begin, end, pipe, it, 2)
    return it


@gluon.jit
def _store_step(pipe, it):
    """Hand one free stage to the consumers for their results: no bytes, so its barrier completes with this arrival."""
    stage = stage_of(it)
    mbarrier.wait(pipe.load_empty.index(stage), phase_of(it) ^ 1)
    mbarrier.arrive(pipe.load_ready.index(stage))
    return it + 1


@gluon.jit
def _input_counter(s, rows, flags, kind, slot, tile, expert, x_pieces, all_dh, RECOMPUTE: gl.constexpr):
    """(counter, target) that a task's operands wait for; a weight gradient's dz, dy and w*h are there when all DH tasks are (all_dh).

    With RECOMPUTE a Z task waits for what a DH task waits for otherwise (movers publish a piece of x and dy together), and DH for its tile's Z tasks:
    what those had acquired (dy, gates) is then there as well.
    """
    has_gate = (slot >= 0) & (((gated(rows) >> gl.maximum(slot, 0)) & 1) != 0)
    dh_pointer = gl.where(slot < 0, flags.dy_ready, flags.gates_ready) + tile
    dh_target = gl.where((slot < 0) | has_gate, COPY_PARTS, 0)
    dx_pointer = flags.dh_ready + counter_of(s, slot, gl.where(kind == DX, tile, 0), flags.capacity)
    routed_up = (kind == DW_UP) & (slot < 0)
    weight_pointer = gl.where(routed_up, flags.x_ready + expert, flags.totals + DH_DONE)
    weight_target = gl.where(routed_up, x_pieces, all_dh)
    counter = gl.where(kind == DX, dx_pointer, gl.where(kind == DH, dh_pointer, weight_pointer))
    target = gl.where(kind == DX, dh_columns(s, slot), gl.where(kind == DH, dh_target, weight_target))
    if RECOMPUTE:
        z_ready = z_done(s, flags) + 1 + counter_of(s, slot, gl.where(kind == DH, tile, 0), flags.capacity)
        z_target = z_columns(s, slot, RECOMPUTE)
        if RECOMPUTE == Z_AGAIN:
            z_ready = gl.where(z_target > 0, z_ready, dh_pointer)     # what forward saved, or a shared expert's: only dy and gates are waited for
            z_target = gl.where(z_target > 0, z_target, dh_target)
        counter = gl.where(kind == Z, dh_pointer, gl.where(kind == DH, z_ready, counter))
        target = gl.where(kind == Z, dh_target, gl.where(kind == DH, z_target, target))
    return counter, target


@gluon.jit
def _wait_inputs(flags, kind, slot, counter, target, seen, tile, all_dh, dh_complete, RECOMPUTE: gl.constexpr):
    """Rules 1 and 2, reader: acquire by polling, before the proxy fence and the TMA loads of the same thread. Returns dh_complete: 1 once this
    thread has acquired the last DH task, so that the weight gradients after it need not look again."""
    if seen < target:
        if RECOMPUTE and kind == DH:
            wait_at_least(counter, target, flags.control, WAIT_Z, tile)
        elif kind == (Z if RECOMPUTE else DH):
            wait_at_least(counter, target, flags.control, WAIT_DY, tile)
        elif kind == DX:
            wait_at_least(counter, target, flags.control, WAIT_DZ, tile)
        else:
            wait_at_least(counter, target, flags.control, WAIT_X, tile)
    if (kind == DW_UP) & (slot < 0) & (dh_complete == 0):
        wait_at_least(flags.totals + DH_DONE, all_dh, flags.control, WAIT_ALL_DH, tile)
    return gl.where(kind >= DW_UP, 1, dh_complete)


@gluon.jit
def _plan_of(s, rows, phase, kind, slot, tile, expert, waves, RECOMPUTE: gl.constexpr):
    """(expert, its rows, its first row) of a task; zeros where that does not apply. With waves its rows in this one, and marks(first_row) of them."""
    live = phase < s.num_phases
    routed_pair = live & (kind <= DX) & (slot < 0)
    weight = live & (kind >= DW_UP) & (slot < 0)
    e = gl.where(routed_pair, gl.load(rows.tile_to_expert + tile, mask=routed_pair, other=0), gl.where(weight, expert, 0))
    if RECOMPUTE == Z_AGAIN:
        tokens, first, marks = rows_in_wave(rows.expert_offsets, rows.tokens_per_expert, e, waves[0].wave, weight, 1)
        first += marks
    else:
        tokens = gl.load(rows.tokens_per_expert + e, mask=weight, other=0)
        first = gl.load(rows.expert_offsets + e, mask=weight, other=0).to(gl.int32)
    return e, tokens, first


@gluon.jit
def producer(s, rows, flags, pipe, tasks, routed, shared_0, shared_1, tokens_desc, waves, RECOMPUTE: gl.constexpr, DEBUG: gl.constexpr):
    """Loads both operands of every task, in order. descriptors: routed = (dy_rows, x_rows, z, dz, wh, w_up, w_down), shared_i = (z, w_up, w_down),
    tokens_desc = (dy, x, shared dz, shared wh). waves: with them (Carry, descriptor of the z that is made again)."""
    s = own(s)
    it = gl.program_id(0) * 0
    all_dh = all_dh_tasks(s)
    taken = take_task(flags.totals)
    phase, index = seek(s, it, taken, RECOMPUTE)
    kind, slot, tile, column, expert = locate(s, phase, index, RECOMPUTE)
    expert, tokens, first = _plan_of(s, rows, phase, kind, slot, tile, expert, waves, RECOMPUTE)
    idle = second_half_is_padding(rows.row_to_slot, gl.where(kind <= DX, slot, 0), tile, phase < s.num_phases)
    seen = it - 1
    count = it
    dh_complete = it
    while phase < s.num_phases:
        steps = k_steps(s, kind, slot, tokens, RECOMPUTE)
        bits = kind
        if RECOMPUTE:
            bits = gl.where(kind == Z, TASK_Z, kind)
        if RECOMPUTE == Z_AGAIN:
            bits += first & TASK_MARKS
            first = first & (TASK_BEGUN - 1)
        push_task(tasks, count, bits + (slot + 1) * 4 + gl.where(idle, TASK_IDLE, 0) + column * TASK_COLUMN, tile, steps, expert)
        count += 1
        nap(index + phase, DEBUG)
        counter, target = _input_counter(s, rows, flags, kind, slot, tile, expert, gl.cdiv(tokens, TILE_M) * COPY_PARTS, all_dh, RECOMPUTE)
        dh_complete = _wait_inputs(flags, kind, slot, counter, target, seen, tile, all_dh, dh_complete, RECOMPUTE)
        fence_proxy(tile)
        place = (kind, slot, tile, column, expert, first)
        filled = gl.minimum(steps, NUM_STAGES)
        it = _load_steps(s, pipe, it, place, steps, 0, filled, routed, shared_0, shared_1, tokens_desc, RECOMPUTE)
        # The ring is full: now there is time to work out the next task and to look at what it waits for.
        after = take_task(flags.totals)
        next_phase, next_index = seek(s, phase, index + after - taken, RECOMPUTE)
        taken = after
        next_kind, next_slot, next_tile, next_column, next_expert = locate(s, next_phase, next_index, RECOMPUTE)
        next_expert, next_tokens, next_first = _plan_of(s, rows, next_phase, next_kind, next_slot, next_tile, next_expert, waves, RECOMPUTE)
        next_idle = second_half_is_padding(rows.row_to_slot, gl.where(next_kind <= DX, next_slot, 0), next_tile, next_phase < s.num_phases)
        next_counter, _ = _input_counter(s, rows, flags, next_kind, next_slot, next_tile, next_expert, it, all_dh, RECOMPUTE)
        seen = load_acquire(gl.where(next_phase < s.num_phases, next_counter, counter))
        it = _load_steps(s, pipe, it, place, steps, filled, steps, routed, shared_0, shared_1, tokens_desc, RECOMPUTE)
        if kind == DH:
            if RECOMPUTE == Z_AGAIN and (slot < 0) & ((s.wants & WANT_Z) != 0):
                it = apart(_load_z(waves[1], tile * TILE_M, column, pipe, it), "z_again_desc")
            elif slot < 0:
                it = _load_z(routed[2], tile * TILE_M, column, pipe, it)
            elif slot == 0:
                it = _load_z(shared_0[0], tile * TILE_M, column, pipe, it)
            else:
                it = _load_z(shared_1[0], tile * TILE_M, column, pipe, it)
        if has_store_step(rows, kind, slot, bits, RECOMPUTE):
            it = _store_step(pipe, it)
        phase, index, kind, slot, tile, column = next_phase, next_index, next_kind, next_slot, next_tile, next_column
        expert, tokens, first, idle = next_expert, next_tokens, next_first, next_idle
    push_task(tasks, count, it * 0 + TASK_END, it, it, it)
