"""How tensors that are not on the CPU travel: over the user's group, or through the host where that group has gloo for them, or nothing."""
from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mok.fabric.process_group import ProcessGroupFabric

ELSEWHERE = torch.device("meta")


class _Group:
    def __init__(self, backend):
        self.backend = backend

    def _get_backend(self, device):
        if self.backend is None:
            raise RuntimeError("No backend type associated with device type meta")
        return self

    def name(self):
        return self.backend


class _Rows:
    """A tensor on another device, of which the test can see what is copied to the host."""
    device = ELSEWHERE

    def __init__(self, values):
        self.values, self.shape = values, values.shape

    def cpu(self):
        return self.values

    def contiguous(self):
        return torch.empty(self.shape, device=ELSEWHERE)


@pytest.mark.parametrize("backend", ["gloo", None, "nccl"])
def test_gloo_takes_them_through_the_host_where_a_lost_peer_is_named(backend, monkeypatch):
    fabric = object.__new__(ProcessGroupFabric)
    fabric.data_group, fabric.rank, fabric.world_size = _Group(backend), 1, 2
    sent, library = [], []

    def pairwise(outgoing, incoming, what):
        sent.append(([tensor.tolist() for tensor in outgoing[0]], [tuple(tensor.shape) for tensor in incoming[0]], what))

    monkeypatch.setattr(fabric, "_pairwise", pairwise)
    monkeypatch.setattr(dist, "all_to_all_single", lambda out, rows, receive, send, group: library.append((tuple(out.shape), receive, send, group)))
    rows = _Rows(torch.tensor([[1.0], [2.0], [3.0]]))
    (received,) = fabric.exchange_rows([rows], [2, 1], [4, 1], "dispatch")
    assert received.device == ELSEWHERE and received.shape == (5, 1)
    if backend == "nccl":
        assert library == [((5, 1), [4, 1], [2, 1], fabric.data_group)] and not sent
    else:
        assert sent == [([[[1.0], [2.0]]], [(4, 1)], "dispatch")] and not library
