"""The model as Hugging Face's Mixtral keeps it: the same tensors to the bit, all experts of a layer in one, under its names. docs/checkpoints.md lists them."""
from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..arguments import check_path
from .checkpoint import write_atomically
from .data import VOCAB_SIZE
from .model import CONFIGS, LanguageModel, ModelConfig

CONFIG_FILE = "config.json"
TENSOR_FILE = "model.safetensors"
# One layer's names, ours behind "blocks.N." -> theirs behind "model.layers.N."; qkv becomes three and is not among them.
_LAYER = {
    "attention_norm.weight": "input_layernorm.weight", "attention.out.weight": "self_attn.o_proj.weight", "moe_norm.weight": "post_attention_layernorm.weight",
    "moe.router.weight": "mlp.gate.weight", "moe.w_gate_up": "mlp.experts.gate_up_proj", "moe.w_down": "mlp.experts.down_proj",
}
_QKV = "attention.qkv.weight"
_PROJECTIONS = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
_MODEL = {"embedding": "model.embed_tokens.weight", "norm.weight": "model.norm.weight", "head.weight": "lm_head.weight"}


def to_hugging_face(model: LanguageModel) -> dict[str, Tensor]:
    """The model's tensors, fp32, under Mixtral's names. NotImplementedError for a configuration that Mixtral has not."""
    _check(model.config)
    ours, theirs = {name: tensor.detach() for name, tensor in model.state_dict().items()}, {}
    for name, other in _MODEL.items():
        theirs[other] = ours.pop(name)
    for i in range(model.config.num_layers):
        for name, other in _LAYER.items():
            theirs[f"model.layers.{i}.{other}"] = ours.pop(f"blocks.{i}.{name}")
        parts = ours.pop(f"blocks.{i}.{_QKV}").split(_qkv_rows(model.config))
        theirs.update({f"model.layers.{i}.{other}": part for other, part in zip(_PROJECTIONS, parts, strict=True)})
    if ours:
        raise NotImplementedError(f"tensors that Mixtral has no name for: {', '.join(sorted(ours))}")
    return {name: tensor.contiguous() for name, tensor in theirs.items()}


def from_hugging_face(model: LanguageModel, theirs: dict[str, Tensor]) -> None:
    """Fill the model with tensors under Mixtral's names. ValueError naming `tensors` for missing or surplus ones, another shape or dtype; the model is
    then as it was."""
    expected = to_hugging_face(model)
    if expected.keys() != theirs.keys():
        raise ValueError(f"tensors: {len(theirs)} found, the model has {len(expected)}: missing {sorted(expected.keys() - theirs.keys())[:3]}, "
                         f"surplus {sorted(theirs.keys() - expected.keys())[:3]}")
    for name, tensor in expected.items():
        if theirs[name].shape != tensor.shape or theirs[name].dtype != tensor.dtype:
            raise ValueError(f"tensors: {name} is {theirs[name].dtype} {list(theirs[name].shape)} and must be {tensor.dtype} {list(tensor.shape)}")
    ours = model.state_dict()
    with torch.no_grad():
        for name, other in _MODEL.items():
            ours[name].copy_(theirs[other])
        for i in range(model.config.num_layers):
            for name, other in _LAYER.items():
                ours[f"blocks.{i}.{name}"].copy_(theirs[f"model.layers.{i}.{other}"])
            ours[f"blocks.{i}.{_QKV}"].copy_(torch.cat([theirs[f"model.layers.{i}.{other}"] for other in _PROJECTIONS]))


def write_folder(model: LanguageModel, folder: Path) -> None:
    """Write config.json and model.safetensors to `folder`, which must not exist (ValueError naming `out`); it appears complete or not at all."""
    tensors = to_hugging_face(model)
    check_path("out", folder)
    if folder.exists():
        raise ValueError(f"out={str(folder)!r} exists and is not overwritten; name a new folder")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        save_file(tensors, partial / TENSOR_FILE, metadata={"format": "pt"})
        write_atomically(partial / CONFIG_FILE, json.dumps(_their_config(model.config), indent=1) + "\n")
        os.replace(partial, folder)
    except OSError as error:
        raise ValueError(f"out={str(folder)!r} cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_folder(folder: Path) -> tuple[str, dict[str, Tensor]]:
    """(name of our configuration of these sizes, tensors under Mixtral's names) of a folder in this layout, in one file or several.

    ValueError naming `folder` where something is missing or damaged, or no configuration has its sizes.
    """
    check_path("folder", folder)
    try:
        theirs = json.loads((folder / CONFIG_FILE).read_text())
        if not isinstance(theirs, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError) as error:
        raise ValueError(f"folder={str(folder)!r} must hold a model with its {CONFIG_FILE}: {error}") from None
    name = _our_config(folder, theirs)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"folder={str(folder)!r} must hold *.safetensors, found 0 files")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                tensors.update({key: opened.get_tensor(key) for key in opened.keys()})  # noqa: SIM118  (safe_open is no mapping)
        except SafetensorError as error:
            raise ValueError(f"folder={str(folder)!r} is corrupt: {file.name}: {error}") from None
    return name, tensors


def _check(config: ModelConfig) -> None:
    if config.tie_embeddings or config.shared_intermediate_sizes:
        raise NotImplementedError(f"Mixtral has no tied embedding of this scale and no shared experts: tie_embeddings={config.tie_embeddings}, "
                                  f"shared_intermediate_sizes={config.shared_intermediate_sizes}")


def _qkv_rows(config: ModelConfig) -> list[int]:
    """Rows of q, k and v in our one projection."""
    kv = config.num_kv_heads * config.head_dim
    return [config.num_heads * config.head_dim, kv, kv]


def _their_config(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "dtype": "float32", "vocab_size": VOCAB_SIZE, **_their_sizes(config),
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta}, "hidden_act": "silu", "sliding_window": None,
        "attention_dropout": 0.0, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }


def _their_sizes(config: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim,
        "num_local_experts": config.num_experts, "num_experts_per_tok": config.top_k, "max_position_embeddings": config.seq_len,
        "rms_norm_eps": config.norm_eps, "rope_theta": config.rope_theta,
    }


def _our_config(folder: Path, theirs: dict[str, Any]) -> str:
    """The first of our configurations that has their sizes."""
    unlike: list[str] = []
    for name, config in CONFIGS.items():
        sizes = _their_sizes(config)
        differing = [f"{key}={theirs.get(key)!r} (ours {value!r})" for key, value in sizes.items() if theirs.get(key) != value]
        if not differing:
            return name
        unlike.append(f"{name}: {differing[0]}")
    raise ValueError(f"folder={str(folder)!r} must have the sizes of a configuration of ours: {'; '.join(unlike)}")
