"""Where the ranks of one machine compute: the device of each, how many share a GPU, and what their tensors travel through."""
from __future__ import annotations

import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Placement:
    """Where one rank computes. sharing: ranks on the GPU that most of this machine's ranks share, the same on all of them; 1 on CPUs."""

    device: torch.device
    sharing: int = 1

    @property
    def backend(self) -> str:
        """For `init_process_group`: NCCL refuses two ranks on one GPU; gloo takes their CUDA tensors through the host."""
        return "cpu:gloo,cuda:nccl" if self.device.type == "cuda" and self.sharing == 1 else "gloo"

    @property
    def meets_inside_launches(self) -> bool:
        """Whether kernels of different ranks run at once, so that they may wait for one another: ranks that share a GPU need to be MPS clients for it."""
        return self.device.type == "cuda" and (self.sharing == 1 or "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in os.environ)


def place(device: torch.device, rank: int, ranks: int, gpus: int) -> Placement:
    """Rank `rank` of the `ranks` of this machine, which has so many GPUs, with --device `device`.

    "cuda": a GPU for each rank where there are as many, else GPUs shared by neighbours, as evenly as it goes. With an index: that GPU for all of them.
    At 3 ranks and 2 GPUs: cuda:0, cuda:0, cuda:1, and sharing == 2.
    """
    if device.type != "cuda":
        return Placement(device)
    if device.index is not None:
        return Placement(device, ranks)
    if gpus >= ranks:
        return Placement(torch.device("cuda", rank))
    return Placement(torch.device("cuda", rank * gpus // ranks), -(-ranks // gpus))


def place_here(device: torch.device, rank: int, ranks: int) -> Placement:
    """`place` on this machine's GPUs."""
    return place(device, rank, ranks, torch.cuda.device_count() if device.type == "cuda" else 0)
