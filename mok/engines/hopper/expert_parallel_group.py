"""Whether and how an ExpertGroup's passes run inside the launches: built once for the group, asked for every pass. Imports no Triton by itself.

The answers follow from what all ranks have agreed on, so they are the same on all of them: a pass never runs inside the launch on one rank and over
the process group on another.
"""
from __future__ import annotations

import os
from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...fabric.choice import MPS_SHARE
from ...plan import RoutingPlan
from ...runtime import runtime
from ..protocol import Grads, MainGrad, MoETensors, PassOptions, Saved, Wants
from .limits import unsupported_reason, unsupported_shared_reason

if TYPE_CHECKING:
    from .expert_parallel import FusedGroup


def make_fused_group(fabric: Any, sizes: dict[str, Any], device: torch.device | str | None, timeout_s: float) -> FusedGroup | None:
    """The FusedGroup of a process-group fabric's ranks, or None where a rank cannot run one, which is said once; the same on all ranks.

    sizes: num_experts, max_tokens, hidden_size, top_k, all four or none, and capacity_factor where the group has one. Collective.
    Raises ValueError on all ranks where sizes differ between ranks, or are there on some ranks alone.
    """
    given = "num_experts" in sizes
    reason = _cannot_fuse(device, sizes, fabric.world_size) if given else "no sizes"
    own: dict[str, Any] = {"reason": reason, "sizes": sizes, "device": None, "share": MPS_SHARE in os.environ}
    if reason is None:
        own["device"] = f"{os.uname().nodename} {torch.cuda.get_device_properties(_cuda_device(device)).uuid}"
    facts = fabric.exchange_messages(own, "construction")
    if any(fact["sizes"] != sizes for fact in facts):
        said = "; ".join(f"rank {rank}: {fact['sizes']}" for rank, fact in enumerate(facts))
        raise ValueError(f"num_experts, max_tokens, hidden_size, top_k and capacity_factor must be the same on all ranks of the ExpertGroup; {said}")
    if not given:
        return None
    if sizes["num_experts"] < fabric.world_size:
        raise ValueError(f"num_experts={sizes['num_experts']} must be at least the group's {fabric.world_size} ranks")
    if reasons := [f"rank {rank}: {fact['reason']}" for rank, fact in enumerate(facts) if fact["reason"] is not None]:
        runtime.say_once(f"mok: expert parallelism runs over the process group, not inside the kernels: {'; '.join(reasons)}")
        return None
    ranks_on = Counter(fact["device"] for fact in facts)
    if shared := [rank for rank, fact in enumerate(facts) if fact["share"] and ranks_on[fact["device"]] > 1]:
        runtime.say_once(f"mok: expert parallelism runs over the process group, not inside the kernels: {MPS_SHARE} is set on ranks {shared}, which share a "
                         "device: such shares overlap, so their launches may never be resident at once")
        return None
    return _build(fabric, sizes, _cuda_device(device), timeout_s, ranks_on[own["device"]])


def _build(fabric: Any, sizes: dict[str, Any], device: torch.device, timeout_s: float, sharing: int) -> FusedGroup | None:
    """The buffers and kernels of this rank; sharing: ranks on its device."""
    from ...fabric.peer_memory import PeerMemory, PeersUnreachable
    from .expert_parallel import FusedGroup, buffer_sizes, resident_share

    try:
        memory = PeerMemory(fabric.data_group, fabric.rank, fabric.world_size, device, timeout_s=timeout_s,
                            sizes=buffer_sizes(sizes["max_tokens"], sizes["hidden_size"], sizes["top_k"]))
    except PeersUnreachable as error:
        runtime.say_once(f"mok: expert parallelism runs over the process group, not inside the kernels: {error}")
        return None
    blocks = resident_share(device, sharing)
    fused = FusedGroup(memory, fabric.rank, fabric.world_size, **sizes, timeout_s=timeout_s, blocks=blocks, cooperative=sharing == 1)
    fabric.exchange_messages({}, "construction: kernels loaded")      # rule 7: nobody launches before everybody has loaded
    return fused


def _cuda_device(device: torch.device | str | None) -> torch.device:
    """`device` with its index."""
    named = torch.device("cuda" if device is None else device)
    return named if named.index is not None else torch.device("cuda", torch.cuda.current_device())


