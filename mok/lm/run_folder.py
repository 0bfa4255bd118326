"""The folder of one training run: settings, metrics line by line, checkpoints; never overwrites another run."""
from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..arguments import check_path
from .checkpoint import list_checkpoints, write_atomically

SETTINGS_FILE = "settings.json"
METRICS_FILE = "metrics.jsonl"
PICTURE_FILE = "training.png"
SAMPLE_FILE = "sample.txt"
CHECKPOINT_FOLDER = "checkpoints"


class RunFolder:
    """Paths and files of one run. Made by `create` (a new run) or `open` (an existing one)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / METRICS_FILE
        self.picture = path / PICTURE_FILE
        self.sample = path / SAMPLE_FILE
        self.checkpoints = path / CHECKPOINT_FOLDER

    @staticmethod
    def check_free(path: Path) -> None:
        """Raise ValueError naming `out` unless `path` does not exist or is an empty folder."""
        check_path("out", path)
        if path.exists() and not path.is_dir():
            raise ValueError(f"out={str(path)!r} is a file and must be a new folder")
        if path.exists() and (entries := sorted(os.listdir(path))):
            what = "a run" if SETTINGS_FILE in entries else f"{len(entries)} file(s)"
            raise ValueError(f"out={str(path)!r} already holds {what} and is not overwritten; continue a run with --resume, or name a new folder")

    @staticmethod
    def create(path: Path, settings: dict[str, Any]) -> RunFolder:
        """A new run's folder with its settings. ValueError naming `out` where something is there already or nothing can be written."""
        RunFolder.check_free(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            write_atomically(path / SETTINGS_FILE, json.dumps(settings, indent=1) + "\n")
        except OSError as error:
            raise ValueError(f"out={str(path)!r} cannot be written: {error.strerror}") from None
        return RunFolder(path)

    @staticmethod
    def open(path: Path) -> RunFolder:
        """An existing run's folder. ValueError naming `resume` where there is none."""
        check_path("resume", path)
        if not (path / SETTINGS_FILE).is_file():
            raise ValueError(f"resume={str(path)!r} must be the folder of a run, found no {SETTINGS_FILE} in it")
        return RunFolder(path)

    def settings(self) -> dict[str, Any]:
        """What `create` wrote. ValueError naming `resume` for a damaged file."""
        try:
            settings = json.loads((self.path / SETTINGS_FILE).read_text())
            if isinstance(settings, dict):
                return settings
        except (OSError, ValueError):
            pass
        raise ValueError(f"resume={str(self.path)!r} is corrupt: {SETTINGS_FILE} is not a JSON object")

    def latest_checkpoint(self) -> Path:
        """The newest complete checkpoint. ValueError naming `resume` where there is none."""
        found = list_checkpoints(self.checkpoints)
        if not found:
            raise ValueError(f"resume={str(self.path)!r} must hold at least one checkpoint, found 0")
        return found[-1]

    def append_metrics(self, entry: dict[str, Any]) -> None:
        """Add one line. It is written in one call, so a killed process leaves whole lines (or a last one that `truncate_metrics` drops)."""
        with self.metrics.open("ab", buffering=0) as file:
            file.write(json.dumps(entry).encode() + b"\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """All whole lines, oldest first."""
        entries = []
        for line in self.metrics.read_text().splitlines() if self.metrics.exists() else []:
            try:
                entries.append(json.loads(line))
            except ValueError:
                continue
        return entries

    def truncate_metrics(self, step: int) -> None:
        """Drop lines of steps after `step`: a resumed run writes them again."""
        if self.metrics.exists():
            kept = [entry for entry in self.read_metrics() if entry["step"] <= step]
            write_atomically(self.metrics, "".join(json.dumps(entry) + "\n" for entry in kept))


def free_folder(parent: Path, prefix: str) -> Path:
    """The first of parent/prefix-1, parent/prefix-2, ... that does not exist."""
    number = 1
    while (parent / f"{prefix}-{number}").exists():
        number += 1
    return parent / f"{prefix}-{number}"
