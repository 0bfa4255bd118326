"""`mok.MoE` with its experts computed by unfused PyTorch: what `mok train --moe-impl grouped_mm` compares with."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..function import compute_dtype
from ..layer import MoE
from ..unfused import unfused_moe_with_counts


class GroupedMoE(MoE):
    """The same parameters, initial values, router and losses as `mok.MoE`; plain SwiGLU experts, one rank, no padding mask, no replayed routes."""

    def forward(self, x: Tensor, padding_mask: Tensor | None = None, routes: Any = None) -> Tensor:
        """x (..., H) -> (..., H) in x's dtype; sets aux_loss, tokens_per_expert and routes as `mok.MoE` does. NotImplementedError for what it lacks."""
        config, dtype = self.config, compute_dtype(x)
        if padding_mask is not None or routes is not None or self.group is not None:
            raise NotImplementedError("the grouped_mm layer takes no padding_mask, routes or group")
        if config.expert_bias or config.activation != "swiglu" or config.swiglu_limit is not None or len(self.shared_experts):
            raise NotImplementedError("the grouped_mm layer computes plain SwiGLU experts without biases or shared experts")
        tokens = x.reshape(-1, config.hidden_size)
        routed = self.router(tokens)
        arguments = tokens.to(dtype), routed.topk_ids, routed.topk_weights, self.w_gate_up.to(dtype), self.w_down.to(dtype)
        with torch.autocast(x.device.type, enabled=False):       # dtypes are settled; autocast would make a sum's result fp32
            y, counts = unfused_moe_with_counts(*arguments)
        self.router.count(counts)
        self.aux_loss = self.router.loss(routed, counts)
        self.tokens_per_expert, self.routes = counts, (routed.topk_ids, routed.topk_weights.detach())
        return y.view(x.shape).to(x.dtype)
