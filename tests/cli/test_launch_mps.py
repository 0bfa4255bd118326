"""Ranks that share a GPU: the launcher's MPS daemon, a stand-in here, is there before them and gone after them, however they end."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mok.cli.console import PeerFailed
from mok.cli.launch import _failures_named
from tests.mps_stand_in import runs, write_program

ROOT = Path(__file__).parents[2]


def _start(folder: Path, path: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "tests.cli.sharing_ranks"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
                            start_new_session=True, env={**os.environ, "PYTHONPATH": str(ROOT), "FOLDER": str(folder), "PIDS": str(folder / "pids"),
                                                         "PATH": path, **environment})


def _await(condition, what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.fixture
def path(tmp_path) -> str:
    return f"{write_program(tmp_path)}:{os.environ['PATH']}"


@pytest.mark.parametrize("how", ["Ctrl-C", "a rank is killed"])
def test_the_daemon_lives_as_long_as_the_ranks(tmp_path, path, how):
    process = _start(tmp_path, path, BEHAVIOUR="die" if how == "a rank is killed" else "wait")
    _await(lambda: all((tmp_path / f"rank-{rank}").exists() for rank in range(2)) or process.poll() is not None, "both ranks to start")
    ranks = [(tmp_path / f"rank-{rank}").read_text().split() for rank in range(2)]
    pipe = ranks[0][1]
    assert Path(pipe).name == "pipe" and [rank[1:] for rank in ranks] == [[pipe, "True"]] * 2                # the daemon there before them
    daemon, server = map(int, (tmp_path / "pids").read_text().split())
    if how == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)                                   # as a terminal does: to all that the command started
    _, err = process.communicate(timeout=30)
    if how == "Ctrl-C":
        assert process.returncode == 130 and "Traceback" not in err, err
        assert [(tmp_path / f"end-{rank}").read_text().split()[1:] for rank in range(2)] == [[pipe, "True"]] * 2, "the ranks lost the daemon before their end"
    else:
        assert process.returncode == 1
        assert err.splitlines() == [f"mok train: failed: rank 1 (pid {ranks[1][0]}) was killed by SIGKILL", "mok train: failed: rank 0: lost rank 1"]
    assert not Path(pipe).exists() and not any(map(runs, [daemon, server, *(int(rank[0]) for rank in ranks)]))


@pytest.mark.parametrize(("there", "said"), [(True, "ended with status 3"), (False, "is not installed")])
def test_a_daemon_that_does_not_start_ends_the_command_before_any_rank(tmp_path, path, there, said):
    process = _start(tmp_path, path if there else "/nowhere", BEHAVIOUR="wait", STAND_IN="fails")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and err.startswith("ranks=2 share a GPU: ") and "nvidia-cuda-mps-control" in err and said in err, err
    assert not (tmp_path / "rank-0").exists()


def test_a_broken_context_is_put_down_to_the_others_only_where_they_share_the_gpu(monkeypatch):
    """A killed client of MPS can break the contexts of all others; elsewhere such an error is this program's own, with its traceback."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    with pytest.raises(torch.AcceleratorError), _failures_named():
        raise torch.AcceleratorError("CUDA error: an illegal memory access\nCompile with")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/run/pipe")
    with pytest.raises(PeerFailed, match=r"^rank 1: CUDA error: an illegal memory access \(ranks that share a GPU can fall together\)$"), _failures_named():
        raise torch.AcceleratorError("CUDA error: an illegal memory access\nCompile with")
