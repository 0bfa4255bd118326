"""GEMM side of the forward kernel: the TMA producer, the two tensor-core consumers with their epilogues, and the storer that publishes tiles.

One task is a 128 x 256 tile of C = A @ B.T. Consumer warpgroup w computes rows 64w..64w+63 of it as one 64 x 256 accumulator (wgmma
m64n256k16), so that in a gate/up task columns 0..127 are gate and 128..255 up of the same hidden units and meet in one thread.

Barriers in shared memory (all mbarriers; phase of use i of a ring of N is (i // N) & 1):
  load_ready[s]   stage s holds A and B: the TMA engine's bytes have arrived                     producer -> consumers
  load_empty[s]   both consumers are done with stage s (count 2)                                  consumers -> producer
  out_full[w][b]  buffer b of consumer w holds a 64 x 64 chunk, fenced for the TMA engine         consumer w -> storer
  out_empty[w][b] the TMA engine has read buffer b of consumer w                                  storer -> consumer w
  lead            consumer 0 has finished the first STAGGER k-steps of a task                     consumer 0 -> consumer 1
  task_full[r]    record r of the task queue is written                                           producer -> consumers, storer
  task_empty[r]   consumers and storer have read record r (count 3)                               consumers, storer -> producer
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from .compat import aggregate, thread_barrier, tma_load, tma_store, tma_store_wait
from .expert_parallel_send import find_homes, send_chunk, tell_homes
from .sync import (
    WAIT_HIDDEN,
    WAIT_HIDDEN_SLOT,
    WAIT_ROWS,
    add_release,
    fence_proxy,
    fresh,
    fresh_float,
    load_acquire,
    nap,
    stores_complete,
    take_ticket,
    wait_at_least,
)
from .tasks import BLOCK_K, BLOCK_M, BLOCK_N, HALF_N, counter_of, down_columns, locate, make_order, seek, token_tiles, up_columns_of, width_of
from .wave_loop import first_tile, wave_index

NUM_STAGES = gl.constexpr(4)
CHUNK = gl.constexpr(64)                 # columns (and rows) of a store: 8 KB, two buffers for each consumer
STAGE_BYTES = gl.constexpr(49152)        # (128 + 256) * 64 bf16: TMA counts whole boxes, also where they hang over an edge
COPY_PARTS = gl.constexpr(8)             # pieces of 16 rows in which movers fill a row tile
SET_HEADER = gl.constexpr(16)            # words of a counter set before its counters: 0 is the combine ticket, 5 wave_loop.SET_WAVES, then
SET_COUNTED = gl.constexpr(1)            # CTAs that have counted their tokens
SET_SCANNED = gl.constexpr(2)            # 1 when the counts have been turned into places
SET_LISTED = gl.constexpr(3)             # CTAs that have placed their tokens
SET_STAGED = gl.constexpr(4)             # CTAs that have staged their tokens for peers
SET_TASKS = gl.constexpr(15)             # GEMM tasks that have been taken
LOG2_E = gl.constexpr(1.4426950408889634)
QUEUE = gl.constexpr(4)                  # records of the task queue
KIND_BITS = gl.constexpr(6)
Z_BEYOND = gl.constexpr(1 << 30)         # a row behind every z
END = gl.constexpr(16)

# How a task addresses its weights
UP_ROUTED = gl.constexpr(0)
DOWN_ROUTED = gl.constexpr(1)
UP_SHARED = gl.constexpr(2)
DOWN_SHARED = gl.constexpr(3)

# Run-time activation numbers; launch.ACTIVATION_IDS has the names
ACT_SWIGLU = gl.constexpr(0)
ACT_SWIGLU_OAI = gl.constexpr(1)
ACT_GEGLU = gl.constexpr(2)
ACT_REGLU = gl.constexpr(3)
ACT_SWIGLU_PLAIN = gl.constexpr(4)       # swiglu without a clamp: the same bits, fewer instructions


@aggregate
class Pipe:
    """Shared memory of a CTA: load stages, store buffers of both consumers, and their barriers."""
    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    load_ready: gl.shared_memory_descriptor
    load_empty: gl.shared_memory_descriptor
    lead: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, a, b, load_ready, load_empty, lead):
        self.a = a
        self.b = b
        self.load_ready = load_ready
        self.load_empty = load_empty
        self.lead = lead


@aggregate
class OutPipe:
    """One consumer's two store buffers."""
    buffers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, buffers, full, empty):
        self.buffers = buffers
        self.full = full
        self.empty = empty


