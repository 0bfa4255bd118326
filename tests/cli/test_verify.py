"""`mok verify` and `mok info`: sound engines pass, each kind of broken one fails the check that is for it, and the exit status says so."""
from __future__ import annotations

import multiprocessing
import re
from dataclasses import replace
from itertools import pairwise

import broken_ranks
import pytest
import torch
from support import ROOT, bad_input, run_json

import mok
from mok import verify, verify_ranks
from mok.cli.info import SCRATCH_FORMULAS, hopper_scratch, scratch_bytes
from mok.engines.cpu import CpuEngine
from mok.verify import Case, Target, check_target

CPU = torch.device("cpu")
# small stand-ins for the real lists: an odd size with an empty expert, and biases with a gated shared expert and masked routes
CASES = (Case("odd", T=150, H=43, I=21, E=4, K=2),
         Case("everything", T=140, H=32, I=48, E=5, K=3, biases=True, shared=((16, True),), masked=0.2))
BITWISE = (Case("bits", T=300, H=43, I=21, E=5, K=2, masked=0.02),)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(verify, "CASES", CASES)
    monkeypatch.setattr(verify, "BITWISE_CASES", BITWISE)


def failed(monkeypatch, engine: CpuEngine, dtype=torch.float32) -> set[str]:
    monkeypatch.setattr(verify, "get_engine", lambda name: engine)
    return {check.name for check in check_target(Target("cpu", CPU, dtype)) if not check.passed}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_cpu_engine_passes(monkeypatch, dtype):
    assert failed(monkeypatch, CpuEngine(), dtype) == set()


class DropsAnExpert(CpuEngine):
    """Expert 2's gate/up gradient stays zero: a fault that an error pooled over all experts would still show, and one in bf16 too."""

    def backward(self, *args):
        grads = super().backward(*args)
        grads.w_gate_up[2] = 0
        return grads


class OneWrongElement(CpuEngine):
    """One element of the few tokens that begin with a large number; the same tokens in every batch, so no promise is broken."""

    def forward(self, plan, tensors, options):
        y, saved = super().forward(plan, tensors, options)
        y[tensors.x[:, 0] > 2, -1] += 1.0
        return y, saved


class ForgetsAMaskedToken(CpuEngine):
    """d_topk_weights of routes to no expert must be exactly zero."""

    def backward(self, plan, tensors, options, saved, dy, wants, main_grad):
        grads = super().backward(plan, tensors, options, saved, dy, wants, main_grad)
        none = (plan.slot_to_row < 0).view(grads.topk_weights.shape)
        grads.topk_weights[none] = 1e-3
        return grads


class WritesNaN(CpuEngine):
    def backward(self, plan, tensors, *args):
        grads = super().backward(plan, tensors, *args)
        grads.x[tensors.x[:, 0] > 2, 0] = torch.nan
        return grads


class NeverTheSame(CpuEngine):
    """The last bit of one gradient depends on how many calls there were (P1), which every repetition sees."""

    calls = 0

    def backward(self, *args):
        grads = super().backward(*args)
        NeverTheSame.calls += 1
        if NeverTheSame.calls % 2:
            grads.w_down[0, 0, 0] = torch.nextafter(grads.w_down[0, 0, 0], torch.tensor(9.0))
        return grads


class CountsThreads(CpuEngine):
    """A weight gradient whose last bit depends on the number of threads (P2)."""

    def backward(self, *args):
        grads = super().backward(*args)
        if torch.get_num_threads() == 3:
            grads.w_gate_up[0, 0, 0] = torch.nextafter(grads.w_gate_up[0, 0, 0], torch.tensor(9.0))
        return grads


class CountsTokens(CpuEngine):
    """A result whose last bit depends on the size of the batch (P4)."""

    def forward(self, plan, tensors, options):
        y, saved = super().forward(plan, tensors, options)
        if tensors.x.shape[0] == 5:
            y[0, 0] = torch.nextafter(y[0, 0], torch.tensor(9.0))
        return y, saved


