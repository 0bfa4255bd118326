"""The static order of backward's GEMM tasks: which tile of which of the four GEMM kinds is computed next.

Kinds, each task one 128 x 256 tile:
  DH       dh = dy @ w_down[e]            row tile x 256 columns of I, with the epilogue that makes dz, w*h and the routing weight's gradient
  DX       dx_rows = dz @ w_gate_up[e]    row tile x 256 columns of H
  DW_UP    dw_gate_up[e] = dz.T @ x       128 rows of one half of 2I x 256 columns of H, contraction over the expert's rows
  DW_DOWN  dw_down[e] = dy.T @ (w*h)      128 rows of H x 256 columns of I, likewise

Row tiles come in groups of G: those of shared expert 0, of shared expert 1, then the routed ones. Phases: DH(0), DH(1), DX(0), DH(2), DX(1), ...,
DX(last), so that what a DX task reads was finished about one phase earlier; then DW_UP of shared
expert 0, of shared expert 1, of expert 0, 1, ..., then DW_DOWN likewise: half of the work, which gives the movers time to sum dx meanwhile. All of DW_UP
before all of DW_DOWN, because what the tasks in flight read is then two operands, not four, and stays in L2. Gradients that nobody wants have phases of no
tasks.
With RECOMPUTE a fifth kind makes z anew, which forward did not save:
  Z        z = x @ w_gate_up[e].T + b    row tile x 128 columns of gate and the same 128 of up, the tile of the forward kernel
and phases are Z(0), DH(-), DX(-), Z(1), DH(0), DX(-), Z(2), DH(1), DX(0), ...: z of a group, like its dz, is read about one phase after it was finished.

All phases are one sequence, and a CTA that is free takes the next task (gemm.take_task): a task waits for tasks before it alone, so the CTA
that holds the earliest unfinished one can always go on.

Example: G = 2, 3 row tiles, one column of each kind, no weight gradients: DH tiles 0 1 | DH 2 | DX 0 1 | DX 2; with RECOMPUTE
Z 0 1 | Z 2 | DH 0 1 | DH 2 | DX 0 1 | DX 2.
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .compat import aggregate
from .sync import fresh

TILE_M = gl.constexpr(128)    # rows of a tile, the plan's alignment
TILE_N = gl.constexpr(256)    # columns of a tile
HALF_N = gl.constexpr(128)    # columns of gate, and of up, of a Z tile
BLOCK_K = gl.constexpr(64)    # depth of a k-step; also rows and columns of every TMA box: 64 bf16 are one swizzle row of 128 bytes
WEIGHT_GROUP = gl.constexpr(16)   # row tiles of a weight gradient that run before the next column: 16 x 8 tiles fill the card and share operands

Z = gl.constexpr(-1)          # before DH, so that "kind <= DX" still says: a row tile of the plan or of a shared expert
DH = gl.constexpr(0)
DX = gl.constexpr(1)
DW_UP = gl.constexpr(2)
DW_DOWN = gl.constexpr(3)


@aggregate
class Schedule:
    """Sizes that fix the task sequence, run-time int32 scalars; a count of 0 means that the kind is not wanted.

    H, I, I_0, I_1 (widths of the shared experts); T; num_tiles used routed row tiles; token_tiles row tiles of a shared expert; group_tiles = G;
    shared_groups before the first routed group; pair_phases (Z,) DH and DX phases, then num_phases with the weight gradients; num_shared.
    wants: bit 0 dx, 1 d_topk_weights, 2 dw_gate_up, 3 dw_down, 4 db_gate_up, 5 db_down; 8, 9, 10 (11, 12, 13): shared expert 0's (1's)
    dw_gate_up, dw_down, d_gate_weight; with waves 14 and from 16 on WANT_Z and FIRST_EXPERT. need_dh: whether the DH product itself is needed or w*h alone.
    """
    H: gl.tensor
    I: gl.tensor
    I_0: gl.tensor
    I_1: gl.tensor
    T: gl.tensor
    num_tiles: gl.tensor
    token_tiles: gl.tensor
    group_tiles: gl.tensor
    shared_groups: gl.tensor
    pair_phases: gl.tensor
    num_phases: gl.tensor
    num_shared: gl.tensor
    wants: gl.tensor

    @gluon.constexpr_function
    def __init__(self, H, I, I_0, I_1, T, num_tiles, token_tiles, group_tiles, shared_groups, pair_phases, num_phases, num_shared, wants):
        self.H = H
        self.I = I
        self.I_0 = I_0
        self.I_1 = I_1
        self.T = T
        self.num_tiles = num_tiles
        self.token_tiles = token_tiles
        self.group_tiles = group_tiles
        self.shared_groups = shared_groups
        self.pair_phases = pair_phases
        self.num_phases = num_phases
        self.num_shared = num_shared
        self.wants = wants


WANT_X = gl.constexpr(1)
WANT_TOPK = gl.constexpr(2)
WANT_UP = gl.constexpr(4)
WANT_DOWN = gl.constexpr(8)
WANT_BIAS_UP = gl.constexpr(16)
WANT_BIAS_DOWN = gl.constexpr(32)
WANT_SHARED = gl.constexpr(8)      # first bit of shared expert 0; three bits each
WANT_Z = gl.constexpr(1 << 14)     # with waves: this one makes z again
FIRST_EXPERT = gl.constexpr(1 << 16)   # with waves: times the first expert whose weight gradients this one adds to
Z_AGAIN = gl.constexpr(2)          # RECOMPUTE of the binaries with waves (backward_waves.py): Z tasks of routed experts, in waves that say WANT_Z
ROUTED_PRODUCT = gl.constexpr(1 | 2 | 4 | 16)        # gradients that need dh; dw_down alone needs only w*h
ROUTED_TASKS = gl.constexpr(1 | 2 | 4 | 8 | 16)      # gradients that need DH tasks
ANY_WEIGHT = gl.constexpr(4 | 8 | 0x1B00)            # gradients that need weight-gradient phases


@gluon.jit
def make_schedule(H, I, I_0, I_1, T, num_tiles, num_experts, num_shared, group_tiles, wants, RECOMPUTE: gl.constexpr = False):
    token_tiles = gl.cdiv(T, TILE_M)
    shared_groups = num_shared * gl.cdiv(token_tiles, group_tiles)
    if RECOMPUTE:
        pair_phases = 3 * (shared_groups + gl.cdiv(num_tiles, group_tiles) + 2)
    else:
        pair_phases = 2 * (shared_groups + gl.cdiv(num_tiles, group_tiles)) + 2
    weight_phases = gl.where((wants & ANY_WEIGHT) != 0, 2 * (num_shared + num_experts), 0)
    return Schedule(H, I, I_0, I_1, T, num_tiles, token_tiles, group_tiles, shared_groups, pair_phases, pair_phases + weight_phases, num_shared, wants)


@gluon.jit
def own(s):
    """A role's schedule, from one whose widths are in sixteenths; hidden from the compiler's hoisting (see sync.fresh), widths visible multiples of 16."""
    T, group_tiles, num_shared = fresh(s.T), fresh(s.group_tiles), fresh(s.num_shared)
    token_tiles = gl.cdiv(T, TILE_M)
    return Schedule(fresh(s.H) * 16, fresh(s.I) * 16, fresh(s.I_0) * 16, fresh(s.I_1) * 16, T, fresh(s.num_tiles), token_tiles, group_tiles,
                    num_shared * gl.cdiv(token_tiles, group_tiles), fresh(s.pair_phases), fresh(s.num_phases), num_shared, fresh(s.wants))


@gluon.jit
def shared_wants(s, slot):
    """The three bits of shared expert `slot`: 1 dw_gate_up, 2 dw_down, 4 d_gate_weight."""
    return (s.wants >> (WANT_SHARED + 3 * slot)) & 7


@gluon.jit
def width_of(s, slot):
    """I of a routed task (slot -1), I_s of a shared expert's."""
    return gl.where(slot < 0, s.I, gl.where(slot == 0, s.I_0, s.I_1))


