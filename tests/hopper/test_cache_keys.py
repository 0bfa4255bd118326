"""A compiled kernel is found on disk whatever a process compiles first."""
from __future__ import annotations

import subprocess
import sys

import pytest

cache_keys = pytest.importorskip("mok.engines.hopper.cache_keys")
pytest.importorskip("mok.engines.hopper.launch", reason="needs Triton with Gluon")

KERNELS = (("forward", "_forward_kernel"), ("backward", "_backward_kernel"), ("expert_parallel_plan", "_exchange_ids_kernel"),
           ("expert_parallel_plan", "_cut_plan_kernel"), ("plan_kernel", "_scatter_slots_kernel"))
PROGRAM = """
import importlib, sys
importlib.import_module("mok.engines.hopper." + sys.argv[1])
for kernel in sys.argv[2:]:
    module, name = kernel.split(".")
    print(kernel, getattr(importlib.import_module("mok.engines.hopper." + module), name).cache_key)
"""


def keys(entry: str, kernels) -> set[str]:
    """Keys of the kernels in a process that imports `entry` and asks for them in this order."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, entry, *[".".join(kernel) for kernel in kernels]], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines())


def test_keys_do_not_depend_on_what_a_process_asks_for_first():
    first = keys("engine", KERNELS)
    assert len(first) == len(KERNELS)
    for entry in ("expert_parallel", "launch", "compile_check", "expert_parallel_plan_launch"):
        assert keys(entry, KERNELS[::-1]) == first, entry


def test_every_file_with_device_code_is_listed():
    from pathlib import Path

    folder = Path(cache_keys.__file__).parent
    with_kernels = {path.stem for path in folder.glob("*.py") if "@gluon.jit" in path.read_text() or "@triton.jit" in path.read_text()}
    assert with_kernels == set(cache_keys.FILES)
