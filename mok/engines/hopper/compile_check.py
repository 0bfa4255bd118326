"""Compiles every variant of the Hopper kernels for a target, with no GPU, and reads registers, stack and spills from what ptxas made.

`spills` counts STL and LDL instructions inside loops that contain HGMMA: the innermost natural loops with HGMMA, found from the SASS's
control flow by dominators. (Code between a backward branch and its target would not do: a barrier's retry code stands far outside its loop.)
"""
from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any

MAX_STACK_BYTES = 64          # outside the multiply loops
MAX_SHARED_BYTES = 232448     # 227 KB, what one block may have on sm_90
TARGETS = {"sm_90a": 90}


def compile_report(target: str = "sm_90a", leave_out: Sequence[str] = ()) -> list[dict[str, Any]]:
    """One entry for each compiled variant: {kernel, registers, spills, stack_bytes, shared_bytes, mma_instructions}.

    Names hold `forward` or `backward`, `ranks` where the launch communicates with other ranks, and `recompute` where backward makes z again; those
    in `leave_out` are not compiled.

    Raises ValueError for a target that these kernels are not written for, RuntimeError where Triton or its CUDA tools are missing.
    """
    if target not in TARGETS:
        raise ValueError(f"{target=} must be one of {tuple(TARGETS)}")
    return [describe(name, kernel) for name, kernel in compile_variants(TARGETS[target], leave_out)]


def problems(report: list[dict[str, Any]]) -> list[str]:
    """What in a report breaks the budget, one line each; empty = good."""
    found = []
    for entry in report:
        if entry["spills"]:
            found.append(f"{entry['kernel']}: {entry['spills']} spill instructions in multiply loops")
        if entry["stack_bytes"] > MAX_STACK_BYTES:
            found.append(f"{entry['kernel']}: {entry['stack_bytes']} bytes of stack, at most {MAX_STACK_BYTES}")
        if entry["shared_bytes"] > MAX_SHARED_BYTES:
            found.append(f"{entry['kernel']}: {entry['shared_bytes']} bytes of shared memory, at most {MAX_SHARED_BYTES}")
        if not entry["mma_instructions"]:
            found.append(f"{entry['kernel']}: no HGMMA instruction")
    return found


def compile_variants(capability: int, leave_out: Sequence[str] = ()) -> list[tuple[str, Any]]:
    """(name, Triton's compiled kernel) of every production variant but those in `leave_out`."""
    try:
        from .backward_launch import group_variants as backward_group_variants
        from .backward_launch import variants as backward_variants
        from .launch import group_variants
        from .launch import variants as forward_variants
    except ImportError as error:
        raise RuntimeError(f"the Hopper kernels need Triton with Gluon, 3.6 or newer: {error}") from error
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import compile as triton_compile

    compiled = []
    for name, source, options in [*forward_variants(), *group_variants(), *backward_variants(), *backward_group_variants()]:
        if name not in leave_out:
            compiled.append((name, triton_compile(source, target=GPUTarget("cuda", capability, 32), options=options)))
    return compiled


def describe(name: str, kernel: Any) -> dict[str, Any]:
    """The report's entry of one compiled kernel. Raises RuntimeError for a binary that `split_warps` finds fault with."""
    usage, sass = disassemble(kernel.asm["cubin"])
    if split := split_warps(sass):
        raise RuntimeError(f"{name}: ptxas lets a warp go on in two halves behind an atomic, where the sources have one: {split}")
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if match is None:
        raise RuntimeError(f"cuobjdump printed no resource usage for {name}: {usage.strip()[:200]}")
    return {"kernel": name, "registers": int(match.group(1)), "spills": spills_in_multiply_loops(sass), "stack_bytes": int(match.group(2)),
            "shared_bytes": int(kernel.metadata.shared), "mma_instructions": len(re.findall(r"\bHGMMA\b", sass))}


def disassemble(cubin: bytes) -> tuple[str, str]:
    """(cuobjdump's resource usage, nvdisasm's SASS) of a cubin, by the tools that Triton carries."""
    import triton

    tools = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file:
            file.write(cubin)
        commands = ([f"{tools}/cuobjdump", "--dump-resource-usage", path], [f"{tools}/nvdisasm", path])
        outputs = [subprocess.run(command, capture_output=True, text=True) for command in commands]
    for output in outputs:
        if output.returncode:
            raise RuntimeError(f"{' '.join(output.args)} failed: {output.stderr.strip()[:300]}")
    return outputs[0].stdout, outputs[1].stdout


def spills_in_multiply_loops(sass: str) -> int:
    """STL and LDL instructions in the innermost loops that contain HGMMA."""
    return sum(len(re.findall(r"\b(?:STL|LDL)\b", line)) for loop in multiply_loops(sass) for line in loop)


def multiply_loops(sass: str) -> list[list[str]]:
    """Instructions of each multiply loop: a natural loop that contains HGMMA and no smaller loop that does (so not the loop over tasks)."""
    blocks, successors = basic_blocks(sass)
    multiplying = {number for number, block in enumerate(blocks) if any("HGMMA" in line for line in block)}
    loops = [loop for loop in natural_loops(successors) if loop & multiplying]
    inner = [loop for loop in loops if not any(other < loop for other in loops)]
    return [[line for number in sorted(loop) for line in blocks[number]] for loop in sorted(inner, key=sorted)]


