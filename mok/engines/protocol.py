"""What every engine implements: one forward pass, one backward pass and the router's score GEMM, on plain tensors."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ..config import Overlap
from ..plan import RoutingPlan


@dataclass(frozen=True)
class SharedExpert:
    """One shared expert: w_gate_up (2I_s, H), w_down (H, I_s), gate_weight (H,) or None (no sigmoid gate)."""

    w_gate_up: Tensor
    w_down: Tensor
    gate_weight: Tensor | None = None


@dataclass(frozen=True)
class MoETensors:
    """The layer's inputs, all of one compute dtype but topk_weights, which has `accumulation_dtype(x.dtype)`. Any strides.

    x (T, H); topk_weights (T, K); w_gate_up (E_local, 2I, H); w_down (E_local, H, I); biases (E_local, 2I), (E_local, H) or None.
    """

    x: Tensor
    topk_weights: Tensor
    w_gate_up: Tensor
    w_down: Tensor
    b_gate_up: Tensor | None = None
    b_down: Tensor | None = None
    shared: tuple[SharedExpert, ...] = ()


@dataclass(frozen=True)
class PassOptions:
    """What is not a tensor: activation and its clamp, precision, overlap, and whether forward must keep what backward needs.

    recompute: None = backward reads `Saved`; "z" = it gets an empty one and makes z again from x, with forward's bits.
    agreed: what the ranks of a group must have in common in this pass, where their launches compare it; "" where they have said it to one another.
    """

    activation: str = "swiglu"
    swiglu_limit: float | None = None
    precision: str = "bf16"
    overlap: Overlap | None = None
    save_for_backward: bool = False
    recompute: str | None = None
    agreed: str = ""


@dataclass(frozen=True)
class Saved:
    """What forward keeps for backward beside the inputs and the plan.

    z (R, 2I): rounded gate/up pre-activations of every routed row (padding rows unspecified). shared_z (T, sum of 2I_s): those of the shared
    experts, side by side in order. Both have zero rows when nothing was saved.
    """

    z: Tensor
    shared_z: Tensor


@dataclass(frozen=True)
class Wants:
    """Which gradients are wanted; shared holds (w_gate_up, w_down, gate_weight) for each shared expert. What is not wanted costs nothing."""

    x: bool = False
    topk_weights: bool = False
    w_gate_up: bool = False
    w_down: bool = False
    b_gate_up: bool = False
    b_down: bool = False
    shared: tuple[tuple[bool, bool, bool], ...] = ()

    @property
    def any_routed_weight(self) -> bool:
        return self.w_gate_up or self.w_down or self.b_gate_up or self.b_down


@dataclass
class Grads:
    """Gradients in their inputs' shapes; None where not wanted. topk_weights in the accumulation dtype, all others in the compute dtype."""

    x: Tensor | None = None
    topk_weights: Tensor | None = None
    w_gate_up: Tensor | None = None
    w_down: Tensor | None = None
    b_gate_up: Tensor | None = None
    b_down: Tensor | None = None
    shared: list[tuple[Tensor | None, Tensor | None, Tensor | None]] = field(default_factory=list)


@dataclass(frozen=True)
class MainGrad:
    """fp32 accumulators that backward adds weight gradients into instead of returning them: (E_local, 2I, H) and (E_local, H, I)."""

    w_gate_up: Tensor
    w_down: Tensor


class Passes(Protocol):
    """The layer's two passes."""

    def forward(self, plan: RoutingPlan, tensors: MoETensors, options: PassOptions) -> tuple[Tensor, Saved]:
        """y (T, H) in x's dtype and what backward needs (empty tensors unless options.save_for_backward)."""
        ...

    def backward(self, plan: RoutingPlan, tensors: MoETensors, options: PassOptions, saved: Saved, dy: Tensor, wants: Wants,
                 main_grad: MainGrad | None) -> Grads:
        """Gradients of y's inputs for dy (T, H). Weight gradients go into main_grad, and are returned as None, where it is given."""
        ...


class Engine(Passes, Protocol):
    """One implementation of the layer for one kind of device. Stateless: process-wide state lives in runtime.py."""

    name: str

    def build_plan(self, topk_ids: Tensor, num_experts: int) -> RoutingPlan:
        """The plan of one rank at W = 1, equal bit for bit to `RoutingPlan.build(topk_ids, num_experts)`."""
        ...

    def router_scores(self, x: Tensor, weight: Tensor) -> Tensor:
        """Fixed-order fp32 logits: x (T, H) any float dtype, weight (E, H) -> (T, E) fp32 (fp64 for fp64 x)."""
        ...

    def router_scores_backward(self, x: Tensor, weight: Tensor, dlogits: Tensor, want_x: bool, want_weight: bool) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of the logits: dx (T, H) in x's dtype, dweight (E, H) in weight's dtype; None where not wanted."""
        ...


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and routing weights: float64 for float64 inputs, float32 for every other."""
    return torch.float64 if dtype == torch.float64 else torch.float32
