"""Expert parallelism over a process group: the handshake, the plan and the journeys of rows to their experts and of results home.

The layer's semantics on several ranks, step by step on the host: what the fabrics inside a kernel must reproduce bit for bit. Rows keep the
canonical order (expert, source rank, token, k), a row's bits do not depend on where it lies, and each token's results are summed at home in
the order of its routes; so any number of ranks gives the same bits (P3). Legend: T tokens, K routes a token, widths H and I, R rows of the plan, W ranks.
"""
from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..config import BLOCK_M
from ..plan import RoutingPlan, count_ids
from ..waves import wave_tiles
from .hopper.expert_parallel_group import fused_plan, in_words, runs_in_launch
from .protocol import MoETensors, PassOptions, Wants

_COUNTS_IN_HANDSHAKE = 2048     # counts of ids below this fit the handshake's message; beyond, they travel in one of their own


def build_group_plan(group: Any, topk_ids: Tensor, num_local_experts: int, signature: dict) -> RoutingPlan:
    """This rank's plan, after the handshake that gives every rank's tokens and counts. Raises on all ranks what is wrong on any.

    signature: what must agree on all ranks. E is the sum of num_local_experts over ranks. One host synchronisation on a GPU.
    """
    plan = fused_plan(group, topk_ids, num_local_experts, signature)      # no host in the loop: what differs is raised by the next call
    if plan is not None:
        return plan
    T, ids = topk_ids.shape[0], topk_ids.reshape(-1).long()
    lowest, highest = (int(v) for v in torch.aminmax(ids)) if ids.numel() else (-1, -1)
    error = f"topk_ids holds {lowest} and must hold -1 or expert ids from 0" if lowest < -1 else None
    if group.capacity_factor is not None and topk_ids.device.type != "cpu":
        error = f"capacity_factor={group.capacity_factor} must be None on {topk_ids.device}: over the process group waves run on CPUs only"
    counts = count_ids(ids, highest + 1).tolist() if highest < _COUNTS_IN_HANDSHAKE else None
    agreed = {"pass": "forward", "capacity_factor": group.capacity_factor, **signature}
    facts = group.handshake(agreed, error=error, tokens=T, experts=num_local_experts, highest=highest, counts=counts)
    E = group.total_experts([fact["experts"] for fact in facts])
    for rank, fact in enumerate(facts):
        if fact["highest"] >= E:
            raise ValueError(f"topk_ids holds {fact['highest']} on rank {rank} of the ExpertGroup and must hold -1 or expert ids 0..{E - 1}")
    if all(fact["counts"] is not None for fact in facts):
        all_counts = torch.tensor([fact["counts"] + [0] * (E - len(fact["counts"])) for fact in facts], device=topk_ids.device)
    else:
        everywhere = count_ids(ids, E).repeat(group.size, 1)
        (all_counts,) = group.fabric.exchange_rows([everywhere], [1] * group.size, [1] * group.size, "counts")
    total_tokens = sum(fact["tokens"] for fact in facts)
    plan = RoutingPlan.build(topk_ids, E, rank=group.rank, counts=all_counts, total_tokens=total_tokens)
    if group.capacity_factor is not None:
        plan = replace(plan, wave_tiles=wave_tiles(all_counts, group.capacity_factor, total_tokens * topk_ids.shape[1]))
    travel = Travel(plan, group)
    (slots,) = travel.to_experts("route", travel.sent_slots.to(torch.int32))
    plan.row_to_slot[travel.received_rows] = slots
    group.remember_forward(plan.expert_offsets)
    return plan


