"""Cases E11, E12, F7 and F8 as one GPU shows them: CUDA graphs, host syncs, other streams, multiprocessors that are taken."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import mok
from mok.function import moe_with_counts
from tests.cases.case_support import Problem, assert_same_bits, problem, random_routes

pytestmark = pytest.mark.gpu
T, E, K = 700, 8, 2
WIDTHS = pytest.mark.parametrize(("H", "I"), [pytest.param(64, 32, id="fused"), pytest.param(72, 40, id="plain")])   # the engine that runs such sizes


@pytest.fixture(autouse=True)
def _waits_end(monkeypatch):
    """A kernel that waits for something that never comes gives up after 20 s, and the next test says so."""
    if torch.cuda.get_device_capability() == (9, 0):
        from mok.engines.hopper.state import SPIN_LIMIT_S, set_spin_limit

        set_spin_limit(20.0)
        yield
        torch.cuda.synchronize()
        set_spin_limit(SPIN_LIMIT_S)
    else:
        yield


def bf16_problem(H: int, I: int, seed: int = 0, tokens: int = T) -> Problem:
    return problem(random_routes(tokens, K, E, masked=0.1, seed=seed), E, H, I, "cuda", torch.bfloat16, biases=True, shared=(32,), seed=seed)


def routings(T: int) -> dict[str, Tensor]:
    """What a graph must serve that was captured with the first of them."""
    fewer = random_routes(T, K, E, seed=2)
    fewer[T // 3:] = -1
    return {"as captured": random_routes(T, K, E, masked=0.1), "other routes": random_routes(T, K, E, seed=1), "fewer tiles": fewer,
            "nothing": torch.full((T, K), -1), "one expert takes all": torch.full((T, K), 5)}


def stepper(p: Problem) -> tuple[Tensor, Callable[[], dict[str, Tensor]]]:
    """(the ids that it reads, one forward and backward of p that gives y and every gradient)."""
    arguments, leaves = p.leaves()
    arguments["shared"] = [mok.SharedExpert(*parts) for parts in arguments["shared"]]
    ids = arguments["topk_ids"] = p["topk_ids"].clone()

    def step() -> dict[str, Tensor]:
        y = mok.moe(**arguments)
        return {"y": y.detach(), **dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), p.dy), strict=True))}

    return ids, step


def captured(step: Callable[[], dict[str, Tensor]], warm: bool = True) -> tuple[torch.cuda.CUDAGraph, dict[str, Tensor]]:
    if warm:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def poison_free_memory() -> None:
    for megabytes in (1, 16, 128):
        torch.full((megabytes << 18,), float("nan"), device="cuda")


@WIDTHS
def test_case_E11(H, I):
    """DeepGEMM#451, flashinfer#4735, #4238, Megatron-LM#6999: a replay met flags, tile maps or scratch of the replay before. Forward and backward in
    a graph, replayed with fewer tiles than it was captured with, with none, with all of them, and again: the bits of eager every time."""
    p = bf16_problem(H, I)
    routes = {name: ids.cuda() for name, ids in routings(T).items()}
    eager = {name: p.changed(topk_ids=ids).run() for name, ids in routes.items()}
    ids, step = stepper(p)
    graph, results = captured(step)
    for name in (*routes, "fewer tiles", "as captured", "nothing", "as captured"):
        ids.copy_(routes[name])
        poison_free_memory()
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(results, eager[name])
    graph.reset()


@WIDTHS
def test_case_E11_two_layers_in_two_graphs(H, I):
    """E11's other half: scratch of one graph must not be the other's. Replayed in turns, and at once on two streams, each with other routes."""
    problems = [bf16_problem(H, I, seed) for seed in (0, 1)]
    routes = [ids.cuda() for ids in routings(T).values()]
    eager = [[p.changed(topk_ids=ids).run() for ids in routes] for p in problems]
    made = [stepper(p) for p in problems]
    graphs = [captured(step) for _, step in made]
    streams = [torch.cuda.Stream() for _ in problems]
    for at_once in (False, True):
        for i in range(2 * len(routes)):
            for layer, stream in enumerate(streams):
                made[layer][0].copy_(routes[(i + layer) % len(routes)])
                stream.wait_stream(torch.cuda.current_stream())
            for (graph, _), stream in zip(graphs, streams):
                with torch.cuda.stream(stream):
                    graph.replay()
                if not at_once:
                    stream.synchronize()
            torch.cuda.synchronize()
            for layer, (_, results) in enumerate(graphs):
                assert_same_bits(results, eager[layer][(i + layer) % len(routes)])
    for graph, _ in graphs:
        graph.reset()


@WIDTHS
def test_case_E12(H, I):
    """Capture fails on a host sync, or tunes or compiles inside it: sizes that nothing was run with are captured at once, and forward and backward
    outside of a graph never wait for the GPU."""
    torch.use_deterministic_algorithms(False)                             # torch's own deterministic indexing may wait; the fixture puts it back
    bf16_problem(H, I).run()                                              # kernels are loaded and the device's counters made
    p = bf16_problem(H, I, seed=3, tokens=333)
    eager = p.run()
    _, step = stepper(bf16_problem(H, I, seed=4, tokens=1500))
    graph, results = captured(step, warm=False)
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(results, bf16_problem(H, I, seed=4, tokens=1500).run())
    graph.reset()

    _, step = stepper(p)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [step() for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for again in results:
        assert_same_bits(again, eager)


def test_case_E12_the_whole_layer():
    """The router, its loss and its counts are inside: nothing waits, and a graph of the layer's training step gives eager's bits."""
    torch.use_deterministic_algorithms(False)
    layer = mok.MoE(mok.MoEConfig(64, 32, 8, 2, balance="aux_loss", shared_intermediate_sizes=(16,)), device="cuda", dtype=torch.bfloat16)
    data = [torch.randn(500, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    x = data[0].clone()

    def step() -> dict[str, Tensor]:
        y = layer(x)
        loss = y.float().square().mean() + layer.aux_loss
        return {"y": y.detach(), "loss": loss.detach(),
                **{name: grad for (name, _), grad in zip(layer.named_parameters(), torch.autograd.grad(loss, list(layer.parameters())))}}

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        eager = []
        for batch in data:
            x.copy_(batch)
            eager.append(step())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph, results = captured(step)
    for i in (1, 0, 2, 1):
        x.copy_(data[i])
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(results, eager[i])
    graph.reset()


@WIDTHS
def test_case_F7(H, I):
    """torchtitan#3413: ids read before the kernel that writes them was done. They come from a slow kernel and a mask just before the call, on a stream
    that is not the default one."""
    p = bf16_problem(H, I)
    stale, fresh = p["topk_ids"].clone(), random_routes(T, K, E, seed=7).cuda()
    mask = torch.rand(T, K, device="cuda") < 0.5
    wanted = fresh.masked_fill(mask, -1)
    eager = p.changed(topk_ids=wanted).run()
    counts = torch.bincount(wanted[wanted >= 0], minlength=E)
    ids, step = stepper(p)
    arguments, _ = p.leaves()
    arguments |= {"shared": [], "topk_ids": ids}
    stream = torch.cuda.Stream()
    for _ in range(3):
        ids.copy_(stale)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)                                 # about 10 ms
            ids.copy_(fresh).masked_fill_(mask, -1)
            results = step()
            _, seen = moe_with_counts(**arguments)
        stream.synchronize()
        assert_same_bits(results, eager)
        assert torch.equal(seen.long(), counts)


def test_case_F8():
    """sglang#36657, vllm#41189, local-inference-lab/vllm#150, FlashMoE#3, nccl#2031: a persistent kernel that needs all multiprocessors hung when
    some were taken. Blocks that spin for 50 ms beside it, products that fill the GPU, and a second layer on another stream: it progresses, the bits are
    those of the idle GPU; the grid comes from the occupancy query, so reserving all but one multiprocessor is enough to run, and all is refused."""
    p = bf16_problem(64, 32)
    eager = p.run()
    _, step = stepper(p)
    streams = [torch.cuda.Stream() for _ in range(10)]
    big = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    for _ in range(3):
        for stream in streams[:8]:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(100_000_000)                            # about 50 ms on one multiprocessor
        results = []
        for stream in streams[8:]:
            with torch.cuda.stream(stream):
                results.append(step())                                    # two layers at once
        for _ in range(20):
            big @ big
        results.append(step())
        torch.cuda.synchronize()
        for again in results:
            assert_same_bits(again, eager)
    if mok.engine_for(p["x"], 32) != "hopper":
        return
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    for reserved in (8, multiprocessors - 1):
        p.settings["overlap"] = mok.Overlap(reserve_sms=reserved)
        for stream in streams[:8]:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(50_000_000)
        assert_same_bits(p.run(), eager)
    p.settings["overlap"] = mok.Overlap(reserve_sms=multiprocessors)
    with pytest.raises(ValueError, match="reserve_sms"):
        p.run()
