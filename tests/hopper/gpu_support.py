"""What the GPU tests of the Hopper kernels share: problems on the device, forward against the float64 truth, poisoned memory."""
from __future__ import annotations

from dataclasses import replace

import torch
from oracle import Case, baseline_same_dtype, check_close, make_case
from torch import Tensor

from mok.engines.protocol import MoETensors, SharedExpert
from mok.reference import moe_reference

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


def reference(case: Case, layer, dtype: torch.dtype) -> Tensor:
    """y by a plain layer in `dtype`."""
    def to(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(dtype)

    t = case.tensors
    weights = t.topk_weights.to(torch.float64) if dtype == torch.float64 else t.topk_weights
    return layer(to(t.x), case.topk_ids, weights, to(t.w_gate_up), to(t.w_down), to(t.b_gate_up), to(t.b_down),
                 [(to(s.w_gate_up), to(s.w_down), to(s.gate_weight)) for s in t.shared], case.options.activation, case.options.swiglu_limit)


def check_forward(case: Case, y: Tensor) -> None:
    """y is finite and as close to the truth as the same-dtype loop, per expert and 128 x 128 block."""
    assert torch.isfinite(y).all(), f"{int((~torch.isfinite(y)).sum())} of {y.numel()} outputs are not finite"
    tokens = [torch.nonzero((case.topk_ids == e).any(1)).flatten() for e in range(case.num_experts)]
    check_close(y, reference(case, moe_reference, torch.float64), reference(case, baseline_same_dtype, BF16), "y", row_groups=tokens)
