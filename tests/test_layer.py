"""mok.MoE: against the specification, initialisation, copies, checkpointing, autocast, compile, bad input."""
from __future__ import annotations

import copy
import functools
import math
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import mok
from mok.plan import experts_of_rank
from mok.reference import moe_reference
from mok.runtime import Runtime
from tests.ranks import RankPool

SETTINGS = {"hidden_size": 40, "intermediate_size": 24, "num_experts": 8, "top_k": 2}   # small, no dimension equal to another or to a tile
SELECTIVE = functools.partial(create_selective_checkpoint_contexts, mok.checkpoint_policy)

VARIANTS = {
    "plain": {},
    "deepseek": {"score_function": "sigmoid", "balance": "bias", "routed_scaling_factor": 2.5, "num_expert_groups": 4, "topk_groups": 2,
                 "shared_intermediate_sizes": (24,)},
    "biases": {"expert_bias": True, "activation": "swiglu_oai", "norm_topk_prob": False, "z_loss_coef": 0.1},
    "shared": {"shared_intermediate_sizes": (8, 56), "shared_gated": True, "activation": "geglu", "aux_loss_coef": 0.3},
    "one expert": {"num_experts": 1, "top_k": 1},
    "all experts": {"top_k": 8, "score_function": "sigmoid"},
}


def build(dtype=torch.float32, **changes) -> mok.MoE:
    layer = mok.MoE(mok.MoEConfig(**(SETTINGS | changes)), dtype=dtype)
    with torch.no_grad():                                                        # biases and gates start at 0: give them something to do
        for name, parameter in layer.named_parameters():
            if name.startswith("b_") or name.endswith("gate_weight"):
                parameter.normal_()
    return layer


def grads(layer) -> dict[str, torch.Tensor | None]:
    return {name: p.grad for name, p in layer.named_parameters()}


def step(layer, x, call=None, **arguments) -> dict[str, torch.Tensor]:
    """y, dx, aux_loss and all parameter gradients of <y, c> + aux_loss, c fixed."""
    layer.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    y = (layer if call is None else call)(x, **arguments)
    c = torch.randn(y.shape, generator=torch.Generator().manual_seed(5))
    ((y * c).sum() + layer.aux_loss).backward()
    return {"y": y.detach(), "dx": x.grad, "aux_loss": layer.aux_loss.detach(), **grads(layer)}


def same_bits(a, b) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def reference_step(layer, x) -> dict[str, torch.Tensor]:
    """The same step in float64 from mok.reference, torch's own softmax and the choice that the layer made."""
    c, K = layer.config, layer.config.top_k
    p = {name: v.detach().double().requires_grad_() for name, v in layer.named_parameters()}
    x = x.detach().double().requires_grad_()
    tokens, ids = x.reshape(-1, c.hidden_size), layer.routes[0]
    logits = tokens @ p["router.weight"].T
    probs = logits.softmax(-1) if c.score_function == "softmax" else logits.sigmoid()
    weights = probs.gather(1, ids)
    if c.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    shared = [(p[f"shared_experts.{i}.w_gate_up"], p[f"shared_experts.{i}.w_down"], p.get(f"shared_experts.{i}.gate_weight"))
              for i in range(len(c.shared_intermediate_sizes))]
    y = moe_reference(tokens, ids, weights * c.routed_scaling_factor, p["w_gate_up"], p["w_down"], p.get("b_gate_up"), p.get("b_down"), shared,
                      c.activation, c.swiglu_limit).view(x.shape)
    aux = c.z_loss_coef * logits.logsumexp(-1).square().mean()
    if c.balance == "aux_loss":
        shares = probs / probs.sum(-1, keepdim=True) if c.score_function == "sigmoid" else probs
        f = torch.bincount(ids.view(-1), minlength=c.num_experts).double() / (K * ids.shape[0])
        aux = aux + c.aux_loss_coef * c.num_experts * (f * shares.mean(0)).sum()
    coefficients = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).double()
    ((y * coefficients).sum() + aux).backward()
    return {"y": y.detach(), "dx": x.grad, "aux_loss": aux.detach(), **{name: torch.zeros_like(v) if v.grad is None else v.grad for name, v in p.items()}}


