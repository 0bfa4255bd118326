"""The order of backward's GEMM tasks, run as plain Python: every wanted tile once, inputs before what reads them, counts that roles wait for."""
from __future__ import annotations

import random

import pytest
from order_support import load

Z, DH, DX, DW_UP, DW_DOWN = range(-1, 4)
tasks = load("backward_tasks.py")

ALL = 0b1111
SIZES = {
    "qwen3-30b-a3b, many tiles": dict(H=2048, I=768, T=4096, num_tiles=300, num_experts=16, group_tiles=37),
    "groups that do not divide the tiles": dict(H=528, I=592, T=520, num_tiles=10, num_experts=4, group_tiles=4),
    "one tile": dict(H=16, I=16, T=1, num_tiles=1, num_experts=2, group_tiles=64),
    "no route": dict(H=256, I=96, T=20, num_tiles=0, num_experts=3, group_tiles=8),
    "one shared expert": dict(H=64, I=48, T=200, num_tiles=3, num_experts=2, group_tiles=3, num_shared=1, I_0=272),
    "two shared experts": dict(H=272, I=176, T=300, num_tiles=7, num_experts=5, group_tiles=2, num_shared=2, I_0=80, I_1=336),
}
WANTS = {"all": ALL, "dx": 1, "d_topk_weights": 2, "dw_gate_up": 4, "dw_down": 8, "weights": 12, "biases": 48,
         "all of both shared experts": ALL | 0b111111 << 8, "one shared dw_down": 2 << 8}


def schedule(H, I, T, num_tiles, num_experts, group_tiles, wants, num_shared=0, I_0=0, I_1=0, recompute=False):
    return tasks.make_schedule(H, I, I_0, I_1, T, num_tiles, num_experts, num_shared, group_tiles, wants, recompute)


def sequence(s, first=0, step=1, recompute=False):
    """Tasks first, first + step, ... as (kind, slot, tile, column, expert)."""
    found = []
    phase, index = tasks.seek(s, 0, first, recompute)
    while phase < s.num_phases:
        found.append(tasks.locate(s, phase, index, recompute))
        phase, index = tasks.seek(s, phase, index + step, recompute)
    return found


