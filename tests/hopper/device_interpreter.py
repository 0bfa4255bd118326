"""Runs the Gluon source of device functions as plain Python on numpy, one thread a role: their index arithmetic, waits and signals, without a GPU.

`load(mutations)` executes the kernels' files against a stand-in for `gl`: a scalar or block is a `Block`, memory is a `Memory` of checked allocations in
one address space, so a pointer from a table works and an access outside of every allocation raises. A role runs as one program (layouts mean
nothing), so what it cannot show is what differs between threads: a missing fence, barrier or acquire. Triton is not needed.
"""
from __future__ import annotations

import math
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FILES = ("sync", "tasks", "peers", "wave_loop", "expert_parallel_send", "gemm", "move", "expert_parallel_move", "expert_parallel_plan",
         "backward_tasks", "backward_pipe", "backward_waves", "backward_move", "expert_parallel_backward_move")
ROOT = Path(__file__).parents[2] / "mok" / "engines" / "hopper"
PACKAGE = "mok_interpreted.engines.hopper"
SIZES = {"bf16": 2, "f32": 4, "i32": 4, "i64": 8, "i1": 1}
DTYPES = {"bf16": np.float32, "f32": np.float32, "i32": np.int32, "i64": np.int64, "i1": np.bool_}


class OutOfBounds(AssertionError):
    """An access outside of every allocation, or one that is not a whole element of its allocation's type."""


class Interrupted(Exception):
    """The time that a test gives its threads is over."""


