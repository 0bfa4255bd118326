"""The record's file: what was written is read, and any changed bit, moved, missing or doubled line is seen and located."""
from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from mok.audit import BrokenChain, RecordWriter, read_record
from tests.forged import forge

FINGERPRINT = {"torch": "2.99", "cpu": "a processor"}
CONFIGURATION = {"settings": {"seed": 0, "learning_rate": 2e-3}, "corpus": {"name": "text", "sha256": "00"}, "data": None, "device": "cpu",
                 "ranks": 1, "threads": 2}
NUMBERS = (0.1, 1e-300, 5.379401385784149, 1 / 3, -0.0)


def entries(step: int) -> dict:
    return {"loss": NUMBERS[step], "z": f"float32[2]:{step:032x}", "a": f"float32[2]:{step + 1:032x}"}


def write(path: Path, steps: int = 4, closed: bool = True) -> Path:
    writer = RecordWriter.create(path, FINGERPRINT, CONFIGURATION)
    for step in range(steps + 1):
        writer.step(step, entries(step))
    if closed:
        writer.close(steps, finished=True, state={"parameter/p": "1"})
    return path


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def test_what_was_written_is_read(tmp_path: Path):
    record = read_record(write(tmp_path / "a"))
    assert record.header["fingerprint"] == FINGERPRINT and record.header["configuration"] == CONFIGURATION
    assert record.steps == [entries(step) for step in range(5)]
    assert [str(value) for step in record.steps for value in step.values()] == [str(value) for step in range(5) for value in entries(step).values()]
    assert list(record.steps[0]) == ["loss", "z", "a"]                              # the run's own order, which locates the first difference
    assert record.end["finished"] is True and record.last_hash == record.end["hash"]


def test_the_chain_is_that_of_the_docstring(tmp_path: Path):
    previous = "mok run record"
    for raw in lines_of(write(tmp_path / "a")):
        body, _, rest = raw.rpartition(b',"hash":"')
        assert rest == hashlib.sha256(body + b"}").hexdigest().encode() + b'"}\n'
        assert json.loads(raw)["previous"] == previous
        previous = json.loads(raw)["hash"]


def test_any_flipped_bit_of_the_file_is_seen_in_its_line(tmp_path: Path):
    path = write(tmp_path / "a", steps=1)
    text = path.read_bytes()
    for position in range(len(text)):
        changed = bytearray(text)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        number = text[:position].count(b"\n") + 1
        with pytest.raises((BrokenChain, ValueError), match=f"line {number}|first line|format|closing line|cut in the middle"):
            read_record(path)


@pytest.mark.parametrize("number, where", [(0, "in its first line"), (1, "line 2"), (3, r"line 4 \(step 3\)"), (5, r"line 6 \(closing line\)"),
                                           (6, "closing line")])
def test_a_missing_line_is_seen_where_it_was(tmp_path: Path, number, where):
    path = write(tmp_path / "a")
    lines = lines_of(path)
    path.write_bytes(b"".join(lines[:number] + lines[number + 1:]))
    with pytest.raises((BrokenChain, ValueError), match=where):
        read_record(path)


def test_lines_that_were_swapped_doubled_or_added_are_seen(tmp_path: Path):
    path = write(tmp_path / "a")
    lines = lines_of(path)
    other = lines_of(write(tmp_path / "other", steps=4, closed=False))
    for changed, where in (([*lines[:2], lines[3], lines[2], *lines[4:]], r"line 3 \(step 2\)"), ([*lines[:3], lines[2], *lines[3:]], r"line 4 \(step 1\)"),
                           ([*lines, lines[-1]], "line 8"), ([*lines[:-1], lines[0], lines[-1]], r"line 7 \(header\)"),
                           ([*other, b"\n", lines[-1]], "line 7")):
        path.write_bytes(b"".join(changed))
        with pytest.raises(BrokenChain, match=where):
            read_record(path)


def test_a_record_cut_at_any_byte_is_seen(tmp_path: Path):
    path = write(tmp_path / "a", steps=1)
    text = path.read_bytes()
    header = text.index(b"\n") + 1
    for length in range(len(text)):
        path.write_bytes(text[:length])
        with pytest.raises(BrokenChain if length >= header else ValueError):
            read_record(path)


