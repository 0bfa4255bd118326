"""Misuse of every command-line option, one table: exit status 2, one line on stderr that names the option, and nothing written."""
from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

import pytest
from support import TINY, bad_input, write_text

from mok.cli.main import _COMMANDS, build_parser, main

LONG = "9" * 40                                  # more digits than any integer of the machine
TOO_LONG = "x" * 5000                            # no file has such a name
COUNTS = ("a", "", "1.5", "nan", "inf", "-1", "0", LONG)
FROM_ZERO = ("a", "", "1.5", "nan", "inf", "-1")
NUMBERS = ("a", "", "nan", "inf", "-1", "1e400")
SECONDS = ("a", "", "nan", "inf", "-1", "0", "1e300")
PATHS = ("", TOO_LONG)
DEVICES = ("", "quantum", "cuda:a", "cuda:-1", "cuda:999", "cuda:" + LONG, "meta", "mps", "cpu:1", TOO_LONG)
SIZES = ("", "a", "1,2,3", "1,2,3,4,5,6", "0,1,1,1,1", "-1,1,1,1,1", "1.5,1,1,1,1", "1,1,1,2,3", "nan,1,1,1,1", f"{LONG},1,1,1,1", "²,1,1,1,1",
         "2147483647,2147483647,2147483647,8,2")

# settings of a run, for `mok train` and `mok import` alike
SETTINGS = {
    "--config": ("", "huge"), "--steps": COUNTS, "--seed": (*FROM_ZERO, LONG), "--precision": ("", "fp64", "int4"), "--moe-impl": ("", "magic"),
    "--batch-size": COUNTS, "--accumulate": (*COUNTS, "3"), "--learning-rate": (*NUMBERS, "0"), "--warmup-steps": (*FROM_ZERO, LONG), "--weight-decay": NUMBERS,
    "--grad-clip": (*NUMBERS, "0"), "--eval-every": COUNTS, "--save-every": (*FROM_ZERO, LONG), "--eval-tokens": COUNTS,
}
DATA = (*PATHS, "{tmp}/loop", "{tmp}/loop/below", "{tmp}/none", "{tmp}/empty", "{tmp}/bytes", "{tmp}/folder", "{tmp}/pipe", "/dev/zero", "/dev/null",
        "/dev/tty", "{tmp}/text/below")
