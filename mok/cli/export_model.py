"""`mok export`: the model of a run's newest checkpoint, in the layout and under the names of Hugging Face's Mixtral."""
from __future__ import annotations

import argparse

from ..arguments import check_path
from .console import Output

HELP = "write a run's model as safetensors in Hugging Face's layout"
DESCRIPTION = """\
Write the model of a run's newest checkpoint as model.safetensors and config.json: weights as they are, to the bit, all experts of a layer in one
tensor, under the names of Hugging Face's Mixtral, which this model is. `mok import` reads the folder back; so does transformers, version 5.

  mok export out/train-1 exported"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    parser.add_argument("out", metavar="OUT", help="new folder to write")


def run(arguments: argparse.Namespace, output: Output) -> int:
    from ..lm.hugging_face import TENSOR_FILE, write_folder
    from ..lm.run_folder import RunFolder
    from ..lm.state import load_model, num_parameters

    out = check_path("out", arguments.out)
    folder = RunFolder.open(check_path("run", arguments.run))
    newest = folder.latest_checkpoint()
    model = load_model(newest)
    write_folder(model, out)
    size = (out / TENSOR_FILE).stat().st_size
    output.line(f"{newest}: {num_parameters(model):,} parameters written to {arguments.out}, {size:,} bytes")
    output.finish({"command": "export", "checkpoint": str(newest), "out": arguments.out, "parameters": num_parameters(model), "bytes": size})
    return 0
