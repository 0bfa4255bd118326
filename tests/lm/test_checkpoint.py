"""Checkpoints: exact, complete or absent, checked against what was written, and never unpickled."""
from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from mok.lm import checkpoint
from mok.lm.checkpoint import checkpoint_name, keep_newest, list_checkpoints, load_checkpoint, read_state, save_checkpoint, write_atomically


def example() -> dict[str, torch.Tensor]:
    return {"w": torch.randn(3, 5), "half": torch.randn(4).bfloat16(), "wide": torch.randn(2, 2, dtype=torch.float64), "count": torch.tensor(7),
            "transposed": torch.randn(6, 2).T, "none": torch.empty(0, 3)}


def zeros_like(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def test_round_trip_is_exact_and_unpickles_nothing(tmp_path: Path, monkeypatch):
    saved = example()
    save_checkpoint(tmp_path / "c" / "step-1", saved, {"step": 1})

    def refuse(*args, **kwargs):
        raise AssertionError("something was unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    loaded = zeros_like(saved)
    assert load_checkpoint(tmp_path / "c" / "step-1", loaded)["step"] == 1
    for name, tensor in saved.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor), name
    assert sorted(p.suffix for p in (tmp_path / "c" / "step-1").iterdir()) == [".json", ".json", ".safetensors"]


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint, "sha256", fail)              # after the tensors were written, before the rename
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path / "step-1", example(), {"step": 1})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), MemoryError()], ids=repr)
def test_what_torch_wraps_while_writing_is_raised_itself(tmp_path: Path, monkeypatch, error):
    """Callers know a full disk and Ctrl-C, not torch.distributed.checkpoint's exception around them; what else it wraps stays wrapped."""
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(checkpoint._OwnFile, "write_data", fail)
    with pytest.raises(type(error)) as caught:
        save_checkpoint(tmp_path / "step-1", example(), {"step": 1})
    assert type(caught.value) is type(error) and list(tmp_path.iterdir()) == []
    error = KeyError("another")
    with pytest.raises(checkpoint.CheckpointException):
        save_checkpoint(tmp_path / "step-1", example(), {"step": 1})


def test_an_existing_checkpoint_is_not_overwritten(tmp_path: Path):
    save_checkpoint(tmp_path / "step-1", example(), {"step": 1})
    before = {p.name: p.read_bytes() for p in (tmp_path / "step-1").iterdir()}
    with pytest.raises(ValueError, match="must not be overwritten"):
        save_checkpoint(tmp_path / "step-1", example(), {"step": 2})
    assert before == {p.name: p.read_bytes() for p in (tmp_path / "step-1").iterdir()}


def _flip_bit(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


def _cut(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-4])


def _edit_state(folder: Path, **changes) -> None:
    file = folder / checkpoint.STATE_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(("damage", "words"), [
    (_flip_bit, ["is corrupt", "has SHA-256", "was written"]),
    (_cut, ["is corrupt", "bytes", "were written"]),
    (lambda f: next(f.glob("*.safetensors")).unlink(), ["is corrupt", "lists ['model-00001-of-00001.safetensors']", "holds []"]),
    (lambda f: (f / "state.json").write_text("{"), ["is corrupt", "not JSON"]),
    (lambda f: (f / "state.json").unlink(), ["cannot be read", "state.json"]),
    (lambda f: _edit_state(f, format=99), ["format 99", "reads format 1"]),
    (lambda f: _edit_state(f, files={}), ["is corrupt", "lists []"]),
])
def test_damage_is_named_and_changes_nothing(tmp_path: Path, damage, words):
    folder = tmp_path / "step-1"
    saved = example()
    save_checkpoint(folder, saved, {"step": 1})
    damage(folder)
    target = zeros_like(saved)
    with pytest.raises(ValueError) as error:
        load_checkpoint(folder, target)
    assert all(word in str(error.value) for word in ["checkpoint=", *words]), str(error.value)
    assert all(torch.equal(tensor, torch.zeros_like(tensor)) for tensor in target.values())


def _changed(**changes) -> dict[str, torch.Tensor]:
    tensors = {**example(), **changes}
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items() if tensor is not None}


@pytest.mark.parametrize(("changes", "words"), [
    ({"w": None}, ["holds 6 tensors, the model has 5", "surplus 1 (w)"]),
    ({"new": torch.zeros(1)}, ["holds 6 tensors, the model has 7", "missing 1 (new)"]),
    ({"w": torch.zeros(5, 3)}, ["holds w as F32 [3, 5], the model has F32 [5, 3]"]),
    ({"w": torch.zeros(3, 5).bfloat16()}, ["holds w as F32 [3, 5], the model has BF16 [3, 5]"]),
])
def test_mismatch_names_both_quantities_and_changes_nothing(tmp_path: Path, changes, words):
    save_checkpoint(tmp_path / "step-1", example(), {"step": 1})
    target = _changed(**changes)
    with pytest.raises(ValueError) as error:
        load_checkpoint(tmp_path / "step-1", target)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert all(torch.equal(tensor, torch.zeros_like(tensor)) for tensor in target.values())


def test_only_complete_checkpoints_are_listed_and_old_ones_go(tmp_path: Path):
    for step in (5, 100, 20):
        save_checkpoint(tmp_path / checkpoint_name(step), {"w": torch.zeros(1)}, {"step": step})
    (tmp_path / ".step-00000200.partial").mkdir()
    (tmp_path / "step-notes").mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000005", "step-00000020", "step-00000100"]
    keep_newest(tmp_path, 2)
    assert [read_state(path)["step"] for path in list_checkpoints(tmp_path)] == [20, 100]


def test_write_atomically_keeps_the_old_text_when_it_fails(tmp_path: Path, monkeypatch):
    file = tmp_path / "settings.json"
    write_atomically(file, "old")

    def fail(*args):
        raise OSError("no rename")

    monkeypatch.setattr(checkpoint.os, "replace", fail)
    with pytest.raises(OSError, match="no rename"):
        write_atomically(file, "new")
    assert file.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["settings.json"]
