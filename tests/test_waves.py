"""Waves: every row in exactly one of them, the same bits for every capacity, and no routed buffer beyond it."""
from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

import mok
from mok.config import BLOCK_M
from mok.engines import cpu, cpu_experts
from mok.engines.cpu_tiles import TileMath
from mok.plan import experts_of_rank, plan_capacity
from mok.runtime import RowBuffers, runtime
from mok.waves import WaveCounts, split_into_waves, wave_capacity, wave_tiles, waves_needed
from tests.ranks import RankPool
from tests.test_expert_parallel import CUTS, EXPERT, TOKEN, global_case, run_case

ONE_TILE = 1e-9


@pytest.fixture(scope="module")
def pool():
    pool = RankPool(4)
    yield pool
    pool.close()


# ---- which rows in which wave

def test_worked_examples():
    assert wave_capacity(1.0, 16, 4, 2, block_m=4) == 16
    assert wave_tiles(torch.tensor([[5, 0, 1]]), 0.1, 6, block_m=4).tolist() == [[3, 1]]
    assert waves_needed(5, 2) == 3 and waves_needed(4, 2) == 2 and waves_needed(0, 2) == 1
    waves = split_into_waves([0, 8, 8, 12], [6, 0, 3], 4, 3)
    assert [(w.index, w.counts, w.experts, w.begun, w.unfinished) for w in waves] == [
        (0, [4, 0, 0], [0, 1], None, 0), (1, [2, 0, 0], [0], 0, None), (2, [0, 0, 3], [2], None, None)]
    assert all(w.starts == [0, 0, 0] and w.capacity == 4 for w in waves)


