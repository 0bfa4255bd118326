"""The CPU engine: one rank's pass composed of the tile tasks of cpu_experts.py and cpu_combine.py, run on runtime.py's tile pool.

    forward   [routed tiles + shared tiles + gates] -> [combine]
    backward  [routed tiles + shared tiles] -> [weight gradients + sums of dx]

Between the brackets all tasks have ended; inside one they run in any order on any thread without changing a bit. At several ranks rows
travel at the same places: x rows before the first bracket, results (y rows; dx rows and d_weight) before the last. With a bounded capacity
(`mok.waves`) routed tiles and, in backward, routed weight gradients are done wave by wave in the same buffers. Where z was not kept (waves but the
first; all of it with options.recompute) backward makes it again by forward's own tiles, in scratch.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..config import BLOCK_M
from ..plan import RoutingPlan
from ..runtime import Task, runtime
from ..waves import Wave, split_into_waves, waves_needed
from .cpu_activation import Activation
from .cpu_check import self_check
from .cpu_combine import SharedRows, combine_backward_tasks, combine_tasks, gate_tasks, scores_tasks
from .cpu_experts import BackwardRows, Experts, ExpertWants, ExpertWeights, GradTarget, WeightGrads, outer_tasks
from .cpu_rows import GroupRows, LocalRows, slot_values
from .cpu_tiles import Rows, TileMath
from .protocol import Grads, MainGrad, MoETensors, PassOptions, Saved, Wants

__all__ = ["CpuEngine", "self_check"]


def routed_experts(math: TileMath, plan: RoutingPlan, tensors: MoETensors, options: PassOptions) -> Experts:
    """This rank's routed experts on rows laid out as `plan` says."""
    weights = ExpertWeights(tensors.w_gate_up, tensors.w_down, tensors.b_gate_up, tensors.b_down).dense()
    return Experts(math, Activation.of(options.activation, options.swiglu_limit), weights,
                   plan.expert_offsets[:-1].tolist(), plan.tokens_per_expert.tolist())


def shared_experts(math: TileMath, tensors: MoETensors, options: PassOptions) -> list[Experts]:
    """Each shared expert as a group of one, whose rows are the tokens."""
    activation = Activation.of(options.activation, options.swiglu_limit)
    return [Experts(math, activation, ExpertWeights(s.w_gate_up.unsqueeze(0), s.w_down.unsqueeze(0)).dense(), [0], [tensors.x.shape[0]])
            for s in tensors.shared]


