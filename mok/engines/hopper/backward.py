"""The backward pass of the layer in one launch on sm_90 (docs/kernels-backward.md; rules in docs/kernels.md).

    dh = dy[token] @ w_down[e];  dz = round(w * dh * act'(z));  dx[token] = sum_k round(dz @ w_gate_up[e]) + shared experts' rows
    dw_gate_up[e] = dz.T @ x;  dw_down[e] = dy.T @ round(w * h);  d_topk_weights = <dh, h> + <dy, b_down[e]>;  db = sums over an expert's rows

Legend: T tokens, H hidden, I intermediate, E experts, K routes a token, R rows of the plan, G row tiles of a group. BF16, fp32 accumulation.
Limits: `limits.unsupported_reason`. Task order: backward_tasks.py. Roles, flags and fences: docs/kernels-backward.md.

Compiled variants for this precision: ACT (plain SwiGLU, clamped SwiGLU and gpt-oss's, GeGLU, ReGLU) x RECOMPUTE (z saved by forward, or made anew
here: z = x[token] @ w_gate_up[e].T + b) = 8 on one rank, 8 on several, and 4 for groups whose buffers are bounded (backward_waves.py). Everything
else, the wanted gradients included, is a run-time value.
"""
from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .backward_consume import consume
from .backward_load import producer
from .backward_move import Source, Sums, mover
from .backward_pipe import (
    CHUNK,
    DH_DONE,
    DX_DONE,
    FINISHED,
    INTO_MAIN_GRAD,
    NUM_STAGES,
    QUEUE,
    REGLU,
    SLOTS_DONE,
    WAIT_AUDIT,
    WAIT_START,
    BackwardFlags,
    BackwardPipe,
    Out,
    Rows,
    Tasks,
    z_done,
)
from .backward_store import storer
from .backward_tasks import (
    TILE_M,
    TILE_N,
    WANT_BIAS_DOWN,
    WANT_BIAS_UP,
    WANT_DOWN,
    WANT_TOPK,
    WANT_UP,
    WANT_X,
    Z_AGAIN,
    all_dh_tasks,
    all_dx_tasks,
    all_z_tasks,
    make_schedule,
    own,
    shared_wants,
)
from .backward_waves import Carry, backward_schedule_of_wave
from .compat import reinterpret, thread_barrier
from .expert_parallel_backward_move import group_mover, stage_gradients
from .expert_parallel_send import Homes
from .gemm import SET_HEADER, SET_TASKS
from .peers import tell_abort
from .sync import (
    CONTROL_ABORT,
    CONTROL_ARRIVED,
    CONTROL_EPOCH,
    CONTROL_LIMIT,
    CONTROL_WORDS,
    add_release,
    clock,
    fresh,
    grid_size,
    load_acquire,
    report_timeout,
    wait_at_least,
)
from .wave_loop import Wave, first_tile, next_wave, set_wave, wave_index, waves_of

MOVER_WARPS = 2
POISON_PIECE = gl.constexpr(65536)


@dataclass(frozen=True)
class BackwardConfig:
    """What selects a binary. All but `act` and `recompute` is fixed in production: stagger in k-steps, rows a mover copies at once, debug sleeps.

    recompute: z is made anew inside the launch, in scratch, instead of read from what forward saved. waves: of a group with a capacity_factor; the
    first wave's z is read.
    several_ranks: rows come from and gradients go to the other ranks of a group.
    """
    act: int
    several_ranks: bool = False
    stagger: int = 1              # measured for forward (H200, 2026-11-30): with more, too few of the four stages are left to load ahead
    copy_rows: int = 8
    debug: int = 0
    recompute: bool = False
    waves: bool = False
    omit: int = 0                 # sum of 1: no copy of dy, 2: no copy of x, 4: no sums, 8: no arithmetic in the DH epilogue; for the breakdown only

    def __post_init__(self) -> None:
        if not 0 <= self.act <= REGLU.value:
            raise ValueError(f"act={self.act} must be 0 to {REGLU.value}")
        if self.waves and (self.recompute or not self.several_ranks):
            raise ValueError(f"waves={self.waves} must be False on one rank and with recompute={self.recompute}")
        if not 0 <= self.stagger < NUM_STAGES.value:
            raise ValueError(f"stagger={self.stagger} must be less than the {NUM_STAGES.value} load stages")

    def constexprs(self) -> dict[str, int]:
        return {"ACT": self.act, "STAGGER": self.stagger, "COPY_ROWS_AT_ONCE": self.copy_rows,
                "EP": int(self.several_ranks), "RECOMPUTE": Z_AGAIN.value if self.waves else int(self.recompute), "DEBUG": self.debug,
                "OMIT": self.omit,
                "MOVER_WARPS": MOVER_WARPS, "CONSUMER_REGISTERS": 200, "HELPER_REGISTERS": 104}


