"""Host time of one layer call on a GPU at a tiny shape, where it goes, and how long the first call of a fresh process takes.

    PYTHONPATH=. python3 runs/host_time.py                                       medians of many calls without a wait, and a profile of each
    TRITON_CACHE_DIR=$(mktemp -d) PYTHONPATH=. python3 runs/host_time.py --cold  first forward and backward, compilation included

Last line of stdout: one JSON document. `runs/train_cuda.py` runs both and records them.
"""
from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SHAPE = (64, 256, 256, 8, 2)           # T, H, I, E, K: the GPU is done before the host has come back
CALLS, BLOCKS = 60, 7                  # 60 calls queue at most 300 launches, well below what the driver holds before it makes the host wait
PROFILED_CALLS = 100
LIMITS_US = {"forward": 150, "backward": 250}


def layer_calls() -> dict[str, Callable[[], object]]:
    """What is timed. "forward": `mok.moe` in training, its plan included. The "engine" ones are the same passes below autograd and custom ops.

    "backward" runs in a thread that PyTorch keeps for each device; "backward, this thread" is the same call without that thread. The "torch" ones
    are an autograd.Function that saves and returns as many tensors and computes nothing: what PyTorch itself takes.
    """
    import torch

    import mok
    from mok.bench_cuda import Case, Shape
    from mok.engines.hopper import backward_launch, launch
    from mok.engines.hopper.engine import HopperEngine
    from mok.engines.protocol import MoETensors, PassOptions, Wants

    case = Case(Shape("tiny", *SHAPE), torch.device("cuda"))
    engine, options = HopperEngine(), PassOptions(save_for_backward=True)
    tensors = MoETensors(*case.leaves)
    plan = engine.build_plan(case.topk_ids, case.shape.E)
    saved = launch.forward(plan, tensors, options)[1]
    wants = Wants(True, True, True, True)
    leaves = [leaf.detach().clone().requires_grad_() for leaf in case.leaves]
    y = mok.moe(leaves[0], case.topk_ids, *leaves[1:])
    kept = (*leaves, saved.z, saved.shared_z, *plan.tensors())
    grads = tuple(torch.empty_like(leaf) for leaf in leaves)

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*kept)
            return case.dy.view_as(case.dy)

        @staticmethod
        def backward(ctx, dy):
            return grads if ctx.saved_tensors else None

    nothing = Nothing.apply(*leaves)

    def forward_no_grad() -> object:
        with torch.no_grad():
            return mok.moe(leaves[0], case.topk_ids, *leaves[1:])

    def backward() -> object:
        return torch.autograd.grad(y, leaves, case.dy, retain_graph=True)

    def backward_in_this_thread() -> object:
        with torch.autograd.set_multithreading_enabled(False):
            return backward()

    return {
        "plan": lambda: torch.ops.mok.plan(case.topk_ids, case.shape.E, torch.bfloat16, case.shape.H, case.shape.I, 0, ""),
        "forward": lambda: mok.moe(leaves[0], case.topk_ids, *leaves[1:]),
        "forward, no grad": forward_no_grad,
        "backward": backward,
        "backward, this thread": backward_in_this_thread,
        "torch: forward": lambda: Nothing.apply(*leaves),
        "torch: backward": lambda: torch.autograd.grad(nothing, leaves, case.dy, retain_graph=True),
        "engine: plan": lambda: engine.build_plan(case.topk_ids, case.shape.E),
        "engine: forward": lambda: launch.forward(plan, tensors, options),
        "engine: backward": lambda: backward_launch.hopper_backward(plan, tensors, options, saved, case.dy, wants, None),
    }


