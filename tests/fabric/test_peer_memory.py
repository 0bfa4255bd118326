"""Which fabric is chosen and why; what must agree; and the buffers themselves, with files mapped by several processes in place of GPU memory."""
from __future__ import annotations

import itertools
import os
import tempfile
import uuid
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import mok.fabric.peer_memory as peer_memory
from mok.fabric import flag_page
from mok.fabric.abort import AbortWords
from mok.fabric.choice import CUDA_IPC, PROCESS_GROUP, SINGLE, SYMMETRIC_MEMORY, Place, choose_fabric, place_of
from mok.fabric.peer_memory import PeerMemory, PeersUnreachable, check_sizes, layout
from mok.fabric.process_group import FabricTimeout
from mok.fabric.rendezvous import Rendezvous
from tests.ranks import RankPool, run_mortal_ranks

CPU = torch.device("cpu")


def on(device: str, host: str = "a", **facts) -> Place:
    return Place(host, f"node-{host}", device, **facts)


CHOICES = {
    "one rank": ([on("A")], SINGLE, "one rank"),
    "all on one device": ([on("A"), on("A"), on("A")], CUDA_IPC, "ranks 0,1,2 share device A"),
    "two devices, each shared": ([on("A"), on("B"), on("A"), on("B")], CUDA_IPC, "ranks 0,2 share device A; ranks 1,3 share device B"),
    "a device each": ([on("A"), on("B")], CUDA_IPC, "ranks 0,1 have a device each on one host"),
    "no way from one to the other": ([on("A"), on("B"), on("C", unreachable=("A",))], PROCESS_GROUP, "rank 2's device has no peer access to rank 0's"),
    "one rank without a GPU": ([on("A"), on("")], PROCESS_GROUP, "rank 1 has no CUDA device"),
    "no GPU at all": ([on(""), on("")], PROCESS_GROUP, "ranks 0,1 have no CUDA device"),
    "a rack": ([on("A", nvlink_domain="c/1"), on("B", "b", nvlink_domain="c/1"), on("C", "b", nvlink_domain="c/1")], SYMMETRIC_MEMORY,
               "one NVLink domain: rank 0 on node-a; ranks 1,2 on node-b"),
    "two hosts": ([on("A"), on("B", "b")], PROCESS_GROUP, "several hosts without a common NVLink domain: rank 0 on node-a; rank 1 on node-b"),
    "two parts of a rack": ([on("A", nvlink_domain="c/1"), on("B", "b", nvlink_domain="c/2")], PROCESS_GROUP, "without a common NVLink domain"),
    "a rack with a shared device": ([on("A", nvlink_domain="c/1"), on("A", nvlink_domain="c/1"), on("B", "b", nvlink_domain="c/1")], PROCESS_GROUP,
                                    "several hosts, and ranks 0,1 share device A"),
    "unreachable only within a host": ([on("A", nvlink_domain="c/1", unreachable=("B",)), on("B", "b", nvlink_domain="c/1")], SYMMETRIC_MEMORY, "one NVLink"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_fabric_follows_from_the_places_and_says_why(name):
    places, kind, reason = CHOICES[name]
    assert choose_fabric(places)[0] == kind
    assert reason in choose_fabric(places)[1]


def test_a_process_without_a_gpu_knows_its_place():
    place = place_of(CPU)
    assert place.device == "" and place.host == place_of(CPU).host != ""


def test_buffers_lie_apart_aligned_and_alike_whatever_their_order():
    sizes = {"x": 300, "ids": 8, "slots": 256, "flags": 1}
    offsets, total = layout(sizes)
    assert (offsets, total) == layout(dict(reversed(sizes.items())))
    assert layout({"x": 300, "ids": 8}) == ({"ids": 0, "x": 256}, 768)
    owner = [name for name, start in offsets.items() for _ in range(start, start + sizes[name])]
    assert len(owner) == sum(sizes.values()) and all(start % 256 == 0 for start in offsets.values())
    ends = sorted((start, start + sizes[name]) for name, start in offsets.items())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends)) and ends[-1][1] <= total


def test_sizes_that_differ_are_named_with_their_ranks():
    check_sizes([{"x": 4, "y": 8}, {"y": 8, "x": 4}])
    with pytest.raises(ValueError, match=r"'x': 4 bytes on ranks 0,2; 8 bytes on rank 1$"):
        check_sizes([{"x": 4, "y": 1}, {"x": 8, "y": 1}, {"x": 4, "y": 1}])
    with pytest.raises(ValueError, match=r"'x': 4 bytes on rank 0; absent on rank 1; 'y': absent on rank 0; 4 bytes on rank 1"):
        check_sizes([{"x": 4}, {"y": 4}])
    for bad in ({"x": 0}, {"x": -1}, {}):
        with pytest.raises(ValueError, match="positive"):
            check_sizes([bad, bad])


