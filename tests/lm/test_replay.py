"""Records of training runs: a replay confirms them or names the step and the entry, and a resumed run continues its own record only."""
from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mok import fingerprint
from mok.audit import Record, read_record
from mok.audit_diff import compare
from mok.lm import audit as lm_audit
from mok.lm.audit import RunAudit, replay
from mok.lm.checkpoint import STATE_FILE, sha256
from mok.lm.data import Corpus, load_corpus
from mok.lm.run_folder import RunFolder
from mok.lm.trainer import Trainer, TrainSettings, fit
from tests.forged import forge as forge_file

SETTINGS = TrainSettings(config="tiny", steps=9, precision="fp32", batch_size=4, warmup_steps=2, eval_every=4, save_every=4, eval_tokens=256)


class Silent:
    def on_step(self, metrics):
        pass

    def on_validation(self, step, loss):
        pass


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.py"
    file.write_bytes((Path(__file__).parents[2] / "mok" / "lm" / "data.py").read_bytes())
    return file


@pytest.fixture(scope="module")
def corpus(text) -> Corpus:
    return load_corpus(text)


class Changed(Trainer):
    """A trainer whose learning rate is another at step 7."""

    def learning_rate(self, step: int) -> float:
        return super().learning_rate(step) * (1.0001 if step == 7 - 1 else 1)


def run(path: Path, text: Path, corpus: Corpus, settings: TrainSettings = SETTINGS, trainer_type=Trainer, stop_at: int | None = None) -> Record:
    """A whole run in folder path/run with its record in path/record, or one that is stopped at a step."""
    path.mkdir(exist_ok=True)
    trainer = trainer_type(settings, corpus)
    folder = RunFolder.create(path / "run", {"settings": asdict(settings), "data": str(text)})
    audit = RunAudit.begin(trainer, path / "record", str(text))
    audit.close(fit(trainer, folder, Silent(), lambda: trainer.step == stop_at))
    return read_record(path / "record")


def resume(path: Path, text: Path, corpus: Corpus, settings: TrainSettings = SETTINGS, record: Path | None = None) -> Record:
    trainer = Trainer(settings, corpus)
    folder = RunFolder.open(path / "run")
    trainer.load(folder)
    audit = RunAudit.resume(trainer, path / "record" if record is None else record, str(text))
    audit.close(fit(trainer, folder, Silent()))
    return read_record(path / "record")


@pytest.fixture(scope="module")
def truth(tmp_path_factory, text, corpus) -> Record:
    return run(tmp_path_factory.mktemp("truth"), text, corpus)


def forge(record: Record, change) -> Record:
    path = Path(record.path)
    return read_record(forge_file(path, change, path.with_name("forged")))


def found(verdict) -> tuple[int, str]:
    assert verdict.difference is not None and not verdict.not_comparable
    assert verdict.steps == max(0, verdict.difference.step - 1)
    return verdict.difference.step, verdict.difference.name


def test_a_record_holds_every_step_and_its_replay_confirms_it(truth):
    assert len(truth.steps) == 10 and truth.end["finished"]
    names = [next(iter(name.split("/"))) for name in truth.steps[4]]
    assert list(dict.fromkeys(names)) == ["input", "part0", "loss", "gradient", "grad_norm", "learning_rate", "parameter", "optimizer"]
    seen: list[int] = []
    verdict = replay(truth, on_step=seen.append)
    assert verdict == lm_audit.Verdict(9, 9) and seen == list(range(1, 10))
    assert replay(truth, steps=3) == lm_audit.Verdict(3, 9) and replay(truth, steps=0) == lm_audit.Verdict(0, 9)


@pytest.mark.parametrize("changes", [{"precision": "bf16", "accumulate": 2}, {"moe_impl": "reference"}])
def test_other_settings_replay_too(tmp_path, text, corpus, changes):
    record = run(tmp_path, text, corpus, replace(SETTINGS, steps=3, **changes))
    assert replay(record) == lm_audit.Verdict(3, 3)


