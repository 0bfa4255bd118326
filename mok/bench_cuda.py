"""The GPU benchmark: verify on sampled rows, then time each pass against the card's own matrix-multiply roof, measured before and after it.

Method. Warm the card; for each (shape, pass, implementation): roof, five blocks, roof, where a roof is a BF16 8192^3 product of random data
run as long as the blocks together. If the two roofs differ by more than 3 % the card changed its clock meanwhile and the three are repeated.
The recorded time is the median block. FLOPs are those that the layer needs (6*T*K*H*I forward, twice that backward), padding not counted.
Runs on a CPU too, with a small roof, so that its tests need no GPU.
"""
from __future__ import annotations

import datetime
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

from .arguments import LARGEST
from .config import BLOCK_M
from .function import moe
from .reference import expert_reference, moe_reference
from .unfused import unfused_moe

BLOCK_MS = 100.0
PASSES = {"forward": 6, "forward-no-grad": 6, "backward": 12, "forward+backward": 18}   # FLOPs / (T*K*H*I)
IMPLS = ("mok", "unfused")
# What a run of the fused kernels leaves out in a breakdown -> the `omit` of ForwardConfig and of BackwardConfig; such runs compute nothing right
LEFT_OUT = {
    "forward": {"dispatch copies": 1, "combine": 2},
    "backward": {"copies of dy": 1, "copies of x": 2, "sums": 4, "arithmetic of the dh epilogue": 8, "all of these": 15},
}
BLOCKS = 5
ROOF_DIFFERENCE = 0.03
ROOF_ATTEMPTS = 4
WARM_UP_S = 3.0
SAMPLED_TOKENS = 16
_MOST_ELEMENTS = 2**40    # of a shape given by its sizes: more than any one device holds
TOLERANCE = 0.02          # relative norm of a sampled row's or expert's error; BF16 results here lie near 0.004

Say = Callable[[str], None]


@dataclass(frozen=True)
class Shape:
    """T tokens, H hidden, I intermediate, E experts on this GPU, K routes a token; the routed experts alone, plain SwiGLU, no biases."""

    name: str
    T: int
    H: int
    I: int
    E: int
    K: int

    def flops(self, which: str) -> int:
        return PASSES[which] * self.T * self.K * self.H * self.I


# Published layer sizes; the "rank" shapes are what one rank of an expert-parallel group computes on with evenly spread tokens.
SHAPES = {shape.name: shape for shape in (
    Shape("qwen3-30b-a3b", 32768, 2048, 768, 128, 8),
    Shape("olmoe", 32768, 2048, 1024, 64, 8),
    Shape("kimi-k2-ep64-rank", 28672, 7168, 2048, 8, 2),
    Shape("mixtral-8x7b", 16384, 4096, 14336, 8, 2),
    Shape("deepseek-v3-ep8-rank", 8192, 7168, 2048, 32, 8),       # 256 experts over 8 ranks: 32 here, 65536 rows
    Shape("gpt-oss-120b", 32768, 2880, 2880, 128, 4),
)}


def shape_of(text: str) -> Shape:
    """The named shape, or "T,H,I,E,K" as one. Raises ValueError for anything else."""
    if text in SHAPES:
        return SHAPES[text]
    parts = text.split(",")
    if len(parts) != 5 or not all(part.strip().isdecimal() and 0 < int(part) <= LARGEST for part in parts):
        raise ValueError(f"shape {text!r} must be five positive integers T,H,I,E,K or one of {', '.join(SHAPES)}")
    T, H, I, E, K = (int(part) for part in parts)
    if K > E:
        raise ValueError(f"shape {text!r} must have K at most E")
    shape = Shape("custom", T, H, I, E, K)
    if 3 * E * H * I + T * (K + 2) * H > _MOST_ELEMENTS:
        raise ValueError(f"shape {text!r} must have at most {_MOST_ELEMENTS:,} weights and values of tokens")
    return shape


