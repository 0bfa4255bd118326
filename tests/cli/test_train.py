"""`mok train`: its files and its JSON, bad input, protected folders, and Ctrl-C."""
from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from support import ROOT, TINY, bad_input, run_json, start, write_text

from mok.cli import train
from mok.cli.console import Outcome
from mok.cli.launch import _report
from mok.cli.main import main
from mok.lm.checkpoint import list_checkpoints
from mok.lm.run_folder import RunFolder
from mok.lm.trainer import TrainSettings


def losses(folder: Path) -> list[float]:
    return [entry["loss"] for entry in RunFolder.open(folder).read_metrics() if "loss" in entry]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, Path]:
    """(text, folder) of a run of four steps that is done; tests copy it."""
    folder = tmp_path_factory.mktemp("train")
    text = write_text(folder)
    assert main(["train", *TINY, "--data", str(text), "--out", str(folder / "run"), "--steps", "4", "--eval-every", "2"]) == 0
    return text, folder / "run"


def test_a_run_writes_metrics_picture_sample_and_checkpoint(finished):
    _, folder = finished
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries] == [1, 2, 2, 3, 4, 4]
    step = entries[0]
    assert sum(map(sum, step["expert_load"])) == 2 * 2 * 4 * 32           # layers * K * sequences * bytes
    assert 0 < step["balance"] <= 1 and step["tokens_per_s"] > 0
    assert (folder / "training.png").read_bytes().startswith(b"\x89PNG")
    assert len((folder / "sample.txt").read_text()) > 30
    assert [p.name for p in list_checkpoints(folder / "checkpoints")] == ["step-00000000", "step-00000004"]
    assert not [p for p in folder.rglob("*") if "partial" in p.name]


def test_json_is_one_document_on_the_last_line(tmp_path: Path, capsys):
    text = write_text(tmp_path)
    status, document, before = run_json(capsys, "train", *TINY, "--data", str(text), "--out", str(tmp_path / "run"), "--steps", "2")
    assert status == 0 and document["finished"] and document["step"] == 2
    assert document["loss"] == losses(tmp_path / "run")[-1] and document["mfu"] is None            # of a GPU only
    assert document["validation_loss"] > 0 and document["bigram_validation_loss"] > 0
    assert any("bigram model" in line and f"{document['bigram_validation_loss']:.4f}" in line for line in before)
    assert document["settings"]["batch_size"] == 4 and document["sample"]


def test_a_run_without_checkpoints_writes_everything_else(tmp_path: Path, capsys):
    text = write_text(tmp_path)
    status, document, _ = run_json(capsys, "train", *TINY, "--data", str(text), "--out", str(tmp_path / "run"), "--steps", "3", "--save-every", "0",
                                   "--audit", str(tmp_path / "record"))
    assert status == 0 and document["finished"] and document["sample"] and len(losses(tmp_path / "run")) == 3
    assert list_checkpoints(tmp_path / "run" / "checkpoints") == []
    assert main(["audit", "replay", str(tmp_path / "record")]) == 0
    assert "must hold at least one checkpoint" in bad_input(capsys, "train", "--resume", str(tmp_path / "run"), "--device", "cpu")


def test_resume_continues_where_the_run_ended(finished, tmp_path: Path, capsys):
    _, folder = finished
    shutil.copytree(folder, tmp_path / "run")
    status, document, _ = run_json(capsys, "train", "--resume", str(tmp_path / "run"), "--steps", "6", "--device", "cpu", "--sample-bytes", "0")
    assert status == 0 and document["step"] == 6 and "sample" not in document
    assert losses(tmp_path / "run")[:4] == losses(folder) and len(losses(tmp_path / "run")) == 6


