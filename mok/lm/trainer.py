"""Trains the language model: one deterministic step after another, validation, checkpoints, and a stop that can be resumed to the bit."""
from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor
from torch.utils import deterministic

from ..arguments import LARGEST, check_integer, check_number
from ..clip import clip_grad_norm_
from ..plan import count_ids
from ..router import Routes
from ..runtime import runtime
from .checkpoint import checkpoint_name, keep_newest, load_checkpoint, read_state, save_checkpoint
from .data import Corpus, check_length, training_windows, validation_windows
from .model import MOE_IMPLS, LanguageModel, config_by_name, sequence_losses
from .ranks import Ranks
from .run_folder import RunFolder
from .state import expert_layers, model_state

if TYPE_CHECKING:
    from ..group import ExpertGroup
    from ..recorder import StepRecorder

TRAIN_PRECISIONS = ("fp32", "bf16")
_MOST_SEQUENCES = 2**20          # of one step: their bytes alone fill a gigabyte
# settings that are counts: name, least, most
_COUNTS = (("steps", 1, LARGEST), ("batch_size", 1, _MOST_SEQUENCES), ("accumulate", 1, LARGEST), ("eval_every", 1, LARGEST), ("eval_tokens", 1, LARGEST),
           ("seed", 0, 2**63 - 1), ("warmup_steps", 0, LARGEST), ("save_every", 0, LARGEST))
_FINAL_LEARNING_RATE = 0.1       # the cosine ends at this part of the peak
_KEPT_CHECKPOINTS = 2


@dataclass(frozen=True)
class TrainSettings:
    """Everything that decides a run's numbers, but the text itself and the device.

    config: a name in `mok.lm.model.CONFIGS`. precision: "fp32", or "bf16" (fp32 weights, products in bf16 through autocast).
    moe_impl: a name in `mok.lm.model.MOE_IMPLS`. batch_size: sequences a step, split into `accumulate` equal parts that run one after another.
    learning_rate: the peak of warm-up (warmup_steps, linear) and cosine. grad_clip: largest global gradient norm. eval_every, save_every: steps
    between validations and between checkpoints; save_every = 0 leaves a checkpoint only where the run is stopped. eval_tokens: targets of one
    validation. Raises ValueError for a value out of range.
    """

    config: str = "small"
    steps: int = 300
    seed: int = 0
    precision: str = "fp32"
    moe_impl: str = "engine"
    batch_size: int = 16
    accumulate: int = 1
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    eval_every: int = 100
    save_every: int = 100
    eval_tokens: int = 2**16

    def __post_init__(self) -> None:
        config_by_name(self.config)
        if self.precision not in TRAIN_PRECISIONS:
            raise ValueError(f"precision={self.precision!r} must be one of {', '.join(TRAIN_PRECISIONS)}")
        if self.moe_impl not in MOE_IMPLS:
            raise ValueError(f"moe_impl={self.moe_impl!r} must be one of {', '.join(MOE_IMPLS)}")
        for name, least, most in _COUNTS:
            check_integer(name, getattr(self, name), least, most)
        check_number("weight_decay", self.weight_decay)
        for name in ("learning_rate", "grad_clip"):
            check_number(name, getattr(self, name), positive=True)
        if self.batch_size % self.accumulate:
            raise ValueError(f"batch_size={self.batch_size} must be a multiple of accumulate={self.accumulate}")

    @staticmethod
    def from_dict(values: dict[str, Any]) -> TrainSettings:
        """The settings that `asdict` gave. ValueError naming what is missing, unknown or out of range."""
        names = {field.name for field in fields(TrainSettings)}
        if values.keys() != names:
            raise ValueError(f"settings must hold {len(names)} names, found {len(values)}: missing {sorted(names - values.keys())}, "
                             f"unknown {sorted(values.keys() - names)}")
        return TrainSettings(**values)


@dataclass(frozen=True)
class StepMetrics:
    """What one step measured. loss: nats a byte, without the auxiliary loss. expert_load: routes of each layer's experts.

    balance: mean over layers of (mean load / largest load) of the experts: 1 = even, 1/E = all on one.
    """

    step: int
    loss: float
    aux_loss: float
    grad_norm: float
    learning_rate: float
    balance: float
    expert_load: list[list[int]]
    tokens_per_s: float


