"""`mok train`: train the language model on text, or continue a run."""
from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..arguments import check_integer, check_path
from .console import Bar, Output
from .device import add_device_argument, choose_device, device_of
from .launch import add_rank_arguments, run_on_ranks

if TYPE_CHECKING:
    from ..lm.audit import RunAudit
    from ..lm.data import Corpus
    from ..lm.ranks import Ranks
    from ..lm.run_folder import RunFolder
    from ..lm.trainer import StepMetrics, Trainer, TrainSettings

HELP = "train a small mixture-of-experts language model on text"
DESCRIPTION = """\
Train a small mixture-of-experts language model, byte by byte. Without options it learns the source code of this Python's own standard
library, which every machine has, in a few minutes on two cores, and compares itself with a bigram model of the same text.

A run is a folder: metrics.jsonl (one line a step), training.png (loss and expert load), sample.txt, checkpoints. Ctrl-C stops after the current step
and leaves a checkpoint; `mok train --resume FOLDER` continues, and every later loss is the same to the bit as without the stop.

On a CPU the work is shared by two processes (--ranks), each with half of the cores, half of every batch and half of the experts. Data, order and
the first loss do not depend on their number; a checkpoint can be continued on any. `torchrun --nproc-per-node N -m mok train` does the same.
On GPUs --ranks N takes a GPU for each process where there are as many, else they share them (CUDA MPS runs as long as the command does).

  mok train                                 the default run, in a new folder out/train-N
  mok train --data notes/ --steps 500       your own text: a file or a folder
  mok train --resume out/train-1            continue a run that was stopped
  mok train --ranks 4                       on four processes
  mok train --ranks 8 --device cuda         on the GPUs of this machine, one a process where there are eight
  mok train --moe-impl reference --steps 10 the same model computed by the specification, slowly"""
