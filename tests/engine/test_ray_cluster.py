"""A cluster on a real Ray, where there is one: what `make cluster` shows."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ray_cluster.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: extra cluster")
def test_streams_go_on_when_a_machine_or_ray_dies() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--streams", "4", "--tokens", "120"],
                          capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("ok ")]
    assert len(rows) == 14 and "4 of 4 streams have equal tokens" in done.stdout
