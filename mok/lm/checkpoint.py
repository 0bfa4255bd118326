"""Checkpoints: tensors as safetensors through torch.distributed.checkpoint, scalars as JSON beside them; nothing is ever unpickled.

A checkpoint is a folder: `*.safetensors` (parameters, buffers, optimizer moments by name) and `state.json` (step, settings, SHA-256 of each
file). It is written under another name and renamed when complete, so a folder that has its final name is whole.
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
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

FORMAT = 1
STATE_FILE = "state.json"
_PREFIX = "step-"


def save_checkpoint(folder: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write `tensors` and the JSON-able `state` to `folder`, which must not exist; it appears complete or not at all."""
    if folder.exists():
        raise ValueError(f"checkpoint={str(folder)!r} exists and must not be overwritten")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with _single_process_is_meant():
            whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
            dcp.save(whole, storage_writer=HuggingFaceStorageWriter(str(partial)), no_dist=True)
        files = {file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in sorted(partial.glob("*.safetensors"))}
        write_atomically(partial / STATE_FILE, json.dumps({"format": FORMAT, **state, "files": files}, indent=1) + "\n")
        os.replace(partial, folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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


def load_checkpoint(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Fill `tensors` in place from `folder` and return its state. Nothing is changed unless everything fits.

    ValueError naming `checkpoint` and both quantities for a changed or missing file, a missing or surplus tensor, another shape or dtype.
    """
    state = read_state(folder)
    _check_files(folder, state.get("files"))
    _check_tensors(folder, tensors)
    # Read beside, then copy: a failure in mid-read leaves the model as it was.
    fresh = {name: torch.empty_like(tensor, memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    with _single_process_is_meant():
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


def _check_files(folder: Path, recorded: Any) -> None:
    found = sorted(file.name for file in folder.glob("*.safetensors"))
    if not isinstance(recorded, dict) or sorted(recorded) != found:
        raise ValueError(f"checkpoint={str(folder)!r} is corrupt: {STATE_FILE} lists {sorted(recorded or [])}, the folder holds {found}")
    for name, entry in recorded.items():
        size, digest = (folder / name).stat().st_size, sha256(folder / name)
        if size != entry["bytes"]:
            raise ValueError(f"checkpoint={str(folder)!r} is corrupt: {name} has {size} bytes, {entry['bytes']} were written")
        if digest != entry["sha256"]:
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
             torch.bool: "BOOL", torch.uint8: "U8"}
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
