"""The plain-PyTorch engine against the specification, on CPU tensors (and on a GPU where there is one): both of its GEMM routes."""
from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from mok.engines import torch_gpu, torch_grouped
from mok.engines.protocol import Grads, MainGrad, MoETensors, PassOptions, SharedExpert, Wants, accumulation_dtype
from mok.engines.torch_gpu import TorchGpuEngine
from mok.plan import RoutingPlan
from mok.reference import moe_reference
from mok.runtime import runtime
from tests.ranks import RankPool

ENGINE = TorchGpuEngine()
NAMES = ("x", "topk_weights", "w_gate_up", "w_down", "b_gate_up", "b_down")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def case(T=37, H=24, I=10, E=5, K=3, dtype=torch.float64, biases=True, shared=2, seed=0, device="cpu"):
    """(ids, tensors): a tenth of -1 routes, expert 1 without tokens (not with one expert), one shared expert of two gated, values of unit scale."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype).to(device)

    ids = torch.randint(0, E, (T, K), generator=generator)
    ids[ids == 1] = 0
    ids[torch.rand(T, K, generator=generator) < 0.1] = -1
    weights = torch.rand(T, K, generator=generator, dtype=torch.float64).to(accumulation_dtype(dtype)).to(device)
    experts = tuple(SharedExpert(randn(2 * width, H, scale=H**-0.5), randn(H, width, scale=width**-0.5), randn(H, scale=H**-0.5) if gated else None)
                    for width, gated in ((7, True), (I, False))[:shared])
    return ids.to(device), MoETensors(randn(T, H), weights, randn(E, 2 * I, H, scale=H**-0.5), randn(E, H, I, scale=I**-0.5),
                                      randn(E, 2 * I) if biases else None, randn(E, H) if biases else None, experts)


def run(ids, tensors: MoETensors, dy, options=None, wants=None, main_grad=None):
    """(y, Grads) of the engine."""
    options = PassOptions(save_for_backward=True) if options is None else options
    plan = ENGINE.build_plan(ids, tensors.w_gate_up.shape[0])
    y, saved = ENGINE.forward(plan, tensors, options)
    wants = Wants(True, True, True, True, tensors.b_gate_up is not None, tensors.b_down is not None,
                  tuple((True, True, s.gate_weight is not None) for s in tensors.shared)) if wants is None else wants
    return y, ENGINE.backward(plan, tensors, options, saved, dy, wants, main_grad)


def reference(ids, tensors: MoETensors, dy, dtype, activation="swiglu", limit=None):
    """(y, Grads) of the specification in `dtype`, by autograd."""
    def leaf(t):
        return None if t is None else t.detach().to(dtype).requires_grad_()

    inputs = [leaf(getattr(tensors, name)) for name in NAMES]
    shared = [(leaf(s.w_gate_up), leaf(s.w_down), leaf(s.gate_weight)) for s in tensors.shared]
    y = moe_reference(inputs[0], ids, *inputs[1:], shared=shared, activation=activation, swiglu_limit=limit)
    y.backward(dy.to(dtype))
    grads = Grads(*(None if t is None else t.grad for t in inputs), shared=[tuple(None if t is None else t.grad for t in s) for s in shared])
    return y.detach(), grads


def flat(y, grads: Grads) -> dict[str, torch.Tensor]:
    """Everything by name; expert weights and biases one by one, because a pooled error hides a missing expert."""
    named = {"y": y, "x": grads.x, "topk_weights": grads.topk_weights}
    for name in NAMES[2:]:
        gradient = getattr(grads, name)
        if gradient is not None:
            named |= {f"{name}[{e}]": part for e, part in enumerate(gradient)}
    for i, parts in enumerate(grads.shared):
        named |= {f"shared[{i}].{name}": part for name, part in zip(("w_gate_up", "w_down", "gate_weight"), parts)}
    return {name: t for name, t in named.items() if t is not None}


def relative_error(got, truth) -> float:
    if not torch.isfinite(got).all():
        return float("inf")
    norm = truth.double().norm()
    difference = (got.double() - truth.double()).norm()
    return float(difference / norm) if norm > 0 else float(difference > 0)            # exactly zero compares exactly


def assert_close(got: dict, truth: dict, bound: float) -> None:
    assert got.keys() == truth.keys()
    for name, value in got.items():
        assert value.shape == truth[name].shape, name
        error = relative_error(value, truth[name])
        assert error <= bound, f"{name}: {error:.2e}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation,limit", [("swiglu", None), ("swiglu", 0.7), ("swiglu_oai", None), ("swiglu_oai", 0.5), ("geglu", None), ("reglu", None)])
def test_float64_equals_the_specification(activation, limit, device):
    ids, tensors = case(device=device)
    dy = torch.randn(37, 24, dtype=torch.float64, device=device)
    got = run(ids, tensors, dy, PassOptions(activation, limit, save_for_backward=True))
    assert_close(flat(*got), flat(*reference(ids, tensors, dy, torch.float64, activation, limit)), 1e-13)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("T,H,I,E,K", [
    (1, 24, 10, 1, 1),        # one of everything
    (300, 16, 16, 2, 2),      # segments of several tiles, H = I
    (64, 32, 16, 64, 2),      # T = E, 2I = H
    (9, 8, 4, 6, 6),          # K = E
    (0, 24, 10, 5, 3),        # no token
])
def test_other_sizes(T, H, I, E, K, device):
    ids, tensors = case(T, H, I, E, K, device=device)
    dy = torch.randn(T, H, dtype=torch.float64, device=device)
    assert_close(flat(*run(ids, tensors, dy)), flat(*reference(ids, tensors, dy, torch.float64)), 1e-13)


@pytest.mark.parametrize("device", DEVICES)
def test_one_expert_takes_everything_masked_tokens_and_repeated_experts(device):
    ids, tensors = case(300, E=4, device=device)
    dy = torch.randn(300, 24, dtype=torch.float64, device=device)
    for everywhere in (2, -1):                                                         # 900 routes: eight tiles; then none at all
        ids.fill_(everywhere)
        y, grads = run(ids, tensors, dy)
        assert_close(flat(y, grads), flat(*reference(ids, tensors, dy, torch.float64)), 1e-13)
    assert (grads.topk_weights == 0).all() and (grads.w_gate_up == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype,H,I,biases", [
    (torch.float32, 24, 10, True),
    (torch.float16, 24, 10, True),
    (torch.bfloat16, 64, 32, True),      # sizes that torch._grouped_mm takes as they are
    (torch.bfloat16, 64, 32, False),
    (torch.bfloat16, 25, 13, True),      # sizes that must be padded for it
])
def test_lower_precision_is_as_good_as_a_plain_loop_in_it(dtype, H, I, biases, device):
    ids, tensors = case(200, H, I, dtype=dtype, biases=biases, device=device)
    dy = torch.randn(200, H, device=device).to(dtype)
    got, truth, plain = (flat(*result) for result in (run(ids, tensors, dy), reference(ids, tensors, dy, torch.float64), reference(ids, tensors, dy, dtype)))
    unit = torch.finfo(dtype).eps
    for name, value in got.items():
        assert value.dtype == (torch.float32 if name == "topk_weights" else dtype)
        error, allowed = relative_error(value, truth[name]), 2 * relative_error(plain[name], truth[name]) + 2 * unit
        assert error <= allowed, f"{name}: {error:.2e} above {allowed:.2e}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("H,I", [(64, 32), (25, 13)])
def test_bf16_is_rounded_where_the_contract_says_and_nowhere_else(H, I, device):
    """z once, its bias inside; dh not at all; what goes into main_grad not at all: each checked from what the engine had in hand there."""
    ids, tensors = case(300, H, I, K=1, dtype=torch.bfloat16, shared=0, device=device)
    ids.fill_(2)
    tensors = replace(tensors, b_gate_up=4 * tensors.b_gate_up)                        # as large as the product: rounded apart, it would show
    dy = torch.randn(300, H, device=device).bfloat16()
    plan, options = ENGINE.build_plan(ids, 5), PassOptions(save_for_backward=True)
    _, saved = ENGINE.forward(plan, tensors, options)
    z = saved.z[:300]
    exact = tensors.x.double() @ tensors.w_gate_up[2].double().T + tensors.b_gate_up[2].double()
    assert (z == exact.bfloat16()).float().mean() > 0.99                               # but for ties that fp32 sums decide the other way

    main_grad = MainGrad(*(torch.zeros_like(w, dtype=torch.float32) for w in (tensors.w_gate_up, tensors.w_down)))
    grads = ENGINE.backward(plan, tensors, options, saved, dy, Wants(True, True, True, True, True, True), main_grad)
    g, u = z.double().chunk(2, dim=1)
    h = (g * torch.sigmoid(g) * u).bfloat16().double()
    dh = dy.double() @ tensors.w_down[2].double()
    d_weight = (dh * h).sum(1, keepdim=True) + (dy.double() * tensors.b_down[2].double()).sum(1, keepdim=True)
    assert relative_error(grads.topk_weights, d_weight) < 1e-4                         # of an h that fp32 rounds the other way now and then
    dh, s, weight = dh * tensors.topk_weights.double(), torch.sigmoid(g), tensors.topk_weights.double()
    dz = torch.cat([dh * u * s * (1 + g * (1 - s)), dh * g * s], dim=1).bfloat16().double()
    weighted_h = (weight * h).bfloat16().double()
    assert relative_error(main_grad.w_gate_up[2], dz.T @ tensors.x.double()) < 1e-4
    assert relative_error(main_grad.w_down[2], dy.double().T @ weighted_h) < 1e-4
    assert not main_grad.w_down[[0, 1, 3, 4]].any()


@pytest.mark.gpu
@pytest.mark.parametrize("E", [1023, 1024, 1500])
def test_as_many_experts_as_anybody_has(E):
    """`torch._grouped_mm` stops at 1023 groups, the plan's own kernels at 1024 experts."""
    ids, tensors = case(3000, 24, 16, E, 2, dtype=torch.bfloat16, device="cuda")
    dy = torch.randn(3000, 24, device="cuda").bfloat16()
    got, truth = run(ids, tensors, dy), reference(ids, tensors, dy, torch.float64)
    for name, value, exact in (("y", got[0], truth[0]), *((n, getattr(got[1], n), getattr(truth[1], n)) for n in NAMES)):
        assert relative_error(value, exact) < 8e-3, name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [1500, -2, 2**62])
