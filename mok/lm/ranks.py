"""The ranks of one training run: which part of the batch each takes, and the sums, gathers and agreements between them."""
from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..group import DEFAULT_TIMEOUT_S, ExpertGroup
from ..plan import experts_of_rank
from .placement import Placement, place_here

# Starting takes as long as the slowest rank's imports; no rank is late by the group's own time-out before it has joined.
_START_TIMEOUT_S = 300.0
_LONGEST_ERROR = 4000          # characters: it travels in a message of fixed size
# What torchrun sets in the environment of each rank's process, and `mok train --ranks` likewise.
_ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Ranks:
    """This process among the ranks of a run; group None = the only one. Every method but `sizes` and `share` is collective.

    All of them go through the group's fabric, so a rank that ends or stalls is named by all others (`mok.PeerLost`, `mok.FabricTimeout`).
    Whatever is split over ranks is split in contiguous parts, the first n mod W of them one longer, as experts are.
    placement: where this rank computes; None = wherever the caller does, in passes over the group's process group.
    """

    def __init__(self, group: ExpertGroup | None = None, placement: Placement | None = None) -> None:
        self.group, self.placement = group, placement
        self.rank, self.size = (0, 1) if group is None else (group.rank, group.size)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which prints and writes what is there once."""
        return self.rank == 0

    def expert_group(self, device: torch.device, *, num_experts: int, max_tokens: int, hidden_size: int, top_k: int) -> ExpertGroup | None:
        """The group for layers of these sizes on `device`: one whose launches communicate where GPUs of this placement can, else the ranks' own."""
        if self.group is None or self.placement is None or self.placement.device != device or not self.placement.meets_inside_launches:
            return self.group
        return ExpertGroup(self.group.process_group, timeout_s=self.group.timeout_s, num_experts=num_experts, max_tokens=max_tokens,
                           hidden_size=hidden_size, top_k=top_k, device=device)

    def sizes(self, n: int) -> list[int]:
        """How many of n things each rank takes. At W = 3: sizes(4) == [2, 1, 1]"""
        return [experts_of_rank(n, self.size, rank)[1] for rank in range(self.size)]

    def share(self, rows: Tensor) -> Tensor:
        """This rank's rows of (n, ...), a view; none where there are fewer rows than ranks."""
        start, count = experts_of_rank(rows.shape[0], self.size, self.rank)
        return rows[start:start + count]

    def gather(self, values: Tensor, sizes: Sequence[int], what: str) -> Tensor:
        """Every rank's values (sizes[rank], ...), one after another in rank order. what: names the moment in errors."""
        if self.group is None:
            return values
        (everyone,) = self.group.fabric.exchange_rows([torch.cat([values] * self.size)], [values.shape[0]] * self.size, sizes, what)
        return everyone

    def combine(self, values: Tensor, what: str = "a sum over ranks") -> Tensor:
        """Elementwise sum over ranks of an integer CPU tensor of one shape on all of them (int64 wraps mod 2^64)."""
        if self.group is None:
            return values
        return self.gather(values.unsqueeze(0), [1] * self.size, what).sum(0)

    def sum_in_order(self, tensors: Sequence[Tensor], what: str) -> None:
        """Replace each tensor (one dtype and device) by its sum over ranks, added in rank order, the same bits on all of them.

        Rank r sums the r-th part of all elements and hands it to the others.
        """
        if self.group is None or not tensors:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        sizes = self.sizes(flat.numel())
        own = sizes[self.rank]
        (parts,) = self.group.fabric.exchange_rows([flat], sizes, [own] * self.size, what)
        total = parts[:own].clone()
        for rank in range(1, self.size):
            total += parts[rank * own:(rank + 1) * own]
        whole = self.gather(total, sizes, what)
        for tensor, summed in zip(tensors, whole.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(summed.view(tensor.shape))

    def any(self, flag: bool, what: str) -> bool:
        """Whether the flag is set on any rank."""
        return flag if self.group is None else bool(self.combine(torch.tensor([int(flag)]), what).item())

    def tell(self, what: str, **facts: Any) -> list[dict[str, Any]]:
        """Every rank's facts (small, JSON-able) in rank order."""
        return [facts] if self.group is None else self.group.handshake({"pass": what}, **facts)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """All ranks leave the block well, or all raise: one rank's ValueError or OSError becomes a ValueError on the others. Not nested."""
        try:
            yield
        except (ValueError, OSError) as error:
            if self.group is not None:
                self.group.report(str(error)[:_LONGEST_ERROR], {"pass": what})
            raise
        self.tell(what)


def launched_ranks() -> int | None:
    """How many ranks this process was started with by `mok train --ranks` or torchrun; None where it was started alone."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in _ENVIRONMENT) else None


def join(timeout_s: float = DEFAULT_TIMEOUT_S, device: torch.device | str = "cpu") -> Ranks:
    """Meet the other ranks that the environment tells of, and take this rank's device and its share of its machine's cores.

    timeout_s: how long any later exchange waits for another rank. device: what all ranks were asked for (`place`).
    Raises mok.FabricError or torch's DistError where they do not come.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    torch.set_num_threads(max(1, usable_cores() // here))
    placement = place_here(torch.device(device), int(os.environ["LOCAL_RANK"]), here)
    if placement.device.type == "cuda":
        torch.cuda.set_device(placement.device)
    dist.init_process_group(placement.backend, init_method="env://", timeout=timedelta(seconds=max(timeout_s, _START_TIMEOUT_S)))
    return Ranks(ExpertGroup(timeout_s=timeout_s), placement)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
