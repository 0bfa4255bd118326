"""Digests: the definition against plain Python integers, every bit, any shard, any layout, any thread count."""
from __future__ import annotations

import itertools
import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mok import determinism
from mok.determinism import CHUNK_WORDS, Digest, DigestBatch, combine_digests, digest

WORD = 2**64
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
          torch.float8_e4m3fn, torch.complex64)


# --- the definition once more, one word at a time in Python's unbounded integers -------------------------------------------------------------

def slow_mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    return z ^ (z >> 31)


def slow_digest(tensor: torch.Tensor, first_row: int = 0, chunk_words: int = CHUNK_WORDS) -> str:
    golden = 0x9E3779B97F4A7C15
    keys = [[slow_mix((seed + golden * (i + 1)) % WORD) | 1 for i in range(chunk_words)] for seed in (0x243F6A8885A308D3, 0x13198A2E03707344)]
    rows = [tensor] if tensor.dim() == 0 else [tensor[i] for i in range(tensor.shape[0])]
    lanes = [0, 0]
    for r, row in enumerate(rows, start=first_row):
        raw = bytes(row.contiguous().reshape(-1).view(torch.uint8).tolist()) if row.numel() else b""
        raw += b"\0" * (-len(raw) % 8)
        words = list(struct.unpack(f"<{len(raw) // 8}q", raw))
        if not words:
            continue
        m = math.ceil(len(words) / chunk_words)
        length = math.ceil(len(words) / m)
        for c in range(m):
            chunk = words[c * length:(c + 1) * length]
            s1 = sum(w * k for w, k in zip(chunk, keys[0])) % WORD
            s2 = sum((w >> 32) * k for w, k in zip(chunk, keys[1])) % WORD
            a = slow_mix((s1 + golden * (r * m + c + 1)) % WORD)
            lanes[0] = (lanes[0] + a) % WORD
            lanes[1] = (lanes[1] + slow_mix(s2 ^ a)) % WORD
    name = str(tensor.dtype).removeprefix("torch.")
    return f"{name}[{','.join(str(s) for s in tensor.shape)}]:{lanes[0]:016x}{lanes[1]:016x}"


def random_bytes_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Every bit random, NaNs and all; of bool only 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 7), max_size=4), st.integers(0, 2**31), st.integers(0, 2**40))
def test_equals_the_definition(dtype, shape, seed, first_row):
    tensor = random_bytes_tensor(dtype, tuple(shape), seed)
    assert str(digest(tensor, first_row=first_row)) == slow_digest(tensor, first_row)


@pytest.mark.parametrize("words", [CHUNK_WORDS - 1, CHUNK_WORDS, CHUNK_WORDS + 1, 2 * CHUNK_WORDS, 2 * CHUNK_WORDS + 3])
def test_equals_the_definition_where_a_row_has_several_chunks(words):
    tensor = random_bytes_tensor(torch.int32, (3, 2 * words - 1), words)     # an odd number of half words: the last word is padded too
    assert str(digest(tensor)) == slow_digest(tensor)


def test_equals_the_definition_where_a_tensor_takes_several_blocks(monkeypatch):
    monkeypatch.setattr(determinism, "_CPU_BLOCK", 64)
    tensor = random_bytes_tensor(torch.float32, (37, 30), 1)                 # 4 rows of 15 words a block, the last block partly filled
    assert str(digest(tensor)) == slow_digest(tensor)


def test_other_devices_compute_the_same(monkeypatch):
    """The code that runs on a GPU, run here; the GPU test below runs it there."""
    tensor = random_bytes_tensor(torch.bfloat16, (5, 11, 613), 2)
    expected = digest(tensor)
    monkeypatch.setattr(determinism, "_block_sums_mv", lambda *arguments: determinism._block_sums(*arguments[:4]))
    assert digest(tensor) == expected


@pytest.mark.gpu
def test_a_gpu_gives_the_digest_of_a_cpu():
    cases = [(torch.float32, (64, 512, 96)), (torch.bfloat16, (4097, 33)), (torch.int32, (9, 2 * CHUNK_WORDS + 5)), (torch.bool, (77,)),
             (torch.int64, ()), (torch.float32, (0, 4)), (torch.float32, (20_000_000,))]          # the last one takes several blocks
    for i, (dtype, shape) in enumerate(cases):
        tensor = random_bytes_tensor(dtype, shape, i)
        assert digest(tensor.cuda(), first_row=i) == digest(tensor, first_row=i)
    batch = DigestBatch()
    batch.add_all([torch.arange(5), torch.arange(7).cuda()])                  # a batch still on the CPU beside a model on the GPU
    assert batch.finish() == [digest(torch.arange(5)), digest(torch.arange(7))]


# --- what a digest must see ------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.bool])
def test_every_flipped_bit_changes_it(dtype):
    tensor = random_bytes_tensor(dtype, (3, 5), 3)
    raw = tensor.view(torch.uint8)
    seen = {str(digest(tensor))}
    for i in range(raw.numel()):
        for bit in range(8):
            raw.view(-1)[i] ^= 1 << bit
            seen.add(str(digest(tensor)))
            raw.view(-1)[i] ^= 1 << bit
    assert len(seen) == 1 + 8 * raw.numel()


def test_every_flipped_bit_changes_the_first_lane():
    """What the docstring promises without a probability, at the first, the last and some other word of a chunk, and of a bool."""
    tensor = random_bytes_tensor(torch.int64, (2 * CHUNK_WORDS,), 4).view(1, -1)
    before = digest(tensor).lanes[0]
    for i in (0, 1, 777, CHUNK_WORDS - 1, CHUNK_WORDS, 2 * CHUNK_WORDS - 1):
        for bit in range(64):
            mask = (1 << bit) - (2**64 if bit == 63 else 0)
            tensor[0, i] ^= mask
            assert digest(tensor).lanes[0] != before
            tensor[0, i] ^= mask
    flags = torch.zeros(19, dtype=torch.bool)
    digests = {digest(flags)}
    for i in range(19):
        flags[i] = True
        digests.add(digest(flags))
        flags[i] = False
    assert len(digests) == 20


