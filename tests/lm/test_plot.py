"""The picture of a run: it shows the numbers of the metrics, with labels, and appears whole or not at all."""
from __future__ import annotations

from pathlib import Path

import pytest

from mok.lm.plot import _smoothed, plot_training, training_figure

# 20 steps of two layers with three experts; over the last two steps layer 1 sends everything to expert 2
METRICS = [{"step": step, "loss": 5.0 - 0.1 * step, "expert_load": [[4, 4, 4], [0, 0, 12] if step > 18 else [12, 0, 0]]} for step in range(1, 21)]
METRICS.insert(10, {"step": 10, "validation_loss": 4.5})
METRICS.append({"step": 20, "validation_loss": 3.25})


def test_lines_are_the_metrics_and_have_labels():
    left, right = training_figure(METRICS, "a run", bigram_loss=2.5).axes[:2]
    lines = {line.get_label().split(",")[0] + str(i): line for i, line in enumerate(left.get_lines())}
    training, smooth, validation, bigram = lines.values()
    assert list(training.get_xdata()) == list(range(1, 21)) and list(training.get_ydata()) == pytest.approx([5.0 - 0.1 * s for s in range(1, 21)])
    assert smooth.get_ydata()[9] == pytest.approx(4.0)
    assert (list(validation.get_xdata()), list(validation.get_ydata())) == ([10, 20], [4.5, 3.25])
    assert list(bigram.get_ydata()) == [2.5, 2.5] and "2.50" in bigram.get_label()
    assert (left.get_xlabel(), left.get_ylabel()) == ("step", "loss (nats per byte)")
    assert (right.get_xlabel(), right.get_ylabel()) == ("expert", "layer")
    assert len(left.get_legend().get_texts()) == 4


def test_load_is_relative_to_an_even_one_over_the_last_tenth():
    image = training_figure(METRICS, "a run").axes[1].get_images()[0].get_array()
    assert image.tolist() == [[1.0, 1.0, 1.0], [0.0, 0.0, 3.0]]


def test_smoothing_worked_example():
    assert _smoothed([1, 3, 8, 9], 1) == pytest.approx([2, 4, 20 / 3, 8.5])


def test_the_file_is_a_png_and_a_failure_keeps_the_old_one(tmp_path: Path, monkeypatch):
    file = tmp_path / "training.png"
    plot_training(METRICS[:1], file, "one step")
    before = file.read_bytes()
    assert before.startswith(b"\x89PNG") and before.rstrip().endswith(b"IEND\xaeB`\x82")

    def fail(self, *args):
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        plot_training(METRICS, file, "more steps")
    assert file.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["training.png"]
