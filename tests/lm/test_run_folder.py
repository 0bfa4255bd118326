"""Run folders: never overwritten, and metrics that survive being killed."""
from __future__ import annotations

from pathlib import Path

import pytest

from mok.lm.run_folder import METRICS_FILE, RunFolder, free_folder


def test_an_existing_run_or_any_file_is_refused(tmp_path: Path):
    RunFolder.create(tmp_path / "run", {"a": 1})
    with pytest.raises(ValueError, match=r"out=.*already holds a run.*--resume"):
        RunFolder.create(tmp_path / "run", {"a": 2})
    assert RunFolder.open(tmp_path / "run").settings() == {"a": 1}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match=r"out=.*already holds 1 file"):
        RunFolder.create(tmp_path / "other", {})
    with pytest.raises(ValueError, match=r"out=.*is a file"):
        RunFolder.create(tmp_path / "other" / "thesis.txt", {})
    assert [p.name for p in (tmp_path / "other").iterdir()] == ["thesis.txt"]


def test_an_empty_folder_is_fine(tmp_path: Path):
    (tmp_path / "run").mkdir()
    assert RunFolder.create(tmp_path / "run", {"a": 1}).settings() == {"a": 1}


def test_opening_what_is_no_run_names_resume(tmp_path: Path):
    with pytest.raises(ValueError, match=r"resume=.*must be the folder of a run"):
        RunFolder.open(tmp_path)
    run = RunFolder.create(tmp_path / "run", {})
    with pytest.raises(ValueError, match=r"resume=.*at least one checkpoint, found 0"):
        run.latest_checkpoint()
    (run.path / "settings.json").write_text("[1")
    with pytest.raises(ValueError, match=r"resume=.*corrupt"):
        run.settings()


def test_truncated_metrics_drop_later_steps_and_a_cut_line(tmp_path: Path):
    run = RunFolder.create(tmp_path / "run", {})
    for step in (1, 2, 3):
        run.append_metrics({"step": step, "loss": 0.1 * step})
    run.append_metrics({"step": 3, "validation_loss": 2.0})
    with (run.path / METRICS_FILE).open("a") as file:
        file.write('{"step": 4, "lo')                           # the process was killed here
    assert [entry["step"] for entry in run.read_metrics()] == [1, 2, 3, 3]
    run.truncate_metrics(2)
    assert run.read_metrics() == [{"step": 1, "loss": 0.1}, {"step": 2, "loss": 0.2}]
    assert run.metrics.read_text().endswith("\n")


def test_free_folder_is_the_first_unused_number(tmp_path: Path):
    (tmp_path / "train-1").mkdir()
    (tmp_path / "train-3").mkdir()
    assert free_folder(tmp_path, "train") == tmp_path / "train-2"
