"""What tests of launches need where no GPU is: Triton's launcher with the driver's part stood in for, and memory that comes again."""
from __future__ import annotations

import ctypes
import itertools
from types import SimpleNamespace

import torch
import triton
from triton.backends.nvidia import driver as nvidia

from mok.engines.hopper import driver


class Memory:
    """The same blocks for the same sizes, as PyTorch's allocator gives them to a loop."""

    def __init__(self, monkeypatch):
        self.blocks: dict[tuple, torch.Tensor] = {}
        self.empty = torch.empty
        monkeypatch.setattr(torch, "empty", self)

    def __call__(self, *size, **kwargs):
        key = (size, kwargs.get("dtype"))
        if key not in self.blocks:
            self.blocks[key] = self.empty(*size, **kwargs)
        return self.blocks[key]


class Compiled:
    """In a compiled function's place: not a Python function, as the launchers are not."""

    def __init__(self, result):
        self.result, self.calls = result, []

    def __call__(self, *arguments):
        self.calls.append(arguments)
        return self.result(*arguments)


class Driver:
    """libcuda in little, by its own structures: capture of one kernel, its parameters, launches and graphs. What would run is appended to `launches`, as
    Triton's launcher would have called it. A whole number is a parameter of 8 bytes, anything else one of 128 that stands for it and lies at a multiple of 64.
    What a graph owns is overwritten when it is destroyed; `alive`: handles of graphs, and chains, that were not."""

    def __init__(self, launches):
        self.launches, self.capturing, self.nodes, self.sizes, self.objects = launches, False, {}, {}, []
        self.graphs, self.chains, self.missing, self.failing, self.handles = {}, {}, set(), {}, itertools.count(1)
        self.alive, self.streams, self.device = set(), {}, 0             # streams: handle -> the device that was current when it was made

    def __getattribute__(self, name):
        if name.startswith("cu"):
            if name == "cuStreamEndCapture" and (name in self.missing or name in self.failing):
                self.capturing = False                        # a capture that ends badly has ended
            if name in self.missing:
                raise AttributeError(name)
            if name in self.failing:
                return lambda *_: self.failing[name]
        return object.__getattribute__(self, name)

    def launched(self, call):
        """Triton's launcher was called."""
        if not self.capturing:
            return
        assert self.launches.pop() is call
        flat = [*call[:-1], *call[-1]] if isinstance(call[-1], (list, tuple)) else [*call]
        assert flat[3] == self.capturing
        handle = next(self.handles)
        contents = [self.bytes_of(value) for value in flat[5:]]
        self.nodes[handle] = SimpleNamespace(function=flat[4], contents=contents, memory=[ctypes.create_string_buffer(c, len(c)) for c in contents])
        self.nodes[handle].addresses = (ctypes.c_void_p * len(contents))(*map(ctypes.addressof, self.nodes[handle].memory))
        self.sizes[flat[4]] = list(map(len, contents))
        self.captured = handle

    def bytes_of(self, value):
        if type(value) is int:
            return (value % 2**64).to_bytes(8, "little")
        self.objects.append(value)
        return (len(self.objects) - 1).to_bytes(128, "little")

    def values_at(self, function, addresses):
        assert all(address % 64 == 0 for address, size in zip(addresses, self.sizes[function]) if size == 128), "a tensor map is not aligned"
        contents = [ctypes.string_at(address, size) for address, size in zip(addresses, self.sizes[function], strict=True)]
        return [int.from_bytes(c, "little", signed=True) if len(c) == 8 else self.objects[int.from_bytes(c, "little")] for c in contents]

    def cuGetErrorString(self, status, text):
        text._obj.value = b"stand-in"
        return 0

    def cuStreamCreate(self, stream, flags):
        assert flags == 1, "it would wait for the legacy stream"
        stream._obj.value = 4242 + self.device
        self.streams[stream._obj.value] = self.device
        return 0

    def cuStreamBeginCapture_v2(self, stream, mode):
        assert mode == 2, "other threads' calls would end the capture"
        assert self.streams[stream.value] == self.device and not self.capturing
        self.capturing = stream.value
        return 0

    def cuStreamEndCapture(self, stream, graph):
        self.capturing, graph._obj.value = False, next(self.handles)
        self.alive.add(graph._obj.value)
        self.graphs[graph._obj.value] = self.captured
        return 0

    def cuGraphGetNodes(self, graph, node, count):
        assert count._obj.value == 1
        node._obj.value = self.captured
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node, found):
        kept, found = self.nodes[node.value], found._obj
        found.function, found.block, found.shared, found.parameters = kept.function, 128, 1000, ctypes.addressof(kept.addresses)
        return 0

    def cuGraphKernelNodeGetAttribute(self, node, which, found):
        assert which == 2
        found._obj[0] = self.cooperative
        return 0

    def cuFuncGetParamInfo(self, function, index, offset, size):
        sizes = self.sizes[function.value]
        if index.value == len(sizes):
            return 1
        size._obj.value = sizes[index.value]
        return 0

    def cuLaunchKernelEx(self, config, function, addresses, extra):
        config = config._obj
        attributes = [driver._Attribute.from_address(config.attributes + i * ctypes.sizeof(driver._Attribute)) for i in range(config.count)]
        assert [(a.id, a.value[0]) for a in attributes] == [(2, 1)] * self.cooperative
        assert (config.grid_y, config.grid_z, config.block, config.shared) == (1, 1, 128, 1000)
        self.launches.append((config.grid, 1, 1, config.stream, function.value, *self.values_at(function.value, addresses)))
        return 0

    def cuGraphCreate(self, graph, flags):
        graph._obj.value = next(self.handles)
        self.alive.add(graph._obj.value)
        self.graphs[graph._obj.value] = []
        return 0

    def read_node(self, what):
        what = what._obj
        addresses = (ctypes.c_void_p * len(self.sizes[what.function])).from_address(what.parameters)
        return what.grid, what.function, self.values_at(what.function, addresses)

    def cuGraphAddKernelNode_v2(self, node, graph, before, count, what):
        nodes = self.graphs[graph.value]
        assert [handle for handle, _ in nodes][-1:] == ([] if before is None else [before[0]]) and count.value == (before is not None)
        node._obj.value = next(self.handles)
        nodes.append((node._obj.value, self.read_node(what)))
        return 0

    def cuGraphInstantiateWithFlags(self, chain, graph, flags):
        chain._obj.value = next(self.handles)
        self.alive.add(chain._obj.value)
        self.chains[chain._obj.value] = dict(self.graphs[graph.value])
        return 0

    def cuGraphUpload(self, chain, stream):
        assert self.streams[stream.value] == self.device and not self.capturing
        self.uploaded = chain.value
        return 0

    def cuGraphExecKernelNodeSetParams_v2(self, chain, node, what):
        assert node.value in self.chains[chain.value] and chain.value in self.alive
        self.chains[chain.value][node.value] = self.read_node(what)
        return 0

    def cuGraphLaunch(self, chain, stream):
        assert chain.value == self.uploaded and chain.value in self.alive
        self.launches.extend((grid, 1, 1, stream.value, function, *values) for grid, function, values in self.chains[chain.value].values())
        return 0

    def cuGraphDestroy(self, graph):
        self.alive.remove(graph.value)
        captured = self.graphs.pop(graph.value)
        if isinstance(captured, int):
            for memory in self.nodes.pop(captured).memory:
                ctypes.memset(memory, 0xEE, len(memory))
        return 0

    def cuGraphExecDestroy(self, chain):
        self.alive.remove(chain.value)
        return 0


