"""Tests that are run by forks of one process (`helpers_forks`): what is said of them, and that none
is left out. Runs of pytest in a folder of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

FILES = {
    "test_plain.py": """
import os, sys, warnings
import pytest

def test_passes(tmp_path, record_property):
    print("kept to itself")
    assert not list(tmp_path.iterdir())
    record_property("cell", "yes")

@pytest.mark.parametrize("number", range(3))
def test_fails_once(number):
    print("said before")
    assert number != 1

def test_is_skipped():
    pytest.skip("no CUDA device")

@pytest.mark.xfail(reason="known")
def test_is_known():
    assert False

def test_warns():
    warnings.warn("take care", DeprecationWarning)
""",
    "test_dies.py": """
import os, signal

def test_before():
    pass

def test_dies():
    os.kill(os.getpid(), signal.SIGKILL)

def test_behind():
    pass
""",
    "test_fixtures.py": """
import os
import pytest

PARENT = os.getpid()

@pytest.fixture(scope="module")
def opened():
    yield
    with open("closed", "a") as file:
        file.write("once ")

@pytest.mark.parametrize("number", range(4))
def test_uses(opened, number):
    assert os.getppid() == PARENT and not os.path.exists("closed")
""",
}


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\njunit_family = xunit1\n")
    helpers = str(Path(__file__).parents[1] / "helpers")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rfEsx", "-p", "no:cacheprovider",
         "-p", "helpers_forks", "--basetemp", "temporary", *flags, "."], cwd=folder,
        env=os.environ | {"PYTHONPATH": helpers, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, text=True)


def test_every_test_is_run_once_and_reported(tmp_path: Path) -> None:
    """Also those behind one that ends its process."""
    done = run(tmp_path, "--forks", "3", "--junitxml", "report.xml")
    assert "2 failed, 10 passed, 1 skipped, 1 xfailed, 1 warning" in done.stdout, done.stdout
    assert done.returncode == 1 and not done.stderr
    assert "the process that ran this test ended with -9" in done.stdout
    assert "DeprecationWarning: take care" in done.stdout
    assert "assert 1 != 1" in done.stdout and done.stdout.count("\nsaid before\n") == 1
    assert "kept to itself" not in done.stdout
    cases = [*ElementTree.parse(tmp_path / "report.xml").getroot().iter("testcase")]
    names = [case.get("name") for case in cases]
    assert len(names) == len(set(names)) == 14
    assert [one.get("value") for case in cases for one in case.iter("property")] == ["yes"]
    assert (tmp_path / "closed").read_text() == "once "


def test_the_first_failure_can_end_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, "--forks", "2", "-x")
    assert done.returncode == 1
    assert "stopping after 1 failures" in done.stdout, done.stdout


def test_a_choice_of_tests(tmp_path: Path) -> None:
    done = run(tmp_path, "--forks", "2", "-k", "uses or passes")
    assert re.search(r"^5 passed, 9 deselected", done.stdout, re.M), done.stdout
    assert not done.returncode
