"""`mok import`: a run of zero steps that begins with a model in Hugging Face's layout."""
from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from ..arguments import check_path
from .console import Output
from .train import add_settings, given_settings

HELP = "begin a run with a model that `mok export` wrote"
DESCRIPTION = """\
Make a run folder whose checkpoint, at step 0, holds the weights in FOLDER to the bit, with the optimizer at rest. Its sizes must be those of a
configuration of ours. The options say how the run will train; `mok train --resume OUT` starts it.

  mok import exported tuned --data notes/ --steps 500
  mok train --resume tuned"""
_DECIDED = ("config", "moe_impl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="folder with config.json and model.safetensors")
    parser.add_argument("out", metavar="OUT", help="folder of the new run")
    parser.add_argument("--data", metavar="PATH", help="a file or folder of text (default: this Python's standard library)")
    add_settings(parser, leave_out=_DECIDED)


def run(arguments: argparse.Namespace, output: Output) -> int:
    import torch

    from ..lm.data import load_corpus
    from ..lm.hugging_face import from_hugging_face, read_folder
    from ..lm.run_folder import RunFolder
    from ..lm.state import num_parameters
    from ..lm.trainer import Trainer, TrainSettings

    out = check_path("out", arguments.out)
    RunFolder.check_free(out)
    config, tensors = read_folder(check_path("folder", arguments.folder))
    settings = TrainSettings(config=config, **given_settings(arguments, torch.device("cpu")))
    trainer = Trainer(settings, load_corpus(arguments.data))
    try:
        from_hugging_face(trainer.model, tensors)
    except ValueError as error:
        raise ValueError(f"folder={arguments.folder!r} does not fit: {error}") from None
    data = None if arguments.data is None else str(Path(arguments.data).absolute())
    folder = RunFolder.create(out, {"settings": asdict(settings), "data": data})
    trainer.save(folder)
    output.line(f"{arguments.folder}: {num_parameters(trainer.model):,} parameters of config {config}; train them with: mok train --resume {out}")
    output.finish({"command": "import", "folder": arguments.folder, "out": str(out), "config": config, "parameters": num_parameters(trainer.model),
                   "settings": asdict(settings)})
    return 0
