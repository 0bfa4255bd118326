"""The recorder: what it names and digests, that it changes no bit, and that ranks together record what one rank does."""
from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import mok
from mok.audit import Record
from mok.audit_diff import compare
from mok.determinism import digest
from mok.recorder import StepRecorder
from tests.ranks import RankPool

H, E, K, T = 24, 5, 2, 37


class Model(nn.Module):
    """Two MoE layers between dense ones: `layers.0` and `layers.1`; E is divisible by no W > 1."""

    def __init__(self, group=None, recompute: bool = False, shared: tuple[int, ...] = (8,)):
        super().__init__()
        torch.manual_seed(3)
        self.recompute = recompute
        self.inner = nn.Linear(H, H, bias=False)
        config = [mok.MoEConfig(hidden_size=H, intermediate_size=16, num_experts=E, top_k=K, shared_intermediate_sizes=shared, aux_loss_coef=0.0,
                                layer_index=i) for i in range(2)]
        self.layers = nn.ModuleList(mok.MoE(c, group=group) for c in config)

    def forward(self, x):
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        return torch.tanh(x)


def batch(step: int) -> torch.Tensor:
    return torch.randn(T, H, generator=torch.Generator().manual_seed(step))


def train(model: Model, recorder: StepRecorder | None, optimizer, steps: int = 2, tokens: slice = slice(None), parts: int = 1, reduce=lambda gradient: None):
    for step in range(1, steps + 1):
        x = batch(step)[tokens]
        optimizer.zero_grad()
        if recorder:
            recorder.begin(x)
        loss = 0.0
        for part in x.chunk(parts):
            part_loss = model(part).square().sum() / T
            part_loss.backward()
            loss += part_loss.item()
        for name, parameter in model.named_parameters():
            if (parameter.grad is not None and not name.endswith(("w_gate_up", "w_down"))) or ".shared_experts." in name:
                reduce(parameter.grad)
        if recorder:
            recorder.gradients(loss=loss)
        optimizer.step()
        if recorder:
            recorder.end(step, learning_rate=0.1)


def recorded(parts: int = 1, steps: int = 2, **options) -> tuple[Model, list[dict]]:
    model = Model(**options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps_seen: list[dict] = []
    recorder = StepRecorder(model, optimizer, lambda step, entries: steps_seen.append({"step": step, **entries}))
    recorder.start()
    train(model, recorder, optimizer, steps, parts=parts)
    return model, steps_seen


def test_entries_stand_in_the_order_of_the_computation():
    model, (start, first, second) = recorded()
    state = [f"parameter/{name}" for name in model.state_dict()]
    assert list(start) == ["step", *state]
    layer = [f"part0/layers.{{}}/{what}" for what in ("x", "topk_ids", "topk_weights", "y")]
    backward = [f"part0/layers.{{}}/{what}" for what in ("dy", "dx", "d_topk_weights")]
    used = [name for name, _ in model.named_parameters() if name != "inner.weight"]                  # inner is never called: no gradient, no momentum
    # layers.0 reads the data itself: no dx
    assert list(first) == list(second) == [
        "step", "input", *(name.format(0) for name in layer), *(name.format(1) for name in layer), "part0/output",
        *(name.format(1) for name in backward), backward[0].format(0), backward[2].format(0), "loss", *(f"gradient/{name}" for name in used), "learning_rate",
        *state, *(f"optimizer/momentum_buffer/{name}" for name in used)]


def test_the_digests_are_those_of_the_tensors():
    _, (start, first, _) = recorded(steps=2)
    fresh, optimizer = Model(), None
    assert [start[f"parameter/{name}"] for name in fresh.state_dict()] == [str(digest(t)) for t in fresh.state_dict().values()]
    optimizer = torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9)
    layer = fresh.layers[1]
    seen = {}
    layer.register_forward_hook(lambda module, inputs, y: (seen.update(x=inputs[0].detach(), y=y.detach()),
                                                           y.register_hook(lambda dy: seen.update(dy=dy.clone())))[0])
    x = batch(1)
    output = fresh(x)
    (output.square().sum() / T).backward()
    ids, weights = layer.routes
    shared = [part.weights() for part in layer.shared_experts]
    alone_x, alone_weights = seen["x"].clone().requires_grad_(), weights.clone().requires_grad_()
    y = mok.moe(alone_x, ids, alone_weights, layer.w_gate_up.detach(), layer.w_down.detach(),
                shared=[mok.SharedExpert(s.w_gate_up.detach(), s.w_down.detach()) for s in shared])
    y.backward(seen["dy"])
    expected = {"input": x, "part0/layers.1/x": seen["x"], "part0/layers.1/topk_ids": ids, "part0/layers.1/topk_weights": weights, "part0/layers.1/y": y,
                "part0/layers.1/dy": seen["dy"], "part0/layers.1/dx": alone_x.grad, "part0/layers.1/d_topk_weights": alone_weights.grad, "part0/output": output,
                "gradient/layers.0.router.weight": fresh.layers[0].router.weight.grad, "gradient/layers.1.w_down": layer.w_down.grad}
    optimizer.step()
    expected |= {"parameter/layers.1.w_down": layer.w_down, "optimizer/momentum_buffer/layers.1.w_down": optimizer.state[layer.w_down]["momentum_buffer"]}
    for name, tensor in expected.items():
        assert first[name] == str(digest(tensor)), name


