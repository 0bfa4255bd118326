"""Which GPU each rank of a machine takes, what its tensors travel through, and which group a model's layers get."""
from __future__ import annotations

import pytest
import torch

from mok.lm import ranks as lm_ranks
from mok.lm.placement import Placement, place
from mok.lm.ranks import Ranks
from mok.lm.trainer import Trainer, TrainSettings

CUDA = torch.device("cuda")


@pytest.mark.parametrize(("device", "ranks", "gpus", "indices", "sharing"), [
    ("cuda", 4, 4, [0, 1, 2, 3], 1),
    ("cuda", 2, 8, [0, 1], 1),
    ("cuda", 3, 2, [0, 0, 1], 2),                      # as in the docstring
    ("cuda", 4, 1, [0, 0, 0, 0], 4),
    ("cuda", 5, 2, [0, 0, 0, 1, 1], 3),
    ("cuda:1", 2, 8, [1, 1], 2),                       # that one was asked for
    ("cuda:1", 1, 8, [1], 1),
])
def test_a_gpu_each_where_there_are_as_many_else_neighbours_share(device, ranks, gpus, indices, sharing):
    placements = [place(torch.device(device), rank, ranks, gpus) for rank in range(ranks)]
    assert [placement.device for placement in placements] == [torch.device("cuda", index) for index in indices]
    assert {placement.sharing for placement in placements} == {sharing} == {max(map(indices.count, indices))}
    assert {(placement.ranks, placement.gpus) for placement in placements} == {(ranks, len(set(indices)))}


def test_nccl_is_for_a_gpu_each_alone():
    assert place(CUDA, 0, 2, 2).backend == "cpu:gloo,cuda:nccl"
    assert place(CUDA, 0, 2, 1).backend == "gloo"
    assert place(torch.device("cpu"), 0, 2, 8) == Placement(torch.device("cpu"), 2) and place(torch.device("cpu"), 1, 2, 0).backend == "gloo"


class _Group:
    rank, size, process_group, timeout_s = 0, 2, "the process group", 7.0

    def __init__(self, *arguments, **settings):
        self.arguments, self.settings = arguments, settings


def test_layers_get_a_group_of_their_sizes_where_launches_can_meet(monkeypatch):
    """Kernels that wait for one another must run at once: on a shared GPU without MPS they do not."""
    monkeypatch.setattr(lm_ranks, "ExpertGroup", _Group)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    sizes = {"num_experts": 8, "max_tokens": 512, "hidden_size": 256, "top_k": 2}
    group, here = _Group(), torch.device("cuda", 0)

    def chosen(placement: Placement | None, device: torch.device = here):
        return Ranks(group, placement).expert_group(device, **sizes)

    own = chosen(place(CUDA, 0, 2, 2))
    assert own.arguments == ("the process group",) and own.settings == {**sizes, "device": here, "timeout_s": 7.0}
    assert chosen(None) is group and chosen(place(torch.device("cpu"), 0, 2, 0)) is group
    assert chosen(place(CUDA, 0, 2, 2), torch.device("cpu")) is group
    assert chosen(place(CUDA, 0, 2, 1)) is group
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/run/pipe")
    assert chosen(place(CUDA, 0, 2, 1)) is not group
    assert Ranks(None, place(CUDA, 0, 1, 1)).expert_group(here, **sizes) is None


class _Asked(Ranks):
    """Three ranks that note the sizes of the group that a trainer asks for."""

    def __init__(self):
        super().__init__(None)
        self.size, self.asked = 3, []

    def expert_group(self, device, **sizes):
        self.asked.append((device, sizes))
        return "the layers' group"


def test_the_layers_group_holds_the_largest_share_of_a_part_of_the_batch():
    """14 sequences in two parts: 3, 2 and 2 of them on the ranks. In fp32 nothing communicates inside launches."""
    trainer = object.__new__(Trainer)
    trainer.ranks, trainer.device = _Asked(), CUDA
    trainer.settings = TrainSettings(config="small", precision="bf16", batch_size=14, accumulate=2)
    assert trainer._expert_group() == "the layers' group"
    assert trainer.ranks.asked == [(CUDA, {"num_experts": 8, "max_tokens": 3 * 256, "hidden_size": 256, "top_k": 2})]
    trainer.settings = TrainSettings(config="small", precision="fp32")
    assert trainer._expert_group() is None and len(trainer.ranks.asked) == 1
