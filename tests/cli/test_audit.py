"""`mok audit` and `mok train --audit`: what they print, their JSON, and the exit status of every verdict."""
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT, TINY, bad_input, run_json, write_text

from mok import fingerprint
from mok.audit import read_record
from mok.audit_diff import compare
from mok.cli.main import main
from mok.lm import audit as lm_audit
from tests.forged import forge

STEPS = 4


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """Folder of text.py, run/ and the record `record` of a finished run; tests copy what they change."""
    folder = tmp_path_factory.mktemp("audit")
    text = write_text(folder)
    assert main(["train", *TINY, "--data", str(text), "--out", str(folder / "run"), "--steps", str(STEPS), "--audit", str(folder / "record")]) == 0
    return folder


def edited(recorded: Path, tmp_path: Path, line: int, old: bytes, new: bytes) -> Path:
    lines = (recorded / "record").read_bytes().splitlines(keepends=True)
    assert old in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new, 1)
    (tmp_path / "edited").write_bytes(b"".join(lines))
    return tmp_path / "edited"


def test_train_says_where_the_record_is_and_its_hash(recorded, tmp_path, capsys):
    status, document, lines = run_json(capsys, "train", *TINY, "--data", str(recorded / "text.py"), "--out", str(tmp_path / "run"), "--steps", "1",
                                       "--audit", str(tmp_path / "record"))
    record = read_record(tmp_path / "record")
    assert status == 0 and document["audit"] == {"file": str(tmp_path / "record"), "hash": record.last_hash}
    assert any(record.last_hash in line and "mok audit replay" in line for line in lines)
    assert len(record.steps) == 2 and record.end["finished"]
    assert record.header["configuration"]["data"] == str(recorded / "text.py")


def test_show_an_intact_record(recorded, capsys):
    status, document, lines = run_json(capsys, "audit", "show", str(recorded / "record"))
    assert status == 0 and document["result"] == "intact" and document["steps"] == STEPS and document["finished"]
    assert document["hash"] == read_record(recorded / "record").last_hash and document["configuration"]["settings"]["steps"] == STEPS
    assert any(f"intact: {STEPS} steps of {STEPS}, finished" in line for line in lines)


def test_replay_confirms_an_honest_record(recorded, capsys):
    status, document, lines = run_json(capsys, "audit", "replay", str(recorded / "record"))
    assert status == 0 and document["result"] == "confirmed" and document["steps"] == document["recorded_steps"] == STEPS
    assert lines[-1] == f"CONFIRMED: {STEPS} of {STEPS} steps, every digest equal"
    status, document, _ = run_json(capsys, "audit", "replay", str(recorded / "record"), "--steps", "2")
    assert status == 0 and document["steps"] == 2 and document["recorded_steps"] == STEPS


@pytest.mark.parametrize("action", ["show", "replay", "diff"])
def test_an_edited_record_is_refused_and_the_line_named(recorded, tmp_path, capsys, action):
    file = edited(recorded, tmp_path, 4, b'"loss":', b'"loss":1')
    files = [str(file)] if action != "diff" else [str(recorded / "record"), str(file)]
    status, document, lines = run_json(capsys, "audit", action, *files)
    assert status == 1 and document["result"] == "not intact" and "line 4 (step 2)" in document["detail"]
    assert lines == [f"NOT INTACT: {document['detail']}"]


def test_a_cut_record_is_refused(recorded, tmp_path, capsys):
    lines = (recorded / "record").read_bytes().splitlines(keepends=True)
    (tmp_path / "cut").write_bytes(b"".join(lines[:-2]))
    status, document, _ = run_json(capsys, "audit", "show", str(tmp_path / "cut"))
    assert status == 1 and f"ends after step {STEPS - 1}" in document["detail"]


