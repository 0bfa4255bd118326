"""The order of forward's GEMM tasks, run as plain Python: every tile once, inputs before what reads them, rings long enough, aligned groups too."""
from __future__ import annotations

import pytest
from order_support import Column, Number, load, segments_of

tasks = load("tasks.py")
H, I, I_0, I_1 = 528, 336, 96, 208


def sequence(tiles_of_expert, group, T=0, num_shared=0, segments=None, ahead=1):
    """(is down, shared expert or -1, row tile, column tile) of every task."""
    s = tasks.Schedule(*map(Number, (H, I, I_0, I_1, T, num_shared, sum(tiles_of_expert), group, 4 * group, 8 * group)))
    order = tasks.make_order(s, ahead)
    align = segments is not None
    found = []
    phase, index = tasks.seek(s, order, segments, Number(0), Number(0), align, ahead)
    while phase < order.num_phases:
        index_ = Number(index)
        index_.to = lambda kind, value=index: Column(value) if kind is float else Number(value)
        down, slot, tile, column = tasks.locate(order, segments, phase, index_, align, ahead)
        found.append((bool(down), int(slot), int(tile), int(column)))
        phase, index = tasks.seek(s, order, segments, phase, index + 1, align, ahead)
    return found


def expected(tiles_of_expert, T, num_shared):
    up, down = {-1: -(-I // 128), 0: -(-I_0 // 128), 1: -(-I_1 // 128)}, -(-H // 256)
    rows = {-1: sum(tiles_of_expert), **dict.fromkeys(range(num_shared), -(-T // 128))}
    return {(is_down, slot, tile, column) for slot, count in rows.items() for tile in range(count) for is_down in (False, True)
            for column in range(down if is_down else up[slot])}


@pytest.mark.parametrize("tiles_of_expert", [(16,) * 6, (3, 0, 40, 1, 1, 17, 5, 0, 2), (1,), (0,), (2,) * 30])
@pytest.mark.parametrize("group", [1, 4, 16])
@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("T,num_shared", [(0, 0), (300, 2)])
def test_every_tile_once_and_inputs_first(tiles_of_expert, group, ahead, align, T, num_shared):
    """And a tile's place in the rings is free early enough: what held it is finished by tasks that stand before."""
    order = sequence(tiles_of_expert, group, T, num_shared, segments_of(tiles_of_expert) if align else None, ahead)
    assert len(order) == len(set(order)) and set(order) == expected(tiles_of_expert, T, num_shared)
    first_up, last_up, last_down = {}, {}, {}
    for place, (down, slot, tile, _) in enumerate(order):
        if down:
            last_down[slot, tile] = place
        else:
            last_up[slot, tile] = place
            first_up.setdefault((slot, tile), place)
    first_down = {}
    for place, (down, slot, tile, _) in reversed(list(enumerate(order))):
        if down:
            first_down[slot, tile] = place
    assert all(last_up[key] < first_down[key] for key in first_down)
    longest = group * (2 if align else 1)
    for tile in range(sum(tiles_of_expert)):
        if tile >= longest:
            assert last_up[-1, tile - longest] < first_up[-1, tile], "the ring of x rows would wait for a later task"
        if tile >= (ahead + 1) * longest:
            assert last_down[-1, tile - (ahead + 1) * longest] < first_up[-1, tile], "the ring of h would wait for a later task"


def test_worked_example():
    """The example of the file's docstring: three routed tiles, groups of two; one column of each kind there, three and three here."""
    phases = [(down, tile) for down, _, tile, column in sequence((3,), 2) if column == 0]
    assert phases == [(False, 0), (False, 1), (False, 2), (True, 0), (True, 1), (True, 2)]
