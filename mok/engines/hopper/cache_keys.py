"""Makes Triton's key of a kernel, by which it finds a compiled one on disk, the same in every process.

A kernel's key covers the functions that it calls, and Triton 3.6 takes the constants that such a function names into it only if that function's own key is
known already. So the key depends on what a process has compiled before, and a process that begins with another kernel compiles for ten seconds what lies in
the cache. `settle` asks for all keys in one order before anything is compiled.
"""
from __future__ import annotations

from importlib import import_module

# Every file with device code, those that others import first
FILES = ("sync", "tasks", "peers", "wave_loop", "expert_parallel_send", "gemm", "move", "expert_parallel_move", "forward", "backward_tasks", "backward_pipe",
         "backward_waves", "backward_load", "backward_consume", "backward_store", "backward_move", "expert_parallel_backward_move", "backward",
         "expert_parallel_plan", "plan_kernel")


def settle() -> None:
    """Make every key that is not known yet. The modules through which passes are compiled call it when they are imported (one rank's plan alone needs no
    other kernel, and always begins with the same one)."""
    for name in FILES:
        module = import_module(f".{name}", __package__)
        for function in list(vars(module).values()):
            if getattr(function, "__module__", None) == module.__name__:
                getattr(function, "cache_key", None)