@gluon.jit
def product_needed(s, slot):
    """Whether dh itself is needed, not w*h alone: by a shared expert for dx, dw_gate_up or the gate, by routed ones as ROUTED_PRODUCT says."""
    routed = (s.wants & ROUTED_PRODUCT) != 0
    shared = ((s.wants & WANT_X) != 0) | ((shared_wants(s, gl.maximum(slot, 0)) & 5) != 0)
    return gl.where(slot < 0, routed, shared)


@gluon.jit
def dh_columns(s, slot):
    """Column tiles of DH: those of I, or 0 where nothing that hangs on it is wanted."""
    routed = (s.wants & ROUTED_TASKS) != 0
    shared = ((s.wants & WANT_X) != 0) | (shared_wants(s, gl.maximum(slot, 0)) != 0)
    return gl.where(gl.where(slot < 0, routed, shared), gl.cdiv(width_of(s, slot), TILE_N), 0)


@gluon.jit
def z_columns(s, slot, RECOMPUTE: gl.constexpr = True):
    """Column tiles of Z: every DH task reads z, whatever it is wanted for."""
    columns = gl.where(dh_columns(s, slot) > 0, gl.cdiv(width_of(s, slot), HALF_N), 0)
    if RECOMPUTE == Z_AGAIN:
        columns = gl.where((slot < 0) & ((s.wants & WANT_Z) != 0), columns, 0)
    return columns


