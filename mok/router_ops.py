"""Custom ops of the router: scores, probabilities, top-k, weights and losses, each with its own fixed-order arithmetic.

Routes obey P1, P2 and P4: a token's route bits depend on its own row alone. Only three kinds of arithmetic appear here:
  - single IEEE operations (add, multiply, divide, compare), which have the same bits wherever an element lies and whatever thread runs it;
  - sums folded in halves (`fold_sum`), whose order depends on the length of the summed dimension alone;
  - exp and log. A library may run vector code on most elements and scalar code on the tail, with other last bits (torch 2.13 on x86: 80 of
    1.5 million sigmoids changed with their offset; exp and log kept their bits, but nothing promises it), so on a CPU both are built here
    from IEEE operations. A GPU runs the same scalar code for each element, so there they are the library's.
They are opaque to `torch.compile`, which would otherwise contract multiply-adds. Formulas and their sources: docs/router.md.

Legend: T tokens, H hidden, E experts, K routes a token; logits, probs (T, E) and topk_weights (T, K) in fp32 (fp64 for fp64 x).
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .engines import engine_name, get_engine
from .engines.protocol import accumulation_dtype

SUM_EPSILON = 1e-20              # added to a sum that divides: exact no-op on any sum above 1e-4 (fp64) or 1e-12 (fp32), and 0/0 becomes 0
_EXP_CHUNK = 1 << 15             # elements in flight: 256 KiB of fp64, so that the ~30 passes of exp stay in the L2 cache
_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.6931471803691238   # 32 leading bits of ln 2, so that n * _LN2_HIGH is exact for |n| < 2^20
_LN2_LOW = 1.9082149292705877e-10
_EXP_FLOOR = -708.0              # exp below this is subnormal in fp64; taken as 0


# ---- arithmetic whose bits do not depend on position, batch or threads ----

def fold_sum(values: Tensor, dim: int) -> Tensor:
    """Sum over `dim`, kept as a dimension of length 1, by adding the upper half to the lower until one is left.

    Five values a b c d e: [a+d, b+e, c] -> [(a+d)+c, b+e] -> ((a+d)+c) + (b+e). The order depends on the length alone.
    """
    n = values.shape[dim]
    if n == 0:
        return values.sum(dim, keepdim=True)
    while n > 1:
        keep = (n + 1) // 2
        lower = values.narrow(dim, 0, keep).clone()
        lower.narrow(dim, 0, n - keep).add_(values.narrow(dim, keep, n - keep))
        values, n = lower, keep
    return values


def exp_nonpositive(x: Tensor) -> Tensor:
    """exp(x) for x <= 0 (or NaN), fp32 or fp64, in x's dtype; exp(x) = 2^n * P(r), n = round(x / ln 2), r = x - n ln 2, P the Taylor polynomial.

    Computed in fp64: the result is within 0.51 ulp for fp32 and 2 ulp for fp64. Below -708 it is 0.
    """
    if x.device.type != "cpu":
        return torch.exp(x)
    degree = 13 if x.dtype == torch.float64 else 8             # |r| <= 0.347: truncation 5e-18 and 2e-10 of the result
    coefficients = [1.0 / math.factorial(k) for k in range(degree + 1)]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    flat_x, flat_out = x.reshape(-1), out.view(-1)
    for start in range(0, flat_x.shape[0], _EXP_CHUNK):
        v = flat_x[start:start + _EXP_CHUNK].to(torch.float64)
        tiny = v < _EXP_FLOOR
        r = v.clamp(min=_EXP_FLOOR)
        n = (r * _LOG2_E).round_()
        r = r.sub_(n * _LN2_HIGH).sub_(n * _LN2_LOW)
        poly = torch.full_like(r, coefficients[-1])
        for c in reversed(coefficients[:-1]):
            poly.mul_(r).add_(c)
        power = n.to(torch.int64).add_(1023).bitwise_left_shift_(52).view(torch.float64)   # 2^n; n >= -1022
        flat_out[start:start + _EXP_CHUNK] = poly.mul_(power).masked_fill_(tiny, 0.0)
    return out


def log_positive(x: Tensor) -> Tensor:
    """log(x) for normal x > 0 (or NaN), in x's dtype: x = m 2^e with m in [0.707, 1.414), log m = 2 atanh((m - 1) / (m + 1)) as a series."""
    if x.device.type != "cpu":
        return torch.log(x)
    m, e = torch.frexp(x.to(torch.float64))
    low = m < math.sqrt(0.5)
    m = torch.where(low, m * 2, m)
    e = torch.where(low, e - 1, e).to(torch.float64)
    s = (m - 1) / (m + 1)
    s2 = s * s                                                   # <= 0.0295, so the twelfth term is below 1e-19
    series = torch.zeros_like(s)
    for k in reversed(range(12)):
        series = series * s2 + 1.0 / (2 * k + 1)
    return (e * math.log(2) + 2 * s * series).to(x.dtype)


