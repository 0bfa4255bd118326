"""mok.moe as an operation: arguments, dtypes, autograd wiring, compile. What the engines compute is tested with them."""
from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import mok
from mok.function import moe_with_counts
from mok.reference import moe_reference


def inputs(T=33, H=24, I=10, E=4, K=2, dtype=torch.float32, biases=True, shared=2, grad=True, seed=0):
    """Odd sizes, expert E-1 empty, some routes -1; shared experts of two widths, the first gated."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape, scale=1.0, dtype=dtype):
        return (torch.randn(*shape, generator=g) * scale).to(dtype).requires_grad_(grad)

    ids = torch.randint(-1, E - 1, (T, K), generator=g)
    arguments = {"x": randn(T, H), "topk_ids": ids, "topk_weights": randn(T, K, dtype=torch.float32),
                 "w_gate_up": randn(E, 2 * I, H, scale=H**-0.5), "w_down": randn(E, H, I, scale=I**-0.5)}
    if biases:
        arguments |= {"b_gate_up": randn(E, 2 * I), "b_down": randn(E, H)}
    arguments["shared"] = [mok.SharedExpert(randn(2 * w, H, scale=H**-0.5), randn(H, w, scale=w**-0.5), randn(H) if i == 0 else None)
                           for i, w in enumerate((6, 14)[:shared])]
    return arguments


def leaves(arguments):
    """name -> tensor of everything differentiable."""
    found = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor) and value.is_floating_point()}
    for i, expert in enumerate(arguments.get("shared", ())):
        found |= {f"shared{i}.{part}": getattr(expert, part) for part in ("w_gate_up", "w_down", "gate_weight") if getattr(expert, part) is not None}
    return found


def in_float64(arguments):
    """Detached float64 copies, for the reference."""
    out = {name: value.detach().double().requires_grad_() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
           for name, value in arguments.items()}
    out["shared"] = [mok.SharedExpert(*(None if p is None else p.detach().double().requires_grad_() for p in (s.w_gate_up, s.w_down, s.gate_weight)))
                     for s in arguments.get("shared", ())]
    return out


def reference(arguments):
    arguments = dict(arguments)
    arguments["shared"] = [(s.w_gate_up, s.w_down, s.gate_weight) for s in arguments.get("shared", ())]
    return moe_reference(**arguments)


def relative_error(got, truth):
    return ((got.double() - truth.double()).norm() / truth.double().norm().clamp(min=1e-30)).item()


def test_forward_and_every_gradient_match_the_specification():
    arguments = inputs()
    truth = in_float64(arguments)
    dy = torch.randn(33, 24)
    y = mok.moe(**arguments)
    y.backward(dy)
    expected = reference(truth)
    expected.backward(dy.double())
    assert relative_error(y.detach(), expected) < 1e-6
    wanted = leaves(truth)
    for name, leaf in leaves(arguments).items():
        assert leaf.grad.dtype == leaf.dtype and relative_error(leaf.grad, wanted[name].grad) < 2e-6, name
    assert (arguments["w_down"].grad[3] == 0).all()                      # the empty expert, exactly


def test_leading_dimensions_and_strides_change_no_bit():
    arguments = inputs(T=30)
    y = mok.moe(**arguments)
    assert torch.equal(mok.moe(**arguments | {"x": arguments["x"].view(5, 6, 24)}).view(30, 24), y)
    stacked = {name: arguments[name].view(5, 6, -1) for name in ("x", "topk_ids", "topk_weights")}
    assert torch.equal(mok.moe(**arguments | stacked), y.view(5, 6, 24))
    wide = torch.zeros(30, 48)
    wide[:, ::2] = arguments["x"].detach()
    assert torch.equal(mok.moe(**arguments | {"x": wide[:, ::2]}), y)
    transposed = arguments["w_down"].detach().transpose(1, 2).contiguous().transpose(1, 2)
    assert not transposed.is_contiguous() and torch.equal(mok.moe(**arguments | {"w_down": transposed}), y)
    one_token = {name: arguments[name][0] for name in ("x", "topk_ids", "topk_weights")}
    assert torch.equal(mok.moe(**arguments | one_token), y[0])


@pytest.mark.parametrize("frozen", list(itertools.product([False, True], repeat=4)))
def test_only_wanted_gradients_come_back(frozen):
    """All 16 mixes of requires_grad over x, topk_weights, w_gate_up, w_down; biases and shared experts frozen with the weights."""
    arguments = inputs(grad=False)
    names = ("x", "topk_weights", "w_gate_up", "w_down")
    full = inputs()
    mok.moe(**full).square().sum().backward()
    for name, off in zip(names, frozen):
        arguments[name].requires_grad_(not off)
    y = mok.moe(**arguments)
    assert y.requires_grad == (not all(frozen))
    if y.requires_grad:
        y.square().sum().backward()
    for name, off in zip(names, frozen):
        if off:
            assert arguments[name].grad is None
        else:
            assert torch.equal(arguments[name].grad, full[name].grad), name


def test_no_tokens():
    arguments = inputs(T=0)
    y = mok.moe(**arguments)
    assert y.shape == (0, 24) and y.requires_grad
    y.sum().backward()
    for name, leaf in leaves(arguments).items():
        assert leaf.grad is not None and leaf.grad.shape == leaf.shape and not leaf.grad.any(), name


def test_counts_come_from_the_plan():
    arguments = inputs(shared=0)
    _, counts = moe_with_counts(**arguments)
    assert counts.tolist() == [(arguments["topk_ids"] == e).sum().item() for e in range(4)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_output_and_gradients_have_their_inputs_dtypes(dtype):
    """Mixed: x in `dtype`, weights fp32, routing weights bf16; the rule is that computation runs in x's dtype."""
    arguments = inputs(grad=False)
    arguments["x"] = arguments["x"].to(dtype).requires_grad_()
    arguments["topk_weights"] = arguments["topk_weights"].bfloat16().requires_grad_()
    arguments["w_down"].requires_grad_()
    y = mok.moe(**arguments)
    y.sum().backward()
    assert y.dtype == dtype
    by_hand = {name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value for name, value in arguments.items()}
    by_hand["topk_weights"] = arguments["topk_weights"].detach().to(torch.float64 if dtype == torch.float64 else torch.float32)
    by_hand["shared"] = [mok.SharedExpert(*(None if p is None else p.to(dtype) for p in (s.w_gate_up, s.w_down, s.gate_weight))) for s in arguments["shared"]]
    assert torch.equal(mok.moe(**by_hand), y)
    for name in ("x", "topk_weights", "w_down"):
        assert arguments[name].grad.dtype == arguments[name].dtype, name