def test_a_bad_id_is_reported_where_the_plan_kernels_do_not_run(device, bad):
    """More experts than they take, or no Triton: the same report, which a later good call does not wipe, once."""
    ids = torch.randint(-1, 1500, (40, 2), device=device)
    torch_gpu.report_bad_ids(ids, 1500)
    torch_gpu.report_bad_ids(ids[:0], 1500)
    if device == "cuda":
        torch.cuda.synchronize()
    runtime.raise_pending_errors()
    wrong = ids.clone()
    wrong[7, 1] = bad
    if device == "cuda":
        ENGINE.build_plan(wrong, 1500)
    else:
        torch_gpu.report_bad_ids(wrong, 1500)
    torch_gpu.report_bad_ids(ids, 1500)
    if device == "cuda":
        torch.cuda.synchronize()
    with pytest.raises(ValueError, match=rf"topk_ids held {min(bad, 2**51 - 1)} .*E = 1500"):
        runtime.raise_pending_errors()
    runtime.raise_pending_errors()


def test_experts_beyond_the_grouped_product_take_the_tiles(monkeypatch):
    ids, tensors = case(dtype=torch.bfloat16)
    dy = torch.randn(37, 24).bfloat16()
    grouped = flat(*run(ids, tensors, dy))
    monkeypatch.setattr(torch_grouped, "uses_grouped_mm", lambda device, dtype, num_experts: num_experts <= 4)
    monkeypatch.setattr(torch, "_grouped_mm", None)
    for name, value in flat(*run(ids, tensors, dy)).items():
        assert relative_error(value, grouped[name]) < 8e-3, name


