"""Host side of backward launches on several ranks, without a GPU: arguments, a rank without tokens, what is agreed and where a pass runs."""
from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from oracle import make_case, want_all

pytest.importorskip("triton.experimental.gluon")
from mok.engines import expert_parallel as agreement
from mok.engines.hopper import backward_launch, expert_parallel_backward, expert_parallel_group, ready_arguments
from mok.engines.hopper.backward import BackwardConfig
from mok.engines.hopper.expert_parallel import FusedGroup
from mok.engines.hopper.launch import GroupLaunch
from mok.engines.protocol import MoETensors, PassOptions, Saved, SharedExpert, Wants
from mok.engines.torch_gpu import TorchGpuEngine
from mok.fabric.process_group import FabricTimeout
from mok.plan import empty_plan
from mok.runtime import runtime

BF16 = torch.bfloat16
SOURCE = backward_launch.source(BackwardConfig(0, several_ranks=True))
NAMES = [name for name, kind in SOURCE.signature.items() if kind != "constexpr"]
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}


@pytest.fixture
def launches(monkeypatch):
    """(blocks, arguments by name, options) of every launch; nothing is compiled."""
    seen: list = []

    def launch(kernel, config, device, blocks, arguments, key, varying, resident, options):
        assert config == BackwardConfig(config.act, several_ranks=True, debug=config.debug, recompute=config.recompute, waves=config.waves)
        assert [NAMES[place] for place in varying] == ["state", "set_words"] and resident == GROUP.blocks
        seen.append((blocks, dict(zip(NAMES, arguments, strict=True)), options))

    monkeypatch.setattr(expert_parallel_backward, "on_device", lambda tensor: nullcontext())
    monkeypatch.setattr(expert_parallel_backward, "launch_kernel", launch)
    runtime.scratch.pop(ready_arguments._LISTS, None)
    yield seen
    runtime.scratch.pop(ready_arguments._LISTS, None)


GROUP = GroupLaunch(torch.zeros(16 + 2 * (16 + 5 * 64), dtype=torch.int32), 64, 20, False, 0.25)


def problem(**settings):
    case = make_case(200, 272, 176, 5, 3, BF16, **settings)
    engine = TorchGpuEngine()
    plan = engine.build_plan(case.topk_ids, 5)
    return case, plan, engine.forward(plan, case.tensors, case.options)[1]


@pytest.mark.parametrize("settings", [{}, {"biases": True, "shared": ((80, False), (336, True))}])
@pytest.mark.parametrize("tokens", [200, 0])
@pytest.mark.parametrize("recompute", [None, "z"])
def test_arguments_have_the_kernels_types(launches, settings, tokens, recompute):
    """On a rank without tokens too, whose shared experts' gradients are zeros: other types would be compiled, and loaded, while peers wait."""
    case, plan, saved = problem(**settings)
    t = replace(case.tensors, x=case.tensors.x[:tokens], topk_weights=case.tensors.topk_weights.reshape(-1)[1:1 + 3 * tokens].view(tokens, 3)
                if tokens == 0 else torch.cat([torch.zeros(1), case.tensors.topk_weights.reshape(-1)])[1:].view(200, 3))      # not at a multiple of 16 bytes
    plan = replace(plan, slot_to_row=plan.slot_to_row[:3 * tokens])
    if recompute:
        saved = Saved(saved.z[:0], saved.shared_z[:0])
    grads = expert_parallel_backward.group_backward(plan, t, replace(case.options, recompute=recompute), saved, case.dy[:tokens], want_all(case), None, GROUP,
                                                    12345)
    ((blocks, arguments, options),) = launches
    assert blocks == 20 and options["launch_cooperative_grid"] is False
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            found = TYPES[value.dtype]
            assert value.data_ptr() % 16 == 0, name
        elif isinstance(value, (int, float)):
            found = "i32" if isinstance(value, int) else "fp32"
        else:
            found = f"tensordesc<bf16{value.block_shape},{value.layout!r}>"
            assert value.base.data_ptr(), name
        assert found == SOURCE.signature[name], name
    assert (arguments["T"], arguments["pass_number"], arguments["K"]) == (tokens, 12345, 3)
    assert arguments["row_to_rank"] is plan.row_to_rank and arguments["row_weights"].shape == (plan.num_rows,)
    assert arguments["state"] is GROUP.state and arguments["set_words"] == 16 + 5 * 64
    assert arguments["num_shared"] == (len(t.shared) if tokens else 0)
    assert grads.x.shape == (tokens, 272) and grads.w_down.shape == t.w_down.shape
    if not tokens:
        assert all(part is None or not part.any() for expert in grads.shared for part in expert) and arguments["wants"] < 256


