"""Memory traffic of the Hopper passes by a model of the L2 cache: which order of tasks keeps operands there, found out without a GPU.

    PYTHONPATH=. python runs/traffic_model.py                               the settings that were counted on an H200, beside those counts
    PYTHONPATH=. python runs/traffic_model.py --explore --shape olmoe       orders that nobody has run yet
    ... --explore --shape deepseek-v3-quarter --tail 0.55                   a row tile whose second half is padding takes 0.55 of a whole one's time

132 CTAs walk the sequence of tasks, one k-step in a unit of time, and touch what a k-step, an epilogue, a mover touches, in pieces of 16 KB; L2 is one LRU
list. H200, counted (docs/benchmarks/2026-11-30-hopper-traffic.json) and modelled, GB read: backward 24.1 and 25.0 (G = 37), 17.7 and 19.2 (G = 16); its writes
and forward's within 5 %; forward's reads 6.5 and 8.1, 9.9 and 11.2 (G = 32). Time is not modelled, only the units that CTAs wait for unfinished inputs.
The capacity that fits is 24 MB: half of the chip's L2, which is two parts that each hold what their own multiprocessors read.
"""
from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

CAPACITY = 24 << 20
CTAS = 132
PIECE = 16384                  # a 128 x 64 chunk of A in bf16; a chunk of B is two
TILE_M, TILE_N, STEP = 128, 256, 64
SHAPES = {"qwen3-30b-a3b": (32768, 2048, 768, 128, 8), "olmoe": (32768, 2048, 1024, 64, 8), "kimi-k2-ep64-rank": (28672, 7168, 2048, 8, 2),
          "mixtral-8x7b": (16384, 4096, 14336, 8, 2), "deepseek-v3-quarter": (2048, 7168, 2048, 32, 8)}      # 32 of the 128 experts that one of two GPUs has
EPILOGUE = {"up": 4.0, "down": 1.5, "dh": 6.0, "dx": 2.0, "dw_up": 2.0, "dw_down": 2.0}      # units in which a CTA multiplies nothing
Task = tuple[str, int, int, int]          # kind, row tile, column tile, expert (weight gradients: row tile of the gradient)


@dataclass(frozen=True)
class Setting:
    """group: row tiles of a group. ahead: groups between a first product and the second that reads it. tickets: a free CTA takes the next task (else
    p, p + 132, ...). aligned: groups end at the nearest expert boundary. interleaved: dw_up and dw_down of one expert after the other. row_ring, hidden_ring:
    forward's rings, in tiles."""
    group: int
    ahead: int = 1
    tickets: bool = False
    aligned: bool = False
    interleaved: bool = False
    row_ring: int = 80
    hidden_ring: int = 48


@dataclass
class L2:
    """One LRU list of pieces; read and written count bytes that pass to and from memory."""
    read: int = 0
    written: int = 0
    read_by: defaultdict = field(default_factory=lambda: defaultdict(int))
    held: OrderedDict = field(default_factory=OrderedDict)
    used: int = 0

    def touch(self, piece: tuple, size: int, write: bool = False) -> None:
        if piece in self.held:
            self.held.move_to_end(piece)
            if write:
                self.held[piece] = (size, True)
            return
        if not write:
            self.stream(piece[0], size)
        self.held[piece] = (size, write)
        self.used += size
        while self.used > CAPACITY:
            _, (old, dirty) = self.held.popitem(last=False)
            self.used -= old
            self.written += old if dirty else 0

    def stream(self, what: str, size: int) -> None:
        """Read once from memory, without a place in the list."""
        self.read += size
        self.read_by[what] += size


