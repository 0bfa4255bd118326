"""Ranks of a fused group for tests: several of them in one process, each with buffers and a stream of its own, and what one rank alone computes."""
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from oracle import Case, named
from torch import Tensor

from mok.engines.protocol import Grads, MainGrad, MoETensors, PassOptions, Saved, Wants
from mok.plan import RoutingPlan, count_ids, experts_of_rank

BF16 = torch.bfloat16


class BuffersInOneProcess:
    """What PeerMemory gives one rank, for ranks of one process on one device: every buffer is an ordinary tensor."""

    def __init__(self, rank: int, everybody: list[dict[str, Tensor]]) -> None:
        self.rank, self.world_size = rank, len(everybody)
        self.device = everybody[0]["flags"].device
        self.local = everybody[rank]
        self.peers = {name: [buffers[name] for buffers in everybody] for name in self.local}
        self.table = {name: torch.tensor([t.data_ptr() for t in tensors], device=self.device) for name, tensors in self.peers.items()}


def ranks_in_one_process(W: int, *, num_experts: int, max_tokens: int, hidden_size: int, top_k: int, timeout_s: float = 2.0,
                         capacity_factor: float | None = None):
    """W FusedGroups that share this process's device; their kernels run at once on streams of their own."""
    from mok.engines.hopper.expert_parallel import FusedGroup, buffer_sizes

    sizes = buffer_sizes(max_tokens, hidden_size, top_k)
    everybody = [{name: torch.zeros(size, dtype=torch.uint8, device="cuda") for name, size in sizes.items()} for _ in range(W)]
    blocks = torch.cuda.get_device_properties(0).multi_processor_count // W
    groups = [FusedGroup(BuffersInOneProcess(r, everybody), r, W, num_experts=num_experts, max_tokens=max_tokens, hidden_size=hidden_size, top_k=top_k,
                         timeout_s=timeout_s, blocks=blocks, cooperative=False, capacity_factor=capacity_factor) for r in range(W)]
    torch.cuda.synchronize()
    return groups


@dataclass
class Share:
    """One rank's part of a problem."""
    ids: Tensor
    tensors: MoETensors
    dy: Tensor


def shares(case: Case, cuts: list[int], num_experts: int) -> list[Share]:
    """The problem cut into ranks: tokens cuts[r]..cuts[r + 1], experts in contiguous blocks."""
    W, t, parts = len(cuts) - 1, case.tensors, []
    for r in range(W):
        tokens = slice(cuts[r], cuts[r + 1])
        first, count = experts_of_rank(num_experts, W, r)
        experts = [None if w is None else w[first:first + count] for w in (t.w_gate_up, t.w_down, t.b_gate_up, t.b_down)]
        parts.append(Share(case.topk_ids[tokens], MoETensors(t.x[tokens], t.topk_weights[tokens], *experts, t.shared), case.dy[tokens]))
    return parts


class Streams:
    """One stream a rank, whose allocator already holds memory: allocating may wait for kernels, and these wait for one another."""

    def __init__(self, W: int, megabytes: int = 256) -> None:
        self.of_rank = [torch.cuda.Stream() for _ in range(W)]
        self.megabytes = megabytes
        self.fill()

    def fill(self) -> None:
        """Again, after something has emptied the cache."""
        for stream in self.of_rank:
            with torch.cuda.stream(stream):
                blocks = [torch.empty(size << 20, dtype=torch.uint8, device="cuda") for size in (self.megabytes, *[1] * 64)]
                del blocks


def run_ranks(groups, streams: Streams, parts: list[Share], options: PassOptions, signature: str = "test",
              order: list[int] | None = None) -> list[tuple[RoutingPlan, Tensor, Saved]]:
    """Plan and forward of every rank, launched in `order`; waits for all."""
    torch.cuda.synchronize()
    order = list(range(len(groups))) if order is None else order
    plans, results = {}, {}
    for r in order:
        with torch.cuda.stream(streams.of_rank[r]):
            plans[r] = groups[r].build_plan(parts[r].ids, parts[r].tensors.w_down.shape[0], signature)
    for r in order:
        with torch.cuda.stream(streams.of_rank[r]):
            results[r] = groups[r].forward(plans[r], parts[r].tensors, options)
    torch.cuda.synchronize()
    return [(plans[r], *results[r]) for r in range(len(groups))]


def run_backward(groups, streams: Streams, parts: list[Share], results, options: PassOptions, wants: Wants, main_grads: list[MainGrad] | None = None,
                 order: list[int] | None = None) -> list[Grads]:
    """Backward of every rank after `run_ranks` gave `results`, launched in `order`; waits for all."""
    grads = {}
    for r in list(range(len(groups))) if order is None else order:
        with torch.cuda.stream(streams.of_rank[r]):
            plan, _, saved = results[r]
            grads[r] = groups[r].backward(plan, parts[r].tensors, options, saved, parts[r].dy, wants, main_grads[r] if main_grads else None)
    torch.cuda.synchronize()
    for group in groups:
        group.raise_if_dead()
    return [grads[r] for r in range(len(groups))]


