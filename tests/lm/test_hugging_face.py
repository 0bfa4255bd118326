"""Export and import: the same weights to the bit under other names, sizes that must fit, and the architecture that the names promise."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from mok.lm.hugging_face import CONFIG_FILE, TENSOR_FILE, from_hugging_face, read_folder, to_hugging_face, write_folder
from mok.lm.model import CONFIGS, LanguageModel

CONFIG = CONFIGS["tiny"]


@pytest.fixture
def folder(tmp_path) -> Path:
    write_folder(LanguageModel(CONFIG, seed=3), tmp_path / "exported")
    return tmp_path / "exported"


def test_the_round_trip_is_exact(folder):
    name, tensors = read_folder(folder)
    assert name == "tiny"
    original, back = LanguageModel(CONFIG, seed=3), LanguageModel(CONFIG, seed=4)
    from_hugging_face(back, tensors)
    for key, tensor in original.state_dict().items():
        assert torch.equal(back.state_dict()[key].view(torch.int32), tensor.view(torch.int32)), key
    write_folder(back, folder.with_name("again"))
    assert (folder.with_name("again") / TENSOR_FILE).read_bytes() == (folder / TENSOR_FILE).read_bytes()


def test_names_and_shapes_of_the_fused_layout(folder):
    H, I, E, kv = 32, 24, 4, 2 * 8
    expected = {"model.embed_tokens.weight": (256, H), "model.norm.weight": (H,), "lm_head.weight": (256, H)}
    for i in range(2):
        layer = {"input_layernorm.weight": (H,), "post_attention_layernorm.weight": (H,), "self_attn.q_proj.weight": (H, H), "self_attn.k_proj.weight": (kv, H),
                 "self_attn.v_proj.weight": (kv, H), "self_attn.o_proj.weight": (H, H), "mlp.gate.weight": (E, H),
                 "mlp.experts.gate_up_proj": (E, 2 * I, H), "mlp.experts.down_proj": (E, H, I)}
        expected |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    stored = load_file(folder / TENSOR_FILE)
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == expected
    assert all(tensor.dtype == torch.float32 for tensor in stored.values())
    assert json.loads((folder / CONFIG_FILE).read_text())["architectures"] == ["MixtralForCausalLM"]
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG_FILE, TENSOR_FILE]


def mixtral_logits(tensors: dict, config: dict, tokens: torch.Tensor) -> torch.Tensor:
    """Mixtral from its description (arXiv:2401.04088; Llama's attention), one sequence, in float64: an oracle that knows only the exported folder."""
    t = {name: tensor.double() for name, tensor in tensors.items()}
    heads, kv_heads, D, K = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "num_experts_per_tok"))
    S = tokens.shape[0]

    def norm(x, weight):
        return weight * x / (x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt()

    angle = torch.outer(torch.arange(S).double(), config["rope_parameters"]["rope_theta"] ** (-torch.arange(0, D, 2).double() / D)).repeat(1, 2)

    def rotate(x):                                               # (heads, S, D)
        return x * angle.cos() + torch.cat([-x[..., D // 2:], x[..., :D // 2]], -1) * angle.sin()

    x = t["model.embed_tokens.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        h = norm(x, t[p + "input_layernorm.weight"])
        q, k, v = (F.linear(h, t[p + f"self_attn.{name}_proj.weight"]).view(S, -1, D).transpose(0, 1) for name in "qkv")
        k, v = (rotate(k).repeat_interleave(heads // kv_heads, 0), v.repeat_interleave(heads // kv_heads, 0))
        scores = (rotate(q) @ k.transpose(1, 2) / D**0.5).masked_fill(torch.ones(S, S).triu(1).bool(), -torch.inf)
        x = x + F.linear((scores.softmax(-1) @ v).transpose(0, 1).reshape(S, -1), t[p + "self_attn.o_proj.weight"])
        h = norm(x, t[p + "post_attention_layernorm.weight"])
        best, ids = F.linear(h, t[p + "mlp.gate.weight"]).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for s in range(S):
            for weight, e in zip(best[s] / best[s].sum(), ids[s].tolist()):
                gate, up = (t[p + "mlp.experts.gate_up_proj"][e] @ h[s]).chunk(2)
                out[s] += weight * (t[p + "mlp.experts.down_proj"][e] @ (F.silu(gate) * up))
        x = x + out
    return F.linear(norm(x, t["model.norm.weight"]), t["lm_head.weight"])


def test_the_exported_folder_is_a_mixtral(folder):
    """transformers 5.24 loads it without a missing or surplus tensor; here its mathematics is written out, so that the suite does not need it."""
    tokens = torch.randint(0, 256, (32,))
    theirs = mixtral_logits(load_file(folder / TENSOR_FILE), json.loads((folder / CONFIG_FILE).read_text()), tokens)
    with torch.no_grad():
        ours = LanguageModel(CONFIG, seed=3)(tokens.unsqueeze(0))[0]
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=2e-6)


def change_config(folder: Path, **changes) -> None:
    config = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps({**config, **changes}))


def test_a_folder_that_does_not_fit_is_refused_with_both_quantities(folder):
    change_config(folder, num_local_experts=6)
    with pytest.raises(ValueError, match=r"must have the sizes of a configuration.*tiny: num_local_experts=6 \(ours 4\)"):
        read_folder(folder)
    (folder / TENSOR_FILE).unlink()
    change_config(folder, num_local_experts=4)
    with pytest.raises(ValueError, match=r"must hold \*\.safetensors, found 0 files"):
        read_folder(folder)
    (folder / CONFIG_FILE).write_text("[]")
    with pytest.raises(ValueError, match="not a JSON object"):
        read_folder(folder)


@pytest.mark.parametrize(("damage", "words"), [
    (lambda t: t.pop("model.layers.1.mlp.experts.down_proj"), "20 found, the model has 21: missing ['model.layers.1.mlp.experts.down_proj'], surplus []"),
    (lambda t: t.update(extra=torch.zeros(1)), "missing [], surplus ['extra']"),
    (lambda t: t.update({"lm_head.weight": t["lm_head.weight"].bfloat16()}), "lm_head.weight is torch.bfloat16 [256, 32] and must be torch.float32 [256, 32]"),
    (lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:9].clone()}), "lm_head.weight is torch.float32 [9, 32] and must be"),
])
def test_tensors_that_do_not_fit_change_nothing(folder, damage, words):
    tensors = load_file(folder / TENSOR_FILE)
    damage(tensors)
    save_file(tensors, folder / TENSOR_FILE)
    model, before = LanguageModel(CONFIG, seed=4), LanguageModel(CONFIG, seed=4).state_dict()
    with pytest.raises(ValueError) as error:
        from_hugging_face(model, read_folder(folder)[1])
    assert words in str(error.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_nothing_is_overwritten(folder):
    before = (folder / TENSOR_FILE).read_bytes()
    with pytest.raises(ValueError, match="exists and is not overwritten"):
        write_folder(LanguageModel(CONFIG, seed=5), folder)
    assert (folder / TENSOR_FILE).read_bytes() == before


def test_what_mixtral_has_not_is_refused():
    from dataclasses import replace

    with pytest.raises(NotImplementedError, match=r"shared_intermediate_sizes=\(16,\)"):
        to_hugging_face(LanguageModel(replace(CONFIG, shared_intermediate_sizes=(16,))))
