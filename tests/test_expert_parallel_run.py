"""What runs/expert_parallel.py makes of the host times of its ranks."""
from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module")
def run():
    spec = importlib.util.spec_from_file_location("expert_parallel_run", Path(__file__).parent.parent / "runs" / "expert_parallel.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_calls_beside_a_slow_loop_are_left_out_and_told(run):
    """Rank 0 is disturbed in half of its calls, rank 1 in all of its backwards, rank 2 always: its own fastest loop is no measure."""
    quick, slow = [(100_000, 1600)] * 30, [(190_000, 2900)] * 30
    ranks = [{"forward": [*quick, *slow], "backward": [*quick, *slow]}, {"forward": [(120_000, 1700)] * 60, "backward": slow * 2},
             {"forward": slow * 2, "backward": slow * 2}]
    found = run.host_summary(ranks)
    assert found["fastest_loop"] == 1.6
    assert found["forward"] == {"slowest": {"undisturbed": 120.0, "all": 190.0}, "undisturbed": [100.0, 120.0, None], "all": [145.0, 120.0, 190.0],
                                "part_undisturbed": [0.5, 1.0, 0.0]}
    assert found["backward"]["undisturbed"] == [100.0, None, None] and found["backward"]["slowest"]["undisturbed"] == 100.0
    assert run.host_summary(ranks[2:])["forward"]["part_undisturbed"] == [1.0], "alone it has no other to be compared with"


def test_the_probe_runs_a_loop_on_the_thread_of_backward_and_changes_nothing(run):
    x = torch.randn(3, 4, requires_grad=True)
    run.Probe.loops.clear()
    (dx,) = torch.autograd.grad(run.Probe.apply(x) * 2, x, torch.ones(3, 4))
    assert torch.equal(dx, torch.full((3, 4), 2.0)) and len(run.Probe.loops) == 1 and run.Probe.loops[0] > 0
    dy, grads = torch.ones(3, 4), (torch.full((3, 4), 5.0),)
    assert torch.equal(torch.autograd.grad(run.Nothing.apply(dy, grads, x), x, dy)[0], grads[0])
