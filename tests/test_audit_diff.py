"""Comparing records: the first difference in the run's own order, and between numbers of ranks only what P3 promises."""
from __future__ import annotations

import pytest

from mok.audit import Record
from mok.audit_diff import Difference, compare, first_difference

LAYERS = ("blocks.0.moe", "blocks.1.moe")


def record(ranks: int = 1, steps: int = 3, **settings) -> Record:
    """A run of two MoE layers; each entry's value names its step, so equal steps are equal."""
    configuration = {"settings": {"seed": 0, "steps": steps, **settings}, "corpus": {"name": "a", "sha256": "1"}, "data": None, "device": "cpu", "ranks": ranks}
    state = [f"parameter/{layer}.{name}" for layer in LAYERS for name in ("w_gate_up", "w_down", "router.weight")] + ["parameter/embedding"]
    passes = [f"part{part}/{layer}/{what}" for part in range(2) for layer in LAYERS for what in ("x", "topk_ids", "topk_weights", "y")]
    backward = [f"part{part}/{layer}/{what}" for part in range(2) for layer in LAYERS for what in ("dy", "dx", "d_topk_weights")]
    gradients = [name.replace("parameter/", "gradient/") for name in state]
    names = ["input", *passes, "part0/output", *backward, "loss", *gradients, "grad_norm", "learning_rate", *state]
    entries = [{name: f"{name} {0}" for name in state}, *({name: f"{name} {step}" for name in names} for step in range(1, steps + 1))]
    return Record("file", {"fingerprint": {"torch": "2"}, "configuration": configuration}, entries, end={"hash": "", "state": {"optimizer/a": "1"}})


def change(changed: Record, step: int, *names: str) -> Record:
    for name in names:
        assert name in changed.steps[step]
        changed.steps[step][name] += " changed"
    return changed


def test_equal_records_are_equal_and_every_entry_is_compared():
    found = compare(record(), record())
    assert found.difference is None and not found.rank_free and not found.configuration and not found.fingerprint
    assert found.compared == sum(len(step) for step in record().steps) + 1 and found.not_compared == 0      # 1: the state at the end


def test_a_state_that_differs_at_the_end_is_a_difference():
    other = record()
    other.end["state"]["optimizer/a"] = "2"
    assert compare(record(), other).difference == Difference(3, "optimizer/a", "1", "2")


@pytest.mark.parametrize("name", ["input", "part1/blocks.0.moe/dx", "learning_rate", "parameter/blocks.0.moe.w_down"])
def test_the_first_difference_is_the_first_that_the_run_computed(name):
    changed = change(change(record(), 2, name, "parameter/blocks.1.moe.w_down"), 3, "input")
    found = compare(record(), changed)
    assert found.difference == Difference(2, name, f"{name} 2", f"{name} 2 changed")
    assert str(found.difference) == f"step 2: {name}: {name} 2 against {name} 2 changed"


def test_an_entry_that_one_record_lacks_is_a_difference():
    shorter = record()
    del shorter.steps[2]["loss"]
    assert compare(record(), shorter).difference == Difference(2, "loss", "loss 2", None)
    assert compare(shorter, record()).difference == Difference(2, "loss", None, "loss 2")
    assert first_difference(0, {}, {}) is None


def test_a_record_that_ends_before_the_other_differs_there():
    found = compare(record(steps=3), record(steps=5))
    assert found.difference == Difference(4, "the record's length", "3 steps", "5 steps") and found.steps == 3
    assert found.configuration == ["steps: 3 against 5"]


def test_facts_that_differ_are_named():
    other = record(seed=1)
    other.header["fingerprint"] = {"torch": "3", "gpu": "one"}
    other.header["configuration"]["corpus"] = {"name": "b", "sha256": "2"}
    found = compare(record(), other)
    assert found.configuration == ["text: 1 against 2", "seed: 0 against 1"]
    assert found.fingerprint == ["torch: 2 against 3", "gpu: nothing against one"]


# --- different numbers of ranks --------------------------------------------------------------------------------------------------------------

