"""The Hopper forward kernel on a GPU: every shape and setting against the float64 reference, and the bitwise promises."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu_support import big_case, check_forward, gpu_case, poison
from oracle import make_case, same_bits

from mok.config import Overlap

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    from mok.engines.hopper.state import set_spin_limit

    set_spin_limit(5.0)
    yield
    torch.cuda.synchronize()
    from mok.runtime import runtime

    runtime.raise_pending_errors()


def run(case, **changes):
    from mok.engines.hopper.engine import HopperEngine

    engine = HopperEngine()
    options = replace(case.options, **changes)
    y, saved = engine.forward(engine.build_plan(case.topk_ids, case.num_experts), case.tensors, options)
    torch.cuda.synchronize()
    return y, saved


def launched(case, config=None, grain=None, reserve_sms=None):
    from mok.engines.hopper.engine import HopperEngine
    from mok.engines.hopper.launch import forward

    y, saved = forward(HopperEngine().build_plan(case.topk_ids, case.num_experts), case.tensors, case.options, config, grain, reserve_sms)
    torch.cuda.synchronize()
    return y, saved


SHAPES = {
    "one full tile of every kind": (128, 256, 128, 2, 1),
    "several tiles, an empty expert, -1 routes": (300, 256, 128, 8, 2),
    "smallest H and I": (33, 16, 16, 4, 2),
    "H below one k-step, I above one": (70, 48, 80, 4, 2),
    "tails everywhere": (200, 272, 176, 5, 3),
    "I with a tail of 64 and one of 16": (257, 320, 336, 6, 2),
    "H == I": (129, 128, 128, 4, 2),
    "2I == H": (127, 128, 64, 4, 2),
    "T == E": (8, 64, 32, 8, 2),
    "one token": (1, 256, 128, 8, 2),
    "one expert": (100, 64, 64, 1, 1),
    "K == E": (60, 64, 96, 4, 4),
    "K not a multiple of the unrolled loads": (500, 144, 80, 40, 9),
    "K above one look at routes": (150, 64, 32, 40, 19),
    "more tiles than the rings hold": (6000, 192, 144, 6, 4),
    "gpt-oss sizes": (130, 2880, 2880, 3, 2),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shape(name):
    case = gpu_case(*SHAPES[name])
    for step in range(3):                                   # token counts shrink and grow again, free memory is NaN before each
        part = case.keep(torch.randperm(case.topk_ids.shape[0], device="cuda")[:max(1, case.topk_ids.shape[0] // (1 + step % 2))])
        poison()
        check_forward(part, run(part, save_for_backward=step != 1)[0])


@pytest.mark.parametrize("activation,limit", [("swiglu", None), ("swiglu", 0.5), ("swiglu_oai", None), ("swiglu_oai", 1.0), ("geglu", None), ("reglu", None)])
def test_activation_with_biases(activation, limit):
    case = gpu_case(260, 208, 112, 5, 2, biases=True, activation=activation, swiglu_limit=limit)
    poison()
    y, _ = run(case)
    check_forward(case, y)
    without, _ = run(case, save_for_backward=False)
    assert same_bits(without, y), "the training variant and the one that saves nothing differ"


@pytest.mark.parametrize("shared", [((96, False),), ((96, True),), ((64, False), (208, True)), ((208, True), (48, True))])
def test_shared_experts(shared):
    case = gpu_case(300, 144, 80, 6, 2, shared=shared, biases=True)
    poison()
    y, saved = run(case)
    check_forward(case, y)
    assert saved.shared_z.shape == (300, 2 * sum(width for width, _ in shared))
    at = 0
    for expert, (width, _) in zip(case.tensors.shared, shared):
        z = case.tensors.x.double() @ expert.w_gate_up.double().T
        assert (saved.shared_z[:, at:at + 2 * width].double() - z).abs().max() < 0.05
        at += 2 * width
    results = {same_bits(y, run(case, save_for_backward=False)[0])}
    results |= {same_bits(y, run(case, overlap=Overlap(minibatch_rows=rows, mover_warps=warps))[0]) for rows, warps in ((128, 4), (2048, 1))}
    assert results == {True}


def test_more_shared_experts_than_one_launch_takes():
    case = gpu_case(40, 64, 32, 4, 2, shared=((32, True), (48, False), (16, True)))
    y, _ = run(case)
    check_forward(case, y)


def test_saved_z():
    """z of every routed row, rounded; also h comes from it, so this checks half of the kernel for each expert on its own."""
    case = gpu_case(400, 208, 112, 5, 2, biases=True)
    from mok.engines.hopper.engine import HopperEngine

    plan = HopperEngine().build_plan(case.topk_ids, case.num_experts)
    _, saved = run(case)
    t = case.tensors
    rows = torch.nonzero(plan.row_to_slot >= 0).flatten()
    expert = plan.tile_to_expert[rows // 128].long()
    x = t.x.double()[plan.row_to_slot[rows].long() // 2]
    truth = torch.bmm(t.w_gate_up.double()[expert], x[:, :, None])[:, :, 0] + t.b_gate_up.double()[expert]
    error = (saved.z[rows].double() - truth).abs()
    assert error.max() < 2**-8 * 8 and (error <= 2**-8 * truth.abs() + 1e-5).float().mean() > 0.99


def test_all_routes_masked_and_same_expert_twice():
    masked = gpu_case(200, 64, 32, 4, 2, topk_ids=torch.full((200, 2), -1))
    poison()
    y, _ = run(masked)
    assert not y.any(), "a token without routes must be exactly zero"
    twice = gpu_case(66, 64, 48, 4, 6, topk_ids=torch.ones(66, 6, dtype=torch.int64))
    check_forward(twice, run(twice)[0])
    mixed = torch.randint(-1, 4, (150, 3), generator=torch.Generator().manual_seed(1))
    mixed[::7] = -1
    case = gpu_case(150, 80, 48, 4, 3, topk_ids=mixed, shared=((32, True),))
    poison()
    check_forward(case, run(case)[0])


def test_no_tokens():
    case = gpu_case(8, 64, 32, 4, 2).keep(torch.arange(0, device="cuda"))
    y, saved = run(case)
    assert y.shape == (0, 64) and saved.z.shape == (0, 64)


def test_one_expert_takes_everything():
    case = gpu_case(3000, 128, 96, 16, 2, topk_ids=torch.stack([torch.full((3000,), 9), torch.full((3000,), -1)], dim=1))
    poison()
    check_forward(case, run(case)[0])


def test_nan_in_other_experts_and_rows_does_not_leak():
    """H and I with tails, so that every box hangs over into the neighbour: its NaN must not arrive."""
    ids = torch.tensor([[1, 3]]).repeat(150, 1)
    case = gpu_case(150, 144, 80, 5, 2, topk_ids=ids, biases=True)
    for e in (0, 2, 4):
        case.tensors.w_gate_up[e] = float("nan")
        case.tensors.w_down[e] = float("nan")
        case.tensors.b_gate_up[e] = float("nan")
        case.tensors.b_down[e] = float("nan")
    clean = replace(case, tensors=replace(case.tensors, **{n: torch.nan_to_num(getattr(case.tensors, n)) for n in
                                                           ("w_gate_up", "w_down", "b_gate_up", "b_down")}))
    check_forward(clean, run(case)[0])
    case.tensors.w_gate_up[3, 7, 5] = float("inf")
    assert not torch.isfinite(run(case)[0]).all(), "an infinite weight of a chosen expert must reach the output"


def test_views_of_x_give_the_same_bits_without_a_copy():
    case = gpu_case(200, 128, 64, 4, 2, shared=((32, True),))
    expected, _ = run(case)
    wide = torch.full((200, 320), float("nan"), device="cuda", dtype=torch.bfloat16)
    wide[:, 64:192] = case.tensors.x
    odd = torch.zeros(200 * 128 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(200, 128).copy_(case.tensors.x)
    for view in (wide[:, 64:192], case.tensors.x.T.contiguous().T, odd):
        assert same_bits(run(replace(case, tensors=replace(case.tensors, x=view)))[0], expected)
    from mok.engines.hopper.launch import rows_readable

    assert rows_readable(wide[:, 64:192], True) is not None and rows_readable(wide[:, 64:192], True).data_ptr() == wide[:, 64:192].data_ptr()
    no_shared = gpu_case(200, 128, 64, 4, 2)
    row = no_shared.tensors.x[:1].expand(200, 128)
    assert same_bits(run(replace(no_shared, tensors=replace(no_shared.tensors, x=row)))[0],
                     run(replace(no_shared, tensors=replace(no_shared.tensors, x=row.contiguous())))[0])


def test_weights_that_are_views():
    case = gpu_case(100, 128, 64, 4, 2)
    expected, _ = run(case)
    t = case.tensors
    padded = torch.full((4, 128, 256), float("nan"), device="cuda", dtype=torch.bfloat16)
    padded[:, :, 16:144] = t.w_gate_up
    transposed = t.w_down.transpose(1, 2).contiguous().transpose(1, 2)
    assert same_bits(run(replace(case, tensors=replace(t, w_gate_up=padded[:, :, 16:144], w_down=transposed)))[0], expected)


@pytest.fixture(scope="module")
def promise_case():
    """At least 10^4 routes and 10^6 activation elements, odd H and I, a few -1 routes."""
    return gpu_case(5000, 336, 272, 24, 4, biases=True, shared=((80, True),))


def test_p1_repeats_give_the_same_bits(promise_case):
    y, saved = run(promise_case)
    for _ in range(100):
        poison()
        again, saved_again = run(promise_case)
        assert same_bits(again, y) and same_bits(saved_again.shared_z, saved.shared_z)


def test_p2_no_setting_changes_a_bit(promise_case):
    from mok.engines.hopper.forward import ForwardConfig
    from mok.engines.hopper.launch import Granularity

    y, _ = run(promise_case)
    for rows, warps, reserved in ((128, 1, 0), (256, 2, 100), (1024, 4, 131), (4096, 8, 7), (1 << 20, 2, 64)):
        assert same_bits(run(promise_case, overlap=Overlap(rows, warps, reserved))[0], y), (rows, warps, reserved)
    slow = ForwardConfig(True, 2, debug=True)
    for config in (ForwardConfig(True, 2, stagger=0), ForwardConfig(True, 1, stagger=1), slow, replace(slow, save_z=False)):
        for grain in (Granularity(1, 1, 2), Granularity(3, 4, 6, tickets=True), Granularity(16, 32, 48), Granularity(16, 32, 48, tickets=True)):
            poison()
            assert same_bits(launched(promise_case, config, grain)[0], y), (config, grain)


def test_p4_a_token_does_not_depend_on_the_batch(promise_case):
    y, _ = run(promise_case)
    order = torch.randperm(5000, device="cuda")
    assert same_bits(run(promise_case.keep(order))[0], y[order])
    for tokens in (order[:1], order[:63], order[100:1100]):
        assert same_bits(run(promise_case.keep(tokens))[0], y[tokens])


def test_p1_p2_at_full_size():
    """Qwen3-30B-A3B's layer: repeats, every kind of setting and sleeping roles over 262144 routes; says where bits differ."""
    from mok.engines.hopper.forward import ForwardConfig
    from mok.engines.hopper.launch import Granularity

    case = big_case(32768, 2048, 768, 128, 8, save=True)
    y, saved = launched(case)
    rows = torch.nonzero(_plan(case).row_to_slot >= 0).flatten()
    trials = [(ForwardConfig(True), None, 0)] * 8 + [(ForwardConfig(False), None, 0)] * 4
    trials += [(ForwardConfig(False), Granularity(8, 16, 24), 0), (ForwardConfig(True), Granularity(8, 8, 16), 0),
               (ForwardConfig(False, 1), Granularity(4, 9, 9), 3), (ForwardConfig(True), Granularity(48, 64, 96), 64),
               (ForwardConfig(True, debug=True), None, 0), (ForwardConfig(False, debug=True), Granularity(5, 7, 10, tickets=True), 1)]
    found = []
    for number, (config, grain, reserved) in enumerate(trials):
        poison()
        again, saved_again = launched(replace(case, options=replace(case.options, save_for_backward=config.save_z)), config, grain, reserved)
        if config.save_z and not same_bits(saved_again.z[rows], saved.z[rows]):
            wrong = torch.nonzero((saved_again.z[rows] != saved.z[rows]).any(1)).flatten()
            found.append(f"trial {number} {config} {grain}: z differs in {wrong.numel()} rows, tiles {(rows[wrong] // 128).unique().tolist()[:10]}")
        if not same_bits(again, y):
            wrong = torch.nonzero(again != y)
            found.append(f"trial {number} {config} {grain}: y differs in {wrong[:, 0].unique().numel()} tokens, {wrong.shape[0]} elements, columns "
                         f"{wrong[:, 1].min()}..{wrong[:, 1].max()}, largest {(again.float() - y.float()).abs().max():.3g}, first {wrong[0].tolist()}")
    assert not found, "\n".join(found)


