"""Cases A: gradients and forward numerics that came out wrong while shapes and losses looked right."""
from __future__ import annotations

import pytest
import torch

import mok
from mok.engines import engine_name, get_engine
from mok.engines.protocol import MoETensors, PassOptions, Wants
from mok.reference import moe_reference
from mok.tolerance import FACTORS
from tests.cases.case_support import (
    Problem,
    assert_exactly_zero,
    assert_same_bits,
    bits,
    on_tensor_cores,
    problem,
    random_routes,
    routes_with_counts,
)


def scaled(device: str, on_gpu: int, on_cpu: int) -> int:
    """A dimension of the report on a GPU, a smaller one on two CPU cores, where the fault lies in the counts and not in the width."""
    return on_gpu if device == "cuda" else on_cpu


@pytest.mark.parametrize("counts", [
    [162, 0, 2577, 446, 0, 83],          # the report's: two experts empty between busy ones
    [0, 0, 0, 257, 0, 0],                # all but one
    [0, 130, 7, 1, 128, 64],             # the first
    [130, 7, 1, 128, 64, 0],             # the last
    [0, 0, 1],                           # a single row behind two empty experts
], ids=str)
def test_case_A1(device, dtype, counts):
    """pytorch#172439, MSLK#158, TransformerEngine#2499, tokamax#887, pytorch#174314: unwritten gradient of an expert without tokens."""
    H, I = scaled(device, 2048, 200), scaled(device, 768, 72)
    got = problem(routes_with_counts(counts), len(counts), H, I, device, dtype, biases=True).check()
    for name in ("w_gate_up", "w_down", "b_gate_up", "b_down"):
        for e, count in enumerate(counts):
            if count == 0:
                assert_exactly_zero(got[name][e], f"d{name}[{e}]")


def test_case_A1_experts_fall_empty_from_step_to_step(device, dtype):
    """The kind of A1 with memory that an earlier step filled: each step leaves other experts empty, token counts shrink and grow."""
    for step, counts in enumerate(([90, 80, 70, 60], [0, 140, 0, 3], [0, 0, 0, 1], [129, 0, 0, 0], [1, 2, 3, 400])):
        got = problem(routes_with_counts(counts), 4, on_tensor_cores(device, 72), on_tensor_cores(device, 40), device, dtype, biases=True, seed=step).check()
        for name in ("w_gate_up", "w_down", "b_gate_up", "b_down"):
            for e, count in enumerate(counts):
                if count == 0:
                    assert_exactly_zero(got[name][e], f"step {step}: d{name}[{e}]")


def test_case_A2(device, dtype):
    """pytorch#193633, transformers#48205, transformers#45621, pytorch#154557, torchtitan#1237: rows behind the last group leak into gradients.

    Half of the routes have no expert here, so most of the plan's rows are never written; from step to step the used part shrinks and grows.
    """
    for step, (T, masked) in enumerate(((8, 0.5), (3, 0.7), (40, 0.5), (8, 0.0), (1, 0.0), (8, 0.9))):
        problem(random_routes(T, 2, 8, masked=masked, seed=step), 8, 64, 32, device, dtype, biases=True, shared=(32,), seed=step).check()


def test_case_A2_saved_padding_rows_are_never_read(device, dtype):
    """The kind of A2 inside backward: NaN or huge values in z's padding rows between forward and backward change no bit of any gradient."""
    p = problem(random_routes(40, 2, 8, masked=0.4, seed=1), 8, 64, 32, device, dtype, biases=True)
    tensors = MoETensors(**{name: value for name, value in p.tensors.items() if name != "topk_ids"})
    engine = get_engine(engine_name(tensors.x.device, dtype, 64, 32))
    plan, options = engine.build_plan(p["topk_ids"], 8), PassOptions(save_for_backward=True)
    _, saved = engine.forward(plan, tensors, options)
    padding = (plan.row_to_slot < 0).nonzero().flatten()
    assert 128 < padding.numel() < saved.z.shape[0]
    results = []
    for fill in (0.0, float("nan"), float("inf"), 3e38):
        saved.z[padding] = fill
        grads = engine.backward(plan, tensors, options, saved, p.dy, Wants(True, True, True, True, True, True), None)
        results.append([grads.x, grads.topk_weights, grads.w_gate_up, grads.w_down, grads.b_gate_up, grads.b_down])
    for other in results[1:]:
        assert_same_bits({str(i): g for i, g in enumerate(other)}, {str(i): g for i, g in enumerate(results[0])})
    assert all(torch.isfinite(g).all() for g in results[0])


