"""The roles of backward CTAs, their own source run as Python threads under a random scheduler: a launch that ends, or who waits for what.

One role is one thread: scalars are integers, barriers and counters behave as the device's do (a wait sees only the parity of a phase), tiles are nothing. So
what shows is the order of waits and signals between roles and CTAs; what differs between the threads or warps of a role does not.
"""
from __future__ import annotations

import ast
import itertools
import random
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

from order_support import FOLDER

FILES = ("tasks", "wave_loop", "gemm", "backward_tasks", "backward_pipe", "backward_waves",
         "backward_load", "backward_consume", "backward_store", "backward_move")
BOX_BYTES = 8192


class Tile:
    """A block of data, or a layout: whatever is done with it gives it again."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_, **__):
        return self

    def __getitem__(self, _):
        return self

    def split(self):
        return self, self


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "mod", "and", "rand", "or", "xor", "rshift",
              "lt", "le", "gt", "ge", "eq", "ne", "neg"):
    setattr(Tile, f"__{_name}__", lambda self, *_: self)
TILE = Tile()


class Number(int):
    """A scalar of the device. Division rounds towards zero, as there."""

    def to(self, kind):
        return Number(self) if kind is int else TILE

    def __floordiv__(self, other):
        return Number(abs(self) // abs(int(other)) * (1 if (self >= 0) == (int(other) >= 0) else -1))

    def __mod__(self, other):
        return self - self // other * other


def _wrapped(name: str):
    plain = getattr(int, name)
    return lambda self, other: NotImplemented if isinstance(other, (Tile, Pointer, float)) else Number(plain(self, int(other)))


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "and", "rand", "or", "xor", "rshift", "lshift", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Number, f"__{_name}__", _wrapped(f"__{_name}__"))
Number.__hash__ = int.__hash__


class Pointer:
    def __init__(self, values: list[int], at: int = 0) -> None:
        self.values, self.at = values, at

    def __add__(self, offset):
        return TILE if isinstance(offset, Tile) else Pointer(self.values, self.at + int(offset))

    @property
    def value(self) -> int:
        return self.values[self.at]


class Over(Exception):
    """The launch is stuck or has failed: every role stops."""


class Scheduler:
    """Lets one role run at a time, from one wait or signal to the next; which, and how fast each is for a while, is random."""

    def __init__(self, seed: int, ctas: int) -> None:
        self.random, self.ctas, self.roles, self.turns = random.Random(seed), ctas, [], 0
        self.stuck: list[str] = []
        self.here, self.end = threading.local(), threading.Event()

    def run(self, roles: Sequence[tuple[str, int, Callable[[], None]]]) -> list[str]:
        """Run (name, CTA, function) to the end: [] or, for every role that is left, its name and what it waits for."""
        self.roles = [types.SimpleNamespace(name=name, cta=cta, body=body, turn=threading.Semaphore(0), ready=None, place="its start", over=False, speed=1.0)
                      for name, cta, body in roles]
        threads = [threading.Thread(target=self._role, args=(role,)) for role in self.roles]
        for thread in threads:
            thread.start()
        self._pass_on()
        self.end.wait()
        for thread in threads:
            thread.join()
        return self.stuck

    def _role(self, role) -> None:
        self.here.role = role
        role.turn.acquire()
        try:
            if not self.stuck:
                role.body()
        except Over:
            pass
        except Exception as error:                          # a role that fails ends the launch, and says why
            self._stop([f"{role.name}: {error!r}"])
        role.over = True
        if not self.stuck:
            self._pass_on()

    def _stop(self, why: list[str]) -> None:
        self.stuck = why
        for role in self.roles:
            role.turn.release()
        self.end.set()

    def _pass_on(self) -> Any:
        self.turns += 1
        left = [role for role in self.roles if not role.over]
        if self.turns % 400 == 0:
            for role in left:
                role.speed = self.random.choice((0.02, 0.2, 1, 1, 5))
        ready = [role for role in left if role.ready is None or role.ready()]
        if not left:
            self.end.set()
        elif not ready:
            self._stop([f"{role.name} waits for {role.place}" for role in left])
        else:
            self.random.choices(ready, [role.speed for role in ready])[0].turn.release()

    def wait(self, ready: Callable[[], bool] | None, place: str) -> None:
        """Give the turn away until `ready` holds (None: at once) and the random order has come back here."""
        role = self.here.role
        role.ready, role.place = ready, place
        self._pass_on()
        role.turn.acquire()
        if self.stuck:
            raise Over
        role.ready = None


class Barrier:
    """An mbarrier: a phase is over when `count` arrivals and all announced bytes are there."""

    def __init__(self, count: int, name: str) -> None:
        self.count = self.left = count
        self.bytes, self.phase, self.name = 0, 0, name

    def arrive(self, count: int, announced: int = 0) -> None:
        self.left -= count
        self.bytes += announced
        assert self.left >= 0 and self.bytes >= 0, f"{self.name}: more arrivals or bytes than its phase has"
        if self.left == 0 and self.bytes == 0:
            self.left, self.phase = self.count, self.phase + 1

    @property
    def at_rest(self) -> bool:
        return self.left == self.count and self.bytes == 0


class Ring(list):
    def index(self, i):
        return self[int(i)]


class Word:
    value = None

    def load(self, _):
        return Number(self.value)

    def store(self, value):
        self.value = value


class Roles:
    """The kernel's files with `mutate` applied to their text, bound to a scheduler."""

    def __init__(self, scheduler: Scheduler, mutate: Callable[[str], str]) -> None:
        self.scheduler = scheduler
        module = types.ModuleType("roles")
        self.names = module.__dict__
        self.names.update(self._language())
        for name in FILES:
            tree = ast.parse(mutate((FOLDER / f"{name}.py").read_text()))
            tree.body = [node for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom))]
            exec(compile(tree, f"{name}.py", "exec"), self.names)
        for name in ("tile_of_carry", "_bias_sums_of_wave", "_whole", "_into_main_grad", "_copy_piece", "_dots", "_slot_pieces", "_bias_sums",
                     "_gate_weight_sums", "_sum_dx", "_sum_partials",
                     "_with_bias"):                         # data alone: nobody waits in them
            self.names[name] = TILE
        self.names.update(_halves=lambda *_: (TILE, TILE), _dh_half=lambda *_: (TILE,) * 4)

    def _language(self) -> dict[str, Any]:
        wait = self.scheduler.wait

        def numbers(f):
            return lambda a, b: TILE if isinstance(a, Tile) or isinstance(b, Tile) else Number(f(int(a), int(b)))

        def load(pointer, mask=True, other=0, volatile=False):
            return TILE if not isinstance(pointer, Pointer) else Number(pointer.value if isinstance(mask, Tile) or mask else other)

        def add(pointer, value, sem=None, scope=None):
            wait(None, "its turn")
            before = pointer.value
            pointer.values[pointer.at] += int(value)
            return Number(before)

        def acquire(pointer):
            wait(None, "its turn")
            return Number(pointer.value)

        def at_least(counter, target, _, phase, tile):
            wait(lambda: counter.value >= target, f"counter {counter.at} to reach {int(target)} (wait {phase}, tile {int(tile)})")

        def barrier_wait(barrier, parity, pred=True):
            wait((lambda: barrier.phase & 1 != int(parity)) if pred else None, f"{barrier.name}, parity {int(parity)}, now in phase {barrier.phase}")

        def barrier_arrive(barrier, count=1, pred=True):
            wait(None, "its turn")
            if pred:
                barrier.arrive(count)

        mbarrier = types.SimpleNamespace(wait=barrier_wait, arrive=barrier_arrive, expect=lambda barrier, size: barrier.arrive(1, size))
        gl = types.SimpleNamespace(
            constexpr=lambda value: value, tensor=object, shared_memory_descriptor=object, int32=int, int64=None, float32=float, bfloat16=None,
            where=lambda condition, yes, no: TILE if isinstance(condition, Tile) else yes if condition else no, cdiv=numbers(lambda a, b: -(-a // b)),
            minimum=numbers(min), maximum=numbers(max), load=load, store=TILE, atomic_add=add, static_range=range, full=lambda _, value, *__: value,
            max=lambda value, _: value, program_id=lambda _: Number(self.scheduler.here.role.cta), num_programs=lambda _: Number(self.scheduler.ctas),
            **dict.fromkeys(("arange", "zeros", "sum", "fma", "exp2", "erf", "convert_layout", "join", "NVMMADistributedLayout", "SliceLayout", "BlockedLayout",
                             "NVMMASharedLayout"), TILE))
        nothing = ("tma_store", "tma_store_wait", "fence_proxy", "nap", "thread_barrier", "fence_async_shared", "warpgroup_mma", "reinterpret",
                   "keep_loads_above", "OWN_SLOTS", "peers_of", "rows_at", "find_homes", "send_chunk")
        return {**dict.fromkeys(nothing, TILE), "gl": gl, "mbarrier": mbarrier, "aggregate": lambda cls: cls,
                **dict.fromkeys(("fresh", "fresh_float", "fresh_pairs", "apart", "new_block"), lambda value, *_: value),
                "this_cta": lambda _: gl.program_id(0), "grid_size": lambda _: gl.num_programs(0),
                "gluon": types.SimpleNamespace(jit=lambda f: f, constexpr_function=lambda f: f),
                "tma_load": lambda _, __, ready, ___: ready.arrive(0, -BOX_BYTES), "warpgroup_mma_wait": lambda *_, **__: wait(None, "its turn") or TILE,
                "take_ticket": lambda pointer: add(pointer, 1), "count_system": lambda pointer: add(pointer, 1),
                "stores_complete": lambda _: wait(None, "its turn"), "wait_at_least": at_least,
                "add_release": add, "load_acquire": acquire, "WAIT_ROWS": 1, "WAIT_HIDDEN": 2, "WAIT_HIDDEN_SLOT": 3}


def launch(seed: int, ctas: int, recompute: bool, H: int, I: int, T: int, tokens: Sequence[int], wants: int, group: int, shared: Sequence[int] = (),
           gated: int = 0, into_main_grad: bool = False, stagger: int = 1, mutate: Callable[[str], str] = lambda text: text,
           wave_tiles: int | None = None, several_ranks: bool = False) -> list[str]:
    """One backward launch of `ctas` CTAs for experts with these numbers of rows: [] if it ended with every task published and every barrier at rest.

    wants: as backward_tasks.Schedule has it; group: row tiles of a group; gated: bit i, shared expert i has a gate. wave_tiles: row tiles of bounded
    buffers; their waves then run one after the other, each with counters and barriers of its own, as the meetings between them see to. several_ranks: the
    storer sends rows of dx home; movers are one rank's.
    """
    waves = 1 if wave_tiles is None else max(1, -(-sum(-(-count // 128) for count in tokens) // wave_tiles))
    for wave in range(waves):
        found = _wave(seed + 1000 * wave, ctas, recompute, H, I, T, tokens, wants, group, shared, gated, into_main_grad, stagger, mutate, wave_tiles, wave,
                      several_ranks)
        if found:
            return found
    return []


def _wave(seed: int, ctas: int, recompute: bool, H: int, I: int, T: int, tokens: Sequence[int], wants: int, group: int, shared: Sequence[int], gated: int,
          into_main_grad: bool, stagger: int, mutate: Callable[[str], str], wave_tiles: int | None, wave: int, several_ranks: bool) -> list[str]:
    """One wave of a launch, or all of one without waves."""
    scheduler = Scheduler(seed, ctas)
    roles = Roles(scheduler, mutate)
    k = types.SimpleNamespace(**roles.names)
    tiles = [-(-count // 128) for count in tokens]
    offsets = [0, *itertools.accumulate(128 * n for n in tiles)]
    capacity, count, widths = sum(tiles) + 3, len(shared), [*shared, 0, 0]
    route = [-1] * 128 * (capacity + 1)
    for first, rows in zip(offsets, tokens):
        route[first:first + rows] = [0] * rows
    expert = [e for e, n in enumerate(tiles) for _ in range(n)] + [-1] * 3
    n = Number
    sixteenths = [n(width // 16) for width in (H, I, widths[0], widths[1])]
    here, route_here, expert_here = (), Pointer(route), Pointer(expert)
    if wave_tiles is None:
        s = k.make_schedule(*sixteenths, n(T), n(sum(tiles)), n(len(tokens)), n(count), n(group), n(wants), recompute)
    else:
        recompute, word = k.Z_AGAIN, Word()
        word.value = wave
        w = k.Wave(word, Pointer([sum(tiles)]), n(wave_tiles), TILE)
        here = (k.Carry(w, TILE), TILE)
        scheduler.here.role = types.SimpleNamespace(cta=0)
        s = k.backward_schedule_of_wave(sixteenths, n(T), n(count), n(group), n(wants), Pointer(expert), Pointer(offsets), n(len(tokens)), w, 4)
        capacity, route_here, expert_here = wave_tiles, Pointer(route, wave * wave_tiles * 128), Pointer(expert, wave * wave_tiles)
    # the counters' places are those of backward._backward_kernel
    totals = Pointer([0] * int(16 + 3 * capacity + (2 * count + 1) * s.token_tiles + 1 + len(tokens)))
    gates_ready = totals + (16 + 2 * capacity + count * s.token_tiles)
    x_ready = gates_ready + (s.token_tiles + 1 + capacity + count * s.token_tiles if recompute else s.token_tiles)
    flags = k.BackwardFlags(totals, totals + 16, totals + 16 + capacity, gates_ready, x_ready, TILE, n(capacity))
    rows, part = (k.Rows(tile_map, Pointer(offsets), Pointer(list(tokens)), slots, TILE, TILE, n(gated | 8 * into_main_grad), TILE, TILE, TILE, n(0), TILE)
                  for tile_map, slots in ((Pointer(expert), Pointer(route)), (expert_here, route_here)))
    sums = types.SimpleNamespace(gate_0=TILE, gate_1=TILE, gate_slopes=TILE, K=n(2), num_experts=n(len(tokens)), dx=TILE)
    source, bias, three, barriers = k.Source(TILE, TILE), (TILE, n(0)), (TILE,) * 3, []
    jobs: list[tuple[str, int, Callable[[], None]]] = []
    for cta in range(ctas):
        def ring(count, size, name, cta=cta):
            found = Ring(Barrier(count, f"{name}[{i}] of CTA {cta}") for i in range(size))
            barriers.extend(found)
            return found

        pipe = k.BackwardPipe(TILE, TILE, TILE, ring(1, 4, "load_ready"), ring(2, 4, "load_empty"), ring(2, 4, "z_done"), ring(1, 1, "lead"))
        outs = [k.Out(TILE, ring(1, 1, f"out_{w}.full")[0], ring(1, 1, f"out_{w}.empty")[0]) for w in (0, 1)]
        tasks = k.Tasks(Ring(Word() for _ in range(16)), ring(1, 4, "tasks.full"), ring(3, 4, "tasks.empty"))
        for w in (0, 1):
            jobs.append((f"consumer {w} of CTA {cta}", cta,
                         lambda p=pipe, q=tasks, o=outs[w], w=w: k.consume(s, rows, flags, p, q, o, bias, here, w, 0, stagger, 0, recompute, 0, 0)))
        jobs += [(f"producer of CTA {cta}", cta,
                  lambda p=pipe, q=tasks: k.producer(s, part, flags, p, q, (TILE,) * 7, three, three, (TILE,) * 4, here, recompute, 0)),
                 (f"storer of CTA {cta}", cta,
                  lambda p=pipe, q=tasks, o=outs: k.storer(s, rows, flags, p, q, *o, (TILE,) * 4, TILE, three, three, n(0), TILE, three, several_ranks,
                                                              recompute, 0)),
                 (f"movers of CTA {cta}", cta, lambda: k.mover(s, part, flags, sums, source, source, TILE, TILE, 8, 1, 2, recompute, 0, 0))]
    found = scheduler.run(jobs)
    s = k.own(s)
    done = [(totals + 1).value == k.all_dh_tasks(s), (totals + 2).value == k.all_dx_tasks(s),
            not recompute or k.z_done(s, flags).value == k.all_z_tasks(s, recompute)]
    return found or [f"{barrier.name} is not at rest" for barrier in barriers if not barrier.at_rest] or ([] if all(done) else ["tasks were not published"])
