"""The Hopper backward pass: every check of tests/hopper/backward_cases.py, then time against cuBLAS on the four shapes of docs/benchmarks.

    PYTHONPATH=. python3 runs/hopper_backward.py --check --out OUT.json                  checks, then the published table
    PYTHONPATH=. python3 runs/hopper_backward.py --variants "stagger=0" "group=8" ...   settings against each other

FLOPs 12*T*K*H*I. Last line of stdout: one JSON document. A variant is a comma-separated list of stagger, copy_rows, group, omit, recompute
(see BackwardConfig), wants (bits: x, topk_weights, w_gate_up, w_down; then bits and FLOPs are not compared).
"""
from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import triton

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "hopper"), str(ROOT / "runs")]

import backward_cases as cases  # noqa: E402
from gpu_support import gpu_case  # noqa: E402
from hopper_forward import SHAPES, Roof, measure, problem  # noqa: E402

from mok.engines.hopper.backward import BackwardConfig  # noqa: E402
from mok.engines.hopper.backward_launch import hopper_backward  # noqa: E402
from mok.engines.hopper.state import set_spin_limit  # noqa: E402
from mok.engines.protocol import PassOptions, Wants  # noqa: E402
from mok.engines.torch_gpu import TorchGpuEngine  # noqa: E402
from mok.runtime import runtime  # noqa: E402


def checks(only_plain: bool):
    """(name, call) of every correctness check."""
    for name in cases.PLAIN_SHAPES:
        yield name, lambda name=name: cases.check(cases.plain_case(name))
    yield "one expert takes all", lambda: cases.check(gpu_case(300, 256, 96, 6, 2, topk_ids=cases.ids_like(300, 2, 3)))
    yield "no route at all", lambda: cases.check(gpu_case(20, 256, 96, 6, 2, topk_ids=cases.ids_like(20, 2, -1)))
    yield "biases", lambda: cases.check(gpu_case(200, 272, 176, 5, 3, biases=True))
    for name, shared in cases.SHARED.items():
        yield f"shared: {name}", lambda shared=shared: cases.check(gpu_case(200, 272, 176, 5, 2, shared=shared))
    yield "sixteen wants", lambda: cases.sixteen_wants(gpu_case(300, 256, 176, 6, 2, biases=True))
    yield "main_grad", lambda: cases.accumulates(gpu_case(300, 272, 176, 6, 2))
    settings = [{}, {"group_tiles": 1}, {"group_tiles": 7}, {"reserve_sms": 100}, {"reserve_sms": 131}, {}]
    yield "P1 and P2", lambda: cases.same_everywhere(gpu_case(2000, 528, 592, 12, 4, shared=((336, True),)), settings)
    if only_plain:
        return
    for name, (activation, limit) in cases.ACTIVATIONS.items():
        yield name, lambda a=activation, m=limit: cases.check(gpu_case(200, 272, 176, 5, 3, biases=True, activation=a, swiglu_limit=m, shared=((96, True),)))
    naps = [{"config": BackwardConfig(0, debug=1)}, {"config": BackwardConfig(0, debug=1), "group_tiles": 2}]
    yield "roles that sleep", lambda: cases.same_everywhere(gpu_case(1500, 272, 336, 12, 3, shared=((336, True),)), naps)


def run_checks(only_plain: bool) -> list[str]:
    failures = []
    for name, call in checks(only_plain):
        start = time.time()
        try:
            call()
            runtime.raise_pending_errors()
            verdict = "ok"
        except AssertionError as error:
            verdict = f"FAILED {str(error)[:300]}"
        except Exception as error:                       # a sticky CUDA error ends everything
            verdict = f"ERROR {type(error).__name__} {str(error)[:300]}"
        print(f"{name:45s} {time.time() - start:6.2f} s  {verdict}", flush=True)
        if verdict != "ok":
            failures.append(name)
            if verdict.startswith("ERROR") and "CUDA" in verdict:
                break
    return failures


