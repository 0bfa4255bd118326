"""Finished argument lists of kernel launches, so that a launch like an earlier one costs the host a look-up instead of 50 to 80 arguments.

A training loop repeats itself: weights stay where they are, and PyTorch's allocator hands the same blocks to the same step of every layer and iteration.
A list is found by the address, shape and strides of every tensor that it was made from, and by the settings; it holds addresses, no tensors, so it keeps no
memory alive, and what stands at an address does not matter, because the caller holds tensors there now.
"""
from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor

from ...runtime import runtime

LIMIT = 2048                   # lists; all are dropped when there are more, which shapes that never repeat would cause
_LISTS = "hopper ready arguments"


def key_of(settings: Hashable, tensors: Sequence[Tensor | None]) -> Hashable:
    """What a list depends on: settings (the kernel's config and all scalars included), and where and how every tensor lies."""
    return settings, tuple(None if tensor is None else (tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in tensors)


def find(key: Hashable) -> list[Any] | None:
    """The list kept for `key`, a copy; None if there is none."""
    kept = runtime.scratch.get(_LISTS, {}).get(key)
    return None if kept is None else list(kept)


def keep(key: Hashable, arguments: Sequence[Any], tensors: Sequence[Tensor | None]) -> None:
    """Keep a list, its tensors as addresses, unless an argument is a copy that was made for this launch alone: it lies in none of `tensors`."""
    spans = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in (t.untyped_storage() for t in tensors if t is not None)]
    addresses = [argument.data_ptr() for argument in arguments if isinstance(argument, Tensor)]
    addresses += [argument.base.data_ptr() for argument in arguments if hasattr(argument, "base")]
    if not all(any(first <= address <= last for first, last in spans) for address in addresses):
        return
    with runtime.lock:
        lists = runtime.scratch.setdefault(_LISTS, {})
        if len(lists) >= LIMIT:
            lists.clear()
        lists[key] = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments]
