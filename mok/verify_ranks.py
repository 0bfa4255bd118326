"""Checks promise P3 on this machine: the layer on several ranks, processes that share a gloo group, against one rank, to the bit."""
from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .arguments import check_integer
from .function import moe
from .group import ExpertGroup
from .plan import experts_of_rank
from .verify import BITWISE_CASES, Case, Check, Problem, Target, make_problem, same_bits, short_name

MOST_RANKS = 64
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
# what promise P3 names; gradients of shared experts are each rank's own sums
FORWARD = ("y",)
BACKWARD = ("dx", "d_topk_weights", "dw_gate_up", "dw_down", "db_gate_up", "db_down")
CASES = (
    *BITWISE_CASES,
    Case("biases, shared experts, masked routes", T=600, H=72, I=40, E=6, K=3, biases=True, shared=((24, True), (16, False)), masked=0.2),
    Case("one expert takes every route", T=260, H=40, I=48, E=4, K=2, one_expert=True),
)
_SEED = 11
_TIMEOUT_S = 120.0       # of one rank waiting for another
_GRACE_S = 5.0           # for the other ranks to say what they saw of one that failed
_START_S = 300.0         # until all ranks have joined: importing torch takes a loaded machine long

Results = dict[str, Tensor]
Body = Callable[[ExpertGroup | None, Case, torch.dtype, Sequence[int]], Results]


class RankFailed(Exception):
    """A rank raised, ended or did not answer; the message says which and how."""


def verify_ranks(ranks: Sequence[int], on_check: Callable[[Check], None] = lambda check: None, body: Body | None = None) -> list[Check]:
    """Two checks, forward and backward, for each number of ranks and each dtype; `on_check` sees each as it is done.

    body: what a rank computes, a function of a module (it runs in other processes); None = `BODY`. Raises ValueError naming ranks.
    """
    for W in ranks:
        check_integer("ranks", W, 1, MOST_RANKS)
    checks: list[Check] = []
    for W in dict.fromkeys(ranks):
        for check in _check_ranks(W, body or BODY):
            checks.append(check)
            on_check(check)
    return checks


def count_checks(ranks: Sequence[int]) -> int:
    """How many checks `verify_ranks` will make."""
    return 2 * len(DTYPES) * len(set(ranks))


