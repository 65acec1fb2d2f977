"""Small drawn pictures with questions, and the tiny model of images that was trained on them."""

from __future__ import annotations

from pathlib import Path

PICTURE_MODEL = Path(__file__).parent / "picture_model"
"""The packaged checkpoint, a tiny Qwen3-VL."""
