"""The CPU tile pool: every task once, on single-threaded workers, leaving no trace in anybody's thread settings."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch

import mok
from mok.runtime import RowBuffers, Scratch, TilePool, runtime


@pytest.fixture
def pool():
    return TilePool()


def default_threads() -> int:
    """What a thread that computes for the first time is given."""
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return seen[0]


def test_every_task_runs_once_on_a_single_threaded_worker(pool):
    runs: list[tuple[int, int, str]] = []
    pool.run([lambda scratch, i=i: runs.append((i, torch.get_num_threads(), threading.current_thread().name)) for i in range(500)], threads=3)
    assert sorted(i for i, _, _ in runs) == list(range(500))
    assert {count for _, count, _ in runs} == {1} and {name for _, _, name in runs} == {"mok-tile"}


def test_uses_as_many_threads_as_asked(pool):
    """All of them at once: each task waits until the others have started; a fourth would not fit."""
    barrier = threading.Barrier(3)
    pool.run([lambda scratch: barrier.wait(timeout=20) and None for _ in range(3)], threads=3)
    running, most, lock = [0], [0], threading.Lock()

    def task(scratch):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.005)
        with lock:
            running[0] -= 1

    pool.run([task] * 20, threads=2)
    assert most[0] == 2


def test_leaves_thread_settings_alone(pool):
    """The caller's count, the default of new threads, and another thread's own count, although workers set theirs to 1."""
    before = torch.get_num_threads()
    torch.set_num_threads(before)                                # the default too, whatever ran in this process before
    assert default_threads() == before
    own: list[int] = []
    started, finish = threading.Event(), threading.Event()

    def other():
        torch.get_num_threads()
        torch.set_num_threads(7)
        torch.set_num_threads(7)
        started.set()
        finish.wait()
        own.append(torch.get_num_threads())

    thread = threading.Thread(target=other)
    thread.start()
    started.wait()
    torch.set_num_threads(before)                                # other()'s call set the default too
    pool.run([lambda scratch: None] * 10, threads=4)
    with pytest.raises(ZeroDivisionError):
        pool.run([lambda scratch: 1 / 0], threads=5)
    finish.set()
    thread.join()
    assert own == [7]
    assert torch.get_num_threads() == before == default_threads()


def test_blas_of_a_worker_is_single_threaded(pool):
    """The thread counts of OpenMP and of MKL, as PyTorch reports them inside a worker, after the caller has set its own."""
    pool.run([lambda scratch: None], threads=1)
    torch.set_num_threads(torch.get_num_threads())
    reports: list[str] = []
    pool.run([lambda scratch: reports.append(torch.__config__.parallel_info())], threads=1)
    counts = [line.strip() for line in reports[0].splitlines() if "_get_max_threads()" in line]
    assert counts and all(line.endswith(": 1") for line in counts), counts


def test_an_exception_reaches_the_caller_and_the_pool_lives_on(pool):
    ran: list[int] = []

    def task(scratch, i):
        if i == 3:
            raise ValueError("tile 3")
        ran.append(i)

    with pytest.raises(ValueError, match="tile 3"):
        pool.run([lambda scratch, i=i: task(scratch, i) for i in range(100)], threads=1)
    assert ran == [0, 1, 2]                                      # nothing starts after it
    with pytest.raises(ValueError, match="tile 3"):
        pool.run([lambda scratch, i=i: task(scratch, i) for i in range(100)], threads=3)
    ran.clear()
    pool.run([lambda scratch: ran.append(1)] * 5, threads=3)
    assert ran == [1] * 5


def test_waits_for_running_tasks_before_it_raises(pool):
    """A task that writes to the caller's tensor must not outlive the call."""
    written: list[int] = []
    slow_started = threading.Event()

    def slow(scratch):
        slow_started.set()
        time.sleep(0.2)
        written.append(1)

    def failing(scratch):
        slow_started.wait()
        raise ValueError("fails while another runs")

    with pytest.raises(ValueError, match="fails"):
        pool.run([slow, failing], threads=2)
    assert written == [1]


