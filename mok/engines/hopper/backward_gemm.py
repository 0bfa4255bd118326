"""GEMM side of the backward kernel: producer, the two tensor-core consumers with their epilogues, storer.

One task is a 128 x 256 tile of one of the kinds of backward_tasks.py. Consumer w computes rows 64w..64w+63 of it as one 64 x 256 accumulator.
Every TMA box is 64 x 64. In shared memory a stage is six such chunks of 8 KB: two of A (one for each consumer) and four of B. B's columns are
contiguous in memory in all four kinds, so wgmma reads it transposed ("MN-major"); A likewise in the weight gradients.

A DH task ends with four z-steps, one for each 64 columns of its tile, which go through the same stages: z_gate arrives in A's two chunks, z_up in
B's first two. Each thread of a consumer replaces what it reads by dz_gate and dz_up, and puts w*h into B's last two chunks; the storer stores
all six from there. So this epilogue, ten tiles of traffic for one of accumulators, needs no shared memory of its own. Every other task ends with one
store step: a stage without loads, into which each consumer puts the right half of its result while its own two chunks take the left half, so that
it hands over all of it at once and goes on.

Barriers in shared memory (all mbarriers; phase of use i of a ring of N is (i // N) & 1):
  load_ready[s]   the TMA engine has filled stage s                                              producer -> consumers
  load_empty[s]   stage s may be filled again (count 2): both consumers have multiplied it, or the storer has stored what they put there
  z_done[s]       both consumers have rewritten the z-step in stage s (count 2)                  consumers -> storer
  out_full[w]     consumer w has put its 64 x 256 result into its two chunks and the store step   consumer w -> storer
  out_empty[w]    the TMA engine has read all of it                                               storer -> consumer w
  lead            consumer 0 has finished the first STAGGER k-steps of a task                     consumer 0 -> consumer 1
  tasks.full/empty[q]  record q of the task queue is written / read by its three readers          producer -> consumers, storer
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from .backward_tasks import (
    BLOCK_K,
    DH,
    DW_UP,
    DX,
    TILE_M,
    TILE_N,
    WANT_DOWN,
    WANT_X,
    all_dh_tasks,
    counter_of,
    dh_columns,
    locate,
    product_needed,
    seek,
    shared_wants,
    width_of,
)
from .compat import aggregate, thread_barrier, tma_load, tma_store, tma_store_wait
from .gemm import ACT_GEGLU, ACT_REGLU, ACT_SWIGLU_OAI, LOG2_E, _halves, activate, second_half_is_padding
from .sync import add_release, fence_proxy, load_acquire, nap, stores_complete, wait_at_least

NUM_STAGES = gl.constexpr(4)
CHUNK = gl.constexpr(64)
Z_STEPS = gl.constexpr(4)                # TILE_N / CHUNK
STEP_BYTES = gl.constexpr(49152)         # six chunks: TMA counts whole boxes, also where they hang over an edge
Z_BYTES = gl.constexpr(32768)            # four chunks
COPY_PARTS = gl.constexpr(8)             # pieces of 16 rows in which movers fill a row tile

# Which code the DH epilogue has: one binary each. CLAMPED: SwiGLU with a limit, and gpt-oss's variant
PLAIN_SWIGLU, CLAMPED, GEGLU, REGLU = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)

# What a role waited for, as the error word names it; the same numbers as launch.WAITS
WAIT_DY = gl.constexpr(11)
WAIT_GATES = gl.constexpr(12)
WAIT_DZ = gl.constexpr(13)
WAIT_ALL_DH = gl.constexpr(14)
WAIT_X = gl.constexpr(15)
WAIT_ALL_DX = gl.constexpr(16)
WAIT_SLOTS = gl.constexpr(17)
WAIT_FINISH = gl.constexpr(18)


@aggregate
class BackwardPipe:
    """Shared memory of a CTA: load stages and barriers. `chunks` is b seen as 64 x 64 chunks."""
    a: gl.shared_memory_descriptor        # (2 * NUM_STAGES, 64, 64)
    b: gl.shared_memory_descriptor        # (NUM_STAGES, 64, 256)
    chunks: gl.shared_memory_descriptor   # (4 * NUM_STAGES, 64, 64)
    load_ready: gl.shared_memory_descriptor
    load_empty: gl.shared_memory_descriptor
    z_done: gl.shared_memory_descriptor
    lead: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, a, b, chunks, load_ready, load_empty, z_done, lead):
        self.a = a
        self.b = b
        self.chunks = chunks
        self.load_ready = load_ready
        self.load_empty = load_empty
        self.z_done = z_done
        self.lead = lead


@aggregate
class Out:
    """One consumer's two chunks for the left half of its results."""
    chunks: gl.shared_memory_descriptor   # (2, 64, 64)
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, chunks, full, empty):
        self.chunks = chunks
        self.full = full
        self.empty = empty


@aggregate
class Tasks:
    """The producer's next tasks for the other roles, in shared memory: they neither walk the sequence nor hold its sizes in registers.

    A record is four int32: bits (TASK_*) with the column tile above them, tile, k-steps, expert.
    """
    records: gl.shared_memory_descriptor  # (4 * QUEUE, 1)
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor    # count 3: two consumers and the storer

    @gluon.constexpr_function
    def __init__(self, records, full, empty):
        self.records = records
        self.full = full
        self.empty = empty


