"""What the ranks of runs/several_gpus.py do: bits against one rank, a rank killed in mid-kernel, times. Each part returns a JSON-able dict."""
from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rank_problem import NAMES, TOLERANCE, Problem, both_passes, check
from rank_processes import Outcome, results_of, run_ranks
from torch import Tensor

import mok
from mok.bench_cuda import Measurement, Roof, Shape, Stopwatch
from mok.config import Overlap
from mok.lm.placement import place_here
from mok.lm.ranks import Ranks
from mok.runtime import runtime
from mok.unfused_ranks import all_to_all, unfused_moe_on_ranks
from mok.verify_ranks import token_cuts

Say = Callable[[Any], None]
ROOF_DIFFERENCE = 0.03
BLOCKS = 5
LAYERS = {"deepseek-v3": (7168, 2048, 256, 8), "qwen3-30b-a3b": (2048, 768, 128, 8), "tiny": (64, 48, 16, 2)}      # H, I, E, K over all ranks
# T of all ranks, H, I, E, K: odd sizes that no tile divides and experts that no number of ranks divides; a real layer
BITS_SHAPES = {"odd": (4099, 272, 176, 13, 3), "qwen3-30b-a3b": (8192, 2048, 768, 128, 8), "tiny": (300, 48, 80, 9, 3)}
# launches on several ranks are compiled with two mover warps, whatever Overlap.mover_warps says
SWEEP = {"default": Overlap(), **{f"minibatch_rows={rows}": Overlap(minibatch_rows=rows) for rows in (512, 1024, 2048, 4096)},
         **{f"reserve_sms={sms}": Overlap(reserve_sms=sms) for sms in (4, 16)}}


def expert_group(ranks: Ranks, problem: Problem) -> mok.ExpertGroup:
    """The group for this problem's passes, inside the launches where that can be."""
    most = max(problem.cuts[r + 1] - problem.cuts[r] for r in range(problem.W))
    group = ranks.expert_group(problem.device, num_experts=problem.E, max_tokens=most, hidden_size=problem.H, top_k=problem.K)
    assert group is not None
    return group


def device_of(ranks: Ranks) -> torch.device:
    assert ranks.placement is not None
    return ranks.placement.device


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def how_passes_run() -> list[str]:
    """What mok has said about this process's passes: what does not run inside the launches, and why."""
    return sorted(text for text in runtime._said if "process group" in text)


# --- bits -------------------------------------------------------------------------------------------------------------------------------


def bits(W: int, device: str, tiny: bool, limit_s: float) -> dict[str, Any]:
    """P1 and P3, forward and every gradient, and the results against float64."""
    shapes = ["tiny"] if tiny else ["odd", "qwen3-30b-a3b"]
    return {"part": "bits", "shapes": shapes, "tolerance": TOLERANCE, "by_rank": results_of(run_ranks(bits_of_rank, W, device, shapes, limit_s=limit_s))}


def bits_of_rank(ranks: Ranks, say: Say, shapes: list[str]) -> dict[str, Any]:
    """For each case: how many elements differ from one rank's result and between two runs, and the errors."""
    found: list[dict[str, Any]] = []
    device, rank = device_of(ranks), ranks.rank
    for name in shapes:
        T, H, I, E, K = BITS_SHAPES[name]
        for cuts, crowded in zip(token_cuts(T, ranks.size)[:2], (False, True)):
            problem = Problem(T, H, I, E, K, cuts, device, crowded=crowded)
            group, leaves, mine = expert_group(ranks, problem), problem.leaves(rank), problem.tokens(rank)
            runs = [both_passes(leaves, problem.ids[mine].contiguous(), problem.dy[mine], group) for _ in range(2)]
            wait(device)
            mok.check()
            whole = whole_by_turns(ranks, problem)
            own = [mine, mine, mine, problem.experts(rank), problem.experts(rank)]
            found.append({"shape": name, "thiek": [T, H, I, E, K], "tokens": cuts[rank + 1] - cuts[rank], "crowded": crowded,
                          "P1_differing": {what: differing(a, b) for what, a, b in zip(NAMES, *runs, strict=True)},
                          "P3_differing": {what: differing(a, b[part]) for what, a, b, part in zip(NAMES, runs[0], whole, own, strict=True)}})
            found[-1]["errors"] = check(problem, rank, runs[0])
            say(found[-1])
            ranks.tell("the next case")
    return {"rank": rank, "cases": found, "said": how_passes_run(), "launches_communicate": group.fused is not None}


