"""Launches through the driver's own functions: a kernel's parameters are made once, by Triton, and only what varies is written anew for each launch.

Triton's way to a launch looks at each of up to 150 arguments. Here it is walked once into a stream that is being captured, where nothing runs; the captured
node's parameters, TMA descriptors encoded, are copied and kept. All of it is the driver's documented interface (CUDA Driver API: execution control, graph
management), so it holds for any release of Triton. From then on a launch is `cuLaunchKernelEx` (`ReadyLaunch`), or one graph for several kernels in a row
(`ReadyChain`).
"""
from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

_RELAXED, _NON_BLOCKING, _COOPERATIVE = 2, 1, 2        # CU_STREAM_CAPTURE_MODE_RELAXED, CU_STREAM_NON_BLOCKING, CU_LAUNCH_ATTRIBUTE_COOPERATIVE
_INVALID_VALUE = 1                                     # CUDA_ERROR_INVALID_VALUE
_MARK = 0x5A5A5A00                                     # stands for what varies while its place is looked for; fits 32 bits, and no allocation lies there
_ALIGNMENT = 64                                        # of a tensor map; other parameters need 8 bytes


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""
    _fields_ = (("grid", ctypes.c_uint), ("grid_y", ctypes.c_uint), ("grid_z", ctypes.c_uint), ("block", ctypes.c_uint), ("block_y", ctypes.c_uint),
                ("block_z", ctypes.c_uint), ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint))