def basic_blocks(sass: str) -> tuple[list[list[str]], list[list[int]]]:
    """(instructions of each basic block, its successors) of the first function of nvdisasm's output; calls and returns are not followed."""
    lines: list[str] = []
    label_at: dict[str, int] = {}
    for raw in sass.splitlines():
        label = re.match(r"\.(L_\w+|L\w*):", raw.strip())
        code = re.match(r"\s*/\*[0-9a-f]+\*/\s+([^.].*?);", raw)
        if label:
            label_at[label.group(1)] = len(lines)
        elif code:
            lines.append(code.group(1).strip())
    starts = {0, *label_at.values()} | {at + 1 for at, line in enumerate(lines) if re.search(r"\b(BRA|BRX|EXIT|RET|JMP|BREAK)\b", line)}
    ordered = sorted(start for start in starts if start < len(lines))
    block_of = {start: number for number, start in enumerate(ordered)}
    blocks = [lines[start:end] for start, end in zip(ordered, [*ordered[1:], len(lines)], strict=True)]
    successors = []
    for number, block in enumerate(blocks):
        targets = [block_of[label_at[name]] for name in re.findall(r"\.(L_\w+)", block[-1]) if label_at.get(name, len(lines)) < len(lines)]
        jumps = re.search(r"\b(BRA|BRX|EXIT|RET|JMP)\b", block[-1]) is not None
        conditional = re.match(r"@!?U?P\d", block[-1]) is not None
        if (not jumps or conditional) and number + 1 < len(blocks):
            targets.append(number + 1)
        successors.append(targets)
    return blocks, successors


def split_warps(sass: str) -> list[str]:
    """Atomics by one lane behind which the warp does not meet again at once: '(branch) (atomic)' for each.

    ptxas puts a branch around such an atomic, and its target must be a BSYNC or a WARPSYNC. Seen with 12.8: in front of a loop the two join that
    loop's region, the halves of the warp meet only behind it, and what lies between, warp barriers and uniform registers' arithmetic included, runs
    twice. A branch around a prefix sum (SHFL.UP), which ptxas makes of an atomic by all lanes, is taken by whole warps.
    """
    lines = [code[1].strip() for raw in sass.splitlines() if (code := re.match(r"\s*(\.L_\w+:)", raw) or re.match(r"\s*/\*[0-9a-f]+\*/\s+([^.].*?);", raw))]
    found: list[str] = []
    for i, line in enumerate(lines):
        if not re.search(r"\b(ATOMG?|REDG?)\b", line):
            continue
        start = next((j for j in range(i - 1, -1, -1) if re.search(r":$|\b(BSSY|BSYNC|BRA|BAR|EXIT)\b", lines[j])), -1)
        branch = re.match(r"@!?P\d BRA `\((\.L_\w+)\)", lines[start]) if start >= 0 else None
        if branch is None or f"{branch[1]}:" not in lines:
            continue
        target = lines.index(f"{branch[1]}:")
        inside = lines[start + 1:target]
        if target < i or any(re.search(r":$|\bSHFL\.UP\b", other) for other in inside):
            continue
        if not lines[target + 1].startswith(("BSYNC", "WARPSYNC")):
            found.append(f"({lines[start]}) ({line})")
    return found


def natural_loops(successors: list[list[int]]) -> list[frozenset[int]]:
    """Loops of a control-flow graph entered at node 0: for each edge u -> v with v dominating u, v and all nodes that reach u without v."""
    order: list[int] = []
    seen = {0}
    stack = [(0, iter(successors[0]))]
    while stack:
        node, children = stack[-1]
        child = next((c for c in children if c not in seen), None)
        if child is None:
            order.append(node)
            stack.pop()
        else:
            seen.add(child)
            stack.append((child, iter(successors[child])))
    rank = {node: number for number, node in enumerate(order)}          # postorder: the entry has the largest number
    predecessors: dict[int, list[int]] = {node: [] for node in order}
    for node in order:
        for child in successors[node]:
            predecessors[child].append(node)
    dominator = {0: 0}                                                  # Cooper, Harvey, Kennedy: A Simple, Fast Dominance Algorithm
    changed = True
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            best: int | None = None
            for parent in predecessors[node]:
                if parent in dominator:
                    best = parent if best is None else _common(dominator, rank, parent, best)
            if best is not None and dominator.get(node) != best:
                dominator[node] = best
                changed = True
    merged: dict[int, set[int]] = {}
    for node in order:
        for head in successors[node]:
            if _dominates(dominator, head, node):
                body = merged.setdefault(head, {head})
                work = [node]
                while work:
                    inside = work.pop()
                    if inside not in body:
                        body.add(inside)
                        work += predecessors[inside]
    return [frozenset(body) for body in merged.values()]


def _common(dominator: dict[int, int], rank: dict[int, int], a: int, b: int) -> int:
    while a != b:
        while rank[a] < rank[b]:
            a = dominator[a]
        while rank[b] < rank[a]:
            b = dominator[b]
    return a


def _dominates(dominator: dict[int, int], head: int, node: int) -> bool:
    while node != head and node != dominator[node]:
        node = dominator[node]
    return node == head