def test_words_of_a_page_do_not_collide():
    """For every number of ranks: no two flags share a word, and the tokens' counters come last."""
    starts = sorted(flag_page.FLAGS.values())
    assert all(b - a >= flag_page.MAX_RANKS for a, b in itertools.pairwise(starts)) and starts[-1] == flag_page.TOKEN_ARRIVED
    assert flag_page.page_bytes(7) == 4 * (flag_page.TOKEN_ARRIVED + 7)
    page = torch.zeros(flag_page.page_bytes(7) // 4, dtype=torch.int32)
    page[flag_page.ABORT + 2] = 5
    page[flag_page.ABORT - 1] = page[flag_page.ABORT + flag_page.MAX_RANKS] = 9           # its neighbours do not count
    assert flag_page.aborted(page, 3) == {2: 5}


def give_up(group, folder: str):
    """Rank 1's host gives up; all see it, by whom and why; then rank 0 too."""
    rank, W = dist.get_rank(group), dist.get_world_size(group)
    peers = build(group, FileMemory(folder), {"x": 8, "flags": flag_page.page_bytes(3)})
    words, seen = AbortWords(peers), []
    for gives_up, reason in ((None, 0), (1, 7), (0, flag_page.ABORT_HOST)):
        if rank == gives_up:
            words.tell(reason)
        dist.barrier(group)
        seen.append(words.raised())
        dist.barrier(group)
    others = peers.local["flags"].view(torch.int32).clone()
    others[flag_page.ABORT:flag_page.ABORT + W] = 0
    with pytest.raises(ValueError, match="reason=0"):
        words.tell(0)
    peers.close()
    return seen, bool(others.any())


def test_a_host_that_gives_up_is_seen_by_all(pool, tmp_path):
    assert pool.run(give_up, 3, str(tmp_path)) == [([{}, {1: 7}, {0: flag_page.ABORT_HOST, 1: 7}], False)] * 3


class FileMemory:
    """The protocol of cuda_memory.Memory with a mapped file for an allocation. `failing`: the step in which this rank fails."""

    def __init__(self, folder: str, failing: str = "") -> None:
        self.path, self.failing, self.said = f"{folder}/{os.getpid()}-{uuid.uuid4().hex}", failing, []

    def _step(self, name: str) -> None:
        self.said.append(name)
        if name == self.failing:
            raise RuntimeError(f"{name} failed")

    def allocate(self, size: int) -> torch.Tensor:
        self._step("allocate")
        self.local = torch.from_file(self.path, shared=True, size=size, dtype=torch.uint8).zero_()
        return self.local

    def share(self) -> tuple[str, int]:
        self._step("share")
        return self.path, self.local.numel()

    def open(self, shared: list) -> list[torch.Tensor]:
        self._step("open")
        return [self.local if path == self.path else torch.from_file(path, shared=True, size=size, dtype=torch.uint8) for path, size in shared]

    def close_peers(self) -> None:
        self._step("close_peers")
        Path(f"{self.path}.closed").touch()

    def free(self) -> None:
        self._step("free")
        Path(self.path).unlink(missing_ok=True)


def channel_of(group, name: str):
    """The group itself, or a store under the group's."""
    return group if name == "group" else dist.PrefixStore(f"peers/{name}", dist.distributed_c10d._get_default_store())


def build(group, memory: FileMemory, sizes: dict, channel: str = "group", device: str = "A", **options) -> PeerMemory:
    rank, W = dist.get_rank(group), dist.get_world_size(group)
    return PeerMemory(channel_of(group, channel), rank, W, CPU, sizes, place=lambda _: on(device), memory=lambda _: memory, **options)


def pass_messages(group, folder: str, channel: str):
    """Every rank writes to every peer's buffers, at their own places; and the order in which memory is given back."""
    rank, W = dist.get_rank(group), dist.get_world_size(group)
    memory = FileMemory(folder)
    sizes = {"x": 300, "ids": 8} if rank % 2 else {"ids": 8, "x": 300}
    peers = build(group, memory, sizes, channel)
    assert peers.kind == (CUDA_IPC if W > 1 else SINGLE)
    zeroed = all(not buffer.any() for buffer in peers.local.values())
    assert peers.table["x"].tolist() == [buffer.data_ptr() for buffer in peers.peers["x"]] and peers.table["x"].dtype == torch.int64
    assert peers.peers["x"][rank].data_ptr() == peers.local["x"].data_ptr() and {len(buffer) for buffer in peers.peers["x"]} == {300}
    dist.barrier(group)
    for p in range(W):
        peers.peers["x"][p][rank] = 10 * rank + p + 1
        peers.peers["ids"][p][rank] = 100 + rank
    dist.barrier(group)
    seen = peers.local["x"][:W].tolist(), peers.local["ids"][:W].tolist()
    closed_first = []
    free = memory.free

    def free_last():
        closed_first.append(len(list(Path(folder).glob("*.closed"))))
        free()

    memory.free = free_last
    peers.close()
    peers.close()
    dist.barrier(group)
    return zeroed, seen, closed_first, memory.said, peers.local


@pytest.fixture(scope="module")
def pool():
    ranks = RankPool(3)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("channel", ["group", "store"])
@pytest.mark.parametrize("W", [1, 2, 3])
def test_peers_write_into_each_others_buffers(pool, tmp_path, W, channel):
    name = channel if channel == "group" else f"{channel}{W}"
    for rank, (zeroed, seen, closed_first, said, local) in enumerate(pool.run(pass_messages, W, str(tmp_path), name)):
        assert zeroed and local == {}
        assert seen == ([10 * r + rank + 1 for r in range(W)], [100 + r for r in range(W)])
        assert closed_first == [W], "importers unmap before exporters free"
        assert said == ["allocate", "share", "open", "close_peers", "free"]


def caught(group, folder: str, failing: dict, sizes: list[dict] | None = None, **options):
    rank = dist.get_rank(group)
    memory = FileMemory(folder, failing.get(rank, ""))
    try:
        build(group, memory, {"x": 8} if sizes is None else sizes[rank], **options)
    except (RuntimeError, ValueError) as error:
        return type(error).__name__, str(error), memory.said, getattr(error, "ranks", None)
    return None


def test_case_F11_sizes_that_differ_raise_alike_on_all_ranks_before_anything_is_allocated(pool, tmp_path):
    outcomes = pool.run(caught, 3, str(tmp_path), {}, [{"x": 8}, {"x": 8}, {"x": 16}])
    assert len({outcome[:2] for outcome in outcomes}) == 1 and outcomes[0][0] == "ValueError"
    assert "'x': 8 bytes on ranks 0,1; 16 bytes on rank 2" in outcomes[0][1] and all(outcome[2] == [] for outcome in outcomes)


@pytest.mark.parametrize(("step", "error"), [("allocate", "RuntimeError"), ("share", "RuntimeError"), ("open", "PeersUnreachable")])
def test_what_fails_on_one_rank_raises_on_all_and_leaves_nothing(pool, tmp_path, step, error):
    outcomes = pool.run(caught, 3, str(tmp_path), {1: step})
    assert {outcome[0] for outcome in outcomes} == {error}
    assert all(f"rank 1: {step} failed" in outcome[1] for outcome in outcomes)
    assert all(outcome[2][-1] == "free" for outcome in outcomes) and not [path for path in tmp_path.iterdir() if path.suffix != ".closed"]
    assert pool.run(caught, 3, str(tmp_path), {}) == [None] * 3             # the same ranks can try again


def wishing(group, folder: str, wishes: list, devices: list):
    rank = dist.get_rank(group)
    return caught(group, folder, {}, device=devices[rank], kind=wishes[rank])


def test_a_wish_must_be_the_same_and_possible(pool, tmp_path):
    for wishes, devices, said in (([CUDA_IPC, None], "AB", "kind must be the same on all ranks"), ([SYMMETRIC_MEMORY] * 2, "AA", "ranks 0,1 share device A"),
                                  ([SINGLE] * 2, "AB", "kind='single' must be"), (["tape"] * 2, "AB", "kind='tape' must be")):
        for kind, text, steps, _ in pool.run(wishing, 2, str(tmp_path), wishes, devices):
            assert kind == "ValueError" and said in text and steps == []
    assert pool.run(wishing, 2, str(tmp_path), [CUDA_IPC] * 2, "AB") == [None] * 2


def test_case_F15_ranks_that_cannot_reach_each_other_are_sent_to_the_process_group(pool, tmp_path):
    for kind, text, steps, ranks in pool.run(wishing, 2, str(tmp_path), [None] * 2, ["A", ""]):
        assert kind == "PeersUnreachable" and "rank 1 has no CUDA device" in text and steps == [] and ranks == (0, 1)


def test_the_choice_is_printed_once(monkeypatch, tmp_path):
    said = []
    monkeypatch.setattr(peer_memory.runtime, "say_once", said.append)
    memory = FileMemory(str(tmp_path))
    peers = PeerMemory(None, 0, 1, CPU, {"x": 8}, place=lambda _: on("A"), memory=lambda _: memory)
    assert said == ["mok: fabric: single: one rank"]
    peers.close(abandon=True)
    assert memory.said[-1] == "close_peers" and Path(memory.path).exists(), "a peer may still have it mapped"
    with pytest.raises(PeersUnreachable, match="no CUDA device"):
        PeerMemory(None, 0, 1, CPU, {"x": 8})


def come_or_not() -> list:
    rank = dist.get_rank()
    if rank == 1:
        return []
    store = dist.PrefixStore("absent", dist.distributed_c10d._get_default_store())
    with pytest.raises(FabricTimeout, match=r"ranks \[1\] did not come"):
        Rendezvous(store, rank, 3, timeout_s=1.0).all_gather(rank)
    return []


def test_a_rank_that_does_not_come_is_named():
    assert [outcome[1:] for outcome in run_mortal_ranks(come_or_not, 3)] == [([], None)] * 3


def test_a_rendezvous_passes_values_in_rank_order_and_checks_its_arguments():
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        store.set_timeout(timedelta(seconds=5))
        assert Rendezvous(store, 0, 1).all_gather({"handle": b"\0\xff"}) == [{"handle": b"\0\xff"}]
    with pytest.raises(ValueError, match="rank=2"):
        Rendezvous(None, 2, 2)
    with pytest.raises(ValueError, match="process_group_or_store=None"):
        Rendezvous(None, 0, 2)
