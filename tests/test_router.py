"""The router: bits of routes, tie order, NaN, groups, losses and their gradients, balancing, padding, replay."""
from __future__ import annotations

import math

import pytest
import torch
from torch.library import opcheck

import mok
from mok import router_ops as ops
from mok.router import Router

# 2053 * 5 = 10265 routes; H and E odd, so that rows start at every offset within a vector register
T, H, E, K = 2053, 129, 37, 5


def make(dtype=torch.float32, seed=0, **changes) -> Router:
    settings = {"hidden_size": H, "intermediate_size": 8, "num_experts": E, "top_k": K} | changes
    router = Router(mok.MoEConfig(**settings), dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        router.weight.copy_(torch.randn(router.weight.shape, generator=generator) * 0.3)
    return router


def run(router, x, coefficients, **arguments):
    """Routes and gradients of sum(coefficients * topk_weights)."""
    x = x.detach().requires_grad_()
    router.weight.grad = None
    routes = router(x, **arguments)
    (routes.topk_weights * coefficients).sum().backward()
    return {**routes._asdict(), "dx": x.grad, "dweight": router.weight.grad}


def assert_same_bits(a, b, names):
    for name in names:
        assert torch.equal(a[name], b[name]), f"{name} differs in {(a[name] != b[name]).sum()} of {a[name].numel()}"


PER_TOKEN = ("topk_ids", "topk_weights", "logits", "probs", "dx")


# ---- P1, P2, P4 ----

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_routes_keep_their_bits(dtype, score_function):
    router = make(dtype, score_function=score_function, num_experts=36, num_expert_groups=4, topk_groups=3)
    x, coefficients = torch.randn(T, H).to(dtype), torch.randn(T, K)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        base = run(router, x, coefficients)
        for count in (1, 2, 3):                                                  # P1 (2 again) and P2
            torch.set_num_threads(count)
            assert_same_bits(run(router, x, coefficients), base, (*PER_TOKEN, "dweight"))
        torch.set_num_threads(2)
        # P4: odd offsets, one token, a size below any tile, another order
        for pick in (slice(1, None), slice(0, 1), slice(777, 778), slice(3, 66), slice(2000, None), torch.randperm(T)):
            assert_same_bits(run(router, x[pick], coefficients[pick]), {n: base[n][pick] for n in PER_TOKEN}, PER_TOKEN)
    finally:
        torch.set_num_threads(threads)


def test_exp_and_log_do_not_depend_on_position():
    x = -torch.rand(100_003) * 30
    for values, function in ((x, ops.exp_nonpositive), (1 - x, ops.log_positive)):
        for dtype in (torch.float32, torch.float64):
            whole = function(values.to(dtype))
            for start, stop in ((1, None), (3, 70), (99_990, None), (5, 6), (32_767, 32_770)):
                assert torch.equal(function(values.to(dtype)[start:stop]), whole[start:stop])


def test_exp_and_log_are_accurate():
    x64 = -torch.rand(50_000, dtype=torch.float64) * 700
    assert ((ops.exp_nonpositive(x64) - x64.exp()) / x64.exp()).abs().max() < 5e-16
    x32 = -torch.rand(50_000) * 80
    truth = x32.double().exp()
    assert ((ops.exp_nonpositive(x32).double() - truth) / truth).abs().max() < 0.52 * 2**-23
    special = ops.exp_nonpositive(torch.tensor([-math.inf, math.nan, 0.0, -0.0, -709.0, -1e30]))
    assert special[1].isnan() and torch.equal(special[[0, 2, 3, 4, 5]], torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0]))
    y64 = torch.rand(50_000, dtype=torch.float64) * 1000 + 1.001
    assert ((ops.log_positive(y64) - y64.log()) / y64.log()).abs().max() < 1e-13 and ops.log_positive(torch.ones(1)) == 0


def test_fold_sum_worked_example():
    a, b, c, d, e = values = torch.tensor([1e8, 1.0, -1e8, 3.0, 1e-3])
    assert ops.fold_sum(values, 0) == ((a + d) + c) + (b + e)
    assert ops.fold_sum(torch.ones(3, 0), 1).tolist() == [[0.0]] * 3


# ---- order of the choice ----

def choose(probs, top_k, bias=None, mask=None, num_groups=1, topk_groups=1):
    return ops.select_experts(torch.as_tensor(probs), bias, mask, top_k, num_groups, topk_groups)


