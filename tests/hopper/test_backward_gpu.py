"""The Hopper backward kernel on a GPU: every gradient against the float64 reference, what is wanted, and the bitwise promises."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from backward_cases import (
    ACTIVATIONS,
    PLAIN_SHAPES,
    SHARED,
    accumulates,
    backward,
    check,
    forwards_saved,
    ids_like,
    nothing_saved,
    plain_case,
    recomputing,
    same_everywhere,
    same_recomputed,
    saved_of,
    sixteen_wants,
)
from gpu_support import gpu_case
from oracle import check_case, differing, named, same_bits, want_all

from mok.engines.protocol import MainGrad, Wants

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    from mok.engines.hopper.state import set_spin_limit

    set_spin_limit(5.0)
    yield
    torch.cuda.synchronize()
    from mok.runtime import runtime

    runtime.raise_pending_errors()


@pytest.mark.parametrize("name", PLAIN_SHAPES)
def test_gradients(name):
    check(plain_case(name))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    activation, limit = ACTIVATIONS[name]
    check(gpu_case(200, 272, 176, 5, 3, biases=True, activation=activation, swiglu_limit=limit, shared=((96, True),)))


@pytest.mark.parametrize("name", SHARED)
def test_shared_experts(name):
    check(gpu_case(200, 272, 176, 5, 2, shared=SHARED[name]))


def test_one_expert_takes_all():
    check(gpu_case(300, 256, 96, 6, 2, topk_ids=ids_like(300, 2, 3)))


def test_no_route_at_all():
    check(gpu_case(20, 256, 96, 6, 2, topk_ids=ids_like(20, 2, -1)))


def test_biases():
    check(gpu_case(200, 272, 176, 5, 3, biases=True))


def test_case_C2_no_tokens():
    case = gpu_case(0, 64, 32, 4, 2, biases=True, shared=((32, True),))
    for name, grad in named(backward(case)).items():
        assert grad is not None and not grad.any(), name


def test_case_E5_sixteen_combinations_of_wanted_gradients():
    sixteen_wants(gpu_case(300, 256, 176, 6, 2, biases=True))


def test_unwanted_gradients_cost_no_memory():
    """dw_down alone needs rows of dy and w*h, not x, dz or dx."""
    from mok.engines.hopper.backward_launch import backward_scratch

    case, (plan, _) = plain_case("several tiles, an empty expert, -1 routes"), saved_of(plain_case("several tiles, an empty expert, -1 routes"))
    T, H = case.tensors.x.shape
    I = case.tensors.w_down.shape[2]
    sizes = backward_scratch(T, H, I, plan.num_rows, [], Wants(w_down=True))
    assert sizes.dy_rows == plan.num_rows * H and sizes.wh == plan.num_rows * I and sizes.x_rows == sizes.dz == sizes.results == 0


def test_case_E7_main_grad_accumulates():
    accumulates(gpu_case(300, 272, 176, 6, 2))


def test_case_A1_empty_experts_beside_nan():
    """Weights of an expert that no route names may hold NaN; its weight gradients are exactly zero and nothing else sees them."""
    case = gpu_case(300, 256, 128, 8, 2)                                       # expert 7 gets no token
    case.tensors.w_gate_up[7] = float("nan")
    case.tensors.w_down[7] = float("nan")
    grads = named(backward(case))
    assert not grads["w_gate_up"][7].any() and not grads["w_down"][7].any()
    case.tensors.w_gate_up[7] = 0.0
    case.tensors.w_down[7] = 0.0
    check_case(case, grads)


def test_case_D3_expanded_and_strided_dy():
    case = plain_case("tails everywhere")
    row = torch.randn(1, case.dy.shape[1], device="cuda", dtype=torch.bfloat16)
    wide = torch.empty(case.dy.shape[0], 2 * case.dy.shape[1], device="cuda", dtype=torch.bfloat16)[:, :case.dy.shape[1]]
    wide.copy_(case.dy)
    for dy in (row.expand_as(case.dy), torch.ones((), device="cuda", dtype=torch.bfloat16).expand_as(case.dy), wide):
        strided, dense = (named(backward(replace(case, dy=d))) for d in (dy, dy.contiguous()))
        assert all(same_bits(strided[name], dense[name]) for name in dense)


def test_steps_that_shrink_and_grow():
    for T in (400, 37, 513, 1, 200):
        check(gpu_case(T, 272, 176, 5, 3, seed=T))


def test_h_is_forwards_h():
    """dw_down = dy.T @ (w*h): with the weights 1, one token and dy a unit vector its row is h itself, which must have forward's bits."""
    from mok.engines.hopper.engine import HopperEngine

    case = gpu_case(1, 64, 4096, 1, 1)
    case.tensors.topk_weights.fill_(1.0)
    case.dy.zero_()
    case.dy[0, 5] = 1.0
    plan, saved = saved_of(case)
    h = backward(case, Wants(w_down=True), plan_and_saved=(plan, saved)).w_down[0, 5]
    identity = replace(case.tensors, w_down=torch.eye(64, 4096, device="cuda", dtype=torch.bfloat16)[None])
    for first in range(0, 4096, 64):                                           # forward shows 64 of its h at a time
        identity.w_down.zero_()
        identity.w_down[0, :, first:first + 64] = torch.eye(64, device="cuda", dtype=torch.bfloat16)
        y, _ = HopperEngine().forward(plan, identity, case.options)
        assert torch.equal(y[0], h[first:first + 64]), f"h[{first}:{first + 64}]"


