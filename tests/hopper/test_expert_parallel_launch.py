"""Host side of the launches on several ranks, without a GPU: the kernel's arguments, the table of peers, what is agreed and what errors say."""
from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
from mok.engines.hopper import expert_parallel, expert_parallel_group, launch, peers
from mok.engines.hopper.expert_parallel import FusedGroup, buffer_sizes, peer_table, signature_number
from mok.engines.hopper.forward import ForwardConfig, _forward_kernel
from mok.engines.protocol import MoETensors, PassOptions, SharedExpert
from mok.fabric.flag_page import ABORT_HOST, MAX_RANKS
from mok.fabric.process_group import FabricError, FabricTimeout
from mok.plan import empty_plan, experts_of_rank, plan_capacity
from mok.waves import wave_capacity

BF16 = torch.bfloat16


@pytest.mark.parametrize("T", [0, 5])
def test_arguments_stand_in_the_kernel_s_order(T):
    """A rank without tokens too; the group's control block takes the place of the stream's."""
    H, I, E, K, R = 64, 32, 2, 2, 512
    tensors = MoETensors(torch.zeros(T, H, dtype=BF16), torch.zeros(T, K), torch.zeros(E, 2 * I, H, dtype=BF16), torch.zeros(E, H, I, dtype=BF16))
    plan = empty_plan(torch.zeros(T, K, dtype=torch.int32), E, R)
    state = torch.zeros(100, dtype=torch.int32)
    grain = launch.granularity(None, H, I)
    group = launch.GroupLaunch(state, 4096, 20, False, 0.25)
    sizes = launch.scratch_sizes(T, H, I, R, [], grain, True)
    scratch = torch.zeros(sizes.bytes // 2, dtype=BF16)
    arguments = launch._arguments(plan, tensors, PassOptions(), tensors.x, tensors.x, tensors.x, scratch, sizes, grain, state, 4096, group)
    names = [name for name in _forward_kernel.arg_names if name not in ForwardConfig(False, several_ranks=True).constexprs()]
    assert len(arguments) == len(names)
    by_name = dict(zip(names, arguments, strict=True))
    assert by_name["row_to_rank"] is plan.row_to_rank and by_name["row_to_slot"] is plan.row_to_slot
    assert by_name["state"] is state and by_name["capacity"] == 4096 and by_name["T"] == T and by_name["K"] == K
    assert sizes.results == 0 and by_name["results"].data_ptr() == scratch.data_ptr(), "routed results go home; the argument only has to be aligned"


def test_results_of_several_ranks_are_those_of_shared_experts_alone():
    """Rows of the shared experts begin at row 0; on one rank they stand behind the routed ones."""
    T, H, I, E, K, R = 200, 64, 32, 2, 2, 1024
    up, down = torch.zeros(2 * I, H, dtype=BF16), torch.zeros(H, I, dtype=BF16)
    tensors = MoETensors(torch.zeros(T, H, dtype=BF16), torch.zeros(T, K), torch.zeros(E, 2 * I, H, dtype=BF16), torch.zeros(E, H, I, dtype=BF16),
                         shared=(SharedExpert(up, down),))
    plan, state = empty_plan(torch.zeros(T, K, dtype=torch.int32), E, R), torch.zeros(100, dtype=torch.int32)
    grain = launch.granularity(None, H, I)
    for group, first in ((None, R), (launch.GroupLaunch(state, 4096, 20, False, 0.25), 0)):
        sizes = launch.scratch_sizes(T, H, I, R, [I], grain, group is not None)
        scratch = torch.zeros(sizes.bytes // 2, dtype=BF16)
        arguments = launch._arguments(plan, tensors, PassOptions(), tensors.x, tensors.x, tensors.x, scratch, sizes, grain, state, 4096, group)
        names = [name for name in _forward_kernel.arg_names if name not in ForwardConfig(False).constexprs()]
        by_name = dict(zip(names, arguments, strict=True))
        assert by_name["shared_results_row"] == first and by_name["results_desc"].shape == [first + 256, H] and sizes.results == (first + 256) * H


def test_where_experts_have_few_rows_or_large_weights_tasks_go_by_ticket():
    """The default alone: what a caller's Granularity says stands."""
    assert launch.granularity(None, 7168, 2048).tickets and not launch.granularity(None, 2048, 1024).tickets
    for T, tickets in ((2 * launch.FEW_ROWS - 1, True), (2 * launch.FEW_ROWS, False), (0, True)):
        grain, _ = launch._default_sizes(T, 64, 32, 512, (), None, 1.0, T * 2 / 4, False)
        assert grain.tickets is tickets
        assert replace(grain, tickets=False) == launch.granularity(None, 64, 32)


def test_bounded_buffers_have_the_rows_of_a_wave_and_the_plan_its_worst_case():
    """GroupLaunch.rows is what scratch, z and the kernel's descriptors are made for; the table of waves is the plan's."""
    H, I, E, K, T, R = 64, 32, 2, 2, 200, 1024
    tensors = MoETensors(torch.zeros(T, H, dtype=BF16), torch.zeros(T, K), torch.zeros(E, 2 * I, H, dtype=BF16), torch.zeros(E, H, I, dtype=BF16))
    plan = empty_plan(torch.zeros(T, K, dtype=torch.int32), E, R)
    plan = replace(plan, slot_to_rank=plan.slot_to_row, wave_tiles=torch.zeros(3, 2, dtype=torch.int32))
    group = launch.GroupLaunch(torch.zeros(100, dtype=torch.int32), 4096, 20, False, 0.25, wave_tiles=3)
    grain = launch.granularity(None, H, I)
    sizes = launch.scratch_sizes(T, H, I, group.rows(plan), [], grain, True)
    assert group.rows(plan) == 384 and sizes.elements <= launch.scratch_sizes(T, H, I, R, [], grain, True).elements
    x, scratch, z = tensors.x, torch.zeros(sizes.bytes // 2, dtype=BF16), torch.zeros(384, 2 * I, dtype=BF16)
    arguments = launch._arguments(plan, tensors, PassOptions(save_for_backward=True), x, z, z, scratch, sizes, grain, group.state, 4096, group)
    by_name = dict(zip([name for name in _forward_kernel.arg_names if name not in ForwardConfig(True, 2, True, True).constexprs()], arguments,
                       strict=True))
    assert by_name["wave_tiles"] == 3 and by_name["wave_table"] is plan.wave_tiles and by_name["shared_results_row"] == 0
    assert by_name["z_desc"].shape[0] == 384 and by_name["row_to_slot"].shape == (R,)
    assert replace(group, wave_tiles=None).rows(plan) == R


def test_row_tiles_of_bounded_buffers_are_those_of_the_rule():
    """Docstring's example; what every rank has is wave_capacity of its experts, and never more than the worst case."""
    assert expert_parallel.bounded_tiles(1.0, 1024, 5, 2) == (8, 6)
    for W, E, factor in ((4, 9, 0.3), (4, 8, 1.0), (1, 3, 9.0), (8, 9, 100.0)):
        more, fewer = expert_parallel.bounded_tiles(factor, 1024, E, W)
        for rank in range(W):
            count = experts_of_rank(E, W, rank)[1]
            tiles = (more, fewer)[rank >= E % W]
            assert tiles * 128 == wave_capacity(factor, 1024, E, count) <= plan_capacity(1024, count)


class Memory:
    """Buffers of one rank of three, at addresses that no two share."""

    def __init__(self, rank: int) -> None:
        sizes = buffer_sizes(7, 64, 2)
        self.peers = {name: [torch.zeros(size + 16, dtype=torch.uint8) for _ in range(3)] for name, size in sizes.items()}
        self.local = {name: tensors[rank] for name, tensors in self.peers.items()}
        self.table = {name: torch.tensor([t.data_ptr() for t in tensors]) for name, tensors in self.peers.items()}


def test_table_of_peers():
    memory = Memory(1)
    table = peer_table(memory, 1, 3)
    assert table.shape == (peers.TABLE_WORDS,) and table[:2].tolist() == [1, 3]
    assert table[peers.OWN_PAGE.value] == memory.local["flags"].data_ptr()
    for r in range(3):
        assert table[peers.PEER_PAGE.value + r] == memory.peers["flags"][r].data_ptr() and table[peers.PEER_IDS.value + r] == memory.peers["ids"][r].data_ptr()
        assert table[peers.PEER_X.value + r] == memory.peers["x"][r].data_ptr() // 16
        assert table[peers.PEER_SLOTS.value + r] == memory.peers["slots"][r].data_ptr() // 16
    assert (table[peers.OWN_X.value], table[peers.OWN_SLOTS.value]) == (table[peers.PEER_X.value + 1], table[peers.PEER_SLOTS.value + 1])
    assert not table[peers.PEER_PAGE.value + 3:peers.PEER_PAGE.value + MAX_RANKS].any()


def test_buffer_sizes_of_the_worked_example():
    """7 tokens of 64 bf16, 2 routes: rows 7 * 64 * 2 bytes, slots twice that, ids 2 halves of 16 + 14 words."""
    sizes = buffer_sizes(7, 64, 2)
    assert sizes["x"] == 896 and sizes["slots"] == 1792 and sizes["ids"] == 240


def test_signatures_fit_a_positive_int32_and_differ():
    numbers = {signature_number(f"layer_key={i}") for i in range(1000)}
    assert len(numbers) == 1000 and all(0 <= number < 2**31 for number in numbers)


@pytest.mark.parametrize("record,kind,ranks,text", [
    ((31, 2, 5, 4), FabricTimeout, (2,), "rank 2 did not come; waited for the ids of a rank, expected epoch 5, saw 4"),
    ((32, 0, 9, 8), FabricTimeout, (0,), "rank 0 did not come; waited for the rows of x of a rank"),
    ((36, 3, 0, 31), FabricError, (3,), "rank 3 gave up: it waited too long for the ids of a rank"),
    ((36, 3, 0, ABORT_HOST), FabricError, (3,), "rank 3 gave up: its host could not launch"),
    ((34, 7, 1, 2), FabricTimeout, (), "waited for results of other ranks to sum, tile 7, expected 1, saw 2"),
    ((35, 2, 11, 12), FabricError, (2,), "another pass on rank 2: here layer_key=1, there one that this rank has not run, number 12"),
])
def test_errors_name_rank_and_wait(record, kind, ranks, text):
    group = FusedGroup.__new__(FusedGroup)
    group.rank, group.world_size, group.device, group.timeout_s, group._signatures, group._dead = 1, 4, torch.device("cuda", 0), 2.0, {11: "layer_key=1"}, None
    group._record = torch.tensor([1, 0, *record, 0, 0], dtype=torch.int32)
    error = group.new_error()
    assert type(error) is kind and error.peers == ranks and text in str(error) and "rank 1 of 4" in str(error)
    assert group.new_error() is None, "a report is raised once"
    with pytest.raises(kind, match="this ExpertGroup is dead"):
        group.raise_if_dead()


class Fabric:
    """Two ranks, of which the other says `facts`."""

    rank, world_size = 0, 2

    def __init__(self, **facts) -> None:
        self.facts = facts

    def exchange_messages(self, message, what):
        return [message, {**message, **self.facts}]


SIZES = {"num_experts": 8, "max_tokens": 4, "hidden_size": 64, "top_k": 2}


def test_case_F11_sizes_that_differ_raise_and_missing_gpus_are_said_once(capsys):
    with pytest.raises(ValueError, match=r"must be the same on all ranks.*rank 1: \{'num_experts': 9"):
        expert_parallel_group.make_fused_group(Fabric(sizes={**SIZES, "num_experts": 9}), SIZES, "cpu", 1.0)
    with pytest.raises(ValueError, match="num_experts=1 must be at least the group's 2 ranks"):
        expert_parallel_group.make_fused_group(Fabric(), {**SIZES, "num_experts": 1}, "cpu", 1.0)
    with pytest.raises(ValueError, match="capacity_factor must be the same"):
        expert_parallel_group.make_fused_group(Fabric(sizes=SIZES), {**SIZES, "capacity_factor": 1.5}, "cpu", 1.0)
    assert expert_parallel_group.make_fused_group(Fabric(reason="no driver"), SIZES, "cpu", 1.0) is None
    assert "rank 0: no CUDA device; rank 1: no driver" in capsys.readouterr().err


@pytest.mark.parametrize("devices, share, fused", [("same", True, False), ("same", False, True), ("another", True, True)])
def test_ranks_that_share_a_device_under_an_mps_share_do_not_launch_together(monkeypatch, capsys, devices, share, fused):
    """Shares of MPS overlap: launches that fill them might wait for ever for one another. One rank a device may have one."""
    class Properties:
        multi_processor_count, uuid = 33, "u"

    monkeypatch.setattr(expert_parallel.torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(expert_parallel_group, "_cannot_fuse", lambda *_: None)
    monkeypatch.setattr(expert_parallel_group, "_build", lambda fabric, sizes, device, timeout_s, sharing: sharing)
    monkeypatch.delenv(expert_parallel_group.MPS_SHARE, raising=False)
    other = {} if devices == "same" else {"device": "elsewhere"}
    made = expert_parallel_group.make_fused_group(Fabric(share=share, **other), SIZES, "cuda:0", 1.0)
    assert made == ((2 if devices == "same" else 1) if fused else None)
    assert ("is set on ranks [1], which share a device" in capsys.readouterr().err) is not fused
    assert expert_parallel.resident_share(torch.device("cuda"), 4) == 8


class Fused:
    """A FusedGroup's answers, and what it was asked to do."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.calls: list = []

    def unsupported_reason(self, H, I, K):
        return None if (H, K) == (64, 2) else f"H={H}, K={K} are not the group's"

    def build_plan(self, topk_ids, num_local_experts, signature):
        self.calls.append(("plan", num_local_experts, signature))
        return "plan"

    def forward(self, plan, tensors, options):
        self.calls.append("forward")
        return "y", "saved"


class Group:
    capacity_factor = None

    def __init__(self) -> None:
        self.fused = Fused()


def moe_tensors(H=64, K=2, dtype=BF16, shared=()):
    return MoETensors(torch.zeros(3, H, dtype=dtype), torch.zeros(3, K), torch.zeros(2, 32, H, dtype=dtype), torch.zeros(2, H, 16, dtype=dtype), shared=shared)


def signature(**changes):
    return {"layer_key": "1", "H": "64", "I": "16", "K": "2", "dtype": "torch.bfloat16"} | changes


def test_a_pass_runs_in_the_group_or_over_the_process_group_by_its_sizes_alone(monkeypatch):
    """Plan and forward decide alike, so no rank waits in a launch for one that waits in a handshake."""
    ids = torch.zeros(3, 2, dtype=torch.int64)
    monkeypatch.setattr(expert_parallel_group.GroupPasses, "_over_process_group", lambda self: _Elsewhere)
    for changes, inside in (({}, True), ({"H": "32"}, False), ({"K": "1"}, False), ({"dtype": "torch.float32"}, False)):
        group = Group()
        plan = expert_parallel_group.fused_plan(group, ids, 2, signature(**changes))
        settings = {"H": int(changes.get("H", 64)), "K": int(changes.get("K", 2)), "dtype": getattr(torch, changes.get("dtype", "torch.bfloat16")[6:])}
        y, _ = expert_parallel_group.GroupPasses(group).forward(None, moe_tensors(**settings), PassOptions())
        assert (plan == "plan") == inside == (y == "y"), changes
        assert len(group.fused.calls) == 2 * inside
    group.capacity_factor = 1.5
    assert expert_parallel_group.fused_plan(group, ids, 2, signature()) == "plan", "waves run inside the launches"
    assert expert_parallel_group.GroupPasses(group).forward(None, moe_tensors(), PassOptions())[0] == "y"


class _Elsewhere:
    @staticmethod
    def forward(plan, tensors, options):
        return "elsewhere", None


def test_shared_experts_that_no_launch_takes_keep_the_plan_but_not_the_launch(monkeypatch):
    from mok.engines.protocol import SharedExpert

    monkeypatch.setattr(expert_parallel_group.GroupPasses, "_over_process_group", lambda self: _Elsewhere)
    odd = SharedExpert(torch.zeros(2 * 7, 64, dtype=BF16), torch.zeros(64, 7, dtype=BF16))
    assert expert_parallel_group.GroupPasses(Group()).forward(None, moe_tensors(shared=(odd,)), PassOptions())[0] == "elsewhere"


def bare_group(monkeypatch, **fields):
    """A FusedGroup without a GPU, and what it tells its peers."""
    told: list[int] = []
    group = FusedGroup.__new__(FusedGroup)
    settings = {"rank": 0, "world_size": 2, "num_experts": 4, "max_tokens": 8, "hidden_size": 64, "top_k": 2, "device": torch.device("cpu"), "debug": False,
                "_wave_tiles": None, "_dead": None, "_signatures": {}, "_reasons": {16: None}, "_record": torch.zeros(8, dtype=torch.int32),
                "_backward_variants": set(), "_ready_plans": {}, "_ids": SimpleNamespace(everybody=None), "timeout_s": 1.0,
                "launch": launch.GroupLaunch(torch.zeros(100, dtype=torch.int32), 4096, 20, False, 0.25)}
    for name, value in {**settings, **fields}.items():
        setattr(group, name, value)
    group._abort = SimpleNamespace(tell=told.append)
    for name, stand_in in (("device", lambda device: nullcontext()), ("Event", lambda: SimpleNamespace(record=lambda stream: None)),
                           ("current_stream", lambda device: "stream"), ("is_current_stream_capturing", lambda: False)):
        monkeypatch.setattr(expert_parallel.torch.cuda, name, stand_in)
    monkeypatch.setattr(expert_parallel, "current_stream", lambda index: 7)
    monkeypatch.setattr(expert_parallel, "on_device", lambda tensor: nullcontext())
    group._ordered = expert_parallel._Ordered(group.device, group.give_up)
    return group, told


def test_what_raises_on_one_rank_before_it_launches_ends_the_others_launches(monkeypatch):
    """A variant that cannot be loaded; a plan, a forward or a backward that cannot be launched."""
    waves = launch.GroupLaunch(torch.zeros(100, dtype=torch.int32), 4096, 20, False, 0.25, wave_tiles=3)
    group, told = bare_group(monkeypatch, launch=waves, _wave_tiles=(3, 3))
    fields = signature(activation="swiglu", swiglu_limit="None", recompute="z", **{"wanted gradients": "[True]"})
    with pytest.raises(NotImplementedError, match="recompute='z'"):
        expert_parallel_group.fused_plan(SimpleNamespace(fused=group), torch.zeros(3, 2, dtype=torch.int64), 2, fields)
    assert told == [ABORT_HOST]

    def fails(*_, **__):
        raise OSError("no space left on device")

    monkeypatch.setattr(expert_parallel.expert_parallel_plan_launch, "exchange_ids", fails)
    monkeypatch.setattr(launch, "forward", fails)
    monkeypatch.setattr(expert_parallel.expert_parallel_backward, "group_backward", fails)
    passes = {"plan": lambda group: group.build_plan(torch.zeros(3, 2, dtype=torch.int64), 2, "pass"),
              "forward": lambda group: group.forward("plan", moe_tensors(), PassOptions()),
              "backward": lambda group: group.backward("plan", moe_tensors(), PassOptions(), None, None, None, None)}
    for name, run in passes.items():
        group, told = bare_group(monkeypatch, _backward_variants={(0, None, False)})
        with pytest.raises(OSError, match="no space"):
            run(group)
        assert told == [ABORT_HOST], name
        with pytest.raises(FabricError, match="rank 0 gave up: OSError: no space left"):
            group.raise_if_dead()


def test_an_earlier_call_s_error_is_told_to_the_peers_of_this_one(monkeypatch):
    """A bad id shows in the next call, whose peers wait in its exchange."""
    import mok.function
    from mok.runtime import runtime

    reported = []
    monkeypatch.setitem(runtime.groups, 12345, SimpleNamespace(report=lambda *what: reported.append(what)))
    monkeypatch.setattr(runtime, "error_words", [lambda: ValueError("topk_ids held 99")])
    with pytest.raises(ValueError, match="99"):
        mok.function._routing_plan(torch.zeros(3, 2, dtype=torch.int64), 2, BF16, 64, 16, 12345, "|".join(["0"] * 11))
    assert len(reported) == 1 and "99" in reported[0][0]


@pytest.mark.parametrize("dead", [False, True])
def test_a_closed_group_gives_its_buffers_back_once(monkeypatch, dead):
    closed = []
    group, _ = bare_group(monkeypatch, memory=SimpleNamespace(close=lambda abandon: closed.append(abandon)), _dead=FabricError("gone", ()) if dead else None)
    group.close()
    assert closed == [dead], "only a dead group is left without the others"
    with pytest.raises(FabricError, match="dead: gone" if dead else "it was closed"):
        group.raise_if_dead()


def test_ids_that_no_ready_launch_takes_do_not_keep_others_from_one(monkeypatch):
    group, _ = bare_group(monkeypatch)
    calls = []
    monkeypatch.setattr(expert_parallel.expert_parallel_plan_launch, "exchange_ids", lambda *_: None)
    monkeypatch.setattr(expert_parallel.plan_kernel, "build_plan", lambda *_: None)
    monkeypatch.setattr(FusedGroup, "_cut", lambda *_: "plan")
    monkeypatch.setattr(expert_parallel.ReadyGroupPlan, "of", lambda *_: SimpleNamespace(build=lambda *what: calls.append(what) or "ready"))
    far = torch.zeros(4, dtype=torch.int64).as_strided((1, 2), (2**40, 1))
    assert [group.build_plan(ids, 2, "pass") for ids in (far, torch.zeros(3, 2, dtype=torch.int64), torch.zeros(5, 2, dtype=torch.int64), far)] == \
        ["plan", "plan", "ready", "plan"]
