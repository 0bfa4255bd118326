"""Launches kept ready: the driver's launcher gets from them what Triton's own way gives it, with the launcher and the encoding of descriptors stood in for."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch

launch = pytest.importorskip("mok.engines.hopper.launch", reason="needs Triton with Gluon")
backward_launch = pytest.importorskip("mok.engines.hopper.backward_launch")
plan_kernel = pytest.importorskip("mok.engines.hopper.plan_kernel")
group_plan = pytest.importorskip("mok.engines.hopper.expert_parallel_plan_launch")

from launch_support import Compiled, Memory, binary, machine_without_gpu  # noqa: E402
from oracle import make_case, want_all  # noqa: E402

from mok.engines.hopper import compat, expert_parallel_plan  # noqa: E402
from mok.engines.hopper.compat import current_stream, new_empty, ready_launch  # noqa: E402
from mok.engines.torch_gpu import TorchGpuEngine  # noqa: E402
from mok.runtime import runtime  # noqa: E402


@pytest.fixture
def machine(monkeypatch):
    return machine_without_gpu(monkeypatch)


def arguments_of(source, first=1 << 20):
    """One of every kind that the signature names, all different; constant expressions included."""
    constants = {name[0] if isinstance(name, tuple) else name: value for name, value in source.constants.items()}
    values = []
    for i, kind in enumerate(source.signature.values()):
        if kind.startswith("tensordesc"):
            rank = kind.split("]")[0].count(",") + 1
            strides = (*range(800 + 8 * i, 800 + 8 * (i + rank - 1), 8), 1)
            values.append(backward_launch._descriptor(first + 256 * i, tuple(range(i + 2, i + 2 + rank)), strides))
        else:
            values.append(constants.get(i, i) if kind == "constexpr" else 0.5 + i if kind == "fp32" else first + 16 * i)
    return values


def as_triton(kernel, blocks, stream, arguments):
    kernel.run(blocks, 1, 1, stream, kernel.function, kernel.packed_metadata, None, None, None, *arguments)


SOURCES = {"forward": (lambda: launch.source(launch.ForwardConfig(True)), ("state", "capacity")),
           "backward": (lambda: backward_launch.source(backward_launch.BackwardConfig(0)), ("state", "set_words")),
           "plan": (lambda: next(source for name, source, _ in plan_kernel.compile_sources() if "scatter" in name), ("topk_ids", "counts", "num_tiles"))}


@pytest.mark.parametrize("name", SOURCES)
def test_the_launcher_gets_what_triton_gives_it(machine, name):
    make, varying_names = SOURCES[name]
    source = make()
    kernel, names = binary(source), list(source.signature)
    varying = [names.index(each) for each in varying_names]
    arguments = arguments_of(source)
    ready = ready_launch(kernel, arguments, varying)
    assert ready is not None and not machine.launches
    descriptors = sum(kind.startswith("tensordesc") for kind in source.signature.values())
    assert len(machine.encoded) == descriptors and (descriptors > 0) == (name != "plan")
    for blocks, stream, values in ((7, 99, range(1000, 1000 + len(varying))), (8, 98, range(2000, 2000 + len(varying)))):
        machine.encoded.clear()
        ready(blocks, stream, *values)
        assert not machine.encoded, "a descriptor was encoded again"
        changed = list(arguments)
        for place, value in zip(varying, values):
            changed[place] = value
        as_triton(kernel, blocks, stream, changed)
        ours, theirs = machine.launches[-2:]
        flat = [[*call[:-1], *call[-1]] if isinstance(call[-1], (list, tuple)) else [*call] for call in (ours, theirs)]
        assert flat[0] == flat[1] and set(values) < set(map(id_or_value, flat[0]))
    assert arguments == arguments_of(source), "the caller's list was changed"


def id_or_value(value):
    return value if isinstance(value, (int, float, str)) else id(value)


def test_what_is_made_anew_for_each_launch_is_left_to_triton(machine):
    source = SOURCES["plan"][0]()
    assert ready_launch(binary(source, global_scratch_size=64), arguments_of(source), (0,)) is None
    assert ready_launch(binary(source, profile_scratch_size=64), arguments_of(source), (0,)) is None


def test_an_unknown_launcher_is_left_to_triton(machine):
    """Internals of a release to come: no `launch`, one that hides what it calls, one that calls with other arguments, or none."""
    source = SOURCES["forward"][0]()
    arguments = arguments_of(source)

    def replaced(launch_function):
        kernel = binary(source)
        if launch_function is None:
            del kernel.run.launch
        else:
            kernel.run.launch = launch_function
        return ready_launch(kernel, arguments, (1, 2))

    def calling(arrange):
        launcher = Compiled(lambda *call: None)
        return lambda *call: launcher(*arrange(call))

    assert replaced(calling(lambda call: call)) is not None, "this way of replacing it is no test"
    for odd in (None, lambda *call: None, calling(lambda call: call[1:]), calling(lambda call: (*call[:3], 5, *call[4:])),
                calling(lambda call: call[:8])):
        assert replaced(odd) is None
    assert not machine.launches


def test_the_current_stream_comes_from_pytorch_or_triton(machine, monkeypatch):
    monkeypatch.setattr(compat, "_RAW_STREAM", None)
    assert current_stream(2) == 42
    monkeypatch.setattr(compat, "_RAW_STREAM", lambda index: 50 + index)
    assert current_stream(2) == 52


def described(call):
    """A call of the launcher with addresses in the place of tensors."""
    flat = [*call[:-1], *call[-1]] if isinstance(call[-1], (list, tuple)) else call
    return [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in flat]


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_passes_go_through_ready_launches_from_the_third_on(machine, monkeypatch, which):
    """List made, list found and made ready, ready: the same launch, whose descriptors are encoded anew in the first two alone."""
    case = make_case(200, 272, 176, 5, 3, torch.bfloat16, biases=True, shared=((80, True),))
    plan, options = TorchGpuEngine().build_plan(case.topk_ids, 5), replace(case.options, save_for_backward=True)
    _, saved = TorchGpuEngine().forward(plan, case.tensors, options)
    module, config = (launch, launch.ForwardConfig(True)) if which == "forward" else (backward_launch, backward_launch.BackwardConfig(0))
    state = torch.zeros(16 + 2 * (16 + 5 * 4096), dtype=torch.int32)
    monkeypatch.setattr(module, "launch_state", lambda device, tiles: (state, 4096))
    monkeypatch.setattr(module, "on_device", lambda tensor: compat._NOTHING)
    monkeypatch.setattr(compat, "_RAW_STREAM", lambda index: 50)
    kept = {("hopper binary", None, config, True): binary(module.source(config)), ("hopper resident blocks", None, config): 132}
    monkeypatch.setattr(runtime, "scratch", kept)
    Memory(monkeypatch)

    def run(tensors=case.tensors, **settings):
        machine.encoded.clear()
        if which == "forward":
            launch.forward(plan, tensors, options, **settings)
        else:
            backward_launch.hopper_backward(plan, tensors, options, saved, case.dy, want_all(case), None, **settings)
        return described(machine.launches[-1]), len(machine.encoded)

    first, second, third = run(), run(), run()
    descriptors = first[1]
    assert descriptors > 10 and second[1] == 2 * descriptors and third[1] == 0           # the second both launches and makes ready
    assert first[0] == second[0] == third[0] and len(machine.launches) == 3
    elsewhere = replace(case.tensors, w_down=case.tensors.w_down.clone())
    other = run(elsewhere)
    assert other[1] == descriptors and other[0] != first[0] and run() == third
    assert run(elsewhere)[0] == run(elsewhere)[0] == other[0]
    reserved = run(reserve_sms=30)
    assert reserved == ([102, *third[0][1:]], 0)
    with pytest.raises(ValueError, match="reserve_sms=132 must be less than the 132 blocks"):
        run(reserve_sms=132)


def test_groups_that_differ_in_their_part_of_a_card_keep_launches_of_their_own(machine, monkeypatch):
    """All else equal, addresses too, as of two groups with one problem and an allocator that hands out the block that fits."""
    case = make_case(200, 272, 176, 5, 3, torch.bfloat16)
    plan = TorchGpuEngine().build_plan(case.topk_ids, 5)
    plan = replace(plan, slot_to_rank=torch.zeros_like(plan.slot_to_row))
    config = launch.ForwardConfig(False, several_ranks=True)
    monkeypatch.setattr(launch, "on_device", lambda tensor: compat._NOTHING)
    monkeypatch.setattr(compat, "_RAW_STREAM", lambda index: 50)
    monkeypatch.setattr(runtime, "scratch", {("hopper binary", None, config, False): binary(launch.source(config))})
    memory = torch.zeros(1 << 22, dtype=torch.bfloat16)
    monkeypatch.setattr(launch, "new_empty", lambda like, shape, dtype: memory[:torch.Size(shape).numel()].view(shape))
    state = torch.zeros(16 + 2 * (16 + 5 * 4096), dtype=torch.int32)
    groups = [launch.GroupLaunch(state, 4096, blocks, False, card) for blocks, card in ((66, 0.5), (33, 0.25), (33, 0.5))]
    names = [name for name in launch._forward_kernel.arg_names if name not in config.constexprs()]
    launched = []
    for _ in range(3):
        for group in groups:
            launch.forward(plan, case.tensors, replace(case.options, save_for_backward=False), config, group=group)
            call = described(machine.launches[-1])
            launched.append((call[0], [value for value in call if value in (24, 12)]))
    assert [grid for grid, _ in launched] == [66, 33, 33] * 3
    assert launched[:3] == launched[3:6] == launched[6:] and launched[0][1] != launched[1][1], (launched, names)      # rings of 3 groups of 8 and of 4 tiles


def cut_source(experts, waves):
    """The cut kernel as Triton's compiler takes it."""
    from triton.compiler import ASTSource

    kernel = group_plan._cut_plan_kernel
    constants = {"BLOCK": group_plan.BLOCK_CUT, "BLOCK_M": 128, "EXPERTS": experts, "WAVES": waves}
    types = {**dict.fromkeys(expert_parallel_plan._CUT, "i32"), **dict.fromkeys(constants, "constexpr"), "expert_offsets": "*i64", "all_offsets": "*i64"}
    return ASTSource(kernel, {name: types.get(name, "*i32") for name in kernel.arg_names}, constants)


