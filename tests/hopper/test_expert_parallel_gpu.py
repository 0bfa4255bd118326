"""Expert parallelism inside the forward launch on one GPU: P3 to the bit against one rank, ranks in one process and in processes of their own (MPS)."""
from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from expert_parallel_support import BF16, Streams, assert_equal_to_one_rank, group_plans, one_rank, ranks_in_one_process, run_ranks, shares, with_options
from gpu_support import gpu_case

from tests.ranks import run_mortal_ranks

pytestmark = pytest.mark.gpu
H, I, E, K, MAX_TOKENS = 256, 128, 9, 3, 300
CUTS = {1: [0, 300], 2: [0, 37, 300], 4: [0, 37, 37, 250, 300],         # unequal tokens, none on a rank; 9 experts over 4 ranks: 3, 2, 2, 2
        8: [0, 10, 10, 60, 61, 130, 200, 299, 300]}


@pytest.fixture(autouse=True)
def _hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    from mok.engines.hopper.state import set_spin_limit

    set_spin_limit(2.0)


_RANKS: dict = {}


def ranks(W: int):
    """(groups, streams) of W ranks in this process, made once."""
    if W not in _RANKS:
        _RANKS[W] = ranks_in_one_process(W, num_experts=E, max_tokens=MAX_TOKENS, hidden_size=H, top_k=K), Streams(W)
    return _RANKS[W]


def check(case, cuts, groups, streams, **settings) -> None:
    parts = shares(case, cuts, case.num_experts)
    alone = one_rank(case)
    results = run_ranks(groups, streams, parts, case.options, **settings)
    for group in groups:
        group.raise_if_dead()
    for (plan, _, _), want in zip(results, group_plans(parts, case.num_experts, groups[0].max_tokens), strict=True):
        for name, ours, theirs in zip(vars(want), plan.tensors(), want.tensors(), strict=False):
            assert torch.equal(ours.cpu(), theirs), f"the plan's {name} is not the process-group path's"
    assert_equal_to_one_rank(case, results, alone)


ROUTES = {"random with -1": None, "all to one expert": torch.zeros(300, K, dtype=torch.int64), "none at all": torch.full((300, K), -1)}


@pytest.mark.parametrize("W", [1, 2, 4, 8])
@pytest.mark.parametrize("routes", ROUTES)
def test_any_number_of_ranks_gives_the_bits_of_one(W, routes):
    for seed, save in ((0, True), (1, False), (2, True)):
        case = with_options(gpu_case(300, H, I, E, K, seed=seed, topk_ids=ROUTES[routes]), save_for_backward=save)
        check(case, CUTS[W], *ranks(W))


@pytest.mark.parametrize("W", [2, 4])
def test_biases_shared_experts_and_gates(W):
    check(gpu_case(300, H, I, E, K, biases=True, shared=((96, True), (48, False))), CUTS[W], *ranks(W))


def test_more_tiles_than_the_rings_hold():
    groups = ranks_in_one_process(4, num_experts=6, max_tokens=6000, hidden_size=192, top_k=4)
    streams = Streams(4, 1200)
    for ids in (None, torch.zeros(10000, 4, dtype=torch.int64)):
        check(gpu_case(10000, 192, 144, 6, 4, topk_ids=ids), [0, 3000, 3000, 9000, 10000], groups, streams)


def test_plans_are_queued_behind_a_busy_device_without_waiting():
    """Plans of two batches in turn, all launched while the device is busy with something else: none waits, and each has its own batch's values."""
    (group,), streams = ranks(1)
    experts, generator = E, torch.Generator().manual_seed(8)
    batches = [torch.randint(-1, E, (tokens, K), generator=generator).cuda() for tokens in (MAX_TOKENS, 37)]
    with torch.cuda.stream(streams.of_rank[0]):
        wanted = [[part.clone() for part in group.build_plan(ids, experts, "busy").tensors()] for ids in batches]
        torch.cuda.synchronize()
        torch.cuda._sleep(10**9)
        woken = torch.cuda.Event()
        woken.record()
        plans = [group.build_plan(batches[i % 2], experts, "busy") for i in range(60)]
        assert not woken.query(), "the host waited for the device"
    torch.cuda.synchronize()
    group.raise_if_dead()
    assert group._ready_plans[torch.int64, False]._chain is not None
    for i, plan in enumerate(plans):
        rows = int(plan.num_tiles) * 128
        for ours, want in zip(plan.tensors(), wanted[i % 2], strict=True):
            used = rows if ours.shape == plan.row_to_slot.shape else len(ours)
            assert torch.equal(ours[:used], want[:used]), i


