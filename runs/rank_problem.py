"""Random inputs of a layer on several ranks, the same in every process, and its results checked against float64: for scripts in this folder."""
from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

import mok
from mok.plan import experts_of_rank
from mok.reference import expert_reference

TOLERANCE = 0.02            # relative norm of a row's or an expert's error, as in mok.bench_cuda
SAMPLED_TOKENS = 3


@dataclass
class Problem:
    """T tokens of all ranks together; rank r has tokens cuts[r]..cuts[r+1] and its block of the E experts. BF16, plain SwiGLU.

    local: every token's experts are its own rank's, so that no row travels. crowded: half of all routes go to a tenth of the experts.
    """

    T: int
    H: int
    I: int
    E: int
    K: int
    cuts: list[int]
    device: torch.device
    local: bool = False
    crowded: bool = False
    x: Tensor = field(init=False)
    dy: Tensor = field(init=False)
    ids: Tensor = field(init=False)
    weights: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.x, self.dy = self._normal("x", self.T, self.H), self._normal("dy", self.T, self.H)
        scores = self._normal("scores", self.T, self.E).float()
        scores += torch.rand(scores.shape, generator=self._generator("ties"), device=self.device) * 1e-3        # bf16 scores tie often
        if self.crowded:
            scores[:, :max(1, self.E // 10)] += 2.0
        for rank in range(self.W if self.local else 0):
            first, count = experts_of_rank(self.E, self.W, rank)
            outside = torch.ones(self.E, dtype=torch.bool, device=self.device)
            outside[first:first + count] = False
            scores[self.tokens(rank), :] = scores[self.tokens(rank), :].masked_fill(outside, -torch.inf)
        chosen, self.ids = scores.topk(self.K)
        self.weights = chosen.softmax(-1)

    @property
    def W(self) -> int:
        return len(self.cuts) - 1

    def tokens(self, rank: int) -> slice:
        return slice(self.cuts[rank], self.cuts[rank + 1])

    def experts(self, rank: int) -> slice:
        first, count = experts_of_rank(self.E, self.W, rank)
        return slice(first, first + count)

    def expert_weights(self, experts: slice) -> tuple[Tensor, Tensor]:
        """w_gate_up (n, 2I, H) and w_down (n, H, I) of some experts; each drawn by its own seed, so that every rank can make any of them."""
        n = experts.stop - experts.start
        up = torch.empty(n, 2 * self.I, self.H, device=self.device, dtype=torch.bfloat16)
        down = torch.empty(n, self.H, self.I, device=self.device, dtype=torch.bfloat16)
        for place, expert in enumerate(range(experts.start, experts.stop)):
            up[place].normal_(generator=self._generator(f"up {expert}")).mul_(self.H**-0.5)
            down[place].normal_(generator=self._generator(f"down {expert}")).mul_(self.I**-0.5)
        return up, down

    def leaves(self, rank: int) -> list[Tensor]:
        """[x, topk_weights, w_gate_up, w_down] of a rank, to be differentiated."""
        mine = self.tokens(rank)
        return [t.clone().requires_grad_() for t in (self.x[mine], self.weights[mine])] + [w.requires_grad_() for w in self.expert_weights(self.experts(rank))]

    def remote_rows(self, rank: int) -> tuple[int, int]:
        """(rows that other ranks' tokens have at this rank's experts, rows that this rank's tokens have elsewhere)."""
        mine, own = self.tokens(rank), self.experts(rank)
        here = (self.ids >= own.start) & (self.ids < own.stop)
        return int(here.sum()) - int(here[mine].sum()), int((~here[mine]).sum())

    def _generator(self, what: str) -> torch.Generator:
        number = int.from_bytes(hashlib.blake2b(f"{self.T} {self.H} {self.I} {self.E} {what}".encode(), digest_size=7).digest(), "little")
        return torch.Generator(self.device).manual_seed(number)

    def _normal(self, what: str, *shape: int) -> Tensor:
        return torch.empty(*shape, device=self.device, dtype=torch.bfloat16).normal_(generator=self._generator(what))


NAMES = ("y", "dx", "d_topk_weights", "dw_gate_up", "dw_down")


def both_passes(leaves: list[Tensor], ids: Tensor, dy: Tensor, group: mok.ExpertGroup | None) -> list[Tensor]:
    """y and the gradients of `leaves` by mok."""
    y = mok.moe(leaves[0], ids, leaves[1], leaves[2], leaves[3], group=group)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def check(problem: Problem, rank: int, results: list[Tensor]) -> dict[str, float]:
    """Relative errors of some of a rank's results against the specification in float64: a few tokens, and the weight gradients of one of its experts.

    Computed from the whole problem, whatever ranks there are. RuntimeError above TOLERANCE or for NaN.
    """
    errors: dict[str, float] = {}
    T = problem.cuts[rank + 1] - problem.cuts[rank]
    if T:
        generator = torch.Generator().manual_seed(1)
        errors |= _check_tokens(problem, rank, results, sorted({0, T - 1, *torch.randint(0, T, (SAMPLED_TOKENS,), generator=generator).tolist()}))
    own = problem.experts(rank)
    counts = torch.bincount(problem.ids.flatten(), minlength=problem.E)[own]
    expert = int(counts.argmax())
    if int(counts[expert]):
        errors |= _check_expert(problem, own.start + expert, results[3][expert], results[4][expert])
    for name, error in errors.items():
        if not error <= TOLERANCE:
            raise RuntimeError(f"{name} of rank {rank} is off by {error:.3g} of its norm, {TOLERANCE} allowed")
    return errors


def _check_tokens(problem: Problem, rank: int, results: list[Tensor], sample: list[int]) -> dict[str, float]:
    got = {name: result[sample].double() for name, result in zip(NAMES[:3], results)}
    truth: dict[str, list[Tensor]] = {name: [] for name in got}
    for token in (problem.cuts[rank] + t for t in sample):
        x, weights = (t[token].double().requires_grad_() for t in (problem.x, problem.weights))
        y = x.new_zeros(problem.H)
        for k, expert in enumerate(problem.ids[token].tolist()):
            up, down = (w[0].double() for w in problem.expert_weights(slice(expert, expert + 1)))
            y = y + weights[k] * expert_reference(x.unsqueeze(0), up, down, None, None, "swiglu", None)[0]
        for name, value in zip(truth, (y.detach(), *torch.autograd.grad(y, (x, weights), problem.dy[token].double()))):
            truth[name].append(value)
    return {name: _error(got[name], torch.stack(truth[name])) for name in got}


def _check_expert(problem: Problem, expert: int, d_up: Tensor, d_down: Tensor) -> dict[str, float]:
    token, k = torch.nonzero(problem.ids == expert, as_tuple=True)
    up, down = (w[0].double().requires_grad_() for w in problem.expert_weights(slice(expert, expert + 1)))
    rows = expert_reference(problem.x[token].double(), up, down, None, None, "swiglu", None)
    truths = torch.autograd.grad(rows, (up, down), problem.dy[token].double() * problem.weights[token, k].double().unsqueeze(1))
    return {name: _error(got.double().flatten()[None], truth.flatten()[None]) for name, got, truth in zip(NAMES[3:], (d_up, d_down), truths)}


def _error(got: Tensor, truth: Tensor) -> float:
    """The worst row's error over the typical row's norm."""
    return float((got - truth).norm(dim=-1).max() / truth.norm(dim=-1).square().mean().sqrt())
