"""Training on one GPU: cold start, host time, 50 audited steps of two models against the specification, and a step end to end against unfused PyTorch.

    PYTHONPATH=. python3 runs/train_cuda.py --out OUT.json                     everything
    PYTHONPATH=. python3 runs/train_cuda.py --sections end_to_end --profile    one part, with the kernels that a step's time goes to

Sections: cold, host (runs/host_time.py), default (`mok train`, and twice with --audit), billion (`mok train --config 1b`, likewise), end_to_end (6 layers of
Qwen3-30B-A3B's sizes, sequences of 4096, 32768 tokens a step), bench (`mok bench`, all named layers and T = 512). A section that fails is
recorded as such. Last line of stdout: one JSON document, which --out also writes after every section.
"""
from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")      # cuBLAS reads it at its first product, which here comes before the trainer would set it
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "runs"))

import host_time  # noqa: E402
import torch  # noqa: E402

from mok import bench_cuda, unfused  # noqa: E402
from mok.cli.main import main as cli  # noqa: E402
from mok.cli.train import add_arguments, given_settings  # noqa: E402
from mok.clip import clip_grad_norm_  # noqa: E402
from mok.engines.hopper.engine import HopperEngine  # noqa: E402
from mok.engines.hopper.state import set_spin_limit  # noqa: E402
from mok.lm.data import load_corpus, training_windows  # noqa: E402
from mok.lm.flops import flops_per_token, measured_roof  # noqa: E402
from mok.lm.grouped_moe import GroupedMoE  # noqa: E402
from mok.lm.model import LanguageModel, config_by_name  # noqa: E402
from mok.lm.trainer import Trainer, TrainSettings, deterministic_libraries  # noqa: E402
from mok.runtime import runtime  # noqa: E402

DEVICE = torch.device("cuda")
STEPS, TRACKED = 50, 10
ALWAYS = ["--device", "cuda", "--steps", str(STEPS), "--save-every", "0", "--eval-every", str(STEPS), "--sample-bytes", "0"]
BILLION = ["--config", "1b", "--batch-size", "16", "--learning-rate", "3e-4"]
END_TO_END = TrainSettings(config="qwen3-30b-a3b-6l", steps=1000, precision="bf16", batch_size=8, learning_rate=1e-4)
WANTED_SPEEDUP, WANTED_OF_BOUND = 1.30, 0.97


def command(*arguments: str) -> dict[str, Any]:
    """The JSON of `mok ARGUMENTS --json`, whose other output is printed here."""
    captured = io.StringIO()
    with contextlib.redirect_stdout(captured):
        status = cli([*arguments, "--json"])
    *lines, last = captured.getvalue().splitlines() or [""]
    print("\n".join(line[:200] for line in lines[:400]), flush=True)
    if status:
        raise RuntimeError(f"mok {' '.join(arguments)} ended with status {status}")
    return json.loads(last)


def cold(options: argparse.Namespace) -> dict[str, Any]:
    """The first calls of a new process with an empty Triton cache; with --cache its compiled kernels serve the sections that follow.

    While that process compiles, this one takes the specification's first steps (`references`), which need none of the kernels.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": options.cache or folder}
        process = subprocess.Popen([sys.executable, str(ROOT / "runs" / "host_time.py"), "--cold"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   text=True, env=environment)
        try:
            references(options)
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
    if process.returncode:
        raise RuntimeError(err[-2000:])
    return json.loads(out.splitlines()[-1])


def references(options: argparse.Namespace) -> None:
    """The losses of --moe-impl reference over the first steps of both models, into options.references."""
    for arguments in ([], BILLION):
        settings = settings_of(arguments)
        if settings.config not in options.references:
            trainer = Trainer(replace(settings, moe_impl="reference"), load_corpus(), DEVICE)
            with deterministic_libraries(DEVICE):
                options.references[settings.config] = [trainer.train_step().loss for _ in range(TRACKED)]
            del trainer
            free_memory()


def host(options: argparse.Namespace) -> dict[str, Any]:
    return host_time.host_times()


def train(folder: Path, *arguments: str) -> tuple[dict[str, Any], list[float]]:
    """(the command's JSON, every step's loss) of `mok train` with these arguments."""
    document = command("train", *ALWAYS, "--out", str(folder), *arguments)
    losses = [entry["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines() if "loss" in (entry := json.loads(line))]
    kept = ("parameters", "step", "loss", "validation_loss", "bigram_validation_loss", "tokens_per_s", "mfu", "seconds")
    return {**{name: document[name] for name in kept}, "settings": document["settings"], "chain": document.get("audit", {}).get("hash")}, losses


def settings_of(arguments: list[str]) -> TrainSettings:
    """What `mok train` with these arguments makes of them."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return TrainSettings(**given_settings(parser.parse_args([*ALWAYS, *arguments]), DEVICE))


