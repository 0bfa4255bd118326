"""The order of forward's GEMM tasks, run as plain Python: every tile once, inputs before what reads them, rings long enough."""
from __future__ import annotations

import pytest
from order_support import Column, Number, load

tasks = load("tasks.py")
H, I, I_0, I_1 = 528, 336, 96, 208


def sequence(num_tiles, group, T=0, num_shared=0):
    """(is down, shared expert or -1, row tile, column tile) of every task."""
    s = tasks.Schedule(*map(Number, (H, I, I_0, I_1, T, num_shared, num_tiles, group, 4 * group, 8 * group)))
    order = tasks.make_order(s)
    found = []
    phase, index = tasks.seek(s, order, Number(0), Number(0))
    while phase < order.num_phases:
        index_ = Number(index)
        index_.to = lambda kind, value=index: Column(value) if kind is float else Number(value)
        down, slot, tile, column = tasks.locate(order, phase, index_)
        found.append((bool(down), int(slot), int(tile), int(column)))
        phase, index = tasks.seek(s, order, phase, index + 1)
    return found


def expected(num_tiles, T, num_shared):
    up, down = {-1: -(-I // 128), 0: -(-I_0 // 128), 1: -(-I_1 // 128)}, -(-H // 256)
    rows = {-1: num_tiles, **dict.fromkeys(range(num_shared), -(-T // 128))}
    return {(is_down, slot, tile, column) for slot, count in rows.items() for tile in range(count) for is_down in (False, True)
            for column in range(down if is_down else up[slot])}


@pytest.mark.parametrize("num_tiles", [96, 69, 1, 0])
@pytest.mark.parametrize("group", [1, 4, 16])
@pytest.mark.parametrize("T,num_shared", [(0, 0), (300, 2)])
def test_every_tile_once_and_inputs_first(num_tiles, group, T, num_shared):
    """And a tile's place in the rings is free early enough: what held it is finished by tasks that stand before."""
    order = sequence(num_tiles, group, T, num_shared)
    assert len(order) == len(set(order)) and set(order) == expected(num_tiles, T, num_shared)
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
    for tile in range(group, num_tiles):
        assert last_up[-1, tile - group] < first_up[-1, tile], "the ring of x rows would wait for a later task"
    for tile in range(2 * group, num_tiles):
        assert last_down[-1, tile - 2 * group] < first_up[-1, tile], "the ring of h would wait for a later task"


def test_worked_example():
    """The example of the file's docstring: three routed tiles, groups of two; one column of each kind there, three and three here."""
    phases = [(down, tile) for down, _, tile, column in sequence(3, 2) if column == 0]
    assert phases == [(False, 0), (False, 1), (False, 2), (True, 0), (True, 1), (True, 2)]
