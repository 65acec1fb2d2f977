"""Why tests were skipped. Hardware that a machine has not is a reason; what set-up could have
installed is none, and fails a run of continuous integration (`CI=true`): a test that is skipped
everywhere is a test that nobody runs."""

from __future__ import annotations

import os
import re
from collections import Counter

import pytest

HARDWARE = re.compile(r"no CUDA device|Triton compiles for CUDA|for the interpreter|"
                      r"there is a CUDA device|this (processor|CPU) has no ")
"""How the reasons begin that any run may have."""


def reasons(skipped: list[pytest.TestReport | pytest.CollectReport]) -> Counter[str]:
    """Reason -> how many tests, or files of tests, were skipped for it."""
    where = (report.longrepr for report in skipped)
    return Counter(place[2].removeprefix("Skipped: ") for place in where
                   if isinstance(place, tuple))


def refused(found: Counter[str]) -> Counter[str]:
    """What fails this run of `reasons`."""
    if os.environ.get("CI") != "true":
        return Counter()
    return Counter({why: count for why, count in found.items() if not HARDWARE.match(why)})


class SkipReport:
    """A plugin of the process that prints: skips by reason, and their verdict."""

    def _found(self, config: pytest.Config) -> Counter[str]:
        return reasons(config.pluginmanager.get_plugin("terminalreporter").stats.get("skipped", []))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.OK and refused(self._found(session.config)):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        found = self._found(terminalreporter.config)
        if not found:
            return
        terminalreporter.section("skipped")
        wrong = refused(found)
        for why, count in found.most_common():
            terminalreporter.line(f"{count:5} {why}", red=why in wrong)
        if wrong:
            terminalreporter.line("CI=true: these reasons fail the run: " + "; ".join(wrong),
                                  red=True)
