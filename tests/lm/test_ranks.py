"""Training on several ranks: what does not depend on their number, checkpoints across numbers of ranks, and ranks that fail to write or read."""
from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import mok
from mok.lm import checkpoint
from mok.lm.checkpoint import load_checkpoint, read_state, save_checkpoint
from mok.lm.data import load_corpus
from mok.lm.ranks import Ranks
from mok.lm.run_folder import RunFolder
from mok.lm.state import load_model, model_state
from mok.lm.trainer import Trainer, TrainSettings, check_run, fit
from mok.plan import experts_of_rank
from tests.ranks import RankPool

TEXT = Path(__file__).parents[2] / "mok" / "lm" / "data.py"
SETTINGS = TrainSettings(config="tiny", steps=30, precision="fp32", batch_size=5, warmup_steps=2, eval_every=1000, save_every=2, eval_tokens=160)


class Silent:
    def on_step(self, metrics):
        pass

    def on_validation(self, step, loss):
        pass


@pytest.fixture(scope="module")
def pool():
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)                                   # as in the pool's ranks: weight gradients of dense layers may see threads
    pool = RankPool(4)
    yield pool
    pool.close()
    torch.set_num_threads(torch_threads)


def ranks_of(process_group) -> Ranks:
    return Ranks(None if process_group is None else mok.ExpertGroup(process_group, timeout_s=60))


def on_ranks(pool, fn, W, *args):
    """fn(process_group, *args) of W ranks, in this process for one."""
    return [fn(None, *args)] if W == 1 else pool.run(fn, W, *args)


def run_of(path: Path, settings: TrainSettings = SETTINGS) -> RunFolder:
    return RunFolder.create(path, {"settings": asdict(settings), "data": str(TEXT)})


# ---- what does not depend on the number of ranks ----

def _first_steps(process_group, settings):
    trainer = Trainer(settings, load_corpus(TEXT), "cpu", ranks_of(process_group))
    before = trainer.evaluate()
    steps = [trainer.train_step() for _ in range(2)]
    return before, [replace(step, tokens_per_s=0.0) for step in steps]


@pytest.mark.parametrize("changes", [{}, {"precision": "bf16", "batch_size": 3}, {"batch_size": 6, "accumulate": 2}])
def test_batch_first_loss_and_validation_do_not_depend_on_the_number_of_ranks(pool, changes):
    """Unequal shares; at batch_size 3 the fourth rank has no sequence at all."""
    settings = replace(SETTINGS, **changes)
    (before, alone), = on_ranks(pool, _first_steps, 1, settings)
    for W in (2, 3, 4):
        outcomes = on_ranks(pool, _first_steps, W, settings)
        assert all(outcome == outcomes[0] for outcome in outcomes)             # every rank knows the same
        validation, steps = outcomes[0]
        assert validation == before                                            # to the bit
        assert steps[0].loss == alone[0].loss and steps[0].expert_load == alone[0].expert_load
        assert steps[0].aux_loss == pytest.approx(alone[0].aux_loss, rel=1e-6)
        assert steps[0].grad_norm == pytest.approx(alone[0].grad_norm, rel=1e-3 if settings.precision == "bf16" else 1e-6)
        assert steps[1].loss == pytest.approx(alone[1].loss, rel=1e-4)


def test_gradients_are_those_of_one_rank_balance_loss_included(pool):
    settings = replace(SETTINGS, grad_clip=1e9)
    (alone,) = on_ranks(pool, _one_step_with_strong_balance, 1, settings)
    for W in (2, 3):
        outcomes = on_ranks(pool, _one_step_with_strong_balance, W, settings)
        for name, expected in alone.items():
            parts = [gradients[name] for gradients in outcomes]
            if expected.dim() == 3:
                torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-4, atol=1e-7, msg=name)
            else:
                assert all(torch.equal(part, parts[0]) for part in parts), name
                torch.testing.assert_close(parts[0], expected, rtol=1e-4, atol=1e-6, msg=name)
        last = "blocks.1.moe.w_down"                # behind it lie only per-sequence calls: P3 holds here to the bit
        assert torch.equal(torch.cat([gradients[last] for gradients in outcomes]), alone[last])


