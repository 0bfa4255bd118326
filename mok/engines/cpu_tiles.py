"""Matrix products on row tiles of fixed shape, one thread each, such that a row's bits do not depend on where it lies or what lies beside it.

    rounded(a, W)  = round(a @ W.T + bias)     operands and result in the compute dtype, one rounding
    exact(a, W)    = a @ W.T                    operands and result in the accumulation dtype (fp32; fp64 for fp64)

a (m, K_dim); W (N, K_dim); m is TILE_ROWS or, for an expert's last rows, a smaller size of TAIL_ROWS; unused rows are zeros.

A library GEMM keeps the bits of a row under two conditions, which is why every product here is one thread's call on one of a few shapes:
threads split the contraction differently, and so do very small m. Whether it holds for a shape on this CPU is measured once a process
(`tile_sizes`), never assumed; where it does not, each row becomes a tile of its own, which is slow and right.

Which library call runs (measured on one thread of an AMD EPYC, Zen 5, torch 2.13, 256 x 1024 x 1024, 2026-11-30):
  bf16    oneDNN through torch.mm                    1.1 ms
  fp32    oneDNN's inner product through its torch op, 2.2 ms; torch.mm takes MKL, 5.0 ms on this CPU
  fp64    MKL through torch.mm on rows padded to 64 bytes: its kernels look at the alignment of each row
  fp16    fp32 copies
A bf16 product whose result stays fp32 runs on fp32 copies. oneDNN's bf16 math mode gained nothing there (it picks the same fp32 kernel)
and is a process-wide setting, so it is used only on CPUs with AMX tiles, where it took 1.0 ms against 3.6 (Xeon, torch 2.11).
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from ..config import BLOCK_M
from ..runtime import Scratch, runtime
from .protocol import accumulation_dtype

TILE_ROWS = 256
TAIL_ROWS = (32, 64, 128, 192)      # multiples of 32, so that no tile of an activation ends inside of a vector: a difference too rare to measure
K_BLOCK = 128               # contraction of one fp32 call: oneDNN sums it in one chain, whose error at 2048 was 3 times that of MKL, which sums blocks
OUTER_BLOCK = BLOCK_M       # rows that a sum over rows advances by: where a wave may cut an expert's rows (mok.waves); see docs/cpu.md
DOT_COLUMNS = 128           # column tile of row_dot
_PITCH = 16                 # elements; 64 bytes or 128


@dataclass(frozen=True)
class TileSizes:
    """Row counts that a segment of rows may be cut into: `full`, and for what is left the smallest of `tails` that holds it (else `full`)."""

    full: int
    tails: tuple[int, ...]

    def pieces(self, count: int) -> list[tuple[int, int, int]]:
        """(first row, valid rows, tile rows) of each tile. TileSizes(256, (32, 64)).pieces(300) == [(0, 256, 256), (256, 44, 64)]"""
        result = [(first, self.full, self.full) for first in range(0, count - self.full + 1, self.full)]
        rest = count % self.full
        if rest:
            result.append((count - rest, rest, next((rows for rows in self.tails if rows >= rest), self.full)))
        return result


@dataclass(frozen=True)
class Matrix:
    """One expert's weight (N, K_dim), contiguous. `slot` names a thread's buffers for copies of it, `key` tells whose copy lies there."""

    data: Tensor
    slot: str
    key: Any


class TileMath:
    """The arithmetic of one compute dtype: which library call computes a product, and in what dtype sums are kept."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.acc = accumulation_dtype(dtype)
        self._linear: Callable[..., Tensor] | None = None
        bf16_kernels = False
        if torch.backends.mkldnn.is_available():
            self._linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
            bf16_kernels = bool(getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", bool)())
        self.direct = dtype in (torch.float32, torch.float64) or (dtype == torch.bfloat16 and bf16_kernels)
        amx = dtype == torch.bfloat16 and bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())
        self.mode = "bf16" if amx else "ieee"

    def precision(self) -> AbstractContextManager[None]:
        """The process-wide setting that this dtype's products need; entered around a pass."""
        return nullcontext() if self.dtype == torch.float64 else runtime.fp32_matmul(self.mode)

    def buffer(self, scratch: Scratch, name: str, rows: int, columns: int, dtype: torch.dtype | None = None) -> Tensor:
        """Scratch that may be an operand of a product: rows 64-byte aligned where the library's kernels look at that."""
        dtype = self.dtype if dtype is None else dtype
        padded = dtype == torch.float64 or (dtype == torch.float32 and self._linear is None)
        return scratch.get(name, rows, columns, dtype, -(-columns // _PITCH) * _PITCH if padded else None)

    def widen(self, scratch: Scratch, name: str, tensor: Tensor) -> Tensor:
        """`tensor` in the accumulation dtype; a copy only where that differs from its own."""
        if tensor.dtype == self.acc:
            return tensor
        return self.buffer(scratch, name, tensor.shape[0], tensor.shape[1], self.acc).copy_(tensor)

    def rounded(self, scratch: Scratch, name: str, a: Tensor, weight: Matrix, *, flip: bool = False, bias: Tensor | None = None,
                out: Tensor | None = None) -> Tensor:
        """round(a @ W.T + bias), with flip round(a @ W + bias): a (m, K_dim), bias (N,), all in the compute dtype -> (m, N).

        out: rows (n, N), n <= m, that take the first n rows of the result as well.
        """
        if self.direct and (bias is None or self._linear is not None or self.dtype == self.acc):
            data = self._aligned(scratch, weight)
            return self._product(scratch, name, a, data.T if flip else data, bias, out)
        wide = self.exact(scratch, name + ".wide", self.widen(scratch, name + ".a", a), weight, flip=flip)
        if bias is not None:
            wide.add_(bias.to(self.acc))
        result = self.buffer(scratch, name, wide.shape[0], wide.shape[1]).copy_(wide)
        if out is not None:
            out.copy_(result[:out.shape[0]])
        return result

    def exact(self, scratch: Scratch, name: str, a: Tensor, weight: Matrix, *, flip: bool = False) -> Tensor:
        """a @ W.T, with flip a @ W: a (m, K_dim) in the accumulation dtype -> (m, N) in the accumulation dtype, not rounded further."""
        if weight.data.dtype == self.acc:
            data = self._aligned(scratch, weight)
        else:
            data = scratch.kept(weight.slot + ".wide", weight.key, weight.data, self.acc)
        return self._product(scratch, name, a, data.T if flip else data, None)

    def outer(self, scratch: Scratch, name: str, a: Tensor, b: Tensor, total: Tensor | None = None) -> Tensor:
        """a.T @ b, or total + a.T @ b: a (rows, M), b (rows, N), total (M, N), all in the accumulation dtype -> (M, N).

        OUTER_BLOCK rows at a time, each block's product added to what came before: cut between two blocks, with `total` handed on, a sum
        keeps its bits. `total` is added to in place.
        """
        for first in range(0, a.shape[0], OUTER_BLOCK):
            left, right = a[first:first + OUTER_BLOCK].T, b[first:first + OUTER_BLOCK].T
            if self._linear is not None and self.acc == torch.float32 and self.mode == "ieee":
                product = self._linear(left, right, None, "none", [], "")        # a new tensor
                total = product if total is None else total.add_(product)
            else:
                product = torch.mm(left, right.T, out=self.buffer(scratch, name, left.shape[0], right.shape[0], a.dtype))
                total = scratch.like(name + ".total", product).copy_(product) if total is None else total.add_(product)
        assert total is not None
        return total

    @staticmethod
    def _aligned(scratch: Scratch, weight: Matrix) -> Tensor:
        """The weight where every buffer of ours begins, at a multiple of 64 bytes: a kernel that looks at addresses sees no difference."""
        data = weight.data
        return scratch.kept(weight.slot, weight.key, data, data.dtype) if data.data_ptr() % 64 else data

    def _product(self, scratch: Scratch, name: str, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        if self._linear is not None and ((a.dtype == torch.float32 and self.mode == "ieee") or (a.dtype == torch.bfloat16 and bias is not None)):
            result = self._blocked(a, b, bias, K_BLOCK if self.dtype == torch.float32 else a.shape[1], self._linear)
        elif out is not None and a.dtype == torch.bfloat16 and out.shape[0] == a.shape[0] and out.is_contiguous():
            return torch.mm(a, b.T, out=out)             # straight to where it is wanted
        else:
            result = self.buffer(scratch, name, a.shape[0], b.shape[0], a.dtype)
            torch.mm(a, b.T, out=result)
            if bias is not None:
                result.add_(bias)
        if out is not None:
            out.copy_(result[:out.shape[0]])
        return result

    @staticmethod
    def _blocked(a: Tensor, b: Tensor, bias: Tensor | None, depth: int, linear: Callable[..., Tensor]) -> Tensor:
        """The product, contracted `depth` at a time."""
        total: Tensor | None = None
        for first in range(0, a.shape[1], depth):
            block = b[:, first:first + depth]
            if block.stride(1) == 1:             # oneDNN is fast on whole matrices only; rows of a transposed one are whole
                block = block.contiguous()
            part = linear(a[:, first:first + depth], block, bias if total is None else None, "none", [], "")
            total = part if total is None else total.add_(part)
        assert total is not None
        return total

    @cached_property
    def _known(self) -> dict[Any, tuple[bool, tuple[int, ...]]]:
        return runtime.scratch.setdefault("cpu.row_stability", {})

    def tile_sizes(self, probes: Iterable[Probe]) -> TileSizes:
        """Row counts at which every one of `probes` keeps the bits of a row, measured on first use of a shape (inside `precision()`)."""
        whole, tails = True, set(TAIL_ROWS)
        for probe in probes:
            key = (self.dtype, self.mode, probe.key)
            if key not in self._known:
                def measure(scratch: Scratch, probe: Probe = probe, key: Any = key) -> None:
                    self._known[key] = measure_row_stability(self, scratch, probe)
                runtime.tiles.run([measure], threads=1)
            stable, allowed = self._known[key]
            whole, tails = whole and stable, tails & set(allowed)
        if whole:
            return TileSizes(TILE_ROWS, tuple(sorted(tails)))
        runtime.say_once(f"mok: on this CPU a row's bits depend on its place in a {self.dtype} tile: computing row by row, slowly")
        return TileSizes(1, ())


@dataclass(frozen=True)
class Probe:
    """One operation on row tiles that `tile_sizes` can try on random rows. run(scratch, rows (m, columns) in `dtype`) -> (m, any)."""

    key: Any
    columns: int
    dtype: torch.dtype
    run: Callable[[Scratch, Tensor], Tensor]


def product_probe(math: TileMath, N: int, K_dim: int, *, exact: bool = False, flip: bool = False, bias: bool = False) -> Probe:
    """The product (m, K_dim) x (N, K_dim) of one of the kinds above, on random data."""
    key = ("product", N, K_dim, exact, flip, bias)

    @cache
    def operands() -> tuple[Matrix, Tensor | None]:
        generator = torch.Generator().manual_seed(1)
        data = torch.rand((K_dim, N) if flip else (N, K_dim), generator=generator, dtype=torch.float32).sub_(0.5).to(math.dtype)
        added = torch.rand(N, generator=generator, dtype=torch.float32).to(math.dtype) if bias else None
        return Matrix(data, "w_down", object()), added          # the slot of a real weight, so that no copy of its own stays behind

    def run(scratch: Scratch, rows: Tensor) -> Tensor:
        weight, added = operands()
        if exact:
            return math.exact(scratch, "probe.out", rows, weight, flip=flip)
        return math.rounded(scratch, "probe.out", rows, weight, flip=flip, bias=added)

    return Probe(key, K_dim, math.acc if exact else math.dtype, run)


def measure_row_stability(math: TileMath, scratch: Scratch, probe: Probe) -> tuple[bool, tuple[int, ...]]:
    """(rows keep their bits when moved inside a full tile, the sizes of TAIL_ROWS at which they keep them too). On a pool thread."""
    source = torch.rand((TILE_ROWS, probe.columns), generator=torch.Generator().manual_seed(0), dtype=torch.float32).sub_(0.5).mul_(4).to(probe.dtype)

    def at(rows: Tensor) -> Tensor:
        return probe.run(scratch, math.buffer(scratch, "probe.rows", rows.shape[0], probe.columns, probe.dtype).copy_(rows)).clone()

    full = at(source)
    stable = all(torch.equal(at(source.roll(shift, 0)), full.roll(shift, 0)) for shift in (1, 37))
    return stable, tuple(rows for rows in TAIL_ROWS if torch.equal(at(source[-rows:]), full[-rows:]))


def row_dot(scratch: Scratch, a: Tensor, b: Tensor) -> Tensor:
    """<a[r], b[r]> for each row: a (m, n), b (m, n) or (1, n), one dtype -> (m, 1) view of scratch.

    Column tiles of DOT_COLUMNS are added in order, lane by lane, then the lanes by halves: only elementwise additions, so no bit depends
    on a row's place.
    """
    m, n = a.shape
    padded = -(-n // DOT_COLUMNS) * DOT_COLUMNS
    product = scratch.get("dot", m, padded, a.dtype)
    torch.mul(a, b, out=product[:, :n])
    product[:, n:].zero_()
    lanes = product[:, :DOT_COLUMNS]
    for first in range(DOT_COLUMNS, padded, DOT_COLUMNS):
        lanes.add_(product[:, first:first + DOT_COLUMNS])
    width = DOT_COLUMNS // 2
    while width:
        lanes[:, :width].add_(lanes[:, width:2 * width])
        width //= 2
    return lanes[:, :1]


@dataclass(frozen=True)
class Rows:
    """The rows of a pass: row r is data[index[r]], or data[r] where index is None. data (n, H), index (R,) int64 valid wherever rows are used."""

    data: Tensor
    index: Tensor | None = None

    def take(self, scratch: Scratch, math: TileMath, name: str, start: int, valid: int, rows: int) -> Tensor:
        """Rows start .. start+valid, then zeros: a (rows, H) operand in data's dtype."""
        out = math.buffer(scratch, name, rows, self.data.shape[1], self.data.dtype)
        if self.index is None:
            out[:valid].copy_(self.data[start:start + valid])
        else:
            torch.index_select(self.data, 0, self.index[start:start + valid], out=out[:valid])
        out[valid:].zero_()
        return out

    def take_wide(self, scratch: Scratch, math: TileMath, name: str, start: int, valid: int, rows: int) -> Tensor:
        """The same rows in the accumulation dtype."""
        if self.data.dtype == math.acc:
            return self.take(scratch, math, name, start, valid, rows)
        wide = math.buffer(scratch, name, rows, self.data.shape[1], math.acc)
        wide[:valid].copy_(self.data[start:start + valid] if self.index is None else self.take(scratch, math, name, start, valid, valid))
        wide[valid:].zero_()
        return wide

    def columns(self, first: int, last: int) -> Rows:
        """The same rows, columns first .. last."""
        return Rows(self.data[:, first:last], self.index)
