"""Ranks as streams of one process on one GPU against one rank on as many multiprocessors, same global work: first the bits, then plan + forward, and backward.

    PYTHONPATH=. python3 runs/expert_parallel_streams.py --ranks 4 --commit HASH --out OUT.json

What `runs/expert_parallel.py` measures with a process for each rank (MPS), here without what processes cost on a shared GPU: address spaces of their own
and launches that do not meet. The kernels, groups and buffers are the same. Ranks, one rank, and ranks that exchange nothing ("no communication": each
with one rank's engine on its share of the multiprocessors, its tokens' routes all to its own experts) are timed in turns.

Last line of stdout: one JSON document; `ratios`: of each pass, median of the turns' ratios to one rank, with half of their range.
"""
from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

sys.path[:0] = [str(Path(__file__).parents[1] / part) for part in ("tests/hopper", "tests")]
from expert_parallel import SHAPES, alone_beside_others, differing_from_one_rank, gradients, problem  # noqa: E402
from expert_parallel_support import Streams, ranks_in_one_process  # noqa: E402

from mok.engines.hopper.engine import HopperEngine  # noqa: E402
from mok.engines.protocol import MoETensors, PassOptions  # noqa: E402
from mok.plan import experts_of_rank  # noqa: E402

Call = Callable[[], Any]


def block_ms(calls: Sequence[tuple[torch.cuda.Stream, Call]], count: int) -> float:
    """ms of one step, in which each call is made once on its stream; the host is a fifth of that at most."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        for stream, call in calls:
            with torch.cuda.stream(stream):
                call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count * 1e3


def in_turns(kinds: dict[str, Sequence[tuple[torch.cuda.Stream, Call]]], count: int, blocks: int) -> dict[str, list[float]]:
    """ms of a step of each kind in each block; a first block of each warms up."""
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for block in range(blocks + 1):
        for name, calls in kinds.items():
            ms = block_ms(calls, count)
            times[name] += [ms] if block else []
    return times


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Median of the blocks' ratios and half of their range.

    >>> ratio([2.0, 3.0, 2.0], [2.0, 2.0, 2.0])
    {'median': 1.0, 'spread': 0.25}
    """
    found = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {"median": round(statistics.median(found), 4), "spread": round((max(found) - min(found)) / 2, 4)}


