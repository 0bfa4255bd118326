"""Waves inside the backward launch (wave_loop.py has the loop): which rows, experts and z a wave has, and what an expert's sums hand on to the next one.

Wave 0 reads the z that forward saved. Every later wave makes its z again, by the Z tasks of `recompute`, in scratch of its own. Weight and bias gradients are
sums over an expert's rows: each is one chain of additions in fp32 whatever the waves, because an expert that a boundary cuts leaves its unfinished sums in
scratch and the next wave begins its chain from them. Such scratch has two copies, used by waves in turn: the expert that a wave has begun with and the one
that it leaves unfinished may differ.

Rows are sorted by expert, so a wave's experts are neighbours; waves share all experts out, those without any row too, whose gradients are zeros. Example: 6
rows of expert 0, none of 1, 3 of 2, segments aligned to 4, waves of 4 rows: rows of 0 | 0 | 2; gradients finished: none | 0, 1 | 2.
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .backward_pipe import TASK_BEGUN, TASK_UNFINISHED
from .backward_tasks import DW_UP, FIRST_EXPERT, TILE_M, TILE_N, WANT_BIAS_DOWN, WANT_BIAS_UP, WANT_Z, Z_AGAIN, make_schedule
from .compat import aggregate
from .sync import fresh
from .wave_loop import Wave, first_tile, is_last, wave_index

CARRY_ROWS = gl.constexpr(64)      # of one consumer's part of a tile


@aggregate
class Carry:
    """What a launch with waves has beside others: its wave, and the scratch for unfinished sums (fp32): see `tile_of_carry`, `biases_of_carry`."""
    wave: Wave
    sums: gl.tensor

    @gluon.constexpr_function
    def __init__(self, wave, sums):
        self.wave = wave
        self.sums = sums


@gluon.jit
def experts_of_wave(tile_to_expert, expert_offsets, num_experts, w, NW: gl.constexpr):
    """(first expert, the one behind the last) whose weight gradients this wave adds to."""
    begin = first_tile(w, NW)
    end = begin + w.capacity
    more = is_last(w, NW) == 0
    first = gl.load(tile_to_expert + begin, mask=begin > 0, other=0)
    following = gl.load(tile_to_expert + end, mask=more, other=0)
    cut = gl.load(expert_offsets + following, mask=more, other=0).to(gl.int32) < end * TILE_M
    return first, gl.where(more, following + cut.to(gl.int32), num_experts)


@gluon.jit
def backward_schedule_of_wave(widths, T, num_shared, group_tiles, wants, tile_to_expert, expert_offsets, num_experts, w, NW: gl.constexpr):
    """The schedule of this wave, widths in sixteenths: its row tiles and experts, z again but for wave 0, tokens and shared experts in the last one alone."""
    H, I, I_0, I_1 = widths
    last = is_last(w, NW).to(gl.int32)
    tiles = gl.minimum(gl.load(w.num_tiles, volatile=True) - first_tile(w, NW), w.capacity)
    first, behind = experts_of_wave(tile_to_expert, expert_offsets, num_experts, w, NW)
    bits = wants + first * FIRST_EXPERT + gl.where(wave_index(w, NW) > 0, WANT_Z, 0)
    return make_schedule(H, I, I_0, I_1, T * last, tiles, behind - first, num_shared * last, group_tiles, bits, Z_AGAIN)


@gluon.jit
def rows_in_wave(expert_offsets, tokens_per_expert, expert, w, mask, NW: gl.constexpr):
    """(rows of an expert in this wave, the first one's place in its buffers, TASK_BEGUN and TASK_UNFINISHED bits); zeros without `mask`."""
    begin = first_tile(w, NW) * TILE_M
    end = begin + fresh(w.capacity) * TILE_M
    start = gl.load(expert_offsets + expert, mask=mask, other=0).to(gl.int32)
    tokens = gl.load(tokens_per_expert + expert, mask=mask, other=0)
    count = gl.maximum(gl.minimum(start + tokens, end) - gl.maximum(start, begin), 0)
    marks = gl.where(start < begin, TASK_BEGUN, 0) + gl.where(start + tokens > end, TASK_UNFINISHED, 0)
    return count, gl.maximum(start - begin, 0), gl.where((count > 0) & mask, marks, 0)


@gluon.jit
def _copy_of_carry(sums, H, I, wave):
    """First word of the copy that wave `wave` leaves its unfinished sums in."""
    tiles = 2 * gl.cdiv(I, TILE_M) * gl.cdiv(H, TILE_N) + gl.cdiv(H, TILE_M) * gl.cdiv(I, TILE_N)
    words = tiles.to(gl.int64) * (TILE_M * TILE_N) + (2 * I + H)
    return sums + (wave & 1) * words


@gluon.jit
def tile_of_carry(s, carry, kind, tile, column, BACK: gl.constexpr, WG: gl.constexpr):
    """Where the 64 x 256 sums of one consumer's part of a weight gradient's tile lie: what the wave before left (BACK = 1), what this one leaves (0).

    s: widths in sixteenths. All of dw_gate_up's tiles, then dw_down's, each 128 x 256 in rows.
    """
    H, I = fresh(s.H) * 16, fresh(s.I) * 16
    up_tiles = 2 * gl.cdiv(I, TILE_M) * gl.cdiv(H, TILE_N)
    place = gl.where(kind == DW_UP, tile * gl.cdiv(H, TILE_N) + column, up_tiles + tile * gl.cdiv(I, TILE_N) + column)
    return _copy_of_carry(carry.sums, H, I, wave_index(carry.wave, 4) + BACK) + (place * 2 + WG).to(gl.int64) * (CARRY_ROWS * TILE_N)


@gluon.jit
def biases_of_carry(s, carry, BACK: gl.constexpr, NW: gl.constexpr):
    """Where the sums of the bias gradients lie, 2I words of db_gate_up and then H of db_down; BACK as in `tile_of_carry`. s: a role's own."""
    wave = wave_index(carry.wave, NW)
    tiles = 2 * gl.cdiv(s.I, TILE_M) * gl.cdiv(s.H, TILE_N) + gl.cdiv(s.H, TILE_M) * gl.cdiv(s.I, TILE_N)
    return _copy_of_carry(carry.sums, s.H, s.I, wave + BACK) + tiles.to(gl.int64) * (TILE_M * TILE_N)


@gluon.jit
def bias_blocks(s, COLUMNS: gl.constexpr):
    """(blocks of columns of db_gate_up, of db_down) that are wanted."""
    return (gl.where((s.wants & WANT_BIAS_UP) != 0, gl.cdiv(2 * s.I, COLUMNS), 0), gl.where((s.wants & WANT_BIAS_DOWN) != 0, gl.cdiv(s.H, COLUMNS), 0))
