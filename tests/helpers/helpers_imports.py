"""Measures the cost of an import, in a separate interpreter."""

from __future__ import annotations

import subprocess
import sys


def loaded_by(code: str) -> set[str]:
    """Top-level modules a fresh interpreter has after running `code`, its start left out."""
    script = ("import sys; before = set(sys.modules)\n" + code + "\n"
              "print(*{name.split('.')[0] for name in set(sys.modules) - before})")
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True,
                          check=True, timeout=60)
    return set(done.stdout.split())