class SharedPass:
    """The shared experts of one pass on this rank's tokens: their tasks beside the routed experts', and what the sums need of them."""

    def __init__(self, math: TileMath, tensors: MoETensors, options: PassOptions, take: Callable[[int, int, torch.dtype], Tensor]) -> None:
        """take(rows, columns, dtype) gives a buffer that lives as long as the pass."""
        self.math, self.x, self.shared, self._take = math, tensors.x, tensors.shared, take
        self.experts = shared_experts(math, tensors, options)
        ends = [0]
        for experts in self.experts:
            ends.append(ends[-1] + 2 * experts.width)
        self._columns = [slice(first, last) for first, last in pairwise(ends)]
        self.z_width = ends[-1]
        self.gates: list[Tensor | None] = [None if s.gate_weight is None else self.x.new_empty(self.x.shape[0], 1, dtype=math.acc) for s in self.shared]
        self._rows: list[BackwardRows] = []

    def gate_tasks(self) -> list[Task]:
        """Tasks that fill `gates`: (T, 1) sigmoids, None where an expert has none."""
        return [task for gate, s in zip(self.gates, self.shared) if gate is not None and s.gate_weight is not None
                for task in gate_tasks(self.math, self.x, s.gate_weight, gate)]

    def forward(self, z: Tensor | None) -> tuple[list[Task], list[SharedRows]]:
        """Tasks, and the rows they write for combine_tasks; z (T, z_width), or None, takes the pre-activations."""
        tasks, result = self.gate_tasks(), []
        for experts, columns, gate in zip(self.experts, self._columns, self.gates):
            y = self._take(self.x.shape[0], self.x.shape[1], self.x.dtype)
            tasks += experts.forward_tasks(Rows(self.x), y, None if z is None else z[:, columns])
            result.append(SharedRows(y, gate))
        return tasks, result

    def z_tasks(self, z: Tensor, wants: Wants) -> list[Task]:
        """Tasks that put the pre-activations that backward needs into z (T, z_width), with forward's bits."""
        return [task for experts, columns, want in zip(self.experts, self._columns, _shared_wants(self, wants)) if want.needs_z
                for task in experts.forward_tasks(Rows(self.x), None, z[:, columns])]

    def backward_tiles(self, dy: Tensor, z: Tensor, wants: Wants) -> list[Task]:
        """Tasks of the first bracket; gate_tasks must have run."""
        tasks: list[Task] = []
        for experts, columns, gate, want in zip(self.experts, self._columns, self.gates, _shared_wants(self, wants)):
            rows = experts.backward_rows(self.x.shape[0], want, self._take)
            tasks += experts.backward_tasks(Rows(dy), gate, z[:, columns], want, rows)
            self._rows.append(rows)
        return tasks

    def backward_sums(self, dy: Tensor, wants: Wants, grads: Grads) -> tuple[list[Task], list[SharedRows]]:
        """After the first bracket: weight-gradient tasks, which fill grads.shared, and the rows for combine_backward_tasks."""
        tasks: list[Task] = []
        result = []
        for i, (experts, gate, rows, s) in enumerate(zip(self.experts, self.gates, self._rows, self.shared)):
            want_gate_up, want_down, want_gate = wants.shared[i]
            out = (_like(s.w_gate_up, want_gate_up), _like(s.w_down, want_down), _like(s.gate_weight, want_gate))
            targets = WeightGrads(None if out[0] is None else out[0].unsqueeze(0), None if out[1] is None else out[1].unsqueeze(0))
            tasks += experts.weight_grad_tasks(Rows(self.x), Rows(dy), gate, rows, targets)
            if rows.d_weight is not None and gate is not None:
                rows.d_weight.mul_(gate).mul_(1 - gate)          # the gradient of the gate's score
                if out[2] is not None:
                    tasks.append(partial(experts.row_sum, Rows(self.x), rows.d_weight, 0, self.x.shape[0], GradTarget(out[2].unsqueeze(0))))
            if rows.dx is not None:
                result.append(SharedRows(rows.dx, rows.d_weight, None if s.gate_weight is None else s.gate_weight.unsqueeze(0)))
            grads.shared.append(out)
        return tasks, result


def _shared_wants(shared: SharedPass, wants: Wants) -> list[ExpertWants]:
    return [ExpertWants(dx=wants.x, d_weight=gate is not None and (wants.x or want_gate), w_gate_up=want_gate_up, w_down=want_down)
            for gate, (want_gate_up, want_down, want_gate) in zip(shared.gates, wants.shared)]


def _like(tensor: Tensor | None, wanted: bool) -> Tensor | None:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format) if wanted and tensor is not None else None


def routed_weight_grads(tensors: MoETensors, wants: Wants, main_grad: MainGrad | None, grads: Grads) -> WeightGrads:
    """Where the routed experts' weight gradients go: new tensors, entered in `grads`, or main_grad's accumulators."""
    grads.b_gate_up, grads.b_down = _like(tensors.b_gate_up, wants.b_gate_up), _like(tensors.b_down, wants.b_down)
    if main_grad is not None:
        targets = WeightGrads(main_grad.w_gate_up if wants.w_gate_up else None, main_grad.w_down if wants.w_down else None,
                              grads.b_gate_up, grads.b_down, accumulate=True)
    else:
        grads.w_gate_up, grads.w_down = _like(tensors.w_gate_up, wants.w_gate_up), _like(tensors.w_down, wants.w_down)
        targets = WeightGrads(grads.w_gate_up, grads.w_down, grads.b_gate_up, grads.b_down)
    return targets


