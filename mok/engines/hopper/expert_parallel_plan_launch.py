"""Host side of a group's plan: the exchange of ids, everybody's plan and the cut of this rank's part; never waits for the GPU.

The kernels are in expert_parallel_plan.py. A group has the five launches ready from the start, as one graph (`ReadyGroupPlan`), for any T.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon._runtime import GluonASTSource

from ...config import BLOCK_M
from ...plan import RoutingPlan, empty_plan, experts_of_rank, plan_capacity
from ...runtime import EXPERT_RADIX, runtime
from . import cache_keys, plan_kernel
from .compat import COMPILE_OPTIONS, current_stream, new_empties, new_empty
from .driver import ReadyChain, ReadyLaunch, ready_launch
from .expert_parallel_plan import _IDS, _cut_plan_kernel, _exchange_ids_kernel

cache_keys.settle()

BLOCK_CUT = 1024
EXCHANGE_PROGRAMS = 16                  # they wait for one another, so they all have to be resident: few and small
EXCHANGE_LAUNCH = {"num_warps": 4, **COMPILE_OPTIONS}
CUT_LAUNCH = {"num_warps": 4, "enable_fp_fusion": True}
_ALIGNMENT = 64                         # bytes: where parts of one block of memory begin


def exchange_source(ids: str) -> GluonASTSource:
    """The exchange kernel for ids of type "i32" or "i64" as Triton's compiler takes it, for compiling without a GPU."""
    types = {"topk_ids": f"*{ids}", "error_word": "*i64", "everybody": "*i32", "control": "*i32", **dict.fromkeys(_IDS, "i32")}
    constexprs = {"RADIX": EXPERT_RADIX, "DEBUG": 0}
    return GluonASTSource(_exchange_ids_kernel, {name: types.get(name, "constexpr") for name in _exchange_ids_kernel.arg_names}, constexprs)


def cut_plan(whole: RoutingPlan, topk_ids: Tensor, num_experts: int, rank: int, world_size: int, max_tokens: int,
             wave_tiles: tuple[int, int] | None = None) -> RoutingPlan:
    """One rank's part of the plan of everybody's ids (W * max_tokens, K); topk_ids (T, K), T <= max_tokens: this rank's, for sizes only.

    wave_tiles: where buffers are bounded, their row tiles on the first E mod W ranks, which own an expert more, and on the others.
    """
    T, K = topk_ids.shape
    num_local = experts_of_rank(num_experts, world_size, rank)[1]
    shapes = _shapes(num_local, world_size * max_tokens * K, None if wave_tiles is None else world_size)
    plan = RoutingPlan(*new_empties(topk_ids, _with_slots(shapes, T * K)))
    maps = [getattr(whole, name) for name in _READ_BY_CUT]
    arguments = _cut_arguments(plan.tensors(), maps, plan.num_rows, T * K, num_experts, rank, world_size, max_tokens * K, wave_tiles)
    launches = ((_cut_plan_kernel, _cut_programs(plan.num_rows, T * K), CUT_LAUNCH, arguments),)
    plan_kernel.run_launches(launches, _cut_variant(topk_ids.device, num_local, wave_tiles), topk_ids.device.index)
    return plan


_READ_BY_CUT = ("row_to_slot", "slot_to_row", "tile_to_expert", "expert_offsets", "tokens_per_expert")
_MAPS = ("row_to_slot", "row_to_rank", "slot_to_row", "tile_to_expert", "expert_offsets", "tokens_per_expert", "num_tiles", "slot_to_rank", "wave_tiles")
_CUT = 4                                # its place in the chain
_NUM_TILES, _WAVE_TILES = _MAPS.index("num_tiles"), _MAPS.index("wave_tiles")


def _cut_arguments(maps: Sequence[Any], whole: Sequence[Any], num_rows: int, slots: Any, num_experts: int, rank: int, world_size: int,
                   slots_per_rank: int, wave_tiles: tuple[int, int] | None) -> tuple[Any, ...]:
    """All arguments of `_cut_plan_kernel`. maps: the plan's, in the order of `_MAPS`; whole: of everybody's plan, those of `_READ_BY_CUT`."""
    experts = _expert_class(experts_of_rank(num_experts, world_size, rank)[1])
    return (*maps[:_WAVE_TILES], *whole, num_rows, slots, slots_per_rank, rank, world_size, num_experts,
            maps[_NUM_TILES if wave_tiles is None else _WAVE_TILES], *(wave_tiles or (1, 1)), BLOCK_CUT, BLOCK_M, experts, wave_tiles is not None)


