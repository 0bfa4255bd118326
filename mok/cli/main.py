"""The command line: one parser, one sub-command a file, and what an error becomes."""
from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from . import audit, bench, export_model, import_model, info, train, verify
from .console import CommandFailed, Outcome, Output, PeerFailed, leave_standard_output

_COMMANDS = {"train": train, "verify": verify, "bench": bench, "audit": audit, "export": export_model, "import": import_model, "info": info}
FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130
_LONGEST_LINE = 800              # characters of an error: what a user gave may be much longer


class _Parser(argparse.ArgumentParser):
    """argparse, but a wrong argument is one line on stderr."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: error: {_one_line(message)} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of `mok`, with one sub-parser for each command."""
    parser = _Parser(prog="mok", description="Mixture-of-Kittens: train, check and measure a mixture-of-experts layer on this machine.",
                     epilog="Exit status: 0 success, 1 a check or a run failed, 2 bad input, 130 interrupted.")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name, module in _COMMANDS.items():
        sub = commands.add_parser(name, help=module.HELP, description=module.DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
        module.add_arguments(sub)
        sub.add_argument("--json", action="store_true", help="print one JSON document as the last line of standard output")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 success, 1 failure, 2 bad input, 130 interrupted."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.version:
        from .. import __version__

        print(f"mok {__version__}")
        return 0
    if arguments.command is None:
        parser.error(f"a command is needed: {', '.join(_COMMANDS)}")
    outcome = run_command(arguments)
    if outcome.line:
        print(outcome.line, file=sys.stderr)
    return outcome.status


def command() -> NoReturn:
    """`mok` and `python -m mok`: `main` of the command line, then the end of the process.

    An interrupted one ends without C++'s destructors: a library may have been in the middle of anything, and one that is destroyed with a thread at work aborts
    (seen once: "terminate called without an active exception", status -6 in place of 130).
    """
    status = main()
    if status == INTERRUPTED:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)
    sys.exit(status)


def run_command(arguments: argparse.Namespace) -> Outcome:
    """Run the command that `arguments` were parsed for; every expected failure becomes a line and an exit status."""
    prefix = f"mok {arguments.command}"
    try:
        status = _COMMANDS[arguments.command].run(arguments, Output(arguments.json))
        sys.stdout.flush()
        return Outcome(status)
    except (ValueError, NotImplementedError) as error:
        return Outcome(BAD_INPUT, f"{prefix}: error: {_one_line(str(error))}")
    except BrokenPipeError:
        leave_standard_output()
        return Outcome(FAILED, f"{prefix}: failed: the pipe that standard output goes to was closed by its reader")
    except (FloatingPointError, OSError, CommandFailed) as error:          # a diverged run; a full disk; a lost rank
        return Outcome(FAILED, f"{prefix}: failed: {_one_line(str(error))}", isinstance(error, PeerFailed))
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        return Outcome(FAILED, f"{prefix}: failed: not enough memory: {_one_line(str(error))}")
    except KeyboardInterrupt:
        return Outcome(INTERRUPTED, f"{prefix}: interrupted")


def _out_of_memory(error: BaseException) -> bool:
    """Whether it is what Python, or torch on a CPU or a GPU, raises where memory is short; on a CPU torch has no exception of its own for that."""
    import torch

    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}..."
