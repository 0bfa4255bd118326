"""The Hopper forward pass against cuBLAS: correctness first, then time, on the shapes of docs/benchmarks, each block between two measurements of the roof.

    PYTHONPATH=. python3 runs/hopper_forward.py --out OUT.json                        the published table
    PYTHONPATH=. python3 runs/hopper_forward.py --sweep "stagger=0" "group=8" ...    variants of one setting, no-grad, one line each

Last line of stdout: one JSON document. A variant is a comma-separated list of: stagger, copy_vectors, sum_vectors, mover_warps, omit,
 group, row_ring, hidden_ring, tickets, save (0 or 1).
"""
from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys

import torch
import triton

from mok.config import Overlap
from mok.engines.hopper.engine import HopperEngine
from mok.engines.hopper.forward import ForwardConfig
from mok.engines.hopper.launch import Granularity, forward, granularity
from mok.engines.hopper.state import set_spin_limit
from mok.engines.protocol import MoETensors, PassOptions
from mok.runtime import runtime

SHAPES = {"qwen3-30b-a3b": (32768, 2048, 768, 128, 8), "olmoe": (32768, 2048, 1024, 64, 8), "kimi-k2-ep64-rank": (28672, 7168, 2048, 8, 2),
          "mixtral-8x7b": (16384, 4096, 14336, 8, 2), "deepseek-v3-ep2-rank": (8192, 7168, 2048, 128, 8)}
CONFIG_KEYS = ("stagger", "copy_vectors", "sum_vectors", "mover_warps", "omit")


def problem(T: int, H: int, I: int, E: int, K: int):
    torch.manual_seed(0)
    x = torch.randn(T, H, device="cuda", dtype=torch.bfloat16)
    w_gate_up = torch.randn(E, 2 * I, H, device="cuda", dtype=torch.bfloat16).mul_(H**-0.5)
    w_down = torch.randn(E, H, I, device="cuda", dtype=torch.bfloat16).mul_(I**-0.5)
    scores, ids = torch.randn(T, E, device="cuda").topk(K)
    return ids, MoETensors(x, scores.softmax(-1).contiguous(), w_gate_up, w_down)


def relative_error(y, ids, t, tokens) -> float:
    """Of some tokens, against float64."""
    truth = torch.zeros(len(tokens), t.x.shape[1], dtype=torch.float64, device="cuda")
    for i, token in enumerate(tokens):
        for k, e in enumerate(ids[token].tolist()):
            g, u = (t.w_gate_up[e].double() @ t.x[token].double()).chunk(2)
            truth[i] += t.topk_weights[token, k].double() * (t.w_down[e].double() @ (g * torch.sigmoid(g) * u))
    return ((y[tokens].double() - truth).norm() / truth.norm()).item()