def test_replay_refutes_a_record_of_another_run(recorded, tmp_path, capsys, monkeypatch):
    """The record was written by a trainer with another learning rate at step 3 than its settings say."""
    from mok.lm.trainer import Trainer

    honest = Trainer.learning_rate
    monkeypatch.setattr(Trainer, "learning_rate", lambda self, step: honest(self, step) * (2 if step == 2 else 1))
    assert main(["train", *TINY, "--data", str(recorded / "text.py"), "--out", str(tmp_path / "run"), "--steps", str(STEPS),
                 "--audit", str(tmp_path / "record")]) == 0
    monkeypatch.undo()
    capsys.readouterr()
    status, document, lines = run_json(capsys, "audit", "replay", str(tmp_path / "record"))
    assert status == 1 and document["result"] == "different" and document["steps"] == 2
    assert (document["difference"]["step"], document["difference"]["entry"]) == (3, "learning_rate")
    assert document["difference"]["recorded"] == 2 * document["difference"]["replayed"]
    assert lines[-1].startswith("DIFFERENT at step 3: learning_rate: ")
    status, document, lines = run_json(capsys, "audit", "diff", str(recorded / "record"), str(tmp_path / "record"))
    assert status == 1 and (document["difference"]["step"], document["difference"]["entry"]) == (3, "learning_rate")
    assert lines[-1].startswith("DIFFERENT at step 3: learning_rate: ")

    real = fingerprint.fingerprint
    monkeypatch.setattr(lm_audit, "fingerprint", lambda device: {**real(device), "cpu": "another"})
    status, document, lines = run_json(capsys, "audit", "replay", str(tmp_path / "record"))
    assert status == 3 and document["result"] == "not comparable" and document["difference"] is None and document["steps"] == 0
    assert [line.startswith("not the same: cpu: ") for line in lines[:-1]] == [True] and "--anyway" in lines[-1]
    status, document, lines = run_json(capsys, "audit", "replay", str(tmp_path / "record"), "--anyway")
    assert status == 3 and document["difference"]["step"] == 3 and "proves nothing" in lines[-1]
    status, document, _ = run_json(capsys, "audit", "replay", str(recorded / "record"), "--anyway", "--steps", "1")
    assert status == 0 and document["result"] == "confirmed" and document["not_comparable"]


def test_diff_of_equal_and_of_unequal_records(recorded, tmp_path, capsys):
    shutil.copy(recorded / "record", tmp_path / "copy")
    status, document, lines = run_json(capsys, "audit", "diff", str(recorded / "record"), str(tmp_path / "copy"))
    assert status == 0 and document["result"] == "equal" and document["not_compared"] == 0
    assert lines == [f"EQUAL: {document['compared']} entries of {STEPS} steps"]
    assert main(["train", *TINY, "--data", str(recorded / "text.py"), "--out", str(tmp_path / "run"), "--steps", str(STEPS), "--seed", "5",
                 "--audit", str(tmp_path / "seeded")]) == 0
    capsys.readouterr()
    status, document, lines = run_json(capsys, "audit", "diff", str(recorded / "record"), str(tmp_path / "seeded"))
    assert status == 1 and document["configuration"] == ["seed: 0 against 5"] and document["difference"]["step"] == 0
    assert lines[0] == "configuration differs: seed: 0 against 5" and lines[-1].startswith("DIFFERENT at step 0: parameter/")


def test_diff_between_numbers_of_ranks_says_what_it_could_not_compare(recorded, tmp_path, capsys):
    """The second record is made from the first: two ranks that summed the dense gradients in another order, so that everything later differs."""
    def on_two_ranks(lines):
        lines[0]["configuration"]["ranks"] = 2
        for line in lines:
            for name, value in line.get("entries", {}).items():
                later = line["step"] > 1 and name not in ("input", "learning_rate")
                if later or name == "gradient/embedding" or (line["step"] == 1 and name.startswith(("parameter/", "optimizer/"))):
                    line["entries"][name] = value + 1 if isinstance(value, float) else value[:-1] + ("0" if value[-1] != "0" else "1")

    forge(recorded / "record", on_two_ranks, tmp_path / "two")
    status, document, printed = run_json(capsys, "audit", "diff", str(recorded / "record"), str(tmp_path / "two"))
    assert status == 0 and document["result"] == "equal" and document["last_step_compared"] == 1
    assert document["configuration"] == ["ranks: 1 against 2"] and document["not_compared"] > 0 and document["not_compared_but_equal"] > 0
    assert "different numbers of ranks" in printed[1] and printed[2].startswith(f"not compared: {document['not_compared']} entries")
    assert printed[-1] == f"EQUAL: {document['compared']} entries of {STEPS} steps that P3 promises"


