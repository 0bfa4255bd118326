"""Backward of several ranks inside the launch on one GPU: every gradient's bits against one rank's; ranks as streams of one process, and as processes."""
from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from expert_parallel_support import (
    Streams,
    assert_equal_to_one_rank,
    assert_gradients_equal_one_rank,
    one_rank,
    ranks_in_one_process,
    run_backward,
    run_ranks,
    same_bits,
    shares,
)
from gpu_support import gpu_case, poison
from oracle import want_all

from mok.engines.protocol import MainGrad, Wants
from tests.ranks import run_mortal_ranks

pytestmark = pytest.mark.gpu
H, I, E, K, MAX_TOKENS = 256, 128, 9, 3, 300
CUTS = {1: [0, 300], 2: [0, 37, 300], 4: [0, 37, 37, 250, 300],         # unequal tokens, none on a rank; 9 experts over 4 ranks: 3, 2, 2, 2
        8: [0, 10, 10, 60, 61, 130, 200, 299, 300]}
ROUTES = {"random with -1": None, "all to one expert": torch.zeros(300, K, dtype=torch.int64), "none at all": torch.full((300, K), -1)}


@pytest.fixture(autouse=True)
def _hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    from mok.engines.hopper.state import set_spin_limit

    set_spin_limit(5.0)


_RANKS: dict = {}


def ranks(W: int):
    """(groups, streams) of W ranks in this process, made once."""
    if W not in _RANKS:
        _RANKS[W] = ranks_in_one_process(W, num_experts=E, max_tokens=MAX_TOKENS, hidden_size=H, top_k=K, timeout_s=5.0), Streams(W)
    return _RANKS[W]


def check(case, cuts, groups, streams, wants: Wants | None = None, order: list[int] | None = None) -> None:
    """Forward and backward of the ranks and of one rank: y, z and all wanted gradients to the bit."""
    parts, wants = shares(case, cuts, case.num_experts), want_all(case) if wants is None else wants
    alone = one_rank(case)
    poison()
    results = run_ranks(groups, streams, parts, case.options, order=order)
    grads = run_backward(groups, streams, parts, results, case.options, wants, order=order)
    assert_equal_to_one_rank(case, results, alone)
    assert_gradients_equal_one_rank(case, parts, grads, alone, wants)


@pytest.mark.parametrize("W", [1, 2, 4, 8])
@pytest.mark.parametrize("routes", ROUTES)
def test_any_number_of_ranks_gives_the_bits_of_one(W, routes):
    for seed in range(2):
        check(gpu_case(300, H, I, E, K, seed=seed, topk_ids=ROUTES[routes]), CUTS[W], *ranks(W))


@pytest.mark.parametrize("W", [2, 4])
def test_biases_shared_experts_and_gates(W):
    check(gpu_case(300, H, I, E, K, biases=True, shared=((96, True), (48, False))), CUTS[W], *ranks(W))


NOTHING = ((False, False, False),) * 2
WANTS = [Wants(x=True), Wants(topk_weights=True), Wants(w_gate_up=True), Wants(w_down=True), Wants(b_gate_up=True), Wants(b_down=True),
         Wants(w_gate_up=True, w_down=True, b_down=True), Wants(x=True, topk_weights=True)]


@pytest.mark.parametrize("wants", [*[replace(want, shared=NOTHING) for want in WANTS], Wants(shared=((True, True, True), (False, True, False)))])
def test_wanted_gradients_alone(wants):
    """Some send nothing home, some pull nothing, b_down pulls dy without a GEMM; several in a row, so that rows are staged over those of the last pass."""
    for seed in range(3):
        check(gpu_case(300, H, I, E, K, seed=seed, biases=True, shared=((96, True), (48, False))), CUTS[2], *ranks(2), wants=wants)


@pytest.mark.parametrize("activation, limit", [("swiglu", 0.7), ("swiglu_oai", None), ("geglu", None), ("reglu", None)])
def test_activations(activation, limit):
    from mok.engines.protocol import PassOptions

    groups, streams = ranks(2)
    for group in groups:                                       # a binary that is loaded while another rank's launch waits would be waited for
        group.load_backward(PassOptions(activation, limit))
    check(gpu_case(300, H, I, E, K, activation=activation, swiglu_limit=limit), CUTS[2], groups, streams)