def test_random_steps_with_roles_and_ranks_delayed():
    """200 steps: tokens, routes and the order in which ranks launch differ; roles sleep at random, one rank's stream is kept busy first."""
    groups, streams = ranks(4)
    for group in groups:
        group.debug = True
        group._load_variants()
    generator = torch.Generator().manual_seed(0)
    busy = torch.randn(2048, 2048, device="cuda")
    used = []
    for step in range(200):
        tokens = [int(torch.randint(0, 200, (1,), generator=generator)) * int(torch.rand(1, generator=generator) > 0.2) for _ in range(4)]
        tokens[step % 4] += 1
        cuts = [0, *torch.tensor(tokens).cumsum(0).tolist()]
        with torch.cuda.stream(streams.of_rank[step % 4]):
            for _ in range(step % 7):
                busy = busy @ busy * 1e-3
        check(gpu_case(cuts[-1], H, I, E, K, seed=step), cuts, groups, streams, order=torch.randperm(4, generator=generator).tolist())
        used.append(torch.cuda.memory_allocated())
    for group in groups:
        group.debug = False
    assert max(used[100:]) <= max(used[3:100]), "memory grows"


def _late(groups, streams, parts, options, who):
    """Plan and forward of rank `who` alone: the others do not come."""
    with torch.cuda.stream(streams.of_rank[who]):
        plan = groups[who].build_plan(parts[who].ids, parts[who].tensors.w_down.shape[0], "alone")
        y, _ = groups[who].forward(plan, parts[who].tensors, options)
    torch.cuda.synchronize()
    return y


def test_a_rank_that_does_not_come_is_named():
    from mok.fabric.process_group import FabricError, FabricTimeout

    groups, streams = ranks_in_one_process(2, num_experts=E, max_tokens=MAX_TOKENS, hidden_size=H, top_k=K, timeout_s=0.5), ranks(2)[1]
    case = gpu_case(300, H, I, E, K)
    parts = shares(case, CUTS[2], E)
    started = time.monotonic()
    assert torch.isnan(_late(groups, streams, parts, case.options, 0)).all()
    assert time.monotonic() - started < 5
    with pytest.raises(FabricTimeout, match="rank 1 did not come") as caught:
        groups[0].raise_if_dead()
    assert caught.value.peers == (1,)
    with pytest.raises(FabricTimeout, match="dead"):
        groups[0].build_plan(parts[0].ids, parts[0].tensors.w_down.shape[0], "again")
    assert torch.isnan(_late(groups, streams, parts, case.options, 1)).all()
    with pytest.raises(FabricError, match="rank 0 gave up"):
        groups[1].raise_if_dead()


def test_another_pass_and_too_many_tokens_end_all_ranks():
    from mok.fabric.process_group import FabricError

    def fresh():
        return ranks_in_one_process(2, num_experts=E, max_tokens=MAX_TOKENS, hidden_size=H, top_k=K), ranks(2)[1]

    case = gpu_case(300, H, I, E, K)
    parts = shares(case, CUTS[2], E)
    groups, streams = fresh()
    for r in range(2):
        with torch.cuda.stream(streams.of_rank[r]):
            groups[r].build_plan(parts[r].ids, parts[r].tensors.w_down.shape[0], f"layer {r}")
    torch.cuda.synchronize()
    said = []
    for group in groups:
        with pytest.raises(FabricError) as caught:
            group.raise_if_dead()
        said.append(str(caught.value))
    assert any("another pass" in text for text in said), said
    groups, streams = fresh()
    with pytest.raises(ValueError, match="max_tokens=300"):
        groups[0].build_plan(torch.zeros(301, K, dtype=torch.int64, device="cuda"), parts[0].tensors.w_down.shape[0], "long")
    with pytest.raises(FabricError, match="rank 0 gave up: its host could not launch"):       # the plan's launch may have seen it before forward is called
        assert torch.isnan(_late(groups, streams, parts, case.options, 1)).all()
        groups[1].raise_if_dead()