def test_recording_changes_no_bit_and_can_be_taken_off():
    model, _ = recorded(parts=2, steps=3)
    plain = Model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    train(plain, None, optimizer, steps=3, parts=2)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    hooks = StepRecorder(plain, optimizer, lambda step, entries: None)
    assert plain._forward_hooks and plain.layers[0]._forward_hooks
    hooks.remove()
    assert not plain._forward_hooks and not plain.layers[0]._forward_hooks


def test_parts_are_told_apart_and_passes_outside_of_a_step_are_not_recorded():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[dict] = []
    recorder = StepRecorder(model, optimizer, lambda step, entries: seen.append(entries))
    model(batch(7)).sum().backward()                                                                # before the first step: a validation, say
    train(model, recorder, optimizer, steps=1, parts=3)
    parts = sorted({name.split("/")[0] for name in seen[0] if name.startswith("part")} - {"parameter"})
    assert parts == ["part0", "part1", "part2"]
    assert len({seen[0][f"part{i}/layers.0/y"] for i in range(3)}) == 3
    model(batch(8)).sum().backward()
    train(model, recorder, optimizer, steps=1)
    assert {name.split("/")[0] for name in seen[1] if name.startswith("part")} - {"parameter"} == {"part0"}


def test_a_recomputed_forward_is_recorded_once():
    """Without early stop: with it, recomputation ends inside the layer, before any hook on its result."""
    with set_checkpoint_early_stop(False):
        assert recorded(recompute=True)[1] == recorded(recompute=False)[1]


def test_a_model_that_is_one_layer_without_optimizer_or_gradient():
    layer = mok.MoE(mok.MoEConfig(hidden_size=H, intermediate_size=16, num_experts=E, top_k=K))
    seen: list[dict] = []
    recorder = StepRecorder(layer, None, lambda step, entries: seen.append(entries))
    x = batch(1).view(1, T, H)
    with torch.no_grad():
        recorder.begin(x)
        y = layer(x)
        recorder.gradients()
        recorder.end(1)
    assert seen[0]["part0//y"] == str(digest(y.view(T, H))) and seen[0]["part0/output"] == str(digest(y)) and "part0//dy" not in seen[0]
    assert "gradient/w_down" not in seen[0] and seen[0]["parameter/w_down"] == str(digest(layer.w_down))


