"""What decides a run's bits besides its inputs and settings: the processor, the versions and this package's code."""
from __future__ import annotations

import hashlib
import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch

# Settings of the math libraries that change bits; they are recorded, not read by this package.
_LIBRARY_VARIABLES = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA",
                      "NVIDIA_TF32_OVERRIDE")


def fingerprint(device: torch.device) -> dict[str, str]:
    """Name -> value of every fact that may change a bit of a run on `device`. Two equal fingerprints promise equal bits (P1).

    The number of threads is not among them: it is a setting that a replay can set, and no bit of `mok.moe` depends on it (P2).
    """
    from . import __version__

    facts = {"mok": __version__, "code": code_digest(), "torch": torch.__version__, "python": platform.python_version(),
             "system": f"{platform.system()} {platform.machine()} {' '.join(platform.libc_ver())}".strip(),
             "cpu": cpu_name(), "cpu_capability": torch.backends.cpu.get_cpu_capability(),
             "math_settings": " ".join([f"matmul={torch.get_float32_matmul_precision()}",
                                        *(f"{name}={os.environ[name]}" for name in _LIBRARY_VARIABLES if name in os.environ)])}
    if device.type == "cuda":
        from importlib.metadata import PackageNotFoundError, version

        properties = torch.cuda.get_device_properties(device)
        facts["gpu"] = f"{properties.name}, compute capability {properties.major}.{properties.minor}, {properties.multi_processor_count} SMs"
        facts["cuda"] = f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        try:
            facts["triton"] = version("triton")
        except PackageNotFoundError:
            facts["triton"] = "none"
    return facts


@cache
def code_digest() -> str:
    """SHA-256 over the path and contents of every Python file of this package, as they were when this process first asked."""
    root = Path(__file__).parent
    hasher = hashlib.sha256()
    for file in sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).as_posix()):
        text = file.read_bytes()
        hasher.update(f"{file.relative_to(root).as_posix()} {len(text)}\n".encode())
        hasher.update(text)
    return hasher.hexdigest()


def cpu_name() -> str:
    """Model, family, model number, stepping and a hash of the instruction flags: virtual machines give unlike processors one name."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags", fields.get("Features", ""))
    short = hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest()[:12]
    name = fields.get("model name", fields.get("CPU part", platform.machine()))
    return f"{name}, family {fields.get('cpu family', '?')} model {fields.get('model', '?')} stepping {fields.get('stepping', '?')}, flags {short}"


def differences(first: dict[str, Any], second: dict[str, Any], between: str = "{name}: {first} against {second}") -> list[str]:
    """One text for each fact that differs, in the form of `between`; "nothing" for a fact that one side lacks. Empty where all are equal."""
    return [between.format(name=name, first=first.get(name, "nothing"), second=second.get(name, "nothing"))
            for name in {**first, **second} if first.get(name) != second.get(name)]
