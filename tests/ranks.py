"""Several ranks for tests: a pool of processes that share a gloo group and run module-level functions, and one-shot ranks that may die."""
from __future__ import annotations

import os
import pickle
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_CONTEXT = mp.get_context("spawn")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def init_rank(rank: int, world_size: int, store_file: str) -> None:
    """Join a gloo group whose store is a file, so that no rank's death takes the store along."""
    torch.set_num_threads(1)
    store = dist.FileStore(store_file, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))


def _pool_worker(rank: int, world_size: int, store_file: str, tasks: Any, results: Any) -> None:
    init_rank(rank, world_size, store_file)
    groups = {W: dist.new_group(list(range(W))) for W in range(1, world_size + 1)}
    while (task := tasks.get()) is not None:
        fn, W, args = task
        try:
            results.put((rank, pickle.dumps(fn(groups[W], *args)), None))
        except BaseException as error:
            results.put((rank, None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    sys.stdout.flush()
    os._exit(0)


class RankPool:
    """`pool.run(fn, W, *args)`: fn(process_group, *args) on ranks 0..W-1 at once; their results in rank order."""

    def __init__(self, world_size: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._results = _CONTEXT.Queue()
        self._tasks = [_CONTEXT.Queue() for _ in range(world_size)]
        self._processes = [_CONTEXT.Process(target=_pool_worker, args=(r, world_size, f"{self._folder.name}/store", self._tasks[r], self._results),
                                            daemon=True) for r in range(world_size)]
        for process in self._processes:
            process.start()

    def run(self, fn: Callable, W: int, *args: Any, timeout: float = 120) -> list[Any]:
        for tasks in self._tasks[:W]:
            tasks.put((fn, W, args))
        outcomes: list[Any] = [None] * W
        errors = []
        for _ in range(W):
            rank, result, error = self._results.get(timeout=timeout)
            if error is not None:
                errors.append(f"rank {rank}: {error}")
            else:
                outcomes[rank] = pickle.loads(result)
        if errors:
            raise AssertionError("\n".join(errors))
        return outcomes

    def close(self) -> None:
        for tasks in self._tasks:
            tasks.put(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


def _one_shot(rank: int, world_size: int, store_file: str, fn: Callable, args: tuple, results: Any) -> None:
    init_rank(rank, world_size, store_file)
    try:
        value, error = fn(*args), None
    except BaseException as caught:
        value, error = None, f"{type(caught).__name__}: {caught}"
    results.put((rank, value, error))
    results.close()
    results.join_thread()
    sys.stdout.flush()
    os._exit(0 if error is None else 1)                  # connections close as they would in any process that ends


def run_mortal_ranks(fn: Callable, W: int, *args: Any, timeout: float = 60) -> list[tuple[int | None, Any, str | None]]:
    """fn(*args) on W fresh ranks of the default group, any of which may end or fail: (exit code, result, error text) of each."""
    results = _CONTEXT.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [_CONTEXT.Process(target=_one_shot, args=(r, W, f"{folder}/store", fn, args, results)) for r in range(W)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout)
        hung = [r for r, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
        said: dict[int, tuple[Any, str | None]] = {}
        while not results.empty():
            rank, value, error = results.get()
            said[rank] = (value, error)
        if hung:
            raise AssertionError(f"ranks {hung} still ran after {timeout} s; the others said {said}")
    return [(process.exitcode, *said.get(r, (None, None))) for r, process in enumerate(processes)]