_PROMPT_BYTES = 32
_MOST_SAMPLE_BYTES = 2**20               # byte after byte, each a pass of the model: hours
# command-line name -> (type, help); their defaults are TrainSettings' own
_SETTINGS: dict[str, tuple[type, str]] = {
    "config": (str, "size of the model by name: tiny, small, 1b or, for one large GPU, qwen3-30b-a3b-6l"),
    "steps": (int, "optimizer steps in all"),
    "seed": (int, "seed of the initial weights and of the order of the text"),
    "precision": (str, "fp32, or bf16: fp32 weights, products in bf16 (default: bf16 where the device multiplies it natively, else fp32)"),
    "moe_impl": (str, "who computes the experts: engine (the fast one), reference (the specification) or grouped_mm (unfused PyTorch)"),
    "batch_size": (int, "sequences in one step"),
    "accumulate": (int, "parts that a step's sequences are split into, to need less memory"),
    "learning_rate": (float, "peak learning rate"),
    "warmup_steps": (int, "steps over which the learning rate rises to its peak"),
    "weight_decay": (float, "AdamW's weight decay of matrices"),
    "grad_clip": (float, "largest norm of the whole gradient"),
    "eval_every": (int, "steps between two validations"),
    "save_every": (int, "steps between two checkpoints; 0: none but where the run is stopped"),
    "eval_tokens": (int, "bytes predicted in one validation, at most"),
}
_FREE_ON_RESUME = ("steps",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", metavar="PATH", help="a file or folder of text (default: this Python's standard library)")
    parser.add_argument("--out", metavar="FOLDER", help="folder of the new run (default: out/train-N, the first N that is free)")
    parser.add_argument("--resume", metavar="FOLDER", help="continue the run in this folder; its settings hold, --steps may be raised")
    parser.add_argument("--audit", metavar="FILE", help="write a record of every step's digests, that mok audit can check, replay and compare; "
                                                        "with --resume: the record of that run, to continue")
    add_device_argument(parser)
    add_rank_arguments(parser, "processes that share the work (default: 2 on a CPU with two cores or more, else 1; with --resume: as many as before on "
                               "such a device)")
    parser.add_argument("--sample-bytes", type=int, metavar="INT", default=256, help="length of the text written at the end (default: 256; 0 = none)")
    add_settings(parser)


def add_settings(parser: argparse.ArgumentParser, leave_out: Sequence[str] = ()) -> None:
    """One option for each of the run's settings."""
    for name, (kind, text) in _SETTINGS.items():
        if name not in leave_out:
            default = "" if name == "precision" else f" (default: {_DEFAULTS[name]})"
            parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=kind.__name__.upper() if kind is not str else "NAME", help=text + default)


def given_settings(arguments: argparse.Namespace, device: Any) -> dict[str, Any]:
    """The settings that were given, and the precision that suits the device where none was."""
    from ..lm.trainer import native_precision

    given = {name: getattr(arguments, name) for name in _SETTINGS if getattr(arguments, name, None) is not None}
    given.setdefault("precision", native_precision(device))
    return given


# Kept here so that --help does not import the trainer; a test compares them with TrainSettings.
_DEFAULTS: dict[str, Any] = {
    "config": "small", "steps": 300, "seed": 0, "moe_impl": "engine", "batch_size": 16, "accumulate": 1, "learning_rate": 2e-3, "warmup_steps": 20,
    "weight_decay": 0.1, "grad_clip": 1.0, "eval_every": 100, "save_every": 100, "eval_tokens": 2**16,
}


def run(arguments: argparse.Namespace, output: Output) -> int:
    check_integer("sample_bytes", arguments.sample_bytes, 0, _MOST_SAMPLE_BYTES)
    started = time.perf_counter()
    device = choose_device(arguments.device)

    def count() -> int:
        number = _default_ranks(arguments, device) if arguments.ranks is None else arguments.ranks
        if number > 1:
            _check_input(arguments, device, number)
        return number

    return run_on_ranks(arguments, count, lambda ranks: _train(arguments, output, ranks, device_of(ranks, device), started), device)


def _default_ranks(arguments: argparse.Namespace, device: Any) -> int:
    from ..lm.ranks import usable_cores
    from ..lm.run_folder import RunFolder

    if arguments.resume is not None:
        stored = RunFolder.open(check_path("resume", arguments.resume)).settings()
        if isinstance(before := stored.get("ranks"), int) and stored.get("device", "cpu") == device.type:
            return before
    return 2 if device.type == "cpu" and arguments.moe_impl in (None, "engine") and usable_cores() >= 2 else 1


def _check_input(arguments: argparse.Namespace, device: Any, number: int) -> None:
    """Refuse here, before any process is started, what each of them would refuse."""
    from ..lm.ranks import Ranks
    from ..lm.run_folder import RunFolder
    from ..lm.trainer import check_run

    if arguments.resume is None:
        settings, corpus, _ = _new_run(arguments, device, Ranks())
    else:
        settings, corpus = _resumed_run(arguments, RunFolder.open(check_path("resume", arguments.resume)))
    check_run(settings, corpus, number)


def _train(arguments: argparse.Namespace, output: Output, ranks: Ranks, device: Any, started: float) -> int:
    from ..lm.data import bigram_loss
    from ..lm.trainer import fit

    with stop_on_signal(announce=ranks.leads) as stop:
        trainer, folder, audit = _start(arguments, ranks, device)
        settings = trainer.settings
        bigram = bigram_loss(trainer.corpus, trainer.validation) if ranks.leads else 0.0
        _print_start(output, trainer, folder, bigram)
        display = _Display(output, settings.steps)
        with output.bar("training", settings.steps, trainer.step) as display.bar:
            finished = fit(trainer, folder, display, stop)
        chain = audit.close(finished) if audit is not None else None
    if ranks.leads:                                      # the run is saved: from here on Ctrl-C ends the command as usual
        result = _finish(trainer, folder, bigram)
        if finished and arguments.sample_bytes > 0 and (ranks.size == 1 or settings.save_every):     # several ranks' experts meet in a checkpoint
            result["sample"] = _sample(output, trainer, folder, arguments.sample_bytes)
        _print_end(output, result, folder)
        if chain is not None:
            result["audit"] = {"file": arguments.audit, "hash": chain}
            output.line(f"record: {arguments.audit}, closed with hash {chain}; check it with: mok audit replay {arguments.audit}")
        result["seconds"] = round(time.perf_counter() - started, 1)
        output.finish(result)
    if not finished and ranks.leads:
        longer = f" --steps {settings.steps}" if arguments.resume and arguments.steps is not None else ""      # the run's own settings keep its first number
        print(f"mok train: stopped after step {trainer.step} of {settings.steps}; continue with: mok train --resume {folder.path}{longer}", file=sys.stderr)
    return 0 if finished else 128 + signal.SIGINT


def _start(arguments: argparse.Namespace, ranks: Ranks, device: Any) -> tuple[Trainer, RunFolder, RunAudit | None]:
    """The trainer of a new or a continued run, its folder and its record. What stands in the way is found out before anything is written."""
    from ..lm.audit import RunAudit
    from ..lm.run_folder import RunFolder
    from ..lm.trainer import Trainer

    audited = arguments.audit is not None
    if arguments.resume is None:
        with ranks.together("beginning a run"):
            settings, corpus, data = _new_run(arguments, device, ranks)
        trainer = Trainer(settings, corpus, device, ranks)
        with ranks.together("creating the run's folder"):
            path = str(_new_folder(arguments.out)) if ranks.leads else ""
            if ranks.leads:
                RunFolder.create(Path(path), {"settings": asdict(settings), "data": data, "ranks": ranks.size, "device": device.type})
        folder = RunFolder(Path(ranks.tell("the run's folder", path=path)[0]["path"]))
        return trainer, folder, RunAudit.begin(trainer, arguments.audit, data) if audited else None
    with ranks.together("continuing a run"):
        folder = RunFolder.open(check_path("resume", arguments.resume))
        settings, corpus = _resumed_run(arguments, folder)
    trainer = Trainer(settings, corpus, device, ranks)
    trainer.load(folder)
    audit = RunAudit.resume(trainer, arguments.audit, _data_path(arguments, folder)) if audited else None
    if ranks.leads:
        folder.truncate_metrics(trainer.step)
    return trainer, folder, audit


def _new_run(arguments: argparse.Namespace, device: Any, ranks: Ranks) -> tuple[TrainSettings, Corpus, str | None]:
    from ..audit import RecordWriter
    from ..lm.data import load_corpus
    from ..lm.trainer import TrainSettings

    settings = TrainSettings(**given_settings(arguments, device))
    if arguments.out is not None and ranks.leads:
        _new_folder(arguments.out)                       # refuse before the text is read
    if arguments.audit is not None and ranks.leads:
        RecordWriter.check_free(arguments.audit)
    return settings, load_corpus(arguments.data), _data_path(arguments)


def _data_path(arguments: argparse.Namespace, folder: RunFolder | None = None) -> str | None:
    """Where the text is, as a later command finds it from any folder; None = the standard library."""
    if arguments.data is not None:
        return str(Path(arguments.data).absolute())
    return None if folder is None else folder.settings().get("data")


def _new_folder(out: str | None) -> Path:
    from ..lm.run_folder import RunFolder, free_folder

    if out is None:
        return free_folder(Path("out"), "train")
    path = check_path("out", out)
    RunFolder.check_free(path)
    return path


def _resumed_run(arguments: argparse.Namespace, folder: RunFolder) -> tuple[TrainSettings, Corpus]:
    """The run's own settings and text; ValueError for an argument that says otherwise."""
    from ..lm.data import load_corpus
    from ..lm.trainer import TrainSettings

    if arguments.out is not None:
        raise ValueError(f"out={arguments.out!r} must not be given with resume={arguments.resume!r}, which continues in its own folder")
    stored = folder.settings()
    try:
        values = dict(stored["settings"])
        TrainSettings.from_dict(values)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"resume={arguments.resume!r} is corrupt: its settings do not fit: {error}") from None
    for name in _SETTINGS:
        given = getattr(arguments, name)
        if given is not None and given != values[name]:
            if name not in _FREE_ON_RESUME:
                raise ValueError(f"{name}={given!r} must be {values[name]!r}, the setting of the run in resume={arguments.resume!r}")
            values[name] = given
    data = stored.get("data") if arguments.data is None else arguments.data
    return TrainSettings.from_dict(values), load_corpus(data)


