"""The consumers of the backward kernel: mainloops, the DH epilogue, and what happens to every other result."""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from .backward_pipe import (
    CHUNK,
    GEGLU,
    HAS_B_UP,
    NUM_STAGES,
    PLAIN_SWIGLU,
    REGLU,
    TASK_BEGUN,
    TASK_END,
    TASK_IDLE,
    TASK_UNFINISHED,
    Z_STEPS,
    gated,
    into_main_grad,
    partials_of,
    phase_of,
    pop_task,
    stage_of,
    unpack,
)
from .backward_tasks import (
    DH,
    DW_UP,
    DX,
    HALF_N,
    TILE_M,
    TILE_N,
    Z_AGAIN,
    Z,
    own,
)
from .backward_waves import tile_of_carry
from .compat import reinterpret, thread_barrier
from .gemm import ACT_GEGLU, ACT_REGLU, ACT_SWIGLU_OAI, ACT_SWIGLU_PLAIN, LOG2_E, _halves, _reciprocal, _with_bias, activate
from .sync import fresh, fresh_float, fresh_pairs, nap, new_block
from .wave_loop import first_tile


@gluon.jit
def activate_both(g, u, activation, limit, ACT: gl.constexpr):
    """(h, dh/dg, dh/du) in fp32. h is what gemm.activate gives, bit for bit: the same operations in the same order.

    A clamp passes the gradient where its input lies within the limits, their ends included; a NaN counts as inside, so that it reaches the gradient.
    """
    if ACT == PLAIN_SWIGLU:
        h = activate(g, u, ACT_SWIGLU_PLAIN, limit)
        sigmoid = _reciprocal(1.0 + gl.exp2(g * -LOG2_E))   # as in activate, so the compiler computes it once
        slope_u = g * sigmoid
        slope_g = u * gl.fma(slope_u, 1.0 - sigmoid, sigmoid)
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
        sigmoid = _reciprocal(1.0 + gl.exp2(g * gl.where(oai, -1.702 * LOG2_E, -LOG2_E)))
        slope_u = g * sigmoid
        slope_g = gl.where(inside_g, u * sigmoid * gl.fma(alpha * g, 1.0 - sigmoid, 1.0), 0.0)
        slope_u = gl.where(inside_u, slope_u, 0.0)
    return h, slope_g, slope_u


@gluon.jit
def _z_step(dh, weight, valid, rows, pipe, it, LAYOUT: gl.constexpr, WG: gl.constexpr, ACT: gl.constexpr, OMIT: gl.constexpr):
    """64 columns of the DH epilogue, in place: z_gate -> dz_gate, z_up -> dz_up, w*h beside them. Returns <dh, h> of each row.

    Padding rows become zeros whatever z holds there: they are contracted over by the weight gradients.
    """
    EIGHTH: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16])
    stage = stage_of(it)
    mbarrier.wait(pipe.load_ready.index(stage), phase_of(it))
    d0, d1 = _halves(dh, CHUNK, CHUNK, EIGHTH)
    a0, b0, c0, part_0 = _dh_half(d0, weight, valid, rows, pipe, stage, 0, LAYOUT, WG, ACT, OMIT)
    a1, b1, c1, part_1 = _dh_half(d1, weight, valid, rows, pipe, stage, 1, LAYOUT, WG, ACT, OMIT)
    pipe.a.index(2 * stage + WG).store(_whole(a0, a1, CHUNK, LAYOUT))
    pipe.chunks.index(4 * stage + WG).store(_whole(b0, b1, CHUNK, LAYOUT))
    pipe.chunks.index(4 * stage + 2 + WG).store(_whole(c0, c1, CHUNK, LAYOUT))
    fence_async_shared()                                 # these ordinary stores before the TMA store of the storer
    return part_0 + part_1


