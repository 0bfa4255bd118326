"""The GPU's rotary kernel against the formula: on an NVIDIA GPU, and elsewhere under Triton's interpreter in a process of its own."""
from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from mok.lm.model import apply_rope, rope_tables

pytest.importorskip("triton")
from mok.lm.rope_kernel import rotate

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
on_device = (lambda test: test) if INTERPRETED else pytest.mark.gpu      # the cases below run on DEVICE


@on_device
@pytest.mark.parametrize(("B", "S", "heads", "kv", "D"), [
    (2, 5, 4, 2, 16),          # all powers of two
    (1, 3, 3, 1, 6),           # heads and half a head that no block divides evenly
    (3, 1, 1, 1, 128),         # one position
])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_passes_are_the_formula(B, S, heads, kv, D, dtype):
    """q is a strided slice of q, k and v, as attention has it; what lies beside it in memory must not be read or written."""
    qkv = torch.randn(B, S, heads + 2 * kv, D).to(dtype).transpose(1, 2)
    dy = torch.randn(B, heads, S, D).to(dtype)
    cos, sin = rope_tables(S + 2, D, 100.0)
    q = qkv[:, :heads].double().requires_grad_()
    expected = apply_rope(q.float(), cos[:S], sin[:S])
    expected.backward(dy.float())
    ours = qkv.to(DEVICE).requires_grad_()
    y = rotate(ours[:, :heads], cos[:S].to(DEVICE), sin[:S].to(DEVICE))
    y.backward(dy.to(DEVICE))
    bound = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-6}       # the interpreter truncates
    assert y.dtype == dtype
    torch.testing.assert_close(y.cpu().float(), expected.detach(), **bound)
    torch.testing.assert_close(ours.grad[:, :heads].cpu().float(), q.grad.float(), **bound)
    assert (ours.grad[:, heads:] == 0).all()


@pytest.mark.skipif(INTERPRETED, reason="this is the test that starts the interpreter")
def test_all_cases_under_the_interpreter():
    """TRITON_INTERPRET must be set before Triton is imported, so the cases above run in another process, on CPU tensors."""
    result = subprocess.run([sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore", __file__],
                            env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300)
    passed = re.search(r"(\d+) passed", result.stdout)
    assert result.returncode == 0 and passed and int(passed.group(1)) == 6, result.stdout[-4000:] + result.stderr[-2000:]
