"""A model of the flags between ranks (docs/fabric.md): the kernels' waits under the kernels' names, run in random interleavings on a CPU.

Every role of every rank is a generator that yields where another role may come in between, or yields a predicate to wait for. Each cell of memory holds
(launch, place in it, value), so a reader sees at once whether what it reads is older than what it wants (a lost row) or newer (reused too early). Memory is
sequentially consistent here: the model finds missing waits and wrong orders, not missing fences.

Dimensions are as small as the faults allow: tiles of BLOCK rows and COLUMNS columns of results, rings of ROW_RING and HIDDEN_RING tiles, K routes, at most
MAX_TOKENS tokens a rank.
"""
from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from mok.fabric.flag_page import FLAGS
from mok.plan import experts_of_rank

BLOCK, COLUMNS, ROW_RING, HIDDEN_RING, K, MAX_TOKENS = 2, 2, 2, 2, 2, 2
MOVERS, CONSUMERS = 2, 2
# Every wait of the exchange, of forward's launch (`x_ready own`: before the first look at token_arrived), and of backward's.
WAITS = ("ids_ready", "staged", "x_ready", "row place", "rows_ready", "hidden place", "hidden_ready", "x_ready own", "token_arrived",
         "grads_ready", "dy_ready", "dz", "x rows", "dh_done", "dx_done", "grads_sent")
FAULTS = ("one ids buffer", "flags compared with ==", "zeroed after x_ready", "blocking, sums before pulls", "told before all columns",
          "grads_ready before all have staged", "grads_sent before all have sent", "grads_sent only where rows return", "results stand for grads_sent",
          "x not staged again")
KINDS = ("announce", "pull", "sum")      # what a mover of forward does, the first possible one first
Role = Iterator[Callable[[], bool] | None]
Cell = tuple[int, int, object]


class Deadlock(Exception):
    """No role can go on."""


class EarlyReuse(Exception):
    """A cell was overwritten before its reader came."""


class LostRow(Exception):
    """A cell was read before it was written, or a result was never summed."""


@dataclass(frozen=True)
class Launch:
    """One pass over the exchange's routes: `exchange` is the number of the exchange whose plan it uses; of backward: whether gradients of rows go home
    (else weight gradients alone are wanted), and whether rows of x are needed."""
    exchange: int
    backward: bool = False
    returns: bool = True
    x_rows: bool = True


@dataclass
class Rank:
    """What one rank's GPU memory holds: peers may reach the first group of fields alone."""
    flags: dict[str, list[int]]
    token_arrived: list[int]
    ids: list[list[Cell]]
    x: list[Cell]
    slots: list[Cell]
    dy: list[Cell]
    weight_slots: list[Cell]
    dy_rows: dict[int, Cell] = field(default_factory=dict)                              # backward's buffers of rows, and dz of each tile
    x_rows: dict[int, Cell] = field(default_factory=dict)
    dz: dict[int, Cell] = field(default_factory=dict)
    row_ring: list[Cell] = field(default_factory=lambda: [_EMPTY] * (ROW_RING * BLOCK))
    hidden_ring: list[Cell] = field(default_factory=lambda: [_EMPTY] * HIDDEN_RING)
    plans: dict[int, list[tuple[int, int, int] | None]] = field(default_factory=dict)   # exchange -> rows (home, token, k), None = padding
    summed: dict[int, dict[int, list]] = field(default_factory=dict)                    # launch -> token -> its routes' results, in k order
    stopped: bool = False                                                               # its host launches nothing any more


_EMPTY: Cell = (0, 0, None)


@dataclass
class Counters:
    """One rank's counters in one launch; the kernel has two sets, one zeroed while the other is in use."""
    rows_ready: list[int]
    hidden_ready: list[int]
    results_ready: list[int]
    staged: int = 0


@dataclass
class BackwardCounters:
    """Likewise of a backward launch."""
    dy_ready: list[int]
    dh_ready: list[int]
    staged: int = 0
    x_pulled: int = 0
    dh_done: int = 0
    dx_done: int = 0
    sent: int = 0