def test_P1_and_P2_settings_change_no_bit():
    from mok.engines.hopper.backward import BackwardConfig

    settings = [{}, {"group_tiles": 1}, {"group_tiles": 7}, {"reserve_sms": 100}, {"reserve_sms": 131}, {"config": BackwardConfig(0, debug=1)},
                {"group_tiles": 3}, {}]
    same_everywhere(gpu_case(2000, 528, 592, 12, 4, shared=((336, True),)), settings)


def test_gates_are_waited_for_where_no_product_is():
    """Of a gated shared expert only dw_down is wanted: its DH tasks have no k-steps, and must still not read gates that a sleeping mover has yet to write."""
    from mok.engines.hopper.backward import BackwardConfig

    case = gpu_case(1000, 272, 176, 4, 2, shared=((336, True),))
    expected = backward(case).shared[0][1]
    for _ in range(5):
        alone = backward(case, Wants(shared=((False, True, False),)), config=BackwardConfig(0, debug=1)).shared[0][1]
        assert same_bits(alone, expected)


def test_P4_a_tokens_gradients_do_not_depend_on_the_batch():
    case = gpu_case(600, 272, 336, 6, 3, biases=True, shared=((96, True),))
    kept = torch.randperm(600, generator=torch.Generator().manual_seed(1))[:211].cuda()
    wants = replace(want_all(case), w_gate_up=False, w_down=False, b_gate_up=False, b_down=False)
    full, part = backward(case, wants), backward(case.keep(kept), wants)
    assert same_bits(full.x[kept], part.x) and same_bits(full.topk_weights[kept], part.topk_weights)