@gluon.jit
def _dh_half(dh, weight, valid, rows, pipe, stage, HALF: gl.constexpr, LAYOUT: gl.constexpr, WG: gl.constexpr, ACT: gl.constexpr, OMIT: gl.constexpr):
    """32 columns of a z-step: (dz_gate, dz_up, w*h) in bf16 and <dh, h> of each row."""
    EIGHTH: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16])
    SIXTEENTH: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16])
    d0, d1 = _halves(dh, CHUNK, CHUNK // 2, SIXTEENTH)
    a0, b0, c0, product_0 = _dh_quarter(d0, weight, valid, rows, pipe, stage, 2 * HALF, LAYOUT, WG, ACT, OMIT)
    a1, b1, c1, product_1 = _dh_quarter(d1, weight, valid, rows, pipe, stage, 2 * HALF + 1, LAYOUT, WG, ACT, OMIT)
    part = gl.sum(_whole(product_0, product_1, CHUNK // 2, EIGHTH), 1)
    return _whole(a0, a1, CHUNK // 2, EIGHTH), _whole(b0, b1, CHUNK // 2, EIGHTH), _whole(c0, c1, CHUNK // 2, EIGHTH), part


@gluon.jit
def _dh_quarter(dh, weight, valid, rows, pipe, stage, QUARTER: gl.constexpr, LAYOUT: gl.constexpr, WG: gl.constexpr, ACT: gl.constexpr,
                OMIT: gl.constexpr):
    """16 columns: (dz_gate, dz_up, w*h) in bf16 and dh * h.

    One quarter of a z-step after the other, its loads behind and its results before everything of the next (`new_block`): left alone, the compiler works on
    all four at once, which takes up to 60 registers more than there are beside the accumulators.
    """
    SIXTEENTH: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16])
    stage = new_block(stage)
    g = _quarter(pipe.a.index(2 * stage + WG).load(LAYOUT), QUARTER)
    u = _quarter(pipe.chunks.index(4 * stage + WG).load(LAYOUT), QUARTER)
    # the same values for every column: rows belong to the same threads in both layouts
    weight = gl.convert_layout(weight, gl.SliceLayout(1, SIXTEENTH), assert_trivial=True)[:, None]
    valid = gl.convert_layout(valid, gl.SliceLayout(1, SIXTEENTH), assert_trivial=True)[:, None]
    g = gl.where(valid, g.to(gl.float32), 0.0)           # every activation gives h = 0 for z = 0, and weight and dh of padding are 0
    u = gl.where(valid, u.to(gl.float32), 0.0)
    if OMIT & 8 != 0:
        h, slope_g, slope_u = u, g, u
    else:
        h, slope_g, slope_u = activate_both(g, u, fresh(rows.activation), fresh_float(rows.limit), ACT)
    h = h.to(gl.bfloat16).to(gl.float32)
    weighted = dh * weight
    dz_gate, dz_up, wh = (weighted * slope_g).to(gl.bfloat16), (weighted * slope_u).to(gl.bfloat16), (h * weight).to(gl.bfloat16)
    return fresh_pairs(dz_gate), fresh_pairs(dz_up), fresh_pairs(wh), fresh_float(dh * h)


@gluon.jit
def _quarter(value, QUARTER: gl.constexpr):
    """Columns 16 * QUARTER.. of a 64 x 64 register tile, in the registers that hold them. The compiler drops what loads the others."""
    EIGHTH: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16])
    SIXTEENTH: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16])
    left, right = _halves(value, CHUNK, CHUNK, EIGHTH)
    first, second = _halves(left if QUARTER < 2 else right, CHUNK, CHUNK // 2, SIXTEENTH)
    return first if QUARTER % 2 == 0 else second


@gluon.jit
def _whole(left, right, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """The inverse of _halves: 64 x COLUMNS from two tiles of half the columns, in the registers that hold them."""
    return gl.convert_layout(gl.join(left, right).permute(0, 2, 1).reshape([CHUNK, COLUMNS]), LAYOUT, assert_trivial=True)


@gluon.jit
def _multiply(pipe, acc, it, begin, end, WG: gl.constexpr, TRANSPOSED: gl.constexpr, K_MAJOR: gl.constexpr):
    """k-steps begin..end-1 of a task. TRANSPOSED: A is stored with its rows contiguous; K_MAJOR: B with k contiguous, as 256 rows of 64.

    One step stays in flight while the stage of the one before it is given back.
    """
    for k in range(begin, end):
        stage = stage_of(it)
        mbarrier.wait(pipe.load_ready.index(stage), phase_of(it))
        a = pipe.a.index(2 * stage + WG)
        if TRANSPOSED:
            a = a.permute((1, 0))
        b = pipe.b.index(stage)
        if K_MAJOR:
            b = reinterpret(b, gl.bfloat16, [TILE_N, CHUNK], gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)).permute((1, 0))
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        mbarrier.arrive(pipe.load_empty.index(stage_of(it + NUM_STAGES - 1)), pred=k > 0)
        it += 1
    return acc, it


@gluon.jit
def _multiply_all(pipe, it, steps, staggered, begun, WG: gl.constexpr, STAGGER: gl.constexpr, TRANSPOSED: gl.constexpr, K_MAJOR: gl.constexpr,
                  BEGUN: gl.constexpr = False):
    """All k-steps of a task, as four 64 x 64 quarters of its result; consumer 0 tells consumer 1 when it may start. BEGUN: its sums begin with those at
    `begun`."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    HALF: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    QUARTER: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    if BEGUN:
        first = fresh(it * 0)                            # see `_hand_over`
        rows, columns = first + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, ACC)), first + gl.arange(0, TILE_N, layout=gl.SliceLayout(0, ACC))
        acc = gl.load(begun + (rows * TILE_N)[:, None] + columns[None, :])
    else:
        acc = gl.zeros([CHUNK, TILE_N], gl.float32, ACC)
    if K_MAJOR:
        # As forward begins: its first multiplication has no accumulator, and whether a sum of -0 keeps its sign could depend on that.
        acc, it = _multiply(pipe, acc, it, 0, 1, WG, TRANSPOSED, K_MAJOR)
        first = gl.minimum(steps, gl.maximum(STAGGER, 1))
        if STAGGER > 1:
            acc, it = _multiply(pipe, acc, it, 1, first, WG, TRANSPOSED, K_MAJOR)
        if STAGGER > 0 and WG == 0:
            mbarrier.arrive(pipe.lead.index(0), pred=staggered)
        acc, it = _multiply(pipe, acc, it, first, steps, WG, TRANSPOSED, K_MAJOR)
    elif STAGGER > 0 and WG == 0:
        first = gl.minimum(steps, STAGGER)
        acc, it = _multiply(pipe, acc, it, 0, first, WG, TRANSPOSED, K_MAJOR)
        mbarrier.arrive(pipe.lead.index(0), pred=staggered)
        acc, it = _multiply(pipe, acc, it, first, steps, WG, TRANSPOSED, K_MAJOR)
    else:
        acc, it = _multiply(pipe, acc, it, 0, steps, WG, TRANSPOSED, K_MAJOR)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(pipe.load_empty.index(stage_of(it + NUM_STAGES - 1)), pred=steps > 0)
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
    I, H = fresh(s.I) * 16, fresh(s.H) * 16
    half_tiles = gl.cdiv(I, TILE_M)
    half = ((kind == DW_UP) & (tile >= half_tiles)).to(gl.int32)
    row = (tile - half * half_tiles) * TILE_M + WG * CHUNK
    row_limit = gl.where(kind == DW_UP, I, H)
    width = gl.where(kind == DW_UP, H, I)
    target = gl.where(kind == DW_UP, rows.main_up + (2 * expert + half).to(gl.int64) * I * H, rows.main_down + expert.to(gl.int64) * H * I)
    at = column * TILE_N
    _add_chunk(q0, target, row, at, width, row_limit, width, LAYOUT)
    _add_chunk(q1, target, row, at + CHUNK, width, row_limit, width, LAYOUT)
    _add_chunk(q2, target, row, at + 2 * CHUNK, width, row_limit, width, LAYOUT)
    _add_chunk(q3, target, row, at + 3 * CHUNK, width, row_limit, width, LAYOUT)


@gluon.jit
def _routes(rows, slot, tile, is_dh, waves, LAYOUT: gl.constexpr, WG: gl.constexpr, RECOMPUTE: gl.constexpr):
    """Route of each of a routed DH task's 64 rows, -1 = padding; loaded before the multiplication, so that it is there when the epilogue begins."""
    row = tile * TILE_M + WG * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LAYOUT))
    inside = (row >= 0) & is_dh & (slot < 0)
    if RECOMPUTE == Z_AGAIN:
        row += first_tile(waves[0].wave, 4) * TILE_M
    return gl.load(rows.row_to_slot + row, mask=inside, other=-1)


