"""Two roles that hand one word over by a pair of mbarriers, as the kernels hand over task records: what `compute-sanitizer --tool racecheck` says of it.

    PYTHONPATH=. compute-sanitizer --tool racecheck python3 runs/racecheck_control.py

Nothing here races. What is reported all the same (2026-11-30, CUDA 13.0): the word, which mbarriers alone order, and the words through which Triton hands
a role its arguments, which a barrier orders that roles reach at different instructions. `runs/check_gpu.py` reads the kernels' reports in this light.
"""
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mok.engines.hopper.compat import thread_barrier


@gluon.jit
def _writer(words, full, empty, out, n):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for i in range(n):
        mbarrier.wait(empty, (i & 1) ^ 1)
        words.index(0).store(gl.full([1], i * 3 + 1, gl.int32, L))
        mbarrier.arrive(full)


@gluon.jit
def _reader(words, full, empty, out, n):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    for i in range(n):
        mbarrier.wait(full, i & 1)
        value = gl.max(words.index(0).load(L), 0)
        thread_barrier()
        mbarrier.arrive(empty)
        gl.store(out + i, value)


@gluon.jit
def _kernel(out, n):
    B: gl.constexpr = mbarrier.MBarrierLayout()
    words = gl.allocate_shared_memory(gl.int32, [1, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    full = gl.allocate_shared_memory(gl.int64, [1], B)
    empty = gl.allocate_shared_memory(gl.int64, [1], B)
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    gl.warp_specialize([(_reader, (words, full, empty, out, n)), (_writer, (words, full, empty, out, n))], [1], [48])


def main() -> None:
    count = 16
    out = torch.zeros(count, dtype=torch.int32, device="cuda")
    _kernel[(1,)](out, count, num_warps=4)
    torch.cuda.synchronize()
    assert out.tolist() == [3 * i + 1 for i in range(count)], out.tolist()
    print("every word right")


if __name__ == "__main__":
    main()
