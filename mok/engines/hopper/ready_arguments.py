"""Finished argument lists of kernel launches, so that a launch like an earlier one costs the host a look-up instead of 50 to 80 arguments.

A training loop repeats itself: weights stay where they are, and PyTorch's allocator hands the same blocks to the same step of every layer and iteration.
A list is found by the address, shape and strides of every tensor that it was made from, and by the settings; it holds addresses, no tensors, so it keeps no
memory alive, and what stands at an address does not matter, because the caller holds tensors there now.
"""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor

from ...runtime import runtime
from .driver import ReadyLaunch, ready_launch

LIMIT = 2048                   # lists; all are dropped when there are more, which shapes that never repeat would cause
_LISTS = "hopper ready arguments"
_LAUNCHES = "hopper ready launches"


def key_of(settings: Hashable, tensors: Sequence[Tensor | None], own: Sequence[Tensor | None] = ()) -> Hashable:
    """What a list depends on: settings (the kernel's config and all scalars included), and where and how every tensor lies.

    own: contiguous tensors whose shapes follow from the settings and the other tensors' shapes.
    """
    return (settings, *[None if tensor is None else (tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in tensors],
            *[None if tensor is None else tensor.data_ptr() for tensor in own])


def find(key: Hashable) -> list[Any] | None:
    """The list kept for `key`, a copy; None if there is none."""
    kept = runtime.scratch.get(_LISTS, {}).get(key)
    return None if kept is None else list(kept)


def keep(key: Hashable, arguments: Sequence[Any], tensors: Sequence[Tensor | None]) -> None:
    """Keep a list, its tensors as addresses, unless an argument is a copy that was made for this launch alone: it lies in none of `tensors`."""
    spans = sorted((storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in (t.untyped_storage() for t in tensors if t is not None))
    firsts = [first for first, _ in spans]
    addresses = {argument.data_ptr() for argument in arguments if isinstance(argument, Tensor) and argument.numel()}      # what is empty is not read
    addresses |= {argument.base.data_ptr() for argument in arguments if hasattr(argument, "base")}
    for address in addresses:
        place = bisect_right(firsts, address) - 1             # storages do not overlap; a copy may begin where one of them ends
        if place < 0 or address >= spans[place][1]:
            return
    _keep(_LISTS, key, [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments])


def find_launch(key: Hashable) -> tuple[ReadyLaunch, int] | None:
    """(the launch made ready for `key`, the blocks that are resident at once); None if there is none."""
    return runtime.scratch.get(_LAUNCHES, {}).get(key)


def keep_launch(key: Hashable, binary: Any, arguments: Sequence[Any], varying: Sequence[int], resident: int, device_index: int | None) -> None:
    """Make the launch of `binary` on the current device ready for `key`, where a list is kept for it and the driver can say what it takes."""
    if key in runtime.scratch.get(_LISTS, {}) and key not in runtime.scratch.get(_LAUNCHES, {}):
        ready = ready_launch(binary, arguments, varying, device_index)
        _keep(_LAUNCHES, key, None if ready is None else (ready, resident))      # None: not to be asked again


def _keep(name: str, key: Hashable, value: Any) -> None:
    with runtime.lock:
        kept = runtime.scratch.setdefault(name, {})
        if len(kept) >= LIMIT:
            kept.clear()
        kept[key] = value
