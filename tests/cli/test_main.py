"""The command line as a whole: help, unknown commands, and what importing it costs."""
from __future__ import annotations

import subprocess
import sys

import pytest
from support import ROOT, bad_input

from mok.cli.main import _COMMANDS, main


@pytest.mark.parametrize("command", [None, *_COMMANDS])
def test_help_explains_every_option(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"] if command is None else [command, "--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    if command is None:
        assert all(name in text for name in _COMMANDS)
        return
    assert f"mok {command}" in text and "--json" in text
    options = [line for line in text.split("options:")[1].splitlines() if line.strip().startswith("-")]
    following = text.split("options:")[1]
    for option in options:
        name = option.strip().split()[0]
        rest = following.split(option, 1)[1].splitlines()
        assert len(option.split()) > 2 or rest[1].strip(), f"{name} has no explanation"


def test_no_command_and_a_wrong_one_are_refused_in_one_line(capsys):
    assert "a command is needed: train, verify" in bad_input(capsys)
    assert "'trian'" in bad_input(capsys, "trian")


def test_importing_mok_and_asking_for_help_load_neither_triton_nor_matplotlib():
    code = ("import sys, mok, mok.cli.main\n"
            "try:\n    mok.cli.main.main(['train', '--help'])\nexcept SystemExit:\n    pass\n"
            "print([m for m in ('triton', 'matplotlib', 'torch.distributed.checkpoint') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr
