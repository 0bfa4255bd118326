"""A private CUDA MPS daemon, so that the kernels of several processes run on one GPU at once instead of in turns."""
from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .choice import MPS_SHARE

_PROGRAM = "nvidia-cuda-mps-control"
_START_S, _QUIT_S, _END_S = 20.0, 10.0, 5.0
_PR_SET_PDEATHSIG = 1
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_prctl = ctypes.CDLL(None).prctl         # looked up here: a forked child of a process with threads should do as little as it can


class PrivateMps:
    """`with PrivateMps() as mps:` runs a daemon of its own in a folder of its own; processes started with `mps.environment` are its clients.

    Other users' daemons are neither used nor touched: the pipe folder is private, and what is ended at the end is this daemon and its servers, by process
    id. The daemon also ends with the thread that started it, however that ends.
    Kernels of different ranks wait for one another, so without MPS, which lets them run at once, each round trip between ranks costs a time slice (4.5 ms
    against 2.3 us, H200). Clients get no share of the SMs (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE): shares overlap, so two launches that fill theirs may never be
    resident at once (seen on an H200 with 50 % each); launches that leave room for one another are. Raises RuntimeError if the daemon is not installed
    or does not start.
    """

    def __init__(self) -> None:
        self._renumbered: dict[str, str] = {}
        self._folder: tempfile.TemporaryDirectory | None = None
        self._daemon: subprocess.Popen | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make a process a client; to be set before it first touches CUDA."""
        if self._folder is None:
            raise RuntimeError("MPS is not running: use it as a context manager")
        folder = self._folder.name
        return {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log", **self._renumbered}

    @contextlib.contextmanager
    def inherited(self) -> Iterator[None]:
        """Within it, processes that this one starts are clients; this one must not touch CUDA for the first time there, unless it is to be one too."""
        before = {name: os.environ.get(name) for name in self.environment}
        os.environ.update(self.environment)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def __enter__(self) -> PrivateMps:
        program = shutil.which(_PROGRAM)
        if program is None:
            raise RuntimeError(f"{_PROGRAM} is not installed: ranks that share a GPU need CUDA MPS")
        self._renumbered = renumbered(os.environ.get(_VISIBLE))
        self._folder = tempfile.TemporaryDirectory(prefix="mok-mps-", ignore_cleanup_errors=True)
        for name in ("pipe", "log"):
            Path(self._folder.name, name).mkdir()
        # In the foreground (-f): a child whose id is known, instead of a daemon that has to be searched for. In a process group of its own: Ctrl-C on a
        # terminal must not take it from clients that still finish their step.
        self._daemon = subprocess.Popen([program, "-f"], env=self._own_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL, preexec_fn=_end_with_parent, process_group=0)
        try:
            self._await_start(program)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Ask the daemon to quit, then end it and the servers that it started, by id."""
        if self._daemon is None or self._folder is None:
            return
        servers = _children(self._daemon.pid)
        if self._daemon.poll() is None:
            self._command("quit", _QUIT_S)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._daemon.wait(_END_S)
        for ask in (self._daemon.terminate, self._daemon.kill):
            if self._daemon.poll() is None:
                ask()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._daemon.wait(_END_S)
        for pid, started in servers:
            _end(pid, started)
        self._daemon = None
        self._folder.cleanup()
        self._folder = None

    def _own_environment(self) -> dict[str, str]:
        """The daemon's: its folders, the devices that this process sees, and no share of the GPU, which a user may have set for clients."""
        folders = {name: value for name, value in self.environment.items() if name not in self._renumbered}
        return {name: value for name, value in {**os.environ, **folders}.items() if name != MPS_SHARE}

    def _await_start(self, program: str) -> None:
        deadline = time.monotonic() + _START_S
        assert self._daemon is not None
        while self._daemon.poll() is None and time.monotonic() < deadline:
            if Path(self.environment["CUDA_MPS_PIPE_DIRECTORY"], "control").exists() and self._command("get_server_list", 2.0):
                return
            time.sleep(0.05)
        state = "did not answer" if self._daemon.poll() is None else f"ended with status {self._daemon.returncode}"
        log = Path(self.environment["CUDA_MPS_LOG_DIRECTORY"], "control.log")
        said = log.read_text(errors="replace")[-500:].strip() if log.exists() else ""
        raise RuntimeError(f"{program} {state} within {_START_S:g} s" + (f"; its log ends with: {said}" if said else ""))

    def _command(self, text: str, timeout_s: float) -> bool:
        """Send the daemon a command; whether it took it."""
        try:
            return subprocess.run([_PROGRAM], input=f"{text}\n".encode(), env=self._own_environment(), capture_output=True, timeout=timeout_s).returncode == 0
        except subprocess.TimeoutExpired:
            return False


def renumbered(visible: str | None) -> dict[str, str]:
    """What clients of a daemon that sees these devices (CUDA_VISIBLE_DEVICES, None = not set) have to set to see the same: it numbers them from 0.

    renumbered("3,1") == {"CUDA_VISIBLE_DEVICES": "0,1"}
    """
    return {_VISIBLE: ",".join(str(number) for number in range(visible.count(",") + 1))} if visible else {}


def _end_with_parent() -> None:
    """In the child: end when the parent does."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _children(pid: int) -> list[tuple[int, str]]:
    """(process id, start time) of a process's children; the start time tells a process from a later one with its id."""
    try:
        pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [(int(child), started) for child in pids if (started := _start_time(int(child)))]


def _start_time(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        return ""


def _end(pid: int, started: str) -> None:
    """End a process unless it has ended already."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if _start_time(pid) != started:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        deadline = time.monotonic() + _END_S
        while _start_time(pid) == started and time.monotonic() < deadline:
            time.sleep(0.05)
