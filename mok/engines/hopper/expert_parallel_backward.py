"""Host side of the backward kernel on several ranks: what its launch has beside one rank's; never waits for the GPU."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...plan import RoutingPlan
from ..protocol import Grads, MainGrad, MoETensors, PassOptions, Saved, Wants
from . import backward_launch, ready_arguments
from .backward import BackwardConfig, _backward_kernel
from .backward_launch import (
    _SET_WORDS,
    _STATE,
    VARIANTS,
    _arguments,
    _empty_grads,
    _group_tiles,
    _key,
    _set_words,
    _touched,
    _variant,
    _zeroed,
    want_bits,
)
from .compat import current_stream, new_empty, on_device
from .expert_parallel_backward_move import EXTRA_COUNTERS
from .gemm import SET_HEADER
from .launch import TILE, GroupLaunch, launch_kernel

_TOKENS, _PASS_NUMBER, _ROW_WEIGHTS = (backward_launch._RUN_TIME.index(name) for name in ("T", "pass_number", "row_weights"))


def group_backward(plan: RoutingPlan, tensors: MoETensors, options: PassOptions, saved: Saved, dy: Tensor, wants: Wants, main_grad: MainGrad | None,
                   group: GroupLaunch, pass_number: int, debug: bool = False, group_tiles: int | None = None) -> Grads:
    """`hopper_backward` of one rank of several, all of which launch, those without tokens too.

    pass_number: what ranks compare, 0 to 2^31 - 1. Raises ValueError where reserve_sms leaves no multiprocessor, NotImplementedError for `recompute` where
    buffers are bounded: the binary with waves reads the first one's z.
    """
    _check_recompute(options, group)
    plan = _of_buffers(plan, group)
    with on_device(tensors.x):
        grads = written = _empty_grads(tensors, wants, main_grad)
        if want_bits(wants) == 0:
            return grads
        reserve_sms = (options.overlap.reserve_sms if options.overlap else None) or 0
        if reserve_sms >= group.blocks:
            raise ValueError(f"{reserve_sms=} must be less than the {group.blocks} blocks that fit on {tensors.x.device}")
        T = tensors.x.shape[0]
        if T == 0:
            _zeroed(Grads(shared=grads.shared))
            tensors, plan, dy, wants = _with_memory_for_a_token(tensors, plan, wants)
            written = replace(grads, shared=[])
        tensors = replace(tensors, topk_weights=_aligned(tensors.topk_weights))
        group_tiles = group_tiles or _tiles_of_group(options, tensors, group)
        buffers, row_weights = _buffers(plan, tensors, T, wants, options, group)
        settings = ("ranks", group.cooperative, group.wave_tiles, group.card, pass_number, debug, group_tiles, options.overlap, T, row_weights.data_ptr())
        key = _key(plan, tensors, options, saved, dy, wants, main_grad, written, settings, buffers)
        found = ready_arguments.find_launch(key)
        if found is not None:
            found[0](group.blocks - reserve_sms, current_stream(tensors.x.device.index), group.state.data_ptr(), _set_words(group.state))
            return grads
        config = _config(options, group, debug)
        arguments = ready_arguments.find(key)
        if arguments is None:
            arguments = _group_arguments(plan, tensors, options, saved, dy, wants, main_grad, written, buffers, row_weights, group, pass_number, group_tiles)
            arguments[_TOKENS] = T
            read, own = _touched(plan, tensors, saved, dy, main_grad, written, buffers)
            ready_arguments.keep(key, arguments, (*read, *own, row_weights, group.state))
        else:
            arguments[_STATE], arguments[_SET_WORDS] = group.state.data_ptr(), _set_words(group.state)
        launch_kernel(_backward_kernel, config, tensors.x.device.index, group.blocks - reserve_sms, arguments, key, (_STATE, _SET_WORDS), group.blocks,
                      group.options)
    return grads


def load_group_backward(plan: RoutingPlan, tensors: MoETensors, options: PassOptions, group: GroupLaunch, debug: bool) -> None:
    """Compile and load the variant that `group_backward` with these options would launch; run nothing."""
    wants = Wants(x=True)
    _check_recompute(options, group)
    config, plan = _config(options, group, debug), _of_buffers(plan, group)
    saved = Saved(tensors.x.new_empty((plan.num_rows, tensors.w_gate_up.shape[1])), tensors.x.new_empty((tensors.x.shape[0], 0)))
    with on_device(tensors.x):
        buffers, row_weights = _buffers(plan, tensors, tensors.x.shape[0], wants, options, group)
        arguments = _group_arguments(plan, tensors, options, saved, tensors.x, wants, None, _empty_grads(tensors, wants, None), buffers, row_weights, group,
                                     0, 2)
        _backward_kernel.warmup(*arguments, grid=(group.blocks,), **config.constexprs(), **group.options)._init_handles()


def _config(options: PassOptions, group: GroupLaunch, debug: bool) -> BackwardConfig:
    return BackwardConfig(VARIANTS[_variant(options)], several_ranks=True, debug=int(debug), recompute=options.recompute is not None,
                          waves=group.wave_tiles is not None)


def _check_recompute(options: PassOptions, group: GroupLaunch) -> None:
    if options.recompute is not None and group.wave_tiles is not None:
        raise NotImplementedError(f"recompute={options.recompute!r} must be None where capacity_factor bounds the buffers of launches")


def _of_buffers(plan: RoutingPlan, group: GroupLaunch) -> RoutingPlan:
    """The plan with as many rows as the buffers have; the kernel reads its maps behind that, too, one wave after the other."""
    return plan if group.wave_tiles is None else replace(plan, row_to_slot=plan.row_to_slot[:group.rows(plan)])


def _with_memory_for_a_token(tensors: MoETensors, plan: RoutingPlan, wants: Wants) -> tuple[MoETensors, RoutingPlan, Tensor, Wants]:
    """(tensors, plan, dy, wants) of a rank without tokens, with memory for one, which nobody reads: TMA cannot describe an array without rows, and
    arguments of other types would make another binary."""
    H, K = tensors.x.shape[1], tensors.topk_weights.shape[1]
    x = new_empty(tensors.x, (1, H), tensors.x.dtype)
    without = replace(tensors, x=x, topk_weights=new_empty(x, (1, K), tensors.topk_weights.dtype), shared=())
    return without, replace(plan, slot_to_row=new_empty(x, (K,), plan.slot_to_row.dtype)), x, replace(wants, shared=())


def _aligned(weights: Tensor) -> Tensor:
    """Routing weights, contiguous and at a multiple of 16 bytes: they stand in for what is not wanted, and the kernel is compiled for aligned arguments."""
    weights = weights.contiguous()
    return weights.clone() if weights.data_ptr() % 16 else weights


def _tiles_of_group(options: PassOptions, tensors: MoETensors, group: GroupLaunch) -> int:
    """Row tiles of a group: what was asked for, or one rank's default less what ranks on the same device take of its L2, and at least 4 then: four ranks
    on one H200 take 2 to 7 % less with 4 to 16 than with 2 (Kimi K2 rank, docs/expert-parallel-kernel.md)."""
    asked = options.overlap is not None and options.overlap.minibatch_rows is not None
    tiles = _group_tiles(options, tensors)
    return tiles if asked or group.card == 1 else max(4, round(tiles * group.card))


def _buffers(plan: RoutingPlan, tensors: MoETensors, T: int, wants: Wants, options: PassOptions,
             group: GroupLaunch) -> tuple[tuple[backward_launch.BackwardScratch, Tensor, Tensor], Tensor]:
    """One rank's scratch (sizes, bf16 and fp32 memory), with rows of dy where db_down alone is summed over them, and routing weights by row (R,) fp32."""
    x, rows = tensors.x, plan.num_rows
    widths = tuple([expert.w_down.shape[1] for expert in tensors.shared])
    sizes = backward_launch._scratch_of(T, x.shape[1], tensors.w_down.shape[2], rows, widths, wants, options.recompute is not None,
                                        group.wave_tiles is not None, True)
    if wants.b_down and not sizes.dy_rows:
        sizes = replace(sizes, dy_rows=rows * x.shape[1])
    return (sizes, new_empty(x, (sizes.narrow,), x.dtype), new_empty(x, (sizes.wide,), torch.float32)), new_empty(x, (rows,), torch.float32)


def _group_arguments(plan: RoutingPlan, tensors: MoETensors, options: PassOptions, saved: Saved, dy: Tensor, wants: Wants, main_grad: MainGrad | None,
                     grads: Grads, buffers: tuple[backward_launch.BackwardScratch, Tensor, Tensor], row_weights: Tensor, group: GroupLaunch,
                     pass_number: int, group_tiles: int) -> list[Any]:
    """The kernel's run-time arguments, in its order."""
    recompute, waves = options.recompute is not None, group.wave_tiles is not None
    row_tiles, token_tiles, count = plan.num_rows // TILE, -(-tensors.x.shape[0] // TILE), len(tensors.shared)
    counters = 2 * row_tiles + (count + 1) * token_tiles + tensors.w_down.shape[0] + EXTRA_COUNTERS
    counters += (1 + row_tiles + count * token_tiles) * (recompute or waves)
    assert SET_HEADER.value + counters <= _set_words(group.state), "the group's control block was made for the worst case"
    arguments = _arguments(plan, tensors, options, saved, dy, wants, main_grad, grads, group_tiles, *buffers, group.state, recompute, waves, True)
    arguments[_PASS_NUMBER], arguments[_ROW_WEIGHTS] = pass_number, row_weights
    return arguments