def test_autocast_is_casting_by_hand():
    arguments = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        y = mok.moe(**arguments)
    y.sum().backward()                                                   # outside autocast
    cast = inputs(dtype=torch.bfloat16)
    expected = mok.moe(**cast)
    expected.sum().backward()
    assert y.dtype == torch.float32 and torch.equal(y, expected.float())
    for name, leaf in leaves(arguments).items():
        assert torch.equal(leaf.grad, leaves(cast)[name].grad.to(leaf.dtype)), name


def test_main_grad_takes_the_weight_gradients():
    plain, arguments = inputs(), inputs()
    start = (torch.randn(4, 20, 24), torch.randn(4, 24, 10))
    accumulators = (start[0].clone(), start[1].clone())
    outs = [mok.moe(**arguments, main_grad=accumulators) for _ in range(2)]   # two micro-batches, both forwards before any backward
    for out in outs:
        out.square().sum().backward()
    mok.moe(**plain).square().sum().backward()
    assert arguments["w_gate_up"].grad is None and arguments["w_down"].grad is None
    assert torch.equal(arguments["b_down"].grad, 2 * plain["b_down"].grad)
    for accumulator, begin, name in zip(accumulators, start, ("w_gate_up", "w_down")):
        torch.testing.assert_close(accumulator, begin + 2 * plain[name].grad, rtol=1e-5, atol=1e-5)
        assert torch.equal(accumulator[3], begin[3])                     # the empty expert keeps what was there