def test_tiles_of_gathered_weights_change_no_bit(monkeypatch):
    ids, tensors = case(150, dtype=torch.float32)
    dy = torch.randn(150, 24)
    whole = flat(*run(ids, tensors, dy))
    monkeypatch.setattr(torch_grouped, "GATHERED_WEIGHT_BYTES", 1)                      # one tile at a time
    for name, value in flat(*run(ids, tensors, dy)).items():
        assert relative_error(value, whole[name]) < 1e-6, name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_frozen_inputs_come_back_as_none_and_the_rest_unchanged(dtype, device):
    ids, tensors = case(dtype=dtype, H=32, I=16, shared=1, device=device)
    dy = torch.randn(37, 32, device=device).to(dtype)
    _, everything = run(ids, tensors, dy)
    combinations = [(*four, four[3], four[2]) for four in itertools.product((False, True), repeat=4)]       # each bias frozen with the other's weight
    for flags in [*combinations, (False,) * 4 + (True, False), (False,) * 4 + (False, True)]:
        wants = Wants(*flags, shared=((flags[0], flags[1], flags[2]),))
        _, grads = run(ids, tensors, dy, wants=wants)
        for name, wanted in zip(NAMES, flags):
            gradient, full = getattr(grads, name), getattr(everything, name)
            assert (gradient is not None) == wanted, (name, flags)
            assert gradient is None or torch.equal(gradient, full), (name, flags)
        for gradient, full, wanted in zip(grads.shared[0], everything.shared[0], wants.shared[0]):
            assert (gradient is not None) == wanted and (gradient is None or torch.equal(gradient, full)), flags