@pytest.mark.parametrize("change, where", [(lambda lines: lines.pop(2), r"line 3 \(step 2\)"), (lambda lines: lines.pop(1), r"line 2 \(step 1\)"),
                                           (lambda lines: lines[-1].update(steps=9), "closing line"), (lambda lines: lines[2].update(step="1"), r"step 1"),
                                           (lambda lines: lines.append(lines[-1]), "behind the closing line")])
def test_an_impossible_sequence_is_seen_behind_intact_hashes(tmp_path: Path, change, where):
    path = write(tmp_path / "a")
    forge(path, change)
    with pytest.raises(BrokenChain, match=where):
        read_record(path)


def test_a_forged_record_has_another_hash(tmp_path: Path):
    """The limit that the module's docstring states: only the closing hash, kept elsewhere, or a replay shows this."""
    path = write(tmp_path / "a")
    before = read_record(path).last_hash
    forge(path, lambda lines: lines[3]["entries"].update(loss=0.5))
    assert read_record(path).last_hash != before


@pytest.mark.parametrize("cut", [0, 7])
def test_a_killed_run_can_be_continued(tmp_path: Path, cut):
    path = write(tmp_path / "a", steps=4, closed=False)
    text = path.read_bytes()
    path.write_bytes(text[:len(text) - cut])                                 # the kill came between two steps, or in the middle of a line
    with pytest.raises(BrokenChain, match=r"ends after step 4 .*without its closing line|line 6: has no end"):
        read_record(path)
    record = read_record(path, may_be_open=True)
    assert len(record.steps) == (5 if cut == 0 else 4)
    writer = RecordWriter.resume(record, 2, {"torch": "3"}, CONFIGURATION, {"parameter/p": "2"})
    for step in (3, 4):
        writer.step(step, entries(step))
    writer.close(4, finished=True, state={"parameter/p": "1"})
    continued = read_record(path)
    assert continued.steps == [entries(step) for step in range(5)]
    assert [(line["step"], line["fingerprint"]) for line in continued.resumes] == [(2, {"torch": "3"})]
    again = RecordWriter.resume(continued, 4, FINGERPRINT, CONFIGURATION, {})    # a finished run, to do more steps
    again.step(5, {"loss": 1.5})
    again.close(5, finished=True, state={"parameter/p": "1"})
    assert len(read_record(path).steps) == 6 and len(read_record(path).resumes) == 2


def test_an_existing_file_is_not_overwritten_and_a_bad_place_is_refused(tmp_path: Path):
    path = write(tmp_path / "a")
    before = path.read_bytes()
    for place, message in ((path, "exists"), (tmp_path / "no" / "a", "existing folder"), (tmp_path, "exists")):
        with pytest.raises(ValueError, match=f"audit=.*{message}"):
            RecordWriter.create(place, FINGERPRINT, CONFIGURATION)
    assert path.read_bytes() == before


@pytest.mark.parametrize("name, value", [("settings", []), ("corpus", {"name": "a"}), ("corpus", None), ("ranks", "1"), ("device", 0), ("threads", None)])
def test_a_configuration_that_no_run_writes_is_refused(tmp_path: Path, name, value):
    path = write(tmp_path / "a")
    forge(path, lambda lines: lines[0]["configuration"].update({name: value}))
    with pytest.raises(ValueError, match=r"record=.* must hold"):
        read_record(path)


@pytest.mark.parametrize("contents", [b"", b"\n", b"text\n", b"[]\n", b'{"kind":"header"}\n', b'{"kind":"step"}\n', b"\xff\xfe\n", b"[" * 100_000 + b"\n",
                                      b'{"kind":[],"a":1}\n'])
def test_what_is_no_record_is_refused(tmp_path: Path, contents):
    path = tmp_path / "a"
    path.write_bytes(contents)
    with pytest.raises(ValueError, match="record="):
        read_record(path)
    with pytest.raises(ValueError, match=r"record=.* cannot be read"):
        read_record(tmp_path)
    good = lines_of(write(tmp_path / "b"))
    path.write_bytes(good[0] + contents.rstrip(b"\n") + b"\n" + b"".join(good[2:]))
    with pytest.raises(BrokenChain, match="line 2"):
        read_record(path)
