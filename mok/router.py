"""The router: scores -> top-k routes, load balancing with and without an auxiliary loss, and what checkpointing must keep."""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .config import MoEConfig
from .router_ops import balance_loss, count_load, route_weights, router_probs, router_scores, select_experts, z_loss


class Routes(NamedTuple):
    """What the router decided. topk_ids (T, K) int64, -1 = no expert; topk_weights (T, K); logits and probs (T, E). Floats in fp32 (fp64 for fp64 x)."""

    topk_ids: Tensor
    topk_weights: Tensor
    logits: Tensor
    probs: Tensor


class Router(nn.Module):
    """Routes of T tokens to E experts; docs/router.md has the formulas and their sources.

    weight (E, H) has the layer's dtype; products and sums are fp32 in an order fixed by (H, E) (fp64 for fp64 x), and autocast does not touch
    them: the router reads x as it was handed in. A token's route depends on its own x alone, to the bit (P1, P2, P4).

    balance="bias": `selection_bias` (E,) fp32, a buffer in the state dict, is added to the probabilities for the choice alone; weights never
    contain it. `load` (E,) int64 counts this rank's routes in training mode since the last `update_bias`.
    """

    load: Tensor
    selection_bias: Tensor | None

    def __init__(self, config: MoEConfig, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        E = config.num_experts
        self.config = config
        self.weight = nn.Parameter(torch.empty(E, config.hidden_size, device=device, dtype=dtype))
        with_bias = config.balance == "bias"
        self.register_buffer("selection_bias", torch.zeros(E, device=device, dtype=torch.float32) if with_bias else None)
        self.register_buffer("load", torch.zeros(E if with_bias else 0, device=device, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None, topk_ids: Tensor | None = None) -> Routes:
        """x (T, H); padding_mask (T,) bool, True = padding: ids -1, weights 0; topk_ids (T, K): replay this choice, weights computed anew."""
        config = self.config
        if padding_mask is not None:
            x = x.masked_fill(padding_mask.unsqueeze(-1), 0.0)      # NaN in a padding row would reach weight's gradient as 0 * NaN
        logits = router_scores(x, self.weight)
        probs = router_probs(logits, config.score_function)
        if topk_ids is None:
            topk_ids = select_experts(probs.detach(), self.selection_bias, padding_mask, config.top_k, config.num_expert_groups, config.topk_groups)
        weights = route_weights(probs, topk_ids, config.norm_topk_prob, config.routed_scaling_factor)
        return Routes(topk_ids, weights, logits, probs)

    def loss(self, routes: Routes, routes_per_expert: Tensor, padding_mask: Tensor | None = None, share: float = 1.0) -> Tensor:
        """0-d: aux_loss_coef * balance loss (balance="aux_loss") + z_loss_coef * z-loss; 0 without a graph where neither is on.

        routes_per_expert (E,) int: the routes of the T tokens, as the plan counted them. share: the T tokens are this part of all tokens of
        several ranks, and routes_per_expert counts all of them: the ranks' losses then add up to the loss of one rank with all tokens.
        """
        config = self.config
        total = routes.logits.new_zeros(())
        if config.balance == "aux_loss" and config.aux_loss_coef != 0:
            sigmoid = config.score_function == "sigmoid"
            # f_i is divided by the T tokens here where all tokens' number is right, and so is P_i: the share twice
            total = total + config.aux_loss_coef * share**2 * balance_loss(routes.probs, routes_per_expert, padding_mask, config.top_k, sigmoid)
        if config.z_loss_coef != 0:
            total = total + config.z_loss_coef * share * z_loss(routes.logits, padding_mask)
        return total

    def count(self, routes_per_expert: Tensor) -> None:
        """Add (E,) counts to `load` where the bias needs them: in training mode, and not again when a checkpointed forward is recomputed."""
        if self.training and self.selection_bias is not None:
            count_load(self.load, routes_per_expert)

    @torch.no_grad()
    def update_bias(self, process_group: dist.ProcessGroup | None = None) -> None:
        """selection_bias += bias_update_rate * sign(mean load - load), then load = 0. Call once after each optimizer step.

        process_group: sums the load over its ranks first (all ranks that hold different tokens of the step); None = this rank's tokens alone.
        All micro-batches since the last call count together. Without a bias, and with no load, nothing changes. No device-to-host copy.
        """
        if self.selection_bias is None:
            return
        if process_group is not None:
            dist.all_reduce(self.load, group=process_group)
        # sign(mean - load) in integers: E * (mean - load) is exact
        self.selection_bias += self.config.bias_update_rate * torch.sign(self.load.sum() - self.load * self.config.num_experts)
        self.load.zero_()

    @torch.no_grad()
    def reset_buffers(self) -> None:
        """Zero bias and load (after `to_empty`)."""
        self.load.zero_()
        if self.selection_bias is not None:
            self.selection_bias.zero_()

    def _apply(self, fn: Any, recurse: bool = True) -> Router:
        """`layer.to(torch.bfloat16)` must not round the bias: steps of bias_update_rate would vanish beside it."""
        before = self.selection_bias
        super()._apply(fn, recurse)
        after = self.selection_bias
        if before is not None and after is not None and after.dtype != torch.float32:
            self.selection_bias = before.to(after.device)
        return self

    def extra_repr(self) -> str:
        c = self.config
        groups = f", groups={c.topk_groups} of {c.num_expert_groups}" if c.num_expert_groups > 1 else ""
        return f"E={c.num_experts}, top_k={c.top_k}, {c.score_function}, norm_topk_prob={c.norm_topk_prob}, balance={c.balance}{groups}"


def checkpoint_policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> torch.utils.checkpoint.CheckpointPolicy:
    """Selective checkpointing that keeps the routes (ids, weights and plan) and recomputes everything else.

    For `functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, mok.checkpoint_policy)` as `context_fn` of
    `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`. With it a recomputed forward takes the routes of the first one even if
    an operation before the layer does not repeat its bits.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    keep = (torch.ops.mok.select_experts.default, torch.ops.mok.route_weights.default, torch.ops.mok.plan.default)
    return CheckpointPolicy.MUST_SAVE if op in keep else CheckpointPolicy.PREFER_RECOMPUTE
