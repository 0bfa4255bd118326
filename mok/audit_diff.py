"""Compares two records of runs: the first step and entry that differ, and, between different numbers of ranks, only what P3 promises."""
from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .arguments import check_type
from .audit import Entries, Record
from .fingerprint import differences

Value = str | int | float | None

_LAYER_ENTRY = re.compile(r"(?P<pass>part\d+)/(?P<layer>.*)/(?P<what>x|topk_ids|topk_weights|y|dy|dx|d_topk_weights)")
_EXPERT_GRADIENT = re.compile(r"gradient/(?P<layer>.*)\.(w_gate_up|w_down|b_gate_up|b_down)")
# Which entries of the same layer and pass an entry is computed from, beside the layer's parameters.
_COMPUTED_FROM = {"topk_ids": ("x",), "topk_weights": ("x",), "y": ("x", "topk_ids", "topk_weights"), "dx": ("x", "topk_ids", "topk_weights", "dy"),
                  "d_topk_weights": ("x", "topk_ids", "topk_weights", "dy")}
_ALWAYS_EQUAL = ("input", "learning_rate")     # global batch and schedule do not depend on the number of ranks


@dataclass(frozen=True)
class Difference:
    """Where two records first differ. name: the entry; first, second: its values, None where one side has no such entry."""

    step: int
    name: str
    first: Value
    second: Value

    def __str__(self) -> str:
        return f"step {self.step}: {self.name}: {_shown(self.first)} against {_shown(self.second)}"


@dataclass
class Comparison:
    """What `compare` found. fingerprint, configuration: facts that differ, as text. difference: the first one, None where all that was compared agrees.

    compared, not_compared: number of entries. left_out: how many entries of each kind were not compared, because P3 does not promise them at
    different numbers of ranks; unpromised_agreeing: how many of those agree all the same. rank_free: whether the numbers of ranks differ.
    last_step_compared: the last step of which anything that a layer computed was compared.
    """

    fingerprint: list[str]
    configuration: list[str]
    rank_free: bool
    steps: int
    compared: int = 0
    difference: Difference | None = None
    left_out: Counter[str] = field(default_factory=Counter)
    unpromised_agreeing: int = 0
    last_step_compared: int = 0

    @property
    def not_compared(self) -> int:
        return self.left_out.total()


def compare(first: Record, second: Record) -> Comparison:
    """Compare two records step by step, entry by entry, up to the first difference.

    Equal numbers of ranks: every entry, and the state at the end. Different ones: the state before the first step, each step's input and learning
    rate, and whatever a layer computed from equal entries (P3): routes from equal x; y from equal x and routes; dx, d_topk_weights and expert
    gradients from equal x, routes and dy; each with equal parameters.
    """
    for name, record in (("first", first), ("second", second)):
        check_type(name, record, Record, "a record that `mok.audit.read_record` gave")
    result = Comparison(differences(first.header["fingerprint"], second.header["fingerprint"]),
                        differences(_flat(first.header["configuration"]), _flat(second.header["configuration"])),
                        rank_free=first.ranks_at(0) != second.ranks_at(0), steps=min(len(first.steps), len(second.steps)) - 1)
    state: tuple[Entries, Entries] = ({}, {})
    for step, (ours, theirs) in enumerate(zip(first.steps, second.steps)):
        # for good: what other ranks added in another order stays in the parameters
        result.rank_free = result.rank_free or first.ranks_at(step) != second.ranks_at(step)
        if result.rank_free and step > 0:
            _compare_promised(result, step, ours, theirs, state)
        else:
            result.compared += len(ours)
            result.difference = first_difference(step, ours, theirs)
        if result.difference is not None:
            return result
        state = (ours, theirs)
    if not result.rank_free and first.end and second.end and len(first.steps) == len(second.steps):
        result.compared += len(first.end["state"])
        result.difference = first_difference(result.steps, first.end["state"], second.end["state"])
    if len(first.steps) != len(second.steps):
        lengths = [f"{len(record.steps) - 1} steps" for record in (first, second)]
        result.difference = Difference(result.steps + 1, "the record's length", *lengths)
    return result


def first_difference(step: int, first: Entries, second: Entries) -> Difference | None:
    """The first entry, in the order of `first`, whose value is not the same in both; entries that only one of them has count."""
    for name in {**first, **second}:
        if first.get(name) != second.get(name):
            return Difference(step, name, first.get(name), second.get(name))
    return None


def _compare_promised(result: Comparison, step: int, first: Entries, second: Entries, state: tuple[Entries, Entries]) -> None:
    """One step at different numbers of ranks. state: both records' entries of the step before, which hold the parameters that this one used."""
    premises = _Premises(first, second, *state)
    for name in {**first, **second}:
        if premises.promise(name):
            result.compared += 1
            if name not in _ALWAYS_EQUAL:
                result.last_step_compared = step
            if not premises.equal(name):
                result.difference = result.difference or Difference(step, name, first.get(name), second.get(name))
        else:
            result.left_out[_kind(name)] += 1
            result.unpromised_agreeing += premises.equal(name)


@dataclass(frozen=True)
class _Premises:
    """One step of two runs, and the step before: what P3 makes equal in it."""

    first: Entries
    second: Entries
    state_first: Entries
    state_second: Entries

    def promise(self, name: str) -> bool:
        """Whether the entry is computed from things that are equal in both runs, by something that P3 covers."""
        if name in _ALWAYS_EQUAL:
            return True
        entry = _LAYER_ENTRY.fullmatch(name)
        if entry:
            sources = _COMPUTED_FROM.get(entry["what"], ())
            names = [f"{entry['pass']}/{entry['layer']}/{source}" for source in sources]
            by_router = entry["what"].startswith("topk_")
            return bool(names) and all(map(self.equal, names)) and self._parameters_equal(entry["layer"], by_router)
        gradient = _EXPERT_GRADIENT.fullmatch(name)
        if gradient:                                                           # a sum over all passes of the step
            names = [other for other in {**self.first, **self.second} if (entry := _LAYER_ENTRY.fullmatch(other))
                     and entry["layer"] == gradient["layer"] and entry["what"] in _COMPUTED_FROM["dx"]]
            return bool(names) and all(map(self.equal, names)) and self._parameters_equal(gradient["layer"], of_router=False)
        return False

    def equal(self, name: str) -> bool:
        return self.first.get(name) == self.second.get(name)

    def _parameters_equal(self, layer: str, of_router: bool) -> bool:
        prefix, router = f"parameter/{layer}.", f"parameter/{layer}.router."
        names = [name for name in {**self.state_first, **self.state_second} if name.startswith(prefix) and name.startswith(router) == of_router]
        return all(self.state_first.get(name) == self.state_second.get(name) for name in names)


def _kind(name: str) -> str:
    """"y" of "part0/blocks.1.moe/y", "gradient" of "gradient/head.weight", "loss" of "loss"."""
    match = _LAYER_ENTRY.fullmatch(name)
    return match["what"] if match else re.sub(r"part\d+/", "", name).split("/")[0]


def _flat(configuration: dict[str, Any]) -> dict[str, Any]:
    """The settings beside the other facts; the text by its contents."""
    facts = {name: value for name, value in configuration.items() if name not in ("settings", "corpus", "data")}
    return {"text": configuration["corpus"]["sha256"], **facts, **configuration["settings"]}


def _shown(value: Any) -> str:
    return "nothing" if value is None else str(value)
