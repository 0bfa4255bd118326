"""Sums of row results at a token's home rank, and router scores: the token-side tile tasks of a CPU pass.

    combine           out[t] = sum over k, in order, of weight[t, k] * y[row of (t, k)], then the shared experts in order; one rounding at the end
    combine_backward  dx[t]  = sum over k, in order, of dx_row[row of (t, k)], then the shared experts in order; one rounding at the end
    scores            logits[t] = x[t] @ weight.T in fp32

Each addition of combine is a fused multiply-add: for fp32 sums computed in float64, where the product is exact, and rounded once.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..runtime import Scratch, Task
from .cpu_tiles import Matrix, Rows, TileMath, product_probe, row_dot

TOKEN_ROWS = 64             # tokens a task: three fp64 buffers of 1024 columns stay in a core's cache


@dataclass(frozen=True)
class SharedRows:
    """One shared expert's results: rows (T, H) rounded; scale (T, 1) in the accumulation dtype, None = 1.

    In combine_backward: scale = the gradient of the gate's score and gate (1, H) its weight; None = no gate.
    """

    rows: Tensor
    scale: Tensor | None = None
    gate: Tensor | None = None


def token_blocks(num_tokens: int) -> list[tuple[int, int]]:
    return [(first, min(first + TOKEN_ROWS, num_tokens)) for first in range(0, num_tokens, TOKEN_ROWS)]


def combine_tasks(math: TileMath, out: Tensor, y: Tensor, slot_to_row: Tensor, weights: Tensor, shared: Sequence[SharedRows]) -> list[Task]:
    """out (T, H); y (R, H) rounded; slot_to_row (T, K) int64, -1 = no expert: skipped; weights (T, K) in the accumulation dtype."""
    def block(first: int, last: int, scratch: Scratch) -> None:
        acc = scratch.get("acc", last - first, out.shape[1], math.acc).zero_()
        for k in range(slot_to_row.shape[1]):
            _gathered(math, scratch, acc, y, slot_to_row[first:last, k], weights[first:last, k:k + 1])
        for expert in shared:
            _add(scratch, acc, expert.rows[first:last], None if expert.scale is None else expert.scale[first:last])
        out[first:last].copy_(acc)

    return [partial(block, *tokens) for tokens in token_blocks(out.shape[0])]


def combine_backward_tasks(math: TileMath, out: Tensor, dx_rows: Tensor, slot_to_row: Tensor, shared: Sequence[SharedRows]) -> list[Task]:
    """out (T, H); dx_rows (R, H) rounded; slot_to_row (T, K) int64, -1 = no expert: skipped. A gate's term follows its expert's row."""
    def block(first: int, last: int, scratch: Scratch) -> None:
        acc = scratch.get("acc", last - first, out.shape[1], math.acc).zero_()
        for k in range(slot_to_row.shape[1]):
            _gathered(math, scratch, acc, dx_rows, slot_to_row[first:last, k], None)
        for expert in shared:
            _add(scratch, acc, expert.rows[first:last], None)
            if expert.scale is not None:
                assert expert.gate is not None
                _add(scratch, acc, expert.gate, expert.scale[first:last])
        out[first:last].copy_(acc)

    return [partial(block, *tokens) for tokens in token_blocks(out.shape[0])]


def _gathered(math: TileMath, scratch: Scratch, acc: Tensor, rows: Tensor, row_of_token: Tensor, scale: Tensor | None) -> None:
    """acc[t] += scale[t] * rows[row_of_token[t]]; a token whose row is -1 keeps acc's bits."""
    missing = row_of_token.lt(0)
    some_missing = bool(missing.any())
    if some_missing:
        if bool(missing.all()):
            return
        before = scratch.like("acc.before", acc).copy_(acc)
        row_of_token = row_of_token.clamp(min=0)
    picked = torch.index_select(rows, 0, row_of_token, out=scratch.like("picked", acc, rows.dtype))
    _add(scratch, acc, picked, scale)
    if some_missing:
        torch.where(missing.unsqueeze(1), before, acc, out=acc)


def _add(scratch: Scratch, acc: Tensor, rows: Tensor, scale: Tensor | None) -> None:
    """acc = fma(scale, rows, acc), or acc + rows. acc (m, H); rows (m or 1, H) any dtype; scale (m, 1) in acc's dtype."""
    if scale is None:
        acc.add_(rows if rows.dtype == acc.dtype else scratch.like("add.wide", rows, acc.dtype).copy_(rows))
    elif acc.dtype == torch.float64:
        acc.add_(torch.mul(rows.to(torch.float64), scale, out=scratch.like("add.product", acc)))
    else:
        rows64 = scratch.like("add.rows64", rows, torch.float64).copy_(rows)
        acc64 = scratch.like("add.acc64", acc, torch.float64).copy_(acc)
        acc.copy_(acc64.addcmul_(rows64, scale.to(torch.float64)))


def gate_tasks(math: TileMath, x: Tensor, gate_weight: Tensor, out: Tensor) -> list[Task]:
    """out (T, 1) = sigmoid(x @ gate_weight) in the accumulation dtype: x (T, H), gate_weight (H,) in the compute dtype."""
    def tile(first: int, valid: int, rows: int, scratch: Scratch) -> None:
        wide = math.widen(scratch, "gate.x.wide", Rows(x).take(scratch, math, "gate.x", first, valid, rows))
        score = scratch.get("gate.score", rows, 1, math.acc).copy_(row_dot(scratch, wide, gate_weight.to(math.acc).unsqueeze(0)))
        out[first:first + valid].copy_(score.sigmoid_()[:valid])

    return [partial(tile, first, min(TOKEN_ROWS, x.shape[0] - first), TOKEN_ROWS) for first in range(0, x.shape[0], TOKEN_ROWS)]


def scores_tasks(math: TileMath, x: Tensor, weight: Tensor, out: Tensor, flip: bool = False) -> list[Task]:
    """out (T, N) = x @ weight.T, with flip x @ weight, cast to out's dtype: weight contiguous in the accumulation dtype, x (T, any) in any dtype."""
    if x.shape[0] == 0:
        return []
    N, K_dim = weight.shape[::-1] if flip else weight.shape
    sizes = math.tile_sizes([product_probe(math, N, K_dim, exact=True, flip=flip)])
    matrix = Matrix(weight, "scores.weight", object())

    def tile(first: int, valid: int, rows: int, scratch: Scratch) -> None:
        wide = math.buffer(scratch, "scores.x", rows, x.shape[1], math.acc)
        wide[:valid].copy_(x[first:first + valid])
        wide[valid:].zero_()
        out[first:first + valid].copy_(math.exact(scratch, "scores", wide, matrix, flip=flip)[:valid])

    return [partial(tile, *piece) for piece in sizes.pieces(x.shape[0])]
