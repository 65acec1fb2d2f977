"""The command lines by which `make gpu-check` starts tests: each finds some, on a machine that has
nothing but what it must have and what is carried there."""

from __future__ import annotations

import re
from typing import Any

import pytest
from helpers_benchmarks import BENCHMARKS, benchmark
from helpers_collecting import collected, modules_beside

ROOT = BENCHMARKS.parent
plan, suites, outcomes = (benchmark(f"gpucheck.{name}") for name in ("plan", "suites", "outcomes"))
THERE = ("torch", "triton", "transformers", "numpy", "setuptools", "pip")
"""What a machine with a GPU has by itself."""
ALL = {suite: f"{part}/{group.name}" for part, make in plan.PARTS.items() for group in make()
       for suite in group.suites}


def carried() -> list[str]:
    """Names of the packages that `make gpu-wheels` fetches."""
    script = (ROOT / "tools" / "gpu_wheels.sh").read_text()
    return re.findall(r"[\w-]+", re.findall(r"packages=\(([^)]*)\)", script)[0])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, tuple[int, str, int]]:
    """(exit code, what was said, tests that were selected) of each suite."""
    folder = tmp_path_factory.mktemp("outcomes")
    files = {suite: folder / f"{at}.outcomes" for at, suite in enumerate(ALL)}
    lines = [{"command": suites.command(suite), "environment": suites.environment(suite, file)}
             for suite, file in files.items()]
    said = collected(lines, modules_beside([*carried(), *THERE]) - {"actorium"}, ROOT)
    return {suite: (code, text, outcomes.read(file)["selected"]) for (suite, file), (code, text)
            in zip(files.items(), said, strict=True)}


def test_every_suite_of_every_call_is_collected(found: dict[Any, tuple[int, str, int]]) -> None:
    assert len(found) > 25
    wrong = [f"{ALL[suite]}/{suite.name}: exit code {code}\n{said}"
             for suite, (code, said, _) in found.items() if code]
    assert not wrong, "\n".join(wrong)


def test_no_suite_selects_nothing(found: dict[Any, tuple[int, str, int]]) -> None:
    assert [suite.name for suite, (_, _, selected) in found.items() if not selected] == []


def test_what_the_device_lacks_is_what_it_is_brought() -> None:
    """The packages that are fetched for it are those that are missed there."""
    script = (ROOT / "tools" / "gpu_check.sh").read_text()
    missed = re.findall(r'-c "\$missing" (pyzmq[^)]*)\)', script)[0]
    assert re.findall(r"[\w-]+", missed) == carried()
