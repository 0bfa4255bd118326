"""A stand-in for NVIDIA's MPS control program, to be put on PATH: behaves like it as far as mok uses it.

-f serves until it is told to quit, and starts a server; without -f it passes a command on. The environment says how it behaves (STAND_IN: "",
"fails", "deaf", "leaves its server") and where it notes the ids of daemon and server (PIDS).
"""
from __future__ import annotations

import sys
from pathlib import Path

PROGRAM = f"""#!{sys.executable}
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


def write_program(folder: Path) -> Path:
    """The program in `folder`/bin; that folder goes in front of PATH."""
    program = folder / "bin" / "nvidia-cuda-mps-control"
    program.parent.mkdir()
    program.write_text(PROGRAM)
    program.chmod(0o755)
    return program.parent


def runs(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False
