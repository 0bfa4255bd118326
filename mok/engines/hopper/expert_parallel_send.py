"""Results go home from the epilogue: the storer of a down task (backward: of a dx task) writes its tile's rows into their slots at home.

So a result exists once: there is no buffer of a rank's results that movers would read again, and a home sums what it sums on one rank, rows of which each
lies in one piece. A task's rows come from a piece of shared memory that the consumer filled, in 16-byte stores of eight lanes a row; where each row
goes is looked up once a task, while its tile is being multiplied (`find_homes`). docs/expert-parallel-kernel.md has the protocol.
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .compat import aggregate, thread_barrier
from .peers import PEER_PAGE, PEER_SLOTS, TOKEN_ARRIVED, peers_of, rows_at, word_of
from .sync import CONTROL_ABORT, count_system, fence_acquire_system, fresh
from .tasks import BLOCK_M

SEND_CHUNK = gl.constexpr(64)      # rows and columns of a piece of shared memory
SEND_ROWS = gl.constexpr(16)       # rows of it that are in registers together


@aggregate
class Homes:
    """Where the rows of this rank's tiles go. slots: shared memory, (BLOCK_M,) int64: a sixteenth of the address of each row's slot, 0 where there is none.

    base: a kernel argument that is as aligned as the slots (peers.rows_at).
    """
    slots: gl.shared_memory_descriptor
    base: gl.tensor
    row_to_slot: gl.tensor
    row_to_rank: gl.tensor

    @gluon.constexpr_function
    def __init__(self, slots, base, row_to_slot, row_to_rank):
        self.slots = slots
        self.base = base
        self.row_to_slot = row_to_slot
        self.row_to_rank = row_to_rank


@gluon.jit
def home_of(row_to_slot, row_to_rank, row):
    """(whether there is one, home rank, slot there) of the result in a plan row."""
    slot = gl.load(row_to_slot + row)
    return slot >= 0, gl.maximum(gl.load(row_to_rank + row), 0), gl.maximum(slot, 0)


@gluon.jit
def _rows_of_tile(tile):
    return tile * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def find_homes(homes, control, tile, H):
    """Before a task's results are there: where each row of `tile` goes. After an abort nowhere: peers' launches may be over, their buffers in other use."""
    alive = gl.load(control + fresh(CONTROL_ABORT), volatile=True) == 0
    there, home, slot = home_of(homes.row_to_slot, homes.row_to_rank, _rows_of_tile(tile))
    address = gl.load(peers_of(control) + PEER_SLOTS + home) + slot.to(gl.int64) * (fresh(H) // 8)
    homes.slots.store(gl.where(there & alive, address, 0))


@gluon.jit
def send_chunk(homes, chunk, first, column, H):
    """64 rows of a tile from row `first` on, 64 columns from `column` on, from shared memory into their slots."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    at = column + gl.arange(0, SEND_CHUNK, layout=gl.SliceLayout(0, L))
    for r in gl.static_range(0, SEND_CHUNK, SEND_ROWS):
        slot = homes.slots.slice(first + r, SEND_ROWS).load(gl.SliceLayout(1, L))
        value = chunk.slice(r, SEND_ROWS).load(L)
        gl.store(rows_at(homes.base, slot)[:, None] + at[None, :], value, mask=(slot != 0)[:, None] & (at < H)[None, :])


@gluon.jit
def tell_homes(homes, counter, target, control, tile, K):
    """Count a task whose results have been sent; whoever brings the counter to `target` tells the home of each row of the tile that its result is there.

    Rule 3: every lane's stores before the count, all tasks' counts before the signals, all of it at system scope, for the stores went to peers.
    """
    thread_barrier()
    before = count_system(counter)
    if before == target - 1:
        alive = gl.load(control + fresh(CONTROL_ABORT), volatile=True) == 0
        there, home, slot = home_of(homes.row_to_slot, homes.row_to_rank, _rows_of_tile(tile))
        token = word_of(gl.load(peers_of(control) + PEER_PAGE + home), TOKEN_ARRIVED + slot // fresh(K))
        fence_acquire_system(tile)
        gl.atomic_add(token, slot * 0 + 1, mask=there & alive, sem="relaxed", scope="sys")
