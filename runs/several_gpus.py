"""A layer spread over the GPUs of one machine, in one call of under ten minutes: bits, a killed rank, times against unfused PyTorch over NCCL, training.

    PYTHONPATH=. python3 runs/several_gpus.py --out OUT.json --commit HASH                 a rank on each GPU
    PYTHONPATH=. python3 runs/several_gpus.py --ranks 2 --out OUT.json                     more ranks than GPUs share them under MPS: to try the script out
    PYTHONPATH=. python3 runs/several_gpus.py --ranks 2 --device cpu --tiny                without a GPU
    ... --parts bits faults                                                                some of it

bits    P1 and P3: every bit of y and of all gradients is that of one rank, computed in the same call, and of a second run; results against float64.
faults  The last rank is killed in mid-kernel (ranks that share a GPU: it leaves at a host point): the others raise, naming it.
times   DeepSeek-V3's and Qwen3-30B-A3B's layer at T = 1024 to 8192 tokens a rank, BF16, forward and backward, in turns between two roofs: mok; the same
        launches with every route kept local (what is beyond that is exposed communication); one rank's kernel on the same rows; the unfused baseline.
train   `mok train --audit`, 20 steps, twice: equal chains.
sweep   Forward and backward at T = 8192 with overlap settings.

Each part is a process of its own with a time limit; OUT.json is written after each of them, and a short table is printed last. Ends with status 0 if every
part that ran passed. NVLink multicast stays off.
"""
from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PARTS = {"bits": 150.0, "faults": 80.0, "times qwen3-30b-a3b": 150.0, "times deepseek-v3": 180.0, "train": 150.0, "sweep": 90.0}      # -> seconds at most
TOKENS = (1024, 2048, 4096, 8192)
TOTAL_S = 570.0