def milliseconds(call, budget_ms: float) -> float:
    """Mean over as many calls as fill the budget, by events around all of them."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    count = max(3, int(budget_ms / max(start.elapsed_time(end), 0.05)))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


class Roof:
    """cuBLAS bf16 8192^3 on random data, the yardstick of every ratio."""

    def __init__(self) -> None:
        self.a, self.b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.out = torch.empty(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def tflops(self, budget_ms: float) -> float:
        return 2 * 8192**3 / milliseconds(lambda: torch.mm(self.a, self.b, out=self.out), budget_ms) / 1e9


def variant(text: str, H: int, I: int, rows_per_expert: float) -> tuple[ForwardConfig, Granularity, bool]:
    values = {key: int(value) for key, value in (part.split("=") for part in text.split(",") if part)}
    save = bool(values.pop("save", 0))
    config = ForwardConfig(save, **{key: values[key] for key in CONFIG_KEYS if key in values})
    grain = granularity(None if "group" not in values else Overlap(minibatch_rows=128 * values["group"]), H, I,
                        rows_per_expert=rows_per_expert)
    return config, Granularity(grain.group, values.get("row_ring", grain.row_ring), values.get("hidden_ring", grain.hidden_ring),
                               bool(values.get("tickets", grain.tickets))), save


def measure(call, roof: Roof, flops: float, budget_ms: float, blocks: int) -> dict:
    """Median of `blocks` blocks, each between two measurements of the roof."""
    times, ratios, roofs = [], [], []
    before = roof.tflops(budget_ms)
    for _ in range(blocks):
        ms = milliseconds(call, budget_ms)
        after = roof.tflops(budget_ms)
        times.append(ms)
        roofs.append((before + after) / 2)
        ratios.append(flops / ms / 1e9 / roofs[-1])
        before = after
    ms = statistics.median(times)
    return {"ms": round(ms, 4), "tflops": round(flops / ms / 1e9, 1), "ratio_to_roof": round(statistics.median(ratios), 4),
            "spread": round((max(ratios) - min(ratios)) / 2, 4), "roof_tflops": round(statistics.mean(roofs), 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="name, or name@T for another number of tokens")
    parser.add_argument("--sweep", nargs="+", default=None, help="variants to time, no-grad unless save=1")
    parser.add_argument("--budget-ms", type=float, default=150.0, help="GPU time of one timed block")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--out", default=None)
    parser.add_argument("--commit", default=None, help="commit to record where the tree has no git")
    parser.add_argument("--compile", default=None, metavar="VARIANT", help="run this variant once on a small problem, so that its binary is cached, and stop")
    args = parser.parse_args()
    set_spin_limit(5.0)
    if args.compile is not None:
        ids, tensors = problem(64, 64, 32, 4, 2)
        config, grain, save = variant(args.compile, 64, 32, 32)
        forward(HopperEngine().build_plan(ids, 4), tensors, PassOptions(save_for_backward=save), config, grain)
        torch.cuda.synchronize()
        return 0
    texts = args.sweep or ["save=0", "save=1"]
    binaries = {str(variant(text, 64, 32, 32)[0]): text for text in texts}
    compilers = [subprocess.Popen([sys.executable, __file__, "--compile", text]) for text in binaries.values()]
    if any(process.wait() for process in compilers):
        return 1
    engine, roof = HopperEngine(), Roof()
    roof.tflops(1500)                                                # warm the card before the first figure
    results, roofs, differing = [], [], []
    for name in args.shapes:
        known, _, tokens = name.partition("@")
        T, H, I, E, K = SHAPES[known]
        T = int(tokens or T)
        ids, tensors = problem(T, H, I, E, K)
        plan = engine.build_plan(ids, E)
        flops = 6 * T * K * H * I
        expected = None
        for text in texts:
            config, grain, save = variant(text, H, I, T * K / E)
            options = PassOptions(save_for_backward=save)

            def call(config=config, grain=grain, options=options, plan=plan, tensors=tensors):
                return forward(plan, tensors, options, config, grain)[0]

            y = call()
            torch.cuda.synchronize()
            runtime.raise_pending_errors()
            if config.omit == 0:
                if expected is None:
                    expected, error = y, relative_error(y, ids, tensors, list(range(0, T, T // 8)))
                    assert error < 6e-3, f"{name}: relative error {error}"
                if not torch.equal(y, expected):
                    wrong = torch.nonzero(y != expected)
                    differing.append(f"{name} {text}: {wrong.shape[0]} elements of {wrong[:, 0].unique().numel()} tokens differ from the first variant")
                    print(differing[-1], flush=True)
            entry = measure(call, roof, flops, args.budget_ms, args.blocks)
            runtime.raise_pending_errors()
            roofs.append(entry.pop("roof_tflops"))
            entry = {"shape": name, "thiek": [T, H, I, E, K], "pass": "forward" if save else "forward-no-grad", "precision": "bf16", "impl": "mok", **entry}
            if args.sweep:
                entry["variant"] = text
            results.append(entry)
            print(f"{name:18s} {text:40s} {entry['ms']:8.3f} ms {entry['tflops']:7.1f} TFLOP/s  ratio {entry['ratio_to_roof']:.3f} +- {entry['spread']:.3f}"
                  f"  roof {roofs[-1]:.0f}  padded x{plan.num_tiles.item() * 128 / (T * K):.3f}", flush=True)
        del ids, tensors, plan, expected, y
        torch.cuda.empty_cache()
    commit = args.commit or subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    document = {"date": datetime.date.today().isoformat(), "commit": commit, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
                "triton": triton.__version__, "command": "PYTHONPATH=. python3 " + " ".join(sys.argv), "roof_tflops": round(statistics.mean(roofs), 1),
                "results": results}
    text = json.dumps(document)
    if args.out:
        with open(args.out, "w") as file:
            file.write(text + "\n")
    print(text)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