def _cannot_fuse(device: torch.device | str | None, sizes: dict[str, Any], world_size: int) -> str | None:
    """Why this rank's passes cannot communicate inside their launches, or None."""
    from ...fabric.flag_page import MAX_RANKS

    if (device is not None and torch.device(device).type != "cuda") or not torch.cuda.is_available():
        return "no CUDA device"
    if world_size > MAX_RANKS:
        return f"{world_size} ranks are more than {MAX_RANKS}"
    reason = unsupported_reason(_cuda_device(device), torch.bfloat16, sizes["hidden_size"])
    if reason is not None:
        return reason
    from . import plan_kernel

    return plan_kernel.unsupported_reason(world_size * sizes["max_tokens"] * sizes["top_k"], sizes["num_experts"])


def fused_of(group: Any, device: torch.device, dtype: str, H: int, I: int, K: int) -> FusedGroup | None:
    """The group's FusedGroup if passes of these sizes run in it, else None; dtype as str(torch.dtype)."""
    fused = group.fused
    if fused is None or device != fused.device:
        return None
    reason = fused.unsupported_reason(H, I, K) if dtype == "torch.bfloat16" else f"dtype={dtype} is not torch.bfloat16"
    if reason is not None:
        runtime.say_once(f"mok: a pass runs over the process group, not inside the kernels: {reason}")
        return None
    return fused


def fused_plan(group: Any, topk_ids: Tensor, num_local_experts: int, signature: dict[str, str]) -> RoutingPlan | None:
    """This rank's plan, built without the host, where the pass that `signature` describes runs inside the launches; else None."""
    if group.fused is None:
        return None
    sizes, gradients, words = _pass_of(tuple(signature.items()))
    fused = fused_of(group, topk_ids.device, *sizes)
    if fused is None:
        return None
    if gradients is not None:
        fused.load_backward(gradients)
    return fused.build_plan(topk_ids, num_local_experts, words)


@lru_cache(maxsize=4096)
def _pass_of(signature: tuple[tuple[str, str], ...]) -> tuple[tuple[str, int, int, int], PassOptions | None, str]:
    """((dtype, H, I, K), options of the backward that may follow, `in_words`) of a signature's items."""
    fields = dict(signature)
    options = None
    if str([]) != fields.get("wanted gradients", str([])):
        limit, recompute = fields["swiglu_limit"], fields["recompute"]
        options = PassOptions(fields["activation"], None if limit == str(None) else float(limit), recompute=None if recompute == str(None) else recompute)
    return (fields["dtype"], int(fields["H"]), int(fields["I"]), int(fields["K"])), options, in_words(fields)


def in_words(signature: dict[str, Any]) -> str:
    """What ranks compare in a pass, as errors name it."""
    return ", ".join(f"{name}={value}" for name, value in signature.items())


def runs_in_launch(group: Any, tensors: MoETensors) -> bool:
    """Whether the group's passes on these tensors run inside the launches: forward and backward alike, for the sizes alone decide."""
    if group.fused is None:
        return False
    x = tensors.x
    if fused_of(group, x.device, str(x.dtype), x.shape[1], tensors.w_down.shape[2], tensors.topk_weights.shape[1]) is None:
        return False
    reason = unsupported_shared_reason(tuple(expert.w_down.shape[1] for expert in tensors.shared))
    if reason is not None:
        runtime.say_once(f"mok: a pass runs over the process group, not inside the kernels: {reason}")
    return reason is None


class GroupPasses:
    """The passes of an ExpertGroup that has a FusedGroup: inside the launches, but for those that do not fit, which go over the process group."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def forward(self, plan: RoutingPlan, tensors: MoETensors, options: PassOptions) -> tuple[Tensor, Saved]:
        if runs_in_launch(self._group, tensors):
            return self._group.fused.forward(plan, tensors, options)
        return self._over_process_group().forward(plan, tensors, options)

    def backward(self, plan: RoutingPlan, tensors: MoETensors, options: PassOptions, saved: Saved, dy: Tensor, wants: Wants,
                 main_grad: MainGrad | None) -> Grads:
        if runs_in_launch(self._group, tensors):
            return self._group.fused.backward(plan, tensors, options, saved, dy, wants, main_grad)
        return self._over_process_group().backward(plan, tensors, options, saved, dy, wants, main_grad)

    def _over_process_group(self) -> Any:
        from ..torch_gpu import TorchGpuEngine

        return TorchGpuEngine(self._group)