def _cut_programs(num_rows: int, slots: int) -> int:
    return -(-max(num_rows, slots) // BLOCK_CUT)


def _cut_variant(device: torch.device, num_local: int, wave_tiles: tuple[int, int] | None) -> tuple:
    return "cut plan", device, _expert_class(num_local), wave_tiles is not None


def _expert_class(num_experts: int) -> int:
    return next(size for size in plan_kernel.EXPERT_CLASSES if size >= num_experts)


@lru_cache(maxsize=1024)
def _shapes(num_local: int, most_rows: int, world_size: int | None) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """(shape, dtype) of each map of a rank's plan, in the order of `_MAPS`, for no slots; world_size: where there are waves."""
    plan = empty_plan(torch.empty((0, 1), dtype=torch.int32, device="meta"), num_local, plan_capacity(most_rows, num_local))
    waves = [] if world_size is None else [((world_size, 2), torch.int32)]
    return [*((tuple(part.shape), part.dtype) for part in (*plan.tensors(), plan.slot_to_row)), *waves]


def _with_slots(shapes: list[tuple[tuple[int, ...], torch.dtype]], slots: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """The same with `slots` = T*K slots."""
    of_slots = ((slots,), torch.int32)
    return [*shapes[:2], of_slots, *shapes[3:7], of_slots, *shapes[8:]]


@dataclass(frozen=True)
class GroupIds:
    """What a group's plans have in common: its sizes, what it exchanges ids through, and `cut_plan`'s wave_tiles."""
    num_experts: int
    rank: int
    world_size: int
    max_tokens: int
    everybody: Tensor
    control: Tensor
    wave_tiles: tuple[int, int] | None = None


class ReadyGroupPlan:
    """The five launches of a group's plans for ids of one dtype, ready but for addresses, T and the strides of ids.

    Chained, they are one graph, whose part of everybody's plan lies in `block`, the same for each plan. A graph cannot be launched into a stream that is
    being captured; there, and unchained, they are five launches and a block of their own.
    """

    def __init__(self, group: GroupIds, topk_ids: Tensor, exchange: ReadyLaunch, whole: plan_kernel.ReadyPlan, cut: ReadyLaunch) -> None:
        num_local = experts_of_rank(group.num_experts, group.world_size, group.rank)[1]
        self._exchange, self._whole, self._cut = exchange, whole, cut
        self._shapes = _shapes(num_local, group.everybody.numel(), None if group.wave_tiles is None else group.world_size)
        self._wave_map = _NUM_TILES if group.wave_tiles is None else _WAVE_TILES
        self._everybody = group.everybody.data_ptr()
        self._error_word = runtime.error_word(topk_ids.device).data_ptr()
        self._places, end = [], 0                              # of the whole plan's parts in one block, which lives as long as the launches
        for shape, dtype in whole.shapes:
            self._places.append(end)
            size = dtype.itemsize
            for length in shape:
                size *= length
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._block_shape = (end // 4,)
        self.block: Tensor | None = None
        self._chain: ReadyChain | None = None

    @staticmethod
    def of(group: GroupIds, topk_ids: Tensor, debug: bool) -> ReadyGroupPlan | None:
        """From binaries that earlier launches for such ids have left, or `load_exchange`; None where the driver cannot say what they take."""
        device, num_local = topk_ids.device, experts_of_rank(group.num_experts, group.world_size, group.rank)[1]
        exchanged = runtime.scratch.get(_exchange_variant(topk_ids, debug))
        cut = runtime.scratch.get(_cut_variant(device, num_local, group.wave_tiles))
        whole = plan_kernel.find_ready(group.everybody, group.num_experts)
        if exchanged is None or cut is None or whole is None:
            return None
        arguments = exchange_arguments(topk_ids, group.num_experts, group.max_tokens, 0, group.everybody, group.control, debug)
        names = _exchange_ids_kernel.arg_names
        varying = [names.index(name) for name in ("topk_ids", "num_slots", "stride_token", "stride_k", "signature")]
        addresses = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments]
        ready_exchange = ready_launch(exchanged[0], addresses, varying, device.index)
        num_rows = _shapes(num_local, group.everybody.numel(), None)[0][0][0]
        nothing = [None] * len(_MAPS)
        cut_arguments = _cut_arguments(nothing, nothing[:len(_READ_BY_CUT)], num_rows, None, group.num_experts, group.rank, group.world_size,
                                       group.max_tokens * topk_ids.shape[1], group.wave_tiles)
        ready_cut = ready_launch(cut[0], cut_arguments, [i for i, argument in enumerate(cut_arguments) if argument is None], device.index)
        if ready_exchange is None or ready_cut is None:
            return None
        return ReadyGroupPlan(group, topk_ids, ready_exchange, whole, ready_cut)

    def chain(self, topk_ids: Tensor, block: Tensor | None = None) -> None:
        """Make one graph of the launches, on the current device, for which it may wait. block: another chain's of this group, whose plans wait for this
        one's as all of a group's do."""
        self.block = new_empty(topk_ids, self._block_shape, torch.int32) if block is None else block
        parts = self._parts(self.block)
        own = [self._everybody] * len(_MAPS)                  # addresses that no launch sees: each brings its own
        steps = (self._exchange_step(topk_ids, 0), *self._whole.steps(self._everybody, self._error_word, parts), self._cut_step(own, parts, 0))
        launches = (self._exchange, *self._whole.launches, self._cut)
        self._chain = ReadyChain([(launch.captured, *step) for launch, step in zip(launches, steps, strict=True)], topk_ids.device.index)

    def build(self, topk_ids: Tensor, signature: int) -> RoutingPlan:
        """This rank's plan of topk_ids (T, K), T <= max_tokens, on the current device."""
        stream = current_stream(topk_ids.device.index)
        chained = self._chain is not None and not torch.cuda.is_current_stream_capturing()
        block = self.block if chained else new_empty(topk_ids, self._block_shape, torch.int32)
        assert block is not None
        parts = self._parts(block)
        maps = new_empties(topk_ids, _with_slots(self._shapes, topk_ids.numel()))
        exchange, cut = self._exchange_step(topk_ids, signature), self._cut_step([part.data_ptr() for part in maps], parts, topk_ids.numel())
        if chained:
            assert self._chain is not None
            self._chain(stream, (0, *exchange), (_CUT, *cut))
        else:
            self._exchange(exchange[0], stream, *exchange[1])
            self._whole.launch(stream, self._everybody, self._error_word, parts)
            self._cut(cut[0], stream, *cut[1])
        return RoutingPlan(*maps)

    def _parts(self, block: Tensor) -> list[int]:
        """Addresses of the whole plan's parts."""
        begin = block.data_ptr()
        return [begin + place for place in self._places]

    def _exchange_step(self, topk_ids: Tensor, signature: int) -> tuple[int, tuple[int, ...]]:
        """(programs, what varies) of the exchange."""
        return EXCHANGE_PROGRAMS, (topk_ids.data_ptr(), topk_ids.numel(), *topk_ids.stride(), signature)

    def _cut_step(self, own: Sequence[int], parts: Sequence[int], slots: int) -> tuple[int, tuple[int, ...]]:
        """(programs, what varies) of the cut; own: addresses of this rank's maps."""
        row_to_slot, _, slot_to_row, tile_to_expert, expert_offsets, tokens_per_expert, *_ = parts
        return _cut_programs(self._shapes[0][0][0], slots), (*own[:_WAVE_TILES], row_to_slot, slot_to_row, tile_to_expert, expert_offsets,
                                                             tokens_per_expert, slots, own[self._wave_map])


def _exchange_variant(topk_ids: Tensor, debug: bool) -> tuple:
    return "exchange", topk_ids.device, topk_ids.dtype, debug


def load_exchange(topk_ids: Tensor, group: GroupIds, debug: bool) -> None:
    """Compile and load the exchange kernel for ids like these; run nothing."""
    arguments = exchange_arguments(topk_ids, group.num_experts, group.max_tokens, 0, group.everybody, group.control, debug)
    kernel = _exchange_ids_kernel.warmup(*arguments, grid=(1,), **EXCHANGE_LAUNCH)
    kernel._init_handles()
    runtime.scratch.setdefault(_exchange_variant(topk_ids, debug), [kernel])


def strides_fit(topk_ids: Tensor) -> bool:
    """Whether the strides are 32-bit numbers, as the kernels that are kept ready have them."""
    return all(-2**31 < stride < 2**31 for stride in topk_ids.stride())


def exchange_ids(topk_ids: Tensor, num_experts: int, max_tokens: int, signature: int, everybody: Tensor, control: Tensor, debug: bool) -> None:
    """Launch the exchange: everybody (W * max_tokens, K) int32 is then filled, on this stream; all ranks launch theirs."""
    arguments = exchange_arguments(topk_ids, num_experts, max_tokens, signature, everybody, control, debug)
    variant = _exchange_variant(topk_ids, debug) if strides_fit(topk_ids) else None
    plan_kernel.run_launches(((_exchange_ids_kernel, EXCHANGE_PROGRAMS, EXCHANGE_LAUNCH, tuple(arguments)),), variant, topk_ids.device.index)


def exchange_arguments(topk_ids: Tensor, num_experts: int, max_tokens: int, signature: int, everybody: Tensor, control: Tensor, debug: bool) -> list:
    """Run-time arguments and constexprs of `_exchange_ids_kernel`, in its order."""
    T, K = topk_ids.shape
    return [topk_ids, T * K, K, num_experts, *topk_ids.stride(), max_tokens * K, signature, runtime.error_word(topk_ids.device), everybody, control,
            EXPERT_RADIX, int(debug)]
