"""Cases E that one rank can show: checkpointing, autocast, frozen parts, adapters, accumulation, torch.compile."""
from __future__ import annotations

import functools
import itertools
import weakref

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import mok
from mok.plan import plan_capacity
from tests.cases.case_support import (
    Problem,
    assert_exactly_zero,
    assert_same_bits,
    collect,
    needs_compiler,
    peak_bytes,
    problem,
    random_routes,
    routes_with_counts,
)

CHECKPOINTS = {"plain": {}, "selective": {"context_fn": functools.partial(create_selective_checkpoint_contexts, mok.checkpoint_policy)}}


def checkpointed(layer=mok.moe, kind: str = "plain"):
    return lambda *args, **kwargs: checkpoint(layer, *args, use_reentrant=False, **CHECKPOINTS[kind], **kwargs)


def layer_step(layer: mok.MoE, x: torch.Tensor, call=None) -> dict[str, torch.Tensor]:
    """y, dx and every parameter's gradient of sum(y * coefficients) + aux_loss."""
    leaf = x.detach().clone().requires_grad_()
    layer.zero_grad()
    y = (layer if call is None else call)(leaf)
    coefficients = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y)
    (y * coefficients).sum().add(layer.aux_loss).backward()
    return {"y": y.detach(), "x": leaf.grad, **{name: p.grad for name, p in layer.named_parameters()}}


# ---- E1, E2 ----

@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("ties", ["equal-rows", "zero-router", "none"])
def test_case_E1(device, dtype, kind, ties):
    """Automodel#2635, #3156, #3140, #3325, transformers#47467, torchtitan#1117: recomputed routes differ by one token; exact ties."""
    layer = mok.MoE(mok.MoEConfig(64, 16, 128, 6), device=device, dtype=dtype)
    x = torch.randn(97, 64, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    if ties == "equal-rows":
        x = x[:1].expand(97, 64)
    elif ties == "zero-router":
        with torch.no_grad():
            layer.router.weight.zero_()
    plain = layer_step(layer, x)
    if ties == "zero-router":
        assert (layer.routes[0] == torch.arange(6, device=device)).all()
    assert_same_bits(layer_step(layer, x, checkpointed(layer, kind)), plain)


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_case_E1_routes_from_outside(device, dtype, kind):
    """E1 with the router outside of the checkpoint: ids and weights are its arguments."""
    p = problem(random_routes(97, 6, 128, masked=0.1), 128, 64, 16, device, dtype, biases=True, shared=(16,))
    assert_same_bits(p.run(checkpointed(kind=kind)), p.run())


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_case_E1_an_operation_that_does_not_repeat_its_bits(device, dtype, kind):
    """E1's noisy op before the layer: no metadata error and nothing NaN; with the policy the first forward's routes get the gradients."""
    layer = mok.MoE(mok.MoEConfig(64, 16, 128, 2, balance="none"), device=device, dtype=dtype)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    draws = []

    def noise_then_layer(t):
        draws.append(torch.randn_like(t))
        y = layer(t + 3 * draws[-1])
        chosen.append(layer.routes[0])
        return y

    chosen: list[torch.Tensor] = []
    got = layer_step(layer, x, lambda t: checkpoint(noise_then_layer, t, use_reentrant=False, preserve_rng_state=False, **CHECKPOINTS[kind]))
    assert len(draws) == 2 and not torch.equal(draws[0], draws[1])
    assert all(torch.isfinite(value).all() for value in got.values())
    touched = got["w_gate_up"].flatten(1).any(1).nonzero().flatten().tolist()
    if kind == "selective":
        assert touched == sorted(set(chosen[0].flatten().tolist()))


def test_case_E1_saved_shapes_do_not_depend_on_the_counts(device, dtype):
    """E1's cause: what is saved has the same shapes for every routing of the same tokens."""
    shapes = []
    for ids in (random_routes(40, 2, 8), torch.full((40, 2), 3), torch.full((40, 2), -1), routes_with_counts([1, 0, 79, 0, 0, 0, 0, 0], K=2)):
        p = problem(ids, 8, 64, 32, device, dtype)
        arguments, _ = p.leaves()
        arguments["shared"] = []
        packed = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, into=packed: (into.append((tuple(t.shape), t.dtype)), t)[1], lambda t: t):
            mok.moe(**arguments)
        shapes.append(packed)
    assert shapes[0] and all(other == shapes[0] for other in shapes)


