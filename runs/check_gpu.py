"""Everything that only a GPU can check, in one call: the recorded figures one after the other, then all GPU tests and compute-sanitizer side by side.

    PYTHONPATH=. python3 runs/check_gpu.py --out FOLDER --commit COMMIT                      tests, sanitizers, figures: about five minutes on an H200
    PYTHONPATH=. python3 runs/check_gpu.py --out FOLDER --only tests sanitizers              parts of it
    PYTHONPATH=. python3 runs/check_gpu.py --out FOLDER --only tests --select backward       suites whose name holds a word

Writes FOLDER/check.json (what ran, how long, how it ended), FOLDER/logs.txt (the ends of all logs) and the records of the scripts that it runs.
A suite that outlasts --limit is ended and counts as failed. Ends with status 0 only if everything that ran passed.
"""
from __future__ import annotations

import argparse
import ast
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "--durations=3", "-o", "faulthandler_timeout=100")
# Each suite is one process; the long ones are cut so that they end together, and one multiprocessor-hungry test does not wait for another's compilation.
SUITES = {
    "forward": ("tests/hopper/test_forward_gpu.py",),
    "backward": ("tests/hopper/test_backward_gpu.py", "-k", "not recompute"),
    "recompute": ("tests/hopper/test_backward_gpu.py", "-k", "recompute"),
    "plan, ready launches": ("tests/hopper/test_plan_kernel.py", "tests/hopper/test_ready_launch.py"),
    "torch_gpu": ("tests/engines/test_torch_gpu.py", "tests/test_router.py", "tests/test_determinism.py", "tests/test_bench_cuda.py"),
    "cases a": ("tests/cases/test_cases_a_gradients.py",),
    "cases c d": ("tests/cases/test_cases_c_routing.py", "tests/cases/test_cases_d_shapes.py"),
    "cases e": ("tests/cases/test_cases_e_training.py",),
    "cases g h i": ("tests/cases/test_cases_g_h_i.py",),
    "cases streams": ("tests/cases/test_cases_gpu_streams.py",),
    "trainer": ("tests/lm", "tests/cli", "--ignore", "tests/lm/test_trainer_ranks_gpu.py"),
    "trainer ranks": ("tests/lm/test_trainer_ranks_gpu.py",),
    "fabric": ("tests/fabric",),
    "expert parallel": ("tests/hopper/test_expert_parallel_gpu.py",),
    "expert parallel backward": ("tests/hopper/test_expert_parallel_backward_gpu.py",),
    "waves": ("tests/hopper/test_waves_gpu.py",),
}
PROGRAMS = {"expert-parallel-soak": ("runs/expert_parallel_soak.py", "--ranks", "4", "--steps", "2000")}      # beside the suites
SANITIZED = ("tests/hopper/test_forward_gpu.py", "tests/hopper/test_backward_gpu.py", "-k", "smallest or one_token")
SANITIZERS = {"memcheck": (), "racecheck": ()}
# What racecheck reports of correct code too (runs/racecheck_control.py): it follows neither mbarriers nor a barrier that roles reach at different instructions.
ORDERED_BY_MBARRIERS = ("_push_task", "_pop_task", "push_task", "pop_task")
HOPPER = ROOT / "mok" / "engines" / "hopper"
RECORDS = {
    "hopper-forward": ("runs/hopper_forward.py", "--budget-ms", "60", "--blocks", "5"),
    "hopper-backward": ("runs/hopper_backward.py", "--budget-ms", "60", "--blocks", "5"),
    "expert-parallel": ("runs/expert_parallel.py", "--backward"),
    "host-time": ("runs/host_time.py",),
}
TAIL = 6000                     # characters of each log that are kept


@dataclass
class Job:
    """One process: its name, command and log; seconds and status once it has ended (124: ended by the limit)."""

    name: str
    command: list[str]
    log: Path
    process: subprocess.Popen | None = None
    seconds: float = 0.0
    status: int | None = None


def start(job: Job) -> Job:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "2"}
    with job.log.open("w") as log:
        job.process = subprocess.Popen(job.command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True)
    return job


def wait(jobs: list[Job], limit: float) -> None:
    """Until all have ended; those that outlast the limit are killed with their children."""
    begin = time.monotonic()
    left = list(jobs)
    while left:
        for job in list(left):
            assert job.process is not None
            job.status, job.seconds = job.process.poll(), round(time.monotonic() - begin, 1)
            if job.status is None and job.seconds > limit:
                os.killpg(job.process.pid, 9)
                job.process.wait()
                job.status = 124
            if job.status is not None:
                left.remove(job)
                print(f"{job.name:24s} {'passed' if job.status == 0 else f'status {job.status}':12s} {job.seconds:6.1f} s", flush=True)
        time.sleep(0.2)


