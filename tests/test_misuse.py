"""Misuse of every public entry point, one table each: a ValueError that names the argument, whatever is wrong with it."""
from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import mok
from mok.audit import Record, RecordWriter, read_record
from mok.audit_diff import compare
from mok.determinism import DigestBatch, combine_digests, digest
from mok.recorder import StepRecorder

NAN, INF, HUGE = float("nan"), float("inf"), 10**30
NOT_INTEGERS = (None, "a", 1.5, NAN, True, [1], torch.tensor(1))
NOT_NUMBERS = (None, "a", NAN, True, [1.0], torch.tensor(1.0), 10**400)


def refused(name: str, call, *args, **kwargs) -> None:
    """The call raises ValueError whose message begins with the argument's name (and perhaps a part of it: shared[0].w_down)."""
    with pytest.raises(ValueError) as caught:
        call(*args, **kwargs)
    assert type(caught.value) is ValueError, repr(caught.value)
    assert re.match(rf"{re.escape(name)}(?![A-Za-z0-9_])", str(caught.value)), f"{caught.value} does not name {name}"


def labels(rows) -> list[str]:
    return [f"{row[0]}-{i}" for i, row in enumerate(rows)]


# ---- mok.moe ----

def arguments(T=5, H=6, I=4, E=3, K=2) -> dict:
    return {"x": torch.randn(T, H), "topk_ids": torch.zeros(T, K, dtype=torch.int64), "topk_weights": torch.rand(T, K), "w_gate_up": torch.randn(E, 2 * I, H),
            "w_down": torch.randn(E, H, I), "b_gate_up": torch.randn(E, 2 * I), "b_down": torch.randn(E, H),
            "shared": [mok.SharedExpert(torch.randn(8, H), torch.randn(H, 4), torch.randn(H))],
            "main_grad": (torch.zeros(E, 2 * I, H), torch.zeros(E, H, I))}


def shared_with(**parts) -> list:
    whole = {"w_gate_up": torch.zeros(8, 6), "w_down": torch.zeros(6, 4), "gate_weight": torch.zeros(6)}
    return [mok.SharedExpert(**whole | parts)]


