"""The GPU benchmark's parts on a CPU: the baseline is right, a wrong result is refused, the method and the record are those of the design."""
from __future__ import annotations

import itertools

import pytest
import torch

from mok import bench_cuda
from mok.bench_cuda import Case, Measurement, Shape, measure, run_cuda_bench, shape_of, verify
from mok.reference import moe_reference
from mok.unfused import unfused_moe

CPU = torch.device("cpu")
SMALL = Shape("small", 70, 32, 16, 5, 3)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_baseline_computes_the_layer(device):
    dtype, bound = (torch.float32, 1e-5) if device == "cpu" else (torch.bfloat16, 2e-2)
    case = Case(SMALL, torch.device(device), dtype)
    case.topk_ids[case.topk_ids == 2] = 1                     # an expert twice in a token; expert 2 has none
    inputs = [t.double().requires_grad_() for t in case.leaves]
    truth = moe_reference(inputs[0], case.topk_ids, *inputs[1:])
    truth.backward(case.dy.double())
    ours = [t.requires_grad_() for t in case.leaves]
    y = unfused_moe(ours[0], case.topk_ids, *ours[1:])
    y.backward(case.dy)
    for name, got, want in zip(("y", "x", "topk_weights", "w_gate_up", "w_down"), [y, *(t.grad for t in ours)], [truth, *(t.grad for t in inputs)]):
        if device == "cuda" and name.startswith("w_"):
            got, want = (torch.cat([t[:2], t[3:]]) for t in (got, want))     # an empty group's gradient is left unwritten on some cards
        assert got.dtype == (torch.float32 if name == "topk_weights" else dtype)
        assert (got.double() - want).norm() <= bound * want.norm(), name


@pytest.mark.parametrize("impl", bench_cuda.IMPLS)
def test_verify_accepts_what_is_right(impl):
    errors = verify(Case(SMALL, CPU, torch.float32), impl, ["backward"])
    assert set(errors) == {"y", "dx", "d_topk_weights", "dw_gate_up", "dw_down"} and max(errors.values()) < 1e-5
    assert set(verify(Case(SMALL, CPU, torch.float32), impl, ["forward", "forward-no-grad"])) == {"y"}


class _Wrong(torch.autograd.Function):
    """The baseline with one of its five results spoilt in its last row (of the first expert, for a weight)."""

    @staticmethod
    def forward(ctx, which, x, ids, weights, w_gate_up, w_down, expert):
        ctx.which, ctx.expert, ctx.ids = which, expert, ids
        ctx.save_for_backward(x, weights, w_gate_up, w_down)
        y = unfused_moe(x, ids, weights, w_gate_up, w_down).clone()
        if which == "y":
            y[-1] *= 1.1
        return y

    @staticmethod
    def backward(ctx, dy):
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            grads = list(torch.autograd.grad(unfused_moe(leaves[0], ctx.ids, *leaves[1:]), leaves, dy))
        index = {"dx": 0, "d_topk_weights": 1, "dw_gate_up": 2, "dw_down": 3}.get(ctx.which)
        if index is not None:
            grads[index] = grads[index].clone()
            grads[index][-1 if index < 2 else ctx.expert] *= float("nan") if ctx.which == "dw_down" else 1.1
        return None, grads[0], None, *grads[1:], None


@pytest.mark.parametrize("which", ["y", "dx", "d_topk_weights", "dw_gate_up", "dw_down"])
def test_verify_refuses_any_one_wrong_result(which, monkeypatch):
    case = Case(SMALL, CPU, torch.float32)
    first = int(torch.randint(0, SMALL.T, (bench_cuda.SAMPLED_TOKENS,), generator=torch.Generator().manual_seed(1))[0])
    expert = int(case.topk_ids[first, 0])
    monkeypatch.setattr(bench_cuda, "unfused_moe", lambda x, ids, w, a, b: _Wrong.apply(which, x, ids, w, a, b, expert))
    with pytest.raises(RuntimeError, match=rf"unfused is wrong.*: {which} is off"):
        verify(case, "unfused", ["forward+backward"])


def test_record_takes_the_median_and_the_mean_roof():
    shape = Shape("s", 1000, 1000, 500, 4, 2)
    record = Measurement((2.0, 1.0, 1.25, 1.0, 0.8), (9.0, 11.0)).record(shape, "backward", "bf16", "mok")
    flops = 12 * 1000 * 2 * 1000 * 500
    assert record["ms"] == 1.0 and record["tflops"] == pytest.approx(flops / 1e-3 / 1e12) and record["ratio_to_roof"] == pytest.approx(1.2)
    assert record["spread"] == pytest.approx(1.2 - 0.6) and record["thiek"] == [1000, 1000, 500, 4, 2]