def _rank(W: int, cuts: list[int], steps: int, missing: int | None) -> str:
    """One rank in a process of its own: mok.moe over an ExpertGroup with sizes, against one rank's result. `missing` stops before the last step."""
    import mok

    torch.cuda.set_device(0)
    r = dist.get_rank()
    group = mok.ExpertGroup(num_experts=E, max_tokens=MAX_TOKENS, hidden_size=H, top_k=K, timeout_s=3)
    assert group.fused is not None
    for step in range(steps):
        case = gpu_case(300, H, I, E, K, seed=step)
        part, t = shares(case, cuts, E)[r], case.tensors
        if missing is not None and step == steps - 1:
            if r == missing:
                time.sleep(8)
                return "stopped"
            try:
                mok.moe(part.tensors.x, part.ids, part.tensors.topk_weights, part.tensors.w_gate_up, part.tensors.w_down, group=group)
                torch.cuda.synchronize()
                mok.check()
            except mok.FabricTimeout as error:
                return f"timeout {error.peers}"
            except mok.FabricError as error:
                return f"error {error.peers}"
            return "nothing raised"
        y = mok.moe(part.tensors.x, part.ids, part.tensors.topk_weights, part.tensors.w_gate_up, part.tensors.w_down, group=group)
        torch.cuda.synchronize()
        mok.check()
        dist.barrier()                                        # the comparison takes the whole device
        whole = mok.moe(t.x, case.topk_ids, t.topk_weights, t.w_gate_up, t.w_down)[cuts[r]:cuts[r + 1]]
        torch.cuda.synchronize()
        if y.dtype != BF16 or not torch.equal(y, whole):
            return f"step {step}: {(y != whole).any(1).sum()} of {y.shape[0]} tokens differ"
        dist.barrier()
    return "equal"


@pytest.mark.parametrize("W", [2, 4])
def test_processes_that_share_the_gpu(W):
    from mok.fabric.mps import PrivateMps

    with PrivateMps() as mps, mps.inherited():
        outcomes = run_mortal_ranks(_rank, W, W, CUTS[W], 4, None, timeout=120)
    assert [result for _, result, _ in outcomes] == ["equal"] * W, outcomes


def test_a_process_that_stops_is_named_by_the_others():
    from mok.fabric.mps import PrivateMps

    with PrivateMps() as mps, mps.inherited():
        outcomes = run_mortal_ranks(_rank, 2, 2, CUTS[2], 2, 1, timeout=120)
    assert [result for _, result, _ in outcomes] == ["timeout (1,)", "stopped"], outcomes


def _killed_in_mid_kernel(victim: int) -> str:
    """The victim's launch waits on the device for the others' ids when its process is killed; what another rank's call then says."""
    import mok

    torch.cuda.set_device(0)
    r = dist.get_rank()
    group = mok.ExpertGroup(num_experts=E, max_tokens=MAX_TOKENS, hidden_size=H, top_k=K, timeout_s=3)
    part = shares(gpu_case(300, H, I, E, K), CUTS[2], E)[r]

    def call() -> None:
        mok.moe(part.tensors.x, part.ids, part.tensors.topk_weights, part.tensors.w_gate_up, part.tensors.w_down, group=group)

    call()
    torch.cuda.synchronize()
    mok.check()
    dist.barrier()
    if r == victim:
        call()
        time.sleep(0.5)
        assert not torch.cuda.current_stream().query(), "the launch has ended, nobody is killed in its middle"
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1.5)
    started = time.monotonic()
    try:
        call()
        torch.cuda.synchronize()
        mok.check()
    except mok.FabricError as error:
        return f"{type(error).__name__} {error.peers}, {'in time' if time.monotonic() - started < 10 else 'late'}"
    return "nothing raised"


def test_a_process_killed_in_mid_kernel_is_named():
    """Without MPS, whose server a killed client may take along: the ranks' contexts take turns on the device, a time slice each."""
    outcomes = run_mortal_ranks(_killed_in_mid_kernel, 2, 1, timeout=120)
    assert outcomes[0] == (0, "FabricTimeout (1,), in time", None) and outcomes[1][0] == -signal.SIGKILL, outcomes


def _joins_again(stores: str) -> str:
    """Two lives of one process: a group is left behind, undestroyed but for its process group, and another one built."""
    import mok

    torch.cuda.set_device(0)
    r, said = dist.get_rank(), []
    for life in range(2):
        if life:
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.FileStore(f"{stores}/{life}", 2), rank=r, world_size=2)
        said.append(_rank(2, CUTS[2], 2, None))
        mok.check()
    return " ".join(said)


def test_a_process_may_join_again(tmp_path):
    from mok.fabric.mps import PrivateMps

    with PrivateMps() as mps, mps.inherited():
        outcomes = run_mortal_ranks(_joins_again, 2, str(tmp_path), timeout=120)
    assert outcomes == [(0, "equal equal", None)] * 2, outcomes