def _one_step_with_strong_balance(process_group, settings):
    trainer = Trainer(settings, load_corpus(TEXT), "cpu", ranks_of(process_group))
    for layer in trainer.model.moe_layers:
        layer.router.config = layer.config = replace(layer.config, aux_loss_coef=10.0, z_loss_coef=0.1)
    trainer.train_step()
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


def _norm(process_group):
    settings = replace(SETTINGS, grad_clip=0.01)
    trainer = Trainer(settings, load_corpus(TEXT), "cpu", ranks_of(process_group))
    reported = trainer.train_step().grad_norm
    state = {name: p.grad for name, p in trainer.model.named_parameters()}
    return reported, sum(float(g.double().square().sum()) for name, g in state.items() if g.dim() == 3), \
        sum(float(g.double().square().sum()) for name, g in state.items() if g.dim() != 3)


def test_clipping_uses_one_norm_over_all_ranks(pool):
    (alone, _, _), = on_ranks(pool, _norm, 1)
    outcomes = on_ranks(pool, _norm, 3)
    assert all(reported == outcomes[0][0] == pytest.approx(alone, rel=1e-6) for reported, _, _ in outcomes)
    assert (sum(experts for _, experts, _ in outcomes) + outcomes[0][2]) ** 0.5 == pytest.approx(0.01, rel=1e-3)


# ---- checkpoints across numbers of ranks ----

def _train(process_group, path, steps, stop_at=None, resume=False, settings=SETTINGS):
    """Train from the start or from the newest checkpoint: (losses, this rank's tensors)."""
    trainer, run = Trainer(settings, load_corpus(TEXT), "cpu", ranks_of(process_group)), RunFolder(Path(path))
    if resume:
        trainer.load(run)
    losses = []

    class Collect(Silent):
        def on_step(self, metrics):
            losses.append(metrics.loss)

    trainer.settings = replace(settings, steps=max(steps, trainer.step), warmup_steps=10**6)       # a schedule that does not depend on steps
    fit(trainer, run, Collect(), lambda: trainer.step == stop_at)
    return losses, {name: tensor.clone() for name, tensor in trainer.tensors().items()}


def _load(process_group, path):
    """(this rank's tensors by name, the learning position, the first loss after loading)."""
    trainer = Trainer(SETTINGS, load_corpus(TEXT), "cpu", ranks_of(process_group))
    trainer.load(RunFolder(Path(path)))
    tensors = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
    steps = {float(state["step"]) for state in trainer.optimizer.state.values()}
    first, count = experts_of_rank(4, trainer.ranks.size, trainer.ranks.rank)
    trainer.settings = replace(SETTINGS, warmup_steps=10**6)
    return tensors, (trainer.step, steps, list(range(first, first + count))), [trainer.train_step().loss for _ in range(20)]


@pytest.fixture(scope="module")
def written(pool, tmp_path_factory):
    """(folder of a run of two AdamW steps at two ranks, that run's 22 losses without a stop, each rank's tensors at step 2)."""
    folder = tmp_path_factory.mktemp("ranks")
    run_of(folder / "whole")
    run_of(folder / "run")
    whole = pool.run(_train, 2, str(folder / "whole"), 22)
    parts = pool.run(_train, 2, str(folder / "run"), 2)
    assert whole[0][0][:2] == parts[0][0] and whole[1][0] == []               # rank 0 reports
    return folder / "run", whole[0][0], [tensors for _, tensors in parts]


