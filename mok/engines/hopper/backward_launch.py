"""Host side of the backward kernel: descriptors, scratch, gradients and the cooperative launch; never waits for the GPU."""
from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...plan import RoutingPlan
from ..protocol import Grads, MainGrad, MoETensors, PassOptions, Saved, Wants
from . import ready_arguments
from .backward import INTEGERS, BackwardConfig, _backward_kernel
from .compat import COMPILE_OPTIONS, current_stream, new_empty, on_device
from .launch import ACTIVATION_IDS, LAUNCH, LAYOUTS, TILE, _Memory, launch_kernel, resident_blocks, rows_readable, tma_readable
from .state import CONTROL_WORDS, launch_state

CHUNK = 64                    # rows and columns of every box; equals backward_pipe.CHUNK
COLUMN_TILE = 256             # equals backward_tasks.TILE_N
VARIANTS = {"swiglu": 0, "clamped": 1, "geglu": 2, "reglu": 3}     # BackwardConfig.act of each compiled DH epilogue

# Ranks of the descriptor arguments that have leading dimensions of 1 in their box
_RANKS = {"up_desc": 4, "up_grad_desc": 4,
          **dict.fromkeys(("z_desc", "z_again_desc", "dz_desc", "down_desc", "down_grad_desc", "shared_dz_desc", "shared_z_0", "shared_up_0",
                           "shared_up_grad_0", "shared_z_1", "shared_up_1", "shared_up_grad_1"), 3)}
_FP32 = ("d_topk_weights", "carry", "main_up", "main_down", "gates", "gate_slopes", "partials", "topk_weights", "row_weights")
_BF16 = ("dy", "x", "dy_rows", "x_rows", "dz", "results", "dx", "b_up", "b_down", "db_up", "db_down", "gate_0", "gate_1", "d_gate_0", "d_gate_1",
         "d_up", "d_down", "d_shared_up_0", "d_shared_down_0", "d_shared_up_1", "d_shared_down_1")
_IS_DESCRIPTOR = re.compile(r"(?!shared_results).*_desc$|shared_(z|up|down)(_grad)?_[01]$")
DESCRIPTORS = tuple(name for name in _backward_kernel.arg_names if _IS_DESCRIPTOR.match(name))
_RUN_TIME = tuple(name for name in _backward_kernel.arg_names if not name.isupper() or name in INTEGERS)
_STATE, _SET_WORDS = _RUN_TIME.index("state"), _RUN_TIME.index("set_words")


@dataclass(frozen=True)
class BackwardScratch:
    """Scratch of one backward launch: elements of bf16 and of fp32 buffers. A buffer that no wanted gradient needs has none.

    dy_rows, x_rows, results (R, H); dz (R, 2I); wh (R, I); shared_dz, shared_wh: (num_shared * token rows, 2 or 1 times the widest I_s);
    partials, gates, gate_slopes in fp32. `results` holds the shared experts' rows behind the routed ones, which on several ranks are in slots at home instead.
    With recompute z (R, 2I) and shared_z (T, sum of 2I_s) stand where forward's would; they live as long as the launch. With waves z is that of later waves,
    and carry (fp32) has the unfinished sums that one wave leaves to the next (`carry_words`).
    """
    dy_rows: int
    x_rows: int
    dz: int
    wh: int
    results: int
    shared_dz: int
    shared_wh: int
    partials: int
    gates: int
    z: int = 0
    shared_z: int = 0
    carry: int = 0

    @property
    def narrow(self) -> int:
        """Elements of all bf16 buffers together."""
        return self.dy_rows + self.x_rows + self.dz + self.wh + self.results + self.shared_dz + self.shared_wh + self.z + self.shared_z

    @property
    def wide(self) -> int:
        """Elements of all fp32 buffers together."""
        return self.partials + 2 * self.gates + self.carry

    @property
    def bytes(self) -> int:
        return 2 * self.narrow + 4 * self.wide


def want_bits(wants: Wants) -> int:
    """`wants` as the kernel's word (backward_tasks.Schedule)."""
    flags = [wants.x, wants.topk_weights, wants.w_gate_up, wants.w_down, wants.b_gate_up, wants.b_down, False, False]
    for expert in wants.shared:
        flags += expert
    return sum(1 << i for i, flag in enumerate(flags) if flag)