class Report(Protocol):
    """Told what happens during `fit`; for display only."""

    def on_step(self, metrics: StepMetrics) -> None: ...

    def on_validation(self, step: int, loss: float) -> None: ...


def check_run(settings: TrainSettings, corpus: Corpus, ranks: int) -> None:
    """Raise ValueError unless so many ranks can train on this text with these settings."""
    config = config_by_name(settings.config)
    check_length(corpus, config.seq_len)
    if ranks > config.num_experts:
        raise ValueError(f"{ranks=} must be at most the {config.num_experts} experts of config={settings.config!r}")
    if ranks > 1 and settings.moe_impl != "engine":
        raise ValueError(f"{ranks=} must be 1 with moe_impl={settings.moe_impl!r}, which computes on one")


class Trainer:
    """Model, optimizer and position of one run on `device`. The same settings and text give the same bits on the same machine.

    ranks: the processes that train together, None = this one alone. Each has every dense parameter, a block of every layer's experts, and
    computes its share of each part of the global batch; batch, order and schedule do not depend on how many there are. All ranks call every
    method that computes, saves or loads.

    model: one of settings' sizes on `device` whose values the caller chose, None = the model that settings say.
    """

    def __init__(self, settings: TrainSettings, corpus: Corpus, device: torch.device | str = "cpu", ranks: Ranks | None = None,
                 model: LanguageModel | None = None) -> None:
        config = config_by_name(settings.config)
        self.ranks = Ranks() if ranks is None else ranks
        self.device = torch.device(device)
        check_run(settings, corpus, self.ranks.size)
        self.settings = settings
        self.corpus = corpus
        self.step = 0
        self.model = LanguageModel(config, settings.seed, settings.moe_impl, self._expert_group()).to(self.device) if model is None else model
        self.validation = validation_windows(corpus, config.seq_len, settings.eval_tokens)
        self.optimizer = _optimizer(self.model, settings)
        experts = expert_layers(self.model)
        self._dense = [p for name, p in self.model.named_parameters() if name not in experts]
        self._experts = [p for name, p in self.model.named_parameters() if name in experts]
        self._routed: list[Routes] = []                    # of each layer, in the latest forward pass
        if self.ranks.size > 1:
            for layer in self.model.moe_layers:
                layer.router.register_forward_hook(lambda router, inputs, routes: self._routed.append(routes))
        self.recorder: StepRecorder | None = None          # records every step where one is set (`mok.lm.audit`)

    def _expert_group(self) -> ExpertGroup | None:
        """What the layers' experts are spread over. Launches that communicate compute in bf16; their buffers hold the largest share of a part."""
        config, settings = config_by_name(self.settings.config), self.settings
        if settings.precision != "bf16":
            return self.ranks.group
        sequences = max(self.ranks.sizes(_part_size(settings)))
        return self.ranks.expert_group(self.device, num_experts=config.num_experts, max_tokens=sequences * config.seq_len, hidden_size=config.hidden_size,
                                       top_k=config.top_k)

    def learning_rate(self, step: int) -> float:
        """Linear warm-up to the peak, then half a cosine down to a tenth of it at the last step."""
        settings = self.settings
        if step < settings.warmup_steps:
            return settings.learning_rate * (step + 1) / settings.warmup_steps
        progress = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return settings.learning_rate * (_FINAL_LEARNING_RATE + (1 - _FINAL_LEARNING_RATE) * cosine)

    def train_step(self) -> StepMetrics:
        """One optimizer step on the next windows. FloatingPointError where the loss is not finite; the weights are then as before the step."""
        started = time.perf_counter()
        settings, model = self.settings, self.model
        seq_len = model.config.seq_len
        windows = training_windows(self.corpus, self.step, settings.batch_size, seq_len, settings.seed)
        model.train()
        self.optimizer.zero_grad(set_to_none=True)
        if self.recorder is not None:
            self.recorder.begin(windows if self.ranks.leads else windows[:0])        # every rank has drawn all of them
        losses, aux_losses, all_loads = [], [], []
        for part in windows.chunk(settings.accumulate):
            per_sequence = self._sequence_losses(self.ranks.share(part).to(self.device))
            aux_loss, load = self._balance(part.shape[0])
            (per_sequence.sum() / (settings.batch_size * seq_len) + aux_loss / settings.accumulate).backward()
            losses.extend(self._gathered(per_sequence.detach(), part.shape[0]))
            aux_losses.append(aux_loss.detach())
            all_loads.append(load)
        self.ranks.sum_in_order([cast(Tensor, p.grad) for p in self._dense], "the sum of gradients")
        runtime.raise_pending_errors()                     # a launch that gave up leaves NaN; why is told here, not that the loss is none
        # fsum is exact before its one rounding: the number does not depend on how the batch was split.
        loss = math.fsum(losses) / (settings.batch_size * seq_len)
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} at step {self.step + 1}")
        if self.recorder is not None:
            self.recorder.gradients(loss=loss)
        norm = clip_grad_norm_(self._dense, self._experts, settings.grad_clip, group=self.ranks.group).item()
        rate = self.learning_rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.step += 1
        if self.recorder is not None:
            self.recorder.end(self.step, grad_norm=norm, learning_rate=rate)
        loads = torch.stack(all_loads).sum(0).tolist()
        aux = math.fsum(self._gathered(torch.stack(aux_losses), settings.accumulate * self.ranks.size)) / settings.accumulate
        seconds = time.perf_counter() - started
        return StepMetrics(step=self.step, loss=loss, aux_loss=aux, grad_norm=norm, learning_rate=rate, balance=load_balance(loads), expert_load=loads,
                           tokens_per_s=settings.batch_size * seq_len / seconds)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the validation windows, nats a byte."""
        self.model.eval()
        losses: list[float] = []
        for windows in self.validation.split(_part_size(self.settings)):
            losses.extend(self._gathered(self._sequence_losses(self.ranks.share(windows).to(self.device)), windows.shape[0]))
        runtime.raise_pending_errors()
        return math.fsum(losses) / self.validation[:, 1:].numel()

    def _gathered(self, values: Tensor, count: int) -> list[float]:
        """All ranks' values, `count` of them split as `Ranks.sizes` splits, on every rank."""
        return self.ranks.gather(values.cpu(), self.ranks.sizes(count), "the step's losses").tolist()

    def _balance(self, sequences: int) -> tuple[Tensor, Tensor]:
        """After a forward pass over this rank's share of `sequences`: (0-d sum of the layers' auxiliary losses, (layers, E) routes of all ranks).

        The load is counted over all ranks' tokens, so the ranks' losses, and their gradients, add up to one rank's loss for the same tokens.
        """
        layers = self.model.moe_layers
        if self.ranks.size == 1:
            loads = [cast(Tensor, layer.tokens_per_expert) for layer in layers]
            return torch.stack([cast(Tensor, layer.aux_loss) for layer in layers]).sum(), torch.stack(loads)
        share = self.ranks.sizes(sequences)[self.ranks.rank] / sequences
        own = torch.stack([count_ids(routes.topk_ids.reshape(-1), layer.config.num_experts) for routes, layer in zip(self._routed, layers, strict=True)])
        load = self.ranks.combine(own.cpu(), "the experts' load")
        losses = [layer.router.loss(routes, counts, share=share) for layer, routes, counts in zip(layers, self._routed, load.to(self.device), strict=True)]
        return torch.stack(losses).sum(), load

    def _sequence_losses(self, windows: Tensor) -> Tensor:
        self._routed.clear()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.precision == "bf16"):
            logits = self.model(windows[:, :-1])
        return sequence_losses(logits, windows[:, 1:])

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds of this rank, by name (`mok.lm.state`): views, so loading into them loads the model."""
        return model_state(self.model, self.optimizer).here()

    def save(self, run: RunFolder) -> None:
        """Write a checkpoint of this position, unless it is there, and drop all but the newest ones."""
        folder = run.checkpoints / checkpoint_name(self.step)
        if not folder.exists():
            corpus = {"name": self.corpus.name, "sha256": self.corpus.digest}
            state = model_state(self.model, self.optimizer)
            save_checkpoint(folder, state.here() if self.ranks.leads else state.experts,
                            {"step": self.step, "settings": asdict(self.settings), "corpus": corpus, "ranks": self.ranks.size}, self.ranks)
            if self.ranks.leads:
                keep_newest(run.checkpoints, _KEPT_CHECKPOINTS)

    def load(self, run: RunFolder) -> None:
        """Continue from a run's newest checkpoint. ValueError naming both quantities where it is damaged or of another model or text."""
        folder = run.latest_checkpoint()
        state = read_state(folder)
        ours = self.corpus.digest
        try:
            step, theirs = int(state["step"]), str(state["corpus"]["sha256"])
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"checkpoint={str(folder)!r} is corrupt: its state must hold a step and a corpus, found {sorted(state)}") from None
        if theirs != ours:
            raise ValueError(f"data={self.corpus.name!r} has SHA-256 {ours[:16]}..., the checkpoint was trained on {theirs[:16]}... "
                             f"({state['corpus'].get('name')!r})")
        if step > self.settings.steps:
            raise ValueError(f"steps={self.settings.steps} must be at least the {step} steps that the checkpoint has done")
        saved = model_state(self.model, self.optimizer)
        load_checkpoint(folder, saved.here(), saved.elsewhere, self.ranks)
        for state_of_parameter in self.optimizer.state.values():
            state_of_parameter["step"].fill_(step)
        self.step = step


