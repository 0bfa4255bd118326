"""Cases C: routes that name no expert, the same expert twice, or none at all; routing weights' precision; awkward token counts."""
from __future__ import annotations

import pytest
import torch

import mok
from tests.cases.case_support import (
    WEIGHTS,
    Problem,
    assert_exactly_zero,
    assert_same_bits,
    collect,
    problem,
    random_routes,
    routes_with_counts,
)

# ---- C1 ----

@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("ids", [
    [[0, 1], [-1, 2], [3, -1], [-1, -1], [1, 1], [-1, 0], [2, -1], [3, 0]],     # none, one and both of a token's routes
    [[-1, 3]] + [[-1, -1]] * 7,                                                  # one route in all
    [[-1, -1]] * 8,                                                              # no route at all
    [[-1, 0]] * 8,                                                               # -1 in front of expert 0 everywhere: 0 is a real expert
], ids=["mixed", "one", "none", "before-0"])
def test_case_C1(device, dtype, ids, ids_dtype):
    """DeepGEMM#38, TransformerEngine#2908, aiter#4636, transformers#40545: -1 crashed, sorted to the head, or ran as expert 0."""
    p = problem(torch.tensor(ids, dtype=ids_dtype), 4, 64, 32, device, dtype, biases=True)
    got = p.check()
    absent = p["topk_ids"] < 0
    silent = absent.all(-1)
    assert_exactly_zero(got["topk_weights"][absent], "dw of a -1 route")
    assert_exactly_zero(got["y"][silent], "y of a token without experts")
    assert_exactly_zero(got["x"][silent], "dx of a token without experts")
    for name in WEIGHTS:
        for e in set(range(4)) - set(p["topk_ids"].flatten().tolist()):
            assert_exactly_zero(got[name][e], f"d{name}[{e}]")


def test_case_C1_masked_routes_change_nothing_for_the_others(device, dtype):
    """The kind of C1: adding a column of -1 routes, or tokens that have only -1, changes no bit of the rest."""
    ids = random_routes(50, 2, 4, masked=0.3, seed=1)
    p = problem(ids, 4, 64, 32, device, dtype, biases=True)
    got = p.run()
    more = torch.cat([p["topk_ids"][:, :1], torch.full((50, 1), -1, device=device), p["topk_ids"][:, 1:]], dim=1)
    weights = torch.cat([p["topk_weights"][:, :1], torch.full((50, 1), 7.0, device=device), p["topk_weights"][:, 1:]], dim=1)
    wider = p.changed(topk_ids=more, topk_weights=weights).run()
    assert_exactly_zero(wider["topk_weights"][:, 1], "dw of a -1 route")
    wider["topk_weights"] = wider["topk_weights"][:, [0, 2]]
    assert_same_bits(wider, got)


