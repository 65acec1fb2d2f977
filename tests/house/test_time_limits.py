"""What outlasts a test's time limit (`helpers_timeouts`): pytest runs in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

WAITING = """
import asyncio, threading
import pytest, uvloop

pytestmark = pytest.mark.timeout(0.3)

def forever():
    threading.Event().wait()

async def busy():
    while True:
        await asyncio.sleep(0)

@pytest.fixture
def waits_at_its_end():
    yield
    forever()

def test_loop_that_is_idle():
    uvloop.run(asyncio.Event().wait())

def test_loop_that_is_busy():
    uvloop.run(busy())

def test_what_cleans_up():
    try:
        forever()
    finally:
        forever()

def test_fixture_of_one_that_fails(waits_at_its_end):
    assert not waits_at_its_end
    raise ValueError("as told")

def test_next():
    pass
"""


def test_nothing_in_python_outlasts_it(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(WAITING)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    helpers = str(Path(__file__).parents[1] / "helpers")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "pytest_timeout",
         "-p", "helpers_timeouts", "."], cwd=tmp_path, timeout=100, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": helpers, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    assert "4 failed, 1 passed, 1 error" in done.stdout, done.stdout