def test_a_flipped_bit_is_found_where_it_happens():
    _, truth = recorded()
    for name, expected in (("layers.1.w_down", "part0/layers.1/y"), ("layers.0.router.weight", "part0/layers.0/topk_ids")):
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        seen: list[dict] = []
        recorder = StepRecorder(model, optimizer, lambda step, entries, seen=seen: seen.append({"step": step, **entries}))
        recorder.start()
        with torch.no_grad():
            raw = dict(model.named_parameters())[name].view(torch.int32).view(-1)
            raw[:E * H if "router" in name else 2 * H] ^= 1 << 21                                    # a fault after the state was recorded
        train(model, recorder, optimizer)
        assert seen[0] == truth[0]
        assert next(key for key in truth[1] if seen[1][key] != truth[1][key]) == expected


# --- several ranks ---------------------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def pool():
    pool = RankPool(3)
    yield pool
    pool.close()


def rank_records(process_group, cuts: list[int], fault: str | None = None) -> list[dict]:
    group = mok.ExpertGroup(process_group, timeout_s=30)
    model = Model(group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def combine(tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor, group=process_group)
        return tensor

    seen: list[dict] = []
    recorder = StepRecorder(model, optimizer, lambda step, entries: seen.append(entries), rank=group.rank, world_size=group.size, combine=combine)
    if fault == "replica" and group.rank == 1:
        with torch.no_grad():
            model.layers[1].router.weight[2, 3] += 1
    recorder.start()
    if fault == "expert" and group.rank == 1:
        with torch.no_grad():
            model.layers[0].w_down[0] *= 1.001
    tokens = slice(cuts[group.rank], cuts[group.rank + 1])
    train(model, recorder, optimizer, tokens=tokens, reduce=lambda gradient: dist.all_reduce(gradient, group=process_group))
    return seen


def as_record(steps: list[dict], ranks: int) -> Record:
    steps = [{name: value for name, value in step.items() if name not in ("step", "loss")} for step in steps]        # the loss is a local one here
    return Record("", {"fingerprint": {}, "configuration": {"settings": {}, "corpus": {"sha256": ""}, "ranks": ranks}}, steps)


@pytest.mark.parametrize("cuts", [[0, 15, T], [0, 0, T], [0, 9, 20, T]])
def test_ranks_record_what_one_rank_does_wherever_p3_promises_it(pool, cuts):
    """Unequal shares, an empty one too."""
    W = len(cuts) - 1
    records = pool.run(rank_records, W, cuts)
    assert all(as_record(record, W).steps == as_record(records[0], W).steps for record in records)     # every rank has the global digests
    assert not any("replicas differ" in step for step in records[0])
    alone = recorded()[1]
    found = compare(as_record(alone, 1), as_record(records[0], W))
    assert found.rank_free and found.difference is None
    # all of step 1 but dense gradients and what follows from them: tanh and + keep bits whatever the share of the batch
    first, theirs = as_record(alone, 1).steps[1], records[0][1]
    differing = [name for name in first if first[name] != theirs[name]]
    assert all(name.startswith(("gradient/", "parameter/", "optimizer/")) and ("router" in name or "shared" in name) for name in differing), differing
    assert found.last_step_compared >= 1 and found.compared >= 12 + 2 * (3 + 2 + 2) + 2


def test_a_fault_in_one_ranks_expert_is_found(pool):
    found = compare(as_record(recorded()[1], 1), as_record(pool.run(rank_records, 2, [0, 15, T], "expert")[0], 2))
    assert (found.difference.step, found.difference.name) == (1, "part0/layers.0/y")


def test_a_replica_that_differs_is_named(pool):
    records = pool.run(rank_records, 2, [0, 15, T], "replica")
    assert records[0][0]["replicas differ"] == "parameter/layers.1.router.weight"
    assert compare(as_record(recorded()[1], 1), as_record(records[0], 2)).difference.name == "replicas differ"


def test_ranks_need_a_way_to_combine():
    model = Model()
    for wrong in ({"rank": 2, "world_size": 2, "combine": copy.copy}, {"world_size": 2}, {"combine": copy.copy}):
        with pytest.raises(ValueError, match=r"^(rank|combine)="):
            StepRecorder(model, None, lambda step, entries: None, **wrong)