def assert_gradients_equal_one_rank(case: Case, parts: list[Share], grads: list[Grads], alone, wants: Wants) -> None:
    """P3: gradients of the tokens side by side and of the experts one after the other have the bits of one rank's; a shared expert's are those that
    one rank has for this rank's tokens alone."""
    from mok.engines.hopper.engine import HopperEngine

    plan, _, saved = alone
    engine = HopperEngine()
    whole = named(engine.backward(plan, case.tensors, case.options, saved, case.dy, wants, None))
    for name, want in whole.items():
        if want is not None and not name.startswith("shared"):
            joined = torch.cat([named(grad)[name] for grad in grads])
            assert joined.dtype == want.dtype and same_bits(joined, want), differences(name, joined, want)
        elif not name.startswith("shared"):
            assert all(named(grad)[name] is None for grad in grads), f"{name} was not wanted"
    for r, (part, grad) in enumerate(zip(parts, grads, strict=True)):
        if not case.tensors.shared:
            continue
        own = replace(case, topk_ids=part.ids, dy=part.dy, tensors=replace(case.tensors, x=part.tensors.x, topk_weights=part.tensors.topk_weights.clone()))
        own_plan, _, own_saved = one_rank(own)
        wanted = named(engine.backward(own_plan, own.tensors, own.options, own_saved, own.dy, wants, None))
        for name, want in wanted.items():
            if name.startswith("shared"):
                found = named(grad)[name]
                assert (found is None) == (want is None) and (want is None or same_bits(found, want)), f"{name} of rank {r} differs"
    torch.cuda.synchronize()


def same_bits(a: Tensor, b: Tensor) -> bool:
    kind = torch.int16 if a.dtype == BF16 else torch.int32
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def differences(name: str, a: Tensor, b: Tensor) -> str:
    where = torch.nonzero((a != b).reshape(-1, a.shape[-1]))
    return (f"{name}: {where.shape[0]} of {a.numel()} elements differ ({int(torch.isnan(a).sum())} NaN), rows {where[:, 0].unique()[:6].tolist()}.. "
            f"of {a.reshape(-1, a.shape[-1]).shape[0]}, columns {where[:, 1].unique()[:6].tolist()}..")


def one_rank(case: Case) -> tuple[RoutingPlan, Tensor, Saved]:
    """The same problem by the engine of one rank."""
    from mok.engines.hopper.engine import HopperEngine

    engine = HopperEngine()
    plan = engine.build_plan(case.topk_ids, case.num_experts)
    y, saved = engine.forward(plan, case.tensors, case.options)
    torch.cuda.synchronize()
    return plan, y, saved


def group_plans(parts: list[Share], num_experts: int, max_tokens: int) -> list[RoutingPlan]:
    """What the process-group path builds on each rank, on the CPU: counts from the handshake, slots that travel with the rows."""
    counts = torch.stack([count_ids(part.ids.reshape(-1).long().cpu(), num_experts) for part in parts])
    plans = [RoutingPlan.build(part.ids.cpu(), num_experts, rank=r, counts=counts, total_tokens=len(parts) * max_tokens) for r, part in enumerate(parts)]
    for source, plan in enumerate(plans):
        assert plan.slot_to_rank is not None
        for owner in range(len(parts)):
            slots = torch.nonzero(plan.slot_to_rank == owner).flatten()
            plans[owner].row_to_slot[plan.slot_to_row[slots].long()] = slots.to(torch.int32)
            assert (plans[owner].row_to_rank[plan.slot_to_row[slots].long()] == source).all()
    return plans


def assert_equal_to_one_rank(case: Case, results, alone) -> None:
    """P3: y of the ranks side by side, and z of every valid row (of the first wave's, where buffers are bounded), have the bits of one rank's."""
    plan, y, saved = alone
    joined = torch.cat([result[1] for result in results])
    assert torch.equal(joined.view(torch.int16), y.view(torch.int16)), f"y differs in {(joined != y).any(1).sum()} of {y.shape[0]} tokens"
    if not case.options.save_for_backward:
        return
    begin = 0
    for own, _, own_saved in results:
        rows = int(own.expert_offsets[-1])
        kept = min(rows, own_saved.z.shape[0])
        valid = own.row_to_slot[:kept] >= 0
        ours, theirs = own_saved.z[:kept][valid], saved.z[begin:begin + kept][valid]
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16)), f"z differs in {(ours != theirs).any(1).sum()} of {int(valid.sum())} rows"
        begin += rows
    assert int(plan.expert_offsets[-1]) == begin


def with_options(case: Case, **changes) -> Case:
    return replace(case, options=replace(case.options, **changes))
