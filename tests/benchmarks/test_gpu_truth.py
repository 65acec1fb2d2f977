"""`make gpu-check` tells kernels that are wrong from those that are slow, and times none that is
wrong."""

from __future__ import annotations

import argparse
import faulthandler
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers_benchmarks import BENCHMARKS, benchmark
from torch import Tensor

battery, case, ceilings, child, machine, plan, record, report = (
    benchmark(f"gpucheck.{name}") for name in (
        "battery", "case", "ceilings", "child", "machine", "plan", "record", "report"))


class Device(machine.Double):
    """Whose results need be as near as a device's."""

    toy = False


LIMITS = SimpleNamespace(copy_gbs=200.0)


def of(run: Callable[[], Any], reference: Callable[[], Any], kernel: str = "elementwise",
       dtype: str = "bf16", **more: Any) -> Any:
    return case.Case(run, case.Truth(kernel, dtype, reference), 1e6, **more)


def error(own: Any, interpreted: bool = False) -> float:
    found: float = case.compared(own, interpreted)[0]
    return found


def right(own: Any, interpreted: bool = False) -> bool:
    return error(own, interpreted) <= case.compared(own, interpreted)[1]


def test_results_are_held_against_their_reference() -> None:
    want = torch.randn(5, 3, 64)
    rounded = want.to(torch.bfloat16)
    assert right(of(lambda: rounded, lambda: want))
    for at in ((0, 0), (4, 2)):  # any vector
        got = rounded.clone()
        got[at] *= 1.05
        own = of(lambda got=got: got, lambda: want)
        assert not right(own) and error(own) == pytest.approx(0.05, rel=0.1)
    got = rounded.clone()
    got[2, 1, 7] = torch.nan
    assert error(of(lambda: got, lambda: want)) == torch.inf


def test_all_results_count() -> None:
    want = torch.randn(4, 8)
    assert error(of(lambda: (want, (want * 2,)), lambda: (want, want))) == pytest.approx(1.0)
    with pytest.raises(AssertionError, match="1 results, 2 references"):
        case.compared(of(lambda: want, lambda: (want, want)), False)
    with pytest.raises(AssertionError, match=r"\[4, 8\] numbers, \[8, 4\] in the reference"):
        case.compared(of(lambda: want, lambda: want.reshape(8, 4)), False)


def test_tokens_differ_by_their_number() -> None:
    want = torch.arange(100)
    got = want.clone()
    got[:2] = 0
    for kernel, allowed in (("draw", True), ("likeliest", False)):
        own = of(lambda: got, lambda: want, kernel, "i64")
        assert right(own) is allowed and error(own) == pytest.approx(0.01)


def test_a_reference_sees_what_the_first_run_begins_with() -> None:
    state = torch.ones(2, 4)

    def step() -> Tensor:
        return state.mul_(3.0)

    assert error(of(step, lambda: state * 3)) == 0
    assert error(of(step, lambda: state * 3)) == 0


def test_the_interpreter_may_cut_digits_off() -> None:
    want = torch.randn(4, 64)
    own = of(lambda: want * 1.05, lambda: want, "product", "fp8")
    assert right(own, True) and not right(own)
    own = of(lambda: want * 1.05, lambda: want, "product", "bf16")
    assert not right(own, True)


def measured(own: Any, tmp_path: Path, us: float = 10.0, group: str = "products",
             spoiled: bool = False) -> tuple[dict[str, Any], list[Any]]:
    """(what is recorded of the group, what was timed)"""
    timed: list[Any] = []

    def timer(run: Any) -> float:
        timed.append(run)
        return us if run is own.run else 8.0

    kept = record.Record(tmp_path / f"{us}.json", group)
    bench = child.Bench(kept, plan.Group(group, (plan.Row("case"),), 1, 9), Device(), 60.0, 0.0,
                        ["case=wrong"] if spoiled else [])
    try:
        ceilings.measure(bench, SimpleNamespace(us=timer), "case", lambda: own, LIMITS)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return kept.group(), timed


