"""Waves inside a launch: a rank whose rows exceed its buffers takes them through the same buffers again (mok/waves.py has the rule).

Wave w is rows w*C .. (w+1)*C of this rank's plan. Every rank goes through its own number of waves, which it reads from its plan: nothing has to be agreed on,
because what peers read stays put for the whole launch and what they write has room for every slot at home. Between two waves all CTAs of the rank meet,
its counters are zeroed, and roles and shared memory begin anew. What needs all rows at home (sums, and with them the shared experts) is the last wave's.

Example: 5 used row tiles, wave_tiles = 2: three waves of 2, 2 and 1 tiles. A rank without rows makes one wave of none.
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .compat import aggregate, thread_barrier
from .peers import peer_count, peers_of
from .sync import (
    CONTROL_ABORT,
    CONTROL_MOST_WAVES,
    CONTROL_PASSES,
    CONTROL_PASSES_EXCEEDED,
    CONTROL_PASSES_SEVERAL,
    WAIT_WAVE,
    add_release,
    fence_proxy,
    fresh,
    grid_size,
    load_acquire,
    this_cta,
    wait_at_least,
)
from .tasks import Schedule

SET_WAVES = gl.constexpr(5)     # word of a counter set's header (gemm.SET_HEADER): arrivals of CTAs between waves


@aggregate
class Wave:
    """Which wave this is (a word in shared memory, so that no consumer holds it in a register beside its accumulator), the pointer to the plan's used row
    tiles, the row tiles of the buffers, and (W, 2) int32: the row tiles that each rank uses, and those of its buffers."""
    word: gl.shared_memory_descriptor
    num_tiles: gl.tensor
    capacity: gl.tensor
    table: gl.tensor

    @gluon.constexpr_function
    def __init__(self, word, num_tiles, capacity, table):
        self.word = word
        self.num_tiles = num_tiles
        self.capacity = capacity
        self.table = table


@gluon.jit
def set_wave(w, index):
    """By the CTA's first warps, before roles start: this is wave `index` = 0, 1, ..."""
    w.word.store(gl.full([1], index, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    thread_barrier()


@gluon.jit
def wave_index(w, NW: gl.constexpr):
    """The wave, in every thread of a role of NW warps."""
    return gl.max(w.word.load(gl.BlockedLayout([1], [32], [NW], [0])), 0)


@gluon.jit
def waves_of(num_tiles, wave_tiles):
    """Waves that `num_tiles` used row tiles take: at least one. waves_of(5, 2) == 3"""
    return gl.maximum(gl.cdiv(num_tiles, fresh(wave_tiles)), 1)


@gluon.jit
def is_last(w, NW: gl.constexpr):
    """Whether a wave is this rank's last one."""
    return wave_index(w, NW) + 1 == waves_of(gl.load(w.num_tiles, volatile=True), w.capacity)


@gluon.jit
def first_tile(w, NW: gl.constexpr):
    """The wave's first row tile in the plan."""
    return wave_index(w, NW) * w.capacity


@gluon.jit
def schedule_of_wave(s, w, NW: gl.constexpr):
    """The launch's schedule, of this wave: its row tiles, and tokens and shared experts only in the last one.

    No other wave has anything to sum, so it needs no list of tokens either; shared experts' results would have to outlast the counters.
    """
    last = is_last(w, NW).to(gl.int32)
    tiles = gl.minimum(gl.load(w.num_tiles, volatile=True) - first_tile(w, NW), w.capacity)
    return Schedule(s.H, s.I, s.shared_I_0, s.shared_I_1, s.T * last, s.num_shared * last, tiles, s.group_tiles, s.row_ring, s.hidden_ring)


@gluon.jit
def count_waves(control, w):
    """By a role of one CTA, once a launch: WaveCounts of this rank, kept in the control block."""
    if this_cta(fresh(w.capacity)) == 0:
        waves = waves_of(gl.load(w.num_tiles, volatile=True), w.capacity)
        most = waves
        for r in range(peer_count(peers_of(control))):
            most = gl.maximum(most, waves_of(gl.load(w.table + 2 * r), gl.load(w.table + 2 * r + 1)))
        passes = gl.load(control + CONTROL_PASSES, volatile=True)
        several = gl.load(control + CONTROL_PASSES_SEVERAL, volatile=True)
        exceeded = gl.load(control + CONTROL_PASSES_EXCEEDED, volatile=True)
        before = gl.load(control + CONTROL_MOST_WAVES, volatile=True)
        thread_barrier()                                 # every thread has read what one of them is about to write
        gl.store(control + CONTROL_PASSES, passes + 1)
        gl.store(control + CONTROL_PASSES_SEVERAL, several + (most > 1).to(gl.int32))
        gl.store(control + CONTROL_PASSES_EXCEEDED, exceeded + (waves > 1).to(gl.int32))
        gl.store(control + CONTROL_MOST_WAVES, gl.maximum(before, most))


@gluon.jit
def meet(arrivals, times, control):
    """All CTAs of the launch meet for the `times`-th time, bounded (rule 8); with rules 1, 2 and 6 for everything before and after, TMA's accesses too.

    arrivals: a word that is not zeroed between waves. By all threads of a CTA that still run.
    """
    fence_proxy(times)
    thread_barrier()
    add_release(arrivals, 1)
    wait_at_least(arrivals, times * grid_size(times), control, WAIT_WAVE, times)
    thread_barrier()
    fence_proxy(times)


@gluon.jit
def next_wave(arrivals, counters, words, wave, control, KEPT_FROM: gl.constexpr, KEPT_TO: gl.constexpr):
    """Before wave `wave` = 1, 2, ...: once all CTAs have finished the wave before it, its counters are zeroed (rule 5).

    They are `words` words, but for KEPT_FROM to KEPT_TO - 1: what the end of the launch uses. After an abort nobody waits, and nobody zeroes either: a CTA
    that still takes tasks of the wave before would get places that it has had. (Who has not seen the flag here has not been let through by it, nor by
    the arrival of one that was: so all have arrived.) What the counters hold does not matter then.
    """
    meet(arrivals, 2 * wave - 1, control)
    alive = load_acquire(control + CONTROL_ABORT) == 0
    lanes = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    for i in range(this_cta(wave) * 128, words, grid_size(wave) * 128):
        at = i + lanes
        gl.store(counters + at, lanes * 0, mask=(at < words) & ((at < KEPT_FROM) | (at >= KEPT_TO)) & alive)
    meet(arrivals, 2 * wave, control)
