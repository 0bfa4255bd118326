"""A group of experts of equal widths on rows in canonical order: the tile tasks of their forward and backward passes.

Rows of expert e are starts[e] .. starts[e] + counts[e] of every row buffer; what lies between segments is never read. Each method returns
tasks for the tile pool and writes into buffers that the caller owns, so that rows may come from this rank or from others:

    forward_tasks        x rows -> z rows, y rows
    backward_tasks       x, dy rows, row weights, z rows -> dx rows, d_weight, and dz, w*h rows for
    weight_grad_tasks    dz, x, dy, w*h rows -> weight and bias gradients (after backward_tasks have run)

Every rounding is that of docs/numerics.md. A weight gradient's output tile has one owner and adds up its expert's rows in order, BLOCK_M at a time
from the segment's first row: where the segment lies, how many threads there are and where waves cut it changes no bit.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from ..runtime import Scratch, Task
from ..waves import Wave
from .cpu_activation import Activation
from .cpu_tiles import OUTER_BLOCK, Matrix, Probe, Rows, TileMath, product_probe, row_dot

CHUNK_ROWS = 1024           # rows of a weight gradient that are gathered at a time; a multiple of OUTER_BLOCK
CHUNK_ALIGN = 64            # the last chunk is padded with zero rows to a multiple: few shapes, so that oneDNN's compiled kernels are reused
GRAD_TILE = (512, 1024)     # output tile of a weight gradient


@dataclass(frozen=True)
class ExpertWeights:
    """w_gate_up (E, 2I, H), w_down (E, H, I), biases (E, 2I), (E, H) or None; one dtype. Each expert's matrix is made contiguous."""

    w_gate_up: Tensor
    w_down: Tensor
    b_gate_up: Tensor | None = None
    b_down: Tensor | None = None

    def dense(self) -> ExpertWeights:
        def dense(w: Tensor) -> Tensor:
            return w if w.shape[0] == 0 or w[0].is_contiguous() else w.contiguous()

        return ExpertWeights(dense(self.w_gate_up), dense(self.w_down), None if self.b_gate_up is None else dense(self.b_gate_up),
                             None if self.b_down is None else dense(self.b_down))


@dataclass(frozen=True)
class ExpertWants:
    """Which results a backward pass is to have; dx and d_weight per row, the others per expert."""

    dx: bool = False
    d_weight: bool = False
    w_gate_up: bool = False
    w_down: bool = False
    b_gate_up: bool = False
    b_down: bool = False

    @property
    def dz(self) -> bool:
        return self.dx or self.w_gate_up or self.b_gate_up

    @property
    def needs_z(self) -> bool:
        return self.dz or self.d_weight or self.w_down


@dataclass
class BackwardRows:
    """Row buffers of a backward pass, R rows each, None where not needed: dx (R, H), d_weight (R, 1), dz (R, 2I), weighted_hidden (R, I)."""

    dx: Tensor | None = None
    d_weight: Tensor | None = None
    dz: Tensor | None = None
    weighted_hidden: Tensor | None = None


@dataclass
class WeightGrads:
    """Gradients of ExpertWeights, None where not wanted. accumulate_*: added to what is there, and experts without rows are left alone."""

    w_gate_up: Tensor | None = None
    w_down: Tensor | None = None
    b_gate_up: Tensor | None = None
    b_down: Tensor | None = None
    accumulate: bool = False


@dataclass(frozen=True)
class GradTarget:
    """Where one sum over an expert's rows goes: out (M, N), written or, with accumulate, added to.

    carried (M, N) in the accumulation dtype: where `begun`, holds the sum over the rows of earlier waves; where `unfinished`, takes the sum
    so far, out being left alone.
    """

    out: Tensor
    accumulate: bool = False
    carried: Tensor | None = None
    begun: bool = False
    unfinished: bool = False

    def tile(self, rows: slice, columns: slice) -> GradTarget:
        return replace(self, out=self.out[rows, columns], carried=None if self.carried is None else self.carried[rows, columns])

    @property
    def begun_sum(self) -> Tensor | None:
        """The sum over earlier waves, to be added to in place; None where there is none."""
        assert self.carried is not None or not self.begun
        return self.carried if self.begun else None

    def finish(self, total: Tensor) -> None:
        """Put the sum, (M, N) in the accumulation dtype, where it belongs."""
        if self.unfinished:
            assert self.carried is not None
            self.carried.copy_(total)
        elif self.accumulate:
            self.out.add_(total)
        else:
            self.out.copy_(total)


