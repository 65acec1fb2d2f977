"""Which models take images and videos beside text."""

from __future__ import annotations

from actorium.actors.config.tree import Config
from actorium.actors.errors import BadModel
from actorium.actors.models import model_dir

WITH_TOWER = ("Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration",
              "Qwen3VLMoeForConditionalGeneration")
"""Architectures with a vision tower (`gpu/families/qwen_vl_config.py`)."""
PREPROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""One of them says how images are prepared; without one they cannot be."""


def takes_media(config: Config) -> bool:
    """Whether the engine of this configuration takes images and videos. What is wrong with a model
    is left to those who read all of it."""
    own = config.model
    if own.language_model_only or own.skip_tokenizer:
        return False
    try:
        path = model_dir.resolve(own.model)
        names = model_dir.read_config(path).get("architectures")
    except BadModel:
        return False
    return (isinstance(names, list) and bool(names) and names[0] in WITH_TOWER
            and any((path / name).is_file() for name in PREPROCESSORS))
