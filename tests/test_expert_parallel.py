"""Expert parallelism over a process group: the same bits at every number of ranks (P3), and every mismatch an error on all of them."""
from __future__ import annotations

import pytest
import torch

import mok
from mok.plan import experts_of_rank
from tests.ranks import RankPool


@pytest.fixture(scope="module")
def pool():
    pool = RankPool(4)
    yield pool
    pool.close()


def global_case(T, H, I, E, K, dtype, seed=0, biases=True, shared=True, skew=False):
    """Everything on one rank: random routes with -1s and repeated experts, expert 1 empty (or, skewed, every route to expert 0)."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape, scale=1.0, dtype=dtype):
        return (torch.randn(*shape, generator=g) * scale).to(dtype)

    ids = torch.randint(-1, E, (T, K), generator=g)
    ids[ids == 1] = 0
    if skew:
        ids.zero_()
    case = {"x": randn(T, H), "topk_ids": ids, "topk_weights": randn(T, K, dtype=torch.float32), "w_gate_up": randn(E, 2 * I, H, scale=H**-0.5),
            "w_down": randn(E, H, I, scale=I**-0.5), "b_gate_up": randn(E, 2 * I) if biases else None, "b_down": randn(E, H) if biases else None,
            "dy": randn(T, H), "shared": [(randn(14, H, scale=H**-0.5), randn(H, 7, scale=0.4), randn(H))] if shared else []}
    return case


TOKEN, EXPERT = ("x", "topk_weights"), ("w_gate_up", "w_down", "b_gate_up", "b_down")


def run_case(case, group=None, tokens=slice(None), experts=slice(None), **options):
    """y and every gradient of one pass over a slice of the tokens and of the experts."""
    leaf = {name: case[name][tokens].clone().requires_grad_() for name in TOKEN}
    leaf |= {name: case[name][experts].clone().requires_grad_() for name in EXPERT if case[name] is not None}
    shared = [mok.SharedExpert(*(part.clone().requires_grad_() for part in parts)) for parts in case["shared"]]
    y = mok.moe(topk_ids=case["topk_ids"][tokens], shared=shared, group=group, **leaf, **options)
    y.backward(case["dy"][tokens])
    return {"y": y.detach()} | {name: tensor.grad for name, tensor in leaf.items()}


def on_rank(process_group, case, cuts, options):
    group = mok.ExpertGroup(process_group, timeout_s=30)
    E = case["w_gate_up"].shape[0]
    first, count = experts_of_rank(E, group.size, group.rank)
    return run_case(case, group, slice(cuts[group.rank], cuts[group.rank + 1]), slice(first, first + count), **options)


def assert_ranks_equal_one(pool, case, cuts, **options):
    """P3: the ranks' results, laid side by side, have the bits of one rank's."""
    W = len(cuts) - 1
    alone = run_case(case, **options)
    parts = pool.run(on_rank, W, case, cuts, options)
    for name, whole in alone.items():
        joined = torch.cat([part[name] for part in parts])
        assert torch.equal(joined, whole), f"{name} differs at W={W} in {(joined != whole).sum()} of {whole.numel()} elements"


# T*K >= 10^4 routes and odd H, I as the bitwise rule demands; cuts give unequal tokens, zero tokens on a rank, and everything on the last
CUTS = {1: [0, 2503], 2: [0, 901, 2503], 3: [0, 0, 1500, 2503], 4: [0, 700, 701, 2503, 2503]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("W", [1, 2, 3, 4])
def test_any_number_of_ranks_gives_the_same_bits(pool, W, dtype):
    """E = 5 is divisible by no W > 1."""
    assert_ranks_equal_one(pool, global_case(2503, 72, 23, 5, 4, dtype), CUTS[W])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputed_z_has_the_same_bits_on_several_ranks(pool, dtype):
    """Rows of x travel again in backward, and z of the rows that arrive is made as forward made it."""
    case = global_case(2503, 72, 23, 5, 4, dtype)
    alone, parts = run_case(case), pool.run(on_rank, 3, case, CUTS[3], {"recompute": "z"})
    for name, whole in alone.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), whole), name


@pytest.mark.parametrize("activation", ["swiglu_oai", "geglu", "reglu"])
def test_activations_on_several_ranks(pool, activation):
    assert_ranks_equal_one(pool, global_case(97, 40, 12, 7, 3, torch.float32), [0, 13, 97], activation=activation)


@pytest.mark.parametrize("cuts", [[0, 64, 64], [0, 0, 64], [0, 0, 0]], ids=["second idle", "first idle", "nobody"])
def test_all_routes_to_one_rank_and_idle_ranks(pool, cuts):
    case = global_case(cuts[-1], 32, 16, 4, 2, torch.float32, skew=True, biases=False, shared=False)
    assert_ranks_equal_one(pool, case, cuts)


def _wants(process_group, case, cuts):
    """Gradients of x alone, of the weights alone, and none at all, in the same order on both ranks."""
    group = mok.ExpertGroup(process_group, timeout_s=30)
    first, count = experts_of_rank(case["w_gate_up"].shape[0], group.size, group.rank)
    tokens, experts = slice(cuts[group.rank], cuts[group.rank + 1]), slice(first, first + count)
    results = {}
    for wanted in (("x",), ("w_gate_up", "w_down"), ()):
        leaf = {name: case[name][tokens].clone().requires_grad_(name in wanted) for name in TOKEN}
        leaf |= {name: case[name][experts].clone().requires_grad_(name in wanted) for name in EXPERT}
        y = mok.moe(topk_ids=case["topk_ids"][tokens], group=group, **leaf)
        assert y.requires_grad == bool(wanted)
        if wanted:
            y.backward(case["dy"][tokens])
        results[wanted] = {name: leaf[name].grad for name in wanted}
        assert all((tensor.grad is None) == (name not in wanted) for name, tensor in leaf.items())
    return results


def test_frozen_inputs_on_several_ranks(pool):
    case = global_case(150, 24, 8, 4, 2, torch.float32, shared=False)
    whole = run_case(case)
    cuts = [0, 60, 150]
    parts = pool.run(_wants, 2, case, cuts)
    for wanted in (("x",), ("w_gate_up", "w_down")):
        for name in wanted:
            assert torch.equal(torch.cat([part[wanted][name] for part in parts]), whole[name]), name


def _two_layers_in_flight(process_group, case, cuts):
    """F5: forwards of two layers and two micro-batches before any backward, one group for all."""
    group = mok.ExpertGroup(process_group, timeout_s=30)
    first, count = experts_of_rank(case["w_gate_up"].shape[0], group.size, group.rank)
    tokens, experts = slice(cuts[group.rank], cuts[group.rank + 1]), slice(first, first + count)
    runs = []
    for layer in (1, 2):
        for scale in (1.0, -0.5):
            x = (case["x"][tokens] * scale).requires_grad_()
            weights = {name: (case[name][experts] * layer).requires_grad_() for name in EXPERT}
            y = mok.moe(x, case["topk_ids"][tokens], case["topk_weights"][tokens], group=group, layer_key=layer, **weights)
            runs.append((x, weights, y))
    for _, _, y in runs:
        y.backward(case["dy"][tokens])
    return [{"x": x.grad} | {name: weight.grad for name, weight in weights.items()} for x, weights, _ in runs]


def test_several_forwards_before_any_backward(pool):
    case = global_case(120, 24, 8, 4, 2, torch.float32, shared=False)
    cuts = [0, 50, 120]
    parts = pool.run(_two_layers_in_flight, 2, case, cuts)
    for i, (layer, scale) in enumerate([(1, 1.0), (1, -0.5), (2, 1.0), (2, -0.5)]):
        alone = run_case({**case, "x": case["x"] * scale, **{name: case[name] * layer for name in EXPERT}})
        for name in ("x", *EXPERT):
            assert torch.equal(torch.cat([part[i][name] for part in parts]), alone[name]), (i, name)


def _disagree(process_group, how):
    """What this rank's call raises when the ranks differ in one thing; then one more call, which must work: a mismatch kills no group."""
    group = mok.ExpertGroup(process_group, timeout_s=30)
    odd = group.rank == group.size - 1
    case = global_case(8, 16, 4, 4, 2, torch.float32, biases=False, shared=False)
    first, count = experts_of_rank(4, group.size, group.rank)
    x, w = case["x"], {name: case[name][first:first + count].clone().requires_grad_() for name in ("w_gate_up", "w_down")}
    ids, weights, options = case["topk_ids"], case["topk_weights"], {}
    if odd and how == "H":
        x, w = x[:, :8], {"w_gate_up": w["w_gate_up"][:, :, :8], "w_down": w["w_down"][:, :8]}
    if odd and how == "I":
        w = {"w_gate_up": w["w_gate_up"][:, :4], "w_down": w["w_down"][:, :, :2]}
    if odd and how == "K":
        ids, weights = ids[:, :1], weights[:, :1]
    if odd and how == "dtype":
        x = x.double()
    if odd and how == "layer_key":
        options["layer_key"] = 5
    if odd and how == "recompute":
        options["recompute"] = "z"
    if odd and how == "wanted gradients":
        w["w_down"] = w["w_down"].detach()
    if odd and how == "topk_ids":
        ids = ids.clone()
        ids[3, 1] = 4
    if odd and how == "experts":
        w = {name: torch.cat([value, value]) for name, value in w.items()}
    if odd and how == "w_down":
        w["w_down"] = w["w_down"][:, :3]
    try:
        mok.moe(x, ids, weights, **w, group=group, **options)
    except ValueError as error:
        message = str(error)
    else:
        message = "nothing raised"
    again = on_rank_again(group, case)
    return message, again


