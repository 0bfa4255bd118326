"""`mok verify`: check the engines of this machine against the specification, or compile the GPU kernels without a GPU."""
from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..arguments import kind_of
from .console import Output
from .device import choose_device

if TYPE_CHECKING:
    import torch

    from ..verify import Check

HELP = "check every engine of this machine against the float64 specification"
DESCRIPTION = """\
Check every engine that this machine can run. Forward and every gradient are compared with the specification in float64, block by block and
expert by expert: an error may be about twice what half an ulp of change in every input does (docs/numerics.md). Then the promises, to the bit:
P1 the same run three times, P2 another number of threads or overlap setting, P4 a token in another batch. Exit status 1 if anything fails.

  mok verify                        everything this machine has
  mok verify --device cpu           the CPU engine only
  mok verify --ranks 2,4            the layer on 2 and on 4 processes instead: the bits of one, forward and backward (P3)
  mok verify --compile-only sm_90a  compile the GPU kernels for that target and report registers, spills and shared memory; needs no GPU"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:N (default: every device of this machine)")
    parser.add_argument("--ranks", metavar="N,N", help="check the layer on so many processes of this machine against one process instead, such as 2,4")
    parser.add_argument("--compile-only", metavar="TARGET", help="compile the kernels for TARGET (sm_90a) instead of running anything")


def run(arguments: argparse.Namespace, output: Output) -> int:
    if arguments.compile_only is not None:
        return _compile_only(arguments, output)
    device = None if arguments.device is None else choose_device(arguments.device)
    if arguments.ranks is not None:
        return _verify_ranks(arguments, device, output)
    from ..verify import count_checks, find_targets, verify

    targets = find_targets(device)
    with output.bar("checking", count_checks(targets)) as bar:
        checks = verify(targets, lambda check: bar.advance(1, f"{check.engine} {check.dtype} {check.name}"))
    return _report("Engines of this machine", checks, output, {})


def _verify_ranks(arguments: argparse.Namespace, device: torch.device | None, output: Output) -> int:
    from ..verify_ranks import count_checks, verify_ranks

    if device is not None and device.type != "cpu":
        raise NotImplementedError(f"device={str(device)!r} must be cpu with ranks={arguments.ranks!r}: P3 is checked between processes on the CPU")
    ranks = _rank_numbers(arguments.ranks)
    with output.bar("checking", count_checks(ranks)) as bar:
        checks = verify_ranks(ranks, lambda check: bar.advance(1, f"{check.dtype} {check.name}"))
    return _report("Ranks of this machine", checks, output, {"ranks": ranks})


def _rank_numbers(text: str) -> list[int]:
    """The numbers in "2,4"."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and part.isascii() for part in parts):
        raise ValueError(f"ranks={kind_of(text)} must be numbers of ranks with commas between them, such as 2,4")
    return [int(part) for part in parts]


def _report(title: str, checks: list[Check], output: Output, more: dict[str, Any]) -> int:
    """Print the checks; the exit status."""
    failed = [check for check in checks if not check.passed]
    output.table(title, ("engine", "device", "dtype", "check", "result", "error", "allowed", "detail"), [_row(c) for c in checks],
                 bad=[not check.passed for check in checks])
    if any(check.error is not None for check in checks):
        output.line("error and allowed: of the worst block, relative to its RMS")
    output.line(f"{len(checks) - len(failed)} of {len(checks)} checks passed" + (f", {len(failed)} FAILED" if failed else ""))
    output.finish({"command": "verify", **more, "passed": not failed, "failed": len(failed), "checks": [asdict(check) for check in checks]})
    return 1 if failed else 0


def _row(check: Check) -> tuple[str, ...]:
    numbers = ("bitwise", "") if check.error is None or check.allowed is None else (f"{check.error:.2e}", f"{check.allowed:.2e}")
    return (check.engine, check.device, check.dtype, check.name, "pass" if check.passed else "FAIL", *numbers, check.detail)


def _compile_only(arguments: argparse.Namespace, output: Output) -> int:
    from ..engines.hopper.compile_check import compile_report, problems

    for name in ("device", "ranks"):
        if (given := getattr(arguments, name)) is not None:
            raise ValueError(f"{name}={kind_of(given)} must not be given with compile_only={kind_of(arguments.compile_only)}, which runs nothing")
    with output.bar("compiling", None):
        try:
            report = compile_report(arguments.compile_only)
        except ValueError as error:
            raise ValueError(f"compile_only={kind_of(arguments.compile_only)}: {error}") from None
    found = problems(report)
    columns = list(report[0]) if report else ["kernel"]
    output.table(f"Kernels compiled for {arguments.compile_only}", [name.replace("_", " ") for name in columns],
                 [[str(entry[name]) for name in columns] for entry in report])
    for problem in found:
        output.line(f"FAILED: {problem}")
    output.line(f"{len(report)} kernels compiled, " + (f"{len(found)} problem(s)" if found else "all within their budgets"))
    output.finish({"command": "verify", "target": arguments.compile_only, "passed": bool(report) and not found, "kernels": report, "problems": found})
    return 0 if report and not found else 1
