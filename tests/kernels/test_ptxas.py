"""What Triton's compiler makes of the kernels that serve: benchmarks/ptxas.py, without a device."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers_benchmarks import BENCHMARKS, benchmark
from helpers_compile import alone

pytest.importorskip("triton")
device, rules = benchmark("ptxas_device"), benchmark("ptxas_rules")
KERNELS = Path(__file__).parents[2] / "kernels" / "triton"
DECISIVE = {"_decode", "_extend", "_inputs", "_rule", "_prepare", "_walk", "_conv", "_product",
            "_skinny", "_int8"}
"""Attention, recurrent layers and products: most of a step's time."""
NOT_SERVED = {"_uniform", "_words"}
"""Tests alone launch these."""


def checked(tmp_path: Path, *arguments: str, seconds: float) -> list[dict[str, Any]]:
    """Every kernel compiled; fails with the faults, where there are any."""
    to = tmp_path / "ptxas.json"
    alone([str(BENCHMARKS / "ptxas.py"), *arguments, "--json", str(to)], tmp_path / "cache",
          seconds)
    return list(json.loads(to.read_text())["kernels"])


@pytest.mark.slow
def test_decisive_kernels_keep_their_rules(tmp_path: Path) -> None:
    found = checked(tmp_path, "--quick", "--jobs", "1", seconds=230)
    assert {row["sm"] for row in found} == {90} and not any(sum(row["spills"]) for row in found)
    assert {"_decode", "_extend", "_rule", "_product"} <= {row["kernel"] for row in found}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_every_kernel_on_every_device(tmp_path: Path, capability: int) -> None:
    assert len(checked(tmp_path, "--sm", str(capability), seconds=3500)) > 80


@pytest.mark.parametrize("name", ["ptxas", "ptxas-3.6.0"])
def test_what_takes_the_time_spills_by_neither_triton(name: str) -> None:
    """The figures that lie in benchmarks/results, of the Triton here and a GPU machine's."""
    rows = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())["kernels"]
    met = [row for row in rows if row["sm"] == 90 and row["kernel"] in DECISIVE]
    assert {row["kernel"] for row in met} == DECISIVE
    assert [(row["case"], row["kernel"], row["spills"]) for row in met if any(row["spills"])] == []


def test_every_kernel_that_is_launched_has_a_rule() -> None:
    launched = {name for file in KERNELS.glob("*.py")
                for name in re.findall(r"\b(_\w+)\[(?:\(|grid)", file.read_text())}
    assert launched - NOT_SERVED == {rule.kernel for rule in rules.RULES}


LAUNCHED = """
from ptxas_device import Standin
from triton.runtime.jit import JITFunction

Standin().install()
launched = set()
JITFunction.run = lambda this, *_, **__: launched.add(this.__name__)

from ptxas_cases import cases

for case in cases():
    case.launch()
print(*launched)
"""


def test_every_kernel_with_a_rule_is_launched_by_a_case(tmp_path: Path) -> None:
    """Nothing is compiled."""
    launched = alone(["-c", LAUNCHED], tmp_path, 200).split()
    assert set(launched) == {rule.kernel for rule in rules.RULES}, "benchmarks/ptxas_cases.py"


@pytest.mark.parametrize(("capability", "warps", "registers", "shared", "programs"), [
    (90, 4, 128, 72192, 3), (90, 4, 168, 0, 3), (90, 4, 169, 0, 2), (90, 8, 255, 0, 1),
    (90, 1, 255, 128, 8), (90, 4, 32, 0, 16), (90, 2, 24, 0, 32), (89, 4, 32, 0, 12),
    (89, 4, 96, 49 * 1024, 2), (89, 4, 96, 50 * 1024, 1), (89, 8, 96, 100 * 1024, 0),
    (80, 4, 96, 100 * 1024, 1), (100, 4, 96, 100 * 1024, 2)])
def test_programs_of_an_sm(
    capability: int, warps: int, registers: int, shared: int, programs: int
) -> None:
    """As CUDA's occupancy calculator has them."""
    assert device.programs(capability, warps, registers, shared) == programs


def test_spills_are_counted_in_bytes() -> None:
    sass = """
        /*0a10*/                   STL.64 [R1+0x8], R4 ;
        /*0a20*/              @!P0 LDL.LU R7, [R1] ;
        /*0a30*/                   LDL.128 R8, [R1+0x10] ;
        /*0a40*/                   STG.E.128 desc[UR4][R2.64], R8 ;"""
    assert device.spilled(sass) == (8, 20)


def test_fp64_is_detected() -> None:
    ptx = """
	cvt.f64.s64 %fd1, %rd1;
	@%p1 mul.f64 	%fd2, %fd1, 0d3CA0000000000000;
	add.f32 %f1, %f2, %f3;
	.reg .f64 %fd<3>;"""
    assert len(device.DOUBLE.findall(ptx)) == 2


GOOD = device.Facts("_decode", 4, 128, (0, 0), 0, 72192, 3, "mma", 0)


@pytest.mark.parametrize(("change", "said"), [
    ({}, []), ({"spills": (8, 12)}, ["spills 8 / 12 bytes a thread"]),
    ({"programs": 2}, ["2 programs an SM, 3 are meant"]), ({"warps": 8}, ["8 warps, 4 are meant"]),
    ({"products": "fma"}, ["products: fma, mma is meant"]),
    ({"products": ""}, ["products: none, mma is meant"]),
    ({"doubles": 3}, ["3 instructions of fp64"]),
    ({"kernel": "_new"}, ["no rule says what it is meant to be"])])
def test_faults_are_named(change: dict[str, Any], said: list[str]) -> None:
    assert rules.faults("decode Llama-3.1-8B, q1, 1 sequences", 90, GOOD._replace(**change)) == said


def test_a_spill_that_is_known_may_not_grow() -> None:
    own = GOOD._replace(kernel="_prepare", programs=2)
    for known in rules.EXCEPTIONS:
        case, most = f"delta_extend {known.case or 'Qwen3.5-27B'}", (known.stored, known.loaded)
        if known.kernel == "_exact":
            case = f"exact attention {known.case}"
        other = 100 if known.capability == 90 else 90
        for capability, spills, said in (
                (known.capability, most, False), (known.capability, (most[0] + 4, most[1]), True),
                (known.capability, (most[0], most[1] + 4), True), (other, most, True)):
            found = rules.faults(case, capability, own._replace(kernel=known.kernel, spills=spills))
            assert any("spills" in fault for fault in found) == said, (known, capability, spills)


def test_kernels_that_do_not_fit_are_reported() -> None:
    big = GOOD._replace(shared=132096, programs=0)
    assert rules.faults("decode Llama-3.1-8B, q1", 89, big) == [
        "132,096 bytes of shared memory do not fit 101,376", "0 programs an SM, 2 are meant"]


def test_a_wide_product_is_each_device_s_own() -> None:
    own = GOOD._replace(kernel="_extend", warps=8, programs=1)
    for capability, products in ((80, "mma"), (89, "mma"), (90, "wgmma"), (100, "tcgen05")):
        for other in ("mma", "wgmma", "tcgen05", "fma", ""):
            found = rules.faults("extend Llama-3.1-8B", capability, own._replace(products=other))
            right = other == products or capability == 100 and other == "mma"
            assert bool(found) == (not right), (capability, other)