ACCUMULATORS = (torch.zeros(3, 8, 6), torch.zeros(3, 6, 4))
# (what the message begins with, the argument, its bad values)
MOE = [
    ("x", "x", [None, 1.0, [[1.0] * 6] * 5, "x", torch.tensor(1.0), torch.zeros(5, 6, dtype=torch.int64), torch.zeros(5, 6, dtype=torch.complex64),
                torch.zeros(5, 6).to_sparse(), torch.zeros(5, 6, dtype=torch.float8_e4m3fn)]),
    ("topk_ids", "topk_ids", [None, [[0, 1]] * 5, torch.tensor(0), torch.zeros(5, 2), torch.zeros(5, 2, dtype=torch.int16), torch.zeros(5, 2, dtype=torch.bool),
                              torch.zeros(5, 0, dtype=torch.int64), torch.zeros(4, 2, dtype=torch.int64), torch.full((5, 2), 3), torch.full((5, 2), -2),
                              torch.full((5, 2), 2**62), torch.zeros(5, 2, dtype=torch.int64, device="meta")]),
    ("topk_weights", "topk_weights", [None, [[0.5, 0.5]] * 5, torch.tensor(0.5), torch.zeros(5, 3), torch.zeros(5, 2, dtype=torch.int64),
                                      torch.zeros(5, 2, device="meta"), torch.zeros(5, 2).to_sparse()]),
    ("w_gate_up", "w_gate_up", [None, [], torch.zeros(8, 6), torch.zeros(3, 7, 6), torch.zeros(3, 8, 5), torch.zeros(0, 8, 6), torch.zeros(3, 0, 6),
                                torch.zeros(3, 8, 6, dtype=torch.int8), torch.zeros(3, 8, 6, device="meta")]),
    ("w_down", "w_down", [None, [], torch.zeros(6, 4), torch.zeros(3, 4, 6), torch.zeros(3, 6, 4, dtype=torch.int8), torch.zeros(3, 6, 4, device="meta")]),
    ("b_gate_up", "b_gate_up", [[[0.0] * 8] * 3, 0.0, "b", torch.zeros(8), torch.zeros(3, 4), torch.zeros(3, 8).int(), torch.zeros(3, 8, device="meta")]),
    ("b_down", "b_down", [[[0.0] * 6] * 3, 0.0, "b", torch.zeros(6), torch.zeros(3, 5), torch.zeros(3, 6).int(), torch.zeros(3, 6, device="meta")]),
    ("shared", "shared", [None, 1, "experts", (s for s in shared_with()), shared_with()[0], {}]),
    ("shared[0]", "shared", [[None], [1], [(torch.zeros(8, 6), torch.zeros(6, 4))], ["a"]]),
    ("shared[0].w_gate_up", "shared", [shared_with(w_gate_up=v) for v in (
        None, [], torch.zeros(7, 6), torch.zeros(0, 6), torch.zeros(8, 5), torch.zeros(8, 6).int(),
    )]),
    ("shared[0].w_down", "shared", [shared_with(w_down=v) for v in (None, [], torch.zeros(4, 6), torch.zeros(6, 4).int(), torch.zeros(6, 4, device="meta"))]),
    ("shared[0].gate_weight", "shared", [shared_with(gate_weight=v) for v in ([0.0] * 6, 1.0, torch.zeros(5), torch.zeros(1, 6), torch.zeros(6).int())]),
    ("activation", "activation", [None, 1, "gelu", ["swiglu"], torch.zeros(2)]),
    ("swiglu_limit", "swiglu_limit", ["a", NAN, 0, -1.0, True, [7.0], torch.tensor(7.0), 10**400, 1e39, 10**300]),
    ("precision", "precision", [None, 16, "int4", torch.bfloat16, ["bf16"]]),
    ("group", "group", ["a", 1, True, torch.zeros(1), mok.ExpertGroup]),
    ("overlap", "overlap", ["a", 128, True, {"minibatch_rows": 128}, mok.Overlap]),
    ("main_grad", "main_grad", [1, "ab", ACCUMULATORS[0], ACCUMULATORS[:1], (*ACCUMULATORS, ACCUMULATORS[0]), {}, True]),
    ("main_grad[0]", "main_grad", [
        (None, ACCUMULATORS[1]), ([], ACCUMULATORS[1]), (ACCUMULATORS[0].half(), ACCUMULATORS[1]), (torch.zeros(3, 8, 5), ACCUMULATORS[1]),
        (torch.zeros(3, 6, 8).mT, ACCUMULATORS[1]), (ACCUMULATORS[0].to("meta"), ACCUMULATORS[1]),
    ]),
    ("main_grad[1]", "main_grad", [(ACCUMULATORS[0], None), (ACCUMULATORS[0], 1.0), (ACCUMULATORS[0], ACCUMULATORS[1].double()),
                                   (ACCUMULATORS[0], torch.zeros(3, 6, 4, requires_grad=True))]),
    ("layer_key", "layer_key", [None, "a", 1.5, NAN, True]),
    ("recompute", "recompute", [1, True, "x", "Z", ["z"], torch.zeros(1)]),
]
MOE_ROWS = [(begins, argument, value) for begins, argument, values in MOE for value in values]


@pytest.mark.parametrize(("begins", "argument", "value"), MOE_ROWS, ids=labels(MOE_ROWS))
def test_moe(begins, argument, value):
    mok.moe(**arguments())
    refused(begins, mok.moe, **arguments() | {argument: value})


def test_moe_takes_what_only_looks_odd():
    """A tuple of tensors and a list of them, an int for a float, weights of another float dtype, a limit of infinity."""
    given = arguments()
    y = mok.moe(**given)
    for odd in ({"main_grad": list(given["main_grad"])}, {"shared": tuple(given["shared"])}, {"topk_ids": given["topk_ids"].int()},
                {"topk_weights": given["topk_weights"].double()}, {"swiglu_limit": INF}, {"swiglu_limit": 10**9}, {"overlap": mok.Overlap()}):
        assert torch.equal(mok.moe(**given | odd), y), odd


