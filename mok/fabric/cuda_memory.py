"""Memory that peers can open: plain CUDA allocations shared by IPC handles, and torch's symmetric memory, behind one small protocol."""
from __future__ import annotations

import ctypes
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_GRANULE = 2 << 20          # cuMemAlloc cuts smaller allocations out of blocks of 2 MiB, and a handle opens the whole block to peers
_LAZY_PEER_ACCESS = 1       # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: opening a handle of another device enables access to it


class Memory(Protocol):
    """One allocation on each rank. Called in this order: allocate, share, open; then close_peers, and free after a barrier."""

    def allocate(self, size: int) -> Tensor:
        """(size,) uint8 on this rank's device, zeroed; the zeroes are in memory on return."""

    def share(self) -> Any:
        """What the peers need to open it: picklable."""

    def open(self, shared: list[Any]) -> list[Tensor]:
        """Every rank's allocation as (size,) uint8 on this rank's device, in rank order; the own one is the local tensor."""

    def close_peers(self) -> None:
        """Unmap the peers' allocations. No kernel of this process may use them any more."""

    def free(self) -> None:
        """Free the own allocation. No peer may have it mapped."""


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""
    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


class CudaIpcMemory:
    """cuMemAlloc and IPC handles: ranks of one host, several of which may share a device. Not from torch's allocator, whose blocks hold others'
    tensors and, with expandable segments, cannot be exported."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank, self.device = rank, device
        self._driver: Any = None
        self._local: Tensor | None = None
        self._opened: list[int] = []

    def allocate(self, size: int) -> Tensor:
        self._driver = ctypes.CDLL("libcuda.so.1")
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()                     # makes the device's context current if it is not yet
            address = ctypes.c_uint64()
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(-(-size // _GRANULE) * _GRANULE))
            self._local = self._tensor(address.value, size).zero_()
            torch.cuda.synchronize()
        return self._local

    def share(self) -> tuple[bytes, int]:
        assert self._local is not None
        handle = _IpcHandle()
        with torch.cuda.device(self.device):
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self._local.data_ptr()))
        return bytes(handle.reserved), self._local.numel()

    def open(self, shared: list[Any]) -> list[Tensor]:
        assert self._local is not None
        tensors = []
        with torch.cuda.device(self.device):
            for rank, (handle, size) in enumerate(shared):
                if rank == self.rank:                    # a process cannot open a handle of its own
                    tensors.append(self._local)
                    continue
                address = ctypes.c_uint64()
                self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _IpcHandle.from_buffer_copy(handle), ctypes.c_uint(_LAZY_PEER_ACCESS), peer=rank)
                self._opened.append(address.value)
                tensors.append(self._tensor(address.value, size))
        return tensors

    def close_peers(self) -> None:
        with torch.cuda.device(self.device):
            while self._opened:
                self._call("cuIpcCloseMemHandle", ctypes.c_uint64(self._opened.pop()))

    def free(self) -> None:
        if self._local is not None:
            address, self._local = self._local.data_ptr(), None
            with torch.cuda.device(self.device):
                self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def _tensor(self, address: int, size: int) -> Tensor:
        """A view of memory that torch does not own. The device is stated: torch would ask the driver for a mapped pointer's, which may be the peer's."""
        storage = torch._C._construct_storage_from_data_pointer(address, self.device, size)
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)

    def _call(self, name: str, *arguments: Any, peer: int | None = None) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorName(status, ctypes.byref(text))
            what = (text.value or b"error").decode()
            raise RuntimeError(f"{name} failed with {what} ({status}) on rank {self.rank}" + ("" if peer is None else f" for the memory of rank {peer}"))


class SymmetricMemory:
    """torch.distributed._symmetric_memory: ranks with a device each in one NVLink domain, also on several hosts."""

    def __init__(self, rank: int, device: torch.device, group: dist.ProcessGroup) -> None:
        self.rank, self.device, self._group = rank, device, group
        self._local: Tensor | None = None
        self._handle: Any = None

    def allocate(self, size: int) -> Tensor:
        import torch.distributed._symmetric_memory as symmetric_memory
        self._local = symmetric_memory.empty(size, dtype=torch.uint8, device=self.device).zero_()
        torch.cuda.synchronize(self.device)
        return self._local

    def share(self) -> None:
        """Nothing: its own rendezvous exchanges the handles."""

    def open(self, shared: list[Any]) -> list[Tensor]:
        import torch.distributed._symmetric_memory as symmetric_memory
        assert self._local is not None
        self._handle = symmetric_memory.rendezvous(self._local, self._group.group_name)
        peers = range(len(shared))
        return [self._local if r == self.rank else self._handle.get_buffer(r, self._local.shape, torch.uint8) for r in peers]

    def close_peers(self) -> None:
        self._handle = None                              # what it mapped is unmapped with its last tensor

    def free(self) -> None:
        self._local = None