@pytest.mark.parametrize("garbage", [float("inf"), float("nan"), 1e38], ids=str)
def test_case_A3(device, dtype, garbage):
    """transformers#45621, pytorch#193633: a masked route must be skipped, not multiplied by 0.

    Everything that a -1 route could touch is garbage: its weight, and the experts that nobody else is routed to.
    """
    ids = torch.tensor([[0, -1], [1, -1], [-1, 0], [-1, -1]])
    p = problem(ids, 4, 64, 64, device, dtype, biases=True)
    clean = p.check()
    spoilt = {name: p[name].clone() for name in ("topk_weights", "w_gate_up", "w_down", "b_gate_up", "b_down")}
    spoilt["topk_weights"][p["topk_ids"] < 0] = garbage
    for name in ("w_gate_up", "w_down", "b_gate_up", "b_down"):
        spoilt[name][2:] = garbage
    got = p.changed(**spoilt).run()
    assert_same_bits(got, clean)
    assert_exactly_zero(got["topk_weights"][p["topk_ids"] < 0], "the gradient of a masked route's weight")
    assert_exactly_zero(got["y"][3], "y of a token without experts")
    assert_exactly_zero(got["x"][3], "dx of a token without experts")


def test_case_A3_weight_zero_of_a_valid_expert(device, dtype):
    """The other half of A3: a valid expert with weight 0 is multiplied, so its NaN reaches y, dw and dx exactly where the reference says."""
    ids = torch.tensor([[0, 3], [1, 2], [2, 3], [0, 1]])
    p = problem(ids, 4, 64, 64, device, dtype)
    weights, w13 = p["topk_weights"].clone(), p["w_gate_up"].clone()
    weights[:, 1] = 0
    w13[3] = float("inf")                                    # Inf - Inf in every unit of z, whatever the order of the sum
    p = p.changed(topk_weights=weights, w_gate_up=w13)
    got, truth = p.run(), p.truth()
    for name, value in got.items():
        assert torch.equal(torch.isfinite(value), torch.isfinite(truth[name])), name
    assert torch.isfinite(got["y"]).all(-1).tolist() == [False, True, False, True]


def test_case_A3_hidden_overflow_times_weight_zero(device, dtype):
    """A3's finite weights of 1e38: the hidden state overflows to Inf, and 0 * Inf is NaN as in the same dense computation; others stay clean."""
    ids = torch.tensor([[0, 3], [1, 2], [2, 3], [0, 1]])
    p = problem(ids, 4, 64, 64, device, dtype)
    weights, w13 = p["topk_weights"].clone(), p["w_gate_up"].clone()
    weights[:, 1] = 0
    w13[3] = w13[3].sign() * 1e38
    got = p.changed(topk_weights=weights, w_gate_up=w13).run()
    assert torch.isfinite(got["y"]).all(-1).tolist() == [False, True, False, True]
    clean = p.changed(topk_weights=weights).run()
    for name in ("y", "x", "topk_weights"):
        assert_same_bits({name: got[name][[1, 3]]}, {name: clean[name][[1, 3]]})