@pytest.mark.parametrize(("arguments", "words"), [
    (["--data", "{tmp}/missing"], ["data=", "does not exist"]),
    (["--data", "{tmp}/empty"], ["data=", "found 0 bytes"]),
    (["--data", "{tmp}/short"], ["data=", "holds 9 bytes", "seq_len + 1 = 33"]),
    (["--config", "huge"], ["config='huge'", "tiny, small, 1b"]),
    (["--steps", "0"], ["steps=0", "at least 1"]),
    (["--steps", "many"], ["--steps", "'many'"]),
    (["--precision", "int4"], ["precision='int4'", "fp32, bf16"]),
    (["--moe-impl", "magic"], ["moe_impl='magic'", "engine, reference"]),
    (["--device", "quantum"], ["device='quantum'", "cpu, cuda"]),
    (["--device", "cuda:63"], ["device='cuda:63'", "GPU(s)"]),
    (["--sample-bytes", "-1"], ["sample_bytes=-1"]),
    (["--learning-rate", "-1"], ["learning_rate=-1.0", "positive"]),
    (["--resume", "{tmp}"], ["resume=", "must be the folder of a run"]),
    (["--nonsense"], ["--nonsense"]),
    (["--ranks", "0"], ["ranks=0 must be at least 1"]),
    (["--ranks", "5"], ["ranks=5 must be at most the 4 experts of config='tiny'"]),
    (["--ranks", "2", "--moe-impl", "reference"], ["ranks=2 must be 1 with moe_impl='reference'"]),
    (["--ranks", "2", "--data", "{tmp}/short"], ["data=", "holds 9 bytes"]),
    (["--ranks", "2", "--timeout", "0"], ["timeout=0.0 must be a positive number"]),
])
def test_bad_input_is_one_line_that_names_it_and_leaves_nothing(tmp_path: Path, capsys, arguments, words):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "short").write_bytes(b"0123456789")
    out = [] if "--resume" in arguments else ["--out", str(tmp_path / "run")]
    line = bad_input(capsys, "train", "--config", "tiny", "--device", "cpu", *out, *(a.format(tmp=tmp_path) for a in arguments))
    assert all(word in line for word in words), line
    assert not (tmp_path / "run").exists()


