"""Differences between Triton releases 3.6 and newer that the Hopper kernels meet, each resolved once, here."""
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# 3.6: gl.thread_barrier, tma.async_copy_*; later releases renamed them and the old names raise when traced
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait          # waits until shared memory may be reused (.read) in every release

# a shared-memory buffer seen in another shape; public since 3.7
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret

# the decorator that makes a class of tensors a kernel argument; the same in every release but for its place
aggregate = getattr(gluon, "aggregate", None) or triton.language.core._aggregate

# Multiply-add contraction: on by default in 3.6, off in 3.10. Every launch and compile says which, because it changes bits.
COMPILE_OPTIONS = {"enable_fp_fusion": False}
