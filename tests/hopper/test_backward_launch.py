"""Host side of the backward kernel, without a GPU: what is wanted, what is allocated for it, and that every argument has the kernel's type."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from oracle import make_case, want_all

from mok.engines.protocol import MainGrad, PassOptions, Saved, Wants
from mok.engines.torch_gpu import TorchGpuEngine

launch = pytest.importorskip("mok.engines.hopper.backward_launch", reason="needs Triton with Gluon")


def test_want_bits():
    """Worked example: dx and dw_down, and of the second shared expert its gate: 1 + 8 + 2^13."""
    assert launch.want_bits(Wants(x=True, w_down=True, shared=((False, False, False), (False, False, True)))) == 1 + 8 + (1 << 13)


def test_unwanted_gradients_have_no_buffers():
    sizes = launch.backward_scratch(T=200, H=64, I=32, rows=512, shared_widths=[], wants=Wants(w_down=True))
    assert (sizes.dy_rows, sizes.wh, sizes.x_rows, sizes.dz, sizes.results) == (512 * 64, 512 * 32, 0, 0, 0)
    sizes = launch.backward_scratch(T=200, H=64, I=32, rows=512, shared_widths=[], wants=Wants(topk_weights=True))
    assert (sizes.dy_rows, sizes.wh, sizes.x_rows, sizes.dz, sizes.results, sizes.partials) == (512 * 64, 0, 0, 0, 0, 512)


def test_scratch_of_shared_experts():
    """Two shared experts, widths 80 and 336 (padded to 384), 200 tokens in two row tiles each."""
    wants = Wants(x=True, shared=((True, True, True), (False, False, False)))
    sizes = launch.backward_scratch(T=200, H=64, I=32, rows=512, shared_widths=[80, 336], wants=wants)
    assert (sizes.shared_dz, sizes.shared_wh, sizes.gates) == (512 * 2 * 384, 512 * 384, 512)
    assert sizes.results == (512 + 512) * 64 and sizes.partials == 512 * 1 + 256 * (1 + 2)


@pytest.mark.parametrize("wants, routed, shared", [
    (Wants(w_down=True, shared=((False,) * 3,) * 2), True, False), (Wants(b_down=True, shared=((False, True, False), (False,) * 3)), False, True),
    (Wants(x=True, shared=((False,) * 3,) * 2), True, True), (Wants(shared=((False,) * 3,) * 2), False, False)])
def test_scratch_where_z_is_made_again(wants, routed, shared):
    """z and the rows of x that it comes from wherever a DH task reads z, of each kind; nothing else changes, and nothing without recompute."""
    saving = launch.backward_scratch(T=200, H=64, I=32, rows=512, shared_widths=[80, 336], wants=wants)
    again = launch.backward_scratch(T=200, H=64, I=32, rows=512, shared_widths=[80, 336], wants=wants, recompute=True)
    assert (saving.z, saving.shared_z) == (0, 0)
    assert (again.z, again.x_rows, again.shared_z) == (512 * 64 * routed, 512 * 64 * routed, 200 * 2 * 416 * shared)
    assert replace(again, z=0, shared_z=0, x_rows=saving.x_rows) == saving and again.bytes - saving.bytes == 2 * (2 * 512 * 64 * routed + again.shared_z)


@pytest.mark.parametrize("H, I", [(2048, 768), (7168, 2048), (4096, 14336), (16, 16)])
def test_default_group_leaves_three_waves(H, I):
    group = launch.default_group(H, I)
    tasks = group * (-(-I // 256) + -(-H // 256))
    assert 8 <= group <= 64 and (tasks >= 396 or group == 64)


@pytest.mark.parametrize("activation, limit, name", [("swiglu", None, "swiglu"), ("swiglu", 3.0, "clamped"), ("swiglu_oai", None, "clamped"),
                                                     ("geglu", None, "geglu"), ("reglu", None, "reglu")])
def test_variant(activation, limit, name):
    assert launch._variant(PassOptions(activation, limit)) == name


@pytest.mark.parametrize("settings", [{}, {"biases": True, "shared": ((80, False), (336, True))}])
@pytest.mark.parametrize("into_main_grad", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_arguments_have_the_kernels_types(monkeypatch, settings, into_main_grad, recompute):
    """As the compile check compiles them: a launch whose types differ would compile again."""
    asked = []

    def state(device, tiles):
        asked.append(tiles)
        return torch.zeros(launch.CONTROL_WORDS + 2 * 1000, dtype=torch.int32), tiles

    monkeypatch.setattr(launch, "launch_state", state)
    case = make_case(200, 272, 176, 5, 3, torch.bfloat16, **settings)
    t, engine = case.tensors, TorchGpuEngine()
    plan = engine.build_plan(case.topk_ids, 5)
    _, saved = engine.forward(plan, t, case.options)
    wants, main_grad = want_all(case), MainGrad(t.w_gate_up.float(), t.w_down.float()) if into_main_grad else None
    grads = launch._empty_grads(t, wants, main_grad)
    assert (grads.w_gate_up is None) == into_main_grad and (grads.w_down is None) == into_main_grad
    if recompute:
        saved = Saved(saved.z[:0], saved.shared_z[:0])
    buffers = launch._buffers(plan, t, wants, recompute)
    arguments = launch._launch_arguments(plan, t, case.options, saved, case.dy, wants, main_grad, grads, 2, buffers, object(), recompute)
    signature = launch.source(launch.BackwardConfig(0, recompute=recompute)).signature
    names = [name for name, kind in signature.items() if kind != "constexpr"]
    assert len(arguments) == len(names)
    types = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
    for name, value in zip(names, arguments):
        if isinstance(value, torch.Tensor):
            found = types[value.dtype]
            assert value.data_ptr() % 16 == 0, name
        elif isinstance(value, (int, float)):
            found = "i32" if isinstance(value, int) else "fp32"
        else:
            found = f"tensordesc<bf16{value.block_shape},{value.layout!r}>"
        assert found == signature[name], name
    tiles, shared = plan.num_rows // 128, len(t.shared)
    counters = 2 * tiles + (shared + 1) * 2 + 5 + (1 + tiles + shared * 2 if recompute else 0)           # 200 tokens: two token tiles
    assert 4 * (asked[0] - 1) < counters <= 4 * asked[0]
    by_name = dict(zip(names, arguments))
    assert (by_name["features"] & 16 != 0) == (recompute and "biases" in settings) == (by_name["b_up"] is t.b_gate_up)
    assert by_name["z_desc"].shape == [2, plan.num_rows, 176] and by_name["x_rows_desc"].shape == [plan.num_rows, 272]
    if shared:
        assert [by_name[f"shared_z_{i}"].shape for i in range(2)] == [[2, 200, 80], [2, 200, 336]]
        assert by_name["shared_z_1"].base.data_ptr() - by_name["shared_z_0"].base.data_ptr() == 2 * 2 * 80