@pytest.mark.parametrize("W", [2, 4])
def test_z_made_again(W):
    """recompute="z": forward saves nothing, backward makes z from pulled rows of x; the bits of one rank that saved it, every wanted set of gradients."""
    from mok.engines.protocol import PassOptions, Saved

    groups, streams = ranks(W)
    for group in groups:
        group.load_backward(PassOptions(recompute="z"))
    for seed, wants in enumerate([None, Wants(x=True, shared=NOTHING), Wants(b_down=True, shared=NOTHING), Wants(w_down=True, shared=NOTHING)]):
        case = gpu_case(300, H, I, E, K, seed=seed, biases=True, shared=((96, True), (48, False)))
        parts, wants, alone = shares(case, CUTS[W], E), wants or want_all(case), one_rank(case)
        poison()
        options = replace(case.options, save_for_backward=False)
        results = [(plan, y, Saved(y.new_empty(0, 2 * I), y.new_empty(0, 288))) for plan, y, _ in run_ranks(groups, streams, parts, options)]
        grads = run_backward(groups, streams, parts, results, replace(case.options, recompute="z"), wants)
        assert_gradients_equal_one_rank(case, parts, grads, alone, wants)


def test_sizes_with_tails_and_many_tiles():
    groups = ranks_in_one_process(4, num_experts=6, max_tokens=6000, hidden_size=208, top_k=4, timeout_s=10)
    streams = Streams(4, 2000)
    for ids in (None, torch.zeros(10000, 4, dtype=torch.int64)):
        check(gpu_case(10000, 208, 272, 6, 4, topk_ids=ids), [0, 3000, 3000, 9000, 10000], groups, streams)


@pytest.mark.parametrize("W", [2, 4])
def test_main_grad(W):
    groups, streams = ranks(W)
    case = gpu_case(300, H, I, E, K)
    parts, wants, t = shares(case, CUTS[W], E), want_all(case), case.tensors
    start = MainGrad(torch.randn(t.w_gate_up.shape, device="cuda"), torch.randn(t.w_down.shape, device="cuda"))
    whole = MainGrad(start.w_gate_up.clone(), start.w_down.clone())
    plan, _, saved = one_rank(case)
    from mok.engines.hopper.engine import HopperEngine

    HopperEngine().backward(plan, t, case.options, saved, case.dy, wants, whole)
    begins = [0, *torch.tensor([part.tensors.w_down.shape[0] for part in parts]).cumsum(0).tolist()]
    own = [MainGrad(start.w_gate_up[a:b].clone(), start.w_down[a:b].clone()) for a, b in itertools.pairwise(begins)]
    results = run_ranks(groups, streams, parts, case.options)
    run_backward(groups, streams, parts, results, case.options, wants, own)
    assert same_bits(torch.cat([grad.w_gate_up for grad in own]), whole.w_gate_up) and same_bits(torch.cat([grad.w_down for grad in own]), whole.w_down)


def test_two_layers_forward_forward_backward_backward():
    """Each with weights, routes and numbers of tokens of its own: x is staged again, for its buffer holds the other layer's."""
    groups, streams = ranks(4)
    layers = []
    for seed, cuts in ((0, [0, 37, 37, 250, 300]), (1, [0, 90, 120, 120, 200])):
        case = gpu_case(cuts[-1], H, I, E, K, seed=seed, biases=True)
        parts = shares(case, cuts, E)
        layers.append((case, parts, run_ranks(groups, streams, parts, case.options, signature=f"layer {seed}")))
    for case, parts, results in reversed(layers):
        grads = run_backward(groups, streams, parts, results, case.options, want_all(case))
        alone = one_rank(case)
        assert_equal_to_one_rank(case, results, alone)
        assert_gradients_equal_one_rank(case, parts, grads, alone, want_all(case))