def test_case_E2(device, dtype):
    """torchtitan#1593, Automodel#3247, OLMo#639: recomputation counted tokens twice; saved tensors unpacked twice."""
    layer = mok.MoE(mok.MoEConfig(64, 32, 8, 2, balance="bias", z_loss_coef=0.1), device=device, dtype=dtype)
    for step in range(1, 4):
        x = torch.randn(40 // step, 64, generator=torch.Generator().manual_seed(step)).to(device, dtype)
        before = int(layer.router.load.sum())
        layer_step(layer, x, checkpointed(layer))
        assert int(layer.router.load.sum()) - before == 2 * x.shape[0] == int(layer.tokens_per_expert.sum())


def test_case_E2_saved_tensors_are_unpacked_once(device, dtype):
    """OLMo#639: hooks that offload saved tensors bring each of them back once."""
    p = problem(random_routes(40, 2, 8), 8, 64, 32, device, dtype, biases=True, shared=(32,))
    packed, unpacked = [], []

    def pack(t):
        packed.append(t)
        return len(packed) - 1

    def unpack(index):
        unpacked.append(index)
        return packed[index]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        got = p.run()
    assert packed and sorted(unpacked) == list(range(len(packed)))
    assert_same_bits(got, p.run())


# ---- E3 ----

AUTOCAST_INPUTS = {"fp32 x, bf16 experts": {"x": torch.float32, "w_gate_up": torch.bfloat16, "w_down": torch.bfloat16, "topk_weights": torch.float32},
                   "fp32 everywhere": dict.fromkeys(("x", "w_gate_up", "w_down", "topk_weights"), torch.float32),
                   "bf16 x, fp32 experts": {"x": torch.bfloat16, "w_gate_up": torch.float32, "w_down": torch.float32, "topk_weights": torch.bfloat16}}


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mixture", AUTOCAST_INPUTS)
def test_case_E3(device, mixture, lower):
    """axolotl#3805, transformers#43828, pytorch#174763: mixed dtypes under autocast. As casting by hand, to the bit; backward outside of it."""
    p = problem(random_routes(40, 2, 4, masked=0.1), 4, 64, 32, device, torch.float32, biases=True, shared=(16,))
    p = p.changed(**{name: p[name].to(dtype) for name, dtype in AUTOCAST_INPUTS[mixture].items()})

    def under_autocast(**arguments):
        with torch.autocast(device, dtype=lower):
            return mok.moe(**arguments)

    def by_hand(x, topk_ids, topk_weights, shared, **weights):
        lowered = [mok.SharedExpert(*(t.to(lower) for t in (s.w_gate_up, s.w_down, s.gate_weight))) for s in shared]
        return mok.moe(x.to(lower), topk_ids, topk_weights, **{name: w.to(lower) for name, w in weights.items()}, shared=lowered).to(x.dtype)

    got = p.run(under_autocast)
    assert_same_bits(got, p.run(by_hand))
    assert got["y"].dtype == p["x"].dtype
    for name in ("x", "topk_weights", "w_gate_up", "w_down", "b_gate_up", "b_down"):
        assert got[name].dtype == p[name].dtype and torch.isfinite(got[name]).all()


def test_case_E3_gradient_scaler(device):
    """E3 with fp16 and a GradScaler: two steps of an fp32 layer, gradients in each parameter's dtype, the update as without scaling."""
    moved = []
    for enabled in (True, False):
        layer = mok.MoE(mok.MoEConfig(64, 32, 4, 2, balance="none"), device=device)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device, init_scale=256.0, enabled=enabled)
        start = {name: p.detach().clone() for name, p in layer.named_parameters()}
        for step in range(2):
            x = torch.randn(40, 64, generator=torch.Generator().manual_seed(step)).to(device)
            with torch.autocast(device, dtype=torch.float16):
                y = layer(x)
            assert y.dtype == torch.float32
            scaler.scale(y.float().square().mean()).backward()
            assert all(p.grad.dtype == torch.float32 for p in layer.parameters())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        moved.append({name: p.detach() - start[name] for name, p in layer.named_parameters()})
    for name, change in moved[0].items():
        assert change.abs().max() > 0 and (change - moved[1][name]).norm() < 2e-2 * moved[1][name].norm(), name


