"""What an outsider tries, counted: each test here says how often it tried, and what it found.

`make adversary` gives the tests their full size (`--adversary FILE`, which is where the counts go);
`make test` runs the same tests with a slice of it. A file is an area, or a folder: its name is the
table's row.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
TRIED = pytest.StashKey[int]()
Tried = Callable[..., None]
Amount = Callable[[int, int], int]


class Area:
    """The counts of one file, or of a folder."""

    def __init__(self) -> None:
        self.attempts = self.held = self.tests = self.failed = 0
        self.mended: set[str] = set()
        self.seconds = 0.0

    def row(self) -> dict[str, Any]:
        return {"attempts": self.attempts, "held": self.held, "tests": self.tests,
                "failed": self.failed, "mended": sorted(self.mended),
                "seconds": round(self.seconds, 1)}


class Tally:
    """Attempts by area. Those of a failed test did not hold, any of them: it cannot say which."""

    def __init__(self) -> None:
        self.areas: dict[str, Area] = defaultdict(Area)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report: Any = yield
        if HERE not in item.path.parents:
            return report
        first = item.path.relative_to(HERE).parts[0]
        area = self.areas[first.removeprefix("test_").removesuffix(".py")]
        area.seconds += report.duration
        if report.failed:
            area.failed += 1
        elif report.when == "call" and report.passed:
            area.tests += 1
            tried = item.stash.get(TRIED, 1)
            area.attempts += tried
            area.held += tried
        if report.when == "call":
            if report.failed:
                area.attempts += item.stash.get(TRIED, 1)
            area.mended |= {text for mark in item.iter_markers("mended") for text in mark.args}
        return report

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        out = terminalreporter
        out.section("adversary")
        out.line(f"{'area':<12}{'attempts':>10}{'held':>10}{'mended':>8}{'seconds':>9}")
        for name, area in sorted(self.areas.items()):
            out.line(f"{name:<12}{area.attempts:>10,}{area.held:>10,}{len(area.mended):>8}"
                     f"{area.seconds:>9.0f}")

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = {name: area.row() for name, area in sorted(self.areas.items())}
        path.write_text(json.dumps(rows, indent=1) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--adversary"):
        config.pluginmanager.register(Tally(), "tally")


def pytest_sessionfinish(session: pytest.Session) -> None:
    tally = session.config.pluginmanager.get_plugin("tally")
    if isinstance(tally, Tally):
        tally.write(Path(session.config.getoption("--adversary")))


@pytest.fixture
def tried(request: pytest.FixtureRequest) -> Tried:
    """Counts attempts: `tried()` for one, `tried(1000)` for as many. A test that never calls it
    counts as one."""
    def count(attempts: int = 1) -> None:
        request.node.stash[TRIED] = request.node.stash.get(TRIED, 0) + attempts

    return count


@pytest.fixture
def amount(request: pytest.FixtureRequest) -> Amount:
    """`amount(slice, full)`: how much of something to do in `make test`, and in `make
    adversary`."""
    whole = bool(request.config.getoption("--adversary"))
    return lambda slice_, full: full if whole else slice_