class Travel:
    """One plan's exchange of rows between this rank and the others of `group`: of all rows, or of one wave's.

    sent_slots (n,) int64: this rank's valid slots by (destination rank, row there). received_rows (m,) int64: rows that some rank fills, by
    (source rank, row), counted from the wave's first one. Sender and receiver list the same rows in the same order, so nothing but the rows
    themselves has to travel.
    """

    def __init__(self, plan: RoutingPlan, group: Any, wave: int | None = None) -> None:
        assert plan.slot_to_rank is not None
        self.plan, self.group, self.W = plan, group, group.size
        slot_to_rank, row_to_rank = plan.slot_to_rank, plan.row_to_rank
        if wave is not None:
            assert plan.wave_tiles is not None
            capacity = plan.wave_tiles[:, 1] * BLOCK_M
            own = int(capacity[group.rank])
            slot_to_rank = torch.where(plan.slot_to_row // capacity[slot_to_rank.clamp(min=0)] == wave, slot_to_rank, -1)
            row_to_rank = row_to_rank[wave * own:(wave + 1) * own]
        self.num_rows = row_to_rank.shape[0]
        self.sent_slots, self.send_counts = _by_rank(slot_to_rank, plan.slot_to_row, self.W)
        self.received_rows, self.receive_counts = _by_rank(row_to_rank, torch.arange(self.num_rows, device=row_to_rank.device), self.W)

    def to_experts(self, what: str, *by_sent_slot: Tensor) -> list[Tensor]:
        """Values of this rank's sent slots (n, ...) -> values of the received rows (m, ...)."""
        return self.group.fabric.exchange_rows(by_sent_slot, self.send_counts, self.receive_counts, what)

    def home(self, what: str, *by_row: Tensor | None) -> list[Tensor | None]:
        """Values of all rows (num_rows or more, ...) -> values of this rank's sent slots (n, ...); None stays None."""
        chosen = [values.index_select(0, self.received_rows) for values in by_row if values is not None]
        back = iter(self.group.fabric.exchange_rows(chosen, self.receive_counts, self.send_counts, what) if chosen else ())
        return [None if values is None else next(back) for values in by_row]

    def rows_of(self, received: Tensor) -> Tensor:
        """Received rows (m, ...) laid into a buffer of all rows (R, ...), zeros elsewhere."""
        rows = received.new_zeros((self.num_rows, *received.shape[1:]))
        return rows.index_copy_(0, self.received_rows, received)

    def home_plan(self) -> RoutingPlan:
        """The plan with slot_to_row pointing into what `home` returns."""
        position = torch.full_like(self.plan.slot_to_row, -1)
        position[self.sent_slots] = torch.arange(self.sent_slots.shape[0], dtype=torch.int32, device=position.device)
        return replace(self.plan, slot_to_row=position)


def _by_rank(rank: Tensor, row: Tensor, world_size: int) -> tuple[Tensor, list[int]]:
    """(indices with rank >= 0 sorted by (rank, row), how many for each rank)."""
    valid = torch.nonzero(rank >= 0).squeeze(1)
    order = torch.argsort(rank[valid].long() * 2**31 + row[valid])
    return valid[order], torch.bincount(rank[valid], minlength=world_size).tolist()


def agree_on_backward(group: Any, signature: dict, wants: Wants, tensors: MoETensors, options: PassOptions, plan: RoutingPlan) -> PassOptions:
    """Backward's handshake: all ranks run it for the same forward pass of the same layer and want the same gradients, or all raise.

    Where the pass runs inside the launches these compare it themselves: then it is `agreed` of the options that are returned.
    """
    if runs_in_launch(group, tensors):
        return _with_agreed(options, tuple(signature.items()), wants)
    signature = _backward_signature(signature, wants)
    facts = group.handshake(signature, forward=group.forward_of(plan.expert_offsets))
    forwards = [fact["forward"] for fact in facts]
    if None not in forwards and len(set(forwards)) > 1:
        by_rank = ", ".join(f"rank {rank}: call {forward}" for rank, forward in enumerate(forwards))
        raise ValueError(f"backward must follow the same forward pass on all ranks of the ExpertGroup; it follows, on {by_rank}")
    return options


def _backward_signature(signature: dict, wants: Wants) -> dict:
    return {"pass": "backward", **signature, "wanted gradients": _names(wants)}


@lru_cache(maxsize=4096)
def _with_agreed(options: PassOptions, signature: tuple, wants: Wants) -> PassOptions:
    """The options of a backward inside the launches, with what ranks compare of it. signature: items of the forward's."""
    return replace(options, agreed=in_words(_backward_signature(dict(signature), wants)))


def _names(wants: Wants) -> list[str]:
    named = [name for name in ("x", "topk_weights", "w_gate_up", "w_down", "b_gate_up", "b_down") if getattr(wants, name)]
    parts = ("w_gate_up", "w_down", "gate_weight")
    return named + [f"shared[{i}].{part}" for i, want in enumerate(wants.shared) for part, wanted in zip(parts, want, strict=True) if wanted]
