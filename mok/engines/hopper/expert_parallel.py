"""Expert parallelism inside the launches, host side: a group's peer-reachable buffers, its plan and its passes; never waits for the GPU.

Everything that ranks share is made once, when the group is built, from max_tokens, hidden_size and top_k; the variants that its passes use are compiled
and loaded then too (rule 7: loading a module may wait for kernels that wait for a peer). docs/expert-parallel-kernel.md has the protocol.
"""
from __future__ import annotations

import ctypes
import hashlib
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from ...fabric.abort import AbortWords
from ...fabric.flag_page import ABORT_HOST, MAX_RANKS, page_bytes
from ...fabric.process_group import FabricError, FabricTimeout
from ...plan import RoutingPlan, empty_plan, experts_of_rank, plan_capacity
from ...runtime import runtime
from ...waves import WaveCounts, wave_capacity
from ..protocol import Grads, MainGrad, MoETensors, PassOptions, Saved, Wants
from . import backward_launch, expert_parallel_backward, expert_parallel_plan_launch, launch, plan_kernel
from .compat import current_stream, on_device
from .driver import DriverError
from .expert_parallel_plan import ids_words
from .expert_parallel_plan_launch import GroupIds, ReadyGroupPlan, strides_fit
from .forward import ForwardConfig
from .launch import GroupLaunch
from .limits import unsupported_reason
from .peers import TABLE_WORDS
from .state import WAITS, group_state

_SIGNATURE_BITS = 31
_OF_PEER = (31, 32, 33, 37)    # waits whose tile is a rank
_SIGNATURE, _ABORTED = 35, 36  # equal sync.WAIT_SIGNATURE, sync.WAIT_ABORTED


class Buffers(Protocol):
    """What mok.fabric.peer_memory.PeerMemory gives: a rank's buffers by name, all ranks' tensors of each, and tables of their addresses."""

    local: dict[str, Tensor]
    peers: dict[str, list[Tensor]]
    table: dict[str, Tensor]

    def close(self, *, abandon: bool = False) -> None: ...


def buffer_sizes(max_tokens: int, hidden_size: int, top_k: int) -> dict[str, int]:
    """Bytes of each peer-reachable buffer of a rank: flags, ids (two halves), staged rows of x, and the slots that results are pushed into; for backward
    staged rows of dy and routing weights, and the slots of the latter's gradients."""
    return {"flags": page_bytes(max_tokens), "ids": 4 * ids_words(max_tokens, top_k), "x": 2 * max_tokens * hidden_size,
            "slots": 2 * max_tokens * top_k * hidden_size, "dy": 2 * max_tokens * hidden_size, "weights": 4 * max_tokens * top_k,
            "weight_slots": 4 * max_tokens * top_k}


def peer_table(memory: Buffers, rank: int, world_size: int) -> Tensor:
    """The table that kernels find peers in (peers.py), int64 on the device."""
    device = memory.local["flags"].device
    addresses = {name: memory.table[name].cpu() for name in ("flags", "ids", "x", "slots", "dy", "weights", "weight_slots")}
    table = torch.zeros(TABLE_WORDS, dtype=torch.int64, device="cpu")
    table[0], table[1] = rank, world_size
    for name in ("x", "slots", "dy"):
        addresses[name] = addresses[name] >> 4
    for word, name in enumerate(("flags", "x", "slots", "dy", "weights", "weight_slots"), 2):
        table[word] = addresses[name][rank]
    for place, values in enumerate(addresses.values()):
        begin = 8 + place * MAX_RANKS
        table[begin:begin + world_size] = values
    return table.to(device)


