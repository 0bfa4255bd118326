"""`mok verify`: check the engines of this machine against the specification, or compile the GPU kernels without a GPU."""
from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from .console import Output
from .device import choose_device

if TYPE_CHECKING:
    from ..verify import Check

HELP = "check every engine of this machine against the float64 specification"
DESCRIPTION = """\
Check every engine that this machine can run. Forward and every gradient are compared with the specification in float64, block by block and
expert by expert: an error may be about twice what half an ulp of change in every input does (docs/numerics.md). Then the promises, to the bit:
P1 the same run twice, P2 another number of threads or overlap setting, P4 a token in another batch. Exit status 1 if anything fails.

  mok verify                        everything this machine has
  mok verify --device cpu           the CPU engine only
  mok verify --compile-only sm_90a  compile the GPU kernels for that target and report registers, spills and shared memory; needs no GPU"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:N (default: every device of this machine)")
    parser.add_argument("--compile-only", metavar="TARGET", help="compile the kernels for TARGET (sm_90a) instead of running anything")


def run(arguments: argparse.Namespace, output: Output) -> int:
    if arguments.compile_only is not None:
        return _compile_only(arguments, output)
    from ..verify import count_checks, find_targets, verify

    targets = find_targets(None if arguments.device is None else choose_device(arguments.device))
    with output.bar("checking", count_checks(targets)) as bar:
        checks = verify(targets, lambda check: bar.advance(1, f"{check.engine} {check.dtype} {check.name}"))
    failed = [check for check in checks if not check.passed]
    output.table("Engines of this machine", ("engine", "device", "dtype", "check", "result", "error", "allowed", "detail"), [_row(c) for c in checks],
                 bad=[not check.passed for check in checks])
    output.line("error and allowed: of the worst block, relative to its RMS")
    output.line(f"{len(checks) - len(failed)} of {len(checks)} checks passed" + (f", {len(failed)} FAILED" if failed else ""))
    output.finish({"command": "verify", "passed": not failed, "failed": len(failed), "checks": [asdict(check) for check in checks]})
    return 1 if failed else 0


def _row(check: Check) -> tuple[str, ...]:
    numbers = ("bitwise", "") if check.error is None or check.allowed is None else (f"{check.error:.2e}", f"{check.allowed:.2e}")
    return (check.engine, check.device, check.dtype, check.name, "pass" if check.passed else "FAIL", *numbers, check.detail)


def _compile_only(arguments: argparse.Namespace, output: Output) -> int:
    from ..engines.hopper.compile_check import compile_report, problems

    if arguments.device is not None:
        raise ValueError(f"device={arguments.device!r} must not be given with compile_only={arguments.compile_only!r}, which runs on no device")
    with output.bar("compiling", None):
        report = compile_report(arguments.compile_only)
    found = problems(report)
    columns = list(report[0]) if report else ["kernel"]
    output.table(f"Kernels compiled for {arguments.compile_only}", [name.replace("_", " ") for name in columns],
                 [[str(entry[name]) for name in columns] for entry in report])
    for problem in found:
        output.line(f"FAILED: {problem}")
    output.line(f"{len(report)} kernels compiled, " + (f"{len(found)} problem(s)" if found else "all within their budgets"))
    output.finish({"command": "verify", "target": arguments.compile_only, "passed": bool(report) and not found, "kernels": report, "problems": found})
    return 0 if report and not found else 1