def run_part(name: str, args: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """What one part found, in this process."""
    if name == "train":
        return train(args, limit_s)
    import several_gpus_parts as parts

    W, device, tiny = args.ranks, args.device, args.tiny
    block_ms, roof_size, tokens = (5.0, 256, [32, 64]) if tiny else (args.block_ms, 8192, list(args.tokens))
    if name == "bits":
        return parts.bits(W, device, tiny, limit_s)
    if name == "faults":
        return parts.faults(W, device, tiny, limit_s)
    if name == "sweep":
        return parts.sweep(W, device, ["tiny"] if tiny else ["qwen3-30b-a3b", "deepseek-v3"], max(tokens), block_ms, roof_size, limit_s)
    return parts.times(W, device, "tiny" if tiny else name.split()[1], tokens, block_ms, roof_size, limit_s)


def train(args: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """`mok train --audit` twice: the hashes of the two chains."""
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("a", "b"):
            command = [sys.executable, "-m", "mok", "train", "--ranks", str(args.ranks), "--device", args.device, "--steps", "20", "--save-every", "0",
                       "--config", "tiny" if args.tiny else "small", "--precision", "bf16", "--batch-size", str(8 * args.ranks), "--eval-every", "20",
                       "--sample-bytes", "0", "--data", str(ROOT / "mok"), "--out", f"{folder}/{name}", "--audit", f"{folder}/{name}.jsonl", "--json",
                       "--timeout", "60"]
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=limit_s / 2)
            document = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
            runs.append({"status": done.returncode, "stderr": done.stderr[-1500:],
                         **{key: document.get(key) for key in ("loss", "validation_loss", "tokens_per_s", "mfu", "audit")}})
    hashes = [run["audit"]["hash"] if run["audit"] else None for run in runs]
    return {"part": "train", "runs": runs, "equal_chains": None not in hashes and hashes[0] == hashes[1]}


def passed(name: str, found: dict[str, Any]) -> bool:
    if "error" in found:
        return False
    if name == "bits":
        return all(not any(case[which].values()) for rank in found["by_rank"] for case in rank["cases"] for which in ("P1_differing", "P3_differing"))
    if name == "faults":
        return found["passed"]
    if name == "train":
        return found["equal_chains"]
    return bool(found["results"]) and not found["failed"]


def summary(document: dict[str, Any]) -> str:
    """The short table: one line for each layer and T, then one for each other part."""
    lines = ["layer          T     pass       mok ms  TFLOP/s  x roof  exposed  x unfused  GB/s in"]
    for name, found in document["parts"].items():
        if name.startswith("times") and found.get("results"):
            lines += table_lines(found["results"])
    for name, found in document["parts"].items():
        lines.append(f"{name:22s} {'passed' if found['passed_all'] else 'NOT passed':10s} {found['seconds']:6.1f} s  {detail(name, found)}")
    return "\n".join(lines)


def table_lines(results: list[dict[str, Any]]) -> list[str]:
    lines, by_case = [], {}
    for entry in results:
        by_case.setdefault((entry["shape"], entry["thiek"][0], entry["pass"]), {})[entry["impl"]] = entry
    for (shape, T, which), impls in sorted(by_case.items()):
        ours = next(entry for impl, entry in impls.items() if impl.endswith("ranks"))
        exposed = 1 - impls["mok, routes local"]["ms"] / ours["ms"]
        speedup = f"{impls['unfused']['ms'] / ours['ms']:9.2f}x" if "unfused" in impls else "         -"
        lines.append(f"{shape:14s} {T:5d} {which:9s} {ours['ms']:8.3f} {ours['tflops']:8.1f} {ours['ratio_to_roof']:7.3f} {exposed:8.1%} "
                     f"{speedup} {ours.get('in_gb_s', 0):8.1f}")
    return lines


def detail(name: str, found: dict[str, Any]) -> str:
    """One line about a part."""
    if "error" in found:
        return found["error"][-300:]
    if name == "bits":
        wrong = {(case["shape"], which, what) for rank in found["by_rank"] for case in rank["cases"] for which in ("P1_differing", "P3_differing")
                 for what, count in case[which].items() if count}
        said = sorted({text for rank in found["by_rank"] for text in rank["said"]})
        return ("every bit equal" if not wrong else "differing: " + ", ".join(" ".join(item).replace("_differing", "") for item in sorted(wrong))) \
            + (f" ({'; '.join(said)})" if said else "")
    if name == "faults":
        return f"{found['how']}: " + "; ".join(f"rank {s['rank']} after {s['after_s']} s: {(s['raised'] or {}).get('type') or s['error'] or s['exitcode']}"
                                               for s in found["survivors"])
    if name == "train":
        return f"equal chains: {found['equal_chains']}; {found['runs'][0].get('tokens_per_s')} tokens/s"
    if name == "sweep":
        return ", ".join(f"{entry['shape']} {entry['pass']} {entry['impl']} {entry['ms']:.3f} ms" for entry in found["results"]) + " ".join(found["failed"])
    where = "; ".join(found.get("said", [])) or ("all inside the launches" if found.get("launches_communicate") else "over the process group")
    return f"all_to_all_single {found.get('nccl_all_to_all_gb_s')} GB/s in; {where}" \
        + "".join(f"; FAILED {text}" for text in found["failed"])


def in_process(name: str, args: argparse.Namespace, limit_s: float, command: list[str]) -> dict[str, Any]:
    """A part in a process of its own, with its own process group, that is killed when its time is over."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        process = subprocess.Popen([*command, "--one", name, "--found", str(out), "--limit", str(limit_s - 8)], cwd=ROOT, start_new_session=True)
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)                    # the MPS daemon of this part ends with its parent
            process.wait()
            status = 124
        if out.exists():
            return json.loads(out.read_text())
        return {"part": name, "error": f"ended with status {status} after at most {limit_s:.0f} s and found nothing"}


def versions() -> dict[str, str]:
    from importlib import metadata

    import torch

    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "none"
    return {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "gpus": str(torch.cuda.device_count()), "torch": torch.__version__,
            "triton": triton}


def write(path: Path | None, document: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(document) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="default: the number of GPUs")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N (all ranks share that one) or cpu")
    parser.add_argument("--parts", nargs="+", choices=sorted({name.split()[0] for name in PARTS}), default=[])
    parser.add_argument("--layers", nargs="+", default=[], help="of the part times, layers whose name holds one of these words")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="a rank")
    parser.add_argument("--block-ms", type=float, default=40.0)
    parser.add_argument("--total", type=float, default=TOTAL_S, help="seconds for everything")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script out")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    for hidden in ("--one", "--found"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    if args.ranks is None:
        import torch

        args.ranks = torch.cuda.device_count()
    if args.ranks < 2:
        parser.error(f"ranks={args.ranks} must be at least 2; give --ranks to share a GPU")
    if args.one:
        try:
            found = run_part(args.one, args, args.limit)
        except Exception as error:
            found = {"part": args.one, "error": f"{type(error).__name__}: {error}"[:4000]}
        Path(args.found).write_text(json.dumps(found))
        return 0
    return drive(args)


def drive(args: argparse.Namespace, run: Callable[..., dict[str, Any]] = in_process) -> int:
    """All parts that were asked for, one after the other, as long as there is time."""
    begin, command = time.monotonic(), [sys.executable, *sys.argv]
    document: dict[str, Any] = {"date": datetime.date.today().isoformat(), "commit": args.commit, **versions(), "ranks": args.ranks,
                                "command": "PYTHONPATH=. python3 " + " ".join(sys.argv), "parts": {}, "results": []}
    for name, limit in PARTS.items():
        kind, _, layer = name.partition(" ")
        if (args.parts and kind not in args.parts) or (args.layers and layer and not any(word in layer for word in args.layers)):
            continue
        if args.tiny and layer == "deepseek-v3":
            continue
        left = args.total - (time.monotonic() - begin)
        started = time.monotonic()
        print(f"--- {name}", flush=True)
        found = run(name, args, min(limit, left), command) if left > 20 else {"part": name, "error": "no time was left for it"}
        document["parts"][name] = {**found, "passed_all": passed(name, found), "seconds": round(time.monotonic() - started, 1)}
        document["results"] = [entry for part in document["parts"].values() for entry in part.get("results", []) if part["part"] == "times"]
        roofs = [entry["roof_tflops"] for entry in document["results"]]
        document["roof_tflops"] = round(sum(roofs) / len(roofs), 1) if roofs else 0.0
        write(args.out, document)
    if args.out is None:
        print(json.dumps(document))
    print(summary(document), flush=True)
    return 0 if all(part["passed_all"] for part in document["parts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
