"""The tolerance: sound results of every dtype pass it, and each kind of fault that it is for fails it, in the dtype in which it is hardest to see."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mok.engines.cpu import CpuEngine
from mok.tolerance import FACTORS, Expected, expected, worst_block
from tests.oracle import Case, expected_of, make_case, plain, run_engine

BF16 = torch.bfloat16
T, H, I, E, K = 300, 144, 80, 4, 2


@pytest.fixture(scope="module")
def bf16() -> tuple[Case, Expected, dict[str, Tensor]]:
    """(problem, truth and scale, sound results in bf16): about 285 routes to each of three experts."""
    case = make_case(T, H, I, E, K, BF16, biases=True, shared=((32, True),))
    return case, expected_of(case), run_engine(CpuEngine(), case)


def ratio(want: Expected, name: str, actual: Tensor, row_groups=()) -> float:
    return worst_block(actual, want.truth[name], want.scale[name], want.dtype, row_groups).ratio


def difference(want: Expected, changed: Case, name: str) -> Tensor:
    """What a fault does to a result: the truth of the problem that it computes instead, minus the truth."""
    return plain(changed)[name] - want.truth[name]


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(3))
def test_sound_results_pass_with_room_and_not_because_all_do(dtype, seed):
    case = make_case(150, 48, 24, 5, 2, dtype, biases=True, shared=((16, True),), seed=seed)
    want, got = expected_of(case), run_engine(CpuEngine(), case)
    ratios = {name: ratio(want, name, value) for name, value in got.items() if value is not None}
    assert max(ratios.values()) < 0.8 and len(ratios) == 10
    for name, scale in want.scale.items():                   # four times the bound, at random over the whole result: every result has a bound that bites
        noise = torch.randn(scale.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        assert ratio(want, name, want.truth[name] + 4 * FACTORS[dtype] * scale * noise) > 1, name


def test_one_route_with_another_weight(bf16):
    """Four percent more weight for one route of 570: its token's y, and a weight of another route in one row of the gradients."""
    case, want, got = bf16
    weights = case.tensors.topk_weights.clone()
    slot = (17, 0)
    assert case.topk_ids[slot] >= 0
    weights[slot] *= 1.04
    wrong = replace(case, tensors=replace(case.tensors, topk_weights=weights))
    assert ratio(want, "y", got["y"].double() + difference(want, wrong, "y")) > 1
    weights[slot] = 3 * case.tensors.topk_weights[slot]
    wrong = replace(case, tensors=replace(case.tensors, topk_weights=weights))
    for name in ("y", "x", "w_gate_up", "w_down", "b_gate_up", "b_down"):
        assert ratio(want, name, got[name].double() + difference(want, wrong, name)) > 1, name


def test_one_row_dropped(bf16):
    """One route of an expert's 190 is left out."""
    case, want, got = bf16
    ids = case.topk_ids.clone()
    ids[17, 0] = -1
    wrong = replace(case, topk_ids=ids)
    for name in ("y", "x", "topk_weights", "w_gate_up", "w_down", "b_gate_up", "b_down"):
        assert ratio(want, name, got[name].double() + difference(want, wrong, name)) > 1, name


def test_one_padding_row_leaks(bf16):
    """A row behind an expert's segment still holds a token of an earlier step, and is added to its gradients."""
    case, want, got = bf16
    extra = make_case(1, H, I, E, 1, BF16, topk_ids=torch.tensor([[1]]), seed=9)
    extra = replace(extra, tensors=replace(case.tensors, x=extra.tensors.x, topk_weights=torch.ones(1, 1), shared=()))
    leaked = plain(extra)
    for name in ("w_gate_up", "w_down", "b_gate_up", "b_down"):
        assert ratio(want, name, got[name].double() + leaked[name]) > 1, name


def narrow_sum(left: Tensor, right: Tensor, step: int, accumulator: torch.dtype) -> Tensor:
    """left.T @ right over `step` rows at a time, added up in `accumulator`."""
    total = torch.zeros(left.shape[1], right.shape[1], dtype=accumulator)
    for row in range(0, left.shape[0], step):
        total += (left[row:row + step].double().T @ right[row:row + step].double()).to(accumulator)
    return total