def test_a_changed_learning_rate_at_step_7_is_located(tmp_path, text, corpus, truth):
    changed = run(tmp_path, text, corpus, trainer_type=Changed)
    difference = compare(truth, changed).difference
    assert (difference.step, difference.name) == (7, "learning_rate") and difference.second == difference.first * 1.0001
    assert found(replay(changed)) == (7, "learning_rate")
    hidden = forge(changed, lambda lines: lines[8]["entries"].update(learning_rate=difference.first))       # line 8 = step 7
    step, name = found(replay(hidden))
    assert step == 7 and name == "parameter/embedding"                      # the first that the rate entered


def test_a_changed_seed_is_located(tmp_path, text, corpus, truth):
    other = run(tmp_path, text, corpus, replace(SETTINGS, seed=1))
    comparison = compare(truth, other)
    assert (comparison.difference.step, comparison.difference.name) == (0, "parameter/embedding") and comparison.configuration == ["seed: 0 against 1"]
    claimed = forge(other, lambda lines: lines[0]["configuration"]["settings"].update(seed=0))
    assert found(replay(claimed)) == (0, "parameter/embedding")


@pytest.mark.parametrize("name", ["input", "part0/blocks.1.moe/topk_ids", "part0/blocks.0.moe/dx", "gradient/blocks.1.attention.qkv.weight",
                                  "optimizer/exp_avg_sq/norm.weight", "loss"])
def test_a_forged_entry_is_located_by_replay(truth, name):
    def change(lines):
        value = lines[5]["entries"][name]                                   # line 5 = step 4
        lines[5]["entries"][name] = value[:-1] + ("0" if value[-1] != "0" else "1") if isinstance(value, str) else value * (1 + 2**-50)

    assert found(replay(forge(truth, change), steps=5)) == (4, name)


def test_a_forged_state_at_the_end_is_located_by_replay(truth):
    name = "optimizer/exp_avg/blocks.0.moe.router.weight"
    assert found(replay(forge(truth, lambda lines: lines[-1]["state"].update({name: "float32[1]:0"})))) == (9, name)


def test_a_forged_length_is_located_by_replay(truth):
    def drop(lines):
        del lines[5]["entries"]["loss"]

    assert found(replay(forge(truth, drop), steps=5)) == (4, "loss")


# --- resuming --------------------------------------------------------------------------------------------------------------------------------

def test_a_resumed_run_continues_its_record_and_replays(tmp_path, text, corpus, truth):
    stopped = run(tmp_path, text, corpus, stop_at=6)
    assert len(stopped.steps) == 7 and not stopped.end["finished"] and replay(stopped) == lm_audit.Verdict(6, 6)
    record = resume(tmp_path, text, corpus)
    assert record.steps == truth.steps and [line["step"] for line in record.resumes] == [6] and record.end["finished"]
    assert replay(record) == lm_audit.Verdict(9, 9)
    assert compare(truth, record).difference is None


def test_a_killed_run_resumes_from_its_checkpoint_and_writes_later_steps_again(tmp_path, text, corpus, truth):
    run(tmp_path, text, corpus, stop_at=6)
    for folder in (tmp_path / "run" / "checkpoints").glob("step-00000006"):
        folder.rename(tmp_path / "gone")                                    # the kill came before it was written
    path = tmp_path / "record"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:40])                 # and in the middle of a line
    record = resume(tmp_path, text, corpus)
    assert record.steps == truth.steps and [line["step"] for line in record.resumes] == [4]


def test_more_steps_after_the_end_replay_with_their_own_schedule(tmp_path, text, corpus, truth):
    run(tmp_path, text, corpus, replace(SETTINGS, steps=6))
    record = resume(tmp_path, text, corpus)                                 # of 9 steps
    assert record.steps[:7] != truth.steps[:7]                              # the cosine of 6 steps is another
    assert replay(record) == lm_audit.Verdict(9, 9)