def test_moe_looks_again_at_what_only_equals_a_call_that_passed(monkeypatch):
    """Calls that passed are remembered, and True equals 1 and hashes like it."""
    import mok.function as function

    looks = []
    monkeypatch.setattr(function, "check_moe_arguments", lambda *a, check=function.check_moe_arguments: looks.append(1) or check(*a))
    given = arguments(T=7, H=4, I=4)                 # sizes that no other test has
    for good, bad in (({"swiglu_limit": 1.0}, {"swiglu_limit": True}), ({"layer_key": 1}, {"layer_key": True}), ({"layer_key": 0}, {"layer_key": False})):
        for _ in range(2):
            mok.moe(**given | good)
        refused(next(iter(bad)), mok.moe, **given | bad)
    assert len(looks) == 3 + 3
    refused("main_grad[1]", mok.moe, **given | {"main_grad": (given["main_grad"][0], given["main_grad"][1].double())})      # in no key
    refused("topk_ids", mok.moe, **given | {"topk_ids": given["topk_ids"] + 3})                                             # nor are its values
    assert len(looks) == 3 + 3


def test_remembered_calls_are_bounded(monkeypatch):
    import mok.checks as checks

    monkeypatch.setattr(checks.runtime, "scratch", {})
    monkeypatch.setattr(checks, "MAX_PASSED", 3)
    for number in range(10):
        checks.remember_passed(number)
    assert checks.runtime.scratch[checks._PASSED] == {9}
    checks.remember_passed(None)
    assert checks.passed_before((), (), ([],)) == (None, False) and len(checks.runtime.scratch[checks._PASSED]) == 1


@pytest.mark.parametrize("value", [None, "x", [1.0], torch.tensor(1.0), torch.zeros(2, 6, dtype=torch.int64)], ids=str)
def test_engine_for(value):
    refused("x", mok.engine_for, value)


@pytest.mark.parametrize("value", ["a", 0, -1, 1.5, NAN, True], ids=str)
def test_engine_for_intermediate_size(value):
    refused("intermediate_size", mok.engine_for, torch.zeros(2, 6), value)


# ---- settings ----

SIZES = {"hidden_size": 6, "intermediate_size": 4, "num_experts": 4, "top_k": 2}
COUNTS = (*NOT_INTEGERS, 0, -1, HUGE)
CONFIG = [
    *((name, COUNTS) for name in (*SIZES, "num_expert_groups", "topk_groups")),
    ("activation", (None, 1, "gelu", [])), ("swiglu_limit", ("a", NAN, 0, -1.0, True, [7.0], torch.tensor(7.0))), ("precision", (None, 1, "int4")),
    *((name, (None, 0, "no", 1.0, NAN)) for name in ("expert_bias", "shared_gated", "norm_topk_prob")),
    ("shared_intermediate_sizes", (None, 8, "8", ("a",), (0,), (-8,), (8.0,), (NAN,), (HUGE,), (None,))),
    ("score_function", (None, 1, "relu")), ("balance", (None, True, "loss")),
    ("routed_scaling_factor", (*NOT_NUMBERS, INF, 0, -1.0)),
    *((name, (*NOT_NUMBERS, INF, -INF, -0.1)) for name in ("aux_loss_coef", "z_loss_coef", "bias_update_rate")),
    ("seed", NOT_INTEGERS), ("layer_index", (*NOT_INTEGERS, -1)), ("initializer_range", (*NOT_NUMBERS[1:], INF, -0.1)),
    ("overlap", ("a", 128, True, {})), ("recompute", (1, True, "x", "Z", ["z"])),
]
CONFIG_ROWS = [(name, value) for name, values in CONFIG for value in values]


@pytest.mark.parametrize(("name", "value"), CONFIG_ROWS, ids=labels(CONFIG_ROWS))
def test_config(name, value):
    refused(name, mok.MoEConfig, **SIZES | {name: value})


def test_config_covers_every_field_and_takes_integers_for_numbers():
    assert {name for name, _ in CONFIG} == set(mok.MoEConfig.__dataclass_fields__)
    config = mok.MoEConfig(**SIZES, routed_scaling_factor=2, aux_loss_coef=0, z_loss_coef=0, bias_update_rate=0, initializer_range=0, seed=-HUGE,
                           shared_intermediate_sizes=[8, 4])
    assert config.shared_intermediate_sizes == (8, 4)
    mok.MoE(config)(torch.randn(3, 6))
    refused("hidden_size", mok.MoEConfig, 2**31 - 1, 2**31 - 1, 2**30, 2)               # each may be so large, not all of them together


