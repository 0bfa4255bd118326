"""A small mixture-of-experts transformer language model: RMSNorm, RoPE, grouped-query attention, and `mok.MoE` as its feed-forward."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import MoEConfig
from ..layer import MoE
from .data import VOCAB_SIZE
from .grouped_moe import GroupedMoE
from .linear import Linear, linear
from .reference_moe import ReferenceMoE

if TYPE_CHECKING:
    from ..group import ExpertGroup

MOE_IMPLS: dict[str, type[MoE]] = {"engine": MoE, "reference": ReferenceMoE, "grouped_mm": GroupedMoE}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model. hidden_size = H, intermediate_size = I of one expert, seq_len = the longest context in bytes.

    head_size: width of one attention head; None = hidden_size / num_heads.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    num_experts: int
    top_k: int
    seq_len: int
    shared_intermediate_sizes: tuple[int, ...] = ()
    tie_embeddings: bool = False
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    head_size: int | None = None

    def __post_init__(self) -> None:
        if self.head_size is not None and (self.head_size < 2 or self.head_size % 2):
            raise ValueError(f"head_size={self.head_size} must be a positive even number")
        if self.head_size is None and self.hidden_size % (2 * self.num_heads):
            raise ValueError(f"hidden_size={self.hidden_size} must be an even multiple of num_heads={self.num_heads}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads if self.head_size is None else self.head_size

    def moe(self, layer_index: int, seed: int) -> MoEConfig:
        """Settings of the MoE layer number `layer_index`."""
        return MoEConfig(hidden_size=self.hidden_size, intermediate_size=self.intermediate_size, num_experts=self.num_experts, top_k=self.top_k,
                         shared_intermediate_sizes=self.shared_intermediate_sizes, seed=seed, layer_index=layer_index)


CONFIGS = {
    "tiny": ModelConfig(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=24, num_experts=4, top_k=2, seq_len=32),
    "small": ModelConfig(hidden_size=256, num_layers=4, num_heads=4, num_kv_heads=2, intermediate_size=256, num_experts=8, top_k=2, seq_len=256),
    "1b": ModelConfig(hidden_size=1024, num_layers=20, num_heads=16, num_kv_heads=4, intermediate_size=512, num_experts=32, top_k=4, seq_len=1024),
    # layers of the sizes of Qwen3-30B-A3B (without its norms of q and k), as many as fit on one GPU of 141 GB with fp32 weights and AdamW's moments
    "qwen3-30b-a3b-6l": ModelConfig(hidden_size=2048, num_layers=6, num_heads=32, num_kv_heads=4, head_size=128, intermediate_size=768, num_experts=128,
                                    top_k=8, seq_len=4096, rope_theta=1e6),
}


def config_by_name(name: str) -> ModelConfig:
    """The configuration called `name`; ValueError naming `config` for an unknown one."""
    if name not in CONFIGS:
        raise ValueError(f"config={name!r} must be one of {', '.join(CONFIGS)}")
    return CONFIGS[name]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32 (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, device=device))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:                # one kernel a pass instead of five
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight


def rope_tables(seq_len: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i/head_dim), each (seq_len, head_dim/2) fp32 (Su et al. 2021, "RoFormer")."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.arange(seq_len, dtype=torch.float64).unsqueeze(1) * frequency
    return angle.cos().float(), angle.sin().float()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x[i], x[i + head_dim/2]) by their position's angle: x (B, heads, S, head_dim), tables (S, head_dim/2)."""
    if x.is_cuda and _has_triton():
        from .rope_kernel import rotate

        return rotate(x, cos, sin)
    half = x.shape[-1] // 2
    a, b = x[..., :half].float(), x[..., half:].float()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return find_spec("triton") is not None


