"""The specification itself: gradcheck guards its derivatives, and numbers worked out by hand guard its values."""
from __future__ import annotations

import math

import pytest
import torch

from mok.reference import act_reference, moe_reference

ACTIVATIONS = [("swiglu", None), ("swiglu", 0.8), ("swiglu_oai", None), ("swiglu_oai", 0.8), ("geglu", None), ("reglu", None)]


def _case(T=5, H=4, I=3, E=3, K=2, seed=0, biases=True, shared=True):
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_()

    ids = torch.randint(-1, E, (T, K), generator=g)
    ids[0] = 1                                             # the same expert twice
    ids[1] = -1                                            # a token without experts
    ids[ids == 2] = 0                                      # expert 2 stays empty
    tensors = [randn(T, H), randn(T, K), randn(E, 2 * I, H), randn(E, H, I)]
    tensors += [randn(E, 2 * I), randn(E, H)] if biases else [None, None]
    tensors += [randn(2 * 2, H), randn(H, 2), randn(H)] if shared else []
    return ids, tensors


def _run(ids, activation, limit, x, w, w13, w2, b13, b2, *shared):
    pairs = [(shared[0], shared[1], shared[2]), (shared[0], shared[1], None)] if shared else []
    return moe_reference(x, ids, w, w13, w2, b13, b2, pairs, activation, limit)


@pytest.mark.parametrize(("activation", "limit"), ACTIVATIONS)
def test_gradcheck(activation, limit):
    ids, tensors = _case()
    assert torch.autograd.gradcheck(lambda *t: _run(ids, activation, limit, *t), tensors)


def test_gradgradcheck_without_optional_parts():
    ids, tensors = _case(biases=False, shared=False)
    live = tensors[:4]
    assert torch.autograd.gradgradcheck(lambda *t: _run(ids, "swiglu", None, *t, None, None), live)


def _sigmoid(v):
    return 1 / (1 + math.exp(-v))


@pytest.mark.parametrize(("activation", "limit", "by_hand"), [
    ("swiglu", None, lambda g, u: g * _sigmoid(g) * u),
    ("swiglu", 1.0, lambda g, u: min(g, 1) * _sigmoid(min(g, 1)) * max(-1, min(u, 1))),
    ("swiglu_oai", None, lambda g, u: (max(-7, min(u, 7)) + 1) * min(g, 7) * _sigmoid(1.702 * min(g, 7))),
    ("geglu", None, lambda g, u: g * 0.5 * (1 + math.erf(g / math.sqrt(2))) * u),
    ("reglu", None, lambda g, u: max(g, 0) * u),
])
def test_activations_by_hand(activation, limit, by_hand):
    points = [-9.0, -1.5, -0.2, 0.0, 0.7, 2.0, 8.5]
    for g in points:
        for u in points:
            got = act_reference(torch.tensor(g, dtype=torch.float64), torch.tensor(u, dtype=torch.float64), activation, limit).item()
            assert got == pytest.approx(by_hand(g, u), rel=1e-12, abs=1e-15)


def test_one_route_by_hand():
    """T = K = E = H = I = 1: out = w * (w2 * silu(g) * u + b2), g = w13[0] x + b13[0], u = w13[1] x + b13[1], plus a gated shared expert."""
    def one(v):
        return torch.tensor(v, dtype=torch.float64)

    out = moe_reference(one([[2.0]]), torch.tensor([[0]]), one([[0.5]]), one([[[1.5], [-1.0]]]), one([[[3.0]]]), one([[0.25, 0.5]]), one([[-2.0]]),
                        [(one([[1.0], [2.0]]), one([[0.5]]), one([0.3]))])
    g, u = 1.5 * 2 + 0.25, -1.0 * 2 + 0.5
    routed = 0.5 * (3.0 * g * _sigmoid(g) * u - 2.0)
    shared = _sigmoid(0.3 * 2) * 0.5 * (2 * _sigmoid(2) * 4)
    assert out.item() == pytest.approx(routed + shared, rel=1e-14)


def test_minus_one_route_contributes_exactly_nothing_even_next_to_infinite_experts():
    ids, (x, w, w13, w2, b13, b2, *_) = _case(shared=False)
    w13.data[2] = math.inf                                  # nobody is routed to expert 2
    out = moe_reference(x, ids, w, w13, w2, b13, b2)
    assert torch.isfinite(out).all() and (out[1] == 0).all()
    out.sum().backward()
    assert (w.grad[ids == -1] == 0).all() and (x.grad[1] == 0).all() and (w13.grad[2] == 0).all() and (w2.grad[2] == 0).all()


def test_the_same_expert_twice_counts_twice():
    _, (x, _, w13, w2, b13, b2, *_) = _case(shared=False)
    twice = moe_reference(x, torch.ones(5, 2, dtype=torch.long), torch.tensor([[0.25, 0.5]], dtype=torch.float64).expand(5, 2), w13, w2, b13, b2)
    once = moe_reference(x, torch.ones(5, 1, dtype=torch.long), torch.full((5, 1), 0.75, dtype=torch.float64), w13, w2, b13, b2)
    torch.testing.assert_close(twice, once, rtol=1e-13, atol=0)
