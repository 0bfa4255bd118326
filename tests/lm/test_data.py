"""The corpus: which text, which of it is held out, which windows a step sees, and the bigram model's loss."""
from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from pathlib import Path

import pytest
import torch

from mok.lm import data
from mok.lm.data import Corpus, bigram_loss, check_length, load_corpus, training_windows, validation_windows


def corpus_of(train: bytes, validation: bytes) -> Corpus:
    return Corpus("test", torch.tensor(list(train), dtype=torch.uint8), torch.tensor(list(validation), dtype=torch.uint8), 1)


def test_bigram_loss_equals_counting_by_hand():
    train = b"the cat sat on the mat; the rat sat" * 3
    validation = b"that cat, the zebra."                       # has pairs and single bytes that the training text lacks
    corpus = corpus_of(train, validation)
    windows = validation_windows(corpus, 6, max_tokens=10**6)   # 3 windows of 6 targets
    pairs, firsts = Counter(itertools.pairwise(train)), Counter(train[:-1])
    expected = []
    for start in (0, 6, 12):
        for a, b in itertools.pairwise(validation[start:start + 7]):
            expected.append(-math.log((pairs[a, b] + 1) / (firsts[a] + 256)))
    assert windows.shape == (3, 7)
    assert bigram_loss(corpus, windows) == pytest.approx(sum(expected) / len(expected), rel=1e-12)


def test_every_twentieth_file_is_held_out_in_path_order(tmp_path: Path):
    for i in range(41):
        (tmp_path / f"{i:02d}").mkdir()
        (tmp_path / f"{i:02d}" / "text").write_bytes(f"<{i:02d}>".encode())
    corpus = load_corpus(tmp_path)
    assert bytes(corpus.validation.tolist()) == b"<19><39>"
    assert bytes(corpus.train.tolist()) == "".join(f"<{i:02d}>" for i in range(41) if i not in (19, 39)).encode()
    assert corpus.num_files == 41


def test_few_files_hold_out_the_last_tenth(tmp_path: Path):
    file = tmp_path / "text"
    file.write_bytes(b"0123456789" * 10)
    corpus = load_corpus(file)
    assert (corpus.train.numel(), corpus.validation.numel()) == (90, 10)
    assert bytes(corpus.train.tolist() + corpus.validation.tolist()) == file.read_bytes()


def test_default_corpus_is_the_standard_library_without_its_tests():
    corpus = load_corpus()
    text = bytes(corpus.train.tolist() + corpus.validation.tolist())
    assert corpus.train.numel() > 20 * 10**5 and corpus.validation.numel() > 10**5
    assert b"class JSONDecoder" in text and b"def shuffle(self" in text        # json/decoder.py, random.py
    assert b"import pytest" not in text and b"class TestCase_TestCreate" not in text
    assert load_corpus().digest == corpus.digest


def test_digest_sees_every_byte_and_the_split():
    a = corpus_of(b"abcd", b"ef")
    assert a.digest == corpus_of(b"abcd", b"ef").digest
    assert len({a.digest, corpus_of(b"abcd", b"eg").digest, corpus_of(b"abce", b"ef").digest, corpus_of(b"abcde", b"f").digest}) == 4


def test_training_windows_depend_on_seed_and_step_alone():
    corpus = corpus_of(bytes(range(256)) * 8, b"")
    windows = training_windows(corpus, step=3, batch_size=5, seq_len=7, seed=11)
    assert windows.shape == (5, 8) and windows.dtype == torch.int64
    assert torch.equal((windows[:, 1:] - windows[:, :-1]) % 256, torch.ones(5, 7, dtype=torch.int64))    # consecutive text
    assert torch.equal(windows, training_windows(corpus, 3, 5, 7, 11))
    assert not torch.equal(windows, training_windows(corpus, 4, 5, 7, 11))
    assert not torch.equal(windows, training_windows(corpus, 3, 5, 7, 12))


def test_training_windows_reach_both_ends_and_not_beyond():
    corpus = corpus_of(b"abcde", b"")
    starts = {int(row[0]) for step in range(50) for row in training_windows(corpus, step, 4, 3, 0)}
    assert starts == {ord("a"), ord("b")}                       # 5 bytes hold exactly two windows of 3 + 1


def test_validation_windows_are_disjoint_targets_spread_over_the_text():
    corpus = corpus_of(b"", bytes(range(250)))
    windows = validation_windows(corpus, 10, max_tokens=10**6)
    assert windows[:, 1:].flatten().tolist() == list(range(1, 241))
    few = validation_windows(corpus, 10, max_tokens=45)
    assert few.shape == (4, 11) and few[:, 0].tolist() == [0, 60, 120, 180]


def _file(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(("make", "words"), [
    (lambda p: p / "missing", ["data=", "does not exist"]),
    (lambda p: _file(p / "empty", b""), ["data=", "found 0 bytes"]),
    (lambda p: p, ["data=", "at least one file", "found 0"]),
    (lambda p: _file(p / "binary", b"ab\0c"), ["data=", "zero byte at offset 2"]),
])
def test_bad_corpus_names_data_and_what_is_wrong(tmp_path: Path, make, words):
    with pytest.raises(ValueError) as error:
        load_corpus(make(tmp_path))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_unreadable_file_is_a_value_error(tmp_path: Path, monkeypatch):
    (tmp_path / "a").write_bytes(b"text")

    def refuse(self, *mode):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"data=.*cannot be read: Permission denied"):
        load_corpus(tmp_path)


def test_what_may_never_end_is_refused_and_left_out(tmp_path: Path, monkeypatch):
    (tmp_path / "a").write_bytes(b"0123456789" * 10)
    os.mkfifo(tmp_path / "pipe")
    assert load_corpus(tmp_path).num_files == 1
    for name in ("/dev/zero", "/dev/null", str(tmp_path / "pipe")):
        with pytest.raises(ValueError, match=rf"data='{name}' must be a regular file"):
            load_corpus(name)
    monkeypatch.setattr(data, "MAX_FILE_BYTES", 99)
    with pytest.raises(ValueError, match=r"data=.* must have at most 99 bytes in a file: '.*a' has more"):
        load_corpus(tmp_path / "a")


def test_hidden_binary_and_surplus_files_are_left_out(tmp_path: Path, monkeypatch):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x").write_bytes(b"hidden")
    (tmp_path / "a.txt").write_bytes(b"visible")
    (tmp_path / "b.bin").write_bytes(b"\0\1\2")
    (tmp_path / "c.txt").write_bytes(b"more than the limit")
    monkeypatch.setattr(data, "MAX_BYTES", 12)
    corpus = load_corpus(tmp_path)
    assert bytes(corpus.train.tolist() + corpus.validation.tolist()) == b"visible"
    assert (corpus.num_files, corpus.left_out) == (1, 1)


def test_too_short_text_names_both_lengths():
    with pytest.raises(ValueError, match=r"data='test' holds 4 bytes of training text, at least seq_len \+ 1 = 9"):
        check_length(corpus_of(b"abcd", b"x" * 9), 8)
    with pytest.raises(ValueError, match=r"holds 8 bytes of validation text, at least seq_len \+ 1 = 9"):
        check_length(corpus_of(b"x" * 9, b"x" * 8), 8)
    check_length(corpus_of(b"x" * 9, b"x" * 9), 8)
