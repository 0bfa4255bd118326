"""Where a backward launch that makes z again does not end: passes of growing likeness to mok.moe, each in a process of its own that may be given up.

    PYTHONPATH=. python3 runs/recompute_probe.py                       on a Hopper GPU, about two minutes
    PYTHONPATH=. python3 runs/recompute_probe.py --probe layer-H4      one of them, in this process

Binaries are compiled before any limit runs. A spin on a counter gives up after --spin seconds and says what it waited for; a launch that then still has
not ended waits for a barrier inside a CTA. Either way the counters of its control block are read from another stream and printed.
"""
from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

import torch
from warm_up import compile_one

import mok
from mok.engines.hopper.backward_launch import hopper_backward
from mok.engines.hopper.engine import HopperEngine
from mok.engines.hopper.state import _BLOCKS, CONTROL_WORDS, MIN_CAPACITY, block_words, set_spin_limit
from mok.engines.protocol import MoETensors, PassOptions, Saved, Wants
from mok.fabric.process_group import FabricTimeout
from mok.runtime import runtime

SHAPES = {"one": (1, 64, 64, 1, 1), "H4": (4096, 64, 512, 8, 2), "E5": (3000, 256, 512, 4, 2), "layer": (2000, 256, 512, 8, 2), "long": (2000, 528, 592, 12, 4)}
# direct: hopper_backward alone, synchronised; behind: enqueued behind a forward that saves nothing; layer: mok.moe, so from autograd's thread
PROBES = [f"{way}-{shape}" for shape in SHAPES for way in ("direct", "behind", "layer")]
WORDS = {1: "DH tasks stored", 2: "DX tasks stored", 4: "CTAs finished", 15: "tasks taken"}


def tensors_of(shape: tuple[int, int, int, int, int]) -> tuple[MoETensors, torch.Tensor, torch.Tensor]:
    T, H, I, E, K = shape
    generator = torch.Generator(device="cuda").manual_seed(0)

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(size, device="cuda", generator=generator) * scale).bfloat16()

    ids = torch.rand(T, E, device="cuda", generator=generator).argsort(-1)[:, :K].contiguous()
    weights = torch.rand(T, K, device="cuda", generator=generator) + 0.1
    return MoETensors(normal(T, H), weights, normal(E, 2 * I, H, scale=H**-0.5), normal(E, H, I, scale=I**-0.5)), ids, normal(T, H)


class NotEnded(Exception):
    """What was enqueued is still running after the limit."""


def settle(limit_s: float) -> None:
    """Wait for all that is enqueued, without a call that could wait for ever."""
    done, start = torch.cuda.Event(), time.monotonic()
    done.record()
    while not done.query():
        if time.monotonic() - start > limit_s:
            raise NotEnded
        time.sleep(0.02)


def passes(way: str, shape: tuple[int, int, int, int, int], count: int, limit_s: float) -> None:
    """`count` passes to their end; only `direct` waits between launches."""
    tensors, ids, dy = tensors_of(shape)
    wants, options = Wants(True, True, True, True), PassOptions(recompute="z")
    leaves = [t.clone().requires_grad_() for t in (tensors.x, tensors.topk_weights, tensors.w_gate_up, tensors.w_down)]
    engine = HopperEngine()
    for _ in range(count):
        if way == "layer":
            mok.moe(leaves[0], ids, *leaves[1:], recompute="z").backward(dy)
            continue
        plan = engine.build_plan(ids, shape[3])
        if way == "behind":
            engine.forward(plan, tensors, options)
        else:
            settle(limit_s)
        hopper_backward(plan, tensors, options, Saved(tensors.x[:0], tensors.x[:0]), dy, wants, None)
        if way == "direct":
            settle(limit_s)
    settle(limit_s)


def counters(stream: torch.cuda.Stream, copy: torch.Tensor) -> str:
    """What the control block says now, read beside a launch that may never end. copy: pinned memory; stream: one that nothing runs on."""
    lines = []
    for key, value in list(runtime.scratch.items()):
        if isinstance(key, tuple) and key[0] == _BLOCKS:
            with torch.cuda.stream(stream):
                copy.copy_(value[0], non_blocking=True)
            stream.synchronize()
            lines.append(f"control words {copy[:CONTROL_WORDS].tolist()}")
            for i, words in enumerate(copy[CONTROL_WORDS:].view(2, -1)):
                used = int(words.nonzero().max()) + 1 if words.any() else 0
                lines.append(f"set {i}: " + ", ".join(f"{name} {int(words[at])}" for at, name in WORDS.items()) + f"; all: {words[:used].tolist()}")
    return "\n".join(lines)


def compile_all() -> None:
    """Compile and load what the passes below launch, and launch nothing."""
    for variant in ("forward_train_movers2", "forward_no_grad_movers2", "backward_swiglu_recompute"):
        compile_one(variant)


def probe(name: str, spin_s: float, limit_s: float, count: int) -> int:
    way, shape = name.split("-")
    HopperEngine.recompute_in_launch = True
    compile_all()
    stream, copy = torch.cuda.Stream(), torch.empty(block_words(MIN_CAPACITY), dtype=torch.int32, pin_memory=True)
    print(f"{name}: compiled", flush=True)
    set_spin_limit(spin_s)
    start = time.monotonic()
    try:
        passes(way, SHAPES[shape], count, limit_s)
        runtime.raise_pending_errors()
    except NotEnded:
        print(f"{name}: HAS NOT ENDED after {time.monotonic() - start:.1f} s\n{counters(stream, copy)}", flush=True)
        return 1
    except FabricTimeout as error:
        print(f"{name}: {error}", flush=True)
        return 1
    print(f"{name}: ended after {time.monotonic() - start:.1f} s", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--probe", choices=PROBES)
    parser.add_argument("--spin", type=float, default=3.0, help="seconds that a role waits for a counter")
    parser.add_argument("--limit", type=float, default=12.0, help="seconds that the passes of a probe may take")
    parser.add_argument("--passes", type=int, default=3)
    args = parser.parse_args()
    if args.probe:
        status = probe(args.probe, args.spin, args.limit, args.passes)
        sys.stdout.flush()
        if status:
            os._exit(status)                                 # an ordinary exit would wait for the launch
        return 0
    failed = 0
    for name in PROBES:
        command = [sys.executable, __file__, "--probe", name, "--spin", str(args.spin), "--limit", str(args.limit), "--passes", str(args.passes)]
        try:
            failed += subprocess.run(command, timeout=args.limit + 120).returncode != 0
        except subprocess.TimeoutExpired:
            print(f"{name}: its process did not end", flush=True)
            failed += 1
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
