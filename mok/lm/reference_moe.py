"""`mok.MoE` with its experts computed by the spec instead of an engine: what `mok train --moe-impl reference` compares with."""
from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from ..function import compute_dtype
from ..layer import MoE, SharedParameters
from ..plan import count_ids
from ..reference import moe_reference


class ReferenceMoE(MoE):
    """The same parameters, initial values, router and losses as `mok.MoE`; one rank, no padding mask, no replayed routes."""

    def forward(self, x: Tensor, padding_mask: Tensor | None = None, routes: Any = None) -> Tensor:
        """x (..., H) -> (..., H) in x's dtype; sets aux_loss, tokens_per_expert and routes as `mok.MoE` does."""
        if padding_mask is not None or routes is not None or self.group is not None:
            raise NotImplementedError("the reference layer takes no padding_mask, routes or group")
        config, dtype = self.config, compute_dtype(x)
        tokens = x.reshape(-1, config.hidden_size)
        routed = self.router(tokens)
        b_gate_up, b_down = (None if b is None else b.to(dtype) for b in (self.b_gate_up, self.b_down))
        weights = [cast(SharedParameters, expert).weights() for expert in self.shared_experts]
        shared = [(s.w_gate_up.to(dtype), s.w_down.to(dtype), None if s.gate_weight is None else s.gate_weight.to(dtype)) for s in weights]
        y = moe_reference(tokens.to(dtype), routed.topk_ids, routed.topk_weights, self.w_gate_up.to(dtype), self.w_down.to(dtype), b_gate_up, b_down,
                          shared, config.activation, config.swiglu_limit)
        counts = count_ids(routed.topk_ids.reshape(-1), config.num_experts)
        self.router.count(counts)
        self.aux_loss = self.router.loss(routed, counts)
        self.tokens_per_expert, self.routes = counts.to(y.device), (routed.topk_ids, routed.topk_weights.detach())
        return y.view(x.shape).to(x.dtype)
