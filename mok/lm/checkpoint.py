"""Checkpoints: tensors as safetensors through torch.distributed.checkpoint, scalars as JSON beside them; nothing is ever unpickled.

A checkpoint is a folder: one safetensors file for each rank that wrote it (the first holds everything but the other ranks' experts), an index of
which file holds which tensor, and `state.json` (step, settings, SHA-256 of each file). Names do not depend on the number of ranks, so any number
of them can read it. It is written under another name and renamed when complete, so a folder that has its final name is whole.
"""
from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from .ranks import Ranks

FORMAT = 1
STATE_FILE = "state.json"
INDEX_FILE = "model.safetensors.index.json"
_PREFIX = "step-"


def save_checkpoint(folder: Path, tensors: dict[str, Tensor], state: dict[str, Any], ranks: Ranks | None = None) -> None:
    """Write `tensors` and the JSON-able `state` to `folder`, which must not exist; it appears complete or not at all.

    ranks: those of a run, all of which call this with one folder (on a disk that they share), one state, and tensors of their own, no name twice;
    each writes its own file. Raises on all of them what goes wrong on one.
    """
    ranks = Ranks() if ranks is None else ranks
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        with ranks.together("beginning a checkpoint"):
            if ranks.leads:
                if folder.exists():
                    raise ValueError(f"checkpoint={str(folder)!r} exists and must not be overwritten")
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
        files: dict[str, Any] = {}
        with ranks.together("writing a checkpoint"):
            file = partial / f"model-{ranks.rank + 1:05d}-of-{ranks.size:05d}.safetensors"
            _write_tensors(file, tensors, ranks)
            if file.exists():
                files[file.name] = {"bytes": file.stat().st_size, "sha256": sha256(file)}
        for others in ranks.tell("what a checkpoint holds", files=files):
            files |= others["files"]
        with ranks.together("completing a checkpoint"):
            if ranks.leads:
                _write_index(partial, sorted(files))
                write_atomically(partial / STATE_FILE, json.dumps({"format": FORMAT, **state, "files": dict(sorted(files.items()))}, indent=1) + "\n")
                os.replace(partial, folder)
                _sync(folder.parent)
    finally:
        if ranks.leads:
            shutil.rmtree(partial, ignore_errors=True)


class _OwnFile(HuggingFaceStorageWriter):
    """Writes one rank's file; torch's own index names this rank's tensors alone and would be overwritten by the next rank's."""

    def finish(self, metadata: Any, results: Any) -> None:
        pass


def _write_tensors(file: Path, tensors: dict[str, Tensor], ranks: Ranks) -> None:
    whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    if not whole:
        return
    # The file's number is a tensor's number in this mapping, the number of files its largest; the last entry is of no tensor.
    files = {**dict.fromkeys(whole, ranks.rank + 1), "": ranks.size}
    with _single_process_is_meant(), _causes_themselves():
        dcp.save(whole, storage_writer=_OwnFile(str(file.parent), files), no_dist=True)
    if not file.exists():
        raise OSError(f"torch.distributed.checkpoint did not write {file.name} but {sorted(f.name for f in file.parent.iterdir())}")
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


@contextmanager
def _causes_themselves() -> Iterator[None]:
    """Raises what torch.distributed.checkpoint wraps in an exception of its own, a full disk say, where it is one thing that callers know."""
    try:
        yield
    except CheckpointException as error:
        cause = next(iter(error.failures.values()), (None,))[0]
        if isinstance(cause, (OSError, KeyboardInterrupt, MemoryError)):
            raise cause from error
        raise


