"""Settings of a layer and of its overlap: frozen dataclasses that validate themselves."""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from .arguments import LARGEST, check_bool, check_choice, check_integer, check_number, check_type, kind_of

ACTIVATIONS = ("swiglu", "swiglu_oai", "geglu", "reglu")
PRECISIONS = ("bf16", "mxfp8", "fp8")
SWIGLU_OAI_ALPHA = 1.702   # gpt-oss: h = (clamp(u) + 1) * g * sigmoid(alpha * g)
SWIGLU_OAI_LIMIT = 7.0     # gpt-oss's clamp, used when swiglu_limit is None

BLOCK_M = 128              # rows of a segment's alignment in every plan, on every engine
LARGEST_FP32 = (2 - 2.0**-23) * 2.0**127
_MOST_WEIGHTS = 2**60      # of one layer: their bytes, and every offset, fit an int64


@dataclass(frozen=True)
class Overlap:
    """How finely communication and compute interleave in a fused kernel. No setting changes a bit of any result (P2).

    minibatch_rows: rows of the routed buffer handed over at a time, a multiple of 128; None = the engine's measured default.
    mover_warps: warps of each CTA that copy rows while the tensor cores run; None = the engine's default.
    reserve_sms: multiprocessors left to other kernels (NCCL); None = 0 at one rank, NCCL's CTA count at several.

    Raises ValueError for a value outside these ranges. Engines without a fused kernel ignore all three.
    """

    minibatch_rows: int | None = None
    mover_warps: int | None = None
    reserve_sms: int | None = None

    def __post_init__(self) -> None:
        if self.minibatch_rows is not None:
            check_integer("minibatch_rows", self.minibatch_rows, 1, LARGEST)
            if self.minibatch_rows % BLOCK_M:
                raise ValueError(f"minibatch_rows={self.minibatch_rows} must be a positive multiple of {BLOCK_M}")
        if self.mover_warps is not None:
            check_integer("mover_warps", self.mover_warps, 1, LARGEST)
            if self.mover_warps not in (1, 2, 4, 8):
                raise ValueError(f"mover_warps={self.mover_warps} must be 1, 2, 4 or 8")
        if self.reserve_sms is not None:
            check_integer("reserve_sms", self.reserve_sms, 0, LARGEST)


@dataclass(frozen=True)
class MoEConfig:
    """Sizes and routing rule of one mixture-of-experts layer.

    Sizes: hidden_size = H, intermediate_size = I of each routed expert, num_experts = E over all ranks, top_k = K routes a token.
    shared_intermediate_sizes: one width I_s for each shared expert; shared_gated gives each of them a sigmoid gate per token.
    activation, swiglu_limit, precision, recompute: as in `mok.moe`.
    Router: score_function over the E logits; norm_topk_prob divides the K chosen weights by their sum; routed_scaling_factor multiplies
    them afterwards. num_expert_groups / topk_groups: group-limited routing (DeepSeek-V3): experts are split into equal groups and only the
    topk_groups best groups may be chosen from. balance: "aux_loss" (Switch), "bias" (DeepSeek-V3's loss-free bias, moved by
    bias_update_rate after each training step) or "none". aux_loss_coef and z_loss_coef scale what `layer.aux_loss` holds.
    layer_index, seed: every expert's initial values depend on (seed, layer_index, global expert id) alone.
    initializer_range: standard deviation of the initial weights; None = 1/sqrt(fan_in).
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    activation: str = "swiglu"
    swiglu_limit: float | None = None
    precision: str = "bf16"
    expert_bias: bool = False
    shared_intermediate_sizes: tuple[int, ...] = ()
    shared_gated: bool = False
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    num_expert_groups: int = 1
    topk_groups: int = 1
    balance: Literal["aux_loss", "bias", "none"] = "aux_loss"
    aux_loss_coef: float = 0.01
    z_loss_coef: float = 0.0
    bias_update_rate: float = 0.001
    seed: int = 0
    layer_index: int = 0
    initializer_range: float | None = None
    overlap: Overlap | None = None
    recompute: Literal["z"] | None = None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_experts", "top_k", "num_expert_groups", "topk_groups"):
            check_integer(name, getattr(self, name), 1, LARGEST)
        check_type("shared_intermediate_sizes", self.shared_intermediate_sizes, (tuple, list), "a tuple of integers")
        object.__setattr__(self, "shared_intermediate_sizes", tuple(self.shared_intermediate_sizes))
        for i, width in enumerate(self.shared_intermediate_sizes):
            check_integer(f"shared_intermediate_sizes[{i}]", width, 1, LARGEST)
        if 3 * self.hidden_size * self.intermediate_size * self.num_experts > _MOST_WEIGHTS:
            raise ValueError(f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size} and num_experts={self.num_experts} must give "
                             f"at most {_MOST_WEIGHTS} weights")
        self._check_rules()
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k={self.top_k} must not exceed num_experts={self.num_experts}")
        if self.num_experts % self.num_expert_groups:
            raise ValueError(f"num_experts={self.num_experts} must be a multiple of num_expert_groups={self.num_expert_groups}")
        if self.topk_groups > self.num_expert_groups:
            raise ValueError(f"topk_groups={self.topk_groups} must not exceed num_expert_groups={self.num_expert_groups}")
        available = self.topk_groups * (self.num_experts // self.num_expert_groups)
        if self.top_k > available:
            raise ValueError(f"top_k={self.top_k} must not exceed the {available} experts that {self.topk_groups} groups hold")

    def _check_rules(self) -> None:
        """Everything that is not a size."""
        check_activation(self.activation, self.swiglu_limit)
        for name, choices in (("precision", PRECISIONS), ("score_function", ("softmax", "sigmoid")), ("balance", ("aux_loss", "bias", "none"))):
            check_choice(name, getattr(self, name), choices)
        for name in ("expert_bias", "shared_gated", "norm_topk_prob"):
            check_bool(name, getattr(self, name))
        check_number("routed_scaling_factor", self.routed_scaling_factor, positive=True)
        for name in ("aux_loss_coef", "z_loss_coef", "bias_update_rate"):
            check_number(name, getattr(self, name))
        if self.initializer_range is not None:
            check_number("initializer_range", self.initializer_range)
        check_integer("seed", self.seed, -2**256, 2**256)
        check_integer("layer_index", self.layer_index, 0, 2**256)
        check_type("overlap", self.overlap, (Overlap, type(None)), "a mok.Overlap or None")
        check_recompute(self.recompute)


def check_recompute(recompute: str | None) -> None:
    """Raise ValueError unless `recompute` is None or "z"."""
    if recompute is not None and (not isinstance(recompute, str) or recompute != "z"):
        raise ValueError(f"recompute={kind_of(recompute)} must be None or 'z'")


def check_activation(activation: str, swiglu_limit: float | None) -> None:
    """Raise ValueError unless `activation` is known and `swiglu_limit` (None or a positive number, infinity too) applies to it."""
    check_choice("activation", activation, ACTIVATIONS)
    if swiglu_limit is None:
        return
    check_number("swiglu_limit", swiglu_limit, positive=True, finite=False)
    if LARGEST_FP32 < swiglu_limit < math.inf:
        raise ValueError(f"swiglu_limit={kind_of(swiglu_limit)} must be at most {LARGEST_FP32}, the largest fp32 number, or infinity")
    if activation not in ("swiglu", "swiglu_oai"):
        raise ValueError(f"swiglu_limit={kind_of(swiglu_limit)} must be None with activation {activation!r}: it clamps 'swiglu' and 'swiglu_oai'")
