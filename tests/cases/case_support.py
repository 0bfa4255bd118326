"""One input of the layer for a reported fault: seeded data, a run with every gradient, and the comparison with the float64 reference."""
from __future__ import annotations

import ctypes
import gc
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import mok
from mok.reference import moe_reference
from mok.runtime import runtime
from mok.tolerance import Change, Expected, expected
from tests.oracle import check_close

needs_compiler = pytest.mark.skipif(not any(shutil.which(name) for name in ("c++", "g++", "clang++")), reason="inductor needs a C++ compiler")
WEIGHTS = ("w_gate_up", "w_down", "b_gate_up", "b_down")


@dataclass
class Problem:
    """Arguments of `mok.moe` (detached tensors) and the output's gradient dy (T, H). `settings`: activation and other arguments by name."""

    tensors: dict[str, Tensor]
    shared: list[tuple[Tensor, Tensor, Tensor | None]]
    dy: Tensor
    settings: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def changed(self, **tensors: Tensor) -> Problem:
        """A copy with some tensors replaced ("dy" too)."""
        dy = tensors.pop("dy", self.dy)
        return Problem(self.tensors | tensors, self.shared, dy, self.settings)

    def leaves(self, convert: Callable[[Tensor], Tensor] = lambda t: t, grad: bool = True) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(arguments of the layer with fresh leaves, those leaves by name); strides are kept."""
        arguments, leaves = {}, {}
        for name, tensor in self.tensors.items():
            arguments[name] = tensor
            if tensor.is_floating_point():
                arguments[name] = leaves[name] = convert(tensor.detach()).requires_grad_(grad)
        shared = []
        for i, parts in enumerate(self.shared):
            fresh = [None if p is None else convert(p.detach()).requires_grad_(grad) for p in parts]
            shared.append(tuple(fresh))
            leaves |= {f"shared{i}.{name}": p for name, p in zip(("w_gate_up", "w_down", "gate_weight"), fresh) if p is not None}
        arguments["shared"] = shared
        return arguments, leaves

    def run(self, layer: Callable[..., Tensor] = mok.moe, poisoned: bool = True) -> dict[str, Tensor]:
        """{"y": y, name: gradient of every floating input}, in memory where nothing unwritten looks clean (`poisoned`; it takes memory itself)."""
        if poisoned and type(self["x"]) is Tensor:                # not a fake one
            poison(self["x"].device)
        arguments, leaves = self.leaves()
        arguments["shared"] = [mok.SharedExpert(*parts) for parts in arguments["shared"]]
        y = layer(**arguments, **self.settings)
        y.backward(self.dy)
        return collect(y, leaves)

    def truth(self, change: Change = lambda t: t) -> dict[str, Tensor]:
        """What `run` returns, by the reference in float64, `change` applied to every floating input and to dy."""
        arguments, leaves = self.leaves(lambda t: change(t.double()))
        y = moe_reference(**arguments, **self.settings)
        y.backward(change(self.dy.double()))
        return collect(y, leaves)

    def expected(self) -> Expected:
        """The float64 truth of every result and the scale of its errors."""
        return expected(self.truth, self["x"].dtype)

    def check(self, layer: Callable[..., Tensor] = mok.moe) -> dict[str, Tensor]:
        """Run twice: equal bits, everything finite, and every result within mok.tolerance's rule per expert and block. Returns the results."""
        got = self.run(layer)
        assert_same_bits(self.run(layer), got)
        self.compare(got)
        return got

    def compare(self, got: dict[str, Tensor], names: Sequence[str] = ()) -> None:
        """Every result in `got` (of those in `names`, if given) is finite and within mok.tolerance's rule."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)                 # many small operations: on a busy machine threads would wait for one another at each of them
        try:
            self._compare(got, names)
        finally:
            torch.set_num_threads(threads)

    def _compare(self, got: dict[str, Tensor], names: Sequence[str]) -> None:
        want = self.expected()
        ids = self["topk_ids"].reshape(-1, self["topk_ids"].shape[-1])
        tokens_of_expert = [torch.nonzero((ids == e).any(1)).flatten() for e in range(self["w_gate_up"].shape[0])]
        for name in names or got:
            value = got[name]
            assert value is not None, f"{name} has no gradient"
            assert torch.isfinite(value).all(), f"{name} is not finite"
            groups = tokens_of_expert if name in ("y", "x") and value.dim() == 2 else ()
            check_close(value, want.truth[name], want.scale[name], name, row_groups=groups, dtype=want.dtype)


def poison(device: torch.device) -> None:
    """NaN (all bits set) wherever the next pass may find what an earlier one left: reused buffers of the CPU engine, free memory of a GPU."""
    if device.type == "cuda":
        for megabytes in (1, 8, 64, 512):
            torch.full((megabytes << 18,), float("nan"), device=device)
    else:
        for buffer in runtime.rows._free:
            buffer.fill_(255)
        for scratch in runtime.tiles._scratch:
            for buffer in scratch._flat.values():
                buffer.view(torch.uint8).fill_(255)


def collect(y: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes as integers, so that NaN equals itself and +0 differs from -0."""
    return tensor.detach().contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        if a[name] is None or b[name] is None:
            assert a[name] is b[name], f"{name}: one run has a gradient and the other has none"
            continue
        assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape, name
        differ = int((bits(a[name]) != bits(b[name])).sum())
        assert not differ, f"{name} differs in {differ} of {a[name].numel()} elements"


