"""Checks every engine that this machine can run: results against the float64 specification, and promises P1, P2, P4 to the bit."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .config import Overlap
from .engines import engine_name, get_engine
from .engines.protocol import Engine, Grads, MoETensors, PassOptions, SharedExpert, Wants, accumulation_dtype
from .reference import moe_reference
from .tolerance import BlockError, Change, Expected, expected, worst_block

_BITWISE_SEED = 7


@dataclass(frozen=True)
class Case:
    """One problem. why: what it can show that the others do not. empty: an expert that gets no token. masked: part of the routes that are -1."""

    why: str
    T: int
    H: int
    I: int
    E: int
    K: int
    activation: str = "swiglu"
    swiglu_limit: float | None = None
    biases: bool = False
    shared: tuple[tuple[int, bool], ...] = ()          # (width, gated) of each shared expert
    masked: float = 0.0
    one_expert: bool = False                           # every token to expert 0, all K routes


CASES = (
    Case("several row tiles, odd sizes, one empty expert", T=700, H=203, I=101, E=5, K=2),
    Case("sizes in multiples of 16, masked routes, biases, gated shared expert", T=600, H=272, I=144, E=6, K=3, biases=True, shared=((80, True), (48, False)),
         masked=0.2),
    Case("one expert takes every route, repeatedly", T=260, H=144, I=272, E=4, K=2, one_expert=True),
    Case("gpt-oss activation with biases", T=300, H=160, I=96, E=8, K=4, activation="swiglu_oai", biases=True),
    # a limit between two numbers of bf16: rounding z moves nothing across it, where the gradient jumps
    Case("clamped swiglu", T=150, H=64, I=64, E=4, K=2, swiglu_limit=1 + 2**-8),
    Case("geglu, one token", T=1, H=64, I=32, E=4, K=2, activation="geglu"),
    Case("reglu, fewer tokens than experts", T=3, H=32, I=48, E=16, K=2, activation="reglu"),
)
# at least 10^4 routes and 10^6 activation elements: element-wise library functions change bits with position too, but rarely
BITWISE_CASES = (
    Case("odd sizes", T=2600, H=203, I=101, E=9, K=4, masked=0.02),
    Case("multiples of 16", T=2600, H=208, I=112, E=9, K=4, masked=0.02),
)


@dataclass(frozen=True)
class Check:
    """One line of the table. error and allowed: of the worst block, relative to that block's RMS in the truth; None for bitwise checks."""

    engine: str
    device: str
    dtype: str
    name: str
    passed: bool
    error: float | None = None
    allowed: float | None = None
    detail: str = ""


@dataclass
class Problem:
    """A case's tensors (compute dtype), its routes and the gradient that arrives, all on one device."""

    case: Case
    topk_ids: Tensor
    tensors: MoETensors
    dy: Tensor

    @property
    def options(self) -> PassOptions:
        return PassOptions(activation=self.case.activation, swiglu_limit=self.case.swiglu_limit, save_for_backward=True)

    def rows(self, keep: Tensor) -> Problem:
        """The same problem for some of its tokens, keep (n,) int64."""
        tensors = replace(self.tensors, x=self.tensors.x[keep], topk_weights=self.tensors.topk_weights[keep])
        return Problem(self.case, self.topk_ids[keep], tensors, self.dy[keep])


@dataclass(frozen=True)
class Target:
    """One engine with one dtype on one device, and the settings that must not change a bit of its results (P2)."""

    engine: str
    device: torch.device
    dtype: torch.dtype
    promises: tuple[str, ...] = ("P1", "P2", "P4")
    overlaps: tuple[Overlap, ...] = field(default=())

    def serves(self, case: Case) -> bool:
        """Whether `mok.moe` would give this case to this engine; the plain GPU engine can take any."""
        return self.engine == "torch_gpu" or engine_name(self.device, self.dtype, case.H, case.I) == self.engine


