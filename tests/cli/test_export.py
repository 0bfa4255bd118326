"""`mok export` and `mok import`: a run's weights out and in again to the bit, at two ranks too, and what they refuse."""
from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from support import TINY, bad_input, run_json, write_text

from mok.cli.main import main
from mok.lm.run_folder import RunFolder
from mok.lm.state import load_model


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Folder of text.py and run/, a run of three steps."""
    folder = tmp_path_factory.mktemp("export")
    assert main(["train", *TINY, "--data", str(write_text(folder)), "--out", str(folder / "run"), "--steps", "3"]) == 0
    return folder


def test_a_run_goes_out_and_in_to_the_bit_and_trains_on(run, tmp_path, capsys):
    status, document, _ = run_json(capsys, "export", str(run / "run"), str(tmp_path / "exported"))
    assert status == 0 and document["parameters"] == 41376 and document["checkpoint"].endswith("step-00000003")
    status, document, lines = run_json(capsys, "import", str(tmp_path / "exported"), str(tmp_path / "tuned"), "--data", str(run / "text.py"), "--steps", "2",
                                       "--precision", "fp32", "--batch-size", "4", "--eval-tokens", "256", "--learning-rate", "0.001")
    assert status == 0 and document["config"] == "tiny" and any("mok train --resume" in line for line in lines)
    assert document["settings"]["steps"] == 2 and document["settings"]["learning_rate"] == 0.001
    before, after = (load_model(RunFolder.open(path).latest_checkpoint()).state_dict() for path in (run / "run", tmp_path / "tuned"))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    validation = [entry["validation_loss"] for entry in RunFolder.open(run / "run").read_metrics() if "validation_loss" in entry][-1]
    status, document, _ = run_json(capsys, "train", "--resume", str(tmp_path / "tuned"), "--ranks", "1", "--device", "cpu", "--sample-bytes", "0")
    assert status == 0 and document["step"] == 2
    assert abs(document["validation_loss"] - validation) < 0.1              # it goes on from there


def test_bad_input(run, tmp_path, capsys):
    assert "resume=" in bad_input(capsys, "export", str(tmp_path), str(tmp_path / "out"))
    assert main(["export", str(run / "run"), str(tmp_path / "exported")]) == 0
    capsys.readouterr()
    assert "exists and is not overwritten" in bad_input(capsys, "export", str(run / "run"), str(tmp_path / "exported"))
    assert "must hold a model with its config.json" in bad_input(capsys, "import", str(tmp_path), str(tmp_path / "tuned"))
    assert "out=" in bad_input(capsys, "import", str(tmp_path / "exported"), str(run / "run"))
    shutil.copytree(tmp_path / "exported", tmp_path / "cut")
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    assert "is corrupt" in bad_input(capsys, "import", str(tmp_path / "cut"), str(tmp_path / "tuned"), "--data", str(run / "text.py"))
    assert not (tmp_path / "tuned").exists()