def test_a_flipped_bit_in_a_checkpoint_is_caught_and_located(tmp_path, text, corpus):
    """Even where the checkpoint's own SHA-256 was computed after the flip (a fault in memory, or somebody's edit)."""
    run(tmp_path, text, corpus, stop_at=6)
    folder = RunFolder.open(tmp_path / "run").latest_checkpoint()
    file = next(folder.glob("*.safetensors"))
    name = "optimizer.exp_avg.blocks.1.moe.experts.2.w_down"
    tensors = load_file(file)
    tensors[name].view(torch.int32).view(-1)[77] ^= 1
    save_file(tensors, file)
    with pytest.raises(ValueError, match="is corrupt"):                     # the checkpoint's own check
        resume(tmp_path, text, corpus)
    state = json.loads((folder / STATE_FILE).read_text())
    state["files"][file.name] = {"bytes": file.stat().st_size, "sha256": sha256(file)}
    (folder / STATE_FILE).write_text(json.dumps(state))
    before = (tmp_path / "record").read_bytes()
    with pytest.raises(ValueError, match=r"checkpoint of step 6 .*: optimizer/exp_avg/blocks\.1\.moe\.w_down is float32\[.*recorded was"):
        resume(tmp_path, text, corpus)
    assert (tmp_path / "record").read_bytes() == before


def test_only_the_runs_own_intact_record_is_continued(tmp_path, text, corpus, truth):
    run(tmp_path, text, corpus, stop_at=6)
    other = run(tmp_path / "other", text, corpus, replace(SETTINGS, seed=3, steps=2))
    short = run(tmp_path / "short", text, corpus, stop_at=2)
    edited = tmp_path / "edited"
    edited.write_bytes((tmp_path / "record").read_bytes().replace(b'"step":3', b'"step":4'))
    for record, message in ((Path(other.path), "seed=3, this one has seed=0"), (Path(short.path), "holds 2 steps, the checkpoint is of step 6"),
                            (edited, r"not intact: .*step 4"), (tmp_path / "none", "cannot be read"), (text, "must be a record")):
        with pytest.raises(ValueError, match=message):
            resume(tmp_path, text, corpus, record=record)
    bare = Trainer(SETTINGS, replace(corpus, train=corpus.train[1:]))
    with pytest.raises(ValueError, match="corpus="):
        RunAudit.resume(bare, truth.path, None)


def test_a_replay_goes_as_far_as_the_number_of_ranks_does(tmp_path, text, corpus, truth):
    run(tmp_path, text, corpus, replace(SETTINGS, steps=3))
    record = resume(tmp_path, text, corpus, replace(SETTINGS, steps=4))
    elsewhere = forge(record, lambda lines: next(line for line in lines if line["kind"] == "resume")["configuration"].update(ranks=2))
    assert [elsewhere.ranks_at(step) for step in range(5)] == [1, 1, 1, 1, 2]
    with pytest.raises(NotImplementedError, match="went on with 2 ranks instead of 1 after step 3"):
        replay(elsewhere)
    assert replay(elsewhere, steps=3) == lm_audit.Verdict(3, 4)
    with pytest.raises(ValueError, match="ranks=1 must be the 2 of the recorded run"):
        replay(forge(truth, lambda lines: lines[0]["configuration"].update(ranks=2)))


# --- not comparable --------------------------------------------------------------------------------------------------------------------------

def test_another_fingerprint_forbids_a_verdict_but_equal_bits_still_confirm(monkeypatch, truth):
    real = fingerprint.fingerprint
    monkeypatch.setattr(lm_audit, "fingerprint", lambda device: {**real(device), "torch": "1.0", "gpu": "none such"})
    verdict = replay(truth)
    assert verdict.not_comparable == (f"torch: {torch.__version__} there, 1.0 here", "gpu: nothing there, none such here")
    assert not verdict.was_run and verdict.difference is None
    anyway = replay(truth, anyway=True, steps=2)
    assert anyway.was_run and anyway.steps == 2 and anyway.difference is None and anyway.not_comparable == verdict.not_comparable