@pytest.mark.parametrize(("dtype", "accumulator", "step"), [(BF16, BF16, 16), (torch.float16, torch.float16, 16), (torch.float32, torch.float16, 64)])
def test_sums_in_too_narrow_a_type(dtype, accumulator, step):
    """A product over 2048 terms whose accumulator is 16 bits wide, rounded once for every `step` terms; in fp32 it may be rounded anywhere."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(2048, 128, generator=generator).to(dtype) for _ in range(2))
    want = expected(lambda change: {"out": change(left.double()).T @ change(right.double())}, dtype)
    assert ratio(want, "out", narrow_sum(left, right, step, torch.float32).to(dtype)) < 0.8
    assert ratio(want, "out", narrow_sum(left, right, step, accumulator)) > 1


def test_fp32_operands_rounded_to_tf32():
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(512, 128, generator=generator) for _ in range(2))
    want = expected(lambda change: {"out": change(left.double()).T @ change(right.double())}, torch.float32)
    assert ratio(want, "out", left.T @ right) < 0.8

    def tf32(t: Tensor) -> Tensor:
        return ((t.view(torch.int32) + 2**12) & ~(2**13 - 1)).view(torch.float32)

    assert ratio(want, "out", tf32(left).T @ tf32(right)) > 1


def test_one_wrong_element_shows_in_bf16_too(bf16):
    _, want, got = bf16
    for name in ("y", "x", "w_gate_up", "w_down"):
        wrong = got[name].clone()
        wrong[-1, -1] += want.truth[name].square().mean().sqrt()
        assert ratio(want, name, wrong) > 1, name


def test_a_fault_in_few_rows_of_one_expert_shows_by_its_group_alone():
    """Three rows with twice the error that is allowed, no element of them an outlier: hidden in a block of 128 rows, not in a group of their own."""
    truth = torch.randn(128, 128, dtype=torch.float64)
    scale = torch.full_like(truth, 2**-9)
    actual, rows = truth + scale * torch.randn(128, 128, dtype=torch.float64), torch.arange(3, 6)
    actual[rows] = truth[rows] + 5 * scale[rows] * torch.randn(3, 128, dtype=torch.float64).sign()
    assert worst_block(actual, truth, scale, BF16).ratio < 1
    assert worst_block(actual, truth, scale, BF16, row_groups=[torch.arange(50, 60), rows]).ratio > 1


def test_zero_stays_exactly_zero_and_nan_never_passes():
    zero = torch.zeros(4, 4, dtype=torch.float64)
    assert worst_block(zero.clone(), zero, zero, torch.float32).ratio == 0
    assert worst_block(zero + 1e-300, zero, zero, torch.float32).ratio == float("inf")
    one = torch.ones(4, 4, dtype=torch.float64)
    for broken in (float("nan"), float("inf")):
        wrong = one.clone()
        wrong[2, 1] = broken
        assert worst_block(wrong, one, one, torch.float32).ratio == float("inf")
    empty = torch.zeros(0, 4, dtype=torch.float64)
    assert worst_block(empty, empty, empty, torch.float32).ratio == 0


def test_the_place_of_the_worst_block_is_named():
    truth = torch.ones(3, 200, 300, dtype=torch.float64)
    wrong = truth.clone()
    wrong[2, 150, 130] = 2
    assert worst_block(wrong, truth, truth * 2**-9, BF16).detail.startswith("[2, 128:, 128:]")
    flat = torch.ones(200, 300, dtype=torch.float64)
    groups = [torch.arange(0, 5), torch.arange(190, 195)]
    wrong = flat.clone()
    wrong[190:195, 256:] += 5 * 2**-9
    assert worst_block(wrong, flat, flat * 2**-9, BF16, groups).detail.startswith("row group 1, columns 256:")


def test_cancellation_in_a_sum_widens_its_scale():
    """1 + (2^-8 - 1): the terms' last bits decide the result, and the scale knows it."""
    terms = torch.tensor([1.0, 2**-8, -1.0], dtype=torch.float64)
    cancelling = expected(lambda change: {"out": change(terms).sum().view(1)}, BF16)
    assert 0.3 * 2**-8 < cancelling.scale["out"].item() < 2 * 2**-8
    alone = expected(lambda change: {"out": change(terms)[1].view(1)}, BF16)
    assert alone.scale["out"].item() < 2**-15