def test_random_steps_with_roles_and_ranks_delayed():
    """100 steps: tokens, routes, wanted gradients and the order in which ranks launch differ; roles sleep at random, one stream is kept busy first."""
    groups, streams = ranks(4)
    for group in groups:
        group.debug = True
        group._load_variants()
    generator = torch.Generator().manual_seed(0)
    busy = torch.randn(2048, 2048, device="cuda")
    used = []
    for step in range(100):
        tokens = [int(torch.randint(0, 200, (1,), generator=generator)) * int(torch.rand(1, generator=generator) > 0.2) for _ in range(4)]
        tokens[step % 4] += 1
        cuts = [0, *torch.tensor(tokens).cumsum(0).tolist()]
        with torch.cuda.stream(streams.of_rank[step % 4]):
            for _ in range(step % 7):
                busy = busy @ busy * 1e-3
        wants = WANTS[step % 16] if step % 16 < len(WANTS) else None
        if wants is not None and (wants.b_gate_up or wants.b_down):
            wants = replace(wants, b_gate_up=False, b_down=False, w_down=True)
        check(gpu_case(cuts[-1], H, I, E, K, seed=step), cuts, groups, streams, wants=wants, order=torch.randperm(4, generator=generator).tolist())
        used.append(torch.cuda.memory_allocated())
    for group in groups:
        group.debug = False
    assert max(used[50:]) <= max(used[3:50]), "memory grows"


def test_captured_graphs_replay():
    """Plan, forward and backward of each rank in a graph of its own, replayed on other tokens and routes; then a launch that is not captured."""
    W = 2
    groups, streams = ranks(W)
    cases = [gpu_case(300, H, I, E, K, seed=seed) for seed in range(4)]
    held = [shares(cases[0], CUTS[W], E)[r] for r in range(W)]
    held = [replace(part, ids=part.ids.clone(), dy=part.dy.clone(), tensors=replace(part.tensors, x=part.tensors.x.clone(),
                                                                                topk_weights=part.tensors.topk_weights.clone())) for part in held]
    wants, options = want_all(cases[0]), cases[0].options
    check(cases[0], CUTS[W], groups, streams)                       # everything is loaded
    graphs, outputs = [], []
    for r in range(W):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=streams.of_rank[r]):
            plan = groups[r].build_plan(held[r].ids, held[r].tensors.w_down.shape[0], "captured")
            y, saved = groups[r].forward(plan, held[r].tensors, options)
            grads = groups[r].backward(plan, held[r].tensors, options, saved, held[r].dy, wants, None)
        graphs.append(graph)
        outputs.append((plan, y, saved, grads))
    streams.fill()
    for case in (*cases, cases[1]):
        case = replace(case, tensors=replace(cases[0].tensors, x=case.tensors.x, topk_weights=case.tensors.topk_weights))
        parts = shares(case, CUTS[W], E)
        for part, static in zip(parts, held, strict=True):
            static.ids.copy_(part.ids)
            static.dy.copy_(part.dy)
            static.tensors.x.copy_(part.tensors.x)
            static.tensors.topk_weights.copy_(part.tensors.topk_weights)
        torch.cuda.synchronize()
        for r in range(W):
            with torch.cuda.stream(streams.of_rank[r]):
                graphs[r].replay()
        torch.cuda.synchronize()
        for group in groups:
            group.raise_if_dead()
        alone = one_rank(case)
        assert_equal_to_one_rank(case, [output[:3] for output in outputs], alone)
        assert_gradients_equal_one_rank(case, parts, [output[3] for output in outputs], alone, wants)
    check(cases[3], CUTS[W], groups, streams)


def _fresh(W: int = 2, timeout_s: float = 1.0):
    return ranks_in_one_process(W, num_experts=E, max_tokens=MAX_TOKENS, hidden_size=H, top_k=K, timeout_s=timeout_s), ranks(W)[1]


