"""The packaged model as one that fills in the middle: three tokens stand for the places."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

_DEMO = Path(__file__).parents[2] / "tools" / "demo" / "demo_model"
_TOKENS = {"prefix": "introduce", "suffix": "goodbye", "middle": "thanks"}
"""The last tokens of its vocabulary."""


def make(folder: Path) -> None:
    """Writes the model to `folder`, unless it is there."""
    if not (folder / "config.json").exists():
        half = folder.with_name(f"{folder.name}.half")
        shutil.rmtree(half, ignore_errors=True)
        shutil.copytree(_DEMO, half)
        file = half / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"fim_tokens": _TOKENS}))
        half.rename(folder)
