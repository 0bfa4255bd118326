"""The training text as bytes: which files, which of them are held out, and which windows each step sees."""
from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..arguments import check_readable_file

VOCAB_SIZE = 256                 # one token a byte
MAX_BYTES = 256 * 2**20          # files beyond this total are left out, and the corpus says so
MAX_FILE_BYTES = 8 * MAX_BYTES   # one file alone may be larger than that, up to what a usual machine's memory holds several times
HELD_OUT_EVERY = 20              # every 20th file is validation text
HELD_OUT_TAIL = 10               # with fewer files than that: the last tenth of the bytes is
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Text as uint8 tensors. name says where it came from; num_files and left_out count files used and files beyond MAX_BYTES."""

    name: str
    train: Tensor
    validation: Tensor
    num_files: int
    left_out: int = 0

    @property
    def digest(self) -> str:
        """SHA-256 of training and validation bytes: what a resumed run compares."""
        hasher = hashlib.sha256(self.train.numpy().data)
        hasher.update(b"|")
        hasher.update(self.validation.numpy().data)
        return hasher.hexdigest()


def load_corpus(path: str | os.PathLike[str] | None = None) -> Corpus:
    """The text at `path` (a file, or a folder searched recursively), or the running Python's own standard library for None.

    Files are taken in the order of their relative paths, hidden ones skipped; in a folder, so are files that hold a zero byte (not text).
    A folder's devices, pipes and broken links are skipped too. Raises ValueError naming `data` for a path that does not exist, cannot be read,
    is empty, is not text, has more than MAX_FILE_BYTES, or is a device or a pipe: text is read more than once, and must end.
    """
    if path is None:
        return _load_files("standard library", *_standard_library())
    root = check_readable_file("data", path)
    name = str(path)
    if root.is_dir():
        found = sorted(file for file in root.rglob("*") if file.is_file() and not any(p.startswith(".") for p in file.relative_to(root).parts))
        if not found:
            raise ValueError(f"data={name!r} must hold at least one file of text, found 0")
        return _load_files(name, root, found)
    if not root.exists():
        raise ValueError(f"data={name!r} does not exist; give a file or folder of text")
    return _load_files(name, root.parent, [root])


def _standard_library() -> tuple[Path, list[Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in root.rglob("*.py") if not _SKIPPED_FOLDERS.intersection(file.relative_to(root).parts[:-1])]
    if not files:
        raise ValueError(f"data=None needs the standard library's source files, found 0 in {str(root)!r}; give a file or folder of text")
    return root, files


def _load_files(name: str, root: Path, files: Sequence[Path]) -> Corpus:
    ordered = sorted(files, key=lambda file: file.relative_to(root).as_posix())
    texts: list[bytes] = []
    total = left_out = 0
    for file in ordered:
        try:
            if total + file.stat().st_size > MAX_BYTES and len(ordered) > 1:
                left_out += 1
                continue
            with file.open("rb") as opened:              # a growing file, or one whose size the system does not know, ends here all the same
                text = opened.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise ValueError(f"data={name!r} cannot be read: {error.strerror or error}: {str(file)!r}") from None
        if len(text) > MAX_FILE_BYTES:
            raise ValueError(f"data={name!r} must have at most {MAX_FILE_BYTES:,} bytes in a file: {str(file)!r} has more")
        if b"\0" in text:
            if len(ordered) == 1:
                raise ValueError(f"data={name!r} must be text, found a zero byte at offset {text.index(0)}")
            continue
        if text:
            texts.append(text)
            total += len(text)
    if total == 0:
        raise ValueError(f"data={name!r} must hold text, found 0 bytes in {len(ordered)} file(s)")
    if len(texts) >= HELD_OUT_EVERY:
        train = b"".join(text for i, text in enumerate(texts) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1)
        validation = b"".join(texts[HELD_OUT_EVERY - 1::HELD_OUT_EVERY])
    else:
        joined = b"".join(texts)
        cut = len(joined) - len(joined) // HELD_OUT_TAIL
        train, validation = joined[:cut], joined[cut:]
    return Corpus(name, _as_tensor(train), _as_tensor(validation), len(texts), left_out)


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def check_length(corpus: Corpus, seq_len: int) -> None:
    """Raise ValueError unless both parts of the corpus hold at least one window of seq_len + 1 bytes."""
    for part, text in (("training", corpus.train), ("validation", corpus.validation)):
        if text.numel() < seq_len + 1:
            raise ValueError(f"data={corpus.name!r} holds {text.numel()} bytes of {part} text, at least seq_len + 1 = {seq_len + 1} are needed")


def training_windows(corpus: Corpus, step: int, batch_size: int, seq_len: int, seed: int) -> Tensor:
    """The windows of one step, (batch_size, seq_len + 1) int64: position i predicts position i + 1.

    A function of (seed, step) alone, so that a resumed run, and any number of ranks, sees the same data in the same order.
    """
    key = hashlib.sha256(f"{seed}/{step}".encode()).digest()[:4]       # torch's CPU generator uses 32 bits of its seed
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))
    starts = torch.randint(corpus.train.numel() - seq_len, (batch_size,), generator=generator)
    return corpus.train[starts.unsqueeze(1) + torch.arange(seq_len + 1)].to(torch.int64)


def validation_windows(corpus: Corpus, seq_len: int, max_tokens: int) -> Tensor:
    """Non-overlapping windows spread evenly over the validation text, (n, seq_len + 1) int64, with n * seq_len <= max_tokens (n >= 1)."""
    available = (corpus.validation.numel() - 1) // seq_len
    n = max(1, min(available, max_tokens // seq_len))
    starts = torch.arange(n) * available // n * seq_len
    return corpus.validation[starts.unsqueeze(1) + torch.arange(seq_len + 1)].to(torch.int64)


def bigram_loss(corpus: Corpus, windows: Tensor, smoothing: float = 1.0) -> float:
    """Mean negative log likelihood, nats a byte, that a bigram model of the training text gives the targets of `windows`.

    P(b | a) = (count(a, b) + smoothing) / (count(a) + 256 * smoothing). windows (n, S + 1) int64: every position but the first is a target.
    """
    train = corpus.train.to(torch.int64)
    pairs = torch.bincount(train[:-1] * VOCAB_SIZE + train[1:], minlength=VOCAB_SIZE**2).view(VOCAB_SIZE, VOCAB_SIZE).to(torch.float64)
    log_p = ((pairs + smoothing) / (pairs.sum(1, keepdim=True) + VOCAB_SIZE * smoothing)).log()
    return -log_p[windows[:, :-1], windows[:, 1:]].mean().item()
