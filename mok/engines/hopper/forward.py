"""The forward pass of the layer in one launch on sm_90: dispatch, gate/up GEMM, activation, down GEMM, combine (docs/kernels.md).

    z = x[token] @ w_gate_up[e].T + b;  h = act(round(z));  y_k = round(h @ w_down[e].T + b);  out = sum_k w_k y_k + sum_s gate_s y_s

Legend: T tokens, H hidden, I intermediate, E experts, K routes a token, R rows of the plan, G row tiles of a group. BF16, fp32 accumulation.
Limits: `limits.unsupported_reason`. Roles, flags and fences are drawn in docs/kernels.md; measured on one H200, docs/benchmarks/.

Compiled variants for this precision: SAVE_Z (training or not) x MOVER_WARPS (1, 2) = 4 on one rank, SAVE_Z = 2 on several, and 2 for groups whose buffers
are bounded (WAVES, wave_loop.py). Everything else in production is a run-time value; the other fields of ForwardConfig are for tests and for measuring.
"""
from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .compat import thread_barrier
from .expert_parallel_move import group_mover, stage_tokens, tokens_of_wave
from .expert_parallel_send import Homes
from .gemm import CHUNK, NUM_STAGES, QUEUE, SET_HEADER, SET_TASKS, Flags, OutPipe, Pipe, TaskQueue, consume, producer, storer
from .move import Tokens, finish_combine, list_tokens, mover
from .peers import tell_abort
from .sync import CONTROL_ABORT, CONTROL_ARRIVED, CONTROL_EPOCH, CONTROL_WORDS
from .tasks import BLOCK_K, BLOCK_M, BLOCK_N, Schedule, token_tiles
from .wave_loop import SET_WAVES, Wave, count_waves, first_tile, is_last, next_wave, schedule_of_wave, set_wave, wave_index, waves_of

MOVER_WARPS = (1, 2)            # with more the CTA has 512 threads, and wgmma of 256 columns does not fit into 128 registers a thread


@dataclass(frozen=True)
class ForwardConfig:
    """What selects a binary; only the first four differ in production.

    stagger: k-steps between the consumers. copy_vectors: 16-byte loads in flight in a copying thread. sum_vectors: likewise for each of eight
    routes in a summing thread of a mover. debug: roles sleep at random. omit: 1 no dispatch copy, 2 no combine (benchmark's breakdown only).
    several_ranks: rows come from and results go to the other ranks of a group; always with two mover warps. waves: of a group with a capacity_factor.
    """
    save_z: bool
    mover_warps: int = 2
    several_ranks: bool = False
    waves: bool = False
    stagger: int = 1
    copy_vectors: int = 8
    sum_vectors: int = 1
    debug: bool = False
    omit: int = 0

    def __post_init__(self) -> None:
        if self.mover_warps not in MOVER_WARPS:
            raise ValueError(f"mover_warps={self.mover_warps} must be one of {MOVER_WARPS}")
        if self.several_ranks and self.mover_warps != MOVER_WARPS[-1]:
            raise ValueError(f"mover_warps={self.mover_warps} must be {MOVER_WARPS[-1]} on several ranks")
        if self.waves and not self.several_ranks:
            raise ValueError(f"waves={self.waves} must be False on one rank")
        if not 0 <= self.stagger < NUM_STAGES.value:
            raise ValueError(f"stagger={self.stagger} must be less than the {NUM_STAGES.value} load stages")

    def constexprs(self) -> dict[str, int]:
        # 2 * 192 + 120 = 3 * 168 registers: what three warpgroups may have. With 208 and 88 the movers spill (88 bytes of stack, 24 now).
        return {"SAVE_Z": int(self.save_z), "MOVER_WARPS": self.mover_warps, "STAGGER": self.stagger, "COPY_VECTORS": self.copy_vectors,
                "SUM_VECTORS": self.sum_vectors, "EP": int(self.several_ranks), "WAVES": int(self.waves),
                "DEBUG": int(self.debug), "OMIT": self.omit, "CONSUMER_REGISTERS": 192, "HELPER_REGISTERS": 120}


INTEGERS = ["T", "K", "num_shared", "x_stride_8", "capacity", "group_tiles", "row_ring", "hidden_ring", "shared_results_row", "has_bias_up",
            "has_bias_down", "gated", "activation", "tickets", "wave_tiles"]
WIDTHS = ["H", "I", "shared_I_0", "shared_I_1"]   # specialised on being multiples of 16, which they always are: no second binary
UNALIGNED = ["row_to_slot", "row_to_rank", "slot_to_row", "tile_to_expert", "num_tiles_ptr", "topk_weights", "order", "bias_up",
             "bias_down", "gate_0", "gate_1", "state", "wave_table"]


