"""What fails for what it skips (`helpers_skips`): runs of pytest in a folder of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
from helpers_skips import SkipReport

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(SkipReport(), "skips")
"""
TEST = """
import pytest

def test_runs():
    pass

@pytest.mark.parametrize("number", [1, 2])
def test_is_skipped(number):
    pytest.skip({why!r})
"""


def run(folder: Path, why: str, ci: str, *flags: str) -> tuple[int, str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(TEST.format(why=why))
    (folder / "pytest.ini").write_text("[pytest]\n")
    helpers = str(Path(__file__).parents[1] / "helpers")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *flags, "."], cwd=folder,
        env=os.environ | {"CI": ci, "PYTHONPATH": helpers, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, text=True)
    return done.returncode, done.stdout


@pytest.mark.parametrize("flags", [(), ("-p", "xdist", "-n", "1")], ids=["alone", "xdist"])
def test_what_could_be_installed_fails_continuous_integration(
        tmp_path: Path, flags: tuple[str, ...]) -> None:
    code, said = run(tmp_path, "no browser", "true", *flags)
    assert code == 1 and "    2 no browser" in said and "1 passed, 2 skipped" in said


@pytest.mark.parametrize("why", ["no CUDA device", "this processor has no AMX"])
def test_hardware_that_is_not_there_does_not(tmp_path: Path, why: str) -> None:
    code, said = run(tmp_path, why, "true")
    assert code == 0 and f"    2 {why}" in said


def test_elsewhere_nothing_fails(tmp_path: Path) -> None:
    code, said = run(tmp_path, "no browser", "")
    assert code == 0 and "    2 no browser" in said
