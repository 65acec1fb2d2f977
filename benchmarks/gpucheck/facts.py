"""What every result is labelled with: versions, driver, clocks, date. No torch here."""

from __future__ import annotations

import platform
import shutil
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = ("torch", "triton", "transformers", "numpy", "fla-core")
ASKED = {"driver": "driver_version", "sm_mhz": "clocks.sm", "sm_mhz_most": "clocks.max.sm",
         "memory_mhz": "clocks.mem", "watts": "power.draw", "watts_most": "power.limit",
         "celsius": "temperature.gpu"}


def versions() -> dict[str, Any]:
    """Of what the figures depend on, and the date."""
    found: dict[str, Any] = {"date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
                             "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def readings() -> dict[str, Any]:
    """Clocks, power and temperature at this moment; empty where nothing tells of them."""
    if shutil.which("nvidia-smi") is None:
        return {}
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(ASKED.values())}",
             "--format=csv,noheader,nounits", "--id=0"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    if done.returncode:
        return {}
    values = [value.strip() for value in done.stdout.strip().splitlines()[0].split(",")]
    return {name: _number(value) for name, value in zip(ASKED, values, strict=False)}


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # a driver's version has two dots

