"""The packaged model as one that thinks: a template that begins a thought in the prompt, and the
marks of a thought as tokens, so that a bias towards `CLOSE` ends it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

TEMPLATE = Path(__file__).with_name("thinking.jinja")
CLOSE = 1900
"""The id of `</think>`; behind the vocabulary the model has rows without a token."""
LESS = 30
"""The id of `<`, with which a call begins."""
ENDS = {"logit_bias": {str(CLOSE): 12, str(LESS): -100}}
"""Fields that end the thought of a story behind a few words, and keep the model from calls that it
may make."""
_OPEN = 1899
_DEMO = Path(__file__).parents[2] / "tools" / "demo" / "demo_model"


def make(folder: Path) -> None:
    """Writes the model to `folder`, unless it is there."""
    if not (folder / "config.json").exists():
        half = folder.with_name(f"{folder.name}.half")
        shutil.rmtree(half, ignore_errors=True)
        shutil.copytree(_DEMO, half)
        vocabulary = json.loads((half / "tokenizer.json").read_text())
        vocabulary["added_tokens"] += [
            {"id": at, "content": mark, "special": False, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False}
            for at, mark in ((_OPEN, "<think>"), (CLOSE, "</think>"))]
        (half / "tokenizer.json").write_text(json.dumps(vocabulary))
        half.rename(folder)
