"""The several-rank part of the forward kernel, its own source, run as Python: ranks in threads, GEMMs stood in for, faults planted and found.

What is compared (interpreted_ranks.py): the list of everybody's ids, every row in the ring, and each token's sum to the bit.
"""
from __future__ import annotations

import itertools
import random
import time

import numpy as np
import pytest
from interpreted_ranks import Simulation, World

from mok.fabric.flag_page import PAGE_WORDS, page_bytes

WORLDS = {
    "one rank": lambda: World(1, 3, 2, [[70], [5], [90]]),
    "two ranks, a shared expert": lambda: World(2, 4, 3, [[40, 30], [0, 50], [33, 1]], shared=True),
    "four ranks, uneven experts, ranks without tokens": lambda: World(4, 6, 2, [[30, 0, 17, 45], [9, 40, 0, 0], [0, 0, 0, 0], [20, 20, 20, 20]]),
    "everything to one expert of one rank": lambda: World(3, 5, 2, [[90, 60, 80], [10, 0, 70]], skew=True),      # more tiles than the ring holds
}


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_token_is_summed_to_the_bit(name, seed):
    world = WORLDS[name]()
    world.seed = seed
    world.__post_init__()
    delays = {(n, r): random.Random(f"{seed} {n} {r}").random() * 0.03 for n, r in itertools.product(range(len(world.tokens)), range(world.W))}
    simulation = Simulation(world, delays=delays, slow=0.01 * seed)
    simulation.run()
    simulation.check()


MOVE, SEND, PLAN, COMBINE = "expert_parallel_move", "expert_parallel_send", "expert_parallel_plan", "move"
FAULTS = {
    "pulls before x_ready": (MOVE, "    wait_for_all(flags.control, X_READY, t.epoch, WAIT_PEER_ROWS)\n", ""),
    "x_ready before all have staged": (MOVE, "    if staged == gl.num_programs(0) - 1:", "    if staged == 0:"),
    "the counters of the last launch stay": (MOVE, "first in range(gl.program_id(0) * 128, fresh(s.T),", "first in range(gl.program_id(0) * 128, 0,"),
    "told before all columns are there": (SEND, "    if before == target - 1:", "    if before == 0:"),
    "homes of the tile before": (SEND, "home_of(homes.row_to_slot, homes.row_to_rank, _rows_of_tile(tile))\n    address",
                                 "home_of(homes.row_to_slot, homes.row_to_rank, _rows_of_tile(gl.maximum(tile - 1, 0)))\n    address"),
    "a pull into a place in use": (MOVE, "        if (piece < pieces) & (tile >= s.row_ring):", "        if (piece < pieces) & (tile < 0):"),
    "a result to the wrong slot": (SEND, "row), 0), gl.maximum(slot, 0)", "row), 0), gl.maximum(slot ^ 1, 0)"),
    "results always sent to the first rank": (SEND, "return slot >= 0, gl.maximum(gl.load(row_to_rank + row), 0), ", "return slot >= 0, row * 0, "),
    "results counted but not sent": (SEND, "gl.static_range(0, SEND_CHUNK, SEND_ROWS)", "gl.static_range(0, SEND_CHUNK - SEND_ROWS, SEND_ROWS)"),
    "a sum without all results": (COMBINE, "lack += gl.sum((rows >= 0).to(gl.int32), 1)", "lack += gl.minimum(gl.sum((rows >= 0).to(gl.int32), 1), 1)"),
    "ids read before they are there": (PLAN, "    wait_for_all(control, IDS_READY, epoch, WAIT_IDS)\n", ""),
    "ids told before all have written": (PLAN, "    if arrived == gl.num_programs(0) - 1:", "    if arrived == 0:"),
    "one buffer of ids": (PLAN, "(epoch & 1) * (IDS_HEADER + capacity)", "(epoch & 0) * (IDS_HEADER + capacity)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    name, old, new = FAULTS[fault]
    for seed in range(18):                                # some need a rare order; a fault that is found ends the loop
        tokens = [[90, 80], [80, 85]] if "place" in fault else [[40, 30], [45, 25], [38, 31]] * (1 if name != PLAN else 6)
        world = World(2, 4, 2, tokens, seed=seed, skew="place" in fault)
        late = {(n, seed % 2): 0.05 for n in range(3)}
        simulation = Simulation(world, {name: [(old, new)]}, delays=late, launch=name != PLAN, slow=(0.2 if "place" in fault else 0.03) * (seed % 2 == 0))
        simulation.memory.deadline = time.monotonic() + 3
        simulation.run()
        try:
            simulation.check()
        except AssertionError:
            return
    pytest.fail("every launch was right in spite of the fault")


def test_a_rank_that_stays_away_is_named_by_all_others():
    simulation = Simulation(World(3, 4, 2, [[20, 10, 15], [12, 30, 9]]), absent=(1, 2), limit_ms=1500)
    simulation.run()
    assert not simulation.problems, simulation.problems
    timeouts = {(rank, wait, tile) for rank, wait, tile, _, _ in simulation.reports}
    aborted = simulation.modules["sync"].WAIT_ABORTED
    assert {rank for rank, _, _ in timeouts} == {0, 1}
    assert any(wait == simulation.modules["sync"].WAIT_IDS and tile == 2 for _, wait, tile in timeouts)
    assert all((wait, tile) in {(simulation.modules["sync"].WAIT_IDS, 2), (aborted, 0), (aborted, 1)} for _, wait, tile in timeouts), timeouts
    for rank in (0, 1):
        assert np.isnan(simulation.out[1, rank]).all() and not np.isnan(simulation.out[0, rank]).any()


def test_ranks_in_different_passes_say_so():
    simulation = Simulation(World(2, 4, 2, [[20, 10]]), signatures={(0, 1): 18}, limit_ms=5000)
    simulation.run()
    reported = {(rank, wait): (tile, expected, seen) for rank, wait, tile, expected, seen in simulation.reports}
    assert reported.get((0, 35)) == (1, 17, 18) or reported.get((1, 35)) == (0, 18, 17)
    assert np.isnan(simulation.out[0, 0]).all() and np.isnan(simulation.out[0, 1]).all()


def test_page_holds_a_counter_for_every_token():
    assert page_bytes(5) == 4 * (PAGE_WORDS + 5)
