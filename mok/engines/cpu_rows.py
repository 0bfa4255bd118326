"""Where the rows of a CPU pass come from and where their results go: this rank alone, or all ranks of a group over its process group.

Both kinds of journey have the same three parts: `dispatch` gives the row sources of a pass, `home` brings row results back, and `slots` says
which of what came back belongs to which route. A pass written against them gives the same bits at any number of ranks.
"""
from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..plan import RoutingPlan
from .cpu_tiles import Rows
from .expert_parallel import Travel


class LocalRows:
    """W = 1: rows are read where the tokens lie, results where the rows lie; nothing moves. slots (T, K) int64, -1 = no expert."""

    def __init__(self, plan: RoutingPlan, T: int, K: int) -> None:
        self._slot = plan.row_to_slot.to(torch.int64)
        self._token = self._slot.clamp(min=0) // K                  # padding rows hold token 0 and are never read
        self.slots = plan.slot_to_row.view(T, K).to(torch.int64)

    def dispatch(self, what: str, wave: int, by_token: Sequence[Tensor], by_slot: Tensor | None = None) -> tuple[list[Rows], Tensor | None]:
        """Row sources of values by token (T, C) each; and (R, 1) row values of by_slot (T, K), unspecified in padding. There is one wave."""
        values = None
        if by_slot is not None:
            values = _picked(by_slot.reshape(-1), self._slot).unsqueeze(1)
        return [Rows(tokens, self._token) for tokens in by_token], values

    def home(self, what: str, wave: int, *by_row: Tensor | None) -> list[Tensor | None]:
        """Results by row (R, C), to be read at `slots`; None stays None."""
        return list(by_row)


class GroupRows:
    """W > 1: rows travel to the ranks that own their experts, results travel home; the process group's all-to-all carries both.

    In several waves each carries its own rows; all waves' results lie side by side in the home ranks' buffers.
    """

    def __init__(self, plan: RoutingPlan, T: int, K: int, group: Any, num_waves: int) -> None:
        self._travels = [Travel(plan, group, None if plan.wave_tiles is None else wave) for wave in range(num_waves)]
        self._K = K
        self._home: dict[int, Tensor] = {}
        self._home_first = list(accumulate((travel.sent_slots.shape[0] for travel in self._travels), initial=0))
        sent = torch.cat([travel.sent_slots for travel in self._travels])
        slots = torch.full((T * K,), -1, dtype=torch.int64, device="cpu")
        slots[sent] = torch.arange(sent.shape[0], device="cpu")
        self.slots = slots.view(T, K)

    def dispatch(self, what: str, wave: int, by_token: Sequence[Tensor], by_slot: Tensor | None = None) -> tuple[list[Rows], Tensor | None]:
        """As LocalRows.dispatch, of all ranks' tokens, rows counted from the wave's first one."""
        travel = self._travels[wave]
        slots, received = travel.sent_slots, travel.received_rows
        sent = [_picked(tokens, slots // self._K) for tokens in by_token] + ([] if by_slot is None else [by_slot.reshape(-1)[slots]])
        arrived = travel.to_experts(what, *sent)
        position = torch.full((travel.num_rows,), -1, dtype=torch.int64, device="cpu")
        position[received] = torch.arange(received.shape[0], device="cpu")
        values = None if by_slot is None else _picked(arrived.pop(), position).unsqueeze(1)
        return [Rows(rows, position) for rows in arrived], values

    def home(self, what: str, wave: int, *by_row: Tensor | None) -> list[Tensor | None]:
        """As LocalRows.home: what has come back for this rank's own routes, complete after the last wave."""
        arrived = self._travels[wave].home(what, *by_row)
        if len(self._travels) == 1:
            return arrived
        first, last = self._home_first[wave:wave + 2]
        for i, rows in enumerate(arrived):
            if rows is not None:
                if i not in self._home:
                    self._home[i] = rows.new_empty((self._home_first[-1], *rows.shape[1:]))
                self._home[i][first:last].copy_(rows)
        return [self._home.get(i) for i in range(len(arrived))]


def _picked(values: Tensor, index: Tensor) -> Tensor:
    """values[index] along the first dimension, anything where index is -1; index (n,) int64."""
    if values.shape[0] == 0:
        return values.new_zeros((index.shape[0], *values.shape[1:]))
    return values.index_select(0, index.clamp(min=0))


def slot_values(row_values: Tensor, slots: Tensor) -> Tensor:
    """(T, K): the value of each slot's row, 0 where it has none; row_values (n, 1), slots (T, K)."""
    if row_values.numel() == 0:
        return row_values.new_zeros(slots.shape)
    return torch.where(slots < 0, 0, row_values[slots.clamp(min=0), 0])