@gluon.jit
def _dh_epilogue(s, rows, flags, pipe, quarters, route, slot, tile, column, it, LAYOUT: gl.constexpr, WG: gl.constexpr, ACT: gl.constexpr,
                 EP: gl.constexpr, OMIT: gl.constexpr):
    """The four z-steps of a DH task and its partials of d_topk_weights (of the gate's gradient, for a shared expert)."""
    q0, q1, q2, q3 = quarters
    # Also for a task without k-steps: what the producer acquired before it loaded the first stage (gates, pulled weights) is there only now.
    mbarrier.wait(pipe.load_ready.index(stage_of(it)), phase_of(it))
    row = fresh(tile) * TILE_M + WG * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LAYOUT))
    valid = route >= 0
    if EP:
        # pulled by the movers, by row: the producer acquired their counter, that of the rows of dy, before this task's first stage
        weight = gl.load(rows.topk_weights + row, mask=valid, other=0.0)
    else:
        weight = gl.load(rows.topk_weights + route, mask=valid, other=0.0)
    if slot >= 0:
        # the movers' gates: the producer acquired their counter before it loaded this task's first stage
        valid = row < fresh(s.T)
        weight = gl.where(valid, weight * 0.0 + 1.0, 0.0)
        if ((gated(rows) >> slot) & 1) != 0:
            weight = gl.load(rows.gates + slot * gl.cdiv(fresh(s.T), TILE_M) * TILE_M + row, mask=valid, other=0.0)
    EIGHTH: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16])
    part = gl.zeros([CHUNK], gl.float32, gl.SliceLayout(1, EIGHTH))
    # A loop, with the quarters moving up, and its length hidden: four copies of this code outgrow the instruction cache, and fetching them took
    # longer than the task's multiplication.
    for c in range(fresh(it * 0 + Z_STEPS)):
        part += _z_step(q0, weight, valid, rows, pipe, it + c, LAYOUT, WG, ACT, OMIT)
        if c == Z_STEPS - 1:
            rows_part = gl.convert_layout(part, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
            again = fresh(tile) * TILE_M + WG * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LAYOUT))
            gl.store(partials_of(own(s), rows, flags, slot, fresh(column), again), rows_part, mask=valid)
            thread_barrier()                             # the partials of all threads before the storer's release, through this arrival
        mbarrier.arrive(pipe.z_done.index(stage_of(it + c)))
        q0, q1, q2 = q1, q2, q3
    return it + Z_STEPS