OVERLAP = [("minibatch_rows", (*NOT_INTEGERS[1:], 0, -128, 100, 256.0, 128 * HUGE)), ("mover_warps", (*NOT_INTEGERS[1:], 0, 3, -1, 2.0, HUGE)),
           ("reserve_sms", (*NOT_INTEGERS[1:], -1, 2.0, HUGE))]
OVERLAP_ROWS = [(name, value) for name, values in OVERLAP for value in values]


@pytest.mark.parametrize(("name", "value"), OVERLAP_ROWS, ids=labels(OVERLAP_ROWS))
def test_overlap(name, value):
    refused(name, mok.Overlap, **{name: value})


# ---- mok.MoE ----

def layer() -> mok.MoE:
    return mok.MoE(mok.MoEConfig(**SIZES))


LAYER = [("config", [None, "a", SIZES, mok.MoEConfig]), ("group", ["a", 1, mok.ExpertGroup]), ("device", ["quantum", 1.5, [], "cuda:a"]),
         ("dtype", ["float32", torch.int64, torch.complex64, torch.float8_e4m3fn, float])]
LAYER_ROWS = [(name, value) for name, values in LAYER for value in values]


@pytest.mark.parametrize(("name", "value"), LAYER_ROWS, ids=labels(LAYER_ROWS))
def test_layer(name, value):
    refused(name, mok.MoE, **{"config": mok.MoEConfig(**SIZES), name: value})


IDS, WEIGHTS = torch.zeros(5, 2, dtype=torch.int64), torch.rand(5, 2)
FORWARD = [
    ("x", {"x": value}) for value in (None, "x", [1.0], torch.tensor(1.0), torch.zeros(5, 7), torch.zeros(5, 6, dtype=torch.int64),
                                      torch.zeros(5, 6, dtype=torch.complex64), torch.zeros(5, 6, device="meta"), torch.zeros(5, 6).to_sparse())
] + [
    ("padding_mask", {"padding_mask": value}) for value in (1, "m", [True] * 5, torch.zeros(5), torch.zeros(4, dtype=torch.bool), torch.tensor(True),
                                                            torch.zeros(5, dtype=torch.bool, device="meta"))
] + [
    ("routes", {"routes": value}) for value in (1, "ab", IDS, (IDS,), (IDS, WEIGHTS, WEIGHTS), (None, WEIGHTS), ([0], WEIGHTS), {})
] + [
    ("routes[0]", {"routes": (value, None)}) for value in (IDS[:4], IDS.float(), IDS.bool(), IDS.to("meta"))
] + [
    ("routes[1]", {"routes": (IDS, value)}) for value in (1.0, [[0.5, 0.5]] * 5, "w", WEIGHTS[:4], IDS, WEIGHTS.to("meta"))
]


@pytest.mark.parametrize(("begins", "change"), FORWARD, ids=labels(FORWARD))
def test_layer_forward(begins, change):
    refused(begins, layer(), **{"x": torch.randn(5, 6)} | change)


def test_layer_methods():
    for value in (None, "a", 1):
        refused("group", layer().attach_group, value)
    for value in ("a", 1, True):
        refused("process_group", layer().update_bias, value)
        refused("process_group", mok.MoE(mok.MoEConfig(**SIZES, balance="bias")).update_bias, value)


def test_accumulators_that_share_memory():
    """With each other, or with a weight: backward would write what another thread reads."""
    given = arguments()
    up, down = given["main_grad"]
    flat = torch.zeros(up.numel() + down.numel())
    apart = flat[:up.numel()].view(up.shape), flat[up.numel():].view(down.shape)
    mok.moe(**given | {"main_grad": apart})
    refused("main_grad[0]", mok.moe, **given | {"main_grad": (apart[0], flat[up.numel() - 1:-1].view(down.shape))})
    refused("main_grad[0]", mok.moe, **given | {"main_grad": (given["w_gate_up"], down)})
    refused("main_grad[1]", mok.moe, **given | {"main_grad": (up, given["w_down"].detach())})
    # with inputs that are views of them: transposed, a part of their memory, any of the layer's
    E, rows, H = up.shape
    refused("main_grad[0]", mok.moe, **given | {"main_grad": (up, down), "w_gate_up": up.view(E, H, rows).transpose(1, 2)})
    T, K = given["topk_ids"].shape
    inside = {"x": up.view(-1)[:T * H].view(T, H), "topk_weights": up.view(-1)[-T * K:].view(T, K), "b_gate_up": up.view(-1)[7:7 + E * rows].view(E, rows),
              "b_down": up[:, 0], "shared": [mok.SharedExpert(torch.randn(8, H), torch.randn(H, 4), up[0, 0])]}
    for name, tensor in inside.items():
        refused("main_grad[0]", mok.moe, **given | {"main_grad": (up, down), name: tensor})
    wide = torch.zeros(E, 3, rows, H)                        # layers side by side, the accumulator's own block elsewhere
    mok.moe(**given | {"main_grad": apart, "w_gate_up": wide[:, 1]})


