"""Launches kept ready: the driver gets from them what Triton's own way gives it, with the driver, the launcher and the encoding of descriptors stood in for."""
from __future__ import annotations

import ctypes
import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

launch = pytest.importorskip("mok.engines.hopper.launch", reason="needs Triton with Gluon")
backward_launch = pytest.importorskip("mok.engines.hopper.backward_launch")
plan_kernel = pytest.importorskip("mok.engines.hopper.plan_kernel")
group_plan = pytest.importorskip("mok.engines.hopper.expert_parallel_plan_launch")

from launch_support import Memory, binary, machine_without_gpu  # noqa: E402
from oracle import make_case, want_all  # noqa: E402

from mok.engines.hopper import compat, driver, expert_parallel_plan  # noqa: E402
from mok.engines.hopper.compat import current_stream, new_empty  # noqa: E402
from mok.engines.hopper.driver import DriverError, ReadyChain, capture, ready_launch  # noqa: E402
from mok.engines.torch_gpu import TorchGpuEngine  # noqa: E402
from mok.runtime import runtime  # noqa: E402


@pytest.fixture
def machine(monkeypatch):
    machine = machine_without_gpu(monkeypatch)
    machine.driver.cooperative = True
    return machine


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
    ready = ready_launch(kernel, arguments, varying, 0)
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


def test_structures_are_those_of_cuda_h():
    """CUlaunchConfig, CUlaunchAttribute and CUDA_KERNEL_NODE_PARAMS_v2 of CUDA 12 and 13 on a 64-bit machine, byte by byte."""
    layouts = {driver._Config: (56, {"grid": 0, "grid_y": 4, "grid_z": 8, "block": 12, "block_y": 16, "block_z": 20, "shared": 24, "stream": 32,
                                     "attributes": 40, "count": 48}),
               driver._Attribute: (72, {"id": 0, "pad": 4, "value": 8}),
               driver._Node: (72, {"function": 0, "grid": 8, "grid_y": 12, "grid_z": 16, "block": 20, "block_y": 24, "block_z": 28, "shared": 32,
                                   "parameters": 40, "extra": 48, "kernel": 56, "context": 64})}
    for structure, (size, offsets) in layouts.items():
        assert ctypes.sizeof(structure) == size
        assert {name: getattr(structure, name).offset for name, _ in structure._fields_} == offsets
    assert {getattr(driver._Node, name).size for name in ("function", "parameters", "extra", "kernel", "context")} == {8}
    assert {getattr(driver._Config, name).size for name in ("grid", "block", "shared", "count")} == {4}


def test_what_was_captured_outlives_its_graph_and_holds_its_binary(machine):
    source = SOURCES["forward"][0]()
    kernel, arguments = binary(source), arguments_of(source)
    ready = ready_launch(kernel, arguments, (list(source.signature).index("state"),), 0)
    assert not machine.driver.alive, "a graph was not destroyed"
    held = weakref.ref(kernel.run)
    del kernel
    gc.collect()
    assert held() is not None, "a binary that nobody holds is unloaded"
    ready(3, 5, 1 << 40)
    assert 0xEEEEEEEEEEEEEEEE - (1 << 64) not in machine.launches[-1] and 1 << 40 in machine.launches[-1]


@pytest.mark.parametrize("error", [RuntimeError("Triton Error [CUDA]: invalid resource handle"), TypeError("int"), OverflowError("too large")], ids=repr)
def test_a_capture_that_fails_leaves_the_launch_to_triton_and_nothing_behind(machine, error):
    source = SOURCES["plan"][0]()
    kernel = binary(source)

    def fails(*_):
        raise error

    kernel.run.launch = fails
    machine.driver.captured = -1
    machine.driver.nodes[-1] = SimpleNamespace(memory=[])
    assert ready_launch(kernel, arguments_of(source), (0,), 0) is None
    assert not machine.driver.capturing and not machine.driver.alive and not machine.launches
    assert ready_launch(binary(source), arguments_of(source), (0,), 0) is not None
    unlike = binary(source)
    del unlike.run.num_ctas
    assert ready_launch(unlike, arguments_of(source), (0,), 0) is None


