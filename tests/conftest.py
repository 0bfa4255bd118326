"""Shared fixtures: GPU tests are left out by name where there is no GPU, and two cores are enough for everything else."""
from __future__ import annotations

import os
import sys

# Before torch: OpenMP's idle threads spin by default, and on few cores they take them from the CPU engine's own threads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch


def pytest_collection_modifyitems(items):
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        needed = 2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0
        if gpus < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} NVIDIA GPU{'s' if needed > 1 else ''}, this machine has {gpus}"))


def pytest_terminal_summary(terminalreporter):
    left_out = [r for r in terminalreporter.stats.get("skipped", []) if "NVIDIA GPU" in str(r.longrepr)]
    if left_out:
        terminalreporter.write_line(f"{len(left_out)} GPU tests left out: run `pytest -m gpu` on a machine with an NVIDIA GPU")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_error_left_for_the_next_test():
    """What a kernel reports shows at a later call: the test that caused it must ask for it, or it fails, and not whichever runs next."""
    yield
    runtime = sys.modules.get("mok.runtime")
    if runtime is not None and runtime.runtime.error_words:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        runtime.runtime.raise_pending_errors()
