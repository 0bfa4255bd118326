"""Compiles the binaries that passes on this GPU use into Triton's cache, each in a process of its own, so that programs started side by side do not.

    PYTHONPATH=. python3 runs/warm_up.py                      all of them, about a minute on 16 cores
    PYTHONPATH=. python3 runs/warm_up.py --select ranks       those whose name holds a word
    PYTHONPATH=. python3 runs/warm_up.py --one backward_geglu one of them, in this process

Launches no pass. `debug`: variants of the tests in which roles sleep at random. `ranks`: several ranks that share a device; `cooperative`: one on each;
`waves`: groups with a capacity_factor. `plans`: what builds one rank's and a group's plan, for up to so many experts; `exchange`: a group's exchange of ids.
"""
from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import replace

import torch

from mok.engines.hopper import expert_parallel_plan_launch, launch, plan_kernel
from mok.engines.hopper.backward import BackwardConfig, _backward_kernel
from mok.engines.hopper.backward_launch import VARIANTS, _arguments, _buffers, _empty_grads
from mok.engines.hopper.expert_parallel_backward import load_group_backward
from mok.engines.hopper.forward import MOVER_WARPS, ForwardConfig
from mok.engines.hopper.launch import LAUNCH, GroupLaunch
from mok.engines.hopper.state import launch_state
from mok.engines.protocol import MoETensors, PassOptions, Saved, Wants
from mok.plan import empty_plan

OPTIONS = {"swiglu": PassOptions(), "clamped": PassOptions(swiglu_limit=7.0), "geglu": PassOptions("geglu"), "reglu": PassOptions("reglu")}
NAMES = [*(f"forward_{save}_movers{warps}{debug}" for save in ("train", "no_grad") for warps in MOVER_WARPS for debug in ("", "_debug")),
         *(f"backward_{name}" for name in VARIANTS), "backward_swiglu_debug", "backward_swiglu_recompute",
         *(f"forward_{save}_ranks{kind}" for save in ("train", "no_grad") for kind in ("", "_debug", "_cooperative", "_waves", "_waves_debug")),
         *(f"backward_{name}_ranks" for name in VARIANTS), "backward_swiglu_ranks_debug", "backward_swiglu_ranks_cooperative",
         "backward_swiglu_ranks_recompute", "backward_swiglu_ranks_waves", "backward_swiglu_ranks_waves_debug",
         *(f"plans_{experts}" for experts in plan_kernel.EXPERT_CLASSES), "exchange", "exchange_debug"]


def compile_plans(experts: int) -> None:
    """Build the plan of a token without an expert, alone and as the only rank of a group, with and without waves."""
    for dtype in (torch.int32, torch.int64):
        ids = torch.full((1, 1), -1, dtype=dtype, device="cuda")
        for wave_tiles in (None, (1, 1)):
            expert_parallel_plan_launch.cut_plan(plan_kernel.build_plan(ids, experts), ids, experts, 0, 1, 1, wave_tiles)


def compile_exchange(debug: bool) -> None:
    for dtype in (torch.int32, torch.int64):
        ids = torch.full((1, 1), -1, dtype=dtype, device="cuda")
        arguments = expert_parallel_plan_launch.exchange_arguments(ids, 1, 1, 0, ids.int(), launch_state(ids.device, 64)[0], debug)
        expert_parallel_plan_launch._exchange_ids_kernel.warmup(*arguments, grid=(1,), **expert_parallel_plan_launch.EXCHANGE_LAUNCH)


def compile_one(name: str) -> None:
    """Compile and load one variant as its launch would."""
    words = name.split("_")
    if words[0] == "plans":
        return compile_plans(int(words[1]))
    if words[0] == "exchange":
        return compile_exchange("debug" in words)
    debug, ranks, waves = "debug" in words, "ranks" in words, "waves" in words
    H = I = 64
    x = torch.zeros(1, H, device="cuda", dtype=torch.bfloat16)
    tensors = MoETensors(x, torch.zeros(1, 1, device="cuda"), x.new_zeros(1, 2 * I, H), x.new_zeros(1, H, I))
    plan = empty_plan(torch.zeros(1, 1, dtype=torch.int32, device="cuda"), 1, launch.TILE)
    state, capacity = launch_state(x.device, 64)
    group = GroupLaunch(state, capacity, 1, not ranks or "cooperative" in words, 1.0, 1 if waves else None)
    if words[0] == "forward":
        save = words[1] == "train"
        forward = ForwardConfig(save, 1 if "movers1" in words else 2, ranks, waves, debug=debug)
        launch.load(plan, tensors, PassOptions(save_for_backward=save), forward, group)
        return
    options = OPTIONS[words[1]]
    again = "recompute" in words
    if ranks:
        load_group_backward(plan, tensors, replace(options, recompute="z" if again else None), group, debug)
        return
    wants, saved = Wants(x=True), Saved(x.new_empty(plan.num_rows, 2 * I), x.new_empty(1, 0))
    buffers = _buffers(plan, tensors, wants, again)
    arguments = _arguments(plan, tensors, options, saved, x, wants, None, _empty_grads(tensors, wants, None), 2, *buffers, state, again)
    config = BackwardConfig(VARIANTS[words[1]], debug=int(debug), recompute=again)
    _backward_kernel.warmup(*arguments, grid=(1,), **config.constexprs(), **LAUNCH)._init_handles()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", choices=NAMES)
    parser.add_argument("--select", nargs="+", default=[""])
    args = parser.parse_args()
    if args.one:
        compile_one(args.one)
        return 0
    begin = time.monotonic()
    processes = {name: subprocess.Popen([sys.executable, __file__, "--one", name]) for name in NAMES if any(word in name for word in args.select)}
    failed = [name for name, process in processes.items() if process.wait()]
    print(f"{len(processes) - len(failed)} of {len(processes)} binaries in {time.monotonic() - begin:.0f} s" + (f"; failed: {failed}" if failed else ""))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
