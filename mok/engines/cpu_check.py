"""The CPU engine's self-check: whether this CPU's libraries keep the bits of a row, as the engine's promises need."""
from __future__ import annotations

import torch
from torch import Tensor

from ..config import ACTIVATIONS
from ..runtime import Scratch, Task, runtime
from .cpu_activation import Activation
from .cpu_tiles import TILE_ROWS, Matrix, TileMath, product_probe

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
_N, _K_DIM = 203, 331               # odd, so that rows of every operand start at every alignment
_NEIGHBOURS = 8


def self_check() -> str:
    """One line: "ok: ..." or "failed: ..." with what the engine does instead. A fraction of a second.

    Checked for bf16, fp32 and fp64: a row keeps its bits at another place of its tile and in smaller tiles (products of both layouts, all
    activations), with the weight at another address, and beside other threads that compute at the same time.
    """
    row_by_row, differing, tails = [], [], []
    for name, dtype in _DTYPES.items():
        math = TileMath(dtype)
        with math.precision():
            probes = [product_probe(math, _N, _K_DIM, exact=exact, flip=flip) for exact in (False, True) for flip in (False, True)]
            probes += [Activation.of(activation, None).probe(_N, math.acc) for activation in ACTIVATIONS]
            sizes = math.tile_sizes(probes)
            if sizes.full != TILE_ROWS:
                row_by_row.append(name)
            tails.append(f"{name} {TILE_ROWS}" + "".join(f"/{rows}" for rows in reversed(sizes.tails)))
            if not _same_beside_neighbours(math, sizes.full):
                differing.append(name)
    threads = torch.get_num_threads()
    if differing:
        return f"failed: {', '.join(differing)} products differ between {threads} threads at once: results may not repeat; use torch.set_num_threads(1)"
    if row_by_row:
        return f"failed: a row's bits depend on its place in a tile of {', '.join(row_by_row)}: computed row by row instead, slowly"
    return f"ok: a row keeps its bits at every place, weight address and beside {threads} threads (tile rows: {', '.join(tails)})"


def _same_beside_neighbours(math: TileMath, rows: int) -> bool:
    """Whether the same product is the same from several threads at once, each with its weight at another address."""
    generator = torch.Generator().manual_seed(3)
    source = torch.rand((rows, _K_DIM), generator=generator, dtype=torch.float32).to(math.dtype)
    weight = torch.rand((_N, _K_DIM), generator=generator, dtype=torch.float32).to(math.dtype)
    results: list[Tensor | None] = [None] * _NEIGHBOURS

    def task(number: int) -> Task:
        def run(scratch: Scratch) -> None:
            moved = torch.empty(weight.numel() + number, dtype=weight.dtype)[number:].view(weight.shape).copy_(weight)
            tile = math.buffer(scratch, "check.rows", rows, _K_DIM).copy_(source)
            results[number] = math.rounded(scratch, "check.out", tile, Matrix(moved, "check.weight", object())).clone()
        return run

    runtime.tiles.run([task(number) for number in range(_NEIGHBOURS)])
    return all(result is not None and results[0] is not None and torch.equal(result, results[0]) for result in results)