# ---- E5 ----

PARTS = ("x", "topk_weights", "w_gate_up", "w_down")


@pytest.mark.parametrize("wanted", [c for n in range(5) for c in itertools.combinations(PARTS, n)], ids=lambda c: "+".join(c) or "nothing")
def test_case_E5(device, dtype, wanted):
    """ms-swift#9790, Megatron-LM#688, PaddleFleet#1612, unsloth-zoo#837, apex#1517: every choice of frozen parts. None exactly where frozen,
    elsewhere the bits of the run that wants everything; with nothing wanted, no graph."""
    p = problem(random_routes(40, 2, 4, masked=0.1), 4, 64, 32, device, dtype)
    everything = p.run()
    arguments, leaves = p.leaves(grad=False)
    arguments["shared"] = []
    for name in wanted:
        leaves[name].requires_grad_()
    y = mok.moe(**arguments)
    assert y.requires_grad == bool(wanted)
    if wanted:
        y.backward(p.dy)
    assert_same_bits(collect(y, leaves), {name: value if name == "y" or name in wanted else None for name, value in everything.items()})
    with torch.no_grad():
        frozen = mok.moe(**arguments)
    assert not frozen.requires_grad
    assert_same_bits({"y": frozen}, {"y": everything["y"]})


def test_case_E5_unfrozen_between_steps(device, dtype):
    """E5 over the steps of one training run: parts are frozen and thawed, one layer, new routes and fewer tokens each step."""
    layer = mok.MoE(mok.MoEConfig(64, 32, 8, 2, expert_bias=True, shared_intermediate_sizes=(16,), shared_gated=True), device=device, dtype=dtype)
    names = [name for name, _ in layer.named_parameters()]
    for step, frozen in enumerate((names, ["w_gate_up", "b_gate_up"], [], ["router.weight"], [n for n in names if n.startswith("shared")], names[1:])):
        x = torch.randn(60 - 9 * step, 64, generator=torch.Generator().manual_seed(step)).to(device, dtype)
        everything = layer_step(layer.requires_grad_(True), x)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name not in frozen)
        assert_same_bits(layer_step(layer, x), {name: None if name in frozen else value for name, value in everything.items()})


@pytest.mark.parametrize("what", ["everything frozen", "x only", "topk_weights only", "w_down only"])
def test_case_E5_frozen_costs_no_memory(device, what):
    """PaddleFleet#1612: the gradient of a frozen weight was computed all the same. No buffer of its size is ever allocated."""
    E, H, I, T = 4, 1024, 2048, 48
    p = problem(random_routes(T, 2, E), E, H, I, device, torch.float32 if device == "cpu" else torch.bfloat16)
    size = {name: p[name].numel() * p[name].element_size() for name in ("w_gate_up", "w_down")}    # 64 and 32 MiB on a CPU

    def run(*wanted):
        arguments, leaves = p.leaves(lambda t: t, grad=False)
        arguments["shared"] = []
        for name in wanted:
            leaves[name].requires_grad_()

        def passes():
            y = mok.moe(**arguments)
            if wanted:
                y.backward(p.dy)

        return peak_bytes(device, passes)

    run("x", "topk_weights")                                                                       # scratch and libraries are in place
    everything = run(*PARTS)
    assert everything > 0.9 * (size["w_gate_up"] + size["w_down"])                                  # so the measurement sees such buffers
    wanted = {"everything frozen": (), "x only": ("x",), "topk_weights only": ("topk_weights",), "w_down only": ("w_down",)}[what]
    allowed = sum(size[name] for name in wanted if name in size) + 0.95 * size["w_down"]       # beside them only scratch, up to 25 MB after other tests
    assert min(run(*wanted) for _ in range(3)) < allowed       # a buffer would be there every time; the process's own memory moves by megabytes