@gluon.jit
def _hand_over(q0, q1, q2, q3, pipe, out, it, turns, WG: gl.constexpr):
    """A 64 x 256 result, rounded, to the storer: left half in this consumer's own chunks, right half in the store step's stage."""
    stage = stage_of(it)
    mbarrier.wait(out.empty, (turns & 1) ^ 1)
    left = fresh(it * 0)                                 # not a constant: places of chunks are made here, not kept from the role's start on
    out.chunks.index(left).store(q0.to(gl.bfloat16))
    out.chunks.index(left + 1).store(q1.to(gl.bfloat16))
    mbarrier.wait(pipe.load_ready.index(stage), phase_of(it))
    pipe.a.index(2 * stage + WG).store(q2.to(gl.bfloat16))
    pipe.chunks.index(4 * stage + WG).store(q3.to(gl.bfloat16))
    fence_async_shared()                                 # these ordinary stores before the TMA stores of the storer
    mbarrier.arrive(out.full)
    return it + 1, turns ^ 1


@gluon.jit
def _weight_result(s, rows, pipe, out, quarters, task, bits, waves, it, turns, LAYOUT: gl.constexpr, WG: gl.constexpr, RECOMPUTE: gl.constexpr):
    """What becomes of a weight gradient's sums: left to the next wave, added into main_grad or handed over. Returns (it, turns).

    task = (kind, slot, tile, column, k-steps, expert)
    """
    q0, q1, q2, q3 = quarters
    kind, slot, tile, column, steps, expert = task
    if RECOMPUTE == Z_AGAIN and (bits & TASK_UNFINISHED) != 0:
        left = tile_of_carry(s, waves[0], kind, tile, column, 0, WG)
        begin = fresh(it * 0)                            # see `_hand_over`
        r = begin + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LAYOUT))
        c = begin + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, LAYOUT))
        place = (r * TILE_N)[:, None] + c[None, :]
        gl.store(left + place, q0)
        gl.store(left + CHUNK + place, q1)
        gl.store(left + 2 * CHUNK + place, q2)
        gl.store(left + 3 * CHUNK + place, q3)
    elif (slot < 0) & (into_main_grad(rows) != 0):
        if steps > 0:
            _into_main_grad(s, rows, quarters, kind, tile, column, expert, LAYOUT, WG)
    else:
        it, turns = _hand_over(q0, q1, q2, q3, pipe, out, it, turns, WG)
    return it, turns


