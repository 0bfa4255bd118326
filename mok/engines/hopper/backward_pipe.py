"""What the GEMM roles of the backward kernel share: stages and barriers in shared memory, counters in global memory, the task queue.

One task is a 128 x 256 tile of one of the kinds of backward_tasks.py. Consumer w computes rows 64w..64w+63 of it as one 64 x 256 accumulator.
Every TMA box is 64 x 64. In shared memory a stage is six such chunks of 8 KB: two of A (one for each consumer) and four of B. B's columns are
contiguous in memory in all four kinds, so wgmma reads it transposed ("MN-major"); A likewise in the weight gradients.

A DH task ends with four z-steps, one for each 64 columns of its tile, which go through the same stages: z_gate arrives in A's two chunks, z_up in
B's first two. Each thread of a consumer replaces what it reads by dz_gate and dz_up, and puts w*h into B's last two chunks; the storer stores
all six from there. So this epilogue, ten tiles of traffic for one of accumulators, needs no shared memory of its own. Every other task ends with one
store step: a stage without loads, into which each consumer puts the right half of its result while its own two chunks take the left half, so that
it hands over all of it at once and goes on.

A Z task ends with a store step too: its left half is gate, its right half up, of 128 columns each. Its B lies in memory with k contiguous, so wgmma reads
it as the forward kernel does, and the four chunks of a stage are 256 rows (of w_gate_up) x 64 k.

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
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .backward_tasks import (
    BLOCK_K,
    DW_UP,
    DX,
    TILE_M,
    TILE_N,
    Z_AGAIN,
    Z,
    product_needed,
    width_of,
)
from .compat import aggregate
from .sync import fresh

NUM_STAGES = gl.constexpr(4)
CHUNK = gl.constexpr(64)
Z_STEPS = gl.constexpr(4)                # TILE_N / CHUNK
STEP_BYTES = gl.constexpr(49152)         # six chunks: TMA counts whole boxes, also where they hang over an edge
Z_BYTES = gl.constexpr(32768)            # four chunks
COPY_PARTS = gl.constexpr(8)             # pieces of 16 rows in which movers fill a row tile

# Bits of a launch's `features`
GATED = gl.constexpr(3)
INTO_MAIN_GRAD = gl.constexpr(8)
HAS_B_UP = gl.constexpr(16)             # the routed experts' w_gate_up has a bias

# Which code the DH epilogue has: one binary each. CLAMPED: SwiGLU with a limit, and gpt-oss's variant
PLAIN_SWIGLU, CLAMPED, GEGLU, REGLU = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)

# What a role waited for, as the error word names it; the same numbers as launch.WAITS
WAIT_DY = gl.constexpr(11)
WAIT_DZ = gl.constexpr(13)
WAIT_ALL_DH = gl.constexpr(14)
WAIT_X = gl.constexpr(15)
WAIT_ALL_DX = gl.constexpr(16)
WAIT_SLOTS = gl.constexpr(17)
WAIT_START = gl.constexpr(18)
WAIT_AUDIT = gl.constexpr(19)
WAIT_Z = gl.constexpr(20)


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
TASK_Z = gl.constexpr(1 << 30)           # with RECOMPUTE: the kind is Z, and bits 0-1 are zero
TASK_BEGUN = gl.constexpr(1 << 28)       # with waves, of a weight gradient: its sums begin with what the wave before left
TASK_UNFINISHED = gl.constexpr(1 << 29)  # likewise: its sums are left to the next wave
TASK_MARKS = gl.constexpr(3 << 28)       # both
QUEUE = gl.constexpr(4)


@gluon.jit
def push_task(tasks, count, bits, tile, steps, expert):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    r = count % QUEUE
    mbarrier.wait(tasks.empty.index(r), ((count // QUEUE) & 1) ^ 1)
    tasks.records.index(4 * r).store(gl.full([1], bits, gl.int32, L))
    tasks.records.index(4 * r + 1).store(gl.full([1], tile, gl.int32, L))
    tasks.records.index(4 * r + 2).store(gl.full([1], steps, gl.int32, L))
    tasks.records.index(4 * r + 3).store(gl.full([1], expert, gl.int32, L))
    mbarrier.arrive(tasks.full.index(r))


@gluon.jit
def pop_task(tasks, count, NW: gl.constexpr):
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
def unpack(bits, RECOMPUTE: gl.constexpr):
    """(kind, shared expert or -1, column tile) of a task record's bits."""
    if RECOMPUTE:
        is_z = (bits >= TASK_Z).to(gl.int32)
        columns: gl.constexpr = (TASK_BEGUN if RECOMPUTE == Z_AGAIN else TASK_Z) - 1
        kind, slot, column = (bits & 3) - is_z, ((bits >> 2) & 3) - 1, (bits & columns) // TASK_COLUMN
    else:
        kind, slot, column = bits & 3, ((bits >> 2) & 3) - 1, bits // TASK_COLUMN
    return kind, slot, column


