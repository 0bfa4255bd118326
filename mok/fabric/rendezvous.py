"""Exchange of small objects between ranks while a fabric is built or closed: over a torch.distributed group, or over a store alone."""
from __future__ import annotations

import base64
import pickle
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .process_group import FabricTimeout

DEFAULT_TIMEOUT_S = 300.0


class Rendezvous:
    """`all_gather(value)`: every rank's value, in rank order; collective. `barrier()`: no value.

    channel: a process group (gloo, or NCCL with one rank a device) whose ranks are 0..W-1; or a store that these ranks, and no other user, share, such as
    a `PrefixStore` of a name of its own. Over a store, a rank that does not come within `timeout_s` seconds raises FabricTimeout
    naming it and `what`; a group has its own time-out. With one rank the channel is not used and may be None.
    """

    def __init__(self, channel: dist.ProcessGroup | dist.Store | None, rank: int, world_size: int, timeout_s: float = DEFAULT_TIMEOUT_S,
                 what: str = "the rendezvous of a fabric") -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"{rank=} must be in 0..{world_size - 1}")
        if channel is None and world_size > 1:
            raise ValueError(f"process_group_or_store=None needs {world_size=} to be 1")
        self.channel, self.rank, self.world_size, self.timeout_s = channel, rank, world_size, timeout_s
        self._round, self._what = 0, what

    def all_gather(self, value: Any) -> list[Any]:
        if self.world_size == 1:
            return [value]
        if not isinstance(self.channel, dist.Store):
            gathered: list[Any] = [None] * self.world_size
            dist.all_gather_object(gathered, value, group=self.channel)
            return gathered
        self._round += 1
        keys = [f"{self._round}/{rank}" for rank in range(self.world_size)]
        self.channel.set(keys[self.rank], base64.b64encode(pickle.dumps(value)).decode())
        try:
            self.channel.wait(keys, timedelta(seconds=self.timeout_s))
        except RuntimeError as error:                    # DistStoreError is one
            absent = [rank for rank, key in enumerate(keys) if not self.channel.check([key])]
            if not absent:
                raise
            raise FabricTimeout(f"ranks {absent} did not come to {self._what} within {self.timeout_s:g} s", absent) from error
        return [pickle.loads(base64.b64decode(self.channel.get(key))) for key in keys]

    def barrier(self) -> None:
        self.all_gather(None)
