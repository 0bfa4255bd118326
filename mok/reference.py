"""The specification: the layer's mathematics in plain PyTorch, on any device, float64-capable; shares no code with the engines.

Nothing is fused, rounded or reordered here: every operation runs in the dtype of its inputs and autograd differentiates it. Tests feed it
float64 copies and call the result the truth.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def act_reference(g: Tensor, u: Tensor, activation: str, swiglu_limit: float | None = None) -> Tensor:
    """h = act(g, u), elementwise; g, u (..., I).

    swiglu      silu(g) * u (Shazeer 2020, "GLU Variants Improve Transformer"); with a limit L, g is clamped to at most L, u to [-L, L]
    swiglu_oai  (u + 1) * g * sigmoid(1.702 g) after the same clamp, L = 7 unless given (gpt-oss)
    geglu       gelu(g) * u with the exact erf
    reglu       relu(g) * u
    """
    if activation == "swiglu_oai" and swiglu_limit is None:
        swiglu_limit = 7.0
    if swiglu_limit is not None:
        g = g.clamp(max=swiglu_limit)
        u = u.clamp(min=-swiglu_limit, max=swiglu_limit)
    if activation == "swiglu":
        return g * torch.sigmoid(g) * u
    if activation == "swiglu_oai":
        return (u + 1) * g * torch.sigmoid(1.702 * g)
    if activation == "geglu":
        return 0.5 * g * (1 + torch.erf(g * 2**-0.5)) * u
    if activation == "reglu":
        return torch.relu(g) * u
    raise ValueError(f"{activation=} is unknown")


def expert_reference(x: Tensor, w_gate_up: Tensor, w_down: Tensor, b_gate_up: Tensor | None, b_down: Tensor | None,
                     activation: str, swiglu_limit: float | None) -> Tensor:
    """One expert on its rows: x (n, H), w_gate_up (2I, H), w_down (H, I), biases (2I,), (H,) or None -> (n, H)."""
    z = x @ w_gate_up.T
    if b_gate_up is not None:
        z = z + b_gate_up
    width = z.shape[-1] // 2
    y = act_reference(z[:, :width], z[:, width:], activation, swiglu_limit) @ w_down.T
    return y if b_down is None else y + b_down


def moe_reference(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor, b_gate_up: Tensor | None = None,
                  b_down: Tensor | None = None, shared: Sequence[tuple[Tensor, Tensor, Tensor | None]] = (), activation: str = "swiglu",
                  swiglu_limit: float | None = None) -> Tensor:
    """out[t] = sum over k of topk_weights[t,k] * expert[topk_ids[t,k]](x[t]) + sum over shared experts.

    x (T, H); topk_ids (T, K) int, -1 = no expert (contributes exactly nothing, its weight gets gradient 0); topk_weights (T, K);
    w_gate_up (E, 2I, H), rows 0..I-1 gate and I..2I-1 up; w_down (E, H, I); biases (E, 2I), (E, H) or None;
    shared: (w_gate_up (2I_s, H), w_down (H, I_s), gate_weight (H,) or None) each. Returns (T, H) in x's dtype, differentiable.

    A valid expert with weight 0 is multiplied, not skipped: NaN or Inf in its result reaches out[t], as in any dense computation.
    """
    out = torch.zeros_like(x)
    for e in range(w_gate_up.shape[0]):
        t, k = torch.nonzero(topk_ids == e, as_tuple=True)
        rows = expert_reference(x[t], w_gate_up[e], w_down[e], None if b_gate_up is None else b_gate_up[e],
                                None if b_down is None else b_down[e], activation, swiglu_limit)
        out = out.index_add(0, t, topk_weights[t, k].unsqueeze(-1).to(x.dtype) * rows)
    for s_gate_up, s_down, gate_weight in shared:
        rows = expert_reference(x, s_gate_up, s_down, None, None, activation, swiglu_limit)
        out = out + (rows if gate_weight is None else torch.sigmoid(x @ gate_weight).unsqueeze(-1) * rows)
    return out
