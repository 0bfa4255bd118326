"""Run records as a careful forger would leave them: lines changed and every hash computed anew."""
from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from mok.audit import canonical


def forge(path: Path, change: Callable[[list[dict]], object], to: Path | None = None) -> Path:
    """Apply `change` to the record's lines (dicts, in place) and write it with an intact chain to `to`, or over `path`; returns where."""
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    change(lines)
    previous, out = lines[0]["previous"], b""
    for line in lines:
        content = {**{name: value for name, value in line.items() if name != "hash"}, "previous": previous}
        previous = hashlib.sha256(canonical(content)).hexdigest()
        out += canonical({**content, "hash": previous}) + b"\n"
    to = path if to is None else to
    to.write_bytes(out)
    return to