class _Node(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS, version 2."""
    _fields_ = (("function", ctypes.c_void_p), ("grid", ctypes.c_uint), ("grid_y", ctypes.c_uint), ("grid_z", ctypes.c_uint), ("block", ctypes.c_uint),
                ("block_y", ctypes.c_uint), ("block_z", ctypes.c_uint), ("shared", ctypes.c_uint), ("parameters", ctypes.c_void_p),
                ("extra", ctypes.c_void_p), ("kernel", ctypes.c_void_p), ("context", ctypes.c_void_p))


@lru_cache(maxsize=1)
def library() -> Any:
    """The driver."""
    return ctypes.CDLL("libcuda.so.1")


class DriverError(RuntimeError):
    """A call of the driver failed."""


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        library().cuGetErrorString(status, ctypes.byref(text))
        raise DriverError(f"{what}: {(text.value or b'unknown error').decode()} ({status})")


_streams: dict[int | None, ctypes.c_void_p] = {}
_capturing = threading.Lock()


def _capture_stream(device_index: int | None) -> ctypes.c_void_p:
    """A stream of the current device on which nothing ever runs."""
    if device_index not in _streams:
        stream = ctypes.c_void_p()
        _check(library().cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING), "cuStreamCreate")
        _streams[device_index] = stream
    return _streams[device_index]


@dataclass(frozen=True)
class Captured:
    """A launch as the driver takes it. parameters: their bytes, in order; places: which of them stand for what varies, in the order of `varying`."""
    binary: Any                                        # one that nobody holds is unloaded
    function: int
    block: int
    shared: int
    cooperative: bool
    parameters: tuple[bytes, ...]
    places: tuple[int, ...]


def capture(binary: Any, arguments: Sequence[Any], varying: Sequence[int], device_index: int | None) -> Captured | None:
    """What Triton's launch of `binary` on the current device would give the driver; runs nothing and waits for nothing.

    arguments: constant expressions included; addresses, numbers and descriptors, no tensors: nothing is kept alive, and descriptors are encoded with the
    addresses of now. varying: indices of those that each launch brings; they may be anything. None where that is not all that a launch needs (memory
    made for each one, a cluster), where the driver is too old to tell (before CUDA 12.4), or where anything else is not as expected: a launch by Triton's
    own way has gone before, and the next one can too.
    """
    marked = list(arguments)
    for i, place in enumerate(varying):
        marked[place] = _MARK + i
    try:
        run = binary.run
        if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False) or run.launch_pdl or run.num_ctas != 1:
            return None
        with _capturing:
            return _captured(binary, marked, len(varying), device_index)
    except (RuntimeError, AttributeError, TypeError, ValueError, OverflowError):
        return None


def ready_launch(binary: Any, arguments: Sequence[Any], varying: Sequence[int], device_index: int | None) -> ReadyLaunch | None:
    """The launch that `capture` finds, ready; None where it finds none."""
    captured = capture(binary, arguments, varying, device_index)
    return None if captured is None else ReadyLaunch(captured)


def _captured(binary: Any, marked: Sequence[Any], num_varying: int, device_index: int | None) -> Captured | None:
    """`capture` of arguments in which _MARK + i stands for the i-th that varies."""
    driver, stream, graph = library(), _capture_stream(device_index), ctypes.c_void_p()
    try:
        _check(driver.cuStreamBeginCapture_v2(stream, _RELAXED), "cuStreamBeginCapture")
        try:
            binary.run(1, 1, 1, stream.value, binary.function, binary.packed_metadata, None, None, None, *marked)
        finally:
            status = driver.cuStreamEndCapture(stream, ctypes.byref(graph))
        _check(status, "cuStreamEndCapture")
        handle, count, node, attribute = ctypes.c_void_p(), ctypes.c_size_t(1), _Node(), (ctypes.c_int * 16)()
        _check(driver.cuGraphGetNodes(graph, ctypes.byref(handle), ctypes.byref(count)), "cuGraphGetNodes")
        _check(driver.cuGraphKernelNodeGetParams_v2(handle, ctypes.byref(node)), "cuGraphKernelNodeGetParams")
        _check(driver.cuGraphKernelNodeGetAttribute(handle, _COOPERATIVE, ctypes.byref(attribute)), "cuGraphKernelNodeGetAttribute")
        parameters = _copied(binary.function, node.parameters)
    finally:
        if graph:
            driver.cuGraphDestroy(graph)
    values = [int.from_bytes(each, "little") if len(each) in (4, 8) else None for each in parameters]
    places = [[i for i, value in enumerate(values) if value == _MARK + mark] for mark in range(num_varying)]
    if any(len(found) != 1 for found in places):
        return None
    return Captured(binary, binary.function, node.block, node.shared, bool(attribute[0]), parameters, tuple(found[0] for found in places))


def _copied(function: int, address: int) -> tuple[bytes, ...]:
    """The values of a kernel's parameters; address: of the list of their addresses."""
    contents: list[bytes] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while True:
        status = library().cuFuncGetParamInfo(ctypes.c_void_p(function), ctypes.c_size_t(len(contents)), ctypes.byref(offset), ctypes.byref(size))
        if status == _INVALID_VALUE:                   # there is no such parameter
            return tuple(contents)
        _check(status, "cuFuncGetParamInfo")
        where = ctypes.c_void_p.from_address(address + len(contents) * ctypes.sizeof(ctypes.c_void_p)).value
        contents.append(ctypes.string_at(where or 0, size.value))


class _Parameters:
    """One copy of a launch's parameters in memory that the driver can read."""

    def __init__(self, captured: Captured) -> None:
        begins, end = [], 0
        for content in captured.parameters:
            alignment = _ALIGNMENT if len(content) > 8 else 8
            begins.append(-(-end // alignment) * alignment)
            end = begins[-1] + len(content)
        self._memory = (ctypes.c_char * (end + _ALIGNMENT))()
        first = -(-ctypes.addressof(self._memory) // _ALIGNMENT) * _ALIGNMENT
        for begin, content in zip(begins, captured.parameters):
            ctypes.memmove(first + begin, content, len(content))
        self.addresses = (ctypes.c_void_p * len(begins))(*[first + begin for begin in begins])
        kinds = {4: ctypes.c_int32, 8: ctypes.c_uint64}
        self._varying = [kinds[len(captured.parameters[place])].from_address(first + begins[place]) for place in captured.places]

    def write(self, values: Sequence[int]) -> None:
        """What varies, in the order of `capture`'s `varying`."""
        for place, value in zip(self._varying, values, strict=True):
            place.value = value


class _Launch:
    """A launch's parameters and configuration, for one thread at a time."""

    def __init__(self, captured: Captured) -> None:
        self.parameters = _Parameters(captured)
        self.attribute = _Attribute(id=_COOPERATIVE)
        self.attribute.value[0] = 1
        self.config = _Config(1, 1, 1, captured.block, 1, 1, captured.shared, None, ctypes.addressof(self.attribute), int(captured.cooperative))
        self.arguments = (ctypes.byref(self.config), ctypes.c_void_p(captured.function), self.parameters.addresses, None)


class ReadyLaunch:
    """A launch of one binary that is ready but for the grid, the stream and what each call brings. Threads may call it side by side."""

    __slots__ = ("_free", "_launch", "captured")

    def __init__(self, captured: Captured) -> None:
        self.captured, self._launch = captured, library().cuLaunchKernelEx
        self._free = [_Launch(captured)]

    def __call__(self, blocks: int, stream: int, *varying: int) -> None:
        """Launch on the current device, nothing for 0 blocks; varying: addresses and numbers, in the order in which `capture` was given their places."""
        if blocks == 0:                                # as Triton; the driver refuses
            return
        try:
            mine = self._free.pop()
        except IndexError:                             # another thread is at it
            mine = _Launch(self.captured)
        mine.parameters.write(varying)
        mine.config.grid, mine.config.stream = blocks, stream
        status = self._launch(*mine.arguments)
        self._free.append(mine)
        if status:
            _check(status, "cuLaunchKernelEx")


def _destroy(name: str, handle: ctypes.c_void_p, process: int) -> None:
    """Give a graph back, but not from a forked child, whose driver has none."""
    if os.getpid() == process:
        getattr(library(), name)(handle)


class ReadyChain:
    """Kernels one after the other, launched together as one graph, which costs the host one launch. Not for streams that are being captured.

    kernels: (launch, blocks, what varies in it) of each. Making a chain may wait for the device; launching it never does. What is still running keeps the
    values that it was launched with. Raises DriverError where the driver refuses.
    """

    def __init__(self, kernels: Sequence[tuple[Captured, int, Sequence[int]]], device_index: int | None) -> None:
        driver, graph, chain = library(), ctypes.c_void_p(), ctypes.c_void_p()
        if any(kernel.cooperative for kernel, _, _ in kernels):
            raise ValueError("a chain's kernels must not be cooperative")
        self._set, self._launch, self._lock = driver.cuGraphExecKernelNodeSetParams_v2, driver.cuGraphLaunch, threading.Lock()
        _check(driver.cuGraphCreate(ctypes.byref(graph), 0), "cuGraphCreate")
        weakref.finalize(self, _destroy, "cuGraphDestroy", graph, os.getpid()).atexit = False
        self._parts: list[tuple[ctypes.c_void_p, _Parameters, _Node, Captured]] = []
        for kernel, blocks, varying in kernels:
            node, parameters = ctypes.c_void_p(), _Parameters(kernel)
            parameters.write(varying)
            what = _Node(kernel.function, blocks, 1, 1, kernel.block, 1, 1, kernel.shared, ctypes.addressof(parameters.addresses), None, None, None)
            before = (ctypes.c_void_p * 1)(self._parts[-1][0].value) if self._parts else None
            _check(driver.cuGraphAddKernelNode_v2(ctypes.byref(node), graph, before, ctypes.c_size_t(len(self._parts) > 0), ctypes.byref(what)),
                   "cuGraphAddKernelNode")
            self._parts.append((node, parameters, what, kernel))
        _check(driver.cuGraphInstantiateWithFlags(ctypes.byref(chain), graph, ctypes.c_ulonglong(0)), "cuGraphInstantiate")
        weakref.finalize(self, _destroy, "cuGraphExecDestroy", chain, os.getpid()).atexit = False
        with _capturing:
            _check(driver.cuGraphUpload(chain, _capture_stream(device_index)), "cuGraphUpload")      # the first launch would allocate
        self._chain = chain

    def __call__(self, stream: int, *changes: tuple[int, int, Sequence[int]]) -> None:
        """Launch on `stream` of the current device. changes: (place in the chain, blocks, what varies) of kernels that are to run otherwise than last time."""
        with self._lock:
            for place, blocks, varying in changes:
                node, parameters, what, _ = self._parts[place]
                parameters.write(varying)
                what.grid = blocks
                _check(self._set(self._chain, node, ctypes.byref(what)), "cuGraphExecKernelNodeSetParams")
            _check(self._launch(self._chain, ctypes.c_void_p(stream)), "cuGraphLaunch")