def suites(folder: Path, out: Path, commit: str, select: list[str]) -> list[Job]:
    def chosen(name: str) -> bool:
        return not select or any(word in name for word in select)

    logs = {name: folder / (re.sub("[ ,]+", "_", name) + ".log") for name in SUITES}
    tests = [Job(name, [sys.executable, *PYTEST, *arguments], logs[name]) for name, arguments in SUITES.items() if chosen(name)]
    return tests + [Job(name, [sys.executable, *command, "--out", str(out / f"{name}.json"), "--commit", commit], folder / f"{name}.log")
                    for name, command in PROGRAMS.items() if chosen(name)]


def sanitizers(folder: Path) -> list[Job]:
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not installed: memcheck and racecheck were not run", flush=True)
        return []
    return [Job(tool, ["compute-sanitizer", "--tool", tool, "--launch-timeout", "300", "--error-exitcode", "1", *options, sys.executable, *PYTEST, *SANITIZED],
                folder / f"{tool}.log") for tool, options in SANITIZERS.items()]


def explained_places() -> set[tuple[str, int]]:
    """(file, line) of what racecheck reports of correct code: the task records, and Triton's own words for its roles (reported where these start)."""
    places = set()
    for path in HOPPER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and (node.name in ORDERED_BY_MBARRIERS or node.name.endswith(("_kernel", "_run_roles"))):
                places |= {(path.name, line) for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return places


def unexplained_races(log: str) -> list[str]:
    """The errors in a racecheck log that name any other place; also what says that the tests or the tool did not end as they should."""
    good, found = explained_places(), []
    for report in re.split(r"========= (?=Error: |Warning: |RACECHECK)", log)[1:]:
        places = {(file, int(line)) for file, line in re.findall(r" in (\w+\.py):(\d+)", report)}
        if report.startswith("Error") and not (places and places <= good):
            found.append(report)
    if "[100%]" not in log or "FAILED" in log or "RACECHECK SUMMARY" not in log:
        found.append("the tests did not pass, or racecheck did not end")
    return found


def records(folder: Path, commit: str) -> list[Job]:
    """The figures, which must have the card to themselves."""
    jobs = []
    for name, command in RECORDS.items():
        out = [] if name == "host-time" else ["--out", str(folder / f"{name}.json")]
        with_commit = [] if name == "host-time" else ["--commit", commit]
        jobs.append(Job(name, [sys.executable, *command, *out, *with_commit], folder / f"{name}.log"))
    return jobs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for check.json, logs.txt and the records")
    parser.add_argument("--only", nargs="+", choices=("tests", "sanitizers", "records"), default=["tests", "sanitizers", "records"])
    parser.add_argument("--select", nargs="+", default=[], help="of the test suites, those whose name holds one of these words")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds that the tests, and each record, may take")
    parser.add_argument("--commit", default="", help="commit to record where the tree has no git")
    args = parser.parse_args()
    if shutil.which("nvidia-smi") is None:
        parser.error("no NVIDIA GPU here: every test would be skipped, which is not passing")
    logs = args.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    done: list[Job] = []
    for job in records(args.out, args.commit) if "records" in args.only else []:
        wait([start(job)], args.limit)
        done.append(job)
    if {"tests", "sanitizers"} & set(args.only):
        warm = start(Job("warm-up", [sys.executable, "runs/warm_up.py"], logs / "warm_up.log"))
        wait([warm], args.limit)
        done.append(warm)
    beside = [*(suites(logs, args.out, args.commit, args.select) if "tests" in args.only else []), *(sanitizers(logs) if "sanitizers" in args.only else [])]
    wait([start(job) for job in beside], args.limit)
    for job in beside:
        if job.name == "racecheck" and job.status == 1 and not unexplained_races(job.log.read_text(errors="replace")):
            job.status = 0
    done += beside
    text = "\n".join(f"===== {job.name}: status {job.status}, {job.seconds} s\n{job.log.read_text(errors='replace')[-TAIL:]}" for job in done)
    (args.out / "logs.txt").write_text(text)
    document = {"date": datetime.date.today().isoformat(), "commit": args.commit,
                "jobs": [{"name": job.name, "status": job.status, "seconds": job.seconds, "command": " ".join(job.command[1:])} for job in done]}
    (args.out / "check.json").write_text(json.dumps(document, indent=1) + "\n")
    failed = [job.name for job in done if job.status != 0]
    for job in done:
        if job.status != 0:
            wrong = [line for line in job.log.read_text(errors="replace").splitlines() if line.startswith(("FAILED", "ERROR", "E  ", "=========     "))]
            print(f"--- {job.name}\n" + "\n".join(line[:200] for line in wrong[:12]))
    print(f"{len(done) - len(failed)} of {len(done)} passed" + (f"; not: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
