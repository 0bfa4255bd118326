"""Waves inside the launches on one GPU: bounded buffers give the bits of one rank whose buffers hold everything, whatever the factor; ranks in one process."""
from __future__ import annotations

import itertools
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
    with_options,
)
from gpu_support import gpu_case, poison
from oracle import want_all

from mok.engines.protocol import MainGrad, Wants
from mok.waves import WaveCounts, waves_needed
from tests.ranks import run_mortal_ranks

pytestmark = pytest.mark.gpu
H, I, E, K, T, MAX_TOKENS = 256, 208, 9, 3, 1200, 1200      # I: a tail
CUTS = {1: [0, T], 2: [0, 450, T], 4: [0, 250, 250, 900, T]}            # unequal tokens, none on a rank; 9 experts over 4 ranks: 3, 2, 2, 2
ROUTES = {"random with -1": None, "all to one expert": torch.zeros(T, K, dtype=torch.int64), "none at all": torch.full((T, K), -1)}
SETTINGS = {"biases": True, "shared": ((96, True), (48, False))}


@pytest.fixture(autouse=True)
def _hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    from mok.engines.hopper.state import set_spin_limit

    set_spin_limit(5.0)


_RANKS: dict = {}


def ranks(W: int, factor: float):
    """(groups, streams) of W ranks in this process, made once."""
    if (W, factor) not in _RANKS:
        groups = ranks_in_one_process(W, num_experts=E, max_tokens=MAX_TOKENS, hidden_size=H, top_k=K, timeout_s=5.0, capacity_factor=factor)
        if W not in _RANKS:
            _RANKS[W] = Streams(W)
        _RANKS[W, factor] = groups, _RANKS[W]
    return _RANKS[W, factor]


def waves_of(results) -> list[int]:
    """Waves that each rank made, from the plan's own table."""
    table = results[0][0].wave_tiles.tolist()
    assert all(plan.wave_tiles.tolist() == table for plan, _, _ in results), "ranks see different tables"
    assert [used for used, _ in table] == [int(plan.num_tiles) for plan, _, _ in results]
    return [waves_needed(used, tiles) for used, tiles in table]


def check(case, cuts, groups, streams, wants: Wants | None = None, backwards: int = 1) -> list[int]:
    """Forward and backward of the ranks and of one rank: y, z and all wanted gradients to the bit. Returns each rank's waves."""
    parts, wants = shares(case, cuts, case.num_experts), want_all(case) if wants is None else wants
    alone = one_rank(case)
    poison()
    results = run_ranks(groups, streams, parts, case.options)
    for _ in range(backwards):
        grads = run_backward(groups, streams, parts, results, case.options, wants)
        assert_equal_to_one_rank(case, results, alone)
        assert_gradients_equal_one_rank(case, parts, grads, alone, wants)
    return waves_of(results)


# The capacity counts 127 rows of padding for each expert, so 0.05 of the balanced load is still 5 to 13 tiles.
MOST_WAVES = {(1, "random with -1"): 3, (2, "random with -1"): 2, (4, "random with -1"): 2, (1, "all to one expert"): 3, (2, "all to one expert"): 4,
              (4, "all to one expert"): 4}


@pytest.mark.parametrize("routes", ROUTES)
@pytest.mark.parametrize("W", [1, 2, 4])
def test_any_factor_gives_the_bits_of_one_rank(W, routes):
    """0.05: several waves on some ranks or all; 1.0: one on most; none at all: one wave of no rows."""
    for seed, factor in enumerate((0.05, 0.3, 1.0)):
        waves = check(gpu_case(T, H, I, E, K, seed=seed, topk_ids=ROUTES[routes], **SETTINGS), CUTS[W], *ranks(W, factor))
        if factor == 0.05:
            assert max(waves) >= MOST_WAVES.get((W, routes), 1), waves
        if routes == "all to one expert" and W > 1:
            assert min(waves) == 1 < max(waves) or factor == 1.0, waves


@pytest.mark.parametrize("W", [1, 2, 4])
def test_forward_that_saves_nothing(W):
    case = with_options(gpu_case(T, H, I, E, K, **SETTINGS), save_for_backward=False)
    groups, streams = ranks(W, 0.05)
    parts, alone = shares(case, CUTS[W], E), one_rank(case)
    poison()
    results = run_ranks(groups, streams, parts, case.options)
    assert_equal_to_one_rank(case, results, alone)
    assert max(waves_of(results)) > 1 and all(saved.z.shape[0] == 0 for _, _, saved in results)


