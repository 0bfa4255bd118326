"""Problems and checks that the backward kernel's GPU tests and runs/hopper_backward.py share."""
from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from gpu_support import gpu_case, poison
from oracle import Case, check_case, differing, named, want_all

from mok.engines.protocol import Grads, MainGrad, Saved, Wants
from mok.engines.torch_gpu import TorchGpuEngine
from mok.plan import RoutingPlan

PLAIN_SHAPES = {
    "one full tile of every kind": (128, 256, 256, 2, 1),
    "several tiles, an empty expert, -1 routes": (300, 256, 128, 8, 2),
    "smallest H and I": (33, 16, 16, 4, 2),
    "H below one k-step, I above one": (70, 48, 80, 4, 2),
    "tails everywhere": (200, 272, 176, 5, 3),
    "I with a tail of 64 and one of 16": (257, 320, 336, 6, 2),
    "more than one column tile of everything": (520, 528, 592, 4, 2),
    "H == I": (129, 128, 128, 4, 2),
    "2I == H": (127, 128, 64, 4, 2),
    "T == E": (8, 64, 32, 8, 2),
    "one token": (1, 256, 128, 8, 2),
    "one expert": (100, 64, 64, 1, 1),
    "K == E": (65, 96, 48, 3, 3),
}
# Limits halfway between two bfloat16 numbers, so that rounding z moves no value across them; a kink would outweigh every tolerance.
ACTIVATIONS = {"swiglu with a limit": ("swiglu", 0.701171875), "swiglu_oai": ("swiglu_oai", None),
               "swiglu_oai with a limit that bites": ("swiglu_oai", 0.501953125),
               "geglu": ("geglu", None), "reglu": ("reglu", None)}
SHARED = {"one ungated": ((96, False),), "one gated, wider than I": ((272, True),), "two of different width, one gated": ((80, False), (336, True))}


def ids_like(T: int, K: int, value: int) -> torch.Tensor:
    return torch.full((T, K), value, dtype=torch.int64)


def saved_of(case: Case):
    """(plan, what forward saves) by plain PyTorch, so that the backward kernel is tested alone; padding rows of z hold NaN."""
    engine = TorchGpuEngine()
    plan = engine.build_plan(case.topk_ids, case.num_experts)
    _, saved = engine.forward(plan, case.tensors, replace(case.options, save_for_backward=True))
    z, t = saved.z.masked_fill((plan.row_to_slot < 0).unsqueeze(1), float("nan")), case.tensors
    if t.b_gate_up is not None:                                                # rounded once, bias included: a library may round before it too
        for e in range(case.num_experts):
            token, k = torch.nonzero(case.topk_ids == e, as_tuple=True)
            row = plan.slot_to_row[token * case.topk_ids.shape[1] + k].long()
            z[row] = (t.x[token].double() @ t.w_gate_up[e].double().T + t.b_gate_up[e].double()).to(z.dtype)
    return plan, Saved(z, saved.shared_z.contiguous())


def forwards_saved(case: Case):
    """(plan, what the forward kernel saves): the z whose bits a backward pass that recomputes z must find again. Padding rows of z hold NaN."""
    from mok.engines.hopper.engine import HopperEngine

    engine = HopperEngine()
    plan = engine.build_plan(case.topk_ids, case.num_experts)
    _, saved = engine.forward(plan, case.tensors, replace(case.options, save_for_backward=True))
    return plan, Saved(saved.z.masked_fill((plan.row_to_slot < 0).unsqueeze(1), float("nan")), saved.shared_z)


def recomputing(case: Case) -> Case:
    return replace(case, options=replace(case.options, recompute="z"))


def nothing_saved(plan: RoutingPlan, saved: Saved) -> tuple[RoutingPlan, Saved]:
    return plan, Saved(saved.z[:0], saved.shared_z[:0])


