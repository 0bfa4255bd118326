"""A training run's record: begun with the run, continued when it is resumed, and replayed from nothing but what it says."""
from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..arguments import LARGEST, check_integer
from ..audit import BrokenChain, Entries, Record, RecordWriter, read_record
from ..audit_diff import Difference, first_difference
from ..fingerprint import differences, fingerprint
from ..recorder import StepRecorder
from .data import load_corpus
from .ranks import Ranks
from .trainer import Trainer, TrainSettings, deterministic_libraries

_FREE_ON_RESUME = ("steps",)
_NEVER = 2**62                   # steps
_THERE_AND_HERE = "{name}: {first} there, {second} here"


class RunAudit:
    """The record that a trainer writes while it trains. Made by `begin` or `resume`, ended by `close`; all ranks call all three, rank 0 writes."""

    def __init__(self, trainer: Trainer, writer: RecordWriter | None) -> None:
        self.trainer, self._writer = trainer, writer
        self.recorder = trainer.recorder = step_recorder(trainer, _ignore if writer is None else writer.step)

    @staticmethod
    def begin(trainer: Trainer, path: str | os.PathLike[str], data: str | None) -> RunAudit:
        """A new record of a run that has done no step; data: the --data argument. ValueError naming `audit` for a file that exists or cannot be written."""
        writer = None
        with trainer.ranks.together("beginning the record"):
            if trainer.ranks.leads:
                writer = RecordWriter.create(path, fingerprint(trainer.device), configuration(trainer, data))
        audit = RunAudit(trainer, writer)
        audit.recorder.start(trainer.step)
        return audit

    @staticmethod
    def resume(trainer: Trainer, path: str | os.PathLike[str], data: str | None) -> RunAudit:
        """Continue the record of the run whose checkpoint `trainer` has loaded, on the same number of ranks or another.

        ValueError naming `audit` and both quantities where it is not that run's record, was changed, or says that the state at this step was another.
        """
        ranks, writer = trainer.ranks, None
        probe = step_recorder(trainer, _ignore)
        state = probe.state()
        probe.remove()
        with ranks.together("continuing the record"):
            if ranks.leads:
                ours = configuration(trainer, data)
                record = _record_to_continue(path, ours, trainer.step)
                difference = first_difference(trainer.step, record.state_after(trainer.step), state)
                if difference is not None:
                    raise ValueError(f"checkpoint of step {trainer.step} is not the state that audit={str(path)!r} recorded: {difference.name} is "
                                     f"{difference.second}, recorded was {difference.first}")
                writer = RecordWriter.resume(record, trainer.step, fingerprint(trainer.device), ours, state)
        return RunAudit(trainer, writer)

    def close(self, finished: bool) -> str | None:
        """Write the closing line; returns the hash that stands for the whole record, on rank 0."""
        state = self.recorder.state()
        self.recorder.remove()
        return None if self._writer is None else self._writer.close(self.trainer.step, finished, state)


def _ignore(step: int, entries: Entries) -> None:
    pass


def _record_to_continue(path: str | os.PathLike[str], ours: dict[str, Any], step: int) -> Record:
    """The record in `path`; ValueError unless it is an intact one of a run of these settings and this text, of at least `step` steps."""
    try:
        record = read_record(path, may_be_open=True)
    except BrokenChain as error:
        raise ValueError(f"audit={str(path)!r} is not intact: {error}") from None
    theirs = record.header["configuration"]
    facts = [("corpus", ours["corpus"]["sha256"], theirs["corpus"]["sha256"]), ("device", ours["device"], theirs["device"]),
             *((name, value, theirs["settings"].get(name)) for name, value in ours["settings"].items() if name not in _FREE_ON_RESUME)]
    for name, this, that in facts:
        if this != that:
            raise ValueError(f"audit={str(path)!r} records a run with {name}={that!r}, this one has {name}={this!r}")
    if step >= len(record.steps):
        raise ValueError(f"audit={str(path)!r} holds {len(record.steps) - 1} steps, the checkpoint is of step {step}")
    return record


def step_recorder(trainer: Trainer, sink: Callable[[int, Entries], None]) -> StepRecorder:
    """The recorder of a run: with the optimizer's state wherever the run leaves a checkpoint on its way."""
    ranks = trainer.ranks
    return StepRecorder(trainer.model, trainer.optimizer, sink, optimizer_every=trainer.settings.save_every or _NEVER, rank=ranks.rank, world_size=ranks.size,
                        combine=None if ranks.size == 1 else lambda values: ranks.combine(values, "the step's record"))


