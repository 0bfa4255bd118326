"""The only process-wide state: the CPU tile pool, scratch, group registry, error words and the set of messages already printed."""
from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any


class Runtime:
    """One instance a process, `runtime`. Everything that outlives a call hangs here; nothing is created at import."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._said: set[str] = set()
        self.layers_built: dict[int | None, int] = {}   # group key (None = no group) -> how many mok.MoE were constructed in it
        self.groups: dict[int, Any] = {}       # key -> ExpertGroup, so that custom ops can name a group by an integer
        self.scratch: dict[Any, Any] = {}      # engines' reusable buffers, keyed by the engine
        self.error_words: list[Callable[[], Exception | None]] = []   # each reads a device's pinned error word; None = nothing to report

    def say_once(self, message: str) -> None:
        """Print one line on stderr, the first time this process has it to say."""
        with self.lock:
            if message in self._said:
                return
            self._said.add(message)
        print(message, file=sys.stderr, flush=True)

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
