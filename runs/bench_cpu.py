"""The CPU engine against bare torch.mm calls (docs/benchmarks/<date>-cpu.json): the method is in mok/bench.py.

    PYTHONPATH=. python runs/bench_cpu.py --out OUT.json

Last line of stdout: one JSON document, which --out also writes. Run it on a machine that does nothing else; on a shared one, with a real-time
scheduler (`chrt -f 5`), short blocks and pauses between them. The record names the scheduler.
"""
from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from mok.bench import bench_cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file to write the record to")
    parser.add_argument("--block", type=float, default=1.0, help="seconds that the layer runs in one of five blocks")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of rest before each block")
    arguments = parser.parse_args()
    record = bench_cpu(command=" ".join(["PYTHONPATH=. python", *sys.argv]), block_s=arguments.block, pause_s=arguments.pause)
    record["scheduler"] = {os.SCHED_OTHER: "normal", os.SCHED_FIFO: "real-time (chrt -f)"}.get(os.sched_getscheduler(0), "other")
    text = json.dumps(record)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
