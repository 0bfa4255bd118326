"""Benchmarks by device: `run_bench` picks one; the CPU's is here, the GPU's in bench_cuda.py.

The CPU's roof is what PyTorch itself reaches on the layer's multiplications alone: bare torch.mm calls with preallocated results, one for each
expert and product, on as many rows as the expert has, in the same dtype, process and number of threads. No routing, activation or sum is in
it. Method: verify both dtypes' results against float64; then five blocks, each the bare calls followed by the layer; the recorded times are
medians, the ratio is that of the median block, and the spread is the farthest block's distance from it.
"""
from __future__ import annotations

import datetime
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .arguments import check_number
from .bench_cuda import BLOCK_MS, BLOCKS, PASSES, SHAPES, Case, Say, Shape, Stopwatch, run_cuda_bench, source_commit, verify
from .engines.cpu_tiles import TAIL_ROWS, TILE_ROWS, TileSizes

CPU_SHAPE = Shape("cpu", 4096, 1024, 512, 16, 4)
CPU_PASSES = ("forward", "forward+backward")
CPU_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_FP32_TOLERANCE = 1e-5
_BLOCK_S = 1.0
_LONGEST_BLOCK_MS = 3.6e6


class BareProducts:
    """The layer's multiplications as bare torch.mm calls on random operands: `forward` and `backward` run them once."""

    def __init__(self, case: Case) -> None:
        H, I = case.shape.H, case.shape.I
        generator = torch.Generator().manual_seed(3)

        def randn(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, dtype=case.x.dtype)

        counts = torch.bincount(case.topk_ids.flatten(), minlength=case.shape.E).tolist()
        self._forward: list[tuple[Tensor, Tensor, Tensor]] = []
        self._backward: list[tuple[Tensor, Tensor, Tensor]] = []
        for count, w_gate_up, w_down in zip(counts, case.w_gate_up.detach(), case.w_down.detach()):
            x, dy, h, dz = randn(count, H), randn(count, H), randn(count, I), randn(count, 2 * I)
            self._forward += [self._call(x, w_gate_up.T), self._call(h, w_down.T)]
            self._backward += [self._call(dy, w_down), self._call(dz, w_gate_up), self._call(dz.T, x), self._call(dy.T, h)]

    @staticmethod
    def _call(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return a, b, a.new_empty(a.shape[0], b.shape[1])

    def run(self, which: str) -> Callable[[], None]:
        """A function that makes the calls of one pass."""
        calls = {"forward": self._forward, "backward": self._backward, "forward+backward": self._forward + self._backward}[which]

        def products() -> None:
            for a, b, out in calls:
                torch.mm(a, b, out=out)

        return products


def bench_cpu(shapes: Sequence[Shape] = (CPU_SHAPE,), passes: Sequence[str] = CPU_PASSES, precisions: Sequence[str] = tuple(CPU_DTYPES), *,
              command: str = "", block_s: float = _BLOCK_S, pause_s: float = 0.0, say: Say | None = None) -> dict:
    """Verify and time the CPU engine; returns the record that `mok bench --json` prints.

    Each result of impl "mok" has, beside the fields of every record, ratio_to_mm: its time over that of the bare products (lower is better),
    whose spread `spread` is, and executed: multiplied rows over needed ones. ratio_to_roof is the same ratio of speeds.
    block_s: seconds that the layer runs in one block. pause_s: seconds of rest before each block. Raises RuntimeError where a result is
    wrong, ValueError for an unknown pass or precision.
    """
    for name, value, known in [("pass", which, CPU_PASSES) for which in passes] + [("precision", p, CPU_DTYPES) for p in precisions]:
        if value not in known:
            raise ValueError(f"{name} {value!r} must be one of {', '.join(known)}")
    say = say or (lambda line: print(line, file=sys.stderr, flush=True))
    results: list[dict] = []
    for shape in shapes:
        for precision in precisions:
            case = Case(shape, torch.device("cpu"), CPU_DTYPES[precision])
            errors = verify(case, "mok", passes)
            worst = max(errors, key=lambda name: errors[name])
            if precision == "fp32" and errors[worst] > _FP32_TOLERANCE:
                raise RuntimeError(f"mok is wrong on {shape} in fp32: {worst} is off by {errors[worst]:.3g} of its norm, {_FP32_TOLERANCE} allowed")
            say(f"{shape.name} T={shape.T} H={shape.H} I={shape.I} E={shape.E} K={shape.K} {precision}: verified, worst error {errors[worst]:.1e} ({worst}); "
                f"executes {executed_ratio(case):.3f} x its FLOPs, padding included")
            products = BareProducts(case)
            for which in passes:
                results += _measure(case, products, which, precision, block_s, pause_s)
                say("  " + result_line(results[-1]))
    roofs = [result["tflops"] for result in results if result["impl"] == "torch.mm"]
    return {"date": datetime.date.today().isoformat(), "commit": source_commit(), "gpu": "none", "cpu": cpu_name(), "threads": torch.get_num_threads(),
            "torch": torch.__version__, "triton": "not used", "command": command, "roof_tflops": max(roofs, default=0.0), "results": results}


def _measure(case: Case, products: BareProducts, which: str, precision: str, block_s: float, pause_s: float) -> list[dict]:
    """The records of the bare products and of the layer for one pass, block by block in turn."""
    watch, shape = Stopwatch(torch.device("cpu")), case.shape
    bare, layer = products.run(which), case.calls("mok", which)
    for call in (bare, layer, layer):
        watch.ms(call, 1)
    count = max(1, round(block_s * 1e3 / watch.ms(layer, 1)))

    def block(call: Callable[[], object]) -> float:
        time.sleep(pause_s)
        return watch.ms(call, count)

    blocks = [(block(bare), block(layer)) for _ in range(BLOCKS)]
    ratios = sorted(layer_ms / bare_ms for bare_ms, layer_ms in blocks)
    middle = statistics.median(ratios)

    def record(impl: str, ms: float, ratio: float, spread: float) -> dict:
        return {"shape": shape.name, "thiek": [shape.T, shape.H, shape.I, shape.E, shape.K], "pass": which, "precision": precision, "impl": impl,
                "ms": round(ms, 3), "tflops": round(shape.flops(which) / ms * 1e-9, 4), "ratio_to_roof": round(1 / ratio, 4), "spread": round(spread, 4)}

    bare_ms, layer_ms = (statistics.median(side) for side in zip(*blocks))
    extra = {"ratio_to_mm": round(middle, 4), "executed": round(executed_ratio(case), 4)}
    return [record("torch.mm", bare_ms, 1.0, max(abs(ms / bare_ms - 1) for ms, _ in blocks)),
            record("mok", layer_ms, middle, max(ratios[-1] - middle, middle - ratios[0])) | extra]


def executed_ratio(case: Case) -> float:
    """Rows that the CPU engine multiplies in a forward pass, tiles padded, over rows needed."""
    sizes = TileSizes(TILE_ROWS, TAIL_ROWS)
    counts = torch.bincount(case.topk_ids.flatten(), minlength=case.shape.E).tolist()
    return sum(rows for count in counts for _, _, rows in sizes.pieces(count)) / sum(counts)


def result_line(result: dict) -> str:
    """`us | TFLOP/s | GB/s | x torch.mm`; GB/s counts x, y and the weights once each way that the pass needs."""
    T, H, I, E, _ = result["thiek"]
    size = torch.empty((), dtype=CPU_DTYPES[result["precision"]]).element_size()
    moved = size * (2 * T * H + 3 * E * H * I) * {"forward+backward": 3}.get(result["pass"], 1)
    return (f"{result['shape']} {result['precision']} {result['pass']}: {result['ms'] * 1e3:.0f} us | {result['tflops']:.3f} TFLOP/s | "
            f"{moved / result['ms'] * 1e-6:.1f} GB/s | {result['ratio_to_mm']:.2f} +- {result['spread']:.2f} x the time of torch.mm")


def cpu_name() -> str:
    """The processor's name as the operating system tells it."""
    try:
        with open("/proc/cpuinfo") as file:
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), platform.processor())
    except OSError:
        return platform.processor() or platform.machine()


