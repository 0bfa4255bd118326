"""Starts the ranks of a command as processes of their own, passes signals on to them, and says how they ended."""
from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING, Any

from ..arguments import LARGEST, check_integer, check_seconds
from .console import CommandFailed, Outcome, PeerFailed

if TYPE_CHECKING:
    import torch

    from ..lm.ranks import Ranks

_GRACE_S = 15.0          # beyond the time-out after which a rank gives up on a lost one by itself
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def add_rank_arguments(parser: argparse.ArgumentParser, ranks: str | None) -> None:
    """--ranks, with the command's own words about it (None: the user has no say in it), and --timeout."""
    parser.set_defaults(ranks=None)
    if ranks is not None:
        parser.add_argument("--ranks", type=int, metavar="N", help=ranks)
    parser.add_argument("--timeout", type=float, metavar="SECONDS", default=300.0,
                        help="how long a rank waits for another before it gives up and names it (default: 300)")


def run_on_ranks(arguments: argparse.Namespace, count: Callable[[], int], body: Callable[[Ranks], int], device: torch.device) -> int:
    """The exit status of body(ranks) where this process is one of several already (`launched_ranks`), or the only one that count() asks for.

    Else starts count() processes that run the same command, and waits for them. `arguments` must hold command, ranks, timeout and json.
    device: what was asked for; `ranks.placement` says which each of several ranks has.
    """
    from ..lm.ranks import Ranks, join, launched_ranks

    if arguments.ranks is not None:
        check_integer("ranks", arguments.ranks, 1, LARGEST)
    check_seconds("timeout", arguments.timeout)
    launched = launched_ranks()
    if launched is None:
        number = count()
        return body(Ranks()) if number == 1 else launch(arguments, number, device)
    if arguments.ranks not in (None, launched):
        raise ValueError(f"ranks={arguments.ranks} must be the {launched} processes that were started, or left out")
    if launched == 1:
        return body(Ranks())
    with _failures_named():
        ranks = join(arguments.timeout, device)
        if not ranks.leads:
            sys.stdout = open(os.devnull, "w")           # noqa: SIM115  (rank 0 prints; this process has nothing more to say)
        return body(ranks)


@contextmanager
def _failures_named() -> Iterator[None]:
    """What goes wrong between ranks is no fault of this program: one line instead of a traceback."""
    import torch
    import torch.distributed as dist

    from ..fabric.process_group import FabricError
    from ..lm.placement import is_mps_client

    try:
        yield
    except (FabricError, dist.DistError) as error:
        raise PeerFailed(f"rank {os.environ['RANK']}: {error}") from error
    except torch.AcceleratorError as error:
        if not is_mps_client():
            raise
        # a client that is killed in mid-kernel takes its server along, and with it the contexts of all other clients
        raise PeerFailed(f"rank {os.environ['RANK']}: {str(error).splitlines()[0]} (ranks that share a GPU can fall together)") from error


