"""Counters of the Hopper kernels: one control block for each (device, stream), one for each captured launch, and what a time-out reports.

A block is zeroed once, when it is made; afterwards launches keep it clean themselves (docs/kernels.md, rule 5). Two launches may share a block
only if they cannot run at once: launches of one stream. A captured launch gets a block of its own, cut from a reserve that was zeroed
beforehand, so that two graphs may be replayed at once and a replay holds one kernel and no memset.
"""
from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...fabric.process_group import FabricTimeout
from ...runtime import runtime
from .compat import current_stream

CONTROL_WORDS = 16            # equals sync.CONTROL_WORDS; words 3 to 6, 8 and 9 are written here
SET_HEADER = 16               # equals gemm.SET_HEADER
SPIN_LIMIT_S = 300.0          # longest wait of a kernel for another CTA; `set_spin_limit` shortens it in tests
RESERVE_BLOCKS = 64           # captured launches whose blocks are made ahead, each for MIN_CAPACITY tiles
MIN_CAPACITY = 4096           # row tiles: half a million rows
WAITS = {1: "rows of x in the routed ring", 2: "h of a row tile", 3: "a free place in the ring of h", 4: "results to sum", 5: "a free place in the routed ring",
         11: "rows of dy or gates", 13: "dz of a row tile", 14: "all dz (backward)", 15: "rows of x (backward)", 16: "all rows of dx", 17: "gate slopes",
         18: "all CTAs to start (backward)", 19: "the number of published tasks at the end (backward)",
         20: "z of a row tile (backward)",
         31: "the ids of a rank", 32: "the rows of x of a rank", 33: "the rows of dy and x of a rank (backward)",
         34: "results of other ranks to sum", 37: "the gradients of a rank (backward)",
         38: "all CTAs to finish a wave"}
_BLOCKS, _RESERVE, _CAPTURED, _ERROR, _LIMIT = "hopper blocks", "hopper reserve", "hopper captured", "hopper error", "hopper spin limit"   # keys


def set_spin_limit(seconds: float) -> None:
    """How long a kernel may wait before it gives up; blocks made earlier are dropped. For tests."""
    with runtime.lock:
        runtime.scratch[_LIMIT] = seconds
        _drop_blocks(None)


def block_words(capacity: int) -> int:
    """int32 words of a control block for `capacity` row tiles: the control words and two sets of counters."""
    return CONTROL_WORDS + 2 * (SET_HEADER + 5 * capacity)


def group_state(device: torch.device, tiles: int, peers: Tensor, timeout_s: float) -> tuple[Tensor, int, Tensor]:
    """(control block, its capacity in row tiles, its error record in pinned memory) of an expert group's launches that need `tiles`.

    peers: the group's table on the device (peers.py). Waits for peers end after timeout_s, others after twice that: then the report names a peer.
    """
    capacity = max(MIN_CAPACITY, 1 << (tiles - 1).bit_length())
    record = torch.zeros(8, dtype=torch.int32, device="cpu", pin_memory=True)
    block = torch.zeros(block_words(capacity), dtype=torch.int32, device="cpu")
    block[3], block[6] = 2 * max(1, int(timeout_s * 1e9) >> 20), max(1, int(timeout_s * 1e9) >> 20)
    block[4:6].view(torch.int64).fill_(record.data_ptr())
    block[8:10].view(torch.int64).fill_(peers.data_ptr())
    return block.to(device), capacity, record


def launch_state(device: torch.device, tiles: int) -> tuple[Tensor, int]:
    """(control block int32, its capacity in row tiles) for a launch on `device`'s current stream that needs `tiles`."""
    capacity = max(MIN_CAPACITY, 1 << (tiles - 1).bit_length())
    if torch.cuda.is_current_stream_capturing():
        return _captured_block(device, capacity), capacity
    key = (_BLOCKS, device, current_stream(device.index))
    block, held = runtime.scratch.get(key, (None, 0))
    if block is not None and held >= capacity:
        return block, held
    with runtime.lock:
        block, held = runtime.scratch.get(key, (None, 0))
        if block is None or held < capacity:
            block, held = _make_blocks(device, capacity, 1)[0], capacity
            runtime.scratch[key] = (block, held)
        if (_RESERVE, device) not in runtime.scratch:
            runtime.scratch[(_RESERVE, device)] = _make_blocks(device, MIN_CAPACITY, RESERVE_BLOCKS)
    return block, held


def _captured_block(device: torch.device, capacity: int) -> Tensor:
    """A block that no other launch uses; from the reserve while that lasts, else zeroed inside the graph (one more node, still right)."""
    with runtime.lock:
        reserve = runtime.scratch.get((_RESERVE, device), [])
        block = reserve.pop() if reserve and capacity == MIN_CAPACITY else _make_blocks(device, capacity, 1)[0]
        runtime.scratch.setdefault((_CAPTURED, device), []).append(block)      # lives as long as the process: so may the graph
    return block


def _make_blocks(device: torch.device, capacity: int, count: int) -> list[Tensor]:
    blocks = torch.zeros((count, block_words(capacity)), dtype=torch.int32, device=device)
    blocks[:, 3].fill_(max(1, int(runtime.scratch.get(_LIMIT, SPIN_LIMIT_S) * 1e9) >> 20))
    blocks[:, 4:6].view(torch.int64).fill_(_error_record(device).data_ptr())
    return list(blocks.unbind(0))


def _error_record(device: torch.device) -> Tensor:
    """(8,) int32 in pinned host memory: flag, unused, wait, tile, expected, seen. Pinned memory has one address on host and device."""
    key = (_ERROR, device)
    with runtime.lock:
        if key not in runtime.scratch:
            runtime.scratch[key] = torch.zeros(8, dtype=torch.int32, device="cpu", pin_memory=True)
            flag = ctypes.c_int32.from_address(runtime.scratch[key].data_ptr())
            runtime.error_words.append(lambda: _timeout(device) if flag.value else None)
        return runtime.scratch[key]


def _timeout(device: torch.device) -> FabricTimeout | None:
    """The error that the device's record holds, if any; the blocks of that device are then dropped, for their abort flags are up."""
    record = runtime.scratch[(_ERROR, device)]
    flag, _, wait, tile, expected, seen = record.tolist()[:6]
    if not flag:
        return None
    record.zero_()
    _drop_blocks(device)
    return FabricTimeout(f"a launch on {device} gave up after {runtime.scratch.get(_LIMIT, SPIN_LIMIT_S):g} s: waited for {WAITS.get(wait, wait)}, "
                         f"tile {tile}, expected {expected}, saw {seen}; its output is NaN", ())


def _drop_blocks(device: torch.device | None) -> None:
    """Forget the blocks of `device` (None = of all): the next launch makes new ones."""
    with runtime.lock:
        for key in list(runtime.scratch):
            if isinstance(key, tuple) and key[0] in (_BLOCKS, _RESERVE) and device in (None, key[1]):
                del runtime.scratch[key]