def _plan(case):
    from mok.engines.hopper.engine import HopperEngine

    return HopperEngine().build_plan(case.topk_ids, case.num_experts)


def test_streams_and_graphs(promise_case):
    from mok.engines.hopper.engine import HopperEngine

    engine = HopperEngine()
    options = promise_case.options

    def layer(ids, tensors):
        return engine.forward(engine.build_plan(ids, 24), tensors, options)[0]

    t = promise_case.tensors
    ids = promise_case.topk_ids.clone()
    expected = {}
    routes = [ids.roll(shift, 0).contiguous() for shift in (0, 1, 700)]
    routes[1][2000:] = -1                                                          # fewer tiles than captured with
    for i, route in enumerate(routes):
        expected[i] = layer(route, t)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    outputs = []
    for i, stream in enumerate(streams * 3):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            outputs.append((i % 3, layer(routes[i % 3], t)))
    torch.cuda.synchronize()
    assert all(same_bits(out, expected[i]) for i, out in outputs)

    graphs = []
    for _ in range(2):
        static = ids.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            first = layer(static, t)
            second = layer(static.flip(0), t)                                      # two layers in one graph
        graphs.append((graph, static, first, second))
    for i in (0, 1, 2, 1, 0):
        for j, (graph, static, _, _) in enumerate(graphs):
            static.copy_(routes[i])
            streams[j].wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(streams[j]):
                graph.replay()
        torch.cuda.synchronize()
        for _, _, first, _ in graphs:
            assert same_bits(first, expected[i]), i
    for graph, _, _, _ in graphs:
        graph.reset()


