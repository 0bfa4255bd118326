"""The trainer: bit-equal resumption, the engine against the specification, the schedule, and that it learns."""
from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from mok.fabric.process_group import FabricTimeout
from mok.lm.checkpoint import list_checkpoints, load_checkpoint
from mok.lm.data import Corpus, bigram_loss, load_corpus
from mok.lm.run_folder import RunFolder
from mok.lm.trainer import Trainer, TrainSettings, fit, load_balance, native_precision
from mok.runtime import runtime

SETTINGS = TrainSettings(config="tiny", steps=6, precision="fp32", batch_size=4, warmup_steps=2, eval_every=3, save_every=100, eval_tokens=256)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    """Real code, little of it: this project's own model, trainer and data."""
    folder = tmp_path_factory.mktemp("text")
    for name in ("model", "trainer", "data", "checkpoint"):
        (folder / name).write_bytes((Path(__file__).parents[2] / "mok" / "lm" / f"{name}.py").read_bytes())
    return load_corpus(folder)


class Silent:
    def on_step(self, metrics):
        pass

    def on_validation(self, step, loss):
        pass


def run_of(path: Path, settings: TrainSettings = SETTINGS) -> RunFolder:
    return RunFolder.create(path, {"settings": asdict(settings), "data": None})


def numbers(run: RunFolder) -> list[dict]:
    """The metrics without their times."""
    return [{name: value for name, value in entry.items() if name != "tokens_per_s"} for entry in run.read_metrics()]


def stop_after(trainer: Trainer, step: int):
    return lambda: trainer.step >= step


@pytest.mark.parametrize("changes", [{}, {"precision": "bf16", "accumulate": 2}, {"moe_impl": "reference"}])
def test_a_stopped_and_resumed_run_equals_the_uninterrupted_one_to_the_bit(tmp_path: Path, corpus: Corpus, changes):
    settings = replace(SETTINGS, **changes)
    whole = Trainer(settings, corpus)
    assert fit(whole, run_of(tmp_path / "whole", settings), Silent())
    stopped, run = Trainer(settings, corpus), run_of(tmp_path / "parts", settings)
    assert not fit(stopped, run, Silent(), stop_after(stopped, 4))
    resumed = Trainer(replace(settings, seed=settings.seed), corpus)
    resumed.load(run)
    assert resumed.step == 4
    assert fit(resumed, run, Silent())
    assert numbers(run) == numbers(RunFolder.open(tmp_path / "whole"))
    assert len(numbers(run)) == 6 + 2
    for name, tensor in whole.tensors().items():
        assert torch.equal(tensor, resumed.tensors()[name]), name


def test_resuming_needs_the_optimizer_state(tmp_path: Path, corpus: Corpus):
    """The test above can fail: without the moments the later losses differ."""
    stopped, run = Trainer(SETTINGS, corpus), run_of(tmp_path / "run")
    fit(stopped, run, Silent(), stop_after(stopped, 3))
    resumed = Trainer(SETTINGS, corpus)
    resumed.load(run)
    for state in resumed.optimizer.state.values():
        state["exp_avg"].zero_()
    expected, actual = [[trainer.train_step().loss for _ in range(2)] for trainer in (stopped, resumed)]
    assert expected[0] == actual[0] and expected[1] != actual[1]


@pytest.mark.parametrize("moe_impl", ["reference", "grouped_mm"])
def test_engine_tracks_another_implementation_over_the_first_ten_steps(corpus: Corpus, moe_impl):
    settings = replace(SETTINGS, steps=10)
    engine, other = Trainer(settings, corpus), Trainer(replace(settings, moe_impl=moe_impl), corpus)
    assert type(engine.model.moe_layers[0]) is not type(other.model.moe_layers[0])
    for _ in range(10):
        a, b = engine.train_step(), other.train_step()
        assert a.loss == pytest.approx(b.loss, rel=1e-5)
        assert a.aux_loss == pytest.approx(b.aux_loss, rel=1e-4)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-3)
        assert sum(abs(x - y) for p, q in zip(a.expert_load, b.expert_load) for x, y in zip(p, q)) <= 4      # a near-tie may flip
    assert engine.evaluate() == pytest.approx(other.evaluate(), rel=1e-4)


