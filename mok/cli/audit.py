"""`mok audit`: check, replay and compare the records that `mok train --audit` writes."""
from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..arguments import check_seconds
from .console import Output
from .launch import run_on_ranks

if TYPE_CHECKING:
    from ..audit import Record
    from ..audit_diff import Comparison
    from ..lm.audit import Verdict
    from ..lm.ranks import Ranks

HELP = "check, replay and compare records of training runs"
DESCRIPTION = """\
Check a record that `mok train --audit FILE` wrote. A record holds digests of every step's inputs, routes, outputs, gradients, parameters and
optimizer state, chained so that a change of the file shows.

  mok audit show FILE      is the file as it was written, and what was run
  mok audit replay FILE    train again exactly as it says, on as many processes, and compare every step; takes as long as the run did
  mok audit diff A B       compare two records and name the first difference; between runs on different numbers of ranks, what must be equal

Exit status: 0 intact, confirmed, equal; 1 a difference, or a record that was changed or cut (the step and the entry are named); 2 bad input;
3 not comparable here: another processor, GPU, version, code or text than the record's, so that different bits would prove nothing."""
DIFFERENT = 1
NOT_COMPARABLE = 3
_FILES = {"show": 1, "replay": 1, "diff": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=tuple(_FILES), help="what to do")
    parser.add_argument("files", nargs="+", metavar="FILE", help="the record, or the two records of diff")
    parser.add_argument("--data", metavar="PATH", help="replay: where the text is now (default: where it was)")
    parser.add_argument("--steps", type=int, metavar="N", help="replay: the first N steps only")
    parser.add_argument("--anyway", action="store_true", help="replay: run even where the record is not comparable here; equal bits still confirm it")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", default=300.0,
                        help="replay on several processes: how long one waits for another (default: 300)")
    parser.set_defaults(ranks=None)                      # the record says how many


def run(arguments: argparse.Namespace, output: Output) -> int:
    from ..audit import BrokenChain, read_record

    action, files = arguments.action, arguments.files
    if len(files) != _FILES[action]:
        raise ValueError(f"{action} takes {_FILES[action]} FILE{'s' if _FILES[action] > 1 else ''}, found {len(files)}")
    for name in ("data", "steps", "anyway"):
        if action != "replay" and getattr(arguments, name) not in (None, False):
            raise ValueError(f"{name}={getattr(arguments, name)!r} belongs to replay, not to {action}")
    check_seconds("timeout", arguments.timeout)
    document: dict[str, Any] = {"command": "audit", "action": action, "files": files}
    try:
        records = [read_record(file) for file in files]
    except BrokenChain as error:
        output.line(f"NOT INTACT: {error}")
        output.finish({**document, "result": "not intact", "detail": str(error)})
        return DIFFERENT
    if action == "replay":
        return _replay_on_ranks(records[0], arguments, output, document)
    status, result = _show(records[0], output) if action == "show" else _diff(records, output)
    output.finish({**document, **result})
    return status


def _show(record: Record, output: Output) -> tuple[int, dict[str, Any]]:
    assert record.end is not None
    configuration = record.header["configuration"]
    rows = [(name, str(value)) for name, value in {**configuration, **configuration["settings"]}.items() if name != "settings"]
    output.table("Configuration", ("", ""), rows)
    output.table("Fingerprint", ("", ""), list(record.header["fingerprint"].items()))
    steps = len(record.steps) - 1
    resumed = [line["step"] for line in record.resumes]
    output.line(f"intact: {steps} steps of {configuration['settings']['steps']}, {'finished' if record.end['finished'] else 'stopped'}"
                + (f", resumed after step {', '.join(map(str, resumed))}" if resumed else "") + f"; last loss {record.steps[-1].get('loss')}")
    output.line(f"hash of the whole record: {record.last_hash}")
    return 0, {"result": "intact", "steps": steps, "finished": record.end["finished"], "resumed_after": resumed, "hash": record.last_hash,
               "configuration": configuration, "fingerprint": record.header["fingerprint"], "last_step": record.steps[-1]}


