"""The only process-wide state: the CPU tile pool, scratch, group registry, error words and the set of messages already printed."""
from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

EXPERT_RADIX = 2048   # an error word is id * EXPERT_RADIX + E; E (1 to 1024) makes it differ from 0, which means "no error"


class Runtime:
    """One instance a process, `runtime`. Everything that outlives a call hangs here; nothing is created at import."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._said: set[str] = set()
        self.layers_built: dict[int | None, int] = {}   # group key (None = no group) -> how many mok.MoE were constructed in it
        self.groups: dict[int, Any] = {}       # key -> ExpertGroup, so that custom ops can name a group by an integer
        self._groups_built = 0
        self.scratch: dict[Any, Any] = {}      # engines' reusable buffers, keyed by the engine
        self.error_words: list[Callable[[], Exception | None]] = []   # each reads a device's pinned error word; None = nothing to report
        self._route_words: dict[torch.device, Tensor] = {}            # the error word of each device for ids out of range

    def say_once(self, message: str) -> None:
        """Print one line on stderr, the first time this process has it to say."""
        with self.lock:
            if message in self._said:
                return
            self._said.add(message)
        print(message, file=sys.stderr, flush=True)

    def error_word(self, device: torch.device) -> Tensor:
        """(1,) int64 in pinned host memory, zero until a plan kernel on `device` (with an index, or the CPU) meets an id outside -1..E-1.

        The kernel stores id * EXPERT_RADIX + E in one piece, the id cut to 52 bits, without waiting for anybody. Allocated on first use.
        """
        word = self._route_words.get(device)
        if word is None:
            import torch

            with self.lock:
                word = self._route_words.get(device)
                if word is None:
                    word = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
                    self.error_words.append(lambda: self._route_error(device))
                    self._route_words[device] = word
        return word

    def _route_error(self, device: torch.device) -> ValueError | None:
        word = self._route_words[device]
        packed = int(word[0])
        if packed == 0:
            return None
        word.zero_()
        value, num_experts = divmod(packed, EXPERT_RADIX)
        return ValueError(f"topk_ids held {value} in an earlier call on {device}: ids must be from -1 to {num_experts - 1} (E = {num_experts}); "
                          "such routes counted as -1")

    def new_group_key(self) -> int:
        """1, 2, ...: a key for a new ExpertGroup, equal on all ranks that build the same groups in the same order."""
        with self.lock:
            self._groups_built += 1
            return self._groups_built

    def group_by_key(self, key: int) -> Any:
        """The ExpertGroup with this key, None where this process has none."""
        return self.groups.get(key)

    def next_layer_key(self, group_key: int | None) -> int:
        """1, 2, ...: the construction number of a mok.MoE in its group, equal on all ranks that build the same layers in the same order."""
        with self.lock:
            self.layers_built[group_key] = self.layers_built.get(group_key, 0) + 1
            return self.layers_built[group_key]

    def raise_pending_errors(self) -> None:
        """Raise what a kernel wrote into an error word since the last look. Reads host memory only: no synchronisation."""
        for read in self.error_words:
            error = read()
            if error is not None:
                raise error


runtime = Runtime()
