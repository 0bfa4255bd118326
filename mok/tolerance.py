"""The one tolerance of every comparison with the float64 truth: what half an ulp of change in every input does to a result.

A right engine's error is that of a few roundings on the way to a result, and each of them is as large as a rounding of some input would be. So
the scale of an element's error is taken from the specification alone: it is evaluated in float64 again and again, every element of every input
(dy too) changed at random by up to half an ulp of the compute dtype, and the mean square of what that does to the element, cancellation in its
sums included, is its scale; one rounding of the element itself is added. No engine and no library product in a low dtype sets the standard.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128                       # an error is judged in blocks of this many rows and columns, never pooled over a tensor
# Bound of a block's RMS error, in units of its RMS scale, by compute dtype. Where sums are as narrow as the inputs their own rounding counts,
# sqrt(terms) of it in the worst order; in float64 the truth's sums round too.
FACTORS = {torch.bfloat16: 2.0, torch.float16: 2.0, torch.float32: 32.0, torch.float64: 16.0}
OUTLIER = 4.0                     # an element may be this much further off than its block
SCATTER = 2.0                     # the RMS of n errors scatters by 1 / sqrt(n): SCATTER standard deviations of it are room for small blocks
DRAWS, FEW_DRAWS = 8, 3           # times that the inputs are changed; a block of many elements has many samples of the scale in every one
MANY = 2**18                      # elements of all results together from which FEW_DRAWS do

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Expected:
    """What a pass should give, by name: the truth in float64 and the scale of each element's error (same shapes). dtype: the compute dtype."""

    truth: dict[str, Tensor]
    scale: dict[str, Tensor]
    dtype: torch.dtype


@dataclass(frozen=True)
class BlockError:
    """The block with the largest ratio = error / allowed (inf where a block that must be exactly zero is not, or a value is not finite).

    error, allowed: RMS error of the block and its bound, both divided by the block's RMS in the truth. detail: where it is.
    """

    ratio: float
    error: float
    allowed: float
    detail: str = ""


def expected(compute: Callable[[Change], dict[str, Tensor]], dtype: torch.dtype) -> Expected:
    """Truth and scale of `compute(change)`: the specification in float64 with `change` applied to every floating-point input, results by name."""
    truth = compute(lambda tensor: tensor)
    draws = DRAWS if sum(value.numel() for value in truth.values()) < MANY else FEW_DRAWS
    half_ulp = torch.finfo(dtype).eps / 2
    generators: dict[torch.device, torch.Generator] = {}

    def change(tensor: Tensor) -> Tensor:
        if tensor.device not in generators:
            generators[tensor.device] = torch.Generator(tensor.device).manual_seed(1)
        noise = torch.rand(tensor.shape, dtype=tensor.dtype, device=tensor.device, generator=generators[tensor.device])
        return tensor * (1 + half_ulp * (2 * noise - 1))

    square = {name: (value * half_ulp).square() / 3 for name, value in truth.items()}
    for _ in range(draws):
        for name, value in compute(change).items():
            square[name] += (value - truth[name]).square() / draws
    return Expected(truth, {name: value.sqrt() for name, value in square.items()}, dtype)


def worst_block(actual: Tensor, truth: Tensor, scale: Tensor, dtype: torch.dtype, row_groups: Sequence[Tensor] = ()) -> BlockError:
    """Judge `actual` by its worst block: RMS error <= FACTORS[dtype] * RMS scale, and no element OUTLIER times further off than that allows.

    All three of one shape; blocks are 128 x 128 of the last two dimensions. row_groups: index tensors of rows (first dimension) that are judged
    as blocks of their own as well, one for each expert, so that a fault in one expert's few rows is not hidden. A block that is exactly zero in
    the truth whatever the inputs' last bits are must be exactly zero.
    """
    a, t, s = (_matrices(tensor.detach().to(torch.float64)) for tensor in (actual, truth, scale))
    stacked = torch.stack([(a - t).abs().nan_to_num(nan=torch.inf), t.abs(), s])
    parts = [_judge(stacked, BLOCK, FACTORS[dtype])]
    parts += [_judge(stacked[:, :, rows], len(rows), FACTORS[dtype]) for rows in row_groups if len(rows)]
    ratio, error, allowed, rms = torch.cat(parts, dim=1)
    if ratio.numel() == 0:
        return BlockError(0.0, 0.0, 0.0)
    i, size = int(ratio.argmax()), float(rms[ratio.argmax()]) or 1.0
    return BlockError(float(ratio[i]), float(error[i]) / size, float(allowed[i]) / size, f"{_where(i, parts, stacked.shape)}, RMS {float(rms[i]):.3g}")


def _matrices(tensor: Tensor) -> Tensor:
    """(..., R, C) -> (N, R, C); a vector becomes one row."""
    return tensor.reshape(math.prod(tensor.shape[:-2]), *tensor.shape[-2:]) if tensor.dim() >= 2 else tensor.reshape(1, 1, -1)


def _judge(stacked: Tensor, rows_in_block: int, factor: float) -> Tensor:
    """(3, N, R, C), errors, truth and scales -> (4, number of blocks): ratio, RMS error, its bound, RMS of the truth."""
    kinds, n, R, C = stacked.shape
    row_blocks, column_blocks = -(-R // rows_in_block), -(-C // BLOCK)
    padded = stacked.new_zeros(kinds + 1, n, row_blocks * rows_in_block, column_blocks * BLOCK)
    padded[:kinds, :, :R, :C] = stacked
    padded[kinds, :, :R, :C] = 1                                # marks what is not padding
    blocks = padded.view(kinds + 1, n, row_blocks, rows_in_block, column_blocks, BLOCK).transpose(3, 4).reshape(kinds + 1, -1, rows_in_block * BLOCK)
    count = blocks[kinds].sum(-1)
    error, truth, scale = (blocks[:kinds].square().sum(-1) / count).sqrt()
    allowed = factor * (1 + SCATTER / count.sqrt()) * scale
    # One element's scale comes from a few draws and may be far too small by chance: at least what its row and its column have in common, and the block
    square = blocks[2].square().view(-1, rows_in_block, BLOCK)
    common = (square.sum(2, keepdim=True) * square.sum(1, keepdim=True) / square.sum((1, 2), keepdim=True)).flatten(1)
    element = torch.maximum(torch.maximum(blocks[2].square(), common).sqrt(), scale.unsqueeze(-1))
    outlier = (blocks[0] / (OUTLIER * factor * element)).nan_to_num(nan=0.0).amax(-1)                                          # 0 / 0: exactly zero
    zero = scale == 0
    ratio = torch.where(zero, torch.where(blocks[0].amax(-1) == 0, 0.0, torch.inf), torch.maximum(error / allowed, outlier))
    return torch.stack([ratio, error, allowed, truth])


def _where(index: int, parts: Sequence[Tensor], shape: Sequence[int]) -> str:
    """The place of block `index` of the concatenated parts: the 128 x 128 blocks, then each row group's."""
    _, _, R, C = shape
    rows, columns = -(-R // BLOCK), -(-C // BLOCK)
    if index < parts[0].shape[1]:
        return f"[{index // (rows * columns)}, {index // columns % rows * BLOCK}:, {index % columns * BLOCK}:]"
    index -= parts[0].shape[1]
    return f"row group {index // columns}, columns {index % columns * BLOCK}:"