class CpuEngine:
    """bf16, fp32, fp64 and fp16 on a CPU; P1, P2 and P4 hold to the bit for any thread count."""

    name = "cpu"

    def __init__(self, group: Any = None) -> None:
        """group: the ExpertGroup that a pass's rows travel in, None = this rank alone."""
        self._group = group

    def _row_journey(self, plan: RoutingPlan, T: int, K: int, num_waves: int) -> LocalRows | GroupRows:
        return LocalRows(plan, T, K) if self._group is None else GroupRows(plan, T, K, self._group, num_waves)

    def _waves(self, plan: RoutingPlan) -> list[Wave]:
        """The waves that all ranks make in a pass, as this rank's rows lie in each; one of all rows where the capacity is not bounded."""
        offsets, tokens = plan.expert_offsets.tolist(), plan.tokens_per_expert.tolist()
        if plan.wave_tiles is None:
            return split_into_waves(offsets, tokens, plan.num_rows, 1)
        by_rank = [(waves_needed(used, capacity), capacity) for used, capacity in plan.wave_tiles.tolist()]
        own, capacity = by_rank[self._group.rank]
        count = max(waves for waves, _ in by_rank)
        self._group.wave_counts.add(count, own)
        return split_into_waves(offsets, tokens, capacity * BLOCK_M, count)

    def build_plan(self, topk_ids: Tensor, num_experts: int) -> RoutingPlan:
        return RoutingPlan.build(topk_ids, num_experts)

    def forward(self, plan: RoutingPlan, tensors: MoETensors, options: PassOptions) -> tuple[Tensor, Saved]:
        """y (T, H) and what backward needs; see `protocol.Engine`. Raises NotImplementedError for a quantised precision."""
        _check_precision(options)
        math, x = TileMath(tensors.x.dtype), tensors.x
        (T, H), K = x.shape, tensors.topk_weights.shape[1]
        with torch.no_grad(), math.precision(), runtime.rows.borrow() as take:
            experts, shared = routed_experts(math, plan, tensors, options), SharedPass(math, tensors, options, take)
            waves = self._waves(plan)
            saved = Saved(z=x.new_empty(waves[0].capacity if options.save_for_backward else 0, 2 * experts.width),
                          shared_z=x.new_empty(T if options.save_for_backward else 0, shared.z_width))
            y_rows = take(waves[0].capacity, H, x.dtype)
            journey = self._row_journey(plan, T, K, len(waves))
            shared_tasks, shared_rows = shared.forward(saved.shared_z if options.save_for_backward else None)
            y_home: Tensor | None = None
            for wave in waves:
                (x_rows,), _ = journey.dispatch("dispatch", wave.index, [x])
                first = wave.index == 0                              # z of later waves would need room for the worst case: backward computes it again
                tasks = experts.of_wave(wave).forward_tasks(x_rows, y_rows, saved.z if options.save_for_backward and first else None)
                runtime.tiles.run(tasks + shared_tasks if first else tasks)
                (y_home,) = journey.home("combine", wave.index, y_rows)
            assert y_home is not None
            y = x.new_empty(T, H)
            runtime.tiles.run(combine_tasks(math, y, y_home, journey.slots, tensors.topk_weights, shared_rows))
        return y, saved

    def backward(self, plan: RoutingPlan, tensors: MoETensors, options: PassOptions, saved: Saved, dy: Tensor, wants: Wants,
                 main_grad: MainGrad | None) -> Grads:
        """Gradients that `wants` names for dy (T, H); see `protocol.Engine`."""
        _check_precision(options)
        math, x, grads = TileMath(tensors.x.dtype), tensors.x, Grads()
        (T, H), K = x.shape, tensors.topk_weights.shape[1]
        wants = _complete(wants, tensors)
        with torch.no_grad(), math.precision(), runtime.rows.borrow() as take:
            experts, shared = routed_experts(math, plan, tensors, options), SharedPass(math, tensors, options, take)
            want = ExpertWants(wants.x, wants.topk_weights, wants.w_gate_up, wants.w_down, wants.b_gate_up, wants.b_down)
            waves = self._waves(plan)
            R, several = waves[0].capacity, len(waves) > 1
            rows = experts.backward_rows(R, want, take)
            recompute = options.recompute is not None
            again = take(R, 2 * experts.width, x.dtype) if (several or recompute) and want.needs_z else None
            shared_z = take(T, shared.z_width, x.dtype) if recompute else saved.shared_z
            carried = experts.carried_sums(want, take) if several else None
            targets = routed_weight_grads(tensors, wants, main_grad, grads)
            journey = self._row_journey(plan, T, K, len(waves))
            runtime.tiles.run(shared.gate_tasks() + (shared.z_tasks(shared_z, wants) if recompute else []))
            tasks: list[Task] = []                                   # the last wave's weight gradients run beside the sums of dx
            for wave in waves:
                runtime.tiles.run(tasks)
                here, z = experts.of_wave(wave), saved.z if again is None or (wave.index == 0 and not recompute) else again
                by_token = [dy, x] if want.w_gate_up or z is again else [dy]
                sources, row_weights = journey.dispatch("backward dispatch", wave.index, by_token, tensors.topk_weights)
                dy_rows, x_rows = sources[0], sources[-1]            # where x did not travel nobody reads x_rows
                if z is again:
                    runtime.tiles.run(here.forward_tasks(x_rows, None, z))
                tiles = here.backward_tasks(dy_rows, row_weights, z, want, rows)
                runtime.tiles.run(tiles if wave.index else tiles + shared.backward_tiles(dy, shared_z, wants))
                tasks = here.weight_grad_tasks(x_rows, dy_rows, row_weights, rows, targets, carried)
                dx_home, d_weight_home = journey.home("backward combine", wave.index, rows.dx, rows.d_weight)
            shared_tasks, shared_rows = shared.backward_sums(dy, wants, grads)
            tasks += shared_tasks
            if dx_home is not None:
                grads.x = x.new_empty(T, H)
                tasks += combine_backward_tasks(math, grads.x, dx_home, journey.slots, shared_rows)
            if d_weight_home is not None:
                grads.topk_weights = slot_values(d_weight_home, journey.slots)
            runtime.tiles.run(tasks)
        return grads

    def router_scores(self, x: Tensor, weight: Tensor) -> Tensor:
        """Fixed-order logits: x (T, H), weight (E, H) any float dtypes -> (T, E) fp32 (fp64 for fp64 x)."""
        math = TileMath(torch.float64 if x.dtype == torch.float64 else torch.float32)
        with torch.no_grad(), math.precision():
            logits = x.new_empty(x.shape[0], weight.shape[0], dtype=math.acc)
            runtime.tiles.run(scores_tasks(math, x, _dense(weight, math), logits))
        return logits

    def router_scores_backward(self, x: Tensor, weight: Tensor, dlogits: Tensor, want_x: bool, want_weight: bool) -> tuple[Tensor | None, Tensor | None]:
        """dx (T, H) in x's dtype and dweight (E, H) in weight's, for dlogits (T, E); None where not wanted."""
        math = TileMath(torch.float64 if x.dtype == torch.float64 else torch.float32)
        dx, dweight = None, None
        with torch.no_grad(), math.precision():
            tasks: list[Task] = []
            if want_x:
                dx = x.new_empty(x.shape)
                tasks += scores_tasks(math, dlogits, _dense(weight, math), dx, flip=True)
            if want_weight:
                dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
                tasks += outer_tasks(math, Rows(dlogits), Rows(x), 0, x.shape[0], GradTarget(dweight))
            runtime.tiles.run(tasks)
        return dx, dweight


def _complete(wants: Wants, tensors: MoETensors) -> Wants:
    """`wants` with a triple for every shared expert and no wish for what is not there."""
    shared = [*wants.shared, *[(False, False, False)] * (len(tensors.shared) - len(wants.shared))]
    return replace(wants, b_gate_up=wants.b_gate_up and tensors.b_gate_up is not None, b_down=wants.b_down and tensors.b_down is not None,
                   shared=tuple((gate_up, down, gate and s.gate_weight is not None) for (gate_up, down, gate), s in zip(shared, tensors.shared)))


def _dense(weight: Tensor, math: TileMath) -> Tensor:
    return weight.to(math.acc).contiguous()


def _check_precision(options: PassOptions) -> None:
    if options.precision != "bf16":
        raise NotImplementedError(f"precision={options.precision!r} is not supported on a CPU; use 'bf16', which computes in x's dtype")
