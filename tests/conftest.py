"""Hypothesis profiles: state machines take their number of examples from them.

The quick one walks the same ways each time; the battery looks for new ones.

Without a CUDA device Triton's kernels run in its interpreter, which is chosen before its import.
"""

from __future__ import annotations

import os

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("quick", max_examples=300, derandomize=True, database=None)
settings.register_profile("battery", max_examples=5000)
settings.load_profile("quick")