def host_times() -> dict:
    """{"us": {name: median host time of a call}, "limits_us", "shape", "profile": {name: where the time goes}}; nothing waits inside a block.

    "backward, its Function alone" is what of "backward" passes inside mok's own part, in PyTorch's thread.
    """
    import torch

    calls = layer_calls()
    medians = {name: median_us(call) for name, call in calls.items()}
    inside: list[int] = []

    def timed(body: Callable[..., Any], *arguments: Any) -> Any:
        start = time.perf_counter_ns()
        result = body(*arguments)
        inside.append(time.perf_counter_ns() - start)
        return result

    with around_backward(timed):
        median_us(calls["backward"])
    medians["backward, its Function alone"] = round(statistics.median(inside[CALLS:]) / 1e3, 1)
    torch.cuda.synchronize()
    profiles = {name: profile(calls[name]) for name in ("forward", "forward, no grad", "engine: forward", "engine: backward")}
    profiler = cProfile.Profile()
    with around_backward(profiler.runcall):
        for _ in range(PROFILED_CALLS):
            calls["backward"]()
    torch.cuda.synchronize()
    profiles["backward, its Function alone"] = most_time(profiler)
    return {"us": medians, "limits_us": LIMITS_US, "shape": SHAPE, "profile": profiles}


def median_us(call: Callable[[], object]) -> float:
    """Median host time of many calls."""
    import torch

    times: list[int] = []
    for block in range(BLOCKS + 1):
        torch.cuda.synchronize()
        for _ in range(CALLS):
            start = time.perf_counter_ns()
            call()
            if block:                                            # the first block compiles and warms
                times.append(time.perf_counter_ns() - start)
    return round(statistics.median(times) / 1e3, 1)


@contextmanager
def around_backward(caller: Callable[..., Any]) -> Iterator[None]:
    """caller(body, ctx, dy) is called in the place of body(ctx, dy), the backward of `mok.moe`, in whatever thread that runs."""
    from mok.function import _moe_forward_directly as function

    body = function.backward
    function.backward = staticmethod(lambda ctx, dy: caller(body, ctx, dy))          # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        function.backward = staticmethod(body)                                       # type: ignore[method-assign,assignment]


def profile(call: Callable[[], object]) -> list[dict]:
    """`most_time` of many calls in this thread."""
    import torch

    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(PROFILED_CALLS):
        call()
    profiler.disable()
    torch.cuda.synchronize()
    return most_time(profiler)


def most_time(profiler: cProfile.Profile, lines: int = 20) -> list[dict]:
    """The functions with most time of their own, in us a call; the profiler's own cost is in it, so only the shares count."""
    stats = pstats.Stats(profiler).stats                         # type: ignore[attr-defined]
    rows = [{"function": f"{Path(file).name}:{name}" if line else name, "calls": count / PROFILED_CALLS, "own_us": round(own * 1e6 / PROFILED_CALLS, 1),
             "with_callees_us": round(total * 1e6 / PROFILED_CALLS, 1)} for (file, line, name), (_, count, own, total, _) in stats.items()]
    return sorted(rows, key=lambda row: -row["own_us"])[:lines]


def first_calls() -> dict[str, float]:
    """Seconds of this process's first forward, and of it and the first backward, from the call to the result; imports and CUDA's start apart."""
    start = time.perf_counter()
    import torch

    import mok
    from mok.bench_cuda import Case, Shape

    case = Case(Shape("tiny", *SHAPE), torch.device("cuda"))
    torch.cuda.synchronize()
    ready = time.perf_counter()
    leaves = [leaf.requires_grad_() for leaf in case.leaves]
    y = mok.moe(leaves[0], case.topk_ids, *leaves[1:])
    torch.cuda.synchronize()
    forward = time.perf_counter()
    y.backward(case.dy)
    torch.cuda.synchronize()
    both = time.perf_counter()
    return {"imports_and_cuda_s": round(ready - start, 2), "forward_s": round(forward - ready, 2), "both_s": round(both - ready, 2),
            "forward_limit_s": 20, "both_limit_s": 30}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cold", action="store_true", help="only the first calls of this process")
    document = first_calls() if parser.parse_args().cold else host_times()
    print(json.dumps(document))


if __name__ == "__main__":
    main()
