"""The private MPS daemon, with a stand-in for NVIDIA's program: started in a folder of its own, ended by id with its servers, and nobody else's."""
from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mok.fabric.mps as mps_module
from mok.fabric.mps import PrivateMps

# Behaves like the program as far as is used: -f serves until it is told to quit, and starts a server; without -f it passes a command on.
STAND_IN = f"""#!{sys.executable}
import os, pathlib, subprocess, sys, time
pipe, log = (pathlib.Path(os.environ["CUDA_MPS_" + name + "_DIRECTORY"]) for name in ("PIPE", "LOG"))
behaviour = os.environ.get("STAND_IN", "")
if sys.argv[1:] == ["-f"]:
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in os.environ
    if behaviour == "fails":
        (log / "control.log").write_text("no permission for the GPU")
        sys.exit(3)
    server = subprocess.Popen(["sleep", "600"])
    pathlib.Path(os.environ["PIDS"]).write_text(f"{{os.getpid()}} {{server.pid}}")
    (pipe / "control").touch()
    while behaviour == "deaf" or not (pipe / "quit").exists():
        time.sleep(0.02)
    if behaviour != "leaves its server":
        server.kill()
        server.wait()
else:
    command = sys.stdin.read().strip()
    assert command in ("get_server_list", "quit"), command
    if command == "quit":
        (pipe / "quit").touch()
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    program = tmp_path / "bin" / "nvidia-cuda-mps-control"
    program.parent.mkdir()
    program.write_text(STAND_IN)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    monkeypatch.setattr(mps_module, "_END_S", 0.5)
    return tmp_path / "pids"


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def test_clients_get_private_folders_and_no_share(stand_in, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/the/users/own")
    monkeypatch.delenv("CUDA_MPS_LOG_DIRECTORY", raising=False)
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50")          # the stand-in ends with an error if the daemon gets it
    with PrivateMps() as mps:
        assert set(mps.environment) == {"CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"}
        folders = {mps.environment["CUDA_MPS_PIPE_DIRECTORY"], mps.environment["CUDA_MPS_LOG_DIRECTORY"]}
        assert len(folders) == 2 and all(Path(folder).is_dir() for folder in folders) and "/the/users/own" not in folders
        with mps.inherited():
            assert {name: os.environ[name] for name in mps.environment} == mps.environment
        assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "/the/users/own" and "CUDA_MPS_LOG_DIRECTORY" not in os.environ
    assert not any(Path(folder).exists() for folder in folders)
    with pytest.raises(RuntimeError, match="not running"):
        _ = mps.environment


@pytest.mark.parametrize("behaviour", ["", "deaf", "leaves its server"])
def test_daemon_and_servers_end_by_id_and_nothing_else_does(stand_in, monkeypatch, behaviour):
    """However the daemon behaves, and when the body raises; another process of the same name goes on."""
    monkeypatch.setenv("STAND_IN", behaviour)
    with PrivateMps() as another:
        others = [int(pid) for pid in stand_in.read_text().split()]
        with pytest.raises(KeyError), PrivateMps():
            mine = [int(pid) for pid in stand_in.read_text().split()]
            assert all(map(runs, mine)) and not set(mine) & set(others)
            raise KeyError
        assert not any(map(runs, mine))
        assert all(map(runs, others)) and another.environment
    assert not any(map(runs, others))


def test_a_daemon_that_fails_says_why(stand_in, monkeypatch):
    monkeypatch.setenv("STAND_IN", "fails")
    with pytest.raises(RuntimeError, match=r"status 3.*no permission for the GPU"), PrivateMps():
        pass


def test_the_daemon_ends_with_a_killed_parent(stand_in):
    code = "import os, signal; from mok.fabric.mps import PrivateMps; PrivateMps().__enter__(); os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", code], check=False)
    daemon, server = map(int, stand_in.read_text().split())
    deadline = time.monotonic() + 10
    while runs(daemon) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not runs(daemon)
    os.kill(server, 9)                                   # the stand-in's; NVIDIA's servers end with their daemon


def test_without_the_program_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="not installed"), PrivateMps():
        pass