class Case:
    """Random inputs of one shape: unit-scale x and dy, weights of scale 1/sqrt(fan-in), top-k of random logits with softmax weights."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> None:
        generator = torch.Generator(device).manual_seed(seed)

        def randn(*size: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(*size, generator=generator, device=device, dtype=dtype)

        self.shape = shape
        self.x, self.dy = randn(shape.T, shape.H), randn(shape.T, shape.H)
        self.w_gate_up = randn(shape.E, 2 * shape.I, shape.H).mul_(shape.H**-0.5)
        self.w_down = randn(shape.E, shape.H, shape.I).mul_(shape.I**-0.5)
        values, self.topk_ids = randn(shape.T, shape.E, dtype=torch.float32).topk(shape.K)
        self.topk_weights = values.softmax(-1)

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What is differentiated."""
        return self.x, self.topk_weights, self.w_gate_up, self.w_down

    def run(self, impl: str, precision: str = "bf16") -> Tensor:
        """One forward call of an implementation."""
        if impl == "unfused":
            return unfused_moe(self.x, self.topk_ids, self.topk_weights, self.w_gate_up, self.w_down)
        return moe(self.x, self.topk_ids, self.topk_weights, self.w_gate_up, self.w_down, precision=precision)

    def calls(self, impl: str, which: str, precision: str = "bf16") -> Callable[[], object]:
        """A function that runs one pass once. For "backward" the forward runs here, once."""
        for leaf in self.leaves:
            leaf.requires_grad_(which != "forward-no-grad")

        def forward_backward() -> object:
            return torch.autograd.grad(self.run(impl, precision), self.leaves, self.dy)

        def no_grad() -> object:
            with torch.no_grad():
                return self.run(impl, precision)

        if which == "forward":
            return lambda: self.run(impl, precision)
        if which == "forward-no-grad":
            return no_grad
        if which == "forward+backward":
            return forward_backward
        y = self.run(impl, precision)
        return lambda: torch.autograd.grad(y, self.leaves, self.dy, retain_graph=True)

    def call_without(self, which: str, omit: int) -> Callable[[], object]:
        """A function that runs the fused kernel of one pass ("forward" or "backward") with the parts `omit` left out; plan and saved tensors made here."""
        from .engines.hopper import backward_launch, forward, launch
        from .engines.hopper.engine import HopperEngine
        from .engines.protocol import MoETensors, PassOptions, Wants

        x, topk_weights, w_gate_up, w_down = (leaf.detach() for leaf in self.leaves)
        tensors = MoETensors(x, topk_weights, w_gate_up, w_down)
        options = PassOptions(save_for_backward=True)
        plan = HopperEngine().build_plan(self.topk_ids, self.shape.E)
        if which == "forward":
            config = forward.ForwardConfig(True, launch.mover_warps(None), omit=omit)
            return lambda: launch.forward(plan, tensors, options, config)
        saved, wants = launch.forward(plan, tensors, options)[1], Wants(True, True, True, True)
        variant = backward_launch.BackwardConfig(backward_launch.VARIANTS["swiglu"], omit=omit)
        return lambda: backward_launch.hopper_backward(plan, tensors, options, saved, self.dy, wants, None, variant)

    def executed_ratio(self) -> float:
        """Rows multiplied, each expert's padded to BLOCK_M, over rows needed."""
        counts = torch.bincount(self.topk_ids.flatten(), minlength=self.shape.E)
        return float(((counts + BLOCK_M - 1) // BLOCK_M * BLOCK_M).sum()) / (self.shape.T * self.shape.K)


def verify(case: Case, impl: str, passes: Sequence[str], precision: str = "bf16") -> dict[str, float]:
    """Relative errors against the float64 specification: of y, and where a backward is timed of dx, d_topk_weights and one expert's weights.

    Rows: SAMPLED_TOKENS random tokens, the first and the last. Raises RuntimeError for an error above TOLERANCE or a NaN.
    """
    backward = any("backward" in which for which in passes)
    for leaf in case.leaves:
        leaf.requires_grad_(backward)
    y = case.run(impl, precision)
    grads = torch.autograd.grad(y, case.leaves, case.dy) if backward else ()
    T, device = case.shape.T, case.x.device
    sample = torch.cat([torch.randint(0, T, (SAMPLED_TOKENS,), generator=torch.Generator().manual_seed(1)), torch.tensor([0, T - 1])]).to(device)
    ids = case.topk_ids[sample]
    experts, local_ids = ids.unique(return_inverse=True)
    x, weights = (t.detach()[sample].double().requires_grad_(backward) for t in (case.x, case.topk_weights))
    truth = moe_reference(x, local_ids, weights, case.w_gate_up.detach()[experts].double(), case.w_down.detach()[experts].double())
    errors = {"y": _row_error(y.detach()[sample], truth.detach())}
    if backward:
        truth_dx, truth_dweights = torch.autograd.grad(truth, (x, weights), case.dy[sample].double())
        errors |= {"dx": _row_error(grads[0][sample], truth_dx), "d_topk_weights": _row_error(grads[1][sample], truth_dweights)}
        expert = int(ids[0, 0])
        token, k = torch.nonzero(case.topk_ids == expert, as_tuple=True)
        w_gate_up, w_down = (w.detach()[expert].double().requires_grad_() for w in (case.w_gate_up, case.w_down))
        rows = expert_reference(case.x.detach()[token].double(), w_gate_up, w_down, None, None, "swiglu", None)
        truths = torch.autograd.grad(rows, (w_gate_up, w_down), case.dy[token].double() * case.topk_weights.detach()[token, k].unsqueeze(1))
        errors |= {name: _row_error(got[expert].flatten()[None], expected.flatten()[None])
                   for name, got, expected in zip(("dw_gate_up", "dw_down"), grads[2:], truths)}
    for name, error in errors.items():
        if not error <= TOLERANCE:
            raise RuntimeError(f"{impl} is wrong on {case.shape}: {name} is off by {error:.3g} of its norm, {TOLERANCE} allowed")
    return errors


def _row_error(got: Tensor, truth: Tensor) -> float:
    """The worst row's error over the typical row's norm: a mean would hide one wrong row, a small row's own norm would inflate rounding."""
    return float((got.double() - truth).norm(dim=-1).max() / truth.norm(dim=-1).square().mean().sqrt())


class Stopwatch:
    """Times calls on one device: events on a GPU, the host's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def ms(self, call: Callable[[], object], count: int) -> float:
        """Milliseconds a call, of `count` calls in a row."""
        if self.device.type == "cpu":
            start = time.perf_counter()
            for _ in range(count):
                call()
            return (time.perf_counter() - start) * 1e3 / count
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        for _ in range(count):
            call()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / count


class Roof:
    """TFLOP/s of a square BF16 product of random data: what this card reaches at this moment."""

    def __init__(self, watch: Stopwatch, size: int) -> None:
        generator = torch.Generator(watch.device).manual_seed(2)
        self._a, self._b = (torch.randn(size, size, generator=generator, device=watch.device, dtype=torch.bfloat16) for _ in range(2))
        self._out = torch.empty_like(self._a)
        self._flops = 2 * size**3
        self._watch = watch
        self._ms = watch.ms(self._call, 3)          # the first call loads the library; the second figure is only used to count calls
        self._ms = watch.ms(self._call, 3)

    def _call(self) -> None:
        torch.mm(self._a, self._b, out=self._out)

    def tflops(self, duration_ms: float) -> float:
        ms = self._watch.ms(self._call, max(1, round(duration_ms / self._ms)))
        return self._flops / ms * 1e-9


@dataclass(frozen=True)
class Measurement:
    """Milliseconds of each block, and the roof before and after them in TFLOP/s."""

    blocks: tuple[float, ...]
    roofs: tuple[float, float]

    @property
    def roof(self) -> float:
        return sum(self.roofs) / 2

    @property
    def steady(self) -> bool:
        return abs(self.roofs[0] - self.roofs[1]) <= ROOF_DIFFERENCE * self.roof

    def record(self, shape: Shape, which: str, precision: str, impl: str) -> dict:
        """One entry of "results". spread: the farthest block's distance from the median, in units of ratio_to_roof."""
        ms = statistics.median(self.blocks)
        ratios = [shape.flops(which) / block * 1e-9 / self.roof for block in self.blocks]
        ratio = shape.flops(which) / ms * 1e-9 / self.roof
        return {"shape": shape.name, "thiek": [shape.T, shape.H, shape.I, shape.E, shape.K], "pass": which, "precision": precision, "impl": impl,
                "ms": round(ms, 4), "tflops": round(shape.flops(which) / ms * 1e-9, 1), "ratio_to_roof": round(ratio, 4),
                "spread": round(max(abs(r - ratio) for r in ratios), 4)}


def measure(call: Callable[[], object], watch: Stopwatch, roof: Roof, block_ms: float) -> Measurement:
    """Roof, BLOCKS blocks of about block_ms, roof; again where the two roofs differ too much, keeping the steadiest."""
    for _ in range(2):
        call()
    count = max(1, round(block_ms / watch.ms(call, 2)))
    best: Measurement | None = None
    for _ in range(ROOF_ATTEMPTS):
        before = roof.tflops(BLOCKS * block_ms)
        blocks = tuple(watch.ms(call, count) for _ in range(BLOCKS))
        this = Measurement(blocks, (before, roof.tflops(BLOCKS * block_ms)))
        if best is None or abs(this.roofs[0] - this.roofs[1]) < abs(best.roofs[0] - best.roofs[1]):
            best = this
        if best.steady:
            break
    assert best is not None
    return best


def run_cuda_bench(shapes: Sequence[Shape], passes: Sequence[str] = tuple(PASSES), impls: Sequence[str] = IMPLS, *, precision: str = "bf16",
                   command: str = "", block_ms: float = BLOCK_MS, breakdown: bool = False, device: torch.device | None = None,
                   roof_size: int = 8192, say: Say | None = None) -> dict:
    """Verify and time every (shape, pass, implementation); returns the record that `mok bench --json` prints.

    block_ms: length of one of the five blocks. breakdown: also time the fused kernels of the forward and backward passes among `passes` with
    parts left out (LEFT_OUT), as impl "mok without ..."; the plan is made beforehand there, and also for the whole kernel's "mok without nothing".
    device: None = the current CUDA device. say: takes progress lines, None = stderr.
    Raises RuntimeError where a result is wrong, ValueError for an unknown pass or implementation.
    """
    for name, value, known in [("pass", which, PASSES) for which in passes] + [("impl", impl, IMPLS) for impl in impls]:
        if value not in known:
            raise ValueError(f"{name} {value!r} must be one of {', '.join(known)}")
    if breakdown:
        _check_breakdown(shapes, precision, device)
    say = say or (lambda line: print(line, file=sys.stderr, flush=True))
    device = torch.device("cuda", torch.cuda.current_device()) if device is None else device
    watch = Stopwatch(device)
    roof = Roof(watch, roof_size)
    roof.tflops(WARM_UP_S * 1e3 if device.type == "cuda" else block_ms)
    roofs: list[float] = []
    results: list[dict] = []
    for shape in shapes:
        case = Case(shape, device)
        say(f"{shape.name} T={shape.T} H={shape.H} I={shape.I} E={shape.E} K={shape.K}: executes {case.executed_ratio():.3f} x its FLOPs, padding included")
        for impl in impls:
            errors = verify(case, impl, passes, precision)
            say(f"  {impl}: verified, " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
        for which in passes:
            for impl in sorted(impls, key=lambda impl: impl != "unfused"):       # the baseline first: the others' lines compare with it
                measured = measure(case.calls(impl, which, precision), watch, roof, block_ms)
                roofs += measured.roofs
                results.append(measured.record(shape, which, precision, impl))
                note = "" if measured.steady else f"  UNSTEADY: roof {measured.roofs[0]:.0f} then {measured.roofs[1]:.0f}"
                say("  " + result_line(results[-1], results) + note)
        for which, impl, omit in _breakdown_runs(passes) if breakdown else ():
            measured = measure(case.call_without(which, omit), watch, roof, block_ms)
            results.append(measured.record(shape, which, precision, impl))
            say("  " + result_line(results[-1], results))
        del case
    return {"date": datetime.date.today().isoformat(), "commit": source_commit(), "gpu": _device_name(device), "torch": torch.__version__,
            "triton": _version("triton"), "command": command, "roof_tflops": round(statistics.mean(roofs), 1) if roofs else 0.0, "results": results}


def _breakdown_runs(passes: Sequence[str]) -> list[tuple[str, str, int]]:
    """(pass, impl, omit) of every run of a breakdown."""
    return [(which, f"mok without {what}", omit) for which in passes if which in LEFT_OUT for what, omit in {"nothing": 0, **LEFT_OUT[which]}.items()]


def _check_breakdown(shapes: Sequence[Shape], precision: str, device: torch.device | None) -> None:
    """NotImplementedError unless the fused kernels run these shapes."""
    from .engines.hopper.limits import unsupported_reason

    where = device or torch.device("cuda")
    for shape in shapes:
        if (reason := unsupported_reason(where, torch.bfloat16, shape.H, shape.I)) is not None:
            raise NotImplementedError(f"breakdown=True is of the fused kernels, which do not run here: {reason}")


def result_line(result: dict, results: Sequence[dict]) -> str:
    """`us | TFLOP/s | GB/s | x roof | x baseline`; GB/s counts x, y and the weights once each way that the pass needs."""
    T, H, I, E, _ = result["thiek"]
    moved = 2 * (2 * T * H + 3 * E * H * I) * {"backward": 2, "forward+backward": 3}.get(result["pass"], 1)
    same = [r for r in results if r["impl"] == "unfused" and all(r[key] == result[key] for key in ("shape", "thiek", "pass"))]
    speedup = f"{same[0]['ms'] / result['ms']:.2f} x unfused" if same else "-"
    return (f"{result['shape']} {result['pass']} {result['impl']}: {result['ms'] * 1e3:.0f} us | {result['tflops']:.0f} TFLOP/s | "
            f"{moved / result['ms'] * 1e-6:.0f} GB/s | {result['ratio_to_roof']:.3f} +- {result['spread']:.3f} x roof | {speedup}")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def source_commit() -> str:
    """The checkout's commit, with "+" where it has uncommitted changes; "unknown" outside of one."""
    folder = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