def on_rank_again(group, case):
    first, count = experts_of_rank(4, group.size, group.rank)
    weights = {name: case[name][first:first + count] for name in ("w_gate_up", "w_down")}
    return mok.moe(case["x"], case["topk_ids"], case["topk_weights"], **weights, group=group)


@pytest.mark.parametrize("how", ["H", "I", "K", "dtype", "layer_key", "recompute", "wanted gradients", "topk_ids", "experts", "w_down"])
def test_a_difference_raises_on_every_rank_and_the_group_lives_on(pool, how):
    case = global_case(8, 16, 4, 4, 2, torch.float32, biases=False, shared=False)
    expected = mok.moe(case["x"], case["topk_ids"], case["topk_weights"], case["w_gate_up"], case["w_down"])
    named = "w_gate_up" if how == "experts" else how
    for message, again in pool.run(_disagree, 3, how):
        assert named in message and message != "nothing raised", message
        assert torch.equal(again, expected)


def _different_pass(process_group):
    """Rank 0 goes backward through its layer while the others call forward again."""
    group = mok.ExpertGroup(process_group, timeout_s=30)
    case = global_case(8, 16, 4, 4, 2, torch.float32, biases=False, shared=False)
    first, count = experts_of_rank(4, group.size, group.rank)
    experts = slice(first, first + count)
    arguments = (case["x"].requires_grad_(), case["topk_ids"], case["topk_weights"], case["w_gate_up"][experts], case["w_down"][experts])
    y = mok.moe(*arguments, group=group)
    try:
        y.sum().backward() if group.rank == 0 else mok.moe(*arguments, group=group)
    except ValueError as error:
        return str(error)
    return "nothing raised"