@aggregate
class BackwardFlags:
    """Counters in global memory (int32), and the control block that holds the abort flag and the spin limit.

    dy_ready[tile]: COPY_PARTS when a routed tile's rows of dy are there. x_ready[expert]: pieces of x copied for an expert. gates_ready[tile]:
    COPY_PARTS when a token tile's shared gates are there. dh_ready[row tile of counter_of]: DH tasks of a tile that are stored. totals: words
    0 combine ticket, 1 DH tasks stored, 2 DX tasks stored, 3 slot pieces done, 4 CTAs finished, then the tickets of the poisoning, 15 tasks taken.
    With RECOMPUTE the words of z_done stand between gates_ready and x_ready.
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


@gluon.jit
def z_done(s, flags):
    """Z tasks stored; behind this word, at 1 + counter_of, those of each row tile (z_ready). Only with RECOMPUTE."""
    return flags.gates_ready + s.token_tiles


TICKET, DH_DONE, DX_DONE, SLOTS_DONE, FINISHED = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3), gl.constexpr(4)


@aggregate
class Rows:
    """Per-row inputs of the DH epilogue and the plan. features: see `gated`, `into_main_grad`; gates: (num_shared, token rows) fp32.

    topk_weights: fp32 by slot; on several ranks by row, where the movers put what they pull.

    partials: fp32 <dh, h> of each (column tile, row); routed first, (columns, capacity rows), then each shared expert, (columns, token rows).
    """
    tile_to_expert: gl.tensor
    expert_offsets: gl.tensor
    tokens_per_expert: gl.tensor
    row_to_slot: gl.tensor
    topk_weights: gl.tensor
    gates: gl.tensor
    features: gl.tensor
    partials: gl.tensor
    main_up: gl.tensor           # fp32 accumulators, used where into_main_grad
    main_down: gl.tensor
    activation: gl.tensor
    limit: gl.tensor

    @gluon.constexpr_function
    def __init__(self, tile_to_expert, expert_offsets, tokens_per_expert, row_to_slot, topk_weights, gates, features, partials, main_up, main_down,
                 activation, limit):
        self.tile_to_expert = tile_to_expert
        self.expert_offsets = expert_offsets
        self.tokens_per_expert = tokens_per_expert
        self.row_to_slot = row_to_slot
        self.topk_weights = topk_weights
        self.gates = gates
        self.features = features
        self.partials = partials
        self.main_up = main_up
        self.main_down = main_down
        self.activation = activation
        self.limit = limit


@gluon.jit
def stage_of(it):
    """Stage of step number `it` of a CTA."""
    return it % NUM_STAGES


@gluon.jit
def phase_of(it):
    """Phase of the barriers of that stage: how often the ring has gone round, mod 2."""
    return (it // NUM_STAGES) & 1


@gluon.jit
def k_steps(s, kind, slot, tokens, RECOMPUTE: gl.constexpr):
    """k-steps of a task. tokens: rows of the expert, for routed weight gradients; the padding of its last 64 rows is zero, further rows are skipped."""
    steps = gl.where(product_needed(s, slot), gl.cdiv(s.H, BLOCK_K), 0)
    if RECOMPUTE:
        steps = gl.where(kind == Z, gl.cdiv(s.H, BLOCK_K), steps)
    steps = gl.where(kind == DX, 2 * gl.cdiv(width_of(s, slot), BLOCK_K), steps)
    return gl.where(kind >= DW_UP, gl.cdiv(gl.where(slot < 0, tokens, s.T), BLOCK_K), steps)


@gluon.jit
def gated(rows):
    """Bit i: shared expert i has a gate."""
    return fresh(rows.features) & GATED


@gluon.jit
def into_main_grad(rows):
    """Not 0: routed weight gradients are added to the fp32 accumulators."""
    return fresh(rows.features) & INTO_MAIN_GRAD


@gluon.jit
def partials_of(s, rows, flags, slot, column, row):
    """Where <dh, h> of a column tile and a row goes."""
    routed = fresh(flags.capacity).to(gl.int64) * TILE_M
    shared = (gl.cdiv(fresh(s.T), TILE_M) * TILE_M).to(gl.int64)
    stride = gl.where(slot < 0, routed, shared)
    start = gl.where(slot < 0, 0, gl.cdiv(fresh(s.I), TILE_N) * routed) + gl.where(slot == 1, gl.cdiv(fresh(s.I_0), TILE_N) * shared, 0)
    return rows.partials + start + column * stride + row


@gluon.jit
def has_store_step(rows, kind, slot, bits, RECOMPUTE: gl.constexpr):
    """Whether a task's result goes through a store step: all but DH, what is added into main_grad and, with waves, unfinished sums. bits: its record's."""
    if RECOMPUTE:
        row_result = (kind == DX) | (kind == Z)
    else:
        row_result = kind == DX
    weight_result = (kind >= DW_UP) & ((slot >= 0) | (into_main_grad(rows) == 0))
    if RECOMPUTE == Z_AGAIN:
        weight_result = weight_result & ((bits & TASK_UNFINISHED) == 0)
    return row_result | weight_result
