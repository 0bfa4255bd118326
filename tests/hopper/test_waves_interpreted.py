"""Waves inside the forward launch, its own source run as Python: ranks that go through their buffers several times, faults planted and found.

What is compared is what test_expert_parallel_interpreted.py compares, and each rank's WaveCounts.
"""
from __future__ import annotations

import itertools
import random
import time

import pytest
from interpreted_ranks import Simulation, World

WORLDS = {
    "one rank, three waves": lambda: World(1, 3, 2, [[170], [5], [90]], wave_tiles=[1]),
    "one wave here, several there, a shared expert": lambda: World(2, 4, 3, [[100, 130], [0, 50], [33, 1]], shared=True, wave_tiles=[4, 1]),
    "an expert over three waves, ranks without rows": lambda: World(3, 5, 2, [[130, 60, 90], [10, 0, 70]], skew=True, wave_tiles=[2, 1, 1]),
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
    assert max(int(words[15]) for words, _ in simulation.controls) >= 3, "this world was to take three waves"


ZEROES = "    lanes = gl.arange(0, 128,"
LATE = (ZEROES, f"    __import__('time').sleep(0.1 * int(gl.program_id(0)))\n{ZEROES}")      # the second CTA zeroes late
FAULTS = {
    "counters are not zeroed": ("        gl.store(counters + i + lanes, lanes * 0, mask=i + lanes < words)\n", "        pass\n"),
    "zeroed before all have finished": ("    meet(counters, 2 * wave - 1, control)\n", "    add_release(counters + SET_WAVES, 1)\n"),
    "a wave begins before all is zeroed": ("    meet(counters, 2 * wave, control)\n", "    add_release(counters + SET_WAVES, 1)\n"),
    "a wave that sums early": ("    return wave_index(w, NW) + 1 == waves_of(", "    return wave_index(w, NW) + 2 >= waves_of("),
    "the same rows again": ("    return wave_index(w, NW) * w.capacity", "    return wave_index(w, NW) * 0"),
    "one wave too few": ("    return gl.maximum(gl.cdiv(num_tiles, wave_tiles), 1)", "    return gl.maximum(num_tiles // wave_tiles, 1)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    for seed in range(12):                                # some need a rare order; a fault that is found ends the loop
        world = World(2, 4, 2, [[200, 150]], seed=seed, wave_tiles=[2, 1])
        simulation = Simulation(world, {"wave_loop": [FAULTS[fault], *[LATE] * ("is zeroed" in fault)]}, slow=0.02 * (seed % 3), sleepy=seed % 2)
        simulation.memory.deadline = time.monotonic() + 2.5
        simulation.run()
        try:
            simulation.check()
        except AssertionError:
            return
    pytest.fail("every launch was right in spite of the fault")