def test_at_other_ranks_everything_that_p3_promises_is_compared():
    found = compare(record(ranks=1), record(ranks=2))
    promised = 2 + 2 * 2 * 3 + 2 * 2 * 2 + 2 * 2      # input and rate; ids, weights, y; dx, d_topk_weights; two expert gradients of two layers
    assert found.rank_free and found.difference is None and found.last_step_compared == 3
    assert found.compared == len(record().steps[0]) + 3 * promised
    assert found.not_compared == 3 * (len(record().steps[1]) - promised) == found.unpromised_agreeing
    assert found.left_out["x"] == found.left_out["dy"] == 3 * 2 * 2 and found.left_out["gradient"] == 3 * 3 and found.left_out["loss"] == 3


@pytest.mark.parametrize("name", ["input", "part0/blocks.0.moe/topk_ids", "part1/blocks.1.moe/y", "part1/blocks.0.moe/dx", "part0/blocks.1.moe/d_topk_weights",
                                  "gradient/blocks.1.moe.w_down", "learning_rate"])
def test_at_other_ranks_a_broken_promise_is_a_difference(name):
    found = compare(record(), change(record(ranks=3), 2, name))
    assert found.difference == Difference(2, name, f"{name} 2", f"{name} 2 changed")


def test_at_other_ranks_the_state_before_the_first_step_must_be_equal():
    assert compare(record(), change(record(ranks=2), 0, "parameter/blocks.0.moe.w_down")).difference.name == "parameter/blocks.0.moe.w_down"


@pytest.mark.parametrize("cause, effects", [
    ("part0/blocks.0.moe/x", ["part0/blocks.0.moe/topk_ids", "part0/blocks.0.moe/y", "part0/blocks.0.moe/dx", "gradient/blocks.0.moe.w_down"]),
    ("part1/blocks.1.moe/dy", ["part1/blocks.1.moe/dx", "part1/blocks.1.moe/d_topk_weights", "gradient/blocks.1.moe.w_gate_up"]),
    ("part0/output", ["loss", "grad_norm", "gradient/embedding", "gradient/blocks.0.moe.router.weight", "parameter/blocks.0.moe.w_down"]),
])
def test_at_other_ranks_what_follows_from_unequal_inputs_is_not_compared(cause, effects):
    found = compare(record(), change(record(ranks=2), 3, cause, *effects))
    assert found.difference is None
    assert found.unpromised_agreeing < found.not_compared
    untouched = {"part0/blocks.0.moe/x": "part1/blocks.0.moe/y", "part1/blocks.1.moe/dy": "part1/blocks.1.moe/y",
                 "part0/output": "part0/blocks.0.moe/dx"}[cause]
    assert compare(record(), change(record(ranks=2), 3, cause, *effects, untouched)).difference.name == untouched


@pytest.mark.parametrize("parameter, released, held", [("w_down", "y", "topk_ids"), ("router.weight", "topk_ids", "y")])
def test_at_other_ranks_unequal_parameters_release_what_they_enter(parameter, released, held):
    """The parameters that a step used are those that the step before it left."""
    def differing(what: str) -> Record:
        other = change(record(ranks=2), 1, f"parameter/blocks.0.moe.{parameter}")
        return change(other, 2, f"part0/blocks.0.moe/{what}")

    assert compare(record(), differing(released)).difference is None
    assert compare(record(), differing(held)).difference.name == f"part0/blocks.0.moe/{held}"


def test_once_the_ranks_differ_only_promises_are_compared():
    """The second run went on with two ranks after step 1, and with one again after step 2: what they added stays in its parameters."""
    changed = change(record(), 3, "part0/blocks.0.moe/x", "part0/blocks.0.moe/y", "parameter/embedding")
    changed.resumes = [{"step": step, "configuration": {"ranks": ranks}, "state": {}} for step, ranks in ((1, 2), (2, 1))]
    assert [changed.ranks_at(step) for step in range(4)] == [1, 1, 2, 1]
    found = compare(record(), changed)
    assert found.rank_free and found.difference is None
    assert found.left_out["parameter"] == 2 * 7                                                      # of steps 2 and 3
    assert compare(record(), change(changed, 1, "loss")).difference.name == "loss"
    changed.resumes = []
    assert compare(record(), changed).difference.step == 1
