"""`mok bench`: time the layer on this machine against its own matrix-multiply roof."""
from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING

from ..arguments import kind_of
from .console import Output
from .device import add_device_argument, choose_device

if TYPE_CHECKING:
    from ..bench_cuda import Shape

HELP = "time the layer against what this machine's matrix products alone reach"
DESCRIPTION = """\
Time the layer. Results are checked against the float64 specification first. The roof is measured in the same process, before and after: on a
GPU a large bf16 product, on a CPU bare torch.mm calls for the same multiplications. Close other programs: they compete with both.

  mok bench                                  everything that is measured on this machine's device
  mok bench --device cpu --shape cpu         one shape by name
  mok bench --thiek 4096,1024,512,16,4       your own: tokens, hidden, intermediate, experts, experts per token
  mok bench --shape olmoe --breakdown        with parts of the fused kernels left out
  mok bench --json | tail -1 > result.json   keep the record"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_device_argument(parser)
    parser.add_argument("--shape", action="append", metavar="NAME", help="a layer by name, may be given several times (default: all of the device's; "
                                                                         "a wrong name lists them)")
    parser.add_argument("--thiek", action="append", metavar="T,H,I,E,K", help="a layer by its sizes, may be given several times")
    parser.add_argument("--pass", action="append", dest="passes", metavar="PASS",
                        help="forward, forward-no-grad, backward or forward+backward, may be given several times (default: all of the device's)")
    parser.add_argument("--block-ms", type=float, metavar="MS", help="length of one of the five timed blocks (default: 100 on a GPU, 1000 on a CPU)")
    parser.add_argument("--breakdown", action="store_true", help="on a Hopper GPU: also time the fused kernels with parts left out, to see what each costs")


def run(arguments: argparse.Namespace, output: Output) -> int:
    from ..bench import CPU_SHAPE, run_bench
    from ..bench_cuda import shape_of

    device = choose_device(arguments.device)
    named = [CPU_SHAPE if name == CPU_SHAPE.name else shape_of(name) for name in arguments.shape or ()]
    shapes = named + [_shape_of_sizes(sizes) for sizes in arguments.thiek or ()]
    output.line(f"benchmark on {device}")
    with output.bar("measuring", None):
        record = run_bench(device, shapes or None, arguments.passes, block_ms=arguments.block_ms, breakdown=arguments.breakdown,
                           command=_command(arguments), say=output.line)
    output.line("tflops, ratio_to_roof: of the layer's own multiplications, padding not counted; spread: the farthest block's distance from the median")
    output.finish(record)
    return 0


def _shape_of_sizes(sizes: str) -> Shape:
    from ..bench_cuda import shape_of

    try:
        return shape_of(sizes)
    except ValueError as error:
        raise ValueError(f"thiek={kind_of(sizes)}: {error}") from None


def _command(arguments: argparse.Namespace) -> str:
    """The command line that repeats this run."""
    words = ["mok", "bench"]
    for option, values in (("--device", [arguments.device]), ("--shape", arguments.shape), ("--thiek", arguments.thiek), ("--pass", arguments.passes)):
        words += [word for value in values or () if value is not None for word in (option, value)]
    words += ["--block-ms", f"{arguments.block_ms:g}"] if arguments.block_ms is not None else []
    words += [option for option, given in (("--breakdown", arguments.breakdown), ("--json", arguments.json)) if given]
    return shlex.join(words)