def shared(ranks: Ranks) -> bool:
    """Whether ranks share a GPU."""
    assert ranks.placement is not None
    return ranks.placement.sharing > 1


def whole_by_turns(ranks: Ranks, problem: Problem) -> list[Tensor]:
    """One rank's results for all tokens. Its launches want the whole device, so ranks that share one take turns."""
    whole: list[Tensor] = []
    for turn in range(ranks.size if shared(ranks) else 1):
        ranks.tell(f"turn {turn}")
        if not shared(ranks) or turn == ranks.rank:
            leaves = [t.detach().requires_grad_() for t in (problem.x, problem.weights, *problem.expert_weights(slice(0, problem.E)))]
            whole = both_passes(leaves, problem.ids, problem.dy, None)
            wait(problem.device)
    return whole


def differing(a: Tensor, b: Tensor) -> int:
    """Elements of other bits; -1 for other shapes."""
    if a.shape != b.shape:
        return -1
    return int((a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).view(a.numel(), -1).any(1).sum()) if a.numel() else 0


# --- a rank that is killed --------------------------------------------------------------------------------------------------------------

TIMEOUT_S = 5.0


def faults(W: int, device: str, tiny: bool, limit_s: float) -> dict[str, Any]:
    """The last rank is killed while its kernels run; ranks that share a GPU: it leaves at a host point, since a killed client may take MPS along."""
    killed_at: list[float] = []
    started: set[int] = set()
    leaves = place_here(torch.device(device), 0, W).sharing > 1

    def strike(rank: int, message: Any, processes: list[Any]) -> None:
        if message == "leaving":
            killed_at.append(time.time())
        started.add(rank)
        if len(started) == W and not killed_at and message != "leaving" and not leaves:
            time.sleep(0.5)
            os.kill(processes[W - 1].pid, signal.SIGKILL)
            killed_at.append(time.time())

    outcomes = run_ranks(fault_of_rank, W, device, tiny, leaves, limit_s=limit_s, on_message=strike)
    survivors = [{"rank": r, "raised": outcome.result, "error": outcome.error, "exitcode": outcome.exitcode,
                  "after_s": round(outcome.ended_at - killed_at[0], 2) if killed_at else None} for r, outcome in enumerate(outcomes[:-1])]
    return {"part": "faults", "how": "left at a host point" if leaves else "killed in mid-kernel", "timeout_s": TIMEOUT_S,
            "lost": {"rank": W - 1, "exitcode": outcomes[-1].exitcode}, "survivors": survivors, "passed": faults_passed(W, outcomes, survivors)}


def faults_passed(W: int, outcomes: list[Outcome], survivors: list[dict[str, Any]]) -> bool:
    """Every survivor raised one of mok's errors in time: one that names the lost rank, or another that had given up because of it."""
    in_time = all(s["raised"] is not None and s["after_s"] is not None and s["after_s"] < 2 * TIMEOUT_S + 10 for s in survivors)
    return outcomes[-1].exitcode not in (0, None) and in_time and any(s["raised"]["peers"] == [W - 1] for s in survivors)


def fault_of_rank(ranks: Ranks, say: Say, tiny: bool, leaves: bool) -> dict[str, Any] | None:
    """Passes without end, until one raises: which error, naming whom."""
    H, I, E, K = LAYERS["tiny" if tiny else "qwen3-30b-a3b"]
    T = 64 if tiny else 4096
    device = device_of(ranks)
    problem = Problem(T * ranks.size, H, I, E, K, [T * r for r in range(ranks.size + 1)], device)
    x, weights, up, down = (leaf.detach() for leaf in problem.leaves(ranks.rank))
    ids = problem.ids[problem.tokens(ranks.rank)].contiguous()
    mok.moe(x, ids, weights, up, down, group=expert_group(ranks, problem))           # compiles what the impatient group then finds
    wait(device)
    group = expert_group(Ranks(mok.ExpertGroup(timeout_s=TIMEOUT_S), ranks.placement), problem)
    last_words = time.monotonic() + 1e9
    for step in range(10**9):
        try:
            for _ in range(4):                                  # several in flight: the device is never idle
                mok.moe(x, ids, weights, up, down, group=group)
            wait(device)
            mok.check()
        except mok.FabricError as error:
            return {"type": type(error).__name__, "message": str(error), "peers": list(error.peers)}
        if step == 5:
            say("running")
            last_words = time.monotonic() + 0.5
        if leaves and ranks.rank == ranks.size - 1 and time.monotonic() > last_words:
            say("leaving")
            os._exit(9)
    return None


