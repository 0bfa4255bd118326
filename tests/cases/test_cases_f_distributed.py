"""Cases F, and those of A to E that need several ranks, on CPU processes over gloo: at any number of ranks the bits of one rank."""
from __future__ import annotations

import functools
import operator
import time

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import mok
from mok.plan import experts_of_rank
from tests.cases.case_support import Problem, assert_exactly_zero, assert_same_bits, problem, random_routes
from tests.ranks import RankPool

EXPERT = ("w_gate_up", "w_down", "b_gate_up", "b_down")
TOKEN = ("x", "topk_ids", "topk_weights")
TIMEOUT_S = 30


@pytest.fixture(scope="module")
def pool():
    pool = RankPool(4)
    yield pool
    pool.close()


def share(p: Problem, cuts: list[int], rank: int) -> Problem:
    """What one rank holds: its tokens and its experts."""
    W = len(cuts) - 1
    first, count = experts_of_rank(p["w_gate_up"].shape[0], W, rank)
    tokens, experts = slice(cuts[rank], cuts[rank + 1]), slice(first, first + count)
    parts = {name: p[name][tokens if name in TOKEN else experts].contiguous() for name in p.tensors}
    return Problem(parts, p.shared, p.dy[tokens].contiguous(), p.settings)


def joined(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _run_steps(process_group, steps, layer=None, delays=()):
    """One group, one pass for each (problem, cuts), in order; delays[i]: (rank, seconds) to sleep before step i."""
    group = mok.ExpertGroup(process_group, timeout_s=TIMEOUT_S)
    results = []
    for i, (p, cuts) in enumerate(steps):
        if i < len(delays) and delays[i][0] == group.rank:
            time.sleep(delays[i][1])
        results.append(share(p, cuts, group.rank).run(functools.partial(layer or mok.moe, group=group)))
    return results


def assert_ranks_equal_one(pool, steps, layer=None, delays=()) -> list[dict[str, torch.Tensor]]:
    """Every step's results of all ranks, side by side, have the bits of one rank's; returns the latter."""
    W = len(steps[0][1]) - 1
    by_rank = pool.run(_run_steps, W, steps, layer, delays)
    alone = [p.run() for p, _ in steps]
    for i, whole in enumerate(alone):
        assert_same_bits(joined([results[i] for results in by_rank]), whole)
    return alone


DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


# ---- cases of A, C at two ranks ----

@DTYPES
def test_case_A2_two_ranks(pool, dtype):
    """A2 with receive buffers that are larger than what arrives, three steps, fewer and more tokens."""
    steps = [(problem(random_routes(T, 2, 8, masked=masked, seed=T), 8, 64, 32, "cpu", dtype, biases=True, seed=T), [0, T // 2, T])
             for T, masked in ((16, 0.0), (6, 0.5), (40, 0.2), (3, 0.0))]
    for p, _ in steps:
        p.check()
    assert_ranks_equal_one(pool, steps)


@DTYPES
def test_case_A4_two_ranks(pool, dtype):
    """transformers#48687: d_topk_weights under expert parallelism, and weights 0.9 and 0.1 that reach the experts' gradients."""
    p = problem(random_routes(16, 2, 8, seed=3), 8, 32, 16, "cpu", dtype, biases=True)
    p = p.changed(topk_weights=torch.tensor([[0.9, 0.1]]).expand(16, 2).clone())
    p.check()
    assert_ranks_equal_one(pool, [(p, [0, 8, 16])])


@DTYPES
@pytest.mark.parametrize("ids", ["all one expert", "repeated", "masked", "nobody"])
def test_case_C4_C1_two_ranks(pool, dtype, ids):
    """slime#822, TransformerEngine#2908 at two ranks: repeated experts and -1 routes, sizes agree and nothing is merged."""
    T, K, E = 66, 6, 4
    routes = {"all one expert": torch.full((T, K), 1), "repeated": torch.randint(0, 2, (T, K), generator=torch.Generator().manual_seed(0)),
              "masked": torch.randint(-1, E, (T, K), generator=torch.Generator().manual_seed(1)), "nobody": torch.full((T, K), -1)}[ids]
    p = problem(routes, E, 64, 32, "cpu", dtype)
    p.check()
    assert_ranks_equal_one(pool, [(p, [0, 20, 66])])


def _counts(process_group, ids, cuts):
    group = mok.ExpertGroup(process_group, timeout_s=TIMEOUT_S)
    layer = mok.MoE(mok.MoEConfig(64, 32, 16, 3, balance="bias"), group=group)
    mine = ids[cuts[group.rank]:cuts[group.rank + 1]]
    layer(torch.randn(mine.shape[0], 64), routes=(mine, torch.rand(mine.shape)))
    return layer.tokens_per_expert.tolist(), layer.router.load.tolist()


def test_case_C10_two_ranks(pool):
    """xtuner#2053, torchtitan#3413: the owner's counts over all ranks are the valid routes; each rank's load is that of its own tokens."""
    ids, cuts = random_routes(301, 3, 16, masked=0.3, seed=5), [0, 101, 301]
    by_rank = pool.run(_counts, 2, ids, cuts)
    assert functools.reduce(operator.iadd, (counts for counts, _ in by_rank), []) == [int((ids == e).sum()) for e in range(16)]
    for rank, (_, load) in enumerate(by_rank):
        assert load == [int((ids[cuts[rank]:cuts[rank + 1]] == e).sum()) for e in range(16)]


# ---- cases of E at two ranks ----

def _checkpointed(kind, *args, **kwargs):
    context = {} if kind == "plain" else {"context_fn": functools.partial(create_selective_checkpoint_contexts, mok.checkpoint_policy)}
    return checkpoint(mok.moe, *args, use_reentrant=False, **context, **kwargs)


@pytest.mark.parametrize("kind", ["plain", "selective"])
def test_case_E1_two_ranks(pool, kind):
    """E1 under expert parallelism: recomputation repeats the exchange on every rank, one of them without tokens."""
    steps = [(problem(random_routes(40, 2, 8, seed=i), 8, 64, 32, "cpu", torch.float32, biases=True, seed=i), cuts)
             for i, cuts in enumerate(([0, 12, 40], [0, 0, 40], [0, 40, 40]))]
    assert_ranks_equal_one(pool, steps, functools.partial(_checkpointed, kind))


def _accumulate(process_group, batches, cuts):
    group = mok.ExpertGroup(process_group, timeout_s=TIMEOUT_S)
    shares = [share(p, cuts, group.rank) for p in batches]
    into = tuple(torch.ones(shares[0][name].shape) for name in ("w_gate_up", "w_down"))
    for p in shares:
        arguments, leaves = p.leaves()
        arguments["shared"] = []
        mok.moe(**arguments, main_grad=into, group=group).backward(p.dy)
        assert leaves["w_gate_up"].grad is None
    return {"w_gate_up": into[0], "w_down": into[1]}


@DTYPES
def test_case_E7_two_ranks(pool, dtype):
    """E7's accumulators at two ranks: experts that are never hit keep their preset value, the others the bits of one rank."""
    batches = [problem(torch.randint(low, high, (40, 2), generator=torch.Generator().manual_seed(low)), 6, 64, 32, "cpu", dtype, seed=low)
               for low, high in ((0, 2), (3, 5), (1, 2))]                                     # experts 2 and 5 never
    got = joined(pool.run(_accumulate, 2, batches, [0, 15, 40]))
    alone = pool.run(_accumulate, 1, batches, [0, 40])[0]
    assert_same_bits(got, alone)
    assert all((got[name][e] == 1).all() for name in got for e in (2, 5)) and all((got[name][e] != 1).any() for name in got for e in (0, 1, 3, 4))


def _compiled_steps(process_group, steps):
    torch._dynamo.reset()
    group = mok.ExpertGroup(process_group, timeout_s=TIMEOUT_S)
    layer = torch.compile(functools.partial(mok.moe, group=group), backend="aot_eager", fullgraph=True)
    return [(share(p, cuts, group.rank).run(layer), share(p, cuts, group.rank).run(functools.partial(mok.moe, group=group))) for p, cuts in steps]


def test_case_E10_two_ranks(pool):
    """E10 with a group: token counts that differ between ranks and steps, whole graph, the bits of eager."""
    steps = [(problem(random_routes(T, 2, 8, seed=T), 8, 64, 32, "cpu", torch.float32, seed=T), [0, first, T]) for T, first in ((50, 20), (61, 40), (9, 0))]
    for results in pool.run(_compiled_steps, 2, steps):
        for compiled, eager in results:
            assert_same_bits(compiled, eager)


# ---- F1, F2, F3, F5 ----

@DTYPES
def test_case_F1(pool, dtype):
    """uccl#940, sgl-kernel-npu#69, Megatron-LM#3626, TransformerEngine#3019, Megatron-LM#5393: a rank with nothing to send or receive left a
    step out and the others waited; forward and backward, one group, step after step."""
    def case(T, low, high, seed):
        return problem(torch.randint(low, high, (T, 2), generator=torch.Generator().manual_seed(seed)), 4, 64, 32, "cpu", dtype, biases=True, seed=seed)

    steps = [(case(16, 0, 4, 1), [0, 0, 16]),                 # rank 0 has no tokens
             (case(32, 0, 2, 2), [0, 16, 32]),                # all to rank 0's experts
             (case(0, 0, 4, 3), [0, 0, 0]),                   # nobody has any
             (case(16, 2, 4, 4), [0, 16, 16]),                # rank 1 has no tokens and all the work
             (case(8, -1, 0, 5), [0, 3, 8])]                  # tokens, but no route
    alone = assert_ranks_equal_one(pool, steps)
    for name in EXPERT:
        assert_exactly_zero(alone[2][name], f"d{name} without tokens")


@DTYPES
def test_case_F2(pool, dtype):
    """Tutel#173, #182, Automodel#3641, vllm-ascend#14304: another T on every rank, changing each step; no padding by the user."""
    steps = []
    for seed, tokens in enumerate(([5, 6, 1, 33], [33, 0, 2, 5], [1, 1, 1, 0], [0, 64, 3, 7])):
        cuts = torch.tensor([0, *tokens]).cumsum(0).tolist()
        steps.append((problem(random_routes(cuts[-1], 2, 6, masked=0.1, seed=seed), 6, 64, 32, "cpu", dtype, biases=True, seed=seed), cuts))
    for p, _ in steps:
        p.check()
    assert_ranks_equal_one(pool, steps)


def test_case_F3(pool):
    """pytorch#137171, #181935, #197995: a rank's data overwritten by the next call before a slow peer has read it. 50 calls back to back on one
    group, other data and another delayed rank each time."""
    generator = torch.Generator().manual_seed(0)
    steps = [(problem(random_routes(12, 2, 4, seed=i), 4, 16, 8, "cpu", torch.float32, seed=i), [0, 3 + i % 7, 12]) for i in range(50)]
    delays = [(int(torch.randint(0, 2, (1,), generator=generator)), 0.05 if i % 5 == 0 else 0.0) for i in range(50)]
    assert_ranks_equal_one(pool, steps, delays=delays)


def _layers(process_group, layers, batches, cuts, order):
    """Two layers, two micro-batches: all forwards before any backward, backwards in `order`; one rank late before each pass."""
    group = mok.ExpertGroup(process_group, timeout_s=TIMEOUT_S)
    rank, W = group.rank, group.size
    outputs, leaves, weights = [], [], []
    first, count = experts_of_rank(4, W, rank)
    for layer in layers:
        weights.append({name: layer[name][first:first + count].clone().requires_grad_() for name in ("w_gate_up", "w_down")})
    for b, p in enumerate(batches):
        time.sleep(0.03 * ((b + rank) % 2))
        mine = share(p, cuts, rank)
        x = mine["x"].clone().requires_grad_()
        h = x
        for i in range(len(layers)):
            h = h + mok.moe(h, mine["topk_ids"], mine["topk_weights"], **weights[i], group=group, layer_key=i)
        outputs.append((h, mine.dy))
        leaves.append(x)
    for b in order:
        time.sleep(0.03 * ((b + rank) % 2))
        outputs[b][0].backward(outputs[b][1])
    return {"y0": outputs[0][0].detach(), "y1": outputs[1][0].detach(), "x0": leaves[0].grad, "x1": leaves[1].grad,
            **{f"{name}{i}": w.grad for i, layer in enumerate(weights) for name, w in layer.items()}}


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=str)
def test_case_F5(pool, order):
    """Megatron-LM#5735, sgl-kernel-npu#801: a receive buffer that backward needs is reused by the next layer or micro-batch."""
    layers = [problem(random_routes(1, 1, 4), 4, 32, 16, "cpu", torch.float32, seed=s) for s in (1, 2)]
    batches = [problem(random_routes(30, 2, 4, seed=s), 4, 32, 16, "cpu", torch.float32, seed=s) for s in (3, 4)]
    got = joined(pool.run(_layers, 2, layers, batches, [0, 10, 30], order))
    alone = pool.run(_layers, 1, layers, batches, [0, 30], order)[0]
    assert_same_bits(got, alone)


# ---- F10, F17, F19 ----

@DTYPES
def test_case_F10(pool, dtype):
    """vllm-ascend#17162, Megatron-LM#6229, torchtitan#2207, DeepEP#99: all tokens to one rank, after a balanced step: nothing dropped or cut."""
    balanced = problem(random_routes(120, 2, 4), 4, 64, 32, "cpu", dtype)
    skewed = problem(torch.full((400, 2), 3), 4, 64, 32, "cpu", dtype, seed=1)
    skewed.check()
    assert_ranks_equal_one(pool, [(balanced, [0, 60, 120]), (skewed, [0, 190, 400]), (balanced, [0, 60, 120])])


def _linear_before(process_group, p, matrix, cuts):
    group = mok.ExpertGroup(process_group, timeout_s=TIMEOUT_S)
    mine = share(p, cuts, group.rank)
    weight = matrix.clone().requires_grad_()
    router = torch.eye(8, 64, dtype=matrix.dtype).requires_grad_()
    h = mine["x"] @ weight.T
    scores = torch.sigmoid(mine["x"] @ router.T).gather(1, mine["topk_ids"])
    mok.moe(h, mine["topk_ids"], scores, mine["w_gate_up"], mine["w_down"], group=group).backward(mine.dy)
    return {"linear": weight.grad, "router": router.grad}


def test_case_F17(pool):
    """Automodel#1260, transformers#48205: gradients that must be summed over ranks were not. Those of a Linear and a router before the layer:
    each rank has its own tokens' share, and the shares add up to one rank's gradient."""
    p = problem(random_routes(48, 2, 8), 8, 64, 32, "cpu", torch.float64)
    matrix = torch.randn(64, 64, dtype=torch.float64) / 8
    alone = pool.run(_linear_before, 1, p, matrix, [0, 48])[0]
    shares = pool.run(_linear_before, 2, p, matrix, [0, 20, 48])
    for name, whole in alone.items():
        total = shares[0][name] + shares[1][name]
        assert (total - whole).norm() < 1e-13 * whole.norm() and all(part[name].norm() > 0.1 * whole.norm() for part in shares)


def test_case_F19(pool):
    """TensorRT-LLM#14222: the same tokens on every rank are computed once for each rank that brings them. Right answers: every copy its own."""
    one = problem(random_routes(20, 2, 4), 4, 64, 32, "cpu", torch.float32)
    twice = one.changed(dy=torch.cat([one.dy, one.dy]), **{name: torch.cat([one[name], one[name]]) for name in TOKEN})
    alone = assert_ranks_equal_one(pool, [(twice, [0, 20, 40])])[0]
    single = one.run()
    for name in ("y", "x", "topk_weights"):
        assert_same_bits({name: alone[name][:20]}, {name: single[name]})
        assert_same_bits({name: alone[name][20:]}, {name: single[name]})