def test_frozen_weights_cost_no_product(monkeypatch):
    """What is not wanted is not computed: no weight gradient, and no x rows for it."""
    ids, tensors = case()
    dy = torch.randn(37, 24, dtype=torch.float64)

    def forbidden(*args, **kwargs):
        raise AssertionError("a frozen weight's gradient was computed")

    monkeypatch.setattr(torch_gpu, "weight_gradient", forbidden)
    monkeypatch.setattr(torch_gpu, "segment_sums", forbidden)
    wants = Wants(x=True, topk_weights=True, shared=((False,) * 3,) * 2)
    assert run(ids, tensors, dy, wants=wants)[1].x is not None
    with pytest.raises(AssertionError, match="frozen"):
        run(ids, tensors, dy)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_is_added_to(dtype, device):
    ids, tensors = case(dtype=dtype, H=32, I=16, shared=0, device=device)
    dy = torch.randn(37, 32, device=device).to(dtype)
    _, plain = run(ids, tensors, dy)
    preset = [torch.randn_like(w, dtype=torch.float32) for w in (tensors.w_gate_up, tensors.w_down)]
    main_grad = MainGrad(*(p.clone() for p in preset))
    _, grads = run(ids, tensors, dy, main_grad=main_grad)
    assert grads.w_gate_up is None and grads.w_down is None and torch.equal(grads.x, plain.x)
    for total, before, added in zip((main_grad.w_gate_up, main_grad.w_down), preset, (plain.w_gate_up, plain.w_down)):
        assert torch.allclose(total - before, added.float(), rtol=1e-2, atol=1e-5)
        assert torch.equal(total[1], before[1])                                        # the expert without tokens keeps what it had


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_nan_stays_with_its_expert_and_its_token(dtype, device):
    ids, tensors = case(60, 32, 16, dtype=dtype, shared=0, device=device)
    dy = torch.randn(60, 32, device=device).to(dtype)
    tensors.w_gate_up[1] = float("nan")                                                # nobody goes there
    ids[0] = -1                                                                        # token 0 has no expert, and slot 0 stands in for padding
    for poisoned in (tensors.x, tensors.topk_weights, dy):
        poisoned[0] = float("nan")
    y_again, again = run(ids, tensors, dy)
    assert (y_again[0] == 0).all() and (again.x[0] == 0).all() and (again.topk_weights[0] == 0).all()
    for value in flat(y_again, again).values():
        assert torch.isfinite(value).all()
    tensors.w_gate_up[0] = float("nan")                                                # the neighbour whose first row stands in for -1 routes
    y_third, third = run(ids, tensors, dy)
    untouched = (ids != 0).all(1)
    assert (ids[untouched] == -1).any()
    assert torch.equal(y_third[untouched], y_again[untouched]) and torch.equal(third.x[untouched], again.x[untouched])
    for name in NAMES[2:]:
        for e in range(1, 5):
            assert torch.equal(getattr(third, name)[e], getattr(again, name)[e]), (name, e)
    assert torch.isnan(third.w_gate_up[0]).any()


