"""The several-rank part of the forward kernel, its own source, run as Python: ranks in threads, GEMMs stood in for, faults planted and found.

Each rank runs an exchange and a launch several times in a row, free to run ahead of the others, its roles at random speeds. What is compared: the
list of everybody's ids, every row in the ring, and each token's sum to the bit.
"""
from __future__ import annotations

import itertools
import random
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from device_interpreter import Interrupted, Memory, load, round_bf16

from mok.fabric.flag_page import MAX_RANKS, PAGE_WORDS, page_bytes
from mok.plan import RoutingPlan, count_ids, experts_of_rank, plan_capacity

TILE, H, GRID, CAPACITY, RING = 128, 272, 2, 64, 2          # H: a tail, and two column tiles, so that two down tasks finish a row tile
SECONDS = 40.0


@dataclass
class World:
    """W ranks and what they compute: token counts of each launch and rank, routes, weights; expert e multiplies a row by matrix e."""
    W: int
    E: int
    K: int
    tokens: list[list[int]]                                  # [launch][rank]
    seed: int = 0
    shared: bool = False
    skew: bool = False
    max_tokens: int = 0
    ids: dict = field(default_factory=dict)
    x: dict = field(default_factory=dict)
    weights: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        g = np.random.default_rng(self.seed)
        self.max_tokens = max(max(counts) for counts in self.tokens) + 3
        self.matrix = g.standard_normal((self.E + 1, H, H)).astype(np.float32)       # the last one is the shared expert's
        for n, counts in enumerate(self.tokens):
            for r, T in enumerate(counts):
                ids = g.integers(-1, self.E, (T, self.K), dtype=np.int32)
                ids[ids == 1] = 0                                                    # an empty expert
                self.ids[n, r] = np.zeros_like(ids) if self.skew else ids
                self.x[n, r] = round_bf16(g.standard_normal((T, H)).astype(np.float32))
                self.weights[n, r] = g.random((T, self.K), dtype=np.float32)

    def result(self, expert: int, row: np.ndarray) -> np.ndarray:
        return round_bf16((row[None, :] @ self.matrix[expert])[0])

    def expected(self, n: int, r: int) -> np.ndarray:
        """y (T, H): fma over the routes in order from +0, then the shared expert, one rounding (DESIGN 2)."""
        out = np.zeros_like(self.x[n, r])
        for t, row in enumerate(self.x[n, r]):
            acc = np.zeros(H, np.float32)
            terms = [(self.result(e, row), w) for e, w in zip(self.ids[n, r][t], self.weights[n, r][t], strict=True) if e >= 0]
            for y, w in [*terms, *([(self.result(self.E, row), np.float32(1))] if self.shared else [])]:
                acc = (y.astype(np.float64) * np.float64(w) + acc).astype(np.float32)
            out[t] = round_bf16(acc)
        return out

    def plans(self, n: int) -> list[RoutingPlan]:
        ids = [torch.from_numpy(self.ids[n, r]) for r in range(self.W)]
        counts = torch.stack([count_ids(i.reshape(-1).long(), self.E) for i in ids])
        plans = [RoutingPlan.build(i, self.E, rank=r, counts=counts, total_tokens=self.W * self.max_tokens) for r, i in enumerate(ids)]
        for plan in plans:
            for slot in torch.nonzero(plan.slot_to_row >= 0).flatten().tolist():
                plans[plan.slot_to_rank[slot]].row_to_slot[plan.slot_to_row[slot]] = slot
        return plans