def test_it_learns_more_than_a_bigram_model_can():
    """Text whose next byte the last byte alone cannot tell: each phrase repeats, their letters overlap."""
    text = b"abcabdabe." * 800
    corpus = Corpus("phrases", torch.tensor(list(text[:7200]), dtype=torch.uint8), torch.tensor(list(text[7200:]), dtype=torch.uint8), 1)
    trainer = Trainer(replace(SETTINGS, steps=60, warmup_steps=5, learning_rate=1e-2), corpus)
    bigram = bigram_loss(corpus, trainer.validation)
    assert trainer.evaluate() > bigram
    for _ in range(60):
        trainer.train_step()
    assert trainer.evaluate() < 0.8 * bigram


def test_accumulation_and_split_change_the_gradient_by_rounding_only(corpus: Corpus):
    one, four = (Trainer(replace(SETTINGS, accumulate=n), corpus) for n in (1, 4))
    a, b = one.train_step(), four.train_step()
    assert a.loss == pytest.approx(b.loss, rel=1e-6)
    # the balance loss is a mean over what each part sees, so the norms agree but for that small term
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=2e-2)
    assert [sum(load) for load in b.expert_load] == [4 * 32 * 2] * 2


def test_same_seed_same_bits_other_seed_others(corpus: Corpus):
    a, b, c = (Trainer(replace(SETTINGS, seed=seed), corpus) for seed in (0, 0, 1))
    first = [a.train_step().loss for _ in range(3)]
    assert first == [b.train_step().loss for _ in range(3)]
    assert all(x != y for x, y in zip(first, [c.train_step().loss for _ in range(3)]))