def test_ties_go_to_the_lower_id():
    assert choose([[0.1, 0.3, 0.3, 0.1, 0.3]], 4).tolist() == [[1, 2, 4, 0]]
    assert choose([[-0.0, 0.0, -0.0, 0.0]], 3).tolist() == [[0, 1, 2]]
    equal = torch.full((1000, 128), 1 / 128)                                      # long rows of ties, where an unstable sort gives itself away
    assert (choose(equal, 6) == torch.arange(6)).all()
    # the groups come out best first, the tie of their experts by id
    assert choose([[0.2, 0.5, 0.5, 0.6, 0.1, 0.1]], 3, num_groups=3, topk_groups=2).tolist() == [[3, 1, 2]]
    # two groups of equal score: the lower group; inside it the lower id
    assert choose([[0.0, 0.0, 0.5, 0.5, 0.5, 0.5]], 2, num_groups=3, topk_groups=1).tolist() == [[2, 3]]
    assert choose([[0.5, 0.5, 0.0, 0.0, 0.5, 0.5]], 3, num_groups=3, topk_groups=2).tolist() == [[0, 1, 4]]


def test_equal_router_rows_tie_exactly():
    router = make(num_experts=128, top_k=6)
    with torch.no_grad():
        router.weight.copy_(router.weight[:1].expand(128, H))
    assert (router(torch.randn(500, H)).topk_ids == torch.arange(6)).all()


@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_nan_scores_stay_in_their_token(groups, score_function):
    router = make(num_experts=32, score_function=score_function, num_expert_groups=groups[0], topk_groups=groups[1])
    x = torch.randn(300, H)
    clean = router(x)
    x[7], x[8, 3], x[9] = math.nan, math.inf, 1e38
    routes = router(x)
    others = torch.ones(300, dtype=torch.bool)
    others[7:10] = False
    for name in ("topk_ids", "topk_weights"):
        assert torch.equal(getattr(routes, name)[others], getattr(clean, name)[others])
    assert ((routes.topk_ids >= 0) & (routes.topk_ids < 32)).all()
    assert all(len(set(row)) == K for row in routes.topk_ids.tolist())
    assert routes.topk_weights[7].isnan().all()


def test_nan_ranks_last_and_never_leaves_its_group():
    nan = math.nan
    assert choose([[nan, 0.1, nan, 0.3]], 3).tolist() == [[3, 1, 0]]
    # group 1 wins on 0.9 + 0.8, and its NaN is chosen third rather than a number of another group
    assert choose([[0.1, 0.2, 0.3, nan, 0.9, 0.8]], 3, num_groups=2, topk_groups=1).tolist() == [[4, 5, 3]]