@pytest.mark.parametrize("device", DEVICES)
def test_padding_rows_of_an_infinite_weight_stay_out_of_its_gradient(device):
    """One valid row: its gradients are infinite but not NaN, and 0 * inf in the padding rows beside it must not make them NaN."""
    ids, tensors = case(1, E=2, K=1, shared=0, biases=False, device=device)
    ids.fill_(0)
    dy = torch.randn(1, 24, dtype=torch.float64, device=device)
    tensors.w_down[0, 3, 4] = float("inf")
    _, grads = run(ids, tensors, dy)
    assert torch.isinf(grads.w_gate_up[0]).any() and not torch.isnan(grads.w_gate_up[0]).any()
    tensors.w_down[0, 3, 4] = 1
    tensors.w_gate_up[0, 10, 5] = float("inf")                                         # one u infinite, the gates finite
    _, grads = run(ids, tensors, dy)
    assert torch.isinf(grads.w_down[0]).any() and not torch.isnan(grads.w_down[0]).any()


def test_what_a_grouped_product_leaves_unwritten_is_never_read(monkeypatch):
    """Its rows behind the last group, and the results of empty groups, hold whatever the allocator left there."""
    ids, tensors = case(dtype=torch.bfloat16, H=32, I=16)
    dy = torch.randn(37, 32).bfloat16()
    clean = flat(*run(ids, tensors, dy))
    grouped_mm = torch._grouped_mm

    def poisoned(a, b, offs):
        out = grouped_mm(a, b, offs=offs)
        if out.dim() == 2:
            out[int(offs[-1]):] = float("nan")
        else:
            out[torch.diff(offs, prepend=offs.new_zeros(1)) == 0] = float("nan")
        return out

    monkeypatch.setattr(torch, "_grouped_mm", poisoned)
    for name, value in flat(*run(ids, tensors, dy)).items():
        assert torch.equal(value, clean[name]), name


@pytest.mark.parametrize("device", DEVICES)
def test_strided_inputs_change_no_bit(device):
    ids, tensors = case(dtype=torch.float32, device=device)
    dy = torch.randn(37, device=device)[:, None].expand(37, 24)                        # stride 0, as y.sum().backward() gives
    def spread(t):
        return None if t is None else torch.stack([t, torch.full_like(t, float("nan"))], dim=-1)[..., 0]

    strided = MoETensors(*(spread(getattr(tensors, name)) for name in NAMES),
                         shared=tuple(SharedExpert(*(spread(t) for t in (s.w_gate_up, s.w_down, s.gate_weight))) for s in tensors.shared))
    assert not strided.x.is_contiguous()
    plain = flat(*run(ids, tensors, dy.contiguous()))
    for name, value in flat(*run(ids, strided, dy)).items():
        assert torch.equal(value, plain[name]), name


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_saved_unless_asked_for(device):
    ids, tensors = case(device=device)
    plan = ENGINE.build_plan(ids, 5)
    y, saved = ENGINE.forward(plan, tensors, PassOptions())
    assert saved.z.shape == (0, 20) and saved.shared_z.shape == (0, 34)
    y_saving, saved = ENGINE.forward(plan, tensors, PassOptions(save_for_backward=True))
    assert saved.z.shape == (plan.num_rows, 20) and saved.z.is_contiguous() and saved.shared_z.shape == (37, 34)
    assert torch.equal(y, y_saving)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "H", "I"), [(torch.float64, 24, 10), (torch.bfloat16, 65, 33), (torch.bfloat16, 64, 48)], ids=str)
def test_recomputed_z_changes_no_bit(dtype, H, I, device):
    """Both products, by grouped tiles and one by one; all gradients, then some that need z of one kind only."""
    ids, tensors = case(700, H, I, dtype=dtype, device=device)
    again, plan = PassOptions(recompute="z"), ENGINE.build_plan(ids, 5)
    y, saved = ENGINE.forward(plan, tensors, PassOptions(save_for_backward=True))
    y_again, nothing = ENGINE.forward(plan, tensors, again)
    assert torch.equal(y, y_again) and nothing.z.shape[0] == nothing.shared_z.shape[0] == 0
    dy, off = torch.randn(700, H, generator=torch.Generator().manual_seed(1)).to(device, dtype), (False, False, False)
    for wants in (Wants(True, True, True, True, True, True, ((True, True, True), (True, True, False))), Wants(w_down=True, shared=(off, off)),
                  Wants(b_down=True, shared=((False, True, False), off)), Wants(shared=(off, off))):
        expected = ENGINE.backward(plan, tensors, PassOptions(save_for_backward=True), saved, dy, wants, None)
        got = ENGINE.backward(plan, tensors, again, nothing, dy, wants, None)
        for name in NAMES:
            a, b = getattr(expected, name), getattr(got, name)
            assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), (name, wants)
        for a, b in zip((p for s in expected.shared for p in s), (p for s in got.shared for p in s), strict=True):
            assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), wants


