"""Picks the engine that runs a tensor's pass, and says why when it is a slower one than the device could have."""
from __future__ import annotations

from typing import Any

import torch

from .protocol import Engine, Passes

__all__ = ["engine_name", "get_engine", "get_group_engine"]

_CPU_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def engine_name(device: torch.device, dtype: torch.dtype, hidden_size: int, intermediate_size: int | None = None) -> str:
    """"cpu", "hopper" or "torch_gpu": the engine for tensors on `device`, of `dtype`, with these sizes (None = any multiple of 16).

    Raises NotImplementedError for a device or dtype that no engine serves. Prints nothing and touches no GPU unless `device` is one.
    """
    if dtype not in _CPU_DTYPES:
        raise NotImplementedError(f"x.dtype={dtype} is not supported; use one of {', '.join(str(d) for d in _CPU_DTYPES)}")
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        raise NotImplementedError(f"x.device={device} is not supported; use a CPU or a CUDA device")
    from .hopper import limits

    reason = limits.unsupported_reason(device, dtype, hidden_size, intermediate_size)
    if reason is None:
        return "hopper"
    from ..runtime import runtime

    runtime.say_once(f"mok: the torch_gpu engine runs, not the fused kernel: {reason}")
    return "torch_gpu"


def get_engine(name: str) -> Engine:
    """The engine called `name`, loaded on first use."""
    if name == "cpu":
        from .cpu import CpuEngine

        return CpuEngine()
    if name == "torch_gpu":
        from .torch_gpu import TorchGpuEngine

        return TorchGpuEngine()
    if name == "hopper":
        from .hopper.engine import HopperEngine

        return HopperEngine()
    raise ValueError(f"engine {name!r} is unknown; use 'cpu', 'hopper' or 'torch_gpu'")


def get_group_engine(device: torch.device, group: Any) -> Passes:
    """The passes of `group`'s ranks: inside the launches where the group can, else over its process group by the CPU or the torch_gpu engine."""
    if device.type == "cpu":
        from .cpu import CpuEngine

        return CpuEngine(group)
    if group.fused is not None and device == group.fused.device:
        from .hopper.expert_parallel_group import GroupPasses

        return GroupPasses(group)
    from ..runtime import runtime
    from .torch_gpu import TorchGpuEngine

    runtime.say_once("mok: expert parallelism runs over the process group: several kernels and a host sync a pass, no graph capture")
    return TorchGpuEngine(group)