@dataclass
class Problem:
    """A routing with even chances, and its row tiles."""
    T: int
    H: int
    I: int
    E: int
    K: int
    tail: float = 1.0              # time of a k-step of a row tile with at most 64 rows; that of others is 1

    def __post_init__(self) -> None:
        generator = random.Random(0)
        counts = [0] * self.E
        for _ in range(self.T):
            for e in generator.sample(range(self.E), self.K):
                counts[e] += 1
        self.counts = counts
        self.tile_to_expert = [e for e, count in enumerate(counts) for _ in range(-(-count // TILE_M))]
        self.first_tile: dict[int, int] = {}
        for tile, e in enumerate(self.tile_to_expert):
            self.first_tile.setdefault(e, tile)
        self.tiles = len(self.tile_to_expert)
        last = {e: self.first_tile[e] + (count - 1) // TILE_M for e, count in enumerate(counts) if count}
        self.step_time = {tile: self.tail for e, tile in last.items() if (counts[e] - 1) % TILE_M < TILE_M // 2}

    def groups(self, setting: Setting) -> list[range]:
        """Row tiles of each group."""
        starts = [0]
        while starts[-1] < self.tiles:
            wanted = starts[-1] + setting.group
            near = [f for f in self.first_tile.values() if setting.aligned and abs(f - wanted) <= setting.group // 2 and f > starts[-1]]
            starts.append(min(min(near, key=lambda f: abs(f - wanted)) if near else wanted, self.tiles))
        return [range(a, b) for a, b in itertools.pairwise(starts)]


def pairs(problem: Problem, setting: Setting, first: str, second: str, first_columns: int, second_columns: int) -> Iterator[Task]:
    """First products of group 0, 1, .., ahead, then by turns the second products of the oldest group and the first of the next; row tile fastest."""
    groups = problem.groups(setting)
    for phase in range(len(groups) + setting.ahead):
        for kind, number, columns in ((first, phase, first_columns), (second, phase - setting.ahead, second_columns)):
            if 0 <= number < len(groups):
                yield from ((kind, tile, column, problem.tile_to_expert[tile]) for column in range(columns) for tile in groups[number])


def forward_tasks(problem: Problem, setting: Setting) -> list[Task]:
    return list(pairs(problem, setting, "up", "down", -(-problem.I // 128), -(-problem.H // TILE_N)))


def backward_tasks(problem: Problem, setting: Setting, wants: str = "xud") -> list[Task]:
    """wants: x (dx), u (dw_gate_up), d (dw_down); DH always."""
    columns_h, columns_i = -(-problem.H // TILE_N), -(-problem.I // TILE_N)
    tasks = list(pairs(problem, setting, "dh", "dx", columns_i, columns_h if "x" in wants else 0))
    sizes = {"dw_up": (2 * -(-problem.I // TILE_M), columns_h), "dw_down": (-(-problem.H // TILE_M), columns_i)}
    kinds = [kind for kind, letter in (("dw_up", "u"), ("dw_down", "d")) if letter in wants]
    order = [(kind, e) for e in range(problem.E) for kind in kinds] if setting.interleaved else [(kind, e) for kind in kinds for e in range(problem.E)]
    for kind, e in order:
        rows, columns = sizes[kind]
        for start in range(0, rows, 16):
            tasks += [(kind, row, column, e) for column in range(columns) for row in range(start, min(start + 16, rows))]
    return tasks


class Pass:
    """What tasks and movers of one pass touch and wait for. Movers copy `rows_a_unit` rows a CTA in a unit of time, 128 at a time."""

    rows_a_unit = 0.6

    def __init__(self, problem: Problem, setting: Setting) -> None:
        self.p, self.setting, self.l2 = problem, setting, L2()
        self.copied = 0.0                    # rows

    def copy(self, rows: float) -> None:
        raise NotImplementedError

    def gather(self, name: str, tile: int, place: int) -> None:
        """A row tile from its tokens, which are too far apart in memory and time to be found in L2, into a routed buffer."""
        self.l2.stream("gather", TILE_M * self.p.H * 2)
        for c in range(self.p.H // STEP):
            self.l2.touch((name, place, c), PIECE, write=True)


class Forward(Pass):
    rows_a_unit = 1.2

    def __init__(self, problem: Problem, setting: Setting) -> None:
        super().__init__(problem, setting)
        self.up_left, self.down_left, self.ready = [-(-problem.I // 128)] * problem.tiles, [-(-problem.H // TILE_N)] * problem.tiles, 0

    def copy(self, rows: float) -> None:
        ring = self.setting.row_ring
        self.copied += rows
        while self.copied >= TILE_M:
            if self.ready >= self.p.tiles or (self.ready >= ring and self.up_left[self.ready - ring] > 0):
                self.copied = TILE_M
                return
            self.copied -= TILE_M
            self.gather("x rows", self.ready, self.ready % ring)
            self.ready += 1

    def waits(self, task: Task) -> bool:
        return self.ready <= task[1] if task[0] == "up" else self.up_left[task[1]] > 0

    def steps(self, task: Task) -> int:
        return -(-(self.p.H if task[0] == "up" else self.p.I) // STEP)

    def step(self, task: Task, k: int) -> None:
        kind, tile, column, e = task
        if kind == "up":
            self.l2.touch(("x rows", tile % self.setting.row_ring, k), PIECE)
        else:
            self.l2.touch(("h", tile % self.setting.hidden_ring, k), PIECE)
        self.l2.touch((f"w {kind}", e, k, column), 2 * PIECE)

    def finish(self, task: Task) -> None:
        kind, tile, column, _ = task
        if kind == "up":
            self.up_left[tile] -= 1
            for c in range(2):
                self.l2.touch(("h", tile % self.setting.hidden_ring, 2 * column + c), PIECE, write=True)
        else:
            self.down_left[tile] -= 1
            for c in range(4):
                self.l2.touch(("results", tile, 4 * column + c), PIECE, write=True)

    def end(self) -> None:
        self.l2.stream("combine", self.p.tiles * TILE_M * self.p.H * 2)
        self.l2.written += self.p.T * self.p.H * 2


class Backward(Pass):
    def __init__(self, problem: Problem, setting: Setting, wants: str = "xud") -> None:
        super().__init__(problem, setting)
        self.wants = wants
        self.dh_left = [-(-problem.I // TILE_N)] * problem.tiles

    def copy(self, rows: float) -> None:
        """dy first, then x; they are never waited for here: measured, the copies are not what holds the products up."""
        before = int(self.copied // TILE_M)
        self.copied += rows
        for tile in range(before, min(int(self.copied // TILE_M), self.p.tiles * (2 if "u" in self.wants else 1))):
            self.gather("dy" if tile < self.p.tiles else "x", tile % self.p.tiles, tile % self.p.tiles)

    def waits(self, task: Task) -> bool:
        return task[0] == "dx" and self.dh_left[task[1]] > 0

    def steps(self, task: Task) -> int:
        return {"dh": -(-self.p.H // STEP), "dx": 2 * -(-self.p.I // STEP)}.get(task[0], -(-self.p.counts[task[3]] // STEP))

    def step(self, task: Task, k: int) -> None:
        kind, row, column, e = task
        if kind in ("dh", "dx"):
            self.l2.touch(("dy" if kind == "dh" else "dz", row, k), PIECE)
            self.l2.touch((f"w {kind}", e, k, column), 2 * PIECE)
            return
        tile = self.p.first_tile[e] + k // 2
        left, right = ("dz", "x") if kind == "dw_up" else ("dy", "wh")
        for c in range(2):
            self.l2.touch((left, tile, 2 * row + c), PIECE)
        for c in range(4):
            self.l2.touch((right, tile, 4 * column + c), PIECE)

    def finish(self, task: Task) -> None:
        kind, row, column, e = task
        if kind == "dh":
            self.dh_left[row] -= 1
            for c in range(4):
                for half in range(2):
                    self.l2.touch(("z", row, 4 * column + c, half), PIECE)
                    self.l2.touch(("dz", row, 4 * column + c + half * (self.p.I // STEP)), PIECE, write=True)
                if "d" in self.wants:
                    self.l2.touch(("wh", row, 4 * column + c), PIECE, write=True)
        else:
            for c in range(4):
                self.l2.touch((f"{kind} result", row, 4 * column + c, e), PIECE, write=True)

    def end(self) -> None:
        if "x" in self.wants:
            self.l2.stream("sum", self.p.tiles * TILE_M * self.p.H * 2)
            self.l2.written += self.p.T * self.p.H * 2


def simulate(tasks: list[Task], run: Forward | Backward, tickets: bool) -> dict:
    """GB read and written, by what; units of time; units that a CTA waited on average."""
    generator = random.Random(1)
    ready = [(generator.random(), cta) for cta in range(CTAS)]
    heapq.heapify(ready)
    current: list[Task | None] = [None] * CTAS
    step, place, ticket, clock, waited, end = [0] * CTAS, list(range(CTAS)), 0, 0.0, 0.0, 0.0
    while ready:
        now, cta = heapq.heappop(ready)
        if now - clock > 0.5:
            run.copy((now - clock) * CTAS * run.rows_a_unit)
            clock = now
        task = current[cta]
        if task is None:
            number = ticket if tickets else place[cta]
            ticket, place[cta] = ticket + 1, place[cta] + CTAS
            if number >= len(tasks):
                end = max(end, now)
                continue
            task = current[cta] = tasks[number]
            step[cta] = 0
        if step[cta] == 0 and run.waits(task):
            waited += 0.5
            heapq.heappush(ready, (now + 0.5, cta))
        elif step[cta] < run.steps(task):
            run.step(task, step[cta])
            step[cta] += 1
            length = run.p.step_time.get(task[1], 1.0) if task[0] in ("up", "down", "dh", "dx") else 1.0
            heapq.heappush(ready, (now + length * (1.0 + 0.05 * generator.random()), cta))
        else:
            run.finish(task)
            current[cta] = None
            heapq.heappush(ready, (now + EPILOGUE[task[0]], cta))
    run.end()
    return {"read": round(run.l2.read / 1e9, 2), "written": round(run.l2.written / 1e9, 2), "units": round(end), "waited": round(waited / CTAS),
            "read_by": {name: round(size / 1e9, 2) for name, size in sorted(run.l2.read_by.items())}}


def forward(problem: Problem, setting: Setting) -> dict:
    return simulate(forward_tasks(problem, setting), Forward(problem, setting), setting.tickets)


def backward(problem: Problem, setting: Setting, wants: str = "xud") -> dict:
    return simulate(backward_tasks(problem, setting, wants), Backward(problem, setting, wants), setting.tickets)


COUNTED = {                     # Qwen3-30B-A3B on one H200: (pass, setting, GB read, GB written)
    "forward, G = 16": (forward, Setting(16), 6.49, 2.74),
    "forward, G = 16, ring of 32": (forward, Setting(16, row_ring=32), 5.67, 2.73),
    "forward, G = 8": (forward, Setting(8, row_ring=40, hidden_ring=24), 5.27, 2.73),
    "forward, G = 32": (forward, Setting(32, row_ring=64, hidden_ring=96), 9.90, 2.74),
    "forward, tickets": (forward, Setting(16, tickets=True), 6.71, 2.74),
    "forward, tickets, two groups ahead": (forward, Setting(16, 2, tickets=True, hidden_ring=64), 7.77, 2.74),
    "forward, the same, aligned": (forward, Setting(16, 2, tickets=True, aligned=True, hidden_ring=96), 5.76, 2.74),
    "backward, G = 37": (backward, Setting(37, interleaved=True), 24.09, 6.06),
    "backward, G = 16": (backward, Setting(16, interleaved=True), 17.65, 6.06),
    "backward, G = 64": (backward, Setting(64, interleaved=True), 26.96, 6.07),
}
UNTRIED: dict[str, tuple[Callable[[Problem, Setting], dict], Setting]] = {
    "forward, G = 16, ring of 32": (forward, Setting(16, row_ring=32)),
    "forward, the same, tickets": (forward, Setting(16, row_ring=32, tickets=True)),
    "forward, tickets, G = 16, aligned": (forward, Setting(16, tickets=True, aligned=True, row_ring=48, hidden_ring=64)),
    "backward, tickets (as it is)": (backward, Setting(37, tickets=True)),
    "backward, tickets, G = 16": (backward, Setting(16, tickets=True)),
    "backward, tickets, G = 16, aligned": (backward, Setting(16, tickets=True, aligned=True)),
    "backward, the same, two groups ahead": (backward, Setting(16, 2, tickets=True, aligned=True)),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--explore", action="store_true", help="settings that have not been counted, instead of those that have")
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=list(SHAPES))
    parser.add_argument("--tail", type=float, default=1.0, help="time of a k-step of a row tile with at most 64 rows, others 1")
    args = parser.parse_args()
    if not 0 < args.tail <= 1:
        parser.error(f"--tail {args.tail} must be above 0 and at most 1")
    problem = Problem(*SHAPES[args.shape], tail=args.tail)
    if args.shape != "qwen3-30b-a3b" and not args.explore:
        parser.error("counted was qwen3-30b-a3b alone: use --explore")
    results = {}
    rows = [(name, run, setting, None) for name, (run, setting) in UNTRIED.items()] if args.explore else \
        [(name, run, setting, (read, written)) for name, (run, setting, read, written) in COUNTED.items()]
    for name, run, setting, counted in rows:
        found = run(problem, setting)
        results[name] = found if counted is None else {**found, "counted": counted}
        beside = [f" ({value})" for value in counted] if counted else ["", ""]
        print(f"{name:40s} read {found['read']:6.2f}{beside[0]}  written {found['written']:5.2f}{beside[1]} GB, "
              f"waited {found['waited']} of {found['units']} units  {found['read_by']}", flush=True)
    print(json.dumps({"shape": args.shape, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