def test_a_parameter_that_the_driver_does_not_tell_is_not_the_end_of_the_list(machine):
    source = SOURCES["plan"][0]()
    tell = machine.driver.cuFuncGetParamInfo
    machine.driver.cuFuncGetParamInfo = lambda function, index, *found: 700 if index.value == 9 else tell(function, index, *found)
    assert ready_launch(binary(source), arguments_of(source), (0,), 0) is None and not machine.driver.alive


def test_each_device_has_a_capture_stream_of_its_own(machine):
    source = SOURCES["plan"][0]()
    for device in (0, 1, 0):
        machine.driver.device = device
        assert ready_launch(binary(source), arguments_of(source), (0,), device) is not None
    assert sorted(machine.driver.streams.values()) == [0, 1]


def test_a_chain_gives_its_graphs_back_with_its_last_reference(machine, monkeypatch):
    machine.driver.cooperative = False
    source = SOURCES["plan"][0]()
    chain = ReadyChain([(capture(binary(source), arguments_of(source), (0,), 0), 1, (5,))], 0)
    chain(9)
    assert len(machine.driver.alive) == 2 and not driver._capturing.locked()
    del chain
    gc.collect()
    assert not machine.driver.alive
    kept = ReadyChain([(capture(binary(source), arguments_of(source), (0,), 0), 1, (5,))], 0)
    monkeypatch.setattr(driver.os, "getpid", lambda: -1)                 # a forked child, whose driver has no such graph
    del kept
    gc.collect()
    assert len(machine.driver.alive) == 2


@pytest.mark.parametrize("metadata", [{"global_scratch_size": 64}, {"profile_scratch_size": 64}, {"launch_pdl": True}, {"num_ctas": 2}], ids=str)
def test_what_parameters_alone_do_not_say_is_left_to_triton(machine, metadata):
    source = SOURCES["plan"][0]()
    assert ready_launch(binary(source), arguments_of(source), (0,), 0) is not None
    assert ready_launch(binary(source, **metadata), arguments_of(source), (0,), 0) is None


@pytest.mark.parametrize("name", ["cuFuncGetParamInfo", "cuGraphKernelNodeGetParams_v2", "cuGraphKernelNodeGetAttribute", "cuStreamBeginCapture_v2",
                                  "cuStreamEndCapture", "cuGraphGetNodes"])
def test_a_driver_that_cannot_tell_leaves_launches_to_triton(machine, name):
    source = SOURCES["plan"][0]()
    machine.driver.missing.add(name)
    assert ready_launch(binary(source), arguments_of(source), (0,), 0) is None
    machine.driver.missing.clear()
    machine.driver.failing[name] = 801
    assert ready_launch(binary(source), arguments_of(source), (0,), 0) is None or name == "cuFuncGetParamInfo"
    machine.driver.failing.clear()
    assert ready_launch(binary(source), arguments_of(source), (0,), 0) is not None and not machine.launches


def test_what_varies_must_be_found_once(machine):
    """A constant expression is no parameter; a number that equals the mark would be taken for it."""
    source = SOURCES["plan"][0]()
    names, arguments = list(source.signature), arguments_of(source)
    place, other = names.index("topk_ids"), names.index("num_slots")
    assert ready_launch(binary(source), arguments, (place,), 0) is not None
    arguments[other] = mark = 0x5A5A5A00
    assert capture(binary(source), arguments, (place,), 0) is None
    arguments[other] = mark + 1
    assert capture(binary(source), arguments, (place,), 0) is not None
    constant = next(i for i, kind in enumerate(source.signature.values()) if kind == "constexpr")
    machine.driver.bytes_of = lambda value: bytes(8) if value == mark else type(machine.driver).bytes_of(machine.driver, value)     # folded away
    assert capture(binary(source), arguments, (constant,), 0) is None