def test_another_pass_on_one_rank_raises_on_all(pool):
    for message in pool.run(_different_pass, 2):
        assert "pass must be the same" in message and "backward" in message


def _layer(process_group, x, seed):
    """mok.MoE with a router on several ranks; its parameters are seeded by the global expert id."""
    group = mok.ExpertGroup(process_group, timeout_s=30)
    cuts = [*[0, 30, 50, 50][:group.size], 90]
    layer = mok.MoE(mok.MoEConfig(hidden_size=16, intermediate_size=8, num_experts=6, top_k=2, seed=seed), group=group)
    mine = x[cuts[group.rank]:cuts[group.rank + 1]].clone().requires_grad_()
    y = layer(mine)
    y.square().sum().backward()
    return {"y": y.detach(), "x": mine.grad, "w_gate_up": layer.w_gate_up.grad, "w_down": layer.w_down.grad, "counts": layer.tokens_per_expert}


def test_the_layer_with_its_router_is_the_same_on_every_number_of_ranks(pool):
    x = torch.randn(90, 16)
    layer = mok.MoE(mok.MoEConfig(hidden_size=16, intermediate_size=8, num_experts=6, top_k=2, seed=3))
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    y.square().sum().backward()
    alone = {"y": y.detach(), "x": leaf.grad, "w_gate_up": layer.w_gate_up.grad, "w_down": layer.w_down.grad, "counts": layer.tokens_per_expert}
    for W in (2, 4):
        parts = pool.run(_layer, W, x, 3)
        for name, whole in alone.items():
            assert torch.equal(torch.cat([part[name] for part in parts]), whole), (W, name)