def _replay_on_ranks(record: Record, arguments: argparse.Namespace, output: Output, document: dict[str, Any]) -> int:
    import torch

    from ..lm.audit import Verdict, check_replay, replay, unlike_here

    check_replay(record, record.ranks_at(0), arguments.steps)
    recorded = len(record.steps) - 1

    def body(ranks: Ranks) -> int:
        with output.bar("replaying", recorded if arguments.steps is None else min(arguments.steps, recorded)) as bar:
            verdict = replay(record, ranks=ranks, data=arguments.data, steps=arguments.steps, anyway=arguments.anyway,
                             on_step=lambda step: bar.advance(1, f"step {step}"))
        status, result = _report(verdict, output)
        output.finish({**document, **result})
        return status if ranks.leads else 0

    device = torch.device(record.header["configuration"]["device"] if torch.cuda.is_available() else "cpu")
    if unlike_here(record) and not arguments.anyway:     # start no processes to find that out
        status, result = _report(Verdict(0, recorded, not_comparable=tuple(unlike_here(record)), was_run=False), output)
        output.finish({**document, **result})
        return status
    return run_on_ranks(arguments, lambda: record.ranks_at(0), body, device)


def _report(verdict: Verdict, output: Output) -> tuple[int, dict[str, Any]]:
    for text in verdict.not_comparable:
        output.line(f"not the same: {text}")
    status, result = _judge(verdict)
    output.line({"confirmed": f"CONFIRMED: {verdict.steps} of {verdict.recorded} steps, every digest equal",
                 "not comparable": "NOT COMPARABLE here" + (f": first difference at {verdict.difference}, which proves nothing" if verdict.difference else
                                                            "; --anyway replays it all the same"),
                 "different": f"DIFFERENT at {verdict.difference} (recorded against replayed)"}[result])
    difference = verdict.difference
    return status, {"result": result, "steps": verdict.steps, "recorded_steps": verdict.recorded, "not_comparable": list(verdict.not_comparable),
                    "difference": None if difference is None else
                    {"step": difference.step, "entry": difference.name, "recorded": difference.first, "replayed": difference.second}}


def _judge(verdict: Verdict) -> tuple[int, str]:
    """Exit status and its name. Equal bits confirm a record anywhere; different ones refute it only where the fingerprint is the record's."""
    if verdict.not_comparable and (verdict.difference is not None or not verdict.was_run):
        return NOT_COMPARABLE, "not comparable"
    return (0, "confirmed") if verdict.difference is None else (DIFFERENT, "different")


def _diff(records: list[Record], output: Output) -> tuple[int, dict[str, Any]]:
    from ..audit_diff import compare

    found = compare(*records)
    for kind, texts in (("fingerprint", found.fingerprint), ("configuration", found.configuration)):
        for text in texts:
            output.line(f"{kind} differs: {text}")
    if found.rank_free:
        _print_coverage(found, output)
    if found.difference is None:
        output.line(f"EQUAL: {found.compared} entries of {found.steps} steps" + (" that P3 promises" if found.rank_free else ""))
    else:
        output.line(f"DIFFERENT at {found.difference}")
    difference = found.difference
    return 0 if difference is None else DIFFERENT, {
        "result": "equal" if difference is None else "different", "steps": found.steps, "compared": found.compared, "not_compared": found.not_compared,
        "not_compared_kinds": dict(found.left_out), "not_compared_but_equal": found.unpromised_agreeing, "last_step_compared": found.last_step_compared,
        "fingerprint": found.fingerprint, "configuration": found.configuration,
        "difference": None if difference is None else
        {"step": difference.step, "entry": difference.name, "first": difference.first, "second": difference.second}}


def _print_coverage(found: Comparison, output: Output) -> None:
    kinds = ", ".join(f"{count} {kind}" for kind, count in found.left_out.items())
    output.line(f"different numbers of ranks: compared the state before step 1, each step's input and learning rate, and what the layers computed from "
                f"equal inputs (up to step {found.last_step_compared})")
    output.line(f"not compared: {found.not_compared} entries that P3 does not promise, or whose inputs differ already ({kinds}); "
                f"{found.unpromised_agreeing} of them are equal all the same")
