"""Several ranks on one GPU against one rank on as many multiprocessors, same global work: first the bits, then the time of plan + forward, or of backward.

    PYTHONPATH=. python3 runs/expert_parallel.py --ranks 4 --commit HASH --out OUT.json
    PYTHONPATH=. python3 runs/expert_parallel.py --ranks 4 --backward --commit HASH --out OUT.json
    PYTHONPATH=. python3 runs/expert_parallel.py --ranks 4 --minibatch-rows 256 1024 2048     other granularities too, in turns with the default

Every rank is a process, a client of a private MPS daemon with its share of the multiprocessors. Rank r has a quarter (T / W) of the tokens of the Kimi K2 rank
shape and its block of the experts. Its y (with --backward its gradients too) must equal, bit for bit, that part of what one rank's engine computes for
all tokens.

Last line of stdout: one JSON document; `ratio_to_one_rank` is the group's time over one rank's (1.10 wanted). "no communication": the same processes at
once, each with one rank's engine on its share of the multiprocessors, its tokens' routes all to its own experts, so as many rows to a rank where routes
are balanced: what sharing a device costs by itself. `host_us` is the host's time for a call of the engine; `layer_host_us` that for `mok.moe`
in training and for its backward, autograd included, with every synchronisation an error (limits: 150, 250); "torch: backward" is an empty function's.
A core whose other hardware thread is busy runs Python at half speed, for seconds; "undisturbed" leaves out calls beside which it did.
"""
from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SHAPES = {"kimi-k2-ep64-rank": (28672, 7168, 2048, 8, 2), "qwen3-30b-a3b": (32768, 2048, 768, 128, 8), "tiny": (2048, 512, 256, 8, 2)}


def problem(T: int, H: int, I: int, E: int, K: int) -> tuple[torch.Tensor, ...]:
    """(ids, x, weights of the routes, w_gate_up, w_down, dy), the same in every process."""
    torch.manual_seed(0)
    x = torch.randn(T, H, device="cuda", dtype=torch.bfloat16)
    up = torch.randn(E, 2 * I, H, device="cuda", dtype=torch.bfloat16).mul_(H**-0.5)
    down = torch.randn(E, H, I, device="cuda", dtype=torch.bfloat16).mul_(I**-0.5)
    scores, ids = torch.randn(T, E, device="cuda").topk(K)
    return ids, x, scores.softmax(-1).contiguous(), up, down, torch.randn_like(x)


def gradients(passes: Any, plan: Any, tensors: Any, options: Any, saved: Any, dy: torch.Tensor) -> list[torch.Tensor]:
    """dx, d_topk_weights, dw_gate_up, dw_down by a group or an engine."""
    from mok.engines.protocol import Wants

    grads = passes.backward(plan, tensors, options, saved, dy, Wants(True, True, True, True), None)
    return [grads.x, grads.topk_weights, grads.w_gate_up, grads.w_down]


def timed(call: Any, count: int, blocks: int, together: Any) -> tuple[list[float], float]:
    """(ms of a call in each block, us of host time of a call); `together` lines ranks up before each block."""
    times, host = [], []
    for _ in range(blocks):
        torch.cuda.synchronize()
        together()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        started = time.perf_counter()
        begin.record()
        for _ in range(count):
            call()
        end.record()
        host.append((time.perf_counter() - started) / count * 1e6)
        end.synchronize()
        times.append(begin.elapsed_time(end) / count)
    return times, statistics.median(host)


def alone_beside_others(tensors: Any, ids: torch.Tensor, options: Any, dy: torch.Tensor | None, blocks: int) -> Any:
    """One rank's pass with every route to an expert of its own, on `blocks` multiprocessors, as a call without arguments.

    dy: backward's; None = plan and forward.
    """
    from mok.engines.hopper import backward_launch, launch, plan_kernel
    from mok.engines.protocol import Wants

    total = torch.cuda.get_device_properties(0).multi_processor_count
    launch.LAUNCH["launch_cooperative_grid"] = False                       # other processes hold the other multiprocessors
    E, H, I = tensors.w_down.shape
    own = (ids % E).contiguous()
    grain = launch.granularity(None, H, I, blocks / total, own.numel() / E)

    def forward() -> Any:
        plan = plan_kernel.build_plan(own, E)
        return plan, *launch.forward(plan, tensors, options, grain=grain, reserve_sms=total - blocks)

    if dy is None:
        return forward
    plan, _, saved = forward()
    group_tiles = max(4, round(backward_launch.default_group(H, I) * blocks / total))
    return lambda: backward_launch.hopper_backward(plan, tensors, options, saved, dy, Wants(True, True, True, True), None, group_tiles=group_tiles,
                                                   reserve_sms=total - blocks)