def test_an_existing_run_is_not_overwritten(finished, capsys):
    text, folder = finished
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    line = bad_input(capsys, "train", *TINY, "--data", str(text), "--out", str(folder), "--steps", "2")
    assert "out=" in line and "already holds a run" in line and "--resume" in line
    assert before == {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_without_out_each_run_gets_a_new_folder(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = write_text(tmp_path)
    for number in (1, 2):
        _, document, _ = run_json(capsys, "train", *TINY, "--data", str(text), "--steps", "1")
        assert document["out"] == f"out/train-{number}"


def test_resume_refuses_what_would_change_the_run(finished, tmp_path: Path, capsys):
    _, folder = finished
    resume = ["train", "--resume", str(folder), "--device", "cpu"]
    assert "seed=7 must be 0" in bad_input(capsys, *resume, "--seed", "7")
    assert "config='small' must be 'tiny'" in bad_input(capsys, *resume, "--config", "small")
    assert "steps=3 must be at least the 4 steps" in bad_input(capsys, *resume, "--steps", "3")
    assert "out=" in bad_input(capsys, *resume, "--out", str(tmp_path / "elsewhere"))
    (tmp_path / "other.txt").write_text("other text " * 100)
    line = bad_input(capsys, *resume, "--data", str(tmp_path / "other.txt"))
    assert "data=" in line and "the checkpoint was trained on" in line
    assert losses(folder) == losses(folder) and len(losses(folder)) == 4


def test_resume_refuses_a_damaged_checkpoint(finished, tmp_path: Path, capsys):
    _, folder = finished
    shutil.copytree(folder, tmp_path / "run")
    newest = list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    file = next(newest.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    line = bad_input(capsys, "train", "--resume", str(tmp_path / "run"), "--device", "cpu")
    assert "is corrupt" in line and file.name in line and "SHA-256" in line


def _wait_for_steps(folder: Path, count: int, process) -> None:
    deadline = time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists() or len((folder / "metrics.jsonl").read_text().splitlines()) < count:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)


def test_ctrl_c_leaves_a_checkpoint_and_the_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, capsys):
    text = write_text(tmp_path)
    # a warm-up longer than the run: the learning rate then does not depend on --steps, and the long run can be compared with a short one
    common = ["train", *TINY, "--data", str(text), "--warmup-steps", "1000000", "--learning-rate", "1000", "--eval-every", "1000000"]
    process = start([*common, "--out", str(tmp_path / "stopped"), "--steps", "100000", "--json"])
    _wait_for_steps(tmp_path / "stopped", 3, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, (out, err)
    done = len(losses(tmp_path / "stopped"))
    assert f"stopped after step {done} of 100000; continue with: mok train --resume" in err
    document = json.loads(out.splitlines()[-1])
    assert document["finished"] is False and document["step"] == done
    assert list_checkpoints(tmp_path / "stopped" / "checkpoints")[-1].name == f"step-{done:08d}"
    assert not [p for p in tmp_path.rglob("*") if "partial" in p.name]

    assert main(["train", "--resume", str(tmp_path / "stopped"), "--steps", str(done + 2), "--device", "cpu", "--sample-bytes", "0"]) == 0
    assert main([*common, "--out", str(tmp_path / "whole"), "--steps", str(done + 2)]) == 0
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
    assert len(set(losses(tmp_path / "whole"))) == done + 2


def test_a_diverged_run_and_a_full_disk_are_one_line_and_status_1(finished, tmp_path: Path, capsys, monkeypatch):
    text, _ = finished
    common = ["train", *TINY, "--data", str(text), "--steps", "3", "--warmup-steps", "0"]
    assert main([*common, "--out", str(tmp_path / "diverged"), "--learning-rate", "1e30"]) == 1
    line = capsys.readouterr().err.splitlines()
    assert len(line) == 1 and line[0].startswith("mok train: failed: the loss is") and "at step 2" in line[0]

    def full(*args):
        raise OSError(28, "No space left on device")

    def large(*args):
        return torch.empty(2**55)

    def wrong(*args):
        raise RuntimeError("a fault of this program")

    monkeypatch.setattr("mok.lm.trainer.save_checkpoint", large)
    assert main([*common, "--out", str(tmp_path / "large")]) == 1
    line = capsys.readouterr().err.splitlines()
    assert len(line) == 1 and line[0].startswith("mok train: failed: not enough memory: ")
    monkeypatch.setattr("mok.lm.trainer.save_checkpoint", wrong)
    with pytest.raises(RuntimeError, match="a fault of this program"):
        main([*common, "--out", str(tmp_path / "wrong")])
    monkeypatch.setattr("mok.lm.trainer.save_checkpoint", full)
    assert main([*common, "--out", str(tmp_path / "full")]) == 1
    assert "No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_closed_pipe_is_named_in_one_line(tmp_path: Path, ranks):
    text = write_text(tmp_path)
    process = start(["train", *TINY, "--ranks", ranks, "--data", str(text), "--out", str(tmp_path / "run"), "--steps", "100000"])
    assert process.stdout.readline().startswith("text: ")
    process.stdout.close()                               # as `head -1` does
    err = process.stderr.read()
    assert process.wait(60) == 1
    said = [line for line in err.splitlines() if not line.startswith("mok train: failed: rank 0 (pid")]
    assert said == ["mok train: failed: the pipe that standard output goes to was closed by its reader"], err


@pytest.mark.parametrize("ranks", ["1", "2"])
@pytest.mark.parametrize("gap", [0.0, 0.03])
def test_two_interrupts_one_after_the_other_end_the_run_as_interrupted(tmp_path: Path, ranks, gap):
    """Without a gap the two may arrive as one, which leaves a checkpoint; status 130 either way, whatever each rank was doing."""
    text = write_text(tmp_path)
    process = start(["train", *TINY, "--ranks", ranks, "--data", str(text), "--out", str(tmp_path / "run"), "--steps", "100000"])
    _wait_for_steps(tmp_path / "run", 3, process)
    process.send_signal(signal.SIGINT)
    time.sleep(gap)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == "mok train: interrupted" or "continue with: mok train --resume" in err
    assert "failed" not in err and "Traceback" not in err


def test_an_interrupt_that_a_library_wraps_is_one_all_the_same():
    with pytest.raises(KeyboardInterrupt), train.stop_on_signal(announce=False) as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop()
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise RuntimeError("cannot save") from None
    with pytest.raises(RuntimeError), train.stop_on_signal(announce=False):
        signal.raise_signal(signal.SIGINT)
        raise RuntimeError("a failure of its own")


class _Ended:
    """A rank's process as `_report` sees it."""

    def __init__(self, exitcode: int) -> None:
        self.exitcode, self.pid = exitcode, 7


LOST = Outcome(1, "mok train: failed: rank 1: lost rank 0", peer_failed=True)
STOPPED, FULL = Outcome(130, "mok train: interrupted"), Outcome(1, "mok train: failed: No space left on device")


@pytest.mark.parametrize(("said", "interrupted", "status", "lines"), [
    ([STOPPED, LOST], True, 130, ["mok train: interrupted"]),                     # rank 0 went at once, and rank 1 lost it
    ([LOST, STOPPED], True, 130, ["mok train: interrupted"]),
    ([None, LOST], True, 130, ["mok train: interrupted"]),                        # rank 0 had no handler yet: SIGTERM itself
    ([Outcome(130), Outcome(130)], True, 130, []),                                # both left a checkpoint and said so
    ([STOPPED, FULL], True, 1, ["mok train: interrupted", FULL.line]),            # a failure of its own is one all the same
    ([FULL, LOST], False, 1, [FULL.line]),                                        # the cause is said, not what follows from it
    ([LOST, LOST], True, 1, [LOST.line]),                                         # nobody was ended by the signal
])
def test_what_ranks_say_becomes_one_exit_status(said, interrupted, status, lines, capsys):
    processes = [_Ended(-signal.SIGTERM if outcome is None else outcome.status) for outcome in said]
    assert _report("train", processes, said, interrupted) == status
    assert capsys.readouterr().err.splitlines() == lines


def _on_terminal(arguments: list[str]) -> str:
    """What `mok ARGUMENTS` writes to a terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(PYTHONPATH=str(ROOT), TERM="xterm", COLUMNS="200")
        os.execv(sys.executable, [sys.executable, "-m", "mok", *arguments])
    written = b""
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:                                # Linux's end of file on a terminal
            break
        if not part:
            break
        written += part
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, written.decode()
    return written.decode()


def test_progress_bar_on_a_terminal_and_plain_lines_elsewhere(tmp_path: Path, capsys):
    text = write_text(tmp_path)
    common = ["train", *TINY, "--data", str(text), "--steps", "30"]
    shown = _on_terminal([*common, "--out", str(tmp_path / "a")])
    bars = re.findall(r"training.*?(\d+)/30.*?loss [\d.]+  [\d,]+ tokens/s  load balance [\d.]+", shown)
    assert bars and "\x1b[" in shown
    assert main([*common, "--out", str(tmp_path / "b")]) == 0
    plain = capsys.readouterr().out
    assert "\x1b" not in plain and "\r" not in plain
    assert len(re.findall(r"^step \d+/30  loss [\d.]+", plain, re.M)) >= 20


def test_documented_defaults_are_the_settings_own():
    defaults = {field.name: field.default for field in fields(TrainSettings)}
    assert {**train._DEFAULTS, "precision": defaults["precision"]} == defaults
    assert set(train._SETTINGS) == set(defaults)


def test_an_interrupted_command_ends_without_destructors(monkeypatch):
    """A thread of a library's that is at work when it is destroyed would abort the process; other statuses end it as usual."""
    import mok.cli.main as cli

    ends: list[tuple[str, int]] = []

    def leave(status):
        ends.append(("at once", status))
        raise SystemExit(-1)

    monkeypatch.setattr(cli.os, "_exit", leave)
    for status, expected in ((130, ("at once", 130)), (0, ("as usual", 0)), (1, ("as usual", 1))):
        monkeypatch.setattr(cli, "main", lambda status=status: status)
        with pytest.raises(SystemExit) as end:
            cli.command()
        assert (ends.pop() if ends else ("as usual", end.value.code)) == expected


def test_a_stopped_longer_run_says_how_to_continue_it(finished, tmp_path: Path, monkeypatch, capsys):
    """The run's own settings keep its first number of steps, which the longer run has passed."""
    text, folder = finished
    shutil.copytree(folder, tmp_path / "run")
    stop = {"after": 2}

    @contextmanager
    def stopping(announce=True):
        def seen():
            stop["after"] -= 1
            return stop["after"] < 0
        yield seen

    monkeypatch.setattr(train, "stop_on_signal", stopping)
    assert main(["train", "--resume", str(tmp_path / "run"), "--data", str(text), "--steps", "30"]) == 130
    advice = capsys.readouterr().err.splitlines()[-1].split("mok train --resume ")[1]
    assert advice == f"{tmp_path / 'run'} --steps 30"
    stop["after"] = 10**6
    assert main(["train", "--resume", *advice.split(), "--data", str(text)]) == 0