def tracking(settings: dict[str, Any], losses: list[float], options: argparse.Namespace) -> dict[str, Any]:
    """How far the losses of the first steps are from those of --moe-impl reference."""
    references(options)
    reference = options.references[settings["config"]]
    differences = [abs(ours - theirs) / theirs for ours, theirs in zip(losses, reference)]
    return {"steps": TRACKED, "losses": [round(loss, 5) for loss in losses[:TRACKED]], "reference": [round(loss, 5) for loss in reference],
            "largest_relative_difference": float(f"{max(differences):.2e}")}


def default(options: argparse.Namespace) -> dict[str, Any]:
    """The default model: speed, the specification's losses, and two audited runs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        audited = [train(folder / run, "--audit", str(folder / f"{run}.jsonl")) for run in ("a", "b")]
        plain, losses = train(folder / "plain")
        records = [(folder / f"{run}.jsonl").read_bytes() for run in ("a", "b")]
    tokens = plain["settings"]["batch_size"] * config_by_name(plain["settings"]["config"]).seq_len
    equal = audited[0][0]["chain"] == audited[1][0]["chain"] and records[0] == records[1]
    return {"plain": plain, "audit": {
        "chains": [run["chain"] for run, _ in audited], "identical": equal, "losses_equal_the_plain_run": losses == audited[0][1],
        "tokens_per_s": audited[1][0]["tokens_per_s"],
        "ms_a_step": round(1e3 * tokens * (1 / audited[1][0]["tokens_per_s"] - 1 / plain["tokens_per_s"]), 2)},
        "tracking": tracking(plain["settings"], losses, options)}


def billion(options: argparse.Namespace) -> dict[str, Any]:
    """The 1-billion-parameter model: speed, the specification's losses, and two audited runs, at once and in processes of their own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain, losses = train(folder / "plain", *BILLION)
        found = {"plain": plain, "tracking": tracking(plain["settings"], losses, options)}
        free_memory()
        processes = [subprocess.Popen([sys.executable, "-m", "mok", "train", *ALWAYS, "--out", str(folder / run), *BILLION,
                                       "--audit", str(folder / f"{run}.jsonl"), "--json"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                      env={**os.environ, "PYTHONPATH": str(ROOT)}) for run in ("a", "b")]
        ends = [process.communicate(timeout=150)[0] for process in processes]
        if any(process.returncode for process in processes):
            raise RuntimeError("; ".join(end[-1000:] for end in ends))
        chains = [json.loads(end.splitlines()[-1])["audit"]["hash"] for end in ends]
        records = [(folder / f"{run}.jsonl").read_bytes() for run in ("a", "b")]
    return {**found, "audit": {"chains": chains, "identical": chains[0] == chains[1] and records[0] == records[1]}}


class Switch:
    """One model whose experts can be computed by either implementation: the same parameters, so that both can be timed in turn."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.layers = {"mok": list(model.moe_layers), "grouped_mm": []}
        for layer in model.moe_layers:
            other = GroupedMoE(layer.config, None, "meta")
            other.router, other.w_gate_up, other.w_down = layer.router, layer.w_gate_up, layer.w_down
            self.layers["grouped_mm"].append(other)

    def use(self, impl: str) -> None:
        for i, (block, layer) in enumerate(zip(self.model.blocks, self.layers[impl], strict=True)):
            block.moe = self.model.moe_layers[i] = layer


class LayerClock:
    """GPU time of the layer's own passes (plan, forward, backward) inside a step, by events around each; routers and casts of weights are not in it."""

    def __init__(self) -> None:
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            result = function(*arguments, **keywords)
            events[1].record()
            self.events.append(events)
            return result

        return call

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        owners = [(HopperEngine, name) for name in ("build_plan", "forward", "backward")] + [(unfused._UnfusedMoE, name) for name in ("forward", "backward")]
        before = [owner.__dict__[name] for owner, name in owners]
        for owner, name in owners:
            timed = self.timed(getattr(owner, name))
            setattr(owner, name, timed if owner is HopperEngine else staticmethod(timed))
        try:
            yield
        finally:
            for (owner, name), original in zip(owners, before):
                setattr(owner, name, original)

    def ms(self) -> float:
        torch.cuda.synchronize()
        total = sum(first.elapsed_time(last) for first, last in self.events)
        self.events = []
        return total


def quick_model(settings: TrainSettings) -> LanguageModel:
    """The model with experts drawn on the GPU: other values than a run's, of the same spread, in a second instead of a minute."""
    model = LanguageModel(config_by_name(settings.config), settings.seed, moe_device="meta")
    torch.manual_seed(settings.seed)
    for layer in model.moe_layers:
        layer.to_empty(device=DEVICE)
        layer.router.reset_buffers()
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model.to(DEVICE)


def agreement(trainer: Trainer, switch: Switch) -> dict[str, float]:
    """Loss and gradient norm of both implementations on the same weights and text: relative differences. RuntimeError where they are not small."""
    found = {}
    windows = training_windows(trainer.corpus, 0, trainer.settings.batch_size, trainer.model.config.seq_len, trainer.settings.seed).to(DEVICE)
    for impl in switch.layers:
        switch.use(impl)
        trainer.optimizer.zero_grad(set_to_none=True)
        loss = trainer._sequence_losses(windows).sum() / windows[:, 1:].numel()
        loss.backward()
        norm = clip_grad_norm_(trainer._dense, trainer._experts, 1e30)
        found[impl] = (loss.item(), norm.item())
    trainer.optimizer.zero_grad(set_to_none=True)
    loss, norm = (abs(a / b - 1) for a, b in zip(*found.values()))
    if not (loss < 1e-3 and norm < 2e-2):
        raise RuntimeError(f"the implementations differ: loss and gradient norm {found}")
    return {"loss": float(f"{loss:.2e}"), "gradient_norm": float(f"{norm:.2e}")}


def end_to_end(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of whole steps with each implementation in turn, the layer's share of them, and the bound that follows from it."""
    settings, impls = END_TO_END, ("grouped_mm", "mok")
    trainer = Trainer(settings, load_corpus(), DEVICE, model=quick_model(settings))
    switch, clock = Switch(trainer.model), LayerClock()
    tokens = settings.batch_size * trainer.model.config.seq_len
    result: dict[str, Any] = {"config": settings.config, "tokens_a_step": tokens, "sequence": trainer.model.config.seq_len, "precision": settings.precision,
                              "differences": agreement(trainer, switch), "flops_per_token": flops_per_token(trainer.model.config)}
    for mode in ("as mok train runs it", "without deterministic libraries"):
        with deterministic_libraries(DEVICE) if mode == "as mok train runs it" else contextlib.nullcontext():
            result[mode] = alternate(trainer, switch, clock, impls, tokens, options)
    if options.profile:
        with deterministic_libraries(DEVICE):
            result["kernels_ms"] = {impl: kernels(trainer, switch, impl) for impl in impls}
    result["peak_memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    return result


def alternate(trainer: Trainer, switch: Switch, clock: LayerClock, impls: tuple[str, ...], tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    """Steps of the implementations in turn, so that a change of the card's clock meets both alike; their medians and what follows."""
    speeds: dict[str, list[float]] = {impl: [] for impl in impls}
    layer_ms: dict[str, list[float]] = {impl: [] for impl in impls}
    balances = []
    roof = measured_roof(DEVICE)
    for turn in range(options.turns + 1):
        for impl in impls:
            switch.use(impl)
            for step in range(2 + (turn == 0)):
                with clock.running():
                    metrics = trainer.train_step()
                spent = clock.ms()
                if turn and step:                                # the first step after a switch also moves memory between the allocator's pools
                    speeds[impl].append(metrics.tokens_per_s)
                    layer_ms[impl].append(spent)
                    balances.append(metrics.balance)
    runtime.raise_pending_errors()
    speed = {impl: statistics.median(values) for impl, values in speeds.items()}
    layer = {impl: statistics.median(values) for impl, values in layer_ms.items()}
    step_ms = {impl: 1e3 * tokens / speed[impl] for impl in impls}
    share = layer["grouped_mm"] / step_ms["grouped_mm"]
    layer_speedup = layer["grouped_mm"] / layer["mok"]
    bound = 1 / (1 - share + share / layer_speedup)
    speedup = speed["mok"] / speed["grouped_mm"]
    result = {"tokens_per_s": {impl: round(value) for impl, value in speed.items()}, "all_tokens_per_s": {i: [round(v) for v in s] for i, s in speeds.items()},
              "layer_ms_a_step": {impl: round(value, 2) for impl, value in layer.items()},
              "step_ms": {impl: round(value, 2) for impl, value in step_ms.items()},
              "share_of_layer_in_grouped_mm": round(share, 4), "layer_speedup": round(layer_speedup, 4), "bound": round(bound, 4),
              "speedup": round(speedup, 4), "speedup_wanted": WANTED_SPEEDUP, "of_bound": round(speedup / bound, 4), "of_bound_wanted": WANTED_OF_BOUND,
              "mfu_of_measured_roof": round(speed["mok"] * flops_per_token(trainer.model.config) * 1e-12 / roof, 4), "roof_tflops": round(roof, 1),
              "balance": round(statistics.median(balances), 3)}
    print(json.dumps(result), flush=True)
    return result


def kernels(trainer: Trainer, switch: Switch, impl: str, lines: int = 28) -> list[dict[str, Any]]:
    """The kernels of one step with most GPU time, and how much all of them took."""
    from torch.profiler import ProfilerActivity, profile

    switch.use(impl)
    trainer.train_step()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        trainer.train_step()
        torch.cuda.synchronize()
    rows = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    everything = {"kernel": "all", "ms": round(sum(row.self_device_time_total for row in rows) / 1e3, 2), "count": sum(row.count for row in rows)}
    return [everything, *({"kernel": row.key[:110], "ms": round(row.self_device_time_total / 1e3, 2), "count": row.count} for row in rows[:lines])]


def bench(options: argparse.Namespace) -> dict[str, Any]:
    """`mok bench` of every named layer, of the first at T = 512, and where the time of its passes goes."""
    shapes = [word for name in options.shapes or bench_cuda.SHAPES for word in ("--shape", name)]
    passes = [word for which in options.passes for word in ("--pass", which)]
    record = command("bench", "--device", "cuda", *shapes, "--thiek", "512,2048,768,128,8", *passes, "--block-ms", str(options.block_ms))
    record["commit"] = options.commit or record["commit"]
    if options.breakdown:
        broken = command("bench", "--device", "cuda", "--shape", "qwen3-30b-a3b", "--pass", options.breakdown, "--block-ms", str(options.block_ms),
                         "--breakdown")
        record["breakdown"] = {name: broken[name] for name in ("command", "roof_tflops", "results")}
    return record


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


SECTIONS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "cold": cold, "host": host, "default": default, "billion": billion, "end_to_end": end_to_end, "bench": bench}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="*", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument("--turns", type=int, default=4, help="times that each implementation has its turn end to end")
    parser.add_argument("--profile", action="store_true", help="record the kernels of a step end to end")
    parser.add_argument("--shapes", nargs="*", help="layers of the bench section (default: all)")
    parser.add_argument("--block-ms", type=float, default=20.0, help="length of a timed block of the bench section")
    parser.add_argument("--passes", nargs="*", default=["forward", "backward", "forward+backward"], help="passes of the bench section")
    parser.add_argument("--breakdown", choices=["forward", "backward"], help="also time the first layer's kernel of this pass with parts left out")
    parser.add_argument("--cache", help="an empty folder for the cold section's Triton cache (default: one that is removed)")
    parser.add_argument("--commit", default="", help="commit to record where this is no checkout")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--bench-out", type=Path, help="the bench section's record, as a file of its own")
    options = parser.parse_args()
    options.references = {}
    set_spin_limit(5.0)                                          # a fault of a kernel must not cost minutes
    names = sys.argv[1:]
    for option in ("--out", "--bench-out", "--cache"):                                   # paths of this machine are no part of the command
        if option in names:
            del names[(at := names.index(option)):at + 2]
    document: dict[str, Any] = {
        "date": datetime.date.today().isoformat(), "commit": options.commit or bench_cuda.source_commit(), "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__, "triton": bench_cuda._version("triton"), "command": " ".join(["PYTHONPATH=. python3 runs/train_cuda.py", *names])}
    failed = False
    for name in options.sections:
        start = time.perf_counter()
        try:
            document[name] = SECTIONS[name](options)
        except Exception as error:
            traceback.print_exc()
            document[name], failed = {"failed": f"{type(error).__name__}: {str(error)[:500]}"}, True
        free_memory()
        print(f"=== {name}: {time.perf_counter() - start:.1f} s", flush=True)
        if name == "bench" and options.bench_out and "failed" not in document["bench"]:
            options.bench_out.write_text(json.dumps(document.pop("bench")) + "\n")
        if options.out:
            options.out.write_text(json.dumps(document) + "\n")
    print(json.dumps(document))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