INTEGERS = ["T", "K", "E", "H_16", "I_16", "shared_I_16_0", "shared_I_16_1", "num_shared", "x_stride_8", "dy_stride_8", "capacity", "set_words",
            "group_tiles", "shared_results_row", "features", "wants", "activation", "pass_number"]
# bits of `features`, beside those of backward_pipe
HAS_B_DOWN = gl.constexpr(4)


@gluon.jit
def _begin_launch(state, set_words):
    """This launch's counters, zeroed (rule 5: by their owner, inside the launch), after every CTA has arrived.

    Both sets of the block are zeroed, so the forward kernel, which counts on the set that the launch before it left clean, may follow. What earlier
    launches left behind, an aborted one too, cannot matter. The epoch that lets the CTAs go is the one that picks forward's set.
    """
    epoch = gl.load(state + CONTROL_EPOCH, volatile=True)
    sets = state + CONTROL_WORDS
    lanes = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    for i in range(gl.program_id(0) * 128, 2 * set_words, gl.num_programs(0) * 128):
        gl.store(sets + i + lanes, lanes * 0, mask=i + lanes < 2 * set_words)
    thread_barrier()                                     # this CTA has read the epoch and zeroed its share ...
    arrived = gl.atomic_add(state + CONTROL_ARRIVED, 1, sem="acq_rel", scope="gpu")
    if arrived == gl.num_programs(0) - 1:                # ... and so have all others: let them go
        gl.store(state + CONTROL_ARRIVED, 0)
        thread_barrier()
        add_release(state + CONTROL_EPOCH, 1)
    wait_at_least(state + CONTROL_EPOCH, epoch + 1, state, WAIT_START, arrived)
    thread_barrier()
    return sets + (epoch & 1) * set_words


@gluon.jit
def _init_barriers(pipe, tasks, out_0, out_1, AGAIN: gl.constexpr):
    """All barriers of the CTA in their first phase. AGAIN: they have been used, by roles that have ended and loads that have arrived."""
    if AGAIN:
        for i in gl.static_range(QUEUE):
            mbarrier.invalidate(tasks.full.index(i))
            mbarrier.invalidate(tasks.empty.index(i))
        for i in gl.static_range(NUM_STAGES):
            mbarrier.invalidate(pipe.load_ready.index(i))
            mbarrier.invalidate(pipe.load_empty.index(i))
            mbarrier.invalidate(pipe.z_done.index(i))
        mbarrier.invalidate(pipe.lead.index(0))
        mbarrier.invalidate(out_0.full)
        mbarrier.invalidate(out_0.empty)
        mbarrier.invalidate(out_1.full)
        mbarrier.invalidate(out_1.empty)
        thread_barrier()
    for i in gl.static_range(QUEUE):
        mbarrier.init(tasks.full.index(i), count=1)
        mbarrier.init(tasks.empty.index(i), count=3)
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(pipe.load_ready.index(i), count=1)
        mbarrier.init(pipe.load_empty.index(i), count=2)
        mbarrier.init(pipe.z_done.index(i), count=2)
    mbarrier.init(pipe.lead.index(0), count=1)
    mbarrier.init(out_0.full, count=1)
    mbarrier.init(out_0.empty, count=1)
    mbarrier.init(out_1.full, count=1)
    mbarrier.init(out_1.empty, count=1)
    if AGAIN:
        fence_async_shared()                             # the TMA engine sees the new barriers ...
        thread_barrier()                                 # ... and so does every role that starts behind this