@aggregate
class TaskQueue:
    """The producer's next tasks for the other roles, in shared memory: they neither walk the sequence nor hold its sizes in registers.

    A record is three int32: kind (see _task_kind) | column << KIND_BITS, row tile, k-steps.
    """
    records: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, records, full, empty):
        self.records = records
        self.full = full
        self.empty = empty


@gluon.jit
def _task_kind(down, slot, idle):
    """Bit 0: a down task. Bit 1: rows 64.. are padding. Bits 2-3: shared expert + 1. Bit 4 (END): no more tasks."""
    return down.to(gl.int32) + idle.to(gl.int32) * 2 + (slot + 1) * 4


@gluon.jit
def _push_task(queue, count, kind, tile, column, steps):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    r = count % QUEUE
    mbarrier.wait(queue.empty.index(r), ((count // QUEUE) & 1) ^ 1)
    queue.records.index(3 * r).store(gl.full([1], kind + (column << KIND_BITS), gl.int32, L))
    queue.records.index(3 * r + 1).store(gl.full([1], tile, gl.int32, L))
    queue.records.index(3 * r + 2).store(gl.full([1], steps, gl.int32, L))
    mbarrier.arrive(queue.full.index(r))


@gluon.jit
def _pop_task(queue, count, NW: gl.constexpr):
    """(kind and column, row tile, k-steps) of task number `count` of this CTA."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    r = count % QUEUE
    mbarrier.wait(queue.full.index(r), (count // QUEUE) & 1)
    packed = gl.max(queue.records.index(3 * r).load(L), 0)
    tile = gl.max(queue.records.index(3 * r + 1).load(L), 0)
    steps = gl.max(queue.records.index(3 * r + 2).load(L), 0)
    thread_barrier()                     # every warp has read the record before one thread gives it back
    mbarrier.arrive(queue.empty.index(r))
    return packed, tile, steps


@aggregate
class Flags:
    """Readiness counters in global memory, one int32 a row tile, routed tiles first; `control` also holds the abort flag and the spin limit.

    From SET_HEADER on: `capacity` words of rows_ready, then hidden_ready, then (from `results_at` on) results_ready, then the token buckets; the
    ready counters of shared experts stand behind the routed ones.
    """
    control: gl.tensor
    counters: gl.tensor
    capacity: gl.tensor
    results_at: gl.tensor

    @gluon.constexpr_function
    def __init__(self, control, counters, capacity, results_at):
        self.control = control
        self.counters = counters
        self.capacity = capacity
        self.results_at = results_at


@gluon.jit
def rows_ready(flags):
    """COPY_PARTS when a routed tile's rows are in the ring."""
    return flags.counters + SET_HEADER


@gluon.jit
def hidden_ready(flags):
    """Gate/up tasks of a tile that are stored, so also those that will not read its rows again."""
    return flags.counters + SET_HEADER + fresh(flags.capacity)


@gluon.jit
def results_ready(flags):
    """Down tasks of a tile that are stored, so also those that will not read its h again."""
    return flags.counters + fresh(flags.results_at)


@gluon.jit
def token_buckets(s, flags):
    """One word for each routed tile and one more: tokens whose last row lies there, then their next place in the list."""
    return flags.counters + flags.results_at + flags.capacity + fresh(s.num_shared) * token_tiles(s)


@gluon.jit
def _input_counter(s, flags, down, slot, tile):
    """(counter, target) that a task's A operand waits for; target 0 where it needs no wait (shared gate/up reads x itself)."""
    up_target = gl.where(slot < 0, COPY_PARTS, 0)
    target = gl.where(down, up_columns_of(s, slot), up_target)
    hidden = hidden_ready(flags) + counter_of(s, slot, tile, flags.capacity)
    return gl.where(down, hidden, rows_ready(flags) + gl.where(slot < 0, tile, 0)), target


@gluon.jit
def take_task(counters):
    """Place in the sequence of this CTA's next task: whoever is free takes the next one, so that no CTA is left with the longer kinds.

    CTAs that take p, p + grid, ... drift apart, and tasks with common operands no longer run together. Which CTA computes a task changes no bit.
    """
    return take_ticket(counters + SET_TASKS)


@gluon.jit
def _load_steps(a_desc, a_row, w_desc, expert, column, begin, end, pipe, it, KIND: gl.constexpr):
    """Issue the loads of k-steps begin..end-1 of a task."""
    for k in range(begin, end):
        stage = it % NUM_STAGES
        mbarrier.wait(pipe.load_empty.index(stage), ((it // NUM_STAGES) & 1) ^ 1)
        ready = pipe.load_ready.index(stage)
        mbarrier.expect(ready, STAGE_BYTES)
        tma_load(a_desc, [a_row, k * BLOCK_K], ready, pipe.a.index(stage))
        b = pipe.b.index(stage)
        if KIND == UP_ROUTED:
            tma_load(w_desc, [expert, 0, column * HALF_N, k * BLOCK_K], ready, b.reshape([1, 2, HALF_N, BLOCK_K]))
        elif KIND == DOWN_ROUTED:
            tma_load(w_desc, [expert, column * BLOCK_N, k * BLOCK_K], ready, b.reshape([1, BLOCK_N, BLOCK_K]))
        elif KIND == UP_SHARED:
            tma_load(w_desc, [0, column * HALF_N, k * BLOCK_K], ready, b.reshape([2, HALF_N, BLOCK_K]))
        else:
            tma_load(w_desc, [column * BLOCK_N, k * BLOCK_K], ready, b)
        it += 1
    return it


@gluon.jit
def _load_task(s, o, descs, place, begin, end, pipe, it):
    """k-steps begin..end-1 of the task at place = (is down, shared expert or -1, row tile, column tile, expert)."""
    rows_desc, up_desc, hidden_desc, down_desc, x_desc, shared_hidden_desc, shared_up_0, shared_down_0, shared_up_1, shared_down_1 = descs
    down, slot, tile, column, expert = place
    if down:
        if slot < 0:
            it = _load_steps(hidden_desc, tile % s.hidden_ring * BLOCK_M, down_desc, expert, column, begin, end, pipe, it, DOWN_ROUTED)
        else:
            row = (slot * o.token_tiles + tile) * BLOCK_M
            if slot == 0:
                it = _load_steps(shared_hidden_desc, row, shared_down_0, expert, column, begin, end, pipe, it, DOWN_SHARED)
            else:
                it = _load_steps(shared_hidden_desc, row, shared_down_1, expert, column, begin, end, pipe, it, DOWN_SHARED)
    else:
        if slot < 0:
            it = _load_steps(rows_desc, tile % s.row_ring * BLOCK_M, up_desc, expert, column, begin, end, pipe, it, UP_ROUTED)
        elif slot == 0:
            it = _load_steps(x_desc, tile * BLOCK_M, shared_up_0, expert, column, begin, end, pipe, it, UP_SHARED)
        else:
            it = _load_steps(x_desc, tile * BLOCK_M, shared_up_1, expert, column, begin, end, pipe, it, UP_SHARED)
    return it


@gluon.jit
def producer(s, flags, pipe, queue, descs, tile_to_expert, row_to_slot, tickets, DEBUG: gl.constexpr):
    """Loads A and B of every task, in order, through the stages. Rules 1 and 2, reader: acquire, proxy fence, TMA load, all in this warp.

    tickets: 1, tasks by take_task; 0, CTA p takes tasks p, p + grid, ... Which CTA computes a task changes no bit.
    """
    it = gl.program_id(0) * 0
    count = it
    o = make_order(s)
    taken = gl.program_id(0)
    if fresh(tickets) != 0:
        taken = take_task(flags.counters)
    phase, index = seek(s, o, it, taken)
    down, slot, tile, column = locate(o, phase, index)
    expert, idle = _tile_facts(tile_to_expert, row_to_slot, slot, tile, phase < o.num_phases)
    seen = it - 1
    while phase < o.num_phases:
        steps = gl.cdiv(gl.where(down, width_of(s, slot), fresh(s.H)), BLOCK_K)
        _push_task(queue, count, _task_kind(down, slot, idle), tile, column, steps)
        count += 1
        counter, target = _input_counter(s, flags, down, slot, tile)
        nap(index + phase, DEBUG)
        if seen < target:
            if down:
                wait_at_least(counter, target, flags.control, WAIT_HIDDEN, tile)
            else:
                wait_at_least(counter, target, flags.control, WAIT_ROWS, tile)
        fence_proxy(tile)
        place = (down, slot, tile, column, expert)
        filled = gl.minimum(steps, NUM_STAGES)
        it = _load_task(s, o, descs, place, 0, filled, pipe, it)
        # The ring is full: now there is time to work out the next task and to look at what it waits for.
        after = taken + gl.num_programs(0)
        if fresh(tickets) != 0:
            after = take_task(flags.counters)
        next_phase, next_index = seek(s, o, phase, index + after - taken)
        taken = after
        next_down, next_slot, next_tile, next_column = locate(o, next_phase, next_index)
        another = next_phase < o.num_phases
        next_expert, next_idle = _tile_facts(tile_to_expert, row_to_slot, next_slot, next_tile, another)
        next_counter, _ = _input_counter(s, flags, next_down, next_slot, next_tile)
        seen = load_acquire(gl.where(another, next_counter, counter))
        it = _load_task(s, o, descs, place, filled, steps, pipe, it)
        phase, index, down, slot, tile, column, expert, idle = (next_phase, next_index, next_down, next_slot, next_tile, next_column, next_expert,
                                                                next_idle)
    _push_task(queue, count, it * 0 + END, it * 0, it * 0, it * 0)


@gluon.jit
def _tile_facts(tile_to_expert, row_to_slot, slot, tile, valid):
    """(expert, whether rows 64..127 are all padding) of a routed tile; valid rows come first, and padding is neither multiplied nor stored."""
    routed = valid & (slot < 0)
    expert = gl.load(tile_to_expert + tile, mask=routed, other=0)
    return expert, gl.load(row_to_slot + tile * BLOCK_M + BLOCK_M // 2, mask=routed, other=0) < 0


@gluon.jit
def second_half_is_padding(row_to_slot, slot, tile, valid):
    """Whether rows 64..127 of a routed tile are all padding (valid rows come first); they are then neither multiplied nor stored."""
    return gl.load(row_to_slot + tile * BLOCK_M + BLOCK_M // 2, mask=valid & (slot < 0), other=0) < 0


@gluon.jit
def _halves(value, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Left and right half of a register tile; both stay in the registers that held them."""
    left, right = value.reshape([ROWS, 2, COLUMNS // 2]).permute(0, 2, 1).split()
    return gl.convert_layout(left, LAYOUT, assert_trivial=True), gl.convert_layout(right, LAYOUT, assert_trivial=True)


@gluon.jit
def _with_bias(value, bias, column, limit, LAYOUT: gl.constexpr):
    """value + bias[column..], in fp32; columns at or beyond `limit` get 0."""
    columns = column + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, LAYOUT))
    return value + gl.load(bias + columns, mask=columns < limit, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def _reciprocal(x):
    """1 / x by the special function unit, within one ulp: one instruction where a division takes eight."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def activate(g, u, activation, limit):
    """h = act(g, u) in fp32 (docs/numerics.md). `limit` is infinite where there is no clamp; comparisons keep NaN, which a min or max would drop."""
    if activation == ACT_SWIGLU_PLAIN:
        h = g * u * _reciprocal(1.0 + gl.exp2(g * -LOG2_E))
    elif activation == ACT_GEGLU:
        h = 0.5 * g * (1.0 + gl.erf(g * 0.7071067811865476)) * u
    elif activation == ACT_REGLU:
        h = gl.where(g <= 0.0, 0.0, g) * u
    else:
        oai = activation == ACT_SWIGLU_OAI
        g = gl.where(g > limit, limit, g)
        u = gl.where(u > limit, limit, gl.where(u < -limit, -limit, u))
        u = gl.where(oai, u + 1.0, u)
        h = g * u * _reciprocal(1.0 + gl.exp2(g * gl.where(oai, -1.702 * LOG2_E, -LOG2_E)))
    return h


@gluon.jit
def _put(value, out, ot):
    """Hand one 64 x 64 bf16 chunk to the storer. The fence makes these ordinary stores visible to the TMA engine before the barrier does."""
    b = ot % 2
    mbarrier.wait(out.empty.index(b), ((ot // 2) & 1) ^ 1)
    out.buffers.index(b).store(value)
    fence_async_shared()
    mbarrier.arrive(out.full.index(b))
    return ot + 1


@gluon.jit
def _up_chunk(g, u, bias, has_bias, column, s, activation, limit, out, ot, LAYOUT: gl.constexpr, SAVE_Z: gl.constexpr):
    """Bias, rounding of z, activation of the rounded z, rounding of h; 64 hidden columns."""
    if has_bias:
        g = _with_bias(g, bias, column, s.I, LAYOUT)
        u = _with_bias(u, bias + fresh(s.I), column, s.I, LAYOUT)
    gz = g.to(gl.bfloat16)
    uz = u.to(gl.bfloat16)
    if SAVE_Z:
        ot = _put(gz, out, ot)
        ot = _put(uz, out, ot)
    h = activate(gz.to(gl.float32), uz.to(gl.float32), fresh(activation), fresh_float(limit))
    return _put(h.to(gl.bfloat16), out, ot)


@gluon.jit
def _down_chunk(y, bias, has_bias, column, s, out, ot, LAYOUT: gl.constexpr):
    if has_bias:
        y = _with_bias(y, bias, column, s.H, LAYOUT)
    return _put(y.to(gl.bfloat16), out, ot)


@gluon.jit
def _step(pipe, acc, it, WG: gl.constexpr):
    """One k-step: issue it; the step before it is then complete and this one in flight."""
    stage = it % NUM_STAGES
    mbarrier.wait(pipe.load_ready.index(stage), (it // NUM_STAGES) & 1)
    acc = warpgroup_mma(pipe.a.index(stage).slice(WG * 64, 64), pipe.b.index(stage).permute((1, 0)), acc, is_async=True)
    return warpgroup_mma_wait(num_outstanding=1, deps=(acc,)), it + 1


@gluon.jit
def _multiply(pipe, acc, it, begin, end, WG: gl.constexpr):
    """k-steps begin..end-1 of a task, begin >= 1: each gives back the stage of the step before it."""
    for _ in range(begin, end):
        acc, it = _step(pipe, acc, it, WG)
        mbarrier.arrive(pipe.load_empty.index((it + NUM_STAGES - 2) % NUM_STAGES))
    return acc, it


@gluon.jit
def consume(s, pipe, queue, out, bias_up, bias_down, has_bias_up, has_bias_down, activation, limit, tile_to_expert, w, WG: gl.constexpr,
            SAVE_Z: gl.constexpr, STAGGER: gl.constexpr, WAVES: gl.constexpr, DEBUG: gl.constexpr):
    """All GEMM tasks of this CTA, rows 64*WG.. of each.

    Consumer 1 starts a task STAGGER k-steps behind consumer 0: each then has the tensor cores to itself while the other runs its epilogue.
    """
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    HALF: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    QUARTER: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    it = gl.program_id(0) * 0
    ot = it
    leads = it
    count = it
    packed, tile, steps = _pop_task(queue, count, 4)
    while (packed & END) == 0:
        down, slot, column = (packed & 1) != 0, ((packed >> 2) & 3) - 1, packed >> KIND_BITS
        idle = False
        if WG == 1:
            idle = (packed & 2) != 0
        nap(count + WG * 7, DEBUG)
        # Where a task has fewer steps than stages, consumer 0 could run two tasks ahead and `lead` would lose a phase: no stagger then.
        staggered = steps >= NUM_STAGES
        if STAGGER > 0 and WG == 1:
            mbarrier.wait(pipe.lead.index(0), leads & 1, pred=staggered)
            leads += staggered.to(gl.int32)
        if idle:
            for _ in range(steps):
                stage = it % NUM_STAGES
                mbarrier.wait(pipe.load_ready.index(stage), (it // NUM_STAGES) & 1)
                mbarrier.arrive(pipe.load_empty.index(stage))
                it += 1
        else:
            acc = gl.zeros([64, BLOCK_N], gl.float32, ACC)
            acc, it = _step(pipe, acc, it, WG)
            first = gl.minimum(steps, gl.maximum(STAGGER, 1))
            if STAGGER > 1:
                acc, it = _multiply(pipe, acc, it, 1, first, WG)
            if STAGGER > 0 and WG == 0:
                mbarrier.arrive(pipe.lead.index(0), pred=staggered)
            acc, it = _multiply(pipe, acc, it, first, steps, WG)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            mbarrier.arrive(pipe.load_empty.index((it + NUM_STAGES - 1) % NUM_STAGES))
            left, right = _halves(acc, 64, BLOCK_N, HALF)
            left_0, left_1 = _halves(left, 64, HALF_N, QUARTER)
            right_0, right_1 = _halves(right, 64, HALF_N, QUARTER)
            expert = tile
            if (fresh(has_bias_up) + has_bias_down > 0) & (slot < 0):
                if WAVES:
                    expert = gl.load(tile_to_expert + (first_tile(w, 4) + tile))
                else:
                    expert = gl.load(tile_to_expert + tile)
            if down:
                bias = bias_down + expert.to(gl.int64) * s.H
                biased = (fresh(has_bias_down) > 0) & (slot < 0)
                ot = _down_chunk(left_0, bias, biased, column * BLOCK_N, s, out, ot, QUARTER)
                ot = _down_chunk(left_1, bias, biased, column * BLOCK_N + CHUNK, s, out, ot, QUARTER)
                ot = _down_chunk(right_0, bias, biased, column * BLOCK_N + 2 * CHUNK, s, out, ot, QUARTER)
                ot = _down_chunk(right_1, bias, biased, column * BLOCK_N + 3 * CHUNK, s, out, ot, QUARTER)
            else:
                bias = bias_up + expert.to(gl.int64) * (2 * fresh(s.I))
                biased = (fresh(has_bias_up) > 0) & (slot < 0)
                ot = _up_chunk(left_0, right_0, bias, biased, column * HALF_N, s, activation, limit, out, ot, QUARTER, SAVE_Z)
                ot = _up_chunk(left_1, right_1, bias, biased, column * HALF_N + CHUNK, s, activation, limit, out, ot, QUARTER, SAVE_Z)
        count += 1
        packed, tile, steps = _pop_task(queue, count, 4)


@gluon.jit
def _store_chunk(desc, coord, out, ot, first, IS_Z: gl.constexpr):
    """Store one chunk; the chunk before it (unless this is the first of the task) has then been read, so its buffer is given back."""
    b = ot % 2
    mbarrier.wait(out.full.index(b), (ot // 2) & 1)
    source = out.buffers.index(b)
    if IS_Z:
        source = source.reshape([CHUNK, 1, CHUNK])
    tma_store(desc, coord, source)
    tma_store_wait(1)
    if not first:
        mbarrier.arrive(out.empty.index(b ^ 1))
    return ot + 1


@gluon.jit
def _store_half(down, slot, rows, column, descs, out, ot, SAVE_Z: gl.constexpr):
    """All chunks of one consumer's 64 rows, in the order in which it hands them over. rows: first row in (z, h, results)."""
    hidden_desc, shared_hidden_desc, results_desc, z_desc, shared_z_0, shared_z_1 = descs
    z_row, hidden_row, result_row = rows
    if down:
        for c in gl.static_range(4):
            ot = _store_chunk(results_desc, [result_row, column * BLOCK_N + c * CHUNK], out, ot, c == 0, False)
    else:
        for c in gl.static_range(2):
            at = column * HALF_N + c * CHUNK
            if SAVE_Z:
                for half in gl.static_range(2):
                    # Branches that end alike become one that chooses between the addresses of descriptors, and every role then keeps those.
                    if slot < 0:
                        ot = _store_chunk(z_desc, [z_row, half, at], out, ot, c + half == 0, True)
                    elif slot == 0:
                        ot = fresh(_store_chunk(shared_z_0, [z_row, half, at], out, ot, c + half == 0, True))
                    else:
                        ot = _store_chunk(shared_z_1, [z_row, half, at], out, ot, c + half == 0, True)
            if slot < 0:
                ot = fresh(_store_chunk(hidden_desc, [hidden_row, at], out, ot, (c == 0) and (not SAVE_Z), False))
            else:
                ot = _store_chunk(shared_hidden_desc, [hidden_row, at], out, ot, (c == 0) and (not SAVE_Z), False)
    return ot


@gluon.jit
def _send_half(homes, s, first, column, out, ot):
    """One consumer's 64 rows of a routed down task, chunk by chunk into their slots at home; the last chunk's buffer is given back by the caller."""
    for c in gl.static_range(4):
        b = ot % 2
        mbarrier.wait(out.full.index(b), (ot // 2) & 1)
        send_chunk(homes, out.buffers.index(b), first, column * BLOCK_N + c * CHUNK, s.H)
        thread_barrier()                 # every lane has read the chunk before one gives its buffer back
        if c < 3:
            mbarrier.arrive(out.empty.index(b))
        ot += 1
    return ot


@gluon.jit
def storer(s, flags, queue, out_0, out_1, descs, shared_results_row, homes, K, w, SAVE_Z: gl.constexpr, EP: gl.constexpr, WAVES: gl.constexpr,
           DEBUG: gl.constexpr):
    """Stores what the consumers hand over and publishes each task when all of it is in global memory (rule 2, writer; rule 4).

    With EP, results of routed rows go into their slots at home; homes says where those are.

    A tile's place in the ring of h is free when the tile that held it before has all its results; that wait stands before the consumers'
    output is due, off the critical path (rule 6: results_ready of a tile also says that its h has been read).
    With WAVES, w is the wave. Only wave 0's z is kept: the others' rows are moved behind z's last one, where TMA stores nothing.
    """
    ot_0 = gl.program_id(0) * 0
    ot_1 = ot_0
    count = ot_0
    packed, tile, _ = _pop_task(queue, count, 1)
    while (packed & END) == 0:
        down, slot, column = (packed & 1) != 0, ((packed >> 2) & 3) - 1, packed >> KIND_BITS
        idle = (packed >> 1) & 1
        counter = counter_of(s, slot, tile, flags.capacity)
        if (slot < 0) & (tile >= s.hidden_ring) & ((packed & 1) == 0):
            wait_at_least(results_ready(flags) + (tile - s.hidden_ring), down_columns(s), flags.control, WAIT_HIDDEN_SLOT, tile)
        nap(count + 3, DEBUG)
        tile_row = tile * BLOCK_M
        hidden_row = gl.where(slot < 0, tile % s.hidden_ring * BLOCK_M, (slot * token_tiles(s) + tile) * BLOCK_M)
        result_row = tile_row + gl.where(slot < 0, 0, shared_results_row + slot * token_tiles(s) * BLOCK_M)
        z_row = tile_row
        if WAVES:
            z_row += gl.where((slot < 0) & (wave_index(w, 1) > 0), Z_BEYOND, 0)
        if EP and down & (slot < 0):
            find_homes(homes, flags.control, tile, s.H)
            ot_0 = _send_half(homes, s, 0, column, out_0, ot_0)
            if idle == 0:
                ot_1 = _send_half(homes, s, 64, column, out_1, ot_1)
        else:
            ot_0 = _store_half(down, slot, (z_row, hidden_row, result_row), column, descs, out_0, ot_0, SAVE_Z)
            if idle == 0:
                ot_1 = _store_half(down, slot, (z_row + 64, hidden_row + 64, result_row + 64), column, descs, out_1, ot_1, SAVE_Z)
        stores_complete(tile)
        mbarrier.arrive(out_0.empty.index((ot_0 + 1) % 2))
        mbarrier.arrive(out_1.empty.index((ot_1 + 1) % 2), pred=idle == 0)
        if EP and down & (slot < 0):
            tell_homes(homes, results_ready(flags) + counter, down_columns(s), flags.control, tile, K)
        else:
            fence_proxy(tile)
            thread_barrier()
            add_release(gl.where(down, results_ready(flags), hidden_ready(flags)) + counter, 1)
        count += 1
        packed, tile, _ = _pop_task(queue, count, 1)