def test_resume_continues_the_record(recorded, tmp_path, capsys):
    shutil.copytree(recorded / "run", tmp_path / "run")
    shutil.copy(recorded / "record", tmp_path / "record")
    again = ["train", "--resume", str(tmp_path / "run"), "--device", "cpu", "--sample-bytes", "0", "--steps", str(STEPS + 1)]
    status, _, _ = run_json(capsys, *again, "--audit", str(tmp_path / "record"))
    record = read_record(tmp_path / "record")
    assert status == 0 and len(record.steps) == STEPS + 2 and [line["step"] for line in record.resumes] == [STEPS]
    status, document, _ = run_json(capsys, "audit", "replay", str(tmp_path / "record"))
    assert status == 0 and document["steps"] == STEPS + 1
    shutil.rmtree(tmp_path / "run")
    shutil.copytree(recorded / "run", tmp_path / "run")
    error = bad_input(capsys, *again, "--audit", str(edited(recorded, tmp_path, 4, b'"loss":', b'"loss":1')))
    assert "line 4 (step 2)" in error
    assert "cannot be read" in bad_input(capsys, *again, "--audit", str(tmp_path / "none"))


def test_bad_input_is_one_line_and_leaves_nothing(recorded, tmp_path, capsys):
    record = str(recorded / "record")
    for arguments, message in ((["show", str(tmp_path / "none")], "cannot be read"), (["show", str(recorded / "text.py")], "must be a record"),
                               (["diff", record], "diff takes 2 FILEs, found 1"), (["show", record, record], "show takes 1 FILE, found 2"),
                               (["show", record, "--steps", "3"], "steps=3 belongs to replay"), (["replay", record, "--steps", "-3"], "steps=-3"),
                               (["replay", record, "--data", str(tmp_path / "none")], "data="), (["explain", record], "invalid choice"), ([], "required")):
        assert message in bad_input(capsys, "audit", *arguments)
    for place, message in ((record, "exists and is not overwritten"), (str(tmp_path / "none" / "record"), "existing folder")):
        error = bad_input(capsys, "train", *TINY, "--data", str(recorded / "text.py"), "--out", str(tmp_path / "run"), "--steps", "1", "--audit", place)
        assert f"audit={place!r}" in error and message in error
    assert not (tmp_path / "run").exists()


def test_a_run_on_two_ranks_is_recorded_replayed_and_compared_with_one(recorded, tmp_path):
    """Processes of their own, of one copy of the package: its code is part of the fingerprint, and somebody may be editing it."""
    shutil.copytree(ROOT / "mok", tmp_path / "package" / "mok", ignore=shutil.ignore_patterns("__pycache__"))

    def mok(*arguments: str) -> tuple[int, dict, str]:
        done = subprocess.run([sys.executable, "-m", "mok", *arguments, "--json"], capture_output=True, text=True, timeout=300,
                              env={**os.environ, "PYTHONPATH": str(tmp_path / "package")})
        return done.returncode, json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}, done.stderr

    two = tmp_path / "two"
    status, document, _ = mok("train", *TINY, "--ranks", "2", "--data", str(recorded / "text.py"), "--out", str(tmp_path / "run"), "--steps", "2",
                              "--audit", str(two))
    record = read_record(two)
    assert status == 0 and document["audit"]["hash"] == record.last_hash
    assert record.ranks_at(1) == 2 and not any("replicas differ" in step for step in record.steps)
    status, document, error = mok("audit", "replay", str(two))
    assert (status, document["result"], document["steps"], error) == (0, "confirmed", 2, "")

    one = forge(recorded / "record", lambda lines: lines.__delitem__(slice(4, -1)) or lines[-1].update(steps=2), tmp_path / "one")
    found = compare(read_record(one), record)
    layers = 2 * 3 + 2 * 2 + 2 * 2                        # routes and y, dx and d_topk_weights, expert gradients: all that step 1 computed from equal x and dy
    assert found.difference is None and found.last_step_compared >= 1 and found.compared >= len(record.steps[0]) + layers + 2 * 2

    wrong = forge(two, lambda lines: lines[0]["fingerprint"].update(cpu="another") or lines[3]["entries"].update(grad_norm=1.5), tmp_path / "wrong")
    status, document, error = mok("audit", "replay", str(wrong), "--anyway")
    assert (status, document["result"], error) == (3, "not comparable", "")
    assert document["difference"]["step"] == 2 and document["difference"]["entry"] == "grad_norm"

    # its checkpoint, continued on one rank, is the state that two ranks recorded
    assert main(["train", "--resume", str(tmp_path / "run"), "--device", "cpu", "--ranks", "1", "--steps", "3", "--sample-bytes", "0",
                 "--audit", str(two)]) == 0
    continued = read_record(two)
    assert [continued.ranks_at(step) for step in range(4)] == [2, 2, 2, 1] and continued.steps[:3] == record.steps
