"""The picture of a run: loss over steps beside the bigram model's, and how evenly the experts were used."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

_BLUE, _ORANGE, _GREY = "#1f5fa8", "#d9731a", "#666666"


def plot_training(metrics: Sequence[dict[str, Any]], file: Path, title: str, bigram_loss: float | None = None) -> None:
    """Draw `training_figure` to the PNG `file`, which appears complete or not at all."""
    figure = training_figure(metrics, title, bigram_loss)
    partial = file.with_name(f".{file.name}.partial")
    try:
        figure.savefig(partial, dpi=130, format="png")
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def training_figure(metrics: Sequence[dict[str, Any]], title: str, bigram_loss: float | None = None) -> Any:
    """A matplotlib Figure of `metrics`, the lines of metrics.jsonl.

    Left: training loss of each step, its mean over 11 steps, validation loss, and the bigram model's validation loss (nats a byte).
    Right: share of the routes that each expert of each layer received over the last tenth of the run, against the even share.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # not pyplot: no display, no global state
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    steps = [entry for entry in metrics if "loss" in entry]
    _draw_losses(left, steps, [entry for entry in metrics if "validation_loss" in entry], bigram_loss)
    _draw_load(right, figure, steps[-max(1, len(steps) // 10):])
    return figure


def _draw_losses(axes: Any, steps: Sequence[dict[str, Any]], validations: Sequence[dict[str, Any]], bigram_loss: float | None) -> None:
    losses = [entry["loss"] for entry in steps]
    axes.plot([entry["step"] for entry in steps], losses, color=_BLUE, alpha=0.3, linewidth=0.8, label="training, each step")
    axes.plot([entry["step"] for entry in steps], _smoothed(losses, 5), color=_BLUE, linewidth=1.6, label="training, mean of 11 steps")
    axes.plot([entry["step"] for entry in validations], [entry["validation_loss"] for entry in validations], color=_ORANGE, marker="o", markersize=4,
              linewidth=1.2, label="validation")
    if bigram_loss is not None:
        axes.axhline(bigram_loss, color=_GREY, linestyle="--", linewidth=1, label=f"bigram model, validation ({bigram_loss:.2f})")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title("Loss", fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False)


def _draw_load(axes: Any, figure: Any, steps: Sequence[dict[str, Any]]) -> None:
    num_layers = len(steps[0]["expert_load"])
    totals = [[sum(entry["expert_load"][layer][e] for entry in steps) for e in range(len(steps[0]["expert_load"][layer]))] for layer in range(num_layers)]
    num_experts = len(totals[0])
    relative = [[count * num_experts / max(1, sum(layer)) for count in layer] for layer in totals]
    image = axes.imshow(relative, cmap="RdBu_r", vmin=0, vmax=2, aspect="auto")
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    axes.set_yticks(range(num_layers))
    if num_experts <= 16:
        axes.set_xticks(range(num_experts))
        for layer, row in enumerate(relative):
            for expert, value in enumerate(row):
                axes.text(expert, layer, f"{value:.2f}", ha="center", va="center", fontsize=7, color="white" if abs(value - 1) > 0.6 else "black")
    axes.set_title(f"Expert load, mean of the last {len(steps)} step{'s' if len(steps) > 1 else ''}", fontsize=10)
    figure.colorbar(image, ax=axes, label="load / even load")


def _smoothed(values: Sequence[float], reach: int) -> list[float]:
    """Mean of each value and up to `reach` on each side of it. _smoothed([1, 3, 8, 9], 1) == [2, 4, 20 / 3, 8.5]"""
    return [fmean(values[max(0, i - reach):i + reach + 1]) for i in range(len(values))]
