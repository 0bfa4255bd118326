"""The static order of GEMM tasks: which row tile and column tile is computed next, for routed and shared experts alike.

Row tiles come in groups of G ("minibatches"): first those of shared expert 0, then of shared expert 1, then the routed ones. Phases alternate
gate/up of one group and down of the group before: up(0), up(1), down(0), up(2), down(1), ..., down(last), so that a down task's inputs were
finished about one phase earlier. Inside a phase the row tile runs fastest: neighbouring CTAs share a column of the weights. All phases together are
one sequence of tasks; CTA p takes tasks p, p + grid, p + 2*grid, ..., or whoever is free the next one (gemm.producer). The producer walks the sequence and
tells the other roles (gemm.TaskQueue). A task waits for tasks before it alone, so the CTA that holds the earliest unfinished one can always go on.

Example: G = 2, 3 routed tiles, 1 column of up tasks, 1 of down tasks. Phases: up tiles 0 1 | up 2 | down 0 1 | down 2.
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .compat import aggregate
from .sync import fresh

BLOCK_M = gl.constexpr(128)   # rows of a tile, the plan's alignment
BLOCK_N = gl.constexpr(256)   # columns of a tile: 128 gate + 128 up, or 256 of the down projection
BLOCK_K = gl.constexpr(64)    # depth of a k-step: 128 bytes, one swizzle row
HALF_N = gl.constexpr(128)    # hidden columns that one gate/up task makes


@aggregate
class Schedule:
    """Sizes that fix the task sequence: run-time int32 scalars, few of them, because consumers hold them in registers beside the accumulator.

    num_tiles: used routed row tiles. group_tiles = G. row_ring, hidden_ring: row tiles that the rings of x rows and of h hold.
    """
    H: gl.tensor
    I: gl.tensor
    shared_I_0: gl.tensor
    shared_I_1: gl.tensor
    T: gl.tensor
    num_shared: gl.tensor
    num_tiles: gl.tensor
    group_tiles: gl.tensor
    row_ring: gl.tensor
    hidden_ring: gl.tensor

    @gluon.constexpr_function
    def __init__(self, H, I, shared_I_0, shared_I_1, T, num_shared, num_tiles, group_tiles, row_ring, hidden_ring):
        self.H = H
        self.I = I
        self.shared_I_0 = shared_I_0
        self.shared_I_1 = shared_I_1
        self.T = T
        self.num_shared = num_shared
        self.num_tiles = num_tiles
        self.group_tiles = group_tiles
        self.row_ring = row_ring
        self.hidden_ring = hidden_ring


@gluon.jit
def token_tiles(s):
    """Row tiles of one shared expert."""
    return gl.cdiv(fresh(s.T), BLOCK_M)


@gluon.jit
def width_of(s, slot):
    """I of a routed task (slot -1), I_s of a shared expert's."""
    return gl.where(slot < 0, fresh(s.I), gl.where(slot == 0, s.shared_I_0, s.shared_I_1))


@gluon.jit
def up_columns_of(s, slot):
    """Column tiles of a gate/up GEMM."""
    return gl.cdiv(width_of(s, slot), HALF_N)


@gluon.jit
def down_columns(s):
    """Column tiles of every down GEMM."""
    return gl.cdiv(fresh(s.H), BLOCK_N)


@aggregate
class Order:
    """What walking the sequence needs, computed once: divisions cost the producer more than a k-step when they are done for each task."""
    group_tiles: gl.tensor
    num_tiles: gl.tensor
    token_tiles: gl.tensor
    groups_of_shared: gl.tensor   # groups of one shared expert
    shared_groups: gl.tensor      # groups before the first routed one
    num_phases: gl.tensor

    @gluon.constexpr_function
    def __init__(self, group_tiles, num_tiles, token_tiles, groups_of_shared, shared_groups, num_phases):
        self.group_tiles = group_tiles
        self.num_tiles = num_tiles
        self.token_tiles = token_tiles
        self.groups_of_shared = groups_of_shared
        self.shared_groups = shared_groups
        self.num_phases = num_phases


@gluon.jit
def make_order(s):
    group_tiles = fresh(s.group_tiles)
    per_shared = gl.cdiv(token_tiles(s), group_tiles)
    before = fresh(s.num_shared) * per_shared
    return Order(group_tiles, s.num_tiles, token_tiles(s), per_shared, before, 2 * (before + gl.cdiv(s.num_tiles, group_tiles)) + 2)


@gluon.jit
def phase_group(o, phase):
    """(shared expert or -1, first row tile inside it, row tiles) of a phase; 0 row tiles where there is no such group."""
    group = phase // 2 - phase % 2
    is_shared = group < o.shared_groups
    second = group >= o.groups_of_shared                  # there are at most two shared experts
    slot = gl.where(is_shared, second.to(gl.int32), -1)
    inside = gl.where(is_shared, gl.where(second, group - o.groups_of_shared, group), group - o.shared_groups)
    first = inside * o.group_tiles
    tiles = gl.minimum(o.group_tiles, gl.where(is_shared, o.token_tiles, o.num_tiles) - first)
    return slot, first, gl.where(group < 0, 0, gl.maximum(tiles, 0))


@gluon.jit
def _phase_tasks(s, o, phase):
    slot, _, tiles = phase_group(o, phase)
    return tiles * gl.where(phase % 2 == 0, up_columns_of(s, slot), down_columns(s))


@gluon.jit
def seek(s, o, phase, index):
    """The task `index` places after the start of `phase`, as (phase, index inside that phase); phase == num_phases at the end."""
    tasks = _phase_tasks(s, o, phase)
    while (phase < o.num_phases) & (index >= tasks):
        index -= tasks
        phase += 1
        tasks = _phase_tasks(s, o, phase)
    return phase, index


@gluon.jit
def locate(o, phase, index):
    """(is a down task, shared expert or -1, row tile inside it, column tile) of a task."""
    slot, first, tiles = phase_group(o, phase)
    # exact below 2^20 tasks a phase (launch.granularity sees to that): the nearest integer is at least 0.5 / tiles away
    column = ((index.to(gl.float32) + 0.5) / gl.maximum(tiles, 1).to(gl.float32)).to(gl.int32)
    return phase % 2 == 1, slot, first + index - column * tiles, column


@gluon.jit
def counter_of(s, slot, tile, capacity):
    """Index of a tile's readiness counter: routed tiles first, then those of the shared experts."""
    return gl.where(slot < 0, tile, capacity + slot * token_tiles(s) + tile)