@gluon.jit
def _begin_launch(state, capacity):
    """Pick this launch's set of counters and zero the other one for the next launch (rule 5: the owner zeroes, inside the launch).

    The epoch advances when all CTAs have read it, so graph replay and any stream order work. Returns the set that is in use and the epoch.
    """
    set_words = SET_HEADER + 5 * capacity
    epoch = gl.load(state + CONTROL_EPOCH, volatile=True)
    in_use = state + CONTROL_WORDS + (epoch & 1) * set_words
    other = state + CONTROL_WORDS + ((epoch & 1) ^ 1) * set_words
    lanes = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    for i in range(gl.program_id(0) * 128, set_words, gl.num_programs(0) * 128):
        gl.store(other + i + lanes, lanes * 0, mask=i + lanes < set_words)
    thread_barrier()                                     # every thread of the CTA has read the epoch ...
    arrived = gl.atomic_add(state + CONTROL_ARRIVED, 1, sem="acq_rel", scope="gpu")
    if arrived == gl.num_programs(0) - 1:                # ... and so has every other CTA
        gl.store(state + CONTROL_ARRIVED, 0)
        gl.store(state + CONTROL_EPOCH, epoch + 1)
    thread_barrier()                                     # `arrived` reached all threads through memory that the roles' arguments are about to fill
    return in_use, epoch


@gluon.jit
def _consumer(s, flags, pipe, queue, out, t, biases, activation, limit, tile_to_expert, w, WG: gl.constexpr, SAVE_Z: gl.constexpr, STAGGER: gl.constexpr,
              SUM_VECTORS: gl.constexpr, EP: gl.constexpr, WAVES: gl.constexpr, OMIT: gl.constexpr, DEBUG: gl.constexpr):
    """With WAVES, s and t are the whole launch's, in kernel arguments: what a wave makes of them would stand in registers beside the accumulator."""
    bias_up, bias_down, has_bias_up, has_bias_down = biases
    if WG == 1 and EP:
        if WAVES:
            if wave_index(w, 4) == 0:
                stage_tokens(s, t, flags, 8, DEBUG)
                count_waves(flags.control, w)
        else:
            stage_tokens(s, t, flags, 8, DEBUG)
    if WG == 1 and OMIT != 2:
        if WAVES:
            if is_last(w, 4):
                list_tokens(schedule_of_wave(s, w, 4), t, flags, 4, EP)
        else:
            list_tokens(s, t, flags, 4, EP)
    consume(s, pipe, queue, out, bias_up, bias_down, has_bias_up, has_bias_down, activation, limit, tile_to_expert, w, WG, SAVE_Z, STAGGER, WAVES, DEBUG)
    if OMIT != 2:
        if WAVES:
            if is_last(w, 4):
                finish_combine(s, t, flags, 2 * SUM_VECTORS, 4, EP, DEBUG)
        else:
            finish_combine(s, t, flags, 2 * SUM_VECTORS, 4, EP, DEBUG)


@gluon.jit
def _mover(s, flags, t, ring, w, COPY_VECTORS: gl.constexpr, SUM_VECTORS: gl.constexpr, NW: gl.constexpr, EP: gl.constexpr, WAVES: gl.constexpr,
           OMIT: gl.constexpr, DEBUG: gl.constexpr):
    if EP:
        group_mover(s, flags, t, ring, w, COPY_VECTORS, SUM_VECTORS, NW, WAVES, OMIT, DEBUG)
    else:
        mover(s, flags, t, ring, COPY_VECTORS, SUM_VECTORS, NW, OMIT, DEBUG)


@gluon.jit
def _init_barriers(pipe, queue, out_0, out_1, AGAIN: gl.constexpr):
    """All barriers of the CTA in their first phase. AGAIN: they have been used, by roles that have ended and loads that have arrived."""
    if AGAIN:
        for i in gl.static_range(NUM_STAGES):
            mbarrier.invalidate(pipe.load_ready.index(i))
            mbarrier.invalidate(pipe.load_empty.index(i))
        mbarrier.invalidate(pipe.lead.index(0))
        for i in gl.static_range(QUEUE):
            mbarrier.invalidate(queue.full.index(i))
            mbarrier.invalidate(queue.empty.index(i))
        for i in gl.static_range(2):
            mbarrier.invalidate(out_0.full.index(i))
            mbarrier.invalidate(out_0.empty.index(i))
            mbarrier.invalidate(out_1.full.index(i))
            mbarrier.invalidate(out_1.empty.index(i))
        thread_barrier()
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(pipe.load_ready.index(i), count=1)
        mbarrier.init(pipe.load_empty.index(i), count=2)
    mbarrier.init(pipe.lead.index(0), count=1)
    for i in gl.static_range(QUEUE):
        mbarrier.init(queue.full.index(i), count=1)
        mbarrier.init(queue.empty.index(i), count=3)
    for i in gl.static_range(2):
        mbarrier.init(out_0.full.index(i), count=1)
        mbarrier.init(out_0.empty.index(i), count=1)
        mbarrier.init(out_1.full.index(i), count=1)
        mbarrier.init(out_1.empty.index(i), count=1)
    if AGAIN:
        fence_async_shared()                             # the TMA engine sees the new barriers ...
        thread_barrier()                                 # ... and so does every role that starts behind this


