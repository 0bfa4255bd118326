"""Where the ranks of one machine compute: the device of each, how many share a GPU, and what their tensors travel through."""
from __future__ import annotations

import os
from dataclasses import dataclass

import torch

# what makes a process a client of an MPS daemon that is not the system's own (`mok.fabric.mps`)
_MPS_CLIENT = "CUDA_MPS_PIPE_DIRECTORY"


@dataclass(frozen=True)
class Placement:
    """Where one rank computes. ranks: those of this machine; gpus: how many GPUs they use together, 0 on CPUs."""

    device: torch.device
    ranks: int = 1
    gpus: int = 0

    @property
    def sharing(self) -> int:
        """Ranks on the GPU that most of this machine's ranks share, the same on all of them; 1 on CPUs."""
        return -(-self.ranks // self.gpus) if self.gpus else 1

    @property
    def backend(self) -> str:
        """For `init_process_group`: NCCL refuses two ranks on one GPU; gloo takes their CUDA tensors through the host."""
        return "cpu:gloo,cuda:nccl" if self.device.type == "cuda" and self.sharing == 1 else "gloo"

    @property
    def meets_inside_launches(self) -> bool:
        """Whether kernels of different ranks run at once, so that they may wait for one another: ranks that share a GPU need to be MPS clients for it."""
        return self.device.type == "cuda" and (self.sharing == 1 or is_mps_client())


def is_mps_client() -> bool:
    """Whether this process's environment makes it a client of a private MPS daemon."""
    return _MPS_CLIENT in os.environ


def place(device: torch.device, rank: int, ranks: int, gpus: int) -> Placement:
    """Rank `rank` of the `ranks` of this machine, which has so many GPUs, with --device `device`.

    "cuda": a GPU for each rank where there are as many, else GPUs shared by neighbours, as evenly as it goes. With an index: that GPU for all of them.
    At 3 ranks and 2 GPUs: cuda:0, cuda:0, cuda:1, and sharing == 2.
    """
    if device.type != "cuda":
        return Placement(device, ranks)
    if device.index is not None:
        return Placement(device, ranks, 1)
    used = min(gpus, ranks)
    return Placement(torch.device("cuda", rank * used // ranks), ranks, used)


def place_here(device: torch.device, rank: int, ranks: int) -> Placement:
    """`place` on this machine's GPUs."""
    return place(device, rank, ranks, torch.cuda.device_count() if device.type == "cuda" else 0)