def _softmax(logits: Tensor) -> Tensor:
    exps = exp_nonpositive(logits - logits.amax(-1, keepdim=True))
    return exps / fold_sum(exps, -1)


def _valid_tokens(values: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows of padding tokens zeroed, and the number of the others, at least 1, as a 0-d tensor."""
    if padding_mask is None:
        return values, torch.full((), max(values.shape[0], 1), dtype=values.dtype, device=values.device)
    count = (~padding_mask).sum().clamp(min=1).to(values.dtype)
    return values.masked_fill(padding_mask.unsqueeze(-1), 0.0), count


# ---- scores ----

@torch.library.custom_op("mok::router_scores", mutates_args=())
def router_scores(x: Tensor, weight: Tensor) -> Tensor:
    """logits = x @ weight.T in the engine's fixed order: x (T, H), weight (E, H), any float dtypes -> (T, E) fp32 (fp64 for fp64 x)."""
    with torch.autocast(x.device.type, enabled=False):           # it would reach the engine's matrix products, inside a custom op too
        return get_engine(engine_name(x.device, x.dtype, x.shape[1])).router_scores(x, weight)


@router_scores.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=accumulation_dtype(x.dtype))


@torch.library.custom_op("mok::router_scores_backward", mutates_args=())
def router_scores_backward(x: Tensor, weight: Tensor, dlogits: Tensor, want_x: bool, want_weight: bool) -> tuple[Tensor, Tensor]:
    """(dx (T, H) in x's dtype, dweight (E, H) in weight's dtype); an empty tensor where not wanted."""
    engine = get_engine(engine_name(x.device, x.dtype, x.shape[1]))
    with torch.autocast(x.device.type, enabled=False):
        dx, dweight = engine.router_scores_backward(x, weight, dlogits, want_x, want_weight)
    return x.new_empty(0) if dx is None else dx, weight.new_empty(0) if dweight is None else dweight


@router_scores_backward.register_fake
def _(x: Tensor, weight: Tensor, dlogits: Tensor, want_x: bool, want_weight: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if want_x else 0), weight.new_empty(weight.shape if want_weight else 0)


