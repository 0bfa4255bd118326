"""Promises P1, P2 and P4 on the CPU, to the bit: the CPU engine keeps them, and engines made to break them are caught."""
from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch
from faulty import run_completion_order, run_plain_mm
from oracle import Case, check_case, differing, make_case, run_engine, same_bits
from torch import Tensor

from mok.engines.cpu import CpuEngine
from mok.engines.cpu_tiles import TileMath
from mok.runtime import TilePool, runtime

Run = Callable[[Case], dict[str, Tensor | None]]
DTYPES = [pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in (torch.bfloat16, torch.float32, torch.float64)]
PER_TOKEN = ("y", "x", "topk_weights")


def run_cpu(case: Case) -> dict[str, Tensor | None]:
    return run_engine(CpuEngine(), case)


@contextmanager
def threads(count: int):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def odd_case(dtype: torch.dtype, seed: int = 0) -> Case:
    """10400 routes, odd H and I, 1.05 million activation elements; expert 8 is empty, biases, a gated shared expert of odd width."""
    return make_case(2600, 203, 101, 9, 4, dtype, biases=True, shared=((53, True),), seed=seed)


def odd_wide_case(dtype: torch.dtype) -> Case:
    """Weight gradients of several output tiles and chunks: one expert takes 1300 of the rows, 2I and H are wider than a tile."""
    ids = torch.where(torch.arange(1500) < 1300, 0, 1).unsqueeze(1)
    return make_case(1500, 1031, 261, 2, 1, dtype, topk_ids=ids)


def from_run_to_run(run: Run, case: Case, repeats: int = 3) -> list[str]:
    """P1: names of results that differ between runs of the same problem."""
    first = run(case)
    return sorted({name for _ in range(repeats) for name in differing(first, run(case))})


def between_thread_counts(run: Run, case: Case) -> list[str]:
    """P2: names of results that differ between 1, 2, 3 and 5 threads."""
    found: set[str] = set()
    with threads(1):
        first = run(case)
    for count in (2, 3, 5):
        with threads(count):
            found |= set(differing(first, run(case)))
    return sorted(found)