@gluon.jit
def _mover(s, rows, flags, m, dy, x, dy_rows, x_rows, pass_number, waves, COPY_ROWS_AT_ONCE: gl.constexpr, NW: gl.constexpr, EP: gl.constexpr,
           RECOMPUTE: gl.constexpr, OMIT: gl.constexpr, DEBUG: gl.constexpr):
    # strides arrive in eighths, as widths do in sixteenths (see `_backward_kernel`)
    dy, x = Source(dy.x, fresh(dy.x_stride) * 8), Source(x.x, fresh(x.x_stride) * 8)
    if EP:
        group_mover(s, rows, flags, m, x, dy_rows, x_rows, pass_number, waves, COPY_ROWS_AT_ONCE, 1, NW, RECOMPUTE, OMIT, DEBUG)
    else:
        mover(s, rows, flags, m, dy, x, dy_rows, x_rows, COPY_ROWS_AT_ONCE, 1, NW, RECOMPUTE, OMIT, DEBUG)


@gluon.jit
def _audit(s, flags, totals, state, RECOMPUTE: gl.constexpr):
    """The last CTA to finish checks that exactly the tasks that roles waited for were published; a mismatch is reported as a time-out is (rule 8)."""
    finished = gl.atomic_add(totals + FINISHED, 1, sem="acq_rel", scope="gpu")
    if finished == grid_size(finished) - 1:
        dh, dx = load_acquire(totals + DH_DONE), load_acquire(totals + DX_DONE)
        if dh != all_dh_tasks(s):
            report_timeout(state, WAIT_AUDIT, finished, all_dh_tasks(s), dh)
        elif dx != all_dx_tasks(s):
            report_timeout(state, WAIT_AUDIT, finished, all_dx_tasks(s), dx)
        if RECOMPUTE:
            z = load_acquire(z_done(s, flags))
            if z != all_z_tasks(s, RECOMPUTE):
                report_timeout(state, WAIT_AUDIT, finished, all_z_tasks(s, RECOMPUTE), z)


@gluon.jit
def words_before_staging(s, capacity, num_shared):
    """Counters of a launch with waves before those of experts."""
    return 3 * capacity + (2 * num_shared + 1) * s.token_tiles + 1


@gluon.jit
def _run_roles(s, rows, flags, shares, memory, bias_up, load_descs, store_descs, shared_results_row, homes, recomputed, sources, waves,
               settings: gl.constexpr):
    """All roles of a CTA, from the first task to the last. shares: the producer's rows, with waves this one's share, and the movers' sums; homes: with EP,
    where rows of dx go.

    settings: ACT, STAGGER, COPY_ROWS_AT_ONCE, EP, RECOMPUTE, DEBUG, OMIT, MOVER_WARPS, registers of consumers and of the other roles.
    """
    here, m = shares
    pipe, tasks, out_0, out_1 = memory
    dy, x, dy_rows, x_rows, pass_number = sources
    routed, shared_0, shared_1, tokens_desc = load_descs
    hidden, results_desc, up_grads, down_grads = store_descs
    ACT: gl.constexpr = settings[0]
    STAGGER: gl.constexpr = settings[1]
    COPY_ROWS_AT_ONCE: gl.constexpr = settings[2]
    EP: gl.constexpr = settings[3]
    RECOMPUTE: gl.constexpr = settings[4]
    DEBUG: gl.constexpr = settings[5]
    OMIT: gl.constexpr = settings[6]
    MOVER_WARPS: gl.constexpr = settings[7]
    CONSUMER_REGISTERS: gl.constexpr = settings[8]
    HELPER_REGISTERS: gl.constexpr = settings[9]
    gl.warp_specialize([
        (consume, (s, rows, flags, pipe, tasks, out_0, bias_up, waves, 0, ACT, STAGGER, EP, RECOMPUTE, OMIT, DEBUG)),
        (consume, (s, rows, flags, pipe, tasks, out_1, bias_up, waves, 1, ACT, STAGGER, EP, RECOMPUTE, OMIT, DEBUG)),
        (producer, (s, here, flags, pipe, tasks, routed, shared_0, shared_1, tokens_desc, waves, RECOMPUTE, DEBUG)),
        (storer, (s, rows, flags, pipe, tasks, out_0, out_1, hidden, results_desc, up_grads, down_grads, shared_results_row, homes, recomputed, EP, RECOMPUTE,
                  DEBUG)),
        (_mover, (s, rows, flags, m, dy, x, dy_rows, x_rows, pass_number, waves, COPY_ROWS_AT_ONCE, MOVER_WARPS, EP, RECOMPUTE, OMIT, DEBUG)),
    ], [4, 1, 1, MOVER_WARPS], [CONSUMER_REGISTERS, HELPER_REGISTERS, HELPER_REGISTERS, HELPER_REGISTERS])