def expected_tasks(s, num_experts, recompute=False):
    """The same tasks from the definition of each kind, in no order. expert is -1 where the plan's tile_to_expert says it."""
    def tiles(width, tile):
        return -(-width // tile)

    def bit(i):
        return s.wants >> i & 1

    widths = [s.I_0, s.I_1][:s.num_shared]
    routed_dh = bit(0) or bit(1) or bit(2) or bit(3) or bit(4)
    result = set()
    for slot, width in [(-1, s.I), *enumerate(widths)]:
        up, down = (bit(2), bit(3)) if slot < 0 else (bit(8 + 3 * slot), bit(9 + 3 * slot))
        dh = routed_dh if slot < 0 else bit(0) or up or down or bit(10 + 3 * slot)
        rows = s.num_tiles if slot < 0 else tiles(s.T, 128)
        result |= {(Z, slot, m, n, -1) for m in range(rows) for n in range(tiles(width, 128)) if dh and recompute}
        result |= {(DH, slot, m, n, -1) for m in range(rows) for n in range(tiles(width, 256)) if dh}
        result |= {(DX, slot, m, n, -1) for m in range(rows) for n in range(tiles(s.H, 256)) if bit(0)}
        for e in range(num_experts) if slot < 0 else [-1]:
            result |= {(DW_UP, slot, m, n, e) for m in range(2 * tiles(width, 128)) for n in range(tiles(s.H, 256)) if up}
            result |= {(DW_DOWN, slot, m, n, e) for m in range(tiles(s.H, 128)) for n in range(tiles(width, 256)) if down}
    return result


def identity(task):
    kind, slot, tile, column, expert = task
    return kind, slot, tile, column, expert if kind >= DW_UP and slot < 0 else -1


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("wants", WANTS)
@pytest.mark.parametrize("recompute", [False, True])
def test_every_wanted_tile_once(size, wants, recompute):
    s = schedule(**SIZES[size], wants=WANTS[wants], recompute=recompute)
    order = [identity(task) for task in sequence(s, recompute=recompute)]
    assert len(order) == len(set(order))
    assert set(order) == expected_tasks(s, SIZES[size]["num_experts"], recompute)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("recompute", [False, True])
def test_tickets_share_the_sequence(size, recompute):
    """CTAs take tasks by ticket and walk from one to the next: whoever takes a ticket finds the task of that place."""
    s = schedule(**SIZES[size], wants=ALL, recompute=recompute)
    whole = sequence(s, recompute=recompute)
    generator = random.Random(0)
    for ctas in (1, 7, 132):
        held: dict[int, tuple[int, int, int]] = {}
        found = []
        for ticket in range(len(whole)):
            cta = generator.randrange(ctas)
            before, phase, index = held.get(cta, (0, 0, 0))
            held[cta] = ticket, *tasks.seek(s, phase, index + ticket - before, recompute)
            found.append(tasks.locate(s, *held[cta][1:], recompute))
        assert found == whole


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("wants", WANTS)
@pytest.mark.parametrize("recompute", [False, True])
def test_inputs_come_first_and_counts_are_exact(size, wants, recompute):
    """What the kernel waits for: z_columns of a row tile before its DH, dh_columns before its DX, all DH tasks before a weight gradient, and the totals.

    A wait for tasks that stand earlier in the sequence is for CTAs that took theirs earlier, so it ends.
    """
    s = schedule(**SIZES[size], wants=WANTS[wants], recompute=recompute)
    done: dict[tuple[int, int], int] = {}
    z_done: dict[tuple[int, int], int] = {}
    dh = dx = 0
    for kind, slot, tile, _, _ in sequence(s, recompute=recompute):
        if kind == Z:
            z_done[slot, tile] = z_done.get((slot, tile), 0) + 1
        elif kind == DH:
            assert z_done.get((slot, tile), 0) == (tasks.z_columns(s, slot) if recompute else 0), "a DH task before its z"
            done[slot, tile] = done.get((slot, tile), 0) + 1
            dh += 1
        elif kind == DX:
            assert done.get((slot, tile), 0) == tasks.dh_columns(s, slot), "a DX task before its dz"
            dx += 1
        else:
            assert dh == tasks.all_dh_tasks(s), "a weight gradient before the last DH task"
    assert dh == tasks.all_dh_tasks(s) and dx == tasks.all_dx_tasks(s)
    assert sum(z_done.values()) == (tasks.all_z_tasks(s) if recompute else 0)


def test_counters_do_not_collide():
    s = schedule(**SIZES["two shared experts"], wants=ALL | 0b111111 << 8)
    places = {(slot, tile): tasks.counter_of(s, slot, tile, 20) for kind, slot, tile, _, _ in sequence(s) if kind == DH}
    assert len(set(places.values())) == len(places) and max(places.values()) < 20 + s.num_shared * s.token_tiles


def test_worked_example():
    """The example of the file's docstring."""
    s = schedule(H=256, I=256, T=300, num_tiles=3, num_experts=1, group_tiles=2, wants=1)
    names = {Z: "Z", DH: "DH", DX: "DX"}
    assert [f"{names[kind]} {tile}" for kind, _, tile, _, _ in sequence(s)] == ["DH 0", "DH 1", "DH 2", "DX 0", "DX 1", "DX 2"]
    again = schedule(H=256, I=128, T=300, num_tiles=3, num_experts=1, group_tiles=2, wants=1, recompute=True)
    assert [f"{names[kind]} {tile}" for kind, _, tile, _, _ in sequence(again, recompute=True)] == ["Z 0", "Z 1", "Z 2", "DH 0", "DH 1", "DH 2",
                                                                                                   "DX 0", "DX 1", "DX 2"]


def test_all_of_dw_up_comes_before_dw_down():
    kinds = [kind for kind, *_ in sequence(schedule(**SIZES["two shared experts"], wants=ALL | 0b111111 << 8)) if kind >= DW_UP]
    assert kinds == sorted(kinds) and set(kinds) == {DW_UP, DW_DOWN}