@pytest.mark.parametrize("wave_tiles", [None, (3, 2)])
def test_a_group_s_plan_is_ready_for_any_number_of_tokens(machine, monkeypatch, wave_tiles):
    """The same five launches as by Triton's own way, but that everybody's plan lies in one block: equal up to where memory lies, for other T too."""
    W, E, K, most = 3, 8, 2, 700
    state, everybody = torch.zeros(100, dtype=torch.int32), torch.zeros(W * most, K, dtype=torch.int32)
    device = state.device
    monkeypatch.setattr(compat, "_RAW_STREAM", lambda index: 50)
    monkeypatch.setattr(plan_kernel, "on_device", lambda tensor: compat._NOTHING)
    kept, make, run = [], plan_kernel.new_empties, plan_kernel.run_launches                  # memory that is freed would come again for another part
    monkeypatch.setattr(plan_kernel, "new_empties", lambda *arguments: kept.append(make(*arguments)) or kept[-1])
    monkeypatch.setattr(plan_kernel, "run_launches", lambda launches, *rest: kept.append(launches) or run(launches, *rest))
    sources = {name: source for name, source, _ in plan_kernel.compile_sources()}
    plan_kernels = [binary(sources[f"plan_{name}_kernel_i32_E32"]) for name in ("count_slots", "scan_chunks", "scatter_slots")]
    scratch = {group_plan._exchange_variant(torch.zeros(1, 1, dtype=torch.int64), False): [binary(group_plan.exchange_source("i64"))],
               ("plan", device, torch.int32, 32, 128): plan_kernels,
               group_plan._cut_variant(device, 3, wave_tiles): [binary(cut_source(32, wave_tiles is not None))]}
    monkeypatch.setattr(runtime, "scratch", scratch)
    ready = None
    for T, strides in ((700, (2, 1)), (0, (2, 1)), (5, (1, 5)), (64, (8, 3))):
        ids = torch.zeros(T * 8 + 8, dtype=torch.int64).as_strided((T, K), strides)
        group_plan.exchange_ids(ids, E, most, 17, everybody, state, False)
        plan = group_plan.cut_plan(plan_kernel.build_plan(everybody, E), ids, E, 1, W, most, wave_tiles)
        expected = [described(call) for call in machine.launches[-5:]]
        ready = ready or group_plan.ReadyGroupPlan.of(group_plan.GroupIds(E, 1, W, most, everybody, state, wave_tiles), ids, False)
        ours = ready.build(ids, 17)
        assert len(machine.launches) % 10 == 0
        moved = {}
        for want, found in zip(expected, map(described, machine.launches[-5:]), strict=True):
            assert len(want) == len(found)
            for a, b in zip(want, found):
                is_address = isinstance(a, int) and a > 1 << 20
                assert moved.setdefault(a, b) == b if is_address else a == b or (a != a and b != b) or id_or_value(a) == id_or_value(b)
        assert len(set(moved.values())) == len(moved), "two parts lie at one address"
        assert [(part.shape, part.dtype) for part in ours.tensors()] == [(part.shape, part.dtype) for part in plan.tensors()]
        assert T == 0 or moved[plan.slot_to_rank.data_ptr()] == ours.slot_to_rank.data_ptr()
    ends = [place + torch.empty(shape, dtype=dtype).nbytes for place, (shape, dtype) in zip(ready._places, ready._whole.shapes, strict=True)]
    assert all(end <= begin for end, begin in zip(ends, [*ready._places[1:], 4 * ready._block[0]], strict=True)), "parts overlap"


