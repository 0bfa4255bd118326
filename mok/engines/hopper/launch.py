"""Host side of the forward kernel: descriptors, scratch, counters and the cooperative launch; never waits for the GPU."""
from __future__ import annotations

import ctypes
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...config import Overlap
from ...plan import RoutingPlan
from ...runtime import runtime
from ..protocol import MoETensors, PassOptions, Saved
from . import cache_keys, ready_arguments
from .compat import COMPILE_OPTIONS, current_stream, new_empty, on_device
from .driver import library
from .forward import INTEGERS, MOVER_WARPS, WIDTHS, ForwardConfig, _forward_kernel
from .state import launch_state

cache_keys.settle()

TILE = 128                                    # rows of a row tile; equals tasks.BLOCK_M
L2_BYTES = 24 << 20                           # of an H200's L2 that a working set has (runs/traffic_model.py: half of it)
FEW_ROWS = 1536                               # an expert's rows on average below which CTAs take tasks by ticket (`granularity`)
MAX_GROUP = 2048                              # 262144 rows; keeps the tasks of a phase below 2^20 for H and I up to 65536 (tasks.locate)
SUSTAINED_TFLOPS = 650                        # of one H200 in a long bf16 GEMM; only a time scale here
ACTIVATION_IDS = {"swiglu": 0, "swiglu_oai": 1, "geglu": 2, "reglu": 3}
LAUNCH = {"num_warps": 4, "launch_cooperative_grid": True, **COMPILE_OPTIONS}

# Box of each descriptor argument, in elements; every inner dimension is 64 bf16 = one 128-byte swizzle row.
BOXES = {"rows_desc": (128, 64), "up_desc": (1, 2, 128, 64), "hidden_desc": (128, 64), "hidden_store_desc": (64, 64), "down_desc": (1, 256, 64),
         "results_desc": (64, 64), "z_desc": (64, 1, 64), "x_desc": (128, 64), "shared_hidden_desc": (128, 64), "shared_hidden_store_desc": (64, 64),
         "shared_up_0": (2, 128, 64), "shared_down_0": (256, 64), "shared_z_0": (64, 1, 64), "shared_up_1": (2, 128, 64), "shared_down_1": (256, 64),
         "shared_z_1": (64, 1, 64)}
LAYOUTS = {rank: gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank) for rank in (2, 3, 4)}
_POINTER_TYPES = {**dict.fromkeys(("x", "ring", "results", "out", "bias_up", "bias_down", "gate_0", "gate_1"), "*bf16"), "topk_weights": "*fp32"}
_STATE, _CAPACITY = (_forward_kernel.arg_names.index(name) for name in ("state", "capacity"))
_ALIGNED = ("x", "ring", "results", "out", *WIDTHS)


def activation_id(options: PassOptions) -> int:
    """The forward kernel's number of an activation; swiglu without a clamp has its own short path (gemm.ACT_SWIGLU_PLAIN)."""
    return 4 if options.activation == "swiglu" and options.swiglu_limit is None else ACTIVATION_IDS[options.activation]


@dataclass(frozen=True)
class Granularity:
    """Row tiles of a group (G) and of the rings of x rows and of h; whether a CTA that is free takes the next task (gemm.producer).

    Any values with row_ring >= G and hidden_ring >= 2 G give the same bits.
    """
    group: int
    row_ring: int
    hidden_ring: int
    tickets: bool = False

    def __post_init__(self) -> None:
        # A ring shorter than this waits for tasks that stand later in the order: a deadlock.
        if self.group < 1 or self.row_ring < self.group or self.hidden_ring < 2 * self.group:
            raise ValueError(f"{self} must have group >= 1, row_ring >= group and hidden_ring >= 2 * group")