class _FakeWatch:
    def __init__(self):
        self.counts = []

    def ms(self, call, count):
        self.counts.append(count)
        return 2.0


class _FakeRoof:
    def __init__(self, values):
        self.values, self.durations = iter(values), []

    def tflops(self, duration_ms):
        self.durations.append(duration_ms)
        return next(self.values)


def test_blocks_are_repeated_until_both_roofs_agree():
    roof, watch = _FakeRoof([700, 650, 700, 690, 1, 1]), _FakeWatch()
    result = measure(lambda: None, watch, roof, block_ms=100)
    assert result.roofs == (700, 690) and result.steady
    assert watch.counts == [2] + [50] * 10 and roof.durations == [500] * 4        # a roof lasts as long as the five blocks
    restless = measure(lambda: None, _FakeWatch(), _FakeRoof([700, 600, 700, 650, 700, 500, 700, 550]), block_ms=100)
    assert restless.roofs == (700, 650) and not restless.steady                     # the steadiest of the attempts is kept and called unsteady


def test_the_record_has_the_documented_form():
    lines = []
    record = run_cuda_bench([SMALL], command="mok bench", block_ms=1, device=CPU, roof_size=64, say=lines.append)
    assert list(record) == ["date", "commit", "gpu", "torch", "triton", "command", "roof_tflops", "results"]
    assert [(r["pass"], r["impl"]) for r in record["results"]] == list(itertools.product(bench_cuda.PASSES, ("unfused", "mok")))
    for result in record["results"]:
        assert list(result) == ["shape", "thiek", "pass", "precision", "impl", "ms", "tflops", "ratio_to_roof", "spread"]
        assert result["ms"] > 0 and result["thiek"] == [70, 32, 16, 5, 3]
    assert any("verified" in line for line in lines) and any(" x unfused" in line for line in lines)
    with pytest.raises(ValueError, match="'sideways'"):
        run_cuda_bench([SMALL], passes=["sideways"], device=CPU)


def test_executed_rows_count_padding():
    case = Case(Shape("s", 64, 16, 16, 2, 2), CPU)               # both experts take all 64 tokens: two tiles of 128 rows for 128 routes
    assert case.executed_ratio() == 2.0


def test_backward_alone_does_not_run_the_forward(monkeypatch):
    case = Case(SMALL, CPU, torch.float32)
    call = case.calls("unfused", "backward")
    first = call()
    monkeypatch.setattr(bench_cuda, "unfused_moe", None)
    assert all(torch.equal(a, b) for a, b in zip(first, call()))


def test_shapes_by_name_and_by_numbers():
    assert shape_of("mixtral-8x7b").I == 14336 and shape_of("8, 16,32,4,2") == Shape("custom", 8, 16, 32, 4, 2)
    for bad in ("mixtral", "1,2,3,4", "1,2,3,4,0", "1,2,3,4,5", "a,b,c,d,e", "-1,2,3,4,1"):
        with pytest.raises(ValueError, match=bad):
            shape_of(bad)


def test_a_breakdown_names_what_it_leaves_out(monkeypatch):
    """The fused kernels stood in for by a note of what was asked of them; where they do not run a breakdown is refused."""
    asked = []
    monkeypatch.setattr(bench_cuda, "_check_breakdown", lambda *_: None)
    monkeypatch.setattr(Case, "call_without", lambda self, which, omit: lambda: asked.append((which, omit)))
    record = run_cuda_bench([SMALL], passes=["forward-no-grad", "backward"], impls=["mok"], block_ms=0.1, breakdown=True, device=CPU, roof_size=64,
                            say=lambda line: None)
    assert [r["impl"] for r in record["results"] if r["pass"] == "backward"] == [
        "mok", "mok without nothing", "mok without copies of dy", "mok without copies of x", "mok without sums",
        "mok without arithmetic of the dh epilogue", "mok without all of these"]
    assert list(dict.fromkeys(asked)) == [("backward", omit) for omit in (0, 1, 2, 4, 8, 15)]
    monkeypatch.undo()
    with pytest.raises(NotImplementedError, match=r"breakdown=True.*not a CUDA device"):
        run_cuda_bench([SMALL], breakdown=True, device=CPU)


@pytest.mark.gpu
def test_the_kernel_with_nothing_left_out_gives_the_layers_result():
    case = Case(Shape("s", 300, 256, 128, 5, 2), torch.device("cuda"))
    assert torch.equal(case.call_without("forward", 0)()[0], case.run("mok"))
    grads, expected = case.call_without("backward", 0)(), case.calls("mok", "backward")()
    for name, want in zip(("x", "topk_weights", "w_gate_up", "w_down"), expected):
        assert torch.equal(getattr(grads, name), want), name