def find_targets(device: torch.device | None = None) -> list[Target]:
    """What can be checked here: the CPU engine in three dtypes, and on a GPU the fused kernel where it runs and the plain engine."""
    targets = []
    if device is None or device.type == "cpu":
        targets += [Target("cpu", torch.device("cpu"), dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    if torch.cuda.is_available() and (device is None or device.type == "cuda"):
        gpu = torch.device("cuda", torch.cuda.current_device()) if device is None or device.index is None else device
        if engine_name(gpu, torch.bfloat16, 256, 256) == "hopper":
            overlaps = (Overlap(minibatch_rows=128), Overlap(minibatch_rows=512, mover_warps=1), Overlap(mover_warps=4, reserve_sms=16))
            targets.append(Target("hopper", gpu, torch.bfloat16, overlaps=overlaps))
        targets += [Target("torch_gpu", gpu, dtype, promises=("P1",)) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    return targets


def verify(targets: Sequence[Target], on_check: Callable[[Check], None] = lambda check: None) -> list[Check]:
    """Run every check on every target; `on_check` sees each as it is done."""
    checks: list[Check] = []
    for target in targets:
        for check in check_target(target):
            checks.append(check)
            on_check(check)
    return checks


def count_checks(targets: Sequence[Target]) -> int:
    """How many checks `verify` will make."""
    return sum(len(_OUTPUTS) + len(target.promises) for target in targets)


def check_target(target: Target) -> Iterator[Check]:
    """The worst block of each output over all cases, then the promises."""
    engine = get_engine(target.engine)
    worst: dict[str, BlockError] = {}
    for number, case in enumerate(case for case in CASES if target.serves(case)):
        problem = make_problem(case, target, seed=number)
        want = expected_of(problem)
        actual = run_engine(engine, problem)
        for name in actual:
            found = worst_block(actual[name], want.truth[name], want.scale[name], target.dtype, _rows_of_experts(name, problem))
            kind = _OUTPUT_OF.get(name, name)
            if kind not in worst or found.ratio > worst[kind].ratio:
                worst[kind] = replace(found, detail=f"worst in {name}, case: {case.why}")
    for name in _OUTPUTS:
        error = worst[name]
        yield Check(target.engine, str(target.device), short_name(target.dtype), name, error.ratio <= 1, error.error, error.allowed, error.detail)
    cases = [case for case in BITWISE_CASES if target.serves(case)]
    for promise in target.promises:
        differing = [f"{text}, case: {case.why}" for case in cases for text in _PROMISES[promise](engine, make_problem(case, target, _BITWISE_SEED), target)]
        yield Check(target.engine, str(target.device), short_name(target.dtype), promise, not differing and bool(cases),
                    detail="; ".join(differing[:3]) or _PROMISE_TEXT[promise])


# --- problems -------------------------------------------------------------------------------------------------------------------------------


def make_problem(case: Case, target: Target, seed: int) -> Problem:
    """Random tensors of unit scale; the last expert gets no token unless a token needs them all."""
    generator = torch.Generator().manual_seed(seed)
    T, H, I, E, K = case.T, case.H, case.I, case.E, case.K

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(target.device, target.dtype)

    busy = max(K, E - 1)
    ids = torch.rand(T, busy, generator=generator).argsort(dim=1)[:, :K]
    if case.one_expert:
        ids = torch.zeros_like(ids)
    if case.masked:
        ids = ids.masked_fill(torch.rand(T, K, generator=generator) < case.masked, -1)
    weights = torch.rand(T, K, generator=generator, dtype=torch.float64).to(target.device, accumulation_dtype(target.dtype))
    shared = tuple(SharedExpert(normal(2 * width, H, scale=H**-0.5), normal(H, width, scale=width**-0.5), normal(H, scale=H**-0.5) if gated else None)
                   for width, gated in case.shared)
    tensors = MoETensors(x=normal(T, H), topk_weights=weights, w_gate_up=normal(E, 2 * I, H, scale=H**-0.5), w_down=normal(E, H, I, scale=I**-0.5),
                         b_gate_up=normal(E, 2 * I) if case.biases else None, b_down=normal(E, H) if case.biases else None, shared=shared)
    return Problem(case, ids.to(target.device), tensors, normal(T, H))


def _named_inputs(tensors: MoETensors) -> dict[str, Tensor]:
    """The differentiable inputs under the names of their gradients."""
    named = {"dx": tensors.x, "d_topk_weights": tensors.topk_weights, "dw_gate_up": tensors.w_gate_up, "dw_down": tensors.w_down,
             "db_gate_up": tensors.b_gate_up, "db_down": tensors.b_down}
    for i, shared in enumerate(tensors.shared):
        named |= {f"shared{i}.dw_gate_up": shared.w_gate_up, f"shared{i}.dw_down": shared.w_down, f"shared{i}.dgate": shared.gate_weight}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


_OUTPUTS = ("y", "dx", "d_topk_weights", "dw_gate_up", "dw_down", "db_gate_up", "db_down", "shared experts' gradients")
_OUTPUT_OF = {f"shared{i}.{part}": _OUTPUTS[-1] for i in range(2) for part in ("dw_gate_up", "dw_down", "dgate")}


def run_engine(engine: Engine, problem: Problem, overlap: Overlap | None = None) -> dict[str, Tensor]:
    """y and every gradient of one forward and backward, by name."""
    poison(problem.dy.device)
    tensors, options = problem.tensors, replace(problem.options, overlap=overlap)
    wants = Wants(True, True, True, True, tensors.b_gate_up is not None, tensors.b_down is not None,
                  tuple((True, True, shared.gate_weight is not None) for shared in tensors.shared))
    plan = engine.build_plan(problem.topk_ids, tensors.w_gate_up.shape[0])
    y, saved = engine.forward(plan, tensors, options)
    grads = engine.backward(plan, tensors, options, saved, problem.dy, wants, None)
    return {"y": y, **_named_grads(grads)}


def _named_grads(grads: Grads) -> dict[str, Tensor]:
    shared = tuple(SharedExpert(*parts) for parts in grads.shared)  # type: ignore[arg-type]
    return _named_inputs(MoETensors(grads.x, grads.topk_weights, grads.w_gate_up, grads.w_down, grads.b_gate_up, grads.b_down, shared))  # type: ignore[arg-type]


def poison(device: torch.device) -> None:
    """Leave NaN in the memory that the allocator hands out next, so that a read of unwritten memory shows."""
    blocks = [torch.full((size,), float("nan"), device=device) for size in (2**10, 2**14, 2**18, 2**20, 2**21)]
    del blocks


# --- the truth -----------------------------------------------------------------------------------------------------------------------


def expected_of(problem: Problem) -> Expected:
    """y and every gradient by the specification in float64, from the same (already rounded) inputs, and the scale of their errors."""
    case, ids, t = problem.case, problem.topk_ids, problem.tensors

    def compute(change: Change) -> dict[str, Tensor]:
        def leaf(tensor: Tensor | None) -> Any:
            return None if tensor is None else change(tensor.detach().to(torch.float64)).requires_grad_()

        shared = tuple(SharedExpert(leaf(s.w_gate_up), leaf(s.w_down), leaf(s.gate_weight)) for s in t.shared)
        tensors = MoETensors(leaf(t.x), leaf(t.topk_weights), leaf(t.w_gate_up), leaf(t.w_down), leaf(t.b_gate_up), leaf(t.b_down), shared)
        y = moe_reference(tensors.x, ids, tensors.topk_weights, tensors.w_gate_up, tensors.w_down, tensors.b_gate_up, tensors.b_down,
                          [(s.w_gate_up, s.w_down, s.gate_weight) for s in shared], case.activation, case.swiglu_limit)
        inputs = _named_inputs(tensors)
        grads = torch.autograd.grad(y, list(inputs.values()), change(problem.dy.to(torch.float64)), allow_unused=True)
        return {"y": y.detach(), **{name: torch.zeros_like(inputs[name]) if grad is None else grad for name, grad in zip(inputs, grads, strict=True)}}

    return expected(compute, t.x.dtype)


def _rows_of_experts(name: str, problem: Problem) -> list[Tensor]:
    """For outputs with a row for each token: the tokens of each expert."""
    if name not in ("y", "dx", "d_topk_weights"):
        return []
    return [torch.nonzero((problem.topk_ids == e).any(1)).flatten() for e in range(problem.case.E)]


# --- promises ---------------------------------------------------------------------------------------------------------------------------------


def _differing(first: dict[str, Tensor], second: dict[str, Tensor], names: Sequence[str] | None = None) -> list[str]:
    return [name for name in (names or first) if not same_bits(first[name], second[name])]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and bytes (so -0 differs from +0, and a NaN equals the same NaN)."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _run_to_run(engine: Engine, problem: Problem, target: Target) -> list[str]:
    first = run_engine(engine, problem)
    return [f"{name} differs in run {run}" for run in (2, 3) for name in _differing(first, run_engine(engine, problem))]


def _schedule_free(engine: Engine, problem: Problem, target: Target) -> list[str]:
    first = run_engine(engine, problem)
    if target.device.type == "cpu":
        found = []
        for threads in (1, 2, 3):
            with _torch_threads(threads):
                found += [f"{name} differs with {threads} thread(s)" for name in _differing(first, run_engine(engine, problem))]
        return found
    return [f"{name} differs with {overlap}" for overlap in target.overlaps for name in _differing(first, run_engine(engine, problem, overlap))]


def _batch_free(engine: Engine, problem: Problem, target: Target) -> list[str]:
    first = run_engine(engine, problem)
    per_token = ("y", "dx", "d_topk_weights")
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(problem.case.T, generator=generator).to(target.device)
    found = []
    for count in (problem.case.T, problem.case.T // 3, 5, 1):
        keep = order[:count]
        part = run_engine(engine, problem.rows(keep))
        found += [f"{name} differs among {count} of the tokens" for name in _differing({n: first[n][keep] for n in per_token}, part, per_token)]
    return found


_PROMISES = {"P1": _run_to_run, "P2": _schedule_free, "P4": _batch_free}
_PROMISE_TEXT = {"P1": "the same bits in three runs", "P2": "the same bits for any number of threads or overlap setting",
                 "P4": "the same bits for a token whatever else is in the batch"}


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def short_name(dtype: torch.dtype) -> str:
    """How tables call a dtype: fp64, fp32, bf16 or fp16."""
    return {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
