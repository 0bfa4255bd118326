"""Flags between ranks, on the device: the table of peers, waits for what a peer publishes and signals to it (rule 3: all at `.sys` scope).

Names of flags and their places in a rank's page are mok/fabric/flag_page.py's; who waits for what is docs/expert-parallel-kernel.md's.
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...fabric import flag_page
from .sync import (
    CHECK_EVERY,
    CONTROL_ABORT,
    CONTROL_PEER_LIMIT,
    CONTROL_PEERS,
    WAIT_ABORTED,
    clock,
    fresh,
    fresh_long,
    load_acquire,
    load_acquire_system,
    pause,
    report_timeout,
)

IDS_READY = gl.constexpr(flag_page.IDS_READY)
X_READY = gl.constexpr(flag_page.X_READY)
GRADS_READY = gl.constexpr(flag_page.GRADS_READY)
GRADS_SENT = gl.constexpr(flag_page.GRADS_SENT)
GRADS_PASS = gl.constexpr(flag_page.GRADS_PASS)
ABORT = gl.constexpr(flag_page.ABORT)
TOKEN_ARRIVED = gl.constexpr(flag_page.TOKEN_ARRIVED)

# Words of the table of peers (int64): this rank, W, this rank's page and buffers; then for each rank the address of its flag page and of its buffer
# of ids, a sixteenth of the addresses of its buffers of rows of x and of slots (see rows_at), likewise of rows of dy, and the addresses of its
# staged routing weights and of its slots for their gradients. Made by expert_parallel.peer_table.
PEER_RANK = gl.constexpr(0)
PEER_COUNT = gl.constexpr(1)
OWN_PAGE = gl.constexpr(2)
OWN_X = gl.constexpr(3)
OWN_SLOTS = gl.constexpr(4)
OWN_DY = gl.constexpr(5)
OWN_WEIGHTS = gl.constexpr(6)
OWN_WEIGHT_SLOTS = gl.constexpr(7)
PEER_PAGE = gl.constexpr(8)
PEER_IDS = gl.constexpr(8 + flag_page.MAX_RANKS)
PEER_X = gl.constexpr(8 + 2 * flag_page.MAX_RANKS)
PEER_SLOTS = gl.constexpr(8 + 3 * flag_page.MAX_RANKS)
PEER_DY = gl.constexpr(8 + 4 * flag_page.MAX_RANKS)
PEER_WEIGHTS = gl.constexpr(8 + 5 * flag_page.MAX_RANKS)
PEER_WEIGHT_SLOTS = gl.constexpr(8 + 6 * flag_page.MAX_RANKS)
TABLE_WORDS = 8 + 7 * flag_page.MAX_RANKS


@gluon.jit
def peers_of(control):
    """The table of peers of the group whose control block this is; looked up where it is used, so that no role holds it in registers."""
    word = (control + fresh(CONTROL_PEERS)).to(gl.pointer_type(gl.int64))
    return gl.load(word).to(gl.pointer_type(gl.int64))


@gluon.jit
def peer_count(peers):
    return gl.load(peers + PEER_COUNT).to(gl.int32)


@gluon.jit
def word_of(address, index):
    """Pointer to int32 word `index` behind an address."""
    return (address + index.to(gl.int64) * 4).to(gl.pointer_type(gl.int32))


@gluon.jit
def own_page(control):
    """This rank's flag page."""
    return gl.load(peers_of(control) + OWN_PAGE).to(gl.pointer_type(gl.int32))


@gluon.jit
def float_of(address, index):
    """Pointer to float32 number `index` behind an address."""
    return (address + index.to(gl.int64) * 4).to(gl.pointer_type(gl.float32))


@gluon.jit
def rows_at(base, sixteenth):
    """Pointer to address 16 * sixteenth, which the compiler knows to be as aligned as `base`, a kernel argument: else it moves 2 bytes at a time."""
    return base + (sixteenth - (fresh_long(base.to(gl.int64)) >> 4)) * 8


@gluon.jit
def signal_all(control, flag: gl.constexpr, epoch):
    """Rule 3, writer: this rank's word of `flag` in every rank's page, its own included, says `epoch`. One thread; a barrier stands before it."""
    peers = peers_of(control)
    rank = gl.load(peers + PEER_RANK).to(gl.int32)
    for r in range(peer_count(peers)):
        gl.atomic_xchg(word_of(gl.load(peers + PEER_PAGE + r), rank + flag), epoch, sem="release", scope="sys")


@gluon.jit
def watch_peers(control):
    """If a peer has given up, give up too: its word of the page becomes this rank's report. Per thread."""
    page = own_page(control)
    for r in range(peer_count(peers_of(control))):
        reason = gl.load(page + ABORT + r, volatile=True)
        if reason != 0:
            report_timeout(control, WAIT_ABORTED, r, r * 0, reason)


@gluon.jit
def wait_for_all(control, flag: gl.constexpr, epoch, phase: gl.constexpr, GENTLE: gl.constexpr = False):
    """Rule 3, reader: spin until every rank's word of `flag` in this rank's page has reached `epoch`.

    Bounded (rule 8). Per thread: no barrier may depend on the outcome. Never for equality: a fast peer may be an epoch ahead. GENTLE: for a wait
    beside which tensor cores work.
    """
    for r in range(peer_count(peers_of(control))):
        pointer = own_page(control) + flag + r
        seen = load_acquire_system(pointer)
        if seen < epoch:
            start = clock(seen)
            polls = 0
            while seen < epoch:
                if GENTLE:
                    pause(polls)
                seen = load_acquire_system(pointer)
                polls += 1
                if (polls % CHECK_EVERY == 0) & (seen < epoch):
                    watch_peers(control)
                    if load_acquire(control + fresh(CONTROL_ABORT)) != 0:
                        seen = epoch
                    elif clock(polls) - start > gl.load(control + fresh(CONTROL_PEER_LIMIT)):
                        report_timeout(control, phase, r, epoch, seen)
                        seen = epoch


@gluon.jit
def tell_abort(control):
    """Rule 8 between ranks: the wait that this rank gave up in becomes its word of every peer's page. Only once the abort flag is up."""
    peers = peers_of(control)
    rank = gl.load(peers + PEER_RANK).to(gl.int32)
    reason = gl.inline_asm_elementwise("{ .reg .b64 error; ld.global.u64 error, [$1+16]; ld.volatile.global.u32 $0, [error+8]; }", "=r,l", [control],
                                       dtype=gl.int32, is_pure=False, pack=1)
    for r in range(peer_count(peers)):
        if r != rank:
            gl.atomic_xchg(word_of(gl.load(peers + PEER_PAGE + r), rank + ABORT), gl.maximum(reason, 1), sem="release", scope="sys")
