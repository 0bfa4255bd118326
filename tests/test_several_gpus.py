"""The script for several GPUs, as far as a CPU shows it: its inputs, what it calls a difference, its verdicts and table, and times on two ranks."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "runs"))

import several_gpus  # noqa: E402
import several_gpus_parts as parts  # noqa: E402
from rank_problem import Problem, both_passes, check  # noqa: E402

CPU = torch.device("cpu")


def test_tokens_and_experts_do_not_depend_on_the_ranks_and_local_routes_stay():
    three, one = Problem(50, 16, 24, 9, 3, [0, 10, 10, 50], CPU), Problem(50, 16, 24, 9, 3, [0, 50], CPU)
    assert torch.equal(three.x, one.x) and torch.equal(three.ids, one.ids) and torch.equal(three.weights, one.weights)
    for name, mine, all_of_them in zip(("gate_up", "down"), three.expert_weights(three.experts(1)), one.expert_weights(slice(0, 9)), strict=True):
        assert torch.equal(mine, all_of_them[3:6]), name
    arriving, leaving = zip(*(three.remote_rows(rank) for rank in range(3)), strict=True)
    assert sum(arriving) == sum(leaving) > 0 and leaving[1] == 0
    local = Problem(50, 16, 24, 9, 3, [0, 10, 10, 50], CPU, local=True)
    assert [local.remote_rows(rank) for rank in range(3)] == [(0, 0)] * 3
    crowded = Problem(400, 16, 24, 20, 3, [0, 400], CPU, crowded=True)
    assert torch.bincount(crowded.ids.flatten(), minlength=20)[:2].min() > 2 * 400 * 3 / 20


@pytest.mark.parametrize("wrong", [None, 0, 1, 2, 3, 4])
def test_the_check_against_float64_finds_each_result_that_is_wrong(wrong):
    problem = Problem(60, 16, 24, 4, 2, [0, 60], CPU)
    results = both_passes(problem.leaves(0), problem.ids, problem.dy, None)
    if wrong is None:
        assert set(check(problem, 0, results)) == {"y", "dx", "d_topk_weights", "dw_gate_up", "dw_down"}
        return
    results[wrong] = results[wrong] * (1.1 if wrong else float("nan"))
    with pytest.raises(RuntimeError, match=f"{('y', 'dx', 'd_topk_weights', 'dw_gate_up', 'dw_down')[wrong]} of rank 0 is off by"):
        check(problem, 0, results)


def test_a_difference_is_one_of_bits():
    a = torch.tensor([0.0, float("nan"), 1.0], dtype=torch.bfloat16)
    assert parts.differing(a, a.clone()) == 0
    assert parts.differing(a, torch.tensor([-0.0, float("nan"), 1.0], dtype=torch.bfloat16)) == 1
    assert parts.differing(a, a[:2]) == -1 and parts.differing(a[:0], a[:0]) == 0


def entry(impl: str, ms: float) -> dict:
    return {"shape": "layer", "thiek": [8, 1, 1, 1, 1], "pass": "forward", "impl": impl, "ms": ms, "tflops": 500.0, "ratio_to_roof": 0.7, "in_gb_s": 90.0}


def test_verdicts_and_table():
    case = {"P1_differing": {"y": 0}, "P3_differing": {"y": 0, "dx": 0}, "shape": "odd"}
    good = {"part": "bits", "by_rank": [{"cases": [case], "said": []}]}
    bad = {"part": "bits", "by_rank": [{"cases": [case, {**case, "P3_differing": {"y": 0, "dx": 3}}], "said": []}]}
    assert several_gpus.passed("bits", good) and not several_gpus.passed("bits", bad) and not several_gpus.passed("bits", {"error": "ended"})
    assert several_gpus.detail("bits", good) == "every bit equal" and several_gpus.detail("bits", bad) == "differing: odd P3 dx"
    assert not several_gpus.passed("sweep", {"results": [], "failed": []}) and not several_gpus.passed("times x", {"results": [1], "failed": ["rank 1: 9"]})
    assert several_gpus.passed("times x", {"results": [1], "failed": []})
    (line,) = several_gpus.table_lines([entry("mok, 2 ranks", 10.0), entry("mok, routes local", 9.5), entry("unfused", 16.0)])
    assert line.split() == ["layer", "8", "forward", "10.000", "500.0", "0.700", "5.0%", "1.60x", "90.0"]


def test_a_survivor_must_name_the_lost_rank_in_time():
    from rank_processes import Outcome

    lost, named = Outcome(exitcode=-9), {"raised": {"peers": [2]}, "after_s": 5.0}
    other = {"raised": {"peers": [0]}, "after_s": 6.0}                         # gave up because rank 0 did
    assert parts.faults_passed(3, [Outcome(), Outcome(), lost], [named, other])
    assert not parts.faults_passed(3, [Outcome(), Outcome(), lost], [other, other])
    assert not parts.faults_passed(3, [Outcome(), Outcome(), lost], [named, {"raised": None, "after_s": 5.0}])
    assert not parts.faults_passed(3, [Outcome(), Outcome(), lost], [named, {**other, "after_s": 60.0}])
    assert not parts.faults_passed(3, [Outcome(), Outcome(), Outcome(exitcode=0)], [named, named])


def test_times_on_two_ranks(tmp_path):
    out = tmp_path / "out.json"
    command = ["runs/several_gpus.py", "--ranks", "2", "--device", "cpu", "--tiny", "--parts", "times", "--out", str(out)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    document = json.loads(out.read_text())
    assert done.stdout.splitlines()[-1].startswith("times qwen3-30b-a3b    passed")
    assert [entry["impl"] for entry in document["results"][:4]] == ["mok, 2 ranks", "mok, routes local", "mok, one rank", "unfused"]