# command -> option (or positional) -> (values, the other arguments)
OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "train": {**SETTINGS, "--data": DATA, "--out": (*PATHS, "{tmp}/loop", "{tmp}/text", "{tmp}/text/below", "{tmp}", "/dev/zero"),
              "--device": DEVICES,
              "--resume": (*PATHS, "{tmp}/loop", "{tmp}/none", "{tmp}/folder", "{tmp}/text", "/dev/zero"),
              "--audit": (*PATHS, "{tmp}/loop", "{tmp}/loop/below", "{tmp}/text", "{tmp}/none/record", "{tmp}/folder", "/dev/zero"),
              "--ranks": (*COUNTS, "5"), "--timeout": SECONDS,
              "--sample-bytes": (*FROM_ZERO, LONG)},
    "verify": {"--device": DEVICES, "--compile-only": ("", "sm_12", TOO_LONG),
               "--ranks": ("", "a", "0", "-1", "1.5", "nan", "1,", ",", "2,2,a", LONG, "4096")},
    "bench": {"--device": DEVICES, "--shape": ("", "huge", *SIZES), "--thiek": SIZES, "--pass": ("", "sideways"), "--block-ms": (*NUMBERS, "0", "1e300"),
              "--breakdown": (None,)},
    "audit": {"action": ("", "explain"), "files": (*PATHS, "{tmp}/loop", "{tmp}/none", "{tmp}/empty", "{tmp}/text", "{tmp}/folder", "/dev/zero", "/dev/null"),
              "--data": DATA, "--steps": (*FROM_ZERO, LONG), "--timeout": SECONDS, "--anyway": (None,)},
    "export": {"run": (*PATHS, "{tmp}/none", "{tmp}/folder", "{tmp}/text", "/dev/zero"),
               "out": (*PATHS, "{tmp}/loop", "{tmp}/folder", "{tmp}/text", "{tmp}/text/below")},
    "import": {**{name: values for name, values in SETTINGS.items() if name not in ("--config", "--moe-impl")},
               "folder": (*PATHS, "{tmp}/none", "{tmp}/folder", "{tmp}/text", "/dev/zero"), "out": (*PATHS, "{tmp}/folder/", "{tmp}/text"), "--data": DATA},
    "info": {},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder of good and bad files: text, exported/, run/, record; empty, bytes (no text), folder/ with one unreadable thing in it, pipe."""
    folder = tmp_path_factory.mktemp("misuse")
    write_text(folder).rename(folder / "text")
    (folder / "empty").write_bytes(b"")
    (folder / "bytes").write_bytes(b"text\0" * 1000)
    (folder / "folder").mkdir()
    os.mkfifo(folder / "folder" / "pipe")
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to(folder / "loop")
    run = [*TINY, "--data", str(folder / "text"), "--steps", "1", "--sample-bytes", "0"]
    assert main(["train", *run, "--out", str(folder / "run"), "--audit", str(folder / "record")]) == 0
    assert main(["export", str(folder / "run"), str(folder / "exported")]) == 0
    return folder


def command_line(command: str, option: str, value: str | None, tmp: Path, new: Path) -> list[str]:
    """A command that is right but for one option or positional argument."""
    right: dict[str, list[str]] = {
        "train": [*TINY, "--steps", "1", "--data", str(tmp / "text"), "--out", str(new / "made")], "verify": ["--device", "cpu"],
        "bench": ["--device", "cpu", "--thiek", "8,8,8,2,1"], "info": [],
        "import": ["--data", str(tmp / "text")],
    }
    positional = {"audit": {"action": "replay", "files": str(tmp / "record")}, "export": {"run": str(tmp / "run"), "out": str(new / "made")},
                  "import": {"folder": str(tmp / "exported"), "out": str(new / "made")}}.get(command, {})
    given = list(right.get(command, []))
    if option == "--resume":
        given = ["--device", "cpu"]
    if option == "--anyway":                              # belongs to replay
        positional = {**positional, "action": "show"}
    if option == "--compile-only":
        given = []
    text = None if value is None else value.format(tmp=tmp)
    if option in positional:
        return [command, *({**positional, option: text}.values()), *given]
    if option in given:                                   # replaced, not said twice
        at = given.index(option)
        del given[at:at + 2]
    return [command, *positional.values(), *given, *([option] if text is None else [f"{option}={text}"])]


ROWS = [(command, option, value) for command, options in OPTIONS.items() for option, values in options.items() for value in values]
# Python's words for an option, beside its own
NAMES = {"files": "record", "run": "resume", "--shape": "shape", "--thiek": "thiek"}


@pytest.mark.parametrize(("command", "option", "value"), ROWS, ids=[f"{c}-{o}-{i}" for i, (c, o, v) in enumerate(ROWS)])
def test_bad_value_is_one_line_that_names_the_option(command, option, value, made, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = bad_input(capsys, *command_line(command, option, value, made, tmp_path))
    name = option.lstrip("-")
    assert re.search(rf"(--{name}|\b{re.escape(name.replace('-', '_'))}|\b{NAMES.get(option, name)})(?![A-Za-z0-9])", line), line
    assert len(line) < 1000 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", list(_COMMANDS))
def test_every_option_is_in_the_table(command):
    parser = build_parser()
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    known = {action.option_strings[0] if action.option_strings else action.dest for action in commands.choices[command]._actions}
    assert known - {"-h", "--json"} == set(OPTIONS[command])


@pytest.mark.parametrize("command", list(_COMMANDS))
def test_json_and_unknown_options_take_nothing(command, capsys):
    assert "--json" in bad_input(capsys, command, "--json=yes")
    assert "--nonsense" in bad_input(capsys, *command_line(command, "--nonsense", "1", Path("/"), Path("/")))
