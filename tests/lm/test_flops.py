"""Model FLOPs counted by hand on one small configuration, and against the weights that a model has."""
from __future__ import annotations

from mok.lm.flops import active_parameters, flops_per_token
from mok.lm.model import CONFIGS, LanguageModel, ModelConfig

SIZES = ModelConfig(hidden_size=8, num_layers=3, num_heads=4, num_kv_heads=2, head_size=6, intermediate_size=5, num_experts=7, top_k=2, seq_len=16,
                    shared_intermediate_sizes=(3,))


def test_worked_example():
    attention = 8 * (24 + 12 + 12) + 24 * 8
    experts = 2 * 3 * 8 * 5 + 3 * 8 * 3
    assert active_parameters(SIZES) == 3 * (attention + 7 * 8 + experts) + 256 * 8
    assert flops_per_token(SIZES) == 6 * active_parameters(SIZES) + 6 * 3 * 24 * 16


def test_weights_are_those_of_the_model():
    """Every matrix but the embedding, of the experts the part that one token uses."""
    config = CONFIGS["tiny"]
    sizes = {name: p.numel() for name, p in LanguageModel(config).named_parameters() if p.dim() > 1 and name != "embedding"}
    used = sum(size * config.top_k // config.num_experts if name.endswith((".w_gate_up", ".w_down")) else size for name, size in sizes.items())
    assert active_parameters(config) == used


def test_the_named_configuration_has_a_billion_parameters():
    """Of which a token uses the share that top_k of num_experts leaves."""
    config = CONFIGS["1b"]
    experts = config.num_layers * 3 * config.hidden_size * config.intermediate_size
    everything = active_parameters(config) + experts * (config.num_experts - config.top_k)
    assert 1.0e9 < everything < 1.2e9 and active_parameters(config) < everything / 4
