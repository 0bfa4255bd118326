"""The several-rank baseline against the one-rank one and the specification: it must be right before it is timed."""
from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mok.reference import moe_reference
from mok.unfused_ranks import unfused_moe_on_ranks
from tests.ranks import RankPool

H, I, E, K = 40, 24, 6, 3
TOKENS = (130, 0, 67)                                     # unequal, none on a rank
SEED = 5


@pytest.fixture(scope="module")
def pool():
    pool = RankPool(3)
    yield pool
    pool.close()


def problem():
    generator = torch.Generator().manual_seed(SEED)

    def randn(*size):
        return torch.randn(*size, generator=generator)

    T = sum(TOKENS)
    weights, ids = randn(T, E).topk(K)
    ids[ids == 4] = 5                                      # expert 4 gets nothing, and some tokens have expert 5 twice
    return randn(T, H), ids, weights.softmax(-1), randn(E, 2 * I, H) * H**-0.5, randn(E, H, I) * I**-0.5, randn(T, H)


def _on_rank(process_group, W):
    """(y, dx, d_topk_weights, dw_gate_up, dw_down) of this rank's tokens and experts."""
    x, ids, weights, up, down, dy = problem()
    r = dist.get_rank(process_group)
    cuts = [sum(TOKENS[:n]) for n in range(W)] + [sum(TOKENS)]
    mine, experts = slice(cuts[r], cuts[r + 1]), slice(r * E // W, (r + 1) * E // W)
    leaves = [t.detach().clone().requires_grad_() for t in (x[mine].bfloat16(), weights[mine], up[experts].bfloat16(), down[experts].bfloat16())]

    def exchange(rows, send, receive):
        out = rows.new_empty((sum(receive), *rows.shape[1:]))
        dist.all_to_all_single(out, rows.contiguous(), receive, send, group=process_group)
        return out

    y = unfused_moe_on_ranks(leaves[0], ids[mine], leaves[1], *leaves[2:], W, exchange)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy[mine].bfloat16())]


@pytest.mark.parametrize("W", [1, 2, 3])
def test_every_number_of_ranks_computes_the_layer(pool, W):
    x, ids, weights, up, down, dy = problem()
    leaves = [t.bfloat16().double().requires_grad_() if t is not weights else t.double().requires_grad_() for t in (x, weights, up, down)]
    truth = moe_reference(leaves[0], ids, leaves[1], leaves[2], leaves[3])
    expected = [truth.detach(), *torch.autograd.grad(truth, leaves, dy.bfloat16().double())]
    parts = pool.run(_on_rank, W, W)
    for name, part, want in zip(("y", "dx", "d_topk_weights", "dw_gate_up", "dw_down"), zip(*parts, strict=True), expected, strict=True):
        got = torch.cat(part).double()
        if name.startswith("dw"):
            got, want = got[[0, 1, 2, 3, 5]], want[[0, 1, 2, 3, 5]]              # an expert without rows: unwritten
        assert got.shape == want.shape
        by_row = (got - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1).square().mean().sqrt()
        assert by_row.max() < 0.03, name                                          # bf16 at these small sizes; a fault is off by 1