def _print_start(output: Output, trainer: Trainer, folder: RunFolder, bigram: float) -> None:
    from ..lm.state import num_parameters

    settings, corpus, ranks = trainer.settings, trainer.corpus, trainer.ranks
    parameters = num_parameters(trainer.model)
    left_out = f", {corpus.left_out} more left out (too much text)" if corpus.left_out else ""
    output.line(f"text: {corpus.name}, {corpus.num_files} files{left_out}: {corpus.train.numel():,} bytes to train on, {corpus.validation.numel():,} held out")
    output.line(f"model: {settings.config}, {parameters / 1e6:.1f} M parameters, on {trainer.device} in {settings.precision}, "
                f"experts by the {settings.moe_impl}" + (f", on {ranks.size} ranks" if ranks.size > 1 else ""))
    output.line(f"run: {folder.path}, " + (f"from step {trainer.step} to {settings.steps}" if trainer.step else f"{settings.steps} steps"))
    output.line(f"a bigram model of this text has validation loss {bigram:.4f} nats a byte: the number to beat")


class _Display:
    """Shows what `fit` reports: in the bar on a terminal, else a line now and then."""

    def __init__(self, output: Output, steps: int) -> None:
        self.output, self.steps = output, steps
        self.bar = Bar(None, None)

    def on_step(self, metrics: StepMetrics) -> None:
        text = f"loss {metrics.loss:.3f}  {metrics.tokens_per_s:,.0f} tokens/s  load balance {metrics.balance:.2f}"
        self.bar.advance(1, text)
        if not self.output.terminal and (metrics.step == 1 or metrics.step % max(1, self.steps // 20) == 0):
            self.output.line(f"step {metrics.step}/{self.steps}  {text}")

    def on_validation(self, step: int, loss: float) -> None:
        self.output.line(f"step {step}/{self.steps}  validation loss {loss:.4f}")


def _finish(trainer: Trainer, folder: RunFolder, bigram: float) -> dict[str, Any]:
    """Draws the picture; returns the JSON document."""
    from ..lm.plot import plot_training
    from ..lm.state import num_parameters

    metrics = folder.read_metrics()
    steps = [entry for entry in metrics if "loss" in entry]
    validations = [entry for entry in metrics if "validation_loss" in entry]
    if steps:
        plot_training(metrics, folder.picture, f"mok train: {trainer.settings.config}, {trainer.corpus.name}, step {trainer.step}", bigram)
    return {
        "command": "train", "out": str(folder.path), "finished": trainer.step == trainer.settings.steps, "step": trainer.step,
        "settings": asdict(trainer.settings), "device": str(trainer.device), "parameters": num_parameters(trainer.model), "ranks": trainer.ranks.size,
        "loss": steps[-1]["loss"] if steps else None, "validation_loss": validations[-1]["validation_loss"] if validations else None,
        "bigram_validation_loss": bigram, "tokens_per_s": median(entry["tokens_per_s"] for entry in steps) if steps else None,
        "mfu": _utilisation(trainer, median(entry["tokens_per_s"] for entry in steps)) if steps else None,
    }


def _utilisation(trainer: Trainer, tokens_per_s: float) -> dict[str, Any] | None:
    """Model FLOP utilisation on GPUs in bf16: model FLOPs a second and GPU over those of a large product measured here, after the run. None elsewhere."""
    from ..lm.flops import flops_per_token, measured_roof

    if trainer.device.type != "cuda" or trainer.settings.precision != "bf16":
        return None
    flops, roof, placement = flops_per_token(trainer.model.config), measured_roof(trainer.device), trainer.ranks.placement
    gpus = 1.0 if placement is None else trainer.ranks.size * placement.gpus / placement.ranks
    reached = tokens_per_s / gpus * flops * 1e-12
    return {"of_measured_roof": round(reached / roof, 4), "roof_tflops": round(roof, 1), "model_tflops": round(reached, 2), "flops_per_token": flops,
            "gpus": gpus}


def _print_end(output: Output, result: dict[str, Any], folder: RunFolder) -> None:
    loss, bigram = result["validation_loss"], result["bigram_validation_loss"]
    if loss is not None:
        output.line(f"validation loss {loss:.4f}, bigram model {bigram:.4f}: {'below' if loss < bigram else 'NOT below'} the bigram model")
    if result["tokens_per_s"] is not None:
        output.line(f"{result['tokens_per_s']:,.0f} tokens/s; picture: {folder.picture}; metrics: {folder.metrics}")
    if (mfu := result["mfu"]) is not None:
        output.line(f"model FLOP utilisation {mfu['of_measured_roof']:.1%}: {mfu['model_tflops']:.1f} TFLOP/s a GPU of products and causal attention, of "
                    f"{mfu['roof_tflops']:.0f} that a bf16 product of 8192 x 8192 x 8192 reaches on this GPU now")


def _sample(output: Output, trainer: Trainer, folder: RunFolder, num_bytes: int) -> str:
    import torch

    from ..lm.checkpoint import write_atomically
    from ..lm.model import generate
    from ..lm.ranks import usable_cores
    from ..lm.state import load_model

    prompt = bytes(trainer.corpus.validation[:_PROMPT_BYTES].tolist())
    model = trainer.model
    if trainer.ranks.size > 1:                           # rank 0 alone, with all experts and all cores: the others have ended or are about to
        torch.set_num_threads(usable_cores())
        model = load_model(folder.latest_checkpoint()).to(trainer.device)
    model.eval()
    with output.bar("sampling", num_bytes) as bar:
        text = prompt + generate(model, prompt, num_bytes, seed=trainer.settings.seed, on_byte=bar.advance)
    sample = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text.decode("utf-8", errors="replace"))
    write_atomically(folder.sample, sample + "\n")
    output.line(f"sample, after the {len(prompt)} bytes that it was given:\n{sample}\n")
    return sample


@contextmanager
def stop_on_signal(announce: bool = True) -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C (or SIGTERM) only makes the yielded function return True; the second one interrupts at once.

    announce: say on stderr that the signal was seen. A signal that this process ignores stays ignored.
    """
    seen: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        if len(seen) > 1:
            raise KeyboardInterrupt
        if announce:
            # one write: the second signal may come between the two that print makes, of the text and of the end of the line
            sys.stderr.write("mok train: stopping after this step (once more to stop at once, without a checkpoint)\n")
            sys.stderr.flush()

    numbers = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield lambda: bool(seen)
    except BaseException as error:
        if len(seen) > 1:                                # whatever a library made of it: torch's checkpoints wrap it in an exception of their own
            raise KeyboardInterrupt from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