# --- times ------------------------------------------------------------------------------------------------------------------------------


def times(W: int, device: str, layer: str, tokens: list[int], block_ms: float, roof_size: int, limit_s: float) -> dict[str, Any]:
    """Forward and backward of a layer at each number of tokens a rank: mok, routes kept local, one rank's kernel, the unfused baseline."""
    results: list[dict[str, Any]] = []
    outcomes = run_ranks(times_of_rank, W, device, layer, tokens, block_ms, roof_size, limit_s=limit_s,
                         on_message=lambda rank, message, processes: keep(results, rank, message))
    failed = [f"rank {r}: {o.error or o.exitcode}" for r, o in enumerate(outcomes) if o.error or o.exitcode]
    return {"part": "times", "layer": layer, "results": results, "failed": failed, **(outcomes[0].result or {})}


def keep(results: list[dict[str, Any]], rank: int, message: Any) -> None:
    """What was measured is kept as it comes: a later failure does not lose it."""
    if rank == 0:
        results.extend(message)
        for entry in message:
            print(line_of(entry), flush=True)


def line_of(entry: dict[str, Any]) -> str:
    more = "".join(f" | {name} {entry[name]}" for name in ("in_gb_s", "unsteady") if name in entry)
    return (f"{entry['shape']} T={entry['thiek'][0]} {entry['pass']:8s} {entry['impl']:24s} {entry['ms']:9.3f} ms | {entry['tflops']:6.1f} TFLOP/s a rank | "
            f"{entry['ratio_to_roof']:.3f} +- {entry['spread']:.3f} x roof{more}")


def times_of_rank(ranks: Ranks, say: Say, layer: str, tokens: list[int], block_ms: float, roof_size: int) -> dict[str, Any]:
    device = device_of(ranks)
    watch = Stopwatch(device)
    roof = Roof(watch, roof_size)
    roof.tflops(2000 if device.type == "cuda" else block_ms)                       # warm: the first figures of a cool card are too good
    H, I, E, K = LAYERS[layer]
    wire = raw_exchange(ranks, watch)
    for T in sorted(tokens, reverse=True):
        inside = times_of_case(ranks, say, Shape(layer, T, H, I, E, K), watch, roof, block_ms)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {"nccl_all_to_all_gb_s": wire, "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", "said": how_passes_run(),
            "launches_communicate": inside}


def times_of_case(ranks: Ranks, say: Say, shape: Shape, watch: Stopwatch, roof: Roof, block_ms: float) -> bool:
    """One number of tokens a rank; whether launches communicate."""
    T, W = shape.T, ranks.size
    problem = Problem(T * W, shape.H, shape.I, shape.E, shape.K, [T * r for r in range(W + 1)], watch.device)
    group, leaves = expert_group(ranks, problem), problem.leaves(ranks.rank)
    x, weights, up, down = leaves
    ids, own_ids, dy, remote, errors = routes_of(ranks, problem, group, leaves)
    if ranks.leads:
        print(f"{shape.name} T={T}: verified on every rank, " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()), flush=True)
    local_ids = own_ids - problem.experts(ranks.rank).start
    exchange = exchange_for(ranks)
    forwards: dict[str, Callable[[], Tensor]] = {
        f"mok, {W} ranks": lambda: mok.moe(x, ids, weights, up, down, group=group),
        "mok, routes local": lambda: mok.moe(x, own_ids, weights, up, down, group=group),
    }
    if not shared(ranks):                                     # one rank's launch wants the whole device
        forwards["mok, one rank"] = lambda: mok.moe(x, local_ids, weights, up, down)
    if has_baseline(ranks, shape.E, T):
        forwards["unfused"] = lambda: unfused_moe_on_ranks(x, ids, weights, up, down, W, exchange)
    for which in ("forward", "backward"):
        found = measure(ranks, calls_of(forwards, which, leaves, dy), watch, roof, block_ms)
        say(records(found, shape, which, {f"mok, {W} ranks": moved_bytes(which, remote, shape.H)}))
    return group.fused is not None


