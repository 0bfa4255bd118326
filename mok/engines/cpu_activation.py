"""Gated activations and their derivatives on whole contiguous row tiles, where an element's bits do not depend on its place.

    h = a(g') * v,   g' = g clamped above, u' = u clamped both ways (only with a limit), v = u' (swiglu_oai: u' + 1)
    swiglu a = g' s, s = sigmoid(g') | swiglu_oai s = sigmoid(1.702 g') | geglu a = g' Phi(g') | reglu a = max(g', 0)

Vectorised library functions (sigmoid, erf, exp) end a tensor with scalar code whose last bit differs. A tile here has a multiple of 32
rows, or is one row, so every element of a given column is always computed by the same code. Everything else is single IEEE operations.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import SWIGLU_OAI_ALPHA, SWIGLU_OAI_LIMIT
from ..runtime import Scratch
from .cpu_tiles import Probe


@dataclass(frozen=True)
class Activation:
    """name: one of config.ACTIVATIONS; limit: the clamp, or None."""

    name: str
    limit: float | None

    @staticmethod
    def of(name: str, swiglu_limit: float | None) -> Activation:
        return Activation(name, SWIGLU_OAI_LIMIT if name == "swiglu_oai" and swiglu_limit is None else swiglu_limit)

    def forward(self, scratch: Scratch, g: Tensor, u: Tensor) -> Tensor:
        """h (m, I) in the accumulation dtype, in scratch; g, u (m, I) contiguous, overwritten."""
        self._clamp(g, u)
        slope = scratch.like("act.slope", g)
        self._slope(g, slope)
        return self._gate(g, slope, slope).mul_(self._value(u))

    def backward(self, scratch: Scratch, g: Tensor, u: Tensor, dh: Tensor) -> Tensor:
        """h as `forward` gives it, bit for bit, in scratch; g and u are replaced by their gradients for the gradient dh of h.

        g, u, dh (m, I) contiguous. At a clamp's boundary the gradient passes, beyond it is 0 (whatever dh is).
        """
        masks = None
        if self.limit is not None:
            masks = g.le(self.limit).logical_not_(), u.abs().le(self.limit).logical_not_()
        self._clamp(g, u)
        slope = scratch.like("act.slope", g)
        self._slope(g, slope)
        gate = self._gate(g, slope, scratch.like("act.gate", g))
        value = self._value(u)
        h = torch.mul(gate, value, out=scratch.like("act.h", g))
        value.mul_(dh)                                      # v dh
        self._gate_derivative(scratch, g, slope, gate)      # slope becomes a'(g')
        torch.mul(value, slope, out=g)
        torch.mul(gate, dh, out=u)
        if masks is not None:
            g.masked_fill_(masks[0], 0)
            u.masked_fill_(masks[1], 0)
        return h

    def probe(self, width: int, dtype: torch.dtype) -> Probe:
        """What `tile_sizes` tries: h and both gradients of random rows of `width` columns each."""
        def run(scratch: Scratch, rows: Tensor) -> Tensor:
            g, u, dh = (scratch.get(f"probe.{name}", rows.shape[0], width, dtype).copy_(rows[:, i * width:(i + 1) * width]) for i, name in enumerate("gud"))
            h = self.backward(scratch, g, u, dh)
            return torch.cat([h, g, u, dh], 1)

        return Probe(("activation", self.name, self.limit, width), 3 * width, dtype, run)

    def _clamp(self, g: Tensor, u: Tensor) -> None:
        if self.limit is not None:
            g.clamp_(max=self.limit)
            u.clamp_(min=-self.limit, max=self.limit)

    def _value(self, u: Tensor) -> Tensor:
        return u.add_(1) if self.name == "swiglu_oai" else u

    def _slope(self, g: Tensor, out: Tensor) -> None:
        """out = a(g) / g where that is a function (sigmoid, Phi)."""
        if self.name == "swiglu":
            torch.sigmoid(g, out=out)
        elif self.name == "swiglu_oai":
            torch.sigmoid(torch.mul(g, SWIGLU_OAI_ALPHA, out=out), out=out)
        elif self.name == "geglu":
            torch.erf(torch.mul(g, math.sqrt(0.5), out=out), out=out)
            out.add_(1).mul_(0.5)

    def _gate(self, g: Tensor, slope: Tensor, out: Tensor) -> Tensor:
        return torch.clamp(g, min=0, out=out) if self.name == "reglu" else torch.mul(g, slope, out=out)

    def _gate_derivative(self, scratch: Scratch, g: Tensor, slope: Tensor, gate: Tensor) -> None:
        """slope = a'(g), given slope and gate = a(g)."""
        if self.name == "reglu":
            slope.fill_(1).masked_fill_(g.le(0), 0)
            return
        part = scratch.like("act.part", g)
        if self.name == "geglu":                            # Phi + g phi
            torch.mul(g, g, out=part).mul_(-0.5).exp_().mul_(1 / math.sqrt(2 * math.pi)).mul_(g)
        else:                                               # s + alpha a (1 - s)
            torch.neg(slope, out=part).add_(1).mul_(gate)
            if self.name == "swiglu_oai":
                part.mul_(SWIGLU_OAI_ALPHA)
        slope.add_(part)
