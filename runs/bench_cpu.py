"""The CPU engine against bare torch.mm calls (docs/benchmarks/<date>-cpu.json): the method is in mok/bench.py.

    PYTHONPATH=. python runs/bench_cpu.py --out docs/benchmarks/2026-11-30-cpu.json

Last line of stdout: one JSON document, which --out also writes. Run it on a machine that does nothing else.
"""
from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from mok.bench import run_bench


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file to write the record to")
    arguments = parser.parse_args()
    record = run_bench(torch.device("cpu"), command=" ".join(["PYTHONPATH=. python", *sys.argv]))
    text = json.dumps(record)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
