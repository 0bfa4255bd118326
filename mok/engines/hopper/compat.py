"""What the Hopper engine uses of Triton and PyTorch that differs between their releases, each resolved once, here."""
from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from .driver import library

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


_thread = threading.local()


def on_device(tensor: Tensor) -> AbstractContextManager:
    """Makes the tensor's GPU the current one, to which launches go; nothing to do where it is that already.

    A thread's first call binds the device's context: descriptors are encoded and launches made through the driver, which knows no current device, and a
    thread whose memory comes from PyTorch's cache may have called nothing that binds one (autograd's threads).
    """
    if not getattr(_thread, "bound", False) and tensor.is_cuda:
        _bind_context(tensor.get_device())
        _thread.bound = True
    return torch.cuda.device(tensor.device) if tensor.get_device() != _CURRENT_DEVICE() else _NOTHING


def _bind_context(index: int) -> None:
    """Give this thread the context that PyTorch uses on the device, if it has none; allowed while a stream is captured."""
    driver, current, device, primary = library(), ctypes.c_void_p(), ctypes.c_int(), ctypes.c_void_p()
    if driver.cuCtxGetCurrent(ctypes.byref(current)) == 0 and current.value is None:
        status = (driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDevicePrimaryCtxRetain(ctypes.byref(primary), device)
                  or driver.cuCtxSetCurrent(primary))
        if status:
            raise RuntimeError(f"cuda:{index}: the driver gave this thread no context, status {status}")


def current_stream(device_index: int | None) -> int:
    """The handle of the device's current stream."""
    return _RAW_STREAM(device_index) if _RAW_STREAM is not None else triton.runtime.driver.active.get_current_stream(device_index)
