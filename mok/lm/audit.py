"""A training run's record: begun with the run, continued when it is resumed, and replayed from nothing but what it says."""
from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ..audit import BrokenChain, Entries, Record, RecordWriter, read_record
from ..audit_diff import Difference, first_difference
from ..fingerprint import differences, fingerprint
from ..recorder import StepRecorder
from .data import load_corpus
from .trainer import Trainer, TrainSettings, deterministic_libraries

_FREE_ON_RESUME = ("steps",)
_THERE_AND_HERE = "{name}: {first} there, {second} here"


class RunAudit:
    """The record that a trainer writes while it trains. Made by `begin` or `resume`; `close` ends it."""

    def __init__(self, trainer: Trainer, writer: RecordWriter) -> None:
        self.trainer, self._writer = trainer, writer
        self.recorder = trainer.recorder = step_recorder(trainer, writer.step)

    @staticmethod
    def begin(trainer: Trainer, path: str | os.PathLike[str], data: str | None) -> RunAudit:
        """A new record of a run that has done no step; data: the --data argument. ValueError naming `audit` for a file that exists or cannot be written."""
        audit = RunAudit(trainer, RecordWriter.create(path, fingerprint(trainer.device), configuration(trainer, data)))
        audit.recorder.start(trainer.step)
        return audit

    @staticmethod
    def resume(trainer: Trainer, path: str | os.PathLike[str], data: str | None) -> RunAudit:
        """Continue the record of the run whose checkpoint `trainer` has loaded.

        ValueError naming `audit` and both quantities where it is not that run's record, was changed, or says that the state at this step was another.
        """
        try:
            record = read_record(path, may_be_open=True)
        except BrokenChain as error:
            raise ValueError(f"audit={str(path)!r} is not intact: {error}") from None
        ours, theirs = configuration(trainer, data), record.header["configuration"]
        for name in ("corpus", "device", "ranks"):
            if ours[name] != theirs.get(name):
                raise ValueError(f"audit={str(path)!r} records a run with {name}={theirs.get(name)}, this one has {name}={ours[name]}")
        for name, value in ours["settings"].items():
            if name not in _FREE_ON_RESUME and theirs["settings"].get(name) != value:
                raise ValueError(f"audit={str(path)!r} records a run with {name}={theirs['settings'].get(name)!r}, this one has {name}={value!r}")
        if trainer.step >= len(record.steps):
            raise ValueError(f"audit={str(path)!r} holds {len(record.steps) - 1} steps, the checkpoint is of step {trainer.step}")
        probe = step_recorder(trainer, lambda step, entries: None)
        state = probe.state()
        probe.remove()
        difference = first_difference(trainer.step, record.state_after(trainer.step), state)
        if difference is not None:
            raise ValueError(f"checkpoint of step {trainer.step} is not the state that audit={str(path)!r} recorded: {difference.name} is "
                             f"{difference.second}, recorded was {difference.first}")
        return RunAudit(trainer, RecordWriter.resume(record, trainer.step, fingerprint(trainer.device), ours, state))

    def close(self, finished: bool) -> str:
        """Write the closing line; returns the hash that stands for the whole record."""
        state = self.recorder.state()
        self.recorder.remove()
        return self._writer.close(self.trainer.step, finished, state)


def step_recorder(trainer: Trainer, sink: Callable[[int, Entries], None]) -> StepRecorder:
    """The recorder of a run: with the optimizer's state wherever the run leaves a checkpoint on its way."""
    return StepRecorder(trainer.model, trainer.optimizer, sink, optimizer_every=trainer.settings.save_every)


def configuration(trainer: Trainer, data: str | None) -> dict[str, Any]:
    """Everything that a replay needs: settings, text, device, ranks, and the threads of one rank, which the dense layers' library GEMMs may see."""
    return {"settings": asdict(trainer.settings), "data": data, "corpus": {"name": trainer.corpus.name, "sha256": trainer.corpus.digest},
            "device": trainer.device.type, "ranks": 1, "threads": torch.get_num_threads()}


@dataclass(frozen=True)
class Verdict:
    """What a replay found. steps: steps run and found equal, of `recorded`. difference: the first entry that differs (first = as recorded).

    not_comparable: why the run's bits may rightly differ here, empty where they may not; nothing was run then, unless it was asked for anyway.
    was_run: whether it was.
    """

    steps: int
    recorded: int
    difference: Difference | None = None
    not_comparable: tuple[str, ...] = ()
    was_run: bool = True


def replay(record: Record, *, data: str | None = None, steps: int | None = None, anyway: bool = False,
           on_step: Callable[[int], None] = lambda step: None) -> Verdict:
    """Train again as `record` says and compare every entry, up to the first difference.

    data: where the text is now (None: where it was). steps: replay at most so many. anyway: run even where the fingerprint differs.
    Raises ValueError for a text that cannot be read, a record of settings that this version does not know, or an unfit argument.
    """
    if steps is not None and steps < 0:
        raise ValueError(f"{steps=} must not be negative")
    header, recorded = record.header["configuration"], len(record.steps) - 1
    if header.get("ranks") != 1:
        raise NotImplementedError(f"replaying a run on {header.get('ranks')} ranks is not supported")
    if header["device"] == "cuda" and not torch.cuda.is_available():
        return Verdict(0, recorded, not_comparable=("device: cuda there, no GPU here",), was_run=False)
    device = torch.device(header["device"])
    here = fingerprint(device)
    unlike = [text for line in (record.header, *record.resumes) for text in differences(line["fingerprint"], here, _THERE_AND_HERE)]
    corpus = None
    if not unlike or anyway:
        corpus = load_corpus(header["data"] if data is None else data)
        if corpus.digest != header["corpus"]["sha256"]:
            unlike.append(f"text: SHA-256 {header['corpus']['sha256'][:16]}... there, {corpus.digest[:16]}... here ({corpus.name!r})")
    if corpus is None or (unlike and not anyway):
        return Verdict(0, recorded, not_comparable=tuple(dict.fromkeys(unlike)), was_run=False)

    threads = torch.get_num_threads()
    torch.set_num_threads(header["threads"])
    try:
        trainer = Trainer(TrainSettings.from_dict(header["settings"]), corpus, device)
        done, difference = _replay_steps(trainer, record, recorded if steps is None else min(steps, recorded), on_step)
    finally:
        torch.set_num_threads(threads)
    return Verdict(done, recorded, difference, tuple(dict.fromkeys(unlike)))


def _replay_steps(trainer: Trainer, record: Record, steps: int, on_step: Callable[[int], None]) -> tuple[int, Difference | None]:
    """(steps found equal, the first difference)."""
    found: list[Difference] = []

    def check(step: int, entries: Entries) -> None:
        difference = first_difference(step, record.steps[step], entries)
        if difference is not None:
            found.append(difference)

    states = {line.get("step", line.get("steps")): line["state"] for line in (*record.resumes, *([record.end] if record.end else []))}
    settings_from = {line["step"]: line["configuration"]["settings"] for line in record.resumes}
    recorder = trainer.recorder = step_recorder(trainer, check)
    recorder.start()
    with deterministic_libraries(trainer.device):
        while not found:
            if trainer.step in states and (difference := first_difference(trainer.step, states[trainer.step], recorder.state())):
                found.append(difference)
            if found or trainer.step >= steps:
                break
            if trainer.step in settings_from:
                trainer.settings = replace(trainer.settings, **settings_from[trainer.step])
            trainer.train_step()
            on_step(trainer.step)
    recorder.remove()
    return (max(0, trainer.step - 1), found[0]) if found else (trainer.step, None)