class Problem:
    """A shape cut into ranks: what each holds, the whole, and every pass as a call."""

    def __init__(self, shape: tuple[int, ...], W: int) -> None:
        T, H, _, E, K = shape
        self.ids, x, weights, up, down, self.dy = problem(*shape)
        self.whole = MoETensors(x, weights, up, down)
        self.options, self.saving = PassOptions(), PassOptions(save_for_backward=True)
        self.groups = ranks_in_one_process(W, num_experts=E, max_tokens=-(-T // W), hidden_size=H, top_k=K, timeout_s=10)
        self.streams = Streams(W, 6000).of_rank                       # a rank's launch must not wait for memory while a peer's waits for it
        self.tokens = [slice(r * T // W, (r + 1) * T // W) for r in range(W)]
        self.experts = [slice(first, first + owned) for first, owned in (experts_of_rank(E, W, r) for r in range(W))]
        self.own = [MoETensors(x[t], weights[t], up[e], down[e]) for t, e in zip(self.tokens, self.experts, strict=True)]
        self.own_ids = [self.ids[t].contiguous() for t in self.tokens]
        torch.cuda.synchronize()

    def plan(self, r: int) -> Any:
        return self.groups[r].build_plan(self.own_ids[r], self.own[r].w_down.shape[0], "benchmark")

    def each(self, call: Callable[[int], Any]) -> list[Any]:
        """call(rank) on every rank's stream, then wait."""
        results = []
        for r, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                results.append(call(r))
        torch.cuda.synchronize()
        for group in self.groups:
            group.raise_if_dead()
        return results

    def on_streams(self, call: Callable[[int], Any]) -> list[tuple[torch.cuda.Stream, Call]]:
        return [(stream, lambda r=r: call(r)) for r, stream in enumerate(self.streams)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--shape", choices=SHAPES, default="kimi-k2-ep64-rank")
    parser.add_argument("--calls", type=int, default=10, help="of a block")
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out")
    args = parser.parse_args()
    shape, W = SHAPES[args.shape], args.ranks
    T, H, I, E, K = shape
    p, engine = Problem(shape, W), HopperEngine()
    blocks = p.groups[0].launch.blocks

    plans = p.each(p.plan)
    forwards = p.each(lambda r: p.groups[r].forward(plans[r], p.own[r], p.saving))
    backwards = p.each(lambda r: gradients(p.groups[r], plans[r], p.own[r], p.saving, forwards[r][1], p.dy[p.tokens[r]]))
    differing = [sum(differing_from_one_rank([forwards[r][0], *backwards[r]], p.ids, p.whole, p.saving, p.dy, p.tokens[r], p.experts[r])) for r in range(W)]
    del backwards
    torch.cuda.empty_cache()
    p.streams = Streams(W, 6000).of_rank

    alone_plan = engine.build_plan(p.ids, E)
    alone_saved = engine.forward(alone_plan, p.whole, p.saving)[1]
    here, flops = torch.cuda.current_stream(), 6 * T * K * H * I / 1e9
    silent = {"forward-no-grad": p.each(lambda r: alone_beside_others(p.own[r], p.own_ids[r], p.options, None, blocks)),
              "backward": p.each(lambda r: alone_beside_others(p.own[r], p.own_ids[r], p.saving, p.dy[p.tokens[r]], blocks))}
    passes: dict[str, dict[str, Any]] = {
        "forward-no-grad": {f"mok, {W} ranks": p.on_streams(lambda r: p.groups[r].forward(p.plan(r), p.own[r], p.options)),
                            "mok, 1 rank": [(here, lambda: engine.forward(engine.build_plan(p.ids, E), p.whole, p.options))]},
        "backward": {f"mok, {W} ranks": p.on_streams(lambda r: gradients(p.groups[r], plans[r], p.own[r], p.saving, forwards[r][1], p.dy[p.tokens[r]])),
                     "mok, 1 rank": [(here, lambda: gradients(engine, alone_plan, p.whole, p.saving, alone_saved, p.dy))]}}
    entries, ratios = [], {}
    for name, kinds in passes.items():
        kinds[f"mok, {W} ranks, no communication"] = [(stream, call) for stream, call in zip(p.streams, silent[name], strict=True)]
        times = in_turns(kinds, args.calls, args.blocks)
        work = flops * (1 if name == "forward-no-grad" else 2)
        for impl, blocks_ms in times.items():
            ms = statistics.median(blocks_ms)
            found = ratios.setdefault(name, {})[impl] = ratio(blocks_ms, times["mok, 1 rank"])
            entries.append({"shape": args.shape, "thiek": list(shape), "pass": name, "precision": "bf16", "impl": impl, "ms": ms, "tflops": work / ms,
                            "spread": (max(blocks_ms) - min(blocks_ms)) / ms / 2})
            print(f"{name:16s} {impl:32s} {ms:8.3f} ms {work / ms:7.1f} TFLOP/s  {found['median']:.3f} +- {found['spread']:.3f} of one rank's time", flush=True)
    for group in p.groups:
        group.raise_if_dead()
    print(json.dumps(document := {
        "date": datetime.date.today().isoformat(),
        "commit": args.commit or subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__, "command": "PYTHONPATH=. python3 " + " ".join(sys.argv),
        "sms_of_a_rank": blocks, "differing": differing, "ratios": ratios, "results": entries}))
    if args.out:
        Path(args.out).write_text(json.dumps(document) + "\n")
    return int(any(differing))


if __name__ == "__main__":
    sys.exit(main())
