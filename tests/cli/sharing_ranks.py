"""`python -m tests.cli.sharing_ranks FOLDER`: the launcher with two ranks that share a GPU, as if there were one, and do nothing but note what they see.

Each writes "pid, folder of the daemon, whether it runs" to FOLDER/rank-N once when it has started and, where it is asked to stop, once more in FOLDER/end-N
after a moment in which the daemon could end. The environment's BEHAVIOUR: "wait" (until asked to stop), "die" (rank 1 kills itself, rank 0 sees it and ends).
"""
from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import torch

from mok.cli import launch
from mok.cli.console import CommandFailed, Outcome
from mok.lm import placement
from tests.mps_stand_in import runs

FOLDER = Path(os.environ["FOLDER"])


def _note(name: str) -> None:
    daemon = int(Path(os.environ["PIDS"]).read_text().split()[0])
    partial = FOLDER / f".{name}"
    partial.write_text(f"{os.getpid()} {os.environ['CUDA_MPS_PIPE_DIRECTORY']} {runs(daemon)}")
    partial.rename(FOLDER / name)


def _rank(arguments, rank, count, port, pipe) -> None:
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    _note(f"rank-{rank}")
    if os.environ["BEHAVIOUR"] == "die":
        while not (FOLDER / "rank-0").exists():
            time.sleep(0.02)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        pipe.send(Outcome(1, "mok train: failed: rank 0: lost rank 1", True))
        os._exit(1)
    while not stopped:
        time.sleep(0.02)
    time.sleep(0.3)
    _note(f"end-{rank}")
    pipe.send(Outcome(130))
    os._exit(130)


launch._rank_process = _rank                                                                   # type: ignore[assignment]
placement.place_here = lambda device, rank, ranks: placement.place(device, rank, ranks, 1)     # type: ignore[assignment]

if __name__ == "__main__":
    try:
        sys.exit(launch.launch(argparse.Namespace(command="train", timeout=5.0), 2, torch.device("cuda")))
    except CommandFailed as error:
        print(error, file=sys.stderr)
        sys.exit(1)
