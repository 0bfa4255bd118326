"""`mok train --ranks` on GPUs: ranks that share one under MPS, and one a GPU over NCCL; against one rank, twice, stopped and continued, one killed."""
from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mok.lm.run_folder import RunFolder
from tests.lm.test_rank_processes import children, running, wait_until

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "mok" / "lm" / "trainer.py"
BOTH = [pytest.param("cuda:0", marks=pytest.mark.gpu, id="sharing a GPU"), pytest.param("cuda", marks=pytest.mark.multigpu, id="a GPU each")]


def start(out: Path, device: str, ranks: int, *more: str, module: str = "mok", **environment: str) -> subprocess.Popen[str]:
    words = ["train", "--device", device, "--ranks", str(ranks), "--config", "small", "--precision", "bf16", "--batch-size", "6", "--data", str(TEXT),
             "--warmup-steps", "100000", "--learning-rate", "10", "--sample-bytes", "0", "--eval-every", "100000", "--eval-tokens", "4096", "--timeout", "60",
             "--json", *more]
    return subprocess.Popen([sys.executable, "-m", module, *words, *(["--out", str(out)] if "--resume" not in more else [])], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), **environment})


def train(out: Path, device: str, ranks: int, *more: str) -> tuple[dict, str]:
    """(the command's document, what it said on stderr)."""
    process = start(out, device, ranks, *more)
    printed, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return json.loads(printed.splitlines()[-1]), err


def losses(run: Path) -> list[float]:
    return [entry["loss"] for entry in RunFolder(run).read_metrics() if "loss" in entry]


@pytest.mark.parametrize("device", BOTH)
def test_two_ranks_train_as_one_does_twice_the_same_and_continue_to_the_bit(tmp_path, device):
    """An odd share, 3 sequences a rank: bits of library products see the batch, so one rank's losses to rounding; two runs of two ranks by every digest."""
    train(tmp_path / "one", "cuda:0", 1, "--steps", "6", "--save-every", "0")
    audits = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    first, said = train(tmp_path / "a", device, 2, "--steps", "6", "--save-every", "3", "--audit", str(audits[0]))
    second, _ = train(tmp_path / "b", device, 2, "--steps", "6", "--save-every", "3", "--audit", str(audits[1]))
    assert first["ranks"] == 2 and first["mfu"]["gpus"] == (1 if device == "cuda:0" else 2) and first["mfu"]["of_measured_roof"] > 0
    assert "expert parallelism runs over the process group" not in said, said
    alone, together = losses(tmp_path / "one"), losses(tmp_path / "a")
    assert len(alone) == len(set(alone)) == 6 and together == pytest.approx(alone, rel=2e-3)
    assert first["audit"]["hash"] == second["audit"]["hash"] and audits[0].read_bytes() == audits[1].read_bytes()
    assert '"replicas differ"' not in audits[0].read_text()
    replayed = subprocess.run([sys.executable, "-m", "mok", "audit", "replay", str(audits[0]), "--timeout", "60"], capture_output=True, text=True, cwd=ROOT,
                              env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=240)
    assert replayed.returncode == 0 and "CONFIRMED: 6 of 6 steps" in replayed.stdout, replayed.stdout + replayed.stderr
    (tmp_path / "b" / "checkpoints" / "step-00000006").rename(tmp_path / "dropped")                # back to the checkpoint of step 3, and on from there
    train(tmp_path / "b", device, 2, "--resume", str(tmp_path / "b"))
    assert losses(tmp_path / "b") == together


@pytest.mark.parametrize("device", BOTH)
def test_a_killed_rank_ends_the_other_and_the_daemon(tmp_path, device):
    """Killed between two steps, with nothing of it on the GPU: in mid-kernel a client of MPS may take the server along."""
    note = tmp_path / "note"
    process = start(tmp_path / "run", device, 2, "--steps", "100000", "--save-every", "0", module="tests.lm.dying_rank", DYING_RANK="1", DYING_STEP="3",
                    DYING_WHERE="between", DYING_NOTE=str(note))
    started: set[int] = set()
    while process.poll() is None and not note.exists():
        started.update(children(process.pid))
        time.sleep(0.1)
    _, err = process.communicate(timeout=90)
    pid = int(note.read_text().split()[0])
    assert process.returncode == 1 and err.splitlines()[-2:] == [
        f"mok train: failed: rank 1 (pid {pid}) was killed by SIGKILL", err.splitlines()[-1]] and "lost rank 1" in err.splitlines()[-1], err
    assert len(losses(tmp_path / "run")) == 3
    assert pid in started
    wait_until(lambda: not any(map(running, started)), f"of {started}, which the command started, some still run", 10.0)