def test_what_is_wrong_is_not_timed(tmp_path: Path) -> None:
    want = torch.randn(4, 64)
    own = of(lambda: want, lambda: want, peers={"torch": lambda: own.run})
    found, timed = measured(own, tmp_path, spoiled=True)
    assert timed == []
    assert found["rows"] == [{"name": "case", "verdict": "wrong", "error": pytest.approx(1.0),
                              "tolerance": 0.01}]
    assert found["skipped"] == [{"name": "case", "kind": "wrong",
                                 "why": "an error of 1, 0.01 is allowed"}]
    page = report.page({"part": "kernels", "toy": False, "facts": {},
                        "groups": {"products": found}})
    assert "## Wrong\n\n- products: case: an error of 1, 0.01 is allowed" in page
    assert "| case | wrong | 1 | 0.01 |" in page


def test_what_is_right_may_be_slow(tmp_path: Path) -> None:
    want = torch.randn(4, 64)
    peer: Callable[[], Any] = lambda: None  # noqa: E731
    own = of(lambda: want, lambda: want, peers={"torch": lambda: peer})
    for us, verdict in ((8.0, "right"), (8.3, "right"), (10.0, "slow")):
        found, timed = measured(own, tmp_path, us)
        row, = found["rows"]
        assert row["verdict"] == verdict and timed == [own.run, peer]
    assert row["why"] == "torch takes 80% of its time"


def test_a_missed_aim_is_slow() -> None:
    name = report.LARGE[0]
    missed = report.too_slow("paged decode", {"name": name, "share": 0.5, "peer": "x",
                                             "ratio": 2.0})
    assert missed == ("paged decode attention, 200 MB and more: share of bandwidth: 50.0%, "
                      "wanted >= 85.0%")
    for group, row in (("paged decode", {"name": name, "share": 0.9}),
                       ("paged decode", {"name": "1 x 4096", "share": 0.5}),
                       ("gdn", {"name": name, "share": 0.5})):
        assert report.too_slow(group, row) == ""


def test_a_planted_fault_fails_the_call(tmp_path: Path) -> None:
    """Of a kernel that is walked in the interpreter: the others of its group are right."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu.py"), "kernels", "--toy", "--group", "elementwise",
         "--fault", "elementwise/silu_mul=wrong", "--out", str(tmp_path)],
        capture_output=True, text=True)
    own = json.loads((tmp_path / "gpu-kernels.json").read_text())["groups"]["elementwise"]
    assert done.returncode == 1, done.stdout + done.stderr
    verdicts = {row["name"]: row["verdict"] for row in own["rows"]}
    assert verdicts.pop("silu_mul") == "wrong" and len(verdicts) == 3
    assert "wrong" not in verdicts.values()
    assert [(each["name"], each["kind"]) for each in own["skipped"]] == [("silu_mul", "wrong")]


def test_tokens_that_differ_fail_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                          ) -> None:
    """And what decodes them is not timed. Groups are measured in this process."""
    beside = "graphs beside eager, 256 x 1024"
    faults = {"tokens": f"{plan.TINY.name}=wrong", "decode": f"{beside}=wrong"}
    planned = {group.name: group for group in plan.contact()}

    def measure(rows: Any, name: str, seconds: float, _: Any) -> tuple[int, str]:
        options = argparse.Namespace(memory=0.0, row_limit=0.0, fault=[faults[name]])
        return child.run(rows, planned[name], seconds, True, options), ""

    monkeypatch.setattr(child, "faulthandler", Mock())  # pytest has its own
    monkeypatch.setattr(battery, "in_a_process", measure)
    code = battery.run(argparse.Namespace(part="contact", group=[*faults], toy=True, seconds=900.0,
                                          out=tmp_path, carried=False, scratch=tmp_path))
    groups = json.loads((tmp_path / "gpu-contact.json").read_text())["groups"]
    assert code == 1
    assert [(row["verdict"], row["error"]) for row in groups["tokens"]["rows"]] == [("wrong", 1)]
    decode = {row["name"]: row["verdict"] for row in groups["decode"]["rows"]}
    assert decode.pop(beside) == "wrong" and "256 x 1024" not in decode and len(decode) == 3
    assert {(each["name"], each["kind"]) for each in groups["decode"]["skipped"]} == {
        (beside, "wrong"), ("256 x 1024", "wrong")}