NOTHING = ((False, False, False),) * 2
WANTS = [Wants(x=True), Wants(topk_weights=True), Wants(w_gate_up=True), Wants(w_down=True), Wants(b_gate_up=True), Wants(b_down=True)]


@pytest.mark.parametrize("wants", [*[replace(want, shared=NOTHING) for want in WANTS], Wants(shared=((True, True, True), (False, True, False)))])
def test_wanted_gradients_alone(wants):
    """b_down alone has no GEMM to wait for, dx alone needs rows of x for the z that is made again; twice, so that rows are staged over the last pass's."""
    for seed in range(2):
        assert max(check(gpu_case(T, H, I, E, K, seed=seed, **SETTINGS), CUTS[2], *ranks(2, 0.05), wants=wants)) > 1


def test_a_second_backward_of_one_forward():
    """The first one makes z again in scratch of its own, so what forward saved is as it was."""
    check(gpu_case(T, H, I, E, K, **SETTINGS), CUTS[2], *ranks(2, 0.05), backwards=2)


def test_two_layers_in_flight():
    groups, streams = ranks(2, 0.05)
    cases = [gpu_case(T, H, I, E, K, seed=seed, **SETTINGS) for seed in range(2)]
    parts, alone = [shares(case, CUTS[2], E) for case in cases], [one_rank(case) for case in cases]
    results = [run_ranks(groups, streams, parts[n], cases[n].options) for n in range(2)]
    for n in (1, 0):
        grads = run_backward(groups, streams, parts[n], results[n], cases[n].options, want_all(cases[n]))
        assert_gradients_equal_one_rank(cases[n], parts[n], grads, alone[n], want_all(cases[n]))


@pytest.mark.parametrize("routes", ["random with -1", "all to one expert"])
@pytest.mark.parametrize("W", [1, 2])
def test_main_grad(W, routes):
    """An expert's whole sum is added once, when its last rows are done."""
    from mok.engines.hopper.engine import HopperEngine

    groups, streams = ranks(W, 0.05)
    case = gpu_case(T, H, I, E, K, topk_ids=ROUTES[routes])
    parts, wants, t = shares(case, CUTS[W], E), want_all(case), case.tensors
    start = MainGrad(torch.randn(t.w_gate_up.shape, device="cuda"), torch.randn(t.w_down.shape, device="cuda"))
    whole = MainGrad(start.w_gate_up.clone(), start.w_down.clone())
    plan, _, saved = one_rank(case)
    HopperEngine().backward(plan, t, case.options, saved, case.dy, wants, whole)
    begins = [0, *torch.tensor([part.tensors.w_down.shape[0] for part in parts]).cumsum(0).tolist()]
    own = [MainGrad(start.w_gate_up[a:b].clone(), start.w_down[a:b].clone()) for a, b in itertools.pairwise(begins)]
    results = run_ranks(groups, streams, parts, case.options)
    run_backward(groups, streams, parts, results, case.options, wants, own)
    assert max(waves_of(results)) > 1
    assert same_bits(torch.cat([grad.w_gate_up for grad in own]), whole.w_gate_up) and same_bits(torch.cat([grad.w_down for grad in own]), whole.w_down)


def test_wave_counts():
    groups = ranks_in_one_process(2, num_experts=E, max_tokens=MAX_TOKENS, hidden_size=H, top_k=K, timeout_s=5.0, capacity_factor=0.05)
    counts = [WaveCounts() for _ in groups]
    for routes in ROUTES.values():
        waves = check(gpu_case(T, H, I, E, K, topk_ids=routes), CUTS[2], groups, ranks(2, 0.05)[1])
        for _ in range(2):                                                   # forward and backward
            for rank, count in enumerate(counts):
                count.add(max(waves), waves[rank])
    assert [group.wave_counts() for group in groups] == counts and counts[0].several > counts[1].exceeded


def test_buffers_are_smaller_than_the_worst_case():
    """Peak memory of a training step, all tokens on one rank, in several waves: less than half of backward's scratch in the worst case alone."""
    from mok.engines.hopper.backward_launch import backward_scratch

    case = gpu_case(T, H, I, E, K, topk_ids=ROUTES["all to one expert"])
    parts, wants = shares(case, CUTS[4], E), want_all(case)
    groups, streams = ranks(4, 0.05)
    run_backward(groups, streams, parts, run_ranks(groups, streams, parts, case.options), case.options, wants)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = run_ranks(groups, streams, parts, case.options)
    run_backward(groups, streams, parts, results, case.options, wants)
    used = torch.cuda.max_memory_allocated() - before
    worst = sum(backward_scratch(part.ids.shape[0], H, I, plan.num_rows, [], wants).bytes for part, (plan, _, _) in zip(parts, results, strict=True))
    assert max(waves_of(results)) > 1 and used < worst / 2, (used, worst)


