"""The layer beside the ecosystem's data parallelism: DDP and FSDP2 over the dense parameters, experts kept by their ranks, one global-mean loss.

Each rank's loss is its tokens' sum divided by the number of tokens of ALL ranks. Then an expert's gradient, to which every rank's tokens
contribute through the layer, is that of the global mean as it stands, without a division by W; and the dense parameters' gradients are
summed over ranks, not averaged.
"""
from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import mok
from tests.ranks import RankPool

H, E = 16, 4
CONFIG = mok.MoEConfig(hidden_size=H, intermediate_size=8, num_experts=E, top_k=2, aux_loss_coef=0.0)
EXPERTS = ("moe.w_gate_up", "moe.w_down")
SIZES = {1: [48], 2: [40, 8]}                                # unequal tokens a rank


class Model(nn.Module):
    def __init__(self, group=None, route_to=None):
        super().__init__()
        g = torch.Generator().manual_seed(1)
        self.before, self.after = nn.Linear(H, H), nn.Linear(H, 1)
        for parameter in (*self.before.parameters(), *self.after.parameters()):
            parameter.data = torch.randn(parameter.shape, generator=g) * 0.3
        self.moe = mok.MoE(CONFIG, group=group)
        self.route_to = route_to

    def forward(self, x):
        hidden = self.before(x)
        routes = None
        if self.route_to is not None:                        # all tokens of this rank to one expert
            routes = (torch.full((x.shape[0], 2), self.route_to), None)   # the weights stay the router's
        return self.after(hidden + self.moe(hidden, routes=routes)).square()


def data(W, rank):
    x = torch.randn(48, H, generator=torch.Generator().manual_seed(2))
    start = sum(SIZES[W][:rank])
    return x[start:start + SIZES[W][rank]]


def gradients(model):
    full = {name: parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad for name, parameter in model.named_parameters()}
    return {name.removeprefix("module."): grad.clone() for name, grad in full.items()}


def sum_hook(process_group, bucket):
    """DDP's all-reduce without its division: torch's default hook divides by the number of ranks."""
    return allreduce_hook(process_group, bucket).then(lambda future: future.value() * dist.get_world_size(process_group))


def parallel(kind, group, process_group, route_to=None):
    model = Model(group, route_to)
    if kind == "ddp":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [*EXPERTS])
        model = DistributedDataParallel(model, process_group=process_group)
        model.register_comm_hook(process_group, sum_hook)
        return model
    mesh = dist.DeviceMesh.from_group(process_group, "cpu")
    experts = {parameter for name, parameter in model.named_parameters() if name in EXPERTS}
    fully_shard(model, mesh=mesh, ignored_params=experts)
    model.set_gradient_divide_factor(1.0)                    # a sum, not a mean;
    model.set_force_sum_reduction_for_comms(True)            # by a plain sum: gloo has no pre-multiplied one
    return model


def _gradients_on_rank(process_group, kind, skewed):
    group = mok.ExpertGroup(process_group, timeout_s=30)
    model = parallel(kind, group, process_group, route_to=3 * group.rank if skewed else None)
    for _ in range(3):                                       # several steps: reducers that lost track of a parameter hang in the second
        model.zero_grad()
        (model(data(group.size, group.rank)).sum() / 48).backward()
    return gradients(model)


def joined(parts):
    """Dense gradients of rank 0 (all ranks hold the same) and every expert's, in global order."""
    for name, grad in parts[0].items():
        if name not in EXPERTS:
            assert all(torch.equal(part[name], grad) for part in parts[1:]), name
    return {name: torch.cat([part[name] for part in parts]) if name in EXPERTS else grad for name, grad in parts[0].items()}


@pytest.fixture(scope="module")
def pool():
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_case_E15_expert_gradients_need_no_division_by_the_number_of_ranks(pool, kind):
    """pytorch#160285 and kin: gradients too large or small by W. Experts equal W = 1 closely; they differ only through the dense layers before."""
    alone = Model()
    (alone(data(1, 0)).sum() / 48).backward()
    expected = gradients(alone)
    got = joined(pool.run(_gradients_on_rank, 2, kind, False))
    assert got.keys() == expected.keys()
    for name, grad in got.items():
        torch.testing.assert_close(grad, expected[name], rtol=2e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_case_E13_experts_without_tokens_neither_hang_nor_lose_their_gradient(pool, kind):
    """pytorch#126616: rank 0 routes all to expert 0, rank 1 to expert 3; experts 1 and 2 idle, yet every parameter gets a gradient."""
    got = joined(pool.run(_gradients_on_rank, 2, kind, True))
    assert all(grad is not None for grad in got.values())
    for name in EXPERTS:
        assert got[name][0].any() and got[name][3].any() and not got[name][1:3].any(), name


def _norm_on_rank(process_group):
    group = mok.ExpertGroup(process_group, timeout_s=30)
    model = parallel("fsdp2", group, process_group)
    (model(data(group.size, group.rank)).sum() / 48).backward()
    experts = [parameter for name, parameter in model.named_parameters() if name in EXPERTS]
    dense = [parameter for name, parameter in model.named_parameters() if name not in EXPERTS]
    norm = mok.clip_grad_norm_(dense, experts, 0.05, group=group)
    return norm.item(), gradients(model)


def test_case_E14_one_gradient_norm_over_both_meshes(pool):
    """Megatron-LM#5916, torchtitan#732: the norm is one process's norm, and clipping scales every parameter by it."""
    alone = Model()
    (alone(data(1, 0)).sum() / 48).backward()
    expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.05).item()
    outcomes = pool.run(_norm_on_rank, 2)
    assert outcomes[0][0] == outcomes[1][0] == pytest.approx(expected, rel=1e-5)
    clipped = joined([grads for _, grads in outcomes])
    for name, grad in gradients(alone).items():
        torch.testing.assert_close(clipped[name], grad, rtol=5e-5, atol=1e-7, msg=name)
    assert sum(grad.double().square().sum() for grad in clipped.values()).sqrt().item() == pytest.approx(0.05, rel=1e-4)


def _norm_of_sharded_experts(_):
    """Two ranks of data parallelism, each of which owns all experts, sharded over the two: DTensors."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "ep"))
    group = mok.ExpertGroup.from_mesh(mesh["ep"], timeout_s=30)
    model = Model(group)
    fully_shard(model, mesh=mesh["dp"])
    (model(data(2, dist.get_rank())).sum() / 24).backward()                # FSDP averages over two ranks
    experts = [parameter for name, parameter in model.named_parameters() if name in EXPERTS]
    dense = [parameter for name, parameter in model.named_parameters() if name not in EXPERTS]
    norm = mok.clip_grad_norm_(dense, experts, 0.05, group=group)
    return norm.item(), all(isinstance(parameter, DTensor) for parameter in experts), gradients(model)


def test_case_E14_experts_that_are_dtensors_count_whole(pool):
    alone = Model()
    (alone(data(1, 0)).sum() / 48).backward()
    expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.05).item()
    for norm, sharded, grads in pool.run(_norm_of_sharded_experts, 2):
        assert sharded and norm == pytest.approx(expected, rel=1e-5)
        for name, grad in gradients(alone).items():
            torch.testing.assert_close(grads[name], grad, rtol=5e-5, atol=1e-7, msg=name)