def test_learning_rate_warms_up_and_follows_half_a_cosine(corpus: Corpus):
    trainer = Trainer(replace(SETTINGS, steps=12, warmup_steps=4, learning_rate=1.0), corpus)
    rates = [trainer.learning_rate(step) for step in range(12)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[8] == pytest.approx(0.1 + 0.9 / 2)                     # half-way between step 4 and step 12
    assert trainer.learning_rate(12) == pytest.approx(0.1)
    assert trainer.train_step().learning_rate == 0.25 == trainer.optimizer.param_groups[0]["lr"]


def test_the_whole_gradient_is_clipped_and_the_norm_before_is_reported(corpus: Corpus):
    free, clipped = Trainer(replace(SETTINGS, grad_clip=1e9), corpus), Trainer(replace(SETTINGS, grad_clip=0.01), corpus)
    norm = free.train_step().grad_norm
    assert clipped.train_step().grad_norm == norm > 0.01

    def norm_now(trainer):
        return math.sqrt(sum(float(p.grad.double().square().sum()) for p in trainer.model.parameters()))

    assert norm_now(free) == pytest.approx(norm) and norm_now(clipped) == pytest.approx(0.01, rel=1e-3)


def test_the_optimizer_is_adamw_and_spares_vectors_and_the_embedding(corpus: Corpus):
    trainer = Trainer(replace(SETTINGS, weight_decay=0.5, grad_clip=1e9, warmup_steps=0, learning_rate=0.01), corpus)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train_step()
    for name, p in trainer.model.named_parameters():
        decay = 0.5 if p.ndim >= 2 and name != "embedding" else 0.0
        expected = before[name] * (1 - 0.01 * decay) - 0.01 * p.grad / (p.grad.abs() + 1e-8)      # first step: m/sqrt(v) = g/|g|
        torch.testing.assert_close(p.detach(), expected, rtol=1e-4, atol=1e-6)


def test_load_balance_worked_examples():
    assert load_balance([[2, 2], [4, 0]]) == 0.75
    assert load_balance([[1, 0, 0, 0]]) == 0.25
    assert load_balance([[0, 0]]) == 0.0


def test_a_loss_that_is_not_finite_stops_before_the_weights_change(corpus: Corpus):
    trainer = Trainer(SETTINGS, corpus)
    with torch.no_grad():
        trainer.model.norm.weight[0] = math.nan
    before = trainer.model.embedding.detach().clone()
    with pytest.raises(FloatingPointError, match=r"the loss is nan at step 1"):
        trainer.train_step()
    assert torch.equal(trainer.model.embedding, before) and trainer.step == 0


@pytest.mark.parametrize("what", ["train_step", "evaluate"])
def test_what_a_launch_reported_is_raised_and_not_the_nan_that_it_left(corpus: Corpus, monkeypatch, what):
    """A launch that has lost a peer fills its output with NaN and says why in a word that the next call reads; a step's last launch has no next call."""
    trainer = Trainer(replace(SETTINGS, eval_tokens=64), corpus)                 # one part's windows: the last launch of a validation too
    reports: list[Exception | None] = []
    monkeypatch.setattr(runtime, "error_words", [lambda: reports.pop() if reports else None])

    def lose_a_peer(module, inputs, output):
        reports.append(FabricTimeout("rank 1 did not come", (1,)))
        return output * float("nan")

    trainer.model.blocks[-1].moe.register_forward_hook(lose_a_peer)
    with pytest.raises(FabricTimeout, match="rank 1 did not come"):
        getattr(trainer, what)()
    assert trainer.step == 0


def test_checkpoints_are_kept_at_steps_and_hold_every_tensor(tmp_path: Path, corpus: Corpus):
    settings = replace(SETTINGS, save_every=2)
    trainer, run = Trainer(settings, corpus), run_of(tmp_path / "run", settings)
    fit(trainer, run, Silent())
    assert [p.name for p in list_checkpoints(run.checkpoints)] == ["step-00000004", "step-00000006"]
    loaded = {name: torch.zeros_like(tensor) for name, tensor in trainer.tensors().items()}
    state = load_checkpoint(run.latest_checkpoint(), loaded)
    assert state["step"] == 6 and state["settings"] == asdict(settings)
    parameters = dict(trainer.model.named_parameters())
    assert len(loaded) >= 3 * len(parameters)
    for name, p in parameters.items():
        layer, _, tensor = name.rpartition(".")
        if tensor in ("w_gate_up", "w_down") and layer.endswith(".moe"):
            assert all(torch.equal(loaded[f"model.{layer}.experts.{e}.{tensor}"], p[e]) for e in range(4)), name
        else:
            assert torch.equal(loaded[f"model.{name}"], p), name
    assert not [p for p in run.path.rglob("*") if "partial" in p.name]


def test_without_checkpoints_only_a_stopped_run_leaves_one(tmp_path: Path, corpus: Corpus):
    settings = replace(SETTINGS, save_every=0)
    whole, run = Trainer(settings, corpus), run_of(tmp_path / "whole", settings)
    assert fit(whole, run, Silent()) and whole.step == 6
    assert list_checkpoints(run.checkpoints) == []
    stopped, run = Trainer(settings, corpus), run_of(tmp_path / "stopped", settings)
    assert not fit(stopped, run, Silent(), stop_after(stopped, 4))
    assert [p.name for p in list_checkpoints(run.checkpoints)] == ["step-00000004"]


def test_a_checkpoint_of_another_text_or_size_is_refused_with_both_quantities(tmp_path: Path, corpus: Corpus):
    trainer, run = Trainer(SETTINGS, corpus), run_of(tmp_path / "run")
    trainer.train_step()
    trainer.save(run)
    other = replace(corpus, train=corpus.train.flip(0))
    with pytest.raises(ValueError, match=rf"data=.*has SHA-256 {other.digest[:16]}.*trained on {corpus.digest[:16]}"):
        Trainer(SETTINGS, other).load(run)
    with pytest.raises(ValueError, match=r"steps=6 must be at least the 9 steps"):
        file = run.latest_checkpoint() / "state.json"
        state = json.loads(file.read_text())
        file.write_text(json.dumps({**state, "step": 9}))
        Trainer(SETTINGS, corpus).load(run)
    file.write_text(json.dumps({name: value for name, value in state.items() if name != "corpus"}))
    with pytest.raises(ValueError, match=r"checkpoint=.*is corrupt.*must hold a step and a corpus"):
        Trainer(SETTINGS, corpus).load(run)


@pytest.mark.parametrize(("changes", "words"), [
    ({"steps": 0}, "steps=0 must be at least 1"), ({"precision": "fp8"}, "precision='fp8' must be one of fp32, bf16"),
    ({"moe_impl": "x"}, "moe_impl='x' must be one of engine, reference, grouped_mm"),
    ({"batch_size": 5, "accumulate": 2}, "batch_size=5 must be a multiple of accumulate=2"),
    ({"save_every": -1}, "save_every=-1 must be at least 0"),
    ({"learning_rate": 0.0}, "learning_rate=0.0 must be a positive number"), ({"seed": -1}, "seed=-1 must be at least 0"),
    ({"config": "big"}, "config='big' must be one of tiny, small, 1b"), ({"learning_rate": math.nan}, "learning_rate=nan must be a positive number"),
    ({"weight_decay": math.nan}, "weight_decay=nan must be a number of at least 0"),
])
def test_settings_check_themselves(changes, words):
    with pytest.raises(ValueError) as error:
        TrainSettings(**changes)
    assert words in str(error.value)


def test_native_precision_is_one_of_the_two():
    assert native_precision(torch.device("cpu")) in ("fp32", "bf16")
