"""What a checkpoint holds of a model and its optimizer, under names that do not depend on how many ranks share the experts."""
from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..layer import MoE
from .checkpoint import load_checkpoint, read_state
from .model import LanguageModel, config_by_name

_EXPERT_TENSORS = ("w_gate_up", "w_down", "b_gate_up", "b_down")
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class State:
    """Tensors by name, views of the live ones. dense: the same on every rank. experts: those of this rank's experts, one tensor for each.

    elsewhere: the other ranks' experts, as tensors on the meta device. Names: "model.<parameter or buffer>", "optimizer.<moment>.<parameter>";
    an expert's are "model.blocks.3.moe.experts.17.w_gate_up" and "optimizer.exp_avg.blocks.3.moe.experts.17.w_gate_up", 17 its global id.
    """

    dense: dict[str, Tensor] = field(default_factory=dict)
    experts: dict[str, Tensor] = field(default_factory=dict)
    elsewhere: dict[str, Tensor] = field(default_factory=dict)

    def here(self) -> dict[str, Tensor]:
        """Everything that this rank holds."""
        return {**self.dense, **self.experts}

    def add(self, prefix: str, name: str, tensor: Tensor, layer: MoE | None) -> None:
        """One whole parameter, buffer or moment called `name`; layer: whose experts it holds along dim 0, None for a dense one."""
        tensor = tensor.detach()
        if layer is None:
            self.dense[f"{prefix}.{name}"] = tensor
            return
        owner, what = name.rsplit(".", 1)
        for expert in range(layer.config.num_experts):
            local = expert - layer.first_expert
            mine = 0 <= local < layer.num_local_experts
            full_name = f"{prefix}.{owner}.experts.{expert}.{what}"
            if mine:
                self.experts[full_name] = tensor[local]
            else:
                self.elsewhere[full_name] = torch.empty(tensor.shape[1:], dtype=tensor.dtype, device="meta")


def expert_layers(model: LanguageModel) -> dict[str, MoE]:
    """Name of every parameter that holds experts along dim 0 -> its layer."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    return {f"{name}.{tensor}": layer for name, layer in layers.items() for tensor in _EXPERT_TENSORS if getattr(layer, tensor) is not None}


def model_state(model: LanguageModel, optimizer: torch.optim.Optimizer | None = None) -> State:
    """Parameters and buffers of the model, and the moments that the optimizer keeps of each parameter."""
    layers, state = expert_layers(model), State()
    for name, tensor in model.state_dict().items():
        state.add("model", name, tensor, layers.get(name))
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            for moment in MOMENTS:
                state.add(f"optimizer.{moment}", name, optimizer.state[parameter][moment], layers.get(name))
    return state


def num_parameters(model: LanguageModel) -> int:
    """Of the whole model, all ranks' experts included."""
    layers = expert_layers(model)
    return sum(p.numel() // len(p) * layers[name].config.num_experts if name in layers else p.numel() for name, p in model.named_parameters())


def load_model(folder: Path) -> LanguageModel:
    """The whole model in a checkpoint, in this process, however many ranks wrote it. ValueError naming `checkpoint` as `load_checkpoint` does."""
    state = read_state(folder)
    try:
        config, seed = config_by_name(state["settings"]["config"]), int(state["settings"]["seed"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"checkpoint={str(folder)!r} is corrupt: its settings do not fit: {error}") from None
    model = LanguageModel(config, seed)
    saved = model_state(model)
    parameters = _parameter_names(model)
    moments = {f"optimizer.{moment}.{name}": saved.here()[f"model.{name}"].to("meta") for moment in MOMENTS for name in parameters}
    load_checkpoint(folder, saved.here(), moments)
    return model


def _parameter_names(model: LanguageModel) -> list[str]:
    """Names, without "model.", of what is a parameter and so has moments in a checkpoint."""
    layers, state = expert_layers(model), State()
    for name, parameter in model.named_parameters():
        state.add("model", name, parameter, layers.get(name))
    return [name.removeprefix("model.") for name in (*state.dense, *state.experts, *state.elsewhere)]
