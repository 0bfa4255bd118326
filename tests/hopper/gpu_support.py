"""What the GPU tests of the Hopper kernels share: problems on the device, forward against the float64 truth, poisoned memory."""
from __future__ import annotations

from dataclasses import replace

import torch
from oracle import Case, check_case, make_case
from torch import Tensor

from mok.engines.protocol import MoETensors, SharedExpert

BF16 = torch.bfloat16


def on_gpu(case: Case) -> Case:
    """The same problem on the GPU."""
    t = case.tensors
    moved = [None if v is None else v.cuda() for v in (t.x, t.topk_weights, t.w_gate_up, t.w_down, t.b_gate_up, t.b_down)]
    shared = tuple(SharedExpert(s.w_gate_up.cuda(), s.w_down.cuda(), None if s.gate_weight is None else s.gate_weight.cuda()) for s in t.shared)
    return replace(case, topk_ids=case.topk_ids.cuda(), tensors=MoETensors(*moved, shared), dy=case.dy.cuda())


def gpu_case(T: int, H: int, I: int, E: int, K: int, **settings) -> Case:
    return on_gpu(make_case(T, H, I, E, K, BF16, **settings))


def big_case(T: int, H: int, I: int, E: int, K: int, seed: int = 0, save: bool = False) -> Case:
    """Random data drawn on the device, for sizes that a CPU generator would take seconds for. Every expert is random, none is empty."""
    torch.manual_seed(seed)
    from mok.engines.protocol import PassOptions

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=BF16).mul_(scale)

    ids = torch.rand(T, E, device="cuda").topk(K, dim=-1).indices
    tensors = MoETensors(normal(T, H), torch.rand(T, K, device="cuda") + 0.1, normal(E, 2 * I, H, scale=H**-0.5), normal(E, H, I, scale=I**-0.5))
    return Case(ids, tensors, tensors.x, PassOptions(save_for_backward=save))


def poison() -> None:
    """Fill freed memory with NaN: fresh pages read as zero and would hide an unwritten output."""
    pieces = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(16)] + [torch.full((1 << 16,), float("nan"), device="cuda") for _ in range(64)]
    del pieces


def check_forward(case: Case, y: Tensor) -> None:
    """y is finite and as close to the truth as its scale allows, per expert and 128 x 128 block."""
    assert torch.isfinite(y).all(), f"{int((~torch.isfinite(y)).sum())} of {y.numel()} outputs are not finite"
    check_case(case, {"y": y})