# ---- the mathematics ----

@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-11), (torch.float32, 2e-5), (torch.bfloat16, 0.03)])
def test_layer_against_reference(variant, dtype, tolerance):
    layer = build(dtype, **VARIANTS[variant])
    x = torch.randn(3, 29, 40).to(dtype)
    ours, truth = step(layer, x), reference_step(layer, x)
    for name, value in truth.items():
        error = (ours[name].double() - value).norm() / value.norm().clamp(min=1e-30)
        assert error < tolerance or value.norm() == ours[name].norm() == 0, (name, error.item())
    expected = torch.bincount(layer.routes[0].view(-1), minlength=layer.config.num_experts)
    assert torch.equal(layer.tokens_per_expert.long(), expected) and layer.tokens_per_expert.dtype == torch.int32
    assert ours["y"].dtype == dtype and ours["dx"].dtype == dtype


def test_choice_is_the_float64_choice():
    layer = build(torch.float32)
    x = torch.randn(500, 40)
    layer(x)
    logits = x.double() @ layer.router.weight.detach().double().T
    best = logits.sort(-1, descending=True)
    clear = ((best.values[:, :2] - best.values[:, 1:3]) > 1e-5).all(-1)           # two routes: the first three logits decide
    assert clear.sum() > 480 and torch.equal(layer.routes[0][clear], best.indices[clear, :2])


def test_any_leading_shape_and_strides():
    layer = build()
    x = torch.randn(2, 3, 5, 40)
    y = layer(x)
    assert y.shape == x.shape and torch.equal(layer(x.reshape(30, 40)), y.view(30, 40))
    strided = torch.randn(40, 30).T
    assert torch.equal(layer(strided), layer(strided.contiguous()))
    assert torch.equal(layer(x[0, 0, 0]), y[0, 0, 0])                             # (H,) is one token


def test_no_tokens():
    layer = build(shared_intermediate_sizes=(8,), z_loss_coef=0.1)
    result = step(layer, torch.randn(0, 40))
    assert result["y"].shape == (0, 40) and result["aux_loss"] == 0 and (layer.tokens_per_expert == 0).all()
    assert all((value == 0).all() for name, value in result.items() if value is not None)
    assert all(value is not None for value in result.values())


# ---- promises ----

def test_layer_keeps_its_bits():
    """P1, P2, P4 of the module: 2053 * 5 routes, odd sizes; without losses, which are of the whole batch."""
    layer = build(hidden_size=129, intermediate_size=71, num_experts=9, top_k=5, balance="none", shared_intermediate_sizes=(33,), shared_gated=True)
    x = torch.randn(2053, 129)
    c = torch.randn(2053, 129)

    def token_results(pick):
        tokens = x[pick].requires_grad_()
        layer.zero_grad()
        y = layer(tokens)
        (y * c[pick]).sum().backward()
        return {"y": y.detach(), "dx": tokens.grad, "ids": layer.routes[0], "weights": layer.routes[1]}

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        base = token_results(slice(None))
        base_grads = {name: g.clone() for name, g in grads(layer).items()}
        for count in (2, 1, 3):
            torch.set_num_threads(count)
            same_bits(token_results(slice(None)), base)
            same_bits(grads(layer), base_grads)
        torch.set_num_threads(2)
        for pick in (slice(1, None), slice(1000, 1001), slice(5, 70), torch.randperm(2053)):
            same_bits(token_results(pick), {name: value[pick] for name, value in base.items()})
    finally:
        torch.set_num_threads(threads)


# ---- initialisation ----

class FakeGroup(mok.ExpertGroup):
    """What a layer asks of an ExpertGroup when it is built and copied, without processes."""

    def __init__(self, size, rank, key):
        self.size, self.rank, self.key = size, rank, key

    def local_experts(self, num_experts):
        return experts_of_rank(num_experts, self.size, self.rank)

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        return known_group, (self.key,)


KNOWN_GROUPS = {}


def known_group(key):
    return KNOWN_GROUPS.get(key)


