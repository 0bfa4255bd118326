"""What tests of launches need where no GPU is: Triton's launcher with the driver's part stood in for, and memory that comes again."""
from __future__ import annotations

from types import SimpleNamespace

import torch
import triton
from triton.backends.nvidia import driver as nvidia


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


def machine_without_gpu(monkeypatch):
    """Triton's NVIDIA launcher, as this release has it, without a GPU: .launches and .encoded are what reached the driver."""
    launcher = Compiled(lambda *arguments: None)
    encode = Compiled(lambda *arguments: ("encoded", *map(repr, arguments)))
    utils = SimpleNamespace(launch=launcher, fill_tma_descriptor=encode, fill_tma_descriptor_tiled=encode,
                            build_signature_metadata=lambda kinds: bytes(len(kinds)))
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=utils, get_current_stream=lambda index: 40 + index))
    monkeypatch.setattr(nvidia, "compile_module_from_src", lambda **source: SimpleNamespace(launch=launcher), raising=False)   # 3.6: a launcher each
    monkeypatch.setattr(nvidia, "library_dirs", lambda: [])
    monkeypatch.setattr(nvidia, "PyKernelArg", lambda **parts: parts, raising=False)                                          # 3.9: one for all
    return SimpleNamespace(launches=launcher.calls, encoded=encode.calls)


def binary(source, **metadata):
    """A compiled kernel as far as launching goes."""
    descriptors = [kind for kind in source.signature.values() if kind.startswith("tensordesc")]
    encoding = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 64], "fp4_padded": False}
    facts = {"tensordesc_meta": [encoding] * len(descriptors), "num_ctas": 1, "global_scratch_size": 0, "global_scratch_align": 1, "profile_scratch_size": 0,
             "profile_scratch_align": 1, "launch_cooperative_grid": True, "launch_pdl": False, **metadata}
    return SimpleNamespace(run=nvidia.CudaLauncher(source, SimpleNamespace(**facts)), function=77, packed_metadata=(4, 1, 1000))
