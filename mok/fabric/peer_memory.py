"""PeerMemory: named buffers that every rank of a group can read and write from inside its kernels, and the table of their addresses."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..runtime import runtime
from .choice import CUDA_IPC, PROCESS_GROUP, SINGLE, SYMMETRIC_MEMORY, Place, choose_fabric, place_of
from .cuda_memory import CudaIpcMemory, Memory, SymmetricMemory
from .rendezvous import DEFAULT_TIMEOUT_S, Rendezvous

ALIGNMENT = 256             # bytes: of every buffer's start, enough for TMA (128) and for any vector load


class PeersUnreachable(RuntimeError):
    """These ranks cannot reach each other's memory; raised on all of them. The process-group path works for them. `ranks`: whom it is put down to."""

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class PeerMemory:
    """W ranks' buffers of `sizes` bytes each, zeroed, mapped by every rank. Building one is collective.

    process_group_or_store: the channel of `Rendezvous`; None with one rank. device: this rank's CUDA device; several ranks may share one (their kernels
    then run at once under MPS alone: mps.py). sizes: the same names and sizes on all ranks, else one ValueError on all of them names what differs.
    kind: a fabric's name from choice.py instead of the one that `choose_fabric` picks, which is printed with its reason once.

    local[name]   (sizes[name],) uint8, 256-byte aligned: this rank's own buffer
    peers[name]   list of W such tensors, all with this rank's device, the own one included
    table[name]   (W,) int64 on the device: their addresses

    Raises PeersUnreachable on all ranks where they cannot reach one another, RuntimeError on all ranks where one ran out of memory.
    """

    def __init__(self, process_group_or_store: dist.ProcessGroup | dist.Store | None, rank: int, world_size: int, device: torch.device | str,
                 sizes: Mapping[str, int], *, kind: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S,
                 place: Callable[[torch.device], Place] = place_of, memory: Callable[[str], Memory] | None = None) -> None:
        self.rank, self.world_size, self.device = rank, world_size, torch.device(device)
        self.sizes = dict(sizes)
        self.local: dict[str, Tensor] = {}
        self.peers: dict[str, list[Tensor]] = {}
        self.table: dict[str, Tensor] = {}
        self._rendezvous = Rendezvous(process_group_or_store, rank, world_size, timeout_s)
        facts = self._rendezvous.all_gather((place(self.device), self.sizes, kind))
        check_sizes([their_sizes for _, their_sizes, _ in facts])
        self.kind, self.reason = _agree([where for where, _, _ in facts], [wish for _, _, wish in facts])
        runtime.say_once(f"mok: fabric: {self.kind}: {self.reason}")
        self._memory = (memory or self._make_memory)(self.kind)
        self._open()

    def _make_memory(self, kind: str) -> Memory:
        if kind != SYMMETRIC_MEMORY:
            return CudaIpcMemory(self.rank, self.device)
        if not isinstance(self._rendezvous.channel, dist.ProcessGroup):
            raise ValueError(f"kind={kind!r} needs a process group, not a store")        # on every rank: all give the same kind of channel
        return SymmetricMemory(self.rank, self.device, self._rendezvous.channel)

    def _open(self) -> None:
        """Allocate, exchange, map; a failure of one rank is raised on all, after everything has been given back."""
        offsets, total = layout(self.sizes)
        local, shared, problem = None, None, None
        try:
            local = self._memory.allocate(total)
            shared = self._memory.share()
        except (RuntimeError, OSError) as error:           # no memory; no driver
            problem = str(error)
        outcomes = self._rendezvous.all_gather((shared, problem))
        if failures := {r: text for r, (_, text) in enumerate(outcomes) if text is not None}:
            self._memory.free()
            raise RuntimeError(f"peer memory of {total} bytes could not be made: {_by_rank(failures)}")
        assert local is not None
        whole: list[Tensor] = []
        try:
            whole = self._memory.open([message for message, _ in outcomes])
        except RuntimeError as error:
            problem = str(error)
        texts = self._rendezvous.all_gather(problem)       # also a barrier: from here on every rank has mapped every other
        if failures := {r: text for r, text in enumerate(texts) if text is not None}:
            whole.clear()
            self._give_back()
            raise PeersUnreachable(f"no rank can use {self.kind}: {_by_rank(failures)}", tuple(failures))
        for name, start in offsets.items():
            end = start + self.sizes[name]
            self.local[name] = local[start:end]
            self.peers[name] = [buffer[start:end] for buffer in whole]
            self.table[name] = torch.tensor([buffer.data_ptr() for buffer in self.peers[name]], dtype=torch.int64, device=self.device)

    def close(self, *, abandon: bool = False) -> None:
        """Unmap and free, once no launch uses the buffers any more; collective: importers unmap, a barrier, then exporters free.

        Tensors taken from here dangle afterwards. abandon: the group is dead, a peer may never come: this rank unmaps its peers' buffers and keeps its own
        allocation until its process ends, since a peer may still have it mapped. A second call does nothing.
        """
        if not self.local:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.local, self.peers, self.table = {}, {}, {}
        if abandon:
            self._memory.close_peers()
        else:
            self._give_back()

    def _give_back(self) -> None:
        self._memory.close_peers()
        self._rendezvous.barrier()                         # from here on nobody has this rank's allocation mapped
        self._memory.free()