def test_every_number_of_ranks_builds_the_same_experts():
    config = mok.MoEConfig(**(SETTINGS | {"num_experts": 7, "shared_intermediate_sizes": (8,)}), seed=3)
    torch.manual_seed(1)
    whole = mok.MoE(config)
    for size in (2, 3, 7):
        torch.manual_seed(size)                                                   # torch's global seed must play no part
        ranks = [mok.MoE(config, group=FakeGroup(size, rank, 1000 + size)) for rank in range(size)]
        assert torch.equal(torch.cat([r.w_gate_up for r in ranks]), whole.w_gate_up)
        assert torch.equal(torch.cat([r.w_down for r in ranks]), whole.w_down)
        assert all(torch.equal(r.router.weight, whole.router.weight) for r in ranks)
        assert all(torch.equal(r.shared_experts[0].w_gate_up, whole.shared_experts[0].w_gate_up) for r in ranks)


def test_initial_values():
    settings = SETTINGS | {"hidden_size": 160, "intermediate_size": 96}
    layer = mok.MoE(mok.MoEConfig(**settings, expert_bias=True))
    for weight, fan_in in ((layer.w_gate_up, 160), (layer.w_down, 96), (layer.router.weight, 160)):
        assert weight.std().item() == pytest.approx(fan_in**-0.5, rel=0.05) and abs(weight.mean().item()) < 0.1 * fan_in**-0.5
    assert (layer.b_gate_up == 0).all() and (layer.b_down == 0).all()
    weights = [w.flatten()[:1000] for w in (*layer.w_gate_up, *layer.w_down, layer.router.weight)]
    assert not any(torch.allclose(a[:400] / a.std(), b[:400] / b.std()) for i, a in enumerate(weights) for b in weights[:i])   # nothing is drawn twice
    for change in ({"seed": 1}, {"layer_index": 1}):
        other = mok.MoE(mok.MoEConfig(**settings, **change))
        assert not torch.equal(other.w_down, layer.w_down) and not torch.equal(other.router.weight, layer.router.weight)
    assert mok.MoE(mok.MoEConfig(**settings, initializer_range=0.02)).w_down.std().item() == pytest.approx(0.02, rel=0.05)
    assert torch.equal(mok.MoE(mok.MoEConfig(**settings), dtype=torch.bfloat16).w_down, layer.w_down.bfloat16())


@pytest.mark.parametrize("how", ["argument", "context"])
def test_meta_then_to_empty_then_reset_equals_direct_construction(how):
    config = mok.MoEConfig(**SETTINGS, balance="bias", expert_bias=True, shared_intermediate_sizes=(8,), shared_gated=True)
    direct = mok.MoE(config)
    if how == "argument":
        layer = mok.MoE(config, device="meta")
    else:
        with torch.device("meta"):
            layer = mok.MoE(config)
    assert all(p.is_meta for p in layer.parameters())
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*layer.parameters(), layer.router.load, layer.router.selection_bias):
            tensor.fill_(77)
    layer.reset_parameters()
    same_bits(dict(layer.named_parameters()) | dict(layer.named_buffers()), dict(direct.named_parameters()) | dict(direct.named_buffers()))


@pytest.mark.parametrize("variant", ["deepseek", "biases", "shared"])
def test_the_default_device_moves_nothing_of_a_pass(variant):
    """`torch.set_default_device("cuda")` beside a layer on the CPU; the meta device stands for any other one than the layer's."""
    layer, x = build(**VARIANTS[variant]), torch.randn(9, SETTINGS["hidden_size"])
    results = []
    for device in ("cpu", "meta"):
        layer.zero_grad(set_to_none=True)
        leaf = x.clone().requires_grad_()
        with torch.device(device):
            y = layer(leaf)
            (y.square().sum() + layer.aux_loss).backward()
        results.append({"y": y.detach(), "dx": leaf.grad, **grads(layer)})
    same_bits(*results)


def test_an_error_word_is_host_memory_whatever_the_default_device():
    device, runtime = torch.device("cpu", 7), Runtime()
    with torch.device("meta"):
        assert runtime.error_word(device).tolist() == [0]