def test_one_kernel_no_sync_no_recompile():
    from torch.profiler import ProfilerActivity, profile

    from mok.engines.hopper.engine import HopperEngine
    from mok.engines.hopper.forward import _forward_kernel

    engine = HopperEngine()
    cases = [gpu_case(T, 256, 128, E, K) for T, E, K in ((300, 8, 2), (1, 3, 1), (2000, 16, 16), (128, 1, 1), (4096, 200, 6))]
    for case in cases[:1]:
        run(case)
    binaries = len(_forward_kernel.device_caches[torch.cuda.current_device()][0])
    plans = [engine.build_plan(case.topk_ids, case.num_experts) for case in cases]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
            for case, plan in zip(cases, plans):
                engine.forward(plan, case.tensors, case.options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    kernels = [event.name for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert kernels == ["_forward_kernel"] * len(cases), kernels
    assert len(_forward_kernel.device_caches[torch.cuda.current_device()][0]) == binaries, "T, E or K selected another binary"


def test_offsets_beyond_two_to_the_31():
    """T*K*H, R*2I and E*2I*H each pass 2^31 elements: the last tokens, computed by themselves, have the same bits (P4) and are right."""
    case = big_case(40000, 7168, 1024, 150, 8, save=True)
    y, _ = run(case)
    assert y.shape[0] * 8 * 7168 > 2**31 and case.tensors.w_gate_up.numel() > 2**31
    last = torch.arange(40000 - 64, 40000, device="cuda")
    part = case.keep(last)
    assert same_bits(run(part)[0], y[last])
    used = part.topk_ids.unique()
    few = replace(part, topk_ids=torch.searchsorted(used, part.topk_ids),
                  tensors=replace(part.tensors, w_gate_up=part.tensors.w_gate_up[used], w_down=part.tensors.w_down[used]))
    check_small(few, y[last])


def check_small(case, y):
    """Against the truth in two halves of hidden columns, so that float64 copies of the weights fit."""
    from mok.engines.hopper.engine import HopperEngine

    truth = torch.zeros(y.shape, dtype=torch.float64, device="cuda")
    for e in range(case.num_experts):
        t, k = torch.nonzero(case.topk_ids == e, as_tuple=True)
        z = case.tensors.x[t].double() @ case.tensors.w_gate_up[e].double().T
        g, u = z.chunk(2, dim=-1)
        truth.index_add_(0, t, case.tensors.topk_weights[t, k].double()[:, None] * ((g * torch.sigmoid(g) * u) @ case.tensors.w_down[e].double().T))
    assert (y.double() - truth).norm() / truth.norm() < 5e-3
    assert HopperEngine.name == "hopper"


def test_timeout_is_reported_and_the_next_call_works():
    """A counter that nobody raises: hold the row counters below their target by making the plan claim a tile that no mover fills."""
    import mok
    from mok.engines.hopper.engine import HopperEngine
    from mok.engines.hopper.state import launch_state, set_spin_limit
    from mok.runtime import runtime

    set_spin_limit(0.05)
    case = gpu_case(300, 64, 32, 4, 2)
    good, _ = run(case)
    engine = HopperEngine()
    plan = engine.build_plan(case.topk_ids, case.num_experts)
    block, capacity = launch_state(case.tensors.x.device, 1)
    torch.cuda.synchronize()
    epoch = int(block[0])
    set_words = 16 + 5 * capacity
    block[16 + (epoch % 2) * set_words + 16] = -1000                  # rows_ready of tile 0 in the set that the next launch uses
    y, _ = engine.forward(plan, case.tensors, case.options)
    torch.cuda.synchronize()
    assert torch.isnan(y).any()
    with pytest.raises(mok.FabricTimeout, match="gave up after"):
        runtime.raise_pending_errors()
    again, _ = run(case)
    assert same_bits(again, good)


def test_make_case_is_seeded():
    assert same_bits(make_case(5, 16, 16, 3, 2, torch.bfloat16).tensors.x, make_case(5, 16, 16, 3, 2, torch.bfloat16).tensors.x)


def test_a_thread_that_has_called_nothing_of_cuda_yet():
    """As autograd's own threads: PyTorch binds a context only when it has something to do, and descriptors are encoded before it has."""
    import threading

    case = gpu_case(64, 64, 48, 4, 2)
    expected, x = run(case)[0], case.tensors.x.clone()              # another address: a list of arguments that no launch has made
    torch.cuda.synchronize()
    found: list = []

    def body() -> None:
        try:
            found.append(run(replace(case, tensors=replace(case.tensors, x=x)))[0])
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert isinstance(found[0], torch.Tensor), found
    torch.cuda.synchronize()
    assert same_bits(found[0], expected)
