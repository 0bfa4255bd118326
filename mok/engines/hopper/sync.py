"""Device helpers that order memory: counters in global memory, proxy fences and bounded spins. Each names its rule (docs/kernels.md).

Rules. 1: rows written with ordinary stores, read by another CTA's TMA. 2: a tile written by TMA store, read by another CTA. 8: spins are
bounded; on time-out the first thread records what it waited for, raises the abort flag, and every role goes on without data.

A scalar here is per thread: threads of one role may leave a spin at different times. So a role never branches around a barrier on a value
that it polled this way; where it must (mover, combine) the poll is reduced over the role's threads first, which makes it uniform.
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Words of a device's control block (int32), before its two sets of counters.
CONTROL_EPOCH = gl.constexpr(0)       # launches so far; its lowest bit picks the set of counters
CONTROL_ARRIVED = gl.constexpr(1)     # CTAs of this launch that have read the epoch
CONTROL_ABORT = gl.constexpr(2)       # 1 after a time-out
CONTROL_LIMIT = gl.constexpr(3)       # longest spin in ticks of `clock`, written by the host when it makes the block
CONTROL_ERROR = gl.constexpr(4)       # words 4 and 5: address of the error record in pinned host memory, likewise
CONTROL_PEER_LIMIT = gl.constexpr(6)  # of a group's block: longest wait for a peer, shorter than CONTROL_LIMIT, so that the report names the peer
CONTROL_PEERS = gl.constexpr(8)       # of a group's block, words 8 and 9: address of its table of peers
CONTROL_EXCHANGES = gl.constexpr(10)  # of a group's block: exchanges of ids so far
CONTROL_EXCHANGE_ARRIVED = gl.constexpr(11)   # programs of this exchange that have written their ids
CONTROL_PASSES = gl.constexpr(12)     # of a bounded group's block, words 12 to 15: its WaveCounts (wave_loop.count_waves)
CONTROL_PASSES_SEVERAL = gl.constexpr(13)
CONTROL_PASSES_EXCEEDED = gl.constexpr(14)
CONTROL_MOST_WAVES = gl.constexpr(15)
CONTROL_WORDS = gl.constexpr(16)
CHECK_EVERY = gl.constexpr(64)        # polls between two looks at the clock and the abort flag

# What a role waited for, as the error word names it; the same numbers as launch.WAITS
WAIT_ROWS = gl.constexpr(1)
WAIT_HIDDEN = gl.constexpr(2)
WAIT_HIDDEN_SLOT = gl.constexpr(3)
WAIT_COMBINE = gl.constexpr(4)
WAIT_ROW_SLOT = gl.constexpr(5)
WAIT_IDS = gl.constexpr(31)
WAIT_PEER_ROWS = gl.constexpr(32)
WAIT_PEER_GRADS = gl.constexpr(33)
WAIT_RESULTS = gl.constexpr(34)
WAIT_SIGNATURE = gl.constexpr(35)
WAIT_ABORTED = gl.constexpr(36)
WAIT_PEER_SENT = gl.constexpr(37)
WAIT_WAVE = gl.constexpr(38)


@gluon.jit
def load_acquire(pointer):
    """Rules 1 and 2, reader: what was released before the value seen is visible afterwards."""
    return gl.inline_asm_elementwise("ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [pointer], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def add_release(pointer, value):
    """Rules 1 and 2, writer: one thread publishes what the whole role wrote; a barrier of the role must stand before it."""
    gl.atomic_add(pointer, value, sem="release", scope="gpu")


@gluon.jit
def take_ticket(pointer):
    """How many tickets were taken before this one, in every thread of a one-warp role.

    All lanes take part, those behind the first with +0, so that there is no branch. ptxas (12.8, of Triton 3.6) makes one of an atomic by a single lane and
    at times lets the halves of the warp meet again only behind a loop that follows: what lies between runs twice, a uniform register's += 1 too, and
    the broadcast reads lanes that are not there. compile_check.split_warps looks for that in every binary.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 lane, step, old; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; selp.b32 step, 1, 0, p;"
        " atom.relaxed.gpu.global.add.u32 old, [$1], step; shfl.sync.idx.b32 $0, old, 0, 31, 0xffffffff; }",
        "=r,l", [pointer], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def count_system(pointer):
    """Rule 3, writer and reader: add 1 behind all that a one-warp role has written, peers' memory included; what was there before, in every lane.

    All lanes take part, those behind the first with +0 (see `take_ticket`); a barrier of the role stands before it. Whoever learns from the answer that it
    is the last one needs a fence at system scope before it tells others.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 lane, step, old; fence.acq_rel.sys; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; selp.b32 step, 1, 0, p;"
        " atom.relaxed.gpu.global.add.u32 old, [$1], step; shfl.sync.idx.b32 $0, old, 0, 31, 0xffffffff; }",
        "=r,l", [pointer], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def fence_proxy(anchor):
    """Rule 1: orders ordinary accesses and those of the TMA engine to global memory. `anchor`: any int32 of the place, so that the fence stays there."""
    return gl.inline_asm_elementwise("fence.proxy.async.global; mov.u32 $0, $1;", "=r,r", [anchor], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def fence_acquire(anchor):
    """Rule 2, reader without TMA: turns the relaxed polls before it into an acquire."""
    return gl.inline_asm_elementwise("fence.acq_rel.gpu; mov.u32 $0, $1;", "=r,r", [anchor], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_acquire_system(pointer):
    """Rule 3: `load_acquire` of what a peer releases."""
    return gl.inline_asm_elementwise("ld.acquire.sys.global.s32 $0, [$1];", "=r,l", [pointer], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def fence_acquire_system(anchor):
    """Rule 3: `fence_acquire` for polls of what peers released."""
    return gl.inline_asm_elementwise("fence.acq_rel.sys; mov.u32 $0, $1;", "=r,r", [anchor], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def stores_complete(anchor):
    """Rule 2: the TMA stores of this thread are in global memory (the full wait; `.read` only frees shared memory)."""
    return gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; mov.u32 $0, $1;", "=r,r", [anchor], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def clock(anchor):
    """The GPU's clock in ticks of 2^20 ns (1.05 ms), as int32 that wraps; differences are right up to 26 days."""
    return gl.inline_asm_elementwise("{ .reg .b64 t; .reg .b32 a; mov.b32 a, $1; mov.u64 t, %globaltimer; shr.u64 t, t, 20; cvt.u32.u64 $0, t; }",
                                     "=r,r", [anchor], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def report_timeout(control, phase: gl.constexpr, tile, expected, seen):
    """Rule 8: the first thread on the device to time out writes (phase, tile, expected, seen) to pinned host memory, then the flag word."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 old; .reg .b64 error; atom.global.gpu.cas.b32 old, [$1+8], 0, 1; setp.eq.u32 p, old, 0;"
        " ld.global.u64 error, [$1+16]; @p st.volatile.global.u32 [error+8], $2; @p st.volatile.global.u32 [error+12], $3;"
        " @p st.volatile.global.u32 [error+16], $4; @p st.volatile.global.u32 [error+20], $5; @p fence.acq_rel.sys;"
        " @p st.volatile.global.u32 [error], 1; mov.u32 $0, old; }",
        "=r,l,r,r,r,r", [control, tile * 0 + phase, tile, expected, seen], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_at_least(counter, target, control, phase: gl.constexpr, tile):
    """Spin until the counter reaches `target` (rules 1 and 2, reader); bounded (rule 8). Per thread: no barrier may depend on the outcome."""
    seen = load_acquire(counter)
    if seen < target:
        start = clock(seen)
        polls = 0
        while seen < target:
            seen = load_acquire(counter)
            polls += 1
            if (polls % CHECK_EVERY == 0) & (seen < target):
                if load_acquire(control + fresh(CONTROL_ABORT)) != 0:
                    seen = target
                elif clock(polls) - start > gl.load(control + fresh(CONTROL_LIMIT)):
                    report_timeout(control, phase, tile, target, seen)
                    seen = target


@gluon.jit
def pause(anchor):
    """Half a microsecond without issuing: a mover that has nothing to do should not take issue slots and power from the tensor cores."""
    gl.inline_asm_elementwise("nanosleep.u32 500; mov.u32 $0, $1;", "=r,r", [anchor], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def keep_loads_above(anchor):
    """A warp barrier that the compiler does not sink loads past: left alone, it issues each load just before its use, one latency after the other."""
    gl.inline_asm_elementwise("bar.warp.sync 0xffffffff; mov.u32 $0, $1;", "=r,r", [anchor], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def new_block(anchor):
    """The anchor (an int32 that is never negative, the same in every lane), behind a warp barrier at which a basic block of the binary begins.

    ptxas moves arithmetic as it likes inside a block, also past a warp barrier: given one block it works on all parts of it at once, and keeps what their
    rounding would halve. The branch back is never taken; ptxas does not know. An address made from the result lies behind the barrier for every compiler;
    Triton 3.9 takes loads from one address for one load, whatever stands between them.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred never; again: bar.warp.sync 0xffffffff; setp.lt.s32 never, $1, 0; @never bra.uni again; mov.u32 $0, $1; }",
        "=r,r", [anchor], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def fresh(value):
    """The same int32, hidden from the compiler's hoisting.

    Worker roles sit inside the loop in which idle warps wait for work; whatever depends on kernel arguments alone would be computed once before
    it, kept through every role and spilled. Measured: 160 bytes of stack without this.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def apart(value, BRANCH: gl.constexpr):
    """The same int32, made by an instruction that stands nowhere but in this branch.

    Branches that end alike become one, which chooses between what they differed by; where that is a descriptor's address, every role then keeps it.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1; // " + BRANCH, "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def fresh_float(value):
    """`fresh` for a float32."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [value], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def fresh_pairs(values):
    """`fresh` for bfloat16, two in a register."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [values], dtype=gl.bfloat16, is_pure=False, pack=2)


@gluon.jit
def fresh_long(value):
    """`fresh` for an int64."""
    return gl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [value], dtype=gl.int64, is_pure=False, pack=1)


@gluon.jit
def this_cta(anchor):
    """gl.program_id(0), read anew: read once, before the roles, it is kept through all of them (see `fresh`)."""
    return gl.inline_asm_elementwise("mov.u32 $0, %ctaid.x; // $1", "=r,r", [anchor], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def grid_size(anchor):
    """gl.num_programs(0), read anew as `this_cta` is."""
    return gl.inline_asm_elementwise("mov.u32 $0, %nctaid.x; // $1", "=r,r", [anchor], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def nap(seed, DEBUG: gl.constexpr):
    """Debug only: sleep 0 to 8 us, from a hash of `seed`, so that roles meet in orders that timing alone would never give."""
    if DEBUG:
        h = (seed * 747796405 + 277803737) & 0x7FFFFFFF
        h = ((h >> 13) ^ h) * 1103515245
        gl.inline_asm_elementwise("nanosleep.u32 $1; mov.u32 $0, $1;", "=r,r", [(h >> 8) & 8191], dtype=gl.int32, is_pure=False, pack=1)