def test_several_threads_use_one_pool(pool):
    """Every caller gets all of its own tasks done, and its own exception."""
    outcomes: list[str] = []

    def caller(number: int):
        for _ in range(20):
            mine: list[int] = []
            tasks = [lambda scratch, i=i, mine=mine: mine.append(i) for i in range(30)]
            if number == 0:
                try:
                    pool.run([*tasks, lambda scratch: 1 / 0], threads=2)
                    outcomes.append("no error")
                except ZeroDivisionError:
                    pass
            else:
                pool.run(tasks, threads=number)
                if sorted(mine) != list(range(30)):
                    outcomes.append(f"caller {number} saw {len(mine)} tasks")

    callers = [threading.Thread(target=caller, args=(number,)) for number in range(4)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert outcomes == []


def test_no_task_is_kept_after_the_call(pool):
    """The tensors that a pass's tasks hold are free when it returns, although the workers live on."""
    class Held:
        alive = 0

        def __init__(self):
            Held.alive += 1

        def __del__(self):
            Held.alive -= 1

    held = Held()
    pool.run([lambda scratch, held=held: None for _ in range(4)], threads=2)
    del held
    deadline = time.monotonic() + 5
    while Held.alive and time.monotonic() < deadline:            # a worker may still be on its way back to the queue
        time.sleep(0.01)
    assert Held.alive == 0


def test_works_after_a_fork():
    """The child has no pool threads: it starts its own."""
    code = """
import os, sys, torch
from mok.runtime import runtime
done = []
runtime.tiles.run([lambda scratch: done.append(1)] * 4)
pid = os.fork()
if pid == 0:
    runtime.tiles.run([lambda scratch: done.append(1)] * 4, threads=2)
    os._exit(0 if len(done) == 8 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def test_ctrl_c_waits_for_running_tasks():
    """SIGINT while tasks run: KeyboardInterrupt in the caller, no task afterwards."""
    code = """
import os, signal, threading, time
from mok.runtime import runtime
count = [0]
def task(scratch):
    time.sleep(0.05)
    count[0] += 1
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    runtime.tiles.run([task] * 1000, threads=2)
    raise SystemExit("no KeyboardInterrupt")
except KeyboardInterrupt:
    seen = count[0]
time.sleep(0.2)
assert 0 < seen == count[0] < 1000, (seen, count[0])
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def test_scratch_grows_and_is_reused():
    scratch = Scratch()
    small = scratch.get("a", 2, 3, torch.float32)
    assert small.shape == (2, 3) and small.is_contiguous()
    assert scratch.get("a", 3, 2, torch.float32).data_ptr() == small.data_ptr()
    large = scratch.get("a", 20, 30, torch.float32, pitch=32)
    assert large.shape == (20, 30) and large.stride() == (32, 1)
    assert scratch.get("a", 2, 3, torch.float64).data_ptr() != large.data_ptr()
    assert scratch.num_bytes() == 20 * 32 * 4 + 2 * 3 * 8

    source = torch.ones(2, 2)
    kept = scratch.kept("w", ("pass", 0), source, torch.float64)
    source.fill_(2)
    assert scratch.kept("w", ("pass", 0), source, torch.float64) is kept and kept.eq(1).all()
    assert scratch.kept("w", ("pass", 1), source, torch.float64).eq(2).all()


def test_row_buffers_are_borrowed_one_pass_at_a_time():
    rows = RowBuffers()
    with rows.borrow() as take:
        a, b = take(4, 8, torch.float32), take(4, 8, torch.float32)
        assert a.shape == (4, 8) and a.is_contiguous() and a.data_ptr() != b.data_ptr() and rows.num_bytes() == 0
        with rows.borrow() as inner:                             # another pass at the same time gets memory of its own
            assert inner(4, 8, torch.float32).data_ptr() not in (a.data_ptr(), b.data_ptr())
    assert rows.num_bytes() == 3 * 128
    with pytest.raises(ZeroDivisionError), rows.borrow() as take:
        again = {take(2, 3, torch.bfloat16).data_ptr() for _ in range(3)}
        assert {a.data_ptr(), b.data_ptr()} < again and rows.num_bytes() == 0
        raise ZeroDivisionError
    assert rows.num_bytes() == 3 * 128
    with rows.borrow() as take:
        take(100, 8, torch.float64)                              # too large for any: it replaces one of them
    assert rows.num_bytes() == 2 * 128 + 6400
    with rows.borrow() as take:
        assert take(4, 8, torch.float32).untyped_storage().nbytes() == 128     # the smallest that fits
        assert take(0, 8, torch.float32).shape == (0, 8)
    with torch.inference_mode(), rows.borrow() as take:
        made = take(1000, 8, torch.float32)
    made.zero_()                                                 # not an inference tensor


def one_pass(rows: RowBuffers, *sizes: int) -> list[int]:
    """A pass that takes buffers of these bytes; their addresses."""
    with rows.borrow() as take:
        return [take(1, size, torch.uint8).data_ptr() for size in sizes]


def test_row_buffers_that_are_far_too_large_for_long_are_given_up():
    rows, small = RowBuffers(), (1000, 2000)
    one_pass(rows, 100_000, 100_000, 8000)
    for _ in range(RowBuffers.PASSES - 1):
        one_pass(rows, *small)
        assert rows.num_bytes() == 208_000                       # the smallest that fits serves the first, a large one the second
    one_pass(rows, *small)
    assert rows.num_bytes() == 0                                 # 8000 is more than 4 * 1000 as well
    for _ in range(3 * RowBuffers.PASSES):
        one_pass(rows, *small)
        assert rows.num_bytes() == 3000
    for _ in range(3 * RowBuffers.PASSES):
        one_pass(rows, 250, 2000)                                # four times too large is not too much
    assert rows.num_bytes() == 3000


def test_row_buffers_stay_in_a_steady_state():
    """Forward passes of many layers, then as many backward passes that take more; and a small batch now and then, or for all but one pass."""
    rows = RowBuffers()
    backward = (500, 9000, 9000, 70_000)
    first = set(one_pass(rows, *backward))
    for _ in range(5):
        for _ in range(RowBuffers.PASSES - 1):
            assert set(one_pass(rows, 9000)) < first
        for _ in range(RowBuffers.PASSES):
            assert set(one_pass(rows, *backward)) == first
        for _ in range(RowBuffers.PASSES - 1):
            one_pass(rows, 1, 2, 3, 4)
        assert set(one_pass(rows, *backward)) == first and rows.num_bytes() == sum(backward)


def test_a_layer_gives_memory_back_after_one_very_large_pass_with_the_same_bits():
    torch.manual_seed(3)
    layer = mok.MoE(mok.MoEConfig(hidden_size=24, intermediate_size=16, num_experts=3, top_k=2, shared_intermediate_sizes=(8,)))

    def step(tokens: torch.Tensor) -> list[torch.Tensor]:
        layer.zero_grad()
        x = tokens.clone().requires_grad_()
        y = layer(x)
        y.sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]

    small = torch.randn(20, 24)
    runtime.rows._free.clear()
    before = step(small)
    size = runtime.rows.num_bytes()
    step(torch.randn(4000, 24))
    assert runtime.rows.num_bytes() > 8 * size
    for _ in range(RowBuffers.PASSES):
        assert all(map(torch.equal, step(small), before))
    assert runtime.rows.num_bytes() <= RowBuffers.TOO_LARGE * size