def test_a_rank_that_stops_before_backward_is_named():
    from mok.fabric.process_group import FabricError, FabricTimeout

    groups, streams = _fresh()
    case = gpu_case(300, H, I, E, K, biases=True, shared=((96, True),))
    parts = shares(case, CUTS[2], E)
    results = run_ranks(groups, streams, parts, case.options)
    started = time.monotonic()
    with torch.cuda.stream(streams.of_rank[0]):
        grads = groups[0].backward(results[0][0], parts[0].tensors, case.options, results[0][2], parts[0].dy, want_all(case), None)
    torch.cuda.synchronize()
    assert time.monotonic() - started < 6
    for grad in (grads.x, grads.topk_weights, grads.w_gate_up, grads.w_down, grads.b_gate_up, grads.b_down, *grads.shared[0]):
        assert torch.isnan(grad).all()
    with pytest.raises(FabricTimeout, match="rank 1 did not come; waited for the rows of dy and x of a rank") as caught:
        groups[0].raise_if_dead()
    assert caught.value.peers == (1,)
    with torch.cuda.stream(streams.of_rank[1]), pytest.raises(FabricError, match="rank 0 gave up"):
        late = groups[1].backward(results[1][0], parts[1].tensors, case.options, results[1][2], parts[1].dy, want_all(case), None)
        torch.cuda.synchronize()
        assert torch.isnan(late.x).all() and torch.isnan(late.w_gate_up).all()
        groups[1].raise_if_dead()


@pytest.mark.parametrize("differ", ["layer", "wanted gradients"])
def test_different_passes_end_both_ranks(differ):
    from mok.fabric.process_group import FabricError

    groups, streams = _fresh(timeout_s=3.0)
    case = gpu_case(300, H, I, E, K)
    parts = shares(case, CUTS[2], E)
    results = run_ranks(groups, streams, parts, case.options)
    grads = []
    for r in range(2):
        options = replace(case.options, agreed=f"layer {r}") if differ == "layer" else case.options
        wants = Wants(x=True, w_down=r > 0 or differ == "layer")
        with torch.cuda.stream(streams.of_rank[r]):
            grads.append(groups[r].backward(results[r][0], parts[r].tensors, options, results[r][2], parts[r].dy, wants, None))
    torch.cuda.synchronize()
    said = []
    for group, grad in zip(groups, grads, strict=True):
        assert torch.isnan(grad.x).all()
        with pytest.raises(FabricError) as caught:
            group.raise_if_dead()
        said.append(str(caught.value))
    assert any("another pass" in text for text in said), said


def _training_rank(W: int, cuts: list[int], steps: int) -> str:
    """One rank in a process of its own: y and gradients of mok.moe over an ExpertGroup with sizes, against one rank's."""
    import mok

    torch.cuda.set_device(0)
    r = dist.get_rank()
    group = mok.ExpertGroup(num_experts=E, max_tokens=MAX_TOKENS, hidden_size=H, top_k=K, timeout_s=30)
    assert group.fused is not None
    for step in range(steps):
        case = gpu_case(300, H, I, E, K, seed=step)
        part = shares(case, cuts, E)[r]

        def run(ids, tensors, dy, **settings):
            leaves = [t.detach().clone().requires_grad_() for t in (tensors.x, tensors.topk_weights, tensors.w_gate_up, tensors.w_down)]
            y = mok.moe(leaves[0], ids, *leaves[1:], **settings)
            y.backward(dy)
            torch.cuda.synchronize()
            mok.check()
            return [y.detach(), *(leaf.grad for leaf in leaves)]

        ours = run(part.ids, part.tensors, part.dy, group=group, recompute="z" if step % 2 else None)
        dist.barrier()                                        # the comparison takes the whole device
        whole = run(case.topk_ids, case.tensors, case.dy)
        first = sum(shares(case, cuts, E)[before].tensors.w_down.shape[0] for before in range(r))
        experts = slice(first, first + part.tensors.w_down.shape[0])
        wanted = [*(value[cuts[r]:cuts[r + 1]] for value in whole[:3]), *(value[experts] for value in whole[3:])]
        for name, found, want in zip(("y", "x", "topk_weights", "w_gate_up", "w_down"), ours, wanted, strict=True):
            if found.dtype != want.dtype or not same_bits(found, want):
                return f"step {step}: {name} differs"
        dist.barrier()
    return "equal"


@pytest.mark.parametrize("W", [2, 4])
def test_processes_that_share_the_gpu(W):
    from mok.fabric.mps import PrivateMps

    with PrivateMps() as mps, mps.inherited():
        outcomes = run_mortal_ranks(_training_rank, W, W, CUTS[W], 4, timeout=180)
    assert [result for _, result, _ in outcomes] == ["equal"] * W, outcomes