def between_batches(run: Run, case: Case) -> list[str]:
    """P4: names of per-token results that differ when the token is computed among others: reordered, a third of them, some, alone."""
    everything, T = run(case), case.dy.shape[0]
    order = torch.randperm(T, generator=torch.Generator().manual_seed(1))
    found: set[str] = set()
    for count in (T, T // 3, 257, 64, 2, 1):
        kept = order[:count]
        part = run(case.keep(kept))
        found |= {f"{name} among {count}" for name in PER_TOKEN if not same_bits(part[name], everything[name][kept])}
    return sorted(found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_p1_run_to_run(dtype):
    assert from_run_to_run(run_cpu, odd_case(dtype)) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [odd_case, odd_wide_case])
def test_p2_any_number_of_threads(dtype, make):
    assert between_thread_counts(run_cpu, make(dtype)) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_p4_any_batch(dtype):
    assert between_batches(run_cpu, odd_case(dtype)) == []


def test_p4_single_tokens():
    """Each of 40 tokens alone has the bits that it has among 2600: every place of a tile that a token can take."""
    for dtype in (torch.bfloat16, torch.float32):
        case = odd_case(dtype)
        everything = run_cpu(case)
        for token in torch.randint(0, 2600, (40,), generator=torch.Generator().manual_seed(2)).tolist():
            part = run_cpu(case.keep(torch.tensor([token])))
            assert all(same_bits(part[name], everything[name][token:token + 1]) for name in PER_TOKEN), (dtype, token)


def test_p1_catches_sums_in_completion_order():
    found = from_run_to_run(run_completion_order, make_case(2600, 33, 17, 9, 4, torch.float32))
    assert "y" in found and "x" in found


def test_p2_catches_plain_mm():
    """Through the weight gradients at odd shapes, which a threaded library contracts in another order."""
    found = between_thread_counts(run_plain_mm, odd_case(torch.float32)) + between_thread_counts(run_plain_mm, odd_wide_case(torch.float32))
    assert "w_gate_up" in found or "w_down" in found


def test_p4_catches_plain_mm():
    found = between_batches(run_plain_mm, odd_case(torch.float32))
    assert any(name.startswith("y ") for name in found) and any(name.startswith("x ") for name in found)


def test_bits_survive_users_threads_at_work():
    """Four threads of the user run passes of different dtypes at once, each with another thread count: the bits of a quiet run."""
    cases = [make_case(700, 65, 33, 4, 2, dtype, biases=True) for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.float16)]
    quiet = [run_cpu(case) for case in cases]
    failures: list[str] = []

    def user(number: int) -> None:
        torch.get_num_threads()                  # PyTorch forgets a count that is set before a thread has first asked for one
        torch.set_num_threads(number + 1)
        for _ in range(4):
            failures.extend(f"{name} of case {number}" for name in differing(run_cpu(cases[number]), quiet[number]))
        if torch.get_num_threads() != number + 1:
            failures.append(f"thread {number} has {torch.get_num_threads()} threads")

    before = torch.get_num_threads()
    users = [threading.Thread(target=user, args=(number,)) for number in range(4)]
    for thread in users:
        thread.start()
    for thread in users:
        thread.join()
    torch.set_num_threads(before)                # each user's set_num_threads also set the default of threads to come
    assert failures == [] and len(users) == 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_router_scores_keep_their_bits(dtype):
    """Logits and their gradient of x: any thread count, any batch; dweight: any thread count. Odd H and E."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2600, 203, generator=generator).to(dtype), torch.randn(13, 203, generator=generator)
    dlogits = torch.randn(2600, 13, generator=generator, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    engine = CpuEngine()
    logits = engine.router_scores(x, weight)
    dx, dweight = engine.router_scores_backward(x, weight, dlogits, True, True)
    assert logits.dtype == dlogits.dtype and dx.dtype == dtype and dweight.dtype == torch.float32
    for count in (1, 2, 3):
        with threads(count):
            assert same_bits(engine.router_scores(x, weight), logits)
            again = engine.router_scores_backward(x, weight, dlogits, True, True)
            assert same_bits(again[0], dx) and same_bits(again[1], dweight)
    order = torch.randperm(2600, generator=generator)
    for count in (2600, 700, 33, 1):
        kept = order[:count]
        assert same_bits(engine.router_scores(x[kept], weight), logits[kept])
        assert same_bits(engine.router_scores_backward(x[kept], weight, dlogits[kept], True, False)[0], dx[kept])
    x64, w64 = x.double(), weight.double()
    eps = torch.finfo(logits.dtype).eps
    assert (logits - x64 @ w64.T).abs().max() < 20 * eps * (x64 @ w64.T).abs().max()
    assert (dweight - dlogits.double().T @ x64).abs().max() < 40 * torch.finfo(torch.float32).eps * (dlogits.double().T @ x64).abs().max()
    assert (dx.double() - dlogits.double() @ w64).abs().max() < max(20 * eps, torch.finfo(dtype).eps) * (dlogits.double() @ w64).abs().max()
    assert engine.router_scores_backward(x, weight, dlogits, False, False) == (None, None)


def test_router_scores_ignore_the_users_matmul_precision():
    """Scores and fp32 passes have the same bits when the user has allowed bf16 in fp32 products, and the setting is as it was afterwards."""
    x, weight = torch.randn(300, 64), torch.randn(8, 64)
    case = make_case(300, 64, 32, 4, 2, torch.float32)
    expected, passed = CpuEngine().router_scores(x, weight), run_cpu(case)
    setting = torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        assert same_bits(CpuEngine().router_scores(x, weight), expected) and not differing(run_cpu(case), passed)
        assert setting.fp32_precision == "bf16"
    finally:
        setting.fp32_precision = before


def test_bf16_math_mode(monkeypatch):
    """What a CPU with AMX tiles runs: fp32 copies multiplied in oneDNN's bf16 math mode. The promises hold there too, and the setting is restored.

    On a CPU without the tiles the mode is accepted and computes in fp32, so the path can be tried everywhere.
    """
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    before = torch.backends.mkldnn.matmul.fp32_precision
    case = odd_case(torch.bfloat16)
    assert TileMath(torch.bfloat16).mode == "bf16" and TileMath(torch.float32).mode == "ieee"
    got = run_cpu(case)
    assert between_thread_counts(run_cpu, case) == [] and between_batches(run_cpu, case) == []
    assert torch.backends.mkldnn.matmul.fp32_precision == before
    check_case(case, got)


def test_scratch_is_shared_between_layers(monkeypatch):
    """48 layers' passes hold no more scratch than one: it belongs to the pool's threads, not to a layer, a pass or a weight."""
    monkeypatch.setattr(runtime, "tiles", TilePool())
    case = make_case(300, 64, 32, 4, 2, torch.bfloat16)
    with threads(1):
        run_cpu(case)
        one = runtime.tiles.num_bytes()
        for seed in range(48):
            run_cpu(make_case(300, 64, 32, 4, 2, torch.bfloat16, seed=seed, topk_ids=case.topk_ids))
    assert 0 < runtime.tiles.num_bytes() == one