def fit(trainer: Trainer, run: RunFolder, report: Report, stop: Callable[[], bool] = lambda: False) -> bool:
    """Train until settings.steps, or until `stop()` is true after a step; validates, writes metrics and checkpoints on the way.

    Returns True when all steps are done, False when stopped; either way the newest checkpoint is of the last step (with save_every = 0 there is
    none of a run that was not stopped). With several ranks all call
    it, rank 0 writes and reports, and `stop()` on any of them stops all after the same step.
    """
    settings, ranks = trainer.settings, trainer.ranks
    with deterministic_libraries(trainer.device):
        if trainer.step == 0 and settings.save_every:
            trainer.save(run)
        while trainer.step < settings.steps:
            if ranks.any(stop(), "the start of a step"):
                trainer.save(run)
                return False
            metrics = trainer.train_step()
            if ranks.leads:
                run.append_metrics(asdict(metrics))
                report.on_step(metrics)
            done = trainer.step == settings.steps
            if done or trainer.step % settings.eval_every == 0:
                loss = trainer.evaluate()
                if ranks.leads:
                    run.append_metrics({"step": trainer.step, "validation_loss": loss})
                    report.on_validation(trainer.step, loss)
            if settings.save_every and (done or trainer.step % settings.save_every == 0):
                trainer.save(run)
    return True