@pytest.mark.parametrize("bad", [4, -2, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_case_C1_ids_out_of_range(device, bad, ids_dtype):
    """aiter#4636's illegal access: an id outside -1..E-1 raises naming topk_ids (on a GPU at the next look), and no memory is touched by it."""
    ids = random_routes(8, 2, 4, seed=2).to(ids_dtype)
    wrong = ids.clone()
    wrong[5, 1] = bad
    p = problem(ids, 4, 64, 32, device, torch.float32)
    if device == "cpu":
        with pytest.raises(ValueError, match="topk_ids"):
            p.changed(topk_ids=wrong).run()
    else:
        as_masked = wrong.clone()
        as_masked[5, 1] = -1
        got = p.changed(topk_ids=wrong.to(device)).run()
        torch.cuda.synchronize()
        with pytest.raises(ValueError, match="topk_ids"):
            mok.check()
        assert_same_bits(got, p.changed(topk_ids=as_masked.to(device)).run())
    p.check()                                                   # and the next call works


# ---- C2 ----

@pytest.mark.parametrize("leading", [(0,), (3, 0), (0, 5)], ids=str)
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_case_C2(device, x_dtype, leading):
    """sglang#23609, tokenspeed#415, sglang#38780, sglang#25137: no tokens at all, forward and backward; the next op works."""
    p = problem(torch.zeros(0, 2, dtype=torch.int64), 4, 64, 32, device, x_dtype, biases=True, shared=(32, 16))
    shaped = p.changed(x=p["x"].view(*leading, 64), topk_ids=p["topk_ids"].view(*leading, 2), topk_weights=p["topk_weights"].view(*leading, 2),
                       dy=p.dy.view(*leading, 64))
    got = shaped.run()
    assert got["y"].shape == (*leading, 64) and got["y"].dtype == x_dtype and got["x"].shape == (*leading, 64)
    _, leaves = p.leaves()
    for name in set(got) - {"y", "x", "topk_weights"}:
        assert got[name].shape == leaves[name].shape and got[name].dtype == leaves[name].dtype
        assert_exactly_zero(got[name], f"d{name}")
    problem(random_routes(3, 2, 4), 4, 64, 32, device, x_dtype).check()


@pytest.mark.parametrize("balance", ["aux_loss", "bias", "none"])
def test_case_C2_the_whole_layer(device, dtype, balance):
    """The kind of C2 in the router: finite losses, zero gradients of full shape for the router too."""
    layer = mok.MoE(mok.MoEConfig(64, 32, 4, 2, balance=balance, z_loss_coef=0.1, shared_intermediate_sizes=(16,), shared_gated=True), device=device,
                    dtype=dtype)
    x = torch.empty(2, 0, 64, device=device, dtype=dtype, requires_grad=True)
    y = layer(x)
    (y.sum() + layer.aux_loss).backward()
    assert y.shape == x.shape and x.grad.shape == x.shape and torch.isfinite(layer.aux_loss) and layer.tokens_per_expert.tolist() == [0] * 4
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert_exactly_zero(parameter.grad, name)


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_case_C2_compiled(device, dtype, backend):
    """C2 under torch.compile, after a call with tokens and before another."""
    layer = torch.compile(mok.moe, backend=backend, fullgraph=True)
    for T in (5, 0, 6, 0):
        p = problem(random_routes(T, 2, 4, seed=T), 4, 64, 32, device, dtype, biases=True)
        assert_same_bits(p.run(layer), p.run())


# ---- C4 ----

@pytest.mark.parametrize("ids", [
    torch.ones(66, 6, dtype=torch.int64),                                                          # the report's: all routes to expert 1
    torch.cat([torch.full((30, 6), 1), torch.tensor([[0, 1, 1, 3, 0, -1]]).expand(36, 6)]),        # beside ordinary and masked ones
    torch.randint(0, 2, (66, 6), generator=torch.Generator().manual_seed(0)),                      # every token repeats
], ids=["all", "mixed", "random"])
def test_case_C4(device, dtype, ids):
    """slime#822, vLLM#39391: the same expert twice in one token's routes was counted once; both count."""
    p = problem(ids, 4, 64, 32, device, dtype, biases=True)
    p.check()
    layer = mok.MoE(mok.MoEConfig(64, 32, 4, 4, balance="none"), device=device, dtype=dtype)
    layer(p["x"], routes=(p["topk_ids"][:, :4], p["topk_weights"][:, :4]))
    assert layer.tokens_per_expert.tolist() == [int((ids[:, :4] == e).sum()) for e in range(4)]


def test_case_C4_counts(device):
    """C4's numbers: T = 66, K = 6, every route to expert 1 is 396 rows, none lost and none merged."""
    ids = torch.ones(66, 6, dtype=torch.int64, device=device)
    p = problem(ids, 8, 64, 32, device, torch.float32)
    layer = mok.MoE(mok.MoEConfig(64, 32, 8, 6, balance="none"), device=device)
    layer(p["x"], routes=(ids, p["topk_weights"]))
    assert layer.tokens_per_expert.tolist() == [0, 396, 0, 0, 0, 0, 0, 0]


# ---- C5 ----

def test_case_C5(device, dtype):
    """sglang#33764, sglang#39351, vllm-ascend#17068: routing weights rounded to bf16 on the way.

    Two experts with opposite outputs and weights that differ by less than a bf16 step: rounded weights cancel, or leave a multiple of the step.
    """
    p = problem(torch.tensor([[0, 1]]).expand(40, 2), 2, 64, 32, device, dtype)
    p = p.changed(w_gate_up=p["w_gate_up"][:1].expand(2, -1, -1), w_down=torch.stack([p["w_down"][0], -p["w_down"][0]]))
    one = p.changed(topk_weights=torch.tensor([[1.0, 0.0]], device=device).expand(40, 2)).run()["y"].double()          # the expert's own output
    for a, b in ((1 / 3, 1 / 3 + 2**-12), (1e-3 + 2**-14, 1e-3), (0.7, 0.7 - 2**-13)):
        weights = torch.tensor([[a, b]], dtype=torch.float32, device=device)
        y = p.changed(topk_weights=weights.expand(40, 2)).run()["y"].double()
        exact = one * (weights[0, 0].double() - weights[0, 1].double())
        fp32_sum = torch.finfo(torch.float32).eps * max(a, b) / abs(a - b)            # of w_0 * y, which the difference cancels
        assert (y - exact).norm() / exact.norm() < torch.finfo(dtype).eps + fp32_sum


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_case_C5_gradient_in_the_weights_dtype(device, dtype, weight_dtype):
    """C5's other half: dw comes back in w's own dtype, computed in fp32 and rounded once."""
    p = problem(random_routes(40, 8, 16, seed=3), 16, 64, 32, device, dtype)
    plain = p.run()
    values = p["topk_weights"].to(weight_dtype)
    got = p.changed(topk_weights=values).run()
    expected = p.changed(topk_weights=values.float()).run()
    expected["topk_weights"] = expected["topk_weights"].to(weight_dtype)
    assert_same_bits(got, expected)
    assert got["topk_weights"].dtype == weight_dtype and got["y"].dtype == dtype
    assert_same_bits({"w": got["topk_weights"]}, {"w": plain["topk_weights"].to(weight_dtype)})       # dw does not depend on w
    if weight_dtype == torch.float32:                                                                  # and was not rounded to fewer bits before
        dw = got["topk_weights"]
        assert (dw.bfloat16().float() != dw)[p["topk_ids"] >= 0].float().mean() > 0.9


def test_case_C5_weights_are_not_rounded_in_backward(device, dtype):
    """w = 1/3 in bf16 is 0.2 % more; so much more would all gradients be along those for w = 1, however noisy each element is."""
    p = problem(torch.randint(0, 4, (300, 1), generator=torch.Generator().manual_seed(5)), 4, 64, 32, device, dtype)
    weights = torch.ones(300, 1, dtype=torch.float32, device=device)
    whole, third = (p.changed(topk_weights=weights * w).run() for w in (1.0, 1 / 3))
    for name in ("x", "w_gate_up", "w_down"):
        along, found = whole[name].double().flatten(), third[name].double().flatten()
        assert abs(torch.dot(along, found) / torch.dot(along, along) * 3 - 1) < 2**-11, name


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_case_C5_the_router_picks_the_same_experts_as_float64(device, autocast):
    """C5 at its size (E=128, K=8, H=7168, bf16 x): bf16 logits picked another set for 5% of the tokens; fp32 scores pick float64's."""
    config = mok.MoEConfig(7168, 16, 128, 8, balance="none")
    layer = mok.MoE(config, device="meta", dtype=torch.bfloat16)
    router = layer.router.to_empty(device=device)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        router.weight.copy_(torch.randn(128, 7168, generator=generator) * 7168**-0.5)
    x = torch.randn(300, 7168, generator=generator).to(device, torch.bfloat16)
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=autocast):
        routes = router(x)
    logits = x.double() @ router.weight.double().T
    expected = logits.topk(8).indices.sort().values
    assert torch.equal(routes.topk_ids.sort().values, expected)
    assert routes.logits.dtype == torch.float32 and ((routes.logits.double() - logits).abs().max() < 1e-5)
    coarse = (x @ router.weight.T).float().topk(8).indices.sort().values               # the fault, so that the input is known to show it
    assert (coarse != expected).any(-1).float().mean() > 0.01


# ---- C8 ----

def test_case_C8(device, dtype):
    """tt-metal#50669, DeepGEMM#268, Megatron-LM#6086: every T from 0 to 129 and around two tiles, one after the other, shrinking too."""
    T_max = 257
    whole = problem(random_routes(T_max, 2, 8, seed=4), 8, 128, 128, device, dtype)
    per_token = ("x", "topk_ids", "topk_weights")

    def first(T: int) -> Problem:
        return whole.changed(dy=whole.dy[:T], **{name: whole[name][:T] for name in per_token})

    got = whole.check()
    for T in [*range(130), 255, 256, *range(128, -1, -16)]:
        p = first(T)
        part = p.run()
        # a token's results are those of the whole batch to the bit; the weight gradients are summed anew
        assert_same_bits({name: part[name] for name in ("y", "x", "topk_weights")}, {name: got[name][:T] for name in ("y", "x", "topk_weights")})
        names = ("w_gate_up", "w_down")
        if T == 0:
            for name in names:
                assert_exactly_zero(part[name], f"d{name} at T = 0")
        elif T % 8 < 2 or T > 120:
            p.compare(part, names)
        else:
            busy = p["topk_ids"].unique()
            assert all(torch.isfinite(part[name]).all() and part[name][busy].flatten(1).any(1).all() for name in names)


# ---- C10 ----

@pytest.mark.parametrize("masked", [0.0, 0.3, 1.0])
def test_case_C10(device, dtype, masked):
    """xtuner#2053, torchtitan#3413: counts that disagree with the rows that are moved. Counts = rows in the plan = valid routes."""
    ids = random_routes(301, 3, 16, masked=masked, seed=5).to(device)
    layer = mok.MoE(mok.MoEConfig(64, 32, 16, 3, balance="bias"), device=device, dtype=dtype)
    p = problem(ids, 16, 64, 32, device, dtype)
    layer(p["x"], routes=(ids, p["topk_weights"]))
    valid = int((ids >= 0).sum())
    plan = mok.plan.RoutingPlan.build(ids, 16)
    assert layer.tokens_per_expert.tolist() == [int((ids == e).sum()) for e in range(16)]
    assert int(layer.tokens_per_expert.sum()) == valid == int((plan.row_to_slot >= 0).sum()) == int((plan.slot_to_row >= 0).sum())
    assert layer.router.load.tolist() == layer.tokens_per_expert.tolist()


def test_case_C10_padding_tokens_are_neither_counted_nor_moved(device, dtype):
    """The kind of C10 with a padding mask: the layer counts what it computes, and padding tokens get nothing."""
    layer = mok.MoE(mok.MoEConfig(64, 32, 16, 3, balance="aux_loss"), device=device, dtype=dtype)
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(6)).to(device, dtype)
    mask = torch.arange(40, device=device) % 3 == 0
    y = layer(x, padding_mask=mask)
    assert int(layer.tokens_per_expert.sum()) == int((~mask).sum()) * 3 == int((layer.routes[0] >= 0).sum())
    assert_exactly_zero(y[mask], "y of padding tokens")
    alone = layer(x[~mask])
    assert_same_bits({"y": y[~mask]}, {"y": alone})


def test_case_C10_one_expert_takes_everything(device, dtype):
    """Counts at the extreme: every route of 300 tokens to the last expert, then none to it."""
    for counts in ([0, 0, 0, 600], [599, 0, 1, 0]):
        p = problem(routes_with_counts(counts, K=2), 4, 64, 32, device, dtype)
        arguments, leaves = p.leaves()
        arguments["shared"] = []
        y, per_expert = mok.function.moe_with_counts(**arguments)
        y.backward(p.dy)
        assert per_expert.tolist() == counts
        p.compare(collect(y, leaves))
