"""The compile check: finds multiply loops and spills in SASS, and every kernel compiles for sm_90a within its budget, without a GPU."""
from __future__ import annotations

import pytest

pytest.importorskip("triton.experimental.gluon")

from mok.engines.hopper import backward_launch, compile_check, launch

# A task loop (L_x_1) around a multiply loop (L_x_2); the barrier's retry code (L_x_9) stands behind both and jumps back into the inner one.
SASS = """
        /*0000*/  MOV R1, R2 ;
.L_x_1:
        /*0010*/  {task} ;
.L_x_2:
        /*0020*/  SYNCS.PHASECHK P0, [R1] ;
        /*0030*/  @!P0 BRA `(.L_x_9) ;
.L_x_3:
        /*0040*/  HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0050*/  {inner} ;
        /*0060*/  @P1 BRA `(.L_x_2) ;
        /*0070*/  STG.E [R2], R3 ;
        /*0080*/  @P2 BRA `(.L_x_1) ;
        /*0090*/  EXIT ;
.L_x_9:
        /*00a0*/  {retry} ;
        /*00b0*/  SYNCS.PHASECHK P0, [R1] ;
        /*00c0*/  @!P0 BRA `(.L_x_9) ;
        /*00d0*/  BRA `(.L_x_3) ;
"""


def sass(task: str = "NOP", inner: str = "NOP", retry: str = "NOP") -> str:
    return SASS.replace("{task}", task).replace("{inner}", inner).replace("{retry}", retry)


def test_spills_are_counted_in_multiply_loops_only():
    assert compile_check.spills_in_multiply_loops(sass()) == 0
    assert compile_check.spills_in_multiply_loops(sass(task="STL [R1+0x4], R7")) == 0, "the loop over tasks is not a multiply loop"
    assert compile_check.spills_in_multiply_loops(sass(inner="LDL R7, [R1+0x4]")) == 1
    assert compile_check.spills_in_multiply_loops(sass(inner="@!P0 STL.64 [R1], R8")) == 1
    assert compile_check.spills_in_multiply_loops(sass(retry="LDL.LU R7, [R1]")) == 1, "the retry code runs inside the loop"


def test_multiply_loop_is_found_once_with_its_retry_code():
    (loop,) = compile_check.multiply_loops(sass())
    assert sum("HGMMA" in line for line in loop) == 1 and not any("STG" in line or "EXIT" in line for line in loop)
    assert sum("PHASECHK" in line for line in loop) == 2


def test_natural_loops_need_a_dominating_head():
    assert compile_check.natural_loops([[1], [2], [1, 3], []]) == [frozenset({1, 2})]
    assert compile_check.natural_loops([[1, 2], [2], [1, 3], []]) == [], "two entries: no natural loop"


def test_budget_breaches_are_named():
    good = {"kernel": "forward_a", "registers": 168, "spills": 0, "stack_bytes": 64, "shared_bytes": 230000, "mma_instructions": 8}
    assert compile_check.problems([good]) == []
    for change in ({"spills": 1}, {"stack_bytes": 72}, {"shared_bytes": 232449}, {"mma_instructions": 0}):
        (problem,) = compile_check.problems([good | change])
        assert problem.startswith("forward_a: ")


TICKET = """
        /*0000*/  BSSY B0, `(.L_x_4) ;
        /*0010*/  @P0 BRA `(.L_x_2) ;
        /*0020*/  VOTEU.ANY UR4, UPT, PT ;
        /*0030*/  {atomic} ;
.L_x_2:
        /*0040*/  {meet} ;
        /*0050*/  UIADD3 UR22, UR22, 0x1, URZ ;
.L_x_3:
        /*0060*/  @P2 BRA `(.L_x_3) ;
        /*0070*/  BSYNC B0 ;
.L_x_4:
        /*0080*/  EXIT ;
"""


def test_a_warp_that_does_not_meet_again_behind_an_atomic_is_found():
    atomic = "@P2 ATOMG.E.ADD.STRONG.GPU PT, R34, desc[UR46][R26.64+0x3c], R17"
    (found,) = compile_check.split_warps(TICKET.replace("{atomic}", atomic).replace("{meet}", "S2UR UR5, SR_CgaCtaId"))
    assert "L_x_2" in found and atomic in found
    assert compile_check.split_warps(TICKET.replace("{atomic}", atomic).replace("{meet}", "BSYNC B0")) == []
    assert compile_check.split_warps(TICKET.replace("{atomic}", atomic).replace("{meet}", "WARPSYNC.ALL")) == []
    whole = f"SHFL.UP P2, R2, R35, 0x10, RZ ;\n        /*0038*/  {atomic}"
    assert compile_check.split_warps(TICKET.replace("{atomic}", whole).replace("{meet}", "NOP")) == [], "whole warps branch around a prefix sum"
    assert compile_check.split_warps(TICKET.replace("{atomic}", "IADD3 R1, R2, R3, RZ").replace("{meet}", "NOP")) == [], "no atomic"


def test_unknown_target():
    with pytest.raises(ValueError, match="target"):
        compile_check.compile_report("sm_80")


# Of the binaries that make z again, and of those of several ranks, the plain one is compiled here; activation, or both together, is all that others differ by.
# `mok verify --compile-only` has all.
LEFT_OUT = ("backward_swiglu_recompute_ranks", "forward_no_grad_ranks_waves",
            *(f"backward_{act}_{kind}" for act in ("clamped", "geglu", "reglu")
              for kind in ("recompute", "ranks", "recompute_ranks", "ranks_waves")))


@pytest.fixture(scope="module")
def report():
    try:
        return compile_check.compile_report("sm_90a", LEFT_OUT)
    except FileNotFoundError as error:
        pytest.skip(f"Triton's package has no CUDA tools here: {error}")


@pytest.mark.slow
def test_every_variant_compiles_to_multiplies_that_fit_the_chip(report):
    names = [entry["kernel"] for entry in report]
    forward = [entry for entry in report if "forward" in entry["kernel"]]
    again = [name for name in names if "recompute" in name]
    alone = [name for name in names if "ranks" not in name and name not in again]
    assert again == ["backward_swiglu_recompute"]
    assert set(LEFT_OUT) < {name for name, _, _ in [*launch.group_variants(), *backward_launch.variants(), *backward_launch.group_variants()]}
    assert {"backward_swiglu_ranks", "backward_swiglu_ranks_waves"} < set(names)
    assert len(set(names)) == len(names)
    assert len(alone) <= 8 and len(names) - len(alone) - 1 <= 8, "at most eight binaries for a precision, on one rank or several"
    assert len(forward) == 7 and "forward_train_ranks_waves" in names and all("backward" in name for name in names if "forward" not in name)
    assert all(set(entry) == {"kernel", "registers", "spills", "stack_bytes", "shared_bytes", "mma_instructions"} for entry in report)
    for entry in report:
        assert entry["registers"] == 168 and entry["shared_bytes"] <= compile_check.MAX_SHARED_BYTES and entry["mma_instructions"] >= 8, entry


@pytest.mark.slow
def test_forward_is_within_its_budget(report):
    """Every variant, with whichever Triton is here: it has been met with 3.6, which is what has run on a GPU, and with 3.9."""
    assert compile_check.problems([entry for entry in report if "forward" in entry["kernel"]]) == []


@pytest.mark.slow
def test_backward_is_within_its_budget(report):
    """With whichever Triton is here: met with 3.6, which is what has run on a GPU, and with 3.9."""
    assert compile_check.problems([entry for entry in report if "backward" in entry["kernel"]]) == []