def groups_oracle(probs, bias, top_k, num_groups, topk_groups):
    """Plain loops over Python floats: what DeepSeek-V3's text says."""
    chosen = []
    for row in probs.double().tolist():
        scores = [p + b for p, b in zip(row, bias.double().tolist(), strict=True)]
        size = len(row) // num_groups
        group_scores = [sum(sorted(scores[g * size:(g + 1) * size])[-2:]) for g in range(num_groups)]
        best_groups = sorted(range(num_groups), key=lambda g: (-group_scores[g], g))[:topk_groups]
        allowed = [e for e in range(len(row)) if e // size in best_groups]
        chosen.append(sorted(allowed, key=lambda e: (-scores[e], e))[:top_k])
    return chosen


@pytest.mark.parametrize("num_experts,num_groups,topk_groups,top_k", [(32, 8, 4, 6), (12, 4, 2, 5), (16, 16, 5, 5), (6, 2, 1, 3), (10, 1, 1, 10)])
def test_group_limited_routing_against_plain_loops(num_experts, num_groups, topk_groups, top_k):
    # multiples of 1/64: sums are exact in every precision, and there are many ties
    probs = torch.randint(0, 20, (400, num_experts)) / 64
    bias = torch.randint(-8, 8, (num_experts,)) / 64
    assert choose(probs, top_k, bias, None, num_groups, topk_groups).tolist() == groups_oracle(probs, bias, top_k, num_groups, topk_groups)


# ---- weights ----

def test_weights_against_float64():
    for score_function in ("softmax", "sigmoid"):
        for normalise in (False, True):
            router = make(score_function=score_function, norm_topk_prob=normalise, routed_scaling_factor=2.5)
            routes = router(torch.randn(200, H))
            logits = routes.logits.double()
            p = (logits.softmax(-1) if score_function == "softmax" else logits.sigmoid()).gather(1, routes.topk_ids)
            truth = 2.5 * (p / p.sum(-1, keepdim=True) if normalise else p)
            torch.testing.assert_close(routes.topk_weights.double(), truth, rtol=3e-6, atol=0)


def test_weights_of_scores_that_underflow_are_zero_not_nan():
    weights = ops.route_weights(ops.router_probs(torch.full((1, 4), -500.0), "sigmoid"), torch.tensor([[0, 1]]), True, 1.0)
    assert weights.tolist() == [[0.0, 0.0]]


def test_bias_moves_the_choice_and_not_the_weights():
    router = make(balance="bias", score_function="sigmoid", norm_topk_prob=False)
    x = torch.randn(50, H)
    before = router(x)
    router.selection_bias[11] = 10.0
    after = router(x)
    assert (after.topk_ids[:, 0] == 11).all() and not (before.topk_ids[:, 0] == 11).all()
    assert torch.equal(after.topk_weights, before.probs.gather(1, after.topk_ids))


# ---- losses ----

def losses_oracle(logits, topk_ids, mask, score_function, num_experts, top_k):
    """Balance and z-loss in float64 by autograd, from the formulas in docs/router.md."""
    keep = torch.ones(logits.shape[0], dtype=torch.bool) if mask is None else ~mask
    logits, ids = logits[keep], topk_ids[keep]
    n = logits.shape[0]
    scores = logits.softmax(-1) if score_function == "softmax" else logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    fraction = torch.stack([(ids == e).sum() for e in range(num_experts)]) / (n * top_k)
    balance = num_experts * sum(fraction[e].double() * scores[:, e].sum() / n for e in range(num_experts))
    return balance, (torch.logsumexp(logits, -1) ** 2).mean()


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("masked", [False, True])
def test_losses_against_float64(score_function, masked):
    router = make(score_function=score_function, aux_loss_coef=0.5, z_loss_coef=0.25)
    x = torch.randn(333, H)
    mask = None
    if masked:
        mask = torch.rand(333) < 0.4
        x[mask.nonzero()[0]] = math.nan                                           # garbage in padding must not reach the losses
    routes = router(x, mask)
    routes.logits.retain_grad()
    counts = torch.stack([(routes.topk_ids == e).sum() for e in range(E)])
    loss = router.loss(routes, counts, mask)
    loss.backward()
    logits = routes.logits.detach().double().requires_grad_()
    balance, z = losses_oracle(logits, routes.topk_ids, mask, score_function, E, K)
    truth = 0.5 * balance + 0.25 * z
    truth.backward()
    assert abs(loss.item() - truth.item()) < 1e-6 * truth.item()
    truth_grad = torch.zeros_like(logits) if logits.grad is None else logits.grad
    error = (routes.logits.grad.double() - truth_grad).norm() / truth_grad.norm()
    assert error < 1e-6
    if masked:
        assert (routes.logits.grad[mask] == 0).all()


def test_balance_loss_is_one_when_balanced_and_E_over_K_when_collapsed():
    ids, probs = torch.arange(8).view(4, 2), torch.full((4, 8), 1 / 8)
    assert ops.balance_loss(probs, torch.bincount(ids.view(-1), minlength=8), None, 2, False).item() == pytest.approx(1.0)
    collapsed = torch.zeros(4, 8)
    collapsed[:, :2] = 0.5
    assert ops.balance_loss(collapsed, torch.tensor([4, 4, 0, 0, 0, 0, 0, 0]), None, 2, False).item() == pytest.approx(8 / 2)


def test_losses_do_not_depend_on_threads():
    router = make(z_loss_coef=0.1)
    x = torch.randn(T, H)
    seen = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            router.weight.grad = None
            routes = router(x)
            loss = router.loss(routes, torch.bincount(routes.topk_ids.view(-1), minlength=E))
            loss.backward()
            seen.append((loss.detach(), router.weight.grad))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in seen[1:] for a, b in zip(seen[0], other, strict=True))


