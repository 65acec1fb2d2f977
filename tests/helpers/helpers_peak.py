"""What a process holds at its peak while it loads a model."""

from __future__ import annotations

import os
import subprocess
import sys

RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""For glibc: blocks that are freed go back to the system. What it keeps of them by itself depends
on how threads meet, 0 to 100 MB here, and would hide what the loader holds."""
LIBRARIES = 24 << 20
"""Bytes that code takes when it is first run."""
IMPORTS = """
import sys, threading, time
from pathlib import Path
import torch
from actorium.actors.config.tree import Config, ModelConfig
from actorium.gpu.models.registry import load_model
from actorium.gpu.passes.pass_manager import PassManager
from actorium.gpu.plan.weight_bytes import weight_bytes
from actorium.kernels.cpu.native_library import library
"""
WATCHED = """
def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    own = dict(line.split(":", 1) for line in lines)
    return 1024 * sum(int(own[name].split()[0]) for name in ("RssAnon", "RssFile"))

def watch():
    while not done:
        seen.append(held())
        time.sleep(0.001)

library()
torch.ones(64, 64).bfloat16() @ torch.ones(64, 64).bfloat16()
done, seen, before = [], [], held()
threading.Thread(target=watch, daemon=True).start()
"""
COUNTED = """
done.append(True)
print(weight_bytes(model.shape), max(seen) - before)
"""


def peak_of(load: str, *arguments: str, before: str = "") -> tuple[int, int]:
    """(bytes of weights that the plan counts, bytes that the process held at its peak beyond what
    it held before), in memory of its own and in mapped files together. load: Python that makes
    `model`; before: what it needs beside IMPORTS, which is not counted. arguments: its
    `sys.argv[1:]`."""
    code = "\n".join((IMPORTS, before, WATCHED, load, COUNTED))
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True,
                          check=True, env={**os.environ, **RETURNED})
    planned, peak = map(int, done.stdout.split())
    return planned, peak