def test_a_launch_that_fails_raises(machine):
    source = SOURCES["plan"][0]()
    ready = ready_launch(binary(source), arguments_of(source), (0,), 0)
    machine.driver.failing["cuLaunchKernelEx"] = 700
    with pytest.raises(DriverError, match=r"cuLaunchKernelEx: stand-in \(700\)"):
        ready_launch(binary(source), arguments_of(source), (0,), 0)(1, 5, 1 << 40)
    machine.driver.failing.clear()
    ready(1, 5, 1 << 40)
    ready(0, 5, 1 << 40)
    assert len(machine.launches) == 1, "no blocks, no launch: as Triton has it"


def test_sizes_that_never_repeat_are_not_captured(machine, monkeypatch):
    """Of ids of a size that comes once no parameters are looked for; of one that comes again they are, once, also where the driver cannot tell."""
    monkeypatch.setattr(compat, "_RAW_STREAM", lambda index: 50)
    monkeypatch.setattr(plan_kernel, "on_device", lambda tensor: compat._NOTHING)
    sources = {name: source for name, source, _ in plan_kernel.compile_sources()}
    kernels = [binary(sources[f"plan_{name}_kernel_i32_E32"]) for name in ("count_slots", "scan_chunks", "scatter_slots")]
    monkeypatch.setattr(runtime, "scratch", {("plan", torch.device("cpu"), torch.int32, 32, 128): kernels})
    begun, begin = [], type(machine.driver).cuStreamBeginCapture_v2
    machine.driver.cuStreamBeginCapture_v2 = lambda *what: begun.append(what) or begin(machine.driver, *what)

    def captures(T):
        begun.clear()
        plan_kernel.build_plan(torch.zeros(T, 2, dtype=torch.int32), 8)
        return len(begun)

    assert captures(7) == 3                                  # the variant's own, ready for all sizes
    assert [captures(T) for T in range(10, 20)] == [0] * 10
    assert [captures(T) for T in (7, 7, 12, 12)] == [3, 0, 3, 0]
    machine.driver.missing.add("cuFuncGetParamInfo")
    assert [captures(T) for T in (13, 13, 13)] == [1, 0, 0]


def test_threads_launch_side_by_side_with_their_own_values(machine):
    """A launch that is entered again before the driver has read its parameters, as by another thread."""
    source = SOURCES["plan"][0]()
    ready = ready_launch(binary(source), arguments_of(source), (0,), 0)
    first = ready._launch

    def interrupted(*arguments):
        if len(machine.launches) < 3:
            machine.launches.append(None)
            ready(9, 6, 2000 + len(machine.launches))
        return first(*arguments)

    ready._launch = interrupted
    ready(7, 5, 1000)
    launches = [call for call in machine.launches if call is not None]
    assert [(call[0], call[3], [v for v in call if v in (1000, 2001, 2002, 2003)]) for call in launches] == \
        [(9, 6, [2003]), (9, 6, [2002]), (9, 6, [2001]), (7, 5, [1000])]
    ready._launch = first
    ready(8, 4, 3000)
    assert machine.launches[-1][0] == 8 and 3000 in machine.launches[-1]