@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
def test_case_A4(device, dtype, biases):
    """transformers#48687, Automodel#1260, aiter#5310, unsloth-zoo#858: d_topk_weights wrong while y and dx look right.

    dw[t, k] = <dy[t], expert_k(x[t])>, the down bias included, checked against the reference and against each expert's own output.
    """
    p = problem(random_routes(16, 2, 8, seed=3), 8, 32, 16, device, dtype, biases=biases)
    p = p.changed(topk_weights=torch.tensor([[0.9, 0.1]], device=device).expand(16, 2).clone())
    got = p.check()
    wide = {name: value.double() if value.is_floating_point() else value for name, value in p.tensors.items()}
    outputs = [moe_reference(**wide | {"topk_ids": p["topk_ids"][:, k:k + 1], "topk_weights": torch.ones(16, 1, device=device).double()}) for k in range(2)]
    by_hand = torch.stack([(p.dy.double() * y).sum(-1) for y in outputs], dim=-1)
    scale = torch.stack([(p.dy.double() * y).norm(dim=-1) for y in outputs], dim=-1)          # of the terms of each sum
    assert ((got["topk_weights"].double() - by_hand).abs() / scale).max() < 4 * torch.finfo(dtype).eps * 32**0.5


@pytest.mark.parametrize("alone", ["topk_weights", "x", "w_gate_up", "w_down", "b_gate_up", "b_down"])
def test_case_A4_each_gradient_wanted_alone(device, dtype, alone):
    """The kind of A4: a gradient computed by a shortcut when it is the only one wanted has the bits that it has beside the others."""
    p = problem(random_routes(40, 2, 8, masked=0.1, seed=4), 8, on_tensor_cores(device, 72), on_tensor_cores(device, 40), device, dtype, biases=True)
    everything = p.run()
    arguments, leaves = p.leaves(grad=False)
    leaves[alone].requires_grad_()
    mok.moe(**arguments).backward(p.dy)
    assert_same_bits({alone: leaves[alone].grad}, {alone: everything[alone]})


def test_case_A4_expert_gradients_follow_the_routing_weight(device, dtype):
    """aiter#5310: for K > 1 every route's own weight scales its expert's gradient: doubled for one expert's routes, that gradient doubles exactly."""
    p = problem(random_routes(64, 2, 8, seed=5), 8, 32, 16, device, dtype, biases=True)
    doubled = p["topk_weights"] * (1 + (p["topk_ids"] == 3))
    before, after = p.run(), p.changed(topk_weights=doubled).run()
    for name in ("w_gate_up", "w_down", "b_gate_up", "b_down"):
        factor = torch.ones(8, *[1] * (before[name].dim() - 1), device=device, dtype=dtype)
        factor[3] = 2
        assert_same_bits({name: after[name]}, {name: before[name] * factor})       # a power of two commutes with every rounding
    assert_same_bits({"w": after["topk_weights"]}, {"w": before["topk_weights"]})  # dw does not contain w


def schedules(device: str) -> list[dict]:
    """Every schedule that could be picked: the engines' own choices must not show in the result."""
    if device == "cuda":
        settings = [{}, *({"minibatch_rows": rows, "mover_warps": warps} for rows in (128, 512, 4096) for warps in (1, 4)), {"reserve_sms": 16}]
        return [{"overlap": mok.Overlap(**s)} if s else {} for s in settings]
    return [{}, {"threads": 1}, {"threads": 2}, {"threads": 3}, {"overlap": mok.Overlap(minibatch_rows=128)}]


def run_scheduled(p: Problem, threads: int | None = None, **arguments) -> dict[str, torch.Tensor]:
    before = torch.get_num_threads()
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        return p.run(lambda **kw: mok.moe(**kw, **arguments))
    finally:
        torch.set_num_threads(before)


