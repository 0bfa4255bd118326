"""The record of a run: JSON lines, each hashed together with the one before it, so that a cut, a reordering or an edit shows.

Line 1 is the header (fingerprint, configuration), then one line for every step from 0 (the state before the first step), a line where a stopped
run was resumed, and a closing line; the last two hold the state of that moment, optimizer included. Each line is canonical JSON whose last
member, "hash", is the SHA-256 of the line without it; "previous" is the hash of the line before. Whoever rewrites every line from an edited one
on gets an intact chain again: note the closing hash elsewhere, or replay the run, to rule that out.
"""
from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .arguments import check_integer, check_path, check_readable_file, check_type

FORMAT = 1
_FIRST_PREVIOUS = "mok run record"

# What one step's line holds, in the order in which the run computed it: digests as text, scalars as numbers.
Entries = dict[str, "str | int | float"]


class BrokenChain(Exception):
    """A record that is not what a run wrote; the message names the line."""


@dataclass
class Record:
    """A record that was read. header: fingerprint and configuration. steps[i]: entries of step i. resumes: lines of kind "resume".

    A configuration holds the trainer's settings, the corpus with its sha256, data (where it was; None = the default text), device ("cpu" or
    "cuda"), ranks, and the threads of one rank.

    hashes[i]: hash of step i's line. end: the closing line, None where it is missing.
    """

    path: str
    header: dict[str, Any]
    steps: list[Entries] = field(default_factory=list)
    resumes: list[dict[str, Any]] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    end: dict[str, Any] | None = None

    def state_after(self, step: int) -> Entries:
        """All that the record says about parameters and optimizer as they were after `step`. ValueError for a step that it does not hold."""
        check_integer("step", step, 0, len(self.steps) - 1)
        state = {name: value for name, value in self.steps[step].items() if name.startswith(("parameter/", "optimizer/"))}
        for line in (*self.resumes, *([self.end] if self.end else [])):
            if line.get("step", line.get("steps")) == step:
                state.update(line["state"])
        return state

    def ranks_at(self, step: int) -> int:
        """How many ranks ran `step`; they may change where the run was resumed."""
        check_integer("step", step, 0)
        ranks: int = self.header["configuration"]["ranks"]
        for line in self.resumes:
            if line["step"] < step:
                ranks = line["configuration"]["ranks"]
        return ranks

    @property
    def last_hash(self) -> str:
        """The hash that stands for the whole record: its closing line's, or its last step's where it is not closed."""
        return self.end["hash"] if self.end else self.hashes[-1] if self.hashes else self.header["hash"]


def read_record(path: str | os.PathLike[str], *, may_be_open: bool = False) -> Record:
    """The record in `path`, every line checked against the chain.

    may_be_open: accept a record without a closing line, or with a last line that was cut in the middle, of a run that was killed.
    Raises ValueError naming `record` for a file that cannot be read or is no record, BrokenChain naming the line for one that was changed.
    """
    lines = _read_lines(path, may_be_open)
    record = None
    previous = _FIRST_PREVIOUS
    for number, raw in enumerate(lines, start=1):
        line = _check_line(path, number, raw, previous, 0 if record is None else len(record.steps))
        previous = line["hash"]
        if "configuration" in line:
            _check_configuration(path, line["configuration"])
        if number == 1:
            record = Record(str(path), line)
            continue
        assert record is not None
        if record.end is not None:
            raise BrokenChain(f"{_where(path, number, line)}: stands behind the closing line")
        if line["kind"] == "step" and line["step"] == len(record.steps):
            record.steps.append(line["entries"])
            record.hashes.append(line["hash"])
        elif line["kind"] == "resume" and line["step"] == len(record.steps) - 1:
            record.resumes.append(line)
        elif line["kind"] == "end" and line["steps"] == len(record.steps) - 1:
            record.end = line
        else:
            raise BrokenChain(f"{_where(path, number, line)}: does not follow from the {len(record.steps)} steps before it")
    assert record is not None
    if record.end is None and not may_be_open:
        last = f"after step {len(record.steps) - 1}" if record.steps else "before the first step"
        raise BrokenChain(f"record {str(path)!r} ends {last} (line {len(lines)}) without its closing line: it was cut, or its run did not end")
    return record


def _read_lines(path: str | os.PathLike[str], may_be_open: bool) -> list[bytes]:
    try:
        text = check_readable_file("record", path, pipe=True).read_bytes()
    except OSError as error:
        raise ValueError(f"record={str(path)!r} cannot be read: {error.strerror}") from None
    lines = text.split(b"\n")
    rest = lines.pop()
    first = _parsed(lines[0]) if lines else {}
    if first.get("kind") != "header":
        raise ValueError(f"record={str(path)!r} must be a record written by mok train --audit, found no header in its first line")
    if first.get("format") != FORMAT:
        raise ValueError(f"record={str(path)!r} has format {first.get('format')!r}, this version reads format {FORMAT}")
    if rest and not may_be_open:
        raise BrokenChain(f"record {str(path)!r}, line {len(lines) + 1}: has no end: it was cut in the middle")
    return lines


def _check_line(path: str | os.PathLike[str], number: int, raw: bytes, previous: str, next_step: int) -> dict[str, Any]:
    line = _parsed(raw)
    kind = line.get("kind")
    if not isinstance(kind, str) or tuple(line) != _FIELDS.get(kind) or not all(isinstance(line.get(name, {}), dict) for name in _OBJECTS):
        raise BrokenChain(f"{_where(path, number, line)}: is no line of a record (step {next_step} should follow here): it was edited")
    content = {name: value for name, value in line.items() if name != "hash"}
    if raw != canonical(line) or line["hash"] != _hash(content):
        raise BrokenChain(f"{_where(path, number, line)}: its hash is not that of its contents: it was edited")
    if line["previous"] != previous or (line["kind"] == "header") != (number == 1):
        raise BrokenChain(f"{_where(path, number, line)}: does not continue line {number - 1}: lines were removed, inserted or reordered")
    return line