def test_state_dict_round_trip():
    layer = build(**VARIANTS["deepseek"], expert_bias=True)
    layer.router.selection_bias.normal_()
    assert set(layer.state_dict()) == {"w_gate_up", "w_down", "b_gate_up", "b_down", "router.weight", "router.selection_bias",
                                       "shared_experts.0.w_gate_up", "shared_experts.0.w_down"}
    other = mok.MoE(mok.MoEConfig(**(SETTINGS | VARIANTS["deepseek"]), expert_bias=True, seed=9))
    other.load_state_dict(layer.state_dict())
    x = torch.randn(50, 40)
    assert torch.equal(other(x), layer(x))


def test_layer_key_is_the_construction_number_in_its_group():
    first = mok.MoE(mok.MoEConfig(**SETTINGS)).layer_key
    grouped = [mok.MoE(mok.MoEConfig(**SETTINGS), group=FakeGroup(2, 0, 555)).layer_key for _ in range(3)]
    assert mok.MoE(mok.MoEConfig(**SETTINGS)).layer_key == first + 1 and grouped == [1, 2, 3]


# ---- copies ----

@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copy_after_a_forward(duplicate):
    layer = build(shared_intermediate_sizes=(8,))
    x = torch.randn(20, 40, requires_grad=True)
    y = layer(x * 2)                                                              # aux_loss and routes hold a graph now
    twin = duplicate(layer)
    assert twin.aux_loss is None and twin.routes is None and twin.tokens_per_expert is None and layer.aux_loss is not None
    assert twin.layer_key == layer.layer_key + 1
    assert torch.equal(twin(x * 2), y)
    with torch.no_grad():
        twin.w_down.zero_()
    assert torch.equal(layer(x * 2), y) and not torch.equal(twin(x * 2), y)
    y.sum().backward()                                                            # the original's graph is whole


def test_group_is_attached_again():
    group = KNOWN_GROUPS[777] = FakeGroup(2, 1, 777)
    layer = mok.MoE(mok.MoEConfig(**SETTINGS), group=group)
    twins = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    assert all(twin.group is group for twin in twins) and [layer.layer_key, *(twin.layer_key for twin in twins)] == [1, 2, 3]
    KNOWN_GROUPS.clear()
    orphan = pickle.loads(pickle.dumps(layer))                                    # as in a process that has no such group
    with pytest.raises(ValueError, match=r"group=None must be an ExpertGroup: the layer holds experts 4\.\.7 of 8; call attach_group"):
        orphan(torch.randn(2, 40))
    with pytest.raises(ValueError, match=r"group owns experts 0\.\.3 on this rank and must own the layer's, 4\.\.7"):
        orphan.attach_group(FakeGroup(2, 0, 778))
    orphan.attach_group(FakeGroup(2, 1, 779))
    assert orphan.group.key == 779 and "experts=4..7 of 8" in repr(orphan)


# ---- checkpointing ----

def checkpoints():
    return {"plain": {}, "selective": {"context_fn": SELECTIVE}}


@pytest.mark.parametrize("kind", ["plain", "selective"])
@pytest.mark.parametrize("ties", [False, True])
def test_case_E1(kind, ties):
    """A checkpointed layer gives the bits of one that is not, exact ties included."""
    layer = build(num_experts=128, top_k=6, z_loss_coef=0.01, score_function="sigmoid")
    x = torch.randn(97, 40)
    if ties:
        x = x[:1].expand(97, 40)
        with torch.no_grad():
            layer.router.weight.zero_()
    base = step(layer, x)
    ours = step(layer, x, call=lambda t: checkpoint(layer, t, use_reentrant=False, **checkpoints()[kind]))
    same_bits(ours, base)
    if ties:
        assert (layer.routes[0] == torch.arange(6)).all()


def test_case_E1_noise_before_the_layer():
    """An operation before the layer that does not repeat its bits: the kept routes stand; without them no shape depends on the counts."""
    layer = build(num_experts=128, top_k=6, balance="none")
    x = torch.randn(97, 40)
    recomputed = []
    layer.router.register_forward_hook(lambda module, args, routes: recomputed.append(routes))

    def noisy(t):
        return layer(t + 0.5 * torch.randn_like(t))

    for kind, arguments in checkpoints().items():
        recomputed.clear()
        result = step(layer, x, call=lambda t, a=arguments: checkpoint(noisy, t, use_reentrant=False, preserve_rng_state=False, **a))
        assert all(value.isfinite().all() for value in result.values())
        first, second = recomputed
        assert not torch.equal(first.logits, second.logits)
        if kind == "selective":
            assert torch.equal(first.topk_ids, second.topk_ids) and torch.equal(first.topk_weights, second.topk_weights)
        else:
            assert not torch.equal(first.topk_ids, second.topk_ids)


