"""Ranks in threads that run the kernels' own several-rank source as Python (device_interpreter.py); what tests of it share.

Each rank runs an exchange and a launch for every pass, free to run ahead of the others, its roles at random speeds; GEMMs are stood in for, row by row.
"""
from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from device_interpreter import Interrupted, Memory, SharedWords, load, round_bf16

from mok.fabric.flag_page import MAX_RANKS, page_bytes
from mok.plan import RoutingPlan, count_ids, experts_of_rank, plan_capacity
from mok.waves import WaveCounts, waves_needed

TILE, H, GRID, CAPACITY, RING = 128, 272, 2, 64, 2          # H: a tail, and two column tiles, so that two down tasks finish a row tile
SECONDS = 15.0


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
    wave_tiles: list[int] | None = None                      # row tiles of each rank's buffers; None = room for the worst case
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
        """y (T, H): fma over the routes in order from +0, then the shared expert, one rounding."""
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
    """Runs a World's launches; `absent` (pass, rank): that rank stops before it. `delays` {(pass, rank): seconds that its host sleeps first}.

    passes: (kind, problem of the World) in order, None = every problem's forward; they are numbered from 0.
    """

    def __init__(self, world: World, mutations: dict | None = None, absent: tuple[int, int] | None = None, delays: dict | None = None,
                 signatures: dict | None = None, limit_ms: int = 60_000, launch: bool = True,
                 slow: float = 0.0, passes: list[tuple[str, int]] | None = None, sleepy: int | None = None) -> None:
        self.passes = [("forward", n) for n in range(len(world.tokens))] if passes is None else passes
        self.sleepy = sleepy                                 # a CTA whose roles sleep twenty times as long
        self.slow = slow                                     # seconds that CTAs after the first, and every GEMM, come late
        self.launch = launch                                 # False: exchanges alone, with no launch between that would order them
        self.world, self.absent, self.delays, self.signatures, self.limit_ms = world, absent, delays or {}, signatures or {}, limit_ms
        self.memory, self.reports, self.problems = Memory(), [], []
        self.memory.deadline = time.monotonic() + SECONDS
        self.random = random.Random(world.seed)
        self.gl, self.modules = load(self.memory, self.reports, self._nap, mutations)
        self.out: dict = {}
        W, M, K = world.W, world.max_tokens, world.K
        allocate, words = self.memory.allocate, page_bytes(M) // 4
        self.pages = [allocate(np.zeros(words, np.int32), "i32") for _ in range(W)]
        ids_words = self.modules["expert_parallel_plan"].ids_words(M, K)
        self.ids = [allocate(np.full(ids_words, -7, np.int32), "i32") for _ in range(W)]
        self.x = [allocate(np.full(M * H, np.nan, np.float32), "bf16") for _ in range(W)]
        self.slots = [allocate(np.full(M * K * H, np.nan, np.float32), "bf16") for _ in range(W)]
        self.dy = [allocate(np.full(M * H, np.nan, np.float32), "bf16") for _ in range(W)]
        self.weights, self.weight_slots = ([allocate(np.full(M * K, np.nan, np.float32), "f32") for _ in range(W)] for _ in range(2))
        self.controls = [self._control(r) for r in range(W)]
        self.everybody_of = [np.full(W * M * K, -9, np.int32) for _ in range(W)]

    def _nap(self) -> None:
        """A role's sleep between two steps."""
        time.sleep(self.random.random() ** 4 * 3e-3 * (20 if self.sleepy is not None and self.gl.local.program == self.sleepy else 1))

    def fail(self, problem: str) -> None:
        """Note what went wrong; nobody needs to run on."""
        self.problems.append(problem)
        self.memory.deadline = 0.0

    def _control(self, rank: int) -> tuple[np.ndarray, object]:
        peers = self.modules["peers"]
        table = np.zeros(peers.TABLE_WORDS, np.int64)
        table[:2] = rank, self.world.W
        for place, (pointers, shift) in enumerate(((self.pages, 0), (self.ids, 0), (self.x, 4), (self.slots, 4), (self.dy, 4), (self.weights, 0),
                                                   (self.weight_slots, 0))):
            begin = 8 + place * MAX_RANKS
            table[begin:begin + self.world.W] = [int(p.a) >> shift for p in pointers]
        own = (peers.PEER_PAGE, peers.PEER_X, peers.PEER_SLOTS, peers.PEER_DY, peers.PEER_WEIGHTS, peers.PEER_WEIGHT_SLOTS)
        table[2:8] = [table[begin + rank] for begin in own]
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
            self.fail("a rank hangs")

    def _rank(self, rank: int) -> None:
        for position, (kind, n) in enumerate(self.passes):
            time.sleep(self.delays.get((position, rank), 0))
            if self.absent == (position, rank) or self.problems:
                return
            if kind != "forward":
                self._other_pass(kind, n, rank, position + 1)
                continue
            self._together(rank, [(p, GRID, self._exchange, (n, rank)) for p in range(GRID)])
            whole = np.full((self.world.W, self.world.max_tokens, self.world.K), -1, np.int32)
            for r, T in enumerate(self.world.tokens[n]):
                whole[r, :T] = self.world.ids[n, r]
            if not self.reports and not np.array_equal(self.everybody_of[rank], whole.reshape(-1)):
                self.fail(f"launch {n}, rank {rank}: the list of everybody's ids is wrong")
            if self.launch:
                self._launch(n, rank, position + 1)

    def _other_pass(self, kind: str, n: int, rank: int, epoch: int) -> None:
        raise NotImplementedError(kind)

    def _together(self, rank: int, roles: list) -> None:
        """Run (program, programs, function, arguments) each in a thread; wait for all."""
        def body(program: int, programs: int, function, arguments) -> None:
            local = self.gl.local
            local.program, local.programs, local.rank, local.reason = program, programs, rank, 1
            try:
                function(*arguments)
            except Interrupted:
                self.fail("out of time: a deadlock")
            except BaseException as error:
                self.fail(f"rank {rank}: {type(error).__name__}: {error}")
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

    def _launch(self, n: int, rank: int, epoch: int) -> None:
        world, gl, m = self.world, self.gl, self.modules
        T, K, plan = world.tokens[n][rank], world.K, world.plans(n)[rank]
        count = int(world.shared)
        rows = plan_capacity(world.W * world.max_tokens * K, experts_of_rank(world.E, world.W, rank)[1])
        token_rows = count * -(-T // TILE) * TILE
        waves = world.wave_tiles is not None
        if world.wave_tiles is not None:
            rows = min(rows, world.wave_tiles[rank] * TILE)
        words, control = self.controls[rank]
        words[16:], words[0] = 0, epoch - 1
        arrays = {"out": np.full(T * H, np.nan, np.float32), "results": np.full(max(token_rows, 1) * H, np.nan, np.float32),
                  "ring": np.full(RING * TILE * H, np.nan, np.float32), "order": np.full(max(T, 1), -1, np.int32)}
        to = {"row_to_slot": plan.row_to_slot, "slot_to_row": plan.slot_to_row, "row_to_rank": plan.row_to_rank, "num_tiles": plan.num_tiles}
        with self.memory.lock:
            p = {name: self.memory.allocate(values, "i32" if name == "order" else "bf16") for name, values in arrays.items()}
            p |= {name: self.memory.allocate(values.numpy(), "i32") for name, values in to.items()}
            p["x"] = self.memory.allocate(world.x[n, rank].reshape(-1), "bf16")
            p["weights"] = self.memory.allocate(world.weights[n, rank].reshape(-1), "f32")
            p["table"] = self.memory.allocate(self._wave_table(n).reshape(-1), "i32") if waves else p["order"]
        number = {name: gl.cast(v, "i32") for name, v in {"H": H, "I": TILE, "T": T, "count": count, "tiles": int(plan.num_tiles), "1": 1, "ring": RING,
                                                         "K": K, "stride": H // 8, "epoch": epoch, "0": 0, "wave": rows // TILE}.items()}
        s = m["tasks"].Schedule(*(number[k] for k in ("H", "I", "I", "I", "T", "count", "tiles", "1", "ring", "ring")))

        tokens = m["move"].Tokens(p["out"], p["results"], p["row_to_slot"], p["slot_to_row"], p["weights"], p["order"], p["x"], number["stride"], p["x"],
                                  p["x"], number["0"], number["0"], number["K"], p["row_to_rank"], number["epoch"])

        flags = m["gemm"].Flags(control, control + 16, gl.cast(CAPACITY, "i32"), gl.cast(16 + 2 * CAPACITY + count * -(-T // TILE), "i32"))
        multiplied = [threading.Event() for _ in range(plan.num_rows // TILE + 1)]

        def cta() -> None:
            """What the kernel does around its roles."""
            program, loop, wave = int(gl.local.program), m["wave_loop"], gl.cast(0, "i32")
            w = loop.Wave(SharedWords(), p["num_tiles"], number["wave"], p["table"])
            while wave < (loop.waves_of(gl.load(p["num_tiles"]), number["wave"]) if waves else 1):
                part, first = s, number["0"]
                if waves:
                    if wave > 0:
                        loop.next_wave(flags.counters + loop.SET_WAVES, flags.counters, 16 + 5 * CAPACITY, wave, control, 0, 15)
                    loop.set_wave(w, wave)
                    part, first = loop.schedule_of_wave(s, w, 4), loop.first_tile(w, 4)
                done = multiplied[int(wave)]
                roles = [(program, GRID, self._consumer, (s, part, tokens, flags, wg, done, w if waves else None)) for wg in range(2)]
                mover = (part, flags, tokens, p["ring"], w, 1, 1, 2, int(waves), 0, 1)
                roles.append((program, GRID, m["expert_parallel_move"].group_mover, mover))
                if program == 0:
                    homes = self._homes(p, first * TILE)
                    roles.append((0, GRID, self._gemm, (n, rank, plan, flags, arrays, part, int(first), homes, done)))
                self._together(rank, roles)
                wave = wave + 1

        self._together(rank, [(c, GRID, cta, ()) for c in range(GRID)])
        if words[2]:                                                          # aborted: what _poison_after_abort and tell_abort do
            arrays["out"][:] = np.nan
            gl.local.rank, gl.local.reason = rank, self.reports[0][1]
            m["peers"].tell_abort(control)
        self.out[n, rank] = arrays["out"].reshape(T, H)

    def _wave_table(self, n: int) -> np.ndarray:
        """(W, 2): row tiles that each rank uses in problem n, row tiles of its buffers."""
        assert self.world.wave_tiles is not None
        return np.array([[int(plan.num_tiles), tiles] for plan, tiles in zip(self.world.plans(n), self.world.wave_tiles, strict=True)], np.int32)

    def _consumer(self, s, part, t, flags, wg: int, multiplied: threading.Event, w) -> None:
        m = self.modules
        time.sleep(self.slow * (self.gl.local.program > 0))
        if wg == 1 and (w is None or m["wave_loop"].wave_index(w, 4) == 0):
            m["expert_parallel_move"].stage_tokens(s, t, flags, 1, 1)
            if w is not None:
                m["wave_loop"].count_waves(flags.control, w)
        last = w is None or m["wave_loop"].is_last(w, 4)
        if wg == 1 and last:
            m["move"].list_tokens(part, t, flags, 4, 1)
        multiplied.wait()                                                     # consumers sum after their last GEMM task
        if last:
            m["move"].finish_combine(s, t, flags, 2, 4, 1, 1)

    def _homes(self, p: dict, first_row):
        """What the storer has for results of rows from `first_row` on."""
        return self.modules["expert_parallel_send"].Homes(SharedWords(TILE, "i64"), p["results"], p["row_to_slot"] + first_row, p["row_to_rank"] + first_row)

    def _send_tile(self, homes, control, tile: int, column: int, values: np.ndarray) -> None:
        """The storer's part of a task of several ranks: 256 columns of a tile's rows (TILE, H), chunk by chunk out of shared memory, to their slots."""
        send, cast = self.modules["expert_parallel_send"], self.gl.cast
        send.find_homes(homes, control, cast(tile, "i32"), cast(H, "i32"))
        self.modules["sync"].nap(tile, 1)
        wide = np.pad(values[:, column * 256:(column + 1) * 256], ((0, 0), (0, 256)), constant_values=np.nan)
        for first in (0, 64):
            for c in range(4):
                chunk = SharedWords(kind="bf16", values=wide[first:first + 64, c * 64:c * 64 + 64].copy())
                send.send_chunk(homes, chunk, first, cast(column * 256 + c * 64, "i32"), cast(H, "i32"))

    def _gemm(self, n: int, rank: int, plan: RoutingPlan, flags, arrays: dict, part, begin: int, homes, multiplied: threading.Event) -> None:
        """Producer, consumers' multiplies and storer of all CTAs: waits and counters as theirs, tiles in order; row by row, so that bits do not move."""
        world, m, columns = self.world, self.modules, -(-H // 256)
        first = experts_of_rank(world.E, world.W, rank)[0]
        ring, results = arrays["ring"].reshape(-1, H), arrays["results"].reshape(-1, H)
        try:
            for tile in range(-(-int(part.T) // TILE) if int(part.num_shared) else 0):
                for row, x in enumerate(world.x[n, rank][tile * TILE:(tile + 1) * TILE]):
                    results[tile * TILE + row] = world.result(world.E, x)
                self.gl.atomic_add(m["gemm"].results_ready(flags) + CAPACITY + tile, columns)
            for tile in range(int(part.num_tiles)):
                m["sync"].wait_at_least(m["gemm"].rows_ready(flags) + tile, 8, flags.control, 1, tile)
                time.sleep(self.slow)
                there = ring[tile % RING * TILE:(tile % RING + 1) * TILE].copy()
                valid = plan.row_to_slot[(begin + tile) * TILE:(begin + tile + 1) * TILE].numpy() >= 0
                if not self.reports and there[~valid].any():
                    self.fail(f"launch {n}, rank {rank}, tile {begin + tile}: a padding row is not zero")
                self.gl.atomic_add(m["gemm"].hidden_ready(flags) + tile, 1)
                m["sync"].nap(tile, 1)
                found = np.full((TILE, H), np.nan, np.float32)
                for row in np.nonzero(valid)[0]:
                    found[row] = world.result(first + int(plan.tile_to_expert[begin + tile]), there[row])
                for column in range(columns):
                    self._send_tile(homes, flags.control, tile, column, found)
                    m["expert_parallel_send"].tell_homes(homes, m["gemm"].results_ready(flags) + tile, columns, flags.control, self.gl.cast(tile, "i32"),
                                                         self.gl.cast(world.K, "i32"))
                    time.sleep(self.slow)
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
        if self.world.wave_tiles is not None and self.launch:
            for r, (words, _) in enumerate(self.controls):
                counts = WaveCounts()
                for n in range(len(self.world.tokens)):
                    waves = [waves_needed(used, tiles) for used, tiles in self._wave_table(n).tolist()]
                    counts.add(max(waves), waves[r])
                assert words[12:16].tolist() == [counts.passes, counts.several, counts.exceeded, counts.most], f"rank {r}: wave counts {words[12:16]}"
