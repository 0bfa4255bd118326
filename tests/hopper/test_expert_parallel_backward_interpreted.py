"""The several-rank part of the backward kernel, its own source, run as Python: gradients to the bit, faults planted and found."""
from __future__ import annotations

import itertools
import random
import time

import numpy as np
import pytest
from interpreted_backward import ALL, BIAS_DOWN, BIAS_UP, DOWN, TOPK, UP, BackwardSimulation, BackwardWorld, X

LAYERS = [("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0)]
BACKWARDS = [("backward", 0), ("backward", 1), ("backward", 2)]
WORLDS = {
    "one rank": lambda seed: BackwardWorld(1, 3, 2, [[70], [5], [90]], seed),
    "two ranks, a shared expert": lambda seed: BackwardWorld(2, 4, 3, [[40, 30], [0, 50], [33, 1]], seed, shared=True),
    "four ranks, uneven experts, ranks without tokens": lambda seed: BackwardWorld(4, 6, 2, [[30, 0, 17, 45], [9, 40, 0, 0], [0, 0, 0, 0]], seed),
    "everything to one expert of one rank": lambda seed: BackwardWorld(3, 5, 2, [[90, 60, 80], [10, 0, 70], [1, 2, 3]], seed, skew=True),
}


@pytest.mark.parametrize("name", WORLDS)
def test_every_gradient_has_its_bits(name):
    world = WORLDS[name](0)
    delays = {(n, r): random.Random(f"{n} {r}").random() * 0.03 for n, r in itertools.product(range(3), range(world.W))}
    simulation = BackwardSimulation(world, delays=delays, passes=BACKWARDS)
    simulation.run()
    simulation.check_gradients()


def test_two_layers_forward_forward_backward_backward():
    """x is staged again: its buffer holds the other layer's. Sums of forward stay right, too."""
    simulation = BackwardSimulation(BackwardWorld(2, 4, 2, [[40, 30], [25, 45]]), passes=LAYERS, slow=0.01)
    simulation.run()
    simulation.check_gradients()
    simulation.check()


@pytest.mark.parametrize("wants", [X, TOPK, UP, DOWN, BIAS_UP, BIAS_DOWN, UP | BIAS_DOWN, X | TOPK, 256])
def test_any_wanted_gradients(wants):
    """256: of a shared expert alone, so nothing is pulled or sent; the rank that is late still finds its peers' rows as they were."""
    simulation = BackwardSimulation(BackwardWorld(2, 4, 2, [[40, 30], [45, 25], [20, 50]]), wants, passes=BACKWARDS, delays={(1, 1): 0.05})
    simulation.run()
    simulation.check_gradients()


@pytest.mark.parametrize("wants", [ALL, X, BIAS_DOWN])
def test_z_is_made_again_from_rows_of_x(wants):
    """dx alone needs rows of x then; db_down alone still does not."""
    simulation = BackwardSimulation(BackwardWorld(2, 4, 2, [[40, 30], [45, 25], [20, 50]]), wants, passes=BACKWARDS, recompute=True)
    simulation.run()
    simulation.check_gradients()


MOVE, LOCAL = "expert_parallel_backward_move", "backward_move"
FAULTS = {
    "pulls before grads_ready": (MOVE, "    wait_for_all(flags.control, GRADS_READY, _epoch(flags.control), WAIT_PEER_GRADS)\n", "", ALL),
    "grads_ready before all have staged": (MOVE, "    if staged == gl.num_programs(0) - 1:", "    if staged == 0:", ALL),
    "sums before all have sent": (MOVE, "    wait_for_all(flags.control, GRADS_SENT, epoch, WAIT_PEER_SENT, True)\n", "", X | TOPK),
    "rows staged over before they are pulled": (MOVE, "    wait_for_all(flags.control, GRADS_SENT, epoch, WAIT_PEER_SENT, True)\n", "", UP),
    "sent before all CTAs have": (MOVE, "(sent == grid_size(s.T) - 1)", "(sent == 0)", TOPK),
    "a row of dx before its GEMMs": (MOVE, "        wait_at_least(flags.totals + DX_DONE, all_dx_tasks(s), flags.control, WAIT_ALL_DX, s.T)\n",
                                     "        pass\n", X),
    "a weight's gradient before its GEMMs": (MOVE, "    wait_at_least(flags.totals + DH_DONE, all_dh_tasks(s), flags.control, WAIT_ALL_DH, s.T)\n", "", TOPK),
    "the weight of another slot": (MOVE, "PEER_WEIGHTS + home), slot)", "PEER_WEIGHTS + home), slot ^ 1)", ALL),
    "weights not pulled": (MOVE, "            _pull_weights(rows, m, flags.control, piece, NW)\n", "", ALL),
    "weights not staged": (MOVE, "            gl.store(float_of(gl.load(peers + OWN_WEIGHTS), slot), value, mask=slot < s.T * K)\n", "", ALL),
    "x not staged again": (MOVE, "        stage_rows(s, x, x_stride_8, rows_at(base, gl.load(peers + OWN_X)), VECTORS)\n", "        pass\n", ALL),
    "rows of x from the buffer of dy": (MOVE, "            if OMIT & 2 == 0:\n                _copy_piece(s, rows, x, x_rows, piece, m, flags.control, PEER_X,",
                                    "            if True:\n                _copy_piece(s, rows, x, x_rows, piece, m, flags.control, PEER_DY,", UP),
    "rows of another token": (LOCAL, "token.to(gl.int64) * s.H)[:, None]", "(token ^ 1).to(gl.int64) * s.H)[:, None]", DOWN),
    "rows from the first rank": (LOCAL, "gl.load(peers_of(control) + PEERS + home)", "gl.load(peers_of(control) + PEERS + home * 0)", DOWN),
    "dx from the wrong slot": (LOCAL, "results + (token * m.K + k)", "results + (token * m.K + k * 0)", X),
    "weights' gradients to the first rank": (MOVE, "                expert = gl", "                home = home * 0\n                expert = gl", TOPK),
    "a route without expert keeps an old gradient": (MOVE, "slot), mask=row >= 0, other=0.0)", "slot), mask=slot < num_slots, other=0.0)", TOPK),
    "db_down without rows of dy": (MOVE, " | ((s.wants & WANT_BIAS_DOWN) != 0)", "", BIAS_DOWN),
    "z without rows of x": (MOVE, "if RECOMPUTE and OMIT & 2 == 0", "if RECOMPUTE and OMIT & 2 == 1", X),
    "x staged for dw_gate_up alone, for z too": (MOVE, "        return dh_columns(s, s.T * 0 - 1) > 0\n", "        return (s.wants & WANT_UP) != 0\n", X),
    "db_down weighted by slot": (LOCAL, "m.K, (), 1 + EP, False, L)", "m.K, (), 1, False, L)", BIAS_DOWN),
}


# Where somebody has to be late for a fault to show: the first CTA's pushes
PUSH = "    num_rows = s.num_tiles * TILE_M\n"
LATE = {"sent before all CTAs have": (PUSH, f"    __import__('time').sleep(0.04 * (1 - gl.local.program))\n{PUSH}")}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    name, old, new, wants = FAULTS[fault]
    for seed in range(16):                                # some need a rare order; a fault that is found ends the loop
        world = BackwardWorld(2, 4, 2, [[40, 30], [45, 25], [38, 31]], seed)
        passes = LAYERS if "again" in fault else BACKWARDS
        late = {(n, (seed + n) % 2): 0.05 for n in range(3)}
        mutations = {name: [(old, new), *([LATE[fault]] if fault in LATE else [])]}
        simulation = BackwardSimulation(world, wants, mutations=mutations, passes=passes, delays=late, slow=0.03 * (seed % 2 == 0),
                                        recompute=" z " in f" {fault} ")
        simulation.memory.deadline = time.monotonic() + 3
        simulation.run()
        try:
            simulation.check_gradients()
        except AssertionError:
            return
    pytest.fail("every gradient was right in spite of the fault")


def test_a_rank_that_stays_away_is_named_by_all_others():
    simulation = BackwardSimulation(BackwardWorld(3, 4, 2, [[20, 10, 15], [12, 30, 9]]), passes=BACKWARDS[:2], absent=(1, 2), limit_ms=1000)
    simulation.run()
    assert not simulation.problems, simulation.problems
    sync = simulation.modules["sync"]
    reported = {(rank, wait, tile) for rank, wait, tile, _, _ in simulation.reports}
    assert {rank for rank, _, _ in reported} == {0, 1} and any(wait == sync.WAIT_PEER_GRADS and tile == 2 for _, wait, tile in reported)
    assert all((wait, tile) in {(sync.WAIT_PEER_GRADS, 2), (sync.WAIT_ABORTED, 0), (sync.WAIT_ABORTED, 1)} for _, wait, tile in reported), reported
    for rank in (0, 1):
        assert all(np.isnan(grad).all() for grad in simulation.grads[1, rank]) and not any(np.isnan(grad).any() for grad in simulation.grads[0, rank])


def test_ranks_in_different_passes_say_so():
    """Two of three ranks run one layer's backward, the third another's: all of them report it, and nobody's gradients look right."""
    simulation = BackwardSimulation(BackwardWorld(3, 4, 2, [[20, 10, 15]]), passes=BACKWARDS[:1], numbers={(0, 2): 77}, limit_ms=5000)
    simulation.run()
    signature, aborted = simulation.modules["sync"].WAIT_SIGNATURE, simulation.modules["sync"].WAIT_ABORTED
    reported = {rank: (wait, tile, expected, seen) for rank, wait, tile, expected, seen in simulation.reports}
    assert set(reported) == {0, 1, 2} and all(report[0] in (signature, aborted) for report in reported.values())
    assert (signature, 2, 40, 77) in reported.values() or reported[2][1:] in ((0, 77, 40), (1, 77, 40))
    assert all(np.isnan(grad).all() for rank in range(3) for grad in simulation.grads[0, rank] if grad.size)
