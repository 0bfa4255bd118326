"""The GPU's way of summing squares, in pieces: right for sizes around a piece, and close to float64 where fp32 alone is not."""
from __future__ import annotations

import pytest
import torch

from mok.clip import PIECE, clip_grad_norm_, piecewise_squares


@pytest.mark.parametrize("columns", [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 7])
def test_sums_are_those_of_float64(columns):
    rows = torch.randn(3, columns, generator=torch.Generator().manual_seed(1))
    rows[1] *= 1e-12                                             # squares far below fp32's smallest step beside the other rows'
    got = piecewise_squares(rows)
    assert got.dtype == torch.float64 and got.shape == (3,)
    torch.testing.assert_close(got, rows.double().square().sum(1), rtol=1e-6, atol=0)


@pytest.mark.gpu
def test_the_norm_on_a_gpu_is_the_one_on_a_cpu():
    generator = torch.Generator().manual_seed(2)
    dense, experts = [torch.nn.Parameter(torch.zeros(n)) for n in (5, 2 * PIECE + 3)], [torch.nn.Parameter(torch.zeros(4, 3, 700))]
    for parameter in (*dense, *experts):
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    on_gpu = [torch.nn.Parameter(parameter.detach().cuda()) for parameter in (*dense, *experts)]
    for ours, theirs in zip(on_gpu, (*dense, *experts)):
        ours.grad = theirs.grad.cuda()
    got, want = clip_grad_norm_(on_gpu[:2], on_gpu[2:], 0.5), clip_grad_norm_(dense, experts, 0.5)
    assert float(got) == pytest.approx(float(want), rel=1e-6)
    for ours, theirs in zip(on_gpu, (*dense, *experts)):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-6, atol=1e-9)