@pytest.mark.gpu
@pytest.mark.parametrize("wanted", [c for n in range(1, 5) for c in itertools.combinations(PARTS, n)], ids="+".join)
@pytest.mark.parametrize("recompute", [None, "z"], ids=["saved", "recomputed"])
def test_case_E5_memory_of_a_gpu_is_what_the_formulas_say(wanted, recompute):
    """The same to the byte: a forward and a backward of the fused kernels need the saved tensors, the wanted gradients and the stated scratch of
    those gradients, so nothing is allocated for a frozen one."""
    E, H, I, T, K = 4, 256, 512, 3000, 2
    p = problem(random_routes(T, K, E), E, H, I, "cuda", torch.bfloat16)
    if mok.engine_for(p["x"], I) != "hopper":
        pytest.skip("the formulas are those of the fused kernels, which need compute capability 9.0")
    from mok.engines.hopper.backward_launch import backward_scratch
    from mok.engines.hopper.launch import granularity, scratch_sizes
    from mok.engines.protocol import Wants

    torch.use_deterministic_algorithms(False)                                                     # whose fills may allocate; the fixture puts it back

    def passes(names=wanted):
        arguments, leaves = p.leaves(grad=False)
        arguments["shared"] = []
        for name in names:
            leaves[name].requires_grad_()
        mok.moe(**arguments, recompute=recompute).backward(p.dy)

    passes(PARTS)                                                                                  # counters and kernels are in place
    R = plan_capacity(T * K, E)
    saved = (R * 2 * I * 2 if recompute is None else 0) + 4 * (2 * R + T * K + R // 128 + E + 1) + 8 * (E + 1)
    y = T * H * 2
    forward = scratch_sizes(T, H, I, R, (), granularity(None, H, I)).bytes
    backward = backward_scratch(T, H, I, R, (), Wants(**{name: name in wanted for name in PARTS}), recompute is not None).bytes
    gradients = sum(p[name].numel() * p[name].element_size() for name in wanted)
    stated = saved + y + max(forward, backward + gradients)
    peak = peak_bytes("cuda", passes)
    assert abs(peak - stated) < 2**12, f"{peak} measured, {stated} stated"                          # the smallest buffer has 24 KB


# ---- E6 ----

def test_case_E6(device, dtype):
    """unsloth-zoo#606: adapters on stacked experts got no gradient. Effective weight = base + B @ A, a non-leaf; all move, as the reference's."""
    E, H, I, r = 4, 64, 32, 4
    p = problem(random_routes(60, 2, E), E, H, I, device, dtype)
    generator = torch.Generator().manual_seed(1)

    def adapters(convert=lambda t: t):
        shapes = {"A13": (E, r, H), "B13": (E, 2 * I, r), "A2": (E, r, I), "B2": (E, H, r)}
        generator.manual_seed(1)
        return {name: convert((torch.randn(shape, generator=generator) * 0.3).to(device, dtype)).requires_grad_() for name, shape in shapes.items()}

    def gradients(moe, ab, convert=lambda t: t):
        arguments = {name: convert(p[name]) if p[name].is_floating_point() else p[name] for name in p.tensors}
        arguments["w_gate_up"] = arguments["w_gate_up"] + ab["B13"] @ ab["A13"]
        arguments["w_down"] = arguments["w_down"] + ab["B2"] @ ab["A2"]
        moe(**arguments).backward(convert(p.dy))
        return {name: t.grad for name, t in ab.items()}

    got = gradients(mok.moe, adapters())
    truth = gradients(mok.reference.moe_reference, adapters(lambda t: t.double()), lambda t: t.double())
    for name, grad in got.items():
        error = (grad.double() - truth[name]).flatten(1).norm(dim=1) / truth[name].flatten(1).norm(dim=1)
        assert grad.flatten(1).any(1).all() and error.max() < 4 * torch.finfo(dtype).eps * (1 if dtype == torch.bfloat16 else 8), name


def test_case_E6_every_adapter_moves(device):
    """E6 as it is trained: frozen base, B = 0 at the start, two steps; the first moves every B, the second every A."""
    E, H, I, r = 4, 64, 32, 4
    p = problem(random_routes(60, 2, E), E, H, I, device, torch.float32)
    generator = torch.Generator().manual_seed(1)
    ab = {"A13": torch.randn(E, r, H, generator=generator), "B13": torch.zeros(E, 2 * I, r), "A2": torch.randn(E, r, I, generator=generator),
          "B2": torch.zeros(E, H, r)}
    ab = {name: t.to(device).requires_grad_() for name, t in ab.items()}
    start = {name: t.detach().clone() for name, t in ab.items()}
    optimizer = torch.optim.SGD(ab.values(), lr=0.1)
    for step in range(2):
        arguments = dict(p.tensors, w_gate_up=p["w_gate_up"] + ab["B13"] @ ab["A13"], w_down=p["w_down"] + ab["B2"] @ ab["A2"])
        mok.moe(**arguments).backward(p.dy)
        optimizer.step()
        optimizer.zero_grad()
        for name in ("B13", "B2") if step == 0 else ab:
            assert (ab[name].detach() != start[name]).flatten(1).any(1).all(), f"step {step}: an expert's {name} did not move"


# ---- E7 ----

MICRO_BATCHES = ([30, 0, 25, 0, 0], [0, 0, 40, 3, 0], [0, 0, 0, 17, 0])           # expert 1 and 4 never, others now and then; token counts shrink


def micro_batches(device: str, dtype: torch.dtype) -> list[Problem]:
    first = problem(routes_with_counts(MICRO_BATCHES[0]), 5, 64, 32, device, dtype, biases=True)
    weights = {name: first[name] for name in ("w_gate_up", "w_down", "b_gate_up", "b_down")}
    return [problem(routes_with_counts(counts, seed=i), 5, 64, 32, device, dtype, biases=True, seed=i).changed(**weights)
            for i, counts in enumerate(MICRO_BATCHES)]


@pytest.mark.parametrize("start", ["no gradient", "a preset gradient"])
def test_case_E7(device, dtype, start):
    """TransformerEngine#1488, #3234, #2499, #2769: gradients over three micro-batches with different empty experts are the sum of the three;
    experts that are never hit keep what was there."""
    batches = micro_batches(device, dtype)
    each = [p.run() for p in batches]
    weights = {name: batches[0][name].clone().requires_grad_() for name in ("w_gate_up", "w_down", "b_gate_up", "b_down")}
    preset = {name: None if start == "no gradient" else torch.randn_like(w) for name, w in weights.items()}
    for name, w in weights.items():
        w.grad = None if preset[name] is None else preset[name].detach().clone()
    for p in batches:
        mok.moe(p["x"], p["topk_ids"], p["topk_weights"], **weights).backward(p.dy)
    for name, w in weights.items():
        expected = preset[name]
        for result in each:
            expected = result[name] if expected is None else expected + result[name]
        assert_same_bits({name: w.grad}, {name: expected})
        for e in (1, 4):
            untouched = torch.zeros_like(w[e]) if preset[name] is None else preset[name][e]
            assert_same_bits({name: w.grad[e]}, {name: untouched})


@pytest.mark.parametrize("checkpoint_it", [False, True], ids=["kept", "checkpointed"])
def test_case_E7_main_grad(device, dtype, checkpoint_it):
    """E7 into fp32 accumulators: added to, never overwritten or zeroed; .grad stays None; fp32 keeps what bf16 sums would lose."""
    batches = micro_batches(device, dtype)
    layer = checkpointed() if checkpoint_it else mok.moe
    names = ("w_gate_up", "w_down")

    def accumulate(p: Problem, into: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        arguments, leaves = p.leaves()
        arguments["shared"] = []
        y = layer(**arguments, main_grad=into)
        y.backward(p.dy)
        assert leaves["w_gate_up"].grad is None and leaves["w_down"].grad is None
        return collect(y, leaves)

    preset = [torch.randn(batches[0][name].shape, generator=torch.Generator().manual_seed(1)).to(device) for name in names]
    into, expected = tuple(t.clone() for t in preset), [t.double() for t in preset]
    for p in batches:
        single, plain = tuple(torch.zeros_like(t) for t in preset), p.run()
        got = accumulate(p, single)
        assert_same_bits({name: got[name] for name in got if name not in names}, {name: plain[name] for name in got if name not in names})
        for name, accumulated in zip(names, single):
            assert_same_bits({name: accumulated.to(dtype)}, {name: plain[name]})              # the same sum, without the rounding
            hit = accumulated[accumulated != 0]
            assert dtype == torch.float32 or (hit != hit.to(dtype)).float().mean() > 0.9
        accumulate(p, into)
        expected = [total + g.double() for total, g in zip(expected, single)]
    for name, accumulated, total, start in zip(names, into, expected, preset):
        for e in (1, 4):
            assert_same_bits({name: accumulated[e]}, {name: start[e]})
        error = (accumulated.double() - total).abs().max() / total.abs().max()
        assert error < 4 * torch.finfo(torch.float32).eps, f"{name}: {error:.2e}"                # in bf16 too


def test_case_E7_one_layer_twice_in_one_forward(device, dtype):
    """Megatron-LM#6965: a layer used twice in one forward had its gradient overwritten instead of added, in .grad and in main_grad."""
    first, second, _ = micro_batches(device, dtype)
    each = [p.run() for p in (first, second)]
    weights = {name: first[name].clone().requires_grad_() for name in ("w_gate_up", "w_down", "b_gate_up", "b_down")}

    def both(**more):
        ys = [mok.moe(p["x"], p["topk_ids"], p["topk_weights"], **weights, **more) for p in (first, second)]
        torch.cat(ys).backward(torch.cat([first.dy, second.dy]))

    both()
    for name, w in weights.items():
        assert_same_bits({name: w.grad}, {name: each[0][name] + each[1][name]})
        w.grad = None
    into = [torch.ones(weights[name].shape, device=device) for name in ("w_gate_up", "w_down")]
    both(main_grad=tuple(into))
    for name, accumulated in zip(("w_gate_up", "w_down"), into):
        truth = 1 + sum(p.truth()[name] for p in (first, second))
        assert weights[name].grad is None
        assert (accumulated.double() - truth).norm() / (truth - 1).norm() < max(torch.finfo(dtype).eps, 8 * torch.finfo(torch.float32).eps)


# ---- E10 ----

@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_compiler)])
@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases and shared"])
def test_case_E10(device, dtype, backend, biases):
    """prime-rl#996, torchtitan#2369, #1364, sonic-moe#60: graph breaks, and a compilation for every token count or routing.

    At most two compilations for all T >= 2, one more each for 0 and 1; the bits of eager every time.
    """
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    layer = torch.compile(mok.moe, backend=counter, fullgraph=True)
    seen = 0
    for step, (T, allowed) in enumerate(((100, 1), (101, 2), (64, 2), (64, 2), (2, 2), (0, 3), (257, 3), (1, 4), (100, 4), (0, 4), (1, 4))):
        p = problem(random_routes(T, 2, 4, masked=0.3 * (step % 3), seed=step), 4, 64, 32, device, dtype, biases=biases, shared=(32, 16) * biases, seed=step)
        assert_same_bits(p.run(layer), p.run())
        seen = counter.frame_count
        assert seen <= allowed, f"{seen} compilations after T = {T}, step {step}"
    assert seen >= 2                                                            # so it was compiled at all, and for changing T