def routes_of(ranks: Ranks, problem: Problem, group: mok.ExpertGroup, leaves: list[Tensor]) -> tuple[Any, ...]:
    """(ids, ids of this rank's own experts, dy, (rows in, rows out), errors); mok's and the unfused baseline's results are checked on the way."""
    mine = problem.tokens(ranks.rank)
    ids, dy = problem.ids[mine].contiguous(), problem.dy[mine].contiguous()
    results = both_passes(leaves, ids, dy, group)
    wait(problem.device)
    mok.check()
    errors = check(problem, ranks.rank, results)
    del results
    if has_baseline(ranks, problem.E, mine.stop - mine.start):
        y = unfused_moe_on_ranks(leaves[0], ids, leaves[1], leaves[2], leaves[3], ranks.size, exchange_for(ranks))
        check(problem, ranks.rank, [y.detach(), *torch.autograd.grad(y, leaves, dy)])
        del y
    local = Problem(problem.T, problem.H, problem.I, problem.E, problem.K, problem.cuts, problem.device, local=True)
    return ids, local.ids[mine].contiguous(), dy, problem.remote_rows(ranks.rank), errors


def has_baseline(ranks: Ranks, E: int, T: int) -> bool:
    """Whether the unfused baseline takes so many ranks; where they share a GPU its rows go through the host, for seconds at large T."""
    return E % ranks.size == 0 and (not shared(ranks) or T <= 1024)


def moved_bytes(which: str, remote: tuple[int, int], H: int) -> int:
    """What comes into a rank in a pass: rows of x (backward: dy and x) for its experts, results (dx) for its tokens."""
    arriving, returning = remote
    return 2 * H * (arriving * (2 if which == "backward" else 1) + returning)


def calls_of(forwards: dict[str, Callable[[], Tensor]], which: str, leaves: list[Tensor], dy: Tensor) -> dict[str, Callable[[], object]]:
    """The passes to be timed. For backward each forward runs here, once, and what it saved is used again by every call."""
    if which == "forward":
        return dict(forwards)

    def backward(y: Tensor) -> Callable[[], object]:
        return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)

    return {name: backward(forward()) for name, forward in forwards.items()}