def _scores_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _scores_backward(ctx: Any, dlogits: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    want_x, want_weight = ctx.needs_input_grad
    dx, dweight = router_scores_backward(x, weight, dlogits, want_x, want_weight)
    return dx if want_x else None, dweight if want_weight else None


router_scores.register_autograd(_scores_backward, setup_context=_scores_context)


# ---- probabilities ----

@torch.library.custom_op("mok::router_probs", mutates_args=())
def router_probs(logits: Tensor, score_function: str) -> Tensor:
    """softmax over E, or sigmoid of each logit: (T, E) -> (T, E)."""
    if score_function == "softmax":
        return _softmax(logits)
    e = exp_nonpositive(-logits.abs())                           # 1/(1+e) and e/(1+e) keep full relative accuracy on both sides
    return torch.where(logits < 0, e, torch.ones_like(e)) / (e + 1)


@router_probs.register_fake
def _(logits: Tensor, score_function: str) -> Tensor:
    return logits.new_empty(logits.shape)


@torch.library.custom_op("mok::router_probs_backward", mutates_args=())
def router_probs_backward(probs: Tensor, dprobs: Tensor, score_function: str) -> Tensor:
    """softmax: p (g - sum of g p); sigmoid: g p (1 - p)."""
    if score_function == "softmax":
        weighted = dprobs * probs
        return probs * (dprobs - fold_sum(weighted, -1))
    return dprobs * (probs * (1 - probs))


@router_probs_backward.register_fake
def _(probs: Tensor, dprobs: Tensor, score_function: str) -> Tensor:
    return probs.new_empty(probs.shape)


def _probs_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.score_function = inputs[1]
    ctx.save_for_backward(output)


def _probs_backward(ctx: Any, dprobs: Tensor) -> tuple[Tensor, None]:
    (probs,) = ctx.saved_tensors
    return router_probs_backward(probs, dprobs, ctx.score_function), None


router_probs.register_autograd(_probs_backward, setup_context=_probs_context)


# ---- top-k ----

def _best(scores: Tensor, k: int) -> Tensor:
    """Positions of the k largest along the last dimension, largest first, equal ones by position. NaN must be gone."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :k]


@torch.library.custom_op("mok::select_experts", mutates_args=())
def select_experts(probs: Tensor, bias: Tensor | None, padding_mask: Tensor | None, top_k: int, num_groups: int, topk_groups: int) -> Tensor:
    """topk_ids (T, K) int64: the K experts of largest probs + bias (E,), largest first; equal scores: the lower id first. Not differentiable.

    NaN ranks below every number, so ids are always in range and distinct. num_groups > 1: only experts of the topk_groups best groups can be
    chosen, a group's score being the sum of its two largest probs + bias (its only one, if it has one). padding_mask (T,) True: -1.
    """
    T, E = probs.shape
    scores = probs if bias is None else probs + bias
    # + 0.0 makes -0.0 equal to 0.0 also for a sort that compares bits
    scores = torch.where(scores.isnan(), -math.inf, scores) + 0.0
    if topk_groups == num_groups:
        topk_ids = _best(scores, top_k)
    else:
        size = E // num_groups
        best_two = scores.view(T, num_groups, size).topk(min(2, size), dim=-1).values
        group_scores = best_two[..., 0] + best_two[..., 1] if size > 1 else best_two[..., 0]
        groups = _best(group_scores, topk_groups).sort(dim=-1).values       # ascending, so that candidates lie in order of their ids
        candidates = (groups.unsqueeze(-1) * size + torch.arange(size, device=probs.device)).view(T, topk_groups * size)
        topk_ids = candidates.gather(1, _best(scores.gather(1, candidates), top_k))
    return topk_ids.contiguous() if padding_mask is None else topk_ids.masked_fill(padding_mask.unsqueeze(-1), -1)


@select_experts.register_fake
def _(probs: Tensor, bias: Tensor | None, padding_mask: Tensor | None, top_k: int, num_groups: int, topk_groups: int) -> Tensor:
    return probs.new_empty((probs.shape[0], top_k), dtype=torch.int64)


# ---- routing weights ----

def _clipped(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """ids made safe to gather with, and True where the route has no expert: -1, or a replayed id out of range (which the plan reports)."""
    return topk_ids.clamp(0, num_experts - 1).to(torch.int64), (topk_ids < 0) | (topk_ids >= num_experts)


def _gathered(probs: Tensor, topk_ids: Tensor) -> Tensor:
    ids, absent = _clipped(topk_ids, probs.shape[1])
    return probs.gather(1, ids).masked_fill(absent, 0.0)


@torch.library.custom_op("mok::route_weights", mutates_args=())
def route_weights(probs: Tensor, topk_ids: Tensor, normalise: bool, scale: float) -> Tensor:
    """topk_weights (T, K) = scale * p, or scale * p / (sum of the token's K p + 1e-20) if normalise; p = probs at topk_ids, 0 at -1."""
    p = _gathered(probs, topk_ids)
    if normalise:
        p = p / (fold_sum(p, -1) + SUM_EPSILON)
    return p * scale


@route_weights.register_fake
def _(probs: Tensor, topk_ids: Tensor, normalise: bool, scale: float) -> Tensor:
    return probs.new_empty(topk_ids.shape)


@torch.library.custom_op("mok::route_weights_backward", mutates_args=())
def route_weights_backward(probs: Tensor, topk_ids: Tensor, dweights: Tensor, normalise: bool, scale: float) -> Tensor:
    """dprobs (T, E): g = scale * dweights, or with q = p / (sum + 1e-20): (g - sum of g q) / (sum + 1e-20); 0 where not chosen."""
    g = dweights * scale
    if normalise:
        p = _gathered(probs, topk_ids)
        total = fold_sum(p, -1) + SUM_EPSILON
        g = (g - fold_sum(g * (p / total), -1)) / total
    ids, absent = _clipped(topk_ids, probs.shape[1])
    g = g.masked_fill(absent, 0.0)
    dprobs = torch.zeros_like(probs)
    for k in range(ids.shape[1]):                                # one k at a time: a repeated expert is added to in order, without atomics
        dprobs.scatter_add_(1, ids[:, k:k + 1], g[:, k:k + 1])
    return dprobs


@route_weights_backward.register_fake
def _(probs: Tensor, topk_ids: Tensor, dweights: Tensor, normalise: bool, scale: float) -> Tensor:
    return probs.new_empty(probs.shape)


def _weights_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    probs, topk_ids, ctx.normalise, ctx.scale = inputs
    ctx.save_for_backward(probs, topk_ids)


def _weights_backward(ctx: Any, dweights: Tensor) -> tuple[Tensor | None, ...]:
    probs, topk_ids = ctx.saved_tensors
    return route_weights_backward(probs, topk_ids, dweights, ctx.normalise, ctx.scale), None, None, None


route_weights.register_autograd(_weights_backward, setup_context=_weights_context)


# ---- losses ----

def _fractions(routes_per_expert: Tensor, count: Tensor, top_k: int) -> Tensor:
    return routes_per_expert.to(count.dtype) / (count * top_k)


@torch.library.custom_op("mok::balance_loss", mutates_args=())
def balance_loss(probs: Tensor, routes_per_expert: Tensor, padding_mask: Tensor | None, top_k: int, normalise: bool) -> Tensor:
    """0-d: E * sum_i f_i P_i; f_i = routes_per_expert (E,) int / (K n), P_i = mean over the n tokens that are no padding of their prob.

    normalise: probs are divided by their sum over E first (sigmoid scores). 1 if balanced. Differentiable in probs; f is a constant.
    """
    if normalise:
        probs = probs / (fold_sum(probs, -1) + SUM_EPSILON)
    probs, count = _valid_tokens(probs, padding_mask)
    mean = fold_sum(probs, 0).view(-1) / count
    return (fold_sum(_fractions(routes_per_expert, count, top_k) * mean, 0) * probs.shape[1]).view(())


@balance_loss.register_fake
def _(probs: Tensor, routes_per_expert: Tensor, padding_mask: Tensor | None, top_k: int, normalise: bool) -> Tensor:
    return probs.new_empty(())


@torch.library.custom_op("mok::balance_loss_backward", mutates_args=())
def balance_loss_backward(probs: Tensor, routes_per_expert: Tensor, padding_mask: Tensor | None, dloss: Tensor, top_k: int,
                          normalise: bool) -> Tensor:
    """dprobs (T, E) = dloss * E f_i / n in every row; normalise: through q = p / sum as in `route_weights_backward`."""
    _, count = _valid_tokens(probs, padding_mask)
    g = (_fractions(routes_per_expert, count, top_k) * (dloss * probs.shape[1] / count)).expand_as(probs)
    if normalise:
        total = fold_sum(probs, -1) + SUM_EPSILON
        g = (g - fold_sum(g * (probs / total), -1)) / total
    return g.clone() if padding_mask is None else g.masked_fill(padding_mask.unsqueeze(-1), 0.0)


@balance_loss_backward.register_fake
def _(probs: Tensor, routes_per_expert: Tensor, padding_mask: Tensor | None, dloss: Tensor, top_k: int, normalise: bool) -> Tensor:
    return probs.new_empty(probs.shape)


def _balance_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    probs, routes_per_expert, padding_mask, ctx.top_k, ctx.normalise = inputs
    ctx.save_for_backward(probs, routes_per_expert, padding_mask)


def _balance_backward(ctx: Any, dloss: Tensor) -> Sequence[Tensor | None]:
    probs, routes_per_expert, padding_mask = ctx.saved_tensors
    return balance_loss_backward(probs, routes_per_expert, padding_mask, dloss, ctx.top_k, ctx.normalise), None, None, None, None


balance_loss.register_autograd(_balance_backward, setup_context=_balance_context)


def _log_sum_exp(logits: Tensor) -> Tensor:
    top = logits.amax(-1, keepdim=True)
    return top + log_positive(fold_sum(exp_nonpositive(logits - top), -1))


@torch.library.custom_op("mok::z_loss", mutates_args=())
def z_loss(logits: Tensor, padding_mask: Tensor | None) -> Tensor:
    """0-d: mean of logsumexp(logits)^2 over the tokens that are no padding."""
    lse, count = _valid_tokens(_log_sum_exp(logits), padding_mask)
    return (fold_sum(lse * lse, 0) / count).view(())


@z_loss.register_fake
def _(logits: Tensor, padding_mask: Tensor | None) -> Tensor:
    return logits.new_empty(())


@torch.library.custom_op("mok::z_loss_backward", mutates_args=())
def z_loss_backward(logits: Tensor, padding_mask: Tensor | None, dloss: Tensor) -> Tensor:
    """dlogits (T, E) = dloss * 2 logsumexp / n * softmax."""
    lse, count = _valid_tokens(_log_sum_exp(logits), padding_mask)
    grad = _softmax(logits) * (lse * (2 * dloss / count))
    return grad if padding_mask is None else grad.masked_fill(padding_mask.unsqueeze(-1), 0.0)


@z_loss_backward.register_fake
def _(logits: Tensor, padding_mask: Tensor | None, dloss: Tensor) -> Tensor:
    return logits.new_empty(logits.shape)


def _z_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _z_backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None]:
    logits, padding_mask = ctx.saved_tensors
    return z_loss_backward(logits, padding_mask, dloss), None


z_loss.register_autograd(_z_backward, setup_context=_z_context)


# ---- load ----

@torch.library.custom_op("mok::count_load", mutates_args=("load",))
def count_load(load: Tensor, routes_per_expert: Tensor) -> None:
    """load (E,) int64 += routes_per_expert (E,), except inside a backward pass: there it is a checkpoint's recomputation, counted already."""
    if torch._C._current_graph_task_id() == -1:
        load.add_(routes_per_expert)