def offsets_of(tokens, block):
    offsets = [0]
    for count in tokens:
        offsets.append(offsets[-1] + -(-count // block) * block)
    return offsets


@settings(deadline=None, derandomize=True, max_examples=300)
@given(tokens=st.lists(st.integers(0, 40), min_size=1, max_size=6), tiles=st.integers(1, 12), beyond=st.integers(0, 2))
def test_every_row_is_in_one_wave_and_sums_pass_on_in_order(tokens, tiles, beyond):
    block = 4
    offsets, capacity = offsets_of(tokens, block), tiles * block
    needed = waves_needed(offsets[-1] // block, tiles)
    waves = split_into_waves(offsets, tokens, capacity, needed + beyond)
    assert any(waves[needed - 1].counts) or not any(tokens), "a wave without rows although no other rank needs it"
    done, zeroed, handed_on = [0] * len(tokens), [], None
    for wave in waves:
        assert wave.begun == handed_on, "an unfinished sum must be continued in the next wave, and nothing else"
        for e, (start, count) in enumerate(zip(wave.starts, wave.counts)):
            assert start >= 0 and start + count <= capacity
            if count:
                assert wave.index * capacity + start == offsets[e] + done[e] and done[e] % block == 0
                assert (e == wave.begun) == (done[e] > 0)
                done[e] += count
                assert (e == wave.unfinished) == (done[e] < tokens[e])
            elif e in wave.experts:
                assert tokens[e] == 0
                zeroed.append(e)
        assert wave.experts == sorted({e for e, count in enumerate(wave.counts) if count} | (set(zeroed) if wave.index == 0 else set()))
        handed_on = wave.unfinished
    assert handed_on is None
    assert tokens == done and zeroed == [e for e, count in enumerate(tokens) if count == 0]


@settings(deadline=None, derandomize=True, max_examples=200)
@given(W=st.integers(1, 4), experts=st.integers(4, 9), factor=st.floats(0.05, 3), data=st.data())
def test_one_wave_while_the_load_is_within_the_factor(W, experts, factor, data):
    """Whatever the spread over a rank's experts; and a rank never holds more than the worst case."""
    counts = torch.tensor([[data.draw(st.integers(0, 300)) for _ in range(experts)] for _ in range(W)])
    routes = int(counts.sum()) + data.draw(st.integers(0, 200))                     # some routes are -1
    table = wave_tiles(counts, factor, routes).tolist()
    for rank, (used, capacity) in enumerate(table):
        first, number = experts_of_rank(experts, W, rank)
        own = counts.sum(0)[first:first + number]
        assert used == sum(-(-int(count) // BLOCK_M) for count in own)
        assert BLOCK_M <= capacity * BLOCK_M <= max(BLOCK_M, plan_capacity(routes, number))
        if int(own.sum()) <= factor * routes * number / experts:
            assert waves_needed(used, capacity) == 1, (rank, used, capacity)


# ---- the same bits

def in_waves(process_group, case, cuts, factor, wanted, main_grad, fault=None):
    """This rank's results with a bounded capacity, and how many waves its group counted."""
    group = mok.ExpertGroup(process_group, timeout_s=60, capacity_factor=factor)
    first, count = experts_of_rank(case["w_gate_up"].shape[0], group.size, group.rank)
    tokens, experts = slice(cuts[group.rank], cuts[group.rank + 1]), slice(first, first + count)
    with Fault(fault):
        return run(case, group, tokens, experts, wanted, main_grad), group.wave_counts


def run(case, group=None, tokens=slice(None), experts=slice(None), wanted=TOKEN + EXPERT, main_grad=False):
    """y and the wanted gradients of one pass, those of main_grad's weights from accumulators that held something."""
    if set(wanted) == {*TOKEN, *EXPERT} and not main_grad:
        return run_case(case, group, tokens, experts)
    leaf = {name: case[name][tokens].clone().requires_grad_(name in wanted) for name in TOKEN}
    leaf |= {name: case[name][experts].clone().requires_grad_(name in wanted) for name in EXPERT}
    sums = tuple(torch.full(leaf[name].shape, 0.37) for name in ("w_gate_up", "w_down"))
    y = mok.moe(topk_ids=case["topk_ids"][tokens], group=group, main_grad=sums if main_grad else None, **leaf)
    y.backward(case["dy"][tokens])
    results = {"y": y.detach()} | {name: leaf[name].grad for name in wanted}
    return results | dict(zip(("w_gate_up", "w_down"), sums)) if main_grad else results


class Fault:
    """One of the mistakes that waves invite, in this process while the block lasts."""

    def __init__(self, name):
        self.name, self.kept = name, []

    def put(self, owner, attribute, value):
        self.kept.append((owner, attribute, getattr(owner, attribute)))
        setattr(owner, attribute, value)

    def __enter__(self):
        if self.name == "a boundary off by a tile":
            def shifted(*arguments):
                waves = split_into_waves(*arguments)
                return [replace(w, starts=[min(start + BLOCK_M, w.capacity - count) for start, count in zip(w.starts, w.counts)])
                        if w.index == 1 else w for w in waves]
            self.put(cpu, "split_into_waves", shifted)
        if self.name == "a wave's gradient not added":
            self.put(cpu_experts.GradTarget, "begun_sum", property(lambda target: torch.zeros_like(target.carried) if target.begun else None))
        if self.name == "z of the first wave for all":
            forward_tasks = cpu_experts.Experts.forward_tasks
            self.put(cpu_experts.Experts, "forward_tasks", lambda experts, x, y, z: [lambda scratch: z.copy_(SAVED[0])] if y is None
                     else (SAVED.clear(), SAVED.append(z) if z is not None else None, forward_tasks(experts, x, y, z))[-1] if experts.wave and
                     experts.wave.index == 0 else forward_tasks(experts, x, y, z))
        if self.name == "results of the last wave only":
            self.put(cpu.GroupRows, "home", lambda rows, what, wave, *by_row: rows._travels[wave].home(what, *by_row))
        if self.name == "no fault: small tiles, 4 threads":
            self.put(cpu_experts, "GRAD_TILE", (32, 16))
            self.kept.append((torch, None, torch.get_num_threads()))
            torch.set_num_threads(4)
        if self.name == "two experts' sums at once":
            self.put(cpu_experts, "_in_turn", lambda first, second, scratch: (second(scratch), first(scratch)))

    def __exit__(self, *error):
        for owner, attribute, value in self.kept:
            torch.set_num_threads(value) if attribute is None else setattr(owner, attribute, value)


SAVED: list[torch.Tensor] = []


def differing(pool, case, cuts, factor, wanted=TOKEN + EXPERT, main_grad=False, fault=None):
    """(names of results whose bits differ from one rank's without waves, every rank's wave counts)."""
    alone = run(case, wanted=wanted, main_grad=main_grad)
    parts, counts = zip(*pool.run(in_waves, len(cuts) - 1, case, cuts, factor, wanted, main_grad, fault))
    return [name for name, whole in alone.items() if not torch.equal(torch.cat([part[name] for part in parts]), whole)], counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [ONE_TILE, 0.4, 1.0, 8.0])
@pytest.mark.parametrize("W", [1, 2, 4])
def test_every_capacity_gives_the_same_bits(pool, W, factor, dtype):
    """10^4 routes, odd H and I, expert 1 empty, biases and a shared expert; at W = 4 a rank without tokens."""
    case = global_case(2503, 72, 23, 5, 4, dtype)
    names, counts = differing(pool, case, CUTS[W], factor)
    assert not names, names
    load = [int((case["topk_ids"] == e).sum()) for e in range(5)]
    needed = []
    for rank in range(W):
        first, number = experts_of_rank(5, W, rank)
        rows = sum(-(-tokens // 128) * 128 for tokens in load[first:first + number])
        needed.append(max(1, -(-rows // wave_capacity(factor, 2503 * 4, 5, number))))
    assert max(needed) > 1 or factor >= 1, "the case must need waves"
    several = 2 * (max(needed) > 1)                                                   # forward and backward
    assert list(counts) == [WaveCounts(2, several, 2 * (own > 1), max(needed)) for own in needed]


def _recomputing(process_group, case, cuts):
    group = mok.ExpertGroup(process_group, timeout_s=60, capacity_factor=ONE_TILE)
    first, count = experts_of_rank(5, group.size, group.rank)
    return run_case(case, group, slice(cuts[group.rank], cuts[group.rank + 1]), slice(first, first + count), recompute="z"), group.wave_counts.most


def test_recomputed_z_in_waves(pool):
    """With recompute="z" the first wave's z is made again too."""
    case = global_case(700, 72, 23, 5, 4, torch.bfloat16)
    alone, (parts, waves) = run_case(case), zip(*pool.run(_recomputing, 2, case, [0, 300, 700]))
    assert min(waves) > 1
    for name, whole in alone.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), whole), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes(pool, dtype):
    case = global_case(700, 72, 23, 5, 3, dtype)
    case["topk_weights"] = case["topk_weights"].to(torch.float64 if dtype == torch.float64 else torch.float32)
    names, _ = differing(pool, case, [0, 300, 700], 0.3)
    assert not names, names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [ONE_TILE, 1.0])
def test_all_tokens_of_all_ranks_on_one_expert(pool, factor, dtype):
    """The worst case: rank 0 takes four times its share, more than CHUNK_ROWS rows of one expert; only it exceeds its capacity."""
    case = global_case(1100, 40, 24, 4, 2, dtype, skew=True)
    case["topk_ids"][::3, 1] = -1
    names, counts = differing(pool, case, [0, 300, 300, 800, 1100], factor)
    assert not names, names
    routes = int((case["topk_ids"] >= 0).sum())
    capacity = wave_capacity(factor, 2200, 4, 1)
    assert counts[0].most == -(-routes // capacity) > 1
    assert [count.exceeded for count in counts] == [2, 0, 0, 0] and [count.several for count in counts] == [2, 2, 2, 2]


@pytest.mark.parametrize("cuts", [[0, 64, 64], [0, 0, 64], [0, 0, 0]], ids=["second idle", "first idle", "nobody"])
def test_idle_ranks(pool, cuts):
    case = global_case(cuts[-1], 32, 16, 4, 3, torch.float32, skew=True, biases=False, shared=False)
    names, counts = differing(pool, case, cuts, ONE_TILE)
    assert not names and counts[1].exceeded == 0 and counts[1].most == (2 if cuts[-1] else 1), (names, counts)


@pytest.mark.parametrize("wanted", [("x",), ("topk_weights",), ("w_gate_up",), ("w_down",), ("b_gate_up",), ("b_down",), ("x", "w_down"), EXPERT])
def test_frozen_inputs(pool, wanted):
    """x travels again for z alone (x, w_down wanted), or for nothing at all (b_down)."""
    names, counts = differing(pool, global_case(600, 40, 24, 4, 2, torch.bfloat16, shared=False), [0, 350, 600], ONE_TILE, wanted)
    assert not names and counts[0].most == 4, (names, counts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_is_added_to_once(pool, dtype):
    """Rounding differs unless a straddling expert's sum is whole before it is added to what the accumulator held."""
    names, _ = differing(pool, global_case(600, 40, 24, 4, 2, dtype, shared=False), [0, 350, 600], ONE_TILE, main_grad=True)
    assert not names, names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_tiles_on_several_threads(pool, dtype, monkeypatch):
    """Straddling experts' sums in small tiles, 4 threads, one wave after the other in the same buffers."""
    monkeypatch.setattr(cpu_experts, "GRAD_TILE", (32, 16))
    case = global_case(1200, 72, 40, 4, 2, dtype)
    for factor in (ONE_TILE, 0.1):
        names, _ = differing(pool, case, [0, 700, 1200], factor, fault="no fault: small tiles, 4 threads")
        assert not names, names


def _layer(process_group, x, factor, saved):
    """mok.MoE with a router, two micro-batches in flight, with or without an activation checkpoint around it."""
    group = mok.ExpertGroup(process_group, timeout_s=60, capacity_factor=factor)
    config = mok.MoEConfig(hidden_size=16, intermediate_size=8, num_experts=6, top_k=2, shared_intermediate_sizes=(8,), shared_gated=True, expert_bias=True)
    layer = mok.MoE(config, group=group)
    cuts = [0, 300, *[x.shape[1]] * (group.size - 1)]
    leaves = [part[cuts[group.rank]:cuts[group.rank + 1]].clone().requires_grad_() for part in x]
    context = functools.partial(create_selective_checkpoint_contexts, mok.checkpoint_policy) if saved == "selective" else noop_context_fn
    outs = [layer(leaf) if saved == "everything" else checkpoint(layer, leaf, use_reentrant=False, context_fn=context) for leaf in leaves]
    for y in outs:
        y.square().sum().backward()
    return [*outs, *(leaf.grad for leaf in leaves), *(parameter.grad for parameter in layer.parameters())], group.wave_counts.most


@pytest.mark.parametrize("saved", ["everything", "nothing", "selective"])
def test_the_layer_in_waves(pool, saved):
    x = torch.randn(2, 900, 16, generator=torch.Generator().manual_seed(0))
    for bounded, whole in zip(*(pool.run(_layer, 2, x, factor, saved) for factor in (ONE_TILE, None)), strict=True):
        assert bounded[1] >= 6 and whole[1] == 0
        assert all(torch.equal(a, b) for a, b in zip(bounded[0], whole[0], strict=True))


@pytest.mark.parametrize("library", ["oneDNN", "torch.mm"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_sum_that_is_cut_keeps_its_bits(dtype, library):
    """Rows of one expert added up in one call and in pieces, through each library (torch.mm: CPUs with AMX tiles or without oneDNN)."""
    math = TileMath(dtype)
    if library == "torch.mm":
        math._linear = None
    a, b = (torch.randn(1000, width, generator=torch.Generator().manual_seed(width), dtype=math.acc) for width in (37, 50))

    def whole(scratch):
        return cut(scratch, 1024)

    def cut(scratch, rows):
        total = None
        for first in range(0, 1024, rows):
            left, right = (math.buffer(scratch, name, min(rows, 1024), side.shape[1], math.acc).zero_() for name, side in (("a", a), ("b", b)))
            for operand, side in ((left, a), (right, b)):
                part = side[first:first + rows]
                operand[:part.shape[0]].copy_(part)
            total = math.outer(scratch, "outer", left, right, None if total is None else scratch.like("begun", total).copy_(total))
        return total.clone()

    results = []
    with math.precision():
        runtime.tiles.run([lambda scratch: results.append([whole(scratch), cut(scratch, 128), cut(scratch, 512), cut(scratch, 64)])])
    one, tile, half, narrower = results[0]
    assert torch.equal(one, tile) and torch.equal(one, half)
    assert not torch.equal(one, narrower), "the data must make the order of sums visible"


FAULTS = {"a boundary off by a tile": {"y", "x"}, "a wave's gradient not added": {"w_gate_up", "w_down", "b_gate_up", "b_down"},
          "z of the first wave for all": {"x", "w_gate_up"}, "results of the last wave only": {"y", "x"},
          "two experts' sums at once": {"w_gate_up", "w_down", "b_gate_up", "b_down"}}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(pool, fault):
    """The comparison above fails on each mistake, in the results that it spoils. In rank 1's second wave of 3 tiles one expert ends, one begins."""
    case = global_case(1200, 40, 24, 4, 2, torch.float32)
    assert differing(pool, case, [0, 700, 1200], 0.1)[0] == []
    try:
        names = set(differing(pool, case, [0, 700, 1200], 0.1, fault=fault)[0])
    except AssertionError as error:
        assert fault in ("a boundary off by a tile", "results of the last wave only") and "index" in str(error), error
    else:
        assert FAULTS[fault] <= names, names


# ---- memory and agreement

def _buffers(process_group, case, cuts, factor):
    """Of one forward and backward pass: rows that arrived in each exchange, rows of z, bytes of all row buffers, capacity, waves whose z is computed again."""
    group = mok.ExpertGroup(process_group, timeout_s=60, capacity_factor=factor)
    E, (T, K) = case["w_gate_up"].shape[0], case["topk_ids"].shape
    first, count = experts_of_rank(E, group.size, group.rank)
    runtime.rows, exchange, arrived, z_rows = RowBuffers(), group.fabric.exchange_rows, [], []
    forward_tasks, again = cpu_experts.Experts.forward_tasks, []

    def watched(experts, x, y, z):
        if y is None:
            again.append(experts.wave.index)
        return forward_tasks(experts, x, y, z)

    def counted(tensors, send_counts, receive_counts, what):
        if what in ("dispatch", "backward dispatch"):
            arrived.append(sum(receive_counts))
        return exchange(tensors, send_counts, receive_counts, what)

    group.fabric.exchange_rows, cpu_experts.Experts.forward_tasks = counted, watched
    tokens, experts = slice(cuts[group.rank], cuts[group.rank + 1]), slice(first, first + count)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: z_rows.append(t.shape[0]) or t if t.dim() == 2 and t.shape[1] == WIDTH else t, lambda t: t):
        run_case(case, group, tokens, experts)
    cpu_experts.Experts.forward_tasks = forward_tasks
    capacity = plan_capacity(T * K, count) if factor is None else wave_capacity(factor, T * K, E, count)
    return arrived, z_rows, runtime.rows.num_bytes(), capacity, again


WIDTH = 2 * 24


def test_routed_buffers_stay_within_the_capacity(pool):
    """All of 4 ranks' tokens on rank 0: by the formula in docs/distributed.md, and a fraction of what one big wave takes."""
    H, I, cuts, factor = 40, 24, [0, 500, 1000, 1500, 2000], 0.5
    case = global_case(2000, H, I, 4, 2, torch.float32, skew=True, biases=False, shared=False)
    bounded, worst = (pool.run(_buffers, 4, case, cuts, given) for given in (factor, None))
    for rank, (arrived, z_rows, held, C, again) in enumerate(bounded):
        assert max(arrived) <= C and sum(arrived) == (2 * 4000 if rank == 0 else 0)
        assert z_rows == [C] and again == [1, 2, 3, 4, 5, 6]               # 4000 rows through buffers of 640
        backward = C * (H + 1 + 2 * I + I) + C * 2 * I + 3 * H * I       # dx, d_weight, dz, w*h; z again; sums of one expert
        assert C * (H + 2 * I) * 4 <= held <= backward * 4 * 1.02, (rank, held, backward * 4)
    assert bounded[0][2] < 0.25 * worst[0][2], "what waves are for"


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf"), True, "1"])
def test_a_wrong_capacity_factor_is_named(wrong):
    with pytest.raises(ValueError, match=r"capacity_factor=.* must be a positive number"):
        mok.ExpertGroup(capacity_factor=wrong)


def _disagree(process_group):
    try:
        mok.ExpertGroup(process_group, timeout_s=60, capacity_factor=1.0 + dist_rank(process_group))
    except ValueError as error:
        return str(error)
    return "nothing raised"


def dist_rank(process_group):
    return torch.distributed.get_rank(process_group)


def test_another_capacity_on_one_rank_raises_on_all(pool):
    for message in pool.run(_disagree, 2):
        assert "capacity_factor must be the same" in message, message


def _compiled(process_group, case, cuts):
    """Whether compiled calls have eager calls' bits, and how many waves each kind counted."""
    torch._dynamo.reset()
    groups = [mok.ExpertGroup(process_group, timeout_s=60, capacity_factor=ONE_TILE) for _ in range(2)]
    rank = groups[0].rank
    first, count = experts_of_rank(case["w_gate_up"].shape[0], groups[0].size, rank)

    def layer(x, w, tokens, group):
        return mok.moe(x, case["topk_ids"][tokens], case["topk_weights"][tokens], w, case["w_down"][first:first + count], group=group)

    compiled, results = torch.compile(layer, backend="aot_eager", fullgraph=True), []
    for last in (cuts[rank + 1], cuts[rank] + 5):                                    # another number of tokens, and of rows, in the second call
        tokens, both = slice(cuts[rank], last), []
        leaves = [case["x"][tokens].clone().requires_grad_(), case["w_gate_up"][first:first + count].clone().requires_grad_()]
        for function, group in zip((compiled, layer), groups):
            y = function(*leaves, tokens, group)
            both.append([y.detach(), *torch.autograd.grad(y, leaves, case["dy"][tokens])])
        results += [torch.equal(a, b) for a, b in zip(*both)]
    return results, [group.wave_counts for group in groups]


def test_compiled_calls_in_waves(pool):
    case = global_case(400, 24, 8, 4, 2, torch.float32, biases=False, shared=False)
    for results, (compiled, eager) in pool.run(_compiled, 2, case, [0, 150, 400]):
        assert results == [True] * 6 and compiled == eager and eager.most > 1 and eager.passes == 4


def _opcheck(process_group):
    group = mok.ExpertGroup(process_group, timeout_s=60, capacity_factor=ONE_TILE)
    ids = torch.randint(-1, 3, (200, 2), generator=torch.Generator().manual_seed(0))
    signature = "0|24|10|None|2|torch.float32|bf16|swiglu|None|None|[]"
    arguments = (ids, 3, torch.float32, 24, 10, group.key, signature)
    torch.library.opcheck(torch.ops.mok.plan.default, arguments, test_utils=("test_schema", "test_faketensor"))
    x, weights = torch.randn(200, 24), (torch.rand(200, 2), torch.randn(3, 20, 24), torch.randn(3, 24, 10), None, None)
    plan = torch.ops.mok.plan(*arguments)
    torch.library.opcheck(torch.ops.mok.moe_forward.default, (x, *weights, [], [], [], plan, None, None, "swiglu", None, "bf16", None, [-1, -1, -1], True,
                                                              group.key, signature), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(torch.ops.mok.moe_forward.default, (x, *weights, [], [], [], plan, None, None, "swiglu", None, "bf16", "z", [-1, -1, -1], True,
                                                              group.key, signature), test_utils=("test_schema", "test_faketensor"))


def test_what_the_compiler_is_told_of_shapes(pool):
    pool.run(_opcheck, 1)
