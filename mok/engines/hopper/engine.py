"""HopperEngine: the engine protocol on compute capability 9.0; what the fused kernels cannot take goes to the torch_gpu engine, said once."""
from __future__ import annotations

from torch import Tensor

from ...plan import RoutingPlan
from ...runtime import runtime
from ..protocol import Engine, Grads, MainGrad, MoETensors, PassOptions, Saved, Wants
from . import backward_launch, launch, plan_kernel
from .limits import unsupported_shared_reason


class HopperEngine:
    """BF16 on sm_90: plan in three launches, forward in one, backward in one. Stateless; counters live in runtime.scratch."""

    name = "hopper"

    def build_plan(self, topk_ids: Tensor, num_experts: int) -> RoutingPlan:
        return plan_kernel.ready_plan(topk_ids, num_experts) or _torch_gpu().build_plan(topk_ids, num_experts)

    def forward(self, plan: RoutingPlan, tensors: MoETensors, options: PassOptions) -> tuple[Tensor, Saved]:
        reason = _unsupported(tensors)
        if reason is not None:
            runtime.say_once(f"mok: the torch_gpu engine runs, not the fused kernel: {reason}")
            return _torch_gpu().forward(plan, tensors, options)
        return launch.forward(plan, tensors, options)

    def backward(self, plan: RoutingPlan, tensors: MoETensors, options: PassOptions, saved: Saved, dy: Tensor, wants: Wants,
                 main_grad: MainGrad | None) -> Grads:
        if _unsupported(tensors) is not None:
            return _torch_gpu().backward(plan, tensors, options, saved, dy, wants, main_grad)
        return backward_launch.hopper_backward(plan, tensors, options, saved, dy, wants, main_grad)

    def router_scores(self, x: Tensor, weight: Tensor) -> Tensor:
        return _torch_gpu().router_scores(x, weight)

    def router_scores_backward(self, x: Tensor, weight: Tensor, dlogits: Tensor, want_x: bool,
                               want_weight: bool) -> tuple[Tensor | None, Tensor | None]:
        return _torch_gpu().router_scores_backward(x, weight, dlogits, want_x, want_weight)


def _unsupported(tensors: MoETensors) -> str | None:
    """Why the fused kernels cannot take these shared experts, or None."""
    return unsupported_shared_reason(tuple(expert.w_down.shape[1] for expert in tensors.shared)) if tensors.shared else None


def _torch_gpu() -> Engine:
    from ..torch_gpu import TorchGpuEngine

    return TorchGpuEngine()
