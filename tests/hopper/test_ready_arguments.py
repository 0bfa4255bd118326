"""Argument lists that launches share: the kept list is the one that would be made anew, whatever changes, and no copy's address is kept."""
from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from launch_support import Memory
from oracle import make_case, want_all

from mok.engines.protocol import MainGrad, MoETensors, PassOptions, SharedExpert, Wants
from mok.engines.torch_gpu import TorchGpuEngine
from mok.runtime import runtime

launch = pytest.importorskip("mok.engines.hopper.launch", reason="needs Triton with Gluon")
backward_launch = pytest.importorskip("mok.engines.hopper.backward_launch")
ready = pytest.importorskip("mok.engines.hopper.ready_arguments")


@pytest.fixture(autouse=True)
def _states(monkeypatch):
    """A new control block for every launch, as captured launches have."""
    blocks = []

    def state(device, tiles):
        blocks.append(torch.zeros(16 + 2 * (16 + 5 * (4096 + len(blocks))), dtype=torch.int32))
        return blocks[-1], 4096 + len(blocks) - 1

    runtime.scratch.pop(ready._LISTS, None)
    for module in (launch, backward_launch):
        monkeypatch.setattr(module, "launch_state", state)
    yield blocks
    runtime.scratch.pop(ready._LISTS, None)


def plain(arguments):
    """Addresses for tensors, and what a descriptor describes: what reaches the kernel."""
    return [a.data_ptr() if isinstance(a, torch.Tensor) else (a.base.data_ptr(), a.shape, a.strides, a.block_shape) if hasattr(a, "base") else a
            for a in arguments]