def test_bounded_buffers_have_the_rows_of_a_wave(launches):
    """Scratch, z and counters are a wave's; the maps that the kernel reads are the whole plan's. Unfinished sums of one expert have room, twice."""
    case, plan, saved = problem(biases=True, shared=((80, False),))
    plan = replace(plan, slot_to_rank=plan.slot_to_row, wave_tiles=torch.zeros(4, 2, dtype=torch.int32))
    saved = replace(saved, z=saved.z[:256].clone())
    group = replace(GROUP, wave_tiles=2)
    expert_parallel_backward.group_backward(plan, case.tensors, case.options, saved, case.dy, want_all(case), None, group, 1)
    ((_, arguments, _),) = launches
    assert arguments["capacity"] == 2 and plan.num_rows > 256 and arguments["row_weights"].shape == (256,)
    tokens = -(-case.tensors.x.shape[0] // 128) * 128
    assert arguments["shared_results_row"] == 0 and arguments["results"].numel() == tokens * 272, "routed rows of dx go home: the shared expert's alone"
    assert arguments["row_to_slot"].data_ptr() == plan.row_to_slot.data_ptr() and arguments["tile_to_expert"] is plan.tile_to_expert
    assert arguments["dy_rows"].numel() == arguments["x_rows"].numel() == 256 * 272 and arguments["wave_table"] is plan.wave_tiles
    for name in ("z_desc", "z_again_desc", "dz_desc"):
        assert arguments[name].shape == [2, 256, 176], name
    assert arguments["z_desc"].base.data_ptr() == saved.z.data_ptr() != arguments["z_again_desc"].base.data_ptr()
    # tiles of 128 x 256: dw_gate_up 2 * 2 by 2, dw_down 3 by 1
    assert arguments["carry"].numel() == 2 * (11 * 128 * 256 + 2 * 176 + 272) and arguments["features"] & 16
    expert_parallel_backward.group_backward(plan, case.tensors, case.options, saved, case.dy, Wants(x=True, shared=((False,) * 3,)), None, group, 1)
    assert launches[1][1]["carry"] is launches[1][1]["topk_weights"], "no sums are handed on"
    with pytest.raises(NotImplementedError, match="recompute='z' must be None"):
        expert_parallel_backward.group_backward(plan, case.tensors, replace(case.options, recompute="z"), saved, case.dy, want_all(case), None, group, 1)


def test_the_down_bias_alone_needs_rows_of_dy(launches):
    case, plan, saved = problem(biases=True)
    expert_parallel_backward.group_backward(plan, case.tensors, case.options, saved, case.dy, Wants(b_down=True), None, GROUP, 1)
    assert launches[0][1]["dy_rows"].numel() == plan.num_rows * 272 and launches[0][1]["dy_rows"].data_ptr() != case.tensors.x.data_ptr()
    assert expert_parallel_backward.group_backward(plan, case.tensors, case.options, saved, case.dy, Wants(), None, GROUP, 1).x is None
    assert len(launches) == 1, "a pass in which nothing is wanted launches nothing, on any rank"


def test_a_group_s_part_of_the_card_sets_its_row_tiles(launches):
    case, plan, saved = problem()
    expert_parallel_backward.group_backward(plan, case.tensors, case.options, saved, case.dy, want_all(case), None, GROUP, 1)
    assert launches[0][1]["group_tiles"] == max(4, round(backward_launch.default_group(272, 176) / 4))
    from mok.config import Overlap

    asked = replace(case.options, overlap=Overlap(minibatch_rows=640, reserve_sms=3))
    expert_parallel_backward.group_backward(plan, case.tensors, asked, saved, case.dy, want_all(case), None, GROUP, 1)
    assert launches[1][1]["group_tiles"] == 5 and launches[1][0] == 17
    with pytest.raises(ValueError, match="reserve_sms=20 must be less than the 20 blocks"):
        expert_parallel_backward.group_backward(plan, case.tensors, replace(case.options, overlap=Overlap(reserve_sms=20)), saved, case.dy, want_all(case),
                                                None, GROUP, 1)


def test_ranks_that_share_a_device_have_groups_of_four_tiles_at_least(monkeypatch):
    case, *_ = problem()

    def tiles(of_one_rank, card):
        monkeypatch.setattr(expert_parallel_backward, "_group_tiles", lambda *_: of_one_rank)
        return expert_parallel_backward._tiles_of_group(case.options, case.tensors, replace(GROUP, card=card))

    assert [tiles(9, card) for card in (0.25, 0.75, 1.0)] == [4, 7, 9] and tiles(2, 1.0) == 2


def test_passes_do_not_take_each_other_s_arguments(launches, monkeypatch):
    """A list that was made ready holds the pass's number; another pass on the same memory gets its own, a repeated one the same."""
    from launch_support import Memory

    case, plan, saved = problem()
    memory = Memory(monkeypatch)
    for number in (5, 6, 5):
        expert_parallel_backward.group_backward(plan, case.tensors, case.options, saved, case.dy, want_all(case), None, GROUP, number)
    numbers = [arguments["pass_number"] for _, arguments, _ in launches]
    assert numbers == [5, 6, 5] and memory.blocks
    assert isinstance(launches[0][1]["dx"], torch.Tensor) and isinstance(launches[2][1]["dx"], int), "the third launch was made from the list of the first"


class Fused:
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.calls: list = []

    def unsupported_reason(self, H, I, K):
        return None if (H, K) == (64, 2) else f"H={H}, K={K} are not the group's"

    def backward(self, plan, tensors, options, saved, dy, wants, main_grad):
        self.calls.append(options)
        return "inside"

    def load_backward(self, options):
        self.calls.append(options)

    def build_plan(self, topk_ids, num_local_experts, signature):
        return "plan"


class Group:
    capacity_factor = None

    def __init__(self) -> None:
        self.fused, self.handshakes = Fused(), []

    def handshake(self, signature, **facts):
        self.handshakes.append(signature)
        return [facts, facts]

    def forward_of(self, expert_offsets):
        return 7


class _Elsewhere:
    @staticmethod
    def backward(*_):
        return "elsewhere"


SIGNATURE = {"layer_key": "1", "H": "64", "I": "16", "K": "2", "dtype": "torch.bfloat16", "activation": "geglu", "swiglu_limit": "None",
             "recompute": "None", "wanted gradients": "[True]"}


@pytest.mark.parametrize("H, K, dtype, width, inside", [(64, 2, BF16, 16, True), (32, 2, BF16, 16, False), (64, 1, BF16, 16, False),
                                                        (64, 2, torch.float32, 16, False), (64, 2, BF16, 7, False)])
def test_what_is_agreed_in_the_launch_is_not_said_over_the_process_group(monkeypatch, H, K, dtype, width, inside):
    """Handshake and pass decide alike, so no rank waits in a launch for one that waits in a handshake."""
    monkeypatch.setattr(expert_parallel_group.GroupPasses, "_over_process_group", lambda self: _Elsewhere)
    shared = (SharedExpert(torch.zeros(2 * width, H, dtype=dtype), torch.zeros(H, width, dtype=dtype)),)
    t = MoETensors(torch.zeros(3, H, dtype=dtype), torch.zeros(3, K), torch.zeros(2, 32, H, dtype=dtype), torch.zeros(2, H, 16, dtype=dtype), shared=shared)
    group, wants = Group(), Wants(x=True, w_down=True, shared=((False, True, False),))
    plan = empty_plan(torch.zeros(3, K, dtype=torch.int32), 2, 256)
    options = agreement.agree_on_backward(group, SIGNATURE, wants, t, PassOptions(), plan)
    grads = expert_parallel_group.GroupPasses(group).backward(None, t, options, None, None, wants, None)
    assert (grads == "inside") == inside == (not group.handshakes) == bool(options.agreed)
    text = options.agreed if inside else str(group.handshakes[0])
    assert "backward" in text and "w_down" in text and "shared[0].w_down" in text and "layer_key" in text


def test_a_plan_that_gradients_follow_loads_its_activation_s_variant():
    ids = torch.zeros(3, 2, dtype=torch.int64)
    group = Group()
    assert expert_parallel_group.fused_plan(group, ids, 2, SIGNATURE) == "plan"
    assert group.fused.calls == [PassOptions("geglu", None)]
    expert_parallel_group.fused_plan(group, ids, 2, SIGNATURE | {"activation": "swiglu", "swiglu_limit": "0.5", "recompute": "z"})
    assert group.fused.calls[1] == PassOptions("swiglu", 0.5, recompute="z")
    expert_parallel_group.fused_plan(group, ids, 2, SIGNATURE | {"wanted gradients": "[]"})
    assert len(group.fused.calls) == 2, "nothing is wanted"


@pytest.mark.parametrize("record, text", [((33, 2, 5, 4), "rank 2 did not come; waited for the rows of dy and x of a rank"),
                                          ((37, 0, 9, 8), "rank 0 did not come; waited for the gradients of a rank")])
def test_errors_of_backward_name_the_rank(record, text):
    group = FusedGroup.__new__(FusedGroup)
    group.rank, group.world_size, group.device, group.timeout_s, group._signatures, group._dead = 1, 4, torch.device("cuda", 0), 2.0, {}, None
    group._record = torch.tensor([1, 0, *record, 0, 0], dtype=torch.int32)
    error = group.new_error()
    assert type(error) is FabricTimeout and error.peers == (record[1],) and text in str(error)


def test_backward_hands_on_what_ranks_compare(monkeypatch):
    """The number that travels is made of the agreed text, and the error finds the text by it."""
    group = FusedGroup.__new__(FusedGroup)
    group.device, group.debug, group.launch, group._signatures, group._dead = torch.device("cpu"), False, GROUP, {}, None
    group._record, group._backward_variants, group._ordered = torch.zeros(8, dtype=torch.int32), {(0, None, False)}, nullcontext()
    seen = []
    monkeypatch.setattr(expert_parallel_backward, "group_backward", lambda *arguments: seen.append(arguments))
    saved = Saved(torch.zeros(0), torch.zeros(0))
    for options, wants in ((PassOptions(agreed="layer 1"), Wants(x=True)), (PassOptions(), Wants(x=True)), (PassOptions(), Wants(w_down=True))):
        group.backward("plan", "tensors", options, saved, "dy", wants, None)
    numbers = [arguments[8] for arguments in seen]
    assert len(set(numbers)) == 3 and [group._signatures[number][:7] for number in numbers] == ["layer 1", "backwar", "backwar"]