@pytest.mark.parametrize(("engine", "checks"), [
    (DropsAnExpert, {"dw_gate_up"}), (OneWrongElement, {"y"}), (ForgetsAMaskedToken, {"d_topk_weights"}), (WritesNaN, {"dx"}),
    (NeverTheSame, {"P1"}), (CountsThreads, {"P2"}), (CountsTokens, {"P4"}),
])
def test_a_broken_engine_fails_the_check_that_is_for_it(monkeypatch, engine, checks):
    assert checks <= failed(monkeypatch, engine())
    if engine is not NeverTheSame:                     # which breaks every comparison of two runs
        assert checks == failed(monkeypatch, engine())


def test_command_prints_a_table_and_json_and_its_status_says_whether_all_passed(monkeypatch, capsys):
    status, document, lines = run_json(capsys, "verify", "--device", "cpu")
    assert status == 0 and document["passed"] and len(document["checks"]) == 3 * (8 + 3)
    assert {check["dtype"] for check in document["checks"]} == {"fp64", "fp32", "bf16"}
    assert any("33 of 33 checks passed" in line for line in lines)
    monkeypatch.setattr(verify, "get_engine", lambda name: OneWrongElement())
    status, document, lines = run_json(capsys, "verify", "--device", "cpu")
    assert status == 1 and not document["passed"]
    assert {check["name"] for check in document["checks"] if not check["passed"]} == {"y"}
    assert any("FAIL" in line for line in lines)


# an expert without routes and tokens of them alone: exact zeros in y
RANK_CASES = (Case("odd", T=50, H=19, I=11, E=5, K=2, masked=0.6), Case("biases", T=40, H=16, I=8, E=2, K=1, biases=True, shared=((8, True),)))


def test_ranks_give_the_bits_of_one(monkeypatch, capsys):
    monkeypatch.setattr(verify_ranks, "CASES", RANK_CASES)
    status, document, lines = run_json(capsys, "verify", "--ranks", "1, 3,1", "--device", "cpu")
    assert status == 0 and document["passed"] and document["ranks"] == [1, 3, 1]
    assert [(check["dtype"], check["name"]) for check in document["checks"]] == [
        (dtype, f"P3 {which}, {W}") for W in ("1 rank", "3 ranks") for dtype in ("fp64", "fp32", "bf16") for which in ("forward", "backward")]
    assert any("12 of 12 checks passed" in line for line in lines) and any("bitwise" in line for line in lines)
    assert multiprocessing.active_children() == []


def test_ranks_that_differ_or_end_are_named(monkeypatch, capsys):
    monkeypatch.setattr(verify_ranks, "CASES", RANK_CASES[:1])
    monkeypatch.setattr(verify_ranks, "BODY", broken_ranks.broken)
    status, document, lines = run_json(capsys, "verify", "--ranks", "2")
    checks = {(check["dtype"], check["name"].split()[1].rstrip(",")): check for check in document["checks"]}
    assert status == 1 and document["failed"] == 4 and any("FAIL" in line for line in lines)
    failing = {key for key, check in checks.items() if not check["passed"]}
    assert failing == {("fp64", "backward"), ("fp32", "forward"), ("bf16", "forward"), ("bf16", "backward")}
    assert re.match(r"dw_down differs in 1 of 1045 elements, T of the ranks \[12, 38\], case: odd", checks["fp64", "backward"]["detail"])
    assert re.match(r"y differs in \d+ of 950 elements", checks["fp32", "forward"]["detail"])
    assert "rank 1: ended with status 3" in checks["bf16", "forward"]["detail"], checks["bf16", "forward"]
    assert multiprocessing.active_children() == []


def test_a_rank_that_raises_fails_every_check_of_its_number(monkeypatch):
    monkeypatch.setattr(verify_ranks, "CASES", RANK_CASES[:1])
    checks = verify_ranks.verify_ranks([2], body=broken_ranks.raising)
    assert len(checks) == 6 and not any(check.passed for check in checks)
    assert all("rank 1: ValueError: no such expert" in check.detail for check in checks)


