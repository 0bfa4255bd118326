"""The process-group fabric: rows and small messages between ranks of a torch.distributed group, with every failure put down to a peer.

Pairwise sends and receives on a gloo group of its own (so nothing that the user's collectives do can interleave with them); each peer is
waited for in a thread of its own, so the peer that failed or stalled is known by name and the first to fail is seen first, whatever the
order of ranks. CUDA tensors travel by `all_to_all_single` on the user's own group instead; where that group has gloo for them, which would take
them through the host as well, they go the first way, so that a lost peer is named.
"""
from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

_MESSAGE_BYTES = 16384     # one fixed-size control message: holds the counts of 1024 experts beside a pass's signature
_GRACE_S = 0.5             # how long a broken connection's process may take to be seen as ended
_LINGER_S = 1.0            # how long a witness stays after naming the lost peer, so that the others read its word before it goes too


class FabricError(RuntimeError):
    """Communication between ranks failed; `peers` are the group ranks that it is put down to. The group is dead afterwards, a new one works."""

    def __init__(self, message: str, peers: Sequence[int]) -> None:
        super().__init__(message)
        self.peers = tuple(peers)


class FabricTimeout(FabricError):
    """A peer did not answer within the group's time-out."""


class PeerLost(FabricError):
    """A peer's process ended or its connection broke."""