@pytest.mark.parametrize("kind,reentrant", [("plain", False), ("plain", True), ("selective", False)])
def test_case_E2(kind, reentrant):
    """Loads are counted once although the forward runs twice, and the results of the first forward stand."""
    layer = build(balance="bias", z_loss_coef=0.1)                                # the z-loss keeps recomputation going to the layer's end
    calls = []
    layer.router.register_forward_hook(lambda *_: calls.append(1))
    for batch in range(1, 4):
        x = torch.randn(50, 40, requires_grad=True)
        y = checkpoint(layer, x, use_reentrant=reentrant, **checkpoints()[kind])
        before = layer.aux_loss
        (y.sum() + before).backward()
        assert len(calls) == 2 * batch and layer.router.load.sum() == 100 * batch and layer.tokens_per_expert.sum() == 100
        assert layer.aux_loss is before
    layer.update_bias()
    assert layer.router.load.sum() == 0 and layer.router.selection_bias.abs().max() == pytest.approx(layer.config.bias_update_rate)


# ---- training ----

def test_case_E3():
    """Autocast: experts run as if cast by hand, the router in fp32 on x as it was; gradients in each parameter's dtype."""
    layer = build(shared_intermediate_sizes=(8,), z_loss_coef=0.1)
    x = torch.randn(60, 40)
    with torch.autocast("cpu", torch.bfloat16):
        result = step_forward_only(layer, x)
    y, routes = result
    (y.float().sum() + layer.aux_loss).backward()                                 # outside autocast
    assert y.dtype == torch.float32 and all(p.grad.dtype == p.dtype and p.grad.isfinite().all() for p in layer.parameters())
    layer(x)
    assert all(torch.equal(a, b) for a, b in zip(routes, layer.routes, strict=True))
    by_hand = mok.moe(x.bfloat16(), *routes, layer.w_gate_up.bfloat16(), layer.w_down.bfloat16(),
                      shared=[mok.SharedExpert(layer.shared_experts[0].w_gate_up.bfloat16(), layer.shared_experts[0].w_down.bfloat16())])
    assert torch.equal(by_hand.float(), y)


def step_forward_only(layer, x):
    return layer(x), layer.routes


def test_case_E5():
    """Frozen router, frozen experts, frozen x: None exactly there, all else unchanged."""
    layer = build(shared_intermediate_sizes=(8,))
    x = torch.randn(60, 40)
    base = step(layer, x)
    for frozen in (["router.weight"], ["w_gate_up", "w_down"], ["router.weight", "w_gate_up", "shared_experts.0.w_down"]):
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name not in frozen)
        ours = step(layer, x)
        for name, value in ours.items():
            assert (value is None) if name in frozen else torch.equal(value, base[name]), (frozen, name)
    for parameter in layer.parameters():
        parameter.requires_grad_(True)
    y = layer(x)                                                                  # x needs no gradient
    (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(5))).sum().add(layer.aux_loss).backward()
    with torch.no_grad():
        assert not layer(x).requires_grad and not layer.aux_loss.requires_grad


def test_mixed_dtypes():
    """A bf16 layer on fp32 x computes in fp32 with its rounded weights; an fp32 layer on bf16 x computes its experts in bf16."""
    x = torch.randn(60, 40)
    layer = build(torch.bfloat16)
    wide = build(torch.float32)
    wide.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), wide(x)) and layer(x).dtype == torch.float32
    result = step(wide, x.bfloat16())
    assert result["y"].dtype == torch.bfloat16 and result["w_down"].dtype == torch.float32 and result["router.weight"].dtype == torch.float32
    assert torch.equal(wide(x.bfloat16()), layer(x.bfloat16()))