def test_gradcheck():
    def leaf(*shape):
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    ids = torch.tensor([[0, 3, 3], [2, -1, 1], [-1, -1, -1], [4, 0, 2]])            # a repeated expert and -1, as a replay can hold
    counts, mask = torch.tensor([3, 0, 2, 4, 3]), torch.tensor([False, True, False, False])
    probs = leaf(4, 5).detach().abs().add(0.1).requires_grad_()
    assert torch.autograd.gradcheck(ops.router_scores, (leaf(4, 3), leaf(5, 3)))
    for score_function in ("softmax", "sigmoid"):
        assert torch.autograd.gradcheck(lambda t, s=score_function: ops.router_probs(t, s), leaf(4, 5))
    for flag in (False, True):
        assert torch.autograd.gradcheck(lambda p, f=flag: ops.route_weights(p, ids, f, 1.7), probs)
        assert torch.autograd.gradcheck(lambda p, f=flag: ops.balance_loss(p, counts, mask, 3, f), probs)
    assert torch.autograd.gradcheck(lambda t: ops.z_loss(t, mask), leaf(4, 5))
    assert torch.autograd.gradcheck(lambda t: ops.z_loss(t, None), leaf(4, 5))


def test_no_tokens():
    for mask in (None, torch.zeros(0, dtype=torch.bool)):
        router = make(z_loss_coef=0.1)
        routes = router(torch.randn(0, H, requires_grad=True), mask)
        loss = router.loss(routes, torch.zeros(E, dtype=torch.int64), mask) + routes.topk_weights.sum()
        loss.backward()
        assert loss.item() == 0 and (router.weight.grad == 0).all()


def test_all_tokens_masked():
    router = make(z_loss_coef=0.1)
    mask = torch.ones(9, dtype=torch.bool)
    routes = router(torch.randn(9, H), mask)
    loss = router.loss(routes, torch.zeros(E, dtype=torch.int64), mask)
    loss.backward()
    assert (routes.topk_ids == -1).all() and (routes.topk_weights == 0).all() and loss.item() == 0 and (router.weight.grad == 0).all()


# ---- balancing without a loss ----

def test_update_bias_worked_example():
    router = make(balance="bias", num_experts=4, top_k=2, bias_update_rate=0.5)
    router.load.copy_(torch.tensor([10, 2, 4, 0]))                                # mean 4
    router.update_bias()
    assert router.selection_bias.tolist() == [-0.5, 0.5, 0.0, 0.5] and router.load.tolist() == [0, 0, 0, 0]
    router.update_bias()                                                          # no load: nothing moves
    assert router.selection_bias.tolist() == [-0.5, 0.5, 0.0, 0.5]


def test_bias_balancing_makes_a_skewed_load_uniform():
    router = make(balance="bias", score_function="sigmoid", num_experts=8, top_k=2, bias_update_rate=0.01)
    generator = torch.Generator().manual_seed(1)

    def imbalance() -> float:
        """Largest load over mean load of one step of 512 tokens, whose constant first feature favours the high ids."""
        x = torch.randn(512, H, generator=generator) * (10 / H) ** 0.5
        x[:, 0] = 1
        counts = torch.bincount(router(x).topk_ids.view(-1), minlength=8)
        router.count(counts)
        router.update_bias()
        return (counts.max() / counts.double().mean()).item()

    with torch.no_grad():
        router.weight[:, 0] = torch.linspace(-1.5, 1.5, 8)
        loads = [imbalance() for _ in range(80)]
    assert loads[0] > 2 and sum(loads[-10:]) / 10 < 1.25, (loads[0], loads[-10:])


def test_load_counts_in_training_mode_only_and_adds_up_over_micro_batches():
    router = make(balance="bias")
    counts = torch.arange(E)
    router.count(counts)
    router.count(counts)
    router.eval()
    router.count(counts)
    assert torch.equal(router.load, 2 * counts)


def test_bias_stays_fp32_when_the_layer_changes_dtype():
    router = make(balance="bias")
    router.selection_bias.fill_(1.001)
    router.bfloat16()
    assert router.weight.dtype == torch.bfloat16 and router.selection_bias.dtype == torch.float32
    assert (router.selection_bias == torch.tensor(1.001)).all()


# ---- padding and replay ----

