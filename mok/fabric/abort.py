"""The host's side of the abort words: tell peers that this rank has given up, and see which have, while kernels of all ranks may be running."""
from __future__ import annotations

import contextlib

import torch

from .flag_page import ABORT, ABORT_HOST, aborted
from .peer_memory import PeerMemory


class AbortWords:
    """Reads and writes the abort words of the pages in `memory`'s buffer `name` (int32 words, laid out as in flag_page.py).

    Everything it needs is made beforehand: to allocate pinned memory, or to launch a kernel whose module is not loaded yet, may wait for the very
    kernels that spin until this word comes. What remains is a copy on a stream of its own, which passes them.
    """

    def __init__(self, memory: PeerMemory, name: str = "flags") -> None:
        self._memory = memory
        self._words = [page.view(torch.int32)[ABORT:ABORT + memory.world_size] for page in memory.peers[name]]
        on_gpu = memory.device.type == "cuda"
        self._reason = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self._seen = torch.zeros(ABORT + memory.world_size, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self._stream = torch.cuda.Stream(memory.device) if on_gpu else None
        self.raised()                                        # loads what the first copy loads

    def tell(self, reason: int = ABORT_HOST) -> None:
        """Write `reason` (not 0) into this rank's word of every page, the own one last; it is there on return. The group is dead then."""
        if reason == 0:
            raise ValueError(f"{reason=} must not be 0, which means: has not given up")
        self._reason[0] = reason
        rank = self._memory.rank
        with self._on_stream():
            for p in sorted(range(len(self._words)), key=lambda p: p == rank):
                self._words[p][rank:rank + 1].copy_(self._reason, non_blocking=True)

    def raised(self) -> dict[int, int]:
        """{rank: reason} of the ranks that have given up, as this rank's page says now."""
        with self._on_stream():
            self._seen[ABORT:].copy_(self._words[self._memory.rank], non_blocking=True)
        return aborted(self._seen, self._memory.world_size)

    @contextlib.contextmanager
    def _on_stream(self):
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()