# bits of a task record: 0-1 kind, 2-3 shared expert + 1, 4 rows 64.. are padding, 5 no more tasks; the column tile from bit 6 on
TASK_IDLE, TASK_END, TASK_COLUMN = gl.constexpr(16), gl.constexpr(32), gl.constexpr(64)
QUEUE = gl.constexpr(4)


@gluon.jit
def _push_task(tasks, count, bits, tile, steps, expert):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    r = count % QUEUE
    mbarrier.wait(tasks.empty.index(r), ((count // QUEUE) & 1) ^ 1)
    tasks.records.index(4 * r).store(gl.full([1], bits, gl.int32, L))
    tasks.records.index(4 * r + 1).store(gl.full([1], tile, gl.int32, L))
    tasks.records.index(4 * r + 2).store(gl.full([1], steps, gl.int32, L))
    tasks.records.index(4 * r + 3).store(gl.full([1], expert, gl.int32, L))
    mbarrier.arrive(tasks.full.index(r))


@gluon.jit
def _pop_task(tasks, count, NW: gl.constexpr):
    """(bits, tile, k-steps, expert) of task number `count` of this CTA."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    r = count % QUEUE
    mbarrier.wait(tasks.full.index(r), (count // QUEUE) & 1)
    bits = gl.max(tasks.records.index(4 * r).load(L), 0)
    tile = gl.max(tasks.records.index(4 * r + 1).load(L), 0)
    steps = gl.max(tasks.records.index(4 * r + 2).load(L), 0)
    expert = gl.max(tasks.records.index(4 * r + 3).load(L), 0)
    mbarrier.arrive(tasks.empty.index(r))
    return bits, tile, steps, expert


@gluon.jit
def _unpack(bits):
    """(kind, shared expert or -1, column tile) of a task record's bits."""
    return bits & 3, ((bits >> 2) & 3) - 1, bits // TASK_COLUMN


@aggregate
class BackwardFlags:
    """Counters in global memory (int32), and the control block that holds the abort flag and the spin limit.

    dy_ready[tile]: COPY_PARTS when a routed tile's rows of dy are there. x_ready[expert]: pieces of x copied for an expert. gates_ready[tile]:
    COPY_PARTS when a token tile's shared gates are there. dh_ready[row tile of counter_of]: DH tasks of a tile that are stored. totals: words
    0 combine ticket, 1 DH tasks stored, 2 DX tasks stored, 3 slot pieces done, 4 CTAs finished.
    """
    totals: gl.tensor
    dy_ready: gl.tensor
    dh_ready: gl.tensor
    gates_ready: gl.tensor
    x_ready: gl.tensor
    control: gl.tensor
    capacity: gl.tensor

    @gluon.constexpr_function
    def __init__(self, totals, dy_ready, dh_ready, gates_ready, x_ready, control, capacity):
        self.totals = totals
        self.dy_ready = dy_ready
        self.dh_ready = dh_ready
        self.gates_ready = gates_ready
        self.x_ready = x_ready
        self.control = control
        self.capacity = capacity


TICKET, DH_DONE, DX_DONE, SLOTS_DONE, FINISHED = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3), gl.constexpr(4)


@aggregate
class Rows:
    """Per-row inputs of the DH epilogue and the plan. gated: bit i = shared expert i has a gate; gates: (num_shared, token rows) fp32.

    partials: fp32 <dh, h> of each (column tile, row); routed first, (columns, capacity rows), then each shared expert, (columns, token rows).
    """
    tile_to_expert: gl.tensor
    expert_offsets: gl.tensor
    tokens_per_expert: gl.tensor
    row_to_slot: gl.tensor
    topk_weights: gl.tensor
    gates: gl.tensor
    gated: gl.tensor
    partials: gl.tensor
    main_up: gl.tensor           # fp32 accumulators, used where into_main_grad
    main_down: gl.tensor
    into_main_grad: gl.tensor
    activation: gl.tensor
    limit: gl.tensor

    @gluon.constexpr_function
    def __init__(self, tile_to_expert, expert_offsets, tokens_per_expert, row_to_slot, topk_weights, gates, gated, partials, main_up, main_down,
                 into_main_grad, activation, limit):
        self.tile_to_expert = tile_to_expert
        self.expert_offsets = expert_offsets
        self.tokens_per_expert = tokens_per_expert
        self.row_to_slot = row_to_slot
        self.topk_weights = topk_weights
        self.gates = gates
        self.gated = gated
        self.partials = partials
        self.main_up = main_up
        self.main_down = main_down
        self.into_main_grad = into_main_grad
        self.activation = activation
        self.limit = limit


@gluon.jit
def k_steps(s, kind, slot, tokens):
    """k-steps of a task. tokens: rows of the expert, for routed weight gradients; the padding of its last 64 rows is zero, further rows are skipped."""
    steps = gl.where(product_needed(s, slot), gl.cdiv(s.H, BLOCK_K), 0)
    steps = gl.where(kind == DX, 2 * gl.cdiv(width_of(s, slot), BLOCK_K), steps)
    return gl.where(kind >= DW_UP, gl.cdiv(gl.where(slot < 0, tokens, s.T), BLOCK_K), steps)


@gluon.jit
def partials_of(s, rows, flags, slot, column, row):
    """Where <dh, h> of a column tile and a row goes."""
    routed = flags.capacity.to(gl.int64) * TILE_M
    shared = (s.token_tiles * TILE_M).to(gl.int64)
    stride = gl.where(slot < 0, routed, shared)
    start = gl.where(slot < 0, 0, gl.cdiv(s.I, TILE_N) * routed) + gl.where(slot == 1, gl.cdiv(s.I_0, TILE_N) * shared, 0)
    return rows.partials + start + column * stride + row


# ---------------------------------------------------------------------------------------------------------------------------------- producer


@gluon.jit
def _stage(pipe, it, BYTES: gl.constexpr):
    """Wait for a stage to be free and announce its bytes: (stage, its barrier)."""
    stage = it % NUM_STAGES
    mbarrier.wait(pipe.load_empty.index(stage), ((it // NUM_STAGES) & 1) ^ 1)
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
def _load_dh(dy_desc, w_desc, z_desc, expert, dy_row, z_row, column, steps, pipe, it, next_counter, RANK_W: gl.constexpr):
    """A = 128 rows of dy; B = 64 rows (of H) x 256 columns of w_down[expert]; then the z-steps. The next task's counter is polled on the way."""
    next_seen = it * 0 - 1
    for k in range(steps):
        stage, ready = _stage(pipe, it, STEP_BYTES)
        for w in gl.static_range(2):
            _box(dy_desc, 0, dy_row + w * CHUNK, k * BLOCK_K, ready, pipe.a.index(2 * stage + w), 2)
        for j in gl.static_range(4):
            _box(w_desc, expert, k * BLOCK_K, column * TILE_N + j * CHUNK, ready, pipe.chunks.index(4 * stage + j), RANK_W)
        it += 1
        if k == NUM_STAGES - 1:
            next_seen = load_acquire(next_counter)
    for c in range(Z_STEPS):
        stage, ready = _stage(pipe, it, Z_BYTES)
        at = column * TILE_N + c * CHUNK
        for w in gl.static_range(2):
            _box(z_desc, 0, z_row + w * CHUNK, at, ready, pipe.a.index(2 * stage + w), 3)
            _box(z_desc, 1, z_row + w * CHUNK, at, ready, pipe.chunks.index(4 * stage + w), 3)
        it += 1
    return it, next_seen


@gluon.jit
def _load_dx(dz_desc, w_desc, expert, dz_row, column, steps, pipe, it, next_counter, RANK_W: gl.constexpr):
    """A = 128 rows of dz; B = 64 rows (of 2I, first all of gate, then all of up) x 256 columns of w_gate_up[expert]."""
    next_seen = it * 0 - 1
    for k in range(steps):
        stage, ready = _stage(pipe, it, STEP_BYTES)
        half = (2 * k >= steps).to(gl.int32)
        at = (k - half * (steps // 2)) * BLOCK_K
        for w in gl.static_range(2):
            _box(dz_desc, half, dz_row + w * CHUNK, at, ready, pipe.a.index(2 * stage + w), 3)
        for j in gl.static_range(4):
            chunk = pipe.chunks.index(4 * stage + j)
            if RANK_W == 4:
                tma_load(w_desc, [expert, half, at, column * TILE_N + j * CHUNK], ready, chunk.reshape([1, 1, CHUNK, CHUNK]))
            else:
                tma_load(w_desc, [half, at, column * TILE_N + j * CHUNK], ready, chunk.reshape([1, CHUNK, CHUNK]))
        it += 1
        if k == NUM_STAGES - 1:
            next_seen = load_acquire(next_counter)
    return it, next_seen


@gluon.jit
def _load_weight(a_desc, b_desc, part, a_row, a_column, b_row, b_column, steps, pipe, it, next_counter, RANK_A: gl.constexpr):
    """A = 64 rows of (dz or dy) x 128 columns, B = the same rows of (x or w*h) x 256 columns."""
    next_seen = it * 0 - 1
    for k in range(steps):
        stage, ready = _stage(pipe, it, STEP_BYTES)
        for w in gl.static_range(2):
            _box(a_desc, part, a_row + k * BLOCK_K, a_column + w * CHUNK, ready, pipe.a.index(2 * stage + w), RANK_A)
        for j in gl.static_range(4):
            _box(b_desc, 0, b_row + k * BLOCK_K, b_column + j * CHUNK, ready, pipe.chunks.index(4 * stage + j), 2)
        it += 1
        if k == NUM_STAGES - 1:
            next_seen = load_acquire(next_counter)
    return it, next_seen


@gluon.jit
def _store_step(pipe, it):
    """Hand one free stage to the consumers for their results: no bytes, so its barrier completes with this arrival."""
    stage = it % NUM_STAGES
    mbarrier.wait(pipe.load_empty.index(stage), ((it // NUM_STAGES) & 1) ^ 1)
    mbarrier.arrive(pipe.load_ready.index(stage))
    return it + 1


@gluon.jit
def has_store_step(rows, kind, slot):
    """Whether a task's result goes through a store step: all but DH and what is added into main_grad."""
    return (kind == DX) | ((kind >= DW_UP) & ((slot >= 0) | (rows.into_main_grad == 0)))


@gluon.jit
def _input_counter(s, rows, flags, kind, slot, tile, expert, x_pieces, all_dh):
    """(counter, target, what) that a task's operands wait for; a weight gradient's dz, dy and w*h are there when all DH tasks are (all_dh)."""
    gated = (slot >= 0) & (((rows.gated >> gl.maximum(slot, 0)) & 1) != 0)
    dh_pointer = gl.where(slot < 0, flags.dy_ready, flags.gates_ready) + tile
    dh_target = gl.where((slot < 0) | gated, COPY_PARTS, 0)
    dx_pointer = flags.dh_ready + counter_of(s, slot, gl.where(kind == DX, tile, 0), flags.capacity)
    routed_up = (kind == DW_UP) & (slot < 0)
    weight_pointer = gl.where(routed_up, flags.x_ready + expert, flags.totals + DH_DONE)
    weight_target = gl.where(routed_up, x_pieces, all_dh)
    counter = gl.where(kind == DX, dx_pointer, gl.where(kind == DH, dh_pointer, weight_pointer))
    target = gl.where(kind == DX, dh_columns(s, slot), gl.where(kind == DH, dh_target, weight_target))
    return counter, target


@gluon.jit
def _wait_inputs(flags, kind, slot, counter, target, seen, tile, all_dh):
    """Rules 1 and 2, reader: acquire by polling, before the proxy fence and the TMA loads of the same thread."""
    if seen < target:
        if kind == DH:
            wait_at_least(counter, target, flags.control, WAIT_DY, tile)
        elif kind == DX:
            wait_at_least(counter, target, flags.control, WAIT_DZ, tile)
        else:
            wait_at_least(counter, target, flags.control, WAIT_X, tile)
    if (kind == DW_UP) & (slot < 0):
        wait_at_least(flags.totals + DH_DONE, all_dh, flags.control, WAIT_ALL_DH, tile)


@gluon.jit
def _plan_of(s, rows, phase, kind, slot, tile, expert):
    """(expert, its rows, its first row, pieces of x that its rows take) of a task; zeros where that does not apply."""
    live = phase < s.num_phases
    routed_pair = live & (kind <= DX) & (slot < 0)
    weight = live & (kind >= DW_UP) & (slot < 0)
    e = gl.where(routed_pair, gl.load(rows.tile_to_expert + tile, mask=routed_pair, other=0), gl.where(weight, expert, 0))
    tokens = gl.load(rows.tokens_per_expert + e, mask=weight, other=0)
    first = gl.load(rows.expert_offsets + e, mask=weight, other=0).to(gl.int32)
    return e, tokens, first


@gluon.jit
def producer(s, rows, flags, pipe, tasks, routed, shared_0, shared_1, tokens_desc, DEBUG: gl.constexpr):
    """Loads both operands of every task, in order. descriptors: routed = (dy_rows, x_rows, z, dz, wh, w_up, w_down), shared_i = (z, w_up, w_down),
    tokens_desc = (dy, x, shared dz, shared wh)."""
    dy_rows_desc, x_rows_desc, z_desc, dz_desc, wh_desc, up_desc, down_desc = routed
    shared_z_0, shared_up_0, shared_down_0 = shared_0
    shared_z_1, shared_up_1, shared_down_1 = shared_1
    dy_desc, x_desc, shared_dz_desc, shared_wh_desc = tokens_desc
    it = gl.program_id(0) * 0
    grid = gl.num_programs(0)
    all_dh = all_dh_tasks(s)
    phase, index = seek(s, it, gl.program_id(0))
    kind, slot, tile, column, expert = locate(s, phase, index)
    expert, tokens, first = _plan_of(s, rows, phase, kind, slot, tile, expert)
    idle = second_half_is_padding(rows.row_to_slot, gl.where(kind <= DX, slot, 0), tile, phase < s.num_phases)
    seen = it - 1
    count = it
    while phase < s.num_phases:
        steps = k_steps(s, kind, slot, tokens)
        _push_task(tasks, count, kind + (slot + 1) * 4 + gl.where(idle, TASK_IDLE, 0) + column * TASK_COLUMN, tile, steps, expert)
        count += 1
        next_phase, next_index = seek(s, phase, index + grid)
        next_kind, next_slot, next_tile, next_column, next_expert = locate(s, next_phase, next_index)
        next_expert, next_tokens, next_first = _plan_of(s, rows, next_phase, next_kind, next_slot, next_tile, next_expert)
        next_idle = second_half_is_padding(rows.row_to_slot, gl.where(next_kind <= DX, next_slot, 0), next_tile, next_phase < s.num_phases)
        counter, target = _input_counter(s, rows, flags, kind, slot, tile, expert, gl.cdiv(tokens, TILE_M) * COPY_PARTS, all_dh)
        next_counter, _ = _input_counter(s, rows, flags, next_kind, next_slot, next_tile, next_expert, it, all_dh)
        next_counter = gl.where(next_phase < s.num_phases, next_counter, counter)
        nap(index + phase, DEBUG)
        _wait_inputs(flags, kind, slot, counter, target, seen, tile, all_dh)
        fence_proxy(tile)
        shared_row = slot * s.token_tiles * TILE_M
        if kind == DH:
            row = tile * TILE_M
            if slot < 0:
                it, seen = _load_dh(dy_rows_desc, down_desc, z_desc, expert, row, row, column, steps, pipe, it, next_counter, 3)
            elif slot == 0:
                it, seen = _load_dh(dy_desc, shared_down_0, shared_z_0, expert, row, row, column, steps, pipe, it, next_counter, 2)
            else:
                it, seen = _load_dh(dy_desc, shared_down_1, shared_z_1, expert, row, row, column, steps, pipe, it, next_counter, 2)
        elif kind == DX:
            row = tile * TILE_M
            if slot < 0:
                it, seen = _load_dx(dz_desc, up_desc, expert, row, column, steps, pipe, it, next_counter, 4)
            elif slot == 0:
                it, seen = _load_dx(shared_dz_desc, shared_up_0, expert, row + shared_row, column, steps, pipe, it, next_counter, 3)
            else:
                it, seen = _load_dx(shared_dz_desc, shared_up_1, expert, row + shared_row, column, steps, pipe, it, next_counter, 3)
        elif kind == DW_UP:
            half_tiles = gl.cdiv(width_of(s, slot), TILE_M)
            half = (tile >= half_tiles).to(gl.int32)
            at = (tile - half * half_tiles) * TILE_M
            if slot < 0:
                it, seen = _load_weight(dz_desc, x_rows_desc, half, first, at, first, column * TILE_N, steps, pipe, it, next_counter, 3)
            else:
                it, seen = _load_weight(shared_dz_desc, x_desc, half, shared_row, at, 0, column * TILE_N, steps, pipe, it, next_counter, 3)
        else:
            at = tile * TILE_M
            if slot < 0:
                it, seen = _load_weight(dy_rows_desc, wh_desc, 0, first, at, first, column * TILE_N, steps, pipe, it, next_counter, 2)
            else:
                it, seen = _load_weight(dy_desc, shared_wh_desc, 0, 0, at, shared_row, column * TILE_N, steps, pipe, it, next_counter, 2)
        if has_store_step(rows, kind, slot):
            it = _store_step(pipe, it)
        phase, index, kind, slot, tile, column = next_phase, next_index, next_kind, next_slot, next_tile, next_column
        expert, tokens, first, idle = next_expert, next_tokens, next_first, next_idle
    _push_task(tasks, count, it * 0 + TASK_END, it, it, it)


# --------------------------------------------------------------------------------------------------------------------------------- consumers


@gluon.jit
def activate_both(g, u, activation, limit, ACT: gl.constexpr):
    """(h, dh/dg, dh/du) in fp32. h is what gemm.activate gives, bit for bit: the same operations in the same order.

    A clamp passes the gradient where its input lies within the limits, their ends included; a NaN counts as inside, so that it reaches the gradient.
    """
    if ACT == PLAIN_SWIGLU:
        grown = 1.0 + gl.exp2(g * -LOG2_E)
        silu = g / grown
        h = silu * u
        sigmoid = _reciprocal(grown)
        slope_g = u * gl.fma(silu, 1.0 - sigmoid, sigmoid)
        slope_u = silu
    elif ACT == GEGLU:
        h = activate(g, u, ACT_GEGLU, limit)
        phi = 0.5 * (1.0 + gl.erf(g * 0.7071067811865476))
        density = gl.exp2(g * g * (-0.5 * LOG2_E)) * 0.3989422804014327
        slope_g = gl.fma(g, density, phi) * u
        slope_u = g * phi
    elif ACT == REGLU:
        h = activate(g, u, ACT_REGLU, limit)
        slope_g = gl.where(g > 0.0, u, 0.0)
        slope_u = gl.where(g <= 0.0, 0.0, g)
    else:
        h = activate(g, u, activation, limit)
        oai = activation == ACT_SWIGLU_OAI
        alpha = gl.where(oai, 1.702, 1.0)
        inside_g = (g > limit) == 0
        inside_u = ((u > limit) | (u < -limit)) == 0
        g = gl.where(inside_g, g, limit)
        u = gl.where(u > limit, limit, gl.where(u < -limit, -limit, u))
        u = gl.where(oai, u + 1.0, u)
        sigmoid = _reciprocal(1.0 + gl.exp2(g * (alpha * -LOG2_E)))
        slope_u = g * sigmoid
        slope_g = gl.where(inside_g, u * sigmoid * gl.fma(alpha * g, 1.0 - sigmoid, 1.0), 0.0)
        slope_u = gl.where(inside_u, slope_u, 0.0)
    return h, slope_g, slope_u


@gluon.jit
def _reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _z_step(dh, weight, valid, rows, pipe, it, LAYOUT: gl.constexpr, WG: gl.constexpr, ACT: gl.constexpr, OMIT: gl.constexpr):
    """64 columns of the DH epilogue, in place: z_gate -> dz_gate, z_up -> dz_up, w*h beside them. Returns <dh, h> of each row.

    Padding rows become zeros whatever z holds there: they are contracted over by the weight gradients.
    """
    stage = it % NUM_STAGES
    mbarrier.wait(pipe.load_ready.index(stage), (it // NUM_STAGES) & 1)
    gate = pipe.a.index(2 * stage + WG)
    up = pipe.chunks.index(4 * stage + WG)
    g = gate.load(LAYOUT).to(gl.float32)
    u = up.load(LAYOUT).to(gl.float32)
    g = gl.where(valid, g, 0.0)                          # every activation gives h = 0 for z = 0, and weight and dh of padding are 0
    u = gl.where(valid, u, 0.0)
    if OMIT & 8 != 0:
        h, slope_g, slope_u = u, g, u
    else:
        h, slope_g, slope_u = activate_both(g, u, rows.activation, rows.limit, ACT)
    h = h.to(gl.bfloat16).to(gl.float32)
    weighted = dh * weight
    gate.store((weighted * slope_g).to(gl.bfloat16))
    up.store((weighted * slope_u).to(gl.bfloat16))
    pipe.chunks.index(4 * stage + 2 + WG).store((h * weight).to(gl.bfloat16))
    fence_async_shared()                                 # these ordinary stores before the TMA store of the storer
    return gl.sum(dh * h, 1)


@gluon.jit
def _multiply(pipe, acc, it, begin, end, WG: gl.constexpr, TRANSPOSED: gl.constexpr):
    """k-steps begin..end-1 of a task: one step stays in flight while the stage of the one before it is given back."""
    for k in range(begin, end):
        stage = it % NUM_STAGES
        mbarrier.wait(pipe.load_ready.index(stage), (it // NUM_STAGES) & 1)
        a = pipe.a.index(2 * stage + WG)
        if TRANSPOSED:
            a = a.permute((1, 0))
        acc = warpgroup_mma(a, pipe.b.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        mbarrier.arrive(pipe.load_empty.index((it + NUM_STAGES - 1) % NUM_STAGES), pred=k > 0)
        it += 1
    return acc, it


@gluon.jit
def _multiply_all(pipe, it, steps, staggered, WG: gl.constexpr, STAGGER: gl.constexpr, TRANSPOSED: gl.constexpr):
    """All k-steps of a task, as four 64 x 64 quarters of its result; consumer 0 tells consumer 1 when it may start."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    HALF: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    QUARTER: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    acc = gl.zeros([CHUNK, TILE_N], gl.float32, ACC)
    if STAGGER > 0 and WG == 0:
        first = gl.minimum(steps, STAGGER)
        acc, it = _multiply(pipe, acc, it, 0, first, WG, TRANSPOSED)
        mbarrier.arrive(pipe.lead.index(0), pred=staggered)
        acc, it = _multiply(pipe, acc, it, first, steps, WG, TRANSPOSED)
    else:
        acc, it = _multiply(pipe, acc, it, 0, steps, WG, TRANSPOSED)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(pipe.load_empty.index((it + NUM_STAGES - 1) % NUM_STAGES), pred=steps > 0)
    left, right = _halves(acc, CHUNK, TILE_N, HALF)
    q0, q1 = _halves(left, CHUNK, TILE_N // 2, QUARTER)
    q2, q3 = _halves(right, CHUNK, TILE_N // 2, QUARTER)
    return q0, q1, q2, q3, it


@gluon.jit
def _add_chunk(value, target, row, column, stride, row_limit, column_limit, LAYOUT: gl.constexpr):
    """target[row.., column..] += 64 x 64 values in fp32: each element has this one owner, so plain loads and stores do."""
    r = row + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LAYOUT))
    c = column + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, LAYOUT))
    where = target + (r.to(gl.int64) * stride)[:, None] + c[None, :]
    inside = (r < row_limit)[:, None] & (c < column_limit)[None, :]
    gl.store(where, gl.load(where, mask=inside, other=0.0) + value, mask=inside)


@gluon.jit
def _into_main_grad(s, rows, quarters, kind, tile, column, expert, LAYOUT: gl.constexpr, WG: gl.constexpr):
    """Adds a routed weight gradient's 64 x 256 values to the fp32 accumulators."""
    q0, q1, q2, q3 = quarters
    half_tiles = gl.cdiv(s.I, TILE_M)
    half = ((kind == DW_UP) & (tile >= half_tiles)).to(gl.int32)
    row = (tile - half * half_tiles) * TILE_M + WG * CHUNK
    row_limit = gl.where(kind == DW_UP, s.I, s.H)
    width = gl.where(kind == DW_UP, s.H, s.I)
    target = gl.where(kind == DW_UP, rows.main_up + (2 * expert + half).to(gl.int64) * s.I * s.H, rows.main_down + expert.to(gl.int64) * s.H * s.I)
    at = column * TILE_N
    _add_chunk(q0, target, row, at, width, row_limit, width, LAYOUT)
    _add_chunk(q1, target, row, at + CHUNK, width, row_limit, width, LAYOUT)
    _add_chunk(q2, target, row, at + 2 * CHUNK, width, row_limit, width, LAYOUT)
    _add_chunk(q3, target, row, at + 3 * CHUNK, width, row_limit, width, LAYOUT)


@gluon.jit
def _routes(rows, slot, tile, is_dh, LAYOUT: gl.constexpr, WG: gl.constexpr):
    """Route of each of a routed DH task's 64 rows, -1 = padding; loaded before the multiplication, so that it is there when the epilogue begins."""
    row = tile * TILE_M + WG * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LAYOUT))
    return gl.load(rows.row_to_slot + row, mask=(row >= 0) & is_dh & (slot < 0), other=-1)


@gluon.jit
def _dh_epilogue(s, rows, flags, pipe, quarters, route, slot, tile, column, it, LAYOUT: gl.constexpr, WG: gl.constexpr, ACT: gl.constexpr,
                 OMIT: gl.constexpr):
    """The four z-steps of a DH task and its partials of d_topk_weights (of the gate's gradient, for a shared expert)."""
    q0, q1, q2, q3 = quarters
    row = tile * TILE_M + WG * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LAYOUT))
    valid = route >= 0
    weight = gl.load(rows.topk_weights + route, mask=valid, other=0.0)
    if slot >= 0:
        # the movers' gates: the producer acquired their counter before it announced this task's first stage
        valid = row < s.T
        weight = gl.where(valid, weight * 0.0 + 1.0, 0.0)
        if ((rows.gated >> slot) & 1) != 0:
            weight = gl.load(rows.gates + slot * s.token_tiles * TILE_M + row, mask=valid, other=0.0)
    w = weight[:, None]
    v = valid[:, None]
    part = _z_step(q0, w, v, rows, pipe, it, LAYOUT, WG, ACT, OMIT)
    mbarrier.arrive(pipe.z_done.index(it % NUM_STAGES))
    part += _z_step(q1, w, v, rows, pipe, it + 1, LAYOUT, WG, ACT, OMIT)
    mbarrier.arrive(pipe.z_done.index((it + 1) % NUM_STAGES))
    part += _z_step(q2, w, v, rows, pipe, it + 2, LAYOUT, WG, ACT, OMIT)
    mbarrier.arrive(pipe.z_done.index((it + 2) % NUM_STAGES))
    part += _z_step(q3, w, v, rows, pipe, it + 3, LAYOUT, WG, ACT, OMIT)
    gl.store(partials_of(s, rows, flags, slot, column, row), part, mask=valid)
    thread_barrier()                                     # the partials of all threads before the storer's release, through this arrival
    mbarrier.arrive(pipe.z_done.index((it + 3) % NUM_STAGES))
    return it + Z_STEPS


@gluon.jit
def _hand_over(q0, q1, q2, q3, pipe, out, it, handed, WG: gl.constexpr):
    """A 64 x 256 result, rounded, to the storer: left half in this consumer's own chunks, right half in the store step's stage."""
    stage = it % NUM_STAGES
    mbarrier.wait(out.empty, (handed & 1) ^ 1)
    out.chunks.index(0).store(q0.to(gl.bfloat16))
    out.chunks.index(1).store(q1.to(gl.bfloat16))
    mbarrier.wait(pipe.load_ready.index(stage), (it // NUM_STAGES) & 1)
    pipe.a.index(2 * stage + WG).store(q2.to(gl.bfloat16))
    pipe.chunks.index(4 * stage + WG).store(q3.to(gl.bfloat16))
    fence_async_shared()                                 # these ordinary stores before the TMA stores of the storer
    mbarrier.arrive(out.full)
    return it + 1, handed + 1


@gluon.jit
def consume(s, rows, flags, pipe, tasks, out, WG: gl.constexpr, ACT: gl.constexpr, STAGGER: gl.constexpr, OMIT: gl.constexpr, DEBUG: gl.constexpr):
    """All GEMM tasks of this CTA, rows 64*WG.. of each.

    Consumer 1 starts a task STAGGER k-steps behind consumer 0: each then has the tensor cores to itself while the other runs its epilogue.
    """
    QUARTER: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    it = gl.program_id(0) * 0
    handed = it
    leads = it
    count = it
    bits, tile, steps, expert = _pop_task(tasks, count, 4)
    while (bits & TASK_END) == 0:
        kind, slot, column = _unpack(bits)
        route = _routes(rows, slot, tile, kind == DH, QUARTER, WG)
        nap(tile + column + WG * 7, DEBUG)
        # Where a task has fewer steps than stages, consumer 0 could run two tasks ahead and `lead` would lose a phase: no stagger then.
        staggered = steps >= NUM_STAGES
        if STAGGER > 0 and WG == 1:
            mbarrier.wait(pipe.lead.index(0), leads & 1, pred=staggered)
            leads += staggered.to(gl.int32)
        idle = False
        if WG == 1:
            idle = (bits & TASK_IDLE) != 0
        if idle:
            it, handed = _pass_through(pipe, out, kind, steps, it, handed)
        elif kind <= DX:
            # The two branches share no code on purpose: accumulators that meet behind a branch make ptxas wait after every single wgmma
            # (its message C7515; measured 0.58 of the roof instead of 0.8).
            q0, q1, q2, q3, it = _multiply_all(pipe, it, steps, staggered, WG, STAGGER, False)
            if kind == DH:
                it = _dh_epilogue(s, rows, flags, pipe, (q0, q1, q2, q3), route, slot, tile, column, it, QUARTER, WG, ACT, OMIT)
            else:
                it, handed = _hand_over(q0, q1, q2, q3, pipe, out, it, handed, WG)
        else:
            q0, q1, q2, q3, it = _multiply_all(pipe, it, steps, staggered, WG, STAGGER, True)
            if (slot < 0) & (rows.into_main_grad != 0):
                if steps > 0:
                    _into_main_grad(s, rows, (q0, q1, q2, q3), kind, tile, column, expert, QUARTER, WG)
            else:
                it, handed = _hand_over(q0, q1, q2, q3, pipe, out, it, handed, WG)
        count += 1
        bits, tile, steps, expert = _pop_task(tasks, count, 4)


@gluon.jit
def _pass_through(pipe, out, kind, steps, it, handed):
    """An idle consumer's part in a task: every barrier, nothing else. A waiter that skipped a phase would mistake the next one for it."""
    for _ in range(steps):
        stage = it % NUM_STAGES
        mbarrier.wait(pipe.load_ready.index(stage), (it // NUM_STAGES) & 1)
        mbarrier.arrive(pipe.load_empty.index(stage))
        it += 1
    for _ in range(gl.where(kind == DH, Z_STEPS, 0)):
        stage = it % NUM_STAGES
        mbarrier.wait(pipe.load_ready.index(stage), (it // NUM_STAGES) & 1)
        mbarrier.arrive(pipe.z_done.index(stage))
        it += 1
    if kind == DX:
        mbarrier.wait(out.empty, (handed & 1) ^ 1)
        mbarrier.wait(pipe.load_ready.index(it % NUM_STAGES), (it // NUM_STAGES) & 1)
        mbarrier.arrive(out.full)
        handed += 1
        it += 1
    return it, handed


# ------------------------------------------------------------------------------------------------------------------------------------ storer


@gluon.jit
def _store_box(desc, part, half, row, column, chunk, RANK: gl.constexpr):
    if RANK == 2:
        tma_store(desc, [row, column], chunk)
    elif RANK == 3:
        tma_store(desc, [part, row, column], chunk.reshape([1, CHUNK, CHUNK]))
    else:
        tma_store(desc, [part, half, row, column], chunk.reshape([1, 1, CHUNK, CHUNK]))


@gluon.jit
def _store_result(desc, part, half, row, column, pipe, stage, out, handed, idle, RANK: gl.constexpr, WG: gl.constexpr):
    """The 64 x 256 result of one consumer, from where `_hand_over` put it; an idle consumer has put nothing there."""
    mbarrier.wait(out.full, handed & 1)
    if idle == 0:
        _store_box(desc, part, half, row, column, out.chunks.index(0), RANK)
        _store_box(desc, part, half, row, column + CHUNK, out.chunks.index(1), RANK)
        _store_box(desc, part, half, row, column + 2 * CHUNK, pipe.a.index(2 * stage + WG), RANK)
        _store_box(desc, part, half, row, column + 3 * CHUNK, pipe.chunks.index(4 * stage + WG), RANK)


@gluon.jit
def _store_both(desc, part, half, row, column, pipe, it, out_0, out_1, handed, idle, RANK: gl.constexpr):
    """Both consumers' results, of which consumer 1 may be idle. Then the buffers and the store step's stage are free again."""
    stage = it % NUM_STAGES
    _store_result(desc, part, half, row, column, pipe, stage, out_0, handed, it < 0, RANK, 0)
    _store_result(desc, part, half, row + CHUNK, column, pipe, stage, out_1, handed, idle, RANK, 1)
    tma_store_wait(0)
    mbarrier.arrive(out_0.empty)
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
def storer(s, rows, flags, pipe, tasks, out_0, out_1, hidden, results_desc, up_grads, down_grads, shared_results_row, DEBUG: gl.constexpr):
    """Stores what the consumers hand over and publishes each task when all of it is in global memory (rule 2, writer; rule 4).

    hidden = (dz, wh, shared dz, shared wh); up_grads, down_grads = descriptors of (routed, shared 0, shared 1) weight gradients.
    """
    dz_desc, wh_desc, shared_dz_desc, shared_wh_desc = hidden
    up_desc, shared_up_0, shared_up_1 = up_grads
    down_desc, shared_down_0, shared_down_1 = down_grads
    it = gl.program_id(0) * 0
    handed = it                          # results taken from each consumer
    z_phases = it                        # bit s: phase of z_done[s]
    count = it
    bits, tile, steps, expert = _pop_task(tasks, count, 1)
    while (bits & TASK_END) == 0:
        kind, slot, column = _unpack(bits)
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
                stage = it % NUM_STAGES
                mbarrier.wait(pipe.z_done.index(stage), (z_phases >> stage) & 1)
                z_phases = z_phases ^ ((stage * 0 + 1) << stage)
                if slot < 0:
                    _store_z_step(dz_desc, wh_desc, want_dz, want_wh, row, column * TILE_N + c * CHUNK, stage, pipe, idle)
                else:
                    _store_z_step(shared_dz_desc, shared_wh_desc, want_dz, want_wh, row, column * TILE_N + c * CHUNK, stage, pipe, idle)
                tma_store_wait(0)
                mbarrier.arrive(pipe.load_empty.index(stage), count=2)
                it += 1
            stores_complete(tile)
            fence_proxy(tile)
            thread_barrier()
            add_release(flags.dh_ready + counter_of(s, slot, tile, flags.capacity), 1)
            add_release(flags.totals + DH_DONE, 1)
        elif kind == DX:
            result_row = row + gl.where(slot < 0, 0, shared_results_row)
            _store_both(results_desc, 0, 0, result_row, column * TILE_N, pipe, it, out_0, out_1, handed, idle, 2)
            stores_complete(tile)
            fence_proxy(tile)
            thread_barrier()
            add_release(flags.totals + DX_DONE, 1)
            handed += 1
            it += 1
        elif has_store_step(rows, kind, slot):
            half_tiles = gl.cdiv(width_of(s, slot), TILE_M)
            half = ((kind == DW_UP) & (tile >= half_tiles)).to(gl.int32)
            at = (tile - half * half_tiles) * TILE_M
            if kind == DW_UP:
                if slot < 0:
                    _store_both(up_desc, expert, half, at, column * TILE_N, pipe, it, out_0, out_1, handed, idle, 4)
                elif slot == 0:
                    _store_both(shared_up_0, half, 0, at, column * TILE_N, pipe, it, out_0, out_1, handed, idle, 3)
                else:
                    _store_both(shared_up_1, half, 0, at, column * TILE_N, pipe, it, out_0, out_1, handed, idle, 3)
            elif slot < 0:
                _store_both(down_desc, expert, 0, at, column * TILE_N, pipe, it, out_0, out_1, handed, idle, 3)
            elif slot == 0:
                _store_both(shared_down_0, 0, 0, at, column * TILE_N, pipe, it, out_0, out_1, handed, idle, 2)
            else:
                _store_both(shared_down_1, 0, 0, at, column * TILE_N, pipe, it, out_0, out_1, handed, idle, 2)
            handed += 1
            it += 1
        count += 1
        bits, tile, steps, expert = _pop_task(tasks, count, 1)
    stores_complete(it)                  # weight gradients are nobody's input in this launch; the kernel ends when they are written
