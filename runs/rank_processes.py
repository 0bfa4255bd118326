"""Processes of one machine that share an expert-parallel layer, for scripts in this folder: a GPU each, or sharing one under a private MPS daemon."""
from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import mok
from mok.fabric.mps import PrivateMps
from mok.lm.placement import Placement, place_here
from mok.lm.ranks import Ranks

START_S = 120.0


@dataclass
class Outcome:
    """How a rank ended: what its body returned, or what it raised; exit code, negative for a signal. ended_at: time.time()."""

    result: Any = None
    error: str = ""
    exitcode: int | None = None
    ended_at: float = 0.0


def run_ranks(body: Callable[..., Any], W: int, device: str, *args: Any, limit_s: float, timeout_s: float = 90.0,
              on_message: Callable[[int, Any, list[Any]], None] = lambda rank, message, processes: None) -> list[Outcome]:
    """body(ranks, say, *args) on W processes. `say(message)` of a rank reaches on_message(rank, message, processes) here; after limit_s all are killed.

    timeout_s: the ExpertGroups' time-out.
    """
    context = mp.get_context("spawn")
    sharing = place_here(torch.device(device), 0, W).sharing
    outcomes, deadline = [Outcome() for _ in range(W)], time.monotonic() + limit_s
    with tempfile.TemporaryDirectory() as folder, _mps(sharing):
        pipes, processes = [], []
        for rank in range(W):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(rank, W, device, f"{folder}/store", timeout_s, theirs, body, args), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            while (alive := [r for r in range(W) if outcomes[r].exitcode is None]) and time.monotonic() < deadline:
                connection.wait([thing for r in alive for thing in (pipes[r], processes[r].sentinel)], timeout=max(0.0, deadline - time.monotonic()))
                for r in alive:
                    _listen(r, pipes, processes, outcomes, on_message)
        finally:
            for process in processes:
                process.kill()
                process.join()
    for outcome in outcomes:
        if outcome.exitcode is None:
            outcome.error = f"still ran after {limit_s:g} s"
    return outcomes


def results_of(outcomes: list[Outcome]) -> list[Any]:
    """Every rank's result; RuntimeError where one has none."""
    failed = [f"rank {r}: {outcome.error or f'ended with {outcome.exitcode}'}" for r, outcome in enumerate(outcomes) if outcome.error or outcome.exitcode]
    if failed:
        raise RuntimeError("; ".join(failed))
    return [outcome.result for outcome in outcomes]


@contextlib.contextmanager
def _mps(sharing: int) -> Iterator[None]:
    if sharing == 1:
        yield
        return
    with PrivateMps() as daemon, daemon.inherited():
        yield


def _listen(r: int, pipes: list[Any], processes: list[Any], outcomes: list[Outcome], on_message: Callable[[int, Any, list[Any]], None]) -> None:
    """What rank r has said until now, and whether it has ended."""
    ended = processes[r].exitcode is not None             # looked at first: what it said before is then in the pipe
    with contextlib.suppress(EOFError, OSError):
        while pipes[r].poll():
            kind, value = pipes[r].recv()
            if kind == "say":
                on_message(r, value, processes)
            else:
                outcomes[r].result, outcomes[r].error = value
    if ended:
        outcomes[r].exitcode, outcomes[r].ended_at = processes[r].exitcode, time.time()


def join_ranks(rank: int, W: int, placement: Placement, store: str, timeout_s: float) -> Ranks:
    """This process as rank `rank`, over a store that is a file: no rank's end takes it along."""
    torch.set_num_threads(1 if placement.device.type == "cpu" else 4)
    if placement.device.type == "cuda":
        torch.cuda.set_device(placement.device)
    dist.init_process_group(placement.backend, store=dist.FileStore(store, W), rank=rank, world_size=W, timeout=timedelta(seconds=START_S))
    return Ranks(mok.ExpertGroup(timeout_s=timeout_s), placement)


def _rank(rank: int, W: int, device: str, store: str, timeout_s: float, pipe: Any, body: Callable[..., Any], args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ranks = join_ranks(rank, W, place_here(torch.device(device), rank, W), store, timeout_s)
        answer: tuple[Any, str] = body(ranks, lambda message: pipe.send(("say", message)), *args), ""
    except BaseException as error:
        traceback.print_exc()
        answer = None, f"{type(error).__name__}: {error}"
    pipe.send(("end", answer))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if answer[1] else 0)                       # threads that wait for a lost peer must not keep the process
