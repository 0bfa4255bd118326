"""Waves inside the forward launch, its own source run as Python: ranks that go through their buffers several times, faults planted and found.

What is compared is what test_expert_parallel_interpreted.py compares, and each rank's WaveCounts.
"""
from __future__ import annotations

import itertools
import random
import time

import numpy as np
import pytest
from device_interpreter import Memory, SharedWords, load
from interpreted_backward import BIAS_DOWN, BIAS_UP, TOPK, UP, BackwardSimulation, BackwardWorld, X
from interpreted_ranks import Simulation, World

from mok.waves import split_into_waves, waves_needed

WORLDS = {
    "one rank, three waves": lambda: World(1, 3, 2, [[170], [5], [90]], wave_tiles=[1]),
    "one wave here, several there, a shared expert": lambda: World(2, 4, 3, [[100, 130], [0, 50], [33, 1]], shared=True, wave_tiles=[4, 1]),
    "an expert over three waves, ranks without rows": lambda: World(3, 5, 2, [[130, 60, 90], [10, 0, 70]], skew=True, wave_tiles=[2, 1, 1]),
}


@pytest.mark.parametrize("name", WORLDS)
def test_every_token_is_summed_to_the_bit(name):
    world = WORLDS[name]()
    delays = {(n, r): random.Random(f"{n} {r}").random() * 0.03 for n, r in itertools.product(range(len(world.tokens)), range(world.W))}
    simulation = Simulation(world, delays=delays, slow=0.01)
    simulation.run()
    simulation.check()
    assert max(int(words[15]) for words, _ in simulation.controls) >= 3, "this world was to take three waves"