def test_case_E10_the_whole_layer(device, dtype):
    """E10 with the router inside the graph: routes, losses and counts follow the data, and none of them costs a compilation."""
    check_compiled_layer(device, dtype, "aot_eager")


@pytest.mark.slow
@needs_compiler
def test_case_E10_the_whole_layer_in_inductor(device):
    """As before, with everything around the layer's ops compiled to machine code."""
    check_compiled_layer(device, torch.bfloat16, "inductor")


def check_compiled_layer(device: str, dtype: torch.dtype, backend: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    layer = mok.MoE(mok.MoEConfig(64, 32, 8, 2, z_loss_coef=0.1, shared_intermediate_sizes=(16,), shared_gated=True), device=device, dtype=dtype)
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for step, (T, allowed) in enumerate(((100, 1), (101, 2), (64, 2), (0, 3), (1, 4), (33, 4))):
        x = torch.randn(T, 64, generator=torch.Generator().manual_seed(step)).to(device, dtype)
        eager = layer_step(layer, x)
        counts, routes = layer.tokens_per_expert.clone(), layer.routes
        assert_same_bits(layer_step(layer, x, compiled), eager)
        assert torch.equal(layer.tokens_per_expert, counts) and torch.equal(layer.routes[0], routes[0])
        assert counter.frame_count <= allowed, f"{counter.frame_count} compilations after T = {T}"
    assert counter.frame_count >= 2


def test_case_E10_fake_tensors(device, dtype):
    """E10's last line: shapes and dtypes of every result are known without data, forward and backward."""
    for T in (0, 1, 33):
        p = problem(random_routes(T, 2, 4), 4, 64, 32, device, dtype, biases=True, shared=(16,))
        real = p.run()
        with FakeTensorMode() as mode:
            fake = Problem({name: mode.from_tensor(t) for name, t in p.tensors.items()},
                           [tuple(mode.from_tensor(t) for t in parts) for parts in p.shared], mode.from_tensor(p.dy), p.settings).run()
        assert {n: (t.shape, t.dtype, t.stride()) for n, t in fake.items()} == {n: (t.shape, t.dtype, t.stride()) for n, t in real.items()}


# ---- E12 ----

def test_case_E12_a_new_forward_lets_go_of_the_last_graph(device):
    """The loss that a layer shows holds the router's graph, and that the stream of its pass; kept into the next forward, it spoils a capture there."""
    layer = mok.MoE(mok.MoEConfig(64, 32, 4, 2), device=device, dtype=torch.bfloat16)
    x = torch.randn(5, 64, device=device, dtype=torch.bfloat16)
    layer(x)
    last, gone = weakref.ref(layer.aux_loss), []
    layer.router.register_forward_pre_hook(lambda *_: gone.append(last() is None))
    layer(x)
    assert gone == [True] and layer.aux_loss is not None


# ---- E13 ----

def test_case_E13_no_parameter_drops_out_of_the_graph(device, dtype):
    """pytorch#126616, slime#1010, SkyRL#1370, the cause: experts without tokens leave the graph and the data-parallel reduction waits for them."""
    layer = mok.MoE(mok.MoEConfig(64, 32, 4, 1, expert_bias=True, balance="none"), device=device, dtype=dtype)
    for expert in (0, 3, -1):
        ids = torch.full((16, 1), expert, device=device)
        layer.zero_grad()
        y = layer(torch.randn(16, 64, device=device).to(dtype), routes=(ids, None))
        assert y.requires_grad
        y.sum().backward()
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None and parameter.grad.shape == parameter.shape, name
        for e in set(range(4)) - {expert}:
            for name in ("w_gate_up", "w_down", "b_gate_up", "b_down"):
                assert_exactly_zero(getattr(layer, name).grad[e], f"{name}[{e}]")