def loop_ns() -> int:
    """How long this core takes for 200 turns of an empty loop now: 1.6 us, or twice that while its other hardware thread is busy too."""
    start = time.perf_counter_ns()
    for _ in range(200):
        pass
    return time.perf_counter_ns() - start


class Probe(torch.autograd.Function):
    """Nothing, but that its backward, on the thread that ran the layer's, appends `loop_ns` to `loops`."""

    loops: ClassVar[list[int]] = []

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        Probe.loops.append(loop_ns())
        return dx


class Nothing(torch.autograd.Function):
    """What PyTorch's part of a layer's backward costs: gradients that are there already."""

    @staticmethod
    def forward(ctx, dy, grads, *inputs):
        ctx.save_for_backward(*inputs)
        ctx.grads = grads
        return dy.view_as(dy)

    @staticmethod
    def backward(ctx, dy):
        return None, None, *(ctx.grads if ctx.saved_tensors else ())


def layer_host_ns(group: Any, ids: torch.Tensor, tensors: Any, dy: torch.Tensor, together: Any) -> dict[str, list[tuple[int, int]]]:
    """(host time of a call, `loop_ns` on its thread right after it) of one rank's `mok.moe` and of its backward; all ranks call. A synchronisation raises."""
    import mok

    leaves = [t.detach().clone().requires_grad_() for t in (tensors.x, tensors.topk_weights, tensors.w_gate_up, tensors.w_down)]
    grads = tuple(leaf.detach() for leaf in leaves)

    def forward() -> torch.Tensor:
        return mok.moe(Probe.apply(leaves[0]), ids, *leaves[1:], group=group)

    y, nothing = forward(), Nothing.apply(dy, grads, Probe.apply(leaves[0]), *leaves[1:])
    calls = {"forward": lambda: mok.moe(leaves[0], ids, *leaves[1:], group=group),
             "backward": lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True),
             "torch: backward": lambda: torch.autograd.grad(nothing, leaves, dy, retain_graph=True)}
    found: dict[str, list[tuple[int, int]]] = {name: [] for name in calls}
    for name, call in calls.items():
        for block in range(8):
            torch.cuda.synchronize()
            together()
            torch.cuda.set_sync_debug_mode("error")
            for _ in range(40):
                Probe.loops.clear()
                start = time.perf_counter_ns()
                call()
                end = time.perf_counter_ns()
                if block:                                    # the first one makes launches ready
                    found[name].append((end - start, Probe.loops[0] if Probe.loops else loop_ns()))
            torch.cuda.set_sync_debug_mode("default")
    return found


def host_summary(ranks: list[dict[str, list[tuple[int, int]]]]) -> dict[str, Any]:
    """Medians in us of each rank's calls: `all`, and `undisturbed`, those beside which the loop took at most a quarter more than anywhere at its fastest (None:
    fewer than 20 such calls). `slowest`: of the ranks'."""
    fastest = min(loop for rank in ranks for calls in rank.values() for _, loop in calls)
    found: dict[str, Any] = {"fastest_loop": fastest / 1e3}
    for name in ranks[0]:
        good = [[ns for ns, loop in rank[name] if loop <= 1.25 * fastest] for rank in ranks]
        every = [round(statistics.median(ns for ns, _ in rank[name]) / 1e3, 1) for rank in ranks]
        undisturbed = [round(statistics.median(calls) / 1e3, 1) if len(calls) >= 20 else None for calls in good]
        found[name] = {"slowest": {"undisturbed": max((us for us in undisturbed if us is not None), default=None), "all": max(every)},
                       "undisturbed": undisturbed, "all": every, "part_undisturbed": [round(len(g) / len(rank[name]), 2) for g, rank in zip(good, ranks)]}
    return found


def differing_from_one_rank(ours: list[torch.Tensor], ids: torch.Tensor, everything: Any, options: Any, dy: torch.Tensor | None, mine: slice,
                            experts: slice) -> list[int]:
    """How many tokens (of weights' gradients: experts) of a rank's y, and with dy of its gradients, are not what one rank's engine computes for all tokens."""
    from mok.engines.hopper.engine import HopperEngine

    engine = HopperEngine()
    plan = engine.build_plan(ids, everything.w_down.shape[0])
    y, saved = engine.forward(plan, everything, options)
    wanted = [y[mine]]
    if dy is not None:
        dx, d_topk, d_up, d_down = gradients(engine, plan, everything, options, saved, dy)
        wanted += [dx[mine], d_topk[mine], d_up[experts], d_down[experts]]
    return [int((a != b).reshape(a.shape[0], -1).any(1).sum()) for a, b in zip(ours, wanted, strict=True)]


