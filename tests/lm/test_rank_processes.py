"""`mok train` as several processes: a rank that is killed, Ctrl-C, a launcher that is killed, torchrun."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import mok
from mok.cli import launch
from mok.lm.checkpoint import list_checkpoints
from mok.lm.data import load_corpus
from mok.lm.ranks import Ranks
from mok.lm.run_folder import RunFolder
from mok.lm.trainer import Trainer, TrainSettings, fit
from tests.ranks import RankPool

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "mok" / "lm" / "data.py"
TIMEOUT_S = 5.0
# a warm-up longer than any run: the learning rate then does not depend on --steps
SETTINGS = TrainSettings(config="tiny", steps=8, precision="fp32", batch_size=4, warmup_steps=10**6, learning_rate=1000.0, eval_every=10**6, save_every=2,
                         eval_tokens=64)


def command(out: Path, *more: str, module: str = "mok") -> list[str]:
    settings = [word for name, value in asdict(SETTINGS).items() if name != "accumulate" for word in (f"--{name.replace('_', '-')}", str(value))]
    return ["-m", module, "train", *settings, "--device", "cpu", "--data", str(TEXT), "--out", str(out), "--sample-bytes", "0",
            "--timeout", str(TIMEOUT_S), *more]


def start(words: list[str], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
                            env={**os.environ, "PYTHONPATH": str(ROOT), **environment}, start_new_session=True)


def losses(run: Path) -> list[float]:
    return [entry["loss"] for entry in RunFolder(run).read_metrics() if "loss" in entry]


@pytest.fixture(scope="module")
def pool():
    pool = RankPool(3)
    yield pool
    pool.close()


class Silent:
    def on_step(self, metrics):
        pass

    def on_validation(self, step, loss):
        pass


def _train(process_group, path, steps, resume):
    """The trainer's part of what the command does, on one thread a rank, in processes that are there already."""
    settings = replace(SETTINGS, steps=steps)
    trainer = Trainer(settings, load_corpus(TEXT), "cpu", Ranks(mok.ExpertGroup(process_group, timeout_s=30)))
    run = RunFolder(Path(path))
    if resume:
        trainer.load(run)
        if trainer.ranks.leads:
            run.truncate_metrics(trainer.step)
    fit(trainer, run, Silent())


@pytest.fixture(scope="module")
def whole(pool, tmp_path_factory) -> dict[int, list[float]]:
    """Losses of uninterrupted runs of eight steps by number of ranks."""
    folder, found = tmp_path_factory.mktemp("whole"), {}
    for W in (2, 3):
        run = RunFolder.create(folder / str(W), {})
        pool.run(_train, W, str(run.path), 8, False)
        found[W] = losses(run.path)
    assert len(set(found[2])) == len(set(found[3])) == 8
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("where", "dying"), [("forward", 0), ("backward", 2), ("between", 1)])
def test_a_killed_rank_is_named_by_all_others_and_the_run_resumes(pool, whole, tmp_path, where, dying):
    """Rank 0 too, which prints and writes: the launcher hosts the store through which the others learn of it."""
    note = tmp_path / "note"
    process = start(command(tmp_path / "run", "--ranks", "3", module="tests.lm.dying_rank"), DYING_RANK=str(dying), DYING_STEP="5", DYING_WHERE=where,
                    DYING_NOTE=str(note))
    out, err = process.communicate(timeout=120)
    ended = time.time()
    assert process.returncode == 1, (out, err)
    pid, died = note.read_text().split()
    assert ended - float(died) < TIMEOUT_S + 3, "the others must end within the time-out"
    lines = err.splitlines()
    assert lines[0] == f"mok train: failed: rank {dying} (pid {pid}) was killed by SIGKILL"
    for rank in {0, 1, 2} - {dying}:                                              # each of them said so itself, before it ended with status 1
        assert any(line.startswith(f"mok train: failed: rank {rank}: lost rank {dying} (global rank {dying}, pid {pid} on ") for line in lines), lines
    assert "Traceback" not in err
    assert losses(tmp_path / "run") == whole[3][:5]
    assert [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step-00000002", "step-00000004"]

    pool.run(_train, 3, str(tmp_path / "run"), 8, True)
    assert losses(tmp_path / "run") == whole[3]


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(condition, what: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


@pytest.mark.slow
class _Process:
    """A rank as its launcher sees it: the sentinel closes when it ends, its exit code is there `late` looks afterwards."""

    def __init__(self, late: int | None = None) -> None:
        self.sentinel, self._end = os.pipe()
        self._late, self._code = late, 1
        if late is not None:
            os.close(self._end)

    @property
    def exitcode(self) -> int | None:
        if self._late is None:
            return None
        self._late -= 1
        return None if self._late >= 0 else self._code

    def kill(self) -> None:
        os.close(self._end)
        self._late, self._code = 0, -signal.SIGKILL

    def join(self) -> None:
        pass


@pytest.mark.parametrize("late", range(5))
def test_a_stalled_rank_is_killed_whenever_the_failed_one_has_its_exit_code(monkeypatch, late):
    monkeypatch.setattr(launch, "_GRACE_S", 0.05)
    failed, stalled = _Process(late), _Process()
    waiting = threading.Thread(target=launch._wait, args=([failed, stalled], 0.05), daemon=True)
    waiting.start()
    waiting.join(10)
    assert not waiting.is_alive(), "the launcher waits for the stalled rank without end"
    assert stalled.exitcode == -signal.SIGKILL


def test_ctrl_c_stops_all_ranks_after_one_step_with_a_checkpoint(whole, tmp_path):
    process = start(command(tmp_path / "run", "--ranks", "2", "--steps", "100000", "--save-every", "1000000", "--json"))
    wait_until(lambda: process.poll() is not None or len(losses(tmp_path / "run")) >= 3, "three steps")
    os.killpg(process.pid, signal.SIGINT)                            # as a terminal does: the launcher and all ranks get it
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (out, err)
    done = len(losses(tmp_path / "run"))
    assert f"stopped after step {done} of 100000; continue with: mok train --resume {tmp_path / 'run'}" in err
    assert err.count("stopping after this step") == 1 and "Traceback" not in err
    document = json.loads(out.splitlines()[-1])
    assert document["finished"] is False and document["step"] == done and document["ranks"] == 2
    assert list_checkpoints(tmp_path / "run" / "checkpoints")[-1].name == f"step-{done:08d}"
    shared = min(done, 8)
    assert losses(tmp_path / "run")[:shared] == whole[2][:shared]
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["ranks"] == 2


@pytest.mark.slow
def test_ranks_end_with_the_process_that_started_them(tmp_path):
    process = start(command(tmp_path / "run", "--ranks", "2", "--steps", "100000"))
    wait_until(lambda: process.poll() is not None or len(losses(tmp_path / "run")) >= 2, "two steps")
    ranks = [pid for pid in children(process.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(ranks) == 2
    process.kill()
    process.communicate()
    wait_until(lambda: not any(map(running, ranks)), "both ranks to end", 20)


@pytest.mark.slow
def test_torchrun_gives_the_same_run(whole, tmp_path):
    process = start(["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", *command(tmp_path / "run", "--json")])
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, (out, err)
    assert losses(tmp_path / "run") == whole[2]
    assert json.loads(out.splitlines()[-1])["ranks"] == 2
