"""The unfused layer that training is compared with: the same results and gradients as the engine's, an expert without tokens included."""
from __future__ import annotations

import pytest
import torch

from mok.config import MoEConfig
from mok.layer import MoE
from mok.lm.grouped_moe import GroupedMoE
from mok.unfused import unfused_moe, unfused_moe_with_counts

CONFIG = MoEConfig(hidden_size=32, intermediate_size=24, num_experts=5, top_k=2)
EMPTY = 3


def passes(layer: MoE, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """Everything that one training pass of the layer gives."""
    x = x.clone().requires_grad_()
    y = layer(x)
    (y * dy).sum().add(layer.aux_loss).backward()
    return {"y": y.detach(), "aux_loss": layer.aux_loss.detach(), "dx": x.grad, "load": layer.tokens_per_expert,
            **{name: p.grad for name, p in layer.named_parameters()}}


def layers_without(expert: int) -> tuple[MoE, MoE]:
    """The engine's layer and the unfused one of the same weights, with a router that never takes `expert` for positive x."""
    pair = MoE(CONFIG), GroupedMoE(CONFIG)
    for layer in pair:
        layer.router.weight.data[expert] = -1.0
    return pair


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_it_is_the_engines_layer(device):
    x, dy = torch.rand(3, 20, 32), torch.randn(3, 20, 32)
    if device == "cuda":
        poison = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(8)]         # what an unwritten gradient would show
        del poison
    engine, grouped = ({name: value.cpu() for name, value in passes(layer.to(device, torch.bfloat16 if device == "cuda" else None),
                                                                    *(t.to(device, torch.bfloat16 if device == "cuda" else None) for t in (x, dy))).items()}
                       for layer in layers_without(EMPTY))
    assert torch.equal(engine["load"].long(), grouped["load"].long()) and engine["load"][EMPTY] == 0
    for name, value in engine.items():
        error = (grouped[name].double() - value.double()).norm()
        assert error <= (2e-2 if device == "cuda" else 1e-5) * value.double().norm(), name
    assert (grouped["w_gate_up"][EMPTY] == 0).all() and (grouped["w_down"][EMPTY] == 0).all()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_under_autocast_it_computes_in_bf16(device):
    """As the trainer runs it: fp32 weights and tokens, products in bf16, gradients in fp32."""
    x, dy = torch.rand(3, 20, 32, device=device), torch.randn(3, 20, 32, device=device)
    with torch.autocast(device, torch.bfloat16):
        engine, grouped = (passes(layer.to(device), x, dy) for layer in layers_without(EMPTY))
    for name, value in engine.items():
        assert grouped[name].dtype == value.dtype or name == "load"
        if name not in ("load", "router.weight"):                # a token's two routes may be nearly equal: its gradient differs by more than rounding
            assert (grouped[name].double() - value.double()).norm() <= 2e-2 * value.double().norm(), name


def test_without_the_extra_rows_an_empty_expert_has_no_row_to_be_written_by(monkeypatch):
    """The test above can fail: the products of the plain baseline see a group of length 0, those of the training layer do not."""
    seen: list[torch.Tensor] = []
    real = torch._grouped_mm
    monkeypatch.setattr(torch, "_grouped_mm", lambda a, b, offs: seen.append(offs) or real(a, b, offs=offs))
    x, weights = torch.randn(6, 32), torch.rand(6, 2)
    ids = torch.tensor([[0, 1], [1, 2], [4, 0], [0, 2], [1, 4], [2, 4]])
    arguments = (x, ids, weights, torch.randn(5, 48, 32), torch.randn(5, 32, 24))
    plain = unfused_moe(*arguments)
    with_rows, counts = unfused_moe_with_counts(*arguments)
    torch.testing.assert_close(with_rows, plain, rtol=1e-4, atol=1e-3)
    assert counts.tolist() == [3, 3, 3, 0, 3] and counts.dtype == torch.int32
    lengths = [offs.diff(prepend=offs.new_zeros(1)).tolist() for offs in seen]
    assert lengths == [[3, 3, 3, 0, 3]] * 2 + [[4, 4, 4, 1, 4]] * 2


@pytest.mark.parametrize("changes", [{"shared_intermediate_sizes": (8,)}, {"expert_bias": True}, {"activation": "geglu"}, {"swiglu_limit": 5.0}])
def test_what_it_does_not_compute_is_refused(changes):
    layer = GroupedMoE(MoEConfig(**{**vars(CONFIG), **changes}))
    with pytest.raises(NotImplementedError, match="plain SwiGLU"):
        layer(torch.randn(4, 32))