def test_flipping_the_signs_of_any_two_elements_changes_it():
    """Two changes of a word's top bit cancel in a sum with odd keys: the second sum is there for them."""
    tensor = random_bytes_tensor(torch.float32, (1, 64), 5)
    seen = {digest(tensor)}
    for i in range(64):
        for j in range(i):
            changed = tensor.clone()
            changed[0, [i, j]] *= -1
            seen.add(digest(changed))
    assert len(seen) == 1 + 64 * 63 // 2


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]), st.sampled_from([(2, 9), (18,), (3, 2, 3)]), st.data())
def test_swapping_two_elements_changes_it(dtype, shape, data):
    tensor = random_bytes_tensor(dtype, shape, data.draw(st.integers(0, 2**31)))
    flat = tensor.view(-1)
    i, j = data.draw(st.lists(st.integers(0, flat.numel() - 1), min_size=2, max_size=2, unique=True))
    swapped = tensor.clone()
    swapped.view(-1)[i], swapped.view(-1)[j] = flat[j].clone(), flat[i].clone()
    same = torch.equal(swapped.view(torch.uint8), tensor.view(torch.uint8))
    assert (digest(swapped) == digest(tensor)) == same


def test_swapping_rows_and_moving_a_row_change_it():
    tensor = torch.randn(4, 6)
    assert digest(tensor[[1, 0, 2, 3]]) != digest(tensor)
    assert digest(tensor, first_row=1).lanes != digest(tensor).lanes


def test_zeros_nans_dtype_and_shape_are_told_apart():
    zero = torch.zeros(2, 4)
    negative = zero.clone()
    negative[1, 3] = -0.0
    nans = torch.tensor([0x7FC00000, 0x7FC00001, -0x400000], dtype=torch.int32).view(torch.float32)
    assert nans.isnan().all()
    different = [zero, negative, zero.int(), zero.view(4, 2), zero.view(8), zero.view(1, 8), zero.view(2, 2, 2), torch.zeros(2, 5), torch.zeros(3, 4),
                 torch.zeros(()), torch.zeros(1), torch.zeros(0), torch.zeros(0, 4), torch.zeros(4, 0), *nans]
    assert len({digest(t) for t in different}) == len(different)
    assert digest(zero).lanes != digest(zero.view(8)).lanes != (0, 0)         # not by the printed shape alone: zeros have weight too


# --- what it must not see --------------------------------------------------------------------------------------------------------------------

@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9), st.sampled_from([torch.bfloat16, torch.float32, torch.bool]), st.sampled_from([(), (3,), (5, 7), (2, 2 * CHUNK_WORDS + 1)]),
       st.lists(st.integers(0, 9), max_size=4), st.randoms())
def test_shards_add_up_to_the_whole(rows, dtype, inner, cuts, random):
    """Experts or tokens over any number of ranks, some of them empty."""
    whole = random_bytes_tensor(dtype, (rows, *inner), rows)
    edges = [0, *sorted(min(cut, rows) for cut in cuts), rows]
    shards = [digest(whole[a:b], first_row=a) for a, b in itertools.pairwise(edges)]
    random.shuffle(shards)
    assert combine_digests(shards) == digest(whole)


def test_layout_and_alignment_do_not_matter():
    base = torch.randn(6, 10, 8)
    for view in (base.transpose(0, 1), base[:, 1:, 1:6],
                 base.flatten()[1:7], base.flatten()[1:13].view(2, 6), base[::2], base[..., 3], base[:0], base[:, :1].expand(6, 4, 8)):
        assert digest(view) == digest(view.clone(memory_format=torch.contiguous_format))
    conjugate = torch.randn(4, 4, dtype=torch.complex64).conj()
    assert digest(conjugate) == digest(conjugate.resolve_conj())


def test_threads_do_not_matter():
    tensor = torch.randn(300, 4001)
    before = torch.get_num_threads()
    try:
        digests = set()
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            digests.add(digest(tensor))
    finally:
        torch.set_num_threads(before)
    assert len(digests) == 1


def test_autocast_and_autograd_do_not_matter():
    weight = torch.nn.Parameter(torch.randn(4, 6))
    with torch.autocast("cpu", torch.bfloat16):
        inside = digest(weight)
    assert inside == digest(weight.detach())


def test_a_batch_gives_each_tensors_own_digest_and_keeps_no_reference():
    tensors = [torch.randn(3, 5), torch.zeros(0, 2), torch.randn(()), torch.randn(2, 9000), torch.zeros(7, dtype=torch.bool)]
    expected = [digest(t, first_row=i) for i, t in enumerate(tensors)]
    batch = DigestBatch()
    for i, tensor in enumerate(tensors):
        batch.add(tensor, first_row=i)
        tensor.zero_()
    assert batch.finish() == expected
    assert len(batch) == 0 and batch.finish() == []


def test_shards_that_do_not_belong_together_are_refused():
    a = digest(torch.zeros(2, 3))
    for other in (digest(torch.zeros(2, 4)), digest(torch.zeros(2, 3).double()), digest(torch.zeros(()))):
        with pytest.raises(ValueError, match="shards must agree"):
            combine_digests([a, other])
    with pytest.raises(ValueError, match="at least one"):
        combine_digests([])
    assert combine_digests([a]) == Digest("float32", (2, 3), a.lanes)
