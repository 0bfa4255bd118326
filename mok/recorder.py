"""Collects what one training step computed, as digests in the order of the computation: inputs, routes, outputs, gradients, parameters."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .arguments import check_integer, check_tensor, check_type, kind_of
from .audit import Entries
from .determinism import WORD, Digest, DigestBatch, signed
from .layer import MoE

# Given an int64 CPU tensor, returns its elementwise sum over all ranks (wrapping mod 2^64), the same on every rank.
Combine = Callable[[Tensor], Tensor]
_EXPERT_TENSORS = ("w_gate_up", "w_down", "b_gate_up", "b_down")


class StepRecorder:
    """Records the steps of a training loop around `model` and `optimizer`; `sink(step, entries)` gets each step's entries.

    The loop calls `start` once, then for every step `begin` before the forward pass, `gradients` after the backward pass and before anything
    changes the gradients, `end` after the optimizer's step. Between `begin` and `end` every forward pass of the model is recorded, and its
    backward pass through each `mok.MoE`; "partN" counts the passes of one step (gradient accumulation).

    Names: "input"; "partN/<layer>/" x, topk_ids, topk_weights, y and, from the backward pass, dy, dx, d_topk_weights (those of `mok.moe` alone,
    without the router's share, in its compute dtype); "partN/output"; "gradient/<parameter>"; "parameter/<parameter or buffer>";
    "optimizer/<state>/<parameter>"; scalars under their own names. The optimizer's state is recorded in every step divisible by optimizer_every:
    it is as large as everything else together, and a fault in it reaches the parameters of later steps anyway.

    Several ranks (rank, world_size, combine): each holds some of the batch, rank by rank in global order, and the experts that its layers own;
    everything else is replicated. combine sums over the ranks (`torch.distributed.all_reduce` of the tensor, for instance) and is called twice in
    `end` and in `start`. The entries are then those of the global tensors, on every rank; a replicated tensor that is not the same on all ranks is
    named by the entry "replicas differ".
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, sink: Callable[[int, Entries], None], *, optimizer_every: int = 1,
                 rank: int = 0, world_size: int = 1, combine: Combine | None = None) -> None:
        check_type("model", model, nn.Module, "an nn.Module")
        check_type("optimizer", optimizer, (torch.optim.Optimizer, type(None)), "a torch.optim.Optimizer or None")
        check_type("sink", sink, Callable, "a function of a step and its entries")
        check_integer("optimizer_every", optimizer_every, 1)
        check_integer("world_size", world_size, 1)
        check_integer("rank", rank, 0, world_size - 1)
        if (world_size > 1) != (combine is not None) or not (combine is None or callable(combine)):
            raise ValueError(f"combine={kind_of(combine)} must be given exactly where there are several ranks, and be a function; {world_size=}")
        self._model, self._optimizer, self._sink = model, optimizer, sink
        self._optimizer_every = optimizer_every
        self._rank, self._world_size, self._combine = rank, world_size, combine
        self._active = False
        self._passes: Counter[str | None] = Counter()              # forward passes of this step: of each layer, and of the model (None)
        self._batch = DigestBatch()
        self._names: list[str | tuple[str, float]] = []           # names of the batch's digests, scalars in between
        self._spread: list[str] = []                               # of each digest: by "rows", by "experts", or "replicated"
        layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
        self._first_expert = {f"{name}.{tensor}".lstrip("."): layer.first_expert for name, layer in layers.items() for tensor in _EXPERT_TENSORS}
        self._hooks = [layer.register_forward_hook(partial(self._after_layer, name)) for name, layer in layers.items()]
        self._hooks.append(model.register_forward_hook(self._after_model))

    def start(self, step: int = 0) -> None:
        """Hand the state before the first step (or of a loaded checkpoint) to the sink, as `step`."""
        check_integer("step", step, 0)
        self._sink(step, self.state())

    def state(self) -> Entries:
        """Entries of parameters, buffers and the optimizer's state as they are now."""
        self._reset()
        self._add_state(with_optimizer=True)
        return self._finish()

    def begin(self, inputs: Tensor) -> None:
        """A step begins. inputs: this rank's part of the batch, rows in global order."""
        check_tensor("inputs", inputs)
        self._reset()
        self._active = True
        self._add_rows({"input": inputs})

    def gradients(self, **scalars: float) -> None:
        """The backward passes are done. scalars: what is known now, such as the loss."""
        _check_scalars(scalars)
        self._active = False
        self._names.extend(scalars.items())
        self._add_parameters({f"gradient/{name}": p.grad for name, p in self._model.named_parameters() if p.grad is not None})

    def end(self, step: int, **scalars: float) -> None:
        """The optimizer's step number `step` (1 is the first) is done; scalars: learning rate, gradient norm and the like."""
        check_integer("step", step, 0)
        _check_scalars(scalars)
        self._names.extend(scalars.items())
        self._add_state(with_optimizer=step % self._optimizer_every == 0)
        self._sink(step, self._finish())

    def remove(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    def _reset(self) -> None:
        self._active = False
        self._batch, self._names, self._spread = DigestBatch(), [], []
        self._passes.clear()

    def _add_rows(self, tensors: dict[str, Tensor]) -> None:
        """Tensors whose rows follow those of lower ranks, however many these have."""
        self._names.extend(tensors)
        self._spread.extend(["rows"] * len(tensors))
        self._batch.add_all(list(tensors.values()))

    def _add_parameters(self, tensors: dict[str, Tensor]) -> None:
        """Tensors named ".../<parameter>": the experts' begin with this rank's first expert, all others are replicated."""
        first_experts = [self._first_expert.get(name.rsplit("/", 1)[1]) for name in tensors]
        self._names.extend(tensors)
        self._spread.extend("replicated" if first is None else "experts" for first in first_experts)
        self._batch.add_all(list(tensors.values()), [first or 0 for first in first_experts])

    def _add_state(self, with_optimizer: bool) -> None:
        tensors = {f"parameter/{name}": tensor for name, tensor in self._model.state_dict().items()}
        if self._optimizer is not None and with_optimizer:
            for name, parameter in self._model.named_parameters():
                state: dict[str, Any] = self._optimizer.state.get(parameter, {})
                tensors.update({f"optimizer/{key}/{name}": value for key, value in state.items() if isinstance(value, Tensor) and value.dim() > 0})
        self._add_parameters(tensors)

    def _after_layer(self, name: str, layer: MoE, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        # not when a checkpoint recomputes this forward inside backward: the first one was recorded
        if not self._active or layer.routes is None or torch._C._current_graph_task_id() != -1:
            return
        H = layer.config.hidden_size
        prefix = f"part{self._passes[name]}/{name}/"
        self._passes[name] += 1
        topk_ids, topk_weights = layer.routes
        self._add_rows({prefix + "x": inputs[0].reshape(-1, H), prefix + "topk_ids": topk_ids, prefix + "topk_weights": topk_weights,
                        prefix + "y": y.reshape(-1, H)})
        if not y.requires_grad:
            return
        node = _moe_node(y.grad_fn)
        if node is not None:
            node.register_hook(lambda grads, dys: self._add_rows({prefix + what: grad for what, grad in zip(
                ("dy", "dx", "d_topk_weights"), (dys[0], *grads)) if grad is not None}))
        else:
            y.register_hook(lambda dy: self._add_rows({prefix + "dy": dy.reshape(-1, H)}))

    def _after_model(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if self._active and isinstance(output, Tensor) and torch._C._current_graph_task_id() == -1:
            self._add_rows({f"part{self._passes[None]}/output": output})
            self._passes[None] += 1

    def _finish(self) -> Entries:
        digests, differing = self._global_digests()
        following = iter(digests)
        entries: Entries = {}
        for entry in self._names:
            if isinstance(entry, str):
                entries[entry] = str(next(following))
            else:
                entries[entry[0]] = entry[1]
        if differing:
            names = [entry for entry in self._names if isinstance(entry, str)]
            entries["replicas differ"] = ", ".join(names[i] for i in differing)
        return entries

    def _global_digests(self) -> tuple[list[Digest], list[int]]:
        """The digests of the global tensors, and the indices of replicated ones that are not the same on all ranks."""
        if self._combine is None or len(self._batch) == 0:
            return self._batch.finish(), []
        rows = torch.zeros(self._world_size, len(self._batch), dtype=torch.int64)
        rows[self._rank] = torch.tensor(self._batch.rows())
        rows = self._combine(rows)
        by_rows = torch.tensor([spread == "rows" for spread in self._spread])
        local = self._batch.finish((rows[:self._rank].sum(0) * by_rows).tolist())

        # lanes of all ranks' shards, or of rank 0's replica; beside them those of the other replicas, to be compared with it
        lanes = torch.tensor([[signed(lane) for lane in digest.lanes] for digest in local], dtype=torch.int64)
        counts = torch.tensor([spread != "replicated" or self._rank == 0 for spread in self._spread]).unsqueeze(1)
        total = self._combine(torch.cat([lanes * counts, lanes * ~counts], dim=1))
        replicated = torch.tensor([spread == "replicated" for spread in self._spread])
        unlike = (total[:, 2:] != total[:, :2] * (self._world_size - 1)).any(1) & replicated
        lengths = torch.where(replicated, rows[0], rows.sum(0)).tolist()
        digests = [Digest(digest.dtype, (length, *digest.shape[1:]) if digest.shape else (), (lane1 % WORD, lane2 % WORD))
                   for digest, length, (lane1, lane2, *_) in zip(local, lengths, total.tolist(), strict=True)]
        return digests, unlike.nonzero().flatten().tolist()


def _check_scalars(scalars: dict[str, float]) -> None:
    """ValueError naming one that a record cannot hold. NaN it can: a run that diverged is a run."""
    for name, value in scalars.items():
        check_type(name, value, (int, float), "a number")


def _moe_node(node: Any) -> Any:
    """The backward node of `mok.moe` behind a layer's result: past views and casts, whose first input is the only one. None where there is none."""
    for _ in range(8):
        if node is None or "moe_forward" in type(node).__name__:
            return node
        node = node.next_functions[0][0] if node.next_functions else None
    return None