class ProcessGroupFabric:
    """Exchanges tensors between the ranks of `process_group` (default group if None), each wait bounded by `timeout_s` seconds.

    `name` tells this fabric from every other of the process and is the same on all its ranks.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, timeout_s: float, name: str) -> None:
        self.data_group = process_group if process_group is not None else dist.group.WORLD
        self.global_ranks: list[int] = dist.get_process_group_ranks(self.data_group)
        self.rank = dist.get_rank(self.data_group)
        if self.rank < 0:
            raise ValueError(f"process_group of global ranks {self.global_ranks} must contain this rank, {dist.get_rank()}")
        self.world_size = len(self.global_ranks)
        self.timeout = timedelta(seconds=timeout_s)
        # Not dist.new_group: that needs every rank of the world, or (with local synchronisation) names the group by how many groups this
        # process has seen, which differs between ranks that belong to different groups.
        self._store = dist.PrefixStore(f"mok/{name}", dist.distributed_c10d._get_default_store())
        self._control = self._connect(name)
        self._dead: FabricError | None = None
        self._peers: list[dict] = [{} for _ in range(self.world_size)]
        self._peers = self.exchange_messages({"host": socket.gethostname(), "pid": os.getpid()}, "construction")

    def _connect(self, name: str) -> Any:
        """The gloo group, once all ranks have come; FabricTimeout naming those that have not: gloo itself would name nobody."""
        from .rendezvous import Rendezvous

        store = dist.PrefixStore("construction", self._store)
        Rendezvous(store, self.rank, self.world_size, self.timeout.total_seconds(), what=f"the construction of ExpertGroup {name}").barrier()
        try:
            return dist.ProcessGroupGloo(self._store, self.rank, self.world_size, self.timeout)
        except RuntimeError as error:
            raise FabricTimeout(f"a rank ended while ExpertGroup {name} connected global ranks {self.global_ranks}: {error}", ()) from error

    def peer_name(self, rank: int) -> str:
        """How errors call a rank: its rank in this group, its global rank, its host and process."""
        who = self._peers[rank]
        where = f", pid {who['pid']} on {who['host']}" if who else ""
        return f"rank {rank} (global rank {self.global_ranks[rank]}{where})"

    def exchange_messages(self, message: dict, what: str) -> list[dict]:
        """Every rank's `message` (small, JSON-able), in rank order. `what` names the moment in errors."""
        text = json.dumps(message).encode()
        if len(text) > _MESSAGE_BYTES:
            raise ValueError(f"message of {len(text)} bytes must be at most {_MESSAGE_BYTES}: {text[:80]!r}...")
        out = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8, device="cpu")
        out[:len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        inbox = [out if r == self.rank else torch.empty_like(out) for r in range(self.world_size)]
        self._pairwise([[out]] * self.world_size, [[box] for box in inbox], what)
        return [json.loads(bytes(box.numpy()).rstrip(b"\0")) for box in inbox]

    def exchange_rows(self, tensors: Sequence[Tensor], send_counts: Sequence[int], receive_counts: Sequence[int], what: str) -> list[Tensor]:
        """Each (sum of send_counts, ...), grouped by destination rank -> (sum of receive_counts, ...), grouped by source rank in rank order.

        All tensors travel at once, and are waited for at once.
        """
        device = tensors[0].device
        if device.type != "cpu" and self._backend_of(device) == "gloo":
            return [rows.to(device) for rows in self.exchange_rows([tensor.cpu() for tensor in tensors], send_counts, receive_counts, what)]
        sent = [tensor.contiguous() for tensor in tensors]
        received = [tensor.new_empty((sum(receive_counts), *tensor.shape[1:])) for tensor in sent]
        if device.type != "cpu":
            for out, rows in zip(received, sent, strict=True):
                dist.all_to_all_single(out, rows, list(receive_counts), list(send_counts), group=self.data_group)
            return received
        outgoing = list(zip(*(rows.split(list(send_counts)) for rows in sent), strict=True))
        incoming = list(zip(*(out.split(list(receive_counts)) for out in received), strict=True))
        for out, rows in zip(incoming[self.rank], outgoing[self.rank], strict=True):
            out.copy_(rows)
        self._pairwise(outgoing, incoming, what)
        return received

    def _backend_of(self, device: torch.device) -> str:
        """Name of what the user's group moves tensors on `device` with: "nccl", or "gloo", also where it has nothing for them."""
        assert self.data_group is not None
        try:
            return self.data_group._get_backend(device).name()
        except RuntimeError:
            return "gloo"

    def _pairwise(self, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[Sequence[Tensor]], what: str) -> None:
        """Send outgoing[r] to and receive incoming[r] from every other rank r, in order; empty tensors do not travel (both sides know the sizes)."""
        self.raise_if_dead()
        by_peer: dict[int, list[Callable[[], object]]] = {}
        for step in range(1, self.world_size):                       # a different partner each step, so that no rank is everybody's first
            to, source = (self.rank + step) % self.world_size, (self.rank - step) % self.world_size
            calls = [(to, self._control.send, tensor) for tensor in outgoing[to]] + [(source, self._control.recv, tensor) for tensor in incoming[source]]
            for peer, call, tensor in calls:
                if tensor.numel() == 0:
                    continue
                try:
                    work = call([tensor], peer, 0)
                except RuntimeError as error:                         # a connection already known to be broken fails at once
                    self._fail(peer, error, what)
                by_peer.setdefault(peer, []).append(partial(work.wait, self.timeout))
        outcomes: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()
        for peer, waits in by_peer.items():
            if len(by_peer) == 1:
                _report(outcomes, peer, waits)
            else:                                                     # daemons: a wait that never ends must not keep the process alive
                threading.Thread(target=_report, args=(outcomes, peer, waits), daemon=True, name=f"mok-fabric-{peer}").start()
        for _ in by_peer:
            peer, problem = outcomes.get()
            if isinstance(problem, KeyboardInterrupt):                # Ctrl-C in this thread's own wait: no peer is to blame
                raise problem
            if problem is not None:
                self._fail(peer, problem, what)

    def raise_if_dead(self) -> None:
        """Raise again what killed this group, if anything did."""
        if self._dead is not None:
            raise type(self._dead)(f"this ExpertGroup is dead: {self._dead}", self._dead.peers)

    def _fail(self, suspect: int, error: BaseException, what: str) -> NoReturn:
        """Put a failure seen at one peer down to whoever caused it, mark this group dead, raise."""
        lost, timed_out = self.find_lost([suspect], "timed out" in str(error).lower())
        names = ", ".join(self.peer_name(r) for r in lost)
        if timed_out:
            self._dead = FabricTimeout(f"{names} did not answer within {self.timeout.total_seconds():g} s during {what}", lost)
        else:
            self._dead = PeerLost(f"lost {names} during {what}", lost)
        raise self._dead from error

    def find_lost(self, suspects: list[int], timed_out: bool) -> tuple[list[int], bool]:
        """(group ranks that a failure is put down to, whether they stalled rather than ended): what the first witness wrote down, else the
        processes that ended, else the suspects.

        A rank that loses a peer ends too and takes its own connections along, so whoever looks later sees several broken ones; the first
        witness's word in the rendezvous store names the cause.
        """
        deadline = time.monotonic() + (0 if timed_out else _GRACE_S)
        while not (ended := [r for r in range(self.world_size) if self._process_ended(r)]) and time.monotonic() < deadline:
            time.sleep(0.02)
        verdict = (ended or suspects, timed_out and not ended)
        try:
            first = tuple(json.loads(self._store.compare_set("lost", "", json.dumps(verdict))))
        except Exception:                       # the store's own process may be what ended; then this rank's own observation stands
            return verdict
        time.sleep(_LINGER_S)
        return first[0], first[1]

    def _process_ended(self, rank: int) -> bool:
        who = self._peers[rank]
        if not who or who["host"] != socket.gethostname():
            return False
        try:
            with open(f"/proc/{who['pid']}/stat") as stat:
                return stat.read().rsplit(")", 1)[1].split()[0] in ("Z", "X")
        except FileNotFoundError:
            return os.path.isdir("/proc/self")
        except OSError:
            return False


def _report(outcomes: queue.SimpleQueue, peer: int, calls: Sequence[Callable[[], object]]) -> None:
    """Run one peer's waits and put (peer, None or what they raised)."""
    try:
        for call in calls:
            call()
    except BaseException as error:
        outcomes.put((peer, error))
    else:
        outcomes.put((peer, None))