@pytest.mark.parametrize("shape", [(), (0,), (5,), (0, 3), (3, 0), (4, 6), (2, 3, 4), (2, 0, 4)], ids=str)
def test_memory_without_the_dispatcher_is_laid_out_as_torch_does(monkeypatch, shape):
    from torch._C._dynamo.guards import _empty_strided_cpu

    class OnGpu(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(compat, "_EMPTY_CUDA", _empty_strided_cpu)
    like = torch.zeros(1).as_subclass(OnGpu)
    expected = torch.empty(shape, dtype=torch.bfloat16)
    for size in (shape, torch.Size(shape)):
        made = new_empty(like, size, torch.bfloat16)
        assert (made.shape, made.stride(), made.dtype, made.storage_offset()) == (expected.shape, expected.stride(), expected.dtype, 0)


@pytest.mark.gpu
def test_ready_launches_change_no_bit_on_a_gpu(monkeypatch):
    import mok

    used = []
    call = compat.ReadyLaunch.__call__
    monkeypatch.setattr(compat.ReadyLaunch, "__call__", lambda self, *values: used.append(self) or call(self, *values))
    generator = torch.Generator().manual_seed(3)
    parts = [(torch.randn(size, generator=generator) * 0.1).to("cuda", torch.bfloat16).requires_grad_() for size in ((200, 256), (8, 256, 256), (8, 256, 128))]
    x, w_gate_up, w_down = parts
    weights = torch.rand(200, 2, generator=generator).cuda().requires_grad_()
    ids = [torch.randint(-1, 8, (200, 2), generator=generator).cuda() for _ in range(2)]

    def once(which):
        y = mok.moe(x, ids[which], weights, w_gate_up, w_down)
        return [part.cpu() for part in (y, *torch.autograd.grad(y, (x, weights, w_gate_up, w_down), torch.ones_like(y)))]

    expected = [once(0), once(1)]
    for turn in range(12):
        assert all(torch.equal(a, b) for a, b in zip(once(turn % 2), expected[turn % 2], strict=True)), turn
    assert len(set(map(id, used))) >= 5, "three launches of a plan, one forward, one backward"