class Model:
    """`run(seed)` plays `launches` (an exchange before the first launch of each number) on W ranks under one schedule; it raises what goes wrong.

    routes[exchange][rank]: T lists of K expert numbers, -1 = none. without: names of waits left out. fault: one of FAULTS. blocking: movers do all of one
    kind before the next and block in each, instead of doing what is possible. stop: (rank, launch) before which that rank's host stops; the others must then
    time out, abort and end.
    """

    def __init__(self, routes: Sequence[Sequence[Sequence[Sequence[int]]]], launches: Sequence[Launch], num_experts: int, *,
                 without: Sequence[str] = (), fault: str | None = None, blocking: bool = False, stop: tuple[int, int] | None = None) -> None:
        assert set(without) <= set(WAITS) and fault in (None, *FAULTS)
        self.routes, self.launches, self.without, self.fault, self.stop = routes, launches, set(without), fault, stop
        self.blocking = blocking or fault == "blocking, sums before pulls"
        self.W = len(routes[0])
        self.owner = [rank for rank in range(self.W) for _ in range(experts_of_rank(num_experts, self.W, rank)[1])]
        names = [name for name in FLAGS if name != "token_arrived"]
        self.ranks = [Rank({name: [0] * self.W for name in names}, [0] * MAX_TOKENS, [[_EMPTY] * (MAX_TOKENS * K) for _ in range(2)], [_EMPTY] * MAX_TOKENS,
                           [_EMPTY] * (MAX_TOKENS * K * COLUMNS), [_EMPTY] * MAX_TOKENS, [_EMPTY] * (MAX_TOKENS * K)) for _ in range(self.W)]

    # ---- schedule ------------------------------------------------------------------------------------------------------------------

    def run(self, seed: int) -> int:
        """Play one schedule: uniformly random choices for even seeds, for odd ones random priorities that change now and then, which delays some
        roles for long. Returns the number of steps."""
        chance = random.Random(seed)
        roles: dict[Role, tuple[Callable[[], bool] | None, float]] = {self._stream(r): (None, chance.random()) for r in range(self.W)}
        self._start = lambda role: roles.__setitem__(role, (None, chance.random()))
        steps = 0
        while roles:
            ready = [role for role, (blocked, _) in roles.items() if blocked is None or blocked()]
            if not ready:
                self._time_out(roles, chance)
                continue
            role = chance.choice(ready) if seed % 2 == 0 else max(ready, key=lambda r: roles[r][1])
            steps += 1
            try:
                blocked = next(role)
            except StopIteration:
                del roles[role]
            else:
                roles[role] = (blocked, chance.random() if chance.random() < 0.05 else roles[role][1])
        self._check_sums()
        return steps

    def _time_out(self, roles: dict, chance: random.Random) -> None:
        """Nobody can go on: a fault, unless a rank has stopped; then one that waits times out and tells every page (rule 8)."""
        running = [r for r in range(self.W) if not self.ranks[r].stopped and not any(self.ranks[r].flags["abort"])]
        if self.stop is None or not self.ranks[self.stop[0]].stopped or not running:
            raise Deadlock
        first = chance.choice(running)
        for peer in self.ranks:
            peer.flags["abort"][first] = 1

    def aborted(self, r: int) -> bool:
        return any(self.ranks[r].flags["abort"])

    def wait(self, r: int, name: str, reached: Callable[[], bool]) -> Callable[[], bool]:
        """The predicate of a wait: true when reached, after an abort, or when this wait is left out."""
        return (lambda: True) if name in self.without else lambda: reached() or self.aborted(r)

    def flag(self, r: int, name: str, source: int, epoch: int) -> bool:
        """Whether rank r sees that `source` has reached the epoch."""
        seen = self.ranks[r].flags[name][source]
        return seen == epoch if self.fault == "flags compared with ==" else seen >= epoch

    def signal(self, r: int, name: str, epoch: int) -> Role:
        """Rank r tells every page, its own too."""
        for peer in self.ranks:
            peer.flags[name][r] = epoch
            yield None

    def expect(self, r: int, cell: Cell, wanted: Cell) -> None:
        if cell != wanted and not self.aborted(r):
            raise (EarlyReuse if cell[:2] > wanted[:2] else LostRow)(f"rank {r} wanted {wanted} and read {cell}")

    def _check_sums(self) -> None:
        for r, rank in enumerate(self.ranks):
            for n, launch in enumerate(self.launches, 1):
                tokens = self.routes[launch.exchange - 1][r]
                if not launch.returns or self.aborted(r) or rank.stopped:
                    continue
                wanted: dict = {t: [(n, r, t, k, self.owner[expert]) for k, expert in enumerate(row) if expert >= 0] for t, row in enumerate(tokens)}
                if rank.summed.get(n, {}) != wanted:
                    raise LostRow(f"rank {r} summed {rank.summed.get(n, {})} in launch {n} instead of {wanted}")

    # ---- one rank's stream: kernels one after another -----------------------------------------------------------------------------

    def _stream(self, r: int) -> Role:
        for n, launch in enumerate(self.launches, 1):
            if self.stop == (r, n):
                self.ranks[r].stopped = True
                return
            if launch.exchange not in self.ranks[r].plans:
                yield from self._exchange(r, launch.exchange)
            if self.aborted(r):                             # a dead group launches nothing more
                return
            plan = self.ranks[r].plans[launch.exchange]
            ended: list[bool] = []
            if launch.backward:
                roles = backward_roles(self, r, n, launch, plan)
            else:
                counters = Counters(*([0] * (len(plan) // BLOCK) for _ in range(3)))
                roles = [Mover(self, r, n, launch, plan, counters, m).role() for m in range(MOVERS)]
                roles += [self._consumer(r, n, plan, counters, which) for which in range(CONSUMERS)]
            for role in roles:
                self._start(self._ending(role, ended))
            yield lambda ended=ended: len(ended) == MOVERS + CONSUMERS
            self._check_end(r, n, launch)

    def _ending(self, role: Role, ended: list[bool]) -> Role:
        yield from role
        ended.append(True)

    def _check_end(self, r: int, n: int, launch: Launch) -> None:
        """Rule 5: no signal to this launch is still on its way when the kernel has ended."""
        valid = [sum(expert >= 0 for expert in row) for row in self.routes[launch.exchange - 1][r]]
        arrived = self.ranks[r].token_arrived[:len(valid)]
        if not launch.backward and not self.aborted(r) and arrived != valid:
            raise LostRow(f"rank {r} ended launch {n} with {arrived} results of its tokens instead of {valid}")

    # ---- the exchange kernel --------------------------------------------------------------------------------------------------------

    def _exchange(self, r: int, e: int) -> Role:
        me, buffer = self.ranks[r], 0 if self.fault == "one ids buffer" else e % 2
        mine = [expert for row in self.routes[e - 1][r] for expert in row]
        for i in range(MAX_TOKENS * K):
            me.ids[buffer][i] = (e, i, mine[i] if i < len(mine) else -1)
            yield None
        yield from self.signal(r, "ids_ready", e)
        rows: dict[int, list] = {}
        for p in range(self.W):
            yield self.wait(r, "ids_ready", lambda p=p: self.flag(r, "ids_ready", p, e))
            theirs = [expert for row in self.routes[e - 1][p] for expert in row]
            for i in range(MAX_TOKENS * K):
                self.expect(r, self.ranks[p].ids[buffer][i], (e, i, theirs[i] if i < len(theirs) else -1))
                expert = self.ranks[p].ids[buffer][i][2]
                if isinstance(expert, int) and expert >= 0 and self.owner[expert] == r:
                    rows.setdefault(expert, []).append((p, i // K, i % K))
                yield None
        plan: list = []
        for expert in sorted(rows):
            plan += rows[expert] + [None] * (-len(rows[expert]) % BLOCK)
        me.plans[e] = plan

    # ---- roles of a launch ----------------------------------------------------------------------------------------------------------

    def _consumer(self, r: int, n: int, plan: list, c: Counters, which: int) -> Role:
        """Tensor-core tasks in their static order, dealt out in turn: up of a tile, and down of the tile before it."""
        me, tiles = self.ranks[r], len(plan) // BLOCK
        tasks = [task for tile in range(tiles + 1) for task in (("up", tile, 0), *(("down", tile - 1, column) for column in range(COLUMNS)))
                 if 0 <= task[1] < tiles]
        for kind, tile, column in tasks[which::CONSUMERS]:
            if kind == "up":
                yield self.wait(r, "rows_ready", lambda tile=tile: c.rows_ready[tile] == BLOCK)
                yield self.wait(r, "hidden place", lambda tile=tile: tile < HIDDEN_RING or c.results_ready[tile - HIDDEN_RING] == COLUMNS)
                for row in range(tile * BLOCK, (tile + 1) * BLOCK):
                    self.expect(r, me.row_ring[row % (ROW_RING * BLOCK)], (n, row, plan[row] and (plan[row][0], plan[row][1])))
                    yield None
                me.hidden_ring[tile % HIDDEN_RING] = (n, tile, "h")
                yield None
                c.hidden_ready[tile] = 1
            else:
                yield self.wait(r, "hidden_ready", lambda tile=tile: c.hidden_ready[tile] > 0)
                self.expect(r, me.hidden_ring[tile % HIDDEN_RING], (n, tile, "h"))
                yield from self.send(r, n, plan, tile, column)
                c.results_ready[tile] += 1
                if c.results_ready[tile] == (1 if self.fault == "told before all columns" else COLUMNS):
                    for source in filter(None, plan[tile * BLOCK:(tile + 1) * BLOCK]):
                        yield None
                        self.ranks[source[0]].token_arrived[source[1]] += 1
            yield None

    def send(self, r: int, n: int, plan: list, tile: int, column: int) -> Role:
        """One column tile's results of a row tile into their slots at home. No wait for the home: the row was pulled from there in this launch."""
        for source in filter(None, plan[tile * BLOCK:(tile + 1) * BLOCK]):
            if not self.aborted(r):
                home, t, k = source
                self.ranks[home].slots[(t * K + k) * COLUMNS + column] = (n, 0, (n, home, t, k, r))
            yield None

    def expect_slot(self, r: int, n: int, t: int, k: int, value: object) -> Role:
        """A sum's reads of a slot, column tile by column tile."""
        for column in range(COLUMNS):
            self.expect(r, self.ranks[r].slots[(t * K + k) * COLUMNS + column], (n, 0, value))
            yield None


class Mover:
    """One mover of a forward launch: stages its share, then announces, pulls and sums."""

    def __init__(self, model: Model, r: int, n: int, launch: Launch, plan: list, counters: Counters, m: int) -> None:
        self.model, self.r, self.n, self.plan, self.c = model, r, n, plan, counters
        self.me = model.ranks[r]
        self.tokens = model.routes[launch.exchange - 1][r]
        self.mine = list(range(m, len(self.tokens), MOVERS))
        rows = list(range(m, len(plan), MOVERS))
        others = range(MOVERS - 1 - m, len(self.tokens), MOVERS)     # it sums tokens whose counters another mover zeroes
        self.todo = {"announce": deque([0] * (m == 0)), "pull": deque(rows), "sum": deque(others)}

    def role(self) -> Role:
        yield from self.stage()
        kinds = list(KINDS)
        if self.model.fault == "blocking, sums before pulls":
            kinds = ["announce", "sum", "pull"]
        while waiting := [kind for kind in kinds if self.todo[kind]]:
            if self.model.blocking:
                waiting = waiting[:1]
            possible = [(getattr(self, f"can_{kind}")(self.todo[kind][0]), kind) for kind in waiting]
            yield lambda possible=possible: any(reached() for reached, _ in possible)
            for reached, kind in possible:
                if reached():
                    yield from getattr(self, kind)(self.todo[kind].popleft())
                    break

    def stage(self) -> Role:
        """Counters first: a token's counter is zero before anybody can know of this launch."""
        for t in self.mine:
            if self.model.fault != "zeroed after x_ready":
                self.me.token_arrived[t] = 0
            yield None
            self.me.x[t] = (self.n, 0, (self.r, t))
            yield None
        self.c.staged += 1
        yield None

    def can_announce(self, _: int) -> Callable[[], bool]:
        return self.model.wait(self.r, "staged", lambda: self.c.staged == MOVERS)

    def announce(self, _: int) -> Role:
        yield from self.model.signal(self.r, "x_ready", self.n)
        if self.model.fault == "zeroed after x_ready":
            self.me.token_arrived[:] = [0] * MAX_TOKENS

    def can_pull(self, row: int) -> Callable[[], bool]:
        before = row // BLOCK - ROW_RING                 # the tile that held this place: when its h is there, its rows have been read
        place = self.model.wait(self.r, "row place", lambda: before < 0 or self.c.hidden_ready[before] > 0)
        source = self.plan[row]
        staged = self.model.wait(self.r, "x_ready", lambda: source is None or self.model.flag(self.r, "x_ready", source[0], self.n))
        return lambda: place() and staged()

    def pull(self, row: int) -> Role:
        source, value = self.plan[row], None
        if source is not None:
            home, t, _ = source
            self.model.expect(self.r, self.model.ranks[home].x[t], (self.n, 0, (home, t)))
            value = (home, t)
            yield None
        self.me.row_ring[row % (ROW_RING * BLOCK)] = (self.n, row, value)
        yield None
        self.c.rows_ready[row // BLOCK] += 1
        yield None

    def can_sum(self, t: int) -> Callable[[], bool]:
        valid = sum(expert >= 0 for expert in self.tokens[t])
        zeroed = self.model.wait(self.r, "x_ready own", lambda: self.model.flag(self.r, "x_ready", self.r, self.n))
        arrived = self.model.wait(self.r, "token_arrived", lambda: self.me.token_arrived[t] == valid)
        return lambda: zeroed() and arrived()

    def sum(self, t: int) -> Role:
        results = []
        for k, expert in enumerate(self.tokens[t]):
            if expert >= 0:
                value = (self.n, self.r, t, k, self.model.owner[expert])
                yield from self.model.expect_slot(self.r, self.n, t, k, value)
                results.append(value)
        self.me.summed.setdefault(self.n, {})[t] = results
        yield None


def backward_roles(model: Model, r: int, n: int, launch: Launch, plan: list) -> list[Role]:
    """Movers and tensor cores of one rank's backward launch."""
    counters = BackwardCounters([0] * (len(plan) // BLOCK), [0] * (len(plan) // BLOCK))
    return [*(BackwardMover(model, r, n, launch, plan, counters, m).role() for m in range(MOVERS)),
            *(_backward_consumer(model, r, n, launch, plan, counters, which) for which in range(CONSUMERS))]


def _backward_consumer(model: Model, r: int, n: int, launch: Launch, plan: list, c: BackwardCounters, which: int) -> Role:
    """All DH, then all DX, then the weight gradients, dealt out in turn."""
    me, tiles = model.ranks[r], len(plan) // BLOCK
    tasks = [("dh", tile, 0) for tile in range(tiles)] + [("dx", tile, column) for column in range(COLUMNS) for tile in range(tiles) if launch.returns]
    tasks += [("weights", tile, 0) for tile in range(tiles) if launch.x_rows]
    for kind, tile, column in tasks[which::CONSUMERS]:
        rows = range(tile * BLOCK, (tile + 1) * BLOCK)
        if kind == "dh":
            yield model.wait(r, "dy_ready", lambda tile=tile: c.dy_ready[tile] == BLOCK)
            for row in rows:
                model.expect(r, me.dy_rows.get(row, _EMPTY), (n, row, plan[row] and plan[row][:2]))
                yield None
            me.dz[tile] = (n, tile, "dz")
            yield None
            c.dh_ready[tile] += 1
            c.dh_done += 1
        elif kind == "dx":
            yield model.wait(r, "dz", lambda tile=tile: c.dh_ready[tile] > 0)
            model.expect(r, me.dz.get(tile, _EMPTY), (n, tile, "dz"))
            yield from model.send(r, n, plan, tile, column)
            c.dx_done += 1
        else:
            yield model.wait(r, "x rows", lambda: c.x_pulled == len(plan))
            for row in rows:
                model.expect(r, me.x_rows.get(row, _EMPTY), (n, row, plan[row] and plan[row][:2]))
                yield None
        yield None


class BackwardMover:
    """One mover of a backward launch: one thing after the other, as the kernel's do."""

    def __init__(self, model: Model, r: int, n: int, launch: Launch, plan: list, counters: BackwardCounters, m: int) -> None:
        self.model, self.r, self.n, self.launch, self.plan, self.c, self.m = model, r, n, launch, plan, counters, m
        self.me = model.ranks[r]
        self.tokens = model.routes[launch.exchange - 1][r]
        self.rows = range(m, len(plan), MOVERS)

    def role(self) -> Role:
        model, r, n, c = self.model, self.r, self.n, self.c
        yield from self.stage()
        for p in range(model.W):
            yield model.wait(r, "grads_ready", lambda p=p: model.flag(r, "grads_ready", p, n))
        if self.m == 0:
            for p in range(model.W):                         # the pass that each rank has come with, before anybody may be a launch further
                seen = self.me.flags["grads_pass"][p]
                if seen != n and not model.aborted(r):
                    raise (EarlyReuse if seen > n else LostRow)(f"rank {r} took rank {p}'s pass {seen} for that of launch {n}")
                yield None
        yield from self.pull("dy", self.me.dy_rows)
        if self.launch.x_rows:
            yield from self.pull("x", self.me.x_rows)
        yield model.wait(r, "dh_done", lambda: c.dh_done == len(self.plan) // BLOCK)
        if self.launch.returns:
            yield from self.push_weight_gradients()
            yield model.wait(r, "dx_done", lambda: c.dx_done == len(self.plan) // BLOCK * COLUMNS)
        c.sent += 1
        sends = self.launch.returns or model.fault != "grads_sent only where rows return"
        if sends and c.sent == (1 if model.fault == "grads_sent before all have sent" else MOVERS) and not model.aborted(r):
            yield from model.signal(r, "grads_sent", n)
        yield None
        if model.fault == "results stand for grads_sent":
            yield model.wait(r, "results", lambda: all(cell[0] == n for cell in self.own_slots()))
        else:
            for p in range(model.W if sends else 0):
                yield model.wait(r, "grads_sent", lambda p=p: model.flag(r, "grads_sent", p, n))
        if self.launch.returns:
            yield from self.sum()

    def own_slots(self) -> list[Cell]:
        valid = [t * K + k for t, row in enumerate(self.tokens) for k, expert in enumerate(row) if expert >= 0 and self.launch.returns]
        return [self.me.weight_slots[slot] for slot in valid] + [self.me.slots[slot * COLUMNS + column] for slot in valid for column in range(COLUMNS)]

    def stage(self) -> Role:
        for t in range(self.m, len(self.tokens), MOVERS):
            self.me.dy[t] = (self.n, 0, (self.r, t))
            yield None
            if self.launch.x_rows and self.model.fault != "x not staged again":
                self.me.x[t] = (self.n, 0, (self.r, t))
                yield None
        self.c.staged += 1
        if self.c.staged == (1 if self.model.fault == "grads_ready before all have staged" else MOVERS):
            yield from self.model.signal(self.r, "grads_pass", self.n)
            yield from self.model.signal(self.r, "grads_ready", self.n)
        yield None

    def pull(self, what: str, into: dict[int, Cell]) -> Role:
        for row in self.rows:
            source = self.plan[row]
            if source is not None:
                home, t, _ = source
                self.model.expect(self.r, getattr(self.model.ranks[home], what)[t], (self.n, 0, (home, t)))
                yield None
            into[row] = (self.n, row, source and source[:2])
            yield None
            if what == "dy":
                self.c.dy_ready[row // BLOCK] += 1
            else:
                self.c.x_pulled += 1
            yield None

    def push_weight_gradients(self) -> Role:
        for row in self.rows:
            source = self.plan[row]
            if source is not None and not self.model.aborted(self.r):
                home, t, k = source
                self.model.expect(self.r, self.me.dz.get(row // BLOCK, _EMPTY), (self.n, row // BLOCK, "dz"))
                yield None
                self.model.ranks[home].weight_slots[t * K + k] = (self.n, 0, (self.n, home, t, k, self.r))
                yield None

    def sum(self) -> Role:
        for t in range(self.m, len(self.tokens), MOVERS):
            results = []
            for k, expert in enumerate(self.tokens[t]):
                if expert >= 0:
                    value = (self.n, self.r, t, k, self.model.owner[expert])
                    yield from self.model.expect_slot(self.r, self.n, t, k, value)
                    self.model.expect(self.r, self.me.weight_slots[t * K + k], (self.n, 0, value))
                    results.append(value)
            self.me.summed.setdefault(self.n, {})[t] = results
            yield None
