"""Peer memory on GPUs: kernels of W processes write into each other's buffers and wait for each other's flags, on one device under MPS and on two."""
from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from mok.fabric import flag_page
from mok.fabric.abort import AbortWords
from mok.fabric.choice import CUDA_IPC, SYMMETRIC_MEMORY
from mok.fabric.mps import PrivateMps
from mok.fabric.peer_memory import PeerMemory
from tests.ranks import run_mortal_ranks

COLUMNS, MAX_TOKENS, SPINS = 1024, 5, 20_000_000
SIZES = {"rows": 2 * COLUMNS * 4, "flags": flag_page.page_bytes(MAX_TOKENS), "odd": 301}


def exchange_rounds(triton, tl):
    """A kernel of one CTA: the protocol's exchange, `rounds` times: write the own buffer of two, signal every page, wait for all, read all peers' buffers."""
    FLAG = tl.constexpr(flag_page.IDS_READY)

    @triton.jit(do_not_specialize=["rank", "W", "rounds", "limit"])
    def kernel(pages, buffers, rank, W, rounds, limit, outcome, COLUMNS: tl.constexpr):
        lanes = tl.arange(0, COLUMNS)
        mine = tl.load(buffers + rank).to(tl.pointer_type(tl.int32))
        page = tl.load(pages + rank).to(tl.pointer_type(tl.int32))
        wrong = rank * 0
        spins = rank * 0
        for epoch in range(1, rounds + 1):
            at = epoch % 2 * COLUMNS + lanes
            tl.store(mine + at, epoch * 128 + rank + lanes * 7)
            tl.debug_barrier()
            for p in range(W):
                theirs = tl.load(pages + p).to(tl.pointer_type(tl.int32))
                tl.atomic_xchg(theirs + FLAG + rank, epoch, sem="release", scope="sys")
            for p in range(W):
                seen = tl.atomic_add(page + FLAG + p, 0, sem="acquire", scope="sys")
                while (seen < epoch) & (spins < limit):
                    seen = tl.atomic_add(page + FLAG + p, 0, sem="acquire", scope="sys")
                    spins += 1
            tl.debug_barrier()
            for p in range(W):
                row = tl.load(tl.load(buffers + p).to(tl.pointer_type(tl.int32)) + at, volatile=True)
                wrong += tl.sum((row != epoch * 128 + p + lanes * 7).to(tl.int32))
            tl.debug_barrier()
        tl.store(outcome, wrong)
        tl.store(outcome + 1, spins)

    return kernel


def rank_body(devices: list[int], kind: str | None, channel: str, rounds: int) -> dict:
    """One rank: build, check the plain properties, exchange, then once more without waiting, and abort from the host while a kernel spins."""
    import triton
    import triton.language as tl
    rank, W = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", devices[rank])
    torch.cuda.set_device(device)
    group = dist.group.WORLD if channel == "group" else dist.PrefixStore("peers", dist.distributed_c10d._get_default_store())
    began = time.monotonic()
    peers = PeerMemory(group, rank, W, device, SIZES, kind=kind, timeout_s=60)
    said = {"kind": peers.kind, "reason": peers.reason, "build_s": round(time.monotonic() - began, 3),
            "sms": torch.cuda.get_device_properties(device).multi_processor_count}
    assert all(not buffer.any() and buffer.data_ptr() % 256 == 0 for buffer in peers.local.values())
    dist.barrier()
    for p in range(W):                                   # copies by the host reach the right byte of the right rank
        peers.peers["odd"][p][300 - rank] = rank + 1
    torch.cuda.synchronize()
    dist.barrier()
    assert peers.local["odd"].tolist() == [0] * (301 - W) + list(range(W, 0, -1))
    kernel = exchange_rounds(triton, tl)
    outcome = torch.zeros(2, dtype=torch.int32, device=device)
    page = peers.local["flags"].view(torch.int32)

    def exchange(rounds: int, limit: int) -> tuple[list[int], float]:
        torch.cuda.synchronize()
        dist.barrier()
        page.zero_()
        torch.cuda.synchronize()
        dist.barrier()
        start = time.monotonic()
        kernel[(1,)](peers.table["flags"], peers.table["rows"], rank, W, rounds, limit, outcome, COLUMNS=COLUMNS)
        torch.cuda.synchronize()
        return outcome.tolist(), time.monotonic() - start

    exchange(0, 0)                                       # loads the module: lazy loading waits for running kernels (rule 7)
    (said["wrong"], spins), seconds = exchange(rounds, SPINS)
    said["timed_out"], said["us_a_round"] = spins >= SPINS, round(1e6 * seconds / rounds, 2)
    (said["wrong_without_waiting"], _), _ = exchange(rounds, 0)
    torch.cuda.synchronize()
    dist.barrier()
    said["aborted"], said["spun"] = abort_while_kernels_spin(peers, kernel, outcome)
    before = torch.cuda.mem_get_info(device)[0]
    peers.close()
    dist.barrier()
    said["freed"] = torch.cuda.mem_get_info(device)[0] - before
    return said


def abort_while_kernels_spin(peers: PeerMemory, kernel, outcome: torch.Tensor) -> tuple[dict[int, int], bool]:
    """Rank 0 never joins an exchange, but gives up on its host: its word gets past the kernels that wait for it. ({rank: reason}, whether they still ran)."""
    words = AbortWords(peers)
    peers.local["flags"].zero_()
    torch.cuda.synchronize()
    dist.barrier()
    if peers.rank > 0:
        ended = torch.cuda.Event()
        kernel[(1,)](peers.table["flags"], peers.table["rows"], peers.rank, peers.world_size, 1, SPINS // 10, outcome, COLUMNS=COLUMNS)
        ended.record()
    else:
        time.sleep(0.05)
        words.tell()
    deadline = time.monotonic() + 20
    while not (seen := words.raised()) and time.monotonic() < deadline:
        pass
    spun = peers.rank == 0 or not ended.query()
    torch.cuda.synchronize()
    return seen, spun


def check(outcomes: list, W: int, kind: str) -> None:
    assert [(code, error) for code, _, error in outcomes] == [(0, None)] * W, outcomes
    for _, said, _ in outcomes:
        print(said)
        assert said["kind"] == kind and said["wrong"] == 0 and not said["timed_out"]
        assert said["aborted"] == {0: flag_page.ABORT_HOST} and said["spun"]
    assert any(said["wrong_without_waiting"] for _, said, _ in outcomes), "the exchange was right without its waits: it tests nothing"


@pytest.mark.gpu
@pytest.mark.parametrize(("W", "channel"), [(2, "group"), (4, "store"), (8, "store")])
def test_kernels_of_ranks_that_share_a_device_exchange_under_mps(W, channel):
    with PrivateMps() as mps, mps.inherited():
        check(run_mortal_ranks(rank_body, W, [0] * W, None, channel, 2000, timeout=90), W, CUDA_IPC)


@pytest.mark.multigpu
@pytest.mark.parametrize(("kind", "channel"), [(CUDA_IPC, "store"), (SYMMETRIC_MEMORY, "group")])
def test_kernels_of_two_devices_exchange(kind, channel):
    check(run_mortal_ranks(rank_body, 2, [0, 1], kind, channel, 2000, timeout=90), 2, kind)