def granularity(overlap: Overlap | None, H: int, I: int, card: float = 1.0, rows_per_expert: float = math.inf) -> Granularity:
    """The group that `overlap` asks for, or the measured default (H200, 2026-11-30): 16 tiles, 8 where I makes a group's weights outgrow L2.

    card: the part of the device's multiprocessors that this launch has; ranks that share a device share its L2 too, so their groups are smaller.
    rows_per_expert: on average, T*K / E_local. Tiles that are partly padding end early, and CTAs with tasks of their own drift apart then: they read weights
    that have left L2. So tasks go by ticket where an expert's weights outgrow L2, or many tiles are padding (docs/kernels.md has the measurements).

    The ring of x rows holds what the tensor cores read in about 100 us, and never less than two groups: a mover may be busy with a sum for
    10 us when a place becomes free, and every late row stalls a group. Qwen3-30B-A3B: 32 tiles 0.70 of the roof, 64 tiles 0.76.
    """
    if overlap is not None and overlap.minibatch_rows is not None:
        group = min(overlap.minibatch_rows // TILE, MAX_GROUP)
    else:
        group = max(2, round((16 if I <= 8192 else 8) * card))
    tile_us = 6e-6 * TILE * H * I / (SUSTAINED_TFLOPS * card)
    ahead = min(max(group, math.ceil(100 / tile_us)), 8 * group)
    return Granularity(group, group + ahead, 3 * group, rows_per_expert < FEW_ROWS or 6 * H * I > L2_BYTES)


def mover_warps(overlap: Overlap | None) -> int:
    """Compiled numbers of mover warps are 1 and 2: more than 2 asked for run as 2; default 2."""
    asked = 2 if overlap is None or overlap.mover_warps is None else overlap.mover_warps
    return next(warps for warps in MOVER_WARPS if warps >= min(asked, MOVER_WARPS[-1]))


@dataclass(frozen=True)
class ScratchSizes:
    """Elements (bf16) of each scratch buffer of one forward launch. Their sum times 2 is `bytes`; counters add 40 bytes a row tile, once."""
    ring: int
    hidden: int
    results: int
    shared_hidden: int
    order: int

    @property
    def elements(self) -> int:
        return self.ring + self.hidden + self.results + self.shared_hidden + self.order

    @property
    def bytes(self) -> int:
        return 2 * self.elements


def scratch_sizes(T: int, H: int, I: int, rows: int, shared_widths: Sequence[int], grain: Granularity, several_ranks: bool = False) -> ScratchSizes:
    """Scratch of one launch: ring of x rows, ring of h, results of every routed row (on several ranks they go into their slots at home instead) and of every
    shared expert, h of the shared experts, token list."""
    tiles = rows // TILE
    token_rows = (T + TILE - 1) // TILE * TILE * len(shared_widths)
    return ScratchSizes(ring=min(grain.row_ring, tiles) * TILE * H, hidden=min(grain.hidden_ring, tiles) * TILE * I,
                        results=(token_rows if several_ranks else rows + token_rows) * H, shared_hidden=token_rows * max(shared_widths, default=0), order=2 * T)


@dataclass(frozen=True)
class GroupLaunch:
    """What a launch on several ranks has of its group: its control block, and how many CTAs may be resident beside those of other ranks.

    card: those CTAs' part of the device's multiprocessors. wave_tiles: row tiles of this rank's buffers where they are bounded (wave_loop.py).
    """
    state: Tensor
    capacity: int                # of the control block, in row tiles
    blocks: int
    cooperative: bool
    card: float
    wave_tiles: int | None = None

    def rows(self, plan: RoutingPlan) -> int:
        """Rows of the routed buffers of a pass."""
        return plan.num_rows if self.wave_tiles is None else min(plan.num_rows, self.wave_tiles * TILE)

    @property
    def options(self) -> dict[str, Any]:
        return {**LAUNCH, "launch_cooperative_grid": self.cooperative}


def forward(plan: RoutingPlan, tensors: MoETensors, options: PassOptions, config: ForwardConfig | None = None, grain: Granularity | None = None,
            reserve_sms: int | None = None, group: GroupLaunch | None = None) -> tuple[Tensor, Saved]:
    """One launch of the forward pass on x's device and current stream: y (T, H) and what backward needs. `config`, `grain`: for tests and tuning.

    group: on several ranks, all of which launch, those without tokens too. Raises ValueError where reserve_sms leaves no multiprocessor.
    """
    with on_device(tensors.x):
        return _forward_there(plan, tensors, options, config, grain, reserve_sms, group)


def _forward_there(plan: RoutingPlan, tensors: MoETensors, options: PassOptions, config: ForwardConfig | None, grain: Granularity | None,
                   reserve_sms: int | None, group: GroupLaunch | None) -> tuple[Tensor, Saved]:
    """`forward` on the current device."""
    x = tensors.x
    T, H = x.shape
    I = tensors.w_down.shape[2]
    widths = tuple([expert.w_down.shape[1] for expert in tensors.shared])
    out = new_empty(x, (T, H), x.dtype)
    rows = plan.num_rows if group is None else group.rows(plan)
    saved_rows, saved_tokens = (rows, T) if options.save_for_backward else (0, 0)
    z = new_empty(x, (saved_rows, 2 * I), x.dtype)
    shared_z = new_empty(x, (saved_tokens, 2 * sum(widths)), x.dtype)
    if T == 0 and group is None:
        return out, Saved(z, shared_z)
    if T == 0:
        tensors, widths = replace(tensors, shared=()), ()             # TMA cannot describe an array without rows
    settings = (config, grain, options.overlap, None if group is None else (group.cooperative, group.wave_tiles, group.blocks, group.card))
    if grain is None:
        rows_per_expert = T * tensors.topk_weights.shape[1] / tensors.w_down.shape[0]
        grain, sizes = _default_sizes(T, H, I, rows, widths, options.overlap, 1.0 if group is None else group.card, rows_per_expert,
                                      group is not None)
    else:
        sizes = scratch_sizes(T, H, I, rows, widths, grain, group is not None)
    scratch = new_empty(x, (sizes.elements,), x.dtype)
    if reserve_sms is None:
        reserve_sms = (options.overlap.reserve_sms if options.overlap else None) or 0
    key = _key(plan, tensors, options, out, z, shared_z, scratch, settings)
    found = ready_arguments.find_launch(key)
    if found is not None and reserve_sms < found[1]:
        state, capacity = _launch_state(plan, tensors, group)
        found[0](found[1] - reserve_sms, current_stream(x.device.index), state.data_ptr(), capacity)
        return out, Saved(z, shared_z)
    config = config or ForwardConfig(options.save_for_backward, mover_warps(options.overlap) if group is None else 2, group is not None,
                                     group is not None and group.wave_tiles is not None)
    arguments = _ready_list(plan, tensors, options, out, z, shared_z, scratch, sizes, grain, key, group)
    if group is None:
        blocks = resident_blocks(config, x.device.index, lambda: _forward_kernel.warmup(*arguments, grid=(1,), **config.constexprs(), **LAUNCH))
    else:
        blocks = group.blocks
    if reserve_sms >= blocks:
        raise ValueError(f"{reserve_sms=} must be less than the {blocks} blocks that fit on {x.device}")
    launch_kernel(_forward_kernel, config, x.device.index, blocks - reserve_sms, arguments, key, (_STATE, _CAPACITY), blocks,
                  LAUNCH if group is None else group.options)
    return out, Saved(z, shared_z)


@lru_cache(maxsize=4096)
def _default_sizes(T: int, H: int, I: int, rows: int, shared_widths: tuple[int, ...], overlap: Overlap | None, card: float,
                   rows_per_expert: float, several_ranks: bool) -> tuple[Granularity, ScratchSizes]:
    grain = granularity(overlap, H, I, card, rows_per_expert)
    return grain, scratch_sizes(T, H, I, rows, shared_widths, grain, several_ranks)


def _launch_state(plan: RoutingPlan, tensors: MoETensors, group: GroupLaunch | None) -> tuple[Tensor, int]:
    if group is not None:
        return group.state, group.capacity
    return launch_state(tensors.x.device, max(plan.num_rows // TILE, 4 * -(-tensors.x.shape[0] // TILE) * len(tensors.shared)))


def _key(plan: RoutingPlan, tensors: MoETensors, options: PassOptions, out: Tensor, z: Tensor, shared_z: Tensor, scratch: Tensor,
         settings: Hashable) -> Hashable:
    """What the kernel's run-time arguments depend on; settings: what chose the granularity."""
    x = tensors.x
    read = [x, tensors.topk_weights, tensors.w_gate_up, tensors.w_down, tensors.b_gate_up, tensors.b_down]
    for expert in tensors.shared:
        read += (expert.w_gate_up, expert.w_down, expert.gate_weight)
    return ready_arguments.key_of((settings, options.activation, options.swiglu_limit, options.save_for_backward, x.device, plan.num_rows), read,
                                  (out, z, shared_z, scratch, *plan.tensors()))


def load(plan: RoutingPlan, tensors: MoETensors, options: PassOptions, config: ForwardConfig, group: GroupLaunch) -> None:
    """Compile and load the variant that `forward` with these arguments would launch; run nothing."""
    H, I = tensors.x.shape[1], tensors.w_down.shape[2]
    grain = granularity(options.overlap, H, I, group.card)
    sizes = scratch_sizes(tensors.x.shape[0], H, I, group.rows(plan), [], grain, True)
    scratch = tensors.x.new_empty(sizes.bytes // 2)
    z = tensors.x.new_empty((group.rows(plan), 2 * I))
    arguments = _arguments(plan, tensors, options, torch.empty_like(tensors.x), z, z, scratch, sizes, grain, group.state, group.capacity, group)
    _forward_kernel.warmup(*arguments, grid=(group.blocks,), **config.constexprs(), **group.options)._init_handles()


def _ready_list(plan: RoutingPlan, tensors: MoETensors, options: PassOptions, out: Tensor, z: Tensor, shared_z: Tensor, scratch: Tensor,
                sizes: ScratchSizes, grain: Granularity, key: Hashable, group: GroupLaunch | None) -> list[Any]:
    """The kernel's run-time arguments, taken from an earlier launch like this one where there was one."""
    state, capacity = _launch_state(plan, tensors, group)
    arguments = ready_arguments.find(key)
    if arguments is None:
        arguments = _arguments(plan, tensors, options, out, z, shared_z, scratch, sizes, grain, state, capacity, group)
        read = (tensors.x, tensors.topk_weights, tensors.w_gate_up, tensors.w_down, tensors.b_gate_up, tensors.b_down, out, z, shared_z, scratch,
                *plan.tensors(), *(part for expert in tensors.shared for part in (expert.w_gate_up, expert.w_down, expert.gate_weight)))
        ready_arguments.keep(key, arguments, (*read, state))
    else:
        arguments[_STATE], arguments[_CAPACITY] = state.data_ptr(), capacity      # the stream's block, or a captured launch's own
    return arguments


def _arguments(plan: RoutingPlan, tensors: MoETensors, options: PassOptions, out: Tensor, z: Tensor, shared_z: Tensor, scratch: Tensor,
               sizes: ScratchSizes, grain: Granularity, state: Tensor, capacity: int, group: GroupLaunch | None = None) -> list[Any]:
    """The kernel's run-time arguments, in its order."""
    ring, hidden, results, shared_hidden, order = scratch.split([sizes.ring, sizes.hidden, sizes.results, sizes.shared_hidden, sizes.order])
    results = results if sizes.results else scratch                   # several ranks without shared experts: nothing is stored there
    x = rows_readable(tensors.x, for_tma=bool(tensors.shared))
    T, H = x.shape
    I = tensors.w_down.shape[2]
    rows = plan.num_rows if group is None else group.rows(plan)
    count = len(tensors.shared)
    token_tiles = (T + TILE - 1) // TILE
    dummy = descriptor("results_desc", results, (TILE, H), (H, 1))
    descriptors = dict.fromkeys(BOXES, dummy)
    descriptors["rows_desc"] = descriptor("rows_desc", ring, (max(sizes.ring // H, 1), H), (H, 1))
    up, down = tma_readable(tensors.w_gate_up), tma_readable(tensors.w_down)
    E = up.shape[0]
    descriptors["up_desc"] = descriptor("up_desc", up, (E, 2, I, H), (up.stride(0), I * up.stride(1), up.stride(1), 1))
    descriptors["down_desc"] = descriptor("down_desc", down, (E, H, I), down.stride())
    for name in ("hidden_desc", "hidden_store_desc"):
        descriptors[name] = descriptor(name, hidden, (sizes.hidden // I, I), (I, 1))
    routed_results = rows if group is None else 0                      # on several ranks those are in slots
    if sizes.results:
        descriptors["results_desc"] = descriptor("results_desc", results, (routed_results + count * token_tiles * TILE, H), (H, 1))
    save = options.save_for_backward
    if save:
        descriptors["z_desc"] = descriptor("z_desc", z, (rows, 2, I), (2 * I, I, 1))
    if count:
        _shared_descriptors(descriptors, tensors, x, shared_z if save else None, shared_hidden, count * token_tiles * TILE)
    for name, box in BOXES.items():
        if descriptors[name] is dummy and name != "results_desc":
            descriptors[name] = descriptor(name, results, (1,) * (len(box) - 1) + (16,), (16,) * (len(box) - 1) + (1,))
    widths = [expert.w_down.shape[1] for expert in tensors.shared] + [0, 0]
    gates = [out if expert.gate_weight is None else expert.gate_weight.contiguous() for expert in tensors.shared] + [out, out]
    gated = sum(1 << i for i, expert in enumerate(tensors.shared) if expert.gate_weight is not None)
    limit = options.swiglu_limit
    if limit is None:
        limit = 7.0 if options.activation == "swiglu_oai" else float("inf")
    biases = [out if bias is None else bias.contiguous() for bias in (tensors.b_gate_up, tensors.b_down)]
    return [*(descriptors[name] for name in BOXES), x, ring, results, out, plan.row_to_slot, plan.slot_to_row, plan.tile_to_expert,
            plan.num_tiles, tensors.topk_weights.contiguous(), order.view(torch.int32), *biases, gates[0], gates[1], state,
            H, I, widths[0], widths[1], T, tensors.topk_weights.shape[1], count, x.stride(0) // 8, capacity, grain.group, grain.row_ring,
            grain.hidden_ring, routed_results, int(tensors.b_gate_up is not None), int(tensors.b_down is not None), gated, activation_id(options), float(limit),
            plan.row_to_rank, int(grain.tickets), plan.num_tiles if plan.wave_tiles is None else plan.wave_tiles, rows // TILE]


def _shared_descriptors(descriptors: dict[str, Any], tensors: MoETensors, x: Tensor, shared_z: Tensor | None, shared_hidden: Tensor,
                        shared_rows: int) -> None:
    """Fill in what shared experts need: x itself, their h, weights and z."""
    T, H = x.shape
    widths = [expert.w_down.shape[1] for expert in tensors.shared]
    descriptors["x_desc"] = descriptor("x_desc", x, (T, H), x.stride())
    for name in ("shared_hidden_desc", "shared_hidden_store_desc"):
        descriptors[name] = descriptor(name, shared_hidden, (shared_rows, max(widths)), (max(widths), 1))
    for i, expert in enumerate(tensors.shared):
        up, down = tma_readable(expert.w_gate_up), tma_readable(expert.w_down)
        descriptors[f"shared_up_{i}"] = descriptor(f"shared_up_{i}", up, (2, widths[i], H), (widths[i] * up.stride(0), up.stride(0), 1))
        descriptors[f"shared_down_{i}"] = descriptor(f"shared_down_{i}", down, (H, widths[i]), down.stride())
        if shared_z is not None:
            part = shared_z[:, 2 * sum(widths[:i]):]
            descriptors[f"shared_z_{i}"] = descriptor(f"shared_z_{i}", part, (T, 2, widths[i]), (shared_z.stride(0), widths[i], 1))


@dataclass(frozen=True)
class _Memory:
    """Address and dtype, which is all that a descriptor needs of a tensor: a cached descriptor must not keep its memory alive."""
    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


@lru_cache(maxsize=4096)
def _descriptor(name: str, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorDescriptor:
    box = BOXES[name]
    return TensorDescriptor(_Memory(address, torch.bfloat16), list(shape), list(strides), list(box), LAYOUTS[len(box)])


def descriptor(name: str, tensor: Tensor, shape: Sequence[int], strides: Sequence[int]) -> TensorDescriptor:
    """A cached TMA descriptor of bf16 memory that starts where `tensor` does."""
    return _descriptor(name, tensor.data_ptr(), tuple(shape), tuple(strides))


def tma_readable(weight: Tensor) -> Tensor:
    """The weight itself where TMA can read it (inner stride 1, other strides and address multiples of 16 bytes, rows not overlapping), else a copy."""
    strides = weight.stride()
    good = strides[-1] == 1 and all(s % 8 == 0 and s >= weight.shape[-1] for s in strides[:-1]) and weight.data_ptr() % 16 == 0
    return weight if good else weight.clone(memory_format=torch.contiguous_format)


def rows_readable(x: Tensor, for_tma: bool) -> Tensor:
    """x itself where movers can read its rows in 16-byte vectors (any row stride that is a multiple of 8, also 0), else a copy."""
    row, inner = x.stride()
    good = inner == 1 and row % 8 == 0 and x.data_ptr() % 16 == 0 and (row >= x.shape[1] or not for_tma)
    return x if good else x.clone(memory_format=torch.contiguous_format)      # contiguous() would keep a contiguous x at an odd address


def launch_kernel(kernel: Any, config: Any, device_index: int, blocks: int, arguments: Sequence[Any], list_key: Hashable = None,
                  varying: Sequence[int] = (), resident: int = 0, options: dict[str, Any] | None = None) -> None:
    """Launch `kernel` with `config.constexprs()`; from a config's second launch on without Triton's look at the arguments, which may then be addresses.

    That look is half of a launch's host time and cannot change its answer: one config is one binary, whatever the arguments' values
    (nothing but the constant expressions selects a binary; a test counts binaries). A list that was found under `list_key` is made a ready launch
    there; varying: indices of what each launch brings; resident: blocks of this variant that are resident at once; options: LAUNCH, or a group's.
    """
    options = LAUNCH if options is None else options
    key = ("hopper binary", device_index, config, options["launch_cooperative_grid"])
    binary = runtime.scratch.get(key)
    constexprs = config.constexprs()
    if binary is None:
        runtime.scratch[key] = kernel[(blocks,)](*arguments, **constexprs, **options)
        return
    stream = current_stream(device_index)
    binary.run(blocks, 1, 1, stream, binary.function, binary.packed_metadata, None, None, None, *arguments, *constexprs.values())
    if list_key is not None and not any(isinstance(argument, Tensor) for argument in arguments):
        ready_arguments.keep_launch(list_key, binary, (*arguments, *constexprs.values()), varying, resident, device_index)


def resident_blocks(config: Hashable, device_index: int, compile_kernel: Any) -> int:
    """How many blocks of this variant are resident at once on the device: the occupancy query times its multiprocessors, asked once."""
    key = ("hopper resident blocks", device_index, config)
    if key not in runtime.scratch:
        kernel = compile_kernel()
        kernel._init_handles()
        per_sm = ctypes.c_int()
        status = library().cuOccupancyMaxActiveBlocksPerMultiprocessor(ctypes.byref(per_sm), ctypes.c_void_p(kernel.function),
                                                                    ctypes.c_int(32 * kernel.metadata.num_warps),
                                                                    ctypes.c_size_t(kernel.metadata.shared))
        if status or per_sm.value < 1:
            raise RuntimeError(f"the forward kernel does not fit on {torch.cuda.get_device_name(device_index)}: driver status {status}, "
                               f"{per_sm.value} blocks a multiprocessor")
        runtime.scratch[key] = per_sm.value * torch.cuda.get_device_properties(device_index).multi_processor_count
    return runtime.scratch[key]


def source(config: ForwardConfig) -> GluonASTSource:
    """One variant as Triton's compiler takes it, for compiling without a GPU: the types that a launch would give."""
    constexprs = config.constexprs()
    signature = {}
    for name in _forward_kernel.arg_names:
        if name in BOXES:
            signature[name] = f"tensordesc<bf16{list(BOXES[name])},{LAYOUTS[len(BOXES[name])]!r}>"
        elif name in constexprs:
            signature[name] = "constexpr"
        elif name in INTEGERS or name in WIDTHS:
            signature[name] = "i32"
        else:
            signature[name] = "fp32" if name == "limit" else _POINTER_TYPES.get(name, "*i32")
    aligned = {(_forward_kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in _ALIGNED}
    return GluonASTSource(_forward_kernel, signature, constexprs, aligned)


def group_variants() -> list[tuple[str, GluonASTSource, dict[str, Any]]]:
    """(name, source, compile options) of every production variant of the forward kernel on several ranks."""
    return [(f"forward_{'train' if save else 'no_grad'}_ranks{'_waves' * waves}", source(ForwardConfig(save, several_ranks=True, waves=waves)),
             {"num_warps": 4, **COMPILE_OPTIONS}) for waves in (False, True) for save in (False, True)]


def variants() -> list[tuple[str, GluonASTSource, dict[str, Any]]]:
    """(name, source, compile options) of every production variant of the forward kernel."""
    return [(f"forward_{'train' if save else 'no_grad'}_movers{warps}", source(ForwardConfig(save, warps)), {"num_warps": 4, **COMPILE_OPTIONS})
            for save in (False, True) for warps in MOVER_WARPS]
