"""Backward's roles under random orders: launches end, whatever is wanted and however short their tasks; and faults planted in the source are found."""
from __future__ import annotations

import random

import pytest
from role_simulation import launch

SHARED = 7 << 8
SHAPES = {
    "tasks of one k-step, many for each CTA": dict(H=64, I=512, T=1024, tokens=[250, 300, 0, 260, 129, 85], wants=15, group=4),
    "as many k-steps as stages": dict(H=256, I=256, T=500, tokens=[120, 126, 65, 260], wants=63 | SHARED, group=3, shared=(336,), gated=1),
    "tails, two shared experts": dict(H=528, I=592, T=200, tokens=[100, 64, 1, 0, 200], wants=15 | SHARED | SHARED << 3, group=2, shared=(80, 272), gated=2),
    "main_grad": dict(H=128, I=128, T=300, tokens=[300, 0, 65, 200], wants=12, group=2, into_main_grad=True),
    "no route": dict(H=64, I=64, T=200, tokens=[0, 0], wants=15 | SHARED, group=8, shared=(96,), gated=1),
}


@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("name", SHAPES)
def test_launches_end(name, recompute):
    for seed, ctas in enumerate((1, 2, 5)):
        assert launch(seed, ctas, recompute, **SHAPES[name]) == []
        assert launch(seed, ctas, recompute, **SHAPES[name], several_ranks=True) == []


@pytest.mark.parametrize("name", SHAPES)
def test_waves_end(name):
    """Experts cut by one boundary and by several: sums that are left and taken up have no store step; z is made again from the second wave on."""
    for seed, (ctas, tiles) in enumerate(((2, 1), (3, 2))):
        assert launch(seed, ctas, False, **SHAPES[name], wave_tiles=tiles, several_ranks=True) == []


def test_random_launches_end():
    """Sizes, wanted gradients, groups and staggers drawn at random; rows of an expert often end inside the first half of a tile."""
    draw = random.Random(7)
    for seed in range(12):
        experts, count = draw.choice((1, 3, 5)), draw.choice((0, 1, 2))
        wants = draw.choice((63, 15, 1, 2, 4, 8, 16)) | (draw.choice((0, 7, 1, 2, 4)) << 8 if count else 0) | (draw.choice((0, 7, 2)) << 11 if count > 1 else 0)
        shape = dict(H=draw.choice((16, 64, 256, 320)), I=draw.choice((16, 128, 272)), T=draw.choice((1, 130, 300)), wants=wants, group=draw.choice((1, 2, 7)),
                     tokens=[draw.choice((0, 1, 64, 65, 128, 300)) for _ in range(experts)], shared=[draw.choice((16, 80, 272)) for _ in range(count)],
                     gated=draw.randrange(1 << count), into_main_grad=draw.random() < 0.3, stagger=draw.choice((0, 1, 1, 3)))
        ctas, recompute, tiles, ranks = draw.choice((1, 2, 4)), draw.random() < 0.7, draw.choice((None, 1, 2, 3)), draw.random() < 0.5
        assert launch(seed, ctas, recompute, **shape, wave_tiles=tiles, several_ranks=ranks) == [], f"{seed=} {ctas=} {recompute=} {tiles=} {ranks=} {shape}"


FAULTS = {
    "a sent result's stage is not given back": ("    mbarrier.arrive(out_1.empty)\n    mbarrier.arrive(pipe.load_empty.index(stage), count=2)\n\n\n@gluon.jit\n"
                                                "def _store_z_step", "    mbarrier.arrive(out_1.empty)\n\n\n@gluon.jit\ndef _store_z_step"),
    "unfinished sums have a store step": ("        weight_result = weight_result & ((bits & TASK_UNFINISHED) == 0)\n", "        pass\n"),
    "an idle consumer leaves a Z task's store step out": ("        stores = stores | (kind == Z)\n", "        stores = stores | (kind == DW_UP)\n"),
    "no store step is handed over for Z": ("        row_result = (kind == DX) | (kind == Z)\n", "        row_result = kind == DX\n"),
    "Z is not published by tile": ("            add_release(z_done(s, flags) + 1 + counter_of(s, slot, tile, flags.capacity), 1)\n", ""),
    "consumer 1 staggers in tasks shorter than the ring": ("        staggered = steps >= NUM_STAGES\n", "        staggered = steps >= 1\n"),
    "a store step's stage is given back for one consumer": ("    mbarrier.arrive(out_1.empty)\n    mbarrier.arrive(pipe.load_empty.index(stage), count=2)\n",
                                                            "    mbarrier.arrive(out_1.empty)\n    mbarrier.arrive(pipe.load_empty.index(stage))\n"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name):
    right, wrong = FAULTS[name]
    planted = []

    def mutate(text: str) -> str:
        planted.append(right in text)
        return text.replace(right, wrong)

    shape, tiles = SHAPES["tasks of one k-step, many for each CTA"], 3 if "unfinished" in name else None
    assert any(launch(seed, 2, True, **{**shape, "I": 256}, mutate=mutate, wave_tiles=tiles, several_ranks="sent" in name) for seed in range(6))
    assert any(planted)
