"""Cases G, H and I: the same bits every time and in any company, memory within a stated bound, installing and importing anywhere."""
from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import mok
from mok.plan import plan_capacity
from mok.runtime import RowBuffers, runtime
from tests.cases.case_support import Problem, assert_same_bits, peak_bytes, problem, random_routes, requested_bytes

ROOT = Path(mok.__file__).resolve().parent.parent


# ---- G ----

def test_case_G1(device, dtype):
    """transformers#43362, torchtitan#1974, Megatron-LM#5718: atomic adds in combine, dx or dw. Many runs, one result; K = E = 8."""
    T, H, I, repeats = (4096, 1024, 512, 100) if device == "cuda" else (301, 136, 72, 20)
    ids = torch.randint(-1, 8, (T, 8), generator=torch.Generator().manual_seed(0))             # repeated experts too: more to add up in one place
    p = problem(ids, 8, H, I, device, dtype, biases=True, shared=(48, 16))
    first = p.run()
    for _ in range(repeats):
        assert_same_bits(p.run(), first)


def test_case_G2(device, dtype):
    """vllm#57016, #41480, #46639, Megatron-LM#6521: a token's result depended on the batch around it. Alone, in 2, 64 and 257, at any row."""
    H, I = (144, 80) if device == "cuda" else (129, 71)
    whole = problem(random_routes(257, 2, 8, masked=0.1, seed=1), 8, H, I, device, dtype, biases=True, shared=(32,))
    results = whole.run()
    per_token = ("x", "topk_ids", "topk_weights")

    def batch(tokens: list[int]) -> Problem:
        return whole.changed(dy=whole.dy[tokens], **{name: whole[name][tokens] for name in per_token})

    generator = torch.Generator().manual_seed(2)
    for token in (0, 100, 255, 256):
        others = [t for t in torch.randperm(257, generator=generator).tolist() if t != token]
        for T, row in ((1, 0), (2, 1), (64, 0), (64, 63), (64, 31), (257, 7)):
            tokens = [*others[:row], token, *others[row:T - 1]]
            got = batch(tokens).run()
            assert_same_bits({n: got[n][row] for n in ("y", "x", "topk_weights")}, {n: results[n][token] for n in ("y", "x", "topk_weights")})


# ---- H ----

def saved_bytes(p: Problem, *wanted: str) -> tuple[int, torch.Tensor]:
    """(bytes that the graph of one forward keeps alive beside the layer's own inputs, y)."""
    arguments, leaves = p.leaves(grad=False)
    arguments["shared"] = [mok.SharedExpert(*parts) for parts in arguments["shared"]]
    for name in wanted:
        leaves[name].requires_grad_()
    own = {t.untyped_storage().data_ptr() for t in (*leaves.values(), p["topk_ids"]) if t.numel()}
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = mok.moe(**arguments, **p.settings)
    return sum(kept.values()), y


