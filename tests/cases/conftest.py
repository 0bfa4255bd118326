"""Fixtures of the reported faults: the devices and dtypes that every case runs on, and memory in which nothing unwritten looks clean."""
from __future__ import annotations

import pytest
import torch

_SETTINGS = [pytest.param("cpu", torch.bfloat16, id="cpu-bf16"), pytest.param("cpu", torch.float32, id="cpu-fp32"),
             pytest.param("cuda", torch.bfloat16, id="cuda-bf16", marks=pytest.mark.gpu)]
_DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]


def pytest_generate_tests(metafunc):
    """A test that takes `dtype` beside `device` runs in bf16 and fp32 on the CPU and in bf16 on a GPU; one that takes `device` alone on both."""
    if "dtype" in metafunc.fixturenames and "device" in metafunc.fixturenames:
        metafunc.parametrize(("device", "dtype"), _SETTINGS)
    elif "device" in metafunc.fixturenames:
        metafunc.parametrize("device", _DEVICES)


@pytest.fixture(autouse=True)
def _unwritten_memory_is_nan():
    """torch fills every `empty` with NaN (or the largest integer), as a fresh page from the operating system never is."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