def test_case_E18_a_checkpoint_is_read_at_any_number_of_ranks(pool, written):
    """KempnerForge#202, twinkle#116: one rank's experts saved, wrong ones resumed. Weights and moments are equal by global expert id."""
    folder, losses, tensors_then = written
    saved = {**tensors_then[1], **tensors_then[0]}
    assert len(saved) == len(tensors_then[0]) + 3 * 2 * 2 * 2                 # rank 1 added: 3 tensors each of 2 layers' 2 experts' 2 weights
    for W in (1, 2, 3, 4):
        outcomes = on_ranks(pool, _load, W, str(folder))
        found = set()
        for tensors, (step, optimizer_steps, own), _ in outcomes:
            assert step == 2 and optimizer_steps == {2.0}
            assert {int(name.split(".experts.")[1].split(".")[0]) for name in tensors if ".experts." in name} == set(own)
            for name, tensor in tensors.items():
                assert torch.equal(tensor, saved[name]), (W, name)
            found |= tensors.keys()
        assert found == saved.keys()
        later = outcomes[0][2]
        assert all(outcome[2] == later for outcome in outcomes)
        assert later[0] == losses[2], W                                        # the first loss to the bit, at any number of ranks
        if W == 2:
            assert later == losses[2:]                                         # and all later ones at the same number
        else:
            assert later[19] == pytest.approx(losses[21], rel=1e-3)
    moments = [tensor for name, tensor in saved.items() if name.startswith("optimizer.exp_avg_sq") and ".experts." in name]
    assert all(moment.any() for moment in moments)                             # there was something to lose


def test_each_rank_writes_its_own_experts(written):
    folder, _, tensors_then = written
    newest = RunFolder.open(folder).latest_checkpoint()
    weight_map = json.loads((newest / checkpoint.INDEX_FILE).read_text())["weight_map"]
    files = {rank: {name for name, file in weight_map.items() if file == f"model-{rank + 1:05d}-of-00002.safetensors"} for rank in (0, 1)}
    assert files[0] == tensors_then[0].keys()
    assert files[1] == {name for name in tensors_then[1] if ".experts." in name}
    assert read_state(newest)["ranks"] == 2 and sorted(read_state(newest)["files"]) == sorted({*weight_map.values()})


def test_the_whole_model_is_read_without_ranks(written):
    folder, _, tensors_then = written
    for name, tensor in model_state(load_model(RunFolder.open(folder).latest_checkpoint())).here().items():
        assert torch.equal(tensor, {**tensors_then[1], **tensors_then[0]}[name]), name


def test_a_resumed_run_of_three_ranks_equals_the_uninterrupted_one(pool, tmp_path):
    for name in ("whole", "parts"):
        run_of(tmp_path / name)
    whole = pool.run(_train, 3, str(tmp_path / "whole"), 5)[0]
    first = pool.run(_train, 3, str(tmp_path / "parts"), 5, 3)[0]              # stopped after step 3
    rest = pool.run(_train, 3, str(tmp_path / "parts"), 5, None, True)[0]
    assert len(first[0]) == 3 and first[0] + rest[0] == whole[0]
    assert all(torch.equal(tensor, whole[1][name]) for name, tensor in rest[1].items())


def experts_with_their_number(ranks: Ranks, dtype: torch.dtype) -> tuple[dict, dict]:
    """(this rank's experts, the others' on the meta device) of five: expert e is filled with e."""
    first, count = experts_of_rank(5, ranks.size, ranks.rank)
    every = {f"model.moe.experts.{e}.w": torch.full((6, 16), float(e)).to(dtype) for e in range(5)}
    mine = [f"model.moe.experts.{e}.w" for e in range(first, first + count)]
    return {name: every[name] for name in mine}, {name: tensor.to("meta") for name, tensor in every.items() if name not in mine}


def _save_numbered(process_group, path, dtype):
    ranks = ranks_of(process_group)
    save_checkpoint(Path(path), experts_with_their_number(ranks, dtype)[0], {"step": 0}, ranks)


