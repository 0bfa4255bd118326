"""What the Hopper engine uses of Triton and PyTorch that differs between their releases, each resolved once, here."""
from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from types import CellType, FunctionType
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# 3.6: gl.thread_barrier, tma.async_copy_*; later releases renamed them and the old names raise when traced
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait          # waits until shared memory may be reused (.read) in every release

# a shared-memory buffer seen in another shape; public since 3.7
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret

# the decorator that makes a class of tensors a kernel argument; the same in every release but for its place
aggregate = getattr(gluon, "aggregate", None) or triton.language.core._aggregate

# Multiply-add contraction: on by default in 3.6, off in 3.10. Every launch and compile says which, because it changes bits.
COMPILE_OPTIONS = {"enable_fp_fusion": False}

# Allocates on the current device without PyTorch's dispatcher, at a third of torch.empty's host time; what its own compiled code calls
_EMPTY_CUDA = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_empty_strided_cuda", None)


# Without Python around them: each is asked for several times a pass
_RAW_STREAM = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_CURRENT_DEVICE = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_NOTHING = nullcontext()


def new_empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Unwritten contiguous memory of this shape on `like`'s device, which has to be the current one if it is a GPU."""
    if _EMPTY_CUDA is None or not like.is_cuda:
        return torch.empty(shape, dtype=dtype, device=like.device)
    return _EMPTY_CUDA(*_contiguous(shape), dtype)


def new_empties(like: Tensor, kinds: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
    """`new_empty` of each (shape, dtype)."""
    if _EMPTY_CUDA is None or not like.is_cuda:
        return [new_empty(like, shape, dtype) for shape, dtype in kinds]
    return [_EMPTY_CUDA(*_contiguous(shape), dtype) for shape, dtype in kinds]


@lru_cache(maxsize=4096)
def _contiguous(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(the shape, its strides) as plain tuples: `_EMPTY_CUDA` refuses a torch.Size."""
    strides: tuple[int, ...] = (1,) if shape else ()
    for size in shape[:0:-1]:
        strides = (strides[0] * (size or 1), *strides)
    return tuple(shape), strides


def on_device(tensor: Tensor) -> AbstractContextManager:
    """Makes the tensor's GPU the current one, to which launches go; nothing to do where it is that already."""
    return torch.cuda.device(tensor.device) if tensor.get_device() != _CURRENT_DEVICE() else _NOTHING


def current_stream(device_index: int | None) -> int:
    """The handle of the device's current stream."""
    return _RAW_STREAM(device_index) if _RAW_STREAM is not None else triton.runtime.driver.active.get_current_stream(device_index)


class ReadyLaunch:
    """A launch of one binary whose arguments stand as the driver takes them, TMA descriptors encoded, but for those that each call brings."""

    __slots__ = ("_arguments", "_binary", "_fixed", "_launcher", "_nested", "_places")

    def __init__(self, binary: Any, launcher: Callable[..., Any], fixed: Sequence[Any], arguments: Sequence[Any], places: Sequence[int],
                 nested: bool) -> None:
        self._binary = binary                                      # a binary that nobody holds is unloaded
        self._launcher, self._fixed, self._arguments, self._places, self._nested = launcher, tuple(fixed), list(arguments), tuple(places), nested

    def __call__(self, blocks: int, stream: int, *varying: Any) -> None:
        """Launch on the current device; varying: addresses and numbers, in the order in which `ready_launch` was given their places."""
        arguments = self._arguments.copy()
        for place, value in zip(self._places, varying):
            arguments[place] = value
        if self._nested:
            self._launcher(blocks, 1, 1, stream, *self._fixed, arguments)
        else:
            self._launcher(blocks, 1, 1, stream, *self._fixed, *arguments)


def ready_launch(binary: Any, arguments: Sequence[Any], varying: Sequence[int]) -> ReadyLaunch | None:
    """A launch of `binary` with these arguments, constant expressions included; varying: indices of those that each call brings.

    Triton's own way to a launch is walked once, with marks for what varies and a function that records in the place of the driver's launcher.
    None where that way is not one of those known (3.6: arguments one by one; 3.9: in one sequence): then `binary.run` is to be called. Arguments
    must be addresses, numbers and descriptors, no tensors: nothing is kept alive, and descriptors are encoded with the addresses of now.
    """
    marks = [object() for _ in range(2 + len(varying))]
    grid, stream, *values = marks
    marked, recorded = list(arguments), []
    for place, mark in zip(varying, values):
        marked[place] = mark
    try:
        run = binary.run
        if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):    # memory or numbers anew for each launch
            return None
        launcher, recording = _launcher_of(run.launch), copy.copy(run)
        recording.launch = _with_launcher(run.launch, lambda *call: recorded.append(call))
        recording(grid, 1, 1, stream, binary.function, binary.packed_metadata, None, None, None, *marked)
        (call,) = recorded
    except (AttributeError, TypeError, ValueError):
        return None
    if call[0] is not grid or call[1:3] != (1, 1) or call[3] is not stream or call[4] != binary.function:
        return None
    nested = isinstance(call[-1], (list, tuple))
    passed = list(call[-1]) if nested else list(call[5:])
    places = [[i for i, value in enumerate(passed) if value is mark] for mark in values]
    if any(len(found) != 1 for found in places):
        return None
    return ReadyLaunch(binary, launcher, call[4:-1] if nested else call[4:5], passed, [found[0] for found in places], nested)


def _launcher_of(launch: Any) -> Any:
    """The compiled launcher itself, out of the closure that encodes TMA descriptors where the kernel has some."""
    cells = _cells(launch)
    return cells["launcher"].cell_contents if cells else launch


def _with_launcher(launch: Any, launcher: Callable[..., Any]) -> Any:
    """`launch` with another function in the compiled launcher's place."""
    cells = _cells(launch)
    if not cells:
        return launcher
    closure = tuple(CellType(launcher) if name == "launcher" else cell for name, cell in cells.items())
    return FunctionType(launch.__code__, launch.__globals__, launch.__name__, launch.__defaults__, closure)


def _cells(launch: Any) -> dict[str, CellType]:
    """A Python closure's variables; nothing for a compiled function. AttributeError or KeyError where it is neither."""
    if not isinstance(launch, FunctionType):
        return {}
    cells = dict(zip(launch.__code__.co_freevars, launch.__closure__ or ()))
    if "launcher" not in cells:
        raise AttributeError("launcher")
    return cells
