"""The GPU plan builder equals RoutingPlan.build bit for bit: on an NVIDIA GPU, and in CI under Triton's interpreter in a process of its own."""
from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from mok.plan import RoutingPlan
from mok.runtime import runtime

pytest.importorskip("triton")
from mok.engines.hopper import plan_kernel

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
on_device = (lambda test: test) if INTERPRETED else pytest.mark.gpu      # the cases below run on DEVICE


def routes(T: int, K: int, E: int, seed: int = 0, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """(T, K) ids with a tenth of -1, and expert 1 (of several) without any token."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, E, (T, K), generator=generator)
    ids[torch.rand(T, K, generator=generator) < 0.1] = -1
    ids[ids == 1] = 0
    return ids.to(dtype)


def assert_same_plan(ids: torch.Tensor, num_experts: int, **kwargs) -> RoutingPlan:
    got = plan_kernel.build_plan(ids, num_experts, **kwargs)
    want = RoutingPlan.build(ids.cpu(), num_experts, **kwargs)
    for name, ours, theirs in zip(vars(want), got.tensors(), want.tensors()):
        assert ours.dtype == theirs.dtype and ours.device == ids.device and ours.is_contiguous(), name
        assert torch.equal(ours.cpu(), theirs), name
    return got


@on_device
def test_worked_example_of_the_plan():
    plan = assert_same_plan(torch.tensor([[2, 0], [0, -1]], device=DEVICE), 3, block_m=4)
    assert plan.slot_to_row.tolist() == [4, 0, 1, -1]
    assert plan.row_to_slot.tolist() == [1, 2, -1, -1, 0, -1] + [-1] * 10
    assert plan.tile_to_expert.tolist() == [0, 2, -1, -1]
    assert plan.expert_offsets.tolist() == [0, 4, 4, 8] and plan.tokens_per_expert.tolist() == [2, 0, 1] and plan.num_tiles.tolist() == [2]


@on_device
@pytest.mark.parametrize("T,K,E", [
    (0, 2, 3),          # no token: nothing to dereference
    (1, 1, 1),          # the smallest layer
    (1, 8, 128),        # rows are nearly all padding: more programs than chunks
    (31, 1, 4), (32, 1, 4), (33, 1, 4),         # around one block of ranked slots
    (73, 7, 32),        # 511 slots, and E as wide as the first class
    (171, 3, 33),       # 513 slots, and E one over it
    (40, 33, 33),       # K = E
    (2, 1024, 1024),    # the most experts, K = E
    (300, 4, 513),      # one over the third class
])
def test_equals_the_torch_builder(T, K, E):
    assert_same_plan(routes(T, K, E).to(DEVICE), E)
    assert_same_plan(routes(T, K, E, seed=1, dtype=torch.int32).to(DEVICE), E)


@pytest.mark.gpu
def test_a_size_that_comes_again():
    """Its launches are kept ready from the first time on: for each size, dtype and layout their own, and never with an address of then."""
    kept = []                                       # all alive: none is built in an earlier one's memory
    for turn in range(3):
        for T, K, E in ((70, 3, 9), (70, 3, 10), (71, 3, 9)):
            for dtype in (torch.int32, torch.int64):
                ids = routes(T, K, E, seed=turn, dtype=dtype).to(DEVICE)
                for view in (ids, ids.t().contiguous().t(), torch.cat([ids, ids], dim=1)[:, :K]):
                    kept.append(assert_same_plan(view, E))


@on_device
def test_one_expert_takes_everything_and_all_routes_masked():
    assert_same_plan(torch.full((300, 2), 5, device=DEVICE), 8)
    assert_same_plan(torch.full((300, 2), -1, device=DEVICE), 8)


@on_device
@pytest.mark.parametrize("max_chunks", [1, 4])
def test_the_chunking_changes_no_bit(max_chunks, monkeypatch):
    """1: one program walks over every block; 4: several blocks a chunk, a short last chunk, and fewer chunks than groups of tiles."""
    monkeypatch.setattr(plan_kernel, "MAX_CHUNKS", max_chunks)
    assert plan_kernel.chunking(2100) == ((2112, 1) if max_chunks == 1 else (544, 4))
    assert_same_plan(routes(700, 3, 9).to(DEVICE), 9)
    assert_same_plan(routes(64, 2, 64).to(DEVICE), 64)


@on_device
def test_strided_ids_are_read_in_place():
    wide = routes(90, 8, 16).to(DEVICE)
    for view in (wide[:, 2:5], wide[:, ::2], wide.T, wide[::3], wide[1:, 1:2], wide[3:4].expand(50, 8), wide.to(torch.int32)[:, 1:4]):
        before = view.clone()
        assert_same_plan(view, 16)
        assert torch.equal(view, before)


@on_device
@pytest.mark.parametrize("bad", [4, -2, 2**31, -2**40, 2**62])
def test_an_id_out_of_range_counts_as_none_and_is_reported_once(bad):
    runtime.raise_pending_errors()
    ids = routes(200, 3, 4).to(DEVICE)
    ids[150, 1] = bad
    assert_same_plan(ids, 4)
    assert plan_kernel.build_plan(ids.clamp(-1, 3), 4).num_rows > 0           # a later good call does not wipe the report
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    shown = max(-2**51, min(bad, 2**51 - 1))
    with pytest.raises(ValueError, match=rf"topk_ids held {shown} .*E = 4"):
        runtime.raise_pending_errors()
    runtime.raise_pending_errors()                                           # reported once


@on_device
def test_no_report_without_a_bad_id():
    runtime.raise_pending_errors()
    plan_kernel.build_plan(routes(100, 4, 7).to(DEVICE), 7)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    runtime.raise_pending_errors()


@on_device
def test_bad_arguments_name_themselves():
    with pytest.raises(ValueError, match="num_experts=1025"):
        plan_kernel.build_plan(torch.zeros(2, 2, dtype=torch.int64, device=DEVICE), 1025)
    with pytest.raises(ValueError, match=r"topk_ids.*float32"):
        plan_kernel.build_plan(torch.zeros(2, 2, device=DEVICE), 4)
    with pytest.raises(ValueError, match=r"topk_ids.shape=\(2,\)"):
        plan_kernel.build_plan(torch.zeros(2, dtype=torch.int64, device=DEVICE), 4)


def test_row_numbers_that_leave_31_bits_are_refused():
    assert plan_kernel.chunking(1000) == (32, 32) and plan_kernel.chunking(0) == (32, 1)
    assert plan_kernel.unsupported_reason(2**31 - 2**24, 8) is None
    assert "rows" in plan_kernel.unsupported_reason(2**31 - 2**22, 8)
    chunk_slots, num_chunks = plan_kernel.chunking(2**31 - 2**24)
    assert num_chunks <= plan_kernel.MAX_CHUNKS and plan_kernel.MAX_CHUNKS * chunk_slots < 2**31     # the kernels' own 32-bit arithmetic


def test_nothing_specialises_on_run_time_values():
    for kernel in (plan_kernel._count_slots_kernel, plan_kernel._scan_chunks_kernel, plan_kernel._scatter_slots_kernel):
        for param in getattr(kernel, "params", []):
            assert param.is_constexpr or param.do_not_specialize or param.do_not_specialize_on_alignment, (kernel, param.name)


@pytest.mark.skipif(INTERPRETED, reason="the compiler is not there under the interpreter")
def test_every_variant_compiles_for_hopper_without_a_gpu(tmp_path):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import compile as triton_compile

    sources = plan_kernel.compile_sources()
    assert len(sources) == 5 * len(plan_kernel.EXPERT_CLASSES)
    for name, source, options in sources:
        kernel = triton_compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        cubin = tmp_path / f"{name}.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
        usage = subprocess.run([tool, "--dump-resource-usage", str(cubin)], capture_output=True, text=True, check=True).stdout
        stack = int(re.search(r"STACK:(\d+)", usage).group(1))
        assert stack <= 64, f"{name} spills {stack} bytes"


@pytest.mark.skipif(INTERPRETED, reason="this is the test that starts the interpreter")
def test_all_cases_under_the_interpreter():
    """TRITON_INTERPRET must be set before Triton is imported, so the cases above run in another process, on CPU tensors."""
    result = subprocess.run([sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore", __file__],
                            env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300)
    passed = re.search(r"(\d+) passed", result.stdout)
    assert result.returncode == 0 and passed and int(passed.group(1)) >= 25, result.stdout[-4000:] + result.stderr[-2000:]


def compiled_variants() -> int:
    kernels = (plan_kernel._count_slots_kernel, plan_kernel._scan_chunks_kernel, plan_kernel._scatter_slots_kernel)
    return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels)


@pytest.mark.gpu
def test_large_random_routings_on_the_gpu():
    for T, K, E in ((32768, 8, 128), (32768, 8, 1024), (28672, 2, 8), (100_000, 6, 384)):
        assert_same_plan(routes(T, K, E).cuda(), E)


@pytest.mark.gpu
def test_three_launches_without_memset_or_copy():
    from torch.profiler import ProfilerActivity, profile

    ids = routes(4096, 8, 128).cuda()
    plan_kernel.build_plan(ids, 128)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        plan_kernel.build_plan(ids, 128)
        torch.cuda.synchronize()
    names = [event.name for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(names) == 3 and all("_kernel" in name for name in names), names


@pytest.mark.gpu
def test_no_recompilation_and_no_sync_when_sizes_change():
    for dtype in (torch.int32, torch.int64):
        plan_kernel.build_plan(routes(64, 8, 128, dtype=dtype).cuda(), 128)
    before = compiled_variants()
    views = [routes(T, K, E, dtype=dtype).cuda() for T, K, E in ((1, 1, 33), (16, 16, 128), (1000, 8, 64), (0, 8, 128), (333, 5, 100))
             for dtype in (torch.int32, torch.int64)]
    views += [view[:, 1:] for view in views if view.shape[1] > 1]            # pointers off 16-byte alignment
    torch.cuda.set_sync_debug_mode("error")
    try:
        for ids in views:
            plan_kernel.build_plan(ids, 128)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert compiled_variants() == before


@pytest.mark.gpu
def test_graph_replay_with_new_routes():
    ids = routes(500, 4, 16).cuda()
    plan_kernel.build_plan(ids, 16)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = plan_kernel.build_plan(ids, 16)
    for seed in range(3):
        ids.copy_(routes(500, 4, 16, seed=seed))
        graph.replay()
        for ours, theirs in zip(plan.tensors(), RoutingPlan.build(ids.cpu(), 16).tensors()):
            assert torch.equal(ours.cpu(), theirs)