@pytest.mark.parametrize("W", range(1, 10))
def test_tokens_are_shared_unequally_and_not_at_all(W):
    ways = verify_ranks.token_cuts(100, W)
    counts = [[last - first for first, last in pairwise(cuts)] for cuts in ways]
    assert all(cuts[0] == 0 and cuts[-1] == 100 and min(held) >= 0 and len(held) == W for cuts, held in zip(ways, counts))
    assert W == 1 or (len(set(counts[0])) > 1 and 0 in counts[1] and counts[2] == [0] * (W - 1) + [100])
    assert verify_ranks.token_cuts(8, 2) == [[0, 2, 8], [0, 0, 8], [0, 0, 8]]
    assert all(verify_ranks.case_for(case, W).E >= W for case in verify_ranks.CASES)


def test_bad_arguments_are_refused(capsys):
    assert "ranks='2' must not be given with compile_only" in bad_input(capsys, "verify", "--ranks", "2", "--compile-only", "sm_90a")
    assert "device='tpu'" in bad_input(capsys, "verify", "--device", "tpu")
    assert "target='sm_12' must be one of" in bad_input(capsys, "verify", "--compile-only", "sm_12")


def test_info_names_engines_versions_and_reasons(capsys):
    status, document, _ = run_json(capsys, "info")
    assert status == 0
    assert document["versions"]["torch"] == torch.__version__
    engines = {entry["engine"]: entry for entry in document["engines"]}
    assert set(engines) == {"cpu", "hopper", "torch_gpu"} and engines["cpu"]["available"]
    if not torch.cuda.is_available():
        assert not engines["hopper"]["available"] and torch.__version__ in engines["hopper"]["detail"]
    assert document["cpu_self_check"].startswith(("ok", "failed"))


def test_info_and_readme_say_the_same_of_the_cpus_dtypes(capsys):
    """What both name runs there, and nothing that runs is left out."""
    _, document, _ = run_json(capsys, "info")
    detail = next(entry["detail"] for entry in document["engines"] if entry["engine"] == "cpu")
    line = next(line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("**Supported.**"))
    assert re.search(r"CPU \((.*?)\)", line).group(1).lower() == detail
    ids, weights, layer = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), (torch.ones(2, 8, 6), torch.ones(2, 6, 4))
    for dtype in (d for d in vars(torch).values() if isinstance(d, torch.dtype)):
        try:
            y = mok.moe(torch.ones(3, 6).to(dtype), ids, weights, *layer)
        except (ValueError, RuntimeError):                              # RuntimeError: torch itself cannot make such a tensor
            continue
        assert y.dtype == dtype and verify.short_name(dtype) in detail


def test_the_real_cases_meet_the_rules_for_bitwise_tests():
    """At least 10^4 routes, 10^6 activation elements, one of them of odd H and I, an empty expert."""
    from importlib import reload

    for case in reload(verify).BITWISE_CASES:
        assert case.T * case.K >= 10**4 and case.T * case.K * case.I >= 10**6
        problem = verify.make_problem(replace(case, T=400), Target("cpu", CPU, torch.float32), seed=0)
        assert (problem.topk_ids == case.E - 1).sum() == 0
    assert any(case.H % 2 and case.I % 2 for case in verify.BITWISE_CASES)


@pytest.mark.parametrize("thiek", [(4096, 2048, 768, 128, 8), (70, 144, 80, 5, 2), (1000, 1024, 16384, 4, 1), (32768, 2880, 2880, 128, 4)])
def test_info_prints_the_scratch_that_the_hopper_engine_allocates(thiek):
    pytest.importorskip("triton", reason="the engine's host code imports Triton, which exists on Linux only")
    from mok.engines.hopper.backward_launch import COLUMN_TILE
    from mok.engines.hopper.launch import granularity

    T, H, I, E, K = thiek
    grain = granularity(None, H, I)
    names = {"T": T, "H": H, "I": I, "E": E, "K": K, "x_ring": grain.row_ring, "h_ring": grain.hidden_ring, "column_tile": COLUMN_TILE}
    for name, formula in SCRATCH_FORMULAS.items():
        names[name] = eval(formula, {}, names)
    assert scratch_bytes(*thiek) == {name: names[name] for name in SCRATCH_FORMULAS}


def test_info_lists_every_benchmark_layer_with_its_scratch():
    pytest.importorskip("triton", reason="the engine's host code imports Triton, which exists on Linux only")
    layers = hopper_scratch()["layers"]
    assert "qwen3-30b-a3b" in layers and all(sizes["backward"] > sizes["forward"] > 0 for sizes in layers.values())
