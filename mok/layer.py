"""MoE(nn.Module): parameters, router and `mok.moe` together; what a model puts where its feed-forward was."""
from __future__ import annotations

import hashlib
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .arguments import FLOATS, check_device, check_tensor, check_type, kind_of
from .checks import check_group
from .config import MoEConfig
from .engines.protocol import SharedExpert
from .function import moe_with_counts
from .group import ExpertGroup
from .plan import count_ids
from .router import Router, Routes
from .runtime import runtime


class SharedParameters(nn.Module):
    """Weights of one shared expert of width I_s: w_gate_up (2I_s, H), w_down (H, I_s), gate_weight (H,) or None. Not called: `MoE` reads it."""

    def __init__(self, hidden_size: int, width: int, gated: bool, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.w_gate_up = nn.Parameter(torch.empty(2 * width, hidden_size, device=device, dtype=dtype))
        self.w_down = nn.Parameter(torch.empty(hidden_size, width, device=device, dtype=dtype))
        self.gate_weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if gated else None

    def weights(self) -> SharedExpert:
        return SharedExpert(self.w_gate_up, self.w_down, self.gate_weight)


class MoE(nn.Module):
    """A mixture-of-experts feed-forward layer: x (..., H) -> (..., H).

    config: sizes and routing rule. group: None = all experts on this rank; a `mok.ExpertGroup`: this rank holds its contiguous block of them.
    device, dtype: of all parameters, as for any nn.Module.

    Parameters: router.weight (E, H); w_gate_up (E_local, 2I, H), gate rows first; w_down (E_local, H, I); with config.expert_bias b_gate_up
    (E_local, 2I), b_down (E_local, H); shared_experts.{i}.w_gate_up, .w_down, .gate_weight. Initial values depend on (config.seed,
    config.layer_index, global expert id) alone: not on the number of ranks, the device, the dtype (but for rounding) or torch's global seed.

    After a forward: `aux_loss`, 0-d, attached to the graph (add it to the loss; an activation checkpoint around the layer must be
    use_reentrant=False for its gradient); `tokens_per_expert` (E_local,) int32, routes that each local expert received; `routes`,
    (topk_ids, topk_weights) (T, K) without a graph, to be replayed or recorded. All three are dropped by deepcopy and pickle.
    """

    def __init__(self, config: MoEConfig, group: ExpertGroup | None = None, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        check_type("config", config, MoEConfig, "a mok.MoEConfig")
        check_group(group)
        device = check_device("device", device)
        if dtype is not None and dtype not in FLOATS:
            raise ValueError(f"dtype={kind_of(dtype) if not isinstance(dtype, torch.dtype) else dtype} must be None or one of {', '.join(map(str, FLOATS))}")
        H, I = config.hidden_size, config.intermediate_size
        self.config = config
        self.group = group
        self.first_expert, self.num_local_experts = (0, config.num_experts) if group is None else group.local_experts(config.num_experts)
        self.layer_key = runtime.next_layer_key(None if group is None else group.key)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        self.router = Router(config, device, dtype)
        self.w_gate_up = parameter(self.num_local_experts, 2 * I, H)
        self.w_down = parameter(self.num_local_experts, H, I)
        self.b_gate_up = parameter(self.num_local_experts, 2 * I) if config.expert_bias else None
        self.b_down = parameter(self.num_local_experts, H) if config.expert_bias else None
        self.shared_experts = nn.ModuleList(SharedParameters(H, width, config.shared_gated, device, dtype) for width in config.shared_intermediate_sizes)
        self._forget_forward()
        self.reset_parameters()

    def _shared(self) -> list[SharedParameters]:
        return cast(list[SharedParameters], list(self.shared_experts))

    def _forget_forward(self) -> None:
        self.aux_loss: Tensor | None = None
        self.tokens_per_expert: Tensor | None = None
        self.routes: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initial values: weights normal with std initializer_range (None: 1/sqrt(fan_in)), biases, gates and the router's buffers 0.

        Does nothing on the meta device; call it after `to_empty`.
        """
        if self.w_gate_up.is_meta:
            return
        for local in range(self.num_local_experts):
            expert = f"expert {self.first_expert + local}"
            self._draw(self.w_gate_up[local], expert, "w_gate_up")
            self._draw(self.w_down[local], expert, "w_down")
        for i, shared in enumerate(self._shared()):
            self._draw(shared.w_gate_up, f"shared {i}", "w_gate_up")
            self._draw(shared.w_down, f"shared {i}", "w_down")
            if shared.gate_weight is not None:
                shared.gate_weight.zero_()
        for bias in (self.b_gate_up, self.b_down):
            if bias is not None:
                bias.zero_()
        self._draw(self.router.weight, "router", "weight")
        self.router.reset_buffers()

    def _draw(self, weight: Tensor, owner: str, name: str) -> None:
        """Fills weight (..., fan_in). Drawn on the CPU in fp32, so that every device and dtype gets the same values up to its rounding."""
        c = self.config
        digest = hashlib.sha256(f"{c.seed}/{c.layer_index}/{owner}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        std = weight.shape[-1] ** -0.5 if c.initializer_range is None else c.initializer_range
        with torch.device("cpu"):                                # a surrounding `with torch.device(...)` must not move the draw
            values = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
        weight.copy_(values * std)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None, routes: tuple[Tensor, Tensor | None] | None = None) -> Tensor:
        """x (..., H), any floating dtype and strides -> (..., H) in x's dtype.

        padding_mask (...) bool, True = padding: the token gets no routed expert (shared experts still run) and counts in no loss or load.
        routes = (topk_ids, topk_weights), each (..., K) or (T, K): replay them; the router does not run, aux_loss is 0. With topk_weights None
        the ids are replayed and the weights come from the router, with its gradient and losses. An id of -1 is no expert.

        Raises ValueError naming x, padding_mask or routes where type, shape, dtype or device is wrong, and what `mok.moe` raises.
        """
        config = self.config
        try:
            self._check(x, padding_mask, routes)
        except ValueError as error:
            if self.group is not None:                           # the other ranks would wait for this one
                self.group.report(str(error), {"pass": "forward", "layer_key": self.layer_key})
            raise
        # A checkpoint that recomputes this forward inside backward changes nothing here: the first one's results stand
        first = torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1
        if first and not torch.compiler.is_compiling():
            self.aux_loss = None                # the last pass's graph would tie the parameters to its stream, which a CUDA-graph capture must not touch
        H, K = config.hidden_size, config.top_k
        tokens = x.reshape(-1, H)
        mask = None if padding_mask is None else padding_mask.reshape(-1)
        given_ids, given_weights = (None, None) if routes is None else routes
        if given_ids is not None:
            given_ids = given_ids.reshape(-1, K)
            if mask is not None:
                given_ids = given_ids.masked_fill(mask.unsqueeze(-1), -1)

        routed: Routes | None = None
        if given_ids is not None and given_weights is not None:
            topk_ids, topk_weights = given_ids, given_weights.reshape(-1, K)
        else:
            routed = self.router(tokens, mask, given_ids)
            topk_ids, topk_weights = routed.topk_ids, routed.topk_weights
        y, tokens_per_expert = moe_with_counts(
            tokens, topk_ids, topk_weights, self.w_gate_up, self.w_down, b_gate_up=self.b_gate_up, b_down=self.b_down,
            shared=[expert.weights() for expert in self._shared()], activation=config.activation, swiglu_limit=config.swiglu_limit,
            precision=config.precision, group=self.group, overlap=config.overlap, layer_key=self.layer_key,
            recompute=config.recompute, num_experts=config.num_experts)

        # losses and loads are of this rank's tokens; with a group the plan counts all ranks' routes to the local experts instead
        own_routes = tokens_per_expert if self.group is None else count_ids(topk_ids.reshape(-1), config.num_experts)
        self.router.count(own_routes)
        aux_loss = topk_weights.new_zeros(()) if routed is None else self.router.loss(routed, own_routes, mask)
        if first:
            self.aux_loss, self.tokens_per_expert, self.routes = aux_loss, tokens_per_expert, (topk_ids, topk_weights.detach())
        return y.view(x.shape)

    def update_bias(self, process_group: dist.ProcessGroup | None = None) -> None:
        """After each optimizer step, with balance="bias": move the selection bias against the load (`Router.update_bias`).

        process_group: all ranks that hold different tokens of the step; None = the ranks of the layer's group. Collective over them.
        """
        check_type("process_group", process_group, (dist.ProcessGroup, type(None)), "a torch.distributed.ProcessGroup or None")
        if process_group is None and self.group is not None:
            process_group = self.group.process_group or dist.group.WORLD
        self.router.update_bias(process_group)

    def attach_group(self, group: ExpertGroup) -> None:
        """Give a layer that was unpickled in another process the group there. ValueError unless `group` gives this rank the layer's experts."""
        check_type("group", group, ExpertGroup, "a mok.ExpertGroup")
        first, count = group.local_experts(self.config.num_experts)
        if (first, count) != (self.first_expert, self.num_local_experts):
            raise ValueError(f"group owns experts {first}..{first + count - 1} on this rank and must own the layer's, {self._owned()}")
        self.group = group
        self.layer_key = runtime.next_layer_key(group.key)

    def _owned(self) -> str:
        return f"{self.first_expert}..{self.first_expert + self.num_local_experts - 1}"

    def _check(self, x: Tensor, padding_mask: Tensor | None, routes: tuple[Tensor, Tensor | None] | None) -> None:
        H, K = self.config.hidden_size, self.config.top_k
        if self.group is None and self.num_local_experts != self.config.num_experts:
            raise ValueError(f"group=None must be an ExpertGroup: the layer holds experts {self._owned()} of {self.config.num_experts}; call attach_group")
        check_tensor("x", x)
        if x.dtype not in FLOATS:
            raise ValueError(f"x={x.dtype} must be a floating-point tensor: {', '.join(map(str, FLOATS))}")
        if x.dim() < 1 or x.shape[-1] != H:
            raise ValueError(f"x.shape={tuple(x.shape)} must end in hidden_size={H}")
        if x.device != self.w_gate_up.device:
            raise ValueError(f"x.device={x.device} must be the layer's device, {self.w_gate_up.device}")
        leading = tuple(x.shape[:-1])
        if padding_mask is not None:
            check_tensor("padding_mask", padding_mask)
            if padding_mask.dtype != torch.bool or tuple(padding_mask.shape) != leading:
                raise ValueError(f"padding_mask is {padding_mask.dtype} {tuple(padding_mask.shape)} and must be torch.bool {leading}, True = padding")
            if padding_mask.device != x.device:
                raise ValueError(f"padding_mask.device={padding_mask.device} must be x.device={x.device}")
        if routes is None:
            return
        if not isinstance(routes, (tuple, list)) or len(routes) != 2 or not isinstance(routes[0], Tensor):
            raise ValueError(f"routes={kind_of(routes)} must be (topk_ids, topk_weights or None)")
        if routes[1] is not None:
            check_tensor("routes[1]", routes[1])
        flat = (x.numel() // H, K)
        for name, tensor in (("routes[0]", routes[0]), ("routes[1]", routes[1])):
            if tensor is not None and tuple(tensor.shape) not in ((*leading, K), flat):
                raise ValueError(f"{name}.shape={tuple(tensor.shape)} must be {(*leading, K)} or {flat}")
            if tensor is not None and tensor.device != x.device:
                raise ValueError(f"{name}.device={tensor.device} must be x.device={x.device}")
        if routes[0].dtype not in (torch.int32, torch.int64):
            raise ValueError(f"routes[0].dtype={routes[0].dtype} must be torch.int32 or torch.int64")
        if routes[1] is not None and not routes[1].is_floating_point():
            raise ValueError(f"routes[1].dtype={routes[1].dtype} must be a floating dtype")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"aux_loss": None, "tokens_per_expert": None, "routes": None}     # they hold a graph

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.layer_key = runtime.next_layer_key(None if self.group is None else self.group.key)

    def extra_repr(self) -> str:
        c = self.config
        shared = f", shared={list(c.shared_intermediate_sizes)}" if c.shared_intermediate_sizes else ""
        experts = f"{c.num_experts}" if self.num_local_experts == c.num_experts else f"{self._owned()} of {c.num_experts}"
        return f"H={c.hidden_size}, I={c.intermediate_size}, experts={experts}, {c.activation}, {c.precision}{shared}, layer_key={self.layer_key}"
