"""The plan that ranks of a group build on the GPU equals RoutingPlan.build's for every rank; in CI under Triton's interpreter in a process of its own."""
from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from mok.plan import RoutingPlan, count_ids, experts_of_rank
from mok.waves import wave_tiles

pytest.importorskip("triton.experimental.gluon")
from mok.engines.hopper import expert_parallel_plan_launch, plan_kernel

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
on_device = (lambda test: test) if INTERPRETED else pytest.mark.gpu      # the cases below run on DEVICE


def rank_plans(ids: list[torch.Tensor], E: int, max_tokens: int) -> list[RoutingPlan]:
    """What the process-group path builds on each rank: counts in the handshake, slots of received rows sent along with them."""
    W, K = len(ids), ids[0].shape[1]
    counts = torch.stack([count_ids(i.reshape(-1).long(), E) for i in ids])
    plans = [RoutingPlan.build(i, E, rank=r, counts=counts, total_tokens=W * max_tokens) for r, i in enumerate(ids)]
    for source, plan in enumerate(plans):
        assert plan.slot_to_rank is not None
        for slot in torch.nonzero(plan.slot_to_rank >= 0).flatten().tolist():
            owner = plans[plan.slot_to_rank[slot]]
            row = plan.slot_to_row[slot]
            assert owner.row_to_rank[row] == source
            owner.row_to_slot[row] = slot
    assert K * W * max_tokens <= plans[0].num_rows
    return plans


def routes(T: int, K: int, E: int, seed: int) -> torch.Tensor:
    """(T, K) ids with a tenth of -1 and expert 1 empty."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, E, (T, K), generator=generator, dtype=torch.int32)
    ids[torch.rand(T, K, generator=generator) < 0.1] = -1
    ids[ids == 1] = 0
    return ids


@on_device
@pytest.mark.parametrize("tokens,K,E", [
    ((5,), 2, 3),                # one rank: nothing to cut off
    ((3, 0), 1, 2),              # a rank without tokens, one expert each
    ((40, 7, 0, 33), 3, 6),      # 6 experts over 4 ranks: 2, 2, 1, 1; buffers are bounded
    ((300, 150), 4, 40),         # several tiles an expert
    ((0, 0, 0), 2, 5),           # nobody has a token
])
def test_cut_plan_equals_the_process_group_plan(tokens, K, E):
    W, max_tokens = len(tokens), max(*tokens, 1) + 2
    ids = [routes(T, K, E, seed) for seed, T in enumerate(tokens)]
    everybody = torch.full((W, max_tokens, K), -1, dtype=torch.int32)
    for r, i in enumerate(ids):
        everybody[r, :i.shape[0]] = i
    whole = plan_kernel.build_plan(everybody.view(W * max_tokens, K).to(DEVICE), E)
    for rank, want in enumerate(rank_plans(ids, E, max_tokens)):
        got = expert_parallel_plan_launch.cut_plan(whole, ids[rank].to(DEVICE), E, rank, W, max_tokens, (3, 2) if E == 6 else None)
        if E == 6:
            counts = torch.stack([count_ids(i.reshape(-1).long(), E) for i in ids])
            used = wave_tiles(counts, 1.0, W * max_tokens * K)[:, 0]
            want = replace(want, wave_tiles=torch.stack([used, torch.tensor([3, 3, 2, 2], dtype=torch.int32)], dim=1))
        assert got.tokens_per_expert.shape[0] == experts_of_rank(E, W, rank)[1]
        names = [name for name, value in vars(want).items() if value is not None]
        for name, ours, theirs in zip(names, got.tensors(), want.tensors(), strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours.cpu(), theirs), (rank, name)


def test_in_the_interpreter():
    """The tests above on a machine without a GPU."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", __file__, "-x", "-k", "not interpreter", "-p", "no:cacheprovider", "-o", "addopts="]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-3000:] + done.stderr[-2000:]