def assert_exactly_zero(tensor: Tensor, what: str) -> None:
    assert not bits(tensor).any(), f"{what} must be +0 in every bit"


def problem(topk_ids: Tensor, E: int, H: int, I: int, device: str, dtype: torch.dtype, *, biases: bool = False, shared: Sequence[int] = (),
            seed: int = 0, **settings: Any) -> Problem:
    """Unit-scale data for routes (T, K): x, dy ~ N(0, 1), weights ~ N(0, 1 / fan_in), routing weights in [0.1, 1.1) fp32, un-normalised.

    Drawn on the CPU in float32, so that every device gets the same values. shared: the widths; the first is gated.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0, to: torch.dtype = dtype) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device, to)

    T, K = topk_ids.shape
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    tensors = {"x": draw(T, H), "topk_ids": topk_ids.to(device), "topk_weights": (torch.rand(T, K, generator=generator) + 0.1).to(device, wide),
               "w_gate_up": draw(E, 2 * I, H, scale=H**-0.5), "w_down": draw(E, H, I, scale=I**-0.5)}
    if biases:
        tensors |= {"b_gate_up": draw(E, 2 * I, scale=0.5), "b_down": draw(E, H, scale=0.5)}
    experts = [(draw(2 * w, H, scale=H**-0.5), draw(H, w, scale=w**-0.5), draw(H, scale=H**-0.5) if i == 0 else None) for i, w in enumerate(shared)]
    return Problem(tensors, experts, draw(T, H), settings)


def on_tensor_cores(device: str, size: int) -> int:
    """An awkward size on a CPU, on a GPU the next multiple of 16, so that the fused kernel runs and not the engine for all other shapes."""
    return size if device == "cpu" else -(-size // 16) * 16


def routes_with_counts(counts: Sequence[int], K: int = 1, seed: int = 0) -> Tensor:
    """(sum(counts) / K, K) int64: expert e occurs counts[e] times, in random places."""
    flat = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return flat[torch.randperm(flat.numel(), generator=torch.Generator().manual_seed(seed))].view(-1, K)


def random_routes(T: int, K: int, E: int, *, masked: float = 0.0, seed: int = 0) -> Tensor:
    """(T, K) int64: K distinct random experts a token; a fraction `masked` of the routes is -1."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(T, E, generator=generator).argsort(-1)[:, :K]
    return ids.masked_fill(torch.rand(T, K, generator=generator) < masked, -1)


def peak_bytes(device: str, run: Callable[[], Any]) -> int:
    """How much more memory than before `run` needs at its fullest: of the GPU, or of this process as the operating system counts its pages.

    On a GPU it is what was asked for: an allocator's block may be up to a megabyte larger, as it happens to find one. On a CPU what the C library
    holds for reuse is given back first, so that every page that `run` touches anew counts.
    """
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = requested_bytes("current")
        run()
        torch.cuda.synchronize()
        return requested_bytes("peak") - before
    if sys.platform != "linux":
        pytest.skip("the high-water mark of a process can be reset on Linux alone")
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")                                        # the high-water mark starts again from what is resident now
    before = _resident("VmRSS")
    run()
    return _resident("VmHWM") - before


def requested_bytes(which: str) -> int:
    """Bytes of all live GPU tensors, "current" or at their "peak" since the last reset."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]


def _resident(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))