def stated_bytes(T: int, K: int, E: int, I: int, shared: tuple[int, ...], item: int, recompute: str | None = None) -> int:
    """z (R, 2I), the shared experts' (T, sum of 2I_s), unless both are computed again, and the plan: R rows twice, T*K slots, R/128 tiles, E counts
    and one scalar in int32, E + 1 offsets in int64."""
    R = plan_capacity(T * K, E)
    z = 0 if recompute == "z" else R * 2 * I * item + T * 2 * sum(shared) * item
    return z + 4 * (2 * R + T * K + R // 128 + E + 1) + 8 * (E + 1)


@pytest.mark.parametrize("wanted", [("x", "topk_weights", "w_gate_up", "w_down"), ("x",), ("w_down",), ("topk_weights",)], ids="+".join)
@pytest.mark.parametrize("shared", [(), (32, 16)], ids=["routed", "shared"])
@pytest.mark.parametrize("recompute", [None, "z"], ids=["saved", "recomputed"])
def test_case_H4(device, dtype, wanted, shared, recompute):
    """unsloth-zoo#838, #858: tensors kept for backward that it does not need. Kept is z and the plan, whatever is frozen, and not a byte more; with
    recompute="z" the plan alone."""
    T, K, E, H, I = 1024, 2, 8, 64, 32
    p = problem(random_routes(T, K, E), E, H, I, device, dtype, shared=shared)
    p.settings["recompute"] = recompute
    kept, y = saved_bytes(p, *wanted)
    spare = kept - stated_bytes(T, K, E, I, shared, dtype.itemsize, recompute)
    assert y.requires_grad and spare in (0, 4)                                   # 4: the spare row of the torch builder's row_to_slot


@pytest.mark.gpu
@pytest.mark.parametrize(("H", "I"), [(64, 512), (72, 520)], ids=["fused", "plain"])
@pytest.mark.parametrize("recompute", [None, "z"], ids=["saved", "recomputed"])
def test_case_H4_between_the_passes_of_a_gpu(H, I, recompute):
    """The same where it counts: what the allocator has out between forward and backward is y and the stated bytes, whatever hooks can see."""
    T, K, E = 4096, 2, 8
    p = problem(random_routes(T, K, E), E, H, I, "cuda", torch.bfloat16)
    arguments, _ = p.leaves()
    arguments["shared"] = []
    mok.moe(**arguments, recompute=recompute).backward(p.dy)                      # counters, kernels and gradients are in place
    before = requested_bytes("current")
    y = mok.moe(**arguments, recompute=recompute)
    kept = requested_bytes("current") - before - y.numel() * y.element_size()
    stated = stated_bytes(T, K, E, I, (), 2, recompute)
    assert (stated > 16 * 2**20) == (recompute is None) and kept - stated in (0, 4)      # 4: as above
    y.backward(p.dy)
    del y
    assert requested_bytes("current") <= before


def test_case_H4_nothing_wanted_nothing_kept(device, dtype):
    """The kind of H4: everything frozen, or no_grad, keeps nothing; and what is kept does not depend on the routes."""
    p = problem(random_routes(1024, 2, 8), 8, 64, 32, device, dtype)
    assert saved_bytes(p)[0] == 0
    with torch.no_grad():
        assert saved_bytes(p, "x", "w_gate_up")[0] == 0
    sizes = {saved_bytes(p.changed(topk_ids=ids.to(device)), "x")[0] for ids in (p["topk_ids"], torch.full((1024, 2), 5), torch.full((1024, 2), -1))}
    assert len(sizes) == 1


def test_case_H4_released_by_backward(device):
    """The kind of H4: what was kept goes with the graph, also when the output lives on."""
    p = problem(random_routes(4096, 4, 8), 8, 64, 512, device, torch.float32)              # z: 17280 rows of 4 KiB
    arguments, _ = p.leaves()
    arguments["shared"] = []
    kept = stated_bytes(4096, 4, 8, 512, (), 4)

    def train(steps: int, outputs: list):
        for _ in range(steps):
            y = mok.moe(**arguments)
            y.backward(p.dy)
            outputs.append(y)

    train(1, [])
    one, many = peak_bytes(device, lambda: train(1, [])), peak_bytes(device, lambda: train(4, []))
    assert kept > 60 * 2**20 and one > 0.5 * kept and many < one + 0.5 * kept


@pytest.mark.parametrize("routing", ["one expert takes all", "balanced"])
def test_case_H1(device, routing):
    """DeepEP#99, prime-rl#2368, vllm#57262: out of memory under skew, or a buffer of T * E: 134 million elements here, of any type too much."""
    T, K, E, H, I = 131072, 1, 1024, 16, 8 if device == "cpu" else 16
    ids = torch.full((T, K), 400) if routing == "one expert takes all" else random_routes(T, K, 64, seed=1) * 16
    p = problem(ids, E, H, I, device, torch.float32 if device == "cpu" else torch.bfloat16)
    p.changed(**{name: p[name][:64] for name in ("x", "topk_ids", "topk_weights")}, dy=p.dy[:64]).run()
    assert peak_bytes(device, lambda: p.run(poisoned=False)) < T * E
    # ... and the bound holds because the fault would be seen: a boolean of that size is
    assert peak_bytes(device, lambda: torch.ones(T, E, dtype=torch.bool, device=device)) > 0.99 * T * E


def test_case_H1_skew_needs_no_more_than_balance(device):
    """H1's other half: memory is the worst case's from the start, so no routing needs more than another (up to what the C library keeps)."""
    T, K, E, H, I = 8192, 4, 8, 256, 128
    balanced = problem(random_routes(T, K, E), E, H, I, device, torch.float32 if device == "cpu" else torch.bfloat16)
    balanced.run()
    bound = peak_bytes(device, lambda: balanced.run(poisoned=False))
    assert 16 * 2**20 < bound < 2**29
    for ids in (torch.full((T, K), 0), torch.full((T, K), E - 1), torch.arange(T * K).view(T, K) // (T * K - 5)):
        skewed = balanced.changed(topk_ids=ids.to(device))
        assert peak_bytes(device, lambda p=skewed: p.run(poisoned=False)) < 1.25 * bound


def test_case_H3(monkeypatch):
    """torchtitan#998: a workspace for each layer. 48 layers compute in the scratch of one, and its size can be asked for."""
    monkeypatch.setattr(runtime, "rows", RowBuffers())           # other tests' are not given up at once
    x = torch.randn(2000, 64, requires_grad=True)                # several tiles for every expert: buffers are nearly as large as they get
    layers = [mok.MoE(mok.MoEConfig(64, 96, 4, 2, layer_index=i)) for i in range(48)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)                     # with several, which thread has met which task yet, and holds scratch for it, is left to chance
    try:
        (layers[0](x).sum() + layers[0].aux_loss).backward()
        one, rows = runtime.tiles.num_bytes(), runtime.rows.num_bytes()
        for layer in layers:
            x = layer(x)
        x.sum().backward()
    finally:
        torch.set_num_threads(threads)
    assert 0 < one <= runtime.tiles.num_bytes() < 1.25 * one      # routes differ, so tiles do, a little; 48 times as much would be the fault
    assert 0 < rows <= runtime.rows.num_bytes() < 2 * rows
    for layer in layers:                                          # nor does a layer hold one
        assert not [name for name, value in vars(layer).items() if isinstance(value, torch.Tensor) and value.numel() > 64]


# ---- I ----

def run_python(code: str, **environment: str | None) -> subprocess.CompletedProcess:
    variables = {name: value for name, value in os.environ.items() if environment.get(name, "") is not None}
    variables |= {name: value for name, value in environment.items() if value is not None} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_case_I1(tmp_path):
    """megablocks#78, #130, Megatron-LM#2541: the build needed torch or nvcc. An isolated build, where neither is, gives one pure wheel with every
    module of the package in it."""
    source = tmp_path / "source"
    tracked = subprocess.run(["git", "ls-files", "-z", "--", "mok", "pyproject.toml", "README.md", "LICENSE"], cwd=ROOT, capture_output=True, text=True)
    names = [n for n in tracked.stdout.split("\0") if n] if tracked.returncode == 0 else [
        str(f.relative_to(ROOT)) for f in (*ROOT.glob("mok/**/*.py"), ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "LICENSE")]
    for name in names:
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--wheel-dir", str(tmp_path / "wheels"), str(source)]
    environment = {name: value for name, value in os.environ.items() if name not in ("CUDA_HOME", "CUDA_PATH")} | {"PATH": _path_without_nvcc()}
    built = subprocess.run(build, capture_output=True, text=True, env=environment, timeout=300)
    if built.returncode and "No matching distribution found for setuptools" in built.stderr:       # no registry: this Python's setuptools, without torch
        (tmp_path / "refuse" / "torch").mkdir(parents=True)
        (tmp_path / "refuse" / "torch" / "__init__.py").write_text("raise ImportError('the build must not need torch')")
        built = subprocess.run([*build, "--no-build-isolation"], capture_output=True, text=True, env=environment | {"PYTHONPATH": str(tmp_path / "refuse")},
                               timeout=300)
    assert built.returncode == 0, built.stderr[-2000:]
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
        metadata = archive.read(next(n for n in packed if n.endswith(".dist-info/METADATA"))).decode()
        archive.extractall(tmp_path / "installed")
    missing = {n for n in names if n.startswith("mok/") and n.endswith(".py")} - packed
    assert not missing, f"modules left out of the wheel: {sorted(missing)}"
    assert not [n for n in packed if n.endswith((".so", ".pyd", ".cu", ".o"))] and "Requires-Dist: torch" in metadata
    where = subprocess.run([sys.executable, "-c", "import sys; sys.path.insert(0, sys.argv[1]); import mok; print(mok.__file__)", str(tmp_path / "installed")],
                           capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert where.stdout.startswith(str(tmp_path)), where.stderr


def _path_without_nvcc() -> str:
    return os.pathsep.join(folder for folder in os.environ["PATH"].split(os.pathsep) if not os.path.exists(os.path.join(folder, "nvcc")))


WITHOUT_TRITON = """
import importlib.machinery, sys
find = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = lambda name, *more: None if name.split(".")[0] == "triton" else find(name, *more)
import mok, torch
layer = mok.MoE(mok.MoEConfig(64, 32, 4, 2, shared_intermediate_sizes=(16,)), device=DEVICE, dtype=torch.bfloat16)
assert not torch.distributed.is_initialized() and (DEVICE == "cuda" or not torch.cuda.is_initialized())
x = torch.randn(5, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
(layer(x).sum() + layer.aux_loss).backward()
assert torch.isfinite(x.grad).all()
import mok.cli.main, mok.lm.model
assert not [m for m in sys.modules if m.split(".")[0] == "triton"]
print(mok.engine_for(x, 32))
try:
    mok.engine_for(x.to("meta"))
except NotImplementedError as error:
    print(error)
"""


def test_case_I2():
    """DeepSpeed#1583, sglang#13468: importing asserted a GPU or CUDA_HOME. Without GPU, CUDA_HOME and triton it imports and trains on the CPU; a
    device that nothing serves is named."""
    done = run_python(f"DEVICE = 'cpu'{WITHOUT_TRITON}", CUDA_VISIBLE_DEVICES="", CUDA_HOME=None, CUDA_PATH=None)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["cpu", "x.device=meta is not supported; use a CPU or a CUDA device"]


@pytest.mark.gpu
def test_case_I2_a_gpu_without_triton():
    """The kind of I2 on a GPU: without triton the plain engine and the plain plan run, and each says why, once."""
    done = run_python(f"DEVICE = 'cuda'{WITHOUT_TRITON}")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[0] == "torch_gpu"
    said = [line for line in done.stderr.splitlines() if "Triton" in line]
    assert len(said) == 2 and "engine" in said[0] and "plan" in said[1], done.stderr


def external_names(tree: ast.Module, packages: tuple[str, ...]) -> set[str]:
    """Dotted names of `packages` that a module uses unguarded: imports, and attribute chains on imported names.

    Left out are probes: what stands in a `try` that catches AttributeError or ImportError, and beside a getattr or hasattr in `or` or `if else`.
    """
    def probes(node: ast.AST) -> bool:
        return any(isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id in ("getattr", "hasattr") for n in ast.walk(node))

    guarded: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            caught = {n.id for handler in node.handlers if handler.type for n in ast.walk(handler.type) if isinstance(n, ast.Name)}
            if caught & {"AttributeError", "ImportError", "Exception"}:
                guarded |= {inner for statement in node.body for inner in ast.walk(statement)}
        elif isinstance(node, (ast.IfExp, ast.If)) and probes(node.test):
            branches = [node.body, node.orelse] if isinstance(node, ast.IfExp) else [*node.body, *node.orelse]
            guarded |= {inner for branch in branches for inner in ast.walk(branch)}
        elif isinstance(node, ast.BoolOp) and probes(node.values[0]):
            guarded |= {inner for value in node.values[1:] for inner in ast.walk(value)}
    aliases: dict[str, str] = {}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] in packages:
                    aliases[name.asname or name.name.split(".")[0]] = name.name if name.asname else name.name.split(".")[0]
                    if node not in guarded:
                        found.add(name.name)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module and node.module.split(".")[0] in packages:
            for name in node.names:
                aliases[name.asname or name.name] = f"{node.module}.{name.name}"
                if node not in guarded:
                    found.add(f"{node.module}.{name.name}")
    for node in ast.walk(tree):
        parts, inner = [], node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in aliases and node not in guarded:
            found.add(".".join([aliases[inner.id], *reversed(parts)]))
    return found


def resolve(name: str) -> object:
    """The object of a dotted name, importing modules on the way; stops at the first thing that is no module or class."""
    parts = name.split(".")
    thing: object = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], start=2):
        if not hasattr(thing, part):
            try:
                importlib.import_module(".".join(parts[:i]))
            except ImportError:
                raise AttributeError(f"{name}: {'.'.join(parts[:i - 1])} has no {part}") from None
        thing = getattr(thing, part)
        if not (isinstance(thing, type) or hasattr(thing, "__path__") or type(thing).__name__ == "module"):
            return thing
    return thing


def test_case_I4():
    """megablocks#159, unsloth#4744: an API that another version lacks, met in step 1. Every name of torch and triton that the package uses exists in the
    installed versions, or stands behind a probe."""
    missing = []
    packages = ("torch", "triton") if importlib.util.find_spec("triton") else ("torch",)
    checked = 0
    for file in sorted((ROOT / "mok").rglob("*.py")):
        for name in external_names(ast.parse(file.read_text()), packages):
            if name.startswith("torch.ops."):
                continue                                                    # filled by registration, not by import
            checked += 1
            try:
                resolve(name)
            except (AttributeError, ImportError) as error:
                missing.append(f"{file.relative_to(ROOT)}: {error}")
    assert checked > 100
    assert not missing, "\n".join(missing)
