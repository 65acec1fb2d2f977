"""Hypothesis profiles: state machines take their number of examples from them.

The quick one walks the same ways each time; the battery looks for new ones.
"""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("quick", max_examples=450, derandomize=True, database=None)
settings.register_profile("battery", max_examples=5000)
settings.load_profile("quick")
