"""What a rank computes in tests of `mok verify --ranks`: the layer, with one fault for each dtype on rank 1."""
from __future__ import annotations

import os

import torch

from mok.verify_ranks import rank_results


def broken(group, case, dtype, cuts):
    """float64: the last bit of one weight gradient. float32: the sign of a zero where the rank has few tokens. bfloat16: the rank ends."""
    results = rank_results(group, case, dtype, cuts)
    if group.rank == 1:
        if dtype == torch.float64:
            weight = results["dw_down"]
            weight[-1, 0, 0] = torch.nextafter(weight[-1, 0, 0], weight.new_tensor(9.0))
        elif dtype == torch.float32:
            results["y"][results["y"] == 0] = -0.0
        else:
            os._exit(3)
    return results


def raising(group, case, dtype, cuts):
    if group.rank == 1:
        raise ValueError("no such expert")
    return rank_results(group, case, dtype, cuts)