def machine_without_gpu(monkeypatch):
    """Triton's NVIDIA launcher, as this release has it, without a GPU: .launches and .encoded are what reached the driver, which is .driver."""
    launcher = Compiled(lambda *arguments: cuda.launched(launcher.calls[-1]))
    cuda = Driver(launcher.calls)
    monkeypatch.setattr(driver, "library", lambda: cuda)
    monkeypatch.setattr(driver, "_streams", {})
    encode = Compiled(lambda *arguments: ("encoded", *map(repr, arguments)))
    utils = SimpleNamespace(launch=launcher, fill_tma_descriptor=encode, fill_tma_descriptor_tiled=encode,
                            build_signature_metadata=lambda kinds: bytes(len(kinds)))
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=utils, get_current_stream=lambda index: 40 + index))
    monkeypatch.setattr(nvidia, "compile_module_from_src", lambda **source: SimpleNamespace(launch=launcher), raising=False)   # 3.6: a launcher each
    monkeypatch.setattr(nvidia, "library_dirs", lambda: [])
    monkeypatch.setattr(nvidia, "PyKernelArg", lambda **parts: parts, raising=False)                                          # 3.9: one for all
    return SimpleNamespace(launches=launcher.calls, encoded=encode.calls, driver=cuda)


_functions = itertools.count(77)


def binary(source, **metadata):
    """A compiled kernel as far as launching goes."""
    descriptors = [kind for kind in source.signature.values() if kind.startswith("tensordesc")]
    encoding = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 64], "fp4_padded": False}
    facts = {"tensordesc_meta": [encoding] * len(descriptors), "num_ctas": 1, "global_scratch_size": 0, "global_scratch_align": 1, "profile_scratch_size": 0,
             "profile_scratch_align": 1, "launch_cooperative_grid": True, "launch_pdl": False, **metadata}
    return SimpleNamespace(run=nvidia.CudaLauncher(source, SimpleNamespace(**facts)), function=next(_functions), packed_metadata=(4, 1, 1000))
