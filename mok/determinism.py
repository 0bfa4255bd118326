"""Digests: a fast fingerprint of a tensor's bytes that does not depend on the device, the threads or how rows are sharded over ranks.

Definition, in arithmetic mod 2^64. A tensor is its rows along dim 0 (a 0-d tensor is one row). A row's bytes, little-endian and padded with
zeros, are n = ceil(bytes / 8) words, taken in m = ceil(n / 1024) chunks of L = ceil(n / m) words, the last padded with zero words. A chunk
with words w_i, in row r of the whole tensor, chunk c of that row:

    s1 = sum_i w_i * key1_i                        a = mix(s1 + GOLDEN * (r * m + c + 1))
    s2 = sum_i (w_i >> 32) * key2_i                b = mix(s2 ^ a)                  (>> keeps the sign of the word as a signed integer)

The digest is the dtype, the shape and the two sums of a and of b over all chunks of all rows. mix is splitmix64's finaliser (Steele, Lea and
Flood 2014, "Fast splittable pseudorandom number generators"), a bijection; key1_i and key2_i are fixed odd words.

What follows: sums of integers have no order, so threads and devices cannot change them; rows are keyed by their global number, so digests of
row shards (experts, tokens) add up to the digest of the whole. A change inside one word, so any single flipped bit, always changes the first
sum: the key is odd and mix is a bijection. A change of several words by differences d_i is missed by a sum with a chance of 2^-(64 - z), where
z <= 31 zero bits end every d_i: s1 sees changes of lower halves so, s2 those of upper halves. That is 2^-64 and less where rounding differs,
and 2^-33 at the worst: sign bits alone. It is no cryptographic hash: who wants to build two tensors with one digest can.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from .arguments import check_integer, check_tensor, check_type
from .runtime import Scratch, Task, runtime

CHUNK_WORDS = 1024                  # two key tables of 8 KiB stay in a core's nearest cache: 12 % faster than 32 KiB on an EPYC
GOLDEN = 0x9E3779B97F4A7C15
KEY_SEEDS = (0x243F6A8885A308D3, 0x13198A2E03707344)      # the first fractional bits of pi
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_MIX_LAST_SHIFT = 31
WORD = 2**64
_MOST_ROWS = 2**40                  # of a whole tensor: times the chunks of a row it stays far from int64's end
# Words handled at a time. CPU: the temporary of 1 MiB stays in L2. Elsewhere: few launches, at most 128 MiB of scratch.
_CPU_BLOCK, _DEVICE_BLOCK = 2**17, 2**24


@dataclass(frozen=True)
class Digest:
    """Fingerprint of one tensor. dtype like "float32"; shape of the whole tensor; lanes: two sums mod 2^64, each in 0..2^64-1."""

    dtype: str
    shape: tuple[int, ...]
    lanes: tuple[int, int]

    def __str__(self) -> str:
        """float32[8,512,256]:00112233445566778899aabbccddeeff"""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]:{self.lanes[0]:016x}{self.lanes[1]:016x}"


def digest(tensor: Tensor, *, first_row: int = 0) -> Digest:
    """The digest of `tensor`: any dtype, device and strides. Two of its tensors have one digest where dtype, shape and every byte are equal.

    first_row: number of this tensor's first row in the whole tensor that it is a shard of along dim 0 (global expert id, global token).
    Raises ValueError naming a wrong argument.
    """
    batch = DigestBatch()
    batch.add(tensor, first_row=first_row)
    return batch.finish()[0]


def combine_digests(shards: Iterable[Digest]) -> Digest:
    """The digest of the whole from those of its shards along dim 0, each made with its own first_row, in any order.

    Raises ValueError where there are none, or they differ in dtype or in a dimension other than the first.
    """
    check_type("shards", shards, Iterable, "digests")
    shards = list(shards)
    if not shards:
        raise ValueError("shards=[] must hold at least one digest")
    first = shards[0]
    for i, shard in enumerate(shards):
        check_type(f"shards[{i}]", shard, Digest, "a digest")
    for shard in shards:
        if not shard.shape or (shard.dtype, shard.shape[1:]) != (first.dtype, first.shape[1:]):
            raise ValueError(f"shards must agree in dtype and all dimensions but the first, found {first} and {shard}")
    lanes = (sum(s.lanes[0] for s in shards) % WORD, sum(s.lanes[1] for s in shards) % WORD)
    return Digest(first.dtype, (sum(s.shape[0] for s in shards), *first.shape[1:]), lanes)


@dataclass
class DigestBatch:
    """Digests of many tensors, with one transfer from the device at the end. The tensors may be on several; the last one's does the rest.

    `add` reads the tensor at once and keeps no reference, so the tensor may be overwritten or freed right afterwards.
    """

    _sums: list[Tensor] = field(default_factory=list)            # (2, chunks) of each tensor
    _extents: list[tuple[int, int]] = field(default_factory=list)       # (first row, chunks of one row) of each tensor
    _heads: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._heads)

    def add(self, tensor: Tensor, *, first_row: int = 0) -> None:
        """Start the digest of one more tensor; no synchronisation."""
        self.add_all([tensor], [first_row])

    @torch.no_grad()
    def add_all(self, tensors: Sequence[Tensor], first_rows: Sequence[int] | None = None) -> None:
        """`add` of each of them; on a CPU their blocks share the tile pool's threads."""
        tasks: list[Task] = []
        for tensor, first_row in zip(tensors, first_rows or [0] * len(tensors), strict=True):
            check_tensor("tensor", tensor)
            if tensor.is_meta:
                raise ValueError("tensor.device=meta must be a device that holds its bytes")
            check_integer("first_row", first_row, 0, _MOST_ROWS)
        for tensor, first_row in zip(tensors, first_rows or [0] * len(tensors), strict=True):
            sums, chunks_per_row = _start_sums(tensor.detach(), tasks)
            self._sums.append(sums)
            self._extents.append((first_row, chunks_per_row))
            self._heads.append((str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
        runtime.tiles.run(tasks)

    def rows(self) -> list[int]:
        """Rows of each tensor that was added; 0 of a 0-d tensor, which is never a shard."""
        return [shape[0] if shape else 0 for _, shape in self._heads]

    @torch.no_grad()
    def finish(self, rows_before: Sequence[int] | None = None) -> list[Digest]:
        """The digests in the order of `add`; the batch is empty afterwards.

        rows_before: for each tensor, added to its first_row, where that becomes known only now.
        """
        if not self._sums:
            return []
        device = self._sums[-1].device
        sums = torch.cat([chunk_sums.to(device) for chunk_sums in self._sums], dim=1)
        counts = torch.tensor([chunk_sums.shape[1] for chunk_sums in self._sums])
        before = rows_before or [0] * len(self._sums)
        starts = torch.tensor([(first + more) * chunks_per_row for (first, chunks_per_row), more in zip(self._extents, before, strict=True)])
        owner = torch.repeat_interleave(counts)                                          # which tensor each chunk is of
        position = torch.arange(1, sums.shape[1] + 1).add_((starts - counts.cumsum(0) + counts)[owner])
        a = mix(position.to(device).mul_(signed(GOLDEN)).add_(sums[0]))
        b = mix(sums[1] ^ a)
        lanes = torch.zeros(2, len(self._sums), dtype=torch.int64, device=device)
        lanes.index_add_(1, owner.to(device), torch.stack([a, b]))                       # integers: the order of these additions changes nothing
        pairs = [(int(x) % WORD, int(y) % WORD) for x, y in lanes.t().tolist()]
        heads, self._heads, self._sums, self._extents = self._heads, [], [], []
        return [Digest(dtype, shape, pair) for (dtype, shape), pair in zip(heads, pairs, strict=True)]


def mix(z: Tensor) -> Tensor:
    """splitmix64's finaliser of each int64 word, read as unsigned: a bijection in which every bit reaches every other. `z` itself is overwritten."""
    for shift, factor in _MIX:
        z ^= _shift_right(z, shift)
        z *= signed(factor)
    z ^= _shift_right(z, _MIX_LAST_SHIFT)
    return z


def _shift_right(z: Tensor, shift: int) -> Tensor:
    """Logical shift: torch's own fills in copies of the sign."""
    return (z >> shift).bitwise_and_(2**(64 - shift) - 1)


def signed(word: int) -> int:
    """The int64 with the bits of an unsigned word."""
    return word - WORD if word >= WORD // 2 else word


def _keys(device: torch.device, length: int) -> tuple[Tensor, Tensor]:
    """The first `length` words of both key tables: mix(seed + GOLDEN * (i + 1)), made odd."""
    name = ("digest keys", device, length)
    if name not in runtime.scratch:
        counter = torch.arange(1, length + 1, dtype=torch.int64, device=device) * signed(GOLDEN)
        runtime.scratch[name] = tuple(mix(counter + signed(seed)) | 1 for seed in KEY_SEEDS)
    return runtime.scratch[name]


def _words(tensor: Tensor) -> Tensor:
    """(rows, n) int64: each row's bytes, zero-padded to whole words. A view where the bytes allow it."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if tensor.numel() == 0:
        return torch.zeros(rows, 0, dtype=torch.int64, device=tensor.device)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    flat = tensor.reshape(rows, -1).contiguous()
    row_bytes = flat.shape[1] * flat.element_size()
    if row_bytes % 8 == 0 and flat.storage_offset() * flat.element_size() % 8 == 0:
        return flat.view(torch.int64)
    if row_bytes % 8 == 0:
        return flat.clone().view(torch.int64)
    return torch.nn.functional.pad(flat.view(torch.uint8), (0, -row_bytes % 8)).view(torch.int64)


def _start_sums(tensor: Tensor, tasks: list[Task]) -> tuple[Tensor, int]:
    """s1 and s2 of every chunk, row after row, (2, rows * m) int64; and m, the chunks of one row. On a CPU `tasks` gets the work that fills them."""
    words = _words(tensor)
    rows, n = words.shape
    if words.numel() == 0:
        return torch.zeros(2, 0, dtype=torch.int64, device=words.device), 0
    m = -(-n // CHUNK_WORDS)
    length = -(-n // m)
    if m * length != n:
        words = torch.nn.functional.pad(words, (0, m * length - n))
    chunks = words.view(rows * m, length)
    key1, key2 = _keys(words.device, length)
    sums = torch.empty(2, rows * m, dtype=torch.int64, device=words.device)
    on_cpu = words.device.type == "cpu"
    step = max(1, (_CPU_BLOCK if on_cpu else _DEVICE_BLOCK) // length)
    for start in range(0, rows * m, step):
        block, out = (chunks, sums) if step >= rows * m else (chunks[start:start + step], sums[:, start:start + step])
        if on_cpu:
            tasks.append(partial(_block_sums_mv, block, key1, key2, out))
        else:
            _block_sums(block, key1, key2, out)
    return sums, m


def _block_sums(chunks: Tensor, key1: Tensor, key2: Tensor, out: Tensor) -> None:
    """s1 and s2 of chunks (N, L) into out (2, N), on any device."""
    products = chunks >> 32
    torch.sum(products.mul_(key2), 1, out=out[1])
    torch.sum(torch.mul(chunks, key1, out=products), 1, out=out[0])


def _block_sums_mv(chunks: Tensor, key1: Tensor, key2: Tensor, out: Tensor, scratch: Scratch) -> None:
    """The same through integer matrix-vector products, which only CPUs have: see the figures in docs/determinism.md."""
    upper = scratch.like("digest", chunks)
    torch.mv(chunks, key1, out=out[0])
    torch.mv(torch.bitwise_right_shift(chunks, 32, out=upper), key2, out=out[1])