@gluon.jit
def _run_roles(s, flags, t, part, memory, biases, activation, limit, load_descs, store_descs, ring, tile_to_expert, tickets, homes, w,
               settings: gl.constexpr):
    """All roles of a CTA, from the first task to the last. part: a wave's share of the launch's s, t and tile_to_expert; w: the wave; homes: with EP,
    where its results go.

    settings: SAVE_Z, STAGGER, COPY_VECTORS, SUM_VECTORS, MOVER_WARPS, EP, WAVES, OMIT, DEBUG, and registers of consumers and of the other roles.
    """
    pipe, queue, out_0, out_1 = memory
    s_part, t_part, tiles_part = part
    SAVE_Z: gl.constexpr = settings[0]
    STAGGER: gl.constexpr = settings[1]
    COPY_VECTORS: gl.constexpr = settings[2]
    SUM_VECTORS: gl.constexpr = settings[3]
    MOVER_WARPS: gl.constexpr = settings[4]
    EP: gl.constexpr = settings[5]
    WAVES: gl.constexpr = settings[6]
    OMIT: gl.constexpr = settings[7]
    DEBUG: gl.constexpr = settings[8]
    CONSUMER_REGISTERS: gl.constexpr = settings[9]
    HELPER_REGISTERS: gl.constexpr = settings[10]
    gl.warp_specialize([
        (_consumer, (s, flags, pipe, queue, out_0, t, biases, activation, limit, tile_to_expert, w, 0, SAVE_Z, STAGGER, SUM_VECTORS, EP, WAVES, OMIT, DEBUG)),
        (_consumer, (s, flags, pipe, queue, out_1, t, biases, activation, limit, tile_to_expert, w, 1, SAVE_Z, STAGGER, SUM_VECTORS, EP, WAVES, OMIT, DEBUG)),
        (producer, (s_part, flags, pipe, queue, load_descs, tiles_part, t_part.row_to_slot, tickets, DEBUG)),
        (storer, (s_part, flags, queue, out_0, out_1, store_descs, t.shared_results_row, homes, t.K, w, SAVE_Z, EP, WAVES, DEBUG)),
        (_mover, (s_part, flags, t, ring, w, COPY_VECTORS, SUM_VECTORS, MOVER_WARPS, EP, WAVES, OMIT, DEBUG)),
    ], [4, 1, 1, MOVER_WARPS], [CONSUMER_REGISTERS, HELPER_REGISTERS, HELPER_REGISTERS, HELPER_REGISTERS])


