"""The only process-wide state: the CPU tile pool, scratch, group registry, error words and the set of messages already printed."""
from __future__ import annotations

import ctypes
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

EXPERT_RADIX = 2048   # an error word is id * EXPERT_RADIX + E; E (1 to 1024) makes it differ from 0, which means "no error"


class Scratch:
    """One pool thread's reusable buffers. Contents are unspecified on return from `get`; a buffer lives until `get` asks the name for more."""

    def __init__(self) -> None:
        self._flat: dict[tuple[str, torch.dtype], Tensor] = {}
        self._kept: dict[str, tuple[Any, Tensor]] = {}

    def get(self, name: str, rows: int, columns: int, dtype: torch.dtype, pitch: int | None = None) -> Tensor:
        """A (rows, columns) view whose rows start `pitch` elements apart (None = columns: contiguous)."""
        pitch = columns if pitch is None else pitch
        needed = rows * pitch
        flat = self._flat.get((name, dtype))
        if flat is None or flat.numel() < needed:
            flat = self._flat[name, dtype] = torch.empty(max(needed, 1), dtype=dtype, device="cpu")
        return flat[:needed].view(rows, pitch)[:, :columns]

    def like(self, name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A contiguous buffer of a 2-D tensor's shape."""
        return self.get(name, tensor.shape[0], tensor.shape[1], tensor.dtype if dtype is None else dtype)

    def kept(self, name: str, key: Any, source: Tensor, dtype: torch.dtype) -> Tensor:
        """`source` (2-D) in `dtype`, copied once for consecutive calls with an equal key: a weight that one thread uses for several tiles."""
        known = self._kept.get(name)
        if known is None or known[0] != key:
            copy = self.like(name, source, dtype).copy_(source)
            known = self._kept[name] = (key, copy)
        return known[1]

    def num_bytes(self) -> int:
        return sum(flat.numel() * flat.element_size() for flat in self._flat.values())


class RowBuffers:
    """Large buffers that one pass borrows and a later one borrows again: fresh memory costs a page fault for every 4 KiB, a tenth of a pass.

    A buffer more than TOO_LARGE times as large as what each of PASSES passes in a row took of it (nothing, perhaps) is given up. Whatever the
    order of passes, that can cost the tenth of one pass in PASSES.
    """

    TOO_LARGE = 4
    PASSES = 64

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Tensor] = []
        self._passes: dict[int, int] = {}    # id of a buffer -> passes in a row for which it was too large

    @contextmanager
    def borrow(self) -> Iterator[Callable[[int, int, torch.dtype], Tensor]]:
        """Gives take(rows, columns, dtype), whose tensors (contents unspecified) are anybody's again at the end of the block."""
        taken: list[tuple[Tensor, int]] = []

        def take(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
            needed = rows * columns * dtype.itemsize
            with self._lock:
                fitting = [i for i, buffer in enumerate(self._free) if buffer.numel() >= needed]
                if fitting:
                    buffer = self._free.pop(min(fitting, key=lambda i: self._free[i].numel()))
                elif self._free:
                    largest = max(range(len(self._free)), key=lambda i: self._free[i].numel())
                    self._passes.pop(id(self._free.pop(largest)), None)                   # too small: replaced, not kept beside
            with torch.inference_mode(False):                        # may be used outside of the inference mode that it was made in
                if not fitting:
                    buffer = torch.empty(needed, dtype=torch.uint8, device="cpu")
                taken.append((buffer, needed))
                return buffer[:needed].view(dtype).view(rows, columns)

        try:
            yield take
        finally:
            with self._lock:
                self._free += [buffer for buffer, _ in taken]
                self._give_up({id(buffer): needed for buffer, needed in taken})

    def _give_up(self, taken: dict[int, int]) -> None:
        """After a pass that took so many bytes of these buffers: drop what has been too large for long."""
        kept: list[Tensor] = []
        for buffer in self._free:
            key = id(buffer)
            passes = self._passes.pop(key, 0) + 1 if buffer.numel() > self.TOO_LARGE * taken.get(key, 0) else 0
            if passes < self.PASSES:
                self._passes[key] = passes
                kept.append(buffer)
        self._free = kept

    def num_bytes(self) -> int:
        """Bytes that no pass holds at the moment."""
        with self._lock:
            return sum(buffer.numel() for buffer in self._free)


Task = Callable[[Scratch], None]


class _Job:
    """Tasks that several threads take from the front; the first exception ends it.

    An interrupt (Ctrl-C) may come between any two steps of the thread that waits. So that thread takes no lock (an Event's or a Condition's may stay locked
    for ever) and changes nothing but one flag: it sets `_cancelled`, then looks at `_running`; a worker adds itself to `_running`, then looks at `_cancelled`.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks
        self.flush_denormal = _flushes_denormals()   # a mode of each thread: every task has the caller's, whichever thread runs it
        self._lock = threading.Lock()                # of the workers
        self._next = self._running = 0
        self._cancelled = False
        self._ends: queue.SimpleQueue[None] = queue.SimpleQueue()      # something for each time that a worker saw all tasks ended
        self.error: BaseException | None = None

    def work(self, scratch: Scratch) -> None:
        started = True
        while started:
            task = None
            with self._lock:
                self._running += 1                   # first: see above
                if not self._cancelled and self._next < len(self._tasks):
                    task, self._next = self._tasks[self._next], self._next + 1
            started = task is not None
            try:
                if task is not None:
                    task(scratch)
            except BaseException as error:   # handed to the thread that waits, whatever it is
                self.error = self.error or error
                self._cancelled = True
            task = None                              # it holds the pass's tensors
            with self._lock:
                self._running -= 1
            if self._over():
                self._ends.put(None)

    def _over(self) -> bool:
        """Whether no task runs and none will start."""
        return (self._cancelled or self._next >= len(self._tasks)) and self._running == 0

    def cancel(self) -> None:
        """No further task starts; those that run write to the caller's tensors until they end."""
        self._cancelled = True

    def wait(self) -> None:
        """Return when all tasks have ended or, after `cancel`, all that had started."""
        while not self._over():
            self._ends.get()


def _flushes_denormals() -> bool:
    """Whether this thread's arithmetic takes numbers below the normal range for zero (`torch.set_flush_denormal`; torch has no getter)."""
    return not torch.tensor(1e-20, dtype=torch.float32, device="cpu").mul_(1e-20)


class TilePool:
    """Threads that each run one task at a time with a single-threaded PyTorch; started on first use, never more than were asked for at once.

    PyTorch's thread count is a setting of each thread plus a process-wide default that threads take up when they first compute. A pool
    thread sets its own to 1 and the default is put back before the first task runs, so no other thread's setting is ever touched.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._scratch: list[Scratch] = []

    def run(self, tasks: Sequence[Task], threads: int | None = None) -> None:
        """Run every task on at most `threads` pool threads (None = as many as the calling thread's torch.get_num_threads()).

        Returns when all have ended. A task's exception is raised here, after those that still run have ended. Must not be called from a task.
        """
        threads = min(len(tasks), torch.get_num_threads() if threads is None else threads)
        if threads < 1:
            return
        if self._pid != os.getpid():         # threads do not survive a fork
            self.__init__()                  # type: ignore[misc]
        if threads > len(self._scratch):
            with self._lock:
                missing = threads - len(self._scratch)
                if missing > 0:
                    starter = threading.Thread(target=self._start, args=(missing,))
                    starter.start()
                    starter.join()
        job, interrupted = _Job(tasks), True
        try:
            for _ in range(threads):
                self._queue.put(job)
            job.wait()
            interrupted = False
        finally:
            while interrupted:               # the running tasks still write, whatever comes while this waits for them
                try:
                    job.cancel()
                    job.wait()
                    interrupted = False
                except BaseException:        # the first interrupt is the one that is raised
                    continue
        if job.error is not None:
            raise job.error

    def num_bytes(self) -> int:
        """Bytes of scratch that the pool threads hold."""
        return sum(scratch.num_bytes() for scratch in self._scratch)

    def _start(self, count: int) -> None:
        default = torch.get_num_threads()    # this thread is new, so it has the process-wide default
        try:
            for _ in range(count):
                scratch, ready = Scratch(), threading.Event()
                self._scratch.append(scratch)
                threading.Thread(target=self._worker, args=(scratch, ready), name="mok-tile", daemon=True).start()
                ready.wait()
        finally:
            torch.set_num_threads(default)

    def _worker(self, scratch: Scratch, ready: threading.Event) -> None:
        jobs = self._queue
        torch.get_num_threads()              # the first call in a thread takes up the default; a count set before it would be lost
        torch.set_num_threads(1)
        ready.set()
        flush_denormal = _flushes_denormals()
        with torch.inference_mode():         # tasks may write to tensors made inside or outside of the caller's inference mode
            while True:
                job = jobs.get()
                if job.flush_denormal != flush_denormal:
                    flush_denormal = job.flush_denormal
                    torch.set_flush_denormal(flush_denormal)
                job.work(scratch)
                del job                      # its tasks hold the pass's tensors


class Runtime:
    """One instance a process, `runtime`. Everything that outlives a call hangs here; nothing is created at import."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._said: set[str] = set()
        self.layers_built: dict[int | None, int] = {}   # group key (None = no group) -> how many mok.MoE were constructed in it
        self.groups_built: dict[tuple[int, ...], int] = {}   # global ranks -> how many ExpertGroups were built over them
        self.groups: dict[int, Any] = {}       # key -> ExpertGroup, so that custom ops can name a group by an integer
        self.scratch: dict[Any, Any] = {}      # engines' reusable buffers and measured facts, keyed by the engine
        self.error_words: list[Callable[[], Exception | None]] = []   # each reads a device's pinned error word; None = nothing to report
        self._route_words: dict[torch.device, Tensor] = {}            # the error word of each device for ids out of range
        self.tiles = TilePool()
        self.rows = RowBuffers()
        self._precision = threading.Condition()
        self._precision_mode = ""
        self._precision_users = 0
        self._precision_before = ""

    def say_once(self, message: str) -> None:
        """Print one line on stderr, the first time this process has it to say."""
        with self.lock:
            if message in self._said:
                return
            self._said.add(message)
        print(message, file=sys.stderr, flush=True)

    @contextmanager
    def fp32_matmul(self, mode: str) -> Iterator[None]:
        """CPU passes inside compute fp32 matrix products as `mode`: "ieee", or "bf16" where the CPU has tiles for it.

        The setting belongs to the process. Passes of one mode share it, a pass of another mode waits for them, and the last one to leave
        puts back what was there. It is left alone where it already says so.
        """
        setting = torch.backends.mkldnn.matmul   # type: ignore[attr-defined]
        with self._precision:
            while self._precision_users and self._precision_mode != mode:
                self._precision.wait()
            if not self._precision_users:
                self._precision_before = setting.fp32_precision
                self._precision_mode = mode
                if self._precision_before not in (mode, "none" if mode == "ieee" else mode):
                    setting.fp32_precision = mode
            self._precision_users += 1
        try:
            yield
        finally:
            with self._precision:
                self._precision_users -= 1
                if not self._precision_users:
                    if setting.fp32_precision != self._precision_before:
                        setting.fp32_precision = self._precision_before
                    self._precision.notify_all()

    @contextmanager
    def ieee_float32_on_gpu(self) -> Iterator[None]:
        """CUDA fp32 matrix products launched inside never use TF32, whatever the process allows; the setting is put back."""
        setting = torch.backends.cuda.matmul
        with self.lock:
            before = setting.fp32_precision
            if before == "ieee":
                yield
                return
            setting.fp32_precision = "ieee"
            try:
                yield
            finally:
                setting.fp32_precision = before

    def error_word(self, device: torch.device) -> Tensor:
        """(1,) int64 in pinned host memory, zero until a plan kernel on `device` (with an index, or the CPU) meets an id outside -1..E-1.

        The kernel stores id * EXPERT_RADIX + E in one piece, the id cut to 52 bits, without waiting for anybody. Allocated on first use.
        """
        word = self._route_words.get(device)
        if word is None:
            with self.lock:
                word = self._route_words.get(device)
                if word is None:
                    word = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
                    packed = ctypes.c_int64.from_address(word.data_ptr())            # reading a tensor's element takes a microsecond
                    self.error_words.append(lambda: self._route_error(device) if packed.value else None)
                    self._route_words[device] = word
        return word

    def _route_error(self, device: torch.device) -> ValueError | None:
        word = self._route_words[device]
        packed = int(word[0])
        if packed == 0:
            return None
        word.zero_()
        value, num_experts = divmod(packed, EXPERT_RADIX)
        return ValueError(f"topk_ids held {value} in an earlier call on {device}: ids must be from -1 to {num_experts - 1} (E = {num_experts}); "
                          "such routes counted as -1")

    def new_group_key(self, global_ranks: tuple[int, ...]) -> tuple[int, str]:
        """(a key for a new ExpertGroup in this process, a name for it that is equal on all of `global_ranks` if they build groups in one order)."""
        with self.lock:
            self.groups_built[global_ranks] = self.groups_built.get(global_ranks, 0) + 1
            return sum(self.groups_built.values()), f"{'-'.join(map(str, global_ranks))}/{self.groups_built[global_ranks]}"

    def group_by_key(self, key: int) -> Any:
        """The ExpertGroup with this key, None where this process has none."""
        return self.groups.get(key)

    def next_layer_key(self, group_key: int | None) -> int:
        """1, 2, ...: the construction number of a mok.MoE in its group, equal on all ranks that build the same layers in the same order."""
        with self.lock:
            self.layers_built[group_key] = self.layers_built.get(group_key, 0) + 1
            return self.layers_built[group_key]

    def raise_pending_errors(self) -> None:
        """Raise what a kernel wrote into an error word since the last look. Reads host memory only: no synchronisation."""
        for read in self.error_words:
            error = read()
            if error is not None:
                raise error


runtime = Runtime()