_FIELDS = {
    "header": ("kind", "format", "fingerprint", "configuration", "previous", "hash"),
    "step": ("kind", "step", "entries", "previous", "hash"),
    "resume": ("kind", "step", "fingerprint", "configuration", "state", "previous", "hash"),
    "end": ("kind", "steps", "finished", "state", "previous", "hash"),
}
_CONFIGURATION = {"settings": dict, "corpus": dict, "device": str, "ranks": int, "threads": int}
_OBJECTS = ("entries", "fingerprint", "configuration", "state")


def _check_configuration(path: str | os.PathLike[str], configuration: dict[str, Any]) -> None:
    """ValueError unless it holds what every reader of a record relies on."""
    for name, kind in _CONFIGURATION.items():
        if not isinstance(configuration.get(name), kind):
            raise ValueError(f"record={str(path)!r} must hold the run's {name} as {kind.__name__}, found {configuration.get(name)!r}")
    if not isinstance(configuration["corpus"].get("sha256"), str):
        raise ValueError(f"record={str(path)!r} must hold the text's sha256, found {configuration['corpus']}")


def _parsed(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`; an empty one where there is none."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _where(path: str | os.PathLike[str], number: int, line: dict[str, Any]) -> str:
    kind = line.get("kind")
    what = f" ({kind} {line.get('step')})" if kind in ("step", "resume") else " (header)" if kind == "header" else " (closing line)" if kind == "end" else ""
    return f"record {str(path)!r}, line {number}{what}"


def canonical(value: Any) -> bytes:
    """The one JSON text of a value: members in their own order, no spaces, ASCII; floats as Python's shortest form, which reads back exactly."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True).encode()


def _hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(canonical(content)).hexdigest()


class RecordWriter:
    """Writes a record line by line; each line reaches the file before the call returns, so a killed run leaves all its steps."""

    def __init__(self, path: Path, previous: str) -> None:
        self.path = path
        self._previous = previous

    @staticmethod
    def check_free(path: str | os.PathLike[str]) -> None:
        """Raise ValueError naming `audit` where `path` exists, or its folder does not or cannot be written to."""
        if os.path.lexists(check_path("audit", path)):
            raise ValueError(f"audit={str(path)!r} exists and is not overwritten; name a new file")
        if not Path(path).absolute().parent.is_dir():
            raise ValueError(f"audit={str(path)!r} must be in an existing folder")
        if not os.access(Path(path).absolute().parent, os.W_OK):
            raise ValueError(f"audit={str(path)!r} must be in a folder that can be written to")

    @staticmethod
    def create(path: str | os.PathLike[str], fingerprint: dict[str, Any], configuration: dict[str, Any]) -> RecordWriter:
        """A new record. ValueError naming `audit` where the file exists or cannot be written."""
        RecordWriter.check_free(path)
        writer = RecordWriter(Path(path), _FIRST_PREVIOUS)
        try:
            writer._append({"kind": "header", "format": FORMAT, "fingerprint": fingerprint, "configuration": configuration}, mode="xb")
        except OSError as error:
            raise ValueError(f"audit={str(path)!r} cannot be written: {error.strerror}") from None
        return writer

    @staticmethod
    def resume(record: Record, step: int, fingerprint: dict[str, Any], configuration: dict[str, Any], state: Entries) -> RecordWriter:
        """Continue `record` behind `step`; later lines, which the resumed run writes again, and the closing line are dropped."""
        check_type("record", record, Record, "a record that `read_record` gave")
        check_integer("step", step, 0, len(record.steps) - 1)
        kept = 0
        previous = _FIRST_PREVIOUS
        for raw in Path(record.path).read_bytes().splitlines(keepends=True):
            line: dict[str, Any] = json.loads(raw) if raw.endswith(b"\n") else {"kind": "end"}
            if line["kind"] == "end" or line.get("step", 0) > step:
                break
            kept, previous = kept + len(raw), line["hash"]
        os.truncate(record.path, kept)
        writer = RecordWriter(Path(record.path), previous)
        writer._append({"kind": "resume", "step": step, "fingerprint": fingerprint, "configuration": configuration, "state": state})
        return writer

    def step(self, step: int, entries: Entries) -> None:
        """Append the line of one step. ValueError for a step that is none, or entries that no line can hold."""
        check_integer("step", step, 0)
        check_type("entries", entries, dict, "a dict of a step's entries")
        for name, value in entries.items():
            check_type("entries", name, str, "a dict with names as keys")
            check_type(f"entries[{name!r}]", value, (str, int, float), "a digest or a number")
        self._append({"kind": "step", "step": step, "entries": entries})

    def close(self, steps: int, finished: bool, state: Entries) -> str:
        """Append the closing line; returns its hash, which stands for the whole record. finished: whether the run did all its steps."""
        self._append({"kind": "end", "steps": steps, "finished": finished, "state": state})
        return self._previous

    def _append(self, content: dict[str, Any], mode: str = "ab") -> None:
        content["previous"] = self._previous
        self._previous = _hash(content)
        with open(self.path, mode, buffering=0) as file:
            file.write(canonical({**content, "hash": self._previous}) + b"\n")
