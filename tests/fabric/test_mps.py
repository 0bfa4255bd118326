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
from tests.mps_stand_in import runs, write_program


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{write_program(tmp_path)}:{os.environ['PATH']}")
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    monkeypatch.setattr(mps_module, "_END_S", 0.5)
    return tmp_path / "pids"


def test_clients_get_private_folders_and_no_share(stand_in, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/the/users/own")
    monkeypatch.delenv("CUDA_MPS_LOG_DIRECTORY", raising=False)
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50")          # the stand-in ends with an error if the daemon gets it
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
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


@pytest.mark.parametrize("visible, seen", [("1", "0"), ("3,1", "0,1"), ("GPU-d79aa688,GPU-918c38dd,GPU-0", "0,1,2"), ("", "")])
def test_clients_see_the_devices_that_the_daemon_sees(stand_in, monkeypatch, visible, seen):
    """A daemon numbers its devices from 0, so a client that set its parent's list would find none, or others."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with PrivateMps() as mps:
        daemon = next(int(pid) for pid in stand_in.read_text().split())
        assert f"CUDA_VISIBLE_DEVICES={visible}".encode() in Path(f"/proc/{daemon}/environ").read_bytes().split(bytes(1))
        with mps.inherited():
            assert os.environ["CUDA_VISIBLE_DEVICES"] == seen
        assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
    assert not runs(daemon)


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
