"""Engines that break the promises on purpose: what the bitwise tests must be able to catch."""
from __future__ import annotations

import random
import threading
import time

import torch
from oracle import Case, baseline_same_dtype, named, plain
from torch import Tensor


def run_plain_mm(case: Case) -> dict[str, Tensor | None]:
    """Right to rounding: one library product an expert, on as many rows as it has, with all threads; activations on whatever is there."""
    results = plain(case, baseline_same_dtype, case.tensors.x.dtype)
    return {"y": results["y"], **{name: results.get(name) for name in named(case.tensors)}}


def run_completion_order(case: Case) -> dict[str, Tensor | None]:
    """Right to rounding: one thread an expert, each adding its rows to y (and to dx) in fp32 when it happens to be done."""
    results = run_plain_mm(case)
    y, dx = torch.zeros_like(results["y"], dtype=torch.float32), torch.zeros_like(results["x"], dtype=torch.float32)
    lock = threading.Lock()
    parts = [plain(one_expert(case, e), baseline_same_dtype, case.tensors.x.dtype) for e in range(case.num_experts)]

    def finish(part: dict[str, Tensor]) -> None:
        time.sleep(random.SystemRandom().random() * 0.02)        # not the seeded generator: threads of a real run are not seeded either
        with lock:
            y.add_(part["y"])
            dx.add_(part["x"])

    threads = [threading.Thread(target=finish, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results | {"y": y.to(results["y"].dtype), "x": dx.to(results["x"].dtype)}


def one_expert(case: Case, e: int) -> Case:
    """The case with only the routes to expert e."""
    return Case(case.topk_ids.masked_fill(case.topk_ids != e, -1), case.tensors, case.dy, case.options)