def round_bf16(values: NDArray) -> NDArray:
    """float32 rounded to the nearest bf16, ties to even, as float32; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32).reshape(values.shape)
    return np.where(np.isnan(values), np.float32(np.nan), rounded)


class Memory:
    """Allocations in one address space; every access is atomic and checked."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._next = 1 << 20
        self._bases: list[int] = []
        self._arrays: list[tuple[NDArray, str]] = []
        self.deadline = math.inf

    def allocate(self, values: NDArray, kind: str) -> Block:
        """A pointer to `values` (used in place, flat), elements of `kind`."""
        base = self._next
        self._next += -(-max(values.size * SIZES[kind], 1) // 256) * 256 + 4096
        self._bases.append(base)
        self._arrays.append((values.reshape(-1), kind))
        return Block(np.int64(base), f"*{kind}")

    def _each(self, pointer: Block, mask: NDArray):
        """(array, positions in the flat block, indices in the array) for every allocation that the unmasked addresses touch."""
        if time.monotonic() > self.deadline:
            raise Interrupted
        address = np.broadcast_to(pointer.a, mask.shape).reshape(-1)
        positions = np.nonzero(mask.reshape(-1))[0]
        owner = np.searchsorted(np.array(self._bases), address[positions], side="right") - 1
        for o in np.unique(owner):
            array, kind = self._arrays[o] if o >= 0 else (np.zeros(0), "i32")
            here = positions[owner == o]
            offset = address[here] - self._bases[o]
            if (kind, pointer.kind) == ("i32", "*i64"):            # the control block holds an address in two words
                array, kind = array[:array.size // 2 * 2].view(np.int64), "i64"
            size = SIZES[kind]
            if o < 0 or f"*{kind}" != pointer.kind or (offset % size).any() or (offset // size >= array.size).any():
                raise OutOfBounds(f"{pointer.kind} access at offsets {offset.min()}..{offset.max()} of an allocation of {array.size} {kind}")
            yield array, here, offset // size

    def read(self, pointer: Block, mask: Any, other: Any) -> Block:
        kind = pointer.kind[1:]
        shape = np.broadcast_shapes(pointer.a.shape, np.shape(raw(mask)))
        where = np.broadcast_to(np.asarray(raw(mask), bool), shape)
        out = np.full(shape, raw(other), DTYPES[kind]).reshape(-1)
        with self.lock:
            for array, here, index in self._each(pointer, where):
                out[here] = array[index]
        return Block(out.reshape(shape), kind)

    def write(self, pointer: Block, value: Any, mask: Any) -> None:
        shape = np.broadcast_shapes(pointer.a.shape, np.shape(raw(value)), np.shape(raw(mask)))
        where = np.broadcast_to(np.asarray(raw(mask), bool), shape)
        values = np.broadcast_to(raw(value), shape).reshape(-1)
        pointer = Block(np.broadcast_to(pointer.a, shape), pointer.kind)
        with self.lock:
            for array, here, index in self._each(pointer, where):
                array[index] = values[here]

    def update(self, pointer: Block, value: Any, mask: Any, add: bool) -> Block:
        """Atomic add or exchange, lane after lane; returns what was there before."""
        shape = np.broadcast_shapes(pointer.a.shape, np.shape(raw(value)), np.shape(raw(mask)))
        where = np.broadcast_to(np.asarray(raw(mask), bool), shape)
        values = np.broadcast_to(raw(value), shape).reshape(-1)
        before = np.zeros(shape, np.int32).reshape(-1)
        pointer = Block(np.broadcast_to(pointer.a, shape), pointer.kind)
        with self.lock:
            for array, here, index in self._each(pointer, where):
                for lane, i in zip(here, index, strict=True):
                    before[lane] = array[i]
                    array[i] = array[i] + values[lane] if add else values[lane]
        return Block(before.reshape(shape), "i32")


def raw(value: Any) -> Any:
    return value.a if isinstance(value, Block) else value


def kind_of(value: Any) -> str:
    if isinstance(value, Block):
        return value.kind
    return "i1" if isinstance(value, bool) else "f32" if isinstance(value, float) else "i32"


class Block:
    """A scalar or block of one kind; "*kind" are pointers: byte addresses, moved by elements."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, a: Any, kind: str) -> None:
        self.a = np.asarray(a, np.int64 if kind.startswith("*") else DTYPES[kind])
        self.kind = kind

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout=None)

    def to(self, kind: str) -> Block:
        if kind.startswith("*") or self.kind.startswith("*"):
            return Block(self.a, kind)
        return Block(round_bf16(self.a.astype(np.float32)), kind) if kind == "bf16" else Block(self.a.astype(DTYPES[kind]), kind)

    def __getitem__(self, key: Any) -> Block:
        return Block(self.a[key], self.kind)

    def __bool__(self) -> bool:
        return bool(self.a)

    def __index__(self) -> int:
        return int(self.a)

    def _pointer_plus(self, other: Any, sign: int) -> Block:
        return Block(self.a + sign * np.asarray(raw(other), np.int64) * SIZES[self.kind[1:]], self.kind)

    def _arithmetic(self, other: Any, operation: Any) -> Block:
        kinds = {self.kind, kind_of(other)}
        kind = "f32" if kinds & {"f32", "bf16"} else "i64" if "i64" in kinds else "i32"
        if kinds == {"i1"}:
            kind = "i1"
        return Block(operation(self.a.astype(DTYPES[kind]), np.asarray(raw(other)).astype(DTYPES[kind])), kind)

    def __add__(self, other: Any) -> Block:
        if self.kind.startswith("*"):
            return self._pointer_plus(other, 1)
        return other + self if kind_of(other).startswith("*") else self._arithmetic(other, np.add)

    def __sub__(self, other: Any) -> Block:
        return self._pointer_plus(other, -1) if self.kind.startswith("*") else self._arithmetic(other, np.subtract)

    def __rsub__(self, other: Any) -> Block:
        return self._arithmetic(other, lambda a, b: b - a)

    def __mul__(self, other: Any) -> Block:
        return self._arithmetic(other, np.multiply)

    def __rtruediv__(self, other: Any) -> Block:
        return Block(np.float32(raw(other)) / self.a.astype(np.float32), "f32")

    def __floordiv__(self, other: Any) -> Block:
        return self._arithmetic(other, lambda a, b: np.where((a < 0) != (b < 0), -(np.abs(a) // np.abs(b)), np.abs(a) // np.abs(b)))     # as C divides

    def __rfloordiv__(self, other: Any) -> Block:
        return Block(other, kind_of(other)) // self

    def __mod__(self, other: Any) -> Block:
        return self._arithmetic(other, np.fmod)

    def __rshift__(self, other: Any) -> Block:
        return self._arithmetic(other, np.right_shift)

    def __and__(self, other: Any) -> Block:
        return self._arithmetic(other, np.bitwise_and)

    def __or__(self, other: Any) -> Block:
        return self._arithmetic(other, np.bitwise_or)

    def __xor__(self, other: Any) -> Block:
        return self._arithmetic(other, np.bitwise_xor)

    def __neg__(self) -> Block:
        return Block(-self.a, self.kind)

    def _compare(self, other: Any, operation: Any) -> Block:
        return Block(operation(self.a, raw(other)), "i1")

    def __lt__(self, other: Any) -> Block:
        return self._compare(other, np.less)

    def __le__(self, other: Any) -> Block:
        return self._compare(other, np.less_equal)

    def __gt__(self, other: Any) -> Block:
        return self._compare(other, np.greater)

    def __ge__(self, other: Any) -> Block:
        return self._compare(other, np.greater_equal)

    def __eq__(self, other: Any) -> Block:  # type: ignore[override]
        return self._compare(other, np.equal)

    def __ne__(self, other: Any) -> Block:  # type: ignore[override]
        return self._compare(other, np.not_equal)

    __radd__, __rmul__, __rand__, __ror__ = __add__, __mul__, __and__, __or__


class SharedWords:
    """Shared memory of one CTA, as few words as a test makes it, or the given values (used in place)."""

    def __init__(self, count: int = 1, kind: str = "i32", values: NDArray | None = None) -> None:
        self.a, self.kind = np.full(count, -1, DTYPES[kind]) if values is None else values, kind

    def store(self, value: Block) -> None:
        self.a[:] = value.a

    def load(self, layout: Any) -> Block:
        return Block(self.a.copy(), self.kind)

    def slice(self, start: int, length: int) -> SharedWords:
        assert 0 <= start <= start + length <= len(self.a), f"rows {start}..{start + length} of {len(self.a)} in shared memory"
        return SharedWords(kind=self.kind, values=self.a[start:start + length])


class ConstInt(int):
    value = property(int)


class ConstFloat(float):
    value = property(float)


class Language(types.ModuleType):
    """The part of `gl` that these functions use."""

    bfloat16, float32, int32, int64, tensor, shared_memory_descriptor = "bf16", "f32", "i32", "i64", "tensor", "shared"

    def __init__(self, memory: Memory) -> None:
        super().__init__("gl")
        self.memory, self.local = memory, threading.local()

    @staticmethod
    def constexpr(value: Any) -> Any:
        return ConstFloat(value) if isinstance(value, float) else ConstInt(value) if type(value) is int else value

    def program_id(self, axis: int) -> Block:
        return Block(self.local.program, "i32")

    def num_programs(self, axis: int) -> Block:
        return Block(self.local.programs, "i32")

    @staticmethod
    def BlockedLayout(*_: Any) -> None: ...
    @staticmethod
    def SliceLayout(*_: Any) -> None: ...
    @staticmethod
    def pointer_type(kind: str) -> str:
        return f"*{kind}"

    @staticmethod
    def static_range(*bounds: int) -> range:
        return range(*bounds)

    @staticmethod
    def arange(begin: int, end: int, layout: Any = None) -> Block:
        return Block(np.arange(begin, end), "i32")

    @staticmethod
    def zeros(shape: Any, kind: str, layout: Any = None) -> Block:
        return Block(np.zeros([int(n) for n in shape]), kind)

    @staticmethod
    def full(shape: Any, value: Any, kind: str, layout: Any = None) -> Block:
        return Block(np.full([int(n) for n in shape], raw(value)), kind)

    @staticmethod
    def cast(value: Any, kind: str) -> Block:
        return value.to(kind) if isinstance(value, Block) else Block(value, kind)

    @staticmethod
    def convert_layout(value: Block, layout: Any, **_: Any) -> Block:
        return value

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> Block:
        kinds = {kind_of(a), kind_of(b)}
        pointer = next((kind for kind in kinds if kind.startswith("*")), None)
        kind = pointer or next(kind for kind in ("bf16", "f32", "i64", "i32", "i1") if kind in kinds)
        return Block(np.where(raw(condition), raw(a), raw(b)), kind)

    def maximum(self, a: Any, b: Any) -> Block:
        return self.where(np.asarray(raw(a)) > np.asarray(raw(b)), a, b)

    def minimum(self, a: Any, b: Any) -> Block:
        return self.where(np.asarray(raw(a)) < np.asarray(raw(b)), a, b)

    @staticmethod
    def max(value: Block, axis: int) -> Block:
        return Block(value.a.max(axis) if value.a.ndim else value.a, value.kind)

    @staticmethod
    def min(value: Block, axis: int) -> Block:
        return Block(value.a.min(axis) if value.a.ndim else value.a, value.kind)

    @staticmethod
    def sum(value: Block, axis: int) -> Block:
        return Block(value.a.sum(axis, dtype=value.a.dtype), value.kind)

    @staticmethod
    def associative_scan(value: Block, axis: int, combine: Any) -> Block:
        return Block(np.cumsum(value.a, axis, dtype=value.a.dtype), value.kind)

    @staticmethod
    def cdiv(a: Any, b: Any) -> Any:
        return (a + b - 1) // b

    @staticmethod
    def fma(a: Any, b: Any, c: Any) -> Block:
        wide = [np.asarray(raw(v), np.float64) for v in (a, b, c)]
        return Block((wide[0] * wide[1] + wide[2]).astype(np.float32), "f32")

    @staticmethod
    def exp2(value: Block) -> Block:
        return Block(np.exp2(value.a), "f32")

    def load(self, pointer: Block, mask: Any = True, other: Any = 0, volatile: bool = False) -> Block:
        return self.memory.read(pointer, mask, other)

    def store(self, pointer: Block, value: Any, mask: Any = True) -> None:
        self.memory.write(pointer, value, mask)

    def atomic_add(self, pointer: Block, value: Any, mask: Any = True, sem: str = "", scope: str = "") -> Block:
        return self.memory.update(pointer, value, mask, True)

    def atomic_xchg(self, pointer: Block, value: Any, mask: Any = True, sem: str = "", scope: str = "") -> Block:
        return self.memory.update(pointer, value, mask, False)

    def inline_asm_elementwise(self, text: str, constraints: str, arguments: list, **_: Any) -> Block:
        assert "error+8" in text, f"an instruction that the interpreter does not know: {text}"
        return Block(self.local.reason, "i32")


def replaced_functions(gl: Language, memory: Memory, reports: list, sleeps: Any) -> dict[str, Any]:
    """sync.py's functions that are instructions: acquires are reads, fences nothing, a time-out becomes an entry of `reports`."""
    def wait_a_little() -> None:
        if time.monotonic() > memory.deadline:
            raise Interrupted
        time.sleep(2e-4)

    def load_acquire(pointer: Block) -> Block:
        wait_a_little()
        return memory.read(pointer, True, 0)

    def report_timeout(control: Block, phase: int, tile: Any, expected: Any, seen: Any) -> None:
        with memory.lock:
            if memory.update(control + 2, 1, True, False).a == 0:
                reports.append((int(gl.local.rank), int(phase), int(tile), int(expected), int(seen)))
                gl.local.reason = int(phase)

    nothing = dict.fromkeys(("fence_proxy", "fence_acquire", "fence_acquire_system", "stores_complete", "keep_loads_above"), lambda anchor: None)
    same = dict.fromkeys(("fresh", "fresh_float", "fresh_pairs", "fresh_long", "new_block"), lambda value: value)
    return {**nothing, **same, "this_cta": lambda anchor: gl.program_id(0), "grid_size": lambda anchor: gl.num_programs(0),
            "load_acquire": load_acquire, "load_acquire_system": load_acquire,
            "count_system": lambda pointer: memory.update(pointer, 1, True, True), "report_timeout": report_timeout, "nap": lambda seed, debug: sleeps(),
            "pause": lambda anchor: wait_a_little(), "clock": lambda anchor: Block(int(time.monotonic() * 1000) & 0x3FFFFFFF, "i32")}


def load(memory: Memory, reports: list, sleeps: Any,
         mutations: dict[str, list[tuple[str, str]]] | None = None) -> tuple[Language, dict[str, types.ModuleType]]:
    """(gl, modules by file name), their functions callable; `mutations` replaces text of a file: a fault that a test plants."""
    gl = Language(memory)
    stand_ins = _stand_ins(gl)
    kept = {name: sys.modules.get(name) for name in stand_ins}
    modules: dict[str, types.ModuleType] = {}
    try:
        sys.modules.update(stand_ins)
        for name in FILES:
            text = (ROOT / f"{name}.py").read_text()
            for old, new in (mutations or {}).get(name, []):
                assert text.count(old) == 1, f"{name}.py holds {text.count(old)} times: {old}"
                text = text.replace(old, new)
            module = types.ModuleType(f"{PACKAGE}.{name}")
            module.__package__ = PACKAGE
            sys.modules[module.__name__] = modules[name] = module
            exec(compile(text, str(ROOT / f"{name}.py"), "exec"), module.__dict__)
            if name == "sync":
                module.__dict__.update(replaced_functions(gl, memory, reports, sleeps))
    finally:
        for name, module_before in kept.items():
            if module_before is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module_before
        for name in FILES:
            sys.modules.pop(f"{PACKAGE}.{name}", None)
    return gl, modules


def _stand_ins(gl: Language) -> dict[str, Any]:
    """Modules that the files import, for as long as they are executed."""
    import mok.config
    import mok.fabric.flag_page
    import mok.plan
    import mok.runtime

    def module(name: str, **members: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__dict__.update(members)
        made.__path__ = []
        return made

    def jit(function: Any = None, **_: Any) -> Any:
        return function if function is not None else lambda f: f

    unused: Any = types.SimpleNamespace()
    gluon = module("gluon", jit=jit, constexpr_function=lambda f: f, language=gl)
    triton = module("triton", jit=jit, language=module("tl", constexpr=None), cdiv=lambda a, b: -(-a // b))
    hopper = module("hopper", fence_async_shared=None, mbarrier=unused, warpgroup_mma=None, warpgroup_mma_wait=None)
    compat = module("compat", aggregate=lambda c: c, thread_barrier=lambda: None, tma_load=None, tma_store=None, tma_store_wait=None)
    ours = {"": {}, ".engines": {}, ".engines.hopper": {"plan_kernel": unused}, ".fabric": {"flag_page": mok.fabric.flag_page}}
    return {"triton": triton, "triton.language": triton.language, "triton.experimental": module("e", gluon=gluon), "triton.experimental.gluon": gluon,
            "triton.experimental.gluon.language": gl,
            "triton.experimental.gluon.language.nvidia": module("n"), "triton.experimental.gluon.language.nvidia.hopper": hopper,
            **{f"mok_interpreted{name}": module(name, **members) for name, members in ours.items()},
            f"{PACKAGE}.compat": compat, f"{PACKAGE}.plan_kernel": module("plan_kernel"), "mok_interpreted.config": mok.config,
            "mok_interpreted.plan": mok.plan, "mok_interpreted.runtime": mok.runtime, "mok_interpreted.fabric.flag_page": mok.fabric.flag_page}