@gluon.jit(do_not_specialize=[*INTEGERS, "limit"])
def _backward_kernel(dy_rows_desc, x_rows_desc, z_desc, dz_desc, wh_desc, up_desc, down_desc, results_desc, up_grad_desc, down_grad_desc,
                     dy_desc, x_desc, shared_dz_desc, shared_wh_desc, shared_z_0, shared_up_0, shared_down_0, shared_up_grad_0, shared_down_grad_0,
                     shared_z_1, shared_up_1, shared_down_1, shared_up_grad_1, shared_down_grad_1,
                     dy, x, dy_rows, x_rows, dz, results, dx, d_topk_weights, main_up, main_down, b_down, db_up, db_down, gate_0, gate_1, d_gate_0,
                     d_gate_1, d_up, d_down, d_shared_up_0, d_shared_down_0, d_shared_up_1, d_shared_down_1, gates, gate_slopes, partials,
                     topk_weights, row_to_slot, slot_to_row, tile_to_expert, expert_offsets, tokens_per_expert,
                     num_tiles_ptr, state, T, K, E, H_16, I_16, shared_I_16_0, shared_I_16_1, num_shared, x_stride_8, dy_stride_8,
                     capacity, set_words, group_tiles, shared_results_row, features, wants, activation, limit, b_up, row_to_rank, row_weights, pass_number,
                     z_again_desc, carry, wave_table,
                     ACT: gl.constexpr, STAGGER: gl.constexpr, COPY_ROWS_AT_ONCE: gl.constexpr, EP: gl.constexpr,
                     RECOMPUTE: gl.constexpr, DEBUG: gl.constexpr, OMIT: gl.constexpr, MOVER_WARPS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
                     HELPER_REGISTERS: gl.constexpr):
    SETTINGS: gl.constexpr = (ACT, STAGGER, COPY_ROWS_AT_ONCE, EP, RECOMPUTE, DEBUG, OMIT, MOVER_WARPS, CONSUMER_REGISTERS, HELPER_REGISTERS)
    CHUNKS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    a = gl.allocate_shared_memory(gl.bfloat16, [2 * NUM_STAGES, CHUNK, CHUNK], CHUNKS)
    b = gl.allocate_shared_memory(gl.bfloat16, [NUM_STAGES, CHUNK, TILE_N], CHUNKS)
    pipe = BackwardPipe(a, b, reinterpret(b, gl.bfloat16, [4 * NUM_STAGES, CHUNK, CHUNK], CHUNKS),
                        gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BARRIER), gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BARRIER),
                        gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BARRIER), gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER))
    out_0 = Out(gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, CHUNK], CHUNKS), gl.allocate_shared_memory(gl.int64, [1], BARRIER),
                gl.allocate_shared_memory(gl.int64, [1], BARRIER))
    out_1 = Out(gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, CHUNK], CHUNKS), gl.allocate_shared_memory(gl.int64, [1], BARRIER),
                gl.allocate_shared_memory(gl.int64, [1], BARRIER))
    tasks = Tasks(gl.allocate_shared_memory(gl.int32, [4 * QUEUE, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0])),
                  gl.allocate_shared_memory(gl.int64, [QUEUE, 1], BARRIER), gl.allocate_shared_memory(gl.int64, [QUEUE, 1], BARRIER))
    _init_barriers(pipe, tasks, out_0, out_1, False)
    if EP:
        slots = gl.allocate_shared_memory(gl.int64, [TILE_M], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))

    # Widths in sixteenths, as the arguments have them: multiplied up by each role (`own`), the compiler knows that rows start at multiples of 16 elements
    # without specialising on the sizes, and nothing that arithmetic made has to be kept for the roles.
    s = make_schedule(H_16, I_16, shared_I_16_0, shared_I_16_1, fresh(T), gl.load(num_tiles_ptr), E, num_shared, group_tiles, wants, RECOMPUTE)
    # counters: capacity row tiles for dy_ready and dh_ready, then token tiles (dh_ready of shared experts, gates_ready), then experts; before those,
    # with RECOMPUTE, z_done and z_ready, one word more than there are of dh_ready
    totals = _begin_launch(state, set_words)
    first = totals + SET_HEADER
    gates_ready = first + 2 * capacity + num_shared * s.token_tiles
    x_ready = gates_ready + s.token_tiles
    if RECOMPUTE:
        x_ready += 1 + capacity + num_shared * s.token_tiles
    flags = BackwardFlags(totals, first, first + capacity, gates_ready, x_ready, state, capacity)
    rows = Rows(tile_to_expert, expert_offsets, tokens_per_expert, row_to_slot, row_weights if EP else topk_weights, gates, features, partials,
                main_up, main_down, activation, limit)
    m = Sums(dx, results, shared_results_row, slot_to_row, d_topk_weights, b_down, features & HAS_B_DOWN, dz, db_up, db_down, gate_0, gate_1, d_gate_0,
             d_gate_1, gate_slopes, K, E, row_to_rank)
    if EP:
        stage_gradients(own(s), flags, dy, dy_stride_8, x, x_stride_8, topk_weights, K, E, pass_number, results, 8, RECOMPUTE != 0, DEBUG)
    memory = (pipe, tasks, out_0, out_1)
    sources = (Source(dy, dy_stride_8), Source(x, x_stride_8), dy_rows, x_rows, pass_number)
    load_descs = ((dy_rows_desc, x_rows_desc, z_desc, dz_desc, wh_desc, up_desc, down_desc), (shared_z_0, shared_up_0, shared_down_0),
                  (shared_z_1, shared_up_1, shared_down_1), (dy_desc, x_desc, shared_dz_desc, shared_wh_desc))
    store_descs = ((dz_desc, wh_desc, shared_dz_desc, shared_wh_desc), results_desc, (up_grad_desc, shared_up_grad_0, shared_up_grad_1),
                   (down_grad_desc, shared_down_grad_0, shared_down_grad_1))
    bias_up = (b_up, features) if RECOMPUTE else ()
    if RECOMPUTE == Z_AGAIN:
        w = Wave(gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, order=[0])), num_tiles_ptr, capacity, wave_table)
        widths = (H_16, I_16, shared_I_16_0, shared_I_16_1)
        waves = (Carry(w, carry), z_again_desc, (widths, T, num_shared, group_tiles, wants))
        wave = T * 0
        while wave < waves_of(gl.load(num_tiles_ptr, volatile=True), capacity):
            if wave > 0:
                arrivals = x_ready + E + 2
                next_wave(arrivals, totals, SET_HEADER + words_before_staging(s, capacity, num_shared) + E + 2, wave, state, SLOTS_DONE, SET_TASKS)
                _init_barriers(pipe, tasks, out_0, out_1, True)
            set_wave(w, wave)
            part = backward_schedule_of_wave(widths, T, num_shared, group_tiles, wants, tile_to_expert, expert_offsets, E, w, 4)
            begin = first_tile(w, 4)
            here = Rows(tile_to_expert + begin, expert_offsets, tokens_per_expert, row_to_slot + begin * TILE_M, row_weights, gates, features, partials,
                        main_up, main_down, activation, limit)
            thread_barrier()                             # what these read came through memory that the roles' arguments are about to fill
            homes = Homes(slots, results, here.row_to_slot, row_to_rank + begin * TILE_M)
            _run_roles(part, rows, flags, (here, m), memory, bias_up, load_descs, store_descs, shared_results_row, homes,
                       (z_again_desc, shared_z_0, shared_z_1), sources, waves, SETTINGS)
            wave = wave_index(w, 4) + 1
        s = own(backward_schedule_of_wave(widths, T, num_shared, group_tiles, wants, tile_to_expert, expert_offsets, E, w, 4))
    else:
        recomputed = (z_desc, shared_z_0, shared_z_1) if RECOMPUTE else ()
        homes = Homes(slots, results, row_to_slot, row_to_rank) if EP else ()
        _run_roles(s, rows, flags, (rows, m), memory, bias_up, load_descs, store_descs, shared_results_row, homes, recomputed, sources, (), SETTINGS)
        # Made anew: kept through the roles, it would take the consumer's registers.
        s = own(make_schedule(H_16, I_16, shared_I_16_0, shared_I_16_1, fresh(T), gl.load(num_tiles_ptr, volatile=True), fresh(E), fresh(num_shared),
                              fresh(group_tiles), fresh(wants), RECOMPUTE))
    H, I, I_0, I_1 = s.H, s.I, s.I_0, s.I_1
    _audit(s, flags, totals, state, RECOMPUTE)
    if load_acquire(state + CONTROL_ABORT) != 0:
        if EP:
            tell_abort(state)
        # Rule 8: after a time-out no output may look like a result. Whoever sees the flag helps, once nobody writes results any more.
        _all_finished(totals, state)
        thread_barrier()
        tickets = totals + FINISHED + 1
        into_main = (features & INTO_MAIN_GRAD) != 0
        _poison(dx, s.T.to(gl.int64) * H, (wants & WANT_X) != 0, tickets)
        _poison(d_topk_weights, s.T.to(gl.int64) * K, (wants & WANT_TOPK) != 0, tickets + 1)
        _poison(d_up, E.to(gl.int64) * 2 * I * H, ((wants & WANT_UP) != 0) & (into_main == 0), tickets + 2)
        _poison(d_down, E.to(gl.int64) * I * H, ((wants & WANT_DOWN) != 0) & (into_main == 0), tickets + 3)
        _poison(main_up, E.to(gl.int64) * 2 * I * H, ((wants & WANT_UP) != 0) & into_main, tickets + 2)
        _poison(main_down, E.to(gl.int64) * I * H, ((wants & WANT_DOWN) != 0) & into_main, tickets + 3)
        _poison(db_up, E.to(gl.int64) * 2 * I, (wants & WANT_BIAS_UP) != 0, tickets + 4)
        _poison(db_down, E.to(gl.int64) * H, (wants & WANT_BIAS_DOWN) != 0, tickets + 5)
        _poison_shared(d_shared_up_0, d_shared_down_0, d_gate_0, H, I_0, shared_wants(s, T * 0), tickets + 6)
        _poison_shared(d_shared_up_1, d_shared_down_1, d_gate_1, H, I_1, shared_wants(s, T * 0 + 1), tickets + 8)