class Attention(nn.Module):
    """Causal grouped-query attention: num_heads query heads share num_kv_heads key and value heads. x (B, S, H) -> (B, S, H)."""

    def __init__(self, config: ModelConfig, generator: torch.Generator) -> None:
        super().__init__()
        H, width, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.config = config
        self.qkv = Linear(H, width + 2 * kv, H**-0.5, generator)
        self.out = Linear(width, H, (2 * config.num_layers * width) ** -0.5, generator)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, S, _ = x.shape
        heads, kv_heads, head_dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        qkv = self.qkv(x).view(B, S, heads + 2 * kv_heads, head_dim).transpose(1, 2)
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
        q, k = apply_rope(q, cos[:S], sin[:S]), apply_rope(k, cos[:S], sin[:S])
        # a rank may have no sequence: flash attention refuses that
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) if B else q
        return self.out(y.transpose(1, 2).reshape(B, S, heads * head_dim))


class Block(nn.Module):
    """x + attention(norm(x)), then x + moe(norm(x))."""

    def __init__(self, config: ModelConfig, moe: MoE, generator: torch.Generator) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config, generator)
        self.moe_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.moe = moe

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.moe(self.moe_norm(x))


class LanguageModel(nn.Module):
    """Next-byte prediction: tokens (B, S) int64 in 0..255 -> logits (B, S, 256). Weights are fp32 and depend on (config, seed) alone.

    S at most config.seq_len (ValueError beyond). moe_impl: "engine" = `mok.MoE`, "reference" = the same layer computed by `mok.reference`,
    "grouped_mm" = by `mok.unfused`, plain PyTorch at its best.
    group: the ranks that share the experts, each computing sequences of its own, any number of them; the rest of the model is on all of them.
    moe_device: where the MoE layers' parameters are made; "meta" leaves them without memory or values, for a caller that gives both.
    """

    def __init__(self, config: ModelConfig, seed: int = 0, moe_impl: str = "engine", group: ExpertGroup | None = None,
                 moe_device: torch.device | str | None = None) -> None:
        super().__init__()
        if moe_impl not in MOE_IMPLS:
            raise ValueError(f"moe_impl={moe_impl!r} must be one of {', '.join(MOE_IMPLS)}")
        layer = MOE_IMPLS[moe_impl]
        self.config = config
        generator = torch.Generator().manual_seed(seed)
        self.embedding = nn.Parameter(torch.randn(VOCAB_SIZE, config.hidden_size, generator=generator))
        self.moe_layers = [layer(config.moe(i, seed), group, moe_device) for i in range(config.num_layers)]     # a plain list: registered once, in the blocks
        self.blocks = nn.ModuleList(Block(config, moe, generator) for moe in self.moe_layers)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = None if config.tie_embeddings else Linear(config.hidden_size, VOCAB_SIZE, 0.1 * config.hidden_size**-0.5, generator)
        cos, sin = rope_tables(config.seq_len, config.head_dim, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[-1] > self.config.seq_len:
            raise ValueError(f"tokens has {tokens.shape[-1]} positions and must have at most seq_len={self.config.seq_len}")
        x = F.embedding(tokens, self.embedding)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        x = self.norm(x)
        # tied: x still holds its token's own embedding, of squared norm H, so that anything larger starts sure that bytes repeat
        return linear(x, self.embedding / self.config.hidden_size) if self.head is None else self.head(x)


def sequence_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log likelihood of each sequence's targets, summed over its positions: (B, S, V), (B, S) -> (B,) fp32, nats."""
    B, S = targets.shape
    return F.cross_entropy(logits.float().view(B * S, logits.shape[-1]), targets.reshape(-1), reduction="none").view(B, S).sum(1)


@torch.no_grad()
def generate(model: LanguageModel, prompt: bytes, num_bytes: int, seed: int = 0, temperature: float = 0.8,
             on_byte: Callable[[], None] = lambda: None) -> bytes:
    """num_bytes bytes sampled after `prompt` (at least one byte): the model sees the last seq_len of them. The same seed, the same bytes.

    on_byte is called after each of them.
    """
    if not prompt:
        raise ValueError(f"{prompt=} must hold at least one byte")
    generator = torch.Generator().manual_seed(seed)
    text = bytearray(prompt)
    for _ in range(num_bytes):
        tokens = torch.tensor(list(text[-model.config.seq_len:]), device=model.embedding.device).unsqueeze(0)
        logits = model(tokens)[0, -1].float().cpu()
        text.append(int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)))
        on_byte()
    return bytes(text[len(prompt):])