def test_another_processor_in_mid_run_forbids_a_verdict(tmp_path, monkeypatch, text, corpus):
    run(tmp_path, text, corpus, stop_at=2)
    real = fingerprint.fingerprint
    monkeypatch.setattr(lm_audit, "fingerprint", lambda device: {**real(device), "cpu": "another"})
    record = resume(tmp_path, text, corpus, replace(SETTINGS))
    monkeypatch.undo()
    assert len(record.resumes) == 1
    assert replay(record).not_comparable == (f"cpu: another there, {fingerprint.cpu_name()} here",)


def test_another_text_forbids_a_verdict_and_a_moved_one_is_found_again(tmp_path, text, truth):
    moved, other = tmp_path / "moved.py", tmp_path / "other.py"
    moved.write_bytes(text.read_bytes())
    other.write_bytes(text.read_bytes() + b"#")
    assert replay(truth, data=str(moved), steps=1) == lm_audit.Verdict(1, 9)
    verdict = replay(truth, data=str(other))
    assert not verdict.was_run and len(verdict.not_comparable) == 1 and verdict.not_comparable[0].startswith("text: SHA-256")
    lost = forge(truth, lambda lines: lines[0]["configuration"].update(data=str(tmp_path / "lost")))
    with pytest.raises(ValueError, match=r"data=.*lost.* does not exist"):
        replay(lost)


def test_a_record_of_a_gpu_is_not_comparable_without_one(monkeypatch, truth):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    of_gpu = forge(truth, lambda lines: lines[0]["configuration"].update(device="cuda"))
    verdict = replay(of_gpu)
    assert not verdict.was_run and verdict.not_comparable == ("device: cuda there, no GPU here",)


def test_unfit_records_and_arguments_are_refused(truth):
    with pytest.raises(ValueError, match="steps=-1"):
        replay(truth, steps=-1)
    with pytest.raises(ValueError, match="seed=-1"):
        replay(forge(truth, lambda lines: lines[0]["configuration"]["settings"].update(seed=-1)))
    with pytest.raises(ValueError, match=r"settings must hold .*unknown"):
        replay(forge(truth, lambda lines: lines[0]["configuration"]["settings"].update(novelty=1)))


def test_a_replay_uses_the_recorded_threads_and_restores_its_callers(truth):
    """The dense layers' library GEMMs may round differently on another number of threads; mok's own passes do not (P2)."""
    before, seen = torch.get_num_threads(), []
    other = forge(truth, lambda lines: lines[0]["configuration"].update(threads=before + 1))
    replay(other, steps=1, on_step=lambda step: seen.append(torch.get_num_threads()))
    assert seen == [before + 1] and torch.get_num_threads() == before


def test_a_replay_takes_up_the_threads_of_a_resumed_run(tmp_path, text, corpus):
    before = torch.get_num_threads()
    run(tmp_path, text, corpus, replace(SETTINGS, steps=1))
    torch.set_num_threads(before + 2)
    try:
        record = resume(tmp_path, text, corpus, replace(SETTINGS, steps=2))
    finally:
        torch.set_num_threads(before)
    seen: list[int] = []
    replay(record, on_step=lambda step: seen.append(torch.get_num_threads()))
    assert seen == [before, before + 2] and torch.get_num_threads() == before


def test_the_code_of_this_package_is_part_of_the_fingerprint(tmp_path, monkeypatch):
    package = tmp_path / "mok"
    (package / "sub").mkdir(parents=True)
    (package / "fingerprint.py").write_text("a")
    (package / "sub" / "b.py").write_text("b")
    monkeypatch.setattr(fingerprint, "__file__", str(package / "fingerprint.py"))
    digests = []
    for change in (lambda: None, lambda: (package / "sub" / "b.py").write_text("c"), lambda: (package / "sub" / "b.py").rename(package / "c.py"),
                   lambda: (package / "note.txt").write_text("no code")):
        change()
        digests.append(fingerprint.code_digest.__wrapped__())
    assert len(set(digests)) == 3 and digests[2] == digests[3]
