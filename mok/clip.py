"""Gradient-norm clipping over parameters that live on different ranks: dense ones everywhere or sharded, experts on their owners."""
from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .arguments import check_number, check_tensor, kind_of
from .checks import check_group
from .group import ExpertGroup

PIECE = 4096


@torch.no_grad()
def clip_grad_norm_(dense: Iterable[nn.Parameter], experts: Iterable[nn.Parameter], max_norm: float, *, group: ExpertGroup | None = None) -> Tensor:
    """Scale all gradients in place by min(1, max_norm / (norm + 1e-6)) and return the 2-norm of all of them together, 0-d float64, before it.

    dense: parameters whose gradients are the same on all ranks of `group`, plain or DTensor (FSDP2, on any mesh). experts: this rank's
    experts, (E_local, ...) each, plain or DTensor. The norm is that of one process holding everything: squares are summed in float64 by parameter, experts'
    one expert at a time and then in global order, so that it does not depend on how many ranks share the experts. On a GPU a dense fp32
    gradient, and PIECE elements of an expert's, are summed in fp32 first: each is read once instead of three times, in few launches.
    Parameters without a gradient count 0.
    With a group, collective over it. max_norm may be infinity, to measure only. Raises ValueError naming a wrong argument.
    """
    check_number("max_norm", max_norm, positive=True, finite=False)
    check_group(group)
    dense_parameters, expert_parameters = _listed("dense", dense), _listed("experts", experts)
    for i, parameter in enumerate(expert_parameters):
        if parameter.dim() < 1:
            raise ValueError(f"experts[{i}].shape=() must be (E_local, ...)")
    both = {id(parameter) for parameter in expert_parameters}.intersection(map(id, dense_parameters))
    if both:
        place = next(i for i, parameter in enumerate(dense_parameters) if id(parameter) in both)
        raise ValueError(f"dense[{place}] is among experts too and must be in one of them: it would count, and be scaled, twice")
    dense_grads = [parameter.grad for parameter in dense_parameters if parameter.grad is not None]
    device = next((p.device for p in (*expert_parameters, *dense_grads)), torch.device("cpu"))
    total = torch.zeros((), dtype=torch.float64, device=device)
    on_gpu = [grad for grad in dense_grads if _on_gpu(grad)]
    if on_gpu:
        total += torch.stack(torch._foreach_norm(on_gpu)).double().square().sum()
    for grad in dense_grads:
        if _on_gpu(grad):
            continue
        square = _squares(grad)
        total += square.full_tensor() if isinstance(square, DTensor) else square
    for parameter in expert_parameters:
        grad = _grad_or_zeros(parameter)
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad                    # one at a time; the same sums as of plain ones
        by_expert = piecewise_squares(grad) if _on_gpu(grad) else torch.stack([_squares(expert) for expert in grad])
        if group is not None and group.size > 1:
            by_expert = _in_global_order(by_expert, group)
        for square in [by_expert.sum()] if by_expert.is_cuda else by_expert.unbind():
            total += square
    norm = total.sqrt()
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    grads = [*dense_grads, *(p.grad for p in expert_parameters if p.grad is not None)]
    on_gpu = [grad for grad in grads if _on_gpu(grad)]
    if on_gpu:
        torch._foreach_mul_(on_gpu, scale.to(torch.float32))
    for grad in grads:
        if _on_gpu(grad):
            continue
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        local.mul_(scale.to(local.dtype))
    return norm


def _listed(name: str, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """All of them; ValueError naming the argument, or its element, that is no tensor."""
    if isinstance(parameters, (Tensor, str)) or not isinstance(parameters, Iterable):      # iterating a tensor gives rows, which have no .grad
        raise ValueError(f"{name}={kind_of(parameters)} must be several parameters, such as model.parameters()")
    listed = list(parameters)
    for i, parameter in enumerate(listed):
        check_tensor(f"{name}[{i}]", parameter)
    return listed


def _squares(grad: Tensor) -> Tensor:
    if isinstance(grad, DTensor):
        wide = grad.to(torch.float64)
        return (wide * wide).sum()
    wide = grad.reshape(-1).to(torch.float64)
    return torch.dot(wide, wide)              # 0.3 ms for a million elements on one core, where the product and its sum take 8


def _on_gpu(grad: Tensor) -> bool:
    """Whether the GPU's way of summing applies; to fp32 only: a half type's own sums would round pieces to it."""
    return grad.is_cuda and grad.dtype == torch.float32 and not isinstance(grad, DTensor)


def piecewise_squares(rows: Tensor) -> Tensor:
    """Each row's sum of squares, (n,) float64: rows (n, ...) fp32. Within pieces of PIECE elements in fp32, over pieces in float64."""
    flat = rows.reshape(rows.shape[0], -1)
    whole = flat.shape[1] // PIECE * PIECE
    total = torch.linalg.vector_norm(flat[:, whole:], dim=1).double().square()
    if whole:
        total = total + torch.linalg.vector_norm(flat[:, :whole].unflatten(1, (-1, PIECE)), dim=2).double().square().sum(1)
    return total


def _grad_or_zeros(parameter: nn.Parameter) -> Tensor:
    return parameter.new_zeros((parameter.shape[0], 1)) if parameter.grad is None else parameter.grad


def _in_global_order(by_expert: Tensor, group: ExpertGroup) -> Tensor:
    """(E,) from every rank's (E_local,). Through the group's fabric, which names a rank that is gone."""
    count = by_expert.shape[0]
    counts = [facts["experts"] for facts in group.handshake({"pass": "gradient norm"}, experts=count)]
    (everyone,) = group.fabric.exchange_rows([by_expert.repeat(group.size)], [count] * group.size, counts, "gradient norm")
    return everyone