def forward_arguments(case, save=True):
    plan = case.plan
    t = case.tensors
    T, H = t.x.shape
    I = t.w_down.shape[2]
    widths = [expert.w_down.shape[1] for expert in t.shared]
    out = torch.empty((T, H), dtype=t.x.dtype)
    z = torch.empty((plan.num_rows if save else 0, 2 * I), dtype=t.x.dtype)
    shared_z = torch.empty((T if save else 0, 2 * sum(widths)), dtype=t.x.dtype)
    grain = launch.granularity(None, H, I)
    sizes = launch.scratch_sizes(T, H, I, plan.num_rows, widths, grain)
    scratch = torch.empty(sizes.bytes // 2, dtype=t.x.dtype)
    options = replace(case.options, save_for_backward=save)
    key = launch._key(plan, t, options, out, z, shared_z, scratch, (None, None, None, None))
    return launch._ready_list(plan, t, options, out, z, shared_z, scratch, sizes, grain, key, None)


def problem(seed=0, **settings):
    """A case with its plan, whose parts can be exchanged."""
    case = make_case(200, 272, 176, 5, 3, torch.bfloat16, seed=seed, **settings)
    plan = TorchGpuEngine().build_plan(case.topk_ids, case.num_experts)
    return SimpleNamespace(tensors=case.tensors, options=case.options, plan=plan, dy=case.dy, wants=want_all(case))


@pytest.fixture
def case():
    return problem(biases=True, shared=((80, True),))


def changed(case):
    """The same launch with one thing different, by name."""
    t, options = case.tensors, case.options
    new = torch.randn(200, 272).to(torch.bfloat16)
    wide = torch.zeros(200, 300, dtype=torch.bfloat16)[:, :272].contiguous()
    variants = {"x elsewhere": replace(t, x=new), "x of other strides": replace(t, x=torch.zeros(200, 280, dtype=torch.bfloat16)[:, :272]),
                "x again elsewhere": replace(t, x=wide),
                "weights elsewhere": replace(t, w_gate_up=t.w_gate_up.clone()), "down weights elsewhere": replace(t, w_down=t.w_down.clone()),
                "a bias less": replace(t, b_down=None), "no shared expert": replace(t, shared=()),
                "shared weights elsewhere": replace(t, shared=(SharedExpert(t.shared[0].w_gate_up.clone(), t.shared[0].w_down, t.shared[0].gate_weight),)),
                "no gate": replace(t, shared=(SharedExpert(t.shared[0].w_gate_up, t.shared[0].w_down, None),)),
                "routing weights elsewhere": replace(t, topk_weights=t.topk_weights.clone())}
    cases = {name: (tensors, options, case.plan) for name, tensors in variants.items()}
    cases["another activation"] = (t, replace(options, activation="geglu"), case.plan)
    cases["a limit"] = (t, replace(options, swiglu_limit=2.0), case.plan)
    cases["another plan"] = (t, options, problem(seed=7).plan)
    return cases


def test_forward_lists_are_those_made_anew(case, monkeypatch, _states):
    Memory(monkeypatch)
    first = forward_arguments(case)
    second = forward_arguments(case)
    assert len(_states) == 2 and not any(isinstance(a, torch.Tensor) for a in second), "the second launch did not find the first one's list"
    assert second[launch._STATE] == _states[1].data_ptr() and second[launch._CAPACITY] == 4097
    assert [a for i, a in enumerate(plain(first)) if i not in (launch._STATE, launch._CAPACITY)] == \
        [a for i, a in enumerate(plain(second)) if i not in (launch._STATE, launch._CAPACITY)]
    for name, (tensors, options, plan) in changed(case).items():
        other = SimpleNamespace(tensors=tensors, options=options, plan=plan)
        found = plain(forward_arguments(other))
        runtime.scratch.pop(ready._LISTS, None)
        anew = plain(forward_arguments(other))
        forward_arguments(case)
        assert [a for i, a in enumerate(found) if i not in (launch._STATE, launch._CAPACITY)] == \
            [a for i, a in enumerate(anew) if i not in (launch._STATE, launch._CAPACITY)], name
    assert plain(forward_arguments(case, save=False)) != plain(forward_arguments(case))


def test_strides_tell_views_of_one_place_apart(case, monkeypatch):
    Memory(monkeypatch)
    memory = torch.zeros(200 * 280, dtype=torch.bfloat16)
    strides = []
    for x in (memory[:200 * 272].view(200, 272), memory.view(200, 280)[:, :272]):
        case.tensors = replace(case.tensors, x=x)
        for _ in range(2):
            strides.append(forward_arguments(case)[launch._forward_kernel.arg_names.index("x_stride_8")])
    assert strides == [34, 34, 35, 35]


def test_a_copy_that_begins_where_a_tensor_ends_is_not_kept(monkeypatch):
    """PyTorch's allocator puts blocks side by side. What is empty may lie anywhere: nobody reads it."""
    monkeypatch.setattr(runtime, "scratch", {})
    both = torch.zeros(1024, dtype=torch.uint8)

    class Block:
        def __init__(self, first: int, size: int) -> None:
            self.first, self.size = both.data_ptr() + first, size

        def untyped_storage(self):
            return self

        def data_ptr(self):
            return self.first

        def nbytes(self):
            return self.size

    ready.keep("copy", [both[512:]], (Block(0, 512),))
    ready.keep("inside", [both[511:]], (Block(0, 512),))
    ready.keep("empty", [both[512:512]], (Block(0, 512),))
    assert [ready.find(key) is not None for key in ("copy", "inside", "empty")] == [False, True, True]


def test_a_copy_for_this_launch_alone_is_not_kept(case, monkeypatch):
    """x at an odd address is cloned for the kernel: its address must not outlive the launch."""
    Memory(monkeypatch)
    t: MoETensors = case.tensors
    for name, tensors in {"x": replace(t, x=torch.zeros(200 * 272 + 1, dtype=torch.bfloat16)[1:].view(200, 272)),
                          "w_down": replace(t, w_down=t.w_down.transpose(1, 2).contiguous().transpose(1, 2)),
                          "b_down": replace(t, b_down=torch.zeros(5, 544, dtype=torch.bfloat16)[:, ::2])}.items():
        case.tensors = tensors
        forward_arguments(case)
        assert any(isinstance(a, torch.Tensor) for a in forward_arguments(case)), name


@pytest.mark.parametrize("into_main_grad", [False, True])
def test_backward_lists_are_those_made_anew(case, monkeypatch, _states, into_main_grad):
    t, engine = case.tensors, TorchGpuEngine()
    _, saved = engine.forward(case.plan, t, replace(case.options, save_for_backward=True))
    Memory(monkeypatch)
    main_grad = MainGrad(t.w_gate_up.float(), t.w_down.float()) if into_main_grad else None
    grads_memory: dict = {}

    def arguments(wants=None, options: PassOptions = case.options, dy=case.dy, tensors=t):
        wants = wants or case.wants
        grads = grads_memory.setdefault(wants, None) or backward_launch._empty_grads(tensors, wants, main_grad)
        grads_memory[wants] = grads
        buffers = backward_launch._buffers(case.plan, tensors, wants, False)
        key = backward_launch._key(case.plan, tensors, options, saved, dy, wants, main_grad, grads, (None, None, None), buffers)
        return backward_launch._launch_arguments(case.plan, tensors, options, saved, dy, wants, main_grad, grads, 16, buffers, key, False)

    varying = (backward_launch._STATE, backward_launch._SET_WORDS)

    def fixed(values):
        return [a for i, a in enumerate(plain(values)) if i not in varying]

    first, second = arguments(), arguments()
    assert not any(isinstance(a, torch.Tensor) for a in second) and fixed(first) == fixed(second)
    assert second[varying[0]] == _states[-1].data_ptr() and second[varying[1]] == backward_launch._set_words(_states[-1])
    wide_dy = torch.zeros(200, 280, dtype=torch.bfloat16)[:, :272]
    for change in ({"wants": Wants(x=True, shared=((False, False, False),))}, {"options": replace(case.options, activation="geglu")}, {"dy": wide_dy},
                   {"tensors": replace(t, x=t.x.clone())}):
        found = fixed(arguments(**change))
        runtime.scratch.pop(ready._LISTS, None)
        assert found == fixed(arguments(**change)), change
        arguments()


def test_lists_are_bounded(monkeypatch):
    monkeypatch.setattr(ready, "LIMIT", 3)
    for number in range(10):
        ready.keep(number, [number], ())
    assert len(runtime.scratch[ready._LISTS]) <= 3 and ready.find(9) == [9] and ready.find(0) is None
