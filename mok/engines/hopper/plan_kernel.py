"""RoutingPlan at W = 1, built on the GPU in three launches: equal bit for bit to `RoutingPlan.build(topk_ids, num_experts)`.

Slots (token*K + k) are cut into chunks, one for each program:
  1. `_count_slots_kernel`   counts[chunk, e] = slots of this chunk that go to expert e; reports ids outside -1..E-1
  2. `_scan_chunks_kernel`   counts[chunk, e] becomes the slots of earlier chunks that go to e; tokens_per_expert
  3. `_scatter_slots_kernel` every program derives the segments from tokens_per_expert, gives each slot of its chunk its row, and fills its
                             share of the tiles (expert, padding)
A slot's row = first row of the expert's segment + slots of earlier chunks + earlier slots of the chunk that go to the same expert: a count,
never the outcome of a race, so the order is stable whatever runs first. Nothing needs zeroed memory, a host copy or a host sync.

Legend: T tokens, K routes a token, E experts, R rows of the plan. Limits: `unsupported_reason`. Compiled variants: ids' dtype (int32, int64)
x EXPERT_CLASSES; T, K, E and strides are run-time values that nothing specialises on. Measured by runs/plan_kernel.py on an H200
(2026-11-30, torch 2.11, triton 3.6): T*K = 262144, E = 128 18.5 us of GPU time (E = 384 35, E = 1024 82), T*K = 4096, E = 128 7.4 us.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...config import BLOCK_M
from ...plan import RoutingPlan, empty_plan_like
from ...runtime import EXPERT_RADIX, runtime
from .compat import current_stream, new_empties, on_device
from .driver import ReadyLaunch, ready_launch

EXPERT_CLASSES = (32, 128, 256, 512, 1024)   # widths of the per-expert vectors: the only sizes that select another binary
MAX_CHUNKS = 512                        # programs of launches 1 and 3; 1024 gains a microsecond in launch 3 and loses four before it (H200)
BLOCK_COUNT = 512                       # slots counted at a time
BLOCK_RANK = 32                         # slots ranked against each other at a time, one for each thread
BLOCK_EXPERTS = 8                       # experts scanned by one program of launch 2: 32 bytes, one memory sector a chunk
BLOCK_TILES = 8                         # row tiles filled at a time
MAX_READY = 1024                        # sizes and layouts of ids whose launches are kept ready; all are dropped when there are more
LAUNCH = {"num_warps": 4, "enable_fp_fusion": True}     # no float here: fusion is named because Triton 3.9 warns where it is left open
SCATTER_LAUNCH = {**LAUNCH, "num_warps": 1}
_READY = "plan ready launches"
_SEEN = "plan sizes seen once"
_TOKENS_PER_EXPERT = 5                  # index of tokens_per_expert in RoutingPlan.tensors()
_NOT_SPECIALIZED = ["num_slots", "top_k", "num_experts", "stride_token", "stride_k", "chunk_slots", "num_chunks", "capacity_tiles"]


def unsupported_reason(num_slots: int, num_experts: int, block_m: int = BLOCK_M) -> str | None:
    """Why this builder cannot plan `num_slots` = T*K routes to E experts, or None: E is 1..1024 and rows are counted in 31 bits."""
    if not 1 <= num_experts <= EXPERT_CLASSES[-1]:
        return f"{num_experts=} must be from 1 to {EXPERT_CLASSES[-1]}"
    if num_slots + num_experts * block_m >= 2**31 - 2**23:       # rows at most; headroom: the end of the last chunk is counted in 32 bits too
        return f"T*K={num_slots} routes need more than 2**31 rows"
    return None


@triton.jit
def _load_ids(topk_ids, slot, inside, top_k, stride_token, stride_k):
    """The ids of `slot`, int64; the offset is 64-bit because a strided view may span more than 2^31 elements."""
    token = slot // top_k
    k = slot - token * top_k
    return tl.load(topk_ids + token.to(tl.int64) * stride_token + k.to(tl.int64) * stride_k, mask=inside, other=-1).to(tl.int64)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED, do_not_specialize_on_alignment=["topk_ids", "error_word", "counts"])
def _count_slots_kernel(topk_ids, num_slots, top_k, num_experts, stride_token, stride_k, chunk_slots, error_word, counts,
                        EXPERTS: tl.constexpr, BLOCK: tl.constexpr, RADIX: tl.constexpr):
    chunk = tl.program_id(0)
    begin = chunk * chunk_slots
    end = tl.minimum(begin + chunk_slots, num_slots)
    total = tl.zeros([EXPERTS], tl.int32)
    for first in range(begin, end, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        inside = slot < end
        ids = _load_ids(topk_ids, slot, inside, top_k, stride_token, stride_k)
        valid = (ids >= 0) & (ids < num_experts)
        total += tl.histogram(tl.where(valid, ids, 0).to(tl.int32), EXPERTS, mask=valid)
        bad = inside & ((ids < -1) | (ids >= num_experts))
        bad_slot = tl.min(tl.where(bad, slot, num_slots), axis=0)
        if bad_slot < num_slots:
            # one 8-byte store carries id and E, so the host never reads half of a report; which of several is seen last is left open
            value = tl.sum(tl.where(slot == bad_slot, ids, 0), axis=0)
            value = tl.minimum(tl.maximum(value, -(1 << 51)), (1 << 51) - 1)
            tl.store(error_word, value * RADIX + num_experts)
    tl.store(counts + chunk * EXPERTS + tl.arange(0, EXPERTS), total)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED, do_not_specialize_on_alignment=["counts", "tokens_per_expert"])
def _scan_chunks_kernel(counts, tokens_per_expert, num_experts, num_chunks, EXPERTS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    expert = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chunk = tl.arange(0, CHUNKS)
    where = counts + chunk[:, None] * EXPERTS + expert[None, :]
    mask = (chunk < num_chunks)[:, None] & (expert < num_experts)[None, :]
    own = tl.load(where, mask=mask, other=0)
    tl.store(where, tl.cumsum(own, axis=0) - own, mask=mask)
    tl.store(tokens_per_expert + expert, tl.sum(own, axis=0), mask=expert < num_experts)


@triton.jit
def _fill_tiles(group, ends, limits, total, row_to_slot, row_to_rank, tile_to_expert, capacity_tiles,
                BLOCK_M: tl.constexpr, TILES: tl.constexpr, EXPERTS: tl.constexpr):
    """Expert of each tile of this group, and what row_to_slot and row_to_rank hold in its padding rows; limits: a segment's last valid row + 1."""
    tile = group * TILES + tl.arange(0, TILES)
    first_row = tile * BLOCK_M
    used = first_row < total
    expert = tl.sum((ends[None, :] <= first_row[:, None]).to(tl.int32), axis=1)     # segments that end at or before the tile
    tl.store(tile_to_expert + tile, tl.where(used, expert, -1), mask=tile < capacity_tiles)
    limit = tl.where(used, tl.gather(limits, tl.minimum(expert, EXPERTS - 1), axis=0), 0)
    row = first_row[:, None] + tl.arange(0, BLOCK_M)[None, :]
    filled = row < limit[:, None]
    stored = (tile < capacity_tiles)[:, None]
    tl.store(row_to_rank + row, tl.where(filled, 0, -1), mask=stored)
    tl.store(row_to_slot + row, tl.full([TILES, BLOCK_M], -1, tl.int32), mask=stored & (filled == 0))