@gluon.jit
def dx_columns(s):
    return gl.where((s.wants & WANT_X) != 0, gl.cdiv(s.H, TILE_N), 0)


@gluon.jit
def all_dh_tasks(s):
    """DH tasks of the whole launch."""
    total = s.num_tiles * dh_columns(s, s.T * 0 - 1)
    total += gl.where(s.num_shared > 0, s.token_tiles * dh_columns(s, s.T * 0), 0)
    return total + gl.where(s.num_shared > 1, s.token_tiles * dh_columns(s, s.T * 0 + 1), 0)


@gluon.jit
def all_z_tasks(s, RECOMPUTE: gl.constexpr = True):
    """Z tasks of the whole launch."""
    total = s.num_tiles * z_columns(s, s.T * 0 - 1, RECOMPUTE)
    total += gl.where(s.num_shared > 0, s.token_tiles * z_columns(s, s.T * 0, RECOMPUTE), 0)
    return total + gl.where(s.num_shared > 1, s.token_tiles * z_columns(s, s.T * 0 + 1, RECOMPUTE), 0)


@gluon.jit
def all_dx_tasks(s):
    return (s.num_tiles + s.num_shared * s.token_tiles) * dx_columns(s)


@gluon.jit
def phase_group(s, phase, RECOMPUTE: gl.constexpr = False):
    """(shared expert or -1, first row tile inside it, row tiles) of a Z, DH or DX phase; 0 row tiles where there is no such group."""
    if RECOMPUTE:
        group = phase // 3 - phase % 3
    else:
        group = phase // 2 - phase % 2
    per_shared = gl.maximum(gl.cdiv(s.token_tiles, s.group_tiles), 1)
    is_shared = group < s.shared_groups
    slot = gl.where(is_shared, group // per_shared, -1)
    if RECOMPUTE:
        exists = (group >= 0) & (3 * (group + 2) < s.pair_phases)
    else:
        exists = (group >= 0) & (2 * group + 2 < s.pair_phases)
    inside = gl.where(is_shared, group - slot * per_shared, group - s.shared_groups)
    total = gl.where(is_shared, s.token_tiles, s.num_tiles)
    first = inside * s.group_tiles
    tiles = gl.minimum(s.group_tiles, total - first)
    return slot, first, gl.where(exists, tiles, 0)


@gluon.jit
def phase_weight(s, phase, RECOMPUTE: gl.constexpr = False):
    """(shared expert or -1, expert, is dw_down) of a weight-gradient phase."""
    experts = (s.num_phases - s.pair_phases) // 2
    place = phase - s.pair_phases
    down = place >= experts
    place = gl.where(down, place - experts, place)
    slot = gl.where(place < s.num_shared, place, -1)
    expert = place - s.num_shared
    if RECOMPUTE == Z_AGAIN:
        expert += s.wants // FIRST_EXPERT
    return slot, expert, down


@gluon.jit
def weight_tiles(s, slot, down):
    """(row tiles, column tiles) of a weight-gradient phase; dw_gate_up's row tiles never reach from the gate half into the up half."""
    width = width_of(s, slot)
    shared_bits = shared_wants(s, gl.maximum(slot, 0))
    wanted = gl.where(slot < 0, (s.wants >> gl.where(down, 3, 2)) & 1, (shared_bits >> gl.where(down, 1, 0)) & 1)
    rows = gl.where(down, gl.cdiv(s.H, TILE_M), 2 * gl.cdiv(width, TILE_M))
    return rows * wanted, gl.cdiv(gl.where(down, width, s.H), TILE_N)


@gluon.jit
def phase_tasks(s, phase, RECOMPUTE: gl.constexpr = False):
    """Number of tasks of a phase."""
    tasks = phase * 0
    if phase < s.pair_phases:
        slot, _, tiles = phase_group(s, phase, RECOMPUTE)
        if RECOMPUTE:
            tasks = tiles * gl.where(phase % 3 == 0, z_columns(s, slot, RECOMPUTE), gl.where(phase % 3 == 1, dh_columns(s, slot), dx_columns(s)))
        else:
            tasks = tiles * gl.where(phase % 2 == 0, dh_columns(s, slot), dx_columns(s))
    else:
        slot, _, down = phase_weight(s, phase, RECOMPUTE)
        rows, columns = weight_tiles(s, slot, down)
        tasks = rows * columns
    return tasks


@gluon.jit
def seek(s, phase, index, RECOMPUTE: gl.constexpr = False):
    """The task `index` places after the start of `phase`, as (phase, index with the index inside that phase); phase == num_phases at the end."""
    tasks = phase_tasks(s, phase, RECOMPUTE)
    while (phase < s.num_phases) & (index >= tasks):
        index -= tasks
        phase += 1
        tasks = phase_tasks(s, phase, RECOMPUTE)
    return phase, index


@gluon.jit
def locate(s, phase, index, RECOMPUTE: gl.constexpr = False):
    """(kind, shared expert or -1, tile, column tile, expert) of a task. tile: row tile of the expert's rows, or of the weight gradient.

    `expert` is meant for routed weight gradients; Z, DH and DX take theirs from the plan's tile_to_expert.
    """
    kind = phase * 0
    slot = kind
    tile = kind
    column = kind
    expert = kind
    if phase < s.pair_phases:
        slot, first, tiles = phase_group(s, phase, RECOMPUTE)
        tiles = gl.maximum(tiles, 1)
        if RECOMPUTE:
            kind = phase % 3 - 1
        else:
            kind = phase % 2
        column = index // tiles
        tile = first + index - column * tiles
    else:
        slot, expert, down = phase_weight(s, phase, RECOMPUTE)
        kind = gl.where(down, DW_DOWN, DW_UP)
        rows, columns = weight_tiles(s, slot, down)
        per_group = gl.maximum(WEIGHT_GROUP * columns, 1)
        group = index // per_group
        tiles = gl.maximum(gl.minimum(WEIGHT_GROUP, rows - group * WEIGHT_GROUP), 1)
        inside = index - group * per_group
        column = inside // tiles
        tile = group * WEIGHT_GROUP + inside - column * tiles
    return kind, slot, tile, column, expert


@gluon.jit
def counter_of(s, slot, tile, capacity):
    """Index of a row tile's counter: routed tiles first, then those of the shared experts."""
    return gl.where(slot < 0, tile, capacity + slot * s.token_tiles + tile)