def launch(arguments: argparse.Namespace, count: int, device: torch.device) -> int:
    """Run `mok COMMAND` on `count` processes of this machine; the first one prints. Returns the exit status, having said on stderr what failed.

    This process hosts the store through which they meet, so no rank's end takes it along. SIGINT and SIGTERM reach the ranks as SIGTERM.
    Where ranks share a GPU, a private MPS daemon runs as long as they do.
    """
    from torch.distributed import TCPStore

    from .main import INTERRUPTED

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    ends: list[connection.Connection] = []
    with _passed_on(processes) as seen, _shared_gpu(count, device):
        for rank in range(count):
            if seen:
                break
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank_process, args=(arguments, rank, count, store.port, theirs), daemon=True)
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)    # inherited: Ctrl-C reaches the ranks through this process alone
            try:
                process.start()
            finally:
                signal.signal(signal.SIGINT, before)
            theirs.close()
            processes.append(process)
            ends.append(ours)
        # a launch that has lost a peer half-way waits for twice the time-out, so that the waits which can name the peer end first
        _wait(processes, arguments.timeout * (2 if device.type == "cuda" else 1))
    if seen and len(processes) < count:
        print(f"mok {arguments.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return _report(arguments.command, processes, [_last_word(end) for end in ends], interrupted=bool(seen))


@contextmanager
def _shared_gpu(count: int, device: torch.device) -> Iterator[None]:
    """Inside, processes are clients of a private MPS daemon if so many ranks of this machine share GPUs. It ends with the block, or with this process."""
    from ..fabric.mps import PrivateMps
    from ..lm.placement import place_here

    if place_here(device, 0, count).sharing == 1:
        yield
        return
    with ExitStack() as stack:
        try:
            daemon = stack.enter_context(PrivateMps())
        except RuntimeError as error:
            raise CommandFailed(f"ranks={count} share a GPU: {error}") from error
        stack.enter_context(daemon.inherited())
        yield


def _last_word(end: connection.Connection) -> Outcome | None:
    """What a rank that has ended said of itself (`run_command`); None where it could not."""
    try:
        return end.recv() if end.poll() else None
    except EOFError:
        return None


def _wait(processes: list[SpawnProcess], timeout_s: float) -> None:
    """Until all have ended; those that still run long after another failed are killed."""
    deadline = None
    while alive := [process for process in processes if process.exitcode is None]:
        # looked at before the wait: a process that ends closes its sentinel a moment before it has an exit code
        if deadline is None and any(process.exitcode for process in processes):
            deadline = time.monotonic() + timeout_s + _GRACE_S
        connection.wait([process.sentinel for process in alive], timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        if deadline is not None and time.monotonic() >= deadline:
            for process in alive:
                process.kill()
                process.join()


@contextmanager
def _passed_on(processes: list[SpawnProcess]) -> Iterator[list[int]]:
    """Inside, SIGINT and SIGTERM make the processes stop; yields the list of those seen."""
    seen: list[int] = []

    def handle(number: int, frame: Any) -> None:
        seen.append(number)
        for process in processes:
            if process.exitcode is None:
                process.terminate()

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(command: str, processes: list[SpawnProcess], said: list[Outcome | None], interrupted: bool) -> int:
    """Say on stderr who ended how; the command's exit status.

    A rank that the signal ended takes others along, which then have lost a peer: that is no failure of theirs. Nor is it told where the rank that
    failed says itself why.
    """
    from .main import BAD_INPUT, FAILED, INTERRUPTED

    killed = {rank: -code for rank, process in enumerate(processes) if (code := process.exitcode or 0) < 0}
    outcomes = [outcome if outcome is not None else Outcome(process.exitcode or 0) for outcome, process in zip(said, processes, strict=True)]
    statuses = [outcome.status for outcome in outcomes]
    if not any(statuses):
        return 0
    stopped = [status in (INTERRUPTED, -signal.SIGTERM) for status in statuses]
    if interrupted and any(stopped) and all(outcome.status == 0 or outcome.peer_failed or stop for outcome, stop in zip(outcomes, stopped, strict=True)):
        if killed or any(outcome.line for outcome in outcomes):           # the second signal, or one before a rank could save anything
            print(f"mok {command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    if not killed and all(outcome is not None and not outcome.line for outcome in said):
        return statuses[0]                   # nobody failed: rank 0 found something out
    for rank, number in killed.items():
        print(f"mok {command}: failed: rank {rank} (pid {processes[rank].pid}) was killed by {signal.Signals(number).name}", file=sys.stderr)
    for rank, process in enumerate(processes):
        if said[rank] is None and (process.exitcode or 0) > 0:
            print(f"mok {command}: failed: rank {rank} (pid {process.pid}) ended with status {process.exitcode}", file=sys.stderr)
    own = any(outcome.line and not outcome.peer_failed for outcome in outcomes)
    for line in _distinct([outcome.line for outcome in outcomes if outcome.line and not (own and outcome.peer_failed)]):
        print(line, file=sys.stderr)
    return BAD_INPUT if all(status in (0, BAD_INPUT) for status in statuses) else FAILED


def _distinct(lines: list[str]) -> list[str]:
    """Each line once, without those that only repeat what another rank said of itself."""
    lines = list(dict.fromkeys(lines))
    texts = [line.split(": ", 2)[-1] for line in lines]
    return [line for line, text in zip(lines, texts, strict=True)
            if not ("of the ExpertGroup failed in" in text and any(other != text and text.endswith(f": {other}") for other in texts))]


def _rank_process(arguments: argparse.Namespace, rank: int, count: int, port: int, pipe: Any) -> None:
    """One rank's process: what torchrun's would find in its environment, then the command."""
    from .main import run_command

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")      # the store is there already: rank 0 must not make one
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    outcome = run_command(arguments)
    pipe.send(outcome)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(outcome.status)                     # threads that still wait for a lost peer must not keep the process


def _end_with(sentinel: int) -> None:
    """A rank must not outlive the process that started it."""
    connection.wait([sentinel])
    os._exit(1)