def run_bench(device: torch.device, shapes: Sequence[Shape] | None = None, passes: Sequence[str] | None = None, *, block_ms: float | None = None,
              breakdown: bool = False, command: str = "", say: Say | None = None) -> dict:
    """The benchmark of one device; None: all that it measures. Returns the record that `mok bench --json` prints.

    block_ms: length of one of the five blocks, None = the device's own. breakdown: with parts of the fused kernels left out, too.
    """
    if block_ms is not None:
        check_number("block_ms", block_ms, positive=True)
        if block_ms > _LONGEST_BLOCK_MS:
            raise ValueError(f"{block_ms=} must be at most {_LONGEST_BLOCK_MS:g}: an hour")
    if device.type == "cpu":
        if breakdown:
            raise NotImplementedError("breakdown=True is of the fused GPU kernels; a CPU has no such parts to leave out")
        return bench_cpu(shapes or (CPU_SHAPE,), passes or CPU_PASSES, command=command, say=say,
                         block_s=_BLOCK_S if block_ms is None else block_ms / 1e3)
    if device.type == "cuda":
        return run_cuda_bench(shapes or tuple(SHAPES.values()), passes or tuple(PASSES), command=command, block_ms=block_ms or BLOCK_MS,
                              breakdown=breakdown, device=device, say=say)
    raise ValueError(f"device={str(device)!r} must be a CPU or a CUDA device")