def _part_size(settings: TrainSettings) -> int:
    """Sequences that go through the model at a time, over all ranks."""
    return settings.batch_size // settings.accumulate


def native_precision(device: torch.device) -> str:
    """"bf16" where `device` multiplies bf16 natively (any GPU of today, CPUs with AVX-512 BF16 or AMX), else "fp32"."""
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    # private names of torch 2.11 to 2.13; a torch without them trains in fp32
    probes = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return "bf16" if any(probe is not None and probe() for probe in probes) else "fp32"


def load_balance(loads: list[list[int]]) -> float:
    """Mean over layers of (mean load / largest load). load_balance([[2, 2], [4, 0]]) == 0.75"""
    return sum(sum(load) / len(load) / max(max(load), 1) for load in loads) / len(loads)


def _optimizer(model: LanguageModel, settings: TrainSettings) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019); matrices decay, vectors and the embedding do not. Its moments exist from the start, as checkpoints need."""
    decayed = [p for name, p in model.named_parameters() if p.ndim >= 2 and name != "embedding"]
    others = [p for name, p in model.named_parameters() if p.ndim < 2 or name == "embedding"]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for parameter in model.parameters():
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        optimizer.state[parameter] = {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
    return optimizer


@contextmanager
def deterministic_libraries(device: torch.device) -> Iterator[None]:
    """Inside, torch's own operations on a GPU run in fixed order too (they do on a CPU). Restores the setting afterwards."""
    if device.type != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")      # cuBLAS asks for this; it reads it when its first handle is made
    before, fill = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]      # it would write NaN over every new buffer
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
