"""Times the GPU plan builder and checks it against the torch builder; also times ways to sum a token's rows for the unfused baseline.

Run from the repository's root on a machine with a GPU: PYTHONPATH=. python3 runs/plan_kernel.py [--sweep]
Prints one line a shape and a JSON document last.
"""
from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from mok.engines.hopper import plan_kernel
from mok.plan import RoutingPlan
from mok.runtime import runtime
from mok.unfused import sum_slots

SHAPES = {"qwen3-30b-a3b": (32768, 8, 128), "olmoe": (32768, 8, 64), "kimi-k2-ep64-rank": (28672, 2, 8), "1024 experts": (32768, 8, 1024),
          "384 experts": (32768, 8, 384), "2 million routes": (262144, 8, 128), "qwen3, 512 tokens": (512, 8, 128)}


def routes(T: int, K: int, E: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randn(T, E, device="cuda").topk(K).indices.to(dtype)


def kernel_times(call, repeats: int = 20) -> dict[str, float]:
    """Mean microseconds of each kernel of `call`, by name, from the profiler."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    return {row.key: row.self_device_time_total / repeats for row in recorded.key_averages() if row.self_device_time_total}


def graph_time(call, calls: int = 20, replays: int = 9) -> float:
    """Microseconds of GPU time a call, launch gaps included: `calls` of them in one CUDA graph, the median replay."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(replays):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) * 1e3 / calls)
    return statistics.median(times)


def host_time(call, calls: int = 200) -> float:
    """Microseconds of host time a call, nothing waited for."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def plans(sweep: bool) -> list[dict]:
    results: list[dict] = []
    default = (plan_kernel.BLOCK_RANK, plan_kernel.SCATTER_LAUNCH["num_warps"], plan_kernel.MAX_CHUNKS)
    variants = [(128, 4, 512), (64, 2, 512), (64, 2, 1024), (64, 2, 2048), (32, 1, 1024), (32, 1, 2048)] if sweep else [default]
    for name, (T, K, E) in list(SHAPES.items())[::3 if sweep else 1]:
        ids = routes(T, K, E)
        for block, warps, chunks in variants:
            plan_kernel.BLOCK_RANK, plan_kernel.MAX_CHUNKS = block, chunks
            plan_kernel.SCATTER_LAUNCH = {**plan_kernel.LAUNCH, "num_warps": warps}
            runtime.scratch.clear()                                                       # compiled kernels of the last variant
            call = partial(plan_kernel.build_plan, ids, E)
            equal = all(torch.equal(a, b) for a, b in zip(call().tensors(), RoutingPlan.build(ids, E).tensors()))
            host = host_time(call)                                                        # before the profiler, which makes launches slower
            kernels = kernel_times(call)
            result = {"shape": name, "T": T, "K": K, "E": E, "block_rank": block, "warps": warps, "max_chunks": chunks, "equal": equal,
                      "launches": len(kernels), "kernels_us": {key: round(value, 2) for key, value in kernels.items()},
                      "sum_us": round(sum(kernels.values()), 2), "graph_us": round(graph_time(call), 2), "host_us": round(host, 1)}
            results.append(result)
            print(json.dumps(result), flush=True)
    return results


def row_sums() -> dict[str, float]:
    """Microseconds of ways to sum each token's K rows of (T*K, H), on the first shape."""
    T, K, H = 32768, 8, 2048
    rows = torch.randn(T * K, H, device="cuda", dtype=torch.bfloat16)
    slot_to_row = torch.randperm(T * K, device="cuda")
    token = torch.empty_like(slot_to_row).scatter_(0, slot_to_row, torch.arange(T * K, device="cuda") // K)
    ways = {
        "index_select + sum": lambda: sum_slots(rows, slot_to_row, K),
        "embedding_bag": lambda: F.embedding_bag(slot_to_row.view(T, K), rows, mode="sum"),
        "index_add_": lambda: torch.zeros(T, H, device="cuda", dtype=torch.bfloat16).index_add_(0, token, rows),
        "ones bmm": lambda: torch.bmm(rows.new_ones(T, 1, K), rows.index_select(0, slot_to_row).view(T, K, H)),
    }
    return {name: round(sum(kernel_times(way, 10).values()), 1) for name, way in ways.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="also time other chunk counts")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "plans": plans(arguments.sweep), "row_sums_us": row_sums()}
    print(json.dumps(report["row_sums_us"]))
    print(json.dumps(report))