def configuration(trainer: Trainer, data: str | None) -> dict[str, Any]:
    """Everything that a replay needs: settings, text, device, ranks, and the threads of one rank, which the dense layers' library GEMMs may see."""
    return {"settings": asdict(trainer.settings), "data": data, "corpus": {"name": trainer.corpus.name, "sha256": trainer.corpus.digest},
            "device": trainer.device.type, "ranks": trainer.ranks.size, "threads": torch.get_num_threads()}


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


def replay(record: Record, *, ranks: Ranks | None = None, data: str | None = None, steps: int | None = None, anyway: bool = False,
           on_step: Callable[[int], None] = lambda step: None) -> Verdict:
    """Train again as `record` says and compare every entry, up to the first difference.

    ranks: as many as the run had, all of which call this (None: this process alone). data: where the text is now (None: where it was). steps:
    replay at most so many. anyway: run even where the fingerprint differs.

    Raises ValueError for a text that cannot be read, a record of settings that this version does not know, or an unfit argument.
    """
    ranks = Ranks() if ranks is None else ranks
    check_replay(record, ranks.size, steps)
    header, recorded = record.header["configuration"], len(record.steps) - 1
    unlike = unlike_here(record)
    if (unlike and not anyway) or not _has_device(record):
        return Verdict(0, recorded, not_comparable=tuple(unlike), was_run=False)
    with ranks.together("reading the text"):
        corpus = load_corpus(header["data"] if data is None else data)
        settings = TrainSettings.from_dict(header["settings"])
    if corpus.digest != header["corpus"]["sha256"]:
        unlike.append(f"text: SHA-256 {header['corpus']['sha256'][:16]}... there, {corpus.digest[:16]}... here ({corpus.name!r})")
        if not anyway:
            return Verdict(0, recorded, not_comparable=tuple(unlike), was_run=False)

    threads = torch.get_num_threads()
    torch.set_num_threads(header["threads"])
    try:
        trainer = Trainer(settings, corpus, header["device"] if ranks.placement is None else ranks.placement.device, ranks)
        done, difference = _replay_steps(trainer, record, recorded if steps is None else min(steps, recorded), on_step)
    finally:
        torch.set_num_threads(threads)
    return Verdict(done, recorded, difference, tuple(unlike))


def check_replay(record: Record, num_ranks: int, steps: int | None) -> None:
    """Raise ValueError or NotImplementedError unless so many ranks can replay so many steps (None = all) of the record."""
    if steps is not None:
        check_integer("steps", steps, 0, LARGEST)
    if num_ranks != record.ranks_at(0):
        raise ValueError(f"ranks={num_ranks} must be the {record.ranks_at(0)} of the recorded run")
    last = len(record.steps) - 1 if steps is None else min(steps, len(record.steps) - 1)
    for step in range(last + 1):
        if record.ranks_at(step) != num_ranks:
            raise NotImplementedError(f"the run went on with {record.ranks_at(step)} ranks instead of {num_ranks} after step {step - 1}; "
                                      f"steps={step - 1} is as far as a replay goes")


def unlike_here(record: Record) -> list[str]:
    """Why this machine, its versions and this code may rightly give other bits than the record's: empty where they may not."""
    if not _has_device(record):
        return [f"device: {record.header['configuration']['device']} there, no GPU here"]
    here = fingerprint(torch.device(record.header["configuration"]["device"]))
    texts = [text for line in (record.header, *record.resumes) for text in differences(line["fingerprint"], here, _THERE_AND_HERE)]
    return list(dict.fromkeys(texts))


def _has_device(record: Record) -> bool:
    return record.header["configuration"]["device"] == "cpu" or torch.cuda.is_available()


def _replay_steps(trainer: Trainer, record: Record, steps: int, on_step: Callable[[int], None]) -> tuple[int, Difference | None]:
    """(steps found equal, the first difference)."""
    found: list[Difference] = []

    def check(step: int, entries: Entries) -> None:
        difference = first_difference(step, record.steps[step], entries)
        if difference is not None:
            found.append(difference)

    states = {line.get("step", line.get("steps")): line["state"] for line in (*record.resumes, *([record.end] if record.end else []))}
    configuration_from = {line["step"]: line["configuration"] for line in record.resumes}
    recorder = trainer.recorder = step_recorder(trainer, check)
    recorder.start()
    with deterministic_libraries(trainer.device):
        while not found:
            if trainer.step in states and (difference := first_difference(trainer.step, states[trainer.step], recorder.state())):
                found.append(difference)
            if found or trainer.step >= steps:
                break
            if trainer.step in configuration_from:
                trainer.settings = TrainSettings.from_dict(configuration_from[trainer.step]["settings"])
                torch.set_num_threads(configuration_from[trainer.step]["threads"])
            trainer.train_step()
            on_step(trainer.step)
    recorder.remove()
    return (max(0, trainer.step - 1), found[0]) if found else (trainer.step, None)