# ---- ExpertGroup ----

@pytest.fixture
def alone(tmp_path):
    """torch.distributed with this process as its only rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield mok.ExpertGroup()
    dist.destroy_process_group()


def test_group(alone):
    for value in (*NOT_NUMBERS, INF, 0, -1.0, 1e300):
        refused("timeout_s", mok.ExpertGroup, timeout_s=value)
    for value in (*NOT_NUMBERS[1:], INF, 0, -1.0):
        refused("capacity_factor", mok.ExpertGroup, capacity_factor=value)
    sizes = {"num_experts": 4, "max_tokens": 8, "hidden_size": 16, "top_k": 2}
    for name in sizes:
        for value in COUNTS[1:]:
            refused(name, mok.ExpertGroup, **sizes | {name: value})
        refused("num_experts", mok.ExpertGroup, **{name: 1})                            # all four or none
    for value in ("quantum", 1.5, []):
        refused("device", mok.ExpertGroup, device=value)
    for value in ("a", 1, True, [0]):
        refused("process_group", mok.ExpertGroup, value)
    for value in (None, "ep", 1):
        refused("mesh", mok.ExpertGroup.from_mesh, value)
    for value in COUNTS:
        refused("num_experts", alone.local_experts, value)


def test_a_closed_group_is_refused(alone):
    given = arguments()
    for name in ("b_gate_up", "b_down", "shared", "main_grad"):
        del given[name]
    mok.moe(**given, group=alone)
    for _ in range(2):
        alone.close()
    refused("group", mok.moe, **given, group=alone)
    refused("group", mok.MoE, mok.MoEConfig(hidden_size=8, intermediate_size=8, num_experts=4, top_k=2), group=alone)


def test_group_needs_torch_distributed():
    refused("process_group", mok.ExpertGroup)


# ---- clip_grad_norm_ ----

def parameter(*shape: int) -> nn.Parameter:
    made = nn.Parameter(torch.ones(shape))
    made.grad = torch.ones(shape)
    return made


BOTH = parameter(2, 3)
CLIP = [
    *(("max_norm", {"max_norm": value}) for value in (*NOT_NUMBERS, 0, -1.0)),
    *(("dense", {"dense": value}) for value in (None, 1, "ab", BOTH, nn.Linear(2, 2))),
    *(("dense[1]", {"dense": [parameter(2), value]}) for value in (None, 1, "a", ("name", BOTH))),
    *(("experts", {"experts": value}) for value in (None, 1, "ab", BOTH)),
    *(("experts[0]", {"experts": [value]}) for value in (None, "a", parameter())),
    ("dense[0]", {"dense": [BOTH], "experts": [BOTH]}),                        # counted twice, and scaled twice
    *(("group", {"group": value}) for value in ("a", 1, True)),
]


@pytest.mark.parametrize(("begins", "change"), CLIP, ids=labels(CLIP))
def test_clip_grad_norm(begins, change):
    refused(begins, mok.clip_grad_norm_, **{"dense": [parameter(2)], "experts": [parameter(2, 3)], "max_norm": 1.0} | change)


def test_clip_grad_norm_takes_generators_and_infinity():
    dense, experts = [parameter(2), parameter(3)], [parameter(2, 3)]
    norm = mok.clip_grad_norm_((p for p in dense), (p for p in experts), INF)
    assert norm.item() == pytest.approx(11**0.5) and dense[0].grad.eq(1).all()


# ---- digests, recorder, records ----

def test_digests():
    for value in (None, 1.0, [1.0], "a"):
        refused("tensor", digest, value)
        refused("tensor", DigestBatch().add, value)
    refused("tensor", digest, torch.zeros(3, 3).to_sparse())
    refused("tensor", digest, torch.zeros(3, device="meta"))
    for value in (*NOT_INTEGERS, -1, HUGE):
        refused("first_row", digest, torch.zeros(2), first_row=value)
    for value in (None, 1, "ab", [], [1], [digest(torch.zeros(2)), None], [digest(torch.tensor(1.0))]):
        refused("shards", combine_digests, value)


def model() -> nn.Module:
    return nn.Sequential(layer())


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def keep(step, entries) -> None:
    pass


RECORDER = [
    *(("model", {"model": value}) for value in (None, "a", keep)), *(("optimizer", {"optimizer": value}) for value in ("a", 1, keep)),
    *(("sink", {"sink": value}) for value in (None, "a", 1)), *(("optimizer_every", {"optimizer_every": value}) for value in (*NOT_INTEGERS, 0, -1)),
    *(("rank", {"rank": value}) for value in (*NOT_INTEGERS, -1, 1, HUGE)), *(("world_size", {"world_size": value}) for value in (*NOT_INTEGERS, 0, -1)),
    ("combine", {"world_size": 2}), ("combine", {"combine": lambda tensor: tensor}), ("combine", {"world_size": 2, "combine": "sum"}),
]


@pytest.mark.parametrize(("begins", "change"), RECORDER, ids=labels(RECORDER))
def test_recorder(begins, change):
    refused(begins, StepRecorder, **{"model": model(), "optimizer": None, "sink": keep} | change)


def test_recorder_methods():
    module = model()
    recorder = StepRecorder(module, sgd(module), keep)
    for value in (*NOT_INTEGERS, -1):
        refused("step", recorder.start, value)
        refused("step", recorder.end, value)
    for value in (None, [1], "a"):
        refused("inputs", recorder.begin, value)
    for value in (None, [1.0], torch.ones(1), {}):
        refused("loss", recorder.gradients, loss=value)
        refused("rate", recorder.end, 1, rate=value)
    recorder.remove()


def test_records(tmp_path: Path):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "zeros").write_bytes(bytes(1000))
    for value in (None, 1.5, True, [], tmp_path, tmp_path / "none", tmp_path / "empty", tmp_path / "zeros", "/dev/zero", "/dev/null", "a" * 5000, "a\0b", ""):
        refused("record", read_record, value)
    for value in (None, 1.5, [], tmp_path, tmp_path / "empty", tmp_path / "none" / "record", "/dev/zero", "a" * 5000, "a\0b", ""):
        refused("audit", RecordWriter.check_free, value)
        refused("audit", RecordWriter.create, value, {}, {})
    record = Record("r", {"fingerprint": {}, "configuration": {"ranks": 1, "settings": {}, "corpus": {"sha256": ""}}})
    for value in (None, "record", 1, {}):
        refused("first", compare, value, record)
        refused("second", compare, record, value)
        refused("record", RecordWriter.resume, value, 0, {}, {}, {})
    configuration = {"settings": {}, "corpus": {"sha256": ""}, "device": "cpu", "ranks": 1, "threads": 1}
    writer = RecordWriter.create(tmp_path / "written", {}, configuration)
    for value in (*NOT_INTEGERS, -1):
        refused("step", writer.step, value, {})
        refused("step", record.state_after, value)
        refused("step", record.ranks_at, value)
    refused("step", record.state_after, 0)                                              # it holds none yet
    refused("step", RecordWriter.resume, record, 0, {}, {}, {})
    for value in (None, "a", [("input", "x")], {1: "x"}, {"input": None}, {"input": torch.ones(1)}):
        refused("entries", writer.step, 0, value)
    writer.step(0, {"loss": NAN, "input": "x"})                                         # a run that diverged is a run
    assert len(read_record(tmp_path / "written", may_be_open=True).steps) == 1


def test_the_name_must_begin_the_message():
    """What `refused` takes for a name: neither a longer one nor one somewhere else in the text."""
    def wrong(text: str) -> Tensor:
        raise ValueError(text)

    refused("x", wrong, "x.shape=() must be (..., H)")
    for text in ("x_y=1 is wrong", "wrong x", "xs"):
        with pytest.raises(AssertionError):
            refused("x", wrong, text)
