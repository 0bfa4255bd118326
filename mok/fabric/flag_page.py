"""Layout of a rank's flag page: the words that its peers write and its kernels wait for, the same names in kernels, host code and the protocol's model.

A page is int32 words in a peer-reachable buffer. Every flag is an array with one word for each source rank, so no two ranks write the same word; the
arrays have room for MAX_RANKS and lie at the same places for every W. Flags hold the epoch (number of the exchange or launch) that the source
has reached: they only grow, are never zeroed, and are compared with `>=`, for a fast peer may be one epoch ahead. The counters of tokens
behind them are the exception: their owner zeroes them in every launch, before it publishes `x_ready` (docs/fabric.md).
"""
from __future__ import annotations

from torch import Tensor

MAX_RANKS = 128           # words of a flag: 512 bytes, four lines of L2

IDS_READY = 0 * MAX_RANKS     # [r] exchanges whose ids rank r has written into its buffer ids[epoch % 2]
X_READY = 1 * MAX_RANKS       # [r] launches for which rank r has staged its rows and zeroed its token counters
GRADS_READY = 2 * MAX_RANKS   # [r] backward launches for which rank r has staged what its peers pull: rows of dy and x, routing weights
GRADS_SENT = 3 * MAX_RANKS    # [r] backward launches in which rank r has pulled all that it needs from this rank and pushed all that it sends here
GRADS_PASS = 4 * MAX_RANKS    # [r] which pass rank r's `grads_ready` is for, a number made of its signature: no epoch
ABORT = 5 * MAX_RANKS         # [r] 0, or why rank r has given up: the number of the wait that timed out, or ABORT_HOST
PAGE_WORDS = 6 * MAX_RANKS    # the counters start here
TOKEN_ARRIVED = PAGE_WORDS    # [t] results of token t that have been pushed here in this launch

ABORT_HOST = 1 << 20          # rank r's host gave up, before a launch: bad arguments, or an error on its way there
FLAGS = {"ids_ready": IDS_READY, "x_ready": X_READY, "grads_ready": GRADS_READY, "grads_sent": GRADS_SENT, "grads_pass": GRADS_PASS,
         "abort": ABORT, "token_arrived": TOKEN_ARRIVED}


def page_bytes(max_tokens: int) -> int:
    """Bytes of a flag page with one counter for each of `max_tokens` tokens."""
    return 4 * (PAGE_WORDS + max_tokens)


def aborted(page: Tensor, world_size: int) -> dict[int, int]:
    """{rank: reason} of the ranks that have given up, read from a page (int32, on any device; a copy to the host if it is on a GPU)."""
    return {rank: reason for rank, reason in enumerate(page[ABORT:ABORT + world_size].tolist()) if reason}