def same_recomputed(case: Case, wants: Wants | None = None, settings: Sequence[dict] = ({},)) -> None:
    """Every gradient has the bits of the pass that reads forward's z, without being given any z, with all of these settings."""
    both = forwards_saved(case)
    expected = named(backward(case, wants, plan_and_saved=both))
    for setting in settings:
        got = named(backward(recomputing(case), wants, plan_and_saved=nothing_saved(*both), **setting))
        assert {name for name, grad in got.items() if grad is not None} == {name for name, grad in expected.items() if grad is not None}
        assert all(grad is None or torch.isfinite(grad).all() for grad in got.values())
        assert not differing(expected, got), f"{setting}: {differing(expected, got)} differ"


def mismatches(first: Grads, second: Grads) -> list[str]:
    """Which gradients differ in how many elements, and where: [] = the same bits."""
    found = []
    for name, a in named(first).items():
        b = named(second)[name]
        if a is not None and b is not None and not torch.equal(a, b):
            where = torch.nonzero((a != b).reshape(-1, a.shape[-1]))
            rows, columns = where[:, 0].unique(), where[:, 1]
            nan = int(torch.isnan(b).sum())
            found.append(f"{name}: {where.shape[0]} elements ({nan} NaN), rows {rows[:6].tolist()}.. columns {columns.min()}..{columns.max()}")
    return found


def backward(case: Case, wants: Wants | None = None, main_grad: MainGrad | None = None, plan_and_saved=None, **settings) -> Grads:
    """One launch of the kernel on poisoned memory."""
    from mok.engines.hopper.backward_launch import hopper_backward

    plan, saved = plan_and_saved or saved_of(case)
    poison()
    grads = hopper_backward(plan, case.tensors, case.options, saved, case.dy, want_all(case) if wants is None else wants, main_grad, **settings)
    torch.cuda.synchronize()
    return grads


def check(case: Case, **settings) -> None:
    """All gradients of one problem against float64, per expert and block, everything finite."""
    check_case(case, named(backward(case, **settings)))


def plain_case(name: str) -> Case:
    return gpu_case(*PLAIN_SHAPES[name])


def sixteen_wants(case: Case) -> None:
    """Each of the 16 combinations of x, topk_weights, w_gate_up, w_down: wanted ones have the bits of the full pass, the others are None."""
    both = saved_of(case)
    full = named(backward(case, plan_and_saved=both))
    for flags in itertools.product((False, True), repeat=4):
        grads = named(backward(case, Wants(*flags, shared=tuple((False, False, False) for _ in case.tensors.shared)), plan_and_saved=both))
        for name, flag in zip(("x", "topk_weights", "w_gate_up", "w_down"), flags):
            assert (grads[name] is not None) == flag, f"{name} {flags}"
            assert not flag or torch.equal(grads[name], full[name]), f"{name} differs when wanted with {flags}"


def accumulates(case: Case) -> None:
    """main_grad += the fp32 weight gradient: twice the same pass adds the same twice; an expert without rows keeps its values."""
    t = case.tensors
    ours = MainGrad(torch.randn(t.w_gate_up.shape, device="cuda"), torch.randn(t.w_down.shape, device="cuda"))
    before = MainGrad(ours.w_gate_up.clone(), ours.w_down.clone())
    both = saved_of(case)
    plain = backward(case, plan_and_saved=both)
    for step in range(1, 3):
        grads = backward(case, main_grad=ours, plan_and_saved=both)
        assert grads.w_gate_up is None and grads.w_down is None
        for name in ("w_gate_up", "w_down"):
            added, expected = getattr(ours, name) - getattr(before, name), step * getattr(plain, name).float()
            scale = expected.abs().max()
            assert (added - expected).abs().max() <= 0.01 * scale, f"{name} after {step} passes"
    counts = both[0].tokens_per_expert
    for e in torch.nonzero(counts == 0).flatten().tolist():
        assert torch.equal(ours.w_gate_up[e], before.w_gate_up[e]) and torch.equal(ours.w_down[e], before.w_down[e]), f"empty expert {e} was touched"


def same_everywhere(case: Case, settings: list[dict]) -> None:
    """P1 and P2: every setting gives the bits of the default one."""
    both = saved_of(case)
    first = named(backward(case, plan_and_saved=both))
    for setting in settings:
        other = named(backward(case, plan_and_saved=both, **setting))
        assert not differing(first, other), f"{setting}: {differing(first, other)} differ"