def _load_numbered(process_group, path, dtype, lost=None, more=None):
    """Values of the experts that were read, or the error; tensors that the model lacks or has beyond those of the checkpoint."""
    ranks = ranks_of(process_group)
    mine, elsewhere = experts_with_their_number(ranks, dtype)
    for tensors in (mine, elsewhere):
        tensors.pop(f"model.moe.experts.{lost}.w", None)
    if more is not None:
        elsewhere[f"model.moe.experts.{more}.w"] = torch.empty(6, 16, dtype=dtype, device="meta")
    target = {name: torch.full_like(tensor.float(), -1.0).to(dtype) for name, tensor in mine.items()}
    try:
        load_checkpoint(Path(path), target, elsewhere, ranks)
    except ValueError as error:
        assert all((tensor.float() == -1).all() for tensor in target.values())
        return str(error)
    return {name: sorted(set(tensor.float().view(-1).tolist())) for name, tensor in target.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_case_E19_every_rank_reads_its_own_experts_and_reports_what_is_left(pool, tmp_path, dtype):
    """transformers#45662, vllm#46441: expert e holds the value e; each rank gets its own, by group rank, in the dtype that was stored."""
    path = str(tmp_path / "numbered")
    pool.run(_save_numbered, 2, path, dtype)
    for W in (1, 2, 4):
        for rank, values in enumerate(on_ranks(pool, _load_numbered, W, path, dtype)):
            first, count = experts_of_rank(5, W, rank)
            assert values == {f"model.moe.experts.{e}.w": [float(e)] for e in range(first, first + count)}, (W, rank)
    for error in pool.run(_load_numbered, 3, path, dtype, 3):
        assert "surplus 1 (model.moe.experts.3.w)" in error
    for error in pool.run(_load_numbered, 3, path, dtype, None, 5):
        assert "missing 1 (model.moe.experts.5.w)" in error and "holds 5 tensors, the model has 6" in error


def _save_and_fail(process_group, path):
    ranks = ranks_of(process_group)
    if ranks.rank == 1:
        def full(*args):
            raise OSError("no space left on this disk")
        original, checkpoint._write_tensors = checkpoint._write_tensors, full
    try:
        save_checkpoint(Path(path), experts_with_their_number(ranks, torch.float32)[0], {"step": 0}, ranks)
    except (OSError, ValueError) as error:
        return type(error).__name__, str(error)
    finally:
        if ranks.rank == 1:
            checkpoint._write_tensors = original


def test_a_checkpoint_that_one_rank_cannot_write_leaves_nothing(pool, tmp_path):
    outcomes = pool.run(_save_and_fail, 3, str(tmp_path / "step-1"))
    assert outcomes[1] == ("OSError", "no space left on this disk")
    for rank in (0, 2):
        assert outcomes[rank][0] == "ValueError" and "rank 1" in outcomes[rank][1] and "no space left" in outcomes[rank][1]
    assert list(tmp_path.iterdir()) == []


def test_a_flipped_bit_in_any_ranks_file_stops_all_ranks(pool, tmp_path):
    pool.run(_save_numbered, 2, str(tmp_path / "step-1"), torch.float32)
    for number in (1, 2):
        file = tmp_path / "step-1" / f"model-{number:05d}-of-00002.safetensors"
        data = bytearray(file.read_bytes())
        data[-5] ^= 4
        file.write_bytes(data)
        for error in pool.run(_load_numbered, 3, str(tmp_path / "step-1"), torch.float32):
            assert "is corrupt" in error and file.name in error and "SHA-256" in error
        data[-5] ^= 4
        file.write_bytes(data)


def _trainer_error(process_group, settings):
    try:
        Trainer(settings, load_corpus(TEXT), "cpu", ranks_of(process_group))
    except ValueError as error:
        return str(error)


def test_what_cannot_be_split_is_refused(pool):
    assert all("ranks=2 must be 1 with moe_impl='reference'" in error for error in pool.run(_trainer_error, 2, replace(SETTINGS, moe_impl="reference")))
    corpus = load_corpus(TEXT)
    with pytest.raises(ValueError, match="ranks=5 must be at most the 4 experts of config='tiny'"):
        check_run(SETTINGS, corpus, 5)
