"""What the Hopper engine can run, as one predicate; imports no Triton, so that any machine may ask."""
from __future__ import annotations

import torch

SIZE_MULTIPLE = 16    # TMA needs row strides that are multiples of 16 bytes; 16 elements also keep every half of z and each bias aligned
MAX_SHARED = 2        # shared experts inside the launch: each costs the kernel three TMA descriptors


def unsupported_reason(device: torch.device, dtype: torch.dtype, hidden_size: int, intermediate_size: int | None = None) -> str | None:
    """None if the fused kernel runs on `device` with tensors of `dtype`, H and I (None = any multiple of 16); else why not, for a person."""
    if device.type != "cuda":
        return f"{device=} is not a CUDA device"
    if dtype != torch.bfloat16:
        return f"{dtype=} is not torch.bfloat16"
    for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
        if size is not None and (size < 1 or size % SIZE_MULTIPLE):
            return f"{name}={size} is not a multiple of {SIZE_MULTIPLE}"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, not 9.0"
    if _triton_missing():
        return "Triton with Gluon (3.6 or newer) is not installed"
    return None


def unsupported_shared_reason(widths: tuple[int, ...]) -> str | None:
    """None if shared experts of these widths I_s run inside the launch; else why not."""
    if len(widths) > MAX_SHARED:
        return f"{len(widths)} shared experts are more than the {MAX_SHARED} that one launch takes"
    for width in widths:
        if width % SIZE_MULTIPLE:
            return f"the shared expert's width {width} is not a multiple of {SIZE_MULTIPLE}"
    return None


def _triton_missing() -> bool:
    from importlib.util import find_spec

    return find_spec("triton") is None or find_spec("triton.experimental.gluon") is None
