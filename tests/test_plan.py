"""RoutingPlan: the worked examples of its docstrings, its properties on random routes, and the same rows for every number of ranks."""
from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mok.plan import RoutingPlan, count_ids, empty_plan_like, expert_owners, experts_of_rank, plan_capacity


def reference_rows(topk_ids: torch.Tensor, num_experts: int, block_m: int) -> tuple[dict[int, int], list[int]]:
    """slot -> row and the counts, by the definition: walk the experts, then the slots in order. Plain Python, shares nothing with plan.py."""
    flat = topk_ids.flatten().tolist()
    rows, counts, row = {}, [], 0
    for e in range(num_experts):
        slots = [slot for slot, chosen in enumerate(flat) if chosen == e]
        rows.update({slot: row + i for i, slot in enumerate(slots)})
        counts.append(len(slots))
        row += -(-len(slots) // block_m) * block_m
    return rows, counts


routes = st.tuples(st.integers(0, 40), st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**31)).map(
    lambda a: (torch.randint(-1, a[2], (a[0], a[1]), generator=torch.Generator().manual_seed(a[3])), a[2]))


def test_worked_example_of_the_docstring():
    plan = RoutingPlan.build(torch.tensor([[2, 0], [0, -1]]), 3, block_m=4)
    assert plan.row_to_slot.tolist() == [1, 2, -1, -1, 0, -1] + [-1] * 10
    assert plan.row_to_rank.tolist() == [0, 0, -1, -1, 0, -1] + [-1] * 10
    assert plan.slot_to_row.tolist() == [4, 0, 1, -1]
    assert plan.tile_to_expert.tolist() == [0, 2, -1, -1]
    assert plan.expert_offsets.tolist() == [0, 4, 4, 8]
    assert plan.tokens_per_expert.tolist() == [2, 0, 1]
    assert plan.num_tiles.tolist() == [2]


def test_small_worked_examples():
    assert [experts_of_rank(5, 2, r) for r in range(2)] == [(0, 3), (3, 2)]
    assert expert_owners(5, 2, torch.device("cpu")).tolist() == [0, 0, 0, 1, 1]
    assert plan_capacity(3, 4, 4) == 12
    assert count_ids(torch.tensor([2, 0, 0, 3]), 3).tolist() == [2, 0, 1]


