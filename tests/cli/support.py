"""Running the command line in tests: in this process where that is enough, else in a process of its own."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mok.cli.main import main

ROOT = Path(__file__).parents[2]
TINY = ("--ranks", "1", "--config", "tiny", "--device", "cpu", "--precision", "fp32", "--batch-size", "4", "--eval-tokens", "256", "--sample-bytes", "12")


def write_text(folder: Path) -> Path:
    """A file of real code, long enough for the tiny model."""
    file = folder / "text.py"
    file.write_bytes((ROOT / "mok" / "lm" / "data.py").read_bytes())
    return file


def run_json(capsys, *arguments: str) -> tuple[int, dict[str, Any], list[str]]:
    """(exit status, the JSON of the last line, the lines before it) of `mok ARGUMENTS --json` in this process."""
    status = main([*arguments, "--json"])
    lines = capsys.readouterr().out.splitlines()
    return status, json.loads(lines[-1]), lines[:-1]


def start(arguments: Sequence[str]) -> subprocess.Popen[str]:
    """`python -m mok ARGUMENTS` as a process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-m", "mok", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def bad_input(capsys, *arguments: str) -> str:
    """The one line that `mok ARGUMENTS` prints on stderr when it refuses its input with status 2."""
    try:
        status = main(list(arguments))
    except SystemExit as stop:                        # argparse's way out
        status = stop.code
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert status == 2, (status, captured)
    assert len(lines) == 1 and lines[0].startswith("mok"), captured.err
    return lines[0]