@gluon.jit
def _all_finished(totals, state):
    """Spin until every CTA has finished its roles, or for the spin limit; unlike wait_at_least this one is not cut short by the abort flag."""
    start = clock(load_acquire(totals + FINISHED))
    while (load_acquire(totals + FINISHED) < grid_size(start)) & (clock(start) - start <= gl.load(state + CONTROL_LIMIT)):
        start += 0


@gluon.jit
def _poison(target, count, wanted, ticket):
    """NaN into `count` elements, in pieces that the CTAs take by ticket."""
    lanes = gl.arange(0, 1024, layout=gl.BlockedLayout([8], [32], [4], [0]))
    if wanted:
        start = gl.atomic_add(ticket, 1, sem="relaxed", scope="gpu").to(gl.int64) * POISON_PIECE
        while start < count:
            for i in range(0, POISON_PIECE, 1024):
                gl.store(target + start + i + lanes, (lanes * float("nan")).to(target.dtype.element_ty), mask=start + i + lanes < count)
            start = gl.atomic_add(ticket, 1, sem="relaxed", scope="gpu").to(gl.int64) * POISON_PIECE


@gluon.jit
def _poison_shared(up, down, gate, H, width, wanted, tickets):
    _poison(up, (2 * width).to(gl.int64) * H, (wanted & 1) != 0, tickets)
    _poison(down, width.to(gl.int64) * H, (wanted & 2) != 0, tickets + 1)
    lanes = gl.arange(0, 1024, layout=gl.BlockedLayout([8], [32], [4], [0]))
    if (wanted & 4) != 0:                                # small: every CTA writes all of it
        for i in range(0, H, 1024):
            gl.store(gate + i + lanes, (lanes * float("nan")).to(gl.bfloat16), mask=i + lanes < H)