def test_case_A6(device, dtype):
    """sonic-moe#63: 16-column stripes of the fused epilogue wrong for one tile and cluster choice, hidden by an absolute tolerance.

    The error is relative and taken for every 16-column stripe; every schedule gives the same bits.
    """
    T = scaled(device, 512, 192)
    p = problem(random_routes(T, 2, 4, seed=6), 4, 512, scaled(device, 512, 272), device, dtype)
    got, want = p.run(), p.expected()
    p.compare(got)
    for name in ("y", "x", "w_gate_up", "w_down"):
        def stripes(t):
            return t.double().reshape(-1, t.shape[-1] // 16, 16).transpose(0, 1).flatten(1)

        error, scale = (stripes(got[name]) - stripes(want.truth[name])).norm(dim=1), stripes(want.scale[name]).norm(dim=1)
        ratio = error / (FACTORS[dtype] * scale)
        assert ratio.max() < 1, f"{name}: stripe {int(ratio.argmax())} is {ratio.max():.2f} times too far off"
    for schedule in schedules(device):
        assert_same_bits(run_scheduled(p, **schedule), got)


@pytest.mark.parametrize("counts", [[8, 72, 40], [1, 63, 65], [64, 64, 64], [40, 0, 1, 90, 17, 64, 3, 128, 33, 0, 71, 5]], ids=str)
def test_case_A8(device, dtype, counts):
    """marin#8339: the weight gradient was wrong unless group offsets were multiples of 64."""
    H, I = scaled(device, 512, 256), scaled(device, 768, 136)
    problem(routes_with_counts(counts), len(counts), H, I, device, dtype, biases=True).check()


def test_case_A8_gradient_does_not_depend_on_the_offset(device, dtype):
    """The kind of A8: an expert's rows, wherever the experts before them put their segment, give its gradients bit for bit."""
    E, H, I = 3, on_tensor_cores(device, 136), on_tensor_cores(device, 72)
    own = problem(torch.full((70, 1), 2), E, H, I, device, dtype, biases=True)
    alone = own.run()
    for before in ([8, 72], [1, 63], [0, 129], [300, 0], [128, 128]):
        ids = torch.cat([routes_with_counts(before), own["topk_ids"].cpu()])
        mixed = problem(ids, E, H, I, device, dtype, biases=True, seed=1)
        n = sum(before)
        mixed = mixed.changed(x=torch.cat([mixed["x"][:n], own["x"]]), topk_weights=torch.cat([mixed["topk_weights"][:n], own["topk_weights"]]),
                              dy=torch.cat([mixed.dy[:n], own.dy]), **{name: own[name] for name in ("w_gate_up", "w_down", "b_gate_up", "b_down")})
        got = mixed.run()
        for name in ("w_gate_up", "w_down", "b_gate_up", "b_down"):
            assert_same_bits({name: got[name][2]}, {name: alone[name][2]})


@pytest.mark.parametrize("counts", [[384, 256], [384, 0], [128, 256], [192, 0, 65]], ids=str)
def test_case_A9(device, dtype, counts):
    """DeepGEMM#415, #429: the weight gradient hung or was corrupt for an odd number of tiles in an expert (121 of 128x128 in the report)."""
    H, I = scaled(device, 1408, 352), scaled(device, 704, 176)
    problem(routes_with_counts(counts), len(counts), H, I, device, dtype).check()


@pytest.mark.parametrize("thiek", [
    (33, 128, 64, 5, 2),        # 2I == H: w_gate_up[e] is square
    (33, 128, 128, 5, 2),       # I == H: w_down[e] is square
    (4, 64, 64, 8, 2),          # T*K == E
    (32, 32, 16, 32, 2),        # T == H == 2I == E
    (32, 64, 32, 4, 4),         # K == E
    (2, 2, 1, 2, 2),            # all of them
], ids=str)
def test_case_A13(device, dtype, thiek):
    """unsloth-zoo#849, Megatron-LM#6111: a layout guessed from shapes when two dimensions are equal."""
    T, H, I, E, K = thiek
    ids = random_routes(T, K, E, seed=7)
    problem(ids, E, H, I, device, dtype, biases=True).check()
    if E > K:
        problem(ids % (E - 1), E, H, I, device, dtype, biases=True).check()        # the last expert empty, some twice in a token


def test_case_A13_the_other_layout_is_another_result(device):
    """The layout is the documented one: transposed weights of the same square shape give another result, not a silently corrected one."""
    p = problem(random_routes(33, 2, 5, seed=8), 5, 128, 64, device, torch.float32)
    square = p.run()["y"]
    transposed = p.changed(w_gate_up=p["w_gate_up"].transpose(1, 2)).run()["y"]
    assert (bits(square) != bits(transposed)).float().mean() > 0.99
