"""The flags between ranks in random interleavings: right as they are, and every single wait is needed."""
from __future__ import annotations

import random

import pytest

from tests.fabric.protocol_model import FAULTS, MAX_TOKENS, WAITS, Deadlock, EarlyReuse, K, Launch, LostRow, Model

BROKEN = (Deadlock, EarlyReuse, LostRow)
# Two layers in flight (forward, forward, backward, backward), then backwards that want weights' gradients alone, in which nothing comes home.
LAUNCHES = (Launch(1), Launch(2), Launch(2, True), Launch(1, True), Launch(3), Launch(3, True, returns=False), Launch(3, True, returns=False),
            Launch(3, True, x_rows=False), Launch(4))


def draw_model(seed: int, W: int = 3, launches=LAUNCHES, **options) -> Model:
    """Random routes for each exchange: T of 0 to MAX_TOKENS on each rank, -1 routes, an expert more than ranks; some ranks get no row at all."""
    chance = random.Random(seed)
    num_experts = W + 1
    favourite = chance.randrange(num_experts)
    exchanges = max(launch.exchange for launch in launches)
    routes = [[[[favourite if chance.random() < 0.3 else chance.randrange(-1, num_experts) for _ in range(K)] for _ in range(chance.randint(0, MAX_TOKENS))]
               for _ in range(W)] for _ in range(exchanges)]
    return Model(routes, launches, num_experts, **options)


def first_fault(schedules: int, **options) -> tuple[int, BaseException] | None:
    for seed in range(schedules):
        try:
            draw_model(seed, **options).run(seed)
        except BROKEN as fault:
            return seed, fault
    return None


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("W", [1, 2, 3, 4])
def test_the_protocol_loses_nothing_and_never_hangs(W, blocking):
    assert first_fault(300 if W < 3 else 150, W=W, blocking=blocking) is None


@pytest.mark.parametrize("wait", WAITS)
def test_leaving_out_any_single_wait_is_found(wait):
    found = first_fault(1000, without=(wait,))
    assert found is not None, f"1000 schedules without {wait!r} were all right: the wait is not needed, or the model cannot see it"
    draw_model(found[0]).run(found[0])                   # the same routes and schedule are right with the wait


@pytest.mark.parametrize("fault", FAULTS)
def test_known_mistakes_are_found(fault):
    found = first_fault(1000, fault=fault)
    assert found is not None
    draw_model(found[0]).run(found[0])


@pytest.mark.parametrize("launch", range(1, len(LAUNCHES) + 1))
def test_when_a_rank_stops_the_others_abort_and_end(launch):
    """Rule 8: a rank's host launches nothing from some point on; whoever waits times out and tells all pages, so nobody hangs and all know by whom."""
    aborts = 0
    for seed in range(40):
        stopped = seed % 3
        model = draw_model(seed, stop=(stopped, launch))
        model.run(seed)
        said = [rank.flags["abort"] for r, rank in enumerate(model.ranks) if r != stopped]
        assert said[0] == said[1] and not said[0][stopped], said
        aborts += any(said[0])
    assert aborts > 20                                   # in the rest nobody needed that rank any more


def test_a_rank_that_stops_is_a_deadlock_without_time_outs(monkeypatch):
    monkeypatch.setattr(Model, "_time_out", lambda self, roles, chance: (_ for _ in ()).throw(Deadlock))
    with pytest.raises(Deadlock):
        for seed in range(40):
            draw_model(seed, stop=(seed % 3, 2)).run(seed)