def test_padding_mask():
    layer = build(z_loss_coef=0.1, balance="aux_loss", aux_loss_coef=1.0)
    x = torch.randn(4, 15, 40)
    mask = torch.rand(4, 15) < 0.4
    y = layer(x, padding_mask=mask)
    kept = ~mask.view(-1)
    masked = step(layer, x, padding_mask=mask)
    assert (y[mask] == 0).all() and (masked["dx"][mask] == 0).all() and layer.tokens_per_expert.sum() == 2 * kept.sum()
    short = layer(x[~mask])
    assert torch.equal(short, y[~mask]) and layer.aux_loss.item() == pytest.approx(masked["aux_loss"].item(), rel=1e-6)
    x[mask] = math.nan                                                            # garbage in padding reaches nothing
    same_bits({k: v for k, v in step(layer, x, padding_mask=mask).items() if k not in ("dx",)}, {k: v for k, v in masked.items() if k not in ("dx",)})


def test_replay():
    layer = build(z_loss_coef=0.1)
    x = torch.randn(3, 20, 40)
    base = step(layer, x)
    ids, weights = layer.routes
    again = step(layer, x, routes=(ids.view(3, 20, 2), None))                     # ids replayed: the router still learns
    same_bits(again, base)
    layer.zero_grad(set_to_none=True)
    fixed = step(layer, x, routes=(ids, weights))                                 # both replayed: the router does not run
    assert torch.equal(fixed["y"], base["y"]) and fixed["router.weight"] is None and fixed["aux_loss"] == 0
    assert torch.equal(fixed["w_down"], base["w_down"])
    given = weights.clone().requires_grad_()
    layer(x, routes=(ids, given)).sum().backward()
    assert given.grad is not None and given.grad.abs().sum() > 0
    partial = ids.clone()
    partial[5], partial[6, 0], partial[7] = -1, -1, 3                             # none, one, and the same expert twice
    y = layer(x, routes=(partial, None)).view(60, 40)
    assert (y[5] == 0).all() and layer.tokens_per_expert.sum() == 117
    torch.testing.assert_close(y[7], layer(x, routes=(torch.full_like(ids, 3), weights * 0 + 0.5)).view(60, 40)[7], rtol=1e-5, atol=1e-6)


# ---- several ranks ----

RANKED = SETTINGS | {"num_experts": 5, "balance": "bias", "shared_intermediate_sizes": (8,)}
TOKENS = (23, 0, 40)                                                              # tokens of each rank: one has none


def rank_step(process_group, x, lengths):
    """One step on this rank's part of x, and what goes wrong when one rank's input is bad."""
    torch.manual_seed(0)
    group = mok.ExpertGroup(process_group, timeout_s=100)
    layer = mok.MoE(mok.MoEConfig(**RANKED), group=group)
    start = sum(lengths[:group.rank])
    mine = x[start:start + lengths[group.rank]].requires_grad_()
    y = layer(mine)
    (y * torch.linspace(-1, 1, 40)).sum().backward()
    layer.update_bias()
    try:
        layer(mine[:, :39] if group.rank == 1 else mine)
        error = "none"
    except ValueError as caught:
        error = str(caught)
    return {"y": y.detach(), "dx": mine.grad, "w_gate_up": layer.w_gate_up.grad, "w_down": layer.w_down.grad, "tokens": layer.tokens_per_expert,
            "bias": layer.router.selection_bias, "error": error}


def test_ranks_share_the_experts_of_one_layer():
    x = torch.randn(sum(TOKENS), 40)
    layer = mok.MoE(mok.MoEConfig(**RANKED))
    whole = x.clone().requires_grad_()
    y = layer(whole)
    (y * torch.linspace(-1, 1, 40)).sum().backward()
    layer.update_bias()
    pool = RankPool(len(TOKENS))
    try:
        ranks = pool.run(rank_step, len(TOKENS), x, TOKENS)
    finally:
        pool.close()
    one = {"y": y.detach(), "dx": whole.grad, "w_gate_up": layer.w_gate_up.grad, "w_down": layer.w_down.grad, "tokens": layer.tokens_per_expert}
    same_bits({name: torch.cat([r[name] for r in ranks]) for name in one}, one)
    assert all(torch.equal(r["bias"], layer.router.selection_bias) for r in ranks) and layer.router.selection_bias.abs().max() > 0
    assert all("x.shape=(0, 39) must end in hidden_size=40" in r["error"] for r in ranks)


# ---- compile ----

