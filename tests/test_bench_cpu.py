"""The CPU benchmark: what it compares with does the layer's multiplications, a wrong result is refused, the record says what was measured."""
from __future__ import annotations

import pytest
import torch

from mok import bench
from mok.bench import BareProducts, bench_cpu, executed_ratio, run_bench
from mok.bench_cuda import Case, Shape
from mok.engines.cpu import CpuEngine

SMALL = Shape("small", 70, 32, 16, 5, 3)
CPU = torch.device("cpu")


@pytest.mark.parametrize(("which", "flops"), [("forward", 6), ("backward", 12), ("forward+backward", 18)])
def test_bare_products_are_the_layers_multiplications(which, flops, monkeypatch):
    """Counted by their shapes: 2 M N K_dim each, on the experts' real row counts, into preallocated results."""
    case = Case(SMALL, CPU, torch.float32)
    products = BareProducts(case).run(which)
    done, rows = [0], []

    def counting(a, b, out):
        done[0] += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        assert out.shape == (a.shape[0], b.shape[1]) and a.dtype == torch.float32
        rows.append(a.shape[0])

    monkeypatch.setattr(torch, "mm", counting)
    products()
    assert done[0] == flops * SMALL.T * SMALL.K * SMALL.H * SMALL.I == SMALL.flops(which)
    if which == "forward":
        assert rows[::2] == torch.bincount(case.topk_ids.flatten(), minlength=5).tolist()


def test_record():
    lines = []
    record = bench_cpu(
        [SMALL], command="mok bench --device cpu", block_s=0.002, say=lines.append)
    assert set(record) >= {"date", "commit", "gpu", "torch", "triton", "command", "roof_tflops", "results", "cpu", "threads"}
    assert record["threads"] == torch.get_num_threads() and record["command"] == "mok bench --device cpu"
    assert [(r["precision"], r["pass"], r["impl"]) for r in record["results"]] == [
        (precision, which, impl) for precision in ("fp32", "bf16") for which in ("forward", "forward+backward") for impl in ("torch.mm", "mok")]
    for result in record["results"]:
        assert set(result) >= {"shape", "thiek", "pass", "precision", "impl", "ms", "tflops", "ratio_to_roof", "spread"}
        assert result["ms"] > 0 and result["thiek"] == [70, 32, 16, 5, 3]
        if result["impl"] == "mok":
            assert result["ratio_to_mm"] == pytest.approx(1 / result["ratio_to_roof"], rel=0.01) and result["executed"] > 1
    assert sum("verified" in line for line in lines) == 2 and sum("x the time of torch.mm" in line for line in lines) == 4


def test_ratio_is_that_of_the_median_block(monkeypatch):
    times = iter([1.0, 1.0, 1.0, 1.0, 10.0, 20.0, 10.0, 12.0, 10.0, 15.0, 20.0, 10.0, 10.0, 40.0])     # warm-up, then (bare, layer) of five blocks
    monkeypatch.setattr(bench.Stopwatch, "ms", lambda self, call, count: next(times))
    case = Case(SMALL, CPU, torch.float32)
    bare, layer = bench._measure(case, BareProducts(case), "forward", "fp32", 1.0, 0.0)
    assert layer["ratio_to_mm"] == 1.5 and layer["spread"] == 2.5 and layer["ms"] == 15.0 and bare["ms"] == 10.0


@pytest.mark.parametrize("factor", [1.1, float("nan"), 1.0001])
def test_a_wrong_result_is_refused(monkeypatch, factor):
    """1.0001 is within what bf16 may do, and refused for fp32 only."""
    forward = CpuEngine.forward

    def wrong(self, *arguments):
        y, saved = forward(self, *arguments)
        return y * factor, saved

    monkeypatch.setattr(CpuEngine, "forward", wrong)
    with pytest.raises(RuntimeError, match="mok is wrong"):
        bench_cpu([SMALL], precisions=["fp32"], block_s=0.001, say=lambda line: None)


def test_executed_ratio_counts_the_engines_tiles():
    case = Case(Shape("s", 300, 16, 16, 2, 2), CPU)              # both experts take all 300 tokens: 256 + 44 rows, computed as 256 + 64
    assert executed_ratio(case) == 320 / 300


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="'sideways'"):
        bench_cpu([SMALL], passes=["sideways"])
    with pytest.raises(ValueError, match="'fp8'"):
        bench_cpu([SMALL], precisions=["fp8"])
    with pytest.raises(ValueError, match="'meta'"):
        run_bench(torch.device("meta"))