def test_a_chain_launches_its_kernels_in_order_with_what_they_were_last_given(machine):
    machine.driver.cooperative = False
    source = SOURCES["plan"][0]()
    kernels = [binary(source) for _ in range(3)]
    captured = [capture(kernel, arguments_of(source, first), (0, 7), 0) for first, kernel in zip((1 << 20, 1 << 21, 1 << 22), kernels)]
    chain = ReadyChain([(each, i + 1, (1000 + i, 2000 + i)) for i, each in enumerate(captured)], 0)
    assert not machine.launches

    def expected(stream, *steps):
        for kernel, first, (blocks, *values) in zip(kernels, (1 << 20, 1 << 21, 1 << 22), steps):
            arguments = arguments_of(source, first)
            arguments[0], arguments[7] = values
            as_triton(kernel, blocks, stream, arguments)
        return [described(call) for call in machine.launches[-3:]]

    for changes, steps in (((), ((1, 1000, 2000), (2, 1001, 2001), (3, 1002, 2002))),
                           (((1, 20, (77, 88)),), ((1, 1000, 2000), (20, 77, 88), (3, 1002, 2002))),
                           (((0, 5, (6, 7)), (2, 30, (8, 9))), ((5, 6, 7), (20, 77, 88), (30, 8, 9)))):
        chain(99, *changes)
        found = [described(call) for call in machine.launches[-3:]]
        assert found == expected(99, *steps)
    machine.driver.cooperative = True
    with pytest.raises(ValueError, match="cooperative"):
        ReadyChain([(capture(binary(source), arguments_of(source), (0,), 0), 1, (5,))], 0)


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


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("wave_tiles", [None, (3, 2)])
def test_a_group_s_plan_is_ready_for_any_number_of_tokens(machine, monkeypatch, wave_tiles, chained):
    """The same five launches as by Triton's own way, but that everybody's plan lies in one block: equal up to where memory lies, for other T too."""
    machine.driver.cooperative = False
    capturing = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
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
    plan_kernel.build_plan(everybody, E)                     # the second plan of a size is the first that is kept ready
    machine.launches.clear()
    ready = None
    for T, strides in ((700, (2, 1)), (0, (2, 1)), (5, (1, 5)), (64, (8, 3))):
        ids = torch.zeros(T * 8 + 8, dtype=torch.int64).as_strided((T, K), strides)
        group_plan.exchange_ids(ids, E, most, 17, everybody, state, False)
        plan = group_plan.cut_plan(plan_kernel.build_plan(everybody, E), ids, E, 1, W, most, wave_tiles)
        expected = [described(call) for call in machine.launches[-5:]]
        if ready is None:
            ready = group_plan.ReadyGroupPlan.of(group_plan.GroupIds(E, 1, W, most, everybody, state, wave_tiles), ids, False)
            ready.chain(ids) if chained else None
        if chained and T == 5:
            block, graphs = ready.block, dict(machine.driver.chains)
            capturing.append(True)
            ready.build(ids, 17)
            assert machine.driver.chains == graphs and ready.block is block, "a graph was launched into a stream that is captured"
            assert not any(block.data_ptr() == value for call in machine.launches[-5:] for value in described(call)), "a captured plan's memory is its own"
            del machine.launches[-5:]
            capturing.clear()
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
    assert all(end <= begin for end, begin in zip(ends, [*ready._places[1:], 4 * ready._block_shape[0]], strict=True)), "parts overlap"


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
    call = driver.ReadyLaunch.__call__
    monkeypatch.setattr(driver.ReadyLaunch, "__call__", lambda self, *values: used.append(self) or call(self, *values))
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


@pytest.mark.gpu
def test_ready_launches_are_made_and_used_while_a_graph_is_captured(monkeypatch):
    """Looking for a launch's parameters captures a stream of its own, also beside a capture; what is captured replays to the same bits."""
    import mok

    used = []
    call = driver.ReadyLaunch.__call__
    monkeypatch.setattr(driver.ReadyLaunch, "__call__", lambda self, *values: used.append(self) or call(self, *values))
    generator = torch.Generator().manual_seed(4)
    x, w_gate_up, w_down = [(torch.randn(size, generator=generator) * 0.1).to("cuda", torch.bfloat16) for size in ((300, 256), (8, 256, 256), (8, 256, 128))]
    weights, ids = torch.rand(300, 2, generator=generator).cuda(), torch.randint(-1, 8, (300, 2), generator=generator).cuda()
    with torch.no_grad():
        expected = mok.moe(x, ids, weights, w_gate_up, w_down)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        used.clear()
        with torch.cuda.graph(graph):
            for _ in range(8):
                y = mok.moe(x, ids, weights, w_gate_up, w_down)
        layers = [launch for launch in used if launch.captured.cooperative]
        assert layers, "no launch was made ready within the capture"
        for _ in range(3):
            y.fill_(torch.nan)
            graph.replay()
            assert torch.equal(y, expected)
    mok.check()
