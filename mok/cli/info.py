"""`mok info`: what this machine has, which engines can run on it, and why the others cannot."""
from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from typing import Any

from .console import Output

HELP = "show versions, hardware, and the engines that can run here"
DESCRIPTION = """\
Show the versions in use, the hardware, which engines can run on it (and why the others cannot), and the CPU engine's self-check: whether this
machine's library products keep their bits as the engine needs.

  mok info
  mok info --json"""
_PACKAGES = ("torch", "triton", "safetensors", "rich", "matplotlib")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(arguments: argparse.Namespace, output: Output) -> int:
    document = {"command": "info", **collect()}
    output.table("Versions", ("package", "version"), list(document["versions"].items()))
    output.table("Hardware", ("", ""), [(name.replace("_", " "), _text(value)) for name, value in document["hardware"].items()])
    output.table("Engines", ("engine", "runs here", "detail"), [(e["engine"], "yes" if e["available"] else "no", e["detail"]) for e in document["engines"]])
    output.line(f"CPU engine self-check: {document['cpu_self_check']}")
    if "hopper_scratch" in document:
        _print_scratch(document["hopper_scratch"], output)
    output.finish(document)
    return 0


def collect() -> dict[str, Any]:
    """The JSON document, without the command's name."""
    import torch

    from .. import __version__

    versions = {"mok": __version__, "python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}
    gpus = [_gpu(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    hardware = {"system": f"{platform.system()} {platform.machine()}", "cpu": _cpu_name(), "cores": os.cpu_count(), "torch_threads": torch.get_num_threads(),
                "cpu_vector_instructions": torch.backends.cpu.get_cpu_capability(), "gpus": gpus}
    return {"versions": versions, "hardware": hardware, **_engines(len(gpus))}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), platform.processor())
    except OSError:
        return platform.processor() or "unknown"


def _gpu(index: int) -> str:
    import torch

    p = torch.cuda.get_device_properties(index)
    return f"{index}: {p.name}, compute capability {p.major}.{p.minor}, {p.multi_processor_count} SMs, {p.total_memory / 2**30:.0f} GiB"


def _text(value: Any) -> str:
    return "none" if value == [] else "; ".join(value) if isinstance(value, list) else str(value)


def _engines(num_gpus: int) -> dict[str, Any]:
    """Which engine runs here, with the reason where it does not, and the CPU engine's self-check."""
    import torch

    from ..engines.cpu import self_check

    if num_gpus == 0:
        build = "is built for CUDA but sees no GPU" if torch.version.cuda else "is built without CUDA"
        missing = f"torch {torch.__version__} {build}"
        gpu_engines = [{"engine": name, "available": False, "detail": missing} for name in ("hopper", "torch_gpu")]
        return {"engines": [_cpu_engine(), *gpu_engines], "cpu_self_check": self_check()}
    from ..engines.hopper import limits

    device = torch.device("cuda", torch.cuda.current_device())
    reason = limits.unsupported_reason(device, torch.bfloat16, 256, 256)
    scratch = {} if reason else {"hopper_scratch": hopper_scratch()}
    return {**scratch, "engines": [_cpu_engine(), {"engine": "hopper", "available": reason is None, "detail": reason or "one kernel a pass, bf16"},
                        {"engine": "torch_gpu", "available": True, "detail": "plain PyTorch operations, for what the fused kernel does not take"}],
            "cpu_self_check": self_check()}


def _cpu_engine() -> dict[str, Any]:
    return {"engine": "cpu", "available": True, "detail": "bf16, fp32, fp64, and fp16 through fp32 copies"}


# Bytes of GPU memory that one pass uses beside its inputs, results and saved tensors: expressions in the names below, for a layer without
# shared experts and with every gradient wanted. A test evaluates them and compares with what the engine allocates.
SCRATCH_FORMULAS = {
    "R": "(T * K + min(E, T * K) * 127 + 127) // 128 * 128",
    "forward": "2 * (min(x_ring, R // 128) * 128 * H + min(h_ring, R // 128) * 128 * I + R * H + 2 * T)",
    "backward": "2 * R * (3 * H + 3 * I) + 4 * R * (-(-I // column_tile))",
}


def hopper_scratch() -> dict[str, Any]:
    """The formulas, and for each named layer of the benchmark what they give: rows R of the routed buffer, bytes of a forward and of a backward pass."""
    from ..bench_cuda import SHAPES

    return {"formulas": SCRATCH_FORMULAS, "where": "T tokens, H hidden, I intermediate, E experts, K routes a token; x_ring and h_ring: row tiles in flight",
            "layers": {shape.name: scratch_bytes(shape.T, shape.H, shape.I, shape.E, shape.K) for shape in SHAPES.values()}}


def scratch_bytes(T: int, H: int, I: int, E: int, K: int) -> dict[str, int]:
    """R, and the bytes of a forward and of a backward pass, as the engine allocates them for one layer without shared experts."""
    from ..engines.hopper.backward_launch import backward_scratch
    from ..engines.hopper.launch import granularity, scratch_sizes
    from ..engines.protocol import Wants
    from ..plan import plan_capacity

    rows = plan_capacity(T * K, E)
    return {"R": rows, "forward": scratch_sizes(T, H, I, rows, (), granularity(None, H, I)).bytes,
            "backward": backward_scratch(T, H, I, rows, (), Wants(True, True, True, True)).bytes}


def _print_scratch(scratch: dict[str, Any], output: Output) -> None:
    rows = [(name, f"{sizes['R']:,}", f"{sizes['forward'] / 2**20:,.0f} MiB", f"{sizes['backward'] / 2**20:,.0f} MiB")
            for name, sizes in scratch["layers"].items()]
    output.table("Scratch of the fused kernel", ("layer", "rows R", "forward", "backward"), rows)
    for name, formula in scratch["formulas"].items():
        output.line(f"  {name} = {formula}" + ("" if name == "R" else " bytes"))
    output.line(f"  {scratch['where']}")
