"""Thousands of random steps of ranks that share one GPU: tokens, routes and delays drawn anew in each, every result compared with one rank's, bit by bit.

    PYTHONPATH=. python3 runs/expert_parallel_soak.py --ranks 4 --steps 2000 --out OUT.json

In each step every rank draws its number of tokens (0 too), routes (a sixth of them -1; at times all to one expert), and with a chance of 1 in 20 a rank
is delayed by up to 20 ms on the host or by a busy stream on the device, before forward or before backward. y, dx, d_topk_weights and the weight gradients
must have the bits that one rank gives for all tokens; memory in use must not grow after step 3. A step that hangs is ended by the group's time-out and
raises on every rank. Last line of stdout: one JSON document.
"""
from __future__ import annotations

import argparse
import datetime
import json
import random
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

H, I, E, K, MAX_TOKENS = 256, 144, 9, 3, 200
SETTLED = 3                    # steps after which memory may not grow


def problem(step: int, W: int, seed: int) -> tuple[list[int], torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """(first token of each rank and the end, ids, [x, topk_weights], dy), the same in every process."""
    draw = random.Random(f"{seed} {step}")
    tokens = [0 if draw.random() < 0.2 else draw.randint(1, MAX_TOKENS) for _ in range(W)]
    cuts = [sum(tokens[:r]) for r in range(W + 1)]
    generator = torch.Generator(device="cuda").manual_seed(seed * 1_000_003 + step)
    T = cuts[-1]
    ids = torch.rand(T, E, device="cuda", generator=generator).topk(K).indices
    if draw.random() < 0.1:
        ids = torch.full_like(ids, draw.randrange(E))
    ids = ids.masked_fill(torch.rand(T, K, device="cuda", generator=generator) < 1 / 6, -1)
    x, dy = (torch.randn(T, H, device="cuda", generator=generator).bfloat16() for _ in range(2))
    return cuts, ids, [x, torch.rand(T, K, device="cuda", generator=generator)], dy


def delay(draw: random.Random, busy: torch.Tensor) -> None:
    """With a chance of 1 in 20, let this rank's host or its device be late."""
    if draw.random() < 0.05:
        if draw.random() < 0.5:
            time.sleep(draw.random() * 0.02)
        else:
            for _ in range(draw.randint(1, 40)):
                busy.copy_(busy @ busy * 1e-3)


def gradients(call: Any, leaves: list[torch.Tensor], dy: torch.Tensor, between: Any = lambda: None) -> list[torch.Tensor]:
    """[y, then the gradient of every leaf]."""
    fresh = [leaf.detach().requires_grad_() for leaf in leaves]
    y = call(*fresh)
    between()
    return [y.detach(), *torch.autograd.grad(y, fresh, dy)]


def rank_body(rank: int, W: int, store: str, steps: int, seed: int, results: Any) -> None:
    try:
        results.put((rank, soak(rank, W, store, steps, seed)))
    except BaseException as error:
        results.put((rank, {"failed": f"{type(error).__name__}: {error}"[:600]}))
        raise


def soak(rank: int, W: int, store: str, steps: int, seed: int) -> dict[str, Any]:
    import mok
    from mok.plan import experts_of_rank

    torch.cuda.set_device(0)
    dist.init_process_group("gloo", store=dist.FileStore(store, W), rank=rank, world_size=W)
    group = mok.ExpertGroup(num_experts=E, max_tokens=MAX_TOKENS, hidden_size=H, top_k=K, timeout_s=20)
    if group.fused is None:
        raise RuntimeError("this group's launches do not communicate")
    generator = torch.Generator(device="cuda").manual_seed(seed)
    weights = [torch.randn(E, 2 * I, H, device="cuda", generator=generator).mul_(H**-0.5).bfloat16(),
               torch.randn(E, H, I, device="cuda", generator=generator).mul_(I**-0.5).bfloat16()]
    first, owned = experts_of_rank(E, W, rank)
    local = [w[first:first + owned].clone() for w in weights]
    total = torch.cuda.get_device_properties(0).multi_processor_count
    alone = mok.Overlap(reserve_sms=total - total // W)         # all ranks compute the comparison at once
    draw, busy = random.Random(seed * 100 + rank), torch.randn(1024, 1024, device="cuda").bfloat16()
    busy.copy_(busy @ busy * 1e-3)                              # the library allocates its workspace now
    names = ("y", "dx", "d_topk_weights", "dw_gate_up", "dw_down")
    differing, settled, grew, started = dict.fromkeys(names, 0), 1 << 62, 0, time.monotonic()
    for step in range(steps):
        cuts, ids, (x, route_weights), dy = problem(step, W, seed)
        mine = slice(cuts[rank], cuts[rank + 1])
        delay(draw, busy)
        ours = gradients(lambda *t, ids=ids[mine]: mok.moe(t[0], ids, *t[1:], group=group), [x[mine], route_weights[mine], *local], dy[mine],
                         lambda: delay(draw, busy))
        if cuts[-1]:
            want = gradients(lambda *t, ids=ids: mok.moe(t[0], ids, *t[1:], overlap=alone), [x, route_weights, *weights], dy)
            parts = [want[0][mine], want[1][mine], want[2][mine], want[3][first:first + owned], want[4][first:first + owned]]
            for name, a, b in zip(names, ours, parts, strict=True):
                differing[name] += int(not torch.equal(a, b))
        else:
            differing["dw_gate_up"] += int(bool(ours[3].any()))
        del ids, x, route_weights, dy, ours
        want = parts = a = b = None
        held = torch.cuda.memory_allocated()                    # of what stays: weights, the group's buffers, control blocks
        if step == SETTLED:
            settled = held
        grew = max(grew, held - settled)
    torch.cuda.synchronize()
    mok.check()
    seconds = time.monotonic() - started
    dist.barrier()
    return {"steps": steps, "differing": differing, "seconds": round(seconds, 1), "allocated_grew": grew}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out")
    args = parser.parse_args()
    import triton

    from mok.fabric.mps import PrivateMps

    context = mp.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder, PrivateMps() as mps, mps.inherited():
        processes = [context.Process(target=rank_body, args=(r, args.ranks, f"{folder}/store", args.steps, args.seed, results)) for r in range(args.ranks)]
        for process in processes:
            process.start()
        outcomes = dict(results.get(timeout=60 + 0.2 * args.steps) for _ in range(args.ranks))
        for process in processes:
            process.join(30)
    commit = args.commit or subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    document = {"date": datetime.date.today().isoformat(), "commit": commit, "torch": torch.__version__, "triton": triton.__version__,
                "command": "PYTHONPATH=. python3 " + " ".join(sys.argv), "ranks": [outcomes[r] for r in range(args.ranks)]}
    print(json.dumps(document))
    if args.out:
        with open(args.out, "w") as file:
            file.write(json.dumps(document) + "\n")
    good = all("failed" not in outcome and not any(outcome["differing"].values()) and outcome["allocated_grew"] <= 0 for outcome in outcomes.values())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
