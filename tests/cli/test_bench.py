"""`mok bench`: the record it prints, the command in it, and bad input. How the numbers are measured is tested beside mok/bench.py."""
from __future__ import annotations

from support import bad_input, run_json

from mok.bench import bench_cpu

SMALL = ("bench", "--device", "cpu", "--thiek", "64,32,48,4,2")


def test_the_record_is_the_last_line_and_repeats_itself_by_its_command(capsys, monkeypatch):
    monkeypatch.setitem(bench_cpu.__kwdefaults__, "block_s", 1000.0)
    status, record, lines = run_json(capsys, *SMALL, "--pass", "forward", "--block-ms", "10")
    assert status == 0
    assert record["command"] == "mok bench --device cpu --thiek 64,32,48,4,2 --pass forward --block-ms 10 --json"
    assert {result["pass"] for result in record["results"]} == {"forward"}
    assert {tuple(result["thiek"]) for result in record["results"]} == {(64, 32, 48, 4, 2)}
    assert all(result["ms"] > 0 and result["ratio_to_roof"] > 0 for result in record["results"])
    assert {"date", "commit", "torch", "roof_tflops"} <= set(record)
    assert sum("forward" in line for line in lines) >= 2            # one line a dtype, as they come


def test_bad_input_is_one_line(capsys):
    assert "shape 'huge' must be five positive integers T,H,I,E,K or one of" in bad_input(capsys, "bench", "--device", "cpu", "--shape", "huge")
    assert "'1,2,3'" in bad_input(capsys, "bench", "--device", "cpu", "--thiek", "1,2,3")
    assert "pass 'sideways'" in bad_input(capsys, *SMALL, "--pass", "sideways")
    assert "block_ms=0.0 must be a positive number" in bad_input(capsys, *SMALL, "--block-ms", "0")
    assert "breakdown=True is of the fused GPU kernels" in bad_input(capsys, *SMALL, "--breakdown")
    assert "device='cuda:63'" in bad_input(capsys, "bench", "--device", "cuda:63")