def test_segment_sums_stop_at_borders():
    ids = torch.tensor([[0]] * 300 + [[2]] * 5 + [[3]] * 128)                          # three tiles, no tile, one short tile, one full tile
    plan = RoutingPlan.build(ids, 4)
    rows = torch.where(plan.row_to_slot >= 0, plan.row_to_slot + 1, 0).double().unsqueeze(1)
    sums = torch_grouped.segment_sums(plan, rows)[:, 0].tolist()
    assert sums == [sum(range(1, 301)), 0, sum(range(301, 306)), sum(range(306, 434))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("T", [0, 1, 700, 2500])                                       # none, one, part of a tile, three tiles
def test_router_scores_and_their_gradients(T, device):
    x, weight = torch.randn(T, 48, device=device).bfloat16(), torch.randn(6, 48, device=device)
    dlogits = torch.randn(T, 6, device=device)
    logits = ENGINE.router_scores(x, weight)
    dx, dweight = ENGINE.router_scores_backward(x, weight, dlogits, True, True)
    assert logits.dtype == torch.float32 and dx.dtype == torch.bfloat16 and dweight.dtype == torch.float32
    for got, truth, bound in ((logits, x.double() @ weight.double().T, 1e-6), (dx, dlogits.double() @ weight.double(), 4e-3),
                              (dweight, dlogits.double().T @ x.double(), 1e-6)):
        assert got.shape == truth.shape and (T == 0 or relative_error(got, truth) < bound)
    assert ENGINE.router_scores_backward(x, weight, dlogits, False, True)[0] is None
    assert ENGINE.router_scores(x.double(), weight.double()).dtype == torch.float64


def _on_rank(process_group, ids, tensors, dy, cuts):
    """One rank's y and gradients over its tokens cuts[r]..cuts[r+1] and its experts."""
    import mok
    from mok.engines.expert_parallel import build_group_plan
    from mok.plan import experts_of_rank

    group = mok.ExpertGroup(process_group, timeout_s=30)
    tokens = slice(cuts[group.rank], cuts[group.rank + 1])
    first, count = experts_of_rank(tensors.w_gate_up.shape[0], group.size, group.rank)
    experts = slice(first, first + count)
    mine = MoETensors(tensors.x[tokens], tensors.topk_weights[tokens], tensors.w_gate_up[experts], tensors.w_down[experts],
                      tensors.b_gate_up[experts], tensors.b_down[experts])
    plan = build_group_plan(group, ids[tokens], count, {"layer_key": 0})
    engine, options = TorchGpuEngine(group), PassOptions(save_for_backward=True)
    y, saved = engine.forward(plan, mine, options)
    grads = engine.backward(plan, mine, options, saved, dy[tokens], Wants(True, True, True, True, True, True), None)
    again = PassOptions(recompute="z")
    _, nothing = engine.forward(plan, mine, again)
    for wants in (Wants(True, True, True, True, True, True), Wants(w_down=True)):                     # the second brings no rows of x otherwise
        recomputed = engine.backward(plan, mine, again, nothing, dy[tokens], wants, None)
        assert all(torch.equal(getattr(grads, name), getattr(recomputed, name)) for name in NAMES if getattr(wants, name))
    return flat(y, grads), first


def test_ranks_of_a_process_group_agree_with_one():
    """Unequal tokens, none on the second rank, five experts on three ranks."""
    ids, tensors = case(150, shared=0)
    dy = torch.randn(150, 24, dtype=torch.float64)
    alone = flat(*run(ids, tensors, dy))
    pool = RankPool(3)
    try:
        results = pool.run(_on_rank, 3, ids, tensors, dy, [0, 90, 90, 150])
    finally:
        pool.close()
    for name in ("y", "x", "topk_weights"):
        assert relative_error(torch.cat([parts[name] for parts, _ in results]), alone[name]) < 1e-13, name
    experts = 0
    for parts, first in results:
        for name, value in parts.items():
            if "[" in name:
                weight, e = name[:-1].split("[")
                assert relative_error(value, alone[f"{weight}[{int(e) + first}]"]) < 1e-13, (name, first)
                experts += weight == "w_down"
    assert experts == 5


def test_quantised_precision_is_refused():
    ids, tensors = case()
    with pytest.raises(NotImplementedError, match="mxfp8"):
        ENGINE.forward(RoutingPlan.build(ids, 5), tensors, PassOptions(precision="mxfp8"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype,H,I", [(torch.bfloat16, 64, 32), (torch.bfloat16, 72, 40), (torch.float16, 25, 13), (torch.float32, 64, 32)])
def test_gpu_runs_repeat_bit_for_bit_without_a_sync(dtype, H, I):
    ids, tensors = case(3000, H, I, 8, 4, dtype=dtype, device="cuda")
    dy = torch.randn(3000, H, device="cuda").to(dtype)
    first = flat(*run(ids, tensors, dy))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            torch.full((2**26,), float("nan"), device="cuda")                          # poison what the allocator hands out next
            for name, value in flat(*run(ids, tensors, dy)).items():
                first[name] = torch.where(value == first[name], first[name], float("nan"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(value).all() for value in first.values())


@pytest.mark.gpu
def test_router_scores_ignore_tf32():
    x, weight = torch.randn(300, 512, device="cuda"), torch.randn(8, 512, device="cuda")
    plain = ENGINE.router_scores(x, weight)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert torch.equal(ENGINE.router_scores(x, weight), plain)
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.gpu
def test_the_public_function_runs_it_and_reports_a_bad_id_at_the_next_call():
    """fp16 on a GPU, H and I off 16: through custom ops and autograd, captured in a CUDA graph, and an id out of range that cannot raise at once."""
    import mok

    ids, tensors = case(200, 25, 13, dtype=torch.float16, biases=False, shared=0, device="cuda")
    leaves = [getattr(tensors, name).requires_grad_() for name in NAMES[:4]]
    assert mok.engine_for(leaves[0], 13) == "torch_gpu"
    y = mok.moe(leaves[0], ids, *leaves[1:])
    dy = torch.randn_like(y)
    grads = torch.autograd.grad(y, leaves, dy)
    truth = flat(*reference(ids, tensors, dy, torch.float64))
    for name, value in flat(y.detach(), Grads(*grads)).items():
        assert relative_error(value, truth[name]) < 4e-3, name

    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        replayed = mok.moe(leaves[0], ids, *leaves[1:])
    graph.replay()
    assert torch.equal(replayed, y)

    mok.check()
    ids[0, 0] = 77
    mok.moe(leaves[0], ids, *leaves[1:])
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="topk_ids held 77"):
        mok.moe(leaves[0], ids.clamp(max=4), *leaves[1:])
    mok.check()


@pytest.mark.gpu
@pytest.mark.parametrize("H,E", [(2048, 128), (7168, 256), (72, 5)])
def test_router_scores_of_a_token_do_not_depend_on_the_batch(H, E):
    """Every GEMM has one shape, so a row's bits change neither with T nor with its place."""
    x, weight = torch.randn(3000, H, device="cuda").bfloat16(), torch.randn(E, H, device="cuda")
    scores = ENGINE.router_scores(x, weight)
    assert torch.equal(ENGINE.router_scores(x.flip(0), weight).flip(0), scores)
    for rows in (slice(0, 1), slice(777, 778), slice(1500, 2900)):
        assert torch.equal(ENGINE.router_scores(x[rows], weight), scores[rows])
    dlogits = torch.randn(3000, E, device="cuda")
    dx, _ = ENGINE.router_scores_backward(x, weight, dlogits, True, False)
    assert torch.equal(ENGINE.router_scores_backward(x.flip(0), weight, dlogits.flip(0), True, False)[0].flip(0), dx)