def test_case_E10():
    """fullgraph, new token counts: one compilation for T >= 2 after the first, bits of eager, results readable on the layer."""
    layer = build(balance="bias", num_expert_groups=2, topk_groups=1, shared_intermediate_sizes=(8,), z_loss_coef=0.1)
    graphs = []

    def counting(graph, inputs):
        graphs.append(1)
        from torch._dynamo.backends.debugging import aot_eager
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=counting)
    for i, tokens in enumerate((100, 101, 64, 33)):
        x = torch.randn(tokens, 40)
        base = step(layer, x)
        load = layer.router.load.clone()
        same_bits(step(layer, x, call=compiled), base)
        assert layer.router.load.sum() == load.sum() + 2 * tokens and layer.tokens_per_expert.sum() == 2 * tokens, i
    assert len(graphs) <= 2
    for tokens in (0, 1):
        x = torch.randn(tokens, 40)
        same_bits(step(layer, x, call=compiled), step(layer, x))
    assert len(graphs) <= 4


@pytest.mark.parametrize("order", ["compile(checkpoint)", "checkpoint(compile)"])
def test_compile_and_checkpoint_together(order):
    """Bits of eager, aux_loss's gradient included, and loads counted once. dynamo takes writes to a module inside a checkpoint only if told
    that recomputation must not repeat them, which is what the layer does in eager mode too."""
    layer = build(balance="bias", z_loss_coef=0.1)
    x = torch.randn(50, 40)
    base = step(layer, x)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        if order == "compile(checkpoint)":
            run = torch.compile(lambda t: checkpoint(layer, t, use_reentrant=False), fullgraph=True, backend="aot_eager")
        else:
            compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
            run = functools.partial(checkpoint, compiled, use_reentrant=False)
        layer.router.load.zero_()
        same_bits(step(layer, x, call=run), base)
    assert layer.router.load.sum() == 100 and layer.tokens_per_expert.sum() == 100


# ---- bad input ----

def bad(match):
    return pytest.raises(ValueError, match=match)


def test_bad_input_names_the_argument_and_both_quantities():
    layer = build()
    x = torch.randn(3, 4, 40)
    ids, weights = torch.zeros(3, 4, 2, dtype=torch.int64), torch.rand(3, 4, 2)
    with bad(r"x\.shape=\(3, 4, 41\) must end in hidden_size=40"):
        layer(torch.randn(3, 4, 41))
    with bad(r"x=torch\.int64"):
        layer(torch.zeros(3, 40, dtype=torch.int64))
    with bad("x=list"):
        layer([1.0])
    with bad(r"padding_mask is torch\.bool \(3, 5\) and must be torch\.bool \(3, 4\)"):
        layer(x, padding_mask=torch.zeros(3, 5, dtype=torch.bool))
    with bad(r"padding_mask is torch\.int64"):
        layer(x, padding_mask=torch.zeros(3, 4, dtype=torch.int64))
    with bad(r"routes=Tensor must be"):
        layer(x, routes=ids)
    with bad(r"routes\[0\]\.shape=\(3, 4, 3\) must be \(3, 4, 2\) or \(12, 2\)"):
        layer(x, routes=(torch.zeros(3, 4, 3, dtype=torch.int64), None))
    with bad(r"routes\[0\]\.dtype=torch\.float32"):
        layer(x, routes=(weights, weights))
    with bad(r"routes\[1\]\.dtype=torch\.int64"):
        layer(x, routes=(ids, ids))
    with bad(r"topk_ids holds 8 and must hold -1 or expert ids 0\.\.7"):
        layer(x, routes=(ids + 8, None))
    with bad(r"topk_ids holds -2"):
        layer(x, routes=(ids - 2, weights))
    with bad("config=dict"):
        mok.MoE({})
    with bad(r"x\.device=meta must be the layer's device, cpu"):
        layer(torch.randn(3, 40, device="meta"))


def test_repr_says_what_the_layer_is():
    text = repr(build(shared_intermediate_sizes=(8,), num_expert_groups=4, topk_groups=2))
    for part in ("H=40", "I=24", "experts=8", "top_k=2", "swiglu", "shared=[8]", "groups=2 of 4", "balance=aux_loss"):
        assert part in text