@settings(max_examples=150, deadline=None)
@given(routes, st.sampled_from([1, 4, 128]), st.sampled_from([torch.int32, torch.int64]))
def test_properties_on_random_routes(case, block_m, dtype):
    topk_ids, E = case
    plan = RoutingPlan.build(topk_ids.to(dtype), E, block_m=block_m)
    rows, counts = reference_rows(topk_ids, E, block_m)
    slots = topk_ids.numel()
    assert plan.slot_to_row.tolist() == [rows.get(slot, -1) for slot in range(slots)]          # exact rows; -1 routes absent
    inverse = {row: slot for slot, row in rows.items()}
    assert len(inverse) == len(rows)                                                          # a bijection onto the valid rows
    assert plan.row_to_slot.tolist() == [inverse.get(row, -1) for row in range(plan.num_rows)]
    assert plan.row_to_rank.tolist() == [0 if row in inverse else -1 for row in range(plan.num_rows)]
    assert plan.tokens_per_expert.tolist() == counts
    offsets = plan.expert_offsets.tolist()
    assert offsets[0] == 0 and all(offset % block_m == 0 for offset in offsets) and plan.num_tiles.item() * block_m == offsets[-1]
    tiles = [e for e in range(E) for _ in range((offsets[e + 1] - offsets[e]) // block_m)]
    assert plan.tile_to_expert.tolist() == tiles + [-1] * (plan.num_rows // block_m - len(tiles))
    assert offsets[-1] <= plan.num_rows == plan_capacity(slots, E, block_m)


@settings(max_examples=80, deadline=None)
@given(routes, st.integers(1, 4), st.randoms(use_true_random=False), st.sampled_from([4, 128]))
def test_every_number_of_ranks_gives_the_same_rows(case, W, random, block_m):
    """The ranks' plans, laid side by side, are the plan of one rank over the same global tokens."""
    topk_ids, E = case
    if W > E:
        return
    T, K = topk_ids.shape
    cuts = sorted(random.randint(0, T) for _ in range(W - 1))                                 # unequal T, zero included
    shards = [topk_ids[a:b] for a, b in zip([0, *cuts], [*cuts, T])]
    counts = torch.stack([count_ids(shard.flatten().long(), E) for shard in shards])
    whole = RoutingPlan.build(topk_ids, E, block_m=block_m)
    plans = [RoutingPlan.build(shard, E, rank=r, counts=counts, total_tokens=T, block_m=block_m) for r, shard in enumerate(shards)]
    owners = expert_owners(E, W, topk_ids.device)
    for r, (plan, start) in enumerate(zip(plans, [0, *cuts])):
        first, num = experts_of_rank(E, W, r)
        base = int(whole.expert_offsets[first])
        used = int(whole.expert_offsets[first + num]) - base
        assert torch.equal(plan.tokens_per_expert, whole.tokens_per_expert[first:first + num])
        assert torch.equal(plan.expert_offsets, whole.expert_offsets[first:first + num + 1] - base)
        assert plan.num_rows == plan_capacity(T * K, num, block_m) and int(plan.num_tiles) * block_m == used
        # rows: same source tokens in the same order; this rank's own slots are known, other ranks' are left to travel
        whole_slot = whole.row_to_slot[base:base + used]
        whole_rank = torch.bucketize(whole_slot // K, torch.tensor(cuts, dtype=torch.int32), right=True).to(torch.int32)
        whole_rank[whole_slot < 0] = -1
        assert torch.equal(plan.row_to_rank[:used], whole_rank) and (plan.row_to_rank[used:] == -1).all()
        own = torch.where(whole_rank == r, whole_slot - start * K, -1)
        assert torch.equal(plan.row_to_slot[:used], own.to(torch.int32)) and (plan.row_to_slot[used:] == -1).all()
        # slots: the row in the owner's buffer
        ids = shards[r].flatten().long()
        shift = torch.tensor([int(whole.expert_offsets[experts_of_rank(E, W, o)[0]]) for o in range(W)])
        expected = whole.slot_to_row[start * K:(start + shards[r].shape[0]) * K].long()
        expected = torch.where(ids >= 0, expected - shift[owners[ids.clamp(min=0)]], -1)
        assert torch.equal(plan.slot_to_row.long(), expected)
        assert torch.equal(plan.slot_to_rank.long(), torch.where(ids >= 0, owners[ids.clamp(min=0)], -1))


def test_ids_out_of_range_count_as_no_expert():
    wild = torch.tensor([[5, 0], [-2, 2**31 - 1], [1, -1]], dtype=torch.int32)
    tame = torch.tensor([[-1, 0], [-1, -1], [1, -1]])
    for a, b in zip(RoutingPlan.build(wild, 3).tensors(), RoutingPlan.build(tame, 3).tensors()):
        assert torch.equal(a, b)


def test_offsets_beyond_32_bits_of_elements():
    """T*K*H of the last row passes 2^31 elements; rows and slots fit int32 and every offset that a kernel multiplies is taken in 64 bits."""
    T, K, E, H = 37450, 8, 8, 7168
    plan = RoutingPlan.build(torch.full((T, K), 7), E)
    last = plan.slot_to_row[-1]
    assert last == T * K - 1 and plan.expert_offsets.dtype == torch.int64
    assert int(plan.expert_offsets[-1]) * H > 2**31 and int(last) * H > 2**31


def test_more_rows_than_int32_can_name_are_refused():
    ids = torch.zeros(1, 1, dtype=torch.int32).expand(2**28, 8)     # one element of memory, 2^31 slots
    with pytest.raises(ValueError, match=r"topk_ids\.shape"):
        RoutingPlan.build(ids, 4)


def test_fewer_experts_than_ranks_is_refused():
    with pytest.raises(ValueError, match="num_experts=1"):
        RoutingPlan.build(torch.zeros(2, 1, dtype=torch.int64), 1, rank=0, counts=torch.zeros(2, 1), total_tokens=2)


@pytest.mark.parametrize("T", [0, 1, 7])
def test_empty_plan_has_the_shapes_and_dtypes_of_a_built_one(T):
    ids = torch.randint(-1, 5, (T, 3))
    for a, b in zip(RoutingPlan.build(ids, 5).tensors(), empty_plan_like(ids, 5, T).tensors()):
        assert a.shape == b.shape and a.dtype == b.dtype


def test_building_copies_nothing_to_the_host():
    """On the meta device any read of a value raises, so a plan that builds there needs no device-to-host copy."""
    ids = torch.empty(6, 2, dtype=torch.int64, device="meta")
    assert RoutingPlan.build(ids, 4).num_rows == plan_capacity(12, 4)
    counts = torch.empty(2, 4, dtype=torch.int64, device="meta")
    assert RoutingPlan.build(ids, 4, rank=1, counts=counts, total_tokens=9).num_rows == plan_capacity(18, 2)