@gluon.jit
def _add_bias_up(s, quarters, bias_up, features, slot, column, expert, LAYOUT: gl.constexpr):
    """The four quarters of a Z task, gate, gate, up, up, with the routed expert's bias, as forward adds it: in fp32, before the one rounding."""
    q0, q1, q2, q3 = quarters
    if ((fresh(features) & HAS_B_UP) != 0) & (slot < 0):
        I = fresh(s.I) * 16
        bias = bias_up + expert.to(gl.int64) * (2 * I)
        at = column * HALF_N
        q0 = _with_bias(q0, bias, at, I, LAYOUT)
        q1 = _with_bias(q1, bias, at + CHUNK, I, LAYOUT)
        q2 = _with_bias(q2, bias + I, at, I, LAYOUT)
        q3 = _with_bias(q3, bias + I, at + CHUNK, I, LAYOUT)
    return q0, q1, q2, q3


@gluon.jit
def consume(s, rows, flags, pipe, tasks, out, bias_up, waves, WG: gl.constexpr, ACT: gl.constexpr, STAGGER: gl.constexpr, EP: gl.constexpr,
            RECOMPUTE: gl.constexpr, OMIT: gl.constexpr, DEBUG: gl.constexpr):
    """All GEMM tasks of this CTA, rows 64*WG.. of each.

    Consumer 1 starts a task STAGGER k-steps behind consumer 0: each then has the tensor cores to itself while the other runs its epilogue.
    bias_up = (b_gate_up, the launch's features), with RECOMPUTE. waves = (Carry,) with waves; rows are those of the whole plan then, too.
    """
    QUARTER: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    it = gl.program_id(0) * 0
    turns = it                           # one register for three counts: results handed over and leads waited for, mod 2, tasks from bit 2 on
    bits, tile, steps, expert = pop_task(tasks, turns >> 2, 4)
    while (bits & TASK_END) == 0:
        kind, slot, column = unpack(bits, RECOMPUTE)
        route = _routes(rows, slot, tile, kind == DH, waves, QUARTER, WG, RECOMPUTE)
        nap(tile + column + WG * 7, DEBUG)
        # Where a task has fewer steps than stages, consumer 0 could run two tasks ahead and `lead` would lose a phase: no stagger then.
        staggered = steps >= NUM_STAGES
        if STAGGER > 0 and WG == 1:
            mbarrier.wait(pipe.lead.index(0), (turns >> 1) & 1, pred=staggered)
            turns = turns ^ (staggered.to(gl.int32) << 1)
        idle = False
        if WG == 1:
            idle = (bits & TASK_IDLE) != 0
        if idle:
            it, turns = _pass_through(pipe, out, kind, steps, it, turns, RECOMPUTE)
        elif RECOMPUTE and kind == Z:
            q0, q1, q2, q3, it = _multiply_all(pipe, it, steps, staggered, (), WG, STAGGER, False, True)
            q0, q1, q2, q3 = _add_bias_up(s, (q0, q1, q2, q3), bias_up[0], bias_up[1], slot, column, expert, QUARTER)
            it, turns = _hand_over(q0, q1, q2, q3, pipe, out, it, turns, WG)
        elif kind <= DX:
            # The branches share no code on purpose: accumulators that meet behind a branch make ptxas wait after every single wgmma
            # (its message C7515; measured 0.58 of the roof instead of 0.8).
            q0, q1, q2, q3, it = _multiply_all(pipe, it, steps, staggered, (), WG, STAGGER, False, False)
            if kind == DH:
                it = _dh_epilogue(s, rows, flags, pipe, (q0, q1, q2, q3), route, slot, tile, column, it, QUARTER, WG, ACT, EP, OMIT)
            else:
                it, turns = _hand_over(q0, q1, q2, q3, pipe, out, it, turns, WG)
        elif RECOMPUTE == Z_AGAIN and (bits & TASK_BEGUN) != 0:
            begun = tile_of_carry(s, waves[0], kind, tile, column, 1, WG)
            q0, q1, q2, q3, it = _multiply_all(pipe, it, steps, staggered, begun, WG, STAGGER, True, False, True)
            it, turns = _weight_result(s, rows, pipe, out, (q0, q1, q2, q3), (kind, slot, tile, column, steps, expert), bits, waves, it, turns, QUARTER,
                                       WG, RECOMPUTE)
        else:
            q0, q1, q2, q3, it = _multiply_all(pipe, it, steps, staggered, (), WG, STAGGER, True, False)
            it, turns = _weight_result(s, rows, pipe, out, (q0, q1, q2, q3), (kind, slot, tile, column, steps, expert), bits, waves, it, turns, QUARTER,
                                       WG, RECOMPUTE)
        turns += 4
        bits, tile, steps, expert = pop_task(tasks, turns >> 2, 4)


@gluon.jit
def _pass_through(pipe, out, kind, steps, it, turns, RECOMPUTE: gl.constexpr):
    """An idle consumer's part in a task: every barrier, nothing else. A waiter that skipped a phase would mistake the next one for it."""
    for _ in range(steps):
        stage = stage_of(it)
        mbarrier.wait(pipe.load_ready.index(stage), phase_of(it))
        mbarrier.arrive(pipe.load_empty.index(stage))
        it += 1
    for _ in range(gl.where(kind == DH, Z_STEPS, 0)):
        stage = stage_of(it)
        mbarrier.wait(pipe.load_ready.index(stage), phase_of(it))
        mbarrier.arrive(pipe.z_done.index(stage))
        it += 1
    stores = kind == DX
    if RECOMPUTE:
        stores = stores | (kind == Z)
    if stores:
        mbarrier.wait(out.empty, (turns & 1) ^ 1)
        mbarrier.wait(pipe.load_ready.index(stage_of(it)), phase_of(it))
        mbarrier.arrive(out.full)
        turns = turns ^ 1
        it += 1
    return it, turns