def test_second_derivatives_are_refused_in_words():
    arguments = inputs()
    (dx,) = torch.autograd.grad(mok.moe(**arguments).square().sum(), arguments["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="not twice differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize("source", ["x", "topk_weights", "w_gate_up", "w_down"])
@pytest.mark.parametrize("through_op", [False, True])
def test_a_second_derivative_is_not_left_out_where_another_path_gives_a_first(through_op, source):
    """autograd.grad by a source that y itself hangs on too: the part through the gradient used to be dropped without a word."""
    given = inputs()
    watched = given[source]
    with FlopCounterMode(display=False) if through_op else nullcontext():              # a mode that watches: the custom op's derivative
        y = mok.moe(**given)
        (first,) = torch.autograd.grad(y.square().sum(), watched, create_graph=True)
        for call in (lambda: torch.autograd.grad(first.sum() + y.sum(), watched, retain_graph=True), lambda: torch.autograd.grad(first.sum(), watched),
                     lambda: (first.sum() + y.sum()).backward(inputs=[watched])):
            with pytest.raises(RuntimeError, match="not twice differentiable"):
                call()


def test_weights_changed_between_forward_and_backward_are_noticed():
    arguments = inputs()
    y = mok.moe(**arguments)
    with torch.no_grad():
        arguments["w_down"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


BAD = [
    ({"x": None}, "x=NoneType must be a tensor"),
    ({"x": torch.zeros(33, 24, dtype=torch.int64)}, "x.dtype=torch.int64"),
    ({"topk_ids": torch.zeros(33, 2)}, "topk_ids.dtype=torch.float32"),
    ({"topk_ids": torch.zeros(33, 0, dtype=torch.int64), "topk_weights": torch.zeros(33, 0)}, "at least one route"),
    ({"topk_ids": torch.zeros(32, 2, dtype=torch.int64), "topk_weights": torch.zeros(32, 2)}, r"topk_ids.shape=\(32, 2\) must be \(33, 2\)"),
    ({"topk_ids": torch.full((33, 2), 4)}, "topk_ids holds 4 and must hold -1 or expert ids 0..3"),
    ({"topk_ids": torch.full((33, 2), -2)}, "topk_ids holds -2"),
    ({"topk_weights": torch.zeros(33, 3)}, r"topk_weights.shape=\(33, 3\) must be topk_ids.shape=\(33, 2\)"),
    ({"topk_weights": torch.zeros(33, 2, dtype=torch.int32)}, "topk_weights.dtype=torch.int32"),
    ({"w_gate_up": torch.zeros(4, 20, 23)}, "w_gate_up.shape=.*H=24"),
    ({"w_gate_up": torch.zeros(4, 21, 24)}, "w_gate_up.shape"),
    ({"w_gate_up": torch.zeros(0, 20, 24), "w_down": torch.zeros(0, 24, 10)}, "at least one expert"),
    ({"w_down": torch.zeros(4, 10, 24)}, r"w_down.shape=\(4, 10, 24\) must be \(4, 24, 10\)"),
    ({"b_gate_up": torch.zeros(4, 10)}, r"b_gate_up.shape=\(4, 10\) must be \(4, 20\)"),
    ({"b_down": torch.zeros(5, 24)}, r"b_down.shape=\(5, 24\) must be \(4, 24\)"),
    ({"w_down": torch.zeros(4, 24, 10, device="meta")}, "w_down.device=meta must be x.device=cpu"),
    ({"shared": [mok.SharedExpert(torch.zeros(6, 23), torch.zeros(24, 3))]}, r"shared\[0\].w_gate_up.shape"),
    ({"shared": [mok.SharedExpert(torch.zeros(6, 24), torch.zeros(24, 4))]}, r"shared\[0\].w_down.shape"),
    ({"shared": [mok.SharedExpert(torch.zeros(6, 24), torch.zeros(24, 3), torch.zeros(1, 24))]}, r"shared\[0\].gate_weight.shape"),
    ({"shared": [(torch.zeros(6, 24), torch.zeros(24, 3))]}, r"shared\[0\]=tuple must be a mok.SharedExpert"),
    ({"activation": "gelu"}, "activation='gelu'"),
    ({"swiglu_limit": -1.0}, "swiglu_limit=-1.0"),
    ({"activation": "reglu", "swiglu_limit": 1.0}, "swiglu_limit=1.0"),
    ({"precision": "int4"}, "precision='int4'"),
    ({"recompute": "h"}, "recompute='h' must be None or 'z'"),
    ({"recompute": True}, "recompute=True must be None or 'z'"),
    ({"main_grad": (torch.zeros(4, 20, 24), torch.zeros(4, 24, 9))}, r"main_grad\[1\]"),
    ({"main_grad": (torch.zeros(4, 20, 24).bfloat16(), torch.zeros(4, 24, 10))}, r"main_grad\[0\] is torch.bfloat16"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        mok.moe(**inputs(grad=False) | change)


@pytest.mark.parametrize("change", [{"precision": "mxfp8"}, {"precision": "fp8"}])
def test_valid_but_unbuilt_is_not_implemented(change):
    with pytest.raises(NotImplementedError, match="precision"):
        mok.moe(**inputs(grad=False) | change)


def test_engine_is_visible():
    assert mok.engine_for(torch.zeros(2, 16)) == "cpu"
    with pytest.raises(NotImplementedError, match="meta"):
        mok.engine_for(torch.zeros(2, 16, device="meta"))


@pytest.mark.parametrize("recompute", [None, "z"])
def test_opcheck_of_every_op(recompute):
    arguments = inputs(T=9)
    x, ids = arguments["x"], arguments["topk_ids"]
    torch.library.opcheck(torch.ops.mok.plan.default, (ids, 4, torch.float32, 24, 10, 0, ""))
    plan = torch.ops.mok.plan(ids, 4, torch.float32, 24, 10, 0, "")
    shared = arguments["shared"]
    gates = [x.new_empty(0) if s.gate_weight is None else s.gate_weight for s in shared]
    weights = [arguments[name] for name in ("topk_weights", "w_gate_up", "w_down", "b_gate_up", "b_down")]
    common = ([s.w_gate_up for s in shared], [s.w_down for s in shared], gates, plan)
    # not test_aot_dispatch_dynamic: it compares z bit for bit, padding rows included, and those are unspecified; the compile tests cover it
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    settings = ("swiglu", None, "bf16", recompute, [-1, -1, -1])
    torch.library.opcheck(torch.ops.mok.moe_forward.default, (x, *weights, *common, None, None, *settings, True, 0, ""), test_utils=checks)
    bare = [t.detach() for t in (x, *weights)]
    common = tuple([t.detach() for t in group] for group in common)
    _, z, shared_z = torch.ops.mok.moe_forward(*bare, *common, None, None, *settings, True, 0, "")
    assert (z.shape[0] == 0) == (shared_z.shape[0] == 0) == (recompute == "z")
    torch.library.opcheck(torch.ops.mok.moe_backward.default, (torch.randn(9, 24), *bare, *common, z, shared_z, *settings, [True] * 11 + [False],
                                                               0, ""))                                       # the second gate does not exist


@pytest.mark.parametrize("recompute", [None, "z"])
@pytest.mark.parametrize("with_main_grad", [False, True])
def test_compiled_equals_eager_to_the_bit(with_main_grad, recompute):
    torch._dynamo.reset()

    results = []
    for function in (mok.moe, torch.compile(mok.moe, backend="aot_eager", fullgraph=True)):
        arguments = inputs()
        accumulators = (torch.ones(4, 20, 24), torch.ones(4, 24, 10)) if with_main_grad else None
        y = function(**arguments, main_grad=accumulators, recompute=recompute)
        y.square().sum().backward()
        results.append([y.detach(), *(leaf.grad for leaf in leaves(arguments).values() if leaf.grad is not None), *(accumulators or ())])
    assert len(results[0]) == len(results[1]) == 12
    for eager, compiled in zip(*results):
        assert torch.equal(eager, compiled)


def test_forward_mode_is_refused_in_words():
    arguments = inputs(grad=False)
    x = arguments.pop("x")
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda v: mok.moe(v, **arguments), (x,), (torch.ones_like(x),))


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        return None


def test_a_result_that_gets_no_gradient_hands_none_back():
    arguments = inputs()
    (_NoGradient.apply(mok.moe(**arguments)).sum() + arguments["x"].sum()).backward()
    assert torch.equal(arguments["x"].grad, torch.ones(33, 24)) and arguments["w_down"].grad is None


def test_many_layers_compiled_one_by_one():
    """More layers than Dynamo's recompile limit: nothing in the call may differ from layer to layer."""
    torch._dynamo.reset()
    layers = [mok.MoE(mok.MoEConfig(hidden_size=16, intermediate_size=8, num_experts=4, top_k=2, layer_index=i)) for i in range(10)]
    x = torch.randn(5, 16)
    expected = [layer(x) for layer in layers]
    for layer, y in zip(layers, expected):
        layer.compile(fullgraph=True, backend="aot_eager")
        assert torch.equal(layer(x), y)
    torch.compile(mok.moe, fullgraph=True, dynamic=True, backend="aot_eager")(**inputs(grad=False))


def test_the_direct_path_gives_the_ops_bits_and_is_left_where_something_watches():
    """Eager calls skip the dispatcher; under a dispatch mode (as selective checkpointing is) the ops must be seen, with the same results."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    generator = torch.Generator().manual_seed(5)
    x, w_gate_up, w_down = (torch.randn(size, generator=generator).to(torch.bfloat16).requires_grad_() for size in ((40, 32), (5, 48, 32), (5, 32, 24)))
    ids, weights = torch.randint(-1, 5, (40, 3), generator=generator), torch.rand(40, 3, generator=generator).requires_grad_()
    shared = (mok.SharedExpert(torch.randn(16, 32).bfloat16().requires_grad_(), torch.randn(32, 8).bfloat16(), torch.randn(32).bfloat16().requires_grad_()),)
    leaves = (x, weights, w_gate_up, w_down, shared[0].w_gate_up, shared[0].gate_weight)

    def both() -> list[torch.Tensor]:
        y = mok.moe(x, ids, weights, w_gate_up, w_down, shared=shared)
        return [y, *torch.autograd.grad(y, leaves, torch.ones_like(y))]

    direct = both()
    with Watch():
        watched = both()
    assert all(torch.equal(a, b) for a, b in zip(direct, watched, strict=True))
    assert {"mok.plan.default", "mok.moe_forward.default", "mok.moe_backward.default"} <= set(seen)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_recompute_changes_no_bit(dtype):
    """y and every gradient, asked for by hand and by a layer's config."""
    results = []
    for recompute in (None, "z"):
        arguments = inputs(T=2600, H=72, I=23, K=4, dtype=dtype)                 # 10^4 routes, odd I
        y = mok.moe(**arguments, recompute=recompute)
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(dtype))
        results.append({"y": y.detach()} | {name: leaf.grad for name, leaf in leaves(arguments).items()})
    assert len(results[0]) == 12 and all(torch.equal(results[1][name], value) for name, value in results[0].items())
    layers = [mok.MoE(mok.MoEConfig(24, 12, 4, 2, shared_intermediate_sizes=(8,), recompute=recompute), dtype=dtype) for recompute in (None, "z")]
    x = torch.randn(50, 24).to(dtype)
    grads = [torch.autograd.grad(layer(x).square().sum(), list(layer.parameters())) for layer in layers]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    with pytest.raises(ValueError, match="recompute=0 must be None or 'z'"):
        mok.MoEConfig(24, 12, 4, 2, recompute=0)


def test_a_tangent_on_one_rank_is_told_to_the_others():
    reports = []

    class Group(mok.ExpertGroup):
        def __init__(self):
            self.fused, self.key = None, 0

        def report(self, error, *arguments):
            reports.append(error)

    given = inputs()
    with torch.autograd.forward_ad.dual_level():
        given["x"] = torch.autograd.forward_ad.make_dual(given["x"].detach(), torch.ones_like(given["x"]))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            mok.moe(**given, group=Group())
    assert len(reports) == 1


def test_main_grad_is_what_was_checked():
    """A list that changes between forward and backward sends no gradient into a tensor that nobody has looked at."""
    given = inputs()
    accumulators = [torch.zeros_like(given[name], dtype=torch.float32) for name in ("w_gate_up", "w_down")]
    held = list(accumulators)
    y = mok.moe(**given, main_grad=accumulators)
    accumulators[0] = torch.zeros_like(held[0], dtype=torch.bfloat16)
    y.sum().backward()
    assert held[0].any() and not accumulators[0].any()