def test_padding_leaves_other_tokens_alone():
    router = make()
    x = torch.randn(100, H)
    mask = torch.rand(100) < 0.3
    plain, masked = router(x), router(x, mask)
    assert (masked.topk_ids[mask] == -1).all() and (masked.topk_weights[mask] == 0).all()
    for name in ("topk_ids", "topk_weights"):
        assert torch.equal(getattr(plain, name)[~mask], getattr(masked, name)[~mask])


def test_replayed_ids_get_fresh_weights_and_gradients():
    router = make()
    x, coefficients = torch.randn(64, H), torch.randn(64, K)
    first = run(router, x, coefficients)
    again = run(router, x, coefficients, topk_ids=first["topk_ids"].to(torch.int32))
    assert_same_bits(again, first, ("topk_weights", "dx", "dweight"))
    with torch.no_grad():
        router.weight.mul_(-1)
    other = run(router, x, coefficients, topk_ids=first["topk_ids"])
    assert torch.equal(other["topk_ids"], first["topk_ids"]) and not torch.equal(other["topk_weights"], first["topk_weights"])


# ---- compile ----

def test_ops_pass_opcheck():
    logits, x, weight = torch.randn(6, 5, requires_grad=True), torch.randn(6, 7, requires_grad=True), torch.randn(5, 7, requires_grad=True)
    probs = logits.detach().softmax(-1).requires_grad_()
    ids, counts, mask = torch.tensor([[0, 1], [2, 3], [4, 0], [-1, -1], [1, 2], [3, 3]]), torch.arange(5), torch.tensor([False] * 5 + [True])
    opcheck(ops.router_scores, (x, weight))
    opcheck(ops.router_probs, (logits, "softmax"))
    opcheck(ops.router_probs, (logits, "sigmoid"))
    opcheck(ops.select_experts, (probs.detach(), None, mask, 2, 1, 1))
    opcheck(ops.route_weights, (probs, ids, True, 2.0))
    opcheck(ops.balance_loss, (probs, counts, mask, 2, True))
    opcheck(ops.z_loss, (logits, None))
    opcheck(ops.count_load, (torch.zeros(5, dtype=torch.int64), counts))


def test_compiled_router_equals_eager():
    router = make(num_experts=36, num_expert_groups=4, topk_groups=2, balance="bias", z_loss_coef=0.1)
    compiled = torch.compile(router, fullgraph=True, backend="aot_eager")
    for tokens in (100, 101, 64, 0):
        x, coefficients = torch.randn(tokens, H), torch.randn(tokens, K)
        eager = run(router, x, coefficients)
        x2 = x.requires_grad_()
        router.weight.grad = None
        routes = compiled(x2)
        (routes.topk_weights * coefficients).sum().backward()
        assert_same_bits({**routes._asdict(), "dx": x2.grad, "dweight": router.weight.grad}, eager, (*PER_TOKEN, "dweight"))


# ---- on a GPU ----

@pytest.mark.gpu
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_routes_keep_their_bits_on_a_gpu(score_function):
    router = make(score_function=score_function, num_experts=36, num_expert_groups=4, topk_groups=3).cuda()
    x, coefficients = torch.randn(T, H, device="cuda"), torch.randn(T, K, device="cuda")
    base = run(router, x, coefficients)
    for _ in range(3):
        assert_same_bits(run(router, x, coefficients), base, (*PER_TOKEN, "dweight"))
    for pick in (slice(1, None), slice(777, 778), slice(3, 66), torch.randperm(T, device="cuda")):
        assert_same_bits(run(router, x[pick], coefficients[pick]), {n: base[n][pick] for n in PER_TOKEN}, PER_TOKEN)


@pytest.mark.gpu
def test_choice_on_a_gpu_is_the_cpu_choice():
    """Equal scores in, equal ids out: ties, -0.0, NaN of both signs and groups included."""
    scores = torch.randint(-3, 20, (4000, 48)) / 64
    scores[scores == 0] = -0.0
    scores[torch.rand(scores.shape) < 0.1] = math.nan
    scores[torch.rand(scores.shape) < 0.1] = -math.nan
    bias = torch.randint(-8, 8, (48,)) / 64
    for groups in ((1, 1), (6, 2)):
        on_gpu = ops.select_experts(scores.cuda(), bias.cuda(), None, 6, *groups)
        assert torch.equal(on_gpu.cpu(), ops.select_experts(scores, bias, None, 6, *groups))
