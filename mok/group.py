"""ExpertGroup: the ranks that share one layer's experts, and the handshake that lets them notice a mismatch instead of hanging on it."""
from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef

from .arguments import LARGEST, check_device, check_integer, check_number, check_seconds, check_type
from .engines.hopper.expert_parallel_group import make_fused_group
from .fabric.process_group import ProcessGroupFabric
from .plan import experts_of_rank
from .runtime import runtime
from .waves import WaveCounts

DEFAULT_TIMEOUT_S = 300.0
_MAX_FORWARDS = 1 << 16     # plans that are remembered, far more than a step has in flight


class ExpertGroup:
    """Expert-parallel ranks over a torch.distributed process group.

    process_group: any group that contains this rank (None = the default group). Building an ExpertGroup is collective: all its ranks build
    it, in the same order relative to other groups. timeout_s: how long any rank waits for another before it raises `mok.FabricTimeout`.

    num_experts, max_tokens, hidden_size, top_k: E over all ranks, the most tokens that a rank ever passes, H and K. With all four, the same on all
    ranks, GPUs that reach each other's memory communicate inside the passes' launches, through buffers made here on `device` (None = the current
    one); without them, or where that cannot be, over the process group, which is said once. Passes of other sizes or dtypes use the process group.

    Experts are split in contiguous blocks, the first E mod W ranks own one more. All ranks call the same passes in the same order, one thread of each at
    a time; a call that differs in anything that must agree raises ValueError on every rank, a backward that follows another forward than its peers' do
    too. (Inside the launches that is not noticed: there the backwards of one layer's forwards must keep the same order.) A peer that ends or stalls
    raises `mok.PeerLost` or `mok.FabricTimeout`, naming it, and the group is dead then; a new one works. `close` gives its memory back.

    Ranks that share a GPU belong to one group, which counts them: launches of two groups that together want more multiprocessors than there are may wait for
    each other. Where several groups' passes can run at once on one device, all ranks launch them in the same order.

    capacity_factor: a rank's buffers hold this many times its balanced load of routes (`mok.waves.wave_capacity`), and rows beyond go through
    them again in further waves; None = room for the worst case. Nothing is dropped and no bit changes; `wave_counts` says how often it
    happened. The same on all ranks; on CPUs over the process group, on GPUs inside the launches alone, where `recompute` raises NotImplementedError.

    Raises ValueError naming a wrong argument.
    """

    closed = False                 # whether `close` was called

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S,
                 capacity_factor: float | None = None, num_experts: int | None = None, max_tokens: int | None = None,
                 hidden_size: int | None = None, top_k: int | None = None, device: torch.device | str | None = None) -> None:
        check_type("process_group", process_group, (dist.ProcessGroup, type(None)), "a torch.distributed.ProcessGroup or None")
        check_seconds("timeout_s", timeout_s)
        device = check_device("device", device)
        sizes = {"num_experts": num_experts, "max_tokens": max_tokens, "hidden_size": hidden_size, "top_k": top_k}
        given = {name: size for name, size in sizes.items() if size is not None}
        for size_name, size in given.items():
            check_integer(size_name, size, 1, LARGEST)
        if given and len(given) < len(sizes):
            raise ValueError(f"num_experts, max_tokens, hidden_size and top_k must be positive integers, all four or none; got {sizes}")
        if capacity_factor is not None:
            check_number("capacity_factor", capacity_factor, positive=True)
        self.capacity_factor = capacity_factor
        self._wave_counts = WaveCounts()
        self.process_group = process_group
        self.timeout_s = timeout_s
        if not dist.is_initialized():
            raise ValueError("process_group=None needs torch.distributed: call init_process_group first")
        self.key, name = runtime.new_group_key(tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD)))
        self.fabric = ProcessGroupFabric(process_group, timeout_s, name)
        self.rank, self.size = self.fabric.rank, self.fabric.world_size
        self._calls = 0
        self._forwards: dict[int, tuple[int, StorageWeakRef]] = {}        # address of a plan's offsets -> the call that made the plan, and its memory
        bound: dict[str, Any] = {} if capacity_factor is None else {"capacity_factor": capacity_factor}
        self.fused = make_fused_group(self.fabric, {**given, **bound}, device, timeout_s)        # communicates inside the launches
        runtime.groups[self.key] = self

    @property
    def wave_counts(self) -> WaveCounts:
        """How often the bounded capacity was exceeded. Inside the launches kernels count; this waits for those in flight then."""
        return self._wave_counts if self.fused is None or self.capacity_factor is None else self.fused.wave_counts()

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, **settings: Any) -> ExpertGroup:
        """The group of a one-dimensional mesh, such as `device_mesh["ep"]`; settings: the constructor's other arguments."""
        check_type("mesh", mesh, DeviceMesh, "a DeviceMesh")
        if mesh.ndim != 1:
            raise ValueError(f"mesh.ndim={mesh.ndim} must be 1: pass one dimension of it, such as mesh['ep']")
        return cls(mesh.get_group(), **settings)

    def local_experts(self, num_experts: int) -> tuple[int, int]:
        """(first global id, count) of the experts that this rank owns out of `num_experts`."""
        check_integer("num_experts", num_experts, 1, LARGEST)
        if num_experts < self.size:
            raise ValueError(f"{num_experts=} must be at least the group's {self.size} ranks")
        return experts_of_rank(num_experts, self.size, self.rank)

    def close(self) -> None:
        """Give back the memory that launches communicate through: some GB for a large layer. Waits for this device; a second call does nothing.

        Collective: all ranks close, and no pass, backward neither, follows on any. On a dead group each rank closes alone; it keeps its own part, which a
        peer may still have mapped, until its process ends.
        """
        if not self.closed:
            self.closed = True
            if self.fused is not None:
                self.fused.close()

    def handshake(self, signature: dict, *, error: str | None = None, **facts) -> list[dict]:
        """Every rank's facts, once all ranks have made the same call with the same signature.

        signature: what must agree (pass, layer key, wanted gradients, H, I, K, dtype, ...). facts: what may differ (tokens, experts, counts).
        error: this rank cannot go on and says why; all ranks raise then. Raises ValueError, the same on every rank, naming what differs.
        """
        self._calls += 1
        what = f"{signature.get('pass', 'call')} (call {self._calls}, layer {signature.get('layer_key', 0)})"
        headers = self.fabric.exchange_messages({"signature": {"call": self._calls, **signature}, "error": error, "facts": facts}, what)
        for rank, header in enumerate(headers):
            if header["error"] is not None:
                raise ValueError(header["error"] if rank == self.rank else f"rank {rank} of the ExpertGroup failed in {what}: {header['error']}")
        for field in {key: None for header in headers for key in header["signature"]}:
            values = [header["signature"].get(field) for header in headers]
            if any(value != values[0] for value in values):
                by_rank = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
                raise ValueError(f"{field} must be the same on all ranks of the ExpertGroup in {what}; {by_rank}")
        return [header["facts"] for header in headers]

    def remember_forward(self, expert_offsets: Tensor) -> None:
        """The plan of these offsets was agreed on in the last call."""
        if len(self._forwards) >= _MAX_FORWARDS:
            self._forwards.clear()
        self._forwards[expert_offsets.data_ptr()] = self._calls, StorageWeakRef(expert_offsets.untyped_storage())

    def forward_of(self, expert_offsets: Tensor) -> int | None:
        """Number of the call in which the ranks agreed on the plan of these offsets; None if they were copied, or are forgotten.

        An address says which plan it is only while that plan's memory is alive: what was copied (offloaded activations) may lie where an older plan was.
        """
        call, storage = self._forwards.get(expert_offsets.data_ptr(), (None, None))
        return None if storage is None or storage.expired() else call

    def report(self, error: str, signature: dict) -> None:
        """Tell the other ranks, in place of the call that they are about to make, that this rank cannot; they raise `error`, this rank goes on.

        Where launches communicate there is no such place: the peers' launches end with NaN, and the group is dead for all.
        """
        if self.fused is not None:
            self.fused.give_up(error)
            return
        with contextlib.suppress(ValueError):
            self.handshake(signature, error=error)

    def total_experts(self, experts_by_rank: list[int]) -> int:
        """E, the sum of the ranks' E_local; ValueError on every rank unless they are the contiguous split."""
        E = sum(experts_by_rank)
        expected = [experts_of_rank(E, self.size, r)[1] for r in range(self.size)]
        if experts_by_rank != expected or self.size > E:
            raise ValueError(f"w_gate_up holds {experts_by_rank} experts on the ranks of the ExpertGroup and must hold {expected}: contiguous "
                             "blocks, at least one a rank, the first E mod W ranks one more")
        return E

    def __deepcopy__(self, memo) -> ExpertGroup:
        return self                                    # a copied layer talks to the same peers

    def __reduce__(self):
        return _group_of_this_process, (self.key,)       # unpickled in the same process: re-attached; elsewhere: None, to be set by the user

    def __repr__(self) -> str:
        return f"ExpertGroup(rank={self.rank}, size={self.size}, key={self.key})"


def _group_of_this_process(key: int) -> ExpertGroup | None:
    """What a pickled group becomes; a function of the module, for a bound method would take the whole runtime along."""
    return runtime.group_by_key(key)