class FusedGroup:
    """One rank's side of a group whose passes communicate inside their launches. bf16; H = hidden_size, K = top_k, T <= max_tokens on every rank.

    memory: buffers of `buffer_sizes`, zeroed. blocks: CTAs that may be resident beside what else runs on the device. Building one loads its variants.
    capacity_factor: rows beyond that many times the balanced load go through the buffers again (mok/waves.py); None = room for the worst case.
    All ranks make the same calls in the same order; a difference, a peer that gives up or one that does not come within timeout_s is raised by the
    next call or mok.check() as FabricError or FabricTimeout naming the rank. The group is dead then.
    """

    def __init__(self, memory: Buffers, rank: int, world_size: int, *, num_experts: int, max_tokens: int, hidden_size: int, top_k: int,
                 timeout_s: float, blocks: int, cooperative: bool, capacity_factor: float | None = None) -> None:
        self.memory, self.rank, self.world_size = memory, rank, world_size
        self.num_experts, self.max_tokens, self.hidden_size, self.top_k, self.timeout_s = num_experts, max_tokens, hidden_size, top_k, timeout_s
        self.device = memory.local["flags"].device
        self.debug = False                                    # roles sleep at random; for tests
        self._peers = peer_table(memory, rank, world_size)
        routes = world_size * max_tokens * top_k
        rows = plan_capacity(routes, experts_of_rank(num_experts, world_size, rank)[1])
        self._wave_tiles = None if capacity_factor is None else bounded_tiles(capacity_factor, routes, num_experts, world_size)
        own_tiles = None if self._wave_tiles is None else self._wave_tiles[rank >= num_experts % world_size]
        rows = rows if own_tiles is None else own_tiles * launch.TILE
        token_tiles = -(-max_tokens // launch.TILE)
        state, capacity, self._record = group_state(self.device, max(rows // launch.TILE, 8 * token_tiles), self._peers, timeout_s)
        self.launch = GroupLaunch(state, capacity, blocks, cooperative, blocks / torch.cuda.get_device_properties(self.device).multi_processor_count,
                                  own_tiles)
        everybody = torch.full((world_size * max_tokens, top_k), -1, dtype=torch.int32, device=self.device)
        self._ids = GroupIds(num_experts, rank, world_size, max_tokens, everybody, state, self._wave_tiles)
        self._ready_plans: dict[tuple[torch.dtype, bool], ReadyGroupPlan] = {}
        self._abort = AbortWords(memory, "flags")             # type: ignore[arg-type]
        self._dead: FabricError | None = None
        self._signatures: dict[int, str] = {}
        self._reasons: dict[int, str | None] = {}
        self._backward_variants: set[tuple[int, str | None, bool]] = set()
        self._ordered = _Ordered(self.device, self.give_up)
        with torch.cuda.device(self.device):
            self._load_variants()
        here = weakref.ref(self)
        runtime.error_words.append(lambda: None if (group := here()) is None else group.new_error())

    def unsupported_reason(self, H: int, I: int, K: int) -> str | None:
        """None if this group's passes of these sizes run inside the launches; else why not. The same on all ranks that agree on the sizes."""
        if self.hidden_size != H or self.top_k != K:
            return f"H={H}, K={K} are not the group's hidden_size={self.hidden_size}, top_k={self.top_k}"
        if I not in self._reasons:                            # asked for every plan and pass: a look at the device and at what is installed takes longer
            self._reasons[I] = unsupported_reason(self.device, torch.bfloat16, H, I)
        return self._reasons[I]

    def build_plan(self, topk_ids: Tensor, num_local_experts: int, signature: str) -> RoutingPlan:
        """This rank's plan of topk_ids (T, K) int32/int64 (expert_parallel_plan.py); signature: what must agree on all ranks.

        An id outside -1..E-1 counts as -1 and is reported in the device's error word. Raises ValueError where T or the experts are not what the group
        was built for, after telling the peers, for whom the group is dead then too.
        """
        self.raise_if_dead()
        T, K = topk_ids.shape
        expected = experts_of_rank(self.num_experts, self.world_size, self.rank)[1]
        problem = f"T={T} must be at most the group's max_tokens={self.max_tokens}" if self.max_tokens < T else None
        if num_local_experts != expected:
            problem = f"w_gate_up holds {num_local_experts} experts on rank {self.rank} and must hold {expected} of {self.num_experts}"
        if self.top_k != K:
            problem = f"topk_ids.shape={tuple(topk_ids.shape)} must have the group's top_k={self.top_k} columns"
        if problem is not None:
            self.give_up(problem)
            raise ValueError(problem)
        number = signature_number(signature)
        self._signatures[number] = signature
        with on_device(topk_ids), self._ordered:
            ready = self._ready_plans.get((topk_ids.dtype, self.debug))
            return self._launch_plan(topk_ids, number) if ready is None or not strides_fit(topk_ids) else ready.build(topk_ids, number)

    def forward(self, plan: RoutingPlan, tensors: MoETensors, options: PassOptions) -> tuple[Tensor, Saved]:
        """One launch: y (T, H) and what backward needs; z has the rows of the buffers. Every rank launches, also one without tokens or rows."""
        self.raise_if_dead()
        with self._ordered:
            return launch.forward(plan, tensors, options, _forward_config(options.save_for_backward, self.bounded, self.debug), group=self.launch)

    def backward(self, plan: RoutingPlan, tensors: MoETensors, options: PassOptions, saved: Saved, dy: Tensor, wants: Wants,
                 main_grad: MainGrad | None) -> Grads:
        """One launch: the gradients that `wants` names, the same ones on every rank, for dy (T, H). Every rank launches, also one without tokens.

        plan and saved are forward's; other passes of the group may have run since. options.agreed: what ranks compare, beside `wants`.
        """
        self.raise_if_dead()
        self.load_backward(options)
        agreed = options.agreed or f"backward, {wants}"
        number = signature_number(agreed)
        self._signatures[number] = agreed
        with self._ordered:
            return expert_parallel_backward.group_backward(plan, tensors, options, saved, dy, wants, main_grad, self.launch, number, self.debug)

    def load_backward(self, options: PassOptions) -> None:
        """Compile and load the backward variant of this activation and `recompute`, once.

        Plain SwiGLU's is loaded when the group is built, the others when a plan first names them, which all ranks do at the same place. A load may wait
        for this rank's kernels in flight; these wait for peers' launches of earlier passes alone, and of two ranks that load, the one that is behind
        finds those launched. So no circle (rule 7), unless one thread drives several ranks; then the first rank's load serves all.
        """
        variant = (backward_launch.VARIANTS[backward_launch._variant(options)], options.recompute, self.debug)
        if variant not in self._backward_variants:
            try:
                plan, tensors = self._smallest_pass()
                with torch.cuda.device(self.device):
                    expert_parallel_backward.load_group_backward(plan, tensors, options, self.launch, self.debug)
            except BaseException as error:
                self.give_up(str(error))
                raise
            self._backward_variants.add(variant)

    def give_up(self, why: str) -> None:
        """Tell the peers that this rank will not come; the group is dead. Does not wait for kernels."""
        if self._dead is None:
            self._dead = FabricError(f"rank {self.rank} gave up: {why}", (self.rank,))
            self._abort.tell(ABORT_HOST)

    def close(self) -> None:
        """Give the buffers back, once this device's launches have ended; collective, but for a dead group, whose ranks keep their own (a peer may still have
        it mapped) and unmap the others'."""
        self.memory.close(abandon=self._dead is not None or self.new_error() is not None)
        self._dead = self._dead or FabricError("it was closed", ())

    def raise_if_dead(self) -> None:
        """Raise what a launch reported, or again what killed this group."""
        error = self.new_error()
        if error is not None:
            raise error
        if self._dead is not None:
            raise type(self._dead)(f"this ExpertGroup is dead: {self._dead}", self._dead.peers)

    def new_error(self) -> FabricError | None:
        """What a launch reported since the last look, from pinned memory; the group is dead then."""
        if not ctypes.c_int32.from_address(self._record.data_ptr()).value:
            return None
        _, _, wait, tile, expected, seen = self._record.tolist()[:6]
        self._record.zero_()
        self._dead = self._error(wait, tile, expected, seen)
        return self._dead

    def _error(self, wait: int, tile: int, expected: int, seen: int) -> FabricError:
        where = f"rank {self.rank} of {self.world_size}: a launch on {self.device}"
        if wait == _SIGNATURE:
            ours = self._signatures.get(expected, str(expected))
            theirs = self._signatures.get(seen, f"one that this rank has not run, number {seen}")
            return FabricError(f"{where} met another pass on rank {tile}: here {ours}, there {theirs}; the output is NaN", (tile,))
        if wait == _ABORTED:
            why = "its host could not launch" if seen >= ABORT_HOST else f"it waited too long for {WAITS.get(seen, seen)}"
            return FabricError(f"{where} ended because rank {tile} gave up: {why}; the output is NaN", (tile,))
        if wait in _OF_PEER:
            return FabricTimeout(f"{where} gave up after {self.timeout_s:g} s: rank {tile} did not come; waited for {WAITS[wait]}, expected epoch {expected}, "
                                 f"saw {seen}; the output is NaN", (tile,))
        return FabricTimeout(f"{where} gave up: waited for {WAITS.get(wait, wait)}, tile {tile}, expected {expected}, saw {seen}; the output is NaN", ())

    def _load_variants(self) -> None:
        """Compile and load all that a pass launches, the plan's kernels by running them on ids of nobody."""
        ids = torch.full((1, self.top_k), -1, dtype=torch.int32, device=self.device)
        for typed in (ids, ids.long()):
            expert_parallel_plan_launch.load_exchange(typed, self._ids, self.debug)
            self._cut(plan_kernel.build_plan(self._ids.everybody, self.num_experts), typed)
        for typed in (ids, ids.long()):
            self._keep_plan_ready(typed, chained=True)
        plan, tensors = self._smallest_pass()
        for save in (False, True):
            launch.load(plan, tensors, PassOptions(save_for_backward=save), _forward_config(save, self.bounded, self.debug), self.launch)
        self.load_backward(PassOptions())

    def _smallest_pass(self) -> tuple[RoutingPlan, MoETensors]:
        """Arguments of every kernel's types, for loading it."""
        ids = torch.full((1, self.top_k), -1, dtype=torch.int32, device=self.device)
        experts = experts_of_rank(self.num_experts, self.world_size, self.rank)[1]
        H, I = self.hidden_size, 16
        tensors = MoETensors(ids.new_zeros((1, H), dtype=torch.bfloat16), ids.new_zeros((1, self.top_k), dtype=torch.float32),
                             ids.new_zeros((experts, 2 * I, H), dtype=torch.bfloat16), ids.new_zeros((experts, H, I), dtype=torch.bfloat16))
        plan = empty_plan(ids, experts, launch.TILE)
        if self.bounded:
            plan = replace(plan, slot_to_rank=torch.empty_like(plan.slot_to_row), wave_tiles=ids.new_zeros((self.world_size, 2)))
        return plan, tensors

    @property
    def bounded(self) -> bool:
        """Whether rows beyond a capacity go through the buffers again."""
        return self._wave_tiles is not None

    def wave_counts(self) -> WaveCounts:
        """What this group's launches have counted on this rank; waits for those in flight."""
        self._ordered.wait()
        return WaveCounts(*self.launch.state[12:16].tolist())

    def _launch_plan(self, topk_ids: Tensor, signature: int) -> RoutingPlan:
        """Exchange, plan and cut by Triton's own way to a launch, which leaves a ready one for the next ids of this dtype."""
        expert_parallel_plan_launch.exchange_ids(topk_ids, self.num_experts, self.max_tokens, signature, self._ids.everybody, self.launch.state, self.debug)
        plan = self._cut(plan_kernel.build_plan(self._ids.everybody, self.num_experts), topk_ids)
        if strides_fit(topk_ids):
            self._keep_plan_ready(topk_ids, chained=False)    # making a chain may wait for the device, which may wait for a peer
        return plan

    def _keep_plan_ready(self, topk_ids: Tensor, chained: bool) -> None:
        """From now on plans for ids of this dtype go by ready launches, where the driver can say what these take."""
        ready = ReadyGroupPlan.of(self._ids, topk_ids, self.debug)
        if ready is not None:
            if chained:
                with suppress(DriverError):                   # then they are five launches
                    ready.chain(topk_ids, next((other.block for other in self._ready_plans.values()), None))
            self._ready_plans[topk_ids.dtype, self.debug] = ready

    def _cut(self, whole: RoutingPlan, topk_ids: Tensor) -> RoutingPlan:
        """This rank's part of the plan of everybody's ids."""
        return expert_parallel_plan_launch.cut_plan(whole, topk_ids, self.num_experts, self.rank, self.world_size, self.max_tokens, self._wave_tiles)


@lru_cache(maxsize=16)
def _forward_config(save_z: bool, waves: bool, debug: bool) -> ForwardConfig:
    return ForwardConfig(save_z, several_ranks=True, waves=waves, debug=debug)


class _Ordered:
    """Calls of one group on several streams one after the other (rule 10): they share buffers and counters. What raises before it has launched tells the
    peers, through give_up, that this rank will not come.

    Calls that are captured in a graph are ordered by the capture's own streams, and its replays by the caller.
    """

    def __init__(self, device: torch.device, give_up: Callable[[str], None]) -> None:
        self._device, self._give_up = device, give_up
        self._event = torch.cuda.Event()
        self._stream: torch.cuda.Stream | None = None            # of the last call, and its handle
        self._handle = -1

    def wait(self) -> None:
        """The device's current stream waits for the last call."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def __enter__(self) -> None:
        if current_stream(self._device.index) != self._handle and not torch.cuda.is_current_stream_capturing():
            self.wait()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._give_up(f"{type(error).__name__}: {error}")
        if not torch.cuda.is_current_stream_capturing():
            handle = current_stream(self._device.index)
            if handle != self._handle or self._stream is None:
                self._stream, self._handle = torch.cuda.current_stream(self._device), handle
            self._event.record(self._stream)


def bounded_tiles(capacity_factor: float, routes: int, num_experts: int, world_size: int) -> tuple[int, int]:
    """Row tiles of a rank's buffers: on the first E mod W ranks, which own an expert more, and on the others; routes: the most that there can be.

    bounded_tiles(1.0, 1024, 5, 2) == (8, 6): 615 routes and padding of 3 experts in 996 rows, 410 and 2 in 664.
    """
    more, fewer = (wave_capacity(capacity_factor, routes, num_experts, experts_of_rank(num_experts, world_size, rank)[1])
                   for rank in (0, world_size - 1))
    return more // launch.TILE, fewer // launch.TILE


@lru_cache(maxsize=4096)
def signature_number(signature: str) -> int:
    """What ranks compare of a pass's signature: a hash of it that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(signature.encode(), digest_size=4).digest(), "little") >> (32 - _SIGNATURE_BITS)


def resident_share(device: torch.device, ranks_on_device: int) -> int:
    """CTAs that each of the ranks on a device may have resident, one a multiprocessor: all ranks' together fit on it at once."""
    return torch.cuda.get_device_properties(device).multi_processor_count // ranks_on_device