def rank_body(rank: int, W: int, store: str, shape: tuple[int, ...], save: bool, backward: bool, minibatch_rows: list[int],
              count: int, blocks: int, results: Any) -> None:
    """One rank: build the group, compare with one rank's engine, time."""
    import mok
    from mok.config import Overlap
    from mok.engines.protocol import MoETensors, PassOptions
    from mok.plan import experts_of_rank

    torch.cuda.set_device(0)
    dist.init_process_group("gloo", store=dist.FileStore(store, W), rank=rank, world_size=W)
    T, H, _, E, K = shape
    ids, x, weights, up, down, dy = problem(*shape)
    mine = slice(rank * T // W, (rank + 1) * T // W)
    first, owned = experts_of_rank(E, W, rank)
    started = time.perf_counter()
    ranks = mok.ExpertGroup(num_experts=E, max_tokens=-(-T // W), hidden_size=H, top_k=K, timeout_s=10)
    group, built = ranks.fused, time.perf_counter() - started
    if group is None:
        raise RuntimeError("this group's launches do not communicate")
    own_ids = ids[mine].contiguous()
    tensors = MoETensors(x[mine], weights[mine], up[first:first + owned], down[first:first + owned])
    options = PassOptions(save_for_backward=save or backward)
    plan = group.build_plan(own_ids, owned, "benchmark")
    y, saved = group.forward(plan, tensors, options)
    ours = [y, *(gradients(group, plan, tensors, options, saved, dy[mine]) if backward else ())]

    def called(rows: int | None) -> Any:
        chosen = options if rows is None else replace(options, overlap=Overlap(minibatch_rows=rows))

        def call() -> Any:
            if backward:
                return gradients(group, plan, tensors, chosen, saved, dy[mine])
            return group.forward(group.build_plan(own_ids, owned, "benchmark"), tensors, chosen)[:1]

        return call

    calls = {str(rows): called(rows) for rows in (None, *minibatch_rows)}
    if not backward:
        calls["planned"] = lambda: group.forward(plan, tensors, options)[:1]
    for name, call in calls.items():
        if name != "None" and not all(map(torch.equal, call(), ours[1:] if backward else ours)):
            raise RuntimeError(f"minibatch_rows={name} changed bits")
    torch.cuda.synchronize()
    mok.check()
    dist.barrier()
    differing = differing_from_one_rank(ours, ids, MoETensors(x, weights, up, down), options, dy if backward else None, mine, slice(first, first + owned))
    torch.cuda.empty_cache()
    dist.barrier()
    times: dict[str, list[float]] = {name: [] for name in calls}
    host = 0.0
    for block in range(blocks + 1):
        for name, call in calls.items():
            ms, us = timed(call, count, 1, dist.barrier)
            times[name] += ms if block else []                             # the first one warms up
            host = us if name == "None" else host
    silent = alone_beside_others(tensors, own_ids, options, dy[mine] if backward else None, group.launch.blocks)
    timed(silent, count, 1, dist.barrier)
    times["silent"], _ = timed(silent, count, blocks, dist.barrier)
    layer = layer_host_ns(ranks, own_ids, tensors, dy[mine], dist.barrier)
    mok.check()
    results.put({"rank": rank, "layer_host_ns": layer, "differing": differing, "ms": times, "host_us": host, "blocks": group.launch.blocks, "built_s": built,
                 "rows": int(group.build_plan(own_ids, owned, "benchmark").expert_offsets[-1])})
    torch.cuda.synchronize()
    dist.barrier()


def one_rank(shape: tuple[int, ...], save: bool, backward: bool, sms: int, count: int, blocks: int, results: Any) -> None:
    """The same work by one rank's engine on `sms` multiprocessors."""
    from mok.config import Overlap
    from mok.engines.hopper.engine import HopperEngine
    from mok.engines.protocol import MoETensors, PassOptions

    ids, x, weights, up, down, dy = problem(*shape)
    engine, tensors = HopperEngine(), MoETensors(x, weights, up, down)
    total = torch.cuda.get_device_properties(0).multi_processor_count
    options = PassOptions(save_for_backward=save or backward, overlap=Overlap(reserve_sms=total - sms))
    plan = engine.build_plan(ids, shape[3])
    saved = engine.forward(plan, tensors, options)[1]

    def call() -> Any:
        if backward:
            return gradients(engine, plan, tensors, options, saved, dy)
        return engine.forward(engine.build_plan(ids, shape[3]), tensors, options)[0]

    timed(call, count, 1, lambda: None)
    times, host = timed(call, count, blocks, lambda: None)
    results.put({"ms": times, "host_us": host, "gpu": torch.cuda.get_device_name(), "sms": sms})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--shape", choices=SHAPES, default="kimi-k2-ep64-rank")
    parser.add_argument("--save", action="store_true", help="keep what backward needs")
    parser.add_argument("--backward", action="store_true", help="compare and time backward")
    parser.add_argument("--minibatch-rows", type=int, nargs="*", default=[], help="other values of Overlap.minibatch_rows to time in turns with the default")
    parser.add_argument("--calls", type=int, default=20, help="of a block")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out")
    args = parser.parse_args()
    import triton

    from mok.fabric.mps import PrivateMps

    shape, W, context = SHAPES[args.shape], args.ranks, mp.get_context("spawn")
    T, H, I, _, K = shape
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder, PrivateMps() as mps, mps.inherited():
        how = (args.save, args.backward)
        processes = [context.Process(target=rank_body, args=(r, W, f"{folder}/store", shape, *how, args.minibatch_rows, args.calls, args.blocks, results))
                     for r in range(W)]
        for process in processes:
            process.start()
        outcomes = sorted((results.get(timeout=180) for _ in range(W)), key=lambda outcome: outcome["rank"])
        for process in processes:
            process.join(30)
    alone_process = context.Process(target=one_rank, args=(shape, *how, sum(o["blocks"] for o in outcomes), args.calls, args.blocks, results))
    alone_process.start()
    alone = results.get(timeout=120)
    alone_process.join(30)

    def slowest(name: str) -> list[float]:
        return [max(blocks) for blocks in zip(*(outcome["ms"][name] for outcome in outcomes), strict=True)]      # a step is over when the last rank is
    flops = (12 if args.backward else 6) * T * K * H * I / 1e9
    common = {"shape": args.shape, "thiek": list(shape), "pass": "backward" if args.backward else "forward" if args.save else "forward-no-grad",
              "precision": "bf16"}
    entries = []
    timings = [(f"mok, {W} ranks", slowest("None"), max(o["host_us"] for o in outcomes)), ("mok, 1 rank", alone["ms"], alone["host_us"]),
               (f"mok, {W} ranks, no communication", slowest("silent"), None)]
    timings += [] if args.backward else [(f"mok, {W} ranks, plan made before", slowest("planned"), None)]
    timings += [(f"mok, {W} ranks, minibatch_rows={rows}", slowest(str(rows)), None) for rows in args.minibatch_rows]
    for impl, times, host in timings:
        ms = statistics.median(times)
        entries.append({**common, "impl": impl, "ms": ms, "tflops": flops / ms, "spread": (max(times) - min(times)) / ms / 2,
                        **({} if host is None else {"host_us": host})})
        print(f"{impl:34s} {ms:8.3f} ms {flops / ms:7.1f} TFLOP/s{'' if host is None else f'  host {host:.0f} us'}", flush=True)
    layer = host_summary([outcome["layer_host_ns"] for outcome in outcomes])
    for name, figures in layer.items():
        print(f"mok.moe on {W} ranks, host: {name} {figures}", flush=True)
    differing = sum(sum(outcome["differing"]) for outcome in outcomes)
    commit = args.commit or subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    print(json.dumps(document := {
        "date": datetime.date.today().isoformat(), "commit": commit, "gpu": alone["gpu"], "torch": torch.__version__, "triton": triton.__version__,
        "command": "PYTHONPATH=. python3 " + " ".join(sys.argv), "differing_tokens": differing,
        "differing_of_ranks": [outcome["differing"] for outcome in outcomes], "ratio_to_one_rank": entries[0]["ms"] / entries[1]["ms"],
        "ratio_of_no_communication": entries[2]["ms"] / entries[1]["ms"],
        "layer_host_us": layer, "sms": alone["sms"], "rows_of_ranks": [outcome["rows"] for outcome in outcomes],
        "built_s": [round(outcome["built_s"], 1) for outcome in outcomes],
        "results": entries}))
    if args.out:
        with open(args.out, "w") as file:
            file.write(json.dumps(document) + "\n")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