def layout(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """({name: first byte}, bytes in all) of buffers that lie one after another, in the order of their names: the same on every rank.

    >>> layout({"x": 300, "ids": 8})
    ({'ids': 0, 'x': 256}, 768)
    """
    offsets, end = {}, 0
    for name in sorted(sizes):
        offsets[name] = end
        end += -(-sizes[name] // ALIGNMENT) * ALIGNMENT
    return offsets, end


def check_sizes(by_rank: Sequence[Mapping[str, int]]) -> None:
    """ValueError unless all ranks name the same buffers with the same, positive sizes; it names each buffer and the ranks that differ."""
    problems = []
    for name in sorted({name for sizes in by_rank for name in sizes}):
        ranks: dict[int | None, list[int]] = {}
        for rank, sizes in enumerate(by_rank):
            ranks.setdefault(sizes.get(name), []).append(rank)
        if len(ranks) > 1 or not all(isinstance(size, int) and size > 0 for size in ranks):
            said = "; ".join(f"{'absent' if size is None else f'{size} bytes'} on rank{'s' if len(where) > 1 else ''} {','.join(map(str, where))}"
                             for size, where in ranks.items())
            problems.append(f"{name!r}: {said}")
    if problems or not all(by_rank):
        raise ValueError("sizes must be positive and the same on all ranks: " + ("; ".join(problems) or "no rank names a buffer"))


def _agree(places: Sequence[Place], wishes: Sequence[str | None]) -> tuple[str, str]:
    """(kind, reason), the same on all ranks; raises PeersUnreachable or ValueError on all of them."""
    if len(set(wishes)) > 1:
        raise ValueError(f"kind must be the same on all ranks: {', '.join(f'rank {r}: {wish!r}' for r, wish in enumerate(wishes))}")
    kind, reason = choose_fabric(places)
    if kind == PROCESS_GROUP:
        raise PeersUnreachable(f"no fabric for kernels: {reason}", tuple(range(len(places))))
    if wishes[0] is None:
        return kind, reason
    if wishes[0] not in (SINGLE, CUDA_IPC, SYMMETRIC_MEMORY) or (wishes[0] == SINGLE and len(places) > 1):
        raise ValueError(f"kind={wishes[0]!r} must be {CUDA_IPC!r} or {SYMMETRIC_MEMORY!r}")
    if wishes[0] == SYMMETRIC_MEMORY and len({place.device for place in places}) < len(places):
        raise ValueError(f"kind={wishes[0]!r} needs a device for each rank: {reason}")
    if wishes[0] == CUDA_IPC and kind == SYMMETRIC_MEMORY:
        raise ValueError(f"kind={wishes[0]!r} needs all ranks on one host: {reason}")
    return wishes[0], "as asked for"


def _by_rank(texts: Mapping[int, str]) -> str:
    return "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())