@dataclass(frozen=True, eq=False)
class Experts:
    """One pass's experts, or their rows of one wave: starts[e], counts[e] are host integers; `weights` from ExpertWeights.dense()."""

    math: TileMath
    activation: Activation
    weights: ExpertWeights
    starts: Sequence[int]
    counts: Sequence[int]
    wave: Wave | None = None                            # None = all rows at once
    _token: object = field(default_factory=object)      # one a pass: wide copies of its weights are not taken for those of another

    def of_wave(self, wave: Wave) -> Experts:
        """The same experts with the rows of `wave` alone."""
        return replace(self, starts=wave.starts, counts=wave.counts, wave=wave)

    @property
    def width(self) -> int:
        """I."""
        return self.weights.w_down.shape[2]

    @property
    def hidden(self) -> int:
        """H."""
        return self.weights.w_down.shape[1]

    def _w_gate_up(self, e: int) -> Matrix:
        return Matrix(self.weights.w_gate_up[e], "w_gate_up", (self._token, e))

    def _w_down(self, e: int) -> Matrix:
        return Matrix(self.weights.w_down[e], "w_down", (self._token, e))

    def _tiles(self, probes: Sequence[Probe]) -> list[tuple[int, int, int, int]]:
        """(expert, first row, valid rows, tile rows) of every tile, expert by expert."""
        if not any(self.counts):
            return []
        sizes = self.math.tile_sizes(probes)
        return [(e, start + first, valid, rows) for e, (start, count) in enumerate(zip(self.starts, self.counts))
                for first, valid, rows in sizes.pieces(count)]

    # forward

    def forward_tasks(self, x: Rows, y: Tensor | None, z: Tensor | None) -> list[Task]:
        """y (R, H), z (R, 2I) in the compute dtype, either may be None: written at every valid row. Without y nothing behind z is computed."""
        H, I, w = self.hidden, self.width, self.weights
        probes = [product_probe(self.math, 2 * I, H, bias=w.b_gate_up is not None), product_probe(self.math, H, I, bias=w.b_down is not None),
                  self.activation.probe(I, self.math.acc)]
        return [partial(self._forward_tile, *tile, x, y, z) for tile in self._tiles(probes)]

    def _forward_tile(self, e: int, start: int, valid: int, rows: int, x: Rows, y: Tensor | None, z: Tensor | None, scratch: Scratch) -> None:
        math, w = self.math, self.weights
        x_tile = x.take(scratch, math, "x", start, valid, rows)
        z_tile = math.rounded(scratch, "z", x_tile, self._w_gate_up(e), bias=None if w.b_gate_up is None else w.b_gate_up[e],
                              out=None if z is None else z[start:start + valid])
        if y is None:
            return
        h = self.activation.forward(scratch, *self._gate_and_up(scratch, z_tile, rows))
        math.rounded(scratch, "y", self._operand(scratch, "h", h), self._w_down(e), bias=None if w.b_down is None else w.b_down[e],
                     out=y[start:start + valid])

    def _gate_and_up(self, scratch: Scratch, z: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Both halves of z (valid, 2I) as contiguous (rows, I) tiles in the accumulation dtype, zeros below."""
        I, valid = self.width, z.shape[0]
        halves = scratch.get("g", rows, I, self.math.acc), scratch.get("u", rows, I, self.math.acc)
        for half, source in zip(halves, (z[:, :I], z[:, I:])):
            half[:valid].copy_(source)
            half[valid:].zero_()
        return halves

    def _operand(self, scratch: Scratch, name: str, *parts: Tensor) -> Tensor:
        """The parts side by side, rounded to the compute dtype, as an operand of a product."""
        width = parts[0].shape[1]
        out = self.math.buffer(scratch, name, parts[0].shape[0], width * len(parts))
        for i, part in enumerate(parts):
            out[:, i * width:(i + 1) * width].copy_(part)
        return out

    # backward

    def backward_rows(self, num_rows: int, wants: ExpertWants, take: Callable[[int, int, torch.dtype], Tensor]) -> BackwardRows:
        """The buffers that `wants` needs, unwritten; take(rows, columns, dtype) gives one."""
        def rows(wanted: bool, columns: int, dtype: torch.dtype) -> Tensor | None:
            return take(num_rows, columns, dtype) if wanted else None

        H, I, dtype = self.hidden, self.width, self.math.dtype
        return BackwardRows(rows(wants.dx, H, dtype), rows(wants.d_weight, 1, self.math.acc),
                            rows(wants.w_gate_up or wants.b_gate_up, 2 * I, dtype), rows(wants.w_down, I, dtype))

    def backward_tasks(self, dy: Rows, row_weights: Tensor | None, z: Tensor, wants: ExpertWants, out: BackwardRows) -> list[Task]:
        """row_weights (R, 1) in the accumulation dtype, or None for all 1; z (R, 2I) as forward saved it. Fills `out` at every valid row."""
        H, I = self.hidden, self.width
        if not wants.needs_z:
            return []
        probes = [self.activation.probe(I, self.math.acc)]
        if wants.dz or wants.d_weight:
            probes.append(product_probe(self.math, I, H, exact=True, flip=True))
        if wants.dx:
            probes.append(product_probe(self.math, H, 2 * I, flip=True))
        return [partial(self._backward_tile, *tile, dy, row_weights, z, wants, out) for tile in self._tiles(probes)]

    def _backward_tile(self, e: int, start: int, valid: int, rows: int, dy: Rows, row_weights: Tensor | None, z: Tensor, wants: ExpertWants,
                       out: BackwardRows, scratch: Scratch) -> None:
        math, here = self.math, slice(start, start + valid)
        g, u = self._gate_and_up(scratch, z[here], rows)
        weight = None
        if row_weights is not None:
            weight = scratch.get("row_weight", rows, 1, math.acc)
            weight[:valid].copy_(row_weights[here])
            weight[valid:].zero_()
        dh = None
        if wants.dz or wants.d_weight:
            dy_wide = dy.take_wide(scratch, math, "dy", start, valid, rows)
            dh = math.exact(scratch, "dh", dy_wide, self._w_down(e), flip=True)
        if wants.dz:
            assert dh is not None
            weighted_dh = scratch.get("weighted_dh", rows, self.width, math.acc)
            weighted_dh.copy_(dh) if weight is None else torch.mul(dh, weight, out=weighted_dh)
            h = self.activation.backward(scratch, g, u, weighted_dh)
        else:
            h = self.activation.forward(scratch, g, u)
        if math.acc != math.dtype:                                   # what forward multiplied with is the rounded h
            h.copy_(scratch.get("h.rounded", rows, self.width, math.dtype).copy_(h))
        if out.d_weight is not None:
            assert dh is not None
            d_weight = out.d_weight[here].copy_(row_dot(scratch, dh, h)[:valid])
            if self.weights.b_down is not None:
                d_weight.add_(row_dot(scratch, dy_wide, self.weights.b_down[e:e + 1].to(math.acc))[:valid])
        if out.weighted_hidden is not None:
            out.weighted_hidden[here].copy_((h if weight is None else h.mul_(weight))[:valid])
        if wants.dz:
            dz = self._operand(scratch, "dz", g, u)
            if out.dz is not None:
                out.dz[here].copy_(dz[:valid])
            if out.dx is not None:
                math.rounded(scratch, "dx", dz, self._w_gate_up(e), flip=True, out=out.dx[here])

    def carried_sums(self, wants: ExpertWants, take: Callable[[int, int, torch.dtype], Tensor]) -> WeightGrads:
        """Buffers for the unfinished sums of the one expert that a wave's end may cut, unwritten; in the accumulation dtype."""
        def sums(wanted: bool, rows: int, columns: int) -> Tensor | None:
            return take(rows, columns, self.math.acc) if wanted else None

        H, I = self.hidden, self.width
        return WeightGrads(sums(wants.w_gate_up, 2 * I, H), sums(wants.w_down, H, I), sums(wants.b_gate_up, 1, 2 * I), sums(wants.b_down, 1, H))

    def weight_grad_tasks(self, x: Rows, dy: Rows, row_weights: Tensor | None, rows: BackwardRows, grads: WeightGrads,
                          carried: WeightGrads | None = None) -> list[Task]:
        """Tasks that write (or add to) every tensor of `grads`; experts without rows get zeros (or are left alone).

        carried: `carried_sums` of the pass, where there are several waves; they must run in order.
        """
        if self.wave is None:
            return [task for e in range(len(self.counts)) for task in self._grad_tasks(e, x, dy, row_weights, rows, grads, None)]
        by_expert = {e: self._grad_tasks(e, x, dy, row_weights, rows, grads, carried) for e in self.wave.experts}
        begun, unfinished = self.wave.begun, self.wave.unfinished
        if begun is not None and unfinished is not None and begun != unfinished:
            # one ends in this wave and another one does not: both use the carried sums, tile by tile one after the other
            by_expert[begun] = [partial(_in_turn, ends, goes_on) for ends, goes_on in zip(by_expert[begun], by_expert.pop(unfinished), strict=True)]
        return [task for tasks in by_expert.values() for task in tasks]

    def _grad_tasks(self, e: int, x: Rows, dy: Rows, row_weights: Tensor | None, rows: BackwardRows, grads: WeightGrads,
                    carried: WeightGrads | None) -> list[Task]:
        """weight_grad_tasks of one expert."""
        def target(out: Tensor, sums: Tensor | None, accumulate: bool = False) -> GradTarget:
            return GradTarget(out, accumulate, sums, self.wave is not None and e == self.wave.begun, self.wave is not None and e == self.wave.unfinished)

        kept = carried or WeightGrads()
        tasks: list[Task] = []
        start, count = self.starts[e], self.counts[e]
        for grad, sums, left, right in ((grads.w_gate_up, kept.w_gate_up, rows.dz, x), (grads.w_down, kept.w_down, dy, rows.weighted_hidden)):
            if grad is None:
                continue
            assert left is not None and right is not None
            sides = [side if isinstance(side, Rows) else Rows(side) for side in (left, right)]
            tasks += outer_tasks(self.math, sides[0], sides[1], start, count, target(grad[e], sums, grads.accumulate))
        if grads.b_gate_up is not None:
            assert rows.dz is not None
            tasks.append(partial(self.row_sum, Rows(rows.dz), None, start, count, target(grads.b_gate_up[e:e + 1], kept.b_gate_up)))
        if grads.b_down is not None:
            tasks.append(partial(self.row_sum, dy, row_weights, start, count, target(grads.b_down[e:e + 1], kept.b_down)))
        return tasks

    def row_sum(self, source: Rows, row_weights: Tensor | None, start: int, count: int, target: GradTarget, scratch: Scratch) -> None:
        """target (1, N) = sum over rows of weight * row, OUTER_BLOCK of them at a time, in order."""
        N = target.out.shape[1]
        total = target.begun_sum
        if total is None:
            total = scratch.get("row_sum", 1, N, self.math.acc).zero_()
        for first in range(start, start + count, OUTER_BLOCK):
            valid = min(OUTER_BLOCK, start + count - first)
            block = scratch.get("row_sum.block", valid, N, self.math.acc)
            block.copy_(source.take(scratch, self.math, "row_sum.source", first, valid, valid))
            if row_weights is not None:
                block.mul_(row_weights[first:first + valid])
            total.add_(block.sum(0, keepdim=True))
        target.finish(total)


def outer_tasks(math: TileMath, left: Rows, right: Rows, start: int, count: int, target: GradTarget) -> list[Task]:
    """target (M, N) = sum over rows start .. start+count, in order, of left[row] (M,) times right[row] (N,); one task an output tile."""
    if count == 0:
        return [] if target.accumulate else [partial(_zero, target.out)]
    M, N = target.out.shape
    return [partial(_outer_tile, math, left.columns(m, min(m + GRAD_TILE[0], M)), right.columns(n, min(n + GRAD_TILE[1], N)), start, count,
                    target.tile(slice(m, m + GRAD_TILE[0]), slice(n, n + GRAD_TILE[1])))
            for m in range(0, M, GRAD_TILE[0]) for n in range(0, N, GRAD_TILE[1])]


def _zero(out: Tensor, scratch: Scratch) -> None:
    out.zero_()


def _in_turn(first: Task, second: Task, scratch: Scratch) -> None:
    first(scratch)
    second(scratch)


def _outer_tile(math: TileMath, left: Rows, right: Rows, start: int, count: int, target: GradTarget, scratch: Scratch) -> None:
    total = target.begun_sum
    for first in range(0, count, CHUNK_ROWS):
        valid = min(CHUNK_ROWS, count - first)
        rows = -(-valid // CHUNK_ALIGN) * CHUNK_ALIGN
        a = left.take_wide(scratch, math, "left", start + first, valid, rows)
        b = right.take_wide(scratch, math, "right", start + first, valid, rows)
        total = math.outer(scratch, "outer", a, b, total)
    assert total is not None
    target.finish(total)