def test_a_rank_that_does_not_come_ends_every_wave():
    """Rank 0 has all the rows, in several waves; its launch still ends, with NaN, and names the other one."""
    from mok.fabric.process_group import FabricTimeout

    groups = ranks_in_one_process(2, num_experts=E, max_tokens=MAX_TOKENS, hidden_size=H, top_k=K, timeout_s=0.5, capacity_factor=0.05)
    streams, case = ranks(2, 0.05)[1], gpu_case(T, H, I, E, K, topk_ids=ROUTES["all to one expert"])
    parts = shares(case, CUTS[2], E)
    results = run_ranks(groups, streams, parts, case.options)
    assert waves_of(results)[0] > 1
    with torch.cuda.stream(streams.of_rank[0]):
        plan, _, saved = results[0]
        grads = groups[0].backward(plan, parts[0].tensors, case.options, saved, parts[0].dy, want_all(case), None)
    torch.cuda.synchronize()
    assert torch.isnan(grads.x).all() and torch.isnan(grads.w_down).all()
    with pytest.raises(FabricTimeout, match="rank 1 did not come"):
        groups[0].raise_if_dead()


@pytest.mark.slow
def test_random_steps_with_roles_and_ranks_delayed():
    """30 steps: tokens, routes and the order in which ranks launch differ; roles sleep at random. Compiles three more binaries."""
    groups = ranks_in_one_process(4, num_experts=E, max_tokens=MAX_TOKENS, hidden_size=H, top_k=K, timeout_s=20.0, capacity_factor=0.05)
    streams = ranks(4, 0.05)[1]
    for group in groups:
        group.debug = True
        group._load_variants()
    generator, several = torch.Generator().manual_seed(0), 0
    for step in range(30):
        tokens = [int(torch.randint(0, 500, (1,), generator=generator)) * int(torch.rand(1, generator=generator) > 0.2) for _ in range(4)]
        tokens[step % 4] += 1
        cuts = [0, *torch.tensor(tokens).cumsum(0).tolist()]
        ids = torch.zeros(cuts[-1], K, dtype=torch.int64) if step % 3 == 0 else None
        several += max(check(gpu_case(cuts[-1], H, I, E, K, seed=step, topk_ids=ids, **SETTINGS), cuts, groups, streams)) > 1
    assert several >= 5


def _rank(W: int, cuts: list[int]) -> str:
    """One rank in a process of its own: mok.moe and its gradients over an ExpertGroup with a capacity_factor, against one rank's."""
    import mok

    torch.cuda.set_device(0)
    r = dist.get_rank()
    group = mok.ExpertGroup(num_experts=E, max_tokens=MAX_TOKENS, hidden_size=H, top_k=K, timeout_s=5, capacity_factor=0.05)
    if group.fused is None:
        return "not inside the launches"
    case = gpu_case(T, H, I, E, K, topk_ids=ROUTES["all to one expert"])
    part, t = shares(case, cuts, E)[r], case.tensors
    own = [value.clone().requires_grad_() for value in (part.tensors.x, part.tensors.topk_weights, part.tensors.w_gate_up, part.tensors.w_down)]
    y = mok.moe(own[0], part.ids, own[1], own[2], own[3], group=group)
    y.backward(part.dy)
    torch.cuda.synchronize()
    mok.check()
    dist.barrier()                                            # the comparison takes the whole device
    all_of = [value.clone().requires_grad_() for value in (t.x, t.topk_weights, t.w_gate_up, t.w_down)]
    whole = mok.moe(all_of[0], case.topk_ids, all_of[1], all_of[2], all_of[3])
    whole.backward(case.dy)
    first, count = group.local_experts(E)
    places = [slice(cuts[r], cuts[r + 1])] * 2 + [slice(first, first + count)] * 2
    same = [torch.equal(y, whole[places[0]]), *[torch.equal(a.grad, b.grad[place]) for a, b, place in zip(own, all_of, places, strict=True)]]
    dist.barrier()
    counts = group.wave_counts
    return "equal" if all(same) and counts.passes == 2 and counts.most > 1 and (counts.exceeded == 2) == (r == 0) else f"{same} {counts}"


def test_processes_that_share_the_gpu():
    from mok.fabric.mps import PrivateMps

    with PrivateMps() as mps, mps.inherited():
        outcomes = run_mortal_ranks(_rank, 2, 2, CUTS[2], timeout=150)
    assert [result for _, result, _ in outcomes] == ["equal"] * 2, outcomes