def _in_another_default_device(process_group, *arguments):
    with torch.device("meta"):
        return on_rank(process_group, *arguments)


def test_the_default_device_moves_nothing_of_a_pass_on_several_ranks(pool):
    case, cuts = global_case(30, 16, 8, 5, 2, torch.float32), [0, 11, 30]
    for options in ({}, {"activation": "geglu"}):
        expected = pool.run(on_rank, 2, case, cuts, options)
        for result, other in zip(pool.run(_in_another_default_device, 2, case, cuts, options), expected, strict=True):
            assert all(torch.equal(result[name], other[name]) for name in expected[0])


def _layers_of_two_sizes(process_group):
    """Rank 0's layer has 6 experts and 3 of them here, rank 1's has 4 and 2: together 3 + 2, as if both had 5."""
    group = mok.ExpertGroup(process_group, timeout_s=30)
    layer = mok.MoE(mok.MoEConfig(hidden_size=16, intermediate_size=8, num_experts=4 if group.rank else 6, top_k=1), group=group)
    try:
        layer(torch.randn(3, 16), routes=(torch.tensor([[0], [2], [3]]), None))
    except ValueError as error:
        return str(error)
    return "nothing raised"


def test_layers_of_different_numbers_of_experts_raise_even_where_their_blocks_fit(pool):
    for message in pool.run(_layers_of_two_sizes, 2):
        assert "num_experts must be the same on all ranks" in message and "rank 0: 6, rank 1: 4" in message, message


def _crossed_backwards(process_group):
    """Two forwards of one layer; rank 1 runs their backwards the other way round: (what was said, whether the group lives on)."""
    group, rank = mok.ExpertGroup(process_group), torch.distributed.get_rank(process_group)
    torch.manual_seed(rank)
    leaves = [torch.randn(5, 8).requires_grad_() for _ in range(2)]
    ids, weights = torch.tensor([[0], [1], [0], [1], [0]]), torch.ones(5, 1)
    up, down = torch.randn(1, 8, 8), torch.randn(1, 8, 4)
    ys = [mok.moe(x, ids, weights, up, down, group=group) for x in leaves]
    with pytest.raises(ValueError) as caught:
        ys[rank].sum().backward()
    ys[1 - rank].detach_()
    again = mok.moe(leaves[0], ids, weights, up, down, group=group)
    again.sum().backward()
    return str(caught.value), bool(leaves[0].grad.abs().sum() > 0)


def test_backwards_of_different_forwards_raise_on_every_rank(pool):
    """Equal shapes, so nothing else would notice: the gradients would be those of a mixture."""
    outcomes = pool.run(_crossed_backwards, 2)
    assert len({said for said, _ in outcomes}) == 1 and "the same forward pass on all ranks" in outcomes[0][0] and "rank 1: call" in outcomes[0][0]
    assert all(lives for _, lives in outcomes)


def _copied_over_a_dead_plan(process_group):
    """What a group knows of offsets, of offsets copied to where those were, and of offsets copied elsewhere."""
    group, memory = mok.ExpertGroup(process_group), bytearray(64)
    offsets = torch.frombuffer(memory, dtype=torch.int64)
    group.remember_forward(offsets)
    before = group.forward_of(offsets)
    del offsets
    copied = torch.frombuffer(memory, dtype=torch.int64)
    return before, group.forward_of(copied), group.forward_of(copied.clone())


def test_a_copied_plan_is_not_taken_for_an_older_one_at_its_address(pool):
    """Offloaded activations are copies in memory that freed plans left; ranks would disagree on which forward a backward follows."""
    assert all(known == (0, None, None) for known in pool.run(_copied_over_a_dead_plan, 2))


def _pickled(process_group):
    import pickle

    group = mok.ExpertGroup(process_group)
    layer = pickle.loads(pickle.dumps(mok.MoE(mok.MoEConfig(16, 8, 4, 2), group=group)))
    return layer.group is group


def test_a_layer_with_a_group_is_pickled_without_the_runtime(pool):
    assert pool.run(_pickled, 2) == [True, True]
