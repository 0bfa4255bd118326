"""Model FLOPs of a training step, and the product that says what a GPU could do of them at most: what model FLOP utilisation divides."""
from __future__ import annotations

import torch

from .data import VOCAB_SIZE
from .model import ModelConfig

ROOF_SIZE = 8192         # the roof is a bf16 product of three matrices of this size, as in `mok bench`
_ROOF_MS = 150.0


def active_parameters(config: ModelConfig) -> int:
    """Weights that a token is multiplied with: attention, router, its K experts, shared experts and the output layer; not the embedding's lookup."""
    H, width, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    experts = 3 * H * (config.top_k * config.intermediate_size + sum(config.shared_intermediate_sizes))
    return config.num_layers * (H * (width + 2 * kv) + width * H + config.num_experts * H + experts) + VOCAB_SIZE * H


def flops_per_token(config: ModelConfig) -> int:
    """FLOPs of forward and backward for one token of a full sequence: 6 for each active weight, and attention's two products.

    A token sees seq_len / 2 positions on average, so these are 2 * (2 * width * seq_len / 2) forward and twice that backward, in every layer.
    What an implementation recomputes, pads or does in an optimizer is not counted.
    """
    return 6 * active_parameters(config) + 6 * config.num_layers * config.num_heads * config.head_dim * config.seq_len


def measured_roof(device: torch.device) -> float:
    """TFLOP/s that a large bf16 product of random data reaches on this GPU now. Takes a fifth of a second and 400 MB."""
    from ..bench_cuda import Roof, Stopwatch

    return Roof(Stopwatch(device), ROOF_SIZE).tflops(_ROOF_MS)
