"""Which fabric a group of ranks uses, and why: a pure function of where the ranks run, so every rank comes to the same answer by itself."""
from __future__ import annotations

import ctypes
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

SINGLE, CUDA_IPC, SYMMETRIC_MEMORY, PROCESS_GROUP = "single", "cuda ipc", "symmetric memory", "process group"
MPS_SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"      # set in a client's environment: its share of a device's multiprocessors


@dataclass(frozen=True)
class Place:
    """Where one rank runs. host: tells kernels of an operating system apart; host_name: for people; device: its GPU's UUID, "" without a GPU.

    unreachable: UUIDs of GPUs that it sees and cannot access. nvlink_domain: what GPUs of other hosts must share to be reached over NVLink, "" if unknown.
    """
    host: str
    host_name: str
    device: str
    unreachable: tuple[str, ...] = ()
    nvlink_domain: str = ""


def place_of(device: torch.device) -> Place:
    """This process's place if its rank uses `device`."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = boot.read_text().strip() if boot.exists() else socket.gethostname()
    if device.type != "cuda":
        return Place(host, socket.gethostname(), "")
    index = torch.cuda.current_device() if device.index is None else device.index
    others = [i for i in range(torch.cuda.device_count()) if i != index and not torch.cuda.can_device_access_peer(index, i)]
    uuid = _uuid(index)
    return Place(host, socket.gethostname(), uuid, tuple(_uuid(i) for i in others), _nvlink_domain(uuid))


def choose_fabric(places: Sequence[Place]) -> tuple[str, str]:
    """(kind, reason) for ranks 0..W-1 at `places`; PROCESS_GROUP if any of them cannot reach another, the reason naming those ranks."""
    if without := [rank for rank, place in enumerate(places) if not place.device]:
        return PROCESS_GROUP, f"{_ranks(without)} {'has' if len(without) == 1 else 'have'} no CUDA device"
    if len(places) == 1:
        return SINGLE, "one rank"
    blocked = [(a, b) for a in range(len(places)) for b in range(len(places)) if a != b and places[a].host == places[b].host
               and places[b].device in places[a].unreachable]
    if blocked:
        return PROCESS_GROUP, ", ".join(f"rank {a}'s device has no peer access to rank {b}'s" for a, b in blocked)
    sharing = [ranks for ranks in _by(places, "device") if len(ranks) > 1]
    shared = "; ".join(f"{_ranks(ranks)} share device {places[ranks[0]].device}" for ranks in sharing)
    if len(_by(places, "host")) == 1:
        return CUDA_IPC, shared or f"{_ranks(range(len(places)))} have a device each on one host"
    if shared:
        return PROCESS_GROUP, f"the ranks are on several hosts, and {shared}"
    hosts = "; ".join(f"{_ranks(ranks)} on {places[ranks[0]].host_name}" for ranks in _by(places, "host"))
    if len(_by(places, "nvlink_domain")) == 1 and places[0].nvlink_domain:
        return SYMMETRIC_MEMORY, f"one NVLink domain: {hosts}"
    return PROCESS_GROUP, f"the ranks are on several hosts without a common NVLink domain: {hosts}"


def _by(places: Sequence[Place], fact: str) -> list[list[int]]:
    """Ranks grouped by a fact of their places, in order of the first rank of each."""
    groups: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        groups.setdefault(getattr(place, fact), []).append(rank)
    return list(groups.values())


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {','.join(map(str, ranks))}"


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


class _FabricInfo(ctypes.Structure):
    """NVML's nvmlGpuFabricInfo_t."""
    _fields_ = [("cluster", ctypes.c_ubyte * 16), ("status", ctypes.c_int), ("clique", ctypes.c_uint), ("state", ctypes.c_ubyte)]


_FABRIC_COMPLETED = 3      # NVML_GPU_FABRIC_STATE_COMPLETED


def _nvlink_domain(uuid: str) -> str:
    """"cluster/clique" of a GPU in a multi-node NVLink fabric; "" outside of one, or where NVML cannot tell."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        device, info = ctypes.c_void_p(), _FabricInfo()
        if nvml.nvmlInit_v2() != 0:
            return ""
        try:
            known = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(device)) == 0
            known = known and nvml.nvmlDeviceGetGpuFabricInfo(device, ctypes.byref(info)) == 0
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):       # no NVML, or one older than fabrics
        return ""
    cluster = bytes(info.cluster)
    return f"{cluster.hex()}/{info.clique}" if known and info.status == 0 and info.state == _FABRIC_COMPLETED and any(cluster) else ""
