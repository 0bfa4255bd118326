"""The model of L2: its order of tasks is the kernel's, its list forgets what was used longest ago, and it counts what it must."""
from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from test_backward_tasks import ALL, sequence, tasks

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("traffic_model", ROOT / "runs" / "traffic_model.py")
model = importlib.util.module_from_spec(spec)
sys.modules["traffic_model"] = model
spec.loader.exec_module(model)


@pytest.mark.parametrize("wants,bits", [("xud", ALL), ("ud", ALL & ~1), ("d", 8)])
@pytest.mark.parametrize("group", [1, 3, 16])
def test_the_order_of_tasks_is_the_kernels(wants, bits, group):
    problem = model.Problem(700, 512, 320, 6, 3)
    s = tasks.make_schedule(512, 320, 0, 0, 700, problem.tiles, 6, 0, group, bits)
    names = ["dh", "dx", "dw_up", "dw_down"]
    expected = [(names[kind], tile, column, expert if kind >= 2 else problem.tile_to_expert[tile]) for kind, _, tile, column, expert in sequence(s)]
    assert model.backward_tasks(problem, model.Setting(group), wants) == expected


def test_the_list_forgets_what_was_used_longest_ago(monkeypatch):
    monkeypatch.setattr(model, "CAPACITY", 3 * model.PIECE)
    l2 = model.L2()
    for name in "abc":
        l2.touch((name,), model.PIECE)
    l2.touch(("a",), model.PIECE)
    l2.touch(("d",), model.PIECE, write=True)          # b goes
    assert l2.read == 3 * model.PIECE and list(l2.held) == [("c",), ("a",), ("d",)]
    for name in "efg":
        l2.touch((name,), model.PIECE)                 # d goes too, to memory
    assert l2.written == model.PIECE and l2.read == 6 * model.PIECE


def test_nothing_is_read_twice_where_all_of_it_fits(monkeypatch):
    """Forward of a small problem in a cache without limits: gathered rows, both weights once, results for the combine."""
    monkeypatch.setattr(model, "CAPACITY", 1 << 40)
    problem = model.Problem(512, 256, 256, 4, 2)
    read = model.forward(problem, model.Setting(4))["read_by"]
    rows = problem.tiles * 128 * 256 * 2 / 1e9
    assert read["gather"] == read["combine"] == round(rows, 2) and set(read) == {"gather", "combine", "w up", "w down"}


@pytest.mark.parametrize("tickets", [False, True])
def test_every_task_runs_once(tickets):
    problem = model.Problem(3000, 512, 256, 8, 2)
    found = model.backward(problem, model.Setting(4, tickets=tickets))
    assert found["units"] > 0 and found["read"] > 0
    done = []
    run = model.Backward(problem, model.Setting(4))
    finish = run.finish
    run.finish = lambda task: (done.append(task), finish(task))
    order = model.backward_tasks(problem, model.Setting(4))
    model.simulate(order, run, tickets)
    assert sorted(done) == sorted(order)


def test_aligned_groups_cover_every_tile_once_and_mostly_end_with_an_expert():
    problem = model.Problem(4000, 256, 256, 16, 4)
    groups = problem.groups(model.Setting(8, aligned=True))
    assert [tile for group in groups for tile in group] == list(range(problem.tiles))
    ends = {group.stop for group in groups}
    assert len(ends & {*problem.first_tile.values(), problem.tiles}) >= 0.8 * len(ends) and max(map(len, groups)) <= 16