class Simulation:
    """Runs a World's launches; `absent` (launch, rank): that rank stops before it. `delays` [rank][launch]: seconds that its host sleeps first."""

    def __init__(self, world: World, mutations: dict | None = None, absent: tuple[int, int] | None = None, delays: dict | None = None,
                 signatures: dict | None = None, limit_ms: int = 60_000, launch: bool = True,
                 slow: float = 0.0) -> None:
        self.slow = slow                                     # seconds that CTAs after the first, and every GEMM, come late
        self.launch = launch                                 # False: exchanges alone, with no launch between that would order them
        self.world, self.absent, self.delays, self.signatures, self.limit_ms = world, absent, delays or {}, signatures or {}, limit_ms
        self.memory, self.reports, self.problems = Memory(), [], []
        self.memory.deadline = time.monotonic() + SECONDS
        self.random = random.Random(world.seed)
        self.gl, self.modules = load(self.memory, self.reports, lambda: time.sleep(self.random.random() ** 4 * 3e-3), mutations)
        self.out: dict = {}
        W, M, K = world.W, world.max_tokens, world.K
        allocate, words = self.memory.allocate, page_bytes(M) // 4
        self.pages = [allocate(np.zeros(words, np.int32), "i32") for _ in range(W)]
        ids_words = self.modules["expert_parallel_plan"].ids_words(M, K)
        self.ids = [allocate(np.full(ids_words, -7, np.int32), "i32") for _ in range(W)]
        self.x = [allocate(np.full(M * H, np.nan, np.float32), "bf16") for _ in range(W)]
        self.slots = [allocate(np.full(M * K * H, np.nan, np.float32), "bf16") for _ in range(W)]
        self.controls = [self._control(r) for r in range(W)]
        self.everybody_of = [np.full(W * M * K, -9, np.int32) for _ in range(W)]

    def _control(self, rank: int) -> tuple[np.ndarray, object]:
        peers = self.modules["peers"]
        table = np.zeros(peers.TABLE_WORDS, np.int64)
        table[:5] = rank, self.world.W, int(self.pages[rank].a), int(self.x[rank].a) >> 4, int(self.slots[rank].a) >> 4
        for place, pointers in enumerate((self.pages, self.ids, self.x, self.slots)):
            shift = 4 if place >= 2 else 0
            begin = 8 + place * MAX_RANKS
            table[begin:begin + self.world.W] = [int(p.a) >> shift for p in pointers]
        words = np.zeros(16 + 16 + 5 * CAPACITY, np.int32)
        words[3], words[6] = 2 * self.limit_ms, self.limit_ms
        words[8:10].view(np.int64)[0] = int(self.memory.allocate(table, "i64").a)
        return words, self.memory.allocate(words, "i32")

    def run(self) -> None:
        ranks = [threading.Thread(target=self._rank, args=(r,), daemon=True) for r in range(self.world.W)]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join(SECONDS + 5)
        if any(thread.is_alive() for thread in ranks):
            self.problems.append("a rank hangs")

    def _rank(self, rank: int) -> None:
        for n in range(len(self.world.tokens)):
            time.sleep(self.delays.get((n, rank), 0))
            if self.absent == (n, rank) or self.problems:
                return
            self._together(rank, [(p, GRID, self._exchange, (n, rank)) for p in range(GRID)])
            whole = np.full((self.world.W, self.world.max_tokens, self.world.K), -1, np.int32)
            for r, T in enumerate(self.world.tokens[n]):
                whole[r, :T] = self.world.ids[n, r]
            if not self.reports and not np.array_equal(self.everybody_of[rank], whole.reshape(-1)):
                self.problems.append(f"launch {n}, rank {rank}: the list of everybody's ids is wrong")
            if self.launch:
                self._launch(n, rank)

    def _together(self, rank: int, roles: list) -> None:
        """Run (program, programs, function, arguments) each in a thread; wait for all."""
        def body(program: int, programs: int, function, arguments) -> None:
            local = self.gl.local
            local.program, local.programs, local.rank, local.reason = program, programs, rank, 1
            try:
                function(*arguments)
            except Interrupted:
                self.problems.append("out of time: a deadlock")
            except BaseException as error:
                self.problems.append(f"rank {rank}: {type(error).__name__}: {error}")
        threads = [threading.Thread(target=body, args=role, daemon=True) for role in roles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _exchange(self, n: int, rank: int) -> None:
        time.sleep(self.slow * (self.gl.local.program > 0))
        ids, K = self.world.ids[n, rank], self.world.K
        block, everybody = self.gl.cast, self.everybody_of[rank]
        signature = self.signatures.get((n, rank), 17)
        with self.memory.lock:
            pointer = self.memory.allocate(ids.reshape(-1), "i32")
            target = self.memory.allocate(everybody, "i32")
            error = self.memory.allocate(np.zeros(1, np.int64), "i64")
        scalars = [block(v, "i32") for v in (ids.size, K, self.world.E, K, 1, self.world.max_tokens * K, signature)]
        self.modules["expert_parallel_plan"]._exchange_ids_kernel(pointer, *scalars, error, target, self.controls[rank][1], 2048, 1)

    def _launch(self, n: int, rank: int) -> None:
        world, gl, m = self.world, self.gl, self.modules
        T, K, plan = world.tokens[n][rank], world.K, world.plans(n)[rank]
        count = int(world.shared)
        rows = plan_capacity(world.W * world.max_tokens * K, experts_of_rank(world.E, world.W, rank)[1])
        token_rows = count * -(-T // TILE) * TILE
        words, control = self.controls[rank]
        words[16:] = 0
        arrays = {"out": np.full(T * H, np.nan, np.float32), "results": np.full((rows + token_rows) * H, np.nan, np.float32),
                  "ring": np.full(RING * TILE * H, np.nan, np.float32), "order": np.full(max(T, 1), -1, np.int32)}
        to = {"row_to_slot": plan.row_to_slot, "slot_to_row": plan.slot_to_row, "row_to_rank": plan.row_to_rank}
        with self.memory.lock:
            p = {name: self.memory.allocate(values, "i32" if name == "order" else "bf16") for name, values in arrays.items()}
            p |= {name: self.memory.allocate(values.numpy(), "i32") for name, values in to.items()}
            p["x"] = self.memory.allocate(world.x[n, rank].reshape(-1), "bf16")
            p["weights"] = self.memory.allocate(world.weights[n, rank].reshape(-1), "f32")
        number = {name: gl.cast(v, "i32") for name, v in {"H": H, "I": TILE, "T": T, "count": count, "tiles": int(plan.num_tiles), "1": 1, "ring": RING,
                                                         "K": K, "stride": H // 8, "rows": rows, "epoch": n + 1, "0": 0}.items()}
        s = m["tasks"].Schedule(*(number[k] for k in ("H", "I", "I", "I", "T", "count", "tiles", "1", "ring", "ring")))
        t = m["move"].Tokens(p["out"], p["results"], p["row_to_slot"], p["slot_to_row"], p["weights"], p["order"], p["x"], number["stride"], p["x"], p["x"],
                             number["0"], number["rows"], number["K"], p["row_to_rank"], number["epoch"])
        flags = m["gemm"].Flags(control, control + 16, gl.cast(CAPACITY, "i32"), gl.cast(16 + 2 * CAPACITY + count * -(-T // TILE), "i32"))
        multiplied = threading.Event()
        gemm = (0, GRID, self._gemm, (n, rank, plan, flags, arrays, rows, multiplied))
        consumers = [(c, GRID, self._consumer, (s, t, flags, wg, multiplied)) for c in range(GRID) for wg in range(2)]
        movers = [(c, GRID, m["expert_parallel_move"].group_mover, (s, flags, t, p["ring"], 1, 1, 2, 0, 1)) for c in range(GRID)]
        self._together(rank, [gemm, *consumers, *movers])
        if words[2]:                                                          # aborted: what _poison_after_abort and tell_abort do
            arrays["out"][:] = np.nan
            gl.local.rank, gl.local.reason = rank, self.reports[0][1]
            m["peers"].tell_abort(control)
        self.out[n, rank] = arrays["out"].reshape(T, H)

    def _consumer(self, s, t, flags, wg: int, multiplied: threading.Event) -> None:
        m = self.modules
        time.sleep(self.slow * (self.gl.local.program > 0))
        if wg == 1:
            m["expert_parallel_move"].stage_tokens(s, t, flags, 1, 1)
            m["move"].list_tokens(s, t, flags, 4, 1)
        multiplied.wait()                                                     # consumers sum after their last GEMM task
        m["move"].finish_combine(s, t, flags, 2, 4, 1, 1)

    def _gemm(self, n: int, rank: int, plan: RoutingPlan, flags, arrays: dict, rows: int, multiplied: threading.Event) -> None:
        """Producer, consumers' multiplies and storer of all CTAs: waits and counters as theirs, tiles in order; row by row, so that bits do not move."""
        world, m, columns = self.world, self.modules, -(-H // 256)
        first = experts_of_rank(world.E, world.W, rank)[0]
        ring, results = arrays["ring"].reshape(-1, H), arrays["results"].reshape(-1, H)
        try:
            for tile in range(-(-world.tokens[n][rank] // TILE) if world.shared else 0):
                for row, x in enumerate(world.x[n, rank][tile * TILE:(tile + 1) * TILE]):
                    results[rows + tile * TILE + row] = world.result(world.E, x)
                self.gl.atomic_add(m["gemm"].results_ready(flags) + CAPACITY + tile, columns)
            for tile in range(int(plan.num_tiles)):
                m["sync"].wait_at_least(m["gemm"].rows_ready(flags) + tile, 8, flags.control, 1, tile)
                time.sleep(self.slow)
                part = ring[tile % RING * TILE:(tile % RING + 1) * TILE].copy()
                valid = plan.row_to_slot[tile * TILE:(tile + 1) * TILE].numpy() >= 0
                if not self.reports and part[~valid].any():
                    self.problems.append(f"launch {n}, rank {rank}, tile {tile}: a padding row is not zero")
                self.gl.atomic_add(m["gemm"].hidden_ready(flags) + tile, 1)
                m["sync"].nap(tile, 1)
                for row in np.nonzero(valid)[0]:
                    results[tile * TILE + row] = world.result(first + int(plan.tile_to_expert[tile]), part[row])
                for _ in range(columns):
                    self.gl.atomic_add(m["gemm"].results_ready(flags) + tile, 1)
        finally:
            multiplied.set()

    def check(self) -> None:
        """Everything ran, nothing was reported, and every sum has the expected bits."""
        assert not self.problems, self.problems[0]
        assert not self.reports, self.reports
        for (n, r), out in self.out.items():
            want = self.world.expected(n, r)
            assert np.array_equal(out.view(np.int32), want.view(np.int32)), f"launch {n}, rank {r}: {(out != want).any(1).sum()} of {len(out)} tokens differ"
        assert len(self.out) == self.world.W * len(self.world.tokens) * self.launch


WORLDS = {
    "one rank": lambda: World(1, 3, 2, [[70], [5], [90]]),
    "two ranks, a shared expert": lambda: World(2, 4, 3, [[40, 30], [0, 50], [33, 1]], shared=True),
    "four ranks, uneven experts, ranks without tokens": lambda: World(4, 6, 2, [[30, 0, 17, 45], [9, 40, 0, 0], [0, 0, 0, 0], [20, 20, 20, 20]]),
    "everything to one expert of one rank": lambda: World(3, 5, 2, [[90, 60, 80], [10, 0, 70]], skew=True),      # more tiles than the ring holds
}


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_token_is_summed_to_the_bit(name, seed):
    world = WORLDS[name]()
    world.seed = seed
    world.__post_init__()
    delays = {(n, r): random.Random(f"{seed} {n} {r}").random() * 0.03 for n, r in itertools.product(range(len(world.tokens)), range(world.W))}
    simulation = Simulation(world, delays=delays, slow=0.01 * seed)
    simulation.run()
    simulation.check()


MOVE, PLAN, COMBINE = "expert_parallel_move", "expert_parallel_plan", "move"
FAULTS = {
    "pulls before x_ready": (MOVE, "    wait_for_all(flags.control, X_READY, t.epoch, WAIT_PEER_ROWS)\n", ""),
    "x_ready before all have staged": (MOVE, "    if staged == gl.num_programs(0) - 1:", "    if staged == 0:"),
    "the counters of the last launch stay": (MOVE, "first in range(gl.program_id(0) * 128, fresh(s.T),", "first in range(gl.program_id(0) * 128, 0,"),
    "a push before the results": (MOVE, "        elif finished == 1:", "        elif push < pieces:"),
    "a pull into a place in use": (MOVE, "        if (piece < pieces) & (tile >= s.row_ring):", "        if (piece < pieces) & (tile < 0):"),
    "a result to the wrong slot": (MOVE, "row), 0), gl.maximum(slot, 0)", "row), 0), gl.maximum(slot ^ 1, 0)"),
    "results always pushed to the first rank": (MOVE, "return slot >= 0, gl.maximum(gl.load(t.row_to_rank + row), 0), ", "return slot >= 0, row * 0, "),
    "results counted but not pushed": (MOVE, "        valid, target = next_valid, next_target\n", "        valid, target = next_valid & (j < 6), target\n"),
    "a sum without all results": (COMBINE, "lack += gl.sum((rows >= 0).to(gl.int32), 1)", "lack += gl.minimum(gl.sum((rows >= 0).to(gl.int32), 1), 1)"),
    "ids read before they are there": (PLAN, "    wait_for_all(control, IDS_READY, epoch, WAIT_IDS)\n", ""),
    "ids told before all have written": (PLAN, "    if arrived == gl.num_programs(0) - 1:", "    if arrived == 0:"),
    "one buffer of ids": (PLAN, "(epoch & 1) * (IDS_HEADER + capacity)", "(epoch & 0) * (IDS_HEADER + capacity)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    name, old, new = FAULTS[fault]
    for seed in range(6):
        tokens = [[90, 80], [80, 85]] if "place" in fault else [[40, 30], [45, 25], [38, 31]] * (1 if name != PLAN else 6)
        world = World(2, 4, 2, tokens, seed=seed, skew="place" in fault)
        late = {(n, seed % 2): 0.05 for n in range(3)}
        simulation = Simulation(world, {name: [(old, new)]}, delays=late, launch=name != PLAN, slow=(0.2 if "place" in fault else 0.03) * (seed % 2 == 0))
        simulation.memory.deadline = time.monotonic() + 3
        simulation.run()
        try:
            simulation.check()
        except AssertionError:
            return
    pytest.fail("every launch was right in spite of the fault")


def test_a_rank_that_stays_away_is_named_by_all_others():
    simulation = Simulation(World(3, 4, 2, [[20, 10, 15], [12, 30, 9]]), absent=(1, 2), limit_ms=1500)
    simulation.run()
    assert not simulation.problems, simulation.problems
    timeouts = {(rank, wait, tile) for rank, wait, tile, _, _ in simulation.reports}
    aborted = simulation.modules["sync"].WAIT_ABORTED
    assert {rank for rank, _, _ in timeouts} == {0, 1}
    assert any(wait == simulation.modules["sync"].WAIT_IDS and tile == 2 for _, wait, tile in timeouts)
    assert all((wait, tile) in {(simulation.modules["sync"].WAIT_IDS, 2), (aborted, 0), (aborted, 1)} for _, wait, tile in timeouts), timeouts
    for rank in (0, 1):
        assert np.isnan(simulation.out[1, rank]).all() and not np.isnan(simulation.out[0, rank]).any()


def test_ranks_in_different_passes_say_so():
    simulation = Simulation(World(2, 4, 2, [[20, 10]]), signatures={(0, 1): 18}, limit_ms=5000)
    simulation.run()
    reported = {(rank, wait): (tile, expected, seen) for rank, wait, tile, expected, seen in simulation.reports}
    assert reported.get((0, 35)) == (1, 17, 18) or reported.get((1, 35)) == (0, 18, 17)
    assert np.isnan(simulation.out[0, 0]).all() and np.isnan(simulation.out[0, 1]).all()


def test_page_holds_a_counter_for_every_token():
    assert page_bytes(5) == 4 * (PAGE_WORDS + 5)
