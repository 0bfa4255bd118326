"""Step times of the default training run on one rank with all cores and on several ranks that share them: `python runs/train_ranks.py [--rounds N]`.

Prints one line a configuration and a JSON document last. The configurations take turns, so that a busy machine is busy for all of them.
"""
from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import mok
from mok.lm.data import load_corpus
from mok.lm.ranks import Ranks, usable_cores
from mok.lm.trainer import Trainer, TrainSettings, native_precision


def _measure(rank: int, W: int, threads: int, steps: int, store: str, out: str) -> None:
    torch.set_num_threads(threads)
    group = None
    if W > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, W), rank=rank, world_size=W)
        group = mok.ExpertGroup()
    trainer = Trainer(TrainSettings(precision=native_precision(torch.device("cpu"))), load_corpus(), "cpu", Ranks(group))
    trainer.train_step()
    wall, cpu = [], []
    for _ in range(steps):
        started, used = time.perf_counter(), time.process_time()
        trainer.train_step()
        wall.append(time.perf_counter() - started)
        cpu.append(time.process_time() - used)
    cpu_of_all = Ranks(group).gather(torch.tensor([cpu]), [1] * W, "the measurement").sum(0).tolist()
    if rank == 0:
        with open(out, "w") as file:
            json.dump({"wall": wall, "cpu": cpu_of_all}, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    cores = usable_cores()
    shapes = [(W, max(1, cores // W)) for W in (1, 2)]
    found: dict[tuple[int, int], dict[str, list[float]]] = {shape: {"wall": [], "cpu": []} for shape in shapes}
    for _ in range(arguments.rounds):
        for W, threads in shapes:
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(_measure, args=(W, threads, arguments.steps, f"{folder}/store", f"{folder}/out"), nprocs=W)
                with open(f"{folder}/out") as file:
                    for kind, values in json.load(file).items():
                        found[W, threads][kind].extend(values)
    settings = TrainSettings()
    tokens = settings.batch_size * 256
    results = []
    for (W, threads), times in found.items():
        best, median = min(times["wall"]), statistics.median(times["wall"])
        results.append({"ranks": W, "threads": threads, "best_s": round(best, 3), "median_s": round(median, 3), "tokens_per_s": round(tokens / best),
                        "cpu_s": round(min(times["cpu"]), 3)})
        print(f"{W} rank(s) of {threads} thread(s): best step {best:.3f} s ({tokens / best:,.0f} tokens/s), median {median:.3f} s, "
              f"{min(times['cpu']):.2f} CPU seconds")
    print(json.dumps({"cores": cores, "torch": torch.__version__, "results": results}))


if __name__ == "__main__":
    main()