def _write_index(folder: Path, files: list[str]) -> None:
    """Which file holds which tensor, in the form that readers of sharded safetensors know."""
    where, size = {}, 0
    for file in files:
        with (folder / file).open("rb") as raw:
            size += (folder / file).stat().st_size - 8 - int.from_bytes(raw.read(8), "little")        # without the header and its length
        with safe_open(folder / file, framework="pt") as opened:
            where.update(dict.fromkeys(opened.keys(), file))
    write_atomically(folder / INDEX_FILE, json.dumps({"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}, indent=1) + "\n")


def read_state(folder: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint. ValueError naming `checkpoint` where it is missing, damaged or of another format."""
    file = folder / STATE_FILE
    try:
        state = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"checkpoint={str(folder)!r} cannot be read: {error.strerror}: {str(file)!r}") from None
    except ValueError as error:
        raise ValueError(f"checkpoint={str(folder)!r} is corrupt: {STATE_FILE} is not JSON: {error}") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else None
        raise ValueError(f"checkpoint={str(folder)!r} has format {found!r}, this version reads format {FORMAT}")
    return state


def load_checkpoint(folder: Path, tensors: dict[str, Tensor], elsewhere: dict[str, Tensor] | None = None, ranks: Ranks | None = None) -> dict[str, Any]:
    """Fill `tensors` in place from `folder` and return its state. Nothing is changed, on any rank, unless everything fits.

    elsewhere: tensors that the checkpoint must hold too, for other ranks (the meta device will do). ranks: as in `save_checkpoint`; each reads its
    own tensors. ValueError naming `checkpoint` and both quantities for a changed or missing file, a missing or surplus tensor, another shape or dtype.
    """
    ranks = Ranks() if ranks is None else ranks
    # Read beside, then copy: a failure in mid-read leaves the model as it was.
    fresh = {name: torch.empty_like(tensor, memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    with ranks.together("reading a checkpoint"):
        state = read_state(folder)
        _check_files(folder, state.get("files"), ranks)
        _check_tensors(folder, {**(elsewhere or {}), **tensors})
        with _single_process_is_meant(), _causes_themselves():
            dcp.load(fresh, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(fresh[name])
    return state


@contextmanager
def _single_process_is_meant() -> Iterator[None]:
    """Without torch's warning that one process was assumed: no_dist=True says so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _check_files(folder: Path, recorded: Any, ranks: Ranks) -> None:
    """Every file's size, and the contents of those that are this rank's to check: the ranks share that work."""
    found = sorted(file.name for file in folder.glob("*.safetensors"))
    if not isinstance(recorded, dict) or sorted(recorded) != found:
        raise ValueError(f"checkpoint={str(folder)!r} is corrupt: {STATE_FILE} lists {sorted(recorded or [])}, the folder holds {found}")
    for number, (name, entry) in enumerate(recorded.items()):
        size = (folder / name).stat().st_size
        if size != entry["bytes"]:
            raise ValueError(f"checkpoint={str(folder)!r} is corrupt: {name} has {size} bytes, {entry['bytes']} were written")
        if number % ranks.size == ranks.rank and (digest := sha256(folder / name)) != entry["sha256"]:
            raise ValueError(f"checkpoint={str(folder)!r} is corrupt: {name} has SHA-256 {digest[:16]}..., {entry['sha256'][:16]}... was written")


def _check_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    stored: dict[str, tuple[list[int], str]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (safe_open is no mapping)
                    view = opened.get_slice(name)
                    stored[name] = (view.get_shape(), view.get_dtype())
        except SafetensorError as error:
            raise ValueError(f"checkpoint={str(folder)!r} is corrupt: {file.name}: {error}") from None
    missing, surplus = sorted(tensors.keys() - stored.keys()), sorted(stored.keys() - tensors.keys())
    if missing or surplus:
        raise ValueError(f"checkpoint={str(folder)!r} holds {len(stored)} tensors, the model has {len(tensors)}: "
                         f"missing {_some(missing)}, surplus {_some(surplus)}")
    for name, tensor in tensors.items():
        shape, dtype = stored[name]
        if list(tensor.shape) != shape or _dtype_name(tensor.dtype) != dtype:
            raise ValueError(f"checkpoint={str(folder)!r} holds {name} as {dtype} {shape}, the model has {_dtype_name(tensor.dtype)} {list(tensor.shape)}")


def _some(names: list[str]) -> str:
    return f"{len(names)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names else "0"


def _dtype_name(dtype: torch.dtype) -> str:
    """The name safetensors gives a dtype: torch.float32 -> "F32"."""
    names = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64", torch.int32: "I32", torch.int64: "I64",
             torch.bool: "BOOL", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
    return names[dtype]


def checkpoint_name(step: int) -> str:
    """checkpoint_name(300) == "step-00000300": names sort as their steps do."""
    return f"{_PREFIX}{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints under `folder`, oldest first."""
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if path.is_dir() and path.name[len(_PREFIX):].isdigit())


def keep_newest(folder: Path, count: int) -> None:
    """Delete all but the `count` newest checkpoints under `folder`."""
    for path in list_checkpoints(folder)[:-count]:
        shutil.rmtree(path)


def sha256(file: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def write_atomically(file: Path, text: str) -> None:
    """Replace `file` by `text` so that a reader, or a crash, sees the old contents or the new ones and nothing between."""
    partial = file.with_name(f".{file.name}.partial")
    try:
        with partial.open("w") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(partial, file)
        _sync(file.parent)
    finally:
        partial.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Make a rename inside `folder` durable (POSIX; elsewhere a folder cannot be opened, and the rename stands on its own)."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