@triton.jit(do_not_specialize=_NOT_SPECIALIZED,
            do_not_specialize_on_alignment=["topk_ids", "counts", "tokens_per_expert", "row_to_slot", "row_to_rank", "slot_to_row",
                                            "tile_to_expert", "expert_offsets", "num_tiles"])
def _scatter_slots_kernel(topk_ids, num_slots, top_k, num_experts, stride_token, stride_k, chunk_slots, counts, row_to_slot, row_to_rank, slot_to_row,
                          tile_to_expert, expert_offsets, tokens_per_expert, num_tiles, num_chunks, capacity_tiles,
                          EXPERTS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, TILES: tl.constexpr):
    chunk = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    tokens = tl.load(tokens_per_expert + expert, mask=expert < num_experts, other=0)
    padded = (tokens + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    ends = tl.cumsum(padded, axis=0)
    starts = ends - padded
    total = tl.sum(padded, axis=0)
    if chunk == 0:
        tl.store(expert_offsets + expert, starts.to(tl.int64), mask=expert < num_experts)
        tl.store(expert_offsets + num_experts, total.to(tl.int64))
        tl.store(num_tiles, total // BLOCK_M)

    # the grid is larger than the chunks when padding outweighs the routes: the programs behind the last chunk have begin >= end
    counted = tl.minimum(chunk, num_chunks - 1)
    next_row = starts + tl.load(counts + counted * EXPERTS + expert, mask=expert < num_experts, other=0)
    begin = chunk * chunk_slots
    end = tl.minimum(begin + chunk_slots, num_slots)
    position = tl.arange(0, BLOCK)
    for first in range(begin, end, BLOCK):
        slot = first + position
        inside = slot < end
        ids = _load_ids(topk_ids, slot, inside, top_k, stride_token, stride_k)
        valid = (ids >= 0) & (ids < num_experts)
        owner = tl.where(valid, ids, 0).to(tl.int32)
        key = tl.where(valid, owner, -1)
        earlier = (key[:, None] == key[None, :]) & (position[:, None] > position[None, :])
        row = tl.gather(next_row, owner, axis=0) + tl.sum(earlier.to(tl.int32), axis=1)
        tl.store(slot_to_row + slot, tl.where(valid, row, -1), mask=inside)
        tl.store(row_to_slot + row, slot, mask=valid)
        next_row += tl.histogram(owner, EXPERTS, mask=valid)

    for group in range(chunk, (capacity_tiles + TILES - 1) // TILES, tl.num_programs(0)):
        _fill_tiles(group, ends, starts + tokens, total, row_to_slot, row_to_rank, tile_to_expert, capacity_tiles, BLOCK_M, TILES, EXPERTS)


def build_plan(topk_ids: Tensor, num_experts: int, *, block_m: int = BLOCK_M) -> RoutingPlan:
    """The plan of one rank at W = 1, equal bit for bit to `RoutingPlan.build(topk_ids, num_experts)`; capturable in a CUDA graph.

    topk_ids: (T, K) int32 or int64 on a CUDA device, any strides (read in place), -1 = no expert. An id outside -1..E-1 counts as -1 here
    and is reported in the device's error word: `runtime.raise_pending_errors()` raises the ValueError once the kernel has run.
    Raises ValueError for a shape, dtype or size that `unsupported_reason` refuses.
    """
    plan = ready_plan(topk_ids, num_experts, block_m)
    if plan is not None:
        return plan
    if topk_ids.dim() != 2 or topk_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"topk_ids.shape={tuple(topk_ids.shape)}, dtype={topk_ids.dtype} must be (T, K) of int32 or int64")
    T, K = topk_ids.shape
    num_slots = T * K
    reason = unsupported_reason(num_slots, num_experts, block_m)
    if reason is not None:
        raise ValueError(reason)
    experts = next(size for size in EXPERT_CLASSES if size >= num_experts)
    plan = empty_plan_like(topk_ids, num_experts, T, block_m)
    chunk_slots, num_chunks = chunking(num_slots)
    counts = topk_ids.new_empty((num_chunks, experts), dtype=torch.int32)
    capacity_tiles = plan.num_rows // block_m
    programs = max(num_chunks, min(MAX_CHUNKS, triton.cdiv(capacity_tiles, BLOCK_TILES)))
    strides = topk_ids.stride()
    ids = (topk_ids, num_slots, max(K, 1), num_experts, *strides, chunk_slots)
    launches = (
        (_count_slots_kernel, num_chunks, LAUNCH, (*ids, runtime.error_word(topk_ids.device), counts, experts, BLOCK_COUNT, EXPERT_RADIX)),
        (_scan_chunks_kernel, triton.cdiv(num_experts, BLOCK_EXPERTS), LAUNCH,
         (counts, plan.tokens_per_expert, num_experts, num_chunks, experts, MAX_CHUNKS, BLOCK_EXPERTS)),
        (_scatter_slots_kernel, programs, SCATTER_LAUNCH,
         (*ids, counts, *plan.tensors(), num_chunks, capacity_tiles, experts, BLOCK_RANK, block_m, BLOCK_TILES)))
    variant = ("plan", topk_ids.device, topk_ids.dtype, experts, block_m) if max(map(abs, strides)) < 2**31 else None
    # launches go to the current device, which need not be that of topk_ids
    with on_device(topk_ids) if topk_ids.is_cuda else nullcontext():
        run_launches(launches, variant, topk_ids.device.index)
        if variant in runtime.scratch:
            _keep_ready(_size(topk_ids, num_experts, block_m), lambda: ReadyPlan.of(plan, counts, runtime.scratch[variant], launches))
    return plan


def ready_plan(topk_ids: Tensor, num_experts: int, block_m: int = BLOCK_M) -> RoutingPlan | None:
    """`build_plan` for ids like earlier ones, at a third of its host time; None for others."""
    ready = find_ready(topk_ids, num_experts, block_m)
    if ready is None:
        return None
    with on_device(topk_ids):
        return ready.build(topk_ids)


def find_ready(topk_ids: Tensor, num_experts: int, block_m: int = BLOCK_M) -> ReadyPlan | None:
    """The launches of `build_plan` that are kept ready for ids like these; None if there are none."""
    return runtime.scratch.get(_READY, {}).get(_size(topk_ids, num_experts, block_m))


def _size(topk_ids: Tensor, num_experts: int, block_m: int) -> tuple:
    """All that the launches' arguments depend on but for addresses."""
    return topk_ids.device, topk_ids.dtype, topk_ids.shape, topk_ids.stride(), num_experts, block_m, MAX_CHUNKS


class ReadyPlan:
    """The three launches for ids of one size and layout, ready but for the addresses. shapes: (shape, dtype) of the plan's maps, then of the counts."""

    def __init__(self, plan: RoutingPlan, counts: Tensor, programs: Sequence[int], launches: Sequence[ReadyLaunch]) -> None:
        self.shapes = [(tuple(part.shape), part.dtype) for part in (*plan.tensors(), counts)]
        self._programs, self.launches = programs, launches

    @staticmethod
    def of(plan: RoutingPlan, counts: Tensor, binaries: Sequence[Any], launches: Sequence[tuple]) -> ReadyPlan | None:
        """From a call's launches and the binaries that they ran; None where the driver cannot say what they take."""
        ready: list[ReadyLaunch] = []
        for binary, (_, _, _, arguments) in zip(binaries, launches):
            addresses = [i for i, argument in enumerate(arguments) if isinstance(argument, Tensor)]
            launch = ready_launch(binary, [None if isinstance(argument, Tensor) else argument for argument in arguments], addresses, counts.device.index)
            if launch is None:
                return None
            ready.append(launch)
        return ReadyPlan(plan, counts, [programs for _, programs, _, _ in launches], ready)

    def build(self, topk_ids: Tensor) -> RoutingPlan:
        """The plan of topk_ids, on the current device."""
        parts = new_empties(topk_ids, self.shapes)
        device = topk_ids.device
        self.launch(current_stream(device.index), topk_ids.data_ptr(), runtime.error_word(device).data_ptr(), [part.data_ptr() for part in parts])
        return RoutingPlan(*parts[:-1])

    def launch(self, stream: int, ids: int, error_word: int, parts: Sequence[int]) -> None:
        """Launch on the current device; arguments after the stream as `steps` has them."""
        for launch, (programs, values) in zip(self.launches, self.steps(ids, error_word, parts)):
            launch(programs, stream, *values)

    def steps(self, ids: int, error_word: int, parts: Sequence[int]) -> tuple[tuple[int, Sequence[int]], ...]:
        """(programs, what varies) of each launch; all are addresses, parts those of memory of `shapes`."""
        chunks, groups, programs = self._programs
        *maps, counts = parts
        return (chunks, (ids, error_word, counts)), (groups, (counts, maps[_TOKENS_PER_EXPERT])), (programs, (ids, counts, *maps))


def _keep_ready(size: tuple, make: Callable[[], ReadyPlan | None]) -> None:
    """Keep what `make` gives the second time that ids of this size and layout come (sizes that never repeat cost nothing), also None: not to be asked again."""
    with runtime.lock:
        kept, seen = runtime.scratch.setdefault(_READY, {}), runtime.scratch.setdefault(_SEEN, set())
        if size in kept:
            return
        if size not in seen:
            if len(seen) >= MAX_READY:
                seen.clear()
            seen.add(size)
            return
    ready = make()
    with runtime.lock:
        if len(kept) >= MAX_READY:
            kept.clear()
        kept[size] = ready


def run_launches(launches: tuple, variant: tuple | None, device_index: int | None) -> None:
    """Run (kernel, programs, options, all arguments in order) each; from a variant's second time on without Triton's look at the arguments.

    That look is most of a launch's host time and cannot change its answer: what it would specialise on is in `variant` or switched off.
    variant: None where an argument's type differs (a stride beyond 32 bits).
    """
    compiled = runtime.scratch.get(variant) if variant is not None else None
    if compiled is None:
        compiled = [kernel[(programs,)](*arguments, **options) for kernel, programs, options, arguments in launches]
        if variant is not None and None not in compiled:                # the interpreter compiles nothing
            runtime.scratch[variant] = compiled
        return
    stream, kept = current_stream(device_index), ("ready launches", variant)
    if kept not in runtime.scratch:
        runtime.scratch[kept] = [ready_launch(binary, arguments, [param.num for param in kernel.params if not param.is_constexpr], device_index)
                                 for binary, (kernel, _, _, arguments) in zip(compiled, launches)]
    for binary, ready, (kernel, programs, _, arguments) in zip(compiled, runtime.scratch[kept], launches):
        if ready is not None:
            values = [value.data_ptr() if isinstance(value, Tensor) else value for value in arguments]
            ready(programs, stream, *[values[param.num] for param in kernel.params if not param.is_constexpr])
            continue
        binary.run(programs, 1, 1, stream, binary.function, binary.packed_metadata, None, None, None, *arguments)


def chunking(num_slots: int) -> tuple[int, int]:
    """(slots in a chunk, a multiple of BLOCK_RANK; number of chunks, 1..MAX_CHUNKS). chunking(1000) == (32, 32)"""
    chunk_slots = max(1, triton.cdiv(num_slots, MAX_CHUNKS * BLOCK_RANK)) * BLOCK_RANK
    return chunk_slots, max(1, triton.cdiv(num_slots, chunk_slots))


def compile_sources() -> list[tuple[str, object, dict[str, int]]]:
    """(name, ASTSource, compile options) of every variant, for a compile check on a machine without a GPU."""
    from triton.compiler import ASTSource

    sources = []
    for experts in EXPERT_CLASSES:
        constexprs = {
            _scan_chunks_kernel: {"EXPERTS": experts, "CHUNKS": MAX_CHUNKS, "BLOCK": BLOCK_EXPERTS},
            _count_slots_kernel: {"EXPERTS": experts, "BLOCK": BLOCK_COUNT, "RADIX": EXPERT_RADIX},
            _scatter_slots_kernel: {"EXPERTS": experts, "BLOCK": BLOCK_RANK, "BLOCK_M": BLOCK_M, "TILES": BLOCK_TILES},
        }
        for kernel, constants in constexprs.items():
            for ids in ("i32", "i64"):
                if kernel is _scan_chunks_kernel and ids == "i64":
                    continue                                            # launch 2 does not read the ids
                types = {"topk_ids": f"*{ids}", "error_word": "*i64", "expert_offsets": "*i64", **dict.fromkeys(_NOT_SPECIALIZED, "i32"),
                         **dict.fromkeys(constants, "constexpr")}
                signature = {name: types.get(name, "*i32") for name in kernel.arg_names}
                options = SCATTER_LAUNCH if kernel is _scatter_slots_kernel else LAUNCH
                sources.append((f"plan{kernel.__name__}_{ids}_E{experts}", ASTSource(kernel, signature, constants), options))
    return sources