def test_graph_replay_with_new_routes():
    case, other = gpu_case(300, 272, 176, 6, 2, seed=1), gpu_case(300, 272, 176, 6, 2, seed=2)
    from mok.engines.hopper.backward_launch import hopper_backward

    plan, saved = saved_of(case)
    other_plan, other_saved = saved_of(other)
    expected = named(backward(other, plan_and_saved=(other_plan, other_saved)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = hopper_backward(plan, case.tensors, case.options, saved, case.dy, want_all(case), None)
    pairs = [*zip(plan.tensors(), other_plan.tensors()), (saved.z, other_saved.z), (case.dy, other.dy), (case.tensors.x, other.tensors.x),
             (case.tensors.topk_weights, other.tensors.topk_weights), (case.tensors.w_gate_up, other.tensors.w_gate_up),
             (case.tensors.w_down, other.tensors.w_down)]
    for mine, theirs in pairs:
        mine.copy_(theirs)
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert all(same_bits(value, expected[name]) for name, value in named(grads).items())


# ---- recompute="z": the bits of the pass that reads forward's z ----

@pytest.mark.parametrize("name", PLAIN_SHAPES)
def test_recomputed_z_has_forwards_bits(name):
    same_recomputed(plain_case(name))


@pytest.mark.parametrize("name", ["swiglu", *ACTIVATIONS])
def test_recomputed_z_with_biases_a_shared_expert_and_every_activation(name):
    activation, limit = ACTIVATIONS.get(name, ("swiglu", None))
    same_recomputed(gpu_case(200, 272, 176, 5, 3, biases=True, activation=activation, swiglu_limit=limit, shared=((96, True),)))


@pytest.mark.parametrize("name", SHARED)
def test_recomputed_z_of_shared_experts(name):
    same_recomputed(gpu_case(300, 272, 176, 5, 2, shared=SHARED[name]))


@pytest.mark.parametrize(("T", "H", "I", "E"), [(4096, 64, 512, 8), (3000, 256, 512, 4), (4096, 16, 16, 8)],
                         ids=["one k-step", "as many as stages", "smallest"])
def test_recomputed_z_in_many_short_tasks(T, H, I, E):
    """Several Z and DH tasks for each CTA, with no more k-steps than stages: the other shapes here have few tasks or long ones."""
    same_recomputed(gpu_case(T, H, I, E, 2))


@pytest.mark.parametrize("routes", [3, -1], ids=["one expert takes all", "no route at all"])
def test_recomputed_z_one_sided(routes):
    same_recomputed(gpu_case(300, 256, 96, 6, 2, topk_ids=ids_like(300, 2, routes), shared=((80, False),)))


@pytest.mark.parametrize("wanted", ["x", "topk_weights", "w_gate_up", "w_down", "b_gate_up", "b_down", "nothing routed"])
def test_recomputed_z_for_one_wanted_gradient(wanted):
    """With all shared gradients, then with none: rows of x are brought and z is made whatever is wanted, dw_gate_up or not."""
    case = gpu_case(300, 272, 176, 6, 2, biases=True, shared=((80, False), (336, True)))
    routed = {} if wanted == "nothing routed" else {wanted: True}
    same_recomputed(case, Wants(**routed, shared=((False, True, False), (False, False, True))))
    if routed:
        same_recomputed(case, Wants(**routed, shared=((False, False, False),) * 2))


def test_recomputed_z_settings_change_no_bit():
    from mok.engines.hopper.backward import BackwardConfig

    settings = [{}, {"group_tiles": 1}, {"group_tiles": 7}, {"reserve_sms": 100}, {"reserve_sms": 131}, {"config": BackwardConfig(0, recompute=True, debug=1)},
                {"group_tiles": 3}, {}]
    same_recomputed(gpu_case(2000, 528, 592, 12, 4, biases=True, shared=((336, True),)), settings=settings)


def test_recomputed_z_comes_from_x_and_w_gate_up():
    """The comparison above can fail: another x, or another weight, gives other gradients though what is wanted reads them through z alone."""
    case = gpu_case(300, 272, 176, 6, 2, biases=True)
    both, wants = forwards_saved(case), Wants(w_down=True)
    expected = backward(case, wants, plan_and_saved=both).w_down
    for name in ("x", "w_gate_up", "b_gate_up"):
        other = recomputing(replace(case, tensors=replace(case.tensors, **{name: getattr(case.tensors, name) * 1.25})))
        assert not torch.equal(backward(other, wants, plan_and_saved=nothing_saved(*both)).w_down, expected), name


def test_recomputed_z_into_main_grad():
    case = gpu_case(300, 272, 176, 6, 2)
    both, t = forwards_saved(case), case.tensors
    start = [torch.randn(w.shape, device="cuda") for w in (t.w_gate_up, t.w_down)]
    saving, again = (MainGrad(*(s.clone() for s in start)) for _ in range(2))
    backward(case, main_grad=saving, plan_and_saved=both)
    backward(recomputing(case), main_grad=again, plan_and_saved=nothing_saved(*both))
    assert torch.equal(saving.w_gate_up, again.w_gate_up) and torch.equal(saving.w_down, again.w_down) and not torch.equal(saving.w_down, start[1])


def test_recomputed_z_in_a_graph_with_new_routes():
    from mok.engines.hopper.backward_launch import hopper_backward

    case, other = (recomputing(gpu_case(300, 272, 176, 6, 2, biases=True, seed=seed)) for seed in (1, 2))
    both, other_both = forwards_saved(case), forwards_saved(other)
    expected = named(backward(other, plan_and_saved=nothing_saved(*other_both)))
    assert not differing(expected, named(backward(replace(other, options=case.options), plan_and_saved=nothing_saved(*other_both))))
    plan, saved = nothing_saved(*both)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = hopper_backward(plan, case.tensors, case.options, saved, case.dy, want_all(case), None)
    mine, theirs = named(case.tensors), named(other.tensors)
    for a, b in [*zip(plan.tensors(), other_both[0].tensors()), (case.dy, other.dy), *((mine[name], theirs[name]) for name in mine if mine[name] is not None)]:
        a.copy_(b)
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert not differing(expected, named(grads))


def test_recompute_in_the_layer():
    """mok.moe: y and all gradients have the same bits, and what is kept between the passes is the plan alone."""
    import mok
    from mok.plan import RoutingPlan

    case = gpu_case(2000, 256, 512, 8, 2, biases=True, shared=((336, True),))
    t, results, kept = case.tensors, [], []
    for recompute in (None, "z", None, "z"):
        leaves = [v.clone().requires_grad_() for v in (t.x, t.topk_weights, t.w_gate_up, t.w_down, t.b_gate_up, t.b_down)]
        shared = [mok.SharedExpert(*(v.clone().requires_grad_() for v in (s.w_gate_up, s.w_down, s.gate_weight))) for s in t.shared]
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        y = mok.moe(leaves[0], case.topk_ids, *leaves[1:], shared=shared, recompute=recompute)
        kept.append(torch.cuda.memory_stats()["requested_bytes.all.current"] - before - y.numel() * y.element_size())
        y.backward(case.dy)
        results.append([y.detach(), *(leaf.grad for leaf in leaves), *(v.grad for s in shared for v in (s.w_gate_up, s.w_down, s.gate_weight))])
    assert all(same_bits(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
    rows = RoutingPlan.build(case.topk_ids.cpu(), 8).num_rows
    assert kept[2] - kept[3] == 2 * (rows * 2 * 512 + 2000 * 2 * 336), kept