def carry_words(H: int, I: int) -> int:
    """fp32 words of one expert's unfinished sums, twice (backward_waves.py): weight gradients in whole tiles, and bias gradients."""
    tiles = 2 * -(-I // TILE) * -(-H // COLUMN_TILE) + -(-H // TILE) * -(-I // COLUMN_TILE)
    return 2 * (tiles * TILE * COLUMN_TILE + 2 * I + H)


def backward_scratch(T: int, H: int, I: int, rows: int, shared_widths: Sequence[int], wants: Wants, recompute: bool = False,
                     waves: bool = False, several_ranks: bool = False) -> BackwardScratch:
    """Sizes of the scratch that these gradients need. recompute: z is made in the launch, from rows of x; waves: that of all waves but the first.

    several_ranks: rows of dx go into their slots at home instead of to results.
    """
    product = wants.x or wants.topk_weights or wants.w_gate_up or wants.b_gate_up
    token_rows = -(-T // TILE) * TILE
    count, widest = len(shared_widths), -(-max(shared_widths, default=0) // CHUNK) * CHUNK
    shared_product = count > 0 and (wants.x or any(up or gate for up, _, gate in wants.shared))
    columns = sum(-(-width // COLUMN_TILE) for width in shared_widths)
    z_again, shared_z_again = (recompute or waves) and (product or wants.w_down), recompute and (wants.x or any(any(want) for want in wants.shared))
    return BackwardScratch(
        dy_rows=rows * H if product or wants.w_down else 0,
        x_rows=rows * H if wants.w_gate_up or z_again else 0,
        dz=rows * 2 * I if wants.x or wants.w_gate_up or wants.b_gate_up else 0,
        wh=rows * I if wants.w_down else 0,
        results=(rows * (not several_ranks) + count * token_rows) * H if wants.x else 0,
        shared_dz=count * token_rows * 2 * widest if shared_product else 0,
        shared_wh=count * token_rows * widest if any(down for _, down, _ in wants.shared) else 0,
        partials=rows * -(-I // COLUMN_TILE) + token_rows * columns,
        gates=count * token_rows,
        z=rows * 2 * I if z_again else 0,
        shared_z=T * 2 * sum(shared_widths) if shared_z_again else 0,
        carry=carry_words(H, I) if waves and (wants.w_gate_up or wants.w_down or wants.b_gate_up or wants.b_down) else 0)


def hopper_backward(plan: RoutingPlan, tensors: MoETensors, options: PassOptions, saved: Saved, dy: Tensor, wants: Wants, main_grad: MainGrad | None,
                    config: BackwardConfig | None = None, group_tiles: int | None = None, reserve_sms: int | None = None) -> Grads:
    """Gradients of the layer's inputs for dy (T, H) in one launch on x's device and current stream, as `Engine.backward` has it.

    `config`, `group_tiles` (row tiles that go from dh to dx together), `reserve_sms`: for tests and tuning; none changes a bit.
    Raises ValueError where reserve_sms leaves no multiprocessor.
    """
    with on_device(tensors.x):
        grads = _empty_grads(tensors, wants, main_grad)
        if tensors.x.shape[0] == 0:
            return _zeroed(grads)
        if _nothing_wanted(wants):
            return grads
        if reserve_sms is None:
            reserve_sms = (options.overlap.reserve_sms if options.overlap else None) or 0
        recompute = options.recompute is not None if config is None else bool(config.recompute)
        buffers = _buffers(plan, tensors, wants, recompute)
        key = _key(plan, tensors, options, saved, dy, wants, main_grad, grads, (config, group_tiles, options.overlap), buffers)
        found = ready_arguments.find_launch(key)
        if found is not None and reserve_sms < found[1]:
            state = _launch_state(plan, tensors, recompute)
            found[0](found[1] - reserve_sms, current_stream(tensors.x.device.index), state.data_ptr(), _set_words(state))
            return grads
        config = config or BackwardConfig(VARIANTS[_variant(options)], recompute=recompute)
        group_tiles = group_tiles or _group_tiles(options, tensors)
        arguments = _launch_arguments(plan, tensors, options, saved, dy, wants, main_grad, grads, group_tiles, buffers, key, recompute)
        blocks = resident_blocks(config, tensors.x.device.index, lambda: _backward_kernel.warmup(*arguments, grid=(1,), **config.constexprs(), **LAUNCH))
        if reserve_sms >= blocks:
            raise ValueError(f"{reserve_sms=} must be less than the {blocks} blocks that fit on {tensors.x.device}")
        launch_kernel(_backward_kernel, config, tensors.x.device.index, blocks - reserve_sms, arguments, key, (_STATE, _SET_WORDS), blocks)
    return grads


def _group_tiles(options: PassOptions, tensors: MoETensors) -> int:
    asked = options.overlap.minibatch_rows if options.overlap else None
    return asked // TILE if asked else default_group(*tensors.w_down.shape[1:])


def default_group(H: int, I: int) -> int:
    """Row tiles of a group: enough for 400 tasks (three to a multiprocessor) between a DH task and the DX tasks that need its dz, 8 to 64.

    With fewer the DX tasks wait: a DH task takes 35 us there, and its epilogue cannot hide.
    """
    tasks_a_tile = -(-I // COLUMN_TILE) + -(-H // COLUMN_TILE)
    return min(64, max(8, -(-400 // tasks_a_tile)))


def _variant(options: PassOptions) -> str:
    if options.activation in ("geglu", "reglu"):
        return options.activation
    return "swiglu" if options.activation == "swiglu" and options.swiglu_limit is None else "clamped"


def _empty_grads(tensors: MoETensors, wants: Wants, main_grad: MainGrad | None) -> Grads:
    """Memory for the wanted gradients; the kernel writes every element of it."""
    def like(tensor: Tensor | None, wanted: bool) -> Tensor | None:
        return new_empty(tensor, tensor.shape, tensor.dtype) if wanted and tensor is not None else None

    into_main = main_grad is not None
    shared = [(like(expert.w_gate_up, up), like(expert.w_down, down), like(expert.gate_weight, gate))
              for expert, (up, down, gate) in zip(tensors.shared, wants.shared, strict=True)]
    return Grads(like(tensors.x, wants.x), like(tensors.topk_weights, wants.topk_weights), like(tensors.w_gate_up, wants.w_gate_up and not into_main),
                 like(tensors.w_down, wants.w_down and not into_main), like(tensors.b_gate_up, wants.b_gate_up), like(tensors.b_down, wants.b_down), shared)


def _zeroed(grads: Grads) -> Grads:
    for grad in (grads.x, grads.topk_weights, grads.w_gate_up, grads.w_down, grads.b_gate_up, grads.b_down, *(part for s in grads.shared for part in s)):
        if grad is not None:
            grad.zero_()
    return grads


def _launch_arguments(plan: RoutingPlan, tensors: MoETensors, options: PassOptions, saved: Saved, dy: Tensor, wants: Wants, main_grad: MainGrad | None,
                      grads: Grads, group_tiles: int, buffers: tuple[BackwardScratch, Tensor, Tensor], key: Hashable,
                      recompute: bool) -> list[Any]:
    """The kernel's run-time arguments, taken from an earlier launch like this one where there was one."""
    state = _launch_state(plan, tensors, recompute)
    arguments = ready_arguments.find(key)
    if arguments is None:
        arguments = _arguments(plan, tensors, options, saved, dy, wants, main_grad, grads, group_tiles, *buffers, state, recompute)
        read, own = _touched(plan, tensors, saved, dy, main_grad, grads, buffers)
        ready_arguments.keep(key, arguments, (*read, *own, state))
    else:
        arguments[_STATE], arguments[_SET_WORDS] = state.data_ptr(), _set_words(state)      # the stream's block, or a captured launch's own
    return arguments


def _launch_state(plan: RoutingPlan, tensors: MoETensors, recompute: bool) -> Tensor:
    row_tiles, token_tiles, count = plan.num_rows // TILE, -(-tensors.x.shape[0] // TILE), len(tensors.shared)
    tiles = 2 * row_tiles + (count + 1) * token_tiles + tensors.w_down.shape[0] + ((1 + row_tiles + count * token_tiles) if recompute else 0)
    return launch_state(tensors.x.device, -(-tiles // 4))[0]


def _buffers(plan: RoutingPlan, tensors: MoETensors, wants: Wants, recompute: bool) -> tuple[BackwardScratch, Tensor, Tensor]:
    """The launch's scratch: sizes, bf16 and fp32 memory."""
    x = tensors.x
    sizes = _scratch_of(*x.shape, tensors.w_down.shape[2], plan.num_rows, tuple([expert.w_down.shape[1] for expert in tensors.shared]), wants,
                        recompute)
    return sizes, new_empty(x, (sizes.narrow,), x.dtype), new_empty(x, (sizes.wide,), torch.float32)


@lru_cache(maxsize=4096)
def _scratch_of(T: int, H: int, I: int, rows: int, shared_widths: tuple[int, ...], wants: Wants, recompute: bool, waves: bool = False,
                several_ranks: bool = False) -> BackwardScratch:
    return backward_scratch(T, H, I, rows, shared_widths, wants, recompute, waves, several_ranks)


@lru_cache(maxsize=4096)
def _nothing_wanted(wants: Wants) -> bool:
    return want_bits(wants) == 0


def _touched(plan: RoutingPlan, tensors: MoETensors, saved: Saved, dy: Tensor, main_grad: MainGrad | None, grads: Grads,
             buffers: tuple[BackwardScratch, Tensor, Tensor]) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """(the caller's tensors, in any layout; contiguous ones whose shapes follow from theirs) that a launch reads or writes."""
    read = [tensors.x, dy, tensors.topk_weights, tensors.w_gate_up, tensors.w_down, tensors.b_gate_up, tensors.b_down]
    for expert in tensors.shared:
        read += (expert.w_gate_up, expert.w_down, expert.gate_weight)
    own = [saved.z, saved.shared_z, *buffers[1:], *plan.tensors(),
           grads.x, grads.topk_weights, grads.w_gate_up, grads.w_down, grads.b_gate_up, grads.b_down]
    for parts in grads.shared:
        own += parts
    if main_grad is not None:
        own += (main_grad.w_gate_up, main_grad.w_down)
    return read, own


def _key(plan: RoutingPlan, tensors: MoETensors, options: PassOptions, saved: Saved, dy: Tensor, wants: Wants, main_grad: MainGrad | None,
         grads: Grads, settings: Hashable, buffers: tuple[BackwardScratch, Tensor, Tensor]) -> Hashable:
    """What the kernel's run-time arguments depend on; settings: what chose the variant and the groups."""
    return ready_arguments.key_of((settings, options.activation, options.swiglu_limit, options.recompute, wants, main_grad is None, tensors.x.device,
                                   plan.num_rows), *_touched(plan, tensors, saved, dy, main_grad, grads, buffers))


def _set_words(state: Tensor) -> int:
    return (state.numel() - CONTROL_WORDS) // 2


def _arguments(plan: RoutingPlan, tensors: MoETensors, options: PassOptions, saved: Saved, dy: Tensor, wants: Wants, main_grad: MainGrad | None,
               grads: Grads, group_tiles: int, sizes: BackwardScratch, narrow: Tensor, wide: Tensor, state: Tensor,
               recompute: bool, waves: bool = False, several_ranks: bool = False) -> list[Any]:
    """The kernel's run-time arguments, in its order."""
    x = rows_readable(tensors.x, for_tma=bool(tensors.shared))
    dy = rows_readable(dy, for_tma=bool(tensors.shared))
    T, H = x.shape
    E, _, I = tensors.w_down.shape
    rows = plan.num_rows
    widths = [expert.w_down.shape[1] for expert in tensors.shared]
    count, token_tiles = len(widths), -(-T // TILE)
    dy_rows, x_rows, dz, wh, results, shared_dz, shared_wh, z, shared_z = narrow.split(
        [sizes.dy_rows, sizes.x_rows, sizes.dz, sizes.wh, sizes.results, sizes.shared_dz, sizes.shared_wh, sizes.z, sizes.shared_z])
    if recompute:
        saved = Saved(z.view(-1, 2 * I), shared_z.view(T if sizes.shared_z else 0, 2 * sum(widths)))
    carry, partials, gates, gate_slopes = wide.split([sizes.carry, sizes.partials, sizes.gates, sizes.gates])

    boxes: dict[str, tuple[Tensor, Sequence[int], Sequence[int]]] = {}
    up, down = tma_readable(tensors.w_gate_up), tma_readable(tensors.w_down)
    boxes["up_desc"] = (up, (E, 2, I, H), (up.stride(0), I * up.stride(1), up.stride(1), 1))
    boxes["down_desc"] = (down, (E, H, I), down.stride())
    boxes["z_desc"] = (saved.z, (2, rows, I), (I, 2 * I, 1))
    if waves:
        boxes["z_again_desc"] = (z, (2, rows, I), (I, 2 * I, 1))
    for name, buffer, width in (("dy_rows_desc", dy_rows, H), ("x_rows_desc", x_rows, H), ("wh_desc", wh, I)):
        boxes[name] = (buffer, (rows, width), (width, 1))
    boxes["dz_desc"] = (dz, (2, rows, I), (I, 2 * I, 1))
    routed_results = 0 if several_ranks else rows
    boxes["results_desc"] = (results, (routed_results + count * token_tiles * TILE, H), (H, 1))
    if grads.w_gate_up is not None:
        boxes["up_grad_desc"] = (grads.w_gate_up, (E, 2, I, H), (2 * I * H, I * H, H, 1))
    if grads.w_down is not None:
        boxes["down_grad_desc"] = (grads.w_down, (E, H, I), (H * I, I, 1))
    if count:
        _shared_boxes(boxes, tensors, saved, dy, x, shared_dz, shared_wh, grads)
    gate_weights = [expert.gate_weight for expert in tensors.shared]
    d_shared = [*grads.shared, (None, None, None), (None, None, None)]
    # A gate's value is needed wherever anything of its shared expert is
    gated = sum(1 << i for i, weight in enumerate(gate_weights) if weight is not None and (wants.x or any(wants.shared[i])))
    limit = options.swiglu_limit
    if limit is None:
        limit = 7.0 if options.activation == "swiglu_oai" else float("inf")
    has_b_down = tensors.b_down is not None and wants.topk_weights
    has_b_up = tensors.b_gate_up is not None and (recompute or waves)
    values: dict[str, Any] = {
        "dy": dy, "x": x, "dy_rows": dy_rows, "x_rows": x_rows, "dz": dz, "results": results, "dx": grads.x, "d_topk_weights": grads.topk_weights,
        "main_up": main_grad.w_gate_up if main_grad else None, "main_down": main_grad.w_down if main_grad else None,
        "b_down": tensors.b_down.contiguous() if has_b_down and tensors.b_down is not None else None, "db_up": grads.b_gate_up, "db_down": grads.b_down,
        "gate_0": gate_weights[0] if count else None, "gate_1": gate_weights[1] if count > 1 else None,
        "d_gate_0": d_shared[0][2], "d_gate_1": d_shared[1][2], "d_up": grads.w_gate_up, "d_down": grads.w_down,
        "d_shared_up_0": d_shared[0][0], "d_shared_down_0": d_shared[0][1], "d_shared_up_1": d_shared[1][0], "d_shared_down_1": d_shared[1][1],
        "gates": gates, "gate_slopes": gate_slopes, "partials": partials, "topk_weights": tensors.topk_weights.contiguous(),
        "row_to_slot": plan.row_to_slot, "slot_to_row": plan.slot_to_row,
        "tile_to_expert": plan.tile_to_expert, "expert_offsets": plan.expert_offsets, "tokens_per_expert": plan.tokens_per_expert,
        "num_tiles_ptr": plan.num_tiles, "state": state, "T": T, "K": tensors.topk_weights.shape[1], "E": E, "H_16": H // 16, "I_16": I // 16,
        "shared_I_16_0": widths[0] // 16 if count else 0, "shared_I_16_1": widths[1] // 16 if count > 1 else 0, "num_shared": count,
        "x_stride_8": x.stride(0) // 8, "dy_stride_8": dy.stride(0) // 8, "capacity": rows // TILE, "set_words": _set_words(state),
        "group_tiles": group_tiles, "shared_results_row": routed_results, "features": gated | (4 if has_b_down else 0) | (8 if main_grad else 0)
        | (16 if has_b_up else 0),
        "wants": want_bits(wants), "activation": ACTIVATION_IDS[options.activation], "limit": float(limit),
        "b_up": tensors.b_gate_up.contiguous() if has_b_up and tensors.b_gate_up is not None else None,
        "row_to_rank": plan.row_to_rank, "row_weights": None, "pass_number": 0,                # the latter two on several ranks alone
        "carry": carry, "wave_table": plan.num_tiles if plan.wave_tiles is None else plan.wave_tiles}
    return [_argument(name, boxes, values, x) for name in _RUN_TIME]


def _argument(name: str, boxes: dict[str, Any], values: dict[str, Any], x: Tensor) -> Any:
    """One argument; what no wanted gradient reads or writes is stood in for by x's memory, in the type of the real thing."""
    if name in DESCRIPTORS:
        rank = _RANKS.get(name, 2)
        tensor, shape, strides = boxes.get(name, (None, (), ()))
        if tensor is None or tensor.numel() == 0:
            return _descriptor(x.data_ptr(), (1,) * (rank - 1) + (16,), (16,) * (rank - 1) + (1,))
        return _descriptor(tensor.data_ptr(), tuple(shape), tuple(strides))
    value = values[name]
    if isinstance(value, (int, float)):
        return value
    if value is None or value.numel() == 0:
        return values["topk_weights"] if name in _FP32 else x
    if value.data_ptr() % 16 or (not value.is_contiguous() and name not in ("x", "dy")):
        assert name not in ("d_topk_weights", "main_up", "main_down"), "outputs are aligned and contiguous"
        return value.clone(memory_format=torch.contiguous_format)
    return value


def _shared_boxes(boxes: dict[str, Any], tensors: MoETensors, saved: Saved, dy: Tensor, x: Tensor, shared_dz: Tensor, shared_wh: Tensor,
                  grads: Grads) -> None:
    """Fill in what shared experts need: dy and x themselves, their dz, w*h, z, weights and weight gradients."""
    T, H = x.shape
    widths = [expert.w_down.shape[1] for expert in tensors.shared]
    widest = -(-max(widths) // CHUNK) * CHUNK
    shared_rows = len(widths) * -(-T // TILE) * TILE
    boxes["dy_desc"] = (dy, (T, H), dy.stride())
    boxes["x_desc"] = (x, (T, H), x.stride())
    boxes["shared_dz_desc"] = (shared_dz, (2, shared_rows, widest), (widest, 2 * widest, 1))
    boxes["shared_wh_desc"] = (shared_wh, (shared_rows, widest), (widest, 1))
    for i, expert in enumerate(tensors.shared):
        width = widths[i]
        up, down = tma_readable(expert.w_gate_up), tma_readable(expert.w_down)
        boxes[f"shared_up_{i}"] = (up, (2, width, H), (width * up.stride(0), up.stride(0), 1))
        boxes[f"shared_down_{i}"] = (down, (H, width), down.stride())
        boxes[f"shared_z_{i}"] = (saved.shared_z[:, 2 * sum(widths[:i]):], (2, T, width), (width, saved.shared_z.stride(0), 1))
        d_up, d_down, _ = grads.shared[i]
        if d_up is not None:
            boxes[f"shared_up_grad_{i}"] = (d_up, (2, width, H), (width * H, H, 1))
        if d_down is not None:
            boxes[f"shared_down_grad_{i}"] = (d_down, (H, width), (width, 1))


@lru_cache(maxsize=4096)
def _descriptor(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorDescriptor:
    """A cached TMA descriptor of bf16 memory with 64 x 64 boxes."""
    rank = len(shape)
    return TensorDescriptor(_Memory(address, torch.bfloat16), list(shape), list(strides), [1] * (rank - 2) + [CHUNK, CHUNK], LAYOUTS[rank])


def source(config: BackwardConfig) -> GluonASTSource:
    """One variant as Triton's compiler takes it, for compiling without a GPU: the types that a launch would give."""
    constexprs = config.constexprs()
    signature = {}
    for name in _backward_kernel.arg_names:
        if name in DESCRIPTORS:
            rank = _RANKS.get(name, 2)
            signature[name] = f"tensordesc<bf16{[1] * (rank - 2) + [CHUNK, CHUNK]},{LAYOUTS[rank]!r}>"
        elif name in constexprs:
            signature[name] = "constexpr"
        elif name in INTEGERS:
            signature[name] = "i32"
        elif name == "limit":
            signature[name] = "fp32"
        else:
            signature[name] = "*fp32" if name in _FP32 else "*bf16" if name in _BF16 else "*i64" if name == "expert_offsets" else "*i32"
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(_backward_kernel.arg_names) if signature[name].startswith("*")}
    return GluonASTSource(_backward_kernel, signature, constexprs, aligned)


def variants() -> list[tuple[str, GluonASTSource, dict[str, Any]]]:
    """(name, source, compile options) of every production variant of the backward kernel; each is compiled when it is first used."""
    return [(f"backward_{name}{'_recompute' if recompute else ''}", source(BackwardConfig(act, recompute=recompute)), {"num_warps": 4, **COMPILE_OPTIONS})
            for recompute in (False, True) for name, act in VARIANTS.items()]


def group_variants() -> list[tuple[str, GluonASTSource, dict[str, Any]]]:
    """(name, source, compile options) of every production variant of the backward kernel on several ranks."""
    kinds = [(act, suffix, config) for suffix, config in (("_ranks", {}), ("_recompute_ranks", {"recompute": True}), ("_ranks_waves", {"waves": True}))
             for act in VARIANTS.items()]
    return [(f"backward_{name}{suffix}", source(BackwardConfig(act, several_ranks=True, **config)), {"num_warps": 4, **COMPILE_OPTIONS})
            for (name, act), suffix, config in kinds]