@gluon.jit(do_not_specialize=[*INTEGERS, "limit"], do_not_specialize_on_alignment=UNALIGNED)
def _forward_kernel(rows_desc, up_desc, hidden_desc, hidden_store_desc, down_desc, results_desc, z_desc, x_desc, shared_hidden_desc,
                    shared_hidden_store_desc, shared_up_0, shared_down_0, shared_z_0, shared_up_1, shared_down_1, shared_z_1,
                    x, ring, results, out, row_to_slot, slot_to_row, tile_to_expert, num_tiles_ptr, topk_weights, order, bias_up, bias_down,
                    gate_0, gate_1, state, H, I, shared_I_0, shared_I_1, T, K, num_shared, x_stride_8, capacity, group_tiles,
                    row_ring, hidden_ring, shared_results_row, has_bias_up, has_bias_down, gated, activation, limit,
                    row_to_rank, tickets, wave_table, wave_tiles, SAVE_Z: gl.constexpr, MOVER_WARPS: gl.constexpr, STAGGER: gl.constexpr,
                    COPY_VECTORS: gl.constexpr, SUM_VECTORS: gl.constexpr, EP: gl.constexpr, WAVES: gl.constexpr,
                    DEBUG: gl.constexpr, OMIT: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, HELPER_REGISTERS: gl.constexpr):
    B_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    SETTINGS: gl.constexpr = (SAVE_Z, STAGGER, COPY_VECTORS, SUM_VECTORS, MOVER_WARPS, EP, WAVES, OMIT, DEBUG, CONSUMER_REGISTERS, HELPER_REGISTERS)
    pipe = Pipe(gl.allocate_shared_memory(gl.bfloat16, [NUM_STAGES, BLOCK_M, BLOCK_K], rows_desc.layout),
                gl.allocate_shared_memory(gl.bfloat16, [NUM_STAGES, BLOCK_N, BLOCK_K], B_LAYOUT),
                gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BARRIER), gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BARRIER),
                gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER))
    out_0 = OutPipe(gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, CHUNK], results_desc.layout),
                    gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER), gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER))
    out_1 = OutPipe(gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, CHUNK], results_desc.layout),
                    gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER), gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER))
    queue = TaskQueue(gl.allocate_shared_memory(gl.int32, [3 * QUEUE, 1], BARRIER), gl.allocate_shared_memory(gl.int64, [QUEUE, 1], BARRIER),
                      gl.allocate_shared_memory(gl.int64, [QUEUE, 1], BARRIER))
    _init_barriers(pipe, queue, out_0, out_1, False)
    if EP:
        slots = gl.allocate_shared_memory(gl.int64, [BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))

    counters, epoch = _begin_launch(state, capacity)
    memory = (pipe, queue, out_0, out_1)
    biases = (bias_up, bias_down, has_bias_up, has_bias_down)
    load_descs = (rows_desc, up_desc, hidden_desc, down_desc, x_desc, shared_hidden_desc, shared_up_0, shared_down_0, shared_up_1, shared_down_1)
    store_descs = (hidden_store_desc, shared_hidden_store_desc, results_desc, z_desc, shared_z_0, shared_z_1)
    s = Schedule(H, I, shared_I_0, shared_I_1, T, num_shared, gl.load(num_tiles_ptr), group_tiles, row_ring, hidden_ring)
    flags = Flags(state, counters, capacity, SET_HEADER + 2 * capacity + num_shared * token_tiles(s))
    t = Tokens(out, results, row_to_slot, slot_to_row, topk_weights, order, x, x_stride_8, gate_0, gate_1, gated, shared_results_row, K,
               row_to_rank, epoch + 1)
    if WAVES:
        w = Wave(gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, order=[0])), num_tiles_ptr, wave_tiles, wave_table)
        wave = T * 0
        while wave < waves_of(gl.load(num_tiles_ptr, volatile=True), wave_tiles):
            if wave > 0:
                next_wave(counters + SET_WAVES, counters, SET_HEADER + 5 * capacity, wave, state, 0, SET_TASKS)
                _init_barriers(pipe, queue, out_0, out_1, True)
            set_wave(w, wave)
            here = tokens_of_wave(t, w, 4)
            thread_barrier()                             # what these read came through memory that the roles' arguments are about to fill
            _run_roles(s, flags, t, (schedule_of_wave(s, w, 4), here, tile_to_expert + first_tile(w, 4)), memory, biases, activation, limit, load_descs,
                       store_descs, ring, tile_to_expert, tickets, Homes(slots, out, here.row_to_slot, here.row_to_rank), w, SETTINGS)
            wave = wave_index(w, 4) + 1
    elif EP:
        homes = Homes(slots, out, row_to_slot, row_to_rank)
        _run_roles(s, flags, t, (s, t, tile_to_expert), memory, biases, activation, limit, load_descs, store_descs, ring, tile_to_expert, tickets, homes, (),
                   SETTINGS)
    else:
        _run_roles(s, flags, t, (s, t, tile_to_expert), memory, biases, activation, limit, load_descs, store_descs, ring, tile_to_expert, tickets, (), (),
                   SETTINGS)
    _poison_after_abort(state, out, T, H)
    if EP and gl.load(state + CONTROL_ABORT, volatile=True) != 0:
        tell_abort(state)


@gluon.jit
def _poison_after_abort(state, out, T, H):
    """Rule 8: after a time-out no output may look like a result."""
    if gl.load(state + CONTROL_ABORT, volatile=True) != 0:
        columns = gl.arange(0, 1024, layout=gl.BlockedLayout([8], [32], [4], [0]))
        for token in range(gl.program_id(0), T, gl.num_programs(0)):
            for c in range(0, H, 1024):
                gl.store(out + gl.cast(token, gl.int64) * H + c + columns, (columns * float("nan")).to(gl.bfloat16), mask=c + columns < H)