def token_cuts(T: int, W: int) -> list[list[int]]:
    """Ways to share T tokens among W ranks, each as W + 1 places: rank r has those from its place to the next.

    Unequal counts; every second rank without a token; all tokens on the last rank. token_cuts(8, 2) == [[0, 2, 8], [0, 0, 8], [0, 0, 8]]
    """
    unequal = [T * r * r // (W * W) for r in range(W + 1)]
    busy = [r for r in range(W) if r % 2 or W == 1]
    every_second = [T * sum(b < r for b in busy) // len(busy) for r in range(W + 1)]
    return [unequal, every_second, [0] * W + [T]]


def case_for(case: Case, W: int) -> Case:
    """The case with experts enough for W ranks; where they were too few, one more than ranks, so that they do not divide evenly."""
    return case if case.E >= W else replace(case, E=W + 1)


def rank_results(group: ExpertGroup | None, case: Case, dtype: torch.dtype, cuts: Sequence[int]) -> Results:
    """y and the gradients that P3 names, of this rank's tokens and experts; group None: of all tokens, whatever cuts say."""
    problem = make_problem(case, Target("cpu", torch.device("cpu"), dtype), _SEED)
    tokens, experts = slice(None), slice(None)
    if group is not None:
        first, count = experts_of_rank(case.E, group.size, group.rank)
        tokens, experts = slice(cuts[group.rank], cuts[group.rank + 1]), slice(first, first + count)
    return _pass(problem, group, tokens, experts)


BODY: Body = rank_results


def _pass(problem: Problem, group: ExpertGroup | None, tokens: slice, experts: slice) -> Results:
    case, t = problem.case, problem.tensors
    leaves = {"dx": t.x[tokens], "d_topk_weights": t.topk_weights[tokens], "dw_gate_up": t.w_gate_up[experts], "dw_down": t.w_down[experts]}
    if t.b_gate_up is not None and t.b_down is not None:
        leaves |= {"db_gate_up": t.b_gate_up[experts], "db_down": t.b_down[experts]}
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
    y = moe(leaves["dx"], problem.topk_ids[tokens], leaves["d_topk_weights"], leaves["dw_gate_up"], leaves["dw_down"], leaves.get("db_gate_up"),
            leaves.get("db_down"), t.shared, case.activation, case.swiglu_limit, group=group)
    grads = torch.autograd.grad(y, list(leaves.values()), problem.dy[tokens])
    return {"y": y.detach(), **dict(zip(leaves, grads, strict=True))}


def _check_ranks(W: int, body: Body) -> Iterator[Check]:
    left = list(DTYPES)
    try:
        with RankProcesses(W) as processes:
            while left:
                yield from _check_dtype(processes, W, left[0], body)
                del left[0]
    except RankFailed as error:                    # the group is dead, and with it what was still to be checked
        for dtype in left:
            yield from (_check(W, dtype, which, [str(error)]) for which in ("forward", "backward"))


def _check_dtype(processes: RankProcesses, W: int, dtype: torch.dtype, body: Body) -> Iterator[Check]:
    wrong: dict[str, list[str]] = {"forward": [], "backward": []}
    for case in (case_for(case, W) for case in CASES):
        alone = rank_results(None, case, dtype, ())
        for cuts in token_cuts(case.T, W):
            parts = processes.run(body, case, dtype, cuts)
            held = [last - first for first, last in pairwise(cuts)]
            for which, names in (("forward", FORWARD), ("backward", BACKWARD)):
                wrong[which] += [f"{text}, T of the ranks {held}, case: {case.why}" for name in names if name in alone
                                 and (text := _difference(name, [part[name] for part in parts], alone[name]))]
    for which, texts in wrong.items():
        yield _check(W, dtype, which, texts)


def _difference(name: str, parts: Sequence[Tensor], whole: Tensor) -> str:
    """How the ranks' parts, laid one after another, differ from one rank's; "" where every bit is the same."""
    joined = torch.cat(list(parts))
    if same_bits(joined, whole):
        return ""
    if joined.shape != whole.shape or joined.dtype != whole.dtype:
        return f"{name} is {joined.dtype} {tuple(joined.shape)} instead of {whole.dtype} {tuple(whole.shape)}"
    unlike = joined.contiguous().view(torch.uint8).view(*joined.shape, -1) != whole.contiguous().view(torch.uint8).view(*whole.shape, -1)
    return f"{name} differs in {int(unlike.any(-1).sum())} of {whole.numel()} elements"


def _check(W: int, dtype: torch.dtype, which: str, wrong: Sequence[str]) -> Check:
    detail = "; ".join(wrong[:3]) or f"the bits of one rank, T unequal and zero, {len(CASES)} cases"
    return Check("cpu", "cpu", short_name(dtype), f"P3 {which}, {W} rank{'s' if W > 1 else ''}", not wrong, detail=detail)


# --- processes --------------------------------------------------------------------------------------------------------------------------


class RankProcesses:
    """W processes of this machine with an ExpertGroup over gloo; `run` calls a function on all of them at once. A context manager."""

    def __init__(self, W: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self._pipes: list[connection.Connection] = []
        self._processes = []
        before = signal.getsignal(signal.SIGINT)
        for rank in range(W):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, W, f"{self._folder.name}/store", theirs), daemon=True)
            signal.signal(signal.SIGINT, signal.SIG_IGN)             # inherited: Ctrl-C is for the process that asks; it ends these
            try:
                process.start()
            finally:
                signal.signal(signal.SIGINT, before)
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(group, *args) on every rank, its results in rank order. RankFailed where any raised, ended or was silent for too long."""
        request = pickle.dumps((function, args))
        deadline = time.monotonic() + _START_S + 2 * _TIMEOUT_S
        for pipe in self._pipes:
            with contextlib.suppress(OSError):                        # a rank that has ended; how shows below
                pipe.send_bytes(request)
        answers: dict[int, tuple[Any, str]] = {}
        while len(answers) < len(self._pipes):
            waiting = [rank for rank in range(len(self._pipes)) if rank not in answers]
            watched = [thing for rank in waiting for thing in (self._pipes[rank], self._processes[rank].sentinel)]
            ready = connection.wait(watched, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            answers |= {rank: self._answer(rank) for rank in waiting if self._pipes[rank] in ready or self._processes[rank].sentinel in ready}
            if any(text for _, text in answers.values()):             # the others may wait for it until their own time-out
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        failed = [f"rank {rank}: {text}" for rank, (_, text) in sorted(answers.items()) if text]
        if failed or len(answers) < len(self._pipes):
            silent = [rank for rank in range(len(self._pipes)) if rank not in answers]
            raise RankFailed("; ".join(failed[:2]) or f"ranks {silent} did not answer")
        return [answers[rank][0] for rank in range(len(self._pipes))]

    def _answer(self, rank: int) -> tuple[Any, str]:
        """(result, "" or what went wrong) of a rank that has answered or ended."""
        pipe, process = self._pipes[rank], self._processes[rank]
        with contextlib.suppress(EOFError, OSError):
            if pipe.poll():
                return pickle.loads(pipe.recv_bytes())
        process.join(_TIMEOUT_S)                                      # the system closes its files first, and then says how it ended
        return None, f"ended with status {process.exitcode}"


def _serve(rank: int, W: int, store: str, pipe: connection.Connection) -> None:
    """One rank: joins the others, then answers requests until the pipe is closed."""
    torch.set_num_threads(max(1, torch.get_num_threads() // W))
    group: ExpertGroup | None = None
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        try:
            if group is None:
                dist.init_process_group("gloo", store=dist.FileStore(store, W), rank=rank, world_size=W, timeout=timedelta(seconds=_START_S))
                group = ExpertGroup(timeout_s=_TIMEOUT_S)
            answer: tuple[Any, str] = function(group, *args), ""
        except Exception as error:                                    # told to the process that asked, which reports it
            answer = None, f"{type(error).__name__}: {error}"
        pipe.send_bytes(pickle.dumps(answer))