def variant(text: str) -> dict:
    values = {key: int(value) for key, value in (part.split("=") for part in text.split(",") if part)}
    group = values.pop("group", None)
    wanted = values.pop("wants", 15)
    wants = Wants(*(bool(wanted >> i & 1) for i in range(4)))
    return {"config": BackwardConfig(**{"act": 0, **values}), "group_tiles": group}, wants


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="run the correctness checks first")
    parser.add_argument("--only-plain", action="store_true", help="of the checks, those of the plain SwiGLU binary")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--variants", nargs="+", default=[""], help="settings to time")
    parser.add_argument("--warm", default="", help="compile this variant and stop")
    parser.add_argument("--budget-ms", type=float, default=150.0, help="GPU time of one timed block")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3, help="launches of each variant whose bits are compared with the first variant's")
    parser.add_argument("--out", default=None)
    parser.add_argument("--commit", default=None, help="commit to record where the tree has no git")
    args = parser.parse_args()
    set_spin_limit(3.0)
    if args.warm:                                                    # compile one variant into Triton's cache, for runs that time many
        cases.backward(gpu_case(128, 256, 256, 2, 1), **variant(args.warm)[0])
        return 0
    failures = run_checks(args.only_plain) if args.check else []
    if failures:
        print(json.dumps({"failed": failures}))
        return 1
    roof = Roof()
    roof.tflops(1500)                                                # warm the card before the first figure
    results, roofs = [], []
    for name in args.shapes:
        T, H, I, E, K = SHAPES[name]
        ids, tensors = problem(T, H, I, E, K)
        options = PassOptions(save_for_backward=True)
        plan, saved = cases.forwards_saved(cases.Case(ids, tensors, tensors.x, options))      # so that recompute=1 has these bits too
        dy = torch.randn(T, H, device="cuda", dtype=torch.bfloat16)
        flops, expected = 12 * T * K * H * I, None
        torch.cuda.empty_cache()
        for text in args.variants:
            settings, wants = variant(text)

            def call(settings=settings, plan=plan, tensors=tensors, saved=saved, dy=dy, options=options, wants=wants):
                return hopper_backward(plan, tensors, options, saved, dy, wants, None, **settings)

            grads = call()
            torch.cuda.synchronize()
            runtime.raise_pending_errors()
            if expected is None:
                expected = grads
                baseline = TorchGpuEngine().backward(plan, tensors, options, saved, dy, wants, None)
                for part in ("x", "topk_weights", "w_gate_up", "w_down"):
                    ours, theirs = getattr(grads, part).float(), getattr(baseline, part).float()
                    error = ((ours - theirs).norm() / theirs.norm()).item()
                    assert error < 6e-3, f"{name}: {part} differs from plain PyTorch by {error}"
                del baseline, ours, theirs
                torch.cuda.empty_cache()
            if "omit" not in text and "wants" not in text:
                for repeat in range(args.repeats):
                    found = cases.mismatches(expected, grads)
                    if found:
                        print(f"{name} {text} repeat {repeat}: BITS DIFFER {found}", flush=True)
                    grads = call()
            del grads
            entry = measure(call, roof, flops, args.budget_ms, args.blocks)
            roofs.append(entry.pop("roof_tflops"))
            entry = {"shape": name, "thiek": [T, H, I, E, K], "pass": "backward", "precision": "bf16", "impl": "mok", **entry}
            if args.variants != [""]:
                entry["variant"] = text
            results.append(entry)
            print(f"{name:18s} {text:30s} {entry['ms']:8.3f} ms {entry['tflops']:7.1f} TFLOP/s  ratio {entry['ratio_to_roof']:.3f} +- {entry['spread']:.3f}"
                  f"  roof {roofs[-1]:.0f}", flush=True)
        del ids, tensors, plan, saved, dy, expected
        torch.cuda.empty_cache()
    commit = args.commit or subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    document = {"date": datetime.date.today().isoformat(), "commit": commit, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
                "triton": triton.__version__, "command": "PYTHONPATH=. python3 " + " ".join(sys.argv),
                "roof_tflops": round(statistics.mean(roofs), 1) if roofs else None, "results": results}
    text = json.dumps(document)
    if args.out:
        Path(args.out).write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
