"""Backward launches of ranks in threads: the kernel's own staging, pulls, pushes and sums, with GEMMs stood in for row by row; and what they must give."""
from __future__ import annotations

import itertools
import time

import numpy as np
from device_interpreter import SharedWords, round_bf16
from interpreted_ranks import CAPACITY, GRID, TILE, H, Simulation, World

from mok.plan import experts_of_rank

I = 48
X, TOPK, UP, DOWN, BIAS_UP, BIAS_DOWN = 1, 2, 4, 8, 16, 32
CARRY_TILES = 2 * 1 * 2 + 3 * 1                             # tiles of 128 x 256 of both weight gradients
ALL = X | TOPK | UP | DOWN | BIAS_UP | BIAS_DOWN
COLUMNS = -(-H // 256)                                      # column tiles of H, that is DX tasks of a row tile; I has one


def fma(a, b, c):
    return (np.asarray(a, np.float64) * np.float64(b) + c).astype(np.float32)


class BackwardWorld(World):
    """A World with dy of every problem and rank, weights that take a row of dy to dz and back to H columns, and a bias of the down projection."""

    def __post_init__(self) -> None:
        super().__post_init__()
        g = np.random.default_rng(self.seed + 1000)
        self.down = g.standard_normal((self.E + 1, H, I)).astype(np.float32)
        self.up = g.standard_normal((self.E + 1, 2 * I, H)).astype(np.float32)
        self.bias = round_bf16(g.standard_normal((self.E, H)).astype(np.float32))
        self.dy = {key: round_bf16(g.standard_normal(x.shape).astype(np.float32)) for key, x in self.x.items()}

    def row(self, expert: int, dy: np.ndarray, weight: np.float32) -> tuple[np.ndarray, np.ndarray, np.float32]:
        """(dz, row of dx, <dh, h>) of one row; h stands for what forward saved and is always 1 here."""
        dh = (dy[None, :] @ self.down[expert])[0]
        dz = round_bf16(np.concatenate([dh * weight, dh * (weight * np.float32(0.5))]))
        return dz, round_bf16((dz[None, :] @ self.up[expert])[0]), dh.sum(dtype=np.float32)

    def bias_term(self, expert: int, dy: np.ndarray) -> np.float32:
        """<dy, b_down[e]> as the movers form it: 256 sums over every 256th column, then added up."""
        total = np.zeros(256, np.float32)
        for c in range(0, H, 256):
            part = slice(c, min(c + 256, H))
            total[:part.stop - c] = fma(1.0, dy[part].astype(np.float64) * self.bias[expert][part], total[:part.stop - c])
        return total.sum(dtype=np.float32)

    def routes(self, n: int):
        """(rank, token, k, expert) of every valid route in the global order."""
        for r in range(self.W):
            for t, experts in enumerate(self.ids[n, r]):
                for k, e in enumerate(experts):
                    if e >= 0:
                        yield r, t, k, int(e)

    def expected_of_tokens(self, n: int, r: int) -> tuple[np.ndarray, np.ndarray]:
        """(dx (T, H), d_topk_weights (T, K)) of rank r: rows in k order from +0, then the shared expert's, one rounding."""
        dx, d_topk = np.zeros_like(self.x[n, r]), np.zeros_like(self.weights[n, r])
        for t, dy in enumerate(self.dy[n, r]):
            acc = np.zeros(H, np.float32)
            for k, e in enumerate(self.ids[n, r][t]):
                if e >= 0:
                    _, row, part = self.row(e, dy, self.weights[n, r][t, k])
                    acc = acc + row
                    d_topk[t, k] = part + self.bias_term(e, dy)
            if self.shared:
                acc = acc + self.row(self.E, dy, np.float32(1))[1]
            dx[t] = round_bf16(acc)
        return dx, d_topk

    def expected_biases(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """(db_gate_up (E, 2I), db_down (E, H)): sums in the global order."""
        up, down = np.zeros((self.E, 2 * I), np.float32), np.zeros((self.E, H), np.float32)
        for r, t, k, e in self.routes(n):
            dy, weight = self.dy[n, r][t], self.weights[n, r][t, k]
            up[e] = up[e] + self.row(e, dy, weight)[0]
            down[e] = fma(dy, weight, down[e])
        return round_bf16(up), round_bf16(down)


class BackwardSimulation(Simulation):
    """Runs forward and backward passes of a BackwardWorld. wants: bits as the kernel's. numbers {(pass, rank): another pass's number}.

    recompute: as the binary that makes z again, whose first GEMM reads rows of x.
    """

    def __init__(self, world: BackwardWorld, wants: int = ALL, numbers: dict | None = None, recompute: bool = False, **settings) -> None:
        super().__init__(world, **settings)
        self.recompute = recompute
        self.wants, self.numbers, self.grads = wants, numbers or {}, {}

    def _nap(self) -> None:
        """With `slow` ten times as long in CTAs after the first, so that the first one is far ahead of them."""
        time.sleep(self.random.random() ** 4 * 3e-3 * (10 if self.slow and self.gl.local.program else 1))

    def _other_pass(self, kind: str, n: int, rank: int, epoch: int) -> None:
        assert kind == "backward"
        world, gl, m = self.world, self.gl, self.modules
        T, K, plan = world.tokens[n][rank], world.K, world.plans(n)[rank]
        first, experts = experts_of_rank(world.E, world.W, rank)
        waves = world.wave_tiles is not None
        count, rows = int(world.shared), plan.num_rows
        if world.wave_tiles is not None:
            rows = min(rows, world.wave_tiles[rank] * TILE)
        token_rows = count * -(-T // TILE) * TILE
        words, control = self.controls[rank]
        words[16:], words[0] = 0, epoch                                      # as the start of the launch leaves them
        sizes = {"dy_rows": rows * H, "x_rows": rows * H, "dz": rows * 2 * I, "results": max(token_rows, 1) * H, "dx": T * H, "db_up": experts * 2 * I,
                 "db_down": experts * H}
        wide = {"row_weights": rows, "partials": rows + token_rows, "d_topk": T * K, "carry": 2 * (CARRY_TILES * TILE * 256 + 2 * I + H)}
        arrays = {name: np.full(size, np.nan, np.float32) for name, size in (sizes | wide).items()}
        given = {"dy": world.dy[n, rank], "x": world.x[n, rank], "b_down": world.bias[first:first + experts]}
        maps = {name: getattr(plan, name) for name in ("row_to_slot", "row_to_rank", "slot_to_row", "tile_to_expert", "tokens_per_expert", "num_tiles")}
        with self.memory.lock:
            p = {name: self.memory.allocate(values, "f32" if name in wide else "bf16") for name, values in arrays.items()}
            p |= {name: self.memory.allocate(values.reshape(-1), "bf16") for name, values in given.items()}
            p |= {name: self.memory.allocate(values.numpy(), "i32") for name, values in maps.items()}
            p["expert_offsets"] = self.memory.allocate(plan.expert_offsets.numpy(), "i64")
            p["weights"] = self.memory.allocate(world.weights[n, rank].reshape(-1), "f32")
            p["table"] = self.memory.allocate(self._wave_table(n).reshape(-1), "i32") if waves else p["num_tiles"]

        def number(value: int):
            return gl.cast(value, "i32")

        s = m["backward_tasks"].make_schedule(*map(number, (H // 16, I // 16, I // 16, I // 16, T, int(plan.num_tiles), experts)),
                                              number(count), number(2), number(self.wants), 1)
        own = m["backward_tasks"].own(s)
        capacity = rows // TILE
        gates_ready = control + 32 + 2 * capacity + count * -(-T // TILE)
        again = (1 + capacity + count * -(-T // TILE)) * (self.recompute or waves)
        flags = m["backward_pipe"].BackwardFlags(control + 16, control + 32, control + 32 + capacity, gates_ready, gates_ready + -(-T // TILE) + again, control,
                                                 number(capacity))
        assert 2 * capacity + 2 * -(-T // TILE) + again + experts + 3 <= 5 * CAPACITY
        x = m["backward_move"].Source(p["x"], number(H))
        zero = number(0)
        recompute = 2 if waves else self.recompute
        pass_number = number(self.numbers.get((epoch - 1, rank), 40 + n))

        of_rows = m["backward_pipe"].Rows(p["tile_to_expert"], p["expert_offsets"], p["tokens_per_expert"], p["row_to_slot"], p["row_weights"], p["partials"],
                                          zero, p["partials"], p["partials"], p["partials"], zero, zero)
        sums = m["backward_move"].Sums(p["dx"], p["results"], zero, p["slot_to_row"], p["d_topk"], p["b_down"], number(4), p["dz"],
                                       p["db_up"], p["db_down"], p["x"], p["x"], p["x"], p["x"], p["partials"], number(K), number(experts),
                                       p["row_to_rank"])
        parts = (tuple(map(number, (H // 16, I // 16, I // 16, I // 16))), number(T), number(count), number(2), number(self.wants))

        def cta() -> None:
            """What the kernel does around its roles, of which there are movers and, once, GEMMs."""
            program, loop, mover = int(gl.local.program), m["wave_loop"], m["expert_parallel_backward_move"]
            time.sleep(self.slow * (program > 0))
            mover.stage_gradients(own, flags, p["dy"], number(H // 8), p["x"], number(H // 8), p["weights"], number(K), number(experts), pass_number,
                                  p["results"], 1, recompute != 0, 1)
            w = loop.Wave(SharedWords(), p["num_tiles"], number(capacity), p["table"])
            carry, wave = m["backward_waves"].Carry(w, p["carry"]), zero
            while wave < (loop.waves_of(gl.load(p["num_tiles"]), number(capacity)) if waves else 1):
                part, first_row = s, zero
                if waves:
                    if wave > 0:
                        words_used = flags.x_ready.a - flags.totals.a
                        loop.next_wave(flags.x_ready + experts + 2, flags.totals, number(int(words_used) // 4 + experts + 2), wave, control, 3, 15)
                    loop.set_wave(w, wave)
                    part = m["backward_waves"].backward_schedule_of_wave(*parts, p["tile_to_expert"], p["expert_offsets"], number(experts), w, 4)
                    first_row = loop.first_tile(w, 4) * TILE
                arguments = (part, of_rows, flags, sums, x, p["dy_rows"], p["x_rows"], pass_number, (carry, None, parts), 8, 1, 2, recompute, 0, 1)
                roles = [(program, GRID, mover.group_mover, arguments)]
                if program == 0:
                    homes = self._homes(p, first_row)
                    roles.append((0, GRID, self._gemms, (n, rank, plan, flags, m["backward_tasks"].own(part), arrays, rows, int(first_row), recompute, homes)))
                self._together(rank, roles)
                wave = wave + 1

        self._together(rank, [(c, GRID, cta, ()) for c in range(GRID)])
        if words[2]:                                                          # aborted: what the poisoning and tell_abort do
            for name in ("dx", "d_topk", "db_up", "db_down"):
                arrays[name][:] = np.nan
            gl.local.rank, gl.local.reason = rank, next(report[1] for report in self.reports if report[0] == rank)
            m["peers"].tell_abort(control)
        self.grads[epoch - 1, rank] = (arrays["dx"].reshape(T, H), arrays["d_topk"].reshape(T, K), arrays["db_up"].reshape(experts, 2 * I),
                                       arrays["db_down"].reshape(experts, H))

    def _gemms(self, n: int, rank: int, plan, flags, s, arrays: dict, rows: int, begin: int, recompute: int, homes) -> None:
        """Producer, consumers and storer of all CTAs: their waits, checks of every row that they would load, and their results and counters."""
        world, m = self.world, self.modules
        first, experts = experts_of_rank(world.E, world.W, rank)
        dy_rows, x_rows, results = (arrays[name].reshape(-1, H) for name in ("dy_rows", "x_rows", "results"))
        wait, add, pipe = m["sync"].wait_at_least, self.gl.atomic_add, m["backward_pipe"]
        slot, home = (part.numpy()[begin:] for part in (plan.row_to_slot, plan.row_to_rank))
        experts_of_tiles = plan.tile_to_expert.numpy()[begin // TILE:]

        def compare(what: str, found: np.ndarray, wanted: np.ndarray, row: int) -> None:
            if not self.controls[rank][0][2] and not np.array_equal(found, wanted):
                self.fail(f"problem {n}, rank {rank}: {what} of row {begin + row} is not what its home has")

        tiles, shared = int(s.num_tiles), int(s.num_shared)
        finished = np.full((max(rows, 1), H), np.nan, np.float32)
        again = int(m["backward_tasks"].z_columns(s, s.T * 0 - 1, recompute)) if recompute else 0
        if int(m["backward_tasks"].dh_columns(s, s.T * 0 - 1)):
            for tile in range(tiles):
                wait(flags.dy_ready + tile, 8, flags.control, 11, tile)
                time.sleep(self.slow)
                for row in range(tile * TILE, (tile + 1) * TILE):
                    there = slot[row] >= 0
                    dy = world.dy[n, home[row]][slot[row] // world.K] if there else np.zeros(H, np.float32)
                    compare("dy", dy_rows[row], dy, row)
                    if again:
                        compare("x", x_rows[row], world.x[n, home[row]][slot[row] // world.K] if there else np.zeros(H, np.float32), row)
                    compare("the weight", arrays["row_weights"][row], world.weights[n, home[row]].reshape(-1)[slot[row]] if there else np.float32(0), row)
                    dz, dx, part = world.row(first + int(experts_of_tiles[tile]), dy_rows[row], arrays["row_weights"][row])
                    arrays["dz"].reshape(-1, 2 * I)[row], arrays["partials"][row] = dz, part
                    if self.wants & X:
                        finished[row] = dx
                add(flags.totals + pipe.DH_DONE, 1)
        if shared and self.wants & X:
            for t, dy in enumerate(world.dy[n, rank]):
                results[t] = world.row(world.E, dy, np.float32(1))[1]
            add(flags.totals + pipe.DH_DONE, -(-world.tokens[n][rank] // TILE))
        if self.wants & X:
            m["sync"].nap(tiles, 1)
            time.sleep(self.slow)
            for tile, column in itertools.product(range(tiles), range(COLUMNS)):
                self._send_tile(homes, flags.control, tile, column, finished[tile * TILE:(tile + 1) * TILE])
                m["sync"].count_system(flags.totals + pipe.DX_DONE)
            add(flags.totals + pipe.DX_DONE, shared * -(-world.tokens[n][rank] // TILE) * COLUMNS)
        if self.wants & UP:
            for expert in range(experts):
                offset = int(plan.expert_offsets[expert]) - begin
                here = range(max(offset, 0), min(offset + int(plan.tokens_per_expert[expert]), rows))
                wait(flags.x_ready + expert, -(-len(here) // TILE) * 8, flags.control, 15, expert)
                for row in here:
                    compare("x", x_rows[row], world.x[n, home[row]][slot[row] // world.K], row)

    def check_gradients(self) -> None:
        """Everything ran, nothing was reported, and every gradient has the expected bits."""
        assert not self.problems, self.problems[0]
        assert not self.reports, self.reports
        world = self.world
        for position, (kind, n) in enumerate(self.passes):
            if kind != "backward":
                continue
            wanted_biases = world.expected_biases(n)
            for r in range(world.W):
                first, count = experts_of_rank(world.E, world.W, r)
                wanted = (*world.expected_of_tokens(n, r), *(bias[first:first + count] for bias in wanted_biases))
                for bit, name, found, want in zip((X, TOPK, BIAS_UP, BIAS_DOWN), ("dx", "d_topk_weights", "db_gate_up", "db_down"), self.grads[position, r],
                                                  wanted, strict=True):
                    if self.wants & bit:
                        same = (found.view(np.int32) == np.ascontiguousarray(want).view(np.int32)).all()
                        assert same, f"pass {position}, rank {r}: {name} differs in {(found != want).any(1).sum()} of {len(found)} rows"