def exchange_for(ranks: Ranks) -> Callable[[Tensor, list[int], list[int]], Tensor]:
    """NCCL's exchange, or gloo's, which takes tensors through the host where ranks share a GPU (no baseline then, only a trial of this script)."""
    if ranks.placement is None or ranks.placement.backend != "gloo" or ranks.placement.device.type == "cpu":
        return all_to_all

    def through_host(rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        assert ranks.group is not None
        return ranks.group.fabric.exchange_rows([rows], send, receive, "the baseline")[0]

    return through_host


def raw_exchange(ranks: Ranks, watch: Stopwatch) -> float:
    """GB/s into a rank by `all_to_all_single` of large equal parts: what the links carry."""
    W, device = ranks.size, device_of(ranks)
    assert ranks.placement is not None
    part = (1 << 14 if ranks.placement.backend == "gloo" else 1 << 27) // W                       # 512 MiB of fp32 over NCCL
    rows = torch.zeros(part * W, dtype=torch.float32, device=device)
    exchange, sizes = exchange_for(ranks), [part] * W
    exchange(rows, sizes, sizes)
    ranks.tell("raw exchange")
    ms = watch.ms(lambda: exchange(rows, sizes, sizes), 10)
    return round(4 * part * (W - 1) / ms * 1e-6, 1)


def measure(ranks: Ranks, calls: dict[str, Callable[[], object]], watch: Stopwatch, roof: Roof, block_ms: float) -> dict[str, Measurement]:
    """Blocks of all calls in turns, each begun together by all ranks, between two roofs; a block's time is the slowest rank's. Once more if a roof moved."""
    counts = {}
    for name, call in calls.items():
        ranks.tell(f"warming {name}")
        call()
        call()
        slowest = max(fact["ms"] for fact in ranks.tell("counting", ms=watch.ms(call, 2)))
        counts[name] = max(1, round(block_ms / slowest))
    best: dict[str, Measurement] = {}
    for _ in range(2):
        before = roof.tflops(2 * block_ms)
        blocks: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(BLOCKS):
            for name, call in calls.items():
                ranks.tell("a block")
                blocks[name].append(watch.ms(call, counts[name]))
        facts = ranks.tell("what was measured", blocks=list(blocks.values()), roofs=[before, roof.tflops(2 * block_ms)])
        mok.check()
        roofs = tuple(statistics.mean(fact["roofs"][i] for fact in facts) for i in range(2))
        this = {name: Measurement(tuple(max(fact["blocks"][n][b] for fact in facts) for b in range(BLOCKS)), roofs) for n, name in enumerate(calls)}
        moved = abs(roofs[0] - roofs[1]) / (sum(roofs) / 2)
        if not best or moved < unsteadiness(best):
            best = this
        if moved <= ROOF_DIFFERENCE:
            break
    return best


def unsteadiness(found: dict[str, Measurement]) -> float:
    roofs = next(iter(found.values())).roofs
    return abs(roofs[0] - roofs[1]) / (sum(roofs) / 2)


def records(found: dict[str, Measurement], shape: Shape, which: str, moved: dict[str, int]) -> list[dict[str, Any]]:
    entries = []
    for impl, measured in found.items():
        entry = {**measured.record(shape, which, "bf16", impl), "roof_tflops": round(measured.roof, 1)}
        if impl in moved:
            entry["in_gb_s"] = round(moved[impl] / entry["ms"] * 1e-6, 1)
        if not measured.steady:
            entry["unsteady"] = [round(value, 1) for value in measured.roofs]
        entries.append(entry)
    return entries


# --- overlap settings -------------------------------------------------------------------------------------------------------------------


def sweep(W: int, device: str, layers: list[str], T: int, block_ms: float, roof_size: int, limit_s: float) -> dict[str, Any]:
    """Forward and backward at the largest T with every overlap setting, in turns."""
    results: list[dict[str, Any]] = []
    outcomes = run_ranks(sweep_of_rank, W, device, layers, T, block_ms, roof_size, limit_s=limit_s,
                         on_message=lambda rank, message, processes: keep(results, rank, message))
    return {"part": "sweep", "results": results, "failed": [f"rank {r}: {o.error or o.exitcode}" for r, o in enumerate(outcomes) if o.error or o.exitcode]}


def sweep_of_rank(ranks: Ranks, say: Say, layers: list[str], T: int, block_ms: float, roof_size: int) -> None:
    device = device_of(ranks)
    watch = Stopwatch(device)
    roof = Roof(watch, roof_size)
    roof.tflops(2000 if device.type == "cuda" else block_ms)
    for layer in layers:
        sweep_of_layer(ranks, say, Shape(layer, T, *LAYERS[layer]), watch, roof, block_ms)
        ranks.tell("the next layer")


def sweep_of_layer(ranks: Ranks, say: Say, shape: Shape, watch: Stopwatch, roof: Roof, block_ms: float) -> None:
    T, W = shape.T, ranks.size
    problem = Problem(T * W, shape.H, shape.I, shape.E, shape.K, [T * r for r in range(W + 1)], watch.device)
    group, leaves, mine = expert_group(ranks, problem), problem.leaves(ranks.rank), problem.tokens(ranks.rank)
    ids, dy = problem.ids[mine].contiguous(), problem.dy[mine].contiguous()
    x, weights, up, down = leaves

    def forward(overlap: Overlap) -> Tensor:
        return mok.moe(x, ids, weights, up, down, group=group, overlap=overlap)

    plain = forward(Overlap()).detach()
    for name, overlap in SWEEP.items():
        if differing(plain, forward(overlap).detach()):
            raise RuntimeError(f"{name} changes bits of y on rank {ranks.rank}")
    forwards: dict[str, Callable[[], Tensor]] = {name: partial(forward, overlap) for name, overlap in SWEEP.items()}
    for which in ("forward", "backward"):
        say(records(measure(ranks, calls_of(forwards, which, leaves, dy), watch, roof, block_ms), shape, which, {}))