ZEROES = "    lanes = gl.arange(0, 128,"
LATE = (ZEROES, f"    __import__('time').sleep(0.1 * int(gl.program_id(0)))\n{ZEROES}")      # the second CTA zeroes late
NOT_ZEROED = "        gl.store(counters + at, lanes * 0, mask=(at < words) & ((at < KEPT_FROM) | (at >= KEPT_TO)) & alive)\n", "        pass\n"
FAULTS = {
    "counters are not zeroed": NOT_ZEROED,
    "zeroed before all have finished": ("    meet(arrivals, 2 * wave - 1, control)\n", "    add_release(arrivals, 1)\n"),
    "a wave begins before all is zeroed": ("    meet(arrivals, 2 * wave, control)\n", "    add_release(arrivals, 1)\n"),
    "a wave that sums early": ("    return wave_index(w, NW) + 1 == waves_of(", "    return wave_index(w, NW) + 2 >= waves_of("),
    "the same rows again": ("    return wave_index(w, NW) * w.capacity", "    return wave_index(w, NW) * 0"),
    "one wave too few": ("    return gl.maximum(gl.cdiv(num_tiles, fresh(wave_tiles)), 1)", "    return gl.maximum(num_tiles // wave_tiles, 1)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    for seed in range(12):                                # some need a rare order; a fault that is found ends the loop
        world = World(2, 4, 2, [[200, 150]], seed=seed, wave_tiles=[2, 1])
        simulation = Simulation(world, {"wave_loop": [FAULTS[fault], *[LATE] * ("is zeroed" in fault)]}, slow=0.02 * (seed % 3), sleepy=seed % 2)
        simulation.memory.deadline = time.monotonic() + 1.2
        simulation.run()
        try:
            simulation.check()
        except AssertionError:
            return
    pytest.fail("every launch was right in spite of the fault")


BACKWARDS = [("backward", 0), ("backward", 1)]
LAYERS = [("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0), ("backward", 0)]
GRADIENTS = {
    "one wave here, several there, a shared expert": lambda: BackwardWorld(2, 4, 3, [[100, 130], [33, 1]], shared=True, wave_tiles=[4, 1]),
    "an expert over three waves, ranks without rows": lambda: BackwardWorld(3, 5, 2, [[130, 60, 90], [10, 0, 70]], skew=True, wave_tiles=[2, 1, 1]),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_every_gradient_has_its_bits(name):
    world = GRADIENTS[name]()
    simulation = BackwardSimulation(world, passes=BACKWARDS, slow=0.01)
    simulation.run()
    simulation.check_gradients()


@pytest.mark.parametrize("wants", [TOPK, UP, BIAS_DOWN])
def test_any_wanted_gradients(wants):
    simulation = BackwardSimulation(BackwardWorld(2, 4, 2, [[200, 150], [20, 50]], wave_tiles=[2, 1]), wants, passes=BACKWARDS)
    simulation.run()
    simulation.check_gradients()


@pytest.mark.parametrize("tokens", [[6, 0, 3], [0, 0, 300], [700, 0, 0], [130, 0, 1], [128, 0, 128], [256, 1, 0], [0], [1, 0, 0, 129, 0, 500, 0]])
@pytest.mark.parametrize("tiles", [1, 2, 3])
def test_waves_share_rows_and_experts_out_as_the_rule_says(tokens, tiles):
    """Rows, begun and unfinished experts of mok.waves.split_into_waves; every expert without rows in one wave, each other one where it has some."""
    memory = Memory()
    gl, m = load(memory, [], lambda: None)
    gl.local.program, gl.local.programs = 0, 1
    offsets = [0, *itertools.accumulate(-(-count // 128) * 128 for count in tokens)]
    used = offsets[-1] // 128
    experts = [e for e, count in enumerate(tokens) for _ in range(-(-count // 128))]
    map_of_tiles, of_tokens, num_tiles = (memory.allocate(np.array(values, np.int32), "i32") for values in ([*experts, -1], tokens, [used]))
    of_offsets = memory.allocate(np.array(offsets, np.int64), "i64")
    w = m["wave_loop"].Wave(SharedWords(), num_tiles, gl.cast(tiles, "i32"), num_tiles)
    found: list[int] = []
    for wave in split_into_waves(offsets, tokens, tiles * 128, waves_needed(used, tiles)):
        m["wave_loop"].set_wave(w, gl.cast(wave.index, "i32"))
        for e in range(len(tokens)):
            count, first, marks = m["backward_waves"].rows_in_wave(of_offsets, of_tokens, gl.cast(e, "i32"), w, True, 1)
            assert int(count) == wave.counts[e] and (not wave.counts[e] or int(first) == wave.starts[e])
            assert int(marks) == (1 << 28) * (e == wave.begun) + (1 << 29) * (e == wave.unfinished)
        first, behind = map(int, m["backward_waves"].experts_of_wave(map_of_tiles, of_offsets, gl.cast(len(tokens), "i32"), w, 4))
        assert all(first <= e < behind for e in range(len(tokens)) if wave.counts[e]) and all(wave.counts[e] or not tokens[e] for e in range(first, behind))
        found += [e for e in range(first, behind) if not tokens[e]]
    assert found == [e for e, count in enumerate(tokens) if not count]


def test_unfinished_sums_have_places_of_their_own():
    """Every consumer's part of every tile of both weight gradients, the bias sums, and all of it twice, fill what the host allocates and share no word.

    What wave 2 begins with lies where wave 1 left it.
    """
    pytest.importorskip("triton.experimental.gluon")
    from mok.engines.hopper.backward_launch import carry_words

    memory, wide, half = Memory(), (272, 176), 64 * 256
    gl, m = load(memory, [], lambda: None)
    gl.local.program, gl.local.programs = 0, 1
    H, I, one, zero = (gl.cast(value, "i32") for value in (wide[0] // 16, wide[1] // 16, 1, 0))
    s = m["backward_tasks"].make_schedule(H, I, I, I, one, one, one, zero, one, one, 2)
    own, places = m["backward_tasks"].own(s), {}
    sums = memory.allocate(np.zeros(carry_words(*wide), np.float32), "f32")
    for wave in (1, 2):
        w = m["wave_loop"].Wave(SharedWords(), sums, one, sums)
        m["wave_loop"].set_wave(w, gl.cast(wave, "i32"))
        carry = m["backward_waves"].Carry(w, sums)
        for back in (0, 1):
            tiles = [(2, tile, column) for tile in range(4) for column in range(2)] + [(3, tile, 0) for tile in range(3)]
            of_tile = m["backward_waves"].tile_of_carry
            starts = [(int(of_tile(s, carry, *(gl.cast(number, "i32") for number in task), back, WG).a - sums.a) // 4, half) for task in tiles for WG in (0, 1)]
            places[wave, back] = [*starts, (int(m["backward_waves"].biases_of_carry(own, carry, back, 4).a - sums.a) // 4, 2 * wide[1] + wide[0])]
    assert places[2, 1] == places[1, 0] and places[2, 0] == places[1, 1]
    spans = sorted(places[1, 0] + places[1, 1])
    assert all(begin + size == following for (begin, size), (following, _) in itertools.pairwise(spans))
    assert spans[0][0] == 0 and sum(spans[-1]) == carry_words(*wide)


def test_two_layers_and_a_second_backward_of_one_forward():
    simulation = BackwardSimulation(BackwardWorld(2, 4, 2, [[200, 150], [45, 25]], wave_tiles=[2, 1]), passes=LAYERS)
    simulation.run()
    simulation.check_gradients()


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_waves_end_where_a_rank_stays_away(kind):
    """The launch aborts in its first wave; the others run on without waiting, nobody hangs, and the rank is named."""
    world = BackwardWorld(2, 4, 2, [[200, 150], [150, 200]], wave_tiles=[1, 1])
    simulation = BackwardSimulation(world, passes=[(kind, 0), (kind, 1)], absent=(1, 1), limit_ms=700)
    simulation.run()
    assert not simulation.problems, simulation.problems
    found = simulation.out if kind == "forward" else {key: grads[0] for key, grads in simulation.grads.items()}
    assert np.isnan(found[1, 0]).all() and not np.isnan(found[0, 0]).any()
    assert [(rank, tile) for rank, _, tile, _, _ in simulation.reports] == [(0, 1)]


MOVE, WAVES, LOOP = "expert_parallel_backward_move", "backward_waves", "wave_loop"
BACKWARD_FAULTS = {
    "sums are not handed on": (WAVES, "_copy_of_carry(carry.sums, s.H, s.I, wave + BACK)", "_copy_of_carry(carry.sums, s.H, s.I, wave)", BIAS_UP),
    "an expert begins anew in each wave": (WAVES, "gl.where(start < begin, TASK_BEGUN, 0) + ", "", BIAS_DOWN),
    "an expert ends in each wave": (WAVES, " + gl.where(start + tokens > end, TASK_UNFINISHED, 0)", "", BIAS_DOWN),
    "sums of rows before all have been pulled": (MOVE, "        wait_at_least(flags.x_ready + m.num_experts + 1, grid_size(s.T), flags.control, WAIT_WAVE, "
                                                       "s.num_tiles)     # all rows of dy have been pulled\n", "", BIAS_DOWN),
    "counters are not zeroed": (LOOP, *NOT_ZEROED, X),
    "a wave tells that all is sent": (MOVE, "is_last(waves[0].wave, NW) == 0", "is_last(waves[0].wave, NW) == 2", X | TOPK),
    "no rows of x where z is made again": (MOVE, "(WANT_UP | WANT_Z)", "WANT_UP", X),
}


@pytest.mark.parametrize("fault", BACKWARD_FAULTS)
def test_a_planted_fault_of_backward_is_found(fault):
    name, old, new, wants = BACKWARD_FAULTS[fault]
    for seed in range(16):                                # some need a rare order; a fault that is found ends the loop
        world = BackwardWorld(2, 4, 2, [[200, 150]], seed, wave_tiles=[2, 1])
        simulation = BackwardSimulation(world, wants, mutations={name: [(old, new)]}, passes=BACKWARDS[:1], slow=0.03 * (seed % 2 == 0))
        simulation.memory.deadline = time.monotonic() + 1.2
        simulation.run()
        try:
            simulation.check_gradients()
        except AssertionError:
            return
    pytest.fail("every gradient was right in spite of the fault")
