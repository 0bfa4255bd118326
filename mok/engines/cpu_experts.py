"""A group of experts of equal widths on rows in canonical order: the tile tasks of their forward and backward passes.

Rows of expert e are starts[e] .. starts[e] + counts[e] of every row buffer; what lies between segments is never read. Each method returns
tasks for the tile pool and writes into buffers that the caller owns, so that rows may come from this rank or from others:

    forward_tasks        x rows -> z rows, y rows
    backward_tasks       x, dy rows, row weights, z rows -> dx rows, d_weight, and dz, w*h rows for
    weight_grad_tasks    dz, x, dy, w*h rows -> weight and bias gradients (after backward_tasks have run)

Every rounding is that of DESIGN 2. A weight gradient's output tile has one owner and contracts its expert's rows in order, in chunks that
start at the segment's first row: where the segment lies, and how many threads there are, changes no bit.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ..runtime import Scratch, Task
from .cpu_activation import Activation
from .cpu_tiles import Matrix, Probe, Rows, TileMath, product_probe, row_dot

CHUNK_ROWS = 1024           # rows of one weight-gradient product
CHUNK_ALIGN = 64            # its last chunk is padded with zero rows to a multiple: few shapes, so that oneDNN's compiled kernels are reused
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
    def any(self) -> bool:
        return self.dz or self.d_weight or self.w_down or self.b_down


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


@dataclass(frozen=True, eq=False)
class Experts:
    """One pass's experts: starts[e], counts[e] are host integers; `weights` from ExpertWeights.dense()."""

    math: TileMath
    activation: Activation
    weights: ExpertWeights
    starts: Sequence[int]
    counts: Sequence[int]
    _token: object = field(default_factory=object)      # one a pass: wide copies of its weights are not taken for those of another

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

    def forward_tasks(self, x: Rows, y: Tensor, z: Tensor | None) -> list[Task]:
        """y (R, H), z (R, 2I) or None, in the compute dtype: written at every valid row."""
        H, I, w = self.hidden, self.width, self.weights
        probes = [product_probe(self.math, 2 * I, H, bias=w.b_gate_up is not None), product_probe(self.math, H, I, bias=w.b_down is not None),
                  self.activation.probe(I, self.math.acc)]
        return [partial(self._forward_tile, *tile, x, y, z) for tile in self._tiles(probes)]

    def _forward_tile(self, e: int, start: int, valid: int, rows: int, x: Rows, y: Tensor, z: Tensor | None, scratch: Scratch) -> None:
        math, w = self.math, self.weights
        x_tile = x.take(scratch, math, "x", start, valid, rows)
        z_tile = math.rounded(scratch, "z", x_tile, self._w_gate_up(e), bias=None if w.b_gate_up is None else w.b_gate_up[e],
                              out=None if z is None else z[start:start + valid])
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
        if not (wants.dz or wants.d_weight or wants.w_down):
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

    def weight_grad_tasks(self, x: Rows, dy: Rows, row_weights: Tensor | None, rows: BackwardRows, grads: WeightGrads) -> list[Task]:
        """Tasks that write (or add to) every tensor of `grads`; experts without rows get zeros (or are left alone)."""
        tasks: list[Task] = []
        for e, (start, count) in enumerate(zip(self.starts, self.counts)):
            for grad, left, right in ((grads.w_gate_up, rows.dz, x), (grads.w_down, dy, rows.weighted_hidden)):
                if grad is None:
                    continue
                assert left is not None and right is not None
                sides = [side if isinstance(side, Rows) else Rows(side) for side in (left, right)]
                tasks += outer_tasks(self.math, sides[0], sides[1], start, count, grad[e], grads.accumulate)
            if grads.b_gate_up is not None:
                assert rows.dz is not None
                tasks.append(partial(self.row_sum, Rows(rows.dz), None, start, count, grads.b_gate_up[e:e + 1]))
            if grads.b_down is not None:
                tasks.append(partial(self.row_sum, dy, row_weights, start, count, grads.b_down[e:e + 1]))
        return tasks

    def row_sum(self, source: Rows, row_weights: Tensor | None, start: int, count: int, out: Tensor, scratch: Scratch) -> None:
        """out (1, N) = sum over rows of weight * row, in chunks in order."""
        total = scratch.get("row_sum", 1, out.shape[1], self.math.acc).zero_()
        for first in range(start, start + count, CHUNK_ROWS):
            valid = min(CHUNK_ROWS, start + count - first)
            chunk = scratch.get("row_sum.chunk", valid, out.shape[1], self.math.acc)
            chunk.copy_(source.take(scratch, self.math, "row_sum.source", first, valid, valid))
            if row_weights is not None:
                chunk.mul_(row_weights[first:first + valid])
            total.add_(chunk.sum(0, keepdim=True))
        out.copy_(total)


def outer_tasks(math: TileMath, left: Rows, right: Rows, start: int, count: int, out: Tensor, accumulate: bool) -> list[Task]:
    """out (M, N) = (or +=) sum over rows start .. start+count, in order, of left[row] (M,) times right[row] (N,); one task an output tile."""
    if count == 0:
        return [] if accumulate else [partial(_zero, out)]
    M, N = out.shape
    return [partial(_outer_tile, math, left.columns(m, min(m + GRAD_TILE[0], M)), right.columns(n, min(n + GRAD_TILE[1], N)), start, count,
                    out[m:m + GRAD_TILE[0], n:n + GRAD_TILE[1]], accumulate)
            for m in range(0, M, GRAD_TILE[0]) for n in range(0, N, GRAD_TILE[1])]


def _zero(out: Tensor, scratch: Scratch) -> None:
    out.zero_()


def _outer_tile(math: TileMath, left: Rows, right: Rows, start: int, count: int, out: Tensor, accumulate: bool, scratch: Scratch) -> None:
    total: Tensor | None = None
    for first in range(0, count, CHUNK_ROWS):
        valid = min(CHUNK_ROWS, count - first)
        rows = -(-valid // CHUNK_ALIGN) * CHUNK_ALIGN
        a = left.take_wide(scratch, math, "left", start + first, valid, rows)
        b = right.take_wide(scratch, math, "right", start + first, valid, rows)
        product = math.outer(scratch, "outer", a, b)
        if total is not None:
            total.add_(product)
        elif count > CHUNK_ROWS:
            total = scratch.like("outer.total", product).copy_(product)
        else:
            total = product
    assert total is not None
    if accumulate:
        out.add_(total)
    else:
        out.copy_(total)