def test_matmul_precision_is_shared_waited_for_and_restored():
    setting = torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    order: list[str] = []
    inside = threading.Event()

    def other_mode():
        inside.wait()
        with runtime.fp32_matmul("ieee"):
            order.append(f"ieee pass with {setting.fp32_precision}")

    thread = threading.Thread(target=other_mode)
    thread.start()
    with pytest.raises(ZeroDivisionError), runtime.fp32_matmul("bf16"), runtime.fp32_matmul("bf16"):
        inside.set()
        time.sleep(0.1)
        order.append(f"bf16 pass with {setting.fp32_precision}")
        raise ZeroDivisionError
    thread.join()
    assert order[0] == "bf16 pass with bf16" and order[1] in ("ieee pass with none", "ieee pass with ieee")
    assert setting.fp32_precision == before


def test_every_task_flushes_denormals_as_its_caller_does(pool):
    """Threads that the pool starts before and after the caller changes its mode work alike."""
    out = torch.ones(64)

    def task(i, scratch):
        out[i] = torch.tensor(1e-20) * 1e-20

    def run(threads):
        out.fill_(1)
        pool.run([partial(task, i) for i in range(64)], threads)
        return out.unique()

    gradual = torch.tensor(1e-20) * 1e-20
    assert gradual > 0 and torch.equal(run(1), gradual.view(1))
    try:
        torch.set_flush_denormal(True)
        for threads in (1, 4, 4):
            assert torch.equal(run(threads), torch.zeros(1))
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(run(4), gradual.view(1))


def test_the_default_dtype_does_not_make_tasks_flush_denormals(pool):
    """1e-20 is 0 in float16, which looks as if the caller's arithmetic flushed."""
    kept, small = [], torch.tensor([1e-39])
    pool.run([lambda scratch: None])                 # the thread looked at its own mode before
    try:
        torch.set_default_dtype(torch.float16)
        pool.run([lambda scratch: kept.append(small * 1)])
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(kept[0], small) and kept[0] > 0


def test_a_second_interrupt_still_waits_for_running_tasks(pool):
    """What runs writes to buffers that the next pass is given, so neither Ctrl-C may leave it behind."""
    ended = threading.Event()

    def task(scratch):
        time.sleep(0.4)
        ended.set()

    def interrupt():
        for _ in range(2):
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        pool.run([task], 1)
    assert ended.is_set()


def test_an_interrupt_at_any_line_leaves_no_task_running(pool):
    """KeyboardInterrupt before the n-th line that the calling thread runs of the pool's and of threading's code, for every n until none comes in time:
    `run` raises it, and by then no task runs, none starts later, and the pool works on."""
    state = {"left": 0, "raised": False}
    running, started = [], []

    def trace(frame, event, argument):
        if not frame.f_code.co_filename.endswith(("runtime.py", "threading.py")):
            return None
        if event == "line" and not state["raised"]:
            state["left"] -= 1
            if state["left"] < 0:
                state["raised"] = True
                raise KeyboardInterrupt
        return trace

    def task(scratch):
        running.append(1)
        started.append(1)
        time.sleep(0.002)
        running.pop()

    pool.run([task] * 4, 2)                                  # its threads are there
    interrupts, others = 0, set()
    for n in range(200):
        state.update(left=n, raised=False)
        sys.settrace(trace)
        try:
            pool.run([task] * 4, 2)
        except KeyboardInterrupt:
            interrupts += 1
        finally:
            sys.settrace(None)
        at_once = len(started)
        assert not running, n
        time.sleep(0.004)
        assert len(started) == at_once, f"a task started after the interrupt before line {n} was raised"
        if not state["raised"]:
            break
        others.add(n)
    assert interrupts == len(others) > 15
    found = []
    pool.run([lambda scratch, i=i: found.append(i) for i in range(9)], 2)
    assert sorted(found) == list(range(9))
